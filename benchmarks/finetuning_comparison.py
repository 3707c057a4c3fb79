"""GRPO and supervised fine-tuning, of all weights and of adapters: ``python -m benchmarks.finetuning_comparison``.

Three parts, for the tiny model:

- learning rates: each method tries several on a seed of its own (``TUNING_SEED``), judged on training problems that
  this run does not see; the best is used from then on.
- accuracy: five seeds a method, each judged on the same 300 held-out problems.
- speed: start-up, samples a second and peak memory, each in processes of their own, one method after the other.

Writes ``benchmarks/results/finetuning_comparison.json`` after each run; ``--keep`` continues where it stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from benchmarks.harness import EVALUATION_SEED, RESULTS, between, exit_code, markdown, save, spread
from grpo_edu import LEVELS, GRPOConfig, accuracy_reward, evaluate, load_policy, load_problems, mcnemar, train
from grpo_edu.config import SupervisedConfig
from grpo_edu.continual.supervised import finetune
from grpo_edu.fast.lora import add_lora
from grpo_edu.machine.step_process import measure_steps
from grpo_edu.problems.templates import Problem

COMMAND = "python -m benchmarks.finetuning_comparison"
RANK = 4  # the tiny model is 128 wide: rank 16 would be an eighth of it
STEPS = 40  # of 16 problems each, for every method
TUNING_SEED, TUNING_PROBLEMS = 100, 50  # the last so many training problems of each level
# name → kind, rank of the adapters (0: all weights), learning rates to try
METHODS: dict[str, tuple[type, int, tuple[float, ...]]] = {
    "GRPO, all weights": (GRPOConfig, 0, (3e-5, 1e-4, 3e-4, 1e-3)),
    "GRPO, LoRA": (GRPOConfig, RANK, (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)),
    "supervised, all weights": (SupervisedConfig, 0, (1e-4, 3e-4, 1e-3, 3e-3)),
    "supervised, LoRA": (SupervisedConfig, RANK, (3e-4, 1e-3, 3e-3, 1e-2)),
}


def trained(name: str, learning_rate: float, seed: int, problems: list[Problem]):
    """Return a fresh policy, trained by the named method, and its tokenizer."""
    kind, rank, _ = METHODS[name]
    config = kind(max_steps=STEPS, learning_rate=learning_rate, seed=seed)
    model, tokenizer = load_policy("tiny")
    torch.manual_seed(seed)  # the adapters begin with random numbers
    model = add_lora(model, rank=rank) if rank else model
    supervised = kind is SupervisedConfig
    steps = (
        finetune(model, tokenizer, problems, config)
        if supervised
        else train(model, tokenizer, problems, accuracy_reward, config)
    )
    for _ in steps:
        pass
    return model, tokenizer


def tune(name: str, learning_rate: float) -> dict:
    """Train with one learning rate on the seed for tuning; its accuracy on training problems that were held back."""
    levels = [load_problems(level, "train") for level in LEVELS]
    problems = [problem for level in levels for problem in level[:-TUNING_PROBLEMS]]
    held_back = [problem for level in levels for problem in level[-TUNING_PROBLEMS:]]
    policy = trained(name, learning_rate, TUNING_SEED, problems)
    found = evaluate(*policy, held_back, seed=EVALUATION_SEED)
    return {"name": name, "learning_rate": learning_rate, "k": found.k, "n": found.n}


def run(name: str, learning_rate: float, seed: int) -> dict:
    """Train with one seed; which of the held-out problems are solved, as a text of 1 and 0."""
    policy = trained(name, learning_rate, seed, load_problems(LEVELS, "train"))
    return {"name": name, "seed": seed, "learning_rate": learning_rate, **solved(policy)}


def solved(policy: tuple) -> dict:
    """Counts of a policy on the held-out problems, its 95% interval, and which ones it solves."""
    found = evaluate(*policy, load_problems(LEVELS, "heldout", n=100), seed=EVALUATION_SEED)
    return {
        "k": found.k,
        "n": found.n,
        "low": found.low,
        "high": found.high,
        "solved": "".join(str(int(right)) for right in found.correct),
    }


def speed(name: str, learning_rate: float) -> dict:
    """Seven steps in a process of their own: start-up, samples a second, bytes, and how many numbers learn."""
    kind, rank, _ = METHODS[name]
    found = measure_steps(kind(max_steps=7, learning_rate=learning_rate), lora_rank=rank)
    keys = ("startup", "samples_per_second", "peak", "libraries", "trained", "parameters")
    return {"name": name, **{key: getattr(found, key) for key in keys}}


def best_rates(tuning: list[dict]) -> dict[str, float]:
    """Return the learning rate of each method with which most problems were solved; of equals the smaller."""
    best = {}
    for name in METHODS:
        tried = [row for row in tuning if row["name"] == name]
        best[name] = max(tried, key=lambda row: (row["k"], -row["learning_rate"]))["learning_rate"]
    return best


def paired(runs: list[dict], one: str, other: str) -> list[dict]:
    """For each seed, the difference other − one in points and McNemar's p on the same problems."""
    by = {(row["name"], row["seed"]): row["solved"] for row in runs}
    found = []
    for seed in sorted({row["seed"] for row in runs}):
        pair = [[right == "1" for right in by[name, seed]] for name in (one, other)]
        test = mcnemar(*pair)
        points = 100 * (test.only_after - test.only_before) / len(pair[0])
        found.append({"seed": seed, "points": round(points, 1), "p": test.p_value})
    return found


def verdicts(before: dict, tuning: list[dict], runs: list[dict]) -> dict[str, bool]:
    """Return the statements that notebook 11 makes, each judged on every seed that was run."""
    start = [right == "1" for right in before["solved"]]
    gains = [(row["k"] - before["k"], mcnemar(start, [right == "1" for right in row["solved"]])) for row in runs]
    best, kinds = best_rates(tuning), ("GRPO", "supervised")
    apart = [row["points"] for kind in kinds for row in paired(runs, f"{kind}, all weights", f"{kind}, LoRA")]
    return {
        "every method gains at least 20 points on every seed, p < 0.001": all(
            5 * gain >= before["n"] and test.p_value < 0.001 for gain, test in gains
        ),
        "LoRA ends within 5 points of all weights on every seed, for both kinds": max(map(abs, apart)) <= 5,
        "LoRA's best learning rate is at least 3 times that of all weights, for both kinds": all(
            best[f"{kind}, LoRA"] > 2.9 * best[f"{kind}, all weights"] for kind in kinds
        ),
    }


def table(before: dict, runs: list[dict], speeds: list[dict]) -> str:
    """Return the comparison as a Markdown table, a row for each method; ranges over seeds or rounds in brackets."""
    rows = [
        {
            "method": "before",
            "start-up, s": "",
            "samples/s": "",
            "peak, MB": "",
            "learns": "",
            "accuracy": f"{before['k'] / before['n']:.1%}",
        }
    ]
    for name in METHODS:
        measured = [row for row in speeds if row["name"] == name]
        shares = spread([100 * row["k"] / row["n"] for row in runs if row["name"] == name])
        rows.append(
            {
                "method": name,
                "start-up, s": between(spread([row["startup"] for row in measured]), 1),
                "samples/s": between(spread([row["samples_per_second"] for row in measured]), 0),
                "peak, MB": between(spread([row["peak"] / 1e6 for row in measured]), 0),
                "learns": f"{measured[0]['trained'] / measured[0]['parameters']:.1%}",
                "accuracy": between(shares, 1) + " %",
            }
        )
    return markdown(rows)


def main() -> int:
    """Run the study; exit 1 if a statement does not hold on every seed."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--rounds", type=int, default=3, help="speed measurements of each method")
    parser.add_argument("--output", type=Path, default=RESULTS / "finetuning_comparison.json")
    parser.add_argument("--keep", action="store_true", help="continue from what the output file already holds")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    record = {"steps": STEPS, "rank": RANK, "before": None, "tuning": [], "runs": [], "speed": []}
    if options.keep and options.output.is_file():
        stored = json.loads(options.output.read_text(encoding="utf-8"))
        record = {key: stored[key] for key in record}
    record["before"] = record["before"] or solved(load_policy("tiny"))
    for name, (_, _, rates) in METHODS.items():
        for rate in rates:
            if not any((row["name"], row["learning_rate"]) == (name, rate) for row in record["tuning"]):
                record["tuning"].append(tune(name, rate))
                print(record["tuning"][-1], flush=True)
                save(options.output, COMMAND, record)
    best = best_rates(record["tuning"])
    for seed in options.seeds:
        for name in METHODS:
            if not any((row["name"], row["seed"]) == (name, seed) for row in record["runs"]):
                record["runs"].append(run(name, best[name], seed))
                print(f"seed {seed}, {name}: {record['runs'][-1]['k']}/{record['runs'][-1]['n']}", flush=True)
                save(options.output, COMMAND, record)
    while len(record["speed"]) < options.rounds * len(METHODS):
        name = list(METHODS)[len(record["speed"]) % len(METHODS)]
        record["speed"].append(speed(name, best[name]))
        save(options.output, COMMAND, record)
    record["verdicts"] = verdicts(record["before"], record["tuning"], record["runs"])
    save(options.output, COMMAND, record)
    print("\n" + table(record["before"], record["runs"], record["speed"]) + "\n")
    for kind in ("GRPO", "supervised"):
        print(f"{kind}, LoRA − all weights:", paired(record["runs"], f"{kind}, all weights", f"{kind}, LoRA"))
    return exit_code(record["verdicts"])


if __name__ == "__main__":
    sys.exit(main())
