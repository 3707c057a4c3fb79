"""One student's notebooks: which file is which, mended, run, and what the functions in them returned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_edu.grading.files import Submission, read_notebook
from grpo_edu.grading.masters import Master
from grpo_edu.grading.repair import best_master, looks, repaired, steps
from grpo_edu.grading.results import StudentGrade
from grpo_edu.grading.run import Transcript, Worker, collect
from grpo_edu.grading.sandbox import PROTECTIONS, Limits

if TYPE_CHECKING:
    from nbformat import NotebookNode

_MUCH = 2**20  # printed bytes worth a word


@dataclass
class Answers:
    """What the processes found out about one student, not judged yet."""

    grade: StudentGrade
    notebooks: dict[str, NotebookNode] = field(default_factory=dict)
    transcripts: dict[str, Transcript] = field(default_factory=dict)


def answers_of(
    submission: Submission, digest: str, masters: Sequence[Master], worker: Worker, seed: int, limits: Limits
) -> Answers:
    """Read, mend and run all notebooks of a student."""
    grade = StudentGrade(submission.student, submission.lms_id, digest, troubles=list(submission.troubles))
    result, left = Answers(grade), limits.total_seconds
    for master, path, notebook in _matched(submission, masters, grade):
        mended, troubles = repaired(notebook, master)
        _check_marks(mended)
        transcript = collect(worker, steps(mended, master), seed=seed, limits=limits, seconds_left=left)
        left -= transcript.seconds
        result.notebooks[master.name], result.transcripts[master.name] = mended, transcript
        grade.handed_in.append(master.name)
        words = [*troubles, *transcript.troubles, *_failures(transcript, master)]
        if transcript.printed > _MUCH:
            words.append("it prints more than 1 MB, which was not kept")
        if master.name not in path.name:
            words.insert(0, f"found under the name {path.name.encode('utf-8', 'replace').decode()}")
        grade.troubles += [f"{master.name}: {word}" for word in words]
        grade.looks += [f"{master.name}: {word}" for word in looks(mended, master)]
        grade.protections = [one for one in PROTECTIONS if one in transcript.protections]
    if not grade.handed_in and not grade.troubles:
        grade.troubles.append("nothing was handed in")
    return result


def _matched(
    submission: Submission, masters: Sequence[Master], grade: StudentGrade
) -> Iterator[tuple[Master, Path, NotebookNode]]:
    """For each master the student's notebook; of two the one that has the master's name, or else the last."""
    candidates: dict[str, list[tuple[bool, Path, NotebookNode]]] = {}
    for path in submission.files:
        shown = path.name.encode("utf-8", "replace").decode()
        try:
            notebook, troubles = read_notebook(path)
        except (ValueError, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            grade.troubles.append(f"{shown}: {reason}")
            continue
        grade.troubles += [f"{shown}: {trouble}" for trouble in troubles]
        master = best_master(notebook, path.name, masters)
        if master is None:
            grade.troubles.append(f"{shown}: has none of the questions in it")
            continue
        candidates.setdefault(master.name, []).append((path.stem == master.name, path, notebook))
    for master in masters:
        found = candidates.get(master.name, [])
        if found:
            named = [one for one in found if one[0]]
            _, path, notebook = (named or found)[-1]
            if len(found) > 1:
                grade.troubles.append(f"{master.name}: {len(found)} files hold it; {path.name} counts")
            yield master, path, notebook


def _check_marks(notebook: NotebookNode) -> None:
    """nbgrader itself must accept what we mended."""
    from nbgrader.preprocessors import CheckCellMetadata

    CheckCellMetadata().preprocess(notebook, {})


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
