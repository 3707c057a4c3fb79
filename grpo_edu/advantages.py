"""Advantages: how much better a completion was than its siblings.

GRPO needs no value network. It samples a group of G completions of one prompt and compares each reward with
the group's own mean. The B = N·G rewards of N prompts arrive as one flat tensor, a group's rows adjacent.
"""

import torch
from torch import Tensor

from grpo_edu.config import SCALE_REWARDS


def group_advantages(
    rewards: Tensor, num_generations: int, *, scale_rewards: str = "group", eps: float = 1e-4
) -> Tensor:
    r"""Center each reward on its group's mean and scale it by a standard deviation.

    .. math:: A_i = \frac{r_i - \mathrm{mean}(r_{group})}{\mathrm{std}(r) + \epsilon}

    DeepSeekMath (https://arxiv.org/abs/2402.03300), section 4.1.2. The standard deviation is the sample one
    (it divides by n - 1). ``scale_rewards`` names the rewards it is taken over: "group" as in the paper;
    "batch", all B of them, so that an almost unanimous group is not blown up
    (https://arxiv.org/abs/2508.08221); "none", no scaling, as in Dr. GRPO (https://arxiv.org/abs/2503.20783).
    The mean is the group's in all three.

    A group whose rewards are exactly equal gets exactly 0. Its standard deviation would not say so: in
    float32 the mean of sixteen rewards of 1.69 is not 1.69.

    Args:
        rewards: (B,), one total reward a completion; integers and booleans become float32.
        num_generations: G >= 2, completions a prompt.
        scale_rewards: "group", "batch" or "none".
        eps: added to the standard deviation, in units of reward.

    Returns:
        (B,), without unit when scaled, in units of reward otherwise.

    Raises:
        ValueError: a reward is NaN or infinite, B is not a multiple of G, G < 2, unknown ``scale_rewards``.

    >>> group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0]), 3, scale_rewards="none")
    tensor([ 0.6667, -0.3333, -0.3333,  0.0000,  0.0000,  0.0000])
    >>> group_advantages(torch.tensor([1.0, 0.0, 0.5, 0.5]), 2)
    tensor([ 0.7070, -0.7070,  0.0000,  0.0000])
    """
    grouped = _grouped(rewards, num_generations)
    if scale_rewards not in SCALE_REWARDS:
        raise ValueError(f"scale_rewards must be one of {', '.join(SCALE_REWARDS)}; got {scale_rewards!r}")
    advantages = grouped - grouped.mean(dim=1, keepdim=True)
    if scale_rewards == "group":
        advantages = advantages / (grouped.std(dim=1, keepdim=True) + eps)
    elif scale_rewards == "batch":
        advantages = advantages / (grouped.std() + eps)
    return advantages.masked_fill(_all_equal(grouped)[:, None], 0.0).flatten()


def rloo_advantages(rewards: Tensor, num_generations: int) -> Tensor:
    r"""Compare each reward with the mean of the *other* rewards of its group (leave-one-out).

    .. math:: A_i = r_i - \frac{1}{G-1} \sum_{j \ne i} r_j = \frac{G}{G-1} (r_i - \mathrm{mean}(r_{group}))

    RLOO (https://arxiv.org/abs/2402.14740). The baseline of a row does not depend on that row's own sample,
    so the gradient estimate is unbiased; the group's mean as baseline shrinks it by (G - 1) / G.

    Args:
        rewards: (B,), one total reward a completion.
        num_generations: G >= 2, completions a prompt.

    Returns:
        (B,), in units of reward; exactly 0 for a group whose rewards are exactly equal.

    Raises:
        ValueError: as `group_advantages`.

    >>> rloo_advantages(torch.tensor([1.0, 0.0, 0.0, 2.0, 2.0, 2.0]), 3)
    tensor([ 1.0000, -0.5000, -0.5000,  0.0000,  0.0000,  0.0000])
    """
    grouped = _grouped(rewards, num_generations)
    centered = grouped - grouped.mean(dim=1, keepdim=True)
    advantages = centered * (num_generations / (num_generations - 1))
    return advantages.masked_fill(_all_equal(grouped)[:, None], 0.0).flatten()


def degenerate_groups(rewards: Tensor, num_generations: int) -> Tensor:
    """Say which groups have exactly equal rewards, and so no gradient.

    Args:
        rewards: (B,), one total reward a completion.
        num_generations: G >= 2, completions a prompt.

    Returns:
        (N,) bool, N = B / G.

    Raises:
        ValueError: as `group_advantages`.

    >>> degenerate_groups(torch.tensor([1.0, 0.0, 0.5, 0.5]), 2)
    tensor([False,  True])
    """
    return _all_equal(_grouped(rewards, num_generations))


def tie_probability(p: float, num_generations: int) -> float:
    r"""The chance that G completions are all right or all wrong, so that their group has no gradient.

    .. math:: p^G + (1 - p)^G

    Args:
        p: probability that one completion is right, between 0 and 1.
        num_generations: G >= 2, completions drawn independently.

    Raises:
        ValueError: p outside 0 … 1, or G < 2.

    >>> tie_probability(0.5, 2), tie_probability(0.5, 8)
    (0.5, 0.0078125)
    """
    if not 0 <= p <= 1:
        raise ValueError(f"p must be a probability between 0 and 1, got {p}")
    if num_generations < 2:
        raise ValueError(f"num_generations must be at least 2, got {num_generations}: one completion is no group")
    return p**num_generations + (1 - p) ** num_generations


def _grouped(rewards: Tensor, num_generations: int) -> Tensor:
    """Check rewards (B,) and return them as (N, G) in floating point."""
    if num_generations < 2:
        raise ValueError(
            f"num_generations must be at least 2, got {num_generations}: one completion has nothing to be compared with"
        )
    if rewards.ndim != 1 or rewards.numel() == 0:
        raise ValueError(f"rewards must have shape (B,) with B > 0, got {tuple(rewards.shape)}")
    if rewards.numel() % num_generations:
        raise ValueError(
            f"rewards has {rewards.numel()} rows, not a multiple of num_generations = {num_generations}: "
            "keep every group whole"
        )
    rewards = rewards if rewards.is_floating_point() else rewards.float()
    finite = torch.isfinite(rewards)
    if not finite.all():
        row = int((~finite).nonzero()[0])
        raise ValueError(
            f"rewards[{row}] is {float(rewards[row])}: advantages need finite rewards, so look at the reward "
            "function that scored this completion"
        )
    return rewards.view(-1, num_generations)


def _all_equal(grouped: Tensor) -> Tensor:
    """(N, G) -> (N,) bool, by exact comparison."""
    return (grouped == grouped[:, :1]).all(dim=1)
