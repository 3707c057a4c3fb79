"""Exercises of notebook 01, fourth part: where memory goes, and settings that fit."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from grpo_edu.checks.core import Call, Exercise, Mistake, Part, call
from grpo_edu.config import GRPOConfig
from grpo_edu.memory_estimate import ModelShape, held_bytes

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


def _parts_by_formula(parameters, trained, completions, tokens, vocabulary, with_reference):
    return {
        "weights": 4 * parameters,
        "reference": 4 * parameters if with_reference else 0,
        "gradients": 4 * trained,
        "optimizer": 8 * trained,
        "logits": 4 * completions * tokens * vocabulary,
    }


def _parts_by_numbers(parameters, trained, completions, tokens, vocabulary, with_reference):
    numbers = {"weights": parameters, "gradients": trained, "optimizer": trained + trained}
    numbers["reference"] = parameters * with_reference
    numbers["logits"] = completions * tokens * vocabulary
    return {name: count * torch.float32.itemsize for name, count in numbers.items()}


def _parts_by_tensors(parameters, trained, completions, tokens, vocabulary, with_reference):
    with torch.device("meta"):
        model, gradient = torch.empty(parameters), torch.empty(trained)
        logits = torch.empty(completions, tokens, vocabulary)
    return dict(
        weights=model.nbytes, gradients=gradient.nbytes, optimizer=2 * gradient.nbytes, logits=logits.nbytes,
        reference=model.nbytes if with_reference else 0,
    )  # fmt: skip


def _with_part(name: str, size: Callable[..., int]) -> Callable:
    """The right answer with one part wrong."""

    def wrong(*args):
        return {**memory_parts(*args), name: size(*args)}

    return wrong


check_memory_parts = Exercise(
    "memory_parts",
    memory_parts,
    parts=(
        Part("all weights learn, no reference", 2, _some_model(False, False)),
        Part("some weights are frozen, with a reference", 2, _some_model(True, True)),
    ),
    mistakes=(
        Mistake("AdamW keeps one number a weight", "The mean of the gradients, and that of their squares.",
                _with_part("optimizer", lambda parameters, trained, *rest: 4 * trained)),
        Mistake("AdamW keeps numbers for frozen weights", "A weight without a gradient needs no mean of gradients.",
                _with_part("optimizer", lambda parameters, *rest: 8 * parameters)),
        Mistake("frozen weights have gradients", "Only what learns has a gradient.",
                _with_part("gradients", lambda parameters, *rest: 4 * parameters)),
        Mistake("frozen weights are counted as if they learned", "Gradients and optimizer are there for the `trained` "
                "ones only.", lambda parameters, trained, *rest: memory_parts(parameters, parameters, *rest)),
        Mistake("the reference holds only what learns", "It is a frozen copy of the whole model.",
                _with_part("reference", lambda parameters, trained, *rest: 4 * trained * rest[-1])),
        Mistake("the reference is always there", "Without a KL term there is no second model: 0 bytes.",
                _with_part("reference", lambda parameters, *rest: 4 * parameters)),
        Mistake("the logits are those of one completion", "B × C × V: all completions of the batch at once.",
                _with_part("logits", lambda p, t, completions, tokens, vocabulary, r: 4 * tokens * vocabulary)),
        Mistake("these are numbers, not bytes", "How many bytes has a number in fp32?",
                lambda *args: {name: size // 4 for name, size in memory_parts(*args).items()}),
    ),
    right=(_parts_by_formula, _parts_by_numbers, _parts_by_tensors),
)  # fmt: skip


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


def _passes_by_divisors(held, per_prompt, prompts, available):
    divisors = [number for number in range(1, prompts + 1) if prompts % number == 0]
    fitting = [number for number in divisors if held + per_prompt * prompts / number <= available]
    return min(fitting, default=None)


def _passes_by_room(held, per_prompt, prompts, available):
    room = (available - held) // per_prompt
    sizes = [size for size in range(1, min(room, prompts) + 1) if not prompts % size]
    return prompts // max(sizes) if sizes else None


def _passes_by_counting_down(held, per_prompt, prompts, available):
    size = prompts
    while size and (prompts % size or held + size * per_prompt > available):
        size -= 1
    return prompts // size if size else None


def _last_one_not_tried(held, per_prompt, prompts, available):
    found = fewest_passes(held, per_prompt, prompts, available)
    return None if found == prompts else found


def _held_is_divided(held, per_prompt, prompts, available):
    passes = range(1, prompts + 1)
    return next((k for k in passes if prompts % k == 0 and (held + per_prompt * prompts) / k <= available), None)


def _passes_of_any_size(held, per_prompt, prompts, available):
    return next((k for k in range(1, prompts + 1) if held + per_prompt * prompts / k <= available), None)


def _passes_rounded_up(held, per_prompt, prompts, available):
    room = (available - held) // per_prompt
    return -(-prompts // min(room, prompts)) if room >= 1 else None


check_fewest_passes = Exercise(
    "fewest_passes",
    fewest_passes,
    parts=(
        Part("batches that just fit", 1, _room_for([(8, 4), (16, 4), (12, 4), (16, 2)], exact=True), draws=8,
             always=(call(510, 100, 8, 610), call(730, 60, 12, 800))),
        Part("passes that must divide the prompts", 1, _room_for([(16, 6), (16, 7), (8, 3), (24, 5)]), draws=8),
        Part("nothing fits", 1, _room_for([(8, 0), (16, 0)])),
    ),
    mistakes=(
        Mistake("what fits exactly is refused", "As much as is available may be used: at most, not less than.",
                lambda held, per_prompt, prompts, available: fewest_passes(held, per_prompt, prompts, available - 1)),
        Mistake("the passes do not divide the prompts", "Every pass has N / k prompts: k must divide N, "
                "with nothing left over.",
                _passes_rounded_up, also=(_passes_of_any_size,)),
        Mistake("as many passes as prompts are not tried", "One prompt a pass is k = N. Does your loop come that far?",
                _last_one_not_tried),
        Mistake("what is held is divided as well", "Only the prompts are shared out. Weights, gradients and "
                "optimizer are there whole in each of them.", _held_is_divided),
        Mistake("what is held is forgotten", "Weights, gradients and optimizer are there as well, in every pass.",
                lambda held, per_prompt, prompts, available: fewest_passes(0, per_prompt, prompts, available)),
        Mistake("it is one prompt at a time", "That fits whenever anything does. How few passes are enough?",
                lambda held, per_prompt, prompts, available: prompts),
        Mistake("it is the number of prompts in a pass", "How many passes does that make?",
                lambda *args: args[2] // fewest_passes(*args) if fewest_passes(*args) else None),
    ),
    right=(_passes_by_divisors, _passes_by_room, _passes_by_counting_down),
)  # fmt: skip
