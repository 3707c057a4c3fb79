"""Training on a computer that is shared: ``python -m benchmarks.shared``.

Two measurements. First the default step (16 prompts × 8 completions of the tiny model) while 0, 1, 2 and 4 other
processes keep a core busy each. Every setting is a process of its own, and the settings take turns. Then notebook 00,
executed by 1, 2, 4 and 8 students at once: the time and the peak memory of each student. Writes
``benchmarks/results/shared.json`` and takes about an hour, most of it waiting for OpenMP's default. It measures
how busy the computer is before it starts, and stops where other programs compute already. ``--quick`` takes some
minutes, measures on a busy computer as well, and stores nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, between, markdown, save, spread
from benchmarks.notebooks import ROOT, measure
from grpo_edu.fast.cores import BackgroundLoad

COMMAND = "python -m benchmarks.shared"
NOTEBOOK = ROOT / "notebooks" / "00_start_here.ipynb"
OURS, DEFAULT = "grpo_edu's choice", "OpenMP's default"
# OMP_DYNAMIC=false keeps the number of threads; 300,000 rounds are what libgomp spins if nothing is set.
STEP_SETTINGS: dict[str, dict[str, str]] = {
    OURS: {},
    "torch imported first": {},
    DEFAULT: {"OMP_DYNAMIC": "false", "GOMP_SPINCOUNT": "300000"},
    "GOMP_SPINCOUNT=0": {"OMP_DYNAMIC": "false", "GOMP_SPINCOUNT": "0"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
STUDENT_SETTINGS = (OURS, "one thread", DEFAULT)
MOST_BY_DEFAULT = 4  # students at once; with eight, OpenMP's default takes half an hour
PARTS = ("steps", "students")
QUIET = 0.25  # cores that other programs may use while a result is measured that is stored


class SteppingProcess:
    """A training run in a process of its own, with OpenMP's variables of its own; it steps when it is told to."""

    def __init__(self, setting: str) -> None:
        command = [sys.executable, "-m", "benchmarks.shared", "--serve", setting]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, env=environment(STEP_SETTINGS[setting]), text=True, **pipes)
        self.step()  # the first imports and allocates

    def step(self) -> float:
        """Run the next step; return its seconds."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("a training process of the benchmark failed; its own message is above")
        return float(line)

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.communicate()


def serve(setting: str) -> None:
    """Run the training process: for each line on stdin make a step, and print its seconds."""
    if setting == "torch imported first":
        import torch  # noqa: F401  so that OpenMP starts without the package's variables
    from grpo_edu import GRPOConfig, accuracy_reward, load_policy, load_problems, train
    from grpo_edu.problems.templates import LEVELS

    config = GRPOConfig(max_steps=10**6, learning_rate=1e-7)  # the policy stays the same, and so does a step's work
    steps = train(*load_policy("tiny"), load_problems(LEVELS, "train"), accuracy_reward, config)
    for _ in sys.stdin:
        started = time.perf_counter()
        next(steps)
        print(time.perf_counter() - started, flush=True)


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with these variables, and no others that OpenMP reads."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
    return {**plain, **variables}


@contextmanager
def busy_neighbours(count: int) -> Iterator[None]:
    """Keep `count` cores busy with other processes, as far as there are cores."""
    neighbours = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(0.5)
        yield
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()


def measure_steps(counts: Sequence[int], rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """Setting → number of busy neighbours → spread of the seconds of a step.

    Two steps per round count; one before them does not, because the package first notices in it what has changed.
    """
    seconds: dict[str, dict[str, list[float]]] = {name: {str(n): [] for n in counts} for name in STEP_SETTINGS}
    with ExitStack() as held:
        running = {name: SteppingProcess(name) for name in STEP_SETTINGS}
        for process in running.values():
            held.callback(process.close)
        for _ in range(rounds):
            for count in counts:
                with busy_neighbours(count):
                    for name, process in running.items():
                        process.step()
                        seconds[name][str(count)] += [process.step(), process.step()]
    return {name: {count: spread(found) for count, found in row.items()} for name, row in seconds.items()}


def measure_students(counts: Sequence[int], settings: Sequence[str]) -> dict[str, dict[str, dict[str, Any]]]:
    """Setting → number of students at once → their seconds, those of the last to finish, and the bytes of each."""
    found: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in settings}
    for count in counts:
        for name in settings:
            if name == DEFAULT and count > MOST_BY_DEFAULT:
                continue
            command = [sys.executable, "-m", "benchmarks.shared", "--student"]
            started = time.perf_counter()
            students = [
                subprocess.Popen(command, env=environment(STEP_SETTINGS[name]), stdout=subprocess.PIPE, text=True)
                for _ in range(count)
            ]
            said = [student.communicate()[0] for student in students]
            if any(student.returncode for student in students):
                raise RuntimeError(f"notebook 00 failed for one of {count} students; its own message is above")
            each = [json.loads(lines.splitlines()[-1]) for lines in said]
            found[name][str(count)] = {
                "all_finished": round(time.perf_counter() - started, 1),
                "seconds": [student["seconds"] for student in each],
                "peak": [student["peak"] for student in each],
            }
            print(f"{count} students, {name}: {found[name][str(count)]['all_finished']} s", flush=True)
    return found


def verdicts(steps: Mapping[str, Any], students: Mapping[str, Any]) -> dict[str, bool]:
    """Return whether each promise of the package is kept, as far as it was measured."""
    quiet, default, two = steps[OURS]["0"]["median"], steps[DEFAULT]["0"]["median"], steps[OURS]["2"]
    judged = {
        "with two busy neighbours the median step takes at most 3 times the quiet one": two["median"] <= 3 * quiet,
        "with two busy neighbours the slowest step takes at most 5 times the quiet one": two["high"] <= 5 * quiet,
        "a quiet step takes at most 5% longer than with OpenMP's default": quiet <= 1.05 * default,
    }
    if "4" in students[OURS]:
        alone, together = (students[OURS][count]["all_finished"] for count in ("1", "4"))
        judged["four students at once take at most 1.3 times as long as one after the other"] = together <= 5.2 * alone
    return judged


def table(settings: Mapping[str, Mapping[str, Any]], head: str, cell: Callable[[Any], str]) -> str:
    """Settings down, numbers of neighbours or students across."""
    counts = list(settings[OURS])
    rows = [
        {"setting": name, **{f"{n} {head}": cell(row[n]) if n in row else "—" for n in counts}}
        for name, row in settings.items()
    ]
    return markdown(rows)


def student_cell(found: Mapping[str, Any]) -> str:
    """Return the seconds until all have finished, and the most memory that one of them took."""
    return f"{found['all_finished']:.0f} s, {max(found['peak']) / 1e9:.1f} GB each"


def other_programs(seconds: float = 2.0) -> float:
    """Cores that other programs use now."""
    programs = BackgroundLoad()
    programs.cores()
    time.sleep(seconds)
    return programs.cores()


def main() -> int:
    """Measure, print, and store the full measurement; exit 1 if a promise is not kept."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round with 0 and 2 neighbours, 1 and 2 students")
    parser.add_argument(
        "--parts", choices=PARTS, nargs="+", default=PARTS, help="what to measure again (default: both)"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS / "shared.json")
    parser.add_argument("--serve", choices=STEP_SETTINGS, help=argparse.SUPPRESS)  # the training process
    parser.add_argument("--student", action="store_true", help=argparse.SUPPRESS)  # a student's process
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return 0
    if options.student:
        print(json.dumps(measure(NOTEBOOK)))
        return 0
    busy = other_programs(1.9)
    if busy > QUIET and not options.quick:
        parser.error(f"other programs use {busy:.1f} cores; wait until the computer is quiet, or look with --quick")
    kept = json.loads(options.output.read_text()) if options.output.is_file() else {}
    if missing := [part for part in PARTS if part not in options.parts and part not in kept]:
        parser.error(f"{options.output} has no {' and '.join(missing)} yet; measure both parts once")
    stored = {part: kept[part] for part in PARTS if part in kept}
    if "steps" in options.parts:
        counts, rounds = ((0, 2), 1) if options.quick else ((0, 1, 2, 4), options.rounds)
        stored["steps"] = measure_steps(counts, rounds)
        print(table(stored["steps"], "busy neighbours", between), flush=True)
    if "students" in options.parts:
        chosen = ((1, 2), STUDENT_SETTINGS[:2]) if options.quick else ((1, 2, 4, 8), STUDENT_SETTINGS)
        stored["students"] = measure_students(*chosen)
        print(table(stored["students"], "students", student_cell))
    judged = verdicts(stored["steps"], stored["students"])
    if not options.quick:
        save(options.output, COMMAND, {**stored, "busy_before": busy, "verdicts": judged})
    for statement, holds in judged.items():
        print(f"{'holds' if holds else 'FAILS'}: {statement}")
    return 0 if all(judged.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
