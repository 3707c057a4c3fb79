"""A run in which a skill grows: ``python -m benchmarks.skill``, see docs/studies/skill.md.

GRPO trains the model `halfway`, which has half learned ten kinds of puzzles, and the greedy accuracy on held-out
puzzles is compared with two baselines: supervised training on as many tokens, and the same GRPO run with its rewards
shuffled among the completions. Then pass@k is estimated before and after GRPO. Each run is one line of
``benchmarks/results/skill.jsonl``. The same command continues where it stopped, and ``skill.json`` holds the summary.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from benchmarks.harness import RESULTS, Ledger, estimate, exit_code, save
from grpo_edu import (
    GRPOConfig,
    accuracy_reward,
    evaluate,
    generate,
    load_policy,
    pass_at_k,
    render_prompt,
    save_policy,
    train,
)
from grpo_edu.config import SupervisedConfig
from grpo_edu.continual.supervised import finetune
from grpo_edu.evaluation import Evaluation, mcnemar, paired_bootstrap
from grpo_edu.problems.puzzles import puzzle_splits
from grpo_edu.rewards import check_equations

COMMAND = "python -m benchmarks.skill"
LEDGER = RESULTS / "skill.jsonl"
MODELS = RESULTS.parents[1] / "runs" / "skill"  # the trained models, for pass@k
MODEL = "halfway"
STEPS, RATE = 60, 1e-4  # 16 prompts × 8 completions, the package's default settings
SUPERVISED_RATE = 1e-3  # that of the cold start
SEEDS = (0, 1, 2, 3, 4)
LENGTH = 64  # tokens; the longest worked solution has about 30
SAMPLES, KS = 64, (1, 2, 4, 8, 16, 32, 64)
NUM_PASS = 150  # held-out puzzles for pass@k
ARMS = ("grpo", "shuffled", "supervised")
TIMES = ("seconds", "cpu_seconds")


def shuffled(seed: int):
    """The accuracy reward with its values shuffled among all completions of the step: paid, but not for being right."""
    rng = random.Random(seed)

    def shuffled_accuracy_reward(completions, answer, **kwargs):
        values = accuracy_reward(completions, answer, **kwargs)
        return rng.sample(values, len(values))

    return shuffled_accuracy_reward


def run_arm(model, tokenizer, arm: str, seed: int) -> Iterator[dict[str, Any]]:
    """Train `model` in place, without end; yields the metrics of each step."""
    problems = puzzle_splits()["train"]
    if arm == "supervised":
        config = SupervisedConfig(max_steps=10**6, prompts_per_step=32, learning_rate=SUPERVISED_RATE, seed=seed)
        return finetune(model, tokenizer, problems, config)
    reward = shuffled(seed) if arm == "shuffled" else accuracy_reward
    config = GRPOConfig(max_steps=10**6, learning_rate=RATE, seed=seed, max_completion_length=LENGTH)
    return train(model, tokenizer, problems, reward, config)


def train_until(metrics: Iterator[dict[str, Any]], *, steps: int | None = None, tokens: int | None = None) -> dict:
    """Train for so many steps, or until so many tokens were processed; returns steps, tokens, seconds."""
    started, cpu = time.perf_counter(), time.process_time()
    for row in metrics:
        if row["step"] == steps or (tokens is not None and row["num_tokens"] >= tokens):
            break
    spent = {"seconds": round(time.perf_counter() - started, 1), "cpu_seconds": round(time.process_time() - cpu, 1)}
    return {"steps": row["step"], "tokens": int(row["num_tokens"]), **spent}


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
    problems = puzzle_splits()["heldout"][:NUM_PASS]
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


def trained_policy(seed: int) -> tuple:
    """The model after the GRPO run of a seed, and its tokenizer; trained now if its folder is not there."""
    folder = MODELS / f"grpo-{seed}"
    if not folder.exists():
        model, tokenizer = load_policy(MODEL)
        train_until(run_arm(model, tokenizer, "grpo", seed), steps=STEPS)
        save_policy(model, tokenizer, folder)
    return load_policy(folder)


def report(ledger: Ledger, arms: Sequence[str], seeds: Sequence[int], late: Callable[[], bool]) -> None:
    """The reported seeds: every arm, evaluated greedily and sampled on all held-out puzzles."""
    heldout = puzzle_splits()["heldout"]
    if not ledger.find(phase="before"):
        ledger.add(phase="before", **outcome(*load_policy(MODEL), heldout))
    for seed in seeds:
        for arm in arms:
            grpo = ledger.find(phase="report", arm="grpo", seed=seed)
            if late() or ledger.find(phase="report", arm=arm, seed=seed) or (arm == "supervised" and not grpo):
                continue
            model, tokenizer = load_policy(MODEL)
            metrics = run_arm(model, tokenizer, arm, seed)
            spent = (
                train_until(metrics, tokens=grpo["tokens"])
                if arm == "supervised"
                else train_until(metrics, steps=STEPS)
            )
            found = outcome(model, tokenizer, heldout)
            ledger.add(phase="report", arm=arm, seed=seed, **spent, **found)
            print(f"{arm} seed {seed}: greedy {share(found['greedy']):.1%} {spent}", flush=True)
            if arm == "grpo":
                save_policy(model, tokenizer, MODELS / f"{arm}-{seed}", overwrite=True)


def report_pass(ledger: Ledger, seeds: Sequence[int], late: Callable[[], bool]) -> None:
    """pass@k before, and after each GRPO run."""
    for seed in (None, *seeds):
        if late() or ledger.find(phase="pass", seed=seed):
            continue
        ledger.add(
            phase="pass", seed=seed, **pass_curve(*(load_policy(MODEL) if seed is None else trained_policy(seed)))
        )
        print("pass@k", seed, ledger.rows[-1]["pass"], flush=True)


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
    start = {way: share(before[way]) for way in ("greedy", "sampled")}
    found: dict[str, Any] = {"before": {**start, "n": len(ones), "true_equations": before["true_equations"]}}
    found["before"]["per_kind"] = [share(before["greedy"][kind::10]) for kind in range(10)]  # the kinds take turns
    for arm in ARMS:
        runs = sorted(ledger.select(phase="report", arm=arm), key=lambda row: row["seed"])
        if not runs:
            continue
        pairs = [(ones, [bit == "1" for bit in row["greedy"]]) for row in runs]
        gains = {way: [share(row[way]) - start[way] for row in runs] for way in start}
        found[arm] = {
            "seeds": [row["seed"] for row in runs],
            **{way: [share(row[way]) for row in runs] for way in start},
            **{f"{way}_gain": estimate(values) for way, values in gains.items() if len(values) > 1},
            "per_kind": [sum(share(row["greedy"][kind::10]) for row in runs) / len(runs) for kind in range(10)],
            "per_seed": [vars(paired_bootstrap(*pair)) for pair in pairs],
            "p_value": [mcnemar(*pair).p_value for pair in pairs],
            **{name: [row.get(name) for row in runs] for name in ("true_equations", "steps", "tokens", *TIMES)},
        }
    for other in ("supervised", "shuffled"):
        if len(found.get(other, {}).get("seeds", ())) > 1:
            by_seed = {
                arm: dict(zip(found[arm]["seeds"], found[arm]["greedy"], strict=True)) for arm in ("grpo", other)
            }
            pairs = [by_seed["grpo"][seed] - value for seed, value in by_seed[other].items() if seed in by_seed["grpo"]]
            found[f"grpo minus {other}"] = estimate(pairs)
    base, after = (
        ledger.find(phase="pass", seed=None),
        [row for row in ledger.select(phase="pass") if row["seed"] is not None],
    )
    if base and len(after) > 1:
        found["pass"] = {
            str(k): {
                "before": base["pass"][str(k)],
                "after": [row["pass"][str(k)] for row in after],
                "change": estimate([row["pass"][str(k)] - base["pass"][str(k)] for row in after]),
            }
            for k in KS
        }
    return found


def verdicts(found: dict[str, Any]) -> dict[str, bool]:
    """The statements of the study."""
    grpo, least = found["grpo"], min(row["difference"] for row in found["grpo"]["per_seed"])
    return {
        "greedy accuracy rises by at least 15 points on every seed": least >= 0.15,
        "p < 0.001 on every seed (exact McNemar test)": max(grpo["p_value"]) < 0.001,
        "with shuffled rewards it rises on no seed": max(found["shuffled"]["greedy"]) <= found["before"]["greedy"],
    }


def main() -> int:
    """Run what is missing; exit 1 where a statement does not hold."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parts = (*ARMS, "pass")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="only these")
    parser.add_argument("--seeds", type=int, nargs="+", choices=SEEDS, default=SEEDS, help="only these")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no new run after so many")
    options = parser.parse_args()
    deadline = time.perf_counter() + 60 * options.minutes

    def late() -> bool:
        return time.perf_counter() > deadline

    report(Ledger(LEDGER), [arm for arm in ARMS if arm in options.parts], options.seeds, late)
    if "pass" in options.parts:
        report_pass(Ledger(LEDGER), options.seeds, late)
    found = summary(Ledger(LEDGER))
    if not {"grpo", "shuffled"} <= found.keys():
        return 0
    judged = verdicts(found)
    save(LEDGER.with_suffix(".json"), COMMAND, {"verdicts": judged, **found})
    return exit_code(judged)


if __name__ == "__main__":
    raise SystemExit(main())
