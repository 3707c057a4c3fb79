"""Exercises of notebook 07, first part: grids of integers, there and back."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from grpo_edu.checks.core import Call, Exercise, Mistake, Part, call
from grpo_edu.quantized_numbers import quantize

# ---- inputs ----


def without_ties(rng: random.Random, shape: tuple[int, int], tops: tuple[int, ...]) -> Tensor:
    """A matrix whose numbers do not fall halfway between places when a row's largest is brought to one of `tops`."""
    while True:
        rows = [[round(rng.gauss(0, 1), 3) for _ in range(shape[1])] for _ in range(shape[0])]
        x = torch.tensor(rows, dtype=torch.float64)
        largest = x.abs().amax(dim=1, keepdim=True)
        steps = [x / largest * top for top in tops]
        if largest.min() > 0 and all(((step % 1 - 0.5).abs() > 0.01).all() for step in steps):
            return x.float()


# ---- affine_grid ----


def affine_grid(x: Tensor, bits: int) -> tuple[float, int]:
    """Scale and zero point of the affine grid that just holds all numbers and 0: the package's."""
    grid = quantize(x, bits=bits, symmetric=False)
    return grid.scale.item(), int(grid.zero_point.item())


def _range(rng: random.Random, low: tuple[float, float], high: tuple[float, float]) -> Call:
    bits = rng.choice([3, 4, 8])
    while True:
        ends = round(rng.uniform(*low), 2), round(rng.uniform(*high), 2)
        inside = [round(rng.uniform(*ends), 2) for _ in range(4)]
        step = (max(ends[1], 0) - min(ends[0], 0)) / (2**bits - 1)
        if abs(-min(ends[0], 0) / step % 1 - 0.5) > 0.05:
            values = [*ends, *inside]
            rng.shuffle(values)
            return call(torch.tensor(values), bits)


def _both_sides(rng: random.Random) -> Call:
    return _range(rng, (-2.0, -0.3), (0.5, 4.0))


def _one_side(rng: random.Random) -> Call:
    return rng.choice([_range(rng, (0.5, 1.0), (2.0, 3.0)), _range(rng, (-3.0, -2.0), (-1.0, -0.5))])


def _grid_by_lists(x: Tensor, bits: int) -> tuple[float, int]:
    values = [0.0, *x.tolist()]
    scale = (max(values) - min(values)) / (2**bits - 1)
    return scale, round(-min(values) / scale)


def _grid_by_clamp(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    low, high = x.min().clamp(max=0), x.max().clamp(min=0)
    scale = (high - low) / (2**bits - 1)
    return scale, (-low / scale).round()


def _grid_by_numpy(x: Tensor, bits: int) -> tuple[float, int]:
    low, high = np.minimum(x.min().item(), 0.0), np.maximum(x.max().item(), 0.0)
    scale = np.ptp([low, high]) / (2**bits - 1)
    return float(scale), int(np.rint(-low / scale))


def _grid(x: Tensor, places: int, *, with_zero: bool = True, whole: bool = True, sign: int = -1) -> tuple[float, float]:
    values = x.tolist() + [0.0] * with_zero
    scale = (max(values) - min(values)) / places
    zero_point = sign * min(values) / scale
    return scale, round(zero_point) if whole else zero_point


check_affine_grid = Exercise(
    "affine_grid",
    affine_grid,
    parts=(
        Part("numbers on both sides of 0", 2, _both_sides, always=(call(torch.tensor([-1.0, 0.9]), 3),)),
        Part("numbers on one side of 0", 1, _one_side),
    ),
    mistakes=(
        Mistake("0 is not on the grid", "The grid must reach from the smallest number *or 0* to the largest *or 0*.",
                lambda x, bits: _grid(x, 2**bits - 1, with_zero=False)),
        Mistake("there is one step too many", "2^b places have 2^b − 1 steps between them.",
                lambda x, bits: _grid(x, 2**bits)),
        Mistake("the zero point is not whole", "It is a place of the grid: round it, or 0 falls between two places.",
                lambda x, bits: _grid(x, 2**bits - 1, whole=False)),
        Mistake("the zero point is cut off, not rounded", "`int(3.68)` is 3; the nearest place is 4.",
                lambda x, bits: (lambda grid: (grid[0], int(grid[1])))(_grid(x, 2**bits - 1, whole=False))),
        Mistake("the zero point has the wrong sign", "Places are counted from the smallest number up: how many steps "
                "above it is 0?", lambda x, bits: _grid(x, 2**bits - 1, sign=1)),
        Mistake("that is a symmetric grid", "An affine one reaches only as far as the numbers do.",
                lambda x, bits: (x.abs().max().item() / (2 ** (bits - 1) - 1), 0)),
    ),
    right=(_grid_by_lists, _grid_by_clamp, _grid_by_numpy),
)  # fmt: skip


# ---- dequantize ----


def dequantize(q: Tensor, scale: Tensor | float, zero_point: Tensor | int) -> Tensor:
    """scale · (q − zero_point), not computed in 8 bits."""
    return scale * (q.float() - zero_point)


def _codes(rng: random.Random, rows: int) -> Tensor:
    codes = torch.tensor([[rng.randrange(256) for _ in range(4)] for _ in range(rows)], dtype=torch.uint8)
    codes[:, rng.randrange(4)] = 0  # below every zero point
    return codes


def _one_grid(rng: random.Random) -> Call:
    return call(_codes(rng, 2), round(rng.uniform(0.01, 0.2), 3), rng.randrange(20, 200))


def _grid_a_row(rng: random.Random) -> Call:
    scale = torch.tensor([[round(rng.uniform(0.01, 0.2), 3)] for _ in range(3)])
    zero_point = torch.tensor([[rng.randrange(20, 200)] for _ in range(3)], dtype=torch.uint8)
    return call(_codes(rng, 3), scale, zero_point)


def _back_by_int(q: Tensor, scale: Tensor | float, zero_point: Tensor | int) -> Tensor:
    return (q.int() - zero_point) * scale


def _back_by_distribution(q: Tensor, scale: Tensor | float, zero_point: Tensor | int) -> Tensor:
    return scale * q - scale * zero_point


def _back_by_numpy(q: Tensor, scale: Tensor | float, zero_point: Tensor | int) -> Tensor:
    steps = q.numpy().astype(np.int64) - np.asarray(zero_point).astype(np.int64)
    return torch.tensor(steps * np.asarray(scale), dtype=torch.float32)


check_dequantize = Exercise(
    "dequantize",
    dequantize,
    parts=(
        Part("one grid for all", 1, _one_grid),
        Part("a grid for each row", 2, _grid_a_row),
    ),
    mistakes=(
        Mistake("the subtraction wraps around", "In uint8, 3 − 5 is 254. Make floating-point numbers of q first.",
                lambda q, scale, zero_point: scale * (q - zero_point)),
        Mistake("the zero point is subtracted after scaling", "It is a place of the grid, not a real number: brackets.",
                lambda q, scale, zero_point: scale * q.float() - zero_point),
        Mistake("the zero point is added", "The place of 0 is to become 0.",
                lambda q, scale, zero_point: scale * (q.float() + zero_point)),
        Mistake("the zero point plays no part", "Which place stands for 0?",
                lambda q, scale, zero_point: scale * q.float()),
        Mistake("it is divided by the scale", "That is the way there; back is a multiplication.",
                lambda q, scale, zero_point: (q.float() - zero_point) / scale),
    ),
    right=(_back_by_int, _back_by_distribution, _back_by_numpy),
)  # fmt: skip


# ---- quantize_rows ----


def quantize_rows(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """(N, K) whole numbers and (N, 1) scales of a symmetric grid for each row: the package's."""
    parts = quantize(weight, bits=bits, dim=0)
    return parts.q, parts.scale


def _weight(bits: int) -> Callable[[random.Random], Call]:
    def draw(rng: random.Random) -> Call:
        return call(without_ties(rng, (rng.choice([2, 3]), 4), (2 ** (bits - 1) - 1,)), bits)

    return draw


def _silent_row(rng: random.Random) -> Call:
    weight = without_ties(rng, (3, 3), (127,))
    weight[rng.randrange(3)] = 0.0
    return call(weight, 8)


def _rows_by_loop(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    codes, scales = [], []
    for row in weight.tolist():
        scale = max(abs(value) for value in row) / (2 ** (bits - 1) - 1) or 1.0
        codes.append([round(value / scale) for value in row])
        scales.append([scale])
    return torch.tensor(codes, dtype=torch.int8), torch.tensor(scales)


def _rows_by_where(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    largest = weight.abs().amax(dim=1, keepdim=True)
    scale = torch.where(largest == 0, 1.0, largest / (2 ** (bits - 1) - 1))
    return torch.round(weight / scale).to(torch.int8), scale


def _rows_by_numpy(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    table = weight.numpy()
    scale = np.linalg.norm(table, ord=np.inf, axis=1, keepdims=True) / (2 ** (bits - 1) - 1)
    scale[scale == 0] = 1
    return torch.from_numpy(np.rint(table / scale).astype(np.int64)), torch.from_numpy(scale)


def _rows_with(
    scale_of: Callable[[Tensor, int], Tensor], convert: Callable[[Tensor], Tensor] = lambda steps: steps.round().char()
) -> Callable[[Tensor, int], tuple[Tensor, Tensor]]:
    """A wrong answer with another scale, or another way to whole numbers."""

    def wrong(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
        scale = scale_of(weight, 2 ** (bits - 1) - 1)
        scale = torch.where(scale == 0, 1.0, scale)
        return convert(weight / scale), scale

    return wrong


def _largest(weight: Tensor, top: int) -> Tensor:
    return weight.abs().amax(dim=1, keepdim=True) / top


def _divided_by_zero(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    scale = _largest(weight, 2 ** (bits - 1) - 1)
    return (weight / scale).round().to(torch.int8), scale


def _scales_that_lie_flat(weight, bits):
    q, scale = quantize_rows(weight, bits)
    return q, scale[:, 0]


check_quantize_rows = Exercise(
    "quantize_rows",
    quantize_rows,
    parts=(
        Part("8 bits", 2, _weight(8)),
        Part("4 bits", 1, _weight(4)),
        Part("a row of zeros", 1, _silent_row),
    ),
    mistakes=(
        Mistake("one scale serves all rows", "Each row has its own largest number: amax(dim=1, keepdim=True).",
                _rows_with(lambda weight, top: (weight.abs().max() / top).expand(len(weight), 1).clone())),
        Mistake("each column has a scale", "A row of the weight makes one output of the layer: go along dim=1.",
                _rows_with(lambda weight, top: weight.abs().amax(dim=0, keepdim=True) / top)),
        Mistake("the grid has a place too many", "From −(2^(b−1) − 1) to 2^(b−1) − 1, alike on both sides.",
                _rows_with(lambda weight, top: _largest(weight, top + 1), lambda steps: steps.round().to(torch.int16))),
        Mistake("numbers are cut off, not rounded", "A conversion to whole numbers drops what is behind the point. "
                "Round first.", _rows_with(_largest, lambda steps: steps.to(torch.int8))),
        Mistake("the largest number is taken without its sign", "A row's furthest number may be negative: abs().",
                _rows_with(lambda weight, top: weight.amax(dim=1, keepdim=True) / top,
                           lambda steps: steps.round().to(torch.int16)),
                also=(_rows_with(lambda weight, top: weight.amax(dim=1, keepdim=True) / top),)),
        Mistake("bits play no part", "With 4 bits the grid ends at 7.",
                _rows_with(lambda weight, top: _largest(weight, 127))),
        Mistake("q is still floating-point", "Whole numbers of 8 bits: torch.int8.",
                _rows_with(_largest, lambda steps: steps.round())),
        Mistake("the scales are no column", "(N, 1), so that each stands beside its row: keepdim=True.",
                _scales_that_lie_flat),
        Mistake("a row of zeros is divided by 0", "Its scale may be anything but 0: take 1.", _divided_by_zero),
    ),
    right=(_rows_by_loop, _rows_by_where, _rows_by_numpy),
)  # fmt: skip
