"""The picture of the diagnosis lab's decision tree: from a symptom to a fault."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpo_edu.figure_style import COLORS, INK, PAPER, SMALL, WIDE, sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Question, then what a "yes" leads to: (finding, patient). No answer: on to the next question.
TREE = (
    (
        "Is the reward at 0, or near it,\nfrom the first step?",
        "Read ten samples.",
        (
            "right answers → the reward cannot read them",
            "nonsense → the prompt lacks its chat template",
            "cut in mid-sentence → too little room",
        ),
    ),
    (
        "Do half of the groups tie, or more,\nfrom the first step?",
        "Look at the rewards in a group.",
        ("one high value for all → it pays for anything", "two or three siblings only → G is too small"),
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
    """The way from a symptom to a fault: five questions down the left, what a "yes" leads to on the right.

    >>> len(decision_tree().axes)
    1
    """
    heights = [1.0 + 0.36 * len(faults) for _, _, faults in TREE]
    figure = sheet(WIDE, 0.78 * sum(heights))
    axes = figure.add_subplot()
    axes.set(xlim=(0, 10), ylim=(-sum(heights), 0.1))
    axes.axis("off")
    top = 0.0
    for number, ((question, advice, faults), height) in enumerate(zip(TREE, heights, strict=True)):
        middle = top - (height - 0.3) / 2
        _box(axes, (0.05, middle), 4.0, 0.95, question, COLORS[0], "bold")
        _box(axes, (4.85, middle), 5.1, height - 0.3, "", COLORS[1])
        text = [advice, *(f"•  {fault}" for fault in faults)]
        for line, words in enumerate(text):
            place = middle + (len(text) - 1) * 0.18 - line * 0.36
            style = {"fontstyle": "italic"} if line == 0 else {}
            axes.text(5.0, place, words, va="center", fontsize=SMALL, color=INK, **style)
        _arrow(axes, (4.05, middle), (4.85, middle), "yes")
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
    axes.annotate(word, (x, y), offset, textcoords="offset points", ha=align, va="center", fontsize=SMALL, color=INK)
