"""The losses of the GRPO family, as pure functions of log-probabilities.

A loss is computed in three steps: the ratio between the policy that is trained and the policy that sampled
(`importance_ratio`), the loss of each token (`per_token_policy_loss`, `per_token_kl`, together `per_token_loss`), and
the weighted sum over all tokens (`token_weights`, `weighted_sum`). `grpo_loss` does all three. The algorithms of the
papers differ in one of these steps: each is an entry of the table `LOSSES`, a formula of a token and a weight of a
token. Formulas and denominators agree with TRL's ``GRPOTrainer``.

All functions take the same arguments under the same names:

- per_token_logps: (B, C), nats, of the policy that is trained, with gradient.
- old_per_token_logps: (B, C), nats, before the first update on the batch; no gradient flows into them.
- ref_per_token_logps: (B, C), nats, of the frozen reference policy; no gradient flows into them.
- advantages: (B,), or (B, C) if they differ between the tokens; no gradient flows into them.
- completion_mask: (B, C), 1 for the tokens that count, 0 for all others: always for the padding after the first EOS,
  and in the trainer (`grpo_edu.batch.Batch.loss_mask`) also for what a tool wrote and for completions left out.
- epsilon: lower clip bound, as a distance from 1.
- epsilon_high: upper clip bound, ``epsilon`` if None; with "cispo" the largest ratio itself.
- loss_type: a name in `LOSSES`; `per_token_policy_loss` has the formulas, `token_weights` the weights.
- importance_sampling_level: "token", or "sequence" (GSPO).

They raise ValueError for shapes that do not match and unknown names, and `token_weights` for a mask of other numbers
than 0 and 1. What the numbers may be is checked by `GRPOConfig`. Ratios, KL and sums are computed in the data type of
the log-probabilities, but at least in float32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_edu.tensors import at_least_float32, check_name, check_row_or_token, check_shapes, masked, widest_float_dtype

IMPORTANCE_SAMPLING_LEVELS = ("token", "sequence")

# ---- the losses: formulas of a token, weights of a token, and the table ----


def clipped_loss(per_token_logps: Tensor, ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """−min(ρ A, clip(ρ, 1 − ε, 1 + ε_high) A)"""
    clipped = ratio.clamp(1 - low, 1 + high)
    return -torch.min(ratio * advantages, clipped * advantages)


def capped_loss(per_token_logps: Tensor, ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """−sg[min(ρ, ε_high)] A log π, where no gradient flows into sg[…]"""
    return -ratio.clamp(max=high).detach() * advantages * per_token_logps


def loss_without_ratio(per_token_logps: Tensor, ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """−A log π"""
    return -advantages * per_token_logps


def weight_by_completion(mask: Tensor, max_completion_length: int | None, num_items: int | Tensor | None) -> Tensor:
    """1 / (B · tokens of the completion)"""
    return mask / (len(mask) * mask.sum(dim=1, keepdim=True).clamp(min=1))


def weight_by_rows_given(mask: Tensor, max_completion_length: int | None, num_items: int | Tensor | None) -> Tensor:
    """1 / tokens of the rows given"""
    return mask / mask.sum().clamp(min=1)


def weight_by_batch_tokens(mask: Tensor, max_completion_length: int | None, num_items: int | Tensor | None) -> Tensor:
    """1 / ``num_items`` if given, else 1 / tokens of the rows given"""
    if num_items is None:
        num_items = mask.sum()
    return mask / torch.as_tensor(num_items, device=mask.device).clamp(min=1)


def weight_by_limit(mask: Tensor, max_completion_length: int | None, num_items: int | Tensor | None) -> Tensor:
    """1 / (B · ``max_completion_length``)"""
    if max_completion_length is None:
        raise ValueError("max_completion_length must be at least 1 for a loss that divides by it; got None")
    return mask / (len(mask) * max_completion_length)


def weight_by_rows(mask: Tensor, max_completion_length: int | None, num_items: int | Tensor | None) -> Tensor:
    """1 / B"""
    return mask / len(mask)


@dataclass(frozen=True)
class Loss:
    """A loss: two functions, and what is true of it.

    token: (per_token_logps, ratio, advantages, low, high) → the loss of each token; low and high are ``epsilon`` and
        ``epsilon_high``, and the advantages are (B, 1) or (B, C).
    weight: (mask, max_completion_length, num_items) → the weight of each token (B, C); the mask is float64.
    source: the paper that introduced it.
    clips: "ratio" if the gradient ends beyond 1 − ε and 1 + ε_high; "weight" if ε_high is the largest ratio itself; ""
        if ``epsilon`` and ``epsilon_high`` have no effect.
    uses_ratio: False if `importance_ratio`, and so its level, has no effect.
    trl: its name in TRL's ``GRPOTrainer``; None if TRL does not have it.
    """

    token: Callable[[Tensor, Tensor, Tensor, float, float], Tensor]
    weight: Callable[[Tensor, int | None, int | Tensor | None], Tensor]
    source: str
    clips: str = "ratio"
    uses_ratio: bool = True
    trl: str | None = None


# To add a loss, add its entry here, and its JavaScript to formulas.js (docs/contributing.md).
LOSSES = {
    "grpo": Loss(clipped_loss, weight_by_completion, "https://arxiv.org/abs/2402.03300", trl="grpo"),
    "bnpo": Loss(clipped_loss, weight_by_rows_given, "TRL", trl="bnpo"),
    "dr_grpo": Loss(clipped_loss, weight_by_limit, "https://arxiv.org/abs/2503.20783", trl="dr_grpo"),
    "dapo": Loss(clipped_loss, weight_by_batch_tokens, "https://arxiv.org/abs/2503.14476", trl="dapo"),
    "cispo": Loss(capped_loss, weight_by_batch_tokens, "https://arxiv.org/abs/2506.13585", clips="weight", trl="cispo"),
    "reinforce": Loss(loss_without_ratio, weight_by_rows, "Williams 1992", clips="", uses_ratio=False),
}


def find_loss(loss_type: str) -> Loss:
    """Return the entry of a loss type; raises ValueError if there is none."""
    check_name("loss_type", loss_type, tuple(LOSSES))
    return LOSSES[loss_type]


def in_table(column: str) -> Callable[[Callable], Callable]:
    """Write a column of `LOSSES` into the docstring of a function, in place of the word TABLE."""

    def fill(function: Callable) -> Callable:
        rows = [f"{name:9} {getattr(loss, column).__doc__}; {loss.source}" for name, loss in LOSSES.items()]
        function.__doc__ = (function.__doc__ or "").replace("TABLE", "\n    ".join(rows))
        return function

    return fill


# ---- the loss of a batch ----


def importance_ratio(
    per_token_logps: Tensor,
    old_per_token_logps: Tensor,
    completion_mask: Tensor,
    *,
    importance_sampling_level: str = "token",
) -> Tensor:
    r"""The ratio of the probabilities of the sampled tokens under the trained policy and under the old policy.

    .. math:: \rho_{it} = \frac{\pi(o_{it})}{\pi_{old}(o_{it})} \qquad
              \rho_i = \Big(\frac{\pi(o_i)}{\pi_{old}(o_i)}\Big)^{1/|o_i|}

    Left: "token", one ratio per token, as in DeepSeekMath (https://arxiv.org/abs/2402.03300). Right: "sequence", one
    ratio per completion, the geometric mean of the ratios of its tokens, as in GSPO
    (https://arxiv.org/abs/2507.18071); use it with ``loss_type="grpo"``.

    Returns:
        (B, C) for "token", (B, 1) for "sequence"; without unit, 1 where the two policies agree.

    >>> logps, old = torch.tensor([[0.5, 0.25]]).log(), torch.tensor([[0.25, 0.25]]).log()
    >>> importance_ratio(logps, old, torch.ones(1, 2))
    tensor([[2., 1.]])
    >>> importance_ratio(logps, old, torch.ones(1, 2), importance_sampling_level="sequence")
    tensor([[1.4142]])
    """
    check_shapes(per_token_logps, old_per_token_logps=old_per_token_logps, completion_mask=completion_mask)
    check_name("importance_sampling_level", importance_sampling_level, IMPORTANCE_SAMPLING_LEVELS)
    log_ratio = at_least_float32(per_token_logps) - at_least_float32(old_per_token_logps.detach())
    if importance_sampling_level == "sequence":
        total = masked(log_ratio, completion_mask).sum(dim=1, keepdim=True)
        log_ratio = total / completion_mask.sum(dim=1, keepdim=True).clamp(min=1)
    return log_ratio.exp()


@in_table("token")
def per_token_policy_loss(
    per_token_logps: Tensor,
    ratio: Tensor,
    advantages: Tensor,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    loss_type: str = "grpo",
) -> Tensor:
    r"""The policy-gradient loss of each token, before padding is masked.

    TABLE

    PPO's clipping removes the gradient of a token whose ratio has already moved far enough in the direction of its
    advantage. A larger ``epsilon_high`` (0.28 in DAPO, https://arxiv.org/abs/2503.14476) lets unlikely tokens grow
    further. CISPO (https://arxiv.org/abs/2506.13585) clips the weight of a token instead of its update, so every token
    keeps a gradient. There, 5.0 is a usual ``epsilon_high``; if it is None, ``epsilon`` is the largest ratio, as in
    TRL, and 0.2 scales the loss down to about a fifth. REINFORCE (Williams 1992) has no ratio, so it is right in the
    first update after a rollout only.

    Args:
        per_token_logps: used by "cispo" and "reinforce" only.
        ratio: (B, C) or (B, 1), from `importance_ratio`.
        loss_type: those with the same formula differ in `token_weights` only.

    Returns:
        (B, C); (B, 1) if neither the ratio nor the advantages nor the loss type distinguish the tokens of a completion.

    >>> ratio = torch.tensor([[0.5, 1.0, 1.5]])
    >>> per_token_policy_loss(ratio.log(), ratio, torch.tensor([1.0]))
    tensor([[-0.5000, -1.0000, -1.2000]])
    >>> per_token_policy_loss(ratio.log(), ratio, torch.tensor([-1.0]))
    tensor([[0.8000, 1.0000, 1.5000]])
    """
    check_shapes(per_token_logps, advantages)
    check_row_or_token("ratio", ratio, per_token_logps)
    loss = find_loss(loss_type)
    high = epsilon if epsilon_high is None else epsilon_high
    return loss.token(per_token_logps, ratio, advantage_column(advantages.detach()), epsilon, high)


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
    """The fraction of tokens (with "sequence" of completions) whose ratio is clipped.

    Low: the ratio is below 1 - ``epsilon`` and the advantage is negative. High: the ratio is above 1 + ``epsilon_high``
    and the advantage is positive. Region: either of the two. Keys and definitions are the same as in TRL.

    Returns:
        "clip_ratio/low_mean", "clip_ratio/high_mean" and "clip_ratio/region_mean"; for a loss that clips the weight,
        such as "cispo", only "cispo_clip_ratio"; nothing for losses without clip bounds. Scalars between 0 and 1.

    >>> ratio, old = torch.tensor([[0.5, 1.5], [0.5, 1.0]]), torch.zeros(2, 2)
    >>> shares = clip_fractions(ratio.log(), old, torch.tensor([1.0, -1.0]), torch.ones(2, 2))
    >>> {key: float(share) for key, share in shares.items()}
    {'clip_ratio/low_mean': 0.25, 'clip_ratio/high_mean': 0.25, 'clip_ratio/region_mean': 0.5}
    """
    check_shapes(per_token_logps, advantages)
    clips = find_loss(loss_type).clips
    high = epsilon if epsilon_high is None else epsilon_high
    ratio = importance_ratio(
        per_token_logps, old_per_token_logps, completion_mask, importance_sampling_level=importance_sampling_level
    )
    advantages = advantage_column(advantages)
    by_row = importance_sampling_level == "sequence" and advantages.shape[1] == 1
    mask = torch.ones_like(ratio) if by_row else completion_mask

    def share(condition: Tensor) -> Tensor:
        return masked(condition.float(), mask).sum() / mask.sum().clamp(min=1)

    if not clips:
        return {}
    if clips == "weight":
        return {"cispo_clip_ratio": share((ratio > high) & (advantages > 0))}
    low_clipped = (ratio < 1 - epsilon) & (advantages < 0)
    high_clipped = (ratio > 1 + high) & (advantages > 0)
    return {
        "clip_ratio/low_mean": share(low_clipped),
        "clip_ratio/high_mean": share(high_clipped),
        "clip_ratio/region_mean": share(low_clipped | high_clipped),
    }


def advantage_column(advantages: Tensor) -> Tensor:
    """Advantages (B,) as (B, 1); advantages (B, C) unchanged."""
    return advantages if advantages.ndim == 2 else advantages[:, None]


def grpo_loss(
    per_token_logps: Tensor,
    old_per_token_logps: Tensor | None,
    advantages: Tensor,
    completion_mask: Tensor,
    *,
    ref_per_token_logps: Tensor | None = None,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    beta: float = 0.0,
    loss_type: str = "grpo",
    importance_sampling_level: str = "token",
    max_completion_length: int | None = None,
    num_items: int | Tensor | None = None,
    weights: Tensor | None = None,
    **options: Any,
) -> Tensor:
    r"""The loss of a batch, a scalar: the sum over all tokens of the token's weight times its loss.

    .. math:: L = \sum_{i,t} w_{it}\, \ell_{it}

    The loss of each token comes from `per_token_loss`, which also takes the other options, and its weight from
    `token_weights`; both describe the arguments. The content of the padding has no influence on value or gradient.

    The trainer calls this function for each micro-batch, with the rows of the ``weights`` (B, C) of the whole batch, so
    that the losses of the micro-batches add up to the loss of the batch. None: the weights of these completions.

    To leave out truncated completions, set their rows of ``completion_mask`` to zero, as TRL does. Where B is a part of
    the denominator, such a row still counts; elsewhere its tokens no longer count. Two defaults of TRL differ: its
    ``loss_type`` is "dapo", and its ``use_bias_correction_kl`` is True, so the same ``beta`` has another gradient.

    >>> logps = torch.tensor([[-1.0, -2.0], [-1.5, -0.5]])
    >>> mask = torch.tensor([[1, 1], [1, 0]])
    >>> grpo_loss(logps, logps, torch.tensor([1.0, -1.0]), mask, loss_type="bnpo")
    tensor(-0.3333)
    """
    loss = per_token_loss(
        per_token_logps,
        old_per_token_logps,
        advantages,
        completion_mask,
        ref_per_token_logps=ref_per_token_logps,
        epsilon=epsilon,
        epsilon_high=epsilon_high,
        beta=beta,
        loss_type=loss_type,
        importance_sampling_level=importance_sampling_level,
        **options,
    )
    if weights is None:  # not in the trainer, which passes these rows of the weights of the whole batch
        weights = token_weights(
            completion_mask, loss_type=loss_type, max_completion_length=max_completion_length, num_items=num_items
        )
    return weighted_sum(loss, weights)


def per_token_loss(
    per_token_logps: Tensor,
    old_per_token_logps: Tensor | None,
    advantages: Tensor,
    completion_mask: Tensor,
    *,
    ref_per_token_logps: Tensor | None = None,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    beta: float = 0.0,
    loss_type: str = "grpo",
    importance_sampling_level: str = "token",
    use_bias_correction_kl: bool = False,
    importance_weights: Tensor | None = None,
) -> Tensor:
    r"""The loss of each token: the policy-gradient loss of `per_token_policy_loss` and, with ``beta``, a KL penalty.

    .. math:: \ell_{it} = u_{it}\, \ell^{policy}_{it} + \beta\, k_{3,it}

    DeepSeekMath (https://arxiv.org/abs/2402.03300), equation 3, where u = 1.

    Args:
        old_per_token_logps: None: this is the first update after the rollout, so every ratio is 1.
        ref_per_token_logps: required if ``beta`` is not 0.
        beta: weight of the KL penalty.
        use_bias_correction_kl: multiply k3 by the ratio (DeepSeek-V3.2, https://arxiv.org/abs/2512.02556). Then its
            gradient is that of the reverse KL of each token's distribution, given the tokens before it; the effect of a
            token on the KL of later tokens is left out. The GRPO paper does not do this; TRL does by default.
        importance_weights: u, (B, C), if another policy than the trained one sampled the completions (quantized
            rollouts); no gradient flows into them.

    Returns:
        (B, C), or (B, 1) if there is one ratio per completion and nothing else differs between its tokens.

    Raises:
        ValueError: see the module; also ``beta`` without a reference.

    >>> logps = torch.tensor([[-1.0, -2.0], [-1.5, -0.5]])
    >>> per_token_loss(logps, None, torch.tensor([1.0, -1.0]), torch.tensor([[1, 1], [1, 0]]))
    tensor([[-1., -1.],
            [ 1.,  1.]])
    """
    check_shapes(
        per_token_logps,
        advantages,
        completion_mask=completion_mask,
        old_per_token_logps=old_per_token_logps,
        ref_per_token_logps=ref_per_token_logps,
        importance_weights=importance_weights,
    )
    if beta and ref_per_token_logps is None:
        raise ValueError(
            f"ref_per_token_logps must not be None if beta is {beta}; compute the log-probabilities under the "
            "reference policy first, or set beta=0"
        )
    logps = masked(per_token_logps, completion_mask)
    old = logps if old_per_token_logps is None else masked(old_per_token_logps, completion_mask)
    ratio = importance_ratio(logps, old, completion_mask, importance_sampling_level=importance_sampling_level)
    loss = per_token_policy_loss(
        logps, ratio, advantages, epsilon=epsilon, epsilon_high=epsilon_high, loss_type=loss_type
    )
    if importance_weights is not None:  # 1 in the padding
        loss = loss * torch.where(completion_mask != 0, importance_weights.detach(), 1.0)
    if beta and ref_per_token_logps is not None:
        kl = per_token_kl(logps, masked(ref_per_token_logps, completion_mask))
        loss = loss + beta * (kl * ratio if use_bias_correction_kl else kl)
    return loss


def per_token_kl(per_token_logps: Tensor, ref_per_token_logps: Tensor) -> Tensor:
    r"""Estimate KL(policy ‖ reference) from one sampled token: the k3 estimator.

    .. math:: k_3 = e^{d} - d - 1, \quad d = \log \pi_{ref}(o) - \log \pi(o)

    Schulman (http://joschu.net/blog/kl-approx.html). The estimate (B, C), in nats, is never negative. It is unbiased if
    the tokens were sampled from the policy of the first argument; with the opposite sign of d it would be biased. It
    varies less than −d near the reference, and far more where the policy hardly ever samples what the reference likes.

    >>> per_token_kl(torch.tensor([[0.5, 0.25]]).log(), torch.tensor([[0.5, 0.5]]).log())
    tensor([[0.0000, 0.3069]])
    """
    check_shapes(per_token_logps, ref_per_token_logps=ref_per_token_logps)
    difference = at_least_float32(ref_per_token_logps.detach()) - at_least_float32(per_token_logps)
    return difference.exp() - difference - 1


@in_table("weight")
def token_weights(
    completion_mask: Tensor,
    *,
    loss_type: str = "grpo",
    max_completion_length: int | None = None,
    num_items: int | Tensor | None = None,
) -> Tensor:
    r"""The weight of each token in the loss of the batch, in which the loss types differ.

    TABLE

    "grpo" gives a token of a long completion less weight than a token of a short one; "dr_grpo" divides by a constant
    instead. In our trainer, which weights the whole batch at once, "bnpo" and "dapo" are equal. A row without tokens
    has no weight, and denominators are at least 1.
    Because each token has its own weight, a batch can be divided into micro-batches in any way: their losses add up to
    the loss of the batch.

    Args:
        completion_mask: mask of all rows that share the denominator, so in the trainer of the whole batch.
        max_completion_length: the largest number of tokens that generation allows, not the width of this batch; used by
            "dr_grpo" only.
        num_items: number of tokens in the whole update, if it is larger than this batch; used by "dapo" and "cispo".

    Returns:
        (B, C), float64, 0 in the padding.

    Raises:
        ValueError: see the module; also "dr_grpo" without ``max_completion_length``.

    >>> mask = torch.tensor([[1, 1], [1, 0]])
    >>> token_weights(mask, loss_type="grpo")
    tensor([[0.2500, 0.2500],
            [0.5000, 0.0000]], dtype=torch.float64)
    >>> token_weights(mask, loss_type="dr_grpo", max_completion_length=4)
    tensor([[0.1250, 0.1250],
            [0.1250, 0.0000]], dtype=torch.float64)
    """
    if completion_mask.ndim != 2 or 0 in completion_mask.shape:
        raise ValueError(f"completion_mask must have shape (B, C) and not be empty, got {tuple(completion_mask.shape)}")
    mask = completion_mask.to(widest_float_dtype(completion_mask.device))
    wrong = (mask != 0) & (mask != 1)
    if wrong.any():
        raise ValueError(f"completion_mask must contain only 0 and 1, got {mask[wrong][0].item():g}")
    return find_loss(loss_type).weight(mask, max_completion_length, num_items)


def reduce_loss(
    per_token_loss: Tensor,
    completion_mask: Tensor,
    *,
    loss_type: str = "grpo",
    max_completion_length: int | None = None,
    num_items: int | Tensor | None = None,
) -> Tensor:
    r"""Reduce the losses of all tokens to a scalar: the sum of the weights of `token_weights` times the losses.

    In CS336's words: its ``masked_normalize`` with a constant of at least 1 is "dapo" with ``num_items`` = constant,
    and over each row (then the mean of the rows) "dr_grpo" with ``max_completion_length`` = constant. Its
    ``masked_mean`` over each row (then the mean of the rows) is "grpo", but a row without any token counts as 0 here
    and is NaN there.

    Args:
        per_token_loss: (B, C), or (B, 1) for one loss per completion that holds for each of its tokens.
        max_completion_length, num_items: as for `token_weights`.

    >>> loss, mask = torch.tensor([[1.0, 2.0], [5.0, 0.0]]), torch.tensor([[1, 1], [1, 0]])
    >>> reduce_loss(loss, mask, loss_type="grpo"), reduce_loss(loss, mask, loss_type="dapo")
    (tensor(3.2500), tensor(2.6667))
    >>> reduce_loss(loss, mask, loss_type="dr_grpo", max_completion_length=4)
    tensor(1.)
    """
    weights = token_weights(
        completion_mask, loss_type=loss_type, max_completion_length=max_completion_length, num_items=num_items
    )
    return weighted_sum(per_token_loss, weights)


def weighted_sum(per_token_loss: Tensor, weights: Tensor) -> Tensor:
    """The sum of weights times losses per token; if the weight is 0, the loss has no influence, even if it is NaN.

    Args:
        per_token_loss: as for `reduce_loss`.
        weights: (B, C), from `token_weights`; for a micro-batch, its rows.

    >>> weighted_sum(torch.tensor([[1.0, torch.nan]]), torch.tensor([[0.5, 0.0]]))
    tensor(0.5000)
    """
    check_row_or_token("per_token_loss", per_token_loss, weights)
    per_token_loss = at_least_float32(per_token_loss)
    return (masked(per_token_loss, weights) * weights.to(per_token_loss.dtype)).sum()
