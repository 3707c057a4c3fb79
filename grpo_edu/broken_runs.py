"""Twelve broken GRPO runs and their mends, for the diagnosis lab: the real trainer, each time with one thing wrong.

A `Setup` is what decides a run beside the model and its problems: the config, the reward functions and, where the
fault sits inside a stage, functions that stand in for functions of `grpo_edu.trainer` while a step runs. The trainer
knows nothing of this module, and everything here that is broken is broken on purpose.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from grpo_edu import trainer
from grpo_edu.broken_stages import (
    EveryRow,
    boxed_reward,
    eos_as_padding,
    generous_reward,
    hasty_advantages,
    plain_prompt,
    shifted_mask,
    stale_old_logps,
    subtracted_kl,
    transposed_advantages,
)
from grpo_edu.config import GRPOConfig
from grpo_edu.rewards import RewardFunction, accuracy_reward, format_reward, reward_name
from grpo_edu.trainer import Batch, update_policy

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from grpo_edu.problems import Problem


@dataclass(frozen=True)
class Setup:
    """What decides a run beside its model and its problems.

    config: the settings. reward_funcs: one or more reward functions.
    replaced: name of a function or class in `grpo_edu.trainer` → what stands in for it.
    """

    config: GRPOConfig
    reward_funcs: tuple[RewardFunction, ...] = (accuracy_reward,)
    replaced: Mapping[str, Callable] = field(default_factory=lambda: MappingProxyType({}))

    def with_config(self, **changes: Any) -> Setup:
        """The same setup with some fields of its config changed.

        >>> HEALTHY.with_config(seed=3).config.seed
        3
        """
        return replace(self, config=replace(self.config, **changes))

    def installed(self, **more: Callable) -> AbstractContextManager[Any]:
        """A context in which the trainer uses the stand-ins, and `more` of them."""
        stand_ins: dict[str, Any] = {**self.replaced, **more}
        return patch.multiple(trainer, **stand_ins) if stand_ins else nullcontext()


@dataclass(frozen=True)
class Case:
    """A fault and its mend: name of the fault, the two in a sentence each, and the two setups."""

    name: str
    fault: str
    mend: str
    broken: Setup
    mended: Setup


def run(
    setup: Setup, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem]
) -> Iterator[tuple[dict[str, float], Batch]]:
    """`grpo_edu.train` under a setup: yields each step's metrics and the batch that it learned from.

    The stand-ins are in place only while a step runs, never between two of them; they hold for the whole process, so
    do not run two setups in two threads.

    Raises what `grpo_edu.train` raises.
    """
    batches: list[Batch] = []

    def keep_batch(model: PreTrainedModel, batch: Batch, *args: Any, **options: Any) -> dict[str, float]:
        batches[:] = [batch]
        return update_policy(model, batch, *args, **options)

    training = trainer.train(model, tokenizer, problems, setup.reward_funcs, setup.config)
    while True:
        with setup.installed(update_policy=keep_batch):
            metrics = next(training, None)
        if metrics is None:
            return
        yield metrics, batches[0]


def difference(case: Case) -> str:
    """What sets the broken setup apart from the mended one: fields of the config, and the functions' own source.

    >>> print(difference(find("G too small")))
    num_generations: 2 where 8 is right
    prompts_per_step: 1 where 8 is right
    """
    wrong, right = case.broken.config.to_dict(), case.mended.config.to_dict()
    lines = [f"{name}: {wrong[name]} where {right[name]} is right" for name in wrong if wrong[name] != right[name]]
    for func in case.broken.reward_funcs:
        if func not in case.mended.reward_funcs:
            paid_for = ", ".join(reward_name(right) for right in case.mended.reward_funcs)
            lines.append(f"the reward function, where {paid_for} is right:\n\n{inspect.getsource(func)}")
    for name, func in case.broken.replaced.items():
        lines.append(f"in place of trainer.{name}:\n\n{inspect.getsource(func)}")
    return "\n".join(lines).rstrip()


# ---- the twelve ----

HEALTHY = Setup(GRPOConfig(max_steps=32, prompts_per_step=8, num_generations=8, learning_rate=2e-4))
_WEIGHTED = replace(HEALTHY.with_config(reward_weights=(1.0, 0.3)), reward_funcs=(accuracy_reward, format_reward))
_REFERENCE_AT_HAND = HEALTHY.with_config(beta=1e-3)
_WITH_KL = HEALTHY.with_config(beta=2.0, learning_rate=4e-4, max_steps=72)  # a wrong sign takes its time


def _replacing(setup: Setup, **functions: Callable) -> Setup:
    return replace(setup, replaced=MappingProxyType(functions))


CASES = (
    Case(
        "reward always 0",
        "The reward looks for an answer in a form that the model never writes.",
        "Read the answer as the model was taught to write it; test the reward on ten real completions.",
        replace(HEALTHY, reward_funcs=(boxed_reward,)),
        HEALTHY,
    ),
    Case(
        "chat template skipped",
        "The prompt is the bare question, a text that the model has never been asked to continue.",
        "Render each prompt with the chat template of the tokenizer.",
        _replacing(HEALTHY, render_prompt=plain_prompt),
        HEALTHY,
    ),
    Case(
        "length truncation",
        "There is no room for a worked answer, so only answers without work can earn anything.",
        "Give completions room: raise max_completion_length until next to none is cut.",
        HEALTHY.with_config(max_completion_length=20),
        HEALTHY,
    ),
    Case(
        "tied rewards",
        "The reward is a sum cut off at 1, and every completion gets there.",
        "Pay for what is wanted, so that siblings earn different rewards.",
        replace(HEALTHY, reward_funcs=(generous_reward,)),
        HEALTHY,
    ),
    Case(
        "G too small",
        "A step is one group of two; more often than not the two tie, and the step is empty.",
        "More completions a step: larger groups, and more of them.",
        HEALTHY.with_config(num_generations=2, prompts_per_step=1),
        HEALTHY,
    ),
    Case(
        "std float trap",
        "Equal rewards differ from their mean by a rounding error, and dividing by about 0 makes it an advantage.",
        "Ask whether the rewards are exactly equal, and add 1e-4 to the standard deviation.",
        _replacing(_WEIGHTED, compute_advantages=hasty_advantages, MicroBatches=EveryRow),
        _WEIGHTED,
    ),
    Case(
        "groups mixed",
        "The advantages are right, but they reach the rows of other questions.",
        "Keep the rows of a group adjacent from the rollout to the loss.",
        _replacing(HEALTHY, compute_advantages=transposed_advantages),
        HEALTHY,
    ),
    Case(
        "mask off by one",
        "The loss never sees the first token of a completion, the one that decides how it goes on.",
        "Let the mask of the loss begin with the first completion token.",
        _replacing(HEALTHY, score_rollout=shifted_mask),
        HEALTHY,
    ),
    Case(
        "EOS masked",
        "The token that ends a completion counts as padding, so that stopping is never learned.",
        "Let the mask run through the first EOS, inclusive.",
        _replacing(HEALTHY, score_rollout=eos_as_padding),
        HEALTHY,
    ),
    Case(
        "lr too high",
        "A step throws the policy so far that it loses the language.",
        "Go back to the last good weights, and take far shorter steps.",
        HEALTHY.with_config(learning_rate=1e-2),
        HEALTHY,
    ),
    Case(
        "stale old log-probabilities",
        "The ratio compares with the model of the first step, so the clip holds the policy near it.",
        "Take the old log-probabilities afresh from each rollout.",
        _replacing(_REFERENCE_AT_HAND, batch_loss=stale_old_logps),
        _REFERENCE_AT_HAND,
    ),
    Case(
        "KL wrong sign",
        "The KL term is subtracted, so that the loss pays for leaving the reference.",
        "Add it; then test it: the term is never negative and grows with the distance.",
        _replacing(_WITH_KL, grpo_loss=subtracted_kl),
        _WITH_KL,
    ),
)


def find(name: str) -> Case:
    """The case of that name; ValueError where there is none."""
    for case in CASES:
        if case.name == name:
            return case
    raise ValueError(f"name: {name!r} is no case; choose one of {', '.join(case.name for case in CASES)}")


def mended_arm(case: Case) -> str:
    """The name under which the study keeps a case's mended runs: most cases share one.

    >>> mended_arm(find("lr too high")), mended_arm(find("KL wrong sign"))
    ('healthy', 'KL wrong sign, mended')
    """
    return "healthy" if case.mended is HEALTHY else f"{case.name}, mended"
