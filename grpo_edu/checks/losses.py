"""Exercises on the family of losses: reduction, the first loss, one ratio per completion, and a checked gradient."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from grpo_edu.checks.core import Call, Exercise, Mistake, Part, call
from grpo_edu.checks.inputs import Polynomial, gradient_of, mask_of, numbers
from grpo_edu.checks.trained import TrainedExercise, trained_part
from grpo_edu.losses import importance_ratio, reduce_loss

# ---- aggregate ----


def aggregate(per_token_loss: Tensor, mask: Tensor, loss_type: str, max_completion_length: int) -> Tensor:
    """The package's `reduce_loss` for "grpo", "dapo" and "dr_grpo"."""
    return reduce_loss(per_token_loss, mask, loss_type=loss_type, max_completion_length=max_completion_length)


TYPES = ("grpo", "dapo", "dr_grpo")


def _losses_for(loss_type: str) -> Callable[[random.Random], Call]:
    def draw(rng: random.Random) -> Call:
        lengths = [rng.randrange(1, 4), rng.randrange(1, 4), 5]
        return call(numbers(rng, 3, 5), mask_of(lengths, 5), loss_type, rng.choice([6, 8, 10]))

    return draw


check_aggregate = TrainedExercise(
    aggregate,
    parts=(
        Part("grpo", 2, _losses_for("grpo")),
        Part("dapo", 1, _losses_for("dapo")),
        Part("dr_grpo", 1, _losses_for("dr_grpo")),
        Part(
            "the gradient of each",
            1,
            lambda rng: replace(_losses_for(rng.choice(TYPES))(rng), ask=gradient_of),
            draws=9,
        ),
        trained_part("aggregate"),
    ),
    mistakes={
        "padding counts": Mistake(
            "Multiply by the mask, and divide by what is left.",
            lambda loss, mask, *rest: aggregate(loss, torch.ones_like(mask), *rest),
        ),
        "padding counts in the number of tokens": Mistake(
            "Divide by the number of tokens with mask 1: of the row, or of all.",
            lambda loss, mask, loss_type, limit: (
                (loss * mask).mean() if loss_type != "dr_grpo" else aggregate(loss, mask, loss_type, limit)
            ),
        ),
        "the number of rows is missing": Mistake(
            '"grpo" is a *mean* over the rows, and "dr_grpo" divides by B as well as by the limit.',
            lambda loss, mask, loss_type, limit: (
                aggregate(loss, mask, loss_type, limit) * (1 if loss_type == "dapo" else len(mask))
            ),
        ),
        "the limit is missing": Mistake(
            '"dr_grpo" divides by B · max_completion_length.',
            lambda loss, mask, loss_type, limit: aggregate(
                loss, mask, loss_type, 1 if loss_type == "dr_grpo" else limit
            ),
        ),
        "the width of this batch is taken for the limit": Mistake(
            "Dr. GRPO divides by a constant that no batch changes: max_completion_length.",
            lambda loss, mask, loss_type, limit: aggregate(loss, mask, loss_type, mask.shape[1]),
        ),
        "all tokens weigh alike, whatever was asked": Mistake(
            '"grpo" takes the mean of each row first.',
            lambda loss, mask, loss_type, limit: aggregate(loss, mask, "dapo", limit),
        ),
        "rows weigh alike, whatever was asked": Mistake(
            '"dapo" counts tokens, not rows.', lambda loss, mask, loss_type, limit: aggregate(loss, mask, "grpo", limit)
        ),
        "the mean of a column is taken, not of a row": Mistake(
            "A row is a completion: dim=1.",
            lambda loss, mask, loss_type, limit: (
                ((loss * mask).sum(dim=0) / mask.sum(dim=0)).mean()
                if loss_type == "grpo"
                else aggregate(loss, mask, loss_type, limit)
            ),
        ),
        "the sum is not divided": Mistake(
            "Divide by what the loss type names.", lambda loss, mask, loss_type, limit: (loss * mask).sum()
        ),
    },
)


# ---- first_loss ----


def first_loss(advantages: list[float], lengths: list[int]) -> tuple[float, float, str]:
    """(the loss of "grpo", that of "dapo", which completions were longer), where every ratio is 1."""
    of_grpo = -sum(advantages) / len(advantages)
    of_dapo = -sum(a * length for a, length in zip(advantages, lengths, strict=True)) / sum(lengths)
    return of_grpo, of_dapo, longer(of_dapo)


def longer(of_dapo: float) -> str:
    """What the first loss of "dapo" tells."""
    if abs(of_dapo) < 1e-6:
        return "neither"
    return "good" if of_dapo < 0 else "bad"


def _one_group(rng: random.Random, size: int = 4) -> tuple[list[float], list[int]]:
    """Rewards of 0 and 1 minus their mean, stretched; lengths that all differ."""
    right = rng.randrange(1, size)
    rewards = [1.0] * right + [0.0] * (size - right)
    stretch = rng.choice([1.0, 2.0])
    advantages = [stretch * (reward - right / size) for reward in rng.sample(rewards, size)]
    return advantages, rng.sample(range(2, 30), size)


def _different_lengths(rng: random.Random) -> Call:
    """Every second time the fewer completions are the longer ones, and the more have more tokens together."""
    fewer = rng.random() < 0.5
    while True:
        advantages, lengths = _one_group(rng)
        verdict = longer(first_loss(advantages, lengths)[1])
        if verdict != "neither" and (not fewer or verdict != _longer_together(advantages, lengths)[2]):
            return call(advantages, lengths)


def _equal_lengths(rng: random.Random) -> Call:
    """Thirds do not add up to 0: what comes out is a rounding error."""
    while True:
        advantages, lengths = _one_group(rng, 3)
        if first_loss(advantages, lengths[:1] * 3)[1]:
            return call(advantages, lengths[:1] * 3)


def _first_with(of_dapo: Callable[[list[float], list[int]], float]) -> Callable:
    """Another loss of "dapo", and what it would tell."""

    def wrong(advantages, lengths):
        return first_loss(advantages, lengths)[0], of_dapo(advantages, lengths), longer(of_dapo(advantages, lengths))

    return wrong


def _tilt(advantages: list[float], lengths: list[int]) -> float:
    return sum(a * length for a, length in zip(advantages, lengths, strict=True))


def _told(change: Callable[[float, float, str], tuple]) -> Callable:
    """A wrong answer made of the right one."""
    return lambda advantages, lengths: change(*first_loss(advantages, lengths))


def _longer_together(advantages, lengths):
    good, bad = (sum(n for a, n in zip(advantages, lengths, strict=True) if sign * a > 0) for sign in (1, -1))
    verdict = "neither" if good == bad else ("good" if good > bad else "bad")
    return *first_loss(advantages, lengths)[:2], verdict


check_first_loss = Exercise(
    first_loss,
    parts=(
        Part("completions of different lengths", 3, _different_lengths, draws=16),
        Part("completions of equal length", 1, _equal_lengths),
    ),
    mistakes={
        "the sign is missing": Mistake(
            "Where the ratio is 1, the loss of a token is *minus* its advantage.",
            _first_with(lambda advantages, lengths: _tilt(advantages, lengths) / sum(lengths)),
        ),
        "the losses have no minus": Mistake(
            "Where the ratio is 1, the loss of a token is *minus* its advantage.",
            _told(lambda of_grpo, of_dapo, verdict: (-of_grpo, -of_dapo, verdict)),
        ),
        "a rounding error tells something": Mistake(
            'Thirds do not add up to 0: within a millionth it is "neither".',
            _told(
                lambda of_grpo, of_dapo, _: (
                    of_grpo,
                    of_dapo,
                    "good" if of_dapo < 0 else "bad" if of_dapo else "neither",
                )
            ),
        ),
        "the tokens of each side are added up": Mistake(
            "Many short completions have many tokens, too: read the verdict from the sign of the second number.",
            _longer_together,
        ),
        'the verdict is read from "grpo"': Mistake(
            "That number is always 0. Read it from the second one.",
            _told(lambda of_grpo, of_dapo, verdict: (of_grpo, of_dapo, "neither")),
        ),
        '"dapo" weighs completions alike': Mistake(
            'Each token of a completion has its advantage, and "dapo" takes the mean over tokens.',
            _first_with(lambda advantages, lengths: -sum(advantages) / len(advantages)),
        ),
        '"dapo" is divided by the number of completions': Mistake(
            "Sum over tokens, divided by the number of tokens.",
            _first_with(lambda advantages, lengths: -_tilt(advantages, lengths) / len(lengths)),
        ),
        '"dapo" is not divided': Mistake(
            "Sum over tokens, divided by the number of tokens.",
            _first_with(lambda advantages, lengths: -_tilt(advantages, lengths)),
        ),
        '"grpo" weighs tokens alike': Mistake(
            '"grpo" takes each completion\'s mean first: long or short, it counts once.',
            _told(lambda of_grpo, of_dapo, verdict: (of_dapo, of_dapo, verdict)),
        ),
        "the verdict is upside down": Mistake(
            "A completion with a positive advantage has a negative loss.",
            _told(lambda of_grpo, of_dapo, verdict: (of_grpo, of_dapo, longer(-of_dapo))),
        ),
    },
)


# ---- sequence_ratio ----


def sequence_ratio(per_token_logps: Tensor, old_per_token_logps: Tensor, completion_mask: Tensor) -> Tensor:
    """(B,), the geometric mean of the ratios of each completion's tokens."""
    ratio = importance_ratio(
        per_token_logps, old_per_token_logps, completion_mask, importance_sampling_level="sequence"
    )
    return ratio[:, 0]


def _moved_completions(rng: random.Random) -> Call:
    lengths = [rng.randrange(2, 5), rng.randrange(2, 5), 6]
    old = numbers(rng, 3, 6, low=-2.0, high=-0.5)
    return call(old + numbers(rng, 3, 6, low=-0.5, high=0.5), old, mask_of(lengths, 6))


check_sequence_ratio = Exercise(
    sequence_ratio,
    parts=(
        Part("completions of different lengths", 3, _moved_completions),
        Part("the gradient", 1, lambda rng: replace(_moved_completions(rng), ask=gradient_of)),
    ),
    mistakes={
        "the length is missing": Mistake(
            "The product of many ratios grows with their number: take its root, that is, the *mean* of the logarithms.",
            lambda now, old, mask: ((now - old) * mask).sum(dim=1).exp(),
        ),
        "padding counts": Mistake(
            "Only tokens with mask 1 count, in the sum and in the number of tokens.",
            lambda now, old, mask: sequence_ratio(now, old, torch.ones_like(mask)),
        ),
        "padding counts in the number of tokens": Mistake(
            "Divide by the tokens of each completion, `mask.sum(dim=1)`.",
            lambda now, old, mask: ((now - old) * mask).mean(dim=1).exp(),
        ),
        "it is the mean of the ratios": Mistake(
            "A geometric mean: average the *logarithms* of the ratios, then take the exponential.",
            lambda now, old, mask: ((now - old).exp() * mask).sum(dim=1) / mask.sum(dim=1),
        ),
        "old and new have changed places": Mistake(
            "The new policy stands above the old one.", lambda now, old, mask: sequence_ratio(old, now, mask)
        ),
        "it is the logarithm of the ratio": Mistake(
            "A ratio is 1 where nothing has changed, not 0.",
            lambda now, old, mask: sequence_ratio(now, old, mask).log(),
        ),
        "it is one number for the whole batch": Mistake(
            "One ratio for each completion: (B,).",
            lambda now, old, mask: (((now - old) * mask).sum() / mask.sum()).exp(),
        ),
    },
)


# ---- finite_difference ----


def finite_difference(function: Callable[[Tensor], Tensor], x: Tensor, h: float) -> Tensor:
    """The gradient of a scalar function at x (n,), by central differences."""
    slopes = []
    for place in range(len(x)):
        step = torch.zeros_like(x)
        step[place] = h
        slopes.append((function(x + step) - function(x - step)) / (2 * h))
    return torch.stack(slopes)


def _some_function(rng: random.Random) -> Call:
    function = Polynomial(rng.randrange(1, 4), rng.randrange(1, 4))
    return call(function, numbers(rng, 3).double(), 1e-2)


def _one_sided(side: int) -> Callable:
    def wrong(function, x, h):
        steps = side * h * torch.eye(len(x), dtype=x.dtype)
        return torch.stack([function(x + step) - function(x) for step in steps]) / (side * h)

    return wrong


check_finite_difference = Exercise(
    finite_difference,
    parts=(Part("functions of three numbers", 3, _some_function),),
    mistakes={
        "the difference is one-sided": Mistake("Step to both sides: the error falls from h to h².", _one_sided(1)),
        "the difference is one-sided, downward": Mistake(
            "Step to both sides: the error falls from h to h².", _one_sided(-1)
        ),
        "the sign is turned": Mistake("Above minus below.", lambda function, x, h: -finite_difference(function, x, h)),
        "it is divided by 2 and multiplied by h": Mistake(
            "`/ 2 * h` goes from left to right: `/ (2 * h)`.",
            lambda function, x, h: h * h * finite_difference(function, x, h),
        ),
        "this is autograd's gradient": Mistake(
            "It is to check autograd: call the function on both sides instead.",
            lambda function, x, h: torch.autograd.functional.jacobian(function, x),
        ),
        "it is divided by h, not by 2h": Mistake(
            "How far apart are the two points?", lambda function, x, h: 2 * finite_difference(function, x, h)
        ),
        "it is not divided": Mistake(
            "A slope is a difference *per step*.", lambda function, x, h: 2 * h * finite_difference(function, x, h)
        ),
        "all places are moved at once": Mistake(
            "One place at a time, the others stay.",
            lambda function, x, h: ((function(x + h) - function(x - h)) / (2 * h)).expand(len(x)).clone(),
        ),
    },
    tolerance=1e-6,
)
