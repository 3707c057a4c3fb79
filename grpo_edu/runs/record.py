"""A run as its folder describes it: `RunMetadata` in config.json, and whether it has ended."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_edu import __version__
from grpo_edu.problems.hub import GGUF_SUFFIX, model_source, read_run_config
from grpo_edu.problems.templates import LEVELS
from grpo_edu.rewards import REWARDS
from grpo_edu.runs.folder import RunFolder
from grpo_edu.runs.loading import Rewards, is_user_dataset, short_reward_name
from grpo_edu.runs.options import RunConfig, use_current_names, with_absolute_paths


def library_versions() -> dict[str, str]:
    """Versions on which the numbers of a run depend."""
    import torch
    import transformers

    return {
        "grpo_edu": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
    }


@dataclass(frozen=True)
class RunMetadata:
    """A run as its config.json stores it: the options, and what the run was started on.

    run_config: the options. source: what the model is loaded from: a name, or an absolute path.
    command: what was typed, empty for a run that was started in Python. versions: of Python and the libraries.
    threads: of PyTorch; with another number, sums would be rounded differently.
    """

    run_config: RunConfig
    source: str
    command: str
    versions: dict[str, str]
    threads: int

    @classmethod
    def start(cls, run_config: RunConfig, command: str = "") -> RunMetadata:
        """Describe a run that starts now, in this process and folder."""
        import torch

        run_config = with_absolute_paths(run_config)
        source = resolve_model_source(run_config.model)
        return cls(run_config, source, command, library_versions(), torch.get_num_threads())

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for a JSON file."""
        asked = self.run_config.to_dict()
        return {**self.versions, "threads": self.threads, "command": self.command, "source": self.source, **asked}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], reward_funcs: Rewards | None = None) -> RunMetadata:
        """Read what `to_dict` returned; `reward_funcs` as in `RunConfig.from_dict`."""
        versions = {name: content[name] for name in ("grpo_edu", "python", "torch", "transformers") if name in content}
        run_config = RunConfig.from_dict(content, reward_funcs)
        source = content.get("source", run_config.model)
        return cls(run_config, source, content.get("command", ""), versions, content.get("threads", 1))


def read_resumable(output: str | Path, reward_funcs: Rewards | None = None) -> RunMetadata:
    """Read the record of a run that can be resumed; `reward_funcs` as in `RunConfig.from_dict`.

    Raises ValueError: the folder holds no run, a run without checkpoints, or one that is finished.
    """
    folder = RunFolder(output).path
    record = RunMetadata.from_dict(RunFolder(output).read_config("config", "training run"), reward_funcs)
    if record.run_config.backend == "trl":
        raise ValueError(
            f"`resume`: the run in {folder} was trained by TRL, as the job of a cluster; submit that job again."
        )
    result = read_run_result(folder)
    if result is not None and not result["interrupted"] and not result["failure"]:
        raise ValueError(
            f"`resume`: the run in {folder} is finished; to train its model further, start a run with `model` {folder}."
        )
    if not record.run_config.checkpoint_every and not RunFolder(output).resumable:
        raise ValueError(
            f"`resume`: the run in {folder} keeps no checkpoints; start it again with `checkpoint_every` set."
        )
    return record


def read_run_result(folder: Path) -> dict[str, Any] | None:
    """Read result.json; None if the run has not ended. Raises ValueError if the file is damaged."""
    file = folder / "result.json"
    try:
        result = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    except ValueError:
        result = []
    if result is not None and (not isinstance(result, dict) or "accuracy_after" not in result):
        raise ValueError(f"{file} is damaged; delete it, and the run counts as one that was not evaluated.")
    return result


def resolve_model_source(model: str | Path) -> str:
    """Return what to load for a model's name; a path is made absolute, so that it holds in every working folder."""
    source = model_source(model)
    if not Path(source).expanduser().exists():
        return str(source)
    from grpo_edu.models import SMOLLM2, list_models

    return str(source) if source in (*list_models(), SMOLLM2) else str(Path(source).expanduser().absolute())


def model_label(model: str) -> str:
    """Return a short name of a model, for the folder of a run that starts from it.

    >>> model_label("runs/first/model"), model_label("Qwen/Qwen2-0.5B")
    ('first', 'Qwen2-0.5B')
    """
    path = Path(model)
    return (path.parent.name if path.name == "model" else path.name.removesuffix(GGUF_SUFFIX)) or "model"


def default_folder(run_config: RunConfig, *, overwrite: bool = False) -> RunFolder:
    """Return `runs/tiny-levels-seed0` or the like, with a number where that exists and is not to be replaced."""
    names = [Path(name).stem if is_user_dataset(name) else name for name in run_config.data]
    sets = "levels" if run_config.data == LEVELS else "-".join(names).replace(":", "-")
    name = f"{model_label(run_config.model)}-{sets}-seed{run_config.config.seed}"
    return RunFolder(Path("runs") / name) if overwrite else RunFolder.unused(name)


def evaluation_settings(model: str | Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `report_evaluation`: those that are given, and of the run that `model` names the others.

    A run is evaluated with its own problems and rewards, unless `given` names other `data`. Rewards that were functions
    in Python cannot be loaded again, and are left out.
    """
    stored = read_run_config(Path(model).expanduser()) or {}
    if "data" in given or not {"data", "config"} <= stored.keys():
        return {"data": ",".join(LEVELS), "seed": 0, **given}
    settings = {**use_current_names(stored), **stored["config"]}
    names = ("data", "data_path", "heldout_file", "columns", "seed", "max_completion_length")
    own = {name: settings[name] for name in names if settings.get(name) is not None}
    rewards = settings.get("reward_funcs", ())
    if "reward_funcs" not in given and all(":" in name or short_reward_name(name) in REWARDS for name in rewards):
        own |= {"reward_funcs": rewards, "reward_weights": settings.get("reward_weights")}
    return {**own, "n": settings["num_heldout"], **given}
