"""Checkpoints of a training: all that it holds between two steps, so that a run which was killed ends the same.

checkpoints/step-20/weights.safetensors     the parameters that learn
checkpoints/step-20/state.safetensors       optimizer states, random states, a synchronized reference policy, and the
                                            rollouts that are sampled but not learned from (rollout_lag)
checkpoints/step-20/checkpoint.json         numbers, metrics so far, settings, versions, size and hash of the two files

A checkpoint is written beside its place, forced to the disk and moved there in one step: it is whole or absent. The
older one goes when the newer is there. Nothing is pickled, so opening a checkpoint runs no code. What does not change
in a training (frozen weights, the reference of a KL term unless it is synchronized) is not stored: it comes from the
model that the run started from, which a fingerprint recognizes.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import random
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from grpo_edu import __version__
from grpo_edu.batch import Batch
from grpo_edu.config import GRPOConfig
from grpo_edu.fast.optimizers import parameters_of
from grpo_edu.rollout import Rollout
from grpo_edu.runs.record import library_versions
from grpo_edu.trainer import TrainingState

if TYPE_CHECKING:
    from grpo_edu.problems.templates import Problem


def save_failed_batch(folder: str | Path, batch: Batch, *, step: int, error: str) -> None:
    """Keep the batch of a step that failed, with what went wrong; what an earlier failure left is replaced.

    Raises OSError where the disk is full or cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    folder = Path(folder)
    tensors, others = _pack_batch(batch)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        save_file(tensors, folder / "batch.safetensors")
    except SafetensorError as failure:
        raise OSError(f"{folder}: the batch could not be kept ({failure})") from failure
    others |= {"step": step, "error": error}
    (folder / "batch.json").write_text(json.dumps(others, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def load_failed_batch(folder: str | Path) -> tuple[Batch, int, str]:
    """The batch that `save_failed_batch` kept, the number of its step, and what went wrong.

    Raises FileNotFoundError where the folder holds none.
    """
    from safetensors.torch import load_file

    folder = Path(folder)
    if not (folder / "batch.json").is_file():
        raise FileNotFoundError(f"folder: {folder} holds no batch.json; name a run's folder `diagnosis`")
    content = json.loads((folder / "batch.json").read_text(encoding="utf-8"))
    step, error = content.pop("step"), content.pop("error")
    return _unpack_batch(load_file(folder / "batch.safetensors"), content), step, error


def _pack_batch(batch: Batch) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a batch and its rollout, and their plain values, by name."""
    content = {**vars(batch), **vars(batch.rollout)}
    return (
        {name: value.clone() for name, value in content.items() if isinstance(value, Tensor)},
        {name: value for name, value in content.items() if isinstance(value, int | list)},
    )


def _unpack_batch(tensors: Mapping[str, Tensor], others: Mapping[str, Any]) -> Batch:
    """The batch that `_pack_batch` took apart."""
    content = {**tensors, **others}
    rollout = Rollout(**{field.name: content.pop(field.name) for field in fields(Rollout) if field.name in content})
    return Batch(rollout, **content)


FORMAT = 1
_WEIGHTS, _STATE, _INDEX = "weights.safetensors", "state.safetensors", "checkpoint.json"
_NAME = re.compile(r"step-([0-9]+)")


def save_checkpoint(
    folder: str | Path,
    model: nn.Module,
    state: TrainingState,
    config: GRPOConfig,
    history: list[dict[str, float]],
    *,
    fingerprint: str = "",
) -> Path:
    """Write `folder/step-N` for the N steps that are done, then remove older checkpoints; returns its path.

    Args:
        folder: the run's folder of checkpoints.
        model, state: as they are between two steps.
        config: the run's settings. history: the metrics of all steps so far.
        fingerprint: of the weights that the run started from.

    Raises:
        FloatingPointError: weights that are not finite; no checkpoint is written, and older ones stay.
        OSError: the disk is full or cannot be written; older checkpoints stay.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    folder = Path(folder)
    weights = {name: weight.detach().contiguous() for name, weight in model.named_parameters() if weight.requires_grad}
    _check_weights(weights, state.step)
    tensors, numbers = pack_state(state)
    staging, place = folder / f".step-{state.step}.{os.getpid()}.tmp", folder / f"step-{state.step}"
    try:
        for left in folder.glob(".step-*.tmp"):  # what a kill left half written
            shutil.rmtree(left, ignore_errors=True)
        staging.mkdir(parents=True)
        save_file(weights, staging / _WEIGHTS)
        save_file(tensors, staging / _STATE)
        index = {
            "format": FORMAT,
            "step": state.step,
            "versions": {**library_versions(), "threads": torch.get_num_threads()},
            "fingerprint": fingerprint,
            "config": config.to_dict(),
            "state": numbers,
            "history": [
                {key: value if math.isfinite(value) else None for key, value in row.items()} for row in history
            ],
            "files": {name: measure(staging / name) for name in (_WEIGHTS, _STATE)},
        }
        (staging / _INDEX).write_text(json.dumps(index, allow_nan=False) + "\n", encoding="utf-8")
        for file in (*staging.iterdir(), staging):
            _to_disk(file)
        shutil.rmtree(place, ignore_errors=True)
        staging.rename(place)
        _to_disk(folder)
    except (OSError, SafetensorError) as error:
        raise OSError(
            getattr(error, "errno", None) or errno.EIO, f"could not write a checkpoint ({error}); make room", str(place)
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    for older in _checkpoints(folder):
        if older != place:
            shutil.rmtree(older)
    return place


def latest_checkpoint(folder: str | Path) -> Path | None:
    """The checkpoint of the latest step in a run's folder of checkpoints; None where there is none."""
    found = _checkpoints(Path(folder))
    return found[-1] if found else None


def load_checkpoint(
    place: str | Path, model: nn.Module, state: TrainingState, config: GRPOConfig, *, fingerprint: str = ""
) -> list[dict[str, float]]:
    """Restore a training run from a checkpoint; returns the metrics of all steps until then.

    Args:
        place: one checkpoint, from `latest_checkpoint`.
        model: with the weights that the run started from. state: from `start_training`; both are changed in place.
        config: the run's settings. fingerprint: of the model as it is given.

    Raises:
        ValueError: a checkpoint that is cut short or damaged, of another format, of another model or other settings;
            it is named, and nothing has been changed then.
    """
    from safetensors.torch import load_file

    place = Path(place)
    index = _read_index(place)
    _check_index(place, index, config, fingerprint)
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    stored = load_file(place / _WEIGHTS)
    if {name: weight.shape for name, weight in stored.items()} != {name: w.shape for name, w in weights.items()}:
        raise ValueError(f"checkpoint: the weights in {place} are not those that learn here; use the run's own model")
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(stored[name])
    unpack_state(state, load_file(place / _STATE), index["state"])
    return [{key: math.nan if value is None else value for key, value in step.items()} for step in index["history"]]


def pack_state(state: TrainingState) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state of a training run as named tensors and plain values."""
    tensors, drawn = random_states(state.generator)
    numbers: dict[str, Any] = {}
    for index, parameter in enumerate(parameters_of(state.optimizer)):
        for key, value in state.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{index}.{key}"] = value.detach().contiguous()
            else:
                numbers[f"{index}.{key}"] = value
    if state.reference is not None and state.sampler.config.sync_ref_model:
        tensors |= {f"reference.{name}": weight for name, weight in state.reference.named_parameters()}
    ahead: list[list[dict[str, Any]]] = []
    for index, (batch, sampled) in enumerate(state.ahead):
        ahead.append([])
        for part, one in enumerate([batch] if sampled is batch else [batch, sampled]):
            packed, others = _pack_batch(one)
            tensors |= {f"ahead.{index}.{part}.{name}": tensor for name, tensor in packed.items()}
            ahead[-1].append(others)
    return tensors, {
        "ahead": ahead,
        "step": state.step,
        "num_tokens": state.num_tokens,
        "num_problems": state.num_problems,
        "room": state.micro_batches.budget if math.isfinite(state.micro_batches.budget) else None,
        "optimizer": numbers,
        "learning_rates": [group["lr"] for group in state.optimizer.param_groups],
        "scheduler": state.scheduler.state_dict(),
        **drawn,
    }


def unpack_state(state: TrainingState, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
    """Restore the stored values in a new state.

    Tensors keep their dtype, which `Optimizer.load_state_dict` would change.
    """
    parameters = parameters_of(state.optimizer)
    plain = {f"optimizer.{key}": value for key, value in numbers["optimizer"].items()}
    for name, value in {**tensors, **plain}.items():
        kind, _, rest = name.partition(".")
        if kind == "optimizer":
            index, _, key = rest.partition(".")
            parameter = parameters[int(index)]
            if isinstance(value, Tensor):  # the count of steps is with the weights in a fused AdamW, else on the CPU
                on_cpu = not value.dim() and not state.optimizer.defaults.get("fused")
                value = value.clone().to("cpu" if on_cpu else parameter.device)
            state.optimizer.state[parameter][key] = value
        elif kind == "reference" and state.reference is not None:
            state.reference.get_parameter(rest).data.copy_(value)
    for group, rate in zip(state.optimizer.param_groups, numbers["learning_rates"], strict=True):
        group["lr"] = rate
    state.scheduler.load_state_dict(numbers["scheduler"])
    state.step, state.num_tokens = numbers["step"], numbers["num_tokens"]
    device = state.sampler.model.device
    for place, parts in enumerate(numbers.get("ahead", [])):  # absent in checkpoints of earlier versions
        batches = []
        for part, others in enumerate(parts):
            start = f"ahead.{place}.{part}."
            own = {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
            batches.append(_unpack_batch({name: tensor.to(device) for name, tensor in own.items()}, others))
        state.ahead.append((batches[0], batches[-1]))
    usual = [state.sampler.config.prompts_per_step] * state.step  # in checkpoints of earlier versions
    state.num_problems = numbers.get("num_problems", usual)
    state.micro_batches.budget = math.inf if numbers["room"] is None else numbers["room"]
    set_random_states(state.generator, tensors, numbers)


def random_states(generator: torch.Generator) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state of the sampling and of all global random number generators, as tensors and plain values."""
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {"random.sampling": generator.get_state(), "random.torch": torch.get_rng_state()}, {
        "python_random": random.getstate(),
        "numpy_random": [kind, np.asarray(keys).tolist(), position, has_gauss, cached],
    }


def set_random_states(generator: torch.Generator, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
    """Restore the states that `random_states` returned."""
    generator.set_state(tensors["random.sampling"])
    torch.set_rng_state(tensors["random.torch"])
    version, words, gauss = numbers["python_random"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = numbers["numpy_random"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))


def check_fingerprint(stored: str, found: str, start: Path) -> None:
    """Raise ValueError where the model of a run that is resumed is not the one that `start` began with."""
    if stored != found:
        raise ValueError(f"`resume`: {start} was started from another model; give the model that it started from.")


def fingerprint(model: nn.Module) -> str:
    """A hash of all weights and their names: equal for equal models only."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def data_fingerprint(problems: Sequence[Problem]) -> str:
    """A hash of problems in their order: equal for equal problems only."""
    return hashlib.sha256(json.dumps([problem.row() for problem in problems], default=str).encode()).hexdigest()


def check_same_data(stored: Mapping[str, str] | None, found: Mapping[str, str], start: Path) -> None:
    """Raise ValueError where the problems of a run that is resumed are not those that `start` began with.

    stored: "train", "heldout", … → `data_fingerprint`; None in folders of earlier versions, which are not checked.
    """
    changed = [part for part in found if (stored or found)[part] != found[part]]
    if changed:
        raise ValueError(
            f"`resume`: the run in {start} was started with other {changed[0]} problems than `data` and `data_path` "
            "contain now; restore them, or start a new run."
        )


@contextmanager
def same_threads(count: int) -> Iterator[None]:
    """A context in which torch computes with this number of threads, because another number rounds sums differently."""
    usual = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(usual)


def _read_index(place: Path) -> dict[str, Any]:
    """Read checkpoint.json, after checking that the two files have the sizes and hashes in it."""
    again = f"delete {place}; the run then goes on from its start, or from an older checkpoint where there is one"
    try:
        index = json.loads((place / _INDEX).read_bytes())
        fine = isinstance(index, dict) and "format" in index
    except (OSError, ValueError):
        fine = False
    if not fine:
        raise ValueError(f"checkpoint: {place / _INDEX} is missing or cut short; {again}")
    if index["format"] != FORMAT:
        written = index.get("versions", {}).get("grpo_edu", "an unknown version")
        raise ValueError(
            f"checkpoint: {place} has format {index['format']}, written by grpo_edu {written}; this is grpo_edu "
            f"{__version__}, which reads format {FORMAT}; go on with that version, or start the run again"
        )
    check_files(place, index["files"], "checkpoint", again)
    return index


def check_files(place: Path, files: Mapping[str, Any], what: str, again: str) -> None:
    """Raise ValueError if a file in a folder has changed since it was written.

    files: names → what `measure` returned. what, again: the beginning of the message, and what to do.
    """
    for name, wanted in files.items():
        size = (place / name).stat().st_size if (place / name).is_file() else 0
        if size < wanted["bytes"]:
            raise ValueError(f"{what}: {place / name} is cut short: {size} of {wanted['bytes']} bytes; {again}")
        if measure(place / name) != wanted:
            raise ValueError(f"{what}: {place / name} is damaged or replaced, its hash is another; {again}")


def _check_index(place: Path, index: dict[str, Any], config: GRPOConfig, fingerprint: str) -> None:
    check_fingerprint(index["fingerprint"], fingerprint, place)
    asked = json.loads(json.dumps(config.to_dict()))
    stored = {**asdict(GRPOConfig()), **index["config"]}  # settings that came later had their defaults
    if stored != asked:
        names = sorted(asked.keys() | stored.keys())
        changed = next(name for name in names if stored.get(name) != asked.get(name))
        raise ValueError(
            f"checkpoint: {place} was written with {changed} = {stored.get(changed)!r}, now it is "
            f"{asked.get(changed)!r}; go on with the same settings"
        )
    ours = {**library_versions(), "threads": torch.get_num_threads()}
    for name, version in index["versions"].items():
        if ours.get(name) != version:
            warnings.warn(
                f"the checkpoint was written with {name} {version}, this is {ours.get(name)}: the run goes on, but may "
                "not end exactly as it would have",
                RuntimeWarning,
                stacklevel=3,
            )


def _check_weights(weights: dict[str, Tensor], step: int) -> None:
    """Raise an error if a weight is not finite, because a run cannot continue from such weights."""
    for name, weight in weights.items():
        if not all(torch.isfinite(end) for end in weight.aminmax()):
            raise FloatingPointError(
                f"the weights are not finite after step {step} (first: {name}), so they were not kept as a checkpoint; "
                "lower learning_rate, and go on from the last checkpoint"
            )


def _checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the earliest step first."""
    named = [(_NAME.fullmatch(path.name), path) for path in folder.glob("step-*") if path.is_dir()]
    return [path for _, path in sorted((int(name[1]), path) for name, path in named if name)]


def measure(file: Path) -> dict[str, Any]:
    """The size of a file and a hash of its content, for `check_files`."""
    with open(file, "rb") as stream:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


def _to_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk. Windows cannot do this for a folder."""
    if path.is_dir() and os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
