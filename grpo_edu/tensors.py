"""Helpers of the functions of tensors: checks of shapes, masks, and the data types in which they compute."""

import torch
from torch import Tensor

LARGEST_REWARD = 1e15  # float32 still holds the squares of such rewards, from which advantages are scaled


def check_name(argument: str, name: str, known: tuple[str, ...]) -> None:
    """Raise ValueError if the name is unknown."""
    if name not in known:
        raise ValueError(f"{argument} must be one of {', '.join(known)}; got {name!r}")


def check_shapes(per_token_logps: Tensor, advantages: Tensor | None = None, **others: Tensor | None) -> None:
    """Raise ValueError unless the log-probabilities and all others are (B, C), and the advantages that or (B,)."""
    shape = tuple(per_token_logps.shape)
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"per_token_logps must have shape (B, C) and not be empty, got {shape}")
    for argument, tensor in others.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{argument} must have shape {shape}, as per_token_logps, got {tuple(tensor.shape)}")
    if advantages is not None and advantages.shape not in (shape[:1], shape):
        got = tuple(advantages.shape)
        raise ValueError(f"advantages must have shape ({shape[0]},), one per completion, or {shape}, got {got}")


def check_row_or_token(argument: str, values: Tensor, like: Tensor) -> None:
    """Raise ValueError unless the values are (B, C) or (B, 1)."""
    rows, columns = like.shape
    if values.shape not in ((rows, columns), (rows, 1)):
        raise ValueError(f"{argument} must have shape ({rows}, {columns}) or ({rows}, 1), got {tuple(values.shape)}")


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """Replace the values with 0 where the mask is 0, even if they are NaN."""
    return torch.where(mask != 0, values, 0.0)


def at_least_float32(tensor: Tensor) -> Tensor:
    """Convert half precision to float32; other floating-point types stay as they are."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def widest_float_dtype(device: torch.device) -> torch.dtype:
    """Return the widest floating-point type of a device: float64, and float32 on Apple's GPU, which has no other.

    >>> widest_float_dtype(torch.device("cpu")), widest_float_dtype(torch.device("mps"))
    (torch.float64, torch.float32)
    """
    return torch.float32 if device.type == "mps" else torch.float64
