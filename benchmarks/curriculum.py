"""What curricula forget, on five seeds: ``python -m benchmarks.curriculum``, the study behind `ForgettingDashboard`.

Three unlike tasks one after the other, supervised and by GRPO, under several protections; the three levels for
comparison; and how far five ways to a Fisher agree. Everything of one seed starts from the shipped model, and the
first stage is trained once for all protections, since there is nothing to protect before it. λ = 1000 for the headline
was chosen on seed 10, which is not in the study. The learning rate was not tuned, so its conclusions do not stand:
``benchmarks.forgetting`` replaces it, and the dashboard of forgetting shows its matrices.

It takes about 30 minutes of one core. ``--minutes 5`` starts no run once five minutes are over; the same command
continues from there. Writes ``benchmarks/results/curriculum.json``, the matrices among it as
``data/curves/curriculum.json`` for the dashboard, and prints its statements.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness import exit_code
from grpo_edu.machine.hardware import machine
from grpo_edu.runs.log import read_log

if TYPE_CHECKING:
    from torch import Tensor

HERE = Path(__file__).resolve().parent
COMMAND = "python -m benchmarks.curriculum"
RESULT = HERE / "results" / "curriculum.json"
MATRICES = HERE.parent / "data" / "curves" / "curriculum.json"  # with the data, so that an installed package has it
HELDOUT = 100  # problems a task
# name of an arm → protection: method, strength, Fisher
ARMS: dict[str, dict] = {
    "none": {},
    **{f"ewc {x:g}": {"method": "ewc", "strength": x} for x in (100.0, 1e3, 1e7)},
    "l2 0.03": {"method": "l2", "strength": 0.03},
    **{f"lightning {x:g}": {"method": "ewc", "strength": x, "fisher": "lightning"} for x in (1.0, 1e3)},
    "batched 1000": {"method": "ewc", "strength": 1e3, "fisher": "batched-empirical"},
    "replay 0.2": {"method": "replay", "strength": 0.2},
    "kl 1": {"method": "kl", "strength": 1.0},
}
HEADLINE = "ewc 1000"
GROUPS = {"domains": list(ARMS), "domains-gentle": ["none"], "domains-grpo": ["none"], "levels": ["none"]}


def run_group(model_name: str, group: str, arms: list[str], seed: int, deadline: float, log: Path) -> None:
    """Run the arms of one curriculum on one seed, until the deadline; the first stage is shared, each run is logged."""
    import torch

    from grpo_edu.continual.curriculum import Progress, run_curriculum
    from grpo_edu.continual.stages import Protection, load_curriculum
    from grpo_edu.models import load_policy
    from grpo_edu.problems.files import load_problems
    from grpo_edu.runs.loading import load_split
    from grpo_edu.runs.log import RunLog

    if time.time() > deadline:
        return
    torch.set_num_threads(1)
    plain = load_curriculum(group).with_seed(seed)
    training = [load_problems(stage.data, "train") for stage in plain.stages]
    heldout = [load_split(stage.data, "heldout", n=HELDOUT) for stage in plain.stages]
    model, tokenizer = load_policy(model_name)
    steps = run_curriculum(model, tokenizer, plain, training, heldout)
    next(steps)
    shared = next(steps)
    weights = copy.deepcopy(model.state_dict())
    for arm in arms:
        started = time.perf_counter()
        model.load_state_dict(weights)
        protected = replace(plain, protection=Protection(**ARMS[arm]))
        progress = Progress(
            list(shared.rows), list(shared.histories), first_anchors(model, tokenizer, protected, training)
        )
        list(run_curriculum(model, tokenizer, protected, training, heldout, progress=progress))
        run = {
            "curriculum": group,
            "arm": arm,
            "seed": seed,
            **progress.matrix([stage.name for stage in plain.stages]).to_dict(),
            "moved": moved(model, tokenizer, weights, heldout[0]),
            "seconds": round(time.perf_counter() - started, 1),
        }
        with RunLog(log) as lines:
            lines.append(run)
        print(line(run), flush=True)
        if time.time() > deadline:
            break


def first_anchors(model, tokenizer, curriculum, training) -> list:
    """Return the anchor of the first stage under this curriculum's protection."""
    from grpo_edu.continual.curriculum import make_anchor

    anchor = make_anchor(model, tokenizer, curriculum.stages[0], training[0], curriculum.protection)
    return [] if anchor is None else [anchor]


def moved(model, tokenizer, weights: dict, problems: list) -> dict[str, float]:
    """Return how far the model went from `weights`: in weights, and in predictions on the first task's solutions.

    distance: the square root of Σ (θ − θ*)². kl: nats per token, of the predictions then from those now.
    """
    import torch

    from grpo_edu.continual.ewc import copy_params
    from grpo_edu.continual.examples import exact_kl
    from grpo_edu.continual.fisher import solution_examples, target_forward

    now = copy_params(model)
    distance = sum(float((now[name] - weights[name]).square().sum()) for name in now) ** 0.5
    then = copy.deepcopy(model)
    then.load_state_dict(weights)
    total = tokens = 0.0
    with torch.no_grad():
        for example in solution_examples(tokenizer, problems[:32]):
            kl = exact_kl(*(target_forward(net, *example)[0] for net in (then, model)))
            total += float(kl.sum())
            tokens += len(kl)
    return {"distance": distance, "kl": total / tokens}


def rank_correlation(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """Return Spearman's rank correlation of two diagonals over all weights: do they agree on which weights matter?"""
    import numpy as np
    from scipy.stats import spearmanr

    flat = [np.concatenate([diagonal[name].flatten() for name in first]) for diagonal in (first, second)]
    return round(float(spearmanr(*flat).statistic), 12)


def fisher_agreement(model_name: str, seed: int) -> dict:
    """Rank correlation of each way with the true Fisher on the first task; and of a second draw with the first."""
    import torch

    from grpo_edu.continual.fisher import FISHER_KINDS, fisher_diagonal, lightning_fisher, solution_examples
    from grpo_edu.models import load_policy
    from grpo_edu.problems.files import load_problems

    torch.set_num_threads(1)
    model, tokenizer = load_policy(model_name)
    problems = load_problems(("basic", "intermediate", "advanced"), "train", n=100)
    examples = solution_examples(tokenizer, problems[seed::18][:16])
    fishers = {
        kind: fisher_diagonal(
            model, examples, kind=kind, tail=1e-3, generator=torch.Generator().manual_seed(seed), batch_size=16
        )
        for kind in FISHER_KINDS
    }
    fishers["lightning"] = lightning_fisher(model)
    again = fisher_diagonal(model, examples, generator=torch.Generator().manual_seed(seed + 100))
    ranks = {kind: rank_correlation(fisher, fishers["true"]) for kind, fisher in fishers.items() if kind != "true"}
    sums = {kind: float(sum(part.sum() for part in fisher.values())) for kind, fisher in fishers.items()}
    return {"seed": seed, "rank": ranks, "rank_second_draw": rank_correlation(fishers["sampled"], again), "sum": sums}


def of(record: dict, group: str, arm: str) -> list[dict]:
    """Return the runs of one arm, by seed."""
    return sorted(
        (run for run in record["runs"] if (run["curriculum"], run["arm"]) == (group, arm)), key=lambda run: run["seed"]
    )


def measure(record: dict, group: str, arm: str, name: str):
    """Mean over seeds of a measure, with its interval.

    Besides those of `grpo_edu.continual.forgetting`: "last" and "earlier", the accuracy at the end on the last task
    and on those before it, and "kl" and "distance" from the model after the first stage.
    """
    from grpo_edu.evaluation import mean_estimate

    runs = of(record, group, arm)
    if name in ("last", "earlier"):
        ends = [[k / n for k, n in zip(run["solved"][-1], run["num_problems"], strict=True)] for run in runs]
        return mean_estimate([end[-1] if name == "last" else sum(end[:-1]) / len(end[:-1]) for end in ends])
    if name in ("kl", "distance"):
        return mean_estimate([run["moved"][name] for run in runs])
    return mean_estimate([run["measures"][name]["value"] for run in runs])


def summary(record: dict) -> dict[str, dict[str, dict]]:
    """Of each curriculum and arm: every measure as a mean over seeds with its interval, and the mean matrix."""
    names = (
        "average_accuracy",
        "forgetting",
        "backward_transfer",
        "forward_transfer",
        "last",
        "earlier",
        "kl",
        "distance",
    )
    found: dict[str, dict[str, dict]] = {}
    for group, arms in GROUPS.items():
        for arm in arms:
            runs = of(record, group, arm)
            cells = [
                [[k / n for k, n in zip(row, run["num_problems"], strict=True)] for row in run["solved"]]
                for run in runs
            ]
            mean = [
                [sum(values) / len(runs) for values in zip(*rows, strict=True)] for rows in zip(*cells, strict=True)
            ]
            found.setdefault(group, {})[arm] = {
                "matrix": [[round(share, 4) for share in row] for row in mean],
                **{name: asdict(measure(record, group, arm, name)) for name in names},
            }
    return found


def verdicts(record: dict) -> dict[str, bool]:
    """Return the statements that the course makes, judged on all seeds."""
    plain, ewc = (measure(record, "domains", arm, "forgetting") for arm in ("none", HEADLINE))
    last = {arm: measure(record, "domains", arm, "last").value for arm in ("none", HEADLINE)}
    grpo = measure(record, "domains-grpo", "none", "forgetting")
    pairs = zip(of(record, "domains", "none"), of(record, "domains", HEADLINE), strict=True)
    ranks = [row["rank"] for row in record["fisher"]]
    return {
        "supervised, unprotected: at least 20 points are forgotten, interval clear of 0": plain.value >= 0.20
        and plain.low > 0,
        "EWC at least halves that": ewc.value <= plain.value / 2,
        "EWC forgets less on every seed": all(
            b["measures"]["forgetting"]["value"] < a["measures"]["forgetting"]["value"] for a, b in pairs
        ),
        "EWC ends within 5 points on the last task": last[HEADLINE] >= last["none"] - 0.05,
        "GRPO forgets less than supervised training, intervals apart": grpo.high < plain.low,
        "on every seed the sampled Fisher ranks the weights more like the true one than the heuristic does": all(
            rank["sampled"] > rank["lightning"] for rank in ranks
        ),
    }


def line(run: dict) -> str:
    """Return a run as one line of the log."""
    last = " ".join(f"{k}/{n}" for k, n in zip(run["solved"][-1], run["num_problems"], strict=True))
    forgot = run["measures"]["forgetting"]["value"]
    kl = run["moved"]["kl"]
    return (
        f"{run['curriculum']:13} {run['arm']:22} seed {run['seed']}  forgot {forgot:+.3f}  end {last}"
        f"  kl {kl:.3f}  {run['seconds']} s"
    )


def matrices(runs: list[dict]) -> dict[str, list[dict]]:
    """Return what the dashboard of forgetting shows: of each run the problems solved of each task after each stage."""
    names = ("curriculum", "arm", "seed", "tasks", "num_problems", "solved")
    return {"runs": [{name: run[name] for name in names} for run in runs]}


def main() -> int:
    """Run what is missing of the study; exit 1 if a statement does not hold."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, help="only these")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no new run after so many")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    deadline = time.time() + 60 * options.minutes
    log = options.output.with_suffix(".jsonl")  # a line per run, until the study is whole
    log.parent.mkdir(parents=True, exist_ok=True)
    runs = read_log(log) if log.exists() else []
    done = {(run["curriculum"], run["arm"], run["seed"]) for run in runs}
    wanted = {
        (group, seed): [
            arm for arm in GROUPS[group] if arm in (options.arms or ARMS) and (group, arm, seed) not in done
        ]
        for seed in options.seeds
        for group in options.groups
    }
    jobs = [(options.model, group, arms, seed, deadline, log) for (group, seed), arms in wanted.items() if arms]
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        for _ in pool.map(run_group, *zip(*jobs, strict=True)) if jobs else ():
            pass
    runs = sorted(
        read_log(log), key=lambda run: (run["seed"], [*GROUPS].index(run["curriculum"]), [*ARMS].index(run["arm"]))
    )
    if len(runs) < sum(map(len, GROUPS.values())) * len(options.seeds):
        print(f"{len(runs)} runs are done; the same command continues")
        return 0
    fisher = [fisher_agreement(options.model, seed) for seed in options.seeds]
    record = {"command": COMMAND, "machine": machine(), "num_heldout": HELDOUT, "fisher": fisher, "runs": runs}
    judged = verdicts(record)
    content = {**record, "summary": summary(record), "verdicts": judged}
    options.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if options.output == RESULT:
        MATRICES.write_text(json.dumps(matrices(runs)) + "\n", encoding="utf-8")
    log.unlink()
    return exit_code(judged)


if __name__ == "__main__":
    sys.exit(main())
