"""The settings of a training run: immutable, checked when they are created, and named as in TRL where TRL has them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from numbers import Real
from types import NoneType
from typing import Any, ClassVar, get_args, get_type_hints

from grpo_edu.extras.bounds import BOUNDS, check_numbers, require

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo", "reinforce")
IMPORTANCE_SAMPLING_LEVELS = ("token", "sequence")
SCALE_REWARDS = ("group", "batch", "none", "mean")
ADVANTAGE_ESTIMATORS = ("group", "rloo", "none")
AGGREGATIONS = ("sum_then_normalize", "normalize_then_sum")
SCHEDULES = ("constant", "constant_with_warmup", "linear", "cosine")
OPTIMIZERS = ("adamw_torch", "adafactor")
ROLLOUTS = ("grpo_edu", "transformers", "vllm")  # what may sample for TRL's trainer
DEVICES = ("auto", "cpu", "cuda", "mps")
DTYPE_CHOICES = ("float32", "bfloat16", "auto")
LARGEST_REWARD = 1e15  # float32 still holds the squares of such rewards, from which advantages are scaled
QUANTIZATION_SCHEMES = ("bf16", "int8-dynamic", "int8-weight", "int4-group")


@dataclass(frozen=True)
class GRPOConfig:
    """The settings of one GRPO run. The defaults train the tiny model in well under a minute.

    num_generations: G, completions per prompt; at least 2, because a completion is compared with its group.
    prompts_per_step: N, different problems per step; a step samples B = N·G completions.
    max_resamples: how often per step further problems replace those whose groups tie (dynamic sampling); 0: never.
    max_completion_length: the largest number of tokens in a completion.
    max_steps: number of steps; each samples one batch and learns from it.
    learning_rate, weight_decay, lr_scheduler_type, warmup_steps: settings of the optimizer.
    max_grad_norm: a gradient with a larger norm is scaled down to this norm; 0 turns clipping off.
    abort_grad_norm: a gradient with a larger norm, or one that is not finite, stops the run before the weights change.
    num_iterations: μ, updates per batch; from the second on, the importance ratio differs from 1 and is clipped.
    gradient_accumulation_steps: micro-batches per batch; the result does not depend on it.
    temperature, top_p, top_k, min_p, repetition_penalty: settings of the sampling, see `grpo_edu.rollout.generate`.
    loss_type, importance_sampling_level, epsilon, epsilon_high, delta, beta: see `grpo_edu.losses.grpo_loss`.
    use_bias_correction_kl: multiply the KL penalty by the ratio (DeepSeek-V3.2), which is TRL's default.
    off_policy_mask_threshold: leave out bad completions that became less likely by more nats per token (DeepSeek-V3.2).
    top_entropy_quantile: share of the tokens, those with the highest entropy, that the policy loss keeps.
    entropy_coef: weight of the mean entropy of the tokens, which is added as a bonus.
    sync_ref_model: let the reference policy of the KL term follow the policy (TR-DPO, arXiv 2404.09656).
    ref_model_mixup_alpha: the weights of the new reference are alpha · policy + (1 − alpha) · reference.
    ref_model_sync_steps: number of steps between two such updates of the reference.
    scale_rewards: "group", "batch", "none" or "mean", see `grpo_edu.advantages.group_advantages`.
    advantage_estimator: "group", "rloo" for the leave-one-out baseline, or "none" for the reward itself (no scaling).
    reward_weights: one weight per reward function; None gives each of them the weight 1.
    multi_objective_aggregation: add rewards first, or scale each first (see `grpo_edu.advantages.gdpo_advantages`).
    mask_truncated_completions: leave completions that did not end out of the loss (DAPO).
    shuffle_dataset: shuffle the problems; if False, they are used in the given order.
    seed: random seed of the order of the problems and of every sampled token.
    optim: "adamw_torch", or "adafactor", whose states need almost no memory; see `grpo_edu.fast.optimizers`.
    optimizer_in_backward: update each weight as soon as its gradient is known, then free the gradient.
    gradient_checkpointing: keep only the input of each layer; about a third more time, a fraction of the memory.
    memory_budget_gib: the most memory that the process may use; None: what the computer has available.
    rollout_quantization: sample from a copy that is quantized with this scheme, see
        `grpo_edu.quantization.rollouts`; None: sample from the policy itself.
    importance_sampling_correction: weight each token to correct for sampling from the quantized copy.
    importance_sampling_clip_max: the largest such weight.

    Raises ValueError with the name of the field, its value and what to do.

    >>> GRPOConfig(num_generations=1)
    Traceback (most recent call last):
    ...
    ValueError: num_generations must be at least 2 (each completion is compared with its group), got 1
    """

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "loss_type": LOSS_TYPES,
        "importance_sampling_level": IMPORTANCE_SAMPLING_LEVELS,
        "scale_rewards": SCALE_REWARDS,
        "advantage_estimator": ADVANTAGE_ESTIMATORS,
        "multi_objective_aggregation": AGGREGATIONS,
        "lr_scheduler_type": SCHEDULES,
        "optim": OPTIMIZERS,
        "rollout_quantization": QUANTIZATION_SCHEMES,
    }

    num_generations: int = 8
    prompts_per_step: int = 16
    max_resamples: int = 0
    max_completion_length: int = 96
    max_steps: int = 40
    learning_rate: float = 1e-4
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    lr_scheduler_type: str = "constant"
    warmup_steps: int = 0
    num_iterations: int = 1
    gradient_accumulation_steps: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    loss_type: str = "grpo"
    importance_sampling_level: str = "token"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    beta: float = 0.0
    use_bias_correction_kl: bool = False
    off_policy_mask_threshold: float | None = None
    top_entropy_quantile: float = 1.0
    entropy_coef: float = 0.0
    sync_ref_model: bool = False
    ref_model_mixup_alpha: float = 0.6
    ref_model_sync_steps: int = 512
    scale_rewards: str = "group"
    advantage_estimator: str = "group"
    reward_weights: tuple[float, ...] | None = None
    multi_objective_aggregation: str = "sum_then_normalize"
    mask_truncated_completions: bool = False
    shuffle_dataset: bool = True
    seed: int = 0
    optim: str = "adamw_torch"
    optimizer_in_backward: bool = False
    gradient_checkpointing: bool = False
    memory_budget_gib: float | None = None
    rollout_quantization: str | None = None
    importance_sampling_correction: bool = True
    importance_sampling_clip_max: float = 3.0
    abort_grad_norm: float | None = 1e6

    def __post_init__(self) -> None:
        self._check_types()
        check_numbers(**{name: getattr(self, name) for name in BOUNDS if name in _field_types()})
        divides = self.prompts_per_step % self.gradient_accumulation_steps == 0
        demand = f"must divide prompts_per_step = {self.prompts_per_step} (no group may be split)"
        self._require("gradient_accumulation_steps", divides, demand)
        for name, choices in self.choices.items():
            value = getattr(self, name)
            if value not in choices and not (value is None and NoneType in _field_types()[name]):
                raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}")
        self._check_combinations()

    @property
    def batch_size(self) -> int:
        """B = N·G, completions per step."""
        return self.prompts_per_step * self.num_generations

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a JSON file."""
        return asdict(self)

    def _check_types(self) -> None:
        """Raise ValueError for a truth value or a list of weights that is none; `check_numbers` sees to the numbers."""
        for name, types in _field_types().items():
            if bool in types:
                self._require(name, isinstance(getattr(self, name), bool), "must be True or False")
        if self.reward_weights is not None:
            is_list = isinstance(self.reward_weights, Iterable)
            self._require("reward_weights", is_list, "must be a list of numbers, one per reward function")
            object.__setattr__(self, "reward_weights", tuple(self.reward_weights))
            finite = all(isinstance(weight, Real) and math.isfinite(weight) for weight in self.reward_weights)
            self._require("reward_weights", finite, "must be finite numbers, one per reward function")

    def _check_combinations(self) -> None:
        """Raise ValueError for settings that are valid alone, but not together."""
        if self.loss_type == "cispo" and self.epsilon_high is None:
            raise ValueError(
                "epsilon_high must be set with loss_type = 'cispo', where it is the largest ratio itself; got None, "
                "which falls back to epsilon and scales every loss down to about a fifth. Set epsilon_high=5.0, as "
                "ScaleRL and TRL do."
            )
        if self.sync_ref_model and not self.beta:
            raise ValueError(
                f"beta must be positive with sync_ref_model = True, got {self.beta}, because without a KL term there "
                "is no reference policy. Set beta=0.04, for example, or sync_ref_model=False."
            )
        if self.sync_ref_model and self.ref_model_sync_steps >= self.max_steps:
            raise ValueError(
                f"ref_model_sync_steps must be smaller than max_steps = {self.max_steps} with sync_ref_model = True, "
                f"got {self.ref_model_sync_steps}, so the reference would never change. Lower ref_model_sync_steps."
            )
        if self.multi_objective_aggregation == "normalize_then_sum" and self.advantage_estimator != "group":
            raise ValueError(
                "multi_objective_aggregation = 'normalize_then_sum' has no effect with advantage_estimator = "
                f"{self.advantage_estimator!r}. Set advantage_estimator='group'."
            )
        if self.scale_rewards in ("batch", "mean") and self.advantage_estimator != "group":
            raise ValueError(
                f"scale_rewards = {self.scale_rewards!r} has no effect with advantage_estimator = "
                f"{self.advantage_estimator!r}, which does not scale rewards. Set advantage_estimator='group', or "
                "leave scale_rewards out."
            )
        if self.lr_scheduler_type == "constant" and self.warmup_steps:
            raise ValueError(
                f"warmup_steps must be 0 with lr_scheduler_type = 'constant', which has no warm-up; got "
                f"{self.warmup_steps}. Set lr_scheduler_type='constant_with_warmup', or warmup_steps=0."
            )
        if self.optimizer_in_backward and self.gradient_accumulation_steps > 1:
            raise ValueError(
                "optimizer_in_backward cannot be True with gradient_accumulation_steps = "
                f"{self.gradient_accumulation_steps}, because it frees each gradient before it could be accumulated. "
                "Set gradient_accumulation_steps=1, and gradient_checkpointing=True if memory is short."
            )

    def _require(self, name: str, holds: bool, demand: str) -> None:
        require(name, getattr(self, name), holds, demand)


@cache
def _field_types() -> dict[str, tuple[type, ...]]:
    """The types that each field of `GRPOConfig` may have, from its annotation: `float | None` gives both."""
    return {name: get_args(annotation) or (annotation,) for name, annotation in get_type_hints(GRPOConfig).items()}


@dataclass(frozen=True)
class SupervisedConfig:
    """The settings of supervised fine-tuning on worked solutions; the fields mean the same as in `GRPOConfig`.

    beta: weight of the KL divergence from the initial model on the training prompts ("learning without forgetting",
        Li and Hoiem 2016, arXiv 1606.09282).

    Raises ValueError as `GRPOConfig` does.

    >>> SupervisedConfig(max_steps=0)
    Traceback (most recent call last):
    ...
    ValueError: max_steps must be at least 1, got 0
    """

    max_steps: int = 40
    prompts_per_step: int = 16
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    lr_scheduler_type: str = "constant"
    warmup_steps: int = 0
    beta: float = 0.0
    seed: int = 0
    optim: str = "adamw_torch"
    optimizer_in_backward: bool = False
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        GRPOConfig(**asdict(self))  # the same names under the same rules
