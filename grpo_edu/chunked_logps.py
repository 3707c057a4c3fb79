"""Log-probabilities from hidden states and the output layer's weights, without ever holding all logits.

At a vocabulary of 151,936 the logits of 512 tokens weigh 311 MB, their softmax and gradients as much each, and the
gradient of the output layer 545 MB a chunk where autograd adds up chunks. Here the softmax's gradient is written down
by hand, so that one chunk of logits is alive at a time and all chunks add to one gradient of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear


def chunked_logps(
    states: Tensor,
    weight: Tensor,
    place: Tensor,
    ids: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor]:
    r"""Log-probabilities of T tokens, and entropies of S distributions, a chunk of distributions at a time.

    .. math:: \log \pi_t = z_{p_t, o_t} - \log \sum_v e^{z_{p_t, v}}, \quad z = h W^\top / \tau

    With g the gradient that arrives at a log-probability, that of z is g · (1[v = o] − softmax(z)). Where the weights
    are frozen, W's mean under each softmax is all that the backward pass needs, and the forward pass keeps that;
    otherwise the backward pass computes each chunk's logits again.

    Args:
        states: (S, H), a hidden state for every distribution.
        weight: (V, H), of an output layer without bias.
        place: (T,), which of the S distributions a token was drawn from; several may share one.
        ids: (T,), the tokens.
        temperature: logits are divided by it.
        chunk_size: distributions whose logits are held at once.
        with_entropy: False leaves the entropies at 0.

    Returns:
        (T,) nats, float32 at least, with gradient for `states` and `weight`; (S,) nats, without gradient.

    >>> states, weight = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0], [0.0, 2.0]])
    >>> drawn = torch.tensor([0, 0]), torch.tensor([0, 1])
    >>> chunked_logps(states, weight, *drawn, chunk_size=1, with_entropy=True)
    (tensor([-0.6931, -0.6931]), tensor([0.6931]))
    """
    return _ChunkedLogps.apply(states, weight, place, ids, temperature, chunk_size, with_entropy)


class _ChunkedLogps(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        place: Tensor,
        ids: Tensor,
        temperature: float,
        chunk_size: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(states.dtype, torch.float32)
        logps = states.new_zeros(len(ids), dtype=wide)
        entropies, totals = states.new_zeros(2, len(states), dtype=wide)
        frozen = ctx.needs_input_grad[:2] == (True, False)
        means = torch.empty_like(states) if frozen else None  # (S, H), W's rows averaged under each softmax
        for rows, tokens in _chunks(place, len(states), chunk_size):
            scores = _logits(states[rows], weight, temperature)
            at = place[tokens] - rows.start
            logps[tokens] = scores[at, ids[tokens]]
            top = scores.amax(dim=1)
            scores.sub_(top[:, None]).exp_()  # in place: softmax times its sum
            sums = scores.sum(dim=1)
            totals[rows] = top + sums.log()
            if with_entropy:
                entropies[rows] = sums.log() - torch.special.xlogy(scores, scores).sum(dim=1) / sums
            if means is not None:
                means[rows] = (scores.to(weight.dtype) @ weight) / sums[:, None].to(weight.dtype)
            del scores  # or it would still be there while the next chunk is computed
        logps -= totals[place]
        ctx.save_for_backward(states, weight, place, ids, totals, means)
        ctx.temperature, ctx.chunk_size = temperature, chunk_size
        ctx.mark_non_differentiable(entropies)
        return logps, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, place, ids, totals, means = ctx.saved_tensors
        grad = grad / ctx.temperature
        shares = grad.new_zeros(len(states)).index_add_(0, place, grad)  # (S,), of all tokens of a distribution
        if means is not None:
            ours = (-shares[:, None] * means).to(states.dtype)
            return ours.index_add_(0, place, (grad[:, None] * weight[ids]).to(states.dtype)), *[None] * 6
        states_grad = torch.empty_like(states) if ctx.needs_input_grad[0] else None
        weight_grad = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for rows, tokens in _chunks(place, len(states), ctx.chunk_size):
            slope = _logits(states[rows], weight, ctx.temperature)
            slope.sub_(totals[rows, None]).exp_().mul_(-shares[rows, None])
            slope.index_put_((place[tokens] - rows.start, ids[tokens]), grad[tokens], accumulate=True)
            slope = slope.to(weight.dtype)
            if states_grad is not None:
                states_grad[rows] = slope @ weight
            if weight_grad is not None:
                weight_grad.addmm_(slope.T, states[rows])
            del slope
        return states_grad, weight_grad, *[None] * 5


def _logits(states: Tensor, weight: Tensor, temperature: float) -> Tensor:
    logits = linear(states, weight)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if temperature == 1 else logits.div_(temperature)


def _chunks(place: Tensor, count: int, size: int) -> Iterator[tuple[slice, Tensor]]:
    """Chunks of the distributions, each with the tokens that were drawn from it."""
    order = place.argsort(stable=True)
    numbers = torch.bincount(place // size, minlength=-(-count // size)).tolist()
    for index, tokens in enumerate(order.split(numbers)):
        yield slice(index * size, min((index + 1) * size, count)), tokens
