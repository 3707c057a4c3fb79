"""The study of the tests themselves: which faults it makes, and what the stored record says."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import mutation

REPOSITORY = Path(__file__).resolve().parents[1]
STORED = json.loads((REPOSITORY / "benchmarks" / "results" / "mutation.json").read_text(encoding="utf-8"))


def test_faults_are_made_one_at_a_time_and_messages_are_left_alone():
    pytest.importorskip("mutmut", reason="no mutmut: pip install mutmut")
    source = (
        'def half(x: int = 1) -> int:\n    if x < 0:\n        raise ValueError("x" + "is negative")\n    return x\n'
    )
    found = mutation.mutants(source)
    assert list(found.values()) == [
        {"line": 1, "before": "def half(x: int = 1) -> int:", "after": "def half(x: int = 2) -> int:"},
        {"line": 2, "before": "if x < 0:", "after": "if x <= 0:"},
        {"line": 2, "before": "if x < 0:", "after": "if x < 1:"},
    ]
    assert all(text.count("negative") == 1 and text != source for text in found)


def test_table_by_hand():
    modules = {"b": {"mutants": 5, "killed": 4, "survivors": [{}]}, "a": {"mutants": 2, "killed": 2, "survivors": []}}
    assert mutation.table(modules).splitlines()[2:] == [
        "| `a` | 2 | 2 | 0 |",
        "| `b` | 5 | 4 | 1 |",
        "| all | 7 | 6 | 1 |",
    ]


def test_every_module_was_tried_and_every_survivor_is_judged():
    assert set(STORED["modules"]) == set(mutation.TESTS)
    for name, part in STORED["modules"].items():
        assert part["mutants"] > 50 and part["killed"] + len(part["survivors"]) == part["mutants"], name
        assert all(len(row["judged"].split()) >= 3 and row["before"] != row["after"] for row in part["survivors"]), name
    assert not re.search(r"(/home/|/root/|/tmp/|/Users/|[A-Z]:\\)", json.dumps(STORED))


def test_the_contributors_page_shows_the_stored_table():
    page = (REPOSITORY / "docs" / "contributing.md").read_text(encoding="utf-8")
    assert mutation.table(STORED["modules"]) in page
