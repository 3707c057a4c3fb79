"""Right answers to the exercises of `grpo_edu.checks.policy_gradients`, written in other ways than the reference."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def expected_by_loop(first: Tensor, second: Tensor, rewards: Tensor) -> float:
    total = 0.0
    for i, p in enumerate(first.tolist()):
        for j, q in enumerate(second[i].tolist()):
            total += p * q * rewards[i, j].item()
    return total


def expected_by_einsum(first: Tensor, second: Tensor, rewards: Tensor) -> Tensor:
    return torch.einsum("i,ij,ij->", first, second, rewards)


def expected_in_two_steps(first: Tensor, second: Tensor, rewards: Tensor) -> Tensor:
    value_after_first = (second * rewards).sum(dim=1)
    return first @ value_after_first


def gradient_by_autograd(scores: Tensor, old_scores: Tensor, actions: Tensor, rewards: Tensor) -> Tensor:
    theta = scores.clone().requires_grad_()
    ratio = (theta.log_softmax(dim=0) - old_scores.log_softmax(dim=0))[actions].exp()
    (gradient,) = torch.autograd.grad((rewards * ratio).mean(), theta)  # ∇ratio = ratio · ∇ log π
    return gradient


def gradient_by_loop(scores: Tensor, old_scores: Tensor, actions: Tensor, rewards: Tensor) -> Tensor:
    probabilities, old = scores.softmax(dim=0), old_scores.softmax(dim=0)
    total = torch.zeros_like(scores)
    for action, reward in zip(actions.tolist(), rewards.tolist(), strict=True):
        direction = -probabilities
        direction[action] += 1
        total += reward * probabilities[action] / old[action] * direction
    return total / len(actions)


def gradient_by_counts(scores: Tensor, old_scores: Tensor, actions: Tensor, rewards: Tensor) -> Tensor:
    earned = torch.bincount(actions, weights=rewards, minlength=len(scores))
    earned = earned * scores.softmax(dim=0) / old_scores.softmax(dim=0)
    return ((earned - earned.sum() * scores.softmax(dim=0)) / len(rewards)).float()


def loss_by_loop(logps: Tensor, mask: Tensor, rewards: Tensor, baseline: float) -> Tensor:
    losses = []
    for row, counts, reward in zip(logps, mask, rewards, strict=True):
        losses.append(-(reward - baseline) * row[counts == 1].sum())
    return sum(losses) / len(losses)


def loss_by_product(logps: Tensor, mask: Tensor, rewards: Tensor, baseline: float) -> Tensor:
    return ((baseline - rewards) @ (logps * mask)).sum() / len(logps)


def loss_by_tokens(logps: Tensor, mask: Tensor, rewards: Tensor, baseline: float) -> Tensor:
    advantages = (rewards - baseline).detach()
    return torch.where(mask == 1, -advantages[:, None] * logps, 0.0).sum() / len(rewards)


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


def tokens_by_search(logits: Tensor, uniform: Tensor, temperature: float, min_p: float) -> Tensor:
    probabilities = torch.softmax(logits / temperature, dim=-1)
    highest = probabilities.max(dim=-1, keepdim=True).values
    probabilities = torch.where(probabilities < min_p * highest, 0.0, probabilities)
    ends = probabilities.cumsum(dim=-1)
    return torch.searchsorted(ends, uniform[:, None] * ends[:, -1:], right=True).squeeze(1)


def tokens_by_loop(logits: Tensor, uniform: Tensor, temperature: float, min_p: float) -> Tensor:
    tokens = []
    for row, u in zip(logits, uniform.tolist(), strict=True):
        probabilities = (row / temperature).softmax(dim=0).tolist()
        left = [(token, p) for token, p in enumerate(probabilities) if p >= min_p * max(probabilities)]
        total, end, token = sum(p for _, p in left), 0.0, 0
        for token, p in left:  # noqa: B007  the last token is kept
            end += p / total
            if u < end:
                break
        tokens.append(token)
    return torch.tensor(tokens)


def tokens_by_masked_logits(logits: Tensor, uniform: Tensor, temperature: float, min_p: float) -> Tensor:
    scaled = logits / temperature
    limit = scaled.amax(dim=1, keepdim=True) + math.log(min_p)
    ends = scaled.masked_fill(scaled < limit, -torch.inf).softmax(dim=1).cumsum(dim=1)
    return (ends > uniform[:, None]).int().argmax(dim=1)


RIGHT_ANSWERS = {
    "expected_reward": (expected_by_loop, expected_by_einsum, expected_in_two_steps),
    "score_function_gradient": (gradient_by_autograd, gradient_by_loop, gradient_by_counts),
    "reinforce_loss": (loss_by_loop, loss_by_product, loss_by_tokens),
    "best_baseline": (baseline_by_formula, baseline_by_autograd, baseline_by_parabola),
    "sample_tokens": (tokens_by_search, tokens_by_loop, tokens_by_masked_logits),
}
