"""Exercises of notebook 10, fourth part: checks of one batch, token by token, which must catch their patients."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from grpo_edu import trainer
from grpo_edu.broken_stages import eos_as_padding, shifted_mask
from grpo_edu.checks.core import Call, Exercise, Mistake, Part, call
from grpo_edu.checks.objective import numbers
from grpo_edu.checks.tokens import completion_mask
from grpo_edu.config import GRPOConfig
from grpo_edu.problems import Problem
from grpo_edu.rewards import accuracy_reward
from grpo_edu.rollout import Rollout

# ---- mask_is_right ----

EOS, PAD = 2, 0


def mask_is_right(completion_ids: Tensor, loss_mask: Tensor, eos_token_id: int) -> bool:
    """Whether the mask is 1 from the first token through the first EOS, inclusive, and 0 behind it."""
    return torch.equal(loss_mask.long(), completion_mask(completion_ids, eos_token_id))


def _rollout(rng: random.Random, pad: int) -> Rollout:
    """Four completions, one longer than the others; in every other batch it has no end."""
    rows = [[rng.randrange(3, 10) for _ in range(rng.randrange(1, 4))] + [EOS] for _ in range(3)]
    rows.append([rng.randrange(3, 10) for _ in range(5)] + rng.choice([[EOS], []]))
    rng.shuffle(rows)
    longest = max(map(len, rows))
    ids = torch.tensor([row + [pad] * (longest - len(row)) for row in rows])
    ones = torch.ones(4, 1).long()
    return Rollout(
        prompts=["?"] * 4, completions=[""] * 4, prompt_ids=ones, prompt_mask=ones, completion_ids=ids,
        completion_mask=completion_mask(ids, EOS), sampling_per_token_logps=torch.zeros(4, longest),
        is_truncated=torch.tensor([EOS not in row for row in rows]), num_generations=4,
    )  # fmt: skip


def _mask_from(stage: Callable, rollout: Rollout) -> Tensor:
    config = GRPOConfig(num_generations=4, prompts_per_step=1)
    return stage(rollout, [Problem("?", "1", "basic", "#### 1")], [accuracy_reward], config).loss_mask


def _masks(spoil: Callable[[random.Random, Rollout], Tensor]) -> Callable[[random.Random], Call]:
    """Half of the masks are healthy, as the trainer makes them."""

    def draw(rng: random.Random) -> Call:
        rollout = _rollout(rng, rng.choice([EOS, PAD]))
        mask = _mask_from(trainer.score_rollout, rollout) if rng.random() < 0.5 else spoil(rng, rollout)
        return call(rollout.completion_ids, mask, EOS)

    return draw


def _row_with_room(rng: random.Random, mask: Tensor) -> int:
    return rng.choice([row for row, last in enumerate(mask[:, -1].tolist()) if not last])


def _ones_behind(rng: random.Random, rollout: Rollout) -> Tensor:
    """Ones everywhere, or everywhere in one row that should end sooner."""
    mask = rollout.completion_mask.clone()
    rows: list[slice | int] = [slice(None), _row_with_room(rng, mask)]
    mask[rng.choice(rows)] = 1
    return mask


def _one_bad_row(rng: random.Random, rollout: Rollout) -> Tensor:
    """One row is shifted, or lacks its end, or has the 1 of its end one place behind it."""
    mask = rollout.completion_mask.clone()
    row = _row_with_room(rng, mask)
    kind, end = rng.randrange(3), int(mask[row].sum()) - 1
    if kind:
        mask[row, end], mask[row, end + 1] = 0, kind - 1
    else:
        mask[row] = mask[row].roll(1)
    return mask


def _mask_by_loop(completion_ids, loss_mask, eos_token_id):
    for ids, mask in zip(completion_ids.tolist(), loss_mask.tolist(), strict=True):
        length = ids.index(eos_token_id) + 1 if eos_token_id in ids else len(ids)
        if mask != [1] * length + [0] * (len(ids) - length):
            return False
    return True


def _mask_by_cumsum(completion_ids, loss_mask, eos_token_id):
    ended = (completion_ids == eos_token_id).cumsum(dim=1).roll(1, dims=1)
    ended[:, 0] = 0
    return bool(((ended == 0) == loss_mask.bool()).all())


def _mask_by_rules(completion_ids, loss_mask, eos_token_id):
    is_eos, mask = completion_ids == eos_token_id, loss_mask.bool()
    first = is_eos & (is_eos.cumsum(dim=1) == 1)
    behind = (is_eos.cumsum(dim=1) > 0) & ~first
    return bool(mask[~behind].all() and not mask[behind].any())


def _start_only(completion_ids, loss_mask, eos_token_id):
    return bool(loss_mask[:, 0].all())


def _end_only(completion_ids, loss_mask, eos_token_id):
    mask = completion_mask(completion_ids, eos_token_id)
    last = mask.sum(dim=1, keepdim=True) - 1
    return bool(loss_mask.gather(1, last).all())


def _without_end(completion_ids, loss_mask, eos_token_id):
    return torch.equal(loss_mask.long(), (completion_ids != eos_token_id).long().cumprod(dim=1))


def _some_row(completion_ids, loss_mask, eos_token_id):
    return bool((loss_mask == completion_mask(completion_ids, eos_token_id)).all(dim=1).any())


def _no_ones_missing(completion_ids, loss_mask, eos_token_id):
    return bool(loss_mask[completion_mask(completion_ids, eos_token_id).bool()].all())


def _no_ones_behind(completion_ids, loss_mask, eos_token_id):
    return not loss_mask[~completion_mask(completion_ids, eos_token_id).bool()].any()


def _numbers_of_ones(completion_ids, loss_mask, eos_token_id):
    return torch.equal(loss_mask.sum(dim=1), completion_mask(completion_ids, eos_token_id).sum(dim=1))


def _first_row(completion_ids, loss_mask, eos_token_id):
    return mask_is_right(completion_ids[:1], loss_mask[:1], eos_token_id)


def _last_end(completion_ids, loss_mask, eos_token_id):
    is_eos = (completion_ids == eos_token_id).long()
    to_come = is_eos.flip(1).cumsum(dim=1).flip(1) > 0
    return torch.equal(loss_mask.bool(), to_come | ~is_eos.any(dim=1, keepdim=True))


check_mask_is_right = Exercise(
    "mask_is_right",
    mask_is_right,
    parts=(
        Part("healthy masks, some off by one", 1, _masks(lambda rng, rollout: _mask_from(shifted_mask, rollout)),
             draws=20),
        Part("healthy masks, some without their ends", 1,
             _masks(lambda rng, rollout: _mask_from(eos_as_padding, rollout)), draws=20),
        Part("healthy masks, some with ones behind the end", 1, _masks(_ones_behind), draws=20),
        Part("healthy masks, some with one wrong row", 1, _masks(_one_bad_row), draws=40),
    ),
    mistakes=(
        Mistake("ones behind the end are let pass", "Behind the first end token the mask must be 0: the loss must not "
                "see what stands there.", _no_ones_missing),
        Mistake("missing ones are let pass", "Every token through the end has to be seen.", _no_ones_behind),
        Mistake("only the first token is looked at", "The end of a completion can be missing as well.", _start_only),
        Mistake("only the last token is looked at", "The beginning of a completion can be missing as well.", _end_only),
        Mistake("the end is taken for padding", "Through the first EOS, *inclusive*: a healthy batch has to pass.",
                _without_end),
        Mistake("the last end token is taken for the end", "Behind the *first* one nothing counts, another end token "
                "neither.", _last_end),
        Mistake("one right row is enough", "*All* rows.", _some_row),
        Mistake("only the first row is looked at", "*Every* row: one alone may be wrong.", _first_row),
        Mistake("only the number of ones is compared", "A shifted row may have as many. Compare place by place.",
                _numbers_of_ones),
    ),
    right=(_mask_by_loop, _mask_by_cumsum, _mask_by_rules),
)  # fmt: skip


# ---- ratio_is_one ----


def ratio_is_one(per_token_logps: Tensor, old_per_token_logps: Tensor, loss_mask: Tensor) -> bool:
    """Whether exp(logp - old) is 1 up to 0.001 on every token that counts."""
    ratio = (per_token_logps - old_per_token_logps).exp()
    return bool(((ratio - 1).abs()[loss_mask.bool()] < 1e-3).all())


def _fresh_or_stale(low: float, high: float, padding: bool) -> Callable[[random.Random], Call]:
    """Half of the old log-probabilities are fresh, some of them up to rounding; the others are apart by low or high."""

    def draw(rng: random.Random) -> Call:
        logps = numbers(rng, 2, 5, low=-3.0, high=-0.2)
        if rng.random() < 0.5:
            logps[:, 0] = -0.05  # tokens that were all but certain
        mask = torch.tensor([[1, 1, 1, 1, 1], rng.choice([[1, 1, 1, 0, 0], [1] * 5])])
        change = torch.full((2, 5), rng.choice([0.0, 1e-4, -1e-4]))
        if rng.random() < 0.5:
            first = rng.choice([0, 1])
            change[:, first] = rng.choice([low, high]) * rng.choice([-1, 1])
            change[:, first + 1] = -change[:, first] * rng.choice([0, 1])  # one way alone, or ups and downs
        if padding:
            change += (1 - mask) * numbers(rng, 2, 5, low=0.5, high=2.0)
        return call(logps, logps + change, mask)

    return draw


def _ratio_by_logs(per_token_logps, old_per_token_logps, loss_mask):
    return bool(((per_token_logps - old_per_token_logps).abs() * loss_mask).max() < 1e-3)


def _ratio_by_loop(per_token_logps, old_per_token_logps, loss_mask):
    tokens = zip(*(one.flatten().tolist() for one in (per_token_logps, old_per_token_logps, loss_mask)), strict=True)
    return not any(counts and abs(logp - old) > 1e-3 for logp, old, counts in tokens)


def _ratio_by_close(per_token_logps, old_per_token_logps, loss_mask):
    keep = loss_mask == 1
    return torch.allclose(per_token_logps[keep], old_per_token_logps[keep], rtol=0, atol=1e-3)


def _judged_by(judge: Callable[[Tensor, Tensor], Tensor]) -> Callable:
    """A wrong answer that looks at logp - old and the mask."""

    def wrong(per_token_logps, old_per_token_logps, loss_mask):
        return bool(judge(per_token_logps - old_per_token_logps, loss_mask))

    return wrong


check_ratio_is_one = Exercise(
    "ratio_is_one",
    ratio_is_one,
    parts=(
        Part("fresh and stale, far apart", 1, _fresh_or_stale(0.3, 0.9, False), draws=30),
        Part("fresh and stale, close together, with padding", 2, _fresh_or_stale(0.02, 0.15, True), draws=30),
    ),
    mistakes=(
        Mistake("padding counts", "Whatever stands behind the end was never sampled. Use the mask.",
                _judged_by(lambda apart, mask: (apart.abs() < 1e-3).all())),
        Mistake("only the mean is looked at", "Ups and downs cancel. *Every* token's ratio has to be 1.",
                _judged_by(lambda apart, mask: ((apart * mask).sum() / mask.sum()).abs() < 1e-3)),
        Mistake("only the mean ratio is looked at", "Ups and downs nearly cancel. *Every* ratio has to be 1.",
                _judged_by(lambda apart, mask: (apart.exp()[mask.bool()].mean() - 1).abs() < 1e-3)),
        Mistake("ratios below 1 are let pass", "How *far* from 1, up or down? `abs`.",
                _judged_by(lambda apart, mask: (apart.exp() - 1)[mask.bool()].max() < 1e-3)),
        Mistake("ratios above 1 are let pass", "How *far* from 1, up or down? `abs`.",
                _judged_by(lambda apart, mask: (1 - apart.exp())[mask.bool()].max() < 1e-3)),
        Mistake("exact equality is asked for", "Two computations differ in their last digits: up to 0.001 is 1.",
                _judged_by(lambda apart, mask: (apart[mask.bool()] == 0).all())),
        Mistake("the logarithms are divided", "The ratio of the *probabilities*: `exp` of the difference.",
                lambda logps, old, mask: bool(((logps / old - 1).abs()[mask.bool()] < 1e-3).all())),
        Mistake("the mask is multiplied on before 1 is taken off", "In padding that leaves 0 - 1, which is far from 0.",
                _judged_by(lambda apart, mask: (apart.exp() * mask - 1).abs().max() < 1e-3)),
        Mistake("whatever the clip lets pass is taken for 1", "0.2 is how far a ratio may go later. In the first "
                "update it has to be 1.",
                _judged_by(lambda apart, mask: (apart.exp() - 1).abs()[mask.bool()].max() < 0.2)),
        Mistake("only the first token is looked at", "All tokens that count.",
                _judged_by(lambda apart, mask: (apart[:, 0].abs() < 1e-3).all())),
        Mistake("the difference of the logarithms is compared with 1", "The ratio is 1 where the *logarithms* are "
                "equal.", _judged_by(lambda apart, mask: ((apart - 1).abs()[mask.bool()] < 1e-3).all())),
    ),
    right=(_ratio_by_logs, _ratio_by_loop, _ratio_by_close),
)  # fmt: skip
