"""Exercises on the computer itself: timing, threads, number formats, start-up time and memory."""

from __future__ import annotations

import copy
import importlib
import math
import random
import statistics  # noqa: F401  a mistake needs it, and perf_counter
from collections.abc import Callable
from time import perf_counter  # noqa: F401
from typing import Any

import torch
from torch import Tensor, nn

from grpo_edu.checks.core import Call, Exercise, Part, call
from grpo_edu.checks.inputs import Computer, Loading, Shift, sum_of_weights


# ---- best_seconds ----
def best_seconds(task: Callable[[], None], clock: Callable[[], float], repeats: int, loops: int) -> float:
    """Return the time of one run in the shortest of `repeats` measurements of `loops` runs, after a warm-up run."""
    task()  # warms up
    times = []
    for _ in range(repeats):
        start = clock()
        for _ in range(loops):
            task()
        times.append((clock() - start) / loops)
    return min(times)


def _some_runs(rng: random.Random) -> Call:
    """Draw runs: the first is slow, the shortest lies in a long measurement, the shortest measurement is the last."""
    repeats, loops = rng.randrange(3, 7), rng.randrange(2, 5)
    runs = [rng.randrange(600, 900)]
    for shortest in [*[400] * (repeats - 2), 200, 100]:
        runs += [rng.randrange(shortest, shortest + 50) for _ in range(loops)]
    runs[1:1] = [50, *[900] * (loops - 1)]
    return _timed(Computer([one / 1000 for one in runs], now=float(rng.randrange(1, 9))), repeats, loops)


def _timed(computer: Computer, repeats: int, loops: int) -> Call:
    says = f"run times: {', '.join(map(str, computer.seconds))}; repeats={repeats}, loops={loops}"
    return Call((computer.task, computer.clock, repeats, loops), says=says)


def _fast_first_run(rng: random.Random) -> Call:
    """By chance the first run is the shortest of all."""
    made = _some_runs(rng)
    computer = made.args[0].__self__
    computer.seconds[0] = rng.randrange(10, 40) / 1000
    return _timed(computer, *made.args[2:])


check_best_seconds = Exercise(
    best_seconds,
    parts=(
        Part(
            "a slow first run, then runs of different length",
            2,
            _some_runs,
            always=(
                _timed(Computer([0.2, 0.3, 0.1, 0.5, 0.5, 0.4, 0.6]), 3, 2),
            ),  # the first measurement is the shortest
        ),
        Part("a first run that is the fastest by chance", 1, _fast_first_run),
    ),
    changes="""
        the first run is measured as well: task()  # warms up -> repeats += 1
            Let the task run once to warm up, without measuring it, then measure it `repeats` times.
            or: task()  # warms up -> pass
        the time is read from another clock: best_seconds(task, perf_counter, repeats, loops)
            Use the `clock` that is passed in, not the computer's own.
        the time of a whole measurement is returned: / loops -> / 1
            How long did *one* run take?
        the clock is read for every run: best_seconds(task, clock, repeats * loops, 1)
            Read the clock only before the first and after the last run of a measurement.
        repeats and loops are swapped: best_seconds(task, clock, loops, repeats)
            Which of them counts the measurements?
        there is a warm-up run before every measurement: start = clock() -> start = (task(), clock())[1]
            One warm-up is enough, before the first measurement.
            or: task()  # warms up -> pass; start = clock() -> start = (task(), clock())[1]
        the warm-up counts as a measurement:
            task()  # warms up -> pass; times = [] -> times = [-clock() + (task(), clock())[1]]
            The first run may be slow, or fast by chance: its time is not one of the `repeats` measurements.
        the time of all measurements together is returned: min(times) -> sum(times)
            Measure `repeats` times, and choose one of these times.
        the mean of the measurements is returned: min(times) -> statistics.mean(times)
            Other work of the computer can only add time. Which measurement was disturbed least?
        the median of the measurements is returned: min(times) -> statistics.median(times)
            Other work of the computer can only add time. Which measurement was disturbed least?
        the longest measurement is returned: min(times) -> max(times)
            Other work of the computer can only add time.
        one measurement too many is made: best_seconds(task, clock, repeats + 1, loops)
            How many measurements does `repeats` ask for?
        the difference has the wrong sign: clock() - start -> start - clock()
            Subtract the earlier time from the later one: a duration is positive.
    """,
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


check_mend_script = Exercise(
    mend_script,
    parts=(
        Part("settings below `import torch`", 2, _some_script),
        Part("a script that is right already", 1, _sound_script),
    ),
    changes="""
        the settings come before `import os`: sorted(lines, key=lambda line: not line.startswith(SETTING))
            `os` has to be imported before the first line that uses it.
        `import os` appears twice: line not in settings and line != "import os" -> line not in settings
            Move the line: remove it from its old position.
        every line that mentions `os.environ[` is moved: line.startswith(SETTING) -> SETTING in line
            A comment, or a line that prints a variable, does not set one. Look at how a line *begins*.
        only the first setting is moved: line.startswith(SETTING)] -> line.startswith(SETTING)][:1]
            A script may set several variables.
        the settings come in reverse order: *settings -> *reversed(settings)
            Inserting each line at the top reverses their order.
        `import torch` is moved to the end: sorted(lines, key=lambda line: line == "import torch")
            It would come after the lines that need it. Move the settings instead.
        the lines are sorted alphabetically: sorted(lines)
            All lines except the settings keep their order.
    """,
)


# ---- choose_threads ----
COUNTS = [1, 2, 4, 8]


def choose_threads(counts: list[int], seconds: list[float], usable_cores: float) -> int:
    """Return the smallest number of threads, not above the usable cores, that is within 5% of the fastest of these."""
    allowed = [(time, count) for count, time in zip(counts, seconds, strict=True) if count <= usable_cores]
    shortest, _ = min(allowed)
    near = [count for time, count in allowed if time <= 1.05 * shortest]
    return min(near)


def _rising(rng: random.Random) -> Call:
    one, serial = rng.randrange(100, 900), rng.choice([0.0, 0.05, 0.2])
    usable = rng.choice([2, 2.5, 4, 6])
    times = [one * (serial + (1 - serial) / min(count, usable)) * (1.6 if count > usable else 1) for count in COUNTS]
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
    changes="""
        there are more threads than cores: choose_threads(counts, seconds, math.inf)
            A container may have fewer cores than the computer shows: leave out the counts above `usable_cores`.
        a part of a core counts as a whole one: choose_threads(counts, seconds, math.ceil(usable_cores))
            With 2.5 usable cores, a third thread is one too many: take `usable_cores` as it is, without rounding it.
            or: choose_threads(counts, seconds, round(usable_cores))
        the shortest time of all counts is used:
            1.05 * shortest -> 1.05 * min(seconds); min(near) -> min(near or counts)
            First leave out the counts that are not allowed, then look for the shortest time among the others.
            or: 1.05 * shortest -> 1.05 * min(seconds); min(near) -> min(near, default=None)
            or: 1.05 * shortest -> 1.05 * min(seconds)
        each count is compared only with the counts before it: _step_by_step(counts, seconds, usable_cores)
            Compare with the shortest time of all that are allowed, which may come later in the list.
        the fastest is chosen, however small its gain: min(near) -> min(allowed)[1]
            Within 5% of the fastest time, prefer fewer threads: the other cores are then free for something else.
        the largest allowed number of threads is returned: min(near) -> max(count for _, count in allowed)
            Look at the times: more threads do not always help.
        the slowest number of threads is returned: min(near) -> max(allowed)[1]
            These are seconds, so smaller is better.
        a position in the list is returned: counts.index(choose_threads(counts, seconds, usable_cores))
            Return the number of threads at that position.
    """,
)


# ---- smallest_update ----
def smallest_update(weight: float, dtype: torch.dtype) -> float:
    """Return the smallest power of two that changes a weight of this format when it is added."""
    before, step = torch.tensor(weight, dtype=dtype), 1.0
    while before + torch.tensor(step / 2, dtype=dtype) != before:
        step /= 2
    return step


def _some_weight(rng: random.Random, dtype: torch.dtype) -> Call:
    """Weights that both formats hold exactly, between 0.004 and 0.5; in bf16 every other one has an odd last bit."""
    return call(rng.randrange(128, 256) / 2.0 ** rng.randrange(9, 16), dtype)


ODD_IN_BF16, ODD_IN_FP32 = 173 / 2.0**10, (2.0**23 + 4321) / 2.0**25  # the last bit is a 1
IN_BF16 = (call(0.5, torch.bfloat16), call(ODD_IN_BF16, torch.bfloat16))
IN_FP32 = (call(0.5, torch.float32), call(ODD_IN_FP32, torch.float32))

check_smallest_update = Exercise(
    smallest_update,
    parts=(
        Part("bf16", 2, lambda rng: _some_weight(rng, torch.bfloat16), always=IN_BF16),
        Part("fp32", 1, lambda rng: _some_weight(rng, torch.float32), always=IN_FP32),
    ),
    tolerance=0.0,
    changes="""
        the sum is computed by Python, in 64 bits:
            torch.tensor(weight, dtype=dtype) -> weight; torch.tensor(step / 2, dtype=dtype) -> step / 2
            Make both of them tensors of this `dtype` before you add.
        the step is halved once too often: smallest_update(weight, dtype) / 2
            Return the last step that *did* change the weight, not the first that did not.
        the halving stops one step too early: 2 * smallest_update(weight, dtype)
            Go on as long as half of the step still changes the weight.
        the gap after 1 is returned: torch.finfo(dtype).eps
            `eps` belongs to a weight of 1. The gaps are smaller near 0.
        the step is subtracted, not added: before + torch.tensor -> before - torch.tensor
            Below 0.5 the numbers lie closer together than above it. Add.
        the step is computed from the gap between neighboring numbers:
            torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(weight))
            A sum halfway between two numbers is rounded to the even one, so for every second weight half a gap is
            enough. Add the step and compare.
            or: torch.finfo(dtype).eps * weight
            or: torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(weight)) / 2
        another number format is used:
            smallest_update(weight, torch.float32 if dtype == torch.bfloat16 else torch.bfloat16)
            `dtype` is the format in which weight and step are added.
    """,
)


# ---- int8_product ----
def int8_product(left: Tensor, right: Tensor) -> Tensor:
    """Return the product of two matrices by way of whole numbers from -127 to 127, one scale per matrix."""
    whole, scales = [], []
    for matrix in (left, right):
        scales.append(matrix.abs().max() / 127)
        whole.append((matrix / scales[-1]).round())
    return (whole[0] @ whole[1]) * scales[0] * scales[1]


def _two_matrices(rng: random.Random) -> Call:
    """Random matrices; the largest entry of each, by size, is negative."""
    rows, inner, columns = rng.choice([2, 3]), rng.choice([3, 4]), 2
    made = []
    for shape in ((rows, inner), (inner, columns)):
        values = [round(rng.uniform(-0.9, 0.9), 4) for _ in range(math.prod(shape))]
        values[rng.randrange(len(values))] = -round(rng.uniform(1.2, 1.8), 4)
        made.append(torch.tensor(values).view(shape))
    return call(*made)


check_int8_product = Exercise(
    int8_product,
    parts=(Part("small matrices of both signs", 4, _two_matrices, always=(call(torch.ones(1, 4), torch.ones(4, 1)),)),),
    changes="""
        numbers are truncated, not rounded: round() -> trunc()
            `.to(torch.int8)` truncates towards 0. Round first.
        the product overflows: (whole[0] @ whole[1]) -> (whole[0] @ whole[1]).int().to(torch.int8)
            A sum of products of int8 numbers does not fit into int8: multiply as `.int()`.
            or: (whole[0] @ whole[1]) -> (whole[0] @ whole[1]).int().to(torch.int16)
        the result is multiplied by only one of the two scales: * scales[0] * scales[1] -> * scales[0]
            Each matrix was divided by its own scale.
            or: * scales[0] * scales[1] -> * scales[1]
        both matrices have the same scale: matrix.abs().max() -> max(left.abs().max(), right.abs().max())
            Each matrix has its own scale: how large is *its* largest number?
        each row or column has its own scale: abs().max() -> abs().amax(1 if matrix is left else 0, keepdim=True)
            Use one scale per matrix here.
        the result is not multiplied by the scales: (whole[0] @ whole[1]) * scales[0] * scales[1] -> whole[0] @ whole[1]
            What turns the integers into the numbers that they stand for?
        the largest number is taken with its sign: matrix.abs().max() -> matrix.max()
            Take the number that is farthest from 0: −1.5 is farther than 0.9.
            or: matrix.abs().max() -> matrix.max(); round() -> round().to(torch.int8).float()
            or: matrix.abs().max() -> matrix.max(); round() -> round().clamp(-127, 127)
        the largest number becomes 255: / 127 -> / 255
            int8 has a sign: the largest whole number here is 127.
        nothing is rounded: left @ right
            That is the exact product. The exercise is to multiply integers.
    """,
)


# ---- lazy_attribute ----
def lazy_attribute(name: str, where: dict[str, str]) -> Any:
    """Do what a module's `__getattr__` does: import the one module that holds the name, and fetch it."""
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


def _unknown_name(rng: random.Random) -> Call:
    return call(rng.choice(["Pi", "digit", "MAX_PRECISION"]), _some_places(rng))


check_lazy_attribute = Exercise(
    lazy_attribute,
    parts=(
        Part("a known name, next to a library that is not installed", 2, _known_name),
        Part("an unknown name", 1, _unknown_name),
    ),
    changes="""
        an unknown name raises a KeyError: if name not in where -> if False
            Python expects an `AttributeError` if a module does not have the name; otherwise `hasattr` breaks.
        all modules are imported:
            getattr({one: importlib.import_module(module) for one, module in where.items()}[name], name)
            Import only the module that holds the requested name. Here, another module cannot be imported at all.
        the module is returned, not the object in it: importlib.import_module(where[name])
            `getattr(module, name)` fetches a name from a module.
        the module's name is returned: where[name]
            `importlib.import_module(name_of_the_module)` imports it.
        an unknown name returns None: lazy_attribute(name, where) if name in where else None
            A misspelled name would go unnoticed. Raise `AttributeError`.
    """,
)


# ---- compare_trainings ----
def compare_trainings(
    load: Callable[[], nn.Module], evaluate: Callable[[nn.Module], float], trainings: list[Callable[[nn.Module], None]]
) -> tuple[float, list[float]]:
    """(before any training, after each of them), each training from the untrained model, which is loaded once."""
    kept = load()
    before, after = evaluate(kept), []
    for train in trainings:
        model = copy.deepcopy(kept)
        train(model)
        after.append(evaluate(model))
    return before, after


def _some_trainings(rng: random.Random) -> Call:
    weights = [rng.randrange(1, 9) / 4 for _ in range(3)]
    steps = rng.sample([0.25, 0.5, 1.0, 1.5, -0.5], rng.choice([2, 3]))
    return call(Loading(weights), sum_of_weights, [Shift(step) for step in steps])


check_compare_trainings = Exercise(
    compare_trainings,
    parts=(Part("two training runs and three", 4, _some_trainings),),
    changes="""
        a training run continues where the last one ended: copy.deepcopy(kept) -> kept
            Each run has to start from the untrained model. `copy.copy` shares the weights, `copy.deepcopy` does not.
        "before" is measured after training: copy.deepcopy(kept) -> kept; return before -> return evaluate(kept)
            The model that was loaded has been trained by then. Train copies, or evaluate it first.
        the model is loaded again for each run: copy.deepcopy(kept) -> load()
            Loading takes most of the time. Keep the loaded model.
        the untrained model is evaluated every time: evaluate(model) -> evaluate(kept)
            Evaluate the copy that was trained, not the model that was loaded.
        gains are returned: evaluate(model) -> evaluate(model) - before
            Return what `evaluate` returns after each training run.
    """,
)


# ---- memory_parts ----
def memory_parts(
    parameters: int, trained: int, completions: int, tokens: int, vocabulary: int, with_reference: bool
) -> dict[str, int]:
    """Return the bytes of what fp32 training with AdamW holds, and of all logits at once."""
    size = 4  # bytes of a number
    return {
        "weights": size * parameters,
        "gradients": size * trained,
        "optimizer": size * 2 * trained,
        "reference": size * parameters * with_reference,
        "logits": size * completions * tokens * vocabulary,
    }


def _some_model(rng: random.Random, frozen: bool, with_reference: bool) -> Call:
    parameters = rng.randrange(2, 99) * 100_000
    trained = parameters - rng.randrange(1, 9) * 10_000 if frozen else parameters
    batch = rng.choice([16, 64, 128]), rng.choice([32, 48, 96]), rng.choice([1024, 32_000])
    return call(parameters, trained, *batch, with_reference)


check_memory_parts = Exercise(
    memory_parts,
    parts=(
        Part("all weights are trained, no reference", 2, lambda rng: _some_model(rng, False, False)),
        Part("some weights are frozen, with a reference", 2, lambda rng: _some_model(rng, True, True)),
    ),
    changes="""
        only one number per weight is counted for AdamW: size * 2 * trained -> size * trained
            AdamW keeps the mean of the gradients and the mean of their squares.
        the moments of AdamW are counted for frozen weights: size * 2 * trained -> size * 2 * parameters
            AdamW keeps moments only for weights that have a gradient.
        gradients are counted for frozen weights: "gradients": size * trained -> "gradients": size * parameters
            Only trained weights have a gradient.
        frozen weights are counted as trained: size = 4 -> size, trained = 4, parameters
            Gradients and optimizer states exist for the `trained` weights only.
        the reference contains only the trained weights:
            size * parameters * with_reference -> size * trained * with_reference
            It is a frozen copy of the whole model.
        the reference is always counted: size * parameters * with_reference -> size * parameters
            Without a KL term there is no second model: 0 bytes.
        the logits are those of one completion: size * completions * tokens -> size * tokens
            B × C × V: all completions of the batch at once.
        numbers are counted, not bytes: size = 4 -> size = 1
            How many bytes does a number in fp32 have?
    """,
)


# ---- fewest_passes ----
def fewest_passes(held: int, per_prompt: int, prompts: int, available: int) -> int | None:
    """Return the fewest passes, a divisor of `prompts`, in which a step fits; None where not even one prompt does."""
    for passes in range(1, prompts + 1):
        needed = held + per_prompt * prompts / passes
        if prompts % passes == 0 and needed <= available:
            return passes
    return None


def _room_for(rng: random.Random, pairs: list[tuple[int, int]], exact: bool = False) -> Call:
    """pairs: (prompts, how many of them fit into one pass)."""
    prompts, fitting = rng.choice(pairs)
    per_prompt = rng.randrange(20, 200)
    held = rng.randrange(3, 9) * per_prompt + rng.randrange(per_prompt)
    left_over = 0 if exact else rng.randrange(1, per_prompt)
    return call(held, per_prompt, prompts, held + fitting * per_prompt + left_over)


def _just_fits(rng: random.Random) -> Call:
    return _room_for(rng, [(8, 4), (16, 4), (12, 4), (16, 2)], exact=True)


check_fewest_passes = Exercise(
    fewest_passes,
    parts=(
        Part("batches that just fit", 1, _just_fits, draws=8, always=(call(510, 100, 8, 610), call(730, 60, 12, 800))),
        Part(
            "passes that must divide the prompts",
            1,
            lambda rng: _room_for(rng, [(16, 6), (16, 7), (8, 3), (24, 5)]),
            draws=8,
        ),
        Part("nothing fits", 1, lambda rng: _room_for(rng, [(8, 0), (16, 0)])),
    ),
    changes="""
        a batch that fits exactly is refused: needed <= available -> needed < available
            All of the available memory may be used: compare with <=, not with <.
        the prompts cannot be divided equally among the passes:
            prompts / passes -> math.ceil(prompts / passes); prompts % passes == 0 and needed -> needed
            Every pass has N / k prompts, so k must divide N with nothing left over.
            or: prompts % passes == 0 and needed -> needed
        one prompt per pass is never tried: range(1, prompts + 1) -> range(1, prompts)
            k = N means one prompt per pass. Does your loop reach it?
        what is always in memory is divided as well:
            held + per_prompt * prompts / passes -> (held + per_prompt * prompts) / passes
            Only the prompts are divided among the passes. Each pass needs all weights, gradients and optimizer states.
        what is always in memory is left out: held + per_prompt -> per_prompt
            Weights, gradients and optimizer states are in memory as well, in every pass.
        one prompt per pass is always used: prompts
            If anything fits, then this does. What is the smallest number of passes?
        the number of prompts in a pass is returned: return passes -> return prompts // passes
            How many passes does that make?
    """,
)
