"""Right answers to the exercises of `grpo_edu.checks.cpu_setup`, written in other ways than the reference."""

from __future__ import annotations

import copy
import importlib
import math

import torch

from grpo_edu.config import GRPOConfig
from grpo_edu.fast.memory_estimate import ModelShape, held_bytes


def seconds_by_list(task, clock, repeats, loops):
    def measured(runs):
        start = clock()
        for _ in range(runs):
            task()
        return clock() - start

    measured(1)
    return min([measured(loops) for _ in range(repeats)]) / loops


def seconds_by_running_min(task, clock, repeats, loops):
    task()
    best = math.inf
    while repeats:
        start, left = clock(), loops
        while left:
            task()
            left -= 1
        best, repeats = min(best, (clock() - start) / loops), repeats - 1
    return best


def seconds_by_marks(task, clock, repeats, loops):
    marks = []
    for run in range(1 + repeats * loops):
        task()
        if run % loops == 0:
            marks.append(clock())
    return sorted(late - early for early, late in zip(marks, marks[1:], strict=False))[0] / loops


def script_by_sort(lines):
    def rank(line):
        return 0 if line == "import os" else 1 if line.startswith("os.environ") else 2

    return sorted(lines, key=rank)


def script_by_loop(lines):
    first, last = [], []
    for line in lines:
        if line.startswith("os.environ["):
            first.append(line)
        elif line.strip() != "import os":
            last.append(line)
    return ["import os"] + first + last


def script_by_removing(lines):
    left = list(lines)
    moved = [one for one in lines if one.startswith("os.environ[")]
    for one in ["import os", *moved]:
        left.remove(one)
    return ["import os", *moved, *left]


def threads_by_loop(counts, seconds, usable_cores):
    fastest = math.inf
    for count, time in zip(counts, seconds, strict=True):
        if count <= usable_cores:
            fastest = min(fastest, time)
    for count, time in sorted(zip(counts, seconds, strict=True)):
        if time / fastest <= 1.05:
            return count


def threads_by_dict(counts, seconds, usable_cores):
    times = {count: time for count, time in zip(counts, seconds, strict=True) if not count > usable_cores}
    limit = min(times.values()) * 1.05
    return next(count for count in sorted(times) if times[count] <= limit)


def threads_by_tensor(counts, seconds, usable_cores):
    tried = torch.tensor(counts)
    times = torch.tensor(seconds, dtype=torch.float64).masked_fill(tried > usable_cores, math.inf)
    return int(tried[times <= 1.05 * times.min()].min())


def update_by_range(weight, dtype):
    value = torch.tensor(weight).to(dtype)
    noticed = [2.0**-k for k in range(60) if bool(value + torch.tensor(2.0**-k).to(dtype) > value)]
    return min(noticed)


def update_by_doubling(weight, dtype):
    step = 2.0**-60
    while (torch.tensor([weight], dtype=dtype) + torch.tensor([step], dtype=dtype)).item() == weight:
        step = step * 2
    return step


def update_by_tensor(weight, dtype):
    steps = 2.0 ** -torch.arange(60)
    sums = torch.full((60,), weight, dtype=dtype) + steps.to(dtype)
    return steps[sums != weight][-1].item()


def int8_by_numpy(left, right):
    scales = [abs(one.numpy()).max() / 127 for one in (left, right)]
    q_left, q_right = ((one.numpy() / scale).round() for one, scale in zip((left, right), scales, strict=True))
    return torch.tensor(q_left @ q_right * scales[0] * scales[1], dtype=torch.float32)


def int8_by_float(left, right):
    left_scale, right_scale = left.abs().amax() / 127, right.abs().amax() / 127
    return torch.round(left / left_scale) @ torch.round(right / right_scale) * left_scale * right_scale


def int8_by_rounding_first(left, right):
    scales = [matrix.abs().max() / 127 for matrix in (left, right)]
    q_left, q_right = (left / scales[0]).round().to(torch.int8), (right / scales[1]).round().to(torch.int8)
    return (q_left.float() * scales[0]) @ (q_right.float() * scales[1])


def lazy_by_try(name, where):
    try:
        module = where[name]
    except KeyError as error:
        raise AttributeError(name) from error
    return vars(importlib.import_module(module))[name]


def lazy_by_get(name, where):
    module = where.get(name)
    if module is None:
        raise AttributeError(f"no attribute {name}")
    found = __import__(module)
    return getattr(found, name)


def lazy_by_loop(name, where):
    for known, module in where.items():
        if known == name:
            return getattr(importlib.import_module(module), known)
    raise AttributeError


def compare_by_state(load, evaluate, trainings):
    model = load()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    before, after = evaluate(model), []
    for train in trainings:
        train(model)
        after.append(evaluate(model))
        model.load_state_dict(start)
    return before, after


def compare_by_copies(load, evaluate, trainings):
    model = load()
    copies = [copy.deepcopy(model) for _ in trainings]
    for train, one in zip(trainings, copies, strict=True):
        train(one)
    return evaluate(model), [evaluate(one) for one in copies]


def compare_by_function(load, evaluate, trainings):
    kept = load()

    def trained(train):
        model = copy.deepcopy(kept)
        train(model)
        return evaluate(model)

    return [evaluate(kept), [trained(train) for train in trainings]]


def parts_by_numbers(parameters, trained, completions, tokens, vocabulary, with_reference):
    numbers = {"weights": parameters, "gradients": trained, "optimizer": trained + trained}
    numbers["reference"] = parameters * with_reference
    numbers["logits"] = completions * tokens * vocabulary
    return {name: count * torch.float32.itemsize for name, count in numbers.items()}


def parts_by_tensors(parameters, trained, completions, tokens, vocabulary, with_reference):
    with torch.device("meta"):
        model, gradient = torch.empty(parameters), torch.empty(trained)
        logits = torch.empty(completions, tokens, vocabulary)
    return dict(
        weights=model.nbytes,
        gradients=gradient.nbytes,
        optimizer=2 * gradient.nbytes,
        logits=logits.nbytes,
        reference=model.nbytes if with_reference else 0,
    )


def passes_by_divisors(held, per_prompt, prompts, available):
    divisors = [number for number in range(1, prompts + 1) if prompts % number == 0]
    fitting = [number for number in divisors if held + per_prompt * prompts / number <= available]
    return min(fitting, default=None)


def passes_by_room(held, per_prompt, prompts, available):
    room = (available - held) // per_prompt
    sizes = [size for size in range(1, min(room, prompts) + 1) if not prompts % size]
    return prompts // max(sizes) if sizes else None


def passes_by_counting_down(held, per_prompt, prompts, available):
    size = prompts
    while size and (prompts % size or held + size * per_prompt > available):
        size -= 1
    return prompts // size if size else None


def parts_of_the_package(parameters, trained, completions, tokens, vocabulary, with_reference):
    shape = ModelShape(4 * parameters, 4 * trained, *[0] * 13)  # the other fields say nothing of what is held
    held = held_bytes(shape, GRPOConfig(beta=0.04 if with_reference else 0.0))
    return {**held, "logits": 4 * completions * tokens * vocabulary}


RIGHT_ANSWERS = {
    "best_seconds": (seconds_by_list, seconds_by_running_min, seconds_by_marks),
    "mend_script": (script_by_sort, script_by_loop, script_by_removing),
    "choose_threads": (threads_by_loop, threads_by_dict, threads_by_tensor),
    "smallest_update": (update_by_range, update_by_doubling, update_by_tensor),
    "int8_product": (int8_by_numpy, int8_by_float, int8_by_rounding_first),
    "lazy_attribute": (lazy_by_try, lazy_by_get, lazy_by_loop),
    "compare_trainings": (compare_by_state, compare_by_copies, compare_by_function),
    "memory_parts": (parts_of_the_package, parts_by_numbers, parts_by_tensors),
    "fewest_passes": (passes_by_divisors, passes_by_room, passes_by_counting_down),
}
