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


def baseline_by_formula(probabilities, rewards):
    p, r = probabilities.tolist(), rewards.tolist()
    squares = sum(one * one for one in p)
    lengths = [1 - 2 * one + squares for one in p]
    top = sum(one * length * reward for one, length, reward in zip(p, lengths, r, strict=True))
    return top / sum(one * length for one, length in zip(p, lengths, strict=True))


def baseline_by_autograd(probabilities, rewards):
    scores = probabilities.log().requires_grad_()
    lengths = []
    for answer in range(len(scores)):
        (gradient,) = torch.autograd.grad(scores.log_softmax(dim=0)[answer], scores)
        lengths.append(gradient.norm() ** 2)
    weights = probabilities * torch.stack(lengths)
    return ((weights * rewards).sum() / weights.sum()).item()


def baseline_by_parabola(probabilities, rewards):
    p, r = probabilities.double(), rewards.double()
    lengths = (torch.eye(len(p)).double() - p).square().sum(dim=1)

    def spread(b):
        return (p * (r - b).square() * lengths).sum().item()

    low, middle, high = spread(-1.0), spread(0.0), spread(1.0)
    return (low - high) / (2 * (low - 2 * middle + high))


def equal_by_range(rewards: Tensor, num_generations: int) -> Tensor:
    groups = rewards.view(-1, num_generations)
    return groups.amax(dim=1) == groups.amin(dim=1)


def equal_by_first(rewards: Tensor, num_generations: int) -> Tensor:
    groups = rewards.view(-1, num_generations)
    return (groups == groups[:, :1]).all(dim=1)


RIGHT_ANSWERS = {
    "group_advantages": (by_loop, by_numpy, by_variance),
    "tie_probability": (ties_by_outcomes, ties_by_tensor, ties_by_complement),
    "degenerate_groups": (equal_by_loop, equal_by_range, equal_by_first),
    "rloo_advantages": (rloo_by_loop, rloo_by_sum, rloo_by_matrix),
    "best_baseline": (baseline_by_formula, baseline_by_autograd, baseline_by_parabola),
}
