"""From a question to the text that the model continues, and from its completion back to an answer.

The answer that a completion gives is what a reward pays for, so reading it is part of the reward: whatever
this module lets through, a policy under training will find. Two rules follow. An answer is *one* thing (one
number, one list of numbers or one word), so a hedge such as ``#### 48 or 49`` is no answer. And numbers are
compared as exact decimal strings, never as floats.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SYSTEM_PROMPT = "Solve the problem. End with #### and the answer."
MARKER = "####"

# Every dash that a keyboard or a tokenizer may put for a minus sign.
_DASHES = str.maketrans(dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\u2014\ufe63\uff0d", "-"))
# What may stand before an answer: "The answer is", Markdown, LaTeX, brackets, a currency sign. No other word:
# the heading "#### Step 3" gives no answer.
_LEAD = re.compile(
    r"\s*(?:(?:the\s+)?(?:final\s+)?answer(?:\s+is)?\b)?[\s*_`\"'(\[{$€£¥\\=:]*(?:boxed\{)?", re.IGNORECASE
)
# 1,200.50 or 1200 or .5: a thousands group has exactly three digits, and there must be a digit somewhere.
_DECIMAL = r"(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)?(?:\.(?P<part>[0-9]+))?(?<=[0-9])"
_FRACTION = r"(?P<top>[0-9]{1,15})/(?P<bottom>[0-9]{1,15})(?![0-9])"
_NUMBER = re.compile(rf"(?P<sign>[-+]?) ?[$€£¥]? ?(?:{_FRACTION}|{_DECIMAL})")
_LOOSE_NUMBER = re.compile(rf"(?<![\w.])[-+]?[$€£¥]?{_DECIMAL}")
_COMMA = re.compile(r"\s*,\s*(?=[-+$€£¥.0-9])")
_WORD = re.compile(r"([^\W\d_]+(?:[-'’][^\W\d_]+)*)[\s.!*_`\"')\]}$\\]*")
_REFUSED_TAIL = re.compile(
    r"\s*(?:hundred|thousand|million|billion|trillion)s?\b|.*\bor\b", re.IGNORECASE | re.DOTALL
)
_NO_ANSWER = frozenset({"nan", "none", "null", "inf", "infinity"})
_ANSWER_IS = re.compile(r"\banswer(?:\s+is\b\s*:?|\s*:)", re.IGNORECASE)


def chat_messages(question: str) -> list[dict[str, str]]:
    """The conversation that asks `question`: the system prompt, then the question.

    >>> [message["role"] for message in chat_messages("What is 2 + 3?")]
    ['system', 'user']
    """
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]


def render_prompt(tokenizer: PreTrainedTokenizerBase, question: str) -> str:
    """The text that the model continues: the chat through the tokenizer's own template, then its turn opened.

    A plain-string prompt that skips the template is the commonest reason for a reward that stays 0: an
    instruction-tuned model that is not asked in its own format does not answer in it.

    Raises ValueError for a tokenizer without a chat template.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "tokenizer has no chat template, so the model cannot be asked in its own format; "
            "use an instruction-tuned model, or set tokenizer.chat_template"
        )
    return tokenizer.apply_chat_template(chat_messages(question), add_generation_prompt=True, tokenize=False)


def completion_text(completion: str | list[dict]) -> str:
    """The text that the model wrote: a string as it is, or the assistant's messages of a chat.

    What other roles say (a tool, a user) is not the model's and is left out.
    Raises ValueError for anything else.

    >>> completion_text([{"role": "assistant", "content": "#### 5"}])
    '#### 5'
    """
    if isinstance(completion, str):
        return completion
    if not isinstance(completion, list) or not all(isinstance(message, dict) for message in completion):
        raise ValueError(
            f"completion must be a string or a list of chat messages, got {type(completion).__name__}; "
            "pass the decoded text, not token ids"
        )
    own = [message for message in completion if message.get("role", "assistant") == "assistant"]
    texts = [message.get("content") or "" for message in own]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("completion holds a message whose content is not a string; pass text messages only")
    return "\n".join(texts)


def _canonical_fraction(sign: str, top: int, bottom: int) -> str | None:
    """`1/2` as `0.5`, `2/6` as `1/3`; None for `x/0` and for `48/2`, a division left undone."""
    if bottom == 0:
        return None
    value = Fraction(top, bottom)
    if value.denominator == 1:
        return "0" if value == 0 else None
    places = next((k for k in range(1, 51) if 10**k % value.denominator == 0), None)
    if places is None:
        return f"{sign}{value.numerator}/{value.denominator}"
    whole, part = divmod(value.numerator * 10**places // value.denominator, 10**places)
    return f"{sign}{whole}.{part:0{places}d}"


def _canonical_number(match: re.Match) -> str | None:
    """The one spelling of a matched number: no separators, idle zeros, `+` or `-0`. Exact at any length."""
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
    """The one spelling of an answer, or None where the text holds no answer or more than one.

    - A number loses currency, thousands separators, idle zeros, a unit and trailing words: `$1,200.00` is
      `1200`, `18%` is `18`, `−3` (Unicode minus) is `-3`, `.5` is `0.5`, `-0` is `0`. Exact at any length.
    - A fraction is reduced and written as a decimal where that ends: `2/4` is `0.5`, `2/6` is `1/3`. One that
      comes to a whole number (`48/2`) is a division left undone: None.
    - A comma is a thousands separator only without a space and before exactly three digits. Any other comma
      separates a list: `7, 15, 23` and `7,15,23` are both `7, 15, 23`, while `1,200` is `1200`.
    - A word (`Heads.`) is lower-cased. Several words are no answer, nor are `nan`, `none`, `null` and `inf`.
    - A second number after the answer, an "or", and a magnitude in words (`3 million`) make it None. A policy
      that is paid for `48 or 49` learns to hedge.

    >>> [normalize_answer(text) for text in ("$1,200.00", "18 dollars.", "7, 15", "Heads.", "48 or 49")]
    ['1200', '18', '7, 15', 'heads', None]
    """
    if not isinstance(text, str):
        raise ValueError(f"text must be a string, got {type(text).__name__}; pass str(answer)")
    text = text.translate(_DASHES)
    lead = _LEAD.match(text)
    start = lead.end() if lead else 0
    numbers, tail = _numbers(text, start)
    if any(c.isnumeric() and c not in "²³" for c in tail):  # another number, in whatever script
        return None
    if not numbers:
        word = _WORD.fullmatch(text, start)
        return None if word is None or word[1].casefold() in _NO_ANSWER else word[1].casefold()
    known = [number for number in numbers if number is not None]
    if len(known) < len(numbers) or _REFUSED_TAIL.match(tail):
        return None
    return ", ".join(known)


def answers_equal(a: str, b: str) -> bool:
    """Whether two answers are the same after `normalize_answer`; what is no answer equals nothing.

    >>> answers_equal("48", "$48.00"), answers_equal("715", "7, 15"), answers_equal("", "")
    (True, False, False)
    """
    normalized = normalize_answer(a)
    return normalized is not None and normalized == normalize_answer(b)


def _marked(text: str) -> str | None:
    """What follows the last answer marker, to the end of its line; None without a marker."""
    if MARKER in text:
        return text.rpartition(MARKER)[2].partition("\n")[0]
    if "\\boxed{" in text:
        return text.rpartition("\\boxed{")[2].partition("}")[0]
    phrases = list(_ANSWER_IS.finditer(text))
    return text[phrases[-1].end() :].partition("\n")[0] if phrases else None


def extract_answer(completion: str | list[dict], *, flexible: bool = False) -> str | None:
    """The answer that a completion gives, in its one spelling, or None.

    Looks for `#### x`, else `\\boxed{x}`, else "the answer is x", and reads x up to the end of its line.

    - Of several markers the *last* counts, since a model may correct itself; a policy gains nothing by
      writing many, because only one is read.
    - A marker whose text is no answer gives None. There is no second search behind it: a completion could
      otherwise place several bets in several formats.

    Args:
        completion: a string, or a list of chat messages.
        flexible: where nothing is found so, take the last number in the text. This measures whether a model
            that ignores the format knows the answer; never pay for it, since the last number may be anything.

    >>> extract_answer("14 + 34 = 48. 48 - 12 = 36. #### 36")
    '36'
    >>> extract_answer("It is 36 apples."), extract_answer("It is 36 apples.", flexible=True)
    (None, '36')
    """
    text = completion_text(completion)
    marked = _marked(text)
    answer = None if marked is None else normalize_answer(marked)
    if answer is None and flexible:
        numbers = [match[0] for match in _LOOSE_NUMBER.finditer(text.translate(_DASHES))]
        answer = normalize_answer(numbers[-1]) if numbers else None
    return answer
