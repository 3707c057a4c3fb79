"""Runs that a dashboard keeps on disk, so that a page that is loaded again can show them or continue with them."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_edu.config import GRPOConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from grpo_edu.dashboards.training_run import TrainingRun

_FOLDER, _FILE, _ASKED = ".kept", "run.json", "asked.json"
_MOST = 3  # runs in a folder; older ones are removed
_LARGEST = 300e6  # bytes of the weights; a larger model is kept with Save only


def small_enough(model: PreTrainedModel) -> bool:
    """Return True if the model is small enough to save automatically."""
    return sum(weight.nbytes for weight in model.parameters()) <= _LARGEST


def keep(run: TrainingRun, model: PreTrainedModel, names: Mapping[str, Callable], parent: Path) -> None:
    """Write a run that is paused or has ended to `parent/.kept`, if its model is not too large for that.

    Args:
        run: with at least one step. model: with the run's weights. names: name → reward function.
        parent: the folder of the runs.

    Raises OSError if the disk cannot be written to.
    """
    from grpo_edu.runs.state import pack_training, read_random_states, save_state

    if run.state is None or not small_enough(model):
        return
    place = parent / _FOLDER / run.name
    training = pack_training(model, run.state, read_random_states(run.state.generator))
    run.checkpoint = place / "state.pt"
    save_state(run.checkpoint, {"config": run.config.to_dict(), "training": training})
    content = {
        "model": run.model_name,
        "data": run.data,
        "rewards": [name for name, function in names.items() if function in run.functions],
        "config": run.config.to_dict(),
        "heldout": len(run.heldout),
        "every": run.every,
        "evaluations": {str(step): vars(check) for step, check in run.checks.items()},
        "before": run.before and vars(run.before),
        "after": run.after and vars(run.after),
        "history": run.history,
        "samples": run.samples,
        "seconds": run.training_seconds,
        "label": f"{run.position()} · {run.model_name} · {', '.join(run.data)}",
    }
    _put(parent, place / _FILE, content)


def _put(parent: Path, file: Path, content: Mapping[str, Any]) -> None:
    """Write the file that says that a folder is complete, and remove the oldest folders of its kind."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content), encoding="utf-8")
    temporary.replace(file)
    for older in _places(parent, file.name)[_MOST:]:
        shutil.rmtree(older, ignore_errors=True)


def keep_asked(place: Path, content: Mapping[str, Any], weights: Mapping[str, Any]) -> None:
    """Write what *Ask the model* has reached: its answers, in plain values, and the tensors of its model.

    Args:
        place: a folder in `parent/.kept`, the same one for all steps of a training run.
        content: with "base" and "data", the model and the problems, and "label".

    Raises OSError if the disk cannot be written to.
    """
    from safetensors.torch import save_file

    place.mkdir(parents=True, exist_ok=True)
    name = f"weights-{content['trained']}.safetensors"
    save_file({key: weight.clone().contiguous() for key, weight in weights.items()}, place / f".{name}")
    (place / f".{name}").replace(place / name)
    _put(place.parent.parent, place / _ASKED, {**content, "weights": name})
    for older in set(place.glob("weights-*")) - {place / name}:
        older.unlink()


def kept_asked(parent: Path, base: str, data: Sequence[str]) -> list[tuple[str, str]]:
    """Label and folder of what `keep_asked` wrote for this model and these problems, the newest first."""
    found = []
    for place in _places(parent, _ASKED):
        stored = _read(place, _ASKED)
        if (stored["base"], stored["data"]) == (base, list(data)):
            age = time.time() - (place / _ASKED).stat().st_mtime
            found.append((f"{stored['label']} · kept {_ago(age)}", str(place)))
    return found


def open_asked(place: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what `keep_asked` wrote: plain values, and tensors. Raises OSError if it is gone."""
    from safetensors.torch import load_file

    stored = _read(place, _ASKED)
    return stored, load_file(place / stored["weights"])


def kept_runs(parent: Path) -> list[tuple[str, Path]]:
    """Label and folder of each run in `parent/.kept`, the newest first."""
    ages = [(place, time.time() - (place / _FILE).stat().st_mtime) for place in _places(parent)]
    return [(f"{_read(place)['label']} · kept {_ago(age)}", place) for place, age in ages]


def _ago(seconds: float) -> str:
    """Return how long ago something was.

    >>> _ago(5), _ago(600), _ago(7200), _ago(200_000)
    ('just now', '10 min ago', '2 h ago', '2 days ago')
    """
    minutes = int(max(seconds, 0) // 60)
    if minutes < 120:
        return f"{minutes} min ago" if minutes else "just now"
    return f"{minutes // 60} h ago" if minutes < 48 * 60 else f"{minutes // 1440} days ago"


def open_kept(place: Path, names: Mapping[str, Callable]) -> TrainingRun:
    """Return the run of a folder from `kept_runs`, with everything but its weights, which `TrainingRun.prepare` loads.

    Raises:
        KeyError: a reward that `names` does not have.
        ValueError, OSError: a folder that is incomplete.
    """
    from grpo_edu.dashboards.training_run import TrainingRun
    from grpo_edu.evaluation import Evaluation
    from grpo_edu.runs.state import find_state

    stored = _read(place)
    functions = [names[name] for name in stored["rewards"]]
    config = GRPOConfig(**stored["config"])
    run = TrainingRun(
        stored["model"], stored["data"], functions, config, heldout=stored["heldout"], every=stored["every"]
    )
    run.name, run.checkpoint = place.name, find_state(place)
    if run.checkpoint is None:
        raise ValueError(f"{place} holds no weights; start a new run")
    run.history = stored["history"]
    run.checks = {int(step): Evaluation(**check) for step, check in stored["evaluations"].items()}
    run.before = stored["before"] and Evaluation(**stored["before"])
    run.after = stored["after"] and Evaluation(**stored["after"])
    prompt, rows = stored["samples"]
    run.samples = prompt, [(text, value) for text, value in rows]
    run.training_seconds = stored["seconds"]
    return run


def new_place(parent: Path) -> Path:
    """Return a folder for `keep_asked` that no other training run has."""
    return parent / _FOLDER / f"asked-{time.time_ns()}-{os.getpid()}"


def _read(place: Path, file: str = _FILE) -> dict[str, Any]:
    return json.loads((place / file).read_text(encoding="utf-8"))


def _places(parent: Path, file: str = _FILE) -> list[Path]:
    files = sorted((parent / _FOLDER).glob(f"*/{file}"), key=lambda file: file.stat().st_mtime, reverse=True)
    return [file.parent for file in files]
