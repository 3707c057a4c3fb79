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
from grpo_edu.extras.settings import documented, setting

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo", "reinforce")
IMPORTANCE_SAMPLING_LEVELS = ("token", "sequence")
SCALE_REWARDS = ("group", "batch", "none", "mean")
ADVANTAGE_ESTIMATORS = ("group", "rloo", "none")
AGGREGATIONS = ("sum_then_normalize", "normalize_then_sum")
SCHEDULES = ("constant", "constant_with_warmup", "linear", "cosine")
OPTIMIZERS = ("adamw_torch", "adafactor")
DEVICES = ("auto", "cpu", "cuda", "mps")
DTYPE_CHOICES = ("float32", "bfloat16", "auto")
LARGEST_REWARD = 1e15  # float32 still holds the squares of such rewards, from which advantages are scaled
QUANTIZATION_SCHEMES = ("bf16", "int8-dynamic", "int8-weight", "int4-group")
ROLLOUT_SCHEMES = (*QUANTIZATION_SCHEMES, "int4-tensor")  # the last is the bad example


@documented
@dataclass(frozen=True)
class GRPOConfig:
    """The settings of one GRPO run. The defaults train the tiny model in well under a minute.

    A step samples B = N·G completions. What a setting does is explained where it is used: the sampling in
    `grpo_edu.rollout.generate`, the loss in `grpo_edu.losses.grpo_loss`, the advantages in
    `grpo_edu.advantages.group_advantages` and `gdpo_advantages`, the optimizers in `grpo_edu.fast.optimizers`, and the
    quantized copy in `grpo_edu.quantization.rollouts`. sync_ref_model is TR-DPO (arXiv 2404.09656).

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
        "rollout_quantization": ROLLOUT_SCHEMES,
        "importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    }

    num_generations: int = setting(8, "G, completions per problem, at least 2, because each is compared with its group")
    prompts_per_step: int = setting(16, "N, different problems per step; with smollm2: 8")
    max_resamples: int = setting(0, "how often per step groups with equal rewards are sampled anew (dynamic sampling)")
    max_completion_length: int = setting(96, "most tokens of a completion; with gsm8k: 256")
    max_steps: int = setting(40, "training steps; each samples one batch and learns from it")
    learning_rate: float = setting(0.0001, "size of each update; with smollm2: 1e-05")
    weight_decay: float = setting(0.0, "how strongly weights are pulled towards 0")
    max_grad_norm: float = setting(1.0, "longer gradients are scaled down; 0: never")
    lr_scheduler_type: str = setting("constant", "how the learning rate changes over the steps")
    warmup_steps: int = setting(0, "steps over which the learning rate rises from 0")
    num_iterations: int = setting(1, "μ, updates per batch; clipping needs at least 2")
    steps_per_generation: int = setting(1, "parts of a batch; each has μ updates of its own")
    gradient_accumulation_steps: int = setting(1, "micro-batches per update; the result is the same")
    temperature: float = setting(1.0, "1: the policy itself; lower: more certain")
    top_p: float = setting(1.0, "sample only from the likeliest tokens whose probabilities add up to this")
    top_k: int = setting(0, "sample only from so many likeliest tokens; 0: from all")
    min_p: float = setting(0.0, "sample only tokens with at least this share of the likeliest token's probability")
    repetition_penalty: float = setting(1.0, "above 1, tokens that have occurred become less likely")
    loss_type: str = setting("grpo", "how ratios are clipped and tokens averaged")
    importance_sampling_level: str = setting("token", "one ratio per token, or per completion (GSPO)")
    epsilon: float = setting(0.2, "lower clip bound, as a distance from ratio 1")
    epsilon_high: float | None = setting(None, "upper clip bound, likewise (default: epsilon)")
    delta: float | None = setting(None, "upper bound of the ratio where the advantage is negative")
    beta: float = setting(0.0, "weight of the KL term; 0 needs no reference model")
    use_bias_correction_kl: bool = setting(False, "multiply the KL term by the ratio (DeepSeek-V3.2), as TRL does")
    off_policy_mask_threshold: float | None = setting(
        None,
        "leave out completions with a negative advantage whose log-probability fell by more per token (default: none)",
    )
    top_entropy_quantile: float = setting(1.0, "share of tokens to learn from, the most uncertain ones")
    entropy_coef: float = setting(0.0, "bonus for the mean entropy of the tokens")
    sync_ref_model: bool = setting(False, "let the reference follow the policy (TR-DPO)")
    ref_model_mixup_alpha: float = setting(0.6, "weight of the policy in the new reference, from 0 to 1")
    ref_model_sync_steps: int = setting(512, "steps between two updates of the reference")
    scale_rewards: str = setting("group", "what centered rewards are divided by")
    advantage_estimator: str = setting("group", "group mean, leave-one-out (rloo), or the reward itself")
    reward_weights: tuple[float, ...] | None = setting(None, "one weight per reward (default: 1 each)")
    multi_objective_aggregation: str = setting(
        "sum_then_normalize", "several rewards: add them and then scale, or scale each and then add"
    )
    mask_truncated_completions: bool = setting(False, "learn nothing from completions that were cut off (DAPO)")
    shuffle_dataset: bool = setting(True, "use the problems in random order")
    seed: int = setting(0, "random seed of the problems' order and of every sampled token")
    optim: str = setting("adamw_torch", "AdamW, or Adafactor with almost no memory")
    optimizer_in_backward: bool = setting(False, "update each weight as soon as its gradient is known, to save memory")
    gradient_checkpointing: bool = setting(False, "keep only the layers' inputs: less memory, a third more time")
    cast_lm_head_to_fp32: bool = setting(False, "compute the logits of a bfloat16 model in float32")
    memory_budget_gib: float | None = setting(None, "most memory to use, in GiB (default: what is available)")
    rollout_quantization: str | None = setting(None, "sample from a quantized copy of the policy")
    rollout_lag: int = setting(0, "sample with weights that are so many steps old")
    importance_sampling_correction: bool = setting(True, "correct for the difference of sampler and policy")
    importance_sampling_mode: str = setting(
        "token_truncate", "one weight per token or per completion; large ones are truncated or left out (mask)"
    )
    importance_sampling_clip_max: float = setting(3.0, "largest weight of this correction")
    abort_grad_norm: float | None = setting(1000000.0, "longer gradients, and those that are not finite, stop the run")

    def __post_init__(self) -> None:
        self._check_types()
        check_numbers(**{name: getattr(self, name) for name in BOUNDS if name in _field_types()})
        divides = self.prompts_per_step % self.steps_per_generation == 0
        demand = f"must divide prompts_per_step = {self.prompts_per_step} (no group may be split)"
        self._require("steps_per_generation", divides, demand)
        divides = self.prompts_per_update % self.gradient_accumulation_steps == 0
        if self.steps_per_generation > 1:
            demand = f"must divide prompts_per_step / steps_per_generation = {self.prompts_per_update}"
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

    @property
    def saves_memory(self) -> bool:
        """Whether a setting trades time for memory; then no packed copy of the weights is made for sampling."""
        return bool(self.memory_budget_gib or self.gradient_checkpointing or self.optimizer_in_backward)

    @property
    def prompts_per_update(self) -> int:
        """Different problems per optimizer step: those of a batch, or of one of its `steps_per_generation` parts."""
        return self.prompts_per_step // self.steps_per_generation

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps per rollout: μ passes over its parts."""
        return self.num_iterations * self.steps_per_generation

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
        if self.rollout_lag and self.rollout_lag >= self.max_steps:
            raise ValueError(
                f"rollout_lag must be smaller than max_steps = {self.max_steps}, got {self.rollout_lag}, because with "
                "a larger lag all samples come from the first weights. Lower rollout_lag."
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
