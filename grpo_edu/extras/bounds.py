"""What numbers may be, by the names of their arguments: one table for the settings and for all functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

# What a number must be, by its name: in the settings below, and in every function with an argument of this name.
_RULES: tuple[tuple[str, type, Callable[[Any], bool], str], ...] = (
    ("num_generations", int, lambda x: x >= 2, "must be at least 2 (each completion is compared with its group)"),
    (
        "prompts_per_step max_completion_length max_steps num_iterations "
        "gradient_accumulation_steps batch_size chunk_size num_examples num_resamples trials",
        int,
        lambda x: x >= 1,
        "must be at least 1",
    ),
    ("warmup_steps max_resamples rollout_lag", int, lambda x: x >= 0, "must not be negative"),
    ("top_k", int, lambda x: x >= 0, "must be 0 (off) or greater"),
    ("seed", int, lambda x: -(2**63) <= x < 2**64, "must fit into 64 bits, from -2**63 to 2**64 - 1"),
    ("learning_rate temperature memory_budget_gib", float, lambda x: 0 < x < math.inf, "must be a positive number"),
    (
        "weight_decay epsilon beta max_grad_norm entropy_coef eps num_items ewc_lambda strength",
        float,
        lambda x: 0 <= x < math.inf,
        "must be 0 or a positive number",
    ),
    ("epsilon_high", float, lambda x: x >= 0, "must not be negative"),
    ("importance_sampling_clip_max abort_grad_norm cap", float, lambda x: x > 0, "must be positive"),
    ("decay", float, lambda x: 0 <= x <= 1, "must be between 0 (forget the old tasks) and 1 (keep them whole)"),
    ("p", float, lambda x: 0 <= x <= 1, "must be a probability between 0 and 1"),
    ("tail share", float, lambda x: 0 <= x < 1, "must be at least 0 and below 1"),
    ("confidence power alpha", float, lambda x: 0 < x < 1, "must lie strictly between 0 and 1"),
    ("top_p", float, lambda x: 0 < x <= 1, "must be greater than 0 and at most 1 (off)"),
)
BOUNDS = {name: (kind, holds, demand) for names, kind, holds, demand in _RULES for name in names.split()}
_MAY_BE_NONE = ("epsilon_high", "memory_budget_gib", "abort_grad_norm", "num_items", "chunk_size")


def check_numbers(**numbers: Any) -> None:
    """Check numbers by the names of their arguments: the same name has the same bounds in `GRPOConfig` and elsewhere.

    Of a tuple, each entry is checked. A tensor of one element counts as a number.

    Raises ValueError with the name of the first that is not allowed, its value and what is.

    >>> check_numbers(epsilon=0.2, epsilon_high=None)
    >>> check_numbers(epsilon=float("nan"))
    Traceback (most recent call last):
    ...
    ValueError: epsilon must be 0 or a positive number, got nan
    """
    for name, value in numbers.items():
        kind, holds, demand = BOUNDS[name]
        if value is None and name in _MAY_BE_NONE:
            continue
        entries = [_plain(entry) for entry in (value if isinstance(value, tuple) else (value,))]
        if not all(isinstance(entry, Integral if kind is int else Real) for entry in entries):
            raise ValueError(f"{name} must be a {'whole ' * (kind is int)}number, got {value!r}")
        require(name, value, all(map(holds, entries)), demand)


def require(name: str, value: Any, holds: bool, demand: str) -> None:
    """Raise ValueError with the name, what is demanded and the value, unless it holds."""
    if not holds:
        raise ValueError(f"{name} {demand}, got {value!r}")


def _plain(value: Any) -> Any:
    """The number that a tensor or an array without dimensions holds; None for a truth value, which is no number."""
    value = value.item() if getattr(value, "shape", None) == () else value
    return None if isinstance(value, bool) else value
