"""The claims of notebook 04 about training, on five seeds: ``python -m benchmarks.advantages``.

Four ways to make advantages from the same rewards, and a fifth run that spends the same 128 completions per step on
groups of two, train the tiny model; each is judged on the same 300 held-out problems. Writes
``benchmarks/results/advantages.json`` after each run and prints a table.
"""

from __future__ import annotations

import sys
from statistics import mean

from benchmarks.harness import RESULTS, held_out_accuracy, run_study, study_options
from grpo_edu import LEVELS, GRPOConfig, accuracy_reward, load_policy, load_problems, train
from grpo_edu.machine.hardware import machine

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
    """Return the settings of a run: those that a way's name means, with this seed and 128 completions per step."""
    return GRPOConfig(max_steps=20, loss_type="grpo", seed=seed, **WAYS[name])


def run(name: str, seed: int) -> dict:
    """Train a fresh model; the curves of reward and tied groups, and the held-out accuracy afterwards."""
    model, tokenizer = load_policy("tiny")
    history = list(train(model, tokenizer, load_problems(LEVELS, "train"), accuracy_reward, settings(name, seed)))
    curves = {key: [metrics[key] for metrics in history] for key in ("reward", "frac_reward_zero_std")}
    return {"name": name, "seed": seed, "after": held_out_accuracy((model, tokenizer)), **curves}


def verdicts(before: dict, runs: list[dict]) -> dict[str, bool]:
    """Return the statements that the notebook makes, each judged on every seed that was run."""
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
    """Return the held-out accuracies as a Markdown table: a row for each way, a column for each seed."""
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
    """Run the study; exit 1 if a statement does not hold on every seed."""
    options = study_options(COMMAND, __doc__, RESULTS / "advantages.json")
    before = held_out_accuracy(load_policy("tiny"))
    record = {"command": COMMAND, "machine": machine(), "ways": WAYS, "before": before}
    return run_study(options, tuple(WAYS), record, run=run, verdicts=verdicts, table=table)


if __name__ == "__main__":
    sys.exit(main())
