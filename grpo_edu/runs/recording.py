"""Steps onto the disk as they are done: the log, the checkpoints, and a word on what is kept where something breaks."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass

from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from grpo_edu.config import GRPOConfig
from grpo_edu.runs.checkpoint import save_checkpoint, save_failed_batch
from grpo_edu.runs.folder import RunFolder
from grpo_edu.runs.log import RunLog
from grpo_edu.runs.request import RunRecord
from grpo_edu.runs.summary import count_steps
from grpo_edu.trainer import TrainingState


class WholeSteps:
    """A context for a training loop in which Ctrl-C never leaves the weights in the middle of a step.

    While a step samples and computes gradients, the weights are still those of the last full step: Ctrl-C is
    a KeyboardInterrupt at once. From the first optimizer update of a step on, it waits for `done()`.

    >>> with WholeSteps() as steps:
    ...     for _ in range(3):
    ...         steps.done()  # after each step
    """

    def __enter__(self) -> WholeSteps:
        self._updating = self._asked = False
        self._hook = register_optimizer_step_pre_hook(self._on_update)
        self._usual = signal.getsignal(signal.SIGINT)
        # Only the main thread may set a handler, and a process in the background may have to ignore Ctrl-C.
        in_main = threading.current_thread() is threading.main_thread()
        self._installed = in_main and callable(self._usual)
        if self._installed:
            signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, self._usual)
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
    """Writes a checkpoint every `every` steps, 0 for none, and after the last.

    folder: the run's. model, state, config: of the training. fingerprint: of the weights that it started from.
    """

    folder: RunFolder
    every: int
    model: nn.Module
    state: TrainingState
    config: GRPOConfig
    fingerprint: str

    def keep(self, history: list[dict[str, float]]) -> None:
        """Write a checkpoint if one is due; raises what `save_checkpoint` raises."""
        done = self.state.step
        if self.every and (done % self.every == 0 or done == self.config.max_steps):
            save_checkpoint(
                self.folder.checkpoints, self.model, self.state, self.config, history, fingerprint=self.fingerprint
            )

    def keep_failed_batch(self, error: BaseException) -> None:
        """Keep the batch on which the numbers went wrong."""
        state = self.state
        if state.batch is not None:
            save_failed_batch(self.folder.diagnosis, state.batch, step=state.batch_step, error=str(error))


def record_steps(
    training: Generator[dict[str, float]],
    folder: RunFolder,
    record: RunRecord,
    *,
    history: Sequence[dict[str, float]] = (),
    begin: Callable[[], None] | None = None,
    keeper: Keeper | None = None,
    progress: bool = True,
) -> tuple[list[dict[str, float]], BaseException | None]:
    """Let the training run and log each step; returns its history and what stopped it early, or None.

    Args:
        training: yields the metrics of each step. max_steps: as many as there will be, with those of `history`.
        folder: of the run.
        history: steps that were done before, for a run that goes on; the log is put back to them.
        begin: claims the folder of a new run. It is called when the first step is done, so that nothing is replaced by
            a run that never was; what stops the training before that is raised. Numbers that went wrong in the very
            first step are worth a folder, where there is none yet.
        keeper: writes checkpoints. track: names of `tracking.TRACKERS`. progress: show a bar.
    """
    from tqdm.auto import tqdm

    done, claimed = list(history), begin is None
    max_steps = record.request.config.max_steps
    bar = tqdm(total=max_steps, initial=len(done), desc="Training", disable=None if progress else True)
    try:
        with closing(training), bar, WholeSteps() as steps, ExitStack() as files:
            logs = open_logs(files, folder, done, record) if claimed else ()
            for metrics in training:
                if begin is not None and not claimed:
                    begin()
                    claimed, logs = True, open_logs(files, folder, done, record)
                for append in logs:
                    append(metrics)
                done.append(metrics)
                if keeper is not None:
                    keeper.keep(done)
                bar.set_postfix(reward=f"{metrics['reward']:.2f}", refresh=False)
                bar.update()
                steps.done()
    except STOPS as error:
        if keeper is not None and isinstance(error, ArithmeticError):
            if begin is not None and not claimed and not folder.path.exists():
                begin()
                claimed = True
            if claimed:
                keeper.keep_failed_batch(error)
        if not done:
            if claimed:
                note_what_is_kept(error, folder, 0)
            raise
        return done, error
    except OSError as error:  # a full disk: nothing more can be saved
        if done:
            note_what_is_kept(error, folder, len(done))
        raise
    return done, None


def open_logs(
    files: ExitStack, folder: RunFolder, history: Sequence[dict[str, float]], record: RunRecord
) -> list[Callable[[dict[str, float]], None]]:
    """What each step is handed to: the run's log first, then its trackers.

    They start with these steps and no others: a run that was killed may have logged more than it kept.
    """
    folder.metrics.unlink(missing_ok=True)
    logs: list[Callable[[dict[str, float]], None]] = [files.enter_context(RunLog(folder.metrics)).append]
    if record.request.track:
        from grpo_edu.runs.tracking import Trackers

        logs.append(files.enter_context(Trackers(record, folder.path)).log)
    for metrics in history:
        for append in logs:
            append(metrics)
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
