"""Diagnose a GRPO run from nothing but its log: the decision tree of notebook 12, and what it cannot decide.

The rules read the metrics of each logged step under TRL's keys, which `grpo_edu.runs.metric_logs` makes of the logs of
several trainers. They know neither the settings nor the samples. `grpo_edu.runs.symptoms` knows both, shares some of
the questions (`first_ties`, `often_cut_off`, ...), and warns at the end of this package's own runs.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

REWARD, TIED, STD = "reward", "frac_reward_zero_std", "reward_std"
LENGTH, CUT, CLIPPED = "completions/mean_length", "completions/clipped_ratio", "clip_ratio/region_mean"

_FEW = 4  # steps at the beginning and at the end whose mean is compared
_ENOUGH = 16  # steps from which on a trend is judged
_BY_HAND = "Check one batch by hand, as section 5 of notebook 12 does"


@dataclass(frozen=True)
class Cause:
    """A likely cause: a short name for the fault, what it is in a sentence, and what to try."""

    fault: str
    what: str
    remedy: str


@dataclass(frozen=True)
class Finding:
    """What the log shows, the numbers that show it, and the likely causes, the likeliest first."""

    sees: str
    evidence: tuple[str, ...]
    causes: tuple[Cause, ...]


@dataclass(frozen=True)
class Diagnosis:
    """What a log says: findings, what looks odd but is normal, and what this log cannot tell.

    steps: the first and the last logged step. count: how many were logged.
    """

    steps: tuple[int, int]
    count: int
    findings: tuple[Finding, ...]
    normal: tuple[str, ...]
    unknown: tuple[str, ...]


# The first twelve are the faults of `grpo_edu.studies.broken_runs`, under the same names.
CAUSES = {
    cause.fault: cause
    for cause in (
        Cause(
            "reward always 0",
            "The reward function cannot read the answers.",
            "Call it with ten completions of this model, some of them right, and print what it pays.",
        ),
        Cause(
            "chat template skipped",
            "The prompt lacks the chat template that the model was trained with.",
            "Print one prompt with its special tokens, and read ten samples.",
        ),
        Cause(
            "length truncation",
            "Completions are cut off before they reach an answer.",
            "Raise `max_completion_length` (in verl `max_response_length`) until almost none is cut off.",
        ),
        Cause(
            "tied rewards",
            "The reward pays for something that every completion has.",
            "Call the reward function with wrong completions: it should pay them less.",
        ),
        Cause(
            "G too small",
            "A step has too few completions.",
            "Sample 8 or more per prompt, for several prompts per step.",
        ),
        Cause(
            "std float trap",
            "Tied groups get an advantage, which is a rounding error divided by almost 0.",
            "Pass a group of equal rewards to the advantage function: it should return zeros.",
        ),
        Cause(
            "groups mixed",
            "The advantages reach the completions of other groups.",
            f"{_BY_HAND}: each advantage should have the sign of the reward minus the mean of its own group.",
        ),
        Cause(
            "mask off by one",
            "The loss misses some tokens, for example the first of each completion.",
            f"{_BY_HAND}: print which tokens the mask of the loss covers.",
        ),
        Cause(
            "EOS masked",
            "The token that ends a completion counts as padding, so stopping is not trained.",
            f"{_BY_HAND}: the mask should include the first EOS.",
        ),
        Cause(
            "lr too high",
            "The learning rate is too high: a step changes the policy more than it can survive.",
            "Go back to the last good checkpoint, and divide the learning rate by 3 to 10.",
        ),
        Cause(
            "stale old log-probabilities",
            "The old log-probabilities are not those of the policy that sampled the batch.",
            "Compute them again for each batch: before its first update every ratio is 1.",
        ),
        Cause(
            "KL wrong sign",
            "The KL term is subtracted, so the loss pays for leaving the reference policy.",
            "Compute the term for two log-probabilities that differ: it should be added to the loss, and be positive.",
        ),
        Cause(
            "KL weight too small",
            "Nothing holds the policy near the reference.",
            "Raise `beta` (in verl `kl_loss_coef`), or stop at the step with the highest reward.",
        ),
        Cause(
            "KL weight too large",
            "The KL term holds the policy at the reference.",
            "Lower `beta` (in verl `kl_loss_coef`), for example to a tenth, or to 0.",
        ),
        Cause(
            "problems too hard",
            "The model solves none of these problems.",
            "Try easier ones, a larger model, or a short supervised training first.",
        ),
        Cause("problems too easy", "The model solves almost all of these problems.", "Choose harder ones."),
        Cause(
            "too little variety",
            "The completions of a group are alike.",
            "Raise `temperature` or `num_generations`, and read the samples of one group.",
        ),
        Cause(
            "entropy collapse",
            "The policy has become almost deterministic.",
            "Lower the learning rate, or raise `temperature`, `epsilon_high` (clip higher) or `beta`.",
        ),
        Cause(
            "reward for something else",
            "The reward pays for something other than the task, such as short or well-formed answers.",
            "Read the samples with the highest reward, and measure held-out accuracy.",
        ),
        Cause(
            "length in the loss",
            "Dividing each completion's loss by its own length favors short right answers.",
            'Compare `loss_type="dr_grpo"` or "dapo" (notebook 06).',
        ),
        Cause(
            "not finite",
            "A number overflowed: in half precision, in a ratio, or in a reward that is not finite.",
            "Load the last checkpoint before that step, use bfloat16 or float32 instead of float16, lower the learning "
            "rate, and look for rewards and log-probabilities that are not finite.",
        ),
        Cause(
            "no reference",
            "The KL from the reference cannot be computed.",
            "Check the reference model: its number format, and whether its weights were loaded.",
        ),
        Cause(
            "nothing trained",
            "The gradient does not reach the weights: they are frozen, an adapter is inactive, or the mask is 0.",
            "Count the parameters with `requires_grad`, and the tokens that the mask of the loss covers.",
        ),
        Cause("lr is 0", "The learning rate is 0.", "Check schedule and warm-up: the number of steps may be wrong."),
        Cause(
            "lr too low",
            "The learning rate is too low for the number of steps.",
            "Multiply it by 3 to 10, and watch whether the reward moves.",
        ),
    )
}


class MetricLog:
    """The logged steps of a run, and the finite values of a metric in them."""

    def __init__(self, rows: Sequence[Mapping[str, float | None]]) -> None:
        self.rows = rows
        self.steps = [int(row.get("step") or number) for number, row in enumerate(rows, 1)]

    def points(self, key: str) -> list[tuple[int, float]]:
        pairs = zip(self.steps, (row.get(key) for row in self.rows), strict=True)
        return [(step, value) for step, value in pairs if value is not None and math.isfinite(value)]

    def values(self, key: str) -> list[float]:
        return [value for _, value in self.points(key)]

    def ends(self, key: str) -> tuple[float, float] | None:
        """The means of the first and of the last four steps; None without the metric."""
        values = self.values(key)
        return (_mean(values[:_FEW]), _mean(values[-_FEW:])) if values else None

    def change(self, key: str, name: str) -> str:
        """The metric at both ends in words; "" without it."""
        ends = self.ends(key)
        return f"{name} `{key}` goes from {ends[0]:.3g} to {ends[1]:.3g}" if ends else ""

    def ties(self) -> list[float]:
        """The share of tied groups at each step, or 1 where no reward differs from another, as far as it is logged."""
        if shares := self.values(TIED):
            return shares
        spreads = [row[STD] if row.get(STD) is not None else _spread(row) for row in self.rows]
        return [float(spread == 0) for spread in spreads] if any(spread == 0 for spread in spreads) else []


def diagnose(rows: Sequence[Mapping[str, float | None]]) -> Diagnosis:
    """Ask the questions of notebook 12's decision tree, and a few more, of the logged steps of a run.

    Args:
        rows: one mapping per logged step, with "step" and metrics under TRL's keys; None and NaN are values that were
            not finite. What is not logged is left out of the mapping, and its questions are not asked.

    Raises ValueError: fewer than two steps, or no reward that is a number.

    >>> step = {"reward": 0.0, "frac_reward_zero_std": 1.0, "completions/clipped_ratio": 1.0, "grad_norm": 0.0}
    >>> (finding,) = diagnose([{"step": number, **step} for number in range(1, 9)]).findings
    >>> finding.sees, finding.causes[0].fault
    ('The reward is 0, or close to it, from the first step on.', 'length truncation')
    """
    rows = [row for row in rows if row.get(REWARD) is not None or _lost(row)]
    log = MetricLog(rows)
    if not log.values(REWARD):
        raise ValueError(
            "no step has a reward that is a finite number; if this is the log of a GRPO run, print what the reward "
            "function returns"
        )
    if len(rows) < 2:
        raise ValueError("this log has one step, and a diagnosis compares steps; log more of them (`logging_steps=1`)")
    found = [_not_finite(log), _no_gradient(log)]
    if found[0]:  # what comes after that step is its effect
        log = MetricLog(rows[: next(place for place, row in enumerate(rows) if _lost(row))])
    if log.values(REWARD) and not found[1]:
        tree = (_unpaid, _tied, _broken, _clipped, _cut_off, _collapsed, _flat)
        found += [next(filter(None, (ask(log) for ask in tree)), None), _constant(log)]
    log = MetricLog(rows)
    findings = tuple(finding for finding in found if finding)
    normal, unknown = tuple(_normal(log, findings)), tuple(_unknown(log))
    return Diagnosis((log.steps[0], log.steps[-1]), len(rows), findings, normal, unknown)


def diagnosis_text(diagnosis: Diagnosis) -> str:
    """The diagnosis as plain text, for a terminal or a notebook."""
    lines = [f"{diagnosis.count} logged steps, {diagnosis.steps[0]} to {diagnosis.steps[1]}.", ""]
    if not diagnosis.findings:
        lines += ["Nothing in this log points to a fault. That is no proof: see what it cannot tell.", ""]
    for number, finding in enumerate(diagnosis.findings, 1):
        lines.append(f"{number}. {finding.sees}")
        lines += [_item("   - ", text) for text in finding.evidence]
        lines.append("   Likely causes, the likeliest first, and what to try:")
        pairs = zip("abcdef", finding.causes, strict=False)
        lines += [_item(f"   {letter}) ", f"{cause.what} {cause.remedy}") for letter, cause in pairs]
        lines.append("")
    for title, texts in (("Normal here:", diagnosis.normal), ("What this log cannot tell:", diagnosis.unknown)):
        lines += [title, *(_item("- ", text) for text in texts), ""] if texts else []
    return "\n".join(lines).rstrip()


def _item(mark: str, text: str) -> str:
    """An item of a list in lines of at most 100 characters."""
    indent = " " * len(mark)
    return textwrap.fill(text, 100, initial_indent=mark, subsequent_indent=indent, break_long_words=False)


# ---- questions that `grpo_edu.runs.symptoms` asks too ----


def first_ties(log: MetricLog) -> float:
    """The share of tied groups in the first two steps, or in the first if it is smaller there; 0 if it is not known."""
    ties = log.ties()
    return min(ties[0], _mean(ties[:2])) if ties else 0.0


def often_cut_off(log: MetricLog) -> tuple[float, float] | None:
    """The shares of completions that are cut off at first and at last, if one is above a tenth."""
    shares = log.ends(CUT)
    return shares if shares and max(shares) > 0.1 else None


def becomes_random(log: MetricLog) -> tuple[float, float] | None:
    """The entropy at first and at last, nats per token, if the policy ends by choosing its tokens almost at random."""
    entropy = log.ends("entropy")
    return entropy if entropy and entropy[1] > max(2.0, 4 * entropy[0]) else None


def becomes_certain(log: MetricLog) -> tuple[float, float] | None:
    """The entropy at first and at last, if it collapses while much reward is left to earn and no group shows how."""
    entropy, ties, rewards = log.ends("entropy"), log.ties(), log.values(REWARD)
    if not entropy or len(rewards) < 2 * _FEW or entropy[1] >= 0.1 * entropy[0]:
        return None
    stuck = not _rises(rewards[len(rewards) // 2 :]) and _mean(rewards[-_FEW:]) < 0.9 * _highest_paid(log)
    return entropy if stuck and (not ties or _mean(ties[-_FEW:]) >= 0.7) else None


def constant_rewards(log: MetricLog) -> list[str]:
    """The names of reward functions that pay the same for every completion, if there are others that do not."""
    names = [key[8:-4] for key in _keys(log) if key.startswith("rewards/") and key.endswith("/std")]
    same = [name for name in names if not any(log.values(f"rewards/{name}/std"))]
    same = [name for name in same if len(set(log.values(f"rewards/{name}/mean"))) == 1]
    return same if len(same) < len(names) else []  # one reward alone: the groups tie, which is said elsewhere


# ---- the questions of the tree ----


def _unpaid(log: MetricLog) -> Finding | None:
    """Is the reward at or near 0 from the first step on, without differences between completions?"""
    first, last = log.ends(REWARD) or (1.0, 1.0)
    if max(abs(first), abs(last)) > 0.05:
        return None
    ties, spreads = log.ties(), log.values(STD) or [spread for row in log.rows if (spread := _spread(row)) is not None]
    alike = _mean(ties) >= 0.7 if ties else _mean(spreads) <= 0.25 if spreads else max(abs(first), abs(last)) < 0.01
    if not alike:
        return None  # rewards of both signs, for example
    highest = max(log.values(REWARD))
    evidence = [f"`reward` is {first:.3g} at first and at most {highest:.3g} in any step", *_tie_evidence(log)]
    cut = (log.ends(CUT) or (0.0, 0.0))[0]
    if CUT in _keys(log):
        evidence.append(f"{cut:.0%} of the first completions were cut off at the length limit (`{CUT}`)")
    if cut >= 0.3:
        order: tuple[str, ...] = ("length truncation", "chat template skipped", "reward always 0", "problems too hard")
    elif cut >= 0.02:  # some completions do not find their end, as those of a model that is not asked in its format
        order = ("chat template skipped", "reward always 0", "problems too hard", "length truncation")
    else:
        order = ("reward always 0", "problems too hard", "chat template skipped")
    return _finding("The reward is 0, or close to it, from the first step on.", evidence, order)


def _tied(log: MetricLog) -> Finding | None:
    """Do half of the groups tie, or more, from the first step on, so that the reward does not rise?"""
    ties, (first, last) = log.ties(), log.ends(REWARD) or (0.0, 0.0)
    if not ties:
        return None
    completions, groups = _sizes(log)
    small = 0 < completions <= 4 and _mean(ties) >= 0.4
    many = first_ties(log) >= 0.5 and last < first + 0.1
    if not small and not many:
        return None
    evidence = _tie_evidence(log)
    if completions:
        size = f"{groups} group{'s' if groups > 1 else ''} of {completions // groups}"
        evidence.append(f"all values of `reward` and `{TIED}` fit steps with {size}, if each reward is 0 or 1")
    evidence.append(log.change(REWARD, "the reward"))
    same = max(log.values(REWARD)[:_FEW]) - min(log.values(REWARD)[:_FEW]) < 0.02
    if small or 0 < completions <= 3 * groups:
        order: tuple[str, ...] = ("G too small", "too little variety")
    elif same and _mean(ties[:_FEW]) >= 0.9:
        order = ("tied rewards", "problems too easy", "too little variety")
    elif first > 0.8:
        order = ("problems too easy", "tied rewards", "too little variety")
    else:
        order = ("G too small", "too little variety", "tied rewards", "problems too hard")
    return _finding("Half of the groups or more tie from the first steps on, and teach nothing.", evidence, order)


def _broken(log: MetricLog) -> Finding | None:
    """Does the reward break down, does the KL run away, or does the policy become random?"""
    if len(log.values(REWARD)) < 2 * _FEW:
        return None
    kl, fall, random = log.values("kl"), _fall(log.points(REWARD)), becomes_random(log)
    runaway = len(kl) >= 2 * _FEW and _mean(kl[-_FEW:]) >= max(1.0, 10 * median(kl[: len(kl) // 2]))
    if not (fall or runaway or random):
        return None
    evidence, early = [], False
    if fall:
        high, low, step, early = fall
        evidence.append(f"`reward` falls from {high:.3g} to {low:.3g}; half of the fall is over at step {step}")
    evidence += [log.change("kl", "the KL"), log.change("entropy", "the entropy"), log.change(LENGTH, "the length")]
    weight = _kl_weight(log)
    if weight is not None and weight < 0 and (runaway or fall):
        evidence.append(
            f"the loss falls as the KL grows: `loss` is about {weight:.2g} times `kl` where that is largest"
        )
        order: tuple[str, ...] = ("KL wrong sign", "lr too high")
    elif runaway and weight is None and not early:
        order = ("KL wrong sign", "lr too high", "KL weight too small")
    elif runaway or kl:
        order = (
            ("lr too high", "KL weight too small")
            if weight
            else ("lr too high", "KL weight too small", "KL wrong sign")
        )
    else:
        order = ("lr too high", "KL weight too small", "reward for something else")
    sees = "The reward breaks down" if fall else "The KL runs away" if runaway else "The policy becomes random"
    sees += " within the first quarter of the steps." if fall and early else "."
    return _finding(sees, evidence, order)


def _clipped(log: MetricLog) -> Finding | None:
    """Are more and more tokens clipped, after a first step without any?

    With several updates per batch the first of each has ratio 1 and clips nothing, or, where a log adds them up, the
    first logged step has clipped tokens already. Old log-probabilities that stay behind begin at 0 and never return.
    """
    values = log.values(CLIPPED)
    later = values[len(values) // 2 :]
    if len(values) < 2 * _FEW or values[0] > 0 or min(later) == 0 or _mean(later) < 0.01:
        return None
    evidence = (f"`{CLIPPED}` is 0 at first, and {_mean(later):.1%} on average in the second half, never 0 there",)
    return _finding("More and more tokens are clipped.", evidence, ("stale old log-probabilities", "lr too high"))


def _cut_off(log: MetricLog) -> Finding | None:
    """Are many completions cut off, although some reward comes in?"""
    if not (cut := often_cut_off(log)):
        return None
    evidence = [f"`{CUT}` goes from {cut[0]:.0%} to {cut[1]:.0%}", log.change(LENGTH, "the length")]
    return _finding(
        "Many completions are cut off, so the run teaches brevity instead of the task.",
        evidence,
        ("length truncation",),
    )


def _collapsed(log: MetricLog) -> Finding | None:
    """Has the policy become deterministic, or its completions very short, before the reward is at its height?"""
    if len(log.rows) < _ENOUGH:
        return None
    length = log.ends(LENGTH)
    if length and length[1] < 0.3 * length[0]:
        evidence = [log.change(LENGTH, "the length"), log.change(REWARD, "the reward")]
        order: tuple[str, ...] = ("reward for something else", "length in the loss", "lr too high")
        return _finding("The completions become much shorter.", evidence, order)
    if becomes_certain(log):
        evidence = [log.change("entropy", "the entropy"), log.change(REWARD, "the reward"), *_tie_evidence(log, "last")]
        order = ("entropy collapse", "lr too high")
        return _finding("The entropy collapses before the problems are solved.", evidence, order)
    return None


def _flat(log: MetricLog) -> Finding | None:
    """Is there a gradient, although the reward does not rise by more than its noise?"""
    rewards, ties = log.values(REWARD), log.ties()
    if len(rewards) < _ENOUGH or _rises(rewards) or (ties and _mean(ties) >= 0.5) or not any(log.values("grad_norm")):
        return None
    if _mean(rewards) >= 0.9 * _highest_paid(log):
        return None
    evidence = [
        f"{log.change(REWARD, 'the reward')}, which is within its noise",
        log.change("grad_norm", "the gradient"),
    ]
    weight = _kl_weight(log)
    order: tuple[str, ...] = ("mask off by one", "groups mixed", "lr too low", "problems too hard")
    if weight is not None and weight > 0.1:
        evidence.append(f"`loss` is about {weight:.2g} times `kl`, so the weight of the KL term is about that")
        order = ("KL weight too large", *order[:3])
    elif weight is None and (kl := log.values("kl")):
        half = len(kl) // 2
        before, after = median(kl[: half or 1]), median(kl[half:])
        held = len(kl) >= _ENOUGH and 0 < after <= 2 * before
        order = ("KL weight too large", *order[:3]) if held else (*order, "KL weight too large")
        if held:
            evidence.append(
                f"the policy stays near the reference: the median `kl` is {before:.2g} in the first half of the steps "
                f"and {after:.2g} in the second"
            )
    evidence.append("the curves do not tell which of these causes it is")
    return _finding("There is a gradient, but the reward does not rise.", evidence, order)


# ---- what is asked of every log ----


def _not_finite(log: MetricLog) -> Finding | None:
    """Do loss, gradient, reward or KL stop being numbers?"""
    lost = [step for step, row in zip(log.steps, log.rows, strict=True) if _lost(row)]
    if len(lost) < 3 and log.steps[-1] not in lost:  # a single gradient that overflowed is skipped by the scaler
        return None
    where = dict(zip(log.steps, log.rows, strict=True))
    names = sorted({name for step in lost for name in _lost(where[step])})
    evidence = [f"`{'`, `'.join(names)}` {'is' if len(names) == 1 else 'are'} not finite from step {lost[0]} on"]
    if names == ["kl"] and len(lost) == len(log.rows):
        return _finding("The KL is not a finite number in any step.", evidence, ("no reference", "not finite"))
    rates = [(step, rate) for step, rate in log.points("learning_rate") if step <= lost[0]]
    if len(rates) > 1:
        rising = "still rising to" if rates[-1][1] >= max(rate for _, rate in rates) > rates[0][1] else "at"
        evidence.append(f"the learning rate was {rising} {rates[-1][1]:.2g} then")
    norms = [(step, norm) for step, norm in log.points("grad_norm") if step < lost[0]]
    if norms:
        evidence.append(
            f"the last finite `grad_norm` was {norms[-1][1]:.3g}, and the median before {_median(norms):.3g}"
        )
    return _finding("Some numbers are no longer finite.", evidence, ("not finite", "lr too high"))


def _no_gradient(log: MetricLog) -> Finding | None:
    """Is the gradient 0 although the groups differ, or the learning rate 0 throughout?"""
    norms, ties, rates = log.values("grad_norm"), log.ties(), log.values("learning_rate")
    if len(rates) > 1 and not any(rates):
        return _finding(
            "The learning rate is 0 in every step.", (f"`learning_rate` is 0 {len(rates)} times",), ("lr is 0",)
        )
    differ = _mean(ties) < 0.9 if ties else bool(log.values(STD)) and _mean(log.values(STD)) > 0
    if not norms or any(norms) or not differ:
        return None
    evidence = ["`grad_norm` is 0 in every step", *_tie_evidence(log), log.change(STD, "the spread of the rewards")]
    return _finding("There is no gradient, although completions differ in reward.", evidence, ("nothing trained",))


def _constant(log: MetricLog) -> Finding | None:
    """Does one of several reward functions pay the same for every completion?"""
    same = constant_rewards(log)
    if not same or len(log.rows) < 2 * _FEW:
        return None
    evidence = [f"`rewards/{name}/std` is 0 in every step" for name in same]
    return _finding(
        "A reward function pays the same for every completion.", evidence, ("reward always 0", "tied rewards")
    )


def _normal(log: MetricLog, findings: Sequence[Finding]) -> Iterable[str]:
    """Observations that worry many people but are normal."""
    losses, clipped, ties = log.values("loss"), log.values(CLIPPED), log.ties()
    norms = log.values("grad_norm")
    if losses and abs(losses[0]) < 0.005 and (any(norms) or not norms):
        yield (
            f"The loss starts at {losses[0]:.2g}: the advantages of a group add up to 0, and the ratio is 1, so the "
            "value is near 0 whatever the gradient is. With a KL term it grows as the policy moves. Watch the reward."
        )
    if len(clipped) > 1 and not any(clipped):
        yield "No token is clipped: with one update per batch the ratio is 1, so there is nothing to clip."
    if not findings and ties and _mean(ties[-_FEW:]) >= 0.5:
        yield f"{_mean(ties[-_FEW:]):.0%} of the last groups tie, because most are solved: less is left to learn."


_MISSING = {
    TIED: "how many groups tie",
    "grad_norm": "whether there is a gradient",
    CUT: "whether completions are cut off",
    "entropy": "whether the policy becomes deterministic or random",
    "kl": "how far the policy is from the reference, which TRL does not compute while `beta` is 0",
    CLIPPED: "whether tokens are clipped",
}


def _unknown(log: MetricLog) -> Iterable[str]:
    """Questions that this log cannot answer."""
    keys = _keys(log)
    missing = [
        f"{what} (`{key}`)" for key, what in _MISSING.items() if key not in keys and not (key == TIED and log.ties())
    ]
    if missing:
        yield f"It lacks metrics, so it does not say {'; '.join(missing)}."
    if len(log.rows) < _ENOUGH:
        yield f"{len(log.rows)} logged steps are too few to tell a trend from noise."
    yield "Whether the reward pays for right answers: read samples, and measure accuracy on held-out problems."
    yield (
        "Whether advantages, masks and old log-probabilities are right: with a fault in them every curve may look "
        "plausible. Check one batch by hand: section 5 of notebook 12 shows how, and its section 7 has a check to run "
        "before each training."
    )


# ---- numbers ----


def _finding(sees: str, evidence: Iterable[str], faults: Iterable[str]) -> Finding:
    return Finding(sees, tuple(text for text in evidence if text), tuple(CAUSES[fault] for fault in faults))


def _tie_evidence(log: MetricLog, where: str = "first") -> list[str]:
    ties = log.ties()
    if not ties:
        return []
    share = _mean(ties[:_FEW] if where == "first" else ties[-_FEW:])
    return [f"{share:.0%} of the groups tie in the {where} steps, and {_mean(ties):.0%} in all (`{TIED}`)"]


def _keys(log: MetricLog) -> dict[str, None]:
    return dict.fromkeys(key for row in log.rows for key in row)


def _spread(row: Mapping[str, float | None]) -> float | None:
    """The highest minus the lowest reward of a step, where both are logged (verl)."""
    high, low = row.get("reward_max"), row.get("reward_min")
    return None if high is None or low is None else high - low


def _highest_paid(log: MetricLog) -> float:
    """The highest reward that any completion got where that is logged, otherwise 1 or the highest mean."""
    return max(log.values("reward_max") or [1.0, *log.values(REWARD)])


def _lost(row: Mapping[str, float | None]) -> list[str]:
    """The metrics of a step that have a value which is not finite."""
    names = ("loss", "grad_norm", REWARD, "kl", "entropy")
    return [name for name in names if name in row and ((value := row[name]) is None or not math.isfinite(value))]


def _sizes(log: MetricLog) -> tuple[int, int]:
    """Completions and groups per step, if each reward is 0 or 1: the fewest that explain all values; (0, 0) if none do.

    A mean of B rewards that are 0 or 1 is a multiple of 1/B, and a share of M groups a multiple of 1/M.
    """
    rewards, ties = log.values(REWARD), log.values(TIED)
    if (
        len(rewards) < 2 * _FEW
        or len(ties) < 2 * _FEW
        or len(set(rewards)) < 3
        or not 0 <= min(rewards) <= max(rewards) <= 1
    ):
        return 0, 0
    for groups in range(1, 33):
        for size in range(2, 17):
            if _multiples(ties, groups) and _multiples(rewards, groups * size):
                return groups * size, groups
    return 0, 0


def _multiples(values: Sequence[float], parts: int) -> bool:
    """Whether all values are multiples of 1/parts, as far as four digits say."""
    return all(abs(value * parts - round(value * parts)) <= 0.001 * parts for value in values)


def _kl_weight(log: MetricLog) -> float | None:
    """The loss as a multiple of the KL where that is largest: the weight of the KL term, with its sign.

    The policy loss is near 0 whatever it teaches, so what is left of the loss is the KL term. None where the KL is too
    small, or the sign is not the same in 9 of 10 such steps.
    """
    pairs = [(row.get("loss"), row.get("kl")) for row in log.rows]
    known = [(loss, kl) for loss, kl in pairs if loss is not None and kl and math.isfinite(loss) and math.isfinite(kl)]
    limit = max((kl for _, kl in known), default=0.0) / 4
    ratios = [loss / kl for loss, kl in known if kl >= limit]
    if len(ratios) < _FEW:
        return None
    weight = median(ratios)
    agree = sum(ratio * weight > 0 for ratio in ratios)
    return weight if agree >= 0.9 * len(ratios) and abs(weight) * limit >= 0.005 else None


def _fall(points: Sequence[tuple[int, float]]) -> tuple[float, float, int, bool] | None:
    """Whether the reward ends below half of its height, by more than noise.

    Returns the highest moving mean, the last one, the step at which half of the fall is over, and whether that is in
    the first quarter of the run.
    """
    values = [value for _, value in points]
    width = max(_FEW, len(values) // 20)
    means = [_mean(values[start : start + width]) for start in range(len(values) - width + 1)]
    high, low = max(means), means[-1]
    changes = [later - earlier for earlier, later in zip(values, values[1:], strict=False)]
    noise = math.sqrt(_mean([change**2 for change in changes]) / 2)
    if high - low <= max(abs(high) / 2, 3 * noise / math.sqrt(width / _FEW)):
        return None
    top = means.index(high)
    under = next(place for place in range(top, len(values)) if _mean(values[place : place + width]) < (high + low) / 2)
    return high, low, points[under][0], under < len(values) / 4


def _rises(values: Sequence[float]) -> bool:
    """Whether a straight line through the values rises by more than twice its standard error."""
    count = len(values)
    if count < 3:
        return False
    middle, center = (count - 1) / 2, _mean(values)
    square = sum((place - middle) ** 2 for place in range(count))
    slope = sum((place - middle) * (value - center) for place, value in enumerate(values)) / square
    rest = sum((value - center - slope * (place - middle)) ** 2 for place, value in enumerate(values))
    return slope > 2 * math.sqrt(rest / (count - 2) / square)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _median(points: Sequence[tuple[int, float]]) -> float:
    return median(value for _, value in points)
