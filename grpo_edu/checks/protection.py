"""Exercise of notebook 08: whether to protect what was learned before, and how."""

from __future__ import annotations

import random

from grpo_edu.checks.core import Call, Exercise, Mistake, Part, call


def choose_protection(low: float, high: float, tolerated: float, rate_can_fall: bool, old_data_kept: bool) -> str:
    """What to do about forgetting with the interval (low, high): the rules of the exercise, in their order."""
    if high <= tolerated:
        return "nothing"
    if low <= tolerated:
        return "more seeds"
    if rate_can_fall:
        return "lower rate"
    return "replay" if old_data_kept else "ewc"


def _curriculum(rng: random.Random, low_from: float, low_to: float) -> Call:
    low = round(rng.uniform(low_from, low_to), 2)
    high = round(low + rng.uniform(0.05, 0.3), 2)
    return call(low, high, rng.choice([0.02, 0.05, 0.08]), rng.random() < 0.5, rng.random() < 0.5)


def _unclear(rng: random.Random) -> Call:
    return _curriculum(rng, -0.3, 0.06)


def _clear(rng: random.Random) -> Call:
    return _curriculum(rng, 0.1, 0.4)


def _choice_by_nesting(low: float, high: float, tolerated: float, rate_can_fall: bool, old_data_kept: bool) -> str:
    answer = "nothing"
    if high > tolerated:
        answer = "more seeds"
        if low > tolerated:
            answer = "ewc"
            if old_data_kept:
                answer = "replay"
            if rate_can_fall:
                answer = "lower rate"
    return answer


def _choice_by_table(low: float, high: float, tolerated: float, rate_can_fall: bool, old_data_kept: bool) -> str:
    rules = [
        (high <= tolerated, "nothing"), (low <= tolerated, "more seeds"), (rate_can_fall, "lower rate"),
        (old_data_kept, "replay"), (True, "ewc"),
    ]  # fmt: skip
    return next(answer for holds, answer in rules if holds)


def _choice_by_count(low: float, high: float, tolerated: float, rate_can_fall: bool, old_data_kept: bool) -> str:
    above = (low > tolerated) + (high > tolerated)
    if above < 2:
        return ("nothing", "more seeds")[above]
    return ("lower rate" if rate_can_fall else None) or ("replay" if old_data_kept else "ewc")


def _choice_by_middle(low: float, high: float, tolerated: float, rate_can_fall: bool, old_data_kept: bool) -> str:
    middle = (low + high) / 2
    return choose_protection(middle, middle, tolerated, rate_can_fall, old_data_kept)


def _choice_without_rate(low: float, high: float, tolerated: float, rate_can_fall: bool, old_data_kept: bool) -> str:
    return choose_protection(low, high, tolerated, False, old_data_kept)


def _choice_ewc_first(low: float, high: float, tolerated: float, rate_can_fall: bool, old_data_kept: bool) -> str:
    found = choose_protection(low, high, tolerated, rate_can_fall, old_data_kept)
    return "ewc" if found == "replay" else found


def _choice_without_ends(low: float, high: float, tolerated: float, rate_can_fall: bool, old_data_kept: bool) -> str:
    return _choice_by_strict_rules(low, high, tolerated, rate_can_fall, old_data_kept, high_too=True)


def _choice_by_strict_rules(
    low: float, high: float, tolerated: float, rate_can_fall: bool, old_data_kept: bool, *, high_too: bool = False
) -> str:
    if high < tolerated if high_too else high <= tolerated:
        return "nothing"
    if low < tolerated:
        return "more seeds"
    return choose_protection(1.0, 1.0, tolerated, rate_can_fall, old_data_kept)


def _choice_strict_above(low: float, high: float, tolerated: float, rate_can_fall: bool, old_data_kept: bool) -> str:
    if high == tolerated:
        return "more seeds"
    return choose_protection(low, high, tolerated, rate_can_fall, old_data_kept)


def _choice_without_seeds(low: float, high: float, tolerated: float, rate_can_fall: bool, old_data_kept: bool) -> str:
    return choose_protection(max(low, 1.0) if high > tolerated else low, high, tolerated, rate_can_fall, old_data_kept)


def _choice_by_lower_end(low: float, high: float, tolerated: float, rate_can_fall: bool, old_data_kept: bool) -> str:
    return choose_protection(low, low, tolerated, rate_can_fall, old_data_kept)


def _choice_shown_above_zero(
    low: float, high: float, tolerated: float, rate_can_fall: bool, old_data_kept: bool
) -> str:
    if high <= tolerated:
        return "nothing"
    return choose_protection(low, max(high, 0.01), 0.0, rate_can_fall, old_data_kept)


def _choice_replay_first(low: float, high: float, tolerated: float, rate_can_fall: bool, old_data_kept: bool) -> str:
    found = choose_protection(low, high, tolerated, rate_can_fall, old_data_kept)
    return "replay" if found == "lower rate" and old_data_kept else found


_BORDERS = (  # the tolerated loss at either end of the interval, and above 0 but within it
    call(-0.11, 0.05, 0.05, True, False),
    call(0.05, 0.21, 0.05, False, True),
    call(0.02, 0.24, 0.05, True, True),
)
_SITUATIONS = tuple(call(0.22, 0.41, 0.05, falls, kept) for falls in (True, False) for kept in (True, False))

check_choose_protection = Exercise(
    "choose_protection",
    choose_protection,
    parts=(
        Part("is anything lost?", 2, _unclear, draws=24, always=_BORDERS),
        Part("what to do against it", 2, _clear, draws=16, always=_SITUATIONS),
    ),
    mistakes=(
        Mistake("the middle of the interval decides", "An interval that reaches to both sides of the tolerated loss "
                "leaves the question open.", _choice_by_middle),
        Mistake("it is compared with 0, not with the tolerated loss", "A loss that nobody minds needs no protection.",
                lambda low, high, tolerated, *situation: choose_protection(low, high, 0.0, *situation)),
        Mistake("it protects without looking at the interval", "First measure whether anything is lost.",
                lambda low, high, tolerated, *situation: choose_protection(1.0, 1.0, tolerated, *situation)),
        Mistake("more seeds are never asked for", "With the tolerated loss within the interval, nothing is shown yet.",
                _choice_without_seeds, also=(_choice_by_lower_end,)),
        Mistake("a loss counts as shown as soon as it is above 0", "It is shown where even `low` is above what is "
                "tolerated.", _choice_shown_above_zero),
        Mistake("the tolerated loss itself is not tolerated", "At or below it: `<=`, at both ends of the interval.",
                _choice_without_ends, also=(_choice_by_strict_rules, _choice_strict_above)),
        Mistake("replay comes before a lower rate", "The first rule that applies counts. A lower rate needs no data.",
                _choice_replay_first),
        Mistake("the learning rate is not tried first", "A lower rate costs nothing, no data and no memory.",
                _choice_without_rate),
        Mistake("EWC is taken although the old data are there", "EWC is for when the data are gone.",
                _choice_ewc_first),
    ),
    right=(_choice_by_nesting, _choice_by_table, _choice_by_count),
)  # fmt: skip
