"""Compute advantages: how much better a completion is than the other completions in its group.

GRPO needs no value network, because it samples a group of G completions per prompt and compares each reward with the
mean of the group. The functions take the B = N·G rewards of N prompts, with the rows of a group adjacent, and raise
ValueError if B is not a multiple of G, if G < 2, or if a reward is infinite or too large to be squared. A reward of NaN
means that no reward function applied to this completion: its advantage is 0, and the others are compared without it.
They compute in the data type of the rewards, but at least in float32: in float16, eps would be rounded away.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_edu.tensors import LARGEST_REWARD, at_least_float32, check_name, widest_float_dtype

SCALE_REWARDS = ("group", "batch", "none", "mean")


def group_advantages(
    rewards: Tensor, num_generations: int, *, scale_rewards: str = "group", eps: float = 1e-4
) -> Tensor:
    r"""Subtract the mean of its group from each reward, and divide by a standard deviation.

    .. math:: A_i = \frac{r_i - \mathrm{mean}(r_{group})}{\mathrm{std}(r) + \epsilon}

    DeepSeekMath (https://arxiv.org/abs/2402.03300), section 4.1.2. ``scale_rewards`` selects the sample standard
    deviation (with n - 1): "group" uses the rewards of the group, as in the paper. "batch" uses all B rewards, so that
    a group with almost equal rewards does not get large advantages (https://arxiv.org/abs/2508.08221). "none" does not
    scale, as in Dr. GRPO (https://arxiv.org/abs/2503.20783). "mean" divides by the mean of the group instead, so that
    a rare success counts more: with rewards 0 and 1 the expected gradient is that of log p(correct) times
    1 − (1 − p)^(G − 1) (MaxRL, https://arxiv.org/abs/2602.02710).

    A group whose rewards are exactly equal gets exactly 0. This is checked explicitly, because rounding can make the
    standard deviation positive: in float32 the mean of sixteen rewards of 1.69 is not 1.69.

    Args:
        rewards: (B,), the total reward of each completion.
        num_generations: G >= 2, completions per prompt.
        scale_rewards: "group", "batch", "none" or "mean".
        eps: added to the divisor, in units of the reward.

    Returns:
        (B,), at least float32, without unit, or with "none" in units of the reward.

    Raises:
        ValueError: see the module; also an unknown ``scale_rewards``, or "mean" with a negative reward.

    >>> group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0]), 3, scale_rewards="none")
    tensor([ 0.6667, -0.3333, -0.3333,  0.0000,  0.0000,  0.0000])
    >>> group_advantages(torch.tensor([1.0, 0.0, 0.5, 0.5]), 2)
    tensor([ 0.7070, -0.7070,  0.0000,  0.0000])
    """
    grouped = _grouped(rewards, num_generations)
    check_name("scale_rewards", scale_rewards, SCALE_REWARDS)
    mean = grouped.nanmean(dim=1, keepdim=True)
    advantages = grouped - mean
    if scale_rewards == "group":
        advantages = advantages / (nanstd(grouped) + eps)
    elif scale_rewards == "batch":
        advantages = advantages / (nanstd(grouped.view(1, -1)) + eps)
    elif scale_rewards == "mean":
        if (grouped < 0).any():
            raise ValueError(f"rewards must not be negative with scale_rewards='mean', got {grouped.min():g}")
        advantages = advantages / (mean + eps)
    return _zero_where_nothing_differs(advantages, grouped)


def rloo_advantages(rewards: Tensor, num_generations: int) -> Tensor:
    r"""Compare each reward with the mean of the *other* rewards of its group (leave-one-out).

    .. math:: A_i = r_i - \frac{1}{G-1} \sum_{j \ne i} r_j = \frac{G}{G-1} (r_i - \mathrm{mean}(r_{group}))

    RLOO (https://arxiv.org/abs/2402.14740). The baseline of a completion does not depend on that completion, so the
    gradient estimate is unbiased. With the mean of the whole group as baseline it is smaller by (G - 1) / G.

    Args:
        rewards, num_generations: as for `group_advantages`.

    Returns:
        (B,), in units of the reward; exactly 0 for a group whose rewards are exactly equal.

    >>> rloo_advantages(torch.tensor([1.0, 0.0, 0.0, 2.0, 2.0, 2.0]), 3)
    tensor([ 1.0000, -0.5000, -0.5000,  0.0000,  0.0000,  0.0000])
    """
    grouped = _grouped(rewards, num_generations)
    count = (~grouped.isnan()).sum(dim=1, keepdim=True).to(grouped.dtype)
    centered = grouped - grouped.nanmean(dim=1, keepdim=True)
    return _zero_where_nothing_differs(centered * (count / (count - 1)), grouped)


def rewards_themselves(rewards: Tensor, num_generations: int) -> Tensor:
    """Take each reward itself as the advantage, without a baseline; 0 for a completion without a reward.

    >>> rewards_themselves(torch.tensor([1.0, 0.0, float("nan"), 1.0]), 2)
    tensor([1., 0., 0., 1.])
    """
    return _grouped(rewards, num_generations).nan_to_num(0.0).flatten()


@dataclass(frozen=True)
class Estimator:
    """An estimator of advantages: a function, and what is true of it.

    function: (rewards, num_generations) → advantages (B,); one that scales also takes ``scale_rewards``.
    scales: whether ``scale_rewards`` has an effect.
    has_baseline: whether rewards are compared with others, so that a group with equal rewards has advantages of 0.
    trl: whether TRL's ``GRPOTrainer`` has it.
    """

    function: Callable[..., Tensor]
    scales: bool = False
    has_baseline: bool = True
    trl: bool = False


# To add an estimator, add its entry here; it is a value of `advantage_estimator` then.
ESTIMATORS = {
    "group": Estimator(group_advantages, scales=True, trl=True),
    "rloo": Estimator(rloo_advantages),
    "none": Estimator(rewards_themselves, has_baseline=False),
}


def estimate_advantages(rewards: Tensor, num_generations: int, estimator: str, scale_rewards: str) -> Tensor:
    """Return the advantages (B,) of an estimator, with the scaling if it has one.

    >>> estimate_advantages(torch.tensor([1.0, 0.0]), 2, "rloo", "group")
    tensor([ 1., -1.])
    """
    check_name("estimator", estimator, tuple(ESTIMATORS))
    scaling = {"scale_rewards": scale_rewards} if ESTIMATORS[estimator].scales else {}
    return ESTIMATORS[estimator].function(rewards, num_generations, **scaling)


def turn_advantages(
    turn_rewards: Tensor, num_generations: int, *, scale_rewards: str = "group", eps: float = 1e-4
) -> Tensor:
    r"""Compare what each turn of a conversation leads to with the same turn of the other conversations in its group.

    .. math:: G_{it} = \sum_{s \ge t} r_{is}
              \qquad A_{it} = \frac{G_{it} - \mathrm{mean}(G_{group,t})}{\mathrm{std}(G_t) + \epsilon}

    A turn is not blamed for the turns before it, because it could not change them. Turns of one number are compared
    although their conversations differ by then, so the mean is a coarser baseline for later turns. Zeng et al. 2025
    (https://arxiv.org/abs/2505.11821) assign credit by turn in a similar way.

    Args:
        turn_rewards: (B, T), the reward of each turn, NaN if a conversation had fewer turns.
        num_generations, scale_rewards, eps: as for `group_advantages`.

    Returns:
        (B, T), 0 if there was no turn, or if no other conversation of the group had this turn.

    >>> turn_rewards = torch.tensor([[0.0, 1.0], [1.0, float("nan")], [-0.5, 1.0], [0.0, 0.0]])
    >>> turn_advantages(turn_rewards, 4, scale_rewards="none")
    tensor([[ 0.3750,  0.3333],
            [ 0.3750,  0.0000],
            [-0.1250,  0.3333],
            [-0.6250, -0.6667]])
    """
    if turn_rewards.ndim != 2:
        raise ValueError(f"turn_rewards must have shape (B, T), got {tuple(turn_rewards.shape)}")
    to_go = turn_rewards.nan_to_num(0.0).flip(1).cumsum(dim=1).flip(1).masked_fill(turn_rewards.isnan(), torch.nan)
    columns = [group_advantages(each, num_generations, scale_rewards=scale_rewards, eps=eps) for each in to_go.T]
    return torch.stack(columns, dim=1)


def degenerate_groups(rewards: Tensor, num_generations: int) -> Tensor:
    """Find the groups whose rewards, apart from NaN, are exactly equal, and which therefore have no gradient.

    Args:
        rewards, num_generations: as for `group_advantages`.

    Returns:
        (N,) bool, N = B / G.

    >>> degenerate_groups(torch.tensor([1.0, 0.0, 0.5, 0.5]), 2)
    tensor([False,  True])
    """
    return _all_equal(_grouped(rewards, num_generations))


def tie_probability(p: float, num_generations: int) -> float:
    r"""Return the probability that G completions are all correct or all wrong, so that their group has no gradient.

    .. math:: p^G + (1 - p)^G

    Args:
        p: probability that a completion is correct, between 0 and 1.
        num_generations: G >= 2, completions that are sampled independently.

    Raises:
        ValueError: p is not between 0 and 1, or G < 2.

    >>> tie_probability(0.5, 2), tie_probability(0.5, 8)
    (0.5, 0.0078125)
    """
    if not 0 <= p <= 1:
        raise ValueError(f"p must be a probability between 0 and 1, got {p!r}")
    _check_group_size(num_generations)
    return p**num_generations + (1 - p) ** num_generations


def _check_group_size(num_generations: int) -> None:
    if num_generations < 2:
        raise ValueError(
            f"num_generations must be at least 2 (each completion is compared with its group), got {num_generations!r}"
        )


def _grouped(rewards: Tensor, num_generations: int) -> Tensor:
    """Check rewards (B,) and return them as (N, G), in at least float32."""
    _check_group_size(num_generations)
    if not isinstance(rewards, Tensor):
        raise ValueError(f"rewards must be a tensor, got {type(rewards).__name__}; pass torch.tensor(rewards)")
    if rewards.ndim != 1 or rewards.numel() == 0:
        raise ValueError(f"rewards must have shape (B,) with B > 0, got {tuple(rewards.shape)}")
    if rewards.numel() % num_generations:
        raise ValueError(
            f"rewards has {rewards.numel()} rows, which is not a multiple of num_generations = {num_generations}; "
            "keep every group whole"
        )
    rewards = at_least_float32(rewards)
    unusable = torch.abs(rewards.to(widest_float_dtype(rewards.device))) > LARGEST_REWARD
    if unusable.any():
        row = int(unusable.nonzero()[0])
        raise ValueError(
            f"rewards[{row}] must be a number of at most {LARGEST_REWARD:g} in size, got {float(rewards[row]):g}; "
            "check the reward function that scored this completion, and `reward_weights`"
        )
    return rewards.view(-1, num_generations)


def nanstd(rows: Tensor) -> Tensor:
    """Return the sample standard deviation (ddof 1) of each row without NaN, (N, 1); NaN for fewer than two numbers."""
    if rows.shape[1] > 1 and not rows.isnan().any():
        return rows.std(dim=1, keepdim=True)
    squares = (rows - rows.nanmean(dim=1, keepdim=True)).square().nansum(dim=1, keepdim=True)
    freedom = (~rows.isnan()).sum(dim=1, keepdim=True) - 1
    return (squares / freedom.clamp(min=0)).sqrt()


def _all_equal(grouped: Tensor) -> Tensor:
    """Return whether the rewards of each group (N, G), apart from NaN, are exactly equal; (N,) bool."""
    lowest, highest = (grouped.nan_to_num(nan=fill).aminmax(dim=1) for fill in (torch.inf, -torch.inf))
    return lowest.min >= highest.max


def _zero_where_nothing_differs(advantages: Tensor, grouped: Tensor) -> Tensor:
    """Advantages (N, G) as (B,), exactly 0 in groups with equal rewards and for completions without a reward."""
    return advantages.masked_fill(_all_equal(grouped)[:, None], 0.0).nan_to_num(0.0).flatten()
