"""Pictures of the machine: speed against threads, number formats, where start-up time and memory go.

Each function takes measured numbers and returns a `matplotlib.figure.Figure`, as those of `grpo_edu.figures`.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from grpo_edu.figure_style import INK, LEGEND, PAPER, SMALL, legend_above_data, look, panel_grid, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def thread_curves(threads: Sequence[int], seconds: Mapping[str, Sequence[float]], *, cores: float) -> "Figure":
    """How many times as fast as with one thread each task is, against the number of threads.

    Args:
        threads: the numbers of threads that were tried, rising, the first of them 1.
        seconds: task → the time it took with each number of threads.
        cores: cores that the process may use; a vertical line, and where the ideal stops rising.

    Raises:
        ValueError: threads that do not start at 1, or times of another length.

    >>> figure = thread_curves([1, 2], {"a product": [2.0, 1.0]}, cores=2)
    >>> [float(y) for y in figure.axes[0].lines[0].get_ydata()]
    [1.0, 2.0]
    """
    if not threads or threads[0] != 1:
        raise ValueError(f"threads must start at 1, the speed that the others are compared with; got {list(threads)}")
    figure, (axes,) = panel_grid(1)
    style_axes(axes, "Speed by threads", "one thread = 1", "threads")
    places = range(len(threads))
    for number, (task, times) in enumerate(seconds.items()):
        if len(times) != len(threads):
            raise ValueError(f"seconds[{task!r}] must have {len(threads)} times, one for each number of threads")
        axes.plot(places, [times[0] / time for time in times], label=task, linewidth=1.8, **look(number))
    ideal = [min(count, cores) for count in threads]
    axes.plot(places, ideal, color=INK, linewidth=1, linestyle="--", label="ideal")
    axes.set_xticks(places, [str(count) for count in threads])
    axes.set_ylim(bottom=0)
    legend_above_data(axes, columns=2)
    return figure


def format_bars(seconds: Mapping[str, Mapping[str, float]]) -> "Figure":
    """The speed of number formats, as multiples of the first one's, a group of bars for each task.

    Args:
        seconds: task → format → time of one run; all tasks have the same formats.

    Raises:
        ValueError: no tasks, or tasks whose formats differ.

    >>> figure = format_bars({"product": {"fp32": 2.0, "bf16": 1.0}})
    >>> [float(bar.get_width()) for bar in figure.axes[0].patches]
    [1.0, 2.0]
    """
    formats = {tuple(times) for times in seconds.values()}
    if len(formats) != 1:
        raise ValueError(f"seconds must have the same formats for each of at least one task, got {sorted(formats)}")
    (names,) = formats
    figure, (axes,) = panel_grid(1, height=1.4 + 0.3 * len(names) * len(seconds))
    style_axes(axes, "Speed by number format", "", f"{names[0]} = 1")
    thickness = 0.8 / len(names)
    for number, name in enumerate(names):
        speeds = [times[names[0]] / times[name] for times in seconds.values()]
        heights = [task + (number - (len(names) - 1) / 2) * thickness for task in range(len(seconds))]
        bars = axes.barh(heights, speeds, 0.9 * thickness, color=look(number)["color"], label=name)
        axes.bar_label(bars, fmt="%.1f", padding=3, fontsize=SMALL, color=INK)
    axes.set_yticks(range(len(seconds)), list(seconds))
    axes.set_ylim(len(seconds) - 0.5, -0.5)
    axes.margins(x=0.12)
    axes.grid(visible=False, axis="y")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(names), frameon=False, **LEGEND)
    return figure


def stacked_bars(parts: Mapping[str, Mapping[str, float]], *, title: str, unit: str) -> "Figure":
    """One horizontal bar for each case, put together from its parts: seconds of a start, bytes of a run.

    Args:
        parts: case → part → size. A part that a case lacks is left out there.
        title: of the picture.
        unit: of the sizes, the label of the axis.

    Raises:
        ValueError: no cases, or a negative size.

    >>> figure = stacked_bars({"cold": {"imports": 3.0, "model": 1.0}}, title="Start", unit="seconds")
    >>> [float(bar.get_x()) for bar in figure.axes[0].patches]
    [0.0, 3.0]
    """
    sizes = [size for case in parts.values() for size in case.values()]
    if not sizes or min(sizes) < 0:
        raise ValueError("parts must hold at least one size, and none below 0")
    names = list(dict.fromkeys(name for case in parts.values() for name in case))
    figure, (axes,) = panel_grid(1, height=1.7 + 0.45 * len(parts))
    style_axes(axes, title, "", unit)
    starts = [0.0] * len(parts)
    for number, name in enumerate(names):
        widths = [case.get(name, 0.0) for case in parts.values()]
        color = look(number)["color"]
        hatch = "//" if number >= 6 else None  # beyond six the colors come again
        axes.barh(range(len(parts)), widths, 0.6, left=starts, color=color, edgecolor=PAPER, hatch=hatch, label=name)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    for row, total in enumerate(starts):
        _total(axes, row, total)
    axes.set_yticks(range(len(parts)), list(parts))
    axes.set_ylim(len(parts) - 0.5, -0.5)
    axes.set_xlim(0, 1.12 * max(starts) or 1)
    axes.grid(visible=False, axis="y")
    figure.legend(loc="outside lower center", ncols=min(4, len(names)), frameon=False, **LEGEND)
    return figure


def _total(axes: "Axes", row: int, total: float) -> None:
    text = f"{total:.1f}" if total < 100 else f"{total:.0f}"
    axes.annotate(text, (total, row), (4, 0), textcoords="offset points", va="center", fontsize=SMALL, color=INK)
