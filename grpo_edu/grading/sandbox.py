"""What a process may do that runs a student's code: limits of the system, and on Linux no files, sockets or signals.

An unprivileged process can confine itself. Landlock (Linux 5.13 and later) closes the file system but for what is
named, and from 6.12 on signals to outsiders too; a seccomp filter refuses sockets; limits of resources are Unix's. Who
grades as root changes to a user of its own first. What a system lacks is left out, and `confine` says what held.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import grpo_edu
from grpo_edu.problems.templates import data_dir

PROTECTIONS = ("files", "network", "signals", "own user")
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc", "/proc", "/sys", "/dev")
_USERS = (0x70000000, 61184)  # first of two ranges of users that nobody is; the second for where numbers end at 65535


@dataclass(frozen=True)
class Limits:
    """What a student's code may take.

    seconds: of the processor's time for a cell, and for a part of a question, after which an alarm interrupts it.
    grace: further seconds until the process is killed that did not heed the alarm. total_seconds: for all notebooks of
    a student. patience: times as long may each of them take by the clock, for a busy machine must not change a grade.
    memory: bytes a process, beyond what the libraries map. file_size: bytes of a file. output: printed bytes that are
    kept. processes: with threads, at a time.
    """

    seconds: float = 20.0
    patience: float = 5.0
    grace: float = 2.0
    total_seconds: float = 300.0
    memory: int = 2 * 2**30
    file_size: int = 50 * 2**20
    output: int = 20_000
    processes: int = 48

    def __post_init__(self) -> None:
        for name, lowest in (("seconds", 0.1), ("total_seconds", 1), ("memory", 2**26), ("file_size", 2**10)):
            if getattr(self, name) < lowest:
                raise ValueError(f"{name}: {getattr(self, name)} is too little to run anything; give {lowest} or more")


@dataclass(frozen=True)
class User:
    """Who a process of root's becomes. reads_all: may read every file, where Python lies in root's own folder."""

    number: int
    reads_all: bool = False

    def become(self) -> None:
        """Turn this process into this user's, for good. Raises OSError where the system refuses."""
        libc = ctypes.CDLL(None, use_errno=True)
        if self.reads_all:
            _prctl(libc, 8, 1)  # PR_SET_KEEPCAPS
        os.setgroups([])
        os.setresgid(self.number, self.number, self.number)
        os.setresuid(self.number, self.number, self.number)
        if self.reads_all:  # of root's rights keep this one: CAP_DAC_READ_SEARCH, number 2
            header, rights = struct.pack("=Ii", 0x20080522, 0), struct.pack("=6I", 4, 4, 4, 0, 0, 0)
            if libc.capset(header, rights):
                raise OSError(ctypes.get_errno(), "capset")
            _prctl(libc, 47, 2, 2)  # PR_CAP_AMBIENT_RAISE: programs that it starts have it too


def readable_places() -> list[Path]:
    """What a student's process may read: the system, Python and its packages, this package and its data.

    Not the checkout around the package, where the masters are.
    """
    package = Path(grpo_edu.__file__).resolve().parent
    found = [Path(name) for name in (*_SYSTEM, sys.prefix, sys.base_prefix, sys.exec_prefix)]
    found += [Path(entry) for entry in sys.path if entry and Path(entry).resolve() != package.parent]
    return [*found, package, data_dir()]


@cache
def usable_user(place: Path) -> User | None:
    """A user of its own for a student's process, where we are root and that user can read what it needs.

    Its number comes from this process's, so that two gradings on one machine do not end each other's processes.
    """
    if os.geteuid() != 0 or not hasattr(os, "setresuid"):
        return None
    needed = [Path(grpo_edu.__file__), data_dir(), Path(os.__file__), Path(sys.executable), place]
    numbers = (_USERS[0] + os.getpid(), _USERS[1] + os.getpid() % 4000)
    for user in (User(number, reads_all) for reads_all in (False, True) for number in numbers):
        process = os.fork()
        if process == 0:
            try:
                user.become()
                os._exit(0 if all(os.path.exists(path) and _readable(path) for path in needed) else 1)
            finally:
                os._exit(1)
        if os.waitpid(process, 0)[1] == 0:
            return user
    return None


def _readable(path: Path) -> bool:
    if path.is_dir():
        return os.path.exists(path / ".")
    with contextlib.suppress(OSError), path.open("rb"):
        return True
    return False


def limit_resources(limits: Limits, other_processes: int) -> None:
    """Set the limits of this process; `other_processes`: those that its user has already."""
    import resource

    wanted = {
        "RLIMIT_CORE": 0,
        "RLIMIT_FSIZE": limits.file_size,
        "RLIMIT_NOFILE": 256,
        "RLIMIT_CPU": int(limits.total_seconds) + 5,
        "RLIMIT_NPROC": limits.processes + other_processes,
    }
    mapped = Path("/proc/self/statm")
    if mapped.exists():  # elsewhere (macOS) the system does not keep to this limit
        wanted["RLIMIT_AS"] = int(mapped.read_text().split()[0]) * resource.getpagesize() + limits.memory
    for name, value in wanted.items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def confine(folder: Path, readable: Iterable[Path], user: User | None) -> list[str]:
    """Close files, network and signals to this process, for good; returns which of `PROTECTIONS` hold.

    folder: where it may write. readable: files and folders it may read. user: to become, where this is root's process.
    """
    held = []
    if not sys.platform.startswith("linux"):
        return _become(user)
    libc = ctypes.CDLL(None, use_errno=True)
    _prctl(libc, 38, 1)  # PR_SET_NO_NEW_PRIVS, without which the kernel takes neither of the two
    with _left_out():
        held += _landlock(libc, folder, readable)
    held += _become(user)
    with _left_out():
        held += _refuse_calls(libc, signals="signals" not in held)
    return sorted(set(held), key=PROTECTIONS.index)


@contextlib.contextmanager
def _left_out() -> Iterator[None]:
    """A system without the call, or a container that refuses it, has one protection less."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EINVAL, errno.EACCES):
            raise


def _become(user: User | None) -> list[str]:
    if user is None:
        return []
    user.become()
    return ["own user"]


def _prctl(libc: ctypes.CDLL, option: int, *values: object) -> None:
    padded = [*values, *[0] * (4 - len(values))]
    if libc.prctl(option, *(ctypes.c_ulong(one) if isinstance(one, int) else one for one in padded)):
        raise OSError(ctypes.get_errno(), f"prctl {option}")


def _call(libc: ctypes.CDLL, number: int, *values: object) -> int:
    result = libc.syscall(ctypes.c_long(number), *values)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"system call {number}")
    return result


# ---- Landlock: https://docs.kernel.org/userspace-api/landlock.html ----

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_READ_FOLDER, _READ_FILE = 0b1101, 0b101  # run, read a file, list a folder
_WRITE_DEVICE = 0b110
_FILE_RIGHTS = {1: 2**13 - 1, 2: 2**14 - 1, 3: 2**15 - 1, 4: 2**15 - 1}  # by version; from 5 on one more


def _landlock(libc: ctypes.CDLL, folder: Path, readable: Iterable[Path]) -> list[str]:
    version = _call(libc, _CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    rights = _FILE_RIGHTS.get(version, 2**16 - 1)
    fields = [rights] + ([3] if version >= 4 else []) + ([3] if version >= 6 else [])  # files, TCP, signals
    content = struct.pack(f"={len(fields)}Q", *fields)
    rules = _call(libc, _CREATE, content, ctypes.c_size_t(len(content)), ctypes.c_uint(0))
    devices = [Path("/dev") / name for name in ("null", "zero", "full", "random", "urandom")]
    allowed = [(path, _READ_FOLDER if path.is_dir() else _READ_FILE) for path in readable if path.exists()]
    for path, right in [*allowed, *((path, _WRITE_DEVICE) for path in devices if path.exists()), (folder, rights)]:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", right & rights, place)
        _call(libc, _ADD, ctypes.c_int(rules), ctypes.c_int(1), rule, ctypes.c_uint(0))
        os.close(place)
    _call(libc, _RESTRICT, ctypes.c_int(rules), ctypes.c_uint(0))
    os.close(rules)
    return ["files", "signals"] if version >= 6 else ["files"]


# ---- seccomp: https://docs.kernel.org/userspace-api/seccomp_filter.html ----

# architecture → its number in the filter; socket, ptrace, process_vm_readv, process_vm_writev; kill, tkill
_MACHINES = {
    "x86_64": (0xC000003E, (41, 101, 310, 311), (62, 200)),
    "aarch64": (0xC00000B7, (198, 117, 270, 271), (129, 130)),
}
_IO_URING_SETUP, _PIDFD_SEND_SIGNAL = 425, 424  # alike on both


def _refuse_calls(libc: ctypes.CDLL, *, signals: bool) -> list[str]:
    """Let the calls that make a socket, or look into another process, fail with EACCES; `signals`: those as well."""
    if platform.machine() not in _MACHINES:
        return []
    machine, calls, kills = _MACHINES[platform.machine()]
    refused = [*calls, _IO_URING_SETUP, *((*kills, _PIDFD_SEND_SIGNAL) if signals else ())]
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06
    program = [(load, 0, 0, 4), (equal, 0, len(refused) + 3, machine), (load, 0, 0, 0)]
    program.append((at_least, len(refused) + 1, 0, 0x40000000))  # x86-64's second table of calls
    program += [(equal, len(refused) - place, 0, number) for place, number in enumerate(refused)]
    program += [(give, 0, 0, 0x7FFF0000), (give, 0, 0, 0x00050000 | errno.EACCES)]  # allow; fail
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in program))
    whole = struct.pack("@HP", len(program), ctypes.addressof(code))
    _prctl(libc, 22, 2, whole)  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
    return ["network", "signals"] if signals else ["network"]
