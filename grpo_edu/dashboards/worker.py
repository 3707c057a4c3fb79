"""Long work in the background: a thread that can be paused and stopped, time limits, and slots for training runs."""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

SLOTS = "GRPO_EDU_APP_SLOTS"  # "folder:number": the web app allows that many runs at a time, over all its viewers


class Stopped(asyncio.CancelledError):
    """The work was told to stop. It is not an `Exception`, so no handler of ordinary errors swallows it.

    As a cancellation it passes through a reward function without being taken for the function's own error.
    """


class Worker:
    """One piece of work in a thread of its own.

    The work receives the worker and calls `goes_on` wherever it may be interrupted: that call waits while the work is
    paused, and raises `Stopped` once the work shall end. Whoever starts the work may set `holds`, which is called in
    the thread before each wait, and `after(error)` is called there when the work has ended, with None or with the
    exception that it raised.

    >>> seen = []
    >>> worker = Worker(lambda worker: seen.append(1), after=seen.append)
    >>> worker.start()
    >>> worker.join()
    >>> seen
    [1, None]
    """

    def __init__(self, work: Callable[[Worker], None], after: Callable[[BaseException | None], None]) -> None:
        self._work, self._after = work, after
        self.holds: Callable[[], None] = lambda: None
        self._stop, self._go = threading.Event(), threading.Event()
        self._go.set()
        self._began, self._ended = threading.Event(), threading.Event()

    def start(self) -> None:
        """Begin; returns at once."""
        self._began.set()
        _in_thread(self._run, self.stop)

    def stop(self) -> None:
        """Ask the work to end at its next call of `goes_on`."""
        self._stop.set()
        self._go.set()

    def pause(self) -> None:
        """Hold the work at its next call of `goes_on`."""
        self._go.clear()

    def resume(self) -> None:
        """Let paused work continue."""
        self._go.set()

    def goes_on(self) -> None:
        """Wait while the work is paused; raise `Stopped` if a stop was requested."""
        while self.paused:  # asked here and nowhere else, so that no pause comes between the question and the wait
            self.holds()
            self._go.wait()
        if self._stop.is_set():
            raise Stopped

    def wait(self, seconds: float) -> None:
        """Sleep for `seconds`, or until the work is told to stop."""
        self._stop.wait(seconds)

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end."""
        self._ended.wait(timeout)

    @property
    def paused(self) -> bool:
        """True if the work will wait, or waits, at `goes_on`."""
        return not self._go.is_set()

    @property
    def running(self) -> bool:
        """True if the work has begun and not ended, paused or not."""
        return self._began.is_set() and not self._ended.is_set()

    def _run(self) -> None:
        try:
            self._after(_outcome(self._work, self).exception())
        finally:
            self._ended.set()


_idle: list[tuple[threading.Thread, queue.SimpleQueue]] = []  # the threads that wait for work
_busy: dict[threading.Thread, Callable[[], None]] = {}  # the threads that have work, and what asks each to end it
GRACE, PATIENCE = 2.0, 4.0  # seconds for work to end where it can be interrupted, and for all threads to end, at exit


def _in_thread(call: Callable[[], None], stop: Callable[[], None]) -> None:
    """Run a call in a daemon thread, if possible in one that an earlier call has left; `stop` asks it to end.

    A `ThreadPoolExecutor` will not do: the program waits for its threads before it ends, and a paused run never ends.
    The threads are used again because PyTorch keeps memory for each thread that has computed: with a new thread per
    training run, memory grew by half a megabyte per run.
    """
    try:
        thread, calls = _idle.pop()
    except IndexError:
        calls = queue.SimpleQueue()
        thread = threading.Thread(target=_serve, args=(calls,), name="grpo_edu worker", daemon=True)
        thread.start()
    _busy[thread] = stop
    calls.put(call)


def import_early(module: str) -> None:
    """Import a module in a thread, so that it is there when it is needed; an error comes where it is needed."""

    def load() -> None:
        with suppress(Exception):
            import_module(module)

    if module not in sys.modules:
        _in_thread(load, lambda: None)


def _serve(calls: queue.SimpleQueue) -> None:
    thread = threading.current_thread()
    while True:
        with suppress(Stopped):
            calls.get()()
        del _busy[thread]
        _idle.append((thread, calls))


def _interrupt(thread: threading.Thread) -> None:
    """Raise `Stopped` in a thread, as soon as it executes Python code."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(Stopped))


@atexit.register
def _end_all() -> None:
    """End the work of all threads before Python ends.

    Python ends a daemon thread at the moment at which it returns from a C function. In the middle of PyTorch's C++ code
    this aborts the whole process ("terminate called without an active exception").
    """
    start = time.monotonic()
    while any(thread.is_alive() for thread in list(_busy)) and (waited := time.monotonic() - start) < PATIENCE:
        for thread, stop in list(_busy.items()):
            stop() if waited < GRACE else _interrupt(thread)
        time.sleep(0.01)


def _outcome(call: Callable[..., Any], *arguments: Any) -> Future:
    """Return a future of what a call returned or raised, whatever it was: an error of a thread is shown in the page."""
    outcome: Future = Future()
    try:
        outcome.set_result(call(*arguments))
    except BaseException as error:
        outcome.set_exception(error)
    return outcome


def cut_off(call: Callable[[], Any], seconds: float, name: str) -> Any:
    """Return what `call` returns, or raise its error; raise TimeoutError when it takes longer than `seconds`.

    The call runs in a thread. After the time limit an exception is raised in that thread, which ends a loop in Python.
    A call that waits inside a C function is left behind, and ends with the program.

    >>> cut_off(lambda: 2 + 3, 5, "sum")
    5
    """
    outcomes: list[Future] = []

    def answer() -> None:
        try:
            outcomes.append(_outcome(call))
        finally:
            _busy.pop(threading.current_thread(), None)

    thread = threading.Thread(target=answer, name="grpo_edu cut off", daemon=True)
    _busy[thread] = lambda: _interrupt(thread)
    thread.start()
    thread.join(seconds)
    if not outcomes:
        _interrupt(thread)
        thread.join(1.0)
        raise TimeoutError(f"{name} took longer than {seconds:g} seconds and was cut off; look for an endless loop")
    return outcomes[0].result()


class NoSlot(RuntimeError):
    """No further training run may start now; the message says what to do."""


@contextmanager
def run_slot(wait: Callable[[int], None] | None = None) -> Iterator[None]:
    """A context that holds one of the slots for training runs; without a limit in the environment there is always one.

    Slots and places in the queue are locks of the operating system on files, which are free again when their process
    ends, however it ends.

    Args:
        wait: called again and again with the place in the queue, 1 for the next in turn, until there is a slot; it
            sleeps for a while, and may raise Stopped.

    Raises NoSlot if all slots are taken and there is no ``wait``.
    """
    folder, _, number = os.environ.get(SLOTS, "").rpartition(":")
    if not folder:
        yield
        return
    with ExitStack() as held:
        if wait is not None:
            _wait_in_queue(Path(folder), int(number), held, wait)
        elif not _take_one(Path(folder), int(number), held):
            raise NoSlot(
                f"Another run is being trained, and this server trains at most {number} at a time, over all its "
                "viewers. Your settings are kept. Press the button again when the other run has ended."
            )
        yield


def _wait_in_queue(folder: Path, number: int, held: ExitStack, wait: Callable[[int], None]) -> None:
    """Lock one of the slots until `held` is closed, after those who came earlier."""
    from filelock import FileLock

    mine = folder / f"queue-{time.time_ns():020}-{os.getpid()}-{threading.get_ident()}"
    try:
        with FileLock(mine, timeout=60):  # others hold it for a moment when they look whether it is held
            while True:
                place = 1 + sum(_is_held(other) for other in folder.glob("queue-*") if other.name < mine.name)
                if place == 1 and _take_one(folder, number, held):
                    return
                wait(place)
    finally:
        with suppress(OSError):
            mine.unlink(missing_ok=True)


def _take_one(folder: Path, number: int, held: ExitStack) -> bool:
    """Lock one of the slots until `held` is closed; False if all of them are taken."""
    from filelock import FileLock, Timeout

    for slot in range(number):
        with suppress(Timeout):
            held.enter_context(FileLock(folder / f"slot{slot}").acquire(blocking=False))
            return True
    return False


def _is_held(path: Path) -> bool:
    """Return True if the lock of a file is held by somebody else."""
    from filelock import FileLock, Timeout

    try:
        with FileLock(path).acquire(blocking=False):
            return False
    except Timeout:
        return True


def in_queue(worker: Worker, say: Callable[[str], None]) -> Callable[[int], None]:
    """Return what a run does while it waits for its slot: it says its place in the queue, and can be stopped."""

    def wait(place: int) -> None:
        say(f"Another run is being trained. Yours is number {place} in the queue and starts by itself. Stop leaves it.")
        worker.goes_on()
        worker.wait(1.0)

    return wait


def words_of(error: BaseException) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
