"""Log-probabilities and entropies of sampled tokens, from logits.

`grpo_edu.fast.packing` computes the logits of completions under a model, and from them the log-probabilities that the
trainer needs (`per_token_logps`, `group_logps`). Both functions raise ValueError for shapes that do not match.
"""

import torch
from torch import Tensor

from grpo_edu.tensors import at_least_float32


def logps_from_logits(logits: Tensor, ids: Tensor) -> Tensor:
    r"""Return the log-probability of each sampled token.

    .. math:: \log \pi(o_t) = z_{o_t} - \log \sum_v e^{z_v}

    Args:
        logits: (B, C, V), already shifted (row t predicts token t) and divided by the temperature. Any leading
            dimensions are allowed. Half precision is converted to float32.
        ids: (B, C), token ids below V.

    Returns:
        (B, C), nats.

    >>> logits = torch.tensor([[[0.0, 0.0], [0.0, 0.0]], [[1.0, 0.0], [0.0, 100.0]]])
    >>> logps_from_logits(logits, torch.tensor([[0, 1], [1, 1]]))
    tensor([[-0.6931, -0.6931],
            [-1.3133,  0.0000]])
    """
    if logits.ndim < 2 or ids.shape != logits.shape[:-1]:
        raise ValueError(f"ids must have the shape of logits {tuple(logits.shape)} without V, got {tuple(ids.shape)}")
    logits = at_least_float32(logits)
    return logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(dim=-1)


def entropies(logits: Tensor) -> Tensor:
    r"""Return the entropy of the distribution from which each token is sampled.

    .. math:: H_t = -\sum_v p_v \log p_v, \quad p = \mathrm{softmax}(z)

    Args:
        logits: (B, C, V), already shifted and divided by the temperature; -inf for tokens that cannot be sampled.

    Returns:
        (B, C), nats, from 0 (certain) to log V (uniform).

    >>> entropies(torch.tensor([[[0.0, 0.0], [1.0, 0.0]], [[3.0, 0.0], [200.0, 0.0]]]))
    tensor([[0.6931, 0.5822],
            [0.1909, 0.0000]])
    """
    if logits.ndim < 2:
        raise ValueError(f"logits must be (B, C, V), got {tuple(logits.shape)}")
    return torch.special.entr(at_least_float32(logits).softmax(dim=-1)).sum(dim=-1)
