"""The study of careless readers: what each takes for the answer, by hand, and what the stored counts say."""

import json
from pathlib import Path

import pytest

from benchmarks.extraction import COMMAND, READERS, count_misread
from grpo_edu.problems.files import load_gsm8k

STORED = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "extraction.json"


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("16 - 3 - 4 = 9 eggs a day.\n9 * 2 = $18 a day.", ("18", "18")),
        ("90 - 10 = 80 dollars, 4 of 5.", ("5", "5")),
        ("125,000/20 = 6,250 dollars.", ("250", "6250")),
        ("4 * 4 = $16.00", ("00", "16.00")),
        ("It was -3 degrees.", ("3", "-3")),
        ("No idea.", (None, None)),
    ],
)
def test_what_each_reader_takes_for_the_answer(text, read):
    assert tuple(reader(text) for reader in READERS.values()) == read


def test_counts_by_hand():
    solutions = ["9 + 6 = 15 of the 24.\n#### 15", "2 * 600 = 1,200.\n#### 1,200", "4 * 4 = $16.00\n#### 16"]
    assert count_misread(solutions) == {"last_digits": 3, "last_number": 1, "extract_answer": 0}


def test_stored_counts_say_what_made_them():
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    assert stored["command"] == COMMAND
    assert set(stored["misread"]) == {*READERS, "extract_answer"}
    assert all(0 <= count <= stored["solutions"] == 8792 for count in stored["misread"].values())
    assert stored["misread"]["extract_answer"] == 0


def test_stored_counts_are_those_of_gsm8k(gsm8k_dir):
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    solutions = [problem.solution for split in ("test", "train") for problem in load_gsm8k(split, gsm8k_dir)]
    assert count_misread(solutions) == stored["misread"]
