"""Pictures of advantages: rewards and their advantages, groups that tie, the weight of a group, and baselines."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from grpo_edu.advantages import group_advantages, tie_probability
from grpo_edu.figures.style import (
    COLORS,
    INK,
    LEGEND,
    PAPER,
    SMALL,
    WIDE,
    intervals,
    legend_above_data,
    look,
    panel_grid,
    sheet,
    style_axes,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def group_dots(rewards: Tensor, num_generations: int) -> "Figure":
    """Draw the rewards of each group with their mean (left), and the advantages computed from them (right).

    Args:
        rewards: (B,), one reward per completion, the rows of a group adjacent.
        num_generations: G >= 2.

    Raises ValueError: as `group_advantages`.

    >>> figure = group_dots(torch.tensor([1.0, 0.0, 0.0, 0.0]), 4)
    >>> [axes.get_title(loc="left") for axes in figure.axes]
    ['Rewards', 'Advantages within each group']
    """
    advantages = group_advantages(rewards, num_generations)
    figure, panels = panel_grid(2)
    titles = {"reward": "Rewards", "advantage": "Advantages within each group"}
    for axes, name, values in zip(panels, titles, (rewards, advantages), strict=True):
        style_axes(axes, titles[name], name, "row of the batch")
        for number, group in enumerate(values.view(-1, num_generations).tolist()):
            rows = range(number * num_generations, (number + 1) * num_generations)
            axes.plot(rows, group, linestyle="none", label=f"group {number}", **look(number))
            mean = sum(group) / num_generations
            ends = (rows[0] - 0.3, rows[-1] + 0.3)
            axes.plot(ends, (mean, mean), color=look(number)["color"], linewidth=1.2, linestyle="--")
        axes.xaxis.get_major_locator().set_params(integer=True)
        legend_above_data(axes, columns=2)
    return figure


def group_and_ties(
    rewards: Tensor, num_generations: int, chance: float | None = None, *, scale_rewards: str = "group"
) -> "Figure":
    """Draw the rewards and advantages of one group as bars, and below them how often groups of this size tie.

    Args:
        rewards: (G,), one reward per completion of the group.
        num_generations: G >= 2.
        chance: p, the probability that one completion is right: a point on the curve of ties; None draws no point.
        scale_rewards: as for `group_advantages`.

    Raises ValueError: as `group_advantages`.

    >>> figure = group_and_ties(torch.tensor([1.0, 0.0, 0.0, 0.0]), 4, 0.25)
    >>> [axes.get_title(loc="left") for axes in figure.axes]
    ['All rewards of a group tie', 'Rewards', 'Advantages']
    """
    advantages = group_advantages(rewards, num_generations, scale_rewards=scale_rewards)
    figure, (ties, left, right) = panel_grid(3, height=4.6)
    style_axes(ties, "All rewards of a group tie", "probability", "p, the probability that one completion is right")
    shares = [number / 100 for number in range(101)]
    curve = [tie_probability(share, num_generations) for share in shares]
    ties.plot(shares, curve, color=look(0)["color"], linewidth=1.8)
    ties.set_ylim(-0.04, 1.04)
    if chance is not None:
        ties.plot([chance], [tie_probability(chance, num_generations)], **{**look(1), "markersize": 10})
    for axes, name, values in ((left, "Rewards", rewards), (right, "Advantages", advantages)):
        style_axes(axes, name, "", "completion")
        axes.bar(range(num_generations), values.tolist(), width=0.6, color=look(0)["color"])
        axes.axhline(float(values.mean()), color=look(1)["color"], linewidth=1.2, linestyle="--")
        axes.xaxis.get_major_locator().set_params(integer=True)
    left.set_ylim(bottom=0, top=max(1.05, 1.05 * float(rewards.max())))
    return figure


def token_advantages(tokens: Sequence[Sequence[str]], mask: Tensor, advantages: Mapping[str, Tensor]) -> "Figure":
    """Draw the tokens of conversations, one row each, colored by advantage; the environment's tokens are hatched.

    The number above the first token of each turn is its advantage, so the picture can be read without colors.

    Args:
        tokens: R rows of texts, a short one for each token.
        mask: (R, C), 1 for a token of the policy, 0 for one of the environment.
        advantages: title of a panel → (R, C), an advantage for each token.

    >>> both = {"by trajectory": torch.tensor([[1.0, 1.0, 1.0]]), "by turn": torch.tensor([[1.0, 0.0, -0.5]])}
    >>> figure = token_advantages([["A", "?", "B"]], torch.tensor([[1, 0, 1]]), both)
    >>> [text.get_text() for text in figure.axes[1].texts if text.get_text()]
    ['+1.0', 'A', '?', '-0.5', 'B']
    """
    from matplotlib.patches import Rectangle

    figure = sheet(WIDE, 0.9 + 0.52 * len(tokens) * len(advantages))
    panels = figure.subplots(len(advantages), 1, squeeze=False)[:, 0]
    largest = max(float(values.abs().max()) for values in advantages.values()) or 1.0
    for axes, (title, values) in zip(panels, advantages.items(), strict=True):
        axes.set_title(title, loc="left", fontsize=10, color=INK)
        for row, texts in enumerate(tokens):
            before = 0
            for place, text in enumerate(texts):
                own, value = int(mask[row, place]), float(values[row, place])
                box = dict(facecolor=PAPER, edgecolor="0.6", hatch="////", linewidth=0)
                if own:
                    color = COLORS[0] if value > 0 else COLORS[1]
                    box = dict(facecolor=(color, 0.75 * abs(value) / largest), edgecolor=INK, linewidth=0.8)
                    if not before:
                        axes.text(place, row - 0.38, f"{value:+.1f}", fontsize=8, color=INK, va="bottom")
                axes.add_patch(Rectangle((place, row - 0.35), 1, 0.6, **box))
                axes.text(place + 0.5, row - 0.05, text, fontsize=8, color=INK, ha="center", va="center")
                before = own
        axes.set(xlim=(-0.2, max(map(len, tokens)) + 0.2), ylim=(len(tokens) - 0.6, -0.85), yticks=[], xticks=[])
        axes.set_facecolor(PAPER)
        for side in axes.spines.values():
            side.set_visible(False)
    return figure


def tie_curves() -> "Figure":
    """Draw the probability that all rewards of a group are equal, against p, with one curve per group size.

    >>> [line.get_label() for line in tie_curves().axes[0].lines]
    ['G = 2', 'G = 4', 'G = 8', 'G = 16']
    """
    figure, (axes,) = panel_grid(1)
    style_axes(
        axes, "Larger groups tie less often", "probability of a tie", "p, the probability that one completion is right"
    )
    shares = [number / 100 for number in range(101)]
    for number, size in enumerate((2, 4, 8, 16)):
        chances = [tie_probability(share, size) for share in shares]
        axes.plot(shares, chances, label=f"G = {size}", linewidth=1.8, markevery=10, **look(number))
    axes.set_ylim(-0.04, 1.04)
    axes.legend(loc="upper center", **LEGEND)
    return figure


def tie_shares(
    rates: Sequence[float],
    sizes: Sequence[int],
    measured: Sequence[tuple[float, float, float]],
    formulas: Mapping[str, Sequence[float]],
) -> "Figure":
    """Draw how the questions differ in difficulty (left), and the share of tied groups, measured and computed (right).

    Args:
        rates: the share of right completions of each question, between 0 and 1.
        sizes: group sizes G.
        measured: (share, low, high) of tied groups at each size, with its interval.
        formulas: name → the expected share at each size.

    >>> figure = tie_shares([0.0, 0.5, 0.5], [2, 4], [(0.6, 0.5, 0.7), (0.4, 0.3, 0.5)], {"one p": [0.5, 0.2]})
    >>> figure.axes[1].get_legend_handles_labels()[1]
    ['one p', 'measured']
    """
    figure, (left, right) = panel_grid(2, height=3.4)
    style_axes(left, "Questions differ in difficulty", "questions", "share of right completions")
    left.hist(rates, bins=[number / 10 for number in range(11)], color=look(0)["color"], edgecolor=PAPER)
    left.grid(visible=False, axis="x")
    style_axes(right, "One p for all predicts too few ties", "share of groups that tie", "G, completions per group")
    places = range(len(sizes))
    for number, (name, values) in enumerate(formulas.items(), start=1):
        right.plot(places, values, label=name, linewidth=1.5, **look(number))
    intervals(right, 0, places, measured, label="measured")
    right.set_xticks(places, [str(size) for size in sizes])
    right.set_ylim(bottom=-0.02)
    legend_above_data(right, columns=1)
    return figure


def advantages_by_count(num_generations: int) -> "Figure":
    """Draw the advantage of a right and of a wrong completion, by how many of the group are right (rewards 0 and 1).

    The left panel divides by the group's standard deviation (GRPO); the right one only centers (Dr. GRPO).

    >>> [len(line.get_xdata()) for line in advantages_by_count(4).axes[0].lines]
    [3, 3]
    """
    counts = range(1, num_generations)
    figure, panels = panel_grid(2)
    for axes, scaling, title in zip(
        panels, ("group", "none"), ("Scaled: rare outcomes count most", "Centered only"), strict=True
    ):
        style_axes(axes, title, "advantage", f"right completions among {num_generations}")
        groups = [
            group_advantages(_with_right(count, num_generations), num_generations, scale_rewards=scaling)
            for count in counts
        ]
        axes.plot(
            counts, [float(group[0]) for group in groups], label="of a right completion", linewidth=1.8, **look(0)
        )
        axes.plot(
            counts, [float(group[-1]) for group in groups], label="of a wrong completion", linewidth=1.8, **look(1)
        )
        legend_above_data(axes, columns=1)
    panels[1].sharey(panels[0])
    return figure


def pull_by_difficulty(rewards: Tensor, num_generations: int) -> "Figure":
    """Draw how much weight groups have in the update, by how many of their completions are right.

    The weight of a group is the sum of its absolute advantages. The left panel has the weight of one group, as a
    multiple of that of a group that is half right. The right panel has the share of the batch's weight that comes from
    all groups with that number of right completions.

    Args:
        rewards: (B,), each 0 or 1; at least one group does not tie.
        num_generations: G >= 2, even.

    Raises ValueError: as `group_advantages`; a reward other than 0 and 1; an odd G; a batch in which all groups tie.

    >>> figure = pull_by_difficulty(torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0]), 4)
    >>> [round(float(y), 2) for y in figure.axes[0].lines[1].get_ydata()]
    [0.0, 0.75, 1.0, 0.75, 0.0]
    """
    if num_generations % 2:
        raise ValueError(f"num_generations must be even, so that a group can be half right; got {num_generations}")
    if not ((rewards == 0) | (rewards == 1)).all():
        raise ValueError("rewards must each be 0 or 1, so that right completions can be counted")
    right = rewards.view(-1, num_generations).sum(dim=1)
    counts = range(num_generations + 1)
    figure, (one, all_groups) = panel_grid(2)
    below = f"right completions among {num_generations}"
    style_axes(one, "Scaling favors rare outcomes", "weight of one group (half right = 1)", below)
    style_axes(all_groups, "All groups of this batch", "% of the batch's weight", below)
    for number, (scaling, label) in enumerate((("group", "scaled"), ("none", "centered"))):
        single = [_pull(_with_right(count, num_generations), num_generations, scaling) for count in counts]
        pulls = [float(pull / single[num_generations // 2]) for pull in single]
        one.plot(counts, pulls, label=label, linewidth=1.8, **look(number))
        batch = _pull(rewards, num_generations, scaling)
        if not batch.sum() > 0:
            raise ValueError("rewards: all groups tie, so every advantage is 0; give a batch in which some do not tie")
        shares = [100 * float(batch[right == count].sum() / batch.sum()) for count in counts]
        all_groups.plot(counts, shares, label=label, linewidth=1.8, **look(number))
    for axes in (one, all_groups):
        axes.set_xticks(counts)
        legend_above_data(axes, columns=2)
    return figure


def baseline_curve(
    baselines: Sequence[float],
    ratios: Sequence[float],
    low: Sequence[float],
    high: Sequence[float],
    *,
    marks: Mapping[str, float] | None = None,
) -> "Figure":
    """Draw the gradient's variance with a constant baseline, relative to the mean of the group's other completions.

    Args:
        baselines: the constant b of each point, in units of reward, rising.
        ratios: variance with b, divided by the variance with the mean of the other completions in the group.
        low, high: the interval of each ratio.
        marks: label → b, points of the curve that get a label, from left to right.

    >>> figure = baseline_curve([0, 1], [2.0, 3.0], [1.5, 2.5], [2.5, 3.5], marks={"none": 0})
    >>> figure.axes[0].get_xlabel()
    'b, subtracted from every reward'
    """
    figure, (axes,) = panel_grid(1, height=3.6)
    style_axes(
        axes,
        "A poor constant multiplies the variance",
        "variance (mean of the others = 1)",
        "b, subtracted from every reward",
    )
    axes.fill_between(baselines, low, high, color=look(0)["color"], alpha=0.18, linewidth=0, label="95% interval")
    axes.plot(baselines, ratios, color=look(0)["color"], linewidth=1.8, label="the same b for all")
    axes.axhline(1, color=look(2)["color"], linewidth=1.5, linestyle="--", label="mean of the other completions")
    for number, (label, place) in enumerate((marks or {}).items()):
        inside = (place - baselines[0]) / (baselines[-1] - baselines[0])
        side = "left" if inside < 0.1 else "right" if inside > 0.9 else "center"
        _mark(axes, label, place, float(np.interp(place, baselines, ratios)), number, side)
    axes.set_ylim(0, 1.25 * max(high))  # room for the names above the highest marks
    axes.legend(loc="upper center", **LEGEND)
    return figure


def _with_right(count: int, num_generations: int) -> Tensor:
    """Return a group's rewards with the right completions first: (G,)."""
    return (torch.arange(num_generations) < count).float()


def _pull(rewards: Tensor, num_generations: int, scale_rewards: str) -> Tensor:
    """Return the sum of the absolute advantages of each group: (N,)."""
    advantages = group_advantages(rewards, num_generations, scale_rewards=scale_rewards)
    return advantages.view(-1, num_generations).abs().sum(dim=1)


def _mark(axes: "Axes", label: str, x: float, y: float, number: int, side: str) -> None:
    axes.plot([x], [y], linestyle="none", **look(1))
    above = (0, 30 + 16 * (number % 2))
    foot = {"left": 0.0, "center": 0.5, "right": 1.0}[side]
    line = {"arrowstyle": "-", "color": INK, "linewidth": 0.6, "shrinkB": 4, "relpos": (foot, 0)}
    axes.annotate(label, (x, y), above, textcoords="offset points", ha=side, fontsize=SMALL, color=INK, arrowprops=line)
