"""Masks of the policy loss: which tokens of a batch it acts on, chosen by the policy itself.

The arguments are those of `grpo_edu.losses`, and so are the errors for shapes that do not match.
"""

import math

import torch
from torch import Tensor

from grpo_edu.config import check_numbers
from grpo_edu.extras.shapes import check_shapes
from grpo_edu.losses import advantage_column, importance_ratio


@torch.no_grad()
def off_policy_mask(
    per_token_logps: Tensor,
    sampling_per_token_logps: Tensor,
    advantages: Tensor,
    completion_mask: Tensor,
    *,
    threshold: float,
) -> Tensor:
    r"""Find the bad completions that the policy would hardly sample any more.

    .. math:: m_i = 0 \iff A_i < 0 \ \text{and}\ \frac{1}{|o_i|} \sum_t \log \frac{\pi_{old}(o_{it})}{\pi(o_{it})} > d

    DeepSeek-V3.2 (https://arxiv.org/abs/2512.02556), equation 9; TRL's ``off_policy_mask_threshold``.

    Args:
        sampling_per_token_logps: (B, C), nats, of the policy that sampled.
        threshold: d, nats per token, the largest mean difference of a completion with a negative advantage.

    Returns:
        (B, 1), 0 to leave a completion out and 1 to keep it, for `per_token_loss`; (B, C) if the advantages are.

    >>> logps, old = torch.tensor([[0.25, 0.25], [0.5, 0.5]]).log(), torch.full((2, 2), 0.5).log()
    >>> off_policy_mask(logps, old, torch.tensor([-1.0, -1.0]), torch.ones(2, 2), threshold=0.5)
    tensor([[0.],
            [1.]])
    """
    check_shapes(per_token_logps, advantages, sampling_per_token_logps=sampling_per_token_logps)
    check_numbers(threshold=threshold)
    ratio = importance_ratio(
        per_token_logps, sampling_per_token_logps, completion_mask, importance_sampling_level="sequence"
    )
    return ((advantage_column(advantages) >= 0) | (-ratio.log() <= threshold)).to(per_token_logps.dtype)


def high_entropy_mask(entropies: Tensor, completion_mask: Tensor, *, quantile: float) -> Tensor:
    """Find the tokens that were sampled from the most undecided distributions of the batch.

    A policy that is trained on these tokens alone learns as much or more: they decide how a solution goes on ("Beyond
    the 80/20 Rule", https://arxiv.org/abs/2506.01939, with 0.2; TRL's ``top_entropy_quantile``).

    Args:
        entropies: (B, C), nats, from `grpo_edu.logprobs.per_token_logps`.
        quantile: the share of the tokens to keep, from 0 (those with the highest entropy) to 1 (all of them).

    Returns:
        (B, C), 1 for the tokens to keep and 0 for all others, for `per_token_loss`.

    >>> high_entropy_mask(torch.tensor([[0.1, 0.9], [0.5, 9.9]]), torch.tensor([[1, 1], [1, 0]]), quantile=0.5)
    tensor([[0., 1.],
            [1., 0.]])
    """
    check_shapes(entropies, completion_mask=completion_mask)
    check_numbers(quantile=quantile)
    entropies, real = entropies.float(), completion_mask != 0
    least = torch.quantile(entropies[real], 1 - quantile) if real.any() else math.inf
    return ((entropies >= least) & real).float()
