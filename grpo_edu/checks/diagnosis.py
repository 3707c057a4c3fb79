"""Exercises of notebook 10, first part: what a run's curves tell, and what they do not."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Mapping, Sequence

import torch

from grpo_edu.checks.core import Call, Exercise, Mistake, Part, call
from grpo_edu.data import data_dir

# ---- the stored curves of the broken runs ----


class Curve(list):
    """One number a step; shown by its first and its last four."""

    def __repr__(self) -> str:
        first, last = ([f"{value:.2f}" for value in part] for part in (self[:4], self[4:][-4:]))
        return f"[{', '.join(first)} … {', '.join(last)}]"


@functools.cache
def _stored() -> dict[str, list[dict[str, Curve]]]:
    text = (data_dir() / "curves" / "broken_runs.json").read_text(encoding="utf-8")
    return {
        arm: [{sign: Curve(values) for sign, values in run.items()} for run in runs]
        for arm, runs in json.loads(text).items()
    }


def stored_curves(arm: str) -> list[dict[str, Curve]]:
    """The curves of the five stored runs of a case of `grpo_edu.broken_runs`, or of "healthy".

    >>> runs = stored_curves("healthy")
    >>> len(runs), len(runs[0]["reward"])
    (5, 32)
    """
    return _stored()[arm]


# ---- name_trouble ----

READ = ("reward", "frac_reward_zero_std", "clip_ratio/region_mean")  # the signs that the tree asks for
TROUBLES = {
    "unpaid": ("reward always 0", "chat template skipped", "length truncation"),
    "tied": ("tied rewards", "G too small"),
    "broken down": ("lr too high", "KL wrong sign"),
    "clipped": ("stale old log-probabilities",),
    "not in the curves": ("healthy", "std float trap", "groups mixed", "mask off by one", "EOS masked"),
}


def name_trouble(curves: Mapping[str, Sequence[float]]) -> str:
    """The first question of the tree that a run's curves answer with yes."""
    reward, tied, clipped = (curves[sign] for sign in READ)
    if _mean(reward[:4]) < 0.1:
        return "unpaid"
    if _mean(tied[:2]) >= 0.5:
        return "tied"
    if _mean(reward[-4:]) < 0.5 * _mean(reward[:4]):
        return "broken down"
    return "clipped" if max(clipped) > 0 else "not in the curves"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _some_run(trouble: str) -> Callable[[random.Random], Call]:
    """A stored run, or every other time a made-up one of 8 steps, in which later questions say yes as well."""

    def draw(rng: random.Random) -> Call:
        if rng.random() < 0.5:
            return call(rng.choice(stored_curves(rng.choice(TROUBLES[trouble]))))
        return call(_made_up(rng, trouble))

    return draw


def _made_up(rng: random.Random, trouble: str) -> dict[str, Curve]:
    """Eighths all: sums of them are exact."""
    place = list(TROUBLES).index(trouble)
    first = rng.sample([0.25, 0.0, 0.0, 0.0] if place == 0 else [0.75, 0.75, 0.5, 0.0], 4)
    last = [0.0, 0.0, 0.0, 0.0] if place < 3 else rng.sample(rng.choice([[0.25] * 4, [0.5, 0.25, 0.5, 0.25]]), 4)
    ties = rng.choice([[0.5, 0.5], [0.25, 0.75], [1.0, 0.0]] if place < 2 else [[0.375, 0.5], [0.25, 0.625]])
    clipped = [0.0] * 8
    if place < 4:
        clipped[rng.randrange(8)] = 0.125
    return dict(zip(READ, map(Curve, (first + last, ties + [0.625] * 6, clipped)), strict=True))


def _trouble_by_tensor(curves):
    reward, tied, clipped = (torch.tensor(list(curves[sign])) for sign in READ)
    answers = {
        "unpaid": reward[:4].mean() < 0.1,
        "tied": tied[:2].mean() > 0.499,
        "broken down": 2 * reward[-4:].mean() < reward[:4].mean(),
        "clipped": (clipped > 0).any(),
        "not in the curves": True,
    }
    return next(name for name, yes in answers.items() if yes)


def _trouble_by_sums(curves):
    reward, tied = curves["reward"], curves["frac_reward_zero_std"]
    first, last = sum(reward[:4]), sum(reward[len(reward) - 4 :])
    if first < 0.4:
        return "unpaid"
    if tied[0] + tied[1] >= 1:
        return "tied"
    if last < first / 2:
        return "broken down"
    if any(curves["clip_ratio/region_mean"]):
        return "clipped"
    return "not in the curves"


def _trouble_backwards(curves):
    found = "not in the curves"
    if sum(curves["clip_ratio/region_mean"]) > 0:
        found = "clipped"
    start = sum(curves["reward"][:4]) / 4
    if sum(curves["reward"][-4:]) / 4 < start / 2:
        found = "broken down"
    if sum(curves["frac_reward_zero_std"][:2]) / 2 >= 0.5:
        found = "tied"
    return "unpaid" if start < 0.1 else found


def _tree(*order: str, **changed: Callable[[Mapping[str, Sequence[float]]], bool]) -> Callable:
    """The tree with its questions in this order, some asked in another way; what is left out is not asked."""
    questions = {
        "unpaid": lambda curves: _mean(curves["reward"][:4]) < 0.1,
        "tied": lambda curves: _mean(curves["frac_reward_zero_std"][:2]) >= 0.5,
        "broken down": lambda curves: _mean(curves["reward"][-4:]) < 0.5 * _mean(curves["reward"][:4]),
        "clipped": lambda curves: max(curves["clip_ratio/region_mean"]) > 0,
    } | {name.replace("_", " "): question for name, question in changed.items()}

    def wrong(curves):
        return next((name for name in order or questions if questions[name](curves)), "not in the curves")

    return wrong


check_name_trouble = Exercise(
    "name_trouble",
    name_trouble,
    parts=tuple(
        Part(f"runs of one kind, {number} of 5", 1, _some_run(trouble), draws=24)
        for number, trouble in enumerate(TROUBLES, 1)
    ),
    mistakes=(
        Mistake("ties are asked for before payment", "Whoever is never paid ties as well. Keep the order of the tree.",
                _tree("tied", "unpaid", "broken down", "clipped")),
        Mistake("the break-down is asked for before ties", "Keep the order of the table.",
                _tree("unpaid", "broken down", "tied", "clipped")),
        Mistake("the break-down is asked for first", "Keep the order of the table: payment and ties come before it.",
                _tree("broken down", "unpaid", "tied", "clipped")),
        Mistake("clipped tokens are asked for before the break-down", "Keep the order of the table.",
                _tree("unpaid", "tied", "clipped", "broken down")),
        Mistake("clipped tokens are asked for first", "Keep the order of the table: clipping comes last.",
                _tree("clipped", "unpaid", "tied", "broken down")),
        Mistake("the last yes is returned, not the first", "`return` as soon as a question says yes.",
                _tree("clipped", "broken down", "tied", "unpaid")),
        Mistake("one of the first rewards is enough", "The *mean* of the first four: a single lucky step pays nobody.",
                _tree(unpaid=lambda curves: max(curves["reward"][:4]) < 0.1)),
        Mistake("only the first reward is looked at", "The mean of the first *four*.",
                _tree(unpaid=lambda curves: curves["reward"][0] < 0.1)),
        Mistake("the reward of the whole run is taken", "A run that breaks down was paid in the beginning. Look at the "
                "first four steps.", _tree(unpaid=lambda curves: _mean(curves["reward"]) < 0.1)),
        Mistake("exactly half of the groups is not enough", "0.5 *or more*.",
                _tree(tied=lambda curves: _mean(curves["frac_reward_zero_std"][:2]) > 0.5)),
        Mistake("ties are looked for at the end of the run", "A healthy run ties more and more. Half of the groups, "
                "from the *first* steps on?",
                _tree(tied=lambda curves: _mean(curves["frac_reward_zero_std"][-4:]) >= 0.5)),
        Mistake("ties are looked for in more than two steps", "A healthy run ties later: the first *two* steps.",
                _tree(tied=lambda curves: _mean(curves["frac_reward_zero_std"][:4]) >= 0.5)),
        Mistake("any drop is taken for a break-down", "Below *half* of what it was.",
                _tree(broken_down=lambda curves: _mean(curves["reward"][-4:]) < _mean(curves["reward"][:4]))),
        Mistake("exactly half is taken for a break-down", "*Below* half.",
                _tree(broken_down=lambda curves: _mean(curves["reward"][-4:]) <= 0.5 * _mean(curves["reward"][:4]))),
        Mistake("a break-down is not seen", "Compare the last four steps with the first four.",
                _tree("unpaid", "tied", "clipped")),
        Mistake("clipping is looked for in the first four steps only", "*Ever* above 0: in the first steps the policy "
                "has hardly moved.", _tree(clipped=lambda curves: max(curves["clip_ratio/region_mean"][:4]) > 0)),
        Mistake("clipped tokens are not seen", "One update a batch: is the share of clipped tokens ever above 0?",
                _tree("unpaid", "tied", "broken down")),
    ),
    right=(_trouble_by_tensor, _trouble_by_sums, _trouble_backwards),
)  # fmt: skip
