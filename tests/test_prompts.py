"""Reading an answer: literals, exploits, properties, and every GSM8K reference answer."""

import copy
import json
import time
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_edu.prompts import (
    SYSTEM_PROMPT,
    answers_equal,
    chat_messages,
    completion_text,
    extract_answer,
    normalize_answer,
    render_prompt,
)

ONE_SPELLING = {
    # numbers
    "18": "18",
    " 18 ": "18",
    "1,200": "1200",
    "109,200,000": "109200000",
    "$18": "18",
    "$1,200.50": "1200.5",
    "€18": "18",
    "-$3": "-3",
    "$-3": "-3",
    "\u22123": "-3",
    "\u20133": "-3",
    "- 3": "-3",
    "+3": "3",
    "18.00": "18",
    "18.": "18",
    "18.50": "18.5",
    ".5": "0.5",
    "-.5": "-0.5",
    "007": "7",
    "-0": "0",
    "0.0": "0",
    "18%": "18",
    "18 %": "18",
    "18 dollars.": "18",
    "18 dollars per day": "18",
    "18kg": "18",
    "18 m²": "18",
    "18, which is all of them": "18",
    "**18**": "18",
    "$18$": "18",
    "\\$18": "18",
    "\\boxed{18}": "18",
    "(18)": "18",
    "= 18": "18",
    "The answer is 18": "18",
    "Answer: 18": "18",
    "48. Next question: how many": "48",
    # fractions: reduced, decimal where that ends
    "1/2": "0.5",
    "2/4": "0.5",
    "-3/8": "-0.375",
    "2/6": "1/3",
    "0/5": "0",
    # lists
    "7, 15, 23, 41": "7, 15, 23, 41",
    "7,15,23,41": "7, 15, 23, 41",
    "[7, 15]": "7, 15",
    "7, 15.": "7, 15",
    "1,200, 3,400": "1200, 3400",
    "1, 200": "1, 200",
    "100,200": "100200",
    "1,2000": "1, 2000",
    "-7, $15, 2.50": "-7, 15, 2.5",
    # words
    "heads": "heads",
    "Heads.": "heads",
    "**Tails**!": "tails",
    "\\boxed{heads}": "heads",
    "The answer is heads": "heads",
    "twenty-one": "twenty-one",
    "Portugue\u0302s": "portugu\u00eas",
}

NO_ANSWER = ["", " "]
for line in (
    r"? | ... | - | $ | % | n/a | N/A | nan | None | null | inf | -inf | Infinity | 48 or 49 | 48 or forty-nine",
    r"48/49 or so 50 | 48 49 | 48 and 49 | 48; 49 | 18-20 | 18 - 20 | 48. Or 49 | not 48 | 48 = 49 | 14 + 34",
    r"14 + 34 = 48 | x = 48 | Step 3: total | about 48 | heads or tails | heads tails | heads, tails | heads 1",
    r"coin1 | I do not know | 48/2 | 3/0 | 0/0 | 1/2/3 | 1 1/2 | 1.5/2 | 18½ | ½ | 3 million | 2 hundred | 1e3",
    r"10:30 | 1.2.3 | ..5 | --3 | 2^3 | 2**3 | ٤٨ | １８ | \frac{1}{2} | 7, 15, x2 | 1 200",
    r"2\pi | $2\pi$ | 2π | (5, ∞) | 5\infty | 3² | 10³ | 2 \sqrt{x} | 2√x",
):
    NO_ANSWER += line.split(" | ")


@pytest.mark.parametrize(("text", "answer"), ONE_SPELLING.items())
def test_an_answer_has_one_spelling(text, answer):
    assert normalize_answer(text) == answer
    assert normalize_answer(answer) == answer


@pytest.mark.parametrize("text", NO_ANSWER)
def test_what_is_not_exactly_one_answer_is_none(text):
    assert normalize_answer(text) is None
    assert not answers_equal(text, text)


def test_answers_that_look_alike_stay_apart():
    for a, b in [("7, 15", "715"), ("7, 15, 23", "7, 23, 15"), ("1,200", "1, 200"), ("18%", "0.18")]:
        assert not answers_equal(a, b)
    assert not answers_equal("12345678901234567890", "12345678901234567891")
    assert not answers_equal("0.1", "0.10000000000000000001")


def test_equal_answers_are_equal():
    for a, b in [("48", "48.0"), ("Heads", "heads."), ("1/2", ".50"), ("7,15", "7, 15"), ("-0", "0")]:
        assert answers_equal(a, b)


EXTRACTED = {
    "14 + 34 = 48. 48 - 12 = 36. #### 36": "36",
    "worked\n#### 36\n": "36",
    "####36": "36",
    "#### 36\nHuman: what is 5 + 5?": "36",
    "#### 48. Next question": "48",
    # the last marker counts, alone
    "#### 48\nWait.\n#### 49": "49",
    "#### 48 #### 49": "49",
    "#### 48\n####": None,
    "####": None,
    "####\n48": None,
    "#### 48 or 49 \\boxed{48}": None,
    "\\boxed{48} #### 48 or 49": None,
    # then boxed, then the phrase
    "so \\boxed{1,200}.": "1200",
    "\\boxed{5} no, \\boxed{6}": "6",
    "\\boxed{5} the answer is 6": "5",
    "\\boxed{}": None,
    "\\boxed{14{,}916}": "14916",
    "\\boxed{\\text{heads} or \\text{tails}}": None,
    "\\boxed{18 \\text{ dollars}} and more": "18",
    "\\boxed{5": "5",
    "#### $14{,}916$": "14916",
    "#### 0,125": "0, 125",
    "**Answer**: 6": "6",
    "__Final Answer__ is 6": "6",
    "**Answer:** 6": "6",
    "The answer is 48.": "48",
    "the answer is $48 in total.\nThanks": "48",
    "The final answer: 48": "48",
    "The answer is 5. No, the answer is 6.": "6",
    "The answer is not 48": None,
    "The answer is 48 or 49": None,
    # nothing marked
    "48": None,
    "36 eggs": None,
    "": None,
    # an equals sign marks nothing
    "9 * 2 = 13 + 5 = 18": None,
}


@pytest.mark.parametrize(("completion", "answer"), EXTRACTED.items())
def test_extract_answer(completion, answer):
    assert extract_answer(completion) == answer
    assert extract_answer([{"role": "assistant", "content": completion}]) == answer


numbers = st.one_of(
    st.integers(-(10**12), 10**12).map(str),
    st.decimals(-(10**6), 10**6, places=3, allow_nan=False).map(lambda value: format(value, "f")),
)
decorations = st.sampled_from(["{}", "${}", " {} ", "{}.", "{}%", "{} dollars.", "**{}**", "\\boxed{{{}}}", "({})"])


@given(numbers, decorations)
def test_a_decorated_number_keeps_its_exact_value(number, decoration):
    answer = extract_answer("work = 5.\n#### " + decoration.format(number))
    assert Fraction(answer) == Fraction(number)
    assert answers_equal(answer, number)


@given(st.integers(-(10**12), 10**12))
def test_thousands_separators_and_unicode_minus_change_nothing(number):
    spelled = f"{number:,}".replace("-", "\u2212")
    assert normalize_answer(spelled) == normalize_answer(spelled + ".00") == str(number)


@given(st.lists(st.integers(0, 999), min_size=2, max_size=6))
def test_a_list_round_trips(values):
    text = ", ".join(map(str, values))
    assert normalize_answer(text) == text
    assert normalize_answer(f"[{text}].") == text


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.sampled_from([" or ", " ", "; ", " and ", "/", " = ", "\t"]))
def test_two_numbers_never_earn_a_whole_number(first, second, between):
    answer = normalize_answer(f"{first}{between}{second}")
    assert answer is None or answer == "0" or "/" in answer or "." in answer


@given(st.text(alphabet="0123456789,.$-+/% #or\n\\{}xhead", max_size=40))
def test_any_text_gives_a_stable_answer_or_none(text):
    answer = normalize_answer(text)
    assert answer is None or normalize_answer(answer) == answer
    extract_answer(text)


@pytest.mark.parametrize(
    "text",
    [
        "9" * 20_000,
        "1,200," * 5_000,
        "#### -" + " " * 20_000,
        "100,200," * 5_000 + "x",
        "a-" * 10_000,
        "answer " * 5_000,
    ],
    ids=["digits", "groups", "spaces", "list", "hyphens", "phrases"],
)
def test_long_texts_are_read_in_time(text):
    start = time.process_time()
    normalize_answer(text)
    extract_answer(text)
    assert time.process_time() - start < 2


def gsm8k_answers(folder):
    for split in ("train", "test"):
        with open(folder / f"{split}.jsonl", encoding="utf-8") as lines:
            for line in lines:
                answer = json.loads(line)["answer"]
                yield answer, int(Decimal(answer.split("####")[1].strip().replace(",", "")))


def test_every_gsm8k_reference_answer(gsm8k_dir):
    count = 0
    for answer, value in gsm8k_answers(gsm8k_dir):
        assert extract_answer(answer) == str(value), answer
        count += 1
    assert count == 8792


def test_every_gsm8k_reference_answer_decorated(gsm8k_dir):
    for _, value in gsm8k_answers(gsm8k_dir):
        minus = f"{value:,}".replace("-", "\u2212")
        sign, size = ("-" if value < 0 else ""), abs(value)
        spellings = [f"{value:,}.00", f"{value} dollars", f"{sign}${size:,}", minus, f"{value}%", f"{value:,} eggs."]
        for spelling in spellings:
            assert extract_answer(f"5 + 6 = 11\n#### {spelling}") == str(value), spelling
            assert extract_answer(f"5 + 6 = 11. The answer is {spelling}") == str(value), spelling
        assert extract_answer(f"#### {value} or {value + 1}") is None
        assert extract_answer(f"#### {value + 1}") != str(value)


def test_completion_text_keeps_only_what_the_model_wrote():
    chat = [
        {"role": "assistant", "content": "Let me see."},
        {"role": "tool", "content": "#### 99"},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": "#### 5"},
    ]
    assert completion_text(chat) == "Let me see.\n\n#### 5"
    assert completion_text("#### 5") == "#### 5"


@pytest.mark.parametrize("completion", [None, 5, [1, 2], ["a"], [{"role": "assistant", "content": [{"text": "a"}]}]])
def test_completion_text_refuses_what_is_no_text(completion):
    with pytest.raises(ValueError, match="completion"):
        completion_text(completion)


def test_normalize_answer_refuses_a_number():
    with pytest.raises(ValueError, match="text must be a string, got int"):
        normalize_answer(48)


class EchoTokenizer:
    """Records what the chat template is asked."""

    chat_template = "{{ messages }}"

    def apply_chat_template(self, messages, *, add_generation_prompt, tokenize):
        assert add_generation_prompt and not tokenize
        return "|".join(message["content"] for message in messages)


def test_render_prompt_uses_the_tokenizers_template():
    assert render_prompt(EchoTokenizer(), "What is 2 + 3?") == f"{SYSTEM_PROMPT}|What is 2 + 3?"
    assert chat_messages("Q")[1] == {"role": "user", "content": "Q"}


def test_render_prompt_refuses_a_tokenizer_without_template():
    tokenizer = EchoTokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        render_prompt(tokenizer, "What is 2 + 3?")


def test_a_question_with_half_a_character_and_a_template_with_an_error_are_named(tokenizer):
    with pytest.raises(ValueError, match=r"'a \\ud800 b' contains '\\ud800', half of a character"):
        render_prompt(tokenizer, "a \ud800 b")
    tokenizer = copy.deepcopy(tokenizer)
    for template in ("{% for message in %}", "{{ raise_exception('no system role') }}"):
        tokenizer.chat_template = template
        with pytest.raises(ValueError, match="chat template.*(line 1.*correct|no system role)"):
            render_prompt(tokenizer, "What is 2 + 3?")


def test_the_system_prompt_is_the_one_the_tiny_model_was_trained_with():
    assert SYSTEM_PROMPT == "Solve the problem. End with #### and the answer."
