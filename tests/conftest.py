"""Shared fixtures. No test reaches the network: the Hub is switched off before anything imports it."""

import gc
import os
import shutil
import signal
import subprocess
import sys

gc.disable()  # what is imported while tests are collected stays; see pytest_collection_finish

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# One thread for each test. A result to the last bit needs a fixed number of threads, because sums depend on it, and
# `FreeCores` would change it whenever something else computes. Also, two workers of pytest then share two cores well.
os.environ["OMP_NUM_THREADS"] = "1"

# What nbformat imports would parse a grammar for a second, in each process, to check formats that no notebook uses.
sys.modules["rfc3987_syntax"] = None

from pathlib import Path

import hypothesis
import optional
import pytest
from jupyter_lab import browser, lab, open_notebook  # noqa: F401

# The fixtures of what a computer may lack: `bubblewrap`, `chromium` and others.
globals().update({name: optional.make_fixture(name) for name in optional.RESOURCES})

# A shell that starts the tests in the background lets them ignore Ctrl-C, and so would the programs that they start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A slow moment of a busy machine is not a failure.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")

# Whole runs and processes of their own, seconds each: `course.py test --fast` leaves them out.
SLOW_FILES = {
    "test_bench",
    "test_checks",
    "test_cli",
    "test_cluster",
    "test_cores",
    "test_course",
    "test_curriculum",
    "test_dashboards",
    "test_device",
    "test_effects",
    "test_figures",
    "test_grading",
    "test_grading_attacks",
    "test_grading_sandbox",
    "test_gym",
    "test_challenge",
    "test_memory",
    "test_pretraining",
    "test_profiles",
    "test_real_scale",
    "test_resume",
    "test_runs",
    "test_smollm2",
    "test_speed_benchmarks",
    "test_startup",
    "test_step_process",
    "test_sweeps",
    "test_tracking",
    "test_trl_backend",
}


# Two workers share the files in this order, so that no long file is left for the end.
LONGEST_FILES = [
    "test_grading",
    "test_grading_attacks",
    "test_app",
    "test_book",
    "test_browser",
    "test_cluster",
    "test_challenge",
    "test_resume",
    "test_dashboards",
    "test_smollm2",
]

RAN_EARLIER = pytest.StashKey[set]()


def pytest_addoption(parser):
    parser.addoption("--besides", metavar="RECORD", help="leave out the tests that an earlier `course.py test` has run")


def pytest_configure(config):
    """Hide what a test has to ask for; where xdist starts processes for the tests, each of these does so."""
    record = config.option.besides
    config.stash[RAN_EARLIER] = {*optional.read_record(record)["ran"]} if record else set()
    if config.getoption("dist", "no") == "no":
        config.add_cleanup(lambda: shutil.rmtree(optional.scratch(), ignore_errors=True))
        optional.hide_everything()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    optional.show(item.fixturenames)
    try:
        return (yield)
    finally:
        optional.show(())


def pytest_ignore_collect(collection_path, config):
    """Where slow tests are left out, their files are not even imported."""
    return True if collection_path.stem in SLOW_FILES and "not slow" in config.option.markexpr else None


def pytest_collection_modifyitems(config, items):
    rank = {name: place for place, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))
    for item in items:
        if item.path.stem in SLOW_FILES:
            item.add_marker(pytest.mark.slow)
    left_out = [item for item in items if item.nodeid in config.stash[RAN_EARLIER]]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.nodeid not in config.stash[RAN_EARLIER]]


def pytest_collection_finish():
    """From here on Python collects garbage again, but does not look through all libraries and tests each time."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter, config):
    """List what was skipped; `course.py test` names a file for the record of it."""
    reports = terminalreporter.stats
    skipped = optional.skip_lines(reports.get("skipped", []))
    terminalreporter.section("skipped tests")
    for line in skipped or ["no test was skipped"]:
        terminalreporter.line(line)
    record = optional.BEFORE.get(optional.RECORD)
    if record:
        ran = {report.nodeid for outcome in ("passed", "failed", "error") for report in reports.get(outcome, [])}
        optional.write_record(record, ran | config.stash[RAN_EARLIER], skipped)


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory) -> Path:
    """The folder of a random policy that trains in moments."""
    from small_policy import save_small_policy

    return save_small_policy(tmp_path_factory.mktemp("policy") / "random")


@pytest.fixture(scope="module")
def tokenizer():
    """The tokenizer of the policy of fifteen words; a file that needs another one has a fixture of this name."""
    from toy_policy import word_tokenizer

    return word_tokenizer()


@pytest.fixture
def no_pictures(monkeypatch):
    """Runs write zeros in the place of a picture: drawing takes a third of a small run. test_runs.py looks at them."""
    from grpo_edu.runs.folder import RunFolder

    for name in ("training_curves", "accuracy_comparison"):
        monkeypatch.setattr(f"grpo_edu.figures.curves.{name}", lambda *arguments: None)
    monkeypatch.setattr(RunFolder, "write_figure", lambda folder, name, figure: folder._write(name, bytes(40_000)))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)]
    if os.name != "posix" or os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("only root can mount a small file system: run the tests as root, in a container that allows it")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.fixture
def ctrl_c_works():
    """Python's own handler of SIGINT, whatever a test before or the shell has set; what was there comes back."""
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, usual)


@pytest.fixture(scope="session")
def isolation(bubblewrap):
    """Skips where students' code cannot be isolated, which a process tries once."""
    from classroom.sandbox import isolation_problem

    if problem := isolation_problem():
        pytest.skip(problem)
