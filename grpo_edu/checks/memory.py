"""Exercises of notebook 09, first part: the peak of a step, and what an optimizer keeps."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import torch

from grpo_edu.checks.core import Call, Exercise, Mistake, Part, call

# ---- step_peak ----


def step_peak(
    weights: int, trained: int, layers: int, tokens: int, kept: int, entering: int, logits: int, cache: int,
    recompute: bool,
) -> int:  # fmt: skip
    """Bytes of a GRPO step at its worst moment, in fp32 with AdamW: what is held, and the larger of two stages."""
    activations = tokens * (layers * entering + kept if recompute else layers * kept)
    return 4 * weights + 12 * trained + max(cache, activations + logits)


def _step(*, frozen: bool, recompute: bool) -> Callable[[random.Random], Call]:
    def draw(rng: random.Random) -> Call:
        weights, layers, width = rng.randrange(1, 9) * 100_000, rng.choice([4, 6, 12]), rng.choice([64, 128])
        trained = rng.randrange(1, 9) * 5_000 if frozen else weights
        tokens, kept, entering = rng.choice([256, 512]), 40 * width, 4 * width
        logits = 4 * tokens * rng.choice([1024, 2048])
        activations = tokens * (layers * entering + kept if recompute else layers * kept)
        cache = int((activations + logits) * rng.choice([0.3, 0.6, 1.2, 1.5]))
        return call(weights, trained, layers, tokens, kept, entering, logits, cache, recompute)

    return draw


def _peak_by_stages(weights, trained, layers, tokens, kept, entering, logits, cache, recompute):
    held = 4 * weights + 4 * trained + 2 * 4 * trained
    learning = logits + tokens * kept * (1 if recompute else layers)
    if recompute:
        learning += layers * tokens * entering
    return max(held + cache, held + learning)


def _peak_by_dict(weights, trained, layers, tokens, kept, entering, logits, cache, recompute):
    held = {"weights": 4 * weights, "gradients": 4 * trained, "moments": 8 * trained}
    a_token = layers * entering + kept if recompute else layers * kept
    stages = {"rollout": cache, "learning": tokens * a_token + logits}
    return sum(held.values()) + max(stages.values())


def _peak_by_layers(weights, trained, layers, tokens, kept, entering, logits, cache, recompute):
    frozen = weights - trained
    each = [entering if recompute else kept] * layers + [kept] * recompute
    return 16 * trained + 4 * frozen + sorted([cache, sum(tokens * size for size in each) + logits])[-1]


def _peak_with(make: Callable[..., float]) -> Callable[..., float]:
    """A wrong answer of the same parts: make(held, activations, logits, cache, the arguments by name)."""

    def wrong(weights, trained, layers, tokens, kept, entering, logits, cache, recompute):
        activations = tokens * (layers * entering + kept if recompute else layers * kept)
        given = {"weights": weights, "trained": trained, "layers": layers, "tokens": tokens, "kept": kept,
                 "entering": entering, "recompute": recompute}  # fmt: skip
        return make(4 * weights + 12 * trained, activations, logits, cache, given)

    return wrong


def _without_recomputing(held: int, activations: int, logits: int, cache: int, given: dict) -> int:
    return held + max(cache, given["tokens"] * given["layers"] * given["kept"] + logits)


def _without_one_layer(held: int, activations: int, logits: int, cache: int, given: dict) -> int:
    return held + max(cache, activations + logits - given["recompute"] * given["tokens"] * given["kept"])


check_step_peak = Exercise(
    "step_peak",
    step_peak,
    parts=(
        Part("all weights learn", 2, _step(frozen=False, recompute=False), draws=8),
        Part("adapters learn, the weights are frozen", 1, _step(frozen=True, recompute=False), draws=8),
        Part("layers computed twice", 1, _step(frozen=False, recompute=True), draws=8),
    ),
    mistakes=(
        Mistake("the stages are added up", "The cache is gone when learning begins: take the larger of the two.",
                _peak_with(lambda held, activations, logits, cache, given: held + activations + logits + cache)),
        Mistake("the rollout is forgotten", "A large cache may be the worst moment.",
                _peak_with(lambda held, activations, logits, cache, given: held + activations + logits)),
        Mistake("activations and logits are taken for two moments", "While the model learns, both are there at once.",
                _peak_with(lambda held, activations, logits, cache, given: held + max(activations, logits, cache))),
        Mistake("frozen weights have gradients and moments", "12 bytes for each weight that *learns*.",
                _peak_with(lambda held, activations, logits, cache, given: 16 * given["weights"] + max(
                    cache, activations + logits))),
        Mistake("one tensor is missing of gradient and two moments", "Three beside the weight, 4 bytes a number each.",
                _peak_with(lambda held, activations, logits, cache, given: held - 4 * given["trained"] + max(
                    cache, activations + logits))),
        Mistake("computing layers twice changes nothing", "Each layer keeps what enters it, and only one all the rest.",
                _peak_with(_without_recomputing)),
        Mistake("each layer keeps both, what enters and all the rest", "Computed twice, a layer keeps what enters it; "
                "one at a time has all the rest.",
                _peak_with(lambda held, activations, logits, cache, given: held + max(
                    cache, logits + given["tokens"] * given["layers"] * (
                        given["kept"] + given["recompute"] * given["entering"])))),
        Mistake("what is held is taken for a stage", "It is there all the time: add the larger stage to it.",
                _peak_with(lambda held, activations, logits, cache, given: max(held, cache, activations + logits))),
        Mistake("frozen weights have gradients", "Only weights that learn have a gradient.",
                _peak_with(lambda held, activations, logits, cache, given: held + 4 * (
                    given["weights"] - given["trained"]) + max(cache, activations + logits))),
        Mistake("the layer that is computed again is forgotten", "While one is computed again, all of it is there.",
                _peak_with(_without_one_layer)),
    ),
    right=(_peak_by_stages, _peak_by_dict, _peak_by_layers),
)  # fmt: skip


# ---- optimizer_numbers ----

Shapes = Sequence[tuple[int, ...]]


def optimizer_numbers(shapes: Shapes, optim: str) -> int:
    """How many numbers an optimizer keeps: two a weight for AdamW; for Adafactor the margins of each matrix."""
    if optim == "adamw":
        return sum(2 * math.prod(shape) for shape in shapes)
    return sum(sum(shape) for shape in shapes)  # a vector (n,) has n


def _weights(optim: str, *, vectors: bool) -> Callable[[random.Random], Call]:
    def draw(rng: random.Random) -> Call:
        shapes: list[tuple[int, ...]] = [(rng.randrange(3, 200), rng.randrange(3, 200)) for _ in range(3)]
        shapes += [(rng.randrange(3, 200),) for _ in range(2)] * vectors
        rng.shuffle(shapes)
        return call(shapes, optim)

    return draw


def _numbers_by_loop(shapes: Shapes, optim: str) -> int:
    total = 0
    for shape in shapes:
        full = shape[0] * shape[1] if len(shape) == 2 else shape[0]
        margins = shape[0] + shape[1] if len(shape) == 2 else full
        total += 2 * full if optim == "adamw" else margins
    return total


def _numbers_by_tensors(shapes: Shapes, optim: str) -> int:
    weights = [torch.empty(shape, device="meta") for shape in shapes]
    if optim == "adamw":
        return sum(weight.numel() for weight in weights for _ in ("first moment", "second moment"))
    return sum(weight.sum(0).numel() + weight.sum(1).numel() if weight.ndim > 1 else len(weight) for weight in weights)


def _numbers_by_kind(shapes: Shapes, optim: str) -> int:
    matrices, vectors = ([shape for shape in shapes if len(shape) == size] for size in (2, 1))
    if optim == "adafactor":
        return sum(rows + columns for rows, columns in matrices) + sum(count for (count,) in vectors)
    return 2 * (sum(rows * columns for rows, columns in matrices) + sum(count for (count,) in vectors))


check_optimizer_numbers = Exercise(
    "optimizer_numbers",
    optimizer_numbers,
    parts=(
        Part("AdamW", 1, _weights("adamw", vectors=True)),
        Part("Adafactor, matrices", 1, _weights("adafactor", vectors=False)),
        Part("Adafactor, matrices and vectors", 1, _weights("adafactor", vectors=True)),
    ),
    mistakes=(
        Mistake("Adafactor is counted as AdamW", "Of a matrix it keeps a number for each row and each column.",
                lambda shapes, optim: optimizer_numbers(shapes, "adamw")),
        Mistake("Adafactor keeps a whole table", "Not the table, its margins: rows + columns.",
                lambda shapes, optim: optimizer_numbers(shapes, "adamw") // (1 if optim == "adamw" else 2)),
        Mistake("these are bytes", "A count of numbers is asked for, not of bytes.",
                lambda shapes, optim: 4 * optimizer_numbers(shapes, optim)),
        Mistake("one moment of AdamW is missing", "The mean of the gradient, and the mean of its square.",
                lambda shapes, optim: optimizer_numbers(shapes, optim) // (2 if optim == "adamw" else 1)),
        Mistake("only rows are counted", "And a number for each column.",
                lambda shapes, optim: optimizer_numbers(shapes, optim) if optim == "adamw" else sum(
                    shape[0] for shape in shapes)),
        Mistake("a vector is left out", "A vector has no margins to save by: a number for each entry.",
                lambda shapes, optim: optimizer_numbers(
                    [shape for shape in shapes if optim == "adamw" or len(shape) == 2], optim)),
        Mistake("a vector has two numbers an entry", "One number for each entry of it.",
                lambda shapes, optim: optimizer_numbers(shapes, optim) + sum(
                    shape[0] for shape in shapes if optim == "adafactor" and len(shape) == 1)),
        Mistake("a vector is counted as rows and one column", "A number for each entry of it, no more.",
                lambda shapes, optim: optimizer_numbers(shapes, optim) + sum(
                    optim == "adafactor" for shape in shapes if len(shape) == 1)),
    ),
    right=(_numbers_by_loop, _numbers_by_tensors, _numbers_by_kind),
)  # fmt: skip
