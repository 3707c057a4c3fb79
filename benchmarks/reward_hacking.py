"""The reward-hacking claim of notebook 02 on five seeds: ``python -m benchmarks.reward_hacking``.

One reward, two sets of weights: accuracy, format and brevity at 1 each, and the last two at a tenth. Each seed trains
the tiny model with both, and judges reward and accuracy on 300 held-out problems before and after. Writes
``benchmarks/results/reward_hacking.json`` and prints a table.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from pathlib import Path

from benchmarks.harness import RESULTS, exit_code, save
from grpo_edu import (
    LEVELS,
    Evaluation,
    GRPOConfig,
    accuracy_reward,
    combine_rewards,
    compare,
    compute_rewards,
    evaluate,
    format_reward,
    length_reward,
    load_policy,
    load_problems,
    paired_bootstrap,
    train,
)

COMMAND = "python -m benchmarks.reward_hacking"
REWARDS = (accuracy_reward, format_reward, functools.partial(length_reward, target=8))
WEIGHTS = {"equal weights": (1.0, 1.0, 1.0), "small weights": (1.0, 0.1, 0.1)}
CURVES = ("reward", "rewards/accuracy_reward/mean", "completions/mean_length")


def settings(condition: str, seed: int) -> GRPOConfig:
    """Return the settings that a condition and a seed mean, the same as in the notebook."""
    weights = WEIGHTS[condition]
    return GRPOConfig(max_steps=12, learning_rate=2e-4, loss_type="grpo", reward_weights=weights, seed=seed)


def held_out_rewards(evaluation: Evaluation, problems: list, tokenizer, weights: tuple[float, ...]) -> list[float]:
    """Return the reward of each held-out completion; a length counts the closing token, as in training."""
    ids = tokenizer(evaluation.completions, add_special_tokens=False)["input_ids"]
    rewards = compute_rewards(
        REWARDS,
        prompts=evaluation.prompts,
        completions=evaluation.completions,
        completion_ids=[[*row, tokenizer.eos_token_id] for row in ids],
        answer=[problem.answer for problem in problems],
    )
    return combine_rewards(rewards, weights).tolist()


def run_seed(seed: int) -> list[dict]:
    """Both conditions on one seed, judged on the same held-out problems with the same sampling seed."""
    heldout, problems = load_problems(LEVELS, "heldout", n=100), load_problems(LEVELS, "train")
    model, tokenizer = load_policy("tiny")
    before = evaluate(model, tokenizer, heldout, seed=seed + 1)
    runs = []
    for condition, weights in WEIGHTS.items():
        model, tokenizer = load_policy("tiny")
        started = time.perf_counter()
        history = list(train(model, tokenizer, problems, REWARDS, settings(condition, seed)))
        seconds = time.perf_counter() - started
        after = evaluate(model, tokenizer, heldout, seed=seed + 1)
        paid = [held_out_rewards(run, heldout, tokenizer, weights) for run in (before, after)]
        runs.append(summary(condition, seed, before, after, paid) | {"seconds": seconds, "curves": curves(history)})
    return runs


def summary(
    condition: str, seed: int, before: Evaluation, after: Evaluation, paid: tuple[list[float], list[float]]
) -> dict:
    """Return what one run did to reward and accuracy on the held-out problems."""
    change, reward = compare(before, after), paired_bootstrap(*paid)
    return {
        "condition": condition,
        "seed": seed,
        "accuracy_before": before.to_dict(),
        "accuracy_after": after.to_dict(),
        "accuracy_change": {"difference": change.difference, "low": change.low, "high": change.high},
        "p_value": change.p_value,
        "reward_before": sum(paid[0]) / before.n,
        "reward_after": sum(paid[1]) / after.n,
        "reward_change": {"difference": reward.difference, "low": reward.low, "high": reward.high},
    }


def curves(history: list[dict]) -> dict[str, list[float]]:
    """Return what the run showed while it trained, a number per step."""
    return {key: [round(metrics[key], 4) for metrics in history] for key in CURVES}


def verdicts(runs: list[dict]) -> dict[str, bool]:
    """Return the statements of the notebook, each judged on every seed."""
    equal = [run for run in runs if run["condition"] == "equal weights"]
    small = [run for run in runs if run["condition"] == "small weights"]
    return {
        "equal weights: reward rises (interval above 0)": all(run["reward_change"]["low"] > 0 for run in equal),
        "equal weights: accuracy falls by at least 10 points, p < 0.001": all(
            run["accuracy_change"]["difference"] <= -0.10 and run["p_value"] < 0.001 for run in equal
        ),
        "small weights: reward rises (interval above 0)": all(run["reward_change"]["low"] > 0 for run in small),
        "small weights: accuracy rises by at least 10 points, p < 0.001": all(
            run["accuracy_change"]["difference"] >= 0.10 and run["p_value"] < 0.001 for run in small
        ),
    }


def table(runs: list[dict]) -> str:
    """Return the runs as a Markdown table."""
    lines = ["| weights | seed | reward before → after | accuracy before → after | change | p |"]
    lines.append("|---|---|---|---|---|---|")
    for run in runs:
        before, after, change = (run[f"accuracy_{name}"] for name in ("before", "after", "change"))
        cells = [
            run["condition"].removesuffix(" weights"),
            str(run["seed"]),
            f"{run['reward_before']:.2f} → {run['reward_after']:.2f}",
            f"{before['k']}/{before['n']} → {after['k']}/{after['n']}",
            f"{100 * change['difference']:+.0f} ({100 * change['low']:+.0f} … {100 * change['high']:+.0f})",
            f"{run['p_value']:.0e}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Run the study; exit 1 if a statement does not hold on every seed."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--output", type=Path, default=RESULTS / "reward_hacking.json")
    options = parser.parse_args()
    runs = []
    for seed in options.seeds:
        runs += run_seed(seed)
        print("\n".join(table(runs[-2:]).splitlines()[2:]), flush=True)
    runs.sort(key=lambda run: run["condition"])
    judged = verdicts(runs)
    config = settings("equal weights", options.seeds[0]).to_dict()
    varied = {name: config.pop(name) for name in ("reward_weights", "seed")}
    record = {"config": config, "varied": sorted(varied), "weights": WEIGHTS, "verdicts": judged, "runs": runs}
    save(options.output, COMMAND, record)
    print("\n" + table(runs) + "\n")
    return exit_code(judged)


if __name__ == "__main__":
    sys.exit(main())
