"""Pictures of the computer: speed against threads and number formats, and where start-up time and memory go."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from grpo_edu.figures.style import (
    INK,
    OPEN_LEGEND,
    PAPER,
    SMALL,
    legend_above_data,
    legend_below,
    look,
    name_rows,
    note,
    panel_grid,
    style_axes,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def thread_curves(
    threads: Sequence[int], seconds: Mapping[str, Sequence[float]], *, cores: float, title: str = "Speed by threads"
) -> "Figure":
    """Draw the speed of each task relative to one thread, against the number of threads.

    Args:
        threads: the numbers of threads that were tried, rising, the first of them 1.
        seconds: task → the time it took with each number of threads.
        cores: cores that the process may use, where the ideal stops rising.
        title: the figure's title.

    Raises ValueError for threads that do not start at 1.

    >>> figure = thread_curves([1, 2], {"a product": [2.0, 1.0]}, cores=2)
    >>> [float(y) for y in figure.axes[0].lines[0].get_ydata()]
    [1.0, 2.0]
    """
    if not threads or threads[0] != 1:
        raise ValueError(f"threads must start at 1, because speeds are relative to one thread; got {list(threads)}")
    figure, (axes,) = panel_grid(1)
    style_axes(axes, title, "speed (one thread = 1)", "number of threads")
    places = range(len(threads))
    for number, (task, times) in enumerate(seconds.items()):
        axes.plot(places, [times[0] / time for time in times], label=task, linewidth=1.8, **look(number))
    ideal = [min(count, cores) for count in threads]
    axes.plot(places, ideal, color=INK, linewidth=1, linestyle="--", label="ideal")
    axes.set_xticks(places, [str(count) for count in threads])
    axes.set_ylim(bottom=0)
    legend_above_data(axes, columns=2)
    return figure


def format_bars(seconds: Mapping[str, Mapping[str, float]], *, title: str = "Speed by number format") -> "Figure":
    """Draw the speed of number formats relative to the first one, with one group of bars per task.

    Args:
        seconds: task → format → time of one run; all tasks have the same formats.
        title: the figure's title.

    >>> figure = format_bars({"product": {"fp32": 2.0, "bf16": 1.0}})
    >>> [float(bar.get_width()) for bar in figure.axes[0].patches]
    [1.0, 2.0]
    """
    names = list(next(iter(seconds.values())))
    figure, (axes,) = panel_grid(1, height=1.4 + 0.3 * len(names) * len(seconds))
    style_axes(axes, title, "", f"speed ({names[0]} = 1)")
    thickness = 0.8 / len(names)
    for number, name in enumerate(names):
        speeds = [times[names[0]] / times[name] for times in seconds.values()]
        heights = [task + (number - (len(names) - 1) / 2) * thickness for task in range(len(seconds))]
        bars = axes.barh(heights, speeds, 0.9 * thickness, color=look(number)["color"], label=name)
        axes.bar_label(bars, fmt="%.1f", padding=3, fontsize=SMALL, color=INK)
    name_rows(axes, seconds)
    axes.margins(x=0.12)
    legend_below(axes)
    return figure


def stacked_bars(parts: Mapping[str, Mapping[str, float]], *, title: str, unit: str) -> "Figure":
    """Draw one horizontal bar per case, made of its parts, such as the seconds of a start or the bytes of a run.

    Args:
        parts: case → part → size. A part may be missing from a case.
        title: the picture's title.
        unit: unit of the sizes, the label of the axis.

    >>> figure = stacked_bars({"cold": {"imports": 3.0, "model": 1.0}}, title="Start", unit="seconds")
    >>> [float(bar.get_x()) for bar in figure.axes[0].patches]
    [0.0, 3.0]
    """
    names = list(dict.fromkeys(name for case in parts.values() for name in case))
    figure, (axes,) = panel_grid(1, height=1.7 + 0.45 * len(parts))
    style_axes(axes, title, "", unit)
    starts = [0.0] * len(parts)
    for number, name in enumerate(names):
        widths = [case.get(name, 0.0) for case in parts.values()]
        color = look(number)["color"]
        hatch = "//" if number >= 6 else None  # the colors repeat after six
        axes.barh(range(len(parts)), widths, 0.6, left=starts, color=color, edgecolor=PAPER, hatch=hatch, label=name)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    for row, total in enumerate(starts):
        note(axes, f"{total:.1f}" if total < 100 else f"{total:.0f}", (total, row), (4, 0))
    name_rows(axes, parts)
    axes.set_xlim(0, 1.12 * max(starts) or 1)
    figure.legend(loc="outside lower center", ncols=min(4, len(names)), **OPEN_LEGEND)
    return figure


_MEGA = 1e6


def memory_curve(
    curve: Sequence[tuple[float, int]], stages: Sequence[tuple[float, str]], *, libraries: int = 0
) -> "Figure":
    """Memory of a training run over time, colored by its stages.

    Args:
        curve: (seconds, bytes), in the order of time, as `grpo_edu.machine.step_process` measures them.
        stages: (seconds, name) where each stage begins; a name may occur again.
        libraries: bytes in use before training, which are subtracted.

    >>> figure = memory_curve([(0.0, 5_000_000), (1.0, 9_000_000)], [(0.0, "loading")], libraries=4_000_000)
    >>> [float(y) for y in figure.axes[0].lines[0].get_ydata()]
    [1.0, 5.0]
    """
    figure, (axes,) = panel_grid(1)
    style_axes(axes, "Memory during two steps", "MB", "seconds")
    names = list(dict.fromkeys(name for _, name in stages))
    ends = [begin for begin, _ in stages[1:]] + [curve[-1][0]]
    seconds = [time for time, _ in curve]
    held = [(size - libraries) / _MEGA for _, size in curve]
    axes.plot(seconds, held, color=INK, linewidth=1.2)
    drawn: set[str] = set()
    for (begin, name), end in zip(stages, ends, strict=True):
        color = look(names.index(name))["color"]
        axes.axvspan(begin, end, color=color, alpha=0.3, linewidth=0, label=None if name in drawn else name)
        drawn.add(name)
    top = max(range(len(held)), key=held.__getitem__)
    axes.plot(seconds[top], held[top], color=INK, marker="v", markersize=6, linestyle="none", label="peak")
    axes.set_xlim(stages[0][0], max(ends))
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside upper right", ncols=5, **OPEN_LEGEND)  # its colors would mix with the bands
    return figure


def peak_bars(measured: Mapping[str, float], estimated: Mapping[str, float]) -> "Figure":
    """Draw the measured peak memory of each setting as a bar, and its estimate as a diamond, in MB.

    Args:
        measured: setting → bytes, from top to bottom.
        estimated: setting → bytes, for the same settings.

    >>> figure = peak_bars({"as it is": 8e6, "in passes": 2e6}, {"as it is": 9e6, "in passes": 2e6})
    >>> [float(bar.get_width()) for bar in figure.axes[0].patches]
    [8.0, 2.0]
    """
    figure, (axes,) = panel_grid(1, height=1.5 + 0.4 * len(measured))
    style_axes(axes, "Peak memory, setting by setting", "", "MB")
    places = range(len(measured))
    widths = [size / _MEGA for size in measured.values()]
    guesses = [estimated[setting] / _MEGA for setting in measured]
    axes.barh(places, widths, 0.6, color=look(0)["color"], edgecolor=PAPER, label="measured")
    axes.plot(
        guesses,
        places,
        color=look(1)["color"],
        marker="D",
        markersize=6,
        markeredgecolor=PAPER,
        linestyle="none",
        label="estimated",
    )
    for row, (width, guess) in enumerate(zip(widths, guesses, strict=True)):
        note(axes, f"{width:.0f} measured, {guess:.0f} estimated", (max(width, guess), row), (8, 0))
    name_rows(axes, measured)
    axes.set_xlim(0, 1.65 * max(widths + guesses))
    figure.legend(loc="outside lower center", ncols=2, **OPEN_LEGEND)
    return figure
