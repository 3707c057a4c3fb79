"""Supervised fine-tuning on worked solutions, which teaches quickly and forgets quickly.

It has the same form as `grpo_edu.train`: a loop that trains a model in place and yields one dict of metrics per step.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from grpo_edu.config import SupervisedConfig
from grpo_edu.continual.examples import encode_examples, exact_kl, pad_examples, target_logits
from grpo_edu.fast.cores import FreeCores
from grpo_edu.fast.memory import recomputed_layers
from grpo_edu.fast.optimizers import build_optimizer, clip_and_step
from grpo_edu.problems.templates import Problem, ProblemOrder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def finetune(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    config: SupervisedConfig,
    *,
    penalty: Callable[[nn.Module], Tensor] | None = None,
) -> Generator[dict[str, float], None, None]:
    """Train `model` in place to write the worked solutions of `problems`; yields the metrics of each step.

    The loss is the mean cross-entropy of the solutions' tokens, plus beta times the KL divergence from the starting
    model, plus the penalty.

    Args:
        model, tokenizer: as `load_policy` returns them.
        problems: at least `config.prompts_per_step`. They are shuffled, and all are used once before any is used twice.
        config: the settings.
        penalty: a scalar function of the model that is added to the loss (EWC, see `grpo_edu.continual.ewc`).

    Raises:
        ValueError: there are too few problems, or no weight can be trained. FloatingPointError: the gradient is not
        finite; the model keeps the weights of the last good update.
    """
    if len(problems) < config.prompts_per_step:
        raise ValueError(
            f"problems: {len(problems)} are fewer than prompts_per_step = {config.prompts_per_step}; "
            "give more problems or lower prompts_per_step"
        )
    optimizer, scheduler = build_optimizer(model, config)
    reference = copy.deepcopy(model).requires_grad_(False).eval() if config.beta else None
    rows = encode_examples(tokenizer, [(problem, problem.solution) for problem in problems])
    order = ProblemOrder(len(rows), config.seed)
    num_tokens = 0
    model.eval()
    for step in range(1, config.max_steps + 1):
        started = time.perf_counter()
        batch = pad_examples([rows[index] for index in order.draw(config.prompts_per_step)], tokenizer.pad_token_id)
        learning_rate = optimizer.param_groups[0]["lr"]
        with FreeCores():
            optimizer.zero_grad(set_to_none=False)
            loss, metrics = _loss(model, batch, reference, config, penalty)
            loss.backward()
            grad_norm = clip_and_step(optimizer, config.max_grad_norm)
        scheduler.step()
        num_tokens += batch[0].numel()
        yield {
            "step": step,
            **metrics,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "num_tokens": num_tokens,
            "step_time": time.perf_counter() - started,
        }


def _loss(
    model: PreTrainedModel,
    batch: tuple[Tensor, Tensor],
    reference: PreTrainedModel | None,
    config: SupervisedConfig,
    penalty: Callable[[nn.Module], Tensor] | None,
) -> tuple[Tensor, dict[str, float]]:
    """Return the sum of cross-entropy, KL divergence and penalty, and each of them by its name."""
    with recomputed_layers(model, config.gradient_checkpointing):
        logits, labels = target_logits(model, *batch)
    loss = nn.functional.cross_entropy(logits, labels)
    metrics = {"loss": loss.item()}
    if reference is not None:
        with torch.no_grad():
            before = target_logits(reference, *batch)[0]
        kl = exact_kl(before, logits).mean()
        metrics["kl"] = kl.item()
        loss = loss + config.beta * kl
    if penalty is not None:
        extra = penalty(model)
        metrics["penalty"] = extra.item()
        loss = loss + extra
    return loss, metrics
