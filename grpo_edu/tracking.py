"""Trackers beside the run's own log: TensorBoard, trackio and Weights & Biases, each on this machine alone.

metrics.jsonl is always written, and all that this course shows is drawn from it. A tracker gets the same numbers, for
those who watch several runs in its pages. Nothing is sent anywhere: wandb is offline, trackio and TensorBoard write
files.

=============  ===========================================  =======================================
name           where                                        to look at it
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
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from grpo_edu.run_inputs import parse_names

TRACKERS = ("tensorboard", "trackio", "wandb")
PROJECT = "grpo-edu"


def check_trackers(names: str | Sequence[str]) -> tuple[str, ...]:
    """Names of trackers, each once; () for none.

    Raises ValueError for an unknown one, or one that is not installed.

    >>> check_trackers("")
    ()
    """
    if not names:
        return ()
    found = parse_names(names, TRACKERS, "track")
    for name in found:
        if find_spec(name) is None:
            raise ValueError(f'track: {name} is not installed; pip install "grpo-edu[tracking]", or leave it out')
    return found


class Trackers(AbstractContextManager):
    """Trackers of one run, open while it trains; what an earlier attempt at the same run left there is replaced.

    Args:
        names: of `TRACKERS`. folder: of the run. config: what the run was asked for, plain values.
    """

    def __init__(self, names: Sequence[str], folder: str | Path, config: Mapping[str, Any]) -> None:
        kinds: dict[str, Any] = {"tensorboard": _TensorBoard, "trackio": _Trackio, "wandb": _Wandb}
        with ExitStack() as opened:
            self._trackers = [opened.enter_context(kinds[name](Path(folder), dict(config))) for name in names]
            self._opened = opened.pop_all()

    def log(self, metrics: Mapping[str, float]) -> None:
        """Hand the metrics of a step to each; what is no finite number is left out."""
        values = {name: value for name, value in metrics.items() if name != "step" and math.isfinite(value)}
        for tracker in self._trackers:
            tracker.log(values, int(metrics["step"]))

    def __exit__(self, *exception: Any) -> None:
        self._opened.__exit__(*exception)


class _TensorBoard(AbstractContextManager):
    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        shutil.rmtree(folder / "tensorboard", ignore_errors=True)
        self._writer = SummaryWriter(str(folder / "tensorboard"), flush_secs=10)
        self._writer.add_text("config", "\n".join(f"    {name}: {value}" for name, value in config.items()))

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def __exit__(self, *exception: object) -> None:
        self._writer.close()


class _Trackio(AbstractContextManager):
    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        config["folder"] = str(folder)
        for run in SQLiteStorage.get_run_records(PROJECT):
            stored = SQLiteStorage.get_run_config(PROJECT, run["name"], run["id"]) or {}
            if stored.get("folder") == str(folder):
                SQLiteStorage.delete_run(PROJECT, run["name"], run["id"])
        with redirect_stdout(io.StringIO()):  # where its pages are is said in this module
            self._run = trackio.init(
                project=PROJECT, name=folder.name, config=config, embed=False, auto_log_gpu=False, auto_log_cpu=False
            )

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def __exit__(self, *exception: object) -> None:
        import trackio

        with redirect_stdout(io.StringIO()):
            trackio.finish()


class _Wandb(AbstractContextManager):
    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # wandb 0.31 calls home with it, offline or not
        import wandb

        shutil.rmtree(folder / "wandb", ignore_errors=True)
        quiet = wandb.Settings(silent=True, console="off", x_disable_stats=True)
        self._run = wandb.init(
            project=PROJECT, name=folder.name, dir=str(folder), config=config, mode="offline", settings=quiet
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def __exit__(self, *exception: object) -> None:
        self._run.finish()
