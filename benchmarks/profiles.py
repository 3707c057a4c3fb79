"""Every profile on the tiny model, and one step of the faithful one at 494M: ``python -m benchmarks.profiles``.

Throughput is given by each of the definitions that published numbers mix up: prompts, completions and tokens, within
the steps and with start-up and evaluations. The 494M model has the shape of Qwen2-0.5B-Instruct and random weights: its
speed is true, its accuracy means nothing. Each run is a command of its own in a fresh process. Ten minutes on one core;
``--only NAME …`` does some of them and keeps the others. Writes ``benchmarks/results/profiles.json``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, markdown, save

COMMAND = "python -m benchmarks.profiles"
ON_TINY = (
    "quick",
    "standard",
    "thorough",
    "ultra-fast",
    "extreme-fast",
    "hardware-accelerated",
    "progressive",
    "rl-grpo-faithful",
)
LARGE = "rl-grpo-faithful, one step at 494M"
_LARGE_OPTIONS = ("--steps", "1", "--num-problems", "3", "--n", "3")


def run_profile(name: str, folder: Path) -> dict[str, Any]:
    """Run a profile by its command line; return the row of the record."""
    profile, model, more = (
        (LARGE.partition(",")[0], str(folder / "large"), _LARGE_OPTIONS) if name == LARGE else (name, "tiny", ())
    )
    typed = ["train", "--profile", profile, "--model", model, *more]
    command = [sys.executable, "-m", "grpo_edu", *typed, "--output", str(folder / profile), "--overwrite", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    log = (folder / profile / "config.json").read_text(encoding="utf-8")
    return {
        "profile": name,
        "command": " ".join(["grpo-edu", *typed]).replace(model, "FOLDER" if name == LARGE else model),
        "dtype": json.loads(log)["dtype"],
        "steps": result["steps"],
        "seconds": result["seconds"],
        "accuracy_before": result["accuracy_before"],
        "accuracy_after": result["accuracy_after"],
        "throughput": result["throughput"],
    }


def row_text(row: dict[str, Any]) -> dict[str, str]:
    """Return a row of the table."""
    accuracies = (
        "-" if row["profile"] == LARGE else f"{part['accuracy']:.0%} [{part['low']:.0%}, {part['high']:.0%}]"
        for part in (row["accuracy_before"], row["accuracy_after"])
    )
    cells = {"profile": row["profile"], "steps": str(row["steps"]), "seconds": f"{row['seconds']:.0f}"}
    cells |= dict(zip(("before", "after"), accuracies, strict=True))
    return cells | {name: f"{value:,.3g}" for name, value in row["throughput"].items()}


def main() -> int:
    """Run, print the table, store it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=(*ON_TINY, LARGE), metavar="NAME", default=[*ON_TINY, LARGE])
    parser.add_argument("--output", type=Path, default=RESULTS / "profiles.json")
    arguments = parser.parse_args()
    rows = {}
    if arguments.output.is_file():
        rows = {row["profile"]: row for row in json.loads(arguments.output.read_text(encoding="utf-8"))["rows"]}
    with tempfile.TemporaryDirectory() as scratch:
        if LARGE in arguments.only:
            from benchmarks.memory import write_large_model

            write_large_model(Path(scratch) / "large")
        for name in arguments.only:
            rows[name] = run_profile(name, Path(scratch))
            print(row_text(rows[name]), flush=True)
            save(arguments.output, COMMAND, {"rows": [rows[key] for key in (*ON_TINY, LARGE) if key in rows]})
    print("\n" + markdown([row_text(row) for row in rows.values()]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
