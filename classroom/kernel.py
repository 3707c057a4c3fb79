"""What Linux's kernel itself refuses to students' code, and how it counts the memory of all of it together.

bubblewrap and limits of each process leave three gaps. A process in a user namespace of its own may mount file systems
there; the kernel's keyrings know no namespaces, so the session's keys of whoever grades are there; and some memory
belongs to no process, so no limit of a process counts it: memfds, the segments, semaphores and messages of System V
(2 MB of semaphores for one number, 32,000 times), rings of io_uring, maps of bpf. A filter of system calls (seccomp)
closes the first two, as it does in every container. The third is closed by the same filter, and by a control group
(cgroup) where this account may make one: only that counts the buffers of sockets, and links and empty files in /tmp.
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

# The kernel's mark of the architecture (linux/audit.h), the numbers of `clone`, `socket` and `socketpair`, and those of
# the refused calls, which are what Docker refuses without capabilities, what Flatpak has bubblewrap refuse, and more.
# Stopping, tracing and reading other processes, time, modules, swap, accounts and handles of files are refused although
# most of them need rights that students' code has not: nobody's answer needs them.
_ARCHITECTURES = {"x86_64": (0xC000003E, 56, (41, 53)), "aarch64": (0xC00000B7, 220, (198, 199))}
_REFUSED: dict[str, dict[str, tuple[int, ...]]] = {
    # the kernel's keyring, which is the instructor's: add_key, request_key, keyctl
    "keys": {"x86_64": (248, 249, 250), "aarch64": (217, 218, 219)},
    # unshare, setns, mount, umount2, pivot_root, chroot
    "namespaces": {"x86_64": (272, 308, 165, 166, 155, 161), "aarch64": (97, 268, 40, 39, 41, 51)},
    # memfd_create, shmget, semget, msgget, mq_open, bpf, io_setup (the computer has only a limited number of them)
    "memory of no process": {"x86_64": (319, 29, 64, 68, 240, 321, 206), "aarch64": (279, 194, 190, 186, 180, 280, 0)},
    # ptrace, process_vm_readv, process_vm_writev, kcmp, perf_event_open, userfaultfd, personality, lookup_dcookie
    "other processes": {
        "x86_64": (101, 310, 311, 312, 298, 323, 135, 212),
        "aarch64": (117, 270, 271, 272, 241, 282, 92, 18),
    },
    # get_mempolicy, set_mempolicy, mbind, migrate_pages, move_pages
    "places of memory": {"x86_64": (239, 238, 237, 256, 279), "aarch64": (236, 237, 235, 238, 239)},
    # name_to_handle_at, open_by_handle_at, fanotify_init, quotactl, acct, swapon, swapoff
    "files": {"x86_64": (303, 304, 300, 179, 163, 167, 168), "aarch64": (264, 265, 262, 60, 89, 224, 225)},
    # adjtimex, clock_adjtime, clock_settime, settimeofday, reboot, syslog, vhangup, sethostname, setdomainname,
    # init_module, finit_module, delete_module, kexec_load, kexec_file_load
    "the computer": {
        "x86_64": (159, 305, 227, 164, 169, 103, 153, 170, 171, 175, 313, 176, 246, 320),
        "aarch64": (171, 266, 112, 170, 142, 116, 58, 161, 162, 105, 273, 106, 104, 294),
    },
    # ioperm, iopl, modify_ldt, uselib, ustat, sysfs, _sysctl, create_module, get_kernel_syms, query_module, nfsservctl
    "old calls": {"x86_64": (173, 172, 154, 134, 136, 139, 156, 174, 177, 178, 180), "aarch64": ()},
}
# From this number on all architectures have the same, and the kernel still adds some: what is not listed is unknown.
# Listed are pidfd_send_signal, pidfd_open, close_range, openat2, faccessat2, epoll_pwait2, three of landlock,
# futex_waitv and fchmodat2. Among the others are the rings of io_uring, mounts, memfd_secret, pidfd_getfd and `clone3`.
_FIRST_NEW, _ALLOWED_NEW = 424, (424, 434, 436, 437, 439, 441, 444, 445, 446, 449, 452)
_FAMILIES = (1, 2, 10, 16)  # sockets of UNIX, IPv4, IPv6 and netlink; there is no network, so they lead nowhere
_X32 = 0x40000000
_NEW_NAMESPACE = 0x7E020000  # the flags of `clone` that make one
_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97
_GROUPS, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_number = count()


def call_filter() -> bytes:
    """Return a seccomp program that refuses keys, namespaces, mounts, memory of no process, and much else.

    `clone3` is unknown to whoever asks, since a filter cannot read its flags; the C library then calls `clone`. Empty
    for an architecture whose numbers are not in the table.
    """
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        return b""
    architecture, clone, sockets = _ARCHITECTURES[machine]
    load, equal, at_least, any_of, end = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, unknown = 0x7FFF0000, 0x50000 | _EPERM, 0x50000 | _ENOSYS
    # Of struct seccomp_data: 0 is the call's number, 4 the architecture, 16 the first argument.
    code = [(load, 0, 0, 4), (equal, 1, 0, architecture), (end, 0, 0, unknown), (load, 0, 0, 0)]
    code += [(at_least, 0, 1, _X32), (end, 0, 0, unknown)]
    new = [one for number in _ALLOWED_NEW for one in ((equal, 0, 1, number), (end, 0, 0, allow))]
    code += [(at_least, 0, len(new) + 1, _FIRST_NEW), *new, (end, 0, 0, unknown)]
    for group in _REFUSED.values():
        for number in group[machine]:
            code += [(equal, 0, 1, number), (end, 0, 0, refuse)]
    families = [one for family in _FAMILIES for one in ((equal, 0, 1, family), (end, 0, 0, allow))]
    for number in sockets:
        code += [(equal, 0, len(families) + 2, number), (load, 0, 0, 16), *families]
        code += [(end, 0, 0, 0x50000 | _EAFNOSUPPORT)]
    code += [(equal, 0, 3, clone), (load, 0, 0, 16), (any_of, 0, 1, _NEW_NAMESPACE), (end, 0, 0, refuse)]
    return b"".join(struct.pack("HBBI", *one) for one in [*code, (end, 0, 0, allow)])


@contextlib.contextmanager
def filter_file() -> Iterator[int | None]:
    """The number of an open file with the filter, as bubblewrap reads it; None if there is no filter."""
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
    run in the group; empty if no group can be made (`memory_is_counted`). env: what this beginning needs from the
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
        """Return how many processes the kernel has ended here for lack of memory, as far as it is known."""
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
    """Return True if this account can make a control group that counts memory, and start a command in it."""
    with MemoryGroup(2**28) as group:
        if not group.enter:
            return False
        command = [*group.enter, "/bin/true"]
        try:
            return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=30).returncode == 0
        except (OSError, subprocess.TimeoutExpired):
            return False
