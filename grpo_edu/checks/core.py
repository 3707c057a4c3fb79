"""Define an exercise, and check an answer to it.

A mistake is recognized by its results: each exercise holds wrong functions that students really write. An answer that
returns the same as one of them on all inputs of all parts has made the same mistake, however it is written. Where this
holds in one part only, the feedback says no more than that. `slips` knows the mistakes that any exercise may see.

Most wrong functions differ from the right one in one expression, so an exercise lists the differences
(`parse_mistakes`).
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import os
import random
import re
import sys
import sysconfig
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from threading import Timer
from typing import Any

import torch

from grpo_edu.checks import slips
from grpo_edu.checks.compare import LINE, Outcome, difference, kind, shown, shown_apart
from grpo_edu.checks.feedback import Feedback, PartResult
from grpo_edu.checks.inputs import FIRST

SEED_VARIABLE, CREDIT_VARIABLE = "GRPO_EDU_CHECK_SEED", "GRPO_EDU_SLIP_CREDIT"
SLIP_CREDIT = 0.5  # the share of its points that a part earns if one named slip explains all that is wrong
SEVERAL = "faults are left"  # in the name of a mistake that is more than a single slip, and earns nothing
PATIENCE = 10.0  # seconds until a check says on which input the answer is still at work


@dataclass(frozen=True)
class Call:
    """One set of arguments.

    ask: calls the function with them, when the check needs more than its return value. says: what a student reads, when
    the arguments themselves say too little.
    """

    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    ask: Callable[..., Any] | None = None
    says: str = ""

    def text(self, names: Sequence[str] = ()) -> str:
        """Return the arguments as they would be typed, a number with more digits than fp32 has.

        names: of those without a keyword. Where an argument takes several lines, each begins one.
        """
        if self.says:
            return self.says
        starts = [f"{name}=" for name in names[: len(self.args)]] or [""] * len(self.args)
        pairs = [*zip(starts, self.args, strict=True), *((f"{name}=", value) for name, value in self.kwargs.items())]
        texts = [start + shown(value, digits=12).replace("\n", "\n" + " " * len(start)) for start, value in pairs]
        return (",\n" if any("\n" in text for text in texts) else ", ").join(texts)


def call(*args: Any, **kwargs: Any) -> Call:
    """Return a `Call`, written like the call itself."""
    return Call(args, kwargs)


@dataclass(frozen=True)
class Part:
    """One graded part of an exercise.

    name: what the part is about. points: what it is worth. draw: makes one random input; an answer is tried on `draws`
    of them, half of which are the same for every seed, so that no mistake is found by luck only. always: further inputs
    on which it is always tried, such as a number on a border. ask: as in `Call`, for all of its inputs.
    """

    name: str
    points: int
    draw: Callable[[random.Random], Call]
    draws: int = 4
    always: tuple[Call, ...] = ()
    ask: Callable[..., Any] | None = None

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


def changed(function: Callable, change: str) -> Callable:
    """Return a function that differs from this one in an expression, ``old -> new``, or has another result, ``new``.

    What is new may use the arguments and whatever the function's module holds, the function itself as well. Two
    expressions that change together are written ``old -> new; old -> new``.

    >>> from grpo_edu.checks.feedback import plain_number
    >>> changed(plain_number, "round(points, 2) -> round(points)")(1.75)
    2
    >>> changed(plain_number, "2 * plain_number(points)")(1.75)
    3.5
    """
    head, body = _head_and_body(function)
    for one in change.split("; "):
        old, arrow, new = one.partition(" -> ")
        if not arrow:
            body = f"    return {one}"
        elif body.count(old) == 1:
            body = body.replace(old, new)
        else:
            raise ValueError(f"`{old}` is {body.count(old)} times in {function.__name__}; it must be there once")
    made: dict[str, Callable] = {}
    exec(f"{head}\n{body}", function.__globals__, made)
    return made[function.__name__]


@functools.cache
def _head_and_body(function: Callable) -> tuple[str, str]:
    """Return the source of a function before and after its docstring."""
    source = inspect.getsource(function)
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.FunctionDef)
    docstring, body = definition.body[:2]
    lines = source.splitlines()
    return "\n".join(lines[: docstring.lineno - 1]), "\n".join(lines[body.lineno - 1 :])


def parse_mistakes(text: str, reference: Callable) -> dict[str, Mistake]:
    """Return the mistakes that a text lists, by name.

    A mistake is a line ``name: old -> new`` or ``name: new``, as in `changed`, and its indented hint. A long change may
    be in the line below its name, and continues after a line that ends with a semicolon. An indented line
    ``or: old -> new`` adds another way to make the mistake.
    """
    found = {}
    for entry in re.split(r"\n(?=\S)", textwrap.dedent(text).strip()) if text else ():
        first, *lines = [line.strip() for line in entry.splitlines()]
        name, change = first.split(":", 1)
        changes = [change.strip() or lines.pop(0)]
        while changes[0].endswith(";"):
            changes[0] += " " + lines.pop(0)
        changes += [line.removeprefix("or: ") for line in lines if line.startswith("or: ")]
        hint = " ".join(line for line in lines if not line.startswith("or: "))
        wrong, *also = [changed(reference, one) for one in changes]
        found[name] = Mistake(hint, wrong, tuple(also))
    return found


NOT_TRIED = Outcome(problem="not tried", detail="the answer was interrupted on an earlier input")


@dataclass(frozen=True, eq=False)
class Exercise:
    """A function for the student to write, and what is needed to check it.

    reference: a right answer, whose name is that of the exercise. parts: what is graded. mistakes: from the name of
    each common mistake to a wrong answer that makes it, at least four. tolerance: absolute and relative, for results.
    changes: the mistakes as a text, see `parse_mistakes`; they come first. excerpt: a part of a call with a long
    input, the expected value and another one, the part that differs, as three texts; None if all is to be shown.
    """

    reference: Callable
    parts: tuple[Part, ...]
    mistakes: dict[str, Mistake] = field(default_factory=dict)
    tolerance: float = 1e-5
    changes: str = ""
    excerpt: Callable[[Call, Any, Any], tuple[str, str, str] | None] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "mistakes", parse_mistakes(self.changes, self.reference) | self.mistakes)

    @property
    def name(self) -> str:
        """The name of the exercise and of the function to write."""
        return self.reference.__name__

    @functools.cached_property
    def arguments(self) -> list[str]:
        """The names of the function's arguments."""
        return list(inspect.signature(self.reference).parameters)

    @property
    def max_points(self) -> int:
        """The sum of the points of all parts."""
        return sum(part.points for part in self.parts)

    def __call__(self, answer: Callable, *, seed: int | None = None) -> Feedback:
        """Check an answer.

        Args:
            answer: the student's function.
            seed: seed of the inputs. With None it is read from the environment variable GRPO_EDU_CHECK_SEED; if that
                is not set either, every check draws new inputs.

        GRPO_EDU_SLIP_CREDIT, from 0 to below 1, is the share of the points that a single named slip earns.
        """
        if not callable(answer):
            raise TypeError(
                f"`answer` must be the function itself, got {answer!r}. Write check_{self.name}({self.name}), "
                f"without calling {self.name}."
            )
        if seed is None:
            seed = int(os.environ.get(SEED_VARIABLE) or int.from_bytes(os.urandom(4)))
        with redirect_stderr(sys.stdout):  # nbgrader gives no points to a cell with anything on stderr, as warnings are
            found = self._ask(answer, seed)
            return self.judge(found, seed, slip_credit(), slips.notebook_variable(answer))

    def _ask(self, answer: Callable, seed: int) -> list[list[Outcome]]:
        """Return the outcomes in each part, on the inputs of a seed."""
        return self._outcomes(answer, trial(self, seed).calls)

    def _outcomes(self, answer: Callable, parts: Sequence[Sequence[Call]]) -> list[list[Outcome]]:
        """Return the outcomes on the inputs of each part; an answer that the student interrupts is not asked again."""
        found: list[list[Outcome]] = []
        stopped = False
        with _patience(self.name) as now_at:
            for calls in parts:
                found.append([])
                for one in calls:
                    now_at.append(one)
                    found[-1].append(NOT_TRIED if stopped else attempt(answer, one))
                    stopped = stopped or found[-1][-1].problem == "KeyboardInterrupt"
        return found

    def student_in(self, outcome: Outcome) -> str:
        """Return the name of the student whose inputs an answer is about; "" if all students have the same inputs."""
        return ""

    def calls(self, part: Part, seed: int) -> list[Call]:
        """Return the inputs of a part, those last that every seed has; the same seed gives the same inputs."""
        rng = random.Random(f"{seed} {self.name} {part.name}")
        drawn = [part.draw(rng) for _ in range(part.draws - part.draws // 2)]
        return [*(replace(one, ask=part.ask or one.ask) for one in drawn), *self.always(part)]

    def always(self, part: Part) -> list[Call]:
        """Return the inputs of a part on which an answer is tried whatever the seed."""
        rng = random.Random(f"{self.name} {part.name}")
        calls = [*(part.draw(rng) for _ in range(part.draws // 2)), *part.always]
        return [replace(one, ask=part.ask or one.ask) for one in calls]

    def judge(
        self, found: Sequence[Sequence[Outcome]], seed: int, credit: float = SLIP_CREDIT, variable: str = ""
    ) -> Feedback:
        """Grade an answer.

        Args:
            found: for each part the outcomes on the calls of this seed, from this or another process.
            seed: seed of the inputs.
            credit: the share of the points for a part, if one named slip explains all parts.
            variable: a variable of the notebook that the answer reads.
        """
        drawn = trial(self, seed)
        all_found, expected = [*chain(*found)], [*chain(*drawn.expected)]
        everywhere = drawn.mistake(found, range(len(self.parts))) or slips.wrong_form(
            expected, all_found, self.tolerance
        )
        idle = None
        if slips.is_constant(all_found, expected):
            idle = slips.CONSTANT
        elif drawn.echoes(all_found, expected):
            idle = slips.ECHO
        if not everywhere or SEVERAL in everywhere.name or idle:
            credit = 0.0
        parts = []
        for number, part in enumerate(self.parts):
            failed = drawn.failed(found, number)
            if not failed and idle:  # right by luck
                parts.append(PartResult(part.name, 0, part.points, mistake=idle.name, hint=idle.hint))
                continue
            if not failed:
                parts.append(PartResult(part.name, part.points, part.points))
                continue
            fact = slips.fact(found[number], drawn.expected[number])
            named = (fact if fact and fact.first else None) or everywhere or fact
            named = named or slips.elsewhere(all_found, expected, variable)
            certain = named is not None and not (named is everywhere and drawn.is_ambiguous(found))
            named = named or drawn.mistake(found, [number])
            place = drawn.telling(named.name if named else "", found, number, failed)
            one, other = found[number][place], drawn.expected[number][place]
            texts = drawn.calls[number][place].text(self.arguments), *self._said(other, one)
            if self.excerpt and not one.problem:
                texts = self.excerpt(drawn.calls[number][place], other.value, one.value) or texts
            parts.append(
                PartResult(
                    part.name,
                    round(credit * part.points, 2),
                    part.points,
                    given=texts[0],
                    expected=texts[1],
                    got=texts[2],
                    why=self._why(one, other),
                    mistake=named.name if named else "",
                    hint=named.hint if named else "",
                    certain=certain,
                )
            )
        return Feedback(self.name, tuple(parts), seed)

    def _why(self, found: Outcome, expected: Outcome) -> str:
        if found.problem or expected.problem:
            return found.detail or "no error was raised"
        if found.changed and not expected.changed:
            return "the input was changed"
        why = difference(found.value, expected.value, self.tolerance) or "the input was not changed"
        return why.replace(FIRST, self.arguments[0])

    def _said(self, *outcomes: Outcome) -> list[str]:
        """Return what two calls came to; a gradient with the name of its argument."""
        key = slips.GRADIENT + FIRST
        gradients = [isinstance(one.value, dict) and one.value.keys() == {key} for one in outcomes]
        values = [
            one.value[key] if is_gradient else one.value for one, is_gradient in zip(outcomes, gradients, strict=True)
        ]
        said = []
        for outcome, is_gradient, text in zip(outcomes, gradients, shown_apart(*values), strict=True):
            if outcome.problem:
                said.append(outcome.problem if outcome is NOT_TRIED else f"raises {outcome.problem}")
            elif is_gradient:
                said.append(f"{slips.GRADIENT}{self.arguments[0]}:\n{text}")
            else:
                said.append(text if outcome.value is not None else kind(None))
        return said


class ReferenceRun:
    """The inputs of one seed, with cached outputs of the reference and of each known mistake."""

    def __init__(self, exercise: Exercise, seed: int) -> None:
        self.exercise = exercise
        self.calls = [exercise.calls(part, seed) for part in exercise.parts]
        self._theirs: dict[tuple[Callable, int, int], Outcome] = {}

    @functools.cached_property
    def expected(self) -> list[list[Outcome]]:
        """The outcomes of the reference on the inputs of each part."""
        return [[attempt(self.exercise.reference, one) for one in calls] for calls in self.calls]

    def _same(self, wrong: Callable, found: Sequence[Sequence[Outcome]], part: int, place: int) -> bool:
        key = (wrong, part, place)
        if key not in self._theirs:
            self._theirs[key] = attempt(wrong, self.calls[part][place])
        mine, theirs = found[part][place], self._theirs[key]
        return mine.same_as(theirs, self.exercise.tolerance) and mine.message == theirs.message

    def failed(self, found: Sequence[Sequence[Outcome]], part: int) -> list[int]:
        """Return the places in a part where an answer and the reference differ."""
        pairs = zip(found[part], self.expected[part], strict=True)
        return [place for place, (one, other) in enumerate(pairs) if not one.same_as(other, self.exercise.tolerance)]

    def echoes(self, found: Sequence[Outcome], expected: Sequence[Outcome]) -> bool:
        """Return True if an answer always returns one of its arguments, where this is not always right."""
        arguments = [[*one.args, *one.kwargs.values()] for one in chain(*self.calls)]
        tolerance = self.exercise.tolerance
        for place in range(min(map(len, arguments), default=0)):
            given = [Outcome(one[place]) for one in arguments]
            if all(one.same_as(other, 0.0) for one, other in zip(found, given, strict=True)):
                return any(not one.same_as(other, tolerance) for one, other in zip(found, expected, strict=True))
        return False

    def mistake(self, found: Sequence[Sequence[Outcome]], parts: Sequence[int]) -> slips.Slip | None:
        """Return the known mistake that gives the same outputs on all inputs of these parts."""
        for name, mistake in self.exercise.mistakes.items():
            if self.agrees(mistake, found, parts):
                return slips.Slip(name, mistake.hint)
        return None

    def is_ambiguous(self, found: Sequence[Sequence[Outcome]]) -> bool:
        """Return True if several mistakes of this exercise come to the same as an answer on all inputs."""
        everywhere = range(len(self.calls))
        return sum(self.agrees(mistake, found, everywhere) for mistake in self.exercise.mistakes.values()) > 1

    def agrees(self, mistake: Mistake, found: Sequence[Sequence[Outcome]], parts: Sequence[int]) -> bool:
        """Return True if an answer comes to the same as a mistake, in one of its ways, on all inputs of these parts."""
        places = [(part, place) for part in parts for place in range(len(self.calls[part]))]
        return any(all(self._same(way, found, *place) for place in places) for way in (mistake.wrong, *mistake.also))

    def telling(self, name: str, found: Sequence[Sequence[Outcome]], part: int, failed: list[int]) -> int:
        """The failed input to show: an interrupted one, else the first on which the fewest other mistakes agree."""
        stopped = [place for place in failed if found[part][place].problem == "KeyboardInterrupt"]
        if stopped or name not in self.exercise.mistakes:
            return (stopped or failed)[0]
        others = [mistake.wrong for other, mistake in self.exercise.mistakes.items() if other != name]
        return min(failed, key=lambda place: sum(self._same(other, found, part, place) for other in others))


@functools.lru_cache(maxsize=128)
def trial(exercise: Exercise, seed: int) -> ReferenceRun:
    """Return the inputs of a seed; a grader judges a whole class on one of them."""
    return ReferenceRun(exercise, seed)


def letters_of(student: str) -> str:
    """Return the letters and digits of a name in alphabetical order: the same for every spacing and order of the names.

    >>> letters_of("Miller, Jane") == letters_of("jane_miller")
    True
    """
    return "".join(sorted(sign for sign in student.casefold() if sign.isalnum()))


def checked_credit(share: float | str) -> float:
    """Return the share of the points that a named slip earns.

    >>> checked_credit("0.25")
    0.25
    """
    try:
        if 0 <= float(share) < 1:
            return float(share)
    except ValueError:
        pass
    raise ValueError(f"slip credit: {share!r} is not a share of the points; give a number from 0 to below 1")


def slip_credit() -> float:
    """Return the share that the environment variable names, or the usual one."""
    return checked_credit(os.environ.get(CREDIT_VARIABLE) or SLIP_CREDIT)


@contextmanager
def _patience(name: str) -> Iterator[list[Call]]:
    """Print after a while the input that is still running: the last one that was added to the list."""
    now_at: list[Call] = []

    def tell() -> None:
        print(
            f"{name}: still running after {PATIENCE:g} s, on the input {now_at[-1].text()}. If a loop never ends, "
            "interrupt the kernel (■). The check then shows which line was running.",
            flush=True,
        )

    timer = Timer(PATIENCE, tell)
    timer.daemon = True
    timer.start()
    try:
        yield now_at
    finally:
        timer.cancel()


def attempt(function: Callable, one: Call) -> Outcome:
    """Call a function on copies of the arguments; an exception from the student's code becomes part of the outcome."""
    args, kwargs = copy.deepcopy(one.args), copy.deepcopy(one.kwargs)
    start = time.monotonic()
    try:
        with torch.random.fork_rng(devices=[]):
            value = one.ask(function, *args, **kwargs) if one.ask else function(*args, **kwargs)
    except KeyboardInterrupt as error:
        after = f"interrupted after {time.monotonic() - start:.0f} s"
        return Outcome(problem="KeyboardInterrupt", detail=f"{after}{_line_of(error)}")
    except Exception as error:  # the code is not ours: its failure is what we report
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return Outcome(problem=type(error).__name__, detail=text + _line_of(error))
    changed = bool(difference(list(args), list(one.args)) or difference(kwargs, one.kwargs))
    return Outcome(value, changed=changed)


def _line_of(error: BaseException) -> str:
    """Return the innermost line of the student's own code, below which come only libraries and the course."""
    places = sysconfig.get_paths()
    course = (str(Path(__file__).parents[1]), *sys.modules["grpo_edu.checks"].__path__)
    libraries = (*course, places["stdlib"], places["purelib"], places["platlib"], "<frozen")
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith(libraries)]
    line = frames[-1].line if frames else ""
    return f"{LINE}{line}`" if line else ""
