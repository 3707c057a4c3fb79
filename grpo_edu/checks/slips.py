"""Slips that any exercise may see, recognized by results alone: the right values in a wrong form, a constant answer,
an error with a known cause. Nothing in here knows an exercise.
"""

from __future__ import annotations

import builtins
import dis
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_edu.checks.compare import Outcome, difference, number_kind

GRADIENT = "gradient for "  # how a result begins that `inputs.gradient_of` asked for
MOST_LOOKED_AT = 10_000  # numbers of one result; where there are more, nobody looks whether all are the same


@dataclass(frozen=True)
class Slip:
    """A mistake with its name and a hint. first: it says more than any other name could."""

    name: str
    hint: str
    first: bool = False


NOT_WRITTEN = Slip("not written yet", "Write the body of the function and remove `raise NotImplementedError`.", True)
NOTHING = Slip("nothing is returned", "Does every branch of the function end with a `return` and the result?")
STOPPED = Slip(
    "a loop never ends",
    "Look at the condition of the loop. Something in its body must make it false at some point.",
    True,
)
CUT_OFF = Slip(
    "the gradient is cut off",
    "Training needs the gradient of this result. `.item()`, `.tolist()`, `float()`, `.detach()`, `no_grad()`, numpy "
    "and `torch.tensor()` disconnect the result from the inputs. Compute with the tensors themselves.",
)
BROADCAST = Slip(
    "two tensors with different shapes are combined",
    "Print both shapes. Two matrices need the same shape. A tensor of shape (rows,) needs a second dimension, "
    "`x[:, None]`, before it can be combined with a matrix of shape (rows, columns).",
)
PRODUCT = Slip(
    "the shapes in a matrix product do not match",
    "Print both shapes. In `X @ Y`, X must have as many columns as Y has rows. Which of your matrices comes first?",
)
CHANGED = Slip("the input is changed in place", "Compute a new value and leave the argument unchanged.")
CONSTANT = Slip("every input gives the same result", "The result has to depend on the arguments of the function.")
ECHO = Slip("an argument is returned as it is", "Compute the result from the arguments.")


def fact(found: Sequence[Outcome], expected: Sequence[Outcome]) -> Slip | None:
    """Return the slip that these outcomes prove, or None."""
    problems = {one.problem for one in found}
    if "NotImplementedError" in problems:
        return NOT_WRITTEN
    if "KeyboardInterrupt" in problems:
        return STOPPED
    pairs = list(zip(found, expected, strict=True))
    if all(one.value is None and not one.problem for one in found) and expected[0].value is not None:
        return NOTHING
    if any("in-place operation" in one.detail for one in found):
        return CHANGED
    if any(_is_cut_off(one, other) for one, other in pairs):
        return CUT_OFF
    if any(one.problem == "RuntimeError" and "must match the size of tensor" in one.detail for one in found):
        return BROADCAST
    if any(one.problem == "RuntimeError" and "shapes cannot be multiplied" in one.detail for one in found):
        return PRODUCT
    if any(one.changed and not other.changed for one, other in pairs):
        return CHANGED
    return None


def _is_cut_off(found: Outcome, expected: Outcome) -> bool:
    """Return True if a gradient was requested, and the answer had none."""
    if not isinstance(expected.value, dict) or not all(str(name).startswith(GRADIENT) for name in expected.value):
        return False
    if found.problem:  # numpy refuses a tensor that has a gradient
        return "requires grad" in found.detail
    return isinstance(found.value, dict) and all(slope is None for slope in found.value.values())


# ---- the right values in a wrong form ----


def _as_tensor(*kinds: type) -> Callable[[Any, Any], Any]:
    def mend(got: Any, want: Any) -> Any:
        fits = isinstance(want, Tensor) and want.ndim > 0 and type(got) in kinds and len(got) == len(want)
        if fits:
            return _same_numbers(torch.as_tensor(np.asarray(got)), want.dtype)
        return None

    return mend


def _same_numbers(got: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return the numbers in another data type; None if it cannot hold all of them."""
    converted = got.to(dtype)
    return converted if torch.allclose(converted.to(got.dtype).double(), got.double(), equal_nan=True) else None


def _both_tensors(mend: Callable[[Tensor, Tensor], Any]) -> Callable[[Any, Any], Any]:
    return lambda got, want: mend(got, want) if isinstance(got, Tensor) and isinstance(want, Tensor) else None


def _replace_nan(got: Tensor, want: Tensor) -> Tensor | None:
    """Return the numbers with the wanted ones in place of NaN; None if no number is NaN, or every one."""
    missing = got.isnan()
    return torch.where(missing, want, got) if missing.any() and not missing.all() else None


def _each(kind: type, mend: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """Apply a change to every value of a kind, also within lists, tuples and dicts."""

    def within(got: Any, want: Any = None) -> Any:
        if isinstance(got, (list, tuple)) and len(got) <= MOST_LOOKED_AT:
            return [within(one) for one in got]
        if isinstance(got, dict):
            return {name: within(one) for name, one in got.items()}
        return mend(got) if isinstance(got, kind) else got

    return within


FORMS: tuple[tuple[Slip, Callable[[Any, Any], Any]], ...] = (
    (
        Slip("the values are right, but they are in a list", "`torch.tensor(...)` converts a list to a tensor."),
        _as_tensor(list, tuple),
    ),
    (
        Slip(
            "the values are right, but they are in a numpy array", "`torch.from_numpy(...)` makes a tensor of an array."
        ),
        _as_tensor(np.ndarray),
    ),
    (
        Slip(
            "the values are right, but they are in a numpy array", "`.tolist()` makes a list, or a number, of an array."
        ),
        _each(np.ndarray, np.ndarray.tolist),
    ),
    (
        Slip("the values are right, but they are Booleans", "`float(...)` makes 1.0 of `True` and 0.0 of `False`."),
        _each(bool, float),
    ),
    (
        Slip("the values are right, but the data type is not", "Print `result.dtype`. `.to(...)` changes the type."),
        _both_tensors(
            lambda got, want: _same_numbers(got, want.dtype) if number_kind(got) != number_kind(want) else None
        ),
    ),
    (
        Slip("some values are NaN, and the others are right", "0 / 0 gives NaN. For which input is a divisor 0?"),
        _both_tensors(_replace_nan),
    ),
    (
        Slip("the result is transposed", "Rows and columns are swapped. Which of them does the task put first?"),
        _both_tensors(lambda got, want: got.T if got.ndim == 2 and got.shape == want.shape[::-1] else None),
    ),
    (
        Slip("the values are right, but the shape is not", "Print `result.shape` and compare it with the task."),
        _both_tensors(lambda got, want: got.reshape(want.shape) if got.numel() == want.numel() else None),
    ),
    (
        Slip(
            "a row and a column were combined into a table",
            "Shapes (n,) and (n, 1) broadcast to (n, n), so every number is combined with every other. Both need the "
            "same shape.",
        ),
        _both_tensors(lambda got, want: got.diagonal() if got.shape == 2 * want.shape and want.ndim == 1 else None),
    ),
    (
        Slip("the two results are swapped", "Return them in the order in which the task names them."),
        lambda got, want: got[::-1] if isinstance(got, (tuple, list)) and len(got) == 2 else None,
    ),
)


def wrong_form(expected: Sequence[Outcome], found: Sequence[Outcome], tolerance: float) -> Slip | None:
    """Return the one change of form that makes all results right, if there is one and it is needed."""
    pairs = list(zip(found, expected, strict=True))
    if any(one.changed for one in found) and all(
        replace(one, changed=False).same_as(other, tolerance) for one, other in pairs
    ):
        return CHANGED
    if any(one.problem or other.problem or one.changed != other.changed for one, other in pairs):
        return None
    for slip, mend in FORMS:
        needed = False
        for one, other in pairs:
            if not one.same_as(other, tolerance):
                try:
                    mended = mend(one.value, other.value)
                except (RuntimeError, TypeError, ValueError):  # a ragged list, a tensor without values
                    break
                if mended is None or difference(mended, other.value, tolerance):
                    break
                needed = True
        else:
            if needed:
                return slip
    return None


def is_constant(found: Sequence[Outcome], expected: Sequence[Outcome]) -> bool:
    """Return True if one value is all that an answer ever returns, where several are right."""
    if len(found) < 2 or any(one.problem for one in found):
        return False
    if _is_empty(found) and not _is_empty(expected):
        return True
    theirs, right = ({value for one in outcomes for value in _values(one.value)} for outcomes in (found, expected))
    return len(theirs) == 1 and len(right) > 1


def _is_empty(outcomes: Sequence[Outcome]) -> bool:
    return all(isinstance(one.value, (list, tuple, dict)) and not one.value for one in outcomes)


def _values(value: Any) -> Iterator[Any]:
    """Yield each different number or text in a result, or a sign that there is too much to look at."""
    if isinstance(value, Tensor):
        plain = value.layout == torch.strided and not value.is_meta and value.numel() <= MOST_LOOKED_AT
        yield from value.flatten().tolist() if plain else [object()]
    elif isinstance(value, (list, tuple)):
        for one in value if len(value) <= MOST_LOOKED_AT else [object()]:
            yield from _values(one)
    else:
        yield value if isinstance(value, (bool, int, float, str, type(None))) else object()


def elsewhere(found: Sequence[Outcome], expected: Sequence[Outcome], variable: str) -> Slip | None:
    """Return the slip of an answer that is constant, or that reads a variable of the notebook."""
    if variable:
        return Slip(
            f"it reads `{variable}`, a variable of the notebook",
            "Is this intended? The variable may be left over from another cell. The arguments contain everything that "
            "the function needs.",
        )
    return CONSTANT if is_constant(found, expected) else None


def notebook_variable(function: Any) -> str:
    """Return the first outside variable with data that a function reads; names in capitals are constants."""
    code = getattr(function, "__code__", None)
    if code is None:
        return ""
    known = function.__globals__
    for name in _globals_of(code):
        value = known.get(name, getattr(builtins, name, None))
        if isinstance(value, (Tensor, np.ndarray, int, float, str, list, tuple, dict)) and not name.isupper():
            return name
    return ""


def _globals_of(code: types.CodeType) -> Iterator[str]:
    for one in dis.get_instructions(code):
        if one.opname == "LOAD_GLOBAL":
            yield one.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _globals_of(constant)
