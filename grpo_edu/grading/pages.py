"""The pages of a grading: one for each student, a summary for the instructor. They load nothing from elsewhere."""

from __future__ import annotations

import base64
import html
import io
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from grpo_edu.figures.style import COLORS, INK, PAPER, SMALL, panel_grid, style_axes
from grpo_edu.grading.masters import Master
from grpo_edu.grading.results import TO_GRADE, StudentGrade, column, open_column

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BINS = 10


def score_counts(shares: Sequence[float]) -> list[int]:
    """Students in each tenth of the points; who has all of them is in the last.

    Raises ValueError for a share that is not within 0 to 1.

    >>> score_counts([0.0, 0.05, 0.1, 1.0])
    [2, 1, 0, 0, 0, 0, 0, 0, 0, 1]
    """
    counts = [0] * BINS
    for share in shares:
        if not 0 <= share <= 1:
            raise ValueError(f"shares: {share} is not within 0 to 1; give earned points over possible ones")
        counts[min(BINS - 1, int(share * BINS + 1e-9))] += 1
    return counts


def plot_scores(shares: Sequence[float]) -> Figure:
    """A histogram of the students' shares of all points."""
    figure, (axes,) = panel_grid(1, height=2.8)
    counts = score_counts(shares)
    bars = axes.bar(range(BINS), counts, width=0.9, color=COLORS[0], edgecolor=PAPER)
    axes.bar_label(bars, [str(count) if count else "" for count in counts], fontsize=SMALL, color=INK)
    style_axes(axes, "Who got how much", "students", "share of all points")
    axes.set_xticks([number - 0.5 for number in range(BINS + 1)], [f"{10 * number}%" for number in range(BINS + 1)])
    axes.set_xlim(-0.5, BINS - 0.5)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.grid(visible=False, axis="x")
    return figure


def plot_questions(names: Sequence[str], shares: Sequence[float]) -> Figure:
    """A bar a question: the mean share of its points, the hardest on top.

    Raises ValueError where there are not as many names as shares.
    """
    if len(names) != len(shares):
        raise ValueError(f"names: {len(names)} of them for {len(shares)} shares; give one each")
    order = sorted(range(len(names)), key=lambda place: (shares[place], names[place]))
    figure, (axes,) = panel_grid(1, height=1.2 + 0.26 * len(names))
    values = [shares[place] for place in order]
    bars = axes.barh(range(len(order)), values, height=0.7, color=COLORS[4], edgecolor=PAPER)
    axes.bar_label(bars, [f" {value:.0%}" for value in values], fontsize=SMALL, color=INK)
    style_axes(axes, "Questions, the hardest first", "", "mean share of the points")
    axes.set_yticks(range(len(order)), [names[place] for place in order])
    axes.set_xlim(0, 1.08)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0%", "25%", "50%", "75%", "100%"])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    return figure


_SHOWN = 30  # the hardest questions, and the most frequent mistakes
_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  background: light-dark(#ffffff, #16181d); color: light-dark(#1d1f23, #e6e6e6); overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.25rem; margin-top: 2rem; }
.card { border: 1px solid light-dark(#d5d8dd, #3a3f4a); border-radius: 6px; padding: .6rem 1rem; margin: .8rem 0; }
.trouble { border-left: 4px solid #E69F00; padding-left: .8rem; list-style: none; }
table { border-collapse: collapse; margin-bottom: 1rem; }
td, th { padding: .2rem .7rem .2rem 0; text-align: left; vertical-align: top; }
td.number, th.number { text-align: right; }
pre { white-space: pre-wrap; font: inherit; margin: .4rem 0; }
code { font: .9em/1.4 ui-monospace, monospace; }
a { color: light-dark(#0b5394, #8ab4f8); }
img { max-width: 100%; height: auto; }
"""


def page(title: str, body: str) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _list(lines: Sequence[str], kind: str = "") -> str:
    return f'<ul class="{kind}">' + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>"


def feedback_page(grade: StudentGrade, masters: Sequence[Master]) -> str:
    """What a student reads: the points, what was wrong on which input, which mistake it looks like, a hint."""
    total, most = grade.points(*masters), sum(one.points for one in masters)
    body = [f"<h1>{html.escape(grade.label)}: {total} of {most} points</h1>"]
    if grade.troubles:
        body.append(f"<p>What was noticed:</p>{_list(grade.troubles, 'trouble')}")
    for master in masters:
        body.append(f"<h2>{html.escape(master.name)}: {grade.points(master):g} of {master.points} points</h2>")
        if master.name not in grade.handed_in:
            body.append("<p>Not handed in.</p>")
            continue
        for question in master.questions:
            if question.exercise in grade.feedback:
                body.append(f'<div class="card">{grade.feedback[question.exercise]._repr_html_()}</div>')
        for asked in master.open_questions:
            points = grade.open_points(master, asked)
            answered = asked.cell in grade.open_answers.get(master.name, {})
            words = f"{points:g} of {asked.points} points" if isinstance(points, float | int) else "not graded yet"
            words += "" if answered else ", no answer was written"
            name = html.escape(open_column(master, asked))
            body.append(f'<div class="card">{name}, graded by hand: {words}.</div>')
    return page(f"Feedback for {grade.label}", "\n".join(body))


def open_answers_page(grades: Sequence[StudentGrade], masters: Sequence[Master]) -> str:
    """What a person grades: each open question with its model answer and rubric, and what every student wrote."""
    from nbconvert.filters import markdown2html

    body = [
        "<h1>Open answers, to be graded by hand</h1>",
        f"<p>Enter the points in a copy of grades.csv, in place of <i>{TO_GRADE}</i>, and run the command again with "
        "<code>--resume --by-hand COPY.csv</code>.</p>",
    ]
    for master in masters:
        for asked in master.open_questions:
            body.append(markdown2html(asked.text))
            body.append(f"<details><summary>Model answer and rubric</summary>{markdown2html(asked.model)}</details>")
            body.append(f"<p>Column of the table: <code>{html.escape(open_column(master, asked))}</code></p>")
            for grade in grades:
                answer = grade.open_answers.get(master.name, {}).get(asked.cell)
                if answer:
                    points = grade.open_points(master, asked)
                    points = points if points == TO_GRADE else f"{points:g} points"
                    body.append(f'<div class="card"><b>{html.escape(grade.label)}</b>: {points}')
                    body.append(f"<pre>{html.escape(answer)}</pre></div>")
    return page("Open answers", "\n".join(body))


def summary_page(
    grades: Sequence[StudentGrade],
    masters: Sequence[Master],
    files: dict[tuple[str, str], str],
    settings: Sequence[str],
) -> str:
    """What an instructor reads: who got how much, what was hard, which mistakes were made, what went wrong.

    files: (student, number) → the name of the feedback's file. settings: a line for each setting.
    """
    most = sum(master.points for master in masters)
    shares = [grade.points(*masters) / max(most, 1) for grade in grades]
    mean = sum(shares) / len(shares)
    body = [f"<h1>{_count(grades)}, mean {mean:.0%} of {most} points</h1>"]
    body.append(image(plot_scores(shares), f"Histogram of the shares of all points; {_count(grades)}."))
    waiting = sum(
        grade.open_points(master, one) == TO_GRADE
        for grade in grades
        for master in masters
        for one in master.open_questions
    )
    if waiting:
        body.append(f'<p>{waiting} <a href="open_answers.html">open answers</a> wait to be graded by hand.</p>')
    body += ["<h2>Questions</h2>", _questions(grades, masters)]
    body += ["<h2>Most frequent mistakes</h2>", _mistakes(grades, masters)]
    body += ["<h2>Troubles</h2>", _troubles(grades, files)]
    looks = [f"{grade.label}: {look}" for grade in grades for look in grade.looks]
    if looks:
        body.append(f"<h2>Worth a look</h2><p>Nothing was taken off for these.</p>{_list(looks, 'trouble')}")
    body += ["<h2>Students</h2>", _students(grades, masters, files), "<h2>How it was graded</h2>", _list(settings)]
    return page("Summary of the grading", "\n".join(body))


def _count(grades: Sequence[StudentGrade]) -> str:
    return f"{len(grades)} student{'s' * (len(grades) != 1)}"


def image(figure: Figure, words: str) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120, metadata={"Software": None})
    content = base64.b64encode(buffer.getvalue()).decode()
    return f'<p><img alt="{html.escape(words)}" src="data:image/png;base64,{content}"></p>'


def _questions(grades: Sequence[StudentGrade], masters: Sequence[Master]) -> str:
    """The mean of each question over the students who handed its notebook in."""
    names, shares = [], []
    for master in masters:
        there = [grade for grade in grades if master.name in grade.handed_in]
        for question in master.questions if there else ():
            names.append(column(master, question.exercise))
            shares.append(sum(one.question(question.exercise) for one in there) / (len(there) * question.points))
    if not names:
        return "<p>No notebook of the course was handed in.</p>"
    hardest = sorted(zip(shares, names, strict=True))[:_SHOWN]
    share, name = hardest[0]
    words = f"Mean share of the points of {len(hardest)} questions; the hardest is {name} with {share:.0%}."
    return image(plot_questions([name for _, name in hardest], [share for share, _ in hardest]), words)


def _mistakes(grades: Sequence[StudentGrade], masters: Sequence[Master]) -> str:
    """The named mistakes, each counted once a student and question."""
    columns = {one.exercise: column(master, one.exercise) for master in masters for one in master.questions}
    counts = Counter(
        (columns[name], mistake)
        for grade in grades
        for name, feedback in grade.feedback.items()
        if name in columns
        for mistake in feedback.mistakes
        if mistake != "not written yet"
    )
    if not counts:
        return "<p>None was named.</p>"
    ordered = sorted(counts.items(), key=lambda one: (-one[1], one[0]))[:_SHOWN]
    rows = "".join(
        f'<tr><td class="number">{count}</td><td>{html.escape(name)}</td><td>{html.escape(mistake)}</td></tr>'
        for (name, mistake), count in ordered
    )
    return f'<table><tr><th class="number">students</th><th>question</th><th>looks like</th></tr>{rows}</table>'


def _troubles(grades: Sequence[StudentGrade], files: dict[tuple[str, str], str]) -> str:
    lines = [
        f"<li>{_link(grade, files)}: {html.escape(trouble)}</li>" for grade in grades for trouble in grade.troubles
    ]
    return f'<ul class="trouble">{"".join(lines)}</ul>' if lines else "<p>None.</p>"


def _link(grade: StudentGrade, files: dict[tuple[str, str], str]) -> str:
    return f'<a href="feedback/{html.escape(files[grade.key])}.html">{html.escape(grade.label)}</a>'


def _students(grades: Sequence[StudentGrade], masters: Sequence[Master], files: dict[tuple[str, str], str]) -> str:
    head = "".join(
        f'<th class="number">{html.escape(one.name.split("_")[0])} (of {one.points})</th>' for one in masters
    )
    rows = []
    for grade in grades:
        points = [*(grade.points(master) for master in masters), grade.points(*masters)]
        cells = "".join(f'<td class="number">{value}</td>' for value in points)
        rows.append(f"<tr><td>{_link(grade, files)}</td>{cells}</tr>")
    return f'<table><tr><th>student</th>{head}<th class="number">total</th></tr>{"".join(rows)}</table>'
