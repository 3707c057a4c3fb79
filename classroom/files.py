"""Whose notebooks are in a folder of submissions; what is in them is read in the student's own process (`reading`).

Understood are a folder of student folders, a folder of notebooks (as Canvas's download, or with the students' names
in their files' names), Moodle's folders, one student's own folder, and nbgrader's course (``submitted/STUDENT/…``). A
folder `submitted` with students of the class next to it is one of theirs.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import stat
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from classroom.values import plain

# Of one student: folders within folders, entries, notebooks, bytes of a notebook (most of them pictures) and of all.
_DEEPEST, _MOST_FILES, MOST_NOTEBOOKS = 20, 5_000, 50
MAX_BYTES, _MAX_BYTES_TOGETHER = 64 * 2**20, 128 * 2**20
_SNIFFED = 2**16  # bytes in which a notebook under another ending must name its cells
_CANVAS = re.compile(r"(?P<name>[^_]+?)(?:_LATE)?_(?P<id>\d+)_\d+_(?P<file>.+)", re.DOTALL)
# Moodle's own number is the last one, because students choose their names.
_MOODLE = re.compile(r"(?P<name>.+)_(?P<id>\d+)_assignsubmission_.*", re.DOTALL)
_OTHER = " is not a notebook"
_NOBODYS = (".ipynb_checkpoints", ".git", ".Trash", "__MACOSX", "nbgrader_config.py")
_OF_A_COURSE = ("submitted", "source", "release", "autograded", "feedback")
_NOT_A_COURSE = (
    "the folder submitted was read as one student's, because others are next to it; if it is nbgrader's, grade it alone"
)
_SEPARATORS = " _-.,()[]"


@dataclass
class Submission:
    """The files of one student. lms_id: the number that Canvas or Moodle wrote into the name, if any."""

    student: str
    lms_id: str = ""
    files: list[Path] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, str]:
        """The unique key of a student; names may repeat."""
        return self.student, self.lms_id


def find_submissions(folder: Path, masters: Sequence[str]) -> list[Submission]:
    """Return all students' submissions, sorted by name and number; links are not followed.

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
    place = folder / "submitted" if is_course(folder) else folder
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
    # Those whose names are shown as they are on the disk come first, so nobody else gets one of these names.
    for submission in sorted(found.values(), key=lambda one: one.student != shown(one.student)):
        if submission.files:  # what lies next to the notebooks is not a problem, unless it stands for one of them
            missing = [master for master in masters if not any(master in path.name for path in submission.files)]
            submission.troubles = [
                one for one in submission.troubles if not one.endswith(_OTHER) or any(name in one for name in missing)
            ]
        name, number = shown(submission.student), 1
        submission.student = name
        while submission.key in taken:  # two names on the disk that look alike once they can be shown
            number += 1
            submission.student = f"{name} ({number})"
        taken.add(submission.key)
    return sorted(found.values(), key=lambda one: one.key)


def is_course(folder: Path) -> bool:
    """Return True if the students are in ``submitted``, as in nbgrader's course, and not next to it."""
    inside = folder / "submitted"
    if not folder.is_dir() or inside.is_symlink() or not inside.is_dir():
        return False
    if any((folder / name).is_file() for name in ("nbgrader_config.py", "gradebook.db")):
        return True
    others = [path for path in folder.iterdir() if path.is_dir() or path.suffix == ".ipynb"]
    known = all(path.name in _OF_A_COURSE or path.name.startswith(".") for path in others)
    return known and any(path.is_dir() for path in inside.iterdir())


def shown(name: str) -> str:
    """Return a file's name for a table, a page or a terminal, in any encoding, so that no two of them look the same.

    >>> shown("Jose\u0301 "), shown("an\u200ba")
    ('José', 'ana')
    """
    raw = os.fsencode(name)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        text = raw.decode("cp1252", "replace")
    composed = unicodedata.normalize("NFC", plain(text))
    visible = "".join(letter for letter in composed if unicodedata.category(letter) != "Cf")
    return " ".join(visible.split()) or "?"


def _whose(path: Path, place: Path, masters: Sequence[str]) -> tuple[str, str]:
    """Return the student's name and number, from the name of a folder or of a notebook."""
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
                with os.scandir(path) as entries:  # there may be millions
                    first = [Path(one.path) for one in itertools.islice(entries, _MOST_FILES + 1)]
                inside = sorted(first, reverse=True)
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
        submission.troubles.append(f"{name} is not a file")
    elif status.st_size > MAX_BYTES:
        submission.troubles.append(f"{name} is larger than {MAX_BYTES // 2**20} MB and was not read")
    elif path.suffix == ".ipynb" or b'"cells"' in _read(path, _SNIFFED):
        if len(submission.files) == MOST_NOTEBOOKS:
            submission.troubles.append(f"{name} was not read, because {MOST_NOTEBOOKS} notebooks are before it")
        else:
            submission.files.append(path)
    elif path.suffix in (".zip", ".tar", ".gz", ".7z", ".rar"):
        submission.troubles.append(f"{name} is packed; unpack it into the student's folder")
    elif path.suffix in (".py", ".pdf", ".docx", ".html", ".txt", ".md"):
        submission.troubles.append(f"{name}{_OTHER}")


def pack_files(submission: Submission, target: BinaryIO) -> tuple[list[tuple[str, int]], str]:
    """Copy a student's files into one, behind each other; each one's name and size, and a digest of all.

    A file that cannot be read is a message about this student.
    """
    packed: list[tuple[str, int]] = []
    whole = hashlib.sha256(json.dumps([*submission.key, submission.troubles]).encode())
    for path in submission.files:
        name = shown(path.name)
        try:
            content = _read(path, MAX_BYTES)
        except OSError as error:
            submission.troubles.append(f"{name} cannot be read: {error.strerror}")
            continue
        if target.tell() + len(content) > _MAX_BYTES_TOGETHER:
            submission.troubles.append(f"{name} was not read: all together are over {_MAX_BYTES_TOGETHER // 2**20} MB")
            continue
        packed.append((name, target.write(content)))
        whole.update(os.fsencode(path.name) + hashlib.sha256(content).digest())
    target.flush()
    target.seek(0)
    return packed, whole.hexdigest()


def _read(path: Path, most: int) -> bytes:
    """Return the first bytes of a regular file; a link or a pipe, put there since we looked, is refused or empty."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    with open(os.open(path, flags), "rb") as file:
        return file.read(most) or b""
