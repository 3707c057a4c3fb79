"""The results of the challenge: ranks with ties, and the page that shows them. It loads nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from grpo_edu.evaluation import Estimate, mean_estimate
from grpo_edu.figures.style import intervals, name_rows, panel_grid, percent, style_axes
from grpo_edu.grading.pages import image, page

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass
class Entry:
    """The result of one submission from one starting model: an accuracy and a number of tokens for each seed."""

    name: str
    start: str
    accuracies: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    rejected: str = ""
    note: str = ""

    @property
    def estimate(self) -> Estimate | None:
        """The mean accuracy with its interval over the seeds; None for a single seed or a rejected submission."""
        return None if self.rejected or len(self.accuracies) < 2 else mean_estimate(self.accuracies)


def rank(entry: Entry, entries: Sequence[Entry]) -> int:
    """One more than the number of entries from the same start that are better by their whole interval.

    >>> a, b, c = (Entry(name, "tiny", scores) for name, scores in (("a", [.8, .82]), ("b", [.7, .8]), ("c", [.1, .2])))
    >>> rank(a, [a, b]), rank(b, [a, b]), rank(c, [c])
    (1, 1, 1)
    """
    own = entry.estimate
    others = [one.estimate for one in entries if one.start == entry.start and one is not entry]
    return 1 + sum(other.low > own.high for other in others if other and own)


def plot_entries(entries: Sequence[Entry], start: str) -> Figure:
    """The mean accuracy of each entry in its interval, the best on top."""
    figure, (axes,) = panel_grid(1, height=1.2 + 0.32 * len(entries))
    style_axes(
        axes, f"Accuracy after training from {start}", "", "held-out accuracy (%), with 95% intervals over the seeds"
    )
    estimates = [one.estimate for one in entries if one.estimate]
    shares = [percent(one.value, max(0.0, one.low), min(1.0, one.high)) for one in estimates]
    intervals(axes, 0, shares, range(len(shares)))
    name_rows(axes, [one.name.replace("$", r"\$") for one in entries])  # matplotlib would read formulas
    axes.set_xlim(0, 100)
    return figure


def leaderboard_page(entries: Sequence[Entry], record: Mapping[str, Any]) -> str:
    """The page: for each starting model a figure, a table with ranks, and the rejected submissions with the reason.

    entries: with at least two seeds each. record: what ``leaderboard.json`` holds besides the entries.
    """
    sections = []
    for start in dict.fromkeys(one.start for one in entries):
        own = [one for one in entries if one.start == start]
        ranked = sorted((one for one in own if one.estimate), key=lambda one: -sum(one.accuracies))
        figure = None
        if ranked:
            best = f"the highest is {ranked[0].name}, {ranked[0].estimate}"
            words = f"Mean accuracies with intervals of {len(ranked)} entries; {best}."
            figure = image(plot_entries(ranked, start), words)
        sections.append((start, ranked, figure, [one for one in own if one.rejected]))
    return page("leaderboard", sections=sections, record=record, rank=rank)
