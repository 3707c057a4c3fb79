"""Diagnose a GRPO run: the decision tree of notebook 12, asked of its log, with or without its settings.

The course of the reward is judged first, from the reward itself. Ties, truncation, entropy, KL and length are evidence
for why, and a cause that the reward contradicts is not named. A rule is one entry of `QUESTIONS`: its condition on the
quantities of `grpo_edu.runs.measures`, the evidence that it shows, and its causes. The texts are in ``diagnosis.toml``.
"""

from __future__ import annotations

import re
import string
import textwrap
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from grpo_edu.runs.measures import ENOUGH, FEW, REWARD, TIED, Measures, Rows, RunFacts, list_steps, lost_names
from grpo_edu.runs.metric_logs import is_understood

MAX_NAMES = 12  # of the metrics that are not understood


@dataclass(frozen=True)
class Cause:
    """A likely cause: a short name for the fault, what it is in a sentence, and what to try."""

    fault: str
    what: str
    remedy: str


@dataclass(frozen=True)
class Finding:
    """One finding in a log, the numbers that show it, and the likely causes, the most likely first."""

    sees: str
    evidence: tuple[str, ...]
    causes: tuple[Cause, ...]


@dataclass(frozen=True)
class Diagnosis:
    """The diagnosis of a log: findings, what looks odd but is normal, and what it cannot tell.

    steps: the first and the last logged step. count: how many were logged.
    """

    steps: tuple[int, int]
    count: int
    findings: tuple[Finding, ...]
    normal: tuple[str, ...]
    unknown: tuple[str, ...]


Condition = Callable[[Measures], object]  # a true value holds


@dataclass(frozen=True)
class Rule:
    """If the condition holds, the log shows what `sees` names. `evidence` and `sees` are keys of diagnosis.toml."""

    sees: str
    holds: Condition
    evidence: tuple[str, ...]
    causes: tuple[str, ...]


@cache
def _load_texts() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("diagnosis.toml").read_text(encoding="utf-8"))


CAUSES = {fault: Cause(fault, **texts) for fault, texts in _load_texts()["causes"].items()}


def _may_be_too_short(m: Measures) -> bool:
    """Return True if enough completions are cut off that a greater length may help; gibberish never ends."""
    if m.breaks_down:
        return 0.3 <= m.cut_last < 0.9 and not m.is_random
    return max(m.cut_first, m.cut_last) >= (0.3 if m.is_unpaid else 0.1)


def _begins_alike(m: Measures) -> bool:
    return m.begins_constant and m.begins_tied


def _is_tied(m: Measures) -> bool:
    is_rising = m.course.kind == "rises" or m.course.last >= m.course.first + 0.1
    return (m.first_ties or 0) >= 0.5 and not is_rising


def _is_small(m: Measures, limit: int) -> bool:
    return 0 < m.completions_per_step <= limit


def _has_too_few(m: Measures) -> bool:
    return _is_small(m, 4) and (m.mean_ties or 0) >= 0.4


def _gets_short(m: Measures) -> bool:
    return (m.length_last or 0) < 0.3 * (m.length_first or 0)


def _is_flat(m: Measures) -> bool:
    """Return True if the reward could have risen, and did not."""
    is_judged = m.course.kind == "flat" and m.count >= ENOUGH and not m.is_without_gradient
    is_better = (m.solved_after or 0) > (m.solved_before or 0)
    return is_judged and (m.mean_ties or 0) < 0.5 and not m.is_solved and not is_better


_POLICY = ("kl", "entropy", "length", "cut", "limit", "accuracy_change")
_ALIKE = ("G too small", "too little variety", "tied rewards", "problems too hard", "problems too easy")
_CUT = ("cut", "limit", "length", "reward_change")
_BREAKDOWN = ("lr too high", "KL weight too small", "KL wrong sign", "entropy collapse", "length truncation")
_UNPAID = (
    "wrong end token", "length truncation", "reward always 0", "problems too hard", "chat template skipped", "no end"
)  # fmt: skip

# The first rule of each list that holds is reported.
QUESTIONS: tuple[tuple[Rule, ...], ...] = (
    (
        Rule("kl never finite", lambda m: m.never_kl, ("lost",), ("no reference", "not finite")),
        Rule("not finite", lambda m: m.lost, ("lost", "lost_rate", "last_gradient"), ("not finite", "lr too high")),
    ),
    (
        Rule("lr is 0", lambda m: m.rates, ("zero_rate",), ("lr is 0",)),
        Rule("cut off", lambda m: m.masks_all, ("no_gradient", "cut"), ("wrong end token", "masked truncation")),
        Rule("nothing trained", lambda m: m.is_without_gradient and m.groups_differ,
             ("zero_gradient", "ties", "spread"), ("nothing trained",)),
        Rule("unpaid", lambda m: m.is_unpaid,
             ("no_gradient", "reward_level", "solved_before", "ties", "first_cut", "limit"), _UNPAID),
        Rule("constant", lambda m: m.is_constant and m.ties_matter and m.count >= 2 * FEW,
             ("no_gradient", "ties", "solved_before", "first_cut"), (*_UNPAID, *_ALIKE)),
        Rule("swings", lambda m: m.course.kind == "swings", ("reward_fall", "reward_swings", *_POLICY),
             (*_BREAKDOWN, "other problems")),
        Rule("collapses", lambda m: m.course.kind == "collapses",
             ("reward_fall", "kl_weight", *_POLICY, "last_ties"), _BREAKDOWN),
        Rule("dips", lambda m: m.course.kind == "dips", ("reward_fall", "kl_weight", *_POLICY), _BREAKDOWN),
        Rule("falls", lambda m: m.course.kind == "falls", ("reward_fall", "kl_weight", *_POLICY, "last_ties"),
             (*_BREAKDOWN, "other problems")),
        Rule("hacked", lambda m: m.course.kind == "rises" and m.accuracy.breaks_down,
             ("reward_change", "accuracy_change", "length"), ("reward for something else",)),
        Rule("tied", lambda m: m.ties_matter and (_is_tied(m) or _has_too_few(m)),
             ("no_gradient", "ties", "reward_change", "solved_before", "sizes"),
             _ALIKE),
        Rule("runaway", lambda m: m.is_runaway, ("kl_weight", *_POLICY), _BREAKDOWN),
        Rule("random", lambda m: m.is_random, _POLICY, _BREAKDOWN),
        Rule("clipped", lambda m: m.clipped, ("clipped",), ("stale old log-probabilities", "lr too high")),
        Rule("short", lambda m: m.count >= ENOUGH and not m.ends_solved and _gets_short(m),
             ("length", "reward_change"), ("reward for something else", "length in the loss", "lr too high")),
        Rule("certain", lambda m: m.is_certain, ("entropy", "reward_change", "last_ties"),
             ("entropy collapse", "lr too high")),
        Rule("flat", _is_flat,
             ("reward_noise", "accuracy_change", "gradient", "cut", "limit", "kl_weight", "kl_held", "kl_reference",
              "unknown_cause"),
             ("wrong end token", "length truncation", "mask off by one", "groups mixed", "lr too low",
              "problems too hard", "KL weight too large")),
    ),
    (
        Rule("cut off, yet paid", lambda m: m.cut_is_paid and m.cut_last >= 0.5 and not m.masks_all,
             _CUT, ("wrong end token", "no end")),
        Rule("cut off", lambda m: m.often_cut and not (m.cut_is_paid or m.is_unpaid or m.breaks_down or m.masks_all),
             _CUT, ("wrong end token", "length truncation", "no end")),
    ),
    (Rule("constant part", lambda m: m.zero_parts and m.count > 2, ("zero_parts",), ("reward always 0",)),),
    (Rule("constant part", lambda m: m.paid_parts and m.count > 2, ("paid_parts",), ("tied rewards",)),),
    (
        Rule("no update", lambda m: m.facts.unchanged and m.has_gradient, ("max_grad_norm", "warm_up"),
             ("short gradients", "long warm-up", "rounded away")),
        Rule("long warm-up", lambda m: m.count and m.warm_up, ("warm_up",), ("long warm-up",)),
    ),
    (
        Rule("no answers", lambda m: m.has_no_answers,
             ("readable", "readable_before"), ("wrong end token", "lost answer format", "no answer format")),
    ),
    (
        Rule("accuracy falls", lambda m: m.accuracy_falls, ("accuracies", "reward_change"),
             ("lr too high", "reward for something else")),
    ),
)  # fmt: skip

# A cause that is not possible is not named. Those that are not listed here always are.
_POSSIBLE: dict[str, Condition] = {
    "reward always 0": lambda m: m.is_unpaid or m.zero_parts or m.is_constant and m.is_negative,
    "chat template skipped": lambda m: m.is_unpaid or m.is_negative,
    "length truncation": lambda m: not m.turn_end and _may_be_too_short(m),
    "wrong end token": lambda m: m.turn_end and m.cut_last >= 0.5,
    "no end": lambda m: m.always_cut and not m.turn_end,
    "tied rewards": lambda m: m.paid_parts or m.level > 0.05 and not m.has_small_groups,
    "G too small": lambda m: (
        m.has_small_groups or m.config is None and not m.is_constant and not m.begins_high and not _begins_alike(m)
    ),
    "problems too hard": lambda m: (
        m.level < 0.3 and (m.solved_before or 0) < 0.3 and (m.is_constant or not m.is_negative)
    ),
    "problems too easy": lambda m: m.begins_high or m.begins_constant and m.level > 0.9,
    "lr too low": lambda m: m.course.slope > -2,
    "reward for something else": lambda m: not m.breaks_down and m.course.last > 0.05,
    "KL wrong sign": lambda m: m.kl_weight < 0 if m.kl_weight is not None else m.has_kl,
    "KL weight too small": lambda m: m.kl_weight is None or m.kl_weight > 0,
    "KL weight too large": lambda m: m.has_kl and not m.is_runaway and m.kl_far is None,
    "entropy collapse": lambda m: m.entropy_falls,
    "short gradients": lambda m: m.shortened_to,
    "long warm-up": lambda m: m.warm_up,
    "rounded away": lambda m: not m.shortened_to and not m.warm_up,
    "lost answer format": lambda m: m.loses_format,
    "no answer format": lambda m: not m.loses_format,
}

_SAME_ENDS = re.compile(r"goes from (\S+) to \1(?![\w.]*\d)")

# A cause for which the log has evidence of its own comes before the others.
_SHOWN: dict[str, Condition] = {
    "wrong end token": lambda m: True,
    "length truncation": lambda m: max(m.cut_first, m.cut_last) >= 0.3 and not m.breaks_down,
    "chat template skipped": lambda m: m.cut_first >= 0.02,
    "KL wrong sign": lambda m: m.kl_weight is not None or m.is_runaway and not m.course.is_early,
    "KL weight too large": lambda m: (m.kl_weight or 0) > 0.1 or m.kl_before is not None,
    "entropy collapse": lambda m: m.is_certain and not m.breaks_down,
    "G too small": lambda m: m.has_small_groups or _has_too_few(m) or _is_small(m, 3 * m.groups),
    "tied rewards": lambda m: _begins_alike(m) and (m.solved_before or 0) < 0.9,
    "problems too easy": lambda m: m.begins_high or (m.solved_before or 0) >= 0.9,
    "reward for something else": lambda m: m.course.last > m.course.first,
}

# The code of this package and of TRL is tested for these.
_OF_CODE = {
    "mask off by one", "groups mixed", "std float trap", "EOS masked", "KL wrong sign", "stale old log-probabilities"
}  # fmt: skip


def diagnose(rows: Rows, facts: RunFacts | None = None) -> Diagnosis:
    """Ask the questions of notebook 12's decision tree, and a few more, of the logged steps of a run.

    Args:
        rows: one mapping per logged step, with "step" and metrics under TRL's keys; None and NaN are values that were
            not finite. What is not logged is left out of the mapping, and its questions are not asked.
        facts: what else is known about the run.

    Raises ValueError: fewer than two steps.

    >>> step = {"reward": 0.0, "frac_reward_zero_std": 1.0, "completions/clipped_ratio": 1.0, "grad_norm": 0.0}
    >>> (finding,) = diagnose([{"step": number, **step} for number in range(1, 9)]).findings
    >>> finding.sees, finding.causes[0].fault
    ('The reward is 0, or close to it, from the first step on.', 'length truncation')
    """
    has_reward = any(REWARD in row for row in rows)
    rows = [row for row in rows if row.get(REWARD) is not None or lost_names(row) or not has_reward]
    if len(rows) < 2:
        raise ValueError("this log has one step, and a diagnosis compares steps; log more of them (`logging_steps=1`)")
    measures = Measures(rows, facts)
    findings = find(measures)
    steps = list_steps(rows)
    normal, unknown = tuple(_list_normal(measures, findings)), tuple(_list_unknown(measures, rows, findings))
    return Diagnosis((steps[0], steps[-1]), len(rows), findings, normal, unknown)


def find(measures: Measures) -> tuple[Finding, ...]:
    """Return what the rules find. That completions are cut off is not a finding of its own if it explains another."""
    found: list[Finding] = []
    for rules in QUESTIONS:
        rule = next((rule for rule in rules if rule.holds(measures)), None)
        if rule is None:
            continue
        causes = tuple(_fill_cause(CAUSES[fault], measures) for fault in _order_causes(rule.causes, measures))
        if rule.sees == "cut off" and any(cause in earlier.causes for earlier in found for cause in causes):
            continue
        evidence = (_fill(_load_texts()["evidence"][name], measures) for name in rule.evidence)
        found.append(Finding(_fill(_load_texts()["sees"][rule.sees], measures), tuple(filter(None, evidence)), causes))
    return tuple(found)


def _order_causes(faults: Iterable[str], measures: Measures) -> list[str]:
    """Return the possible causes, those with evidence of their own first."""
    possible = [fault for fault in dict.fromkeys(faults) if _POSSIBLE.get(fault, lambda m: True)(measures)]
    if measures.config is not None:
        possible = [fault for fault in possible if fault not in _OF_CODE]
    return sorted(possible, key=lambda fault: not _SHOWN.get(fault, lambda m: False)(measures))


def _fill(text: str, measures: Measures) -> str:
    """Return a text with its quantities; "" if one of them is unknown."""
    quantities = measures.quantities
    names = [name for _, name, _, _ in string.Formatter().parse(text) if name]
    if any(quantities.get(name) is None for name in names):
        return ""
    text = text.format_map(quantities)
    # The first and the last steps of so short a run are the same, and so are their means.
    return _SAME_ENDS.sub(r"is \1 on average", text) if measures.count <= FEW else text


def _fill_cause(cause: Cause, measures: Measures) -> Cause:
    return Cause(cause.fault, _fill(cause.what, measures), _fill(cause.remedy, measures))


def diagnosis_text(diagnosis: Diagnosis) -> str:
    """Return the diagnosis as plain text, for a terminal or a notebook."""
    lines = [f"{diagnosis.count} logged steps, {diagnosis.steps[0]} to {diagnosis.steps[1]}.", ""]
    if not diagnosis.findings:
        lines += ["Nothing in this log points to a fault. That is not proof: see what it cannot tell.", ""]
    for number, finding in enumerate(diagnosis.findings, 1):
        lines.append(f"{number}. {finding.sees}")
        lines += [_item("   - ", text) for text in finding.evidence]
        lines += ["   Likely causes, the most likely first, and what to try:"] if finding.causes else []
        pairs = zip("abcdef", finding.causes, strict=False)
        lines += [_item(f"   {letter}) ", f"{cause.what} {cause.remedy}") for letter, cause in pairs]
        lines.append("")
    for title, texts in (("Normal here:", diagnosis.normal), ("What this log cannot tell:", diagnosis.unknown)):
        lines += [title, *(_item("- ", text) for text in texts), ""] if texts else []
    return "\n".join(lines).rstrip()


def _item(mark: str, text: str) -> str:
    """Return an item of a list in lines of at most 100 characters."""
    indent = " " * len(mark)
    return textwrap.fill(text, 100, initial_indent=mark, subsequent_indent=indent, break_long_words=False)


def _list_normal(measures: Measures, findings: tuple[Finding, ...]) -> Iterable[str]:
    """Return observations that worry many people but are normal."""
    m, texts = measures, _load_texts()["normal"]
    is_tied = not findings and (m.last_ties or 0) >= 0.5
    notes = {
        "loss": m.first_loss is not None,
        "clip": m.never_clipped,
        "ties_solved": is_tied and m.ends_solved,
        "ties_mixed": is_tied and not m.ends_solved,
        "cut": m.cut_first > 0.1 and not m.often_cut,
    }
    return [_fill(texts[name], m) for name, is_normal in notes.items() if is_normal]


def _list_unknown(measures: Measures, rows: Rows, findings: tuple[Finding, ...]) -> Iterable[str]:
    """Return the questions that this log cannot answer."""
    texts, keys = _load_texts()["unknown"], dict.fromkeys(key for row in rows for key in row)
    missing = {key: what for key, what in _load_texts()["missing"].items() if key not in keys}
    if measures.has_ties:
        missing.pop(TIED, None)
    names = [name for name in keys if not is_understood(name)]
    shown = ", ".join(names[:MAX_NAMES]) + f" and {len(names) - MAX_NAMES} more" * (len(names) > MAX_NAMES)
    if REWARD not in keys:
        yield texts["reward"]
    if names:
        yield texts["names"].format(names=shown)
    if missing:
        yield texts["missing"].format(missing="; ".join(f"{what} (`{key}`)" for key, what in missing.items()))
    if len(rows) < ENOUGH or measures.course.kind == "noisy" and not findings:
        yield texts["few"].format(count=len(rows))
    yield texts["answers"]
    yield texts["code"]
