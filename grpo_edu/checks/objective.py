"""Exercises of notebook 04, second part: ratio and clip, KL, a gradient checked."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import torch
from torch import Tensor

from grpo_edu.checks.core import Call, Exercise, Mistake, Part, call
from grpo_edu.losses import per_token_kl

# ---- inputs ----


def numbers(rng: random.Random, *shape: int, low: float = -2.0, high: float = 2.0) -> Tensor:
    """A tensor of this shape with two digits behind the point."""
    values = [round(rng.uniform(low, high), 2) for _ in range(math.prod(shape))]
    return torch.tensor(values).view(*shape)


# ---- clipped_loss ----


def clipped_loss(per_token_logps: Tensor, old_per_token_logps: Tensor, advantages: Tensor, epsilon: float) -> Tensor:
    """(B, C), −min(ρ A, clip(ρ, 1 − ε, 1 + ε) A) with ρ = exp(logp − old)."""
    ratio = (per_token_logps - old_per_token_logps).exp()
    gain = advantages[:, None]
    return -torch.min(ratio * gain, ratio.clamp(1 - epsilon, 1 + epsilon) * gain)


def _some_policies(rng: random.Random) -> Call:
    old = numbers(rng, 4, 3, low=-3.0, high=-0.5)
    change = numbers(rng, 4, 3, low=-0.6, high=0.6)
    advantages = torch.tensor([1.0, -1.0, 0.5, -2.0]) * round(rng.uniform(0.5, 1.5), 1)
    return call(old + change, old, advantages, rng.choice([0.1, 0.2, 0.3]))


def _first_update(rng: random.Random) -> Call:
    old = numbers(rng, 2, 3, low=-3.0, high=-0.5)
    return call(old, old.clone(), numbers(rng, 2), 0.2)


def _clip_by_cases(per_token_logps, old_per_token_logps, advantages, epsilon):
    out = torch.empty_like(per_token_logps)
    for row in range(len(out)):
        for place in range(out.shape[1]):
            gain = advantages[row].item()
            ratio = math.exp(per_token_logps[row, place].item() - old_per_token_logps[row, place].item())
            bounded = min(ratio, 1 + epsilon) if gain > 0 else max(ratio, 1 - epsilon)
            out[row, place] = -bounded * gain
    return out


def _clip_by_max(per_token_logps, old_per_token_logps, advantages, epsilon):
    ratio = torch.exp(per_token_logps - old_per_token_logps)
    loss = -ratio * advantages.unsqueeze(1)
    return torch.maximum(loss, -torch.clip(ratio, 1 - epsilon, 1 + epsilon) * advantages.unsqueeze(1))


def _clip_by_where(per_token_logps, old_per_token_logps, advantages, epsilon):
    ratio = per_token_logps.exp() / old_per_token_logps.exp()
    gain = advantages.view(-1, 1).expand_as(ratio)
    return -gain * torch.where(gain >= 0, ratio.clamp(max=1 + epsilon), ratio.clamp(min=1 - epsilon))


def _with_ratio(make: Callable[[Tensor, Tensor, float], Tensor]) -> Callable:
    """A wrong answer that begins as the right one does."""

    def wrong(per_token_logps, old_per_token_logps, advantages, epsilon):
        return make((per_token_logps - old_per_token_logps).exp(), advantages[:, None], epsilon)

    return wrong


check_clipped_loss = Exercise(
    "clipped_loss",
    clipped_loss,
    parts=(
        Part("both signs, inside and outside the bounds", 4, _some_policies, draws=12),
        Part("the first update, where the ratio is 1", 1, _first_update),
    ),
    mistakes=(
        Mistake("the clip has no min", "A clip alone also blocks the way home. Take the smaller of the two.",
                _with_ratio(lambda ratio, gain, eps: -ratio.clamp(1 - eps, 1 + eps) * gain)),
        Mistake("min is taken before the advantage comes in", "Where the advantage is negative, the smaller ratio is "
                "the larger gain: multiply both first.",
                _with_ratio(lambda ratio, gain, eps: -torch.min(ratio, ratio.clamp(1 - eps, 1 + eps)) * gain)),
        Mistake("the clipped ratio has no advantage", "min compares two gains: ρ A and clip(ρ) A.",
                _with_ratio(lambda ratio, gain, eps: -torch.min(ratio * gain, ratio.clamp(1 - eps, 1 + eps)))),
        Mistake("the product is clipped, not the ratio", "Clip ρ, then multiply.",
                _with_ratio(lambda ratio, gain, eps: -torch.min(ratio * gain, (ratio * gain).clamp(1 - eps, 1 + eps)))),
        Mistake("the bounds lie around 0", "A ratio is near 1: from 1 − ε to 1 + ε.",
                _with_ratio(lambda ratio, gain, eps: -torch.min(ratio * gain, ratio.clamp(-eps, eps) * gain))),
        Mistake("nothing is clipped", "What holds the ratio near 1?",
                _with_ratio(lambda ratio, gain, eps: -ratio * gain)),
        Mistake("max stands where min should", "The objective is the *smaller* of two gains.",
                _with_ratio(lambda ratio, gain, eps: -torch.max(ratio * gain, ratio.clamp(1 - eps, 1 + eps) * gain))),
        Mistake("the sign is missing", "An optimizer makes a loss small; the objective is to be large.",
                _with_ratio(lambda ratio, gain, eps: torch.min(ratio * gain, ratio.clamp(1 - eps, 1 + eps) * gain))),
        Mistake("the ratio is upside down", "The policy that learns stands above the one that sampled.",
                lambda new, old, advantages, epsilon: clipped_loss(old, new, advantages, epsilon)),
        Mistake("the ratio has no exponential", "These are *log*-probabilities: what undoes a logarithm?",
                lambda new, old, advantages, epsilon: -torch.min(
                    (new - old) * advantages[:, None],
                    (new - old).clamp(1 - epsilon, 1 + epsilon) * advantages[:, None])),
    ),
    right=(_clip_by_cases, _clip_by_max, _clip_by_where),
)  # fmt: skip


# ---- k3 ----


def _two_policies(rng: random.Random) -> Call:
    logps = numbers(rng, 2, 3, low=-3.0, high=-0.2)
    return call(logps, logps + numbers(rng, 2, 3, low=-1.5, high=1.5))


def _equal_policies(rng: random.Random) -> Call:
    logps = numbers(rng, 2, 3, low=-3.0, high=-0.2)
    return call(logps, logps.clone())


def _k3_by_ratio(per_token_logps: Tensor, ref_per_token_logps: Tensor) -> Tensor:
    ratio = ref_per_token_logps.exp() / per_token_logps.exp()
    return ratio - ratio.log() - 1


def _k3_by_expm1(per_token_logps: Tensor, ref_per_token_logps: Tensor) -> Tensor:
    apart = ref_per_token_logps - per_token_logps
    return torch.expm1(apart) - apart


def _k3_by_loop(per_token_logps: Tensor, ref_per_token_logps: Tensor) -> Tensor:
    pairs = zip(per_token_logps.flatten().tolist(), ref_per_token_logps.flatten().tolist(), strict=True)
    values = [math.exp(ref - logp) - (ref - logp) - 1 for logp, ref in pairs]
    return torch.tensor(values).view_as(per_token_logps)


check_k3 = Exercise(
    "k3",
    per_token_kl,
    parts=(
        Part("two policies", 3, _two_policies),
        Part("a policy and itself", 1, _equal_policies),
    ),
    mistakes=(
        Mistake("the two policies have changed places", "k3's ratio is reference over policy.",
                lambda logps, ref: (logps - ref).exp() - (logps - ref) - 1),
        Mistake("that is k1", "k1 can be negative on a single token. k3 cannot.", lambda logps, ref: logps - ref),
        Mistake("that is d alone", "d is negative where the policy is the likelier one. k3 never is.",
                lambda logps, ref: ref - logps),
        Mistake("the 1 is added", "What must come out for a policy and itself?",
                lambda logps, ref: (ref - logps).exp() - (ref - logps) + 1),
        Mistake("that is k2", "k2 is half the square. k3 has an exponential.",
                lambda logps, ref: (logps - ref).square() / 2),
        Mistake("the 1 is missing", "What must come out for a policy and itself?",
                lambda logps, ref: (ref - logps).exp() - (ref - logps)),
        Mistake("the linear term has the wrong sign", "Near 0 an exponential is 1 + x: what has to be taken away?",
                lambda logps, ref: (ref - logps).exp() + (ref - logps) - 1),
    ),
    right=(_k3_by_ratio, _k3_by_expm1, _k3_by_loop),
)  # fmt: skip


# ---- finite_difference ----


def finite_difference(function: Callable[[Tensor], Tensor], x: Tensor, h: float) -> Tensor:
    """The gradient of a scalar function at x (n,), by central differences."""
    slopes = []
    for place in range(len(x)):
        step = torch.zeros_like(x)
        step[place] = h
        slopes.append((function(x + step) - function(x - step)) / (2 * h))
    return torch.stack(slopes)


def _some_function(rng: random.Random) -> Call:
    a, b = rng.randrange(1, 4), rng.randrange(1, 4)

    def function(x: Tensor) -> Tensor:
        return (a * x**3).sum() + b * x[0] * x[-1]

    return call(function, numbers(rng, 3).double(), 1e-2)


def _difference_by_matrix(function, x, h):
    steps = h * torch.eye(len(x), dtype=x.dtype)
    return torch.stack([function(x + step) - function(x - step) for step in steps]) / (2 * h)


def _difference_by_list(function, x, h):
    slopes, values = [], x.tolist()
    for place, value in enumerate(values):
        up, down = list(values), list(values)
        up[place], down[place] = value + h, value - h
        slopes.append((function(torch.tensor(up, dtype=x.dtype)) - function(torch.tensor(down, dtype=x.dtype))).item())
    return torch.tensor(slopes, dtype=x.dtype) / h / 2


def _difference_by_clone(function, x, h):
    out = torch.zeros_like(x)
    for place in range(len(x)):
        moved = x.clone()
        moved[place] += h
        above = function(moved)
        moved[place] -= 2 * h
        out[place] = (above - function(moved)) / (2 * h)
    return out


def _one_sided(side: int) -> Callable:
    def wrong(function, x, h):
        steps = side * h * torch.eye(len(x), dtype=x.dtype)
        return torch.stack([function(x + step) - function(x) for step in steps]) / (side * h)

    return wrong


check_finite_difference = Exercise(
    "finite_difference",
    finite_difference,
    parts=(Part("functions of three numbers", 3, _some_function),),
    mistakes=(
        Mistake("the difference is one-sided", "Step to both sides: the error falls from h to h².",
                _one_sided(1)),
        Mistake("the difference is one-sided, downward", "Step to both sides: the error falls from h to h².",
                _one_sided(-1)),
        Mistake("the sign is turned", "Above minus below.",
                lambda function, x, h: -finite_difference(function, x, h)),
        Mistake("it is divided by 2 and multiplied by h", "`/ 2 * h` goes from left to right: `/ (2 * h)`.",
                lambda function, x, h: h * h * finite_difference(function, x, h)),
        Mistake("this is autograd's gradient", "It is to check autograd: call the function on both sides instead.",
                lambda function, x, h: torch.autograd.functional.jacobian(function, x)),
        Mistake("it is divided by h, not by 2h", "How far apart are the two points?",
                lambda function, x, h: 2 * finite_difference(function, x, h)),
        Mistake("it is not divided", "A slope is a difference *per step*.",
                lambda function, x, h: 2 * h * finite_difference(function, x, h)),
        Mistake("all places are moved at once", "One place at a time, the others stay.",
                lambda function, x, h: ((function(x + h) - function(x - h)) / (2 * h)).expand(len(x)).clone()),
    ),
    right=(_difference_by_matrix, _difference_by_list, _difference_by_clone),
    tolerance=1e-6,
)  # fmt: skip
