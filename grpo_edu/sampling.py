"""Sampling: from the logits of the next token to a token and its log-probability."""

from __future__ import annotations

import torch
from torch import Tensor


def sample_tokens(
    logits: Tensor,
    uniform: Tensor,
    *,
    rows: Tensor | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Draw one token a sample by inverting the cumulative distribution.

    token = the first v with Σ_{w ≤ v} p(w) > u, where u ~ U[0, 1) and p = softmax(logits / temperature),
    filtered.

    The sum runs in float64: at a vocabulary of 150,000 a float32 sum would lose the unlikely tokens.

    Args:
        logits: (n, V), not yet divided by the temperature.
        uniform: (m,) float64 in [0, 1), one number a sample.
        rows: (m,) long, the row of `logits` that each sample is drawn from; None for one sample a row, m = n.
        temperature: 0 takes the likeliest token.
        top_p, top_k, min_p: see `filter_logits`.

    Returns:
        Tokens (m,) long, and their log-probabilities (m,) float32 in nats, at this temperature (1 when
        greedy) and before the filters.

    >>> logits = torch.log(torch.tensor([[0.2, 0.3, 0.5], [0.2, 0.3, 0.5]]))
    >>> tokens, logps = sample_tokens(logits, torch.tensor([0.1, 0.6], dtype=torch.float64))
    >>> tokens.tolist(), [round(p, 3) for p in logps.exp().tolist()]
    ([0, 2], [0.2, 0.5])
    """
    logps = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
    if rows is None:
        rows = torch.arange(len(logits), device=logits.device)
    if temperature == 0:
        tokens = logps.argmax(dim=-1)[rows]
    else:
        probabilities = filter_logits(logps, top_k=top_k, top_p=top_p, min_p=min_p).exp()
        cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)[rows]
        threshold = uniform[:, None] * cumulative[:, -1:]  # what the filters left does not sum to 1
        tokens = torch.searchsorted(cumulative, threshold, right=True).squeeze(1).clamp(max=logits.shape[-1] - 1)
    return tokens, logps[rows, tokens]


def filter_logits(logits: Tensor, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """Set to -inf what a sampling filter removes; order and definitions are transformers'.

    First `top_k` keeps the k likeliest tokens (and what ties with the last of them). Then `top_p` keeps the
    smallest set of likeliest tokens whose probability reaches p (nucleus sampling, arXiv 1904.09751). Then
    `min_p` keeps those at least min_p times as likely as the likeliest (arXiv 2407.01082). The likeliest
    token always stays.

    Args:
        logits: (n, V), already divided by the temperature.
        top_k: 0 for off.
        top_p: 1 for off.
        min_p: 0 for off.

    Returns:
        (n, V).

    >>> logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]]))
    >>> filter_logits(logits, top_p=0.7).exp().round(decimals=2)
    tensor([[0.5000, 0.3000, 0.0000]])
    """
    if top_k > 0:
        kth = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if top_p < 1:
        ascending, order = logits.sort(dim=-1)
        removed = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
        removed[:, -1] = False
        logits = logits.masked_fill(removed.scatter(1, order, removed), float("-inf"))
    if min_p > 0:
        probabilities = logits.softmax(dim=-1)
        likeliest = probabilities.amax(dim=-1, keepdim=True)
        logits = logits.masked_fill(probabilities < min_p * likeliest, float("-inf"))
    return logits
