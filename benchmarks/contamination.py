"""What a leak of held-out answers does, on five seeds: ``python -m benchmarks.contamination``.

Each seed draws sixty held-out problems that leak into a fine-tuning set with their bare answers, and sixty that do
not; both are evaluated before and after, sampled at temperature 1. Writes ``benchmarks/results/contamination.json``.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.harness import machine

HERE = Path(__file__).resolve().parent
COMMAND = "python -m benchmarks.contamination"
PROBLEMS = 60  # that leak, and as many that do not


def run_seed(seed: int) -> dict:
    """Counts of solved problems, leaked and clean, before and after learning the leaked answers by heart."""
    from grpo_edu import LEVELS, evaluate, load_policy, load_problems
    from grpo_edu.supervised import SupervisedConfig, finetune

    chosen = random.Random(seed).sample(load_problems(LEVELS, "heldout", n=100), 2 * PROBLEMS)
    parts = {"leaked": chosen[:PROBLEMS], "clean": chosen[PROBLEMS:]}
    problems = [replace(problem, level=name) for name, part in parts.items() for problem in part]
    by_heart = [replace(problem, solution=f"#### {problem.answer}") for problem in parts["leaked"]]
    model, tokenizer = load_policy("tiny")
    before = evaluate(model, tokenizer, problems, seed=seed).per_level()
    config = SupervisedConfig(max_steps=60, prompts_per_step=20, learning_rate=1e-3, seed=seed)
    history = list(finetune(model, tokenizer, by_heart, config))
    after = evaluate(model, tokenizer, problems, seed=seed).per_level()
    counts = {name: {"before": before[name].k, "after": after[name].k} for name in parts}
    return {"seed": seed, "problems": PROBLEMS, "loss": round(history[-1]["loss"], 4), **counts}


def verdicts(runs: list[dict]) -> dict[str, bool]:
    """The statements that notebook 06 makes about a leak, each judged on every seed."""
    return {
        "at least 80% of the leaked problems are solved afterwards": all(
            run["leaked"]["after"] >= 0.80 * run["problems"] for run in runs
        ),
        "the clean problems lose at least 10 points": all(
            run["clean"]["before"] - run["clean"]["after"] >= 0.10 * run["problems"] for run in runs
        ),
    }


def main() -> int:
    """Run the study; exit 1 where a statement does not hold on every seed."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--output", type=Path, default=HERE / "results" / "contamination.json")
    options = parser.parse_args()
    runs = []
    for seed in options.seeds:
        runs.append(run_seed(seed))
        print(json.dumps(runs[-1]), flush=True)
    judged = verdicts(runs)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    record = {"command": COMMAND, "machine": machine(), "verdicts": judged, "runs": runs}
    options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for statement, holds in judged.items():
        print(f"{'holds' if holds else 'FAILS'} on {len(runs)} seeds: {statement}")
    return 0 if all(judged.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
