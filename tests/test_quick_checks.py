"""The feedback on a notebook's short questions."""

import math

import numpy as np
import pytest
import torch

from grpo_edu.checks import your_turn


def said(capsys, *args, **kwargs):
    assert your_turn(*args, **kwargs) is None
    return capsys.readouterr().out


@pytest.mark.parametrize("answer", [None, ..., [None, 1.0], (0.5, None)])
def test_a_missing_answer_is_not_a_wrong_one(capsys, answer):
    assert said(capsys, answer, 0.5, hint="halve it").startswith("Not answered yet")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (0.5004, 0.5),
        (1, 1.0),
        (torch.tensor(0.5), 0.5),
        (np.float64(0.5), 0.5),
        ([1, 0], torch.tensor([1.0, 0.0])),
        (torch.tensor([1.0, 0.0]), [1, 0]),
        ((0.1, 0.2), [0.1, 0.2]),
        (np.array([[1.0], [2.0]]), [[1.0], [2.0]]),
        (" DAPO ", "dapo"),
        ({"a": 1}, {"a": 1}),
        (True, True),
    ],
)
def test_right_answers_in_many_types(capsys, answer, expected):
    assert said(capsys, answer, expected, hint="no").startswith("Correct: ")


@pytest.mark.parametrize(
    ("answer", "expected", "words"),
    [
        (0.75, 0.5, ["0.75 is too high"]),
        (0.25, 0.5, ["0.25 is too small"]),
        (50.0, 0.5, ["50 is 100 times too large"]),
        (0.52, 0.5, ["too high"]),
        ("0.5", 0.5, ["a string", "not a number"]),
        ([0.5], 0.5, ["a list", "not a number"]),
        ([1.0, 2.0], [1.0, 3.0], ["[1]"]),
        ([1.0], [1.0, 3.0], ["1 entry", "2"]),
        ("grpo", "dapo", ["'grpo'"]),
        (math.nan, 0.5, ["NaN"]),
        (lambda: 1, 0.5, ["not a number"]),
    ],
)
def test_wrong_answers_hear_how_far_off_they_are_and_the_hint(capsys, answer, expected, words):
    text = said(capsys, answer, expected, hint="look again")
    assert text.startswith("Not yet: ") and "look again" in text
    assert all(word in text for word in words), text


def test_the_tolerance_is_kept(capsys):
    assert said(capsys, 0.52, 0.5, tolerance=0.05).startswith("Correct")
    assert "Hint" not in said(capsys, 0.52, 0.5)


def test_an_object_that_refuses_to_be_compared_raises_nothing(capsys):
    class Sulky:
        def __eq__(self, other):
            raise TypeError("no")

        __hash__ = None

    assert said(capsys, Sulky(), {1, 2}).startswith("Not yet: ")
    assert said(capsys, float, [1, 2]).startswith("Not yet: ")
