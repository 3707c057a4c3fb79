"""Twelve broken runs and their fixes on five seeds, for notebook 12: ``python -m benchmarks.broken_runs``.

Every arm of the study is a setup of `grpo_edu.studies.broken_runs`: a case's broken one, or the mended one that it is
compared with. A run trains the tiny model under its setup and then answers 300 held-out problems, sampled at
temperature 1, in the right way: it is the policy that is judged. Writes ``benchmarks/results/broken_runs.json`` and,
for the exercises, the curves among it as ``data/curves/broken_runs.json``; prints a table. With ``--arms`` or
``--seeds`` only these are run, and the others are kept as they are. ``--unlabelled`` trains each case on five other
seeds instead, for the exercise that asks for the faults, and writes ``data/curves/unlabelled_runs.json``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

from grpo_edu.checks.diagnosis_lab import STORED, TROUBLES, UNLABELLED, UNLABELLED_SEEDS, hide_name
from grpo_edu.evaluation import mcnemar
from grpo_edu.figures.faulty_runs import SIGNS
from grpo_edu.machine.hardware import machine
from grpo_edu.studies.broken_runs import CASES, HEALTHY, Setup, mended_arm

RESULTS = Path(__file__).resolve().parent / "results" / "broken_runs.json"
CURVES = RESULTS.parents[2] / "data" / "curves" / "broken_runs.json"
COMMAND = "python -m benchmarks.broken_runs"
SAMPLES = 6
# For the case of small groups: is it their size, or how many completions a step has? Questions × answers to each.
CONTROLS = {"1 × 8": (1, 8), "8 × 2": (8, 2), "32 × 2": (32, 2)}


def arms() -> dict[str, Setup]:
    """Name → setup of everything that is run: the broken, the mended, and the controls."""
    found = {"untrained": HEALTHY}
    for case in CASES:
        found[case.name] = case.broken
        found[mended_arm(case)] = case.mended
    for name, (questions, answers) in CONTROLS.items():
        found[name] = HEALTHY.with_config(prompts_per_step=questions, num_generations=answers)
    return found


def one_run(arm: str, seed: int) -> dict:
    """Train under an arm's setup ("untrained": not at all), then evaluate."""
    import torch

    from grpo_edu import LEVELS, evaluate, load_policy, load_problems
    from grpo_edu.studies.broken_runs import run

    torch.set_num_threads(1)  # the runs share the cores, and a sum does not depend on how many there are
    started = time.perf_counter()
    model, tokenizer = load_policy("tiny")
    setup = arms()[arm].with_config(seed=seed)
    history, texts = [], []
    if arm != "untrained":
        for metrics, batch in run(setup, model, tokenizer, load_problems(LEVELS, "train")):
            history.append(metrics)
            texts = batch.rollout.completions
    result = evaluate(model, tokenizer, load_problems(LEVELS, "heldout", n=100), seed=1)
    return {
        "arm": arm,
        "seed": seed,
        "accuracy": {"k": result.k, "n": result.n, "accuracy": result.accuracy, "low": result.low, "high": result.high},
        "correct": pack_bits(result.correct),
        "worked_share": round(result.worked_share, 4),
        "curves": {sign: [rounded(m[sign]) for m in history] for sign in SIGNS if history and sign in history[0]},
        "samples": texts[:: max(1, len(texts) // SAMPLES)][:SAMPLES] if seed == 0 else [],
        "seconds": round(time.perf_counter() - started, 1),
    }


def rounded(value: float) -> float:
    """Four significant digits.

    >>> rounded(0.123456), rounded(23.0625)
    (0.1235, 23.06)
    """
    return float(f"{value:.4g}")


def pack_bits(correct: list[bool]) -> str:
    """Return one hexadecimal digit for four problems, the first in the highest bit; the last digit is filled with 0.

    >>> pack_bits([True, False, False, True, True])
    '98'
    """
    bits = "".join("01"[bool(one)] for one in correct)
    return "".join(f"{int(bits[place : place + 4].ljust(4, '0'), 2):x}" for place in range(0, len(bits), 4))


def unpack_bits(text: str, count: int) -> list[bool]:
    """Return the inverse of `pack_bits` for `count` problems.

    >>> unpack_bits("98", 5)
    [True, False, False, True, True]
    """
    return [bit == "1" for digit in text for bit in f"{int(digit, 16):04b}"][:count]


def compare_case(runs: list[dict], broken: str, mended: str) -> dict:
    """Seed by seed: how many points of accuracy the mended run is ahead, and McNemar's p on the same problems."""
    table = {(run["arm"], run["seed"]): run for run in runs}
    seeds = sorted(seed for arm, seed in table if arm == broken and (mended, seed) in table)
    pairs = [(table[broken, seed], table[mended, seed]) for seed in seeds]
    answers = [[unpack_bits(run["correct"], run["accuracy"]["n"]) for run in pair] for pair in pairs]
    gains = [(right["accuracy"]["k"] - wrong["accuracy"]["k"]) / wrong["accuracy"]["n"] for wrong, right in pairs]
    p_values = [mcnemar(*pair).p_value for pair in answers]
    return {
        "broken": broken,
        "mended": mended,
        "gains": gains,
        "p_values": p_values,
        "verdict": verdict(gains, p_values),
    }


def verdict(gains: list[float], p_values: list[float]) -> str:
    """Return the verdict of all seeds together.

    "hurts on every seed": each is behind with p < 0.05. "hurts": at least half of the seeds are, none is ahead so.
    "no harm seen": no seed is behind so. Else "mixed".

    >>> verdict([0.3, 0.2], [0.001, 0.01]), verdict([0.02, -0.01], [0.5, 0.7])
    ('hurts on every seed', 'no harm seen')
    """
    behind = sum(gain > 0 and p < 0.05 for gain, p in zip(gains, p_values, strict=True))
    ahead = sum(gain < 0 and p < 0.05 for gain, p in zip(gains, p_values, strict=True))
    if behind == len(gains):
        return "hurts on every seed"
    if behind == 0:
        return "no harm seen"
    return "hurts" if 2 * behind >= len(gains) and ahead == 0 else "mixed"


def comparisons(runs: list[dict]) -> dict[str, dict]:
    """`compare_case` for each case and control that has a seed in both arms."""
    wanted = {case.name: (case.name, mended_arm(case)) for case in CASES} | {
        name: (name, "healthy") for name in CONTROLS
    }
    compared = {name: compare_case(runs, *pair) for name, pair in wanted.items()}
    return {name: row for name, row in compared.items() if row["gains"]}


def table(runs: list[dict], judged: dict[str, dict]) -> str:
    """Markdown: the mean accuracies of a case's two arms, with the lowest and the highest seed, and the verdict."""
    lines = ["| case | broken | mended | verdict |", "|---|---|---|---|"]
    for name, row in judged.items():
        cells = [_mean_and_range(runs, row[arm]) for arm in ("broken", "mended")]
        lines.append(f"| {name} | {' | '.join(cells)} | {row['verdict']} |")
    return "\n".join(lines)


def _mean_and_range(runs: list[dict], arm: str) -> str:
    shares = [run["accuracy"]["accuracy"] for run in runs if run["arm"] == arm]
    return f"{sum(shares) / len(shares):.0%} ({min(shares):.0%} … {max(shares):.0%})"


def model_digest() -> str:
    """Of the weights that all runs start from: runs of another model are not mixed in."""
    from grpo_edu.models import tiny_dir

    return hashlib.sha256((tiny_dir() / "model.safetensors").read_bytes()).hexdigest()[:16]


def study(names: list[str], seeds: list[int], workers: int) -> Iterator[dict]:
    """Yield all runs of these arms, several at a time, each as it ends."""
    todo = [(arm, seed) for arm in names for seed in ([0] if arm == "untrained" else seeds)]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(one_run, *task) for task in todo]):
            yield future.result()


def write(runs: list[dict], output: Path) -> dict[str, dict]:
    """Store the runs, one per line, with their comparisons, and return the comparisons."""
    order = {arm: place for place, arm in enumerate(arms())}
    runs.sort(key=lambda run: (order[run["arm"]], run["seed"]))
    judged = comparisons(runs)
    head = {"command": COMMAND, "model": model_digest(), "machine": machine(), "comparisons": judged}
    lines = ",\n".join(json.dumps(run, ensure_ascii=False) for run in runs)
    text = json.dumps(head, indent=1)[:-2] + f',\n "runs": [\n{lines}\n]\n}}\n'
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, encoding="utf-8")
    return judged


def curves(runs: list[dict]) -> dict[str, list[dict[str, list[float]]]]:
    """Return what the exercises show: arm → signs → one number per step, of each seed."""
    wanted = [arm for names in TROUBLES.values() for arm in names]
    return {
        arm: [{sign: run["curves"][sign] for sign in STORED} for run in runs if run["arm"] == arm] for arm in wanted
    }


def unlabelled_curves(fault: str) -> list[dict[str, list[float]]]:
    """Train a case on the seeds of the unlabelled runs, and return their curves in two digits."""
    import torch

    from grpo_edu import LEVELS, load_policy, load_problems
    from grpo_edu.studies.broken_runs import find, run

    torch.set_num_threads(1)
    found = []
    for seed in UNLABELLED_SEEDS:
        setup = find(fault).broken.with_config(seed=seed)
        history = [metrics for metrics, _ in run(setup, *load_policy("tiny"), load_problems(LEVELS, "train"))]
        found.append({sign: [float(f"{metrics[sign]:.2g}") for metrics in history] for sign in STORED})
    return found


def write_unlabelled(workers: int) -> None:
    """Train all cases on the seeds of the unlabelled runs, and store their curves."""
    names = [case.name for case in CASES]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        found = dict(zip(map(hide_name, names), pool.map(unlabelled_curves, names), strict=True))
    CURVES.with_name(UNLABELLED).write_text(json.dumps(found, sort_keys=True) + "\n", encoding="utf-8")


def main() -> int:
    """Run the study, or the named arms of it."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--arms", nargs="+", choices=list(arms()), default=list(arms()), metavar="ARM")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--workers", type=int, default=2, help="runs at a time, each on one core")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--unlabelled", action="store_true", help="train the unlabelled runs only")
    options = parser.parse_args()
    if options.unlabelled:
        write_unlabelled(options.workers)
        return 0
    kept = []
    if options.output.exists():
        stored = json.loads(options.output.read_text(encoding="utf-8"))
        if stored["model"] == model_digest():
            kept = stored["runs"]
    for run in study(options.arms, options.seeds, options.workers):
        kept = [old for old in kept if (old["arm"], old["seed"]) != (run["arm"], run["seed"])] + [run]
        judged = write(kept, options.output)  # at once, so that an interruption loses nothing
        print(f"{run['arm']}, seed {run['seed']}: {run['accuracy']['k']}/{run['accuracy']['n']} ({run['seconds']} s)")
    if options.output == RESULTS:
        CURVES.write_text(json.dumps(curves(kept)) + "\n", encoding="utf-8")
    print("\n" + table(kept, judged))
    return 0


if __name__ == "__main__":
    sys.exit(main())
