"""The puzzles: ten kinds in turn, whose solutions are right, in parts that share no problem."""

from grpo_edu.problems.puzzles import load_stories, make_puzzles, puzzle_splits
from grpo_edu.problems.templates import problem_key
from grpo_edu.prompts import extract_answer
from grpo_edu.rewards import check_equations


def test_every_step_is_true_and_leads_to_the_answer():
    for problem in make_puzzles(100, seed=7):
        steps = check_equations(problem.solution)
        assert len(steps) >= 2 and all(steps)
        assert extract_answer(problem.solution) == problem.answer
        assert problem.solution.split(" ####")[0].endswith(f"={problem.answer}.")


def test_the_kinds_take_turns():
    last_words = [problem.prompt.split()[-1] for problem in make_puzzles(30, seed=3)]
    assert last_words[:10] == last_words[10:20] == last_words[20:]
    assert len(set(last_words)) == len(load_stories()) == 10


def test_the_parts_share_no_puzzle_and_are_always_the_same():
    splits = puzzle_splits()
    keys = {name: {problem_key(problem) for problem in problems} for name, problems in splits.items()}
    assert {name: len(part) for name, part in keys.items()} == {"heldout": 400, "validation": 100, "train": 400}
    assert len(set().union(*keys.values())) == 900
    assert puzzle_splits() == splits


def test_excluded_puzzles_are_not_drawn():
    first = {problem_key(problem) for problem in make_puzzles(50, seed=1)}
    assert not first & {problem_key(problem) for problem in make_puzzles(50, seed=1, excluded=frozenset(first))}
