"""One student's notebooks: read and run in a sandbox past whatever ends it, and judged."""

from __future__ import annotations

import functools
import json
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from classroom.exercises import SourceNotebook
from classroom.files import Submission
from classroom.repair import Node, Step
from classroom.results import StudentGrade
from classroom.sandbox import Limits, Sandbox, SandboxError, packed
from classroom.values import decode, plain
from grpo_edu.checks import exercises
from grpo_edu.checks.compare import Outcome
from grpo_edu.checks.core import SLIP_CREDIT, Call, Exercise, letters_of, trial
from grpo_edu.checks.feedback import Feedback, PartResult
from grpo_edu.checks.trained import TrainedExercise

if TYPE_CHECKING:
    from nbformat import NotebookNode

MOST_CELLS = 8  # cells of one's own that may end the process before those behind them are left out
MOST_PARTS = 2  # parts of an exercise that may end it before the others count as having done so
TRAINING = 3  # times the limit: training takes longest, and a slow computer must not change a grade
_MOST_FAULTS = 3  # processes in a row that end before any of the student's code runs
_PRINT_WARNING_BYTES = 2**20  # printed bytes worth a message
_MOST_TROUBLES = 20  # messages about one student


@dataclass
class Transcript:
    """The results of a notebook's steps.

    outcomes: (exercise, number of the part) → what each call came to. missing: exercise → why it could not be called.
    errors: name of a cell → its error. troubles: a message about what ended the process.
    """

    outcomes: dict[tuple[str, int], list[Outcome]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    troubles: list[str] = field(default_factory=list)
    printed: int = 0
    seconds: float = 0.0


def inputs_of(name: str, seed: int) -> list[list[Call]]:
    """Return the inputs of each part of an exercise, drawn once for the whole class."""
    return trial(exercises()[name], seed).calls


@functools.cache
def _packed_inputs(name: str, seed: int) -> str:
    return packed(inputs_of(name, seed))


def collect(sandbox: Sandbox, steps: Sequence[Step], *, seed: int, limits: Limits, seconds_left: float) -> Transcript:
    """Run all steps; where one ends the process, note it, and start again without it.

    What is trained comes last, in a process of its own, and only for answers whose other parts are right. Whatever
    ends a process costs nothing but itself, as long as the student's time lasts.

    Raises SandboxError if the sandbox does not start, or a new process in it ends before the student's code runs.
    """
    found, skip, faults, fatal = Transcript(), list[int](), 0, Counter[str]()
    places = {step.name: place for place, step in enumerate(steps) if step.kind == "ask"}
    waiting = {
        name: len(inputs_of(name, seed)) - 1 for name in places if isinstance(exercises()[name], TrainedExercise)
    }
    own = {place for place, step in enumerate(steps) if step.is_added}
    # What may end a process, each once; only a process that lies about where it is needs more starts than this.
    patient = replace(limits, seconds=TRAINING * limits.seconds)  # once the other parts are answered and one trains
    cell_seconds = limits.seconds  # also when a model trains: a cell that was late must not take three times as long
    most = MOST_CELLS + len(steps) - len(own) + MOST_PARTS * len(places) + _MOST_FAULTS
    for _ in range(most):
        total = min(limits.total_seconds, seconds_left - found.seconds)
        if total < 1:
            found.troubles.append("the rest was not tried: the time for one student is used up")
            return found
        task = {
            "steps": [[step.kind, step.name, step.source] for step in steps],
            "calls": {name: _packed_inputs(name, seed) for name in places},
            "skip": skip,
            "answered": [[places[name], part] for name, part in {*found.outcomes, *waiting.items()}],
            "limits": asdict(replace(limits, total_seconds=total)),
            "cell_seconds": cell_seconds,
        }
        messages, ending = sandbox.run(task, total)
        found.seconds += ending["seconds"]
        found.printed = max(found.printed, ending["printed"])
        at, understood = _take_all(messages, steps, found)
        if not understood:
            found.troubles.append("it wrote to the result channel; the rest was not run")
            return found
        if ending["end"] == "done":
            right = [name for name in waiting if _may_train(name, found, seed)]
            if not right:
                return found
            for name in right:
                del waiting[name]
            limits = patient
            continue
        why = _why(ending, limits)
        if at is None:
            faults += ending["new"]  # none of the student's code has run in it, so the fault is not the student's
            if faults == _MOST_FAULTS:
                raise SandboxError(f"a student's process cannot be started: {why}. {ending['output'][-600:]}".strip())
            continue
        place, part = at
        if part < 0:
            skip = [*skip, place]
            found.errors[steps[place].name] = why
            found.troubles.append(f"cell {steps[place].name}: left out, {why}")
            behind = [one for one in own if one > place]
            if len(own & {*skip}) == MOST_CELLS and behind:
                skip += behind
                found.troubles.append(f"after {MOST_CELLS} such cells, the {len(behind)} other own cells: left out")
        else:
            name, late = steps[place].name, ending["end"] in ("time", "total time")
            fatal[name] += 1
            # an answer that ignored the alarm would do so again
            for number, one in enumerate(exercises()[name].parts):
                others = late or fatal[name] == MOST_PARTS
                if number == part or (others and (name, number) not in found.outcomes):
                    outcome = Outcome(problem="TimeoutError" if late else "SystemExit", detail=why)
                    found.outcomes[name, number] = [outcome] * one.tries
            if f"{name}: {why}" not in found.troubles:
                found.troubles.append(f"{name}: {why}")
    found.troubles.append(f"the rest was not tried: the process ended {most} times")
    return found


def _may_train(name: str, found: Transcript, seed: int) -> bool:
    """Return True if all parts of an exercise but the one that is trained are right."""
    exercise = exercises()[name]
    others = [found.outcomes.get((name, number), []) for number in range(len(exercise.parts) - 1)]
    return isinstance(exercise, TrainedExercise) and all(others) and exercise.may_train(others, seed)


def _take_all(
    messages: Sequence[dict], steps: Sequence[Step], found: Transcript
) -> tuple[tuple[int, int] | None, bool]:
    """Enter what the student's process said; where it was last, as (place, part), and whether all was understood."""
    at = None
    for message in messages:
        try:
            at = _take(message, steps, found) or at
        except Exception:  # it may hold anything at all, and none of it may stop the grading
            return at, False
    return at, True


def _take(message: dict, steps: Sequence[Step], found: Transcript) -> tuple[int, int] | None:
    """Enter one message; the place that it tells of, if any. Raises any error for what `student` does not say."""
    if "at" in message:
        place, part = message["at"]
        _step(steps, place, "cell" if part == -1 else "ask")
        if part != -1:
            _part(steps[place].name, part)
        return place, part
    if "cell" in message:
        found.errors[_step(steps, message["cell"], "cell").name] = plain(message["error"])
    elif "missing" in message:
        found.missing[_step(steps, message["missing"], "ask").name] = plain(message["why"])
    elif "answer" in message:
        place, part = message["answer"]
        name, given = _step(steps, place, "ask").name, message["outcomes"]
        if len(given) != _part(name, part):
            raise ValueError(f"outcomes: {len(given)} of them for part {part} of {name}")
        found.outcomes[name, part] = [
            Outcome(decode(value), plain(problem, 80), plain(detail), changed is True)
            for value, problem, detail, changed in given
        ]
    return None


def _step(steps: Sequence[Step], place: Any, kind: str) -> Step:
    if type(place) is not int or not 0 <= place < len(steps) or steps[place].kind != kind:
        raise ValueError("place: there is no such step")
    return steps[place]


def _part(name: str, part: Any) -> int:
    """Return how many inputs a part of an exercise is tried on."""
    parts = exercises()[name].parts
    if type(part) is not int or not 0 <= part < len(parts):
        raise ValueError("part: there is no such part")
    return parts[part].tries


def _why(ending: dict[str, Any], limits: Limits) -> str:
    """In a few words, why a process did not get to its end."""
    how, code = ending["end"], ending["code"]
    if how == "time":
        return f"it was not done within {limits.seconds:g} s and had to be killed"
    if how == "total time":
        return "the time for one student is used up"
    if how == "memory":
        return f"it used more than {limits.memory / 2**30:g} GB of memory and had to be killed"
    if how == "garbled":
        return "it wrote to the result channel"
    if code is None:
        return "it closed the way on which answers are sent"
    if -code in {int(one) for one in signal.Signals}:
        return f"the process was ended by {signal.Signals(-code).name}"
    return f"it ended the process, with exit code {code % 256}"


@dataclass
class Answers:
    """The results of the processes of one student, not graded yet."""

    grade: StudentGrade
    notebooks: dict[str, NotebookNode] = field(default_factory=dict)
    transcripts: dict[str, Transcript] = field(default_factory=dict)


def answers_of(
    submission: Submission,
    digest: str,
    masters: Sequence[SourceNotebook],
    sandbox: Sandbox,
    seed: int,
    limits: Limits,
    to_read: dict[str, Any],
) -> Answers:
    """Read, repair and run all notebooks of a student. Whatever one of them does becomes a message about it.

    to_read: the task of reading: `files` (name and size of each that the sandbox was given), `masters`, and `others`
    that are not graded now (`pack_masters`). Raises SandboxError if no student's code can be run.
    """
    grade = StudentGrade(submission.student, submission.lms_id, digest, troubles=list(submission.troubles))
    result = Answers(grade)
    known = {master.name: master for master in masters}
    for found in _read(to_read, sandbox, limits, grade) if to_read["files"] else ():
        try:
            master = known[found["master"]]
            grade.handed_in.append(master.name)
            _run(master, found, result, sandbox, seed, limits)
        except SandboxError:
            raise
        except Exception as error:
            grade.troubles.append(f"could not be graded to its end: {type(error).__name__}: {error}")
    if not grade.handed_in and not grade.troubles:
        grade.troubles.append("nothing was handed in")
    if not sandbox.isolated and grade.handed_in:
        grade.looks.append("graded without isolation")
    more = len(grade.troubles) - _MOST_TROUBLES
    grade.troubles = [plain(one) for one in grade.troubles[:_MOST_TROUBLES]]
    grade.troubles += [f"and {more} more messages"] if more > 0 else []
    return result


def _read(to_read: dict[str, Any], sandbox: Sandbox, limits: Limits, grade: StudentGrade) -> list[dict[str, Any]]:
    """Return what `reading.read_submission` found, in the student's process; what stops that is a message."""
    messages, ending = sandbox.run({**to_read, "limits": asdict(limits)}, limits.total_seconds)
    found = [message["read"] for message in messages if "read" in message]
    if ending["end"] != "done" or len(found) != 1:
        grade.troubles.append(f"the files cannot be read: {_why(ending, limits)}")
        return []
    grade.troubles += found[0]["troubles"]
    return found[0]["notebooks"]


def pack_masters(masters: Sequence[SourceNotebook]) -> str:
    """Masters for a student's process: without the answers to open questions, and without nbformat's classes."""
    return packed(
        [
            replace(
                master,
                notebook=json.loads(json.dumps(master.notebook), object_hook=Node),
                open_questions=tuple(replace(one, model="") for one in master.open_questions),
            )
            for master in masters
        ]
    )


def _run(
    master: SourceNotebook, found: dict[str, Any], result: Answers, sandbox: Sandbox, seed: int, limits: Limits
) -> None:
    """Run one notebook that was read, and enter what came of it."""
    import nbformat
    from nbgrader.preprocessors import CheckCellMetadata

    grade = result.grade
    whole = nbformat.from_dict({**master.notebook, "cells": found["cells"]})
    CheckCellMetadata().preprocess(whole, {})  # nbgrader itself must accept what we repaired
    result.notebooks[master.name] = whole
    grade.open_answers[master.name] = found["open_answers"]
    grade.looks += [f"{master.name}: {word}" for word in found["looks"]]
    left = limits.total_seconds - sum(one.seconds for one in result.transcripts.values())
    steps = [Step(*step) for step in found["steps"]]
    transcript = collect(sandbox, steps, seed=seed, limits=limits, seconds_left=left)
    result.transcripts[master.name] = transcript
    grade.looks += [f"{master.name}: {word}" for word in _runs_of_another(transcript, grade)]
    words = [*found["troubles"], *transcript.troubles, *_failures(transcript, master)]
    if transcript.printed > _PRINT_WARNING_BYTES:
        words.append("it prints more than 1 MB, which was not kept")
    if master.name not in found["file"]:
        words.insert(0, f"found under the name {found['file']}")
    grade.troubles += [f"{master.name}: {word}" for word in words]


def _runs_of_another(transcript: Transcript, grade: StudentGrade) -> list[str]:
    """Return the exercises whose runs were drawn by a name that is not this student's, in any spelling."""
    found = []
    for (name, part), outcomes in transcript.outcomes.items():
        if part == 0:
            student = exercises()[name].student_in(outcomes[0])
            if student and letters_of(student) not in map(letters_of, (grade.student, grade.lms_id)):
                found.append(f"{name} is about the runs of {plain(student, 60)!r}, which is not this student's name")
    return found


def _failures(transcript: Transcript, master: SourceNotebook) -> list[str]:
    """Return the student's cells that raise and answers that are not functions, unless a trouble already says so."""
    locked = {name for name, cell in master.cells.items() if not cell.metadata.nbgrader.solution}
    failed = {
        name: error
        for name, error in transcript.errors.items()
        if name not in locked and error != "NotImplementedError"
    }
    said = " ".join(transcript.troubles)
    found = [f"cell {name}: fails, {error}" for name, error in failed.items() if f"cell {name}: left out" not in said]
    return found + [why for name, why in transcript.missing.items() if master.answers.get(name) not in failed]


def judged(
    master: SourceNotebook, transcript: Transcript, seed: int, credit: float = SLIP_CREDIT
) -> dict[str, Feedback]:
    """Exercise → what its answer earned; the checks run here, on what the functions returned there."""
    feedback = {}
    for name in master.checks:
        otherwise = _not_answered(master, name, transcript)
        found = [
            transcript.outcomes.get((name, number), [otherwise] * len(calls))
            for number, calls in enumerate(inputs_of(name, seed))
        ]
        feedback[name] = _judged(exercises()[name], found, seed, credit)
    return feedback


def _judged(exercise: Exercise, found: list[list[Outcome]], seed: int, credit: float) -> Feedback:
    try:
        feedback = exercise.judge(found, seed, credit)
    except Exception as error:  # a value that is compared, or shown, may be anything
        why = f"cannot be judged: {type(error).__name__}: {error}"
        parts = tuple(PartResult(part.name, 0, part.points, why=why) for part in exercise.parts)
        feedback = Feedback(exercise.name, parts, seed)
    return replace(feedback, parts=tuple(_plain_part(part) for part in feedback.parts))


def _plain_part(part: PartResult) -> PartResult:
    texts: dict[str, Any] = {
        name: plain(getattr(part, name), 2000, lines=True) for name in ("given", "expected", "got", "why")
    }
    return replace(part, **texts)


def _not_answered(master: SourceNotebook, name: str, transcript: Transcript) -> Outcome:
    """Return placeholder outcomes for a missing answer."""
    if name not in transcript.missing:
        return Outcome(problem="TimeoutError", detail="the notebook did not get here")
    why = transcript.missing[name]
    error = transcript.errors.get(master.answers.get(name, ""))
    return Outcome(problem="NameError", detail=f"{why}; its cell fails: {error}" if error else why)
