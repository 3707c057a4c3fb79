"""Right answers to the exercises of `grpo_edu.checks.losses`, written in other ways than the reference."""

from __future__ import annotations

import torch

from grpo_edu.checks.inputs import mask_of
from grpo_edu.checks.losses import aggregate
from grpo_edu.losses import importance_ratio, reduce_loss


def difference_by_matrix(function, x, h):
    steps = h * torch.eye(len(x), dtype=x.dtype)
    return torch.stack([function(x + step) - function(x - step) for step in steps]) / (2 * h)


def difference_by_list(function, x, h):
    slopes, values = [], x.tolist()
    for place, value in enumerate(values):
        up, down = list(values), list(values)
        up[place], down[place] = value + h, value - h
        slopes.append((function(torch.tensor(up, dtype=x.dtype)) - function(torch.tensor(down, dtype=x.dtype))).item())
    return torch.tensor(slopes, dtype=x.dtype) / h / 2


def difference_by_clone(function, x, h):
    out = torch.zeros_like(x)
    for place in range(len(x)):
        moved = x.clone()
        moved[place] += h
        above = function(moved)
        moved[place] -= 2 * h
        out[place] = (above - function(moved)) / (2 * h)
    return out


def aggregate_of_the_package(per_token_loss, mask, loss_type, max_completion_length, update_rows, update_tokens):
    share = 1 if loss_type == "dapo" else len(mask) / update_rows
    options = {"max_completion_length": max_completion_length, "num_items": update_tokens}
    return share * reduce_loss(per_token_loss, mask, loss_type=loss_type, **options)


def aggregate_by_loop(per_token_loss, mask, loss_type, max_completion_length, update_rows, update_tokens):
    rows = [row[counted == 1] for row, counted in zip(per_token_loss, mask, strict=True)]
    tokens = torch.cat(rows)
    if loss_type == "grpo":
        return sum(row.mean() for row in rows) / update_rows
    return sum(tokens) / (update_tokens if loss_type == "dapo" else update_rows * max_completion_length)


def aggregate_by_weights(per_token_loss, mask, loss_type, max_completion_length, update_rows, update_tokens):
    weights = {
        "grpo": mask / mask.sum(dim=1, keepdim=True) / update_rows,
        "dapo": mask / update_tokens,
        "dr_grpo": mask / (update_rows * max_completion_length),
    }
    return (weights[loss_type] * per_token_loss).sum()


def first_by_tokens(advantages, lengths):
    rows = [[-a] * length for a, length in zip(advantages, lengths, strict=True)]
    tokens = sum(rows, [])
    of_dapo = sum(tokens) / len(tokens)
    verdict = "neither" if abs(of_dapo) < 1e-6 else ("bad" if of_dapo > 0 else "good")
    return sum(sum(row) / len(row) for row in rows) / len(rows), of_dapo, verdict


def first_by_aggregate(advantages, lengths):
    mask = mask_of(lengths, max(lengths))
    loss = -torch.tensor(advantages)[:, None].expand(mask.shape)
    sizes = max(lengths), len(mask), int(mask.sum())
    of_grpo, of_dapo = (aggregate(loss, mask, loss_type, *sizes).item() for loss_type in ("grpo", "dapo"))
    if of_dapo < -1e-6:
        return of_grpo, of_dapo, "good"
    return of_grpo, of_dapo, "bad" if of_dapo > 1e-6 else "neither"


def first_by_insight(advantages, lengths):
    """The advantages of a group add up to 0, and with them the loss of "grpo"."""
    tilt = torch.tensor(advantages).double() @ torch.tensor(lengths).double()
    return 0.0, -tilt.item() / sum(lengths), ("good", "neither", "bad")[1 - int(tilt.round(decimals=6).sign())]


def sequence_by_mean(per_token_logps, old_per_token_logps, completion_mask):
    change = torch.where(completion_mask == 1, per_token_logps - old_per_token_logps, torch.nan)
    return change.nanmean(dim=1).exp()


def sequence_by_root(per_token_logps, old_per_token_logps, completion_mask):
    ratios = torch.where(completion_mask == 1, (per_token_logps - old_per_token_logps).exp(), 1.0)
    return ratios.prod(dim=1) ** (1 / completion_mask.sum(dim=1))


def sequence_of_the_package(per_token_logps, old_per_token_logps, completion_mask):
    return importance_ratio(
        per_token_logps, old_per_token_logps, completion_mask, importance_sampling_level="sequence"
    )[:, 0]


RIGHT_ANSWERS = {
    "aggregate": (aggregate_of_the_package, aggregate_by_loop, aggregate_by_weights),
    "first_loss": (first_by_tokens, first_by_aggregate, first_by_insight),
    "sequence_ratio": (sequence_of_the_package, sequence_by_mean, sequence_by_root),
    "finite_difference": (difference_by_matrix, difference_by_list, difference_by_clone),
}
