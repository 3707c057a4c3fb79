"""Exercises of notebook 04, third part: how tokens become one number, and what it tells."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from grpo_edu.checks.core import Call, Exercise, Mistake, Part, call
from grpo_edu.checks.objective import numbers
from grpo_edu.losses import reduce_loss

# ---- inputs ----


def mask_of(lengths: list[int], width: int) -> Tensor:
    """(B, width), ones up to each length."""
    return (torch.arange(width)[None] < torch.tensor(lengths)[:, None]).long()


# ---- aggregate ----


def aggregate(per_token_loss: Tensor, mask: Tensor, loss_type: str, max_completion_length: int) -> Tensor:
    """The package's `reduce_loss` for "grpo", "dapo" and "dr_grpo"."""
    return reduce_loss(per_token_loss, mask, loss_type=loss_type, max_completion_length=max_completion_length)


def _losses_for(loss_type: str) -> Callable[[random.Random], Call]:
    def draw(rng: random.Random) -> Call:
        lengths = [rng.randrange(1, 4), rng.randrange(1, 4), 5]
        return call(numbers(rng, 3, 5), mask_of(lengths, 5), loss_type, rng.choice([6, 8, 10]))

    return draw


def _aggregate_by_loop(per_token_loss, mask, loss_type, max_completion_length):
    rows = [
        [value for value, counts in zip(row, counted, strict=True) if counts]
        for row, counted in zip(per_token_loss.tolist(), mask.tolist(), strict=True)
    ]
    tokens = sum(rows, [])
    if loss_type == "grpo":
        return sum(sum(row) / len(row) for row in rows) / len(rows)
    return sum(tokens) / (len(tokens) if loss_type == "dapo" else len(rows) * max_completion_length)


def _aggregate_by_weights(per_token_loss, mask, loss_type, max_completion_length):
    weights = {
        "grpo": mask / mask.sum(dim=1, keepdim=True) / len(mask),
        "dapo": mask / mask.sum(),
        "dr_grpo": mask / (len(mask) * max_completion_length),
    }
    return (weights[loss_type] * per_token_loss).sum()


def _aggregate_by_einsum(per_token_loss, mask, loss_type, max_completion_length):
    sums, counts = torch.einsum("bc,bc->b", per_token_loss, mask.float()), mask.sum(dim=1)
    if loss_type == "grpo":
        return (sums / counts).mean()
    return sums.sum() / (counts.sum() if loss_type == "dapo" else mask.shape[0] * max_completion_length)


def _unmasked(per_token_loss, mask, loss_type, max_completion_length):
    return aggregate(per_token_loss, torch.ones_like(mask), loss_type, max_completion_length)


def _batch_width(per_token_loss, mask, loss_type, max_completion_length):
    return aggregate(per_token_loss, mask, loss_type, mask.shape[1])


def _padding_counted(per_token_loss, mask, loss_type, max_completion_length):
    if loss_type == "dr_grpo":
        return aggregate(per_token_loss, mask, loss_type, max_completion_length)
    return (per_token_loss * mask).mean()


def _rows_added_up(per_token_loss, mask, loss_type, max_completion_length):
    right = aggregate(per_token_loss, mask, loss_type, max_completion_length)
    return right if loss_type == "dapo" else right * len(mask)


def _no_limit(per_token_loss, mask, loss_type, max_completion_length):
    right = aggregate(per_token_loss, mask, loss_type, max_completion_length)
    return right * max_completion_length if loss_type == "dr_grpo" else right


def _always(loss_type: str) -> Callable:
    def wrong(per_token_loss, mask, asked, max_completion_length):
        return aggregate(per_token_loss, mask, loss_type, max_completion_length)

    return wrong


check_aggregate = Exercise(
    "aggregate",
    aggregate,
    parts=(
        Part("grpo", 2, _losses_for("grpo")),
        Part("dapo", 1, _losses_for("dapo")),
        Part("dr_grpo", 2, _losses_for("dr_grpo")),
    ),
    mistakes=(
        Mistake("padding counts", "Multiply by the mask, and divide by what is left.", _unmasked),
        Mistake("padding counts in the number of tokens", "Divide by the number of tokens with mask 1: of the row, or "
                "of all.", _padding_counted),
        Mistake("the number of rows is missing", "\"grpo\" is a *mean* over the rows, and \"dr_grpo\" divides by B as "
                "well as by the limit.", _rows_added_up),
        Mistake("the limit is missing", "\"dr_grpo\" divides by B · max_completion_length.", _no_limit),
        Mistake("the width of this batch is taken for the limit", "Dr. GRPO divides by a constant that no batch "
                "changes: max_completion_length.", _batch_width),
        Mistake("all tokens weigh alike, whatever was asked", "\"grpo\" takes the mean of each row first.",
                _always("dapo")),
        Mistake("rows weigh alike, whatever was asked", "\"dapo\" counts tokens, not rows.", _always("grpo")),
        Mistake("the sum is not divided", "Divide by what the loss type names.",
                lambda loss, mask, loss_type, limit: (loss * mask).sum()),
    ),
    right=(_aggregate_by_loop, _aggregate_by_weights, _aggregate_by_einsum),
)  # fmt: skip


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


def _first_by_tokens(advantages, lengths):
    rows = [[-a] * length for a, length in zip(advantages, lengths, strict=True)]
    tokens = sum(rows, [])
    of_dapo = sum(tokens) / len(tokens)
    verdict = "neither" if abs(of_dapo) < 1e-6 else ("bad" if of_dapo > 0 else "good")
    return sum(sum(row) / len(row) for row in rows) / len(rows), of_dapo, verdict


def _first_by_aggregate(advantages, lengths):
    mask = mask_of(lengths, max(lengths))
    loss = -torch.tensor(advantages)[:, None].expand(mask.shape)
    of_grpo, of_dapo = (aggregate(loss, mask, loss_type, max(lengths)).item() for loss_type in ("grpo", "dapo"))
    if of_dapo < -1e-6:
        return of_grpo, of_dapo, "good"
    return of_grpo, of_dapo, "bad" if of_dapo > 1e-6 else "neither"


def _first_by_insight(advantages, lengths):
    """The advantages of a group add up to 0, and with them the loss of "grpo"."""
    tilt = torch.tensor(advantages).double() @ torch.tensor(lengths).double()
    return 0.0, -tilt.item() / sum(lengths), ("good", "neither", "bad")[1 - int(tilt.round(decimals=6).sign())]


def _first_with(of_dapo: Callable[[list[float], list[int]], float]) -> Callable:
    """Another loss of "dapo", and what it would tell."""

    def wrong(advantages, lengths):
        return first_loss(advantages, lengths)[0], of_dapo(advantages, lengths), longer(of_dapo(advantages, lengths))

    return wrong


def _tilt(advantages: list[float], lengths: list[int]) -> float:
    return sum(a * length for a, length in zip(advantages, lengths, strict=True))


def _turned_verdict(advantages, lengths):
    of_grpo, of_dapo, _ = first_loss(advantages, lengths)
    return of_grpo, of_dapo, longer(-of_dapo)


def _longer_together(advantages, lengths):
    good, bad = (sum(n for a, n in zip(advantages, lengths, strict=True) if sign * a > 0) for sign in (1, -1))
    verdict = "neither" if good == bad else ("good" if good > bad else "bad")
    return *first_loss(advantages, lengths)[:2], verdict


def _no_minus(advantages, lengths):
    of_grpo, of_dapo, verdict = first_loss(advantages, lengths)
    return -of_grpo, -of_dapo, verdict


def _no_tolerance(advantages, lengths):
    of_grpo, of_dapo, _ = first_loss(advantages, lengths)
    return of_grpo, of_dapo, "neither" if of_dapo == 0 else ("good" if of_dapo < 0 else "bad")


check_first_loss = Exercise(
    "first_loss",
    first_loss,
    parts=(
        Part("completions of different lengths", 3, _different_lengths, draws=16),
        Part("completions of equal length", 1, _equal_lengths),
    ),
    mistakes=(
        Mistake("the sign is missing", "Where the ratio is 1, the loss of a token is *minus* its advantage.",
                _first_with(lambda advantages, lengths: _tilt(advantages, lengths) / sum(lengths))),
        Mistake("the losses have no minus", "Where the ratio is 1, the loss of a token is *minus* its advantage.",
                _no_minus),
        Mistake("a rounding error tells something", "Thirds do not add up to 0: within a millionth it is \"neither\".",
                _no_tolerance),
        Mistake("the tokens of each side are added up", "Many short completions have many tokens, too: read the "
                "verdict from the sign of the second number.", _longer_together),
        Mistake("the verdict is read from \"grpo\"", "That number is always 0. Read it from the second one.",
                lambda advantages, lengths: (*first_loss(advantages, lengths)[:2], "neither")),
        Mistake("\"dapo\" weighs completions alike", "Each token of a completion has its advantage, and \"dapo\" takes "
                "the mean over tokens.", _first_with(lambda advantages, lengths: -sum(advantages) / len(advantages))),
        Mistake("\"dapo\" is divided by the number of completions", "Sum over tokens, divided by the number of tokens.",
                _first_with(lambda advantages, lengths: -_tilt(advantages, lengths) / len(lengths))),
        Mistake("\"dapo\" is not divided", "Sum over tokens, divided by the number of tokens.",
                _first_with(lambda advantages, lengths: -_tilt(advantages, lengths))),
        Mistake("\"grpo\" weighs tokens alike", "\"grpo\" takes each completion's mean first: long or short, it counts "
                "once.", lambda advantages, lengths: (
                    first_loss(advantages, lengths)[1], *first_loss(advantages, lengths)[1:])),
        Mistake("the verdict is upside down", "A completion with a positive advantage has a negative loss.",
                _turned_verdict),
    ),
    right=(_first_by_tokens, _first_by_aggregate, _first_by_insight),
)  # fmt: skip
