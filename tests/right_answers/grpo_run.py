"""Right answers to the exercises of `grpo_edu.checks.grpo_run`, written in other ways than the reference."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from grpo_edu.advantages import group_advantages
from grpo_edu.checks.grpo_run import Gradients, Shapes, Solved, common_length
from grpo_edu.config import GRPOConfig
from grpo_edu.evaluation import mcnemar
from grpo_edu.fast import optimizers
from grpo_edu.losses import grpo_loss


def shapes_by_tensors(num_prompts, num_generations, prompt_length, completion_length, vocab_size) -> Shapes:
    with torch.device("meta"):
        prompts = torch.empty(num_prompts, prompt_length).repeat_interleave(num_generations, dim=0)
        logits = torch.empty(len(prompts), completion_length, vocab_size)
        ids = logits.argmax(dim=-1)
        logps = logits.gather(2, ids[..., None])[..., 0]
        rewards = logps.sum(dim=1)
        found = {
            "prompt_ids": prompts,
            "completion_ids": ids,
            "rewards": rewards,
            "advantages": rewards,
            "logits": logits,
            "per_token_logps": logps,
            "loss": logps.mean(),
        }
    return {name: tuple(tensor.shape) for name, tensor in found.items()}


def shapes_by_words(num_prompts, num_generations, prompt_length, completion_length, vocab_size) -> Shapes:
    sizes = {"B": num_generations * num_prompts, "P": prompt_length, "C": completion_length, "V": vocab_size}
    words = dict(
        prompt_ids="BP", completion_ids="BC", rewards="B", advantages="B", logits="BCV", per_token_logps="BC", loss=""
    )
    return {name: tuple(sizes[letter] for letter in word) for name, word in words.items()}


def shapes_by_prefix(num_prompts, num_generations, prompt_length, completion_length, vocab_size) -> Shapes:
    a_row: Any = [num_prompts * num_generations]
    a_token = [*a_row, completion_length]
    shapes = {"loss": [], "rewards": a_row, "advantages": a_row, "completion_ids": a_token, "per_token_logps": a_token}
    return {**shapes, "prompt_ids": [*a_row, prompt_length], "logits": [*a_token, vocab_size]}


def step_of_the_package(
    scores, completion_ids, completion_mask, rewards, num_generations, learning_rate, updates, clip
) -> Tensor:
    places, policy, old = torch.arange(completion_ids.shape[1]), scores, None
    advantages = group_advantages(rewards, num_generations)
    for _ in range(updates):
        policy = policy.clone().requires_grad_()
        logps = policy.log_softmax(dim=1)[places, completion_ids]
        old = logps.detach() if old is None else old
        limits = {"epsilon": clip[0], "epsilon_high": clip[1]}
        loss = grpo_loss(logps, old, advantages, completion_mask, loss_type="grpo", **limits)
        policy = (policy - learning_rate * torch.autograd.grad(loss, policy)[0]).detach()
    return policy


def step_by_optimizer(
    scores, completion_ids, completion_mask, rewards, num_generations, learning_rate, updates, clip
) -> Tensor:
    policy = nn.Parameter(scores.clone())
    optimizer = torch.optim.SGD([policy], lr=learning_rate)
    gain = group_advantages(rewards, num_generations)[:, None]
    old = None
    for _ in range(updates):
        optimizer.zero_grad()
        table = policy[None].expand(len(rewards), -1, -1).transpose(1, 2)
        nll = cross_entropy(table, completion_ids, reduction="none")
        old = nll.detach() if old is None else old
        ratio = (old - nll).exp()
        tokens = torch.min(ratio * gain, ratio.clamp(1 - clip[0], 1 + clip[1]) * gain) * completion_mask
        (-tokens.sum(dim=1) / completion_mask.sum(dim=1)).mean().backward()
        optimizer.step()
    return policy.detach()


def step_by_loop(
    scores, completion_ids, completion_mask, rewards, num_generations, learning_rate, updates, clip
) -> Tensor:
    first, now = scores.softmax(dim=1), scores
    advantages = group_advantages(rewards, num_generations).tolist()
    for _ in range(updates):
        new, chances = now.clone(), now.softmax(dim=1)
        for advantage, ids, mask in zip(advantages, completion_ids.tolist(), completion_mask.tolist(), strict=True):
            for place, token in enumerate(ids[: sum(mask)]):
                ratio = (chances[place, token] / first[place, token]).item()
                if (advantage > 0 and ratio > 1 + clip[1]) or (advantage < 0 and ratio < 1 - clip[0]):
                    continue
                slope = -chances[place]
                slope[token] += 1
                new[place] += learning_rate * advantage * ratio * slope / sum(mask) / len(rewards)
        now = new
    return now


def share_of_the_package(step: int, warmup_steps: int, max_steps: int) -> float:
    config = GRPOConfig(lr_scheduler_type="linear", warmup_steps=warmup_steps, max_steps=max_steps)
    return optimizers.learning_rate_share(step, config)


def share_by_interpolation(step: int, warmup_steps: int, max_steps: int) -> float:
    places, heights = [0, warmup_steps, max_steps], [0.0, 1.0, 0.0]
    if not warmup_steps:
        places, heights = places[1:], heights[1:]
    return float(np.interp(step, places, heights))


def share_by_counting(step: int, warmup_steps: int, max_steps: int) -> float:
    share = 0.0 if warmup_steps else 1.0
    for place in range(step):
        share += 1 / warmup_steps if place < warmup_steps else -1 / (max_steps - warmup_steps)
    return share


def clipped_by_torch(gradients: Gradients, max_norm: float) -> Gradients:
    weights = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient.clone()
    nn.utils.clip_grad_norm_(weights, max_norm)
    return [weight.grad for weight in weights if weight.grad is not None]


def clipped_by_squares(gradients: Gradients, max_norm: float) -> Gradients:
    square = torch.stack([(gradient**2).sum() for gradient in gradients]).sum()
    if square <= max_norm**2:
        return gradients
    return [gradient * max_norm / square.sqrt() for gradient in gradients]


def clipped_by_clamp(gradients: Gradients, max_norm: float) -> Gradients:
    length = torch.tensor(common_length(gradients))
    return [gradient / length * length.clamp(max=max_norm) for gradient in gradients]


def tied_by_means(rewards: Tensor, num_generations: int) -> tuple[float, float]:
    means = rewards.view(-1, num_generations).mean(dim=1).tolist()
    return means.count(1.0) / len(means), means.count(0.0) / len(means)


def tied_by_loop(rewards: Tensor, num_generations: int) -> list[float]:
    values = rewards.tolist()
    groups = [values[start : start + num_generations] for start in range(0, len(values), num_generations)]
    return [sum(set(group) == {kind} for group in groups) / len(groups) for kind in (1.0, 0.0)]


def tied_by_extremes(rewards: Tensor, num_generations: int) -> tuple[Tensor, Tensor]:
    groups = rewards.reshape(len(rewards) // num_generations, num_generations)
    return groups.amin(dim=1).mean(), 1 - groups.amax(dim=1).mean()


def kl_by_selection(per_token_logps: Tensor, ref_per_token_logps: Tensor, completion_mask: Tensor) -> Tensor:
    apart = (ref_per_token_logps - per_token_logps)[completion_mask == 1]
    return (apart.exp() - apart - 1).mean()


def kl_by_where(per_token_logps: Tensor, ref_per_token_logps: Tensor, completion_mask: Tensor) -> Tensor:
    apart = torch.where(completion_mask.bool(), ref_per_token_logps - per_token_logps, 0.0)
    return (torch.expm1(apart) - apart).sum() / completion_mask.sum()


def kl_by_loop(per_token_logps: Tensor, ref_per_token_logps: Tensor, completion_mask: Tensor) -> float:
    total = count = 0.0
    for logps, refs, mask in zip(per_token_logps, ref_per_token_logps, completion_mask, strict=True):
        for place in mask.nonzero().flatten().tolist():
            ratio = math.exp(refs[place].item() - logps[place].item())
            total, count = total + ratio - math.log(ratio) - 1, count + 1
    return total / count


def claim_by_binomial(before: Solved, after: Solved) -> tuple[float, str]:
    won = sum(new and not old for old, new in zip(before, after, strict=True))
    lost = sum(old and not new for old, new in zip(before, after, strict=True))
    tail = sum(math.comb(won + lost, k) for k in range(min(won, lost) + 1)) / 2 ** (won + lost)
    verdict = "not shown" if 2 * tail >= 0.05 else ("better" if won > lost else "worse")
    return (won - lost) / len(before), verdict


def claim_by_scipy(before: Solved, after: Solved) -> tuple[float, str]:
    from scipy.stats import binomtest

    changes = [int(new) - int(old) for old, new in zip(before, after, strict=True) if new != old]
    if not changes or binomtest(changes.count(1), len(changes)).pvalue >= 0.05:
        return sum(changes) / len(before), "not shown"
    return sum(changes) / len(before), "better" if sum(changes) > 0 else "worse"


def claim_by_tensors(before: Solved, after: Solved) -> list:
    change = torch.tensor(after).float() - torch.tensor(before).float()
    p_value = mcnemar(list(before), list(after)).p_value
    verdict = {1: "better", -1: "worse", 0: "not shown"}[int(change.sum().sign()) if p_value < 0.05 else 0]
    return [change.mean(), verdict]


RIGHT_ANSWERS = {
    "stage_shapes": (shapes_by_tensors, shapes_by_words, shapes_by_prefix),
    "grpo_step": (step_of_the_package, step_by_optimizer, step_by_loop),
    "learning_rate_share": (share_of_the_package, share_by_interpolation, share_by_counting),
    "clipped_gradients": (clipped_by_torch, clipped_by_squares, clipped_by_clamp),
    "tied_groups": (tied_by_means, tied_by_loop, tied_by_extremes),
    "batch_kl": (kl_by_selection, kl_by_where, kl_by_loop),
    "claim": (claim_by_binomial, claim_by_scipy, claim_by_tensors),
}
