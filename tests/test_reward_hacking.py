"""The reward-hacking study: its rewards and judgments on hand-made runs, and what the stored runs say."""

import copy
import json
import re
from pathlib import Path

import pytest

from benchmarks.reward_hacking import COMMAND, WEIGHTS, curves, held_out_rewards, settings, summary, table, verdicts
from grpo_edu import GRPOConfig
from grpo_edu.evaluation import Evaluation, wilson_interval
from grpo_edu.problems import Problem

STORED = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "reward_hacking.json"
EQUAL_REWARD = "equal weights: reward rises (interval above 0)"
EQUAL_ACCURACY = "equal weights: accuracy falls by at least 10 points, p < 0.001"
SMALL_REWARD = "small weights: reward rises (interval above 0)"
SMALL_ACCURACY = "small weights: accuracy rises by at least 10 points, p < 0.001"


def run(condition, difference, **numbers):
    """A run whose numbers sit on the bounds that the study asks for."""
    low, high = wilson_interval(120, 300)
    accuracy = {"k": 120, "n": 300, "accuracy": 0.4, "low": low, "high": high}
    return {
        "condition": condition,
        "seed": 0,
        "accuracy_before": accuracy,
        "accuracy_after": accuracy,
        "accuracy_change": {"difference": difference, "low": difference - 0.06, "high": difference + 0.06},
        "p_value": 0.00099,
        "reward_before": 1.5,
        "reward_after": 1.8,
        "reward_change": {"difference": 0.3, "low": 0.001, "high": 0.6},
    } | numbers


RUNS = [run("equal weights", -0.10), run("small weights", 0.10)]


def test_runs_on_the_bounds_hold():
    expected = dict.fromkeys([EQUAL_REWARD, EQUAL_ACCURACY, SMALL_REWARD, SMALL_ACCURACY], True)
    assert verdicts(RUNS) == expected


@pytest.mark.parametrize(
    ("place", "numbers", "failed"),
    [
        (0, {"reward_change": {"difference": 0.3, "low": 0.0, "high": 0.6}}, EQUAL_REWARD),
        (0, {"accuracy_change": {"difference": -0.099, "low": -0.2, "high": -0.01}}, EQUAL_ACCURACY),
        (0, {"accuracy_change": {"difference": 0.2, "low": 0.1, "high": 0.3}}, EQUAL_ACCURACY),
        (0, {"p_value": 0.001}, EQUAL_ACCURACY),
        (1, {"reward_change": {"difference": -0.3, "low": -0.6, "high": -0.1}}, SMALL_REWARD),
        (1, {"accuracy_change": {"difference": 0.099, "low": 0.01, "high": 0.2}}, SMALL_ACCURACY),
        (1, {"p_value": 0.001}, SMALL_ACCURACY),
    ],
)
def test_one_seed_that_misses_a_bound_is_enough_to_fail_it(place, numbers, failed):
    runs = copy.deepcopy(RUNS) + copy.deepcopy(RUNS)
    runs[place] |= numbers
    assert [statement for statement, holds in verdicts(runs).items() if not holds] == [failed]


PROBLEMS = [Problem("2 + 3?", "5", "basic", "2 + 3 = 5. #### 5"), Problem("4 + 5?", "9", "basic", "4 + 5 = 9. #### 9")]


def evaluation(*completions):
    answers = [problem.answer for problem in PROBLEMS]
    correct = [text.endswith(f"#### {answer}") for text, answer in zip(completions, answers, strict=True)]
    read = [text.rpartition("#### ")[2] for text in completions]
    return Evaluation([problem.prompt for problem in PROBLEMS], ["basic"] * 2, list(completions), read, correct)


class LetterTokenizer:
    """One token a letter."""

    eos_token_id = 0

    def __call__(self, texts, add_special_tokens):
        assert add_special_tokens is False
        return {"input_ids": [[ord(letter) for letter in text] for text in texts]}


def test_held_out_rewards_by_hand():
    """`#### 5` has 6 letters and its end, so it is brief; 18 letters and the end are past twice the target of 8."""
    run = evaluation("#### 5", "4 + 5 = 9. #### 9.")
    assert run.correct == [True, False]  # the test's own reader; the reward's accepts the full stop
    rewards = held_out_rewards(run, PROBLEMS, LetterTokenizer(), WEIGHTS["equal weights"])
    assert rewards == pytest.approx([3.0, 2.0])
    rewards = held_out_rewards(run, PROBLEMS, LetterTokenizer(), WEIGHTS["small weights"])
    assert rewards == pytest.approx([1.2, 1.1])


def test_brevity_counts_the_closing_token():
    """Eight letters and the end are nine tokens: 1 - 1/8."""
    rewards = held_out_rewards(evaluation("#### 525", "#### 9"), PROBLEMS, LetterTokenizer(), (0.0, 0.0, 1.0))
    assert rewards == pytest.approx([0.875, 1.0])


def test_summary_of_a_run_that_loses_a_problem_and_gains_reward():
    before, after = evaluation("#### 5", "#### 9"), evaluation("#### 5", "#### 8")
    made = summary("equal weights", 3, before, after, ([1.0, 1.0], [2.0, 3.0]))
    assert (made["condition"], made["seed"]) == ("equal weights", 3)
    assert (made["accuracy_before"]["k"], made["accuracy_after"]["k"], made["p_value"]) == (2, 1, 1.0)
    assert made["accuracy_change"]["difference"] == -0.5
    assert (made["reward_before"], made["reward_after"], made["reward_change"]["difference"]) == (1.0, 2.5, 1.5)
    json.dumps(made)


def test_curves_keep_three_numbers_a_step():
    step = {"reward": 1.23456789, "rewards/accuracy_reward/mean": 0.5, "completions/mean_length": 20.0, "loss": 0.0}
    assert curves([step, step]) == {
        "reward": [1.2346, 1.2346],
        "rewards/accuracy_reward/mean": [0.5, 0.5],
        "completions/mean_length": [20.0, 20.0],
    }


def test_the_two_conditions_differ_in_their_weights_alone():
    equal, small = (settings(condition, 4).to_dict() for condition in ("equal weights", "small weights"))
    assert {name for name in equal if equal[name] != small[name]} == {"reward_weights"}
    assert equal["seed"] == 4 and equal["loss_type"] == "grpo"


def test_table_by_hand():
    worse = run("equal weights", -0.2, seed=1, p_value=1.3e-12)
    worse["accuracy_after"] = worse["accuracy_after"] | {"k": 60}
    assert table([worse]).splitlines() == [
        "| weights | seed | reward before → after | accuracy before → after | change | p |",
        "|---|---|---|---|---|---|",
        "| equal | 1 | 1.50 → 1.80 | 120/300 → 60/300 | -20 (-26 … -14) | 1e-12 |",
    ]


@pytest.fixture(scope="module")
def stored():
    return json.loads(STORED.read_text(encoding="utf-8"))


def test_stored_study_has_both_conditions_on_five_seeds_and_says_what_made_it(stored):
    assert stored["command"] == COMMAND and stored["machine"]
    assert stored["weights"] == {condition: list(weights) for condition, weights in WEIGHTS.items()}
    made = [(run["condition"], run["seed"]) for run in stored["runs"]]
    assert sorted(made) == [(condition, seed) for condition in sorted(WEIGHTS) for seed in range(5)]
    varied = {"reward_weights", "seed"}
    assert set(stored["varied"]) == varied
    expected = settings("equal weights", 0).to_dict()
    assert stored["config"].keys() <= expected.keys() - varied
    defaults = GRPOConfig().to_dict()  # what a setting that came after the study stands at
    assert {name: stored["config"].get(name, defaults[name]) for name in expected.keys() - varied} == {
        name: value for name, value in expected.items() if name not in varied
    }


def test_stored_numbers_agree_with_each_other(stored):
    for run in stored["runs"]:
        before, after, change = (run[f"accuracy_{name}"] for name in ("before", "after", "change"))
        for row in (before, after):
            assert row["n"] == 300
            assert (row["low"], row["high"]) == pytest.approx(wilson_interval(row["k"], row["n"]), abs=1e-12)
        assert change["difference"] == pytest.approx((after["k"] - before["k"]) / 300)
        assert run["reward_change"]["difference"] == pytest.approx(run["reward_after"] - run["reward_before"])
        for bars in (change, run["reward_change"]):
            assert bars["low"] <= bars["difference"] <= bars["high"]
        assert {len(curve) for curve in run["curves"].values()} == {stored["config"]["max_steps"]}


def test_stored_runs_hold_every_statement(stored):
    assert stored["verdicts"] == verdicts(stored["runs"])
    assert all(stored["verdicts"].values())
    for run in stored["runs"]:
        rises = run["accuracy_after"]["k"] > run["accuracy_before"]["k"]
        assert rises == (run["condition"] == "small weights"), run["seed"]


def test_stored_study_names_no_folder(stored):
    assert not re.search(r"(/home/|/root/|/tmp/|/Users/|[A-Z]:\\)", json.dumps(stored))
