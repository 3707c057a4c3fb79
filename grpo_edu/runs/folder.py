"""The folder of a run: the options, what happened, and the model. Each file is either complete or absent.

config.json     the options, written first
first_look.txt  problems, rendered prompts and stop tokens, as they were before training
metrics.jsonl   one line per step, written during training
completions.jsonl.gz   what was sampled, with rewards and advantages, for `read_completions`
tokens.jsonl.gz   of a run with `record_token_steps`: each token of these steps before and after the update
model/          the trained policy, for `load_policy`
summary.md      one page to read, with curves.png and accuracy.png
result.json     accuracies, intervals and p-value, written last
state.pt        of a run that writes checkpoints, while it is under way, and of a run that was interrupted: everything
                that it needs to continue (`grpo_edu.runs.state`)
adapters/       of a run that trained adapters, for `load_adapters`
diagnosis/      the batch on which a run stopped
tensorboard/, wandb/   of these trackers, if requested

Curricula (`grpo_edu.continual.runs`) and sweeps (`grpo_edu.studies.sweep_runs`) are kept in such folders too, with
files of their own. All of them are started, locked and resumed with the methods of `RunFolder`.
"""

from __future__ import annotations

import errno
import io
import json
import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from grpo_edu.problems.hub import read_run_config

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOCK_NAME = ".lock"
COMPLETIONS = "completions.jsonl.gz"
TOKENS = "tokens.jsonl.gz"


@contextmanager
def run_lock(folder: str | Path) -> Iterator[None]:
    """A context that locks the folder of a run, and creates the folder if it does not exist.

    The operating system keeps the lock (through `filelock`) and releases it when the process ends, in whatever way it
    ends, so a killed run leaves nothing to clear away. The file of the lock, with the id of the process, may stay.

    Raises BlockingIOError if another process, or another run of this process, has locked the folder.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> with run_lock(folder):
    ...     is_locked(folder)
    True
    >>> is_locked(folder)
    False
    """
    file = Path(folder) / LOCK_NAME
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(file)
    if not _acquire(lock):
        raise held_error(folder)
    try:
        with suppress(OSError):  # Windows does not allow it for a file that is locked
            file.write_text(f"{os.getpid()}\n", encoding="utf-8")
        yield
    finally:
        lock.release()


def is_locked(folder: str | Path) -> bool:
    """Return True if some process has locked a run's folder."""
    if not (Path(folder) / LOCK_NAME).exists():
        return False
    lock = FileLock(Path(folder) / LOCK_NAME)
    free = _acquire(lock)
    lock.release()
    return not free


def held_error(folder: str | Path) -> BlockingIOError:
    """Return the error for a folder that another process has locked."""
    try:
        process = (Path(folder) / LOCK_NAME).read_text(encoding="utf-8", errors="replace").partition("\n")[0]
    except OSError:  # the other process may have ended by now
        process = ""
    return BlockingIOError(
        f"output: {folder} is being written by another process{process and f' ({process})'}; wait for it, end it, or "
        "choose another folder"
    )


def _acquire(lock: FileLock) -> bool:
    """Acquire a lock without waiting; False if another process holds it. A file system without locks allows all."""
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
            raise
    return True


# What a run, a curriculum or a sweep that is replaced leaves: config.json, by which a run is recognized, goes last.
_REPLACED = (
    *(
        "result.json",
        "summary.md",
        "curves.png",
        "accuracy.png",
        "metrics.jsonl",
        "before.json",
        "state.pt",
        "first_look.txt",
        COMPLETIONS,
        TOKENS,
    ),
    *("model", "adapters", "checkpoints", "diagnosis", "tensorboard", "wandb"),
    *("stage-*", "matrix.json", "matrix.png", "sweep.json", "sweep.png", "optuna.log", "runs.jsonl"),
)
_OTHER_FILES_SIZE = 2**20  # bytes, generous
_RESERVED = ".reserved.tmp"  # holds the place of the files that a run writes last


class RunFolder:
    """The files of one run under `path`, which need not exist yet."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(os.path.abspath(Path(path).expanduser()))  # without .., so that an existing folder is seen
        self.metrics = self.path / "metrics.jsonl"
        self.completions = self.path / COMPLETIONS
        self.tokens = self.path / TOKENS
        self.model = self.path / "model"
        self.state = self.path / "state.pt"
        self.checkpoints = self.path / "checkpoints"  # of version 0.3.0, and of a job of TRL
        self.diagnosis = self.path / "diagnosis"

    @classmethod
    def unused(cls, name: str, *, parent: str | Path = "runs") -> RunFolder:
        """`parent/name`, or `parent/name-2`, `parent/name-3` and so on: the first that does not exist."""
        path, number = Path(parent) / name, 1
        while path.exists():
            number += 1
            path = Path(parent) / f"{name}-{number}"
        return cls(path)

    @property
    def resumable(self) -> bool:
        """True if the folder holds a state, or a checkpoint of version 0.3.0."""
        return self.state.is_file() or any(self.checkpoints.glob("step-*"))

    def check(self, *, overwrite: bool = False) -> None:
        """Check early whether a run may be written to this folder, without changing anything.

        Raises:
            FileExistsError: the folder holds a run and `overwrite` is False, or it holds other files.
            NotADirectoryError, PermissionError: the folder cannot be made, or cannot be written to.
            BlockingIOError: another process writes a run there.
        """
        nearest = self._nearest()
        if not nearest.is_dir():
            raise NotADirectoryError(f"output: {nearest} is a file; choose a folder")
        if not os.access(nearest, os.W_OK):
            raise PermissionError(f"output: {nearest} cannot be written to; choose another folder")
        if nearest != self.path:
            return
        if is_locked(self.path):
            raise held_error(self.path)
        if read_run_config(self.path) is not None:
            if not overwrite:
                raise FileExistsError(
                    f"output: {self.path} already holds a run; choose another folder, or set `overwrite`"
                )
        elif (self.path / "config.json").is_file() and self.metrics.is_file():
            raise FileExistsError(
                f"output: the config.json of the run in {self.path} is damaged, so the run cannot be replaced or "
                "resumed; delete the folder, or choose another one"
            )
        elif any(entry.name != LOCK_NAME for entry in self.path.iterdir()):
            raise FileExistsError(f"output: {self.path} holds files that are not a run; choose a new or empty folder")

    def check_apart(self, model: str | Path) -> None:
        """Raise ValueError if `model` lies in this folder, whose files a new run replaces."""
        if self.path in Path(model).expanduser().absolute().parents:
            raise ValueError(f"output: {self.path} holds the model to start from; choose another folder")

    def check_disk_space(self, model_size: int, *, resumes: bool = False) -> None:
        """Raise OSError (ENOSPC) if the models' bytes and the small files do not fit on the disk.

        What the folder holds and the run replaces counts as free: the state of a run that is resumed, or the
        files of a run that is overwritten.
        """
        replaced = ("state.pt", "checkpoints/step-*") if resumes else _REPLACED
        needed = model_size + _OTHER_FILES_SIZE
        free = shutil.disk_usage(self._nearest()).free + sum(map(size_on_disk, self._matching(*replaced)))
        if free < needed:
            advice = f"{free / 1e6:.1f} MB are free and the run needs {needed / 1e6:.1f} MB; free some space first"
            raise OSError(errno.ENOSPC, f"the disk is nearly full: {advice}", str(self.path))

    def reserve(self, model_size: int) -> None:
        """Reserve the disk space that the model and the small files will need, until `release` is called.

        Raises OSError if the disk space does not suffice.
        """
        size, place = model_size + _OTHER_FILES_SIZE, self.path / _RESERVED
        try:
            with open(place, "wb") as file:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, size)
                else:
                    file.write(bytes(size))
        except OSError as error:
            self.release()
            raise OSError(
                error.errno, f"{error.strerror}; the model will need {size / 1e6:.1f} MB", str(place)
            ) from error

    def release(self) -> None:
        """Free the space that `reserve` took, if any."""
        (self.path / _RESERVED).unlink(missing_ok=True)

    def _nearest(self) -> Path:
        """Return the folder itself, or the nearest folder above it that exists."""
        return next(folder for folder in (self.path, *self.path.parents) if folder.exists())

    @contextmanager
    def begin(self, config: dict[str, Any], *, overwrite: bool = False) -> Iterator[None]:
        """A context that holds the folder for a new run, which is claimed. Raises what `check` raises."""
        self.check(overwrite=overwrite)
        with run_lock(self.path):
            self.claim(config)
            yield

    @contextmanager
    def resume(self) -> Iterator[None]:
        """A context that holds the folder for a run that is resumed. Raises BlockingIOError if another holds it."""
        with run_lock(self.path):
            self.clear(".*.tmp", ".model.*")  # what a killed process left half written
            yield

    def claim(self, config: dict[str, Any]) -> None:
        """Make the folder, remove the files of a run that is replaced (no others), and write config.json."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.clear(_RESERVED, *_REPLACED)
        self.write_json("config.json", config)

    def read_config(self, key: str, kind: str) -> dict[str, Any]:
        """Return the options of a run of this kind; its config.json has `key`.

        Raises ValueError if the folder holds no such run.
        """
        config = read_run_config(self.path)
        if config is None or key not in config:
            raise ValueError(f"`resume`: {self.path} holds no {kind}; name the folder of one, or start a new one.")
        return config

    def note_kept(self, error: BaseException, kept: str, *, resumable: bool = True) -> None:
        """Add to an error what the folder keeps, and how to resume the run where that is possible."""
        error.add_note(
            f"{self.path} keeps {kept}"
            + (f"; continue with --resume {shlex.quote(str(self.path))}" if resumable else "")
        )

    def clear(self, *patterns: str) -> None:
        """Remove files and folders inside this one, by their names or glob patterns."""
        for path in self._matching(*patterns):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _matching(self, *patterns: str) -> list[Path]:
        return [path for pattern in patterns for path in self.path.glob(pattern)]

    def drop_state(self) -> None:
        """Remove the files that are needed only while a run is in progress."""
        shutil.rmtree(self.checkpoints, ignore_errors=True)
        self.clear("state.pt", "before.json")

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Write one JSON file, indented."""
        self.write_text(name, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Write one UTF-8 text file."""
        self._write(name, text.encode())

    def write_figure(self, name: str, figure: Figure) -> None:
        """Write one PNG."""
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=120, metadata={"Software": None})
        self._write(name, buffer.getvalue())

    def _write(self, name: str, content: bytes) -> None:
        """Write a file completely or not at all: if writing fails, an earlier file is kept."""
        temporary = self.path / f".{name}.{os.getpid()}.tmp"
        try:
            temporary.write_bytes(content)
            os.replace(temporary, self.path / name)
        except OSError as error:
            advice = f"{error.strerror}; free some space or choose another folder"
            raise OSError(error.errno, advice, str(self.path / name)) from error
        finally:
            temporary.unlink(missing_ok=True)


def size_on_disk(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
