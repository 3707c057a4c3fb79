"""Pictures of continual learning: the accuracy matrix, and numbers per method with their intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from grpo_edu.figures.style import (
    INK,
    PAPER,
    SMALL,
    intervals,
    legend_below,
    look,
    name_rows,
    panel_grid,
    percent,
    style_axes,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from grpo_edu.evaluation import Estimate

_DARK = 0.55  # share of the scale from which a number on it is written in white


def matrix_figure(
    accuracies: Mapping[str, Sequence[Sequence[float]]] | Sequence[Sequence[float]], tasks: Sequence[str]
) -> Figure:
    """Accuracy on each task (column) before any stage and after each stage (row); a stage's own task is framed.

    Args:
        accuracies: (T + 1) × T shares, or up to four such matrices by title, drawn side by side.
        tasks: T names.

    >>> figure = matrix_figure([[0.4, 0.1], [0.9, 0.2], [0.3, 0.8]], ["first", "then"])
    >>> [text.get_text() for text in figure.axes[0].texts][:2]
    ['40', '10']
    """
    matrices = accuracies if isinstance(accuracies, Mapping) else {"Problems solved (%)": accuracies}
    count, height = len(matrices), 0.42 * (len(tasks) + 1) + 1.1
    rows = (count + 1) // 2
    figure, grid = panel_grid(count, height=rows * height)
    for number, (axes, (title, matrix)) in enumerate(zip(grid, matrices.items(), strict=True)):
        _draw_matrix(axes, matrix, tasks, title, labeled=count == 1 or number % 2 == count % 2)
    return figure


def _draw_matrix(
    axes: Axes, matrix: Sequence[Sequence[float]], tasks: Sequence[str], title: str, *, labeled: bool
) -> None:
    from matplotlib.patches import Rectangle

    style_axes(axes, title, "", "")
    axes.imshow(matrix, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for row, shares in enumerate(matrix):
        for column, share in enumerate(shares):
            color = PAPER if share > _DARK else INK
            axes.text(column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=SMALL + 1, color=color)
    for task in range(len(tasks)):
        axes.add_patch(
            Rectangle((task - 0.46, task + 0.54), 0.92, 0.92, fill=False, edgecolor=look(1)["color"], linewidth=2)
        )
    axes.set_xticks(range(len(tasks)), [task.replace("_", " ") for task in tasks])
    names = ["before", *(f"after {task.replace('_', ' ')}" for task in tasks)]
    axes.set_yticks(range(len(names)), names if labeled else [""] * len(names))
    axes.tick_params(length=0, labelsize=SMALL + 1)
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)


def estimates_figure(
    estimates: Mapping[str, Mapping[str, Estimate]], *, title: str, xlabel: str = "points, with 95% intervals"
) -> Figure:
    """Draw one row per number with its interval, for example forgetting per method, for one or more groups.

    Args:
        estimates: legend entry → row → estimate. Rows come in the order of their first occurrence.
        title, xlabel: title and label of the picture.

    >>> from grpo_edu.evaluation import Estimate
    >>> figure = estimates_figure({"forgetting": {"none": Estimate(0.3, 0.2, 0.4)}}, title="Forgetting")
    >>> figure.axes[0].get_yticklabels()[0].get_text()
    'none'
    """
    rows = list(dict.fromkeys(row for group in estimates.values() for row in group))
    figure, (axes,) = panel_grid(1, height=1.2 + max(0.42, 0.12 + 0.13 * len(estimates)) * len(rows))
    style_axes(axes, title, "", xlabel)
    axes.axvline(0, color=INK, linewidth=0.8)
    for number, (label, group) in enumerate(estimates.items()):
        shift = min(0.3, 0.7 / len(estimates)) * (number - (len(estimates) - 1) / 2)
        heights = [rows.index(row) + shift for row in group]
        values = [percent(estimate.value, estimate.low, estimate.high) for estimate in group.values()]
        intervals(axes, number, values, heights, label=label, capsize=3 if len(estimates) < 3 else 2)
    name_rows(axes, rows)
    if len(estimates) > 1:
        legend_below(axes)
    return figure
