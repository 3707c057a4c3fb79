"""Quantized rollouts on five seeds: ``python -m benchmarks.quantized_rollouts``.

Each seed trains the tiny model with the settings of the default run. Either the policy itself samples, or an int8
copy of it, whose mismatch is corrected by truncated importance sampling, or is not. All are judged in float32 on the
same 300 held-out problems. Writes ``benchmarks/results/quantized_rollouts.json`` after every run;
started again, it continues from there.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import RESULTS, exit_code, markdown, save

COMMAND = "python -m benchmarks.quantized_rollouts"
CONDITIONS = {
    "float32": {},
    "int8, corrected": {"rollout_quantization": "int8-dynamic"},
    "int8, uncorrected": {"rollout_quantization": "int8-dynamic", "importance_sampling_correction": False},
}
MISMATCH = "sampling/sampling_logp_difference/mean"
CURVES = ("reward", "step_time", MISMATCH, "sampling/importance_sampling_ratio/mean")
MARGIN = 0.05  # an accuracy within five points counts as reached


def run_one(condition: str, seed: int) -> dict:
    """Train and judge one policy."""
    from grpo_edu import LEVELS, GRPOConfig, accuracy_reward, evaluate, load_policy, load_problems, train

    heldout, problems = load_problems(LEVELS, "heldout", n=100), load_problems(LEVELS, "train")
    model, tokenizer = load_policy("tiny")
    config = GRPOConfig(seed=seed, **CONDITIONS[condition])
    started = time.perf_counter()
    history = list(train(model, tokenizer, problems, accuracy_reward, config))
    seconds = time.perf_counter() - started
    after = {
        name: evaluate(model, tokenizer, heldout, seed=seed + 1, temperature=temperature)
        for name, temperature in {"sampled": 1.0, "greedy": 0.0}.items()
    }
    return {
        "condition": condition,
        "seed": seed,
        "seconds": round(seconds, 1),
        "n": len(heldout),
        **{name: found.k for name, found in after.items()},
        **{f"{name}_correct": "".join(map(str, map(int, found.correct))) for name, found in after.items()},
        "curves": {key: [round(step[key], 5) for step in history] for key in CURVES if key in history[0]},
    }


def paired(runs: Sequence[dict], condition: str, kind: str = "sampled") -> dict:
    """Return the difference of a condition from float32, with its 95% interval over seeds and problems."""
    from grpo_edu.evaluation import crossed_bootstrap

    found = {(run["condition"], run["seed"]): [int(c) for c in run[f"{kind}_correct"]] for run in runs}
    seeds = [seed for name, seed in found if name == condition and ("float32", seed) in found]
    result = crossed_bootstrap(*([found[name, seed] for seed in seeds] for name in ("float32", condition)))
    return {"seeds": seeds, "difference": result.difference, "low": result.low, "high": result.high}


def summaries(runs: Sequence[dict]) -> dict[str, dict]:
    """For each condition that was quantized: its differences from float32 and its mismatch."""
    found = {}
    for condition in dict.fromkeys(run["condition"] for run in runs):
        if condition == "float32":
            continue
        curves = [run["curves"][MISMATCH] for run in runs if run["condition"] == condition]
        found[condition] = {
            "sampled": paired(runs, condition),
            "greedy": paired(runs, condition, "greedy"),
            "mismatch_first": sum(curve[0] for curve in curves) / len(curves),
            "mismatch_last": sum(curve[-1] for curve in curves) / len(curves),
        }
    return found


def verdicts(runs: Sequence[dict], found: dict[str, dict]) -> dict[str, bool]:
    """Return the statements of notebook 09 on quantized rollouts."""
    from grpo_edu import wilson_interval

    base = {run["seed"]: run for run in runs if run["condition"] == "float32"}
    judged = {}
    for condition in ("int8, corrected", "int8, uncorrected"):
        own = [run for run in runs if run["condition"] == condition]
        judged[f"{condition}: reaches the 95% interval of its seed's float32 run, on every seed"] = all(
            run["sampled"] / run["n"] >= wilson_interval(base[run["seed"]]["sampled"], run["n"])[0] for run in own
        )
        judged[f"{condition}: over all seeds within {100 * MARGIN:.0f} points of float32, interval and all"] = (
            found[condition]["sampled"]["low"] >= -MARGIN and found[condition]["sampled"]["high"] <= MARGIN
        )
    return judged


def table(runs: Sequence[dict]) -> str:
    """Return the runs as a Markdown table."""
    return markdown(
        [
            {
                "rollouts": run["condition"],
                "seed": run["seed"],
                "sampled": f"{run['sampled']}/{run['n']}",
                "greedy": f"{run['greedy']}/{run['n']}",
                "mean |Δ logp|": f"{run['curves'].get(MISMATCH, [0])[0]:.4f}",
                "seconds": run["seconds"],
            }
            for run in runs
        ]
    )


def main() -> int:
    """Run what is missing; exit 1 if a statement does not hold."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--conditions", nargs="+", choices=tuple(CONDITIONS), default=list(CONDITIONS))
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no run after so many")
    parser.add_argument("--output", type=Path, default=RESULTS / "quantized_rollouts.json")
    options = parser.parse_args()
    started = time.perf_counter()
    runs = json.loads(options.output.read_text(encoding="utf-8"))["runs"] if options.output.exists() else []
    done = {(run["condition"], run["seed"]) for run in runs}
    missing = [(c, s) for s in options.seeds for c in options.conditions if (c, s) not in done]
    for condition, seed in missing:
        if time.perf_counter() - started > 60 * options.minutes:
            break
        runs.append(run_one(condition, seed))
        print(table(runs[-1:]).splitlines()[-1], flush=True)
        runs.sort(key=lambda run: (list(CONDITIONS).index(run["condition"]), run["seed"]))
        save(options.output, COMMAND, {"runs": runs})
    print("\n" + table(runs))
    if {(c, s) for c in CONDITIONS for s in options.seeds} - {(run["condition"], run["seed"]) for run in runs}:
        print("not finished: start again to continue")
        return 0
    found = summaries(runs)
    judged = verdicts(runs, found)
    save(options.output, COMMAND, {"verdicts": judged, "against_float32": found, "runs": runs})
    return exit_code(judged)


if __name__ == "__main__":
    sys.exit(main())
