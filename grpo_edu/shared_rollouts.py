"""A rollout that several processes sample together: each its part of the prompts, with the numbers of one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from grpo_edu.config import GRPOConfig
from grpo_edu.processes import this_process
from grpo_edu.rollout import Rollout


@contextmanager
def own_draws(generator: torch.Generator, config: GRPOConfig) -> Iterator[slice]:
    """A context in which a rollout of this process's prompts draws what one process would draw for them.

    `rollout.generate` draws one number for every token that may come, prompt after prompt; the others' are passed over.
    Gives the prompts of this process.
    """
    own = this_process().part(config.prompts_per_step)
    _pass_over(generator, own.start, config)
    yield own
    _pass_over(generator, config.prompts_per_step - own.stop, config)


def _pass_over(generator: torch.Generator, prompts: int, config: GRPOConfig) -> None:
    shape = (prompts * config.num_generations, config.max_completion_length)
    torch.rand(shape, generator=generator, dtype=torch.float64)


def join_rollouts(rollout: Rollout, pad_token_id: int) -> Rollout:
    """The rollouts of all processes as one, the main process's first; each process gets the same."""
    processes = this_process()
    if processes.count == 1:
        return rollout
    tensors = {name: value for name, value in vars(rollout).items() if isinstance(value, torch.Tensor)}
    on_cpu: dict[str, Any] = {name: value.cpu() for name, value in tensors.items()}
    given = processes.exchange("rollouts", replace(rollout, **on_cpu))
    fill = {"prompt_ids": pad_token_id, "completion_ids": pad_token_id}
    joined: dict[str, Any] = {
        name: _stack([getattr(part, name) for part in given], fill.get(name, 0), left=name.startswith("prompt")).to(
            rollout.prompt_ids.device
        )
        for name in tensors
    }
    joined |= {name: [text for part in given for text in getattr(part, name)] for name in ("prompts", "completions")}
    return replace(rollout, **joined)


def _stack(parts: Sequence[Tensor], fill: float, *, left: bool) -> Tensor:
    """Rows of all parts, (b, c) or (b,), widened to the widest part on one side."""
    if parts[0].ndim == 1:
        return torch.cat(list(parts))
    widest = max(part.shape[1] for part in parts)
    sides = [(widest - part.shape[1], 0) if left else (0, widest - part.shape[1]) for part in parts]
    pad = torch.nn.functional.pad
    return torch.cat([pad(part, side, value=fill) for part, side in zip(parts, sides, strict=True)])
