"""Steps onto the disk as they are done: the log, the checkpoints, and a word on what is kept where something breaks."""

from __future__ import annotations

import signal
import threading
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from grpo_edu.config import GRPOConfig
from grpo_edu.runs.checkpoint import random_states, save_checkpoint, save_failed_batch, set_random_states
from grpo_edu.runs.completions import CompletionLog
from grpo_edu.runs.folder import RunFolder
from grpo_edu.runs.log import RunLog
from grpo_edu.runs.record import RunMetadata
from grpo_edu.runs.summary import count_steps
from grpo_edu.runs.tokens import TokenLog, TokenRecorder
from grpo_edu.trainer import TrainingState


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """A context in which SIGTERM, by which schedulers and containers end a process, does what Ctrl-C does."""
    # Only the main thread may set a handler, and a process may have to ignore the signal.
    in_main = threading.current_thread() is threading.main_thread()
    usual = signal.getsignal(signal.SIGTERM)
    if not in_main or usual in (signal.SIG_IGN, None):
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, usual)


class WholeSteps:
    """A context for a training loop in which Ctrl-C never leaves the weights in the middle of a step.

    While a step samples and computes gradients, the weights are still those of the last full step: Ctrl-C is
    a KeyboardInterrupt at once. From the first optimizer update of a step on, it waits for `done()`. The same holds
    for SIGTERM inside `sigterm_interrupts`.

    >>> with WholeSteps() as steps:
    ...     for _ in range(3):
    ...         steps.done()  # after each step
    """

    def __enter__(self) -> WholeSteps:
        self._updating = self._asked = False
        self._hook = register_optimizer_step_pre_hook(self._on_update)
        # Only the main thread may set a handler, and a process in the background may have to ignore Ctrl-C.
        in_main = threading.current_thread() is threading.main_thread()
        usual = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        self._usual = {number: handler for number, handler in usual.items() if in_main and callable(handler)}
        for number in self._usual:
            signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._usual.items():
            signal.signal(number, handler)
        self._hook.remove()

    def done(self) -> None:
        """Say that a step is complete; raises KeyboardInterrupt where Ctrl-C waits for it."""
        self._updating = False
        if self._asked:
            raise KeyboardInterrupt

    def _on_update(self, *arguments: object) -> None:
        self._updating = True

    def _on_signal(self, *arguments: object) -> None:
        if not self._updating:
            raise KeyboardInterrupt
        self._asked = True


# What ends a training in the middle, after which the steps that were done are saved.
STOPS = (KeyboardInterrupt, ArithmeticError, MemoryError, RuntimeError, ValueError)


@dataclass
class Keeper:
    """Writes a checkpoint every `every` steps (0 for none) and after the last one, and when a run is interrupted.

    folder: the run's. model, state, config: of the training. fingerprint: of the weights that it started from.
    before: what before.json holds, for a run that was started without checkpoints.
    """

    folder: RunFolder
    every: int
    model: nn.Module
    state: TrainingState
    config: GRPOConfig
    fingerprint: str
    before: dict[str, Any]

    def keep(self, history: list[dict[str, float]]) -> None:
        """Call this after each step: it writes a checkpoint if one is due, and raises what `save_checkpoint` raises."""
        done = self.state.step
        self._random = random_states(self.state.generator)
        if self.every and (done % self.every == 0 or done == self.config.max_steps):
            self._save(history)

    def keep_last(self, history: list[dict[str, float]]) -> None:
        """Write a checkpoint of the last complete step, unless there is one; warns where that is not possible.

        The step that was interrupted has drawn random numbers, so the random states are put back first.
        """
        if (self.folder.checkpoints / f"step-{self.state.step}").is_dir():
            return
        set_random_states(self.state.generator, *self._random)
        try:
            self.folder.write_json("before.json", self.before)
            self._save(history)
        except (OSError, ArithmeticError, KeyboardInterrupt) as error:  # the model is still to be saved
            reason = str(error) or "interrupted again"
            warnings.warn(f"step {self.state.step} has no checkpoint: {reason}", RuntimeWarning, stacklevel=2)

    def _save(self, history: list[dict[str, float]]) -> None:
        folder = self.folder.checkpoints
        save_checkpoint(folder, self.model, self.state, self.config, history, fingerprint=self.fingerprint)

    def keep_failed_batch(self, error: BaseException) -> None:
        """Keep the batch on which the numbers went wrong."""
        state = self.state
        if state.batch is not None:
            save_failed_batch(self.folder.diagnosis, state.batch, step=state.batch_step, error=str(error))


def record_steps(
    training: Generator[dict[str, float]],
    folder: RunFolder,
    record: RunMetadata,
    *,
    history: Sequence[dict[str, float]] = (),
    begin: Callable[[], None] | None = None,
    keeper: Keeper | None = None,
    sampled: Callable[[], Mapping[str, Any]] | None = None,
    recorder: TokenRecorder | None = None,
    progress: bool = True,
) -> tuple[list[dict[str, float]], BaseException | None]:
    """Let the training run and log each step; returns its history and what stopped it early, or None.

    Args:
        training: yields the metrics of each step. folder, record: of the run.
        history: steps that were done before, for a run that goes on; the log is put back to them.
        begin: claims the folder of a new run. It is called when the first step is done, so that nothing is replaced by
            a run that never was; what stops the training before that is raised. Numbers that went wrong in the very
            first step are worth a folder, where there is none yet.
        keeper: writes checkpoints. sampled: returns what the last step sampled, to be kept.
        recorder: records the tokens of steps, to be kept. progress: show a bar.
    """
    from tqdm.auto import tqdm

    done, max_steps = list(history), record.run_config.config.max_steps
    bar = tqdm(total=max_steps, initial=len(done), desc="Training", disable=None if progress else True)
    try:
        with closing(training), bar, WholeSteps() as steps, ExitStack() as files:
            logs = open_logs(files, folder, done, record, sampled, recorder) if begin is None else []
            for metrics in training:
                if begin is not None:
                    begin()
                    begin, logs = None, open_logs(files, folder, done, record, sampled, recorder)
                done.append(metrics)
                for append in logs:
                    append(metrics)
                if keeper is not None:
                    keeper.keep(done)
                bar.set_postfix(reward=f"{metrics['reward']:.2f}", refresh=False)
                bar.update()
                steps.done()
    except (*STOPS, OSError) as error:
        if keeper is not None and isinstance(error, ArithmeticError):
            if begin is not None and not folder.path.exists():
                begin()
                begin = None
            if begin is None:
                keeper.keep_failed_batch(error)
        if not done:
            if begin is None:
                note_what_is_kept(error, folder, 0)
            raise
        return done, error
    return done, None


def open_logs(
    files: ExitStack,
    folder: RunFolder,
    history: Sequence[dict[str, float]],
    record: RunMetadata,
    sampled: Callable[[], Mapping[str, Any]] | None = None,
    recorder: TokenRecorder | None = None,
) -> list[Callable[[dict[str, float]], None]]:
    """Open everything that records a step: first the log of the run, then its trackers and the stored completions.

    They start with these steps and no others: a run that was killed may have logged more than it kept.
    """
    folder.metrics.unlink(missing_ok=True)
    logs: list[Callable[[dict[str, float]], None]] = [files.enter_context(RunLog(folder.metrics)).append]
    if record.run_config.report_to:
        from grpo_edu.runs.tracking import open_trackers

        logs.append(files.enter_context(open_trackers(record, folder.path)))
    for metrics in history:
        for append in logs:
            append(metrics)
    if sampled is not None:
        request = record.run_config
        kept = files.enter_context(
            CompletionLog(folder.completions, request.max_saved_completions, request.config, done=len(history))
        )
        logs.append(lambda metrics: kept.append(int(metrics["step"]), sampled()))
    if recorder is not None:
        tokens = files.enter_context(TokenLog(folder.tokens, done=len(history)))
        logs.append(lambda metrics: tokens.append(recorder.record_of(int(metrics["step"]))))
    return logs


@contextmanager
def noting(folder: RunFolder, steps: int) -> Iterator[None]:
    """A context whose errors carry a note on what the run's folder keeps of the steps that were done."""
    try:
        yield
    except BaseException as error:
        note_what_is_kept(error, folder, steps)
        raise


def note_what_is_kept(error: BaseException, folder: RunFolder, steps: int) -> None:
    """Say with an error what is kept, and how to go on where that can be done."""
    names = ("metrics.jsonl", "model", "summary.md", "checkpoints", "diagnosis")
    kept = [name for name in names if (folder.path / name).exists()]
    if kept:
        folder.note_kept(error, f"{count_steps(steps)}: {', '.join(kept)}", resumable="checkpoints" in kept)
