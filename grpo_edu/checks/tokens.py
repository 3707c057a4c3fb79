"""Exercises of notebook 04, first part: which tokens count, and their log-probabilities."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from grpo_edu.checks.core import Call, Exercise, Mistake, Part, call
from grpo_edu.checks.objective import numbers
from grpo_edu.logprobs import logps_from_logits

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
        Mistake("padding counts up to a second end token", "`cumsum` counts the place itself: at the first end token "
                "it is 1, and behind it as well. Count those *before* a place.",
                lambda ids, eos: ((ids == eos).cumsum(dim=1) <= 1).long()),
        Mistake("ones and zeros have changed places", "1 where a token counts.",
                lambda ids, eos: 1 - completion_mask(ids, eos)),
        Mistake("it is counted along the batch", "A row is a completion: dim=1.",
                lambda ids, eos: completion_mask(ids.T, eos).T),
        Mistake("all end tokens count, and what lies between", "Through the *first* end token.",
                lambda ids, eos: ((ids == eos).flip(1).cumsum(dim=1).flip(1) > 0).long()),
        Mistake("a completion without an end is one token long", "`argmax` of a row of zeros is 0. Where there is no "
                "end token, every token was said.",
                lambda ids, eos: (torch.arange(ids.shape[1]) <= (ids == eos).int().argmax(dim=1)[:, None]).long()),
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


def _logits(rng: random.Random, rows: int, length: int, prompt: int) -> Call:
    vocabulary = 5
    ids = torch.tensor([[rng.randrange(vocabulary) for _ in range(length)] for _ in range(rows)])
    return call(numbers(rng, rows, length, vocabulary), ids, prompt)


def _some_logits(rng: random.Random) -> Call:
    return _logits(rng, 2, 6, rng.randrange(1, 4))


def _few_logits(rng: random.Random) -> Call:
    rows, tokens = rng.choice([(1, 3), (3, 1)])
    return _logits(rng, rows, tokens + 2, 2)


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
    parts=(
        Part("prompts of one token to three", 3, _some_logits),
        Part("one row, or one completion token", 1, _few_logits, draws=12),
    ),
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
        Mistake("the ids are shifted as well", "Only the logits begin one place earlier: the ids are those of the "
                "completion.",
                lambda logits, ids, length: logps_from_logits(logits[:, length - 1 : -1], ids[:, length - 1 : -1])),
        Mistake("the likeliest token is scored", "Not what the model would have said: what stands in input_ids.",
                lambda logits, ids, length: logits[:, length - 1 : -1].log_softmax(dim=-1).amax(dim=-1)),
        Mistake("the sign is turned", "A log-probability is never positive.",
                lambda logits, ids, length: -completion_logps(logits, ids, length)),
        Mistake("`squeeze()` drops the batch as well", "With one row, or one token, it drops that dimension, too: say "
                "which, `squeeze(2)`.", lambda logits, ids, length: completion_logps(logits, ids, length).squeeze()),
        Mistake("softmax runs over the places", "The probabilities of the vocabulary add up to 1, dim=-1.",
                lambda logits, ids, length: logits[:, length - 1 : -1].log_softmax(dim=1).gather(
                    2, ids[:, length:, None]).squeeze(2)),
        Mistake("softmax runs over the wrong dimension", "The probabilities of the vocabulary add up to 1, dim=-1.",
                lambda logits, ids, length: logits.log_softmax(dim=1)[:, length - 1 : -1].gather(
                    2, ids[:, length:, None]).squeeze(2)),
    ),
    right=(_logps_by_loop, _logps_by_softmax, _logps_by_cross_entropy),
)  # fmt: skip
