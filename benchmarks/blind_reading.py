"""Blind reading of SmolLM2's answers, untrained and trained: ``python -m benchmarks.blind_reading``.

Without options it prints 60 held-out instructions, twenty for each seed of the study, with two greedy answers in random
order: the untrained model's and that of the run `strict`. A reader sees nothing else and is asked which answer they
would rather have got, or "=". ``--add FILE --reader NAME`` stores a reader's choices, one line "12 A" for each pair, in
``benchmarks/results/blind_reading.jsonl``; ``--count`` writes the count of all readers to ``blind_reading.json``.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, Ledger, save
from benchmarks.real_model import open_ledger, problems_of
from grpo_edu.evaluation import mcnemar

COMMAND = "python -m benchmarks.blind_reading"
CHOICES = RESULTS / "blind_reading.jsonl"
PAIRS, ORDER_SEED = 60, 0
SEEDS = (0, 1, 2)  # of the runs of the study at the time of the reading, three of the five that it has now


@dataclass(frozen=True)
class Pair:
    """An instruction and two answers to it.

    trained: whether A or B is the trained model's. differ: whether one answer obeys the constraint and the other not.
    """

    prompt: str
    a: str
    b: str
    trained: str
    differ: bool


def pairs() -> Iterator[Pair]:
    """Yield the pairs of all readers, in the same order: other instructions for each seed, and no two equal answers."""
    ledger, generator = open_ledger(), random.Random(ORDER_SEED)
    problems, left = problems_of("instructions", "heldout"), PAIRS
    order = iter(generator.sample(range(len(problems)), len(problems)))
    untrained = ledger.find(phase="before", task="instructions")
    before = untrained["greedy/completions"]
    while left:
        run = ledger.find(phase="report", task="instructions", arm="strict", seed=SEEDS[left % len(SEEDS)])
        number = next(order)
        old, new = before[number], run["greedy/completions"][number]
        if old.strip() == new.strip():
            continue
        trained = generator.choice("AB")
        a, b = (new, old) if trained == "A" else (old, new)
        differ = untrained["greedy/obeyed"][number] != run["greedy/obeyed"][number]
        yield Pair(problems[number].prompt, a, b, trained, differ)
        left -= 1


def read_choices(text: str) -> list[str]:
    """Return the choices "A", "B" or "=" of a reader, in the order of the pairs.

    Raises:
        ValueError: where a pair has no choice, or a line is not a number and a choice.

    >>> read_choices("\\n".join(f"{number} A" for number in range(1, 61)))[:2]
    ['A', 'A']
    """
    found = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        number, _, choice = line.partition(" ")
        if not number.isdigit() or choice not in ("A", "B", "="):
            raise ValueError(f"A line has to be a pair's number and A, B or =, as in '12 A'; it is {line!r}")
        found[int(number)] = choice
    missing = sorted(set(range(1, PAIRS + 1)) - set(found))
    if missing:
        raise ValueError(f"These pairs have no choice: {missing}")
    return [found[number] for number in range(1, PAIRS + 1)]


def summary(readers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return how often each reader prefers the trained answer, with a sign test, and on how many pairs they agree."""
    shown, found = list(pairs()), {}
    for row in readers:
        new = [choice == pair.trained for choice, pair in zip(row["choices"], shown, strict=True)]
        old = [choice not in ("=", pair.trained) for choice, pair in zip(row["choices"], shown, strict=True)]
        p_value = mcnemar(old, new).p_value
        equal = row["choices"].count("=")
        found[row["reader"]] = {"trained": sum(new), "untrained": sum(old), "equal": equal, "p_value": p_value}
        found[row["reader"]] |= by_obedience(shown, new)
    both = list(zip(*(row["choices"] for row in readers), strict=True))
    return {"pairs": PAIRS, "readers": found, "same choice": sum(len(set(choices)) == 1 for choices in both)}


def by_obedience(shown: Sequence[Pair], trained: Sequence[bool]) -> dict[str, list[int]]:
    """Return [how often the trained answer was chosen, number of pairs] where one answer obeys, and both or neither."""
    found = {}
    for name, differ in (("one obeys", True), ("both or neither obey", False)):
        chosen = [new for new, pair in zip(trained, shown, strict=True) if pair.differ == differ]
        found[name] = [sum(chosen), len(chosen)]
    return found


def main() -> int:
    """Print the pairs, or store a reader's choices and count again."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--add", type=Path, help="a file with a reader's choices")
    parser.add_argument("--reader", help="how the reader is called in the results")
    parser.add_argument("--count", action="store_true", help="count the stored choices again")
    options = parser.parse_args()
    if options.count:
        save(CHOICES.with_suffix(".json"), COMMAND, summary(Ledger(CHOICES).rows))
        return 0
    if options.add is None:
        for number, pair in enumerate(pairs(), 1):
            print(f"{number}. {pair.prompt}\n   A: {pair.a}\n   B: {pair.b}\n")
        return 0
    if not options.reader:
        parser.error("--add needs --reader NAME")
    ledger = Ledger(CHOICES)
    if ledger.find(reader=options.reader):
        parser.error(f"there are choices of {options.reader!r} already")
    ledger.add(reader=options.reader, choices="".join(read_choices(options.add.read_text(encoding="utf-8"))))
    save(CHOICES.with_suffix(".json"), COMMAND, summary(ledger.rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
