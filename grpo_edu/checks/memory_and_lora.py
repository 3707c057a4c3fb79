"""Exercises on memory: the peak of a step, optimizer states, micro-batches, chunked logits and LoRA."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from grpo_edu.checks.core import Call, Exercise, Mistake, Part, call
from grpo_edu.checks.inputs import MeanGradient, OutputLayer, gradient_of, numbers

# ---- step_peak ----


@dataclass(frozen=True)
class Step:
    """The sizes that the peak of a step depends on, in the order in which the exercise names them."""

    weights: int
    trained: int
    layers: int
    tokens: int
    kept: int
    entering: int
    logits: int
    cache: int
    recompute: bool

    @property
    def held(self) -> int:
        """Bytes of the weights, and of gradient and two moments of those that learn."""
        return 4 * self.weights + 12 * self.trained

    @property
    def activations(self) -> int:
        """Bytes that the layers keep for the backward pass."""
        a_token = self.layers * self.entering + self.kept if self.recompute else self.layers * self.kept
        return self.tokens * a_token

    @property
    def stage(self) -> int:
        """Bytes of the larger of the two stages, rollout and learning."""
        return max(self.cache, self.activations + self.logits)

    @property
    def peak(self) -> int:
        """Bytes at the worst moment: what is held all the time, and the larger stage."""
        return self.held + self.stage


def step_peak(*sizes: int) -> int:
    """Bytes of a GRPO step at its worst moment, in fp32 with AdamW; `Step` names the sizes."""
    return Step(*sizes).peak  # type: ignore[arg-type]  # the last of the sizes is a flag


def _peak_with(peak: Callable[[Step], float]) -> Callable[..., float]:
    """A wrong answer that adds up the parts in another way."""
    return lambda *sizes: peak(Step(*sizes))


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


SMALL_CACHE = call(100_000, 100_000, 4, 256, 2560, 256, 1_048_576, 300_000, True)  # the worst moment is learning

check_step_peak = Exercise(
    step_peak,
    parts=(
        Part("all weights learn", 2, _step(frozen=False, recompute=False), draws=8),
        Part("adapters learn, the weights are frozen", 1, _step(frozen=True, recompute=False), draws=8),
        Part("layers computed twice", 1, _step(frozen=False, recompute=True), draws=8, always=(SMALL_CACHE,)),
    ),
    mistakes={
        "the stages are added up": Mistake(
            "The cache is gone when learning begins: take the larger of the two.",
            _peak_with(lambda step: step.held + step.activations + step.logits + step.cache),
        ),
        "the rollout is forgotten": Mistake(
            "A large cache may be the worst moment.",
            _peak_with(lambda step: step.held + step.activations + step.logits),
        ),
        "activations and logits are taken for two moments": Mistake(
            "While the model learns, both are there at once.",
            _peak_with(lambda step: step.held + max(step.activations, step.logits, step.cache)),
        ),
        "frozen weights have gradients and moments": Mistake(
            "12 bytes for each weight that *learns*.", _peak_with(lambda step: 16 * step.weights + step.stage)
        ),
        "one tensor is missing of gradient and two moments": Mistake(
            "Three beside the weight, 4 bytes a number each.",
            _peak_with(lambda step: step.held - 4 * step.trained + step.stage),
        ),
        "computing layers twice changes nothing": Mistake(
            "Each layer keeps what enters it, and only one all the rest.",
            _peak_with(lambda step: replace(step, recompute=False).peak),
        ),
        "each layer keeps both, what enters and all the rest": Mistake(
            "Computed twice, a layer keeps what enters it; one at a time has all the rest.",
            _peak_with(
                lambda step: replace(step, kept=step.kept + step.recompute * step.entering, recompute=False).peak
            ),
        ),
        "what is held is taken for a stage": Mistake(
            "It is there all the time: add the larger stage to it.", _peak_with(lambda step: max(step.held, step.stage))
        ),
        "frozen weights have gradients": Mistake(
            "Only weights that learn have a gradient.",
            _peak_with(lambda step: step.peak + 4 * (step.weights - step.trained)),
        ),
        "the layer that is computed again is forgotten": Mistake(
            "While one is computed again, all of it is there.",
            _peak_with(
                lambda step: (
                    step.held
                    + max(step.cache, step.activations + step.logits - step.recompute * step.tokens * step.kept)
                )
            ),
        ),
    },
)


# ---- optimizer_numbers ----

Shapes = Sequence[tuple[int, ...]]


def _two(shape: tuple[int, ...]) -> int:
    return 2 * math.prod(shape)


def _numbers_with(
    adamw: Callable[[tuple[int, ...]], int] = _two, adafactor: Callable[[tuple[int, ...]], int] = sum
) -> Callable[[Shapes, str], int]:
    """An answer that counts the numbers of one shape in these ways. Right by default: a vector (n,) has n margins."""
    return lambda shapes, optim: sum(map(adamw if optim == "adamw" else adafactor, shapes))


def optimizer_numbers(shapes: Shapes, optim: str) -> int:
    """How many numbers an optimizer keeps: two a weight for AdamW; for Adafactor the margins of each matrix."""
    return _numbers_with()(shapes, optim)


def _weights(optim: str, *, vectors: bool) -> Callable[[random.Random], Call]:
    def draw(rng: random.Random) -> Call:
        shapes: list[tuple[int, ...]] = [(rng.randrange(3, 200), rng.randrange(3, 200)) for _ in range(3)]
        shapes += [(rng.randrange(3, 200),) for _ in range(2)] * vectors
        rng.shuffle(shapes)
        return call(shapes, optim)

    return draw


check_optimizer_numbers = Exercise(
    optimizer_numbers,
    parts=(
        Part("AdamW", 1, _weights("adamw", vectors=True)),
        Part("Adafactor, matrices", 1, _weights("adafactor", vectors=False)),
        Part("Adafactor, matrices and vectors", 1, _weights("adafactor", vectors=True)),
    ),
    mistakes={
        "Adafactor is counted as AdamW": Mistake(
            "Of a matrix it keeps a number for each row and each column.", _numbers_with(adafactor=_two)
        ),
        "Adafactor keeps a whole table": Mistake(
            "Not the table, its margins: rows + columns.", _numbers_with(adafactor=math.prod)
        ),
        "these are bytes": Mistake(
            "A count of numbers is asked for, not of bytes.", lambda shapes, optim: 4 * optimizer_numbers(shapes, optim)
        ),
        "one moment of AdamW is missing": Mistake(
            "The mean of the gradient, and the mean of its square.", _numbers_with(adamw=math.prod)
        ),
        "only rows are counted": Mistake(
            "And a number for each column.", _numbers_with(adafactor=lambda shape: shape[0])
        ),
        "a vector is left out": Mistake(
            "A vector has no margins to save by: a number for each entry.",
            _numbers_with(adafactor=lambda shape: sum(shape) if len(shape) == 2 else 0),
        ),
        "a vector has two numbers an entry": Mistake(
            "One number for each entry of it.",
            _numbers_with(adafactor=lambda shape: sum(shape) if len(shape) == 2 else 2 * shape[0]),
        ),
        "a vector is counted as rows and one column": Mistake(
            "A number for each entry of it, no more.",
            _numbers_with(adafactor=lambda shape: sum(shape) if len(shape) == 2 else shape[0] + 1),
        ),
    },
)


# ---- accumulated_gradient ----


def accumulated_gradient(mean_gradient: MeanGradient, rows: Tensor, size: int) -> Tensor:
    """The gradient of the whole batch's mean loss, from parts of `size` rows."""
    shares = [mean_gradient(part) * len(part) / len(rows) for part in rows.split(size)]
    return torch.stack(shares).sum(dim=0)


def _batch(*, uneven: bool) -> Callable[[random.Random], Call]:
    def draw(rng: random.Random) -> Call:
        size = rng.choice([3, 4])
        return _rows(rng, size, size * rng.choice([2, 3]) + (rng.randrange(1, size) if uneven else 0))

    return draw


def _rows(rng: random.Random, size: int, count: int) -> Call:
    weights = tuple(round(rng.uniform(-1, 1), 2) for _ in range(2))
    return call(MeanGradient(weights, size), numbers(rng, count, 3), size)


SIZES = ((2, 5), (3, 7), (3, 8), (4, 7), (4, 9), (5, 3), (1, 3))  # rows at once, and all of them


def _over_parts(combine: Callable[[list[Tensor], list[int]], Any]) -> Callable[..., Tensor]:
    """A wrong answer that combines the parts' gradients and sizes in another way."""

    def wrong(mean_gradient: MeanGradient, rows: Tensor, size: int) -> Tensor:
        parts = rows.split(size)
        return combine([mean_gradient(part) for part in parts], [len(part) for part in parts])

    return wrong


def _rest_dropped(mean_gradient: MeanGradient, rows: Tensor, size: int) -> Tensor:
    whole = rows[: len(rows) // size * size]
    return torch.stack([mean_gradient(part) * size / len(rows) for part in whole.split(size)]).sum(dim=0)


check_accumulated_gradient = Exercise(
    accumulated_gradient,
    parts=(
        Part("parts of one size", 2, _batch(uneven=False)),
        Part(
            "a smaller last part",
            2,
            _batch(uneven=True),
            always=tuple(_rows(random.Random(count), size, count) for size, count in SIZES),
        ),
    ),
    mistakes={
        "the accumulation factor is missing": Mistake(
            "Each part is a mean of its own. Weigh it with its share of the "
            "rows, or the gradient is as many times too large as there are parts.",
            _over_parts(lambda slopes, sizes: sum(slopes)),
        ),
        "all parts weigh alike": Mistake(
            "A smaller part has a smaller share of the batch.",
            _over_parts(lambda slopes, sizes: sum(slopes) / len(slopes)),
        ),
        "the last part weighs as if it were full": Mistake(
            "Its share is its own number of rows, over all rows.",
            _over_parts(lambda slopes, sizes: sum(slopes) * sizes[0] / sum(sizes)),
        ),
        "the sum is not divided": Mistake(
            "The gradient of a *mean*: divide by the number of rows.",
            _over_parts(lambda slopes, sizes: sum(s * n for s, n in zip(slopes, sizes, strict=True))),
        ),
        "only the last part is left": Mistake(
            "Add up; an assignment throws the parts before away.", _over_parts(lambda slopes, sizes: slopes[-1])
        ),
        "the rest is dropped": Mistake("The last part may be smaller; its rows count as well.", _rest_dropped),
        "all rows go through at once": Mistake(
            "Only `size` rows fit.", lambda mean_gradient, rows, size: mean_gradient(rows)
        ),
    },
)


# ---- logps_in_chunks ----


def _spans(vocab_size: int, size: int) -> list[tuple[int, int]]:
    return [(first, min(first + size, vocab_size)) for first in range(0, vocab_size, size)]


def _chosen_logits(states: Tensor, chosen: Tensor, logits_of: OutputLayer) -> Tensor:
    rows = zip(states, chosen.tolist(), strict=True)
    return torch.cat([logits_of(state[None], token, token + 1)[0] for state, token in rows])


def logps_in_chunks(states: Tensor, chosen: Tensor, logits_of: OutputLayer, vocab_size: int, size: int) -> Tensor:
    """(T,), the log-probabilities of the chosen tokens, from the logits of `size` vocabulary entries at a time."""
    spans = _spans(vocab_size, size)
    sums = torch.stack([logits_of(states, *span).logsumexp(dim=1) for span in spans])
    return _chosen_logits(states, chosen, logits_of) - sums.logsumexp(dim=0)


def _tokens(*, uneven: bool, scale: float = 1.0) -> Callable[[random.Random], Call]:
    """Five states; the chosen tokens lie in all chunks of the vocabulary. scale: of the logits."""

    def draw(rng: random.Random) -> Call:
        size = rng.choice([2, 3])
        vocab_size = size * rng.choice([2, 3]) + uneven
        weight = tuple(tuple(row) for row in (scale * numbers(rng, vocab_size, 3)).tolist())
        tokens = [rng.randrange(*span) for span in _spans(vocab_size, size)]
        chosen = torch.tensor(rng.sample(tokens * 3, 5))
        return call(numbers(rng, 5, 3, low=0.5), chosen, OutputLayer(weight, size), vocab_size, size)

    return draw


def _minus(normalize: Callable[[list[Tensor]], Tensor]) -> Callable[..., Tensor]:
    """A wrong answer that subtracts something else, made from the logits (T, size) of all chunks."""

    def wrong(states: Tensor, chosen: Tensor, logits_of: OutputLayer, vocab_size: int, size: int) -> Tensor:
        chunks = [logits_of(states, *span) for span in _spans(vocab_size, size)]
        return _chosen_logits(states, chosen, logits_of) - normalize(chunks)

    return wrong


def _own_chunk_only(states: Tensor, chosen: Tensor, logits_of: OutputLayer, vocab_size: int, size: int) -> Tensor:
    sums = torch.stack([logits_of(states, *span).logsumexp(dim=1) for span in _spans(vocab_size, size)])
    return _chosen_logits(states, chosen, logits_of) - sums[chosen // size, torch.arange(len(chosen))]


def _all_at_once(states: Tensor, chosen: Tensor, logits_of: OutputLayer, vocab_size: int, size: int) -> Tensor:
    return logits_of(states, 0, vocab_size).log_softmax(dim=1).gather(1, chosen[:, None])[:, 0]


check_logps_in_chunks = Exercise(
    logps_in_chunks,
    parts=(
        Part("chunks of one size", 1, _tokens(uneven=False)),
        Part("a smaller last chunk, and logits of more than 100", 1, _tokens(uneven=True, scale=60.0)),
        Part("the gradient", 2, lambda rng: replace(_tokens(uneven=True)(rng), ask=gradient_of)),
    ),
    mistakes={
        "all logits are there at once": Mistake(
            "That is what does not fit. Ask for `size` tokens of the vocabulary at a time.", _all_at_once
        ),
        "each chunk has a softmax of its own": Mistake(
            "The probabilities of the *whole* vocabulary add up to 1.", _own_chunk_only
        ),
        "these are logits, no log-probabilities": Mistake(
            "What has to be subtracted, so that the probabilities add up to 1?",
            _minus(lambda chunks: torch.zeros(len(chunks[0]))),
        ),
        "the logarithms of the chunks are added": Mistake(
            "The sums of exponentials are to be added, and not their logarithms.",
            _minus(lambda chunks: torch.stack([chunk.logsumexp(dim=1) for chunk in chunks]).sum(dim=0)),
        ),
        "the exponentials overflow": Mistake(
            "exp(100) is more than float32 holds. Which function adds what two *logarithms* stand for?",
            _minus(lambda chunks: torch.cat(chunks, dim=1).exp().sum(dim=1).log()),
        ),
        "the rest of the vocabulary is dropped": Mistake(
            "The last chunk may be smaller.",
            _minus(
                lambda chunks: torch.cat([one for one in chunks if one.shape[1] == chunks[0].shape[1]], 1).logsumexp(1)
            ),
        ),
        "only the last chunk is counted": Mistake(
            "The sum has to grow from chunk to chunk.", _minus(lambda chunks: chunks[-1].logsumexp(dim=1))
        ),
        "the largest logit stands for the sum": Mistake(
            "It keeps the exponentials small, but the sum is still to be added.",
            _minus(lambda chunks: torch.cat(chunks, dim=1).amax(dim=1)),
        ),
        "these are probabilities": Mistake("Their logarithm is asked for.", lambda *args: logps_in_chunks(*args).exp()),
        "the results are columns": Mistake("(T,) is asked for.", lambda *args: logps_in_chunks(*args)[:, None]),
    },
    tolerance=1e-4,  # logits of some hundreds have five digits
)


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


def _merged_in_place(weight: Tensor, A: Tensor, B: Tensor, alpha: float) -> Tensor:
    weight += alpha / len(A) * B @ A
    return weight


check_merged_weight = Exercise(
    merged_weight,
    parts=(
        Part("as many outputs as inputs", 1, _adapter(square=True)),
        Part("more outputs than inputs", 2, _adapter(square=False)),
    ),
    mistakes={
        "α is not divided by r": Mistake(
            "The scale is α/r, so that another rank needs no other α.",
            lambda weight, A, B, alpha: weight + alpha * B @ A,
        ),
        "α and r have changed places": Mistake(
            "A larger α means a larger correction.", lambda weight, A, B, alpha: weight + len(A) / alpha * B @ A
        ),
        "the scale is missing": Mistake("α/r belongs to the correction.", lambda weight, A, B, alpha: weight + B @ A),
        "it is divided by a size of the weight, not by r": Mistake(
            "r is the number of A's *rows*.", lambda weight, A, B, alpha: weight + alpha / A.shape[1] * B @ A
        ),
        "it is divided by the number of outputs": Mistake(
            "r is the number of A's rows, and of B's *columns*.",
            lambda weight, A, B, alpha: weight + alpha / len(B) * B @ A,
        ),
        "the product is transposed": Mistake(
            "(out, r) times (r, in): B comes first.", lambda weight, A, B, alpha: weight + alpha / len(A) * A.T @ B.T
        ),
        "the frozen weight is left out": Mistake(
            "The correction is added to what was there.", lambda weight, A, B, alpha: alpha / len(A) * B @ A
        ),
        "the frozen weight is changed in place": Mistake(
            "Make a new matrix: the base may serve as the reference.", _merged_in_place
        ),
    },
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
    """How many numbers LoRA trains: r (inputs + outputs) for each target of each layer."""
    return _counted(shape, rank, target_modules, lambda inputs, outputs: rank * (inputs + outputs))


def _counted(
    shape: Mapping[str, int], rank: int, target_modules: Sequence[str], count: Callable[[int, int], int], **changed: int
) -> int:
    shape = {**shape, **changed}
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    keys = hidden // heads * shape["num_key_value_heads"]
    matrices = layer_matrices(hidden, shape["intermediate_size"], hidden, keys)
    return shape["num_hidden_layers"] * sum(count(*matrices[name]) for name in target_modules)


def _qwen(targets: Callable[[random.Random], Sequence[str]]) -> Callable[[random.Random], Call]:
    def draw(rng: random.Random) -> Call:
        heads = rng.choice([6, 8, 14])
        shape = {
            "hidden_size": heads * rng.choice([16, 64]),
            "intermediate_size": rng.choice([384, 1000, 4864]),
            "num_hidden_layers": rng.choice([4, 6, 24]),
            "num_attention_heads": heads,
            "num_key_value_heads": 2,
        }
        return call(shape, rng.choice([4, 8, 16]), list(targets(rng)))

    return draw


def _few(rng: random.Random) -> Sequence[str]:
    return rng.sample(FEED_FORWARD, 2) + ["v_proj"]


def _of_shape(changed: Callable[[Mapping[str, int]], dict[str, int]]) -> Callable[..., int]:
    """A wrong answer that takes some sizes of the model for others."""
    return lambda shape, *rest: lora_parameters({**shape, **changed(shape)}, *rest)


check_lora_parameters = Exercise(
    lora_parameters,
    parts=(
        Part("the four matrices of attention", 2, _qwen(lambda rng: ATTENTION)),
        Part("all seven matrices", 1, _qwen(lambda rng: rng.sample(ATTENTION + FEED_FORWARD, 7))),
        Part("three of them", 1, _qwen(_few)),
    ),
    mistakes={
        "keys and values are taken for as wide as queries": Mistake(
            "Several query heads share a key head: their width is num_key_value_heads times that of a head.",
            _of_shape(lambda shape: {"num_key_value_heads": shape["num_attention_heads"]}),
        ),
        "only one key head is counted": Mistake(
            "num_key_value_heads of them.", _of_shape(lambda shape: {"num_key_value_heads": 1})
        ),
        "the number of key heads is taken for their width": Mistake(
            "Each head is H / num_attention_heads wide.",
            _of_shape(lambda shape: {"num_attention_heads": shape["hidden_size"]}),
        ),
        "H is divided by the number of key heads": Mistake(
            "Each head is H / num_attention_heads wide; there are num_key_value_heads of them.",
            _of_shape(  # K = H / heads · key heads = H / key heads
                lambda shape: {"num_attention_heads": shape["num_key_value_heads"] ** 2}
            ),
        ),
        "whole matrices are counted": Mistake(
            "The frozen weights do not learn: A and B have r (in + out) numbers.",
            lambda shape, rank, targets: _counted(shape, rank, targets, lambda inputs, outputs: inputs * outputs),
        ),
        "A alone is counted": Mistake(
            "B has r numbers for each output.",
            lambda shape, rank, targets: _counted(shape, rank, targets, lambda inputs, outputs: rank * inputs),
        ),
        "inputs are multiplied with outputs": Mistake(
            "A has r · in numbers and B has r · out: add them up.",
            lambda shape, rank, targets: _counted(
                shape, rank, targets, lambda inputs, outputs: rank * inputs * outputs
            ),
        ),
        "the frozen weights count as well": Mistake(
            "Only A and B learn.",
            lambda shape, rank, targets: _counted(
                shape, rank, targets, lambda inputs, outputs: rank * (inputs + outputs) + inputs * outputs
            ),
        ),
        "only one layer is counted": Mistake(
            "Every layer has its own adapters.", _of_shape(lambda shape: {"num_hidden_layers": 1})
        ),
        "target_modules play no part": Mistake(
            "Only the matrices that it names get adapters.",
            lambda shape, rank, targets: lora_parameters(shape, rank, ATTENTION + FEED_FORWARD),
        ),
    },
)


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


def _one_rate(tuning: Tuning) -> dict[str, float]:
    rates = sorted(next(iter(tuning.values())))
    rate = max(rates, key=lambda rate: sum(found[rate] for found in tuning.values()))
    return dict.fromkeys(tuning, rate)


check_best_rates = Exercise(
    best_rates,
    parts=(
        Part("each method has its own", 1, _tuned(tied=False)),
        Part("two rates are equally good", 1, _tuned(tied=True)),
    ),
    mistakes={
        "one rate serves all methods": Mistake(
            "A comparison at a common rate measures the rate. Each its own.", _one_rate
        ),
        "the first method's rate serves all": Mistake(
            "Each method has a best rate of its own.",
            lambda tuning: dict.fromkeys(tuning, best_rates(tuning)[next(iter(tuning))]),
        ),
        "the largest rate is taken": Mistake(
            "The one at which most was solved.", lambda tuning: {method: max(found) for method, found in tuning.items()}
        ),
        "these are counts, not rates": Mistake(
            "Return the learning rate itself, the key.",
            lambda tuning: {method: max(found.values()) for method, found in tuning.items()},
        ),
        "of equal ones, the first in the table is taken": Mistake(
            "The smaller one; the table is in no order.",
            lambda tuning: {method: max(found, key=found.get) for method, found in tuning.items()},
        ),
        "of equal ones, the larger is taken": Mistake(
            "The smaller one.",
            lambda tuning: {
                method: max(found, key=lambda rate: (found[rate], rate)) for method, found in tuning.items()
            },
        ),
    },
)
