"""Whose notebooks are in a folder of submissions, and what is in them, however they were encoded.

Understood are a folder of student folders, a folder of notebooks (as Canvas's download, or with the students' names
in their files' names), Moodle's folders, one student's own folder, and nbgrader's course (``submitted/STUDENT/…``). A
folder `submitted` with students of the class next to it is one of theirs.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from classroom.values import plain

if TYPE_CHECKING:
    from nbformat import NotebookNode

LARGEST = 200 * 2**20  # bytes of a notebook, most of them pictures
_LARGEST_READ_HERE = 20 * 2**20  # a larger one is read by a process of its own, whose memory is limited
_MOST_CELLS, _MOST_SOURCE, _MOST_SOURCES = 2_000, 2**18, 2**21  # cells; characters of one, and of all
_DEEPEST, _MOST_FILES = 20, 5_000  # folders within folders, and entries of one student
_CANVAS = re.compile(r"(?P<name>[^_]+?)(?:_LATE)?_(?P<id>\d+)_\d+_(?P<file>.+)", re.DOTALL)
_MOODLE = re.compile(r"(?P<name>.+?)_(?P<id>\d+)_assignsubmission_.*", re.DOTALL)
_OTHER = " is no notebook"
_NOBODYS = (".ipynb_checkpoints", ".git", ".Trash", "__MACOSX", "nbgrader_config.py")
_OF_A_COURSE = ("submitted", "source", "release", "autograded", "feedback")
_NOT_A_COURSE = (
    "the folder submitted was read as one student's, because others are next to it; if it is nbgrader's, grade it alone"
)
_SEPARATORS = " _-.,()[]"
_CELL_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@dataclass
class Submission:
    """What one student handed in. lms_id: the number that Canvas or Moodle wrote into the name, if any."""

    student: str
    lms_id: str = ""
    files: list[Path] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, str]:
        """What tells this student from all others, of whom some may have the same name."""
        return self.student, self.lms_id


def find_submissions(folder: Path, masters: Sequence[str]) -> list[Submission]:
    """All students' submissions, sorted by name and number; links are not followed.

    Args:
        folder: where they are.
        masters: names of the notebooks that were set, to be told from names of students.

    Raises:
        FileNotFoundError: there is no such folder, or nothing in it.
        NotADirectoryError: it is a file.
    """
    if not folder.exists():
        raise FileNotFoundError(f"submissions: there is no folder {folder}")
    if not folder.is_dir():
        raise NotADirectoryError(f"submissions: {folder} is a file; give the folder of all submissions")
    place = folder / "submitted" if _is_course(folder) else folder
    found: dict[tuple[str, str], Submission] = {}
    for path in sorted(place.iterdir()):
        is_folder = path.is_dir() and not path.is_symlink()
        if path.name.startswith(_NOBODYS) or (path.name.startswith(".") and not is_folder):
            continue
        student, lms_id = _whose(path, place, masters)
        submission = found.setdefault((student, lms_id), Submission(student, lms_id))
        if path.name == "submitted" and is_folder:
            submission.troubles.append(_NOT_A_COURSE)
        _collect(path, submission)
    if not found:
        raise FileNotFoundError(f"submissions: {place} is empty; give a folder of student folders or of notebooks")
    taken: set[tuple[str, str]] = set()
    for submission in found.values():
        if submission.files:  # what lies next to the notebooks is no problem
            submission.troubles = [one for one in submission.troubles if not one.endswith(_OTHER)]
        name, number = shown(submission.student), 1
        submission.student = name
        while submission.key in taken:  # two names on the disk that look alike once they can be shown
            number += 1
            submission.student = f"{name} ({number})"
        taken.add(submission.key)
    return sorted(found.values(), key=lambda one: one.key)


def _is_course(folder: Path) -> bool:
    """Whether the students are in ``submitted``, as in nbgrader's course, and not next to it."""
    inside = folder / "submitted"
    if inside.is_symlink() or not inside.is_dir():
        return False
    if any((folder / name).is_file() for name in ("nbgrader_config.py", "gradebook.db")):
        return True
    others = [path for path in folder.iterdir() if path.is_dir() or path.suffix == ".ipynb"]
    known = all(path.name in _OF_A_COURSE or path.name.startswith(".") for path in others)
    return known and any(path.is_dir() for path in inside.iterdir())


def shown(name: str) -> str:
    """A file's name for a table, a page or a terminal, in whatever encoding it is."""
    raw = os.fsencode(name)
    try:
        return plain(raw.decode("utf-8"))
    except UnicodeDecodeError:
        return plain(raw.decode("cp1252", "replace"))


def _whose(path: Path, place: Path, masters: Sequence[str]) -> tuple[str, str]:
    """The student's name and number, from the name of a folder or of a notebook."""
    name = path.name
    if not path.is_symlink() and path.is_dir():
        moodle = _MOODLE.fullmatch(name)
        return (moodle["name"], moodle["id"]) if moodle else (name, "")
    canvas = _CANVAS.fullmatch(name)
    if canvas:
        return canvas["name"], canvas["id"]
    stem = name.removesuffix(".ipynb")
    for master in masters:
        if master in stem:
            return stem.replace(master, "").strip(_SEPARATORS) or place.absolute().name, ""
    return stem, ""


def _collect(top: Path, submission: Submission) -> None:
    """Add the notebooks in `top` to a submission, and a message about whatever else is there."""
    waiting, seen = [(top, shown(top.name), 0)], 0
    while waiting:
        path, name, depth = waiting.pop()
        seen += 1
        if seen > _MOST_FILES or depth > _DEEPEST:
            most = f"{_MOST_FILES} files" if seen > _MOST_FILES else f"{_DEEPEST} folders within folders"
            submission.troubles.append(f"{plain(name, 80)}: there are more than {most}; the rest was not read")
            return
        try:
            if stat.S_ISDIR(path.lstat().st_mode):
                inside = sorted(path.iterdir(), reverse=True)
                if not inside and path == top:
                    submission.troubles.append(f"the folder {name} is empty")
                own = [inner for inner in inside if not inner.name.startswith((".", "__MACOSX"))]
                waiting += [(inner, f"{name}/{shown(inner.name)}", depth + 1) for inner in own]
            else:
                _take_file(path, plain(name), submission)
        except OSError as error:
            submission.troubles.append(f"{plain(name, 80)} cannot be read: {error.strerror}")


def _take_file(path: Path, name: str, submission: Submission) -> None:
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        submission.troubles.append(f"{name} is a link and was not followed")
    elif not stat.S_ISREG(status.st_mode):
        submission.troubles.append(f"{name} is no file")
    elif status.st_size > LARGEST:
        submission.troubles.append(f"{name} is larger than {LARGEST // 2**20} MB and was not read")
    elif path.suffix == ".ipynb" or (status.st_size <= _LARGEST_READ_HERE and b'"cells"' in _read(path)):
        submission.files.append(path)
    elif path.suffix in (".zip", ".tar", ".gz", ".7z", ".rar"):
        submission.troubles.append(f"{name} is packed; unpack it into the student's folder")
    elif path.suffix in (".py", ".pdf", ".docx", ".html", ".txt", ".md"):
        submission.troubles.append(f"{name}{_OTHER}")


def read_notebook(path: Path) -> tuple[NotebookNode, list[str]]:
    """A notebook of format 4 with sound cells and without outputs, and a message about what was wrong with the file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no notebook, with the reason.
    """
    read = _cells_of if path.lstat().st_size <= _LARGEST_READ_HERE else _cells_elsewhere
    cells, troubles = read(path)
    notebook, cut = _notebook(cells)
    return notebook, [*troubles, *cut]


def _cells_of(path: Path) -> tuple[list, list[str]]:
    """The cells of a file, as they are in it. Raises ValueError where it is no notebook."""
    text, troubles = _decoded(_read(path))
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError("is no notebook: it holds no JSON" if text.strip() else "is empty") from error
    cells = _cells(content)
    if cells is None:
        raise ValueError("is no notebook: it has no cells")
    return cells, troubles


def _cells_elsewhere(path: Path) -> tuple[list, list[str]]:
    """The cells of a large file without their outputs, read by a process with little time and memory."""
    env = {"PYTHONPATH": str(Path(__file__).resolve().parents[1]), "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-P", "-m", "classroom.files", str(path.absolute())]
    try:
        done = subprocess.run(command, env=env, capture_output=True, timeout=120, cwd="/")
        found = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError) as error:
        raise ValueError("is too large to be read") from error
    if "error" in found:
        raise ValueError(found["error"])
    return found["cells"], found["troubles"]


def main() -> None:
    """Print the cells of one file as JSON, without outputs and metadata that nobody needs."""
    with contextlib.suppress(ImportError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30, 4 * 2**30))
    try:
        cells, troubles = _cells_of(Path(sys.argv[1]))
        kept = [
            {name: value for name, value in cell.items() if name in ("cell_type", "source", "id", "metadata")}
            for cell in cells[: _MOST_CELLS + 1]
            if isinstance(cell, dict)
        ]
        print(json.dumps({"cells": kept, "troubles": troubles}))
    except (ValueError, OSError, MemoryError) as error:
        print(json.dumps({"error": str(error) or "is too large to be read"}))


def _read(path: Path) -> bytes:
    """The bytes of a regular file; a link, put there since we looked, is refused."""
    with open(os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0)), "rb") as file:
        return file.read(LARGEST + 1)


def _decoded(content: bytes) -> tuple[str, list[str]]:
    """The text, in UTF-8 or what else it may be.

    >>> _decoded("é".encode("cp1252"))
    ('é', ['was not in UTF-8, and was read as cp1252'])
    """
    if content.startswith(b"\xef\xbb\xbf"):
        return content.decode("utf-8-sig", "replace"), []
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        return content.decode("utf-16", "replace"), ["was not in UTF-8, and was read as utf-16"]
    try:
        return content.decode("utf-8"), []
    except UnicodeDecodeError:
        return content.decode("cp1252", "replace"), ["was not in UTF-8, and was read as cp1252"]


def _cells(content: Any) -> list | None:
    """The cells of a notebook of format 4, or of 3, whose code cells hold their text as `input`."""
    if not isinstance(content, dict):
        return None
    if isinstance(content.get("cells"), list):
        return content["cells"]
    sheets = content.get("worksheets")
    if not isinstance(sheets, list) or not all(isinstance(sheet, dict) for sheet in sheets):
        return None
    cells = [cell for sheet in sheets for cell in sheet.get("cells") or [] if isinstance(cell, dict)]
    return [{**cell, "source": cell.get("input", cell.get("source", ""))} for cell in cells]


def _notebook(cells: list) -> tuple[NotebookNode, list[str]]:
    """A notebook of these cells as far as they are sound, and a message about what was left out."""
    from nbformat import v4

    makers = {"code": v4.new_code_cell, "markdown": v4.new_markdown_cell, "raw": v4.new_raw_cell}
    made: list[NotebookNode] = []
    ids, troubles, length = set(), list[str](), 0
    for number, cell in enumerate(cells):
        if not isinstance(cell, dict):
            continue
        source = _source(cell)
        length += len(source)
        if len(made) == _MOST_CELLS or length > _MOST_SOURCES:
            troubles.append(
                f"has more than {_MOST_CELLS} cells, or {_MOST_SOURCES // 2**20} MB of text; the rest left out"
            )
            break
        if len(source) > _MOST_SOURCE:
            troubles.append(f"cell no. {number + 1} has more than {_MOST_SOURCE // 2**10} kB of text and was left out")
            continue
        own = cell.get("id")
        if not isinstance(own, str) or not _CELL_ID.fullmatch(own):
            own = f"cell-{number}"
        while own in ids:
            own = f"{own[:50]}-{number}"
        ids.add(own)
        make = makers.get(str(cell.get("cell_type")), v4.new_raw_cell)
        made.append(make(source, id=own, metadata=_marks(cell.get("metadata"))))
    return v4.new_notebook(cells=made), troubles


def _source(cell: dict) -> str:
    """The text of a cell with one kind of line ending, and with nothing that cannot be written to a file."""
    source = cell.get("source", "")
    text = "".join(map(str, source)) if isinstance(source, list) else str(source)
    return text.encode("utf-8", "replace").decode().replace("\r\n", "\n").replace("\r", "\n")


def _marks(metadata: Any) -> dict[str, Any]:
    """Of a cell's metadata what we read: nbgrader's name of the cell."""
    marks = metadata.get("nbgrader") if isinstance(metadata, dict) else None
    if not isinstance(marks, dict):
        return {}
    name = marks.get("grade_id")
    return {"nbgrader": {"grade_id": name} if isinstance(name, str) else {}}


if __name__ == "__main__":
    main()
