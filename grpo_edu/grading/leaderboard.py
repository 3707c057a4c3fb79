"""The results of the challenge: ranks with ties, and the page that shows them. It loads nothing from elsewhere."""

from __future__ import annotations

import html
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
    rules = record["rules"]
    body = [
        "<h1>Challenge: leaderboard</h1>",
        f"<p>Every submission was trained with the same {rules['seeds']} new seeds, and evaluated on "
        f"{rules['num_heldout']} new held-out problems per seed, with one sampled answer each. Submissions whose "
        "intervals overlap are tied: a rank is one more than the number of submissions that are better by their whole "
        "interval.</p>",
    ]
    for start in dict.fromkeys(one.start for one in entries):
        body.append(
            f"<h2>From <code>{html.escape(start)}</code>: {rules['budget'][start]:,} sampled tokens per run</h2>"
        )
        body += _section(start, [one for one in entries if one.start == start])
    isolation = "isolated by bubblewrap" if record["isolation"] == "bubblewrap" else "run WITHOUT ISOLATION"
    body.append(
        f"<h2>How it was judged</h2><p>The code was {isolation}. Seed {record['seed']}, grpo_edu {record['grpo_edu']}"
        f": <code>{html.escape(record['command'])}</code></p>"
    )
    return page("Challenge: leaderboard", "\n".join(body))


def _section(start: str, entries: Sequence[Entry]) -> list[str]:
    """The part of the page about one starting model."""
    ranked = sorted((one for one in entries if one.estimate), key=lambda one: -sum(one.accuracies))
    body = []
    if ranked:
        best = ranked[0]
        words = f"Mean accuracies with intervals of {len(ranked)} entries; the highest is {best.name}, {best.estimate}."
        body.append(image(plot_entries(ranked, start), words))
    head = '<th class="number">rank</th><th>submission</th><th>accuracy</th><th>of each seed</th>'
    rows = "".join(
        f'<tr><td class="number">{rank(one, ranked)}</td><td>{html.escape(one.name)}</td><td>{one.estimate}</td>'
        f"<td>{', '.join(f'{value:.1%}' for value in one.accuracies)}</td>"
        f'<td class="number">{max(one.tokens, default=0):,}</td></tr>'
        for one in ranked
    )
    body.append(f'<table><tr>{head}<th class="number">most tokens</th></tr>{rows}</table>')
    rejected = [f"<li>{html.escape(one.name)}: {html.escape(one.rejected)}</li>" for one in entries if one.rejected]
    if rejected:
        body.append(f'<h3>Rejected</h3><ul class="trouble">{"".join(rejected)}</ul>')
    body += [
        f"<details><summary>Note of {html.escape(one.name)}</summary><pre>{html.escape(one.note)}</pre></details>"
        for one in ranked
        if one.note
    ]
    return body
