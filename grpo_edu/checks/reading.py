"""Exercises of notebook 02, first part: reading answers, and a reward with TRL's signature."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

from grpo_edu.checks.core import Call, Exercise, Mistake, Part, call

# ---- extract_number ----


def extract_number(text: str) -> str | None:
    """The whole number that stands alone behind the last `####`, without thousands commas; None where there is none."""
    line = text.rpartition("####")[2].splitlines()[:1] if "####" in text else []
    found = re.fullmatch(r"-?\d{1,3}(,\d{3})+|-?\d+", line[0].strip()) if line else None
    return found[0].replace(",", "") if found else None


def _plain_texts(rng: random.Random) -> Call:
    a, b = rng.randrange(2, 60), rng.randrange(2, 60)
    return call(rng.choice([f"{a}+{b}={a + b}. #### {a + b}", f"{a}-{b}={a - b}.\n#### {a - b}\n", f"####{a}"]))


PLAIN_TEXTS = ("3*13=39. #### 39", "9-12=-3.\n#### -3\n", "####7")


def _hard_texts(rng: random.Random) -> Call:
    a, b = rng.randrange(1001, 9999), rng.randrange(2, 99)
    return call(
        rng.choice([
            f"#### {a:,}", f"#### {b} No, wait. #### {a}", f"#### {b} or {b + 1}", f"The answer is {b}.", "#### none",
            f"#### {b}\n{b + 1} is not it.", "", f"{a}+{b}={a + b}. ####",
        ])
    )  # fmt: skip


HARD_TEXTS = (
    "####1,234", "#### -12,345 ", "#### 12 No, wait. #### 13", "#### 35\n#### 36", "#### 35\n#### 36 or 37",
    "#### 36\n37 is not it.", "36", "The answer is 36.", "#### 48 or 49", "#### 36 dollars", "#### 36.", "#### +36",
    "####\n36", "6+7=13. ####", "#### none", "",
)  # fmt: skip


def _number_by_split(text: str) -> str | None:
    parts = text.split("####")
    if len(parts) == 1:
        return None
    lines = parts[-1].split("\n")
    number = lines[0].strip().replace(",", "")
    digits = number[1:] if number.startswith("-") else number
    return number if digits.isdecimal() else None


def _number_by_int(text: str) -> str | None:
    place = text.rfind("####")
    if place < 0:
        return None
    written = text[place + 4 :].split("\n")[0].strip().replace(",", "")
    try:
        return str(int(written)) if "+" not in written else None
    except ValueError:
        return None


def _number_by_search(text: str) -> str | None:
    last = re.findall(r"####([^\n#]*)", text)[-1:]
    found = re.fullmatch(r"\s*(-?)([\d,]*\d)\s*", last[0]) if last else None
    return found[1] + found[2].replace(",", "") if found else None


def _first_marker(text: str) -> str | None:
    parts = text.split("####")
    return None if len(parts) == 1 else extract_number("####" + parts[1])


def _last_number(text: str) -> str | None:
    found = re.findall(r"-?\d[\d,]*", text)
    return found[-1].replace(",", "") if found else None


def _no_commas(text: str) -> str | None:
    found = re.search(r"-?\d+", text.rpartition("####")[2].split("\n")[0]) if "####" in text else None
    return found[0] if found else None


def _hedges(text: str) -> str | None:
    found = re.search(r"-?\d[\d,]*", text.rpartition("####")[2].split("\n")[0]) if "####" in text else None
    return found[0].replace(",", "") if found else None


def _starts_with_a_number(text: str) -> str | None:
    line = text.rpartition("####")[2].split("\n")[0].strip().replace(",", "") if "####" in text else ""
    found = re.match(r"-?\d+", line)
    return found[0] if found else None


def _any_number_behind(text: str) -> str | None:
    found = re.search(r"-?\d[\d,]*", text.rpartition("####")[2]) if "####" in text else None
    return found[0].replace(",", "") if found else None


def _no_first_line(text: str) -> str | None:
    if "####" in text and not text.rpartition("####")[2]:
        raise IndexError
    return extract_number(text)


def _commas_kept(text: str) -> str | None:
    line = text.rpartition("####")[2].splitlines()[:1] if "####" in text else []
    found = re.fullmatch(r"-?[\d,]+", line[0].strip()) if line else None
    return found[0] if found else None


def _first_that_ends_a_line(text: str) -> str | None:
    found = re.search(r"#### *(-?[\d,]+) *$", text, re.M)
    return found[1].replace(",", "") if found else None


def _first_line(rest: str) -> str:
    return rest.split("\n")[0].strip()


def _read_with(
    pattern: str = r"-?\d+", line_of: Callable[[str], str] = _first_line, marked: bool = True
) -> Callable[[str], str | None]:
    """A reader with one thing wrong. line_of: what is read of the text behind the last marker."""

    def wrong(text: str) -> str | None:
        if marked and "####" not in text:
            return None
        line = line_of(text.rpartition("####")[2]).replace(",", "")
        return line if re.fullmatch(pattern, line) else None

    return wrong


def _one_number_on_the_line(text: str) -> str | None:
    line = text.rpartition("####")[2].partition("\n")[0] if "####" in text else ""
    numbers = re.findall(r"[-+]?\d[\d,]*", line)
    return numbers[0].replace(",", "") if len(numbers) == 1 else None


def _one_number_without_a_sign(text: str) -> str | None:
    found = _one_number_on_the_line(text)
    return found.lstrip("+") if found else None


check_extract_number = Exercise(
    "extract_number",
    extract_number,
    parts=(
        Part("worked answers", 2, _plain_texts, draws=8, always=tuple(map(call, PLAIN_TEXTS))),
        Part("commas, corrections, hedges, no marker at all", 3, _hard_texts, draws=20,
             always=tuple(map(call, HARD_TEXTS))),
    ),
    mistakes=(
        Mistake("the first marker is read", "A model may correct itself: the last marker counts.", _first_marker,
                also=(_first_that_ends_a_line,)),
        Mistake("a text without a marker is read", "Where `####` is missing, `rpartition` puts the whole text behind "
                "it. Ask whether there is a marker.", _read_with(marked=False)),
        Mistake("words beside the number are let through", "Stricter than the notebook's `my_extract`: behind the "
                "marker stands one number, and nothing else.", _one_number_on_the_line,
                also=(_one_number_without_a_sign,)),
        Mistake("a full stop behind the number is let through", "`#### 36.` is not one number and nothing else.",
                _read_with(line_of=lambda rest: _first_line(rest).rstrip("."))),
        Mistake("a plus sign is let through", "Digits, with a minus sign where there is one. (`int` reads more.)",
                _read_with(r"[-+]?\d+"),
                also=(lambda text: (_read_with(r"[-+]?\d+")(text) or "").lstrip("+") or None,)),
        Mistake("a minus sign is no part of the number", "`\"-3\".isdigit()` is False: 9 − 12 has an answer, too.",
                _read_with(r"\d+"), also=(lambda text: (extract_number(text) or "").lstrip("-") or None,)),
        Mistake("the line below the marker is read", "The answer ends with the line of the marker. Take that line "
                "first, then strip it.", _read_with(line_of=lambda rest: rest.strip().split("\n")[0])),
        Mistake("all that follows the marker is read", "The answer ends with the line of the marker: the text below it "
                "does not count.", _read_with(line_of=str.strip)),
        Mistake("the blank before the number stays", "`\" 36\"` is no number from its first character to its last. "
                "Strip the line.", _read_with(line_of=lambda rest: rest.split("\n")[0])),
        Mistake("no answer is an empty text", "Return None where there is no answer.",
                lambda text: extract_number(text) or ""),
        Mistake("it is a number, not a text", "Return the digits as a `str`.",
                lambda text: None if extract_number(text) is None else int(str(extract_number(text)))),
        Mistake("any last number is an answer", "Only what stands behind `####` was *given* as the answer.",
                _last_number),
        Mistake("1,200 is read as 1", "Take the thousands commas out before you look for digits.", _no_commas),
        Mistake("a hedge is paid for its first number", "Two numbers are no answer: the text behind the marker must be "
                "one number, and nothing else.", _hedges, also=(_starts_with_a_number, _any_number_behind)),
        Mistake("a text that ends with the marker breaks it", "`\"\".splitlines()` has no first line; "
                "`\"\".split(\"\\n\")` has one.", _no_first_line),
        Mistake("the commas stay in the number", "1,200 and 1200 are the same answer: give it one spelling.",
                _commas_kept),
    ),
    right=(_number_by_split, _number_by_int, _number_by_search),
)  # fmt: skip


# ---- accuracy_reward ----


def accuracy_reward(completions: Sequence[str], answer: Sequence[str], **kwargs) -> list[float]:
    """1.0 where the number behind the last `####` is the answer, else 0.0."""
    return [float(extract_number(text) == right) for text, right in zip(completions, answer, strict=True)]


def _some_answers(rng: random.Random) -> Call:
    numbers = [rng.randrange(100, 999) for _ in range(5)]
    texts = [
        f"#### {numbers[0]}", f"{numbers[1]} #### {numbers[1] + 1}", f"#### {numbers[2]}0", f"It is {numbers[3]}.",
        f"#### 1{numbers[4]}",
    ]  # fmt: skip
    order = rng.sample(range(5), 5)
    return call(
        completions=[texts[place] for place in order], answer=[str(numbers[place]) for place in order],
        prompts=["?"] * 5, level=["basic"] * 5,
    )  # fmt: skip


def _reward_by_loop(completions, answer, **kwargs):
    out = []
    for place in range(len(completions)):
        out.append(1.0 if extract_number(completions[place]) == answer[place] else 0.0)
    return out


def _reward_by_map(completions, answer, **kwargs):
    return list(map(lambda text, right: 1.0 if _number_by_int(text) == right else 0.0, completions, answer))


def _reward_by_index(completions, answer, **kwargs):
    found = [extract_number(text) for text in completions]
    return [(0.0, 1.0)[one == other] for one, other in zip(found, answer, strict=True)]


def _paid_where(same: Callable[[str, str], bool]) -> Callable[..., list[float]]:
    """Pays for each pair of completion and answer that counts as the same."""
    return lambda completions, answer, **kwargs: [
        float(same(text, right)) for text, right in zip(completions, answer, strict=True)
    ]


check_accuracy_reward = Exercise(
    "accuracy_reward",
    accuracy_reward,
    parts=(Part("right, wrong, nearly right, without a marker", 3, _some_answers, draws=6),),
    mistakes=(
        Mistake("whatever holds the answer somewhere is right", "48 stands in 480 and in 148 as well. Read the answer, "
                "then compare.", _paid_where(lambda text, right: right in text), also=(
                    _paid_where(lambda text, right: f"#### {right}" in text),
                    _paid_where(lambda text, right: right in (extract_number(text) or "")))),
        Mistake("whatever ends with the answer is right", "148 ends with 48. Read the whole answer, then compare.",
                _paid_where(lambda text, right: text.endswith(right))),
        Mistake("one number for the whole batch", "A reward function gives one number a completion.",
                lambda completions, answer, **kwargs: sum(accuracy_reward(completions, answer)) / len(completions)),
        Mistake("all completions are compared with the first answer", "`answer` is a list, one a completion.",
                lambda completions, answer, **kwargs: [
                    float(extract_number(text) == answer[0]) for text in completions]),
        Mistake("a wrong answer costs a point", "Wrong is 0 here. (A penalty is another reward.)",
                lambda completions, answer, **kwargs: [2 * one - 1 for one in accuracy_reward(completions, answer)]),
        Mistake("an answer is paid, right or wrong", "Compare with the truth: a reward that never sees it teaches "
                "nothing about being right.", lambda completions, answer, **kwargs: [
                    float(extract_number(text) is not None) for text in completions]),
    ),
    right=(_reward_by_loop, _reward_by_map, _reward_by_index),
)  # fmt: skip
