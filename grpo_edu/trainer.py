"""Train a policy with GRPO: sample completions, score them, compare them within their groups, and update the policy.

`train` yields the metrics of each step. It follows algorithm 1 of DeepSeekMath (arXiv 2402.03300), with the variants of
`grpo_edu.losses`. Read it from top to bottom: `train` is the loop over steps, `update_policy` takes the optimizer steps
for one rollout, and `micro_batch_loss` computes the loss of one micro-batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from grpo_edu.advantages import degenerate_groups, gdpo_advantages, group_advantages, rloo_advantages
from grpo_edu.config import GRPOConfig
from grpo_edu.extras.resampling import join_rollouts
from grpo_edu.fast.lora import adapters_off, has_adapters, reference_policy
from grpo_edu.fast.memory import recomputed_layers
from grpo_edu.fast.micro_batches import MicroBatches, pass_budget
from grpo_edu.fast.optimizers import Stepper, build_optimizer, make_stepper
from grpo_edu.logprobs import group_logps
from grpo_edu.losses import (
    clip_fractions,
    high_entropy_mask,
    importance_ratio,
    off_policy_mask,
    per_token_kl,
    per_token_loss,
    token_weights,
    weighted_sum,
)
from grpo_edu.metrics import masked_mean, rollout_metrics
from grpo_edu.problems.templates import Problem, ProblemOrder, columns_of, prompt_options
from grpo_edu.prompts import render_prompt
from grpo_edu.quantization.rollouts import QuantizedSampler
from grpo_edu.rewards import RewardFunction, combine_rewards, compute_rewards, reward_name
from grpo_edu.rollout import Rollout, Sampler

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass
class Batch:
    """A scored rollout: B = N·G completions of at most C tokens.

    rollout: the completions. rewards_per_func: (B, K). rewards: (B,). advantages: (B,), or (B, C) from a stage.
    loss_mask: (B, C), the rollout's `policy_mask`; rows of truncated completions are 0 if `mask_truncated_completions`.
    """

    rollout: Rollout
    rewards_per_func: Tensor
    rewards: Tensor
    advantages: Tensor
    loss_mask: Tensor


@dataclass
class TrainingState:
    """The state of a training run between two steps, in addition to the weights; a checkpoint stores it.

    optimizer, scheduler: the optimizer and its learning-rate schedule.
    stepper: accumulates gradients and takes optimizer steps.
    micro_batches: divides a batch into micro-batches that fit into memory, and remembers when memory ran out.
    sampler: samples the rollouts. generator: random number generator of the sampling.
    reference: the reference policy of the KL term, or None.
    step: number of completed steps. num_tokens: number of tokens processed.
    num_problems: number of problems that each completed step sampled completions for.
    batch, batch_step: the batch of the last step, which may have failed, and the number of that step.
    """

    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    stepper: Stepper
    micro_batches: MicroBatches
    sampler: Sampler
    generator: torch.Generator
    reference: PreTrainedModel | None = None
    step: int = 0
    num_tokens: int = 0
    num_problems: list[int] = field(default_factory=list)
    batch: Batch | None = None
    batch_step: int = 0


def compute_advantages(rewards: Tensor, config: GRPOConfig) -> Tensor:
    """The advantages (B,), computed with the estimator of the config."""
    if config.advantage_estimator == "rloo":
        return rloo_advantages(rewards, config.num_generations)
    if config.advantage_estimator == "none":
        return rewards.nan_to_num(0.0)
    return group_advantages(rewards, config.num_generations, scale_rewards=config.scale_rewards)


def score_rollout(
    rollout: Rollout,
    problems: Sequence[Problem],
    reward_funcs: Sequence[RewardFunction],
    config: GRPOConfig,
    advantages: Callable[[Tensor, GRPOConfig], Tensor] = compute_advantages,
) -> Batch:
    """Compute rewards, advantages and loss mask of a rollout; each of the N problems belongs to one group of G rows."""
    rows = [problem for problem in problems for _ in range(rollout.num_generations)]
    lengths = rollout.completion_mask.sum(dim=1).tolist()
    completion_ids = [ids[:length] for ids, length in zip(rollout.completion_ids.tolist(), lengths, strict=True)]
    rewards_per_func = compute_rewards(
        reward_funcs,
        prompts=[problem.prompt for problem in rows],
        completions=rollout.completions,
        completion_ids=completion_ids,
        **columns_of(rows),
    ).to(rollout.completion_ids.device)
    rewards = combine_rewards(rewards_per_func, config.reward_weights)
    loss_mask = rollout.policy_mask
    if config.mask_truncated_completions:
        loss_mask = loss_mask * ~rollout.is_truncated[:, None]
    return batch_of(rollout, rewards_per_func, rewards, loss_mask, config, advantages)


def batch_of(
    rollout: Rollout,
    rewards_per_func: Tensor,
    rewards: Tensor,
    loss_mask: Tensor,
    config: GRPOConfig,
    advantages: Callable[[Tensor, GRPOConfig], Tensor],
) -> Batch:
    """The batch of scored completions, with their advantages."""
    if config.multi_objective_aggregation == "normalize_then_sum":
        scores = gdpo_advantages(rewards_per_func, config.num_generations, config.reward_weights)
    else:
        scores = advantages(rewards, config)
    return Batch(rollout, rewards_per_func, rewards, scores, loss_mask)


def rows_with_gradient(batch: Batch, config: GRPOConfig) -> Tensor:
    """The indices of the rows that have a gradient, in whole groups.

    A group whose rewards are all equal has zero advantages. It has no gradient and is left out, unless the loss has a
    KL term, needs the entropies of all tokens, or has advantages that are not 0 for equal rewards.
    """
    groups = torch.arange(len(batch.rewards), device=batch.rewards.device).view(-1, config.num_generations)
    needs_all = config.beta or config.entropy_coef or config.top_entropy_quantile < 1
    untied = config.advantage_estimator == "none" or config.multi_objective_aggregation == "normalize_then_sum"
    if not (needs_all or untied):
        groups = groups[~degenerate_groups(batch.rewards, config.num_generations)]
    return groups.flatten()


def sampled_with(old_per_token_logps: Tensor | None, ref_per_token_logps: Tensor | None) -> Tensor | None:
    """The log-probabilities (B, C) in the denominator of the ratio: those at the start of the update."""
    return old_per_token_logps


@dataclass(frozen=True)
class Stages:
    """The stages of a step, which a study may replace; the defaults are correct GRPO.

    render: question → prompt. score: rollout → batch. advantages: rewards (B,) → advantages (B,).
    rows: batch → indices of the rows with a gradient. old_logps: selects the log-probabilities of the old policy.
    loss: log-probabilities, advantages and mask → loss of each token (B, C).
    """

    render: Callable[..., str] = render_prompt
    score: Callable[..., Batch] = score_rollout
    advantages: Callable[[Tensor, GRPOConfig], Tensor] = compute_advantages
    rows: Callable[[Batch, GRPOConfig], Tensor] = rows_with_gradient
    old_logps: Callable[[Tensor | None, Tensor | None], Tensor | None] = sampled_with
    loss: Callable[..., Tensor] = per_token_loss


GRPO_STAGES = Stages()


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    reward_funcs: RewardFunction | Sequence[RewardFunction],
    config: GRPOConfig,
    *,
    penalty: Callable[[nn.Module], Tensor] | None = None,
    state: TrainingState | None = None,
    stages: Stages = GRPO_STAGES,
) -> Generator[dict[str, float], None, None]:
    """Train `model` in place with GRPO; yields the metrics of each step, under TRL's keys.

    Args:
        model: a causal language model. It is trained without dropout, so that the policy that is trained is the
            policy that sampled.
        tokenizer: its tokenizer, with a chat template and a pad token.
        problems: at least `config.prompts_per_step`. They are shuffled, and each is used once before any is repeated.
        reward_funcs: one or more functions with TRL's signature (see `grpo_edu.rewards`).
        config: the settings. If memory is short, the batch is divided into more micro-batches than the settings
            require, which changes the result by rounding only.
        penalty: a scalar function of the model that is added to the loss of every update (EWC, for example). Its
            gradient may be large, so `abort_grad_norm` is not applied.
        state: from `start_training`, to inspect it between two steps or to continue a run; None: a new one.
        stages: replacements for stages of the step (for example in the faulty runs of the diagnosis lab).

    Raises:
        ValueError: there are too few problems, the memory budget is too small, or a stage refuses its input.
        RuntimeError: a reward function raised an exception.
        FloatingPointError: the norm of the gradient is not finite, or larger than `abort_grad_norm`.
        MemoryError: a single completion does not fit into memory.
        In each case the model keeps the weights of the last good update.
    """
    reward_funcs = list(reward_funcs) if isinstance(reward_funcs, Sequence) else [reward_funcs]
    names = [reward_name(func) for func in reward_funcs]
    if len(set(names)) < len(names):
        raise ValueError(f"reward_funcs must have different names, got {', '.join(names)}; set their __name__")
    state = state or start_training(model, tokenizer, problems, config)
    if penalty is not None:
        state.stepper.abort_grad_norm = None
    order = ProblemOrder(len(problems), config.seed, shuffle=config.shuffle_dataset)
    for count in state.num_problems:
        order.draw(count)
    model.eval()
    for step in range(state.step + 1, config.max_steps + 1):
        started = time.perf_counter()
        batch, sampled = sample_batch(tokenizer, problems, order, reward_funcs, state, config, stages)
        rollout = sampled.rollout
        state.batch, state.batch_step = batch, step
        learning_rate = state.optimizer.param_groups[0]["lr"]
        update = update_policy(model, batch, state, config, penalty=penalty, stages=stages)
        if config.sync_ref_model and step % config.ref_model_sync_steps == 0:
            synchronize_reference(model, state, config)
        state.scheduler.step()
        state.step = step
        state.num_problems.append(len(sampled.rewards) // config.num_generations)
        state.num_tokens += int(rollout.prompt_mask.sum() + rollout.completion_mask.sum())
        yield {
            "step": step,
            **rollout_metrics(rollout, sampled.rewards_per_func, sampled.rewards, names),
            **resampling_metrics(batch, sampled, config),
            "entropy": masked_mean(-rollout.sampling_per_token_logps, rollout.policy_mask),
            **update,
            "learning_rate": learning_rate,
            "num_tokens": state.num_tokens,
            "step_time": time.perf_counter() - started,
        }


def sample_batch(
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    order: ProblemOrder,
    reward_funcs: Sequence[RewardFunction],
    state: TrainingState,
    config: GRPOConfig,
    stages: Stages = GRPO_STAGES,
) -> tuple[Batch, Batch]:
    """Sample and score completions of the next problems; returns the batch to learn from, and all that was sampled.

    The two differ with `max_resamples`: further problems then replace those whose groups tie, until no group ties, the
    limit is reached, or no problem is left (dynamic sampling; DAPO, arXiv 2503.14476).
    """
    rounds: list[Batch] = []
    used: list[int] = []
    missing = config.prompts_per_step
    while missing and len(rounds) <= config.max_resamples and len(used) < len(problems):
        indices = order.draw(missing, used)
        used += indices
        chosen = [problems[index] for index in indices]
        prompts = [stages.render(tokenizer, problem.prompt, **prompt_options(problem.level)) for problem in chosen]
        rollout = state.sampler.generate(prompts, state.generator)
        rounds.append(stages.score(rollout, chosen, reward_funcs, config, stages.advantages))
        missing = int(degenerate_groups(rounds[-1].rewards, config.num_generations).sum())
    if len(rounds) == 1:
        return rounds[0], rounds[0]
    everything = torch.arange(len(used), device=rounds[0].rewards.device)
    sampled = join_batches(rounds, everything, tokenizer.pad_token_id, config, stages)
    tied = degenerate_groups(sampled.rewards, config.num_generations)
    groups = tied.long().argsort(stable=True)[: config.prompts_per_step]  # those that do not tie come first
    return join_batches([sampled], groups, tokenizer.pad_token_id, config, stages), sampled


def join_batches(
    batches: Sequence[Batch], groups: Tensor, pad_token_id: int, config: GRPOConfig, stages: Stages
) -> Batch:
    """The batch of some groups of several batches, counted through all of them, with the advantages of this batch."""
    size = config.num_generations
    rows = (groups[:, None] * size + torch.arange(size, device=groups.device)).flatten()
    rollout = join_rollouts([batch.rollout for batch in batches], rows.tolist(), pad_token_id)
    rewards = torch.cat([batch.rewards for batch in batches])[rows]
    rewards_per_func = torch.cat([batch.rewards_per_func for batch in batches])[rows]
    masks = [mask for batch in batches for mask in batch.loss_mask]
    loss_mask = pad_sequence([masks[row] for row in rows], batch_first=True)
    return batch_of(rollout, rewards_per_func, rewards, loss_mask, config, stages.advantages)


def resampling_metrics(batch: Batch, sampled: Batch, config: GRPOConfig) -> dict[str, float]:
    """With `max_resamples`: the number of groups that were sampled, and the fraction of the batch that still ties."""
    if not config.max_resamples:
        return {}
    tied = degenerate_groups(batch.rewards, config.num_generations)
    return {
        "resampling/num_groups": len(sampled.rewards) // config.num_generations,
        "resampling/frac_reward_zero_std": tied.float().mean().item(),
    }


def update_policy(
    model: PreTrainedModel,
    batch: Batch,
    state: TrainingState,
    config: GRPOConfig,
    *,
    penalty: Callable[[nn.Module], Tensor] | None = None,
    stages: Stages = GRPO_STAGES,
) -> dict[str, float]:
    """Take `num_iterations` optimizer steps on one batch; returns their mean metrics.

    The metrics are loss, grad_norm, clip_ratio/* and, with beta, kl. Raises FloatingPointError before the weights
    change if the norm of the gradient is not finite, or too large.
    """
    rollout, rows = batch.rollout, stages.rows(batch, config)
    weights = token_weights(
        batch.loss_mask, loss_type=config.loss_type, max_completion_length=config.max_completion_length
    )
    old_per_token_logps: Tensor | None = None  # of the policy that sampled, known after the first iteration
    ref_per_token_logps = score_reference(rollout, rows, state, config)

    def take_step(old: Tensor | None, parts: Sequence[Tensor]) -> tuple[dict[str, float], Tensor]:
        """Take one optimizer step with micro-batches, given as row indices; returns metrics and logps (B, C)."""
        logps, metrics = torch.zeros_like(rollout.sampling_per_token_logps), {"loss": 0.0}
        in_policy_loss = torch.ones_like(batch.loss_mask)
        if config.top_entropy_quantile < 1:  # of the whole batch, which is therefore scored first
            entropies = score_parts(model, rollout, parts, config, entropy=True)
            in_policy_loss = high_entropy_mask(entropies, batch.loss_mask, quantile=config.top_entropy_quantile)
        state.stepper.begin()
        for part in parts:
            loss, part_logps = micro_batch_loss(
                model, batch, part, old, ref_per_token_logps, weights, in_policy_loss, state.sampler, config, stages
            )
            state.stepper.add(loss)
            metrics["loss"] += loss.item()
            logps = logps.to(part_logps.dtype).index_copy(0, part, part_logps.detach())
        if penalty is not None:
            extra = penalty(model)
            state.stepper.add(extra)
            metrics["penalty"] = extra.item()
        metrics["grad_norm"] = state.stepper.finish()
        return metrics | policy_metrics(logps, old, ref_per_token_logps, batch, config), logps

    totals: dict[str, float] = {}
    for _ in range(config.num_iterations):
        old = stages.old_logps(old_per_token_logps, ref_per_token_logps)
        metrics, logps = state.micro_batches.run(rollout, rows, partial(take_step, old))
        if old_per_token_logps is None:
            old_per_token_logps = logps
            mismatch = state.sampler.metrics(logps, rollout)
        for key, value in metrics.items():
            totals[key] = totals.get(key, 0.0) + value / config.num_iterations
    return totals | mismatch


def micro_batch_loss(
    model: PreTrainedModel,
    batch: Batch,
    rows: Tensor,
    old_per_token_logps: Tensor | None,
    ref_per_token_logps: Tensor | None,
    weights: Tensor,
    in_policy_loss: Tensor,
    sampler: Sampler,
    config: GRPOConfig,
    stages: Stages = GRPO_STAGES,
) -> tuple[Tensor, Tensor]:
    """The part of some rows in the loss of the batch: the sum of their token weights times per-token losses.

    Because `weights` (B, C) are computed from the whole batch, the losses of its micro-batches add up to its loss. So
    does the entropy bonus, the mean entropy of the tokens that the policy loss acts on, `in_policy_loss` (B, C).

    Returns the loss with its gradient, and per_token_logps (rows, C).
    """
    sampled, policy_mask = batch.rollout.sampling_per_token_logps[rows], in_policy_loss[rows]
    with recomputed_layers(model, config.gradient_checkpointing):
        logps, entropies = score_rows(model, batch.rollout, rows, config, with_entropy=config.entropy_coef > 0)
        old = logps.detach() if old_per_token_logps is None else old_per_token_logps[rows]
        if config.off_policy_mask_threshold is not None:
            before = old if config.rollout_quantization is None else sampled
            signs, mask, threshold = batch.advantages[rows], batch.loss_mask[rows], config.off_policy_mask_threshold
            policy_mask = policy_mask * off_policy_mask(logps, before, signs, mask, threshold=threshold)
        losses = stages.loss(
            logps,
            old,
            batch.advantages[rows],
            batch.loss_mask[rows],
            ref_per_token_logps=None if ref_per_token_logps is None else ref_per_token_logps[rows],
            beta=config.beta,
            importance_weights=sampler.importance_weights(old, sampled),
            policy_mask=policy_mask,
            use_bias_correction_kl=config.use_bias_correction_kl,
            **clip_settings(config),
        )
        loss = weighted_sum(losses, weights[rows])
        if config.entropy_coef:
            shares = token_weights(batch.loss_mask * in_policy_loss, loss_type="bnpo")[rows]
            loss = loss - config.entropy_coef * weighted_sum(entropies, shares)
        return loss, logps


def score_rows(
    model: PreTrainedModel, rollout: Rollout, rows: Tensor, config: GRPOConfig, *, with_entropy: bool = False
) -> tuple[Tensor, Tensor]:
    """The per_token_logps (rows, C) of whole groups, or a part of one; and the entropies, or the same once more."""
    scored = group_logps(
        model,
        rollout.prompt_ids[rows],
        rollout.prompt_mask[rows],
        rollout.completion_ids[rows],
        rollout.completion_mask[rows],
        num_generations=min(len(rows), config.num_generations),
        temperature=config.temperature,
        with_entropy=with_entropy,
    )
    return scored if isinstance(scored, tuple) else (scored, scored)


@torch.no_grad()
def score_parts(
    model: PreTrainedModel, rollout: Rollout, parts: Sequence[Tensor], config: GRPOConfig, *, entropy: bool = False
) -> Tensor:
    """The per_token_logps or, with `entropy`, the entropies (B, C) of all micro-batches; 0 in all other rows."""
    scored = torch.zeros_like(rollout.sampling_per_token_logps)
    for part in parts:
        found = score_rows(model, rollout, part, config, with_entropy=entropy)[-1]
        scored = scored.to(found.dtype).index_copy(0, part, found)
    return scored


@torch.no_grad()
def score_reference(rollout: Rollout, rows: Tensor, state: TrainingState, config: GRPOConfig) -> Tensor | None:
    """The ref_per_token_logps (B, C) under the reference policy, 0 in other rows; None without a reference."""
    reference = state.reference
    if reference is None:
        return None
    with adapters_off(reference):
        return state.micro_batches.run(rollout, rows, lambda parts: score_parts(reference, rollout, parts, config))


@torch.no_grad()
def synchronize_reference(model: PreTrainedModel, state: TrainingState, config: GRPOConfig) -> None:
    """Move the reference policy towards the policy: reference ← alpha · policy + (1 − alpha) · reference."""
    assert state.reference is not None
    alpha = config.ref_model_mixup_alpha
    for weight, policy_weight in zip(state.reference.parameters(), model.parameters(), strict=True):
        weight.mul_(1 - alpha).add_(policy_weight, alpha=alpha)


@torch.no_grad()
def policy_metrics(
    per_token_logps: Tensor,
    old_per_token_logps: Tensor | None,
    ref_per_token_logps: Tensor | None,
    batch: Batch,
    config: GRPOConfig,
) -> dict[str, float]:
    """The fractions of clipped tokens and, with a reference, the KL divergence from it; all tensors are (B, C).

    With `use_bias_correction_kl` the KL estimate is multiplied by the ratio, as in the loss and as TRL reports it.
    """
    old = per_token_logps if old_per_token_logps is None else old_per_token_logps
    clipped = clip_fractions(per_token_logps, old, batch.advantages, batch.loss_mask, **clip_settings(config))
    metrics = {key: value.item() for key, value in clipped.items()}
    if ref_per_token_logps is not None:
        kl = per_token_kl(per_token_logps, ref_per_token_logps)
        if config.use_bias_correction_kl:
            level = config.importance_sampling_level
            kl = kl * importance_ratio(per_token_logps, old, batch.loss_mask, importance_sampling_level=level)
        metrics["kl"] = masked_mean(kl, batch.loss_mask)
    return metrics


def clip_settings(config: GRPOConfig) -> dict[str, Any]:
    """The settings of a config for the importance ratio and its clipping."""
    names = ("epsilon", "epsilon_high", "loss_type", "importance_sampling_level", "delta")
    return {name: getattr(config, name) for name in names}


def start_training(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem], config: GRPOConfig
) -> TrainingState:
    """The state before the first step; raises the same ValueError as `train`."""
    check_inputs(model, problems, config)
    optimizer, scheduler = build_optimizer(model, config)
    reference = reference_policy(model) if config.beta else None
    longest = 0 if config.memory_budget_gib is None else longest_prompt(tokenizer, problems)
    sampler = Sampler if config.rollout_quantization is None else QuantizedSampler
    return TrainingState(
        optimizer,
        scheduler,
        make_stepper(optimizer, config),
        MicroBatches(model, config, pass_budget(model, config, longest)),
        sampler(model, tokenizer, config),
        torch.Generator().manual_seed(config.seed),
        reference,
    )


def check_inputs(model: nn.Module, problems: Sequence[Problem], config: GRPOConfig) -> None:
    """Raise ValueError if there are too few problems for one step, or the reference cannot be synchronized."""
    if len(problems) < config.prompts_per_step:
        raise ValueError(
            f"problems must have at least prompts_per_step = {config.prompts_per_step} entries, got {len(problems)}; "
            "pass more problems or lower prompts_per_step"
        )
    if config.sync_ref_model and has_adapters(model):
        raise ValueError(
            "sync_ref_model must be False for a model with adapters, whose reference is the model without them; train "
            "all weights, or leave it out"
        )


def longest_prompt(tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem]) -> int:
    """The number of tokens of the longest prompt, searched among the hundred with the most characters."""
    longest = sorted(problems, key=lambda problem: len(problem.prompt))[-100:]
    rendered = [render_prompt(tokenizer, problem.prompt, **prompt_options(problem.level)) for problem in longest]
    return max(map(len, tokenizer(rendered, add_special_tokens=False)["input_ids"]))
