"""The claim of notebook 07 on five seeds: ``python -m benchmarks.default_run``.

Each seed is one ``grpo-edu train --seed S --json`` in a process of its own, from loading the model to the last
evaluation. Writes ``benchmarks/results/default_run.json`` and, from the first seed, the picture of docs/measured.md;
prints a table.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import RESULTS, exit_code, save

HERE = Path(__file__).resolve().parent
COMMAND = "python -m benchmarks.default_run"


def run_seed(seed: int, folder: Path) -> dict:
    """One training run; returns what ``--json`` printed, with the greedy accuracies."""
    command = [sys.executable, "-m", "grpo_edu", "train", "--seed", str(seed), "--greedy"]
    command += ["--output", str(folder), "--json"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def kept(run: dict) -> dict:
    """What the study stores of a run."""
    accuracies = ("accuracy_before", "accuracy_after", "greedy_before", "greedy_after")
    return {name: run[name] for name in (*accuracies, "p_value", "seconds", "steps", "seed")}


def verdicts(runs: list[dict]) -> dict[str, bool]:
    """The statements that the course makes about the default run, each judged on every seed."""
    pairs = [(run["accuracy_before"], run["accuracy_after"]) for run in runs]
    gains = [(after["k"] - before["k"]) / after["n"] for before, after in pairs]  # exact where k and n are
    return {
        "sampled accuracy rises by at least 25 points": min(gains) >= 0.25,
        "p < 0.001 (exact McNemar test)": max(run["p_value"] for run in runs) < 0.001,
        "greedy accuracy reaches 95%": min(run["greedy_after"]["accuracy"] for run in runs) >= 0.95,
        "a run takes at most 60 seconds": max(run["seconds"] for run in runs) <= 60,
    }


def table(runs: list[dict]) -> str:
    """The runs as a Markdown table."""
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
    """Run the study; exit 1 where a statement does not hold on every seed."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--output", type=Path, default=RESULTS / "default_run.json")
    picture = HERE.parent / "docs" / "images" / "accuracy.png"
    parser.add_argument("--picture", type=Path, default=picture, help="where the first seed's figure goes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        runs = []
        for seed in options.seeds:
            folder = Path(scratch) / f"seed{seed}"
            runs.append(kept(run_seed(seed, folder)))
            print(table(runs[-1:]).splitlines()[-1], flush=True)
        options.picture.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(scratch) / f"seed{options.seeds[0]}" / "accuracy.png", options.picture)
    judged = verdicts(runs)
    save(options.output, COMMAND, {"verdicts": judged, "runs": runs})
    print("\n" + table(runs) + "\n")
    return exit_code(judged)


if __name__ == "__main__":
    sys.exit(main())
