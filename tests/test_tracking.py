"""Trackers get what the log gets, in stores on this machine that are read back here with the trackers' own readers."""

import json
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from grpo_edu.cli.main import main
from grpo_edu.runs import tracking
from grpo_edu.runs.log import read_log
from grpo_edu.runs.options import TRACKERS, RunConfig
from grpo_edu.runs.record import RunMetadata
from grpo_edu.runs.run import resume_training, run_training
from grpo_edu.runs.tracking import PROJECT, open_trackers

ACCURACY = "rewards/accuracy_reward/mean"
STEPS = [{"step": step, "reward": step / 8, ACCURACY: 0.5, "kl": float("nan")} for step in (1, 2, 3)]
SIZES = {"num_generations": 4, "prompts_per_step": 2, "max_completion_length": 24, "seed": 5, "max_steps": 4}

pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.fixture(scope="module", autouse=True)
def call_nobody():
    """No test of this file may look up another computer or connect to it."""
    hosts, watching = set(), [True]

    def note(event, arguments):
        if watching and event in ("socket.connect", "socket.getaddrinfo"):
            address = arguments[1] if event == "socket.connect" else arguments
            hosts.add(address[0] if isinstance(address, tuple) else None)

    sys.addaudithook(note)  # it stays as long as this process
    yield
    watching.clear()
    assert hosts <= {"", None, "localhost", "127.0.0.1", "::1"}


def trackers_of(name: str, folder: Path):
    return open_trackers(RunMetadata.start(RunConfig(report_to=(name,))), folder)


@pytest.fixture
def trackio_store(tmp_path_factory, monkeypatch):
    """trackio reads where its store is when it is imported: once for all tests."""
    from trackio.sqlite_storage import SQLiteStorage

    place = tmp_path_factory.mktemp("trackio")
    for module in [module for name, module in sys.modules.items() if name.startswith("trackio")]:
        if hasattr(module, "TRACKIO_DIR"):
            monkeypatch.setattr(module, "TRACKIO_DIR", place)
    return SQLiteStorage


def scalars_of_tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {name: [(point.step, point.value) for point in events.Scalars(name)] for name in events.Tags()["scalars"]}


def records_of_wandb(folder: Path) -> list:
    """The records of an offline run, once all are there: wandb's own process may write on after a run is closed."""
    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    deadline = time.monotonic() + 60
    while not ((records := parse_wandb(file.read_bytes())) and records[-1].HasField("exit")):
        assert time.monotonic() < deadline, f"{len(records)} records, and no end"
        time.sleep(0.1)
    return records


def parse_wandb(content: bytes) -> list:
    """Protobufs in LevelDB's log format: blocks of 32 KiB with chunks of 7 + n bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    position, parts, records = 7, b"", []
    while position + 7 <= len(content):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        size, kind = int.from_bytes(content[position + 4 : position + 6], "little"), content[position + 6]
        if position + 7 + size > len(content):
            break
        parts += content[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # whole, or the last part
            records.append(Record.FromString(parts))
            parts = b""
    return records


def history_of_wandb(folder: Path) -> list[dict[str, float]]:
    rows = [record.history for record in records_of_wandb(folder) if record.HasField("history")]
    return [{"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in row.item} for row in rows]


def test_tensorboard_reads_what_was_logged(tmp_path):
    for _ in range(2):  # the second replaces the first
        with trackers_of("tensorboard", tmp_path) as log:
            for metrics in STEPS:
                log(metrics)
    found = scalars_of_tensorboard(tmp_path)
    assert found == {"reward": [(1, 0.125), (2, 0.25), (3, 0.375)], ACCURACY: [(1, 0.5), (2, 0.5), (3, 0.5)]}


def test_trackio_reads_what_was_logged_and_others_runs_stay(tmp_path, trackio_store):
    for place in ("a", "b", "a"):
        folder = tmp_path / place / "run"
        folder.mkdir(parents=True, exist_ok=True)
        with trackers_of("trackio", folder) as log:
            for metrics in STEPS:
                log(metrics)
    assert len(trackio_store.get_runs(PROJECT)) == 2  # that of the other folder, and one of this
    logs = trackio_store.get_logs(PROJECT, "run")
    assert [(row["step"], row["reward"]) for row in logs][-3:] == [(1, 0.125), (2, 0.25), (3, 0.375)]
    assert "kl" not in logs[0] and logs[0][ACCURACY] == 0.5


def test_wandb_keeps_what_was_logged_offline(tmp_path):
    for _ in range(2):
        with trackers_of("wandb", tmp_path) as log:
            for metrics in STEPS:
                log(metrics)
    rows = history_of_wandb(tmp_path)
    assert [(row["_step"], row["reward"]) for row in rows] == [(1, 0.125), (2, 0.25), (3, 0.375)]
    assert all(row[ACCURACY] == 0.5 and "kl" not in row for row in rows)


def test_a_run_that_goes_on_tracks_each_step_once(policy_dir, tmp_path):
    from grpo_edu.config import GRPOConfig

    def stopping(completions, **columns):
        calls.append(1)
        if len(calls) == 5:  # the evaluation before, and four steps
            signal.raise_signal(signal.SIGINT)
        return [float(len(text)) for text in completions]

    calls = []
    folder = tmp_path / "run"
    run_training(
        policy_dir,
        rewards=stopping,
        config=GRPOConfig(**SIZES),
        n=6,
        greedy=False,
        output=folder,
        progress=False,
        checkpoint_every=2,
        track="tensorboard",
    )
    assert [step for step, _ in scalars_of_tensorboard(folder)["reward"]] == [1, 2, 3]
    history = resume_training(folder, rewards=stopping, progress=False).history
    assert scalars_of_tensorboard(folder)["reward"] == [
        (step["step"], pytest.approx(step["reward"])) for step in history
    ]
    assert len(history) == 4


def test_all_trackers_beside_one_run_say_nothing_and_call_nobody(policy_dir, tmp_path, trackio_store, capfd):
    folder = tmp_path / "run"
    sizes = "--num-generations 4 --prompts-per-step 2 --max-completion-length 48 --n 6 --no-greedy --steps 2 --json"
    typed = ["train", "--model", str(policy_dir), "--rewards", "length", *sizes.split(), "--output", str(folder)]
    assert main([*typed, "--track", ",".join(TRACKERS)]) == 0
    (line,) = capfd.readouterr().out.splitlines()  # what trackers print is kept from the one line of --json
    assert json.loads(line)["steps"] == 2
    rewards = [pytest.approx(step["reward"]) for step in read_log(folder / "metrics.jsonl")]
    assert [value for _, value in scalars_of_tensorboard(folder)["reward"]] == rewards
    assert [row["reward"] for row in history_of_wandb(folder)] == rewards
    assert [row["reward"] for row in trackio_store.get_logs(PROJECT, "run")][-2:] == rewards


def test_a_tracker_that_is_unknown_or_missing_is_refused(policy_dir, tmp_path, monkeypatch, capsys):
    command = ["train", "--model", str(policy_dir), "--output", str(tmp_path / "run")]
    assert main([*command, "--track", "mlflow"]) == 2
    assert re.search("--track.*'mlflow'.*tensorboard, trackio, wandb", capsys.readouterr().err)
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    assert main([*command, "--track", "wandb"]) == 2
    assert re.search(r"--track.*wandb is not installed.*grpo-edu\[tracking\]", capsys.readouterr().err)
    assert not (tmp_path / "run").exists()
