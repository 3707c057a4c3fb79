"""Pictures of continual learning: the accuracy matrix, forgetting with intervals, stability against plasticity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from grpo_edu.figures.style import (
    GRID,
    INK,
    LEGEND,
    PAPER,
    SMALL,
    intervals,
    legend_above,
    look,
    name_rows,
    note,
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

    Raises:
        ValueError: no matrix, or one of another shape.

    >>> figure = matrix_figure([[0.4, 0.1], [0.9, 0.2], [0.3, 0.8]], ["first", "then"])
    >>> [text.get_text() for text in figure.axes[0].texts][:2]
    ['40', '10']
    """
    matrices = accuracies if isinstance(accuracies, Mapping) else {"Problems solved (%)": accuracies}
    if not matrices:
        raise ValueError("accuracies is empty: give at least one matrix")
    count, height = len(matrices), 0.42 * (len(tasks) + 1) + 1.1
    rows = (count + 1) // 2
    figure, grid = panel_grid(count, height=rows * height)
    for number, (axes, (title, matrix)) in enumerate(zip(grid, matrices.items(), strict=True)):
        if len(matrix) != len(tasks) + 1 or any(len(row) != len(tasks) for row in matrix):
            raise ValueError(
                f"accuracies: {title!r} must have {len(tasks) + 1} rows of {len(tasks)} shares, one per task"
            )
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
    axes.tick_params(length=0)
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)


def estimates_figure(
    estimates: Mapping[str, Mapping[str, Estimate]], *, title: str, xlabel: str = "points, with 95% intervals"
) -> Figure:
    """One row per number with its interval, for example forgetting per method, for one or more groups.

    Args:
        estimates: legend entry → row → estimate. Rows come in the order of their first occurrence.
        title, xlabel: of the picture.

    Raises ValueError where there is nothing to draw.

    >>> from grpo_edu.evaluation import Estimate
    >>> figure = estimates_figure({"forgetting": {"none": Estimate(0.3, 0.2, 0.4)}}, title="Forgetting")
    >>> figure.axes[0].get_yticklabels()[0].get_text()
    'none'
    """
    rows = list(dict.fromkeys(row for group in estimates.values() for row in group))
    if not rows:
        raise ValueError("estimates is empty: give at least one")
    figure, (axes,) = panel_grid(1, height=1.2 + 0.42 * len(rows))
    style_axes(axes, title, "", xlabel)
    axes.axvline(0, color=INK, linewidth=0.8)
    for number, (label, group) in enumerate(estimates.items()):
        shift = 0.3 * (number - (len(estimates) - 1) / 2) if len(estimates) > 1 else 0.0
        heights = [rows.index(row) + shift for row in group]
        values = [percent(estimate.value, estimate.low, estimate.high) for estimate in group.values()]
        intervals(axes, number, values, heights, label=label)
    name_rows(axes, rows)
    if len(estimates) > 1:
        legend_above(axes)
    return figure


def stability_figure(
    curves: Mapping[str, Mapping[str, tuple[float, float]]], *, title: str = "Stability against plasticity"
) -> Figure:
    """Accuracy on the earlier tasks (x) against accuracy on the last task (y); up and to the right is better.

    Args:
        curves: method → strength as a text → (accuracy on the earlier tasks, accuracy on the last), as shares; the
            points of a method are joined in their order, and labeled where it has several.

    Raises ValueError where there is nothing to draw.

    >>> figure = stability_figure({"EWC": {"10": (0.5, 0.9), "1000": (0.8, 0.8)}})
    >>> figure.axes[0].get_legend_handles_labels()[1]
    ['EWC']
    """
    from matplotlib.patheffects import withStroke

    if not any(curves.values()):
        raise ValueError("curves is empty: give at least one point")
    figure, (axes,) = panel_grid(1, height=4.2)
    style_axes(axes, title, "accuracy on the last task (%)", "accuracy on the earlier tasks at the end (%)")
    for number, (method, points) in enumerate(curves.items()):
        xs, ys = zip(*((100 * x, 100 * y) for x, y in points.values()), strict=True)
        axes.plot(xs, ys, linewidth=1.2, label=method, **look(number))
        for text, x, y in zip(points, xs, ys, strict=True):
            if len(points) > 1:
                strength = note(axes, text, (x, y), (5, 5), va="baseline")
                strength.set_path_effects([withStroke(linewidth=3, foreground=PAPER)])
    axes.margins(0.12)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), **LEGEND)  # beside: any corner may hold a point
    return figure


def fisher_shares_figure(shares: Mapping[str, Mapping[str, float]], *, title: str = "Where the Fisher lies") -> Figure:
    """The share of the Fisher information in each part of the model, which shows the parts that EWC protects most.

    Args:
        shares: kind → part of the model → share of the whole, 0 to 1; the same parts for each kind.

    >>> figure = fisher_shares_figure({"true": {"embedding": 0.25, "layers": 0.75}})
    >>> figure.axes[0].get_ylabel()
    'share of the whole (%)'
    """
    parts = list(next(iter(shares.values())))
    figure, (axes,) = panel_grid(1, height=3.4)
    style_axes(axes, title, "share of the whole (%)", "")
    for number, (kind, by_part) in enumerate(shares.items()):
        axes.plot(range(len(parts)), [100 * by_part[part] for part in parts], linewidth=1.2, label=kind, **look(number))
    axes.set_xticks(range(len(parts)), parts)
    axes.set_ylim(bottom=0)
    axes.legend(loc="best", **LEGEND)
    return figure


def valley_figure(
    old: tuple[Sequence[float], Sequence[float]],
    new: tuple[Sequence[float], Sequence[float]],
    paths: Mapping[str, Sequence[Sequence[float]]],
) -> Figure:
    """Two tasks with a quadratic loss in two weights each, and the paths that training runs take between them.

    Args:
        old, new: (center, curvature) of each bowl, two numbers each: loss = ½ Σ curvature · (θ − center)².
        paths: name → points (two weights each) from first to last.

    >>> bowl = (0.0, 0.0), (1.0, 9.0)
    >>> len(valley_figure(bowl, ((1.0, 1.0), (1.0, 1.0)), {"plain": [(0, 0), (1, 1)]}).axes)
    1
    """
    import numpy as np

    points = np.array([point for path in paths.values() for point in path] + [old[0], new[0]], dtype=float)
    low, high = points.min(axis=0) - 0.5, points.max(axis=0) + 0.5
    x, y = np.meshgrid(np.linspace(low[0], high[0], 200), np.linspace(low[1], high[1], 200))
    figure, (axes,) = panel_grid(1, height=4.0)
    style_axes(axes, "Old task (solid) and new task (dashed)", "weight 2", "weight 1")
    axes.grid(visible=False)
    for (center, curvature), style in ((old, "solid"), (new, "dashed")):
        loss = 0.5 * (curvature[0] * (x - center[0]) ** 2 + curvature[1] * (y - center[1]) ** 2)
        axes.contour(x, y, loss, levels=[0.1, 0.4, 0.9], colors=[INK], linewidths=0.8, linestyles=style, alpha=0.6)
    for number, (name, path) in enumerate(paths.items()):
        xs, ys = zip(*path, strict=True)
        mark = look(number)
        axes.plot(xs, ys, color=mark["color"], linewidth=1.5)
        axes.plot(xs[-1:], ys[-1:], linestyle="none", label=f"{name}: end", **(mark | {"markersize": 8}))
    axes.plot(*old[0], marker="*", markersize=12, color=INK, linestyle="none", label="start: best for the old task")
    axes.legend(loc="best", **LEGEND)
    axes.set_facecolor(PAPER)
    for spine in axes.spines.values():
        spine.set_color(GRID)
    return figure
