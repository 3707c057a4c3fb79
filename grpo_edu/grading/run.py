"""Have a student's notebook run elsewhere, start again past whatever ends the process, and judge what was answered."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import grpo_edu
from grpo_edu.checks import exercises
from grpo_edu.checks.core import Outcome
from grpo_edu.checks.feedback import Feedback
from grpo_edu.grading.masters import Master
from grpo_edu.grading.repair import Step
from grpo_edu.grading.sandbox import Limits
from grpo_edu.grading.values import decode

MOST_STARTS = 12  # processes for one notebook, each past what ended the one before
_KEPT = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "SYSTEMROOT", "VIRTUAL_ENV", "CONDA_PREFIX")


@dataclass
class Transcript:
    """What came of a notebook's steps.

    outcomes: (exercise, number of the part) → what each call came to. missing: exercise → why it could not be asked.
    errors: name of a cell → its error. troubles: a word on what ended the process. protections: what held.
    """

    outcomes: dict[tuple[str, int], list[Outcome]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    troubles: list[str] = field(default_factory=list)
    protections: tuple[str, ...] = ()
    printed: int = 0
    seconds: float = 0.0


class Worker:
    """A `grading_worker` process; use as a context."""

    def __init__(self) -> None:
        self._closed = self._reading = False
        self._process: subprocess.Popen | None = None

    def __enter__(self) -> Worker:
        self._folder = tempfile.TemporaryDirectory(prefix="grpo-edu-grade-")
        os.chmod(self._folder.name, 0o711)  # a student's process passes through, and cannot look around
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._stop()
        self._folder.cleanup()

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()  # and with it the student's, which does not outlive it
            process.wait()
            assert process.stdin and process.stdout
            process.stdin.close()
            if not self._reading:  # else the thread that reads closes it
                process.stdout.close()

    def _start(self) -> subprocess.Popen:
        """A fresh interpreter with nothing of the instructor's environment but what finds programs and packages."""
        env = {name: os.environ[name] for name in _KEPT if name in os.environ}
        env |= {
            "PYTHONPATH": str(Path(grpo_edu.__file__).resolve().parents[1]),
            "PYTHONHASHSEED": "0",
            "MPLBACKEND": "agg",
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "PYTHONIOENCODING": "utf-8:replace",
            "HOME": self._folder.name,
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        log = open(Path(self._folder.name) / "worker.log", "wb")  # noqa: SIM115
        with log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "grpo_edu.grading.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=env,
                start_new_session=True,
            )
        if self._line(self._process) != {"ready": True}:
            said = (Path(self._folder.name) / "worker.log").read_text(errors="replace")[-1500:]
            self._stop()
            raise RuntimeError(f"the process that runs students' code does not start: {said}")
        return self._process

    @staticmethod
    def _line(process: subprocess.Popen) -> dict[str, Any]:
        """The next line of the worker; empty where it is gone."""
        assert process.stdout
        line = process.stdout.readline()
        return json.loads(line) if line.endswith(b"\n") else {}

    def run(self, task: dict[str, Any]) -> tuple[list[dict], dict[str, Any]]:
        """Hand over a task; the student's messages, and how its process ended."""
        if self._closed:
            raise RuntimeError("the worker was closed while a student's code ran")
        process = self._process or self._start()
        assert process.stdin and process.stdout
        key = secrets.token_hex(16)  # so that nothing that an earlier process left behind counts for this one
        folder = str(Path(self._folder.name) / key)
        with contextlib.suppress(BrokenPipeError):  # its end shows below
            process.stdin.write(json.dumps({**task, "id": key, "folder": folder}).encode() + b"\n")
            process.stdin.flush()
        messages, self._reading = [], True
        while line := self._line(process):
            if line.get("id") == key and "message" in line:
                messages.append(line["message"])
            elif line.get("id") == key:
                self._reading = False
                return messages, line
        self._reading = False
        self._stop()
        process.stdout.close()
        return messages, {"end": "worker", "code": None, "seconds": 0.0, "printed": 0, "output": ""}


def collect(worker: Worker, steps: Sequence[Step], *, seed: int, limits: Limits, seconds_left: float) -> Transcript:
    """Run all steps; where one ends the process, note it, and start again without it.

    Raises RuntimeError where the worker does not start, or the student's process ends before its code runs.
    """
    found, skip = Transcript(), list[int]()
    places = {step.name: place for place, step in enumerate(steps) if step.kind == "ask"}
    for _ in range(MOST_STARTS):
        total = min(limits.total_seconds, seconds_left - found.seconds)
        if total < 1:
            break
        task = {
            "steps": [[step.kind, step.name, step.source] for step in steps],
            "seed": seed,
            "skip": skip,
            "answered": [[places[name], part] for name, part in found.outcomes],
            "limits": asdict(replace(limits, total_seconds=total)),
        }
        messages, ending = worker.run(task)
        found.seconds += ending["seconds"]
        found.printed = max(found.printed, ending["printed"])
        try:
            at = _take(messages, steps, found)
        except (ValueError, TypeError, KeyError, IndexError):
            found.troubles.append("it wrote on the way on which answers are sent; the rest was not tried")
            return found
        if ending["end"] == "done":
            return found
        why = _why(ending, limits)
        if at is None:  # none of the student's code has run, so the fault is ours
            raise RuntimeError(f"a student's process cannot be started: {why}. {ending['output'][-600:]}".strip())
        place, part = at
        if part < 0:
            skip = [*skip, place]
            found.errors[steps[place].name] = why
            found.troubles.append(f"cell {steps[place].name}: left out, {why}")
        else:
            name, late = steps[place].name, ending["end"] in ("time", "total time")
            # who did not heed the alarm would not in the other parts either
            for number, one in enumerate(exercises()[name].parts):
                if number == part or (late and (name, number) not in found.outcomes):
                    outcome = Outcome(problem="TimeoutError" if late else "SystemExit", detail=why)
                    found.outcomes[name, number] = [outcome] * one.tries
            if f"{name}: {why}" not in found.troubles:
                found.troubles.append(f"{name}: {why}")
    found.troubles.append("the rest was not tried: the time for one student is used up")
    return found


def _take(messages: Sequence[dict], steps: Sequence[Step], found: Transcript) -> tuple[int, int] | None:
    """Enter what the student's process said; where it was last, as (place, part), -1 for a cell.

    Raises ValueError, TypeError, KeyError, IndexError for what `grading_student` does not say.
    """
    at = None
    for message in messages:
        if "protections" in message:
            found.protections = tuple(str(one) for one in message["protections"])
        elif "at" in message:
            place, part = map(int, message["at"])
            exercises()[steps[place].name].parts[part] if part >= 0 else steps[place]
            at = place, part
        elif "cell" in message:
            found.errors[steps[message["cell"]].name] = str(message["error"])
        elif "missing" in message:
            found.missing[steps[message["missing"]].name] = str(message["why"])
        elif "answer" in message:
            place, part = message["answer"]
            name, given = steps[place].name, message["outcomes"]
            if len(given) != exercises()[name].parts[part].tries or part < 0:
                raise ValueError(f"outcomes: {len(given)} of them for part {part} of {name}")
            found.outcomes[name, part] = [
                Outcome(decode(value), str(problem), str(detail), bool(changed))
                for value, problem, detail, changed in given
            ]
    return at


def _why(ending: dict[str, Any], limits: Limits) -> str:
    """In a few words, why a process did not get to its end."""
    how, code = ending["end"], ending["code"]
    if how == "time":
        return f"it was not done within {limits.seconds:g} s and had to be killed"
    if how == "total time":
        return "the time for one student is used up"
    if how == "garbled":
        return "it wrote on the way on which answers are sent"
    if how == "worker" or code is None:
        return "it closed the way on which answers are sent"
    if code < 0:
        return f"the process was ended by {signal.Signals(-code).name}"
    return f"it ended the process, with exit code {code}"


def judged(master: Master, transcript: Transcript, seed: int) -> dict[str, Feedback]:
    """Exercise → what its answer earned; the checks run here, on what the functions returned there."""
    feedback = {}
    for question in master.questions:
        exercise = exercises()[question.exercise]
        otherwise = _not_answered(master, question.exercise, transcript)
        parts = []
        for number, part in enumerate(exercise.parts):
            calls = exercise.calls(part, seed)
            found = transcript.outcomes.get((question.exercise, number), [otherwise] * len(calls))
            parts.append(exercise.judge(part, calls, found))
        feedback[question.exercise] = Feedback(question.exercise, tuple(parts), seed)
    return feedback


def _not_answered(master: Master, name: str, transcript: Transcript) -> Outcome:
    """What stands for an answer that there is none of."""
    if name not in transcript.missing:
        return Outcome(problem="TimeoutError", detail="the notebook did not get here")
    why = transcript.missing[name]
    error = transcript.errors.get(master.answers.get(name, ""))
    return Outcome(problem="NameError", detail=f"{why}; its cell fails: {error}" if error else why)
