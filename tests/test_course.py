"""The starter: a copy of course.py sets up a project of one file, offline, in a virtual environment of its own."""

import ast
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).resolve().parents[1]

# A build backend inside the project, so that an editable install needs nothing from a package index.
BACKEND = """
import os, pathlib, time, zipfile

def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    here = pathlib.Path.cwd()
    if (here / "slow").exists():
        (here / "begun").touch()
        time.sleep(60)
    if (here / "full").exists():
        raise OSError(28, os.strerror(28))
    name, info = "scratch-1.0-py3-none-any.whl", "scratch-1.0.dist-info/"
    with zipfile.ZipFile(pathlib.Path(wheel_directory) / name, "w") as wheel:
        wheel.writestr("scratch.pth", str(here))
        wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\\nName: scratch\\nVersion: 1.0\\n")
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(info + "RECORD", "")
    return name
"""
# The address that course.py asks for PyTorch on Linux; nothing listens there, and the wheelhouse answers first.
PINS = "# --index-url http://127.0.0.1:9/simple\ntorch==0\n"
PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "scratch"
version = "1.0"
"""


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("course", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def course() -> ModuleType:
    """course.py of this repository, imported and not run."""
    return load(REPOSITORY / "course.py")


@pytest.fixture
def bare(tmp_path) -> ModuleType:
    """course.py of a folder that has no .venv."""
    shutil.copy(REPOSITORY / "course.py", tmp_path)
    return load(tmp_path / "course.py")


@pytest.fixture(scope="module")
def scratch(tmp_path_factory) -> Path:
    """A project of one file beside a copy of course.py, not set up yet; the wheelhouse holds its one pin."""
    folder = tmp_path_factory.mktemp("a project")  # with a space, as in many home folders
    shutil.copy(REPOSITORY / "course.py", folder)
    (folder / "backend.py").write_text(BACKEND)
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "requirements.txt").write_text(PINS)
    (folder / "wheelhouse").mkdir()
    info = "torch-0.dist-info/"
    with zipfile.ZipFile(folder / "wheelhouse" / "torch-0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("torch.py", "")
        wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 0\n")
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(info + "RECORD", "")
    return folder


def start(folder: Path, *arguments: str) -> subprocess.Popen:
    links = str((folder / "wheelhouse").as_uri())
    environment = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": links, "PYTHONPATH": "/nowhere"}
    return subprocess.Popen(
        [sys.executable, "course.py", *arguments],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(child: subprocess.Popen) -> tuple[int, str]:
    output, _ = child.communicate(timeout=300)
    assert "Traceback" not in output
    return child.returncode, output


@pytest.fixture(scope="module")
def made(scratch) -> Path:
    """The project after `course.py setup`."""
    code, output = finish(start(scratch, "setup"))
    assert code == 0, output
    return scratch


def test_setup_makes_a_complete_environment(made):
    python = load(made / "course.py").PYTHON
    found = subprocess.run(
        [python, "-c", "import backend, torch; print(backend.__file__)"], cwd="/", capture_output=True, text=True
    )
    assert Path(found.stdout.strip()) == made / "backend.py"


def test_a_wheelhouse_is_all_that_a_machine_without_a_network_needs(made, tmp_path):
    code, output = finish(start(made, "wheelhouse", str(tmp_path / "taken along")))
    assert code == 0 and "1 package(s)" in output, output
    (wheel,) = (tmp_path / "taken along").iterdir()
    assert wheel.name == "torch-0-py3-none-any.whl"
    assert wheel.read_bytes() == (made / "wheelhouse" / wheel.name).read_bytes()


def test_a_second_start_installs_nothing_and_is_quick(made):
    stamp = made / ".venv" / "course-stamp"
    before = stamp.stat().st_mtime_ns
    begun = time.monotonic()
    code, output = finish(start(made, "setup"))
    assert (code, output) == (0, "course: the set-up in .venv is up to date\n")
    assert time.monotonic() - begun < 5  # a third of a second on a free machine
    assert stamp.stat().st_mtime_ns == before


def test_every_part_of_the_tests_runs_even_after_one_failed(made):
    code, output = finish(start(made, "test"))  # this environment holds none of ruff, mypy and pytest
    assert code == 1
    assert "No module named ruff" in output
    assert "No module named pytest" in output
    failed = "FAILED with exit code 1"
    assert output.endswith(f"course: ruff: {failed}, format: {failed}, types: {failed}, tests: {failed}\n")


def test_new_pins_are_installed_and_a_missing_one_is_named(made):
    pins = made / "requirements.txt"
    pins.write_text(PINS + "surely-absent==1.0\n")
    code, output = finish(start(made, "setup"))
    assert code == 1
    assert output.splitlines()[-1].endswith("has no surely-absent==1.0.")
    assert "PIP_NO_INDEX is set" in output
    pins.write_text(PINS)  # mended: the old set-up counts again
    assert finish(start(made, "setup")) == (0, "course: the set-up in .venv is up to date\n")


@pytest.mark.skipif(os.name == "nt", reason="Ctrl-C reaches a process group otherwise there")
def test_an_interrupted_set_up_goes_on(made):
    (made / "requirements.txt").write_text(PINS + "# changed\n")
    (made / "slow").touch()
    child = start(made, "setup")
    while not (made / "begun").exists():
        assert child.poll() is None
        time.sleep(0.05)
    os.killpg(child.pid, signal.SIGINT)
    code, output = finish(child)
    (made / "slow").unlink()
    assert code == 130
    assert "course: stopped; run the same command again and it goes on from there" in output
    code, output = finish(start(made, "setup"))
    assert code == 0
    assert "making the virtual environment" not in output  # what was there is used
    assert re.search(r"course: set up in \d+ s\n$", output)


def test_a_disk_that_fills_up_on_the_way(made):
    (made / "requirements.txt").write_text(PINS + "# changed again\n")
    (made / "full").touch()
    code, output = finish(start(made, "setup"))
    (made / "full").unlink()
    assert code == 1
    assert output.splitlines()[-1].startswith("course: the disk is full: ")
    assert finish(start(made, "setup"))[0] == 0


def test_no_network_has_a_clear_word(made, monkeypatch, capsys):
    here = load(made / "course.py")
    closed = "http://127.0.0.1:9/simple"  # nothing listens there
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(here.Stop, match="no connection to the package index"):
        here.attempt(here.PYTHON, "-m", "pip", "install", "--retries", "1", "--index-url", closed, "surely-absent==1.0")
    assert "no answer from the package index yet" in capsys.readouterr().out


def test_no_disk_space_stops_before_anything_is_written(bare, monkeypatch, capsys):
    monkeypatch.setattr(bare.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**12, 0, 10**9))
    assert bare.main(["setup"]) == 1
    assert "1.0 GB of disk space free, and 3.0 GB is needed" in capsys.readouterr().err
    assert not bare.VENV.exists()


def test_a_python_without_ensurepip_is_told_the_package(bare, monkeypatch, capsys):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ensurepip" else real(name))
    monkeypatch.setattr(bare, "check_disk", lambda: None)
    assert bare.main(["setup"]) == 1
    assert "sudo apt install python3-venv" in capsys.readouterr().err
    assert not bare.VENV.exists()


@pytest.mark.parametrize("version", [(3, 6, 15), (3, 10, 13), (3, 14, 0)])
def test_an_unsupported_python_is_told_which_to_use(course, version):
    with pytest.raises(course.Stop, match=rf"this is Python 3\.{version[1]}, .* run `python3.12 course.py lab`"):
        course.check_python(version, which=lambda name: name == "python3.12")
    with pytest.raises(course.Stop, match="install 3.12"):
        course.check_python(version, which=lambda name: None)


@pytest.mark.parametrize("version", [(3, 11, 0), (3, 12, 9), (3, 13, 1)])
def test_a_supported_python_passes(course, version):
    course.check_python(version)


def test_an_old_python_can_read_the_file():
    ast.parse((REPOSITORY / "course.py").read_text(), feature_version=(3, 6))
    assert (REPOSITORY / "course.py").read_bytes().isascii()  # any console can show its help


def test_the_paths_of_both_kinds_of_system(course):
    assert course.venv_program("python", "posix").relative_to(course.VENV) == Path("bin", "python")
    assert course.venv_program("python", "nt").relative_to(course.VENV) == Path("Scripts", "python.exe")


def test_arguments_go_to_pytest_in_their_order(course):
    options, rest = course.parse(["test", "--fast", "-k", "ratio", "tests/test_losses.py", "-x"])
    assert options.fast
    assert rest == ["-k", "ratio", "tests/test_losses.py", "-x"]


def test_a_mistyped_option_is_refused(course, capsys):
    with pytest.raises(SystemExit):
        course.parse(["lab", "--brwser"])
    assert "unknown arguments: --brwser" in capsys.readouterr().err


def test_every_dependency_is_pinned_within_its_range():
    lines = (REPOSITORY / "requirements.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    for text in project["dependencies"] + project["optional-dependencies"]["test"]:
        wanted = Requirement(text)
        assert wanted.name in pins, f"{wanted.name} is in pyproject.toml and not in requirements.txt"
        assert wanted.specifier.contains(pins[wanted.name]), f"{text} leaves out the tested {pins[wanted.name]}"


def test_the_wheel_carries_the_problems_and_the_model(tmp_path):
    pytest.importorskip("hatchling", reason="the build backend is in requirements.txt and is not installed here")
    source = tmp_path / "source"
    ignore = shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", ".*_cache")
    shutil.copytree(REPOSITORY, source, ignore=ignore)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q", "-w", tmp_path, source]
    subprocess.run(build, check=True)
    (wheel,) = tmp_path.glob("grpo_edu-*.whl")
    site = tmp_path / "site"
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "-q", "--target", site, wheel], check=True)
    shipped = {path.relative_to(source / "data") for path in (source / "data").rglob("*") if path.is_file()}
    assert Path("models", "tiny", "model.safetensors") in shipped
    for path in shipped:
        assert (site / "grpo_edu" / "_data" / path).read_bytes() == (source / "data" / path).read_bytes()
    ask = "from grpo_edu.checks.inputs import stored_curves; assert len(stored_curves('healthy')) == 5"
    told = subprocess.run(
        [sys.executable, "-c", f"{ask}; from grpo_edu.problems.templates import data_dir; print(data_dir())"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(told.stdout.strip()) == site / "grpo_edu" / "_data"


@pytest.fixture(scope="module")
def classroom():
    if sys.platform != "linux":
        pytest.skip("a classroom needs Linux")
    spec = importlib.util.spec_from_file_location("set_up", REPOSITORY / "classroom" / "set_up.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("name,role\nJörg,student\n".encode("latin-1"), ["UTF-8"]),
        (b"name;role\nteacher;instructor\n", ["commas", "name,role"]),
        (b"", ["commas", "name,role"]),
        (b"name,role\nana,student\n", ["no instructor"]),
        (b"name,role\nteacher,boss\n", ["line 2", "'boss'"]),
    ],
)
def test_a_roster_that_cannot_be_read_is_refused_with_what_to_do(classroom, tmp_path, content, words):
    path = tmp_path / "roster.csv"
    path.write_bytes(content)
    with pytest.raises(classroom.Stop) as stop:
        classroom.read_roster(path)
    assert all(word in str(stop.value) for word in words)


def test_a_roster_of_a_spreadsheet_is_read(classroom, tmp_path):
    (tmp_path / "roster.csv").write_bytes(b"\xef\xbb\xbfname,role\r\nteacher,instructor\r\nana,student\r\n")
    assert [row["name"] for row in classroom.read_roster(tmp_path / "roster.csv")] == ["teacher", "ana"]


def test_assignments_to_release_are_checked_before_anything_is_set_up(classroom):
    assert classroom.read_release("02, 04") == ["02", "04"] and classroom.read_release("none") == ["none"]
    with pytest.raises(classroom.Stop, match=r"'2'.*00,01,02"):
        classroom.read_release("2,04")
