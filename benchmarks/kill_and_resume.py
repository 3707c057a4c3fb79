"""Runs that are killed and resumed end as if nothing had happened: ``python -m benchmarks.kill_and_resume``.

A run of the tiny model with a checkpoint every two steps is left alone once. Then the same run is started again
and again, in a process of its own that gets SIGKILL at a random moment between its start and its end, and is resumed,
until twenty were killed.
What each leaves behind must be that of the undisturbed run: the weights bit for bit, the metrics of every step, the
evaluations before and after. Takes ten minutes of one core; writes ``benchmarks/results/kill_and_resume.json``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, markdown, save
from grpo_edu.runs.log import read_log

COMMAND = "python -m benchmarks.kill_and_resume"
RUN: dict[str, Any] = {"config": {"max_steps": 12, "seed": 3}, "checkpoint_every": 2, "n": 60, "greedy": True}
ENDED = "nowhere, it had ended"
_TIMED = ("seconds", "output", "throughput")  # what is not the same in two runs


def start_run(folder: Path, model: str, options: Mapping[str, Any]) -> None:
    """Start the run in this process."""
    import torch

    from grpo_edu.config import GRPOConfig
    from grpo_edu.runs.run import run_training

    torch.set_num_threads(1)
    run_training(model, output=folder, progress=False, **{**options, "config": GRPOConfig(**options["config"])})


def resume_run(folder: Path) -> None:
    """Resume the run in this process."""
    import torch

    from grpo_edu.runs.run import resume_training

    torch.set_num_threads(1)
    resume_training(folder, progress=False)


def in_process(work: Callable[[], None], kill_after: float | None = None) -> bool:
    """Do `work` in a process of its own; return True if it came to its end before SIGKILL after so many seconds.

    Raises RuntimeError if it failed by itself.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers.modeling_utils", "grpo_edu.runs.run"])
    process = context.Process(target=work)
    process.start()
    process.join(kill_after)
    if process.is_alive():
        process.kill()
        process.join()
    if process.exitcode not in (0, -9):
        raise RuntimeError(f"the run ended with exit code {process.exitcode}; its own words are above")
    return process.exitcode == 0


def outcome(folder: Path) -> dict[str, Any]:
    """Return what a run leaves behind: a hash of the weights, the metrics without their times, the evaluations."""
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    weights = hashlib.sha256((folder / "model" / "model.safetensors").read_bytes()).hexdigest()
    metrics = [
        {key: value for key, value in step.items() if key != "step_time"} for step in read_log(folder / "metrics.jsonl")
    ]
    return {"weights": weights, "metrics": metrics, "result": {k: v for k, v in result.items() if k not in _TIMED}}


def state_of(folder: Path) -> dict[str, Any]:
    """Return how far a run had come when it was killed: steps in its log, the step of its state."""
    from grpo_edu.runs.state import load_state

    log, state = folder / "metrics.jsonl", folder / "state.pt"
    return {
        "steps logged": len(read_log(log)) if log.is_file() else 0,
        "goes on from": f"step {len(load_state(state)['history'])}" if state.is_file() else "its start",
    }


def killed_once(
    folder: Path, begin: Callable[[Path], None], moment: float, expected: Mapping[str, Any]
) -> dict[str, Any]:
    """Start a run, kill it after `moment` seconds, resume it, and compare; a row of the table."""
    finished = in_process(partial(begin, folder), kill_after=moment)
    row = {"killed after": f"{moment:.2f} s", **state_of(folder)}
    if finished:
        row["goes on from"] = ENDED
    elif (folder / "config.json").is_file():
        in_process(partial(resume_run, folder))
    else:
        in_process(partial(begin, folder))
    found = outcome(folder)
    names = {path.name for path in folder.iterdir()} - {".lock"}  # which filelock leaves, open to the next
    left = sorted(name for name in names if name.startswith((".", "state")))
    return {
        **row,
        **{f"same {name}": found[name] == value for name, value in expected.items()},
        "nothing left over": not left,
    }


def study(kills: int, seed: int, model: str, options: Mapping[str, Any], parent: Path) -> dict[str, Any]:
    """Train an undisturbed run and the killed ones, in folders under `parent`, and return how they compare."""
    begin = partial(start_run, model=model, options=options)
    in_process(partial(begin, parent / "warm-up"))  # so that the undisturbed run does not pay for imports
    started = time.perf_counter()
    in_process(partial(begin, parent / "undisturbed"))
    seconds = time.perf_counter() - started
    expected, rng, rows = outcome(parent / "undisturbed"), random.Random(seed), []
    latest = seconds
    while len(rows) < kills:
        folder, moment = parent / f"killed-{len(rows)}", rng.uniform(0, latest)
        row = killed_once(folder, begin, moment, expected)
        print(row, flush=True)
        if row["goes on from"] == ENDED:  # it was faster than the undisturbed run, and does not count
            latest = moment
            shutil.rmtree(folder)
        else:
            rows.append(row)
    return {"seconds": round(seconds, 2), "steps": options["config"]["max_steps"], "kills": kills, "rows": rows}


def shown(row: Mapping[str, Any]) -> dict[str, str]:
    """Return a row of the table in words."""
    return {
        name: {True: "yes", False: "NO"}.get(value, value) if isinstance(value, bool) else value
        for name, value in row.items()
    }


def main() -> int:
    """Measure, print the table, store it; 1 where a run ended differently."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--output", type=Path, default=RESULTS / "kill_and_resume.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        record = study(arguments.kills, arguments.seed, "tiny", RUN, Path(folder))
    print("\n" + markdown([shown(row) for row in record["rows"]]))
    save(arguments.output, COMMAND, record)
    return 0 if all(value is not False for row in record["rows"] for value in row.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
