"""Rewards that never see the answer: ``python -m benchmarks.spurious``.

The protocol is benchmarks/studies/spurious.md. Four rewards train two models: whether the answer is correct, whether it
is the most frequent one of its group, whether its form is right, and a coin flip. `tiny` chooses between two habits, of
which one is reliable; `halfway` has half learned ten kinds of puzzles. Before training, the same rewards score samples
of the untrained model, which shows which answers the first update would favor.

Each run is one line of ``benchmarks/results/spurious.jsonl``. ``--minutes 20`` starts no run after 20 minutes. The same
command continues where it stopped, and ``spurious.json`` holds the summary of the runs so far.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from statistics import mean
from typing import Any

import torch

from benchmarks.choices import problems_of
from benchmarks.harness import RESULTS, Ledger, bits, change, ledger_options, save, save_picture, share
from grpo_edu import (
    Evaluation,
    GRPOConfig,
    accuracy_reward,
    evaluate,
    extract_answer,
    format_reward,
    generate,
    group_advantages,
    load_policy,
    render_prompt,
    train,
)
from grpo_edu.problems.equations import check_equations

COMMAND = "python -m benchmarks.spurious"
LEDGER = RESULTS / "spurious.jsonl"
MODELS = ("tiny", "halfway")
REWARDS = ("accuracy", "majority", "format", "random")
REPORTED = {"tiny": REWARDS, "halfway": ("majority", "accuracy")}  # the others were left out to save computing time
RATES = (1e-4, 4e-4)
STEPS, PROMPTS, GENERATIONS = 20, 8, 8
LENGTH, HELDOUT, PROBED = 96, 300, 100
SELECTION_SEED, SEEDS = 100, (0, 1, 2, 3, 4)


def majority_reward(completions: Sequence, prompts: Sequence, **kwargs: Any) -> list[float]:
    """1.0 if the answer is the most frequent one among the completions of the same prompt, else 0.0.

    A completion without an answer gets 0.0 and has no vote. Of equally frequent answers the first one counts.

    >>> majority_reward(["#### 4", "#### 5", "#### 5", "5"], prompts=["2 + 2?"] * 4)
    [0.0, 1.0, 1.0, 0.0]
    """
    answers = [extract_answer(completion) for completion in completions]
    votes: dict[Any, Counter] = {}
    for prompt, answer in zip(prompts, answers, strict=True):
        if answer is not None:
            votes.setdefault(str(prompt), Counter())[answer] += 1
    winners = {prompt: counts.most_common(1)[0][0] for prompt, counts in votes.items()}
    return [
        float(answer is not None and answer == winners[str(prompt)])
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def random_reward(seed: int) -> Callable[..., list[float]]:
    """Return a reward function that flips a coin for each completion."""
    rng = random.Random(seed)

    def coin_reward(completions: Sequence, **kwargs: Any) -> list[float]:
        return [float(rng.random() < 0.5) for _ in completions]

    return coin_reward


def reward_of(name: str, seed: int) -> Callable:
    """Return the reward function of a name of `REWARDS`."""
    if name == "random":
        return random_reward(seed)
    return {"accuracy": accuracy_reward, "majority": majority_reward, "format": format_reward}[name]


@cache
def heldout(model: str) -> tuple:
    """Return the 300 held-out problems of a model."""
    return tuple(problems_of(model)["heldout"][:HELDOUT])


def parts(found: Evaluation) -> dict[str, Any]:
    """Return a 1 or 0 for each problem, and the shares of completions that have an answer and that have equations."""
    answered = sum(answer is not None for answer in found.answers) / found.n
    return {"bits": bits(found.correct), "answered": answered, "worked": found.worked_share}


def run(model_name: str, reward: str, rate: float, seed: int, report: bool) -> dict[str, Any]:
    """Train a fresh model; of a reported run, also its answers to the held-out problems."""
    cpu = time.process_time()
    policy, history = trained(model_name, reward, rate, seed)
    found: dict[str, Any] = {"reward": [round(step["reward"], 3) for step in history]}
    if report:
        found |= judged(*policy, model_name, seed)
    return found | {"cpu_seconds": round(time.process_time() - cpu, 1)}


def trained(model_name: str, reward: str, rate: float, seed: int) -> tuple[tuple[Any, Any], list[dict[str, Any]]]:
    """Return a fresh model after its training run with its tokenizer, and the metrics of the steps."""
    model, tokenizer = load_policy(model_name)
    config = GRPOConfig(
        max_steps=STEPS,
        prompts_per_step=PROMPTS,
        num_generations=GENERATIONS,
        learning_rate=rate,
        seed=seed,
        max_completion_length=LENGTH,
    )
    problems = problems_of(model_name)["train"]
    history = list(train(model, tokenizer, problems, reward_of(reward, seed), config))
    return (model, tokenizer), history


def judged(model: Any, tokenizer: Any, model_name: str, seed: int) -> dict[str, Any]:
    """Return one sampled answer to each held-out problem; every seed draws its own samples."""
    problems = heldout(model_name)
    return parts(evaluate(model, tokenizer, problems, max_completion_length=LENGTH, batch_size=100, seed=1000 + seed))


def probe(model_name: str) -> dict[str, Any]:
    """Return what each reward favors among 8 samples of each of 100 selection problems, before any training.

    "favors correct" is the mean of advantage × correct: what the first update would do to the accuracy if every
    completion could change by itself. "favors worked" is the same for completions with equations.
    "majority is correct" is the share of groups whose most frequent answer is correct.
    """
    model, tokenizer = load_policy(model_name)
    problems = problems_of(model_name)["selection"][:PROBED]
    prompts = [render_prompt(tokenizer, problem.prompt) for problem in problems]
    rollout = generate(
        model,
        tokenizer,
        prompts,
        num_generations=GENERATIONS,
        max_completion_length=LENGTH,
        generator=torch.Generator().manual_seed(SELECTION_SEED),
    )
    columns = {
        "prompts": [problem.prompt for problem in problems for _ in range(GENERATIONS)],
        "answer": [problem.answer for problem in problems for _ in range(GENERATIONS)],
    }
    correct = torch.tensor(accuracy_reward(rollout.completions, **columns))
    worked = torch.tensor([float(bool(check_equations(text))) for text in rollout.completions])
    found: dict[str, Any] = {"correct": correct.mean().item(), "worked": worked.mean().item()}
    found["correct if worked"] = (correct * worked).sum().item() / worked.sum().item()
    found["correct if not"] = (correct * (1 - worked)).sum().item() / max(1.0, (1 - worked).sum().item())
    votes = torch.tensor(majority_reward(rollout.completions, **columns))
    groups = (votes * correct).view(-1, GENERATIONS).amax(dim=1)
    found["majority is correct"] = groups.mean().item()
    for name in REWARDS:
        rewards = torch.tensor(reward_of(name, SELECTION_SEED)(rollout.completions, **columns))
        advantages = group_advantages(rewards, GENERATIONS)
        found[name] = {
            "favors correct": (advantages * correct).mean().item(),
            "favors worked": (advantages * worked).mean().item(),
        }
    return found


def best_rate(ledger: Ledger, model: str, reward: str) -> float:
    """Return the rate whose last five steps have the highest mean of the reward trained on; of equals, the lowest.

    A coin flip selects nothing, so the random reward takes the rate of the accuracy reward.
    """
    if reward == "random":
        return best_rate(ledger, model, "accuracy")
    rows = [ledger.find(phase="select", model=model, arm=reward, rate=rate) for rate in RATES]
    return max(rows, key=lambda row: (round(mean(row["reward"][-5:]), 6), -row["rate"]))["rate"]


def study(ledger: Ledger, models: Sequence[str]) -> None:
    """Run what is missing: the untrained models, the selection of the rates, and the reported runs seed by seed."""
    for model in models:
        if ledger.wants(phase="probe", model=model):
            ledger.add(phase="probe", model=model, **probe(model))
        for seed in SEEDS:
            if ledger.wants(phase="before", model=model, seed=seed):
                ledger.add(phase="before", model=model, seed=seed, **judged(*load_policy(model), model, seed))
    for model in models:
        for reward in REWARDS[:-1]:
            for rate in RATES:
                key = {"phase": "select", "model": model, "arm": reward, "rate": rate, "seed": SELECTION_SEED}
                if ledger.wants(**key):
                    ledger.add(**key, **run(model, reward, rate, SELECTION_SEED, report=False))
                    print(key, f"reward {mean(ledger.rows[-1]['reward'][-5:]):.3f}", flush=True)
    for seed in SEEDS:
        for model in models:
            for reward in REPORTED[model]:
                if ledger.late:
                    return
                rate = best_rate(ledger, model, reward)
                key = {"phase": "report", "model": model, "arm": reward, "rate": rate, "seed": seed}
                if ledger.wants(**key):
                    ledger.add(**key, **run(model, reward, rate, seed, report=True))
                    print(key, f"accuracy {share(ledger.rows[-1]['bits']):.3f}", flush=True)


def add_random(ledger: Ledger) -> None:
    """Added after the result: the coin flip on `tiny` at the lowest rate of the grid."""
    for seed in SEEDS:
        key = {"phase": "added", "model": "tiny", "arm": "random", "rate": RATES[0], "seed": seed}
        if ledger.wants(**key):
            ledger.add(**key, **run("tiny", "random", RATES[0], seed, report=True))
            print(key, f"accuracy {share(ledger.rows[-1]['bits']):.3f}", flush=True)


def look_at_coins(ledger: Ledger) -> None:
    """Added after the result: does the coin flip make `tiny` more certain, and would that alone raise its accuracy?

    The reported runs are repeated for the entropy of their steps (mean −log π of the sampled tokens) and for the greedy
    accuracy at their end. The untrained model answers greedily and, for each seed, at temperature 0.5.
    """

    def solved(policy: tuple[Any, Any], temperature: float, seed: int = 0) -> str:
        settings = {"max_completion_length": LENGTH, "batch_size": 100, "seed": 1000 + seed}
        return bits(evaluate(*policy, heldout("tiny"), temperature=temperature, **settings).correct)

    start = load_policy("tiny")
    if ledger.wants(phase="coins", seed=None):
        ledger.add(
            phase="coins", seed=None, greedy=solved(start, 0), colder=[solved(start, 0.5, seed) for seed in SEEDS]
        )
    for seed in SEEDS:
        if ledger.wants(phase="coins", seed=seed):
            policy, history = trained("tiny", "random", best_rate(ledger, "tiny", "random"), seed)
            entropy = [round(step["entropy"], 4) for step in history]
            ledger.add(
                phase="coins", seed=seed, entropy=entropy, greedy=solved(policy, 0), bits=solved(policy, 1.0, seed)
            )
            print("coins", seed, f"entropy {entropy[0]} to {entropy[-1]}", flush=True)


def summary(ledger: Ledger) -> dict[str, Any]:
    """For each model and reward: the change of the accuracy with its intervals, and what the reward favored before."""
    found: dict[str, Any] = {}
    for model in MODELS:
        before = {row["seed"]: row for row in ledger.select(phase="before", model=model)}
        rows = {
            reward: {row["seed"]: row for row in ledger.select(phase="report", model=model, arm=reward)}
            for reward in REPORTED[model]
        }
        seeds = sorted(set(before).intersection(*(set(runs) for runs in rows.values())))
        if len(seeds) < 2:
            continue
        start = ledger.find(phase="probe", model=model)
        found[model] = {"seeds": seeds, "before training": start | {"phase": "probe"}, "rewards": {}}
        for reward, runs in rows.items():
            one = before_and_after(before, runs, seeds)
            one["rate"] = runs[seeds[0]]["rate"]
            for name in ("answered", "worked"):
                one[name] = {
                    "before": mean(before[seed][name] for seed in seeds),
                    "after": mean(runs[seed][name] for seed in seeds),
                }
            one["favors correct, before training"] = start[reward]["favors correct"]
            one["favors worked, before training"] = start[reward]["favors worked"]
            found[model]["rewards"][reward] = one
        added = {row["seed"]: row for row in ledger.select(phase="added", model=model)}
        if len(added) > 1:
            found[model]["random at the lowest rate, added"] = before_and_after(before, added, sorted(added))
        found[model]["selection"] = {
            reward: {
                str(row["rate"]): mean(row["reward"][-5:])
                for row in ledger.select(phase="select", model=model, arm=reward)
            }
            for reward in REWARDS[:-1]
        }
    return found


def coins(ledger: Ledger) -> dict[str, Any]:
    """Entropy and greedy accuracy before and after the coin flips, and the untrained model at temperature 0.5."""
    untrained, runs = ledger.find(phase="coins", seed=None), [ledger.find(phase="coins", seed=seed) for seed in SEEDS]
    if untrained is None or None in runs:
        return {}
    return {
        "entropy of the first step": [row["entropy"][0] for row in runs],
        "entropy of the last five steps": [mean(row["entropy"][-5:]) for row in runs],
        "greedy": {"untrained": share(untrained["greedy"]), "after": [share(row["greedy"]) for row in runs]},
        "sampled after": [share(row["bits"]) for row in runs],
        "untrained at temperature 0.5": [share(row) for row in untrained["colder"]],
    }


def before_and_after(before: Mapping[int, Any], after: Mapping[int, Any], seeds: Sequence[int]) -> dict[str, Any]:
    """Return the accuracy of these seeds before and after, and the change with its intervals and McNemar's p-values."""
    old, new = ([rows[seed]["bits"] for seed in seeds] for rows in (before, after))
    return {"before": mean(map(share, old)), "after": [share(row) for row in new], **change(old, new)}


def picture(found: dict[str, Any]) -> Any:
    """Draw the change of the accuracy for each reward and model, with intervals over seeds and problems."""
    from grpo_edu.evaluation import Estimate
    from grpo_edu.figures.continual import estimates_figure

    changes = {
        model: {
            reward: Estimate(*(row["over seeds and problems"][key] for key in ("difference", "low", "high")))
            for reward, row in one["rewards"].items()
        }
        for model, one in found.items()
    }
    title = "What each reward does to the accuracy"
    return estimates_figure(changes, title=title, xlabel="change in points, with 95% intervals")


def main() -> int:
    """Run what is missing, and write the summary and its picture."""
    parser = ledger_options(COMMAND, __doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="only these")
    options = parser.parse_args()
    ledger = Ledger(LEDGER, options.minutes)
    study(ledger, options.models)
    if "tiny" in options.models:
        add_random(ledger)
        look_at_coins(ledger)
    found = summary(ledger)
    save(LEDGER.with_suffix(".json"), COMMAND, {"models": found, "coins": coins(ledger)})
    if found:
        save_picture(LEDGER, picture(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
