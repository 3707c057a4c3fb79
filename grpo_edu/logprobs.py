"""Log-probabilities of sampled tokens: what a policy-gradient loss differentiates.

Two functions give the same numbers. `per_token_logps` reads each completion behind its own copy of the
prompt. `shared_prefix_logps` reads a prompt once for its whole group, and trains two to three times as fast.

Both compute logits for completion tokens only, and hold those of ``chunk_size`` tokens at a time: at a
vocabulary of 151,936 the logits of a batch would weigh more than the model.
"""

import warnings
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from grpo_edu.chunked_logps import chunked_logps
from grpo_edu.packing import PackedRows, block_mask, block_mask_obstacle, pack_groups, packed_lengths

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOGITS_PER_CHUNK = 2**25  # 128 MiB in float32

# Settings of models that scale or cap their logits behind the output layer (Qwen2, Llama and GPT-2 do not).
_SCALED_HEADS = (
    "final_logit_softcapping", "lm_head_multiplier", "logit_scale", "logits_scaling", "output_multiplier",
)  # fmt: skip


def logps_from_logits(logits: Tensor, ids: Tensor) -> Tensor:
    r"""The log-probability of each token that was sampled.

    .. math:: \log \pi(o_t) = z_{o_t} - \log \sum_v e^{z_v}

    Args:
        logits: (B, C, V), already shifted (row t predicts token t) and divided by the temperature. Any
            leading dimensions will do. Half precision is raised to float32.
        ids: (B, C), token numbers below V.

    Returns:
        (B, C), nats.

    Raises:
        ValueError: shapes that do not match.

    >>> logits = torch.tensor([[[0.0, 0.0], [0.0, 0.0]], [[1.0, 0.0], [0.0, 100.0]]])
    >>> logps_from_logits(logits, torch.tensor([[0, 1], [1, 1]]))
    tensor([[-0.6931, -0.6931],
            [-1.3133,  0.0000]])
    """
    if logits.ndim < 2 or ids.shape != logits.shape[:-1]:
        raise ValueError(f"ids must have logits' shape {tuple(logits.shape)} without V, got {tuple(ids.shape)}")
    logits = _at_least_float32(logits)
    return logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(dim=-1)


def entropies(logits: Tensor) -> Tensor:
    r"""The entropy of the distribution that each token was sampled from.

    .. math:: H_t = -\sum_v p_v \log p_v, \quad p = \mathrm{softmax}(z)

    Args:
        logits: (B, C, V), already shifted and divided by the temperature; -inf for a token that cannot be
            sampled.

    Returns:
        (B, C), nats, from 0 (certain) to log V (uniform).

    Raises:
        ValueError: logits without a vocabulary dimension.

    >>> entropies(torch.tensor([[[0.0, 0.0], [1.0, 0.0]], [[3.0, 0.0], [200.0, 0.0]]]))
    tensor([[0.6931, 0.5822],
            [0.1909, 0.0000]])
    """
    if logits.ndim < 2:
        raise ValueError(f"logits must be (B, C, V), got {tuple(logits.shape)}")
    return torch.special.entr(_at_least_float32(logits).softmax(dim=-1)).sum(dim=-1)


def per_token_logps(
    model: "PreTrainedModel",
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    with_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Score completions under a model: log π(o_t | prompt, o_<t) of every completion token.

    The answer depends on the tokens under the masks alone: neither the amount of padding nor what stands in
    it matters, because padding is moved behind the real tokens, where a causal model does not look.

    Args:
        model: a causal language model of transformers.
        prompt_ids: (B, P), left-padded.
        prompt_mask: (B, P), 1 for tokens of the prompt.
        completion_ids: (B, C), right-padded.
        completion_mask: (B, C), 1 through the first EOS inclusive; a row of zeros scores nothing.
        temperature: that of the sampling; logits are divided by it.
        chunk_size: predictions whose logits are held at once; None: as many as make 128 MiB. With
            several chunks, the backward pass computes each chunk's logits again instead of keeping them.
        with_entropy: also return the entropies, which carry no gradient.

    Returns:
        (B, C), nats, 0 in padding, with gradient; with ``with_entropy`` the pair of it and the entropies
        (B, C), nats, 0 in padding.

    Raises:
        ValueError: shapes that do not match, a completion mask with holes, an empty prompt, a temperature
            that is not positive, a model that is no causal language model or rescales its logits.

    >>> from transformers import Qwen2Config, Qwen2ForCausalLM
    >>> sizes = dict(hidden_size=8, intermediate_size=8, num_attention_heads=2, num_key_value_heads=1)
    >>> model = Qwen2ForCausalLM(Qwen2Config(vocab_size=16, num_hidden_layers=1, **sizes))
    >>> prompt, completion = torch.tensor([[0, 7], [3, 4]]), torch.tensor([[5, 6, 2], [9, 2, 0]])
    >>> per_token_logps(model, prompt, prompt.sign(), completion, completion.sign()).shape
    torch.Size([2, 3])
    """
    decoder, head = _check_model(model, temperature, chunk_size)
    rows = pack_groups(prompt_ids, prompt_mask, completion_ids, completion_mask, 1)
    hidden = decoder(
        input_ids=rows.input_ids, attention_mask=torch.ones_like(rows.input_ids), use_cache=False
    ).last_hidden_state
    return _score(
        head, hidden, rows, completion_ids, completion_mask, temperature, chunk_size, with_entropy
    )  # fmt: skip


def shared_prefix_logps(
    model: "PreTrainedModel",
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor,
    *,
    num_generations: int,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    with_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""The same numbers as `per_token_logps`, with each prompt read once for its group.

    A group becomes one row without padding inside: the prompt, then its completions (Prefix Grouper,
    https://arxiv.org/abs/2506.05433). Completions that begin alike share their common beginning as well, so that the
    row is a tree, and a confident policy, whose samples differ late, costs a fraction of its tokens (Tree Training,
    https://arxiv.org/abs/2511.00413). A token's position number is its place in its own prompt and completion, and a
    mask lets it see what comes before it there, and nothing of its siblings.

    The mask weighs N · L² bytes for N groups with rows of L tokens, and attention costs as much: where the
    completions of a group add up to many thousand tokens, pass a part of the group at a time.

    Args:
        model: a causal language model of transformers with "sdpa" or "eager" attention.
        prompt_ids: (B, P), left-padded, a group's rows adjacent and equal.
        prompt_mask: (B, P).
        completion_ids: (B, C), right-padded.
        completion_mask: (B, C).
        num_generations: G >= 1, completions a prompt.
        temperature: as for `per_token_logps`.
        chunk_size: as for `per_token_logps`.
        with_entropy: as for `per_token_logps`.

    Returns:
        as `per_token_logps`.

    Raises:
        ValueError: as `per_token_logps`; also B not a multiple of G, different prompts in a group, a model
            that takes no block mask (see `grpo_edu.packing.block_mask`).

    >>> from transformers import Qwen2Config, Qwen2ForCausalLM
    >>> sizes = dict(hidden_size=8, intermediate_size=8, num_attention_heads=2, num_key_value_heads=1)
    >>> model = Qwen2ForCausalLM(Qwen2Config(vocab_size=16, num_hidden_layers=1, **sizes))
    >>> prompt, completion = torch.tensor([[0, 7], [0, 7]]), torch.tensor([[5, 6, 2], [9, 2, 0]])
    >>> batch = prompt, prompt.sign(), completion, completion.sign()
    >>> torch.allclose(shared_prefix_logps(model, *batch, num_generations=2), per_token_logps(model, *batch))
    True
    """
    decoder, head = _check_model(model, temperature, chunk_size)
    rows = pack_groups(prompt_ids, prompt_mask, completion_ids, completion_mask, num_generations)
    hidden = decoder(
        input_ids=rows.input_ids,
        attention_mask=block_mask(model, rows.seen_until),
        position_ids=rows.position_ids,
        use_cache=False,
    ).last_hidden_state
    return _score(
        head, hidden, rows, completion_ids, completion_mask, temperature, chunk_size, with_entropy
    )  # fmt: skip


def group_logps(
    model: "PreTrainedModel",
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor,
    *,
    num_generations: int,
    temperature: float = 1.0,
) -> Tensor:
    """`shared_prefix_logps` where the model takes its mask, else, with a warning, `per_token_logps`.

    Arguments and result are those of `shared_prefix_logps`.
    """
    batch = prompt_ids, prompt_mask, completion_ids, completion_mask
    width = int(packed_lengths(prompt_mask, completion_mask, num_generations).max())
    obstacle = block_mask_obstacle(model, width)
    if not obstacle:
        logps = shared_prefix_logps(model, *batch, num_generations=num_generations, temperature=temperature)
        return cast(Tensor, logps)  # without entropies beside it
    warnings.warn(f"{obstacle}: prompts are read once a completion, which is slower", RuntimeWarning, stacklevel=2)
    return cast(Tensor, per_token_logps(model, *batch, temperature=temperature))


def _score(
    head: Any,
    hidden: Tensor,
    rows: PackedRows,
    completion_ids: Tensor,
    completion_mask: Tensor,
    temperature: float,
    chunk_size: int | None,
    with_entropy: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Turn hidden states (N, L, H) into log-probabilities and entropies (B, C), chunk by chunk."""
    real = completion_mask != 0
    row = torch.arange(len(real), device=real.device) // (len(real) // len(hidden))
    # Tokens that are predicted from one place share its logits.
    places, place = (row[:, None] * hidden.shape[1] + rows.source)[real].unique(return_inverse=True)
    states, ids = hidden.flatten(0, 1)[places], completion_ids[real]  # (places, H), (tokens,)
    size = chunk_size or max(1, LOGITS_PER_CHUNK // head.weight.shape[0])
    if len(states) <= size or type(head) is not nn.Linear or head.bias is not None:
        logps, entropy = _through_head(head, states, place, ids, temperature, size, with_entropy)
    else:
        logps, entropy = chunked_logps(
            states, head.weight, place, ids,
            temperature=temperature, chunk_size=size, with_entropy=with_entropy,
        )  # fmt: skip
    padded = logps.new_zeros(real.shape)
    logps = padded.masked_scatter(real, logps)
    return (logps, padded.masked_scatter(real, entropy[place])) if with_entropy else logps


def _through_head(
    head: nn.Module, states: Tensor, place: Tensor, ids: Tensor, temperature: float, size: int, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    """What `chunked_logps` gives, by autograd and through an output layer of any kind."""

    def score_chunk(states: Tensor, place: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = _at_least_float32(head(states))
        if temperature != 1:
            logits = logits / temperature
        logps = logits.log_softmax(dim=-1)[place, ids]
        return logps, entropies(logits.detach()) if with_entropy else logits.new_zeros(len(logits))

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


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _check_model(
    model: "PreTrainedModel", temperature: float, chunk_size: int | None
) -> tuple[nn.Module, nn.Module]:
    """Check what can be checked before the forward pass; return the model's decoder and its output layer."""
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}: score greedy samples at 1.0")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1 token, got {chunk_size}")
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None:
        raise ValueError(f"model must be a causal language model of transformers, got {type(model).__name__}")
    config = model.config.get_text_config()
    scaled = [name for name in _SCALED_HEADS if getattr(config, name, None) not in (None, 1.0)]
    if scaled:
        raise ValueError(f"model changes its logits behind the output layer ({scaled[0]}): not supported")
    return model.get_decoder(), head
