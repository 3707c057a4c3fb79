"""Is forgetting a function of the KL divergence from the start?: ``python -m benchmarks.razor``.

The claim is that of *RL's razor* (Shenfeld et al. 2025, arXiv 2509.04259); the protocol is studies/razor.md. Each of
five seeds makes its own start: `tiny` after a cold start on puzzles, mixed with the problems that it knows.
Five methods then train this start on puzzles only, at two learning rates, and are measured after 10 and 30 steps:

- *supervised*: worked solutions, in the form that the start knows;
- *own answers*: the same, on the start's own right answers (rejection sampling), so the targets are near to the start;
- *other form*: the same, on solutions with the word "First" or "Then" before each equation, as right, and far away;
- *GRPO*, with the accuracy as reward;
- *distillation*: on-policy distillation (Agarwal et al. 2024, arXiv 2306.13649) from a better model, which is the start
  after more supervised training. The student samples one completion for each puzzle, and the loss of a token is the KL
  divergence from the student's next-token distribution to the teacher's, over the whole vocabulary.

Measured at each point: greedy accuracy on held-out old and new problems, the KL divergence from the start on held-out
puzzles in both directions, and the distance of the weights.

The rules of the analysis, fixed before the reported runs (ten runs of the seeds 98 and 99 on validation problems
had been seen, which set the steps, the rates, the mixture of the cold start and the other form). Nothing is selected:
every point of every method counts.

1. *Does the KL predict forgetting?* The change of the old accuracy from the start is predicted from one distance, by a
   curve that may only fall (isotonic regression), fitted on four seeds and tested on the fifth. R² of each seed is
   compared between the distances, over the five seeds. The main one is KL(start ‖ trained) in nats per completion, the
   paper's direction; its samples are the start's, so all runs of a seed are measured on the same ones. The paper's
   curve, quadratic, is reported too, and everything once more without *other form*, whose large changes could carry R²
   alone.
2. *Does one curve hold for all methods?* Every method is compared with *supervised* at equal KL(start ‖ trained). Each
   of its points between two points of supervised training of the same seed (the start is one) is compared with their
   linear interpolation, problem by problem. The claim predicts no difference.
3. *Does GRPO forget less?* The same at equal accuracy on the new task.

Intervals of 2 and 3 are over seeds and problems (`crossed_bootstrap`); p-values are from Student's paired test over the
seeds, with Holm's correction for all eight tests.

Each run is one line of ``benchmarks/results/razor.jsonl``. ``--minutes 20`` starts no run after 20 minutes. The same
command continues where it stopped; ``razor.json`` holds the summary of the seeds that are complete.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch

from benchmarks.forgetting import KNOWN, problems_of
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
    save_picture,
    share,
)
from grpo_edu import (
    GRPOConfig,
    accuracy_reward,
    evaluate,
    generate,
    load_policy,
    load_problems,
    render_prompt,
    save_policy,
    train,
)
from grpo_edu.config import SupervisedConfig
from grpo_edu.continual.curriculum import mix_in
from grpo_edu.continual.examples import exact_kl, pad_examples, target_logits
from grpo_edu.continual.fisher import rollout_examples
from grpo_edu.continual.supervised import finetune
from grpo_edu.evaluation import crossed_bootstrap
from grpo_edu.fast.optimizers import build_optimizer, clip_and_step
from grpo_edu.problems.puzzles import puzzle_splits
from grpo_edu.problems.templates import ProblemOrder
from grpo_edu.rollout import Rollout

COMMAND = "python -m benchmarks.razor"
LEDGER = RESULTS / "razor.jsonl"
MODELS = RESULTS.parents[1] / "runs" / "razor"  # the start and the teacher of each seed
METHODS = ("supervised", "own answers", "other form", "GRPO", "distillation")
RATES, LOOKS = (3e-4, 1e-3), (10, 30)  # learning rates, and the steps after which a run is measured
START = SupervisedConfig(max_steps=60, learning_rate=1e-3, lr_scheduler_type="linear", warmup_steps=5)
OLD_SHARE = 2 / 3  # of the problems of the cold start
TEACHER = START  # as many steps more, on puzzles only
PROMPTS, GENERATIONS = 8, 8  # GRPO has 8 × 8 completions per step; the others have 16 puzzles, once each
LENGTH, SAMPLES = 64, 4  # tokens of a completion; samples of each training puzzle for *own answers*
NUM_OLD, NUM_NEW, NUM_KL = 60, 300, 100  # held-out: per old set, puzzles, and puzzles for the KL divergence
SEEDS = (0, 1, 2, 3, 4)
DISTANCES = {  # key in a row → name; all are 0 at the start
    "kl": "KL(start ‖ trained), per completion",
    "kl per token": "KL(start ‖ trained), per token",
    "reverse kl": "KL(trained ‖ start), per completion",
    "l2": "distance of the weights",
    "kl on old": "KL(start ‖ trained) on old problems, per completion",
}


@cache
def problems(task: str, part: str) -> tuple:
    """Return the problems of the old or the new task, "train", "validation" or "heldout", without a common problem."""
    if task == "new":
        return tuple(puzzle_splits()[part][:NUM_NEW] if part == "heldout" else puzzle_splits()[part])
    if part == "heldout":  # more than in the study of forgetting
        return tuple(problem for level in KNOWN for problem in load_problems(level, part, n=NUM_OLD))
    return problems_of("known", part)


def right(model: Any, tokenizer: Any, task: str, part: str) -> str:
    """Return a 1 or 0 for each problem: whether the greedy answer is correct."""
    found = evaluate(model, tokenizer, problems(task, part), temperature=0, max_completion_length=96, batch_size=150)
    return bits(found.correct)


def sampled(model: Any, tokenizer: Any, asked: Sequence, generations: int, generator: torch.Generator) -> Rollout:
    """Completions of these problems at temperature 1."""
    prompts = [render_prompt(tokenizer, problem.prompt) for problem in asked]
    return generate(
        model, tokenizer, prompts, num_generations=generations, max_completion_length=LENGTH, generator=generator
    )


def padded(rollout: Rollout, tokenizer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the completions of a rollout as a batch of supervised examples."""
    rows = [(ids.tolist(), int((~is_target).sum())) for ids, is_target in rollout_examples(rollout)]
    return pad_examples(rows, tokenizer.pad_token_id)


@torch.no_grad()
def divergence(sampler: Any, other: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[float, float]:
    """KL(sampler ‖ other) in nats per completion and per token, over completions that `sampler` has sampled.

    In each sampled context the divergence of the next token is exact. Its sum over a completion has the divergence of
    whole completions as its mean, by the chain rule.
    """
    values = exact_kl(target_logits(sampler, *batch)[0], target_logits(other, *batch)[0])
    return float(values.sum()) / len(batch[0]), float(values.mean())


def distill(
    model: Any, tokenizer: Any, teacher: Any, asked: Sequence, config: SupervisedConfig
) -> Iterator[dict[str, float]]:
    """On-policy distillation: the student samples, and each of its tokens has the KL to the teacher as its loss.

    The gradient goes through the student's distribution at each token and not through the sampling.
    """
    optimizer, _ = build_optimizer(model, config)
    order, generator = ProblemOrder(len(asked), config.seed), torch.Generator().manual_seed(config.seed)
    for step in range(1, config.max_steps + 1):
        drawn = [asked[index] for index in order.draw(config.prompts_per_step)]
        batch = padded(sampled(model, tokenizer, drawn, 1, generator), tokenizer)
        with torch.no_grad():
            wanted = target_logits(teacher, *batch)[0]
        optimizer.zero_grad(set_to_none=False)
        loss = exact_kl(target_logits(model, *batch)[0], wanted).mean()
        loss.backward()
        yield {"step": step, "loss": loss.item(), "grad_norm": clip_and_step(optimizer, config.max_grad_norm)}


def in_other_form(text: str) -> str:
    """Return a worked solution with a word before each equation.

    >>> in_other_form("5-1=4. 4*12=48. #### 48")
    'First 5-1=4. Then 4*12=48. #### 48'
    """
    *equations, answer = text.split(". ")
    return f"First {'. Then '.join(equations)}. {answer}"


def start_of(seed: int) -> tuple[Any, Any]:
    """Return the start of a seed and its tokenizer; made now if its folder is not there."""
    folder = MODELS / f"start-{seed}"
    if not folder.exists():
        model, tokenizer = load_policy("tiny")
        mixed = mix_in(problems("new", "train"), problems("old", "train"), share=OLD_SHARE, seed=seed)
        list(finetune(model, tokenizer, mixed, replace(START, seed=seed)))
        save_policy(model, tokenizer, folder)
    return load_policy(folder)


def teacher_of(seed: int) -> Any:
    """Return a seed's better model: its start after more supervised steps on puzzles; made now if it is missing."""
    folder = MODELS / f"teacher-{seed}"
    if not folder.exists():
        model, tokenizer = start_of(seed)
        list(finetune(model, tokenizer, problems("new", "train"), replace(TEACHER, seed=seed)))
        save_policy(model, tokenizer, folder)
    return load_policy(folder)[0]


@cache
def own_answers(seed: int) -> tuple:
    """Return the training puzzles with the start's own right answers as solutions; each at most four times."""
    model, tokenizer = start_of(seed)
    asked, found = problems("new", "train"), []
    generator = torch.Generator().manual_seed(seed)
    for first in range(0, len(asked), 25):
        part = asked[first : first + 25]
        rollout = sampled(model, tokenizer, part, SAMPLES, generator)
        repeated = [problem for problem in part for _ in range(SAMPLES)]
        marks = accuracy_reward(rollout.completions, [problem.answer for problem in repeated])
        found += [
            replace(problem, solution=text)
            for problem, text, mark in zip(repeated, rollout.completions, marks, strict=True)
            if mark
        ]
    return tuple(found)


def training(model: Any, tokenizer: Any, method: str, rate: float, seed: int) -> Iterator[dict[str, float]]:
    """Train `model` in place; yields the metrics of each step."""
    if method == "GRPO":
        config = GRPOConfig(
            max_steps=LOOKS[-1],
            prompts_per_step=PROMPTS,
            num_generations=GENERATIONS,
            learning_rate=rate,
            max_completion_length=LENGTH,
            seed=seed,
        )
        return train(model, tokenizer, problems("new", "train"), accuracy_reward, config)
    config = SupervisedConfig(max_steps=LOOKS[-1], learning_rate=rate, seed=seed)
    if method == "distillation":
        return distill(model, tokenizer, teacher_of(seed), problems("new", "train"), config)
    asked = problems("new", "train")
    if method == "own answers":
        asked = own_answers(seed)
    elif method == "other form":
        asked = tuple(replace(problem, solution=in_other_form(problem.solution)) for problem in asked)
    return finetune(model, tokenizer, asked, config)


@cache
def samples_of_start(seed: int, part: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return one completion of the start for each problem of the KL divergence, of the new and of the old task."""
    start, tokenizer = start_of(seed)
    generator = torch.Generator().manual_seed(1000 + seed)
    asked = {"new": problems("new", part)[:NUM_KL], "old": problems("old", part)[::3]}
    return {task: padded(sampled(start, tokenizer, part, 1, generator), tokenizer) for task, part in asked.items()}


def measured(model: Any, tokenizer: Any, seed: int, part: str) -> dict[str, Any]:
    """Accuracy on both tasks, and every distance from the start."""
    start, batches = start_of(seed)[0], samples_of_start(seed, part)
    own = sampled(model, tokenizer, problems("new", part)[:NUM_KL], 1, torch.Generator().manual_seed(2000 + seed))
    forward, per_token = divergence(start, model, batches["new"])
    moved = sum(
        float((new - old).detach().square().sum())
        for new, old in zip(model.parameters(), start.parameters(), strict=True)
    )
    return {
        "new": right(model, tokenizer, "new", part),
        "old": right(model, tokenizer, "old", part),
        "kl": round(forward, 5),
        "kl per token": round(per_token, 6),
        "reverse kl": round(divergence(model, start, padded(own, tokenizer))[0], 5),
        "kl on old": round(divergence(start, model, batches["old"])[0], 5),
        "l2": round(moved**0.5, 5),
    }


def run(method: str, rate: float, seed: int, part: str = "heldout") -> dict[str, Any]:
    """Train the start of a seed; returns the measurements after each of `LOOKS`."""
    cpu = time.process_time()
    model, tokenizer = start_of(seed)
    points = {
        str(row["step"]): measured(model, tokenizer, seed, part)
        for row in training(model, tokenizer, method, rate, seed)
        if row["step"] in LOOKS
    }
    return {"points": points, "cpu_seconds": round(time.process_time() - cpu, 1)}


def study(ledger: Ledger) -> None:
    """Run what is missing, seed by seed: the start, the teacher, and every method at every rate."""
    for seed in SEEDS:
        for phase in ("start", "teacher"):
            if ledger.wants(phase=phase, seed=seed):
                cpu = time.process_time()
                model, tokenizer = start_of(seed)
                found = measured(teacher_of(seed) if phase == "teacher" else model, tokenizer, seed, "heldout")
                ledger.add(phase=phase, seed=seed, **found, cpu_seconds=round(time.process_time() - cpu, 1))
                show(ledger.rows[-1])
        for rate in RATES:
            for method in METHODS:
                key = {"phase": "run", "method": method, "rate": rate, "seed": seed}
                if ledger.wants(**key):
                    ledger.add(**key, **run(method, rate, seed))
                    show(ledger.rows[-1])


def show(row: dict[str, Any]) -> None:
    """Print what a run came to."""
    for step, point in row.get("points", {"": row}).items():
        values = {name: round(share(point[name]), 3) for name in ("new", "old")}
        name = " ".join(str(row[key]) for key in ("phase", "method", "rate", "seed") if key in row)
        print(name, step, values, point["kl"], point["l2"], row["cpu_seconds"], flush=True)


# ---- the analysis: pure functions of the rows ----


def points_of(ledger: Ledger, seed: int) -> list[dict[str, Any]]:
    """Return all points of a seed with their method, rate and step; [] while one of its runs is missing."""
    rows = [row for row in ledger.select(phase="run", seed=seed) if row["method"] in METHODS]
    ends = {phase: ledger.find(phase=phase, seed=seed) for phase in ("start", "teacher")}
    if ends["start"] is None or ends["teacher"] is None or len(rows) < len(METHODS) * len(RATES):
        return []
    start = share(ends["start"]["old"])
    return [
        {
            "method": row["method"],
            "rate": row["rate"],
            "step": int(step),
            "rate and steps": (row["rate"], int(step)),
            "recipe": (row["method"], row["rate"], int(step)),
            "change": share(point["old"]) - start,
            **point,
        }
        for row in rows
        for step, point in row["points"].items()
    ]


def falling_curve(x: Sequence[float], y: Sequence[float], at: Sequence[float]) -> np.ndarray:
    """Isotonic regression of y on x with a curve that never rises, read at the points `at`.

    Between two of the points it is a straight line, and beyond them it is constant.

    >>> falling_curve([1, 2, 3], [0.0, -2.0, -1.0], at=[0, 1.5, 3])
    array([ 0.  , -0.75, -1.5 ])
    """
    from scipy.optimize import isotonic_regression

    order = np.argsort(x, kind="stable")
    fitted = isotonic_regression(np.asarray(y, dtype=float)[order], increasing=False).x
    return np.interp(at, np.asarray(x, dtype=float)[order], fitted)


def quadratic(x: Sequence[float], y: Sequence[float], at: Sequence[float]) -> np.ndarray:
    """The least-squares polynomial of degree two, read at the points `at`."""
    return np.polyval(np.polyfit(x, y, 2), at)


def mean_of_equals(x: Sequence[Any], y: Sequence[float], at: Sequence[Any]) -> np.ndarray:
    """Return the mean of the y whose x is the same, for each of `at`: what rate and number of steps alone predict."""
    return np.array([np.mean([value for place, value in zip(x, y, strict=True) if place == one]) for one in at])


def r_squared(y: Sequence[float], predicted: Sequence[float] | np.ndarray) -> float:
    """1 − Σ (y − predicted)² / Σ (y − mean of y)², which is negative where the mean predicts better.

    >>> r_squared([0, 2], [0, 1])
    0.5
    """
    values = np.asarray(y, dtype=float)
    return float(1 - ((values - np.asarray(predicted)) ** 2).sum() / ((values - values.mean()) ** 2).sum())


def left_out(by_seed: Sequence[Sequence[dict]], distance: str, fit: Any, own: bool = False) -> list[float]:
    """R² of each seed, whose changes are predicted by a curve through the points of the other seeds.

    own: each method has a curve of its own, instead of one for all.
    """
    found = []
    for number, tested in enumerate(by_seed):
        others = [point for seed, points in enumerate(by_seed) if seed != number for point in points]
        predicted = np.zeros(len(tested))
        for group in sorted({point["method"] for point in tested}) if own else (None,):
            fitted = [point for point in others if group in (None, point["method"])]
            at = [place for place, point in enumerate(tested) if group in (None, point["method"])]
            predicted[at] = fit(
                [point[distance] for point in fitted],
                [point["change"] for point in fitted],
                [tested[place][distance] for place in at],
            )
        found.append(r_squared([point["change"] for point in tested], predicted))
    return found


def method_left_out(by_seed: Sequence[Sequence[dict]], distance: str, method: str) -> float:
    """R² of a method's points, whose changes are predicted by a falling curve through the points of all others."""
    points = [point for seed in by_seed for point in seed]
    tested = [point for point in points if point["method"] == method]
    others = [point for point in points if point["method"] != method]
    fitted = [[point[name] for point in others] for name in (distance, "change")]
    predicted = falling_curve(*fitted, [point[distance] for point in tested])
    return r_squared([point["change"] for point in tested], predicted)


def within_recipes(by_seed: Sequence[Sequence[dict]], distance: str) -> float:
    """The correlation of distance and change after the mean of each recipe (method, rate, steps) is subtracted."""
    points = [point for seed in by_seed for point in seed]
    recipes = [point["recipe"] for point in points]
    values = []
    for name in (distance, "change"):
        column = [point[name] for point in points]
        values.append(np.array(column) - mean_of_equals(recipes, column, recipes))
    return float(np.corrcoef(*values)[0, 1])


def prediction(by_seed: Sequence[Sequence[dict]]) -> dict[str, Any]:
    """R² on the seed that was left out, for each distance, and the differences from that of the main one."""
    falling = {distance: left_out(by_seed, distance, falling_curve) for distance in DISTANCES}
    own = {distance: left_out(by_seed, distance, falling_curve, own=True) for distance in DISTANCES}
    found: dict[str, Any] = {}
    for distance, values in falling.items():
        found[distance] = {
            "falling": {**estimate(values), "seeds": values},
            "quadratic": estimate(left_out(by_seed, distance, quadratic)),
            "one curve per method": estimate(own[distance]),
        }
        if distance != "kl":
            found[distance]["kl minus this"] = estimate([a - b for a, b in zip(falling["kl"], values, strict=True)])
    found["kl"]["own curves minus one curve"] = estimate([a - b for a, b in zip(own["kl"], falling["kl"], strict=True)])
    return found


def interpolated(x: float, known: Sequence[tuple[float, Sequence[float]]]) -> np.ndarray | None:
    """Return a vector at x, between the two known points next to it (equal ones averaged); None outside of them.

    >>> interpolated(1.0, [(0.0, [0, 1]), (4.0, [1, 1])])
    array([0.25, 1.  ])
    """
    places = sorted({place for place, _ in known})
    if not places[0] <= x <= places[-1]:
        return None
    rows = np.array([np.mean([row for at, row in known if at == place], axis=0) for place in places])
    return np.array([np.interp(x, places, column) for column in rows.T])


def matched(
    starts: Sequence[dict[str, Any]], by_seed: Sequence[Sequence[dict]], method: str, equal: str
) -> dict[str, Any]:
    """Old accuracy of a method minus that of supervised training at equal `equal` ("kl" or "new").

    Returns the difference over seeds and problems, its p-value over seeds, and how many points could be compared.
    """

    def place(point: dict[str, Any]) -> float:
        return share(point["new"]) if equal == "new" else point[equal]

    before, after, compared, total = [], [], 0, 0
    for start, points in zip(starts, by_seed, strict=True):
        known = [
            (place(row), ones(row["old"])) for row in (start, *points) if row.get("method") in (None, "supervised")
        ]
        own = [point for point in points if point["method"] == method]
        pairs = [
            (expected, ones(point["old"]))
            for point in own
            if (expected := interpolated(place(point), known)) is not None
        ]
        compared, total = compared + len(pairs), total + len(own)
        if pairs:
            before.append(np.mean([old for old, _ in pairs], axis=0).tolist())
            after.append(np.mean([new for _, new in pairs], axis=0).tolist())
    found: dict[str, Any] = {"compared": compared, "of": total, "seeds": len(before)}
    if len(before) >= 3:
        differences = [float(np.mean(new) - np.mean(old)) for old, new in zip(before, after, strict=True)]
        found |= vars(crossed_bootstrap(before, after)) | {"p_value": paired_p(differences), "each": differences}
    return found


def described(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Means over seeds of both accuracies and of every distance."""
    found = {name: float(np.mean([share(row[name]) for row in rows])) for name in ("new", "old")}
    return found | {name: float(np.mean([row[name] for row in rows])) for name in DISTANCES}


def summary(ledger: Ledger) -> dict[str, Any]:
    """Return the analysis of the module's docstring, for the seeds whose runs are complete; {} for fewer than three."""
    complete = {seed: points for seed in SEEDS if (points := points_of(ledger, seed))}
    if len(complete) < 3:
        return {}
    by_seed = list(complete.values())
    starts, teachers = (
        [row for seed in complete for row in ledger.select(phase=phase, seed=seed)] for phase in ("start", "teacher")
    )
    found: dict[str, Any] = {"seeds": list(complete), "start": described(starts), "teacher": described(teachers)}
    found["points"] = [
        {"method": method, "rate": rate, "step": step}
        | described(
            [
                point
                for points in by_seed
                for point in points
                if (point["method"], point["rate"], point["step"]) == (method, rate, step)
            ]
        )
        for method in METHODS
        for rate in RATES
        for step in LOOKS
    ]
    near = [[point for point in points if point["method"] != "other form"] for points in by_seed]
    found["prediction"] = {"all methods": prediction(by_seed), "without other form": prediction(near)}
    found["rate and steps"] = {}  # a predictor without any distance, added after the result
    for name, points in {"all methods": by_seed, "without other form": near}.items():
        values = left_out(points, "rate and steps", mean_of_equals)
        main = found["prediction"][name]["kl"]["falling"]["seeds"]
        found["rate and steps"][name] = {
            **estimate(values),
            "kl minus this": estimate([a - b for a, b in zip(main, values, strict=True)]),
        }
    found["method left out"] = {
        distance: {method: method_left_out(by_seed, distance, method) for method in METHODS} for distance in DISTANCES
    }
    found["recipe"] = {  # method, rate and steps: what a new seed of a known recipe is predicted from
        "r_squared": estimate(left_out(by_seed, "recipe", mean_of_equals)),
        "correlation of the KL within a recipe": within_recipes(by_seed, "kl"),
    }
    found["matched"] = {
        f"equal {equal}": {method: matched(starts, by_seed, method, equal) for method in METHODS[1:]}
        for equal in ("kl", "new")
    }
    found["GRPO at the lower rate, equal new"] = {  # added after the result, with `supervised` at both rates or at one
        name: matched(starts, [[p for p in points if keep(p)] for points in by_seed], "GRPO", "new")
        for name, keep in {
            "both rates": lambda point: point["rate"] == min(RATES) or point["method"] == "supervised",
            "the lower rate": lambda point: point["rate"] == min(RATES),
        }.items()
    }
    found["left by Holm"] = left_by_holm(
        {
            f"{method}, {equal}": row["p_value"]
            for equal, rows in found["matched"].items()
            for method, row in rows.items()
            if "p_value" in row
        }
    )
    found["cpu_seconds"] = round(sum(row["cpu_seconds"] for row in ledger.rows))
    return found


def picture(ledger: Ledger) -> Any:
    """Draw the change of the old accuracy against the KL divergence, and against the accuracy on the new task."""
    from grpo_edu.figures.style import COLORS, LEGEND, MARKERS, WIDE, sheet, style_axes

    figure = sheet(WIDE, 4.0)
    left, right = figure.subplots(1, 2, sharey=True)
    points = [point for seed in SEEDS for point in points_of(ledger, seed)]
    for method, color, marker in zip(METHODS, COLORS, MARKERS, strict=False):
        own = [point for point in points if point["method"] == method]
        change = [100 * point["change"] for point in own]
        for axes, places in (
            (left, [point["kl"] for point in own]),
            (right, [100 * share(point["new"]) for point in own]),
        ):
            axes.scatter(places, change, s=22, color=color, marker=marker, alpha=0.8, linewidths=0, label=method)
    style_axes(
        left, "At equal distance", "change of the old accuracy in points", "KL(start ‖ trained), nats per completion"
    )
    style_axes(right, "At equal accuracy on the new task", "", "new puzzles solved, in percent")
    left.set_xscale("log")
    left.legend(**LEGEND)
    return figure


def main() -> int:
    """Run what is missing, and write the summary and its picture."""
    ledger = Ledger(LEDGER, ledger_options(COMMAND, __doc__).parse_args().minutes)
    study(ledger)
    found = summary(ledger)
    if found:
        save(LEDGER.with_suffix(".json"), COMMAND, found)
        save_picture(LEDGER, picture(ledger))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
