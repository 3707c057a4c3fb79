"""Sample from another distribution than the policy's: filters (top-k, top-p, min-p) and a penalty of repetitions."""

import torch
from torch import Tensor

from grpo_edu.config import check_numbers


def filter_logits(logits: Tensor, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """Set the logits (n, V) of tokens that must not be sampled to -inf, with the order and definitions of transformers.

    `top_k` keeps the k most likely tokens, and those that tie with the last of them (0 is off). Then `top_p` keeps the
    smallest set of the most likely tokens with a total probability of at least p (1 is off; nucleus sampling, arXiv
    1904.09751). Then `min_p` keeps the tokens that are at least min_p times as likely as the most likely one (0 is off;
    arXiv 2407.01082). The most likely token is always kept. The logits are already divided by the temperature.

    >>> logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]]))
    >>> filter_logits(logits, top_p=0.7).exp().round(decimals=2)
    tensor([[0.5000, 0.3000, 0.0000]])
    """
    check_numbers(top_k=top_k, top_p=top_p, min_p=min_p)
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


def penalize_repetitions(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Make tokens that were seen before less likely: positive logits are divided by the penalty, others multiplied.

    The definition is that of transformers (CTRL, arXiv 1909.05858). A penalty below 1 makes them more likely.

    Args:
        logits: (n, V). seen: (n, V) bool, the tokens of the prompt and of the completion so far.
        penalty: positive; 1 changes nothing.

    >>> penalize_repetitions(torch.tensor([[2.0, -1.0, 2.0]]), torch.tensor([[True, True, False]]), 2.0)
    tensor([[ 1., -2.,  2.]])
    """
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def seen_tokens(ids: Tensor, mask: Tensor, vocabulary: int) -> Tensor:
    """Which of `vocabulary` tokens occur in each row of ids (n, P) where the mask is 1; (n, V) bool."""
    counts = torch.zeros(len(ids), vocabulary, dtype=mask.dtype, device=ids.device)
    return counts.scatter_add(1, ids, mask) > 0


class RepetitionPenalty:
    """The penalty of a rollout, which remembers the tokens of each row of the decoder.

    penalty: as for `penalize_repetitions`. seen: (n, V) bool, the tokens of each row so far.
    """

    def __init__(self, penalty: float, prompt_ids: Tensor, prompt_mask: Tensor, vocabulary: int) -> None:
        self.penalty = penalty
        self.seen = seen_tokens(prompt_ids, prompt_mask, vocabulary)

    def __call__(self, logits: Tensor) -> Tensor:
        """The penalized logits (n, V), one row of logits for each row of the decoder."""
        return penalize_repetitions(logits, self.seen, self.penalty)

    def append(self, parents: Tensor, rows: Tensor, tokens: Tensor) -> None:
        """Remember `tokens[i]`, with which a sample went from row `parents[i]` to the new row `rows[i]`.

        Samples in the same row have the same tokens, so each of them writes the same.
        """
        shape = int(rows.max()) + 1, self.seen.shape[1]
        self.seen = self.seen.new_empty(shape).index_copy(0, rows, self.seen[parents])
        self.seen[rows, tokens] = True
