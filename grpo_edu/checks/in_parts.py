"""Exercises of notebook 09, second part: a batch in parts, and logits in chunks."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_edu.checks.core import Call, Exercise, Mistake, Part, call
from grpo_edu.checks.objective import numbers

# ---- accumulated_gradient ----


@dataclass(frozen=True)
class MeanGradient:
    """The gradient of a mean squared error over some rows; the last column is the target. `room`: rows at once."""

    weights: tuple[float, ...]
    room: int

    def __call__(self, rows: Tensor) -> Tensor:
        if len(rows) > self.room:
            raise MemoryError(f"{len(rows)} rows at once: only {self.room} fit")
        inputs, targets = rows[:, :-1], rows[:, -1]
        return inputs.T @ (inputs @ torch.tensor(self.weights) - targets) / len(rows)

    def __repr__(self) -> str:
        return f"<mean gradient of at most {self.room} rows>"


def accumulated_gradient(mean_gradient: MeanGradient, rows: Tensor, size: int) -> Tensor:
    """The gradient of the whole batch's mean loss, from parts of `size` rows."""
    shares = [mean_gradient(part) * len(part) / len(rows) for part in rows.split(size)]
    return torch.stack(shares).sum(dim=0)


def _batch(*, uneven: bool) -> Callable[[random.Random], Call]:
    def draw(rng: random.Random) -> Call:
        size = rng.choice([3, 4])
        count = size * rng.choice([2, 3]) + (rng.randrange(1, size) if uneven else 0)
        weights = tuple(round(rng.uniform(-1, 1), 2) for _ in range(2))
        return call(MeanGradient(weights, size), numbers(rng, count, 3), size)

    return draw


def _accumulated_by_sums(mean_gradient: MeanGradient, rows: Tensor, size: int) -> Tensor:
    total = torch.zeros(rows.shape[1] - 1)
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        total += mean_gradient(part) * len(part)
    return total / len(rows)


def _accumulated_by_rows(mean_gradient: MeanGradient, rows: Tensor, size: int) -> Tensor:
    return torch.stack([mean_gradient(row[None]) for row in rows]).mean(dim=0)


def _accumulated_by_running_mean(mean_gradient: MeanGradient, rows: Tensor, size: int) -> Tensor:
    mean, seen = torch.zeros(()), 0
    for part in rows.split(size):
        seen += len(part)
        mean = mean + (mean_gradient(part) - mean) * (len(part) / seen)
    return mean


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
    "accumulated_gradient",
    accumulated_gradient,
    parts=(
        Part("parts of one size", 2, _batch(uneven=False)),
        Part("a smaller last part", 2, _batch(uneven=True)),
    ),
    mistakes=(
        Mistake("the accumulation factor is missing", "Each part is a mean of its own. Weigh it with its share of the "
                "rows, or the gradient is as many times too large as there are parts.",
                _over_parts(lambda slopes, sizes: sum(slopes))),
        Mistake("all parts weigh alike", "A smaller part has a smaller share of the batch.",
                _over_parts(lambda slopes, sizes: sum(slopes) / len(slopes))),
        Mistake("the last part weighs as if it were full", "Its share is its own number of rows, over all rows.",
                _over_parts(lambda slopes, sizes: sum(slopes) * sizes[0] / sum(sizes))),
        Mistake("the sum is not divided", "The gradient of a *mean*: divide by the number of rows.",
                _over_parts(lambda slopes, sizes: sum(s * n for s, n in zip(slopes, sizes, strict=True)))),
        Mistake("only the last part is left", "Add up; an assignment throws the parts before away.",
                _over_parts(lambda slopes, sizes: slopes[-1])),
        Mistake("the rest is dropped", "The last part may be smaller; its rows count as well.", _rest_dropped),
        Mistake("all rows go through at once", "Only `size` rows fit.",
                lambda mean_gradient, rows, size: mean_gradient(rows)),
    ),
    right=(_accumulated_by_sums, _accumulated_by_rows, _accumulated_by_running_mean),
)  # fmt: skip


# ---- logps_in_chunks ----


@dataclass(frozen=True)
class OutputLayer:
    """Logits of hidden states (n, H) → (n, V). `room`: states at once."""

    weight: tuple[tuple[float, ...], ...]
    room: int

    def __call__(self, states: Tensor) -> Tensor:
        if len(states) > self.room:
            raise MemoryError(f"{len(states)} rows of logits at once: only {self.room} fit")
        return states @ torch.tensor(self.weight).T

    def __repr__(self) -> str:
        return f"<logits of at most {self.room} states>"


def logps_in_chunks(states: Tensor, chosen: Tensor, logits_of: OutputLayer, size: int) -> Tensor:
    """(T,), the log-probabilities of the chosen tokens, from `size` rows of logits at a time."""
    logps = [
        logits_of(rows).log_softmax(dim=1).gather(1, ids[:, None])[:, 0]
        for rows, ids in zip(states.split(size), chosen.split(size), strict=True)
    ]
    return torch.cat(logps)


def _tokens(*, uneven: bool) -> Callable[[random.Random], Call]:
    def draw(rng: random.Random) -> Call:
        size, vocabulary = rng.choice([2, 3]), 5
        count = size * 2 + (1 if uneven else 0)
        weight = tuple(tuple(row) for row in numbers(rng, vocabulary, 3).tolist())
        chosen = torch.tensor(rng.sample(range(vocabulary), size) * 3)[:count]
        chosen[-1] = (chosen[-1] + 1) % vocabulary
        return call(numbers(rng, count, 3), chosen, OutputLayer(weight, size), size)

    return draw


def _chunks_by_loop(states: Tensor, chosen: Tensor, logits_of: OutputLayer, size: int) -> Tensor:
    logps = []
    for state, token in zip(states, chosen.tolist(), strict=True):
        scores = logits_of(state[None])[0].tolist()
        logps.append(scores[token] - math.log(sum(math.exp(score) for score in scores)))
    return torch.tensor(logps)


def _chunks_by_logsumexp(states: Tensor, chosen: Tensor, logits_of: OutputLayer, size: int) -> Tensor:
    logps = torch.empty(len(states))
    for start in range(0, len(states), size):
        rows = slice(start, start + size)
        logits = logits_of(states[rows])
        logps[rows] = logits[torch.arange(len(logits)), chosen[rows]] - logits.logsumexp(dim=1)
    return logps


def _chunks_by_cross_entropy(states: Tensor, chosen: Tensor, logits_of: OutputLayer, size: int) -> Tensor:
    losses: list[Tensor] = []
    while sum(len(loss) for loss in losses) < len(states):
        done = sum(len(loss) for loss in losses)
        logits = logits_of(states[done : done + size])
        losses.append(torch.nn.functional.cross_entropy(logits, chosen[done : done + size], reduction="none"))
    return -torch.cat(losses)


def _each_chunk(make: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """A wrong answer that makes another thing of a chunk's logits and tokens."""

    def wrong(states: Tensor, chosen: Tensor, logits_of: OutputLayer, size: int) -> Tensor:
        pairs = zip(states.split(size), chosen.split(size), strict=True)
        return torch.cat([make(logits_of(rows), ids[:, None])[:, 0] for rows, ids in pairs])

    return wrong


def _first_tokens_again(states: Tensor, chosen: Tensor, logits_of: OutputLayer, size: int) -> Tensor:
    chunks = [logits_of(rows).log_softmax(dim=1) for rows in states.split(size)]
    return torch.cat([logps.gather(1, chosen[: len(logps), None])[:, 0] for logps in chunks])


def _rest_of_tokens_dropped(states: Tensor, chosen: Tensor, logits_of: OutputLayer, size: int) -> Tensor:
    count = len(states) // size * size
    return logps_in_chunks(states[:count], chosen[:count], logits_of, size)


check_logps_in_chunks = Exercise(
    "logps_in_chunks",
    logps_in_chunks,
    parts=(
        Part("chunks of one size", 2, _tokens(uneven=False)),
        Part("a smaller last chunk", 1, _tokens(uneven=True)),
    ),
    mistakes=(
        Mistake("all logits are there at once", "That is what does not fit. Ask for `size` rows at a time.",
                lambda states, chosen, logits_of, size: logits_of(states).log_softmax(dim=1).gather(
                    1, chosen[:, None])[:, 0]),
        Mistake("these are logits, no log-probabilities", "Minus the log-sum-exp over the vocabulary.",
                _each_chunk(lambda logits, ids: logits.gather(1, ids))),
        Mistake("softmax runs over the tokens of a chunk", "The probabilities of the vocabulary add up to 1.",
                _each_chunk(lambda logits, ids: logits.log_softmax(dim=0).gather(1, ids))),
        Mistake("these are probabilities", "Their logarithm is asked for.",
                _each_chunk(lambda logits, ids: logits.softmax(dim=1).gather(1, ids))),
        Mistake("the results are columns", "(T,) is asked for: `gather` gives a column, `[:, 0]` makes a vector of it.",
                lambda states, chosen, logits_of, size: logps_in_chunks(states, chosen, logits_of, size)[:, None]),
        Mistake("the likeliest token is taken", "The one that was *chosen*, likely or not.",
                _each_chunk(lambda logits, ids: logits.log_softmax(dim=1).amax(dim=1, keepdim=True))),
        Mistake("every chunk takes the first tokens", "Cut `chosen` where you cut `states`.", _first_tokens_again),
        Mistake("the rest is dropped", "The last chunk may be smaller.", _rest_of_tokens_dropped),
    ),
    right=(_chunks_by_loop, _chunks_by_logsumexp, _chunks_by_cross_entropy),
)  # fmt: skip
