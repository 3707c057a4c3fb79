"""Picture of reward hacking: how a run changed its reward, and how it changed its accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from grpo_edu.figures.style import INK, SMALL, intervals, legend_above, panel_grid, style_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def reward_against_accuracy(runs: Sequence[Mapping[str, Any]], *, title: str = "Paid and wanted") -> Figure:
    """The change of each run's reward (x) and accuracy (y), with both 95% intervals.

    To the right of the vertical line the reward rose; below the horizontal line fewer problems were solved than before.
    A run in the lower right corner hacked its reward.

    Args:
        runs: dicts with "condition", a name that runs share, and "reward_change" and "accuracy_change", each with
            "difference", "low" and "high"; an accuracy as a share, 0.1 = 10 points.
        title: of the figure.

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
    legend_above(axes)
    return figure


def _rows(changes: list[Mapping[str, float]], scale: float = 1) -> list[list[float]]:
    return [[scale * change[name] for name in ("difference", "low", "high")] for change in changes]
