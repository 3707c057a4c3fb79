"""The claims of notebook 03 about training, on five seeds: ``python -m benchmarks.advantages``.

Four ways to make advantages from the same rewards, and a fifth run that spends the same 128 completions a step on
groups of two, train the tiny model; each is judged on the same 300 held-out problems. Writes
``benchmarks/results/advantages.json`` after each run and prints a table.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import mean

from benchmarks.default_run import machine
from benchmarks.objectives import EVALUATION_SEED, accuracy
from grpo_edu import LEVELS, GRPOConfig, accuracy_reward, evaluate, load_policy, load_problems, train

HERE = Path(__file__).resolve().parent
COMMAND = "python -m benchmarks.advantages"
PAIRS = "group, G = 2"
WAYS = {
    "group": {"scale_rewards": "group"},
    "batch": {"scale_rewards": "batch"},
    "none": {"scale_rewards": "none"},
    "RLOO": {"advantage_estimator": "rloo"},
    PAIRS: {"scale_rewards": "group", "num_generations": 2, "prompts_per_step": 64},
}
FIRST = 5  # steps, in which the policy is still about the one that all start from


def settings(name: str, seed: int) -> GRPOConfig:
    """The run that a way and a seed mean: 128 completions a step in each."""
    return GRPOConfig(max_steps=20, loss_type="grpo", seed=seed, **WAYS[name])


def run(name: str, seed: int) -> dict:
    """Train a fresh model; the curves of reward and tied groups, and the held-out accuracy afterwards."""
    model, tokenizer = load_policy("tiny")
    history = list(train(model, tokenizer, load_problems(LEVELS, "train"), accuracy_reward, settings(name, seed)))
    after = evaluate(model, tokenizer, load_problems(LEVELS, "heldout", n=100), seed=EVALUATION_SEED)
    curves = {key: [metrics[key] for metrics in history] for key in ("reward", "frac_reward_zero_std")}
    return {"name": name, "seed": seed, "after": accuracy(after), **curves}


def verdicts(before: dict, runs: list[dict]) -> dict[str, bool]:
    """The statements that the notebook makes, each judged on every seed that was run."""
    solved = {(row["name"], row["seed"]): row["after"]["k"] for row in runs}
    tied = {(row["name"], row["seed"]): mean(row["frac_reward_zero_std"][:FIRST]) for row in runs}
    seeds = sorted({seed for _, seed in solved})
    return {
        "each way gains at least 10 points on every seed": all(
            10 * (k - before["k"]) >= before["n"] for k in solved.values()
        ),
        "the four ways with G = 8 end within 5 points of each other on every seed": all(
            20 * (max(ends) - min(ends)) <= before["n"]
            for ends in ([solved[name, seed] for name in WAYS if name != PAIRS] for seed in seeds)
        ),
        "with G = 2 at least three times as many groups tie at first as with G = 8": all(
            tied[PAIRS, seed] >= 3 * tied["group", seed] for seed in seeds
        ),
    }


def table(before: dict, runs: list[dict]) -> str:
    """The held-out accuracies as a Markdown table: a row for each way, a column for each seed."""
    seeds = sorted({row["seed"] for row in runs})
    lines = [["advantages", *(f"seed {seed}" for seed in seeds), "mean", "tied at first"]]
    lines += [["---"] * len(lines[0]), ["before", *[f"{before['accuracy']:.1%}"] * (len(seeds) + 1), ""]]
    for name in WAYS:
        rows = {row["seed"]: row for row in runs if row["name"] == name}
        shares = [rows[seed]["after"]["accuracy"] for seed in seeds]
        tied = mean(mean(rows[seed]["frac_reward_zero_std"][:FIRST]) for seed in seeds)
        lines.append([name, *(f"{share:.1%}" for share in (*shares, mean(shares))), f"{tied:.0%}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> int:
    """Run the study; exit 1 where a statement does not hold on every seed."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--output", type=Path, default=HERE / "results" / "advantages.json")
    parser.add_argument("--keep", action="store_true", help="keep the runs that the output file already holds")
    options = parser.parse_args()
    runs = json.loads(options.output.read_text(encoding="utf-8"))["runs"] if options.keep else []
    model, tokenizer = load_policy("tiny")
    before = accuracy(evaluate(model, tokenizer, load_problems(LEVELS, "heldout", n=100), seed=EVALUATION_SEED))
    record = {"command": COMMAND, "machine": machine(), "ways": WAYS, "before": before, "runs": runs}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    for seed in options.seeds:
        for name in WAYS:
            if any((row["name"], row["seed"]) == (name, seed) for row in runs):
                continue
            runs.append(run(name, seed))
            print(f"seed {seed}, {name}: {runs[-1]['after']['accuracy']:.1%}", flush=True)
            options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    record["verdicts"] = verdicts(before, runs)
    options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print("\n" + table(before, runs) + "\n")
    for statement, holds in record["verdicts"].items():
        print(f"{'holds' if holds else 'FAILS'} on {len(options.seeds)} seeds: {statement}")
    return 0 if all(record["verdicts"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
