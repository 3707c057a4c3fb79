"""What a sweep over settings can be asked for, and what it may say at the end.

A sweep tries settings on several seeds each. The best mean on a validation part of the *training* problems is chosen;
then the chosen settings and those that the sweep started from are trained anew, with seeds that chose nothing, and
judged once on held-out problems, seed by seed. The best of many runs is high by luck alone (Henderson et al. 2018,
arXiv 1709.06560); a difference on new seeds whose interval lies above 0 is not.

Needs no torch and no Optuna, so that the command line reads a space at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any

from grpo_edu.config import LOSS_TYPES, SCALE_REWARDS, GRPOConfig
from grpo_edu.problems import Problem

_KINDS = {"learning_rate": float, "num_generations": int, "beta": float, "loss_type": str, "scale_rewards": str}
SWEPT = tuple(_KINDS)
DEFAULT_SPACE = {
    "learning_rate": "3e-5:1e-3", "num_generations": "4,8,16", "beta": "0,0.04", "loss_type": "grpo,dapo,dr_grpo",
    "scale_rewards": "group,none",
}  # fmt: skip
_KNOWN = {"loss_type": LOSS_TYPES, "scale_rewards": SCALE_REWARDS}
_CISPO_CAP = 5.0  # what GRPOConfig's message on cispo asks for


@dataclass(frozen=True)
class Range:
    """All values from low to high, tried evenly on a logarithmic scale, since 1e-5 to 1e-4 is as far as 1e-4 to 1e-3.

    Raises ValueError unless 0 < low < high.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high < math.inf:
            raise ValueError(f"{self.low:g}:{self.high:g} must run from a positive number to a larger one")

    def __str__(self) -> str:
        return f"{self.low:g}:{self.high:g}"


Values = Range | tuple[Any, ...]


def parse_space(texts: Mapping[str, str]) -> dict[str, Values]:
    """Of each setting to sweep its values: choices with commas, or LOW:HIGH for the learning rate.

    Raises ValueError that names the setting and what is wrong with it.

    >>> parse_space({"learning_rate": "1e-5:1e-3", "num_generations": "4,8"})
    {'learning_rate': Range(low=1e-05, high=0.001), 'num_generations': (4, 8)}
    """
    space: dict[str, Values] = {}
    for name, text in texts.items():
        if name not in _KINDS:
            raise ValueError(f"{name}: is not swept; choose from {', '.join(SWEPT)}")
        try:
            space[name] = _values(name, str(text))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    if not space:
        raise ValueError(f"space: nothing to sweep; give values of {', '.join(SWEPT)}")
    return space


def _values(name: str, text: str) -> Values:
    low, colon, high = text.partition(":")
    if colon:
        if name != "learning_rate":
            raise ValueError(f"{text} is a range, which only learning_rate has; give choices with commas")
        return Range(_number(low, float), _number(high, float))
    choices = tuple(dict.fromkeys(_number(part.strip(), _KINDS[name]) for part in text.split(",") if part.strip()))
    unknown = [choice for choice in choices if choice not in _KNOWN.get(name, choices)]
    if unknown or not choices:
        wrong = f"{unknown[0]!r} is unknown" if unknown else "no value given"
        raise ValueError(f"{wrong}; choose from {', '.join(_KNOWN[name])}" if name in _KNOWN else wrong)
    return choices


def _number(text: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a {'whole number' if kind is int else 'number'}") from None


@dataclass(frozen=True)
class SweepPlan:
    """How a sweep goes.

    space: of each setting its values (`parse_space`). trials: different settings to try, besides those it starts from.
    seeds: each setting is trained with each of them. judge_seeds: how many new seeds judge the chosen settings.
    num_validation: training problems that nothing is trained on, to choose by. num_heldout: problems to judge by.
    sampler_seed: of the search.

    Raises ValueError that names the field, what is wrong and what to do.
    """

    space: Mapping[str, Values] = field(default_factory=lambda: parse_space(DEFAULT_SPACE))
    trials: int = 12
    seeds: tuple[int, ...] = (0, 1, 2)
    judge_seeds: int = 5
    num_validation: int = 150
    num_heldout: int = 300
    sampler_seed: int = 0

    def __post_init__(self) -> None:
        if len(set(self.seeds)) < max(2, len(self.seeds)):
            raise ValueError(f"seeds: {_listed(self.seeds)} must be at least two different ones, to see how they vary")
        for name, least in (("trials", 1), ("judge_seeds", 3), ("num_validation", 1), ("num_heldout", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: {getattr(self, name)} must be at least {least}")

    @property
    def new_seeds(self) -> tuple[int, ...]:
        """The seeds that judge: the next ones after those that chose."""
        return tuple(range(max(self.seeds) + 1, max(self.seeds) + 1 + self.judge_seeds))

    @property
    def grid(self) -> list[dict[str, Any]] | None:
        """All settings of the space, where there are no more of them than trials; else None."""
        choices = [values for values in self.space.values() if not isinstance(values, Range)]
        if len(choices) < len(self.space) or math.prod(map(len, choices)) > self.trials:
            return None
        return [dict(zip(self.space, values, strict=True)) for values in product(*choices)]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a JSON file, the space as texts."""
        space = {name: str(v) if isinstance(v, Range) else _listed(v) for name, v in self.space.items()}
        return {**asdict(replace(self, space={})), "seeds": list(self.seeds), "space": space}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> SweepPlan:
        """The plan that `to_dict` wrote."""
        return cls(**{**content, "space": parse_space(content["space"]), "seeds": tuple(content["seeds"])})


def settings_config(base: GRPOConfig, settings: Mapping[str, Any], seed: int) -> GRPOConfig:
    """The config of one run: `base` with these settings, and as many completions a step as `base` has.

    The number of completions stays, so that a larger group does not win by having seen more. "cispo" comes with the
    bound that it needs.

    Raises ValueError with the reason where the settings do not go together.

    >>> settings_config(GRPOConfig(), {"num_generations": 16}, seed=3).prompts_per_step
    8
    """
    changes = dict(settings)
    group = changes.get("num_generations", base.num_generations)
    if group > 0 and base.batch_size % group:
        raise ValueError(f"num_generations: {group} does not divide the {base.batch_size} completions of a step")
    if group > 0:
        changes["prompts_per_step"] = base.batch_size // group
    if changes.get("loss_type") == "cispo" and base.epsilon_high is None:
        changes["epsilon_high"] = _CISPO_CAP
    config = replace(base, **changes, seed=seed)
    if "loss_type" in settings and config.loss_type == "dr_grpo" and config.scale_rewards != "none":
        raise ValueError(f"loss_type: 'dr_grpo' is defined without scaling, not with {config.scale_rewards!r}")
    return config


def split_validation(problems: Sequence[Problem], n: int) -> tuple[list[Problem], list[Problem]]:
    """(to train on, to validate with): the last `n` problems, as evenly from the levels as may be.

    Raises ValueError where a level would have nothing left to train on.

    >>> five = [Problem(str(i), "1", "ab"[i // 3], "") for i in range(5)]
    >>> [[problem.prompt for problem in part] for part in split_validation(five, 2)]
    [['0', '1', '3'], ['2', '4']]
    """
    levels = list(dict.fromkeys(problem.level for problem in problems))
    training, validation = [], []
    for place, level in enumerate(levels):
        of_level = [problem for problem in problems if problem.level == level]
        kept = len(of_level) - (n // len(levels) + (place < n % len(levels)))
        if kept < 1:
            raise ValueError(f"num_validation: {n} leaves no problem of {level} to train on; lower it")
        training += of_level[:kept]
        validation += of_level[kept:]
    return training, validation


def settings_text(settings: Mapping[str, Any]) -> str:
    """Settings in one line.

    >>> settings_text({"learning_rate": 0.0003, "loss_type": "dapo"})
    'learning_rate 0.0003, loss_type dapo'
    """
    return ", ".join(f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
                     for name, value in settings.items())  # fmt: skip


def _listed(values: Sequence[Any]) -> str:
    return ",".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)
