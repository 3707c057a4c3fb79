"""Picture of a sweep: what each setting solved on every seed, and what the chosen one is worth on new seeds.

As in `grpo_edu.figures`: data in, a `matplotlib.figure.Figure` out, no pyplot state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from grpo_edu.figure_style import INK, look, sheet, style_axes
from grpo_edu.sweeps import settings_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from grpo_edu.sweep_results import SweepResult, Tried

MOST_ROWS = 14  # settings that a picture shows; the text has all
_WIDTH = 9.0  # inches: settings are long names


def sweep_figure(result: SweepResult) -> Figure:
    """Left: the settings, best mean first, each seed a point, with the interval over the seeds; the start is marked.
    Right: start and chosen on held-out problems, each new seed a line between them.

    The right half is absent where nothing was judged. Of many settings the best `MOST_ROWS` and the start are shown.
    """
    rows = _shown(result)
    judged = result.judged
    figure = sheet(_WIDTH, 1.6 + 0.36 * max(5, len(rows)))
    cells = figure.add_gridspec(1, 2, width_ratios=(2.2, 1)) if judged else figure.add_gridspec(1, 1)
    _draw_settings(figure.add_subplot(cells[0, 0]), rows, result)
    if judged:
        _draw_judgment(figure.add_subplot(cells[0, 1]), judged, result.outcome)
    return figure


def _shown(result: SweepResult) -> list[Tried]:
    """The best settings, and the start wherever it stands."""
    return [row for place, row in enumerate(result.tried) if place < MOST_ROWS or row.settings == result.start]


def _draw_settings(axes: Axes, rows: Sequence[Tried], result: SweepResult) -> None:
    style_axes(axes, "Chosen by: validation problems", "", "solved (%), mean with its interval over the seeds")
    for number, is_start in enumerate((False, True)):
        kept = [(place, row) for place, row in enumerate(rows) if (row.settings == result.start) is is_start]
        means = [100 * row.estimate.value for _, row in kept]
        halves = [100 * (row.estimate.high - row.estimate.value) for _, row in kept]
        style = look(number)
        axes.errorbar(means, [place for place, _ in kept], xerr=halves, linestyle="none", capsize=3,
                      **style)  # fmt: skip
        points = [(100 * share, place + 0.22) for place, row in kept for share in row.accuracies]
        axes.plot(*zip(*points, strict=True), linestyle="none", **(style | {"markersize": 3}), alpha=0.6)
    axes.set_yticks(
        range(len(rows)), [_label(row) + (" (start)" if row.settings == result.start else "") for row in rows]
    )
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 100)
    axes.grid(visible=False, axis="y")


def _draw_judgment(axes: Axes, judged: tuple[Tried, Tried], outcome: str) -> None:
    style_axes(axes, f"Held out: {outcome}", "solved (%)", "")
    for before, after in zip(*(row.accuracies for row in judged), strict=True):
        axes.plot([0, 1], [100 * before, 100 * after], color=INK, linewidth=0.8, alpha=0.5)
    for place, row in enumerate(judged):
        estimate = row.estimate
        axes.errorbar([place], [100 * estimate.value], yerr=[100 * (estimate.high - estimate.value)], capsize=4,
                      **look(1 - place))  # fmt: skip
    axes.set_xticks([0, 1], ["start", "chosen"])
    axes.set_xlim(-0.4, 1.4)
    axes.set_ylim(0, 100)


def _label(row: Tried) -> str:
    """Settings over two lines where they are long."""
    parts = settings_text(row.settings).split(", ")
    half = (len(parts) + 1) // 2
    return ", ".join(parts) if len(parts) < 3 else ", ".join(parts[:half]) + "\n" + ", ".join(parts[half:])
