"""What a student's function returned, as JSON: it crosses from an untrusted process to the one that judges.

Nothing of the student's is unpickled or called on the judging side: only None, numbers, texts, lists, tuples, dicts,
arrays and dense tensors are made again, so an object whose ``__eq__`` always agrees arrives as its type's name and its
repr.
"""

from __future__ import annotations

import base64
import math
import re
import reprlib
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

_DTYPES = {
    name: getattr(torch, name) for name in "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64".split()
}
MOST_NUMBERS = 2**18  # of one tensor
_MOST_SIZES = 8  # dimensions of one tensor
_MOST_ENTRIES, _MOST_KEYS, _DEEPEST, _LONGEST = 10_000, 1_000, 12, 20_000  # of a list, a dict, nesting, characters
_MOST_KINDS = 1_000  # classes of values that do not cross
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff]")
_CONTROL_BUT_LINES = re.compile(_CONTROL.pattern.replace("\x00-\x1f", "\x00-\x09\x0b-\x1f"))


def plain(text: str, most: int = 300, *, lines: bool = False) -> str:
    """Return a student's text for a table, a page or a terminal: cut, in one line (or `lines`), no control characters.

    >>> plain("a\\x1b[2Jb\\nc"), plain("x" * 9, 3), plain("\\ud800")
    ('a [2Jb c', 'xxx …', '?')
    """
    cut = text[:most].encode("utf-8", "replace").decode()
    clean = (_CONTROL_BUT_LINES if lines else _CONTROL).sub(" ", cut)
    return f"{clean} …" if len(text) > most else clean


class OpaqueValue:
    """A value of a kind that does not cross: it equals nothing and shows what it was."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


_KINDS: dict[str, type[OpaqueValue]] = {}


def encode(value: Any, depth: int = 0) -> Any:
    """Return a value as what `json.dumps` takes.

    >>> encode((1, [True, "a"]))
    {'tuple': [1, {'list': [True, 'a']}]}
    >>> encode({2.5})
    {'other': ['set', '{2.5}']}
    """
    if value is None or isinstance(value, bool):
        return value
    if type(value).__name__ in ("bool_", "bool"):  # numpy's
        return bool(value)
    if isinstance(value, Integral) and abs(int(value)) < 2**63:
        return int(value)
    if isinstance(value, Real) and not isinstance(value, Integral):
        return float(value)
    if isinstance(value, str) and len(value) <= _LONGEST:
        return str(value)
    if isinstance(value, Tensor) and value.layout == torch.strided and _is_small(value):
        return _encode_tensor(value)
    if isinstance(value, np.ndarray) and str(value.dtype) in _DTYPES:
        copy = torch.from_numpy(np.array(value, order="C"))
        return {"array": _encode_tensor(copy)["tensor"]} if _is_small(copy) else _other(value)
    if isinstance(value, Mapping | list | tuple) and len(value) <= _MOST_ENTRIES and depth < _DEEPEST:
        if isinstance(value, Mapping) and len(value) <= _MOST_KEYS:
            return {"dict": [[encode(key, depth + 1), encode(one, depth + 1)] for key, one in value.items()]}
        if not isinstance(value, Mapping):
            return {"tuple" if isinstance(value, tuple) else "list": [encode(one, depth + 1) for one in value]}
    return _other(value)


def _is_small(value: Tensor) -> bool:
    return value.numel() <= MOST_NUMBERS and value.ndim <= _MOST_SIZES and max(value.shape, default=0) <= MOST_NUMBERS


def _encode_tensor(value: Tensor) -> Any:
    name = str(value.dtype).removeprefix("torch.")
    if name not in _DTYPES or value.device.type != "cpu":
        return _other(value)
    numbers = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return {"tensor": [name, list(value.shape), base64.b64encode(numbers.numpy().tobytes()).decode()]}


def _other(value: Any) -> Any:
    return {"other": [type(value).__name__, reprlib.repr(value)[:300]]}  # which takes a __repr__ that raises


def decode(content: Any, depth: int = 0) -> Any:
    """Return the value that `encode` encoded.

    Raises:
        ValueError: this is nothing that `encode` writes.

    >>> decode(encode({"a": (1.5, torch.ones(2))}))
    {'a': (1.5, tensor([1., 1.]))}
    >>> decode({"other": ["set", "{2.5}"]}), decode({"other": ["set", "{2.5}"]}) == {2.5}
    ({2.5}, False)
    """
    if content is None or isinstance(content, bool | float):
        return content
    if isinstance(content, int) and abs(content) < 2**63:
        return content
    if isinstance(content, str) and len(content) <= _LONGEST:
        return content
    if not isinstance(content, dict) or len(content) != 1 or depth > _DEEPEST:
        raise ValueError("content: no value of a known kind")
    ((what, inside),) = content.items()
    if not isinstance(inside, list) or len(inside) > (_MOST_KEYS if what == "dict" else _MOST_ENTRIES):
        raise ValueError(f"content: {what[:40]!r} without a list, or with too long a one")
    if what in ("list", "tuple"):
        return (list if what == "list" else tuple)(decode(one, depth + 1) for one in inside)
    if what == "dict":
        return _decode_dict(inside, depth)
    if what == "tensor":
        return _decode_tensor(inside)
    if what == "array" and inside[:1] != ["bfloat16"]:
        return _decode_tensor(inside).numpy()
    if what == "other" and len(inside) == 2 and all(isinstance(one, str) for one in inside):
        return _kind_called(plain(inside[0], 40) or "object")(plain(inside[1]))
    raise ValueError(f"content: {what[:40]!r} is not a kind of value")


def _kind_called(name: str) -> type[OpaqueValue]:
    """Return a class of this name, or `object` after many: each takes 1 kB, and a student may name a million."""
    if name not in _KINDS:
        name = name if len(_KINDS) < _MOST_KINDS else "object"
        _KINDS.setdefault(name, type(name, (OpaqueValue,), {"__slots__": ()}))
    return _KINDS[name]


def _decode_dict(pairs: list, depth: int) -> dict:
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise ValueError("content: a dict is a list of pairs")
    try:
        return {decode(key, depth + 1): decode(value, depth + 1) for key, value in pairs}
    except TypeError as error:
        raise ValueError("content: a key that cannot be one") from error


def _decode_tensor(inside: list) -> Tensor:
    if len(inside) != 3 or not isinstance(inside[0], str) or inside[0] not in _DTYPES or not isinstance(inside[2], str):
        raise ValueError("content: a tensor is its dtype, its shape and its bytes")
    name, shape, text = inside
    if not isinstance(shape, list) or len(shape) > _MOST_SIZES:
        raise ValueError("content: a shape is a short list of sizes")
    if not all(type(size) is int and 0 <= size <= MOST_NUMBERS for size in shape):
        raise ValueError("content: a shape is a list of sizes")
    numbers = base64.b64decode(text, validate=True)  # binascii.Error is a ValueError
    dtype, count = _DTYPES[name], math.prod(shape)
    if math.prod(size or 1 for size in shape) > 2**40:
        raise ValueError("content: no tensor has this shape")
    if count > MOST_NUMBERS or len(numbers) != count * dtype.itemsize:
        raise ValueError("content: the bytes do not fill the shape")
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(numbers), dtype=dtype).reshape(shape)
