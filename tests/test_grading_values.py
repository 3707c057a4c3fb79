"""Values on their way from a student's process to the judge: the same again, or nothing that could deceive."""

import json
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from classroom.values import MOST_NUMBERS, decode, encode
from grpo_edu.checks.compare import difference, kind

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=12,
)


def crossed(value):
    return decode(json.loads(json.dumps(encode(value))))


@given(PLAIN)
def test_plain_values_cross_unchanged(value):
    after = crossed(value)
    assert after == value and type(after) is type(value)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3), (4,)])
def test_tensors_keep_dtype_shape_and_numbers(dtype, shape):
    value = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape).to(dtype)
    after = crossed(value)
    assert after.dtype == dtype and after.shape == value.shape and torch.equal(after, value)


def test_a_strided_view_with_a_gradient_crosses_as_its_numbers():
    value = torch.arange(12.0).reshape(3, 4).requires_grad_().T[1:]
    after = crossed(value)
    assert not after.requires_grad and torch.equal(after, value.detach())


def test_nan_and_infinity_cross():
    after = crossed([float("nan"), float("inf"), torch.tensor([float("nan")])])
    assert math.isnan(after[0]) and after[1] == math.inf and after[2].isnan().all()


@pytest.mark.parametrize("value", [np.arange(6.0).reshape(2, 3).T, np.array(3), np.array([True]), np.float16([1, 2])])
def test_arrays_cross_as_arrays(value):
    after = crossed(value)
    assert isinstance(after, np.ndarray) and after.dtype == value.dtype and after.shape == value.shape
    assert (after == value).all()


def test_arrays_of_objects_do_not_cross():
    assert kind(crossed(np.array([object()]))) == kind(crossed(np.array(["a"]))) == "a ndarray"


def test_numbers_of_other_kinds_count_as_numbers():
    assert crossed((np.float32(0.5), np.int64(3), np.bool_(True), Fraction(1, 4))) == (0.5, 3, True, 0.25)


def test_what_does_not_cross_equals_nothing_but_keeps_its_name():
    class Yes:
        def __eq__(self, other):
            return True

        def __repr__(self):
            return "<anything>"

    after = crossed(Yes())
    assert difference(after, 3.0) == "it is a Yes, not a number" and repr(after) == "<anything>"
    assert kind(crossed({1, 2})) == "a set" and crossed({1, 2}) != {1, 2}
    assert difference(crossed(np.ones(2)), [1.0, 1.0]) == "it is a numpy array, not a list"


def test_subclasses_arrive_as_what_they_are_based_on():
    class Liar(float):
        def __eq__(self, other):
            return True

        __hash__ = float.__hash__

    assert type(crossed(Liar(7))) is float and crossed([Liar(7)]) != [8.0]


def test_a_repr_that_raises_does_no_harm():
    class Broken:
        def __repr__(self):
            raise RuntimeError

    assert "Broken" in repr(crossed(Broken()))


def test_too_large_or_too_deep_is_cut_off():
    deep = []
    for _ in range(100):
        deep = [deep]
    text = json.dumps(encode(deep))
    assert len(text) < 2000 and "other" in text
    assert "other" in encode(torch.zeros(MOST_NUMBERS + 1)) and "other" in encode("x" * 10**6)
    assert "other" in encode(10**400)


@pytest.mark.parametrize(
    "content",
    [
        {"tensor": ["float32", [2], "AAAA"]},
        {"tensor": ["float32", [-1], ""]},
        {"tensor": ["object", [1], "AAAAAAAA"]},
        {"tensor": ["float32", [10**12], ""]},
        {"tensor": ["float32", [2**63 - 1, 0], ""]},
        {"tensor": ["float32", [1], "not base64!"]},
        {"tensor": ["float32", 3, "AAAA"]},
        {"dict": [[1, 2, 3]]},
        {"dict": [[{"list": []}, 1]]},
        {"other": [1, 2]},
        {"list": 3},
        {"points": [19]},
        {"list": [], "tuple": []},
        [1, 2],
    ],
)
def test_what_nobody_wrote_is_refused(content):
    with pytest.raises(ValueError, match=r"."):
        decode(content)


def test_a_million_kinds_of_values_are_few_classes():
    found = decode({"list": [{"other": [f"kind {number}", ""]} for number in range(3000)]})
    assert len({type(one) for one in found}) <= 1001
