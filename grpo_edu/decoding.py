"""Decoding: read every prompt once, then extend the tree of its completions, each common beginning once.

Three savings, none of which changes a probability:

1. The G completions of a group share their prompt, so it runs through the model once (prefix sharing, as in vLLM,
   arXiv 2309.06180).
2. Samples that have drawn the same tokens so far have the same hidden states, so they are one row of the batch until
   they part. A confident policy parts late: most of its rollout runs on a few rows.
3. A row whose samples have all emitted a stop token leaves the batch, so the end of a rollout costs what its few long
   completions cost.

The model is transformers' own, unmodified; only the memory that holds its keys and values is ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

# Models known to do nothing with a mask but add it to the attention scores: they take it ready-made, which
# saves building it anew in every step. Every other architecture gets a 2D mask and builds its own.
READY_MASK_MODELS = frozenset({"llama", "qwen2", "qwen3"})


class RoomLayer(DynamicLayer):
    """Keys and values of one attention layer, each (n, heads, tokens, head_dim), in room allocated once.

    transformers' growing layer copies all it holds whenever a token is appended; this one writes the token in
    place, and still shows the model only the tokens that are there (a static cache shows its empty places as well,
    and the model attends to them under a mask). `benchmarks/step.py` times all three. A row is copied only when
    samples part, or to fill the gap that a finished one leaves.
    """

    def __init__(self, prompt: DynamicLayer, max_rows: int, max_new_tokens: int) -> None:
        """Take over the keys and values of N prompts, with room for more rows and more tokens."""
        super().__init__()
        prompts, heads, tokens, width = prompt.keys.shape
        self.room = prompt.keys.new_empty(2, max_rows, heads, tokens + max_new_tokens, width)  # keys, then values
        self.room[0, :prompts, :, :tokens] = prompt.keys
        self.room[1, :prompts, :, :tokens] = prompt.values
        self.dtype, self.device, self.is_initialized = self.room.dtype, self.room.device, True
        self._show(prompts, tokens)

    def _show(self, rows: int, tokens: int) -> None:
        self.keys, self.values = self.room[:, :rows, :, :tokens]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
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


class TreeDecoder:
    """A model that has read N prompts, and the n beginnings of completions that it still extends.

    At first n = N, a row a prompt. `logits`, (n, V), predict the token after the last one of each row.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        max_rows: int,
        max_new_tokens: int,
    ) -> None:
        """Read the prompts, (N, P) ids and mask, left-padded; `max_rows` is the most that n will be."""
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
            if type(layer) is DynamicLayer:  # others (a sliding window, say) know how to select their rows themselves
                self.cache.layers[index] = RoomLayer(layer, max_rows, max_new_tokens)
        self.logits = output.logits[:, -1]
        self.positions = prompt_mask.sum(1)  # (n,) of the next token
        self.mask = torch.nn.functional.pad(prompt_mask, (0, max_new_tokens), value=1)  # (n, P + C)
        if takes_ready_mask(model) and not any(self.cache.is_sliding):
            lowest = torch.finfo(model.dtype).min
            self.mask = ((self.mask == 0).to(model.dtype) * lowest)[:, None, None]  # (n, 1, 1, P + C)

    def step(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """Extend row `rows[i]` by `tokens[i]`, each (samples,) long, and predict the next token of every row.

        Like continuations of one row become one row; rows that nothing extends are dropped. Returns the row that
        each sample is in now, (samples,) long.
        """
        vocabulary = self.logits.shape[1]
        continuations, which = (rows * vocabulary + tokens).unique(return_inverse=True)
        parents = continuations // vocabulary
        places = settle(parents)
        order = torch.empty_like(parents).index_copy(0, places, parents)
        if len(order) != len(self.positions) or (parents[1:] == parents[:-1]).any():
            self.cache.batch_select_indices(order)
            self.mask, self.positions = self.mask[order], self.positions[order]
        self.length += 1
        output = self.model(
            input_ids=torch.empty_like(parents).index_copy(0, places, continuations % vocabulary)[:, None],
            attention_mask=self.mask[..., : self.length],
            position_ids=self.positions[:, None],
            past_key_values=self.cache,
            use_cache=True,
        )
        self.positions = self.positions + 1
        self.logits = output.logits[:, -1]
        return places[which]


def settle(parents: Tensor) -> Tensor:
    """A place among m for each of m continuations, such that as few rows as possible are copied.

    The first continuation of a row stays where the row is, if that is one of the m places; all others take the
    places that are left, in order.

    Args:
        parents: (m,) long, ascending: the row that each continuation goes on from.

    Returns:
        (m,) long, a permutation.

    >>> settle(torch.tensor([0, 0, 2, 5])).tolist()
    [0, 1, 2, 3]
    >>> settle(torch.tensor([1, 3])).tolist()
    [1, 0]
    """
    count = len(parents)
    stays = torch.ones_like(parents, dtype=torch.bool)
    stays[1:] = parents[1:] != parents[:-1]
    stays &= parents < count
    free = torch.ones_like(stays)
    free[parents[stays]] = False
    places = parents.clone()
    places[~stays] = free.nonzero().squeeze(1)
    return places


def takes_ready_mask(model: PreTrainedModel) -> bool:
    """Whether `model` takes an additive mask (n, 1, 1, tokens), lowest where padded, in place of a 2D one."""
    return model.config.model_type in READY_MASK_MODELS and model.config._attn_implementation in (
        "sdpa",
        "eager",
    )
