"""Exercises of notebook 01, first part: how many threads a task gets."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import torch

from grpo_edu.checks.core import Call, Exercise, Mistake, Part, call

# ---- choose_threads ----

COUNTS = [1, 2, 4, 8]


def choose_threads(counts: list[int], seconds: list[float], usable_cores: float) -> int:
    """The smallest number of threads, not above the usable cores, that is within 5% of the fastest of these."""
    allowed = [(count, time) for count, time in zip(counts, seconds, strict=True) if count <= usable_cores]
    fastest = min(time for _, time in allowed)
    return min(count for count, time in allowed if time <= 1.05 * fastest)


def _rising(rng: random.Random) -> Call:
    one, serial = rng.randrange(100, 900), rng.choice([0.0, 0.05, 0.2])
    usable = rng.choice([2, 2.5, 4, 6])
    times = [one * (serial + (1 - serial) / min(count, usable)) * (1.2 if count > usable else 1) for count in COUNTS]
    return call(list(COUNTS), [round(time) / 1000 for time in times], usable)


def _too_many(rng: random.Random) -> Call:
    made = _rising(rng)
    counts, seconds, usable = made.args
    best = min(time for count, time in zip(counts, seconds, strict=True) if count <= usable)
    lucky = [round(0.8 * best, 4) if count > usable else time for count, time in zip(counts, seconds, strict=True)]
    return call(counts, lucky, usable)


def _flat(rng: random.Random) -> Call:
    one = rng.randrange(200, 900)
    factors = [1.0, rng.choice([0.96, 0.97, 0.98]), rng.choice([0.99, 1.01, 1.02]), 1.3]
    return call(list(COUNTS), [round(one * factor) / 1000 for factor in factors], rng.choice([4, 6]))


HALF_CORES = (  # the third thread would be fast, but has no core of its own
    call([1, 2, 3, 4], [0.5, 0.54, 0.3, 0.2], 2.5),
    call([1, 2, 3, 4], [0.8, 0.5, 0.3, 0.2], 2.75),
    call([1, 2, 3, 4], [0.8, 0.41, 0.4, 0.5], 2.5),
)
SMALL_STEPS = call(list(COUNTS), [0.5, 0.485, 0.47, 0.65], 4)  # each gains less than 5%, together they gain more


def _threads_by_loop(counts, seconds, usable_cores):
    fastest = math.inf
    for count, time in zip(counts, seconds, strict=True):
        if count <= usable_cores:
            fastest = min(fastest, time)
    for count, time in sorted(zip(counts, seconds, strict=True)):
        if time / fastest <= 1.05:
            return count


def _threads_by_dict(counts, seconds, usable_cores):
    times = {count: time for count, time in zip(counts, seconds, strict=True) if not count > usable_cores}
    limit = min(times.values()) * 1.05
    return next(count for count in sorted(times) if times[count] <= limit)


def _best_of_all_first(nothing_left: Callable[[list[int]], int | None]) -> Callable:
    """The fastest of all counts is looked for first; what comes out where no allowed one is near it."""

    def wrong(counts, seconds, usable_cores):
        near = [count for count, time in zip(counts, seconds, strict=True) if time <= 1.05 * min(seconds)]
        allowed = [count for count in near if count <= usable_cores]
        return min(allowed) if allowed else nothing_left(counts)

    return wrong


def _step_by_step(counts, seconds, usable_cores):
    best = 0
    for place, count in enumerate(counts):
        if count <= usable_cores and 1.05 * seconds[place] < seconds[best]:
            best = place
    return counts[best]


def _threads_by_tensor(counts, seconds, usable_cores):
    tried = torch.tensor(counts)
    times = torch.tensor(seconds, dtype=torch.float64).masked_fill(tried > usable_cores, math.inf)
    return int(tried[times <= 1.05 * times.min()].min())


check_choose_threads = Exercise(
    "choose_threads",
    choose_threads,
    parts=(
        Part("tasks that gain from threads", 1, _rising),
        Part("too many threads, fast by luck", 1, _too_many, always=HALF_CORES),
        Part("a task that gains little or nothing", 1, _flat, always=(SMALL_STEPS,)),
    ),
    mistakes=(
        Mistake("there are more threads than cores", "A container may have fewer cores than the machine shows: leave "
                "out the counts above `usable_cores`.",
                lambda counts, seconds, usable: choose_threads(counts, seconds, math.inf)),
        Mistake("a part of a core counts as a whole one", "With 2.5 usable cores, a third thread is one too many: take "
                "`usable_cores` as it is, without rounding it.",
                lambda counts, seconds, usable: choose_threads(counts, seconds, math.ceil(usable)),
                also=(lambda counts, seconds, usable: choose_threads(counts, seconds, round(usable)),)),
        Mistake("the shortest time is looked for among all counts", "First leave out the counts that are not allowed, "
                "then look for the shortest time among the others.", _best_of_all_first(min),
                also=(_best_of_all_first(lambda counts: None), _best_of_all_first(lambda counts: min([])))),
        Mistake("each count is compared with a slower one", "Compare with the shortest time of all that are allowed, "
                "which may come later in the list.", _step_by_step),
        Mistake("the fastest wins, however little it gains", "Within 5% of the fastest the smaller number is enough: "
                "the other cores are free for something else.",
                lambda counts, seconds, usable: min(
                    (time, count) for count, time in zip(counts, seconds, strict=True) if count <= usable)[1]),
        Mistake("it is as many threads as there may be", "Look at the times: does this task gain from them?",
                lambda counts, seconds, usable: max(count for count in counts if count <= usable)),
        Mistake("it is the slowest", "These are seconds: less is better.",
                lambda counts, seconds, usable: max(
                    (time, count) for count, time in zip(counts, seconds, strict=True) if count <= usable)[1]),
        Mistake("it is a place in the list", "Return the number of threads that stands there.",
                lambda counts, seconds, usable: counts.index(choose_threads(counts, seconds, usable))),
    ),
    right=(_threads_by_loop, _threads_by_dict, _threads_by_tensor),
)  # fmt: skip
