"""Linear layers and embeddings that hold whole numbers, and the kernels that multiply them.

The kernels are torch's own and take plain tensors: oneDNN's int8 product (`onednn::qlinear_pointwise`), and the
products with int8 and int4 weights (`_weight_int8pack_mm`, `_weight_int4pack_mm_for_cpu`). They were measured beside
`torch.ao`, torchao, `torch.compile`, ONNX Runtime and OpenVINO: `benchmarks/quantization_kernels.py`. On a processor
that lacks one, the layer multiplies the dequantized weights, which gives the same numbers, slowly.
"""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor, nn

from grpo_edu.quantized_numbers import QuantizedTensor, quantize

GROUP_SIZE = 32  # of int4; the kernel takes 32, 64, 128 or 256
_ROWS_AT_ONCE = 1024  # of a weight that is dequantized
_FEW = 16  # rows of x up to which the product with int8 weights is faster than dequantizing them


class QuantizedLayer(nn.Module):
    """What the layers below share: buffers, no parameters, and weights that can be had back as numbers.

    in_features, out_features: K and N. bias: (N,) float32 or None.
    """

    bias: Tensor | None

    def __init__(self, out_features: int, in_features: int, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = out_features, in_features
        self.register_buffer("bias", None if bias is None else bias.detach().float().clone())

    @property
    def weight(self) -> Tensor:
        """A stand-in (N, K) without memory, for code that asks a layer for its shape."""
        return torch.empty(self.out_features, self.in_features, dtype=torch.int8, device="meta")

    def parts(self) -> QuantizedTensor:
        """The weights (N, K) as whole numbers with their scales."""
        raise NotImplementedError

    def product(self, x: Tensor) -> Tensor:
        """(M, K) float32 → (M, N) float32, without the bias."""
        raise NotImplementedError

    def store(self) -> dict[str, Tensor]:
        """What a file holds of the layer beside its modules; `restore` takes it back."""
        return {name: buffer for name, buffer in self.named_buffers(recurse=False) if buffer is not None}

    def restore(self, stored: dict[str, Tensor]) -> None:
        """Take what `store` gave for a layer of this shape."""
        for name, tensor in stored.items():
            if name != "q":
                getattr(self, name).copy_(tensor)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def forward(self, x: Tensor) -> Tensor:
        """(…, K) → (…, N), in the dtype of x."""
        y = self.product(x.reshape(-1, self.in_features).float())
        y = y if self.bias is None else y.add_(self.bias)
        return y.view(*x.shape[:-1], self.out_features).to(x.dtype)


class Int8Linear(QuantizedLayer):
    """int8 weights, one scale an output; x stays as it is. `rows` may be shared with an embedding."""

    def __init__(self, rows: Int8Embedding, bias: Tensor | None) -> None:
        super().__init__(len(rows.q), rows.q.shape[1], bias)
        self.rows = rows
        self.has_kernel = _kernel_or_word("int8-weight")

    @classmethod
    def of(cls, layer: nn.Linear) -> Int8Linear:
        return cls(Int8Embedding(layer.weight), layer.bias)

    def parts(self) -> QuantizedTensor:
        return self.rows.parts()

    def product(self, x: Tensor) -> Tensor:
        """(M, K) → (M, N): in bfloat16 for few rows, where reading the weights takes the time, else in float32."""
        if self.has_kernel and len(x) <= _FEW:
            scale = self.rows.scale.to(torch.bfloat16)
            return torch._weight_int8pack_mm(x.to(torch.bfloat16), self.rows.q, scale).float()
        return _dequantized_product(x, self.parts())


class Int8Embedding(nn.Module):
    """A table (V, H) of int8 with one scale a row; looking up a token makes its row real again."""

    q: Tensor
    scale: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        parts = quantize(weight.detach(), dim=0)
        self.register_buffer("q", parts.q)
        self.register_buffer("scale", parts.scale.flatten())

    @property
    def weight(self) -> Tensor:
        """The whole numbers (V, H); without `scale` they are no embedding yet."""
        return self.q

    def parts(self) -> QuantizedTensor:
        """The table as whole numbers with their scales."""
        scale = self.scale[:, None]
        return QuantizedTensor(self.q, scale, torch.zeros_like(scale), 8)

    def forward(self, ids: Tensor) -> Tensor:
        """(…) long → (…, H) float32."""
        return self.q[ids].float() * self.scale[ids, None]


class DynamicInt8Linear(QuantizedLayer):
    """int8 weights and int8 activations: each row of x gets a scale of its own, on the fly.

    A scale a row, and not one for all of x: a completion must not depend on which others share its batch.
    """

    scale: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.out_features, layer.in_features, layer.bias)
        parts = quantize(layer.weight.detach(), dim=0)
        self.register_buffer("scale", parts.scale.flatten())
        self.has_kernel = _kernel_or_word("int8-dynamic")
        self._pack(parts.q)

    def _pack(self, q: Tensor) -> None:
        self.packed = torch.ops.onednn.qlinear_prepack(q, None) if self.has_kernel else q  # opaque
        self.zero = torch.zeros(self.out_features, dtype=torch.int32)

    def store(self) -> dict[str, Tensor]:
        return {"q": self.parts().q, **super().store()}

    def restore(self, stored: dict[str, Tensor]) -> None:
        super().restore(stored)
        self._pack(stored["q"])

    def parts(self) -> QuantizedTensor:
        q = self.packed.to_dense().t().contiguous() if self.has_kernel else self.packed
        scale = self.scale[:, None]
        return QuantizedTensor(q, scale, torch.zeros_like(scale), 8)

    def product(self, x: Tensor) -> Tensor:
        """(M, K) → (M, N)."""
        step = x.abs().amax(dim=1, keepdim=True).clamp_(min=torch.finfo(x.dtype).tiny).div_(127)
        q = x.div(step).round_()
        if not self.has_kernel:
            return _dequantized_product(q, self.parts()).mul_(step)
        return _onednn_product(q, self.packed, self.scale, self.zero).mul_(step)


class Int4Linear(QuantizedLayer):
    """4-bit weights in groups of neighbors of a row, each with a scale and a zero point; x goes through in bfloat16."""

    scale: Tensor
    zero_point: Tensor

    def __init__(self, layer: nn.Linear, group_size: int = GROUP_SIZE) -> None:
        super().__init__(layer.out_features, layer.in_features, layer.bias)
        self.group_size = group_size
        parts = quantize(layer.weight.detach(), bits=4, symmetric=False, group_size=group_size)
        self.register_buffer("scale", parts.scale.squeeze(-1).to(torch.bfloat16))  # (N, K/g)
        self.register_buffer("zero_point", parts.zero_point.squeeze(-1).to(torch.uint8))
        self.has_kernel = _kernel_or_word("int4-group")
        self._pack(parts.q)

    def _pack(self, q: Tensor) -> None:
        if self.has_kernel:
            q = torch._convert_weight_to_int4pack_for_cpu(q.int(), 1)  # (N, K/2) uint8, in an order of its own
        self.packed = q

    def store(self) -> dict[str, Tensor]:
        q = self.parts().q
        return {"q": q[:, ::2] | q[:, 1::2] << 4, **super().store()}  # two to a byte

    def restore(self, stored: dict[str, Tensor]) -> None:
        super().restore(stored)
        q = stored["q"]
        self._pack(torch.stack([q & 15, q >> 4], dim=-1).flatten(1))

    def parts(self) -> QuantizedTensor:
        q = self.packed
        if self.has_kernel:  # what the kernel makes of the unit vectors are its weights
            unit = torch.ones_like(self.scale)
            rows = self._kernel(torch.eye(self.in_features), unit, torch.zeros_like(unit))
            q = (rows + 8).to(torch.uint8).t().contiguous()
        scale, zero_point = self.scale[..., None].float(), self.zero_point[..., None].float()
        return QuantizedTensor(q, scale, zero_point, 4, self.group_size)

    def _kernel(self, x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """x · (scale · (q − 8) + zero)ᵀ, as the kernel has it."""
        pairs = torch.stack([scale, zero], dim=-1).transpose(0, 1).contiguous()
        return torch._weight_int4pack_mm_for_cpu(x.to(torch.bfloat16), self.packed, self.group_size, pairs).float()

    def product(self, x: Tensor) -> Tensor:
        """(M, K) → (M, N)."""
        if not self.has_kernel:
            return _dequantized_product(x, self.parts())
        return self._kernel(x, self.scale, (8 - self.zero_point.to(torch.bfloat16)) * self.scale)


def int4_obstacle(layer: nn.Linear, group_size: int = GROUP_SIZE) -> str:
    """Why the int4 kernel does not take a layer; "" where it does.

    >>> int4_obstacle(nn.Linear(64, 40))
    '40 outputs, which 16 does not divide'
    """
    if layer.in_features % group_size:
        return f"{layer.in_features} inputs, which groups of {group_size} do not divide"
    if layer.out_features % 16:
        return f"{layer.out_features} outputs, which 16 does not divide"
    return ""


def _dequantized_product(x: Tensor, parts: QuantizedTensor) -> Tensor:
    """(M, K) → (M, N) in float32, a block of rows of the weight at a time."""
    blocks = zip(*(part.split(_ROWS_AT_ONCE) for part in (parts.q, parts.scale, parts.zero_point)), strict=True)
    weights = (
        QuantizedTensor(q, scale, zero, parts.bits, parts.group_size).dequantize() for q, scale, zero in blocks
    )
    return torch.cat([x @ weight.t() for weight in weights], dim=1)


def _onednn_product(q: Tensor, packed: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """(M, K) whole numbers from −127 to 127 times packed (N, K) int8, times scale (N,): (M, N) float32.

    Only unsigned numbers have a fast product for any M, so q goes in as q + 128 with the zero point 128; `zero` (N,)
    int32 are those of the weights.
    """
    return torch.ops.onednn.qlinear_pointwise(
        q.add_(128).to(torch.uint8), 1.0, 128, packed, scale, zero, None, 1.0, 0, torch.float32, "none", [], ""
    )


@functools.cache
def has_kernel(scheme: str) -> bool:
    """Whether this build of torch multiplies a small layer of a scheme here, tried once."""
    x, q = torch.ones(1, 32), torch.ones(16, 32, dtype=torch.int8)
    scale = torch.ones(16)
    try:
        if scheme == "int8-weight":
            torch._weight_int8pack_mm(x.to(torch.bfloat16), q, scale.to(torch.bfloat16))
        elif scheme == "int8-dynamic":
            _onednn_product(x, torch.ops.onednn.qlinear_prepack(q, None), scale, torch.zeros(16, dtype=torch.int32))
        else:
            packed = torch._convert_weight_to_int4pack_for_cpu(q.int(), 1)
            torch._weight_int4pack_mm_for_cpu(x.to(torch.bfloat16), packed, 32, torch.ones(1, 16, 2).to(torch.bfloat16))
    except (RuntimeError, AttributeError):  # NotImplementedError is a RuntimeError
        return False
    return True


def _kernel_or_word(scheme: str) -> bool:
    """`has_kernel`, with a warning where there is none."""
    if not has_kernel(scheme):
        warnings.warn(
            f"this processor or build of torch has no kernel for {scheme!r}: its weights are dequantized for every "
            "product, which gives the same numbers, slowly",
            RuntimeWarning,
            stacklevel=3,
        )
        return False
    return True
