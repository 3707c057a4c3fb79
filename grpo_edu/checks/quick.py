"""Immediate feedback on a short answer in a notebook: the *Your turn* at the end of each section."""

from __future__ import annotations

import math
from typing import Any

from grpo_edu.checks.compare import OTHER, difference, shown


def your_turn(answer: Any, expected: Any, hint: str = "", tolerance: float = 1e-3) -> None:
    """Print whether a short answer is right, and how far off it is if not.

    answer: the student's; None, also inside a list, means that it is still missing. expected: the right answer: a
    number, a text, a list or a tensor. tolerance: how much a number may differ, absolute or relative. Lists, tuples,
    arrays and tensors with the same values count as equal, and so do texts that differ only in case.

    >>> your_turn(None, 0.5)
    Not answered yet: replace None by your answer and run this cell again.
    >>> your_turn(0.5, 0.5)
    Correct: 0.5
    >>> your_turn(0.25, 0.5, hint="Divide by the number of right answers.")
    Not yet: 0.25 is 2 times too small. Hint: Divide by the number of right answers.
    """
    given, wanted = _plain(answer), _plain(expected)
    if _is_missing(given):
        print("Not answered yet: replace None by your answer and run this cell again.")
    elif not (found := _difference(given, wanted, tolerance)):
        print(f"Correct: {shown(given)}")
    else:
        print(f"Not yet: {found}." + (f" Hint: {hint}" if hint else ""))


def _plain(value: Any) -> Any:
    """A tensor or an array as a list, a tuple as a list, a text without case; everything else as it is."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, str):
        return value.strip().casefold()
    return [_plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def _is_missing(value: Any) -> bool:
    return value is None or value is ... or (isinstance(value, list) and any(_is_missing(entry) for entry in value))


def _difference(given: Any, wanted: Any, tolerance: float) -> str | None:
    """What is wrong with an answer, in words, or None where it is right."""
    found = difference(given, wanted, tolerance)
    if found == OTHER:
        return f"{shown(given)} is not the answer"
    is_number = isinstance(given, (int, float)) and math.isfinite(given)
    return f"{shown(given)}{found.removeprefix('it')}" if found and is_number else found
