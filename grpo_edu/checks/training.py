"""Exercises of notebook 05, first part: the shapes of a GRPO step, and a whole step on a toy policy."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from grpo_edu.advantages import group_advantages
from grpo_edu.checks.advantages import tied_alone
from grpo_edu.checks.core import Call, Exercise, Mistake, Part, call
from grpo_edu.checks.objective import numbers
from grpo_edu.checks.reduction import mask_of
from grpo_edu.losses import grpo_loss

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


def _shapes_by_tensors(num_prompts, num_generations, prompt_length, completion_length, vocab_size) -> Shapes:
    with torch.device("meta"):
        prompts = torch.empty(num_prompts, prompt_length).repeat_interleave(num_generations, dim=0)
        logits = torch.empty(len(prompts), completion_length, vocab_size)
        ids = logits.argmax(dim=-1)
        logps = logits.gather(2, ids[..., None])[..., 0]
        rewards = logps.sum(dim=1)
        found = {"prompt_ids": prompts, "completion_ids": ids, "rewards": rewards, "advantages": rewards,
                 "logits": logits, "per_token_logps": logps, "loss": logps.mean()}  # fmt: skip
    return {name: tuple(tensor.shape) for name, tensor in found.items()}


def _shapes_by_words(num_prompts, num_generations, prompt_length, completion_length, vocab_size) -> Shapes:
    sizes = {"B": num_generations * num_prompts, "P": prompt_length, "C": completion_length, "V": vocab_size}
    words = dict(prompt_ids="BP", completion_ids="BC", rewards="B", advantages="B", logits="BCV", per_token_logps="BC",
                 loss="")  # fmt: skip
    return {name: tuple(sizes[letter] for letter in word) for name, word in words.items()}


def _shapes_by_prefix(num_prompts, num_generations, prompt_length, completion_length, vocab_size) -> Shapes:
    a_row: Any = [num_prompts * num_generations]
    a_token = [*a_row, completion_length]
    shapes = {"loss": [], "rewards": a_row, "advantages": a_row, "completion_ids": a_token, "per_token_logps": a_token}
    return {**shapes, "prompt_ids": [*a_row, prompt_length], "logits": [*a_token, vocab_size]}


def _shapes_but(change: Callable[..., Shapes]) -> Callable[..., Shapes]:
    """A wrong answer: the right shapes, and over them `change` of the five sizes N, G, P, C, V."""

    def wrong(*sizes: int) -> Shapes:
        return {**stage_shapes(*sizes), **change(*sizes)}

    return wrong


check_stage_shapes = Exercise(
    "stage_shapes",
    stage_shapes,
    parts=(Part("a batch of some prompts", 2, _some_sizes),),
    mistakes=(
        Mistake("completions are not counted for each prompt", "Every prompt has G completions: B = N · G rows.",
                lambda n, g, p, c, v: stage_shapes(n, 1, p, c, v)),
        Mistake("prompts have a row each, without their siblings", "A prompt stands in the row of each of its G "
                "completions.", _shapes_but(lambda n, g, p, c, v: {"prompt_ids": (n, p)})),
        Mistake("a tuple of one entry has no comma", "`(8)` is the number 8, `(8,)` is a tuple.",
                _shapes_but(lambda n, g, p, c, v: {"rewards": n * g, "advantages": n * g})),
        Mistake("the loss is a vector of one number", "`(1,)` is that of a vector. A single number has the shape ().",
                _shapes_but(lambda n, g, p, c, v: {"loss": (1,)})),
        Mistake("advantages stand in rows of groups", "One number a row of the batch, as the rewards have: (B,).",
                _shapes_but(lambda n, g, p, c, v: {"advantages": (n, g)})),
        Mistake("a token has an advantage of its own", "One number for a whole completion.",
                _shapes_but(lambda n, g, p, c, v: {"advantages": (n * g, c)})),
        Mistake("a completion holds its prompt as well", "Prompts are P tokens wide, completions C.",
                _shapes_but(lambda n, g, p, c, v: {"completion_ids": (n * g, p + c)})),
        Mistake("a group has one advantage", "Each completion is compared with its siblings, and has its own.",
                _shapes_but(lambda n, g, p, c, v: {"advantages": (n,)})),
        Mistake("a log-probability is kept for the whole vocabulary", "Only that of the token that was sampled.",
                _shapes_but(lambda n, g, p, c, v: {"per_token_logps": (n * g, c, v)})),
        Mistake("the loss is not reduced", "One number for the whole batch, whose shape is ().",
                _shapes_but(lambda n, g, p, c, v: {"loss": (n * g,)})),
        Mistake("logits are kept for the prompt", "Only completion tokens are learned.",
                _shapes_but(lambda n, g, p, c, v: {"logits": (n * g, p + c, v)})),
        Mistake("a token has a reward", "One number for a whole completion.",
                _shapes_but(lambda n, g, p, c, v: {"rewards": (n * g, c)})),
    ),
    right=(_shapes_by_tensors, _shapes_by_words, _shapes_by_prefix),
)  # fmt: skip


# ---- grpo_step ----


def grpo_step(
    scores: Tensor, completion_ids: Tensor, completion_mask: Tensor, rewards: Tensor, num_generations: int,
    learning_rate: float,
) -> Tensor:  # fmt: skip
    """(T, K), the toy policy's scores after one GRPO step by the package's own functions and plain descent."""
    policy = scores.clone().requires_grad_()
    logps = _token_logps(policy, completion_ids)
    advantages = group_advantages(rewards, num_generations)
    loss = grpo_loss(logps, logps.detach(), advantages, completion_mask, loss_type="grpo")
    (slope,) = torch.autograd.grad(loss, policy)
    return scores - learning_rate * slope


def _token_logps(scores: Tensor, completion_ids: Tensor) -> Tensor:
    places = torch.arange(completion_ids.shape[1])
    return scores.log_softmax(dim=1)[places, completion_ids]


def _batch(rng: random.Random, rewards: Tensor, size: int, *, width: int, whole: bool = False) -> Call:
    kinds, rows = 2, len(rewards)
    ids = torch.tensor([[rng.randrange(kinds) for _ in range(width)] for _ in range(rows)])
    lengths = [width] * rows if whole else [rng.randrange(1, width) for _ in range(rows - 1)] + [width]
    return call(numbers(rng, width, kinds), ids, mask_of(lengths, width), rewards, size, rng.choice([0.5, 2.0]))


def _paid(rng: random.Random, groups: int, size: int) -> Tensor:
    return torch.tensor([reward / 4 for _ in range(groups) for reward in rng.sample(range(17), size)])


def _one_group(rng: random.Random) -> Call:
    return _batch(rng, _paid(rng, 1, 3), 3, width=2, whole=True)


def _two_groups(rng: random.Random) -> Call:
    return _batch(rng, _paid(rng, 2, 3), 3, width=3)


def _tied_group(rng: random.Random) -> Call:
    """A group that ties, alone or in front of one that does not."""
    rewards = tied_alone(rng, 16)
    return _batch(rng, torch.cat([rewards, _paid(rng, 1, 16)]) if rng.random() < 0.5 else rewards, 16, width=2)


def _step_by_formula(scores, completion_ids, completion_mask, rewards, num_generations, learning_rate) -> Tensor:
    groups = rewards.view(-1, num_generations)
    scaled = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    advantages = torch.where(groups.amax(1, keepdim=True) == groups.amin(1, keepdim=True), 0.0, scaled)
    share = completion_mask / completion_mask.sum(1, keepdim=True) / len(rewards)
    return _climbed(scores, completion_ids, share * advantages.flatten()[:, None], learning_rate)


def _climbed(scores: Tensor, completion_ids: Tensor, weights: Tensor, learning_rate: float) -> Tensor:
    """Uphill on Σ weight · log p, with a weight (B, T) for each token: the gradient of log p is one-hot minus p."""
    pull = one_hot(completion_ids, scores.shape[1]) - scores.softmax(dim=1)
    return scores + learning_rate * (weights[..., None] * pull).sum(dim=0)


def _step_by_optimizer(scores, completion_ids, completion_mask, rewards, num_generations, learning_rate) -> Tensor:
    policy = nn.Parameter(scores.clone())
    optimizer = torch.optim.SGD([policy], lr=learning_rate)
    table = policy[None].expand(len(rewards), -1, -1).transpose(1, 2)
    nll = cross_entropy(table, completion_ids, reduction="none")
    ratio = (nll.detach() - nll).exp()
    gain = group_advantages(rewards, num_generations)[:, None]
    tokens = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain) * completion_mask
    (-tokens.sum(dim=1) / completion_mask.sum(dim=1)).mean().backward()
    optimizer.step()
    return policy.detach()


def _step_by_loop(scores, completion_ids, completion_mask, rewards, num_generations, learning_rate) -> Tensor:
    new = scores.clone()
    advantages = group_advantages(rewards, num_generations).tolist()
    for advantage, ids, mask in zip(advantages, completion_ids.tolist(), completion_mask.tolist(), strict=True):
        for place, token in enumerate(ids[: sum(mask)]):
            slope = -scores[place].softmax(dim=0)
            slope[token] += 1
            new[place] += learning_rate * advantage * slope / sum(mask) / len(rewards)
    return new


def _step_with(weigh: Callable[[Tensor, Tensor, int], Tensor]) -> Callable[..., Tensor]:
    """A wrong answer that weighs tokens in another way: weigh(rewards, mask, G) → (B, T)."""

    def wrong(scores, completion_ids, completion_mask, rewards, num_generations, learning_rate) -> Tensor:
        weights = weigh(rewards, completion_mask, num_generations)
        return _climbed(scores, completion_ids, weights, learning_rate)

    return wrong


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


def _of_probabilities(scores, completion_ids, completion_mask, rewards, num_generations, learning_rate) -> Tensor:
    chances = _token_logps(scores, completion_ids).exp()
    weights = _column(group_advantages(rewards, num_generations)) * _row_share(completion_mask) * chances
    return _climbed(scores, completion_ids, weights, learning_rate)


def _slope_alone(scores, completion_ids, completion_mask, rewards, num_generations, learning_rate) -> Tensor:
    new = grpo_step(scores, completion_ids, completion_mask, rewards, num_generations, learning_rate)
    return (scores - new) / learning_rate


check_grpo_step = Exercise(
    "grpo_step",
    grpo_step,
    parts=(
        Part("one group, whose completions are equally long", 2, _one_group),
        Part("two groups of different lengths", 3, _two_groups),
        Part("a group that ties", 1, _tied_group, draws=12),
    ),
    mistakes=(
        Mistake("nothing moves", "The value of the loss does not matter, its gradient does. `exp(logps - logps)` has "
                "none: what it is compared with must be detached.", lambda scores, *rest: scores.clone()),
        Mistake("the step goes uphill", "The loss has a minus, and descent has another: better ones get likelier.",
                _step_with(lambda r, mask, g: -_column(group_advantages(r, g)) * _row_share(mask))),
        Mistake("this is the gradient, not the new scores", "scores − learning_rate · gradient.", _slope_alone),
        Mistake("rewards are taken for advantages", "A reward is compared with those of its siblings first.",
                _step_with(lambda r, mask, g: _column(r) * _row_share(mask))),
        Mistake("the standard deviation divides by G", "The sample one divides by G − 1: `std(dim=1)` as it is.",
                _scaled_with(0, lambda groups: groups.amax(dim=1) == groups.amin(dim=1))),
        Mistake("a tie is worth a rounding error", "The mean of sixteen equal rewards may be another number. Put 0 "
                "where all rewards of a group are equal.",
                _scaled_with(1, lambda groups: torch.zeros(len(groups), dtype=torch.bool))),
        Mistake("a tie is looked for in the standard deviation", "With a single group, torch's std of equal rewards "
                "need not be 0. Compare the rewards with each other.",
                _scaled_with(1, lambda groups: groups.std(dim=1) == 0)),
        Mistake("advantages are not divided by the standard deviation", "Divide by the group's, plus 1e-4.",
                _step_with(lambda r, mask, g: _column(_centered(r, g)) * _row_share(mask))),
        Mistake("the whole batch is one group", "Each prompt's completions are compared among themselves.",
                _step_with(lambda r, mask, g: _column(group_advantages(r, len(r))) * _row_share(mask))),
        Mistake("groups are taken by stride", "A group's rows are neighbors: view(-1, G).",
                _step_with(lambda r, mask, g: _column(_by_stride(r, g)) * _row_share(mask))),
        Mistake("the learning rate is missing", "scores − learning_rate · gradient.",
                lambda scores, ids, mask, rewards, g, rate: grpo_step(scores, ids, mask, rewards, g, 1.0)),
        Mistake("the probability stands where the ratio should", "exp(logp − old logp), the old one detached: 1.",
                _of_probabilities),
        Mistake("completions are divided by the width", "By their own number of real tokens.",
                _step_with(lambda r, mask, g: _column(group_advantages(r, g)) * mask / mask.numel())),
        Mistake("padding counts", "Multiply by the mask, and divide by the number of real tokens.",
                _step_with(lambda r, mask, g: _column(group_advantages(r, g)) * _row_share(torch.ones_like(mask)))),
        Mistake("all tokens of the batch weigh alike", "The mean of each completion first, then over completions.",
                _step_with(lambda r, mask, g: _column(group_advantages(r, g)) * mask / mask.sum())),
        Mistake("the loss of the completions is added up", "A mean over the completions.",
                _step_with(lambda r, mask, g: _column(group_advantages(r, g)) * _row_share(mask) * len(r))),
    ),
    right=(_step_by_formula, _step_by_optimizer, _step_by_loop),
)  # fmt: skip
