"""The recipe that made the tiny model, rerunnable: ``python -m grpo_edu.pretraining``.

A tokenizer and a Qwen2-architecture model are trained from scratch on the corpus of `grpo_edu.corpus`, which shares
no problem with the held-out files. Among its own samples the model then finds worked and blurted answers,
and reinforcement learning has something to choose from.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from grpo_edu.corpus import END, PAD, PretrainingConfig, batches, heldout_keys, train_tokenizer
from grpo_edu.model_card import write_card
from grpo_edu.models import save_policy, tiny_dir

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


def build_model(config: PretrainingConfig, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """A randomly initialized Qwen2 model of the configured size, embeddings tied."""
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


def target_logits(
    model: PreTrainedModel, ids: torch.Tensor, is_target: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the model says of the target tokens, and what they are: logits (T, V), for those only, and labels (T,)."""
    hidden = model.get_decoder()(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    wanted = is_target[:, 1:]
    return model.lm_head(hidden[wanted]), ids[:, 1:][wanted]


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
    """Train `model` in place; yields one dict a step: step, loss, tokens (seen so far)."""
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
    """What made a model: settings, versions, machine, time, and the loss as means over 50 steps."""
    import transformers

    means = [history[i : i + 50] for i in range(0, len(history), 50)]
    return {
        "command": "python -m grpo_edu.pretraining",
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

    parser = argparse.ArgumentParser(prog="python -m grpo_edu.pretraining", description=__doc__)
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
