"""Steps onto the disk as they are done: the log, the checkpoints, and a word on what is kept where something breaks."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass

from torch import nn

from grpo_edu.checkpoints import save_checkpoint
from grpo_edu.config import GRPOConfig
from grpo_edu.failed_batches import save_failed_batch
from grpo_edu.interrupts import WholeSteps
from grpo_edu.run_folder import RunFolder, read_run_config
from grpo_edu.run_log import RunLog
from grpo_edu.run_summary import count_steps
from grpo_edu.training_state import TrainingState

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
    max_steps: int,
    *,
    history: Sequence[dict[str, float]] = (),
    begin: Callable[[], None] | None = None,
    keeper: Keeper | None = None,
    track: Sequence[str] = (),
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
    bar = tqdm(total=max_steps, initial=len(done), desc="Training", disable=None if progress else True)
    try:
        with closing(training), bar, WholeSteps() as steps, ExitStack() as files:
            logs = _open_logs(files, folder, done, track) if claimed else ()
            for metrics in training:
                if begin is not None and not claimed:
                    begin()
                    claimed, logs = True, _open_logs(files, folder, done, track)
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


def _open_logs(
    files: ExitStack, folder: RunFolder, history: Sequence[dict[str, float]], track: Sequence[str]
) -> list[Callable[[dict[str, float]], None]]:
    """What each step is handed to: the run's log first, then its trackers.

    They start with these steps and no others: a run that was killed may have logged more than it kept.
    """
    folder.metrics.unlink(missing_ok=True)
    logs: list[Callable[[dict[str, float]], None]] = [files.enter_context(RunLog(folder.metrics)).append]
    if track:
        from grpo_edu.tracking import Trackers

        asked = read_run_config(folder.path) or {}
        logs.append(files.enter_context(Trackers(track, folder.path, asked)).log)
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
        further = f"; go on with --resume {folder.path}" if "checkpoints" in kept else ""
        error.add_note(f"{folder.path} keeps {count_steps(steps)}: {', '.join(kept)}{further}")
