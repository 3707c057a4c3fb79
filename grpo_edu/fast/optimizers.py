"""Optimizers and what they cost in memory: AdamW and Adafactor.

For n weights of 4 bytes, AdamW holds 4n bytes of gradients and 8n bytes of states next to the 4n bytes of the weights.
This makes 16n bytes, or 7.9 GB for 494 million weights. **Adafactor** (Shazeer and Stern 2018,
https://arxiv.org/abs/1804.04235) keeps a running mean of squared gradients for each row and each column of a matrix
instead of two numbers per weight. The product of the two approximates the second moment, and there is no first moment.
It needs almost no memory for states; the price is a rougher step.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from grpo_edu.config import GRPOConfig, SupervisedConfig


def build_optimizer(
    model: nn.Module, config: GRPOConfig | SupervisedConfig
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    """Return the config's optimizer, over all parameters that require a gradient, and its learning-rate schedule.

    Adafactor is set up as TRL does for ``optim="adafactor"``, so `learning_rate` has the same meaning as for AdamW.

    Raises ValueError if no parameter requires a gradient (a frozen or quantized model), and warns where most weights
    are in a format that rounds a step of this size away.
    """
    scheme = getattr(model, "quantization_scheme", None)
    if scheme is not None:
        raise ValueError(
            f"model is quantized ({scheme}) and cannot be trained, because rounding would remove the small steps of an "
            "optimizer; train the original model and sample from a quantized copy (rollout_quantization)"
        )
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ValueError(
            "model has no parameter that requires a gradient; load it with load_policy, neither frozen nor quantized"
        )
    for parameter in parameters:  # so that a first step without gradient counts as a later one does
        parameter.grad = torch.zeros_like(parameter)
    warn_of_rounding(parameters, config.learning_rate)
    options: dict[str, Any] = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    if config.optim == "adafactor":
        from transformers import Adafactor

        optimizer = Adafactor(parameters, **options, scale_parameter=False, relative_step=False)
    else:
        optimizer = torch.optim.AdamW(parameters, fused=True, **options)  # one pass over memory, not ten
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, partial(learning_rate_share, config=config))


def warn_of_rounding(parameters: Iterable[Tensor], learning_rate: float) -> None:
    """Warn where half precision rounds the update of most weights away, so that they never change.

    AdamW and Adafactor change a weight by about the learning rate. In bfloat16, 1 + 1/512 is 1.
    """
    half = [weight.detach() for weight in parameters if torch.finfo(weight.dtype).bits < 32]
    if not half:
        return
    movable = sum(int((weight + learning_rate != weight).sum()) for weight in half)
    share = movable / sum(weight.numel() for weight in half)
    if share < 0.5:
        name = str(half[0].dtype).removeprefix("torch.")
        warnings.warn(
            f"the weights are trained in {name}, where a step at learning_rate = {learning_rate:g} changes only "
            f"{share:.2%} of them; all other updates are rounded away. Train in float32, or train LoRA adapters, whose "
            "weights are in float32.",
            RuntimeWarning,
            stacklevel=3,
        )


def learning_rate_share(step: int, config: GRPOConfig | SupervisedConfig) -> float:
    """Return the share of `learning_rate` that a step takes, counted from 0: transformers' schedules of the same names.

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


def clip_and_step(
    optimizer: torch.optim.Optimizer, max_grad_norm: float, abort_grad_norm: float | None = None
) -> float:
    """Scale the gradient of all parameters down to `max_grad_norm` (0: leave it) and take the step.

    Returns the norm before it was clipped. Raises FloatingPointError before the weights change if the norm is not
    finite, or above `abort_grad_norm` (None: no bound).
    """
    norm = nn.utils.clip_grad_norm_(parameters_of(optimizer), max_grad_norm or math.inf)
    check_gradient(norm, abort_grad_norm)
    optimizer.step()
    return norm.item()


def check_gradient(norm: Tensor, longest: float | None = None) -> None:
    """Raise FloatingPointError if the norm of a gradient is not finite, or above `longest` (None: no bound).

    >>> check_gradient(torch.tensor(2.0), longest=1.0)
    Traceback (most recent call last):
    ...
    FloatingPointError: gradient norm 2 exceeds abort_grad_norm = 1; training stopped and the weights were kept as they
    were. Try a lower learning_rate, and look at the rewards of this step.
    """
    if not torch.isfinite(norm):
        fault = f"gradient norm is {norm.item()}, not a finite number"
    elif longest is not None and norm > longest:
        fault = f"gradient norm {norm.item():.3g} exceeds abort_grad_norm = {longest:g}"
    else:
        return
    raise FloatingPointError(
        f"{fault}; training stopped and the weights were kept as they were. Try a lower learning_rate, and look at the "
        "rewards of this step."
    )


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return all parameters of an optimizer, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
