"""Verifiable instructions: every constraint told from its near miss, answers that obey, and no reward for a hack."""

import json
from collections import Counter
from pathlib import Path

import pytest

from grpo_edu.evaluation import evaluate
from grpo_edu.models import load_policy
from grpo_edu.problems.instructions import (
    CONSTRAINTS,
    PAIRS,
    check_instruction,
    constraint_reward,
    instruction_problems,
    instruction_reward,
    instruction_text,
    make_instructions,
    parse_constraints,
    topic_reward,
)
from grpo_edu.problems.templates import prompt_options
from grpo_edu.prompts import chat_messages, render_prompt
from grpo_edu.rewards import accuracy_reward
from grpo_edu.runs.loading import load_split
from grpo_edu.studies.exploits import EXPLOITS, INSTRUCTION_EXPLOITS, judge_reward

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
REWARDS = {"constraint": constraint_reward, "topic": topic_reward, "instruction": instruction_reward}


def asked(**constraints):
    return json.dumps({"topic": "the sea", **constraints})


@pytest.mark.parametrize(
    ("constraint", "obeys", "misses"),
    [
        ({"no_comma": True}, ["It is calm; it is blue."], ["It is calm, and blue.", "It is calm， and blue."]),
        ({"question": True}, ["Is it calm?", '"Is it calm?"'], ["Is it calm? Yes.", "It is calm.", ""]),
        ({"lower_case": True}, ["it is calm."], ["It is calm.", "it is CALM.", "123."]),
        ({"max_words": 3}, ["It is calm.", "It isn't calm."], ["It is so calm.", "It-is-so-calm.", "", "..."]),
        ({"begin": "Today"}, ["Today it is calm.", "Today, it is."], ["It is calm today.", "Todays calm is.", ""]),
        ({"word": "calm"}, ["It is calm.", "Calm, it is."], ["It is calmer.", "It is."]),
        ({"two_words": ["calm", "old"]}, ["It is old and calm."], ["It is calm.", "It is bold and calm."]),
        ({"end": "at last"}, ["It is calm at last.", "At last!"], ["At last it is calm.", "It is at lasting.", ""]),
        ({"sentences": 2}, ["It is calm. It is old!"], ["It is calm.", "It is calm. It is old. It is.", "Is. it"]),
        ({"exclamation": True}, ["It is calm!"], ["It is! Calm.", "Calm", ""]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_each_constraint_tells_obedience_from_a_near_miss(constraint, obeys, misses):
    for texts, expected in ((obeys, True), (misses, False)):
        for text in texts:
            assert check_instruction(text, asked(**constraint)).obeyed == dict.fromkeys(constraint, expected), text


def test_the_table_above_has_every_kind():
    (mark,) = test_each_constraint_tells_obedience_from_a_near_miss.pytestmark
    assert [next(iter(row[0])) for row in mark.args[1]] == list(CONSTRAINTS)


@pytest.mark.parametrize(
    "text",
    [
        'The sea is calm. They call it "old."',
        "The sea is calm. (It is old.)",
        '"Is it calm?" she asked. He nodded.',
        "Dr. Smith met Mrs. Lee. J. R. R. Tolkien waved.",
        "J. K. Rowling lives in the U.K. with a cat. The U.S. is far.",
        "He lives in the U.S. It is large.",
        "It rains at 5 p.m. on Monday. We go.",
        "It rains at 5 p.m. Everyone goes.",
        "Acme Inc. sells apples, pears etc. in St. Louis. Martin Luther King Jr. spoke there.",
        "She said no. Then 3.5 is more, e.g. for Tom.",
        "it is calm... and blue. it is old.",
    ],
)
def test_two_sentences_are_two_with_quotation_marks_abbreviations_and_initials(text):
    for number in (1, 2, 3):
        assert check_instruction(text, asked(sentences=number)).obeyed == {"sentences": number == 2}


def test_words_are_found_in_capitals_and_in_parts():
    for constraint in (
        {"word": "NASA"},
        {"two_words": ["well-known", "NASA"]},
        {"begin": "NASA"},
        {"word": "ice cream"},
    ):
        check = check_instruction("NASA made a well-known ice cream.", json.dumps({"topic": "NASA", **constraint}))
        assert check.on_topic and all(check.obeyed.values())
    assert not check_instruction("Ice and cream.", asked(word="ice cream")).obeyed["word"]


def test_of_the_stored_answers_of_the_real_model_one_is_judged_otherwise_today():
    """The study's protocol names it: "I'm Dr. Maya Singh, …" is three sentences, and was counted as four."""
    problems = instruction_problems("instructions", "heldout")
    rows = map(json.loads, (RESULTS / "real_model.jsonl").read_text(encoding="utf-8").splitlines())
    changed = []
    for row in rows:
        for problem, text, stored in zip(
            problems, row.get("greedy/completions", []), row.get("greedy", ""), strict=False
        ):
            if row["task"] == "instructions" and check_instruction(text, problem.answer).passed != bool(int(stored)):
                changed.append((row["phase"], row["arm"], row["seed"], stored, text[:21]))
    assert changed == [("report", "supervised", 0, "0", "I'm Dr. Maya Singh, t")]


@pytest.mark.parametrize("name", ["instructions", "instructions_two"])
def test_every_instruction_can_be_obeyed_and_the_parts_share_nothing(name):
    parts = {split: instruction_problems(name, split) for split in ("train", "heldout")}
    used = {}
    for split, problems in parts.items():
        assert len({problem.prompt for problem in problems}) == len(problems)
        for problem in problems:
            assert check_instruction(problem.solution, problem.answer).passed, (problem.prompt, problem.solution)
            constraints = parse_constraints(problem.answer)
            assert problem.prompt == instruction_text(constraints)
            assert len(constraints) == 1 + (1 if name == "instructions" else 2)
        values = [value for problem in problems for value in parse_constraints(problem.answer).values()]
        flat = [one for value in values for one in (value if isinstance(value, list) else [value])]
        used[split] = {value for value in flat if isinstance(value, str)}
    assert not used["train"] & used["heldout"]
    assert parts == {split: instruction_problems(name, split) for split in parts}  # the same at every call
    kinds = Counter(tuple(parse_constraints(problem.answer))[1:] for problem in parts["heldout"])
    assert len(kinds) == (len(CONSTRAINTS) if name == "instructions" else len(PAIRS))
    assert max(kinds.values()) - min(kinds.values()) <= 1


@pytest.mark.slow
def test_a_seed_gives_its_own_instructions_and_too_many_are_refused():
    one, other = make_instructions(50, seed=1), make_instructions(50, seed=2)
    assert one == make_instructions(50, seed=1) != other
    with pytest.raises(ValueError, match="number of different heldout instructions found, got 5000"):
        make_instructions(5000, seed=0, part="heldout")


@pytest.mark.parametrize("exploit", INSTRUCTION_EXPLOITS, ids=lambda exploit: exploit.name)
def test_no_exploit_is_paid_and_honest_work_is(exploit):
    (verdict,) = judge_reward(instruction_reward, exploits=[exploit])
    assert (verdict.paid_to_exploit, verdict.paid_to_honest) == (0.0, 1.0)
    (as_accuracy,) = judge_reward(accuracy_reward, exploits=[exploit])
    assert (as_accuracy.paid_to_exploit, as_accuracy.paid_to_honest) == (0.0, 1.0)


@pytest.mark.parametrize("problem", {e.problem.prompt: e.problem for e in INSTRUCTION_EXPLOITS}.values())
def test_the_exploits_of_the_course_earn_nothing_for_an_instruction(problem):
    texts = [exploit.completion for exploit in EXPLOITS]
    assert instruction_reward(texts, answer=[problem.answer] * len(texts)) == [0.0] * len(texts)


def test_the_naive_rewards_are_fooled_in_the_order_of_the_story():
    fooled = {
        name: {
            verdict.exploit.name for verdict in judge_reward(reward, exploits=INSTRUCTION_EXPLOITS) if not verdict.holds
        }
        for name, reward in REWARDS.items()
    }
    assert "leave the topic" in fooled["constraint"] - fooled["topic"]
    assert "define it by itself" in fooled["topic"]
    assert fooled["instruction"] == set() < fooled["topic"] < fooled["constraint"]


@pytest.mark.parametrize("name", REWARDS)
def test_a_reward_does_not_apply_to_other_problems_and_refuses_what_it_cannot_check(name):
    reward = REWARDS[name]
    levels = ["basic", "instructions:question"]
    assert reward(["#### 5", "Is it calm?"], answer=["5", asked(question=True)], level=levels)[0] is None
    for answer, message in (
        ("48", "got '48'; use the problems of --data instructions"),
        (None, "got None"),
        (asked(rhyme=True), "the constraint 'rhyme' cannot be checked; use one of no_comma"),
        (asked(), "there is no constraint"),
    ):
        with pytest.raises(ValueError, match=message):
            reward(["It is calm."], answer=[answer])
    with pytest.raises(ValueError, match="answer has 1 entries for 2"):
        reward(["a", "b"], answer=[asked(question=True)])


def test_an_instruction_has_no_system_prompt_of_ours_and_a_word_problem_has(policy_dir):
    _, tokenizer = load_policy(policy_dir)
    assert prompt_options("basic") == {} and prompt_options("instructions:end") == {"system": None}
    assert [message["role"] for message in chat_messages("Write.", **prompt_options("instructions:two"))] == ["user"]
    assert "####" not in render_prompt(tokenizer, "Write.", **prompt_options("instructions:word"))


def test_an_evaluation_uses_the_checker_and_reports_each_kind(policy_dir, monkeypatch):
    problems = load_split(("instructions",), n=20)
    model, tokenizer = load_policy(policy_dir)
    seen = []
    monkeypatch.setattr(
        "grpo_edu.evaluation.render_prompt",
        lambda *arguments, **options: seen.append(options) or render_prompt(*arguments),
    )
    found = evaluate(model, tokenizer, problems, max_completion_length=4)
    assert found.k == 0 and seen == [{"system": None}] * 20
    assert list(found.per_level()) == [f"instructions:{kind}" for kind in CONSTRAINTS]
