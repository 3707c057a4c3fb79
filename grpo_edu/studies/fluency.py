"""Measure how completions read, which a reward does not see."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from grpo_edu.evaluation import Evaluation
from grpo_edu.problems.templates import prompt_options
from grpo_edu.prompts import render_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Fluency:
    """Measures of how completions read, for the n completions of an evaluation; each field is a list of n entries.

    They reveal what a reward does not see: a policy that finds a loophole writes shorter, repeated or unlikely text.

    nll: negative log-likelihood of the completion under another model, in nats, summed over its tokens.
    num_tokens: number of tokens of the text, without EOS; 0 for an empty completion, whose nll is 0.
    num_words: number of words.
    distinct_words: share of the words that are different, ignoring case; 0 for a completion without words.
    """

    nll: list[float]
    num_tokens: list[int]
    num_words: list[int]
    distinct_words: list[float]

    @property
    def perplexity(self) -> float:
        """exp(Σ nll / Σ num_tokens), the perplexity of all completions together; NaN if all are empty."""
        return math.exp(sum(self.nll) / sum(self.num_tokens)) if any(self.num_tokens) else math.nan

    def to_dict(self) -> dict[str, float]:
        """Perplexity, and the means of the number of words and of the share of distinct words."""
        return {
            "perplexity": self.perplexity,
            "num_words": float(np.mean(self.num_words)),
            "distinct_words": float(np.mean(self.distinct_words)),
        }


def fluency(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", evaluation: Evaluation, *, batch_size: int = 16
) -> Fluency:
    """Measure how the completions of an evaluation read.

    Args:
        model, tokenizer: the model under which completions are likely or not: that before training, not the policy.
        evaluation: of any policy with the same tokenizer.
        batch_size: number of completions per forward pass.

    >>> from grpo_edu.models import load_policy
    >>> found = Evaluation(["2 + 3?"] * 2, ["basic"] * 2, ["2+3=5. #### 5", "five Five"], [None] * 2, [False] * 2)
    >>> measured = fluency(*load_policy("tiny"), found)
    >>> measured.num_words, measured.distinct_words, measured.nll[0] < measured.nll[1]
    ([4, 2], [0.75, 0.5], True)
    """
    rendered = [
        render_prompt(tokenizer, prompt, **prompt_options(level))
        for prompt, level in zip(evaluation.prompts, evaluation.levels, strict=True)
    ]
    nll, num_tokens = measure_nll(model, tokenizer, rendered, evaluation.completions, batch_size=batch_size)
    words = [re.findall(r"\w+", completion.lower()) for completion in evaluation.completions]
    distinct = [len(set(found)) / len(found) if found else 0.0 for found in words]
    return Fluency(nll, num_tokens, [len(found) for found in words], distinct)


def measure_nll(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[str],
    texts: Sequence[str],
    *,
    batch_size: int = 16,
) -> tuple[list[float], list[int]]:
    """Return the negative log-likelihood of each text after its prompt, in nats, and its number of tokens.

    prompts: rendered. batch_size: number of texts per forward pass. An empty text has the nll 0.
    """
    import torch

    from grpo_edu.fast.packing import per_token_logps
    from grpo_edu.rollout import encode_prompts

    nll: list[float] = []
    num_tokens: list[int] = []
    for start in range(0, len(texts), batch_size):
        end = start + batch_size
        prompt_ids, prompt_mask = encode_prompts(model, tokenizer, prompts[start:end], max_completion_length=1)
        encoded = tokenizer(list(texts[start:end]), add_special_tokens=False)["input_ids"]
        rows = [torch.tensor(ids, dtype=torch.long) for ids in encoded]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
        lengths = torch.tensor([len(row) for row in rows])
        num_tokens += lengths.tolist()
        if not ids.numel():
            nll += [0.0] * len(rows)
            continue
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        with torch.no_grad():
            logps = per_token_logps(model, prompt_ids, prompt_mask, ids.to(model.device), mask.to(model.device))
        assert isinstance(logps, torch.Tensor)  # without entropies it is not a pair
        nll += (-logps.double().sum(dim=1)).tolist()
    return nll, num_tokens
