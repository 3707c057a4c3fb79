"""Watch a student's process end, and end whatever it started."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from grpo_edu.grading.sandbox import User


def threads_of_this_user() -> int:
    """How many threads this user has, over all processes: the limit of processes counts them."""
    import psutil

    own = os.geteuid()
    found = psutil.process_iter(["uids", "num_threads"])
    return sum(one.info["num_threads"] or 1 for one in found if one.info["uids"] and one.info["uids"].effective == own)


def processor_time(process: int) -> float:
    """Seconds of the processor that a child has used, in all of its threads; 0 once it is gone."""
    import psutil

    with contextlib.suppress(psutil.Error):
        times = psutil.Process(process).cpu_times()
        return times.user + times.system
    return 0.0


def has_ended(process: int) -> bool:
    """Whether a child has ended, which it may still tell of."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
    return True


def wait_for_end(process: int, seconds: float) -> None:
    """Wait for a child to end, at most so long."""
    deadline = time.monotonic() + seconds
    while not has_ended(process) and time.monotonic() < deadline:
        time.sleep(0.01)


def clear_away(process: int, user: User | None) -> int | None:
    """Kill the student's process and whatever it started; its exit status."""
    import psutil

    status, deadline = None, time.monotonic() + 10
    ended = has_ended(process)
    while time.monotonic() < deadline:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process, signal.SIGKILL)
        if user is not None:
            _kill_all_of(user)
        for one in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                one.kill()
        try:
            while True:
                found, how = os.waitpid(-1, os.WNOHANG)
                if found == 0:
                    break
                if found == process:
                    status = how
        except ChildProcessError:
            break
        time.sleep(0.02)
    return status if ended else None


def _kill_all_of(user: User) -> None:
    """End all processes of a user at once, so that none can start another in the meantime."""
    process = os.fork()
    if process == 0:
        try:
            os.setresuid(user.number, user.number, user.number)
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(process, 0)
