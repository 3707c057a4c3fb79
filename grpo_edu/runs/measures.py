"""Measure what the log of a run shows: the course of its reward, and what may explain it.

`grpo_edu.runs.log_diagnosis` asks its rules of these quantities, and writes them into its texts under the same names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_edu.config import GRPOConfig
    from grpo_edu.evaluation import Evaluation

REWARD, TIED, STD = "reward", "frac_reward_zero_std", "reward_std"
LENGTH, CUT, CLIPPED = "completions/mean_length", "completions/clipped_ratio", "clip_ratio/region_mean"

FEW = 4  # steps at the beginning and at the end whose mean is compared
ENOUGH = 16  # steps from which on a flat curve is judged
# Standard errors of a mean of a few steps, from which on a difference of the best and another is not chance.
_NOISE = 6.0
_FALL, _BREAKDOWN = 0.2, 0.5  # shares of the height of the reward

Rows = Sequence[Mapping[str, float | None]]
Points = list[tuple[int, float]]


@dataclass(frozen=True)
class RunFacts:
    """Facts about a run besides its log: settings, held-out evaluations, and what ends a completion.

    unchanged: no weight changed by more than rounding. turn_end: the token that ends a turn in the chat template, if it
    does not end a completion.
    """

    config: GRPOConfig | None = None
    before: Evaluation | None = None
    after: Evaluation | None = None
    unchanged: bool = False
    turn_end: str | None = None


@dataclass(frozen=True)
class Course:
    """The course of a curve, from the means of `width` steps.

    kind: "short" for too few steps, else "rises", "flat", "noisy" if a rise could not be seen, "falls" by a fifth of
    its height or more, "collapses" by half, "dips" by half and recovers, or "swings" if it does so three times. high,
    low: the ends of its largest fall. noise: the standard error of such a mean. slope: slope of a straight line, in its
    standard errors. best: the highest mean.
    """

    kind: str = "short"
    first: float = 0.0
    last: float = 0.0
    best: float = 0.0
    high: float = 0.0
    high_step: int = 0
    low: float = 0.0
    low_step: int = 0
    half_step: int = 0
    is_early: bool = False
    recovered: float = 0.0
    swings: int = 0
    noise: float = 0.0
    slope: float = 0.0
    width: int = FEW

    @property
    def breaks_down(self) -> bool:
        """True if the curve falls by more than noise, whether it recovers or not."""
        return self.kind in ("falls", "collapses", "dips", "swings")


def judge_course(points: Points, spread: float = 0.0) -> Course:
    """Return how a curve of (step, value) went. spread: standard deviation of what is averaged in a value, if known.

    >>> judge_course([(step, 0.9 - 0.02 * step) for step in range(40)]).kind
    'collapses'
    """
    values = [value for _, value in points]
    if not values:
        return Course()
    first, last = fmean(values[:FEW]), fmean(values[-FEW:])
    slope, error = _fit_line(values)
    if len(values) < 2 * FEW:
        return Course(first=first, last=last, best=max(first, last), slope=slope)
    width = max(FEW, len(values) // 20)
    sums = list(accumulate(values, initial=0.0))
    means = [(after - before) / width for before, after in zip(sums, sums[width:], strict=False)]
    noise = _measure_noise(values) / math.sqrt(width)
    top = bottom = peak = 0
    for place, mean in enumerate(means):
        peak = place if mean > means[peak] else peak
        if means[peak] - mean > means[top] - means[bottom]:
            top, bottom = peak, place
    high, low, end, best = means[top], means[bottom], means[-1], max(means)
    fall, lost = high - low, best - end
    height = max(map(abs, means))
    half = next(place for place in range(top, len(means)) if means[place] <= (high + low) / 2)
    recovered = (end - low) / fall if fall else 0.0
    swings = _count_falls(means, max(fall / 2, _BREAKDOWN / 2 * height, _NOISE * noise))

    breaks = fall > _NOISE * noise and fall >= _BREAKDOWN * height
    large = lost >= _FALL * height or 0 < spread <= lost >= _FALL / 2 * height
    falls = large and lost >= (best - first) / 3 and (lost > 8 * noise or slope < -4)
    if breaks and swings >= 3:
        kind = "swings"
    elif breaks and recovered >= 1 / 3:
        kind = "dips"
    elif falls:
        kind = "collapses" if lost >= _BREAKDOWN * height else "falls"
    elif slope > 2 or last - first > _NOISE * noise:
        kind = "rises"
    else:
        kind = "noisy" if error > max(height, spread) / 8 else "flat"
    steps = [step for step, _ in points]
    high_at, low_at, half_at, early = steps[top], steps[bottom + width - 1], steps[half], half < len(values) / 4
    return Course(
        kind, first, last, best, high, high_at, low, low_at, half_at, early, recovered, swings, noise, slope, width
    )


class Measures:
    """Quantities of a run, None or 0 if they are unknown; `Course` has those of the reward.

    Rows after the first that holds a value which is not finite are left out, because they show its effect.
    """

    def __init__(self, rows: Rows, facts: RunFacts | None = None) -> None:
        self.facts = facts or RunFacts()
        self.config = self.facts.config
        self.turn_end = self.facts.turn_end
        self.rows = rows
        self._find_lost()
        self.steps = list_steps(self.rows)
        self.count = len(self.rows)
        spreads = self.values(STD) or [high - low for high, low in self._pairs("reward_max", "reward_min")]
        self.spread = median(self.values(STD) or [0.0])
        self.course = judge_course(self.points(REWARD), self.spread)
        self.breaks_down = self.course.breaks_down
        self._measure_ties(spreads)
        self._measure_reward(spreads)
        self._measure_lengths()
        self._measure_policy()
        self._measure_gradient()
        self._measure_parts()
        self._measure_settings()
        self.early = " within the first quarter of the steps" * self.course.is_early
        self.recovery = " in part" * (self.course.recovered < 0.8)
        self.gradient = ", although there is a gradient" * self.has_gradient

    # ---- the log ----

    def points(self, key: str) -> Points:
        """Return the steps and the finite values of a metric."""
        pairs = zip(self.steps, (row.get(key) for row in self.rows), strict=True)
        return [(step, value) for step, value in pairs if value is not None and math.isfinite(value)]

    def values(self, key: str) -> list[float]:
        """Return the finite values of a metric."""
        return [value for _, value in self.points(key)]

    @cached_property
    def quantities(self) -> dict[str, Any]:
        """Everything that a text may name."""
        config = {} if self.config is None else self.config.to_dict()
        return {**config, **vars(self.course), **vars(self)}

    def _pairs(self, one: str, other: str) -> list[tuple[float, float]]:
        pairs = [(row.get(one), row.get(other)) for row in self.rows]
        finite = [(a, b) for a, b in pairs if a is not None and b is not None]
        return [(a, b) for a, b in finite if math.isfinite(a) and math.isfinite(b)]

    def _ends(self, key: str) -> tuple[float | None, float | None]:
        """Return the means of the first and of the last few steps."""
        values = self.values(key)
        return (fmean(values[:FEW]), fmean(values[-FEW:])) if values else (None, None)

    def _find_lost(self) -> None:
        """Find the first step with a number that is not finite, and leave the rows from there on out."""
        steps = list_steps(self.rows)
        lost = [place for place, row in enumerate(self.rows) if lost_names(row)]
        self.lost = self.lost_step = self.lost_rate = self.last_norm = self.median_norm = None
        self.never_kl = False
        if not lost or len(lost) < 3 and lost[-1] < len(steps) - 1:  # a scaler skips a gradient that overflowed
            return
        names = sorted({name for place in lost for name in lost_names(self.rows[place])})
        self.never_kl = names == ["kl"] and len(lost) == len(self.rows)
        self.lost, self.lost_step = "`, `".join(names), steps[lost[0]]
        rates = [row.get("learning_rate") for row in self.rows[: lost[0] + 1]]
        self.lost_rate = rates[-1]
        if not self.never_kl:
            self.rows = self.rows[: lost[0]]
        norms = [norm for row in self.rows if (norm := row.get("grad_norm")) is not None]
        if norms:
            self.last_norm, self.median_norm = norms[-1], median(norms)

    # ---- quantities ----

    def _measure_ties(self, spreads: list[float]) -> None:
        """Measure the share of tied groups; it is 1 for a step without different rewards, if only these are logged."""
        ties = self.values(TIED)
        if not ties and any(spread == 0 for spread in spreads):
            ties = [float(spread == 0) for spread in spreads]
        self.has_ties = bool(ties)
        self.first_ties = min(ties[0], fmean(ties[:2])) if ties else None
        self.mean_ties = fmean(ties) if ties else None
        self.last_ties = fmean(ties[-FEW:]) if ties else None
        self.begins_tied = bool(ties) and fmean(ties[:FEW]) >= 0.9

    def _measure_reward(self, spreads: list[float]) -> None:
        rewards, course = self.values(REWARD), self.course
        self.highest = max(rewards, default=None)
        self.is_negative = bool(rewards) and min(rewards) < 0
        is_share = bool(rewards) and 0 <= min(rewards) <= max(rewards) <= 1
        most = self.values("reward_max") or [1.0] * is_share
        self.most_paid = max(most, default=math.inf)  # the highest reward of a completion, if it is known
        self.is_solved = fmean(rewards or [0]) >= 0.9 * self.most_paid
        self.ends_solved = course.last >= 0.9 * self.most_paid
        self.begins_high = course.first > 0.8 * self.most_paid

        ends = max(abs(course.first), abs(course.last))
        is_alike = fmean(spreads) <= 0.25 if spreads else ends < 0.01
        is_alike = self.mean_ties >= 0.7 if self.mean_ties is not None else is_alike
        self.is_unpaid = bool(rewards) and ends <= 0.05 and is_alike
        self.is_constant = bool(rewards) and max(rewards) - min(rewards) < 1e-6 and self.mean_ties in (None, 1.0)
        self.begins_constant = bool(rewards) and max(rewards[:FEW]) - min(rewards[:FEW]) < 0.02
        self.completions_per_step, self.groups = completions, groups = self._find_sizes()
        self.sizes = f"{groups} group{'s' if groups > 1 else ''} of {completions // groups}" if groups else None

        name = next((key for key in ("accuracy", *self._keys()) if is_accuracy(key) and self.values(key)), "")
        self.accuracy_name, self.accuracy = name, judge_course(self.points(name))
        self.accuracy_first, self.accuracy_last = self._ends(name)
        self.level = max(course.best, self.accuracy.best, *(self.values(name) or [course.best]))

    def _measure_lengths(self) -> None:
        self.length_first, self.length_last = self._ends(LENGTH)
        cut_first, cut_last = self._ends(CUT)
        self.first_cut = cut_first  # None if it is not logged
        self.limit = self.limit_share = None
        lengths = self.values(LENGTH)
        if cut_first is None and len(lengths) >= 2 * FEW:
            share = fmean([length == max(lengths) for length in lengths])
            if share >= 0.8 and max(lengths).is_integer():  # a mean of completions that end is hardly ever the same
                self.limit, self.limit_share = max(lengths), share
                cut_first, cut_last = (fmean([x == self.limit for x in xs]) for xs in (lengths[:FEW], lengths[-FEW:]))
        self.cut_first, self.cut_last = cut_first or 0.0, cut_last or 0.0
        is_shown = max(self.cut_first, self.cut_last) >= 0.02
        change = f"{self.cut_first:.0%} at first and {self.cut_last:.0%} in the end"
        change = change if self.count > FEW else f"{self.cut_first:.0%}"  # no step is both the first and the last
        self.cut_change = change if is_shown else None
        self.often_cut = max(self.cut_first, self.cut_last) > 0.1
        if self.course.kind == "rises":
            self.often_cut = self.cut_last > 0.1
        self.always_cut = min(self.cut_first, self.cut_last) >= 0.9
        uncut = 1 - self.cut_last  # what those that end could earn alone
        self.cut_is_paid = self.course.last > max(uncut + 0.05, 0.5) * self.most_paid

    def _measure_policy(self) -> None:
        """Measure the KL from the reference, its weight in the loss, the entropy, and clipped tokens."""
        kl = self.values("kl")
        half = len(kl) // 2
        self.has_kl = bool(kl)
        self.kl_first, self.kl_last = self._ends("kl")
        self.kl_weight = self._find_kl_weight()
        large = 10.0 if self.course.kind == "rises" else 1.0
        self.is_runaway = len(kl) >= 2 * FEW and fmean(kl[-FEW:]) >= max(large, 10 * median(kl[:half]))
        self.kl_far = kl[0] if kl and kl[0] > 0.5 else None
        self.kl_before = self.kl_after = None
        before, after = (median(kl[:half]), median(kl[half:])) if half else (0.0, 0.0)
        if self.kl_weight is None and self.kl_far is None and len(kl) >= ENOUGH and 0 < after <= 2 * before:
            self.kl_before, self.kl_after = before, after

        self.entropy_first, self.entropy_last = entropy = self._ends("entropy")
        first, last = entropy[0] or 0.0, entropy[1] or 0.0
        self.entropy_falls = last < 0.3 * first
        self.is_random = last > max(2.0, 4 * first)
        rewards = self.values(REWARD)
        is_stuck = len(rewards) >= 2 * FEW and _fit_line(rewards[len(rewards) // 2 :])[0] <= 2 and not self.ends_solved
        shows_no_way = self.last_ties is None or self.last_ties >= 0.7
        self.is_certain = bool(first) and last < 0.1 * first and is_stuck and shows_no_way

        clipped = self.values(CLIPPED)
        later = clipped[len(clipped) // 2 :]
        grows = len(clipped) >= 2 * FEW and clipped[0] == 0 and min(later) > 0 and fmean(later) >= 0.02
        self.clipped = fmean(later) if grows else None
        self.never_clipped = len(clipped) > 1 and not any(clipped)

    def _measure_gradient(self) -> None:
        norms, rates, losses = self.values("grad_norm"), self.values("learning_rate"), self.values("loss")
        self.has_gradient = any(norms)
        self.is_without_gradient = bool(norms) and not any(norms)
        self.no_gradient = "no step had a gradient, so the weights did not change" if self.is_without_gradient else None
        self.gradient_first, self.gradient_last = self._ends("grad_norm")
        self.largest_norm = max(norms, default=0.0)
        self.spread_first, self.spread_last = self._ends(STD)
        self.groups_differ = self.mean_ties < 0.9 if self.mean_ties is not None else self.spread > 0
        self.rates = len(rates) if len(rates) > 1 and not any(rates) else None
        starts_at_0 = bool(losses) and abs(losses[0]) < 0.005 and not self.is_without_gradient
        self.first_loss = losses[0] if starts_at_0 else None

    def _measure_parts(self) -> None:
        """Find the reward functions that pay the same for every completion, if there are others that do not."""
        names = [key[8:-4] for key in self._keys() if key.startswith("rewards/") and key.endswith("/std")]
        alike = [name for name in names if not any(self.values(f"rewards/{name}/std"))]
        same = {name: self.values(f"rewards/{name}/mean") for name in alike}
        same = {name: means for name, means in same.items() if len(set(means)) == 1}
        if len(same) == len(names):  # one reward alone: the groups tie, which is said elsewhere
            same = {}
        self.zero_parts = ", ".join(f"`{name}` pays 0" for name, means in same.items() if means[0] == 0) or None
        paid = (f"`{name}` pays {means[0]:g}" for name, means in same.items() if means[0] != 0)
        self.paid_parts = ", ".join(paid) or None

    def _measure_settings(self) -> None:
        """Measure what settings and evaluations say."""
        config, before, after = self.config, self.facts.before, self.facts.after
        self.warm_up = self.shortened_to = None
        if config and config.lr_scheduler_type != "constant" and config.warmup_steps >= config.max_steps:
            self.warm_up = config.warmup_steps
        if config and config.max_grad_norm and config.max_grad_norm < 1e-6 * self.largest_norm:
            self.shortened_to = config.max_grad_norm
        self.ties_matter = config is None or config.advantage_estimator != "none" or self.is_without_gradient
        masks_cut = config is not None and config.mask_truncated_completions and self.cut_first == 1
        self.masks_all = masks_cut and self.is_without_gradient
        self.has_small_groups = config is not None and config.num_generations < 4
        self.solved_before = None if before is None else before.accuracy
        self.solved_after = None if after is None else after.accuracy
        self.p_value = None
        self.accuracy_falls = False
        if before is not None and after is not None and after.k < before.k:
            from grpo_edu.evaluation import mcnemar  # only here, because it loads PyTorch

            self.p_value = mcnemar(before.correct, after.correct).p_value
            self.accuracy_falls = self.p_value < 0.05
        last = after or before
        self.completions = None if last is None else last.n
        self.readable = None if last is None else _count_readable(last)
        self.readable_before = None if before is None or after is None else _count_readable(before)
        few = 0.05 * (self.completions or 0)
        self.has_no_answers = self.readable is not None and self.readable <= few
        self.loses_format = self.readable_before is not None and self.readable_before > few

    # ---- helpers ----

    def _keys(self) -> dict[str, None]:
        return dict.fromkeys(key for row in self.rows for key in row)

    def _find_sizes(self) -> tuple[int, int]:
        """Return completions and groups of a step, if each reward is 0 or 1; 0 if that does not fit.

        They are the fewest that explain all values: a mean of B rewards that are 0 or 1 is a multiple of 1/B, and a
        share of M groups a multiple of 1/M.
        """
        rewards, ties = self.values(REWARD), self.values(TIED)
        is_enough = min(len(rewards), len(ties)) >= 2 * FEW and len(set(rewards)) >= 3
        if not is_enough or not 0 <= min(rewards) <= max(rewards) <= 1:
            return 0, 0
        for groups in range(1, 33):
            for size in range(2, 17):
                if _are_multiples(ties, groups) and _are_multiples(rewards, groups * size):
                    return groups * size, groups
        return 0, 0

    def _find_kl_weight(self) -> float | None:
        """Return the loss as a multiple of the KL where that is largest: the weight of the KL term, with its sign.

        The policy loss is near 0 whatever it teaches, so what is left of the loss is the KL term. None if the KL is too
        small, or the sign is not the same in 9 of 10 such steps.
        """
        pairs = self._pairs("loss", "kl")
        limit = max((kl for _, kl in pairs), default=0.0) / 4
        ratios = [loss / kl for loss, kl in pairs if kl and kl >= limit]
        if len(ratios) < FEW:
            return None
        weight = median(ratios)
        agree = sum(ratio * weight > 0 for ratio in ratios)
        return weight if agree >= 0.9 * len(ratios) and abs(weight) * limit >= 0.005 else None


def list_steps(rows: Rows) -> list[int]:
    """Return the number of each row's step; a row without one is counted."""
    return [int(row.get("step") or number) for number, row in enumerate(rows, 1)]


def lost_names(row: Mapping[str, float | None]) -> list[str]:
    """Return the metrics of a step that have a value which is not finite."""
    names = ("loss", "grad_norm", REWARD, "kl", "entropy")
    return [name for name in names if name in row and ((value := row[name]) is None or not math.isfinite(value))]


def is_accuracy(key: str) -> bool:
    """Return True for the accuracy, or for a reward function that is called one."""
    part = key.startswith("rewards/") and key.endswith("/mean")
    return key == "accuracy" or part and any(word in key for word in ("accuracy", "correct"))


def _count_falls(means: Sequence[float], least: float) -> int:
    """Return how many times a curve falls by `least` or more and has risen as much in between."""
    falls, top, bottom, is_falling = 0, means[0], means[0], False
    for mean in means:
        top, bottom = max(top, mean), min(bottom, mean)
        if not is_falling and top - mean >= least:
            falls, is_falling, bottom = falls + 1, True, mean
        elif is_falling and mean - bottom >= least:
            is_falling, top = False, mean
    return falls


def _measure_noise(values: Sequence[float]) -> float:
    """Return the standard deviation of a value from its neighbors; the largest tenth of the changes is left out."""
    squares = sorted((later - earlier) ** 2 for earlier, later in zip(values, values[1:], strict=False))
    kept = squares[: -max(1, len(squares) // 10)]
    return 1.27 * math.sqrt(fmean(kept) / 2)  # 1.27: what leaving them out takes from a normal distribution


def _fit_line(values: Sequence[float]) -> tuple[float, float]:
    """Return the rise of the straight line through the values, in standard errors, and the standard error."""
    count = len(values)
    if count < 3:
        return 0.0, math.inf
    middle, center = (count - 1) / 2, fmean(values)
    square = sum((place - middle) ** 2 for place in range(count))
    slope = sum((place - middle) * (value - center) for place, value in enumerate(values)) / square
    rest = sum((value - center - slope * (place - middle)) ** 2 for place, value in enumerate(values))
    error = max(math.sqrt(rest / (count - 2) / square), 1e-12)
    return slope / error, error * (count - 1)


def _are_multiples(values: Sequence[float], parts: int) -> bool:
    """Return True if all values are multiples of 1/parts, as far as four digits say."""
    return all(abs(value * parts - round(value * parts)) <= 0.001 * parts for value in values)


def _count_readable(evaluation: Evaluation) -> int:
    return sum(answer is not None for answer in evaluation.answers)
