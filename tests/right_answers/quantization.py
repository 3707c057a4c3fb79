"""Right answers to the exercises of `grpo_edu.checks.quantization`, written in other ways than the reference."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from grpo_edu.checks.quantization import Shapes, whole_numbers
from grpo_edu.quantization.numbers import quantize
from grpo_edu.quantization.rollouts import truncated_importance_weights


def grid_of_the_package(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    grid = quantize(x, bits=bits, symmetric=False)
    return grid.scale, grid.zero_point


def rows_of_the_package(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    parts = quantize(weight, bits=bits, dim=0)
    return parts.q, parts.scale


def grid_by_lists(x: Tensor, bits: int) -> tuple[float, int]:
    values = [0.0, *x.tolist()]
    scale = (max(values) - min(values)) / (2**bits - 1)
    return scale, round(-min(values) / scale)


def grid_by_numpy(x: Tensor, bits: int) -> tuple[float, int]:
    low, high = np.minimum(x.min().item(), 0.0), np.maximum(x.max().item(), 0.0)
    scale = np.ptp([low, high]) / (2**bits - 1)
    return float(scale), int(np.rint(-low / scale))


def back_by_int(q: Tensor, scale: Tensor | float, zero_point: Tensor | int) -> Tensor:
    return (q.int() - zero_point) * scale


def back_by_distribution(q: Tensor, scale: Tensor | float, zero_point: Tensor | int) -> Tensor:
    return scale * q - scale * zero_point


def back_by_numpy(q: Tensor, scale: Tensor | float, zero_point: Tensor | int) -> Tensor:
    steps = q.numpy().astype(np.int64) - np.asarray(zero_point).astype(np.int64)
    return torch.tensor(steps * np.asarray(scale), dtype=torch.float32)


def rows_by_loop(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    codes, scales = [], []
    for row in weight.tolist():
        scale = max(abs(value) for value in row) / (2 ** (bits - 1) - 1) or 1.0
        codes.append([round(value / scale) for value in row])
        scales.append([scale])
    return torch.tensor(codes, dtype=torch.int8), torch.tensor(scales)


def rows_by_numpy(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    table = weight.numpy()
    scale = np.linalg.norm(table, ord=np.inf, axis=1, keepdims=True) / (2 ** (bits - 1) - 1)
    scale[scale == 0] = 1
    return torch.from_numpy(np.rint(table / scale).astype(np.int64)), torch.from_numpy(scale)


def linear_by_int(x: Tensor, weight: Tensor, group_size: int) -> Tensor:
    parts = []
    for start in range(0, x.shape[1], group_size):
        (qx, t), (qw, s) = (whole_numbers(one[:, start : start + group_size]) for one in (x, weight))
        parts.append((qx.int() @ qw.int().T) * (t @ s.T))
    return torch.stack(parts).sum(dim=0)


def linear_by_einsum(x: Tensor, weight: Tensor, group_size: int) -> Tensor:
    parts = [one.reshape(len(one), -1, group_size) for one in (x, weight)]
    t, s = (part.abs().amax(dim=2) / 127 for part in parts)
    qx, qw = (parts[0] / t[..., None]).round(), (parts[1] / s[..., None]).round()
    return torch.einsum("bgk,ngk,bg,ng->bn", qx, qw, t, s)


def linear_by_numpy(x: Tensor, weight: Tensor, group_size: int) -> Tensor:
    total = np.zeros((len(x), len(weight)))
    for columns in np.split(np.arange(x.shape[1]), x.shape[1] // group_size):
        codes, scales = [], []
        for part in (x.numpy()[:, columns], weight.numpy()[:, columns]):
            scales.append(np.abs(part).max(axis=1) / 127)
            codes.append(np.rint(part / scales[-1][:, None]).astype(np.int32))
        total += np.multiply.outer(*scales) * np.einsum("bk,nk->bn", *codes)
    return torch.tensor(total).float()


def bytes_by_tables(vocab_size: int, hidden_size: int, layers: Shapes, form: str) -> int:
    def small(shapes: Shapes) -> int:
        return sum(rows * (columns + 4) for rows, columns in shapes)

    table = (vocab_size, hidden_size)
    if form == "float32":
        return sum(4 * rows * columns for rows, columns in [table, *layers])
    if form == "kept":
        return 4 * math.prod(table) + small([table, *layers])
    return small([*layers, table] + [table] * (form == "both"))


def bytes_by_tensors(vocab_size: int, hidden_size: int, layers: Shapes, form: str) -> int:
    def held(shape: tuple[int, int], dtype: torch.dtype) -> int:
        scales = 0 if dtype == torch.float32 else shape[0] * torch.float32.itemsize
        return torch.empty(shape, dtype=dtype, device="meta").nbytes + scales

    inner = torch.float32 if form == "float32" else torch.int8
    tables = {"float32": [inner], "kept": [torch.float32, inner], "both": [inner] * 2, "shared": [inner]}[form]
    table = vocab_size, hidden_size
    return sum(held(table, dtype) for dtype in tables) + sum(held(shape, inner) for shape in layers)


def bytes_by_counts(vocab_size: int, hidden_size: int, layers: Shapes, form: str) -> float:
    full, eights = {"float32": (1, 0), "kept": (1, 1), "both": (0, 2), "shared": (0, 1)}[form]
    table = vocab_size * hidden_size
    total = 4.0 * full * table + eights * (table + 4 * vocab_size)
    for rows, columns in layers:
        total += rows * columns * 4 if form == "float32" else rows * columns + 4 * rows
    return total


def bits_by_logarithm(largest: float, tolerated: float) -> int:
    return max(2, 1 + math.ceil(math.log2(largest / (2 * tolerated) + 1)))


def bits_by_range(largest: float, tolerated: float) -> int:
    return min(bits for bits in range(2, 33) if largest <= 2 * tolerated * (2 ** (bits - 1) - 1))


def bits_by_length(largest: float, tolerated: float) -> int:
    return max(2, math.ceil(largest / (2 * tolerated)).bit_length() + 1)


def verdict_by_table(low: float, high: float, margin: float) -> str:
    places = tuple((end > margin) - (end < -margin) for end in (low, high))
    return {(0, 0): "equal", (1, 1): "better", (-1, -1): "worse"}.get((places[0], places[1]), "unclear")


def verdict_by_middle(low: float, high: float, margin: float) -> str:
    middle, reach = (low + high) / 2, (high - low) / 2
    if abs(middle) + reach <= margin + 1e-12:
        return "equal"
    if abs(middle) - reach > margin + 1e-12:
        return "better" if middle > 0 else "worse"
    return "unclear"


def verdict_by_nesting(low: float, high: float, margin: float) -> str:
    answer = "unclear"
    if low > margin:
        answer = "better"
    elif high < -margin:
        answer = "worse"
    elif max(abs(low), abs(high)) <= margin:
        answer = "equal"
    return answer


def weights_of_the_package(logps: Tensor, sampling_logps: Tensor, mask: Tensor, cap: float) -> Tensor:
    ours, theirs = (torch.where(mask == 1, one, 0.0).sum(dim=1) for one in (logps, sampling_logps))
    return truncated_importance_weights(ours, theirs, cap)


def weights_by_product(logps: Tensor, sampling_logps: Tensor, mask: Tensor, cap: float) -> Tensor:
    ratios = torch.where(mask.bool(), logps.exp() / sampling_logps.exp(), 1.0)
    return torch.minimum(ratios.prod(dim=1), torch.tensor(cap))


def weights_by_log(logps: Tensor, sampling_logps: Tensor, mask: Tensor, cap: float) -> Tensor:
    logs = (logps - sampling_logps).where(mask == 1, torch.nan)
    return logs.nansum(dim=1).clamp(max=math.log(cap)).exp()


RIGHT_ANSWERS = {
    "affine_grid": (grid_of_the_package, grid_by_lists, grid_by_numpy),
    "dequantize": (back_by_int, back_by_distribution, back_by_numpy),
    "quantize_rows": (rows_of_the_package, rows_by_loop, rows_by_numpy),
    "int8_linear": (linear_by_int, linear_by_einsum, linear_by_numpy),
    "quantized_bytes": (bytes_by_tables, bytes_by_tensors, bytes_by_counts),
    "bits_needed": (bits_by_logarithm, bits_by_range, bits_by_length),
    "equality_verdict": (verdict_by_table, verdict_by_middle, verdict_by_nesting),
    "truncated_weights": (weights_of_the_package, weights_by_product, weights_by_log),
}
