"""The recipe of the model `halfway`: ``python -m recipes.cold_start``.

The model `tiny` takes a few supervised steps on worked puzzles (`grpo_edu.problems.puzzles`), which it has never seen
before. Afterwards it solves some of them, and reinforcement learning has something to start from. DeepSeek-R1 calls
such steps a *cold start* (arXiv 2501.12948).
"""

from __future__ import annotations

import argparse
import platform
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from grpo_edu.config import SupervisedConfig
from grpo_edu.continual.supervised import finetune
from grpo_edu.models import load_policy, save_policy
from grpo_edu.problems.puzzles import puzzle_splits
from grpo_edu.problems.templates import data_dir
from recipes.pretraining import sampled_and_greedy, store_card, with_interval

COMMAND = "python -m recipes.cold_start"
CONFIG = SupervisedConfig(max_steps=20, prompts_per_step=16, learning_rate=1e-3, seed=1)
LENGTH = 64  # tokens; the longest worked solution has about 30

_CARD = """\
---
license: apache-2.0
language: en
pipeline_tag: text-generation
---
# halfway: a Qwen2 of {parameters:,} parameters that has half learned ten kinds of puzzles

A language model for teaching reinforcement learning on a CPU. It is the model `tiny` after a cold start: {max_steps}
supervised steps on worked solutions of ten kinds of word problems that `tiny` had never seen. It solves some of them
greedily and fewer when it samples, so GRPO can make the skill grow.

## Use

`load_policy("halfway")` of the package `grpo_edu`, and the problems of `grpo_edu.problems.puzzles.puzzle_splits()`.

## How it was made

- Command: `{command}`, torch {torch}; a few seconds of one core.
- Start: the shipped model `tiny`, whose card tells how that was pretrained; same architecture and tokenizer.
- Data: {max_steps} batches of {prompts_per_step} problems from {num_train} training puzzles, worked solutions only.
- Optimizer: AdamW, learning rate {learning_rate}, constant, seed {seed}. Mean loss of the last step: {loss:.3f}.

## What it can do

{n} held-out puzzles, one answer each (the studies sample again); in brackets the 95% Wilson interval.

| model | sampled | greedy |
|---|---|---|
| tiny | {tiny_sampled} | {tiny_greedy} |
| halfway | {sampled} | {greedy} |

## Limits

It is made to be trained further. It knows the stories of `data/stories.json` and `data/puzzles.json` with other names
and numbers, and nothing else. The folder holds no code and no pickle: safetensors and JSON only.

Licence: Apache-2.0.
"""


def card_text(record: dict[str, Any]) -> str:
    """Return the model card of a record that `main` stores as ``recipe.json``."""
    cells = {name: with_interval(record[name]) for name in ("tiny_sampled", "tiny_greedy", "sampled", "greedy")}
    return _CARD.format(**{**record, **record["config"], **cells, "n": record["greedy"]["n"]})


def main(arguments: list[str] | None = None) -> int:
    """Train, save, evaluate on the held-out puzzles and write the card."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--output", type=Path, default=data_dir() / "models" / "halfway", help="model folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace a folder that holds a model")
    options = parser.parse_args(arguments)
    model, tokenizer = load_policy("tiny")
    splits = puzzle_splits()
    found: dict[str, dict[str, Any]] = {}
    for prefix in ("tiny_", ""):
        if not prefix:
            *_, last = finetune(model, tokenizer, splits["train"], CONFIG)
        solved = sampled_and_greedy(model, tokenizer, splits["heldout"], max_completion_length=LENGTH, batch_size=100)
        found |= {prefix + way: result for way, result in solved.items()}
    save_policy(model, tokenizer, options.output, overwrite=options.overwrite)
    record = {
        "command": COMMAND,
        "config": asdict(CONFIG),
        "parameters": model.num_parameters(),
        "num_train": len(splits["train"]),
        "loss": round(last["loss"], 4),
        "torch": torch.__version__,
        "machine": platform.machine(),
        **found,
    }
    store_card(options.output, record, card_text(record))
    print(f"saved to {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
