"""Supervised examples: questions with the text that the model is to write, as batches of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_edu.problems.templates import Problem, prompt_options
from grpo_edu.prompts import render_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def encode_examples(
    tokenizer: PreTrainedTokenizerBase, examples: Sequence[tuple[Problem, str]]
) -> list[tuple[list[int], int]]:
    """Tokenize supervised examples: a rendered question, then its target and the end-of-turn token.

    Args:
        tokenizer: with a chat template.
        examples: pairs of a problem and the text that the model is to write.

    Returns:
        for each example its token ids, and how many of them are the prompt.
    """
    prompts = [render_prompt(tokenizer, problem.prompt, **prompt_options(problem.level)) for problem, _ in examples]
    prompt_ids = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    target_ids = tokenizer([target for _, target in examples], add_special_tokens=False)["input_ids"]
    return [(p + t + [tokenizer.eos_token_id], len(p)) for p, t in zip(prompt_ids, target_ids, strict=True)]


def pad_examples(rows: Sequence[tuple[list[int], int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Turn rows of `encode_examples` into a batch.

    Returns (B, T) token ids, right-padded, and (B, T) bools: whether each token belongs to a target.

    >>> pad_examples([([5, 6, 7], 2), ([8, 9], 1)], pad_id=0)
    (tensor([[5, 6, 7],
            [8, 9, 0]]), tensor([[False, False,  True],
            [False,  True, False]]))
    """
    width = max(len(ids) for ids, _ in rows)
    padded = torch.tensor([ids + [pad_id] * (width - len(ids)) for ids, _ in rows])
    lengths = torch.tensor([[len(ids), prompt] for ids, prompt in rows])
    position = torch.arange(width)
    return padded, (position >= lengths[:, 1:]) & (position < lengths[:, :1])


def target_logits(model: PreTrainedModel, ids: Tensor, is_target: Tensor) -> tuple[Tensor, Tensor]:
    """Predictions for the target tokens of supervised examples, and the tokens themselves.

    Args:
        model: a causal language model of transformers.
        ids, is_target: (B, T), as `pad_examples` returns them.

    Returns:
        logits (N, V) that predict the N target tokens of all rows, and these tokens (N,), the labels.
    """
    ids, is_target = ids.to(model.device), is_target.to(model.device)
    hidden = model.get_decoder()(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    wanted = is_target[:, 1:]
    return model.lm_head(hidden[wanted]), ids[:, 1:][wanted]


def exact_kl(logits: Tensor, other: Tensor) -> Tensor:
    r"""KL(p ‖ q) of next-token distributions in nats, over the whole vocabulary and not estimated from one token.

    .. math:: \sum_v p_v (\log p_v - \log q_v)

    Args:
        logits, other: (N, V), the logits of p and of q.

    Returns: (N,).

    >>> import torch
    >>> exact_kl(torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 0.0]]))
    tensor([0.])
    """
    logps = logits.log_softmax(dim=-1)
    return (logps.exp() * (logps - other.log_softmax(dim=-1))).sum(dim=-1)
