"""What a tiny model is pretrained on: the tokenizer, the targets, what is left out, and the batches."""

import itertools
import random
import re
import unicodedata
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config

from grpo_edu.problems.files import load_problems, read_problems
from grpo_edu.problems.templates import make_problems, problem_key
from grpo_edu.prompts import SYSTEM_PROMPT, answers_equal, normalize_answer, render_prompt
from recipes.corpus import (
    PRETRAINED,
    PretrainingConfig,
    batches,
    draw_drill,
    draw_examples,
    heldout_keys,
    slip,
    train_tokenizer,
    write_shipped_problems,
)

CONFIG = PretrainingConfig(vocab_size=400, batch_tokens=1024)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(CONFIG, num_examples=300)


@pytest.fixture(scope="module")
def examples():
    return list(itertools.islice(draw_examples(CONFIG, seed=11), 4000))


def encode(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


# The tokenizer


def test_every_digit_is_a_token_of_its_own_and_the_same_wherever_it_stands(tokenizer):
    for token in range(len(tokenizer)):
        text = tokenizer.decode([token])
        assert not re.search(r"\d", text) or re.fullmatch(r"\d", text), repr(text)
    for digits in ("7", "48", "1200", "93716"):
        assert [tokenizer.decode([token]) for token in encode(tokenizer, digits)] == list(digits)
        for frame in ("{}", "has {} apples", "(#{}).", "x{}y", "1 + {} = "):
            ids = encode(tokenizer, frame.format(digits))
            ordinals = [encode(tokenizer, digit)[0] for digit in digits]
            assert any(ids[i : i + len(digits)] == ordinals for i in range(len(ids)))


@settings(max_examples=300)
@given(text=st.text().map(lambda text: unicodedata.normalize("NFC", text)))
def test_any_text_in_composed_form_comes_back_unchanged(tokenizer, text):
    assert tokenizer.decode(encode(tokenizer, text), clean_up_tokenization_spaces=False) == text
    assert tokenizer.decode(encode(tokenizer, text)) == text


def test_the_special_tokens_are_qwen2s_and_padding_never_ends_a_turn(tokenizer):
    ids = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    assert len(set(ids)) == 3 and tokenizer.unk_token is None
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (ids[0], ids[2])
    assert encode(tokenizer, "<|im_start|>user\n<|im_end|>")[0] == ids[1]
    assert encode(tokenizer, "<|im_start|>user\n<|im_end|>")[-1] == ids[2]
    assert tokenizer.decode([ids[1], *encode(tokenizer, "5"), ids[2], ids[0]], skip_special_tokens=True) == "5"
    assert tokenizer.padding_side == "left"


SYSTEM, USER, BOT = ({"role": role, "content": role.upper()} for role in ("system", "user", "assistant"))
DEFAULT_TURN = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
SYSTEM_TURN = "<|im_start|>system\nSYSTEM<|im_end|>\n"
USER_TURN = "<|im_start|>user\nUSER<|im_end|>\n"
BOT_TURN, OPENED = "<|im_start|>assistant\nASSISTANT<|im_end|>\n", "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "messages, opened, expected",
    [  # what the template in Qwen/Qwen2-0.5B-Instruct's tokenizer_config.json writes
        ([SYSTEM, USER], True, SYSTEM_TURN + USER_TURN + OPENED),
        ([USER], True, DEFAULT_TURN + USER_TURN + OPENED),
        ([USER, BOT], False, DEFAULT_TURN + USER_TURN + BOT_TURN),
        ([SYSTEM, USER, BOT, USER], True, SYSTEM_TURN + USER_TURN + BOT_TURN + USER_TURN + OPENED),
    ],
)
def test_the_chat_template_writes_what_qwen2s_writes(tokenizer, messages, opened, expected):
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=opened, tokenize=False) == expected


@pytest.mark.parametrize("reader", [PreTrainedTokenizerFast, AutoTokenizer])
def test_the_tokenizer_does_not_change_on_the_way_through_a_folder(tokenizer, examples, tmp_path, reader):
    """Next to the settings of a Qwen2 model, as a policy is saved."""
    tokenizer.save_pretrained(tmp_path)
    Qwen2Config(vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    loaded = reader.from_pretrained(tmp_path)
    assert loaded.get_vocab() == tokenizer.get_vocab()
    for name in ("pad_token_id", "eos_token_id", "padding_side", "chat_template", "model_max_length"):
        assert getattr(loaded, name) == getattr(tokenizer, name)
    for problem, target in examples[:200]:
        text = render_prompt(tokenizer, problem.prompt)
        assert render_prompt(loaded, problem.prompt) == text
        text += target + " 1,234 = (5) naïve"
        assert encode(loaded, text) == encode(tokenizer, text)


def test_a_tokenizer_is_the_same_each_time_it_is_trained(tokenizer):
    assert train_tokenizer(CONFIG, num_examples=300).get_vocab() == tokenizer.get_vocab()


# Targets


def style(problem, target):
    if target == problem.solution:
        return "worked"
    return "direct" if target.startswith("#### ") else "unmarked"


def is_share(count, total, share):
    """Whether a count is within five standard deviations of a share."""
    return abs(count - total * share) < 5 * (total * share * (1 - share)) ** 0.5


def test_styles_levels_and_right_direct_answers_come_as_often_as_the_settings_say(examples):
    drills = [(problem, target) for problem, target in examples if problem.level == "drill"]
    told = [(problem, target) for problem, target in examples if problem.level != "drill"]
    levels = {**CONFIG.level_weights, "drill": CONFIG.drill_weight}
    counts = Counter(problem.level for problem, _ in examples)
    for level, weight in levels.items():
        assert is_share(counts[level], len(examples), weight / sum(levels.values())), level
    assert all(target == problem.solution for problem, target in drills)
    styles = Counter(style(problem, target) for problem, target in told)
    for name, weight in CONFIG.style_weights.items():
        assert is_share(styles[name], len(told), weight / sum(CONFIG.style_weights.values())), name
    direct = [target == f"#### {problem.answer}" for problem, target in told if style(problem, target) == "direct"]
    assert is_share(sum(direct), len(direct), CONFIG.direct_accuracy)


def test_an_unmarked_target_is_the_worked_one_without_its_answer(examples):
    unmarked = [(problem, target) for problem, target in examples if style(problem, target) == "unmarked"]
    assert len(unmarked) > 100
    for problem, target in unmarked:
        assert f"{target} #### {problem.answer}" == problem.solution


def test_without_weight_there_are_no_drills():
    stream = draw_examples(replace(CONFIG, drill_weight=0.0), seed=1)
    assert "drill" not in {problem.level for problem, _ in itertools.islice(stream, 500)}


@pytest.mark.parametrize("level", PRETRAINED)
def test_a_slip_is_always_wrong_and_always_an_answer(level):
    rng = random.Random(0)
    for problem in make_problems(level, 300, seed=4):
        slips = {slip(problem, rng) for _ in range(10)}
        assert not any(answers_equal(wrong, problem.answer) for wrong in slips)
        assert all(normalize_answer(wrong) == wrong.lower() for wrong in slips)
        assert len(slips) > 1 or level == "coin_flip"


def test_a_slip_in_sorting_keeps_the_numbers():
    rng = random.Random(0)
    for problem in make_problems("sorting", 100, seed=4):
        assert sorted(slip(problem, rng).split(", ")) == sorted(problem.answer.split(", "))


def test_the_sums_of_a_drill_hold_and_are_those_that_were_asked_for():
    rng = random.Random(0)
    for _ in range(500):
        drill = draw_drill(rng)
        equations = re.findall(r"(\d+)([-+*/])(\d+)=(\d+)\.", drill.solution)
        assert drill.prompt == f"Compute {', '.join(f'{a}{sign}{b}' for a, sign, b, _ in equations)}."
        for a, sign, b, result in equations:
            a, b = Fraction(a), Fraction(b)
            exact = {"+": a + b, "-": a - b, "*": a * b, "/": a / b}[sign]
            assert exact == int(result) and 1 <= exact <= 300
        assert drill.answer == equations[-1][3]


# What is left out


def test_excluded_problems_are_never_drawn():
    free = [problem_key(problem) for problem, _ in itertools.islice(draw_examples(CONFIG, seed=2), 500)]
    excluded = frozenset(free[::2])
    drawn = {problem_key(problem) for problem, _ in itertools.islice(draw_examples(CONFIG, 2, excluded), 2000)}
    assert not drawn & excluded
    assert drawn & set(free)  # what is not excluded still comes


def test_the_excluded_are_those_of_the_shipped_heldout_files():
    excluded = heldout_keys()
    for level in PRETRAINED:
        heldout = load_problems(level, "heldout")
        assert {problem_key(problem) for problem in heldout} <= excluded
        assert not {problem_key(problem) for problem in load_problems(level, "train")} & excluded
    assert len(excluded) == sum(len(load_problems(level, "heldout")) for level in PRETRAINED)


def test_the_shipped_files_are_written_in_full(tmp_path):
    write_shipped_problems(tmp_path, num_train=5, num_heldout=3, seed=1)
    for level in PRETRAINED:
        train, heldout = (read_problems(tmp_path / f"{level}_{split}.jsonl") for split in ("train", "heldout"))
        assert (len(train), len(heldout)) == (5, 3)
        assert not {problem_key(problem) for problem in train} & {problem_key(problem) for problem in heldout}


# Batches


def test_a_batch_marks_exactly_the_target_and_its_end(tokenizer, examples):
    known = Counter((render_prompt(tokenizer, problem.prompt), target) for problem, target in examples)
    for ids, is_target in itertools.islice(batches(CONFIG, tokenizer, seed=11), 25):
        assert ids.shape == is_target.shape and ids.numel() <= CONFIG.batch_tokens
        for row, marked in zip(ids, is_target, strict=True):
            places = marked.nonzero().flatten().tolist()
            first, last = places[0], places[-1]
            assert places == list(range(first, last + 1))
            assert row[last] == tokenizer.eos_token_id
            assert (row[last + 1 :] == tokenizer.pad_token_id).all()
            assert tokenizer.pad_token_id not in row[: last + 1]
            prompt, target = tokenizer.decode(row[:first]), tokenizer.decode(row[first:last])
            assert prompt.startswith(f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>")
            assert known[prompt, target] > 0
        assert is_target[:, -1].any()  # no wider than its longest row


def test_one_pool_of_batches_holds_every_example_once(tokenizer):
    stream, seen, drawn = batches(CONFIG, tokenizer, seed=12), Counter(), Counter()
    for problem, target in itertools.islice(draw_examples(CONFIG, seed=12), 2048):
        drawn[render_prompt(tokenizer, problem.prompt) + target] += 1
    while seen.total() < 2048:
        ids, _ = next(stream)
        for row in ids:
            text = tokenizer.decode(row).rstrip("\n").replace("<|endoftext|>", "")
            seen[text.removesuffix("<|im_end|>")] += 1
    assert seen == drawn
