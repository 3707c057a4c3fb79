"""Make the students' notebooks from the masters: ``python -m grpo_edu.grading.exercises``.

The masters in ``solutions/`` are notebooks in nbgrader's source format. nbgrader's own converters take the solutions
out, lock what is not to be changed and leave ``raise NotImplementedError`` behind. The result in ``exercises/`` needs
this package and no nbgrader.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbformat import NotebookNode

REPOSITORY = Path(__file__).resolve().parents[2]
TEXT_STUB = "*Write your answer here: a few sentences, with the numbers that support it.*"


def student_version(master: NotebookNode) -> NotebookNode:
    """The notebook that a student gets, from a master that is left as it is.

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
    """The masters in a folder and the folders in it, sorted by name. Raises FileNotFoundError where there is none."""
    found = sorted(folder.rglob("*.ipynb"), key=lambda path: path.stem)
    if not found:
        raise FileNotFoundError(f"masters: no notebook in {folder}; give the folder `solutions` of the course")
    return found


def write_exercises(masters: Path, folder: Path) -> list[Path]:
    """Write the student version of every master in `masters` and its folders; returns the files.

    Raises FileNotFoundError where there is no master, and what `student_version` raises.
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
    """Lay the masters out as an nbgrader course: ``source/NAME/NAME.ipynb``, and the settings beside; the files.

    Raises FileNotFoundError where there is no master, FileExistsError where `folder` holds a course already.
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


def main() -> int:
    """Write all exercises, or with --course an nbgrader course of the masters."""
    parser = argparse.ArgumentParser(prog="python -m grpo_edu.grading.exercises", description=main.__doc__)
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
