"""Pictures of the diagnosis lab: the decision tree, the metrics of faulty runs, a fix, and its effect on accuracy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from grpo_edu.figures.style import COLORS, GRID, INK, OPEN_LEGEND, PAPER, SMALL, WIDE, look, note, sheet, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# (question, what to do after "yes", findings and their faults); "no" leads to the next question.
TREE = (
    (
        "Is the reward at 0, or near it,\nfrom the first step?",
        "Read ten samples.",
        (
            "right answers → the reward cannot read them",
            "nonsense → the prompt lacks its chat template",
            "cut in mid-sentence → too few tokens allowed",
        ),
    ),
    (
        "Do half of the groups tie, or more,\nfrom the first step?",
        "Look at the rewards in a group.",
        ("one high value for all → it pays for anything", "only two or three completions → G is too small"),
    ),
    (
        "Does the reward break down,\nor the KL run away?",
        "Look at the first steps, then at the KL.",
        ("broken within a few steps → learning rate too high", "the KL grows faster and faster → its sign is wrong"),
    ),
    (
        "Are tokens clipped, though a batch\nis used for one update only?",
        "The ratio must begin at 1.",
        ("it does not → old log-probabilities are stale",),
    ),
    (
        "Flat, slow, or merely suspicious?\nThe curves do not tell.",
        "Take one batch, check it by hand.",
        (
            "the best of a group is not pushed up → groups mixed",
            "first token not trained → mask off by one",
            "EOS not trained → EOS counts as padding",
            "a tied group has an advantage → float trap",
        ),
    ),
)


def decision_tree() -> Figure:
    """Draw the way from a symptom to a fault: five questions on the left, and what "yes" leads to on the right.

    >>> len(decision_tree().axes)
    1
    """
    heights = [1.0 + 0.36 * len(faults) for _, _, faults in TREE]
    figure = sheet(WIDE, 0.78 * sum(heights))
    figure.get_layout_engine().set(w_pad=0.04, h_pad=0.04)  # its boxes need the width
    axes = figure.add_subplot()
    axes.set(xlim=(0, 10), ylim=(-sum(heights), 0.1))
    axes.axis("off")
    top = 0.0
    for number, ((question, advice, faults), height) in enumerate(zip(TREE, heights, strict=True)):
        middle = top - (height - 0.3) / 2
        _box(axes, (0.05, middle), 4.0, 0.95, question, COLORS[0], "bold")
        _arrow(axes, (4.05, middle), (4.85, middle), "yes")  # before what it leads to, as `describe` reads it
        _box(axes, (4.85, middle), 5.1, height - 0.3, "", COLORS[1])
        text = [advice, *(f"•  {fault}" for fault in faults)]
        for line, words in enumerate(text):
            place = middle + (len(text) - 1) * 0.18 - line * 0.36
            style = {"fontstyle": "italic"} if line == 0 else {}
            axes.text(5.0, place, words, va="center", fontsize=SMALL, color=INK, **style)
        if number + 1 < len(TREE):
            following = top - height - (heights[number + 1] - 0.3) / 2
            _arrow(axes, (2.05, middle - 0.475), (2.05, following + 0.475), "no")
        top -= height
    return figure


def _box(
    axes: Axes,
    left_middle: tuple[float, float],
    width: float,
    height: float,
    text: str,
    color: str,
    weight: str = "normal",
) -> None:
    from matplotlib.patches import FancyBboxPatch

    left, middle = left_middle
    corner = (left, middle - height / 2)
    style = "round,pad=0,rounding_size=0.12"
    axes.add_patch(
        FancyBboxPatch(corner, width, height, boxstyle=style, facecolor=PAPER, edgecolor=color, linewidth=1.6)
    )
    axes.text(left + width / 2, middle, text, ha="center", va="center", fontsize=SMALL, color=INK, fontweight=weight)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], word: str) -> None:
    axes.annotate(
        "", end, start, arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 1.2, "shrinkA": 0, "shrinkB": 0}
    )
    x, y = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
    vertical = start[0] == end[0]
    offset, align = ((5, 0), "left") if vertical else ((0, 6), "center")
    note(axes, word, (x, y), offset, ha=align)


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


def metric_curves(
    patients: Mapping[str, tuple[Sequence[Mapping[str, Sequence[float]]], Sequence[Mapping[str, Sequence[float]]]]],
    signs: Sequence[str] = ("reward", "frac_reward_zero_std", "completions/mean_length", "grad_norm"),
) -> Figure:
    """Curves of faulty runs next to those of healthy ones: one column per patient (a faulty run), one row per metric.

    A thin line is one seed, and the thick line is the mean of the seeds. The band reaches from the lowest to the
    highest healthy seed.

    Args:
        patients: title of the column → (curves of the faulty runs, curves of the healthy runs). The curves of a run
            are metric → one number per step. Where a metric is missing, the panel lacks that line.
        signs: keys of `SIGNS`, from top to bottom.

    Raises ValueError for an unknown sign.

    >>> sick, sound = [{"reward": [0.0, 0.0]}], [{"reward": [0.4, 0.6]}, {"reward": [0.5, 0.6]}]
    >>> [axes.get_title(loc="left") for axes in metric_curves({"Patient 1": (sick, sound)}, ["reward"]).axes]
    ['Patient 1']
    """
    if unknown := [sign for sign in signs if sign not in SIGNS]:
        raise ValueError(f"signs: unknown: {', '.join(unknown)}; choose from {', '.join(SIGNS)}")
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
    figure.legend(*_entries(grid[0, 0]), loc="outside upper center", ncols=2, **OPEN_LEGEND)
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
        _mean(axes, runs, SICK, "faulty run: each seed, and their mean")


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


def treatments(patients: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> Figure:
    """Draw one run per panel: its reward with the fault, and then with the fix, on the same model.

    patients: title → (values of the steps with the fault, values of the steps with the fix).

    >>> treatments({"Patient 1": ([0.0, 0.0], [0.5, 0.6])}).axes[0].get_xlabel()
    'step'
    """
    figure = sheet(WIDE, 2.5)
    (grid,) = figure.subplots(1, len(patients), squeeze=False, sharey=True)
    for axes, (title, (sick, fixed)) in zip(grid, patients.items(), strict=True):
        style_axes(axes, title, SIGNS["reward"] if axes is grid[0] else "", "step")
        change = len(sick) + 0.5
        axes.axvline(change, color=INK, linewidth=1, linestyle="--")
        axes.plot(range(1, len(sick) + 1), sick, **look(SICK), linewidth=1.6, label="faulty")
        steps = range(len(sick) + 1, len(sick) + len(fixed) + 1)
        axes.plot(steps, fixed, **look(HEALTHY), linewidth=1.6, label="fixed")
    everything = [value for pair in patients.values() for values in pair for value in values]
    grid[0].set_ylim(min(0.0, *everything) - 0.05, 1.08 * max(everything) + 0.05)
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside upper center", ncols=2, **OPEN_LEGEND)
    return figure


def outcomes(
    cases: Mapping[str, tuple[Sequence[float], Sequence[float]]], *, base: tuple[float, float, float]
) -> Figure:
    """Held-out accuracy after the faulty and the fixed runs: one row per case, one marker per seed, a bar at the mean.

    Args:
        cases: name → (accuracies of the faulty runs, of the fixed runs), shares from 0 to 1.
        base: (accuracy, low, high) of the model before any training, drawn as a line in its interval.

    >>> figure = outcomes({"lr too high": ([0.0, 0.1], [0.8, 0.9])}, base=(0.4, 0.35, 0.45))
    >>> figure.axes[0].get_xlabel()
    'held-out problems solved (%)'
    """
    figure = sheet(WIDE, 1.0 + 0.42 * len(cases))
    axes = figure.add_subplot()
    style_axes(axes, "", "", "held-out problems solved (%)")
    center, low, high = (100 * value for value in base)
    axes.axvspan(low, high, color=GRID, linewidth=0)
    axes.axvline(center, color=INK, linewidth=1, linestyle=":", label="before training, with 95% interval")
    for row, pair in enumerate(cases.values()):
        for number, runs in ((SICK, pair[0]), (HEALTHY, pair[1])):
            height = row + (0.17 if number == SICK else -0.17)
            style = {**look(number), "markersize": 4.5}
            axes.plot(
                [100 * value for value in runs],
                [height] * len(runs),
                linestyle="none",
                alpha=0.75,
                **style,
                label="faulty" if number == SICK else "fixed",
            )
            mean = 100 * math.fsum(runs) / len(runs)
            axes.plot([mean, mean], [height - 0.17, height + 0.17], color=COLORS[number], linewidth=2.5)
    axes.set_yticks(range(len(cases)), list(cases))
    axes.set_ylim(len(cases) - 0.45, -0.55)
    axes.set_xlim(-2, 102)
    handles, labels = axes.get_legend_handles_labels()
    entries = dict(zip(labels, handles, strict=True))  # each name once, though every row has it
    figure.legend(entries.values(), entries, loc="outside upper center", ncols=3, **OPEN_LEGEND)
    return figure
