"""What a student reads after a check, as plain text, as HTML and as points for nbgrader; and after a short question."""

from __future__ import annotations

import html
import math
import re
import textwrap
from dataclasses import dataclass
from typing import Any

from grpo_edu.checks.compare import OTHER, describe_difference, difference, shown
from grpo_edu.figures.style import COLORS

WIDTH = 88
_EMPHASIS = re.compile(r"(?<!\w)\*(\w[^*]*)\*(?!\w)")


@dataclass(frozen=True)
class PartResult:
    """One part of an exercise, judged. Where it failed: on which input, what was expected and what came.

    certain: the mistake is that of all inputs, not only of those of this part.
    """

    name: str
    points: float
    max_points: int
    given: str = ""
    expected: str = ""
    got: str = ""
    why: str = ""
    mistake: str = ""
    hint: str = ""
    certain: bool = True

    @property
    def passed(self) -> bool:
        """True if all points of the part were earned."""
        return self.points == self.max_points

    @property
    def likeness(self) -> str:
        """The text before the name of the mistake."""
        return "looks like:" if self.certain else "on these inputs it behaves like:"

    def rows(self) -> list[tuple[str, str]]:
        """Return the message about a failure: (what, text)."""
        if self.passed or self.mistake == "not written yet":
            return []
        rows = [("input", self.given), ("expected", self.expected), ("got", self.got), ("why", self.why)]
        return [(what, text) for what, text in rows if text]


@dataclass(frozen=True)
class Feedback:
    """The parts of one exercise, judged. seed: makes the same inputs again."""

    exercise: str
    parts: tuple[PartResult, ...]
    seed: int

    @property
    def points(self) -> float:
        """Points earned, a whole number if no slip was credited."""
        return plain_number(sum(part.points for part in self.parts))

    @property
    def max_points(self) -> int:
        """Points that there were."""
        return sum(part.max_points for part in self.parts)

    @property
    def mistakes(self) -> list[str]:
        """The named mistakes that are certain, each once."""
        return list(dict.fromkeys(part.mistake for part in self.parts if part.mistake and part.certain))

    def grade(self) -> float:
        """Show the feedback and return the points, 0 too, as nbgrader reads them from the last line of a test cell."""
        from IPython.display import display

        display(self)
        return self.points

    def __str__(self) -> str:
        lines = [f"{self.exercise}: {self.points} of {self.max_points} points"]
        written = any(part.mistake != "not written yet" for part in self.parts)
        if not written:
            return f"{lines[0]}\n  Not written yet. {self.parts[0].hint}"
        for part in self.parts:
            mark = "✓" if part.passed else "✗"
            lines.append(f"  {mark} {part.name} ({plain_number(part.points)} of {part.max_points})")
            if part.mistake:
                lines += _wrapped(f"      {part.likeness} ", part.mistake)
                lines += _wrapped("      hint: ", part.hint)
            for what, text in part.rows():
                lines += _wrapped(f"      {what:9}", text)
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        written = any(part.mistake != "not written yet" for part in self.parts)
        head = f"<b>{html.escape(self.exercise)}</b>: {self.points} of {self.max_points} points"
        if not written:
            return f"<div>{head}<br>Not written yet. {_code(self.parts[0].hint)}</div>"
        return f"<div>{head}{''.join(_part_html(part) for part in self.parts)}</div>"


def plain_number(points: float) -> float:
    """2 for 2.0, and at most two decimals.

    >>> plain_number(2.0), plain_number(1.5)
    (2, 1.5)
    """
    return int(points) if points == int(points) else round(points, 2)


def _wrapped(label: str, text: str) -> list[str]:
    rest = " " * len(label)
    lines = []
    for number, line in enumerate(text.splitlines() or [""]):
        start = label if not number else rest
        lines += textwrap.wrap(line, WIDTH, initial_indent=start, subsequent_indent=rest) or [start.rstrip()]
    return lines


def _code(text: str) -> str:
    """Escaped HTML in which text between backticks becomes code and text between asterisks is emphasized.

    >>> _code("The *mean* of `a * b`, not 2 * 3 * 4.")
    'The <em>mean</em> of <code>a * b</code>, not 2 * 3 * 4.'
    """
    pieces = html.escape(text).split("`")
    return "".join(
        f"<code>{piece}</code>" if number % 2 else _EMPHASIS.sub(r"<em>\1</em>", piece)
        for number, piece in enumerate(pieces)
    )


def _part_html(part: PartResult) -> str:
    # green and vermilion, which differ for every eye, and a sign next to them
    mark, color = ("✓", COLORS[2]) if part.passed else ("✗", COLORS[1])
    text = (
        f'<div style="border-left:4px solid {color};padding:2px 0 2px 10px;margin:6px 0">'
        f'<span style="color:{color};font-weight:bold">{mark}</span> {html.escape(part.name)} '
        f"({plain_number(part.points)} of {part.max_points})"
    )
    if part.mistake and not part.passed:
        text += f"<br>{part.likeness.capitalize()} <b>{html.escape(part.mistake)}</b><br>Hint: {_code(part.hint)}"
    rows = "".join(
        f'<tr><td style="text-align:left;vertical-align:top">{what}</td>'
        f'<td style="text-align:left"><code style="white-space:pre-wrap">{html.escape(value)}</code></td></tr>'
        for what, value in part.rows()
    )
    return text + (f'<table style="margin:4px 0">{rows}</table>' if rows else "") + "</div>"


# ---- *Your turn*, at the end of a section of a notebook ----
def your_turn(answer: Any, expected: Any, hint: str = "", tolerance: float = 1e-3) -> None:
    """Print whether a short answer is right, and if not, in which direction it is wrong.

    How far a number is off is not said, because this would give the answer away; only a factor of ten or more is.

    answer: the student's; None, also inside a list, means that it is still missing. expected: the right answer: a
    number, a text, a list or a tensor. tolerance: how much a number may differ, absolute or relative. Lists, tuples,
    arrays and tensors with the same values count as equal, and so do texts that differ only in case.

    >>> your_turn(None, 0.5)
    Not answered yet: replace None with your answer and run this cell again.
    >>> your_turn(0.5, 0.5)
    Correct: 0.5
    >>> your_turn(0.25, 0.5, hint="Divide by the number of right answers.")
    Not yet: 0.25 is too small. Hint: Divide by the number of right answers.
    >>> your_turn(500.0, 0.5)
    Not yet: 500 is 1000 times too large.
    """
    given, wanted = _plain(answer), _plain(expected)
    if _is_missing(given):
        print("Not answered yet: replace None with your answer and run this cell again.")
    elif not (found := _how_wrong(given, wanted, tolerance)):
        print(f"Correct: {shown(given)}")
    else:
        print(f"Not yet: {found}." + (f" Hint: {hint}" if hint else ""))


def _plain(value: Any) -> Any:
    """Return a tensor or an array as a list, a tuple as a list, a text without case; everything else as it is."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, str):
        return value.strip().casefold()
    return [_plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def _is_missing(value: Any) -> bool:
    return value is None or value is ... or (isinstance(value, list) and any(_is_missing(entry) for entry in value))


def _how_wrong(given: Any, wanted: Any, tolerance: float) -> str | None:
    """Return what is wrong with an answer, in words, or None if it is right."""
    found = difference(given, wanted, tolerance)
    if found and (found == OTHER or isinstance(given, bool)):
        return f"{shown(given)} is not the answer"
    if not found or not isinstance(given, (int, float)) or not math.isfinite(given):
        return found
    if isinstance(wanted, (int, float)) and not isinstance(wanted, bool):
        found = describe_difference(given, wanted, counted=isinstance(given, int), roughly=True)
    return f"{shown(given)}{found.removeprefix('it')}"
