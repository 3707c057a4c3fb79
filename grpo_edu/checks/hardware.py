"""Exercises of notebook 01, first part: a stopwatch, threads, settings that come too late."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

import torch

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


# ---- choose_threads ----

COUNTS = [1, 2, 4, 8]


def choose_threads(counts: list[int], seconds: list[float], usable_cores: float) -> int:
    """The smallest number of threads, not above the usable cores, that is within 5% of the fastest of these."""
    allowed = [(count, time) for count, time in zip(counts, seconds, strict=True) if count <= usable_cores]
    fastest = min(time for _, time in allowed)
    return min(count for count, time in allowed if time <= 1.05 * fastest)


def _rising(rng: random.Random) -> Call:
    one, serial = rng.randrange(100, 900), rng.choice([0.0, 0.05, 0.2])
    usable = rng.choice([2, 2.5, 4, 6])
    times = [one * (serial + (1 - serial) / min(count, usable)) * (1.2 if count > usable else 1) for count in COUNTS]
    return call(list(COUNTS), [round(time) / 1000 for time in times], usable)


def _too_many(rng: random.Random) -> Call:
    made = _rising(rng)
    counts, seconds, usable = made.args
    best = min(time for count, time in zip(counts, seconds, strict=True) if count <= usable)
    lucky = [round(0.8 * best, 4) if count > usable else time for count, time in zip(counts, seconds, strict=True)]
    return call(counts, lucky, usable)


def _flat(rng: random.Random) -> Call:
    one = rng.randrange(200, 900)
    factors = [1.0, rng.choice([0.96, 0.97, 0.98]), rng.choice([0.99, 1.01, 1.02]), 1.3]
    return call(list(COUNTS), [round(one * factor) / 1000 for factor in factors], rng.choice([4, 6]))


HALF_CORES = (  # the third thread would be fast, but has no core of its own
    call([1, 2, 3, 4], [0.5, 0.54, 0.3, 0.2], 2.5),
    call([1, 2, 3, 4], [0.8, 0.5, 0.3, 0.2], 2.75),
    call([1, 2, 3, 4], [0.8, 0.41, 0.4, 0.5], 2.5),
)
SMALL_STEPS = call(list(COUNTS), [0.5, 0.485, 0.47, 0.65], 4)  # each gains less than 5%, together they gain more


def _threads_by_loop(counts, seconds, usable_cores):
    fastest = math.inf
    for count, time in zip(counts, seconds, strict=True):
        if count <= usable_cores:
            fastest = min(fastest, time)
    for count, time in sorted(zip(counts, seconds, strict=True)):
        if time / fastest <= 1.05:
            return count


def _threads_by_dict(counts, seconds, usable_cores):
    times = {count: time for count, time in zip(counts, seconds, strict=True) if not count > usable_cores}
    limit = min(times.values()) * 1.05
    return next(count for count in sorted(times) if times[count] <= limit)


def _best_of_all_first(nothing_left: Callable[[list[int]], int | None]) -> Callable:
    """The fastest of all counts is looked for first; what comes out where no allowed one is near it."""

    def wrong(counts, seconds, usable_cores):
        near = [count for count, time in zip(counts, seconds, strict=True) if time <= 1.05 * min(seconds)]
        allowed = [count for count in near if count <= usable_cores]
        return min(allowed) if allowed else nothing_left(counts)

    return wrong


def _step_by_step(counts, seconds, usable_cores):
    best = 0
    for place, count in enumerate(counts):
        if count <= usable_cores and 1.05 * seconds[place] < seconds[best]:
            best = place
    return counts[best]


def _threads_by_tensor(counts, seconds, usable_cores):
    tried = torch.tensor(counts)
    times = torch.tensor(seconds, dtype=torch.float64).masked_fill(tried > usable_cores, math.inf)
    return int(tried[times <= 1.05 * times.min()].min())


check_choose_threads = Exercise(
    "choose_threads",
    choose_threads,
    parts=(
        Part("tasks that gain from threads", 1, _rising),
        Part("too many threads, fast by luck", 1, _too_many, always=HALF_CORES),
        Part("a task that gains little or nothing", 1, _flat, always=(SMALL_STEPS,)),
    ),
    mistakes=(
        Mistake("there are more threads than cores", "A container may have fewer cores than the machine shows: leave "
                "out the counts above `usable_cores`.",
                lambda counts, seconds, usable: choose_threads(counts, seconds, math.inf)),
        Mistake("a part of a core counts as a whole one", "With 2.5 usable cores, a third thread is one too many: take "
                "`usable_cores` as it is, without rounding it.",
                lambda counts, seconds, usable: choose_threads(counts, seconds, math.ceil(usable)),
                also=(lambda counts, seconds, usable: choose_threads(counts, seconds, round(usable)),)),
        Mistake("the shortest time is looked for among all counts", "First leave out the counts that are not allowed, "
                "then look for the shortest time among the others.", _best_of_all_first(min),
                also=(_best_of_all_first(lambda counts: None), _best_of_all_first(lambda counts: min([])))),
        Mistake("each count is compared with a slower one", "Compare with the shortest time of all that are allowed, "
                "which may come later in the list.", _step_by_step),
        Mistake("the fastest wins, however little it gains", "Within 5% of the fastest the smaller number is enough: "
                "the other cores are free for something else.",
                lambda counts, seconds, usable: min(
                    (time, count) for count, time in zip(counts, seconds, strict=True) if count <= usable)[1]),
        Mistake("it is as many threads as there may be", "Look at the times: does this task gain from them?",
                lambda counts, seconds, usable: max(count for count in counts if count <= usable)),
        Mistake("it is the slowest", "These are seconds: less is better.",
                lambda counts, seconds, usable: max(
                    (time, count) for count, time in zip(counts, seconds, strict=True) if count <= usable)[1]),
        Mistake("it is a place in the list", "Return the number of threads that stands there.",
                lambda counts, seconds, usable: counts.index(choose_threads(counts, seconds, usable))),
    ),
    right=(_threads_by_loop, _threads_by_dict, _threads_by_tensor),
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
