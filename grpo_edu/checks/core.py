"""Define an exercise, and check an answer to it.

A mistake is recognized by its results: each exercise holds wrong functions that students really write. An answer that
returns the same as one of them on all inputs of a part has made the same mistake, however it is written.
"""

from __future__ import annotations

import copy
import os
import random
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from grpo_edu.checks.compare import difference, kind, shown
from grpo_edu.checks.feedback import Feedback, PartResult

SEED_VARIABLE = "GRPO_EDU_CHECK_SEED"


@dataclass(frozen=True)
class Call:
    """One set of arguments. ask: calls the function with them, when the check needs more than its return value."""

    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    ask: Callable[..., Any] | None = None

    def text(self) -> str:
        """The arguments as they would be typed, a number with more digits than fp32 has."""
        named = [f"{name}={shown(value, digits=12)}" for name, value in self.kwargs.items()]
        return ", ".join([*(shown(value, digits=12) for value in self.args), *named])


def call(*args: Any, **kwargs: Any) -> Call:
    """A `Call`, written like the call itself."""
    return Call(args, kwargs)


@dataclass(frozen=True)
class Part:
    """One graded part of an exercise.

    name: what the part is about. points: what it is worth. draw: makes one random input; an answer is tried on `draws`
    of them. always: further inputs on which it is always tried, such as a number on a border.
    """

    name: str
    points: int
    draw: Callable[[random.Random], Call]
    draws: int = 4
    always: tuple[Call, ...] = ()

    @property
    def tries(self) -> int:
        """The number of inputs on which an answer is tried."""
        return self.draws + len(self.always)


@dataclass(frozen=True)
class Mistake:
    """A wrong answer that students write: a hint that does not give the solution away, and the function.

    also: other functions that make the same mistake but return something else.
    """

    hint: str
    wrong: Callable
    also: tuple[Callable, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """The result of a call. value: what it returned, unless there is a `problem`. changed: it modified its input."""

    value: Any = None
    problem: str = ""
    detail: str = ""
    changed: bool = False

    def same_as(self, other: Outcome, tolerance: float) -> bool:
        """Whether two calls had the same result."""
        if self.problem or other.problem:
            return self.problem == other.problem
        return self.changed == other.changed and not difference(self.value, other.value, tolerance)


@dataclass(frozen=True)
class Exercise:
    """A function for the student to write, and what is needed to check it.

    reference: a right answer, whose name is that of the exercise. parts: what is graded. mistakes: from the name of
    each common mistake to a wrong answer that makes it, at least four. tolerance: absolute and relative, for results.
    """

    reference: Callable
    parts: tuple[Part, ...]
    mistakes: dict[str, Mistake]
    tolerance: float = 1e-5

    @property
    def name(self) -> str:
        """The name of the exercise and of the function to write."""
        return self.reference.__name__

    @property
    def max_points(self) -> int:
        """The sum of the points of all parts."""
        return sum(part.points for part in self.parts)

    def __call__(self, answer: Callable, *, seed: int | None = None) -> Feedback:
        """Check an answer.

        Args:
            answer: the student's function.
            seed: of the random inputs. With None it is read from the environment variable GRPO_EDU_CHECK_SEED; if that
                is not set either, every check draws new inputs.
        """
        if not callable(answer):
            raise TypeError(
                f"`answer` must be the function itself, got {answer!r}. Write check_{self.name}({self.name}), "
                f"without calling {self.name}."
            )
        if seed is None:
            seed = int(os.environ.get(SEED_VARIABLE) or int.from_bytes(os.urandom(4)))
        parts = []
        for part in self.parts:
            calls = self.calls(part, seed)
            parts.append(self.judge(part, calls, [attempt(answer, one) for one in calls]))
        return Feedback(self.name, tuple(parts), seed)

    def calls(self, part: Part, seed: int) -> list[Call]:
        """The inputs of a part; the same seed gives the same inputs."""
        rng = random.Random(f"{seed} {self.name} {part.name}")
        return [*(part.draw(rng) for _ in range(part.draws)), *part.always]

    def judge(self, part: Part, calls: Sequence[Call], found: Sequence[Outcome]) -> PartResult:
        """Grade one part. found: the outcome of the answer on each of the calls, from this or another process."""
        expected = [attempt(self.reference, one) for one in calls]
        wrong = [
            place
            for place, (one, other) in enumerate(zip(found, expected, strict=True))
            if not one.same_as(other, self.tolerance)
        ]
        if not wrong:
            return PartResult(part.name, part.points, part.points)
        name, hint = self._name_mistake(calls, expected, found)
        place = self._telling(name, calls, found, wrong)
        return PartResult(
            part.name,
            0,
            part.points,
            given=calls[place].text(),
            expected=_said(expected[place]),
            got=_said(found[place]),
            why=self._why(found[place], expected[place]),
            mistake=name,
            hint=hint,
        )

    def _why(self, found: Outcome, expected: Outcome) -> str:
        if found.problem or expected.problem:
            return found.detail or "no error was raised"
        if found.changed and not expected.changed:
            return "the input was changed"
        return difference(found.value, expected.value, self.tolerance) or "the input was not changed"

    def _name_mistake(
        self, calls: Sequence[Call], expected: Sequence[Outcome], found: Sequence[Outcome]
    ) -> tuple[str, str]:
        if any(one.problem == "NotImplementedError" for one in found):
            return "not written yet", f"Write the body of {self.name} and take `raise NotImplementedError` out."
        if all(one.value is None and not one.problem for one in found) and expected[0].value is not None:
            return "nothing is returned", "Is there a `return` with the result, in every branch?"
        for name, mistake in self.mistakes.items():
            for wrong in (mistake.wrong, *mistake.also):
                theirs = (attempt(wrong, one) for one in calls)
                if all(one.same_as(other, self.tolerance) for one, other in zip(found, theirs, strict=True)):
                    return name, mistake.hint
        if any(one.changed for one in found) and not any(one.changed for one in expected):
            return "the input is changed in place", "Compute a new value; leave what was handed in as it is."
        return "", ""

    def _telling(self, name: str, calls: Sequence[Call], found: Sequence[Outcome], wrong: list[int]) -> int:
        """The failed input to show: the first one on which the fewest other mistakes give the same result."""
        if name not in self.mistakes:
            return wrong[0]
        others = [mistake.wrong for other, mistake in self.mistakes.items() if other != name]

        def alike(place: int) -> int:
            return sum(found[place].same_as(attempt(other, calls[place]), self.tolerance) for other in others)

        return min(wrong, key=alike)


def attempt(function: Callable, one: Call) -> Outcome:
    """Call a function on copies of the arguments; an exception from the student's code becomes part of the outcome."""
    args, kwargs = copy.deepcopy(one.args), copy.deepcopy(one.kwargs)
    try:
        with torch.random.fork_rng(devices=[]):
            value = one.ask(function, *args, **kwargs) if one.ask else function(*args, **kwargs)
    except Exception as error:  # the code is not ours: its failure is what we report
        return Outcome(problem=type(error).__name__, detail=_where(error))
    changed = bool(difference(list(args), list(one.args)) or difference(kwargs, one.kwargs))
    return Outcome(value, changed=changed)


def _where(error: Exception) -> str:
    """The error, with the line of the student's code that raised it."""
    ours = os.path.dirname(__file__)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(ours)]
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    line = frames[0].line if frames else ""
    return f"{text}, at `{line}`" if line else text


def _said(outcome: Outcome) -> str:
    if outcome.problem:
        return f"raises {outcome.problem}"
    return shown(outcome.value) if outcome.value is not None else kind(None)
