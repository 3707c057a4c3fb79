"""What a container leaves of its machine: the CPU quota and memory limit of Linux control groups, versions 1 and 2.

Inside a container (a classroom's JupyterHub, a CI runner, a cluster's job) the operating system still reports the
whole machine. Every function takes `root`, where the file system of /proc and /sys begins.
"""

import math
from collections.abc import Iterator
from pathlib import Path

_MEMORY_FILES = (  # limit, usage, and the part of memory.stat that is cache and would be given back
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def cpu_quota(root: Path = Path("/")) -> float:
    """Cores that the control groups grant, such as 1.5; infinity without a quota."""
    quota = math.inf
    for folder in _groups(root, "cpu"):
        unified = folder / "cpu.max"  # version 2: "150000 100000", or "max 100000"
        if unified.is_file():
            share, period = unified.read_text().split()
            if share != "max":
                quota = min(quota, int(share) / int(period))
        granted, of = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if granted is not None and granted > 0 and of:
            quota = min(quota, granted / of)
    return quota


def memory_limit(root: Path = Path("/")) -> tuple[float, float]:
    """(limit, available) bytes that the control groups grant; infinity without a limit."""
    limit = available = math.inf
    for folder in _groups(root, "memory"):
        for limit_name, usage_name, cache_name in _MEMORY_FILES:
            granted, used = _number(folder / limit_name), _number(folder / usage_name)
            if granted is not None:
                in_use = max(0, (used or 0) - _statistic(folder / "memory.stat", cache_name))
                limit, available = min(limit, granted), min(available, max(0, granted - in_use))
    return limit, available


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The control group of this process for a controller, then its parents up to the top."""
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


def _number(path: Path) -> int | None:
    """The number in a one-line file; None where there is no file or it says "max"."""
    text = path.read_text().strip() if path.is_file() else ""
    return int(text) if text.lstrip("-").isdigit() else None


def _statistic(path: Path, name: str) -> int:
    """The value of a line such as "inactive_file 4096"; 0 where there is none."""
    lines = path.read_text().splitlines() if path.is_file() else []
    return next((int(line.split()[1]) for line in lines if line.split()[0] == name), 0)
