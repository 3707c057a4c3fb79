"""A run's metrics as JSON lines that survive a kill. Needs no torch, so a dashboard reads a log at once."""

import errno
import json
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any


class RunLog(AbstractContextManager):
    """Append one JSON object per line; each line reaches the operating system before `append` returns.

    A log that a kill cut in the middle of its last line can be opened again: the broken tail is dropped, so that
    the next line starts clean. NaN and infinity, which JSON lacks, are written as null.

    Args:
        path: the file; it is made, with its folder, if it does not exist.

    Raises:
        OSError: the file is a link, or cannot be opened or written (a full disk); it names the file, and the lines
            before stay.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
    >>> with RunLog(path) as log:
    ...     log.append({"step": 1, "reward": 0.5, "kl": float("nan")})
    >>> read_log(path)
    [{'step': 1, 'reward': 0.5, 'kl': None}]
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if self.path.is_symlink():  # in a folder of somebody else it may lead to any file of the user
            raise OSError(errno.ELOOP, "is a link to a file, which would be changed; put a copy here", str(self.path))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _close_tail(self.path)
        self._file = open(self.path, "ab", buffering=0)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record; values may be numbers, strings, None, lists, dicts or one-element tensors."""
        line = json.dumps(to_plain(record), allow_nan=False).encode() + b"\n"
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            reason = f"{error.strerror}, cannot append to the run log (free some space; earlier lines are kept)"
            raise OSError(error.errno, reason, str(self.path)) from error

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        self._file.close()

    def __exit__(self, *exception: object) -> None:
        self.close()


def write_log(path: str | os.PathLike[str], records: Iterable[Mapping[str, Any]]) -> None:
    """Write a whole log, replacing the file."""
    Path(path).unlink(missing_ok=True)
    with RunLog(path) as log:
        for record in records:
            log.append(record)


def read_log(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read what `RunLog` wrote. A last line that a kill cut short is left out; null reads as None.

    Raises:
        ValueError: any other line is not a JSON object; the message starts with file:line.
        FileNotFoundError: there is no such file.
    """
    *lines, tail = Path(path).read_bytes().split(b"\n")
    if _parse(tail) is not None:
        lines.append(tail)
    records = []
    for number, line in enumerate(lines, start=1):
        record = _parse(line)
        if record is None:
            text = line[:60].decode(errors="replace")
            raise ValueError(f"{path}:{number}: not a JSON object: {text!r}; correct or delete this line")
        records.append(record)
    return records


def _parse(line: bytes) -> dict[str, Any] | None:
    """Parse the JSON object on a line; None if the line is not a JSON object."""
    try:
        record = json.loads(line)
    except ValueError:  # not JSON, or not UTF-8
        return None
    return record if isinstance(record, dict) else None


def _close_tail(path: Path) -> None:
    """Drop a last line that was cut short; close one that only lacks its newline."""
    if not path.is_file():
        return
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end == len(content):
        return
    with open(path, "r+b") as file:
        if _parse(content[end:]) is not None:
            file.seek(0, os.SEEK_END)
            file.write(b"\n")
        else:
            file.truncate(end)


def to_plain(value: Any) -> Any:
    """Return a copy that JSON can store: tensors and numpy values become numbers, and NaN and infinity become None."""
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
