"""Run a student's notebooks in a process of their own, under bubblewrap.

bubblewrap (``bwrap``) starts a Python that sees nothing but the system's programs, the interpreter with its packages,
the course's packages without the answers of the checks, and a private /tmp. It has no network and sees no process but
its own. That Python imports what notebooks need once and forks a process for each notebook (`classroom.student`).
This module starts it, reads its messages, measures its time from outside, and ends all of it at once.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import platform
import select
import shutil
import signal
import site
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import grpo_edu
from classroom.kernel import MemoryGroup, call_filter, filter_file, memory_is_counted
from grpo_edu.checks import topics_dir
from grpo_edu.problems.templates import data_dir

REMEDY = (
    "Install Debian's or Ubuntu's package `bubblewrap` (0.8 or newer: `sudo apt-get install bubblewrap`), and allow "
    "user namespaces. Where that is impossible, grade in a container that holds nothing else, with "
    "`--without-isolation` (docs/grading.md)."
)
_SYSTEM = ("/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives", "/etc/fonts", "/sys/devices/system/cpu")
_COURSE = "/course"  # where the two packages are in the sandbox
_OF_THE_CHECKS = [f"{name}.py" for name in ("__init__", "compare", "core", "feedback", "inputs", "slips")]  # no answers
_KEPT = ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "SYSTEMROOT")
_MOST_ANSWERS = 2**22  # bytes that the process may send for one notebook, which become up to 30 times as many here
_MOST_READ = 2**27  # and for all files that were handed in, before any of the student's code runs
_POLL = 0.25  # seconds between two looks at the time that the process has used
_LISTENING = 60.0  # seconds within which the process must read what is sent to it
_LIBRARIES = 2**29  # bytes that Python and its libraries take before a student's code runs, and some more


@dataclass(frozen=True)
class Limits:
    """Limits of a student's code.

    seconds: CPU time of a cell, and of a part of a question, after which an alarm interrupts it; three times as much
    where a part trains a model (`classroom.run.TRAINING`). grace: seconds until the process is killed that did not
    react to the alarm. total_seconds: CPU time for all notebooks of a student.
    patience: each of these may take this many times as long by the clock, because a busy computer must not change a
    grade. memory: bytes per process, beyond what the libraries map; where the kernel can count it, also the most that
    all processes and files in memory may have together, beyond 0.5 GB. file_size: bytes of a file; all files in /tmp
    may have four times as much, and those in /dev/shm again. output: printed bytes that are kept. processes: with
    threads, at a time.
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
        for name, least, size, unit in (
            ("seconds", 0.1, 1, "seconds"),
            ("total_seconds", 1, 1, "seconds"),
            ("memory", 2**26, 2**30, "GB"),
            ("file_size", 2**10, 1, "bytes"),
        ):
            if not (value := getattr(self, name)) >= least:
                given, needed = (f"{number / size:g} {unit}" for number in (value, least))
                raise ValueError(f"{name}: {given} is too little to run anything; give at least {needed}")


def isolation_problem() -> str:
    """Return why bubblewrap cannot isolate a process here, or nothing if it can."""
    bwrap = _bwrap()
    if bwrap is None:
        return "bubblewrap (`bwrap`) is not installed."
    become = ""
    if os.geteuid() == 0:
        become = f"import os; os.setresuid(*[{_free_user()}] * 3); "
        if not call_filter():
            return (
                f"The filter of system calls that root needs does not know {platform.machine()}; use another account."
            )
    program = [sys.executable, "-P", "-c", f"{become}import grpo_edu.checks, IPython"]
    try:
        with filter_file() as refused:
            done = subprocess.run(
                [*_confined(bwrap, Limits(), (), refused=refused), *program],
                env=_environment("/tmp"), stdin=subprocess.DEVNULL, capture_output=True, timeout=180, cwd="/",
                pass_fds=[] if refused is None else [refused],
            )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bubblewrap does not work on this system: {error}."
    if done.returncode == 0:
        return ""
    said = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
    return f"bubblewrap does not work on this system: {said[-1][:300]}."


def check_isolation(isolated: bool, tell: Callable[[str], None]) -> None:
    """Raise ValueError if students' code is to be isolated and cannot be; warn if it is not to be."""
    problem = isolation_problem() if isolated else ""
    if problem:
        raise ValueError(f"students' code cannot be isolated, so nothing was run. {problem} {REMEDY}")
    if isolated and not memory_is_counted():
        tell(
            "Memory is limited for each process, not for all of a student's together, and buffers of sockets and links "
            "in /tmp are not counted (docs/grading.md says why)."
        )
    if not isolated:
        tell("WARNING: students' code runs without isolation. It can read, change and send whatever you can.")


def _bwrap() -> str | None:
    """Return the program, from absolute places only: a file `bwrap` in the working directory may be a student's."""
    places = [one for one in os.environ.get("PATH", os.defpath).split(os.pathsep) if os.path.isabs(one)]
    return shutil.which("bwrap", path=os.pathsep.join(places))


def _confined(
    bwrap: str, limits: Limits, hidden: Sequence[Path], closed: Sequence[str] = (), *, refused: int | None = None
) -> list[str]:
    """Return the command line of bubblewrap, up to the program that it is to start.

    closed: folders of the data that are empty. refused: an open file with a filter of system calls.
    """
    # Signals from within never reach the first process of a PID namespace, so no student's code can end or stop it.
    command = [bwrap, "--die-with-parent", "--as-pid-1", "--new-session", "--cap-drop", "ALL"]
    command += ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    if os.geteuid() == 0:  # for the process that forks; those that it forks become a user without any of these
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_KILL"]
    else:
        command += ["--unshare-user", "--disable-userns"]
    command += [] if refused is None else ["--seccomp", str(refused)]
    size = str(4 * limits.file_size)
    command += ["--proc", "/proc", "--dev", "/dev"]
    for name in ("/proc/keys", "/proc/key-users"):  # the names of the kernel's keys of whoever grades
        command += ["--ro-bind", "/dev/null", name] if Path(name).exists() else []
    command += ["--perms", "1777", "--size", size, "--tmpfs", "/tmp", "--perms", "1777", "--size", size]
    command += ["--tmpfs", "/dev/shm", "--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/sbin", "/lib", "/lib64"):
        path = Path(name)
        if path.is_symlink():
            command += ["--symlink", os.readlink(path), name]
        elif path.is_dir():
            command += ["--ro-bind", name, name]
    python = _python()
    system = [Path(name) for name in _SYSTEM if Path(name).exists()]
    mounts = [(path, path) for path in (*system, *python)]
    if not _in_usr(sys.executable):
        mounts.append((Path(os.path.realpath(sys.executable)), Path(sys.executable)))
    package = _package()
    for folder in sorted({parent for _, place in (*mounts, *package) for parent in place.parents}):
        command += [] if _in_usr(folder) else ["--perms", "755", "--dir", str(folder)]
    for path, place in mounts:
        command += ["--ro-bind", str(path), str(place)]
    for path in _to_hide(python, hidden):
        command += ["--tmpfs", str(path)]
    for path, place in package:
        command += ["--ro-bind", str(path), str(place)]
        if path.name == "grpo_edu":
            command += ["--perms", "755", "--tmpfs", f"{_COURSE}/grpo_edu/checks"]
    for name in closed:
        in_package = Path(grpo_edu.__file__).resolve().parent in data_dir().resolve().parents
        place = Path(_COURSE, "grpo_edu" if in_package else "", data_dir().name, name)
        command += ["--perms", "755", "--tmpfs", str(place)]
    return [*command, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--"]


def _python() -> list[Path]:
    """Folders and files of the interpreter and its packages, without those in /usr, which is there anyway."""
    found = [Path(place) for place in _site_packages()]
    for prefix in {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix}:
        found += [Path(prefix) / name for name in ("lib", "lib64", "pyvenv.cfg")]
    found.append(Path(sys.base_prefix) / "bin")
    there = sorted({path for path in found if path.exists() and not _in_usr(path)})
    return [path for path in there if not any(other in path.parents for other in there)]


def _site_packages() -> list[str]:
    own = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    return [*site.getsitepackages(), *own]


def _in_usr(path: str | Path) -> bool:
    return Path("/usr") in Path(path).parents


def _to_hide(python: Sequence[Path], hidden: Sequence[Path]) -> list[Path]:
    """Return what lies within a folder that the process may read and is not for it: submissions, masters, answers."""
    copies = [Path(place) / "grpo_edu" for place in _site_packages()]  # an installed copy has the answers too
    found = {path.resolve() for path in [*hidden, *copies, topics_dir()] if path.is_dir()}
    return sorted(
        place / path.relative_to(place.resolve())  # as the process would call it
        for place in (Path("/usr"), *python)
        for path in found
        if path.is_relative_to(place.resolve())
    )


def _package() -> list[tuple[Path, Path]]:
    """grpo_edu, then of its checks what holds no answer, its data, and this package: where each is and is to be."""
    package, place = Path(grpo_edu.__file__).resolve().parent, Path(_COURSE)
    mounts = [(package, place / "grpo_edu")]
    mounts += [(package / "checks" / name, place / "grpo_edu" / "checks" / name) for name in _OF_THE_CHECKS]
    mounts += [(Path(__file__).resolve().parent, place / "classroom")]
    data = data_dir().resolve()
    return mounts if package in data.parents else [*mounts, (data, place / "data")]


def _environment(home: str) -> dict[str, str]:
    """Nothing of the instructor's environment but the language."""
    env = {name: os.environ[name] for name in _KEPT if name in os.environ}
    env |= dict.fromkeys(("HOME", "TMPDIR", "IPYTHONDIR", "MPLCONFIGDIR", "XDG_CACHE_HOME", "HF_HOME"), home)
    env |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    env |= dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "PYTHONDONTWRITEBYTECODE", "PYTHONNOUSERSITE"), "1")
    env |= {"USER": "student", "LOGNAME": "student", "PATH": "/usr/bin:/bin", "MPLBACKEND": "agg"}
    env |= {"PYTHONHASHSEED": "0", "PYTHONIOENCODING": "utf-8:replace"}
    return {**env, "PYTHONPATH": os.pathsep.join([_COURSE, *_site_packages()])}


def _free_user() -> int:
    """Return a UID that no account uses, for a process that root starts: process limits count per user."""
    most = sum(int(line.split()[2]) for line in Path("/proc/self/uid_map").read_text().splitlines())
    chance = int.from_bytes(os.urandom(2))
    return 0x70000000 + chance if most > 0x71000000 else 61184 + chance % 4000


def _threads_of_this_user() -> int:
    """Return how many threads this user has in all processes, because the limit on processes may count them."""
    import psutil

    own = os.geteuid()
    found = psutil.process_iter(["uids", "num_threads"])
    return sum(one.info["num_threads"] or 1 for one in found if one.info["uids"] and one.info["uids"].effective == own)


class SandboxError(RuntimeError):
    """No process for students' code can be started here, or grading was stopped."""


class ProtocolError(Exception):
    """The process sent something that is not a message."""


class Sandbox:
    """The process that runs one student's notebooks; it starts at the first task. Use as a context.

    isolated: under bubblewrap. hidden: folders that it must not see, wherever they are. stop: once it is set, running
    tasks end with a SandboxError. given: an open file that the first task may read, and no other.
    """

    program = "classroom.student"
    closed: tuple[str, ...] = ()  # folders of the package's data that are empty in the sandbox

    def __init__(
        self,
        limits: Limits,
        *,
        isolated: bool = True,
        hidden: Sequence[Path] = (),
        stop: threading.Event | None = None,
        given: int | None = None,
    ) -> None:
        self.limits, self.isolated, self.hidden = limits, isolated, hidden
        self._stop_asked = stop or threading.Event()
        self._given = given
        self._process: subprocess.Popen | None = None
        self._folder = None  # the sandbox has a /tmp of its own
        if not isolated:
            self._folder = tempfile.TemporaryDirectory(prefix="grpo-edu-grade-", ignore_cleanup_errors=True)
        self._first = -1  # a handle on the sandbox's first process, with which all others in it end
        self._channel = -1
        self._rest, self._output, self._printed, self._sent, self._is_garbled = bytearray(), b"", 0, 0, False
        self._most = _MOST_ANSWERS
        self._group: MemoryGroup | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        if self._folder:
            self._folder.cleanup()

    def run(self, task: dict[str, Any], seconds: float) -> tuple[list[dict], dict[str, Any]]:
        """Run one notebook for at most this many seconds; return what its process said, and how it ended.

        Returns:
            The messages, of which any may be a lie; and `end` ("done", "ended", "memory", "time", "total time",
            "garbled"), `code` (exit status, if known), `seconds` used, `printed` bytes, `output`, `new`: it was the
            first task of its process.

        Raises:
            SandboxError: the process cannot be started, or grading was stopped.
        """
        new = self._process is None
        if new:
            self._start()
        self._printed, self._output, self._sent = 0, b"", 0
        self._most = _MOST_READ if "files" in task else _MOST_ANSWERS
        begun, before, messages, code = time.monotonic(), self._processor_time(), list[dict](), None
        ended = self._ended_for_memory()
        try:
            self._send(task)
            how, code = self._watch(messages, begun, before, seconds, Limits(**task["limits"]))
        except ProtocolError:
            how = "garbled"
        except OSError:
            how = "ended"
        used = max(self._processor_time() - before, (time.monotonic() - begun) / self.limits.patience)
        if how == "ended" and self._ended_for_memory() > ended:
            how = "memory"
        if how != "done":
            how = "done" if how == "silent" else how
            self.close()  # whatever the student's code did to it, the next task finds a new one
        output = self._output.decode("utf-8", "replace")
        ending = {"end": how, "code": code, "seconds": used, "printed": self._printed, "output": output, "new": new}
        return messages, ending

    def close(self) -> None:
        """End every process in the sandbox, and wait until they are gone."""
        process, self._process = self._process, None
        if process is None:
            return
        if self._first >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._first, signal.SIGKILL)  # the kernel ends all others with it
            select.select([self._first], [], [], 20)
            os.close(self._first)
            self._first = -1
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)
        for one in [] if self.isolated else _family(process.pid):
            with contextlib.suppress(Exception):
                one.kill()
        process.kill()
        process.wait()
        assert process.stdin and process.stdout
        with contextlib.suppress(OSError):
            process.stdin.close()
        process.stdout.close()
        os.close(self._channel)
        if self._group:
            self._group.close()

    def _start(self) -> None:
        command = [sys.executable, "-P", "-m", self.program]
        home = self._folder.name if self._folder else "/tmp"
        env = _environment(home)
        if not self.isolated:
            homes = [str(Path(one).resolve().parents[1]) for one in (__file__, grpo_edu.__file__)]
            env["PYTHONPATH"] = os.pathsep.join(homes)
        self._channel, channel_end = os.pipe()
        info, info_end = os.pipe()
        command += [str(channel_end)]
        given, self._given = self._given, None
        try:
            with filter_file() as refused:
                fds = [channel_end, info_end, *([] if given is None else [given])]
                if self.isolated:
                    confined = _confined(str(_bwrap()), self.limits, self.hidden, self.closed, refused=refused)
                    command = [*confined[:-1], "--info-fd", str(info_end), *confined[-1:], *command]
                    fds += [] if refused is None else [refused]
                if self.isolated and memory_is_counted():
                    self._group = MemoryGroup(self.limits.memory + _LIBRARIES)
                    command, env = [*self._group.enter, *command], {**env, **self._group.env}
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    env=env,
                    cwd=home,
                    pass_fds=fds,
                    start_new_session=True,
                )
        finally:
            os.close(channel_end)
            os.close(info_end)
        self._rest, self._printed, self._output, self._sent, self._is_garbled = bytearray(), 0, b"", 0, False
        try:
            self._take_hold(info)
            own_user = self.isolated and os.geteuid() == 0
            self._send(
                {
                    "limits": asdict(self.limits),
                    "user": _free_user() if own_user else None,
                    "others": 0 if own_user else _threads_of_this_user(),
                    "given": given,
                }
            )
            ready = [message for message in self._receive(120) or [] if "ready" in message]
        except (OSError, ProtocolError):
            ready = []
        finally:
            os.close(info)
        if not ready:
            self._drain()
            said = self._output.decode("utf-8", "replace").strip()[-800:]
            self.close()
            raise SandboxError(f"the process that runs students' code does not start: {said or 'it says nothing'}")

    def _take_hold(self, info: int) -> None:
        """Get a handle on the first process in the sandbox, whose number bubblewrap tells."""
        if self.isolated:
            told = b""
            while b"}" not in told and select.select([info], [], [], 60)[0] and (more := os.read(info, 4096)):
                told += more
            if b"}" in told:
                self._first = os.pidfd_open(json.loads(told)["child-pid"])

    def _send(self, content: dict[str, Any]) -> None:
        """Write a line of JSON; raises TimeoutError for a process that does not read."""
        assert self._process and self._process.stdin
        stream, left = self._process.stdin.fileno(), memoryview(json.dumps(content).encode() + b"\n")
        os.set_blocking(stream, False)
        while left:
            if not select.select([], [stream], [], _LISTENING)[1]:
                raise TimeoutError
            left = left[os.write(stream, left) :]

    def _watch(
        self, messages: list[dict], started: float, before: float, most: float, limits: Limits
    ) -> tuple[str, int | None]:
        """Take messages until the notebook's process has ended or is late; limits: the limits of its task."""
        begun, spent, looked, done = started, 0.0, started, False
        while True:
            came = self._receive(_POLL)
            if came is None:
                return "ended", None
            now = time.monotonic()
            for message in came:
                if "end" in message:
                    code = message["end"]
                    return "done" if done and code == 0 else "ended", code if type(code) is int else None
                done = done or message.get("done") is True
                if "at" in message or done:
                    begun, spent = now, -1.0
                messages.append(message)
            if done and now - begun > 10 * limits.grace:  # all is said, but the process that forks does not tell
                return "silent", 0
            if now - looked < _POLL:
                continue
            looked, used = now, self._processor_time() - before
            spent = used if spent < 0 else spent
            if max(used, (now - started) / limits.patience) > most:
                return "total time", None
            if max(used - spent, (now - begun) / limits.patience) > limits.seconds + limits.grace:
                return "time", None

    def _receive(self, seconds: float) -> list[dict] | None:
        """Return the messages that come next, none after this many seconds; None if no more can come.

        Raises Garbled for what is not a message, or too much of it; SandboxError where grading was stopped.
        """
        assert self._process and self._process.stdout
        if self._is_garbled:
            raise ProtocolError
        output, deadline = self._process.stdout.fileno(), time.monotonic() + seconds
        while True:
            if self._stop_asked.is_set():
                raise SandboxError("grading was stopped while a student's code ran")
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._channel, output], [], [], max(0.0, min(_POLL, left)))
            if self._channel in ready:
                content = os.read(self._channel, 65536)
                found = self._messages(content)
                if found or not content:
                    return found or None
            if output in ready:
                content = os.read(output, 65536)
                self._printed += len(content)
                self._output += content[: max(0, self.limits.output - len(self._output))]
                if not content and self._channel not in ready:  # its output is closed; do not ask again and again
                    time.sleep(min(0.01, max(left, 0.0)))
            if left <= 0:
                return []

    def _drain(self) -> None:
        """Read what a process that ended has printed."""
        assert self._process and self._process.stdout
        output, deadline = self._process.stdout.fileno(), time.monotonic() + 5
        while time.monotonic() < deadline and select.select([output], [], [], 0.5)[0]:
            content = os.read(output, 65536)
            if not content:
                return
            self._output = (self._output + content)[-self.limits.output :]

    def _messages(self, content: bytes) -> list[dict]:
        """Return the messages in what has come; the beginning of a further one is kept.

        Messages before one that cannot be read still count, however the bytes came: they tell which cell ran.
        """
        self._sent += len(content)
        if self._sent > self._most:
            raise ProtocolError
        self._rest += content  # one line may come in very many pieces, and copying all of them each time takes minutes
        if b"\n" not in content:
            return []
        *lines, self._rest = self._rest.split(b"\n")
        found: list[dict] = []
        for line in lines:
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                message = None
            if not isinstance(message, dict):
                self._is_garbled = True
                break
            found.append(message)
        if self._is_garbled and not found:
            raise ProtocolError
        return found

    def _ended_for_memory(self) -> int:
        return self._group.ended() if self._group else 0

    def _processor_time(self) -> float:
        """CPU time of all processes in the sandbox so far, as the system counts it."""
        used = 0.0
        for one in _family(self._process.pid) if self._process else ():
            with contextlib.suppress(Exception):  # it has just ended
                used += sum(one.cpu_times()[:4])
        return used


def _family(process: int) -> Iterator[Any]:
    """Yield a process and all that come from it."""
    import psutil

    with contextlib.suppress(psutil.Error):
        first = psutil.Process(process)
        yield from (first, *first.children(recursive=True))


def packed(value: Any) -> str:
    """Return the messages to the process of a student; never unpack what comes from there."""
    return base64.b64encode(pickle.dumps(value)).decode()
