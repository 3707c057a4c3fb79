"""Read the log of a run, also of another trainer, and show its curves and what they say."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import ipywidgets as widgets

from grpo_edu.dashboards.base import Dashboard, choice, marked_text
from grpo_edu.figures.curves import PANELS, training_curves
from grpo_edu.problems.templates import data_dir
from grpo_edu.runs.log_diagnosis import Diagnosis, diagnose
from grpo_edu.runs.metric_logs import Row, parse_metrics, read_metrics

# What a list offers → the name of a recorded run. The names do not say what is wrong.
EXAMPLES = {"run A": "lr too high", "run B": "G too small", "run C": "stale old log-probabilities", "run D": "healthy"}


class LogDiagnosis(Dashboard):
    """Choose a log: its curves, what they show, the likely causes in order, and what the log cannot tell.

    Args:
        log: file or folder of a run to begin with; None begins with a recorded run.

    >>> board = LogDiagnosis()
    >>> board.read(lambda: parse_metrics(b"not a log", "notes.txt"))
    >>> "notes.txt is not a supported log" in board.message.value
    True
    """

    def __init__(self, log: str | Path | None = None) -> None:
        self.diagnosis: Diagnosis | None = None
        self.file = widgets.FileUpload(description="Choose a log", tooltip="a file on your computer", multiple=False)
        self.file.observe(self._chosen, "value")
        recorded = [("(none)", ""), *EXAMPLES.items()]
        self.example = choice("Or look at a recorded run", recorded, "with a fault, or healthy")
        self.example.observe(self._chose_example, "value")
        self.report = widgets.HTML()
        about = (
            "Choose the log of a GRPO run: metrics.jsonl, TRL's trainer_state.json or what it printed, verl's console "
            "or file output, a CSV or JSON lines export of Weights & Biases, or a TensorBoard event file."
        )
        super().__init__("What is wrong with this run?", [self.file, self.example], about)
        self.stage.children = (*self.stage.children, self.report)
        if log is None:
            self.example.value = next(iter(EXAMPLES.values()))
        else:
            self.read(lambda: read_metrics(log))

    def read(self, rows_of: Callable[[], list[Row]]) -> None:
        """Read a log and show what it says, or in one sentence why it cannot be read."""
        try:
            rows = rows_of()
            self.diagnosis = diagnose(rows)
            figure = training_curves([row for row in rows if row.get("reward") is not None] or rows)
        except (ValueError, OSError) as error:
            self.diagnosis, self.report.value, self.picture.value = None, "", ""
            self.say(str(error), wrong=True)
            return
        columns = {name: [row[key] for row in rows if row.get(key) is not None] for key, name, *_ in PANELS}
        ends = [f"{name} from {values[0]:.3g} to {values[-1]:.3g}" for name, values in columns.items() if values]
        self.show(figure, f"Curves over {self.diagnosis.count} logged steps: {', '.join(ends)}")
        seen = [finding.sees for finding in self.diagnosis.findings]
        self.say(" ".join(seen) or "Nothing in this log points to a fault. That is not proof: see what it cannot tell.")
        self.report.value = report_html(self.diagnosis)

    def _chose_example(self, change: dict) -> None:
        if change["new"]:
            self.read(lambda: _recorded_rows(change["new"]))

    def _chosen(self, change: dict) -> None:
        for file in change["new"]:
            self.example.value = ""
            self.read(partial(parse_metrics, bytes(file["content"]), file["name"]))


def _recorded_rows(name: str) -> list[Row]:
    """Return the rows of a run of `benchmarks.broken_runs` that the package brings, with its first seed."""
    stored = json.loads((data_dir() / "curves" / "broken_runs.json").read_text(encoding="utf-8"))
    columns = stored[name][0]
    steps = zip(*columns.values(), strict=True)
    return [{"step": step, **dict(zip(columns, values, strict=True))} for step, values in enumerate(steps, start=1)]


def report_html(diagnosis: Diagnosis) -> str:
    """Return the findings with evidence and causes, and below what is normal and what the log cannot tell."""
    parts = []
    for finding in diagnosis.findings:
        parts.append(f"<h3>{marked_text(finding.sees)}</h3>{_list('ul', finding.evidence)}")
        causes = (f"{cause.what} {cause.remedy}" for cause in finding.causes)
        parts.append(f"Likely causes, the most likely first, and what to try:{_list('ol', causes)}")
    for title, texts in (("Normal here", diagnosis.normal), ("What this log cannot tell", diagnosis.unknown)):
        parts.append(f"<h3>{title}</h3>{_list('ul', texts)}" if texts else "")
    return "".join(parts)


def _list(tag: str, texts: Iterable[str]) -> str:
    return f"<{tag}>{''.join(f'<li>{marked_text(text)}</li>' for text in texts)}</{tag}>"
