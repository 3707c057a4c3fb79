"""Render a question as a prompt, and extract the answer from the model's completion.

The reward depends on the extracted answer, so extraction is part of the reward: a policy that is trained will find and
exploit everything that this module accepts. Therefore an answer must be *one* thing (one number, one list of numbers
or one word), so that ``#### 48 or 49`` is not an answer. Numbers are compared as exact decimal strings, not as floats.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SYSTEM_PROMPT = "Solve the problem. End with #### and the answer."
MARKER = "####"

Completion = str | list[dict]  # a text, or the messages of a chat

# All dashes that may be written in place of a minus sign.
_DASHES = str.maketrans(dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\u2014\ufe63\uff0d", "-"))
# What may precede an answer: "The answer is", Markdown, LaTeX, brackets or a currency sign. Other words may not,
# so that the heading "#### Step 3" gives no answer.
_LEAD = re.compile(
    r"\s*(?:(?:the\s+)?(?:final\s+)?answer(?:\s+is)?\b)?[\s*_`\"'(\[{$€£¥\\=:]*(?:boxed\{)?", re.IGNORECASE
)
# 1,200.50 or 1200 or .5: each group of thousands has exactly three digits, and at least one digit is required. In 0,125
# the comma separates no thousands.
_DECIMAL = r"(?P<whole>[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])|[0-9]+)?(?:\.(?P<part>[0-9]+))?(?<=[0-9])"
_FRACTION = r"(?P<top>[0-9]{1,15})/(?P<bottom>[0-9]{1,15})(?![0-9])"
_NUMBER = re.compile(rf"(?P<sign>[-+]?) ?[$€£¥]? ?(?:{_FRACTION}|{_DECIMAL})")
_COMMA = re.compile(r"\s*,\s*(?=[-+$€£¥.0-9])")
_WORD = re.compile(r"([^\W\d_]+(?:[-'’][^\W\d_]+)*)[\s.!*_`\"')\]}$\\]*")
_REFUSED_TAIL = re.compile(
    r"\s*(?:hundred|thousand|million|billion|trillion)s?\b|[²³]|.*(?:\bor\b|[π√∞]|\\(?:pi|sqrt|infty)(?![a-z]))",
    re.IGNORECASE | re.DOTALL,
)
_NO_ANSWER = frozenset({"nan", "none", "null", "inf", "infinity"})
_ANSWER_IS = re.compile(r"\banswer[*_]*(?:\s+is\b\s*:?|\s*:)", re.IGNORECASE)


@dataclass(frozen=True)
class PromptStyle:
    """The text around a question in the chat that the model continues.

    system: the system message; None for none, "" for the one that belongs to the problem.
    examples: questions with worked answers that come first (few-shot).
    template_kwargs: further variables of the chat template, such as enable_thinking.
    """

    system: str | None = ""
    examples: tuple[tuple[str, str], ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


_STYLE_KEY = (
    "grpo_edu_prompt"  # in tokenizer_config.json, so that a saved policy gets the prompt with which it was trained
)


def prompt_style(tokenizer: PreTrainedTokenizerBase) -> PromptStyle:
    """Return the prompt style that a tokenizer carries; the course's own if it carries none."""
    stored = getattr(tokenizer, "init_kwargs", {}).get(_STYLE_KEY)
    if stored is None:
        return PromptStyle()
    examples = tuple((question, answer) for question, answer in stored["examples"])
    return PromptStyle(stored["system"], examples, dict(stored["template_kwargs"]))


def set_prompt_style(tokenizer: PreTrainedTokenizerBase, style: PromptStyle) -> None:
    """Let a tokenizer carry a prompt style, which is saved and loaded with it.

    Raises ValueError for a variable that the chat template does not use.
    """
    for name in style.template_kwargs:
        if not re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template or "")):
            raise ValueError(
                f"`chat_template_kwargs`: the chat template of this model does not use {name!r}; check the name, or "
                "leave it out."
            )
    tokenizer.init_kwargs[_STYLE_KEY] = asdict(style)


def chat_messages(
    question: str, system: str | None = SYSTEM_PROMPT, style: PromptStyle | None = None
) -> list[dict[str, str]]:
    """Return the chat messages for a question: system prompt (unless None), examples of the style, the question.

    system: used where the style has no system message of its own.

    >>> [message["role"] for message in chat_messages("What is 2 + 3?")]
    ['system', 'user']
    >>> [message["role"] for message in chat_messages("2 + 3?", None, PromptStyle(examples=(("1 + 1?", "#### 2"),)))]
    ['user', 'assistant', 'user']
    """
    style = PromptStyle() if style is None else style
    system = system if style.system == "" else style.system
    messages = [] if system is None else [{"role": "system", "content": system}]
    for asked, answered in style.examples:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    return [*messages, {"role": "user", "content": question}]


def text_after_answer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return what the chat template writes after an answer, without blanks around it; "" if it cannot be rendered."""
    from jinja2 import TemplateError

    messages = [{"role": "user", "content": "QUESTION"}, {"role": "assistant", "content": "ANSWER"}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **prompt_style(tokenizer).template_kwargs)
    except (ValueError, TemplateError):  # no template, or one that wants other messages: the prompts will say so
        return ""
    return str(text).rpartition("ANSWER")[2].strip()


def render_prompt(tokenizer: PreTrainedTokenizerBase, question: str, system: str | None = SYSTEM_PROMPT) -> str:
    """Render a question with the tokenizer's chat template and prompt style, up to the start of the assistant's turn.

    A prompt without the template is the most common reason why a reward stays at 0, because an instruction-tuned model
    answers in its format only if the question is in that format.

    Args:
        system: the system prompt, where the tokenizer's prompt style has none of its own. With None there is none of
            ours; the chat template may add the model's own.

    Raises ValueError for a tokenizer without a chat template, or with one that has an error or refuses such messages,
    and for a question with half of a character.
    """
    return render_messages(tokenizer, chat_messages(question, system, prompt_style(tokenizer)))


def render_messages(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> str:
    """Render chat messages as `render_prompt` does."""
    from jinja2 import TemplateError, TemplateSyntaxError

    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "tokenizer has no chat template, so the prompt cannot be put into the model's own format. "
            "Use an instruction-tuned model, or set tokenizer.chat_template."
        )
    for message in messages:
        if half := re.search("[\ud800-\udfff]", message["content"]):
            raise ValueError(
                f"the text {message['content'][:200]!r} contains {half[0]!r}, half of a character, which is not valid "
                "Unicode; write the character itself, or remove it"
            )
    variables = prompt_style(tokenizer).template_kwargs
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **variables)
    except TemplateSyntaxError as error:
        raise ValueError(
            f"the chat template of the tokenizer has an error in line {error.lineno}: {error}; correct "
            "chat_template.jinja in the model's folder, or set tokenizer.chat_template"
        ) from None
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(
            f"the chat template of this model refuses the messages ({roles}): {error}. Most templates that do so have "
            "no system message: set `system_prompt` to none, and write what the model should do into the questions."
        ) from None


def completion_text(completion: Completion) -> str:
    """Return the text that the model wrote: a string unchanged, or the assistant's messages of a chat.

    Messages of other roles (a tool, a user) are left out. Raises ValueError for anything else.

    >>> completion_text([{"role": "assistant", "content": "#### 5"}])
    '#### 5'
    """
    if isinstance(completion, str):
        return completion
    if not isinstance(completion, list) or not all(isinstance(message, dict) for message in completion):
        raise ValueError(
            f"completion must be a string or a list of chat messages, got {type(completion).__name__}. "
            "Pass the decoded text, not token ids."
        )
    own = [message for message in completion if message.get("role", "assistant") == "assistant"]
    texts = [message.get("content") or "" for message in own]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("completion has a message whose content is not a string. Pass text messages only.")
    return "\n".join(texts)


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
    """Return a matched number in canonical form: no separators, redundant zeros, `+` or `-0`. Exact at any length."""
    sign = "-" if match["sign"] == "-" else ""
    if match["top"]:
        return _canonical_fraction(sign, int(match["top"]), int(match["bottom"]))
    whole = (match["whole"] or "").replace(",", "").lstrip("0") or "0"
    part = (match["part"] or "").rstrip("0")
    number = f"{whole}.{part}" if part else whole
    return number if number == "0" else sign + number


def _numbers(text: str, start: int) -> tuple[list[str | None], str]:
    """Return the comma-separated numbers that begin at `start`, and the text after them."""
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
    """Return the canonical form of an answer, or None if the text has no answer or more than one.

    - A number is written without currency, thousands separators, redundant zeros, unit and trailing words: `$1,200.00`
      becomes `1200`, `18%` becomes `18`, `−3` (Unicode minus) `-3`, `.5` `0.5` and `-0` `0`. Exact at any length.
    - A fraction is reduced, and written as a decimal if that is finite: `2/4` becomes `0.5`, `2/6` becomes `1/3`. A
      fraction with a whole value (`48/2`) is a division that was not carried out, and gives None.
    - A comma is a thousands separator only without a space and before exactly three digits. Every other comma
      separates a list: `7, 15, 23` and `7,15,23` both become `7, 15, 23`, but `1,200` becomes `1200`.
    - A word (`Heads.`) is converted to lower case. Several words, `nan`, `none`, `null` and `inf` give None.
    - A second number after the answer, an "or", and a magnitude in words (`3 million`) give None, because a policy
      that is rewarded for `48 or 49` learns to write several answers. So does a formula: `2π` is not 2, nor `3²` 3.

    >>> [normalize_answer(text) for text in ("$1,200.00", "18 dollars.", "7, 15", "Heads.", "48 or 49")]
    ['1200', '18', '7, 15', 'heads', None]
    """
    if not isinstance(text, str):
        raise ValueError(f"text must be a string, got {type(text).__name__}. Pass str(answer).")
    text = unicodedata.normalize("NFC", text).translate(_DASHES).replace("{,}", ",")  # as LaTeX separates thousands
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


def answers_equal(a: str, b: str) -> bool:
    """Return True if two answers are equal after `normalize_answer`; a text without an answer is equal to nothing.

    >>> answers_equal("48", "$48.00"), answers_equal("715", "7, 15"), answers_equal("", "")
    (True, False, False)
    """
    normalized = normalize_answer(a)
    return normalized is not None and normalized == normalize_answer(b)


def _text_after_marker(text: str) -> str | None:
    """Return the text from the last answer marker to the end of its line; None if there is no marker."""
    if MARKER in text:
        return text.rpartition(MARKER)[2].partition("\n")[0]
    if "\\boxed{" in text:
        return _text_in_braces(text.rpartition("\\boxed{")[2])
    phrases = list(_ANSWER_IS.finditer(text))
    return text[phrases[-1].end() :].partition("\n")[0] if phrases else None


def _text_in_braces(text: str) -> str:
    """Return the text before the brace that closes the one before it; all of it if that brace is not closed."""
    depth = 1
    for end, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:end]
    return text


def extract_answer(completion: Completion) -> str | None:
    """Extract the answer of a completion in canonical form (`normalize_answer`), or None if it has none.

    The function looks for `#### x`, then for `\\boxed{x}`, then for "answer is x" or "answer: x"; x ends with its line.

    - If there are several markers, the *last* one counts, because a model may correct itself. A policy gains nothing
      by writing many, because only one is used. (lm-evaluation-harness takes the first `####` for GSM8K.)
    - If the text after the marker is not an answer, the result is None and no other format is tried. Otherwise a
      completion could give several answers in several formats.

    completion: a string, or a list of chat messages.

    >>> extract_answer("14 + 34 = 48. 48 - 12 = 36. #### 36")
    '36'
    """
    after_marker = _text_after_marker(completion_text(completion))
    return None if after_marker is None else normalize_answer(after_marker)
