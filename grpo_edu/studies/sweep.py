"""Sweeps over settings: the options, and what the result may say.

A sweep trains each setting with several random seeds. It chooses the setting with the best mean accuracy, or reward, on
a validation part of the *training* problems. Then it trains the chosen settings, and those that it started from, again
with new seeds, and compares them once on held-out problems, seed by seed. The best of many runs is high by luck alone
(Henderson et al. 2018, arXiv 1709.06560), so only a difference on new seeds whose interval lies above 0 counts.

`grpo_edu.studies.sweep_runs` does the training. This module needs no torch, so that the command line reads a plan at
once. Optuna (Akiba et al. 2019, arXiv 1907.10902) is an extra: ``pip install "grpo-edu[tuning]"``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_edu.config import USUAL_CAP, GRPOConfig
from grpo_edu.evaluation import Estimate, mean_estimate
from grpo_edu.problems.templates import Problem

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

DEFAULT_SPACE = {
    "learning_rate": "3e-5:1e-3",
    "num_generations": "4,8,16",
    "beta": "0,0.04",
    "loss_type": "grpo,dapo,dr_grpo",
    "scale_rewards": "group,none",
}
SWEPT = tuple(DEFAULT_SPACE)
MEASURES = {"accuracy": ".0%", "reward": ".3f"}  # with the format in which they are shown


@dataclass(frozen=True)
class SweepPlan:
    """The settings of a sweep, and how it compares them.

    space: the values of each setting as texts: choices with commas, or LOW:HIGH for the learning rate, which is tried
        evenly on a logarithmic scale.
    trials: how many different settings to try, in addition to those that the sweep starts from.
    seeds: random seeds with which each setting is trained.
    judge_seeds: how many new seeds the final comparison uses.
    num_validation: training problems that are set aside to choose the settings by.
    num_heldout: problems of the final comparison.
    measure: "accuracy" or "reward" (the mean reward), by which settings are chosen and compared.
    sampler_seed: random seed of the search.

    Raises ValueError that names the field, what is wrong and what to do.
    """

    space: Mapping[str, str] = field(default_factory=lambda: DEFAULT_SPACE)
    trials: int = 12
    seeds: tuple[int, ...] = (0, 1, 2)
    judge_seeds: int = 5
    num_validation: int = 150
    num_heldout: int = 300
    sampler_seed: int = 0
    measure: str = "accuracy"

    def __post_init__(self) -> None:
        object.__setattr__(self, "seeds", tuple(self.seeds))
        if not self.space:
            raise ValueError(f"`space` is empty; give values of {', '.join(SWEPT)}.")
        load_optuna()
        _ = self.distributions  # raises ValueError
        if len(set(self.seeds)) < max(2, len(self.seeds)):
            listed = ",".join(map(str, self.seeds))
            raise ValueError(f"`seeds` must be at least two different numbers, to see their effect, got {listed}.")
        if self.measure not in MEASURES:
            raise ValueError(f"`measure` must be one of {', '.join(MEASURES)}, got {self.measure!r}.")
        for name, least in (("trials", 1), ("judge_seeds", 3), ("num_validation", 1), ("num_heldout", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"`{name}` must be at least {least}, got {getattr(self, name)}.")

    @property
    def new_seeds(self) -> tuple[int, ...]:
        """Seeds of the final comparison: the numbers after those that chose the settings."""
        return tuple(range(max(self.seeds) + 1, max(self.seeds) + 1 + self.judge_seeds))

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        """The space as Optuna takes it."""
        return {name: parse_values(name, text) for name, text in self.space.items()}

    @property
    def grid(self) -> list[dict[str, Any]] | None:
        """All settings of the space, if there are no more of them than trials; else None."""
        choices: list[Any] = [getattr(values, "choices", None) for values in self.distributions.values()]
        if None in choices or math.prod(map(len, choices)) > self.trials:
            return None
        return [dict(zip(self.space, chosen, strict=True)) for chosen in product(*choices)]


def load_optuna() -> None:
    """Import Optuna and silence its log lines; raises ValueError if it is not installed."""
    try:
        import optuna
    except ImportError:
        raise ValueError('sweep needs Optuna; install it with: pip install "grpo-edu[tuning]"') from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def parse_values(name: str, text: str) -> BaseDistribution:
    """Read the values of a setting to sweep, as a distribution of Optuna: its choices, or a range.

    Raises ValueError that names the setting and what is wrong with it.

    >>> parse_values("learning_rate", "1e-5:1e-3"), parse_values("num_generations", "4, 8").choices
    (FloatDistribution(high=0.001, log=True, low=1e-05, step=None), (4, 8))
    """
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    if name not in SWEPT:
        raise ValueError(f"`{name}` cannot be swept; choose from {', '.join(SWEPT)}.")
    kind = type(getattr(GRPOConfig(), name))
    try:
        if ":" in text and name == "learning_rate":
            return FloatDistribution(*map(float, text.split(":")), log=True)
        values = tuple(dict.fromkeys(kind(part.strip()) for part in text.split(",")))
    except (TypeError, ValueError):
        form = "LOW:HIGH, such as" if ":" in text else "values such as"
        raise ValueError(f"`{name}` must be {form} {DEFAULT_SPACE[name]}, got {text!r}.") from None
    for value in values:
        GRPOConfig(**{name: value, "epsilon_high": USUAL_CAP})
    return CategoricalDistribution(values)


def settings_config(base: GRPOConfig, settings: Mapping[str, Any], seed: int) -> GRPOConfig:
    """Return the config of one run: `base` with these settings, and as many completions per step as `base` has.

    The number of completions stays, so that a larger group has no advantage from more data. A loss whose weight is
    capped ("cispo") gets the bound `epsilon_high` that it needs.

    Raises ValueError with the reason if the settings do not go together.

    >>> settings_config(GRPOConfig(), {"num_generations": 16}, seed=3).prompts_per_step
    8
    """
    from grpo_edu.losses import LOSSES  # imports torch

    changes = dict(settings)
    group = changes.get("num_generations", base.num_generations)
    if group > 0 and base.batch_size % group:
        raise ValueError(f"`num_generations` {group} does not divide the {base.batch_size} completions of a step.")
    if group > 0:
        changes["prompts_per_step"] = base.batch_size // group
    loss = LOSSES.get(changes.get("loss_type", base.loss_type))
    if loss is not None and loss.clips == "weight" and base.epsilon_high is None:
        changes["epsilon_high"] = USUAL_CAP
    config = replace(base, **changes, seed=seed)
    if "loss_type" in settings and config.loss_type == "dr_grpo" and config.scale_rewards != "none":
        raise ValueError(f"`loss_type` 'dr_grpo' needs `scale_rewards` 'none', got {config.scale_rewards!r}.")
    return config


def split_validation(problems: Sequence[Problem], n: int) -> tuple[list[Problem], list[Problem]]:
    """Split problems in two, to train on and to validate with: the last `n`, taken evenly from the levels.

    Raises ValueError if a level would have nothing left to train on.

    >>> five = [Problem(str(i), "1", "ab"[i // 3], "") for i in range(5)]
    >>> [[problem.prompt for problem in part] for part in split_validation(five, 2)]
    [['0', '1', '3'], ['2', '4']]
    """
    levels = list(dict.fromkeys(problem.level for problem in problems))
    training, validation = [], []
    for index, level in enumerate(levels):
        of_level = [problem for problem in problems if problem.level == level]
        count = len(of_level) - (n // len(levels) + (index < n % len(levels)))
        if count < 1:
            raise ValueError(f"`num_validation` {n} leaves no problem of {level} to train on; lower it.")
        training += of_level[:count]
        validation += of_level[count:]
    return training, validation


# ---- what a sweep found ----


@dataclass(frozen=True)
class Tried:
    """Settings, and what came of them with each seed until one failed.

    accuracies: shares of problems solved, in the order of the seeds. rewards: mean rewards, which 0.3.0 did not store.
    measure: as in `SweepPlan`. failure: why a run failed, else empty.
    """

    settings: Mapping[str, Any]
    accuracies: tuple[float, ...]
    rewards: tuple[float, ...] = ()
    measure: str = "accuracy"
    failure: str = ""

    @property
    def values(self) -> tuple[float, ...]:
        """What the settings are compared by, in the order of the seeds."""
        return self.rewards if self.measure == "reward" else self.accuracies

    @property
    def estimate(self) -> Estimate:
        """Mean over the seeds, with its interval."""
        return mean_estimate(self.values)

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers, ready for JSON."""
        values = {"accuracies": list(self.accuracies), "rewards": list(self.rewards)}
        return {"settings": dict(self.settings), **values, **asdict(self.estimate)}

    def __str__(self) -> str:
        return ", ".join(
            f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in self.settings.items()
        )


@dataclass(frozen=True)
class SweepResult:
    """All runs of a sweep, and what follows from them.

    output: its folder. start: the settings that it started from.
    records: one per run, with its settings, seed and accuracy, or the reason why it failed; part is "search" (on the
        validation problems) or "judge" (on the held-out problems).
    """

    output: Path
    plan: SweepPlan
    start: Mapping[str, Any]
    records: list[dict[str, Any]]

    def gather(self, part: str) -> list[Tried]:
        """Return what came of all settings of one part, in the order in which they were tried."""
        found: dict[str, list[dict[str, Any]]] = {}
        for record in self.records:
            if record["part"] == part:
                found.setdefault(str(record["settings"]), []).append(record)
        return [
            Tried(
                records[0]["settings"],
                tuple(record["accuracy"] for record in records if "accuracy" in record),
                tuple(record["reward"] for record in records if "reward" in record),
                self.plan.measure,
                records[-1].get("failure", ""),
            )
            for records in found.values()
        ]

    @property
    def seconds(self) -> float:
        """Time of all runs together."""
        return sum(record.get("seconds", 0.0) for record in self.records)

    @property
    def tried(self) -> list[Tried]:
        """The settings that ran with every seed, the best mean on the validation problems first."""
        whole = [one for one in self.gather("search") if len(one.accuracies) == len(self.plan.seeds)]
        return sorted(whole, key=lambda one: -one.estimate.value)

    @property
    def refused(self) -> list[Tried]:
        """Settings that are not valid, or failed with a seed."""
        return [one for part in ("search", "judge") for one in self.gather(part) if one.failure]

    @property
    def chosen(self) -> Tried | None:
        """The settings with the best mean; None where these are the settings that the sweep started from."""
        best = self.tried[0]
        return None if best.settings == self.start else best

    @property
    def judged(self) -> tuple[Tried, Tried] | None:
        """Start and chosen settings on held-out problems with new seeds; None if nothing was chosen or a run failed."""
        whole = [one for one in self.gather("judge") if len(one.accuracies) == self.plan.judge_seeds]
        return (whole[0], whole[1]) if len(whole) == 2 else None

    @property
    def difference(self) -> Estimate | None:
        """Accuracy, or reward, of the chosen settings minus that of the start, with its interval over the new seeds."""
        return self.compare_by(self.plan.measure)

    def compare_by(self, measure: str) -> Estimate | None:
        """Return the difference in one of the `measures`; None without a final comparison."""
        if self.judged is None:
            return None
        start, chosen = (replace(one, measure=measure).values for one in self.judged)
        return mean_estimate([after - before for before, after in zip(start, chosen, strict=True)])

    @property
    def measures(self) -> list[str]:
        """The measures to show: both, if the rewards of all runs say more than which problems are solved."""
        done = [record for record in self.records if "accuracy" in record]
        accuracies, rewards = ([record.get(name) for record in done] for name in MEASURES)
        return [self.plan.measure] if None in rewards or rewards == accuracies else list(MEASURES)

    @property
    def outcome(self) -> str:
        """The conclusion: "winner" or "worse" if the interval of the difference leaves out 0."""
        if self.difference is None or self.difference.low <= 0 <= self.difference.high:
            return "no winner"
        return "winner" if self.difference.low > 0 else "worse"

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers, ready for JSON."""
        return {
            "outcome": self.outcome,
            "start": dict(self.start),
            "chosen": self.chosen and dict(self.chosen.settings),
            "difference": self.difference and asdict(self.difference),
            "judged": self.judged and [one.to_dict() for one in self.judged],
            "tried": [one.to_dict() for one in self.tried],
            "refused": [{"settings": dict(one.settings), "reason": one.failure} for one in self.refused],
            "plan": asdict(self.plan),
            "seconds": round(self.seconds, 1),
            "output": str(self.output),
        }


def verdict_text(result: SweepResult) -> str:
    """Return the conclusion of a sweep, in one or two sentences."""
    if result.chosen is None:
        return "No winner: no settings did better on the validation problems than those that the sweep started from."
    if result.difference is None:
        return f"No winner: the final comparison of {result.chosen} with the start is not complete."
    against = f"{_change(result.difference, result.plan.measure)} against the start, seed by seed"
    if result.outcome == "winner":
        return f"Winner: {result.chosen}. {against}."
    if result.outcome == "worse":
        return f"No winner: {result.chosen} did best on the validation problems, but does worse on new ones: {against}."
    return (
        f"No winner: {result.chosen} did best on the validation problems, but with new seeds the interval of its gain "
        f"contains 0: {against}. More seeds would narrow it."
    )


def sweep_text(result: SweepResult) -> str:
    """Return table, final comparison and conclusion as Markdown, which is readable in a terminal too."""
    plan = result.plan
    titles = [f"mean {measure} [95% interval]" for measure in result.measures]
    lines = [f"| settings | {' | '.join(titles)} | {plan.measure} of each seed |", "|---" * (len(titles) + 2) + "|"]
    for one in result.tried:
        mark = " (start)" if one.settings == result.start else ""
        lines.append(f"| {one}{mark} | {' | '.join(_means(one, result))} | {_each(one)} |")
    lines += ["", f"Intervals over {len(plan.seeds)} seeds, on {plan.num_validation} training problems set aside."]
    best = max(result.tried, key=lambda one: max(one.values))  # which a careless report would have shown
    highest, mean = (f"{value:{MEASURES[plan.measure]}}" for value in (max(best.values), best.estimate.value))
    solved, solve = ("solved", "solve") if plan.measure == "accuracy" else ("earned", "earn")
    lines += ["", f"The best single run {solved} {highest}; its settings {solve} {mean} on average."]
    if result.refused:
        lines += ["", "Not valid, or failed:", "", *(f"- {one}: {one.failure}" for one in result.refused)]
    if result.judged is not None:
        n = next(record.get("n", plan.num_heldout) for record in result.records if record["part"] == "judge")
        title = f"Final comparison on {n} held-out problems, with {plan.judge_seeds} new seeds:"
        lines += ["", title, ""]
        lines += [
            f"- {name}: {', '.join(_means(one, result))}, seeds {_each(one)}"
            for name, one in zip(("start", "chosen"), result.judged, strict=True)
        ]
        changes = [_change(found, name) for name in result.measures if (found := result.compare_by(name))]
        lines += [f"- chosen − start, seed by seed: {'; '.join(changes)}"]
    return "\n".join([*lines, "", verdict_text(result)])


def _means(one: Tried, result: SweepResult) -> list[str]:
    """Return the mean of each measure with its interval."""
    return [f"{replace(one, measure=measure).estimate:{MEASURES[measure]}}" for measure in result.measures]


def _change(difference: Estimate, measure: str) -> str:
    return f"{difference:+.3f} in the mean reward" if measure == "reward" else f"{difference:+}"


def _each(one: Tried) -> str:
    return " ".join(f"{value:{MEASURES[one.measure]}}" for value in one.values)
