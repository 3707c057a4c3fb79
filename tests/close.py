"""Compare numbers that were computed with numbers that are stored, or that were computed in another way.

The last digits of a floating-point number differ between processors, libraries and versions of Python: they add in
another order. So no test compares such numbers by equality. A number or a flat list may also use `pytest.approx`, and
two tensors `torch.testing.assert_close`. Exact equality is for a computation that is compared with itself, on the same
computer: a run that resumes, two draws with one seed, a tensor that was saved and loaded.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from numbers import Integral, Real


def assert_close(computed, expected, rtol=1e-6, atol=1e-12):
    """Fail if two values differ by more than rounding, and name the first place where they do.

    Floating-point numbers are close if they differ by at most `atol`, or by `rtol` of the larger one; NaN is close to
    NaN. They may be in dicts, lists, tuples, dataclasses, tensors and arrays, at any depth. Everything else, also whole
    numbers, texts, lengths and keys, has to be equal. A tuple is like a list and the key 1 like the key "1", because
    JSON does not tell them apart.

    >>> assert_close({"k": 3, "interval": (0.1 + 0.2, math.nan)}, {"k": 3, "interval": [0.3, math.nan]})
    >>> assert_close({"k": 3, "interval": (0.1, 0.2)}, {"k": 3, "interval": [0.1, 0.3]})
    Traceback (most recent call last):
    AssertionError: ['interval'][1]: 0.2 is not close to 0.3
    """
    if difference := find_difference(computed, expected, rtol, atol):
        raise AssertionError(difference)


def find_difference(computed, expected, rtol, atol, path=""):
    """Return the first difference in words, or None."""
    one, other = to_plain(computed), to_plain(expected)
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return f"{path or 'the whole'}: the keys {list(one)} are not {list(other)}"
        places = other.keys()
    elif is_list(one) and is_list(other):
        if len(one) != len(other):
            return f"{path or 'the whole'}: {len(one)} entries, not {len(other)}"
        places = range(len(other))
    elif is_number(one) and is_number(other) and not (isinstance(one, Integral) and isinstance(other, Integral)):
        both_nan = math.isnan(one) and math.isnan(other)
        if both_nan or math.isclose(one, other, rel_tol=rtol, abs_tol=atol):
            return None
        return f"{path or 'the whole'}: {one!r} is not close to {other!r}"
    else:
        return None if one == other else f"{path or 'the whole'}: {one!r} is not {other!r}"
    differences = (find_difference(one[place], other[place], rtol, atol, f"{path}[{place!r}]") for place in places)
    return next(filter(None, differences), None)


def to_plain(value):
    """Return a dataclass or a mapping as a dict with texts as keys, and a tensor or an array as lists."""
    if is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        return {str(key): part for key, part in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def is_list(value):
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def is_number(value):
    return isinstance(value, Real) and not isinstance(value, bool)
