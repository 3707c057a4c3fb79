"""Exercises of notebook 05, second part: a learning rate that rises and falls, and a gradient with a longest length."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from grpo_edu import optimizers
from grpo_edu.checks.core import Call, Exercise, Mistake, Part, call
from grpo_edu.checks.objective import numbers
from grpo_edu.config import GRPOConfig

# ---- learning_rate_share ----


def learning_rate_share(step: int, warmup_steps: int, max_steps: int) -> float:
    """The package's, for the schedule "linear"."""
    config = GRPOConfig(lr_scheduler_type="linear", warmup_steps=warmup_steps, max_steps=max_steps)
    return optimizers.learning_rate_share(step, config)


def _rising(rng: random.Random) -> Call:
    warmup = rng.choice([4, 5, 10])
    return call(rng.randrange(1, warmup), warmup, rng.choice([20, 40]))


def _falling(rng: random.Random) -> Call:
    warmup, total = rng.choice([4, 5, 10]), rng.choice([20, 40])
    return call(rng.randrange(warmup + 1, total), warmup, total)


def _borders(rng: random.Random) -> Call:
    warmup, total = rng.choice([4, 5]), rng.choice([20, 40])
    return call(*rng.choice([(0, warmup, total), (warmup, warmup, total), (0, 0, total), (3, 0, total)]))


def _share_by_min(step: int, warmup_steps: int, max_steps: int) -> float:
    falling = (max_steps - step) / (max_steps - warmup_steps)
    return min(step / warmup_steps, falling) if warmup_steps else falling


def _share_by_interpolation(step: int, warmup_steps: int, max_steps: int) -> float:
    places, heights = [0, warmup_steps, max_steps], [0.0, 1.0, 0.0]
    if not warmup_steps:
        places, heights = places[1:], heights[1:]
    return float(np.interp(step, places, heights))


def _share_by_counting(step: int, warmup_steps: int, max_steps: int) -> float:
    share = 0.0 if warmup_steps else 1.0
    for place in range(step):
        share += 1 / warmup_steps if place < warmup_steps else -1 / (max_steps - warmup_steps)
    return share


def _share_with(rising: Callable[[int, int], float], falling: Callable[[int, int, int], float]) -> Callable:
    """A wrong answer: rising(step, warmup), then falling(step, warmup, total)."""

    def wrong(step: int, warmup_steps: int, max_steps: int) -> float:
        return rising(step, warmup_steps) if step < warmup_steps else falling(step, warmup_steps, max_steps)

    return wrong


def _up(step: int, warmup: int) -> float:
    return step / warmup


def _down(step: int, warmup: int, total: int) -> float:
    return (total - step) / (total - warmup)


check_learning_rate_share = Exercise(
    "learning_rate_share",
    learning_rate_share,
    parts=(
        Part("while it rises", 1, _rising),
        Part("while it falls", 1, _falling),
        Part("the first step, the highest point, no warm-up", 1, _borders, draws=40),
    ),
    mistakes=(
        Mistake("the first step counts as 1", "Steps are counted from 0: the first one takes 0.",
                _share_with(lambda step, warmup: (step + 1) / warmup, _down)),
        Mistake("it falls from the first step on", "Where it is highest, at step `warmup_steps`, the share is 1.",
                _share_with(_up, lambda step, warmup, total: 1 - step / total)),
        Mistake("the warm-up is not taken off the remaining steps", "It falls over max_steps − warmup_steps steps.",
                _share_with(_up, lambda step, warmup, total: 1 - (step - warmup) / total)),
        Mistake("it reaches 0 one step too early", "It would be 0 at step `max_steps`, which is never taken.",
                _share_with(_up, lambda step, warmup, total: (total - 1 - step) / (total - 1 - warmup))),
        Mistake("it falls along a cosine", "In a straight line.",
                _share_with(_up, lambda *steps: float(1 - np.cos(np.pi * _down(*steps))) / 2)),
        Mistake("it falls from 1 at step 0", "The first steps take a part of the learning rate only.",
                lambda step, warmup, total: 1 - step / total),
        Mistake("it falls first and rises then", "It begins at 0.",
                lambda step, warmup, total: 1 - learning_rate_share(step, warmup, total)),
        Mistake("it never falls", "After the warm-up it goes down to 0.", _share_with(_up, lambda *steps: 1.0)),
        Mistake("there is no warm-up", "The first steps take a part of the learning rate only.",
                _share_with(lambda step, warmup: 1.0, _down)),
        Mistake("without a warm-up, step 0 divides by 0", "It rises *before* step warmup_steps, which may be 0: <, not "
                "<=.", lambda step, warmup, total: _up(step, warmup) if step <= warmup else _down(step, warmup, total)),
        Mistake("without a warm-up it divides by 0", "warmup_steps may be 0: then it falls from the first step on.",
                lambda step, warmup, total: min(step / warmup, _down(step, warmup, total))),
    ),
    right=(_share_by_min, _share_by_interpolation, _share_by_counting),
)  # fmt: skip


# ---- clipped_gradients ----

Gradients = list[Tensor]


def clipped_gradients(gradients: Gradients, max_norm: float) -> Gradients:
    """The gradients of all weights, scaled by one factor where their common length exceeds `max_norm`."""
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    factor = min(1.0, max_norm / norm.item())
    return [factor * gradient for gradient in gradients]


def _common_length(gradients: Gradients) -> float:
    return torch.cat([gradient.flatten() for gradient in gradients]).norm().item()


def _some_gradients(longest: tuple[float, float]) -> Callable[[random.Random], Call]:
    def draw(rng: random.Random) -> Call:
        gradients = [numbers(rng, 2, 2), numbers(rng, 3), numbers(rng, 1)]
        return call(gradients, round(_common_length(gradients) * rng.uniform(*longest), 2))

    return draw


def _clipped_by_torch(gradients: Gradients, max_norm: float) -> Gradients:
    weights = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient.clone()
    nn.utils.clip_grad_norm_(weights, max_norm)
    return [weight.grad for weight in weights if weight.grad is not None]


def _clipped_by_squares(gradients: Gradients, max_norm: float) -> Gradients:
    square = torch.stack([(gradient**2).sum() for gradient in gradients]).sum()
    if square <= max_norm**2:
        return gradients
    return [gradient * max_norm / square.sqrt() for gradient in gradients]


def _clipped_by_clamp(gradients: Gradients, max_norm: float) -> Gradients:
    length = torch.tensor(_common_length(gradients))
    return [gradient / length * length.clamp(max=max_norm) for gradient in gradients]


def _scaled(length_of: Callable[[Gradients], float]) -> Callable[[Gradients, float], Gradients]:
    """A wrong answer that measures another length."""
    return lambda gradients, max_norm: [min(1.0, max_norm / length_of(gradients)) * one for one in gradients]


def _in_place(gradients: Gradients, max_norm: float) -> Gradients:
    factor = min(1.0, max_norm / _common_length(gradients))
    for gradient in gradients:
        gradient *= factor
    return gradients


check_clipped_gradients = Exercise(
    "clipped_gradients",
    clipped_gradients,
    parts=(
        Part("longer than allowed", 2, _some_gradients((0.2, 0.8))),
        Part("short enough", 1, _some_gradients((1.2, 2.0))),
    ),
    mistakes=(
        Mistake("each gradient is clipped by itself", "One factor for all, or the direction of the step changes.",
                lambda gradients, max_norm: [clipped_gradients([one], max_norm)[0] for one in gradients]),
        Mistake("values are cut off", "Scale all by one factor: the direction stays.",
                lambda gradients, max_norm: [one.clamp(-max_norm, max_norm) for one in gradients]),
        Mistake("short gradients are stretched", "What is short enough stays as it is.",
                lambda gradients, max_norm: [max_norm / _common_length(gradients) * one for one in gradients]),
        Mistake("lengths are added up", "Squares are: the length of the whole is the root of their sum.",
                _scaled(lambda gradients: sum(one.norm().item() for one in gradients))),
        Mistake("the square is taken for the length", "The root of the sum of squares.",
                _scaled(lambda gradients: _common_length(gradients) ** 2)),
        Mistake("the largest length is taken for that of the whole", "All gradients together are one long vector.",
                _scaled(lambda gradients: max(one.norm().item() for one in gradients))),
        Mistake("they get the length 1", "The length `max_norm`: factor max_norm / norm.",
                lambda gradients, max_norm: [one / _common_length(gradients) for one in gradients]),
        Mistake("values are added up, not their squares", "A length is the root of the sum of squares.",
                _scaled(lambda gradients: sum(one.abs().sum().item() for one in gradients))),
        Mistake("long ones are left as they are", "The factor is at *most* 1: min, not max.",
                lambda gradients, max_norm: [max(1, max_norm / _common_length(gradients)) * one for one in gradients]),
        Mistake("the gradients are changed in place", "Return new ones.", _in_place),
    ),
    right=(_clipped_by_torch, _clipped_by_squares, _clipped_by_clamp),
)  # fmt: skip
