"""GRPO as a loop to read: sample, score, compare within the group, learn. `train` yields one dict of metrics a step.

DeepSeekMath (arXiv 2402.03300), algorithm 1, with the variants of `grpo_edu.losses`.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from grpo_edu.advantages import degenerate_groups, group_advantages, rloo_advantages
from grpo_edu.config import GRPOConfig
from grpo_edu.logprobs import shared_prefix_logps
from grpo_edu.losses import clip_fractions, grpo_loss, per_token_kl
from grpo_edu.metrics import masked_mean, rollout_metrics
from grpo_edu.problems import Problem
from grpo_edu.prompts import render_prompt
from grpo_edu.rewards import RewardFunction, combine_rewards, compute_rewards, reward_name
from grpo_edu.rollout import Rollout, generate

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["Batch", "GRPOConfig", "compute_advantages", "score_rollout", "train", "update_policy"]


@dataclass
class Batch:
    """A scored rollout, ready to learn from: B = N·G completions of at most C tokens.

    rollout: the completions. rewards_per_func: (B, K). rewards, advantages: (B,).
    loss_mask: (B, C), the completion mask, with truncated rows zeroed where the config says so.
    """

    rollout: Rollout
    rewards_per_func: Tensor
    rewards: Tensor
    advantages: Tensor
    loss_mask: Tensor


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    reward_funcs: RewardFunction | Sequence[RewardFunction],
    config: GRPOConfig,
    *,
    penalty: Callable[[nn.Module], Tensor] | None = None,
) -> Iterator[dict[str, float]]:
    """Train `model` in place with GRPO; yields the metrics of each step, under TRL's keys.

    Args:
        model: a causal language model; it is trained as it stands, dropout off, so that the policy that learns is
            the policy that sampled.
        tokenizer: its tokenizer, with a chat template and a pad token.
        problems: at least `config.prompts_per_step`; they come in a shuffled order, all once before any twice.
        reward_funcs: one or more functions with TRL's signature (see `grpo_edu.rewards`).
        config: the settings.
        penalty: a scalar function of the model that is added to the loss of every update (EWC, for example).

    Raises:
        ValueError: too few problems, or what the stages refuse; RuntimeError: a reward function failed;
        FloatingPointError: the gradient is not finite. The model keeps the weights of the last good update.
    """
    reward_funcs = list(reward_funcs) if isinstance(reward_funcs, Sequence) else [reward_funcs]
    names = [reward_name(func) for func in reward_funcs]
    check_problems(problems, config)
    optimizer, scheduler = build_optimizer(model, config)
    reference = copy.deepcopy(model).requires_grad_(False).eval() if config.beta else None
    generator = torch.Generator().manual_seed(config.seed)
    order = problem_order(len(problems), config.seed, config.prompts_per_step)
    num_tokens = 0
    model.eval()
    for step in range(1, config.max_steps + 1):
        started = time.perf_counter()
        chosen = [problems[index] for index in next(order)]
        rollout = generate(
            model, tokenizer, [render_prompt(tokenizer, problem.prompt) for problem in chosen],
            num_generations=config.num_generations, max_completion_length=config.max_completion_length,
            temperature=config.temperature, top_p=config.top_p, top_k=config.top_k, min_p=config.min_p,
            generator=generator,
        )  # fmt: skip
        batch = score_rollout(rollout, chosen, reward_funcs, config)
        learning_rate = optimizer.param_groups[0]["lr"]
        update = update_policy(model, batch, optimizer, config, reference=reference, penalty=penalty)
        scheduler.step()
        num_tokens += int(rollout.prompt_mask.sum() + rollout.completion_mask.sum())
        yield {
            "step": step,
            **rollout_metrics(rollout, batch.rewards_per_func, batch.rewards, names),
            "entropy": masked_mean(-rollout.sampling_per_token_logps, rollout.completion_mask),
            **update,
            "learning_rate": learning_rate,
            "num_tokens": num_tokens,
            "step_time": time.perf_counter() - started,
        }


def check_problems(problems: Sequence[Problem], config: GRPOConfig) -> None:
    """Raise ValueError where there are too few problems for one step."""
    if len(problems) < config.prompts_per_step:
        raise ValueError(
            f"problems: {len(problems)} are fewer than prompts_per_step = {config.prompts_per_step}; "
            "give more problems or lower prompts_per_step"
        )


def build_optimizer(model: nn.Module, config: GRPOConfig):
    """AdamW over the parameters that want a gradient, and its learning-rate schedule.

    Raises ValueError where no parameter wants a gradient (a frozen or quantized model).
    """
    from transformers import get_scheduler

    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ValueError("model: no parameter wants a gradient; load it with load_policy, not frozen or quantized")
    for parameter in parameters:  # so that AdamW counts a first step without gradient as it counts a later one
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=config.learning_rate, weight_decay=config.weight_decay)
    return optimizer, get_scheduler(config.lr_scheduler_type, optimizer, config.warmup_steps, config.max_steps)


def problem_order(count: int, seed: int, size: int) -> Iterator[list[int]]:
    """Steps of `size` different problems without end, as indices below `count` >= `size`.

    Each pass is a fresh shuffle, so all come once before any comes twice. A step that begins with the last problems
    of a pass goes on with the first of the next that it does not hold already.

    >>> order = problem_order(3, seed=0, size=2)
    >>> [next(order) for _ in range(3)]
    [[1, 2], [0, 1], [2, 0]]
    """
    rng = random.Random(seed)
    waiting: list[int] = []
    while True:
        if len(waiting) < size:
            fresh = rng.sample(range(count), count)
            first = [index for index in fresh if index not in waiting][: size - len(waiting)]
            waiting += first + [index for index in fresh if index not in first]
        yield waiting[:size]
        waiting = waiting[size:]


def score_rollout(
    rollout: Rollout, problems: Sequence[Problem], reward_funcs: Sequence[RewardFunction], config: GRPOConfig
) -> Batch:
    """Rewards and advantages of a rollout; each of the N problems stands for the G rows of its group."""
    rows = [problem for problem in problems for _ in range(rollout.num_generations)]
    lengths = rollout.completion_mask.sum(dim=1).tolist()
    rewards_per_func = compute_rewards(
        reward_funcs,
        prompts=[problem.prompt for problem in rows],
        completions=rollout.completions,
        completion_ids=[ids[:length] for ids, length in zip(rollout.completion_ids.tolist(), lengths, strict=True)],
        answer=[problem.answer for problem in rows],
        level=[problem.level for problem in rows],
        solution=[problem.solution for problem in rows],
    )
    rewards = combine_rewards(rewards_per_func, config.reward_weights)
    advantages = compute_advantages(rewards, config)
    loss_mask = rollout.completion_mask
    if config.mask_truncated_completions:
        loss_mask = loss_mask * ~rollout.is_truncated[:, None]
    return Batch(rollout, rewards_per_func, rewards, advantages, loss_mask)


def compute_advantages(rewards: Tensor, config: GRPOConfig) -> Tensor:
    """(B,) advantages by the estimator that the config names."""
    if config.advantage_estimator == "rloo":
        return rloo_advantages(rewards, config.num_generations)
    return group_advantages(rewards, config.num_generations, scale_rewards=config.scale_rewards)


def update_policy(
    model: PreTrainedModel,
    batch: Batch,
    optimizer: torch.optim.Optimizer,
    config: GRPOConfig,
    *,
    reference: PreTrainedModel | None = None,
    penalty: Callable[[nn.Module], Tensor] | None = None,
) -> dict[str, float]:
    """Take `num_iterations` optimizer steps on one batch; returns the means over them of loss, grad_norm,
    clip_ratio/* and, with beta, kl.

    Raises FloatingPointError before the weights change when the gradient is not finite.
    """
    parts = micro_batches(batch, config)
    old_logps: list[Tensor | None] = [None] * len(parts)  # known after the first iteration: the policy that sampled
    ref_logps: list[Tensor | None] = [None] * len(parts)
    if reference is not None:
        with torch.no_grad():
            ref_logps = [score_rows(reference, batch.rollout, rows, config) for rows in parts]
    totals = dict.fromkeys(("loss", "grad_norm", *clip_keys(config.loss_type)), 0.0)
    for _ in range(config.num_iterations):
        optimizer.zero_grad(set_to_none=False)
        for index, rows in enumerate(parts):
            loss, logps, metrics = batch_loss(model, batch, rows, old_logps[index], ref_logps[index], config)
            loss.backward()
            if old_logps[index] is None:
                old_logps[index] = logps.detach()
            for key, value in {"loss": loss.item(), **metrics}.items():
                totals[key] = totals.get(key, 0.0) + value
        if penalty is not None:
            extra = penalty(model)
            extra.backward()
            totals["penalty"] = totals.get("penalty", 0.0) + extra.item()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        if not torch.isfinite(grad_norm):
            raise FloatingPointError(
                "the gradient is not finite, so the weights were left as they are; "
                "lower learning_rate, or look at the rewards of this step"
            )
        optimizer.step()
        totals["grad_norm"] += grad_norm.item()
    return {key: total / config.num_iterations for key, total in totals.items()}


def clip_keys(loss_type: str) -> tuple[str, ...]:
    """The metrics that `grpo_edu.losses.clip_fractions` gives, also for a step in which no row has a gradient."""
    if loss_type == "cispo":
        return ("cispo_clip_ratio",)
    return ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")


def micro_batches(batch: Batch, config: GRPOConfig) -> list[Tensor]:
    """Row numbers of each forward pass: whole groups, `gradient_accumulation_steps` parts at most.

    Groups whose rewards all tie have zero advantage; without a KL term they have no gradient either, and are left out.
    """
    groups = torch.arange(len(batch.rewards)).view(-1, config.num_generations)
    if not config.beta:
        groups = groups[~degenerate_groups(batch.rewards, config.num_generations)]
    size = config.prompts_per_step // config.gradient_accumulation_steps
    return [part.flatten() for part in groups.split(size)] if len(groups) else []


def score_rows(model: PreTrainedModel, rollout: Rollout, rows: Tensor, config: GRPOConfig) -> Tensor:
    """per_token_logps (rows, C) of some rows of a rollout, whole groups, under `model`."""
    return shared_prefix_logps(
        model, rollout.prompt_ids[rows], rollout.prompt_mask[rows], rollout.completion_ids[rows],
        rollout.completion_mask[rows], num_generations=config.num_generations, temperature=config.temperature,
    )  # fmt: skip


def batch_loss(
    model: PreTrainedModel,
    batch: Batch,
    rows: Tensor,
    old_logps: Tensor | None,
    ref_logps: Tensor | None,
    config: GRPOConfig,
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """The share of the batch's loss that some of its rows contribute, so that the parts add up to the whole.

    Returns the loss with its gradient, per_token_logps (rows, C), and the rows' share of each metric.
    """
    mask = batch.loss_mask[rows]
    logps = score_rows(model, batch.rollout, rows, config)
    clip = {name: getattr(config, name) for name in
            ("epsilon", "epsilon_high", "loss_type", "importance_sampling_level")}  # fmt: skip
    num_tokens = batch.loss_mask.sum().clamp(min=1)
    loss = grpo_loss(
        logps, old_logps, batch.advantages[rows], mask, ref_per_token_logps=ref_logps, beta=config.beta,
        max_completion_length=config.max_completion_length, num_items=num_tokens, **clip,
    )  # fmt: skip
    token_share = mask.sum().item() / num_tokens.item()
    row_share = len(rows) / len(batch.rewards)
    share = {"bnpo": token_share, "dapo": 1.0, "cispo": 1.0}.get(config.loss_type, row_share)
    old = logps if old_logps is None else old_logps
    clip_share = row_share if config.importance_sampling_level == "sequence" else token_share
    metrics = {
        key: value.item() * clip_share
        for key, value in clip_fractions(logps, old, batch.advantages[rows], mask, **clip).items()
    }
    if ref_logps is not None:
        metrics["kl"] = masked_mean(per_token_kl(logps.detach(), ref_logps), mask) * token_share
    return loss * share, logps, metrics
