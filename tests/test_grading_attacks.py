"""Grading under attack: by root and by an ordinary user, from working directories that hold students' or secret files.

`course.py test --all` runs this file: it grades a quarter of the attacks in each place, and those that depend on who
grades in all of them. With GRPO_EDU_ALL_ATTACKS=1 every user grades all of them in every place, next to the class of
test_grading.py. What the sandbox itself stops is tried in test_grading_sandbox.py in every run.
"""

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from attacks import MARK, SECRET, write_attacks
from forty_submissions import LEFT_BEHIND, NAME, right, rows_of, write_submissions

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("isolation")]
REPOSITORY = Path(__file__).resolve().parents[1]
ALL = bool(os.environ.get("GRPO_EDU_ALL_ATTACKS"))
PLACES = ("submissions", "course", "student", "home")
ALWAYS = ("neighbor", "mounts", "unshares", "memory_files", "leaves_memory", "fills_the_disk")  # by every user
ALWAYS += ("Bo x", "Bo\x01x")  # who gets the name depends on both
USER = f"grpotest{os.getpid()}"  # no account of this computer begins like this
OPTIONS = "--time-limit 1.5 --total-time 60 --memory 0.5 --workers 2 --slip-credit 0 --seed 5".split()
OWNED = "import os, pathlib\npathlib.Path(os.environ['GRPO_EDU_OWNED']).touch()\n"
PLANTED = dict.fromkeys(("psutil.py", "nbformat.py", "argparse.py", "torch.py", "classroom.py"), OWNED)
PLANTED |= {"bwrap": "#!/bin/sh\ntouch $GRPO_EDU_OWNED\n", "id_rsa": f"{SECRET}key"}


@pytest.fixture(scope="module")
def ordinary_user():
    """The command line before a command that makes an ordinary user run it, who can read this Python."""
    if os.geteuid() != 0:
        return []
    subprocess.run(["useradd", "--no-create-home", USER], check=True, capture_output=True)
    number = subprocess.run(["id", "-u", USER], check=True, capture_output=True, text=True).stdout.strip()
    yield [*_open_python(), shutil.which("setpriv"), f"--reuid={number}", f"--regid={number}", "--clear-groups"]
    subprocess.run(["userdel", "--force", USER], check=False, capture_output=True)


def _open_python():
    """Show the folders of this Python to everybody, where they lie in root's own folder; nothing else changes."""
    closed = [Path(prefix) for prefix in {sys.base_prefix, sys.prefix} if Path("/root") in Path(prefix).parents]
    if not closed:
        return []
    command = [shutil.which("bwrap"), "--dev-bind", "/", "/", "--cap-add", "ALL", "--perms", "755", "--tmpfs", "/root"]
    for path in closed:
        for parent in reversed([one for one in path.parents if Path("/root") in one.parents]):
            command += ["--perms", "755", "--dir", str(parent)]
        command += ["--ro-bind", str(path), str(path)]
    return [*command, "--die-with-parent", "--"]


@pytest.fixture
def before(request, who):
    """The command line before a command of `who`, one of `USERS`, with which a test is parametrized."""
    if who == "ordinary" and os.geteuid() != 0:
        pytest.skip("only root can grade as another user: run the tests as root")
    return request.getfixturevalue("ordinary_user") if who == "ordinary" else []


@pytest.fixture
def own_folder():
    """A folder that is removed by `rm`, because Python's own `rmtree` gives up on 1,500 nested folders."""
    folder = Path(tempfile.mkdtemp(prefix="grpo-edu-attacks-"))
    yield folder
    subprocess.run(["rm", "-rf", str(folder)], check=True)


class Classroom:
    """A class, or one part of its submissions, and four places from which somebody may grade it."""

    def __init__(self, folder, port, part, parts):
        self.owned = folder / "owned"
        self.submissions, self.output = folder / "submissions", folder / "grades"
        self.submissions.mkdir()
        self.expected = write_submissions(self.submissions, []) if ALL else {}
        self.expected |= write_attacks(self.submissions, port)
        for number, path in enumerate(sorted(self.submissions.iterdir())):
            if number % parts != part and path.name not in ALWAYS:
                subprocess.run(["rm", "-rf", str(path)], check=True)
        self.places = {
            "submissions": self.submissions,
            "course": folder / "course",
            "student": self.submissions / "neighbor",
            "home": folder / "home",
        }
        source = self.places["course"] / "source" / NAME
        source.mkdir(parents=True)
        shutil.copy(REPOSITORY / "solutions" / f"{NAME}.ipynb", source)
        for place in self.places.values():
            place.mkdir(exist_ok=True)
            for name, text in PLANTED.items():
                (place / name).write_text(text)
                (place / name).chmod(0o755)

    def grade(self, place, before=()):
        """Grade from there; what was printed."""
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "GRPO_EDU_OWNED": str(self.owned)}
        env |= {"MY_SECRET": f"{SECRET}variable", "PATH": f".:{os.environ['PATH']}", "HOME": str(self.places["home"])}
        command = [*before, sys.executable, "-m", "grpo_edu", "grade", str(self.submissions)]
        done = subprocess.run(
            [*command, "--output", str(self.output), *OPTIONS],
            cwd=self.places[place],
            env=env,
            capture_output=True,
            timeout=3000,
        )
        said = (done.stdout + done.stderr).decode(errors="replace")
        assert done.returncode == 0, said[-3000:]
        return said


def system_v():
    return Path("/proc/sysvipc/shm").read_text()


def open_to_all(folder):
    for path in (folder, *folder.parents):
        if path.is_relative_to("/tmp") and path != Path("/tmp"):
            path.chmod(path.stat().st_mode | 0o055)


USERS = ("this user", "ordinary")
if ALL:
    RUNS = list(itertools.product(USERS, PLACES, [(0, 1)]))
else:
    RUNS = [(USERS[number % 2], place, (number, 4)) for number, place in enumerate(PLACES)]


@pytest.mark.parametrize(("who", "place", "part"), RUNS)
def test_everybody_gets_a_row_and_nothing_is_left_or_leaked(own_folder, before, place, part):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.01)
        room = Classroom(own_folder, server.getsockname()[1], *part)
        if before:
            subprocess.run(["chown", "-R", USER, str(own_folder)], check=True)
        memory = system_v()
        said = room.grade(place, before)
        with pytest.raises(TimeoutError):
            server.accept()
    found = {}
    for path in (room.output / "students").glob("*.json"):
        content = json.loads(path.read_bytes())
        label = f"{content['student']} ({content['lms_id']})" if content["lms_id"] else content["student"]
        points = sum(one["points"] for feedback in content["feedback"].values() for one in feedback["parts"])
        found[label] = points, "; ".join(content["troubles"]), "; ".join(content["looks"])
    there = len([path for path in room.submissions.iterdir()])
    rows = rows_of(room.output / "grades.csv")
    assert len(rows) == len(found) == there
    known = {label: room.expected.get(label, room.expected.get(label.partition(" (")[0])) for label in found}
    asked = {label: (known[label], *one) for label, one in found.items() if label not in PLANTED}
    assert [
        (label, points, troubles, looks)
        for label, (what, points, troubles, looks) in asked.items()
        if points != what.points or what.word not in troubles or what.look not in looks
    ] == []
    assert {row["student"].removeprefix("'"): row["total"] for row in rows}["neighbor"] == "19"
    written = {path: path.read_text() for path in room.output.rglob("*") if path.is_file()}
    for text in (said, *(text for path, text in written.items() if path.parent.name != "neighbor")):
        for word in (f"{SECRET}key", f"{SECRET}variable", f"{SECRET}of", "\x1b"):
            assert word not in text
    assert (room.output / "grades.csv").stat().st_size < 200_000
    assert not room.owned.exists(), "a file of the working directory ran as the instructor"
    assert system_v() == memory and not Path("/dev/shm/grpo_attack").exists() and not Path("/tmp/grpo_attack").exists()
    assert left_over() == []


def students_processes():
    """Processes that run students' code with this clone's Python, or that it has started."""
    sign = re.compile(rf"sleep (?:{MARK}|{LEFT_BEHIND})|{re.escape(sys.executable)}.* classroom.student")
    found = psutil.process_iter(["cmdline"])
    return [one for one in found if sign.search(" ".join(one.info["cmdline"] or ()))]


def left_over():
    """Those of them whose grader is gone."""
    found = []
    for one in students_processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            above = " ".join(" ".join(parent.cmdline()) for parent in one.parents())
            if " grade " not in above and "pytest" not in above:
                found.append(one)
    return found


@pytest.mark.parametrize("who", USERS)
def test_a_grader_that_is_killed_leaves_nothing(tmp_path, before):
    source = tmp_path / "in" / "ana"
    source.mkdir(parents=True)
    leave = f"import os, signal, subprocess\nsubprocess.Popen(['sleep', '{MARK}'], start_new_session=True)\n"
    notebook = right(
        f"{leave}if os.fork() == 0:\n    os.kill(os.getpid(), signal.SIGSTOP)\nimport time\ntime.sleep({MARK})"
    )
    (source / f"{NAME}.ipynb").write_text(json.dumps(notebook))
    if before:
        open_to_all(tmp_path)
        subprocess.run(["chown", "-R", USER, str(tmp_path)], check=True)
    command = [*before, sys.executable, "-m", "grpo_edu", "grade", source.parent, "--output", tmp_path / "out"]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "HOME": str(tmp_path)}
    with subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL, cwd=tmp_path) as process:
        wait_until(lambda: any(MARK in one for one in commands(family_of(process))) or process.poll() is not None)
        assert process.poll() is None
        time.sleep(0.5)
        family = family_of(process)
        next(one for one in family if "grade" in one.cmdline() and "python" in one.name()).send_signal(signal.SIGKILL)
        wait_until(lambda: not commands(family))
        assert len(family) >= 4 and commands(family) == []


def test_the_loop_for_feedback_passes_every_students_trap(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root can write to other users' homes: run the tests as root")
    ana, ben, cem = users = [f"{USER}{number}" for number in range(3)]
    text = (REPOSITORY / "docs" / "classroom.md").read_text()
    (loop,) = re.findall(r"```\n(cd /root/grades/04/feedback\n.*?)```", text, re.DOTALL)
    try:
        for user in users:
            subprocess.run(["useradd", "--create-home", "--key", "HOME_MODE=0700", user], check=True)
            (tmp_path / f"{user}.html").write_text(user)
        home = {user: Path(f"~{user}").expanduser() for user in users}
        run_as(ana, "mkfifo", home[ana] / "feedback-04.html")  # which nobody reads
        run_as(ben, "ln", "-s", home[cem] / "theirs", home[ben] / "feedback-04.html")
        script = loop.replace("/root/grades/04/feedback", str(tmp_path))
        said = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=100).stderr
        assert (home[cem] / "feedback-04.html").read_text() == cem and not (home[cem] / "theirs").exists()
        assert f"cannot create {home[ben]}" in said
    finally:
        for user in users:
            subprocess.run(["userdel", "--force", "--remove", user], check=False, capture_output=True)


def run_as(user, *command):
    subprocess.run(["runuser", "-u", user, "--", *command], check=True)


def family_of(process):
    first = psutil.Process(process.pid)
    return [first, *first.children(recursive=True)]


def commands(family):
    """The command lines of those processes that still run, stopped ones among them."""
    found = []
    for one in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            if one.status() != psutil.STATUS_ZOMBIE:
                found.append(one.cmdline())
    return found


def wait_until(holds):
    deadline = time.monotonic() + 120
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.2)
