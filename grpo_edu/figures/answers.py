"""The answers of a model as HTML: how probable each different one is, and the groups with their rewards.

An answer is a dictionary: `text`; `answer`, what was extracted from it; `reward`; `advantage`; `tokens`, its length;
`chance`, its probability when it was sampled; and for an answer that was scored again `start` and `then`, its
probability before training and now. In pages with scripts the panel is drawn by `chances.js` of `grpo_edu/web`, which
the playground uses too. The tables without scripts need no style sheet.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from IPython.display import HTML

from grpo_edu.figures.style import COLORS
from grpo_edu.web import json_attribute, read_web

Answer = Mapping[str, Any]
_TITLE = "What the model says, most probable first"
_MAX_ROWS = 5  # different answers in the panel; the others are summed
_LEFT = 'style="text-align:left;vertical-align:top"'  # JupyterLab's own tables are aligned at the right


def different_answers(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Return each different answer once, the most probable first: `text`, `reward`, its probability `now` and `before`.

    Of long answers the probability is the geometric mean over their tokens, because a long text as a whole is
    improbable. `before` is None for answers that were not scored again.

    >>> rows = [{"text": "4", "reward": 1, "chance": 0.5, "then": 0.7, "tokens": 2}] * 2
    >>> different_answers([*rows, {"text": "5", "reward": 0, "chance": 0.2, "then": 0.8, "tokens": 2}])
    [{'text': '5', 'reward': 0, 'now': 0.8, 'before': 0.2}, {'text': '4', 'reward': 1, 'now': 0.7, 'before': 0.5}]
    """
    _, value = probability_measure(answers)
    found = {}
    for answer in answers:
        again = "then" in answer
        found[answer["text"]] = {
            "text": answer["text"],
            "reward": answer["reward"],
            "now": value(answer, "then" if again else "chance"),
            "before": value(answer, "start" if "start" in answer else "chance") if again else None,
        }
    return sorted(found.values(), key=lambda row: -row["now"])


def probability_measure(answers: Sequence[Answer]) -> tuple[str, Callable[[Answer, str], float]]:
    """Return the name and the function of what is shown of how probable an answer is.

    >>> name, value = probability_measure([{"chance": 1e-6, "tokens": 6}])
    >>> name, round(value({"chance": 1e-6, "tokens": 6}, "chance"), 3)
    ('per token', 0.1)
    """
    chances = sorted(answer["chance"] for answer in answers)
    if chances[len(chances) // 2] > 1e-4 or not all("tokens" in answer for answer in answers):
        return "probability", lambda answer, key: answer[key]
    return "per token", lambda answer, key: answer[key] ** (1 / answer["tokens"])


def _panel(answers: Sequence[Answer], scored: bool) -> dict[str, Any]:
    """Return what the panel shows: its title, the names of its columns, its rows and the sum of all other answers."""
    name, _ = probability_measure(answers)
    rows = different_answers(answers)
    shown = rows[:_MAX_ROWS]
    trained = all(row["before"] is not None for row in rows)
    rest = None
    if name == "probability":  # probabilities of whole answers add up to 1
        keys = ("now", "before") if trained else ("now",)
        rest = {"before": None} | {key: max(0.0, 1 - sum(row[key] for row in shown)) for key in keys}
    return {
        "title": _TITLE,
        "names": ["answer", name, "line: before training" if trained else ""],
        "rows": [
            {
                "text": row["text"],
                "right": row["reward"] == 1 if scored else None,
                "now": row["now"],
                "before": row["before"],
            }
            for row in shown
        ],
        "rest": rest,
    }


def chances_html(answers: Sequence[Answer], *, scored: bool) -> str:
    """Return the panel for the HTML widget of a notebook, which runs no `<script>`; its style starts it on arrival."""
    panel = _panel(answers, scored)
    place = f"<div data-chances='{json_attribute(panel)}'>{_plain_table(panel)}</div>"
    return f'{place}<style onload="{html.escape(read_web("chances.js"))}">{read_web("chances.css")}</style>'


def plain_chances_html(answers: Sequence[Answer], *, scored: bool) -> str:
    """Return the panel as a table that needs neither a script nor a style sheet."""
    return _plain_table(_panel(answers, scored))


def _plain_table(panel: Mapping[str, Any]) -> str:
    rest = panel["rest"]
    other = [{"text": "all other answers together", "right": None, **rest}] if rest else []
    lines = []
    for row in [*panel["rows"], *other]:
        sign = "" if row["right"] is None else "✓ " if row["right"] else "✗ "
        change = "" if row["before"] is None else f"{percent_text(row['before'])} → "
        bar = f'<progress max="100" value="{100 * row["now"]:.0f}"></progress>'
        lines.append(
            f"<tr><td {_LEFT}>{sign}{html.escape(row['text'])}</td>"
            f"<td {_LEFT}>{change}{percent_text(row['now'])}</td><td {_LEFT}>{bar}</td></tr>"
        )
    return _table(panel["title"], panel["names"][:2] + [""], lines)


def group_html(answers: Sequence[Answer], title: str, *, scored: bool) -> str:
    """Return a table of one group: each different answer, how often it came, and, once scored, reward and advantage."""
    counts: dict[str, int] = {}
    for answer in answers:
        counts[answer["text"]] = counts.get(answer["text"], 0) + 1
    rows = {answer["text"]: answer for answer in answers}
    lines = []
    for text, answer in sorted(rows.items(), key=lambda row: (-row[1]["reward"] if scored else 0, -counts[row[0]])):
        cells = [f"× {counts[text]}"]
        sign, color = "", "gray"
        if scored:
            right = answer["reward"] == 1
            sign, color = ("✓ ", COLORS[0]) if right else ("✗ ", COLORS[1])
            extracted = "none" if answer["answer"] is None else html.escape(str(answer["answer"]))
            advantage = f"{answer['advantage']:+.2f}".replace("-", "−")
            cells += [extracted, f"{answer['reward']:.0f}", advantage]
        look = f'style="text-align:left;vertical-align:top;border-left:4px solid {color}"'
        first = f"<td {look}>{sign}{html.escape(text)}</td>"
        lines.append(f"<tr>{first}{''.join(f'<td {_LEFT}>{cell}</td>' for cell in cells)}</tr>")
    names = ["answer", "times", *(["extracted", "reward", "advantage"] if scored else [])]
    return f'<div role="region" tabindex="0" aria-label="{html.escape(title)}">{_table(title, names, lines)}</div>'


def groups_html(groups: Sequence[str]) -> str:
    """Return tables of `group_html` next to each other."""
    return f'<style>{read_web("answers.css")}</style><div class="grpo-edu-answers">{"".join(groups)}</div>'


def paired_answers(before: Sequence[str], after: Sequence[str], prompts: Sequence[str] = ()) -> HTML:
    """Return a table of answers before and after training, next to each other, below their prompts if there are any.

    The table's class keeps MathJax from reading what stands between two dollar signs as a formula.

    >>> paired_answers(["It costs $3."], ["#### 3"]).data.count("<td")
    2
    """

    def cell(kind: str, text: str, span: int = 1) -> str:
        shown = html.escape(text).replace("\n", "<br>")
        return f"<{kind} colspan={span} {_LEFT}>{shown}</{kind}>"

    lines = [cell("th", "before training") + cell("th", "after training")]
    for number, pair in enumerate(zip(before, after, strict=True)):
        lines += [cell("th", prompts[number], 2)] if prompts else []
        lines.append("".join(cell("td", text) for text in pair))
    rows = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return HTML(f'<table class="mathjax_ignore" style="width:100%">{rows}</table>')


def _table(title: str, names: Sequence[str], lines: Sequence[str]) -> str:
    heads = "".join(
        f'<th scope="col" {_LEFT}>{html.escape(name)}</th>' if name else f"<td {_LEFT}></td>" for name in names
    )
    caption = f'<caption style="caption-side:top;text-align:left"><b>{html.escape(title)}</b></caption>'
    return f"<table>{caption}<thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def percent_text(share: float) -> str:
    """Return a probability in percent with two digits; the smallest ones as "under 0.01%".

    >>> percent_text(0.1234), percent_text(0.00002)
    ('12%', 'under 0.01%')
    """
    percent = 100 * share
    return "under 0.01%" if percent < 0.01 else f"{percent:.0f}%" if percent >= 10 else f"{percent:.2g}%"
