"""The values of curves next to their picture, so that a page can show those under the pointer."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST = 4000  # figures with more values get no hover data
Line = tuple[str, Sequence[float], Sequence[float]]  # name, x and y


def curve_values(
    at: Sequence[float], x: tuple[float, float], along: str, lines: Sequence[Line], *, log: bool = False
) -> dict[str, Any]:
    """Return one panel's values for `with_values`.

    Args:
        at: left, top, width and height of the panel, as shares of the picture.
        x: the values at its left and right edge. along: what is on that axis. log: whether it is logarithmic.
        lines: name, x and y of each curve; values that are not finite are left out.

    >>> curve_values((0, 0, 1, 1), (0, 2), "step", [("reward", [1, 2], [0.123456, float("nan")])])["lines"]
    [['reward', [1], [0.12346]]]
    """
    kept = []
    for name, xs, ys in lines:
        pairs = [(one, other) for one, other in zip(xs, ys, strict=True) if math.isfinite(one) and math.isfinite(other)]
        if pairs:
            kept.append([name, [_short(one) for one, _ in pairs], [_short(other) for _, other in pairs]])
    return {"at": [round(part, 4) for part in at], "x": [*x], "along": along, "log": log, "lines": kept}


def figure_values(figure: Figure) -> list[dict[str, Any]]:
    """Return the values of the named curves in each panel of a figure that has been drawn.

    >>> from grpo_edu.figures.style import sheet
    >>> figure = sheet(7, 3)
    >>> axes = figure.subplots()
    >>> lines = axes.plot([1, 2], [3, 4], label="reward")
    >>> figure_values(figure)[0]["lines"]
    [['reward', [1, 2], [3, 4]]]
    """
    panels = []
    for axes in figure.axes:
        place = axes.get_position()
        lines: list[Line] = [
            (str(line.get_label()), line.get_xdata(), line.get_ydata())
            for line in axes.lines
            if line.get_transform() == axes.transData and not str(line.get_label()).startswith("_")
        ]
        panel = curve_values(
            (place.x0, 1 - place.y1, place.width, place.height),
            axes.get_xlim(),
            axes.get_xlabel(),
            lines,
            log=axes.get_xscale() == "log",
        )
        if panel["lines"]:
            panels.append(panel)
    return panels


def with_values(image: str, panels: Sequence[dict[str, Any]]) -> str:
    """Return an `<img>` that carries the values of its panels, if they are not too many."""
    if not panels or sum(len(line[1]) for panel in panels for line in panel["lines"]) > _MOST:
        return image
    stored = html.escape(json.dumps(panels, ensure_ascii=False, separators=(",", ":")), quote=False)
    return image.replace("<img ", f"<img data-values='{stored.replace(chr(39), '&#39;')}' ", 1)


def without_values(page: str) -> str:
    """Return a page whose pictures carry no values, for where no script runs."""
    return re.sub(r" data-values='[^']*'", "", page)


def _short(value: float) -> float:
    """Return a number with five significant digits, whole if it is whole."""
    short = float(f"{value:.5g}")
    return int(short) if short.is_integer() else short
