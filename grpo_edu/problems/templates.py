"""Seeded generators of problems whose answers can be verified.

There are three levels of GSM8K-style word problems, each with at least twelve different stories:

- ``basic``: two steps, addition and subtraction;
- ``intermediate``: three steps, with a multiplication or a division;
- ``advanced``: four steps, mixed.

Domains beyond arithmetic: ``sorting`` (order a few numbers) and ``coin_flip`` (track a state, after Wei et al.
2022, arXiv 2201.11903).

The stories are in ``data/stories.json``: each is a text with named slots, and steps such as ``d = a + b``. The worked
solution and the answer are computed from the steps, never typed in.
"""

from __future__ import annotations

import json
import operator
import random
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from grpo_edu.prompts import MARKER, completion_text

LEVELS = ("basic", "intermediate", "advanced")

_LARGEST = 300
_OPERATIONS = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": lambda a, b: a // b if b and a % b == 0 else -1,
}


def data_dir() -> Path:
    """Return the folder of the shipped data: `data` next to the package in a checkout, else the package's `_data`."""
    package = Path(__file__).resolve().parents[1]
    checkout = package.parent / "data"
    return checkout if (checkout / "problems").is_dir() else package / "_data"


@dataclass(frozen=True)
class Story:
    """A text with slots, the steps to its answer, and the range of each number that is drawn.

    text: has the slots ``{name}`` and ``{other}`` for people, ``{item}`` and ``{thing}`` for things, and a letter for
        each number. steps: ``target = left sign right``, separated by semicolons. ranges: (lowest, highest) by letter.
    """

    text: str
    steps: str
    ranges: dict[str, tuple[int, int]]


_SHIPPED = json.loads((data_dir() / "stories.json").read_text(encoding="utf-8"))
NAMES: list[str] = _SHIPPED["names"]
ITEMS: list[str] = _SHIPPED["items"]
STORIES = {level: [Story(**story) for story in stories] for level, stories in _SHIPPED["stories"].items()}


@dataclass(frozen=True)
class Scorer:
    """The scoring of a set of problems if one reference answer is not enough.

    answer: completion → its answer, or None.
    score: completion, question, level, answer of the problem → a score from 0 (wrong) to 1 (correct); None if only a
        reward function of the user can score it.
    system_prompt: whether the course's system prompt, which asks for an answer after ####, precedes the question.
    """

    answer: Callable[[str | list[dict]], str | None]
    score: Callable[[str | list[dict], str | list[dict], str, str], float | None]
    system_prompt: bool = True


@dataclass(frozen=True)
class Problem:
    """One problem with a verifiable answer.

    prompt: the question in plain words.
    answer: the canonical answer, for example ``"36"``, ``"7, 15, 23"`` or ``"heads"``.
    level: one of `LEVELS` or `DOMAINS`, or the name of an outside source (``"gsm8k"``), or ``"own"``.
    solution: the worked solution, ending in ``#### answer``; "" if there is none.
    columns: further columns of a file of your own, which a reward function gets by their names.
    """

    prompt: str
    answer: str
    level: str = "own"
    solution: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def row(self) -> dict[str, Any]:
        """Return the problem as one row of a table: its fields, and its further columns by their own names."""
        fields = {"prompt": self.prompt, "answer": self.answer, "level": self.level, "solution": self.solution}
        return {**fields, **self.columns}


def as_problems(problems: Sequence[Problem | Mapping[str, Any]]) -> list[Problem]:
    """Return problems as they are, and make problems of dictionaries with a "prompt", an "answer" and further columns.

    The prompt may be called "question", as in a file. Raises ValueError for anything else.

    >>> as_problems([{"prompt": "How long?", "answer": 12, "unit": "cm"}])[0].row()
    {'prompt': 'How long?', 'answer': '12', 'level': 'own', 'solution': '', 'unit': 'cm'}
    """
    made = []
    for row, problem in enumerate(problems):
        if isinstance(problem, Mapping):
            columns = dict(problem)
            if "question" in columns and "prompt" not in columns:
                columns["prompt"] = columns.pop("question")
            if isinstance(columns.get("prompt"), str) and columns.get("answer") is not None:
                names = [name for name in ("prompt", "answer", "level", "solution") if name in columns]
                fields: dict[str, Any] = {name: str(columns.pop(name)) for name in names}
                problem = Problem(**fields, columns=columns)
        if not isinstance(problem, Problem):
            raise ValueError(
                f"problems[{row}] must be a grpo_edu.Problem, or a dictionary with a text as its 'prompt' and an "
                f"'answer' (\"\" if no reward needs one), got {problem!r}"
            )
        made.append(problem)
    return made


def reward_columns(problems: Sequence[Problem]) -> dict[str, list]:
    """Return what a reward function gets of B problems besides the prompts: one list of B entries per column.

    A column that a problem does not have is None there, as in TRL.

    >>> reward_columns([Problem("1 + 1?", "2", "own", "#### 2", {"unit": "cm"})])["unit"]
    ['cm']
    """
    rows = [problem.row() for problem in problems]
    names = dict.fromkeys(name for row in rows for name in row if name != "prompt")
    return {name: [row.get(name) for row in rows] for name in names}


def check_column(name: str, values: Any, length: int) -> None:
    """Raise ValueError unless `values` is a list of `length` entries."""
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise ValueError(f"{name} must be a list with one entry per completion, got {type(values).__name__}")
    if len(values) != length:
        raise ValueError(f"{name} has {len(values)} entries for {length} completions; pass one per completion")


@dataclass(frozen=True)
class ProblemSet:
    """A set of problems; `PROBLEM_SETS` has the entry of each set.

    about: what its problems ask, in a few words.
    draw: draws one problem with a random number generator, if the problems are generated by `make_problems`.
    load: split ("train" or "heldout") → all problems; None reads them from ``data/problems/NAME_SPLIT.jsonl``. With
        `reads_path` it also gets the folder or file that the user names (`path`, None for the Hub).
    level: begins the `level` of its problems; "" if that is the name of the entry.
    scorer: scores the answers; None: an answer is correct when it equals the reference.
    max_completion_length: the tokens that an answer may have by default.
    is_evaluated_whole: whether `grpo-edu evaluate` takes all held-out problems by default, as for a benchmark.
    is_name_of_data: whether `data` takes the name of the entry. If not, the problems are loaded in another way.
    """

    about: str
    draw: Callable[[random.Random], Problem] | None = None
    load: Callable[..., list[Problem]] | None = None
    level: str = ""
    scorer: Scorer | None = None
    max_completion_length: int = 96
    reads_path: bool = False
    is_evaluated_whole: bool = False
    is_name_of_data: bool = True


# A module that defines problems adds its entries at its end.
PROBLEM_SETS: dict[str, ProblemSet] = {}

TEXT = "text:"  # begins the level of problems whose answer is a text: several words, a date, JSON or SQL
UNANSWERED = "own:"  # begins the level of problems without an answer, which a reward of your own scores


def normalize_text(text: str) -> str:
    """Return a text without differences of case, white space and Unicode form, and what may be around it.

    That is a full stop at its end, and Markdown, quotes or backticks on both sides.

    >>> normalize_text(" New  York. "), normalize_text('**"2026-03-05"**.')
    ('new york', '2026-03-05')
    """
    text = " ".join(unicodedata.normalize("NFC", text.casefold()).split()).rstrip(".")
    while len(text) > 1 and text[0] == text[-1] and text[0] in "*_`\"'":
        text = text[1:-1].strip().rstrip(".")
    return text


def text_answer(completion: str | list[dict]) -> str | None:
    """Return what follows the last answer marker, normalized; None if there is no marker or nothing behind it."""
    _, marker, answer = completion_text(completion).rpartition(MARKER)
    return normalize_text(answer) or None if marker else None


def score_text(completion: str | list[dict], question: object, level: str, answer: str) -> float:
    """Return 1.0 if the answer of a completion is this text after `normalize_text`, else 0.0."""
    return float(text_answer(completion) == normalize_text(answer))


def problem_set_names() -> tuple[str, ...]:
    """Return the names that `data` and `--data` take besides tasks of reasoning-gym and files."""
    return tuple(name for name, entry in PROBLEM_SETS.items() if entry.is_name_of_data)


def default_length(names: Sequence[str]) -> int:
    """Return the tokens that a completion may have by default for problems of these sets, the largest of their numbers.

    >>> default_length(["basic"]), default_length(["instructions"]), default_length(["basic", "gsm8k"])
    (96, 48, 256)
    """
    entries = [PROBLEM_SETS.get(name) for name in names]
    return max(ProblemSet.max_completion_length if entry is None else entry.max_completion_length for entry in entries)


def whole_text(completion: str | list[dict]) -> str | None:
    """Return the text of a completion as its answer; None for an empty one."""
    return completion_text(completion).strip() or None


def scorer_of_level(level: str) -> Scorer | None:
    """Return the scorer of all problems of a level; None if an answer is correct when it equals the reference."""
    scored = ((entry.level or name, entry.scorer) for name, entry in PROBLEM_SETS.items() if entry.scorer is not None)
    return next((scorer for prefix, scorer in scored if level.startswith(prefix)), None)


def prompt_options(level: str) -> dict[str, None]:
    """Keyword arguments of `grpo_edu.prompts.render_prompt` for a level, some of which have no system prompt of ours.

    >>> prompt_options("basic"), prompt_options("instructions:question")
    ({}, {'system': None})
    """
    scorer = scorer_of_level(level)
    return {} if scorer is None or scorer.system_prompt else {"system": None}


def make_problems(level: str, n: int, seed: int) -> list[Problem]:
    """Draw `n` different problems of one level or domain.

    Two problems are the same if they have the same `problem_key`, even if the text around the numbers differs.

    level: one of ``LEVELS`` or ``DOMAINS``, or another set with an entry for `draw`.
    n: number of problems, at least 1.
    seed: random seed; the same seed gives the same problems on every computer.

    Raises ValueError for an unknown level, or if there are fewer than `n` different problems.

    >>> problem, = make_problems("basic", 1, seed=0)
    >>> problem.solution.endswith("#### " + problem.answer)
    True
    """
    generated = [name for name, entry in PROBLEM_SETS.items() if entry.draw is not None]
    if level not in generated:
        raise ValueError(f"level must be one of {', '.join(generated)}; got {level!r}")
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    rng = random.Random(f"{level}-{seed}")
    found: dict[str, Problem] = {}
    for _ in range(20 * n + 100):
        problem = draw_problem(level, rng)
        found.setdefault(problem_key(problem), problem)
        if len(found) == n:
            return list(found.values())
    raise ValueError(f"n must be at most {len(found)}, the number of different {level} problems found, got {n}")


def problem_key(problem: Problem) -> str:
    """Return a key that equal problems of a level share: their sorted numbers, or the solution if there are none.

    Two stories of a level with the same numbers therefore count as one problem, although their texts differ.

    >>> problem_key(Problem("Ada has 12 eggs and buys 3.", "15", "basic", "12+3=15. #### 15"))
    'basic: 3 12'
    """
    numbers = sorted(int(digits) for digits in re.findall(r"[0-9]+", problem.prompt))
    return f"{problem.level}: {' '.join(map(str, numbers)) or problem.solution}"


def make_split(level: str, num_train: int, num_heldout: int, seed: int) -> tuple[list[Problem], list[Problem]]:
    """Draw training and held-out problems of one level that have no `problem_key` in common.

    >>> train, heldout = make_split("sorting", 5, 3, seed=0)
    >>> {problem_key(p) for p in train} & {problem_key(p) for p in heldout}
    set()
    """
    problems = make_problems(level, num_train + num_heldout, seed)
    return problems[num_heldout:], problems[:num_heldout]


def draw_problem(level: str, rng: random.Random) -> Problem:
    """Draw one problem of `level` from the given random number generator."""
    draw = PROBLEM_SETS[level].draw
    assert draw is not None, level
    return draw(rng)


def _draw_story(level: str, rng: random.Random) -> Problem:
    """Draw a word problem of one of the `LEVELS`."""
    return fill_story(rng.choice(STORIES[level]), level, rng)


def fill_story(story: Story, level: str, rng: random.Random, largest: int = _LARGEST) -> Problem:
    """Fill a story with names, things and numbers so that the result of every step is a whole number in 1 … largest."""
    while True:
        values = {slot: rng.randint(low, high) for slot, (low, high) in story.ranges.items()}
        lines, last = _work_out(story.steps, values, largest)
        if lines:
            break
    name, other = rng.sample(NAMES, 2)
    item, thing = rng.sample(ITEMS, 2)
    prompt = story.text.format(name=name, other=other, item=item, thing=thing, **values)
    return Problem(prompt, str(last), level, f"{' '.join(lines)} #### {last}")


def _work_out(steps: str, values: dict[str, int], largest: int) -> tuple[list[str], int]:
    """Compute ``"d = a + b; e = d - c"``; an empty list of lines when a step leaves 1 … largest."""
    values = dict(values)
    lines: list[str] = []
    result = 0
    for step in steps.split(";"):
        target, _, left, sign, right = step.split()
        a, b = (values[term] if term in values else int(term) for term in (left, right))
        result = _OPERATIONS[sign](a, b)
        if not 1 <= result <= largest:
            return [], 0
        values[target] = result
        lines.append(f"{a}{sign}{b}={result}.")
    return lines, result


def _draw_sorting(rng: random.Random) -> Problem:
    """Draw a problem that asks to sort three to five numbers; the solution selects one number after the other."""
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
    """Draw a problem in which three to five people flip a coin or leave it unchanged."""
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


PROBLEM_SETS |= {
    "basic": ProblemSet("word problems of two steps, with + and -", partial(_draw_story, "basic")),
    "intermediate": ProblemSet("word problems of three steps, with * or /", partial(_draw_story, "intermediate")),
    "advanced": ProblemSet("word problems of four steps", partial(_draw_story, "advanced")),
    "sorting": ProblemSet("put a few numbers in order", _draw_sorting),
    "coin_flip": ProblemSet("which side of a coin is up after some flips", _draw_coin_flip),
}
DOMAINS = tuple(name for name in PROBLEM_SETS if name not in LEVELS)
PROBLEM_SETS["text"] = ProblemSet(
    "answers that are texts", level=TEXT, scorer=Scorer(text_answer, score_text), is_name_of_data=False
)
PROBLEM_SETS["own"] = ProblemSet(
    "no answers", level=UNANSWERED, scorer=Scorer(whole_text, lambda *row: None), is_name_of_data=False
)


class ProblemOrder:
    """The order in which `count` problems are used: each once before any is repeated, and none twice within a step.

    Each epoch is a new permutation (without `shuffle`: the given order). A step that starts with the last problems of
    an epoch continues with the next epoch.

    >>> order = ProblemOrder(3, seed=0)
    >>> [order.draw(2) for _ in range(3)]
    [[1, 2], [0, 1], [2, 0]]
    """

    def __init__(self, count: int, seed: int, *, shuffle: bool = True) -> None:
        self.count, self.shuffle, self.rng = count, shuffle, random.Random(seed)
        self.waiting: list[int] = []  # what is left of the epoch

    def draw(self, size: int, used: Sequence[int] = ()) -> list[int]:
        """Return the indices of the next `size` problems that the step has not `used` yet; fewer if none are left."""
        size = min(size, self.count - len(used))
        drawn = [index for index in self.waiting if index not in used][:size]
        left = [index for index in self.waiting if index not in drawn]
        if len(drawn) < size:
            fresh = self.rng.sample(range(self.count), self.count) if self.shuffle else list(range(self.count))
            first = [index for index in fresh if index not in drawn and index not in used][: size - len(drawn)]
            drawn += first
            left += [index for index in fresh if index not in first]
        self.waiting = left
        return drawn
