"""Exercises on quantization: integer grids, an integer layer, model size and the cost of rounding."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_edu.checks.core import Call, Exercise, Part, call
from grpo_edu.checks.inputs import mask_of, numbers


# ---- inputs ----
def without_ties(rng: random.Random, shape: tuple[int, int], top: int = 127) -> Tensor:
    """Return a matrix with no number halfway between two grid points when a row's largest is brought to `top`."""
    while True:
        rows = [[round(rng.gauss(0, 1), 3) for _ in range(shape[1])] for _ in range(shape[0])]
        x = torch.tensor(rows, dtype=torch.float64)
        largest = x.abs().amax(dim=1, keepdim=True)
        steps = x / largest * top
        if largest.min() > 0 and ((steps % 1 - 0.5).abs() > 0.01).all():
            return x.float()


# ---- affine_grid ----
def affine_grid(x: Tensor, bits: int) -> tuple[float, int]:
    """Scale and zero point of the affine grid that just holds all numbers and 0."""
    low, high = min(x.min().item(), 0.0), max(x.max().item(), 0.0)
    scale = (high - low) / (2**bits - 1)
    return scale, round(-low / scale)


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


check_affine_grid = Exercise(
    affine_grid,
    parts=(
        Part("numbers on both sides of 0", 2, _both_sides, always=(call(torch.tensor([-1.0, 0.9]), 3),)),
        Part("numbers on one side of 0", 1, _one_side),
    ),
    changes="""
        0 is not on the grid: min(x.min().item(), 0.0), max(x.max().item(), 0.0) -> x.min().item(), x.max().item()
            The grid must contain 0, even if all numbers lie on one side of it.
        the grid has one step too many: 2**bits - 1 -> 2**bits
            There are 2^b − 1 steps between 2^b grid points.
        the zero point is not an integer: round(-low / scale) -> -low / scale
            The zero point is a grid point. Round it; otherwise 0 lies between two grid points.
        the zero point is truncated, not rounded: round(-low / scale) -> int(-low / scale)
            `int(3.68)` is 3; the nearest grid point is 4.
        the zero point has the wrong sign: round(-low / scale) -> round(low / scale)
            Grid points are counted from the smallest number up: how many steps above it is 0?
        the grid is symmetric: (x.abs().max().item() / (2 ** (bits - 1) - 1), 0)
            An affine grid reaches only as far as the numbers (and 0) do.
    """,
)


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


check_dequantize = Exercise(
    dequantize,
    parts=(Part("one grid for all", 1, _one_grid), Part("one grid per row", 2, _grid_a_row)),
    changes="""
        the subtraction wraps around: scale * (q - zero_point)
            In uint8, 3 − 5 is 254. Convert q to floating point first.
        the zero point is subtracted after scaling: scale * q.float() - zero_point
            The zero point is a grid point, not a real number: subtract it before you multiply.
        the zero point is added: scale * (q.float() + zero_point)
            Where q is the zero point, the result must be 0.
        the zero point is not used: scale * q.float()
            Where q is the zero point, the result must be 0.
        the difference is divided by the scale: (q.float() - zero_point) / scale
            Quantizing divides by the scale, so dequantizing multiplies by it.
    """,
)


# ---- quantize_rows ----
def quantize_rows(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """(N, K) whole numbers and (N, 1) scales of a symmetric grid for each row."""
    top = 2 ** (bits - 1) - 1
    scale = weight.abs().amax(dim=1, keepdim=True) / top
    scale = torch.where(scale == 0, 1.0, scale)
    steps = weight / scale
    return steps.round().to(torch.int8), scale


def _weight(rng: random.Random, bits: int) -> Call:
    return call(without_ties(rng, (rng.choice([2, 3]), 4), 2 ** (bits - 1) - 1), bits)


def _silent_row(rng: random.Random) -> Call:
    weight = without_ties(rng, (3, 3))
    weight[rng.randrange(3)] = 0.0
    return call(weight, 8)


def _halves(top: float, bits: int) -> Call:
    """Return numbers in the middle between two grid points, which are rounded to the even one."""
    return call(torch.tensor([[top, 2.5, -0.5, 4.5], [-1.5, 0.5, -top, 3.0]]), bits)


check_quantize_rows = Exercise(
    quantize_rows,
    parts=(
        Part("8 bits", 2, lambda rng: _weight(rng, 8), always=(_halves(127.0, 8),)),
        Part("4 bits", 1, lambda rng: _weight(rng, 4), always=(_halves(7.0, 4),)),
        Part("a row of zeros", 1, _silent_row),
    ),
    changes="""
        all rows share one scale: weight.abs().amax(dim=1, keepdim=True) -> weight.abs().max().expand(len(weight), 1)
            Each row has its own largest number: amax(dim=1, keepdim=True).
        each column has a scale, not each row: dim=1 -> dim=0
            A row of the weight produces one output of the layer: take the maximum along dim=1.
        the grid has one level too many: 2 ** (bits - 1) - 1 -> 2 ** (bits - 1); torch.int8 -> torch.int16
            The grid is symmetric: it goes from −(2^(b−1) − 1) to 2^(b−1) − 1.
        the grid has one level too many, and 128 becomes −128: 2 ** (bits - 1) - 1 -> 2 ** (bits - 1)
            int8 ends at 127. The largest number of a row should become 2^(b−1) − 1.
        halves are rounded up: steps.round() -> (steps + 0.5).floor()
            `.round()` rounds a half to the even neighbor: 2.5 to 2, as in the worked example.
            or: steps.round() -> (steps.sign() * (steps.abs() + 0.5).floor())
        numbers are truncated, not rounded: steps.round() -> steps
            Converting to integers drops the digits after the decimal point. Round first.
        the largest number is taken with its sign: weight.abs() -> weight; torch.int8 -> torch.int16
            The number that is farthest from 0 may be negative: use abs().
            or: weight.abs() -> weight
        `bits` is not used: 2 ** (bits - 1) - 1 -> 127
            With 4 bits, the grid ends at 7.
        q is still floating-point: steps.round().to(torch.int8) -> steps.round()
            Convert to 8-bit integers: torch.int8.
        the scales are not a column: torch.int8), scale -> torch.int8), scale[:, 0]
            Return shape (N, 1), so that each scale belongs to its row: keepdim=True.
        a row of zeros is divided by 0: torch.where(scale == 0, 1.0, scale) -> scale
            The scale of such a row may be any number except 0; take 1.
    """,
)


# ---- int8_linear ----
def whole_numbers(x: Tensor, like: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return each row in whole numbers from -127 to 127, and the rows' scales, those of x or of `like`."""
    scale = (x if like is None else like).abs().amax(dim=1, keepdim=True) / 127
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
        x, weight = (without_ties(rng, (rows * groups, 6)).view(rows, -1) for rows in (2, 3))
        x[1] = 100 * weight[rng.randrange(3)]  # all terms of one sum have the same sign
        x[:, :6] *= 7
        if whole_numbers(x[1:, :6])[0].square().sum() > 2**15:  # more than int16 holds
            return call(x, weight, 6)


check_int8_linear = Exercise(
    int8_linear,
    parts=(Part("two tokens, one a hundred times as large, groups whose numbers differ much in size", 4, _layer),),
    changes="""
        a row has one scale for all of its groups:
            (some_x) -> (some_x, x); whole_numbers(some_weight) -> whole_numbers(some_weight, weight)
            Small groups lose all precision if a large group sets the scale: use `amax` over the columns of a group.
        only the weight has a scale for each group: whole_numbers(some_x) -> whole_numbers(some_x, x)
            The columns of x are divided into groups as well.
        only x has a scale for each group: whole_numbers(some_weight) -> whole_numbers(some_weight, weight)
            The columns of the weight are divided into groups as well.
        all tokens share the scales: whole_numbers(some_x) -> whole_numbers(some_x, some_x.reshape(1, -1))
            Small tokens lose all precision if a large token sets the scale: each row has its own scales.
        all rows of the weight share the scales:
            whole_numbers(some_weight) -> whole_numbers(some_weight, some_weight.reshape(1, -1))
            Each row produces one output and has its own scales.
        the sums wrap around in 8 bits: qx @ qw.T -> qx.to(torch.int8) @ qw.to(torch.int8).T
            A product of two int8 numbers may be 16,129. Add up in int32, or in floating point.
        the sums wrap around in 16 bits: qx @ qw.T -> qx.to(torch.int16) @ qw.to(torch.int16).T
            One product fits into int16, but a sum of them does not: int16 ends at 32,767. Use int32 or floating point.
        only the last group counts: total += t -> total = t
            Each group gives a part of the sum: add them up.
        x is not rounded: t * (qx @ qw.T) -> (some_x @ qw.T)
            Both factors must be integers. Quantize x as well, with scales of its own.
        the result is not multiplied by the scales: t * (qx @ qw.T) * s.T -> qx @ qw.T
            Each group has its own scales, so multiply by them before you add the groups.
        nothing is rounded: x @ weight.T
            Both factors must be rounded to integers from −127 to 127.
    """,
)


# ---- quantized_bytes ----
Shapes = Sequence[tuple[int, int]]


def quantized_bytes(vocab_size: int, hidden_size: int, layers: Shapes, form: str) -> int:
    """Return the bytes of a model with a shared table in "float32", or in int8 by `form`: "kept", "both", "shared"."""
    table, inside = vocab_size * hidden_size, sum(rows * columns for rows, columns in layers)
    if form == "float32":
        return 4 * (table + inside)
    small_table = table + 4 * vocab_size
    small_inside = inside + 4 * sum(rows for rows, columns in layers)
    first = {"kept": 4 * table, "both": small_table, "shared": 0}[form]
    return first + small_inside + small_table


def _model(rng: random.Random, *forms: str) -> Call:
    width = rng.choice([64, 128, 896])
    layers = [(width, width), (rng.choice([16, 32]), width), (4 * width, width), (width, 4 * width)]
    return call(rng.choice([1024, 32_000, 151_936]), width, layers * rng.randrange(1, 3), rng.choice(forms))


check_quantized_bytes = Exercise(
    quantized_bytes,
    parts=(
        Part("in float32", 1, lambda rng: _model(rng, "float32")),
        Part("int8, the table of embeddings kept in float32", 2, lambda rng: _model(rng, "kept")),
        Part("int8, the table too, twice or shared", 1, lambda rng: _model(rng, "both", "shared"), draws=10),
    ),
    changes="""
        everything is counted with one byte per weight: "kept": 4 * table, "both": small_table -> "kept": 0, "both": 0
            The table that was kept has 4 bytes per weight, and the output layer is a second table.
        the table is quantized in the form "kept": "kept": 4 * table -> "kept": small_table
            "kept" leaves it at 4 bytes per weight.
        the output layer is left out: small_inside + small_table -> small_inside + (form != "kept") * small_table
            The output layer shared the table in float32. It is a linear layer, so now it has an int8 copy of its own.
        the scales are left out: table + 4 * vocab_size -> table; inside + 4 * sum -> inside + 0 * sum
            Each row of an int8 matrix has a scale of 4 bytes.
        each column has a scale, not each row: 4 * vocab_size -> 4 * hidden_size; sum(rows for -> sum(columns for
            A row produces one output and has one scale.
        the shared table is counted twice in float32: 4 * (table + inside) -> 4 * (2 * table + inside)
            Input and output share one table.
    """,
)


# ---- bits_needed ----
def bits_needed(largest: float, tolerated: float) -> int:
    """Return the fewest bits of a symmetric grid up to `largest` that moves no number by more than `tolerated`."""
    bits = 2
    while largest / (2 ** (bits - 1) - 1) / 2 > tolerated:
        bits += 1
    return bits


def _some_tolerance(rng: random.Random) -> Call:
    while True:
        largest, tolerated = round(rng.uniform(0.5, 8.0), 2), round(10 ** rng.uniform(-3.5, -0.7), 4)
        if abs(math.log2(largest / tolerated / 2 + 1) % 1 - 0.5) < 0.48:  # not on the border of two answers
            return call(largest, tolerated)


check_bits_needed = Exercise(
    bits_needed,
    parts=(Part("from 0.5 down to 0.0003", 3, _some_tolerance, draws=8, always=(call(7.0, 0.5),)),),
    changes="""
        the error is assumed to be a whole step: bits_needed(largest, tolerated / 2)
            Rounding moves a number by half a step at most.
        the whole grid is counted on one side: bits_needed(largest, tolerated) - 1
            Half of the levels are for negative numbers.
        an error of exactly `tolerated` is refused: > tolerated -> >= tolerated
            An error of exactly `tolerated` is allowed.
        the number of levels is returned, not of bits: math.ceil(largest / (2 * tolerated))
            With b bits there are 2^b levels.
        the number of bits is not rounded up: 1 + math.log2(largest / (2 * tolerated) + 1)
            Round up, because the number of bits is an integer.
    """,
)


# ---- equality_verdict ----
def equality_verdict(low: float, high: float, margin: float) -> str:
    """ "equal" within the margin, "better" or "worse" wholly outside of it, "unclear" else."""
    if -margin <= low and high <= margin:
        return "equal"
    if low > margin:
        return "better"
    return "worse" if high < -margin else "unclear"


def _interval(rng: random.Random, narrowest: float, widest: float) -> Call:
    margin, width = rng.choice([0.02, 0.03]), rng.uniform(narrowest, widest)
    low = rng.uniform(-0.08, 0.08) - width / 2
    return call(round(low, 3), round(low + width, 3), margin)


_EDGES = (  # ends on the margin: within it twice, next to it twice; and one around 0 that reaches beyond
    call(-0.02, 0.005, 0.02),
    call(-0.005, 0.02, 0.02),
    call(0.02, 0.03, 0.02),
    call(-0.03, -0.02, 0.02),
    call(-0.043, 0.001, 0.02),
)
_WIDE_EDGES = (call(-0.1, 0.02, 0.02), call(-0.02, 0.1, 0.02))


check_equality_verdict = Exercise(
    equality_verdict,
    parts=(
        Part("narrow intervals", 2, lambda rng: _interval(rng, 0.005, 0.03), draws=24, always=_EDGES),
        Part("wide intervals", 1, lambda rng: _interval(rng, 0.05, 0.15), draws=24, always=_WIDE_EDGES),
    ),
    changes="""
        every interval that contains 0 is called "equal": equality_verdict(low, high, 0).replace("unclear", "equal")
            An interval around 0 may reach far beyond the margin, and then the question is open.
        the interval is compared with 0, not with the margin:
            equality_verdict(low, high, 0 if low > 0 or high < 0 else margin)
            A difference may be certain and still too small to matter.
            or: "equal" if max(-low, high) <= margin else equality_verdict(low, high, 0)
        only the lower end is checked: -margin <= low and high <= margin -> -margin <= low
            "equal" means: not much worse, and not much better either.
        an interval that ends at the margin is not called "equal":
            -margin <= low and high <= margin -> -margin < low and high < margin
            The ends of the margin are included.
        an interval that begins at the margin is called "better":
            low > margin -> low >= margin; high < -margin -> high <= -margin
            For "better", the whole interval lies above the margin, its lower end included. The same holds for "worse",
            below it.
        the ends of the margin are not included: equality_verdict(low, high, margin - 1e-6)
            A change of exactly the margin still counts as "equal".
        the middle of the interval decides: equality_verdict((low + high) / 2, (low + high) / 2, margin)
            Both ends count. The middle alone is a point estimate.
    """,
)


# ---- truncated_weights ----
def truncated_weights(
    per_token_logps: Tensor, sampling_per_token_logps: Tensor, completion_mask: Tensor, cap: float
) -> Tensor:
    """(B,), how much more often the policy would have written each completion than its copy did, at most `cap`."""
    logs = (per_token_logps - sampling_per_token_logps).masked_fill(completion_mask == 0, 0.0)
    ratio = logs.sum(dim=1).exp()
    return ratio.clamp(max=cap)


def _completions(rng: random.Random, *, infinite: bool) -> Call:
    """Four completions in any order: what the comments say holds for each product and the cap of 2."""
    apart, sampling = numbers(rng, 4, 4, low=0.4, high=0.6), numbers(rng, 4, 4, low=-3.0, high=-0.9)
    sampling[1, 0] = -4.5
    apart[1, 0], apart[1, 1] = 2.5 + apart[1, 0], -2.7 - apart[1, 1]  # one token is above the cap, the product is not
    apart[2] = -apart[2]  # below 1 / cap
    apart[3] += 0.2  # even the logarithm is above the cap; the first product is above it, its tokens are not
    logps, mask = sampling + apart, mask_of([2, rng.choice([2, 3]), 3, 4], 4)
    if infinite:
        logps[0, 2:] = logps[1, 3] = sampling[0, 3] = sampling[2, 3] = -torch.inf
    order = rng.sample(range(4), 4)
    return call(logps[order], sampling[order], mask[order], 2.0)


check_truncated_weights = Exercise(
    truncated_weights,
    parts=(
        Part("completions of different lengths", 2, lambda rng: _completions(rng, infinite=False)),
        Part("padding of minus infinity", 1, lambda rng: _completions(rng, infinite=True)),
    ),
    changes="""
        the ratio is inverted:
            truncated_weights(sampling_per_token_logps, per_token_logps, completion_mask, cap)
            A completion that the copy samples too rarely has to count more: π over π_q.
        the ratio has no exponential: logs.sum(dim=1).exp() -> logs.sum(dim=1)
            These are *log*-probabilities: what undoes a logarithm?
        the logarithms are divided: per_token_logps - sampling -> per_token_logps / sampling
            The logarithm of a ratio is a difference of logarithms.
        each token has its own weight: logs.sum(dim=1).exp() -> logs.exp()
            That is the notebook's weight. Here a completion has a single weight. What is the probability of all its
            tokens?
            or: (per_token_logps - sampling_per_token_logps).exp().clamp(max=cap)
        each token is capped, not the completion: logs.sum(dim=1).exp() -> logs.exp().clamp(max=cap).prod(dim=1)
            Small ratios may have a large product, and a large ratio may be canceled by small ones. Which number has to
            be capped?
            or: logs.sum(dim=1).exp() -> logs.exp().clamp(max=cap).prod(dim=1); ratio.clamp(max=cap) -> ratio
        the geometric mean of the ratios is returned: logs.sum(dim=1) -> logs.sum(dim=1) / completion_mask.sum(dim=1)
            That was the sequence ratio of exercises 06. Here the probabilities of all tokens are multiplied.
            or: logs.sum(dim=1) -> logs.mean(dim=1)
        the ratios of the tokens are averaged:
            logs.sum(dim=1).exp() -> (logs.exp() * completion_mask).sum(dim=1) / completion_mask.sum(dim=1)
            The probability of a completion is a product over its tokens.
        padding counts:
            truncated_weights(per_token_logps, sampling_per_token_logps, torch.ones_like(completion_mask), cap)
            What comes after the end was not sampled.
        padding is multiplied by 0: .masked_fill(completion_mask == 0, 0.0) -> * completion_mask
            0 times infinity, or NaN, is NaN. Replace the numbers in the padding instead.
        the weights are not capped: ratio.clamp(max=cap) -> ratio
            A single completion with a huge weight dominates the batch. The largest weight is the cap.
        the weights are bounded from below: max=cap -> min=cap
            The cap is the *largest* value that a weight may have.
        the weights are bounded on both sides: max=cap -> 1 / cap, cap
            The cap is the *largest* value that a weight may have. A completion that the copy writes too often keeps its
            small weight.
        the logarithm is capped, not the weight:
            logs.sum(dim=1).exp() -> logs.sum(dim=1).clamp(max=cap).exp(); ratio.clamp(max=cap) -> ratio
            The cap is a bound for the weights, not for their logarithms.
        weights above the cap become 0: ratio.clamp(max=cap) -> ratio * (ratio <= cap)
            Such a completion is capped, not dropped: its weight is the cap.
    """,
)
