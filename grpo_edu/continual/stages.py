"""Curriculum settings: stages, a protection against forgetting, and both by name or from a file.

Needs no torch, so that the command line reads a profile at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from grpo_edu.config import GRPOConfig, SupervisedConfig, check_numbers
from grpo_edu.problems.files import read_utf8
from grpo_edu.problems.templates import LEVELS, data_dir
from grpo_edu.rewards import REWARDS
from grpo_edu.runs.effects import OptionRequirement, reject_ineffective_options
from grpo_edu.runs.loading import parse_data, parse_names
from grpo_edu.runs.options import CONFIG_FIELDS, RunConfig, default_config

METHODS = {"supervised": SupervisedConfig, "grpo": GRPOConfig}
PROTECTIONS = ("none", "ewc", "l2", "replay", "kl")
FISHERS = ("sampled", "true", "empirical", "batched-empirical", "lightning")


@dataclass(frozen=True)
class Stage:
    """One lesson.

    name: the task's name in matrix and figure. data: names as `--data` takes them.
    method: "supervised" (worked solutions) or "grpo" (rewards).
    config: the settings, of the method's kind. rewards: names of `grpo_edu.rewards.REWARDS`, for "grpo".
    num_problems: how many training problems, taken evenly from the data; None takes all.

    Raises ValueError that names the stage and what is wrong with it.

    >>> Stage("first", ("basic",), "magic")
    Traceback (most recent call last):
    ...
    ValueError: stage 'first': method: 'magic' is unknown; use supervised or grpo
    """

    name: str
    data: tuple[str, ...]
    method: str = "supervised"
    config: SupervisedConfig | GRPOConfig = field(default_factory=SupervisedConfig)
    rewards: tuple[str, ...] = ("accuracy",)
    num_problems: int | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"stage {self.name!r}: method: {self.method!r} is unknown; use {' or '.join(METHODS)}")
        if not isinstance(self.config, METHODS[self.method]):
            kind = METHODS[self.method].__name__
            raise ValueError(f"stage {self.name!r}: config: method {self.method!r} takes a {kind}")
        try:
            object.__setattr__(self, "data", parse_data(self.data))
            object.__setattr__(self, "rewards", parse_names(self.rewards, tuple(REWARDS), "rewards"))
        except ValueError as error:
            raise ValueError(f"stage {self.name!r}: {error}") from None


@dataclass(frozen=True)
class Protection:
    """The protection of earlier tasks from the second stage on.

    method: "none"; "ewc", the penalty of `grpo_edu.continual.ewc`; "l2", the same with a Fisher of ones; "replay",
        problems of earlier stages mixed in; "kl", the KL from the model that the stage began with.
    strength: λ of "ewc" and "l2"; the share of old problems of "replay"; beta of "kl".
    fisher: for "ewc", a kind of `fisher_diagonal`, or "lightning" for the heuristic.
    num_examples: for "ewc", solutions (after GRPO: own completions) of a task that its Fisher is computed on.
    online: one running anchor (`merge_anchors`) in place of one per task. decay: factor of its old part.

    Raises ValueError that names the field.
    """

    method: str = "none"
    strength: float = 0.0
    fisher: str = "sampled"
    num_examples: int = 64
    online: bool = False
    decay: float = 1.0

    def __post_init__(self) -> None:
        if self.method not in PROTECTIONS:
            raise ValueError(f"method: {self.method!r} is unknown; choose one of {', '.join(PROTECTIONS)}")
        if self.fisher not in FISHERS:
            raise ValueError(f"fisher: {self.fisher!r} is unknown; choose one of {', '.join(FISHERS)}")
        check_numbers(strength=self.strength, num_examples=self.num_examples, decay=self.decay)
        if self.method == "replay" and self.strength >= 1:
            raise ValueError(f"strength: {self.strength} is a share of old problems; it must be below 1")


# What the parts of a curriculum need to have an effect (`grpo_edu.runs.effects`), as options and as keys of a file.
_METHOD = "(`protect`, in a file `method`)"
PROTECTION_NEEDS = (
    OptionRequirement(
        "strength", lambda own: own["method"] != "none", f"the protection ewc, l2, replay or kl {_METHOD}"
    ),
    OptionRequirement(
        "protect method", lambda own: own["method"] == "none" or own["strength"] != 0, "a `strength` above 0"
    ),
    OptionRequirement("fisher num_examples", lambda own: own["method"] == "ewc", f"the protection ewc {_METHOD}"),
    OptionRequirement("num_examples", lambda own: own["fisher"] != "lightning", "another `fisher` than lightning"),
    OptionRequirement("online", lambda own: own["method"] in ("ewc", "l2"), f"the protection ewc or l2 {_METHOD}"),
    OptionRequirement(
        "online", lambda own: own["stages"] > 2, "at least three stages, because the first two have one anchor"
    ),
    OptionRequirement("decay", lambda own: own["online"], "`online`"),
)
_STAGE_NEEDS = (OptionRequirement("rewards", lambda own: own["method"] == "grpo", "`method` grpo"),)


@dataclass(frozen=True)
class Curriculum:
    """At least two stages, one task each, and their protection."""

    stages: tuple[Stage, ...]
    protection: Protection = field(default_factory=Protection)

    def __post_init__(self) -> None:
        names = [stage.name for stage in self.stages]
        if len(names) < 2:
            raise ValueError(f"stages: {len(names)} given; a curriculum has at least two")
        if len(set(names)) < len(names):
            raise ValueError(f"stages: two have one name among {', '.join(names)}; name each task once")

    def with_seed(self, seed: int) -> Curriculum:
        """Return the same with this seed in every stage."""
        stages = (replace(stage, config=replace(stage.config, seed=seed)) for stage in self.stages)
        return replace(self, stages=tuple(stages))


_BRISK = {"max_steps": 40, "learning_rate": 3.5e-3, "lr_scheduler_type": "linear"}
_LEVELS = {level: [level] for level in LEVELS}
_DOMAINS = {"stories": list(LEVELS), "coin_flip": ["coin_flip"], "sorting": ["sorting"]}


def _stages(
    tasks: Mapping[str, list[str]], method: str, config: Mapping[str, Any], **more: Any
) -> list[dict[str, Any]]:
    return [{"name": name, "data": data, "method": method, "config": config, **more} for name, data in tasks.items()]


def _settings_of_profile(name: str) -> dict[str, Any]:
    """Return the settings of GRPO in a shipped profile. They are not checked yet, because that imports torch."""
    content = json.loads(read_utf8(data_dir() / "profiles" / f"{name}.json"))
    return {field: value for field, value in content.items() if field in CONFIG_FIELDS}


# ten problems for half an epoch, one per step, in the order of their shuffle
_FAITHFUL = _settings_of_profile("rl-grpo-faithful") | {"max_steps": 5, "shuffle_dataset": True}

# domains: three unlike tasks, learned briskly. levels: the three levels, one after the other. -gentle: with a lower
# learning rate. -grpo: by reinforcement. rl-grpo-faithful: a published three-stage "progressive training" with its own
# settings, here really trained: 10 problems a stage for half an epoch, λ = 1000 with the "lightning" heuristic.
PROFILES: dict[str, dict[str, Any]] = {
    "domains": {"stages": _stages(_DOMAINS, "supervised", _BRISK)},
    "domains-gentle": {"stages": _stages(_DOMAINS, "supervised", _BRISK | {"learning_rate": 1e-3})},
    "domains-grpo": {"stages": _stages(_DOMAINS, "grpo", {"max_steps": 20})},
    "levels": {"stages": _stages(_LEVELS, "supervised", _BRISK)},
    "levels-grpo": {"stages": _stages(_LEVELS, "grpo", {"max_steps": 20})},
    "rl-grpo-faithful": {
        "stages": _stages(_LEVELS, "grpo", _FAITHFUL, num_problems=10),
        "protection": {"method": "ewc", "strength": 1000.0, "fisher": "lightning"},
    },
}


def load_curriculum(profile: str | Path) -> Curriculum:
    """Return a curriculum by the name of `PROFILES`, or from a JSON file of the same form.

    Raises ValueError: an unknown name, a file that is not such JSON, or what `curriculum_from_dict` refuses;
    OSError if the file cannot be read.

    >>> [stage.name for stage in load_curriculum("levels").stages]
    ['basic', 'intermediate', 'advanced']
    """
    if str(profile) in PROFILES:
        return curriculum_from_dict(PROFILES[str(profile)])
    path = Path(profile).expanduser()
    if not path.is_file():
        raise ValueError(f"profile: {profile} is neither a file nor one of {', '.join(PROFILES)}")
    try:
        content = json.loads(read_utf8(path))
        curriculum = curriculum_from_dict(content)
        _check_effects(content, curriculum)
        return curriculum
    except ValueError as error:
        raise ValueError(f"profile: {path}: {error}") from None


def curriculum_from_dict(content: Mapping[str, Any]) -> Curriculum:
    """Return a curriculum from plain values, such as `asdict` makes; what is left out has the default of its class.

    >>> two = [{"name": "first", "data": "basic"}, {"name": "then", "data": "sorting", "method": "grpo"}]
    >>> curriculum_from_dict({"stages": two, "protection": {"method": "kl", "strength": 0.1}}).stages[1].method
    'grpo'

    Raises ValueError for an unknown key, with the known ones, and for what the classes refuse.
    """
    _check_keys(content, Curriculum, "curriculum")
    stages = content.get("stages")
    if not isinstance(stages, (list, tuple)):
        raise ValueError("stages: a curriculum needs a list of them")
    protection = content.get("protection", {})
    _check_keys(protection, Protection, "protection")
    return Curriculum(tuple(map(_stage, stages)), Protection(**protection))


def _check_effects(content: Mapping[str, Any], curriculum: Curriculum) -> None:
    """Raise ValueError for a key of a file that has no effect next to the others."""
    reject_ineffective_options(content.get("protection", {}), protection_settings(curriculum), PROTECTION_NEEDS)
    for written, stage in zip(content["stages"], curriculum.stages, strict=True):
        reject_ineffective_options(written, {"method": stage.method}, _STAGE_NEEDS)
        if isinstance(stage.config, GRPOConfig):
            reject_ineffective_options(written.get("config", {}), RunConfig(config=stage.config).to_settings())


def protection_settings(curriculum: Curriculum, **changes: Any) -> dict[str, Any]:
    """Return what `PROTECTION_NEEDS` asks about a curriculum whose protection gets some changes."""
    return {**asdict(curriculum.protection), **changes, "stages": len(curriculum.stages)}


def _stage(content: Mapping[str, Any]) -> Stage:
    _check_keys(content, Stage, "stage")
    missing = {"name", "data"} - content.keys()
    if missing:
        raise ValueError(f"stage: {min(missing)} is missing; each needs a name and data")
    method, settings = content.get("method", "supervised"), content.get("config", {})
    _check_keys(settings, METHODS.get(method, SupervisedConfig), f"config of stage {content['name']!r}")
    config: SupervisedConfig | GRPOConfig
    if method == "grpo":
        config = default_config(parse_data(content["data"]), **settings)
    else:
        config = SupervisedConfig(**settings)
    return Stage(**{**content, "name": str(content["name"]), "config": config})


def _check_keys(content: Any, kind: type, what: str) -> None:
    if not isinstance(content, Mapping):
        raise ValueError(f"{what}: must be an object in braces, got {type(content).__name__}")
    known = [entry.name for entry in fields(kind)]
    unknown = [key for key in content if key not in known]
    if unknown:
        raise ValueError(f"{what}: {unknown[0]!r} is unknown; it has {', '.join(known)}")
