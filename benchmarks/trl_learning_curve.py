"""Does TRL in two processes learn like this package's trainer? ``python -m benchmarks.trl_learning_curve``.

Design, written before the first run. Both sides train the tiny model with the settings of the default run: problems of
the three levels, the accuracy reward, 16 prompts x 8 completions per step, learning rate 1e-4, loss "grpo", 40 steps.

- "grpo_edu": `grpo_edu.train` in this process.
- "TRL, two processes": ``trl grpo`` with the files of `grpo_edu.scale.cluster`, in two processes that gloo connects.
  Each samples 8 of the 16 prompts. The stored runs are of version 0.3.0, whose runner started TRL's trainer and sampled
  with this package's `generate`.

Five seeds, 0 to 4. A seed decides the order of the problems and every sampled token, but the two sides draw different
numbers from it, so runs of one seed are not pairs. Two measures per run: the mean reward over its 40 steps, and the
accuracy after training on the same 300 held-out problems (sampled at temperature 1, one evaluation seed, both models
evaluated in this process). For each measure the result is the difference of the means, TRL minus grpo_edu, with
Welch's 95% interval over the seeds. The statement that is tested: both intervals contain 0. An interval that contains 0
does not show that the two are equal; its width shows how large a difference five seeds could have overlooked.

Prints a table and writes ``benchmarks/results/trl_learning_curve.json``. About 10 minutes on a computer with two cores
that has other work to do.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, held_out_accuracy, markdown, run_study, study_options
from benchmarks.learning_curves import WINDOW, difference, interval, windows
from grpo_edu import LEVELS, GRPOConfig, accuracy_reward, load_policy, load_problems, train
from grpo_edu.machine.hardware import machine
from grpo_edu.runs.metric_logs import read_metrics
from grpo_edu.runs.profiles import load_profile
from grpo_edu.scale.cluster import ClusterJob, write_job

COMMAND = "python -m benchmarks.trl_learning_curve"
OUTPUT = RESULTS / "trl_learning_curve.json"
OURS, TRL = "grpo_edu", "TRL, two processes"
MEASURES = {"mean reward over the run": "mean_reward", "held-out accuracy after training": "accuracy"}


def run(side: str, seed: int) -> dict[str, Any]:
    """Train once; return the reward of each step, the seconds of its steps, and the evaluation afterwards."""
    config = GRPOConfig(seed=seed)
    model, history = (train_here if side == OURS else train_two_processes)(config)
    after = held_out_accuracy(model)
    rewards = [step["reward"] for step in history]
    return {
        "name": side,
        "seed": seed,
        "reward": rewards,
        "mean_reward": statistics.mean(rewards),
        "accuracy": after["accuracy"],
        "seconds": sum(step["step_time"] for step in history),
        "after": after,
    }


def train_here(config: GRPOConfig) -> tuple[tuple[Any, Any], list[dict[str, float]]]:
    """Train with this package; returns model and tokenizer, and the metrics of each step."""
    model, tokenizer = load_policy("tiny")
    problems = load_problems(LEVELS, "train")
    return (model, tokenizer), list(train(model, tokenizer, problems, accuracy_reward, config))


def train_two_processes(config: GRPOConfig) -> tuple[tuple[Any, Any], list[dict[str, float]]]:
    """Train with TRL in two processes; return the policy and the metrics of its steps."""
    profile = load_profile("standard").override({**config.to_dict(), "n": len(LEVELS)})
    job = ClusterJob(profile, fixed=["prompts_per_step", "max_steps"], nodes=2, gpus_per_node=0)
    with tempfile.TemporaryDirectory() as place, socket.socket() as listener:
        write_job(job, place)
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        listener.close()
        launch = ["--multi_gpu", "--use_cpu", "--num_processes", "2", "--num_machines", "1"]
        launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", str(port)]
        done = subprocess.run(
            [Path(sys.executable).with_name("trl"), "grpo", "--config", "job.yaml", *launch],
            cwd=place,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"the two processes failed:\n{done.stderr}")
        return load_policy(Path(place) / "run"), read_metrics(Path(place) / "run")


def differences(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """TRL minus grpo_edu with Welch's 95% interval, for each measure.

    >>> runs = [{"name": side, "mean_reward": x, "accuracy": x} for side in (OURS, TRL) for x in (0.4, 0.5, 0.6)]
    >>> {name: round(value, 3) for name, value in differences(runs)["held-out accuracy after training"].items()}
    {'value': 0.0, 'low': -0.227, 'high': 0.227}
    """
    found = {}
    for measure, key in MEASURES.items():
        ours, trl = ([run[key] for run in runs if run["name"] == side] for side in (OURS, TRL))
        found[measure] = difference(trl, ours)
    return found


def verdicts(before: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """Return whether each difference has 0 in its interval."""
    return {
        f"the difference of the {measure} has 0 in its interval": found["low"] <= 0 <= found["high"]
        for measure, found in differences(runs).items()
    }


def table(before: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> str:
    """Return a row per window of steps and per measure, with 95% intervals over the seeds."""
    sides = {side: [run for run in runs if run["name"] == side] for side in (OURS, TRL)}
    curves = {side: zip(*(windows(run["reward"]) for run in found), strict=True) for side, found in sides.items()}
    shown = {side: [_text(interval(column)) for column in columns] for side, columns in curves.items()}
    rows = [
        {
            "": f"reward, steps {WINDOW * place + 1}–{WINDOW * (place + 1)}",
            **{side: shown[side][place] for side in sides},
        }
        for place in range(len(shown[OURS]))
    ]
    apart = differences(runs)
    for row in rows:
        row["difference"] = ""
    for measure, key in MEASURES.items():
        ends = {side: _text(interval([run[key] for run in found])) for side, found in sides.items()}
        found = apart[measure]
        text = f"{found['value']:+.3f} ({found['low']:+.3f} … {found['high']:+.3f})"
        rows.append({"": measure, **ends, "difference": text})
    return markdown(rows)


def _text(point: Mapping[str, float]) -> str:
    return f"{point['mean']:.3f} ({point['low']:.3f} … {point['high']:.3f})"


def main() -> int:
    """Run all seeds; exit 1 if a difference does not have 0 in its interval."""
    options = study_options(COMMAND, __doc__, OUTPUT)
    record = {"command": COMMAND, "machine": machine(), "before": held_out_accuracy(load_policy("tiny"))}
    code = run_study(options, (OURS, TRL), record, run=run, verdicts=verdicts, table=table)
    stored = json.loads(options.output.read_text(encoding="utf-8"))
    stored["differences"] = differences(stored["runs"])
    options.output.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
