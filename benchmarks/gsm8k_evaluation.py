"""GSM8K's test problems, all 1,319 of them, by the command line: ``python -m benchmarks.gsm8k_evaluation FOLDER``.

FOLDER holds GSM8K's test.jsonl. The tiny model has never seen such texts; what is measured is that the evaluation comes
to its end, with intervals, by steps of the reference, its throughput and its memory. Beside it eight problems on the
shape of Qwen2-0.5B-Instruct with random weights: its speed and memory are true, its accuracy means nothing. Five
minutes on two cores; writes ``benchmarks/results/gsm8k_evaluation.json``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, save

TYPED = ("evaluate", "--data", "gsm8k", "--data-path")
LARGE_OPTIONS = ("--n", "8", "--max-completion-length", "64", "--dtype", "bfloat16")


def evaluate(folder: str, *more: str) -> dict[str, Any]:
    """Evaluate in a fresh process; return what ``--json`` says, without the paths of this computer."""
    command = [sys.executable, "-m", "grpo_edu", *TYPED, folder, *more, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    report = json.loads(done.stdout.splitlines()[-1]) | {"data_path": "FOLDER"}
    return report if report["model"] == "tiny" else {**report, "model": "494M, random weights"}


def main() -> int:
    """Evaluate both, and store what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", help="where test.jsonl is")
    parser.add_argument("--output", type=Path, default=RESULTS / "gsm8k_evaluation.json")
    arguments = parser.parse_args()
    record = {"report": evaluate(arguments.folder)}
    print(json.dumps(record, indent=1), flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        from benchmarks.memory import write_large_model

        write_large_model(Path(scratch) / "large")
        record["large"] = evaluate(arguments.folder, "--model", str(Path(scratch) / "large"), *LARGE_OPTIONS)
    print(json.dumps(record["large"], indent=1))
    save(arguments.output, f"grpo-edu {' '.join(TYPED)} FOLDER", record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
