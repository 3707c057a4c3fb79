"""Dynamic sampling: replace the problems whose groups tie by others."""

from collections.abc import Sequence
from functools import partial

import torch
from torch.nn.utils.rnn import pad_sequence

from grpo_edu.rollout import Rollout


def join_rollouts(rollouts: Sequence[Rollout], rows: Sequence[int], pad_token_id: int) -> Rollout:
    """The rollout of some rows of several rollouts, counted through all of them; whole groups."""

    def column(name: str) -> list:
        values = [value for rollout in rollouts for value in getattr(rollout, name)]
        return [values[row] for row in rows]

    left = partial(pad_sequence, batch_first=True, padding_side="left")
    right = partial(pad_sequence, batch_first=True)
    return Rollout(
        prompts=column("prompts"),
        completions=column("completions"),
        prompt_ids=left(column("prompt_ids"), padding_value=pad_token_id),
        prompt_mask=left(column("prompt_mask")),
        completion_ids=right(column("completion_ids"), padding_value=pad_token_id),
        completion_mask=right(column("completion_mask")),
        sampling_per_token_logps=right(column("sampling_per_token_logps")),
        is_truncated=torch.stack(column("is_truncated")),
        num_generations=rollouts[0].num_generations,
        tool_mask=None if rollouts[0].tool_mask is None else right(column("tool_mask"), padding_value=1),
    )
