"""Rewards for verifiable instructions, from the naive one to one that asks for a text worth reading."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from grpo_edu.extras.reward_calls import Completion, check_column
from grpo_edu.problems.instructions import SET_PREFIX, InstructionCheck, check_instruction


def constraint_reward(
    completions: Sequence[Completion], answer: list, level: list | None = None, **kwargs: Any
) -> list[float | None]:
    """1.0 if a completion obeys every constraint of its instruction, whatever else it says; else 0.0.

    This is the naive reward of notebook 14: a policy learns to obey, and leaves the topic.

    Args:
        answer: B answers of the problems of `grpo_edu.problems.instructions`.
        level: B levels; the function does not apply to (returns None for) problems of other sets.

    Raises ValueError for an answer without constraints, or with one that cannot be checked.

    >>> asked = '{"topic": "the sea", "question": true}'
    >>> constraint_reward(["What is the capital of?", "The sea is wide and calm."], answer=[asked, asked])
    [1.0, 0.0]
    """
    return _instruction_rewards(completions, answer, level, lambda check: all(check.obeyed.values()))


def topic_reward(
    completions: Sequence[Completion], answer: list, level: list | None = None, **kwargs: Any
) -> list[float | None]:
    """1.0 if a completion obeys every constraint of its instruction and names the topic; else 0.0.

    Arguments and errors are those of `constraint_reward`.

    >>> asked = '{"topic": "the sea", "exclamation": true}'
    >>> topic_reward(["The sea is a sea!", "What a day!"], answer=[asked, asked])
    [1.0, 0.0]
    """
    return _instruction_rewards(completions, answer, level, lambda check: all(check.obeyed.values()) and check.on_topic)


def instruction_reward(
    completions: Sequence[Completion], answer: list, level: list | None = None, **kwargs: Any
) -> list[float | None]:
    """1.0 if a completion obeys every constraint of its instruction, names the topic and is worth reading; else 0.0.

    It is worth reading by the rules of `grpo_edu.problems.instructions.is_readable`. The accuracy on these problems is
    the mean of this reward. Arguments and errors are those of `constraint_reward`.

    >>> asked = '{"topic": "the sea", "exclamation": true}'
    >>> instruction_reward(["The sea is a sea!", "How calm the sea looks this morning!"], answer=[asked, asked])
    [0.0, 1.0]
    """
    return _instruction_rewards(completions, answer, level, lambda check: check.passed)


def _instruction_rewards(
    completions: Sequence[Completion], answer: list, level: list | None, paid: Callable[[InstructionCheck], bool]
) -> list[float | None]:
    check_column("answer", answer, len(completions))
    levels = [SET_PREFIX] * len(completions) if level is None else level
    return [
        float(paid(check_instruction(completion, truth))) if own.startswith(SET_PREFIX) else None
        for completion, truth, own in zip(completions, answer, levels, strict=True)
    ]
