"""GRPO on a model that somebody else pretrained: ``python -m benchmarks.real_model``.

The protocol is benchmarks/studies/real_model.md. SmolLM2-135M-Instruct learns to follow verifiable instructions, and
the word problems of this course after a cold start. An arm has the learning rate with the highest mean reward on
selection problems and one or two selection seeds, or that of the arm from which it differs in its rewards only; a
single rate is not selected. Then it runs on the reported seeds and is judged on 300 held-out problems, greedily and
sampled, and on GSM8K's test problems. Baselines are the same run with shuffled rewards, and supervised training on as
many tokens. In the file of runs, the phases that end in "after 30 steps" are those of the first rule of the arithmetic,
and those that end in "at 5e-4" of its adapters at another rate. A row that was superseded stays, under a phase that
says so, and no row is deleted (``python -m benchmarks.lost_rows``).

Each result is one line of ``benchmarks/results/real_model.jsonl``. Training runs are kept in ``runs/real_model`` with
checkpoints, so that the same command continues in the middle of a run that was killed. ``--minutes 60`` starts nothing
new after an hour. ``real_model.json`` holds the summary.

Weights and optimizer are in float32. Where the processor multiplies in bfloat16 (``FAST_BF16``), the products of
training are in bfloat16 with sums in float32, and a copy of the policy in bfloat16 samples the rollouts, with the
correction of notebook 09; elsewhere all is in float32. Every policy is evaluated in float32.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import (
    GSM8K,
    RESULTS,
    Ledger,
    bits,
    estimate,
    finetune_for,
    finish_run,
    ledger_options,
    ones,
    over_seeds_and_kinds,
    save,
    share,
    shuffled,
)
from grpo_edu import GRPOConfig, accuracy_reward, evaluate, generate, load_policy, load_problems, render_prompt
from grpo_edu.config import SupervisedConfig
from grpo_edu.continual.supervised import finetune
from grpo_edu.evaluation import Evaluation, crossed_bootstrap, mcnemar
from grpo_edu.fast.lora import add_lora, load_adapters, merge_lora, save_adapters
from grpo_edu.machine.hardware import cpu_report
from grpo_edu.model_files import choose_device
from grpo_edu.models import save_policy
from grpo_edu.problems.files import load_gsm8k
from grpo_edu.problems.instructions import (
    CONSTRAINTS,
    check_instruction,
    constraint_reward,
    instruction_problems,
    instruction_reward,
    make_instructions,
    topic_reward,
)
from grpo_edu.problems.templates import Problem, prompt_options
from grpo_edu.rewards import RewardFunction
from grpo_edu.runs.options import RunConfig
from grpo_edu.studies.fluency import fluency
from grpo_edu.trainer import train

COMMAND = "python -m benchmarks.real_model"
LEDGER = RESULTS / "real_model.jsonl"
FOLDER = RESULTS.parents[1] / "runs" / "real_model"
# Names in older rows: of an arm, and of the third check of an answer.
OLD_NAMES = {
    "readable": "strict",
    "greedy/readable": "greedy/sentence_form",
    "sampled/readable": "sampled/sentence_form",
}
MODEL, SELECTION_SEED, SEEDS = "smollm2", 100, (0, 1, 2, 3, 4, 5, 6, 7)
# Reported after the arithmetic's second rule of selection had been made; seeds 0 to 2 had been looked at before.
NEW_SEEDS = (3, 4, 5, 6, 7)
FIRST_RULE = "report of the rate after 30 steps"
NUM_HELDOUT, NUM_SELECTION, NUM_GSM8K = 300, 100, 300
DEVICE = choose_device()
FAST_BF16 = DEVICE.type == "cpu" and cpu_report()["fast_bf16"]
SAMPLER = "bf16" if FAST_BF16 else None
MACHINE = f"{DEVICE.type}, {SAMPLER or 'fp32'}"
COLD_START = SupervisedConfig(max_steps=48, prompts_per_step=12, learning_rate=1e-4)
# Of the arithmetic's adapters: of the cold start and of GRPO. Neither was selected by rewards. GRPO at 5e-4 had ended
# at 0%; a quarter of the shipped adapters' 5e-4 is about 1e-4, as all weights have a quarter of the instructions' rate.
ADAPTERS_RATE, ADAPTERS_GRPO = 1e-3, 1e-4


@dataclass(frozen=True)
class Task:
    """What the model learns: the settings of GRPO that all arms share, and the problems by the part of the study."""

    config: GRPOConfig
    data: str
    steps: int
    selection_steps: int
    selection_seeds: tuple[int, ...] = (SELECTION_SEED,)
    seeds: tuple[int, ...] = SEEDS


TASKS = {
    "instructions": Task(
        GRPOConfig(
            prompts_per_step=8,
            num_generations=8,
            max_completion_length=48,
            loss_type="dr_grpo",
            scale_rewards="none",
            rollout_quantization=SAMPLER,
        ),
        data="instructions",
        steps=40,
        selection_steps=20,
        seeds=SEEDS[:5],
    ),
    "arithmetic": Task(
        GRPOConfig(
            prompts_per_step=8,
            num_generations=8,
            max_completion_length=40,
            loss_type="dr_grpo",
            rollout_quantization=SAMPLER,
        ),
        data="basic",
        steps=80,
        selection_steps=80,
        selection_seeds=(SELECTION_SEED, SELECTION_SEED + 1),
    ),
}


@dataclass(frozen=True)
class Arm:
    """One way to train: the reward that is paid, how it is used, and the grid of learning rates.

    Without a grid the arm takes the rate of its task's first arm, from which it then differs in its rewards only.
    """

    reward: RewardFunction
    rates: tuple[float, ...] = ()
    method: str = "grpo"
    lora_rank: int = 0


FULL, ADAPTERS, SUPERVISED = (5e-6, 1e-5, 2e-5, 4e-5), (5e-4, 1e-3, 2e-3), (1e-5, 3e-5, 1e-4)
ARMS: dict[str, dict[str, Arm]] = {
    "instructions": {
        "strict": Arm(instruction_reward, FULL),
        "constraint": Arm(constraint_reward),
        "topic": Arm(topic_reward),
        "adapters": Arm(instruction_reward, ADAPTERS, lora_rank=8),
        "supervised": Arm(instruction_reward, SUPERVISED, "supervised"),
        "shuffled": Arm(instruction_reward, method="shuffled"),
    },
    "arithmetic": {
        "grpo": Arm(accuracy_reward, FULL[:3]),
        "adapters": Arm(accuracy_reward, (ADAPTERS_GRPO,), lora_rank=8),
        "supervised": Arm(accuracy_reward, SUPERVISED, "supervised"),
        "shuffled": Arm(accuracy_reward, method="shuffled"),
    },
}


def open_ledger(minutes: float = float("inf")) -> Ledger:
    """Open the file of runs, with today's names in rows that were stored under older ones.

    minutes: as for `Ledger`.
    """
    ledger = Ledger(LEDGER, minutes)
    ledger.rows = [renamed(row) for row in ledger.rows]
    return ledger


def renamed(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row under today's names.

    >>> renamed({"arm": "readable", "greedy/readable": "10"})
    {'arm': 'strict', 'greedy/sentence_form': '10'}
    """
    found = {OLD_NAMES.get(key, key): value for key, value in row.items()}
    if "arm" in found:
        found["arm"] = OLD_NAMES.get(found["arm"], found["arm"])
    return found


@cache
def problems_of(task: str, part: str) -> tuple[Problem, ...]:
    """Return the problems of a task: "train", "selection" or "heldout"; the three have none in common."""
    if task == "instructions":
        if part != "selection":
            return tuple(instruction_problems("instructions", part))
        trained = {problem.prompt for problem in problems_of(task, "train")}
        others = [one for one in make_instructions(4 * NUM_SELECTION, 1, "train") if one.prompt not in trained]
        return tuple(others[:NUM_SELECTION])
    if part == "heldout":
        return tuple(load_problems(TASKS[task].data, "heldout", n=NUM_HELDOUT))
    known = load_problems(TASKS[task].data, "train")
    return tuple(known[:-NUM_SELECTION] if part == "train" else known[-NUM_SELECTION:])


@contextmanager
def products_in_bfloat16() -> Iterator[None]:
    """A context in which torch rounds the factors of float32 products to bfloat16, on processors that are faster so."""
    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "bf16" if FAST_BF16 else before
    try:
        yield
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before


def opened(source: str | Path) -> tuple[Any, Any]:
    """Return a model on the device of the study, and its tokenizer."""
    model, tokenizer = load_policy(source)
    return model.to(DEVICE), tokenizer


def start_of(task: str, seed: int, lora_rank: int = 0) -> str | Path:
    """Return what the runs of a seed start from: the model, or for the arithmetic its cold start with this seed.

    lora_rank: of a cold start with adapters; 0 trains all weights.
    """
    if task == "instructions":
        return MODEL
    folder = FOLDER / f"cold-start-{lora_rank or 'all'}-{seed}"
    if not folder.exists():
        model, tokenizer = opened(MODEL)
        config = replace(COLD_START, seed=seed)
        if lora_rank:
            torch.manual_seed(seed)
            model, config = add_lora(model, rank=lora_rank), replace(config, learning_rate=ADAPTERS_RATE)
        with products_in_bfloat16():
            for _ in finetune(model, tokenizer, problems_of(task, "train"), config):
                pass
        if lora_rank:
            save_adapters(model, folder)
        else:
            save_policy(model, tokenizer, folder)
    return folder


def trained(
    ledger: Ledger, task: str, name: str, rate: float, seed: int, steps: int
) -> tuple[Any, Any, dict[str, Any]]:
    """Return the policy after a run, its tokenizer, and what the run took; a run that was killed is resumed."""
    arm, folder = ARMS[task][name], FOLDER / f"{task}-{name}-{rate:g}-{seed}-{steps}"
    started = time.perf_counter()
    if arm.method == "supervised":
        model, tokenizer, tokens = supervised(ledger, task, arm, rate, seed, steps)
        return model, tokenizer, {"tokens": tokens, "seconds": round(time.perf_counter() - started, 1)}
    reward = shuffled(arm.reward, seed) if arm.method == "shuffled" else arm.reward
    config = replace(TASKS[task].config, max_steps=steps, learning_rate=rate, seed=seed)
    if task == "arithmetic" and arm.lora_rank:
        return adapters_trained_on(arm, config, folder)
    request = RunConfig(
        str(start_of(task, seed)),
        TASKS[task].data,
        reward_funcs=(reward,),
        config=config,
        lora_rank=arm.lora_rank,
        num_heldout=10,
        greedy=False,
        checkpoint_every=10,
    )
    with products_in_bfloat16():
        rows = finish_run(folder, request, COMMAND)
    return *opened(folder / "model"), spent_on(rows)


def spent_on(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what a run with these metrics of its steps took, and its rewards."""
    return {
        "reward": [round(row["reward"], 4) for row in rows],
        "tokens": rows[-1]["num_tokens"],
        "seconds": round(sum(row["step_time"] for row in rows), 1),
    }


def adapters_trained_on(arm: Arm, config: GRPOConfig, folder: Path) -> tuple[Any, Any, dict[str, Any]]:
    """GRPO on the adapters of the arithmetic's cold start, which one file then holds with what GRPO added.

    A run of the package would merge them first, so this one keeps no checkpoints.
    """
    start = start_of("arithmetic", config.seed, arm.lora_rank)
    base, tokenizer = opened(MODEL)
    model = load_adapters(base, start)
    with products_in_bfloat16():
        rows = list(train(model, tokenizer, problems_of("arithmetic", "train"), arm.reward, config))
    save_adapters(model, folder)
    return merge_lora(model), tokenizer, spent_on(rows)


def supervised(ledger: Ledger, task: str, arm: Arm, rate: float, seed: int, steps: int) -> tuple[Any, Any, int]:
    """Supervised training on as many tokens as the first arm's run of this seed and length processed.

    For the arithmetic the targets are worked solutions. The instructions have none, so the model's own samples take
    their place: as many as GRPO draws, of which those with a reward are kept (rejection sampling, as in RAFT).
    """
    first = next(iter(ARMS[task]))
    phase = "select" if seed in TASKS[task].selection_seeds else "report"
    like = ledger.find(phase=phase, task=task, arm=first, seed=seed, rate=best_rate(ledger, task, first))
    if like is None:
        raise SystemExit(f"The arm {first} has to run before supervised training on as many tokens as it took")
    tokens = like["tokens"]
    model, tokenizer = opened(start_of(task, seed))
    examples = list(problems_of(task, "train"))
    if task == "instructions":
        examples = own_answers(arm.reward, seed, steps)
    config = SupervisedConfig(max_steps=10**6, prompts_per_step=16, learning_rate=rate, seed=seed)
    with products_in_bfloat16():
        tokens = finetune_for(model, tokenizer, examples, config, tokens)
    return model, tokenizer, tokens


@cache
def own_answers(reward: RewardFunction, seed: int, steps: int) -> list[Problem]:
    """Return the rewarded answers among as many samples as a GRPO run draws, each as its problem's solution."""
    model, tokenizer = opened(MODEL)
    config = TASKS["instructions"].config
    generator, kept = torch.Generator().manual_seed(seed), []
    problems = problems_of("instructions", "train")
    order = random.Random(seed).sample(problems, len(problems))
    for start in range(0, config.prompts_per_step * steps, config.prompts_per_step):
        part = [order[(start + i) % len(order)] for i in range(config.prompts_per_step)]
        for problem, text, value in scored(model, tokenizer, part, reward, config, generator):
            if value:
                kept.append(replace(problem, solution=text))
    return kept


def scored(model, tokenizer, problems: Sequence[Problem], reward: RewardFunction, config: GRPOConfig, generator):
    """(problem, completion, reward) of a group of samples for each problem."""
    size = config.num_generations
    prompts = [render_prompt(tokenizer, one.prompt, **prompt_options(one.level)) for one in problems]
    length = config.max_completion_length
    rollout = generate(
        model, tokenizer, prompts, num_generations=size, max_completion_length=length, generator=generator
    )
    rows = [problem for problem in problems for _ in range(size)]
    columns = {"answer": [row.answer for row in rows], "level": [row.level for row in rows]}
    asked = [row.prompt for row in rows]
    return zip(rows, rollout.completions, reward(rollout.completions, prompts=asked, **columns), strict=True)


def judge(model, tokenizer, task: str, part: str) -> dict[str, Any]:
    """Greedy and sampled answers: a 1 or 0 for each problem, for instructions each part of the check, and fluency.

    The perplexity is that of the untrained model, which finds strange what a policy writes only for its reward.
    """
    found: dict[str, Any] = {}
    for way, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        answers = answer(model, tokenizer, task, problems_of(task, part), temperature)
        found[way] = bits(answers.correct)
        if task == "instructions":
            found |= {f"{way}/{name}": value for name, value in parts_of(answers, task, part).items()}
            found[f"{way}/fluency"] = fluency(*opened(MODEL), answers).to_dict()
        found[f"{way}/completions"] = answers.completions if way == "greedy" else []
    return found


def answer(model, tokenizer, task: str, problems: Sequence[Problem], temperature: float) -> Evaluation:
    """Return a policy's answers to problems of a task, with the settings of the study."""
    return evaluate(
        model,
        tokenizer,
        problems,
        temperature=temperature,
        max_completion_length=TASKS[task].config.max_completion_length,
        batch_size=100,
        seed=SELECTION_SEED + 1,
    )


def mean_reward(model, tokenizer, task: str, reward: RewardFunction) -> float:
    """Return the mean reward of two samples for each selection problem."""
    generator, config = torch.Generator().manual_seed(0), replace(TASKS[task].config, num_generations=2)
    values = [
        value for *_, value in scored(model, tokenizer, problems_of(task, "selection"), reward, config, generator)
    ]
    return sum(values) / len(values)


def parts_of(answers: Evaluation, task: str, part: str) -> dict[str, str]:
    """Return which parts of an instruction are fulfilled, a 1 or 0 for each problem."""
    pairs = zip(answers.completions, problems_of(task, part), strict=True)
    checks = [check_instruction(text, problem.answer) for text, problem in pairs]
    return {
        "obeyed": bits(all(check.obeyed.values()) for check in checks),
        "on_topic": bits(check.on_topic for check in checks),
        "sentence_form": bits(check.sentence_form for check in checks),
    }


def select(ledger: Ledger, task: str, name: str) -> None:
    """Run every rate of an arm on the selection seeds, judged by the arm's own mean reward on sampled answers."""
    arm = ARMS[task][name]
    if len(arm.rates) < 2:
        return
    for seed, rate in product(TASKS[task].selection_seeds, arm.rates):
        key = {"phase": "select", "task": task, "arm": name, "rate": rate, "seed": seed}
        if not ledger.wants(**key):
            continue
        model, tokenizer, spent = trained(ledger, task, name, rate, seed, TASKS[task].selection_steps)
        ledger.add(**key, machine=MACHINE, mean_reward=mean_reward(model, tokenizer, task, arm.reward), **spent)
        print(task, name, seed, rate, f"reward {ledger.rows[-1]['mean_reward']:.3f}", spent["seconds"], flush=True)


def best_rate(ledger: Ledger, task: str, name: str) -> float | None:
    """Return the rate with the best mean reward on the selection seeds, of equals the lowest; or the arm's only one.

    None while a run of the selection is missing.
    """
    source = name if ARMS[task][name].rates else next(iter(ARMS[task]))
    if len(ARMS[task][source].rates) == 1:
        return ARMS[task][source].rates[0]
    rewards: dict[float, list[float]] = {rate: [] for rate in ARMS[task][source].rates}
    for row in ledger.select(phase="select", task=task, arm=source):
        rewards[row["rate"]].append(row["mean_reward"])
    if any(len(found) < len(TASKS[task].selection_seeds) for found in rewards.values()):
        return None
    return max(rewards, key=lambda rate: (sum(rewards[rate]), -rate))


def start_key(task: str, name: str, seed: int, machine: str) -> dict[str, Any]:
    """Return what finds the judgement of the model that a run started from.

    A cold start is made again on each machine, and rounding makes another model of it.
    """
    key = {"phase": "before", "task": task}
    if task == "instructions":
        return key
    return {**key, "seed": seed, "lora_rank": ARMS[task][name].lora_rank, "machine": machine}


def report(ledger: Ledger, task: str, name: str, seed: int) -> None:
    """Train one reported run, and judge it on the held-out problems."""
    rate = best_rate(ledger, task, name)
    key = {"phase": "report", "task": task, "arm": name, "seed": seed}
    if rate is None or not ledger.wants(**key):
        return
    before, rank = start_key(task, name, seed, MACHINE), ARMS[task][name].lora_rank
    if not ledger.find(**before):
        start = opened(start_of(task, seed, rank))
        ledger.add(**before, **judge(*start, task, "heldout"))
        if GSM8K.is_dir() and task == "arithmetic" and not rank:
            report_gsm8k(ledger, *start, task, "cold start", seed)
    model, tokenizer, spent = trained(ledger, task, name, rate, seed, TASKS[task].steps)
    ledger.add(**key, rate=rate, machine=MACHINE, **spent, **judge(model, tokenizer, task, "heldout"))
    row = ledger.rows[-1]
    print(task, name, seed, f"greedy {share(row['greedy']):.3f} sampled {share(row['sampled']):.3f}", flush=True)
    if GSM8K.is_dir():
        report_gsm8k(ledger, model, tokenizer, task, name, seed)


def report_gsm8k(ledger: Ledger, model: Any, tokenizer: Any, task: str, name: str, seed: int) -> None:
    """Greedy accuracy of a model on 300 test problems of GSM8K."""
    key = {"phase": "gsm8k", "task": task, "arm": name, "seed": seed}
    if ledger.wants(**key):
        found = evaluate(
            model,
            tokenizer,
            load_gsm8k("test", GSM8K, n=NUM_GSM8K),
            temperature=0,
            max_completion_length=256,
            batch_size=50 if DEVICE.type == "cpu" else NUM_GSM8K,
        )
        ledger.add(**key, machine=MACHINE, greedy=bits(found.correct))
        print("gsm8k", task, name, seed, f"{found.k} of {found.n}", flush=True)


def summary(ledger: Ledger) -> dict[str, Any]:
    """Return each arm's gain over its start with intervals over seeds and problems, by kind of constraint as well.

    The arithmetic is summarised for all seeds, and for those that had not been looked at when its rule was made. The
    superseded run is reported with the one that replaced it.
    """
    found = {task: summary_of(ledger, task, TASKS[task].seeds) for task in ARMS}
    found["arithmetic, new seeds"] = summary_of(ledger, "arithmetic", NEW_SEEDS)
    first_rule = ledger.select(phase=FIRST_RULE, task="arithmetic")
    if first_rule and "grpo" in found["arithmetic"]:
        starts = [ledger.find(**start_key("arithmetic", "grpo", row["seed"], row["machine"])) for row in first_rule]
        found["arithmetic"]["first rule"] = {"rate": first_rule[0]["rate"], "minus before": minus(first_rule, starts)}
        found["arithmetic"]["grpo"]["minus first rule"] = minus(reports(ledger, "arithmetic", "grpo"), first_rule)
    found["superseded"] = superseded(ledger)
    found["paid without a model"] = paid_without_a_model()
    found["reported runs"] = dict(Counter(row["machine"] for row in ledger.select(phase="report")))
    return {task: rows for task, rows in found.items() if rows}


def superseded(ledger: Ledger) -> dict[str, Any]:
    """Return the superseded run of `strict` next to its successor, and the gain of the arm with it in its place."""
    row = ledger.find(phase="superseded report", task="instructions", arm="strict")
    before = ledger.find(phase="before", task="instructions")
    runs = reports(ledger, "instructions", "strict")
    if row is None or not runs:
        return {}
    other = next(run for run in runs if run["seed"] == row["seed"])
    replaced = [row if run is other else run for run in runs]
    found: dict[str, Any] = {
        way: {
            "superseded": share(row[way]),
            "reported": share(other[way]),
            "p_value": mcnemar(ones(row[way]), ones(other[way])).p_value,
        }
        for way in ways(row)
    }
    found["fluency"] = [one["greedy/fluency"] for one in (row, other)]
    found["cold starts, greedily"] = [share(start["greedy"]) for start in ledger.select(phase="superseded before")]
    changes = compared([before["greedy"]] * len(runs), [run["greedy"] for run in replaced], len(CONSTRAINTS))
    return found | {"change with it": {name: changes[name] for name in ("change", "over kinds")}}


def paid_without_a_model() -> dict[str, float]:
    """Return the reward of `strict` for answers to the held-out instructions that no model wrote."""
    problems = problems_of("instructions", "heldout")
    sentence = "Many people think fondly about {}."
    answers = {
        "the shipped solutions": [problem.solution for problem in problems],
        sentence.format("X"): [sentence.format(json.loads(problem.answer)["topic"]) for problem in problems],
    }
    truth = [problem.answer for problem in problems]
    return {name: sum(instruction_reward(texts, truth)) / len(truth) for name, texts in answers.items()}


def summary_of(ledger: Ledger, task: str, seeds: Sequence[int]) -> dict[str, Any]:
    """Return the arms of a task that have two of these seeds or more."""
    found: dict[str, Any] = {}
    kinds = len(CONSTRAINTS) if task == "instructions" else 1  # the kinds take turns
    start = ledger.find(phase="before", task=task)
    for name in ARMS[task]:
        runs = reports(ledger, task, name, seeds)
        if len(runs) < 2:
            continue
        before = [ledger.find(**start_key(task, name, row["seed"], row["machine"])) for row in runs]
        found[name] = {
            "rate": runs[0]["rate"],
            "seeds": [row["seed"] for row in runs],
            **{way: compared([one[way] for one in before], [one[way] for one in runs], kinds) for way in ways(runs[0])},
            "fluency": [[row.get("greedy/fluency") for row in rows] for rows in (before, runs)],
            "minus others": {
                other: difference
                for other in ARMS[task]
                if other != name and (difference := minus(runs, reports(ledger, task, other, seeds)))
            },
            "gsm8k": gsm8k(ledger, task, name, seeds),
        }
        if task == "instructions":
            found[name]["templates, before and after"] = [
                templates(row["greedy/completions"]) for row in (start, *runs)
            ]
    if cold_start := gsm8k(ledger, task, "cold start", seeds):
        found["cold start"] = {"gsm8k": cold_start}
    return found


def gsm8k(ledger: Ledger, task: str, name: str, seeds: Sequence[int]) -> dict[str, Any]:
    """GSM8K solved by the untrained model, by an arm's runs, and the change over seeds and problems."""
    untrained = ledger.find(phase="gsm8k", arm="untrained")
    runs = of_seeds(ledger.select(phase="gsm8k", task=task, arm=name), seeds)
    if untrained is None or len(runs) < 2:
        return {}
    return compared([untrained["greedy"]] * len(runs), [row["greedy"] for row in runs], 1)


def reports(ledger: Ledger, task: str, name: str, seeds: Sequence[int] = SEEDS) -> list[dict[str, Any]]:
    """Return the reported runs of an arm with these seeds, in their order."""
    return of_seeds(ledger.select(phase="report", task=task, arm=name), seeds)


def of_seeds(rows: Sequence[dict[str, Any]], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Return the rows with these seeds, in their order."""
    return sorted((row for row in rows if row["seed"] in seeds), key=lambda row: row["seed"])


def pair_by_seed(
    runs: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return (row of the others, run) for each seed that both have, in the order of the runs."""
    by_seed = {row["seed"]: row for row in others}
    return [(by_seed[row["seed"]], row) for row in runs if row["seed"] in by_seed]


def minus(runs: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the differences of two arms on their common seeds, over seeds and problems; {} for fewer than two."""
    pairs = pair_by_seed(runs, others)
    if len(pairs) < 2:
        return {}
    found = {
        way: vars(crossed_bootstrap([ones(old[way]) for old, _ in pairs], [ones(new[way]) for _, new in pairs]))
        for way in ("greedy", "sampled")
    }
    return {"seeds": [row["seed"] for _, row in pairs], **found}


def ways(row: dict[str, Any]) -> list[str]:
    """Return the outcomes of a run that hold a 1 or 0 for each problem."""
    return [key for key, value in row.items() if isinstance(value, str) and set(value) <= {"0", "1"}]


def compared(before: Sequence[str], after: Sequence[str], kinds: int) -> dict[str, Any]:
    """Shares of each seed, their mean change over seeds and problems, paired tests, and the change by kind."""
    found = {
        "before": [share(row) for row in before],
        "after": [share(row) for row in after],
        "change": vars(crossed_bootstrap([ones(row) for row in before], [ones(row) for row in after])),
        "over seeds": estimate([share(new) - share(old) for old, new in zip(before, after, strict=True)]),
        "p_value": [mcnemar(ones(old), ones(new)).p_value for old, new in zip(before, after, strict=True)],
        "by kind": [sum(share(row[kind::kinds]) for row in after) / len(after) for kind in range(kinds)],
    }
    if kinds > 1:
        found["over kinds"] = over_seeds_and_kinds(list(map(ones, before)), list(map(ones, after)), kinds)
    return found


def templates(completions: Sequence[str]) -> dict[str, int]:
    """Return how many different answers to the held-out instructions there are after the topic's word is masked.

    The words of an answer that only repeats a template differ from topic to topic, so distinct answers say little.

    "different": of all answers as they are. "masked": after masking. "masked questions": of the answers to "Write it as
    a question", of which there are 30, and "most frequent question": how often the most frequent of these occurs.
    """
    problems = problems_of("instructions", "heldout")
    masked = [mask_topic(text, problem.answer) for text, problem in zip(completions, problems, strict=True)]
    questions = masked[list(CONSTRAINTS).index("question") :: len(CONSTRAINTS)]  # the kinds take turns
    return {
        "different": len(set(completions)),
        "masked": len(set(masked)),
        "masked questions": len(set(questions)),
        "most frequent question": Counter(questions).most_common(1)[0][1],
    }


def mask_topic(text: str, answer: str) -> str:
    """Return a text in lower case with X for the topic of its instruction, in singular or plural, with any article.

    >>> mask_topic("Can you tell me about the sea?", '{"topic": "the sea"}')
    'can you tell me about X?'
    """
    word = json.loads(answer)["topic"].split()[-1]
    forms = "|".join((word + "s", word + "es", word[:-1] + "ies", word))
    return re.sub(rf"\b(?:(?:a|an|the) )?(?:{forms})\b", "X", text.strip().lower())


def main() -> int:
    """Run what is missing, until the time is over, and store the summary."""
    parser = ledger_options(COMMAND, __doc__)
    parser.add_argument("--tasks", nargs="+", choices=tuple(ARMS), default=tuple(ARMS), help="only these")
    parser.add_argument("--arms", nargs="+", help="only these")
    parser.add_argument("--seeds", type=int, nargs="+", choices=SEEDS, default=SEEDS, help="only these")
    options = parser.parse_args()
    ledger = open_ledger(options.minutes)
    if GSM8K.is_dir():
        report_gsm8k(ledger, *opened(MODEL), "none", "untrained", 0)
    chosen = [(task, name) for task in options.tasks for name in ARMS[task] if name in (options.arms or ARMS[task])]
    for task, name in chosen:
        select(ledger, task, name)
    for seed in options.seeds:
        for task, name in chosen:
            if seed in TASKS[task].seeds:
                report(ledger, task, name, seed)
    save(LEDGER.with_suffix(".json"), COMMAND, summary(ledger))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
