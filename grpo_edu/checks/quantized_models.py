"""Exercises of notebook 07, second part: a layer in integers, and what a quantized model weighs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from grpo_edu.checks.core import Call, Exercise, Mistake, Part, call
from grpo_edu.checks.quantization import without_ties

# ---- int8_linear ----


def _codes(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(dim=1, keepdim=True) / 127
    return (x / scale).round(), scale


def int8_linear(x: Tensor, weight: Tensor) -> Tensor:
    """(B, N), x Wᵀ by whole numbers: a scale for each row of x and of W."""
    (qx, t), (qw, s) = _codes(x), _codes(weight)
    return t * (qx @ qw.T) * s.T


def _layer(rng: random.Random) -> Call:
    while True:
        x, weight = without_ties(rng, (2, 8), (127,)), without_ties(rng, (3, 8), (127,))
        x[1] = 100 * weight[rng.randrange(3)]  # tokens of unlike size; all terms of one sum have the same sign
        if _codes(x[1:])[0].square().sum() > 2**15:  # more than int16 holds
            return call(x, weight)


def _linear_by_int(x: Tensor, weight: Tensor) -> Tensor:
    (qx, t), (qw, s) = _codes(x), _codes(weight)
    return (qx.int() @ qw.int().T) * (t @ s.T)


def _linear_by_loop(x: Tensor, weight: Tensor) -> Tensor:
    out = []
    for token in x.tolist():
        t = max(map(abs, token)) / 127
        row = []
        for channel in weight.tolist():
            s = max(map(abs, channel)) / 127
            row.append(t * s * sum(round(a / t) * round(b / s) for a, b in zip(token, channel, strict=True)))
        out.append(row)
    return torch.tensor(out)


def _linear_by_numpy(x: Tensor, weight: Tensor) -> Tensor:
    codes, scales = [], []
    for part in (x.numpy(), weight.numpy()):
        scales.append(np.abs(part).max(axis=1) / 127)
        codes.append(np.rint(part / scales[-1][:, None]).astype(np.int32))
    return torch.tensor(np.multiply.outer(*scales) * np.einsum("bk,nk->bn", *codes)).float()


def _one_scale_for_x(x: Tensor, weight: Tensor) -> Tensor:
    (qw, s), t = _codes(weight), x.abs().max() / 127
    return t * ((x / t).round() @ qw.T) * s.T


def _one_scale_for_weight(x: Tensor, weight: Tensor) -> Tensor:
    (qx, t), s = _codes(x), weight.abs().max() / 127
    return t * (qx @ (weight / s).round().T) * s


def _wrapped_sums(dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    """A wrong answer that adds up in too small a type."""

    def wrong(x: Tensor, weight: Tensor) -> Tensor:
        (qx, t), (qw, s) = _codes(x), _codes(weight)
        return t * (qx.to(dtype) @ qw.to(dtype).T) * s.T

    return wrong


def _weight_alone(x: Tensor, weight: Tensor) -> Tensor:
    qw, s = _codes(weight)
    return (x @ qw.T) * s.T


def _without_scales(x: Tensor, weight: Tensor) -> Tensor:
    return _codes(x)[0] @ _codes(weight)[0].T


check_int8_linear = Exercise(
    "int8_linear",
    int8_linear,
    parts=(Part("two tokens, one a hundred times as large", 4, _layer),),
    mistakes=(
        Mistake("all tokens share a scale", "A large token takes the grid from a small one: amax over dim=1.",
                _one_scale_for_x),
        Mistake("all rows of the weight share a scale", "Each row, which makes one output, has its own.",
                _one_scale_for_weight),
        Mistake("the sums wrap around in 8 bits", "A product of two int8 numbers may be 16,129. Add up in int32, or in "
                "floating point.", _wrapped_sums(torch.int8)),
        Mistake("the sums wrap around in 16 bits", "One product has room, a sum of them has not: int16 ends at 32,767. "
                "int32, or floating point.", _wrapped_sums(torch.int16)),
        Mistake("x is not rounded", "Then it is no product of whole numbers. x has scales of its own.", _weight_alone),
        Mistake("the scales are missing in the end", "t · s brings the whole numbers back.", _without_scales),
        Mistake("nothing is rounded", "Both factors are whole numbers from −127 to 127.",
                lambda x, weight: x @ weight.T),
    ),
    right=(_linear_by_int, _linear_by_loop, _linear_by_numpy),
)  # fmt: skip


# ---- quantized_bytes ----

Shapes = Sequence[tuple[int, int]]


def quantized_bytes(vocab_size: int, hidden_size: int, layers: Shapes, form: str) -> int:
    """Bytes of a model with a shared table in "float32", or in int8 with the table "kept", "both" or "shared"."""
    table, inside = vocab_size * hidden_size, sum(rows * columns for rows, columns in layers)
    if form == "float32":
        return 4 * (table + inside)
    small_table = table + 4 * vocab_size
    small_inside = inside + 4 * sum(rows for rows, _ in layers)
    first = {"kept": 4 * table, "both": small_table, "shared": 0}[form]
    return first + small_inside + small_table


def _model(forms: Sequence[str]) -> Callable[[random.Random], Call]:
    def draw(rng: random.Random) -> Call:
        width = rng.choice([64, 128, 896])
        layers = [(width, width), (rng.choice([16, 32]), width), (4 * width, width), (width, 4 * width)]
        return call(rng.choice([1024, 32_000, 151_936]), width, layers * rng.randrange(1, 3), rng.choice(forms))

    return draw


def _bytes_by_tables(vocab_size: int, hidden_size: int, layers: Shapes, form: str) -> int:
    def small(shapes: Shapes) -> int:
        return sum(rows * (columns + 4) for rows, columns in shapes)

    table = (vocab_size, hidden_size)
    if form == "float32":
        return sum(4 * rows * columns for rows, columns in [table, *layers])
    if form == "kept":
        return 4 * math.prod(table) + small([table, *layers])
    return small([*layers, table] + [table] * (form == "both"))


def _bytes_by_tensors(vocab_size: int, hidden_size: int, layers: Shapes, form: str) -> int:
    def held(shape: tuple[int, int], dtype: torch.dtype) -> int:
        scales = 0 if dtype == torch.float32 else shape[0] * torch.float32.itemsize
        return torch.empty(shape, dtype=dtype, device="meta").nbytes + scales

    inner = torch.float32 if form == "float32" else torch.int8
    tables = {"float32": [inner], "kept": [torch.float32, inner], "both": [inner] * 2, "shared": [inner]}[form]
    table = vocab_size, hidden_size
    return sum(held(table, dtype) for dtype in tables) + sum(held(shape, inner) for shape in layers)


def _bytes_by_counts(vocab_size: int, hidden_size: int, layers: Shapes, form: str) -> float:
    full, eights = {"float32": (1, 0), "kept": (1, 1), "both": (0, 2), "shared": (0, 1)}[form]
    table = vocab_size * hidden_size
    total = 4.0 * full * table + eights * (table + 4 * vocab_size)
    for rows, columns in layers:
        total += rows * columns * 4 if form == "float32" else rows * columns + 4 * rows
    return total


def _no_scales(vocab_size: int, hidden_size: int, layers: Shapes, form: str) -> int:
    table, inside = vocab_size * hidden_size, sum(rows * columns for rows, columns in layers)
    return {"float32": 4 * (table + inside), "kept": 5 * table + inside, "both": 2 * table + inside,
            "shared": table + inside}[form]  # fmt: skip


def _in_form(forms: dict[str, str]) -> Callable[..., int]:
    """A wrong answer that takes one form for another."""

    def wrong(vocab_size: int, hidden_size: int, layers: Shapes, form: str) -> int:
        return quantized_bytes(vocab_size, hidden_size, layers, forms.get(form, form))

    return wrong


def _head_forgotten(vocab_size: int, hidden_size: int, layers: Shapes, form: str) -> int:
    found = quantized_bytes(vocab_size, hidden_size, layers, form)
    return found - vocab_size * (hidden_size + 4) if form == "kept" else found


def _two_float_tables(vocab_size: int, hidden_size: int, layers: Shapes, form: str) -> int:
    found = quantized_bytes(vocab_size, hidden_size, layers, form)
    return found + 4 * vocab_size * hidden_size if form == "float32" else found


def _scale_a_column(vocab_size: int, hidden_size: int, layers: Shapes, form: str) -> int:
    tables = {"float32": 0, "kept": 1, "both": 2, "shared": 1}[form]
    columns = sum(width for _, width in layers) if tables else 0
    return _no_scales(vocab_size, hidden_size, layers, form) + 4 * (columns + tables * hidden_size)


check_quantized_bytes = Exercise(
    "quantized_bytes",
    quantized_bytes,
    parts=(
        Part("in float32", 1, _model(["float32"])),
        Part("int8, the table of embeddings kept in float32", 2, _model(["kept"])),
        Part("int8, the table too, twice or shared", 1, _model(["both", "shared"]), draws=10),
    ),
    mistakes=(
        Mistake("everything is counted as a quarter", "The table that was kept has 4 bytes a weight, and the head is a "
                "second table.", _in_form({"kept": "shared", "both": "shared"})),
        Mistake("the table is not kept", "\"kept\" leaves it at 4 bytes a weight.", _in_form({"kept": "both"})),
        Mistake("the output layer is forgotten", "The head was the same table. It is a linear layer, so now it has an "
                "int8 copy of its own.", _head_forgotten),
        Mistake("the scales are forgotten", "Each row of an int8 matrix has a scale of 4 bytes.", _no_scales),
        Mistake("each column has a scale", "A row, which makes one output, has a scale.", _scale_a_column),
        Mistake("the shared table is counted twice in float32", "One table serves at both ends.", _two_float_tables),
    ),
    right=(_bytes_by_tables, _bytes_by_tensors, _bytes_by_counts),
)  # fmt: skip
