"""The study behind notebook 09: its judgments on hand-made runs, and what the stored runs say."""

import json
from pathlib import Path

import pytest

from benchmarks.finetuning_comparison import (
    COMMAND,
    METHODS,
    RANK,
    STEPS,
    TUNING_PROBLEMS,
    best_rates,
    paired,
    table,
    verdicts,
)
from grpo_edu.evaluation import wilson_interval

STORED = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "finetuning_comparison.json"
GAIN, NEAR, RATE = (
    "every method gains at least 20 points on every seed, p < 0.001",
    "LoRA ends within 5 points of all weights on every seed, for both kinds",
    "LoRA's best learning rate is at least 3 times that of all weights, for both kinds",
)


def bits(k, n=100):
    """The first k of n problems are solved."""
    return {"k": k, "n": n, "solved": "1" * k + "0" * (n - k)}


BEFORE = bits(40)
TUNING = [
    {"name": name, "learning_rate": rate, "k": k, "n": 10}
    for name in METHODS
    for rate, k in ({1e-4: 5, 3e-4: 9, 1e-3: 9} if "all" in name else {3e-4: 8, 1e-3: 9, 1e-2: 0}).items()
]


def runs(changed="", k=60):
    found = [{"name": name, "seed": seed, **bits(60 + seed)} for seed in (0, 1) for name in METHODS]
    return [run | bits(k) if (run["name"], run["seed"]) == (changed, 0) else run for run in found]


def tuned(changed, rates):
    rows = [row for row in TUNING if row["name"] != changed]
    return rows + [{"name": changed, "learning_rate": rate, "k": k, "n": 10} for rate, k in rates.items()]


def test_runs_on_the_bounds_hold():
    assert verdicts(BEFORE, TUNING, runs()) == dict.fromkeys((GAIN, NEAR, RATE), True)


@pytest.mark.parametrize(
    ("statement", "tuning", "changed", "k"),
    [
        (GAIN, TUNING, "supervised, LoRA", 59),
        (NEAR, TUNING, "GRPO, LoRA", 66),
        (NEAR, TUNING, "supervised, all weights", 66),
        (RATE, tuned("GRPO, LoRA", {3e-4: 9, 1e-3: 8}), "", 60),
        (RATE, tuned("supervised, all weights", {3e-4: 8, 1e-3: 9}), "", 60),
    ],
)
def test_one_run_that_misses_a_bound_is_enough(statement, tuning, changed, k):
    assert [name for name, holds in verdicts(BEFORE, tuning, runs(changed, k)).items() if not holds] == [statement]


def test_a_gain_by_chance_is_none():
    few = {"k": 1, "n": 5, "solved": "10000"}
    found = [{"name": name, "seed": 0, "k": 4, "n": 5, "solved": "11110"} for name in METHODS]
    assert not verdicts(few, TUNING, found)[GAIN], "three problems of five are no evidence"


def test_the_best_rate_is_the_smaller_of_equals():
    assert best_rates(TUNING) == {name: 3e-4 if "all" in name else 1e-3 for name in METHODS}


def test_paired_difference_by_hand():
    rows = [
        {"name": "one", "seed": 7, "solved": "1110000000"},
        {"name": "other", "seed": 7, "solved": "0111111000"},
    ]
    # 4 problems only the other solves, 1 only the first: (4 - 1) / 10, and p = 2 · (1 + 5) / 2^5
    assert paired(rows, "one", "other") == [{"seed": 7, "points": 30.0, "p": 0.375}]


def test_table_by_hand():
    speeds = [
        {"name": name, "startup": start, "samples_per_second": 200.0, "peak": 671e6, "trained": 1, "parameters": 8}
        for name in METHODS
        for start in (2.0, 3.0, 2.5)
    ]
    lines = table(BEFORE, runs(), speeds).splitlines()
    assert lines[0] == "| method | start-up, s | samples/s | peak, MB | learns | accuracy |"
    assert lines[2] == "| before |  |  |  |  | 40.0% |"
    assert lines[3].split(" | ")[1:] == [
        "2.5 (2.0 … 3.0)", "200 (200 … 200)", "671 (671 … 671)", "12.5%", "60.5 (60.0 … 61.0) % |"
    ]  # fmt: skip
    assert len(lines) == 3 + len(METHODS)


def test_stored_study():
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    assert stored["command"] == COMMAND and stored["machine"]
    assert (stored["rank"], stored["steps"]) == (RANK, STEPS)
    tried = {(row["name"], row["learning_rate"]) for row in stored["tuning"]}
    assert tried == {(name, rate) for name, (_, _, rates) in METHODS.items() for rate in rates}
    assert {row["n"] for row in stored["tuning"]} == {3 * TUNING_PROBLEMS}
    best = best_rates(stored["tuning"])
    assert all(min(rates) < best[name] < max(rates) for name, (_, _, rates) in METHODS.items()), "a best at an end"
    assert sorted((run["name"], run["seed"]) for run in stored["runs"]) == sorted(
        (name, seed) for name in METHODS for seed in range(5)
    )
    assert all(run["learning_rate"] == best[run["name"]] for run in stored["runs"])
    for result in (stored["before"], *stored["runs"]):
        assert result["n"] == 300 == len(result["solved"]) and result["k"] == result["solved"].count("1")
        assert (result["low"], result["high"]) == pytest.approx(wilson_interval(result["k"], result["n"]), abs=1e-12)
    for name, (_, rank, _) in METHODS.items():
        rounds = [row for row in stored["speed"] if row["name"] == name]
        assert len(rounds) >= 3 and all(0 < row["libraries"] < row["peak"] for row in rounds)
        assert {row["trained"] == row["parameters"] for row in rounds} == {not rank}
    assert stored["verdicts"] == verdicts(stored["before"], stored["tuning"], stored["runs"])
    assert all(stored["verdicts"].values())
