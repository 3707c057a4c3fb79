"""Grade a folder of submissions: ``grpo-edu grade SUBMISSIONS --output DIR``.

DIR/grades.csv        a row per student, a column per question
DIR/grades_canvas.csv, grades_moodle.csv  if requested
DIR/summary.html      for the instructor
DIR/open_answers.html the answers that a person grades, question by question, with model answer and rubric
DIR/feedback/         a page per student
DIR/notebooks/        what was graded: each notebook, repaired, with the master's locked cells and checks
DIR/grading.json, students/  the settings and each result, to continue after an interruption

nbgrader's converters and its check of cells' marks are used; its autograder is not, for it runs the checks in the
student's own kernel, where a score is a line of output, and needs a gradebook and notebooks with sound ids.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import tempfile
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from classroom.exercises import REPOSITORY, SourceNotebook, load_masters
from classroom.files import Submission, find_submissions, is_course, pack_files
from classroom.pages import feedback_page, open_answers_page, summary_page
from classroom.results import (
    FORMATS,
    GRADEBOOK,
    StudentGrade,
    check_points,
    enter_points,
    file_names,
    grades_table,
    open_column,
    points_in_gradebook,
    points_in_table,
)
from classroom.run import Answers, answers_of, judged, pack_masters
from classroom.sandbox import Limits, Sandbox, SandboxError, check_isolation
from classroom.values import plain
from grpo_edu import __version__
from grpo_edu.checks.core import SLIP_CREDIT, checked_credit
from grpo_edu.checks.feedback import plain_number
from grpo_edu.runs.folder import RunFolder
from grpo_edu.runs.loading import parse_names

SETTINGS = "grading.json"


def grade_submissions(
    submissions: str | Path,
    output: str | Path,
    *,
    masters: str | Path = REPOSITORY / "solutions",
    notebooks: Sequence[str] = (),
    seed: int | None = None,
    slip_credit: float = SLIP_CREDIT,
    limits: Limits | None = None,
    workers: int = 1,
    formats: Sequence[str] = (),
    resume: bool = False,
    isolated: bool = True,
    by_hand: str | Path | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> list[StudentGrade]:
    """Grade all students of a folder, and write tables and pages.

    Args:
        submissions: folder of student folders or notebooks, or an nbgrader course.
        output: a new or empty folder; with `resume` one where a grading with the same settings was begun.
        masters: folder of the masters.
        notebooks: beginnings of the masters' names to grade, such as "03"; all that somebody handed in if empty.
        seed: seed of the checks' inputs; the same seed gives the same grades. None takes one that no student knows, or
            with `resume` that of the grading that is continued.
        slip_credit: the share of its points that a part earns if one slip that the check can name explains all
            that is wrong with the answer; from 0 to below 1.
        limits: what a student's code may take.
        workers: students at a time.
        formats: of "canvas", "moodle": further tables.
        isolated: run students' code under bubblewrap. Without it that code can do whatever you can do.
        by_hand: a copy of ``grades.csv`` with points for open answers. In an nbgrader course the gradebook's count,
            and these before them.
        tell: called with a line on each student.

    Raises:
        FileExistsError: `output` holds something else, or a grading that is not to be resumed.
        ValueError: a bad setting, or no isolation on this system. FileNotFoundError: no submissions or masters.
        SandboxError: no process for students' code can be started. ImportError: nbgrader is missing.
        RuntimeError: points by hand match no student; everything else is written.
    """
    source, folder = Path(submissions), RunFolder(output)
    limits = limits or Limits()
    _check(source, folder, workers, formats)
    every = load_masters(Path(masters))
    course = _chosen(every, notebooks)
    others = [one for one in every if not any(one is chosen for chosen in course)]
    in_course = is_course(source) and (source / GRADEBOOK).is_file()
    given = points_in_gradebook(source / GRADEBOOK, every) if in_course else {}
    entered = points_in_table(Path(by_hand), every) if by_hand else {}
    given |= entered
    found = find_submissions(source, [master.name for master in every])
    seed = _seed(seed, folder, resume=resume)
    settings = {"grpo_edu": __version__, "seed": seed, "limits": asdict(limits), "masters": _digest_of_masters(course)}
    settings["slip_credit"] = checked_credit(slip_credit)
    settings["isolation"] = "bubblewrap" if isolated else "none"
    check_isolation(isolated, tell)
    _claim(folder, settings, resume=resume)
    files = file_names([one.key for one in found])
    hidden = [source.absolute(), folder.path.absolute(), Path(masters).absolute(), REPOSITORY / "solutions"]

    to_read = {"masters": pack_masters(course), "others": pack_masters(others)}
    stop, grades = threading.Event(), list[StudentGrade]()

    def answer(submission: Submission) -> Answers:
        with tempfile.TemporaryFile() as packed:
            sizes, digest = pack_files(submission, packed)
            kept = _kept(folder.path / "students" / f"{files[submission.key]}.json", digest)
            if kept is not None:
                return Answers(kept)
            with Sandbox(limits, isolated=isolated, hidden=hidden, stop=stop, given=packed.fileno()) as sandbox:
                return answers_of(submission, digest, course, sandbox, seed, limits, {**to_read, "files": sizes})

    try:
        with closing(_answered(found, answer, workers, stop)) as answered:
            for answers in answered:
                grade = answers.grade
                _judge(answers, course, seed, slip_credit)
                _keep(answers, course, folder, files[grade.key])
                grades.append(grade)
                tell(f"{len(grades):>4} of {len(found)}  {_line(grade)}")
    except (KeyboardInterrupt, RuntimeError, OSError) as error:
        error.add_note(f"the results of {len(grades)} of {len(found)} students are kept; continue with --resume")
        raise
    order = [one.key for one in found]
    grades.sort(key=lambda grade: order.index(grade.key))
    course = [one for one in course if notebooks or any(one.name in grade.handed_in for grade in grades)] or course
    enter_points(given, grades, course)
    graded_columns = {column for grade in grades for column in grade.by_hand}
    course = [
        replace(one, hand_graded=any(open_column(one, asked) in graded_columns for asked in one.open_questions))
        for one in course
    ]
    _write(grades, course, folder, files, formats, _words(settings, source))
    check_points(entered, order)
    return grades


def _line(grade: StudentGrade) -> str:
    earned = plain_number(sum(feedback.points for feedback in grade.feedback.values()))
    return f"{grade.label}: {earned} points" + (f"; {grade.troubles[0]}" if grade.troubles else "")


def _check(source: Path, folder: RunFolder, workers: int, formats: Sequence[str]) -> None:
    if not hasattr(os, "fork"):
        raise ValueError("grade: this system cannot fork; grade on Linux or macOS, or in a container or WSL")
    if workers < 1:
        raise ValueError(f"workers: {workers} is too few; give at least 1")
    if formats:
        parse_names(formats, tuple(FORMATS), "format")
    if source.resolve() in (folder.path.resolve(), *folder.path.resolve().parents):
        raise ValueError(f"output: {folder.path} lies within the submissions; choose a folder outside")


def _chosen(masters: list[SourceNotebook], names: Sequence[str]) -> list[SourceNotebook]:
    for name in names:
        if not any(master.name.startswith(name) for master in masters):
            known = ", ".join(master.name for master in masters)
            raise ValueError(f"notebooks: no master begins with {name!r}; there are {known}")
    return [one for one in masters if not names or one.name.startswith(tuple(names))]


def _digest_of_masters(masters: Sequence[SourceNotebook]) -> str:
    sources = [[master.name, [[cell.id, cell.source] for cell in master.notebook.cells]] for master in masters]
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest()


def _seed(seed: int | None, folder: RunFolder, *, resume: bool) -> int:
    """Return the requested one, else that of the grading that was begun, else a new one."""
    path = folder.path / SETTINGS
    if seed is None and resume and path.is_file():
        return json.loads(path.read_bytes())["seed"]
    return secrets.randbelow(2**31) if seed is None else seed


def _claim(folder: RunFolder, settings: dict[str, Any], *, resume: bool) -> None:
    """Make the folder, or find in it a grading that was done alike."""
    path = folder.path / SETTINGS
    if not path.is_file():
        folder.check()
    elif not resume:
        raise FileExistsError(
            f"output: {folder.path} already holds grades; --resume continues there, or choose another"
        )
    elif (stored := json.loads(path.read_bytes())) != settings:
        if stored.get("grpo_edu") != settings["grpo_edu"]:
            raise FileExistsError(
                f"output: {folder.path} was graded by grpo_edu {stored.get('grpo_edu')}; continue with that version, "
                "or choose another folder to grade everybody with this one"
            )
        raise FileExistsError(
            f"output: {folder.path} was graded with another seed, slip credit, isolation, limits or masters; choose "
            "another"
        )
    for part in ("", "students", "feedback", "notebooks"):
        (folder.path / part).mkdir(parents=True, exist_ok=True)
    folder.write_json(SETTINGS, settings)


def _answered(
    found: Sequence[Submission], answer: Callable[[Submission], Answers], workers: int, stop: threading.Event
) -> Generator[Answers]:
    """Yield each student's answers, as they come; what goes wrong with one of them is a message about this student.

    Not in order: one student may take minutes, and what the others handed in must not wait for that to be kept.
    """

    def work(submission: Submission) -> Answers:
        try:
            return answer(submission)
        except SandboxError:
            raise
        except Exception as error:
            return Answers(StudentGrade(submission.student, submission.lms_id, troubles=[_trouble(error)]))

    pool = ThreadPoolExecutor(workers)
    try:
        for done in as_completed([pool.submit(work, one) for one in found]):
            yield done.result()
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def _judge(answers: Answers, masters: Sequence[SourceNotebook], seed: int, slip_credit: float) -> None:
    """Enter the feedback on each answer; what goes wrong is a message about this student."""
    try:
        for master in masters:
            if master.name in answers.transcripts:
                transcript = answers.transcripts[master.name]
                answers.grade.feedback |= judged(master, transcript, seed, slip_credit)
    except Exception as error:
        answers.grade.troubles.append(_trouble(error))


def _trouble(error: Exception) -> str:
    return plain(f"could not be graded to the end: {type(error).__name__}: {error}")


def _kept(path: Path, digest: str) -> StudentGrade | None:
    if not path.is_file():
        return None
    grade = StudentGrade.from_json(json.loads(path.read_bytes()))
    return grade if grade.digest == digest else None


def _keep(answers: Answers, masters: Sequence[SourceNotebook], folder: RunFolder, name: str) -> None:
    """Write what one student gets, so that an interruption loses nothing of it."""
    import nbformat

    grade = answers.grade
    own = folder.path / "notebooks" / name
    for notebook_name, notebook in answers.notebooks.items():
        try:
            own.mkdir(exist_ok=True)
            RunFolder(own).write_text(f"{notebook_name}.ipynb", nbformat.writes(notebook) + "\n")
        except ValueError as error:
            grade.troubles.append(plain(f"{notebook_name}: the repaired notebook cannot be written: {error}"))
    there = [one for one in masters if one.name in grade.handed_in]
    RunFolder(folder.path / "feedback").write_text(f"{name}.html", feedback_page(grade, there))
    RunFolder(folder.path / "students").write_json(f"{name}.json", asdict(grade))


def _write(
    grades: Sequence[StudentGrade],
    masters: Sequence[SourceNotebook],
    folder: RunFolder,
    files: dict[tuple[str, str], str],
    formats: Sequence[str],
    settings: Sequence[str],
) -> None:
    for name in formats:
        folder.write_text(f"grades_{name}.csv", FORMATS[name](grades, masters))
    for grade in grades:
        page = feedback_page(grade, masters)
        RunFolder(folder.path / "feedback").write_text(f"{files[grade.key]}.html", page)
    folder.write_text("summary.html", summary_page(grades, masters, files, settings))
    if any(master.open_questions for master in masters):
        folder.write_text("open_answers.html", open_answers_page(grades, masters))
    folder.write_text("grades.csv", grades_table(grades, masters))


def _words(settings: dict[str, Any], source: Path) -> list[str]:
    """Return what the summary says of how it was graded."""
    limits = settings["limits"]
    isolation = "Students' code was isolated by bubblewrap."
    if settings["isolation"] == "none":
        isolation = "WITHOUT ISOLATION: students' code could read, change and send whatever the grader's account can."
    return [
        isolation,
        f"Submissions: {plain(str(source.absolute()))}",
        f"Seed of the checks' inputs: {settings['seed']} (--seed gives the same grades again)",
        f"A single slip that the checks can name earns {settings['slip_credit']:.0%} of the points (--slip-credit)",
        f"Limits: {limits['seconds']:g} s of CPU time for a cell or part of a question, "
        f"{limits['total_seconds']:g} s per student, {limits['memory'] / 2**30:g} GB of memory, "
        f"{limits['processes']} processes",
    ]
