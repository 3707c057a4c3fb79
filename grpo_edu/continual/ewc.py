"""Elastic weight consolidation: a quadratic leash that holds a weight the tighter, the more an old task needs it.

Kirkpatrick et al. 2017 (arXiv 1612.00796). The penalty is a term of the loss: `grpo_edu.train` and
`grpo_edu.continual.supervised.finetune` both take it as their `penalty`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from grpo_edu.config import check_numbers


@dataclass(frozen=True)
class Anchor:
    """One task to be remembered, by parameter name: how much each weight matters to it, and where the weight was.

    Raises ValueError for a Fisher diagonal with a negative or undefined entry.
    """

    fisher: Mapping[str, Tensor]
    anchor_params: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        check_fisher(self.fisher)


def copy_params(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights that require a gradient as they are now: θ*, detached copies by name."""
    return {name: weight.detach().clone() for name, weight in model.named_parameters() if weight.requires_grad}


def uniform_fisher(model: nn.Module) -> dict[str, Tensor]:
    """Return a diagonal of ones: with it the penalty is plain L2 to the old weights, which treats all of them alike."""
    return {name: torch.ones_like(weight) for name, weight in copy_params(model).items()}


def ewc_penalty(
    model: nn.Module, fisher: Mapping[str, Tensor], anchor_params: Mapping[str, Tensor], *, ewc_lambda: float
) -> Tensor:
    r"""Return what leaving θ* costs; to be added to the loss of the new task.

    .. math:: \frac{\lambda}{2} \sum_i F_i (\theta_i - \theta^*_i)^2, \qquad
              \nabla_i = \lambda F_i (\theta_i - \theta^*_i)

    Kirkpatrick et al. 2017, equation 3. With a Fisher per token, λ is an exchange rate: how many nats per token of
    the new loss one nat per token of KL from the old predictions is worth. Its gradient at θ* is 0, so it acts from
    the second step on.

    Args:
        model: the model that is being trained.
        fisher: parameter name → tensor of its shape, not negative; weights that it does not name are free.
        anchor_params: θ*, for each name of `fisher`.
        ewc_lambda: λ ≥ 0.

    Returns:
        A scalar with gradient, in the unit of the loss.

    Raises ValueError: λ < 0, a negative or undefined entry of the Fisher diagonal, or a name or shape that does not
    fit the model.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> model.weight.data = torch.tensor([[1.0, 3.0]])
    >>> fisher, anchor_params = {"weight": torch.tensor([[4.0, 0.5]])}, {"weight": torch.tensor([[0.0, 1.0]])}
    >>> ewc_penalty(model, fisher, anchor_params, ewc_lambda=10.0)  # 5 · (4 · 1² + 0.5 · 2²)
    tensor(30., grad_fn=<MulBackward0>)
    """
    check_numbers(ewc_lambda=ewc_lambda)
    check_fisher(fisher)
    return _penalty(model, fisher, anchor_params, ewc_lambda=ewc_lambda)


def _penalty(
    model: nn.Module, fisher: Mapping[str, Tensor], anchor_params: Mapping[str, Tensor], *, ewc_lambda: float
) -> Tensor:
    """`ewc_penalty`, without another look at λ and at all entries of the Fisher diagonal in every step."""
    weights = dict(model.named_parameters())
    check_fits(weights, fisher, "fisher")
    check_fits(weights, {name: anchor_params.get(name) for name in fisher}, "anchor_params")
    terms = [(fisher[name] * (weights[name] - anchor_params[name]) ** 2).sum() for name in fisher]
    return ewc_lambda / 2 * torch.stack(terms).sum()


def anchor_penalty(anchors: Sequence[Anchor], *, ewc_lambda: float) -> Callable[[nn.Module], Tensor]:
    """Return the penalties of several tasks added up, as a function of the model: the `penalty` of a training run.

    Raises ValueError for no anchors or λ < 0; the function raises what `ewc_penalty` raises.
    """
    check_numbers(ewc_lambda=ewc_lambda)
    if not anchors:
        raise ValueError("anchors is empty: there is no task to protect; train without a penalty")

    def penalty(model: nn.Module) -> Tensor:
        parts = [_penalty(model, anchor.fisher, anchor.anchor_params, ewc_lambda=ewc_lambda) for anchor in anchors]
        return torch.stack(parts).sum()

    return penalty


def merge_anchors(old: Anchor, new: Anchor, *, decay: float = 1.0) -> Anchor:
    """Online EWC: one anchor for all tasks so far, at the newest weights, with F = decay · F_old + F_new.

    Schwarz et al. 2018 (arXiv 1805.06370); with decay 1 it is Huszár's correction of EWC for more than two tasks
    (arXiv 1712.03847). Memory stays that of one task.

    Raises ValueError for decay outside [0, 1], or anchors of different models.

    >>> old, new = (Anchor({"w": torch.tensor([f])}, {"w": torch.tensor([p])}) for f, p in ((4.0, 0.0), (1.0, 2.0)))
    >>> merge_anchors(old, new, decay=0.5)
    Anchor(fisher={'w': tensor([3.])}, anchor_params={'w': tensor([2.])})
    """
    check_numbers(decay=decay)
    if old.fisher.keys() != new.fisher.keys():
        odd = min(old.fisher.keys() ^ new.fisher.keys())
        raise ValueError(f"old and new are of different models: only one of them has a weight {odd!r}")
    check_fits(new.fisher, old.fisher, "old")
    fisher = {name: decay * old.fisher[name] + new.fisher[name] for name in new.fisher}
    return Anchor(fisher, new.anchor_params)


def check_fisher(fisher: Mapping[str, Tensor]) -> None:
    """Raise ValueError, with the name, if an entry is negative, infinite or NaN."""
    for name, values in fisher.items():
        wrong = ~((values >= 0) & values.isfinite())
        if wrong.any():
            raise ValueError(
                f"fisher: {name!r} has the entry {values[wrong][0].item():g}, but a mean of squares is a finite number "
                "that is not negative; compute it with fisher_diagonal(model, examples)"
            )


def check_fits(weights: Mapping[str, Tensor], values: Mapping[str, Tensor | None], argument: str) -> None:
    """Raise ValueError, with the name, if `values` holds what is not a weight or has another shape."""
    if not values:
        raise ValueError(f"{argument} is empty: it must name at least one weight of the model")
    for name, value in values.items():
        if name not in weights:
            raise ValueError(f"{argument}: the model has no weight {name!r}; compute it for this model")
        if value is None:
            raise ValueError(f"{argument}: {name!r} is missing; copy it with copy_params(model)")
        if value.shape != weights[name].shape:
            raise ValueError(
                f"{argument}: {name!r} has shape {tuple(value.shape)}, the model's weight "
                f"{tuple(weights[name].shape)}; compute it for this model"
            )
