"""Exercises of notebook 04: log-probabilities, masks, ratio and clip, KL, and how tokens become one number."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import torch
from torch import Tensor

from grpo_edu.checks.core import Call, Exercise, Mistake, Part, call
from grpo_edu.logprobs import logps_from_logits
from grpo_edu.losses import per_token_kl, reduce_loss

# ---- inputs ----


def numbers(rng: random.Random, *shape: int, low: float = -2.0, high: float = 2.0) -> Tensor:
    """A tensor of this shape with two digits behind the point."""
    values = [round(rng.uniform(low, high), 2) for _ in range(math.prod(shape))]
    return torch.tensor(values).view(*shape)


def mask_of(lengths: list[int], width: int) -> Tensor:
    """(B, width), ones up to each length."""
    return (torch.arange(width)[None] < torch.tensor(lengths)[:, None]).long()


# ---- completion_mask ----

EOS, PAD = 7, 0


def completion_mask(completion_ids: Tensor, eos_token_id: int) -> Tensor:
    """(B, C), 1 through the first EOS inclusive; all ones where there is none."""
    is_eos = completion_ids == eos_token_id
    return (is_eos.cumsum(dim=1) - is_eos.long() == 0).long()


def _some_completions(rng: random.Random) -> Call:
    rows = []
    for length in (rng.randrange(1, 5), rng.randrange(1, 5), 6):
        tokens = [rng.randrange(1, 7) for _ in range(6)]
        if length < 6:
            tokens[length] = EOS
            tokens[length + 1 :] = [rng.choice([PAD, EOS])] * (5 - length)
        rows.append(tokens)
    rng.shuffle(rows)
    return call(torch.tensor(rows), EOS)


def _mask_by_loop(completion_ids: Tensor, eos_token_id: int) -> Tensor:
    mask = torch.zeros_like(completion_ids)
    for row, ids in enumerate(completion_ids.tolist()):
        length = ids.index(eos_token_id) + 1 if eos_token_id in ids else len(ids)
        mask[row, :length] = 1
    return mask


def _mask_by_place(completion_ids: Tensor, eos_token_id: int) -> Tensor:
    width = completion_ids.shape[1]
    is_eos = completion_ids == eos_token_id
    first = torch.where(is_eos.any(dim=1), is_eos.int().argmax(dim=1), width)
    return (torch.arange(width)[None] <= first[:, None]).long()


def _mask_by_product(completion_ids: Tensor, eos_token_id: int) -> Tensor:
    alive = (completion_ids != eos_token_id).long().cumprod(dim=1)
    return torch.cat([torch.ones_like(alive[:, :1]), alive[:, :-1]], dim=1)


check_completion_mask = Exercise(
    "completion_mask",
    completion_mask,
    parts=(Part("ends at different places, and none at all", 3, _some_completions),),
    mistakes=(
        Mistake("the end token is masked out", "Through the first end token, *inclusive*: stopping is to be learned.",
                lambda ids, eos: (ids != eos).long().cumprod(dim=1)),
        Mistake("only end tokens are masked out", "What comes behind the first end token was never said.",
                lambda ids, eos: (ids != eos).long()),
        Mistake("padding alone is masked out", "A pad token may be the end token as well: go by the first end token.",
                lambda ids, eos: (ids != PAD).long()),
        Mistake("the mask is shifted by one", "The first token of a completion counts.",
                lambda ids, eos: torch.cat([torch.zeros_like(ids[:, :1]), completion_mask(ids, eos)[:, :-1]], dim=1)),
        Mistake("a completion without an end counts for nothing", "Where there is no end token, every token was said.",
                lambda ids, eos: completion_mask(ids, eos) * (ids == eos).any(dim=1, keepdim=True)),
    ),
    right=(_mask_by_loop, _mask_by_place, _mask_by_product),
)  # fmt: skip


# ---- completion_logps ----


def completion_logps(logits: Tensor, input_ids: Tensor, prompt_length: int) -> Tensor:
    """(B, C), the log-probability of each completion token; row t of the logits predicts token t + 1."""
    return logps_from_logits(logits[:, prompt_length - 1 : -1], input_ids[:, prompt_length:])


def _some_logits(rng: random.Random) -> Call:
    rows, length, vocabulary, prompt = 2, 6, 5, rng.randrange(1, 4)
    ids = torch.tensor([[rng.randrange(vocabulary) for _ in range(length)] for _ in range(rows)])
    return call(numbers(rng, rows, length, vocabulary), ids, prompt)


def _logps_by_loop(logits: Tensor, input_ids: Tensor, prompt_length: int) -> Tensor:
    rows = []
    for row_logits, ids in zip(logits.double(), input_ids.tolist(), strict=True):
        row = []
        for place in range(prompt_length, len(ids)):
            scores = row_logits[place - 1]
            row.append((scores[ids[place]] - scores.exp().sum().log()).item())
        rows.append(row)
    return torch.tensor(rows)


def _logps_by_softmax(logits: Tensor, input_ids: Tensor, prompt_length: int) -> Tensor:
    logps = logits.log_softmax(dim=-1)[:, :-1].gather(2, input_ids[:, 1:, None]).squeeze(2)
    return logps[:, prompt_length - 1 :]


def _logps_by_cross_entropy(logits: Tensor, input_ids: Tensor, prompt_length: int) -> Tensor:
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), input_ids[:, 1:], reduction="none")
    return -loss[:, prompt_length - 1 :]


check_completion_logps = Exercise(
    "completion_logps",
    completion_logps,
    parts=(Part("prompts of one token to three", 4, _some_logits),),
    mistakes=(
        Mistake("the row of the token itself is read", "The logits at a token predict the next one.",
                lambda logits, ids, length: logps_from_logits(logits[:, length:], ids[:, length:])),
        Mistake("the prompt is scored as well", "Only completion tokens were sampled.",
                lambda logits, ids, length: logps_from_logits(logits[:, :-1], ids[:, 1:])),
        Mistake("these are logits, no log-probabilities", "What makes the probabilities of a row add up to 1?",
                lambda logits, ids, length: logits[:, length - 1 : -1].gather(2, ids[:, length:, None]).squeeze(2)),
        Mistake("these are probabilities, without the logarithm", "A log-probability is never positive.",
                lambda logits, ids, length: completion_logps(logits, ids, length).exp()),
        Mistake("the first completion token is missing", "The last token of the prompt predicts it.",
                lambda logits, ids, length: completion_logps(logits, ids, length)[:, 1:]),
        Mistake("softmax runs over the wrong dimension", "The probabilities of the vocabulary add up to 1, dim=-1.",
                lambda logits, ids, length: logits.log_softmax(dim=1)[:, length - 1 : -1].gather(
                    2, ids[:, length:, None]).squeeze(2)),
    ),
    right=(_logps_by_loop, _logps_by_softmax, _logps_by_cross_entropy),
)  # fmt: skip


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
        Part("both signs, inside and outside the bounds", 4, _some_policies),
        Part("the first update, where the ratio is 1", 1, _first_update),
    ),
    mistakes=(
        Mistake("the clip has no min", "A clip alone also blocks the way home. Take the smaller of the two.",
                _with_ratio(lambda ratio, gain, eps: -ratio.clamp(1 - eps, 1 + eps) * gain)),
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
        Mistake("that is k2", "k2 is half the square. k3 has an exponential.",
                lambda logps, ref: (logps - ref).square() / 2),
        Mistake("the 1 is missing", "What must come out for a policy and itself?",
                lambda logps, ref: (ref - logps).exp() - (ref - logps)),
        Mistake("the linear term has the wrong sign", "Near 0 an exponential is 1 + x: what has to be taken away?",
                lambda logps, ref: (ref - logps).exp() + (ref - logps) - 1),
    ),
    right=(_k3_by_ratio, _k3_by_expm1, _k3_by_loop),
)  # fmt: skip


# ---- aggregate ----


def aggregate(per_token_loss: Tensor, mask: Tensor, loss_type: str, max_completion_length: int) -> Tensor:
    """The package's `reduce_loss` for "grpo", "dapo" and "dr_grpo"."""
    return reduce_loss(per_token_loss, mask, loss_type=loss_type, max_completion_length=max_completion_length)


def _losses_for(loss_type: str) -> Callable[[random.Random], Call]:
    def draw(rng: random.Random) -> Call:
        lengths = [rng.randrange(1, 4), rng.randrange(1, 4), 5]
        return call(numbers(rng, 3, 5), mask_of(lengths, 5), loss_type, rng.choice([6, 8, 10]))

    return draw


def _aggregate_by_loop(per_token_loss, mask, loss_type, max_completion_length):
    rows = [
        [value for value, counts in zip(row, counted, strict=True) if counts]
        for row, counted in zip(per_token_loss.tolist(), mask.tolist(), strict=True)
    ]
    tokens = sum(rows, [])
    if loss_type == "grpo":
        return sum(sum(row) / len(row) for row in rows) / len(rows)
    return sum(tokens) / (len(tokens) if loss_type == "dapo" else len(rows) * max_completion_length)


def _aggregate_by_weights(per_token_loss, mask, loss_type, max_completion_length):
    weights = {
        "grpo": mask / mask.sum(dim=1, keepdim=True) / len(mask),
        "dapo": mask / mask.sum(),
        "dr_grpo": mask / (len(mask) * max_completion_length),
    }
    return (weights[loss_type] * per_token_loss).sum()


def _aggregate_by_einsum(per_token_loss, mask, loss_type, max_completion_length):
    sums, counts = torch.einsum("bc,bc->b", per_token_loss, mask.float()), mask.sum(dim=1)
    if loss_type == "grpo":
        return (sums / counts).mean()
    return sums.sum() / (counts.sum() if loss_type == "dapo" else mask.shape[0] * max_completion_length)


def _unmasked(per_token_loss, mask, loss_type, max_completion_length):
    return aggregate(per_token_loss, torch.ones_like(mask), loss_type, max_completion_length)


def _batch_width(per_token_loss, mask, loss_type, max_completion_length):
    return aggregate(per_token_loss, mask, loss_type, mask.shape[1])


def _always(loss_type: str) -> Callable:
    def wrong(per_token_loss, mask, asked, max_completion_length):
        return aggregate(per_token_loss, mask, loss_type, max_completion_length)

    return wrong


check_aggregate = Exercise(
    "aggregate",
    aggregate,
    parts=(
        Part("grpo", 2, _losses_for("grpo")),
        Part("dapo", 1, _losses_for("dapo")),
        Part("dr_grpo", 2, _losses_for("dr_grpo")),
    ),
    mistakes=(
        Mistake("padding counts", "Multiply by the mask, and divide by what is left.", _unmasked),
        Mistake("the width of this batch is taken for the limit", "Dr. GRPO divides by a constant that no batch "
                "changes: max_completion_length.", _batch_width),
        Mistake("all tokens weigh alike, whatever was asked", "\"grpo\" takes the mean of each row first.",
                _always("dapo")),
        Mistake("rows weigh alike, whatever was asked", "\"dapo\" counts tokens, not rows.", _always("grpo")),
        Mistake("the sum is not divided", "Divide by what the loss type names.",
                lambda loss, mask, loss_type, limit: (loss * mask).sum()),
    ),
    right=(_aggregate_by_loop, _aggregate_by_weights, _aggregate_by_einsum),
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


def _forward_difference(function, x, h):
    steps = h * torch.eye(len(x), dtype=x.dtype)
    return torch.stack([function(x + step) - function(x) for step in steps]) / h


check_finite_difference = Exercise(
    "finite_difference",
    finite_difference,
    parts=(Part("functions of three numbers", 3, _some_function),),
    mistakes=(
        Mistake("the difference is one-sided", "Step to both sides: the error falls from h to h².",
                _forward_difference),
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
