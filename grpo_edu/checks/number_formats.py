"""Exercises of notebook 01, second part: what bf16 and int8 can hold."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import torch
from torch import Tensor

from grpo_edu.checks.core import Call, Exercise, Mistake, Part, call

# ---- smallest_update ----


def smallest_update(weight: float, dtype: torch.dtype) -> float:
    """The smallest power of two that changes a weight of this format when it is added."""
    before, step = torch.tensor(weight, dtype=dtype), 1.0
    while before + torch.tensor(step / 2, dtype=dtype) != before:
        step /= 2
    return step


def _some_weight(dtype: torch.dtype) -> Callable[[random.Random], Call]:
    """Weights that both formats hold exactly, between 0.004 and 0.5; in bf16 every other one has an odd last bit."""

    def draw(rng: random.Random) -> Call:
        return call(rng.randrange(128, 256) / 2.0 ** rng.randrange(9, 16), dtype)

    return draw


ONE_HALF, ODD_IN_BF16, ODD_IN_FP32 = 0.5, 173 / 2.0**10, (2.0**23 + 4321) / 2.0**25  # odd: the last bit is a 1


def _gap(weight, dtype):
    return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(weight))


def _by_subtracting(weight, dtype):
    before = torch.tensor(weight, dtype=dtype)
    return _halved(lambda step: before - torch.tensor(step, dtype=dtype) != before)


def _update_by_range(weight, dtype):
    value = torch.tensor(weight).to(dtype)
    noticed = [2.0**-k for k in range(60) if bool(value + torch.tensor(2.0**-k).to(dtype) > value)]
    return min(noticed)


def _update_by_doubling(weight, dtype):
    step = 2.0**-60
    while (torch.tensor([weight], dtype=dtype) + torch.tensor([step], dtype=dtype)).item() == weight:
        step = step * 2
    return step


def _update_by_tensor(weight, dtype):
    steps = 2.0 ** -torch.arange(60)
    sums = torch.full((60,), weight, dtype=dtype) + steps.to(dtype)
    return steps[sums != weight][-1].item()


def _update_in_python(weight, dtype):
    return _halved(lambda step: weight + step != weight)


def _update_in_float32(weight, dtype):
    return smallest_update(weight, torch.float32 if dtype == torch.bfloat16 else torch.bfloat16)


def _halved(noticed: Callable[[float], bool]) -> float:
    step = 1.0
    while noticed(step / 2):
        step /= 2
    return step


check_smallest_update = Exercise(
    "smallest_update",
    smallest_update,
    parts=(
        Part("bf16", 2, _some_weight(torch.bfloat16),
             always=tuple(call(weight, torch.bfloat16) for weight in (ONE_HALF, ODD_IN_BF16))),
        Part("fp32", 1, _some_weight(torch.float32),
             always=tuple(call(weight, torch.float32) for weight in (ONE_HALF, ODD_IN_FP32))),
    ),
    mistakes=(
        Mistake("the sum is made by Python, in 64 bits", "Make both of them tensors of this `dtype` before you add.",
                _update_in_python),
        Mistake("it is one halving too far", "The last step that *was* noticed, not the first that was not.",
                lambda weight, dtype: smallest_update(weight, dtype) / 2),
        Mistake("it stops one halving early", "Halve as long as the next smaller step is still noticed.",
                lambda weight, dtype: 2 * smallest_update(weight, dtype)),
        Mistake("that is the gap after 1", "`eps` belongs to a weight of 1. The gaps are smaller near 0.",
                lambda weight, dtype: torch.finfo(dtype).eps),
        Mistake("the step is taken away, not added", "Below 0.5 the numbers lie closer together than above it. Add.",
                _by_subtracting),
        Mistake("it is computed from the gap between neighboring numbers", "A sum in the middle between two numbers is "
                "rounded to the even one, so that every second weight notices half a gap. Add and look.", _gap,
                also=(lambda weight, dtype: weight * torch.finfo(dtype).eps,
                      lambda weight, dtype: _gap(weight, dtype) / 2)),
        Mistake("the format is not the one asked for", "`dtype` says in which format weight and step are added.",
                _update_in_float32),
    ),
    right=(_update_by_range, _update_by_doubling, _update_by_tensor),
    tolerance=0.0,
)  # fmt: skip


# ---- int8_product ----


def to_int8(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers from -127 to 127, and the scale that turns them back."""
    scale = matrix.abs().max() / 127
    return (matrix / scale).round().to(torch.int8), scale


def int8_product(left: Tensor, right: Tensor) -> Tensor:
    """The product of two matrices by way of int8, one scale a matrix."""
    (q_left, left_scale), (q_right, right_scale) = to_int8(left), to_int8(right)
    return (q_left.int() @ q_right.int()) * (left_scale * right_scale)


def _two_matrices(rng: random.Random) -> Call:
    """Random matrices; the largest entry of each, by size, is negative."""
    rows, inner, columns = rng.choice([2, 3]), rng.choice([3, 4]), 2
    made = []
    for shape in ((rows, inner), (inner, columns)):
        values = [round(rng.uniform(-0.9, 0.9), 4) for _ in range(math.prod(shape))]
        values[rng.randrange(len(values))] = -round(rng.uniform(1.2, 1.8), 4)
        made.append(torch.tensor(values).view(shape))
    return call(*made)


def _int8_by_numpy(left, right):
    scales = [abs(one.numpy()).max() / 127 for one in (left, right)]
    q_left, q_right = ((one.numpy() / scale).round() for one, scale in zip((left, right), scales, strict=True))
    return torch.tensor(q_left @ q_right * scales[0] * scales[1], dtype=torch.float32)


def _int8_by_float(left, right):
    left_scale, right_scale = left.abs().amax() / 127, right.abs().amax() / 127
    return torch.round(left / left_scale) @ torch.round(right / right_scale) * left_scale * right_scale


def _int8_by_rounding_first(left, right):
    rounded = [q.to(torch.float32) * scale for q, scale in (to_int8(left), to_int8(right))]
    return rounded[0] @ rounded[1]


def _made_with(quantize: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Callable:
    """The right product of wrong whole numbers."""

    def wrong(left, right):
        (q_left, left_scale), (q_right, right_scale) = quantize(left), quantize(right)
        return (q_left.double() @ q_right.double() * (left_scale * right_scale)).float()

    return wrong


def _with_scale(scale_of: Callable[[Tensor], Tensor]) -> Callable:
    return _made_with(lambda matrix: ((matrix / scale_of(matrix)).round(), scale_of(matrix)))


def _one_scale_for_both(left, right):
    scale = torch.maximum(left.abs().max(), right.abs().max()) / 127
    return (left / scale).round() @ (right / scale).round() * scale * scale


def _scale_a_row(left, right):
    left_scale, right_scale = left.abs().amax(1, keepdim=True) / 127, right.abs().amax(0, keepdim=True) / 127
    return (left / left_scale).round() @ (right / right_scale).round() * left_scale * right_scale


def _signed_scale(hold: Callable[[Tensor], Tensor]) -> Callable:
    """The scale of the largest number with its sign. hold: what becomes of those that are below -127."""
    return _made_with(lambda matrix: (hold((matrix / (matrix.max() / 127)).round()), matrix.max() / 127))


def _wrapped(left, right):
    (q_left, left_scale), (q_right, right_scale) = to_int8(left), to_int8(right)
    return (q_left.int() @ q_right.int()).to(torch.int8) * (left_scale * right_scale)


check_int8_product = Exercise(
    "int8_product",
    int8_product,
    parts=(Part("small matrices of both signs", 4, _two_matrices),),
    mistakes=(
        Mistake("digits are cut off, not rounded", "`.to(torch.int8)` cuts towards 0. Round before.",
                _made_with(lambda matrix: ((matrix / to_int8(matrix)[1]).trunc(), to_int8(matrix)[1]))),
        Mistake("the product overflows", "A sum of products of int8 does not fit into int8: multiply as `.int()`.",
                _wrapped),
        Mistake("only one scale is put back", "Each matrix was divided by its own scale.",
                lambda left, right: int8_product(left, right) / to_int8(right)[1],
                also=(lambda left, right: int8_product(left, right) / to_int8(left)[1],)),
        Mistake("both matrices have the same scale", "For each matrix by itself: how large is *its* largest number?",
                _one_scale_for_both),
        Mistake("each row or column has a scale of its own", "One scale a matrix is asked for here.", _scale_a_row),
        Mistake("no scale is put back", "What turns whole numbers into the numbers that they stand for?",
                lambda left, right: (to_int8(left)[0].float() @ to_int8(right)[0].float())),
        Mistake("the largest number is taken with its sign", "The largest by *size*: −1.5 is larger than 0.9.",
                _signed_scale(lambda whole: whole),
                also=(_signed_scale(lambda whole: whole.to(torch.int8)),
                      _signed_scale(lambda whole: whole.clamp(-127, 127)))),
        Mistake("the largest number becomes 255", "int8 has a sign: the largest whole number here is 127.",
                _with_scale(lambda matrix: matrix.abs().max() / 255)),
        Mistake("nothing was rounded", "That is the exact product. The point is to multiply whole numbers.",
                lambda left, right: left @ right),
    ),
    right=(_int8_by_numpy, _int8_by_float, _int8_by_rounding_first),
)  # fmt: skip
