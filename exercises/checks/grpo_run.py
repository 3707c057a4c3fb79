"""Exercises on a GRPO run: one whole step, learning rate and gradient clipping, and what the metrics mean."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from grpo_edu.advantages import group_advantages
from grpo_edu.checks.core import Call, Exercise, Part, call
from grpo_edu.checks.group_advantages import tied_alone
from grpo_edu.checks.inputs import mask_of, numbers
from grpo_edu.evaluation import mcnemar
from grpo_edu.losses import per_token_kl

# ---- stage_shapes ----
Shapes = dict[str, tuple[int, ...]]


def stage_shapes(
    num_prompts: int, num_generations: int, prompt_length: int, completion_length: int, vocab_size: int
) -> Shapes:
    """Return the shapes of a step's tensors, with a row for each completion."""
    n, g, p, c, v = num_prompts, num_generations, prompt_length, completion_length, vocab_size
    rows = n * g
    return {
        "prompt_ids": (rows, p),
        "completion_ids": (rows, c),
        "rewards": (rows,),
        "advantages": (rows,),
        "logits": (rows, c, v),
        "per_token_logps": (rows, c),
        "loss": (),
    }


def _some_sizes(rng: random.Random) -> Call:
    return call(*rng.sample(range(2, 9), 2), *rng.sample(range(10, 60), 2), rng.choice([1024, 32_000]))


check_stage_shapes = Exercise(
    stage_shapes,
    parts=(Part("a batch of some prompts", 2, _some_sizes),),
    changes="""
        the G completions of each prompt are not counted: rows = n * g -> rows = n
            Every prompt has G completions, so there are B = N · G rows.
        there is one row per prompt, not one per completion: "prompt_ids": (rows, p) -> "prompt_ids": (n, p)
            Each of the G completions has a row that contains its prompt.
        the comma of a tuple with one entry is missing:
            "rewards": (rows,) -> "rewards": rows; "advantages": (rows,) -> "advantages": rows
            `(8)` is the number 8, `(8,)` is a tuple.
            or: "rewards": (rows,) -> "rewards": rows
            or: "advantages": (rows,) -> "advantages": rows
        the loss is a vector of one number: "loss": () -> "loss": (1,)
            `(1,)` is the shape of a vector. A single number has the shape ().
        advantages have the shape (N, G): "advantages": (rows,) -> "advantages": (n, g)
            There is one number per row of the batch, as for the rewards: (B,).
        each token has its own advantage: "advantages": (rows,) -> "advantages": (rows, c)
            There is one advantage for the whole completion.
        the completion contains its prompt as well: "completion_ids": (rows, c) -> "completion_ids": (rows, p + c)
            `completion_ids` has only the C tokens of the completion.
        a group has one advantage: "advantages": (rows,) -> "advantages": (n,)
            Each completion is compared with the others in its group, and has its own advantage.
        log-probabilities are kept for the whole vocabulary:
            "per_token_logps": (rows, c) -> "per_token_logps": (rows, c, v)
            Keep only the log-probability of the token that was sampled.
        the loss is not reduced: "loss": () -> "loss": (rows,)
            The loss is one number for the whole batch, and its shape is ().
        logits are kept for the prompt: "logits": (rows, c, v) -> "logits": (rows, p + c, v)
            The loss is computed on completion tokens only.
        each token has its own reward: "rewards": (rows,) -> "rewards": (rows, c)
            There is one reward for the whole completion.
    """,
)


# ---- grpo_step ----
def grpo_step(
    scores: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor,
    rewards: Tensor,
    num_generations: int,
    learning_rate: float,
    updates: int,
    clip: tuple[float, float],
) -> Tensor:
    """(T, K), the toy policy's scores after some updates on one batch."""
    mask, low, high = completion_mask, 1 - clip[0], 1 + clip[1]
    advantages = group_advantages(rewards, num_generations)[:, None]
    old, policy = _token_logps(scores, completion_ids), scores
    for _ in range(updates):
        policy = policy.clone().requires_grad_()
        logps = _token_logps(policy, completion_ids)
        ratio = (logps - old).exp()
        gain = torch.min(ratio * advantages, ratio.clamp(low, high) * advantages)
        of_rows = (gain * mask).sum(dim=1) / mask.sum(dim=1)
        (slope,) = torch.autograd.grad(-of_rows.mean(), policy)
        policy = (policy - learning_rate * slope).detach()
    return policy


def _token_logps(scores: Tensor, completion_ids: Tensor) -> Tensor:
    places = torch.arange(completion_ids.shape[1])
    return scores.log_softmax(dim=1)[places, completion_ids]


def _batch(rng: random.Random, rewards: Tensor, size: int, *, width: int, whole: bool = False) -> Call:
    kinds, rows = 2, len(rewards)
    ids = torch.tensor([[rng.randrange(kinds) for _ in range(width)] for _ in range(rows)])
    lengths = [width] * rows if whole else [rng.randrange(1, width) for _ in range(rows - 1)] + [width]
    numbers_of_step = (rng.choice([3.0, 6.0]), rng.choice([3, 4]), rng.choice([(0.1, 0.3), (0.1, 0.2)]))
    return call(numbers(rng, width, kinds), ids, mask_of(lengths, width), rewards, size, *numbers_of_step)


def _paid(rng: random.Random, groups: int, size: int) -> Tensor:
    return torch.tensor([reward / 4 for _ in range(groups) for reward in rng.sample(range(17), size)])


def _tied_group(rng: random.Random) -> Call:
    """Return a group that ties, alone or in front of one that does not."""
    rewards = tied_alone(rng, 16)
    return _batch(rng, torch.cat([rewards, _paid(rng, 1, 16)]) if rng.random() < 0.5 else rewards, 16, width=2)


def _all_equal(groups: Tensor) -> Tensor:
    return groups.amax(dim=1) == groups.amin(dim=1)


def _never(groups: Tensor) -> Tensor:
    return torch.zeros(len(groups), dtype=torch.bool)


def _no_spread(groups: Tensor) -> Tensor:
    return groups.std(dim=1) == 0


def _scaled(
    rewards: Tensor,
    num_generations: int,
    ties: Callable[[Tensor], Tensor] = _all_equal,
    correction: int = 1,
    eps: float = 1e-4,
) -> Tensor:
    """Return advantages with another standard deviation, or another test for ties: ties(groups) → (N,) booleans."""
    groups = rewards.view(-1, num_generations)
    std = groups.std(dim=1, keepdim=True, correction=correction)
    scaled = (groups - groups.mean(dim=1, keepdim=True)) / (std + eps)
    return scaled.masked_fill(ties(groups)[:, None], 0.0).flatten()


def _by_stride(rewards: Tensor, num_generations: int) -> Tensor:
    groups = rewards.view(num_generations, -1).T
    return group_advantages(groups.flatten(), num_generations).view_as(groups).T.flatten()


check_grpo_step = Exercise(
    grpo_step,
    parts=(
        Part(
            "one group, whose completions are equally long",
            2,
            lambda rng: _batch(rng, _paid(rng, 1, 3), 3, width=2, whole=True),
        ),
        Part("two groups of different lengths", 3, lambda rng: _batch(rng, _paid(rng, 2, 3), 3, width=3)),
        Part("a group that ties", 1, _tied_group, draws=12),
    ),
    changes="""
        the scores do not change: scores.clone()
            The value of the loss does not matter, but its gradient does. `exp(logps - logps)` has none: detach the old
            log-probabilities.
        the old log-probabilities follow the policy: logps - old -> logps - logps.detach()
            In every update, they are those of the policy that sampled.
        nothing is clipped: ratio.clamp(low, high) -> ratio
            Once a token's ratio has left the bounds, the loss must not push it any further.
        the `min` is missing:
            torch.min(ratio * advantages, ratio.clamp(low, high) * advantages) -> ratio.clamp(low, high) * advantages
            Take the *minimum* of two terms: a token that moved in the wrong direction keeps its gradient.
        the larger of the two terms is taken: torch.min(ratio -> torch.max(ratio
            Take the *minimum* of the two terms, and then put the minus sign of the loss in front.
        both limits use the first number: 1 + clip[1] -> 1 + clip[0]
            The ratio may rise further than it may fall: `clip` has two numbers.
        the two limits are swapped: 1 - clip[0], 1 + clip[1] -> 1 - clip[1], 1 + clip[0]
            The first number is for ratios below 1, the second one for those above.
        there is only one update: range(updates) -> range(1)
            Use the same batch `updates` times.
        the step goes uphill: policy - learning_rate -> policy + learning_rate
            The loss has one minus sign and gradient descent another, so better completions become more likely.
        the rewards are used as advantages: group_advantages(rewards, num_generations) -> rewards
            First compare each reward with the other rewards of its group.
        the standard deviation divides by G:
            group_advantages(rewards, num_generations) -> _scaled(rewards, num_generations, correction=0)
            The sample standard deviation divides by G − 1, which is the default of `std(dim=1)`.
        the standard deviation is used without the 1e-4:
            group_advantages(rewards, num_generations) -> _scaled(rewards, num_generations, eps=0.0)
            Divide by the standard deviation plus 1e-4.
            or: group_advantages(rewards, num_generations) -> _scaled(rewards, num_generations, _never, eps=0.0)
        a tied group gets tiny advantages instead of 0:
            group_advantages(rewards, num_generations) -> _scaled(rewards, num_generations, _never)
            Because of rounding, the computed mean of sixteen equal rewards may be another number. Put 0 if all
            rewards of a group are equal.
        ties are detected by a standard deviation of 0:
            group_advantages(rewards, num_generations) -> _scaled(rewards, num_generations, _no_spread)
            With a single group, torch's std of equal rewards need not be 0. Compare the rewards with each other.
        advantages are not divided by the standard deviation: num_generations) -> num_generations, scale_rewards="none")
            Divide by the standard deviation of the group, plus 1e-4.
        the whole batch is treated as one group: rewards, num_generations -> rewards, len(rewards)
            The completions of a prompt are compared only with each other.
        the rows of a group are taken with a stride: group_advantages -> _by_stride
            A group's rows are adjacent. Which shape has one group in each row?
        the learning rate is missing: learning_rate * slope -> slope
            The new scores are scores − learning_rate · gradient.
        each completion is divided by the width of the batch: / mask.sum(dim=1) -> / mask.shape[1]
            Divide by the number of tokens in the completion, without padding.
        padding counts: (gain * mask).sum(dim=1) / mask.sum(dim=1) -> gain.mean(dim=1)
            Multiply by the mask, and divide by the number of tokens with mask 1.
        all tokens of the batch have the same weight:
            (gain * mask).sum(dim=1) / mask.sum(dim=1) -> (gain * mask).sum() / mask.sum()
            Take the mean of each completion first, then the mean over the completions.
        the losses of the completions are added up, not averaged: of_rows.mean() -> of_rows.sum()
            Take the mean over the completions.
    """,
)


# ---- learning_rate_share ----
def learning_rate_share(step: int, warmup_steps: int, max_steps: int) -> float:
    """Up in a straight line until `warmup_steps`, then down to 0 at `max_steps`."""
    if step < warmup_steps:
        return step / warmup_steps
    left = (max_steps - step) / (max_steps - warmup_steps)
    return left


def _rising(rng: random.Random) -> Call:
    warmup = rng.choice([4, 5, 10])
    return call(rng.randrange(1, warmup), warmup, rng.choice([20, 40]))


def _falling(rng: random.Random) -> Call:
    warmup, total = rng.choice([4, 5, 10]), rng.choice([20, 40])
    return call(rng.randrange(warmup + 1, total), warmup, total)


def _borders(rng: random.Random) -> Call:
    warmup, total = rng.choice([4, 5]), rng.choice([20, 40])
    return call(*rng.choice([(0, warmup, total), (warmup, warmup, total), (0, 0, total), (3, 0, total)]))


check_learning_rate_share = Exercise(
    learning_rate_share,
    parts=(
        Part("while it rises", 1, _rising),
        Part("while it falls", 1, _falling),
        Part("the first step, the highest point, no warm-up", 1, _borders, draws=40),
    ),
    changes="""
        the steps are counted from 1: step / warmup_steps -> (step + 1) / warmup_steps
            Steps are counted from 0, so the share of the first one is 0.
        after the warm-up, the share is computed as if there had been none: return left -> return 1 - step / max_steps
            At its highest point, step `warmup_steps`, the share is 1.
        the warm-up is not subtracted from the remaining steps:
            return left -> return 1 - (step - warmup_steps) / max_steps
            The share falls over max_steps − warmup_steps steps.
        the share reaches 0 one step too early:
            return left -> return (max_steps - 1 - step) / (max_steps - 1 - warmup_steps)
            The share would be 0 at step `max_steps`, which is never taken.
        the share falls along a cosine: return left -> return (1 - math.cos(math.pi * left)) / 2
            It should fall in a straight line.
        there is no warm-up, and the share falls from step 0 on: 1 - step / max_steps
            During the warm-up, the share rises from 0 to 1.
        the share falls first and rises afterwards: 1 - learning_rate_share(step, warmup_steps, max_steps)
            The share begins at 0.
        the share never falls: return left -> return 1.0
            After the warm-up, the share falls to 0.
        there is no warm-up: step / warmup_steps -> 1.0
            During the warm-up, the share rises from 0 to 1.
        without a warm-up, step 0 divides by 0: step < warmup_steps -> step <= warmup_steps
            The share rises *before* step `warmup_steps`, which may be 0: use <, not <=.
        without a warm-up, every step divides by 0:
            min(step / warmup_steps, (max_steps - step) / (max_steps - warmup_steps))
            `warmup_steps` may be 0. Then the share falls from the first step on.
    """,
)


# ---- clipped_gradients ----
Gradients = list[Tensor]


def clipped_gradients(gradients: Gradients, max_norm: float) -> Gradients:
    """Return the gradients of all weights, scaled by one factor where their common length exceeds `max_norm`."""
    norm = common_length(gradients)
    factor = min(1.0, max_norm / norm)
    return [factor * gradient for gradient in gradients]


def common_length(gradients: Gradients) -> float:
    """Return the norm of all gradients together."""
    return torch.cat([gradient.flatten() for gradient in gradients]).norm().item()


def _some_gradients(longest: tuple[float, float]) -> Callable[[random.Random], Call]:
    def draw(rng: random.Random) -> Call:
        gradients = [numbers(rng, 2, 2), numbers(rng, 3), numbers(rng, 1)]
        return call(gradients, round(common_length(gradients) * rng.uniform(*longest), 2))

    return draw


check_clipped_gradients = Exercise(
    clipped_gradients,
    parts=(
        Part("longer than allowed", 2, _some_gradients((0.2, 0.8))),
        Part("short enough", 1, _some_gradients((1.2, 2.0))),
    ),
    changes="""
        each gradient is clipped by itself: [clipped_gradients([one], max_norm)[0] for one in gradients]
            Use one factor for all gradients; otherwise the direction of the step changes.
        each value is clipped by itself: [one.clamp(-max_norm, max_norm) for one in gradients]
            Use one factor for all values, so that the direction of the step stays the same.
        short gradients are stretched: min(1.0, max_norm / norm) -> max_norm / norm
            A gradient that is short enough stays as it is.
        the lengths are added up: common_length(gradients) -> sum(one.norm().item() for one in gradients)
            Add up the squares: the total length is the square root of their sum.
        the square of the length is used: common_length(gradients) -> common_length(gradients) ** 2
            The length is the square root of the sum of the squares.
        the largest of the lengths is used for all gradients together:
            common_length(gradients) -> max(one.norm().item() for one in gradients)
            All gradients together are one long vector.
        the gradients get the length 1: min(1.0, max_norm / norm) -> 1 / norm
            They get the length `max_norm`, so the factor is max_norm / norm.
        the values are added up, not their squares:
            common_length(gradients) -> sum(one.abs().sum().item() for one in gradients)
            The length is the square root of the sum of the squares.
        long gradients are not clipped: min(1.0, -> max(1.0,
            The factor is at *most* 1: min, not max.
        the gradients are changed in place: factor * gradient -> gradient.mul_(factor)
            Return new tensors.
    """,
)


# ---- tied_groups ----
def tied_groups(rewards: Tensor, num_generations: int) -> tuple[float, float]:
    """Return the shares of groups in which all completions are right, and in which none is."""
    groups = rewards.view(-1, num_generations)
    right, wrong = ((groups == kind).all(dim=1).float().mean().item() for kind in (1, 0))
    return right, wrong


def _outcomes(rng: random.Random) -> Call:
    size = rng.choice([3, 4])
    groups = [[1.0] * size] * rng.randrange(2, 4) + [[0.0] * size]
    for _ in range(rng.randrange(1, 4)):
        right = rng.randrange(1, size)
        groups.append(rng.sample([1.0] * right + [0.0] * (size - right), size))
    rng.shuffle(groups)
    return call(torch.tensor(sum(groups, [])), size)


def _all_mixed(rng: random.Random) -> Call:
    size = rng.choice([2, 4])
    groups = [rng.sample([1.0, 0.0] * (size // 2), size) for _ in range(3)]
    return call(torch.tensor(sum(groups, [])), size)


check_tied_groups = Exercise(
    tied_groups,
    parts=(Part("some groups tie", 2, _outcomes), Part("no group ties", 1, _all_mixed)),
    changes="""
        completions are counted, not groups: (groups == kind).all(dim=1) -> (groups == kind)
            A group counts only if *all* of its completions agree.
        `any` is used where `all` is needed: .all(dim=1) -> .any(dim=1)
            One right completion does not make the whole group right.
        the two shares are swapped: return right, wrong -> return wrong, right
            The share of groups that are all right comes first.
        counts are returned, not shares: .mean() -> .sum()
            Divide by the number of groups.
        the count is divided by the number of completions: .mean() -> .mean().div(num_generations)
            Divide by the number of *groups*, N, not by B = N · G.
        the count is divided by the number of groups that tie:
            return right, wrong -> return right / ((right + wrong) or 1), wrong / ((right + wrong) or 1)
            Divide by the number of *all* groups.
        all groups are tested at once: .all(dim=1) -> .all()
            Test each row: all(dim=1).
        the rows of a group are taken with a stride:
            rewards.view(-1, num_generations) -> rewards.view(num_generations, -1).T
            The rewards of a group are adjacent. Which shape has one group in each row?
    """,
)


# ---- batch_kl ----
def batch_kl(per_token_logps: Tensor, ref_per_token_logps: Tensor, completion_mask: Tensor) -> float:
    """Return the mean of k3 over the real tokens of a batch, as the trainer's metric "kl"."""
    kl, mask = per_token_kl(per_token_logps, ref_per_token_logps), completion_mask
    return kl[mask == 1].mean().item()


def _two_policies(rng: random.Random, *, infinite: bool) -> Call:
    logps = numbers(rng, 3, 4, low=-3.0, high=-1.2)
    ref = logps + numbers(rng, 3, 4, low=-1.0, high=1.0)
    mask = mask_of([rng.randrange(1, 3), rng.randrange(1, 4), 4], 4)
    if infinite:  # row 0 has two places of padding, row 1 has one: both infinite, or one of them
        logps[0, 2:] = ref[0, 3] = ref[1, 3] = -torch.inf
    return call(logps, ref, mask)


check_batch_kl = Exercise(
    batch_kl,
    parts=(
        Part("completions of different lengths", 2, lambda rng: _two_policies(rng, infinite=False)),
        Part("padding of minus infinity", 1, lambda rng: _two_policies(rng, infinite=True)),
    ),
    changes="""
        the two policies are swapped: batch_kl(ref_per_token_logps, per_token_logps, completion_mask)
            In k3, the ratio is reference over policy.
        k1 is returned: per_token_kl(per_token_logps, ref_per_token_logps) -> per_token_logps - ref_per_token_logps
            k1 is negative where the token is more likely under the reference. k3 is never negative.
        k2 is returned:
            per_token_kl(per_token_logps, ref_per_token_logps) -> (per_token_logps - ref_per_token_logps).square() / 2
            k2 is half the square of the difference. k3 has an exponential.
        padding is multiplied by 0: kl[mask == 1].mean() -> ((kl * mask).sum() / mask.sum())
            0 times infinity, or NaN, is NaN. Select the tokens with mask 1 instead.
            or: kl[mask == 1].mean() -> ((kl.nan_to_num(0.0, torch.inf) * mask).sum() / mask.sum())
        the mask is used as row numbers: kl[mask == 1] -> kl[mask]
            A tensor of integers 0 and 1 selects rows 0 and 1. Compare the mask with 1 first.
        padding counts: kl[mask == 1] -> kl
            Take the mean over the tokens with mask 1.
        padding is counted in the number of tokens: kl[mask == 1].mean() -> kl[mask == 1].sum().div(mask.numel())
            Divide by the number of tokens with mask 1, which is mask.sum().
        every completion has the same weight, instead of every token:
            kl[mask == 1].mean() -> (kl.masked_fill(mask == 0, 0.0).sum(1) / mask.sum(1)).mean()
            The metric is a mean over all tokens of the batch.
        the sum is not divided: kl[mask == 1].mean() -> kl[mask == 1].sum()
            Take the mean over the tokens with mask 1.
    """,
)


# ---- claim ----
Solved = Sequence[bool]  # 1 or 0, a problem


def claim(before: Solved, after: Solved) -> tuple[float, str]:
    """Return the gain, and "better", "worse" or "not shown" by the exact McNemar test at 5%."""
    gain, p_value = (sum(after) - sum(before)) / len(before), mcnemar(before, after).p_value
    verdict = "not shown" if p_value >= 0.05 else "better" if gain > 0 else "worse"
    return gain, verdict


def _runs(rng: random.Random, pairs: Sequence[tuple[int, int]]) -> Call:
    lost, won = rng.choice(pairs)
    both, neither = rng.randrange(12, 15), rng.randrange(12, 15)
    rows = [(1, 1)] * both + [(0, 0)] * neither + [(1, 0)] * lost + [(0, 1)] * won
    rng.shuffle(rows)
    return call([before for before, _ in rows], [after for _, after in rows])


def _unpaired_p(before: Solved, after: Solved) -> float:
    n, shares = len(before), (sum(before) / len(before), sum(after) / len(after))
    pooled = sum(shares) / 2
    z = (shares[1] - shares[0]) / math.sqrt(2 * pooled * (1 - pooled) / n)
    return math.erfc(abs(z) / math.sqrt(2))


check_claim = Exercise(
    claim,
    parts=(
        Part(
            "many problems fell to one side",
            2,
            lambda rng: _runs(rng, [(1, 9), (0, 7), (0, 14), (9, 1), (8, 0), (14, 0)]),
            draws=24,
        ),
        Part("few did", 2, lambda rng: _runs(rng, [(1, 7), (0, 5), (2, 9), (7, 1), (1, 4), (5, 2), (3, 3)]), draws=20),
    ),
    changes="""
        the test is not used: p_value >= 0.05 -> gain == 0
            Noise produces gains and losses as well. Look at the p-value first.
            or: p_value >= 0.05 -> False
        p is read the wrong way round: p_value >= 0.05 -> p_value < 0.05
            A *small* p means that chance alone would rarely lead to such a difference.
        before and after are swapped: claim(after, before)
            Subtract the value before from the value after.
        the gain has no sign: return gain, verdict -> return abs(gain), verdict
            If the accuracy falls, the gain is negative.
        the gain is set to 0 if nothing is shown: return gain -> return 0.0 if verdict == "not shown" else gain
            Return the measured gain, whatever the verdict is.
        the test is not paired: mcnemar(before, after).p_value -> _unpaired_p(before, after)
            Both runs answered the same problems. Only the problems on which they differ count.
        the test is one-sided: mcnemar(before, after).p_value -> mcnemar(before, after).p_value / 2
            A change for the worse would count as well, so the test has two sides.
        the direction is ignored: else "worse" -> else "better"
            A significant change can also be a loss.
        the gain is relative: (sum(after) - sum(before)) / len(before) -> sum(after) / sum(before) - 1
            The gain is the share solved after, minus the share solved before.
        the gain is in percent: return gain, verdict -> return 100 * gain, verdict
            Return a share: 9 of 40 problems are 0.225.
        the gain is a count: (sum(after) - sum(before)) / len(before) -> sum(after) - sum(before)
            Divide by the number of problems.
    """,
)
