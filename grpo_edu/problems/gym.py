"""Load tasks of reasoning-gym: over a hundred seeded problem generators, each with its own scorer.

Stojanovski et al. 2025, "Reasoning Gym", https://arxiv.org/abs/2505.24760. A task has a name such as
`reasoning-gym:chain_sum`. The answer is the exact text after the last ####, because it may be a grid or a list of
words. The scorer of the task scores it from 0 to 1. Several answers may be correct, so a reference is not required.

The library is an extra: ``pip install "grpo-edu[domains]"``.
"""

from __future__ import annotations

import difflib
import hashlib
import warnings
from typing import Any

from grpo_edu.problems.templates import PROBLEM_SETS, Problem, ProblemSet, Scorer
from grpo_edu.prompts import MARKER, completion_text

PREFIX = "reasoning-gym:"
SIZES = {"train": 1000, "heldout": 400}  # of the shipped sets too
_HELDOUT_SHARE = 64  # of 256: a quarter of all questions, selected by their hash
# Exceptions of a scorer for text that it cannot parse; such an answer is wrong.
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError, SyntaxError)

# (level, question) → the library's entry, which its scorer needs; filled by `gym_problems`.
_entries: dict[tuple[str, str], dict[str, Any]] = {}


def is_gym(name: str) -> bool:
    """Return True if a set of problems, or a level, is a task of reasoning-gym.

    >>> is_gym("reasoning-gym:chain_sum"), is_gym("basic")
    (True, False)
    """
    return name.startswith(PREFIX)


def check_task(name: str) -> None:
    """Raise ValueError if the library is not installed or has no such task; the message suggests a similar name."""
    tasks = _library().factory.DATASETS
    task = name.removeprefix(PREFIX)
    if task not in tasks:
        close = difflib.get_close_matches(task, list(tasks), n=1)
        hint = f"; did you mean {PREFIX}{close[0]}?" if close else f"; it has {', '.join(sorted(tasks)[:5])} and more"
        raise ValueError(f"data: reasoning-gym has no task {task!r}{hint}")


def gym_problems(name: str, split: str, n: int | None = None) -> list[Problem]:
    """Return the first `n` problems of a task with its default settings; they are the same on every computer.

    The hash of a question determines its split, so the two splits have no question in common.

    Args:
        name: "reasoning-gym:TASK". split: "train" or "heldout". n: number of problems; None: as in `SIZES`.

    Raises ValueError if the task is unknown, needs settings of its own, or has fewer different questions.
    """
    check_task(name)
    wanted = SIZES[split] if n is None else n
    task, limit = name.removeprefix(PREFIX), 20 * wanted + 100
    try:
        dataset = _library().create_dataset(task, size=limit, seed=0)
    except _UNREADABLE as error:
        raise ValueError(f"data: {name} needs settings of its own ({error}); choose another task") from error
    found: dict[str, Problem] = {}
    for index in range(limit):
        if len(found) == wanted:
            break
        entry = dataset[index]
        question = entry["question"]
        if _split_of(question) == split and question not in found:
            answer = "" if entry["answer"] is None else str(entry["answer"])
            found[question] = Problem(question, answer, name, f"{MARKER} {answer}")
            _entries[name, question] = entry
    if len(found) < wanted:
        raise ValueError(f"n must be at most {len(found)}, the number of {split} problems of {name}, got {wanted}")
    return list(found.values())


def gym_answer(completion: str | list[dict]) -> str | None:
    """Return the text after the last #### of a completion; None if there is no #### or no text after it.

    >>> gym_answer("Thinking. #### 1 2\\n3 4 ")
    '1 2\\n3 4'
    """
    text = completion_text(completion)
    return (text.rpartition(MARKER)[2].strip() or None) if MARKER in text else None


def gym_score(completion: str | list[dict], question: str | list[dict], level: str, answer: str = "") -> float:
    """Score a completion with the scorer of its task, from 0 to 1; 0 without an answer.

    question: the prompt, as text or as a chat. level: "reasoning-gym:TASK". answer: not used, since the question
    identifies the library's entry.
    Raises ValueError for a question that `gym_problems` has not created in this process.
    """
    text = question if isinstance(question, str) else question[-1]["content"]
    entry = _entries.get((level, text))
    if entry is None:
        raise ValueError(f"prompts: {text[:80]!r} is not a question of {level}; load the problems with gym_problems")
    written = gym_answer(completion)
    if written is None:
        return 0.0
    score_answer = _library().get_score_answer_fn(level.removeprefix(PREFIX))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from the libraries that scorers use to parse answers
        try:
            return min(1.0, max(0.0, float(score_answer(written, entry))))
        except _UNREADABLE:
            return 0.0


def _split_of(question: str) -> str:
    return "heldout" if hashlib.sha256(question.encode()).digest()[0] < _HELDOUT_SHARE else "train"


def _library() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # about its own code, whenever Python compiles it
            import reasoning_gym
    except ImportError as error:
        raise ValueError(
            f'data: {PREFIX} needs a library that is not installed; pip install "grpo-edu[domains]"'
        ) from error
    return reasoning_gym


PROBLEM_SETS["reasoning-gym"] = ProblemSet(
    "a task of reasoning-gym", level=PREFIX, scorer=Scorer(gym_answer, gym_score), is_name_of_data=False
)
