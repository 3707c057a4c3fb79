"""Exercises on the GRPO objective: completion masks, log-probabilities, clipping, KL, reduction and the first loss."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from grpo_edu.checks.core import Call, Exercise, Mistake, Part, call
from grpo_edu.checks.inputs import Polynomial, mask_of, numbers
from grpo_edu.logprobs import logps_from_logits
from grpo_edu.losses import per_token_kl, reduce_loss

# ---- completion_mask ----


EOS, PAD = 7, 0


def completion_mask(completion_ids: Tensor, eos_token_id: int) -> Tensor:
    """(B, C), 1 through the first EOS inclusive; all ones where there is none."""
    is_eos = completion_ids == eos_token_id
    return (is_eos.cumsum(dim=1) - is_eos.long() == 0).long()


def _some_completions(rng: random.Random) -> Call:
    rows = [[rng.randrange(1, 7) for _ in range(6)]]
    for padding in (PAD, EOS):
        length = rng.randrange(1, 5)
        rows.append([*(rng.randrange(1, 7) for _ in range(length)), EOS, *[padding] * (5 - length)])
    rng.shuffle(rows)
    return call(torch.tensor(rows), EOS)


check_completion_mask = Exercise(
    completion_mask,
    parts=(Part("ends at different places, and none at all", 3, _some_completions),),
    mistakes={
        "the end token is masked out": Mistake(
            "Through the first end token, *inclusive*: stopping is to be learned.",
            lambda ids, eos: (ids != eos).long().cumprod(dim=1),
        ),
        "padding counts up to a second end token": Mistake(
            "`cumsum` counts the place itself: at the first end token "
            "it is 1, and behind it as well. Count those *before* a place.",
            lambda ids, eos: ((ids == eos).cumsum(dim=1) <= 1).long(),
        ),
        "ones and zeros have changed places": Mistake(
            "1 where a token counts.", lambda ids, eos: 1 - completion_mask(ids, eos)
        ),
        "it is counted along the batch": Mistake(
            "A row is a completion: dim=1.", lambda ids, eos: completion_mask(ids.T, eos).T
        ),
        "all end tokens count, and what lies between": Mistake(
            "Through the *first* end token.", lambda ids, eos: ((ids == eos).flip(1).cumsum(dim=1).flip(1) > 0).long()
        ),
        "a completion without an end is one token long": Mistake(
            "`argmax` of a row of zeros is 0. Where there is no end token, every token was said.",
            lambda ids, eos: (torch.arange(ids.shape[1]) <= (ids == eos).int().argmax(dim=1)[:, None]).long(),
        ),
        "only end tokens are masked out": Mistake(
            "What comes behind the first end token was never said.", lambda ids, eos: (ids != eos).long()
        ),
        "padding alone is masked out": Mistake(
            "A pad token may be the end token as well: go by the first end token.", lambda ids, eos: (ids != PAD).long()
        ),
        "the mask is shifted by one": Mistake(
            "The first token of a completion counts.",
            lambda ids, eos: torch.cat([torch.zeros_like(ids[:, :1]), completion_mask(ids, eos)[:, :-1]], dim=1),
        ),
        "a completion without an end counts for nothing": Mistake(
            "Where there is no end token, every token was said.",
            lambda ids, eos: completion_mask(ids, eos) * (ids == eos).any(dim=1, keepdim=True),
        ),
    },
)


# ---- completion_logps ----


def completion_logps(logits: Tensor, input_ids: Tensor, prompt_length: int) -> Tensor:
    """(B, C), the log-probability of each completion token; row t of the logits predicts token t + 1."""
    return logps_from_logits(logits[:, prompt_length - 1 : -1], input_ids[:, prompt_length:])


def _logits(rng: random.Random, rows: int, length: int, prompt: int) -> Call:
    vocabulary = 5
    ids = torch.tensor([[rng.randrange(vocabulary) for _ in range(length)] for _ in range(rows)])
    return call(numbers(rng, rows, length, vocabulary), ids, prompt)


def _few_logits(rng: random.Random) -> Call:
    rows, tokens = rng.choice([(1, 3), (3, 1)])
    return _logits(rng, rows, tokens + 2, 2)


check_completion_logps = Exercise(
    completion_logps,
    parts=(
        Part("prompts of one token to three", 3, lambda rng: _logits(rng, 2, 6, rng.randrange(1, 4))),
        Part("one row, or one completion token", 1, _few_logits, draws=12),
    ),
    mistakes={
        "the row of the token itself is read": Mistake(
            "The logits at a token predict the next one.",
            lambda logits, ids, length: logps_from_logits(logits[:, length:], ids[:, length:]),
        ),
        "the prompt is scored as well": Mistake(
            "Only completion tokens were sampled.",
            lambda logits, ids, length: logps_from_logits(logits[:, :-1], ids[:, 1:]),
        ),
        "these are logits, no log-probabilities": Mistake(
            "What makes the probabilities of a row add up to 1?",
            lambda logits, ids, length: logits[:, length - 1 : -1].gather(2, ids[:, length:, None]).squeeze(2),
        ),
        "these are probabilities, without the logarithm": Mistake(
            "A log-probability is never positive.",
            lambda logits, ids, length: completion_logps(logits, ids, length).exp(),
        ),
        "the first completion token is missing": Mistake(
            "The last token of the prompt predicts it.",
            lambda logits, ids, length: completion_logps(logits, ids, length)[:, 1:],
        ),
        "the ids are shifted as well": Mistake(
            "Only the logits begin one place earlier: the ids are those of the completion.",
            lambda logits, ids, length: logps_from_logits(logits[:, length - 1 : -1], ids[:, length - 1 : -1]),
        ),
        "the likeliest token is scored": Mistake(
            "Not what the model would have said: what stands in input_ids.",
            lambda logits, ids, length: logits[:, length - 1 : -1].log_softmax(dim=-1).amax(dim=-1),
        ),
        "the sign is turned": Mistake(
            "A log-probability is never positive.", lambda logits, ids, length: -completion_logps(logits, ids, length)
        ),
        "`squeeze()` drops the batch as well": Mistake(
            "With one row, or one token, it drops that dimension, too: say which, `squeeze(2)`.",
            lambda logits, ids, length: completion_logps(logits, ids, length).squeeze(),
        ),
        "softmax runs over the places": Mistake(
            "The probabilities of the vocabulary add up to 1, dim=-1.",
            lambda logits, ids, length: (
                logits[:, length - 1 : -1].log_softmax(dim=1).gather(2, ids[:, length:, None]).squeeze(2)
            ),
        ),
        "softmax runs over the wrong dimension": Mistake(
            "The probabilities of the vocabulary add up to 1, dim=-1.",
            lambda logits, ids, length: (
                logits.log_softmax(dim=1)[:, length - 1 : -1].gather(2, ids[:, length:, None]).squeeze(2)
            ),
        ),
    },
)


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


def _with_ratio(make: Callable[[Tensor, Tensor, float], Tensor]) -> Callable:
    """A wrong answer that begins as the right one does."""

    def wrong(per_token_logps, old_per_token_logps, advantages, epsilon):
        return make((per_token_logps - old_per_token_logps).exp(), advantages[:, None], epsilon)

    return wrong


check_clipped_loss = Exercise(
    clipped_loss,
    parts=(
        Part("both signs, inside and outside the bounds", 4, _some_policies, draws=12),
        Part("the first update, where the ratio is 1", 1, _first_update),
    ),
    mistakes={
        "the clip has no min": Mistake(
            "A clip alone also blocks the way home. Take the smaller of the two.",
            _with_ratio(lambda ratio, gain, eps: -ratio.clamp(1 - eps, 1 + eps) * gain),
        ),
        "min is taken before the advantage comes in": Mistake(
            "Where the advantage is negative, the smaller ratio is the larger gain: multiply both first.",
            _with_ratio(lambda ratio, gain, eps: -torch.min(ratio, ratio.clamp(1 - eps, 1 + eps)) * gain),
        ),
        "the clipped ratio has no advantage": Mistake(
            "min compares two gains: ρ A and clip(ρ) A.",
            _with_ratio(lambda ratio, gain, eps: -torch.min(ratio * gain, ratio.clamp(1 - eps, 1 + eps))),
        ),
        "the product is clipped, not the ratio": Mistake(
            "Clip ρ, then multiply.",
            _with_ratio(lambda ratio, gain, eps: -torch.min(ratio * gain, (ratio * gain).clamp(1 - eps, 1 + eps))),
        ),
        "the bounds lie around 0": Mistake(
            "A ratio is near 1: from 1 − ε to 1 + ε.",
            _with_ratio(lambda ratio, gain, eps: -torch.min(ratio * gain, ratio.clamp(-eps, eps) * gain)),
        ),
        "nothing is clipped": Mistake(
            "What holds the ratio near 1?", _with_ratio(lambda ratio, gain, eps: -ratio * gain)
        ),
        "max stands where min should": Mistake(
            "The objective is the *smaller* of two gains.",
            _with_ratio(lambda ratio, gain, eps: -torch.max(ratio * gain, ratio.clamp(1 - eps, 1 + eps) * gain)),
        ),
        "the sign is missing": Mistake(
            "An optimizer makes a loss small; the objective is to be large.",
            _with_ratio(lambda ratio, gain, eps: torch.min(ratio * gain, ratio.clamp(1 - eps, 1 + eps) * gain)),
        ),
        "the ratio is upside down": Mistake(
            "The policy that learns stands above the one that sampled.",
            lambda new, old, advantages, epsilon: clipped_loss(old, new, advantages, epsilon),
        ),
        "the ratio has no exponential": Mistake(
            "These are *log*-probabilities: what undoes a logarithm?",
            lambda new, old, advantages, epsilon: (
                -torch.min(
                    (new - old) * advantages[:, None], (new - old).clamp(1 - epsilon, 1 + epsilon) * advantages[:, None]
                )
            ),
        ),
    },
)


# ---- k3 ----


def k3(per_token_logps: Tensor, ref_per_token_logps: Tensor) -> Tensor:
    """The package's `per_token_kl`."""
    return per_token_kl(per_token_logps, ref_per_token_logps)


def _two_policies(rng: random.Random) -> Call:
    logps = numbers(rng, 2, 3, low=-3.0, high=-0.2)
    return call(logps, logps + numbers(rng, 2, 3, low=-1.5, high=1.5))


def _equal_policies(rng: random.Random) -> Call:
    logps = numbers(rng, 2, 3, low=-3.0, high=-0.2)
    return call(logps, logps.clone())


check_k3 = Exercise(
    k3,
    parts=(Part("two policies", 3, _two_policies), Part("a policy and itself", 1, _equal_policies)),
    mistakes={
        "the two policies have changed places": Mistake(
            "k3's ratio is reference over policy.", lambda logps, ref: (logps - ref).exp() - (logps - ref) - 1
        ),
        "that is k1": Mistake("k1 can be negative on a single token. k3 cannot.", lambda logps, ref: logps - ref),
        "that is d alone": Mistake(
            "d is negative where the policy is the likelier one. k3 never is.", lambda logps, ref: ref - logps
        ),
        "the 1 is added": Mistake(
            "What must come out for a policy and itself?", lambda logps, ref: (ref - logps).exp() - (ref - logps) + 1
        ),
        "that is k2": Mistake(
            "k2 is half the square. k3 has an exponential.", lambda logps, ref: (logps - ref).square() / 2
        ),
        "the 1 is missing": Mistake(
            "What must come out for a policy and itself?", lambda logps, ref: (ref - logps).exp() - (ref - logps)
        ),
        "the linear term has the wrong sign": Mistake(
            "Near 0 an exponential is 1 + x: what has to be taken away?",
            lambda logps, ref: (ref - logps).exp() + (ref - logps) - 1,
        ),
    },
)


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
    function = Polynomial(rng.randrange(1, 4), rng.randrange(1, 4))
    return call(function, numbers(rng, 3).double(), 1e-2)


def _one_sided(side: int) -> Callable:
    def wrong(function, x, h):
        steps = side * h * torch.eye(len(x), dtype=x.dtype)
        return torch.stack([function(x + step) - function(x) for step in steps]) / (side * h)

    return wrong


check_finite_difference = Exercise(
    finite_difference,
    parts=(Part("functions of three numbers", 3, _some_function),),
    mistakes={
        "the difference is one-sided": Mistake("Step to both sides: the error falls from h to h².", _one_sided(1)),
        "the difference is one-sided, downward": Mistake(
            "Step to both sides: the error falls from h to h².", _one_sided(-1)
        ),
        "the sign is turned": Mistake("Above minus below.", lambda function, x, h: -finite_difference(function, x, h)),
        "it is divided by 2 and multiplied by h": Mistake(
            "`/ 2 * h` goes from left to right: `/ (2 * h)`.",
            lambda function, x, h: h * h * finite_difference(function, x, h),
        ),
        "this is autograd's gradient": Mistake(
            "It is to check autograd: call the function on both sides instead.",
            lambda function, x, h: torch.autograd.functional.jacobian(function, x),
        ),
        "it is divided by h, not by 2h": Mistake(
            "How far apart are the two points?", lambda function, x, h: 2 * finite_difference(function, x, h)
        ),
        "it is not divided": Mistake(
            "A slope is a difference *per step*.", lambda function, x, h: 2 * h * finite_difference(function, x, h)
        ),
        "all places are moved at once": Mistake(
            "One place at a time, the others stay.",
            lambda function, x, h: ((function(x + h) - function(x - h)) / (2 * h)).expand(len(x)).clone(),
        ),
    },
    tolerance=1e-6,
)


# ---- aggregate ----


def aggregate(per_token_loss: Tensor, mask: Tensor, loss_type: str, max_completion_length: int) -> Tensor:
    """The package's `reduce_loss` for "grpo", "dapo" and "dr_grpo"."""
    return reduce_loss(per_token_loss, mask, loss_type=loss_type, max_completion_length=max_completion_length)


def _losses_for(loss_type: str) -> Callable[[random.Random], Call]:
    def draw(rng: random.Random) -> Call:
        lengths = [rng.randrange(1, 4), rng.randrange(1, 4), 5]
        return call(numbers(rng, 3, 5), mask_of(lengths, 5), loss_type, rng.choice([6, 8, 10]))

    return draw


check_aggregate = Exercise(
    aggregate,
    parts=(
        Part("grpo", 2, _losses_for("grpo")),
        Part("dapo", 1, _losses_for("dapo")),
        Part("dr_grpo", 2, _losses_for("dr_grpo")),
    ),
    mistakes={
        "padding counts": Mistake(
            "Multiply by the mask, and divide by what is left.",
            lambda loss, mask, *rest: aggregate(loss, torch.ones_like(mask), *rest),
        ),
        "padding counts in the number of tokens": Mistake(
            "Divide by the number of tokens with mask 1: of the row, or of all.",
            lambda loss, mask, loss_type, limit: (
                (loss * mask).mean() if loss_type != "dr_grpo" else aggregate(loss, mask, loss_type, limit)
            ),
        ),
        "the number of rows is missing": Mistake(
            '"grpo" is a *mean* over the rows, and "dr_grpo" divides by B as well as by the limit.',
            lambda loss, mask, loss_type, limit: (
                aggregate(loss, mask, loss_type, limit) * (1 if loss_type == "dapo" else len(mask))
            ),
        ),
        "the limit is missing": Mistake(
            '"dr_grpo" divides by B · max_completion_length.',
            lambda loss, mask, loss_type, limit: aggregate(
                loss, mask, loss_type, 1 if loss_type == "dr_grpo" else limit
            ),
        ),
        "the width of this batch is taken for the limit": Mistake(
            "Dr. GRPO divides by a constant that no batch changes: max_completion_length.",
            lambda loss, mask, loss_type, limit: aggregate(loss, mask, loss_type, mask.shape[1]),
        ),
        "all tokens weigh alike, whatever was asked": Mistake(
            '"grpo" takes the mean of each row first.',
            lambda loss, mask, loss_type, limit: aggregate(loss, mask, "dapo", limit),
        ),
        "rows weigh alike, whatever was asked": Mistake(
            '"dapo" counts tokens, not rows.', lambda loss, mask, loss_type, limit: aggregate(loss, mask, "grpo", limit)
        ),
        "the sum is not divided": Mistake(
            "Divide by what the loss type names.", lambda loss, mask, loss_type, limit: (loss * mask).sum()
        ),
    },
)


# ---- first_loss ----


def first_loss(advantages: list[float], lengths: list[int]) -> tuple[float, float, str]:
    """(the loss of "grpo", that of "dapo", which completions were longer), where every ratio is 1."""
    of_grpo = -sum(advantages) / len(advantages)
    of_dapo = -sum(a * length for a, length in zip(advantages, lengths, strict=True)) / sum(lengths)
    return of_grpo, of_dapo, longer(of_dapo)


def longer(of_dapo: float) -> str:
    """What the first loss of "dapo" tells."""
    if abs(of_dapo) < 1e-6:
        return "neither"
    return "good" if of_dapo < 0 else "bad"


def _one_group(rng: random.Random, size: int = 4) -> tuple[list[float], list[int]]:
    """Rewards of 0 and 1 minus their mean, stretched; lengths that all differ."""
    right = rng.randrange(1, size)
    rewards = [1.0] * right + [0.0] * (size - right)
    stretch = rng.choice([1.0, 2.0])
    advantages = [stretch * (reward - right / size) for reward in rng.sample(rewards, size)]
    return advantages, rng.sample(range(2, 30), size)


def _different_lengths(rng: random.Random) -> Call:
    """Every second time the fewer completions are the longer ones, and the more have more tokens together."""
    fewer = rng.random() < 0.5
    while True:
        advantages, lengths = _one_group(rng)
        verdict = longer(first_loss(advantages, lengths)[1])
        if verdict != "neither" and (not fewer or verdict != _longer_together(advantages, lengths)[2]):
            return call(advantages, lengths)


def _equal_lengths(rng: random.Random) -> Call:
    """Thirds do not add up to 0: what comes out is a rounding error."""
    while True:
        advantages, lengths = _one_group(rng, 3)
        if first_loss(advantages, lengths[:1] * 3)[1]:
            return call(advantages, lengths[:1] * 3)


def _first_with(of_dapo: Callable[[list[float], list[int]], float]) -> Callable:
    """Another loss of "dapo", and what it would tell."""

    def wrong(advantages, lengths):
        return first_loss(advantages, lengths)[0], of_dapo(advantages, lengths), longer(of_dapo(advantages, lengths))

    return wrong


def _tilt(advantages: list[float], lengths: list[int]) -> float:
    return sum(a * length for a, length in zip(advantages, lengths, strict=True))


def _told(change: Callable[[float, float, str], tuple]) -> Callable:
    """A wrong answer made of the right one."""
    return lambda advantages, lengths: change(*first_loss(advantages, lengths))


def _longer_together(advantages, lengths):
    good, bad = (sum(n for a, n in zip(advantages, lengths, strict=True) if sign * a > 0) for sign in (1, -1))
    verdict = "neither" if good == bad else ("good" if good > bad else "bad")
    return *first_loss(advantages, lengths)[:2], verdict


check_first_loss = Exercise(
    first_loss,
    parts=(
        Part("completions of different lengths", 3, _different_lengths, draws=16),
        Part("completions of equal length", 1, _equal_lengths),
    ),
    mistakes={
        "the sign is missing": Mistake(
            "Where the ratio is 1, the loss of a token is *minus* its advantage.",
            _first_with(lambda advantages, lengths: _tilt(advantages, lengths) / sum(lengths)),
        ),
        "the losses have no minus": Mistake(
            "Where the ratio is 1, the loss of a token is *minus* its advantage.",
            _told(lambda of_grpo, of_dapo, verdict: (-of_grpo, -of_dapo, verdict)),
        ),
        "a rounding error tells something": Mistake(
            'Thirds do not add up to 0: within a millionth it is "neither".',
            _told(
                lambda of_grpo, of_dapo, _: (
                    of_grpo,
                    of_dapo,
                    "good" if of_dapo < 0 else "bad" if of_dapo else "neither",
                )
            ),
        ),
        "the tokens of each side are added up": Mistake(
            "Many short completions have many tokens, too: read the verdict from the sign of the second number.",
            _longer_together,
        ),
        'the verdict is read from "grpo"': Mistake(
            "That number is always 0. Read it from the second one.",
            _told(lambda of_grpo, of_dapo, verdict: (of_grpo, of_dapo, "neither")),
        ),
        '"dapo" weighs completions alike': Mistake(
            'Each token of a completion has its advantage, and "dapo" takes the mean over tokens.',
            _first_with(lambda advantages, lengths: -sum(advantages) / len(advantages)),
        ),
        '"dapo" is divided by the number of completions': Mistake(
            "Sum over tokens, divided by the number of tokens.",
            _first_with(lambda advantages, lengths: -_tilt(advantages, lengths) / len(lengths)),
        ),
        '"dapo" is not divided': Mistake(
            "Sum over tokens, divided by the number of tokens.",
            _first_with(lambda advantages, lengths: -_tilt(advantages, lengths)),
        ),
        '"grpo" weighs tokens alike': Mistake(
            '"grpo" takes each completion\'s mean first: long or short, it counts once.',
            _told(lambda of_grpo, of_dapo, verdict: (of_dapo, of_dapo, verdict)),
        ),
        "the verdict is upside down": Mistake(
            "A completion with a positive advantage has a negative loss.",
            _told(lambda of_grpo, of_dapo, verdict: (of_grpo, of_dapo, longer(-of_dapo))),
        ),
    },
)
