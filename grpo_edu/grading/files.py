"""Whose notebooks are in a folder of submissions, and what is in them, however they were encoded.

Understood are a folder of student folders, a folder of notebooks (as Canvas's download, or with the students' names
in their files' names), Moodle's folders, one student's own folder, and nbgrader's course (``submitted/STUDENT/…``).
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbformat import NotebookNode

LARGEST = 20 * 2**20  # bytes of a notebook; with its pictures a course's notebook has a tenth of it
_CANVAS = re.compile(r"(?P<name>[^_]+?)(?:_LATE)?_(?P<id>\d+)_\d+_(?P<file>.+)")
_MOODLE = re.compile(r"(?P<name>.+?)_(?P<id>\d+)_assignsubmission_.*")
_OTHER = " is no notebook"
_SEPARATORS = " _-.,()[]"
_CELL_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@dataclass
class Submission:
    """What one student handed in. lms_id: the number that Canvas or Moodle wrote into the name, if any."""

    student: str
    lms_id: str = ""
    files: list[Path] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)


def find_submissions(folder: Path, masters: Sequence[str]) -> list[Submission]:
    """All students' submissions, sorted by name; links are not followed.

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
    place = folder / "submitted" if (folder / "submitted").is_dir() else folder
    found: dict[str, Submission] = {}
    for path in sorted(place.iterdir()):
        if _is_hidden(path.name) or (path.name == "nbgrader_config.py"):
            continue
        student, lms_id = _whose(path, place, masters)
        submission = found.setdefault(student, Submission(student, lms_id))
        _collect(path, path.name, submission)
    if not found:
        raise FileNotFoundError(f"submissions: {place} is empty; give a folder of student folders or of notebooks")
    for submission in found.values():
        if submission.files:  # what lies beside the notebooks is nobody's trouble
            submission.troubles = [one for one in submission.troubles if not one.endswith(_OTHER)]
    return [found[name] for name in sorted(found)]


def _is_hidden(name: str) -> bool:
    return name.startswith((".", "__MACOSX"))


def _whose(path: Path, place: Path, masters: Sequence[str]) -> tuple[str, str]:
    """The student's name and number, from the name of a folder or of a notebook."""
    name = path.name.encode("utf-8", "replace").decode()  # a name that is no UTF-8 must not break the tables
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


def _collect(path: Path, shown: str, submission: Submission) -> None:
    """Add the notebooks in `path` to a submission, and a word on whatever else is there."""
    try:
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            submission.troubles.append(f"{shown} is a link and was not followed")
        elif stat.S_ISDIR(mode):
            for inner in sorted(path.iterdir()):
                if not _is_hidden(inner.name):
                    _collect(inner, f"{shown}/{inner.name}", submission)
        elif not stat.S_ISREG(mode):
            submission.troubles.append(f"{shown} is no file")
        elif path.stat().st_size > LARGEST:
            submission.troubles.append(f"{shown} is larger than {LARGEST // 2**20} MB and was not read")
        elif path.suffix == ".ipynb" or b'"cells"' in path.read_bytes()[:LARGEST]:
            submission.files.append(path)
        elif path.suffix in (".zip", ".tar", ".gz", ".7z", ".rar"):
            submission.troubles.append(f"{shown} is packed; unpack it into the student's folder")
        elif path.suffix in (".py", ".pdf", ".docx", ".html", ".txt", ".md"):
            submission.troubles.append(f"{shown}{_OTHER}")
    except OSError as error:
        submission.troubles.append(f"{shown} cannot be read: {error.strerror}")


def read_notebook(path: Path) -> tuple[NotebookNode, list[str]]:
    """A notebook of format 4 with sound cells and without outputs, and a word on what was wrong with the file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no notebook, with the reason.
    """
    text, troubles = _decoded(_read(path))
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError("is no notebook: it holds no JSON" if text.strip() else "is empty") from error
    cells = _cells(content)
    if cells is None:
        raise ValueError("is no notebook: it has no cells")
    return _notebook(cells), troubles


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


def _notebook(cells: list) -> NotebookNode:
    from nbformat import v4

    makers = {"code": v4.new_code_cell, "markdown": v4.new_markdown_cell, "raw": v4.new_raw_cell}
    made, ids = [], set()
    for number, cell in enumerate(cells):
        if not isinstance(cell, dict):
            continue
        source = cell.get("source", "")
        source = "".join(map(str, source)) if isinstance(source, list) else str(source)
        own = cell.get("id")
        if not isinstance(own, str) or not _CELL_ID.fullmatch(own):
            own = f"cell-{number}"
        while own in ids:
            own = f"{own[:50]}-{number}"
        ids.add(own)
        metadata = cell.get("metadata")
        make = makers.get(str(cell.get("cell_type")), v4.new_raw_cell)
        made.append(make(source, id=own, metadata=metadata if isinstance(metadata, dict) else {}))
    return v4.new_notebook(cells=made)
