"""A run in which a skill grows: ``python -m benchmarks.skill``, see docs/studies/skill.md.

GRPO trains a checkpoint from the middle of pretraining, whose skill is half learned, and the greedy accuracy on held-out
problems is compared with two baselines: supervised training on as many tokens, and the same GRPO run with its rewards
shuffled among the completions. ``--search FOLDER ...`` repeats the search on the selection seeds, over checkpoints that
``python -m grpo_edu.making.pretraining --recipe stories --snapshots FOLDER`` writes. Each run is one line of
``benchmarks/results/skill.jsonl``; the same command goes on where it stopped, and at the end writes ``skill.json``.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import RESULTS, Ledger, exit_code, save, spread
from grpo_edu import (
    GRPOConfig,
    accuracy_reward,
    compare,
    evaluate,
    generate,
    load_policy,
    load_problems,
    mean_estimate,
    pass_at_k,
    render_prompt,
    train,
)
from grpo_edu.config import SupervisedConfig
from grpo_edu.continual.supervised import finetune
from grpo_edu.evaluation import Evaluation
from grpo_edu.rewards import check_equations

COMMAND = "python -m benchmarks.skill"
LEDGER = RESULTS / "skill.jsonl"
MODEL = "halfway"
LEVELS = ("basic", "intermediate")
NUM_TRAIN, NUM_VALIDATION = 800, 200  # of each level's 1,000 training problems
STEPS = 100
RATES = (1e-4, 3e-4, 1e-3)
SEARCH_SEEDS, SEEDS = (100, 101), (0, 1, 2, 3, 4)
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


def run_arm(model, tokenizer, arm: str, rate: float, seed: int, steps: int, tokens: int | None = None) -> dict[str, Any]:
    """Train `model` in place; returns the steps, the tokens processed and the seconds.

    tokens: for "supervised", where to stop: the number of tokens that GRPO processed.
    """
    problems, _ = training_problems()
    started, used, done = time.perf_counter(), 0, 0
    if arm == "supervised":
        config = SupervisedConfig(max_steps=10**6, prompts_per_step=32, learning_rate=rate, seed=seed)
        metrics = finetune(model, tokenizer, problems, config)
    else:
        reward = shuffled(seed) if arm == "shuffled" else accuracy_reward
        config = GRPOConfig(max_steps=steps, learning_rate=rate, seed=seed, max_completion_length=LENGTH)
        metrics = train(model, tokenizer, problems, reward, config)
    for row in metrics:
        used, done = row["num_tokens"], row["step"]
        if tokens is not None and used >= tokens:
            break
    return {"steps": done, "tokens": int(used), "seconds": round(time.perf_counter() - started, 1)}


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
    """pass@k for k = 1 … 64 at temperature 1, from 64 samples of each held-out problem; and the counts of right ones."""
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
    """The search of the selection rule: every checkpoint, learning rate and selection seed."""
    _, validation = training_problems()
    for folder in folders:
        model, tokenizer = load_policy(folder)
        before = measure(model, tokenizer, validation)
        print(f"{folder.name}: greedy {before.accuracy:.1%}", flush=True)
        if not ledger.find(phase="checkpoint", checkpoint=folder.name):
            ledger.add(phase="checkpoint", checkpoint=folder.name, **before.to_dict(), **anatomy(before))
        if not 0.3 <= before.accuracy <= 0.7:
            continue
        for seed in SEARCH_SEEDS:
            for rate in RATES:
                tune(ledger, folder, "grpo", rate, seed, before, validation)


def tune(ledger: Ledger, folder: Path, arm: str, rate: float, seed: int, before: Evaluation, validation: list) -> None:
    """One run on a selection seed, evaluated on the validation problems, unless the ledger has it."""
    key = {"phase": "search", "checkpoint": folder.name, "arm": arm, "rate": rate, "seed": seed}
    if ledger.find(**key):
        return
    tokens = None
    if arm == "supervised":
        tokens = max(row["tokens"] for row in ledger.rows if row["phase"] == "search" and row["arm"] == "grpo")
    model, tokenizer = load_policy(folder)
    spent = run_arm(model, tokenizer, arm, rate, seed, STEPS, tokens)
    after = measure(model, tokenizer, validation)
    ledger.add(**key, **spent, before=before.accuracy, after=after.accuracy, gain=after.accuracy - before.accuracy)
    print(f"{folder.name} {arm} {rate:g} seed {seed}: {after.accuracy - before.accuracy:+.1%} {spent}", flush=True)


def main() -> int:
    """Run what is missing; exit 1 where a statement does not hold."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--search", type=Path, nargs="+", metavar="FOLDER", help="search over these checkpoints")
    options = parser.parse_args()
    ledger = Ledger(LEDGER)
    if options.search:
        search(ledger, options.search)
        return 0
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
