"""GRPO as a loop to read: sample, score, compare within the group, learn. `train` yields one dict of metrics a step.

DeepSeekMath (arXiv 2402.03300), algorithm 1, with the variants of `grpo_edu.losses`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from grpo_edu.adapters import adapters_off
from grpo_edu.advantages import group_advantages, rloo_advantages
from grpo_edu.config import GRPOConfig
from grpo_edu.logprobs import group_logps
from grpo_edu.losses import clip_fractions, grpo_loss, per_token_kl
from grpo_edu.memory import recomputed_layers
from grpo_edu.metrics import masked_mean, rollout_metrics
from grpo_edu.micro_batches import MicroBatches
from grpo_edu.optimizers import Stepper, make_stepper
from grpo_edu.problems import Problem
from grpo_edu.processes import this_process
from grpo_edu.prompts import render_prompt
from grpo_edu.quantized_rollouts import batch_mismatch, rollout_weights, sampling_policy
from grpo_edu.rewards import RewardFunction, combine_rewards, compute_rewards, reward_name
from grpo_edu.rollout import Rollout, generate
from grpo_edu.shared_rollouts import join_rollouts, own_draws
from grpo_edu.training_state import TrainingState, problem_order, start_training

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "Batch",
    "GRPOConfig",
    "TrainingState",
    "compute_advantages",
    "score_rollout",
    "start_training",
    "train",
    "update_policy",
]


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
    state: TrainingState | None = None,
) -> Generator[dict[str, float], None, None]:
    """Train `model` in place with GRPO; yields the metrics of each step, under TRL's keys.

    Args:
        model: a causal language model; it is trained as it stands, dropout off, so that the policy that learns is
            the policy that sampled.
        tokenizer: its tokenizer, with a chat template and a pad token.
        problems: at least `config.prompts_per_step`; they come in a shuffled order, all once before any twice.
        reward_funcs: one or more functions with TRL's signature (see `grpo_edu.rewards`).
        config: the settings. Where memory is short, the batch goes through in more parts than the settings ask for,
            which changes the result by rounding only.
        penalty: a scalar function of the model that is added to the loss of every update (EWC, for example). Its
            gradient may be as long as its strength makes it: `abort_grad_norm` does not hold then.
        state: from `start_training`, to look at between two steps, or to go on from where it stands; None: a new one.

    Raises:
        ValueError: too few problems, a memory budget that is too small, or what the stages refuse; RuntimeError: a
        reward function failed; FloatingPointError: the gradient is not finite, or longer than `abort_grad_norm`;
        MemoryError: a single completion is too much. The model keeps the weights of the last good update.
    """
    reward_funcs = list(reward_funcs) if isinstance(reward_funcs, Sequence) else [reward_funcs]
    names = [reward_name(func) for func in reward_funcs]
    state = state or start_training(model, tokenizer, problems, config)
    if penalty is not None:
        config = replace(config, abort_grad_norm=None)
    order = problem_order(len(problems), config.seed, config.prompts_per_step, shuffle=config.shuffle_dataset)
    order = islice(order, state.step, None)
    passes = MicroBatches(model, config, state.room)
    model.eval()
    for step in range(state.step + 1, config.max_steps + 1):
        started = time.perf_counter()
        chosen = [problems[index] for index in next(order)]
        prompts = [render_prompt(tokenizer, problem.prompt) for problem in chosen]
        with own_draws(state.generator, config) as own:  # of several processes each samples its part of the prompts
            rollout = generate(
                sampling_policy(model, config), tokenizer, prompts[own], num_generations=config.num_generations,
                max_completion_length=config.max_completion_length, temperature=config.temperature, top_p=config.top_p,
                top_k=config.top_k, min_p=config.min_p, generator=state.generator,
            )  # fmt: skip
        rollout = join_rollouts(rollout, tokenizer.pad_token_id)
        batch = score_rollout(rollout, chosen, reward_funcs, config)
        state.batch, state.batch_step = batch, step
        learning_rate = state.optimizer.param_groups[0]["lr"]
        update = update_policy(
            model, batch, state.optimizer, config, reference=state.reference, penalty=penalty, passes=passes
        )
        state.scheduler.step()
        state.step, state.room = step, passes.room
        state.num_tokens += int(rollout.prompt_mask.sum() + rollout.completion_mask.sum())
        yield {
            "step": step,
            **rollout_metrics(rollout, batch.rewards_per_func, batch.rewards, names),
            "entropy": masked_mean(-rollout.sampling_per_token_logps, rollout.completion_mask),
            **update,
            "learning_rate": learning_rate,
            "num_tokens": state.num_tokens,
            "step_time": time.perf_counter() - started,
        }


def score_rollout(
    rollout: Rollout, problems: Sequence[Problem], reward_funcs: Sequence[RewardFunction], config: GRPOConfig
) -> Batch:
    """Rewards and advantages of a rollout; each of the N problems stands for the G rows of its group.

    Of several processes each computes rewards of its part of the groups, and gets those of the others.
    """
    processes, group = this_process(), rollout.num_generations
    own = processes.part(len(problems))
    rows = [problem for problem in problems[own] for _ in range(group)]
    own = slice(own.start * group, own.stop * group)
    ids, lengths = rollout.completion_ids[own].tolist(), rollout.completion_mask[own].sum(dim=1).tolist()
    rewards_per_func = compute_rewards(
        reward_funcs,
        prompts=[problem.prompt for problem in rows],
        completions=rollout.completions[own],
        completion_ids=[row[:length] for row, length in zip(ids, lengths, strict=True)],
        answer=[problem.answer for problem in rows],
        level=[problem.level for problem in rows],
        solution=[problem.solution for problem in rows],
    )
    rewards_per_func = torch.cat(processes.exchange("rewards", rewards_per_func))
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
    passes: MicroBatches | None = None,
) -> dict[str, float]:
    """Take `num_iterations` optimizer steps on one batch; returns the means over them of loss, grad_norm,
    clip_ratio/* and, with beta, kl. `passes` says how the batch is cut, and remembers where memory ran out.

    Raises FloatingPointError before the weights change when the gradient is not finite, or too long.
    """
    passes = passes or MicroBatches(model, config)
    stepper = make_stepper(optimizer, config)
    old_per_token_logps: Tensor | None = None  # known after the first iteration: the policy that sampled
    ref_per_token_logps: Tensor | None = None
    if reference is not None:
        with torch.no_grad(), adapters_off(reference):
            ref_per_token_logps = passes.run(batch, partial(score_parts, reference, batch, config))
    totals: dict[str, float] = {}
    for _ in range(config.num_iterations):
        step = partial(one_update, model, batch, stepper, config, old_per_token_logps, ref_per_token_logps, penalty)
        metrics, logps = passes.run(batch, step)
        if old_per_token_logps is None:
            old_per_token_logps = logps
            rollout = batch.rollout
            mismatch = batch_mismatch(logps, rollout.sampling_per_token_logps, rollout.completion_mask, config)
        for key, value in metrics.items():
            totals[key] = totals.get(key, 0.0) + value / config.num_iterations
    return {**totals, **mismatch}


def one_update(
    model: PreTrainedModel,
    batch: Batch,
    stepper: Stepper,
    config: GRPOConfig,
    old_per_token_logps: Tensor | None,
    ref_per_token_logps: Tensor | None,
    penalty: Callable[[nn.Module], Tensor] | None,
    parts: Sequence[Tensor],
) -> tuple[dict[str, float], Tensor]:
    """One optimizer step from a batch in parts, given as row numbers; returns its metrics and per_token_logps (B, C).

    old_per_token_logps, ref_per_token_logps: (B, C) or None.
    """
    metrics = dict.fromkeys(("loss", "grad_norm", *clip_keys(config.loss_type)), 0.0)
    scored = torch.zeros_like(batch.rollout.sampling_per_token_logps)
    stepper.begin()
    for rows in parts:
        old, ref = (None if logps is None else logps[rows] for logps in (old_per_token_logps, ref_per_token_logps))
        with recomputed_layers(model, config.gradient_checkpointing):
            loss, logps, found = batch_loss(model, batch, rows, old, ref, config)
        stepper.add(loss)
        scored = scored.to(logps.dtype).index_copy(0, rows, logps.detach())
        for key, value in {"loss": loss.item(), **found}.items():
            metrics[key] = metrics.get(key, 0.0) + value
    if penalty is not None:
        extra = penalty(model) / this_process().count
        stepper.add(extra)
        metrics["penalty"] = extra.item()
    metrics = this_process().totals(metrics)  # what each process found is a share of the whole
    metrics["grad_norm"] = stepper.finish()
    return metrics, scored


def clip_keys(loss_type: str) -> tuple[str, ...]:
    """The metrics that `grpo_edu.losses.clip_fractions` gives, also for a step in which no row has a gradient."""
    if loss_type == "cispo":
        return ("cispo_clip_ratio",)
    return ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")


def score_parts(model: PreTrainedModel, batch: Batch, config: GRPOConfig, parts: Sequence[Tensor]) -> Tensor:
    """per_token_logps (B, C) of a batch in parts, given as row numbers, under `model`; 0 in rows of no part."""
    scored = torch.zeros_like(batch.rollout.sampling_per_token_logps)
    for rows in parts:
        logps = score_rows(model, batch.rollout, rows, config)
        scored = scored.to(logps.dtype).index_copy(0, rows, logps)
    return scored


def score_rows(model: PreTrainedModel, rollout: Rollout, rows: Tensor, config: GRPOConfig) -> Tensor:
    """per_token_logps (rows, C) of some rows of a rollout, whole groups or a part of one, under `model`."""
    return group_logps(
        model, rollout.prompt_ids[rows], rollout.prompt_mask[rows], rollout.completion_ids[rows],
        rollout.completion_mask[rows], num_generations=min(len(rows), config.num_generations),
        temperature=config.temperature,
    )  # fmt: skip


def batch_loss(
    model: PreTrainedModel,
    batch: Batch,
    rows: Tensor,
    old_per_token_logps: Tensor | None,
    ref_per_token_logps: Tensor | None,
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
    old = logps.detach() if old_per_token_logps is None else old_per_token_logps
    loss = grpo_loss(
        logps, old_per_token_logps, batch.advantages[rows], mask, ref_per_token_logps=ref_per_token_logps,
        beta=config.beta, max_completion_length=config.max_completion_length, num_items=num_tokens,
        importance_weights=rollout_weights(old, batch.rollout.sampling_per_token_logps[rows], config), **clip,
    )  # fmt: skip
    token_share = mask.sum().item() / num_tokens.item()
    row_share = len(rows) / len(batch.rewards)
    share = {"bnpo": token_share, "dapo": 1.0, "cispo": 1.0}.get(config.loss_type, row_share)
    clip_share = row_share if config.importance_sampling_level == "sequence" else token_share
    metrics = {
        key: value.item() * clip_share
        for key, value in clip_fractions(logps, old, batch.advantages[rows], mask, **clip).items()
    }
    if ref_per_token_logps is not None:
        metrics["kl"] = masked_mean(per_token_kl(logps.detach(), ref_per_token_logps), mask) * token_share
    return loss * share, logps, metrics
