"""Importance ratios and their clipping: how far one rollout may move the policy.

A rollout may be used for several updates. After the first, the policy is no longer the one that sampled; the
ratio of the two corrects for that, and clipping stops the correction from being trusted too far.
"""

import torch
from torch import Tensor

from grpo_edu.config import IMPORTANCE_SAMPLING_LEVELS, LOSS_TYPES


def importance_ratio(
    per_token_logps: Tensor,
    old_per_token_logps: Tensor,
    completion_mask: Tensor,
    *,
    importance_sampling_level: str = "token",
) -> Tensor:
    r"""How much likelier the trained policy makes what the old policy sampled.

    .. math:: \rho_{it} = \frac{\pi(o_{it})}{\pi_{old}(o_{it})} \qquad
              \rho_i = \Big(\frac{\pi(o_i)}{\pi_{old}(o_i)}\Big)^{1/|o_i|}

    Left: "token", DeepSeekMath (https://arxiv.org/abs/2402.03300). Right: "sequence", one ratio a completion,
    the geometric mean of its tokens' ratios: GSPO (https://arxiv.org/abs/2507.18071), to be used with
    ``loss_type="grpo"``.

    Args:
        per_token_logps: (B, C), nats, with gradient.
        old_per_token_logps: (B, C), nats; no gradient flows into it.
        completion_mask: (B, C), 1 where a token counts.
        importance_sampling_level: "token" or "sequence".

    Returns:
        (B, C) for "token", (B, 1) for "sequence"; without unit, 1 where the two policies agree.

    Raises:
        ValueError: shapes that differ, an unknown level.

    >>> logps, old = torch.tensor([[0.5, 0.25]]).log(), torch.tensor([[0.25, 0.25]]).log()
    >>> importance_ratio(logps, old, torch.ones(1, 2))
    tensor([[2., 1.]])
    >>> importance_ratio(logps, old, torch.ones(1, 2), importance_sampling_level="sequence")
    tensor([[1.4142]])
    """
    check_shapes(
        per_token_logps, old_per_token_logps=old_per_token_logps, completion_mask=completion_mask
    )  # fmt: skip
    check_name("importance_sampling_level", importance_sampling_level, IMPORTANCE_SAMPLING_LEVELS)
    log_ratio = per_token_logps - old_per_token_logps.detach()
    if importance_sampling_level == "sequence":
        total = masked(log_ratio, completion_mask).sum(dim=1, keepdim=True)
        log_ratio = total / completion_mask.sum(dim=1, keepdim=True).clamp(min=1)
    return log_ratio.exp()


def per_token_policy_loss(
    per_token_logps: Tensor,
    ratio: Tensor,
    advantages: Tensor,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    loss_type: str = "grpo",
) -> Tensor:
    r"""The loss of each token, before padding is taken out and anything is averaged.

    .. math:: -\min(\rho A,\ \mathrm{clip}(\rho, 1-\epsilon, 1+\epsilon_{high}) A)
              \qquad\text{cispo: } -\mathrm{sg}[\min(\rho, \epsilon_{high})]\, A \log \pi

    PPO's clipping stops the gradient of a token whose ratio has moved far enough in the direction that its
    advantage asks for. A larger ``epsilon_high`` (DAPO, https://arxiv.org/abs/2503.14476: 0.28) leaves
    unlikely tokens more room to grow. ``delta`` bounds the ratio where the advantage is negative, which
    clipping alone does not (INTELLECT-2, https://arxiv.org/abs/2505.07291). CISPO
    (https://arxiv.org/abs/2506.13585) clips the weight and not the update: every token keeps a gradient.

    In CISPO ``epsilon_high`` is the largest ratio itself and not its distance from 1; 5.0 is usual. Left at
    None it is ``epsilon``, as in TRL, and 0.2 scales the loss down to about a fifth.

    Args:
        per_token_logps: (B, C), nats, with gradient; only "cispo" reads it.
        ratio: (B, C) or (B, 1), of `importance_ratio`.
        advantages: (B,); no gradient flows into it.
        epsilon: lower clip bound, a distance from 1.
        epsilon_high: upper clip bound, ``epsilon`` when None.
        delta: upper bound of the ratio itself, above 1 + ``epsilon_high``; None: no bound.
        loss_type: "cispo", or any other of `LOSS_TYPES`, which clip alike.

    Returns:
        (B, C); (B, 1) where the ratio is (B, 1) and the loss is not "cispo".

    Raises:
        ValueError: shapes that do not match, a negative clip bound, an unknown ``loss_type``.

    >>> ratio = torch.tensor([[0.5, 1.0, 1.5]])
    >>> per_token_policy_loss(ratio.log(), ratio, torch.tensor([1.0]))
    tensor([[-0.5000, -1.0000, -1.2000]])
    >>> per_token_policy_loss(ratio.log(), ratio, torch.tensor([-1.0]))
    tensor([[0.8000, 1.0000, 1.5000]])
    """
    check_shapes(per_token_logps, advantages)
    check_row_or_token("ratio", ratio, per_token_logps)
    check_name("loss_type", loss_type, LOSS_TYPES)
    low, high = _clip_bounds(epsilon, epsilon_high)
    advantages = advantages.detach()[:, None]
    if loss_type == "cispo":
        return -ratio.clamp(max=high).detach() * advantages * per_token_logps
    clipped = ratio.clamp(1 - low, 1 + high)
    if delta is not None:
        ratio = ratio.clamp(max=delta)
    return -torch.min(ratio * advantages, clipped * advantages)


@torch.no_grad()
def clip_fractions(
    per_token_logps: Tensor,
    old_per_token_logps: Tensor,
    advantages: Tensor,
    completion_mask: Tensor,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    loss_type: str = "grpo",
    importance_sampling_level: str = "token",
) -> dict[str, Tensor]:
    """The share of tokens (of completions, at "sequence" level) that the clipping took hold of.

    Low: the ratio is below 1 - ``epsilon`` and the advantage negative. High: it is above 1 + ``epsilon_high``
    and the advantage positive. Region: either. Keys and definitions are TRL's.

    Args:
        per_token_logps: (B, C), nats.
        old_per_token_logps: (B, C), nats.
        advantages: (B,).
        completion_mask: (B, C), 1 where a token counts.
        epsilon: lower clip bound, a distance from 1.
        epsilon_high: upper clip bound, ``epsilon`` when None; with "cispo" the largest ratio itself.
        loss_type: one of `LOSS_TYPES`.
        importance_sampling_level: "token" or "sequence".

    Returns:
        "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"; for "cispo"
        "cispo_clip_ratio" alone. Scalars from 0 to 1.

    Raises:
        ValueError: shapes that do not match, a negative clip bound, an unknown name.

    >>> ratio, old = torch.tensor([[0.5, 1.5], [0.5, 1.0]]), torch.zeros(2, 2)
    >>> shares = clip_fractions(ratio.log(), old, torch.tensor([1.0, -1.0]), torch.ones(2, 2))
    >>> {key: float(share) for key, share in shares.items()}
    {'clip_ratio/low_mean': 0.25, 'clip_ratio/high_mean': 0.25, 'clip_ratio/region_mean': 0.5}
    """
    check_shapes(per_token_logps, advantages)
    check_name("loss_type", loss_type, LOSS_TYPES)
    low, high = _clip_bounds(epsilon, epsilon_high)
    ratio = importance_ratio(
        per_token_logps, old_per_token_logps, completion_mask,
        importance_sampling_level=importance_sampling_level,
    )  # fmt: skip
    mask = completion_mask if importance_sampling_level == "token" else torch.ones_like(ratio)
    advantages = advantages[:, None]

    def share(condition: Tensor) -> Tensor:
        return masked(condition.float(), mask).sum() / mask.sum().clamp(min=1)

    if loss_type == "cispo":
        return {"cispo_clip_ratio": share((ratio > high) & (advantages > 0))}
    low_clipped = (ratio < 1 - low) & (advantages < 0)
    high_clipped = (ratio > 1 + high) & (advantages > 0)
    return {
        "clip_ratio/low_mean": share(low_clipped),
        "clip_ratio/high_mean": share(high_clipped),
        "clip_ratio/region_mean": share(low_clipped | high_clipped),
    }


def _clip_bounds(epsilon: float, epsilon_high: float | None) -> tuple[float, float]:
    high = epsilon if epsilon_high is None else epsilon_high
    if epsilon < 0 or high < 0:
        raise ValueError(f"epsilon and epsilon_high must not be negative, got {epsilon} and {epsilon_high}")
    return epsilon, high


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """The values where the mask is not 0, and 0 elsewhere, whatever stands there, NaN included."""
    return torch.where(mask != 0, values, 0.0)


def check_name(argument: str, name: str, known: tuple[str, ...]) -> None:
    """Raise ValueError unless the name is a known one."""
    if name not in known:
        raise ValueError(f"{argument} must be one of {', '.join(known)}; got {name!r}")


def check_shapes(per_token_logps: Tensor, advantages: Tensor | None = None, **others: Tensor | None) -> None:
    """Raise ValueError unless log-probabilities and others are (B, C) and advantages (B,), where given."""
    shape = tuple(per_token_logps.shape)
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"per_token_logps must be (B, C) without a 0, got {shape}")
    for argument, tensor in others.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{argument} must be {shape}, as per_token_logps, got {tuple(tensor.shape)}")
    if advantages is not None and advantages.shape != shape[:1]:
        raise ValueError(f"advantages must be ({shape[0]},), one a completion, not {tuple(advantages.shape)}")


def check_row_or_token(argument: str, values: Tensor, like: Tensor) -> None:
    """Raise ValueError unless the values are (B, C) or (B, 1)."""
    rows, columns = like.shape
    if values.shape not in ((rows, columns), (rows, 1)):
        raise ValueError(f"{argument} must be ({rows}, {columns}) or ({rows}, 1), got {tuple(values.shape)}")
