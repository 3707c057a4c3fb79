"""What Linux's kernel itself refuses to students' code, and how it counts the memory of all of it together.

bubblewrap and limits of each process leave two gaps. A process in a user namespace of its own may mount file systems
there, and some memory belongs to no process, so no limit of a process counts it: memfds, the segments, semaphores and
messages of System V (2 MB of semaphores for one number, 32,000 times), rings of io_uring, maps of bpf. The first gap is
closed by a filter of system calls (seccomp), which every container has as well. The second is closed by the same
filter, and by a control group (cgroup) where this account may make one.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Self

# The kernel's mark of the architecture (linux/audit.h), and the numbers of the refused system calls: unshare, setns,
# mount, memfd_create, shmget, semget, msgget, bpf, clone.
_NUMBERS = {
    "x86_64": (0xC000003E, (272, 308, 165, 319, 29, 64, 68, 321, 56)),
    "aarch64": (0xC00000B7, (97, 268, 40, 279, 194, 190, 186, 280, 220)),
}
_IO_URING, _MEMFD_SECRET, _CLONE3, _X32 = 425, 447, 435, 0x40000000  # these numbers are the same everywhere
_NEW_NAMESPACE = 0x7E020000  # the flags of `clone` that make one
_EPERM, _ENOSYS = 1, 38
_GROUPS, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_number = count()


def call_filter() -> bytes:
    """A program for seccomp that refuses namespaces, mounts, and memory that belongs to no process.

    `clone3` is unknown to whoever asks, since a filter cannot read its flags; the C library then calls `clone`. Empty
    for an architecture whose numbers are not in the table.
    """
    if platform.machine() not in _NUMBERS:
        return b""
    architecture, numbers = _NUMBERS[platform.machine()]
    *refused, clone = numbers
    load, equal, at_least, any_of, end = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, unknown = 0x7FFF0000, 0x50000 | _EPERM, 0x50000 | _ENOSYS
    # Of struct seccomp_data: 0 is the call's number, 4 the architecture, 16 the first argument.
    code = [(load, 0, 0, 4), (equal, 1, 0, architecture), (end, 0, 0, unknown), (load, 0, 0, 0)]
    code += [(at_least, 0, 1, _X32), (end, 0, 0, unknown), (equal, 0, 1, _CLONE3), (end, 0, 0, unknown)]
    for number in (*refused, _IO_URING, _MEMFD_SECRET):
        code += [(equal, 0, 1, number), (end, 0, 0, refuse)]
    code += [(equal, 0, 3, clone), (load, 0, 0, 16), (any_of, 0, 1, _NEW_NAMESPACE), (end, 0, 0, refuse)]
    return b"".join(struct.pack("HBBI", *one) for one in [*code, (end, 0, 0, allow)])


@contextlib.contextmanager
def filter_file() -> Iterator[int | None]:
    """The number of an open file with the filter, as bubblewrap reads it; None where there is no filter."""
    program = call_filter()
    if not program:
        yield None
        return
    reading, writing = os.pipe()
    os.write(writing, program)
    os.close(writing)
    try:
        yield reading
    finally:
        os.close(reading)


class MemoryGroup:
    """A control group that counts all memory of the processes in it, files in memory included. Use as a context.

    most: bytes; what asks for more is ended by the kernel. enter: the beginning of a command line that makes a command
    run in the group; empty where no group can be made (`memory_is_counted`). env: what this beginning needs from the
    environment; it keeps it from the command.

    systemd makes the group where it runs the computer. Elsewhere it is made directly, as root or in a group that was
    handed over, in the hierarchy of version 2, or of version 1 if memory is counted there.
    """

    def __init__(self, most: int) -> None:
        self.enter, self.env = list[str](), dict[str, str]()
        self._folder: Path | None = None
        if Path("/run/systemd/system").is_dir():
            program = shutil.which("systemd-run", path="/usr/bin:/bin")
            whose = [] if os.geteuid() == 0 else ["--user"]
            limits = ["-p", f"MemoryMax={most}", "-p", "MemorySwapMax=0"]
            needed = ("XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS")
            self.env = {name: os.environ[name] for name in needed if name in os.environ}
            clean = ["/usr/bin/env", *(part for name in needed for part in ("-u", name))]
            self.enter = [program, *whose, "--scope", "--quiet", "--collect", *limits, "--", *clean] if program else []
        elif (place := _place()) is not None:
            above, limit, swap = place
            folder = above / f"grpo-edu-{os.getpid()}-{next(_number)}"
            with contextlib.suppress(OSError):
                _remove_empty(above)
                folder.mkdir()
                self._folder = folder
                (folder / limit).write_text(str(most))
                with contextlib.suppress(OSError):  # not every kernel counts swap
                    (folder / swap).write_text(str(0 if limit == "memory.max" else most))
                self.enter = ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(folder / "cgroup.procs")]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ended(self) -> int:
        """How many processes the kernel has ended here because there was no memory left, as far as it is known."""
        folder = self._folder
        for path in (folder / "memory.events", folder / "memory.oom_control") if folder else ():
            with contextlib.suppress(OSError):
                lines = path.read_text().splitlines()
                return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
        return 0

    def close(self) -> None:
        """Remove the group, from which all processes are gone."""
        folder, self._folder = self._folder, None
        for _ in range(50):
            if folder is None or not folder.exists():
                return
            with contextlib.suppress(OSError):  # its last process may still be on the way out
                folder.rmdir()
                return
            time.sleep(0.02)


def _place() -> tuple[Path, str, str] | None:
    """Where a group that counts memory may be made, and the names of the files that take its limits."""
    own = {}
    with contextlib.suppress(OSError):
        for line in _OWN.read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            own["first" if "memory" in controllers.split(",") else number] = path.strip("/")
    if "first" in own:
        return _GROUPS / "memory" / own["first"], "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"
    if "0" not in own:
        return None
    folder = _GROUPS / own["0"]
    for above in (folder, *folder.parents):
        with contextlib.suppress(OSError):
            if "memory" in (above / "cgroup.subtree_control").read_text().split():
                return above, "memory.max", "memory.swap.max"
    return None


def _remove_empty(above: Path) -> None:
    """Remove the groups of graders that were killed."""
    for folder in above.glob("grpo-edu-*"):
        if not Path("/proc", folder.name.split("-")[2]).exists():
            with contextlib.suppress(OSError):
                folder.rmdir()


@functools.cache
def memory_is_counted() -> bool:
    """Whether this account can make a control group that counts memory, and start a command in it."""
    with MemoryGroup(2**28) as group:
        if not group.enter:
            return False
        command = [*group.enter, "/bin/true"]
        try:
            return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=30).returncode == 0
        except (OSError, subprocess.TimeoutExpired):
            return False
