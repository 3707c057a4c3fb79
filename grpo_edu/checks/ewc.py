"""Exercises of notebook 08, third part: the penalty of elastic weight consolidation, and an anchor that stays put."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from grpo_edu.checks.compare import kind
from grpo_edu.checks.core import Call, Exercise, Mistake, Part, call
from grpo_edu.checks.objective import numbers

# ---- ewc_penalty ----

Weights = dict[str, Tensor]


def ewc_penalty(weights: Weights, fisher: Weights, anchor_params: Weights, ewc_lambda: float) -> Tensor:
    """λ/2 Σ F (θ − θ*)² over the weights that the Fisher names."""
    terms = [(fisher[name] * (weights[name] - anchor_params[name]) ** 2).sum() for name in fisher]
    return ewc_lambda / 2 * torch.stack(terms).sum()


def _all_named(rng: random.Random) -> Call:
    shapes = {"layer": (2, 3), "bias": (2,)}
    weights, anchor = ({name: numbers(rng, *shape) for name, shape in shapes.items()} for _ in range(2))
    fisher = {name: numbers(rng, *shape, low=0.0, high=3.0) for name, shape in shapes.items()}
    return call(weights, fisher, anchor, rng.choice([3.0, 10.0, 50.0]))


def _one_free(rng: random.Random) -> Call:
    made = _all_named(rng)
    made.args[1].pop("bias")
    return made


def _slopes(penalty_of: Callable[..., Any], weights: Weights, *rest: Any) -> dict[str, Any]:
    """What kind of thing the penalty is, and its gradient with respect to each weight."""
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    penalty = penalty_of(leaves, *rest)
    if not isinstance(penalty, Tensor) or not penalty.requires_grad:
        return {"penalty": f"{kind(penalty)} without a gradient", **{f"gradient of {name}": None for name in leaves}}
    slopes = torch.autograd.grad(penalty.sum(), list(leaves.values()), materialize_grads=True)
    found = {f"gradient of {name}": slope for name, slope in zip(leaves, slopes, strict=True)}
    return {"penalty": "a tensor with a gradient", **found}


def _with_gradient(rng: random.Random) -> Call:
    return replace(_all_named(rng), ask=_slopes)


def _penalty_by_loop(weights: Weights, fisher: Weights, anchor_params: Weights, ewc_lambda: float) -> Tensor:
    total = 0.0
    for name, matrix in fisher.items():
        for f, now, then in zip(matrix.flatten(), weights[name].flatten(), anchor_params[name].flatten(), strict=True):
            total = total + f * (now - then) ** 2
    return torch.as_tensor(0.5 * ewc_lambda * total)


def _penalty_by_flattening(weights: Weights, fisher: Weights, anchor_params: Weights, ewc_lambda: float) -> Tensor:
    flat = [torch.cat([part[name].flatten() for name in fisher]) for part in (weights, fisher, anchor_params)]
    moved = flat[0] - flat[2]
    return ewc_lambda * (moved * flat[1]) @ moved / 2


def _penalty_by_roots(weights: Weights, fisher: Weights, anchor_params: Weights, ewc_lambda: float) -> Tensor:
    penalty = torch.zeros(())
    for name in fisher:
        penalty = penalty + ((ewc_lambda * fisher[name] / 2).sqrt() * (weights[name] - anchor_params[name])).norm() ** 2
    return penalty


def _term(make: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """A wrong answer that adds up another term of F, θ and θ*."""

    def wrong(weights: Weights, fisher: Weights, anchor_params: Weights, ewc_lambda: float) -> Tensor:
        terms = [make(fisher[name], weights[name], anchor_params[name]).sum() for name in fisher]
        return ewc_lambda / 2 * torch.stack(terms).sum()

    return wrong


def _over_all_weights(weights: Weights, fisher: Weights, anchor_params: Weights, ewc_lambda: float) -> Tensor:
    return ewc_penalty(weights, {name: fisher[name] for name in weights}, anchor_params, ewc_lambda)


check_ewc_penalty = Exercise(
    "ewc_penalty",
    ewc_penalty,
    parts=(
        Part("every weight has a Fisher", 1, _all_named),
        Part("a weight that the Fisher does not name", 1, _one_free),
        Part("its gradient", 1, _with_gradient),
    ),
    mistakes=(
        Mistake("the half is missing", "λ/2: its derivative is λ F (θ − θ*).",
                lambda weights, fisher, anchor, ewc_lambda: 2 * ewc_penalty(weights, fisher, anchor, ewc_lambda)),
        Mistake("λ is missing", "ewc_lambda says how much the old task is worth.",
                lambda weights, fisher, anchor, ewc_lambda: ewc_penalty(weights, fisher, anchor, 1.0)),
        Mistake("the Fisher is squared too", "Only the distance is squared: F (θ − θ*)².",
                _term(lambda f, now, then: (f * (now - then)) ** 2)),
        Mistake("the distance is not squared", "F (θ − θ*)².", _term(lambda f, now, then: f * (now - then).abs())),
        Mistake("the Fisher plays no part", "That is plain L2. Each weight's distance has its own price.",
                _term(lambda f, now, then: (now - then) ** 2)),
        Mistake("the anchor plays no part", "It pulls back to θ*, not to 0.", _term(lambda f, now, then: f * now**2)),
        Mistake("a mean stands where a sum should", "Add up over all weights.",
                lambda weights, fisher, anchor, ewc_lambda: sum(
                    ewc_lambda / 2 * (fisher[name] * (weights[name] - anchor[name]) ** 2).mean() for name in fisher)),
        Mistake("the Fisher is asked for a weight that it does not name", "Go through the names of `fisher`: the other "
                "weights are free.", _over_all_weights),
        Mistake("the penalty is a number", "`.item()` and `float()` make a number of a tensor. It has no gradient and "
                "protects nothing. Leave it a tensor.", lambda *given: ewc_penalty(*given).item()),
        Mistake("the penalty is cut off from the weights", "`detach()`, `no_grad()` and `torch.tensor()` leave no way "
                "back to the weights. The anchor may be cut off, θ may not.",
                lambda *given: ewc_penalty(*given).detach()),
    ),
    right=(_penalty_by_loop, _penalty_by_flattening, _penalty_by_roots),
)  # fmt: skip


# ---- protected ----


@dataclass(frozen=True)
class Training:
    """Gradient descent on ½ Σ (θ − target)² and a penalty, in place. It is handed to the student's function."""

    target: float
    learning_rate: float
    steps: int

    def __call__(self, weights: Weights, penalty: Callable[[Weights], Tensor]) -> dict[str, Any]:
        """The penalty before each step, whether it had a gradient, and the weights in the end."""
        penalties, with_gradient = [], True
        for _ in range(self.steps):
            extra = penalty(weights)
            loss = sum(0.5 * ((weight - self.target) ** 2).sum() for weight in weights.values()) + extra
            slopes = torch.autograd.grad(loss, list(weights.values()))
            with torch.no_grad():
                for weight, slope in zip(weights.values(), slopes, strict=True):
                    weight -= self.learning_rate * slope
            penalties.append(round(torch.as_tensor(extra).item(), 6))
            with_gradient = with_gradient and torch.as_tensor(extra).requires_grad
        learned = [weight.detach().clone() for weight in weights.values()]
        return {"penalties": penalties, "they have a gradient": with_gradient, "weights": learned}

    def __repr__(self) -> str:
        return f"<a training of {self.steps} steps toward {self.target}>"


def protected(weights: Weights, fisher: Weights, ewc_lambda: float, train: Training) -> dict[str, Any]:
    """What `train` returns, with the EWC penalty around the weights as they are at the call."""
    anchor = {name: weight.detach().clone() for name, weight in weights.items()}
    return train(weights, lambda now: ewc_penalty(now, fisher, anchor, ewc_lambda))


def _some_training(rng: random.Random) -> Call:
    shapes = {"layer": (2, 2), "bias": (2,)}
    weights = {name: numbers(rng, *shape).requires_grad_() for name, shape in shapes.items()}
    fisher = {name: numbers(rng, *shape, low=0.5, high=2.0) for name, shape in shapes.items()}
    train = Training(rng.choice([3.0, -4.0]), rng.choice([0.1, 0.2]), rng.choice([3, 4]))
    return call(weights, fisher, rng.choice([0.8, 1.5]), train)


def _protected_by_deepcopy(weights: Weights, fisher: Weights, ewc_lambda: float, train: Training) -> dict[str, Any]:
    anchor = copy.deepcopy(weights)

    def penalty(now: Weights) -> Tensor:
        parts = [(fisher[name] * (now[name] - anchor[name]).square()).sum() for name in fisher]
        return ewc_lambda / 2 * torch.stack(parts).sum()

    return train(weights, penalty)


def _protected_by_zeros(weights: Weights, fisher: Weights, ewc_lambda: float, train: Training) -> dict[str, Any]:
    with torch.no_grad():
        anchor = {name: weight + 0.0 for name, weight in weights.items()}
    return train(weights, lambda now: ewc_penalty(now, fisher, anchor, ewc_lambda))


def _protected_by_lists(weights: Weights, fisher: Weights, ewc_lambda: float, train: Training) -> dict[str, Any]:
    kept = {name: weight.tolist() for name, weight in weights.items()}
    anchor = {name: torch.tensor(values) for name, values in kept.items()}

    def penalty(now: Weights) -> Tensor:
        total = torch.zeros(())
        for name in fisher:
            total = total + (fisher[name] * (now[name] - anchor[name]) ** 2).sum()
        return ewc_lambda * total / 2

    return train(weights, penalty)


def _anchored_at(anchor_of: Callable[[Tensor], Tensor]) -> Callable[..., dict[str, Any]]:
    """A wrong answer that makes its anchor in another way."""

    def wrong(weights: Weights, fisher: Weights, ewc_lambda: float, train: Training) -> dict[str, Any]:
        anchor = {name: anchor_of(weight) for name, weight in weights.items()}
        return train(weights, lambda now: ewc_penalty(now, fisher, anchor, ewc_lambda))

    return wrong


def _copy_is_trained(weights: Weights, fisher: Weights, ewc_lambda: float, train: Training) -> dict[str, Any]:
    return protected({name: w.detach().clone().requires_grad_() for name, w in weights.items()}, fisher, ewc_lambda,
                     train)  # fmt: skip


def _weights_returned(weights: Weights, fisher: Weights, ewc_lambda: float, train: Training) -> Weights:
    protected(weights, fisher, ewc_lambda, train)
    return weights


def _no_pull(weights: Weights, fisher: Weights, ewc_lambda: float, train: Training) -> dict[str, Any]:
    anchor = {name: weight.detach().clone() for name, weight in weights.items()}
    return train(weights, lambda now: ewc_penalty(now, fisher, anchor, ewc_lambda).detach())


check_protected = Exercise(
    "protected",
    protected,
    parts=(Part("a short training in place", 3, _some_training),),
    mistakes=(
        Mistake("the anchor is no copy", "The training changes the weights in place, and your anchor with them: the "
                "penalty stays 0. `clone()`, once, before the training.", _anchored_at(lambda weight: weight.detach())),
        Mistake("the anchor is part of the graph", "The penalty is there, but its gradient is 0: what pulls at the "
                "weights pulls at the anchor as well. `detach()`.", _anchored_at(lambda weight: weight.clone())),
        Mistake("the penalty has no gradient", "It pulls at nothing: a number, of `.item()` or `float()`, or made of "
                "weights that were detached. Leave it a tensor, of the weights themselves.", _no_pull),
        Mistake("the half is missing", "λ/2, as in `ewc_penalty`.",
                lambda weights, fisher, ewc_lambda, train: protected(weights, fisher, 2 * ewc_lambda, train)),
        Mistake("the Fisher plays no part", "That is plain L2. Each weight's distance has its own price.",
                lambda weights, fisher, ewc_lambda, train: protected(
                    weights, {name: torch.ones_like(values) for name, values in fisher.items()}, ewc_lambda, train)),
        Mistake("a copy is trained", "The weights that were handed in are to learn; the copy is the anchor.",
                _copy_is_trained),
        Mistake("the weights are returned", "`train` returns what is asked for; hand it on.", _weights_returned),
        Mistake("it pulls to 0, not to the old weights", "The anchor holds the weights as they are at the call.",
                _anchored_at(torch.zeros_like)),
    ),
    right=(_protected_by_deepcopy, _protected_by_zeros, _protected_by_lists),
)  # fmt: skip
