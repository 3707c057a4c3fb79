"""Right answers to the exercises of `grpo_edu.checks.memory_and_lora`, written in other ways than the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from grpo_edu.checks.inputs import MeanGradient, OutputLayer
from grpo_edu.checks.memory_and_lora import Shapes, Tuning, layer_matrices


def peak_by_stages(weights, trained, layers, tokens, kept, entering, logits, cache, recompute):
    held = 4 * weights + 4 * trained + 2 * 4 * trained
    learning = logits + tokens * kept * (1 if recompute else layers)
    if recompute:
        learning += layers * tokens * entering
    return max(held + cache, held + learning)


def peak_by_dict(weights, trained, layers, tokens, kept, entering, logits, cache, recompute):
    held = {"weights": 4 * weights, "gradients": 4 * trained, "moments": 8 * trained}
    a_token = layers * entering + kept if recompute else layers * kept
    stages = {"rollout": cache, "learning": tokens * a_token + logits}
    return sum(held.values()) + max(stages.values())


def peak_by_layers(weights, trained, layers, tokens, kept, entering, logits, cache, recompute):
    frozen = weights - trained
    each = [entering if recompute else kept] * layers + [kept] * recompute
    return 16 * trained + 4 * frozen + sorted([cache, sum(tokens * size for size in each) + logits])[-1]


def numbers_by_loop(shapes: Shapes, optim: str) -> int:
    total = 0
    for shape in shapes:
        full = shape[0] * shape[1] if len(shape) == 2 else shape[0]
        margins = shape[0] + shape[1] if len(shape) == 2 else full
        total += 2 * full if optim == "adamw" else margins
    return total


def numbers_by_tensors(shapes: Shapes, optim: str) -> int:
    weights = [torch.empty(shape, device="meta") for shape in shapes]
    if optim == "adamw":
        return sum(weight.numel() for weight in weights for _ in ("first moment", "second moment"))
    return sum(weight.sum(0).numel() + weight.sum(1).numel() if weight.ndim > 1 else len(weight) for weight in weights)


def numbers_by_kind(shapes: Shapes, optim: str) -> int:
    matrices, vectors = ([shape for shape in shapes if len(shape) == size] for size in (2, 1))
    if optim == "adafactor":
        return sum(rows + columns for rows, columns in matrices) + sum(count for (count,) in vectors)
    return 2 * (sum(rows * columns for rows, columns in matrices) + sum(count for (count,) in vectors))


def accumulated_by_sums(mean_gradient: MeanGradient, rows: Tensor, size: int) -> Tensor:
    total = torch.zeros(rows.shape[1] - 1)
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        total += mean_gradient(part) * len(part)
    return total / len(rows)


def accumulated_by_rows(mean_gradient: MeanGradient, rows: Tensor, size: int) -> Tensor:
    return torch.stack([mean_gradient(row[None]) for row in rows]).mean(dim=0)


def accumulated_by_running_mean(mean_gradient: MeanGradient, rows: Tensor, size: int) -> Tensor:
    mean, seen = torch.zeros(()), 0
    for part in rows.split(size):
        seen += len(part)
        mean = mean + (mean_gradient(part) - mean) * (len(part) / seen)
    return mean


def chunks_by_tokens(states: Tensor, chosen: Tensor, logits_of: OutputLayer, vocab_size: int, size: int) -> Tensor:
    """One token of the vocabulary at a time."""
    logits = [logits_of(states, token, token + 1)[:, 0] for token in range(vocab_size)]
    total = logits[0]
    for one in logits[1:]:
        total = torch.logaddexp(total, one)
    picked = torch.stack([logits[token][row] for row, token in enumerate(chosen.tolist())])
    return picked - total


def chunks_in_one_pass(states: Tensor, chosen: Tensor, logits_of: OutputLayer, vocab_size: int, size: int) -> Tensor:
    total, picked = torch.full((len(states),), -torch.inf), torch.zeros(len(states))
    for first in range(0, vocab_size, size):
        logits = logits_of(states, first, min(first + size, vocab_size))
        total = torch.logaddexp(total, logits.logsumexp(dim=1))
        inside = (chosen >= first) & (chosen < first + size)
        place = (chosen - first).clamp(0, logits.shape[1] - 1)
        picked = torch.where(inside, logits.gather(1, place[:, None])[:, 0], picked)
    return picked - total


def chunks_with_a_running_maximum(
    states: Tensor, chosen: Tensor, logits_of: OutputLayer, vocab_size: int, size: int
) -> Tensor:
    highest, mass, picked = torch.full((len(states),), -1e30), torch.zeros(len(states)), []
    for first in range(0, vocab_size, size):
        logits = logits_of(states, first, min(first + size, vocab_size))
        higher = torch.maximum(highest, logits.detach().amax(dim=1))
        mass = mass * (highest - higher).exp() + (logits - higher[:, None]).exp().sum(dim=1)
        highest = higher
        picked.append(logits)
    return torch.cat(picked, dim=1)[torch.arange(len(chosen)), chosen] - highest - mass.log()


def merged_by_einsum(weight: Tensor, A: Tensor, B: Tensor, alpha: float) -> Tensor:
    return weight + (alpha / A.shape[0]) * torch.einsum("or,ri->oi", B, A)


def merged_by_directions(weight: Tensor, A: Tensor, B: Tensor, alpha: float) -> Tensor:
    merged = weight.clone()
    for row, column in zip(A, B.T, strict=True):
        merged += torch.outer(column, row) * alpha / B.shape[1]
    return merged


def merged_by_addmm(weight: Tensor, A: Tensor, B: Tensor, alpha: float) -> Tensor:
    return torch.addmm(weight, B, A, alpha=alpha / A.size(0))


def parameters_by_loop(shape: Mapping[str, int], rank: int, target_modules: Sequence[str]) -> int:
    head = shape["hidden_size"] // shape["num_attention_heads"]
    total = 0
    for name in target_modules:
        wide = shape["intermediate_size"] if name in ("gate_proj", "up_proj", "down_proj") else shape["hidden_size"]
        if name in ("k_proj", "v_proj"):
            wide = head * shape["num_key_value_heads"]
        total += rank * shape["hidden_size"] + rank * wide
    return total * shape["num_hidden_layers"]


def parameters_by_tensors(shape: Mapping[str, int], rank: int, target_modules: Sequence[str]) -> int:
    hidden, mlp = shape["hidden_size"], shape["intermediate_size"]
    keys = shape["num_key_value_heads"] * hidden // shape["num_attention_heads"]
    total = 0
    for _ in range(shape["num_hidden_layers"]):
        for name in target_modules:
            inputs, outputs = layer_matrices(hidden, mlp, hidden, keys)[name]
            A, B = torch.empty(rank, inputs, device="meta"), torch.empty(outputs, rank, device="meta")
            total += A.numel() + B.numel()
    return total


def parameters_by_widths(shape: Mapping[str, int], rank: int, target_modules: Sequence[str]) -> int:
    heads = shape["num_attention_heads"]
    other = {"q": 1.0, "o": 1.0, "k": shape["num_key_value_heads"] / heads, "v": shape["num_key_value_heads"] / heads}
    other |= dict.fromkeys(("gate", "up", "down"), shape["intermediate_size"] / shape["hidden_size"])
    widths = sum(1 + other[name.removesuffix("_proj")] for name in target_modules)
    return round(shape["num_hidden_layers"] * rank * shape["hidden_size"] * widths)


def rates_by_sorting(tuning: Tuning) -> dict[str, float]:
    return {method: sorted(sorted(found), key=found.__getitem__, reverse=True)[0] for method, found in tuning.items()}


def rates_by_loop(tuning: Tuning) -> dict[str, float]:
    best: dict[str, float] = {}
    for method, found in tuning.items():
        for rate in sorted(found):
            if method not in best or found[rate] > found[best[method]]:
                best[method] = rate
    return best


def rates_by_most(tuning: Tuning) -> dict[str, float]:
    return {
        method: min(rate for rate, solved in found.items() if solved == max(found.values()))
        for method, found in tuning.items()
    }


RIGHT_ANSWERS = {
    "step_peak": (peak_by_stages, peak_by_dict, peak_by_layers),
    "optimizer_numbers": (numbers_by_loop, numbers_by_tensors, numbers_by_kind),
    "accumulated_gradient": (accumulated_by_sums, accumulated_by_rows, accumulated_by_running_mean),
    "logps_in_chunks": (chunks_by_tokens, chunks_in_one_pass, chunks_with_a_running_maximum),
    "merged_weight": (merged_by_einsum, merged_by_directions, merged_by_addmm),
    "lora_parameters": (parameters_by_loop, parameters_by_tensors, parameters_by_widths),
    "best_rates": (rates_by_sorting, rates_by_loop, rates_by_most),
}
