"""The result of calling a student's function, and how it differs from the expected one, in words."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Complex, Integral, Number, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

LINE = ", at `"  # what comes between the message of an error and the line of code that raised it
OTHER = "it is not the expected value"
PLAIN = (bool, int, float, str)  # what most entries of lists are, compared without further questions
SHOWN = 300  # characters of a value that a message holds
MOST_COMPARED = 20  # values of a tensor that are looked at for what is wrong with all of them


@dataclass(frozen=True)
class Outcome:
    """The result of a call. value: what it returned, unless there is a `problem`. changed: it modified its input."""

    value: Any = None
    problem: str = ""
    detail: str = ""
    changed: bool = False

    @property
    def message(self) -> str:
        """The error message, without the line of code."""
        return self.detail.partition(LINE)[0]

    def same_as(self, other: Outcome, tolerance: float) -> bool:
        """Return True if two calls had the same result."""
        if self.problem or other.problem:
            return self.problem == other.problem
        return self.changed == other.changed and not difference(self.value, other.value, tolerance)


def difference(got: Any, expected: Any, tolerance: float = 1e-5) -> str | None:
    """Return what is wrong with `got`, in a few words, or None if it is as expected.

    Numbers and tensors may differ by `tolerance`, absolute and relative. A tensor of one number counts as a number or
    as a list of one, a list as a tuple. NaN equals NaN. Any type is an answer, so an error while comparing is a
    difference as well.

    >>> difference([1.0, 2.0], [1.0, 2.0]), difference(torch.ones(3), torch.ones(2))
    (None, 'the shape is (3,), not (2,)')
    >>> difference([1.25], [0.25]), difference(torch.ones(2), torch.ones(2) / 3)
    ('entry [0], counted from 0: it is 5 times too large', '2 of 2 values differ: each is 3 times too large')
    """
    try:
        if type(got) is type(expected) and type(got) in PLAIN and got == expected:
            return None
        return _difference(got, expected, tolerance)
    except Exception as error:  # an object of a student's own may raise whatever it likes when it is compared
        return f"it cannot be compared with {kind(expected)} ({type(error).__name__}: {error})"


def _difference(got: Any, expected: Any, tolerance: float) -> str | None:
    if isinstance(got, Tensor) and (without_values := _without_values(got)):
        return without_values
    if isinstance(expected, Tensor) and expected.ndim:
        return _tensor_difference(got, expected, tolerance)
    if isinstance(got, Tensor) and got.numel() == 1 and not isinstance(expected, Sequence):
        got = got.item()
    if isinstance(expected, Tensor):
        expected = expected.item()
    if isinstance(expected, bool) or expected is None or isinstance(expected, str):
        same_kind = isinstance(got, type(expected)) or (isinstance(expected, bool) and _is_bool(got))
        if not same_kind:
            return f"it is {kind(got)}, not {kind(expected)}"
        if got == expected:
            return None
        return f"it is {bool(got)}, not {expected}" if isinstance(expected, bool) else OTHER
    if isinstance(expected, Number):
        if isinstance(got, str) or not isinstance(got, Number) or _is_bool(got):
            return f"it is {kind(got)}, not a number"
        if isinstance(got, Complex) and not isinstance(got, Real):
            return "it is a complex number, not a real one"
        one, other = float(got), float(expected)  # type: ignore[arg-type]  # typeshed: not every Number has a float
        return (
            None if close(one, other, tolerance) else describe_difference(one, other, counted=isinstance(got, Integral))
        )
    if isinstance(expected, Mapping):
        return _mapping_difference(got, expected, tolerance)
    if isinstance(expected, Sequence):
        return _sequence_difference(got, expected, tolerance)
    return None if got == expected else OTHER


def close(one: float, other: float, tolerance: float) -> bool:
    """Equal within the tolerance, absolute or relative; NaN is close to NaN."""
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)


def describe_difference(one: float, other: float, *, counted: bool = False, roughly: bool = False) -> str:
    """Describe how a number differs from the expected one.

    counted: they are whole numbers. roughly: leave the distance out, unless it is a factor of ten or more.

    >>> [describe_difference(one, other) for one, other in [(math.nan, 2.0), (-3.0, 3.0), (0.5, 2.0), (2.5, 2.0)]]
    ['it is NaN', 'it has the opposite sign', 'it is 4 times too small', 'it is 0.5 too high']
    >>> [describe_difference(one, 2.0, roughly=True) for one in (0.5, 2.5, 0.2)]
    ['it is too small', 'it is too high', 'it is 10 times too small']
    """
    if not math.isfinite(one):
        return "it is NaN" if math.isnan(one) else f"it is {'minus ' * (one < 0)}infinite"
    if not math.isfinite(other):
        return f"it is a finite number, not {other}"
    if math.isclose(one, -other, rel_tol=1e-2):  # a rounded answer as well
        return "it has the opposite sign"
    if one * other > 0 and not (counted and abs(other) < 10):  # a count of 2 in place of 1 is 1 too high
        for times, word in ((one / other, "large"), (other / one, "small")):
            if round(times) > 1 and math.isclose(times, round(times), rel_tol=1e-4):
                factor = "" if roughly and round(times) < 10 else f"{round(times)} times "
                return f"it is {factor}too {word}"
    distance = "" if roughly else f"{shown(abs(one - other), 3)} "
    return f"it is {distance}too {'high' if one > other else 'low'}"


def kind(value: Any) -> str:
    """Return a value's type in a student's words.

    >>> kind(torch.ones(2)), kind(None), kind([1])
    ('a tensor', 'None', 'a list')
    """
    if value is None:
        return "None"
    names = {
        Tensor: "tensor",
        np.ndarray: "numpy array",
        bool: "Boolean",
        str: "string",
        int: "integer",
        float: "number",
    }
    name = next((word for type_, word in names.items() if isinstance(value, type_)), type(value).__name__)
    return f"a{'n' if name[:1] in tuple('aeiou') else ''} {name}"


def shown(value: Any, digits: int = 6) -> str:
    """Return a value in a message, cut if it is long; a function by its name, and 0 without a sign.

    digits: digits of a single number; those of a tensor have at most 7.

    >>> shown(torch.tensor([1.0, 2e-5])), shown(0.1 + 0.2), shown([-0.0, 0.5]), shown("".join), shown(math.prod)
    ('tensor([1.0, 2e-05])', '0.3', '[0.0, 0.5]', "''.join", 'prod')
    """
    try:
        if isinstance(value, Tensor) and not _without_values(value) and not value.is_complex():
            return _tensor_text(value, min(digits, 7))
        text = f"{value + 0.0:.{digits}g}" if isinstance(value, float) else _text(value)
    except Exception as error:  # the __repr__ of a student's own class
        text = f"{kind(value)} that cannot be shown ({type(error).__name__})"
    return text if len(text) <= SHOWN else text[:SHOWN] + " …"


def shown_apart(one: Any, other: Any) -> tuple[str, str]:
    """Two values, those of tensors rounded to four digits, or to as many as tell the two apart.

    >>> shown_apart(torch.tensor([2 / 3]), torch.tensor([1 / 3])), shown_apart(2 / 3, 0.66667)
    (('tensor([0.6667])', 'tensor([0.3333])'), ('0.666667', '0.66667'))
    """
    texts = [(shown(one, digits), shown(other, digits)) for digits in (4, 5, 6, 7)]
    if not isinstance(other, Tensor):
        return texts[2]
    return next((pair for pair in texts if pair[0] != pair[1]), texts[0])


def _tensor_text(tensor: Tensor, digits: int) -> str:
    """Return each row in a line of its own, integers and booleans as they are; an ellipsis for what is left out."""

    def text(part: Tensor, depth: int) -> str:
        if not part.ndim:
            number = part.item()
            if not part.is_floating_point():
                return str(number)
            whole = len(f"{abs(number):.0f}") if math.isfinite(number) else 0
            return repr(float(f"{number + 0.0:.{max(digits, min(whole, 7))}g}"))
        pieces, length = [], 0
        for place in range(len(part)):
            piece = text(part[place], depth + 1)
            length += len(piece) + 2
            if place and length > SHOWN:
                pieces.append("…")
                break
            pieces.append(piece)
        return f"[{(', ' if part.ndim == 1 else ',' + chr(10) + ' ' * depth).join(pieces)}]"

    usual = tensor.dtype in (torch.float32, torch.int64, torch.bool)
    return f"tensor({text(tensor.detach(), 8)}{'' if usual else f', dtype={tensor.dtype}'})"


def _text(value: Any) -> str:
    """`repr` for a student, in lists and tuples too."""
    if isinstance(value, float):
        return repr(value + 0.0)  # -0.0 + 0.0 is 0.0
    if type(value) is list:
        return f"[{_entries(value)}]"
    if type(value) is tuple:
        return f"({_entries(value)}{',' * (len(value) == 1)})"
    if type(value) is dict:
        return f"{{{_entries(value.items(), lambda pair: f'{_text(pair[0])}: {_text(pair[1])}')}}}"
    if type(value) is str:
        return repr(value[: SHOWN + 1])
    if inspect.isroutine(value):
        owner = getattr(value, "__self__", None)
        bound = owner is not None and not inspect.ismodule(owner)
        return f"{_text(owner)}.{value.__name__}" if bound else value.__name__
    return repr(value)


def _entries(values: Iterable[Any], text: Callable[[Any], str] = _text) -> str:
    """As many entries as a message shows; there may be millions."""
    pieces, length = [], 0
    for value in values:
        pieces.append(text(value))
        length += len(pieces[-1])
        if length > SHOWN:
            break
    return ", ".join(pieces)


def _without_values(tensor: Tensor) -> str | None:
    """Return why the numbers of a tensor cannot be read one by one, or None."""
    if tensor.is_meta:
        return "it is a tensor on the device `meta`, which has a shape but no values"
    if tensor.layout != torch.strided:
        return "it is a sparse tensor; `.to_dense()` converts it to an ordinary one"
    return None


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool) or type(value).__name__ in ("bool_", "bool")


def _tensor_difference(got: Any, expected: Tensor, tolerance: float) -> str | None:
    if not isinstance(got, Tensor):
        return f"it is {kind(got)}, not a tensor"
    if got.shape != expected.shape:
        return f"the shape is {tuple(got.shape)}, not {tuple(expected.shape)}"
    kinds = [number_kind(tensor) for tensor in (got, expected)]
    if kinds[0] != kinds[1] and got.numel():  # torch.tensor([]) is of floating-point numbers, and holds none
        return f"it holds {kinds[0]} ({got.dtype}), not {kinds[1]}"
    if torch.equal(got, expected):
        return None
    one, other = got.detach().double(), expected.detach().double()
    wrong = ~torch.isclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)
    if not bool(wrong.any()):
        return None
    text = f"{int(wrong.sum())} of {wrong.numel()} values differ"
    if expected.dtype == torch.bool:
        place = tuple(wrong.nonzero()[0].tolist())
        return f"{text}: entry {[*place]}, counted from 0, is {got[place].item()}, not {expected[place].item()}"
    pairs = zip(one[wrong][:MOST_COMPARED].tolist(), other[wrong][:MOST_COMPARED].tolist(), strict=True)
    ways = {describe_difference(*pair, counted=not got.is_floating_point()) for pair in pairs}
    return f"{text}: {ways.pop().replace('it', 'each', 1)}" if len(ways) == 1 else text


def number_kind(tensor: Tensor) -> str:
    """Return what kind of numbers a tensor holds, in a student's words."""
    if tensor.is_complex():
        return "complex numbers"
    if tensor.dtype == torch.bool:
        return "Booleans"
    return "floating-point numbers" if tensor.is_floating_point() else "integers"


def _sequence_difference(got: Any, expected: Sequence, tolerance: float) -> str | None:
    if isinstance(got, str) or not isinstance(got, (Sequence, Tensor)) or (isinstance(got, Tensor) and not got.ndim):
        return f"it is {kind(got)}, not {kind(list(expected))}"
    if len(got) != len(expected):
        return f"it has {len(got)} {'entry' if len(got) == 1 else 'entries'}, not {len(expected)}"
    got = got.tolist() if isinstance(got, Tensor) else got
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
    """Return what was found wrong in one entry of a list, and where, as Python would be asked for it: `[1][0]`."""
    if found.startswith("entry ["):
        return f"entry [{place}]{found.removeprefix('entry ')}"
    return f"entry [{place}], counted from 0: {found}"
