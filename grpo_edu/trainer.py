"""Train a policy with GRPO: sample completions, score them, compare them within their groups, and update the policy.

`train` yields the metrics of each step. It follows algorithm 1 of DeepSeekMath (arXiv 2402.03300), with the variants of
`grpo_edu.losses`; `grpo_edu.minimal` is the same step with three of the losses and without what makes it fast. Read
this file from top to bottom, or follow a token in a debugger:

- it is sampled: `train` → `sample_ahead` → `sample_batch` → `Sampler.generate`, and scored: `score_rollout`
- it is learned from: `train` → `update_policy` (`token_weights`: its weight in the batch) → `optimizer_step` →
  `micro_batch_loss` (`logps_of_rows`: its log-probability) → `grpo_loss` → `per_token_loss`. These five calls lead to
  the loss of a token, whose formula is an entry of `grpo_edu.losses.LOSSES`.

`training` is what all steps of a run share: model, problems, settings and so on (`Training`). Its `state` is what a run
carries from one step to the next (`TrainingState`), and its `stages` name functions of a step, so that a study can
replace them (`Stages`): `stages.render` is `render_prompt`, `.score` is `score_rollout`, `.advantages` is
`compute_advantages`, `.rows` is `rows_with_gradient`, and `.loss` is `grpo_loss`. The three classes are at the end.
`update` is a batch with what its optimizer steps need (`Update`).

A row is one completion of a batch, and `rows` is a tensor of row indices. A micro-batch is given by its row indices.
Three masks (B, C) say which tokens count: `completion_mask` leaves out the padding, `Rollout.policy_mask` also what an
environment wrote, and `Batch.loss_mask` also truncated completions, if the config says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from grpo_edu.batch import (
    Batch,
    compute_advantages,
    replace_tied_groups,
    resampling_metrics,
    rows_with_gradient,
    score_rollout,
)
from grpo_edu.config import GRPOConfig
from grpo_edu.fast.lora import adapters_off, reference_policy
from grpo_edu.fast.memory import recomputed_layers
from grpo_edu.fast.micro_batches import MicroBatches, pass_budget
from grpo_edu.fast.optimizers import build_optimizer, clip_and_step
from grpo_edu.fast.packing import group_logps
from grpo_edu.losses import clip_fractions, grpo_loss, importance_ratio, per_token_kl, token_weights, weighted_sum
from grpo_edu.metrics import masked_mean, rollout_metrics
from grpo_edu.problems.templates import Problem, ProblemOrder, as_problems, prompt_options
from grpo_edu.prompts import render_prompt
from grpo_edu.quantization.rollouts import make_sampler
from grpo_edu.rewards import RewardFunction, reward_name
from grpo_edu.rollout import Rollout, Sampler

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem | Mapping[str, Any]],
    reward_funcs: RewardFunction | Sequence[RewardFunction],
    config: GRPOConfig,
    *,
    penalty: Callable[[nn.Module], Tensor] | None = None,
    state: TrainingState | None = None,
    stages: Stages | None = None,
) -> Generator[dict[str, float], None, None]:
    """Train `model` in place with GRPO; yields the metrics of each step, under TRL's keys.

    Args:
        model: a causal language model. It is trained without dropout, so that the policy that is trained is the
            policy that sampled.
        tokenizer: its tokenizer, with a chat template and a pad token.
        problems: at least `config.prompts_per_step`, or dictionaries with "prompt", "answer" and further columns. They
            are shuffled, and each is used once before any is repeated.
        reward_funcs: one or more functions with TRL's signature (see `grpo_edu.rewards`).
        config: the settings. If memory is short, the batch is divided into more micro-batches than the settings
            require, which changes the result by rounding only.
        penalty: a scalar function of the model that is added to the loss of every update (EWC, for example). Its
            gradient may be large, so `abort_grad_norm` is not applied.
        state: from `start_training`, to inspect it between two steps or to continue a run; None: a new one.
        stages: replacements for stages of the step (for example in the faulty runs of the diagnosis lab); None: none.

    Raises:
        ValueError: there are too few problems, the memory budget is too small, a stage refuses its input, or no reward
            function applies to any completion of the first step.
        RuntimeError: a reward function raised an exception.
        FloatingPointError: the norm of the gradient is not finite, or larger than `abort_grad_norm`.
        MemoryError: a single completion does not fit into memory.
        In each case the model keeps the weights of the last good update.
    """
    several = isinstance(reward_funcs, Sequence) and not isinstance(reward_funcs, str)
    reward_funcs = list(reward_funcs) if several else [reward_funcs]  # type: ignore[arg-type, list-item]
    names = [reward_name(func) for func in reward_funcs]
    if len(set(names)) < len(names):
        raise ValueError(f"reward_funcs must have different names, got {', '.join(names)}; set their __name__")
    problems = as_problems(problems)
    state = state or start_training(model, tokenizer, problems, config)
    training = Training(model, tokenizer, problems, reward_funcs, config, state, stages or Stages(), penalty)
    order = ProblemOrder(len(problems), config.seed, shuffle=config.shuffle_dataset)
    used = [len(sampled.rewards) // config.num_generations for _, sampled in state.ahead]
    for count in state.num_problems + used:  # a run that is continued continues after the problems that it has used
        order.draw(count)
    model.eval()
    for step in range(state.step + 1, config.max_steps + 1):
        started = time.perf_counter()
        (batch, sampled), *ahead = sample_ahead(training, order, step)  # the oldest is the one to learn from now
        if step == 1 and batch.rewards.isnan().all():  # in a later step, `compute_rewards` only warns
            raise ValueError(
                f"every reward function ({', '.join(names)}) returned None for all completions of the first step; "
                "return a number for those to which it applies, or add a function that applies to them"
            )
        state.batch, state.batch_step = batch, step
        learning_rate = state.optimizer.param_groups[0]["lr"]
        update_metrics = update_policy(training, batch)
        state.scheduler.step()
        rollout = sampled.rollout
        state.step, state.ahead = step, ahead
        state.num_problems.append(len(sampled.rewards) // config.num_generations)
        state.num_tokens += int(rollout.prompt_mask.sum() + rollout.completion_mask.sum())
        yield {
            "step": step,
            **rollout_metrics(rollout, sampled.rewards_per_func, sampled.rewards, names),
            **resampling_metrics(batch, sampled, config),
            "entropy": masked_mean(-rollout.sampling_per_token_logps, rollout.policy_mask),
            **update_metrics,
            "learning_rate": learning_rate,
            "num_tokens": state.num_tokens,
            "step_time": time.perf_counter() - started,
        }


def sample_ahead(training: Training, order: ProblemOrder, step: int) -> list[tuple[Batch, Batch]]:
    """Return the batches of this step and of the next `rollout_lag` steps, of which the state has all but the last.

    Each is a pair: the batch to learn from, and all that was sampled for it. With dynamic sampling the two differ.
    """
    config = training.config
    ahead = list(training.state.ahead)
    while len(ahead) <= config.rollout_lag and step + len(ahead) <= config.max_steps:
        indices = order.draw(config.prompts_per_step)
        sample = partial(sample_batch, training)
        batch = sampled = sample(indices)
        if config.max_resamples:
            pad = training.tokenizer.pad_token_id
            batch, sampled = replace_tied_groups(batch, indices, order, sample, config, training.stages.advantages, pad)
        ahead.append((batch, sampled))
    return ahead


def sample_batch(training: Training, indices: Sequence[int]) -> Batch:
    """Sample `num_generations` completions of each of the problems with these indices, and score them."""
    state, stages = training.state, training.stages
    chosen = [training.problems[index] for index in indices]
    environments, openings = state.sampler.reset([problem.row() for problem in chosen])
    prompts = [
        stages.render(training.tokenizer, problem.prompt + opening, **prompt_options(problem.level))
        for problem, opening in zip(chosen, openings, strict=True)
    ]
    rollout = state.sampler.generate(prompts, state.generator, environments)
    return stages.score(rollout, chosen, training.reward_funcs, training.config, stages.advantages)


@dataclass(frozen=True)
class Update:
    """A batch and what each optimizer step on it needs.

    rows: indices of the rows that have a gradient; the others are not computed, and have log-probability 0 below.
    weights: (B, C), of each token in the loss of the whole batch.
    ref_per_token_logps: (B, C), under the reference policy; None without a KL term.
    old_per_token_logps: (B, C), before the first step on the batch; None in that step, see `old_logps`.
    """

    training: Training
    batch: Batch
    rows: Tensor
    weights: Tensor
    ref_per_token_logps: Tensor | None
    old_per_token_logps: Tensor | None = None

    def old_logps(self, per_token_logps: Tensor, rows: Tensor | slice = slice(None)) -> Tensor:
        """Return the old log-probabilities of some rows; in the first step they are the policy's `per_token_logps`."""
        if self.old_per_token_logps is None:
            return per_token_logps.detach()
        return self.old_per_token_logps[rows]


def update_policy(training: Training, batch: Batch) -> dict[str, float]:
    """Take `num_iterations` optimizer steps on one batch; returns their mean metrics.

    The metrics are loss, grad_norm, clip_ratio/* and, with beta, kl. Raises FloatingPointError before the weights
    change if the norm of the gradient is not finite, or too large.
    """
    config, state, stages = training.config, training.state, training.stages
    rows = stages.rows(batch, config)
    weights = token_weights(
        batch.loss_mask, loss_type=config.loss_type, max_completion_length=config.max_completion_length
    )
    update = Update(training, batch, rows, weights, reference_logps(training, batch.rollout, rows))
    totals: dict[str, float] = {}
    for _ in range(config.num_iterations):
        logps = None
        while logps is None:  # usually once; again, with smaller micro-batches, if memory runs out inside the `with`
            with state.micro_batches.attempt(batch.rollout, rows) as micro_batches:
                metrics, logps = stages.optimizer_step(update, micro_batches)
        old = update.old_logps(logps)
        update = replace(update, old_per_token_logps=old)
        for key, value in metrics.items():
            totals[key] = totals.get(key, 0.0) + value / config.num_iterations
    return totals | state.sampler.metrics(old, batch.rollout)


def optimizer_step(update: Update, micro_batches: Sequence[Tensor]) -> tuple[dict[str, float], Tensor]:
    """Add up the gradients of all micro-batches, each given by its row indices, and take one step.

    Returns the metrics, and per_token_logps (B, C) before the step, 0 in rows without a gradient.
    """
    optimizer, penalty, config = update.training.state.optimizer, update.training.penalty, update.training.config
    logps = torch.zeros_like(update.batch.rollout.sampling_per_token_logps)
    metrics = {"loss": 0.0}
    optimizer.zero_grad(set_to_none=False)
    for rows in micro_batches:
        loss, row_logps = micro_batch_loss(update, rows)
        loss.backward()
        metrics["loss"] += loss.item()
        logps = logps.to(row_logps.dtype).index_copy(0, rows, row_logps.detach())
    if penalty is not None:
        extra = penalty(update.training.model)
        extra.backward()
        metrics["penalty"] = extra.item()
    longest = config.abort_grad_norm if penalty is None else None
    metrics["grad_norm"] = clip_and_step(optimizer, config.max_grad_norm, longest)
    return metrics | policy_metrics(update, logps), logps


def micro_batch_loss(update: Update, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return what some rows add to the loss of the batch, with its gradient; and their per_token_logps (rows, C).

    Because the weights are those of the whole batch, the losses of its micro-batches add up to its loss.
    """
    training, batch, config = update.training, update.batch, update.training.config
    with recomputed_layers(training.model, config.gradient_checkpointing):
        with_entropy = config.entropy_coef > 0
        logps, entropies = logps_of_rows(training.model, batch.rollout, rows, config, with_entropy=with_entropy)
        old, ref = update.old_logps(logps, rows), update.ref_per_token_logps
        loss = training.stages.loss(
            logps,
            old,
            batch.advantages[rows],
            batch.loss_mask[rows],
            ref_per_token_logps=None if ref is None else ref[rows],
            weights=update.weights[rows],
            importance_weights=training.state.sampler.importance_weights(old, batch.rollout, rows),
            beta=config.beta,
            use_bias_correction_kl=config.use_bias_correction_kl,
            **clip_settings(config),
        )
        if entropies is not None:
            mean = token_weights(batch.loss_mask, loss_type="bnpo")[rows]
            loss = loss - config.entropy_coef * weighted_sum(entropies, mean)
    return loss, logps


def clip_settings(config: GRPOConfig) -> dict[str, Any]:
    """Return the settings of a config for the importance ratio and its clipping."""
    names = ("epsilon", "epsilon_high", "loss_type", "importance_sampling_level")
    return {name: getattr(config, name) for name in names}


# ---- log-probabilities ----


def logps_of_rows(
    model: PreTrainedModel, rollout: Rollout, rows: Tensor, config: GRPOConfig, *, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the per_token_logps (rows, C) of whole groups, or a part of one; and the entropies (rows, C), or None."""
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
    return scored if isinstance(scored, tuple) else (scored, None)


@torch.no_grad()
def reference_logps(training: Training, rollout: Rollout, rows: Tensor) -> Tensor | None:
    """Return the ref_per_token_logps (B, C) under the reference policy, 0 in other rows; None without a reference."""
    reference = training.state.reference
    if reference is None:
        return None
    scored = None
    with adapters_off(reference):
        while scored is None:
            with training.state.micro_batches.attempt(rollout, rows) as micro_batches:
                logps = torch.zeros_like(rollout.sampling_per_token_logps)
                for part in micro_batches:
                    row_logps, _ = logps_of_rows(reference, rollout, part, training.config)
                    logps = logps.to(row_logps.dtype).index_copy(0, part, row_logps)
                scored = logps
    return scored


@torch.no_grad()
def policy_metrics(update: Update, per_token_logps: Tensor) -> dict[str, float]:
    """Return the fractions of clipped tokens and, with a reference, the KL divergence from it.

    In rows without a gradient all log-probabilities are 0, so their ratios are 1 and their tokens count as not clipped.
    With `use_bias_correction_kl` the KL estimate is multiplied by the ratio, as in the loss and as TRL reports it.
    """
    batch, ref, config = update.batch, update.ref_per_token_logps, update.training.config
    old = update.old_logps(per_token_logps)
    clipped = clip_fractions(per_token_logps, old, batch.advantages, batch.loss_mask, **clip_settings(config))
    metrics = {key: value.item() for key, value in clipped.items()}
    if ref is not None:
        kl = per_token_kl(per_token_logps, ref)
        if config.use_bias_correction_kl:
            level = config.importance_sampling_level
            kl = kl * importance_ratio(per_token_logps, old, batch.loss_mask, importance_sampling_level=level)
        metrics["kl"] = masked_mean(kl, batch.loss_mask)
    return metrics


# ---- the state of a run, and what a study may replace ----


@dataclass
class TrainingState:
    """The state of a training run between two steps, in addition to the weights; a checkpoint stores it.

    optimizer, scheduler: the optimizer and its learning-rate schedule.
    micro_batches: divides a batch into micro-batches that fit into memory, and remembers when memory ran out.
    sampler: samples the rollouts. generator: random number generator of the sampling.
    reference: the reference policy of the KL term, or None.
    step: number of completed steps. num_tokens: number of tokens processed.
    num_problems: number of problems that each completed step sampled completions for.
    ahead: for each of the next `rollout_lag` steps, the batch that it will learn from, and all that was sampled for it.
    batch, batch_step: the batch of the last step, which may have failed, and the number of that step.
    """

    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    micro_batches: MicroBatches
    sampler: Sampler
    generator: torch.Generator
    reference: PreTrainedModel | None = None
    step: int = 0
    num_tokens: int = 0
    num_problems: list[int] = field(default_factory=list)
    ahead: list[tuple[Batch, Batch]] = field(default_factory=list)
    batch: Batch | None = None
    batch_step: int = 0


@dataclass(frozen=True)
class Stages:
    """The stages of a step, which a study may replace; the defaults are correct GRPO, and get the same arguments.

    render: (tokenizer, question, and `system` by name) → prompt.
    score: (rollout, problems, reward functions, config, the stage `advantages`) → batch.
    advantages: (rewards (B,), config) → advantages (B,).
    rows: (batch, config) → indices of the rows to learn from; the default leaves out groups whose rewards are equal,
        even if another stage gives them advantages that are not 0.
    optimizer_step: (update, micro-batches) → metrics, and the log-probabilities (B, C) before the step.
    loss: (log-probabilities, old ones, advantages, mask, and the rest by name, such as `weights`) → the loss, a scalar.
    """

    render: Callable[..., str] = render_prompt
    score: Callable[..., Batch] = score_rollout
    advantages: Callable[[Tensor, GRPOConfig], Tensor] = compute_advantages
    rows: Callable[[Batch, GRPOConfig], Tensor] = rows_with_gradient
    optimizer_step: Callable[..., tuple[dict[str, float], Tensor]] = optimizer_step
    loss: Callable[..., Tensor] = grpo_loss


@dataclass(frozen=True)
class Training:
    """The state that all steps of a training run share; the arguments of `train` describe the fields."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    problems: Sequence[Problem]
    reward_funcs: Sequence[RewardFunction]
    config: GRPOConfig
    state: TrainingState
    stages: Stages = Stages()
    penalty: Callable[[nn.Module], Tensor] | None = None


def start_training(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem | Mapping[str, Any]],
    config: GRPOConfig,
) -> TrainingState:
    """Return the state before the first step; raises the same ValueError as `train`."""
    problems = as_problems(problems)
    check_inputs(model, problems, config)
    optimizer, scheduler = build_optimizer(model, config)
    reference = reference_policy(model) if config.beta else None
    longest = 0 if config.memory_budget_gib is None else longest_prompt(tokenizer, problems)
    return TrainingState(
        optimizer,
        scheduler,
        MicroBatches(model, config, pass_budget(model, config, longest)),
        make_sampler(model, tokenizer, config),
        torch.Generator().manual_seed(config.seed),
        reference,
    )


def check_inputs(model: nn.Module, problems: Sequence[Problem], config: GRPOConfig) -> None:
    """Raise ValueError if there are too few problems for one step, or model and settings do not fit together."""
    if isinstance(model, str):
        raise ValueError(f"model must be a loaded model, got the name {model!r}; load it with load_policy")
    if not isinstance(config, GRPOConfig):
        raise ValueError(f"config must be a GRPOConfig, got {config!r}")
    if len(problems) < config.prompts_per_step:
        raise ValueError(
            f"problems must have at least prompts_per_step = {config.prompts_per_step} entries, got {len(problems)}; "
            "pass more problems or lower prompts_per_step"
        )


def longest_prompt(tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem]) -> int:
    """Return the number of tokens of the longest prompt, searched among the hundred with the most characters."""
    longest = sorted(problems, key=lambda problem: len(problem.prompt))[-100:]
    rendered = [render_prompt(tokenizer, problem.prompt, **prompt_options(problem.level)) for problem in longest]
    return max(map(len, tokenizer(rendered, add_special_tokens=False)["input_ids"]))
