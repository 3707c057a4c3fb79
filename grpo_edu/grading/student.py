"""What runs in the process of one student: the notebook's cells, and the functions on the inputs of the checks.

It judges nothing. It tells what each function returned (`grading_values`); what that is worth is decided in another
process, so neither a printed score nor a replaced check can earn a point.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpo_edu
from grpo_edu.checks import exercises
from grpo_edu.checks.core import Call, Outcome, attempt
from grpo_edu.grading.sandbox import Limits
from grpo_edu.grading.values import encode

_LONGEST = 300  # characters of an error


class TimeLimitReached(BaseException):
    """Raised by the alarm; no `except Exception` of a student's stops it."""


@contextmanager
def alarm(limits: Limits) -> Iterator[None]:
    """Raise `TimeLimitReached` in this block: by the processor's time, and much later by the clock."""

    def ring(*_: object) -> None:
        # one text for both clocks: which of them was first depends on how busy the machine is
        raise TimeLimitReached(f"not done within {limits.seconds:g} s")

    signal.signal(signal.SIGPROF, ring)
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_PROF, limits.seconds)
    signal.setitimer(signal.ITIMER_REAL, limits.seconds * limits.patience)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def run_steps(task: dict[str, Any], channel: int) -> None:
    """Do the steps of a task, and write a line of JSON to `channel` for each thing that happened.

    task: `steps` (kind, name, source), `skip` (places of cells that ended an earlier process), `answered` ([place,
    part] that are known), `seed`, `limits`.
    """

    def say(**message: Any) -> None:
        content = json.dumps(message).encode() + b"\n"
        while content:
            content = content[os.write(channel, content) :]

    known, limits = exercises(), Limits(**task["limits"])
    asked = [name for kind, name, _ in task["steps"] if kind == "ask"]
    # drawn before any of the student's code runs, which could change how
    calls = {name: [known[name].calls(part, task["seed"]) for part in known[name].parts] for name in asked}
    shell = _shell()
    answered = {tuple(one) for one in task["answered"]}
    for place, (kind, name, source) in enumerate(task["steps"]):
        if kind == "ask":
            function, why = _function(shell.user_ns, name)
            if function is None:
                say(missing=place, why=why)
                continue
            for part, inputs in enumerate(calls[name]):
                if (place, part) not in answered:
                    say(at=[place, part])
                    found = outcomes(function, inputs, limits)
                    say(answer=[place, part], outcomes=[_as_json(one) for one in found])
        elif place not in task["skip"]:
            say(at=[place, -1])
            error = _run_cell(shell, source, limits)
            if error:
                say(cell=place, error=error)


def _shell() -> Any:
    """IPython as a notebook has it, without its history."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    class Shell(InteractiveShell):
        system = InteractiveShell.system_raw  # the other way needs a terminal

        def enable_gui(self, gui: str | None = None) -> None:
            """There is no window here; %matplotlib asks for one."""

        def showtraceback(self, *_: Any, **__: Any) -> None:
            """Nobody reads it here; the error itself is in the result."""

        showsyntaxerror = showtraceback

    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    return Shell.instance(config=config)


def _run_cell(shell: Any, source: str, limits: Limits) -> str:
    """Run a cell as a notebook does; the error in a line, or nothing."""
    try:
        with alarm(limits):
            result = shell.run_cell(source, store_history=False)
        error = result.error_before_exec or result.error_in_exec
    except TimeLimitReached as late:
        error = late
    if isinstance(error, TimeLimitReached):
        return f"TimeoutError: {error}"
    return "" if error is None else error_line(error)


def error_line(error: BaseException) -> str:
    """An error's type and message in one line, cut where it is long.

    >>> error_line(KeyError("a")), error_line(SystemExit())
    ("KeyError: 'a'", 'SystemExit')
    """
    try:
        text = f"{error.msg}, line {error.lineno}" if isinstance(error, SyntaxError) else str(error)
    except Exception as other:  # a student's __str__ may raise anything
        text = f"(its text raises {type(other).__name__})"
    return f"{type(error).__name__}: {text}"[:_LONGEST] if text else type(error).__name__


def _function(names: dict[str, Any], name: str) -> tuple[Callable | None, str]:
    """What the notebook calls `name`, or why it cannot be asked."""
    if name not in names:
        return None, f"{name} is not defined"
    function = names[name]
    if not callable(function):
        return None, f"{name} is no function"
    code = getattr(function, "__code__", None)
    if code is not None and Path(code.co_filename).is_relative_to(Path(grpo_edu.__file__).parent):
        return None, f"{name} is the package's own function, not one that was written here"
    return function, ""


def outcomes(function: Callable, calls: list[Call], limits: Limits) -> list[Outcome]:
    """What each call came to, all within the time for a part of a question."""
    found: list[Outcome] = []
    try:
        with alarm(limits):
            for one in calls:
                found.append(_outcome(function, one))
    except TimeLimitReached as error:
        late = Outcome(problem="TimeoutError", detail=str(error))
        found += [late] * (len(calls) - len(found))
    return found[: len(calls)]


def _outcome(function: Callable, one: Call) -> Outcome:
    try:
        return attempt(function, one)
    except TimeLimitReached:
        raise
    except BaseException as error:  # sys.exit() and the like, which `attempt` lets through
        return Outcome(problem=type(error).__name__, detail=f"{error_line(error)}: Python is ended, nothing returned")


def _as_json(outcome: Outcome) -> list[Any]:
    try:
        value = encode(outcome.value)
        json.dumps(value)
    except Exception as error:  # a student's own class may raise anything wherever it is touched
        return [None, type(error).__name__, f"what is returned cannot be read: {error_line(error)}", False]
    return [value, outcome.problem[:80], outcome.detail[:_LONGEST], outcome.changed]
