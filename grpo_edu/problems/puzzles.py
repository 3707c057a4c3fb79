"""Ten kinds of word problems that no shipped model saw in pretraining, for a run in which a skill grows.

The stories are in ``data/puzzles.json``, in the form of ``data/stories.json``. Their arithmetic is that of the three
levels, but what has to be computed is new: an average, a fence and its posts, two trains in opposite directions.
"""

from __future__ import annotations

import json
import random

from grpo_edu.problems.templates import Problem, Story, data_dir, fill_story, problem_key

LEVEL = "puzzle"


def load_stories() -> list[Story]:
    """Return the ten stories."""
    return [Story(**story) for story in json.loads((data_dir() / "puzzles.json").read_text(encoding="utf-8"))]


def make_puzzles(n: int, seed: int, excluded: frozenset[str] = frozenset()) -> list[Problem]:
    """Draw `n` different puzzles, the ten kinds in turn.

    n: number of puzzles. seed: random seed. excluded: `problem_key`s that must not be drawn.

    >>> [problem.solution for problem in make_puzzles(2, seed=0)]
    ['48+26=74. 74/2=37. #### 37', '8-1=7. 7*12=84. #### 84']
    """
    stories, rng = load_stories(), random.Random(f"{LEVEL}-{seed}")
    found: dict[str, Problem] = {}
    while len(found) < n:
        problem = fill_story(stories[len(found) % len(stories)], LEVEL, rng)
        if problem_key(problem) not in excluded | found.keys():
            found[problem_key(problem)] = problem
    return list(found.values())


def puzzle_splits(num_train: int = 400, num_validation: int = 100, num_heldout: int = 400) -> dict[str, list[Problem]]:
    """Training, validation and held-out puzzles that have no `problem_key` in common.

    >>> {name: len(problems) for name, problems in puzzle_splits(20, 10, 30).items()}
    {'heldout': 30, 'validation': 10, 'train': 20}
    """
    splits: dict[str, list[Problem]] = {}
    taken: frozenset[str] = frozenset()
    for seed, (name, n) in enumerate(
        {"heldout": num_heldout, "validation": num_validation, "train": num_train}.items()
    ):
        splits[name] = make_puzzles(n, seed, taken)
        taken |= {problem_key(problem) for problem in splits[name]}
    return splits
