"""Rollouts with a calculator: ``python -m benchmarks.tool_rollouts``, see benchmarks/studies/tool_rollouts.md.

The model `tiny` takes a cold start on worked solutions, half of which call a calculator. Then GRPO trains three copies:
with the calculator, without it, and with it but with its tokens in the loss. Each run is one line of
``benchmarks/results/tool_rollouts.jsonl``. The same command continues where it stopped, and ``tool_rollouts.json``
holds the summary.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.harness import (
    RESULTS,
    Ledger,
    bits,
    counted,
    estimate,
    exit_code,
    ledger_options,
    ones,
    over_seeds_and_problems,
    save,
    share,
)
from grpo_edu import GRPOConfig, accuracy_reward, evaluate, load_policy, save_policy, train
from grpo_edu.batch import Batch, score_rollout
from grpo_edu.config import SupervisedConfig
from grpo_edu.continual.examples import pad_examples, target_logits
from grpo_edu.evaluation import mcnemar, paired_bootstrap
from grpo_edu.fast.optimizers import build_optimizer, clip_and_step
from grpo_edu.problems.environments import Calculator
from grpo_edu.problems.equations import calculate
from grpo_edu.problems.templates import Problem, ProblemOrder
from grpo_edu.rollout import Rollout
from grpo_edu.studies.tool_use import encode_turns, tool_splits
from grpo_edu.trainer import Stages, start_training

COMMAND = "python -m benchmarks.tool_rollouts"
LEDGER = RESULTS / "tool_rollouts.jsonl"
START = RESULTS.parents[1] / "runs" / "tool_rollouts" / "start"  # the model after the cold start
COLD = SupervisedConfig(max_steps=60, prompts_per_step=16, learning_rate=1e-3, seed=0)
STEPS, RATE = 24, 3e-4  # 16 prompts × 8 completions, as in the package's default settings
LENGTH = 48  # tokens; the longest worked solution has about 40
SEEDS = (1, 2, 3, 4, 5)
ARMS = ("tool", "no tool", "unmasked")


def score_without_mask(rollout: Rollout, *arguments: Any) -> Batch:
    """Return the batch of a rollout, with the calculator's tokens in the loss as if the policy had written them."""
    return score_rollout(dataclasses.replace(rollout, tool_mask=None), *arguments)


def cold_start(model, tokenizer, problems: Sequence[Problem], config: SupervisedConfig) -> Iterator[float]:
    """Supervised steps on worked solutions, without the calculator's replies; trains in place, yields each loss."""
    rows = [encode_turns(tokenizer, problem) for problem in problems]
    optimizer, _ = build_optimizer(model, config)
    order = ProblemOrder(len(rows), config.seed)
    for _ in range(config.max_steps):
        batch = [rows[index] for index in order.draw(config.prompts_per_step)]
        ids, _ = pad_examples([(row, 0) for row, _ in batch], tokenizer.pad_token_id)
        is_target, _ = pad_examples([(row, 0) for _, row in batch], 0)
        logits, labels = target_logits(model, ids, is_target.bool())
        loss = torch.nn.functional.cross_entropy(logits, labels)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        clip_and_step(optimizer, config.max_grad_norm)
        yield loss.item()


def started_policy() -> tuple:
    """Return the model after the cold start, and its tokenizer; trained now if its folder is not there."""
    if not START.exists():
        model, tokenizer = load_policy("tiny")
        for _ in cold_start(model, tokenizer, tool_splits()["cold"], COLD):
            pass
        save_policy(model, tokenizer, START)
    return load_policy(START)


def train_arm(model, tokenizer, arm: str, seed: int) -> dict[str, Any]:
    """Train `model` in place; returns the reward and the norm of the gradient at each step, and the time."""
    problems = tool_splits()["train"]
    config = GRPOConfig(max_steps=STEPS, learning_rate=RATE, seed=seed, max_completion_length=LENGTH)
    state = start_training(model, tokenizer, problems, config)
    state.sampler.environment = None if arm == "no tool" else Calculator
    stages = Stages(score=score_without_mask) if arm == "unmasked" else Stages()
    cpu = time.process_time()
    rows = list(train(model, tokenizer, problems, accuracy_reward, config, state=state, stages=stages))
    return {
        **{name: [round(row[name], 4) for row in rows] for name in ("reward", "grad_norm")},
        "cpu_seconds": round(time.process_time() - cpu, 1),
    }


def outcome(model, tokenizer, arm: str) -> dict[str, Any]:
    """Greedy and sampled answers to the held-out problems: a 1 or 0 for each, and the share with a correct call."""
    environment = None if arm == "no tool" else Calculator
    found: dict[str, Any] = {}
    for way, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        result = evaluate(
            model,
            tokenizer,
            tool_splits()["heldout"],
            temperature=temperature,
            max_completion_length=LENGTH,
            batch_size=100,
            seed=1,
            environment=environment,
        )
        found[way] = bits(result.correct)
        found[f"{way}_calls"] = sum(map(calls_well, result.completions)) / result.n
    return found


def calls_well(completion: str) -> bool:
    """Return True if a completion calls the calculator, and every call is an expression that it can compute."""
    calls = re.findall(r"([^\[\]]*)\]", completion)
    return bool(calls) and all(calculate(call) for call in calls)


def compare(before: str, after: str) -> dict[str, Any]:
    """Two runs on the same problems: the difference with its paired interval, and McNemar's exact p-value."""
    pair = ones(before), ones(after)
    return {**vars(paired_bootstrap(*pair)), "p_value": mcnemar(*pair).p_value}


def summary(ledger: Ledger) -> dict[str, Any]:
    """Accuracy of each arm and seed, what it gained, and its difference from the other arms on the same seeds."""
    found: dict[str, Any] = {"before": {}}
    for arm in ("tool", "no tool"):
        row = ledger.find(phase="before", arm=arm)
        for way in ("greedy", "sampled"):
            found["before"][f"{arm}, {way}"] = counted(row[way])
        found["before"][f"{arm}, calls"] = row["sampled_calls"]
    runs = {arm: {row["seed"]: row for row in ledger.select(phase="report", arm=arm)} for arm in ARMS}
    for arm, by_seed in runs.items():
        rows = [by_seed[seed] for seed in sorted(by_seed)]
        before = ledger.find(phase="before", arm="no tool" if arm == "no tool" else "tool")
        found[arm] = {"seeds": sorted(by_seed), "cpu_seconds": [row["cpu_seconds"] for row in rows]}
        found[arm]["calls"] = [row["sampled_calls"] for row in rows]
        found[arm]["reward"] = [row["reward"] for row in rows]
        found[arm]["grad_norm"] = [sum(row["grad_norm"]) / STEPS for row in rows]
        for way in ("greedy", "sampled"):
            gains = [share(row[way]) - share(before[way]) for row in rows]
            found[arm][way] = [share(row[way]) for row in rows]
            found[arm][f"{way}_gain"] = estimate(gains) if len(gains) > 1 else None
            if len(rows) > 1:
                pair = [before[way]] * len(rows), [row[way] for row in rows]
                found[arm][f"{way}_gain over seeds and problems"] = over_seeds_and_problems(*pair)
            found[arm][f"{way}_paired"] = [compare(before[way], row[way]) for row in rows]
    for other in ARMS[1:]:
        both = sorted(runs["tool"].keys() & runs[other].keys())
        for way in ("greedy", "sampled"):
            pairs = [(runs[other][seed][way], runs["tool"][seed][way]) for seed in both]
            differences = [share(with_tool) - share(without) for without, with_tool in pairs]
            found[f"tool minus {other}, {way}"] = {
                "over_seeds": estimate(differences) if len(both) > 1 else None,
                "over seeds and problems": over_seeds_and_problems(*zip(*pairs, strict=True))
                if len(both) > 1
                else None,
                "per_seed": [compare(*pair) for pair in pairs],
            }
    return found


def verdicts(found: dict[str, Any]) -> dict[str, bool]:
    """Return the statements of the study, fixed before its runs."""
    against = found["tool minus no tool, sampled"]["per_seed"]
    return {
        "with the calculator, sampled accuracy rises on every seed (p < 0.001)": all(
            row["difference"] > 0 and row["p_value"] < 0.001 for row in found["tool"]["sampled_paired"]
        ),
        "it ends above the run without the calculator on every seed (p < 0.001)": all(
            row["difference"] > 0 and row["p_value"] < 0.001 for row in against
        ),
        "without the calculator, greedy accuracy stays below 5% on every seed": max(found["no tool"]["greedy"]) < 0.05,
    }


def main() -> int:
    """Run what is missing; exit 1 if a statement does not hold."""
    parser = ledger_options(COMMAND, __doc__)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS, help="only these")
    parser.add_argument("--seeds", type=int, nargs="+", choices=SEEDS, default=SEEDS, help="only these")
    options = parser.parse_args()
    ledger = Ledger(LEDGER, options.minutes)
    for arm in ("tool", "no tool"):
        if not ledger.find(phase="before", arm=arm):
            ledger.add(phase="before", arm=arm, **outcome(*started_policy(), arm))
    for seed, arm in itertools.product(options.seeds, options.arms):
        if not ledger.wants(phase="report", arm=arm, seed=seed):
            continue
        model, tokenizer = started_policy()
        spent = train_arm(model, tokenizer, arm, seed)
        ledger.add(phase="report", arm=arm, seed=seed, **spent, **outcome(model, tokenizer, arm))
        print(f"{arm}, seed {seed}: sampled {share(ledger.rows[-1]['sampled']):.1%}", flush=True)
    found = summary(ledger)
    complete = all(found[arm]["seeds"] == list(SEEDS) for arm in ARMS[:2])
    judged = verdicts(found) if complete else {}  # a statement about five seeds is not judged on fewer
    save(LEDGER.with_suffix(".json"), COMMAND, {"verdicts": judged, **found})
    return exit_code(judged)


if __name__ == "__main__":
    raise SystemExit(main())
