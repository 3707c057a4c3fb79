"""The accuracy matrix over the stages of a curriculum, by method and strength, next to no protection."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_edu.dashboards.base import Explorer, choice
from grpo_edu.figures.continual import matrix_figure
from grpo_edu.problems.templates import data_dir

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class ForgettingDashboard(Explorer):
    """Forgetting after each stage, per task: choose curriculum, method and strength (λ for EWC).

    Args:
        study: the result of `python -m benchmarks.curriculum`, or the path of its JSON file; the one that comes with
            the package where left out.

    Raises ValueError: a study without runs; OSError: a file that cannot be read.

    >>> run = {"curriculum": "two", "seed": 0, "tasks": ["a", "b"], "num_problems": [10, 10],
    ...        "solved": [[5, 1], [9, 2], [3, 8]]}
    >>> board = ForgettingDashboard({"runs": [{**run, "arm": "none"}, {**run, "arm": "ewc 100"}]})
    >>> board.method.value, board.strength.value
    ('ewc', '100')
    """

    def __init__(self, study: Mapping[str, Any] | str | Path | None = None) -> None:
        if study is None:
            study = data_dir() / "curves" / "curriculum.json"
        if isinstance(study, (str, Path)):
            content = json.loads(Path(study).read_text(encoding="utf-8"))
        else:
            content = study
        self.runs = list(content["runs"]) if "runs" in content else []
        if not self.runs:
            raise ValueError("study has no runs; make them with python -m benchmarks.curriculum")
        names = dict.fromkeys(run["curriculum"] for run in self.runs)
        self.curriculum = choice("Curriculum", names, "the stages, one after the other")
        self.method = choice("Method", [""], "what protects the earlier tasks")
        self.strength = choice("Strength (λ)", [""], "λ of EWC and L2, share of replay, β of the KL")
        self._fill_methods()
        about = "Left: without protection. Right: with the chosen method. Framed: the task of each stage."
        super().__init__("Forgetting", [self.curriculum, self.method, self.strength], about)

    def matrix(self, arm: str) -> list[list[float]]:
        """(T + 1) × T shares of problems solved, the mean over the seeds of an arm."""
        runs = [run for run in self.runs if (run["curriculum"], run["arm"]) == (self.curriculum.value, arm)]
        shares = [
            [[k / n for k, n in zip(row, run["num_problems"], strict=True)] for row in run["solved"]] for run in runs
        ]
        return [[sum(cells) / len(cells) for cells in zip(*rows, strict=True)] for rows in zip(*shares, strict=True)]

    def draw(self) -> tuple[Figure, str]:
        """Both matrices side by side."""
        arm, tasks = self._arm(), self._some_run()["tasks"]
        self.arms = [name for name in dict.fromkeys(("none", arm)) if name in self._arms()]
        figure = matrix_figure({name: self.matrix(name) for name in self.arms}, tasks)
        ends = [f"{name}: " + ", ".join(f"{100 * share:.0f}" for share in self.matrix(name)[-1]) for name in self.arms]
        return figure, f"Problems solved (%) of {', '.join(tasks)} after the last stage. {'; '.join(ends)}"

    def words(self) -> str:
        """Return how much of the earlier tasks was lost, by arm."""
        from grpo_edu.continual.forgetting import forgetting

        lost = [f"{name} {100 * forgetting(self.matrix(name)):.0f} points" for name in self.arms]
        seeds = len({run["seed"] for run in self.runs if run["arm"] == self._arm()})
        return f"Forgotten, mean over {seeds} seeds: {'; '.join(lost)}."

    def _arms(self) -> list[str]:
        return list(dict.fromkeys(run["arm"] for run in self.runs if run["curriculum"] == self.curriculum.value))

    def _arm(self) -> str:
        return f"{self.method.value} {self.strength.value}".strip()

    def _some_run(self) -> dict[str, Any]:
        return next(run for run in self.runs if run["curriculum"] == self.curriculum.value)

    def _fill_methods(self) -> None:
        methods = dict.fromkeys(arm.partition(" ")[0] for arm in self._arms())
        self.method.options = sorted(methods, key=lambda name: name == "none")
        self._fill_strengths()

    def _fill_strengths(self) -> None:
        """Only strengths that were run can be chosen."""
        parts = [arm.partition(" ") for arm in self._arms()]
        self.strength.options = [strength for method, _, strength in parts if method == self.method.value]

    def _changed(self, change: dict) -> None:
        if change["owner"] is getattr(self, "curriculum", None):
            self._fill_methods()
        elif change["owner"] is self.method:
            self._fill_strengths()
        if self._arm() in self._arms():  # while the lists are being filled, a choice may not be there yet
            super()._changed(change)
