"""Try every check on right and wrong answers: ``python -m grpo_edu.checks``; the exit code is 1 if one is misjudged."""

from __future__ import annotations

import argparse
import runpy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from grpo_edu.checks import exercises
from grpo_edu.checks.core import Exercise

RIGHT_ANSWERS = Path(__file__).resolve().parents[2] / "tests" / "right_answers"  # of a checkout; not in the wheel

Answers = Mapping[str, Sequence[Callable]]


def answers_in(folder: Path) -> dict[str, Sequence[Callable]]:
    """The right answers to each exercise, from `RIGHT_ANSWERS` of every module in a folder."""
    found: dict[str, Sequence[Callable]] = {}
    for path in sorted(folder.glob("*.py")):
        found |= runpy.run_path(str(path))["RIGHT_ANSWERS"]
    return found


def misjudged(exercise: Exercise, right_answers: Sequence[Callable], seeds: range) -> list[str]:
    """Right answers that lose points and wrong answers that are not named, over several seeds."""
    found = []
    whole = exercise
    for seed in seeds:
        # training takes seconds: right answers train with one seed, and a mistake is named by the other parts
        exercise = whole if seed == seeds[0] else getattr(whole, "untrained", whole)
        for number, right in enumerate((exercise.reference, *right_answers)):
            feedback = exercise(right, seed=seed)
            if feedback.points != feedback.max_points:
                found.append(f"seed {seed}: right answer {number} loses points:\n{feedback}")
        for name, mistake in exercise.mistakes.items():
            for wrong in (mistake.wrong, *mistake.also):
                feedback = getattr(exercise, "untrained", exercise)(wrong, seed=seed)
                if name not in feedback.mistakes:
                    found.append(f"seed {seed}: {name!r} is not named:\n{feedback}")
    return found


def table(known: Mapping[str, Exercise], right_answers: Answers) -> str:
    """A Markdown table with a row for each wrong answer and the points that it gets."""
    lines = ["| exercise | answer | points |", "|---|---|---|"]
    for exercise in (getattr(one, "untrained", one) for one in known.values()):
        right = 1 + len(right_answers.get(exercise.name, ()))
        lines.append(f"| {exercise.name} | {right} right ones | {exercise.max_points} each |")
        for name, mistake in exercise.mistakes.items():
            points = exercise(mistake.wrong, seed=0).points
            lines.append(f"| {exercise.name} | {name} | {points} of {exercise.max_points} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, then every answer that is misjudged."""
    parser = argparse.ArgumentParser(prog="python -m grpo_edu.checks", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="how many draws of the inputs each answer is tried on")
    parser.add_argument(
        "--answers",
        type=Path,
        default=RIGHT_ANSWERS,
        metavar="FOLDER",
        help="modules with further right answers (default: those of the checkout)",
    )
    options = parser.parse_args(arguments)
    known, right_answers = exercises(), answers_in(options.answers)
    if not right_answers:
        print(f"No right answers in {options.answers}; only the reference of each exercise is tried.")
    print(table(known, right_answers))
    wrong = [
        text
        for name, exercise in known.items()
        for text in misjudged(exercise, right_answers.get(name, ()), range(options.seeds))
    ]
    print("\n".join(wrong) or f"\n{len(known)} exercises: every right answer passes, every mistake is named.")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
