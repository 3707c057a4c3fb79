"""The study behind the course's claim: its judgments on hand-made runs, and what the stored runs say."""

import copy
import json
import re
from pathlib import Path

import pytest
from scipy.stats import binom

from benchmarks.default_run import COMMAND, kept, table, verdicts
from grpo_edu.evaluation import wilson_interval

REPOSITORY = Path(__file__).resolve().parents[1]
STORED = REPOSITORY / "benchmarks" / "results" / "default_run.json"
GAIN, P_VALUE, GREEDY, TIME = (
    "sampled accuracy rises by at least 25 points",
    "p < 0.001 (exact McNemar test)",
    "greedy accuracy reaches 95%",
    "a run takes at most 60 seconds",
)
ACCURACIES = ("accuracy_before", "accuracy_after", "greedy_before", "greedy_after")


def accuracy(k, n, low, high):
    return {"k": k, "n": n, "accuracy": k / n, "low": low, "high": high, "per_level": {}}


# What `grpo-edu train --greedy --json` prints; each number sits on the bound that the study asks for.
RUN = {
    "accuracy_before": accuracy(90, 300, 0.2509, 0.3542),
    "accuracy_after": accuracy(165, 300, 0.4934, 0.6053),
    "greedy_before": accuracy(150, 300, 0.4438, 0.5562),
    "greedy_after": accuracy(285, 300, 0.9191, 0.9694),
    "p_value": 0.00099,
    "seconds": 60.0,
    "steps": 30,
    "seed": 7,
    "output": "/somewhere/of/this/machine",
    "interrupted": False,
    "failure": "",
}


def changed(**numbers):
    """The run with other numbers; for an accuracy, another k of the same n."""
    run = copy.deepcopy(RUN)
    for name, number in numbers.items():
        if name in ACCURACIES:
            run[name] |= {"k": number, "accuracy": number / run[name]["n"]}
        else:
            run[name] = number
    return run


def test_kept_holds_the_numbers_and_no_path_of_the_machine():
    names = {*ACCURACIES, "p_value", "seconds", "steps", "seed"}
    assert set(kept(RUN)) == names
    assert kept(RUN)["accuracy_after"] == RUN["accuracy_after"]
    assert "/somewhere" not in json.dumps(kept(RUN))


def test_a_run_on_the_bounds_holds():
    assert verdicts([RUN]) == {GAIN: True, P_VALUE: True, GREEDY: True, TIME: True}


@pytest.mark.parametrize(
    ("statement", "numbers"),
    [
        (GAIN, {"accuracy_after": 164}),
        (GAIN, {"accuracy_before": 165, "accuracy_after": 90}),  # as large a loss is no gain
        (P_VALUE, {"p_value": 0.001}),
        (GREEDY, {"greedy_after": 284}),
        (TIME, {"seconds": 60.01}),
    ],
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_seed_that_misses_a_bound_is_enough_to_fail_it(statement, numbers, place):
    runs = [RUN, RUN, RUN]
    runs[place] = changed(**numbers)
    failed = [name for name, holds in verdicts(runs).items() if not holds]
    assert failed == [statement]


def test_gains_are_not_averaged():
    large, none = changed(accuracy_after=300), changed(accuracy_after=90)
    assert not verdicts([large, none])[GAIN]


def test_table_by_hand():
    other = changed(accuracy_after=300, p_value=1.3e-27, seconds=31.7, seed=8)
    other["accuracy_after"] |= {"low": 0.98736, "high": 1.0}
    assert table([RUN, other]).splitlines() == [
        "| seed | sampled before | sampled after | p | greedy before | greedy after | seconds |",
        "|---|---|---|---|---|---|---|",
        "| 7 | 90/300 (25% … 35%) | 165/300 (49% … 61%) | 1e-03 | 150/300 (44% … 56%) | 285/300 (92% … 97%) | 60 |",
        "| 8 | 90/300 (25% … 35%) | 300/300 (99% … 100%) | 1e-27 | 150/300 (44% … 56%) | 285/300 (92% … 97%) | 32 |",
    ]


@pytest.fixture(scope="module")
def stored():
    return json.loads(STORED.read_text(encoding="utf-8"))


def test_stored_study_has_five_seeds_and_says_what_made_it(stored):
    assert stored["command"] == COMMAND
    assert stored["machine"], "the study does not say what it ran on"
    seeds = [run["seed"] for run in stored["runs"]]
    assert len(set(seeds)) == len(seeds) == 5
    assert all(set(run) == set(kept(RUN)) for run in stored["runs"])


def test_stored_study_names_no_folder(stored):
    assert not re.search(r"(/home/|/root/|/tmp/|/Users/|[A-Z]:\\)", json.dumps(stored))


def test_stored_accuracies_have_300_problems_and_their_wilson_intervals(stored):
    for run in stored["runs"]:
        for name in ACCURACIES:
            row = run[name]
            assert row["n"] >= 300, (run["seed"], name)
            assert row["accuracy"] == row["k"] / row["n"]
            assert (row["low"], row["high"]) == pytest.approx(wilson_interval(row["k"], row["n"]), abs=1e-12)
            levels = row["per_level"].values()
            assert sum(level["k"] for level in levels) == row["k"]
            assert sum(level["n"] for level in levels) == row["n"]


def test_stored_runs_hold_every_statement(stored):
    """From the counts themselves, and as the stored verdicts say."""
    for run in stored["runs"]:
        before, after = run["accuracy_before"], run["accuracy_after"]
        assert before["n"] == after["n"]
        assert 100 * (after["k"] - before["k"]) >= 25 * after["n"], run["seed"]
        assert run["p_value"] < 0.001, run["seed"]
        assert 100 * run["greedy_after"]["k"] >= 95 * run["greedy_after"]["n"], run["seed"]
        assert 0 < run["seconds"] <= 60, run["seed"]
    assert stored["verdicts"] == verdicts(stored["runs"])
    assert all(stored["verdicts"].values())


def test_stored_p_values_are_possible_for_their_counts(stored):
    """With `gain` more problems won than lost, p is smallest when none was lost, largest when most were."""
    for run in stored["runs"]:
        before, after = run["accuracy_before"], run["accuracy_after"]
        gain = after["k"] - before["k"]
        most_lost = min(before["k"], after["n"] - after["k"])
        largest = 2 * binom.cdf(most_lost, 2 * most_lost + gain, 0.5)
        assert 2.0 ** (1 - gain) * (1 - 1e-9) <= run["p_value"] <= largest * (1 + 1e-9), run["seed"]


def test_readme_shows_the_stored_table(stored):
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    for line in table(stored["runs"]).splitlines():
        assert line in readme
