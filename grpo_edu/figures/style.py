"""How every figure of the package looks: palette, grid of panels, axes, legends, intervals, and a curve with its mean.

The functions in this room take numbers and return a `matplotlib.figure.Figure` that pyplot does not know of. Colors are
those of Okabe and Ito, which readers with any color vision can tell apart, and each comes with its own marker. Every
color and font size is set explicitly on an opaque light background, so a figure looks the same on a dark theme and
under any rcParams.
"""

import base64
import html
import io
import math
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation

# Okabe-Ito (2008): blue, vermilion, bluish green, reddish purple, orange, sky blue.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")
WIDTH, WIDE = 7.0, 7.6  # inches: a notebook cell, and all that it has
SMALL, _LARGE = 9, 10  # points
INK, GRID, PAPER = "#222222", "#DDDDDD", "#FFFFFF"
LEGEND = {"fontsize": SMALL, "labelcolor": INK, "facecolor": PAPER, "edgecolor": GRID}
OPEN_LEGEND = {**LEGEND, "frameon": False}


def moving_mean(values: Iterable[float], window: int) -> list[float]:
    """Mean of the last `window` values at each position, of fewer at the start; NaN is left out.

    Raises ValueError for window < 1.

    >>> moving_mean([1.0, 2.0, 6.0], 2)
    [1.0, 1.5, 4.0]
    """
    if window < 1:
        raise ValueError(f"window must be at least 1 value, got {window}")
    values = list(values)
    means = []
    for end in range(1, len(values) + 1):
        kept = [value for value in values[max(0, end - window) : end] if not math.isnan(value)]
        means.append(sum(kept) / len(kept) if kept else math.nan)
    return means


def sheet(width: float, height: float) -> "Figure":
    """Return an empty figure of this size in inches on the light background, as every figure of the course begins.

    A notebook shows it as a picture, although pyplot does not know of it.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor=PAPER, layout="constrained")
    figure._repr_png_ = partial(_draw_png, figure)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.08)  # inches of air, so that no label touches the edge
    return figure


def _draw_png(figure: "Figure") -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def image_tag(picture: bytes, kind: str, alt: str, width: int) -> str:
    """Return a picture as an `<img>` with alternative text, which shrinks with its page; kind: "png" or "svg+xml"."""
    payload = base64.b64encode(picture).decode()
    style = f"width:{width}px;max-width:100%;height:auto"
    return f'<img alt="{html.escape(alt)}" style="{style}" src="data:image/{kind};base64,{payload}">'


def panel_grid(count: int, height: float | None = None) -> "tuple[Figure, list[Axes]]":
    """Return a figure of `count` panels, two per row; with an odd number the first panel takes the whole first row."""
    rows = (count + 1) // 2
    figure = sheet(WIDTH, height or (3.2 if rows == 1 else 2.4 * rows))
    cells = figure.add_gridspec(rows, 2)
    places = [cells[0, :]] if count % 2 else []
    places += [cells[row, column] for row in range(count % 2, rows) for column in (0, 1)]
    return figure, [figure.add_subplot(place) for place in places]


def style_axes(axes: "Axes", title: str, ylabel: str, xlabel: str) -> None:
    """Set every font size and color explicitly, so that neither rcParams nor the notebook's theme changes them."""
    axes.set_facecolor(PAPER)
    axes.set_title(title, loc="left", fontsize=_LARGE, color=INK, fontweight="bold")
    axes.set_xlabel(xlabel, fontsize=SMALL, color=INK)
    axes.set_ylabel(ylabel, fontsize=SMALL, color=INK)
    axes.tick_params(labelsize=SMALL, colors=INK)
    axes.grid(visible=True, color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(INK)
    if xlabel == "step":
        axes.xaxis.get_major_locator().set_params(integer=True)


def headline(figure: "Figure", title: str) -> None:
    """Write a title over the whole figure, flush left: for a sentence that states what the figure shows."""
    figure.suptitle(title, x=0.01, ha="left", fontsize=_LARGE + 1, color=INK, fontweight="bold")


def look(number: int) -> dict[str, Any]:
    """Color and marker of the series with this number."""
    return {"color": COLORS[number % len(COLORS)], "marker": MARKERS[number % len(MARKERS)], "markersize": 5}


def legend_above_data(axes: "Axes", columns: int) -> None:
    """Draw a legend in `columns` columns inside the panel; the y axis is stretched so that it covers no curve."""
    lines = math.ceil(len(axes.get_legend_handles_labels()[1]) / columns)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + (high - low) * 0.17 * lines)
    axes.legend(loc="upper left", ncols=columns, borderaxespad=0.2, **OPEN_LEGEND)


def legend_below(axes: "Axes") -> None:
    """Draw a legend under the panel, where it covers neither curves nor the title: in one row, or in rows of three."""
    handles, labels = axes.get_legend_handles_labels()
    columns = len(labels) if len(labels) <= 5 and len("".join(labels)) <= 80 else 3
    axes.figure.legend(handles, labels, loc="outside lower center", ncols=columns, **OPEN_LEGEND)


def name_rows(axes: "Axes", names: Collection[str]) -> None:
    """Set one row per name on the y axis, the first at the top, without horizontal grid lines."""
    axes.set_yticks(range(len(names)), list(names))
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")


def note(
    axes: "Axes",
    text: str,
    point: tuple[float, float],
    offset: tuple[float, float] = (5, 0),
    *,
    ha: str = "left",
    va: str = "center",
) -> "Annotation":
    """Write a small text at an offset in points from a point of the data."""
    return axes.annotate(text, point, offset, textcoords="offset points", ha=ha, va=va, fontsize=SMALL, color=INK)


def percent(*shares: float) -> tuple[float, ...]:
    """Shares in percent.

    >>> percent(0.5, 0.25)
    (50.0, 25.0)
    """
    return tuple(100 * share for share in shares)


def intervals(
    axes: "Axes",
    number: int,
    x: "Sequence[float] | Sequence[Sequence[float]]",
    y: "Sequence[float] | Sequence[Sequence[float]]",
    *,
    label: str | None = None,
    capsize: float = 3,
    linewidth: float = 1.5,
) -> None:
    """Draw measured values as the markers of series `number`, each in its interval.

    Args:
        axes: where to draw.
        number: number of the series, for its color and marker.
        x, y: n coordinates each, or n rows (value, low, high) for what was measured.
        label: in the legend.
        capsize, linewidth: size of the interval's caps and line, in points.
    """
    import numpy as np

    tables = [np.array(values, dtype=float).reshape(len(values), -1) for values in (x, y)]
    reach = [abs(table[:, 1:] - table[:, :1]).T if table.shape[1] == 3 else None for table in tables]
    values = [table[:, 0] for table in tables]
    axes.errorbar(
        *values,
        xerr=reach[0],
        yerr=reach[1],
        linestyle="none",
        label=label,
        capsize=capsize,
        linewidth=linewidth,
        **look(number),
    )


def draw_curve(axes: "Axes", steps: Sequence[int], values: list[float], window: int, number: int, label: str) -> None:
    """Draw the measured values as a thin line under their moving mean, which has about a dozen markers."""
    style = look(number)
    means = moving_mean(values, window)
    axes.plot(steps, values, color=style["color"], linewidth=0.8, alpha=0.45)
    axes.plot(steps, means, **style, linewidth=1.8, markevery=max(1, len(values) // 12), label=label)
