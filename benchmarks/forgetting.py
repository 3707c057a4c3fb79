"""What is forgotten at a tuned rate, and what protects: ``python -m benchmarks.forgetting``.

The protocol is benchmarks/studies/forgetting.md. The model `tiny` knows three levels of word problems, sorting and coin
flips, and has seen none of the ten kinds of puzzles. It learns five kinds and then the other five, in both orders.
Learning rate and steps of each stage are tuned for the accuracy on the new task. Then every protection gets the same
number of strengths, and the best is chosen on validation problems and a selection seed. Five other seeds are reported
on held-out problems.

Each run is one line of ``benchmarks/results/forgetting.jsonl``. ``--minutes 20`` starts no run after 20 minutes. The
same command continues where it stopped. ``forgetting.json`` holds the summary of the runs so far. Rows of the phases
"match" and "search" belong to no result.
"""

from __future__ import annotations

import time
from functools import cache
from itertools import product
from typing import Any

from benchmarks.harness import (
    RESULTS,
    Ledger,
    bits,
    estimate,
    ledger_options,
    left_by_holm,
    ones,
    paired_p,
    save,
    share,
)
from grpo_edu import LEVELS, evaluate, load_policy, load_problems
from grpo_edu.config import SupervisedConfig
from grpo_edu.continual.curriculum import make_anchor, train_stage
from grpo_edu.continual.stages import Protection, Stage
from grpo_edu.evaluation import crossed_bootstrap
from grpo_edu.problems.puzzles import puzzle_splits

COMMAND = "python -m benchmarks.forgetting"
LEDGER = RESULTS / "forgetting.jsonl"
MODEL = "tiny"
KNOWN = (*LEVELS, "sorting", "coin_flip")  # what the model was pretrained on
KINDS = {"puzzles A": range(5), "puzzles B": range(5, 10)}  # the two halves of data/puzzles.json
TASKS = ("known", *KINDS)
ORDERS = {"A first": ("puzzles A", "puzzles B"), "B first": ("puzzles B", "puzzles A")}
# What anybody would try first: a lower rate, and as many steps as the new task then needs.
SLOWLY = ((5e-4, 160), (3e-4, 160), (3e-4, 240), (3e-4, 320), (1e-4, 480))  # (rate, steps) of each stage
PROTECTED_SLOWLY = ("ewc sampled", "replay")  # the two best protections, with the chosen rate and steps
SELECTION_SEED, SEEDS = 100, (0, 1, 2, 3, 4)
RATES, STEPS = (1e-4, 3e-4, 1e-3), (20, 40, 80)
NUM_KNOWN = {"validation": 20, "heldout": 30}  # problems of each of the five sets in an evaluation
NUM_PUZZLES = {"validation": 50, "heldout": 75}  # of each half
FISHER_EXAMPLES = 32
LENGTH = 96

# method → its five strengths, from weak to strong
GRIDS: dict[str, tuple[float, ...]] = {
    "ewc sampled": (10, 100, 1e3, 1e4, 1e5),
    "ewc true": (10, 100, 1e3, 1e4, 1e5),
    "ewc empirical": (10, 100, 1e3, 1e4, 1e5),
    "ewc batched-empirical": (100, 1e3, 1e4, 1e5, 1e6),
    "ewc lightning": (0.1, 1, 10, 100, 1e3),
    "l2": (1e-3, 1e-2, 0.1, 1, 10),
    "kl": (0.01, 0.1, 1, 10, 100),
    "replay": (0.02, 0.05, 0.1, 0.25, 0.5),
    "lower rate": (1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32),
}


@cache
def problems_of(task: str, part: str) -> tuple:
    """Return the problems of a task: "train", "validation" or "heldout"; the three have no problem in common."""
    if task == "known":
        chosen = []
        for level in KNOWN:
            if part == "heldout":
                chosen += load_problems(level, "heldout", n=NUM_KNOWN[part])
            else:
                problems = load_problems(level, "train")
                chosen += problems[:800] if part == "train" else problems[800 : 800 + NUM_KNOWN[part]]
        return tuple(chosen)
    puzzles = puzzle_splits()[part]
    half = [puzzle for number, puzzle in enumerate(puzzles) if number % 10 in KINDS[task]]
    return tuple(half if part == "train" else half[: NUM_PUZZLES[part]])


def right(model, tokenizer, task: str, part: str) -> str:
    """Return a 1 or 0 for each problem: whether the greedy answer is correct."""
    problems = problems_of(task, part)
    found = evaluate(model, tokenizer, problems, temperature=0, max_completion_length=LENGTH, batch_size=100)
    return bits(found.correct)


def stage_of(task: str, rate: float, steps: int, seed: int) -> Stage:
    """Return a supervised stage on a task, with a linear schedule."""
    config = SupervisedConfig(
        max_steps=steps, learning_rate=rate, lr_scheduler_type="linear", warmup_steps=5, seed=seed
    )
    return Stage(task, LEVELS, "supervised", config)  # the data are handed over with the stage


def protection_of(method: str, strength: float) -> Protection:
    """Return the protection that a name of `GRIDS` stands for."""
    if method.startswith("ewc"):
        return Protection("ewc", strength, method.removeprefix("ewc "), num_examples=FISHER_EXAMPLES)
    return Protection(method, strength) if method in ("l2", "kl", "replay") else Protection()


_first_anchors: dict[tuple, Any] = {}


def first_anchor(model, tokenizer, protection: Protection, seed: int) -> list:
    """Return the anchor of the known skills at the shipped weights, computed once for each seed and kind."""
    key = protection.method, protection.fisher, seed
    if key not in _first_anchors:
        stage = stage_of("known", 1e-3, 1, seed)
        _first_anchors[key] = make_anchor(model, tokenizer, stage, problems_of("known", "train"), protection)
    return [] if _first_anchors[key] is None else [_first_anchors[key]]


def run_order(
    order: str, method: str, strength: float, seed: int, tuned: dict[str, tuple], part: str
) -> dict[str, Any]:
    """Both stages of an order from the shipped weights; returns the outcomes of all tasks after the stages.

    tuned: task → (learning rate, steps).
    """
    started = time.perf_counter()
    model, tokenizer = load_policy(MODEL)
    protection = protection_of(method, strength)
    anchors, earlier = first_anchor(model, tokenizer, protection, seed), list(problems_of("known", "train"))
    rows = []
    for number, task in enumerate(ORDERS[order]):
        rate, steps = tuned[task]
        stage = stage_of(task, rate * (strength if method == "lower rate" else 1), steps, seed)
        problems = problems_of(task, "train")
        list(train_stage(model, tokenizer, stage, problems, protection=protection, anchors=anchors, earlier=earlier))
        if number or part == "heldout":  # the selection needs the end only
            wanted = TASKS if number else (task,)  # after the first stage: what it has just learned
            rows.append({name: right(model, tokenizer, name, part) for name in wanted})
        earlier += problems
        if number == 0:
            anchor = make_anchor(model, tokenizer, stage, problems, protection)
            anchors = anchors + ([] if anchor is None else [anchor])
    return {"after": rows, "seconds": round(time.perf_counter() - started, 1)}


def joint(seed: int, tuned: dict[str, tuple], part: str) -> dict[str, Any]:
    """Train on all tasks at once, for as long as both stages; no upper bound, since no stage favors a task."""
    started = time.perf_counter()
    model, tokenizer = load_policy(MODEL)
    steps, rate = sum(steps for _, steps in tuned.values()), max(rate for rate, _ in tuned.values())
    stage = stage_of("puzzles A", rate, steps, seed)
    known = problems_of("known", "train")[:: len(KNOWN)]  # 800, as many of each set
    problems = [*known, *(problem for task in KINDS for problem in problems_of(task, "train"))]
    list(train_stage(model, tokenizer, stage, problems))
    row = {name: right(model, tokenizer, name, part) for name in TASKS}
    return {"after": [row, row], "seconds": round(time.perf_counter() - started, 1)}


def tune(ledger: Ledger) -> None:
    """Score every learning rate and number of steps of each new task on its validation problems."""
    for task in ORDERS["A first"]:
        for steps in STEPS:
            for rate in RATES:
                key = {"phase": "tune", "task": task, "rate": rate, "steps": steps, "seed": SELECTION_SEED}
                if not ledger.wants(**key):
                    continue
                started = time.perf_counter()
                model, tokenizer = load_policy(MODEL)
                stage = stage_of(task, rate, steps, SELECTION_SEED)
                list(train_stage(model, tokenizer, stage, problems_of(task, "train")))
                found = {name: right(model, tokenizer, name, "validation") for name in (task, "known")}
                ledger.add(**key, after=found, seconds=round(time.perf_counter() - started, 1))
                print(task, rate, steps, {name: share(text) for name, text in found.items()}, flush=True)


def tuned(ledger: Ledger) -> dict[str, tuple[float, int]]:
    """Task → (rate, steps): within two points of the best on the new task, the lowest rate, then the fewest steps."""
    found = {}
    for task in ORDERS["A first"]:
        rows = ledger.select(phase="tune", task=task)
        best = max(share(row["after"][task]) for row in rows)
        good = [row for row in rows if share(row["after"][task]) >= best - 0.02 - 1e-9]
        found[task] = min((row["rate"], row["steps"]) for row in good)
    return found


def select(ledger: Ledger) -> None:
    """Run every strength of every method on the selection seed, in the order "A first", on validation problems."""
    for method in ("none", *GRIDS):
        for strength in GRIDS.get(method, (0,)):
            key = {"phase": "select", "method": method, "strength": strength, "seed": SELECTION_SEED}
            if not ledger.wants(**key):
                continue
            found = run_order("A first", method, strength, SELECTION_SEED, tuned(ledger), "validation")
            ledger.add(**key, **found)
            print(method, strength, scores(found), found["seconds"], flush=True)


def scores(run: dict[str, Any]) -> dict[str, float]:
    """Accuracy on each task at the end, and their mean."""
    last = {task: round(share(text), 3) for task, text in run["after"][-1].items()}
    return {**last, "average": round(sum(last.values()) / len(last), 4)}


def strengths(ledger: Ledger) -> dict[str, float]:
    """Method → the strength with the best average on the validation problems; of equals the weakest."""
    found = {}
    for method, grid in GRIDS.items():
        rows = ledger.select(phase="select", method=method)
        if len(rows) == len(grid):
            found[method] = max(rows, key=lambda row: (scores(row)["average"], -grid.index(row["strength"])))[
                "strength"
            ]
    return found


def slow_setting(ledger: Ledger) -> tuple[float, int] | None:
    """Return the rate and steps of `SLOWLY` with the best average on validation problems; None if one is missing."""
    rows = ledger.select(phase="select slowly", method="none")
    if len(rows) < len(SLOWLY):
        return None
    best = max(rows, key=lambda row: (scores(row)["average"], -row["steps"]))
    return best["rate"], best["steps"]


def slow_strengths(ledger: Ledger) -> dict[str, float]:
    """Method → the strength with the best average at the slow setting, as `strengths` at the tuned one."""
    found = {}
    for method in PROTECTED_SLOWLY:
        rows = ledger.select(phase="select slowly", method=method)
        if len(rows) == len(GRIDS[method]):
            best = max(rows, key=lambda row: (scores(row)["average"], -GRIDS[method].index(row["strength"])))
            found[method] = best["strength"]
    return found


def select_slowly(ledger: Ledger) -> None:
    """First rate and steps without protection, then the strengths of the protections there: the selection's rule."""
    for rate, steps in SLOWLY:
        run_slowly(ledger, "none", 0, rate, steps)
    setting = slow_setting(ledger)
    for method in PROTECTED_SLOWLY if setting else ():
        for strength in GRIDS[method]:
            run_slowly(ledger, method, strength, *setting)


def run_slowly(ledger: Ledger, method: str, strength: float, rate: float, steps: int) -> None:
    """Train one run of the selection, unless it is stored or the time is over."""
    key = {"phase": "select slowly", "method": method, "strength": strength, "rate": rate, "steps": steps}
    if not ledger.wants(**key):
        return
    settings = dict.fromkeys(KINDS, (rate, steps))
    found = run_order("A first", method, strength, SELECTION_SEED, settings, "validation")
    ledger.add(**key, seed=SELECTION_SEED, **found)
    print(method, strength, rate, steps, scores(found), found["seconds"], flush=True)


def report_slowly(ledger: Ledger) -> None:
    """Run the reported seeds at the slow setting: unprotected and protected, in both orders."""
    setting = slow_setting(ledger)
    chosen = {"none": 0.0, **slow_strengths(ledger)}
    for seed in SEEDS if setting else ():
        for order in ORDERS:
            for method, strength in chosen.items():
                key = {"phase": "report", "order": order, "method": f"slow {method}", "seed": seed}
                if not ledger.wants(**key):
                    continue
                found = run_order(order, method, strength, seed, dict.fromkeys(KINDS, setting), "heldout")
                ledger.add(**key, strength=strength, **found)
                print(order, seed, "slow", method, strength, scores(found), found["seconds"], flush=True)


def report(ledger: Ledger) -> None:
    """Run the reported seeds: unprotected, joint, and every method at its chosen strength, in both orders."""
    if ledger.wants(phase="before"):
        model, tokenizer = load_policy(MODEL)
        ledger.add(phase="before", after={task: right(model, tokenizer, task, "heldout") for task in TASKS})
    chosen = {"none": 0.0, **strengths(ledger)}
    for order in ORDERS:
        for seed in SEEDS:
            for method in ("joint", *chosen):
                key = {"phase": "report", "order": order, "method": method, "seed": seed}
                if not ledger.wants(**key):
                    continue
                strength = chosen.get(method, 0.0)
                if method == "joint":
                    same = ledger.find(phase="report", method="joint", seed=seed)  # it has no order
                    found = same or joint(seed, tuned(ledger), "heldout")
                else:
                    found = run_order(order, method, strength, seed, tuned(ledger), "heldout")
                ledger.add(**key, strength=strength, after=found["after"], seconds=found["seconds"])
                print(order, seed, method, strength, scores(found), found["seconds"], flush=True)


def summary(ledger: Ledger) -> dict[str, Any]:
    """Means over seeds with Student's intervals: accuracies at the end, and paired differences to "none"."""
    before = {task: share(text) for task, text in ledger.find(phase="before")["after"].items()}
    found: dict[str, Any] = {"before": before, "tuned": tuned(ledger), "strengths": strengths(ledger), "orders": {}}
    found |= {"slow setting": slow_setting(ledger), "slow strengths": slow_strengths(ledger)}
    for order in ORDERS:
        plain = {row["seed"]: row for row in ledger.select(phase="report", order=order, method="none")}
        found["orders"][order] = {}
        slow = [f"slow {method}" for method in ("none", *PROTECTED_SLOWLY)]
        for method in ("none", "joint", *GRIDS, *slow):
            runs = ledger.select(phase="report", order=order, method=method)
            if len(runs) == len(SEEDS) == len(plain):
                pairs = [(scores(run), scores(plain[run["seed"]])) for run in runs]
                found["orders"][order][method] = {
                    "strength": runs[0]["strength"],
                    "forgotten": estimate([lost(run, order, before) for run in runs]),
                    **{name: estimate([own[name] for own, _ in pairs]) for name in pairs[0][0]},
                    "against none": {
                        name: estimate([own[name] - other[name] for own, other in pairs]) for name in pairs[0][0]
                    },
                    "against none, over seeds and problems": vars(
                        crossed_bootstrap(
                            [per_unit(plain[run["seed"]]) for run in runs], [per_unit(run) for run in runs]
                        )
                    ),
                    "p_value": paired_p([own["average"] - other["average"] for own, other in pairs]),
                }
    found["after Holm's correction"] = holm(found["orders"])
    found["at the slow setting"] = slow_differences(ledger)
    found["slow selection"] = [
        {**{name: row[name] for name in ("method", "strength", "rate", "steps")}, **scores(row)}
        for row in ledger.select(phase="select slowly")
    ]
    found["selection"] = {  # at the tuned rate and steps: what the slow settings are compared with
        method: scores(ledger.find(phase="select", method=method, strength=strength))
        for method, strength in {"none": 0, **strengths(ledger)}.items()
    }
    return found


def slow_differences(ledger: Ledger) -> dict[str, Any]:
    """Order → differences of the average of the three tasks, over seeds and over seeds and problems.

    Each protection against none, both at the slow setting, with the p-value of Student's paired test (four tests with
    both orders, of which "left by Holm" names those with p < 0.05); and the slow setting without protection against
    each protection, and against the lower rate with as few steps, at the tuned setting.
    """
    pairs = {f"slow {method} minus slow none": (f"slow {method}", "slow none") for method in PROTECTED_SLOWLY}
    pairs |= {f"slow none minus {method}": ("slow none", method) for method in (*PROTECTED_SLOWLY, "lower rate")}
    found: dict[str, Any] = {order: {} for order in ORDERS}
    for order, (name, methods) in product(ORDERS, pairs.items()):
        new, old = (
            {row["seed"]: row for row in ledger.select(phase="report", order=order, method=method)}
            for method in methods
        )
        if set(new) == set(old) == set(SEEDS):
            values = [scores(new[seed])["average"] - scores(old[seed])["average"] for seed in SEEDS]
            units = ([per_unit(runs[seed]) for seed in SEEDS] for runs in (old, new))
            found[order][name] = {
                "over seeds": estimate(values),
                "over seeds and problems": vars(crossed_bootstrap(*units)),
                "p_value": paired_p(values),
            }
    tests = {
        f"{order}, {name}": row["p_value"]
        for order, rows in found.items()
        for name, row in rows.items()
        if name.endswith("minus slow none")
    }
    return found | {"left by Holm": left_by_holm(tests)}


def per_unit(run: dict[str, Any]) -> list[float]:
    """Return the average of the tasks at the end, as the mean of 75 numbers that do not share a problem.

    Each is the average of one puzzle of either half and of two known problems, so that drawing these units draws the
    problems of each task independently of the other tasks.
    """
    right = {task: ones(text) for task, text in run["after"][-1].items()}
    size = NUM_PUZZLES["heldout"]
    known = [(right["known"][i] + right["known"][i + size]) / 2 for i in range(size)]
    return [(own + a + b) / 3 for own, a, b in zip(known, *(right[task] for task in KINDS), strict=True)]


def holm(found: dict[str, Any]) -> dict[str, list[str]]:
    """Order → the methods that differ from "none" at the level 0.05 after Holm's correction over both orders."""
    p_values = {
        (order, method): row["p_value"]
        for order, rows in found.items()
        for method, row in rows.items()
        if method in GRIDS
    }
    left = left_by_holm(p_values)
    return {order: [method for where, method in left if where == order] for order in found}


def lost(run: dict[str, Any], order: str, before: dict[str, float]) -> float:
    """Forgetting: mean loss of the two earlier tasks since they were learned, at the end of the order."""
    first, after = ORDERS[order][0], run["after"]
    return (before["known"] - share(after[1]["known"]) + share(after[0][first]) - share(after[1][first])) / 2


def main() -> int:
    """Run what is missing, until the time is over; then store the summary of what is complete."""
    ledger = Ledger(LEDGER, ledger_options(COMMAND, __doc__).parse_args().minutes)
    tune(ledger)
    if len(ledger.select(phase="tune")) == 2 * len(RATES) * len(STEPS):
        select(ledger)
        report(ledger)
        select_slowly(ledger)
        report_slowly(ledger)
    if ledger.find(phase="before"):
        save(LEDGER.with_suffix(".json"), COMMAND, summary(ledger))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
