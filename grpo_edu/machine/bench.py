"""Measure the speed of this computer, as one row of the table in docs/measured.md.

The work is the same on every computer: the shipped model with the default settings (16 prompts × 8 completions of up to
96 tokens), and a decoding step of a model with 494 million parameters. Measure while the computer does nothing else.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from grpo_edu.config import GRPOConfig
from grpo_edu.fast.memory import GIB, memory_bytes
from grpo_edu.fast.memory_estimate import shape_config
from grpo_edu.machine.hardware import cpu_report
from grpo_edu.machine.probe import probe_dtypes
from grpo_edu.machine.step_process import measure_steps
from grpo_edu.problems.files import read_utf8

LARGE = "494M"
_LARGE_NEEDS = 2 * GIB  # two layers and the output layer in both number formats, and memory to compute
# Column → its cell, from what `measure_machine` found. The first four identify a computer.
COLUMNS: dict[str, Callable[[Mapping[str, Any]], object]] = {
    "processor": lambda found: found["cpu_model"],
    "cores": lambda found: f"{found['usable_cores']:g}",
    "memory (GiB)": lambda found: f"{found['memory_total_gib']:.0f}",
    "torch": lambda found: found["torch"],
    "instruction sets": lambda found: ", ".join(found["instruction_sets"]) or "none of those listed below",
    "rollout (tokens/s)": lambda found: f"{found['rollout_tokens_per_second']:,}",
    "training (steps/s)": lambda found: f"{found['training_steps_per_second']:.2f}",
    "peak (GiB)": lambda found: f"{found['peak_gib']:.2f}",
    f"decode step {LARGE}, 8 rows, float32 (ms)": lambda found: _decode_cell(found, "float32"),
    "the same, bfloat16 (ms)": lambda found: _decode_cell(found, "bfloat16"),
    "load before": lambda found: f"{found['load_before']:.1f}",
}


def _decode_cell(found: Mapping[str, Any], dtype: str) -> str:
    return f"{found['decode_ms'][dtype]:.0f}" if found["decode_ms"] else "—"


def measure_machine(*, rounds: int = 5) -> dict[str, Any]:
    """Measure this computer, which takes about half a minute.

    Args:
        rounds: the number of rollouts and of training steps, whose median is reported; at least 1.

    Returns:
        `cpu_report`, and rollout_tokens_per_second; training_steps_per_second and peak_gib, measured in a fresh
        process; decode_ms: number format → milliseconds, estimated from two layers and the output layer
        (`grpo_edu.machine.probe`), or None with the reason in decode_skipped; load_before.

    Raises:
        ValueError: `rounds` is below 1.
    """
    if rounds < 1:
        raise ValueError(f"rounds: must be at least 1, got {rounds}")
    import psutil

    load = psutil.getloadavg()[0]
    config = GRPOConfig(max_steps=rounds + 1)
    steps = measure_steps(config)
    available = memory_bytes()[1]
    skipped = ""
    if available < _LARGE_NEEDS:
        skipped = f"{available / GIB:.1f} GiB are available, and {_LARGE_NEEDS / GIB:.0f} GiB are needed"
    decode = None if skipped else probe_dtypes(shape_config(LARGE)).decode
    return {
        **cpu_report(),
        "rollout_tokens_per_second": round(_rollout_speed(config, rounds)),
        "training_steps_per_second": round(steps.samples_per_second / config.batch_size, 2),
        "peak_gib": round(steps.peak / GIB, 2),
        "decode_ms": decode and {dtype: round(1000 * seconds, 1) for dtype, seconds in decode.items()},
        "decode_skipped": skipped,
        "load_before": round(load, 1),
    }


def _rollout_speed(config: GRPOConfig, rounds: int) -> float:
    """Completion tokens per second, the median of some rollouts after a first one that is not counted."""
    import torch

    from grpo_edu.models import load_policy
    from grpo_edu.problems.files import load_problems
    from grpo_edu.problems.templates import LEVELS
    from grpo_edu.prompts import render_prompt
    from grpo_edu.rollout import Sampler

    model, tokenizer = load_policy("tiny")
    problems = load_problems(LEVELS, "train", n=config.prompts_per_step)
    prompts = [render_prompt(tokenizer, problem.prompt) for problem in problems[: config.prompts_per_step]]
    generator, speeds = torch.Generator().manual_seed(0), []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        rollout = Sampler(model, tokenizer, config).generate(prompts, generator)
        speeds.append(int(rollout.completion_mask.sum()) / (time.perf_counter() - started))
    return statistics.median(speeds[1:])


def machine_row(found: Mapping[str, Any]) -> dict[str, str]:
    """Return one row of the table, by column, from what `measure_machine` found."""
    return {name: str(cell(found)).replace("|", "/") for name, cell in COLUMNS.items()}


def report_text(found: Mapping[str, Any]) -> str:
    """Return the table with this computer only, as Markdown."""
    return "\n".join([*_head(), _line(machine_row(found).values())])


def machine_text(found: Mapping[str, Any]) -> str:
    """Return the same for a terminal, with one line per value."""
    row = machine_row(found)
    width = max(map(len, row))
    lines = [f"{name:<{width}}  {value}" for name, value in row.items()]
    if found["decode_skipped"]:
        lines.append(f"The {LARGE} shape was left out: {found['decode_skipped']}.")
    return "\n".join(lines)


def add_row(file: str | Path, found: Mapping[str, Any]) -> bool:
    """Add this computer's row to the table in a Markdown file; returns whether it replaced an older row.

    Raises:
        ValueError: the file has no such table. OSError: it cannot be read or written.
    """
    path, head = Path(file), _head()
    lines = read_table_file(path)
    first = lines.index(head[0]) + len(head)
    last = next((place for place in range(first, len(lines)) if not lines[place].startswith("|")), len(lines))
    line = _line(machine_row(found).values())
    same = [place for place in range(first, last) if _identity(lines[place]) == _identity(line)]
    if same:
        lines[same[0]] = line
    else:
        lines.insert(last, line)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return bool(same)


def read_table_file(file: str | Path) -> list[str]:
    """Return the lines of a Markdown file that has the table; raises as `add_row` does."""
    lines = read_utf8(Path(file)).splitlines()
    if _head()[0] not in lines:
        raise ValueError(
            f"report: {file} has no table of computers; copy the one in docs/measured.md, which begins {_head()[0]}"
        )
    return lines


def _head() -> list[str]:
    return [_line(COLUMNS), "|" + "---|" * len(COLUMNS)]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _identity(line: str) -> list[str]:
    """Return the cells of a row that identify a computer."""
    return [cell.strip() for cell in line.split("|")[1:5]]
