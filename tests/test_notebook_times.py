"""The benchmark of the notebooks: its table by hand, its watch on a real process, and the README as it was measured."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.notebooks import PeakOfChildren, fill_readme, row_with, verdicts

REPOSITORY = Path(__file__).resolve().parents[1]
STORED = REPOSITORY / "benchmarks" / "results" / "notebooks.json"


def test_the_memory_of_a_child_is_seen():
    program = "import time; block = bytearray(300_000_000); block[::4096] = b'x' * len(block[::4096]); time.sleep(1.5)"
    with PeakOfChildren() as memory:
        subprocess.run([sys.executable, "-c", program], check=True)
    assert 300e6 < memory.peak < 500e6


def test_what_is_promised_is_judged():
    good = {"00_a": {"seconds": 119, "peak": 1}, "10_b": {"seconds": 200, "peak": 1}}
    assert all(verdicts(good).values())
    assert list(verdicts({"00_a": {"seconds": 121, "peak": 1}}).values()) == [False, True]
    many = {f"0{number}_a": {"seconds": 110, "peak": 1} for number in range(9)}
    assert list(verdicts(many).values()) == [True, False]


def test_the_table_is_written_in_place(tmp_path):
    page = tmp_path / "README.md"
    page.write_text(
        "| notebook | what it gives | time |\n|---|---|---|\n| [00 A](notebooks/00_a.ipynb) | x | 1 min |\n\nend\n"
    )
    for _ in range(2):
        fill_readme({"00_a": {"seconds": 12.3, "peak": 0.84e9}}, page)
    assert page.read_text() == (
        "| notebook | what it gives | time | memory |\n|---|---|---|---|\n"
        "| [00 A](notebooks/00_a.ipynb) | x | 12 s | 0.8 GB |\n\nend\n"
    )


def test_the_readme_says_what_was_measured():
    if not STORED.exists():
        pytest.skip("not measured yet: python -m benchmarks.notebooks --readme")
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    assert all(stored["verdicts"].values())
    rows = [row for row in (REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines() if "(notebooks/" in row]
    numbered = {name: found for name, found in stored["notebooks"].items() if not name.startswith("appendix_")}
    for name, found in numbered.items():
        (row,) = [row for row in rows if f"(notebooks/{name}.ipynb)" in row and row.startswith("|")]
        assert row == row_with(row, found), name
    assert {path.stem for path in (REPOSITORY / "notebooks").glob("[0-9]*.ipynb")} == set(numbered)
