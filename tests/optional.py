"""What some tests need and a computer may lack. A test asks for it by the fixture of its name, or cannot find it.

A test that forgets to ask would pass only where the program is installed. Therefore the tests' process, and what it
starts, find none of these resources unless the test asks: PATH leads to folders of links without the programs,
variables that name folders are removed, and packages cannot be imported. What `course.py setup` always installs is
not optional.

The end of a test run lists what was skipped, with the commands that install it. `course.py test --rest` then runs it.
"""

import functools
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

import course

REPOSITORY = Path(__file__).resolve().parents[1]
BEFORE = dict(os.environ)  # the environment in which the tests were started
PATH = BEFORE.get("PATH", os.defpath)
# The environment variables that name the folder of a resource.
GSM8K, DEEPSPEED = "GRPO_EDU_GSM8K", "GRPO_EDU_DEEPSPEED"
RECORD = "GRPO_EDU_TEST_RECORD"  # the variable that names the file for the record of a test run
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++")  # no test asks for one


@dataclass(frozen=True)
class Resource:
    """Something that some tests need.

    reason: what is missing, and what for. install: the command that installs it. programs: names of programs, of which
    `needs` says whether all or any of them must exist. path: the file or folder of anything else, None if unknown.
    package: the name by which Python imports it.
    """

    reason: str
    install: str
    programs: tuple[str, ...] = ()
    needs: Callable[[Iterable[object]], bool] = all
    path: Path | None = None
    package: str = ""

    def find(self) -> Path | None:
        """Return its path, that of the first program if there are several; None if it is missing."""
        if not self.programs:
            return self.path if self.path and self.path.exists() else None
        found = [find_program(name) for name in self.programs]
        return next(path for path in found if path) if self.needs(found) else None


def find_program(name: str) -> Path | None:
    """Return the path of a program; daemons are in folders that PATH may lack."""
    found = shutil.which(name, path=os.pathsep.join((PATH, "/usr/local/sbin", "/usr/sbin", "/sbin")))
    return Path(found) if found else None


def find_package(name: str) -> Path | None:
    """Return the path of a package that Python can import; None if it is not installed."""
    found = importlib.util.find_spec(name)
    return Path(found.origin) if found else None


RESOURCES = {
    "bubblewrap": Resource(
        "bubblewrap is not installed, in which students' code runs",
        "Debian: sudo apt-get install bubblewrap",
        programs=("bwrap",),
    ),
    "chromium": Resource(
        "no browser is installed, in which pages are tested",
        "Debian: sudo apt-get install chromium",
        programs=("chromium", "chromium-browser", "google-chrome"),
        needs=any,
    ),
    "node": Resource(
        "Node.js is not installed, which runs the scripts of the web book",
        "Debian: sudo apt-get install nodejs",
        programs=("node",),
    ),
    "npm": Resource(
        "npm is not installed, which installs the proxy of a classroom",
        "Debian: sudo apt-get install npm",
        programs=("npm",),
    ),
    "slurm": Resource(
        "Slurm is not installed, on which a job of `grpo-edu cluster` runs",
        "Debian: sudo apt-get install slurm-wlm",
        programs=("munged", "munge", "slurmctld", "slurmd", "sbatch", "sinfo", "scontrol", "squeue"),
    ),
    "jupyter_book": Resource(
        "Jupyter Book is not installed in .venv-book, which builds the web book",
        "python3 course.py book",
        path=course.venv_python(course.BOOK_VENV),
    ),
    "reasoning_gym": Resource(
        "reasoning-gym is not installed, a part of which is compiled",
        "Debian: sudo apt-get install gcc python3-dev && .venv/bin/pip install --no-deps -r requirements-gym.lock",
        path=find_package("reasoning_gym"),
        package="reasoning_gym",
    ),
    "deepspeed": Resource(
        f"{DEEPSPEED} does not name a folder with DeepSpeed, which reads what `grpo-edu cluster` writes",
        f".ci/run has the command of pip; then export {DEEPSPEED}=FOLDER",
        path=Path(BEFORE[DEEPSPEED]) if BEFORE.get(DEEPSPEED) else None,
    ),
    "gsm8k_dir": Resource(
        "the files of GSM8K are missing",
        f"download train.jsonl and test.jsonl from github.com/openai/grade-school-math; then export {GSM8K}=FOLDER",
        path=Path(BEFORE.get(GSM8K) or REPOSITORY.parent / "shared" / "data" / "gsm8k"),
    ),
}


def make_fixture(name: str):
    """Return the fixture that hands out the path of a resource, and skips the test if it is missing."""
    resource = RESOURCES[name]

    @pytest.fixture(scope="session", name=name)
    def hand_out() -> Path:
        found = resource.find()
        if found is None:
            pytest.skip(f"{resource.reason} ({resource.install})")
        return found

    return hand_out


# ---- hiding ----


@functools.cache
def scratch() -> Path:
    """Return a temporary folder of this process, which all users may read; pytest removes it at the end."""
    folder = Path(tempfile.mkdtemp(prefix="grpo-edu-tests-"))
    folder.chmod(0o755)
    return folder


def hide_everything() -> None:
    """Hide every resource from this process and from those that it will start, and what no test may use at all."""
    for name in (GSM8K, DEEPSPEED, RECORD):
        os.environ.pop(name, None)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for name in ("HF_HUB_CACHE", "HF_DATASETS_CACHE"):  # models and data that somebody has downloaded
        os.environ[name] = str(scratch() / name.lower())
    course.BOOK_VENV = scratch() / "no-book"
    show(())


def show(names: Iterable[str]) -> None:
    """Let this process, and those that it will start, find the resources of these names and no others."""
    shown = [name for name in names if name in RESOURCES]
    places = [str(links_to(name)) for name in shown if RESOURCES[name].programs]
    if os.name == "posix":  # Windows gives links to administrators only
        os.environ["PATH"] = os.pathsep.join([path_without_programs(), *places])
    hidden = [resource.package for name, resource in RESOURCES.items() if resource.package and name not in shown]
    hide_packages(tuple(hidden))


@functools.cache
def path_without_programs() -> str:
    """Return PATH with a folder of links in place of each folder that has an optional program, which has no link."""
    hidden = {*COMPILERS, *(name for resource in RESOURCES.values() for name in resource.programs)}
    return os.pathsep.join(folder_without(place, hidden) for place in PATH.split(os.pathsep))


def folder_without(place: str, programs: set[str]) -> str:
    """Return a folder with links to the other programs of `place`; `place` itself if it has none of `programs`."""
    if not any(os.path.exists(os.path.join(place, name)) for name in programs):
        return place
    folder = Path(tempfile.mkdtemp(prefix="bin-", dir=scratch()))
    folder.chmod(0o755)
    for path in Path(place).absolute().iterdir():
        if path.name not in programs:
            (folder / path.name).symlink_to(path)
    return str(folder)


@functools.cache
def links_to(name: str) -> Path:
    """Return a folder with links to the programs of a resource."""
    folder = scratch() / name
    folder.mkdir()
    for program in filter(None, map(find_program, RESOURCES[name].programs)):
        (folder / program.name).symlink_to(program)
    return folder


REAL_MODULES = {}  # what was imported while it was shown


def hide_packages(names: tuple[str, ...]) -> None:
    """Let Python import the packages of RESOURCES except these, here and in processes that are started from here."""
    for name in filter(None, (resource.package for resource in RESOURCES.values())):
        if sys.modules.get(name) is not None:
            REAL_MODULES[name] = sys.modules[name]
        sys.modules.pop(name, None)
        if name in names:
            sys.modules[name] = None  # Python then says that it is not installed
        elif name in REAL_MODULES:
            sys.modules[name] = REAL_MODULES[name]
    places = [str(folder_of_hiding(names)), *filter(None, [BEFORE.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(places)


@functools.cache
def folder_of_hiding(names: tuple[str, ...]) -> Path:
    """Return a folder whose `sitecustomize` hides these packages as Python starts."""
    folder = Path(tempfile.mkdtemp(prefix="python-", dir=scratch()))
    folder.chmod(0o755)
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({names!r}))\n")
    return folder


# ---- the end of a test run ----


def skip_lines(reports) -> list[str]:
    """Return a line for each reason for which tests were skipped: how many they were, and the reason."""
    reasons = Counter(" ".join(report.longrepr[2].split()).removeprefix("Skipped: ") for report in reports)
    return [f"{count:5d}  {reason}" for reason, count in reasons.most_common()]


def read_record(path: str) -> dict[str, list[str]]:
    """Return the tests that an earlier run has run ("ran"), and the lines about those it has skipped ("skipped")."""
    return json.loads(Path(path).read_text(encoding="utf-8"))


def write_record(path: str, ran: Iterable[str], skipped: list[str]) -> None:
    """Write which tests have run; `course.py test` shows the lines at its end, and its --rest runs the others."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps({"ran": sorted(ran), "skipped": skipped}), encoding="utf-8")
