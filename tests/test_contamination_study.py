"""The study of a leak: its judgments on hand-made runs, its own small run, and what the stored runs say."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.contamination import COMMAND, PROBLEMS, verdicts

STORED = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "contamination.json"


def run(leaked=(25, 48), clean=(30, 24)):
    """On the bounds: 48 of 60 are 80%, six of 60 are ten points."""
    parts = {"leaked": leaked, "clean": clean}
    return {"seed": 0, "problems": 60} | {
        name: {"before": before, "after": after} for name, (before, after) in parts.items()
    }


def test_a_run_on_the_bounds_holds_and_one_that_misses_fails_the_study():
    assert list(verdicts([run()]).values()) == [True, True]
    assert list(verdicts([run(), run(leaked=(25, 47))]).values()) == [False, True]
    assert list(verdicts([run(clean=(30, 25)), run()]).values()) == [True, False]


@pytest.fixture(scope="module")
def stored():
    return json.loads(STORED.read_text(encoding="utf-8"))


def test_stored_study_has_five_seeds_and_says_what_made_it(stored):
    assert stored["command"] == COMMAND and stored["machine"]
    assert sorted(run["seed"] for run in stored["runs"]) == [0, 1, 2, 3, 4]
    assert not re.search(r"(/home/|/root/|/tmp/|/Users/|[A-Z]:\\)", json.dumps(stored))


def test_stored_runs_hold_every_statement(stored):
    for row in stored["runs"]:
        assert row["problems"] == PROBLEMS == 60
        assert row["leaked"]["after"] >= 48, row
        assert row["clean"]["before"] - row["clean"]["after"] >= 6, row
        for part in ("leaked", "clean"):
            assert 0 <= row[part]["before"] <= 60 and 0 <= row[part]["after"] <= 60
    assert stored["verdicts"] == verdicts(stored["runs"]) and all(stored["verdicts"].values())
