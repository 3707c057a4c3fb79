"""Shared fixtures. No test reaches the network: the Hub is switched off before anything imports it."""

import gc
import os
import signal
import subprocess

gc.disable()  # what is imported while tests are collected stays; see pytest_collection_finish

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# One thread for each test. A result to the last bit needs a fixed number of threads, because sums depend on it, and
# `FreeCores` would change it whenever something else computes. Also, two workers of pytest then share two cores well.
os.environ["OMP_NUM_THREADS"] = "1"

from pathlib import Path

import hypothesis
import pytest
from jupyter_lab import browser, lab, open_notebook  # noqa: F401

# A shell that starts the tests in the background lets them ignore Ctrl-C, and so would the programs that they start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A slow moment of a busy machine is no failure.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")

REPOSITORY = Path(__file__).resolve().parents[1]
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
    "test_trl_job",
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
    "test_trl_job",
    "test_challenge",
    "test_resume",
    "test_dashboards",
    "test_smollm2",
]


def pytest_ignore_collect(collection_path, config):
    """Where slow tests are left out, their files are not even imported."""
    return True if collection_path.stem in SLOW_FILES and "not slow" in config.option.markexpr else None


def pytest_collection_modifyitems(items):
    rank = {name: place for place, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))
    for item in items:
        if item.path.stem in SLOW_FILES:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish():
    """From here on Python collects garbage again, but does not look through all libraries and tests each time."""
    gc.freeze()
    gc.enable()


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

    monkeypatch.setattr(RunFolder, "write_figure", lambda folder, name, figure: folder._write(name, bytes(40_000)))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)]
    if os.name != "posix" or os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("only root can mount a small file system to fill")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.fixture
def ctrl_c_works():
    """Python's own handler of SIGINT, whatever a test before or the shell has set; what was there comes back."""
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, usual)


@pytest.fixture(scope="session")
def isolation():
    """Skips where students' code cannot be isolated, which a process tries once."""
    from classroom.sandbox import isolation_problem

    if problem := isolation_problem():
        pytest.skip(problem)


@pytest.fixture(scope="session")
def gsm8k_dir() -> Path:
    """The folder of the real GSM8K files; tests that need it skip where it is absent."""
    named = os.environ.get("GRPO_EDU_GSM8K")
    folder = Path(named) if named else REPOSITORY.parent / "shared" / "data" / "gsm8k"
    if not (folder / "test.jsonl").is_file():
        pytest.skip(f"GSM8K files are not at {folder}; set GRPO_EDU_GSM8K to their folder")
    return folder
