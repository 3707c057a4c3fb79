"""Stored runs next to each other: their accuracies with intervals, and the paired test of two of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets

from grpo_edu.dashboards.base import STYLE, WIDE, Explorer
from grpo_edu.dashboards.worker import RunSlot, Stopped, Worker, words_of
from grpo_edu.figures.evaluation import interval_rows
from grpo_edu.runs.folder import model_source, read_run_config
from grpo_edu.runs.request import default_config, heldout_problems

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from grpo_edu.evaluation import Comparison


def stored_runs(parent: str | Path) -> dict[str, dict[str, Any]]:
    """Name → config and result of each run in a folder that was evaluated to its end, in the order of the names."""
    found = {}
    for folder in sorted(Path(parent).glob("*")):
        config, file = read_run_config(folder), folder / "result.json"
        if config is None or not file.is_file():
            continue
        result = json.loads(file.read_text(encoding="utf-8"))
        if result.get("accuracy_after"):
            found[folder.name] = {"folder": folder, "config": config, "result": result}
    return found


class RunComparer(Explorer):
    """Choose stored runs: accuracy before and after with 95% intervals; for two of them the paired test.

    Args:
        parent: the folder in which the runs' folders are.
    """

    def __init__(self, parent: str | Path = "runs") -> None:
        self.parent = Path(parent)
        self.runs = stored_runs(parent)
        self.pick = widgets.SelectMultiple(
            options=list(self.runs),
            value=list(self.runs)[:2],
            description="Runs",
            rows=6,
            style=STYLE,
            layout=widgets.Layout(**WIDE),
            tooltip="several with Shift or Ctrl",
        )
        self.test = widgets.Button(
            description="Paired test", tooltip="evaluates both models on the same held-out problems"
        )
        self.test.on_click(self._test)
        self.tested = widgets.HTML()
        self.comparison: Comparison | None = None
        self.worker: Worker | None = None
        about = "Dots: held-out accuracy, sampled; lines: 95% Wilson intervals."
        super().__init__("Stored runs", [self.pick, self.test, self.tested], about)

    def draw(self) -> tuple[Figure, str]:
        """One row per run."""
        names = list(self.pick.value)
        self.test.disabled = len(names) != 2
        if not names:
            raise ValueError(f"no run is chosen; choose an evaluated run in {self.parent}, or train a model first")
        results = {name: self.runs[name]["result"] for name in names}
        trials = {result["accuracy_after"]["n"] for result in results.values()}
        if len(trials) > 1:
            raise ValueError(
                f"these runs were evaluated on different numbers of problems, {sorted(trials)}; choose others"
            )
        counts = {
            label: [result[f"accuracy_{label}"]["k"] for result in results.values()] for label in ("before", "after")
        }
        figure = interval_rows(counts, names, trials=trials.pop(), title="Stored runs")
        shares = [f"{name} {result['accuracy_after']['accuracy']:.0%}" for name, result in results.items()]
        return figure, f"Accuracy after training: {', '.join(shares)}"

    def words(self) -> str:
        """Each run's own paired test, before against after."""
        results = {name: self.runs[name]["result"] for name in self.pick.value}
        tests = [f"{name} p = {result['p_value']:.2g}" for name, result in results.items()]
        return f"Before and after training, exact McNemar test: {'; '.join(tests)}."

    def close(self) -> None:
        """Stop a test when the widget is closed."""
        if self.worker is not None:
            self.worker.stop()
        super().close()

    def _test(self, button: object = None) -> None:
        if self.test.disabled or (self.worker is not None and self.worker.running):
            return
        self.test.disabled, self.tested.value = True, "Both models are answering the same problems …"
        names = tuple(self.pick.value)
        self.worker = Worker(lambda worker: self._compare(worker, *names), self._ended)
        self.worker.start()

    def _compare(self, worker: Worker, first: str, then: str) -> None:
        """Evaluate both models on the problems that the first was evaluated on."""
        from grpo_edu.evaluation import compare, evaluate
        from grpo_edu.models import load_policy

        config = self.runs[first]["config"]
        problems = heldout_problems(config)
        length = default_config(config["data"]).max_completion_length
        with RunSlot():
            judged = []
            for name in (first, then):
                worker.goes_on()
                policy = load_policy(model_source(self.runs[name]["folder"]))
                judged.append(evaluate(*policy, problems, max_completion_length=length))
        self.comparison = found = compare(*judged)
        self.tested.value = (
            f"{then} − {first}: {100 * found.difference:+.1f} points "
            f"[{100 * found.low:+.1f}, {100 * found.high:+.1f}], exact McNemar p = {found.p_value:.2g}"
        )

    def _ended(self, error: BaseException | None) -> None:
        self.test.disabled = len(self.pick.value) != 2
        if error is not None and not isinstance(error, Stopped):
            self.tested.value = words_of(error)
