"""A classroom from end to end: real users of this computer, JupyterHub's pages in a browser and its REST API.

Needs root (it makes three users and removes them), Node.js, bubblewrap, chromium and a package index for JupyterHub.
"""

import contextlib
import csv
import os
import pwd
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import nbformat
import psutil
import pytest
from forty_submissions import NAME, RIGHT, answered
from jupyter_lab import shoot

from grpo_edu.cli.main import main

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.browser, pytest.mark.timeout(1200)]
REPOSITORY = Path(__file__).resolve().parents[1]
FOLDERS = ("benchmarks", "classroom", "data", "docs", "exercises", "grpo_edu", "notebooks", "solutions")
PARTS = (*FOLDERS, "requirements.txt")
PARTLY = RIGHT["group_advantages"].replace("bool((group == group[0]).all())", "False")
ANSWERS = {"ana": {"tie_probability": RIGHT["tie_probability"], "group_advantages": PARTLY}, "ben": RIGHT}
PREFIX = f"grpotest{os.getpid()}"  # no account of this computer begins like this
COURSE, TEACHER, ANA, BEN = (f"{PREFIX}{name}" for name in ("course", "teacher", "ana", "ben"))


def python_for_everybody():
    """A Python of this version that other users can run, too; root's own folder is closed to them."""
    system = shutil.which(f"python{sys.version_info[0]}.{sys.version_info[1]}", path="/usr/local/bin:/usr/bin")
    places = [Path(sys.base_prefix) / "bin" / "python3", *([Path(system)] if system else [])]
    for place in (Path(os.path.realpath(place)) for place in places):
        if all(part.stat().st_mode & 0o001 for part in (place, *place.parents)):
            return place
    pytest.skip("every Python of this version is closed to other users (Debian: apt install python3-venv)")


def environment(folder, python, own):
    """A virtual environment that finds the tests' packages, so that little must be installed, and a copy of the course.

    Only the packages' places differ from what `course.py` makes: its own environments hold all of them.
    """
    subprocess.run([python, "-m", "venv", folder], check=True, capture_output=True, timeout=300)
    site = Path(torch_folder()).parent
    (next((folder / "lib").glob("python*")) / "site-packages" / "course.pth").write_text(f"{own}\n{site}\n")
    for part in ("share/jupyter", "etc/jupyter"):
        shutil.copytree(Path(sys.prefix) / part, folder / part, dirs_exist_ok=True)
    alembic = folder / "bin" / "alembic"  # a program that nbgrader calls
    alembic.write_text(f"#!{folder}/bin/python\nfrom alembic.config import main\nmain()\n")
    alembic.chmod(0o755)
    return folder / "bin" / "python"


def torch_folder():
    import torch

    return Path(torch.__file__).parent


@pytest.fixture(scope="module")
def room(bubblewrap, node, npm):
    """(address, folder, passwords) of a running classroom of one instructor and two students."""
    if os.geteuid() != 0:
        pytest.skip("only root can try this: run the tests as root")
    python = python_for_everybody()
    top = Path(tempfile.mkdtemp(prefix=PREFIX, dir="/tmp"))
    top.chmod(0o755)
    hub = None
    try:
        own, folder = top / "course", top / "room"
        for part in PARTS:
            source = REPOSITORY / part
            ignored = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
            shutil.copytree(source, own / part, ignore=ignored) if source.is_dir() else shutil.copy(source, own / part)
        kernel = environment(top / "venv", python, own)
        environment(folder / "hub", python, own)
        roster = top / "roster.csv"
        roster.write_text(f"name,role\n{TEACHER},instructor\n{ANA},student\n{BEN},student\n")
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        subprocess.run(["useradd", "--no-create-home", "--home-dir", "/srv/earlier", COURSE], check=True)  # last term's
        command = [kernel, own / "classroom" / "hub" / "set_up.py", folder, "--roster", roster, "--account", COURSE]
        done = subprocess.run(
            [*command, "--release", "02"], env=clean, cwd=top, capture_output=True, text=True, timeout=500
        )
        if "cannot read" in done.stderr:  # the packages that these tests use lie in somebody's home, say
            pytest.skip(done.stderr[-500:])
        if not (folder / "hub" / "classroom-stamp").exists():
            pytest.skip(f"JupyterHub could not be installed: {done.stderr[-500:]}")
        assert done.returncode == 0, done.stderr
        assert pwd.getpwnam(COURSE).pw_dir == str(folder / "course")
        port = three_free_ports()
        settings = folder / "settings.toml"
        settings.write_text(settings.read_text().replace("port = 8000", f"port = {port}"))
        with (folder / "state" / "hub.log").open("w") as log:
            hub = subprocess.Popen(
                [*command[:3], "--account", COURSE, "--release", "none", "--start"],
                cwd=folder, env=clean, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        address = f"http://127.0.0.1:{port}"
        wait_for(f"ready: {address}", hub, folder / "state" / "hub.log")
        with (folder / "passwords.csv").open(newline="") as file:
            yield address, folder, {row["name"]: row["password"] for row in csv.DictReader(file)}
    finally:
        clean_up(hub, top)


def three_free_ports():
    """The first of three free ports in a row, below those that the system gives to whoever asks for any."""
    while True:
        port = random.randrange(20_000, 32_000)
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for number in range(port, port + 3):
                held.enter_context(socket.create_server(("127.0.0.1", number)))
            return port


def wait_for(word, hub, log):
    deadline = time.monotonic() + 300
    while word not in log.read_text():
        if time.monotonic() > deadline or hub.poll() is not None:
            pytest.fail(f"the hub did not start:\n{log.read_text()[-3000:]}")
        time.sleep(0.5)


def clean_up(hub, top):
    """End the hub and whatever the users still run, and remove users and folder."""
    if hub is not None:
        hub.terminate()
        try:
            hub.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(hub.pid, signal.SIGKILL)
    for name in (COURSE, TEACHER, ANA, BEN):
        for process in processes_of(name):
            process.kill()
        subprocess.run(["userdel", "--force", "--remove", name], check=False, capture_output=True)
    subprocess.run(["groupdel", f"{COURSE}-people"], check=False, capture_output=True)
    shutil.rmtree(top)


def processes_of(name):
    return [one for one in psutil.process_iter(["username"]) if one.info["username"] == name]


class Visitor:
    """Somebody who logged in with a browser, and the same login for the REST API."""

    def __init__(self, browser, room, name, path="/"):
        self.address, _, passwords = room
        self.name = name
        self.page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
        self.page.goto(self.address + path)
        self.page.fill("#username_input", name)
        self.page.fill("#password_input", passwords[name])
        self.page.click("#login_submit")

    def call(self, path, method="GET", **options):
        """A request with this browser's cookies."""
        tokens = {one["path"]: one["value"] for one in self.page.context.cookies() if one["name"] == "_xsrf"}
        token = next((value for place, value in tokens.items() if place != "/" and path.startswith(place)), "")
        headers = {"X-XSRFToken": token}
        return self.page.request.fetch(self.address + path, method=method, headers=headers, timeout=200_000, **options)

    def done(self, path, **options):
        """A request by POST that nbgrader must report as successful; its answer."""
        answer = self.call(path, "POST", **options).json()
        assert answer["success"], answer
        return answer


def student(browser, room, name):
    visitor = Visitor(browser, room, name)
    visitor.page.wait_for_url(f"**/user/{name}/lab*", timeout=120_000)
    visitor.page.wait_for_selector(".lm-MenuBar-item", timeout=120_000)
    return visitor


def hand_in(visitor, answers):
    """Fetch the assignment, write the answers into it, submit it."""
    chosen = {"course_id": "grpo-edu", "assignment_id": NAME}
    visitor.done(f"/user/{visitor.name}/assignments/fetch", form=chosen)
    path = f"/user/{visitor.name}/api/contents/{NAME}/{NAME}.ipynb"
    notebook = nbformat.from_dict(visitor.call(path).json()["content"])
    for cell, right in zip(notebook.cells, answered(answers).cells, strict=True):
        cell.source = right.source
    assert visitor.call(path, "PUT", data={"type": "notebook", "format": "json", "content": notebook}).ok
    visitor.done(f"/user/{visitor.name}/assignments/submit", form=chosen)


def test_a_class_goes_from_release_to_feedback(browser, room, tmp_path):
    address, folder, _ = room
    formgrader = f"/user/{COURSE}/formgrader"
    with urllib.request.urlopen(f"{address}/user/{COURSE}/api", timeout=10) as first:  # no 424: it runs already
        assert first.status == 200
    teacher = Visitor(browser, room, TEACHER, f"/hub/spawn/{COURSE}")
    teacher.page.get_by_role("button", name="Authorize").click(timeout=120_000)
    teacher.page.wait_for_selector(f"text={NAME}", timeout=60_000)
    shoot(teacher.page, "classroom_formgrader")
    teacher.done(f"{formgrader}/api/assignment/{NAME}/release")

    ana, ben = student(browser, room, ANA), student(browser, room, BEN)
    ana.page.locator(".lm-MenuBar-item", has_text="Nbgrader").click()
    ana.page.locator(".lm-Menu-item", has_text="Assignment List").first.click()
    ana.page.wait_for_selector(f"text={NAME}", timeout=30_000)
    shoot(ana.page, "classroom_assignments")
    assert ana.call(f"/user/{ANA}/api/contents/benchmarks/results/default_run.json").ok  # notebook 07 reads it
    for path in (f"/user/{ANA}/api/contents", f"/user/{ANA}/lab", f"{formgrader}/api/grades", f"/user/{COURSE}/lab"):
        assert ben.call(path).status == 403, path
    for path in (f"/user/{BEN}/formgrader/api/grades", f"/user/{BEN}/formgrader"):
        assert ben.call(path).status == 404, path  # on a student's server there is no formgrader
    secrets = f"~{ANA} {folder}/course {folder}/state"
    looks = f"ls {secrets}; cat {folder}/passwords.csv {folder}/roster.csv"
    home = subprocess.run(["su", BEN, "-c", looks], capture_output=True, text=True, check=False)
    assert not home.stdout and home.stderr.count("Permission denied") == 5
    limits = [Path(f"/proc/{process.pid}/limits").read_text() for process in processes_of(ANA)]
    assert limits and all(re.search(rf"Max data size +{5 * 2**30} +{5 * 2**30} ", text) for text in limits)

    hand_in(ana, ANSWERS["ana"])
    hand_in(ben, ANSWERS["ben"])
    teacher.done(f"{formgrader}/api/assignment/{NAME}/collect")
    for name in (ANA, BEN):
        teacher.done(f"{formgrader}/api/submission/{NAME}/{name}/autograde")
    rows = {row["student"]: row for row in teacher.call(f"{formgrader}/api/submissions/{NAME}").json()}
    theirs = {name: rows[name]["score"] for name in (ANA, BEN)}
    assert theirs == {ANA: 7.5, BEN: 19}  # half a point for a slip that the check can name

    assert main(["grade", str(folder / "course"), "--output", str(tmp_path / "ours"), "--workers", "1"]) == 0
    with (tmp_path / "ours" / "grades.csv").open(newline="") as file:
        assert {row["student"]: float(row["total"]) for row in csv.DictReader(file)} == theirs

    (handed_in,) = teacher.call(f"{formgrader}/api/student_notebook_submissions/{ANA}/{NAME}").json()
    page = teacher.page.goto(f"{address}{formgrader}/submissions/{handed_in['id']}/")
    assert page.ok, (folder / "state" / "hub.log").read_text()[-3000:]
    teacher.page.locator("input.score").first.wait_for(timeout=60_000)
    shoot(teacher.page, "classroom_submission")
    grade = teacher.call(f"{formgrader}/api/grades?submission_id={handed_in['id']}").json()[0]
    more = {"manual_score": grade["manual_score"], "extra_credit": 2}
    assert teacher.call(f"{formgrader}/api/grade/{grade['id']}", "PUT", data=more).ok
    rows = {row["student"]: row for row in teacher.call(f"{formgrader}/api/submissions/{NAME}").json()}
    assert rows[ANA]["score"] == 9.5

    for step in ("generate_feedback", "release_feedback"):
        teacher.done(f"{formgrader}/api/assignment/{NAME}/{step}")
    chosen = {"course_id": "grpo-edu", "assignment_id": NAME}
    ana.done(f"/user/{ANA}/assignments/fetch_feedback", form=chosen)
    pages = list((Path(f"~{ANA}").expanduser() / NAME / "feedback").rglob("*.html"))
    assert len(pages) == 1 and f"(Score: 9.5 / {rows[ANA]['max_score']:.1f})" in pages[0].read_text()
