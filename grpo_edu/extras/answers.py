"""Read an answer: numbers, fractions, lists of numbers and words in one canonical form."""

from __future__ import annotations

import re
from fractions import Fraction

# All dashes that may be written in place of a minus sign.
DASHES = str.maketrans(dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\u2014\ufe63\uff0d", "-"))
# What may precede an answer: "The answer is", Markdown, LaTeX, brackets or a currency sign. Other words may not,
# so that the heading "#### Step 3" gives no answer.
_LEAD = re.compile(
    r"\s*(?:(?:the\s+)?(?:final\s+)?answer(?:\s+is)?\b)?[\s*_`\"'(\[{$€£¥\\=:]*(?:boxed\{)?", re.IGNORECASE
)
# 1,200.50 or 1200 or .5: each group of thousands has exactly three digits, and at least one digit is required.
_DECIMAL = r"(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)?(?:\.(?P<part>[0-9]+))?(?<=[0-9])"
_FRACTION = r"(?P<top>[0-9]{1,15})/(?P<bottom>[0-9]{1,15})(?![0-9])"
_NUMBER = re.compile(rf"(?P<sign>[-+]?) ?[$€£¥]? ?(?:{_FRACTION}|{_DECIMAL})")
LOOSE_NUMBER = re.compile(rf"(?<![\w.])[-+]?[$€£¥]?{_DECIMAL}")
_COMMA = re.compile(r"\s*,\s*(?=[-+$€£¥.0-9])")
_WORD = re.compile(r"([^\W\d_]+(?:[-'’][^\W\d_]+)*)[\s.!*_`\"')\]}$\\]*")
_REFUSED_TAIL = re.compile(r"\s*(?:hundred|thousand|million|billion|trillion)s?\b|.*\bor\b", re.IGNORECASE | re.DOTALL)
_NO_ANSWER = frozenset({"nan", "none", "null", "inf", "infinity"})


def _canonical_fraction(sign: str, top: int, bottom: int) -> str | None:
    """Write `1/2` as `0.5` and `2/6` as `1/3`; None for `x/0`, and for `48/2`, whose division was not carried out."""
    if bottom == 0:
        return None
    value = Fraction(top, bottom)
    if value.denominator == 1:
        return "0" if value == 0 else None
    digits = next((k for k in range(1, 51) if 10**k % value.denominator == 0), None)
    if digits is None:
        return f"{sign}{value.numerator}/{value.denominator}"
    whole, part = divmod(value.numerator * 10**digits // value.denominator, 10**digits)
    return f"{sign}{whole}.{part:0{digits}d}"


def _canonical_number(match: re.Match) -> str | None:
    """The canonical form of a matched number: without separators, redundant zeros, `+` or `-0`. Exact at any length."""
    sign = "-" if match["sign"] == "-" else ""
    if match["top"]:
        return _canonical_fraction(sign, int(match["top"]), int(match["bottom"]))
    whole = (match["whole"] or "").replace(",", "").lstrip("0") or "0"
    part = (match["part"] or "").rstrip("0")
    number = f"{whole}.{part}" if part else whole
    return number if number == "0" else sign + number


def _numbers(text: str, start: int) -> tuple[list[str | None], str]:
    """The comma-separated numbers that begin at `start`, and the text after them."""
    numbers: list[str | None] = []
    position = end = start
    while match := _NUMBER.match(text, position):
        numbers.append(_canonical_number(match))
        end = match.end()
        comma = _COMMA.match(text, end)
        if not comma:
            break
        position = comma.end()
    return numbers, text[end:]


def normalize_answer(text: str) -> str | None:
    """The canonical form of an answer, or None if the text has no answer or more than one.

    - A number is written without currency, thousands separators, redundant zeros, unit and trailing words: `$1,200.00`
      becomes `1200`, `18%` becomes `18`, `−3` (Unicode minus) `-3`, `.5` `0.5` and `-0` `0`. Exact at any length.
    - A fraction is reduced, and written as a decimal if that is finite: `2/4` becomes `0.5`, `2/6` becomes `1/3`. A
      fraction with a whole value (`48/2`) is a division that was not carried out, and gives None.
    - A comma is a thousands separator only without a space and before exactly three digits. Every other comma
      separates a list: `7, 15, 23` and `7,15,23` both become `7, 15, 23`, but `1,200` becomes `1200`.
    - A word (`Heads.`) is converted to lower case. Several words, `nan`, `none`, `null` and `inf` give None.
    - A second number after the answer, an "or", and a magnitude in words (`3 million`) give None, because a policy
      that is rewarded for `48 or 49` learns to write several answers.

    >>> [normalize_answer(text) for text in ("$1,200.00", "18 dollars.", "7, 15", "Heads.", "48 or 49")]
    ['1200', '18', '7, 15', 'heads', None]
    """
    if not isinstance(text, str):
        raise ValueError(f"text must be a string, got {type(text).__name__}. Pass str(answer).")
    text = text.translate(DASHES)
    lead = _LEAD.match(text)
    start = lead.end() if lead else 0
    numbers, tail = _numbers(text, start)
    if any(c.isnumeric() and c not in "²³" for c in tail):  # a second number, in any script
        return None
    if not numbers:
        word = _WORD.fullmatch(text, start)
        return None if word is None or word[1].casefold() in _NO_ANSWER else word[1].casefold()
    known = [number for number in numbers if number is not None]
    if len(known) < len(numbers) or _REFUSED_TAIL.match(tail):
        return None
    return ", ".join(known)
