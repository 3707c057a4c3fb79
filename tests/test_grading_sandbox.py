"""What a student's code finds in its sandbox, what its limits stop, and what is said if there is no isolation."""

import csv
import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest
from attacks import KEYS, MEMORY_FILES, MOUNTS, SYSTEM_V, UNSHARES, WRITE, write_unreadable
from forty_submissions import NAME, right

from classroom import kernel
from classroom import sandbox as module
from classroom.kernel import memory_is_counted
from classroom.sandbox import Limits, Sandbox, SandboxError, isolation_problem
from grpo_edu.cli.main import main

REPOSITORY = Path(__file__).resolve().parents[1]
LIMITS = Limits(memory=2**28, file_size=2**20, processes=20)
needs_isolation = pytest.mark.usefixtures("isolation")


def said_by(sandbox, *cells):
    """The error of each cell, or "" for none."""
    steps = [["cell", f"no. {number}", source] for number, source in enumerate(cells)]
    task = {
        "steps": steps,
        "calls": {},
        "skip": [],
        "answered": [],
        "limits": asdict(LIMITS),
        "cell_seconds": LIMITS.seconds,
    }
    messages, ending = sandbox.run(task, 60)
    assert ending["end"] == "done", ending
    errors = {message["cell"]: message["error"] for message in messages if "cell" in message}
    return [errors.get(number, "") for number in range(len(cells))]


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch, Sandbox(LIMITS) as running:
        patch.setenv("MY_SECRET", "secret")
        patch.chdir(tmp_path_factory.mktemp("here"))
        yield running


@needs_isolation
@pytest.mark.parametrize(
    "holds",
    [
        "not os.path.exists(MASTERS) and not os.path.exists(HERE)",
        "sorted(os.listdir(os.path.dirname(checks.__file__))) == "
        "['__init__.py', 'compare.py', 'core.py', 'feedback.py', 'inputs.py', 'slips.py']",
        "socket.if_nameindex() == [(1, 'lo')]",
        "len([name for name in os.listdir('/proc') if name.isdigit()]) == 2",
        "'MY_SECRET' not in os.environ and 'secret' not in open('/proc/1/cmdline').read()",
        "os.environ['HOME'] == '/tmp' and len(os.listdir('/tmp')) <= 40",
        "os.getuid() != 0",
        "not {'', '.', os.getcwd(), HERE} & {*sys.path}",
        "len(torch.ones(3)) == 3 and checks.check_anything(print).grade() == 0",
    ],
)
def test_what_is_there_and_what_is_not(sandbox, holds):
    names = f"MASTERS, HERE = {str(REPOSITORY / 'solutions')!r}, {os.getcwd()!r}"
    start = f"import os, socket, sys, torch\nfrom grpo_edu import checks\n{names}\n"
    assert said_by(sandbox, f"{start}assert {holds}") == [""]


@needs_isolation
def test_attacks_on_the_sandbox_gain_nothing(sandbox):
    cells = (SYSTEM_V, MOUNTS, UNSHARES, KEYS, MEMORY_FILES, WRITE)
    system_v, mounts, unshares, keys, memory_files, write = said_by(sandbox, *cells)
    assert "kept [-1, -1, -1, -1]" in system_v and "opened []" in write and "PermissionError" in memory_files
    assert "gained []" in mounts and "gained []" in unshares and "gained []" in keys


@needs_isolation
def test_every_refused_call_is_refused_and_none_is_twice_in_the_table(sandbox):
    numbers = [one for group in kernel._REFUSED.values() for one in group[kernel.platform.machine()]]
    assert len({*numbers}) == len(numbers)
    start = "import ctypes\nlibc, errors = ctypes.CDLL(None, use_errno=True), {}\n"
    tried = (
        f"for number in {numbers}:\n    libc.syscall(number, 0, 0, 0, 0, 0)\n    errors[number] = ctypes.get_errno()\n"
    )
    assert said_by(sandbox, f"{start}{tried}assert {{*errors.values()}} == {{1}}, errors") == [""]
    unknown = "[libc.syscall(number, 0, 0, 0, 0) for number in (425, 428, 430, 435, 438, 442, 447, 460, 999)]"
    assert said_by(sandbox, f"{start}assert {{*{unknown}}} == {{-1}} and ctypes.get_errno() == 38") == [""]


@needs_isolation
def test_limits_stop_what_takes_too_much(sandbox):
    memory, small, file, small_file, disk, processes = said_by(
        sandbox,
        "bytearray(2**29)",
        "bytearray(2**27)",
        "open('large', 'wb').write(bytes(2**21))",
        "open('small', 'wb').write(bytes(2**19))",
        "for number in range(9):\n    open(f'/dev/shm/{number}', 'wb').write(bytes(2**20 - 1))",
        "import os, time\nfor _ in range(900):\n    if os.fork() == 0:\n        time.sleep(60)",
    )
    assert "MemoryError" in memory and "too large" in file and "No space" in disk and "BlockingIOError" in processes
    assert small == small_file == ""
    assert said_by(sandbox, "import os\nassert len([one for one in os.listdir('/proc') if one.isdigit()]) == 2") == [""]


@needs_isolation
def test_a_process_that_was_ended_from_outside_is_started_again(sandbox):
    first = sandbox._first
    sandbox._process.kill()
    task = {
        "steps": [],
        "calls": {},
        "skip": [],
        "answered": [],
        "limits": asdict(LIMITS),
        "cell_seconds": LIMITS.seconds,
    }
    assert sandbox.run(task, 60)[1]["end"] == "ended"
    assert said_by(sandbox, "1 + 1") == [""] and first >= 0


def test_a_program_in_the_working_directory_is_not_taken_for_bubblewrap(tmp_path, monkeypatch):
    (tmp_path / "bwrap").write_text("#!/bin/sh\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    for path in (".", "", ":", f".{os.pathsep}relative"):
        monkeypatch.setenv("PATH", path)
        assert module._bwrap() is None


def test_submissions_and_copies_of_the_package_within_readable_folders_are_hidden(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_site_packages", lambda: [str(tmp_path / "lib")])
    for name in ("lib/grpo_edu/checks", "lib/submissions", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    hidden = module._to_hide([tmp_path / "lib"], [tmp_path / "lib" / "submissions", tmp_path / "elsewhere"])
    assert hidden == [tmp_path / "lib" / "grpo_edu", tmp_path / "lib" / "submissions"]


@pytest.fixture
def one_submission(tmp_path):
    (tmp_path / "in" / "ana").mkdir(parents=True)
    leaves = "import os\nassert os.getpid() != 1"
    (tmp_path / "in" / "ana" / f"{NAME}.ipynb").write_text(json.dumps(right(leaves)))
    return ["grade", str(tmp_path / "in"), "--output", str(tmp_path / "out")]


@needs_isolation
def test_what_cannot_be_read_costs_that_student_alone(one_submission, tmp_path):
    expected = write_unreadable(tmp_path / "in")
    assert main([*one_submission, "--time-limit", "2", "--memory", "0.5", "--workers", "2"]) == 0
    with (tmp_path / "out" / "grades.csv").open(newline="") as file:
        rows = {row["student"]: row for row in csv.DictReader(file)}
    assert rows["ana"]["total"] == "19"
    for student, what in expected.items():
        assert rows[student]["total"] == "0" and what.word in rows[student]["notes"]


@pytest.mark.parametrize(("program", "word"), [(None, "not installed"), ("/bin/false", "does not work")])
def test_without_bubblewrap_nothing_is_graded(one_submission, tmp_path, monkeypatch, capsys, program, word):
    monkeypatch.setattr(module, "_bwrap", lambda: program)
    assert main(one_submission) == 2
    error = capsys.readouterr().err
    assert word in error and "`bubblewrap`" in error and "container" in error and "--without-isolation" in error
    assert not (tmp_path / "out").exists()


def test_without_isolation_is_possible_loud_and_recorded(one_submission, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "_bwrap", lambda: None)
    assert main([*one_submission, "--without-isolation"]) == 0
    captured = capsys.readouterr()
    assert "WARNING" in captured.err and "WITHOUT ISOLATION" in captured.out
    table = (tmp_path / "out" / "grades.csv").read_text()
    assert "19" in table and "graded without isolation" in table
    assert "WITHOUT ISOLATION" in (tmp_path / "out" / "summary.html").read_text()
    assert json.loads((tmp_path / "out" / "grading.json").read_bytes())["isolation"] == "none"
    assert main([*one_submission, "--resume"]) == 2


def test_a_process_that_does_not_start_says_why(monkeypatch):
    monkeypatch.setattr(module, "_bwrap", lambda: "/bin/ls")
    with Sandbox(LIMITS) as broken, pytest.raises(SandboxError, match="unrecognized option"):
        broken.run({}, 1)


@pytest.mark.parametrize("name", ["seconds", "total_seconds", "memory", "file_size"])
def test_limits_below_any_use_are_refused(name):
    for value in (0, float("nan")):
        with pytest.raises(ValueError, match=name):
            Limits(**{name: value})


@needs_isolation
@pytest.mark.skipif(not memory_is_counted(), reason="this account can make no control group that counts memory")
def test_memory_of_all_processes_together_is_limited(sandbox):
    """Eight processes with 200 MB each: none of them is over its own limit."""
    hold = "import os, time\nfor _ in range(8):\n    if os.fork() == 0:\n        kept = b'x' * 200 * 2**20\n"
    hold += "        time.sleep(15)\n        os._exit(0)\nassert os.wait()[1] == 9"
    assert said_by(sandbox, hold) == [""]


def test_where_memory_is_counted_for_each_process_only_that_is_said(monkeypatch):
    monkeypatch.setattr(module, "isolation_problem", lambda: "")
    for counted in (True, False):
        told = []
        monkeypatch.setattr(module, "memory_is_counted", lambda counted=counted: counted)
        module.check_isolation(True, told.append)
        assert bool(told) is not counted and all("grading.md" in line for line in told)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can try this: run the tests as root")
def test_root_does_not_grade_where_the_kernels_calls_are_unknown(monkeypatch):
    """An ordinary user's sandbox forbids namespaces without the filter."""
    monkeypatch.setattr(module, "_bwrap", lambda: "/bin/false")
    monkeypatch.setattr(kernel.platform, "machine", lambda: "riscv64")
    assert "riscv64" in isolation_problem()


@pytest.mark.parametrize(
    ("own", "files", "place"),
    [
        ("0::/user/session\n", {"cgroup.subtree_control": "cpu memory"}, (".", "memory.max")),
        ("0::/user/session\n", {"user/cgroup.subtree_control": "memory\n"}, ("user", "memory.max")),
        ("0::/user/session\n", {"user/cgroup.subtree_control": "cpu pids"}, None),
        ("4:memory:/mine\n0::/\n", {}, ("memory/mine", "memory.limit_in_bytes")),
        ("", {}, None),
    ],
)
def test_the_place_of_a_group_that_counts_memory(tmp_path, monkeypatch, own, files, place):
    monkeypatch.setattr(kernel, "_GROUPS", tmp_path)
    monkeypatch.setattr(kernel, "_OWN", tmp_path / "own")
    for name, text in {"own": own, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = kernel._place()
    assert (found and found[:2]) == (place and (tmp_path / place[0], place[1]))
