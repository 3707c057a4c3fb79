"""Compute log-probabilities from hidden states and the output layer without keeping all logits in memory.

With a vocabulary of 151,936, the logits of 512 tokens need 311 MB, their softmax and their gradients need the same
again, and the gradient of the output layer needs 545 MB per chunk if autograd adds up the chunks. The gradient of the
softmax is therefore implemented by hand, so that only one chunk of logits is in memory at a time and all chunks
accumulate into one gradient of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from grpo_edu.config import POSITIVE, check_numbers
from grpo_edu.tensors import at_least_float32

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOGITS_PER_CHUNK = 2**25  # 128 MiB in float32
# Settings of models that scale or cap their logits after the output layer (Qwen2, Llama and GPT-2 do not).
_SCALED_HEADS = ("final_logit_softcapping", "lm_head_multiplier", "logit_scale", "logits_scaling", "output_multiplier")


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
    r"""Return the log-probabilities of T tokens and the entropies of S distributions, computed chunk by chunk.

    .. math:: \log \pi_t = z_{p_t, o_t} - \log \sum_v e^{z_{p_t, v}}, \quad z = h W^\top / \tau

    If g is the gradient of the loss with respect to a log-probability, the gradient with respect to z is
    g · (1[v = o] − softmax(z)); that of an entropy H is −g · p (log p + H). If the weights are frozen and no entropy is
    requested, the backward pass only needs the mean of W's rows under each softmax, which the forward pass keeps.
    Otherwise it computes the logits of each chunk again.

    Args:
        states: (S, H), the hidden state of each distribution.
        weight: (V, H), of an output layer without bias.
        place: (T,), the index of the distribution of each token; several tokens may share one.
        ids: (T,), the tokens.
        temperature: logits are divided by it.
        chunk_size: number of distributions whose logits are in memory at the same time.
        with_entropy: if False, the entropies are 0.

    Returns:
        (T,) nats, at least float32; (S,) nats. Both have a gradient for `states` and `weight`.

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
        frozen = ctx.needs_input_grad[:2] == (True, False) and not with_entropy
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
            del scores  # otherwise it would stay in memory while the next chunk is computed
        logps -= totals[place]
        ctx.save_for_backward(states, weight, place, ids, totals, means, entropies)
        ctx.temperature, ctx.chunk_size = temperature, chunk_size
        ctx.set_materialize_grads(False)  # None for what the loss does not contain
        if not with_entropy:
            ctx.mark_non_differentiable(entropies)
        return logps, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, entropy_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        states, weight, place, ids, totals, means, entropies = ctx.saved_tensors
        grad = totals.new_zeros(len(ids)) if grad is None else grad / ctx.temperature
        shares = grad.new_zeros(len(states)).index_add_(0, place, grad)  # (S,), of all tokens of a distribution
        if means is not None:
            ours = (-shares[:, None] * means).to(states.dtype)
            return ours.index_add_(0, place, (grad[:, None] * weight[ids]).to(states.dtype)), *[None] * 6
        states_grad = torch.empty_like(states) if ctx.needs_input_grad[0] else None
        weight_grad = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for rows, tokens in _chunks(place, len(states), ctx.chunk_size):
            slope = _logits(states[rows], weight, ctx.temperature)
            slope.sub_(totals[rows, None])  # log p
            factor = -shares[rows, None]
            if entropy_grad is not None:
                factor = factor - entropy_grad[rows, None] / ctx.temperature * (slope + entropies[rows, None])
            slope.exp_().mul_(factor)
            slope.index_put_((place[tokens] - rows.start, ids[tokens]), grad[tokens], accumulate=True)
            slope = slope.to(weight.dtype)
            if states_grad is not None:
                states_grad[rows] = slope @ weight
            if weight_grad is not None:
                weight_grad.addmm_(slope.T, states[rows])
            del slope, factor
        return states_grad, weight_grad, *[None] * 5


def _logits(states: Tensor, weight: Tensor, temperature: float) -> Tensor:
    logits = linear(states, weight)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if temperature == 1 else logits.div_(temperature)


def _chunks(place: Tensor, count: int, size: int) -> Iterator[tuple[slice, Tensor]]:
    """Chunks of the distributions, each with the indices of the tokens that were drawn from them."""
    order = place.argsort(stable=True)
    numbers = torch.bincount(place // size, minlength=-(-count // size)).tolist()
    for index, tokens in enumerate(order.split(numbers)):
        yield slice(index * size, min((index + 1) * size, count)), tokens


def score_states(
    head: Any,
    hidden: Tensor,
    source: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor,
    temperature: float,
    chunk_size: int | None,
    with_entropy: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Turn hidden states (N, L, H) into log-probabilities and entropies (B, C), chunk by chunk.

    source: (B, C), of `grpo_edu.fast.packing.PackedRows`; the other arguments are those of `per_token_logps`.
    """
    real = completion_mask != 0
    row = torch.arange(len(real), device=real.device) // (len(real) // len(hidden))
    # Tokens that are predicted from the same position share its logits.
    places, place = (row[:, None] * hidden.shape[1] + source)[real].unique(return_inverse=True)
    states, ids = hidden.flatten(0, 1)[places], completion_ids[real]  # (places, H), (tokens,)
    size = chunk_size or max(1, LOGITS_PER_CHUNK // head.weight.shape[0])
    if len(states) <= size or type(head) is not nn.Linear or head.bias is not None:
        logps, entropy = _through_head(head, states, place, ids, temperature, size, with_entropy)
    else:
        logps, entropy = chunked_logps(
            states, head.weight, place, ids, temperature=temperature, chunk_size=size, with_entropy=with_entropy
        )
    padded = logps.new_zeros(real.shape)
    logps = padded.masked_scatter(real, logps)
    return (logps, padded.masked_scatter(real, entropy[place])) if with_entropy else logps


def _through_head(
    head: nn.Module, states: Tensor, place: Tensor, ids: Tensor, temperature: float, size: int, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    """Return the result of `chunked_logps`, computed with autograd and for any kind of output layer."""

    def score_chunk(states: Tensor, place: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = at_least_float32(head(states))
        if temperature != 1:
            logits = logits / temperature
        all_logps = logits.log_softmax(dim=-1)
        entropy = -(all_logps.exp() * all_logps).sum(dim=-1) if with_entropy else logits.new_zeros(len(logits))
        return all_logps[place, ids], entropy

    order = place.argsort(stable=True)
    chunks = states.split(size)
    tokens = order.split(torch.bincount(place // size, minlength=len(chunks)).tolist())
    recompute = len(chunks) > 1 and torch.is_grad_enabled()
    parts = []
    for chunk_states, chunk in zip(chunks, tokens, strict=True):
        inputs = chunk_states, place[chunk] % size, ids[chunk]
        parts.append(checkpoint(score_chunk, *inputs, use_reentrant=False) if recompute else score_chunk(*inputs))
    logps, entropy = (torch.cat(part) for part in zip(*parts, strict=True))
    return logps[order.argsort()], entropy


def check_model(model: PreTrainedModel, temperature: float, chunk_size: int | None) -> tuple[nn.Module, nn.Module]:
    """Check the model and the settings before the forward pass; return the model's decoder and its output layer."""
    POSITIVE.check("temperature", temperature)
    if chunk_size is not None:
        check_numbers(chunk_size=chunk_size)
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None:
        raise ValueError(f"model must be a causal language model of transformers, got {type(model).__name__}")
    config = model.config.get_text_config()
    scaled = [name for name in _SCALED_HEADS if getattr(config, name, None) not in (None, 1.0)]
    if scaled:
        raise ValueError(f"model changes its logits after the output layer ({scaled[0]}), which is not supported")
    return model.get_decoder(), head
