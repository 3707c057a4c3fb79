"""Decode completions as a tree: each prompt, and each common prefix of completions, is processed only once.

Three methods save time, and none of them changes a probability:

1. The G completions of a group share their prompt, so it is processed once (prefix sharing, as in vLLM, arXiv
   2309.06180).
2. Completions with the same tokens so far have the same hidden states, so they share a row of the batch until they
   differ. The completions of a confident policy differ late, so most of its rollout needs only a few rows.
3. A row is removed from the batch when all its completions have ended, so the end of a rollout costs only as much as
   the few long completions that are left.

The model is an unmodified model of transformers; only the key-value cache is our own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

# Models that only add the mask to the attention scores. They accept an additive mask, which then need not be built in
# every step. Every other architecture gets a 2D mask and builds its own.
READY_MASK_MODELS = frozenset({"llama", "qwen2", "qwen3"})


class PreallocatedLayer(DynamicLayer):
    """The keys and values of one attention layer, each (n, heads, tokens, head_dim), in memory that is allocated once.

    The dynamic layer of transformers copies its content whenever a token is appended. This layer writes the token in
    place, and the model sees only the tokens that exist; with a static cache it would also attend to the empty
    positions under a mask. `benchmarks/step.py` compares all three. A row is copied only when completions start to
    differ, or to replace a row that has ended.
    """

    def __init__(self, prompt: DynamicLayer, max_rows: int, max_new_tokens: int) -> None:
        """Copy the keys and values of N prompts into memory for up to `max_rows` rows and `max_new_tokens` tokens."""
        super().__init__()
        prompts, heads, tokens, width = prompt.keys.shape
        self.storage = prompt.keys.new_empty(2, max_rows, heads, tokens + max_new_tokens, width)  # keys, then values
        self.storage[0, :prompts, :, :tokens] = prompt.keys
        self.storage[1, :prompts, :, :tokens] = prompt.values
        self.dtype, self.device, self.is_initialized = self.storage.dtype, self.storage.device, True
        self._show(prompts, tokens)

    def _show(self, rows: int, tokens: int) -> None:
        self.keys, self.values = self.storage[:, :rows, :, :tokens]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append states (n, heads, t, head_dim); return all keys and values of the n rows."""
        start = self.keys.shape[2]
        self._show(len(key_states), start + key_states.shape[2])
        self.keys[:, :, start:] = key_states
        self.values[:, :, start:] = value_states
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Replace row i by row `indices[i]`; a row that does not move is not copied."""
        moved = (indices != torch.arange(len(indices), device=indices.device)).nonzero().squeeze(1)
        tokens = self.keys.shape[2]
        self.storage[:, moved, :, :tokens] = self.storage[:, indices[moved], :, :tokens]
        self._show(len(indices), tokens)


class TreeDecoder:
    """Decodes the n different prefixes of completions that are not yet complete, after N prompts.

    At first n = N, one row per prompt. `logits`, (n, V), predict the next token of each row.
    """

    def __init__(
        self, model: PreTrainedModel, prompt_ids: Tensor, prompt_mask: Tensor, max_rows: int, max_new_tokens: int
    ) -> None:
        """Process the prompts, (N, P) ids and mask, left-padded; `max_rows` is the largest possible n."""
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
            if type(layer) is DynamicLayer:  # other kinds (a sliding window, for example) select their rows themselves
                self.cache.layers[index] = PreallocatedLayer(layer, max_rows, max_new_tokens)
        self.logits = output.logits[:, -1]
        self.positions = prompt_mask.sum(1)  # (n,) of the next token
        self.mask = torch.nn.functional.pad(prompt_mask, (0, max_new_tokens), value=1)  # (n, P + C)
        if takes_ready_mask(model) and not any(self.cache.is_sliding):
            lowest = torch.finfo(model.dtype).min
            self.mask = ((self.mask == 0).to(model.dtype) * lowest)[:, None, None]  # (n, 1, 1, P + C)

    def step(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """Append `tokens[i]` to row `rows[i]`, each (samples,) long, and predict the next token of every row.

        Equal continuations of a row become one row, and rows without a continuation are removed. Returns the new row of
        each sample, (samples,) long.
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
    """Assign one of m rows to each of m continuations, so that as few rows as possible are copied.

    The first continuation of a row keeps its index if that is smaller than m; all others get the indices that are
    free, in order.

    Args:
        parents: (m,) long, ascending: the row that each continuation extends.

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
    """Whether `model` accepts an additive mask (n, 1, 1, tokens) instead of a 2D mask."""
    return model.config.model_type in READY_MASK_MODELS and model.config._attn_implementation in ("sdpa", "eager")
