"""What a run can be asked for by name: sets of problems, reward functions, and settings that suit them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from grpo_edu.config import GRPOConfig
from grpo_edu.data import load_gsm8k, load_problems
from grpo_edu.gym import PREFIX, check_task, gym_problems, is_gym
from grpo_edu.problems import DOMAINS, LEVELS, Problem
from grpo_edu.rewards import RewardFunction, accuracy_reward, format_reward, length_reward, steps_reward

DATA = (*LEVELS, *DOMAINS, "gsm8k")
REWARDS: dict[str, RewardFunction] = {
    "accuracy": accuracy_reward,
    "format": format_reward,
    "steps": steps_reward,
    "length": length_reward,
}
SPLITS = ("heldout", "train")
BACKENDS = ("grpo_edu", "trl")
DTYPE_CHOICES = ("float32", "bfloat16", "auto")
_GSM8K_LENGTH = 256  # tokens: a worked solution of grade-school length; the generated problems need fewer


def parse_names(names: str | Sequence[str], known: Sequence[str], argument: str) -> tuple[str, ...]:
    """Names of `known`, from a sequence or from one string with commas, each once.

    Raises ValueError that names the argument and what is known.

    >>> parse_names("basic, advanced", LEVELS, "data")
    ('basic', 'advanced')
    """
    parts = names.split(",") if isinstance(names, str) else names
    found = tuple(dict.fromkeys(part.strip() for part in parts if part.strip()))
    unknown = [name for name in found if name not in known]
    if unknown or not found:
        wrong = f"{unknown[0]!r} is unknown" if unknown else "no name given"
        raise ValueError(f"{argument}: {wrong}; choose from {', '.join(known)} (several with commas)")
    return found


def check_data(data: str | Sequence[str]) -> tuple[str, ...]:
    """Names of sets of problems, from a sequence or from one string with commas; raises ValueError for an unknown one.

    >>> check_data("basic,gsm8k")
    ('basic', 'gsm8k')
    """
    parts = [part.strip() for part in (data.split(",") if isinstance(data, str) else data)]
    tasks = [part for part in parts if is_gym(part)]
    for task in tasks:
        check_task(task)
    return parse_names(parts, (*DATA, *tasks, f"{PREFIX}TASK"), "data")


def reward_functions(rewards: str | Callable | Sequence[str | Callable]) -> list[Callable]:
    """The functions behind names of `REWARDS`; a function stands for itself.

    Raises ValueError for an unknown name, or for none at all.

    >>> [function.__name__ for function in reward_functions("accuracy,format")]
    ['accuracy_reward', 'format_reward']
    """
    if isinstance(rewards, str) or callable(rewards):
        rewards = [rewards]
    functions = []
    for reward in rewards:
        if callable(reward):
            functions.append(reward)
        else:
            functions += [REWARDS[name] for name in parse_names(reward, tuple(REWARDS), "rewards")]
    if not functions:
        raise ValueError(f"rewards: none given; choose from {', '.join(REWARDS)}, or write a function")
    return functions


def load_split(
    data: Sequence[str],
    split: str = "heldout",
    *,
    data_path: str | Path | None = None,
    n: int | None = None,
    argument: str = "n",
) -> list[Problem]:
    """Problems of the named sets, one set after the other, `n` in all and balanced between the sets.

    Args:
        data: names of `DATA`, or tasks of reasoning-gym.
        split: "train" or "heldout" (which for GSM8K is its test set).
        data_path: the folder or file of GSM8K; None asks the Hub.
        n: how many in all; the first sets get one more where it does not divide. None takes everything.
        argument: what messages call it.

    Raises ValueError: an unknown split, fewer problems than `n`, or a `data_path` that nothing reads;
    what `load_gsm8k` raises.

    >>> [problem.level for problem in load_split(("basic", "sorting"), n=3)]
    ['basic', 'basic', 'sorting']
    """
    if split not in SPLITS:
        raise ValueError(f"split: {split!r} is unknown; choose one of {', '.join(SPLITS)}")
    if data_path is not None and "gsm8k" not in data:
        raise ValueError("data_path: only gsm8k is read from a path; add gsm8k to data, or leave the path out")
    if n is not None and n < len(data):
        raise ValueError(
            f"{argument}: {n} is fewer than one problem for each of {', '.join(data)}; raise {argument}"
        )
    problems = []
    for index, name in enumerate(data):
        share = None if n is None else n // len(data) + (index < n % len(data))
        if is_gym(name):
            found = gym_problems(name, split, share)
        elif name == "gsm8k":
            found = load_gsm8k("train" if split == "train" else "test", data_path)
        else:
            found = load_problems(name, split)
        share = len(found) if share is None else share
        if share > len(found):
            raise ValueError(
                f"{argument}: {n} asks for {share} {split} problems of {name}, and there are {len(found)}; "
                f"lower {argument}"
            )
        problems += found[:share]
    return problems


def default_config(data: Sequence[str], **settings: Any) -> GRPOConfig:
    """A `GRPOConfig` with room for the solutions of these sets, and any settings of your own.

    >>> default_config(("gsm8k",), seed=3).max_completion_length
    256
    """
    if "gsm8k" in data:
        settings = {"max_completion_length": _GSM8K_LENGTH, **settings}
    return GRPOConfig(**settings)
