"""The claims of notebook 06 on five seeds: ``python -m benchmarks.objectives``.

Six losses train the tiny model, with two updates a rollout so that their clips can act, and are judged on the same
300 held-out problems. A seventh run a seed has a KL term: does its loss rise while its reward rises? Writes
``benchmarks/results/objectives.json`` after each run and prints a table.
"""

from __future__ import annotations

import sys
from statistics import mean

from benchmarks.harness import RESULTS, held_out_accuracy, run_study, study_options
from grpo_edu import LEVELS, GRPOConfig, accuracy_reward, load_policy, load_problems, train
from grpo_edu.machine.hardware import machine

COMMAND = "python -m benchmarks.objectives"
LOSSES = {
    "GRPO": {"loss_type": "grpo"},
    "BNPO": {"loss_type": "bnpo"},
    "DAPO": {"loss_type": "dapo", "epsilon_high": 0.28},
    "Dr. GRPO": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "CISPO": {"loss_type": "cispo", "epsilon_high": 5.0},
    "GSPO": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
}
WITH_KL = "GRPO with a KL term"


def settings(name: str, seed: int) -> GRPOConfig:
    """Return the settings that a name and a seed mean; those with a KL term are the notebook's."""
    if name == WITH_KL:
        return GRPOConfig(max_steps=12, loss_type="grpo", beta=0.1, seed=seed)
    return GRPOConfig(max_steps=15, num_iterations=2, seed=seed, **LOSSES[name])


def run(name: str, seed: int) -> dict:
    """Train a fresh model; curves of reward, loss and the share that was clipped, and the accuracy afterwards."""
    model, tokenizer = load_policy("tiny")
    history = list(train(model, tokenizer, load_problems(LEVELS, "train"), accuracy_reward, settings(name, seed)))
    clipped = "cispo_clip_ratio" if settings(name, seed).loss_type == "cispo" else "clip_ratio/region_mean"
    keys = {"reward": "reward", "loss": "loss", "clipped": clipped}
    curves = {curve: [metrics[key] for metrics in history] for curve, key in keys.items()}
    return {"name": name, "seed": seed, "after": held_out_accuracy((model, tokenizer)), **curves}


def verdicts(before: dict, runs: list[dict]) -> dict[str, bool]:
    """Return the statements that the notebook makes, each judged on every seed that was run."""
    with_kl = [row for row in runs if row["name"] == WITH_KL]
    wide = [name for name in LOSSES if name != "GSPO"]
    solved: dict[int, dict[str, int]] = {}
    for row in runs:
        if row["name"] in LOSSES:
            solved.setdefault(row["seed"], {})[row["name"]] = row["after"]["k"]
    gains = [k - before["k"] for row in solved.values() for k in row.values()]
    ranges = [max(row[name] for name in wide) - min(row[name] for name in wide) for row in solved.values()]
    shares = {kind: [mean(row["clipped"]) for row in runs if row["name"] in kind] for kind in (tuple(wide), ("GSPO",))}
    return {
        "each loss gains at least 20 points on every seed": 5 * min(gains) >= before["n"],
        "all but GSPO end within 5 points of each other on every seed": 20 * max(ranges) <= before["n"],
        "GSPO ends last on every seed": all(min(row, key=row.get) == "GSPO" for row in solved.values()),
        "in the other five less than 1% of the tokens are clipped": max(shares[tuple(wide)]) < 0.01,
        "in GSPO more than 30% of the completions are clipped": min(shares["GSPO",]) > 0.3,
        "with a KL term the loss starts at 0 and rises on every seed": all(
            abs(row["loss"][0]) < 1e-4 and row["loss"][-1] > row["loss"][0] + 5e-4 for row in with_kl
        ),
        "with a KL term the reward rises on every seed": all(
            mean(row["reward"][-4:]) > mean(row["reward"][:4]) for row in with_kl
        ),
    }


def table(before: dict, runs: list[dict]) -> str:
    """Return the held-out accuracies as a Markdown table: a row for each loss, a column for each seed."""
    seeds = sorted({row["seed"] for row in runs})
    shares = {"before": [before["accuracy"]] * len(seeds)}
    for name in (*LOSSES, WITH_KL):
        after = {row["seed"]: row["after"]["accuracy"] for row in runs if row["name"] == name}
        shares[name] = [after[seed] for seed in seeds]
    lines = [["loss", *(f"seed {seed}" for seed in seeds), "mean"], ["---"] * (len(seeds) + 2)]
    lines += [[name, *(f"{share:.1%}" for share in (*row, mean(row)))] for name, row in shares.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> int:
    """Run the study; exit 1 if a statement does not hold on every seed."""
    options = study_options(COMMAND, __doc__, RESULTS / "objectives.json")
    before = held_out_accuracy(load_policy("tiny"))
    record = {"command": COMMAND, "machine": machine(), "losses": list(LOSSES), "before": before}
    return run_study(options, (*LOSSES, WITH_KL), record, run=run, verdicts=verdicts, table=table)


if __name__ == "__main__":
    sys.exit(main())
