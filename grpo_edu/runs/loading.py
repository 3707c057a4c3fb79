"""The problems and the rewards of a run: which names there are, and how to load what they name.

A name of a problem set is one of `problem_set_names`, a task of reasoning-gym, or a file or folder of the user. A name
of a reward is one of `REWARDS`, FILE.py:function or package.module:function; `resolve_rewards` turns names into
functions, once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_edu.problems.files import load_problem_set
from grpo_edu.problems.gym import PREFIX, check_task, gym_problems, is_gym
from grpo_edu.problems.own import is_user_file, load_user_problems
from grpo_edu.problems.templates import PROBLEM_SETS, UNANSWERED, Problem, problem_set_names, reward_columns
from grpo_edu.rewards import REWARDS, RewardFunction, reward_name
from grpo_edu.runs.user_rewards import check_columns, load_reward

Rewards = str | RewardFunction | Sequence[str | RewardFunction]
SPLITS = ("heldout", "train")


@dataclass(frozen=True)
class RunData:
    """The loaded data of a run, for training and evaluation.

    examples: solved problems that are part of every prompt. problems: to train on. heldout: to evaluate on.
    reward_funcs: the functions that score completions.
    """

    examples: list[Problem]
    problems: list[Problem]
    heldout: list[Problem]
    reward_funcs: list[RewardFunction]


def split_names(names: str | Sequence[str]) -> tuple[str, ...]:
    """Return names from a sequence or from one string with commas, each once.

    >>> split_names("q_proj, v_proj")
    ('q_proj', 'v_proj')
    """
    parts = names.split(",") if isinstance(names, str) else names
    return tuple(dict.fromkeys(part.strip() for part in parts if part.strip()))


def parse_names(names: str | Sequence[str], known: Sequence[str], argument: str) -> tuple[str, ...]:
    """Return names from a sequence or from one string with commas, each once; all must be in `known`.

    Raises ValueError that names the argument, the unknown name and what is known.

    >>> parse_names("basic, advanced", ("basic", "intermediate", "advanced"), "data")
    ('basic', 'advanced')
    """
    found = split_names(names)
    choose = f"choose from {', '.join(known)}."
    if not found:
        raise ValueError(f"`{argument}` is empty; {choose}")
    for name in found:
        if name not in known:
            raise ValueError(f"`{argument}`: {name!r} is unknown; {choose}")
    return found


def parse_data(data: str | Sequence[str]) -> tuple[str, ...]:
    """Return names of problem sets, from a sequence or from one string with commas.

    Raises ValueError for a set, or a task of reasoning-gym, that does not exist.

    >>> parse_data("basic,gsm8k")
    ('basic', 'gsm8k')
    """
    names = split_names(data)
    tasks = [name for name in names if is_gym(name)]
    for task in tasks:
        check_task(task)
    own = [name for name in names if is_user_dataset(name)]
    return parse_names(names, (*problem_set_names(), *tasks, *own, f"{PREFIX}TASK", "FILE"), "data")


def is_user_dataset(name: str) -> bool:
    """Return whether a name of `data` is a file or a folder of your own."""
    return (
        name not in problem_set_names()
        and not is_gym(name)
        and (is_user_file(name) or Path(name).expanduser().exists())
    )


def parse_rewards(rewards: Rewards) -> tuple[str | RewardFunction, ...]:
    """Return short names and functions; names may have come in one string, or as names of the package's functions."""
    entries: list[str | RewardFunction] = []
    for reward in [rewards] if isinstance(rewards, str) or callable(rewards) else rewards:
        if isinstance(reward, str):
            names = [short_reward_name(name) for name in split_names(reward)]
            own = [name for name in names if all(name.rpartition(":"))]
            entries += parse_names(names, (*REWARDS, *own, "FILE.py:function"), "reward_funcs")
        else:
            entries.append(reward)
    if not entries:
        raise ValueError(f"`reward_funcs` is empty; choose from {', '.join(REWARDS)}, or write a function.")
    return tuple(entries)


def reward_label(entry: str | RewardFunction) -> str:
    """Return the name of a reward function in the metrics."""
    if not isinstance(entry, str):
        return reward_name(entry)
    return reward_name(REWARDS[entry]) if entry in REWARDS else entry.rpartition(":")[2]


def short_reward_name(name: str) -> str:
    """Return "accuracy" for "accuracy_reward", as in the metrics; other names stay."""
    return next((short for short, function in REWARDS.items() if reward_name(function) == name), name)


def resolve_rewards(rewards: Rewards) -> list[RewardFunction]:
    """Return the functions behind names of `REWARDS`, or behind the names of its functions; a function stays itself.

    Raises ValueError for an unknown name, or for none at all.

    >>> [function.__name__ for function in resolve_rewards("accuracy,format_reward")]
    ['accuracy_reward', 'format_reward']
    """
    return [
        (REWARDS[entry] if entry in REWARDS else load_reward(entry)) if isinstance(entry, str) else entry
        for entry in parse_rewards(rewards)
    ]


def load_split(
    data: Sequence[str],
    split: str = "heldout",
    *,
    data_path: str | Path | None = None,
    heldout_file: str | Path | None = None,
    columns: Sequence[str] = (),
    n: int | None = None,
    argument: str = "n",
) -> list[Problem]:
    """Load problems of the named sets, one set after the other, `n` in all and balanced between the sets.

    Args:
        data: names of `problem_set_names`, tasks of reasoning-gym, or files of your own.
        split: "train" or "heldout" (which for GSM8K is its test set).
        data_path: the folder or file of GSM8K; None asks the Hub.
        heldout_file, columns: options of a user's file, see `grpo_edu.problems.own.load_user_problems`.
        n: how many in all; the first sets get one more if it does not divide. None takes everything. Of the held-out
            problems of your own, all are taken if there are fewer.
        argument: what error messages call `n`.

    Raises ValueError: an unknown split, fewer problems than `n`, or a `data_path` that no set reads; and what
    `load_gsm8k` raises.

    >>> [problem.level for problem in load_split(("basic", "sorting"), n=3)]
    ['basic', 'basic', 'sorting']
    """
    parse_names((split,), SPLITS, "split")
    if data_path is not None and not any(name in PROBLEM_SETS and PROBLEM_SETS[name].reads_path for name in data):
        raise ValueError(
            f"`data_path` is {str(data_path)!r}, but only gsm8k is read from a path; add gsm8k to `data`, or leave "
            "`data_path` out."
        )
    if n is not None and n < len(data):
        raise ValueError(f"`{argument}` is {n}, fewer than one problem for each of {', '.join(data)}; raise it.")
    problems = []
    for index, name in enumerate(data):
        share = None if n is None else n // len(data) + (index < n % len(data))
        if is_gym(name):
            found = gym_problems(name, split, share)
        elif is_user_dataset(name):
            found = load_user_problems(name, split, heldout=heldout_file, columns=columns)
            share = min(share, len(found)) if share is not None and split == "heldout" else share
        else:
            found = load_problem_set(name, split, data_path)
        share = len(found) if share is None else share
        if share > len(found):
            raise ValueError(
                f"`{argument}` is {n}, which needs {share} {split} problems of {name}, but there are only "
                f"{len(found)}; lower it."
            )
        problems += found[:share]
    return problems


def load_problem_sets(settings: Mapping[str, Any], split: str, *, n: int | None, argument: str = "n") -> list[Problem]:
    """Load problems by the settings of a run, from a `RunConfig` or from a stored one; otherwise as `load_split`."""
    places = {name: settings[name] for name in ("data_path", "heldout_file", "columns") if settings.get(name)}
    return load_split(settings["data"], split, n=n, argument=argument, **places)


def check_rewards(reward_funcs: Sequence[RewardFunction], problems: Sequence[Problem], *, backend: str) -> None:
    """Raise ValueError for a reward function that lacks a column, or if none can score problems without an answer.

    backend: the trainer whose columns the functions may ask for.
    """
    unanswered = next((problem for problem in problems if problem.level.startswith(UNANSWERED)), None)
    if unanswered is not None and all(function in REWARDS.values() for function in reward_funcs):
        raise ValueError(
            f"`data`: {unanswered.level.removeprefix(UNANSWERED)} has no column for the answer, so accuracy cannot be "
            "measured; name it with `columns` answer=COLUMN, or give a reward of your own as `reward_funcs` "
            "FILE.py:function."
        )
    for function in reward_funcs:
        check_columns(function, list(reward_columns(problems)), backend)
