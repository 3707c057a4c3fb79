"""Exercises of notebook 10, second part: from a symptom to a fault."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from grpo_edu.checks.core import Call, Exercise, Mistake, Part, call

# ---- find_fault ----

IN_A_BATCH = {
    "best pushed up": "groups mixed", "first token trained": "mask off by one", "end trained": "EOS counts as padding",
}  # fmt: skip


def find_fault(question: int, reading: Mapping[str, float]) -> str:
    """The second look: from the question that was answered with yes, and what was then read, to the fault."""
    if question == 1:
        if reading["cut"] > 1 / 3:
            return "too little room"
        return "reward cannot read" if reading["right"] >= 0.1 else "no chat template"
    if question == 2:
        return "G too small" if reading["siblings"] <= 3 else "pays for anything"
    if question == 3:
        return "learning rate too high" if reading["step"] <= 10 else "KL with the wrong sign"
    if question == 4:
        return "stale old log-probabilities"
    if not reading["best pushed up"]:
        return "groups mixed"
    if not reading["first token trained"]:
        return "mask off by one"
    if not reading["end trained"]:
        return "EOS counts as padding"
    return "float trap" if abs(reading["tied advantage"]) > 0.01 else "nothing found"


def _share(rng: random.Random, low: int, high: int) -> float:
    return rng.randrange(low, high) / 100


def _unpaid(rng: random.Random) -> Call:
    right, cut = rng.choice([(0, 40), (12, 30), (0, 0), (1, 0), (35, 0), (60, 0)])
    reading = {"right": _share(rng, right, right + 8), "cut": _share(rng, cut, cut + 30) if cut else _share(rng, 0, 30)}
    if rng.random() < 0.3:
        reading["right"] = 0.1
    return call(1, reading)


def _siblings(rng: random.Random) -> Call:
    return call(2, {"siblings": rng.choice([2, 3, 8, 16])})


def _steps(rng: random.Random) -> Call:
    if rng.random() < 0.2:
        return call(4, {"first ratio": 1.0, "clipped": _share(rng, 2, 9)})
    return call(3, {"step": rng.choice([2, 4, 10, 11, 30, 60])})


def _one_batch(rng: random.Random) -> Call:
    """Nothing, one or several of the four are wrong; a tie may be worth a little."""
    wrong = rng.choice([set(), set(), {0}, {1}, {2}, {3}, {3}, {3}, {0, 1}, {1, 2}, {0, 2, 3}])
    advantage = rng.choice([-0.87, 0.87, -0.41, 0.41] if 3 in wrong else [0.0, 0.001, -0.001])
    reading = {name: number not in wrong for number, name in enumerate(IN_A_BATCH)}
    return call(5, {**reading, "tied advantage": advantage})


def _fault_by_match(question, reading):
    match question, reading:
        case 1, {"cut": cut} if cut > 1 / 3:
            return "too little room"
        case 1, {"right": right}:
            return "no chat template" if right < 0.1 else "reward cannot read"
        case 2, {"siblings": 2 | 3}:
            return "G too small"
        case 2, _:
            return "pays for anything"
        case 3, {"step": step}:
            return "KL with the wrong sign" if step > 10 else "learning rate too high"
        case 4, _:
            return "stale old log-probabilities"
    return _fault_in_batch(reading)


def _fault_in_batch(reading):
    found = [fault for name, fault in IN_A_BATCH.items() if reading[name] is False]
    found += ["float trap"] if not -0.01 <= reading["tied advantage"] <= 0.01 else []
    return (found + ["nothing found"])[0]


def _fault_by_table(question, reading):
    tables = {
        1: lambda: [("too little room", reading["cut"] > 1 / 3), ("reward cannot read", reading["right"] >= 0.1),
                    ("no chat template", True)],
        2: lambda: [("pays for anything", reading["siblings"] > 3), ("G too small", True)],
        3: lambda: [("learning rate too high", reading["step"] < 11), ("KL with the wrong sign", True)],
        4: lambda: [("stale old log-probabilities", True)],
        5: lambda: [(_fault_in_batch(reading), True)],
    }  # fmt: skip
    return next(fault for fault, yes in tables[question]() if yes)


def _fault_by_functions(question, reading):
    return (_unpaid_fault, _tied_fault, _step_fault, lambda _: "stale old log-probabilities", _fault_in_batch)[
        question - 1
    ](reading)


def _unpaid_fault(reading):
    if not reading["cut"] * 3 > 1:
        return ("no chat template", "reward cannot read")[reading["right"] >= 0.1]
    return "too little room"


def _tied_fault(reading):
    return "pays for anything" if reading["siblings"] >= 4 else "G too small"


def _step_fault(reading):
    return "learning rate too high" if reading["step"] <= 10 else "KL with the wrong sign"


def _right_before_room(question, reading):
    return "reward cannot read" if question == 1 and reading["right"] >= 0.1 else find_fault(question, reading)


def _swapping(one: str, other: str) -> Callable:
    """Two faults have changed places."""

    def wrong(question, reading):
        found = find_fault(question, reading)
        return {one: other, other: one}.get(found, found)

    return wrong


def _positive_only(question, reading):
    if question == 5:
        reading = {**reading, "tied advantage": max(0.0, reading["tied advantage"])}
    return find_fault(question, reading)


def _limits_left_out(question, reading):
    limits = {1: ("right", 0.1, "no chat template"), 2: ("siblings", 3, "pays for anything"),
              3: ("step", 10, "KL with the wrong sign")}  # fmt: skip
    found = find_fault(question, reading)
    if question in limits and found != "too little room":
        name, limit, otherwise = limits[question]
        return otherwise if reading[name] == limit else found
    return found


def _most_cut_off(question, reading):
    if question == 1 and reading["cut"] <= 0.5:
        reading = {**reading, "cut": 0.0}
    return find_fault(question, reading)


def _batch_in_order(*order: str, trap_first: bool) -> Callable:
    """Question 5, asked in another order."""

    def wrong(question, reading):
        if question != 5:
            return find_fault(question, reading)
        found = [IN_A_BATCH[name] for name in order if not reading[name]]
        trap = ["float trap"] if abs(reading["tied advantage"]) > 0.01 else []
        return ((trap + found if trap_first else found + trap) + ["nothing found"])[0]

    return wrong


def _any_tied_advantage(question, reading):
    if question == 5 and reading["tied advantage"]:
        reading = {**reading, "tied advantage": 1.0}
    return find_fault(question, reading)


def _true_is_alarm(question, reading):
    if question == 5:
        reading = {**reading, **{name: not reading[name] for name in IN_A_BATCH}}
    return find_fault(question, reading)


check_find_fault = Exercise(
    "find_fault",
    find_fault,
    parts=(
        Part("question 1: ten samples were read", 2, _unpaid, draws=60),
        Part("question 2: the rewards of a group", 1, _siblings, draws=20),
        Part("questions 3 and 4: the first steps, the ratio", 1, _steps, draws=60),
        Part("question 5: one batch, by hand", 2, _one_batch, draws=60),
    ),
    mistakes=(
        Mistake("some right answers hide the lack of room", "A few short answers fit even into too little room. "
                "Look at the share that was cut first.", _right_before_room),
        Mistake("room is found lacking only where most are cut off", "More than a *third*.", _most_cut_off),
        Mistake("the limit itself is left out", "0.1 *or more*, 3 *or fewer*, 10 *or earlier*.", _limits_left_out),
        Mistake("right answers and nonsense have changed places", "Right answers that are not paid: is that the fault "
                "of the model, or of the reward?", _swapping("reward cannot read", "no chat template")),
        Mistake("small groups and generous rewards have changed places", "Two siblings often tie. Eight of them tie "
                "from the first step on only where everybody is paid.", _swapping("G too small", "pays for anything")),
        Mistake("a late break-down is blamed on the learning rate", "Steps that are too long break a run at once.",
                lambda question, reading: "learning rate too high" if question == 3 else find_fault(question, reading)),
        Mistake("the two ends of the mask have changed places", "The first token is lost by a shift, the last by "
                "taking EOS for padding.", _swapping("mask off by one", "EOS counts as padding")),
        Mistake("a tied group may have a negative advantage", "0 is what a tie is worth. The rounding error may have "
                "either sign.", _positive_only),
        Mistake("every tied advantage but 0 is taken for the trap", "Further than 0.01 from 0.", _any_tied_advantage),
        Mistake("True is taken for the alarm", "In question 5, False is the alarm: not pushed up, not trained.",
                _true_is_alarm),
        Mistake("question 5 is asked from the bottom to the top", "Several rows may be False: the first counts.",
                _batch_in_order(*reversed(IN_A_BATCH), trap_first=True)),
        Mistake("the mask is asked for before the signs, its end before its beginning", "Several rows may be False: "
                "the first counts.", _batch_in_order(*reversed(IN_A_BATCH), trap_first=False)),
        Mistake("the float trap is asked for first", "Keep the order of the table.",
                _batch_in_order(*IN_A_BATCH, trap_first=True)),
    ),
    right=(_fault_by_match, _fault_by_table, _fault_by_functions),
)  # fmt: skip
