"""Settings in which a choice of the objective matters: ``python -m benchmarks.choices``.

The protocol is benchmarks/studies/choices.md. Every choice has a setting of its own and two or more arms, which differ
in that choice only. The learning rate of each arm is the one of a common grid with the highest reward on selection
problems and a selection seed. Then each arm runs on five other seeds and is judged on held-out problems. Reported are
the differences between arms that share a seed.

Each run is one line of ``benchmarks/results/choices.jsonl``. ``--minutes 20`` starts no run after 20 minutes. The same
command continues where it stopped, and ``choices.json`` holds the summary of the runs so far.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import mean
from typing import Any

import numpy as np

from benchmarks.harness import RESULTS, Ledger, bits, change, estimate, ledger_options, ones, save
from grpo_edu import (
    LEVELS,
    GRPOConfig,
    accuracy_reward,
    combine_rewards,
    compute_rewards,
    evaluate,
    format_reward,
    length_reward,
    load_policy,
    load_problems,
    save_policy,
    train,
)
from grpo_edu.config import SupervisedConfig
from grpo_edu.continual.supervised import finetune
from grpo_edu.evaluation import crossed_bootstrap
from grpo_edu.problems.puzzles import make_puzzles, puzzle_splits
from grpo_edu.problems.templates import Problem, problem_key

COMMAND = "python -m benchmarks.choices"
LEDGER = RESULTS / "choices.jsonl"
MODELS = RESULTS.parents[1] / "runs" / "choices"
LENGTH = 96
OUTCOMES = ("accuracy", "mean_reward", "wrong_length", "right_length")
CURVES = (
    "rewards/accuracy_reward/mean",
    "reward",
    "completions/mean_length",
    "clip_ratio/region_mean",
    "frac_reward_zero_std",
)
SEEDS = (0, 1, 2, 3, 4)
SELECTION_SEED = 100
HACKABLE = (accuracy_reward, format_reward, partial(length_reward, target=8))  # as in benchmarks.reward_hacking
OFF = 1e6  # a clip bound that no ratio reaches


@dataclass(frozen=True)
class Choice:
    """A choice and the setting in which it is tried.

    arms: name → the settings that differ, the two that are compared first; the difference is first minus second.
    base: the settings that all arms share. rates: the grid of learning rates. outcome: a key of `judge`.
    """

    arms: Mapping[str, dict[str, Any]]
    base: dict[str, Any]
    rates: tuple[float, ...]
    outcome: str = "accuracy"
    model: str = "halfway"
    rewards: Sequence[Callable] = (accuracy_reward,)


CHOICES = {
    "kl": Choice(
        arms={"with KL": {"beta": 1.0}, "without KL": {"beta": 0.0}},
        base={"max_steps": 12, "prompts_per_step": 4},
        rates=(2e-4, 4e-4),
        model="tiny",
        rewards=HACKABLE,
    ),
    "clipping, 8 updates": Choice(
        arms={"clipped": {"epsilon": 0.2}, "not clipped": {"epsilon": OFF}},
        base={"max_steps": 8, "prompts_per_step": 8, "num_iterations": 8},
        rates=(1e-3,),
        model="tiny",
    ),
    "length": Choice(
        arms={"GRPO": {"loss_type": "grpo"}, "Dr. GRPO": {"loss_type": "dr_grpo"}},
        base={"max_steps": 16, "prompts_per_step": 4, "max_completion_length": 128},
        rates=(2e-4, 4e-4),
        outcome="wrong_length",
        model="rambling",
    ),
    "group size": Choice(
        arms={f"G = {size}": {"num_generations": size, "prompts_per_step": 64 // size} for size in (2, 16)},
        base={"max_steps": 16},
        rates=(2e-4, 4e-4),
    ),
    "dynamic sampling": Choice(
        arms={
            "ties replaced": {"prompts_per_step": 16, "max_resamples": 4},
            "ties kept": {"prompts_per_step": 16},
            "ties kept, twice the prompts": {"prompts_per_step": 32},
        },
        base={"max_steps": 16, "num_generations": 4},
        rates=(2e-4, 4e-4),
    ),
    # Two factors, two levels each: GSPO's authors changed the ratio and the bound together, Dr. GRPO's the scaling and
    # the weights of the tokens. The bounds are those of PPO and of GSPO.
    "ratio and bound": Choice(
        arms={
            f"{level} ratio, {size} bound": {"importance_sampling_level": level, "epsilon": low, "epsilon_high": high}
            for level in ("token", "sequence")
            for size, low, high in (("wide", 0.2, 0.2), ("narrow", 3e-4, 4e-4))
        },
        base={"max_steps": 15, "num_iterations": 2, "loss_type": "grpo"},
        rates=(5e-5, 1e-4, 2e-4, 4e-4, 8e-4),
        model="tiny",
    ),
    "scaling and weights": Choice(
        arms={
            f"{weights}, {scaling}": {"loss_type": weights, "scale_rewards": scaling}
            for weights in ("grpo", "dr_grpo")
            for scaling in ("group", "none")
        },
        base={"max_steps": 15, "num_iterations": 2},
        rates=(1e-4, 2e-4, 4e-4, 8e-4),
        model="tiny",
    ),
}
FACTORIAL = ("ratio and bound", "scaling and weights")  # the effects of each factor are reported as well


@cache
def problems_of(model: str) -> dict[str, list[Problem]]:
    """Training, selection and held-out problems of a model, without a common problem."""
    if model == "halfway":
        splits = puzzle_splits()
        taken = frozenset(problem_key(problem) for part in splits.values() for problem in part)
        return {"train": splits["train"], "selection": make_puzzles(300, 3, taken), "heldout": splits["heldout"]}
    by_level = [load_problems(level, "train") for level in LEVELS]
    return {
        "train": [problem for part in by_level for problem in part[:-100]],
        "selection": [problem for part in by_level for problem in part[-100:]],
        "heldout": load_problems(LEVELS, "heldout", n=100),
    }


def rambling(problem: Problem, repeats: int) -> Problem:
    """Return the problem with a solution that repeats its first step and then guesses that step's result.

    >>> problem = Problem("?", "12", "basic", "2*3=6. 6*2=12. #### 12")
    >>> rambling(problem, 2).solution
    '2*3=6. 2*3=6. 2*3=6. #### 6'
    """
    first = problem.solution.split(" ")[0]
    guess = first.rstrip(".").split("=")[1]
    return replace(problem, solution=f"{first} " * (repeats + 1) + f"#### {guess}")


def policy(name: str) -> tuple:
    """Return a shipped model, or "rambling": `tiny` after 30 supervised steps, half of them on rambling guesses."""
    folder = MODELS / name
    if name != "rambling":
        return load_policy(name)
    if not folder.exists():
        model, tokenizer = load_policy("tiny")
        rng = random.Random(0)
        problems = problems_of("tiny")["train"][::4]
        mixed = problems + [rambling(problem, min(12, int(rng.expovariate(1 / 3)))) for problem in problems]
        for _ in finetune(model, tokenizer, mixed, SupervisedConfig(max_steps=30, learning_rate=3e-4)):
            pass
        save_policy(model, tokenizer, folder)
    return load_policy(folder)


def run(choice: Choice, arm: str, rate: float, seed: int, split: str) -> dict[str, Any]:
    """Train a fresh model and judge it on a split: one sampled answer for each problem."""
    started, cpu = time.perf_counter(), time.process_time()
    settings = {"max_completion_length": LENGTH, **choice.base, **choice.arms[arm]}
    config = GRPOConfig(learning_rate=rate, seed=seed, **settings)
    model, tokenizer = policy(choice.model)
    problems = problems_of(choice.model)
    history = list(train(model, tokenizer, problems["train"], choice.rewards, config))
    curves = {key: [round(metrics[key], 3) for metrics in history] for key in CURVES}
    curves["groups"] = [metrics.get("resampling/num_groups", config.prompts_per_step) for metrics in history]
    found = judge(model, tokenizer, problems[split], choice.rewards, config.max_completion_length)
    spent = {"seconds": round(time.perf_counter() - started, 1), "cpu_seconds": round(time.process_time() - cpu, 1)}
    return {**found, **curves, **spent}


def judge(model, tokenizer, problems: Sequence[Problem], rewards: Sequence[Callable], length: int) -> dict[str, Any]:
    """Accuracy, mean reward, and the mean number of tokens of wrong and of right answers."""
    found = evaluate(model, tokenizer, problems, max_completion_length=length, seed=1)
    ids = [
        [*row, tokenizer.eos_token_id] for row in tokenizer(found.completions, add_special_tokens=False)["input_ids"]
    ]
    scores = compute_rewards(
        rewards,
        prompts=found.prompts,
        completions=found.completions,
        completion_ids=ids,
        answer=[problem.answer for problem in problems],
    )
    lengths = {False: [], True: []}
    for row, correct in zip(ids, found.correct, strict=True):
        lengths[bool(correct)].append(min(len(row), length))
    return {
        "bits": bits(found.correct),
        "accuracy": found.accuracy,
        "mean_reward": combine_rewards(scores).mean().item(),
        "wrong_length": mean(lengths[False] or [0]),
        "right_length": mean(lengths[True] or [0]),
    }


def best_rate(ledger: Ledger, name: str, arm: str) -> float:
    """Return the rate of the grid with the highest mean reward on selection problems; of equals, the lowest."""
    if len(CHOICES[name].rates) == 1:
        return CHOICES[name].rates[0]
    rows = {rate: ledger.find(phase="select", choice=name, arm=arm, rate=rate) for rate in CHOICES[name].rates}
    return max(rows, key=lambda rate: (rows[rate]["mean_reward"], -rate))


def study(ledger: Ledger, name: str) -> None:
    """Run what is missing of a choice: first the selection, then the reported runs, seed by seed."""
    choice = CHOICES[name]
    for rate in choice.rates if len(choice.rates) > 1 else ():  # of one rate there is nothing to select
        for arm in choice.arms:
            values = {"phase": "select", "choice": name, "arm": arm, "rate": rate}
            if ledger.late:
                return
            if ledger.wants(**values):
                ledger.add(**values, seed=SELECTION_SEED, **run(choice, arm, rate, SELECTION_SEED, "selection"))
                print(values, f"reward {ledger.rows[-1]['mean_reward']:.3f}", flush=True)
    for seed in SEEDS:
        for arm in choice.arms:
            rate = best_rate(ledger, name, arm)
            values = {"phase": "report", "choice": name, "arm": arm, "rate": rate, "seed": seed}
            if ledger.late:
                return
            if ledger.wants(**values):
                ledger.add(**values, **run(choice, arm, rate, seed, "heldout"))
                print(values, f"{choice.outcome} {ledger.rows[-1][choice.outcome]:.3f}", flush=True)


def comparison(ledger: Ledger, name: str, rates: Mapping[str, float]) -> dict[str, Any]:
    """Return each arm's outcome at its rate, and the first arm minus each other, paired by seed.

    Of a choice whose runs are not complete, the seeds that all arms have are compared.
    """
    choice = CHOICES[name]
    rows = {
        arm: {row["seed"]: row for row in ledger.select(phase="report", choice=name, arm=arm, rate=rates[arm])}
        for arm in choice.arms
    }
    seeds = sorted(set.intersection(*(set(by_seed) for by_seed in rows.values())))
    found: dict[str, Any] = {"seeds": seeds, "rates": dict(rates), "arms": {}, "differences": {}}
    for arm in choice.arms:
        values = {key: [rows[arm][seed][key] for seed in seeds] for key in OUTCOMES}
        found["arms"][arm] = {key: {"each": each, **estimate(each)} for key, each in values.items()}
    first, *others = choice.arms
    for other in others:
        pairs = [(rows[first][seed], rows[other][seed]) for seed in seeds]
        changed = change(*([pair[i]["bits"] for pair in pairs] for i in (1, 0)))
        found["differences"][f"{first} minus {other}"] = {
            **{key: estimate([one[key] - two[key] for one, two in pairs]) for key in OUTCOMES},
            **{key: changed[key] for key in ("over seeds and problems", "p_value")},
        }
    if name in FACTORIAL:
        found["factors"] = factors(rows, seeds)
    return found


def factors(rows: Mapping[str, Mapping[int, dict[str, Any]]], seeds: Sequence[int]) -> dict[str, Any]:
    """Two factors of two levels each: what each changes in accuracy, the mean over the levels of the other.

    "A minus B, C" is the same at one level of the other factor, and "interaction" the difference of these two.

    rows: arm, named "level of the first factor, level of the second" → seed → its run.
    """
    found = {}
    for place in (0, 1):
        one, two = dict.fromkeys(arm.split(", ")[place] for arm in rows)
        sides = {  # level → for each seed the answers, 0 to 1, the mean over the levels of the other factor
            level: np.mean(
                [
                    [ones(by_seed[seed]["bits"]) for seed in seeds]
                    for arm, by_seed in rows.items()
                    if arm.split(", ")[place] == level
                ],
                axis=0,
            ).tolist()
            for level in (one, two)
        }
        found[f"{one} minus {two}"] = vars(crossed_bootstrap(sides[two], sides[one]))
    one, two = dict.fromkeys(arm.split(", ")[0] for arm in rows)
    other_levels = dict.fromkeys(arm.split(", ")[1] for arm in rows)
    effects = []  # of the first factor, at each level of the second: (seeds, problems)
    for level in other_levels:
        first, second = ([ones(rows[f"{own}, {level}"][seed]["bits"]) for seed in seeds] for own in (one, two))
        found[f"{one} minus {two}, {level}"] = vars(crossed_bootstrap(second, first))
        effects.append((np.asarray(first, dtype=float) - np.asarray(second, dtype=float)).tolist())
    found["interaction"] = vars(crossed_bootstrap(effects[1], effects[0]))
    return found


# difference → a study that was stored before, and two of its arms, which ran on five seeds at one rate
STORED = {
    "GRPO minus GSPO (ratio and bound differ)": ("objectives", "GRPO", "GSPO"),
    "Dr. GRPO minus GRPO": ("objectives", "Dr. GRPO", "GRPO"),
    "DAPO minus GRPO": ("objectives", "DAPO", "GRPO"),
    "CISPO minus GRPO": ("objectives", "CISPO", "GRPO"),
    "G = 8 minus G = 2, 128 completions": ("advantages", "group", "group, G = 2"),
    "G = 8 minus G = 2, 64 completions": ("broken_runs", "healthy", "32 × 2"),
    "group minus batch scaling": ("advantages", "group", "batch"),
}


def stored_differences() -> dict[str, Any]:
    """Return the same for arms that earlier studies ran at one rate for all, on the 300 held-out word problems."""
    found = {}
    for name, (study_name, first, second) in STORED.items():
        runs = json.loads((RESULTS / f"{study_name}.json").read_text(encoding="utf-8"))["runs"]
        shares: dict[str, dict[int, float]] = {first: {}, second: {}}
        for row in runs:
            arm = row.get("name", row.get("arm"))
            if arm in shares:
                shares[arm][row["seed"]] = row.get("after", row.get("accuracy"))["accuracy"]
        pairs = [(shares[first][seed], shares[second][seed]) for seed in SEEDS]
        found[name] = {
            "study": study_name,
            "arms": {first: mean(one for one, _ in pairs), second: mean(two for _, two in pairs)},
            **estimate([one - two for one, two in pairs]),
        }
    return found


def summary(ledger: Ledger) -> dict[str, Any]:
    """Return every choice of which at least two seeds are complete: what was selected, and the comparison."""
    found: dict[str, Any] = {}
    for name, choice in CHOICES.items():
        reported = [{row["seed"] for row in ledger.select(phase="report", choice=name, arm=arm)} for arm in choice.arms]
        if len(set.intersection(*reported)) < 2:
            continue
        rates = {arm: best_rate(ledger, name, arm) for arm in choice.arms}
        selection = {
            arm: {str(row["rate"]): row["mean_reward"] for row in ledger.select(phase="select", choice=name, arm=arm)}
            for arm in choice.arms
        }
        setting = {"outcome": choice.outcome, "base": choice.base, "settings": choice.arms, "selection": selection}
        found[name] = {**setting, **comparison(ledger, name, rates)}
    return found


def main() -> int:
    """Run what is missing and write the summary."""
    parser = ledger_options(COMMAND, __doc__)
    parser.add_argument("--choices", nargs="+", choices=tuple(CHOICES), default=tuple(CHOICES), help="only these")
    options = parser.parse_args()
    ledger = Ledger(LEDGER, options.minutes)
    for name in options.choices:
        study(ledger, name)
    save(LEDGER.with_suffix(".json"), COMMAND, {"choices": summary(ledger), "stored": stored_differences()})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
