"""Evaluation: scoring, order, cutting by level, pairing; and `evaluate` on a real, if random, model."""

import io
import json
import math
import sys
from dataclasses import FrozenInstanceError, asdict, replace

import pytest
import torch
from random_policy import byte_tokenizer, random_model

import grpo_edu.rollout
from grpo_edu.evaluation import Comparison, Evaluation, compare, evaluate, paired_bootstrap
from grpo_edu.problems.gym import gym_problems
from grpo_edu.problems.templates import Problem, make_problems
from grpo_edu.prompts import render_prompt
from grpo_edu.rewards import accuracy_reward, format_reward
from grpo_edu.studies.fluency import fluency


def evaluation(correct, levels=None, prompts=None, completions=None):
    n = len(correct)
    return Evaluation(
        prompts=prompts or [f"question {row}" for row in range(n)],
        levels=levels or ["basic"] * n,
        completions=completions or ["#### 1"] * n,
        answers=["1"] * n,
        correct=correct,
    )


@pytest.fixture(scope="module")
def policy():
    tokenizer = byte_tokenizer()
    return random_model(tokenizer, sharpness=2.0), tokenizer


@pytest.fixture
def problems():
    long = Problem("How many apples are left in the basket?", "36", "basic", "#### 36")
    return [long, Problem("1 + 1?", "2", "advanced", "#### 2"), Problem("Which?", "heads", "coin_flip", "#### heads")]


def scripted(monkeypatch, completions, seen=None):
    """Let `generate` answer each rendered prompt with the completion of the question inside it."""

    def generate(model, tokenizer, prompts, **options):
        if seen is not None:
            seen.append((list(prompts), options))
        written = [next(text for question, text in completions.items() if question in prompt) for prompt in prompts]
        mask = torch.ones(len(written), 3)
        return type("Written", (), {"completions": written, "completion_mask": mask})

    monkeypatch.setattr(grpo_edu.rollout, "generate", generate)


def test_counts_accuracy_and_interval():
    result = evaluation([True] * 8 + [False] * 2)
    assert (result.k, result.n, result.accuracy) == (8, 10, 0.8)
    assert (result.low, result.high) == pytest.approx((0.4902, 0.9433), abs=5e-5)


def test_per_level_keeps_every_row_in_its_place_and_to_dict_is_json():
    result = evaluation([True, False, True, True], levels=["basic", "advanced", "basic", "advanced"])
    parts = result.per_level()
    assert list(parts) == ["basic", "advanced"]
    assert parts["advanced"].prompts == ["question 1", "question 3"]
    assert parts["advanced"].correct == [False, True]
    summary = json.loads(json.dumps(result.to_dict()))
    assert {key: summary[key] for key in ("k", "n", "accuracy")} == {"k": 3, "n": 4, "accuracy": 0.75}
    assert {level: (row["k"], row["n"]) for level, row in summary["per_level"].items()} == {
        "basic": (2, 2),
        "advanced": (1, 2),
    }
    assert set(summary["per_level"]["basic"]) == {"k", "n", "accuracy", "low", "high"}


def test_worked_share_counts_completions_with_an_equation_right_or_wrong():
    completions = ["14 + 34 = 48. #### 48", "#### 48", "14 + 34 = 99. #### 99", "a total of 48"]
    assert evaluation([True] * 4, completions=completions).worked_share == 0.5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(correct=[True], answers=[]), "same length"),
        (dict(correct=[], answers=[], prompts=[], levels=[], completions=[]), "at least one problem"),
    ],
)
def test_an_evaluation_refuses_uneven_or_empty_fields(fields, message):
    whole = dict(prompts=["?"], levels=["basic"], completions=["#### 1"], answers=["1"])
    with pytest.raises(ValueError, match=message):
        Evaluation(**{**whole, **fields})


def test_compare_pairs_the_problems():
    before = evaluation([True] * 2 + [False] * 10 + [True] * 8)
    after = evaluation([False] * 2 + [True] * 10 + [True] * 8)
    result = compare(before, after)
    assert (result.before, result.after, result.difference) == pytest.approx((0.5, 0.9, 0.4))
    assert result.p_value == pytest.approx(158 / 4096)
    assert 0 < result.low < 0.4 < result.high < 0.8
    assert Comparison(**json.loads(json.dumps(asdict(result)))) == result


def test_compare_draws_by_its_seed():
    before, after = (evaluation([row % step == 0 for row in range(300)]) for step in (3, 2))
    found = [compare(before, after, seed=seed) for seed in range(4)]
    expected = [paired_bootstrap(before.correct, after.correct, seed=seed) for seed in range(4)]
    assert [(row.low, row.high) for row in found] == [(row.low, row.high) for row in expected]
    assert len(set(found)) > 1 and compare(before, after) == found[0]


def test_what_was_measured_cannot_be_changed_afterwards():
    result = evaluation([True])
    assert result.num_tokens == []
    for record, name in ((result, "correct"), (compare(result, result), "p_value")):
        with pytest.raises(FrozenInstanceError):
            setattr(record, name, None)


def test_compare_refuses_other_problems_and_another_order():
    before = evaluation([True, False])
    with pytest.raises(ValueError, match="same problems in the same order"):
        compare(before, evaluation([True, False], prompts=["question 1", "question 0"]))
    with pytest.raises(ValueError, match="before and after.*2 and 3 problems"):
        compare(before, evaluation([True, False, True]))


def test_evaluate_scores_in_the_order_of_the_problems(monkeypatch, policy, problems):
    model, tokenizer = policy
    seen = []
    answers = {"apples": "48 - 12 = 36. #### 36.00", "1 + 1": "I think so", "Which": "#### Tails"}
    scripted(monkeypatch, answers, seen)
    model.train()
    result = evaluate(model, tokenizer, problems, batch_size=2, temperature=0.7, max_completion_length=11)
    assert model.training, "the mode is put back"
    model.eval()
    assert result.prompts == [problem.prompt for problem in problems]
    assert result.levels == ["basic", "advanced", "coin_flip"]
    assert result.completions == list(answers.values())
    assert result.answers == ["36", None, "tails"]
    assert result.correct == [True, False, False]
    assert result.num_tokens == [3, 3, 3]
    batches = [[len(prompt) for prompt in prompts] for prompts, _ in seen]
    assert batches == [sorted(batches[0]), batches[1]] and len(batches[0]) == 2 and batches[0][-1] <= batches[1][0]
    for _, options in seen:
        assert (options["num_generations"], options["temperature"], options["max_completion_length"]) == (1, 0.7, 11)
    assert all("<|im_start|>assistant" in prompt for prompts, _ in seen for prompt in prompts)


def test_what_evaluate_does_when_nothing_is_said(monkeypatch, policy):
    """It samples at temperature 1 with seed 0, 64 problems at once, 96 tokens each, and shows no bar."""
    seen, stream = [], Terminal()
    scripted(monkeypatch, {"?": "#### 1"}, seen)
    monkeypatch.setattr(sys, "stderr", stream)
    assert evaluate(*policy, [Problem("?", "1", "basic", "")] * 65).k == 65
    assert [len(prompts) for prompts, _ in seen] == [64, 1] and not stream.getvalue()
    for _, options in seen:
        assert (options["temperature"], options["max_completion_length"]) == (1.0, 96)
        assert options["generator"].initial_seed() == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*None for 1")
def test_a_list_of_dictionaries_is_evaluated_with_a_reward_function_that_is_called_for_each_batch(policy):
    rows = [{"prompt": f"{number}?", "answer": f"about {number} or so", "weight": number / 4} for number in range(4)]
    calls = []

    def partial_credit(prompts, completions, answer, weight, completion_ids, **kwargs):
        calls.append((prompts, answer, [len(ids) for ids in completion_ids]))
        return [None if value == 0 else value + shift for value in weight]

    shift = 0.25
    before = evaluate(*policy, rows, reward_funcs=partial_credit, max_completion_length=4, batch_size=3)
    batches = [rows[:3], rows[3:]]
    assert [call[0] for call in calls] == [[row["prompt"] for row in batch] for batch in batches]
    assert [call[1] for call in calls] == [[row["answer"] for row in batch] for batch in batches]
    assert calls[0][2] + calls[1][2] == before.num_tokens
    assert before.rewards[1:] == [0.5, 0.75, 1.0] and before.correct == [False, False, False, True]
    assert before.reward.value == 0.75 and before.reward.low == 0.5 and before.reward.high == 1.0
    assert str(before) == repr(before) == "1 of 4 solved: 25.0% [4.6, 69.9], mean reward 0.750 [0.500, 1.000]"
    shift = 0.5
    after = evaluate(*policy, rows, reward_funcs=[partial_credit], max_completion_length=4)
    comparison = compare(before, after)
    assert (comparison.reward.difference, comparison.reward.low, comparison.reward.high) == (0.25, 0.25, 0.25)
    assert str(comparison).endswith("p = 1; reward +0.250 [+0.250, +0.250]") and "\n" not in str(comparison)
    with pytest.raises(ValueError, match=r"problems\[0\] has no valid answer, .* pass `reward_funcs`"):
        evaluate(*policy, rows)
    with pytest.raises(ValueError, match=r"problems\[0\] must be a grpo_edu.Problem, or a dictionary with a text"):
        evaluate(*policy, [{"prompt": "1 + 1?", "anwser": "2"}])


def test_rewards_that_equal_the_accuracy_are_not_printed_twice():
    before, after = evaluation([False, False, True, False]), evaluation([True, False, True, True])
    same = [replace(one, rewards=[float(correct) for correct in one.correct]) for one in (before, after)]
    assert [one.has_partial_credit for one in (before, same[0])] == [False, False]
    assert str(same[1]) == str(after) and str(compare(*same)) == str(compare(before, after))
    assert compare(*same).reward.difference == 0.5 and same[1].counts()["reward"]["value"] == 0.75
    half = replace(after, rewards=[1.0, 0.5, 1.0, 1.0])  # 1, 0.5, 0 and 1 more than before
    assert half.has_partial_credit and "mean reward 0.875 [" in str(half)
    unpaid = replace(half, rewards=[math.nan] * half.n)
    assert not unpaid.has_partial_credit and unpaid.reward is None, "a reward that applies to none of the problems"
    change = compare(same[0], half).reward
    assert (change.difference, change.low, change.high) == (0.625, 0.25, 1.0)
    assert str(compare(same[0], half)).endswith("; reward +0.625 [+0.250, +1.000]")
    assert set(half.per_level()["basic"].counts()) == {"k", "n", "accuracy", "low", "high", "reward"}


def test_the_weights_of_rewards_count_and_the_first_of_your_own_decides_without_an_answer(monkeypatch, policy):
    """0.8 x own + 0.5 x format: 0.8 + 0 and 0.4 + 0.5, of which the second is not solved although it is above 0.8."""
    problems = [Problem("one?", "", "own:say", columns={"wanted": "1"}), Problem("two?", "", "own:say")]
    scripted(monkeypatch, {"one": "it is 1", "two": "#### 2"})
    rollout = grpo_edu.rollout.generate
    monkeypatch.setattr(grpo_edu.rollout, "generate", lambda *a, **o: with_ids(rollout(*a, **o)))

    def says(completions, wanted, trainer_state, **kwargs):
        assert trainer_state.global_step == 0, "what only TRL's trainer gives in training"
        return [1.0 if w and w in c else 0.5 for c, w in zip(completions, wanted, strict=True)]

    rewards = [format_reward, accuracy_reward, says]
    found = evaluate(*policy, problems, reward_funcs=rewards, reward_weights=[0.5, 3.0, 0.8])
    assert found.rewards == pytest.approx([0.8, 0.9]) and found.correct == [True, False]
    assert found.answers == ["it is 1", "#### 2"], "the whole text"
    with pytest.raises(ValueError, match=r"problems\[0\] has no valid answer"):
        evaluate(*policy, problems)


def with_ids(rollout):
    rollout.completion_ids = torch.ones(len(rollout.completions), 3, dtype=torch.long)
    return rollout


def test_a_task_of_reasoning_gym_is_judged_by_its_own_scorer(monkeypatch, policy, reasoning_gym):
    right, wrong = gym_problems("reasoning-gym:leg_counting", "heldout", 2)
    completions = {right.prompt: f"Legs: #### {right.answer}", wrong.prompt: "#### none"}
    scripted(monkeypatch, completions)
    result = evaluate(*policy, [right, wrong])
    assert result.answers == [right.answer, "none"]
    assert result.correct == [True, False]


def test_evaluate_puts_the_mode_back_when_generation_fails(monkeypatch, policy, problems):
    def fail(*args, **options):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(grpo_edu.rollout, "generate", fail)
    model, tokenizer = policy
    model.train()
    with pytest.raises(RuntimeError, match="out of memory"):
        evaluate(model, tokenizer, problems)
    assert model.training
    model.eval()


def test_a_seed_repeats_a_sampled_evaluation_and_another_seed_does_not(policy):
    model, tokenizer = policy
    problems = make_problems("basic", 4, seed=0)
    options = dict(max_completion_length=6, batch_size=3)
    first = evaluate(model, tokenizer, problems, **options)
    assert evaluate(model, tokenizer, problems, **options) == first
    assert evaluate(model, tokenizer, problems, seed=1, **options).completions != first.completions


def test_greedy_does_not_depend_on_seed_batches_or_order(policy):
    model, tokenizer = policy
    problems = make_problems("basic", 4, seed=0)
    options = dict(temperature=0, max_completion_length=6)
    first = evaluate(model, tokenizer, problems, **options)
    other = evaluate(model, tokenizer, problems[::-1], batch_size=1, seed=5, **options)
    assert other.completions[::-1] == first.completions


@pytest.mark.parametrize(
    ("problems", "options", "message"),
    [
        ([], {}, "problems is empty"),
        ([Problem("1 + 1?", "2", "basic", "")], {"batch_size": 0}, "batch_size must be at least 1"),
        ([Problem("1 + 1?", "2", "basic", "")], {"seed": 2**70}, "seed .*64 bits.*got 1180591620717411303424"),
        ([Problem("1 + 1?", "2", "basic", ""), Problem("?", "2 or 3", "basic", "")], {}, r"problems\[1\].*'2 or 3'"),
    ],
)
def test_evaluate_refuses(policy, problems, options, message):
    with pytest.raises(ValueError, match=message):
        evaluate(*policy, problems, **options)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stream", "progress", "shown"),
    [(Terminal(), True, True), (Terminal(), False, False), (io.StringIO(), True, False)],
)
def test_a_bar_is_shown_in_a_terminal_only_and_when_asked(monkeypatch, policy, problems, stream, progress, shown):
    scripted(monkeypatch, {"apples": "#### 36", "1 + 1": "#### 2", "Which": "#### heads"})
    monkeypatch.setattr(sys, "stderr", stream)
    assert evaluate(*policy, problems, progress=progress).k == 3
    assert ("\rEvaluating: 100%" in stream.getvalue()) is ("3/3" in stream.getvalue()) is shown


def test_fluency_is_what_a_forward_pass_of_each_completion_alone_says(policy):
    model, tokenizer = policy
    texts = ["2+3=5.", "", "Five five FIVE six", "a long answer with many different words"]
    found = fluency(model, tokenizer, evaluation([True] * 4, completions=texts), batch_size=3)
    for row, text in enumerate(texts):
        prompt = tokenizer(render_prompt(tokenizer, f"question {row}")).input_ids
        ids = torch.tensor([prompt + tokenizer(text).input_ids])
        with torch.no_grad():
            logps = model(ids).logits[0].log_softmax(-1)
        alone = [-logps[place - 1, ids[0, place]].item() for place in range(len(prompt), ids.shape[1])]
        assert found.nll[row] == pytest.approx(sum(alone), rel=1e-4) and found.num_tokens[row] == len(alone)
    assert found.num_words == [3, 0, 4, 7] and found.distinct_words == [1.0, 0.0, 0.5, 1.0]
    assert found.perplexity == pytest.approx(math.exp(sum(found.nll) / sum(found.num_tokens)))
    empty = fluency(model, tokenizer, evaluation([True] * 2, completions=["", ""]))
    assert math.isnan(empty.perplexity) and empty.to_dict()["num_words"] == 0
