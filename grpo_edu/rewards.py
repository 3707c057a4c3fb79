"""Reward functions, and the functions that compute one reward per completion from them.

A reward function has TRL's signature and works in `trl.GRPOTrainer` unchanged. It is called with the keyword arguments
`prompts`, `completions`, `completion_ids` and every column of the dataset, each a list of B entries, and returns a list
of B numbers. An entry may be None if the function does not apply to that row. Prompts and completions are texts; a
function that reads lists of chat messages declares it with `my_reward.takes_messages = True`. To set an option, use
`functools.partial(length_reward, target=24)`; the metrics keep the name.

A function that waits for something, such as a judge behind a network, may be an `async def`. All asynchronous functions
wait at the same time.
"""

from __future__ import annotations

import _thread
import asyncio
import copy
import inspect
import math
import os
import signal
import sys
import threading
import warnings
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from numbers import Real
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from grpo_edu.problems.equations import check_equations
from grpo_edu.problems.instructions import INSTRUCTION_REWARDS
from grpo_edu.problems.templates import Problem, check_column, reward_columns, scorer_of_level
from grpo_edu.prompts import MARKER, Completion, completion_text, extract_answer, normalize_answer

if TYPE_CHECKING:
    import torch

RewardFunction = Callable[..., Sequence[float | None] | Awaitable[Sequence[float | None]]]

# What Ctrl-C, a scheduler and a closed terminal send.
INTERRUPTING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
# What only TRL's trainer gives to a reward function. An evaluation gives it too, as in the first step.
OF_TRL: dict[str, Any] = {
    "trainer_state": SimpleNamespace(global_step=0, max_steps=100),
    "log_extra": lambda *ignored, **options: None,
    "log_metric": lambda *ignored, **options: None,
}
REWARD_SECONDS = 300.0  # the longest that a reward function may take for one batch; one that waits is an `async def`


def _ground_truth(answer: Any, row: int) -> str:
    """Return the ground truth in canonical form; raises ValueError if it has none."""
    text = str(answer)
    truth = extract_answer(text) if MARKER in text else normalize_answer(text)
    if truth is None:
        raise ValueError(
            f"answer[{row}] must be one number, list of numbers or word, got {answer!r}. Fix the data, give "
            "the problem the level 'text:' to compare it as a text, or use None where accuracy does not apply"
        )
    return truth


def accuracy_reward(
    completions: Sequence[Completion],
    answer: list,
    prompts: list | None = None,
    level: list | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """1.0 if the answer of a completion equals the ground truth, else 0.0; None if there is no ground truth.

    A completion without an answer gets 0.0. A *ground truth* without an answer is an error in the data and raises
    ValueError; if it counted as equal to a missing answer, such completions would get 1.0.

    Tasks of reasoning-gym and instructions are scored by their own scorers instead, from 0 to 1
    (`grpo_edu.problems.gym`, `grpo_edu.problems.instructions`).

    Args:
        completions: B completions, strings or chats.
        answer: B ground truths: strings, numbers, or reference solutions that end in `#### x`.
        prompts, level: B prompts and levels; needed for these, and for texts (level "text:…").

    Raises ValueError for a ground truth that is not an answer, or for lists of different lengths.

    >>> accuracy_reward(["14 + 34 = 48. #### 48", "#### 48 or 49"], answer=["48", "48"])
    [1.0, 0.0]
    """
    for name, column in {"answer": answer, "prompts": prompts, "level": level}.items():
        if column is not None or name == "answer":
            check_column(name, column, len(completions))
    rewards: list[float | None] = []
    for row, (completion, truth) in enumerate(zip(completions, answer, strict=True)):
        chosen = None if level is None else scorer_of_level(level[row] or "")
        if chosen is not None and level is not None and prompts is not None:
            rewards.append(chosen.score(completion, prompts[row], level[row], truth))
        else:
            rewards.append(None if truth is None else float(extract_answer(completion) == _ground_truth(truth, row)))
    return rewards


def format_reward(completions: Sequence[Completion], **kwargs: Any) -> list[float]:
    """1.0 if a completion has exactly one `####`, followed by one answer, on its last line; else 0.0.

    >>> format_reward(["2 + 3 = 5. #### 5", "#### 5 #### 6", "The answer is 5", "#### 5 or 6"])
    [1.0, 0.0, 0.0, 0.0]
    """
    return [float(_well_formed(completion_text(completion))) for completion in completions]


def _well_formed(text: str) -> bool:
    _, _, answer = text.strip().partition(MARKER)
    return MARKER not in answer and "\n" not in answer and normalize_answer(answer) is not None


def steps_reward(completions: Sequence[Completion], **kwargs: Any) -> list[float]:
    """Return the fraction of a completion's equations that are true (see `check_equations`); 0.0 without equations.

    The reward does not depend on the question, so `1 + 1 = 2` gets 1.0. Use it together with `accuracy_reward`.

    >>> steps_reward(["14 + 34 = 48. 48 - 12 = 36. #### 36", "14 + 34 = 48. 48 - 12 = 35.", "#### 36"])
    [1.0, 0.5, 0.0]
    """
    verdicts = [check_equations(completion_text(completion)) for completion in completions]
    return [sum(verdict) / len(verdict) if verdict else 0.0 for verdict in verdicts]


def length_reward(
    completions: Sequence[Completion], completion_ids: list | None = None, *, target: int = 32, **kwargs: Any
) -> list[float]:
    """1 up to the target length, then decreasing linearly to 0 at twice the target.

    reward = 1 − (length − target) / target, clipped to [0, 1].

    Args:
        completions: B completions.
        completion_ids: B lists of token ids. With them lengths are in tokens, otherwise in words.
        target: the largest length with a reward of 1.0, in that unit; at least 1.

    Raises ValueError for a target below 1 or lists of different lengths.

    >>> length_reward(["one two", "one two three", "one two three four five"], target=2)
    [1.0, 0.5, 0.0]
    """
    if target < 1:
        raise ValueError(f"target must be at least 1, got {target}")
    if completion_ids is None:
        lengths = [len(completion_text(completion).split()) for completion in completions]
    else:
        check_column("completion_ids", completion_ids, len(completions))
        lengths = [len(ids) for ids in completion_ids]
    return [min(1.0, max(0.0, 1 - (length - target) / target)) for length in lengths]


# Every reward that can be named, as for `--rewards`. A new one needs an entry here and nothing else.
REWARDS: dict[str, RewardFunction] = {
    "accuracy": accuracy_reward,
    "format": format_reward,
    "steps": steps_reward,
    "length": length_reward,
    **INSTRUCTION_REWARDS,
}


def compute_rewards(
    reward_funcs: RewardFunction | Sequence[RewardFunction],
    *,
    prompts: list,
    completions: Sequence[Completion],
    **columns: Any,
) -> torch.Tensor:
    """Call every reward function on all completions, and check the results.

    Each function gets its own copy of every list, so that one that edits its input does not change the next one's.

    Args:
        reward_funcs: K functions with TRL's signature, or one. The asynchronous ones run after the others, together.
        prompts, completions: B prompts and completions.
        columns: further keyword arguments for the functions, such as `answer` and `completion_ids`; a list must have B
            entries.

    Returns: `rewards_per_func`, (B, K) float32, NaN if a function returned None.

    Warns if no function applies to some rows: their advantage is 0, as in TRL, so nothing is learned from them.

    Raises RuntimeError if a function raises an exception, with the function's name and the exception as its cause;
    ValueError if a function returns a wrong number of rewards or a reward that is no number up to 1e15.

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
    check_column("prompts", prompts, len(completions))
    for name, values in columns.items():
        if isinstance(values, list):
            check_column(name, values, len(completions))
    names = [reward_name(function) for function in functions]
    inputs = {"prompts": prompts, "completions": completions, **columns}
    returned = []
    for name, function in zip(names, functions, strict=True):
        returned.append(call_reward(function, name, inputs))
    if any(map(inspect.isawaitable, returned)):
        returned = wait_for_all(names, returned)
    table = [checked_rewards(name, values, completions) for name, values in zip(names, returned, strict=True)]
    unscored = [row for row, rewards in enumerate(zip(*table, strict=True)) if all(map(math.isnan, rewards))]
    if unscored:
        warnings.warn(
            f"every reward function ({', '.join(names)}) returned None for {len(unscored)} of {len(completions)} "
            f"completions, the first of them of prompt {str(prompts[unscored[0]])[:200]!r}; add a function that "
            "applies to it, or leave the prompt out. Their advantage is 0.",
            RuntimeWarning,
            stacklevel=2,
        )
    return torch.tensor(table, dtype=torch.float32, device="cpu").T.contiguous()


def score_completions(
    reward_funcs: RewardFunction | Sequence[RewardFunction],
    problems: Sequence[Problem],
    completions: Sequence[Completion],
    completion_ids: Sequence[Sequence[int]],
    environments: Sequence[Any] | None = None,
    **extra: Any,
) -> torch.Tensor:
    """Return the rewards (B, K) of `compute_rewards` for a completion of each of B problems.

    completion_ids: the tokens of each completion. environments: of conversations, one for each; None: no conversations.
    extra: further keyword arguments for the functions.
    """
    if environments is not None:
        extra["environments"] = tuple(environments)  # as in TRL; a tuple, because a list would be copied
    return compute_rewards(
        reward_funcs,
        prompts=[problem.prompt for problem in problems],
        completions=completions,
        completion_ids=completion_ids,
        **reward_columns(problems),
        **extra,
    )


def combine_rewards(
    rewards_per_func: torch.Tensor, weights: Sequence[float] | torch.Tensor | None = None
) -> torch.Tensor:
    """Return the total reward of each completion: the weighted sum over the functions that apply, as in TRL.

    rewards[b] = Σ_k weights[k] · rewards_per_func[b, k], without NaN. A row with only NaN stays NaN, because 0 would
    look like a reward.

    Args:
        rewards_per_func: (B, K), NaN if a function does not apply.
        weights: K finite numbers; None: each is 1.

    Returns: `rewards`, (B,), at least float32.

    Raises ValueError for other shapes or weights.

    >>> import torch
    >>> combine_rewards(torch.tensor([[1.0, 0.5], [0.0, float("nan")]]), weights=[1.0, 0.2])
    tensor([1.1000, 0.0000])
    """
    import torch

    from grpo_edu.tensors import at_least_float32

    if rewards_per_func.ndim != 2:
        raise ValueError(f"rewards_per_func must be (B, K), got shape {tuple(rewards_per_func.shape)}")
    rewards_per_func = at_least_float32(rewards_per_func)
    if weights is None:
        weights = rewards_per_func.new_ones(rewards_per_func.shape[1])
    weights = torch.as_tensor(weights, dtype=rewards_per_func.dtype, device=rewards_per_func.device)
    if weights.shape != rewards_per_func.shape[1:]:
        raise ValueError(
            f"weights must have {rewards_per_func.shape[1]} entries, one per reward function, "
            f"got shape {tuple(weights.shape)}"
        )
    if not torch.isfinite(weights).all():
        raise ValueError(f"weights must be finite, got {weights.tolist()}")
    nothing_applies = rewards_per_func.isnan().all(dim=1)
    return (rewards_per_func * weights).nansum(dim=1).masked_fill(nothing_applies, float("nan"))


# The call of a function: name the one that fails, check what it returns, and wait for asynchronous ones.


def reward_name(reward_func: RewardFunction) -> str:
    """Return the name of a reward function in metrics and messages, as in TRL.

    For `functools.partial` it is the name of the wrapped function, for an object with `__call__` that of its class.

    >>> reward_name(partial(length_reward, target=24))
    'length_reward'
    """
    while isinstance(reward_func, partial):
        reward_func = reward_func.func
    return getattr(reward_func, "__name__", type(reward_func).__name__)


def call_reward(function: RewardFunction, name: str, inputs: Mapping[str, Any]) -> Any:
    """Call a reward function with copies of its inputs, in the form that it takes; its errors carry its name."""
    inputs = {**inputs, **_in_its_form(function, inputs)}
    with keep_process(name), Naming(name, REWARD_SECONDS, partial(first_that_fails, function, inputs)):
        return function(**_copied(inputs))


def _copied(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {key: copy.deepcopy(value) if isinstance(value, list) else value for key, value in inputs.items()}


def _in_its_form(function: RewardFunction, inputs: Mapping[str, Any]) -> dict[str, list]:
    """Return prompts and completions as texts, or as chat messages for a function that `takes_messages`."""
    prompts = [prompt if isinstance(prompt, str) else prompt[-1]["content"] for prompt in inputs["prompts"]]
    completions = [completion_text(completion) for completion in inputs["completions"]]
    if getattr(function, "takes_messages", False):
        return {
            "prompts": [[{"role": "user", "content": text}] for text in prompts],
            "completions": [[{"role": "assistant", "content": text}] for text in completions],
        }
    return {"prompts": prompts, "completions": completions}


def for_trl(function: RewardFunction) -> RewardFunction:
    """Return a reward function that TRL's trainer calls with chat messages, and that calls `function` as we do."""
    name = reward_name(function)
    called = function
    while isinstance(called, partial):
        called = called.func

    def call(**inputs: Any) -> Any:
        return call_reward(function, name, inputs)

    async def wait(**inputs: Any) -> Any:
        with Naming(name):
            return await function(**{**inputs, **_in_its_form(function, inputs)})  # type: ignore[misc]

    is_async = inspect.iscoroutinefunction(called) or inspect.iscoroutinefunction(type(called).__call__)
    adapted = wait if is_async else call
    adapted.__name__ = name
    return adapted


@contextmanager
def keep_process(name: str) -> Iterator[None]:
    """A context in which a reward function cannot end this process: `os._exit` raises SystemExit.

    Afterwards the working folder, `sys.stdout`, `sys.stderr`, and torch's gradients and default dtype are as before,
    with a warning if the function has changed or closed them.
    """
    torch = sys.modules.get("torch")  # whose import the command line does not need to start
    modes = None if torch is None else (torch.is_grad_enabled(), torch.get_default_dtype())
    process, leave, folder = os.getpid(), os._exit, _working_folder()
    streams = {"stdout": sys.stdout, "stderr": sys.stderr}
    copies = {number: os.dup(number) for number in (1, 2) if _is_open(number)}

    def raise_exit(status: int = 0) -> None:
        if os.getpid() != process:  # a child process of the function may leave
            leave(status)
        raise SystemExit(status)

    os._exit = raise_exit  # type: ignore[assignment]
    try:
        yield
    finally:
        os._exit = leave
        changed = []
        for number, file in copies.items():
            if not _is_open(number):
                os.dup2(file, number)
                changed.append(f"file {number}")
            os.close(file)
        for (stream_name, stream), number in zip(streams.items(), (1, 2), strict=True):
            if stream is not None and stream.closed:
                stream = open(number, "w", encoding=stream.encoding, errors="replace", closefd=False)  # noqa: SIM115
            if getattr(sys, stream_name) is not stream:
                setattr(sys, stream_name, stream)
                changed.append(f"sys.{stream_name}")
        if torch is not None and modes is not None and modes != (torch.is_grad_enabled(), torch.get_default_dtype()):
            torch.set_grad_enabled(modes[0])
            torch.set_default_dtype(modes[1])
            changed.append("torch's gradient mode or default dtype")
        if _working_folder() != folder:
            os.chdir(folder)
            changed.append("the working folder")
        if changed:
            warnings.warn(
                f"the reward function '{name}' changed or closed {' and '.join(changed)}, which was set back; let it "
                "run code of completions in a process of its own",
                RuntimeWarning,
                stacklevel=2,
            )


def _is_open(number: int) -> bool:
    """Return whether this process has an open file of this number."""
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _working_folder() -> str:
    """Return the working folder, or "" if it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


class Naming:
    """A context that raises a RuntimeError with the name of the reward function for any exception inside.

    Every BaseException is among them, except a KeyboardInterrupt when Ctrl-C was pressed. In the main thread, a
    function that takes longer than `seconds` is interrupted, as by Ctrl-C, and is named too.
    where: finds the words that say on which completion it happened. A subclass may name other code of the user.
    """

    kind = "the reward function"
    if_late = "look for an endless loop, or make a function that waits for a judge an `async def`"
    if_raised = (
        "It is called as {name}(prompts=…, completions=…, **columns) with lists of texts; accept what it does not need "
        "with **kwargs, and set {name}.takes_messages = True if it reads chat messages"
    )
    if_left = "Let it run code of completions in a process of its own, because such code may end this one"

    def __init__(self, name: str, seconds: float | None = None, where: Callable[[], str] = str) -> None:
        self.name, self.seconds, self.where, self.late = name, seconds, where, False

    def __enter__(self) -> None:
        self._timer: threading.Timer | None = None
        self._asked = False
        self._usual: dict[int, Callable[..., Any]] = {}
        if threading.current_thread() is not threading.main_thread():
            return
        for number in INTERRUPTING:
            handler = signal.getsignal(number)
            if callable(handler):
                self._usual[number] = handler
                signal.signal(number, self._on_signal)
        if self.seconds is not None:
            self._timer = threading.Timer(self.seconds, self._interrupt)
            self._timer.daemon = True
            self._timer.start()

    def _interrupt(self) -> None:
        self.late, main = True, threading.main_thread().ident
        if hasattr(signal, "pthread_kill") and main is not None:  # which ends a sleep as well
            signal.pthread_kill(main, signal.SIGINT)
        else:
            _thread.interrupt_main()

    def _on_signal(self, number: int, frame: object) -> None:
        self._asked = True
        self._usual[number](number, frame)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for number, handler in self._usual.items():
            signal.signal(number, handler)
        if self.late and isinstance(error, KeyboardInterrupt):
            raise RuntimeError(
                f"{self.kind} '{self.name}' did not return within {self.seconds:g} seconds; {self.if_late}"
            ) from None
        is_ended = isinstance(error, asyncio.CancelledError) or self._asked and isinstance(error, KeyboardInterrupt)
        if error is not None and not is_ended:
            advice = self.if_raised if isinstance(error, Exception) else self.if_left
            raise RuntimeError(
                f"{self.kind} '{self.name}' raised {type(error).__name__}: {error}{self.where()}. "
                f"{advice.format(name=self.name)}"
            ) from error


def first_that_fails(function: RewardFunction, inputs: Mapping[str, Any]) -> str:
    """Return the words that name the first completion on which a function raises when it gets the rows one by one."""
    for row, completion in enumerate(inputs["completions"]):
        one = {key: [value[row]] if isinstance(value, list) else value for key, value in inputs.items()}
        try:
            function(**_copied(one))
        except BaseException:  # the error itself is raised by the caller
            return f", for the first time on completion {row}, {_shown(completion)}"
    return ""


def _shown(completion: Completion) -> str:
    """Return a completion in a message, cut after 200 characters."""
    return repr(completion_text(completion)[:200])


def checked_rewards(name: str, returned: Any, completions: Sequence[Completion]) -> list[float]:
    """Return the rewards that a function returned for these completions, as floats, with NaN for None."""
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
    from grpo_edu.tensors import LARGEST_REWARD  # imports torch, which the command line does not need to start

    remedy = f"return a number of at most {LARGEST_REWARD:g} in size, or None if the function does not apply"
    if hasattr(value, "tolist"):  # a 0-dimensional tensor or array
        value = value.tolist()
    if not isinstance(value, Real):
        raise ValueError(f"{returns} {value!r} ({type(value).__name__}) for {completion}; {remedy}")
    if not abs(value) <= LARGEST_REWARD:  # type: ignore[operator]  # False for NaN; typeshed's Real does not compare
        raise ValueError(f"{returns} {str(value)[:40]} for {completion}; {remedy}")
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
