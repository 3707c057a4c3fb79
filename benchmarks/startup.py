"""From the start of a process to the end of its first step, against stock TRL: ``python -m benchmarks.startup``.

Each measurement is a fresh process: ``python -m grpo_edu.machine.startup tiny``, and ``python -m benchmarks.startup
--stock``,
which trains the same model on the same problems with TRL's own `GRPOTrainer` as TRL's documentation shows it. They
take turns. Prints a table with the phases and writes ``benchmarks/results/startup.json``. About 3 minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, between, markdown, save, spread, times_as_fast
from grpo_edu.machine.startup import PHASES, measure_process

COMMAND = "python -m benchmarks.startup"
SIDES = {
    "stock TRL": [sys.executable, "-m", "benchmarks.startup", "--stock"],
    "grpo_edu": [sys.executable, "-m", "grpo_edu.machine.startup", "tiny"],
}
TARGET = 2.0  # at most half of stock TRL's


def stock(started: float) -> dict[str, float]:
    """Return the phases of stock TRL in this process, to the end of its first step; `started` is time.time()'s."""
    seconds, last = {}, started

    def mark(phase: str) -> None:
        nonlocal last
        now = time.time()
        seconds[phase], last = now - last, now

    mark("python")
    import torch  # noqa: F401  to time it

    mark("import torch")
    import transformers.modeling_utils  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    mark("import transformers")
    from datasets import Dataset

    from grpo_edu.problems.files import load_problems
    from grpo_edu.problems.templates import LEVELS
    from grpo_edu.prompts import chat_messages
    from grpo_edu.rewards import accuracy_reward

    rows = [{"prompt": chat_messages(row.prompt), "answer": row.answer} for row in load_problems(LEVELS, "train")]
    dataset = Dataset.from_list(rows)
    mark("problems")
    from grpo_edu.problems.templates import data_dir

    folder = data_dir() / "models" / "tiny"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    mark("model")
    settings = {"num_generations": 8, "per_device_train_batch_size": 128, "max_completion_length": 96, "max_steps": 1}
    plain = {"bf16": False, "gradient_checkpointing": False, "use_cpu": True, "report_to": "none"}
    with tempfile.TemporaryDirectory() as folder:  # TRL makes one, though nothing is saved
        trainer = GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=accuracy_reward,
            train_dataset=dataset,
            args=GRPOConfig(output_dir=folder, save_strategy="no", learning_rate=1e-4, **settings, **plain),
        )
        trainer.train()
        mark("first step")
    return seconds


def compare(rounds: int) -> dict[str, Any]:
    """Time each phase, and all of them together, each side in turn."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in SIDES}
    for number in range(rounds + 1):
        for name, command in SIDES.items():
            seconds = measure_process(command)
            if number:  # the first reads the libraries from the disk
                runs[name].append({phase: seconds[phase] for phase in PHASES})
    totals = {name: [sum(run.values()) for run in found] for name, found in runs.items()}
    return {
        name: {
            "phases": {phase: spread([run[phase] for run in found]) for phase in PHASES},
            "total": spread(totals[name]),
            "times as fast as stock TRL": times_as_fast(totals["stock TRL"], totals[name]),
        }
        for name, found in runs.items()
    }


def table(record: dict[str, Any]) -> str:
    """Phases down, sides across."""
    rows = [
        {"phase": phase, **{name: f"{side['phases'][phase]['median']:.2f}" for name, side in record.items()}}
        for phase in PHASES
    ]
    rows.append({"phase": "total", **{name: between(side["total"]) for name, side in record.items()}})
    ratio = "times as fast as stock TRL"
    rows.append({"phase": ratio, **{name: between(side[ratio]) for name, side in record.items()}})
    return markdown(rows)


def main() -> int:
    """Measure; exit 1 if the target is missed."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS / "startup.json")
    parser.add_argument("--stock", type=float, metavar="STARTED", help=argparse.SUPPRESS)  # the fresh process
    options = parser.parse_args()
    if options.stock is not None:
        print(json.dumps(stock(options.stock)))
        return 0
    record = compare(options.rounds)
    holds = record["grpo_edu"]["times as fast as stock TRL"]["median"] >= TARGET
    statement = "from process start to the end of the first step in at most half of stock TRL's time"
    save(options.output, COMMAND, {"sides": record, "verdicts": {statement: holds}})
    print(table(record))
    print(f"{'holds' if holds else 'MISSED'}: {statement}")
    return 0 if holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
