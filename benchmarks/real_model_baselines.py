"""What a practitioner tries before GRPO on instructions: ``python -m benchmarks.real_model_baselines``.

The protocol is benchmarks/studies/real_model.md. All arms start from SmolLM2-135M-Instruct and are judged on the 300
held-out instructions of that study. Two arms only ask in another way: "system prompt" is the best of `SYSTEM_PROMPTS`
on the selection problems, and "example" shows one solved training instruction of the same kind. "solutions" is
supervised training on the shipped solutions, with as many tokens as GRPO's arm ``strict`` of the same seed processed.
"positives" is GRPO's loop with an advantage of 1 for each rewarded sample and 0 for the others, which is iterated
rejection sampling (RAFT, Dong et al. 2023, arXiv 2304.06767). "seven kinds" is ``strict`` without the training
instructions of three kinds, others for each seed, and "strict, again" is ``strict`` once more on this computer.

The rates of "solutions" and "positives" are selected as in that study, by the mean reward on the selection problems
after a shorter run on another seed. "seven kinds" and "strict, again" have the rate of ``strict``.

Every trained arm is measured in two further ways, as is the untrained model: on the held-out instructions in other
words (`PHRASINGS`), and by the mean log-likelihood per token of GSM8K's test solutions and of Python's reference.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pydoc_data.topics import topics
from statistics import fmean
from typing import Any

import torch

from benchmarks.harness import (
    RESULTS,
    Ledger,
    bits,
    counted,
    estimate,
    finetune_for,
    ledger_options,
    ones,
    over_seeds_and_kinds,
    save,
    share,
)
from benchmarks.real_model import (
    FULL,
    GSM8K,
    MACHINE,
    MODEL,
    SELECTION_SEED,
    SUPERVISED,
    TASKS,
    answer,
    best_rate,
    compared,
    judge,
    mean_reward,
    open_ledger,
    opened,
    pair_by_seed,
    problems_of,
    products_in_bfloat16,
    reports,
    spent_on,
)
from grpo_edu import render_prompt
from grpo_edu.batch import Batch
from grpo_edu.config import GRPOConfig, SupervisedConfig
from grpo_edu.evaluation import crossed_bootstrap, mcnemar, paired_bootstrap
from grpo_edu.problems.files import load_gsm8k
from grpo_edu.problems.instructions import CONSTRAINTS, instruction_reward
from grpo_edu.problems.templates import Problem, prompt_options
from grpo_edu.prompts import PromptStyle, set_prompt_style
from grpo_edu.studies.fluency import measure_nll
from grpo_edu.trainer import Stages, train

COMMAND = "python -m benchmarks.real_model_baselines"
LEDGER = RESULTS / "real_model_baselines.jsonl"
TASK, SEEDS = "instructions", (0, 1, 2, 3, 4)
NUM_TEXTS = 100  # of GSM8K; the first rows have 300, of which these are the first
KINDS = tuple(CONSTRAINTS)
WAYS, TEXTS = ("greedy", "sampled", "phrased"), ("text_logps", "gsm8k_logps")
PROMPT_ARMS = ("system prompt", "example")
TRAINED_ARMS = ("solutions", "positives", "seven kinds", "strict, again")
RATES = {"solutions": SUPERVISED, "positives": FULL}
SYSTEM_PROMPTS = (
    "Follow the instruction exactly. Answer with the sentence alone.",
    "You write one sentence that obeys every part of the instruction. Check each constraint before you answer. Write "
    "nothing but the sentence.",
    "You are a careful writer. The instruction has a topic and a constraint. Your answer must name the topic, obey the "
    "constraint to the letter and be a complete English sentence. Do not explain anything.",
)
# The constraints in other words, which no training instruction has.
PHRASINGS = {
    "no_comma": "There must be no comma in it.",
    "question": "Make it a question.",
    "lower_case": "Every letter has to be in lower case.",
    "max_words": "It must not be longer than {} words.",
    "begin": 'Its first word has to be "{}".',
    "word": 'The word "{}" has to be in it.',
    "two_words": 'Both "{}" and "{}" have to be in it.',
    "end": 'Its last words have to be "{}".',
    "sentences": "There must be {} sentences in all.",
    "exclamation": "Finish it with an exclamation mark.",
}


def say_otherwise(problem: Problem) -> Problem:
    """Return an instruction with its constraint in other words.

    >>> say_otherwise(problems_of("instructions", "heldout")[1]).prompt
    'Write one sentence about a computer. Make it a question.'
    """
    constraints = json.loads(problem.answer)
    topic = constraints.pop("topic")
    ((kind, argument),) = constraints.items()
    text = PHRASINGS[kind].format(*(argument if isinstance(argument, list) else [argument]))
    return replace(problem, prompt=f"Write {'' if kind == 'sentences' else 'one sentence '}about {topic}. {text}")


def left_out(seed: int) -> tuple[str, ...]:
    """Return the three kinds of constraint that a run of "seven kinds" does not train on.

    >>> [left_out(seed) for seed in (0, 3)]
    [('no_comma', 'question', 'lower_case'), ('exclamation', 'no_comma', 'question')]
    """
    return tuple(KINDS[(3 * seed + place) % len(KINDS)] for place in range(3))


# ---- arms that ask in another way ----


def with_system_prompt(tokenizer: Any, text: str) -> Any:
    """Return a copy of a tokenizer that puts a system message in front of every question."""
    found = copy.deepcopy(tokenizer)
    set_prompt_style(found, PromptStyle(system=text))
    return found


def with_example(tokenizer: Any, kind: str) -> Any:
    """Return a copy of a tokenizer that shows the first training instruction of a kind with its solution."""
    example = problems_of(TASK, "train")[KINDS.index(kind)]
    found = copy.deepcopy(tokenizer)
    set_prompt_style(found, PromptStyle(examples=((example.prompt, example.solution),)))
    return found


def select_system_prompt(ledger: Ledger) -> None:
    """Measure the mean reward of each system prompt on the selection problems."""
    for place, text in enumerate(SYSTEM_PROMPTS):
        key = {"phase": "select", "arm": "system prompt", "place": place}
        if ledger.wants(**key):
            model, tokenizer = opened(MODEL)
            ledger.add(
                **key,
                machine=MACHINE,
                text=text,
                mean_reward=mean_reward(model, with_system_prompt(tokenizer, text), TASK, instruction_reward),
            )
            print(ledger.rows[-1], flush=True)


def report_prompt_arm(ledger: Ledger, arm: str) -> None:
    """Judge the untrained model with another prompt."""
    key = {"phase": "report", "arm": arm}
    if not ledger.wants(**key):
        return
    model, tokenizer = opened(MODEL)
    if arm == "system prompt":
        best = max(ledger.select(phase="select", arm=arm), key=lambda row: (row["mean_reward"], -row["place"]))
        style = {kind: with_system_prompt(tokenizer, best["text"]) for kind in KINDS}
    else:
        style = {kind: with_example(tokenizer, kind) for kind in KINDS}
    found: dict[str, Any] = {}
    for way, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        parts = [
            answer(model, style[kind], TASK, problems_of(TASK, "heldout")[place :: len(KINDS)], temperature)
            for place, kind in enumerate(KINDS)
        ]
        found[way] = bits(value for row in zip(*(part.correct for part in parts), strict=True) for value in row)
        if way == "greedy":
            found["completions"] = [
                text for row in zip(*(part.completions for part in parts), strict=True) for text in row
            ]
    ledger.add(**key, machine=MACHINE, **found)
    print(arm, f"greedy {share(found['greedy']):.3f} sampled {share(found['sampled']):.3f}", flush=True)


# ---- arms that train ----


def positives_only(rewards: torch.Tensor, config: GRPOConfig) -> torch.Tensor:
    """Return an advantage of 1 for each rewarded sample, and 0 for the others."""
    return (rewards > 0).to(rewards.dtype)


def rows_with_a_reward(batch: Batch, config: GRPOConfig) -> torch.Tensor:
    """Return the rows of the groups in which a sample was rewarded, even if all of them were."""
    groups = torch.arange(len(batch.rewards)).view(-1, config.num_generations)
    return groups[(batch.advantages != 0).view(groups.shape).any(dim=1)].flatten()


def train_arm(
    ledger: Ledger, study: Ledger, arm: str, rate: float, seed: int, steps: int
) -> tuple[Any, Any, dict[str, Any]]:
    """Return the policy after a run of an arm, its tokenizer and what the run took."""
    model, tokenizer = opened(MODEL)
    problems = list(problems_of(TASK, "train"))
    started = time.perf_counter()
    if arm == "solutions":
        phase = "select" if seed == SELECTION_SEED else "report"
        like = study.find(phase=phase, task=TASK, arm="strict", seed=seed, rate=best_rate(study, TASK, "strict"))
        assert like is not None
        config = SupervisedConfig(max_steps=10**6, prompts_per_step=16, learning_rate=rate, seed=seed)
        with products_in_bfloat16():
            tokens = finetune_for(model, tokenizer, problems, config, like["tokens"])
        return model, tokenizer, {"tokens": tokens, "seconds": round(time.perf_counter() - started, 1)}
    if arm == "seven kinds":
        problems = [one for one in problems if not set(left_out(seed)) & set(json.loads(one.answer))]
    stages = Stages(advantages=positives_only, rows=rows_with_a_reward) if arm == "positives" else None
    settings = replace(TASKS[TASK].config, max_steps=steps, learning_rate=rate, seed=seed)
    with products_in_bfloat16():
        rows = list(train(model, tokenizer, problems, instruction_reward, settings, stages=stages))
    return model, tokenizer, spent_on(rows)


def select_rate(ledger: Ledger, study: Ledger, arm: str) -> float | None:
    """Return the rate of an arm by the rule of the study, after measuring what is missing; None if time is over."""
    if arm not in RATES:
        return best_rate(study, TASK, "strict")
    for rate in RATES[arm]:
        key = {"phase": "select", "arm": arm, "rate": rate}
        if ledger.wants(**key):
            steps = TASKS[TASK].selection_steps
            model, tokenizer, spent = train_arm(ledger, study, arm, rate, SELECTION_SEED, steps)
            ledger.add(
                **key, machine=MACHINE, mean_reward=mean_reward(model, tokenizer, TASK, instruction_reward), **spent
            )
            print(arm, rate, f"reward {ledger.rows[-1]['mean_reward']:.3f}", flush=True)
    rows = ledger.select(phase="select", arm=arm)
    if len(rows) < len(RATES[arm]):
        return None
    return max(rows, key=lambda row: (row["mean_reward"], -row["rate"]))["rate"]


def report_arm(ledger: Ledger, study: Ledger, arm: str, seed: int) -> None:
    """Train an arm on a seed, and judge it."""
    rate = select_rate(ledger, study, arm)
    key = {"phase": "report", "arm": arm, "seed": seed}
    if rate is None or not ledger.wants(**key):
        return
    model, tokenizer, spent = train_arm(ledger, study, arm, rate, seed, TASKS[TASK].steps)
    found = judge(model, tokenizer, TASK, "heldout") | measure_further(model, tokenizer)
    ledger.add(**key, rate=rate, machine=MACHINE, **spent, **found)
    print(arm, seed, *(f"{way} {share(found[way]):.3f}" for way in ("greedy", "sampled", "phrased")), flush=True)


# ---- further measures ----


def measure_further(model: Any, tokenizer: Any) -> dict[str, Any]:
    """Return the greedy answers to other phrasings, and mean log-likelihoods of texts, in nats per token."""
    phrased = answer(model, tokenizer, TASK, [say_otherwise(one) for one in problems_of(TASK, "heldout")], 0.0)
    found = {"phrased": bits(phrased.correct), "text_logps": score_texts(model, tokenizer, ordinary_texts())}
    return found | measure_gsm8k(model, tokenizer)


def measure_gsm8k(model: Any, tokenizer: Any) -> dict[str, Any]:
    """Return mean log-likelihoods of GSM8K's solutions; nothing if its files are missing."""
    if not GSM8K.is_dir():
        return {}
    problems = load_gsm8k("test", GSM8K, n=NUM_TEXTS)
    asked = [render_prompt(tokenizer, one.prompt, **prompt_options(one.level)) for one in problems]
    pairs = [(prompt, one.solution) for prompt, one in zip(asked, problems, strict=True)]
    return {"gsm8k_logps": score_texts(model, tokenizer, pairs)}


def ordinary_texts() -> list[tuple[str, str]]:
    """Return the beginning and the next part of each topic of Python's reference, as text that nobody trains on."""
    texts = [" ".join(text.split()) for _, text in sorted(topics.items())]
    return [(text[:150], text[150:900]) for text in texts if len(text) > 900]


def score_texts(model: Any, tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> list[float]:
    """Return the mean log-likelihood of each text after its beginning, in nats per token."""
    beginnings, texts = zip(*pairs, strict=True)
    return [
        round(-nll / length, 4) for nll, length in zip(*measure_nll(model, tokenizer, beginnings, texts), strict=True)
    ]


# ---- summary ----


def summary(ledger: Ledger, study: Ledger) -> dict[str, Any]:
    """Return what each arm changes, with intervals, and what GRPO's arm ``strict`` of the study has beyond it."""
    before, strict = ledger.find(phase="untrained"), reports(study, TASK, "strict")
    assert before is not None
    before = before | (ledger.find(phase="untrained, GSM8K") or {})
    again = ledger.select(phase="report", arm="strict, again")
    found: dict[str, Any] = {
        "untrained": {way: counted(before[way]) for way in WAYS},
        "system prompts": {
            row["text"]: row["mean_reward"] for row in ledger.select(phase="select", arm=PROMPT_ARMS[0])
        },
    }
    for arm in PROMPT_ARMS:
        row = ledger.find(phase="report", arm=arm)
        if row:
            found[arm] = {way: compare_prompt(before[way], row[way]) for way in WAYS if way in row}
            same = [{**row, "seed": run["seed"]} for run in strict]
            found[arm] |= {"strict minus this": further(strict, same), "strict, again minus this": further(again, same)}
    for arm in TRAINED_ARMS:
        runs = sorted(ledger.select(phase="report", arm=arm), key=lambda row: row["seed"])
        if len(runs) < 2:
            continue
        found[arm] = {
            "rate": runs[0]["rate"],
            "seeds": [row["seed"] for row in runs],
            **{way: compared([before[way]] * len(runs), [row[way] for row in runs], len(KINDS)) for way in WAYS},
            "strict minus this": further(strict, runs),
            "strict, again minus this": {} if arm == "strict, again" else further(again, runs),
            **{
                texts: estimate([mean_change(before, row, texts) for row in runs])
                for texts in TEXTS
                if all(texts in row for row in (before, *runs))  # GSM8K does not come with the course
            },
        }
        if arm == "seven kinds":
            found[arm]["kinds left out"] = compare_left_out(before, runs, again)
    return found


def further(runs: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what an arm has beyond another on their common seeds; {} for fewer than two.

    Over seeds and problems, and, added after the results: over seeds and kinds, and without the kind that "strict,
    again" never learned (exclamation). For texts, the difference of the mean log-likelihoods over seeds.
    """
    pairs = pair_by_seed(runs, others)
    if len(pairs) < 2:
        return {}
    found: dict[str, Any] = {"seeds": [row["seed"] for _, row in pairs]}
    unlearned = KINDS.index("exclamation")
    for way in WAYS:
        if all(way in row for pair in pairs for row in pair):
            old, new = ([ones(pair[place][way]) for pair in pairs] for place in (0, 1))
            kept = [number for number in range(len(old[0])) if number % len(KINDS) != unlearned]
            found[way] = {
                **vars(crossed_bootstrap(old, new)),
                "over kinds": over_seeds_and_kinds(old, new, len(KINDS)),
                "without exclamation": vars(
                    crossed_bootstrap(*([[row[number] for number in kept] for row in rows] for rows in (old, new)))
                ),
            }
    for texts in TEXTS:
        if all(texts in row for pair in pairs for row in pair):
            found[texts] = estimate([mean_change(old, new, texts) for old, new in pairs])
    return found


def compare_prompt(before: str, after: str) -> dict[str, Any]:
    """Return the share with another prompt, and its change with intervals over problems and over kinds."""
    return {
        "after": share(after),
        "change": vars(paired_bootstrap(ones(before), ones(after))),
        "over kinds": over_seeds_and_kinds([ones(before)], [ones(after)], len(KINDS)),
        "p_value": mcnemar(ones(before), ones(after)).p_value,
    }


def mean_change(before: dict[str, Any], row: dict[str, Any], texts: str) -> float:
    """Return by how much the mean log-likelihood of texts changed, in nats per token."""
    return fmean(row[texts][:NUM_TEXTS]) - fmean(before[texts][:NUM_TEXTS])


def share_of_kind(row: dict[str, Any], kind: str) -> float:
    """Return the greedy share of one kind of constraint."""
    return share(row["greedy"][KINDS.index(kind) :: len(KINDS)])


def compare_left_out(
    before: dict[str, Any], runs: Sequence[dict[str, Any]], again: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return the greedy shares on the kinds that each run did not train on: untrained, of the run, and of ``strict``.

    ``strict`` is "strict, again" with the same seed, which trained on all kinds. The changes are over seeds.
    """
    shares = {
        row["seed"]: {
            kind: [share_of_kind(one, kind) for one in (before, row, with_all)] for kind in left_out(row["seed"])
        }
        for with_all, row in pair_by_seed(runs, again)
    }
    means = [[fmean(column) for column in zip(*by_kind.values(), strict=True)] for by_kind in shares.values()]
    if len(means) < 2:
        return {"by seed and kind": shares}
    return {
        "by seed and kind": shares,
        "mean": [fmean(column) for column in zip(*means, strict=True)],
        "change": estimate([after - start for start, after, _ in means]),
        "trained on all kinds minus this": estimate([every - after for _, after, every in means]),
    }


def main() -> int:
    """Run what is missing, until the time is over."""
    parser = ledger_options(COMMAND, __doc__)
    parser.add_argument(
        "--arms", nargs="+", choices=(*PROMPT_ARMS, *TRAINED_ARMS), default=(*PROMPT_ARMS, *TRAINED_ARMS)
    )
    parser.add_argument("--seeds", type=int, nargs="+", choices=SEEDS, default=SEEDS)
    options = parser.parse_args()
    ledger, study = Ledger(LEDGER, options.minutes), open_ledger()
    if ledger.wants(phase="untrained"):
        model, tokenizer = opened(MODEL)
        ledger.add(
            phase="untrained",
            machine=MACHINE,
            **judge(model, tokenizer, TASK, "heldout"),
            **measure_further(model, tokenizer),
        )
    if GSM8K.is_dir() and ledger.wants(phase="untrained, GSM8K"):  # the files were missing when the row above was made
        ledger.add(phase="untrained, GSM8K", machine=MACHINE, **measure_gsm8k(*opened(MODEL)))
    select_system_prompt(ledger)
    for arm in PROMPT_ARMS:
        if arm in options.arms:
            report_prompt_arm(ledger, arm)
    for seed in options.seeds:
        for arm in TRAINED_ARMS:
            if arm in options.arms:
                report_arm(ledger, study, arm, seed)
    save(LEDGER.with_suffix(".json"), COMMAND, summary(ledger, study))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
