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


def ties_by_outcomes(chances: list[float], num_generations: int) -> float:
    total = 0.0
    for chance in chances:
        all_alike = 1.0
        for _ in range(num_generations):
            all_alike *= chance
        total += all_alike
    return total


def ties_by_tensor(chances: list[float], num_generations: int) -> float:
    return torch.tensor(chances, dtype=torch.float64).pow(num_generations).sum().item()


def ties_after_the_first(chances: list[float], num_generations: int) -> float:
    """Whatever the first completion gets, the others must get it too."""
    return sum(chance * chance ** (num_generations - 1) for chance in chances)


def equal_by_loop(rewards: Tensor, num_generations: int) -> Tensor:
    groups = rewards.view(-1, num_generations).tolist()
    return torch.tensor([len(set(group)) == 1 for group in groups])


def rloo_by_loop(rewards: Tensor, num_generations: int, truncated: Tensor) -> Tensor:
    out = []
    for row, (reward, cut) in enumerate(zip(rewards.tolist(), truncated.tolist(), strict=True)):
        first = row // num_generations * num_generations
        others = [
            rewards[other].item()
            for other in range(first, first + num_generations)
            if other != row and not truncated[other]
        ]
        out.append(0.0 if cut or not others else reward - sum(others) / len(others))
    return torch.tensor(out)


def rloo_by_sum(rewards: Tensor, num_generations: int, truncated: Tensor) -> Tensor:
    complete = (~truncated).float().view(-1, num_generations)
    groups = rewards.view(-1, num_generations)
    sums, counts = ((one * complete).sum(dim=1, keepdim=True) for one in (groups, torch.ones_like(groups)))
    others = (sums - groups * complete) / (counts - 1).clamp(min=1)
    return ((groups - others) * complete * (counts > 1)).flatten()


def rloo_by_matrix(rewards: Tensor, num_generations: int, truncated: Tensor) -> Tensor:
    groups = rewards.view(-1, num_generations)
    complete = (~truncated).view(-1, num_generations)
    pairs = complete[:, :, None] & complete[:, None, :] & ~torch.eye(num_generations, dtype=torch.bool)
    differences = groups[:, :, None] - groups[:, None, :]
    return ((differences * pairs).sum(dim=2) / pairs.sum(dim=2).clamp(min=1)).flatten()


def equal_by_range(rewards: Tensor, num_generations: int) -> Tensor:
    groups = rewards.view(-1, num_generations)
    return groups.amax(dim=1) == groups.amin(dim=1)


def equal_by_first(rewards: Tensor, num_generations: int) -> Tensor:
    groups = rewards.view(-1, num_generations)
    return (groups == groups[:, :1]).all(dim=1)


def informative_by_loop(rewards: Tensor, num_generations: int, groups_needed: int) -> tuple[Tensor, int]:
    kept: list[int] = []
    written = 0
    for number, group in enumerate(rewards.view(-1, num_generations).tolist()):
        if len(kept) == groups_needed:
            break
        written += num_generations
        if len(set(group)) > 1:
            kept.append(number)
    return torch.tensor(kept), written


def informative_by_range(rewards: Tensor, num_generations: int, groups_needed: int) -> tuple[Tensor, int]:
    groups = rewards.view(-1, num_generations)
    useful = groups.amax(dim=1) > groups.amin(dim=1)
    sampled = int((useful.cumsum(dim=0) - useful.long() < groups_needed).sum())  # a group that is reached is sampled
    return torch.arange(sampled)[useful[:sampled]], sampled * num_generations


def informative_by_numpy(rewards: Tensor, num_generations: int, groups_needed: int) -> tuple[Tensor, int]:
    groups = rewards.double().numpy().reshape(-1, num_generations)
    numbers = [n for n, group in enumerate(groups) if any(group != group[0])][:groups_needed]
    last = numbers[-1] if len(numbers) == groups_needed else len(groups) - 1
    return torch.tensor(numbers), num_generations * (last + 1)


RIGHT_ANSWERS = {
    "group_advantages": (by_loop, by_numpy, by_variance),
    "tie_probability": (ties_by_outcomes, ties_by_tensor, ties_after_the_first),
    "degenerate_groups": (equal_by_loop, equal_by_range, equal_by_first),
    "rloo_advantages": (rloo_by_loop, rloo_by_sum, rloo_by_matrix),
    "dynamic_sampling": (informative_by_loop, informative_by_range, informative_by_numpy),
}
