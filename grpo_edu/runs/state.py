"""The state of a run between two steps, in one file, so that a run that was stopped or killed ends the same.

`state.pt` in a run's folder is what `torch.save` writes of tensors and plain values, and `torch.load` reads it with
`weights_only=True`, which runs no code of the file. It is written next to its place, forced to the disk and moved there
in one step, so it is whole or absent. What does not change in a run (frozen weights, the reference of a KL term) is not
stored: it comes from the model that the run started from, which a fingerprint recognizes.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import pickle
import random
import warnings
import zipfile
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
from grpo_edu.config import GRPOConfig, drop_retired
from grpo_edu.fast.optimizers import parameters_of
from grpo_edu.rollout import Rollout
from grpo_edu.runs.record import library_versions
from grpo_edu.trainer import TrainingState

if TYPE_CHECKING:
    from grpo_edu.problems.templates import Problem

FORMAT = 2  # 1: the folders of version 0.3.0 and before, which `read_old_checkpoint` reads


def save_state(path: str | Path, content: Mapping[str, Any]) -> None:
    """Write a state, completely or not at all: if writing fails, an earlier one is kept.

    content: tensors and plain values.

    Raises OSError if the disk is full or cannot be written.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    described = {"format": FORMAT, "versions": {**library_versions(), "threads": torch.get_num_threads()}, **content}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            torch.save(described, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except (OSError, RuntimeError) as error:  # torch says with a RuntimeError that it could not write
        reason = error if isinstance(error, OSError) else error.__context__ or error
        number = getattr(reason, "errno", None) or errno.EIO
        raise OSError(number, f"could not write the state of the run ({reason}); free some space", str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def load_state(path: str | Path) -> dict[str, Any]:
    """Read what `save_state` wrote, or a checkpoint folder of version 0.3.0 and before.

    Raises ValueError for a file that is cut short, damaged, or of a later version.
    """
    path = Path(path)
    if path.is_dir():
        return read_old_checkpoint(path)
    remedy = f"delete {path}, and the run starts again from its beginning"
    try:
        with zipfile.ZipFile(path) as archive:
            is_whole = archive.testzip() is None  # torch itself does not compare the checksums
        content = torch.load(path, map_location="cpu", weights_only=True) if is_whole else None
    except (OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile, pickle.UnpicklingError):
        content = None
    if not isinstance(content, dict) or "format" not in content:
        raise ValueError(f"`resume`: {path} is damaged or cut short; {remedy}.")
    if content["format"] != FORMAT:
        raise ValueError(
            f"`resume`: {path} has format {content['format']}, written by grpo_edu {content['versions']['grpo_edu']}; "
            f"this is grpo_edu {__version__}, which reads format {FORMAT}; use that version, or start the run again."
        )
    return content


def _sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, which Windows cannot do."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---- what a state holds of a training ----


def pack_training(model: nn.Module, state: TrainingState, random_states: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights that learn, and everything that a training carries from one step to the next.

    random_states: after the last complete step, from `read_random_states`.

    Raises FloatingPointError if a weight is not finite, because a run cannot continue from such weights.
    """
    weights = {name: weight.detach() for name, weight in model.named_parameters() if weight.requires_grad}
    for name, weight in weights.items():
        if not all(torch.isfinite(end) for end in weight.aminmax()):
            raise FloatingPointError(
                f"the weights are not finite after step {state.step} (first: {name}), so they were not saved; lower "
                "learning_rate, and continue from the last saved state"
            )
    optimizer = state.optimizer
    return {
        "weights": weights,
        "optimizer": [dict(optimizer.state.get(parameter, {})) for parameter in parameters_of(optimizer)],
        "learning_rates": [group["lr"] for group in optimizer.param_groups],
        "scheduler": state.scheduler.state_dict(),
        "ahead": [
            [pack_batch(batch), None if sampled is batch else pack_batch(sampled)] for batch, sampled in state.ahead
        ],
        "step": state.step,
        "num_tokens": state.num_tokens,
        "num_problems": list(state.num_problems),
        "memory_budget": state.micro_batches.budget,
        "random_states": dict(random_states),
    }


def restore_training(model: nn.Module, state: TrainingState, stored: Mapping[str, Any], path: str | Path) -> None:
    """Restore in a new model and a new state what `pack_training` returned; path: the file's path, for messages.

    Tensors keep their dtype, which `Optimizer.load_state_dict` would change.

    Raises ValueError, before anything is changed, if other weights learn here than those that were stored.
    """
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    shapes = {name: weight.shape for name, weight in weights.items()}
    if {name: weight.shape for name, weight in stored["weights"].items()} != shapes:
        raise ValueError(f"`resume`: the weights in {path} are not those that learn here; use the run's own model.")
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(stored["weights"][name])
    is_fused = state.optimizer.defaults.get("fused")
    for parameter, values in zip(parameters_of(state.optimizer), stored["optimizer"], strict=False):
        for key, value in values.items():
            if isinstance(value, Tensor):  # a fused AdamW counts its steps where the weights are, others on the CPU
                value = value.to("cpu" if not value.dim() and not is_fused else parameter.device)
            state.optimizer.state[parameter][key] = value
    for group, rate in zip(state.optimizer.param_groups, stored["learning_rates"], strict=True):
        group["lr"] = rate
    state.scheduler.load_state_dict(stored["scheduler"])
    device = state.sampler.model.device
    for batch, sampled in stored["ahead"]:
        first = unpack_batch(batch, device)
        state.ahead.append((first, first if sampled is None else unpack_batch(sampled, device)))
    state.step, state.num_tokens = stored["step"], stored["num_tokens"]
    state.num_problems = list(stored["num_problems"])
    state.micro_batches.budget = stored["memory_budget"]
    restore_random_states(state.generator, stored["random_states"])


def read_random_states(generator: torch.Generator) -> dict[str, Any]:
    """Return the states of the sampling and of all global random number generators."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "sampling": generator.get_state(),
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
    }


def restore_random_states(generator: torch.Generator, stored: Mapping[str, Any]) -> None:
    """Restore the states that `read_random_states` returned."""
    generator.set_state(stored["sampling"])
    torch.set_rng_state(stored["torch"])
    version, words, gauss = stored["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = stored["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))


def pack_batch(batch: Batch) -> dict[str, Any]:
    """Return the tensors and plain values of a batch and its rollout, by name."""
    content = {**vars(batch), **vars(batch.rollout)}
    kept = {name: value for name, value in content.items() if isinstance(value, Tensor | int | list)}
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in kept.items()}


def unpack_batch(content: Mapping[str, Any], device: torch.device | str = "cpu") -> Batch:
    """Return the batch that `pack_batch` took apart."""
    values: dict[str, Any] = {
        name: value.to(device) if isinstance(value, Tensor) else value for name, value in content.items()
    }
    names = [field.name for field in fields(Rollout) if field.name in values]
    return Batch(Rollout(**{name: values.pop(name) for name in names}), **values)


def save_failed_batch(folder: str | Path, batch: Batch, *, step: int, error: str) -> None:
    """Save the batch of a step that failed, with what went wrong; what an earlier failure left is replaced.

    Raises OSError if the disk is full or cannot be written.
    """
    save_state(Path(folder) / "batch.pt", {"batch": pack_batch(batch), "step": step, "error": error})


def load_failed_batch(folder: str | Path) -> tuple[Batch, int, str]:
    """Return the batch that `save_failed_batch` saved, the number of its step, and what went wrong.

    Raises FileNotFoundError if the folder holds none.
    """
    folder = Path(folder)
    if (folder / "batch.json").is_file():  # of version 0.3.0 and before
        from safetensors.torch import load_file

        stored = json.loads((folder / "batch.json").read_text(encoding="utf-8"))
        step, error = stored.pop("step"), stored.pop("error")
        return unpack_batch({**load_file(folder / "batch.safetensors"), **stored}), step, error
    if not (folder / "batch.pt").is_file():
        raise FileNotFoundError(f"folder: {folder} holds no batch.pt; name a run's folder `diagnosis`")
    content = load_state(folder / "batch.pt")
    return unpack_batch(content["batch"]), content["step"], content["error"]


# ---- whether a state belongs to a run ----


def fingerprint(model: nn.Module) -> str:
    """Return a hash of all weights and their names: equal for equal models only."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def data_fingerprint(problems: Sequence[Problem]) -> str:
    """Return a hash of problems in their order: equal for equal problems only."""
    return hashlib.sha256(json.dumps([problem.row() for problem in problems], default=str).encode()).hexdigest()


def check_same_model(stored: str, found: str, start: Path) -> None:
    """Raise ValueError if the model of a run that is resumed is not the one that `start` began with."""
    if stored != found:
        raise ValueError(f"`resume`: {start} was started from another model; give the model that it started from.")


def check_same_data(stored: Mapping[str, str] | None, found: Mapping[str, str], start: Path) -> None:
    """Raise ValueError if the problems of a run that is resumed are not those that `start` began with.

    stored: "train", "heldout", … → `data_fingerprint`; None in folders of early versions, which are not checked.
    """
    changed = [part for part in found if (stored or found)[part] != found[part]]
    if changed:
        raise ValueError(
            f"`resume`: the run in {start} was started with other {changed[0]} problems than `data` and `data_path` "
            "contain now; restore them, or start a new run."
        )


def reward_fingerprints(rewards: Sequence[object]) -> dict[str, str]:
    """Return FILE.py → a hash of the file, for the rewards that come from files."""
    files = {str(entry).rpartition(":")[0] for entry in rewards if isinstance(entry, str)}
    return {
        file: hashlib.sha256(Path(file).read_bytes()).hexdigest()
        for file in sorted(files)
        if file.endswith(".py") and Path(file).is_file()
    }


def check_same_rewards(stored: Mapping[str, str], rewards: Sequence[object]) -> None:
    """Raise ValueError if a file with rewards was edited since a state was written, with `reward_fingerprints`."""
    found = reward_fingerprints(rewards)
    changed = [file for file, digest in stored.items() if found.get(file) != digest]
    if changed:
        raise ValueError(
            f"`resume`: the reward file {changed[0]} was edited since the run began; restore it, or start a new run "
            "with the model of this one."
        )


def check_same_settings(stored: Mapping[str, Any], config: GRPOConfig, path: Path) -> None:
    """Raise ValueError if a state was written with other settings."""
    asked = json.loads(json.dumps(config.to_dict()))
    # settings that came later had their defaults
    written = {**asdict(GRPOConfig()), **json.loads(json.dumps(drop_retired(stored)))}
    changed = [name for name in sorted(asked.keys() | written.keys()) if written.get(name) != asked.get(name)]
    if changed:
        name = changed[0]
        raise ValueError(
            f"`resume`: {path} was written with {name} = {written.get(name)!r}, now it is {asked.get(name)!r}; "
            "continue with the same settings."
        )


def warn_of_other_versions(stored: Mapping[str, Any]) -> None:
    """Warn if a state was written by another version of a library, or with another number of threads."""
    ours = {**library_versions(), "threads": torch.get_num_threads()}
    for name, version in stored.items():
        if ours.get(name) != version:
            warnings.warn(
                f"the run was saved with {name} {version}, this is {ours.get(name)}: it continues, but may not end "
                "exactly as it would have",
                RuntimeWarning,
                stacklevel=3,
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


# ---- version 0.3.0 ----


def find_state(folder: Path) -> Path | None:
    """Return the state in a run's folder, or its latest checkpoint of version 0.3.0; None if there is neither."""
    if (folder / "state.pt").is_file():
        return folder / "state.pt"
    old = folder.glob("checkpoints/step-*")
    return max(old, key=lambda path: int(path.name.removeprefix("step-")), default=None)


def read_old_checkpoint(folder: Path) -> dict[str, Any]:
    """Read a checkpoint of version 0.3.0 and before (safetensors and JSON), in the form of `load_state`.

    Raises ValueError for one that is cut short or damaged.
    """
    from safetensors.torch import load_file

    try:
        index = json.loads((folder / "checkpoint.json").read_bytes())
        for name, wanted in index["files"].items():
            content = (folder / name).read_bytes()
            if hashlib.sha256(content).hexdigest() != wanted["sha256"]:
                raise ValueError(name)
        weights, tensors = load_file(folder / "weights.safetensors"), load_file(folder / "state.safetensors")
        before_file = folder.parent.parent / "before.json"
        before = json.loads(before_file.read_bytes()) if before_file.is_file() else {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"`resume`: {folder} is damaged or cut short ({error}); delete it, and the run starts again from its "
            "beginning."
        ) from None
    numbers = index["state"]
    parts: dict[str, dict[str, Any]] = {"optimizer": {}, "random": {}, "ahead": {}}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition(".")
        parts[kind][rest] = tensor
    optimizer: dict[int, dict[str, Any]] = {}
    for name, value in {**parts["optimizer"], **numbers["optimizer"]}.items():
        number, _, key = name.partition(".")
        optimizer.setdefault(int(number), {})[key] = value
    ahead = []
    for index, pair in enumerate(numbers.get("ahead", [])):
        batches = []
        for part, others in enumerate(pair):
            start = f"{index}.{part}."
            own = {name.removeprefix(start): value for name, value in parts["ahead"].items() if name.startswith(start)}
            batches.append({**others, **own})
        ahead.append([batches[0], batches[1] if len(batches) > 1 else None])
    random_states = {
        "sampling": parts["random"]["sampling"],
        "torch": parts["random"]["torch"],
        "python": numbers["python_random"],
        "numpy": numbers["numpy_random"],
    }
    prompts = index["config"].get("prompts_per_step", GRPOConfig().prompts_per_step)
    training = {
        "weights": weights,
        "optimizer": [optimizer.get(number, {}) for number in range(max(optimizer, default=-1) + 1)],
        "learning_rates": numbers["learning_rates"],
        "scheduler": numbers["scheduler"],
        "ahead": ahead,
        "step": numbers["step"],
        "num_tokens": numbers["num_tokens"],
        "num_problems": numbers.get("num_problems", [prompts] * numbers["step"]),
        "memory_budget": math.inf if numbers["room"] is None else numbers["room"],
        "random_states": random_states,
    }
    history = [{key: math.nan if value is None else value for key, value in step.items()} for step in index["history"]]
    return {
        "format": FORMAT,
        "versions": index["versions"],
        "fingerprint": index["fingerprint"],
        "config": index["config"],
        "data": before.get("data"),
        "before": before.get("sampled"),
        "greedy_before": before.get("greedy"),
        "history": history,
        "training": training,
    }
