"""Sweeps over settings: what can be asked for, what the result may say, and its picture.

A sweep trains each setting with several random seeds. It chooses the setting with the best mean accuracy on a
validation part of the *training* problems. Then it trains the chosen settings, and those that it started from, again
with new seeds, and compares them once on held-out problems, seed by seed. The best of many runs is high by luck alone
(Henderson et al. 2018, arXiv 1709.06560), so only a difference on new seeds whose interval lies above 0 counts.

`grpo_edu.studies.sweep_runs` does the training. This module needs neither torch nor Optuna, because the command line
reads a space before it loads them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_edu.config import GRPOConfig, Options, field_bounds
from grpo_edu.problems.templates import Problem

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from grpo_edu.evaluation import Estimate

DEFAULT_SPACE = {
    "learning_rate": "3e-5:1e-3",
    "num_generations": "4,8,16",
    "beta": "0,0.04",
    "loss_type": "grpo,dapo,dr_grpo",
    "scale_rewards": "group,none",
}
SWEPT = tuple(DEFAULT_SPACE)
_CISPO_CAP = 5.0  # the bound that GRPOConfig asks for with "cispo"
MAX_ROWS = 14  # settings that a picture shows; the text has all


@dataclass(frozen=True)
class SweepPlan:
    """What a sweep tries, and how it compares.

    space: the values of each setting as texts: choices with commas, or LOW:HIGH for the learning rate, which is tried
        evenly on a logarithmic scale.
    trials: how many different settings to try, in addition to those that the sweep starts from.
    seeds: random seeds with which each setting is trained.
    judge_seeds: how many new seeds the final comparison uses.
    num_validation: training problems that are set aside to choose the settings by.
    num_heldout: problems of the final comparison.
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "seeds", tuple(self.seeds))
        if not self.space:
            raise ValueError(f"`space` is empty; give values of {', '.join(SWEPT)}.")
        for name, text in self.space.items():
            parse_values(name, text)
        if len(set(self.seeds)) < max(2, len(self.seeds)):
            listed = ",".join(map(str, self.seeds))
            raise ValueError(f"`seeds` must be at least two different numbers, to see their effect, got {listed}.")
        for name, least in (("trials", 1), ("judge_seeds", 3), ("num_validation", 1), ("num_heldout", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"`{name}` must be at least {least}, got {getattr(self, name)}.")

    @property
    def new_seeds(self) -> tuple[int, ...]:
        """Seeds of the final comparison: the numbers after those that chose the settings."""
        return tuple(range(max(self.seeds) + 1, max(self.seeds) + 1 + self.judge_seeds))

    @property
    def grid(self) -> list[dict[str, Any]] | None:
        """All settings of the space, if there are no more of them than trials; else None."""
        values = {name: parse_values(name, text) for name, text in self.space.items()}
        is_range = any(":" in text for text in self.space.values())
        if is_range or math.prod(map(len, values.values())) > self.trials:
            return None
        return [dict(zip(values, chosen, strict=True)) for chosen in product(*values.values())]

    def has(self, settings: Mapping[str, Any]) -> bool:
        """Return whether settings lie in the space, so that the sampler may learn from them."""
        values = {name: parse_values(name, text) for name, text in self.space.items()}
        return all(
            values[name][0] <= settings[name] <= values[name][1] if ":" in text else settings[name] in values[name]
            for name, text in self.space.items()
        )

    def read(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings that Optuna's values stand for; a value of a range is rounded to two digits."""
        return {
            name: float(f"{params[name]:.1e}") if ":" in text else params[name] for name, text in self.space.items()
        }


def parse_values(name: str, text: str) -> tuple[Any, ...]:
    """Read the values of a setting to sweep: its choices, or the two ends of its range.

    Raises ValueError that names the setting and what is wrong with it.

    >>> parse_values("learning_rate", "1e-5:1e-3"), parse_values("num_generations", "4, 8")
    ((1e-05, 0.001), (4, 8))
    """
    if name not in SWEPT:
        raise ValueError(f"`{name}` cannot be swept; choose from {', '.join(SWEPT)}.")
    kind = type(getattr(GRPOConfig(), name))
    is_range = ":" in text
    if is_range and name != "learning_rate":
        raise ValueError(f"`{name}`: {text} is a range, which only learning_rate can have; give choices with commas.")
    parts = text.split(":") if is_range else [part.strip() for part in text.split(",") if part.strip()]
    for part in parts:
        try:
            kind(part)
        except ValueError:
            number = "whole number" if kind is int else "number"
            raise ValueError(f"`{name}`: {part!r} is not a {number}.") from None
    values = tuple(dict.fromkeys(map(kind, parts)))
    if is_range and not (len(values) == 2 and 0 < values[0] < values[1] < math.inf):
        raise ValueError(f"`{name}`: the range {text} must go from a positive number to a larger one.")
    if not values:
        bound = field_bounds(GRPOConfig)[name]
        remedy = f"choose from {', '.join(bound)}" if isinstance(bound, Options) else "use commas"
        raise ValueError(f"`{name}`: {text!r} contains no value; {remedy}.")
    for value in values:
        GRPOConfig(**{name: value, "epsilon_high": _CISPO_CAP})
    return values


def settings_config(base: GRPOConfig, settings: Mapping[str, Any], seed: int) -> GRPOConfig:
    """Return the config of one run: `base` with these settings, and as many completions per step as `base` has.

    The number of completions stays, so that a larger group has no advantage from more data. "cispo" gets the bound
    `epsilon_high` that it needs.

    Raises ValueError with the reason if the settings do not go together.

    >>> settings_config(GRPOConfig(), {"num_generations": 16}, seed=3).prompts_per_step
    8
    """
    changes = dict(settings)
    group = changes.get("num_generations", base.num_generations)
    if group > 0 and base.batch_size % group:
        raise ValueError(f"`num_generations` {group} does not divide the {base.batch_size} completions of a step.")
    if group > 0:
        changes["prompts_per_step"] = base.batch_size // group
    if changes.get("loss_type") == "cispo" and base.epsilon_high is None:
        changes["epsilon_high"] = _CISPO_CAP
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


def settings_text(settings: Mapping[str, Any]) -> str:
    """Settings as one line of text.

    >>> settings_text({"learning_rate": 0.0003, "loss_type": "dapo"})
    'learning_rate 0.0003, loss_type dapo'
    """
    return ", ".join(
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in settings.items()
    )


# ---- what a sweep found ----


@dataclass(frozen=True)
class Tried:
    """Settings and the accuracies that they reached: shares of problems solved, in the order of the seeds."""

    settings: Mapping[str, Any]
    accuracies: tuple[float, ...]

    @property
    def estimate(self) -> Estimate:
        """Mean over the seeds, with its interval."""
        from grpo_edu.evaluation import mean_estimate

        return mean_estimate(self.accuracies)


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
    records: Sequence[Mapping[str, Any]]

    @property
    def seconds(self) -> float:
        """Time of all runs together."""
        return sum(record.get("seconds", 0.0) for record in self.records)

    @property
    def tried(self) -> list[Tried]:
        """The settings that ran with every seed, the best mean on the validation problems first."""
        found = [self._gathered("search", record["settings"], self.plan.seeds) for record in self._firsts()]
        whole = [setting for setting in found if len(setting.accuracies) == len(self.plan.seeds)]
        return sorted(whole, key=lambda setting: -setting.estimate.value)

    @property
    def refused(self) -> list[tuple[Mapping[str, Any], str]]:
        """Settings that are not valid, or failed with a seed, each with the reason."""
        return [(record["settings"], record["failure"]) for record in self.records if "failure" in record]

    @property
    def chosen(self) -> Mapping[str, Any] | None:
        """The settings with the best mean; None where these are the settings that the sweep started from."""
        best = self.tried[0].settings
        return None if best == self.start else best

    @property
    def judged(self) -> tuple[Tried, Tried] | None:
        """Start and chosen settings on held-out problems with new seeds; None if nothing was chosen or a run failed."""
        if self.chosen is None:
            return None
        pair = [self._gathered("judge", settings, self.plan.new_seeds) for settings in (self.start, self.chosen)]
        whole = all(len(setting.accuracies) == self.plan.judge_seeds for setting in pair)
        return (pair[0], pair[1]) if whole else None

    @property
    def difference(self) -> Estimate | None:
        """Accuracy of the chosen settings minus that of the start, with its interval over the new seeds."""
        from grpo_edu.evaluation import mean_estimate

        if self.judged is None:
            return None
        start, chosen = (setting.accuracies for setting in self.judged)
        return mean_estimate([after - before for before, after in zip(start, chosen, strict=True)])

    @property
    def outcome(self) -> str:
        """What may be concluded: "winner" or "worse" where the interval of the difference leaves out 0."""
        if self.difference is None or self.difference.low <= 0 <= self.difference.high:
            return "no winner"
        return "winner" if self.difference.low > 0 else "worse"

    def to_dict(self) -> dict[str, Any]:
        """The numbers, ready for JSON."""
        return {
            "outcome": self.outcome,
            "start": dict(self.start),
            "chosen": self.chosen and dict(self.chosen),
            "difference": self.difference and asdict(self.difference),
            "judged": self.judged and [_row(setting) for setting in self.judged],
            "tried": [_row(setting) for setting in self.tried],
            "refused": [{"settings": dict(settings), "reason": reason} for settings, reason in self.refused],
            "plan": asdict(self.plan),
            "seconds": round(self.seconds, 1),
            "output": str(self.output),
        }

    def _firsts(self) -> list[Mapping[str, Any]]:
        return [row for row in self.records if row["part"] == "search" and row["seed"] == self.plan.seeds[0]]

    def _gathered(self, part: str, settings: Mapping[str, Any], seeds: Sequence[int]) -> Tried:
        """Accuracies of these settings, of the seeds that ran and did not fail."""
        by_seed = {
            row["seed"]: row["accuracy"]
            for row in self.records
            if row["part"] == part and row["settings"] == settings and "accuracy" in row
        }
        return Tried(settings, tuple(by_seed[seed] for seed in seeds if seed in by_seed))


def verdict_text(result: SweepResult) -> str:
    """The conclusion of a sweep, in one or two sentences."""
    if result.chosen is None:
        return "No winner: no settings did better on the validation problems than those that the sweep started from."
    name = settings_text(result.chosen)
    if result.difference is None:
        broken = [row for row in result.records if row["part"] == "judge" and "failure" in row]
        if not broken:
            return f"No final comparison yet: the best settings on the validation problems are {name}."
        return (
            f"No winner: with new seeds a run failed ({settings_text(broken[0]['settings'])}: {broken[0]['failure']})."
        )
    against = f"{result.difference:+} against the start, seed by seed"
    if result.outcome == "winner":
        return f"Winner: {name}. {against}."
    if result.outcome == "worse":
        return f"No winner: {name} did best on the validation problems, but does worse on new ones: {against}."
    return (
        f"No winner: {name} did best on the validation problems, but with new seeds the interval of its gain contains "
        f"0: {against}. More seeds would narrow it."
    )


def sweep_text(result: SweepResult) -> str:
    """Table, final comparison and conclusion as Markdown, which is readable in a terminal too."""
    plan = result.plan
    lines = ["| settings | validation, mean % | 95% interval | each seed |", "|---|---|---|---|"]
    for setting in result.tried:
        mark = " (start)" if setting.settings == result.start else ""
        lines.append(
            f"| {settings_text(setting.settings)}{mark} | {_percent(setting.estimate.value)} | "
            f"{_interval(setting.estimate)} | {_each(setting)} |"
        )
    lines += ["", f"Intervals over {len(plan.seeds)} seeds, on {plan.num_validation} training problems set aside."]
    lines += ["", best_run_text(result)]
    if result.refused:
        lines += ["", "Not valid, or failed:", ""]
        lines += [f"- {line}" for line in refused_lines(result)]
    if result.judged is not None:
        lines += [
            "",
            f"Final comparison on {plan.num_heldout} held-out problems, with {plan.judge_seeds} new seeds:",
            "",
        ]
        lines += [
            f"- {name}: {_percent(setting.estimate.value)}% [{_interval(setting.estimate)}], seeds {_each(setting)}"
            for name, setting in zip(("start", "chosen"), result.judged, strict=True)
        ]
    return "\n".join([*lines, "", verdict_text(result)])


def refused_lines(result: SweepResult) -> list[str]:
    """Each reason once, with the number of settings that it applies to, or which one it is."""
    reasons: dict[str, list[Mapping[str, Any]]] = {}
    for settings, reason in result.refused:
        reasons.setdefault(reason, []).append(settings)
    return [
        f"{reason} ({settings_text(settings[0]) if len(settings) == 1 else f'{len(settings)} settings'})"
        for reason, settings in reasons.items()
    ]


def best_run_text(result: SweepResult) -> str:
    """The best single run, which a careless report would have shown, and the mean of its settings."""
    best = max(result.tried, key=lambda setting: max(setting.accuracies))
    return (
        f"The best single run solved {_percent(max(best.accuracies))}%; its settings solve "
        f"{_percent(best.estimate.value)}% on average."
    )


def _row(setting: Tried) -> dict[str, Any]:
    return {"settings": dict(setting.settings), "accuracies": list(setting.accuracies), **asdict(setting.estimate)}


def _percent(share: float) -> str:
    return f"{100 * share:.0f}"


def _interval(estimate: Estimate) -> str:
    low, high = (_percent(min(1.0, max(0.0, end))) for end in (estimate.low, estimate.high))
    return f"{low} to {high}"


def _each(setting: Tried) -> str:
    return " ".join(map(_percent, setting.accuracies))


def sweep_figure(result: SweepResult) -> Figure:
    """The accuracy of each setting on every seed, and how well the chosen settings do on new seeds.

    Left: the settings with the best mean (at most `MAX_ROWS`) and the start; each seed is a point. Right, where there
    was a final comparison: start and chosen settings on held-out problems; each new seed is a line.
    """
    from grpo_edu.figures.style import sheet

    ranked = enumerate(result.tried)
    rows = [row for place, row in ranked if place < MAX_ROWS or row.settings == result.start]
    judged = result.judged
    figure = sheet(9.0, 1.6 + 0.36 * max(5, len(rows)))
    cells = figure.add_gridspec(1, 2, width_ratios=(2.2, 1)) if judged else figure.add_gridspec(1, 1)
    _draw_settings(figure.add_subplot(cells[0, 0]), rows, result)
    if judged:
        _draw_judgment(figure.add_subplot(cells[0, 1]), judged, result.outcome)
    return figure


def _draw_settings(axes: Axes, rows: Sequence[Tried], result: SweepResult) -> None:
    from grpo_edu.figures.style import intervals, look, name_rows, percent, style_axes

    style_axes(axes, "Chosen by: validation problems", "", "solved (%), mean with its interval over the seeds")
    for number, is_start in enumerate((False, True)):
        kept = [(place, row) for place, row in enumerate(rows) if (row.settings == result.start) is is_start]
        if not kept:  # nothing but the start could be tried
            continue
        means = [percent(row.estimate.value, row.estimate.low, row.estimate.high) for _, row in kept]
        intervals(axes, number, means, [place for place, _ in kept])
        points = [(100 * share, place + 0.22) for place, row in kept for share in row.accuracies]
        axes.plot(*zip(*points, strict=True), linestyle="none", **(look(number) | {"markersize": 3}), alpha=0.6)
    name_rows(axes, [_label(row) + (" (start)" if row.settings == result.start else "") for row in rows])
    axes.set_xlim(0, 100)


def _draw_judgment(axes: Axes, judged: tuple[Tried, Tried], outcome: str) -> None:
    from grpo_edu.figures.style import INK, intervals, percent, style_axes

    style_axes(axes, f"Held out: {outcome}", "solved (%)", "")
    for before, after in zip(*(row.accuracies for row in judged), strict=True):
        axes.plot([0, 1], [100 * before, 100 * after], color=INK, linewidth=0.8, alpha=0.5)
    for place, row in enumerate(judged):
        estimate = row.estimate
        intervals(axes, 1 - place, [place], [percent(estimate.value, estimate.low, estimate.high)], capsize=4)
    axes.set_xticks([0, 1], ["start", "chosen"])
    axes.set_xlim(-0.4, 1.4)
    axes.set_ylim(0, 100)


def _label(row: Tried) -> str:
    """Settings on two lines if they are long."""
    parts = settings_text(row.settings).split(", ")
    half = (len(parts) + 1) // 2
    return ", ".join(parts) if len(parts) < 3 else ", ".join(parts[:half]) + "\n" + ", ".join(parts[half:])
