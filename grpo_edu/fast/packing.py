"""Compute the log-probabilities of completions under a model, with each prompt processed once per group if possible.

`per_token_logps` gives each completion its own copy of the prompt. `group_logps`, which the trainer uses, packs a
prompt and the tree of its completions into one row of the forward pass, without padding in between, if the model allows
it. `grpo_edu.logprobs` has the definition of a log-probability.
"""

import inspect
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from grpo_edu.fast.chunked_logps import check_model, score_states

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class PackedRows:
    """N rows of L tokens, ``[prompt, tree of completions, padding]``, for B = N·G completions.

    Completions with a common prefix share the tokens of this prefix, as all of them share the prompt, because the same
    tokens at the same positions have the same hidden states. The row holds the tree in depth-first order, so the
    tokens that attend to a token are consecutive and start with the token itself.
    The last token of a completion is left out, because nothing is predicted from it.
    """

    input_ids: Tensor  # (N, L)
    position_ids: Tensor  # (N, L), position of a token in its own prompt and completion
    seen_until: Tensor  # (N, L), index in the row after the last token that attends to this one
    source: Tensor  # (B, C), index in its row of the token from which a completion token is predicted

    @property
    def lengths(self) -> Tensor:
        """The number of tokens (N,) of each row, without padding."""
        return (self.seen_until > 0).sum(dim=1)


def pack_groups(
    prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor, completion_mask: Tensor, num_generations: int
) -> PackedRows:
    """Join the prompt and the completions of each group in one row, with every common prefix only once.

    Args:
        prompt_ids: (B, P), a group's rows adjacent and equal.
        prompt_mask: (B, P), 1 for tokens of the prompt, at least one per row.
        completion_ids: (B, C).
        completion_mask: (B, C), ones, then zeros.
        num_generations: G >= 1; with G = 1 a row is one prompt and one completion.

    Returns:
        rows as wide as the longest; tokens whose mask is 0 are not in them.

    Raises ValueError: the shapes or masks are not as described, or B is not a multiple of G.

    >>> prompt, completion = torch.tensor([[0, 7], [0, 7]]), torch.tensor([[5, 6, 2], [5, 9, 2]])
    >>> rows = pack_groups(prompt, prompt.sign(), completion, completion.sign(), 2)
    >>> rows.input_ids, rows.position_ids  # the 5 occurs once
    (tensor([[7, 5, 6, 9]]), tensor([[0, 1, 2, 2]]))
    >>> rows.seen_until  # only the 6 itself attends to the 6
    tensor([[4, 4, 3, 4]])
    >>> rows.source
    tensor([[0, 1, 2],
            [0, 1, 3]])
    """
    _check_groups(prompt_ids, prompt_mask, completion_ids, completion_mask, num_generations)
    batch, columns = completion_ids.shape
    count = batch // num_generations
    prompt_real = prompt_mask[::num_generations] != 0  # (N, P)
    prompt_length = prompt_real.sum(dim=1)  # (N,)
    fed = nn.functional.pad(completion_mask[:, 1:] != 0, (0, 1))  # (B, C), tokens with a successor
    tokens = completion_ids.masked_fill(~fed, -1)
    order = _alphabetical(tokens, num_generations)
    tokens, fed = (part[order].view(count, num_generations, columns) for part in (tokens, fed))
    new, node, until = _tree(tokens, fed, prompt_length)

    real = torch.cat([prompt_real, new.flatten(1)], dim=1)  # (N, P + G·C)
    width = int(real.sum(dim=1).max())
    offsets = torch.arange(columns, device=fed.device).repeat(num_generations)
    ids = torch.cat([prompt_ids[::num_generations], tokens.flatten(1)], dim=1)
    positions = torch.cat([prompt_real.cumsum(dim=1) - 1, prompt_length[:, None] + offsets], dim=1)
    seen = torch.cat([torch.full_like(prompt_ids[::num_generations], width), until.flatten(1)], dim=1)
    # A stable sort by "is real" moves padding to the end and leaves everything else in order.
    kept = real.int().argsort(dim=1, descending=True, stable=True)[:, :width]
    source = nn.functional.pad(node, (1, 0))[:, :, :-1].clone()
    source[:, :, 0] = prompt_length[:, None] - 1  # first tokens follow the prompt
    ids, positions, seen = (part.masked_fill(~real, 0).gather(1, kept) for part in (ids, positions, seen))
    return PackedRows(
        ids, positions, seen, source=torch.empty_like(completion_ids).index_copy(0, order, source.view(batch, columns))
    )


def _alphabetical(tokens: Tensor, num_generations: int) -> Tensor:
    """Return the alphabetical order (B,) of the rows (B, C) in each group; common prefixes become adjacent."""
    group = torch.arange(len(tokens), device=tokens.device) // num_generations
    rank = torch.cat([group[:, None], tokens], dim=1).unique(dim=0, return_inverse=True)[1]
    return rank.argsort(stable=True)


def _tree(tokens: Tensor, fed: Tensor, prompt_length: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tree of the completions of each group, (N, G, C) in alphabetical order, after prompts of (N,) tokens.

    Returns, each (N, G, C): whether a token is new in the row (otherwise the previous completion shares it); its index
    in the row; and the index after the last token that attends to it. The last two are valid where `fed` is True.
    """
    same = fed[:, 1:] & (tokens[:, 1:] == tokens[:, :-1])
    shared = nn.functional.pad(same.cumprod(dim=2), (0, 0, 1, 0)).bool()  # all so far as in the completion before
    new = fed & ~shared
    place = prompt_length[:, None] + new.flatten(1).cumsum(dim=1) - 1
    node = place.view_as(new).masked_fill(~new, 0).cummax(dim=1).values

    length = new.sum(dim=2)  # (N, G), tokens that each completion adds
    end = prompt_length[:, None] + length.cumsum(dim=1)
    branch = (end - length)[:, :, None].expand(new.shape).masked_fill(shared, torch.iinfo(end.dtype).max)
    # A token is visible up to the first following completion that does not share it, or up to the end of the row.
    behind = torch.cat([branch[:, 1:], end[:, -1:, None].expand(-1, 1, new.shape[2])], dim=1)
    return new, node, behind.flip(1).cummin(dim=1).values.flip(1)


def packed_lengths(prompt_mask: Tensor, completion_mask: Tensor, num_generations: int) -> Tensor:
    """Return an upper bound of the tokens in each packed row: the prompt, and each completion without its last token.

    Args:
        prompt_mask: (B, P). completion_mask: (B, C). num_generations: G, a divisor of B.

    Returns:
        (N,) long. The packed row is shorter if completions have common prefixes.

    >>> packed_lengths(torch.tensor([[0, 1], [0, 1]]), torch.tensor([[1, 1, 1], [1, 1, 0]]), 2)
    tensor([4])
    """
    fed = (completion_mask[:, 1:] != 0).sum(dim=1).view(-1, num_generations).sum(dim=1)
    return (prompt_mask[::num_generations] != 0).sum(dim=1) + fed


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
    r"""Return the log-probability log π(o_t | prompt, o_<t) of every completion token under a model.

    The result depends only on the tokens whose mask is 1. The amount and the content of the padding have no influence,
    because padding is moved to the end of the row, where a causal model does not see it.

    Args:
        model: a causal language model of transformers.
        prompt_ids: (B, P), left-padded.
        prompt_mask: (B, P), 1 for tokens of the prompt.
        completion_ids: (B, C), right-padded.
        completion_mask: (B, C), 1 up to and including the first EOS; a row may be all zeros.
        temperature: sampling temperature; logits are divided by it.
        chunk_size: number of tokens whose logits are in memory at the same time; None: 128 MiB of logits. With several
            chunks, the backward pass computes the logits of each chunk again instead of keeping them.
        with_entropy: also return the entropies.

    Returns:
        (B, C), nats, 0 in the padding, with gradient. With ``with_entropy`` a pair of this and the entropies (B, C),
        nats, 0 in the padding, with gradient.

    Raises:
        ValueError: the shapes do not match, a completion mask has gaps, a prompt is empty, the temperature is not
            positive, or the model is not a causal language model or rescales its logits.

    >>> from transformers import Qwen2Config, Qwen2ForCausalLM
    >>> sizes = dict(hidden_size=8, intermediate_size=8, num_attention_heads=2, num_key_value_heads=1)
    >>> model = Qwen2ForCausalLM(Qwen2Config(vocab_size=16, num_hidden_layers=1, **sizes))
    >>> prompt, completion = torch.tensor([[0, 7], [3, 4]]), torch.tensor([[5, 6, 2], [9, 2, 0]])
    >>> per_token_logps(model, prompt, prompt.sign(), completion, completion.sign()).shape
    torch.Size([2, 3])
    """
    decoder, head = check_model(model, temperature, chunk_size)
    rows = pack_groups(prompt_ids, prompt_mask, completion_ids, completion_mask, 1)
    hidden = decoder(
        input_ids=rows.input_ids, attention_mask=torch.ones_like(rows.input_ids), use_cache=False
    ).last_hidden_state
    source = rows.source
    return score_states(head, hidden, source, completion_ids, completion_mask, temperature, chunk_size, with_entropy)


def group_logps(
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
    r"""Return the result of `per_token_logps`, with each prompt processed once per group if possible.

    A group becomes one row: the prompt, then its completions (Prefix Grouper, https://arxiv.org/abs/2506.05433), with
    every common prefix only once (Tree Training, https://arxiv.org/abs/2511.00413). This saves most of the tokens if
    completions differ late, as those of a confident policy do. A mask hides the other completions of the group from
    each token. If the model does not support such a mask, the function warns and calls `per_token_logps`.

    The mask grows with N · L² for N groups with rows of L tokens, and so does the cost of attention. If the completions
    of a group have many thousands of tokens, pass a part of the group at a time.

    Args:
        model: a causal language model of transformers.
        num_generations: G >= 1, completions per prompt; a group's rows are adjacent, with equal prompts.
        prompt_ids, prompt_mask, completion_ids, completion_mask, temperature, chunk_size, with_entropy: as for
            `per_token_logps`.

    Raises ValueError: as `per_token_logps` and `pack_groups`.

    >>> from transformers import Qwen2Config, Qwen2ForCausalLM
    >>> sizes = dict(hidden_size=8, intermediate_size=8, num_attention_heads=2, num_key_value_heads=1)
    >>> model = Qwen2ForCausalLM(Qwen2Config(vocab_size=16, num_hidden_layers=1, **sizes))
    >>> prompt, completion = torch.tensor([[0, 7], [0, 7]]), torch.tensor([[5, 6, 2], [9, 2, 0]])
    >>> batch = prompt, prompt.sign(), completion, completion.sign()
    >>> torch.allclose(group_logps(model, *batch, num_generations=2), per_token_logps(model, *batch))
    True
    """
    batch = prompt_ids, prompt_mask, completion_ids, completion_mask
    decoder, head = check_model(model, temperature, chunk_size)
    rows = pack_groups(*batch, num_generations)
    obstacle = block_mask_obstacle(model, rows.input_ids.shape[1])
    if obstacle:
        warning = f"{obstacle}; each prompt is processed once per completion, which is slower"
        warnings.warn(warning, RuntimeWarning, stacklevel=2)
        return per_token_logps(model, *batch, temperature=temperature, chunk_size=chunk_size, with_entropy=with_entropy)
    hidden = decoder(
        input_ids=rows.input_ids,
        attention_mask=block_mask(model, rows.seen_until),
        position_ids=rows.position_ids,
        use_cache=False,
    ).last_hidden_state
    source = rows.source
    return score_states(head, hidden, source, completion_ids, completion_mask, temperature, chunk_size, with_entropy)


def block_mask(model: "PreTrainedModel", seen_until: Tensor) -> Tensor:
    """Return the attention mask of packed rows: a token sees the prompt and its completion up to itself.

    The mask is added to the attention scores. PyTorch would convert a Boolean mask into such a mask in every layer, and
    keep the copy of each layer for the backward pass.

    Args:
        model: a causal language model of transformers without a `block_mask_obstacle`.
        seen_until: (N, L), of `PackedRows`.

    Returns:
        (N, 1, L, L) in the dtype of the layers: 0 if a token (third dimension) sees another (fourth), else -inf.
    """
    query = torch.arange(seen_until.shape[1], device=seen_until.device)[:, None]
    visible = (query < seen_until[:, None]).tril()[:, None]
    *_, norm = model.get_decoder().parameters()  # the table of embeddings may have another dtype than the layers
    return torch.zeros(visible.shape, dtype=norm.dtype, device=visible.device).masked_fill_(~visible, -torch.inf)


def block_mask_obstacle(model: "PreTrainedModel", length: int) -> str:
    """Return the reason why `model` cannot process rows of `length` tokens with a block mask; "" if it can.

    Obstacles are attention implementations without four-dimensional masks, models without position ids, layers that
    are not attention, and a sliding window that is shorter than the rows.
    """
    config, attention = model.config.get_text_config(), model.config._attn_implementation
    if attention not in ("sdpa", "eager"):
        return f"model has {attention!r} attention, which supports no block mask (attn_implementation='sdpa' does)"
    if "position_ids" not in inspect.signature(model.get_decoder().forward).parameters:
        return "model takes no position_ids, so completions cannot share a prompt"
    other = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if other:
        return f"model has {', '.join(sorted(other))} layers, which support no block mask"
    window = getattr(config, "sliding_window", None)
    if window is not None and window < length:
        return (
            f"model has a sliding window of {window} tokens, which a block mask over {length} tokens would switch off"
        )
    return ""


def _check_groups(
    prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor, completion_mask: Tensor, group: int
) -> None:
    for name, ids, mask in (("prompt", prompt_ids, prompt_mask), ("completion", completion_ids, completion_mask)):
        if ids.ndim != 2 or 0 in ids.shape or mask.shape != ids.shape:
            raise ValueError(
                f"{name}_ids and {name}_mask must have the same shape (B, tokens) and not be empty, "
                f"got {tuple(ids.shape)} and {tuple(mask.shape)}"
            )
        negative = (ids < 0) & (mask != 0)
        if negative.any():
            row, token = negative.nonzero()[0].tolist()
            raise ValueError(
                f"{name}_ids must not be negative where {name}_mask is not 0, got {int(ids[row, token])} in row {row}; "
                "set the mask of padding to 0"
            )
    batch = len(prompt_ids)
    if batch != len(completion_ids):
        raise ValueError(
            f"prompt_ids and completion_ids must have the same number of rows, got {batch} and {len(completion_ids)}"
        )
    if not (prompt_mask != 0).any(dim=1).all():
        raise ValueError("prompt_mask has a row of zeros; a completion needs a prompt with at least one token")
    real = completion_mask != 0
    if (real[:, 1:] & ~real[:, :-1]).any():
        raise ValueError("completion_mask must be ones, then zeros, in every row; pad completions on the right")
    if group < 1 or batch % group:
        raise ValueError(f"num_generations = {group} does not divide the {batch} rows of prompt_ids")
    for tensor in (prompt_mask != 0, prompt_ids.masked_fill(prompt_mask == 0, 0)):
        groups = tensor.reshape(-1, group, tensor.shape[1])
        if (groups != groups[:, :1]).any():
            raise ValueError("prompt_ids differs within a group; keep the rows of a prompt adjacent")
