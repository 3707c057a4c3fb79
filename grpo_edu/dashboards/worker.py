"""Long work beside the page: a thread that can be paused and stopped, and whose error is kept and shown."""

from __future__ import annotations

import ctypes
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

SLOTS = "GRPO_EDU_APP_SLOTS"  # "folder:number": at most so many runs at a time, over all viewers of the web app


class Stopped(BaseException):
    """The work was told to stop; no `except Exception` on its way holds it up."""


class Worker:
    """One piece of work in a thread of its own.

    The work gets the worker and calls `goes_on` at places where it may be left: that waits while the work is paused
    and raises `Stopped` once it shall end. `after(error)` is called in the thread when the work has ended, with None
    or with what it raised.

    >>> seen = []
    >>> worker = Worker(lambda worker: seen.append(1), after=seen.append)
    >>> worker.start()
    >>> worker.join()
    >>> seen
    [1, None]
    """

    def __init__(self, work: Callable[[Worker], None], after: Callable[[BaseException | None], None]) -> None:
        self._work, self._after = work, after
        self._stop, self._go = threading.Event(), threading.Event()
        self._go.set()
        self._began, self._ended = threading.Event(), threading.Event()

    def start(self) -> None:
        """Begin; returns at once."""
        self._began.set()
        _in_thread(self._run)

    def stop(self) -> None:
        """Ask the work to end at the next place where it may be left."""
        self._stop.set()
        self._go.set()

    def pause(self) -> None:
        """Hold the work at the next place where it may be left."""
        self._go.clear()

    def resume(self) -> None:
        """Let paused work go on."""
        self._go.set()

    def goes_on(self) -> None:
        """A place where the work may be held or left; raises Stopped where it shall end."""
        self._go.wait()
        if self._stop.is_set():
            raise Stopped

    def wait(self, seconds: float) -> None:
        """Rest for so long, less where the work is to stop."""
        self._stop.wait(seconds)

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end."""
        self._ended.wait(timeout)

    @property
    def running(self) -> bool:
        """Whether the work has begun and not ended, paused or not."""
        return self._began.is_set() and not self._ended.is_set()

    def _run(self) -> None:
        try:
            with _Keeping() as kept:
                self._work(self)
            self._after(kept.error)
        finally:
            self._ended.set()


_idle: list[queue.SimpleQueue] = []  # of the threads that wait for work


def _in_thread(call: Callable[[], None]) -> None:
    """Run a call in a thread that an earlier one has left, or in a new one.

    OpenMP starts workers of its own for each thread that computes. With a new thread for each run memory grows by about
    0.3 MB a run.
    """
    try:
        calls = _idle.pop()
    except IndexError:
        calls = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(calls,), name="grpo_edu worker", daemon=True).start()
    calls.put(call)


def _serve(calls: queue.SimpleQueue) -> None:
    """A thread's life: one call after the other."""
    while True:
        calls.get()()
        _idle.append(calls)


class _Keeping:
    """A context that keeps what is raised inside."""

    error: BaseException | None = None

    def __enter__(self) -> _Keeping:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        self.error = error
        return True


def cut_off(call: Callable[[], Any], seconds: float, name: str) -> Any:
    """What `call` returns, or its exception; TimeoutError after so many seconds.

    The call runs in a thread that gets an exception when the time is over, so a loop in Python ends. One that waits
    inside a C function is left behind, and ends with the program.

    >>> cut_off(lambda: 2 + 3, 5, "sum")
    5
    """
    result: list[Any] = []
    with_error: list[BaseException | None] = []

    def work() -> None:
        with _Keeping() as kept:
            result.append(call())
        with_error.append(kept.error)

    thread = threading.Thread(target=work, name="grpo_edu cut off", daemon=True)  # its own: it may be left behind
    thread.start()
    thread.join(seconds)
    if not with_error:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(Stopped))
        thread.join(1.0)
        raise TimeoutError(f"{name} did not end within {seconds:g} seconds and was cut off")
    if with_error[0] is not None:
        raise with_error[0]
    return result[0]


class RunSlot:
    """A place among the runs that may go on at a time; a context. Without a limit in the environment it is free.

    A slot is a file with the number of its process; that of a process which is gone is free again.

    Raises RuntimeError where all are taken.
    """

    def __enter__(self) -> RunSlot:
        import psutil

        self._file: Path | None = None
        place, _, number = os.environ.get(SLOTS, "").rpartition(":")
        if not place:
            return self
        for slot in range(int(number)):
            file = Path(place) / f"slot{slot}"
            owner = _owner(file)
            if owner is not None and not psutil.pid_exists(owner):
                file.unlink(missing_ok=True)
            try:
                with file.open("x") as opened:
                    opened.write(str(os.getpid()))
            except FileExistsError:
                continue
            self._file = file
            return self
        raise RuntimeError(f"{number} runs are going on, which is the most this server allows; try again later")

    def __exit__(self, *exception: object) -> None:
        if self._file is not None:
            self._file.unlink(missing_ok=True)


def _owner(file: Path) -> int | None:
    text = file.read_text() if file.is_file() else ""
    return int(text) if text.isdigit() else None


def words_of(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
