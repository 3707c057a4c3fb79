"""Decode completions as a tree: each prompt, and each common prefix of completions, is processed only once.

Three methods save time, and none of them changes a probability:

1. The G completions of a group share their prompt, so it is processed once (prefix sharing, as in vLLM, arXiv
   2309.06180).
2. Completions with the same tokens so far have the same hidden states, so they share a row of the batch until they
   differ. The completions of a confident policy differ late, so most of its rollout needs only a few rows.
3. A row is removed from the batch when all its completions have ended, so the end of a rollout costs only as much as
   the few long completions that are left.

The model and its key-value cache are those of transformers. A cache that is allocated once and written in place was
measured as well: it made a rollout of the tiny model 4% faster, and one of a model of 494 million parameters 0.4%.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel


class TreeDecoder:
    """Decodes the n different prefixes of completions that are not yet complete, after N prompts.

    At first n = N, one row per prompt. `logits`, (n, V), predict the next token of each row.
    """

    def __init__(self, model: PreTrainedModel, prompt_ids: Tensor, prompt_mask: Tensor, max_new_tokens: int) -> None:
        """Process the prompts, (N, P) ids and mask, left-padded."""
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
        if len(parents) != len(self.positions) or (parents[1:] == parents[:-1]).any():
            self.cache.batch_select_indices(parents)
            self.mask, self.positions = self.mask[parents], self.positions[parents]
        self.length += 1
        output = self.model(
            input_ids=(continuations % vocabulary)[:, None],
            attention_mask=self.mask[:, : self.length],
            position_ids=self.positions[:, None],
            past_key_values=self.cache,
            use_cache=True,
        )
        self.positions = self.positions + 1
        self.logits = output.logits[:, -1]
        return which
