"""How careless readers read right solutions, for notebook 02: ``python -m benchmarks.extraction --gsm8k FOLDER``.

The solutions are GSM8K's own references (Cobbe et al. 2021, arXiv 2110.14168; MIT licence), so every one is right, and
whatever a reader gets wrong is the reader's mistake. The readers that go by position see a solution without its last
line (``#### 18``), as a model writes that was not asked for this format. `extract_answer` gets the last line as well:
its count says what agreeing on a format is worth, not that it reads better. A number counts as read when its value is
right, so ``16.00`` is 16. Writes ``benchmarks/results/extraction.json``.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from benchmarks.harness import GSM8K, RESULTS
from grpo_edu.problems.files import load_gsm8k
from grpo_edu.prompts import extract_answer

COMMAND = "python -m benchmarks.extraction"


def last_digits(text: str) -> str | None:
    """Return the last run of digits."""
    found = re.findall(r"\d+", text)
    return found[-1] if found else None


def last_number(text: str) -> str | None:
    """Return the last number with its commas, decimals and sign; the commas are then dropped."""
    found = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return found[-1].replace(",", "") if found else None


READERS = {reader.__name__: reader for reader in (last_digits, last_number)}


def count_misread(solutions: list[str]) -> dict[str, int]:
    """Return how many solutions each reader misreads; `extract_answer` gets them with the line ``#### answer``."""
    misread = dict.fromkeys([*READERS, "extract_answer"], 0)
    for solution in solutions:
        body, _, gold = solution.rpartition("####")
        found = {name: reader(body) for name, reader in READERS.items()}
        found["extract_answer"] = extract_answer(solution)
        for name, answer in found.items():
            misread[name] += not same_number(answer, gold.strip().replace(",", ""))
    return misread


def same_number(answer: str | None, truth: str) -> bool:
    """Return True if an answer that was read has the value of the true one; None has no value."""
    return answer is not None and float(answer) == float(truth)


def main() -> int:
    """Count, store and print."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--gsm8k", type=Path, default=GSM8K, help="the folder with test.jsonl and train.jsonl")
    parser.add_argument("--output", type=Path, default=RESULTS / "extraction.json")
    options = parser.parse_args()
    problems = [problem for split in ("test", "train") for problem in load_gsm8k(split, options.gsm8k)]
    misread = count_misread([problem.solution for problem in problems])
    record = {"command": COMMAND, "data": "GSM8K, test and train", "solutions": len(problems), "misread": misread}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for name, count in misread.items():
        print(f"{name:16} misreads {count:5,} of {len(problems):,} right solutions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
