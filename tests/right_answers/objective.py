"""Right answers to the exercises of `grpo_edu.checks.objective`, written in other ways than the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_edu.logprobs import logps_from_logits
from grpo_edu.losses import per_token_kl


def mask_by_loop(completion_ids: Tensor, eos_token_ids: list[int]) -> Tensor:
    mask = torch.zeros_like(completion_ids)
    for row, ids in enumerate(completion_ids.tolist()):
        for place, token in enumerate(ids):
            mask[row, place] = 1
            if token in eos_token_ids:
                break
    return mask


def mask_by_place(completion_ids: Tensor, eos_token_ids: list[int]) -> Tensor:
    width = completion_ids.shape[1]
    is_eos = (completion_ids[:, :, None] == torch.tensor(eos_token_ids)).any(dim=2)
    first = torch.where(is_eos.any(dim=1), is_eos.int().argmax(dim=1), width)
    return (torch.arange(width)[None] <= first[:, None]).long()


def mask_by_product(completion_ids: Tensor, eos_token_ids: list[int]) -> Tensor:
    alive = torch.ones_like(completion_ids)
    for end in eos_token_ids:
        alive = alive * (completion_ids != end)
    alive = alive.cumprod(dim=1)
    return torch.cat([torch.ones_like(alive[:, :1]), alive[:, :-1]], dim=1)


def logps_of_the_package(logits: Tensor, input_ids: Tensor, prompt_length: int, temperature: float) -> Tensor:
    return logps_from_logits(logits[:, prompt_length - 1 : -1] / temperature, input_ids[:, prompt_length:])


def logps_by_loop(logits: Tensor, input_ids: Tensor, prompt_length: int, temperature: float) -> Tensor:
    rows = []
    for row_logits, ids in zip(logits.double(), input_ids.tolist(), strict=True):
        row = []
        for place in range(prompt_length, len(ids)):
            scores = row_logits[place - 1] / temperature
            row.append(scores[ids[place]] - scores.exp().sum().log())
        rows.append(torch.stack(row))
    return torch.stack(rows)


def logps_by_cross_entropy(logits: Tensor, input_ids: Tensor, prompt_length: int, temperature: float) -> Tensor:
    scores = (logits / temperature)[:, :-1].transpose(1, 2)
    loss = torch.nn.functional.cross_entropy(scores, input_ids[:, 1:], reduction="none")
    return -loss[:, prompt_length - 1 :]


def clip_by_cases(per_token_logps, old_per_token_logps, advantages, epsilon_low, epsilon_high):
    out = torch.empty_like(per_token_logps)
    for row in range(len(out)):
        for place in range(out.shape[1]):
            gain = advantages[row].item()
            ratio = (per_token_logps[row, place] - old_per_token_logps[row, place]).exp()
            bounded = ratio.clamp(max=1 + epsilon_high) if gain > 0 else ratio.clamp(min=1 - epsilon_low)
            out[row, place] = -bounded * gain
    return out


def clip_by_max(per_token_logps, old_per_token_logps, advantages, epsilon_low, epsilon_high):
    ratio = torch.exp(per_token_logps - old_per_token_logps)
    loss = -ratio * advantages.unsqueeze(1)
    return torch.maximum(loss, -torch.clip(ratio, 1 - epsilon_low, 1 + epsilon_high) * advantages.unsqueeze(1))


def clip_by_where(per_token_logps, old_per_token_logps, advantages, epsilon_low, epsilon_high):
    ratio = per_token_logps.exp() / old_per_token_logps.exp()
    gain = advantages.view(-1, 1).expand_as(ratio)
    return -gain * torch.where(gain >= 0, ratio.clamp(max=1 + epsilon_high), ratio.clamp(min=1 - epsilon_low))


def k3_by_ratio(per_token_logps: Tensor, ref_per_token_logps: Tensor) -> Tensor:
    ratio = ref_per_token_logps.exp() / per_token_logps.exp()
    return ratio - ratio.log() - 1


def k3_by_expm1(per_token_logps: Tensor, ref_per_token_logps: Tensor) -> Tensor:
    apart = ref_per_token_logps - per_token_logps
    return torch.expm1(apart) - apart


RIGHT_ANSWERS = {
    "completion_mask": (mask_by_loop, mask_by_place, mask_by_product),
    "completion_logps": (logps_of_the_package, logps_by_loop, logps_by_cross_entropy),
    "clipped_loss": (clip_by_cases, clip_by_max, clip_by_where),
    "k3": (per_token_kl, k3_by_ratio, k3_by_expm1),
}
