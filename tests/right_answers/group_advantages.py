"""Right answers to the exercises of `grpo_edu.checks.group_advantages`, written in other ways than the reference."""

from __future__ import annotations

import torch
from torch import Tensor


def by_loop(rewards: Tensor, num_generations: int) -> Tensor:
    out = []
    for group in rewards.split(num_generations):
        centered = group - group.mean()
        scaled = centered / (group.std() + 1e-4)
        out.append(torch.zeros_like(group) if bool((group == group[0]).all()) else scaled)
    return torch.cat(out)


def by_numpy(rewards: Tensor, num_generations: int) -> Tensor:
    groups = rewards.double().numpy().reshape(-1, num_generations)
    std = groups.std(axis=1, ddof=1, keepdims=True)
    out = (groups - groups.mean(axis=1, keepdims=True)) / (std + 1e-4)
    out[groups.max(axis=1) == groups.min(axis=1)] = 0
    return torch.tensor(out.ravel(), dtype=torch.float32)


def by_variance(rewards: Tensor, num_generations: int) -> Tensor:
    groups = rewards.view(-1, num_generations)
    centered = groups - groups.mean(dim=1, keepdim=True)
    std = (centered.square().sum(dim=1, keepdim=True) / (num_generations - 1)).sqrt()
    tie = groups.amax(dim=1, keepdim=True) == groups.amin(dim=1, keepdim=True)
    return torch.where(tie, torch.zeros(()), centered / (std + 1e-4)).flatten()


def ties_by_outcomes(p: float, num_generations: int) -> float:
    all_right = all_wrong = 1.0
    for _ in range(num_generations):
        all_right *= p
        all_wrong *= 1 - p
    return all_right + all_wrong


def ties_by_tensor(p: float, num_generations: int) -> float:
    return torch.tensor([p, 1 - p], dtype=torch.float64).pow(num_generations).sum().item()


def ties_by_complement(p: float, num_generations: int) -> float:
    from math import comb

    mixed = sum(comb(num_generations, k) * p**k * (1 - p) ** (num_generations - k) for k in range(1, num_generations))
    return 1 - mixed


def equal_by_loop(rewards: Tensor, num_generations: int) -> Tensor:
    groups = rewards.view(-1, num_generations).tolist()
    return torch.tensor([len(set(group)) == 1 for group in groups])


def rloo_by_loop(rewards: Tensor, num_generations: int) -> Tensor:
    out = []
    for start in range(0, len(rewards), num_generations):
        group = rewards[start : start + num_generations].tolist()
        for place, reward in enumerate(group):
            others = group[:place] + group[place + 1 :]
            out.append(reward - sum(others) / len(others))
    return torch.tensor(out)


def rloo_by_sum(rewards: Tensor, num_generations: int) -> Tensor:
    groups = rewards.view(-1, num_generations)
    others = (groups.sum(dim=1, keepdim=True) - groups) / (num_generations - 1)
    return (groups - others).flatten()


def rloo_by_matrix(rewards: Tensor, num_generations: int) -> Tensor:
    weights = (torch.ones(num_generations, num_generations) - torch.eye(num_generations)) / (num_generations - 1)
    groups = rewards.view(-1, num_generations)
    return (groups - groups @ weights).flatten()


def equal_by_range(rewards: Tensor, num_generations: int) -> Tensor:
    groups = rewards.view(-1, num_generations)
    return groups.amax(dim=1) == groups.amin(dim=1)


def equal_by_first(rewards: Tensor, num_generations: int) -> Tensor:
    groups = rewards.view(-1, num_generations)
    return (groups == groups[:, :1]).all(dim=1)


def informative_by_loop(rewards: Tensor, num_generations: int, groups_needed: int) -> Tensor:
    kept: list[int] = []
    for number, group in enumerate(rewards.view(-1, num_generations).tolist()):
        if len(set(group)) > 1 and len(kept) < groups_needed:
            kept.append(number)
    return torch.tensor(kept)


def informative_by_range(rewards: Tensor, num_generations: int, groups_needed: int) -> Tensor:
    groups = rewards.view(-1, num_generations)
    numbers = torch.arange(len(groups))
    return numbers[groups.amax(dim=1) > groups.amin(dim=1)][:groups_needed]


def informative_by_std(rewards: Tensor, num_generations: int, groups_needed: int) -> Tensor:
    groups = rewards.double().numpy().reshape(-1, num_generations)
    return torch.tensor([n for n, group in enumerate(groups) if any(group != group[0])][:groups_needed])


RIGHT_ANSWERS = {
    "group_advantages": (by_loop, by_numpy, by_variance),
    "tie_probability": (ties_by_outcomes, ties_by_tensor, ties_by_complement),
    "degenerate_groups": (equal_by_loop, equal_by_range, equal_by_first),
    "rloo_advantages": (rloo_by_loop, rloo_by_sum, rloo_by_matrix),
    "dynamic_sampling": (informative_by_loop, informative_by_range, informative_by_std),
}
