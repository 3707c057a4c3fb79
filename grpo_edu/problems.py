"""Seeded generators of problems whose answers can be verified.

Three levels of GSM8K-style word problems, each at least twelve different stories:

- ``basic``: two steps, addition and subtraction;
- ``intermediate``: three steps, with a multiplication or a division;
- ``advanced``: four steps, mixed.

Domains beyond arithmetic: ``sorting`` (order a few numbers) and ``coin_flip`` (track a state, after Wei et al.
2022, arXiv 2201.11903).

A story is data: a text with named slots, and steps such as ``d = a + b``. The worked
solution and the answer are computed from the steps, never typed in.
"""

from __future__ import annotations

import operator
import random
import re
from dataclasses import dataclass

from grpo_edu.stories import ITEMS, NAMES, STORIES, Story

LEVELS = ("basic", "intermediate", "advanced")
DOMAINS = ("sorting", "coin_flip")

_LARGEST = 300
_OPERATIONS = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": lambda a, b: a // b if b and a % b == 0 else -1,
}


@dataclass(frozen=True)
class Problem:
    """One problem with a verifiable answer.

    prompt: the question in plain words.
    answer: the canonical answer, for example ``"36"``, ``"7, 15, 23"`` or ``"heads"``.
    level: one of `LEVELS` or `DOMAINS`, or the name of an outside source (``"gsm8k"``).
    solution: the worked solution, ending in ``#### answer``.
    """

    prompt: str
    answer: str
    level: str
    solution: str


def make_problems(level: str, n: int, seed: int) -> list[Problem]:
    """Draw `n` different problems of one level or domain.

    Two problems count as the same when their `problem_key` is the same, whatever the wording around the numbers.

    level: one of ``LEVELS`` or ``DOMAINS``.
    n: how many, at least 1.
    seed: the same seed gives the same problems on every machine.

    Raises ValueError for an unknown level, or when `n` different problems cannot be found.

    >>> problem, = make_problems("basic", 1, seed=0)
    >>> problem.solution.endswith("#### " + problem.answer)
    True
    """
    if level not in LEVELS + DOMAINS:
        raise ValueError(f"level: {level!r} is unknown; choose one of {', '.join(LEVELS + DOMAINS)}")
    if n < 1:
        raise ValueError(f"n: {n} problems asked for; ask for at least 1")
    rng = random.Random(f"{level}-{seed}")
    found: dict[str, Problem] = {}
    for _ in range(20 * n + 100):
        problem = draw_problem(level, rng)
        found.setdefault(problem_key(problem), problem)
        if len(found) == n:
            return list(found.values())
    raise ValueError(f"n: only {len(found)} different {level} problems were found; ask for fewer than {n}")


def problem_key(problem: Problem) -> str:
    """What makes a problem the same as another of its level: its numbers, in any order; without any, its solution.

    Stricter than equal texts: two stories of a level with the same numbers count as one problem.

    >>> problem_key(Problem("Ada has 12 eggs and buys 3.", "15", "basic", "12+3=15. #### 15"))
    'basic: 3 12'
    """
    numbers = sorted(int(digits) for digits in re.findall(r"[0-9]+", problem.prompt))
    return f"{problem.level}: {' '.join(map(str, numbers)) or problem.solution}"


def make_split(level: str, num_train: int, num_heldout: int, seed: int) -> tuple[list[Problem], list[Problem]]:
    """Training and held-out problems of one level that share no `problem_key`.

    >>> train, heldout = make_split("sorting", 5, 3, seed=0)
    >>> {problem_key(p) for p in train} & {problem_key(p) for p in heldout}
    set()
    """
    problems = make_problems(level, num_train + num_heldout, seed)
    return problems[num_heldout:], problems[:num_heldout]


def draw_problem(level: str, rng: random.Random) -> Problem:
    """Draw one problem of `level` from the given random number generator."""
    if level == "sorting":
        return _draw_sorting(rng)
    if level == "coin_flip":
        return _draw_coin_flip(rng)
    return fill_story(rng.choice(STORIES[level]), level, rng)


def fill_story(story: Story, level: str, rng: random.Random) -> Problem:
    """Fill the slots of a story with names, things and numbers for which every step is a whole positive number."""
    while True:
        values = {slot: rng.randint(low, high) for slot, (low, high) in story.ranges.items()}
        lines, last = _work_out(story.steps, values)
        if lines:
            break
    name, other = rng.sample(NAMES, 2)
    item, thing = rng.sample(ITEMS, 2)
    prompt = story.text.format(name=name, other=other, item=item, thing=thing, **values)
    return Problem(prompt, str(last), level, f"{' '.join(lines)} #### {last}")


def _work_out(steps: str, values: dict[str, int]) -> tuple[list[str], int]:
    """Compute ``"d = a + b; e = d - c"``; an empty list of lines when a step leaves 1 … 300."""
    values = dict(values)
    lines: list[str] = []
    result = 0
    for step in steps.split(";"):
        target, _, left, sign, right = step.split()
        a, b = (values[term] if term in values else int(term) for term in (left, right))
        result = _OPERATIONS[sign](a, b)
        if not 1 <= result <= _LARGEST:
            return [], 0
        values[target] = result
        lines.append(f"{a}{sign}{b}={result}.")
    return lines, result


def _draw_sorting(rng: random.Random) -> Problem:
    """Sort three to five numbers; the worked solution picks the smallest of what is left."""
    numbers = rng.sample(range(1, 100), rng.randint(3, 5))
    descending = rng.random() < 0.5
    order = "from large to small" if descending else "from small to large"
    opening = rng.choice(("Sort {} {}.", "Put {} in order {}.", "Write {} in order {}."))
    prompt = opening.format(", ".join(map(str, numbers)), order)
    left, lines = list(numbers), []
    while len(left) > 1:
        pick = max(left) if descending else min(left)
        lines.append(f"{' '.join(map(str, left))}: {pick}.")
        left.remove(pick)
    answer = ", ".join(map(str, sorted(numbers, reverse=descending)))
    return Problem(prompt, answer, "sorting", f"{' '.join(lines)} #### {answer}")


def _draw_coin_flip(rng: random.Random) -> Problem:
    """Follow a coin through three to five people who flip it or leave it."""
    side = rng.choice(("heads", "tails"))
    people = rng.sample(NAMES, rng.randint(3, 5))
    told, lines = [f"A coin shows {side}."], [f"{side}."]
    for person in people:
        flips = rng.random() < 0.5
        if flips:
            side = "tails" if side == "heads" else "heads"
        verb = rng.choice(("flips", "turns") if flips else ("leaves", "keeps"))
        told.append(f"{person} {verb} it.")
        lines.append(f"{person} {verb}: {side}.")
    prompt = " ".join(told) + " Which side is up now?"
    return Problem(prompt, side, "coin_flip", f"{' '.join(lines)} #### {side}")
