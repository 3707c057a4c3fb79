"""The curves of a run while it trains, as a small SVG image that is written in a millisecond.

Drawing the same panels with matplotlib takes a tenth of a second on a quiet computer, and more than a training step on
a busy one. The colors and the thin and thick lines are those of `grpo_edu.figures.curves.training_curves`.
"""

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_edu.figures.curves import PANELS, column, part_name, reward_parts
from grpo_edu.figures.hover import curve_values
from grpo_edu.figures.style import COLORS, GRID, INK, PAPER, image_tag, moving_mean

ACCURACY = "heldout accuracy"  # the key of the accuracy on held-out problems in those rows in which it was measured

_WIDTH, _PANEL, _ROW = 672, 336, 172  # pixels of the page: the picture, a panel and its row
_LEFT, _RIGHT, _TOP, _HEIGHT = 52, 18, 42, 96  # of the curves within their panel
_NUMBERED = 5  # of more curves only the names have room
_FONT = "font-family:Helvetica,Arial,sans-serif;font-size:12px"


def live_curves(
    history: Sequence[Mapping[str, float]],
    max_steps: int,
    judged: int = 0,
    *,
    previous: Sequence[Mapping[str, float]] = (),
) -> str:
    """Panels of the run's metrics over its steps, as the text of an SVG image.

    The thin line is what was measured, the thick line is the mean of the last five steps, and the number at its end
    is that mean. The horizontal axis is as long as the whole run, so the empty part shows how much is left.

    Args:
        history: one dict of metrics per step, with "step". Where held-out problems were solved it has `ACCURACY`; step
            0 has nothing else.
        max_steps: the number of steps of the whole run, at least the last step of the history.
        judged: how many held-out problems were solved each time, for the title; 0 for a title without it.
        previous: the history of another run for comparison, with dashed means; steps after `max_steps` are left out.

    Raises ValueError: an empty history.

    >>> svg = live_curves([{"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.7}], max_steps=30)
    >>> svg.count("<polyline"), "Reward" in svg, "step 30" in svg
    (2, True, True)
    """
    if not history:
        raise ValueError("history is empty: train for at least one step before you draw it")
    steps, chosen = [row["step"] for row in history], _chosen(history, judged)
    parts, before = [], [row for row in previous if row["step"] <= max_steps]
    for number, (key, name, limits) in enumerate(chosen):
        series = {key: column(history, key)} | (reward_parts(history) if key == "reward" else {})
        earlier = [(row["step"], value) for row, value in zip(before, column(before, key), strict=True)]
        parts += _panel(number, name, steps, max_steps, list(series.items()), limits, _window(key), earlier)
    height = _ROW * math.ceil(len(chosen) / 2) + 4
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
            f'height="{height}"><style>text{{{_FONT};fill:{INK}}}.n{{font-weight:bold;font-size:13px}}</style>',
            f'<rect width="{_WIDTH}" height="{height}" rx="8" fill="{PAPER}"/>',
            *parts,
            "</svg>",
        ]
    )


def live_values(
    history: Sequence[Mapping[str, float]], max_steps: int, *, previous: Sequence[Mapping[str, float]] = ()
) -> list[dict[str, Any]]:
    """Return the values of `live_curves` for a page that shows those under the pointer, see `grpo_edu.figures.hover`.

    >>> live_values([{"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.7}], 30)[0]["lines"]
    [['measured', [1, 2], [0.5, 0.7]], ['mean of 5', [1, 2], [0.5, 0.6]]]
    """
    steps, chosen = [row["step"] for row in history], _chosen(history)
    height, before = _ROW * math.ceil(len(chosen) / 2) + 4, [row for row in previous if row["step"] <= max_steps]
    panels = []
    for number, (key, _, _) in enumerate(chosen):
        values, window = column(history, key), _window(key)
        lines = [("measured", steps, values)]
        lines += [("mean of 5", steps, moving_mean(values, window))] if window > 1 else []
        if key == "reward":
            lines += [(part_name(part), steps, found) for part, found in reward_parts(history).items()]
        if before:
            earlier = moving_mean(column(before, key), window)
            lines.append(("the run before", [row["step"] for row in before], earlier))
        x0, y0 = _PANEL * (number % 2) + _LEFT, _ROW * (number // 2) + _TOP
        at = x0 / _WIDTH, y0 / height, (_PANEL - _LEFT - _RIGHT) / _WIDTH, _HEIGHT / height
        panels.append(curve_values(at, (0, max_steps), "step", lines))
    return panels


def _chosen(history: Sequence[Mapping[str, float]], judged: int = 0) -> list[tuple[str, str, Any]]:
    """Key, title and limits of each panel that the history has values for."""
    chosen = [(key, name, limits) for key, name, _, limits in PANELS if any(key in row for row in history)]
    if any(ACCURACY in row for row in history):
        title = f"Held-out accuracy ({judged} problems)" if judged else "Held-out accuracy"
        chosen.insert(1, (ACCURACY, title, (0, 1)))
    return chosen


def _window(key: str) -> int:
    """Return how many steps the thick line is the mean of."""
    return 1 if key == ACCURACY else 5


def svg_image(svg: str, alt: str) -> str:
    """Return the SVG as an `<img>` with alternative text, at most as wide as the page."""
    return image_tag(svg.encode(), "svg+xml", alt, _WIDTH)


def _panel(
    number: int,
    title: str,
    steps: Sequence[float],
    last: int,
    series: Sequence[tuple[str, list[float]]],
    limits: tuple[float, float] | None,
    window: int,
    earlier: Sequence[tuple[float, float]],
) -> list[str]:
    """Return one panel: title, grid with numbers, the series' curves with their last values, and an earlier run's."""
    x0, y0 = _PANEL * (number % 2) + _LEFT, _ROW * (number // 2) + _TOP
    width = _PANEL - _LEFT - _RIGHT
    dashed = list(zip([step for step, _ in earlier], moving_mean([value for _, value in earlier], window), strict=True))
    dashed = [(step, value) for step, value in dashed if math.isfinite(value)]
    ticks = _ticks([value for _, values in series for value in values] + [value for _, value in dashed], limits)
    low, high = ticks[0], ticks[-1]

    def place(step: float, value: float) -> str:
        across = x0 + width * step / last
        return f"{across:.1f},{y0 + _HEIGHT * (high - value) / (high - low):.1f}"

    parts = [f'<text class="n" x="{x0 - 36}" y="{y0 - 22}">{html.escape(title)}</text>']
    for tick in ticks:
        y = place(0, tick).partition(",")[2]
        parts.append(f'<line x1="{x0}" x2="{x0 + width}" y1="{y}" y2="{y}" stroke="{GRID}"/>')
        parts.append(f'<text x="{x0 - 6}" y="{float(y) + 4:.1f}" text-anchor="end">{tick:.4g}</text>')
    parts.append(f'<text x="{x0}" y="{y0 + _HEIGHT + 17}">0</text>')
    parts.append(f'<text x="{x0 + width}" y="{y0 + _HEIGHT + 17}" text-anchor="end">step {last}</text>')
    if dashed:
        points = " ".join(place(step, value) for step, value in dashed)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{INK}" stroke-dasharray="5 4" opacity="0.6"/>')
        middle = f'x="{x0 + width / 2}" y="{y0 + _HEIGHT + 17}" text-anchor="middle"'
        parts.append(f"<text {middle}>dashed: the run before</text>")
    labels = []  # next to the title, and below it
    for row, (key, values) in enumerate(series):
        color = COLORS[row % len(COLORS)]
        means = moving_mean(values, window)
        for drawn, width_, opacity in ((values, 1, 0.45), (means, 2.2, 1)):
            found = [(step, value) for step, value in zip(steps, drawn, strict=True) if math.isfinite(value)]
            points = " ".join(place(step, value) for step, value in found)
            style = f'fill="none" stroke="{color}" stroke-width="{width_}" opacity="{opacity}"'
            parts.append(f'<polyline points="{points}" {style}/>')
        if found:
            x, y = place(*found[-1]).split(",")
            name = part_name(key).removesuffix("_reward") if row else "total"
            parts.append(f'<circle cx="{x}" cy="{y}" r="4" fill="{color}"/>')
            value = f" {found[-1][1]:.2g}" if len(series) <= _NUMBERED else ""
            mark = f'<tspan style="fill:{color}">●</tspan>'  # the color itself is too pale for letters
            labels.append(f"{mark} {name}{value}" if len(series) > 1 else f"{found[-1][1]:.3g}")
    lower = labels[-3 if len(series) <= _NUMBERED else -4 :] if len(series) > 1 else []
    for line, words in ((y0 - 22, labels[: len(labels) - len(lower)]), (y0 - 6, lower)):
        if words:
            parts.append(f'<text x="{x0 + width}" y="{line}" text-anchor="end">{"&#160; ".join(words)}</text>')
    return parts


def _ticks(values: Sequence[float], limits: tuple[float, float] | None) -> list[float]:
    """Three or four round numbers, the first below and the last above all values."""
    from matplotlib.ticker import MaxNLocator

    if limits:
        return [limits[0], sum(limits) / 2, limits[1]]
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    if high - low < 1e-9:
        low, high = low - 0.5, high + 0.5
    return [round(float(tick), 9) for tick in MaxNLocator(nbins=3).tick_values(low, high)]
