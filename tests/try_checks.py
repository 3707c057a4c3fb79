"""Try every check on right and wrong answers: ``python tests/try_checks.py``; the exit code is 1 if one is misjudged.

A right answer must earn all points and a wrong one must lose some, on every seed. A mistake of the exercise must be
named, and a name must be true: an answer that is said to make a mistake has to agree with it on inputs of another seed.
``--demands`` prints what the texts of the exercises demand, each with an input that is tried whatever the seed, and on
which an answer that ignores the demand fails.
"""

from __future__ import annotations

import argparse
import runpy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from grpo_edu.checks import exercises
from grpo_edu.checks.compare import Outcome, shown
from grpo_edu.checks.core import Call, Exercise, attempt, changed, trial

TESTS = Path(__file__).resolve().parent
RIGHT_ANSWERS, WRONG_ANSWERS, DEMANDS = TESTS / "right_answers", TESTS / "wrong_answers.py", TESTS / "demands.txt"
OTHER_SEED = 10_000  # further on, where a name is tried again

Answers = Mapping[str, Sequence[Callable]]


def answers_in(place: Path) -> dict[str, Sequence[Callable]]:
    """Return the answers to each exercise, from `RIGHT_ANSWERS` or `WRONG_ANSWERS` of a module or a folder of them."""
    found: dict[str, Sequence[Callable]] = {}
    for path in sorted(place.glob("*.py")) if place.is_dir() else [place]:
        names = runpy.run_path(str(path))
        found |= names.get("RIGHT_ANSWERS") or names["WRONG_ANSWERS"]
    return found


def misjudged(
    exercise: Exercise,
    right_answers: Iterable[Callable],
    seeds: range,
    wrong_answers: Iterable[Callable] = (),
    counts: Counter[str] | None = None,
) -> list[str]:
    """Right answers that lose points, wrong ones that lose none, mistakes that are not named, and untrue names."""
    found, counts = [], Counter() if counts is None else counts
    wrong = [(name, way) for name, mistake in exercise.mistakes.items() for way in (mistake.wrong, *mistake.also)]
    wrong += [("", answer) for answer in wrong_answers]
    whole, exercise = exercise, getattr(exercise, "untrained", exercise)  # training takes seconds
    for seed in seeds:
        for number, right in enumerate((exercise.reference, *right_answers)):
            counts["right"] += 1
            feedback = (whole if seed == seeds[0] else exercise)(right, seed=seed)
            if feedback.points != feedback.max_points:
                found.append(f"seed {seed}: right answer {number} loses points:\n{feedback}")
        for name, answer in wrong:
            counts["wrong"] += 1
            feedback = exercise(answer, seed=seed)
            counts["nothing earned"] += feedback.points == 0
            if feedback.points == feedback.max_points:
                found.append(f"seed {seed}: {name or answer.__name__!r} loses no points")
            elif name and name not in feedback.mistakes:
                found.append(f"seed {seed}: {name!r} is not named:\n{feedback}")
            for said in feedback.mistakes:
                counts["names"] += 1
                own = said in exercise.mistakes and said != name
                if own and not is_true(exercise, said, answer, seed + OTHER_SEED):
                    found.append(f"seed {seed}: {said!r} is not what {name or answer.__name__!r} does:\n{feedback}")
    return found


def is_true(exercise: Exercise, name: str, answer: Callable, seed: int) -> bool:
    """Return True if an answer agrees with a mistake on all inputs of a seed."""
    drawn = trial(exercise, seed)
    theirs = [[attempt(answer, one) for one in calls] for calls in drawn.calls]
    return drawn.agrees(exercise.mistakes[name], theirs, range(len(theirs)))


def read_demands() -> dict[str, dict[str, str]]:
    """Return exercise → words of its text → what ignores them: words of a mistake's name, an answer, or a change."""
    found: dict[str, dict[str, str]] = {}
    name = ""
    for line in DEMANDS.read_text(encoding="utf-8").splitlines():
        words, arrow, ignoring = line.strip().partition(" => ")
        if arrow:
            found[name][words] = ignoring
        else:
            name = words
            found[name] = {}
    return found


def ignore_demand(exercise: Exercise, words: str, wrong_answers: Iterable[Callable]) -> tuple[str, Callable]:
    """Return the answer that ignores a demand, with its name."""
    answers = {answer.__name__: answer for answer in wrong_answers}
    if words in answers:
        return words, answers[words]
    for name, mistake in exercise.mistakes.items():
        if words in name:
            return name, mistake.wrong
    return words, changed(exercise.reference, words)


def failing_input(exercise: Exercise, answer: Callable) -> tuple[Call, Outcome, Outcome] | None:
    """Return the first input tried with every seed on which an answer fails, what is right there, and its outcome."""
    for one in (one for part in exercise.parts for one in exercise.always(part)):
        right, outcome = attempt(exercise.reference, one), attempt(answer, one)
        if not outcome.same_as(right, exercise.tolerance):
            return one, right, outcome
    return None


def demands_table(known: Mapping[str, Exercise], wrong_answers: Answers) -> str:
    """Return a Markdown table with a row for each demand of each exercise."""
    lines = ["| exercise | demand | ignored by | input that is always tried | right | ignored |", "|---" * 6 + "|"]
    for name, demands in read_demands().items():
        exercise = getattr(known[name], "untrained", known[name])
        for words, ignoring in demands.items():
            answer_name, answer = ignore_demand(exercise, ignoring, wrong_answers.get(name, ()))
            found = failing_input(exercise, answer)
            texts = [found[0].text(exercise.arguments), *map(_said, found[1:])] if found else ["none", "", ""]
            cells = [name, words, answer_name, *(" ".join(text.split())[:160] for text in texts)]
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)


def _said(outcome: Outcome) -> str:
    return f"raises {outcome.problem}" if outcome.problem else shown(outcome.value)


def table(known: Mapping[str, Exercise], right_answers: Answers) -> str:
    """Return a Markdown table with a row for each wrong answer and the points that it gets."""
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
    parser = argparse.ArgumentParser(prog="python tests/try_checks.py", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="how many draws of the inputs each answer is tried on")
    parser.add_argument(
        "--answers",
        type=Path,
        default=RIGHT_ANSWERS,
        metavar="FOLDER",
        help="modules with further right answers (default: those of the checkout)",
    )
    parser.add_argument("--demands", action="store_true", help="print the table of demands, and try nothing else")
    options = parser.parse_args(arguments)
    if options.demands:
        print(demands_table(exercises(), answers_in(WRONG_ANSWERS)))
        return 0
    known, right_answers, counts = exercises(), answers_in(options.answers), Counter[str]()
    wrong_answers = answers_in(WRONG_ANSWERS) if WRONG_ANSWERS.is_file() else {}
    if not right_answers:
        print(f"No right answers in {options.answers}; only the reference of each exercise is tried.")
    print(table(known, right_answers))
    wrong = [
        text
        for name, exercise in known.items()
        for text in misjudged(
            exercise, right_answers.get(name, ()), range(options.seeds), wrong_answers.get(name, ()), counts
        )
    ]
    print(
        f"\n{len(known)} exercises on {options.seeds} seeds: {counts['right']} checks of right answers and "
        f"{counts['wrong']} of wrong ones, {counts['nothing earned']} of which earn nothing. "
        f"{counts['names']} names of mistakes, each tried on other inputs."
    )
    print(
        "\n".join(wrong)
        or "Every right answer passes, every wrong one is refused, every mistake is named, no name is untrue."
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
