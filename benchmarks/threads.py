"""The speed of a step and of its parts with every number of threads: ``python -m benchmarks.threads``.

Each number of threads is a fresh process (OMP_NUM_THREADS acts when torch starts), which times rollouts and updates of
the tiny model, 16 prompts × 8 completions, and a large product; the processes take turns. From one thread to twice the
cores: what more threads than cores cost is part of the answer. Prints a table and writes
``benchmarks/results/threads.json``; `grpo_edu.figures.machine.thread_curves` draws it. About 2 minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, between, in_turn, markdown, save, spread

COMMAND = "python -m benchmarks.threads"
PARTS = ("rollout", "update", "a product of 1024 × 1024")


def thread_counts(cores: float) -> list[int]:
    """1, 2, 4, … up to the first power of two that is at least twice the cores.

    >>> thread_counts(2)
    [1, 2, 4]
    >>> thread_counts(6)
    [1, 2, 4, 8, 16]
    """
    return [2**power for power in range(math.ceil(math.log2(max(1.0, 2 * cores))) + 1)]


def measure_here(rounds: int) -> dict[str, list[float]]:
    """Time each part in this process, with as many threads as it has."""
    import torch

    from grpo_edu import GRPOConfig, accuracy_reward, generate, load_policy, load_problems, render_prompt
    from grpo_edu.batch import score_rollout
    from grpo_edu.problems.templates import LEVELS
    from grpo_edu.trainer import Training, start_training, update_policy

    config = GRPOConfig(learning_rate=1e-7)
    model, tokenizer = load_policy("tiny")
    problems = load_problems(LEVELS, "train")[:: 3000 // config.prompts_per_step][: config.prompts_per_step]
    prompts = [render_prompt(tokenizer, problem.prompt) for problem in problems]
    sizes = {
        "num_generations": config.num_generations,
        "max_completion_length": config.max_completion_length,
        "generator": torch.Generator(),
    }

    def rollout():
        sizes["generator"].manual_seed(0)
        return generate(model, tokenizer, prompts, **sizes)

    batch = score_rollout(rollout(), problems, [accuracy_reward], config)
    state = start_training(model, tokenizer, problems, config)
    training = Training(model, tokenizer, problems, [accuracy_reward], config, state)
    square = torch.ones(1024, 1024)
    calls = (rollout, lambda: update_policy(training, batch), lambda: square @ square)
    return in_turn(dict(zip(PARTS, calls, strict=True)), rounds)


def measure(counts: list[int], rounds: int, turns: int) -> dict[str, dict[str, Any]]:
    """Part → number of threads → spread of the seconds, `turns` processes each."""
    seconds: dict[str, dict[int, list[float]]] = {part: {count: [] for count in counts} for part in PARTS}
    for _ in range(turns):
        for count in counts:
            command = [sys.executable, "-m", "benchmarks.threads", "--here", "--rounds", str(rounds)]
            environment = {**os.environ, "OMP_NUM_THREADS": str(count), "OMP_DYNAMIC": "false"}
            done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
            for part, found in json.loads(done.stdout.splitlines()[-1]).items():
                seconds[part][count] += found
    return {part: {str(count): spread(found) for count, found in row.items()} for part, row in seconds.items()}


def table(parts: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Return a Markdown table with the numbers of threads down and the parts across."""
    counts = list(next(iter(parts.values())))
    return markdown(
        [{"threads": count, **{part: between(row[count], 3) for part, row in parts.items()}} for count in counts]
    )


def main() -> int:
    """Sweep, print and store."""
    from grpo_edu.machine.hardware import usable_cores

    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=2, help="processes of each number of threads")
    parser.add_argument("--counts", type=int, nargs="+", help="numbers of threads (default: 1 to twice the cores)")
    parser.add_argument("--output", type=Path, default=RESULTS / "threads.json")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # the fresh process
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measure_here(options.rounds)))
        return 0
    parts = measure(options.counts or thread_counts(usable_cores()), options.rounds, options.turns)
    save(options.output, COMMAND, {"cores": usable_cores(), "seconds": parts})
    print(table(parts))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
