"""Pictures of quantization: numbers on their grids, error against bits, bytes, mismatch, accuracy and speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from grpo_edu.figures.style import (
    COLORS,
    GRID,
    INK,
    OPEN_LEGEND,
    PAPER,
    WIDTH,
    intervals,
    look,
    name_rows,
    note,
    panel_grid,
    percent,
    sheet,
    style_axes,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def number_lines(numbers: Sequence[float], grids: Mapping[str, Sequence[float]]) -> Figure:
    """Numbers and the grid points that they are rounded to, with one number line per grid.

    Args:
        numbers: what is rounded.
        grids: label → grid points, from top to bottom.

    Raises:
        ValueError: no numbers, no grid, or a grid without points.

    >>> figure = number_lines([0.4], {"halves": [0.0, 0.5, 1.0]})
    >>> figure.axes[0].get_title(loc="left")
    'halves'
    """
    if not numbers or not grids or not all(len(places) for places in grids.values()):
        raise ValueError("numbers must have at least one number, and grids at least one grid with at least one point")
    figure = sheet(WIDTH, 0.6 + 0.95 * len(grids))
    low = min(*numbers, *(min(places) for places in grids.values()))
    high = max(*numbers, *(max(places) for places in grids.values()))
    for axes, (label, places) in zip(figure.subplots(len(grids), squeeze=False)[:, 0], grids.items(), strict=True):
        style_axes(axes, label, "", "")
        axes.grid(visible=False)
        axes.axhline(0, color=INK, linewidth=0.8, zorder=0)
        axes.plot(places, [0] * len(places), linestyle="none", marker="|", markersize=13, color=INK)
        for number in numbers:
            place = min(places, key=lambda p: abs(p - number))
            axes.plot([number, place], [1, 0], color=GRID, linewidth=1.2, zorder=0)
            axes.plot([number], [1], **look(0))
            axes.plot([place], [0], **look(1))
        axes.set(xlim=(low - 0.03 * (high - low), high + 0.03 * (high - low)), ylim=(-0.6, 1.5), yticks=[])
        axes.spines["left"].set_visible(False)
    return figure


def error_curves(bits: Sequence[int], errors: Mapping[str, Sequence[float]], *, title: str) -> Figure:
    """Relative error against bits on a logarithmic axis, with one curve per way to choose the scales.

    Raises:
        ValueError: no curve, or one that is not as long as bits.

    >>> figure = error_curves([4, 8], {"one scale": [0.1, 0.006]}, title="Errors")
    >>> figure.axes[0].get_yscale()
    'log'
    """
    if not errors or any(len(values) != len(bits) for values in errors.values()):
        raise ValueError(f"errors must have at least one curve, each of {len(bits)} numbers, one per value in bits")
    figure, (axes,) = panel_grid(1, height=3.4)
    style_axes(axes, title, "relative error (%, log scale)", "bits")
    for number, (label, values) in enumerate(errors.items()):
        axes.plot(bits, [100 * value for value in values], **look(number), linewidth=1.8, label=label)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks(list(bits))
    figure.legend(loc="outside upper right", ncols=len(errors), **OPEN_LEGEND)
    return figure


def row_ranges(largest: Sequence[float], *, title: str) -> Figure:
    """The largest number of each row of a weight, sorted, next to the one that a per-tensor scale must cover.

    >>> row_ranges([0.1, 0.5, 0.2], title="Rows").axes[0].lines[0].get_ydata().tolist()
    [0.5, 0.2, 0.1]
    """
    figure, (axes,) = panel_grid(1, height=2.8)
    style_axes(axes, title, "largest |weight| of a row", "rows, from the widest to the narrowest")
    ordered = sorted(largest, reverse=True)
    axes.plot(range(1, len(ordered) + 1), ordered, **look(0), linewidth=1.5, markevery=max(1, len(ordered) // 16))
    axes.axhline(ordered[0], color=COLORS[1], linewidth=1.4, linestyle="--")
    end = (len(ordered), ordered[0])
    note(axes, "a per-tensor scale must cover this", end, (0, -12), ha="right", va="baseline")
    axes.set_ylim(0, 1.1 * ordered[0])
    return figure


def byte_bars(parts: Mapping[str, Mapping[str, float]], *, unit: str, title: str) -> Figure:
    """The size of a model in several formats, each bar made of its parts.

    Args:
        parts: format → part → size; the same parts in the same order for each format.
        unit: of the sizes. title: of the picture.

    Raises:
        ValueError: no format, or formats with different parts.

    >>> figure = byte_bars({"float32": {"layers": 4.0}, "int8": {"layers": 1.0}}, unit="MB", title="Sizes")
    >>> [text.get_text() for text in figure.axes[0].texts]
    ['4 MB', '1 MB, 4.0× smaller']
    """
    names = {tuple(part) for part in parts.values()}
    if len(names) != 1:
        raise ValueError(f"parts: each format must have the same parts in the same order, got {sorted(names)}")
    figure, (axes,) = panel_grid(1, height=1.5 + 0.42 * len(parts))
    style_axes(axes, title, "", unit)
    starts = [0.0] * len(parts)
    for number, name in enumerate(names.pop()):
        sizes = [part[name] for part in parts.values()]
        hatch = ("", "//", "..", "xx")[number % 4]
        axes.barh(
            range(len(parts)), sizes, 0.62, left=starts, color=COLORS[number], hatch=hatch, edgecolor=PAPER, label=name
        )
        starts = [start + size for start, size in zip(starts, sizes, strict=True)]
    for row, total in enumerate(starts):
        ratio = f", {starts[0] / total:.1f}× smaller" if row else ""
        size = f"{total:.0f}" if total >= 100 else f"{total:.3g}"
        note(axes, f"{size} {unit}{ratio}", (total, row))
    name_rows(axes, parts)
    axes.set_xlim(0, 1.3 * max(starts))
    figure.legend(loc="outside upper right", ncols=4, **OPEN_LEGEND)
    return figure


def logp_scatter(truth: Sequence[float], others: Mapping[str, Sequence[float]]) -> Figure:
    """Log-probabilities of the same tokens under a model and its quantized copies, with one panel per copy.

    Raises:
        ValueError: no copy, or one with another number of tokens.

    >>> figure = logp_scatter([-1.0, -0.1], {"int8": [-1.1, -0.1]})
    >>> len(figure.axes)
    1
    """
    if not others or any(len(values) != len(truth) for values in others.values()):
        raise ValueError(f"others must have at least one copy, each with {len(truth)} log-probabilities")
    figure, panels = panel_grid(len(others), height=3.2 * ((len(others) + 1) // 2))
    low = min(*truth, *(min(values) for values in others.values()))
    for number, (axes, (label, values)) in enumerate(zip(panels, others.items(), strict=True)):
        style_axes(axes, label, "log-probability, quantized", "log-probability, float32")
        axes.plot([low, 0], [low, 0], color=INK, linewidth=0.9, linestyle="--")
        axes.plot(truth, values, linestyle="none", alpha=0.5, **{**look(number), "markersize": 3})
    return figure


def interval_table(rows: Sequence[Mapping], *, margin: float, title: str) -> Figure:
    """Changes with their 95% intervals: one row per model, one marker per scheme, and the margin as a band.

    Args:
        rows: each with model, scheme, difference, low and high (shares: 0.01 is one point).
        margin: half the width of the band, a share.
        title: what changed.

    Raises:
        ValueError: no rows.

    >>> row = {"model": "tiny", "scheme": "bf16", "difference": 0.0, "low": -0.01, "high": 0.01}
    >>> [label.get_text() for label in interval_table([row], margin=0.03, title="Accuracy").axes[0].get_yticklabels()]
    ['tiny']
    """
    if not rows:
        raise ValueError("rows is empty: give at least one change")
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


def speed_bars(speeds: Mapping[str, Mapping[str, float]], *, title: str) -> Figure:
    """How many times as fast each scheme is, with one group of bars per situation.

    Args:
        speeds: situation (such as "1 row") → scheme → times as fast.

    >>> figure = speed_bars({"1 row": {"bf16": 2.0, "int8": 4.0}}, title="Decoding")
    >>> [text.get_text() for text in figure.axes[0].texts]
    ['2.0', '4.0']
    """
    schemes = list(next(iter(speeds.values())))
    figure, (axes,) = panel_grid(1, height=3.2)
    style_axes(axes, title, "times as fast as float32", "")
    width = 0.8 / len(schemes)
    for number, scheme in enumerate(schemes):
        for group, found in enumerate(speeds.values()):
            place = group + width * (number - (len(schemes) - 1) / 2)
            axes.bar(place, found[scheme], 0.9 * width, color=COLORS[number], label=scheme if group == 0 else None)
            note(axes, f"{found[scheme]:.1f}", (place, found[scheme]), (0, 2), ha="center", va="baseline")
    axes.axhline(1, color=INK, linewidth=0.9, linestyle="--")
    axes.set_xticks(range(len(speeds)), list(speeds))
    axes.grid(visible=False, axis="x")
    figure.legend(loc="outside upper right", ncols=len(schemes), **OPEN_LEGEND)
    return figure
