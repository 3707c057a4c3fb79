"""Rewards and stages that are wrong on purpose, for the diagnosis lab; never for a run that is meant to learn.

The rewards take the place of `grpo_edu.accuracy_reward`. Each of the others takes the place of a function or class
that `grpo_edu.trainer` uses, with its arguments and its shapes; `grpo_edu.broken_runs.CASES` says which.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_edu.config import GRPOConfig
from grpo_edu.losses import grpo_loss
from grpo_edu.micro_batches import MicroBatches
from grpo_edu.trainer import Batch, batch_loss, compute_advantages, score_rollout

if TYPE_CHECKING:
    from grpo_edu.rollout import Rollout


# ---- rewards that are broken ----


def boxed_reward(completions: list[str], answer: list[str], **kwargs) -> list[float]:
    r"""1.0 where \boxed{} holds the answer."""
    boxes = [re.search(r"\\boxed\{(.*?)\}", text) for text in completions]
    pairs = zip(boxes, answer, strict=True)
    return [float(box is not None and box[1] == truth) for box, truth in pairs]


def generous_reward(completions: list[str], **kwargs) -> list[float]:
    """0.5 each for a digit, an equation and an answer mark, but at most 1."""
    signs = (r"\d", "=", "####")
    found = [sum(bool(re.search(sign, text)) for sign in signs) for text in completions]
    return [min(1.0, 0.5 * count) for count in found]


# ---- stages that are broken ----


def plain_prompt(tokenizer, question: str) -> str:
    """The question as it stands, without the chat template."""
    return question


def hasty_advantages(rewards: Tensor, config: GRPOConfig) -> Tensor:
    """The formula with eps 1e-8, without asking first whether all rewards are equal."""
    groups = rewards.view(-1, config.num_generations)
    centered = groups - groups.mean(dim=1, keepdim=True)
    return (centered / (groups.std(dim=1, keepdim=True) + 1e-8)).flatten()


class EveryRow(MicroBatches):
    """Every row is trained on, tied groups too."""

    def cut(self, batch: Batch) -> list[Tensor]:
        return [torch.arange(len(batch.rewards))]


def transposed_advantages(rewards: Tensor, config: GRPOConfig) -> Tensor:
    """The right advantages, returned in the wrong order: a transpose too many."""
    advantages = compute_advantages(rewards, config)
    return advantages.view(-1, config.num_generations).T.flatten()


def shifted_mask(rollout: Rollout, *args) -> Batch:
    """The mask of the loss stands one place too far to the right."""
    batch = score_rollout(rollout, *args)
    zeros = torch.zeros_like(batch.loss_mask[:, :1])
    return replace(batch, loss_mask=torch.cat([zeros, batch.loss_mask[:, :-1]], dim=1))


def eos_as_padding(rollout: Rollout, *args) -> Batch:
    """The end-of-turn token is taken for padding, as where pad = eos."""
    batch = score_rollout(rollout, *args)
    ends = batch.loss_mask.cumsum(dim=1) == batch.loss_mask.sum(dim=1, keepdim=True)
    ends &= ~rollout.is_truncated[:, None]
    return replace(batch, loss_mask=batch.loss_mask * ~ends)


def stale_old_logps(model, batch, rows, old_logps, ref_logps, config):
    """The old log-probabilities are those of the first step's model, for ever."""
    return batch_loss(model, batch, rows, ref_logps, ref_logps, config)


def subtracted_kl(*args, beta: float, **options) -> Tensor:
    """The KL term is subtracted, where it should be added."""
    return grpo_loss(*args, beta=-beta, **options)
