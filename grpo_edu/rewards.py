"""Reward functions, and the calls that turn them into one number a completion.

A reward function has TRL's signature and works in `trl.GRPOTrainer` unchanged: it is called with the keyword
arguments `prompts`, `completions`, `completion_ids` and every column of the dataset, each a list of B
entries, and returns a list of B numbers. None says that the function does not apply to that row. A completion
is a string or a list of chat messages.

To fix an option, use `functools.partial(length_reward, target=24)`; its metrics keep the function's own name.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

from grpo_edu.equations import check_equations
from grpo_edu.gym import gym_score, is_gym
from grpo_edu.prompts import MARKER, completion_text, extract_answer, normalize_answer

if TYPE_CHECKING:
    import torch

Completion = str | list[dict]
RewardFunction = Callable[..., Sequence[float | None]]

_FLOAT32_MAX = 3.4028234663852886e38


def _column(name: str, values: Any, length: int) -> None:
    """ValueError unless `values` is a list of `length` entries."""
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise ValueError(f"{name} must be a list with one entry a completion, got {type(values).__name__}")
    if len(values) != length:
        raise ValueError(f"{name} has {len(values)} entries for {length} completions; give one a completion")


def _gold(answer: Any, row: int) -> str:
    """The ground truth in its one spelling; ValueError where there is none to compare with."""
    text = answer if isinstance(answer, str) else str(answer)
    gold = extract_answer(text) if MARKER in text else normalize_answer(text)
    if gold is None:
        raise ValueError(
            f"answer[{row}] is {answer!r}, which is not one number, list of numbers or word, so nothing can "
            "be right; repair the data, or use None where accuracy does not apply"
        )
    return gold


def accuracy_reward(
    completions: Sequence[Completion],
    answer: list,
    prompts: list | None = None,
    level: list | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """1.0 where a completion's answer equals the ground truth, else 0.0; None where the ground truth is None.

    A task of reasoning-gym has a scorer of its own, from 0 to 1, which is asked instead (`grpo_edu.gym`).

    A completion without a readable answer earns 0.0. A *ground truth* without one is a fault of the data and
    raises: were both sides "nothing", they would be equal, and public code has paid 1.0 for that.

    Args:
        completions: B completions, strings or chats.
        answer: B ground truths: strings or numbers, or reference solutions that end in `#### x`.
        prompts, level: of the B rows; only tasks of reasoning-gym need them.

    Raises ValueError for a ground truth that is no answer, or for lists of different lengths.

    >>> accuracy_reward(["14 + 34 = 48. #### 48", "#### 48 or 49"], answer=["48", "48"])
    [1.0, 0.0]
    """
    _column("answer", answer, len(completions))
    rewards: list[float | None] = []
    for row, (completion, truth) in enumerate(zip(completions, answer, strict=True)):
        if level is not None and prompts is not None and is_gym(level[row] or ""):
            rewards.append(gym_score(completion, prompts[row], level[row]))
        else:
            rewards.append(None if truth is None else float(extract_answer(completion) == _gold(truth, row)))
    return rewards


def format_reward(completions: Sequence[Completion], **kwargs: Any) -> list[float]:
    """1.0 where a completion has exactly one `####`, with one answer behind it and nothing after that line.

    >>> format_reward(["2 + 3 = 5. #### 5", "#### 5 #### 6", "The answer is 5", "#### 5 or 6"])
    [1.0, 0.0, 0.0, 0.0]
    """
    return [float(_well_formed(completion_text(completion))) for completion in completions]


def _well_formed(text: str) -> bool:
    _, _, answer = text.strip().partition(MARKER)
    return MARKER not in answer and "\n" not in answer and normalize_answer(answer) is not None


def steps_reward(completions: Sequence[Completion], **kwargs: Any) -> list[float]:
    """The share of a completion's written equations that hold; 0.0 where none is written.

    What counts as an equation and when it holds is in `grpo_edu.equations.check_equations`; in short,
    `a op b … = c` between plain numbers, in exact arithmetic.

    It judges the arithmetic and never sees the question: `1 + 1 = 2` earns 1.0. Pay accuracy beside it.

    >>> steps_reward(["14 + 34 = 48. 48 - 12 = 36. #### 36", "14 + 34 = 48. 48 - 12 = 35.", "#### 36"])
    [1.0, 0.5, 0.0]
    """
    verdicts = [check_equations(completion_text(completion)) for completion in completions]
    return [sum(verdict) / len(verdict) if verdict else 0.0 for verdict in verdicts]


def length_reward(
    completions: Sequence[Completion], completion_ids: list | None = None, *, target: int = 32, **kwargs: Any
) -> list[float]:
    """1 up to the target length, then falling straight to 0 at twice the target.

    reward = 1 − (length − target) / target, clipped to [0, 1].

    Args:
        completions: B completions.
        completion_ids: B lists of token ids. With them a length is in tokens, without them in
            whitespace-separated words.
        target: the length that still earns 1.0, in that unit; at least 1.

    Raises ValueError for a target below 1 or lists of different lengths.

    >>> length_reward(["one two", "one two three", "one two three four five"], target=2)
    [1.0, 0.5, 0.0]
    """
    if target < 1:
        raise ValueError(f"target must be at least 1, got {target}")
    if completion_ids is None:
        lengths = [len(completion_text(completion).split()) for completion in completions]
    else:
        _column("completion_ids", completion_ids, len(completions))
        lengths = [len(ids) for ids in completion_ids]
    return [min(1.0, max(0.0, 1 - (length - target) / target)) for length in lengths]


def reward_name(reward_func: RewardFunction) -> str:
    """The name of a reward function in metrics and messages, as TRL has it.

    `functools.partial` gives the name of what it wraps; an object with `__call__` gives its class's name.

    >>> reward_name(functools.partial(length_reward, target=24))
    'length_reward'
    """
    while isinstance(reward_func, functools.partial):
        reward_func = reward_func.func
    return getattr(reward_func, "__name__", type(reward_func).__name__)


class _Naming:
    """A context whose exceptions come out as a RuntimeError that names the reward function, cause chained."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception):
            raise RuntimeError(
                f"the reward function '{self.name}' raised {type(error).__name__}: {error}. It is called as "
                f"{self.name}(prompts=…, completions=…, **columns); take what it does not need with **kwargs"
            ) from error


def _checked(name: str, returned: Any, length: int) -> list[float]:
    """What a reward function returned as `length` floats, NaN for None; ValueError for anything else."""
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(values, list | tuple):
        raise ValueError(
            f"the reward function '{name}' returned {type(returned).__name__}; return a list of {length} "
            "numbers, one a completion"
        )
    if len(values) != length:
        raise ValueError(
            f"the reward function '{name}' returned {len(values)} rewards for {length} completions; return "
            "exactly one a completion, and None where it does not apply"
        )
    return [
        math.nan if value is None else _checked_value(name, value, row) for row, value in enumerate(values)
    ]


def _checked_value(name: str, value: Any, row: int) -> float:
    if hasattr(value, "tolist"):  # a 0-dimensional tensor or array
        value = value.tolist()
    if not isinstance(value, Real):
        raise ValueError(
            f"the reward function '{name}' returned {value!r} ({type(value).__name__}) for completion {row}; "
            "return a number, or None where it does not apply"
        )
    if not abs(value) <= _FLOAT32_MAX:  # type: ignore[operator]  # NaN compares false; typeshed's Real does not compare
        raise ValueError(
            f"the reward function '{name}' returned {value} for completion {row}, no finite float32; "
            "return a finite number, or None where it does not apply"
        )
    return float(value)


def compute_rewards(
    reward_funcs: RewardFunction | Sequence[RewardFunction],
    *,
    prompts: list,
    completions: Sequence[Completion],
    **columns: Any,
) -> torch.Tensor:
    """Call every reward function on every completion, and check what it returns.

    Args:
        reward_funcs: K functions with TRL's signature, or one.
        prompts: B prompts. completions: B completions.
        columns: more keyword arguments for the functions, such as `answer` and `completion_ids`; a list
            must have B entries.

    Returns: `rewards_per_func`, (B, K) float32, NaN where a function returned None.

    Raises RuntimeError naming a function that raised, with its exception chained; ValueError for one that
    returns another number of rewards, or a reward that is not a finite number, and for a row to which no
    function applies: a policy cannot learn from a completion that nothing judges.

    >>> compute_rewards(
    ...     [accuracy_reward, steps_reward],
    ...     prompts=["2 + 3?", "2 + 3?"], completions=["2 + 3 = 5. #### 5", "#### 6"], answer=["5", "5"])
    tensor([[1., 1.],
            [0., 0.]])
    """
    import torch

    functions = [reward_funcs] if callable(reward_funcs) else list(reward_funcs)
    if not functions or not all(callable(function) for function in functions):
        raise ValueError("reward_funcs must be one or more functions, such as grpo_edu.accuracy_reward")
    if not completions:
        raise ValueError("completions is empty; pass at least one")
    _column("prompts", prompts, len(completions))
    for name, values in columns.items():
        if isinstance(values, list):
            _column(name, values, len(completions))
    names = [reward_name(function) for function in functions]
    table = []
    for name, function in zip(names, functions, strict=True):
        with _Naming(name):
            returned = function(prompts=prompts, completions=completions, **columns)
        table.append(_checked(name, returned, len(completions)))
    for row, rewards in enumerate(zip(*table, strict=True)):
        if all(math.isnan(reward) for reward in rewards):
            raise ValueError(
                f"every reward function ({', '.join(names)}) returned None for completion {row}, of prompt "
                f"{str(prompts[row])[:200]!r}; add a function that applies to it, or leave the prompt out"
            )
    return torch.tensor(table, dtype=torch.float32).T.contiguous()


def combine_rewards(
    rewards_per_func: torch.Tensor, weights: Sequence[float] | torch.Tensor | None = None
) -> torch.Tensor:
    """One reward a completion: the weighted sum over the functions that apply, as TRL.

    rewards[b] = Σ_k weights[k] · rewards_per_func[b, k], leaving out NaN. A row of NaN alone stays NaN; a sum
    over nothing would make it a 0 that looks earned.

    Args:
        rewards_per_func: (B, K) float, NaN where a function does not apply.
        weights: K finite numbers; 1 each if None.

    Returns: `rewards`, (B,).

    Raises ValueError for other shapes or weights.

    >>> import torch
    >>> combine_rewards(torch.tensor([[1.0, 0.5], [0.0, float("nan")]]), weights=[1.0, 0.2])
    tensor([1.1000, 0.0000])
    """
    import torch

    if rewards_per_func.ndim != 2:
        raise ValueError(f"rewards_per_func must be (B, K), got shape {tuple(rewards_per_func.shape)}")
    if weights is None:
        weights = torch.ones(rewards_per_func.shape[1])
    weights = torch.as_tensor(weights, dtype=rewards_per_func.dtype, device=rewards_per_func.device)
    if weights.shape != rewards_per_func.shape[1:]:
        raise ValueError(
            f"weights must have one entry a reward function, {rewards_per_func.shape[1]}; "
            f"got shape {tuple(weights.shape)}"
        )
    if not torch.isfinite(weights).all():
        raise ValueError(f"weights must be finite, got {weights.tolist()}")
    nothing_applies = rewards_per_func.isnan().all(dim=1)
    return (rewards_per_func * weights).nansum(dim=1).masked_fill(nothing_applies, float("nan"))
