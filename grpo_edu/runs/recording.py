"""Record the steps of a run, let an interrupt wait for the end of a step, and say what a run that broke keeps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from grpo_edu.rewards import INTERRUPTING
from grpo_edu.runs.completions import CompletionLog
from grpo_edu.runs.folder import RunFolder
from grpo_edu.runs.log import RunLog
from grpo_edu.runs.record import RunMetadata
from grpo_edu.runs.summary import count_steps

if TYPE_CHECKING:
    from grpo_edu.runs.tokens import TokenRecorder


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """A context that treats SIGTERM and SIGHUP like Ctrl-C.

    Schedulers and containers end a process with SIGTERM; a terminal that is closed sends SIGHUP.
    """
    # Only the main thread may set a handler, and a process may have to ignore a signal, as under nohup.
    in_main = threading.current_thread() is threading.main_thread()
    usual = {number: signal.getsignal(number) for number in INTERRUPTING if in_main and number != signal.SIGINT}
    usual = {number: handler for number, handler in usual.items() if handler not in (signal.SIG_IGN, None)}
    for number in usual:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


class DeferInterrupts:
    """A context for a training loop in which Ctrl-C never leaves the weights in the middle of a step.

    While a step samples and computes gradients, the weights are still those of the last full step: Ctrl-C is
    a KeyboardInterrupt at once. From the first optimizer update of a step on, it waits for `raise_if_asked()`. The same
    holds for SIGTERM and SIGHUP inside `sigterm_interrupts`.

    is_updating: whether the current step has changed weights.

    >>> with DeferInterrupts() as interrupts:
    ...     for _ in range(3):
    ...         interrupts.raise_if_asked()  # after each step
    """

    def __enter__(self) -> DeferInterrupts:
        self.is_updating = self._asked = False
        self._hook = register_optimizer_step_pre_hook(self._on_update)
        # Only the main thread may set a handler, and a process in the background may have to ignore Ctrl-C.
        in_main = threading.current_thread() is threading.main_thread()
        usual = {number: signal.getsignal(number) for number in INTERRUPTING}
        self._usual = {number: handler for number, handler in usual.items() if in_main and callable(handler)}
        for number in self._usual:
            signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._usual.items():
            signal.signal(number, handler)
        self._hook.remove()

    def raise_if_asked(self) -> None:
        """Say that a step is complete; raises KeyboardInterrupt if Ctrl-C waits for it."""
        self.is_updating = False
        if self._asked:
            raise KeyboardInterrupt

    def _on_update(self, *arguments: object) -> None:
        self.is_updating = True

    def _on_signal(self, *arguments: object) -> None:
        if not self.is_updating:
            raise KeyboardInterrupt
        self._asked = True


# What ends a training in the middle, after which the steps that were done are saved.
RECOVERABLE_ERRORS = (KeyboardInterrupt, ArithmeticError, MemoryError, RuntimeError, ValueError)


def open_logs(
    files: ExitStack,
    folder: RunFolder,
    history: Sequence[dict[str, float]],
    record: RunMetadata,
    sampled: Callable[[], Mapping[str, Any]],
    recorder: TokenRecorder | None,
) -> Callable[[dict[str, float]], None]:
    """Open everything that records a step, and return the function that records one.

    First the log of the run gets it, then the trackers and the stored completions. They start with the steps of the
    history and no others: a run that was killed may have logged more than it kept.
    """
    folder.metrics.unlink(missing_ok=True)
    logs: list[Callable[[dict[str, float]], None]] = [files.enter_context(RunLog(folder.metrics)).append]
    if record.run_config.report_to:
        from grpo_edu.runs.tracking import open_trackers

        logs.append(files.enter_context(open_trackers(record, folder.path)))

    def record_step(metrics: dict[str, float]) -> None:
        for append in logs:
            append(metrics)

    for metrics in history:
        record_step(metrics)
    request = record.run_config
    kept = files.enter_context(
        CompletionLog(folder.completions, request.max_saved_completions, request.config, done=len(history))
    )
    logs.append(lambda metrics: kept.append(int(metrics["step"]), sampled()))
    if recorder is not None:
        from grpo_edu.runs.tokens import TokenLog

        tokens = files.enter_context(TokenLog(folder.tokens, done=len(history)))
        logs.append(lambda metrics: tokens.append(recorder.record_of(int(metrics["step"]))))
    return record_step


@contextmanager
def note_kept(folder: RunFolder, describe: Callable[[], str]) -> Iterator[None]:
    """A context for a sweep or a curriculum: SIGTERM and SIGHUP interrupt it, and errors say what its folder keeps."""
    with sigterm_interrupts():
        try:
            yield
        except BaseException as error:
            folder.note_kept(error, describe())
            raise


def note_what_is_kept(error: BaseException, folder: RunFolder, steps: int) -> None:
    """Say with an error what is kept, and how to continue where that can be done."""
    names = ("metrics.jsonl", "model", "summary.md", "state.pt", "diagnosis")
    kept = [name for name in names if (folder.path / name).exists()]
    if kept:
        folder.note_kept(error, f"{count_steps(steps)}: {', '.join(kept)}", resumable="state.pt" in kept)
