"""Pictures of a training's memory: its curve over the stages of a step, its peak setting by setting; learning rates.

Each function takes measured numbers and returns a `matplotlib.figure.Figure`, as those of `grpo_edu.figures`.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from grpo_edu.figure_style import INK, LEGEND, PAPER, SMALL, legend_above_data, look, panel_grid, style_axes
from grpo_edu.significance import wilson_interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MEGA = 1e6


def memory_curve(
    curve: Sequence[tuple[float, int]], stages: Sequence[tuple[float, str]], *, libraries: int = 0
) -> "Figure":
    """Memory of a training against time, colored by the stage that is at work.

    Args:
        curve: (seconds, bytes), in the order of time, as `grpo_edu.step_process` measures them.
        stages: (seconds, name) where each stage begins; a name may come again.
        libraries: bytes to leave out, held before the training.

    Raises:
        ValueError: no curve or no stages.

    >>> figure = memory_curve([(0.0, 5_000_000), (1.0, 9_000_000)], [(0.0, "loading")], libraries=4_000_000)
    >>> [float(y) for y in figure.axes[0].lines[0].get_ydata()]
    [1.0, 5.0]
    """
    if not curve or not stages:
        raise ValueError("curve and stages must hold at least one entry each")
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
    figure.legend(loc="outside upper right", ncols=5, frameon=False, **LEGEND)  # on the bands its colors would mix
    return figure


def peak_bars(measured: Mapping[str, float], estimated: Mapping[str, float]) -> "Figure":
    """The peak of each setting as a bar, the estimate as a diamond on it, in MB.

    Args:
        measured: setting → bytes, from top to bottom.
        estimated: setting → bytes, for the same settings.

    Raises:
        ValueError: no settings, or other ones in `estimated`.

    >>> figure = peak_bars({"as it is": 8e6, "in passes": 2e6}, {"as it is": 9e6, "in passes": 2e6})
    >>> [float(bar.get_width()) for bar in figure.axes[0].patches]
    [8.0, 2.0]
    """
    if not measured or [*measured] != [*estimated]:
        raise ValueError(f"measured and estimated must have the same settings, got {[*measured]} and {[*estimated]}")
    figure, (axes,) = panel_grid(1, height=1.5 + 0.4 * len(measured))
    style_axes(axes, "Peak memory, setting by setting", "", "MB")
    places = range(len(measured))
    widths = [size / _MEGA for size in measured.values()]
    guesses = [size / _MEGA for size in estimated.values()]
    axes.barh(places, widths, 0.6, color=look(0)["color"], edgecolor=PAPER, label="measured")
    axes.plot(guesses, places, color=look(1)["color"], marker="D", markersize=6, markeredgecolor=PAPER,
              linestyle="none", label="estimated")  # fmt: skip
    for row, (width, guess) in enumerate(zip(widths, guesses, strict=True)):
        axes.annotate(f"{width:.0f}", (max(width, guess), row), (8, 0), textcoords="offset points", va="center",
                      fontsize=SMALL, color=INK)  # fmt: skip
    axes.set_yticks(places, [*measured])
    axes.set_ylim(len(measured) - 0.5, -0.5)
    axes.set_xlim(0, 1.12 * max(widths + guesses))
    axes.grid(visible=False, axis="y")
    figure.legend(loc="outside lower center", ncols=2, frameon=False, **LEGEND)
    return figure


def accuracy_by_rate(tuning: Mapping[str, Mapping[float, tuple[int, int]]]) -> "Figure":
    """Accuracy after a training against its learning rate, a curve for each method, with 95% Wilson intervals.

    Args:
        tuning: method → learning rate → (solved, tried).

    Raises:
        ValueError: no methods, or one without learning rates.

    >>> figure = accuracy_by_rate({"GRPO": {1e-4: (5, 10), 1e-3: (8, 10)}})
    >>> [float(y) for y in figure.axes[0].lines[0].get_ydata()]
    [50.0, 80.0]
    """
    if not tuning or not all(tuning.values()):
        raise ValueError("tuning must hold at least one method, and each method at least one learning rate")
    figure, (axes,) = panel_grid(1, height=3.6)
    style_axes(axes, "Accuracy by learning rate", "% right", "learning rate")
    axes.set_xscale("log")
    axes.grid(visible=False, axis="x", which="minor")
    for number, (method, found) in enumerate(tuning.items()):
        rates = sorted(found)
        shares = [100 * found[rate][0] / found[rate][1] for rate in rates]
        bounds = [wilson_interval(*found[rate]) for rate in rates]
        reach = [
            [share - 100 * low for share, (low, _) in zip(shares, bounds, strict=True)],
            [100 * high - share for share, (_, high) in zip(shares, bounds, strict=True)],
        ]
        shifted = [rate * 1.04**number for rate in rates]  # so that intervals do not hide each other
        axes.plot(shifted, shares, linewidth=1.8, label=method, **look(number))
        axes.errorbar(shifted, shares, reach, color=look(number)["color"], linestyle="none", linewidth=1, capsize=2)
    axes.set_ylim(0, 100)
    legend_above_data(axes, columns=2)
    axes.set_yticks(range(0, 101, 20))
    return figure
