"""Decode completions as a tree: each prompt, and each common prefix of completions, is processed only once.

Four methods save time, and none of them changes a probability:

1. The G completions of a group share their prompt, so it is processed once (prefix sharing, as in vLLM, arXiv
   2309.06180).
2. Completions with the same tokens so far have the same hidden states, so they share a row of the batch until they
   differ. The completions of a confident policy differ late, so most of its rollout needs only a few rows.
3. A row is removed from the batch when all its completions have ended, so the end of a rollout costs only as much as
   the few long completions that are left.

4. The key-value cache is allocated once, for as many rows and tokens as there can be. A token is written into its
   place, and only rows that have to move are copied: a new branch, or a last row that fills the gap of a completed one.

The model is that of transformers, and so is its cache for layers without full attention.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer


class TreeDecoder:
    """Decodes the n different prefixes of completions that are not yet complete, after N prompts.

    At first n = N, one row per prompt. `logits`, (n, V), predict the next token of each row.
    """

    def __init__(
        self, model: PreTrainedModel, prompt_ids: Tensor, prompt_mask: Tensor, max_new_tokens: int, max_rows: int
    ) -> None:
        """Process the prompts, (N, P) ids and mask, left-padded. max_rows: most prefixes at the same time."""
        self.model, self.length = model, prompt_ids.shape[1]
        self.cache = DynamicCache(config=model.config)
        for i, layer in enumerate(self.cache.layers):
            if type(layer) is DynamicLayer:
                self.cache.layers[i] = RowsInPlace(max_rows, self.length + max_new_tokens)
        name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self.cache_argument = {name: self.cache}  # transformers 5.24 renamed it
        output = model(
            input_ids=prompt_ids,
            attention_mask=prompt_mask,
            position_ids=(prompt_mask.cumsum(1) - 1).clamp(min=0),
            **self.cache_argument,
            use_cache=True,
            logits_to_keep=1,
        )
        self.logits = output.logits[:, -1]
        self.positions = prompt_mask.sum(1)  # (n,) of the next token
        self.mask = torch.nn.functional.pad(prompt_mask, (0, max_new_tokens), value=1)  # (n, P + C)

    def step(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """Append `tokens[i]` to row `rows[i]`, each (samples,) long, and predict the next token of every row.

        Equal continuations of a row become one row, and rows without a continuation are removed. Returns the new row of
        each sample, (samples,) long.
        """
        vocabulary = self.logits.shape[1]
        continuations, which = (rows * vocabulary + tokens).unique(return_inverse=True)
        parents = continuations // vocabulary  # ascending
        places = _places(parents)
        order = places.argsort()  # the continuation that each new row holds
        parents, next_tokens = parents[order], (continuations % vocabulary)[order]
        moved = (parents != torch.arange(len(parents), device=parents.device)).nonzero().squeeze(1)
        if len(moved) or len(parents) != len(self.positions):
            for layer in self.cache.layers:
                if isinstance(layer, RowsInPlace):
                    layer.copy_rows(parents[moved], moved)
                else:
                    layer.batch_select_indices(parents)
            self.mask, self.positions = self.mask[parents], self.positions[parents]
        self.length += 1
        output = self.model(
            input_ids=next_tokens[:, None],
            attention_mask=self.mask[:, : self.length],
            position_ids=self.positions[:, None],
            **self.cache_argument,
            use_cache=True,
        )
        self.positions = self.positions + 1
        self.logits = output.logits[:, -1]
        return places[which]


def _places(parents: Tensor) -> Tensor:
    """Return the new row (n,) of each continuation of the rows `parents`, ascending; as many as possible stay in place.

    The first continuation of a row stays, if its row is among the first n. The others fill the free rows of these.

    >>> _places(torch.tensor([0, 0, 3, 4]))  # row 0 branches, rows 1 and 2 are complete, rows 3 and 4 continue
    tensor([0, 1, 3, 2])
    """
    count = len(parents)
    first = torch.ones_like(parents, dtype=torch.bool)
    first[1:] = parents[1:] != parents[:-1]
    stays = first & (parents < count)
    free = torch.ones_like(stays)
    free[parents[stays]] = False
    places = parents.clone()
    places[~stays] = free.nonzero().squeeze(1)
    return places


class RowsInPlace(DynamicLayer):
    """The keys and values of one layer of full attention, in memory that is allocated once for `rows` × `tokens`.

    The next tokens may be those of the first n rows only; the other rows are free then.
    """

    def __init__(self, rows: int, tokens: int) -> None:
        super().__init__()
        self.shape = rows, tokens

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        rows, tokens = self.shape
        self.all_keys, self.all_values = (
            states.new_empty(rows, states.shape[1], tokens, states.shape[3]) for states in (key_states, value_states)
        )

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write the next tokens (n, heads, new, width) of the first n rows; returns all of these rows so far."""
        length = self.get_seq_length()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows, end = len(key_states), length + key_states.shape[2]
        self.all_keys[:rows, :, length:end] = key_states
        self.all_values[:rows, :, length:end] = value_states
        self.keys, self.values = self.all_keys[:rows, :, :end], self.all_values[:rows, :, :end]
        return self.keys, self.values

    def copy_rows(self, sources: Tensor, targets: Tensor) -> None:
        """Copy what the rows `sources` hold so far into the rows `targets`, both (m,) long."""
        length = self.get_seq_length()
        for states in (self.all_keys, self.all_values):
            states[targets, :, :length] = states[sources, :, :length]
