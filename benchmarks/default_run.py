"""The claim of notebook 07 on five seeds: ``python -m benchmarks.default_run``.

Each seed is one ``grpo-edu train --seed S --json`` in a process of its own, from loading the model to the last
evaluation. Writes ``benchmarks/results/default_run.json`` with the result for each problem, the gain with its interval
over seeds and problems, and, from the first seed, the picture of docs/measured.md; prints a table.

The times are those of a quiet computer. On a busy one, ``--keep-times`` repeats the runs and keeps the stored record,
adding what it lacks, but only where every count is the stored one.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import RESULTS, exit_code, over_seeds_and_problems, save

HERE = Path(__file__).resolve().parent
COMMAND = "python -m benchmarks.default_run"
ACCURACIES = ("accuracy_before", "accuracy_after", "greedy_before", "greedy_after")
SOLVED = ("solved_before", "solved_after")  # sampled: a 1 or 0 for each problem


def run_seed(seed: int, folder: Path) -> dict:
    """Train with a seed in a fresh process; return what ``--json`` printed, with the greedy accuracies."""
    command = [sys.executable, "-m", "grpo_edu", "train", "--seed", str(seed), "--greedy"]
    command += ["--output", str(folder), "--json"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def kept(run: dict) -> dict:
    """Return what the study stores of a run."""
    return {name: run[name] for name in (*ACCURACIES, *SOLVED, "p_value", "seconds", "steps", "seed")}


def same_results(run: dict, stored: dict) -> bool:
    """Return True if two runs have the same accuracies, in total and per level, sampled and greedy, and p-value."""
    return all(run[name] == stored[name] for name in (*ACCURACIES, "p_value", "steps", "seed"))


def gain(runs: list[dict]) -> dict[str, float]:
    """Return the gain in sampled accuracy, with its interval over seeds and problems."""
    return over_seeds_and_problems(*([run[name] for run in runs] for name in SOLVED))


def verdicts(runs: list[dict]) -> dict[str, bool]:
    """Return the statements that the course makes about the default run, each judged on every seed."""
    pairs = [(run["accuracy_before"], run["accuracy_after"]) for run in runs]
    gains = [(after["k"] - before["k"]) / after["n"] for before, after in pairs]  # exact where k and n are
    return {
        "sampled accuracy rises by at least 25 points": min(gains) >= 0.25,
        "p < 0.001 (exact McNemar test)": max(run["p_value"] for run in runs) < 0.001,
        "greedy accuracy reaches 95%": min(run["greedy_after"]["accuracy"] for run in runs) >= 0.95,
        "a run takes at most 60 seconds": max(run["seconds"] for run in runs) <= 60,
    }


def table(runs: list[dict]) -> str:
    """Return the runs as a Markdown table."""
    lines = ["| seed | sampled before | sampled after | p | greedy before | greedy after | seconds |"]
    lines.append("|---|---|---|---|---|---|---|")
    for run in runs:
        cells = [_with_interval(run[name]) for name in ("accuracy_before", "accuracy_after")]
        greedy = [_with_interval(run[name]) for name in ("greedy_before", "greedy_after")]
        cells = [str(run["seed"]), *cells, f"{run['p_value']:.0e}", *greedy, f"{run['seconds']:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _with_interval(row: dict) -> str:
    return f"{row['k']}/{row['n']} ({row['low']:.0%} … {row['high']:.0%})"


def main() -> int:
    """Run the study; exit 1 if a statement does not hold on every seed."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--output", type=Path, default=RESULTS / "default_run.json")
    parser.add_argument("--keep-times", action="store_true", help="keep the stored seconds and machine")
    picture = HERE.parent / "docs" / "images" / "accuracy.png"
    parser.add_argument("--picture", type=Path, default=picture, help="where the first seed's figure goes")
    options = parser.parse_args()
    stored = json.loads(options.output.read_text(encoding="utf-8")) if options.keep_times else None
    with tempfile.TemporaryDirectory() as scratch:
        runs = []
        for seed in options.seeds:
            folder = Path(scratch) / f"seed{seed}"
            runs.append(kept(run_seed(seed, folder)))
            print(table(runs[-1:]).splitlines()[-1], flush=True)
            if stored:
                earlier = next(run for run in stored["runs"] if run["seed"] == seed)
                if not same_results(runs[-1], earlier):
                    parser.error(f"seed {seed} solved other problems than the stored run; leave out --keep-times")
                runs[-1]["seconds"] = earlier["seconds"]
        options.picture.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(scratch) / f"seed{options.seeds[0]}" / "accuracy.png", options.picture)
    judged = verdicts(runs)
    record: dict = {"verdicts": judged, "runs": runs}
    if len(runs) > 1:  # one seed has no interval over seeds
        record["gain over seeds and problems"] = gain(runs)
    save(options.output, COMMAND, record | ({"machine": stored["machine"]} if stored else {}))
    print("\n" + table(runs) + "\n")
    return exit_code(judged)


if __name__ == "__main__":
    sys.exit(main())
