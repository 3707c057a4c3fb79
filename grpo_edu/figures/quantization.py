"""Pictures of quantization: changes of accuracy with their intervals, next to a margin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from grpo_edu.figures.style import GRID, INK, OPEN_LEGEND, intervals, name_rows, panel_grid, percent, style_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def interval_table(rows: Sequence[Mapping], *, margin: float, title: str) -> Figure:
    """Changes with their 95% intervals: one row per model, one marker per scheme, and the margin as a band.

    Args:
        rows: each with model, scheme, difference, low and high (shares: 0.01 is one point).
        margin: half the width of the band, a share.
        title: what changed.

    >>> row = {"model": "tiny", "scheme": "bf16", "difference": 0.0, "low": -0.01, "high": 0.01}
    >>> [label.get_text() for label in interval_table([row], margin=0.03, title="Accuracy").axes[0].get_yticklabels()]
    ['tiny']
    """
    models, schemes = (list(dict.fromkeys(row[name] for row in rows)) for name in ("model", "scheme"))
    figure, (axes,) = panel_grid(1, height=1.4 + (0.25 + 0.13 * len(schemes)) * len(models))
    style_axes(axes, title, "", "change against float32, points, with 95% intervals")
    axes.axvspan(-100 * margin, 100 * margin, color=GRID, alpha=0.6, zorder=0)
    axes.axvline(0, color=INK, linewidth=0.9, linestyle="--")
    for number, scheme in enumerate(schemes):
        own = [row for row in rows if row["scheme"] == scheme]
        heights = [models.index(row["model"]) + 0.17 * (number - (len(schemes) - 1) / 2) for row in own]
        changes = [percent(row["difference"], row["low"], row["high"]) for row in own]
        intervals(axes, number, changes, heights, label=scheme, capsize=2)
    name_rows(axes, models)
    figure.legend(loc="outside upper right", ncols=len(schemes), **OPEN_LEGEND)
    return figure
