"""A tool that the policy calls in the middle of a completion, such as a calculator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Tool:
    """A tool that the policy calls in the middle of a completion.

    marker: the text of the one token with which the policy ends a call. reply: the completion so far, which ends with
    the marker → the text that the tool appends to it. The policy reads these tokens, but it did not choose them.
    """

    marker: str
    reply: Callable[[str], str]


def token_id(tokenizer: PreTrainedTokenizerBase, token: int | str, name: str) -> int:
    """The id of one token, given as a text or an id; the ValueError names the argument."""
    encoded = tokenizer.encode(token, add_special_tokens=False) if isinstance(token, str) else [token]
    if len(encoded) != 1 or not 0 <= encoded[0] < len(tokenizer):
        raise ValueError(f"{name}: {token!r} is not a single token of this tokenizer; use one token, or its id")
    return encoded[0]


class ToolReplies:
    """Writes the replies of a tool into the completions of a rollout, in place of what is sampled there.

    ids: (B, C) long, the completions, which are changed in place. mask: (B, C) long, 0 for a token of a reply, else 1.
    """

    def __init__(self, tool: Tool, tokenizer: PreTrainedTokenizerBase, ids: Tensor) -> None:
        self.tool, self.tokenizer, self.ids = tool, tokenizer, ids
        self.marker_id = token_id(tokenizer, tool.marker, "tool.marker")
        self.mask = torch.ones_like(ids)

    def write(self, samples: Tensor, step: int, sampled: Tensor) -> Tensor:
        """The tokens of a step, (samples,) long: those that were sampled or, inside a reply, those of the reply.

        Where a sampled token ends a call, the tool's reply is written behind it.
        """
        own = self.mask[samples, step] == 1
        tokens = torch.where(own, sampled, self.ids[samples, step])
        self.ids[samples, step] = tokens
        for row in samples[own & (tokens == self.marker_id)].tolist():
            self._reply(row, step + 1)
        return tokens

    def _reply(self, row: int, start: int) -> None:
        """Write the reply to a completion that ends before `start`."""
        text = self.tool.reply(self.tokenizer.decode(self.ids[row, :start]))
        reply = self.tokenizer.encode(text, add_special_tokens=False)[: self.ids.shape[1] - start]
        place = slice(start, start + len(reply))
        self.ids[row, place] = self.ids.new_tensor(reply)
        self.mask[row, place] = 0
