"""Exercises of notebook 09, third part: LoRA merged, its share of a model, and a learning rate for each method."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from grpo_edu.checks.core import Call, Exercise, Mistake, Part, call
from grpo_edu.checks.objective import numbers

# ---- merged_weight ----


def merged_weight(weight: Tensor, A: Tensor, B: Tensor, alpha: float) -> Tensor:
    """(out, in), W + α/r · B A."""
    return weight + alpha / len(A) * B @ A


def _adapter(*, square: bool) -> Callable[[random.Random], Call]:
    def draw(rng: random.Random) -> Call:
        rank, inputs = rng.choice([2, 3]), 4
        outputs = inputs if square else 5
        alpha = rng.choice([1.0, 8.0, 16.0])
        return call(numbers(rng, outputs, inputs), numbers(rng, rank, inputs), numbers(rng, outputs, rank), alpha)

    return draw


def _merged_by_einsum(weight: Tensor, A: Tensor, B: Tensor, alpha: float) -> Tensor:
    return weight + (alpha / A.shape[0]) * torch.einsum("or,ri->oi", B, A)


def _merged_by_directions(weight: Tensor, A: Tensor, B: Tensor, alpha: float) -> Tensor:
    merged = weight.clone()
    for row, column in zip(A, B.T, strict=True):
        merged += torch.outer(column, row) * alpha / B.shape[1]
    return merged


def _merged_by_addmm(weight: Tensor, A: Tensor, B: Tensor, alpha: float) -> Tensor:
    return torch.addmm(weight, B, A, alpha=alpha / A.size(0))


def _merged_in_place(weight: Tensor, A: Tensor, B: Tensor, alpha: float) -> Tensor:
    weight += alpha / len(A) * B @ A
    return weight


check_merged_weight = Exercise(
    "merged_weight",
    merged_weight,
    parts=(
        Part("as many outputs as inputs", 1, _adapter(square=True)),
        Part("more outputs than inputs", 2, _adapter(square=False)),
    ),
    mistakes=(
        Mistake("α is not divided by r", "The scale is α/r, so that another rank needs no other α.",
                lambda weight, A, B, alpha: weight + alpha * B @ A),
        Mistake("α and r have changed places", "A larger α means a larger correction.",
                lambda weight, A, B, alpha: weight + len(A) / alpha * B @ A),
        Mistake("the scale is missing", "α/r belongs to the correction.", lambda weight, A, B, alpha: weight + B @ A),
        Mistake("it is divided by a size of the weight, not by r", "r is the number of A's *rows*.",
                lambda weight, A, B, alpha: weight + alpha / A.shape[1] * B @ A),
        Mistake("it is divided by the number of outputs", "r is the number of A's rows, and of B's *columns*.",
                lambda weight, A, B, alpha: weight + alpha / len(B) * B @ A),
        Mistake("the product is transposed", "(out, r) times (r, in): B comes first.",
                lambda weight, A, B, alpha: weight + alpha / len(A) * A.T @ B.T),
        Mistake("the frozen weight is left out", "The correction is added to what was there.",
                lambda weight, A, B, alpha: alpha / len(A) * B @ A),
        Mistake("the frozen weight is changed in place", "Make a new matrix: the base may serve as the reference.",
                _merged_in_place),
    ),
    right=(_merged_by_einsum, _merged_by_directions, _merged_by_addmm),
)  # fmt: skip


# ---- lora_parameters ----

ATTENTION, FEED_FORWARD = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")


def _matrices(hidden: int, mlp: int, queries: int, keys: int) -> dict[str, tuple[int, int]]:
    """Name of a layer's matrix → inputs and outputs; queries, keys: widths of all heads together."""
    return {
        "q_proj": (hidden, queries), "k_proj": (hidden, keys), "v_proj": (hidden, keys), "o_proj": (queries, hidden),
        "gate_proj": (hidden, mlp), "up_proj": (hidden, mlp), "down_proj": (mlp, hidden),
    }  # fmt: skip


def lora_parameters(shape: Mapping[str, int], rank: int, target_modules: Sequence[str]) -> int:
    """How many numbers LoRA trains: r (inputs + outputs) for each target of each layer."""
    return _counted(shape, rank, target_modules, lambda inputs, outputs: rank * (inputs + outputs))


def _counted(
    shape: Mapping[str, int], rank: int, target_modules: Sequence[str], count: Callable[[int, int], int], **changed: int
) -> int:
    shape = {**shape, **changed}
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    keys = hidden // heads * shape["num_key_value_heads"]
    matrices = _matrices(hidden, shape["intermediate_size"], hidden, keys)
    return shape["num_hidden_layers"] * sum(count(*matrices[name]) for name in target_modules)


def _qwen(targets: Callable[[random.Random], Sequence[str]]) -> Callable[[random.Random], Call]:
    def draw(rng: random.Random) -> Call:
        heads = rng.choice([6, 8, 14])
        shape = {
            "hidden_size": heads * rng.choice([16, 64]), "intermediate_size": rng.choice([384, 1000, 4864]),
            "num_hidden_layers": rng.choice([4, 6, 24]), "num_attention_heads": heads, "num_key_value_heads": 2,
        }  # fmt: skip
        return call(shape, rng.choice([4, 8, 16]), list(targets(rng)))

    return draw


def _few(rng: random.Random) -> Sequence[str]:
    return rng.sample(FEED_FORWARD, 2) + ["v_proj"]


def _parameters_by_loop(shape: Mapping[str, int], rank: int, target_modules: Sequence[str]) -> int:
    head = shape["hidden_size"] // shape["num_attention_heads"]
    total = 0
    for name in target_modules:
        wide = shape["intermediate_size"] if name in ("gate_proj", "up_proj", "down_proj") else shape["hidden_size"]
        if name in ("k_proj", "v_proj"):
            wide = head * shape["num_key_value_heads"]
        total += rank * shape["hidden_size"] + rank * wide
    return total * shape["num_hidden_layers"]


def _parameters_by_tensors(shape: Mapping[str, int], rank: int, target_modules: Sequence[str]) -> int:
    hidden, mlp = shape["hidden_size"], shape["intermediate_size"]
    keys = shape["num_key_value_heads"] * hidden // shape["num_attention_heads"]
    total = 0
    for _ in range(shape["num_hidden_layers"]):
        for name in target_modules:
            inputs, outputs = _matrices(hidden, mlp, hidden, keys)[name]
            A, B = torch.empty(rank, inputs, device="meta"), torch.empty(outputs, rank, device="meta")
            total += A.numel() + B.numel()
    return total


def _parameters_by_widths(shape: Mapping[str, int], rank: int, target_modules: Sequence[str]) -> int:
    heads = shape["num_attention_heads"]
    other = {"q": 1.0, "o": 1.0, "k": shape["num_key_value_heads"] / heads, "v": shape["num_key_value_heads"] / heads}
    other |= dict.fromkeys(("gate", "up", "down"), shape["intermediate_size"] / shape["hidden_size"])
    widths = sum(1 + other[name.removesuffix("_proj")] for name in target_modules)
    return round(shape["num_hidden_layers"] * rank * shape["hidden_size"] * widths)


def _keys_as_wide(shape: Mapping[str, int], rank: int, target_modules: Sequence[str]) -> int:
    return lora_parameters({**shape, "num_key_value_heads": shape["num_attention_heads"]}, rank, target_modules)


def _head_count_for_width(shape: Mapping[str, int], rank: int, target_modules: Sequence[str]) -> int:
    return lora_parameters({**shape, "num_attention_heads": shape["hidden_size"]}, rank, target_modules)


def _divided_by_key_heads(shape: Mapping[str, int], rank: int, target_modules: Sequence[str]) -> int:
    heads = shape["num_key_value_heads"] ** 2  # K = H / heads · key heads = H / key heads
    return lora_parameters({**shape, "num_attention_heads": heads}, rank, target_modules)


check_lora_parameters = Exercise(
    "lora_parameters",
    lora_parameters,
    parts=(
        Part("the four matrices of attention", 2, _qwen(lambda rng: ATTENTION)),
        Part("all seven matrices", 1, _qwen(lambda rng: rng.sample(ATTENTION + FEED_FORWARD, 7))),
        Part("three of them", 1, _qwen(_few)),
    ),
    mistakes=(
        Mistake("keys and values are taken for as wide as queries", "Several query heads share a key head: their width "
                "is num_key_value_heads times that of a head.", _keys_as_wide),
        Mistake("only one key head is counted", "num_key_value_heads of them.",
                lambda shape, rank, targets: lora_parameters({**shape, "num_key_value_heads": 1}, rank, targets)),
        Mistake("the number of key heads is taken for their width", "Each head is H / num_attention_heads wide.",
                _head_count_for_width),
        Mistake("H is divided by the number of key heads", "Each head is H / num_attention_heads wide; there are "
                "num_key_value_heads of them.", _divided_by_key_heads),
        Mistake("whole matrices are counted", "The frozen weights do not learn: A and B have r (in + out) numbers.",
                lambda shape, rank, targets: _counted(shape, rank, targets, lambda inputs, outputs: inputs * outputs)),
        Mistake("A alone is counted", "B has r numbers for each output.",
                lambda shape, rank, targets: _counted(shape, rank, targets, lambda inputs, outputs: rank * inputs)),
        Mistake("inputs are multiplied with outputs", "A has r · in numbers and B has r · out: add them up.",
                lambda shape, rank, targets: _counted(
                    shape, rank, targets, lambda inputs, outputs: rank * inputs * outputs)),
        Mistake("the frozen weights count as well", "Only A and B learn.",
                lambda shape, rank, targets: _counted(
                    shape, rank, targets, lambda inputs, outputs: rank * (inputs + outputs) + inputs * outputs)),
        Mistake("only one layer is counted", "Every layer has its own adapters.",
                lambda shape, rank, targets: lora_parameters({**shape, "num_hidden_layers": 1}, rank, targets)),
        Mistake("target_modules play no part", "Only the matrices that it names get adapters.",
                lambda shape, rank, targets: lora_parameters(shape, rank, ATTENTION + FEED_FORWARD)),
    ),
    right=(_parameters_by_loop, _parameters_by_tensors, _parameters_by_widths),
)  # fmt: skip


# ---- best_rates ----

Tuning = Mapping[str, Mapping[float, int]]


def best_rates(tuning: Tuning) -> dict[str, float]:
    """Method → the learning rate at which it solved most, the smaller one where several did."""
    return {method: min(found, key=lambda rate: (-found[rate], rate)) for method, found in tuning.items()}


def _tuned(*, tied: bool) -> Callable[[random.Random], Call]:
    rates = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)

    def draw(rng: random.Random) -> Call:
        tuning = {}
        for method, best in (("GRPO", rng.choice([0, 1])), ("GRPO, LoRA", rng.choice([2, 3]))):
            solved = [200 - 20 * abs(place - best) - rng.randrange(10) for place in range(len(rates))]
            if tied:
                solved[best + 1] = solved[best]
            found = dict(zip(rates, solved, strict=True))
            if tied and method == "GRPO":  # the larger of two equal rates comes first in one table, not in the other
                found = dict(reversed(found.items()))
            tuning[method] = found
        return call(tuning)

    return draw


def _rates_by_sorting(tuning: Tuning) -> dict[str, float]:
    return {method: sorted(sorted(found), key=found.__getitem__, reverse=True)[0] for method, found in tuning.items()}


def _rates_by_loop(tuning: Tuning) -> dict[str, float]:
    best: dict[str, float] = {}
    for method, found in tuning.items():
        for rate in sorted(found):
            if method not in best or found[rate] > found[best[method]]:
                best[method] = rate
    return best


def _rates_by_most(tuning: Tuning) -> dict[str, float]:
    return {
        method: min(rate for rate, solved in found.items() if solved == max(found.values()))
        for method, found in tuning.items()
    }


def _one_rate(tuning: Tuning) -> dict[str, float]:
    rates = sorted(next(iter(tuning.values())))
    rate = max(rates, key=lambda rate: sum(found[rate] for found in tuning.values()))
    return dict.fromkeys(tuning, rate)


def _first_methods_rate(tuning: Tuning) -> dict[str, float]:
    return dict.fromkeys(tuning, best_rates(tuning)[next(iter(tuning))])


check_best_rates = Exercise(
    "best_rates",
    best_rates,
    parts=(
        Part("each method has its own", 1, _tuned(tied=False)),
        Part("two rates are equally good", 1, _tuned(tied=True)),
    ),
    mistakes=(
        Mistake("one rate serves all methods", "A comparison at a common rate measures the rate. Each its own.",
                _one_rate),
        Mistake("the first method's rate serves all", "Each method has a best rate of its own.", _first_methods_rate),
        Mistake("the largest rate is taken", "The one at which most was solved.",
                lambda tuning: {method: max(found) for method, found in tuning.items()}),
        Mistake("these are counts, not rates", "Return the learning rate itself, the key.",
                lambda tuning: {method: max(found.values()) for method, found in tuning.items()}),
        Mistake("of equal ones, the first in the table is taken", "The smaller one; the table is in no order.",
                lambda tuning: {method: max(found, key=found.get) for method, found in tuning.items()}),
        Mistake("of equal ones, the larger is taken", "The smaller one.",
                lambda tuning: {method: max(found, key=lambda rate: (found[rate], rate)) for method, found in
                                tuning.items()}),
    ),
    right=(_rates_by_sorting, _rates_by_loop, _rates_by_most),
)  # fmt: skip
