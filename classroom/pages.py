"""The pages of a grading: one for each student, a summary for the instructor. They load nothing from elsewhere.

Their templates lie in the folder ``pages``. jinja2 escapes every text in them, because students write names and
answers.
"""

from __future__ import annotations

import base64
import functools
import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from classroom.exercises import SourceNotebook
from classroom.results import TO_GRADE, StudentGrade, column, open_column
from classroom.values import plain
from grpo_edu.figures.style import COLORS, INK, PAPER, SMALL, panel_grid, style_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SHOWN = 30  # the hardest questions, and the most frequent mistakes
BINS = 10
_MOST_OF_AN_ANSWER = 50_000  # characters of an open answer


def score_counts(shares: Sequence[float]) -> list[int]:
    """Students in each tenth of the points; who has all of them is in the last. shares: each from 0 to 1.

    >>> score_counts([0.0, 0.05, 0.1, 1.0])
    [2, 1, 0, 0, 0, 0, 0, 0, 0, 1]
    """
    counts = [0] * BINS
    for share in shares:
        counts[min(BINS - 1, int(share * BINS + 1e-9))] += 1
    return counts


def plot_scores(shares: Sequence[float]) -> Figure:
    """Draw a histogram of the students' shares of all points."""
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


def plot_questions(shares: Sequence[tuple[float, str]]) -> Figure:
    """Draw a bar for each question: the mean share of its points. shares: (share, question), the hardest first."""
    figure, (axes,) = panel_grid(1, height=1.2 + 0.26 * len(shares))
    bars = axes.barh([name for _, name in shares], [share for share, _ in shares], height=0.7, color=COLORS[4])
    axes.bar_label(bars, [f" {share:.0%}" for share, _ in shares], fontsize=SMALL, color=INK)
    style_axes(axes, "Questions, the hardest first", "", "mean share of the points")
    axes.set_xlim(0, 1.08)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0%", "25%", "50%", "75%", "100%"])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    return figure


@functools.cache
def _templates() -> Environment:
    """Return the templates, each compiled once for all students."""
    return Environment(
        loader=FileSystemLoader(Path(__file__).parent / "pages"),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def page(template: str, **content: Any) -> str:
    """Return a page from a template of classroom/pages; what is not `Markup` is escaped."""
    return _templates().get_template(f"{template}.html.j2").render(content)


def image(figure: Figure, words: str) -> Markup:
    """Return a figure as an element of a page, with a text in its place."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120, metadata={"Software": None})
    content = base64.b64encode(buffer.getvalue()).decode()
    return Markup('<img alt="{}" src="data:image/png;base64,{}">').format(words, content)


def feedback_page(grade: StudentGrade, masters: Sequence[SourceNotebook]) -> str:
    """Return what a student reads: the points, what was wrong on which input, which mistake it looks like, a hint."""
    most = sum(one.points for one in masters)
    return page(
        "feedback",
        grade=grade,
        masters=masters,
        most=most,
        to_grade=TO_GRADE,
        open_column=open_column,
        html=lambda feedback: Markup(feedback._repr_html_()),
    )


def open_answers_page(grades: Sequence[StudentGrade], masters: Sequence[SourceNotebook]) -> str:
    """Return what a person grades: each open question with model answer, rubric, and every student's answer."""
    from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

    markdown = MarkdownWithMath(renderer=IPythonRenderer(escape=False, exclude_anchor_links=True))
    return page(
        "open_answers",
        grades=grades,
        masters=masters,
        to_grade=TO_GRADE,
        open_column=open_column,
        markdown=lambda text: Markup(markdown.render(text)),
        shown=lambda text: plain(text, _MOST_OF_AN_ANSWER, lines=True),
    )


def summary_page(
    grades: Sequence[StudentGrade],
    masters: Sequence[SourceNotebook],
    files: dict[tuple[str, str], str],
    settings: Sequence[str],
) -> str:
    """Return what an instructor reads: who got how much, what was hard, which mistakes were made, what went wrong.

    files: (student, number) → the name of the feedback's file. settings: a line for each setting.
    """
    most = sum(master.points for master in masters)
    shares = [grade.points(*masters) / max(most, 1) for grade in grades]
    count = f"{len(grades)} student{'s' * (len(grades) != 1)}"
    asked = [(master, one) for master in masters for one in master.open_questions]
    return page(
        "summary",
        grades=grades,
        masters=masters,
        files=files,
        settings=settings,
        most=most,
        count=count,
        mean=f"{sum(shares) / len(shares):.0%}",
        scores=image(plot_scores(shares), f"Histogram of the shares of all points; {count}."),
        waiting=sum(grade.open_points(*one) == TO_GRADE for grade in grades for one in asked),
        questions=_questions(grades, masters),
        mistakes=_mistakes(grades, masters),
    )


def _questions(grades: Sequence[StudentGrade], masters: Sequence[SourceNotebook]) -> Markup | None:
    """Return a figure of each question's mean over the students who handed its notebook in; None if nobody did."""
    found = []
    for master in masters:
        there = [grade for grade in grades if master.name in grade.handed_in]
        for question in master.questions if there else ():
            earned = sum(one.question(question.exercise) for one in there)
            found.append((earned / (len(there) * question.points), column(master, question.exercise)))
    if not found:
        return None
    hardest = sorted(found)[:_SHOWN]
    share, name = hardest[0]
    words = f"Mean share of the points of {len(hardest)} questions; the hardest is {name} with {share:.0%}."
    return image(plot_questions(hardest), words)


def _mistakes(grades: Sequence[StudentGrade], masters: Sequence[SourceNotebook]) -> list[tuple[tuple[str, str], int]]:
    """Return the named mistakes, each as ((question, mistake), students), the most frequent first."""
    columns = {one.exercise: column(master, one.exercise) for master in masters for one in master.questions}
    counts = Counter(
        (columns[name], mistake)
        for grade in grades
        for name, feedback in grade.feedback.items()
        if name in columns
        for mistake in feedback.mistakes
        if mistake != "not written yet"
    )
    return sorted(counts.items(), key=lambda one: (-one[1], one[0]))[:_SHOWN]
