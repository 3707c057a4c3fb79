"""The benchmark of the notebooks: its table by hand, its watch on a real process, and the page as it was measured."""

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.notebooks import PeakOfChildren, fill_page, table, verdicts

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
    page = tmp_path / "page.md"
    page.write_text("start\n<!-- notebooks -->\nold\n<!-- /notebooks -->\nend\n")
    for seconds in (40, 12.3):
        fill_page({"00_a": {"seconds": seconds, "peak": 0.84e9}}, page)
    assert page.read_text() == (
        "start\n<!-- notebooks -->\n| notebook | time | memory |\n|---|---|---|\n"
        "| [00_a](../notebooks/00_a.ipynb) | 12 s | 0.8 GB |\n<!-- /notebooks -->\nend\n"
    )


def test_the_page_says_what_was_measured():
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    assert all(stored["verdicts"].values())
    assert table(stored["notebooks"]) in (REPOSITORY / "docs" / "measured.md").read_text(encoding="utf-8")
    assert {path.stem for path in (REPOSITORY / "notebooks").glob("*.ipynb")} == set(stored["notebooks"])
