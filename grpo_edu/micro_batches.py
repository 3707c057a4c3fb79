"""Cut a batch into forward passes that fit into memory, and cut it smaller when one did not.

How a batch is cut changes neither its loss nor its gradient (but for rounding): `grpo_edu.trainer.batch_loss` weighs
every part by its share of the whole. So the size of a pass may follow the memory that there is.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from grpo_edu.advantages import degenerate_groups
from grpo_edu.config import GRPOConfig
from grpo_edu.memory import GIB, out_of_memory, resident_bytes
from grpo_edu.memory_estimate import (
    ModelShape,
    activation_bytes,
    cache_bytes,
    held_bytes,
    logits_bytes,
)
from grpo_edu.packing import block_mask_obstacle, pack_groups, packed_lengths
from grpo_edu.processes import this_process

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from grpo_edu.trainer import Batch

_SPARE = 0.1  # share of what the machine has available that is left alone
_Result = TypeVar("_Result")


class MicroBatches:
    """How batches are cut into forward passes for one model and config.

    room: bytes that a pass may take beside what the process holds. It falls when memory runs out.
    """

    def __init__(self, model: PreTrainedModel, config: GRPOConfig, room: float = math.inf) -> None:
        self.model, self.config, self.room = model, config, room
        self.shape = ModelShape.of(model)

    def bytes_of(self, batch: Batch, rows: Tensor, *, shared: bool = True) -> int:
        """Estimated bytes of a forward and backward pass over some rows: whole groups, or a part of one.

        shared: count what completions share once, which takes a moment; False gives an upper bound at once.
        """
        rollout, group = batch.rollout, min(len(rows), self.config.num_generations)
        if block_mask_obstacle(self.model, 0):
            group = 1  # every row is read with a prompt of its own
        prompt_mask, completion_mask = rollout.prompt_mask[rows], rollout.completion_mask[rows]
        if shared:
            ids = rollout.prompt_ids[rows], rollout.completion_ids[rows]
            lengths = pack_groups(ids[0], prompt_mask, ids[1], completion_mask, group).lengths
        else:
            lengths = packed_lengths(prompt_mask, completion_mask, group)
        predictions = int(completion_mask.sum())
        return pass_bytes(self.shape, self.config, len(rows) // group, int(lengths.max()), predictions)

    def cut(self, batch: Batch) -> list[Tensor]:
        """Row numbers of each pass: `gradient_accumulation_steps` parts at least, and more where the room asks for it.

        Groups whose rewards all tie have zero advantage; without a KL term they have no gradient either, and are left
        out. More parts than one are sorted by length, the longest first, so that little is padded and a pass that is
        too large shows at once. A group that does not fit alone is cut into parts of a half, a quarter, … of its rows.
        Of several processes each gets its part of the groups that are left.
        """
        groups = torch.arange(len(batch.rewards)).view(-1, self.config.num_generations)
        if not self.config.beta:
            groups = groups[~degenerate_groups(batch.rewards, self.config.num_generations)]
        groups = groups[this_process().index :: this_process().count]
        if not len(groups):
            return []
        most = self.config.prompts_per_step // self.config.gradient_accumulation_steps
        if len(groups) <= most and self._fits(batch, groups.flatten()):
            return [groups.flatten()]
        masks = batch.rollout.prompt_mask, batch.rollout.completion_mask
        lengths = packed_lengths(*masks, self.config.num_generations)[groups[:, 0] // self.config.num_generations]
        parts: list[Tensor] = []
        for group in groups[lengths.argsort(descending=True, stable=True)]:
            longer = torch.cat([parts[-1], group]) if parts else group
            if parts and len(longer) <= most * len(group) and self._fits(batch, longer):
                parts[-1] = longer
            else:
                parts.append(group)
        return [piece for part in parts for piece in self._halves(batch, part)]

    def run(self, batch: Batch, work: Callable[[Sequence[Tensor]], _Result]) -> _Result:
        """Do `work` on the parts of a batch; where memory runs out, do it again from the start on smaller parts.

        Raises MemoryError when the parts are single rows already, or cannot be cut.
        """
        while True:
            parts = self.cut(batch)
            try:
                return work(parts)
            except (MemoryError, RuntimeError) as error:
                if not out_of_memory(error):
                    raise
                self._shrink(batch, parts, error)

    def _fits(self, batch: Batch, rows: Tensor) -> bool:
        return any(self.bytes_of(batch, rows, shared=shared) <= self.room for shared in (False, True))

    def _halves(self, batch: Batch, rows: Tensor) -> list[Tensor]:
        """A part as it is where it fits or is a single row; else both its halves, cut further where need be."""
        if len(rows) == 1 or self._fits(batch, rows):
            return [rows]
        first, second = rows.tensor_split(2)
        return [*self._halves(batch, first), *self._halves(batch, second)]

    def _shrink(self, batch: Batch, parts: Sequence[Tensor], error: BaseException) -> None:
        """Allow half of what the largest part of several rows is estimated to need."""
        several = [rows for rows in parts if len(rows) > 1]
        if not several or self.config.optimizer_in_backward:
            reason = "with optimizer_in_backward" if self.config.optimizer_in_backward else "below one completion"
            raise MemoryError(
                f"memory ran out, and {reason} a batch cannot be cut; close other programs, set "
                "gradient_checkpointing=True, train adapters (grpo_edu.adapters.add_lora), or lower prompts_per_step "
                "or max_completion_length"
            ) from error
        largest = max(several, key=lambda rows: self.bytes_of(batch, rows))
        self.room = min(self.room, self.bytes_of(batch, largest) / 2)
        warnings.warn(
            f"memory ran out in a pass over {len(largest)} completions; going on with smaller passes, which give the "
            "same result",
            RuntimeWarning,
            stacklevel=2,
        )


def pass_bytes(shape: ModelShape, config: GRPOConfig, rows: int, width: int, predictions: int) -> int:
    """Estimated bytes of a forward and backward pass over `rows` packed rows, beside what the process holds."""
    activations = activation_bytes(shape, rows, width, recompute=config.gradient_checkpointing)
    return activations + logits_bytes(shape, config, predictions)


def available_room(model: PreTrainedModel, config: GRPOConfig, longest_prompt: int) -> float:
    """Bytes that a pass may take: what is left of the budget, or of the machine's memory, for one that starts now.

    What the process holds now counts, and the gradients and optimizer states that are still to come. Call it when the
    reference is made.

    Args:
        model: the policy.
        config: the settings.
        longest_prompt: tokens of the longest prompt that may come.

    Raises:
        ValueError: a budget that is too small for a single completion, with the smallest that would do.
    """
    from grpo_edu.hardware import memory_bytes

    shape = ModelShape.of(model)
    held = held_bytes(shape, config)
    to_come = held["gradients"] + held["optimizer"]
    if config.memory_budget_gib is None:
        return (1 - _SPARE) * memory_bytes()[1] / this_process().local_count - to_come
    fixed = resident_bytes() + to_come
    tokens, rows = longest_prompt + config.max_completion_length, 1
    predictions = config.max_completion_length
    if config.optimizer_in_backward:  # the whole batch goes through at once
        rows, predictions = config.prompts_per_step, config.batch_size * config.max_completion_length
        tokens = longest_prompt + config.num_generations * (config.max_completion_length - 1)
    stages = {
        "a completion's forward and backward pass": pass_bytes(shape, config, rows, tokens, predictions),
        "the rollout's cache": cache_bytes(
            shape, config.batch_size, longest_prompt + config.max_completion_length
        ),
        "an optimizer step": 2 * shape.largest,
    }  # fmt: skip
    worst = max(stages, key=stages.__getitem__)
    if fixed + stages[worst] > config.memory_budget_gib * GIB:
        smallest = math.ceil(100 * (fixed + stages[worst]) / GIB) / 100
        raise ValueError(
            f"memory_budget_gib: {config.memory_budget_gib:g} is too small; the smallest that works is {smallest:.2f} "
            f"({fixed / GIB:.2f} for the process, its gradients and optimizer, {stages[worst] / GIB:.2f} for {worst})"
        )
    return config.memory_budget_gib * GIB - fixed
