"""Look for finished runs that disappeared from the files of runs: ``python -m benchmarks.lost_rows``.

A row of ``benchmarks/results/*.jsonl`` is never deleted. One that was superseded gets a phase that says so ("superseded
report") and the reason. This command reads every version of these files in the history of the repository and prints
each row that the present file lacks; it exits with 1 if there is one. Names of fields, arms and phases may change, so a
run is known by what it cost and came to: its seed, its seconds and tokens, and its 0s and 1s for each problem.

Its first look, at 57 versions of 12 files, found four rows, all of the study of SmolLM2. They are restored: the run of
seed 0 in float32, which one with products in bfloat16 had replaced, and three evaluations of cold starts from which no
run had started. The summaries (``*.json``) are written again by their commands, so they are not searched. By hand: of
those that hold runs of seeds, only ``default_run.json`` has had other results, of models that were `tiny` before.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.harness import RESULTS, Ledger

COMMAND = "python -m benchmarks.lost_rows"
ROOT = RESULTS.parents[1]


def git(*arguments: str) -> str:
    """Return what git prints in this repository; raises CalledProcessError if there is no history."""
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True).stdout


def outcome(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return what identifies a run whatever its fields are called.

    >>> outcome({"phase": "report", "seed": 0, "seconds": 1.5, "greedy": "0101"})
    (0, 1.5, None, ('0101',))
    """
    answers = tuple(value for value in row.values() if isinstance(value, str) and set(value) <= {"0", "1"})
    return row.get("seed"), row.get("seconds", row.get("cpu_seconds")), row.get("tokens"), answers


def lost_rows(name: str, rows: Iterable[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each row of any version of a file that is not among these, with the commit that first had it."""
    known = {outcome(row) for row in rows}
    for commit in git("log", "--reverse", "--format=%h", "--", name).split():
        for line in git("show", f"{commit}:{name}").splitlines():
            row = json.loads(line)
            if outcome(row) not in known:
                known.add(outcome(row))
                yield commit, row


def main() -> int:
    """Print what is lost; exit 1 if anything is."""
    argparse.ArgumentParser(prog=COMMAND, description=__doc__).parse_args()
    found = 0
    for file in sorted(RESULTS.glob("*.jsonl")):
        for commit, row in lost_rows(file.relative_to(ROOT).as_posix(), Ledger(file).rows):
            found += 1
            short = {name: value for name, value in row.items() if len(str(value)) < 40}
            print(f"{file.name}, first in {commit}: {short}")
    print(f"{found} rows are lost" if found else "no row is lost")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
