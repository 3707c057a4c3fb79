"""The GRPO family of losses, as pure functions of log-probabilities.

A loss is made in three steps, each a function of its own: the ratio between the policy being trained and the
policy that sampled (`importance_ratio`), the loss of every token (`per_token_policy_loss`, `per_token_kl`),
and the reduction of all tokens to one number (`reduce_loss`). What the papers call different algorithms
differs in one of these steps. Formulas and denominators agree with those of TRL's ``GRPOTrainer``.
"""

import torch
from torch import Tensor

from grpo_edu.clipping import (
    IMPORTANCE_SAMPLING_LEVELS,
    LOSS_TYPES,
    check_name,
    check_row_or_token,
    check_shapes,
    clip_fractions,
    importance_ratio,
    masked,
    per_token_policy_loss,
)

__all__ = [
    "IMPORTANCE_SAMPLING_LEVELS",
    "LOSS_TYPES",
    "clip_fractions",
    "grpo_loss",
    "importance_ratio",
    "per_token_kl",
    "per_token_policy_loss",
    "reduce_loss",
]


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
    delta: float | None = None,
    use_bias_correction_kl: bool = False,
    importance_weights: Tensor | None = None,
) -> Tensor:
    r"""The loss of one batch: clipped policy gradient and, with ``beta``, a KL penalty.

    .. math:: \ell_{it} = -\min(\rho_{it} A_i,\ \mathrm{clip}(\rho_{it}, 1-\epsilon, 1+\epsilon_{high}) A_i)
              + \beta\, k_{3,it}

    DeepSeekMath (https://arxiv.org/abs/2402.03300), equation 3. `reduce_loss` says what each ``loss_type``
    divides the sum by. What stands in padding has no influence on the value or the gradient.

    To leave truncated completions out, zero their rows of ``completion_mask``, as TRL does. Such a row still
    counts among the B rows that "grpo" and "dr_grpo" divide by; in "bnpo", "dapo" and "cispo" its tokens
    leave the denominator too.

    Args:
        per_token_logps: (B, C), nats, of the policy being trained, with gradient.
        old_per_token_logps: (B, C), nats, at the start of the update; no gradient flows into it. None: this
            is the first update after the rollout, and every ratio is 1.
        advantages: (B,); no gradient flows into it.
        completion_mask: (B, C), 1 through the first EOS inclusive, then 0.
        ref_per_token_logps: (B, C), nats, of the frozen reference; needed when ``beta`` is not 0.
        epsilon: lower clip bound, a distance from 1.
        epsilon_high: upper clip bound, ``epsilon`` when None; with "cispo" the largest ratio itself.
        beta: weight of the KL penalty.
        loss_type: "grpo", "bnpo", "dr_grpo", "dapo" or "cispo".
        importance_sampling_level: "token", or "sequence" (GSPO).
        max_completion_length: the generation's limit in tokens; needed by "dr_grpo".
        num_items: tokens that count in the whole update; see `reduce_loss`.
        delta: upper bound of the ratio where the advantage is negative; None: no bound.
        use_bias_correction_kl: multiply k3 by the ratio, so that its gradient is that of the reverse KL
            (DeepSeek-V3.2, https://arxiv.org/abs/2512.02556). The GRPO paper does not; TRL does by default.
        importance_weights: (B, C), multiplies the policy part where rollouts were sampled with other
            numbers than the policy computes in training (quantized rollouts); no gradient flows into it.

    Returns:
        scalar; minimize it.

    Raises:
        ValueError: shapes that differ, an unknown name, a negative clip bound, ``beta`` without a reference,
            "dr_grpo" without ``max_completion_length``.

    >>> logps = torch.tensor([[-1.0, -2.0], [-1.5, -0.5]])
    >>> mask = torch.tensor([[1, 1], [1, 0]])
    >>> grpo_loss(logps, logps, torch.tensor([1.0, -1.0]), mask, loss_type="bnpo")
    tensor(-0.3333)
    """
    check_shapes(
        per_token_logps, advantages, completion_mask=completion_mask, old_per_token_logps=old_per_token_logps,
        ref_per_token_logps=ref_per_token_logps, importance_weights=importance_weights,
    )  # fmt: skip
    if beta and ref_per_token_logps is None:
        raise ValueError("ref_per_token_logps is None: with beta, score the batch with the reference first")
    logps = masked(per_token_logps, completion_mask)
    old = logps if old_per_token_logps is None else masked(old_per_token_logps, completion_mask)
    ratio = importance_ratio(logps, old, completion_mask, importance_sampling_level=importance_sampling_level)
    loss = per_token_policy_loss(
        logps, ratio, advantages, epsilon=epsilon, epsilon_high=epsilon_high, delta=delta, loss_type=loss_type
    )
    if importance_weights is not None:
        loss = loss * masked(importance_weights.detach(), completion_mask)
    if beta and ref_per_token_logps is not None:
        kl = per_token_kl(logps, masked(ref_per_token_logps, completion_mask))
        loss = loss + beta * (kl * ratio if use_bias_correction_kl else kl)
    return reduce_loss(
        loss, completion_mask, loss_type=loss_type, max_completion_length=max_completion_length,
        num_items=num_items,
    )  # fmt: skip


def per_token_kl(per_token_logps: Tensor, ref_per_token_logps: Tensor) -> Tensor:
    r"""Estimate KL(policy ‖ reference) from one sampled token: the k3 estimator.

    .. math:: k_3 = e^{d} - d - 1, \quad d = \log \pi_{ref}(o) - \log \pi(o)

    Schulman (http://joschu.net/blog/kl-approx.html). Never negative, and unbiased when the tokens were
    sampled from the policy whose log-probabilities come first; with the sign of d turned it is biased.

    Args:
        per_token_logps: (B, C), nats, with gradient.
        ref_per_token_logps: (B, C), nats; no gradient flows into it.

    Returns:
        (B, C), nats.

    Raises:
        ValueError: shapes that differ.

    >>> per_token_kl(torch.tensor([[0.5, 0.25]]).log(), torch.tensor([[0.5, 0.5]]).log())
    tensor([[0.0000, 0.3069]])
    """
    check_shapes(per_token_logps, ref_per_token_logps=ref_per_token_logps)
    difference = ref_per_token_logps.detach() - per_token_logps
    return difference.exp() - difference - 1


def reduce_loss(
    per_token_loss: Tensor,
    completion_mask: Tensor,
    *,
    loss_type: str = "grpo",
    max_completion_length: int | None = None,
    num_items: int | Tensor | None = None,
) -> Tensor:
    r"""Reduce the tokens' losses to one number; here the loss types differ.

    ======= ============================================ ================================
    grpo    mean over a row's tokens, then over B rows   https://arxiv.org/abs/2402.03300
    bnpo    sum / tokens of this batch                   TRL
    dr_grpo sum / (B · ``max_completion_length``)        https://arxiv.org/abs/2503.20783
    dapo    sum / tokens of the whole update             https://arxiv.org/abs/2503.14476
    cispo   as dapo                                      https://arxiv.org/abs/2506.13585
    ======= ============================================ ================================

    "grpo" gives a token of a long completion less weight than a token of a short one; "dr_grpo" divides by a
    constant instead. A row without tokens has the loss 0, and no denominator is below 1.

    Where an update is made of M micro-batches of B rows each: with "grpo", "bnpo" and "dr_grpo" divide each
    result by M; with "dapo" and "cispo" pass the tokens of all of them as ``num_items``.

    Args:
        per_token_loss: (B, C), or (B, 1), which then stands for each of the row's tokens.
        completion_mask: (B, C), 1 where a token counts.
        loss_type: "grpo", "bnpo", "dr_grpo", "dapo" or "cispo".
        max_completion_length: the generation's limit in tokens, not the width of this batch; "dr_grpo" only.
        num_items: tokens that count in the whole update, this batch's when None; "dapo" and "cispo" only.

    Returns:
        scalar.

    Raises:
        ValueError: shapes that differ, an unknown name, "dr_grpo" without ``max_completion_length``.

    >>> loss, mask = torch.tensor([[1.0, 2.0], [5.0, 0.0]]), torch.tensor([[1, 1], [1, 0]])
    >>> reduce_loss(loss, mask, loss_type="grpo"), reduce_loss(loss, mask, loss_type="dapo")
    (tensor(3.2500), tensor(2.6667))
    >>> reduce_loss(loss, mask, loss_type="dr_grpo", max_completion_length=4)
    tensor(1.)
    """
    if completion_mask.ndim != 2 or 0 in completion_mask.shape:
        raise ValueError(f"completion_mask must be (B, C) without a 0, got {tuple(completion_mask.shape)}")
    check_row_or_token("per_token_loss", per_token_loss, completion_mask)
    check_name("loss_type", loss_type, LOSS_TYPES)
    loss = masked(per_token_loss, completion_mask)
    if loss_type == "grpo":
        return (loss.sum(dim=1) / completion_mask.sum(dim=1).clamp(min=1)).mean()
    if loss_type == "dr_grpo":
        if max_completion_length is None or max_completion_length < 1:
            raise ValueError(
                f"max_completion_length is {max_completion_length}: loss_type='dr_grpo' divides by the "
                "generation's limit in tokens"
            )
        return loss.sum() / (len(loss) * max_completion_length)
    if loss_type == "bnpo" or num_items is None:
        num_items = completion_mask.sum()
    return loss.sum() / torch.as_tensor(num_items, device=loss.device).clamp(min=1)
