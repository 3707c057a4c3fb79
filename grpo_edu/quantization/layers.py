"""Linear layers and embeddings with integer weights, and the kernels that multiply them.

The kernels are PyTorch's own and take plain tensors: oneDNN's int8 product, and products with int8 and int4 weights.
PyTorch gives them private names, so each name occurs in exactly one function, at the end of this module. Their speed is
compared with `torch.ao`, torchao, `torch.compile`, ONNX Runtime and OpenVINO in `benchmarks/quantization_kernels.py`.

A kernel may be missing on a processor, and it may be wrong. Without the instructions for int8 that newer processors
have (VNNI, AMX), oneDNN adds two products of 8 bits in 16 bits, and where these overflow it keeps the largest number
that fits. `kernel_way` therefore multiplies numbers whose product is known, and decides by the result:

- "kernel": the result is right.
- "kernel, two halves": it is right for activations from −64 to 64. Each integer is written as the sum of two such
  halves, so that the result is the same, in about twice the time.
- "dequantized weights": there is no kernel that is right. This gives the same numbers too, but slowly.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from grpo_edu.quantization.numbers import QuantizedTensor, quantize

GROUP_SIZE = 32  # of int4
_ROWS_AT_ONCE = 1024  # of a weight that is dequantized
_BLOCK = 32  # the int8 kernel reads this many weights at a time, also beyond the end of a row, where it may crash
_FEW = 16  # rows of x up to which the product with int8 weights is faster than dequantizing them (AVX2 or newer)
KERNEL_SCHEMES = ("int8-dynamic", "int8-weight", "int4-group")
KERNEL, HALVES, DEQUANTIZED = "kernel", "kernel, two halves", "dequantized weights"


class QuantizedLayer(nn.Module):
    """The common part of the layers below: buffers but no parameters, and weights that can be read back as numbers.

    in_features, out_features: K and N. bias: (N,) float32 or None. way: how products are computed, see `kernel_way`.
    """

    bias: Tensor | None
    way: str

    def __init__(self, out_features: int, in_features: int, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = out_features, in_features
        self.register_buffer("bias", None if bias is None else bias.detach().float().clone())

    @property
    def weight(self) -> Tensor:
        """An (N, K) tensor that takes no memory, for code that asks a layer for its shape."""
        return torch.empty(self.out_features, self.in_features, dtype=torch.int8, device="meta")

    def extra_repr(self) -> str:
        """Return the sizes of the layer, and how it multiplies."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{sizes}, way={self.way!r}"

    def parts(self) -> QuantizedTensor:
        """Return the weights (N, K) as whole numbers with their scales."""
        raise NotImplementedError

    def product(self, x: Tensor) -> Tensor:
        """(M, K) float32 → (M, N) float32, without the bias."""
        raise NotImplementedError

    def store(self) -> dict[str, Tensor]:
        """Return the tensors that a file keeps of this layer, without those of its modules."""
        return {name: buffer for name, buffer in self.named_buffers(recurse=False) if buffer is not None}

    def forward(self, x: Tensor) -> Tensor:
        """(…, K) → (…, N), in the dtype of x."""
        y = self.product(x.reshape(-1, self.in_features).float())
        y = y if self.bias is None else y.add_(self.bias)
        return y.view(*x.shape[:-1], self.out_features).to(x.dtype)


class Int8Linear(QuantizedLayer):
    """int8 weights with per-channel scales; activations stay as they are. `rows` may be shared with an embedding."""

    def __init__(self, rows: Int8Embedding, bias: Tensor | None) -> None:
        super().__init__(len(rows.q), rows.q.shape[1], bias)
        self.rows = rows
        odd = self.in_features % _BLOCK
        obstacle = f"the int8 kernel needs a multiple of {_BLOCK} inputs, and a layer has {self.in_features}"
        self.way = _way_or_warning("int8-weight", obstacle if odd else "")

    @classmethod
    def of(cls, layer: nn.Linear) -> Int8Linear:
        return cls(Int8Embedding(layer.weight), layer.bias)

    @classmethod
    def with_4_bits_per_tensor(cls, layer: nn.Linear) -> Int8Linear:
        """Return the same layer with integers from −7 to 7 and one scale for all weights, a deliberately bad one."""
        return cls(Int8Embedding(layer.weight, bits=4, dim=None), layer.bias)

    def parts(self) -> QuantizedTensor:
        return self.rows.parts()

    def product(self, x: Tensor) -> Tensor:
        """(M, K) → (M, N), in bfloat16 for few rows, where reading the weights takes most of the time."""
        if self.way == KERNEL and len(x) <= _FEW:
            return _int8_weight_product(x, self.rows.q, self.rows.scale)
        return _dequantized_product(x, self.parts())


class Int8Embedding(nn.Module):
    """An embedding table (V, H) of int8 with one scale per row; looking up a token dequantizes its row."""

    q: Tensor
    scale: Tensor

    def __init__(self, weight: Tensor, *, bits: int = 8, dim: int | None = 0) -> None:
        super().__init__()
        parts = quantize(weight.detach(), bits=bits, dim=dim)
        self.register_buffer("q", parts.q)
        self.register_buffer("scale", parts.scale.flatten().expand(len(parts.q)).clone())  # of one scale: repeated

    @property
    def weight(self) -> Tensor:
        """The integers (V, H), still without their scale."""
        return self.q

    def parts(self) -> QuantizedTensor:
        """Return the table as whole numbers with their scales."""
        scale = self.scale[:, None]
        return QuantizedTensor(self.q, scale, torch.zeros_like(scale), 8)

    def forward(self, ids: Tensor) -> Tensor:
        """(…) long → (…, H) float32."""
        return self.q[ids].float() * self.scale[ids, None]


class DynamicInt8Linear(QuantizedLayer):
    """int8 weights and int8 activations, with one scale per row of x, computed when the layer is called.

    One scale for all of x would be simpler, but a completion would then depend on the others in its batch.
    """

    scale: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.out_features, layer.in_features, layer.bias)
        parts = quantize(layer.weight.detach(), dim=0)
        self.register_buffer("scale", parts.scale.flatten())
        self.way = _way_or_warning("int8-dynamic")
        self.packed = parts.q if self.way == DEQUANTIZED else _onednn_pack(parts.q)
        self.zero = torch.zeros(self.out_features, dtype=torch.int32)

    def store(self) -> dict[str, Tensor]:
        return {"q": self.parts().q, **super().store()}

    def parts(self) -> QuantizedTensor:
        q = self.packed if self.way == DEQUANTIZED else self.packed.to_dense().t().contiguous()
        scale = self.scale[:, None]
        return QuantizedTensor(q, scale, torch.zeros_like(scale), 8)

    def product(self, x: Tensor) -> Tensor:
        """(M, K) → (M, N)."""
        step = x.abs().amax(dim=1, keepdim=True).clamp_(min=torch.finfo(x.dtype).tiny).div_(127)
        q = x.div(step).round_()
        if self.way == DEQUANTIZED:
            return _dequantized_product(q, self.parts()).mul_(step)
        multiply = _onednn_product if self.way == KERNEL else _onednn_product_of_halves
        return multiply(q, self.packed, self.scale, self.zero).mul_(step)


class Int4Linear(QuantizedLayer):
    """4-bit weights with per-group scales and zero points, groups of neighbors in a row; computes in bfloat16."""

    scale: Tensor
    zero_point: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.out_features, layer.in_features, layer.bias)
        parts = quantize(layer.weight.detach(), bits=4, symmetric=False, group_size=GROUP_SIZE)
        self.register_buffer("scale", parts.scale.squeeze(-1).to(torch.bfloat16))  # (N, K/g)
        self.register_buffer("zero_point", parts.zero_point.squeeze(-1).to(torch.uint8))
        self.way = _way_or_warning("int4-group")
        self.packed = _int4_pack(parts.q) if self.way == KERNEL else parts.q

    def store(self) -> dict[str, Tensor]:
        q = self.parts().q
        return {"q": q[:, ::2] | q[:, 1::2] << 4, **super().store()}  # two to a byte

    def parts(self) -> QuantizedTensor:
        q = self.packed
        if self.way == KERNEL:  # the product with the unit matrix gives back the weights
            unit = torch.ones_like(self.scale)
            rows = _int4_product(torch.eye(self.in_features), q, GROUP_SIZE, unit, torch.zeros_like(unit))
            q = (rows + 8).to(torch.uint8).t().contiguous()
        scale, zero_point = self.scale[..., None].float(), self.zero_point[..., None].float()
        return QuantizedTensor(q, scale, zero_point, 4, GROUP_SIZE)

    def product(self, x: Tensor) -> Tensor:
        """(M, K) → (M, N)."""
        if self.way == DEQUANTIZED:
            return _dequantized_product(x, self.parts())
        zero = (8 - self.zero_point.to(torch.bfloat16)) * self.scale
        return _int4_product(x, self.packed, GROUP_SIZE, self.scale, zero)


def int4_obstacle(layer: nn.Linear) -> str:
    """Return why the int4 kernel cannot multiply by a layer; "" if it can.

    >>> int4_obstacle(nn.Linear(64, 40))
    '40 outputs, not a multiple of 16'
    """
    if layer.in_features % GROUP_SIZE:
        return f"{layer.in_features} inputs, not a multiple of the group size {GROUP_SIZE}"
    if layer.out_features % 16:
        return f"{layer.out_features} outputs, not a multiple of 16"
    return ""


def _dequantized_product(x: Tensor, parts: QuantizedTensor) -> Tensor:
    """(M, K) → (M, N) in float32; a block of rows of the weight is dequantized at a time."""
    blocks = zip(*(part.split(_ROWS_AT_ONCE) for part in (parts.q, parts.scale, parts.zero_point)), strict=True)
    weights = (QuantizedTensor(q, scale, zero, parts.bits, parts.group_size).dequantize() for q, scale, zero in blocks)
    return torch.cat([x @ weight.t() for weight in weights], dim=1)


def _int8_weight_product(x: Tensor, q: Tensor, scale: Tensor) -> Tensor:
    """x (M, K) times q (N, K) int8, times scale (N,), computed in bfloat16: (M, N) float32."""
    return torch._weight_int8pack_mm(x.to(torch.bfloat16), q, scale.to(torch.bfloat16)).float()


def _int4_pack(q: Tensor) -> Tensor:
    """Return numbers (N, K) from 0 to 15 as (N, K/2) uint8, in the order that the kernel wants."""
    return torch._convert_weight_to_int4pack_for_cpu(q.int(), 1)


def _int4_product(x: Tensor, packed: Tensor, group_size: int, scale: Tensor, zero: Tensor) -> Tensor:
    """x (M, K) times scale · (q − 8) + zero of packed q (N, K), scale and zero (N, K/g): (M, N) float32."""
    pairs = torch.stack([scale, zero], dim=-1).transpose(0, 1).contiguous()
    return torch._weight_int4pack_mm_for_cpu(x.to(torch.bfloat16), packed, group_size, pairs).float()


def _onednn_pack(q: Tensor) -> Tensor:
    """q (N, K) int8 in the opaque layout that oneDNN wants."""
    return torch.ops.onednn.qlinear_prepack(q, None)


def _onednn_product(q: Tensor, packed: Tensor, scale: Tensor, zero: Tensor, *, shift: int = 128) -> Tensor:
    """q (M, K), integers from −shift to 255 − shift, times packed (N, K) int8, times scale (N,): (M, N) float32.

    Only the product of unsigned integers is fast for every M, so q is passed as q + shift with that zero point. `zero`
    (N,) int32 has the zero points of the weights.
    """
    return torch.ops.onednn.qlinear_pointwise(
        q.add_(shift).to(torch.uint8), 1.0, shift, packed, scale, zero, None, 1.0, 0, torch.float32, "none", [], ""
    )


def _onednn_product_of_halves(q: Tensor, packed: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Return `_onednn_product` for q from −127 to 127, and with a kernel that adds pairs of products in 16 bits.

    Each half of q is from −64 to 64, or from 0 to 128 when it is shifted, and 2 · 128 · 127 = 32,512 fits into 16 bits.
    Both are multiplied in one call, because with few rows most of its time is for reading the weights.
    """
    upper = q.div(2).floor_()
    upper, lower = _onednn_product(torch.cat([upper, q.sub_(upper)]), packed, scale, zero, shift=64).chunk(2)
    return upper + lower


@functools.cache
def kernel_way(scheme: str) -> str:
    """Return how the products of a scheme are computed here: `KERNEL`, `HALVES` or `DEQUANTIZED`.

    It is tried once per process, with the integers that a layer multiplies, the largest ones among them.
    """
    if scheme == "int8-dynamic":
        for way, multiply in ((KERNEL, _onednn_product), (HALVES, _onednn_product_of_halves)):
            if _is_right(partial(_multiply_int8_dynamic, multiply), largest=127):
                return way
        return DEQUANTIZED
    right = _is_right(_multiply_int8, largest=127) if scheme == "int8-weight" else _is_right(_multiply_int4, largest=7)
    return KERNEL if right else DEQUANTIZED


def _is_right(multiply: Callable[[Tensor, Tensor], Tensor], largest: int) -> bool:
    """Return True if products of integers x up to ±127 and q up to ±largest are right, for one row and for several."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-127, 128, (40, 512), generator=generator).float()
    q = torch.randint(-largest, largest + 1, (256, 512), generator=generator)
    x[0], q[0] = 127, largest
    exact = x @ q.float().t()  # all sums are below 2²⁴, so they are exact in float32
    try:
        found = [multiply(x[:rows].clone(), q.to(torch.int8)) for rows in (1, len(x))]
    except (RuntimeError, AttributeError):  # NotImplementedError is a RuntimeError
        return False
    bound = exact.max() / 256  # bfloat16 rounds a result by up to this much; an overflow halves the largest one
    return all(bool((product - exact[: len(product)]).abs().max() <= bound) for product in found)


def _multiply_int8_dynamic(multiply: Callable[..., Tensor], x: Tensor, q: Tensor) -> Tensor:
    return multiply(x, _onednn_pack(q), torch.ones(len(q)), torch.zeros(len(q), dtype=torch.int32))


def _multiply_int8(x: Tensor, q: Tensor) -> Tensor:
    return _int8_weight_product(x, q, torch.ones(len(q)))


def _multiply_int4(x: Tensor, q: Tensor) -> Tensor:
    unit = torch.ones(len(q), q.shape[1] // GROUP_SIZE, dtype=torch.bfloat16)
    return _int4_product(x, _int4_pack(q + 8), GROUP_SIZE, unit, torch.zeros_like(unit))


def _way_or_warning(scheme: str, obstacle: str = "") -> str:
    """`kernel_way`, with a warning if there is no kernel, here or for a layer of this shape."""
    way = DEQUANTIZED if obstacle else kernel_way(scheme)
    if way == DEQUANTIZED:
        reason = obstacle or f"this processor or build of PyTorch has no kernel for {scheme!r} that is right"
        warnings.warn(
            f"{reason}; the weights are dequantized for every product, which gives the same numbers, but slowly",
            RuntimeWarning,
            stacklevel=3,
        )
    return way
