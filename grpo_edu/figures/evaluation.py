"""Pictures of evaluations: accuracies with their intervals, error rates, and how many problems a claim needs."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from grpo_edu.evaluation import wilson_interval
from grpo_edu.figures.style import (
    COLORS,
    INK,
    OPEN_LEGEND,
    PAPER,
    headline,
    intervals,
    legend_below,
    look,
    name_rows,
    note,
    panel_grid,
    percent,
    style_axes,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STACKED = ((COLORS[0], PAPER), (COLORS[5], INK), (COLORS[4], INK))  # color of a part, and of the text on it


def interval_rows(
    counts: Mapping[str, Sequence[int]],
    names: Sequence[str],
    *,
    trials: int,
    title: str,
    reference: float | None = None,
) -> "Figure":
    """Draw one row per run: its accuracy as a dot in its 95% Wilson interval, on one scale from 0 to 100%.

    Args:
        counts: label of a series → problems solved by each run of it.
        names: one per run, from top to bottom.
        trials: problems that each run was given.
        title: what the runs are.
        reference: a share between 0 and 1 that gets a dashed line, such as the mean of all runs.

    Raises ValueError for a count outside 0..trials.

    >>> figure = interval_rows({"base": [5, 7]}, ["seed 0", "seed 1"], trials=10, title="Two runs")
    >>> [label.get_text() for label in figure.axes[0].get_yticklabels()]
    ['seed 0', 'seed 1']
    """
    figure, (axes,) = panel_grid(1, height=1.2 + (0.12 + 0.1 * len(counts)) * len(names))
    style_axes(axes, title, "", "problems solved (%), with 95% intervals")
    if reference is not None:
        axes.axvline(100 * reference, color=INK, linewidth=0.9, linestyle="--")
    for number, (label, successes) in enumerate(counts.items()):
        shift = min(0.24, 0.75 / len(counts)) * (number - (len(counts) - 1) / 2)
        shares = [percent(count / trials, *wilson_interval(count, trials)) for count in successes]
        intervals(axes, number, shares, [row + shift for row in range(len(names))], label=label, capsize=2)
    name_rows(axes, names)
    axes.set_xlim(-2, 102)  # space for a marker at either end
    if len(counts) > 1:
        legend_below(axes)
    return figure


def threshold_bars(shares: Mapping[str, float], *, threshold: float, title: str, xlabel: str) -> "Figure":
    """Draw shares as bars against a promised limit: blue if the limit is kept, vermilion if it is exceeded.

    Args:
        shares: label → share between 0 and 1, from top to bottom.
        threshold: the share that must not be exceeded; a dashed line.
        title, xlabel: what the shares are; the axis is in percent.

    >>> figure = threshold_bars({"one look": 0.04, "five looks": 0.14}, threshold=0.05, title="Errors", xlabel="%")
    >>> [text.get_text() for text in figure.axes[0].texts]
    ['4%', '14%']
    """
    figure, (axes,) = panel_grid(1, height=1.2 + 0.4 * len(shares))
    style_axes(axes, title, "", xlabel)
    for row, share in enumerate(shares.values()):
        broken = share > threshold
        # colors differ in brightness too, and the broken ones are hatched
        axes.barh(
            row, 100 * share, 0.6, color=COLORS[1 if broken else 0], hatch="//" if broken else "", edgecolor=PAPER
        )
        number = note(axes, f"{share:.0%}", (100 * share, row))
        number.set_bbox({"facecolor": PAPER, "edgecolor": "none", "pad": 1})  # over the dashed line
    axes.axvline(100 * threshold, color=INK, linewidth=0.9, linestyle="--", zorder=1)
    name_rows(axes, shares)
    axes.set_xlim(0, 1.15 * 100 * max(threshold, *shares.values()))
    return figure


def stacked_counts(counts: Mapping[str, Mapping[str, tuple[int, int]]], *, title: str, xlabel: str) -> "Figure":
    """Draw one stacked bar per row: how many answers are of each kind, and below it how many of them are right.

    Args:
        counts: row → kind → (answers, right ones). All rows have the same kinds.
        title, xlabel: what the figure shows, and what is counted.

    >>> bars = {"before": {"long": (3, 2), "short": (1, 0)}, "after": {"long": (4, 4), "short": (0, 0)}}
    >>> figure = stacked_counts(bars, title="Longer answers", xlabel="answers")
    >>> [text.get_text() for text in figure.axes[0].texts]
    ['3,\\n2 right', '1,\\n0 right', '4,\\n4 right']
    """
    figure, (axes,) = panel_grid(1, height=1.5 + 0.55 * len(counts))
    style_axes(axes, "", "", xlabel)
    for row, kinds in enumerate(counts.values()):
        start = 0
        for number, (kind, (answers, right)) in enumerate(kinds.items()):
            color, ink = _STACKED[number]
            axes.barh(row, answers, 0.7, left=start, color=color, edgecolor=PAPER, label="" if row else kind)
            if answers:
                note(axes, f"{answers},\n{right} right", (start + answers / 2, row), (0, 0), ha="center").set_color(ink)
            start += answers
    name_rows(axes, counts)
    legend_below(axes)
    headline(figure, title)
    return figure


def problems_needed_chart(
    gains: Sequence[float], needed: Mapping[str, Sequence[float]], *, sizes: Mapping[str, int]
) -> "Figure":
    """Draw how many problems a claim needs against the gain that it claims, both logarithmic, next to given sizes.

    Args:
        gains: true gains as shares, 0.02 = two points.
        needed: label → problems needed, one number per gain.
        sizes: label → problems of an evaluation; a dashed line each.

    >>> figure = problems_needed_chart([0.01, 0.1], {"paired": [3000, 30]}, sizes={"ours": 300})
    >>> figure.axes[0].get_yscale()
    'log'
    """
    from matplotlib.ticker import FixedLocator, NullLocator

    figure, (axes,) = panel_grid(1, height=3.8)
    style_axes(axes, "How many problems does a claim need?", "problems (log scale)", "true gain in points (log scale)")
    points = [100 * gain for gain in gains]
    for number, (label, numbers) in enumerate(needed.items()):
        axes.plot(points, numbers, **look(number), linewidth=1.8, label=label)
    axes.set(xscale="log", yscale="log")
    ticks = [tick for tick in (0.5, 1, 2, 5, 10, 20, 50) if min(points) <= tick <= max(points)]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    for label, size in sizes.items():
        axes.axhline(size, color=INK, linewidth=0.9, linestyle="--")
        note(axes, label, (min(points), size), (0, 3), va="baseline")
    figure.legend(loc="outside upper right", ncols=len(needed), **OPEN_LEGEND)
    return figure
