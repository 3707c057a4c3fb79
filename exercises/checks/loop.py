"""The training loop that students write in notebook 07, part by part, next to the package's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_edu import GRPOConfig, accuracy_reward, generate, group_advantages, grpo_loss, load_policy, per_token_logps
from grpo_edu.prompts import render_prompt
from grpo_edu.trainer import train


def sample(model: Any, tokenizer: Any, problems: Sequence[Any], config: GRPOConfig, generator: torch.Generator) -> Any:
    """Stages 1 and 2: `config.num_generations` completions for the prompt of each problem."""
    prompts = [render_prompt(tokenizer, problem.prompt) for problem in problems]
    size = {"num_generations": config.num_generations, "max_completion_length": config.max_completion_length}
    return generate(model, tokenizer, prompts, **size, generator=generator)


def score(rollout: Any, problems: Sequence[Any], config: GRPOConfig) -> Tensor:
    """Stage 3: the reward of each completion, (B,)."""
    truth = [problem.answer for problem in problems for _ in range(config.num_generations)]
    return torch.tensor(accuracy_reward(rollout.completions, truth))


def advantages(rewards: Tensor, config: GRPOConfig) -> Tensor:
    """Stage 4: the advantage of each completion, (B,)."""
    return group_advantages(rewards, config.num_generations)


def loss(model: Any, rollout: Any, advantages: Tensor) -> Tensor:
    """Stages 5 and 6: the loss of the first update after a rollout, whose ratios are all 1."""
    mask = rollout.completion_mask
    logps = per_token_logps(model, rollout.prompt_ids, rollout.prompt_mask, rollout.completion_ids, mask)
    return grpo_loss(logps, logps.detach(), advantages, mask, loss_type="grpo")


def update(model: Any, optimizer: torch.optim.Optimizer, loss: Tensor) -> Tensor:
    """Stage 7: one step along the gradient, clipped to norm 1; returns its norm before clipping."""
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return norm


PARTS: tuple[Callable, ...] = (sample, score, advantages, loss, update)


def compare_loop(my_train: Callable[..., Iterator[tuple]], parts: Sequence[Callable], problems: Sequence[Any]) -> None:
    """Run a student's loop and `grpo_edu.train` for three steps from the same start, and print the numbers of both.

    A part that returns None counts as not written, and the package's takes its place. Each result of a written part is
    compared with what the package's part returns for the same arguments. The value of a right loss is 0, so
    its gradient with respect to the weights is compared as well.

    Args:
        my_train: called with model, tokenizer, problems, config and the five parts; yields the rewards (B,), the loss
            and the gradient norm of each step.
        parts: the student's functions for `PARTS`, in this order.
        problems: to train on.

    Raises ValueError if the last part computes gradients or changes weights, and returns None.
    """
    config = GRPOConfig(max_steps=3, num_generations=4, prompts_per_step=4)
    (mine, tokenizer), (theirs, _) = load_policy("tiny"), load_policy("tiny")
    apart: dict[str, float | None] = {part.__name__: None for part in parts}  # None: not written
    tried = [_beside(part, package, apart) for part, package in zip(parts, PARTS, strict=True)]
    steps = []
    for row, metrics in zip(
        my_train(mine, tokenizer, problems, config, *tried),
        train(theirs, tokenizer, problems, accuracy_reward, config),
        strict=True,
    ):
        rewards, own_loss, norm = row
        numbers = [torch.as_tensor(value).detach().item() for value in (rewards.mean(), own_loss, norm)]
        pairs = zip(numbers, (metrics["reward"], metrics["loss"], metrics["grad_norm"]), strict=True)
        pairs_of_weights = zip(mine.parameters(), theirs.parameters(), strict=True)
        distance = sum(float((a - b).detach().square().sum()) for a, b in pairs_of_weights) ** 0.5
        steps.append([*(f"≈ {own:.3f} and {other:.3f}" for own, other in pairs), f"≈ {distance:.6f}"])
    for name, difference in apart.items():
        print(f"{name:14}", "not written yet" if difference is None else f"largest difference ≈ {difference:.0e}")
    for number, (reward, value, norm, distance) in enumerate(steps, start=1):
        print(f"step {number}, yours and the package's: reward {reward}, loss {value}, gradient norm {norm}")
        print(f"        distance between the two models' weights {distance}")


def _beside(part: Callable, package: Callable, apart: dict[str, float | None]) -> Callable:
    """Return the student's part; its largest difference from the package's part is kept in `apart`."""

    def call(*arguments: Any) -> Any:
        generators = [given for given in arguments if isinstance(given, torch.Generator)]
        before = [generator.get_state() for generator in generators]
        state = _state(arguments[0]) if package is update else []
        result = part(*arguments)
        if result is None:
            if package is update and _touched(arguments[0], state):
                raise ValueError(
                    f"{part.__name__} has computed gradients or changed weights, but returned None; "
                    "return the length of the gradient before clipping, which clip_grad_norm_ returns"
                )
            return package(*arguments)
        difference = 0.0
        if package is not update:  # the effect of an update shows in the distance between the weights
            after = [generator.get_state() for generator in generators]
            _set_states(generators, before)  # the package's part draws the same numbers
            expected = package(*arguments)
            difference = _difference(result, expected)
            if package is loss:
                difference = max(difference, _gradient_difference(arguments[0], result, expected))
            _set_states(generators, after)
        apart[part.__name__] = max(difference, apart[part.__name__] or 0.0)
        return result

    return call


def _state(model: Any) -> list[tuple[Tensor, Tensor | None]]:
    return [(p.detach().clone(), None if p.grad is None else p.grad.clone()) for p in model.parameters()]


def _touched(model: Any, state: Sequence[tuple[Tensor, Tensor | None]]) -> bool:
    """Return True if the weights differ from `state`, or gradients were computed since then."""
    for p, (weight, gradient) in zip(model.parameters(), state, strict=True):
        new_gradient = p.grad is not None and (gradient is None or not torch.equal(p.grad, gradient))
        if new_gradient or not torch.equal(p, weight):
            return True
    return False


def _gradient_difference(model: Any, mine: Tensor, package: Tensor) -> float:
    """Return the norm of the difference of two losses' gradients; infinite if the first has none."""
    if not mine.requires_grad:
        return float("inf")
    weights = list(model.parameters())
    gradients = torch.autograd.grad(mine - package, weights, retain_graph=True, allow_unused=True)
    return sum(float(g.square().sum()) for g in gradients if g is not None) ** 0.5


def _set_states(generators: Sequence[torch.Generator], states: Sequence[Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


def _difference(mine: Any, package: Any) -> float:
    """Return the largest difference of two tensors, or of the tokens of two rollouts; infinite for other shapes."""
    if hasattr(package, "completion_ids"):
        mine, package = mine.completion_ids, package.completion_ids
    if tuple(mine.shape) != tuple(package.shape):
        return float("inf")
    return float((mine - package).detach().abs().max())
