"""Trackers that receive a run's metrics as well: TensorBoard, trackio and Weights & Biases, all on this computer.

metrics.jsonl is always written, and everything that this course shows is drawn from it. A tracker receives the same
numbers, for those who compare runs in its pages. The trackers are those of accelerate (`accelerate.tracking`), with
settings under which nothing is printed and nothing is sent: wandb is offline, trackio and TensorBoard write files.

=============  ===========================================  =======================================
name           where it writes                              how to look at it
=============  ===========================================  =======================================
tensorboard    tensorboard/ in the run's folder             ``tensorboard --logdir runs``
trackio        trackio's own store (TRACKIO_DIR moves it)   ``trackio show --project grpo-edu``
wandb          wandb/ in the run's folder                   ``wandb sync FOLDER``, when you want to
=============  ===========================================  =======================================

The libraries are an extra: ``pip install "grpo-edu[tracking]"``.
"""

from __future__ import annotations

import io
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_edu.runs.record import RunMetadata

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

PROJECT = "grpo-edu"


def check_trackers(names: Sequence[str]) -> None:
    """Raise ValueError for a tracker that is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise ValueError(
                f'`report_to`: {name} is not installed; pip install "grpo-edu[tracking]", or leave it out.'
            )


@contextmanager
def open_trackers(record: RunMetadata, folder: str | Path) -> Iterator[Callable[[Mapping[str, float]], None]]:
    """A context with a function that gives the metrics of a step to each tracker in a run's `report_to`.

    Values that are not finite are left out. What an earlier attempt at the run left is replaced.
    """
    from accelerate import PartialState

    starts = {"tensorboard": _tensorboard, "trackio": _trackio, "wandb": _wandb}
    settings = {**record.to_dict(), **record.run_config.to_settings(), "folder": str(folder)}
    del settings["config"]
    plain = {
        name: ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
        for name, value in settings.items()
    }
    PartialState()  # accelerate's trackers ask it which process this is
    trackers: list[GeneralTracker] = []

    def log(metrics: Mapping[str, float]) -> None:
        values = {name: value for name, value in metrics.items() if name != "step" and math.isfinite(value)}
        for tracker in trackers:
            tracker.log(values, step=int(metrics["step"]))

    with ExitStack() as opened:
        for name in record.run_config.report_to:
            with redirect_stdout(io.StringIO()):  # trackio says where its pages are
                tracker = starts[name](Path(folder), plain)
            opened.callback(_finish, tracker)
            trackers.append(tracker)
        yield log


def _finish(tracker: GeneralTracker) -> None:
    with redirect_stdout(io.StringIO()):
        if tracker.name == "trackio":  # its own function also forgets the run, which is otherwise ended again at exit
            import trackio

            trackio.finish()
        else:
            tracker.finish()


def _tensorboard(folder: Path, settings: dict[str, Any]) -> GeneralTracker:
    from accelerate.tracking import TensorBoardTracker

    shutil.rmtree(folder / "tensorboard", ignore_errors=True)
    tracker = TensorBoardTracker("tensorboard", folder, flush_secs=10)
    tracker.start()
    tracker.store_init_configuration({name: value for name, value in settings.items() if value is not None})
    return tracker


def _trackio(folder: Path, settings: dict[str, Any]) -> GeneralTracker:
    from accelerate.tracking import TrackioTracker
    from trackio.sqlite_storage import SQLiteStorage

    for run in SQLiteStorage.get_run_records(PROJECT):
        stored = SQLiteStorage.get_run_config(PROJECT, run["name"], run["id"]) or {}
        if stored.get("folder") == str(folder):
            SQLiteStorage.delete_run(PROJECT, run["name"], run["id"])
    tracker = TrackioTracker(
        PROJECT, name=folder.name, config=settings, embed=False, auto_log_gpu=False, auto_log_cpu=False
    )
    tracker.start()
    return tracker


def _wandb(folder: Path, settings: dict[str, Any]) -> GeneralTracker:
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # wandb 0.31 reports errors even when it is offline
    import wandb
    from accelerate.tracking import WandBTracker

    shutil.rmtree(folder / "wandb", ignore_errors=True)
    quiet = wandb.Settings(silent=True, console="off", x_disable_stats=True)
    tracker = WandBTracker(PROJECT, name=folder.name, dir=str(folder), config=settings, mode="offline", settings=quiet)
    tracker.start()
    return tracker
