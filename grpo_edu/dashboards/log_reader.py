"""Read the log of a run, also of another trainer, and show its curves and what they say."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import ipywidgets as widgets

from grpo_edu.dashboards.base import Dashboard
from grpo_edu.figures.curves import training_curves
from grpo_edu.runs.log_diagnosis import Diagnosis, diagnose
from grpo_edu.runs.metric_logs import Row, parse_metrics, read_metrics


class LogDiagnosis(Dashboard):
    """Choose a log: its curves, what they show, the likely causes in order, and what the log cannot tell.

    Args:
        log: file or folder of a run to begin with; None waits for a file that the reader chooses.

    >>> board = LogDiagnosis()
    >>> board.read(lambda: parse_metrics(b"not a log", "notes.txt"))
    >>> "notes.txt is not a supported log" in board.message.value
    True
    """

    def __init__(self, log: str | Path | None = None) -> None:
        self.diagnosis: Diagnosis | None = None
        self.file = widgets.FileUpload(description="Choose a log", tooltip="a file on your computer", multiple=False)
        self.file.observe(self._chosen, "value")
        self.report = widgets.HTML()
        about = (
            "Choose the log of a GRPO run: metrics.jsonl, TRL's trainer_state.json or what it printed, verl's console "
            "or file output, a CSV or JSON lines export of Weights & Biases, or a TensorBoard event file."
        )
        super().__init__("What is wrong with this run?", [self.file], about)
        self.stage.children = (*self.stage.children, self.report)
        if log is None:
            self.say(
                "No log is chosen yet. A run that was saved has one in its folder: metrics.jsonl. The file is read by "
                "this kernel, and is not kept."
            )
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
        self.show(figure, f"Curves over {self.diagnosis.count} logged steps")
        seen = [finding.sees for finding in self.diagnosis.findings]
        self.say(" ".join(seen) or "Nothing in this log points to a fault. That is not proof: see what it cannot tell.")
        self.report.value = report_html(self.diagnosis)

    def _chosen(self, change: dict) -> None:
        for file in change["new"]:
            self.read(partial(parse_metrics, bytes(file["content"]), file["name"]))


def report_html(diagnosis: Diagnosis) -> str:
    """Return the findings with evidence and causes, and below what is normal and what the log cannot tell."""
    parts = []
    for finding in diagnosis.findings:
        parts.append(f"<h3>{html.escape(finding.sees)}</h3>{_list('ul', finding.evidence)}")
        causes = (f"{cause.what} {cause.remedy}" for cause in finding.causes)
        parts.append(f"Likely causes, the most likely first, and what to try:{_list('ol', causes)}")
    for title, texts in (("Normal here", diagnosis.normal), ("What this log cannot tell", diagnosis.unknown)):
        parts.append(f"<h3>{title}</h3>{_list('ul', texts)}" if texts else "")
    return "".join(parts)


def _list(tag: str, texts: Iterable[str]) -> str:
    return f"<{tag}>{''.join(f'<li>{html.escape(text)}</li>' for text in texts)}</{tag}>"
