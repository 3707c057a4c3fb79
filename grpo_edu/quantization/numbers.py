"""Quantization from first principles: real numbers rounded to an evenly spaced grid of integers.

    x ≈ scale · (q − zero_point)

*Symmetric*: the zero point is 0, and the grid is equally wide on both sides of it. *Affine*: the zero point shifts the
grid to where the numbers are. A scale is used for a whole tensor (per-tensor), for a row of a weight, which makes one
output (per-channel), or for a group of neighbors in a row (per-group). Jacob et al. 2018,
https://arxiv.org/abs/1712.05877.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BITS = (2, 8)  # fewest and most


@dataclass(frozen=True)
class QuantizedTensor:
    """A tensor as integers, with the scales and zero points that turn them back into real numbers.

    q: (..., K) int8 where symmetric, uint8 where affine; scale, zero_point: shapes that broadcast to q's, or with
    `group_size` g to (..., K/g, g). zero_point is an integer, and 0 where symmetric.
    """

    q: Tensor
    scale: Tensor
    zero_point: Tensor
    bits: int
    group_size: int | None = None

    def dequantize(self) -> Tensor:
        """scale · (q − zero_point), in the shape of q."""
        groups = in_groups(self.q, self.group_size)
        return (self.scale * (groups.to(self.scale.dtype) - self.zero_point)).view(self.q.shape)


def quantize(
    x: Tensor, *, bits: int = 8, symmetric: bool = True, dim: int | None = None, group_size: int | None = None
) -> QuantizedTensor:
    r"""Round a tensor to a grid that is just wide enough for it.

    .. math:: q = \mathrm{clamp}(\mathrm{round}(x / s) + z)

    symmetric: :math:`s = \max|x| / (2^{b-1} - 1)`, z = 0. Affine:
    :math:`s = (\max(x, 0) - \min(x, 0)) / (2^b - 1)`, :math:`z = \mathrm{round}(-\min(x, 0) / s)`. Either way 0 stays
    exactly 0, and no number moves by more than half a step: |x − x̂| ≤ s / 2.

    Args:
        x: floating-point, any shape, finite.
        bits: b, from 2 to 8.
        symmetric: else affine.
        dim: one scale per index of this dimension (0: the channels of a weight); None: one scale for the whole tensor.
        group_size: one scale per group of this many neighbors along the last dimension; cannot be combined with `dim`.

    Raises ValueError: an argument out of range, a number that is not finite, a last dimension that does not divide.

    >>> quantize(torch.tensor([[-1.27, 0.004, 0.5], [0.0, 2.54, 0.01]])).q
    tensor([[-64,   0,  25],
            [  0, 127,   0]], dtype=torch.int8)
    >>> quantize(torch.tensor([[-1.27, 0.004, 0.5], [0.0, 2.54, 0.01]]), dim=0).q
    tensor([[-127,    0,   50],
            [   0,  127,    0]], dtype=torch.int8)
    """
    _check(x, bits, dim, group_size)
    values = in_groups(x.float(), group_size)
    if group_size is not None:
        over: tuple[int, ...] = (values.ndim - 1,)
    else:
        over = tuple(d for d in range(x.ndim) if dim is None or d != dim % x.ndim)
    low, high = (values.amin(over, keepdim=True), values.amax(over, keepdim=True)) if over else (values, values)
    if not (torch.isfinite(low).all() and torch.isfinite(high).all()):  # NaN is its own minimum
        raise ValueError("x has NaN or infinity, which no grid covers; look for a training run that diverged")
    if symmetric:
        top = 2 ** (bits - 1) - 1
        scale = _positive(torch.maximum(-low, high) / top)
        zero_point, bottom, kind = torch.zeros_like(scale), -top, torch.int8
    else:
        low, high, top = low.clamp(max=0), high.clamp(min=0), 2**bits - 1
        scale = _positive(high / top - low / top)
        zero_point, bottom, kind = (-low / scale).round(), 0, torch.uint8
    q = values.div(scale).round_().add_(zero_point).clamp_(bottom, top).to(kind)
    return QuantizedTensor(q.view(x.shape), scale, zero_point, bits, group_size)


def relative_error(x: Tensor, approximation: Tensor) -> float:
    r"""Return the relative error of an approximation: :math:`\|x - \hat x\| / \|x\|`.

    Args:
        x, approximation: one shape.

    Raises ValueError: shapes that differ, or an x of zeros only.

    >>> relative_error(torch.tensor([[3.0, 4.0, 0.0], [0.0, 0.0, 0.0]]), torch.tensor([[3.0, 3.5, 0.0], [0.0] * 3]))
    0.1
    """
    if x.shape != approximation.shape:
        raise ValueError(f"approximation: expected shape {tuple(x.shape)}, got {tuple(approximation.shape)}")
    length = x.double().norm().item()
    if length == 0:
        raise ValueError("x has only zeros, so the error relative to it is undefined; pass a tensor with other numbers")
    return (x.double() - approximation.double()).norm().item() / length


def in_groups(x: Tensor, group_size: int | None) -> Tensor:
    """(..., K) as (..., K/g, g); unchanged where `group_size` is None."""
    return x if group_size is None else x.unflatten(-1, (-1, group_size))


def _positive(scale: Tensor) -> Tensor:
    """Return the scale, or 1 if it is 0: a grid for zeros may have any step, and 1 avoids a division by 0."""
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def _check(x: Tensor, bits: int, dim: int | None, group_size: int | None) -> None:
    if not x.is_floating_point() or x.numel() == 0:
        raise ValueError(f"x must have floating-point numbers, got {x.dtype} with shape {tuple(x.shape)}")
    if not BITS[0] <= bits <= BITS[1]:
        raise ValueError(f"bits: must be from {BITS[0]} to {BITS[1]}, got {bits}")
    if dim is not None and not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim: {dim} is not a dimension of x, which has {x.ndim}; use 0 for the channels of a weight")
    if dim is not None and group_size is not None:
        raise ValueError(f"group_size = {group_size} cannot be combined with dim = {dim}; leave dim out")
    if group_size is not None and (group_size < 1 or x.ndim == 0 or x.shape[-1] % group_size):
        raise ValueError(
            f"group_size: {group_size} does not divide the last dimension of {tuple(x.shape)}; choose a divisor of it"
        )
