"""Pictures of the diagnosis lab: the vital signs of broken runs, a treatment, and what came of it all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from grpo_edu.figure_style import COLORS, GRID, INK, LEGEND, WIDE, look, sheet, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEALTHY, SICK = 0, 1  # number of the look: blue circles, vermilion squares
SIGNS = {
    "reward": "reward",
    "frac_reward_zero_std": "share of\ntied groups",
    "completions/mean_length": "length\n(tokens)",
    "completions/clipped_ratio": "share\ncut off",
    "entropy": "entropy\n(nats/token)",
    "grad_norm": "gradient\nnorm",
    "clip_ratio/region_mean": "share of\nclipped tokens",
    "kl": "KL\n(nats/token)",
}
_SHARES = ("frac_reward_zero_std", "completions/clipped_ratio")


def vital_signs(
    patients: Mapping[str, tuple[Sequence[Mapping[str, Sequence[float]]], Sequence[Mapping[str, Sequence[float]]]]],
    signs: Sequence[str] = ("reward", "frac_reward_zero_std", "completions/mean_length", "grad_norm"),
) -> Figure:
    """Curves of broken runs beside those of healthy ones: a column a patient, a row a sign.

    A thin line is one seed, the thick one their mean; the band reaches from the lowest to the highest healthy seed.

    Args:
        patients: title of the column → (curves of the broken runs, curves of the healthy runs); the curves of a run
            are one list of numbers a sign, one number a step. A missing sign leaves its panel without that line.
        signs: keys of `SIGNS`, from top to bottom.

    Raises:
        ValueError: no patients, or an unknown sign.

    >>> sick, sound = [{"reward": [0.0, 0.0]}], [{"reward": [0.4, 0.6]}, {"reward": [0.5, 0.6]}]
    >>> [axes.get_title(loc="left") for axes in vital_signs({"Patient 1": (sick, sound)}, ["reward"]).axes]
    ['Patient 1']
    """
    if not patients:
        raise ValueError("patients is empty: give at least one")
    if unknown := [sign for sign in signs if sign not in SIGNS]:
        raise ValueError(f"signs: {', '.join(unknown)} unknown; choose from {', '.join(SIGNS)}")
    figure = sheet(WIDE, 0.5 + 1.35 * len(signs))
    grid = figure.subplots(len(signs), len(patients), squeeze=False, sharex="col", sharey="row")
    for column, (title, (sick, healthy)) in enumerate(patients.items()):
        for row, sign in enumerate(signs):
            axes = grid[row, column]
            last = row == len(signs) - 1
            style_axes(axes, "" if row else title, "" if column else SIGNS[sign], "step" if last else "")
            _band(axes, [run[sign] for run in healthy if sign in run])
            _lines(axes, [run[sign] for run in sick if sign in run])
            if sign in _SHARES:
                axes.set_ylim(-0.05, 1.05)
    figure.legend(*_entries(grid[0, 0]), loc="outside upper center", ncols=2, frameon=False, **LEGEND)
    return figure


def _band(axes: Axes, runs: list[Sequence[float]]) -> None:
    if not runs:
        return
    steps, columns = range(1, min(map(len, runs)) + 1), list(zip(*runs, strict=False))
    style = look(HEALTHY)
    axes.fill_between(
        steps, list(map(min, columns)), list(map(max, columns)), color=style["color"], alpha=0.18, linewidth=0
    )
    _mean(axes, runs, HEALTHY, "healthy: mean, and range of the seeds")


def _lines(axes: Axes, runs: list[Sequence[float]]) -> None:
    for values in runs:
        axes.plot(range(1, len(values) + 1), values, color=COLORS[SICK], linewidth=0.7, alpha=0.5)
    if runs:
        _mean(axes, runs, SICK, "patient: each seed, and their mean")


def _mean(axes: Axes, runs: list[Sequence[float]], number: int, label: str) -> None:
    means = [math.fsum(column) / len(column) for column in zip(*runs, strict=False)]
    every = max(1, len(means) // 6)
    style = {**look(number), "markersize": 4}
    axes.plot(
        range(1, len(means) + 1), means, **style, linewidth=1.6, markevery=(number * every // 2, every), label=label
    )


def _entries(axes: Axes) -> tuple[list, list[str]]:
    handles, labels = axes.get_legend_handles_labels()
    return handles[::-1], labels[::-1]


def treatments(
    patients: Mapping[str, tuple[Sequence[float], Sequence[float]]], *, sign: str = "reward", note: str = "mended"
) -> Figure:
    """One live run a panel: the sign under the fault, then after the mend, on the same model.

    Args:
        patients: title → (values of the broken steps, values of the mended steps after them).
        sign: the key of `SIGNS` that the values belong to.
        note: word beside the line that marks the change.

    Raises:
        ValueError: no patients, or an unknown sign.

    >>> treatments({"Patient 1": ([0.0, 0.0], [0.5, 0.6])}).axes[0].get_xlabel()
    'step'
    """
    if not patients:
        raise ValueError("patients is empty: give at least one")
    if sign not in SIGNS:
        raise ValueError(f"sign: {sign!r} unknown; choose from {', '.join(SIGNS)}")
    figure = sheet(WIDE, 2.5)
    (grid,) = figure.subplots(1, len(patients), squeeze=False, sharey=True)
    for axes, (title, (sick, mended)) in zip(grid, patients.items(), strict=True):
        style_axes(axes, title, SIGNS[sign] if axes is grid[0] else "", "step")
        change = len(sick) + 0.5
        axes.axvline(change, color=INK, linewidth=1, linestyle="--")
        axes.plot(range(1, len(sick) + 1), sick, **look(SICK), linewidth=1.6, label="broken")
        axes.plot(range(len(sick) + 1, len(sick) + len(mended) + 1), mended, **look(HEALTHY), linewidth=1.6, label=note)
    everything = [value for pair in patients.values() for values in pair for value in values]
    grid[0].set_ylim(min(0.0, *everything) - 0.05, 1.08 * max(everything) + 0.05)
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False, **LEGEND)
    return figure


def outcomes(
    cases: Mapping[str, tuple[Sequence[float], Sequence[float]]], *, base: tuple[float, float, float]
) -> Figure:
    """Held-out accuracy after the broken and after the mended runs: a row a case, a mark a seed, a bar the mean.

    Args:
        cases: name → (accuracies of the broken runs, of the mended runs), shares from 0 to 1.
        base: (accuracy, low, high) of the model before any training, drawn as a line in its interval.

    Raises:
        ValueError: no cases.

    >>> figure = outcomes({"lr too high": ([0.0, 0.1], [0.8, 0.9])}, base=(0.4, 0.35, 0.45))
    >>> figure.axes[0].get_xlabel()
    'held-out problems solved (%)'
    """
    if not cases:
        raise ValueError("cases is empty: give at least one")
    figure = sheet(WIDE, 1.0 + 0.42 * len(cases))
    axes = figure.add_subplot()
    style_axes(axes, "", "", "held-out problems solved (%)")
    center, low, high = (100 * value for value in base)
    axes.axvspan(low, high, color=GRID, linewidth=0)
    axes.axvline(center, color=INK, linewidth=1, linestyle=":", label="before training, with 95% interval")
    for row, pair in enumerate(cases.values()):
        for number, runs in ((SICK, pair[0]), (HEALTHY, pair[1])):
            height = row + (0.17 if number == SICK else -0.17)
            label = None if row else ("broken" if number == SICK else "mended")
            style = {**look(number), "markersize": 4.5}
            axes.plot(
                [100 * value for value in runs],
                [height] * len(runs),
                linestyle="none",
                alpha=0.75,
                **style,
                label=label,
            )
            mean = 100 * math.fsum(runs) / len(runs)
            axes.plot([mean, mean], [height - 0.17, height + 0.17], color=COLORS[number], linewidth=2.5)
    axes.set_yticks(range(len(cases)), list(cases))
    axes.set_ylim(len(cases) - 0.45, -0.55)
    axes.set_xlim(-2, 102)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False, **LEGEND)
    return figure
