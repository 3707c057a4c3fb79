"""What a sweep found: each setting with an interval over seeds, and a winner only where new seeds show one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_edu.forgetting import Estimate, mean_estimate
from grpo_edu.sweeps import SweepPlan, settings_text

PARTS = ("search", "judge")  # on validation problems, and on held-out ones


@dataclass(frozen=True)
class Tried:
    """Settings that were trained with every seed. accuracies: shares of problems solved, in the order of the seeds."""

    settings: Mapping[str, Any]
    accuracies: tuple[float, ...]

    @property
    def estimate(self) -> Estimate:
        """Mean over the seeds, with its interval."""
        return mean_estimate(self.accuracies)


@dataclass(frozen=True)
class SweepResult:
    """All runs of a sweep, and what follows from them.

    output: its folder. start: the settings that it started from. seconds: of all runs together.
    records: one a run, with part (of `PARTS`), settings, seed, and accuracy or failure.
    """

    output: Path
    plan: SweepPlan
    start: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]]

    @property
    def seconds(self) -> float:
        """Of all runs together."""
        return sum(record.get("seconds", 0.0) for record in self.records)

    @property
    def tried(self) -> list[Tried]:
        """The settings that ran with every seed, the best mean on validation problems first."""
        found = [self._gathered("search", record["settings"], self.plan.seeds) for record in self._firsts()]
        whole = [setting for setting in found if len(setting.accuracies) == len(self.plan.seeds)]
        return sorted(whole, key=lambda setting: -setting.estimate.value)

    @property
    def refused(self) -> list[tuple[Mapping[str, Any], str]]:
        """Settings that are impossible, or broke on a seed, each with the reason."""
        return [(record["settings"], record["failure"]) for record in self.records if "failure" in record]

    @property
    def chosen(self) -> Mapping[str, Any] | None:
        """The settings to judge: the best mean; None where that is the start."""
        best = self.tried[0].settings
        return None if best == self.start else best

    @property
    def judged(self) -> tuple[Tried, Tried] | None:
        """Start and chosen on held-out problems with new seeds; None where nothing was chosen or a run broke."""
        if self.chosen is None:
            return None
        pair = [self._gathered("judge", settings, self.plan.new_seeds) for settings in (self.start, self.chosen)]
        whole = all(len(setting.accuracies) == self.plan.judge_seeds for setting in pair)
        return (pair[0], pair[1]) if whole else None

    @property
    def difference(self) -> Estimate | None:
        """Chosen minus start, seed by seed, with its interval over the new seeds."""
        if self.judged is None:
            return None
        start, chosen = self.judged
        return paired_difference(start.accuracies, chosen.accuracies)

    @property
    def outcome(self) -> str:
        """`outcome` of the difference; "no winner" where nothing was judged."""
        return "no winner" if self.difference is None else outcome(self.difference)

    def to_dict(self) -> dict[str, Any]:
        """The numbers, ready for JSON."""
        return {
            "outcome": self.outcome,
            "start": dict(self.start),
            "chosen": self.chosen and dict(self.chosen),
            "difference": self.difference and self.difference.to_dict(),
            "judged": self.judged and [_row(setting) for setting in self.judged],
            "tried": [_row(setting) for setting in self.tried],
            "refused": [{"settings": dict(settings), "reason": reason} for settings, reason in self.refused],
            "plan": self.plan.to_dict(),
            "seconds": round(self.seconds, 1),
            "output": str(self.output),
        }

    def _firsts(self) -> list[Mapping[str, Any]]:
        return [row for row in self.records if row["part"] == "search" and row["seed"] == self.plan.seeds[0]]

    def _gathered(self, part: str, settings: Mapping[str, Any], seeds: Sequence[int]) -> Tried:
        """What the runs of these settings reached, one a seed that is there and did not break."""
        by_seed = {
            row["seed"]: row["accuracy"]
            for row in self.records
            if row["part"] == part and row["settings"] == settings and "accuracy" in row
        }
        return Tried(settings, tuple(by_seed[seed] for seed in seeds if seed in by_seed))


def paired_difference(start: Sequence[float], chosen: Sequence[float]) -> Estimate:
    """Mean over seeds of chosen minus start, with Student's interval; raises ValueError where seeds are missing.

    >>> print(paired_difference([0.5, 0.6, 0.5], [0.6, 0.7, 0.6]))
    +10 points [+10, +10]
    """
    if len(start) != len(chosen):
        raise ValueError(f"chosen: {len(chosen)} seeds against {len(start)} of start; give the same seeds")
    return mean_estimate([after - before for before, after in zip(start, chosen, strict=True)])


def outcome(difference: Estimate) -> str:
    """What the difference between chosen and start allows to say: "winner", "no winner" or "worse".

    >>> outcome(Estimate(0.1, 0.02, 0.18)), outcome(Estimate(0.1, -0.02, 0.22)), outcome(Estimate(-0.1, -0.2, -0.05))
    ('winner', 'no winner', 'worse')
    """
    if difference.low > 0:
        return "winner"
    return "worse" if difference.high < 0 else "no winner"


def verdict_text(result: SweepResult) -> str:
    """The sweep's last word, in one or two sentences."""
    if result.chosen is None:
        return "No winner: on the validation problems nothing did better than the settings that the sweep started from."
    name = settings_text(result.chosen)
    if result.difference is None:
        broken = [row for row in result.records if row["part"] == "judge" and "failure" in row]
        if not broken:
            return f"Not judged yet: the best on the validation problems is {name}."
        return (
            f"No winner: with new seeds a run broke ({settings_text(broken[0]['settings'])}: {broken[0]['failure']})."
        )
    against = f"{result.difference} against the start, seed by seed"
    if result.outcome == "winner":
        return f"Winner: {name}. {against}."
    if result.outcome == "worse":
        return f"No winner: {name} did best on the validation problems, and does worse on new ones: {against}."
    return (
        f"No winner: the best on the validation problems was {name}, but with new seeds its interval holds 0: "
        f"{against}. More seeds would narrow it."
    )


def sweep_text(result: SweepResult) -> str:
    """Table, judgment and verdict as Markdown, which a terminal shows well too."""
    plan = result.plan
    lines = ["| settings | validation, mean % | 95% interval | each seed |", "|---|---|---|---|"]
    for setting in result.tried:
        mark = " (start)" if setting.settings == result.start else ""
        lines.append(f"| {settings_text(setting.settings)}{mark} | {_percent(setting.estimate.value)} | "
                     f"{_interval(setting.estimate)} | {_each(setting)} |")  # fmt: skip
    lines += ["", f"Intervals over {len(plan.seeds)} seeds, on {plan.num_validation} training problems kept aside."]
    lines += ["", luckiest_text(result)]
    if result.refused:
        lines += ["", "Not tried, or broken:", ""]
        lines += [f"- {line}" for line in refused_lines(result)]
    if result.judged is not None:
        lines += ["", f"Judged once, on {plan.num_heldout} held-out problems, trained anew with {plan.judge_seeds} "
                  "seeds that chose nothing:", ""]  # fmt: skip
        lines += [
            f"- {name}: {_percent(setting.estimate.value)}% [{_interval(setting.estimate)}], seeds {_each(setting)}"
            for name, setting in zip(("start", "chosen"), result.judged, strict=True)
        ]
    return "\n".join([*lines, "", verdict_text(result)])


def refused_lines(result: SweepResult) -> list[str]:
    """The reasons, each once, with how many settings it befell, or which one."""
    reasons: dict[str, list[Mapping[str, Any]]] = {}
    for settings, reason in result.refused:
        reasons.setdefault(reason, []).append(settings)
    return [
        f"{reason} ({settings_text(befell[0]) if len(befell) == 1 else f'{len(befell)} settings'})"
        for reason, befell in reasons.items()
    ]


def luckiest_text(result: SweepResult) -> str:
    """The best single run beside the mean of its settings: what a report of the best run would have claimed."""
    best = max(result.tried, key=lambda setting: max(setting.accuracies))
    return (
        f"The luckiest single run solved {_percent(max(best.accuracies))}%; its settings solve "
        f"{_percent(best.estimate.value)}% on average."
    )


def _row(setting: Tried) -> dict[str, Any]:
    return {"settings": dict(setting.settings), "accuracies": list(setting.accuracies), **setting.estimate.to_dict()}


def _percent(share: float) -> str:
    return f"{100 * share:.0f}"


def _interval(estimate: Estimate) -> str:
    low, high = (_percent(min(1.0, max(0.0, end))) for end in (estimate.low, estimate.high))
    return f"{low} to {high}"


def _each(setting: Tried) -> str:
    return " ".join(map(_percent, setting.accuracies))
