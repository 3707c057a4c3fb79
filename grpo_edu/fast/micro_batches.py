"""Divide a batch into micro-batches that fit into memory, and make them smaller if memory runs out.

The division changes neither the loss nor the gradient, apart from rounding, because every token has its weight in the
whole batch (`grpo_edu.losses.token_weights`). The size of a micro-batch can therefore depend on the available memory.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_edu.config import GRPOConfig
from grpo_edu.fast.cores import FreeCores
from grpo_edu.fast.memory import GIB, memory_bytes, out_of_memory, resident_bytes
from grpo_edu.fast.memory_estimate import ModelShape, activation_bytes, cache_bytes, held_bytes, logits_bytes
from grpo_edu.fast.packing import block_mask_obstacle, pack_groups, packed_lengths

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from grpo_edu.rollout import Rollout

_SPARE = 0.1  # fraction of the available memory that is not used


class MicroBatches:
    """Divides batches into micro-batches, for one model and config.

    budget: bytes that a micro-batch may need in addition to the memory in use. It is lowered when memory runs out.
    """

    def __init__(self, model: PreTrainedModel, config: GRPOConfig, budget: float = math.inf) -> None:
        self.model, self.config, self.budget = model, config, budget
        self.shape = ModelShape.of(model)

    def bytes_of(self, rollout: Rollout, rows: Tensor, *, shared: bool = True) -> int:
        """Estimated bytes of a forward and backward pass over some rows: whole groups, or a part of one group.

        shared: count common prefixes once, which takes some time; False gives an upper bound quickly.
        """
        group = min(len(rows), self.config.num_generations)
        if block_mask_obstacle(self.model, 0):
            group = 1  # every row has its own copy of the prompt
        prompt_mask, completion_mask = rollout.prompt_mask[rows], rollout.completion_mask[rows]
        if shared:
            ids = rollout.prompt_ids[rows], rollout.completion_ids[rows]
            lengths = pack_groups(ids[0], prompt_mask, ids[1], completion_mask, group).lengths
        else:
            lengths = packed_lengths(prompt_mask, completion_mask, group)
        predictions = int(completion_mask.sum())
        return pass_bytes(self.shape, self.config, len(rows) // group, int(lengths.max()), predictions)

    def cut(self, rollout: Rollout, rows: Tensor) -> list[Tensor]:
        """Return each micro-batch's row indices: `gradient_accumulation_steps` of them, or more if memory is short.

        Micro-batches are sorted by length, the longest first, so that there is little padding and memory runs out
        early if it does. A group that does not fit into memory is divided into halves, quarters and so on.

        Args:
            rollout: rollout of the whole batch.
            rows: the row indices with a gradient, in whole groups (`grpo_edu.batch.rows_with_gradient`).
        """
        if not len(rows):
            return []
        groups = rows.view(-1, self.config.num_generations)
        most = self.config.prompts_per_step // self.config.gradient_accumulation_steps
        if len(groups) <= most and self._fits(rollout, rows):
            return [rows]
        lengths = packed_lengths(rollout.prompt_mask, rollout.completion_mask, self.config.num_generations)
        lengths = lengths[groups[:, 0] // self.config.num_generations]
        parts: list[list[Tensor]] = []
        for group in groups[lengths.argsort(descending=True, stable=True)]:
            if parts and len(parts[-1]) < most and self._fits(rollout, _rows([*parts[-1], group])):
                parts[-1].append(group)
            else:
                parts.append([group])
        return [half for part in parts for half in self._halves(rollout, _rows(part))]

    @contextmanager
    def attempt(self, rollout: Rollout, rows: Tensor) -> Iterator[list[Tensor]]:
        """A context with the micro-batches of these rows; if memory runs out inside, it ends, and the next are smaller.

        Raises MemoryError if the micro-batches are single rows already, or cannot be divided.
        """
        parts = self.cut(rollout, rows)
        try:
            with FreeCores():
                yield parts
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            self.shrink(rollout, parts, error)

    def _fits(self, rollout: Rollout, rows: Tensor) -> bool:
        return any(self.bytes_of(rollout, rows, shared=shared) <= self.budget for shared in (False, True))

    def _halves(self, rollout: Rollout, rows: Tensor) -> list[Tensor]:
        """Return the rows unchanged if they fit or are a single row; else both halves, divided further if necessary."""
        if len(rows) == 1 or self._fits(rollout, rows):
            return [rows]
        first, second = rows.tensor_split(2)
        return [*self._halves(rollout, first), *self._halves(rollout, second)]

    def shrink(self, rollout: Rollout, parts: Sequence[Tensor], error: BaseException) -> None:
        """Lower the budget to half of the estimate for the largest micro-batch with several rows."""
        several = [rows for rows in parts if len(rows) > 1]
        if not several:
            raise MemoryError(
                "memory ran out, and a batch cannot be divided below one completion; close other programs, set "
                "gradient_checkpointing=True, train adapters (grpo_edu.fast.lora.add_lora), or lower prompts_per_step "
                "or max_completion_length"
            ) from error
        largest = max(several, key=lambda rows: self.bytes_of(rollout, rows))
        self.budget = min(self.budget, self.bytes_of(rollout, largest) / 2)
        warnings.warn(
            f"memory ran out in a micro-batch of {len(largest)} completions; training continues with smaller "
            "micro-batches, which give the same result",
            RuntimeWarning,
            stacklevel=2,
        )


def _rows(groups: Sequence[Tensor]) -> Tensor:
    """Return the rows of several groups, one after the other."""
    return torch.cat(list(groups))


def pass_bytes(shape: ModelShape, config: GRPOConfig, rows: int, width: int, predictions: int) -> int:
    """Estimated bytes of a forward and backward pass over `rows` packed rows, in addition to the memory in use."""
    activations = activation_bytes(shape, rows, width, recompute=config.gradient_checkpointing)
    return activations + logits_bytes(shape, config, predictions)


def pass_budget(model: PreTrainedModel, config: GRPOConfig, longest_prompt: int) -> float:
    """Return the bytes that a micro-batch may need: the rest of `memory_budget_gib`, or of the memory of the computer.

    The memory in use is subtracted, and so are the gradients and optimizer states that will be allocated. Call the
    function after the reference policy has been created.

    Args:
        model: the policy.
        config: the settings.
        longest_prompt: number of tokens of the longest prompt.

    Raises ValueError: the budget is too small for a single completion; the message names the smallest that works.
    """
    shape = ModelShape.of(model)
    held = held_bytes(shape, config)
    to_come = held["gradients"] + held["optimizer"]
    if config.memory_budget_gib is None:
        device = next(model.parameters()).device
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else memory_bytes()[1]
        return (1 - _SPARE) * free - to_come
    fixed = resident_bytes() + to_come
    longest = config.max_completion_length
    tokens = longest_prompt + longest
    stages = {
        "the forward and backward pass of a completion": pass_bytes(shape, config, 1, tokens, longest),
        "the cache of the rollout": cache_bytes(shape, config.batch_size, tokens),
        "an optimizer step": 2 * shape.largest,
    }
    worst = max(stages, key=stages.__getitem__)
    if fixed + stages[worst] > config.memory_budget_gib * GIB:
        smallest = math.ceil(100 * (fixed + stages[worst]) / GIB) / 100
        raise ValueError(
            f"memory_budget_gib = {config.memory_budget_gib:g} is too small; the smallest that works is {smallest:.2f} "
            f"({fixed / GIB:.2f} for the process, its gradients and optimizer, {stages[worst] / GIB:.2f} for {worst})"
        )
    return config.memory_budget_gib * GIB - fixed
