"""What a training starts from, and what it holds between two steps beside the weights, also in a form for files."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from grpo_edu.adapters import reference_policy
from grpo_edu.config import GRPOConfig
from grpo_edu.deepspeed_steps import deepspeed_wanted, start_deepspeed
from grpo_edu.micro_batches import available_room
from grpo_edu.optimizers import build_optimizer, parameters_of
from grpo_edu.problems import Problem
from grpo_edu.prompts import render_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from grpo_edu.trainer import Batch


@dataclass
class TrainingState:
    """All that a training holds between two steps, beside the weights; with them it is what a checkpoint keeps.

    generator: of every sampled token. room: bytes that a pass over a part of a batch may take, less where memory ran
    out. reference: the frozen policy of the KL term, None without one. step: steps done. num_tokens: tokens so far.
    batch, batch_step: what the last step learned from, or failed on, and which step that was.
    """

    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    generator: torch.Generator
    room: float
    reference: PreTrainedModel | None
    step: int = 0
    num_tokens: int = 0
    batch: Batch | None = None
    batch_step: int = 0


def start_training(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem], config: GRPOConfig
) -> TrainingState:
    """The state before the first step; raises ValueError where `train` would before it."""
    check_problems(problems, config)
    optimizer, scheduler = build_optimizer(model, config)
    if deepspeed_wanted():
        engine = start_deepspeed(model, optimizer, config)
        optimizer.deepspeed = engine  # type: ignore[attr-defined]  # where `optimizers.make_stepper` looks
    reference = reference_policy(model) if config.beta else None
    longest = 0 if config.memory_budget_gib is None else longest_prompt(tokenizer, problems)
    generator = torch.Generator().manual_seed(config.seed)
    return TrainingState(optimizer, scheduler, generator, available_room(model, config, longest), reference)


def check_problems(problems: Sequence[Problem], config: GRPOConfig) -> None:
    """Raise ValueError where there are too few problems for one step."""
    if len(problems) < config.prompts_per_step:
        raise ValueError(
            f"problems: {len(problems)} are fewer than prompts_per_step = {config.prompts_per_step}; "
            "give more problems or lower prompts_per_step"
        )


def longest_prompt(tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem]) -> int:
    """Tokens of the longest prompt, found among the hundred that have the most characters."""
    prompts = sorted((problem.prompt for problem in problems), key=len)[-100:]
    rendered = [render_prompt(tokenizer, prompt) for prompt in prompts]
    return max(map(len, tokenizer(rendered, add_special_tokens=False)["input_ids"]))


def problem_order(count: int, seed: int, size: int, *, shuffle: bool = True) -> Iterator[list[int]]:
    """Steps of `size` different problems without end, as indices below `count` >= `size`.

    Each pass is a fresh shuffle, or without `shuffle` the given order, so all come once before any comes twice. A step
    that begins with the last problems of a pass goes on with the first of the next that it does not hold already.

    >>> order = problem_order(3, seed=0, size=2)
    >>> [next(order) for _ in range(3)]
    [[1, 2], [0, 1], [2, 0]]
    """
    rng = random.Random(seed)
    waiting: list[int] = []
    while True:
        if len(waiting) < size:
            fresh = rng.sample(range(count), count) if shuffle else list(range(count))
            first = [index for index in fresh if index not in waiting][: size - len(waiting)]
            waiting += first + [index for index in fresh if index not in first]
        yield waiting[:size]
        waiting = waiting[size:]


def pack_state(state: TrainingState) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A training's state as named tensors and as plain values."""
    tensors = {"random.sampling": state.generator.get_state(), "random.torch": torch.get_rng_state()}
    numbers: dict[str, Any] = {}
    for index, parameter in enumerate(parameters_of(state.optimizer)):
        for key, value in state.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{index}.{key}"] = value.detach().contiguous()
            else:
                numbers[f"{index}.{key}"] = value
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return tensors, {
        "step": state.step,
        "num_tokens": state.num_tokens,
        "room": state.room if math.isfinite(state.room) else None,
        "optimizer": numbers,
        "learning_rates": [group["lr"] for group in state.optimizer.param_groups],
        "scheduler": state.scheduler.state_dict(),
        "python_random": random.getstate(),
        "numpy_random": [kind, np.asarray(keys).tolist(), position, has_gauss, cached],
    }


def unpack_state(state: TrainingState, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
    """Put a state back, its tensors as they were: an optimizer's own loading would change their dtype."""
    parameters = parameters_of(state.optimizer)
    for name, value in [
        *tensors.items(),
        *((f"optimizer.{key}", value) for key, value in numbers["optimizer"].items()),
    ]:
        kind, _, rest = name.partition(".")
        if kind == "optimizer":
            index, _, key = rest.partition(".")
            own = state.optimizer.state[parameters[int(index)]]
            own[key] = value.clone() if isinstance(value, Tensor) else value
    for group, rate in zip(state.optimizer.param_groups, numbers["learning_rates"], strict=True):
        group["lr"] = rate
    state.scheduler.load_state_dict(numbers["scheduler"])
    state.step, state.num_tokens = numbers["step"], numbers["num_tokens"]
    state.room = math.inf if numbers["room"] is None else numbers["room"]
    state.generator.set_state(tensors["random.sampling"])
    torch.set_rng_state(tensors["random.torch"])
    version, words, gauss = numbers["python_random"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = numbers["numpy_random"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
