"""Exercises of notebook 10, fifth part: a setup with two faults."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from grpo_edu.checks.core import Call, Exercise, Mistake, Part, call

# ---- mend ----

MENDED = {
    "num_generations": 8, "max_completion_length": 96, "learning_rate": 2e-4, "reward": "accuracy_reward",
    "replaced": [],
}  # fmt: skip
Settings = dict[str, Any]


def broken_settings(settings: Settings) -> list[str]:
    """The names of the settings that make a run ill."""
    ill = {
        "num_generations": settings["num_generations"] < 4,
        "max_completion_length": settings["max_completion_length"] < 48,
        "learning_rate": settings["learning_rate"] > 1e-3,
        "reward": settings["reward"] != "accuracy_reward",
        "replaced": bool(settings["replaced"]),
    }
    return [name for name, is_ill in ill.items() if is_ill]


def mend(settings: Settings) -> Settings:
    """The same settings, with what is ill replaced by what is right."""
    return {**settings, **{name: MENDED[name] for name in broken_settings(settings)}}


ILL = {
    "num_generations": (2, 3),
    "max_completion_length": (16, 20, 32),
    "learning_rate": (3e-3, 1e-2),
    "reward": ("boxed_reward", "generous_reward"),
    "replaced": (["compute_advantages"], ["score_rollout"], ["render_prompt"], ["batch_loss"]),
}


def _sound(rng: random.Random) -> Settings:
    return {
        "num_generations": rng.choice([4, 16]), "max_completion_length": rng.choice([48, 64, 128]),
        "learning_rate": rng.choice([5e-5, 1e-4, 1e-3]), "seed": rng.randrange(1, 99), "reward": "accuracy_reward",
        "replaced": [],
    }  # fmt: skip


def _ill_with(first: Sequence[str], second: Sequence[str]) -> Callable[[random.Random], Call]:
    """Two faults, one from each list of names."""

    def draw(rng: random.Random) -> Call:
        one = rng.choice(first)
        other = rng.choice([name for name in second if name != one])
        return call({**_sound(rng), **{name: rng.choice(ILL[name]) for name in (one, other)}})

    return draw


def _mend_by_copy(settings):
    mended = dict(settings)
    if mended["num_generations"] <= 3:
        mended["num_generations"] = 8
    if mended["max_completion_length"] < 48:
        mended["max_completion_length"] = 96
    if mended["learning_rate"] > 0.001:
        mended["learning_rate"] = 0.0002
    mended["reward"], mended["replaced"] = "accuracy_reward", []
    return mended


def _mend_by_comprehension(settings):
    ill = broken_settings(settings)
    return {name: MENDED[name] if name in ill else value for name, value in settings.items()}


def _mend_by_steps(settings):
    for name in broken_settings(settings):
        settings = settings | {name: MENDED[name]}
    return dict(settings)


def _first_fault_only(settings):
    return {**settings, **{name: MENDED[name] for name in broken_settings(settings)[:1]}}


def _changed_in_place(settings):
    settings.update(mend(settings))
    return settings


LIMITS = {"num_generations": 4, "max_completion_length": 48, "learning_rate": 1e-3}


def _too_strict(*names: str) -> Callable[[Settings], Settings]:
    """The limits of these settings count as ill."""

    def wrong(settings: Settings) -> Settings:
        at_the_limit = {name: MENDED[name] for name in names if settings[name] == LIMITS[name]}
        return {**mend(settings), **at_the_limit}

    return wrong


check_mend = Exercise(
    "mend",
    mend,
    parts=(
        Part("two sick numbers", 2, _ill_with(list(ILL)[:3], list(ILL)[:3]), draws=20),
        Part("a sick number, and a sick function", 2, _ill_with(list(ILL)[:3], list(ILL)[3:]), draws=20),
        Part("a healthy setup", 1, lambda rng: call(_sound(rng)), draws=20),
    ),
    mistakes=(
        Mistake("only one fault is mended", "Go on looking when you have found one.", _first_fault_only),
        Mistake("sound settings are changed too", "4 completions a group, 128 tokens, 1e-4: what is not ill stays.",
                lambda settings: {**settings, **MENDED}),
        Mistake("the seed is lost", "The run must stay comparable: everything that is not ill stays, the seed too.",
                lambda settings: {**mend(settings), "seed": 0}),
        Mistake("limits themselves count as ill", "*Below* 4, *below* 48, *above* 1e-3.", _too_strict(*LIMITS)),
        Mistake("4 completions a group count as ill", "*Below* 4.", _too_strict("num_generations")),
        Mistake("48 tokens count as ill", "*Below* 48.", _too_strict("max_completion_length")),
        Mistake("a learning rate of 1e-3 counts as ill", "*Above* 1e-3.", _too_strict("learning_rate")),
        Mistake("only what was changed is returned", "All six settings: a run needs them all.",
                lambda settings: {name: MENDED[name] for name in broken_settings(settings)}),
        Mistake("the stand-ins stay", "A stage that was replaced is ill whatever the numbers say.",
                lambda settings: {**mend(settings), "replaced": settings["replaced"]}),
        Mistake("the settings that were handed in are changed", "Return a new dict: the broken run's record must stay "
                "as it was.", _changed_in_place),
    ),
    right=(_mend_by_copy, _mend_by_comprehension, _mend_by_steps),
)  # fmt: skip
