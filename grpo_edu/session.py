"""A policy that stays loaded: imports and weights are paid for once, and every run starts from the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from grpo_edu.models import load_policy

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Session:
    """A model and its tokenizer, loaded once, whose weights can be put back to what was loaded.

    A notebook or a dashboard that trains several times holds a session instead of loading each time. It keeps a
    second copy of the weights, so it needs twice the memory of the model.

    Args:
        name, dtype: as for `load_policy`.

    >>> session = Session()
    >>> before = session.model.get_input_embeddings().weight[0, 0].item()
    >>> torch.nn.init.zeros_(session.model.get_input_embeddings().weight).sum().item()
    0.0
    >>> session.reset()[0].get_input_embeddings().weight[0, 0].item() == before
    True
    """

    def __init__(self, name: str | Path = "tiny", dtype: str | torch.dtype | None = None) -> None:
        self.name = name
        self.model, self.tokenizer = load_policy(name, dtype)
        self._loaded = {key: tensor.clone() for key, tensor in self.model.state_dict().items()}

    def reset(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """The model with the weights that were loaded, without gradients, in eval mode; and the tokenizer."""
        self.model.load_state_dict(self._loaded)
        self.model.requires_grad_(True).zero_grad()
        return self.model.eval(), self.tokenizer
