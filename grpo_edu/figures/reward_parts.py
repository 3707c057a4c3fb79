"""Pictures of rewards: what each part of a sum pays and which exploits it pays, and what training made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from grpo_edu.figures.style import (
    INK,
    OPEN_LEGEND,
    SMALL,
    intervals,
    legend_below,
    look,
    name_rows,
    note,
    panel_grid,
    sheet,
    style_axes,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def reward_against_accuracy(runs: Sequence[Mapping[str, Any]], *, title: str = "Paid and wanted") -> Figure:
    """Draw the change of each run's reward (x) and accuracy (y), with both 95% intervals.

    To the right of the vertical line the reward rose; below the horizontal line fewer problems were solved than before.
    A run in the lower right corner hacked its reward.

    Args:
        runs: dicts with "condition", a name that runs share, and "reward_change" and "accuracy_change", each with
            "difference", "low" and "high"; an accuracy as a share, 0.1 = 10 points.
        title: the figure's title.

    >>> reward, accuracy = ({"difference": d, "low": d - 0.1, "high": d + 0.1} for d in (0.3, -0.2))
    >>> figure = reward_against_accuracy([{"condition": "a", "reward_change": reward, "accuracy_change": accuracy}])
    >>> figure.axes[0].get_xlabel()
    'change of the mean reward, with 95% interval'
    """
    figure, (axes,) = panel_grid(1, height=4.0)
    style_axes(axes, title, "change of accuracy (points)", "change of the mean reward, with 95% interval")
    conditions = list(dict.fromkeys(run["condition"] for run in runs))
    for number, condition in enumerate(conditions):
        group = [run for run in runs if run["condition"] == condition]
        rewards = _rows([run["reward_change"] for run in group])
        accuracies = _rows([run["accuracy_change"] for run in group], scale=100)
        intervals(axes, number, rewards, accuracies, label=condition, capsize=0, linewidth=0.8)
    for line in (axes.axhline, axes.axvline):
        line(0, color=INK, linewidth=0.8)
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, -5), max(high, 5))
    axes.set_xlim(left=min(axes.get_xlim()[0], -0.02))
    for offset, place, text in ((4, "bottom", "right more often"), (-4, "top", "right less often: hacked")):
        axes.annotate(
            f"paid more, {text}",
            (1, 0),
            (0, offset),
            axes.get_yaxis_transform(),
            "offset points",
            ha="right",
            va=place,
            fontsize=SMALL,
            color=INK,
        )
    legend_below(axes)
    return figure


def sum_and_exploits(
    paid: Mapping[str, Mapping[str, float]], passed: Mapping[str, Sequence[bool]], columns: Sequence[str]
) -> Figure:
    """Draw each completion's weighted reward parts, stacked, and a grid of the exploits that each reward resists.

    Args:
        paid: completion → reward → what it adds to the sum; negative parts are stacked to the left of 0.
        passed: exploit → for each column, whether an honest completion earns strictly more than the exploit.
        columns: names of the rewards, the last one of their sum.

    >>> figure = sum_and_exploits({"yours": {"a": 1.0, "b": -0.5}}, {"guess": [True, False]}, ["a", "sum"])
    >>> figure.axes[0].get_title(loc="left")
    'Weighted parts of the reward'
    """
    heights = [1.1 + 0.35 * len(paid), 0.9 + 0.19 * len(passed)]
    figure = sheet(7.0, sum(heights) + 0.4)
    top, below = figure.subplots(2, 1, height_ratios=heights)
    _draw_parts(top, paid)
    style_axes(below, "Exploits\n● resisted    ✖ paid as much as honest work", "", "")
    for good, number in ((True, 0), (False, 1)):
        found = [
            (column, row)
            for row, values in enumerate(passed.values())
            for column, value in enumerate(values)
            if bool(value) is good
        ]
        xs, ys = zip(*found, strict=True) if found else ((), ())
        below.plot(xs, ys, linestyle="none", **{**look(number), "marker": "o" if good else "X"})
    name_rows(below, list(passed))
    below.set_xticks(range(len(columns)), list(columns))
    below.set_xlim(-0.5, len(columns) - 0.5)
    below.xaxis.tick_top()
    return figure


def _draw_parts(axes: Axes, paid: Mapping[str, Mapping[str, float]]) -> None:
    """Draw one bar per completion, made of its parts, with the sum at its end."""
    style_axes(axes, "Weighted parts of the reward", "", "")
    names = list(dict.fromkeys(name for parts in paid.values() for name in parts))
    for row, parts in enumerate(paid.values()):
        ends = {True: 0.0, False: 0.0}
        for number, name in enumerate(names):
            value = parts.get(name, 0.0)
            axes.barh(row, value, 0.6, left=ends[value >= 0], color=look(number)["color"], label=None if row else name)
            ends[value >= 0] += value
        note(axes, f"sum {sum(parts.values()):.2f}", (ends[True], row), (4, 0))
    name_rows(axes, list(paid))
    axes.axvline(0, color=INK, linewidth=0.8)
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, 0), max(high, 1) * 1.2)
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.25), ncols=max(1, min(4, len(names))), **OPEN_LEGEND)


def _rows(changes: list[Mapping[str, float]], scale: float = 1) -> list[list[float]]:
    return [[scale * change[name] for name in ("difference", "low", "high")] for change in changes]
