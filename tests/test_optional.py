"""Nothing that a computer may lack is found by a test that does not ask for it, nor by what that test starts."""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import optional
import pytest

import course
from classroom import sandbox

REPOSITORY = Path(__file__).resolve().parents[1]
PROGRAMS = [*optional.COMPILERS, *(name for one in optional.RESOURCES.values() for name in one.programs)]
CHILD = (
    "import json, os, shutil\nfrom importlib.util import find_spec\n"
    f"found = [name for name in {PROGRAMS!r} if shutil.which(name)]\n"
    "found += ['reasoning_gym'] if find_spec('reasoning_gym') else []\n"
    f"print(json.dumps(found + [name for name in {(optional.GSM8K, optional.DEEPSPEED)!r} if name in os.environ]))"
)


def found_by_a_child():
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_a_test_that_asks_for_nothing_finds_nothing():
    assert [name for name in PROGRAMS if shutil.which(name)] == []
    assert sandbox._bwrap() is None and find_spec("reasoning_gym") is None
    with pytest.raises(ModuleNotFoundError):
        import reasoning_gym  # noqa: F401
    assert not {optional.GSM8K, optional.DEEPSPEED} & {*os.environ} and os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert not course.BOOK_VENV.exists()
    assert found_by_a_child() == []
    assert shutil.which("sh"), "what is not optional is found"


def test_a_test_that_asks_finds_what_it_asked_for_and_nothing_else(bubblewrap, reasoning_gym):
    assert sandbox._bwrap() == shutil.which("bwrap") and Path(shutil.which("bwrap")).samefile(bubblewrap)
    assert Path(find_spec("reasoning_gym").origin).samefile(reasoning_gym)
    assert found_by_a_child() == ["bwrap", "reasoning_gym"]


def test_a_test_that_asks_for_a_folder_gets_its_path(gsm8k_dir):
    assert gsm8k_dir.is_dir()


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="the programs of this test are scripts of the shell")
def test_so_it_is_on_a_computer_that_has_the_programs_and_the_record_says_what_ran(tmp_path):
    """The tests above again, where PATH has programs of these names; then once more, without those that have run."""
    for name in PROGRAMS:
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "reasoning_gym.py").touch()
    environment = {**os.environ, "PATH": os.pathsep.join([str(tmp_path), os.environ["PATH"]])}
    environment |= {optional.GSM8K: str(tmp_path / "nowhere"), optional.DEEPSPEED: str(tmp_path)}
    environment |= {optional.RECORD: str(tmp_path / "tests.json"), "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/test_optional.py", "-k", "a_test_that"]
    for besides, outcome in ([], "2 passed, 1 skipped, 1 deselected"), (["--besides"], "1 skipped, 3 deselected"):
        besides += [environment[optional.RECORD]] if besides else []
        done = subprocess.run([*command, *besides], cwd=REPOSITORY, env=environment, capture_output=True, text=True)
        assert "    1  the files of GSM8K are missing (download" in done.stdout and outcome in done.stdout, done.stdout
    record = optional.read_record(environment[optional.RECORD])
    assert [name.partition("::")[2] for name in record["ran"]] == [
        "test_a_test_that_asks_finds_what_it_asked_for_and_nothing_else",
        "test_a_test_that_asks_for_nothing_finds_nothing",
    ]
