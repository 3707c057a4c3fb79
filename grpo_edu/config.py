"""The settings of a training run: immutable, checked when they are created, and named as in TRL where TRL has them."""

from __future__ import annotations

import ast
import inspect
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from importlib.util import find_spec
from numbers import Integral, Real
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, TypeVar, get_args, get_type_hints, overload

Class = TypeVar("Class")

# ---- what a setting may be: it is written at the field, and is checked once, when the settings are made ----


@dataclass(frozen=True)
class Interval:
    """The numbers of one kind between two ends.

    kind: int, or float, which includes whole numbers. closed: which ends belong to it: "both", "left", "right" or
    "neither". demand: the requirement that a message names.

    >>> Interval(int, 1, math.inf, closed="left", demand="must be at least 1").check("trials", 0)
    Traceback (most recent call last):
    ...
    ValueError: trials must be at least 1, got 0
    """

    kind: type
    low: float
    high: float
    closed: str
    demand: str

    def __contains__(self, number: Any) -> bool:
        above = number >= self.low if self.closed in ("both", "left") else number > self.low
        below = number <= self.high if self.closed in ("both", "right") else number < self.high
        return above and below

    def check(self, name: str, value: Any) -> None:
        """Raise ValueError with the name, what is demanded and the value, unless it is a number of the interval.

        A tensor or an array of one element counts as a number; a bool does not.
        """
        number = value.item() if getattr(value, "shape", None) == () else value
        if isinstance(number, bool) or not isinstance(number, Integral if self.kind is int else Real):
            raise ValueError(f"{name} must be a {'whole ' * (self.kind is int)}number, got {value!r}")
        require(name, value, number in self, self.demand)


class Options(Sequence[str]):
    """The names that a setting may have. table: a table "module:NAME" that has them, read at each use.

    Those tables are in modules that import torch. The command line starts without it, so the names of a module that is
    not loaded are read in its source.

    >>> "dapo" in Options(table="grpo_edu.losses:LOSSES"), list(Options("sum", "mean"))
    (True, ['sum', 'mean'])
    """

    def __init__(self, *names: str, table: str = "") -> None:
        self._names, self._table = names, table

    def _all(self) -> tuple[str, ...]:
        if not self._table:
            return self._names
        module, _, name = self._table.partition(":")
        return tuple(getattr(sys.modules[module], name)) if module in sys.modules else names_in_source(module, name)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        return self._all()[index]

    def __len__(self) -> int:
        return len(self._all())

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def check(self, name: str, value: Any) -> None:
        """Raise ValueError with the name, the names that there are and the value, unless it is one of them."""
        if value not in self:
            raise ValueError(f"{name} must be one of {', '.join(self)}; got {value!r}")


@cache
def names_in_source(module: str, table: str) -> tuple[str, ...]:
    """Return the keys of a dictionary, or the entries of a tuple, that a module assigns, without importing it.

    >>> names_in_source("grpo_edu.losses", "IMPORTANCE_SAMPLING_LEVELS")
    ('token', 'sequence')
    """
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None
    for node in ast.parse(Path(spec.origin).read_bytes()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == table:
            entries = node.value.keys if isinstance(node.value, ast.Dict) else getattr(node.value, "elts", [])
            return tuple(ast.literal_eval(entry) for entry in entries if entry is not None)
    raise LookupError(f"{module} assigns no table {table}")


USUAL_CAP = 5.0  # `epsilon_high` of a loss whose weight is capped ("cispo"), as in ScaleRL and TRL
LOSS_TYPES = Options(table="grpo_edu.losses:LOSSES")
IMPORTANCE_SAMPLING_LEVELS = Options(table="grpo_edu.losses:IMPORTANCE_SAMPLING_LEVELS")
SCALE_REWARDS = Options(table="grpo_edu.advantages:SCALE_REWARDS")
ADVANTAGE_ESTIMATORS = Options(table="grpo_edu.advantages:ESTIMATORS")
SCHEDULES = ("constant", "constant_with_warmup", "linear", "cosine")
OPTIMIZERS = ("adamw_torch", "adafactor")
DEVICES = ("auto", "cpu", "cuda", "mps")
DTYPE_CHOICES = ("float32", "bfloat16", "auto")
QUANTIZATION_SCHEMES = ("bf16", "int8-dynamic", "int8-weight", "int4-group")
ROLLOUT_SCHEMES = (*QUANTIZATION_SCHEMES, "int4-tensor")  # the last is the bad example

_SEEDS = "must fit into 64 bits, from -2**63 to 2**64 - 1"
_DECAYS = "must be between 0 (forget the old tasks) and 1 (keep them whole)"
COUNT = Interval(int, 1, math.inf, closed="left", demand="must be at least 1")
POSITIVE = Interval(float, 0, math.inf, closed="neither", demand="must be a positive number")
NOT_NEGATIVE = Interval(float, 0, math.inf, closed="left", demand="must be 0 or a positive number")
SEEDS = Interval(int, -(2**63), 2**64 - 1, closed="both", demand=_SEEDS)
_SHARE = Interval(float, 0, 1, closed="left", demand="must be at least 0 and below 1")
_INSIDE = Interval(float, 0, 1, closed="neither", demand="must lie strictly between 0 and 1")

# What the numbers may be that functions of statistics and of continual learning take, by the names of the arguments.
ARGUMENTS = {
    **dict.fromkeys(("batch_size", "chunk_size", "num_examples", "num_resamples", "trials"), COUNT),
    **dict.fromkeys(("ewc_lambda", "strength"), NOT_NEGATIVE),
    **dict.fromkeys(("tail", "share"), _SHARE),
    **dict.fromkeys(("confidence", "power", "alpha"), _INSIDE),
    "seed": SEEDS,
    "decay": Interval(float, 0, 1, closed="both", demand=_DECAYS),
}

# The types of the settings below.
_COMPARED = "must be at least 2 (each completion is compared with its group)"
GroupSize = Annotated[int, Interval(int, 2, math.inf, closed="left", demand=_COMPARED)]
Count = Annotated[int, COUNT]
NoneOrCount = Annotated[int, Interval(int, 0, math.inf, closed="left", demand="must be 0 (none) or a positive number")]
WholeNumber = Annotated[int, Interval(int, 0, math.inf, closed="left", demand="must not be negative")]
TopK = Annotated[int, Interval(int, 0, math.inf, closed="left", demand="must be 0 (off) or greater")]
TopP = Annotated[float, Interval(float, 0, 1, closed="right", demand="must be greater than 0 and at most 1 (off)")]
Positive = Annotated[float, POSITIVE]
NotNegative = Annotated[float, NOT_NEGATIVE]
ClipBound = Annotated[float, Interval(float, 0, math.inf, closed="both", demand="must not be negative")]
Limit = Annotated[float, Interval(float, 0, math.inf, closed="right", demand="must be positive")]
Seed = Annotated[int, SEEDS]
LossType = Annotated[str, LOSS_TYPES]
Level = Annotated[str, IMPORTANCE_SAMPLING_LEVELS]
Scaling = Annotated[str, SCALE_REWARDS]
Estimator = Annotated[str, ADVANTAGE_ESTIMATORS]
Schedule = Annotated[str, Options(*SCHEDULES)]
Optimizer = Annotated[str, Options(*OPTIMIZERS)]
Scheme = Annotated[str, Options(*ROLLOUT_SCHEMES)]
Dtype = Annotated[str, Options(*DTYPE_CHOICES)]
Device = Annotated[str, Options(*DEVICES)]


def check_numbers(**numbers: Any) -> None:
    """Raise ValueError for the first argument that is not in its interval of `ARGUMENTS`.

    >>> check_numbers(confidence=1.0)
    Traceback (most recent call last):
    ...
    ValueError: confidence must lie strictly between 0 and 1, got 1.0
    """
    for name, value in numbers.items():
        ARGUMENTS[name].check(name, value)


def require(name: str, value: Any, holds: bool, demand: str) -> None:
    """Raise ValueError with the name, what is demanded and the value, unless it holds."""
    if not holds:
        raise ValueError(f"{name} {demand}, got {value!r}")


# ---- a text on each setting: it is written at the field as well, and the docstring and the command line show it ----


def setting(default: Any, text: str) -> Any:
    """Return a field of a dataclass with its default and what a reader is told about it."""
    return field(default=default, metadata={"help": text})


def field_help(options: Any) -> dict[str, str]:
    """Return the text on each field of a dataclass.

    >>> field_help(GRPOConfig)["num_iterations"]
    'μ, updates per batch; clipping needs at least 2'
    """
    return {one.name: one.metadata.get("help", "") for one in fields(options)}


def append_field_docs(options: type[Class]) -> type[Class]:
    """Add the texts on the fields to the docstring of a dataclass."""
    texts = [f"{name}: {text}." for name, text in field_help(options).items() if text]
    options.__doc__ = inspect.cleandoc(options.__doc__ or "") + "\n\n" + "\n".join(texts)
    return options


@cache
def field_types(options: type) -> dict[str, tuple[Any, bool]]:
    """Return the type of each field of a dataclass, without bounds and None, and whether it may be None.

    >>> field_types(GRPOConfig)["epsilon_high"]
    (<class 'float'>, True)
    """
    hints = get_type_hints(options)
    optional = {name: NoneType in get_args(hint) for name, hint in hints.items()}
    return {name: (get_args(hint)[0] if optional[name] else hint, optional[name]) for name, hint in hints.items()}


@cache
def field_bounds(options: type) -> dict[str, Interval | Options]:
    """Return the `Interval` or the `Options` at each field that has one.

    >>> field_bounds(GRPOConfig)["top_k"].demand
    'must be 0 (off) or greater'
    """
    found: dict[str, Interval | Options] = {}
    for name, annotation in get_type_hints(options, include_extras=True).items():
        for part in (annotation, *get_args(annotation)):  # `Positive | None` has it in a part
            for bound in getattr(part, "__metadata__", ()):
                found[name] = bound
    return found


def check_fields(settings: Any) -> None:
    """Raise ValueError for the first field of a dataclass whose value its type or its bound does not allow.

    A default is allowed, and is not looked at. Fields of other types than bool, int, float and str check their own.
    """
    options: type = type(settings)
    types, bounds = field_types(options), field_bounds(options)
    for one in fields(settings):
        value, (kind, is_optional) = getattr(settings, one.name), types[one.name]
        is_default = value == one.default and type(value) is type(one.default)
        if is_default or (value is None and is_optional):
            continue
        if one.name in bounds:
            bounds[one.name].check(one.name, value)
        elif kind in _KINDS:
            allowed, demand = _KINDS[kind]
            fits = isinstance(value, allowed) and (kind is bool or not isinstance(value, bool))
            require(one.name, value, fits, demand)


_KINDS: dict[type, tuple[type, str]] = {
    bool: (bool, "must be true or false"),
    int: (Integral, "must be a whole number"),
    float: (Real, "must be a number"),
    str: (str, "must be text"),
}


@append_field_docs
@dataclass(frozen=True)
class GRPOConfig:
    """The settings of one GRPO run; `default_config` changes the defaults for smollm2 and gsm8k.

    A step samples B = N·G completions. What a setting does is explained where it is used: the sampling in
    `grpo_edu.rollout.generate`, the loss in `grpo_edu.losses.grpo_loss`, the advantages in
    `grpo_edu.advantages.group_advantages`, the optimizers in `grpo_edu.fast.optimizers`, and the quantized copy in
    `grpo_edu.quantization.rollouts`.

    Raises ValueError with the name of the field, its value and what to do.

    >>> GRPOConfig(num_generations=1)
    Traceback (most recent call last):
    ...
    ValueError: num_generations must be at least 2 (each completion is compared with its group), got 1
    """

    num_generations: GroupSize = setting(
        8, "G, completions per problem, at least 2, because each is compared with its group"
    )
    prompts_per_step: Count = setting(16, "N, different problems per step; with smollm2: 8")
    max_resamples: WholeNumber = setting(
        0, "how often per step other problems replace groups that tie (dynamic sampling)"
    )
    max_completion_length: Count = setting(96, "most tokens of a completion; gsm8k: 256, instructions: 48")
    max_steps: Count = setting(40, "training steps; each samples one batch and learns from it")
    learning_rate: Positive = setting(0.0001, "size of each update; smollm2 without LoRA: 1e-05")
    weight_decay: NotNegative = setting(0.0, "how strongly weights are pulled towards 0")
    max_grad_norm: NotNegative = setting(1.0, "longer gradients are scaled down; 0: never")
    lr_scheduler_type: Schedule = setting("constant", "how the learning rate changes over the steps")
    warmup_steps: WholeNumber = setting(0, "steps over which the learning rate rises from 0")
    num_iterations: Count = setting(1, "μ, updates per batch; clipping needs at least 2")
    gradient_accumulation_steps: Count = setting(1, "micro-batches per update; the result is the same")
    temperature: Positive = setting(1.0, "1: the policy itself; lower: more certain")
    top_p: TopP = setting(1.0, "sample only from the most likely tokens whose probabilities add up to this")
    top_k: TopK = setting(0, "sample only from the k most likely tokens; 0: all")
    loss_type: LossType = setting("grpo", "how ratios are clipped and tokens averaged")
    importance_sampling_level: Level = setting("token", "one ratio per token, or per completion (GSPO)")
    epsilon: NotNegative = setting(0.2, "lower clip bound, as a distance from ratio 1")
    epsilon_high: ClipBound | None = setting(None, "likewise above; cispo: largest ratio (default: epsilon)")
    beta: NotNegative = setting(0.0, "weight of the KL term; 0 needs no reference model")
    use_bias_correction_kl: bool = setting(False, "multiply the KL term by the ratio (DeepSeek-V3.2), as TRL does")
    entropy_coef: NotNegative = setting(0.0, "bonus for the mean entropy of the tokens")
    scale_rewards: Scaling = setting("group", "what centered rewards are divided by")
    advantage_estimator: Estimator = setting("group", "group mean, leave-one-out (rloo), or the reward itself")
    reward_weights: tuple[float, ...] | None = setting(None, "one weight per reward (default: 1 each)")
    mask_truncated_completions: bool = setting(False, "learn nothing from completions that were cut off (DAPO)")
    shuffle_dataset: bool = setting(True, "use the problems in random order")
    seed: Seed = setting(0, "random seed of the problems' order and of every sampled token")
    optim: Optimizer = setting("adamw_torch", "AdamW, or Adafactor with almost no memory")
    gradient_checkpointing: bool = setting(False, "keep only the layers' inputs: less memory, a third more time")
    memory_budget_gib: Positive | None = setting(None, "most memory to use, in GiB (default: what is available)")
    rollout_quantization: Scheme | None = setting(None, "sample from a quantized copy of the policy")
    rollout_lag: WholeNumber = setting(0, "sample with the weights of this many steps ago")
    importance_sampling_correction: bool = setting(True, "correct for the difference of sampler and policy")
    importance_sampling_clip_max: Limit = setting(3.0, "largest weight of a token in this correction")
    abort_grad_norm: Limit | None = setting(1000000.0, "longer gradients, and those that are not finite, stop the run")

    def __post_init__(self) -> None:
        check_fields(self)
        if self.reward_weights is not None:
            self._check_weights(self.reward_weights)
            object.__setattr__(self, "reward_weights", tuple(self.reward_weights))  # JSON has lists
        divides = self.prompts_per_step % self.gradient_accumulation_steps == 0
        demand = f"must divide prompts_per_step = {self.prompts_per_step} (no group may be split)"
        require("gradient_accumulation_steps", self.gradient_accumulation_steps, divides, demand)
        self._check_combinations()

    @property
    def batch_size(self) -> int:
        """B = N·G, completions per step."""
        return self.prompts_per_step * self.num_generations

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a JSON file."""
        return asdict(self)

    def _check_weights(self, weights: Any) -> None:
        """Raise ValueError unless the weights are finite numbers in a list or a tuple."""
        is_list = isinstance(weights, Iterable)
        require("reward_weights", weights, is_list, "must be a list of numbers, one per reward function")
        finite = all(isinstance(weight, Real) and math.isfinite(weight) for weight in weights)
        require("reward_weights", weights, finite, "must be finite numbers, one per reward function")

    def _check_combinations(self) -> None:
        """Raise ValueError for settings that are valid alone, but not together."""
        if self.loss_type != "grpo" or self.advantage_estimator != "group":
            self._check_loss_and_estimator()
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

    def _check_loss_and_estimator(self) -> None:
        """Raise ValueError for settings that the loss or the estimator does not go with; their tables import torch."""
        from grpo_edu.advantages import ESTIMATORS
        from grpo_edu.losses import LOSSES

        if LOSSES[self.loss_type].clips == "weight" and self.epsilon_high is None:
            raise ValueError(
                f"epsilon_high must be set with loss_type = {self.loss_type!r}, where it is the largest ratio itself; "
                "got None, which falls back to epsilon and scales every loss down to about a fifth. Set "
                f"epsilon_high={USUAL_CAP}, as ScaleRL and TRL do."
            )
        if self.scale_rewards in ("batch", "mean") and not ESTIMATORS[self.advantage_estimator].scales:
            raise ValueError(
                f"scale_rewards = {self.scale_rewards!r} has no effect with advantage_estimator = "
                f"{self.advantage_estimator!r}, which does not scale rewards. Set advantage_estimator='group', or "
                "leave scale_rewards out."
            )


# Settings of grpo_edu 0.3.0 that this version does not have, and the defaults that they had there.
RETIRED: dict[str, Any] = {
    "steps_per_generation": 1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "delta": None,
    "off_policy_mask_threshold": None,
    "top_entropy_quantile": 1.0,
    "sync_ref_model": False,
    "ref_model_mixup_alpha": 0.6,
    "ref_model_sync_steps": 512,
    "multi_objective_aggregation": "sum_then_normalize",
    "optimizer_in_backward": False,
    "cast_lm_head_to_fp32": False,
    "importance_sampling_mode": "token_truncate",
}
RETIRED_LOSSES = ("sapo", "luspo", "vespo")


def drop_retired(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a stored run without those that grpo_edu 0.3.0 had and this version does not have.

    Raises ValueError if one of them is not at its default, because the run cannot be repeated without it.

    >>> drop_retired({"beta": 0.1, "min_p": 0.0})
    {'beta': 0.1}
    >>> drop_retired({"beta": 0.1, "min_p": 0.2})
    Traceback (most recent call last):
    ...
    ValueError: the run was stored with min_p = 0.2, which only grpo_edu 0.3.0 can read; use it, or start a new run
    """
    found = {name: stored[name] for name in RETIRED if name in stored and stored[name] != RETIRED[name]}
    if stored.get("loss_type") in RETIRED_LOSSES and stored["loss_type"] not in LOSS_TYPES:
        found["loss_type"] = stored["loss_type"]
    for name, value in found.items():
        raise ValueError(
            f"the run was stored with {name} = {value!r}, which only grpo_edu 0.3.0 can read; use it, or start a "
            "new run"
        )
    return {name: value for name, value in stored.items() if name not in RETIRED}


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
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        GRPOConfig(**asdict(self))  # the same names under the same rules
