"""Exercises of notebook 01, first part: a stopwatch, settings that come too late."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

from grpo_edu.checks.core import Call, Exercise, Mistake, Part, call

# ---- best_seconds ----


@dataclass
class Computer:
    """A computer with a clock of its own: each run of `task` takes as long as the next of `seconds` says."""

    seconds: list[float]
    now: float = field(default=0.0, repr=False)
    runs: int = field(default=0, repr=False)

    def task(self) -> None:
        """Work; the last of `seconds` counts again and again."""
        self.now += self.seconds[min(self.runs, len(self.seconds) - 1)]
        self.runs += 1

    def clock(self) -> float:
        """How late it is, in seconds."""
        return self.now


def best_seconds(task: Callable[[], None], clock: Callable[[], float], repeats: int) -> float:
    """The shortest of `repeats` runs, after one that warms up."""
    task()
    times = []
    for _ in range(repeats):
        start = clock()
        task()
        times.append(clock() - start)
    return min(times)


def _some_runs(rng: random.Random) -> Call:
    """A slow first run; the shortest comes last of those that count, and a shorter one right after it."""
    repeats = rng.randrange(3, 7)
    best = rng.randrange(200, 300)
    others = rng.sample(range(best + 20, best + 200), repeats - 1)
    runs = [rng.randrange(600, 900), *others, best, best - 15]
    computer = Computer([one / 1000 for one in runs], now=float(rng.randrange(1, 9)))
    return call(computer.task, computer.clock, repeats)


def _fast_first_run(rng: random.Random) -> Call:
    """By chance the first run is the shortest of all."""
    made = _some_runs(rng)
    computer = made.args[0].__self__
    computer.seconds[0] = round(min(computer.seconds) - rng.randrange(20, 90) / 1000, 3)
    return call(computer.task, computer.clock, made.args[2])


def _seconds_by_list(task, clock, repeats):
    def once():
        start = clock()
        task()
        return clock() - start

    return min([once() for _ in range(repeats + 1)][1:])


def _seconds_by_running_min(task, clock, repeats):
    task()
    best = math.inf
    while repeats:
        start = clock()
        task()
        best, repeats = min(best, clock() - start), repeats - 1
    return best


def _seconds_by_marks(task, clock, repeats):
    marks = []
    for _ in range(1 + repeats):
        task()
        marks.append(clock())
    return sorted(late - early for early, late in zip(marks, marks[1:], strict=False))[0]


def _all_times(task, clock, count):
    times = []
    for _ in range(count):
        start = clock()
        task()
        times.append(clock() - start)
    return times


check_best_seconds = Exercise(
    "best_seconds",
    best_seconds,
    parts=(
        Part("a slow first run, then runs of different length", 2, _some_runs),
        Part("a first run that is the fastest by chance", 1, _fast_first_run),
    ),
    mistakes=(
        Mistake("the first run counts", "Let the task run once to warm up, without measuring it, then measure it "
                "`repeats` times.", lambda task, clock, repeats: min(_all_times(task, clock, repeats + 1)),
                also=(lambda task, clock, repeats: min(_all_times(task, clock, repeats)),)),
        Mistake("the time is read from another clock", "`clock` is handed in: ask it, not the computer's own clock.",
                lambda task, clock, repeats: min(_all_times(task, perf_counter, repeats + 1)[1:])),
        Mistake("it is the time of all runs together", "Measure each run by itself: ask the clock inside the loop.",
                lambda task, clock, repeats: sum(_all_times(task, clock, repeats + 1)[1:])),
        Mistake("it is the mean", "Whatever else the computer does can only add time. Which run was disturbed least?",
                lambda task, clock, repeats: sum(_all_times(task, clock, repeats + 1)[1:]) / repeats),
        Mistake("it is the longest run", "Whatever else the computer does can only add time.",
                lambda task, clock, repeats: max(_all_times(task, clock, repeats + 1)[1:])),
        Mistake("one run too many is measured", "How many runs does `repeats` ask for?",
                lambda task, clock, repeats: min(_all_times(task, clock, repeats + 2)[1:])),
        Mistake("the difference is turned round", "Later minus earlier: a duration is positive.",
                lambda task, clock, repeats: min(-one for one in _all_times(task, clock, repeats + 1)[1:])),
    ),
    right=(_seconds_by_list, _seconds_by_running_min, _seconds_by_marks),
)  # fmt: skip


# ---- mend_script ----

SETTING = "os.environ["


def mend_script(lines: list[str]) -> list[str]:
    """`import os` first, then the lines that set a variable, then the others, all in the order they stood in."""
    settings = [line for line in lines if line.startswith(SETTING)]
    others = [line for line in lines if line not in settings and line != "import os"]
    return ["import os", *settings, *others]


def _some_script(rng: random.Random) -> Call:
    names = rng.sample(["OMP_NUM_THREADS", "MKL_NUM_THREADS", "ATEN_CPU_CAPABILITY", "ONEDNN_VERBOSE"], 3)
    settings = [f'os.environ["{name}"] = "{rng.randrange(1, 5)}"' for name in sorted(names, reverse=True)]
    work = ["import torch", "print(torch.get_num_threads())", "x = torch.ones(9, 9) @ torch.ones(9, 9)"]
    lines = ["import time", *work]
    for place, line in zip(sorted(rng.choices(range(2, 5), k=3), reverse=True), reversed(settings), strict=True):
        lines.insert(place, line)
    lines.insert(rng.randrange(0, 3), "import os")
    return call(lines)


def _sound_script(rng: random.Random) -> Call:
    setting = f'os.environ["OMP_NUM_THREADS"] = "{rng.randrange(1, 5)}"'
    return call(["import os", setting, "import torch", f"x = torch.ones({rng.randrange(2, 9)})", "print(x)"])


def _script_by_sort(lines):
    def rank(line):
        return 0 if line == "import os" else 1 if line.startswith("os.environ") else 2

    return sorted(lines, key=rank)


def _script_by_loop(lines):
    first, last = [], []
    for line in lines:
        if "os.environ" in line:
            first.append(line)
        elif line.strip() != "import os":
            last.append(line)
    return ["import os"] + first + last


def _script_by_removing(lines):
    left = list(lines)
    moved = [one for one in lines if one.startswith("os.environ[")]
    for one in ["import os", *moved]:
        left.remove(one)
    return ["import os", *moved, *left]


def _each_to_the_front(lines):
    out = [line for line in lines if not line.startswith(SETTING) and line != "import os"]
    for line in lines:
        if line.startswith(SETTING):
            out.insert(0, line)
    return ["import os", *out]


def _one_setting_only(lines):
    setting = next(line for line in lines if line.startswith(SETTING))
    rest = [line for line in lines if line not in (setting, "import os")]
    return ["import os", setting, *rest]


check_mend_script = Exercise(
    "mend_script",
    mend_script,
    parts=(
        Part("settings below `import torch`", 2, _some_script),
        Part("a script that is right already", 1, _sound_script),
    ),
    mistakes=(
        Mistake("the settings stand above `import os`", "The first line that uses `os` needs it imported.",
                lambda lines: sorted(lines, key=lambda line: not line.startswith(SETTING))),
        Mistake("`import os` is there twice", "Move the line: take it away from where it stood.",
                lambda lines: ["import os", *sorted(lines, key=lambda line: not line.startswith(SETTING))]),
        Mistake("only the first setting is moved", "A script may set several variables.", _one_setting_only),
        Mistake("the settings come in reverse order", "Whoever inserts each at the top turns their order round.",
                _each_to_the_front),
        Mistake("`import torch` is moved to the end", "It would stand below the lines that need it. Move the settings.",
                lambda lines: sorted(lines, key=lambda line: line == "import torch")),
        Mistake("the lines are sorted by the alphabet", "Everything but the settings keeps its order.", sorted),
    ),
    right=(_script_by_sort, _script_by_loop, _script_by_removing),
)  # fmt: skip
