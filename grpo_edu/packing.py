"""Rows for the training forward pass: a prompt and its completions side by side, without padding inside."""

import inspect
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class PackedRows:
    """N rows of L tokens, ``[prompt, completion 1, …, completion G, padding]``, for B = N·G completions.

    A completion's last token is left out: nothing is predicted from it.
    """

    input_ids: Tensor  # (N, L)
    position_ids: Tensor  # (N, L), place of a token in its own prompt and completion
    segment_ids: Tensor  # (N, L), 0 in the prompt, g in completion g
    source: Tensor  # (B, C), place in its row from which a completion token is predicted


def pack_groups(
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor,
    num_generations: int,
) -> PackedRows:
    """Join each group's prompt and its completions in one row.

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

    >>> prompt, completion = torch.tensor([[0, 7], [0, 7]]), torch.tensor([[5, 6, 2], [9, 2, 0]])
    >>> rows = pack_groups(prompt, prompt.sign(), completion, completion.sign(), 2)
    >>> rows.input_ids, rows.position_ids
    (tensor([[7, 5, 6, 9]]), tensor([[0, 1, 2, 1]]))
    >>> rows.source
    tensor([[0, 1, 2],
            [0, 3, 4]])
    """
    _check_groups(prompt_ids, prompt_mask, completion_ids, completion_mask, num_generations)
    batch, columns = completion_ids.shape
    count = batch // num_generations
    prompt_real = prompt_mask[::num_generations] != 0  # (N, P)
    fed = nn.functional.pad(completion_mask[:, 1:] != 0, (0, 1))  # (B, C), tokens with a successor
    real = torch.cat([prompt_real, fed.view(count, -1)], dim=1)  # (N, P + G·C)

    prompt_length = prompt_real.sum(dim=1, keepdim=True)  # (N, 1)
    offsets = torch.arange(columns, device=completion_ids.device)
    ids = torch.cat([prompt_ids[::num_generations], completion_ids.view(count, -1)], dim=1)
    positions = torch.cat([prompt_real.cumsum(dim=1) - 1, prompt_length + offsets.repeat(num_generations)], dim=1)
    prompt_segment = offsets.new_zeros(prompt_ids.shape[1])
    completion_segments = 1 + torch.arange(num_generations, device=offsets.device).repeat_interleave(columns)
    segments = torch.cat([prompt_segment, completion_segments]).expand(count, -1)

    # A stable sort by "is real" moves padding to the end and leaves everything else in order.
    order = real.int().argsort(dim=1, descending=True, stable=True)[:, : int(real.sum(dim=1).max())]
    lengths = fed.sum(dim=1).view(count, num_generations)
    start = prompt_length + lengths.cumsum(dim=1) - lengths  # (N, G), where each completion begins
    source = start.view(batch, 1) + offsets - 1
    source[:, 0] = prompt_length.repeat_interleave(num_generations) - 1  # first tokens follow the prompt
    return PackedRows(
        input_ids=ids.masked_fill(~real, 0).gather(1, order),
        position_ids=positions.masked_fill(~real, 0).gather(1, order),
        segment_ids=segments.gather(1, order),
        source=source,
    )


def block_mask(model: nn.Module, segment_ids: Tensor) -> Tensor:
    """What a token of a packed row sees: the prompt and its own completion, up to itself.

    Args:
        model: a causal language model of transformers.
        segment_ids: (N, L), of `PackedRows`.

    Returns:
        (N, 1, L, L): True where a token (third dimension) sees another (fourth); for "eager" attention,
        which adds its mask to the scores, 0 there and the lowest number elsewhere.

    Raises:
        ValueError: the model takes no such mask: another attention implementation, no position numbers,
            layers that are not attention, or a sliding window shorter than the rows.
    """
    _check_takes_block_mask(model, segment_ids.shape[1])
    query, key = segment_ids[:, :, None], segment_ids[:, None, :]
    visible = ((key == 0) | (key == query)).tril()[:, None]
    if model.config._attn_implementation == "sdpa":
        return visible
    hidden = torch.finfo(model.dtype).min
    return torch.zeros(visible.shape, dtype=model.dtype, device=visible.device).masked_fill(~visible, hidden)


def _check_takes_block_mask(model: nn.Module, length: int) -> None:
    remedy = "use per_token_logps, which gives the same numbers"
    config, attention = model.config.get_text_config(), model.config._attn_implementation
    if attention not in ("sdpa", "eager"):
        raise ValueError(
            f"model has {attention!r} attention, which takes no block mask: load it with "
            f"attn_implementation='sdpa', or {remedy}"
        )
    if "position_ids" not in inspect.signature(model.get_decoder().forward).parameters:
        raise ValueError(f"model takes no position_ids, so completions cannot share a prompt: {remedy}")
    other = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if other:
        raise ValueError(f"model has {', '.join(sorted(other))} layers, which take no block mask: {remedy}")
    window = getattr(config, "sliding_window", None)
    if window is not None and window < length:
        raise ValueError(
            f"model has a sliding window of {window} tokens, which a block mask over {length} tokens would "
            f"switch off: {remedy}"
        )


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
