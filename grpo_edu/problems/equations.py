"""The equations in a worked solution, checked in exact arithmetic."""

import re
from fractions import Fraction
from itertools import pairwise

_OPERATOR = r"[-+*/×÷·x]"
_OPERAND = r"-?\$?(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])|[0-9]{1,50}(?![0-9]))(?:\.[0-9]{1,50}(?![0-9]))?"
_STEP = re.compile(rf"[ \t]*({_OPERATOR})[ \t]*({_OPERAND})")
# One side of an equation: operands joined by operators, as far as possible within the line.
_SIDE = re.compile(rf"(?<![\w.,$])({_OPERAND})((?:[ \t]*{_OPERATOR}[ \t]*{_OPERAND})*)")
# Signs that a side continues with something that is not parsed: a parenthesis, a power, a percent sign, more digits.
_GOES_ON = re.compile(rf"[%^]| [0-9]|[ \t]*{_OPERATOR}[ \t]*\(")
_GOES_ON_BEFORE = re.compile(r".*[-+*/×÷·^)0-9]")
_SPELLINGS = str.maketrans({"−": "-", "–": "-", "—": "-", "∗": "*", "⋅": "·"})


def check_equations(text: str) -> list[bool]:
    """Return whether each equation in `text` is true, in the order of the text.

    An equation is `a op b … = c` with + - * / (or × ÷ · x) between plain numbers. It is evaluated in exact arithmetic,
    multiplication before addition, so `1 / 3 = 0.33` and a division by zero are false. In a chain such as
    `14 + 34 = 48 - 12 = 36` each "=" is checked separately, so the first is false. `48 = 48` contains no operation and
    does not count as an equation. Expressions with parentheses, powers, percent signs, unknowns (`5 + 4c`), numbers
    with spaces (`1 1/2`, `1 000`) or units are ignored.

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


def calculate(expression: str) -> str | None:
    """Return the exact value of plain numbers joined by + - * /; None for any other text, or a division by zero.

    The grammar is that of one side of an equation in `check_equations`; the text is parsed, never run as code.

    >>> [calculate(text) for text in ("190+55", "7-2*3", "7/2", "1/0", "48", "2**9", "print(1)")]
    ['245', '1', '3.5', None, None, None, None]
    """
    side = _SIDE.fullmatch(expression)
    value = _value(side) if side and side[2] else None
    return None if value is None else str(value) if value.denominator == 1 else f"{float(value):.6g}"


def _value(side: re.Match) -> Fraction | None:
    """Return the exact value of a side such as `8 - 2 * 3`; None for a division by zero."""
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
    """Return True if the equation starts before, or ends after, the part that was parsed. A bullet is not a minus."""
    before = text[: left.start()].rpartition("\n")[2].strip()
    begins_before = before not in ("-", "*") and _GOES_ON_BEFORE.fullmatch(before)
    unknown = right[2] and text[right.end() : right.end() + 1].isalpha()
    return bool(begins_before or unknown or _GOES_ON.match(text, right.end()))
