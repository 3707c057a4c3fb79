"""The study behind notebook 03: its judgments on hand-made runs, and what the stored runs say."""

import json
from pathlib import Path

import pytest

from benchmarks.advantages import COMMAND, PAIRS, WAYS, settings, table, verdicts

STORED = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "advantages.json"
GAIN, ALIKE, TIES = (
    "each way gains at least 10 points on every seed",
    "the four ways with G = 8 end within 5 points of each other on every seed",
    "with G = 2 at least three times as many groups tie at first as with G = 8",
)
BEFORE = {"k": 120, "n": 300, "accuracy": 0.4}


def runs(**changes):
    """Two seeds, all on the bounds: 30 of 300 gained, 15 of 300 apart, three times as many ties."""
    solved = {("group", 0): 165, ("batch", 1): 165}
    rows = {}
    for name in WAYS:
        for seed in (0, 1):
            k = solved.get((name, seed), 150)
            ties = [0.5] * 5 if name == PAIRS else [0.1, 0.2, 0.2, 0.15, 0.15]
            after = {"k": k, "n": 300, "accuracy": k / 300}
            rows[name, seed] = {"name": name, "seed": seed, "after": after, "frac_reward_zero_std": [*ties, 0.9]}
    for (name, seed), change in changes.get("at", {}).items():
        rows[name, seed] |= change
    return list(rows.values())


def test_every_way_spends_128_completions_a_step():
    for name in WAYS:
        assert settings(name, 3).batch_size == 128 and settings(name, 3).seed == 3
    ways = [settings(name, 0) for name in WAYS]
    assert len({(way.scale_rewards, way.advantage_estimator, way.num_generations) for way in ways}) == len(WAYS)


def test_statements_hold_on_their_bounds():
    assert verdicts(BEFORE, runs()) == {GAIN: True, ALIKE: True, TIES: True}


@pytest.mark.parametrize(
    ("statement", "place", "change"),
    [
        (GAIN, (PAIRS, 1), {"after": {"k": 149, "n": 300, "accuracy": 149 / 300}}),
        (ALIKE, ("batch", 1), {"after": {"k": 166, "n": 300, "accuracy": 166 / 300}}),
        (TIES, (PAIRS, 0), {"frac_reward_zero_std": [0.4] * 5 + [0.9]}),
    ],
)
def test_one_seed_is_enough_to_break_a_statement(statement, place, change):
    judged = verdicts(BEFORE, runs(at={place: change}))
    assert judged == {name: name != statement for name in (GAIN, ALIKE, TIES)}


def test_table_has_a_row_a_way_with_mean_and_ties():
    lines = table(BEFORE, runs()).splitlines()
    assert lines[0] == "| advantages | seed 0 | seed 1 | mean | tied at first |"
    assert lines[2] == "| before | 40.0% | 40.0% | 40.0% |  |"
    assert lines[3] == "| group | 55.0% | 50.0% | 52.5% | 16% |"
    assert len(lines) == 3 + len(WAYS)


def test_the_stored_study_is_whole_and_its_statements_hold():
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    assert stored["command"] == COMMAND and stored["ways"] == WAYS
    assert {(row["name"], row["seed"]) for row in stored["runs"]} == {(name, s) for name in WAYS for s in range(5)}
    assert all(len(row["reward"]) == settings(row["name"], 0).max_steps for row in stored["runs"])
    assert stored["verdicts"] == verdicts(stored["before"], stored["runs"])
    assert all(stored["verdicts"].values())
