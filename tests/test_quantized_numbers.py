"""Quantization of numbers: values worked out by hand, and properties that hold for any tensor."""

from dataclasses import FrozenInstanceError

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from grpo_edu.quantization.numbers import QuantizedTensor, in_groups, quantize, relative_error

quick = settings(max_examples=60)


@st.composite
def tensors(draw):
    """Rows of 8 numbers of very different sizes, some of them 0."""
    rows = draw(st.integers(1, 4))
    exponents = draw(st.lists(st.integers(-12, 12), min_size=rows, max_size=rows))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(rows, 8, generator=generator) * torch.tensor([2.0**e for e in exponents])[:, None]
    offset = draw(st.floats(-4, 4))
    return (x + offset) * (torch.rand(rows, 8, generator=generator) > draw(st.sampled_from([0.0, 0.3, 1.0])))


layouts = st.sampled_from([{}, {"dim": 0}, {"dim": 1}, {"dim": -1}, {"group_size": 4}, {"group_size": 8}])
ways = {"bits": st.integers(2, 8), "symmetric": st.booleans(), "layout": layouts}


def steps(parts: QuantizedTensor) -> torch.Tensor:
    """The scale of each number, in the shape of q."""
    return parts.scale.expand(in_groups(parts.q, parts.group_size).shape).reshape(parts.q.shape)


@quick
@given(x=tensors(), **ways)
def test_no_number_moves_by_more_than_half_a_step(x, bits, symmetric, layout):
    parts = quantize(x, bits=bits, symmetric=symmetric, **layout)
    assert ((x - parts.dequantize()).abs() <= steps(parts) * (0.5 + 1e-4)).all()


@quick
@given(x=tensors(), **ways)
def test_zero_stays_exactly_zero(x, bits, symmetric, layout):
    parts = quantize(x, bits=bits, symmetric=symmetric, **layout)
    assert (parts.dequantize()[x == 0] == 0).all()


@quick
@given(x=tensors(), **ways)
def test_what_lies_on_the_grid_stays_where_it_is(x, bits, symmetric, layout):
    parts = quantize(x, bits=bits, symmetric=symmetric, **layout)
    once = parts.dequantize()
    again = in_groups(once, parts.group_size) / parts.scale + parts.zero_point
    assert torch.equal(again.round().view(x.shape), parts.q.float())
    if symmetric:  # the grid found again is the same
        assert_close(quantize(once, bits=bits, **layout).dequantize(), once, rtol=1e-5, atol=0.0)


@quick
@given(x=tensors(), **ways)
def test_integers_stay_in_their_bits(x, bits, symmetric, layout):
    parts = quantize(x, bits=bits, symmetric=symmetric, **layout)
    low, high = (-(2 ** (bits - 1)) + 1, 2 ** (bits - 1) - 1) if symmetric else (0, 2**bits - 1)
    assert low <= parts.q.min() and parts.q.max() <= high
    assert torch.equal(parts.zero_point, parts.zero_point.round()) and (parts.scale > 0).all()


@quick
@given(x=tensors(), symmetric=st.booleans(), layout=layouts, power=st.integers(-6, 6))
def test_a_power_of_two_for_everything_changes_no_integer(x, symmetric, layout, power):
    one, other = (quantize(part, symmetric=symmetric, **layout) for part in (x, x * 2.0**power))
    assert torch.equal(one.q, other.q)


def test_affine_by_hand():
    # From −1 to 2 in 15 steps of 0.2: zero is the fifth of them.
    parts = quantize(torch.tensor([-1.0, 0.0, 0.5, 2.0]), bits=4, symmetric=False)
    assert_close(parts.scale.item(), 0.2)
    assert parts.zero_point.item() == 5
    assert parts.q.tolist() == [0, 5, 7, 15]  # 0.5 is 2.5 steps above zero; a half goes to the even one
    assert_close(parts.dequantize(), torch.tensor([-1.0, 0.0, 0.4, 2.0]))


def test_symmetric_by_hand():
    parts = quantize(torch.tensor([-1.0, 0.0, 0.6, 2.1]), bits=4)
    assert_close(parts.scale.item(), 0.3)  # 2.1 is seven steps
    assert parts.q.tolist() == [-3, 0, 2, 7]  # −1 is 3.33 steps


def test_one_scale_for_whom_by_hand():
    """The largest number of whatever shares a scale is 127 steps of it."""
    x = torch.tensor([[-2.54, 0.0], [1.27, 0.127]])
    for layout, expected in (
        ({}, [[0.02]]),
        ({"dim": 0}, [[0.02], [0.01]]),
        ({"dim": -2}, [[0.02], [0.01]]),
        ({"dim": 1}, [[0.02, 0.001]]),
        ({"dim": -1}, [[0.02, 0.001]]),
        ({"group_size": 2}, [[[0.02]], [[0.01]]]),
        ({"group_size": 1}, [[[0.02], [1.0]], [[0.01], [0.001]]]),  # zeros take any step: 1
    ):
        assert_close(quantize(x, **layout).scale, torch.tensor(expected), msg=str(layout))
    row = torch.tensor([-2.54, 0.5, 0.127, 0.0])
    assert quantize(row, dim=0).q.tolist() == [-127, 127, 127, 0]
    assert_close(quantize(row, group_size=2).scale, torch.tensor([[0.02], [0.001]]))
    assert quantize(row[None, None], group_size=2).q.tolist() == [[[-127, 25, 127, 0]]]


def test_rounding_never_leaves_the_bits():
    """From −1.5 to 1.5 in 3 steps of 1, zero is 1.5 steps up, so it goes to the second, and 1.5 two further."""
    parts = quantize(torch.tensor([-1.5, 1.5]), bits=2, symmetric=False)
    assert (parts.bits, parts.zero_point.item(), parts.q.tolist()) == (2, 2, [0, 3])
    # 190/127 of the smallest number there is becomes that number itself, so that 190 steps would be needed
    assert quantize(torch.tensor([-190.0, 190.0]) * 2.0**-149).q.tolist() == [-127, 127]


def test_whole_numbers_of_any_kind_are_subtracted_without_wrapping_around():
    q, zero_point = torch.tensor([3, 7], dtype=torch.uint8), torch.tensor(5, dtype=torch.uint8)
    parts = QuantizedTensor(q, torch.tensor(0.5), zero_point, bits=4)
    assert parts.dequantize().tolist() == [-1.0, 1.0]
    with pytest.raises(FrozenInstanceError):
        parts.bits = 8


def test_numbers_on_one_side_get_a_grid_there():
    parts = quantize(torch.tensor([1.0, 2.0, 3.0]), bits=2, symmetric=False)
    assert parts.zero_point.item() == 0 and parts.q.tolist() == [1, 2, 3]
    parts = quantize(torch.tensor([-1.0, -2.0, -3.0]), bits=2, symmetric=False)
    assert parts.zero_point.item() == 3 and parts.q.tolist() == [2, 1, 0]


def test_one_outlier_costs_its_own_row_only():
    x = torch.tensor([[0.1, -0.2, 0.3, 0.4], [0.1, 0.2, -0.3, 100.0]])
    assert quantize(x).q[0].abs().max() <= 1  # one grid for all: nothing is left of the first row
    assert_close(quantize(x, dim=0).dequantize()[0], x[0], rtol=0.02, atol=0.0)
    assert_close(quantize(x, group_size=2).dequantize()[1, :2], x[1, :2], rtol=0.02, atol=0.0)


def test_a_bit_more_halves_the_error():
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    errors = [relative_error(x, quantize(x, bits=bits, dim=0).dequantize()) for bits in range(4, 9)]
    assert all(1.8 < coarse / fine < 2.4 for coarse, fine in zip(errors, errors[1:], strict=False))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 1}, "bits.* 2 to 8, got 1"),
        ({"bits": 9}, "bits.* 9"),
        ({"dim": 2}, "dim.* 2"),
        ({"dim": 0, "group_size": 2}, "group_size.*dim"),
        ({"group_size": 3}, "group_size.* 3"),
        ({"group_size": 0}, "group_size.* 0"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        quantize(torch.ones(2, 4), **options)


@pytest.mark.parametrize(
    "bad", [torch.tensor([1.0, number]) for number in (torch.nan, torch.inf, -torch.inf)] + [torch.tensor([torch.inf])]
)
def test_numbers_without_end_are_refused(bad):
    with pytest.raises(ValueError, match="x .*NaN"):
        quantize(bad)
    with pytest.raises(ValueError, match="x .*floating-point"):
        quantize(torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="x .*floating-point"):
        quantize(torch.empty(0))


def test_relative_error_by_hand():
    assert relative_error(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.0])) == 0.0
    assert relative_error(torch.tensor([3.0, 4.0]), torch.zeros(2)) == 1.0
    with pytest.raises(ValueError, match="x .*zeros"):
        relative_error(torch.zeros(2), torch.ones(2))
    with pytest.raises(ValueError, match="approximation: .*shape"):
        relative_error(torch.ones(2), torch.ones(1))
