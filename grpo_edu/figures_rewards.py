"""Pictures about rewards: what a run did to what it was paid for, and to what was wanted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from grpo_edu.figure_style import INK, LEGEND, SMALL, look, panel_grid, style_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def reward_against_accuracy(runs: Sequence[Mapping[str, Any]]) -> Figure:
    """Each run a dot: how its reward changed (x), how its accuracy changed (y), with both 95% intervals.

    Right of the upright line the reward rose; below the level line fewer problems were solved than before. A run in
    that corner was hacked.

    Args:
        runs: dicts with "condition", a name that runs share, and "reward_change" and "accuracy_change", each with
            "difference", "low" and "high"; an accuracy as a share, 0.1 = 10 points.

    Raises:
        ValueError: no runs.

    >>> reward, accuracy = ({"difference": d, "low": d - 0.1, "high": d + 0.1} for d in (0.3, -0.2))
    >>> figure = reward_against_accuracy([{"condition": "a", "reward_change": reward, "accuracy_change": accuracy}])
    >>> figure.axes[0].get_xlabel()
    'change of the mean reward, with 95% interval'
    """
    if not runs:
        raise ValueError("runs is empty: pass at least one run")
    figure, (axes,) = panel_grid(1, height=4.0)
    style_axes(axes, "Paid and wanted", "change of accuracy (points)", "change of the mean reward, with 95% interval")
    conditions = list(dict.fromkeys(run["condition"] for run in runs))
    for number, condition in enumerate(conditions):
        group = [run for run in runs if run["condition"] == condition]
        x, x_errors = _bars([run["reward_change"] for run in group], 1)
        y, y_errors = _bars([run["accuracy_change"] for run in group], 100)
        axes.errorbar(
            x, y, yerr=y_errors, xerr=x_errors, linestyle="none", linewidth=0.8, label=condition, **look(number)
        )
    for line in (axes.axhline, axes.axvline):
        line(0, color=INK, linewidth=0.8)
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, -5), max(high, 5))
    axes.set_xlim(left=min(axes.get_xlim()[0], -0.02))
    for offset, place, text in ((4, "bottom", "right more often"), (-4, "top", "right less often: hacked")):
        axes.annotate(
            f"paid more, {text}", (1, 0), (0, offset), axes.get_yaxis_transform(), "offset points",
            ha="right", va=place, fontsize=SMALL, color=INK,
        )  # fmt: skip
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(conditions), frameon=False, **LEGEND)
    return figure


def _bars(changes: list[Mapping[str, float]], scale: float) -> tuple[list[float], list[list[float]]]:
    """Middles, and the lengths of the error bars below and above them."""
    middles = [scale * change["difference"] for change in changes]
    below = [scale * (change["difference"] - change["low"]) for change in changes]
    above = [scale * (change["high"] - change["difference"]) for change in changes]
    return middles, [below, above]
