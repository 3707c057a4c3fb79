"""Right answers to the exercises of `grpo_edu.checks.objective`, written in other ways than the reference."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from grpo_edu.checks.inputs import mask_of
from grpo_edu.checks.objective import aggregate


def mask_by_loop(completion_ids: Tensor, eos_token_id: int) -> Tensor:
    mask = torch.zeros_like(completion_ids)
    for row, ids in enumerate(completion_ids.tolist()):
        length = ids.index(eos_token_id) + 1 if eos_token_id in ids else len(ids)
        mask[row, :length] = 1
    return mask


def mask_by_place(completion_ids: Tensor, eos_token_id: int) -> Tensor:
    width = completion_ids.shape[1]
    is_eos = completion_ids == eos_token_id
    first = torch.where(is_eos.any(dim=1), is_eos.int().argmax(dim=1), width)
    return (torch.arange(width)[None] <= first[:, None]).long()


def mask_by_product(completion_ids: Tensor, eos_token_id: int) -> Tensor:
    alive = (completion_ids != eos_token_id).long().cumprod(dim=1)
    return torch.cat([torch.ones_like(alive[:, :1]), alive[:, :-1]], dim=1)


def logps_by_loop(logits: Tensor, input_ids: Tensor, prompt_length: int) -> Tensor:
    rows = []
    for row_logits, ids in zip(logits.double(), input_ids.tolist(), strict=True):
        row = []
        for place in range(prompt_length, len(ids)):
            scores = row_logits[place - 1]
            row.append((scores[ids[place]] - scores.exp().sum().log()).item())
        rows.append(row)
    return torch.tensor(rows)


def logps_by_softmax(logits: Tensor, input_ids: Tensor, prompt_length: int) -> Tensor:
    logps = logits.log_softmax(dim=-1)[:, :-1].gather(2, input_ids[:, 1:, None]).squeeze(2)
    return logps[:, prompt_length - 1 :]


def logps_by_cross_entropy(logits: Tensor, input_ids: Tensor, prompt_length: int) -> Tensor:
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), input_ids[:, 1:], reduction="none")
    return -loss[:, prompt_length - 1 :]


def clip_by_cases(per_token_logps, old_per_token_logps, advantages, epsilon):
    out = torch.empty_like(per_token_logps)
    for row in range(len(out)):
        for place in range(out.shape[1]):
            gain = advantages[row].item()
            ratio = math.exp(per_token_logps[row, place].item() - old_per_token_logps[row, place].item())
            bounded = min(ratio, 1 + epsilon) if gain > 0 else max(ratio, 1 - epsilon)
            out[row, place] = -bounded * gain
    return out


def clip_by_max(per_token_logps, old_per_token_logps, advantages, epsilon):
    ratio = torch.exp(per_token_logps - old_per_token_logps)
    loss = -ratio * advantages.unsqueeze(1)
    return torch.maximum(loss, -torch.clip(ratio, 1 - epsilon, 1 + epsilon) * advantages.unsqueeze(1))


def clip_by_where(per_token_logps, old_per_token_logps, advantages, epsilon):
    ratio = per_token_logps.exp() / old_per_token_logps.exp()
    gain = advantages.view(-1, 1).expand_as(ratio)
    return -gain * torch.where(gain >= 0, ratio.clamp(max=1 + epsilon), ratio.clamp(min=1 - epsilon))


def k3_by_ratio(per_token_logps: Tensor, ref_per_token_logps: Tensor) -> Tensor:
    ratio = ref_per_token_logps.exp() / per_token_logps.exp()
    return ratio - ratio.log() - 1


def k3_by_expm1(per_token_logps: Tensor, ref_per_token_logps: Tensor) -> Tensor:
    apart = ref_per_token_logps - per_token_logps
    return torch.expm1(apart) - apart


def k3_by_loop(per_token_logps: Tensor, ref_per_token_logps: Tensor) -> Tensor:
    pairs = zip(per_token_logps.flatten().tolist(), ref_per_token_logps.flatten().tolist(), strict=True)
    values = [math.exp(ref - logp) - (ref - logp) - 1 for logp, ref in pairs]
    return torch.tensor(values).view_as(per_token_logps)


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


def aggregate_by_loop(per_token_loss, mask, loss_type, max_completion_length):
    rows = [
        [value for value, counts in zip(row, counted, strict=True) if counts]
        for row, counted in zip(per_token_loss.tolist(), mask.tolist(), strict=True)
    ]
    tokens = sum(rows, [])
    if loss_type == "grpo":
        return sum(sum(row) / len(row) for row in rows) / len(rows)
    return sum(tokens) / (len(tokens) if loss_type == "dapo" else len(rows) * max_completion_length)


def aggregate_by_weights(per_token_loss, mask, loss_type, max_completion_length):
    weights = {
        "grpo": mask / mask.sum(dim=1, keepdim=True) / len(mask),
        "dapo": mask / mask.sum(),
        "dr_grpo": mask / (len(mask) * max_completion_length),
    }
    return (weights[loss_type] * per_token_loss).sum()


def aggregate_by_einsum(per_token_loss, mask, loss_type, max_completion_length):
    sums, counts = torch.einsum("bc,bc->b", per_token_loss, mask.float()), mask.sum(dim=1)
    if loss_type == "grpo":
        return (sums / counts).mean()
    return sums.sum() / (counts.sum() if loss_type == "dapo" else mask.shape[0] * max_completion_length)


def first_by_tokens(advantages, lengths):
    rows = [[-a] * length for a, length in zip(advantages, lengths, strict=True)]
    tokens = sum(rows, [])
    of_dapo = sum(tokens) / len(tokens)
    verdict = "neither" if abs(of_dapo) < 1e-6 else ("bad" if of_dapo > 0 else "good")
    return sum(sum(row) / len(row) for row in rows) / len(rows), of_dapo, verdict


def first_by_aggregate(advantages, lengths):
    mask = mask_of(lengths, max(lengths))
    loss = -torch.tensor(advantages)[:, None].expand(mask.shape)
    of_grpo, of_dapo = (aggregate(loss, mask, loss_type, max(lengths)).item() for loss_type in ("grpo", "dapo"))
    if of_dapo < -1e-6:
        return of_grpo, of_dapo, "good"
    return of_grpo, of_dapo, "bad" if of_dapo > 1e-6 else "neither"


def first_by_insight(advantages, lengths):
    """The advantages of a group add up to 0, and with them the loss of "grpo"."""
    tilt = torch.tensor(advantages).double() @ torch.tensor(lengths).double()
    return 0.0, -tilt.item() / sum(lengths), ("good", "neither", "bad")[1 - int(tilt.round(decimals=6).sign())]


RIGHT_ANSWERS = {
    "completion_mask": (mask_by_loop, mask_by_place, mask_by_product),
    "completion_logps": (logps_by_loop, logps_by_softmax, logps_by_cross_entropy),
    "clipped_loss": (clip_by_cases, clip_by_max, clip_by_where),
    "k3": (k3_by_ratio, k3_by_expm1, k3_by_loop),
    "finite_difference": (difference_by_matrix, difference_by_list, difference_by_clone),
    "aggregate": (aggregate_by_loop, aggregate_by_weights, aggregate_by_einsum),
    "first_loss": (first_by_tokens, first_by_aggregate, first_by_insight),
}
