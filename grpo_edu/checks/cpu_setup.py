"""Exercises on the computer itself: timing, threads, number formats, start-up time and memory."""

from __future__ import annotations

import copy
import importlib
import math
import random
import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from grpo_edu.checks.core import Call, Exercise, Mistake, Part, call
from grpo_edu.checks.inputs import Computer, Loading, Shift, sum_of_weights
from grpo_edu.config import GRPOConfig
from grpo_edu.fast.memory_estimate import ModelShape, held_bytes

# ---- best_seconds ----


def best_seconds(task: Callable[[], None], clock: Callable[[], float], repeats: int) -> float:
    """The shortest of `repeats` runs, after one that warms up."""
    task()
    return min(_all_times(task, clock, repeats))


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


def _all_times(task: Callable[[], None], clock: Callable[[], float], count: int) -> list[float]:
    times = []
    for _ in range(count):
        start = clock()
        task()
        times.append(clock() - start)
    return times


def _timed(result: Callable[[list[float]], float], too_many: int = 0) -> Callable[..., float]:
    """A wrong answer that makes another number of the times after the first run."""
    return lambda task, clock, repeats: result(_all_times(task, clock, 1 + repeats + too_many)[1:])


check_best_seconds = Exercise(
    best_seconds,
    parts=(
        Part("a slow first run, then runs of different length", 2, _some_runs),
        Part("a first run that is the fastest by chance", 1, _fast_first_run),
    ),
    mistakes={
        "the first run counts": Mistake(
            "Let the task run once to warm up, without measuring it, then measure it `repeats` times.",
            lambda task, clock, repeats: min(_all_times(task, clock, repeats + 1)),
            also=(lambda task, clock, repeats: min(_all_times(task, clock, repeats)),),
        ),
        "the time is read from another clock": Mistake(
            "`clock` is handed in: ask it, not the computer's own clock.",
            lambda task, clock, repeats: min(_all_times(task, perf_counter, repeats + 1)[1:]),
        ),
        "it is the time of all runs together": Mistake(
            "Measure each run by itself: ask the clock inside the loop.", _timed(sum)
        ),
        "it is the mean": Mistake(
            "Whatever else the computer does can only add time. Which run was disturbed least?",
            _timed(lambda times: sum(times) / len(times)),
        ),
        "it is the median": Mistake(
            "Whatever else the computer does can only add time. Which run was disturbed least?",
            _timed(statistics.median),
        ),
        "it is the longest run": Mistake("Whatever else the computer does can only add time.", _timed(max)),
        "one run too many is measured": Mistake("How many runs does `repeats` ask for?", _timed(min, too_many=1)),
        "the difference is turned round": Mistake(
            "Later minus earlier: a duration is positive.", _timed(lambda times: min(-one for one in times))
        ),
    },
)


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
    work = ["import torch", f'print(os.environ["{names[0]}"])', "x = torch.ones(9, 9) @ torch.ones(9, 9)"]
    lines = ["import time", *work]
    for place, line in zip(sorted(rng.choices(range(2, 5), k=3), reverse=True), reversed(settings), strict=True):
        lines.insert(place, line)
    lines.insert(rng.randrange(0, 3), "import os")
    return call(lines)


def _sound_script(rng: random.Random) -> Call:
    setting = f'os.environ["OMP_NUM_THREADS"] = "{rng.randrange(1, 5)}"'
    comment = "# os.environ[...] = ... would come too late here"
    return call(["import os", setting, "import torch", f"x = torch.ones({rng.randrange(2, 9)})", comment, "print(x)"])


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
    mend_script,
    parts=(
        Part("settings below `import torch`", 2, _some_script),
        Part("a script that is right already", 1, _sound_script),
    ),
    mistakes={
        "the settings stand above `import os`": Mistake(
            "The first line that uses `os` needs it imported.",
            lambda lines: sorted(lines, key=lambda line: not line.startswith(SETTING)),
        ),
        "`import os` is there twice": Mistake(
            "Move the line: take it away from where it stood.",
            lambda lines: ["import os", *sorted(lines, key=lambda line: not line.startswith(SETTING))],
        ),
        "whatever mentions `os.environ[` is moved": Mistake(
            "A line that prints a variable, or a comment, sets none: look at how a line *begins*.",
            lambda lines: sorted(lines, key=lambda line: (line != "import os") + (SETTING not in line)),
        ),
        "only the first setting is moved": Mistake("A script may set several variables.", _one_setting_only),
        "the settings come in reverse order": Mistake(
            "Whoever inserts each at the top turns their order round.", _each_to_the_front
        ),
        "`import torch` is moved to the end": Mistake(
            "It would stand below the lines that need it. Move the settings.",
            lambda lines: sorted(lines, key=lambda line: line == "import torch"),
        ),
        "the lines are sorted by the alphabet": Mistake("Everything but the settings keeps its order.", sorted),
    },
)


# ---- choose_threads ----

COUNTS = [1, 2, 4, 8]


def choose_threads(counts: list[int], seconds: list[float], usable_cores: float) -> int:
    """The smallest number of threads, not above the usable cores, that is within 5% of the fastest of these."""
    allowed = _allowed(counts, seconds, usable_cores)
    return min(count for time, count in allowed if time <= 1.05 * min(allowed)[0])


def _allowed(counts: list[int], seconds: list[float], usable_cores: float) -> list[tuple[float, int]]:
    """(seconds, count) of the counts that are not above the usable cores."""
    return [(time, count) for count, time in zip(counts, seconds, strict=True) if count <= usable_cores]


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


check_choose_threads = Exercise(
    choose_threads,
    parts=(
        Part("tasks that gain from threads", 1, _rising),
        Part("too many threads, fast by luck", 1, _too_many, always=HALF_CORES),
        Part("a task that gains little or nothing", 1, _flat, always=(SMALL_STEPS,)),
    ),
    mistakes={
        "there are more threads than cores": Mistake(
            "A container may have fewer cores than the machine shows: leave out the counts above `usable_cores`.",
            lambda counts, seconds, usable: choose_threads(counts, seconds, math.inf),
        ),
        "a part of a core counts as a whole one": Mistake(
            "With 2.5 usable cores, a third thread is one too many: take `usable_cores` as it is, without rounding it.",
            lambda counts, seconds, usable: choose_threads(counts, seconds, math.ceil(usable)),
            also=(lambda counts, seconds, usable: choose_threads(counts, seconds, round(usable)),),
        ),
        "the shortest time is looked for among all counts": Mistake(
            "First leave out the counts that are not allowed, then look for the shortest time among the others.",
            _best_of_all_first(min),
            also=(_best_of_all_first(lambda counts: None), _best_of_all_first(lambda counts: min([]))),
        ),
        "each count is compared with a slower one": Mistake(
            "Compare with the shortest time of all that are allowed, which may come later in the list.", _step_by_step
        ),
        "the fastest wins, however little it gains": Mistake(
            "Within 5% of the fastest the smaller number is enough: the other cores are free for something else.",
            lambda *given: min(_allowed(*given))[1],
        ),
        "it is as many threads as there may be": Mistake(
            "Look at the times: does this task gain from them?",
            lambda *given: max(count for _, count in _allowed(*given)),
        ),
        "it is the slowest": Mistake("These are seconds: less is better.", lambda *given: max(_allowed(*given))[1]),
        "it is a place in the list": Mistake(
            "Return the number of threads that stands there.",
            lambda counts, seconds, usable: counts.index(choose_threads(counts, seconds, usable)),
        ),
    },
)


# ---- smallest_update ----


def smallest_update(weight: float, dtype: torch.dtype) -> float:
    """The smallest power of two that changes a weight of this format when it is added."""
    before, step = torch.tensor(weight, dtype=dtype), 1.0
    while before + torch.tensor(step / 2, dtype=dtype) != before:
        step /= 2
    return step


def _some_weight(dtype: torch.dtype) -> Callable[[random.Random], Call]:
    """Weights that both formats hold exactly, between 0.004 and 0.5; in bf16 every other one has an odd last bit."""

    def draw(rng: random.Random) -> Call:
        return call(rng.randrange(128, 256) / 2.0 ** rng.randrange(9, 16), dtype)

    return draw


ONE_HALF, ODD_IN_BF16, ODD_IN_FP32 = 0.5, 173 / 2.0**10, (2.0**23 + 4321) / 2.0**25  # odd: the last bit is a 1


def _gap(weight, dtype):
    return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(weight))


def _by_subtracting(weight, dtype):
    before = torch.tensor(weight, dtype=dtype)
    return _halved(lambda step: before - torch.tensor(step, dtype=dtype) != before)


def _update_in_float32(weight, dtype):
    return smallest_update(weight, torch.float32 if dtype == torch.bfloat16 else torch.bfloat16)


def _halved(noticed: Callable[[float], bool]) -> float:
    step = 1.0
    while noticed(step / 2):
        step /= 2
    return step


check_smallest_update = Exercise(
    smallest_update,
    parts=(
        Part(
            "bf16",
            2,
            _some_weight(torch.bfloat16),
            always=tuple(call(weight, torch.bfloat16) for weight in (ONE_HALF, ODD_IN_BF16)),
        ),
        Part(
            "fp32",
            1,
            _some_weight(torch.float32),
            always=tuple(call(weight, torch.float32) for weight in (ONE_HALF, ODD_IN_FP32)),
        ),
    ),
    mistakes={
        "the sum is made by Python, in 64 bits": Mistake(
            "Make both of them tensors of this `dtype` before you add.",
            lambda weight, dtype: _halved(lambda step: weight + step != weight),
        ),
        "it is one halving too far": Mistake(
            "The last step that *was* noticed, not the first that was not.",
            lambda weight, dtype: smallest_update(weight, dtype) / 2,
        ),
        "it stops one halving early": Mistake(
            "Halve as long as the next smaller step is still noticed.",
            lambda weight, dtype: 2 * smallest_update(weight, dtype),
        ),
        "that is the gap after 1": Mistake(
            "`eps` belongs to a weight of 1. The gaps are smaller near 0.", lambda weight, dtype: torch.finfo(dtype).eps
        ),
        "the step is taken away, not added": Mistake(
            "Below 0.5 the numbers lie closer together than above it. Add.", _by_subtracting
        ),
        "it is computed from the gap between neighboring numbers": Mistake(
            "A sum in the middle between two numbers is "
            "rounded to the even one, so that every second weight notices half a gap. Add and look.",
            _gap,
            also=(lambda weight, dtype: weight * torch.finfo(dtype).eps, lambda weight, dtype: _gap(weight, dtype) / 2),
        ),
        "the format is not the one asked for": Mistake(
            "`dtype` says in which format weight and step are added.", _update_in_float32
        ),
    },
    tolerance=0.0,
)


# ---- int8_product ----


def to_int8(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers from -127 to 127, and the scale that turns them back."""
    scale = matrix.abs().max() / 127
    return (matrix / scale).round().to(torch.int8), scale


def int8_product(left: Tensor, right: Tensor) -> Tensor:
    """The product of two matrices by way of int8, one scale a matrix."""
    (q_left, left_scale), (q_right, right_scale) = to_int8(left), to_int8(right)
    return (q_left.int() @ q_right.int()) * (left_scale * right_scale)


def _two_matrices(rng: random.Random) -> Call:
    """Random matrices; the largest entry of each, by size, is negative."""
    rows, inner, columns = rng.choice([2, 3]), rng.choice([3, 4]), 2
    made = []
    for shape in ((rows, inner), (inner, columns)):
        values = [round(rng.uniform(-0.9, 0.9), 4) for _ in range(math.prod(shape))]
        values[rng.randrange(len(values))] = -round(rng.uniform(1.2, 1.8), 4)
        made.append(torch.tensor(values).view(shape))
    return call(*made)


def _made_with(quantize: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Callable:
    """The right product of wrong whole numbers."""

    def wrong(left, right):
        (q_left, left_scale), (q_right, right_scale) = quantize(left), quantize(right)
        return (q_left.double() @ q_right.double() * (left_scale * right_scale)).float()

    return wrong


def _with_scale(scale_of: Callable[[Tensor], Tensor]) -> Callable:
    return _made_with(lambda matrix: ((matrix / scale_of(matrix)).round(), scale_of(matrix)))


def _one_scale_for_both(left, right):
    scale = torch.maximum(left.abs().max(), right.abs().max()) / 127
    return (left / scale).round() @ (right / scale).round() * scale * scale


def _scale_a_row(left, right):
    left_scale, right_scale = left.abs().amax(1, keepdim=True) / 127, right.abs().amax(0, keepdim=True) / 127
    return (left / left_scale).round() @ (right / right_scale).round() * left_scale * right_scale


def _signed_scale(hold: Callable[[Tensor], Tensor]) -> Callable:
    """The scale of the largest number with its sign. hold: what becomes of those that are below -127."""
    return _made_with(lambda matrix: (hold((matrix / (matrix.max() / 127)).round()), matrix.max() / 127))


def _wrapped(left, right):
    (q_left, left_scale), (q_right, right_scale) = to_int8(left), to_int8(right)
    return (q_left.int() @ q_right.int()).to(torch.int8) * (left_scale * right_scale)


check_int8_product = Exercise(
    int8_product,
    parts=(Part("small matrices of both signs", 4, _two_matrices),),
    mistakes={
        "digits are cut off, not rounded": Mistake(
            "`.to(torch.int8)` cuts towards 0. Round before.",
            _made_with(lambda matrix: ((matrix / to_int8(matrix)[1]).trunc(), to_int8(matrix)[1])),
        ),
        "the product overflows": Mistake(
            "A sum of products of int8 does not fit into int8: multiply as `.int()`.", _wrapped
        ),
        "only one scale is put back": Mistake(
            "Each matrix was divided by its own scale.",
            lambda left, right: int8_product(left, right) / to_int8(right)[1],
            also=(lambda left, right: int8_product(left, right) / to_int8(left)[1],),
        ),
        "both matrices have the same scale": Mistake(
            "For each matrix by itself: how large is *its* largest number?", _one_scale_for_both
        ),
        "each row or column has a scale of its own": Mistake("One scale a matrix is asked for here.", _scale_a_row),
        "no scale is put back": Mistake(
            "What turns whole numbers into the numbers that they stand for?",
            lambda left, right: to_int8(left)[0].float() @ to_int8(right)[0].float(),
        ),
        "the largest number is taken with its sign": Mistake(
            "The largest by *size*: −1.5 is larger than 0.9.",
            _signed_scale(lambda whole: whole),
            also=(
                _signed_scale(lambda whole: whole.to(torch.int8)),
                _signed_scale(lambda whole: whole.clamp(-127, 127)),
            ),
        ),
        "the largest number becomes 255": Mistake(
            "int8 has a sign: the largest whole number here is 127.",
            _with_scale(lambda matrix: matrix.abs().max() / 255),
        ),
        "nothing was rounded": Mistake(
            "That is the exact product. The point is to multiply whole numbers.", lambda left, right: left @ right
        ),
    },
)


# ---- lazy_attribute ----


def lazy_attribute(name: str, where: dict[str, str]) -> Any:
    """What a module's `__getattr__` does: import the one module that holds the name, and fetch it."""
    if name not in where:
        raise AttributeError(f"there is no {name!r}; choose one of {', '.join(where)}")
    return getattr(importlib.import_module(where[name]), name)


PLACES = {"pi": "math", "digits": "string", "MAX_PREC": "decimal", "ZIP_DEFLATED": "zipfile"}


def _some_places(rng: random.Random) -> dict[str, str]:
    places = [*rng.sample(sorted(PLACES.items()), 3), ("LARGEST", "a_library_that_is_not_installed")]
    return dict(rng.sample(places, 4))


def _known_name(rng: random.Random) -> Call:
    where = _some_places(rng)
    return call(rng.choice([name for name in where if name != "LARGEST"]), where)


def _all_imported(name, where):
    modules = {known: importlib.import_module(module) for known, module in where.items()}
    return getattr(modules[name], name)


check_lazy_attribute = Exercise(
    lazy_attribute,
    parts=(
        Part("a known name, beside a library that is not installed", 2, _known_name),
        Part(
            "a name that nobody knows",
            1,
            lambda rng: call(rng.choice(["Pi", "digit", "MAX_PRECISION"]), _some_places(rng)),
        ),
    ),
    mistakes={
        "an unknown name is a KeyError": Mistake(
            "Python expects `AttributeError` of a module without that name: `hasattr` would break otherwise.",
            lambda name, where: PLACES[name] and lazy_attribute(name, where),
        ),
        "everything is imported": Mistake(
            "Only the module of the name that was asked for is needed. Here another one cannot even be imported.",
            _all_imported,
        ),
        "it is the module, not what it holds": Mistake(
            "`getattr(module, name)` fetches a name from a module.",
            lambda name, where: importlib.import_module(where[name]),
        ),
        "it is the module's name": Mistake(
            "`importlib.import_module(name_of_the_module)` imports it.", lambda name, where: where[name]
        ),
        "an unknown name gives None": Mistake(
            "A typing error would go unnoticed. Raise `AttributeError`.",
            lambda name, where: lazy_attribute(name, where) if name in where else None,
        ),
    },
)


# ---- compare_trainings ----


def compare_trainings(
    load: Callable[[], nn.Module], evaluate: Callable[[nn.Module], float], trainings: list[Callable[[nn.Module], None]]
) -> tuple[float, list[float]]:
    """(before any training, after each of them), each training from the untrained model, which is loaded once."""
    kept = load()
    after = []
    for train in trainings:
        model = copy.deepcopy(kept)
        train(model)
        after.append(evaluate(model))
    return evaluate(kept), after


def _some_trainings(rng: random.Random) -> Call:
    weights = [rng.randrange(1, 9) / 4 for _ in range(3)]
    steps = rng.sample([0.25, 0.5, 1.0, 1.5, -0.5], rng.choice([2, 3]))
    return call(Loading(weights), sum_of_weights, [Shift(step) for step in steps])


def _one_after_another(model, evaluate, trainings):
    after = []
    for train in trainings:
        train(model)
        after.append(evaluate(model))
    return after


def _goes_on(load, evaluate, trainings):
    model = load()
    return evaluate(model), _one_after_another(model, evaluate, trainings)


def _before_at_the_end(load, evaluate, trainings):
    model = load()
    after = _one_after_another(model, evaluate, trainings)
    return evaluate(model), after


def _loads_each_time(load, evaluate, trainings):
    return evaluate(load()), [_one_after_another(load(), evaluate, [train])[0] for train in trainings]


def _asks_the_untrained(load, evaluate, trainings):
    kept = load()
    for train in trainings:
        train(copy.deepcopy(kept))
    return evaluate(kept), [evaluate(kept) for _ in trainings]


def _gains(load, evaluate, trainings):
    before, after = compare_trainings(load, evaluate, trainings)
    return before, [one - before for one in after]


check_compare_trainings = Exercise(
    compare_trainings,
    parts=(Part("two trainings and three", 4, _some_trainings),),
    mistakes={
        "a training goes on where the last one ended": Mistake(
            "Each is to start from the untrained model. `copy.copy` shares the weights, `copy.deepcopy` does not.",
            _goes_on,
        ),
        '"before" is measured after': Mistake(
            "The kept model was trained. Give the trainings copies, or measure first.", _before_at_the_end
        ),
        "the model is loaded for each training": Mistake(
            "Loading is what takes long. Keep what was loaded.", _loads_each_time
        ),
        "the untrained model is evaluated every time": Mistake(
            "Evaluate the copy that was trained.", _asks_the_untrained
        ),
        "these are gains": Mistake("Return what `evaluate` says after each training.", _gains),
    },
)


# ---- memory_parts ----


def memory_parts(
    parameters: int, trained: int, completions: int, tokens: int, vocabulary: int, with_reference: bool
) -> dict[str, int]:
    """Bytes of what fp32 training with AdamW holds, as the package counts them, and of all logits at once."""
    shape = ModelShape(4 * parameters, 4 * trained, *[0] * 13)  # type: ignore[arg-type]  # the other fields say nothing of what is held
    held = held_bytes(shape, GRPOConfig(beta=0.04 if with_reference else 0.0))
    return {**held, "logits": 4 * completions * tokens * vocabulary}


def _some_model(with_reference: bool, frozen: bool) -> Callable[[random.Random], Call]:
    def draw(rng: random.Random) -> Call:
        parameters = rng.randrange(2, 99) * 100_000
        trained = parameters - rng.randrange(1, 9) * 10_000 if frozen else parameters
        batch = rng.choice([16, 64, 128]), rng.choice([32, 48, 96]), rng.choice([1024, 32_000])
        return call(parameters, trained, *batch, with_reference)

    return draw


def _with_part(name: str, size: Callable[..., int]) -> Callable:
    """The right answer with one part wrong."""

    def wrong(*args):
        return {**memory_parts(*args), name: size(*args)}

    return wrong


check_memory_parts = Exercise(
    memory_parts,
    parts=(
        Part("all weights learn, no reference", 2, _some_model(False, False)),
        Part("some weights are frozen, with a reference", 2, _some_model(True, True)),
    ),
    mistakes={
        "AdamW keeps one number a weight": Mistake(
            "The mean of the gradients, and that of their squares.",
            _with_part("optimizer", lambda parameters, trained, *rest: 4 * trained),
        ),
        "AdamW keeps numbers for frozen weights": Mistake(
            "A weight without a gradient needs no mean of gradients.",
            _with_part("optimizer", lambda parameters, *rest: 8 * parameters),
        ),
        "frozen weights have gradients": Mistake(
            "Only what learns has a gradient.", _with_part("gradients", lambda parameters, *rest: 4 * parameters)
        ),
        "frozen weights are counted as if they learned": Mistake(
            "Gradients and optimizer are there for the `trained` ones only.",
            lambda parameters, trained, *rest: memory_parts(parameters, parameters, *rest),
        ),
        "the reference holds only what learns": Mistake(
            "It is a frozen copy of the whole model.",
            _with_part("reference", lambda parameters, trained, *rest: 4 * trained * rest[-1]),
        ),
        "the reference is always there": Mistake(
            "Without a KL term there is no second model: 0 bytes.",
            _with_part("reference", lambda parameters, *rest: 4 * parameters),
        ),
        "the logits are those of one completion": Mistake(
            "B × C × V: all completions of the batch at once.",
            _with_part("logits", lambda p, t, completions, tokens, vocabulary, r: 4 * tokens * vocabulary),
        ),
        "these are numbers, not bytes": Mistake(
            "How many bytes has a number in fp32?",
            lambda *args: {name: size // 4 for name, size in memory_parts(*args).items()},
        ),
    },
)


# ---- fewest_passes ----


def fewest_passes(held: int, per_prompt: int, prompts: int, available: int) -> int | None:
    """The fewest passes, a divisor of `prompts`, in which a step fits; None where not even one prompt does."""
    for passes in range(1, prompts + 1):
        if prompts % passes == 0 and held + per_prompt * (prompts // passes) <= available:
            return passes
    return None


def _room_for(pairs: list[tuple[int, int]], exact: bool = False) -> Callable[[random.Random], Call]:
    """pairs: (prompts, how many of them fit into one pass)."""

    def draw(rng: random.Random) -> Call:
        prompts, fitting = rng.choice(pairs)
        per_prompt = rng.randrange(20, 200)
        held = rng.randrange(3, 9) * per_prompt + rng.randrange(per_prompt)
        left_over = 0 if exact else rng.randrange(1, per_prompt)
        return call(held, per_prompt, prompts, held + fitting * per_prompt + left_over)

    return draw


def _held_is_divided(held, per_prompt, prompts, available):
    passes = range(1, prompts + 1)
    return next((k for k in passes if prompts % k == 0 and (held + per_prompt * prompts) / k <= available), None)


def _passes_rounded_up(held, per_prompt, prompts, available):
    room = (available - held) // per_prompt
    return -(-prompts // min(room, prompts)) if room >= 1 else None


check_fewest_passes = Exercise(
    fewest_passes,
    parts=(
        Part(
            "batches that just fit",
            1,
            _room_for([(8, 4), (16, 4), (12, 4), (16, 2)], exact=True),
            draws=8,
            always=(call(510, 100, 8, 610), call(730, 60, 12, 800)),
        ),
        Part("passes that must divide the prompts", 1, _room_for([(16, 6), (16, 7), (8, 3), (24, 5)]), draws=8),
        Part("nothing fits", 1, _room_for([(8, 0), (16, 0)])),
    ),
    mistakes={
        "what fits exactly is refused": Mistake(
            "As much as is available may be used: at most, not less than.",
            lambda held, each, prompts, available: fewest_passes(held, each, prompts, available - 1),
        ),
        "the passes do not divide the prompts": Mistake(
            "Every pass has N / k prompts: k must divide N, with nothing left over.",
            _passes_rounded_up,
            also=(
                lambda held, per_prompt, prompts, available: next(
                    (k for k in range(1, prompts + 1) if held + per_prompt * prompts / k <= available), None
                ),
            ),
        ),
        "as many passes as prompts are not tried": Mistake(
            "One prompt a pass is k = N. Does your loop come that far?",
            lambda *given: None if fewest_passes(*given) == given[2] else fewest_passes(*given),
        ),
        "what is held is divided as well": Mistake(
            "Only the prompts are shared out. Weights, gradients and optimizer are there whole in each of them.",
            _held_is_divided,
        ),
        "what is held is forgotten": Mistake(
            "Weights, gradients and optimizer are there as well, in every pass.",
            lambda held, *rest: fewest_passes(0, *rest),
        ),
        "it is one prompt at a time": Mistake(
            "That fits whenever anything does. How few passes are enough?", lambda *given: given[2]
        ),
        "it is the number of prompts in a pass": Mistake(
            "How many passes does that make?",
            lambda *given: given[2] // fewest_passes(*given) if fewest_passes(*given) else None,
        ),
    },
)
