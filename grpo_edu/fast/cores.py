"""How many cores this process may use now, and how OpenMP's threads wait for each other.

torch splits a large operation among OpenMP threads, and each thread waits at the end for the others. GNU's OpenMP
(libgomp, part of torch's wheels for Linux) waits by *spinning*: it asks again and again, which is fast as long as every
thread has a core of its own. When another program needs one of these cores, the spinning thread keeps the core from the
very thread that it waits for, and a training step can take many times as long. Two measures prevent this:

- `prepare_openmp` shortens the spinning. It sets environment variables that OpenMP reads when torch is imported, so
  `import grpo_edu` calls it, and ``course.py`` sets the same variable for JupyterLab and its kernels.
- `FreeCores` measures how busy the other programs are, and lets torch compute with only as many threads as cores are
  free. It acts at any time, so also when torch was imported first. `generate` and `train` use it.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator, MutableMapping
from functools import cache
from pathlib import Path

# 20,000 rounds take a fraction of a millisecond, so threads that all have a core still meet without falling asleep.
# libgomp's default is 300,000 rounds, several milliseconds.
SPIN_COUNT = 20_000
# A variable with which the user decides how OpenMP's threads wait; then `prepare_openmp` leaves the waiting alone.
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_THREAD_LIMIT")
_LONG_SPIN = 100_000  # rounds from which a busy computer stalls
# Seconds over which the use of the cores is averaged. The system counts it in hundredths of a second for each core, so
# over a tenth of a second rounding alone looked like a busy program now and then.
_SHORTEST_LOOK, _LONGEST_LOOK = 0.25, 2.0
_TOLERATED = 0.25  # of a core: what other programs may use before torch gives up a thread

# Where torch came first, OpenMP has read its variables already: what is set below reaches child processes only.
_TOO_LATE = "torch" in sys.modules and not any(name in os.environ for name in _WAITING)


def prepare_openmp(environment: MutableMapping[str, str]) -> None:
    """Set OpenMP's variables for a computer that is shared; what the user has set stays.

    ``GOMP_SPINCOUNT`` shortens the spinning. ``OMP_NUM_THREADS`` is set only if a container's quota grants fewer
    cores than the process sees. OpenMP reads both when torch is imported.

    Args:
        environment: the variables of a process, such as `os.environ`.

    >>> environment = {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "4"}
    >>> prepare_openmp(environment)
    >>> environment
    {'OMP_WAIT_POLICY': 'PASSIVE', 'OMP_NUM_THREADS': '4'}
    """
    if not any(name in environment for name in _WAITING):
        environment["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
    if cpu_quota() < len(usable_cpus()) and not any(name in environment for name in _THREADS):
        environment["OMP_NUM_THREADS"] = str(max(1, math.floor(cpu_quota())))


def spin_wait_warning() -> str:
    """Return why spinning threads may stall this process on a busy computer, or "".

    Call it after torch was imported.
    """
    maps = Path("/proc/self/maps")
    if not maps.is_file() or "libgomp" not in maps.read_text(errors="replace"):
        return ""  # the OpenMP of LLVM and Intel offers its core to other programs while it waits
    if _TOO_LATE:
        return "torch was imported before grpo_edu, so OpenMP waits as long as by default"
    spins, policy = os.environ.get("GOMP_SPINCOUNT", ""), os.environ.get("OMP_WAIT_POLICY", "")
    if spins and (not spins.strip().isdigit() or int(spins) > _LONG_SPIN):
        return f"GOMP_SPINCOUNT={spins} lets a waiting thread keep its core for a long time"
    if not spins and policy.strip().upper() == "ACTIVE":
        return f"OMP_WAIT_POLICY={policy} lets a waiting thread keep its core for a long time"
    return ""


class FreeCores:
    """Let torch compute with as many threads as cores are free, and never more than it has now; a context.

    `look` measures again; call it between two operations, as often as you like. It is cheap, because it measures at
    most four times per second. On exit torch has the number of threads that it had on entry. Where the user has set
    ``OMP_DYNAMIC=false``, OpenMP's variable for a fixed number of threads, nothing changes.

    >>> with FreeCores() as cores:
    ...     cores.look()
    """

    def __enter__(self) -> FreeCores:
        import torch

        self._limit = torch.get_num_threads()
        self._fixed = self._limit == 1 or os.environ.get("OMP_DYNAMIC", "").strip().lower() == "false"
        self.look()
        return self

    def __exit__(self, *exception: object) -> None:
        import torch

        if torch.get_num_threads() != self._limit:
            torch.set_num_threads(self._limit)

    def look(self) -> None:
        """Choose the number of threads again if the last measurement is at least a quarter of a second old."""
        if self._fixed:
            return
        import torch

        threads = threads_for(_load.cores(), self._limit)
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)


def threads_for(others: float, limit: int) -> int:
    """Return how many threads to compute with while other programs keep `others` cores busy; from 1 to `limit`.

    >>> threads_for(others=1000.0, limit=8)
    1
    """
    free = min(len(usable_cpus()) - others, cpu_quota())
    return max(1, min(limit, math.floor(free + _TOLERATED)))


class BackgroundLoad:
    """Measures how many of this process's cores other programs keep busy."""

    def __init__(self) -> None:
        self._last: tuple[float, float, float] | None = None  # the clock, everyone's seconds, and our own
        self._cores = 0.0

    def cores(self) -> float:
        """Cores that other programs kept busy since the last measurement, such as 1.5; four measurements per second.

        After a pause of more than two seconds the average says little about the present, so it is not taken.
        """
        now = time.perf_counter()
        if self._last is None or now - self._last[0] >= _SHORTEST_LOOK:
            last, self._last = self._last, (now, busy_seconds(), time.process_time())
            if last is not None and now - last[0] <= _LONGEST_LOOK:
                elapsed, everyone, ourselves = (new - old for new, old in zip(self._last, last, strict=True))
                self._cores = max(0.0, everyone - ourselves) / elapsed
        return self._cores


_load = BackgroundLoad()


def busy_seconds() -> float:
    """Return the seconds that all programs have computed on this process's cores since the computer started."""
    import psutil

    times = psutil.cpu_times(percpu=True)
    chosen = [times[cpu] for cpu in usable_cpus() if cpu < len(times)] or times
    # a guest's time is part of the user's; what the host gave to other virtual machines is in use as well
    idle = ("idle", "iowait", "guest", "guest_nice")
    return sum(sum(cpu) - sum(getattr(cpu, name, 0.0) for name in idle) for cpu in chosen)


def usable_cpus() -> list[int]:
    """Return the numbers of the logical cores that the operating system lets this process use."""
    if sys.platform == "linux":
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def usable_cores() -> float:
    """Return how many cores this process may use, such as 1.5: those it is bound to, or a container's smaller quota."""
    return min(len(usable_cpus()), cpu_quota())


@cache
def cpu_quota(root: Path = Path("/")) -> float:
    """Cores that the control groups grant, such as 1.5; infinity without a quota."""
    quota = math.inf
    for folder in control_groups(root, "cpu"):
        unified = folder / "cpu.max"  # version 2: "150000 100000", or "max 100000"
        if unified.is_file():
            share, period = unified.read_text().split()
            if share != "max":
                quota = min(quota, int(share) / int(period))
        granted, of = number_in(folder / "cpu.cfs_quota_us"), number_in(folder / "cpu.cfs_period_us")
        if granted is not None and granted > 0 and of:
            quota = min(quota, granted / of)
    return quota


def control_groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the control group of this process for a controller, then its parents up to the top."""
    path = root / "proc/self/cgroup"
    for line in path.read_text().splitlines() if path.is_file() else []:
        number, controllers, name = line.split(":", 2)
        if number == "0":
            top = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / controller
        else:
            continue
        own = Path(name.lstrip("/"))
        for part in (own, *own.parents):  # inside a container the path may be the host's: skip what is not there
            if (top / part).is_dir():
                yield top / part


def number_in(path: Path) -> int | None:
    """Return the number in a one-line file; None if there is no file or it says "max"."""
    text = path.read_text().strip() if path.is_file() else ""
    return int(text) if text.lstrip("-").isdigit() else None
