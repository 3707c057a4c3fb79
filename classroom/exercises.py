"""The masters, and the students' notebooks that are made from them: ``python -m classroom.exercises``.

The masters in ``solutions/`` are notebooks in nbgrader's source format. nbgrader's own converters take the solutions
out, lock what is not to be changed and leave ``raise NotImplementedError`` behind. The result in ``exercises/`` needs
this package and no nbgrader.
"""

from __future__ import annotations

import argparse
import re
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from classroom.syntax import definitions

if TYPE_CHECKING:
    from nbformat import NotebookNode

REPOSITORY = Path(__file__).resolve().parents[1]
TEXT_STUB = "*Write your answer here: a few sentences, with the numbers that support it.*"
CHECK_CALL = re.compile(r"checks\.check_(\w+)\(")
_ONE_CHECK = re.compile(r"checks\.check_(\w+)\((\w+)\)\.grade\(\)")


def student_version(master: NotebookNode) -> NotebookNode:
    """Return the notebook that a student gets, from a master that is left as it is.

    Raises:
        ImportError: nbgrader is missing (the extra ``classroom``).
        ValueError: a solution without its end, cells without an id or with the same, points without a check.
    """
    import copy

    try:
        from nbgrader.preprocessors import CheckCellMetadata, ClearOutput, ClearSolutions, LockCells
    except ImportError as error:
        raise ImportError("nbgrader is missing: pip install 'grpo-edu[classroom]'") from error
    from traitlets.config import Config

    config = Config()
    config.ClearSolutions.code_stub = {"python": "raise NotImplementedError"}
    config.ClearSolutions.text_stub = TEXT_STUB
    student, resources = copy.deepcopy(master), dict[str, Any]()
    for step in (CheckCellMetadata, ClearSolutions, LockCells, ClearOutput):
        try:
            student, resources = step(config=config).preprocess(student, resources)
        except RuntimeError as error:
            raise ValueError(f"the master cannot be converted ({step.__name__}): {error}") from error
    return student


def find_masters(folder: Path) -> list[Path]:
    """Return the masters in a folder and the folders in it, sorted by name; FileNotFoundError if there are none."""
    found = sorted(folder.rglob("*.ipynb"), key=lambda path: path.stem)
    if not found:
        raise FileNotFoundError(f"masters: no notebook in {folder}; give the folder `solutions` of the course")
    return found


def write_exercises(masters: Path, folder: Path) -> list[Path]:
    """Write the student version of every master in `masters` and its folders; returns the files.

    Raises FileNotFoundError if there is no master, and what `student_version` raises.
    """
    import nbformat

    written = []
    for path in find_masters(masters):
        student = student_version(nbformat.read(path, as_version=nbformat.NO_CONVERT))
        written.append(folder / path.relative_to(masters))
        written[-1].parent.mkdir(parents=True, exist_ok=True)
        written[-1].write_text(nbformat.writes(student) + "\n", encoding="utf-8")
    return written


def write_course(masters: Path, folder: Path) -> list[Path]:
    """Arrange the masters as an nbgrader course (``source/NAME/NAME.ipynb`` and the settings); returns the files.

    Raises FileNotFoundError if there is no master, FileExistsError if `folder` holds a course already.
    """
    if (folder / "source").exists():
        raise FileExistsError(f"course: {folder} holds a course already; choose a new folder")
    written = []
    for path in find_masters(masters):
        written.append(folder / "source" / path.stem / path.name)
        written[-1].parent.mkdir(parents=True)
        shutil.copyfile(path, written[-1])
    written.append(folder / "nbgrader_config.py")
    shutil.copyfile(masters / "nbgrader_config.py", written[-1])
    return written


@dataclass(frozen=True)
class Question:
    """A function to write. cell: id of its check. exercise: its name in `grpo_edu.checks`, and the function's."""

    cell: str
    exercise: str
    points: int


@dataclass(frozen=True)
class OpenQuestion:
    """A question that a person grades. cell: id of the answer's cell. text, model: question; answer and rubric."""

    cell: str
    points: int
    text: str
    model: str


@dataclass(frozen=True)
class SourceNotebook:
    """A notebook as students got it.

    name: its file name without .ipynb. hand_graded: somebody has graded open answers, so these count.
    """

    name: str
    notebook: NotebookNode
    questions: tuple[Question, ...]
    open_questions: tuple[OpenQuestion, ...] = ()
    hand_graded: bool = False

    @cached_property
    def cells(self) -> dict[str, NotebookNode]:
        """Cell by nbgrader's id, in order."""
        return {cell.metadata.nbgrader.grade_id: cell for cell in self.notebook.cells}

    @cached_property
    def answers(self) -> dict[str, str]:
        """Function to write → id of the cell where it is to be written."""
        wanted = {question.exercise for question in self.questions}
        return {
            name: cell_id
            for cell_id, cell in self.cells.items()
            if cell.metadata.nbgrader.solution
            for name in definitions(cell.source)
            if name in wanted
        }

    @cached_property
    def checks(self) -> dict[str, str]:
        """Exercise → id of its check cell."""
        return {question.exercise: question.cell for question in self.questions}

    @property
    def points(self) -> int:
        """Of all questions that are graded."""
        points = sum(question.points for question in self.questions)
        return points + sum(question.points for question in self.open_questions if self.hand_graded)


def load_masters(folder: Path) -> list[SourceNotebook]:
    """Return all masters of a folder and the folders in it, sorted by name.

    Raises:
        FileNotFoundError: no notebook. ValueError: one cannot be converted, or a check is not part of the course.
        ImportError: nbgrader is missing.
    """
    import nbformat

    return [_master(path.stem, nbformat.read(path, as_version=4)) for path in find_masters(folder)]


def _master(name: str, notebook: NotebookNode) -> SourceNotebook:
    from grpo_edu.checks import exercises

    questions, open_questions, before = [], [], ""
    for cell in notebook.cells:
        marks = cell.metadata.get("nbgrader", {})
        if marks.get("grade") and marks.get("solution"):  # nbgrader's mark of a cell that a person grades
            open_questions.append(OpenQuestion(marks.grade_id, marks.points, before, cell.source))
        before = cell.source
        if not marks.get("grade") or marks.get("solution"):
            continue
        check = _ONE_CHECK.fullmatch(cell.source.strip())
        if not check or check[1] != check[2] or check[1] not in exercises():
            raise ValueError(f"masters: {name}: {cell.source[:60]!r} is not a check of an exercise of this course")
        questions.append(Question(cell.metadata.nbgrader.grade_id, check[1], exercises()[check[1]].max_points))
    student = student_version(notebook)
    for cell in student.cells:
        cell.id = cell.metadata.nbgrader.grade_id  # one name for a cell, whichever of the two a student's file kept
    return SourceNotebook(name, student, tuple(questions), tuple(open_questions))


def main() -> int:
    """Write all exercises, or with --course an nbgrader course of the masters."""
    parser = argparse.ArgumentParser(prog="python -m classroom.exercises", description=main.__doc__)
    parser.add_argument("--masters", type=Path, default=REPOSITORY / "solutions")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "exercises")
    parser.add_argument("--course", type=Path, metavar="DIR", help="lay out an nbgrader course here instead")
    options = parser.parse_args()
    if options.course:
        for path in write_course(options.masters, options.course):
            print(path.relative_to(options.course))
        return 0
    for path in write_exercises(options.masters, options.output):
        print(path.name)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
