"""Supervised fine-tuning on worked solutions: the plain way to teach, and the one that forgets.

Same shape as `grpo_edu.train`: a loop that trains a model in place and yields one dict of metrics a step.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from grpo_edu.config import SupervisedConfig
from grpo_edu.corpus import encode_examples, pad_examples
from grpo_edu.optimizers import build_optimizer
from grpo_edu.pretraining import target_logits
from grpo_edu.problems import Problem
from grpo_edu.training_state import problem_order

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

    The loss is the mean cross-entropy of the solutions' tokens, plus beta times the KL from the starting model,
    plus the penalty.

    Args:
        model, tokenizer: as `load_policy` returns them.
        problems: at least `config.prompts_per_step`; they come in a shuffled order, all once before any twice.
        config: the settings.
        penalty: a scalar function of the model that is added to the loss (EWC, see `grpo_edu.ewc`).

    Raises:
        ValueError: too few problems, or a model that cannot learn; FloatingPointError: the gradient is not finite. The
        model keeps the weights of the last good update.
    """
    if len(problems) < config.prompts_per_step:
        raise ValueError(
            f"problems: {len(problems)} are fewer than prompts_per_step = {config.prompts_per_step}; "
            "give more problems or lower prompts_per_step"
        )
    optimizer, scheduler = build_optimizer(model, config)
    reference = copy.deepcopy(model).requires_grad_(False).eval() if config.beta else None
    rows = encode_examples(tokenizer, [(problem, problem.solution) for problem in problems])
    order = problem_order(len(rows), config.seed, config.prompts_per_step)
    num_tokens = 0
    model.eval()
    for step in range(1, config.max_steps + 1):
        started = time.perf_counter()
        batch = pad_examples([rows[index] for index in next(order)], tokenizer.pad_token_id)
        learning_rate = optimizer.param_groups[0]["lr"]
        optimizer.zero_grad(set_to_none=False)
        loss, metrics = _loss(model, batch, reference, config.beta, penalty)
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        if not torch.isfinite(grad_norm):
            raise FloatingPointError("the gradient is not finite, so the weights were left as they are; lower "
                                     "learning_rate, or the weight of the penalty")  # fmt: skip
        optimizer.step()
        scheduler.step()
        num_tokens += batch[0].numel()
        yield {
            "step": step,
            **metrics,
            "grad_norm": grad_norm.item(),
            "learning_rate": learning_rate,
            "num_tokens": num_tokens,
            "step_time": time.perf_counter() - started,
        }


def _loss(
    model: nn.Module,
    batch: tuple[Tensor, Tensor],
    reference: nn.Module | None,
    beta: float,
    penalty: Callable[[nn.Module], Tensor] | None,
) -> tuple[Tensor, dict[str, float]]:
    """Cross-entropy, KL and penalty added up, and each by its name."""
    logits, labels = target_logits(model, *batch)
    loss = nn.functional.cross_entropy(logits, labels)
    metrics = {"loss": loss.item()}
    if reference is not None:
        with torch.no_grad():
            before = target_logits(reference, *batch)[0].log_softmax(dim=-1)
        kl = (before.exp() * (before - logits.log_softmax(dim=-1))).sum(dim=-1).mean()
        metrics["kl"] = kl.item()
        loss = loss + beta * kl
    if penalty is not None:
        extra = penalty(model)
        metrics["penalty"] = extra.item()
        loss = loss + extra
    return loss, metrics
