"""One process a run: whoever writes a run's folder holds it, and a second process is refused."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

LOCK_NAME = ".lock"
_FAR = 2**30  # a byte that nobody reads: Windows keeps others from reading what is locked


class RunLock:
    """A context that holds a run's folder, which is made where it does not exist.

    The operating system keeps the lock (`flock`) and lets go of it when the process ends, however it ends: a run that
    was killed leaves nothing to clear away. On a file system without locks nothing is held.

    Raises BlockingIOError on entering where another process, or another run of this one, holds the folder.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> with RunLock(folder):
    ...     is_held(folder)
    True
    >>> is_held(folder)
    False
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.path = self.folder / LOCK_NAME

    def __enter__(self) -> RunLock:
        self.folder.mkdir(parents=True, exist_ok=True)
        while True:
            file = open(self.path, "a+b")
            if not _lock(file):
                file.close()
                raise held_error(self.folder)
            if _is_still(file, self.path):
                break
            file.close()  # the holder before has just removed it
        file.truncate(0)
        file.write(f"{os.getpid()}\n".encode())
        file.flush()
        self._file = file
        return self

    def __exit__(self, *exception: object) -> None:
        if os.name == "nt":  # an open file cannot be removed there
            self._file.close()
        self.path.unlink(missing_ok=True)
        self._file.close()


def is_held(folder: str | Path) -> bool:
    """Whether some process holds a run's folder now."""
    try:
        with open(Path(folder) / LOCK_NAME, "r+b") as file:
            return not _lock(file)
    except FileNotFoundError:
        return False


def held_error(folder: str | Path) -> BlockingIOError:
    """What to say of a folder that another process holds."""
    holder = ""
    with suppress(OSError):  # it may be gone by now
        holder = (Path(folder) / LOCK_NAME).read_text(encoding="utf-8", errors="replace").strip()
    return BlockingIOError(
        f"output: {folder} is being written by another process{holder and f' ({holder})'}; wait for it, end it, or "
        "choose another folder"
    )


def _lock(file: BinaryIO) -> bool:
    """Lock an open file without waiting; False where another holds it."""
    try:
        if os.name == "nt":
            import msvcrt

            file.seek(_FAR)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]  # Windows alone has it
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # no locks on this file system
        return True
    return True


def _is_still(file: BinaryIO, path: Path) -> bool:
    """Whether the open file is the one that the path names."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
