"""Profiles: settings of a run under a name, and in files of one's own. What is typed beside a profile overrides it.

Needs no torch, so that the command line lists and reads profiles at once.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any, cast

from grpo_edu.config import GRPOConfig
from grpo_edu.problems import LEVELS
from grpo_edu.run_inputs import BACKENDS, DTYPE_CHOICES, check_data, default_config, reward_functions

# What a run is asked for beside the settings of GRPO: name → default, kinds of value, and their name in a message.
_NAMES = ((str, list, tuple), "a name, or a list of names")
_COUNT = ((int,), "a whole number")
RUN_FIELDS: dict[str, tuple[Any, tuple[type, ...], str]] = {
    "model": ("tiny", (str,), "a name, a folder or a Hub id"),
    "data": (LEVELS, *_NAMES),
    "data_path": (None, (str, NoneType), "a folder"),
    "num_problems": (None, (int, NoneType), "a whole number"),
    "rewards": ("accuracy", *_NAMES),
    "backend": (BACKENDS[0], (str,), f"one of {', '.join(BACKENDS)}"),
    "dtype": (DTYPE_CHOICES[0], (str,), f"one of {', '.join(DTYPE_CHOICES)}"),
    "prompt_template": (None, (str, NoneType), "a text with {problem} in it"),
    "lora_rank": (0, *_COUNT),
    "lora_alpha": (None, (int, float, NoneType), "a number"),
    "lora_targets": ("all-linear", *_NAMES),
    "n": (300, *_COUNT),
    "greedy": (None, (bool, NoneType), "true or false"),
    "checkpoint_every": (0, *_COUNT),
    "track": ((), *_NAMES),
}
_CHOICES = {"backend": BACKENDS, "dtype": DTYPE_CHOICES}
CONFIG_FIELDS = tuple(field.name for field in fields(GRPOConfig))

_FAITHFUL_TEMPLATE = "Solve step by step:\n\n{problem}\n\nSolution:"
PROFILES: dict[str, tuple[str, dict[str, Any]]] = {
    "quick": (
        "a look: ten steps, a hundred held-out problems",
        {"max_steps": 10, "n": 100, "greedy": False},
    ),
    "standard": ("the defaults: forty steps that take the tiny model from 43% to 88%", {}),
    "thorough": (
        "a result to report: 80 steps of 256 completions, a thousand held-out problems, checkpoints",
        {
            "max_steps": 80, "num_generations": 16, "lr_scheduler_type": "linear", "warmup_steps": 5, "n": 1000,
            "greedy": True, "checkpoint_every": 20,
        },
    ),
    "ultra-fast": (
        "a published quick profile for 50 to 200 samples: batches of 4, 24 tokens, half an epoch of 60 problems",
        {
            "num_problems": 60, "prompts_per_step": 4, "num_generations": 2, "max_completion_length": 24,
            "max_steps": 8, "learning_rate": 2e-5, "n": 60, "greedy": False,
        },
    ),
    "extreme-fast": (
        "the same for fewer than 50 samples: batches of 1, 16 tokens, a tenth of an epoch of 40 problems",
        {
            "num_problems": 40, "prompts_per_step": 1, "num_generations": 2, "max_completion_length": 16,
            "max_steps": 4, "learning_rate": 2e-5, "n": 60, "greedy": False,
        },
    ),
    "hardware-accelerated": (
        "what this processor does faster: the number format that is measured to be, and rollouts in int8; made for "
        "large models",
        {"dtype": "auto", "rollout_quantization": "int8-dynamic"},
    ),
    "progressive": (
        "the levels one after the other, 640 problems once, the learning rate falling to 0",
        {"num_problems": 640, "shuffle_dataset": False, "lr_scheduler_type": "linear"},
    ),
    "rl-grpo-faithful": (
        "a published CPU recipe with its own settings: 1 prompt x 2 completions, half an epoch of 10 prompts a level; "
        "its warm-up of 10 steps is longer than each of its stages of 5 (in stages, with its EWC: grpo-edu curriculum)",
        {
            "model": "Qwen/Qwen2-0.5B-Instruct", "dtype": "float32", "prompt_template": _FAITHFUL_TEMPLATE,
            "num_problems": 15, "shuffle_dataset": False, "prompts_per_step": 1, "num_generations": 2,
            "gradient_accumulation_steps": 1, "max_steps": 15, "max_completion_length": 64, "learning_rate": 1e-5,
            "lr_scheduler_type": "linear", "warmup_steps": 10, "max_grad_norm": 1.0, "temperature": 0.7, "top_p": 0.9,
            "beta": 0.1, "epsilon": 0.2, "num_iterations": 1, "loss_type": "bnpo", "optim": "adamw_torch", "seed": 42,
            "n": 60, "greedy": False,
        },
    ),
    "cluster-lora": (
        "a published cluster recipe: LoRA on a distilled 1.5B model, GSM8K for three epochs, 1 prompt x 8 completions, "
        "rewards minus the group's mean (without its dropout of 0.05: who learns is who sampled)",
        {
            "model": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "data": "gsm8k", "dtype": "bfloat16",
            "lora_rank": 16, "lora_alpha": 32, "lora_targets": ["q_proj", "k_proj", "v_proj", "o_proj"],
            "prompts_per_step": 1, "num_generations": 8, "gradient_accumulation_steps": 1, "max_steps": 22419,
            "max_completion_length": 256, "learning_rate": 5e-5, "scale_rewards": "none", "n": 1319, "greedy": False,
            "checkpoint_every": 500,
        },
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Profile:
    """Settings under a name.

    name: of `PROFILES`, or a file. about: what it is for.
    settings: fields of `GRPOConfig` and names of `RUN_FIELDS`; what is not there has its default.

    Raises ValueError that names the field, and for an unknown one the nearest that there is.

    >>> Profile("mine", "", {"max_stpes": 3})
    Traceback (most recent call last):
    ...
    ValueError: max_stpes: is no setting; do you mean max_steps?
    """

    name: str
    about: str
    settings: Mapping[str, Any]

    def __post_init__(self) -> None:
        for name, value in self.settings.items():
            _check_field(name, value)
        self.config()

    def config(self) -> GRPOConfig:
        """The settings of GRPO, with room for the solutions of the data."""
        data = check_data(self.run()["data"])
        return default_config(data, **{name: self.settings[name] for name in CONFIG_FIELDS if name in self.settings})

    def run(self) -> dict[str, Any]:
        """The arguments of `run_training`, all but the config."""
        return {name: self.settings.get(name, default) for name, (default, *_) in RUN_FIELDS.items()}

    def override(self, settings: Mapping[str, Any]) -> Profile:
        """The same with other settings on top."""
        return Profile(self.name, self.about, {**self.settings, **settings})


def load_profile(name: str | Path = "standard") -> Profile:
    """A profile by its name, or from a JSON file: settings by their names, and a "base" to start from.

    Raises ValueError: an unknown name, with the nearest; a file that is no such JSON, with the line and the field;
    OSError where the file cannot be read.

    >>> load_profile("quick").config().max_steps
    10
    """
    if str(name) in PROFILES:
        return Profile(str(name), *PROFILES[str(name)])
    path = Path(name).expanduser()
    if not path.is_file():
        known = f"choose from {', '.join(PROFILES)}, or name a JSON file"
        raise ValueError(f"profile: {str(name)!r} is unknown{_nearest(str(name), PROFILES)}; {known}")
    return _read_profile(path)


def _read_profile(path: Path) -> Profile:
    text = path.read_text(encoding="utf-8")
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}:{getattr(error, 'lineno', 1)}: not JSON ({error}); mend this line") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}:1: a profile is an object in braces, got {type(content).__name__}")
    settings = {name: value for name, value in content.items() if name not in ("about", "base")}
    try:
        base = load_profile(content["base"]) if "base" in content else Profile("", "", {})
        return Profile(str(path), str(content.get("about", "")), {**base.settings, **settings})
    except ValueError as error:
        field = str(error).partition(":")[0]
        found = re.search(rf'^.*"{re.escape("base" if field == "profile" else field)}"\s*:', text, re.MULTILINE)
        line = text[: found.end()].count("\n") + 1 if found else 1
        raise ValueError(f"{path}:{line}: {error}") from None


def profile_text(profile: Profile) -> str:
    """Every setting of a profile, one a line; a star marks what the profile sets itself.

    >>> print(profile_text(load_profile("quick")).splitlines()[0])
    quick: a look: ten steps, a hundred held-out problems
    """
    values = {**profile.run(), **profile.config().to_dict()}
    width = max(map(len, values))
    lines = [f"{'*' if name in profile.settings else ' '} {name:<{width}}  {_shown(value)}" for name, value in
             values.items()]  # fmt: skip
    return "\n".join([f"{profile.name}: {profile.about}", *lines])


def profiles_text() -> str:
    """The names of all profiles, each with what it is for."""
    width = max(map(len, PROFILES))
    return "\n".join(f"{name:<{width}}  {about}" for name, (about, _) in PROFILES.items())


def _shown(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return repr(value) if isinstance(value, str) and "\n" in value else str(value)


def _check_field(name: str, value: Any) -> None:
    """Whether there is such a setting, and its kind of value is right; of GRPO's settings `GRPOConfig` sees to that."""
    if name in RUN_FIELDS:
        _, kinds, words = RUN_FIELDS[name]
        is_flag = isinstance(value, bool)
        if not isinstance(value, kinds) or (is_flag and bool not in kinds) or value not in _CHOICES.get(name, (value,)):
            raise ValueError(f"{name}: {value!r} must be {words}")
        if name == "rewards":
            reward_functions(cast(Any, value))
    elif name not in CONFIG_FIELDS:
        raise ValueError(f"{name}: is no setting{_nearest(name, (*RUN_FIELDS, *CONFIG_FIELDS))}")


def _nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.4)
    return f"; do you mean {close[0]}?" if close else ""
