"""Exercises on memory: the peak of a step, optimizer states, micro-batches, chunked logits and LoRA."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from grpo_edu.checks.core import Call, Exercise, Part, call
from grpo_edu.checks.inputs import MeanGradient, OutputLayer, gradient_of, numbers


# ---- step_peak ----
def step_peak(
    weights: int,
    trained: int,
    layers: int,
    tokens: int,
    kept: int,
    entering: int,
    logits: int,
    cache: int,
    recompute: bool,
) -> int:
    """Return the bytes of a GRPO step at its worst moment, in fp32 with AdamW."""
    held = 4 * weights + 12 * trained
    a_token = layers * entering + kept if recompute else layers * kept
    activations = tokens * a_token
    return held + max(cache, activations + logits)


def _step(rng: random.Random, *, frozen: bool = False, recompute: bool = False) -> Call:
    weights, layers, width = rng.randrange(1, 9) * 100_000, rng.choice([4, 6, 12]), rng.choice([64, 128])
    trained = rng.randrange(1, 9) * 5_000 if frozen else weights
    tokens, kept, entering = rng.choice([256, 512]), 40 * width, 4 * width
    logits = 4 * tokens * rng.choice([1024, 2048])
    activations = tokens * (layers * entering + kept if recompute else layers * kept)
    cache = int((activations + logits) * rng.choice([0.3, 0.6, 1.2, 1.5]))
    return call(weights, trained, layers, tokens, kept, entering, logits, cache, recompute)


SMALL_CACHE = call(100_000, 100_000, 4, 256, 2560, 256, 1_048_576, 300_000, True)  # the worst moment is learning

check_step_peak = Exercise(
    step_peak,
    parts=(
        Part("all weights learn", 2, _step, draws=8),
        Part("adapters are trained, the weights are frozen", 1, lambda rng: _step(rng, frozen=True), draws=8),
        Part("layers are recomputed", 1, lambda rng: _step(rng, recompute=True), draws=8, always=(SMALL_CACHE,)),
    ),
    changes="""
        the stages are added up: max(cache, activations + logits) -> cache + activations + logits
            The cache is freed before the update begins: take the larger of the two.
        the rollout is left out: max(cache, activations + logits) -> activations + logits
            If the cache is large, the rollout is the worst moment.
        activations and logits are treated as two separate moments: activations + logits -> activations, logits
            During the update both are in memory at the same time.
        gradients and moments are counted for frozen weights: 4 * weights + 12 * trained -> 16 * weights
            Only a weight that is *trained* needs 12 bytes more.
        the gradient or one of the two moments is missing: 12 * trained -> 8 * trained
            Besides the weight there are three numbers of 4 bytes each.
        `recompute` makes no difference: if recompute -> if False
            With recomputation, each layer keeps its input, and only one layer at a time keeps everything else.
        each layer keeps both its input and everything else: layers * entering + kept -> layers * (entering + kept)
            A layer that is recomputed keeps its input; only one at a time keeps everything else.
        what is always in memory is treated as a stage: held + max(cache -> max(held, cache
            It is in memory during every stage, so add the larger stage to it.
        gradients are counted for frozen weights: 4 * weights + 12 * trained -> 8 * weights + 8 * trained
            Only trained weights have a gradient.
        the layer that is being recomputed is left out: layers * entering + kept -> layers * entering
            While a layer is recomputed, all of its activations are in memory.
    """,
)


# ---- optimizer_numbers ----
Shapes = Sequence[tuple[int, ...]]


def optimizer_numbers(shapes: Shapes, optim: str) -> int:
    """Return how many numbers an optimizer keeps: two a weight for AdamW; for Adafactor the margins of each matrix."""
    if optim == "adamw":
        return sum(2 * math.prod(shape) for shape in shapes)
    return sum(sum(shape) for shape in shapes)  # a vector (n,) has n margins


def _weights(rng: random.Random, optim: str, *, vectors: bool) -> Call:
    shapes: list[tuple[int, ...]] = [(rng.randrange(3, 200), rng.randrange(3, 200)) for _ in range(3)]
    shapes += [(rng.randrange(3, 200),) for _ in range(2)] * vectors
    rng.shuffle(shapes)
    return call(shapes, optim)


check_optimizer_numbers = Exercise(
    optimizer_numbers,
    parts=(
        Part("AdamW", 1, lambda rng: _weights(rng, "adamw", vectors=True)),
        Part("Adafactor, matrices", 1, lambda rng: _weights(rng, "adafactor", vectors=False)),
        Part("Adafactor, matrices and vectors", 1, lambda rng: _weights(rng, "adafactor", vectors=True)),
    ),
    changes="""
        Adafactor is counted as AdamW: optimizer_numbers(shapes, "adamw")
            For a matrix, Adafactor keeps one number per row and one per column.
        a whole matrix is counted for Adafactor: sum(sum(shape) for -> sum(math.prod(shape) for
            For a matrix, Adafactor keeps rows + columns numbers, not rows × columns.
        bytes are returned: 4 * optimizer_numbers(shapes, optim)
            Return a count of numbers, not of bytes.
        one moment of AdamW is missing: 2 * math.prod(shape) -> math.prod(shape)
            AdamW keeps the mean of the gradient and the mean of its square.
        only rows are counted: sum(sum(shape) for -> sum(shape[0] for
            There is one number per column as well.
        a vector is left out: sum(sum(shape) -> sum(sum(shape) if len(shape) == 2 else 0
            A vector cannot be factored: it keeps one number per entry.
        two numbers per entry are counted for a vector:
            sum(sum(shape) -> sum(sum(shape) if len(shape) == 2 else 2 * shape[0]
            A vector keeps one number per entry.
        a vector is treated as a matrix with one column:
            sum(sum(shape) -> sum(sum(shape) if len(shape) == 2 else shape[0] + 1
            A vector keeps one number per entry, and no more.
    """,
)


# ---- accumulated_gradient ----
def accumulated_gradient(mean_gradient: MeanGradient, rows: Tensor, size: int) -> Tensor:
    """Return the gradient of the whole batch's mean loss, from parts of `size` rows."""
    parts = rows.split(size)
    shares = [len(part) / len(rows) for part in parts]
    slopes = [share * mean_gradient(part) for share, part in zip(shares, parts, strict=True)]
    return torch.stack(slopes).sum(dim=0)


def _batch(rng: random.Random, *, uneven: bool) -> Call:
    size = rng.choice([3, 4])
    return _rows(rng, size, size * rng.choice([2, 3]) + (rng.randrange(1, size) if uneven else 0))


def _rows(rng: random.Random, size: int, count: int) -> Call:
    weights = tuple(round(rng.uniform(-1, 1), 2) for _ in range(2))
    return call(MeanGradient(weights, size), numbers(rng, count, 3), size)


SIZES = ((2, 5), (3, 7), (3, 8), (4, 7), (4, 9), (5, 3), (1, 3))  # rows at once, and all of them

check_accumulated_gradient = Exercise(
    accumulated_gradient,
    parts=(
        Part("parts of one size", 2, lambda rng: _batch(rng, uneven=False)),
        Part(
            "a smaller last part",
            2,
            lambda rng: _batch(rng, uneven=True),
            always=tuple(_rows(random.Random(count), size, count) for size, count in SIZES),
        ),
    ),
    changes="""
        the accumulation factor is missing: len(part) / len(rows) -> 1
            Each part is a mean of its own. Weight it by its share of the rows; otherwise the gradient is too large by a
            factor of the number of parts.
        all parts have the same weight: len(part) / len(rows) -> 1 / len(parts)
            A smaller part has a smaller share of the batch.
        the last part has the weight of a full one: len(part) / len(rows) -> len(parts[0]) / len(rows)
            Its share is its own number of rows divided by the number of all rows.
        the sum of the gradients is not divided: len(part) / len(rows) -> len(part)
            The loss is a *mean*, so divide by the number of all rows.
        only the last part counts: mean_gradient(rows.split(size)[-1])
            Add the parts up; an assignment discards the earlier ones.
        a smaller last part is dropped: rows.split(size) -> rows[: len(rows) // size * size].split(size)
            The last part may be smaller; its rows count as well.
        all rows go through at once: mean_gradient(rows)
            Only `size` rows fit into memory at once.
    """,
)


# ---- logps_in_chunks ----
def _spans(vocab_size: int, size: int) -> list[tuple[int, int]]:
    return [(first, min(first + size, vocab_size)) for first in range(0, vocab_size, size)]


def _chosen_logits(states: Tensor, chosen: Tensor, logits_of: OutputLayer) -> Tensor:
    rows = zip(states, chosen.tolist(), strict=True)
    return torch.cat([logits_of(state[None], token, token + 1)[0] for state, token in rows])


def logps_in_chunks(states: Tensor, chosen: Tensor, logits_of: OutputLayer, vocab_size: int, size: int) -> Tensor:
    """(T,), the log-probabilities of the chosen tokens, from the logits of `size` vocabulary entries at a time."""
    chunks = [logits_of(states, *span) for span in _spans(vocab_size, size)]
    total = torch.stack([chunk.logsumexp(dim=1) for chunk in chunks]).logsumexp(dim=0)
    return _chosen_logits(states, chosen, logits_of) - total


def _tokens(rng: random.Random, *, uneven: bool, scale: float = 1.0) -> Call:
    """Draw five states; the chosen tokens lie in all chunks of the vocabulary. scale: the scale of the logits."""
    size = rng.choice([2, 3])
    vocab_size = size * rng.choice([2, 3]) + uneven
    weight = tuple(tuple(row) for row in (scale * numbers(rng, vocab_size, 3)).tolist())
    tokens = [rng.randrange(*span) for span in _spans(vocab_size, size)]
    chosen = torch.tensor(rng.sample(tokens * 3, 5))
    return call(numbers(rng, 5, 3, low=0.5), chosen, OutputLayer(weight, size), vocab_size, size)


def _large_logits(rng: random.Random) -> Call:
    return _tokens(rng, uneven=True, scale=60.0)


check_logps_in_chunks = Exercise(
    logps_in_chunks,
    parts=(
        Part("chunks of one size", 1, lambda rng: _tokens(rng, uneven=False)),
        Part("a smaller last chunk, and logits of more than 100", 1, _large_logits),
        Part("the gradient", 2, lambda rng: _tokens(rng, uneven=True), ask=gradient_of),
    ),
    tolerance=1e-4,  # logits of some hundreds have five digits
    changes="""
        all logits are computed at once: _spans(vocab_size, size) -> [(0, vocab_size)]
            They do not fit into memory. Ask for `size` tokens of the vocabulary at a time.
        each chunk has its own softmax: .logsumexp(dim=0) -> [chosen // size, torch.arange(len(chosen))]
            The probabilities of the *whole* vocabulary add up to 1.
        logits are returned, not log-probabilities: _chosen_logits(states, chosen, logits_of)
            What has to be subtracted, so that the probabilities add up to 1?
        the logarithms of the chunks are added: logsumexp(dim=0) -> sum(dim=0)
            Add the sums of exponentials, not their logarithms.
        the exponentials overflow: - total -> - torch.cat(chunks, dim=1).exp().sum(dim=1).log()
            exp(100) is too large for float32. Which function adds numbers that are given by their *logarithms*?
        a smaller last chunk is dropped: for chunk in chunks -> for chunk in chunks if chunk.shape[1] == size
            The last chunk may be smaller, and its tokens count as well.
        only the last chunk is counted: - total -> - chunks[-1].logsumexp(dim=1)
            The sum has to grow from chunk to chunk.
        the largest logit is used instead of the sum: - total -> - torch.cat(chunks, dim=1).amax(dim=1)
            Subtracting the largest logit keeps the exponentials small, but their sum is still needed.
        probabilities are returned, not log-probabilities:
            logps_in_chunks(states, chosen, logits_of, vocab_size, size).exp()
            Return their logarithms.
        the result is a column: logps_in_chunks(states, chosen, logits_of, vocab_size, size)[:, None]
            Return the shape (T,).
    """,
)


# ---- merged_weight ----
def merged_weight(weight: Tensor, A: Tensor, B: Tensor, alpha: float) -> Tensor:
    """(out, in), W + α/r · B A."""
    return weight + alpha / len(A) * B @ A


def _adapter(rng: random.Random, outputs: int) -> Call:
    rank, inputs = rng.choice([2, 3]), 4
    alpha = rng.choice([1.0, 8.0, 16.0])
    return call(numbers(rng, outputs, inputs), numbers(rng, rank, inputs), numbers(rng, outputs, rank), alpha)


check_merged_weight = Exercise(
    merged_weight,
    parts=(
        Part("as many outputs as inputs", 1, lambda rng: _adapter(rng, 4)),
        Part("more outputs than inputs", 2, lambda rng: _adapter(rng, 5)),
    ),
    changes="""
        α is not divided by r: weight + alpha * B @ A
            The scale is α/r, so that α can stay the same when the rank changes.
        α and r are swapped: weight + len(A) / alpha * B @ A
            A larger α means a larger correction.
        the scale is missing: weight + B @ A
            The correction is multiplied by α/r.
        α is divided by the number of inputs, not by r: weight + alpha / A.shape[1] * B @ A
            r is the number of A's *rows*.
        α is divided by the number of outputs, not by r: weight + alpha / len(B) * B @ A
            r is the number of A's rows, and of B's *columns*.
        the product is transposed: weight + alpha / len(A) * A.T @ B.T
            A matrix of shape (out, r) times one of shape (r, in): B comes first.
        the two matrices are swapped in A @ B: weight + alpha / len(A) * (A @ B)
            The product needs the shape of the weight, (out, in). Which of the two has `out` rows?
            or: weight + A @ B * (alpha / len(A))
        the frozen weight is left out: alpha / len(A) * B @ A
            The correction is added to the frozen weight.
        the frozen weight is changed in place: weight.add_(alpha / len(A) * B @ A)
            Return a new matrix, because the base model may still serve as the reference.
    """,
)


# ---- lora_parameters ----
ATTENTION, FEED_FORWARD = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")


def layer_matrices(hidden: int, mlp: int, queries: int, keys: int) -> dict[str, tuple[int, int]]:
    """Name of a layer's matrix → inputs and outputs; queries, keys: widths of all heads together."""
    return {
        "q_proj": (hidden, queries),
        "k_proj": (hidden, keys),
        "v_proj": (hidden, keys),
        "o_proj": (queries, hidden),
        "gate_proj": (hidden, mlp),
        "up_proj": (hidden, mlp),
        "down_proj": (mlp, hidden),
    }


def lora_parameters(shape: Mapping[str, int], rank: int, target_modules: Sequence[str]) -> int:
    """Return how many numbers LoRA trains: r (inputs + outputs) for each target of each layer."""
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    keys = hidden // heads * shape["num_key_value_heads"]
    matrices = layer_matrices(hidden, shape["intermediate_size"], hidden, keys)
    sizes = [matrices[name] for name in target_modules]
    return shape["num_hidden_layers"] * sum(rank * (inputs + outputs) for inputs, outputs in sizes)


def _qwen(rng: random.Random) -> dict[str, int]:
    heads = rng.choice([6, 8, 14])
    return {
        "hidden_size": heads * rng.choice([16, 64]),
        "intermediate_size": rng.choice([384, 1000, 4864]),
        "num_hidden_layers": rng.choice([4, 6, 24]),
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
    }


def _all_seven(rng: random.Random) -> list[str]:
    return rng.sample(ATTENTION + FEED_FORWARD, 7)


def _few(rng: random.Random) -> list[str]:
    return rng.sample(FEED_FORWARD, 2) + ["v_proj"]


def _adapters(rng: random.Random, targets: Callable[[random.Random], list[str]]) -> Call:
    return call(_qwen(rng), rng.choice([4, 8, 16]), targets(rng))


check_lora_parameters = Exercise(
    lora_parameters,
    parts=(
        Part("the four matrices of attention", 2, lambda rng: _adapters(rng, lambda _: list(ATTENTION))),
        Part("all seven matrices", 1, lambda rng: _adapters(rng, _all_seven)),
        Part("three of them", 1, lambda rng: _adapters(rng, _few)),
    ),
    changes="""
        keys and values are assumed to be as wide as queries: hidden // heads * shape["num_key_value_heads"] -> hidden
            Several query heads share one key head. The width of the keys is num_key_value_heads times the width of a
            head.
        only one key head is counted: hidden // heads * shape["num_key_value_heads"] -> hidden // heads
            There are num_key_value_heads of them.
        the number of key heads is used as their width: hidden // heads * shape -> shape
            Each head is H / num_attention_heads wide.
        H is divided by the number of key heads: hidden // heads * shape -> hidden // shape
            Each head is H / num_attention_heads wide; there are num_key_value_heads of them.
        whole matrices are counted: rank * (inputs + outputs) -> inputs * outputs
            The frozen weights are not trained. A and B together have r (in + out) numbers.
        only A is counted: rank * (inputs + outputs) -> rank * inputs
            B has r numbers for each output.
        inputs are multiplied by outputs: rank * (inputs + outputs) -> rank * inputs * outputs
            A has r · in numbers and B has r · out: add them up.
        the frozen weights count as well: rank * (inputs + outputs) -> rank * (inputs + outputs) + inputs * outputs
            Only A and B are trained.
        only one layer is counted: shape["num_hidden_layers"] * sum -> sum
            Every layer has its own adapters.
        `target_modules` is not used: in target_modules -> in matrices
            Only the matrices that it names get adapters.
    """,
)


# ---- best_rates ----
Tuning = Mapping[str, Mapping[float, int]]


def best_rates(tuning: Tuning) -> dict[str, float]:
    """Method → the learning rate at which it solved most, the smaller one where several did."""
    return {method: min(found, key=lambda rate: (-found[rate], rate)) for method, found in tuning.items()}


def _tuned(rng: random.Random, *, tied: bool) -> Call:
    rates = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
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


def _one_rate(tuning: Tuning) -> dict[str, float]:
    rates = sorted(next(iter(tuning.values())))
    rate = max(rates, key=lambda rate: sum(found[rate] for found in tuning.values()))
    return dict.fromkeys(tuning, rate)


check_best_rates = Exercise(
    best_rates,
    parts=(
        Part("each method has its own", 1, lambda rng: _tuned(rng, tied=False)),
        Part("two rates are equally good", 1, lambda rng: _tuned(rng, tied=True)),
    ),
    changes="""
        all methods share one rate: _one_rate(tuning)
            At a common rate, you compare how well that rate suits each method. Give each method its own best rate.
        all methods get the first method's rate: dict.fromkeys(tuning, best_rates(tuning)[next(iter(tuning))])
            Each method has a best rate of its own.
        the largest rate is taken: min(found, key=lambda rate: (-found[rate], rate)) -> max(found)
            Take the rate with the most solved problems.
        counts are returned, not rates: min(found, key=lambda rate: (-found[rate], rate)) -> max(found.values())
            Return the learning rate itself, the key.
        of equally good rates, the first in the table is taken: (-found[rate], rate) -> -found[rate]
            Of equally good rates, take the smaller one. The table is not sorted.
        of equally good rates, the larger is taken: (-found[rate], rate) -> (-found[rate], -rate)
            Of equally good rates, take the smaller one.
    """,
)
