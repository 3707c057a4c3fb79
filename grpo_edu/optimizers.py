"""What turns gradients into new weights, and what each way costs in memory.

For n weights of 4 bytes, AdamW holds 4n bytes of gradients and 8n of states beside the 4n of the weights: 16n bytes,
7.9 GB for 494 million. Two ways out, which can be had together:

- **Adafactor** (Shazeer and Stern 2018, https://arxiv.org/abs/1804.04235) keeps, instead of two numbers a weight, a
  running mean of squared gradients for each row and each column of a matrix. Its product stands for the second moment;
  a first moment it does without. States: almost none. Price: a rougher step.
- **The step in the backward pass** (LOMO, https://arxiv.org/abs/2306.09782): a weight is updated as soon as its
  gradient is known, and the gradient is let go, so that they are never all there. Price: the length of the whole
  gradient is known only when all of it has passed, so clipping by `max_grad_norm` takes a backward pass of its own.
  And nothing can be accumulated over several batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from grpo_edu.config import GRPOConfig, SupervisedConfig
from grpo_edu.deepspeed_steps import StepThroughDeepSpeed
from grpo_edu.processes import this_process


def build_optimizer(
    model: nn.Module, config: GRPOConfig | SupervisedConfig
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    """The optimizer that the config names, over the parameters that want a gradient, and its learning-rate schedule.

    Adafactor as TRL sets it up for ``optim="adafactor"``: `learning_rate` means the same as AdamW's.

    Raises ValueError where no parameter wants a gradient (a frozen or quantized model).
    """
    scheme = getattr(model, "quantization_scheme", None)
    if scheme is not None:
        raise ValueError(
            f"model: is quantized ({scheme}) and cannot learn: its rounding would swallow the steps of a training; "
            "train the original, and let a quantized copy sample (rollout_quantization)"
        )
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ValueError("model: no parameter wants a gradient; load it with load_policy, not frozen or quantized")
    for parameter in parameters:  # so that a first step without gradient counts as a later one does
        parameter.grad = None if config.optimizer_in_backward else torch.zeros_like(parameter)
    options: dict[str, Any] = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    if config.optim == "adafactor":
        from transformers import Adafactor

        optimizer = Adafactor(parameters, **options, scale_parameter=False, relative_step=False)
    else:
        optimizer = torch.optim.AdamW(parameters, fused=True, **options)  # one pass over memory, not ten
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, partial(learning_rate_share, config=config))


def learning_rate_share(step: int, config: GRPOConfig | SupervisedConfig) -> float:
    """The share of `learning_rate` that a step takes, counted from 0: transformers' schedules of the same names.

    They are written out here because transformers' module brings trainers along that take a quarter of a second.

    >>> config = GRPOConfig(lr_scheduler_type="linear", warmup_steps=2, max_steps=6)
    >>> [learning_rate_share(step, config) for step in range(6)]
    [0.0, 0.5, 1.0, 0.75, 0.5, 0.25]
    """
    if config.lr_scheduler_type == "constant":
        return 1.0
    if step < config.warmup_steps:
        return step / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.max_steps - config.warmup_steps)
    falling = {"constant_with_warmup": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
    return max(0.0, falling[config.lr_scheduler_type])


def make_stepper(optimizer: torch.optim.Optimizer, config: GRPOConfig) -> Stepper:
    """What turns the losses of an update into a step of this optimizer, as the config and the launcher want it."""
    engine = getattr(optimizer, "deepspeed", None)  # `training_state.start_training` puts it there
    if engine is not None:
        return StepThroughDeepSpeed(engine, config.abort_grad_norm)
    stepping = StepInBackward if config.optimizer_in_backward else StepAfterBackward
    return stepping(optimizer, config.max_grad_norm, config.abort_grad_norm)


class StepAfterBackward:
    """The usual way: add up the gradients of all passes, clip their common length, and step."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, max_grad_norm: float, abort_grad_norm: float | None = None
    ) -> None:
        self.optimizer, self.max_grad_norm, self.abort_grad_norm = optimizer, max_grad_norm, abort_grad_norm
        self.parameters = parameters_of(optimizer)

    def begin(self) -> None:
        """Start an update without gradient."""
        self.optimizer.zero_grad(set_to_none=False)

    def add(self, loss: Tensor) -> None:
        """Add the gradient of a loss; its graph is freed."""
        loss.backward()

    def finish(self) -> float:
        """Step, along the sum of all processes' gradients; returns its length before it was clipped.

        Raises FloatingPointError before the weights change when it is not finite, or longer than `abort_grad_norm`.
        """
        this_process().add_up([weight.grad for weight in self.parameters if weight.grad is not None])
        norm = nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm or math.inf)
        check_gradient(norm, self.abort_grad_norm)
        self.optimizer.step()
        return norm.item()


class StepInBackward:
    """A weight is updated as soon as the backward pass knows its gradient, which is then let go.

    With `max_grad_norm` a first backward pass measures the length of the gradient and keeps nothing else; then the
    update is that of `StepAfterBackward`. With `max_grad_norm` = 0 there is one pass, and a gradient that is not finite
    is noticed when weights behind it have already moved.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, max_grad_norm: float, abort_grad_norm: float | None = None
    ) -> None:
        self.optimizer, self.max_grad_norm, self.abort_grad_norm = optimizer, max_grad_norm, abort_grad_norm
        self.parameters = parameters_of(optimizer)

    def begin(self) -> None:
        """Start an update without gradient."""
        self.optimizer.zero_grad(set_to_none=True)
        self.loss: Tensor | None = None

    def add(self, loss: Tensor) -> None:
        """Add a loss; its graph is kept until the end."""
        self.loss = loss if self.loss is None else self.loss + loss

    def finish(self) -> float:
        """Run the backward pass and step; returns the length of the gradient before it was clipped.

        Raises FloatingPointError when it is not finite, or longer than `abort_grad_norm`.
        """
        lengths: list[Tensor] = []
        scale = 1.0

        def measure(weight: Tensor) -> None:
            lengths.append(_gradient(weight).norm())
            check_gradient(lengths[-1], self.abort_grad_norm)
            weight.grad = None

        def apply(weight: Tensor) -> None:
            if not self.max_grad_norm:
                lengths.append(_gradient(weight).norm())
                check_gradient(lengths[-1], self.abort_grad_norm, "moved in part (max_grad_norm = 0)")
            _gradient(weight).mul_(scale)
            self.optimizer.step()  # steps over every weight that has no gradient
            weight.grad = None

        if self.max_grad_norm:
            self._backward(measure, retain_graph=True)
            norm = _length(lengths)
            check_gradient(norm, self.abort_grad_norm)
            scale = min(1.0, self.max_grad_norm / (norm.item() + 1e-6))
        reached = self._backward(apply)
        for weight in self.parameters:
            if weight not in reached:  # momentum and weight decay act without a gradient as well
                weight.grad = torch.zeros_like(weight)
                apply(weight)
        return _length(lengths).item()

    def _backward(self, act: Callable[[Tensor], None], retain_graph: bool = False) -> set[Tensor]:
        """Run the backward pass and act on every weight when its gradient is complete; returns these weights."""
        reached: set[Tensor] = set()
        if self.loss is None:
            return reached

        def hook(weight: Tensor) -> None:
            reached.add(weight)
            act(weight)

        handles = [weight.register_post_accumulate_grad_hook(hook) for weight in self.parameters]
        try:
            self.loss.backward(retain_graph=retain_graph)
        finally:
            for handle in handles:
                handle.remove()
        return reached


Stepper = StepAfterBackward | StepInBackward | StepThroughDeepSpeed


def check_gradient(norm: Tensor, longest: float | None = None, weights: str = "left as they are") -> None:
    """Raise FloatingPointError where the length of a gradient is not finite, or above `longest` (None: no bound).

    weights: how they are now, for the message.

    >>> check_gradient(torch.tensor(2.0), longest=1.0)
    Traceback (most recent call last):
    ...
    FloatingPointError: the gradient is 2 long, beyond abort_grad_norm = 1, so the weights were left as they are;
    lower learning_rate, or look at the rewards of this step
    """
    if not torch.isfinite(norm):
        fault = "the gradient is not finite"
    elif longest is not None and norm > longest:
        fault = f"the gradient is {norm.item():.3g} long, beyond abort_grad_norm = {longest:g}"
    else:
        return
    raise FloatingPointError(
        f"{fault}, so the weights were {weights}; lower learning_rate, or look at the rewards of this step"
    )


def _gradient(weight: Tensor) -> Tensor:
    assert weight.grad is not None, "called before the backward pass"
    return weight.grad


def _length(lengths: Iterable[Tensor]) -> Tensor:
    """Length of a gradient from those of its parts."""
    return torch.stack([length.double() for length in lengths]).norm() if lengths else torch.zeros(())


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All that an optimizer updates, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
