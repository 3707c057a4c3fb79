"""Stored runs next to each other: their accuracies with intervals, and the paired test of two of them."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets

from grpo_edu.dashboards.base import Explorer, button_row, offer, say_html, several
from grpo_edu.dashboards.worker import Stopped, Worker, run_slot, words_of
from grpo_edu.figures.curves import overlaid_curves
from grpo_edu.figures.evaluation import interval_rows
from grpo_edu.problems.hub import read_run_config
from grpo_edu.problems.templates import data_dir
from grpo_edu.runs.comparison import settings_that_differ
from grpo_edu.runs.completions import by_reward, read_completions
from grpo_edu.runs.log import read_log
from grpo_edu.runs.record import evaluation_settings, read_run_result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from grpo_edu.evaluation import Comparison


# What is shown if there is no run: `python -m benchmarks.dashboards --parts recordings smollm2_run`
_RECORDED = {"tiny, word problems": "dashboard_run.json", "SmolLM2, instructions": "smollm2_run.json"}


def stored_runs(parent: str | Path) -> dict[str, dict[str, Any]]:
    """Name → config and result of each run in a folder that was evaluated to its end, in the order of the names."""
    found = {}
    for folder in sorted(Path(parent).glob("*")):
        config = read_run_config(folder)
        result = None if config is None else read_run_result(folder)
        if result is not None and result["accuracy_after"]:
            found[folder.name] = {"folder": folder, "config": config, "result": result}
    return found


def _named(settings: Mapping[str, Any]) -> str:
    """Return the first three settings in words.

    >>> _named({"seed": 1, "rewards": ["accuracy", "format"]})
    'seed 1, rewards accuracy + format'
    """
    said = []
    for key, value in list(settings.items())[:3]:
        text = " + ".join(map(str, value)) if isinstance(value, list) else str(value)
        said.append(f"{key} {text}")
    return ", ".join(said)


class RunComparer(Explorer):
    """Choose stored runs: what differs between them, their rewards over the steps, their accuracy before and after.

    For two runs the paired test lets both models answer the same problems.

    Args:
        parent: the folder in which the runs' folders are.
    """

    def __init__(self, parent: str | Path = "runs") -> None:
        self.parent = Path(parent)
        self.runs = stored_runs(parent)
        self.pick = several("Runs", [], (), rows=6)
        differing = settings_that_differ({name: run["config"] for name, run in self.runs.items()})
        labels = {f"{name}: {_named(rows)}" if rows else name: name for name, rows in differing.items()}
        self.pick.options = list(labels.items())
        self.pick.value = list(self.runs)[:2]
        (self.test,), row = button_row(
            {"Paired test": (self._test, "evaluates both models on the same held-out problems")}
        )
        self.tested, self.curves, self.table = widgets.HTML(), widgets.HTML(), widgets.HTML()
        self.sampled = widgets.HTML()
        self.tested.add_class("grpo-edu-message")
        self.comparison: Comparison | None = None
        about = "Choose stored runs. Dots: held-out accuracy, sampled; lines: 95% Wilson intervals."
        super().__init__("Stored runs", [self.pick, row, self.tested], about)
        self.stage.children = (self.message, self.table, self.picture, self.curves, self.sampled)

    def draw(self) -> tuple[Figure, str]:
        """Draw the accuracies, one row per run; next to them the table of settings and the curves."""
        names = list(self.pick.value)
        self._offer()
        if not names:
            self.picture.value = self.curves.value = self.table.value = self.sampled.value = ""
            if not self.runs:
                return self._recorded()
            raise ValueError("No run is chosen. Choose one in the list, or two for the paired test.")
        results = {name: self.runs[name]["result"] for name in names}
        trials = {result["accuracy_after"]["n"] for result in results.values()}
        if len(trials) > 1:
            raise ValueError(
                f"these runs were evaluated on different numbers of problems, {sorted(trials)}; choose others"
            )
        differing = settings_that_differ({name: self.runs[name]["config"] for name in names})
        labels = {name: _named(rows) or name for name, rows in differing.items()}
        if len(set(labels.values())) < len(names):  # they differ in more than the name says
            labels = {name: name for name in names}
        self.table.value = _settings_table(differing, labels)
        self._draw_curves(labels)
        self.sampled.value = "".join(_sampled_table(name, self.runs[name]["folder"]) for name in names)
        counts = {
            label: [result[f"accuracy_{label}"]["k"] for result in results.values()] for label in ("before", "after")
        }
        figure = interval_rows(counts, list(labels.values()), trials=trials.pop(), title="Stored runs")
        shares = [f"{labels[name]} {result['accuracy_after']['accuracy']:.0%}" for name, result in results.items()]
        return figure, f"Accuracy after training: {', '.join(shares)}"

    def _recorded(self) -> tuple[Figure, str]:
        """Draw the rewards of two recorded runs, which are shown until there is a run to compare."""
        logs = {
            label: json.loads((data_dir() / "curves" / file).read_text(encoding="utf-8"))["history"]
            for label, file in _RECORDED.items()
        }
        ends = ", ".join(f"{label} ends at {log[-1]['reward']:.2f}" for label, log in logs.items())
        return overlaid_curves(logs), f"Mean reward over the steps: {ends}"

    def _draw_curves(self, labels: Mapping[str, str]) -> None:
        """Draw the rewards of the chosen runs over each other."""
        logs = {label: read_log(self.runs[name]["folder"] / "metrics.jsonl") for name, label in labels.items()}
        ends = ", ".join(f"{label} ends at {log[-1]['reward']:.2f}" for label, log in logs.items())
        self.curves.value = self.image(overlaid_curves(logs), f"Mean reward over the steps: {ends}")

    def words(self) -> str:
        """Each run's own paired test, before against after."""
        if not self.runs:
            return (
                f"There is no evaluated run in {self.parent} yet, so you see two recorded ones. Train a model under "
                "Train and press Save, or run grpo-edu train. Then open this view again."
            )
        results = {name: self.runs[name]["result"] for name in self.pick.value}
        tests = [f"{name} p = {result['p_value']:.2g}" for name, result in results.items()]
        return f"Before and after training, exact McNemar test: {'; '.join(tests)}."

    def _test(self, button: object = None) -> None:
        names = tuple(self.pick.value)
        if self.busy:
            self.tested.value = say_html("Both models are still answering.")
            return
        if len(names) != 2:
            self.tested.value = say_html("Choose two runs in the list, then press Paired test.", wrong=True)
            return
        self.tested.value = say_html("Both models are answering the same problems …")
        offer([self.test], [])
        self.work(lambda worker: self._compare(worker, *names))

    def _offer(self) -> None:
        """Show whether the paired test is possible."""
        offer([self.test], [self.test] * (len(self.pick.value) == 2))

    def _compare(self, worker: Worker, first: str, then: str) -> None:
        """Evaluate both models as the first was evaluated, on the same problems and with the same rewards."""
        from grpo_edu.evaluation import compare
        from grpo_edu.runs.summary import report_evaluation

        settings = evaluation_settings(self.runs[first]["folder"], {})
        with run_slot():
            judged = []
            for name in (first, then):
                worker.goes_on()
                judged.append(report_evaluation(self.runs[name]["folder"], **settings, progress=False).evaluation)
        self.comparison = found = compare(*judged)
        self.tested.value = say_html(f"From {first} to {then}, exact McNemar test: {found}")

    def ended(self, error: BaseException | None) -> None:
        """Show the error of a test that failed."""
        self._offer()
        if error is not None and not isinstance(error, Stopped):
            self.tested.value = say_html(words_of(error), wrong=True)


def _sampled_table(name: str, folder: Path) -> str:
    """Return the completions with the highest and lowest reward of a run's last step; "" if the run kept none."""
    try:
        sampled = by_reward(read_completions(folder), best=True)
    except ValueError:
        return ""
    rows = "".join(
        f'<tr><td style="text-align:left;overflow-wrap:anywhere">{html.escape(one.completion)}</td>'
        f"<td>{one.reward:.2f}</td><td>{one.advantage:+.2f}</td></tr>"
        for one in (*sampled[:2], *sampled[-2:])
    )
    caption = f"<caption>Sampled in step {sampled[0].step} of {html.escape(name)}, best and worst</caption>"
    return f"<table>{caption}<tr><th>completion</th><th>reward</th><th>advantage</th></tr>{rows}</table>"


def _settings_table(differing: Mapping[str, Mapping[str, Any]], labels: Mapping[str, str]) -> str:
    """Return a row for each setting that is not the same in all runs, a column for each run."""
    keys = list(next(iter(differing.values())))
    if len(differing) < 2:
        return ""
    if not keys:
        return "<p>These runs have the same settings.</p>"

    def row(kind: str, cells: list[str]) -> str:
        inside = "".join(f"<{kind}>{html.escape(cell)}</{kind}>" for cell in cells)
        return f"<tr>{inside}</tr>"

    head = row("th", ["setting", *labels])
    lines = [row("td", [key, *(str(rows[key]) for rows in differing.values())]) for key in keys]
    return f"<table><caption>Settings that differ</caption>{head}{''.join(lines)}</table>"
