"""Say how a value that a student's function returned differs from the expected one."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

import torch
from torch import Tensor

SHOWN = 300  # characters of a value that a message holds


def difference(got: Any, expected: Any, tolerance: float = 1e-5) -> str | None:
    """What is wrong with `got`, in a few words, or None where it is as expected.

    Numbers and tensors may differ by `tolerance`, absolute and relative. A tensor of one number counts as a number, a
    list as a tuple. NaN equals NaN.

    >>> difference([1.0, 2.0], [1.0, 2.0]), difference(torch.ones(3), torch.ones(2))
    (None, 'the shape is (3,), not (2,)')
    >>> difference([0.5], [0.25])
    'in place [0], counted from 0: the value is another one'
    """
    if isinstance(expected, Tensor) and expected.ndim:
        return _tensor_difference(got, expected, tolerance)
    if isinstance(got, Tensor) and got.numel() == 1:
        got = got.item()
    if isinstance(expected, Tensor):
        expected = expected.item()
    if isinstance(expected, bool) or expected is None or isinstance(expected, str):
        same_kind = isinstance(got, type(expected)) or (isinstance(expected, bool) and _is_bool(got))
        if not same_kind:
            return f"it is {kind(got)}, not {kind(expected)}"
        return None if got == expected else "the value is another one"
    if isinstance(expected, Number):
        if isinstance(got, str) or not isinstance(got, Number) or _is_bool(got):
            return f"it is {kind(got)}, not a number"
        one, other = float(got), float(expected)  # type: ignore[arg-type]  # typeshed: not every Number has a float
        return None if close(one, other, tolerance) else "the value is another one"
    if isinstance(expected, Mapping):
        return _mapping_difference(got, expected, tolerance)
    if isinstance(expected, Sequence):
        return _sequence_difference(got, expected, tolerance)
    return None if got == expected else "the value is another one"


def close(one: float, other: float, tolerance: float) -> bool:
    """Equal within the tolerance, absolute or relative; NaN is close to NaN."""
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)


def kind(value: Any) -> str:
    """A value's type in a student's words.

    >>> kind(torch.ones(2)), kind(None), kind([1])
    ('a tensor', 'None', 'a list')
    """
    if value is None:
        return "None"
    names = {Tensor: "tensor", bool: "truth value", str: "text", int: "whole number", float: "number"}
    name = next((word for type_, word in names.items() if isinstance(value, type_)), type(value).__name__)
    return f"a{'n' if name[:1] in tuple('aeiou') else ''} {name}"


def shown(value: Any, digits: int = 6) -> str:
    """A value in a message, cut where it is long; a function by its name, and 0 without a sign.

    digits: of a number that stands alone.

    >>> shown(torch.tensor([1.0, 2.0])), shown(0.1 + 0.2), shown([-0.0, 0.5]), shown("".join), shown(math.prod)
    ('tensor([1., 2.])', '0.3', '[0.0, 0.5]', "''.join", 'prod')
    """
    text = f"{value + 0.0:.{digits}g}" if isinstance(value, float) else _text(value)
    return text if len(text) <= SHOWN else text[:SHOWN] + " …"


def _text(value: Any) -> str:
    """`repr` for a student, in lists and tuples too."""
    if isinstance(value, float):
        return repr(value + 0.0)  # -0.0 + 0.0 is 0.0
    if type(value) is list:
        return f"[{', '.join(map(_text, value))}]"
    if type(value) is tuple:
        return f"({', '.join(map(_text, value))}{',' * (len(value) == 1)})"
    if inspect.isroutine(value):
        owner = getattr(value, "__self__", None)
        bound = owner is not None and not inspect.ismodule(owner)
        return f"{_text(owner)}.{value.__name__}" if bound else value.__name__
    return repr(value)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool) or type(value).__name__ in ("bool_", "bool")


def _tensor_difference(got: Any, expected: Tensor, tolerance: float) -> str | None:
    if not isinstance(got, Tensor):
        return f"it is {kind(got)}, not a tensor"
    if got.shape != expected.shape:
        return f"the shape is {tuple(got.shape)}, not {tuple(expected.shape)}"
    kinds = [_number_kind(tensor) for tensor in (got, expected)]
    if kinds[0] != kinds[1]:
        return f"it holds {kinds[0]} ({got.dtype}), not {kinds[1]}"
    same = torch.isclose(got.double(), expected.double(), rtol=tolerance, atol=tolerance, equal_nan=True)
    if bool(same.all()):
        return None
    return f"{int((~same).sum())} of {same.numel()} values differ"


def _number_kind(tensor: Tensor) -> str:
    if tensor.dtype == torch.bool:
        return "truth values"
    return "floating-point numbers" if tensor.is_floating_point() else "whole numbers"


def _sequence_difference(got: Any, expected: Sequence, tolerance: float) -> str | None:
    if isinstance(got, Tensor):
        got = got.tolist()
    if isinstance(got, str) or not isinstance(got, Sequence):
        return f"it is {kind(got)}, not {kind(list(expected))}"
    if len(got) != len(expected):
        return f"it has {len(got)} {'entry' if len(got) == 1 else 'entries'}, not {len(expected)}"
    for place, (one, other) in enumerate(zip(got, expected, strict=True)):
        found = difference(one, other, tolerance)
        if found:
            return _inside(place, found)
    return None


def _mapping_difference(got: Any, expected: Mapping, tolerance: float) -> str | None:
    if not isinstance(got, Mapping):
        return f"it is {kind(got)}, not a dict"
    if set(got) != set(expected):
        return f"its keys are {sorted(map(str, got))}, not {sorted(map(str, expected))}"
    for name, value in expected.items():
        found = difference(got[name], value, tolerance)
        if found:
            return f"under {name!r}: {found}"
    return None


def _inside(place: int, found: str) -> str:
    """What was found wrong in one place of a list, and where, as Python would be asked for it: `[1][0]`."""
    if found.startswith("in place ["):
        return f"in place [{place}]{found.removeprefix('in place ')}"
    return f"in place [{place}], counted from 0: {found}"
