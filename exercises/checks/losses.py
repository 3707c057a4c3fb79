"""Exercises on the family of losses: reduction, the first loss, one ratio per completion, and a checked gradient."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from grpo_edu.checks.core import Call, Exercise, Part, call
from grpo_edu.checks.inputs import Polynomial, gradient_of, mask_of, numbers
from grpo_edu.checks.trained import TrainedExercise, trained_part


# ---- aggregate ----
def aggregate(
    per_token_loss: Tensor,
    mask: Tensor,
    loss_type: str,
    max_completion_length: int,
    update_rows: int,
    update_tokens: int,
) -> Tensor:
    """Return what a micro-batch adds to the loss of an update, for "grpo", "dapo" and "dr_grpo"."""
    losses = per_token_loss * mask
    if loss_type == "grpo":
        return (losses.sum(dim=1) / mask.sum(dim=1)).sum() / update_rows
    if loss_type == "dapo":
        return losses.sum() / update_tokens
    return losses.sum() / (update_rows * max_completion_length)


TYPES = ("grpo", "dapo", "dr_grpo")


def _losses_for(loss_type: str, rng: random.Random) -> Call:
    lengths = [rng.randrange(1, 4), rng.randrange(1, 4), 5]
    rows, tokens = 3 * rng.randrange(2, 5), sum(lengths) + rng.randrange(5, 40)
    return call(numbers(rng, 3, 5), mask_of(lengths, 5), loss_type, rng.choice([6, 8, 10]), rows, tokens)


check_aggregate = TrainedExercise(
    aggregate,
    parts=(
        Part("grpo", 2, lambda rng: _losses_for("grpo", rng)),
        Part("dapo", 1, lambda rng: _losses_for("dapo", rng)),
        Part("dr_grpo", 1, lambda rng: _losses_for("dr_grpo", rng)),
        Part("the gradient of each", 1, lambda rng: _losses_for(rng.choice(TYPES), rng), draws=9, ask=gradient_of),
        trained_part("aggregate"),
    ),
    changes="""
        padding counts: per_token_loss * mask -> per_token_loss; mask.sum(dim=1) -> mask.shape[1]
            Only tokens with mask 1 count, both in the sum and in the number of tokens.
        padding counts in the sum: per_token_loss * mask -> per_token_loss
            Only tokens with mask 1 count.
        padding counts in the number of tokens: mask.sum(dim=1) -> mask.shape[1]
            The mean of a row is over its tokens with mask 1.
        the micro-batch is treated as the whole update:
            aggregate(per_token_loss, mask, loss_type, max_completion_length, len(mask), mask.sum())
            The results of all micro-batches are added up, so divide by the numbers of the whole update.
        in "grpo", the micro-batch is treated as the whole update: / update_rows -> / len(mask)
            The results of all micro-batches are added up, so divide by the rows of the whole update.
        the rows of the micro-batch are counted in "dr_grpo": (update_rows * max -> (len(mask) * max
            B is the number of rows in the whole update.
        the mean of each row is missing:
            (losses.sum(dim=1) / mask.sum(dim=1)).sum() / update_rows -> losses.sum() / update_rows
            "grpo" first takes the mean of each row over its tokens.
        the rows of the micro-batch are counted:
            aggregate(per_token_loss, mask, loss_type, max_completion_length, len(mask), update_tokens)
            B is the number of rows in the whole update.
        the tokens of the micro-batch are counted:
            aggregate(per_token_loss, mask, loss_type, max_completion_length, update_rows, mask.sum())
            "dapo" divides by the tokens of the whole update.
        each micro-batch counts equally: / update_tokens -> / mask.sum() * len(mask) / update_rows
            That is BNPO: the weight of a token depends on how the update was divided. "dapo" gives all tokens
            the same weight.
        the number of rows is missing:
            aggregate(per_token_loss, mask, loss_type, max_completion_length, 1, update_tokens)
            "grpo" is a *mean* over the rows, and "dr_grpo" divides by B as well as by the limit.
        the limit is missing: update_rows * max_completion_length -> update_rows
            "dr_grpo" divides by B · max_completion_length.
        the width of this batch is used as the limit: (update_rows * max_completion_length) -> mask.numel()
            Dr. GRPO divides by a constant that does not depend on the batch: max_completion_length.
            or: update_rows * max_completion_length -> update_rows * mask.shape[1]
        every loss type gives all tokens the same weight:
            aggregate(per_token_loss, mask, "dapo", max_completion_length, update_rows, update_tokens)
            "grpo" takes the mean of each row first.
        every loss type gives all rows the same weight:
            aggregate(per_token_loss, mask, "grpo", max_completion_length, update_rows, update_tokens)
            "dapo" counts tokens, not rows.
        the mean of a column is taken, not of a row:
            (losses.sum(dim=1) / mask.sum(dim=1)).sum() / update_rows -> (losses.sum(dim=0) / mask.sum(dim=0)).mean()
            A row is a completion, so use dim=1.
        the sum is not divided: (per_token_loss * mask).sum()
            Each loss type divides the sum by something: see the table of the task.
    """,
)


# ---- first_loss ----
def first_loss(advantages: list[float], lengths: list[int]) -> tuple[float, float, str]:
    """(the loss of "grpo", that of "dapo", which completions were longer), where every ratio is 1."""
    summed = [advantage * length for advantage, length in zip(advantages, lengths, strict=True)]
    of_grpo = -sum(advantages) / len(advantages)
    of_dapo = -sum(summed) / sum(lengths)
    return of_grpo, of_dapo, longer(of_dapo)


def longer(of_dapo: float) -> str:
    """Return what the first loss of "dapo" tells."""
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


def _side_with_more_tokens(advantages: list[float], lengths: list[int]) -> str:
    good, bad = (sum(n for a, n in zip(advantages, lengths, strict=True) if sign * a > 0) for sign in (1, -1))
    return "neither" if good == bad else ("good" if good > bad else "bad")


def _side_with_longer_mean(advantages: list[float], lengths: list[int]) -> str:
    good, bad = ([n for a, n in zip(advantages, lengths, strict=True) if sign * a > 0] for sign in (1, -1))
    apart = sum(good) * len(bad) - sum(bad) * len(good)
    return "neither" if apart == 0 else ("good" if apart > 0 else "bad")


def _different_lengths(rng: random.Random) -> Call:
    """Every second time the fewer completions are the longer ones, and the more have more tokens together."""
    fewer = rng.random() < 0.5
    while True:
        advantages, lengths = _one_group(rng)
        verdict = first_loss(advantages, lengths)[2]
        if verdict != "neither" and (not fewer or verdict != _side_with_more_tokens(advantages, lengths)):
            return call(advantages, lengths)


def _equal_lengths(rng: random.Random) -> Call:
    """Rounded thirds do not always add up to 0: what comes out is a rounding error."""
    while True:
        advantages, lengths = _one_group(rng, 3)
        if first_loss(advantages, lengths[:1] * 3)[1]:
            return call(advantages, lengths[:1] * 3)


check_first_loss = Exercise(
    first_loss,
    parts=(
        Part(
            "completions of different lengths",
            3,
            _different_lengths,
            draws=16,
            always=(call([2.0, 1.0, -2.5, -0.5], [4, 10, 9, 2]),),  # the good ones are longer on average, and together
        ),
        Part("completions of equal length", 1, _equal_lengths),
    ),
    changes="""
        the sign is missing: of_dapo = -sum(summed) -> of_dapo = sum(summed)
            Where the ratio is 1, the loss of a token is *minus* its advantage.
            or: return of_grpo, of_dapo -> return -of_grpo, -of_dapo
        a rounding error counts as a difference in length: longer(of_dapo) -> "good" if of_dapo < 0 else "bad"
            Rounded thirds need not add up to exactly 0. A value within a millionth of 0 means "neither".
        the total numbers of tokens on the two sides are compared:
            longer(of_dapo) -> _side_with_more_tokens(advantages, lengths)
            Many short completions can have many tokens in total. Take the verdict from the sign of the second number.
        the mean lengths of the two sides are compared: longer(of_dapo) -> _side_with_longer_mean(advantages, lengths)
            A completion with a large advantage weighs more than one with a small one. Take the verdict from the sign
            of the second number.
        the verdict is taken from "grpo": longer(of_dapo) -> "neither"
            The first number is always 0. Take the verdict from the second one.
        "dapo" gives all completions the same weight: -sum(summed) / sum(lengths) -> of_grpo
            Each token of a completion has its advantage, and "dapo" takes the mean over tokens.
        the sum of "dapo" is divided by the number of completions: sum(lengths) -> len(lengths)
            "dapo" is the sum over all tokens, divided by the number of tokens.
        the sum of "dapo" is not divided: sum(lengths) -> 1
            "dapo" is the sum over all tokens, divided by the number of tokens.
        "grpo" gives all tokens the same weight: return of_grpo -> return of_dapo
            "grpo" takes the mean of each completion first, so a completion counts once, however long it is.
        the verdict is reversed: longer(of_dapo) -> longer(-of_dapo)
            A completion with a positive advantage has a negative loss.
    """,
)


# ---- sequence_ratio ----
def sequence_ratio(per_token_logps: Tensor, old_per_token_logps: Tensor, completion_mask: Tensor) -> Tensor:
    """(B,), the geometric mean of the ratios of each completion's tokens."""
    logs = (per_token_logps - old_per_token_logps) * completion_mask
    mean = logs.sum(dim=1) / completion_mask.sum(dim=1)
    return mean.exp()


def _moved_completions(rng: random.Random) -> Call:
    lengths = [rng.randrange(2, 5), rng.randrange(2, 5), 6]
    old = numbers(rng, 3, 6, low=-2.0, high=-0.6)
    return call(old + numbers(rng, 3, 6, low=-0.5, high=0.5), old, mask_of(lengths, 6))


check_sequence_ratio = Exercise(
    sequence_ratio,
    parts=(
        Part("completions of different lengths", 3, _moved_completions),
        Part("the gradient", 1, _moved_completions, ask=gradient_of),
    ),
    changes="""
        the ratio is not normalized by the length: logs.sum(dim=1) / completion_mask.sum(dim=1) -> logs.sum(dim=1)
            The product of many ratios depends on how many there are. Use the *mean* of the logarithms.
        padding counts: sequence_ratio(per_token_logps, old_per_token_logps, torch.ones_like(completion_mask))
            Only tokens with mask 1 count, in the sum and in the number of tokens.
        padding counts in the number of tokens: logs.sum(dim=1) / completion_mask.sum(dim=1) -> logs.mean(dim=1)
            Divide by the tokens of each completion, `mask.sum(dim=1)`.
        the arithmetic mean of the ratios is returned:
            mean.exp() -> (logs.exp() * completion_mask).sum(dim=1) / completion_mask.sum(dim=1)
            For the geometric mean, average the *logarithms* of the ratios, then take the exponential.
        the old and the new policy are swapped: sequence_ratio(old_per_token_logps, per_token_logps, completion_mask)
            The new policy is in the numerator, the old one in the denominator.
        the logarithm of the ratio is returned: mean.exp() -> mean
            Where nothing has changed, the ratio is 1, not 0.
        there is only one ratio for the whole batch: mean.exp() -> (logs.sum() / completion_mask.sum()).exp()
            Return one ratio per completion, shape (B,).
    """,
)


# ---- finite_difference ----
def finite_difference(function: Callable[[Tensor], Tensor], x: Tensor, h: float) -> Tensor:
    """Return the gradient of a scalar function at x (n,), by central differences."""
    slopes = []
    for step in h * torch.eye(len(x), dtype=x.dtype):
        above, below = function(x + step), function(x - step)
        slopes.append((above - below) / (2 * h))
    return torch.stack(slopes)


def _some_function(rng: random.Random) -> Call:
    function = Polynomial(rng.randrange(1, 4), rng.randrange(1, 4))
    return call(function, numbers(rng, 3).double(), 1e-2)


check_finite_difference = Exercise(
    finite_difference,
    parts=(Part("functions of three numbers", 3, _some_function),),
    tolerance=1e-6,
    changes="""
        the difference is one-sided: (above - below) / (2 * h) -> (above - function(x)) / h
            Take a step to both sides, so that the error shrinks with h² instead of h.
            or: (above - below) / (2 * h) -> (function(x) - below) / h
        the sign is wrong: -finite_difference(function, x, h)
            Subtract the value below from the value above.
        the difference is divided by 2 and then multiplied by h: / (2 * h) -> / 2 * h
            Python evaluates `/ 2 * h` from left to right. Where do you need parentheses?
        autograd's gradient is returned: torch.autograd.functional.jacobian(function, x)
            The function should check autograd, so do not use it: call the function on both sides instead.
        the difference is divided by h, not by 2h: (2 * h) -> h
            How far apart are the two points?
        the difference is not divided by anything: (2 * h) -> 1
            A slope is a difference divided by the distance between the two points.
        all entries are changed at once: ((function(x + h) - function(x - h)) / (2 * h)).expand(len(x)).clone()
            Change one entry of x at a time and keep the others.
    """,
)
