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

from benchmarks.harness import RESULTS, exit_code, save

COMMAND = "python -m benchmarks.contamination"
PROBLEMS = 60  # that leak, and as many that do not


def run_seed(seed: int) -> dict:
    """Counts of solved problems, leaked and clean, before and after learning the leaked answers by heart."""
    from grpo_edu import LEVELS, evaluate, load_policy, load_problems
    from grpo_edu.config import SupervisedConfig
    from grpo_edu.continual.supervised import finetune

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
    """Return the statements that notebook 08 makes about a leak, each judged on every seed."""
    return {
        "at least 80% of the leaked problems are solved afterwards": all(
            run["leaked"]["after"] >= 0.80 * run["problems"] for run in runs
        ),
        "the clean problems lose at least 10 points": all(
            run["clean"]["before"] - run["clean"]["after"] >= 0.10 * run["problems"] for run in runs
        ),
    }


def main() -> int:
    """Run the study; exit 1 if a statement does not hold on every seed."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--output", type=Path, default=RESULTS / "contamination.json")
    options = parser.parse_args()
    runs = []
    for seed in options.seeds:
        runs.append(run_seed(seed))
        print(json.dumps(runs[-1]), flush=True)
    judged = verdicts(runs)
    save(options.output, COMMAND, {"verdicts": judged, "runs": runs})
    return exit_code(judged)


if __name__ == "__main__":
    sys.exit(main())
