"""A run in which a skill grows: ``python -m benchmarks.skill``, see benchmarks/studies/skill.md.

GRPO trains the model `halfway`, which has half learned ten kinds of puzzles, and the greedy accuracy on held-out
puzzles is compared with two baselines: supervised training on as many tokens, and the same GRPO run with its rewards
shuffled among the completions. Two further cold starts with other seeds show how much depends on the start, and pass@k
is estimated before and after GRPO, in total and for each kind of puzzle. Each run is one line of
``benchmarks/results/skill.jsonl``. The same command continues where it stopped, and ``skill.json`` holds the summary.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks.harness import (
    RESULTS,
    Ledger,
    bits,
    estimate,
    exit_code,
    ledger_options,
    ones,
    over_seeds_and_kinds,
    over_seeds_and_problems,
    save,
    share,
    shuffled,
)
from grpo_edu import (
    GRPOConfig,
    accuracy_reward,
    evaluate,
    generate,
    load_policy,
    pass_at_k,
    render_prompt,
    save_policy,
    train,
)
from grpo_edu.config import SupervisedConfig
from grpo_edu.continual.supervised import finetune
from grpo_edu.evaluation import Evaluation, crossed_bootstrap, mcnemar, paired_bootstrap
from grpo_edu.problems.puzzles import puzzle_splits
from grpo_edu.rewards import check_equations
from recipes.cold_start import CONFIG as COLD_START

COMMAND = "python -m benchmarks.skill"
LEDGER = RESULTS / "skill.jsonl"
MODELS = RESULTS.parents[1] / "runs" / "skill"  # the trained models, for pass@k
MODEL = "halfway"
STEPS, RATE = 60, 1e-4  # 16 prompts × 8 completions, the package's default settings
SUPERVISED_RATE = 1e-3  # that of the cold start
SEEDS = (0, 1, 2, 3, 4)
LENGTH = 64  # tokens; the longest worked solution has about 30
STARTS = (2, 3)  # seeds of two more cold starts; `halfway` is the one of seed 1
FIRST_SAMPLES = 64  # of the first study of pass@k, whose counts are stored as the phase "pass"
SAMPLES, KS = 1024, (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
NUM_PASS, NUM_KINDS = 150, 10  # held-out puzzles for pass@k; their kinds take turns
ARMS = ("grpo", "shuffled", "supervised")
TIMES = ("seconds", "cpu_seconds")


def run_arm(model, tokenizer, arm: str, seed: int) -> Iterator[dict[str, Any]]:
    """Train `model` in place, without end; yields the metrics of each step."""
    problems = puzzle_splits()["train"]
    if arm == "supervised":
        config = SupervisedConfig(max_steps=10**6, prompts_per_step=32, learning_rate=SUPERVISED_RATE, seed=seed)
        return finetune(model, tokenizer, problems, config)
    reward = shuffled(accuracy_reward, seed) if arm == "shuffled" else accuracy_reward
    config = GRPOConfig(max_steps=10**6, learning_rate=RATE, seed=seed, max_completion_length=LENGTH)
    return train(model, tokenizer, problems, reward, config)


def train_until(metrics: Iterator[dict[str, Any]], *, steps: int | None = None, tokens: int | None = None) -> dict:
    """Train for so many steps, or until so many tokens were processed; returns steps, tokens, seconds."""
    started, cpu = time.perf_counter(), time.process_time()
    for row in metrics:
        if row["step"] == steps or (tokens is not None and row["num_tokens"] >= tokens):
            break
    spent = {"seconds": round(time.perf_counter() - started, 1), "cpu_seconds": round(time.process_time() - cpu, 1)}
    return {"steps": row["step"], "tokens": int(row["num_tokens"]), **spent}


def measure(model, tokenizer, problems: Sequence, temperature: float = 0) -> Evaluation:
    """Return one answer for each problem, greedy unless another temperature is given."""
    return evaluate(
        model, tokenizer, problems, temperature=temperature, max_completion_length=LENGTH, batch_size=200, seed=1
    )


def anatomy(found: Evaluation) -> dict[str, float]:
    """Of the answers: the share with a valid answer, and the share of their equations that are true."""
    equations = [holds for text in found.completions for holds in check_equations(text)]
    valid = sum(answer is not None for answer in found.answers) / found.n
    return {"answered": valid, "true_equations": sum(equations) / max(1, len(equations))}


def pass_counts(model, tokenizer, seed: int) -> list[int]:
    """Return how many of 1,024 samples at temperature 1 are right, for each of the first 150 held-out puzzles."""
    problems = puzzle_splits()["heldout"][:NUM_PASS]
    generator, counts = torch.Generator().manual_seed(seed), []
    for problem in problems:
        prompt = render_prompt(tokenizer, problem.prompt)
        right = 0
        for _ in range(0, SAMPLES, 256):
            rollout = generate(
                model, tokenizer, [prompt], num_generations=256, max_completion_length=LENGTH, generator=generator
            )
            right += int(sum(accuracy_reward(rollout.completions, [problem.answer] * 256)))
        counts.append(right)
    return counts


def pass_curve(counts: Sequence[int], samples: int = SAMPLES) -> dict[str, float]:
    """pass@k for each k of `KS` up to `samples`, the mean over puzzles, from each puzzle's number of right samples."""
    return {str(k): sum(pass_at_k(samples, count, k) for count in counts) / len(counts) for k in KS if k <= samples}


def trained_policy(seed: int) -> tuple:
    """Return the model after the GRPO run of a seed, and its tokenizer; trained now if its folder is not there."""
    folder = MODELS / f"grpo-{seed}"
    if not folder.exists():
        model, tokenizer = load_policy(MODEL)
        train_until(run_arm(model, tokenizer, "grpo", seed), steps=STEPS)
        save_policy(model, tokenizer, folder)
    return load_policy(folder)


def report(ledger: Ledger, arms: Sequence[str], seeds: Sequence[int]) -> None:
    """Run the reported seeds: every arm, evaluated greedily and sampled on all held-out puzzles."""
    heldout = puzzle_splits()["heldout"]
    if not ledger.find(phase="before"):
        ledger.add(phase="before", **outcome(*load_policy(MODEL), heldout))
    for seed in seeds:
        for arm in arms:
            grpo = ledger.find(phase="report", arm="grpo", seed=seed)
            if not ledger.wants(phase="report", arm=arm, seed=seed) or (arm == "supervised" and not grpo):
                continue
            model, tokenizer = load_policy(MODEL)
            metrics = run_arm(model, tokenizer, arm, seed)
            spent = (
                train_until(metrics, tokens=grpo["tokens"])
                if arm == "supervised"
                else train_until(metrics, steps=STEPS)
            )
            found = outcome(model, tokenizer, heldout)
            ledger.add(phase="report", arm=arm, seed=seed, **spent, **found)
            print(f"{arm} seed {seed}: greedy {share(found['greedy']):.1%} {spent}", flush=True)
            if arm == "grpo":
                save_policy(model, tokenizer, MODELS / f"{arm}-{seed}", overwrite=True)


def report_starts(ledger: Ledger, seeds: Sequence[int]) -> None:
    """GRPO from two more cold starts, which differ from `halfway` in their seed only."""
    heldout = puzzle_splits()["heldout"]
    for start in STARTS:
        missing = [seed for seed in seeds if ledger.wants(phase="starts", start=start, seed=seed)]
        if not missing:
            continue
        model, tokenizer = load_policy("tiny")
        *_, _ = finetune(model, tokenizer, puzzle_splits()["train"], replace(COLD_START, seed=start))
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        if not ledger.find(phase="before starts", start=start):
            ledger.add(phase="before starts", start=start, **outcome(model, tokenizer, heldout))
        for seed in missing:
            if ledger.late:
                return
            model.load_state_dict(weights)
            spent = train_until(run_arm(model, tokenizer, "grpo", seed), steps=STEPS)
            ledger.add(phase="starts", start=start, seed=seed, **spent, **outcome(model, tokenizer, heldout))
            print(f"start {start} seed {seed}: greedy {share(ledger.rows[-1]['greedy']):.1%} {spent}", flush=True)


def report_pass(ledger: Ledger, seeds: Sequence[int]) -> None:
    """Compute the counts behind pass@k: two draws before training, and one after each GRPO run."""
    for seed, draw in ((None, 1), (None, 2), *((seed, 1) for seed in seeds)):
        if not ledger.wants(phase="pass 1024", seed=seed, draw=draw):
            continue
        policy = load_policy(MODEL) if seed is None else trained_policy(seed)
        ledger.add(phase="pass 1024", seed=seed, draw=draw, counts=pass_counts(*policy, draw))
        print("pass@k", seed, draw, pass_curve(ledger.rows[-1]["counts"]), flush=True)


def outcome(model, tokenizer, problems: Sequence) -> dict[str, Any]:
    """Greedy and sampled answers on the same problems: a 1 or 0 for each, and what the greedy ones are made of."""
    greedy, sampled = (measure(model, tokenizer, problems, temperature) for temperature in (0, 1.0))
    return {"greedy": bits(greedy.correct), "sampled": bits(sampled.correct), **anatomy(greedy)}


def summary(ledger: Ledger) -> dict[str, Any]:
    """Greedy gains by arm: each seed with its paired test, and the mean over seeds with Student's interval."""
    before = ledger.find(phase="before")
    start = {way: share(before[way]) for way in ("greedy", "sampled")}
    found: dict[str, Any] = {
        "before": {**start, "n": len(before["greedy"]), "true_equations": before["true_equations"]}
    }
    found["before"]["per_kind"] = kinds(before["greedy"])
    for arm in ARMS:
        runs = sorted(ledger.select(phase="report", arm=arm), key=lambda row: row["seed"])
        if not runs:
            continue
        pairs = [(ones(before["greedy"]), ones(row["greedy"])) for row in runs]
        gains = {way: [share(row[way]) - start[way] for row in runs] for way in start}
        found[arm] = {
            "seeds": [row["seed"] for row in runs],
            **{way: [share(row[way]) for row in runs] for way in start},
            **{f"{way}_gain": estimate(values) for way, values in gains.items() if len(values) > 1},
            "over seeds and puzzles": gains_of(before, runs) if len(runs) > 1 else None,
            "per_kind": [
                sum(shares) / len(runs) for shares in zip(*(kinds(row["greedy"]) for row in runs), strict=True)
            ],
            "per_seed": [vars(paired_bootstrap(*pair)) for pair in pairs],
            "p_value": [mcnemar(*pair).p_value for pair in pairs],
            **{name: [row.get(name) for row in runs] for name in ("true_equations", "steps", "tokens", *TIMES)},
        }
    for other in ("supervised", "shuffled"):
        if len(found.get(other, {}).get("seeds", ())) > 1:
            by_seed = {
                arm: dict(zip(found[arm]["seeds"], found[arm]["greedy"], strict=True)) for arm in ("grpo", other)
            }
            pairs = [by_seed["grpo"][seed] - value for seed, value in by_seed[other].items() if seed in by_seed["grpo"]]
            found[f"grpo minus {other}"] = estimate(pairs)
    for start in STARTS:
        first, runs = ledger.find(phase="before starts", start=start), ledger.select(phase="starts", start=start)
        if first and len(runs) > 1:
            found.setdefault("starts", {})[str(start)] = gains_of(first, runs)
    if found.get("starts") and "grpo" in found:
        runs = sorted(ledger.select(phase="report", arm="grpo"), key=lambda row: row["seed"])
        found["starts"]["1"] = gains_of(before, runs)
        means = [row["greedy"]["difference"] for row in found["starts"].values()]
        found["over starts"] = {"greedy_gain": estimate(means), "starts": len(means)}
    for phase, samples in (("pass 1024", SAMPLES), ("pass", FIRST_SAMPLES)):  # the larger study, when it is complete
        draws = [row["counts"] for row in ledger.select(phase=phase, seed=None)]
        after = [row["counts"] for row in ledger.select(phase=phase) if row["seed"] is not None]
        if draws and len(after) == len(SEEDS):
            known = [count > 0 for count in draws[0]]
            runs = sorted(ledger.select(phase="report", arm="grpo"), key=lambda row: row["seed"])
            found["pass"] = {**pass_summary(draws, after, samples), **newly_solved(before, runs, known)}
            break
    return found


def newly_solved(before: dict[str, Any], runs: Sequence[dict[str, Any]], known: Sequence[bool]) -> dict[str, Any]:
    """For each seed: how many of these puzzles only the trained model solves greedily, and how many of them were known.

    known: for each of the first puzzles, whether the untrained model had a right answer among its samples. "not solved
    before" counts the puzzles that could be newly solved, so that the two shares of known puzzles can be compared.
    """
    unsolved = [i for i in range(len(known)) if before["greedy"][i] == "0"]
    new = [[i for i in unsolved if run["greedy"][i] == "1"] for run in runs]
    return {
        "not solved before": len(unsolved),
        "of the unsolved known": sum(known[i] for i in unsolved),
        "newly solved": [len(row) for row in new],
        "of these known": [sum(known[i] for i in row) for row in new],
    }


def gains_of(before: dict[str, Any], runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the gain, greedy and sampled, with its intervals over seeds and puzzles, and over seeds and kinds."""
    found: dict[str, Any] = {
        way: over_seeds_and_problems([before[way]] * len(runs), [run[way] for run in runs])
        for way in ("greedy", "sampled")
    }
    answers = [ones(before["greedy"])] * len(runs), [ones(run["greedy"]) for run in runs]
    return found | {"greedy, over kinds": over_seeds_and_kinds(*answers, NUM_KINDS)}


def kinds(bits: str) -> list[float]:
    """Return the share of solved puzzles of each kind; the kinds take turns."""
    return [share(bits[kind::NUM_KINDS]) for kind in range(NUM_KINDS)]


def pass_summary(draws: Sequence[Sequence[int]], after: Sequence[Sequence[int]], samples: int) -> dict[str, Any]:
    """pass@k before (each draw) and after (each seed), the change over seeds and puzzles, and both by kind.

    A puzzle is solved if one of its samples is right. "gained" and "lost" compare each seed with the first draw;
    "with half of the samples" says how much of this a second draw of the untrained model would do (`halves`).
    "change without the largest kind" leaves out the kind whose pass@64 grows most, and "change without the largest and
    the smallest kind" also the one that grows least.
    """
    first = draws[0]
    by_kind = [
        {
            "before": pass_curve(first[kind::NUM_KINDS], samples),
            "after": [pass_curve(counts[kind::NUM_KINDS], samples) for counts in after],
            "right": {"before": sum(first[kind::NUM_KINDS]), "after": [sum(row[kind::NUM_KINDS]) for row in after]},
        }
        for kind in range(NUM_KINDS)
    ]
    k = str(FIRST_SAMPLES)
    growth = [sum(row[k] for row in kind["after"]) / len(after) - kind["before"][k] for kind in by_kind]
    largest, smallest = growth.index(max(growth)), growth.index(min(growth))

    def solved(k: int, kept: Sequence[int]) -> list[list[list[float]]]:
        return [
            [[pass_at_k(samples, row[number], k) for number in kept] for row in rows]
            for rows in ([first] * len(after), after)
        ]

    def change(of_kinds: Sequence[int]) -> dict[str, dict[str, float]]:
        kept = [number for number in range(len(first)) if number % NUM_KINDS in of_kinds]
        return {str(k): vars(crossed_bootstrap(*solved(k, kept))) for k in KS if k <= samples}

    for number, kind in enumerate(by_kind):
        kind["change"] = change([number])
    return {
        "samples": samples,
        "puzzles": len(first),
        "before": [pass_curve(counts, samples) for counts in draws],
        "after": [pass_curve(counts, samples) for counts in after],
        "change": change(range(NUM_KINDS)),
        "change over kinds": {
            str(k): over_seeds_and_kinds(*solved(k, range(len(first))), NUM_KINDS) for k in KS if k <= samples
        },
        "largest kind": largest,
        "change without the largest kind": change([kind for kind in range(NUM_KINDS) if kind != largest]),
        "change without the largest and the smallest kind": change(
            [kind for kind in range(NUM_KINDS) if kind not in (largest, smallest)]
        ),
        "by kind": by_kind,
        "gained": [sum(new > 0 and not old for old, new in zip(first, counts, strict=True)) for counts in after],
        "lost": [sum(old > 0 and not new for old, new in zip(first, counts, strict=True)) for counts in after],
        "with half of the samples": halves(first, after, samples),
    }


def halves(first: Sequence[int], after: Sequence[Sequence[int]], samples: int) -> dict[str, Any]:
    """Gained and lost puzzles with half of the samples of each: two draws of the untrained model, and each seed.

    The stored samples of one draw, split into two halves at random, are two smaller draws. "second draw" is the
    expected number of puzzles that one half solves and the other does not, so a second draw gains and loses as many.
    """
    half = samples // 2
    old, *new = ([pass_at_k(samples, count, half) for count in counts] for counts in (first, *after))
    return {
        "samples": half,
        "second draw": sum(1 - share for share, count in zip(old, first, strict=True) if count),
        "gained": [sum((1 - b) * a for b, a in zip(old, row, strict=True)) for row in new],
        "lost": [sum(b * (1 - a) for b, a in zip(old, row, strict=True)) for row in new],
    }


def verdicts(found: dict[str, Any]) -> dict[str, bool]:
    """Return the statements of the study."""
    grpo, least = found["grpo"], min(row["difference"] for row in found["grpo"]["per_seed"])
    return {
        "greedy accuracy rises by at least 15 points on every seed": least >= 0.15,
        "p < 0.001 on every seed (exact McNemar test)": max(grpo["p_value"]) < 0.001,
        "with shuffled rewards it rises on no seed": max(found["shuffled"]["greedy"]) <= found["before"]["greedy"],
    }


def main() -> int:
    """Run what is missing; exit 1 if a statement does not hold."""
    parser = ledger_options(COMMAND, __doc__)
    parts = (*ARMS, "starts", "pass")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="only these")
    parser.add_argument("--seeds", type=int, nargs="+", choices=SEEDS, default=SEEDS, help="only these")
    options = parser.parse_args()
    ledger = Ledger(LEDGER, options.minutes)
    report(ledger, [arm for arm in ARMS if arm in options.parts], options.seeds)
    if "starts" in options.parts:
        report_starts(ledger, options.seeds)
    if "pass" in options.parts:
        report_pass(ledger, options.seeds)
    found = summary(ledger)
    if not {"grpo", "shuffled"} <= found.keys():
        return 0
    judged = verdicts(found)
    save(LEDGER.with_suffix(".json"), COMMAND, {"verdicts": judged, **found})
    return exit_code(judged)


if __name__ == "__main__":
    raise SystemExit(main())
