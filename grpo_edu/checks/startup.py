"""Exercises of notebook 01, third part: start-up time that is paid once."""

from __future__ import annotations

import copy
import importlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from grpo_edu.checks.core import Call, Exercise, Mistake, Part, call

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


def _unknown_name(rng: random.Random) -> Call:
    return call(rng.choice(["Pi", "digit", "MAX_PRECISION"]), _some_places(rng))


def _lazy_by_try(name, where):
    try:
        module = where[name]
    except KeyError as error:
        raise AttributeError(name) from error
    return vars(importlib.import_module(module))[name]


def _lazy_by_get(name, where):
    module = where.get(name)
    if module is None:
        raise AttributeError(f"no attribute {name}")
    found = __import__(module)
    return getattr(found, name)


def _lazy_by_loop(name, where):
    for known, module in where.items():
        if known == name:
            return getattr(importlib.import_module(module), known)
    raise AttributeError


def _all_imported(name, where):
    modules = {known: importlib.import_module(module) for known, module in where.items()}
    return getattr(modules[name], name)


check_lazy_attribute = Exercise(
    "lazy_attribute",
    lazy_attribute,
    parts=(
        Part("a known name, beside a library that is not installed", 2, _known_name),
        Part("a name that nobody knows", 1, _unknown_name),
    ),
    mistakes=(
        Mistake("an unknown name is a KeyError", "Python expects `AttributeError` of a module without that name: "
                "`hasattr` would break otherwise.", lambda name, where: PLACES[name] and lazy_attribute(name, where)),
        Mistake("everything is imported", "Only the module of the name that was asked for is needed. Here another one "
                "cannot even be imported.", _all_imported),
        Mistake("it is the module, not what it holds", "`getattr(module, name)` fetches a name from a module.",
                lambda name, where: importlib.import_module(where[name])),
        Mistake("it is the module's name", "`importlib.import_module(name_of_the_module)` imports it.",
                lambda name, where: where[name]),
        Mistake("an unknown name gives None", "A typing error would go unnoticed. Raise `AttributeError`.",
                lambda name, where: lazy_attribute(name, where) if name in where else None),
    ),
    right=(_lazy_by_try, _lazy_by_get, _lazy_by_loop),
)  # fmt: skip


# ---- compare_trainings ----


@dataclass
class Loading:
    """Reads a model of a few weights; whoever calls it a second time has waited twice."""

    weights: list[float]
    done: bool = False

    def __call__(self) -> nn.Module:
        if self.done:
            raise RuntimeError("the model was loaded a second time")
        self.done = True
        model = nn.Linear(len(self.weights), 1, bias=False)
        with torch.no_grad():
            model.weight.copy_(torch.tensor([self.weights]))
        return model


@dataclass
class Training:
    """Changes the model that it is given: adds `step` to each weight."""

    step: float

    def __call__(self, model: nn.Linear) -> None:
        with torch.no_grad():
            model.weight.add_(self.step)


def evaluate(model: nn.Linear) -> float:
    """The sum of the weights, for want of an accuracy."""
    return model.weight.sum().item()


def compare_trainings(
    load: Callable[[], nn.Module],
    evaluate: Callable[[nn.Module], float],
    trainings: list[Callable[[nn.Module], None]],
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
    return call(Loading(weights), evaluate, [Training(step) for step in steps])


def _compare_by_state(load, evaluate, trainings):
    model = load()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    before, after = evaluate(model), []
    for train in trainings:
        train(model)
        after.append(evaluate(model))
        model.load_state_dict(start)
    return before, after


def _compare_by_copies(load, evaluate, trainings):
    model = load()
    copies = [copy.deepcopy(model) for _ in trainings]
    for train, one in zip(trainings, copies, strict=True):
        train(one)
    return evaluate(model), [evaluate(one) for one in copies]


def _compare_by_function(load, evaluate, trainings):
    kept = load()

    def trained(train):
        model = copy.deepcopy(kept)
        train(model)
        return evaluate(model)

    return [evaluate(kept), [trained(train) for train in trainings]]


def _goes_on(load, evaluate, trainings):
    model, after = load(), []
    before = evaluate(model)
    for train in trainings:
        train(model)
        after.append(evaluate(model))
    return before, after


def _before_at_the_end(load, evaluate, trainings):
    model, after = load(), []
    for train in trainings:
        train(model)
        after.append(evaluate(model))
    return evaluate(model), after


def _loads_each_time(load, evaluate, trainings):
    before, after = evaluate(load()), []
    for train in trainings:
        model = load()
        train(model)
        after.append(evaluate(model))
    return before, after


def _asks_the_untrained(load, evaluate, trainings):
    kept = load()
    for train in trainings:
        train(copy.deepcopy(kept))
    return evaluate(kept), [evaluate(kept) for _ in trainings]


def _gains(load, evaluate, trainings):
    before, after = compare_trainings(load, evaluate, trainings)
    return before, [one - before for one in after]


check_compare_trainings = Exercise(
    "compare_trainings",
    compare_trainings,
    parts=(Part("two trainings and three", 4, _some_trainings),),
    mistakes=(
        Mistake("a training goes on where the last one ended", "Each is to start from the untrained model. "
                "`copy.copy` shares the weights, `copy.deepcopy` does not.", _goes_on),
        Mistake("\"before\" is measured after", "The kept model was trained. Give the trainings copies, or measure "
                "first.", _before_at_the_end),
        Mistake("the model is loaded for each training", "Loading is what takes long. Keep what was loaded.",
                _loads_each_time),
        Mistake("the untrained model is evaluated every time", "Evaluate the copy that was trained.",
                _asks_the_untrained),
        Mistake("these are gains", "Return what `evaluate` says after each training.", _gains),
    ),
    right=(_compare_by_state, _compare_by_copies, _compare_by_function),
)  # fmt: skip
