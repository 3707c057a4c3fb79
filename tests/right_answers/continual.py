"""Right answers to the exercises of `grpo_edu.checks.continual`, written in other ways than the reference."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from grpo_edu.checks.continual import Anchors, Matrix, ewc_penalty
from grpo_edu.checks.inputs import Training, Weights
from grpo_edu.continual import forgetting as measures
from grpo_edu.continual.fisher import fisher_diagonal


def transfer_by_diagonal(matrix: Matrix) -> float:
    table = np.array(matrix)
    return float((table[-1, :-1] - np.diag(table[1:])[:-1]).mean())


def transfer_by_zip(matrix: Matrix) -> float:
    changes = [last - after[task] for task, (after, last) in enumerate(zip(matrix[1:-1], matrix[-1], strict=False))]
    return sum(changes) / len(changes)


def forgetting_of_the_package(matrix: Matrix, order: list[int]) -> float:
    return measures.forgetting([[row[task] for task in order] for row in matrix])


def forgetting_by_stages(matrix: Matrix, order: list[int]) -> float:
    stage_of = {task: stage for stage, task in enumerate(order, 1)}
    lost = []
    for task, column in enumerate(zip(*matrix, strict=True)):
        *earlier, end = column[stage_of[task] :]
        if earlier:
            lost.append(max(earlier) - end)
    return sum(lost) / len(lost)


def forgetting_by_running(matrix: Matrix, order: list[int]) -> float:
    best: dict[int, float] = {}
    for row, task in zip(matrix[1:-1], order, strict=False):
        best[task] = 0.0
        best = {known: max(old, row[known]) for known, old in best.items()}
    return float(np.mean([old - matrix[-1][known] for known, old in best.items()]))


def choice_by_nesting(low: float, high: float, tolerated: float, rate_can_fall: bool, old_data_kept: bool) -> str:
    answer = "nothing"
    if high > tolerated:
        answer = "more seeds"
        if low > tolerated:
            answer = "ewc"
            if old_data_kept:
                answer = "replay"
            if rate_can_fall:
                answer = "lower rate"
    return answer


def choice_by_table(low: float, high: float, tolerated: float, rate_can_fall: bool, old_data_kept: bool) -> str:
    rules = [
        (high <= tolerated, "nothing"),
        (low <= tolerated, "more seeds"),
        (rate_can_fall, "lower rate"),
        (old_data_kept, "replay"),
        (True, "ewc"),
    ]
    return next(answer for holds, answer in rules if holds)


def choice_by_count(low: float, high: float, tolerated: float, rate_can_fall: bool, old_data_kept: bool) -> str:
    above = (low > tolerated) + (high > tolerated)
    if above < 2:
        return ("nothing", "more seeds")[above]
    return ("lower rate" if rate_can_fall else None) or ("replay" if old_data_kept else "ewc")


def fisher_by_definition(weight: Tensor, inputs: Tensor) -> Tensor:
    total = torch.zeros_like(weight)
    for x in inputs:
        p = (weight @ x).softmax(dim=0)
        for label in range(len(p)):
            score = torch.outer(nn.functional.one_hot(torch.tensor(label), len(p)) - p, x)
            total += p[label] * score**2
    return total / len(inputs)


def fisher_by_package(weight: Tensor, inputs: Tensor) -> Tensor:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = weight.clone()
    examples = [(x[None], torch.zeros(1, dtype=torch.long)) for x in inputs]
    return fisher_diagonal(layer, examples, kind="true", forward=lambda model, x, y: (model(x), y))["weight"]


def fisher_by_einsum(weight: Tensor, inputs: Tensor) -> Tensor:
    p = torch.softmax(torch.einsum("kd,nd->nk", weight, inputs), dim=-1)
    return torch.einsum("nk,nd->nkd", p - p * p, inputs * inputs).mean(dim=0)


def found_by_zero(fishers: list[Callable[[Tensor], Tensor]]) -> int:
    values = [fisher(torch.tensor([[3.0, 1.0], [-3.0, -1.0]])).sum().item() for fisher in fishers]
    return values.index(0.0)


def found_by_truth(fishers: list[Callable[[Tensor], Tensor]]) -> int:
    scores = torch.randn(7, 3, generator=torch.Generator().manual_seed(1))
    truth = scores.square().mean(dim=0)
    (place,) = (place for place, fisher in enumerate(fishers) if not torch.allclose(fisher(scores), truth))
    return place


def found_by_sign(fishers: list[Callable[[Tensor], Tensor]]) -> int:
    same, turned = torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [-2.0]])
    return next(place for place, fisher in enumerate(fishers) if not torch.allclose(fisher(same), fisher(turned)))


def penalty_by_loop(weights: Weights, anchors: Anchors, ewc_lambda: float) -> Tensor:
    total = 0.0
    for fisher, old in anchors:
        for name, matrix in fisher.items():
            for f, now, then in zip(matrix.flatten(), weights[name].flatten(), old[name].flatten(), strict=True):
                total = total + f * (now - then) ** 2
    return torch.as_tensor(0.5 * ewc_lambda * total)


def penalty_by_flattening(weights: Weights, anchors: Anchors, ewc_lambda: float) -> Tensor:
    named = [(weights[name], fisher[name], old[name]) for fisher, old in anchors for name in fisher]
    now, stiffness, old = (torch.cat([one.flatten() for one in parts]) for parts in zip(*named, strict=True))
    return ewc_lambda * ((now - old) * stiffness) @ (now - old) / 2


def penalty_by_tasks(weights: Weights, anchors: Anchors, ewc_lambda: float) -> Tensor:
    penalty = torch.zeros(())
    for fisher, old in anchors:
        penalty = penalty + sum((fisher[name] * (weights[name] - old[name]).square()).sum() for name in fisher)
    return penalty * ewc_lambda / 2


def protected_by_deepcopy(weights: Weights, fisher: Weights, ewc_lambda: float, train: Training) -> dict[str, Any]:
    anchor = copy.deepcopy(weights)

    def penalty(now: Weights) -> Tensor:
        parts = [(fisher[name] * (now[name] - anchor[name]).square()).sum() for name in fisher]
        return ewc_lambda / 2 * torch.stack(parts).sum()

    return train(weights, penalty)


def protected_by_zeros(weights: Weights, fisher: Weights, ewc_lambda: float, train: Training) -> dict[str, Any]:
    with torch.no_grad():
        anchor = {name: weight + 0.0 for name, weight in weights.items()}
    return train(weights, lambda now: ewc_penalty(now, [(fisher, anchor)], ewc_lambda))


def protected_by_lists(weights: Weights, fisher: Weights, ewc_lambda: float, train: Training) -> dict[str, Any]:
    kept = {name: weight.tolist() for name, weight in weights.items()}
    anchor = {name: torch.tensor(values) for name, values in kept.items()}

    def penalty(now: Weights) -> Tensor:
        total = torch.zeros(())
        for name in fisher:
            total = total + (fisher[name] * (now[name] - anchor[name]) ** 2).sum()
        return ewc_lambda * total / 2

    return train(weights, penalty)


RIGHT_ANSWERS = {
    "backward_transfer": (measures.backward_transfer, transfer_by_diagonal, transfer_by_zip),
    "forgetting": (forgetting_of_the_package, forgetting_by_stages, forgetting_by_running),
    "choose_protection": (choice_by_nesting, choice_by_table, choice_by_count),
    "softmax_fisher": (fisher_by_definition, fisher_by_package, fisher_by_einsum),
    "squares_a_mean": (found_by_zero, found_by_truth, found_by_sign),
    "ewc_penalty": (penalty_by_loop, penalty_by_flattening, penalty_by_tasks),
    "protected": (protected_by_deepcopy, protected_by_zeros, protected_by_lists),
}
