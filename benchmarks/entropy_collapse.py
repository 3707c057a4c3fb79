"""Does keeping the entropy keep pass@k?: ``python -m benchmarks.entropy_collapse``.

The protocol is benchmarks/studies/entropy_collapse.md. GRPO trains `halfway` on puzzles, and its entropy falls.
Five changes are compared with this plain run: a wider upper clip bound, an entropy bonus, a KL term, a lower rate with
more steps, and a higher temperature when the trained model answers. The strength of each is chosen among two on
another seed and other problems, by one rule for all arms. The outcomes are pass@1 and pass@32 on held-out puzzles, and
the entropy there. Two more arms change the rate alone and the steps alone, because the lower rate with more steps
changes both.

Each run is one line of ``benchmarks/results/entropy_collapse.jsonl``. ``--minutes 20`` starts no run after 20 minutes.
The same command continues where it stopped; ``entropy_collapse.json`` holds the summary of the runs so far.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.choices import problems_of
from benchmarks.harness import RESULTS, Ledger, estimate, ledger_options, left_by_holm, paired_p, save, save_picture
from grpo_edu import GRPOConfig, accuracy_reward, generate, load_policy, pass_at_k, render_prompt, save_policy, train
from grpo_edu.evaluation import crossed_bootstrap
from grpo_edu.metrics import masked_mean

COMMAND = "python -m benchmarks.entropy_collapse"
LEDGER = RESULTS / "entropy_collapse.jsonl"
MODELS = RESULTS.parents[1] / "runs" / "entropy_collapse"  # the plain models, for hotter sampling
MODEL = "halfway"
STEPS, PROMPTS, GENERATIONS, UPDATES = 12, 8, 8, 4  # with one update per batch no ratio leaves 1, so nothing is clipped
SAMPLES, KS, LENGTH = 32, (1, 2, 4, 8, 16, 32), 48
PARTS = {"selection": 100, "heldout": 300}  # problems
SELECTION_SEED, SEEDS = 100, (0, 1, 2, 3, 4)
RATES = (2e-4, 4e-4)
# arm → its two strengths, from weak to strong; all but "plain" have plain's chosen rate
GRIDS: dict[str, tuple[Any, ...]] = {
    "plain": RATES,
    "clip higher": (0.28, 1.0),  # epsilon_high; epsilon stays 0.2
    "entropy bonus": (0.01, 0.03),
    "KL term": (0.02, 0.1),
    "lower rate": ((4, 2), (2, 2)),  # the rate is divided by the first, the steps are multiplied by the second
    "hotter sampling": (1.2, 1.5),  # the temperature at which the plain model answers the problems afterwards
}
# What "lower rate" with its chosen strength consists of: the rate alone, and the steps alone.
PARTS_OF_LOWER_RATE = {"half rate": (2, 1), "twice the steps": (1, 2)}
CHANGES = tuple(GRIDS)[1:]  # the tested changes, each compared with "plain"
ARMS = (*GRIDS, *PARTS_OF_LOWER_RATE)


def config_of(arm: str, strength: Any, rate: Any, seed: int) -> GRPOConfig:
    """Return the settings of an arm. rate: the plain arm's; if the arm is "plain", the strength is the rate.

    >>> config = config_of("lower rate", (4, 2), 2e-4, seed=0)
    >>> config.learning_rate, config.max_steps
    (5e-05, 24)
    """
    divisor, factor = strength if arm in ("lower rate", *PARTS_OF_LOWER_RATE) else (1, 1)
    change = {
        "clip higher": {"epsilon_high": strength},
        "entropy bonus": {"entropy_coef": strength},
        "KL term": {"beta": strength},
    }.get(arm, {})
    return GRPOConfig(
        max_steps=STEPS * factor,
        prompts_per_step=PROMPTS,
        num_generations=GENERATIONS,
        num_iterations=UPDATES,
        learning_rate=strength if arm == "plain" else rate / divisor,
        max_completion_length=LENGTH,
        seed=seed,
        **change,
    )


@cache
def problems(part: str) -> tuple:
    """Return the problems of a part: "train", "selection" or "heldout"; the three have no problem in common."""
    return tuple(problems_of(MODEL)[part][: PARTS.get(part)])


def outcome(model: Any, tokenizer: Any, asked: Sequence, seed: int, temperature: float = 1.0) -> dict[str, Any]:
    """Return how many of 32 samples are right for each problem, and the entropy in nats per token.

    The entropy is the mean of −log π over the sampled tokens. All arms draw from the same random stream.
    """
    generator, counts, entropies = torch.Generator().manual_seed(1000 + seed), [], []
    for first in range(0, len(asked), 20):
        batch = asked[first : first + 20]
        prompts = [render_prompt(tokenizer, problem.prompt) for problem in batch]
        rollout = generate(
            model,
            tokenizer,
            prompts,
            num_generations=SAMPLES,
            max_completion_length=LENGTH,
            temperature=temperature,
            generator=generator,
        )
        answers = [problem.answer for problem in batch for _ in range(SAMPLES)]
        right = accuracy_reward(rollout.completions, answers)
        counts += [int(sum(right[at : at + SAMPLES])) for at in range(0, len(right), SAMPLES)]
        entropies.append(masked_mean(-rollout.sampling_per_token_logps, rollout.policy_mask))
    return {"counts": counts, "entropy": round(mean(entropies), 4)}


def run(arm: str, strength: Any, rate: Any, seed: int, part: str) -> dict[str, Any]:
    """Train a fresh model and sample from it; also the course of the training, and how often the clip stopped a token.

    "clipped high" is the share of tokens whose ratio was above the upper bound, with a positive advantage.
    """
    cpu = time.process_time()
    if arm == "hotter sampling":
        model, tokenizer = load_policy(folder(rate, seed))
        found = outcome(model, tokenizer, problems(part), seed, strength)
        return {**found, "cpu_seconds": round(time.process_time() - cpu, 1)}
    model, tokenizer = load_policy(MODEL)
    history = list(train(model, tokenizer, problems("train"), accuracy_reward, config_of(arm, strength, rate, seed)))
    if arm == "plain":
        save_policy(model, tokenizer, folder(strength, seed), overwrite=True)
    return {
        **outcome(model, tokenizer, problems(part), seed),
        "training entropy": [round(step["entropy"], 3) for step in history],
        "reward": [round(step["reward"], 3) for step in history],
        "clipped high": round(mean(step["clip_ratio/high_mean"] for step in history), 5),
        "clipped low": round(mean(step["clip_ratio/low_mean"] for step in history), 5),
        "cpu_seconds": round(time.process_time() - cpu, 1),
    }


def folder(rate: float, seed: int) -> Path:
    """Where the plain model of a rate and seed is kept for hotter sampling."""
    return MODELS / f"plain-{rate}-{seed}"


def pass_at(counts: Sequence[int], k: int) -> float:
    """Return the mean of pass@k over problems, from the number of right samples of each.

    >>> round(pass_at([0, 16], 1), 3), pass_at([0, 16], 32)
    (0.25, 0.5)
    """
    return mean(pass_at_k(SAMPLES, count, k) for count in counts)


def score(row: dict[str, Any]) -> float:
    """Return what the selection maximizes, for every arm: the mean of pass@1 and pass@32."""
    return (pass_at(row["counts"], 1) + pass_at(row["counts"], SAMPLES)) / 2


def chosen(ledger: Ledger, arm: str) -> Any:
    """Return the strength with the best score on the selection seed, of equals the first; None if a run is missing."""
    if arm in PARTS_OF_LOWER_RATE:
        return PARTS_OF_LOWER_RATE[arm]
    rows = [ledger.find(phase="select", arm=arm, strength=stored(strength)) for strength in GRIDS[arm]]
    scores = [score(row) for row in rows if row]
    if len(scores) < len(rows):
        return None
    return next(strength for strength, one in zip(GRIDS[arm], scores, strict=True) if one > max(scores) - 1e-9)


def stored(strength: Any) -> Any:
    """Return a strength as JSON keeps it."""
    return list(strength) if isinstance(strength, tuple) else strength


def study(ledger: Ledger) -> None:
    """Run what is missing: the selection, plain first, then the untrained model and every arm on the reported seeds."""
    for arm, grid in GRIDS.items():
        for strength in grid:
            key = {"phase": "select", "arm": arm, "strength": stored(strength), "seed": SELECTION_SEED}
            if ledger.wants(**key):
                ledger.add(**key, **run(arm, strength, chosen(ledger, "plain"), SELECTION_SEED, "selection"))
                show(ledger.rows[-1])
    for seed in SEEDS:
        if ledger.wants(phase="before", seed=seed):
            model, tokenizer = load_policy(MODEL)
            ledger.add(phase="before", seed=seed, **outcome(model, tokenizer, problems("heldout"), seed))
        for arm in ARMS:
            if ledger.late:
                return
            strength = chosen(ledger, arm)
            key = {"phase": "report", "arm": arm, "strength": stored(strength), "seed": seed}
            if ledger.wants(**key):
                ledger.add(**key, **run(arm, strength, chosen(ledger, "plain"), seed, "heldout"))
                show(ledger.rows[-1])


def show(row: dict[str, Any]) -> None:
    """Print what a run came to."""
    values = {f"pass@{k}": round(pass_at(row["counts"], k), 3) for k in (1, SAMPLES)}
    print(*(row[name] for name in ("phase", "arm", "strength", "seed", "entropy")), values, flush=True)


def compare(old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the change from `old` to `new` (one row per seed): of the entropy, and of pass@k for each k.

    pass@k has its interval over seeds and problems, and the p-value of Student's paired test over seeds.
    """
    found: dict[str, Any] = {"entropy": estimate([b["entropy"] - a["entropy"] for a, b in zip(old, new, strict=True)])}
    for k in KS:
        before, after = ([[pass_at_k(SAMPLES, c, k) for c in row["counts"]] for row in rows] for rows in (old, new))
        p_value = paired_p([mean(new) - mean(old) for old, new in zip(before, after, strict=True)])
        found[f"pass@{k}"] = vars(crossed_bootstrap(before, after)) | {"p_value": p_value}
    return found


def summary(ledger: Ledger) -> dict[str, Any]:
    """Return the selection, each arm's change from the untrained model and from plain, and what Holm's rule leaves."""
    before = {row["seed"]: row for row in ledger.select(phase="before")}
    runs = {arm: {row["seed"]: row for row in ledger.select(phase="report", arm=arm)} for arm in ARMS}
    seeds = sorted(set(before).intersection(*(set(rows) for rows in runs.values())))
    if len(seeds) < 2:
        return {}
    start, rows = [before[seed] for seed in seeds], {arm: [runs[arm][seed] for seed in seeds] for arm in ARMS}
    found: dict[str, Any] = {"seeds": seeds, "before": described(start), "arms": {}}
    for arm in ARMS:
        one = {"strength": rows[arm][0]["strength"], **described(rows[arm]), "minus before": compare(start, rows[arm])}
        if arm != "plain":
            one["minus plain"] = compare(rows["plain"], rows[arm])
        for name in ("clipped high", "clipped low", "cpu_seconds"):
            if name in rows[arm][0]:
                one[name] = mean(row[name] for row in rows[arm])
        found["arms"][arm] = one
    found["left by Holm"] = holm({arm: found["arms"][arm]["minus plain"] for arm in CHANGES})
    found["selection"] = {
        arm: {
            str(row["strength"]): {"score": score(row), "entropy": row["entropy"]}
            for row in ledger.select(phase="select", arm=arm)
        }
        for arm in GRIDS
    }
    found["rate and steps"] = {
        "half the rate, 12 steps": compare(rows["plain"], rows["half rate"]),
        "half the rate, 24 steps": compare(rows["twice the steps"], rows["lower rate"]),
        "24 steps, full rate": compare(rows["plain"], rows["twice the steps"]),
        "24 steps, half the rate": compare(rows["half rate"], rows["lower rate"]),
    }
    found["rate and steps, left by Holm"] = holm(found["rate and steps"])
    return found


def described(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the means over seeds of the entropy and of pass@k."""
    values = {f"pass@{k}": mean(pass_at(row["counts"], k) for row in rows) for k in KS}
    return {"entropy": mean(row["entropy"] for row in rows), **values}


def holm(comparisons: dict[str, Any]) -> list[str]:
    """Of the tests of pass@1 and pass@32 in these comparisons, those with p < 0.05 after Holm's correction."""
    names = ("pass@1", f"pass@{SAMPLES}")
    return left_by_holm({f"{one}, {name}": row[name]["p_value"] for one, row in comparisons.items() for name in names})


def picture(found: dict[str, Any]) -> Any:
    """Draw the difference of each arm from plain in pass@1 and pass@32, with intervals over seeds and problems."""
    from grpo_edu.evaluation import Estimate
    from grpo_edu.figures.continual import estimates_figure

    rows = {
        name: {
            arm: Estimate(*(row["minus plain"][name][key] for key in ("difference", "low", "high")))
            for arm, row in found["arms"].items()
            if "minus plain" in row
        }
        for name in ("pass@1", f"pass@{SAMPLES}")
    }
    return estimates_figure(
        rows, title="What each change does to pass@k", xlabel="difference from plain GRPO in points, with 95% intervals"
    )


def main() -> int:
    """Run what is missing, and write the summary and its picture."""
    ledger = Ledger(LEDGER, ledger_options(COMMAND, __doc__).parse_args().minutes)
    study(ledger)
    found = summary(ledger)
    if found:
        save(LEDGER.with_suffix(".json"), COMMAND, found)
        save_picture(LEDGER, picture(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
