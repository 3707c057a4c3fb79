"""Rows for the training forward pass: a prompt and the tree of its completions, without padding inside."""

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class PackedRows:
    """N rows of L tokens, ``[prompt, tree of completions, padding]``, for B = N·G completions.

    Completions that begin alike share the tokens of their common beginning, as all of them share the prompt: the same
    tokens at the same places have the same hidden states. What follows a shared token stands directly behind it in
    the row, so the tokens that see a token are those from itself up to one place (a tree in depth-first order).
    A completion's last token is left out: nothing is predicted from it.
    """

    input_ids: Tensor  # (N, L)
    position_ids: Tensor  # (N, L), place of a token in its own prompt and completion
    seen_until: Tensor  # (N, L), place in the row behind the last token that sees this one
    source: Tensor  # (B, C), place in its row from which a completion token is predicted

    @property
    def lengths(self) -> Tensor:
        """(N,) tokens of each row, without padding."""
        return (self.seen_until > 0).sum(dim=1)


def pack_groups(
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor,
    num_generations: int,
) -> PackedRows:
    """Join each group's prompt and its completions in one row, every common beginning once.

    Args:
        prompt_ids: (B, P), a group's rows adjacent and equal.
        prompt_mask: (B, P), 1 for tokens of the prompt, at least one a row.
        completion_ids: (B, C).
        completion_mask: (B, C), ones, then zeros.
        num_generations: G >= 1; with G = 1 a row is one prompt and one completion.

    Returns:
        rows as wide as the longest needs; what stood under a 0 of a mask is nowhere in them.

    Raises:
        ValueError: the shapes or masks are not as above, or B is not a multiple of G.

    >>> prompt, completion = torch.tensor([[0, 7], [0, 7]]), torch.tensor([[5, 6, 2], [5, 9, 2]])
    >>> rows = pack_groups(prompt, prompt.sign(), completion, completion.sign(), 2)
    >>> rows.input_ids, rows.position_ids  # the 5 stands once
    (tensor([[7, 5, 6, 9]]), tensor([[0, 1, 2, 2]]))
    >>> rows.seen_until  # the 6 is seen by itself alone
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
        ids,
        positions,
        seen,
        source=torch.empty_like(completion_ids).index_copy(0, order, source.view(batch, columns)),
    )


def _alphabetical(tokens: Tensor, num_generations: int) -> Tensor:
    """(B,) the order in which a group's rows (B, C) stand as in a dictionary, so that like beginnings are adjacent."""
    group = torch.arange(len(tokens), device=tokens.device) // num_generations
    rank = torch.cat([group[:, None], tokens], dim=1).unique(dim=0, return_inverse=True)[1]
    return rank.argsort(stable=True)


def _tree(tokens: Tensor, fed: Tensor, prompt_length: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tree of the completions of each group, (N, G, C) in alphabetical order, behind prompts of (N,) tokens.

    Returns, each (N, G, C): whether a token stands in the row or is shared with the completion before; its place in
    the row; and the place behind the last token that sees it. The last two hold where `fed` does.
    """
    same = fed[:, 1:] & (tokens[:, 1:] == tokens[:, :-1])
    shared = nn.functional.pad(same.cumprod(dim=2), (0, 0, 1, 0)).bool()  # all so far as in the completion before
    new = fed & ~shared
    place = prompt_length[:, None] + new.flatten(1).cumsum(dim=1) - 1
    node = place.view_as(new).masked_fill(~new, 0).cummax(dim=1).values

    length = new.sum(dim=2)  # (N, G), tokens that each completion adds
    end = prompt_length[:, None] + length.cumsum(dim=1)
    branch = (end - length)[:, :, None].expand(new.shape).masked_fill(shared, torch.iinfo(end.dtype).max)
    # A token is seen until the first completion behind that does not share it; the last one's end is the row's.
    behind = torch.cat([branch[:, 1:], end[:, -1:, None].expand(-1, 1, new.shape[2])], dim=1)
    return new, node, behind.flip(1).cummin(dim=1).values.flip(1)


def packed_lengths(prompt_mask: Tensor, completion_mask: Tensor, num_generations: int) -> Tensor:
    """Tokens of each packed row at most, without packing it: the prompt's, and each completion's but its last.

    Args:
        prompt_mask: (B, P). completion_mask: (B, C). num_generations: G, a divisor of B.

    Returns:
        (N,) long. Common beginnings of completions make a row shorter.

    >>> packed_lengths(torch.tensor([[0, 1], [0, 1]]), torch.tensor([[1, 1, 1], [1, 1, 0]]), 2)
    tensor([4])
    """
    fed = (completion_mask[:, 1:] != 0).sum(dim=1).view(-1, num_generations).sum(dim=1)
    return (prompt_mask[::num_generations] != 0).sum(dim=1) + fed


def block_mask(model: "PreTrainedModel", seen_until: Tensor) -> Tensor:
    """What a token of a packed row sees: the prompt and what comes before it in its own completion, and itself.

    Given as numbers to add to the attention scores. A mask of True and False would do as well, but torch's
    attention turns one into such numbers in every layer, and keeps each layer's copy for the backward pass.

    Args:
        model: a causal language model of transformers.
        seen_until: (N, L), of `PackedRows`.

    Returns:
        (N, 1, L, L) in the model's dtype: 0 where a token (third dimension) sees another (fourth), else -inf.

    Raises:
        ValueError: the model takes no such mask, see `block_mask_obstacle`.
    """
    length = seen_until.shape[1]
    obstacle = block_mask_obstacle(model, length)
    if obstacle:
        raise ValueError(f"{obstacle}: use per_token_logps, which gives the same numbers")
    query = torch.arange(length, device=seen_until.device)[:, None]
    visible = (query < seen_until[:, None]).tril()[:, None]
    return torch.zeros(visible.shape, dtype=model.dtype, device=visible.device).masked_fill_(~visible, -torch.inf)


def block_mask_obstacle(model: "PreTrainedModel", length: int) -> str:
    """Why rows of `length` tokens cannot go through `model` under a block mask; "" where they can.

    Obstacles are attention implementations that take no mask of four dimensions, models without position
    numbers, layers that are not attention, and a sliding window shorter than the rows.
    """
    config, attention = model.config.get_text_config(), model.config._attn_implementation
    if attention not in ("sdpa", "eager"):
        return f"model has {attention!r} attention, which takes no block mask (attn_implementation='sdpa' does)"
    if "position_ids" not in inspect.signature(model.get_decoder().forward).parameters:
        return "model takes no position_ids, so completions cannot share a prompt"
    other = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if other:
        return f"model has {', '.join(sorted(other))} layers, which take no block mask"
    window = getattr(config, "sliding_window", None)
    if window is not None and window < length:
        return (
            f"model has a sliding window of {window} tokens, which a block mask over {length} tokens would switch off"
        )
    return ""


def _check_groups(
    prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor, completion_mask: Tensor, group: int
) -> None:
    for name, ids, mask in (
        ("prompt", prompt_ids, prompt_mask),
        ("completion", completion_ids, completion_mask),
    ):
        if ids.ndim != 2 or 0 in ids.shape or mask.shape != ids.shape:
            raise ValueError(
                f"{name}_ids and {name}_mask must have one shape (B, tokens) without a 0, "
                f"got {tuple(ids.shape)} and {tuple(mask.shape)}"
            )
    batch = len(prompt_ids)
    if batch != len(completion_ids):
        raise ValueError(f"prompt_ids has {batch} rows and completion_ids {len(completion_ids)}")
    if not (prompt_mask != 0).any(dim=1).all():
        raise ValueError("prompt_mask has a row of zeros: the first token of a completion needs a prompt")
    real = completion_mask != 0
    if (real[:, 1:] & ~real[:, :-1]).any():
        raise ValueError("completion_mask must be ones, then zeros, in every row: pad on the right")
    if group < 1 or batch % group:
        raise ValueError(f"num_generations = {group} does not divide the {batch} rows of prompt_ids")
    for tensor in (prompt_mask != 0, prompt_ids.masked_fill(prompt_mask == 0, 0)):
        groups = tensor.reshape(-1, group, tensor.shape[1])
        if (groups != groups[:, :1]).any():
            raise ValueError("prompt_ids differs within a group: keep the rows of a prompt adjacent")
