"""When do samples from another policy hurt: ``python -m benchmarks.other_policy``.

The protocol is benchmarks/studies/other_policy.md. The model `tiny` is trained on samples of its own, of a 4-bit copy
with one scale per matrix, or of its own weights some steps ago; with and without the correction by importance weights,
or with the clipped ratio against the sampler instead. Every arm is trained at two learning rates. Each run is one line
of ``benchmarks/results/other_policy.jsonl``.
``--minutes 20`` starts no run after 20 minutes. The same command continues where it stopped, and ``other_policy.json``
holds the summary of the runs so far. Three arms were trained by grpo_edu 0.3.0 with weights per completion or masked
weights, which this version does not have; their stored runs stay in the summary.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from torch import Tensor

from benchmarks.harness import RESULTS, Ledger, bits, change, estimate, exit_code, ledger_options, save, share
from grpo_edu import LEVELS, GRPOConfig, accuracy_reward, evaluate, load_policy, load_problems, train
from grpo_edu.problems.templates import Problem
from grpo_edu.trainer import Stages, Update, optimizer_step

COMMAND = "python -m benchmarks.other_policy"
LEDGER = RESULTS / "other_policy.jsonl"
BASE = {"max_steps": 20, "prompts_per_step": 8, "num_generations": 8}
RATES = (3e-4, 1e-3)
LOW, HIGH = RATES  # every arm is reported at the high rate, and the own samples at the low one as well
SEEDS = (0, 1, 2, 3, 4)
SELECTION_SEED = 100

NAIVE = {"importance_sampling_correction": False}
FOUR_BITS = {"rollout_quantization": "int4-tensor"}
ARMS: dict[str, dict[str, Any]] = {
    "own samples": {},
    "4 bits, not corrected": {**FOUR_BITS, **NAIVE},
    "lag 8, not corrected": {"rollout_lag": 8, **NAIVE},
    "4 bits, token_truncate": FOUR_BITS,
    "lag 8, token_truncate": {"rollout_lag": 8},
    "lag 4, not corrected": {"rollout_lag": 4, **NAIVE},
    "lag 4, token_truncate": {"rollout_lag": 4},
    "lag 2, not corrected": {"rollout_lag": 2, **NAIVE},
    "lag 2, token_truncate": {"rollout_lag": 2},
    "lag 1, not corrected": {"rollout_lag": 1, **NAIVE},
    "lag 1, token_truncate": {"rollout_lag": 1},
    "4 bits, clipped ratio": {**FOUR_BITS, **NAIVE},
    "lag 8, clipped ratio": {"rollout_lag": 8, **NAIVE},
}
CLIPPED = tuple(arm for arm in ARMS if arm.endswith("clipped ratio"))  # added last, and reported at both rates
STORED = ("4 bits, sequence_mask", "4 bits, token_mask", "4 bits, sequence_truncate")  # of version 0.3.0
FIRST = 5  # so many arms come before the others
GAP, TOP = "sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max"
CURVES = (
    "reward",
    "grad_norm",
    "clip_ratio/region_mean",
    "frac_reward_zero_std",
    GAP,
    TOP,
    "sampling/importance_sampling_ratio/mean",
)


@cache
def problems_of(split: str) -> list[Problem]:
    """Training, selection and held-out problems of the three levels, without a common problem."""
    if split == "heldout":
        return load_problems(LEVELS, "heldout", n=100)
    by_level = [load_problems(level, "train") for level in LEVELS]
    return [problem for part in by_level for problem in (part[-100:] if split == "selection" else part[:-100])]


def rounded(value: float | None) -> float | None:
    """Return a value in four digits; None if a step had no such value, because all of its groups tied."""
    return None if value is None else round(value, 4)


def step_against_sampler(update: Update, micro_batches: Sequence[Tensor]) -> tuple[dict[str, float], Tensor]:
    """Take an optimizer step whose ratio π/π_old, which is clipped, has the sampler in place of π_old."""
    sampled = update.batch.rollout.sampling_per_token_logps
    return optimizer_step(replace(update, old_per_token_logps=sampled), micro_batches)


def run(arm: str, rate: float, seed: int, split: str) -> dict[str, Any]:
    """Train a fresh model and judge it: one answer to each problem, sampled by the policy itself."""
    cpu = time.process_time()
    model, tokenizer = load_policy("tiny")
    config = GRPOConfig(**BASE, **ARMS[arm], learning_rate=rate, seed=seed)
    stages = Stages(optimizer_step=step_against_sampler) if arm in CLIPPED else None
    history = list(train(model, tokenizer, problems_of("train"), accuracy_reward, config, stages=stages))
    found = evaluate(model, tokenizer, problems_of(split), seed=1)
    return {
        "bits": bits(found.correct),
        "curves": {key: [rounded(row.get(key)) for row in history] for key in CURVES if key in history[0]},
        "cpu_seconds": round(time.process_time() - cpu, 1),
    }


def best_rate(ledger: Ledger, arm: str) -> float | None:
    """Return the rate with the best accuracy on selection problems, of equals the lowest; None if one is missing."""
    rows = {rate: ledger.find(phase="select", arm=arm, rate=rate) for rate in RATES}
    if None in rows.values():
        return None
    return max(rows, key=lambda rate: (share(rows[rate]["bits"]), -rate))


def missing(ledger: Ledger) -> Iterator[dict[str, Any]]:
    """Yield the runs of the study, the arms that matter most first.

    First the own samples at the low rate, the comparator of the arms whose best rate this is. Then of each half: the
    selection, then all arms at the high rate, seed by seed, then at their own best rates. Last the clipped ratio at the
    low rate.
    """
    for seed in SEEDS:
        yield {"phase": "report", "arm": "own samples", "rate": LOW, "seed": seed}
    for arms in (list(ARMS)[:FIRST], list(ARMS)[FIRST:]):
        for arm in arms:
            for rate in RATES:
                yield {"phase": "select", "arm": arm, "rate": rate, "seed": SELECTION_SEED}
        for chooses in (False, True):
            for seed in SEEDS:
                for arm in arms:
                    rate = best_rate(ledger, arm) if chooses else HIGH
                    yield {"phase": "report", "arm": arm, "rate": rate, "seed": seed}
    for seed in SEEDS:
        for arm in CLIPPED:
            yield {"phase": "report", "arm": arm, "rate": LOW, "seed": seed}


def compare(rows: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Runs minus other runs of the same seeds."""
    return change(*([row["bits"] for row in side] for side in (others, rows)))


def at_rates(ledger: Ledger, rates: dict[str, float]) -> dict[str, Any]:
    """Return each arm at its rate: accuracy, differences, mismatch; on the seeds that the first arms all have.

    An arm that lacks one of these seeds is left out, and so is everything while there are fewer than two seeds.
    """
    by_arm = {
        arm: {row["seed"]: row for row in ledger.select(phase="report", arm=arm, rate=rate)}
        for arm, rate in rates.items()
    }
    seeds = [seed for seed in SEEDS if all(seed in by_arm.get(arm, {}) for arm in list(ARMS)[:FIRST])]
    if len(seeds) < 2:
        return {}
    rows = {
        arm: [by_seed[seed] for seed in seeds] for arm, by_seed in by_arm.items() if not set(seeds) - by_seed.keys()
    }
    found: dict[str, Any] = {"seeds": seeds}
    for arm, own in rows.items():
        each = [share(row["bits"]) for row in own]
        found[arm] = {"rate": rates[arm], "each": each, **estimate(each)}
        if GAP in own[0]["curves"]:
            gaps = [row["curves"][GAP] for row in own]
            steps = [[gap for gap in column if gap is not None] for column in zip(*gaps, strict=True)]
            found[arm]["mismatch"] = [sum(column) / len(column) if column else None for column in steps]
        found[arm]["reward"] = [
            sum(column) / len(column) for column in zip(*(row["curves"]["reward"] for row in own), strict=True)
        ]
        if arm != "own samples" and "own samples" in rows:
            found[arm]["minus own samples"] = compare(own, rows["own samples"])
        naive = f"{arm.split(',')[0]}, not corrected"
        if naive in rows and arm != naive and arm != "own samples":
            found[arm]["minus not corrected"] = compare(own, rows[naive])
    return found


def summary(ledger: Ledger) -> dict[str, Any]:
    """Return the selection, and the arms at the high rate and at their own best rates."""
    arms = (*ARMS, *STORED)
    selected = {
        arm: {f"{row['rate']:g}": share(row["bits"]) for row in ledger.select(phase="select", arm=arm)} for arm in arms
    }
    best = {arm: rate for arm in arms if (rate := best_rate(ledger, arm)) is not None}
    return {
        "selection": {arm: found for arm, found in selected.items() if found},
        "at the high rate": at_rates(ledger, dict.fromkeys(arms, HIGH)),
        "at the best rate": at_rates(ledger, best),
        "at the low rate": at_rates(ledger, dict.fromkeys(arms, LOW)),
    }


def verdicts(found: dict[str, Any]) -> dict[str, bool]:
    """Return the statements of the study, written before its reported runs; each is about accuracy at the high rate.

    Below and above mean that the interval over seeds and problems excludes 0.
    """
    arms = found["at the high rate"]
    judged: dict[str, bool] = {}
    if arms.get("seeds") != list(SEEDS):
        return judged  # a statement about five seeds is not judged on fewer
    for kind in ("4 bits", "lag 8", "lag 4"):
        naive, corrected = f"{kind}, not corrected", f"{kind}, token_truncate"
        if naive in arms:
            low = arms[naive]["minus own samples"]["over seeds and problems"]["high"] < 0
            judged[f"{kind}: without the correction the policy ends below the one with its own samples"] = low
        if corrected in arms:
            high = arms[corrected]["minus not corrected"]["over seeds and problems"]["low"] > 0
            judged[f"{kind}: with token_truncate it ends above the one without the correction"] = high
    return judged


def main() -> int:
    """Run what is missing; exit 1 if a statement does not hold."""
    ledger = Ledger(LEDGER, ledger_options(COMMAND, __doc__).parse_args().minutes)
    for values in missing(ledger):
        if ledger.wants(**values):
            split = "selection" if values["phase"] == "select" else "heldout"
            ledger.add(**values, **run(values["arm"], values["rate"], values["seed"], split))
            print(f"{values}: {share(ledger.rows[-1]['bits']):.1%}", flush=True)
    found = summary(ledger)
    judged = verdicts(found)
    save(LEDGER.with_suffix(".json"), COMMAND, {"verdicts": judged, **found})
    return exit_code(judged)


if __name__ == "__main__":
    raise SystemExit(main())
