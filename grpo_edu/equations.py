"""The equations that a text writes down, and whether they hold."""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import pairwise

_OPERATOR = r"[-+*/×÷·x]"
_OPERAND = r"-?\$?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]{1,50}(?![0-9]))(?:\.[0-9]{1,50}(?![0-9]))?"
_STEP = re.compile(rf"[ \t]*({_OPERATOR})[ \t]*({_OPERAND})")
# One side of an equation: operands joined by operators, for as long as they go on in the line.
_SIDE = re.compile(rf"(?<![\w.,$])({_OPERAND})((?:[ \t]*{_OPERATOR}[ \t]*{_OPERAND})*)")
# What shows that a side goes on where it cannot be read: a parenthesis, a power, a percent sign, more digits.
_GOES_ON = re.compile(rf"[%^]| [0-9]|[ \t]*{_OPERATOR}[ \t]*\(")
_GOES_ON_BEFORE = re.compile(r".*[-+*/×÷·^)0-9]")
_SPELLINGS = str.maketrans({"−": "-", "–": "-", "—": "-", "∗": "*", "⋅": "·"})


def check_equations(text: str) -> list[bool]:
    """Whether each equation written in `text` holds, in order.

    An equation is `a op b … = c` with + - * / (also × ÷ · x) between plain numbers, multiplication before
    addition, in exact arithmetic: `1 / 3 = 0.33` does not hold, nor does a division by zero. In a chain such
    as `14 + 34 = 48 - 12 = 36` each "=" is judged by itself, so its first does not hold. `48 = 48` calculates
    nothing and is no equation. What has parentheses, powers, percent signs, unknowns (`5 + 4c`), numbers with
    spaces (`1 1/2`, `1 000`) or units inside is not read.

    >>> check_equations("14 + 34 = 48. 48 - 12 = 35. So x = 35.")
    [True, False]
    """
    text = text.translate(_SPELLINGS).replace("\\times", "×").replace("\\div", "÷")
    verdicts = []
    for left, right in pairwise(_SIDE.finditer(text)):
        joined = text[left.end() : right.start()].strip() == "="
        calculates = bool(left[2] or right[2])
        if joined and calculates and not _is_cut(text, left, right):
            a, b = _value(left), _value(right)
            verdicts.append(a is not None and a == b)
    return verdicts


def _value(side: re.Match) -> Fraction | None:
    """The exact value of a side such as `8 - 2 * 3`; None where it divides by zero."""
    total, term = Fraction(0), _number(side[1])
    for operator, operand in _STEP.findall(side[2]):
        number = _number(operand)
        if operator == "+":
            total, term = total + term, number
        elif operator == "-":
            total, term = total + term, -number
        elif operator not in "/÷":
            term *= number
        elif number == 0:
            return None
        else:
            term /= number
    return total + term


def _number(operand: str) -> Fraction:
    return Fraction(operand.replace("$", "").replace(",", ""))


def _is_cut(text: str, left: re.Match, right: re.Match) -> bool:
    """Whether the equation begins before what was read, or goes on after it. A bullet is no minus sign."""
    before = text[: left.start()].rpartition("\n")[2].strip()
    begins_before = before not in ("-", "*") and _GOES_ON_BEFORE.fullmatch(before)
    unknown = right[2] and text[right.end() : right.end() + 1].isalpha()
    return bool(begins_before or unknown or _GOES_ON.match(text, right.end()))
