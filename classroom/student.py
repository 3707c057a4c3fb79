"""The process of one student: ``python -m classroom.student``, started by `classroom.sandbox`.

It imports what notebooks need, and forks a process for each notebook, because a fork takes milliseconds and a fresh
interpreter with torch takes seconds. That process runs the cells and calls the student's functions on inputs that were
drawn elsewhere. It judges nothing and knows no right answer: it sends what each function returned
(`classroom.values`), so neither a printed score nor a replaced check can earn a point.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import gc
import json
import os
import pickle
import select
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpo_edu
from classroom.sandbox import Limits
from grpo_edu import checks

_LONGEST = 300  # characters of an error


def main() -> int:
    """Answer tasks from stdin until it closes; messages go to the file that the first argument numbers."""
    channel, tasks = int(sys.argv[1]), lines(0)
    setup = next(tasks)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the grader's, which ends this process
    shell = _shell()
    _import_what_is_needed()
    limit_resources(Limits(**setup["limits"]), setup["others"])
    _allow_tracing(False)
    say(channel, ready=True)
    given = setup["given"]
    for number, task in enumerate(tasks):
        process = os.fork()
        if process == 0:
            _be_a_notebook(task, channel, shell, Path(os.environ["HOME"]) / f"notebook{number}", setup["user"], given)
        if given is not None:
            os.close(given)
            given = None
        code = _wait(process)
        if os.getpid() == 1:  # the sandbox's first process: all others come from the student's code
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                while True:
                    os.waitpid(-1, 0)
        say(channel, end=code)
    return 0


def lines(source: int) -> Iterator[dict[str, Any]]:
    """Yield each line of JSON that comes, without reading ahead more than is there."""
    rest = b""
    while content := os.read(source, 65536):
        *whole, rest = (rest + content).split(b"\n")
        yield from map(json.loads, whole)


def say(channel: int, **message: Any) -> None:
    content = json.dumps(message).encode() + b"\n"
    while content:
        content = content[os.write(channel, content) :]


def _import_what_is_needed() -> None:
    import torch

    import classroom.reading  # noqa: F401

    torch.set_num_threads(1)
    # The exercises' modules hold the answers and are not here. A call of a check in a student's own cell does nothing.
    checks.__getattr__ = _check
    gc.collect()
    gc.freeze()  # pages that the collector does not touch stay shared


class _Later:
    """The placeholder that a check returns here; the answer is graded elsewhere."""

    points = max_points = 0

    def grade(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "This answer is checked by the grader."


def _check(name: str) -> Any:
    if name.startswith("check_"):
        return lambda *_, **__: _Later()
    raise AttributeError(f"module 'grpo_edu.checks' has no attribute {name!r}")


def limit_resources(limits: Limits, other_processes: int) -> None:
    """Limit this process and those that come from it; other_processes: what the user runs already."""
    import resource

    wanted = {
        "RLIMIT_CORE": 0,
        "RLIMIT_FSIZE": limits.file_size,
        "RLIMIT_NOFILE": 256,
        "RLIMIT_CPU": int(limits.total_seconds) + 60,  # this process lives as long as all notebooks together
        "RLIMIT_NPROC": limits.processes + other_processes,
    }
    mapped = Path("/proc/self/statm")
    if mapped.exists():  # macOS does not enforce this limit
        wanted["RLIMIT_AS"] = int(mapped.read_text().split()[0]) * resource.getpagesize() + limits.memory
    for name, value in wanted.items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def become(user: int | None) -> None:
    """Become a user without rights, if one is given."""
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)


def _allow_tracing(allowed: bool) -> None:
    """Set whether a process of the same user may look into this one or stop it (PR_SET_DUMPABLE; Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(4, int(allowed), 0, 0, 0)


def _wait(process: int) -> int:
    """Return the exit code of a notebook's process; ends this one, and so the sandbox, when the grader is gone."""
    while True:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == process:
            return os.waitstatus_to_exitcode(status)
        if ended:  # an orphan of it
            continue
        if select.select([0], [], [], 0.02)[0]:  # while a notebook runs, the grader sends nothing: this is the end
            with contextlib.suppress(OSError):
                os.killpg(process, signal.SIGKILL)
            os._exit(1)


def _be_a_notebook(
    task: dict[str, Any], channel: int, shell: Any, folder: Path, user: int | None, given: int | None
) -> None:
    """Run as the forked process of a notebook, as a separate user if one is given; does not return."""
    code = 1
    try:
        os.setsid()
        become(user)
        _allow_tracing(True)
        with contextlib.suppress(OSError):  # where memory ends, this process goes before the one that forks
            Path("/proc/self/oom_score_adj").write_text("1000")
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(os.open(os.devnull, os.O_RDONLY) if given is None else given, 0)
        os.dup2(channel, 3)
        os.closerange(4, 1024)
        folder.mkdir()
        os.chdir(folder)
        if "files" in task:
            _read_files(task, 3)
        else:
            run_steps(task, 3, shell)
        say(3, done=True)
        code = 0
    except BaseException:  # goes to the output and no further, because this is a copy of the process that forks
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
        os._exit(code)


def _read_files(task: dict[str, Any], channel: int) -> None:
    """Read what was handed in, from stdin. task: `files` (name, size), `masters`, and the `others` of the course."""
    from classroom.reading import read_submission

    masters, others = (pickle.loads(base64.b64decode(task[name])) for name in ("masters", "others"))
    with open(0, "rb", closefd=False) as file:
        say(channel, read=read_submission(file, task["files"], masters, others))


class TimeLimitReached(BaseException):
    """Raised by the alarm; no `except Exception` of a student's stops it."""


@contextmanager
def alarm(limits: Limits) -> Iterator[None]:
    """Raise `TimeLimitReached` in this block: by CPU time, and much later by the clock."""

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


def run_steps(task: dict[str, Any], channel: int, shell: Any) -> None:
    """Do the steps of a task, and write a line of JSON to `channel` for each thing that happened.

    task: `steps` (kind, name, source), `skip` (places of cells that ended an earlier process), `answered` ([place,
    part] that are known), `calls` (name → the inputs of its parts), `limits`, `cell_seconds` (the limit of a cell).
    """
    limits = Limits(**task["limits"])
    limits_of_a_cell = replace(limits, seconds=task["cell_seconds"])
    calls = {name: pickle.loads(base64.b64decode(text)) for name, text in task["calls"].items()}
    answered = {tuple(one) for one in task["answered"]}
    for place, (kind, name, source) in enumerate(task["steps"]):
        if kind == "ask":
            function, why = _function(shell.user_ns, name)
            if function is None:
                say(channel, missing=place, why=why)
                continue
            for part, inputs in enumerate(calls[name]):
                if (place, part) not in answered:
                    say(channel, at=[place, part])
                    found = outcomes(function, inputs, limits)
                    say(channel, answer=[place, part], outcomes=[_as_json(one) for one in found])
        elif place not in task["skip"]:
            say(channel, at=[place, -1])
            error = _run_cell(shell, source, limits_of_a_cell)
            if error:
                say(channel, cell=place, error=error)


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
    """Return an error's type and message in one line, cut if it is long.

    >>> error_line(KeyError("a")), error_line(SystemExit())
    ("KeyError: 'a'", 'SystemExit')
    """
    try:
        text = f"{error.msg}, line {error.lineno}" if isinstance(error, SyntaxError) else str(error)
    except Exception as other:  # a student's __str__ may raise anything
        text = f"(its text raises {type(other).__name__})"
    return f"{type(error).__name__}: {text}"[:_LONGEST] if text else type(error).__name__


def _function(names: dict[str, Any], name: str) -> tuple[Callable | None, str]:
    """Return what the notebook calls `name`, or why it cannot be called."""
    if name not in names:
        return None, f"{name} is not defined"
    function = names[name]
    if not callable(function):
        return None, f"{name} is not a function"
    code = getattr(function, "__code__", None)
    own = (Path(grpo_edu.__file__).parent, Path(__file__).parent)
    if code is not None and any(Path(code.co_filename).is_relative_to(folder) for folder in own):
        return None, f"{name} is the package's own function, not one that was written here"
    return function, ""


def outcomes(function: Callable, calls: list[Any], limits: Limits) -> list[Any]:
    """Return what each call came to, all within the time for a part of a question."""
    from grpo_edu.checks.compare import Outcome

    found: list[Outcome] = []
    try:
        with alarm(limits):
            for one in calls:
                found.append(_outcome(function, one))
    except TimeLimitReached as error:
        late = Outcome(problem="TimeoutError", detail=str(error))
        found += [late] * (len(calls) - len(found))
    return found[: len(calls)]


def _outcome(function: Callable, one: Any) -> Any:
    from grpo_edu.checks.compare import Outcome
    from grpo_edu.checks.core import attempt

    try:
        return attempt(function, one)
    except TimeLimitReached:
        raise
    except BaseException as error:  # sys.exit() and the like, which `attempt` lets through
        return Outcome(problem=type(error).__name__, detail=f"{error_line(error)}: Python is ended, nothing returned")


def _as_json(outcome: Any) -> list[Any]:
    from classroom.values import encode

    try:
        value = encode(outcome.value)
        json.dumps(value)
    except Exception as error:  # a student's own class may raise anything wherever it is touched
        return [None, type(error).__name__, f"what is returned cannot be read: {error_line(error)}", False]
    return [value, outcome.problem[:80], outcome.detail[:_LONGEST], outcome.changed]


if __name__ == "__main__":
    raise SystemExit(main())
