"""One student's notebooks: which file is which, repaired, run, and what the functions in them returned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_edu.grading.files import Submission, read_notebook, shown
from grpo_edu.grading.masters import Master
from grpo_edu.grading.repair import best_master, looks, open_answers, repaired, steps, written_answers
from grpo_edu.grading.results import StudentGrade
from grpo_edu.grading.run import Transcript, collect
from grpo_edu.grading.sandbox import Limits, Sandbox, SandboxFault
from grpo_edu.grading.values import plain

if TYPE_CHECKING:
    from nbformat import NotebookNode

_MUCH = 2**20  # printed bytes worth a message
_MOST_TROUBLES = 20  # messages about one student


@dataclass
class Answers:
    """What the processes found out about one student, not judged yet."""

    grade: StudentGrade
    notebooks: dict[str, NotebookNode] = field(default_factory=dict)
    transcripts: dict[str, Transcript] = field(default_factory=dict)


def answers_of(
    submission: Submission, digest: str, masters: Sequence[Master], sandbox: Sandbox, seed: int, limits: Limits
) -> Answers:
    """Read, repair and run all notebooks of a student. Whatever one of them does becomes a message about it.

    Raises SandboxFault where no student's code can be run.
    """
    grade = StudentGrade(submission.student, submission.lms_id, digest, troubles=list(submission.troubles))
    result, left = Answers(grade), limits.total_seconds
    for master, path, notebook in _matched(submission, masters, grade):
        grade.handed_in.append(master.name)
        try:
            left -= _run(master, path, notebook, result, sandbox, seed, limits, left)
        except SandboxFault:
            raise
        except Exception as error:
            grade.troubles.append(f"{master.name}: could not be graded to its end: {type(error).__name__}: {error}")
    if not grade.handed_in and not grade.troubles:
        grade.troubles.append("nothing was handed in")
    if not sandbox.isolated and grade.handed_in:
        grade.looks.append("graded without isolation")
    more = len(grade.troubles) - _MOST_TROUBLES
    grade.troubles = [plain(one) for one in grade.troubles[:_MOST_TROUBLES]]
    grade.troubles += [f"and {more} more messages"] if more > 0 else []
    return result


def _run(
    master: Master,
    path: Path,
    notebook: NotebookNode,
    result: Answers,
    sandbox: Sandbox,
    seed: int,
    limits: Limits,
    left: float,
) -> float:
    """Repair and run one notebook, and enter what came of it; the seconds that it took."""
    from nbgrader.preprocessors import CheckCellMetadata

    grade = result.grade
    whole, troubles = repaired(notebook, master)
    CheckCellMetadata().preprocess(whole, {})  # nbgrader itself must accept what we repaired
    result.notebooks[master.name] = whole
    grade.open_answers[master.name] = open_answers(whole, master)
    grade.looks += [f"{master.name}: {word}" for word in looks(whole, master)]
    transcript = collect(sandbox, steps(whole, master), seed=seed, limits=limits, seconds_left=left)
    result.transcripts[master.name] = transcript
    words = [*troubles, *transcript.troubles, *_failures(transcript, master)]
    if transcript.printed > _MUCH:
        words.append("it prints more than 1 MB, which was not kept")
    if master.name not in path.name:
        words.insert(0, f"found under the name {shown(path.name)}")
    grade.troubles += [f"{master.name}: {word}" for word in words]
    return transcript.seconds


def _matched(
    submission: Submission, masters: Sequence[Master], grade: StudentGrade
) -> Iterator[tuple[Master, Path, NotebookNode]]:
    """For each master the student's notebook.

    Of two the one with more answers counts, then the one with the master's name, then the last.
    """
    candidates: dict[str, list[tuple[int, bool, int, Path, NotebookNode]]] = {}
    for number, path in enumerate(submission.files):
        name = shown(path.name)
        try:
            notebook, troubles = read_notebook(path)
            master = best_master(notebook, path.name, masters)
        except Exception as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            grade.troubles.append(f"{name}: {reason or type(error).__name__}")
            continue
        grade.troubles += [f"{name}: {trouble}" for trouble in troubles]
        if master is None:
            grade.troubles.append(f"{name}: has none of the questions in it")
            continue
        one = (written_answers(notebook, master), path.stem == master.name, number, path, notebook)
        candidates.setdefault(master.name, []).append(one)
    for master in masters:
        found = candidates.get(master.name, [])
        if found:
            *_, path, notebook = max(found, key=lambda one: one[:3])
            if len(found) > 1:
                grade.troubles.append(f"{master.name}: {len(found)} files hold it; {shown(path.name)} counts")
            yield master, path, notebook


def _failures(transcript: Transcript, master: Master) -> list[str]:
    """The student's cells that raise, and answers that are no functions, apart from what a trouble already says."""
    locked = {name for name, cell in master.cells.items() if not cell.metadata.nbgrader.solution}
    failed = {
        name: error
        for name, error in transcript.errors.items()
        if name not in locked and error != "NotImplementedError" and not error.startswith("NothingEarned")
    }
    said = " ".join(transcript.troubles)
    found = [f"cell {name}: fails, {error}" for name, error in failed.items() if f"cell {name}: left out" not in said]
    return found + [why for name, why in transcript.missing.items() if master.answers.get(name) not in failed]
