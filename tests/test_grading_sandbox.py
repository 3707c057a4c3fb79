"""What a student's process cannot do, tried in a process that confined itself; and what its limits stop."""

import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from grpo_edu.grading.sandbox import PROTECTIONS, Limits, User, confine, limit_resources, readable_places, usable_user

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="confinement is Linux's")
REPOSITORY = Path(__file__).resolve().parents[1]


def apart(folder, action, *, limits=None):
    """Run `action` in a forked process that limits and confines itself; (what it printed, which protections held)."""
    user = usable_user(folder)
    work = folder / "work"
    work.mkdir(exist_ok=True)
    if user is not None:
        for path in (folder, *folder.parents):  # pytest's folders are closed to others
            if path.is_relative_to("/tmp") and path != Path("/tmp"):
                path.chmod(path.stat().st_mode | 0o011)
        os.chown(work, user.number, user.number)
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            limit_resources(limits or Limits(), 0 if user else 5000)
            held = confine(work, readable_places(), user)
            try:
                said = str(action())
            except BaseException as error:  # whatever it is, is what we want to know
                said = type(error).__name__
            os.write(writer, f"{','.join(held)}\n{said}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answers:
        held, _, said = answers.read().partition("\n")
    os.waitpid(process, 0)
    return said, [name for name in held.split(",") if name]


def needs(held, name):
    if name not in held:
        pytest.skip(f"this system has not got {name!r}, only {held}")


def test_it_says_what_held_and_still_works(tmp_path):
    said, held = apart(tmp_path, lambda: (1 + 1, os.getcwd() != "", len(os.listdir("/usr"))) and "fine")
    assert said == "fine" and set(held) <= set(PROTECTIONS)


def test_its_own_folder_is_open_and_no_other(tmp_path):
    def write_here():
        (tmp_path / "work" / "a").write_text("x")
        return (tmp_path / "work" / "a").read_text()

    said, held = apart(tmp_path, write_here)
    needs(held, "files")
    assert said == "x"
    other = tmp_path / "other.txt"
    other.write_text("secret")
    other.chmod(0o666)
    assert apart(tmp_path, lambda: other.write_text("mine"))[0] == "PermissionError"
    assert apart(tmp_path, other.read_text)[0] == "PermissionError"
    assert apart(tmp_path, other.unlink)[0] in ("PermissionError", "OSError")
    assert other.read_text() == "secret"


def test_masters_are_closed_and_the_package_is_open(tmp_path):
    master = next((REPOSITORY / "solutions").glob("*.ipynb"))
    said, held = apart(tmp_path, master.read_text)
    needs(held, "files")
    assert said == "PermissionError"
    package = REPOSITORY / "grpo_edu" / "losses.py"
    assert apart(tmp_path, lambda: len(package.read_text()))[0] == str(len(package.read_text()))


def test_no_socket_can_be_made(tmp_path):
    said, held = apart(tmp_path, socket.socket)
    needs(held, "network")
    assert said == "PermissionError"
    assert apart(tmp_path, lambda: socket.socketpair() and "pair")[0] == "pair"  # asyncio needs one


def test_others_get_no_signal(tmp_path):
    parent = os.getpid()
    said, held = apart(tmp_path, lambda: os.kill(parent, 0))
    needs(held, "signals")
    assert said == "PermissionError"
    assert apart(tmp_path, lambda: os.kill(os.getpid(), 0))[0] in ("None", "PermissionError")


def test_memory_is_limited(tmp_path):
    assert apart(tmp_path, lambda: bytearray(2**29), limits=Limits(memory=2**28))[0] == "MemoryError"
    assert apart(tmp_path, lambda: len(bytearray(2**27)), limits=Limits(memory=2**28))[0] == str(2**27)


def test_files_are_limited(tmp_path):
    def fill():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        (tmp_path / "work" / "large").write_bytes(bytes(2**20))

    assert apart(tmp_path, fill, limits=Limits(file_size=2**16))[0] == "OSError"
    assert (tmp_path / "work" / "large").stat().st_size == 2**16


def test_processes_are_limited_for_a_user_of_its_own(tmp_path):
    def multiply():
        started = []
        try:
            for _ in range(200):
                process = os.fork()
                if process == 0:
                    signal.pause()
                started.append(process)
        except OSError:
            return len(started)
        finally:
            for process in started:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)

    said, held = apart(tmp_path, multiply, limits=Limits(processes=20))
    needs(held, "own user")
    assert 0 < int(said) < 20


def test_only_root_becomes_another(tmp_path):
    if os.geteuid() == 0:
        user = usable_user(tmp_path)
        assert user is None or user.number > 60000
    else:
        assert usable_user(tmp_path) is None
        with pytest.raises(PermissionError):
            User(61184).become()


@pytest.mark.parametrize("name", ["seconds", "total_seconds", "memory", "file_size"])
def test_limits_below_any_use_are_refused(name):
    with pytest.raises(ValueError, match=name):
        Limits(**{name: 0})
