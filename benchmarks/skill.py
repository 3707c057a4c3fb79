"""A run in which a skill grows: ``python -m benchmarks.skill``, see docs/studies/skill.md.

GRPO trains a checkpoint from the middle of pretraining, whose skill is half learned, and the greedy accuracy on
held-out problems is compared with two baselines: supervised training on as many tokens, and the same GRPO run with its
rewards shuffled among the completions. ``--search FOLDER ...`` repeats the search on the selection seeds, over
checkpoints that ``python -m grpo_edu.making.pretraining --recipe stories --snapshots FOLDER`` writes. Each run is one
line of ``benchmarks/results/skill.jsonl``. The same command continues where it stopped, and at the end writes
``skill.json``.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import RESULTS, Ledger, exit_code, save, spread
from grpo_edu import (
    GRPOConfig,
    accuracy_reward,
    evaluate,
    generate,
    load_policy,
    load_problems,
    pass_at_k,
    render_prompt,
    train,
)
from grpo_edu.config import SupervisedConfig
from grpo_edu.continual.supervised import finetune
from grpo_edu.evaluation import Evaluation, mcnemar, mean_estimate, paired_bootstrap
from grpo_edu.rewards import check_equations

COMMAND = "python -m benchmarks.skill"
LEDGER = RESULTS / "skill.jsonl"
MODEL = "halfway"
LEVELS = ("basic", "intermediate")
NUM_TRAIN, NUM_VALIDATION = 800, 200  # of each level's 1,000 training problems
MARKS = (40, 60, 80, 100)  # steps at which a run of the search is evaluated
ENOUGH = 0.20  # gain in greedy validation accuracy that ends the search for fewer steps
RATES = (1e-4, 3e-4, 1e-3)
SEARCH_SEED, SEEDS = 100, (0, 1, 2, 3, 4)
LENGTH = 64  # tokens; the longest worked solution has about 45
SAMPLES, KS = 64, (1, 2, 4, 8, 16, 32, 64)
NUM_PASS = 150  # held-out problems of each level for pass@k
ARMS = ("grpo", "shuffled", "supervised")


def training_problems() -> tuple[list, list]:
    """The training and the validation problems: two parts of the training files."""
    parts = [load_problems(level, "train") for level in LEVELS]
    train_part = [problem for part in parts for problem in part[:NUM_TRAIN]]
    return train_part, [problem for part in parts for problem in part[NUM_TRAIN : NUM_TRAIN + NUM_VALIDATION]]


def shuffled(seed: int):
    """The accuracy reward with its values shuffled among all completions of the step: paid, but not for being right."""
    rng = random.Random(seed)

    def shuffled_accuracy_reward(completions, answer, **kwargs):
        values = accuracy_reward(completions, answer, **kwargs)
        return rng.sample(values, len(values))

    return shuffled_accuracy_reward


def run_arm(model, tokenizer, arm: str, rate: float, seed: int) -> Iterator[dict[str, Any]]:
    """Train `model` in place, without end; yields the metrics of each step."""
    problems, _ = training_problems()
    if arm == "supervised":
        config = SupervisedConfig(max_steps=10**6, prompts_per_step=32, learning_rate=rate, seed=seed)
        return finetune(model, tokenizer, problems, config)
    reward = shuffled(seed) if arm == "shuffled" else accuracy_reward
    config = GRPOConfig(max_steps=10**6, learning_rate=rate, seed=seed, max_completion_length=LENGTH)
    return train(model, tokenizer, problems, reward, config)


def train_until(metrics: Iterator[dict[str, Any]], *, steps: int | None = None, tokens: int | None = None) -> dict:
    """Train for so many steps, or until so many tokens were processed; returns steps, tokens and seconds."""
    started = time.perf_counter()
    for row in metrics:
        if row["step"] == steps or (tokens is not None and row["num_tokens"] >= tokens):
            break
    seconds = round(time.perf_counter() - started, 1)
    return {"steps": row["step"], "tokens": int(row["num_tokens"]), "seconds": seconds}


def measure(model, tokenizer, problems: Sequence, temperature: float = 0) -> Evaluation:
    """One answer for each problem, greedy unless another temperature is given."""
    return evaluate(
        model, tokenizer, problems, temperature=temperature, max_completion_length=LENGTH, batch_size=200, seed=1
    )


def anatomy(found: Evaluation) -> dict[str, float]:
    """Of the answers: the share with a valid answer, and the share of their equations that are true."""
    equations = [holds for text in found.completions for holds in check_equations(text)]
    valid = sum(answer is not None for answer in found.answers) / found.n
    return {"answered": valid, "true_equations": sum(equations) / max(1, len(equations))}


def pass_curve(model, tokenizer, seed: int = 1) -> dict[str, Any]:
    """pass@k from 64 samples at temperature 1 of each held-out problem, and how many of them are right."""
    problems = load_problems(LEVELS, "heldout", n=NUM_PASS)
    generator, counts = torch.Generator().manual_seed(seed), []
    for start in range(0, len(problems), 10):
        part = problems[start : start + 10]
        prompts = [render_prompt(tokenizer, problem.prompt) for problem in part]
        rollout = generate(
            model, tokenizer, prompts, num_generations=SAMPLES, max_completion_length=LENGTH, generator=generator
        )
        answers = [problem.answer for problem in part for _ in range(SAMPLES)]
        right = accuracy_reward(rollout.completions, answers)
        counts += [int(sum(right[row : row + SAMPLES])) for row in range(0, len(right), SAMPLES)]
    curve = {str(k): sum(pass_at_k(SAMPLES, count, k) for count in counts) / len(counts) for k in KS}
    return {"pass": curve, "counts": counts}


def search(ledger: Ledger, folders: Sequence[Path]) -> None:
    """The search of the selection rule: GRPO from every checkpoint with every learning rate, evaluated at `MARKS`."""
    _, validation = training_problems()
    for folder in folders:
        model, tokenizer = load_policy(folder)
        before = measure(model, tokenizer, validation)
        if not ledger.find(phase="checkpoint", checkpoint=folder.name):
            ledger.add(phase="checkpoint", checkpoint=folder.name, **before.to_dict(), **anatomy(before))
        for rate in RATES:
            key = {"phase": "search", "checkpoint": folder.name, "arm": "grpo", "rate": rate, "seed": SEARCH_SEED}
            if ledger.find(**key) or not 0.3 <= before.accuracy <= 0.7:
                continue
            model, tokenizer = load_policy(folder)
            metrics, curve = run_arm(model, tokenizer, "grpo", rate, SEARCH_SEED), []
            for mark in MARKS:
                spent = train_until(metrics, steps=mark)
                curve.append({**spent, "gain": measure(model, tokenizer, validation).accuracy - before.accuracy})
                print(folder.name, rate, curve[-1], flush=True)
            ledger.add(**key, before=before.accuracy, curve=curve)


def chosen(ledger: Ledger) -> dict[str, Any]:
    """Checkpoint, learning rate and steps: the fewest steps whose gain is `ENOUGH`; if none is, the largest gain."""
    tried = [
        {"checkpoint": row["checkpoint"], "rate": row["rate"], **point}
        for row in ledger.select(phase="search", arm="grpo")
        for point in row["curve"]
    ]
    enough = [point for point in tried if point["gain"] >= ENOUGH]
    if enough:
        return min(enough, key=lambda point: (point["steps"], -point["gain"]))
    return max(tried, key=lambda point: point["gain"])


def tune_supervised(ledger: Ledger) -> float:
    """The learning rate of the supervised baseline: the largest gain after as many tokens as the chosen GRPO run."""
    _, validation = training_problems()
    best = chosen(ledger)
    for rate in RATES:
        key = {"phase": "search", "checkpoint": MODEL, "arm": "supervised", "rate": rate, "seed": SEARCH_SEED}
        if not ledger.find(**key):
            model, tokenizer = load_policy(MODEL)
            spent = train_until(run_arm(model, tokenizer, "supervised", rate, SEARCH_SEED), tokens=best["tokens"])
            ledger.add(**key, **spent, after=measure(model, tokenizer, validation).accuracy)
            print(ledger.rows[-1], flush=True)
    rows = ledger.select(phase="search", arm="supervised")
    return max(rows, key=lambda row: row["after"])["rate"]


def report(ledger: Ledger, late: Callable[[], bool]) -> None:
    """The reported seeds: every arm, evaluated greedily and sampled on all held-out problems, and pass@k."""
    heldout, best = load_problems(LEVELS, "heldout"), chosen(ledger)
    rates = {"grpo": best["rate"], "shuffled": best["rate"], "supervised": tune_supervised(ledger)}
    start = ledger.find(phase="before")
    if start is None:
        model, tokenizer = load_policy(MODEL)
        ledger.add(phase="before", **outcome(model, tokenizer, heldout), **pass_curve(model, tokenizer))
    for seed in SEEDS:
        for arm in ARMS:
            if late() or ledger.find(phase="report", arm=arm, seed=seed):
                continue
            model, tokenizer = load_policy(MODEL)
            metrics = run_arm(model, tokenizer, arm, rates[arm], seed)
            if arm == "supervised":
                run = train_until(metrics, tokens=ledger.find(phase="report", arm="grpo", seed=seed)["tokens"])
            else:
                run = train_until(metrics, steps=best["steps"])
            found = outcome(model, tokenizer, heldout)
            curve = pass_curve(model, tokenizer) if arm == "grpo" else {}
            ledger.add(phase="report", arm=arm, seed=seed, rate=rates[arm], **run, **found, **curve)
            print(f"{arm} seed {seed}: greedy {share(found['greedy']):.1%} {run}", flush=True)


def outcome(model, tokenizer, problems: Sequence) -> dict[str, Any]:
    """Greedy and sampled answers on the same problems: a 1 or 0 for each, and what the greedy ones are made of."""
    greedy, sampled = (measure(model, tokenizer, problems, temperature) for temperature in (0, 1.0))
    bits = {
        name: "".join(str(int(c)) for c in found.correct) for name, found in (("greedy", greedy), ("sampled", sampled))
    }
    return {**bits, **anatomy(greedy)}


def share(bits: str) -> float:
    """The share of ones."""
    return bits.count("1") / len(bits)


def summary(ledger: Ledger) -> dict[str, Any]:
    """Greedy gains by arm: each seed with its paired test, and the mean over seeds with Student's interval."""
    before = ledger.find(phase="before")
    ones = [bit == "1" for bit in before["greedy"]]
    found: dict[str, Any] = {"before": {name: share(before[name]) for name in ("greedy", "sampled")}}
    for arm in ARMS:
        runs = sorted(ledger.select(phase="report", arm=arm), key=lambda row: row["seed"])
        after = [[bit == "1" for bit in row["greedy"]] for row in runs]
        tests = [mcnemar(ones, bits) for bits in after]
        intervals = [paired_bootstrap(ones, bits) for bits in after]
        found[arm] = {
            "rate": runs[0]["rate"],
            "greedy": [share(row["greedy"]) for row in runs],
            "sampled": [share(row["sampled"]) for row in runs],
            "gain": mean_estimate([share(row["greedy"]) - share(before["greedy"]) for row in runs]).to_dict(),
            "sampled_gain": mean_estimate([share(row["sampled"]) - share(before["sampled"]) for row in runs]).to_dict(),
            "per_seed": [vars(interval) for interval in intervals],
            "p_value": [test.p_value for test in tests],
            "true_equations": [row["true_equations"] for row in runs],
            "seconds": spread([row["seconds"] for row in runs]),
            "steps": [row["steps"] for row in runs],
            "tokens": [row["tokens"] for row in runs],
        }
    runs = ledger.select(phase="report", arm="grpo")
    found["pass"] = {
        str(k): {
            "before": before["pass"][str(k)],
            "after": [row["pass"][str(k)] for row in runs],
            "change": mean_estimate([row["pass"][str(k)] - before["pass"][str(k)] for row in runs]).to_dict(),
        }
        for k in KS
    }
    for other in ("supervised", "shuffled"):
        found[f"grpo minus {other}"] = mean_estimate(
            [a - b for a, b in zip(found["grpo"]["greedy"], found[other]["greedy"], strict=True)]
        ).to_dict()
    return found


def verdicts(found: dict[str, Any]) -> dict[str, bool]:
    """The statements of the study."""
    grpo = found["grpo"]
    return {
        "greedy accuracy rises by at least 15 points on every seed": min(row["difference"] for row in grpo["per_seed"])
        >= 0.15,
        "p < 0.001 on every seed (exact McNemar test)": max(grpo["p_value"]) < 0.001,
        "with shuffled rewards it does not rise": found["shuffled"]["gain"]["low"] <= 0,
    }


def main() -> int:
    """Run what is missing; exit 1 where a statement does not hold."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--search", type=Path, nargs="+", metavar="FOLDER", help="search over these checkpoints")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no new run after so many")
    options = parser.parse_args()
    deadline = time.perf_counter() + 60 * options.minutes
    ledger = Ledger(LEDGER)
    if options.search:
        search(ledger, options.search)
        print(chosen(ledger))
        return 0
    report(ledger, lambda: time.perf_counter() > deadline)
    if len(ledger.select(phase="report")) < len(ARMS) * len(SEEDS):
        print("stopped in time; the same command continues")
        return 0
    found = summary(ledger)
    judged = verdicts(found)
    save(LEDGER.with_suffix(".json"), COMMAND, {"verdicts": judged, "chosen": chosen(ledger), **found})
    return exit_code(judged)


if __name__ == "__main__":
    raise SystemExit(main())
