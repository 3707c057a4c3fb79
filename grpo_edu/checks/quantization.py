"""Exercises on quantization: integer grids, an integer layer, model size and the cost of rounding."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from grpo_edu.checks.core import Call, Exercise, Mistake, Part, call
from grpo_edu.checks.inputs import numbers
from grpo_edu.quantization.numbers import quantize
from grpo_edu.quantization.rollouts import truncated_importance_weights

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


def _one_side(rng: random.Random) -> Call:
    return rng.choice([_range(rng, (0.5, 1.0), (2.0, 3.0)), _range(rng, (-3.0, -2.0), (-1.0, -0.5))])


def _grid(x: Tensor, places: int, *, with_zero: bool = True, whole: bool = True, sign: int = -1) -> tuple[float, float]:
    values = x.tolist() + [0.0] * with_zero
    scale = (max(values) - min(values)) / places
    zero_point = sign * min(values) / scale
    return scale, round(zero_point) if whole else zero_point


check_affine_grid = Exercise(
    affine_grid,
    parts=(
        Part(
            "numbers on both sides of 0",
            2,
            lambda rng: _range(rng, (-2.0, -0.3), (0.5, 4.0)),
            always=(call(torch.tensor([-1.0, 0.9]), 3),),
        ),
        Part("numbers on one side of 0", 1, _one_side),
    ),
    mistakes={
        "0 is not on the grid": Mistake(
            "The grid must reach from the smallest number *or 0* to the largest *or 0*.",
            lambda x, bits: _grid(x, 2**bits - 1, with_zero=False),
        ),
        "there is one step too many": Mistake(
            "2^b places have 2^b − 1 steps between them.", lambda x, bits: _grid(x, 2**bits)
        ),
        "the zero point is not whole": Mistake(
            "It is a place of the grid: round it, or 0 falls between two places.",
            lambda x, bits: _grid(x, 2**bits - 1, whole=False),
        ),
        "the zero point is cut off, not rounded": Mistake(
            "`int(3.68)` is 3; the nearest place is 4.",
            lambda x, bits: (lambda grid: (grid[0], int(grid[1])))(_grid(x, 2**bits - 1, whole=False)),
        ),
        "the zero point has the wrong sign": Mistake(
            "Places are counted from the smallest number up: how many steps above it is 0?",
            lambda x, bits: _grid(x, 2**bits - 1, sign=1),
        ),
        "that is a symmetric grid": Mistake(
            "An affine one reaches only as far as the numbers do.",
            lambda x, bits: (x.abs().max().item() / (2 ** (bits - 1) - 1), 0),
        ),
    },
)


# ---- dequantize ----


def dequantize(q: Tensor, scale: Tensor | float, zero_point: Tensor | int) -> Tensor:
    """scale · (q − zero_point), not computed in 8 bits."""
    return scale * (q.float() - zero_point)


def _codes(rng: random.Random, rows: int) -> Tensor:
    codes = torch.tensor([[rng.randrange(256) for _ in range(4)] for _ in range(rows)], dtype=torch.uint8)
    codes[:, rng.randrange(4)] = 0  # below every zero point
    return codes


def _grid_a_row(rng: random.Random) -> Call:
    scale = torch.tensor([[round(rng.uniform(0.01, 0.2), 3)] for _ in range(3)])
    zero_point = torch.tensor([[rng.randrange(20, 200)] for _ in range(3)], dtype=torch.uint8)
    return call(_codes(rng, 3), scale, zero_point)


check_dequantize = Exercise(
    dequantize,
    parts=(
        Part(
            "one grid for all",
            1,
            lambda rng: call(_codes(rng, 2), round(rng.uniform(0.01, 0.2), 3), rng.randrange(20, 200)),
        ),
        Part("a grid for each row", 2, _grid_a_row),
    ),
    mistakes={
        "the subtraction wraps around": Mistake(
            "In uint8, 3 − 5 is 254. Make floating-point numbers of q first.",
            lambda q, scale, zero_point: scale * (q - zero_point),
        ),
        "the zero point is subtracted after scaling": Mistake(
            "It is a place of the grid, not a real number: brackets.",
            lambda q, scale, zero_point: scale * q.float() - zero_point,
        ),
        "the zero point is added": Mistake(
            "The place of 0 is to become 0.", lambda q, scale, zero_point: scale * (q.float() + zero_point)
        ),
        "the zero point plays no part": Mistake(
            "Which place stands for 0?", lambda q, scale, zero_point: scale * q.float()
        ),
        "it is divided by the scale": Mistake(
            "That is the way there; back is a multiplication.",
            lambda q, scale, zero_point: (q.float() - zero_point) / scale,
        ),
    },
)


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


def _halves(top: float, bits: int) -> Call:
    """Numbers in the middle between two grid points, which are rounded to the even one."""
    return call(torch.tensor([[top, 2.5, -0.5, 4.5], [-1.5, 0.5, -top, 3.0]]), bits)


check_quantize_rows = Exercise(
    quantize_rows,
    parts=(
        Part("8 bits", 2, _weight(8), always=(_halves(127.0, 8),)),
        Part("4 bits", 1, _weight(4), always=(_halves(7.0, 4),)),
        Part("a row of zeros", 1, _silent_row),
    ),
    mistakes={
        "one scale serves all rows": Mistake(
            "Each row has its own largest number: amax(dim=1, keepdim=True).",
            _rows_with(lambda weight, top: (weight.abs().max() / top).expand(len(weight), 1).clone()),
        ),
        "each column has a scale": Mistake(
            "A row of the weight makes one output of the layer: go along dim=1.",
            _rows_with(lambda weight, top: weight.abs().amax(dim=0, keepdim=True) / top),
        ),
        "the grid has a place too many": Mistake(
            "From −(2^(b−1) − 1) to 2^(b−1) − 1, alike on both sides.",
            _rows_with(lambda weight, top: _largest(weight, top + 1), lambda steps: steps.round().to(torch.int16)),
        ),
        "the grid has a place too many, and 128 becomes −128": Mistake(
            "int8 ends at 127. The largest number of a row should become 2^(b−1) − 1.",
            _rows_with(lambda weight, top: _largest(weight, top + 1)),
        ),
        "halves are rounded up": Mistake(
            "`.round()` takes a half to the even neighbor: 2.5 to 2, as in the worked example.",
            _rows_with(_largest, lambda steps: (steps + 0.5).floor().char()),
            also=(_rows_with(_largest, lambda steps: (steps.sign() * (steps.abs() + 0.5).floor()).char()),),
        ),
        "numbers are cut off, not rounded": Mistake(
            "A conversion to whole numbers drops what is behind the point. Round first.",
            _rows_with(_largest, lambda steps: steps.to(torch.int8)),
        ),
        "the largest number is taken without its sign": Mistake(
            "A row's furthest number may be negative: abs().",
            _rows_with(
                lambda weight, top: weight.amax(dim=1, keepdim=True) / top, lambda steps: steps.round().to(torch.int16)
            ),
            also=(_rows_with(lambda weight, top: weight.amax(dim=1, keepdim=True) / top),),
        ),
        "bits play no part": Mistake(
            "With 4 bits the grid ends at 7.", _rows_with(lambda weight, top: _largest(weight, 127))
        ),
        "q is still floating-point": Mistake(
            "Whole numbers of 8 bits: torch.int8.", _rows_with(_largest, lambda steps: steps.round())
        ),
        "the scales are no column": Mistake(
            "(N, 1), so that each stands beside its row: keepdim=True.", _scales_that_lie_flat
        ),
        "a row of zeros is divided by 0": Mistake("Its scale may be anything but 0: take 1.", _divided_by_zero),
    },
)


# ---- int8_linear ----


def whole_numbers(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each row in whole numbers from -127 to 127, and the scales of the rows."""
    scale = x.abs().amax(dim=1, keepdim=True) / 127
    return (x / scale).round(), scale


def int8_linear(x: Tensor, weight: Tensor, group_size: int) -> Tensor:
    """(B, N), x Wᵀ by whole numbers: a scale for each group of columns in each row of x and of W."""
    total = torch.zeros(len(x), len(weight))
    for some_x, some_weight in zip(x.split(group_size, dim=1), weight.split(group_size, dim=1), strict=True):
        (qx, t), (qw, s) = whole_numbers(some_x), whole_numbers(some_weight)
        total += t * (qx @ qw.T) * s.T
    return total


def _layer(rng: random.Random) -> Call:
    """Two tokens and three rows of two groups or three, all groups of unlike size."""
    groups = rng.choice([2, 3])
    while True:
        x, weight = (without_ties(rng, (rows * groups, 6), (127,)).view(rows, -1) for rows in (2, 3))
        x[1] = 100 * weight[rng.randrange(3)]  # all terms of one sum have the same sign
        x[:, :6] *= 7
        if whole_numbers(x[1:, :6])[0].square().sum() > 2**15:  # more than int16 holds
            return call(x, weight, 6)


def _with_scales(
    of_x: Callable[[Tensor], Tensor], of_weight: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32
) -> Callable[[Tensor, Tensor, int], Tensor]:
    """A wrong answer with other sizes of (rows, groups, columns), or one that adds up in another type."""

    def wrong(x: Tensor, weight: Tensor, group_size: int) -> Tensor:
        parts = [one.view(len(one), -1, group_size) for one in (x, weight)]
        t, s = (largest(part) / 127 for largest, part in zip((of_x, of_weight), parts, strict=True))
        qx, qw = ((part / scale).round().to(dtype) for part, scale in zip(parts, (t, s), strict=True))
        t, s = (scale.expand(*part.shape[:2], 1)[..., 0] for scale, part in zip((t, s), parts, strict=True))
        sums = torch.stack([one @ other.T for one, other in zip(qx.unbind(1), qw.unbind(1), strict=True)], dim=-1)
        return (sums * t[:, None] * s[None]).sum(dim=-1)

    return wrong


def _each_group(part: Tensor) -> Tensor:
    return part.abs().amax(dim=2, keepdim=True)


def _each_row(part: Tensor) -> Tensor:
    return part.abs().amax(dim=(1, 2), keepdim=True)


def _each_column_block(part: Tensor) -> Tensor:
    return part.abs().amax(dim=(0, 2), keepdim=True)


def _weight_alone(x: Tensor, weight: Tensor, group_size: int) -> Tensor:
    parts = [whole_numbers(part) for part in weight.split(group_size, dim=1)]
    return x @ torch.cat([q * s for q, s in parts], dim=1).T


def _last_group_only(x: Tensor, weight: Tensor, group_size: int) -> Tensor:
    return int8_linear(x[:, -group_size:], weight[:, -group_size:], group_size)


def _scales_missing(x: Tensor, weight: Tensor, group_size: int) -> Tensor:
    pairs = zip(x.split(group_size, dim=1), weight.split(group_size, dim=1), strict=True)
    return torch.stack([whole_numbers(one)[0] @ whole_numbers(other)[0].T for one, other in pairs]).sum(dim=0)


check_int8_linear = Exercise(
    int8_linear,
    parts=(Part("two tokens, one a hundred times as large, groups of unlike size", 4, _layer),),
    mistakes={
        "a row has one scale for all of its groups": Mistake(
            "A large group takes the grid from a small one: `amax` over the columns of a group.",
            _with_scales(_each_row, _each_row),
        ),
        "only the weight has a scale for each group": Mistake(
            "The columns of x lie in groups as well.", _with_scales(_each_row, _each_group)
        ),
        "only x has a scale for each group": Mistake(
            "The columns of the weight lie in groups as well.", _with_scales(_each_group, _each_row)
        ),
        "all tokens share the scales": Mistake(
            "A large token takes the grid from a small one: each row has scales of its own.",
            _with_scales(_each_column_block, _each_group),
        ),
        "all rows of the weight share the scales": Mistake(
            "Each row, which makes one output, has its own.", _with_scales(_each_group, _each_column_block)
        ),
        "the sums wrap around in 8 bits": Mistake(
            "A product of two int8 numbers may be 16,129. Add up in int32, or in floating point.",
            _with_scales(_each_group, _each_group, torch.int8),
        ),
        "the sums wrap around in 16 bits": Mistake(
            "One product has room, a sum of them has not: int16 ends at 32,767. int32, or floating point.",
            _with_scales(_each_group, _each_group, torch.int16),
        ),
        "only the last group is left": Mistake("Each group gives a part of the sum: add them up.", _last_group_only),
        "x is not rounded": Mistake("Then it is no product of whole numbers. x has scales of its own.", _weight_alone),
        "the scales are missing in the end": Mistake(
            "Each group has scales of its own, so they come in before the groups are added.", _scales_missing
        ),
        "nothing is rounded": Mistake(
            "Both factors are whole numbers from −127 to 127.", lambda x, weight, group_size: x @ weight.T
        ),
    },
)


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


def _no_scales(vocab_size: int, hidden_size: int, layers: Shapes, form: str) -> int:
    table, inside = vocab_size * hidden_size, sum(rows * columns for rows, columns in layers)
    return {
        "float32": 4 * (table + inside),
        "kept": 5 * table + inside,
        "both": 2 * table + inside,
        "shared": table + inside,
    }[form]


def _in_form(forms: dict[str, str]) -> Callable[..., int]:
    """A wrong answer that takes one form for another."""

    def wrong(vocab_size: int, hidden_size: int, layers: Shapes, form: str) -> int:
        return quantized_bytes(vocab_size, hidden_size, layers, forms.get(form, form))

    return wrong


def _scale_a_column(vocab_size: int, hidden_size: int, layers: Shapes, form: str) -> int:
    tables = {"float32": 0, "kept": 1, "both": 2, "shared": 1}[form]
    columns = sum(width for _, width in layers) if tables else 0
    return _no_scales(vocab_size, hidden_size, layers, form) + 4 * (columns + tables * hidden_size)


check_quantized_bytes = Exercise(
    quantized_bytes,
    parts=(
        Part("in float32", 1, _model(["float32"])),
        Part("int8, the table of embeddings kept in float32", 2, _model(["kept"])),
        Part("int8, the table too, twice or shared", 1, _model(["both", "shared"]), draws=10),
    ),
    mistakes={
        "everything is counted as a quarter": Mistake(
            "The table that was kept has 4 bytes a weight, and the head is a second table.",
            _in_form({"kept": "shared", "both": "shared"}),
        ),
        "the table is not kept": Mistake('"kept" leaves it at 4 bytes a weight.', _in_form({"kept": "both"})),
        "the output layer is forgotten": Mistake(
            "The head was the same table. It is a linear layer, so now it has an int8 copy of its own.",
            lambda vocab, width, layers, form: (
                quantized_bytes(vocab, width, layers, form) - (form == "kept") * vocab * (width + 4)
            ),
        ),
        "the scales are forgotten": Mistake("Each row of an int8 matrix has a scale of 4 bytes.", _no_scales),
        "each column has a scale": Mistake("A row, which makes one output, has a scale.", _scale_a_column),
        "the shared table is counted twice in float32": Mistake(
            "One table serves at both ends.",
            lambda vocab, width, layers, form: (
                quantized_bytes(vocab, width, layers, form) + (form == "float32") * 4 * vocab * width
            ),
        ),
    },
)


# ---- bits_needed ----


def bits_needed(largest: float, tolerated: float) -> int:
    """The fewest bits of a symmetric grid up to `largest` that moves no number by more than `tolerated`."""
    bits = 2
    while largest / (2 ** (bits - 1) - 1) / 2 > tolerated:
        bits += 1
    return bits


def _some_tolerance(rng: random.Random) -> Call:
    while True:
        largest, tolerated = round(rng.uniform(0.5, 8.0), 2), round(10 ** rng.uniform(-3.5, -0.7), 4)
        if abs(math.log2(largest / tolerated / 2 + 1) % 1 - 0.5) < 0.48:  # not on the border of two answers
            return call(largest, tolerated)


def _bits_below(largest: float, tolerated: float) -> int:
    return next(bits for bits in range(2, 64) if largest / (2 ** (bits - 1) - 1) / 2 < tolerated)


check_bits_needed = Exercise(
    bits_needed,
    parts=(Part("from a fifth to a few thousandths", 3, _some_tolerance, draws=8, always=(call(7.0, 0.5),)),),
    mistakes={
        "a whole step is taken for the error": Mistake(
            "Rounding moves a number by half a step at most.",
            lambda largest, tolerated: bits_needed(largest, tolerated / 2),
        ),
        "the whole grid is counted on one side": Mistake(
            "Half of the places are for negative numbers.",
            lambda largest, tolerated: bits_needed(largest, tolerated) - 1,
        ),
        "just the tolerated error is taken for too much": Mistake(
            "No more than that: half a step of just `tolerated` will do.", _bits_below
        ),
        "that is a number of places, not of bits": Mistake(
            "b bits have 2^b places.", lambda largest, tolerated: math.ceil(largest / (2 * tolerated))
        ),
        "bits are whole": Mistake(
            "Round up: half a bit cannot be had.",
            lambda largest, tolerated: 1 + math.log2(largest / (2 * tolerated) + 1),
        ),
    },
)


# ---- equality_verdict ----


def equality_verdict(low: float, high: float, margin: float) -> str:
    """ "equal" within the margin, "better" or "worse" wholly outside of it, "unclear" else."""
    if -margin <= low and high <= margin:
        return "equal"
    if low > margin:
        return "better"
    return "worse" if high < -margin else "unclear"


def _interval(rng: random.Random, widths: tuple[float, float]) -> Call:
    margin, width = rng.choice([0.02, 0.03]), rng.uniform(*widths)
    low = rng.uniform(-0.08, 0.08) - width / 2
    return call(round(low, 3), round(low + width, 3), margin)


def _verdict_with_ends(inside: bool, outside: bool) -> Callable[[float, float, float], str]:
    """Whether an interval that ends at the margin is inside, and one that begins there is outside of it."""

    def verdict(low: float, high: float, margin: float) -> str:
        if (-margin <= low and high <= margin) if inside else (-margin < low and high < margin):
            return "equal"
        if low >= margin if outside else low > margin:
            return "better"
        if high <= -margin if outside else high < -margin:
            return "worse"
        return "unclear"

    return verdict


_EDGES = (  # ends on the margin: within it twice, beside it twice; and one around 0 that reaches beyond
    call(-0.02, 0.005, 0.02),
    call(-0.005, 0.02, 0.02),
    call(0.02, 0.03, 0.02),
    call(-0.03, -0.02, 0.02),
    call(-0.043, 0.001, 0.02),
)


check_equality_verdict = Exercise(
    equality_verdict,
    parts=(
        Part("narrow intervals", 2, lambda rng: _interval(rng, (0.005, 0.03)), draws=24, always=_EDGES),
        Part(
            "wide intervals",
            1,
            lambda rng: _interval(rng, (0.05, 0.15)),
            draws=24,
            always=(call(-0.1, 0.02, 0.02), call(-0.02, 0.1, 0.02)),
        ),
    ),
    mistakes={
        "no difference was found, so they are called equal": Mistake(
            "An interval around 0 may reach far beyond the margin: then nobody knows.",
            lambda low, high, margin: equality_verdict(low, high, 0.0).replace("unclear", "equal"),
        ),
        "it is compared with 0, not with the margin": Mistake(
            "A difference that is surely there may be too small to matter.",
            lambda low, high, margin: equality_verdict(low, high, 0.0 if low > 0 or high < 0 else margin),
            also=(
                lambda low, high, margin: "equal" if max(-low, high) <= margin else equality_verdict(low, high, 0.0),
            ),
        ),
        "only the lower end is looked at": Mistake(
            "Equal means: not much worse, and not much better either.",
            lambda low, high, margin: "equal" if low >= -margin else equality_verdict(low, high, margin),
        ),
        "an interval that ends at the margin is not called equal": Mistake(
            "The ends of the margin are included.", _verdict_with_ends(False, False)
        ),
        "an interval that begins at the margin is called better": Mistake(
            "Wholly above the margin: its lower end too, and the same below.", _verdict_with_ends(True, True)
        ),
        "the ends of the margin are taken the other way round": Mistake(
            "A change of just the margin still does not matter.", _verdict_with_ends(False, True)
        ),
        "the middle of the interval decides": Mistake(
            "Both ends count. The middle alone is a point estimate.",
            lambda low, high, margin: equality_verdict((low + high) / 2, (low + high) / 2, margin),
        ),
    },
)


# ---- truncated_weights ----


def truncated_weights(per_token_logps: Tensor, sampling_per_token_logps: Tensor, cap: float) -> Tensor:
    """The package's `truncated_importance_weights`."""
    return truncated_importance_weights(per_token_logps, sampling_per_token_logps, cap)


def _sampled(rng: random.Random, apart: float) -> Call:
    sampling = numbers(rng, 2, 3, low=-3.0, high=-0.7)
    return call(sampling + numbers(rng, 2, 3, low=-apart, high=apart), sampling, rng.choice([2.0, 3.0]))


def _some_far(rng: random.Random) -> Call:
    made = _sampled(rng, 0.6)
    logps, sampling = (part.view(-1) for part in made.args[:2])
    seldom, often = rng.sample(range(6), 2)  # tokens that the copy hardly ever draws, and draws far too often
    logps[seldom], sampling[seldom] = round(rng.uniform(-1.0, -0.2), 2), -6.0
    logps[often], sampling[often] = round(rng.uniform(-4.0, -3.0), 2), -0.5
    return made


check_truncated_weights = Exercise(
    truncated_weights,
    parts=(
        Part("a copy that is near", 1, lambda rng: _sampled(rng, 0.6)),
        Part("a token that the copy hardly ever draws, and one that it draws far too often", 2, _some_far),
    ),
    mistakes={
        "the ratio is upside down": Mistake(
            "What the copy draws too seldom is to count more: π over π_q.",
            lambda logps, sampling, cap: truncated_importance_weights(sampling, logps, cap),
        ),
        "the ratio has no exponential": Mistake(
            "These are *log*-probabilities.", lambda logps, sampling, cap: (logps - sampling).clamp(max=cap)
        ),
        "the logarithms are divided": Mistake(
            "The logarithm of a ratio is a difference of logarithms.",
            lambda logps, sampling, cap: (logps / sampling).clamp(max=cap),
            also=(lambda logps, sampling, cap: (logps / sampling).exp().clamp(max=cap),),
        ),
        "nothing is cut off": Mistake(
            "One token with a huge weight rules the batch: at most the cap.",
            lambda logps, sampling, cap: (logps - sampling).exp(),
        ),
        "it is cut off from below": Mistake(
            "The cap is the *most* that a weight may be.",
            lambda logps, sampling, cap: (logps - sampling).exp().clamp(min=cap),
        ),
        "it is cut off on both sides": Mistake(
            "The cap is the *most* that a weight may be. A token that the copy draws too often keeps its small weight.",
            lambda logps, sampling, cap: (logps - sampling).exp().clamp(1 / cap, cap),
        ),
        "the logarithm is cut off, at the cap itself": Mistake(
            "The cap is one for weights, not for their logarithms.",
            lambda logps, sampling, cap: (logps - sampling).clamp(max=cap).exp(),
        ),
        "weights above the cap become 0": Mistake(
            "Cut off, not thrown away: such a token counts as much as the cap.",
            lambda logps, sampling, cap: (lambda w: w * (w <= cap))((logps - sampling).exp()),
        ),
    },
)
