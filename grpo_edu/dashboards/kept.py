"""Runs that a dashboard keeps on disk, so that a page that is loaded again can show them or continue with them."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_edu.dashboards.training_run import TrainingRun, limit_reward
from grpo_edu.evaluation import Evaluation
from grpo_edu.problems.hub import read_run_config
from grpo_edu.rewards import RewardFunction, reward_name
from grpo_edu.runs.folder import RunFolder, is_locked, size_on_disk
from grpo_edu.runs.record import RunMetadata, model_label, read_run_result
from grpo_edu.runs.state import load_state, save_state

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FOLDER, _FILE, _ASKED, _STATE = ".kept", "run.json", "asked.json", "state.pt"
_MAX_RUNS, _MAX_BYTES = 3, 2e9  # in a folder; older runs are removed
_LARGEST = 300e6  # bytes of the weights; the state of a larger model is not kept on the way


def small_enough(model: PreTrainedModel) -> bool:
    """Return True if the model is small enough to save automatically."""
    return sum(weight.nbytes for weight in model.parameters()) <= _LARGEST


def keep(run: TrainingRun) -> None:
    """Write what a page shows of a run into its folder, and its state unless its model is too large for that.

    Raises OSError if the disk cannot be written to, and FloatingPointError for weights that are not finite.
    """
    if run.result is None and run.state is not None and small_enough(run.policy):
        run.save_state()
    content = {
        "every": run.every,
        "checks": run.checks,
        "samples": run.samples,
        "history": run.history,
        "before": run.before and vars(run.before),
        "after": run.after and vars(run.after),
        "label": f"{run.position()} · {run.run_config.model} · {', '.join(run.run_config.data)}",
    }
    _put(run.folder.path / _FILE, content)


def save_copy(run: TrainingRun, parent: Path) -> Path:
    """Copy the folder of a run to `parent`, without what only a page needs; returns the copy.

    Raises what `Run.events` raises, and OSError if the disk is full.
    """
    if not run.folder.model.is_dir():  # Python ended before the run did
        with closing(run.events()) as events:
            next(events)  # the state is loaded, and closing saves its model
    name = f"{model_label(run.run_config.model)}-dashboard-seed{run.config.seed}"
    folder = RunFolder.unused(name, parent=parent)
    folder.check_disk_space(size_on_disk(run.folder.path))
    shutil.copytree(run.folder.path, folder.path, ignore=shutil.ignore_patterns(".*", _FILE, _STATE))
    folder.write_json("result.json", {**(read_run_result(folder.path) or {}), "output": str(folder.path)})
    return folder.path


def kept_runs(parent: Path) -> list[tuple[str, Path]]:
    """Label and folder of each run in `parent/.kept` that can be shown again, the newest first."""
    places = [place for place in _places(parent, _FILE) if read_run_config(place) is not None]
    whole = [place for place in places if (place / _STATE).is_file() or (place / "model").is_dir()]
    return [(_label(place, _FILE), place) for place in whole]


def open_kept(place: Path, rewards: Iterable[RewardFunction]) -> TrainingRun:
    """Return the run of a folder from `kept_runs`, whose `events` continue it; if another page has it, a copy of it.

    rewards: functions among which those of the run are.

    Raises:
        KeyError: a reward that is not among them.
        ValueError, OSError: a folder that is incomplete.
    """
    if is_locked(place):
        copy = new_place(place.parent.parent)
        shutil.copytree(place, copy, ignore=shutil.ignore_patterns(".*"))
        place = copy
    stored, config = _read(place, _FILE), RunFolder(place).read_config("config", "training run")
    named = {reward_name(function): limit_reward(function) for function in rewards}
    functions = [named[name] for name in config["reward_funcs"]]
    run = TrainingRun(RunFolder(place), RunMetadata.from_dict(config, functions), resumes=True)
    run.every = stored["every"]
    run.checks = {int(step): accuracy for step, accuracy in stored["checks"].items()}
    question, rows = stored["samples"]
    run.samples = question, [(text, reward) for text, reward in rows]
    run.history = stored["history"]
    run.before = stored["before"] and Evaluation(**stored["before"])
    run.after = stored["after"] and Evaluation(**stored["after"])
    return run


def keep_asked(place: Path, content: Mapping[str, Any]) -> None:
    """Write what *Ask the model* has reached: its answers and its model, in plain values and tensors.

    Args:
        place: a folder in `parent/.kept`, the same one for all steps of a training run.
        content: with "base" and "data", the model and the problems, and "label".

    Raises OSError if the disk cannot be written to.
    """
    save_state(place / _STATE, content)
    _put(place / _ASKED, {name: content[name] for name in ("base", "data", "label")})


def kept_asked(parent: Path, base: str, data: Sequence[str]) -> list[tuple[str, str]]:
    """Label and folder of what `keep_asked` wrote for this model and these problems, the newest first."""
    found = []
    for place in _places(parent, _ASKED):
        stored = _read(place, _ASKED)
        if (stored["base"], stored["data"]) == (base, list(data)) and (place / _STATE).is_file():
            found.append((_label(place, _ASKED), str(place)))
    return found


def open_asked(place: Path) -> dict[str, Any]:
    """Return what `keep_asked` wrote; raises ValueError if it is gone or damaged."""
    return load_state(place / _STATE)


def new_place(parent: Path) -> Path:
    """Return a folder in `parent/.kept` that no other run has."""
    return parent / _FOLDER / f"{time.time_ns()}-{os.getpid()}"


def _put(file: Path, content: Mapping[str, Any]) -> None:
    """Write the file that says that a folder is complete, and remove the oldest folders of its kind."""
    RunFolder(file.parent).write_text(file.name, json.dumps(content))
    size = 0
    for number, place in enumerate(_places(file.parents[2], file.name)):
        size += size_on_disk(place)
        if number and (number >= _MAX_RUNS or size > _MAX_BYTES) and not is_locked(place):
            shutil.rmtree(place, ignore_errors=True)


def _label(place: Path, file: str) -> str:
    """Return what a kept run is, and how long ago it was kept."""
    return f"{_read(place, file)['label']} · kept {_ago(time.time() - (place / file).stat().st_mtime)}"


def _ago(seconds: float) -> str:
    """Return how long ago something was.

    >>> _ago(5), _ago(600), _ago(7200), _ago(200_000)
    ('just now', '10 min ago', '2 h ago', '2 days ago')
    """
    minutes = int(max(seconds, 0) // 60)
    if minutes < 120:
        return f"{minutes} min ago" if minutes else "just now"
    return f"{minutes // 60} h ago" if minutes < 48 * 60 else f"{minutes // 1440} days ago"


def _read(place: Path, file: str) -> dict[str, Any]:
    return json.loads((place / file).read_text(encoding="utf-8"))


def _places(parent: Path, file: str) -> list[Path]:
    files = sorted((parent / _FOLDER).glob(f"*/{file}"), key=lambda file: file.stat().st_mtime, reverse=True)
    return [file.parent for file in files]
