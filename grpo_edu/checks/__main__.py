"""Try each check on right and on wrong answers: ``python -m grpo_edu.checks``; exit 1 where one is misjudged."""

from __future__ import annotations

import argparse

from grpo_edu.checks import exercises
from grpo_edu.checks.core import Exercise


def misjudged(exercise: Exercise, seeds: range) -> list[str]:
    """Right answers that lose points, and wrong ones that get all or are not named, for several seeds."""
    found = []
    for seed in seeds:
        for number, right in enumerate((exercise.reference, *exercise.right)):
            feedback = exercise(right, seed=seed)
            if feedback.points != feedback.max_points:
                found.append(f"seed {seed}: right answer {number} loses points:\n{feedback}")
        for mistake, wrong in ((one, wrong) for one in exercise.mistakes for wrong in (one.wrong, *one.also)):
            feedback = exercise(wrong, seed=seed)
            if mistake.name not in feedback.mistakes:
                found.append(f"seed {seed}: {mistake.name!r} is not named:\n{feedback}")
    return found


def table(known: dict[str, Exercise]) -> str:
    """Markdown: a row for each wrong answer, with the points that it gets."""
    lines = ["| exercise | answer | points |", "|---|---|---|"]
    for exercise in known.values():
        lines.append(f"| {exercise.name} | {1 + len(exercise.right)} right ones | {exercise.max_points} each |")
        for mistake in exercise.mistakes:
            points = exercise(mistake.wrong, seed=0).points
            lines.append(f"| {exercise.name} | {mistake.name} | {points} of {exercise.max_points} |")
    return "\n".join(lines)


def main() -> int:
    """Print the table, then what is misjudged."""
    parser = argparse.ArgumentParser(prog="python -m grpo_edu.checks", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="draws of the inputs that each answer is tried on")
    options = parser.parse_args()
    known = exercises()
    print(table(known))
    wrong = [text for exercise in known.values() for text in misjudged(exercise, range(options.seeds))]
    print("\n".join(wrong) or f"\n{len(known)} exercises: every right answer passes, every mistake is named.")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
