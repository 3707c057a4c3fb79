"""The model card of a tiny model: how it was made, and what it can do, measured when the card is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_edu.data import load_problems
from grpo_edu.evaluation import Evaluation, evaluate
from grpo_edu.figures import loss_curve
from grpo_edu.problems import DOMAINS, LEVELS
from grpo_edu.prompts import MARKER

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def write_card(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    record: dict[str, Any],
    *,
    seed: int = 0,
) -> dict[str, Any]:
    """Evaluate on all shipped held-out problems; write ``recipe.json``, ``loss.png`` and ``README.md`` into `folder`.

    record: what `grpo_edu.pretraining.recipe_record` gives. Returns the record with the accuracies added.
    """
    folder = Path(folder)
    heldout = load_problems(LEVELS + DOMAINS, "heldout")
    sampled = evaluate(model, tokenizer, heldout, seed=seed)
    greedy = evaluate(model, tokenizer, heldout, temperature=0)
    record = {
        **record,
        "parameters": model.num_parameters(),
        "sampled": {**sampled.to_dict(), "worked_and_marked": _worked_and_marked(sampled)},
        "greedy": greedy.to_dict(),
    }
    steps, losses = zip(*record["loss"], strict=True)
    loss_curve(losses, steps=steps, window=1).savefig(folder / "loss.png", dpi=120)
    (folder / "recipe.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(_card_text(record), encoding="utf-8")
    return record


def _worked_and_marked(evaluation: Evaluation) -> dict[str, dict[str, int]]:
    """Per level: n answers that have steps before their marker, and k of these that are right."""
    counts = {}
    for level, part in evaluation.per_level().items():
        rows = [row for row, text in enumerate(part.completions) if text.strip().find(MARKER) > 0]
        counts[level] = {"k": sum(part.correct[row] for row in rows), "n": len(rows)}
    return counts


def _card_text(record: dict[str, Any]) -> str:
    config, rows = record["config"], []
    for level, sampled in record["sampled"]["per_level"].items():
        greedy = record["greedy"]["per_level"][level]
        worked = record["sampled"]["worked_and_marked"][level]
        of_these = f"{worked['k']} of {worked['n']} are right"
        rows.append(f"| {level} | {_with_interval(sampled)} | {_with_interval(greedy)} | {of_these} |")
    measured = {key: record[key] for key in ("parameters", "command", "tokens", "torch", "threads")}
    minutes = record["seconds"] / 60
    return _TEMPLATE.format(table="\n".join(rows), n=sampled["n"], minutes=minutes, **{**config, **measured})


def _with_interval(row: dict[str, float]) -> str:
    return f"{row['k']}/{row['n']} = {row['accuracy']:.1%} ({row['low']:.1%} … {row['high']:.1%})"


_TEMPLATE = """\
---
license: apache-2.0
language: en
pipeline_tag: text-generation
---
# tiny: a Qwen2 of {parameters:,} parameters that can learn in seconds

A language model for teaching reinforcement learning on a CPU. It can work a word problem out step by step, and then
it is mostly right; but often it blurts an answer, or forgets to mark it. GRPO has something to find.

## Use

`load_policy("tiny")` of the package `grpo_edu`, or `AutoModelForCausalLM` and `AutoTokenizer` of transformers with
the path of this folder.

## How it was made

- Command: `{command}`, seed {seed}, {minutes:.0f} minutes with {threads} thread(s), torch {torch}; nothing was
  downloaded. All settings, and the loss: `recipe.json`.
- Architecture: Qwen2 (grouped-query attention, RoPE, SwiGLU, tied embeddings), {num_layers} layers of {hidden_size},
  {num_heads} heads, {num_kv_heads} key-value heads, feed-forward {intermediate_size}.
- Tokenizer: byte-level BPE of at most {vocab_size} tokens, with Qwen2's splitting of text (each digit alone), special
  tokens and chat template.
- Data: problems generated on the fly by `grpo_edu.problems` (three levels of word problems, sorting, coin flips),
  {tokens:,} tokens in {steps:,} batches. No problem has the same numbers as a held-out one, nor the same solution.
- Targets: worked solutions, always right; direct answers, of which only {direct_accuracy:.0%} are right; and worked
  solutions without the `####` line. This carelessness is intended.
- Optimizer: Muon for the layers' matrices ({muon_learning_rate}), AdamW for the rest ({learning_rate}).

![Training loss against the step, on a logarithmic axis](loss.png)

The loss falls, and rises where the mix of targets changes for the last quarter: direct answers are mostly slips, and
nobody can predict which.

## What it can do

{n} held-out problems a level, one answer each; in brackets the 95% Wilson interval. *Sampled* is temperature 1.

| level | sampled | greedy | worked out and marked, of the sampled |
|---|---|---|---|
{table}

## Limits

It knows the stories of `grpo_edu.stories` with other names and numbers, and nothing else: no general English, no
GSM8K. Numbers go up to 300. It is a teaching aid, not a calculator.

A coin has two sides, so a guess is right half the time: judge coin flips by the column of what was worked out.

The folder holds no code and no pickle: safetensors and JSON only.

Licence: Apache-2.0.
"""
