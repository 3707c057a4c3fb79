"""Exercises on the GRPO objective: completion masks, log-probabilities, clipping and KL."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from grpo_edu.checks.core import Call, Exercise, Mistake, Part, call
from grpo_edu.checks.inputs import gradient_of, numbers
from grpo_edu.checks.trained import TrainedExercise, trained_part
from grpo_edu.logprobs import logps_from_logits
from grpo_edu.losses import per_token_kl

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


def _logarithm_of(probabilities: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor, int], Tensor]:
    """A wrong answer that computes probabilities first; right as long as the logits are small."""

    def wrong(logits: Tensor, ids: Tensor, length: int) -> Tensor:
        return probabilities(logits[:, length - 1 : -1]).log().gather(2, ids[:, length:, None]).squeeze(2)

    return wrong


LARGE_LOGITS = call(
    torch.tensor([[[100.0, -100.0, 0.0], [-80.0, 90.0, 100.0], [0.0, 0.0, 0.0]]]), torch.tensor([[0, 1, 0]]), 1
)

check_completion_logps = Exercise(
    completion_logps,
    parts=(
        Part("prompts of one token to three", 2, lambda rng: _logits(rng, 2, 6, rng.randrange(1, 4))),
        Part("one row, or one completion token; large logits", 1, _few_logits, draws=12, always=(LARGE_LOGITS,)),
        Part("the gradient", 1, lambda rng: replace(_logits(rng, 2, 4, rng.randrange(1, 3)), ask=gradient_of)),
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
        "the exponentials of large logits overflow": Mistake(
            "exp(100) is more than fp32 holds. `log_softmax` subtracts the largest logit before it takes exponentials.",
            _logarithm_of(lambda logits: logits.exp() / logits.exp().sum(dim=-1, keepdim=True)),
            also=(_logarithm_of(lambda logits: logits.softmax(dim=-1)),),
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


check_clipped_loss = TrainedExercise(
    clipped_loss,
    parts=(
        Part("both signs, inside and outside the bounds", 3, _some_policies, draws=12),
        Part("the first update, where the ratio is 1", 1, _first_update),
        Part("the gradient", 1, lambda rng: replace(_some_policies(rng), ask=gradient_of)),
        trained_part("token loss"),
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
    parts=(
        Part("two policies", 2, _two_policies),
        Part("a policy and itself", 1, _equal_policies),
        Part("the gradient", 1, lambda rng: replace(_two_policies(rng), ask=gradient_of)),
    ),
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
