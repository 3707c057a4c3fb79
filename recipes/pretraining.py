"""The recipe that made the tiny model, rerunnable: ``python -m recipes.pretraining``.

A tokenizer and a Qwen2-architecture model are trained from scratch on the corpus of `recipes.corpus`, which
shares no problem with the held-out files. Among its own samples the model then finds worked and direct answers,
and reinforcement learning has something to choose from.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from grpo_edu.continual.examples import target_logits
from grpo_edu.evaluation import Evaluation, evaluate
from grpo_edu.figures.objective import line_panels
from grpo_edu.models import save_policy, tiny_dir
from grpo_edu.problems.files import load_problems
from grpo_edu.problems.templates import Problem
from grpo_edu.prompts import MARKER
from recipes.corpus import END, PAD, PRETRAINED, PretrainingConfig, batches, heldout_keys, train_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast


def write_card(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    record: dict[str, Any],
    *,
    seed: int = 0,
) -> dict[str, Any]:
    """Evaluate on all shipped held-out problems; write ``recipe.json``, ``loss.png`` and ``README.md`` into `folder`.

    record: what `recipe_record` gives. Returns the record with the accuracies added.
    """
    folder = Path(folder)
    heldout = load_problems(PRETRAINED, "heldout")
    sampled = evaluate(model, tokenizer, heldout, seed=seed)
    greedy = evaluate(model, tokenizer, heldout, temperature=0)
    record = {
        **record,
        "parameters": model.num_parameters(),
        "sampled": {**sampled.to_dict(), "worked_and_marked": _worked_and_marked(sampled)},
        "greedy": greedy.to_dict(),
    }
    steps, losses = zip(*record["loss"], strict=True)
    panels = {"Training loss": {"training": losses}}
    figure = line_panels(steps, panels, xlabel="step", ylabels=["nats per token (log scale)"], yscale="log")
    figure.savefig(folder / "loss.png", dpi=120)
    store_card(folder, record, _card_text(record))
    return record


def store_card(folder: Path, record: dict[str, Any], card: str) -> None:
    """Write ``recipe.json``, from which a test makes the card again, and the card, ``README.md``."""
    (folder / "recipe.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(card, encoding="utf-8")


def sampled_and_greedy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem], **settings: Any
) -> dict[str, dict[str, Any]]:
    """Return the results at temperature 1 and 0, without those per level; `settings` go to `evaluate`."""
    found = {}
    for way, temperature in (("sampled", 1.0), ("greedy", 0.0)):
        result = evaluate(model, tokenizer, problems, temperature=temperature, **settings).to_dict()
        found[way] = {name: value for name, value in result.items() if name != "per_level"}
    return found


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
        rows.append(f"| {level} | {with_interval(sampled)} | {with_interval(greedy)} | {of_these} |")
    measured = {key: record[key] for key in ("parameters", "command", "tokens", "torch", "threads")}
    minutes = record["seconds"] / 60
    return _TEMPLATE.format(table="\n".join(rows), n=sampled["n"], minutes=minutes, **{**config, **measured})


def with_interval(row: dict[str, float]) -> str:
    """Return a cell of a card's table: the counts, the accuracy and its interval."""
    return f"{row['k']}/{row['n']} = {row['accuracy']:.1%} ({row['low']:.1%} … {row['high']:.1%})"


_TEMPLATE = """\
---
license: apache-2.0
language: en
pipeline_tag: text-generation
---
# tiny: a Qwen2 of {parameters:,} parameters that can learn in seconds

A language model for teaching reinforcement learning on a CPU. It can work a word problem out step by step, and then
it is mostly right; but often it answers directly, without working, or forgets to mark its answer. So GRPO has
something to find.

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
- Data: problems generated on the fly by `grpo_edu.problems.templates` (three levels of word problems, sorting, coin
  flips),
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

It knows the stories of `data/stories.json` with other names and numbers, and nothing else: no general
English, no GSM8K. Numbers go up to 300. It is a teaching aid, not a calculator.

A coin has two sides, so a guess is right half the time: judge coin flips by the column of what was worked out.

The folder holds no code and no pickle: safetensors and JSON only.

Licence: Apache-2.0.
"""


def build_model(config: PretrainingConfig, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Return a randomly initialized Qwen2 model of the configured size, embeddings tied."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(config.seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            max_position_embeddings=config.max_positions,
            tie_word_embeddings=True,
            rope_theta=10_000.0,
            bos_token_id=None,
            eos_token_id=tokenizer.convert_tokens_to_ids(END),
            pad_token_id=tokenizer.convert_tokens_to_ids(PAD),
        )
    )


def target_loss(model: PreTrainedModel, ids: torch.Tensor, is_target: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the target tokens."""
    return torch.nn.functional.cross_entropy(*target_logits(model, ids, is_target))


def build_optimizers(model: PreTrainedModel, config: PretrainingConfig) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al. 2024) for the layers' matrices, AdamW for the embedding and the norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "layers" not in name]
    return [
        torch.optim.Muon(matrices, lr=config.muon_learning_rate, weight_decay=config.weight_decay),
        torch.optim.AdamW(others, lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def learning_rate_factor(progress: float, warmup: float) -> float:
    """Linear warm-up over the first `warmup` share of the run, then a linear fall to zero at its end."""
    return min(progress / warmup, (1.0 - progress) / (1.0 - warmup))


def pretrain(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    config: PretrainingConfig,
    excluded: frozenset[str] = frozenset(),
) -> Iterator[dict[str, Any]]:
    """Train `model` in place; yields one dict per step: step, loss, tokens (seen so far)."""
    optimizers = build_optimizers(model, config)
    full_rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    early = batches(replace(config, style_weights=config.early_style_weights), tokenizer, config.seed + 2, excluded)
    late = batches(replace(config, drill_weight=0.0), tokenizer, config.seed + 3, excluded)
    tokens = 0
    model.train()
    for step in range(1, config.steps + 1):
        ids, is_target = next(early if step <= (1 - config.late_share) * config.steps else late)
        factor = learning_rate_factor(step / config.steps, config.warmup_steps / config.steps)
        loss = target_loss(model, ids, is_target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, full_rate in zip(optimizers, full_rates, strict=True):
            optimizer.param_groups[0]["lr"] = full_rate * factor
            optimizer.step()
            optimizer.zero_grad()
        tokens += ids.numel()
        yield {"step": step, "loss": loss.item(), "tokens": tokens}
    model.eval()


def recipe_record(config: PretrainingConfig, history: list[dict], seconds: float) -> dict[str, Any]:
    """Return what made a model: settings, versions, machine, time, and the loss as means over 50 steps."""
    import transformers

    means = [history[i : i + 50] for i in range(0, len(history), 50)]
    return {
        "command": "python -m recipes.pretraining",
        "config": asdict(config),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "seconds": round(seconds),
        "tokens": history[-1]["tokens"],
        "loss": [[part[-1]["step"], round(sum(row["loss"] for row in part) / len(part), 4)] for part in means],
    }


def main(arguments: list[str] | None = None) -> int:
    """Pretrain, save, evaluate on the held-out problems and write the card."""
    from tqdm import tqdm

    parser = argparse.ArgumentParser(prog="python -m recipes.pretraining", description=__doc__)
    parser.add_argument("--output", type=Path, default=tiny_dir(), help="model folder to write")
    parser.add_argument("--seed", type=int, default=PretrainingConfig.seed)
    parser.add_argument("--overwrite", action="store_true", help="replace a folder that holds a model")
    options = parser.parse_args(arguments)
    if options.output.exists() and any(options.output.iterdir()) and not options.overwrite:
        parser.error(f"{options.output} holds a model already; choose another --output, or give --overwrite")
    config = PretrainingConfig(seed=options.seed)
    tokenizer = train_tokenizer(config)
    model = build_model(config, tokenizer)
    history, started = [], time.perf_counter()
    with tqdm(total=config.steps, unit="step", disable=None) as bar:
        for row in pretrain(model, tokenizer, config, heldout_keys()):
            history.append(row)
            bar.update()
            bar.set_postfix(loss=f"{row['loss']:.3f}")
    record = recipe_record(config, history, time.perf_counter() - started)
    save_policy(model, tokenizer, options.output, overwrite=options.overwrite)
    write_card(model, tokenizer, options.output, record)
    print(f"saved to {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
