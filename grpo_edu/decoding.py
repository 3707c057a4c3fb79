"""Decoding: read every prompt once, then extend a shrinking batch by one token at a time.

Two savings, neither of which changes a probability:

1. The G completions of a group share their prompt, so it runs through the model once, and its keys and values
   are repeated G times (prefix sharing, as in vLLM, arXiv 2309.06180).
2. A row that has emitted its stop token leaves the batch, so the end of a rollout costs what its few long
   completions cost, not what the whole batch would.

The model is transformers' own, unmodified; only the memory that holds its keys and values is ours.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

# Models known to do nothing with a mask but add it to the attention scores: they take it ready-made, which
# saves building it anew in every step. Every other architecture gets a 2D mask and builds its own.
READY_MASK_MODELS = frozenset({"llama", "qwen2", "qwen3"})


class GroupLayer(DynamicLayer):
    """Keys and values of one attention layer, each (n, heads, tokens, head_dim), in room allocated once.

    transformers' growing layer copies all it holds whenever a token is appended; this one writes the token in
    place. Dropping rows moves the last ones into the gaps, so a rollout copies each row at most once.
    """

    def __init__(self, prompt: DynamicLayer, num_generations: int, max_new_tokens: int) -> None:
        """Repeat the keys and values of each of the N prompts G times, with room for more tokens."""
        super().__init__()
        prompts, heads, tokens, width = prompt.keys.shape
        room = prompt.keys.new_empty(2, prompts, num_generations, heads, tokens + max_new_tokens, width)
        room[0, :, :, :, :tokens] = prompt.keys[:, None]
        room[1, :, :, :, :tokens] = prompt.values[:, None]
        self.room = room.flatten(1, 2)  # (2, B, heads, P + C, head_dim): keys, then values
        self.dtype, self.device, self.is_initialized = room.dtype, room.device, True
        self._show(len(self.room[0]), tokens)

    def _show(self, rows: int, tokens: int) -> None:
        self.keys, self.values = self.room[:, :rows, :, :tokens]

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Append states (n, heads, t, head_dim); return all keys and values of the n rows."""
        start = self.keys.shape[2]
        self._show(len(key_states), start + key_states.shape[2])
        self.keys[:, :, start:] = key_states
        self.values[:, :, start:] = value_states
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Let row i be what row `indices[i]` was; a row that stays where it is costs nothing."""
        moved = (indices != torch.arange(len(indices), device=indices.device)).nonzero().squeeze(1)
        tokens = self.keys.shape[2]
        self.room[:, moved, :, :tokens] = self.room[:, indices[moved], :, :tokens]
        self._show(len(indices), tokens)


class GroupDecoder:
    """A model that has read N prompts, and the n rows that it still extends.

    At first n = N·G, the rows of a group adjacent. `logits`, (n, V), predict the token after the last one of each row.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        num_generations: int,
        max_new_tokens: int,
    ) -> None:
        """Read the prompts, (N, P) ids and mask, left-padded."""
        self.model, self.length = model, prompt_ids.shape[1]
        self.cache = DynamicCache(config=model.config)
        output = model(
            input_ids=prompt_ids,
            attention_mask=prompt_mask,
            position_ids=(prompt_mask.cumsum(1) - 1).clamp(min=0),
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        for index, layer in enumerate(self.cache.layers):
            if type(layer) is DynamicLayer:
                self.cache.layers[index] = GroupLayer(layer, num_generations, max_new_tokens)
            else:  # a sliding window, say: such a layer knows how to repeat and select its rows itself
                layer.batch_repeat_interleave(num_generations)
        self.logits = output.logits[:, -1].repeat_interleave(num_generations, dim=0)
        self.positions = prompt_mask.sum(1).repeat_interleave(num_generations)  # (n,) of the next token
        mask = torch.nn.functional.pad(prompt_mask, (0, max_new_tokens), value=1)  # (n, P + C)
        self.mask = mask.repeat_interleave(num_generations, dim=0)
        if takes_ready_mask(model) and not any(self.cache.is_sliding):
            lowest = torch.finfo(model.dtype).min
            self.mask = ((self.mask == 0).to(model.dtype) * lowest)[:, None, None]  # (n, 1, 1, P + C)

    def keep(self, alive: Tensor) -> Tensor:
        """Drop the rows that are not `alive`, (n,) bool; return which old row each remaining one was."""
        order = surviving_rows(alive)
        self.cache.batch_select_indices(order)
        self.mask, self.positions = self.mask[order], self.positions[order]
        return order

    def step(self, tokens: Tensor) -> None:
        """Append one token, (n,), to every row and predict the next."""
        self.length += 1
        output = self.model(
            input_ids=tokens[:, None],
            attention_mask=self.mask[..., : self.length],
            position_ids=self.positions[:, None],
            past_key_values=self.cache,
            use_cache=True,
        )
        self.positions = self.positions + 1
        self.logits = output.logits[:, -1]


def surviving_rows(alive: Tensor) -> Tensor:
    """Order of the rows that remain, with as few of them moved as possible: the last ones fill the gaps.

    Args:
        alive: (n,) bool, the rows that go on.

    Returns:
        (alive.sum(),) long: row i of the smaller batch is row `order[i]` of the larger.

    >>> surviving_rows(torch.tensor([True, False, True, True])).tolist()
    [0, 3, 2]
    """
    count = int(alive.sum())
    order = torch.arange(count, device=alive.device)
    order[~alive[:count]] = count + alive[count:].nonzero().squeeze(1)
    return order


def takes_ready_mask(model: PreTrainedModel) -> bool:
    """Whether `model` takes an additive mask (n, 1, 1, tokens), lowest where padded, in place of a 2D one."""
    return model.config.model_type in READY_MASK_MODELS and model.config._attn_implementation in (
        "sdpa",
        "eager",
    )
