"""Call reward functions: name the one that fails, check what it returns, and wait for asynchronous ones."""

from __future__ import annotations

import _thread
import asyncio
import copy
import functools
import inspect
import math
import signal
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from numbers import Real
from typing import Any

from grpo_edu.config import LARGEST_REWARD
from grpo_edu.prompts import completion_text

Completion = str | list[dict]
RewardFunction = Callable[..., Sequence[float | None] | Awaitable[Sequence[float | None]]]


def check_column(name: str, values: Any, length: int) -> None:
    """Raise ValueError unless `values` is a list of `length` entries."""
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise ValueError(f"{name} must be a list with one entry per completion, got {type(values).__name__}")
    if len(values) != length:
        raise ValueError(f"{name} has {len(values)} entries for {length} completions; pass one per completion")


def reward_name(reward_func: RewardFunction) -> str:
    """The name of a reward function in metrics and messages, as in TRL.

    For `functools.partial` it is the name of the wrapped function, for an object with `__call__` that of its class.

    >>> from grpo_edu.rewards import length_reward
    >>> reward_name(functools.partial(length_reward, target=24))
    'length_reward'
    """
    while isinstance(reward_func, functools.partial):
        reward_func = reward_func.func
    return getattr(reward_func, "__name__", type(reward_func).__name__)


class Naming:
    """A context that raises a RuntimeError with the name of the reward function for any exception inside.

    In the main thread, a function that takes longer than `seconds` is interrupted, as by Ctrl-C, and is named too.
    where: finds the words that say on which completion it happened. A subclass may name other code of the user.
    """

    kind = "the reward function"
    if_late = "look for an endless loop, or make a function that waits for a judge an `async def`"
    if_raised = (
        "It is called as {name}(prompts=…, completions=…, **columns); accept what it does not need with **kwargs"
    )

    def __init__(self, name: str, seconds: float | None = None, where: Callable[[], str] = str) -> None:
        self.name, self.seconds, self.where, self.late = name, seconds, where, False

    def __enter__(self) -> None:
        self._timer: threading.Timer | None = None
        if self.seconds is not None and threading.current_thread() is threading.main_thread():
            self._timer = threading.Timer(self.seconds, self._interrupt)
            self._timer.daemon = True
            self._timer.start()

    def _interrupt(self) -> None:
        self.late, main = True, threading.main_thread().ident
        if hasattr(signal, "pthread_kill") and main is not None:  # which ends a sleep as well
            signal.pthread_kill(main, signal.SIGINT)
        else:
            _thread.interrupt_main()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self.late and isinstance(error, KeyboardInterrupt):
            raise RuntimeError(
                f"{self.kind} '{self.name}' did not return within {self.seconds:g} seconds; {self.if_late}"
            ) from None
        if isinstance(error, Exception):
            raise RuntimeError(
                f"{self.kind} '{self.name}' raised {type(error).__name__}: {error}{self.where()}. "
                f"{self.if_raised.format(name=self.name)}"
            ) from error


def first_that_fails(function: RewardFunction, inputs: Mapping[str, Any]) -> str:
    """The words that name the first completion on which a function raises when it gets the rows one by one."""
    for row, completion in enumerate(inputs["completions"]):
        one = {key: copy.deepcopy([value[row]]) if isinstance(value, list) else value for key, value in inputs.items()}
        try:
            function(**one)
        except Exception:  # the error itself is raised by the caller
            return f", for the first time on completion {row}, {_shown(completion)}"
    return ""


def _shown(completion: Completion) -> str:
    """A completion in a message, cut after 200 characters."""
    return repr(completion_text(completion)[:200])


def checked_rewards(name: str, returned: Any, completions: Sequence[Completion]) -> list[float]:
    """The rewards that a function returned for these completions, as floats, with NaN for None."""
    length = len(completions)
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    returns = f"the reward function '{name}' returned"
    if not isinstance(values, list | tuple):
        raise ValueError(f"{returns} {type(returned).__name__}; return a list of {length} numbers, one per completion")
    if len(values) != length:
        raise ValueError(f"{returns} {len(values)} rewards for {length} completions; return exactly one per completion")
    return [
        math.nan if value is None else _checked_value(returns, value, f"completion {row}, {_shown(completions[row])}")
        for row, value in enumerate(values)
    ]


def _checked_value(returns: str, value: Any, completion: str) -> float:
    remedy = f"return a number of at most {LARGEST_REWARD:g} in size, or None where the function does not apply"
    if hasattr(value, "tolist"):  # a 0-dimensional tensor or array
        value = value.tolist()
    if not isinstance(value, Real):
        raise ValueError(f"{returns} {value!r} ({type(value).__name__}) for {completion}; {remedy}")
    if not abs(value) <= LARGEST_REWARD:  # type: ignore[operator]  # False for NaN; typeshed's Real does not compare
        raise ValueError(f"{returns} {value} for {completion}; {remedy}")
    return float(value)


def wait_for_all(names: Sequence[str], returned: Sequence[Any]) -> list[Any]:
    """Await what asynchronous functions returned, all at the same time; what others returned is left as it is."""

    async def wait_for(name: str, value: Any) -> Any:
        with Naming(name):
            return await value if inspect.isawaitable(value) else value

    async def gather() -> list[Any]:
        return await asyncio.gather(*map(wait_for, names, returned))

    done: Future[list[Any]] = Future()

    def run() -> None:
        try:
            done.set_result(asyncio.run(gather()))
        except BaseException as error:  # handed on to the thread that waits
            done.set_exception(error)

    # In a notebook, the event loop of this thread is already running. Neither an interrupt nor the end of the process
    # waits for a daemon thread, because a function may wait for an answer that never comes.
    threading.Thread(target=run, daemon=True).start()
    return done.result()
