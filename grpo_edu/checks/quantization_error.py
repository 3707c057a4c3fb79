"""Exercises of notebook 07, third part: what rounding costs: bits, a claim of equality, samples of another policy."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import torch
from torch import Tensor

from grpo_edu.checks.core import Call, Exercise, Mistake, Part, call
from grpo_edu.checks.objective import numbers
from grpo_edu.quantized_rollouts import truncated_importance_weights

# ---- bits_needed ----


def bits_needed(largest: float, tolerated: float) -> int:
    """The fewest bits of a symmetric grid up to `largest` that moves no number by more than `tolerated`."""
    bits = 2
    while largest / (2 ** (bits - 1) - 1) / 2 > tolerated:
        bits += 1
    return bits


def _some_tolerance(rng: random.Random) -> Call:
    while True:
        largest, tolerated = round(rng.uniform(0.5, 8.0), 2), round(10 ** rng.uniform(-3.5, -0.7), 4)
        if abs(math.log2(largest / tolerated / 2 + 1) % 1 - 0.5) < 0.48:  # not on the border of two answers
            return call(largest, tolerated)


def _bits_by_logarithm(largest: float, tolerated: float) -> int:
    return max(2, 1 + math.ceil(math.log2(largest / (2 * tolerated) + 1)))


def _bits_by_range(largest: float, tolerated: float) -> int:
    return min(bits for bits in range(2, 33) if largest <= 2 * tolerated * (2 ** (bits - 1) - 1))


def _bits_by_length(largest: float, tolerated: float) -> int:
    return max(2, math.ceil(largest / (2 * tolerated)).bit_length() + 1)


def _bits_below(largest: float, tolerated: float) -> int:
    return next(bits for bits in range(2, 64) if largest / (2 ** (bits - 1) - 1) / 2 < tolerated)


check_bits_needed = Exercise(
    "bits_needed",
    bits_needed,
    parts=(Part("from a fifth to a few thousandths", 3, _some_tolerance, draws=8, always=(call(7.0, 0.5),)),),
    mistakes=(
        Mistake("a whole step is taken for the error", "Rounding moves a number by half a step at most.",
                lambda largest, tolerated: bits_needed(largest, tolerated / 2)),
        Mistake("the whole grid is counted on one side", "Half of the places are for negative numbers.",
                lambda largest, tolerated: bits_needed(largest, tolerated) - 1),
        Mistake("just the tolerated error is taken for too much", "No more than that: half a step of just `tolerated` "
                "will do.", _bits_below),
        Mistake("that is a number of places, not of bits", "b bits have 2^b places.",
                lambda largest, tolerated: math.ceil(largest / (2 * tolerated))),
        Mistake("bits are whole", "Round up: half a bit cannot be had.",
                lambda largest, tolerated: 1 + math.log2(largest / (2 * tolerated) + 1)),
    ),
    right=(_bits_by_logarithm, _bits_by_range, _bits_by_length),
)  # fmt: skip


# ---- equality_verdict ----


def equality_verdict(low: float, high: float, margin: float) -> str:
    """ "equal" within the margin, "better" or "worse" wholly outside of it, "unclear" else."""
    if -margin <= low and high <= margin:
        return "equal"
    if low > margin:
        return "better"
    return "worse" if high < -margin else "unclear"


def _interval(rng: random.Random, widths: tuple[float, float]) -> Call:
    margin, width = rng.choice([0.02, 0.03]), rng.uniform(*widths)
    low = rng.uniform(-0.08, 0.08) - width / 2
    return call(round(low, 3), round(low + width, 3), margin)


def _narrow(rng: random.Random) -> Call:
    return _interval(rng, (0.005, 0.03))


def _wide(rng: random.Random) -> Call:
    return _interval(rng, (0.05, 0.15))


def _verdict_by_table(low: float, high: float, margin: float) -> str:
    places = tuple((end > margin) - (end < -margin) for end in (low, high))
    return {(0, 0): "equal", (1, 1): "better", (-1, -1): "worse"}.get((places[0], places[1]), "unclear")


def _verdict_by_middle(low: float, high: float, margin: float) -> str:
    middle, reach = (low + high) / 2, (high - low) / 2
    if abs(middle) + reach <= margin + 1e-12:
        return "equal"
    if abs(middle) - reach > margin + 1e-12:
        return "better" if middle > 0 else "worse"
    return "unclear"


def _verdict_by_nesting(low: float, high: float, margin: float) -> str:
    answer = "unclear"
    if low > margin:
        answer = "better"
    elif high < -margin:
        answer = "worse"
    elif max(abs(low), abs(high)) <= margin:
        answer = "equal"
    return answer


def _around_zero(low: float, high: float, margin: float) -> str:
    if low <= 0 <= high:
        return "equal"
    return "better" if low > 0 else "worse"


def _zero_first(low: float, high: float, margin: float) -> str:
    if low > 0 or high < 0:
        return "better" if low > 0 else "worse"
    return equality_verdict(low, high, margin)


def _zero_last(low: float, high: float, margin: float) -> str:
    if -margin <= low and high <= margin:
        return "equal"
    if low > 0 or high < 0:
        return "better" if low > 0 else "worse"
    return "unclear"


def _verdict_with_ends(inside: bool, outside: bool) -> Callable[[float, float, float], str]:
    """Whether an interval that ends at the margin is inside, and one that begins there is outside of it."""

    def verdict(low: float, high: float, margin: float) -> str:
        if (-margin <= low and high <= margin) if inside else (-margin < low and high < margin):
            return "equal"
        if low >= margin if outside else low > margin:
            return "better"
        if high <= -margin if outside else high < -margin:
            return "worse"
        return "unclear"

    return verdict


def _one_sided(low: float, high: float, margin: float) -> str:
    return "equal" if low >= -margin else equality_verdict(low, high, margin)


def _point_estimate(low: float, high: float, margin: float) -> str:
    middle = (low + high) / 2
    return equality_verdict(middle, middle, margin)


_EDGES = (  # ends on the margin: within it twice, beside it twice; and one around 0 that reaches beyond
    call(-0.02, 0.005, 0.02),
    call(-0.005, 0.02, 0.02),
    call(0.02, 0.03, 0.02),
    call(-0.03, -0.02, 0.02),
    call(-0.043, 0.001, 0.02),
)


check_equality_verdict = Exercise(
    "equality_verdict",
    equality_verdict,
    parts=(
        Part("narrow intervals", 2, _narrow, draws=24, always=_EDGES),
        Part("wide intervals", 1, _wide, draws=24, always=(call(-0.1, 0.02, 0.02), call(-0.02, 0.1, 0.02))),
    ),
    mistakes=(
        Mistake("no difference was found, so they are called equal", "An interval around 0 may reach far beyond the "
                "margin: then nobody knows.", _around_zero),
        Mistake("it is compared with 0, not with the margin", "A difference that is surely there may be too small to "
                "matter.", _zero_first, also=(_zero_last,)),
        Mistake("only the lower end is looked at", "Equal means: not much worse, and not much better either.",
                _one_sided),
        Mistake("an interval that ends at the margin is not called equal", "The ends of the margin are included.",
                _verdict_with_ends(False, False)),
        Mistake("an interval that begins at the margin is called better", "Wholly above the margin: its lower end too, "
                "and the same below.", _verdict_with_ends(True, True)),
        Mistake("the ends of the margin are taken the other way round", "A change of just the margin still does not "
                "matter.", _verdict_with_ends(False, True)),
        Mistake("the middle of the interval decides", "Both ends count. The middle alone is a point estimate.",
                _point_estimate),
    ),
    right=(_verdict_by_table, _verdict_by_middle, _verdict_by_nesting),
)  # fmt: skip


# ---- truncated_weights ----


def _sampled(rng: random.Random, apart: float) -> Call:
    sampling = numbers(rng, 2, 3, low=-3.0, high=-0.7)
    return call(sampling + numbers(rng, 2, 3, low=-apart, high=apart), sampling, rng.choice([2.0, 3.0]))


def _some_far(rng: random.Random) -> Call:
    made = _sampled(rng, 0.6)
    logps, sampling = (part.view(-1) for part in made.args[:2])
    seldom, often = rng.sample(range(6), 2)  # tokens that the copy hardly ever draws, and draws far too often
    logps[seldom], sampling[seldom] = round(rng.uniform(-1.0, -0.2), 2), -6.0
    logps[often], sampling[often] = round(rng.uniform(-4.0, -3.0), 2), -0.5
    return made


def _weights_by_quotient(logps: Tensor, sampling_logps: Tensor, cap: float) -> Tensor:
    return torch.minimum(logps.exp() / sampling_logps.exp(), torch.tensor(cap))


def _weights_by_log(logps: Tensor, sampling_logps: Tensor, cap: float) -> Tensor:
    return (logps - sampling_logps).clamp(max=math.log(cap)).exp()


def _weights_by_loop(logps: Tensor, sampling_logps: Tensor, cap: float) -> Tensor:
    pairs = zip(logps.flatten().tolist(), sampling_logps.flatten().tolist(), strict=True)
    return torch.tensor([min(cap, math.exp(ours - theirs)) for ours, theirs in pairs]).view_as(logps)


check_truncated_weights = Exercise(
    "truncated_weights",
    truncated_importance_weights,
    parts=(
        Part("a copy that is near", 1, lambda rng: _sampled(rng, 0.6)),
        Part("a token that the copy hardly ever draws, and one that it draws far too often", 2, _some_far),
    ),
    mistakes=(
        Mistake("the ratio is upside down", "What the copy draws too seldom is to count more: π over π_q.",
                lambda logps, sampling, cap: truncated_importance_weights(sampling, logps, cap)),
        Mistake("the ratio has no exponential", "These are *log*-probabilities.",
                lambda logps, sampling, cap: (logps - sampling).clamp(max=cap)),
        Mistake("the logarithms are divided", "The logarithm of a ratio is a difference of logarithms.",
                lambda logps, sampling, cap: (logps / sampling).clamp(max=cap),
                also=(lambda logps, sampling, cap: (logps / sampling).exp().clamp(max=cap),)),
        Mistake("nothing is cut off", "One token with a huge weight rules the batch: at most the cap.",
                lambda logps, sampling, cap: (logps - sampling).exp()),
        Mistake("it is cut off from below", "The cap is the *most* that a weight may be.",
                lambda logps, sampling, cap: (logps - sampling).exp().clamp(min=cap)),
        Mistake("it is cut off on both sides", "The cap is the *most* that a weight may be. A token that the copy "
                "draws too often keeps its small weight.",
                lambda logps, sampling, cap: (logps - sampling).exp().clamp(1 / cap, cap)),
        Mistake("the logarithm is cut off, at the cap itself", "The cap is one for weights, not for their logarithms.",
                lambda logps, sampling, cap: (logps - sampling).clamp(max=cap).exp()),
        Mistake("weights above the cap become 0", "Cut off, not thrown away: such a token counts as much as the cap.",
                lambda logps, sampling, cap: (lambda w: w * (w <= cap))((logps - sampling).exp())),
    ),
    right=(_weights_by_quotient, _weights_by_log, _weights_by_loop),
)  # fmt: skip
