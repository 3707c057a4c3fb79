"""Exercises on a GRPO run: one whole step, learning rate and gradient clipping, and what the metrics mean."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from grpo_edu.advantages import group_advantages
from grpo_edu.checks.core import Call, Exercise, Mistake, Part, call
from grpo_edu.checks.group_advantages import tied_alone
from grpo_edu.checks.inputs import mask_of, numbers
from grpo_edu.config import GRPOConfig
from grpo_edu.evaluation import mcnemar
from grpo_edu.fast import optimizers
from grpo_edu.losses import grpo_loss, per_token_kl
from grpo_edu.metrics import masked_mean

# ---- stage_shapes ----


Shapes = dict[str, tuple[int, ...]]


def stage_shapes(
    num_prompts: int, num_generations: int, prompt_length: int, completion_length: int, vocab_size: int
) -> Shapes:
    """The shapes of a step's tensors, with a row for each completion."""
    rows = num_prompts * num_generations
    return {
        "prompt_ids": (rows, prompt_length),
        "completion_ids": (rows, completion_length),
        "rewards": (rows,),
        "advantages": (rows,),
        "logits": (rows, completion_length, vocab_size),
        "per_token_logps": (rows, completion_length),
        "loss": (),
    }


def _some_sizes(rng: random.Random) -> Call:
    return call(*rng.sample(range(2, 9), 2), *rng.sample(range(10, 60), 2), rng.choice([1024, 32_000]))


def _shapes_but(change: Callable[..., Shapes]) -> Callable[..., Shapes]:
    """A wrong answer: the right shapes, and over them `change` of the five sizes N, G, P, C, V."""

    def wrong(*sizes: int) -> Shapes:
        return {**stage_shapes(*sizes), **change(*sizes)}

    return wrong


check_stage_shapes = Exercise(
    stage_shapes,
    parts=(Part("a batch of some prompts", 2, _some_sizes),),
    mistakes={
        "completions are not counted for each prompt": Mistake(
            "Every prompt has G completions: B = N · G rows.", lambda n, g, p, c, v: stage_shapes(n, 1, p, c, v)
        ),
        "prompts have a row each, without their siblings": Mistake(
            "A prompt stands in the row of each of its G completions.",
            _shapes_but(lambda n, g, p, c, v: {"prompt_ids": (n, p)}),
        ),
        "a tuple of one entry has no comma": Mistake(
            "`(8)` is the number 8, `(8,)` is a tuple.",
            _shapes_but(lambda n, g, p, c, v: {"rewards": n * g, "advantages": n * g}),
        ),
        "the loss is a vector of one number": Mistake(
            "`(1,)` is that of a vector. A single number has the shape ().",
            _shapes_but(lambda n, g, p, c, v: {"loss": (1,)}),
        ),
        "advantages stand in rows of groups": Mistake(
            "One number a row of the batch, as the rewards have: (B,).",
            _shapes_but(lambda n, g, p, c, v: {"advantages": (n, g)}),
        ),
        "a token has an advantage of its own": Mistake(
            "One number for a whole completion.", _shapes_but(lambda n, g, p, c, v: {"advantages": (n * g, c)})
        ),
        "a completion holds its prompt as well": Mistake(
            "Prompts are P tokens wide, completions C.",
            _shapes_but(lambda n, g, p, c, v: {"completion_ids": (n * g, p + c)}),
        ),
        "a group has one advantage": Mistake(
            "Each completion is compared with its siblings, and has its own.",
            _shapes_but(lambda n, g, p, c, v: {"advantages": (n,)}),
        ),
        "a log-probability is kept for the whole vocabulary": Mistake(
            "Only that of the token that was sampled.",
            _shapes_but(lambda n, g, p, c, v: {"per_token_logps": (n * g, c, v)}),
        ),
        "the loss is not reduced": Mistake(
            "One number for the whole batch, whose shape is ().", _shapes_but(lambda n, g, p, c, v: {"loss": (n * g,)})
        ),
        "logits are kept for the prompt": Mistake(
            "Only completion tokens are learned.", _shapes_but(lambda n, g, p, c, v: {"logits": (n * g, p + c, v)})
        ),
        "a token has a reward": Mistake(
            "One number for a whole completion.", _shapes_but(lambda n, g, p, c, v: {"rewards": (n * g, c)})
        ),
    },
)


# ---- grpo_step ----


def grpo_step(
    scores: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor,
    rewards: Tensor,
    num_generations: int,
    learning_rate: float,
    updates: int,
    clip: tuple[float, float],
) -> Tensor:
    """(T, K), the toy policy's scores after some updates on one batch, by the package's own functions."""
    old, policy = _token_logps(scores, completion_ids), scores
    advantages = group_advantages(rewards, num_generations)
    for _ in range(updates):
        policy = policy.clone().requires_grad_()
        logps = _token_logps(policy, completion_ids)
        loss = grpo_loss(
            logps, old, advantages, completion_mask, loss_type="grpo", epsilon=clip[0], epsilon_high=clip[1]
        )
        (slope,) = torch.autograd.grad(loss, policy)
        policy = (policy - learning_rate * slope).detach()
    return policy


def _token_logps(scores: Tensor, completion_ids: Tensor) -> Tensor:
    places = torch.arange(completion_ids.shape[1])
    return scores.log_softmax(dim=1)[places, completion_ids]


def _batch(rng: random.Random, rewards: Tensor, size: int, *, width: int, whole: bool = False) -> Call:
    kinds, rows = 2, len(rewards)
    ids = torch.tensor([[rng.randrange(kinds) for _ in range(width)] for _ in range(rows)])
    lengths = [width] * rows if whole else [rng.randrange(1, width) for _ in range(rows - 1)] + [width]
    numbers_of_step = (rng.choice([3.0, 6.0]), rng.choice([3, 4]), rng.choice([(0.1, 0.3), (0.1, 0.2)]))
    return call(numbers(rng, width, kinds), ids, mask_of(lengths, width), rewards, size, *numbers_of_step)


def _paid(rng: random.Random, groups: int, size: int) -> Tensor:
    return torch.tensor([reward / 4 for _ in range(groups) for reward in rng.sample(range(17), size)])


def _tied_group(rng: random.Random) -> Call:
    """A group that ties, alone or in front of one that does not."""
    rewards = tied_alone(rng, 16)
    return _batch(rng, torch.cat([rewards, _paid(rng, 1, 16)]) if rng.random() < 0.5 else rewards, 16, width=2)


def climbed(scores: Tensor, completion_ids: Tensor, weights: Tensor, learning_rate: float) -> Tensor:
    """Uphill on Σ weight · log p, with a weight (B, T) for each token: the gradient of log p is one-hot minus p."""
    pull = one_hot(completion_ids, scores.shape[1]) - scores.softmax(dim=1)
    return scores + learning_rate * (weights[..., None] * pull).sum(dim=0)


def by_weights(
    scores: Tensor,
    completion_ids: Tensor,
    weights: Tensor,
    learning_rate: float,
    updates: int,
    clip: tuple[float, float],
    factor: Callable[[Tensor, Tensor, float, float], Tensor] | None = None,
) -> Tensor:
    """Several updates with a weight (B, T) for each token, times factor(ratio, weights, low, high): ratio and clip."""
    old, policy = _token_logps(scores, completion_ids), scores
    for _ in range(updates):
        ratio = (_token_logps(policy, completion_ids) - old).exp()
        policy = climbed(policy, completion_ids, weights * (factor or _clipped)(ratio, weights, *clip), learning_rate)
    return policy


def _clipped(ratio: Tensor, weights: Tensor, low: float, high: float) -> Tensor:
    """The ratio where a token still has a gradient, else 0."""
    return ratio * torch.where(weights > 0, ratio <= 1 + high, ratio >= 1 - low)


def _both_sides(ratio: Tensor, weights: Tensor, low: float, high: float) -> Tensor:
    return ratio * ((ratio <= 1 + high) & (ratio >= 1 - low))


def _step_with(
    weigh: Callable[[Tensor, Tensor, int], Tensor],
    factor: Callable[[Tensor, Tensor, float, float], Tensor] | None = None,
) -> Callable[..., Tensor]:
    """A wrong answer that weighs tokens in another way, weigh(rewards, mask, G) → (B, T), or clips in another way."""

    def wrong(scores, completion_ids, completion_mask, rewards, num_generations, learning_rate, updates, clip):
        weights = weigh(rewards, completion_mask, num_generations)
        return by_weights(scores, completion_ids, weights, learning_rate, updates, clip, factor)

    return wrong


def _right_weights(rewards: Tensor, mask: Tensor, num_generations: int) -> Tensor:
    return _column(group_advantages(rewards, num_generations)) * _row_share(mask)


def _column(values: Tensor) -> Tensor:
    return values[:, None]


def _row_share(mask: Tensor) -> Tensor:
    return mask / mask.sum(dim=1, keepdim=True) / len(mask)


def _centered(rewards: Tensor, num_generations: int) -> Tensor:
    return group_advantages(rewards, num_generations, scale_rewards="none")


def _scaled_with(correction: int, tie: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """A wrong answer with another standard deviation, or another test for ties: tie(groups) → (N,) truth values."""

    def weigh(rewards: Tensor, mask: Tensor, num_generations: int) -> Tensor:
        groups = rewards.view(-1, num_generations)
        std = groups.std(dim=1, keepdim=True, correction=correction)
        scaled = (groups - groups.mean(dim=1, keepdim=True)) / (std + 1e-4)
        return _column(scaled.masked_fill(tie(groups)[:, None], 0.0).flatten()) * _row_share(mask)

    return _step_with(weigh)


def _by_stride(rewards: Tensor, num_generations: int) -> Tensor:
    groups = rewards.view(num_generations, -1).T
    return group_advantages(groups.flatten(), num_generations).view_as(groups).T.flatten()


check_grpo_step = Exercise(
    grpo_step,
    parts=(
        Part(
            "one group, whose completions are equally long",
            2,
            lambda rng: _batch(rng, _paid(rng, 1, 3), 3, width=2, whole=True),
        ),
        Part("two groups of different lengths", 3, lambda rng: _batch(rng, _paid(rng, 2, 3), 3, width=3)),
        Part("a group that ties", 1, _tied_group, draws=12),
    ),
    mistakes={
        "nothing moves": Mistake(
            "The value of the loss does not matter, its gradient does. `exp(logps - logps)` has "
            "none: what it is compared with must be detached.",
            lambda scores, *rest: scores.clone(),
        ),
        "the old log-probabilities follow the policy": Mistake(
            "They are those of the policy that sampled, in every update.",
            _step_with(_right_weights, lambda ratio, weights, low, high: torch.ones_like(ratio)),
        ),
        "nothing is clipped": Mistake(
            "What happens to a token whose ratio has gone too far?",
            _step_with(_right_weights, lambda ratio, weights, low, high: ratio),
        ),
        "a token is clipped on both sides": Mistake(
            "The *minimum* of two terms: a token that moved in the wrong direction keeps its gradient.",
            _step_with(_right_weights, _both_sides),
        ),
        "both limits are the first one": Mistake(
            "Upwards the ratio may go further than downwards: `clip` has two numbers.",
            _step_with(_right_weights, lambda ratio, weights, low, high: _clipped(ratio, weights, low, low)),
        ),
        "the limits have changed places": Mistake(
            "The first number is for ratios below 1, the second one for those above.",
            _step_with(_right_weights, lambda ratio, weights, low, high: _clipped(ratio, weights, high, low)),
        ),
        "there is only one update": Mistake(
            "Use the same batch `updates` times.",
            lambda scores, ids, mask, r, g, rate, updates, clip: grpo_step(scores, ids, mask, r, g, rate, 1, clip),
        ),
        "the step goes uphill": Mistake(
            "The loss has a minus, and descent has another: better ones get likelier.",
            lambda scores, ids, mask, r, g, rate, *rest: grpo_step(scores, ids, mask, r, g, -rate, *rest),
        ),
        "rewards are taken for advantages": Mistake(
            "A reward is compared with those of its siblings first.",
            _step_with(lambda r, mask, g: _column(r) * _row_share(mask)),
        ),
        "the standard deviation divides by G": Mistake(
            "The sample one divides by G − 1: `std(dim=1)` as it is.",
            _scaled_with(0, lambda groups: groups.amax(dim=1) == groups.amin(dim=1)),
        ),
        "a tie is worth a rounding error": Mistake(
            "The mean of sixteen equal rewards may be another number. Put 0 where all rewards of a group are equal.",
            _scaled_with(1, lambda groups: torch.zeros(len(groups), dtype=torch.bool)),
        ),
        "a tie is looked for in the standard deviation": Mistake(
            "With a single group, torch's std of equal rewards need not be 0. Compare the rewards with each other.",
            _scaled_with(1, lambda groups: groups.std(dim=1) == 0),
        ),
        "advantages are not divided by the standard deviation": Mistake(
            "Divide by the group's, plus 1e-4.",
            _step_with(lambda r, mask, g: _column(_centered(r, g)) * _row_share(mask)),
        ),
        "the whole batch is one group": Mistake(
            "Each prompt's completions are compared among themselves.",
            _step_with(lambda r, mask, g: _column(group_advantages(r, len(r))) * _row_share(mask)),
        ),
        "groups are taken by stride": Mistake(
            "A group's rows are neighbors: view(-1, G).",
            _step_with(lambda r, mask, g: _column(_by_stride(r, g)) * _row_share(mask)),
        ),
        "the learning rate is missing": Mistake(
            "scores − learning_rate · gradient.",
            lambda scores, ids, mask, r, g, rate, *rest: grpo_step(scores, ids, mask, r, g, 1.0, *rest),
        ),
        "completions are divided by the width": Mistake(
            "By their own number of real tokens.",
            _step_with(lambda r, mask, g: _column(group_advantages(r, g)) * mask / mask.numel()),
        ),
        "padding counts": Mistake(
            "Multiply by the mask, and divide by the number of real tokens.",
            _step_with(lambda r, mask, g: _column(group_advantages(r, g)) * _row_share(torch.ones_like(mask))),
        ),
        "all tokens of the batch weigh alike": Mistake(
            "The mean of each completion first, then over completions.",
            _step_with(lambda r, mask, g: _column(group_advantages(r, g)) * mask / mask.sum()),
        ),
        "the loss of the completions is added up": Mistake(
            "A mean over the completions.",
            _step_with(lambda r, mask, g: _column(group_advantages(r, g)) * _row_share(mask) * len(r)),
        ),
    },
)


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
    learning_rate_share,
    parts=(
        Part("while it rises", 1, _rising),
        Part("while it falls", 1, _falling),
        Part("the first step, the highest point, no warm-up", 1, _borders, draws=40),
    ),
    mistakes={
        "the first step counts as 1": Mistake(
            "Steps are counted from 0: the first one takes 0.",
            _share_with(lambda step, warmup: (step + 1) / warmup, _down),
        ),
        "it falls from the first step on": Mistake(
            "Where it is highest, at step `warmup_steps`, the share is 1.",
            _share_with(_up, lambda step, warmup, total: 1 - step / total),
        ),
        "the warm-up is not taken off the remaining steps": Mistake(
            "It falls over max_steps − warmup_steps steps.",
            _share_with(_up, lambda step, warmup, total: 1 - (step - warmup) / total),
        ),
        "it reaches 0 one step too early": Mistake(
            "It would be 0 at step `max_steps`, which is never taken.",
            _share_with(_up, lambda step, warmup, total: (total - 1 - step) / (total - 1 - warmup)),
        ),
        "it falls along a cosine": Mistake(
            "In a straight line.", _share_with(_up, lambda *steps: float(1 - np.cos(np.pi * _down(*steps))) / 2)
        ),
        "it falls from 1 at step 0": Mistake(
            "The first steps take a part of the learning rate only.", lambda step, warmup, total: 1 - step / total
        ),
        "it falls first and rises then": Mistake(
            "It begins at 0.", lambda step, warmup, total: 1 - learning_rate_share(step, warmup, total)
        ),
        "it never falls": Mistake("After the warm-up it goes down to 0.", _share_with(_up, lambda *steps: 1.0)),
        "there is no warm-up": Mistake(
            "The first steps take a part of the learning rate only.", _share_with(lambda step, warmup: 1.0, _down)
        ),
        "without a warm-up, step 0 divides by 0": Mistake(
            "It rises *before* step warmup_steps, which may be 0: <, not <=.",
            lambda step, warmup, total: _up(step, warmup) if step <= warmup else _down(step, warmup, total),
        ),
        "without a warm-up it divides by 0": Mistake(
            "warmup_steps may be 0: then it falls from the first step on.",
            lambda step, warmup, total: min(step / warmup, _down(step, warmup, total)),
        ),
    },
)


# ---- clipped_gradients ----

Gradients = list[Tensor]


def clipped_gradients(gradients: Gradients, max_norm: float) -> Gradients:
    """The gradients of all weights, scaled by one factor where their common length exceeds `max_norm`."""
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    factor = min(1.0, max_norm / norm.item())
    return [factor * gradient for gradient in gradients]


def common_length(gradients: Gradients) -> float:
    """The norm of all gradients together."""
    return torch.cat([gradient.flatten() for gradient in gradients]).norm().item()


def _some_gradients(longest: tuple[float, float]) -> Callable[[random.Random], Call]:
    def draw(rng: random.Random) -> Call:
        gradients = [numbers(rng, 2, 2), numbers(rng, 3), numbers(rng, 1)]
        return call(gradients, round(common_length(gradients) * rng.uniform(*longest), 2))

    return draw


def _scaled(length_of: Callable[[Gradients], float]) -> Callable[[Gradients, float], Gradients]:
    """A wrong answer that measures another length."""
    return lambda gradients, max_norm: [min(1.0, max_norm / length_of(gradients)) * one for one in gradients]


def _in_place(gradients: Gradients, max_norm: float) -> Gradients:
    factor = min(1.0, max_norm / common_length(gradients))
    for gradient in gradients:
        gradient *= factor
    return gradients


check_clipped_gradients = Exercise(
    clipped_gradients,
    parts=(
        Part("longer than allowed", 2, _some_gradients((0.2, 0.8))),
        Part("short enough", 1, _some_gradients((1.2, 2.0))),
    ),
    mistakes={
        "each gradient is clipped by itself": Mistake(
            "One factor for all, or the direction of the step changes.",
            lambda gradients, max_norm: [clipped_gradients([one], max_norm)[0] for one in gradients],
        ),
        "values are cut off": Mistake(
            "Scale all by one factor: the direction stays.",
            lambda gradients, max_norm: [one.clamp(-max_norm, max_norm) for one in gradients],
        ),
        "short gradients are stretched": Mistake(
            "What is short enough stays as it is.",
            lambda gradients, max_norm: [max_norm / common_length(gradients) * one for one in gradients],
        ),
        "lengths are added up": Mistake(
            "Squares are: the length of the whole is the root of their sum.",
            _scaled(lambda gradients: sum(one.norm().item() for one in gradients)),
        ),
        "the square is taken for the length": Mistake(
            "The root of the sum of squares.", _scaled(lambda gradients: common_length(gradients) ** 2)
        ),
        "the largest length is taken for that of the whole": Mistake(
            "All gradients together are one long vector.",
            _scaled(lambda gradients: max(one.norm().item() for one in gradients)),
        ),
        "they get the length 1": Mistake(
            "The length `max_norm`: factor max_norm / norm.",
            lambda gradients, max_norm: [one / common_length(gradients) for one in gradients],
        ),
        "values are added up, not their squares": Mistake(
            "A length is the root of the sum of squares.",
            _scaled(lambda gradients: sum(one.abs().sum().item() for one in gradients)),
        ),
        "long ones are left as they are": Mistake(
            "The factor is at *most* 1: min, not max.",
            lambda gradients, max_norm: [max(1, max_norm / common_length(gradients)) * one for one in gradients],
        ),
        "the gradients are changed in place": Mistake("Return new ones.", _in_place),
    },
)


# ---- tied_groups ----


def tied_groups(rewards: Tensor, num_generations: int) -> tuple[float, float]:
    """The shares of groups in which all completions are right, and in which none is."""
    groups = rewards.view(-1, num_generations)
    return (groups == 1).all(dim=1).float().mean().item(), (groups == 0).all(dim=1).float().mean().item()


def _outcomes(rng: random.Random) -> Call:
    size = rng.choice([3, 4])
    groups = [[1.0] * size] * rng.randrange(2, 4) + [[0.0] * size]
    for _ in range(rng.randrange(1, 4)):
        right = rng.randrange(1, size)
        groups.append(rng.sample([1.0] * right + [0.0] * (size - right), size))
    rng.shuffle(groups)
    return call(torch.tensor(sum(groups, [])), size)


def _all_mixed(rng: random.Random) -> Call:
    size = rng.choice([2, 4])
    groups = [rng.sample([1.0, 0.0] * (size // 2), size) for _ in range(3)]
    return call(torch.tensor(sum(groups, [])), size)


def _of_the_tied(rewards: Tensor, num_generations: int) -> tuple[float, float]:
    right, wrong = tied_groups(rewards, num_generations)
    return (right / (right + wrong), wrong / (right + wrong)) if right + wrong else (0.0, 0.0)


check_tied_groups = Exercise(
    tied_groups,
    parts=(Part("some groups tie", 2, _outcomes), Part("no group ties", 1, _all_mixed)),
    mistakes={
        "completions are counted, not groups": Mistake(
            "A group counts where *all* of its completions agree.",
            lambda rewards, g: ((rewards == 1).float().mean().item(), (rewards == 0).float().mean().item()),
        ),
        "any stands where all should": Mistake(
            "One right completion makes no group of right ones.",
            lambda rewards, g: tuple((rewards.view(-1, g) == kind).any(dim=1).float().mean().item() for kind in (1, 0)),
        ),
        "the two shares have changed places": Mistake(
            "All right first, none right second.", lambda rewards, g: tied_groups(rewards, g)[::-1]
        ),
        "these are counts": Mistake(
            "Divide by the number of groups.",
            lambda rewards, g: tuple(share * (len(rewards) // g) for share in tied_groups(rewards, g)),
        ),
        "groups are divided by the number of completions": Mistake(
            "A share of the *groups*: N of them, not B = N · G.",
            lambda rewards, g: tuple(share / g for share in tied_groups(rewards, g)),
        ),
        "it is divided by the number of groups that tie": Mistake("A share of *all* groups.", _of_the_tied),
        "all groups are asked at once": Mistake(
            "Ask each row: all(dim=1).", lambda rewards, g: (float((rewards == 1).all()), float((rewards == 0).all()))
        ),
        "groups are taken by stride": Mistake(
            "A group's rewards are neighbors: view(-1, G).",
            lambda rewards, g: tied_groups(rewards.view(g, -1).T.flatten(), g),
        ),
    },
)


# ---- batch_kl ----


def batch_kl(per_token_logps: Tensor, ref_per_token_logps: Tensor, completion_mask: Tensor) -> float:
    """The mean of k3 over the real tokens of a batch, as the trainer's metric "kl"."""
    return masked_mean(per_token_kl(per_token_logps, ref_per_token_logps), completion_mask)


def _two_policies(rng: random.Random, *, infinite: bool) -> Call:
    logps = numbers(rng, 3, 4, low=-3.0, high=-1.2)
    ref = logps + numbers(rng, 3, 4, low=-1.0, high=1.0)
    mask = mask_of([rng.randrange(1, 3), rng.randrange(1, 4), 4], 4)
    if infinite:  # row 0 has two places of padding, row 1 has one: both infinite, or one of them
        logps[0, 2:] = ref[0, 3] = ref[1, 3] = -torch.inf
    return call(logps, ref, mask)


def _mean_with(
    estimate: Callable[[Tensor, Tensor], Tensor],
    mean: Callable[[Tensor, Tensor], Tensor] = lambda values, mask: values[mask == 1].mean(),
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A wrong answer with another estimator, or another mean."""
    return lambda logps, ref, mask: mean(estimate(logps, ref), mask)


def _kept(values: Tensor, mask: Tensor) -> Tensor:
    return values.masked_fill(mask == 0, 0.0)


check_batch_kl = Exercise(
    batch_kl,
    parts=(
        Part("completions of different lengths", 2, lambda rng: _two_policies(rng, infinite=False)),
        Part("padding of minus infinity", 1, lambda rng: _two_policies(rng, infinite=True)),
    ),
    mistakes={
        "the two policies have changed places": Mistake(
            "k3's ratio is reference over policy.", _mean_with(lambda logps, ref: per_token_kl(ref, logps))
        ),
        "that is k1": Mistake(
            "k1 is negative where the reference is the likelier one. k3 never is.",
            _mean_with(lambda logps, ref: logps - ref),
        ),
        "that is k2": Mistake(
            "k2 is half the square. k3 has an exponential.", _mean_with(lambda logps, ref: (logps - ref).square() / 2)
        ),
        "padding is multiplied away": Mistake(
            "0 times infinity, or NaN, is NaN. Pick the real tokens instead.",
            _mean_with(per_token_kl, lambda values, mask: (values * mask).sum() / mask.sum()),
            also=(
                _mean_with(
                    per_token_kl, lambda values, mask: (values.nan_to_num(0.0, torch.inf) * mask).sum() / mask.sum()
                ),
            ),
        ),
        "the mask picks rows": Mistake(
            "An index of whole numbers 0 and 1 picks rows 0 and 1. Ask where it is 1.",
            _mean_with(per_token_kl, lambda values, mask: values[mask].mean()),
        ),
        "padding counts": Mistake(
            "A mean over the tokens of the mask.", _mean_with(per_token_kl, lambda values, mask: values.mean())
        ),
        "padding is counted in the number of tokens": Mistake(
            "Divide by the number of real tokens, mask.sum().",
            _mean_with(per_token_kl, lambda values, mask: _kept(values, mask).mean()),
        ),
        "completions weigh alike, not tokens": Mistake(
            "The metric is a mean over all tokens of the batch.",
            _mean_with(per_token_kl, lambda values, mask: (_kept(values, mask).sum(1) / mask.sum(1)).mean()),
        ),
        "the sum is not divided": Mistake(
            "A mean over the tokens.", _mean_with(per_token_kl, lambda values, mask: _kept(values, mask).sum())
        ),
    },
)


# ---- claim ----

Solved = Sequence[bool]  # 1 or 0, a problem


def claim(before: Solved, after: Solved) -> tuple[float, str]:
    """The gain, and "better", "worse" or "not shown" by the exact McNemar test at 5%."""
    return claimed(before, after, mcnemar(before, after).p_value)


def claimed(before: Solved, after: Solved, p_value: float) -> tuple[float, str]:
    """The gain, and the verdict that this p-value allows."""
    gain = (sum(after) - sum(before)) / len(before)
    if p_value >= 0.05:
        return gain, "not shown"
    return gain, "better" if gain > 0 else "worse"


def _told(change: Callable[[float, str], tuple]) -> Callable:
    """A wrong answer made of the right gain and verdict."""
    return lambda before, after: change(*claim(before, after))


def _runs(rng: random.Random, pairs: Sequence[tuple[int, int]]) -> Call:
    lost, won = rng.choice(pairs)
    both, neither = rng.randrange(12, 15), rng.randrange(12, 15)
    rows = [(1, 1)] * both + [(0, 0)] * neither + [(1, 0)] * lost + [(0, 1)] * won
    rng.shuffle(rows)
    return call([before for before, _ in rows], [after for _, after in rows])


def _unpaired(before: Solved, after: Solved) -> tuple[float, str]:
    n, shares = len(before), (sum(before) / len(before), sum(after) / len(after))
    pooled = sum(shares) / 2
    z = (shares[1] - shares[0]) / math.sqrt(2 * pooled * (1 - pooled) / n)
    return claimed(before, after, math.erfc(abs(z) / math.sqrt(2)))


def _upside_down(before: Solved, after: Solved) -> tuple[float, str]:
    gain = (sum(after) - sum(before)) / len(before)
    if mcnemar(before, after).p_value < 0.05:
        return gain, "not shown"
    return gain, "better" if gain > 0 else "worse"


check_claim = Exercise(
    claim,
    parts=(
        Part(
            "many problems fell to one side",
            2,
            lambda rng: _runs(rng, [(1, 9), (0, 7), (0, 14), (9, 1), (8, 0), (14, 0)]),
            draws=24,
        ),
        Part("few did", 2, lambda rng: _runs(rng, [(1, 7), (0, 5), (2, 9), (7, 1), (1, 4), (5, 2), (3, 3)]), draws=20),
    ),
    mistakes={
        "any gain is called better": Mistake(
            "Noise gains as well: ask for a test first.",
            lambda before, after: claimed(before, after, 0.0 if sum(before) != sum(after) else 1.0),
        ),
        "p is read the wrong way round": Mistake(
            "A *small* p means that chance alone would hardly do this.", _upside_down
        ),
        "before and after have changed places": Mistake(
            "After, minus before.", lambda before, after: claim(after, before)
        ),
        "the gain has lost its sign": Mistake(
            "What got worse has a negative gain.", _told(lambda gain, verdict: (abs(gain), verdict))
        ),
        "the gain is left out where nothing is shown": Mistake(
            "The gain is what was measured, whatever the verdict.",
            _told(lambda gain, verdict: (0.0 if verdict == "not shown" else gain, verdict)),
        ),
        "the test is not paired": Mistake(
            "The same problems were asked twice. Only those count that changed sides.", _unpaired
        ),
        "the test is one-sided": Mistake(
            "A change for the worse would have been a change as well.",
            lambda before, after: claimed(before, after, mcnemar(before, after).p_value / 2),
        ),
        "the direction is not looked at": Mistake(
            "A change that is surely there may be one for the worse.",
            _told(lambda gain, verdict: (gain, verdict.replace("worse", "better"))),
        ),
        "the gain is relative": Mistake(
            "The share solved after, minus the share solved before.",
            lambda before, after: (sum(after) / sum(before) - 1, claim(before, after)[1]),
        ),
        "the gain is a count": Mistake(
            "Divide by the number of problems.",
            lambda before, after: (sum(after) - sum(before), claim(before, after)[1]),
        ),
    },
)
