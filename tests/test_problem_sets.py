"""A new reward and a new problem set need one entry each, where all that name, load and score them find it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_edu.problems.files import load_problem_set
from grpo_edu.problems.templates import PROBLEM_SETS, problem_set_names
from grpo_edu.rewards import REWARDS

REPOSITORY = Path(__file__).resolve().parents[1]
ADDED = '''
from grpo_edu.problems.templates import PROBLEM_SETS, Problem, ProblemSet, Scorer
from grpo_edu.prompts import completion_text
from grpo_edu.rewards import REWARDS


def brevity_reward(completions, **kwargs):
    """1.0 for a completion of at most three words, else 0.0."""
    return [float(len(completion_text(completion).split()) <= 3) for completion in completions]


def double(split):
    numbers = range(40) if split == "train" else range(40, 400)
    return [Problem(f"Double {n}.", str(2 * n), "doubling", f"2*{n}={2 * n}. #### {2 * n}") for n in numbers]


REWARDS["brevity"] = brevity_reward
PROBLEM_SETS["doubling"] = ProblemSet(
    "double a number", load=double, scorer=Scorer(completion_text, lambda *_: 1.0), max_completion_length=8
)
'''
START = "import sys, added\nfrom grpo_edu.cli.main import main\nsys.exit(main(sys.argv[1:]))\n"


@pytest.fixture(scope="module")
def run_cli(tmp_path_factory):
    """Run the command line in a process in which a module has added a reward and a problem set."""
    folder = tmp_path_factory.mktemp("added")
    (folder / "added.py").write_text(ADDED)
    (folder / "run.py").write_text(START)

    def run(*arguments: str) -> str:
        command = [sys.executable, folder / "run.py", *arguments]
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "400"}
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
        assert done.returncode in (0, 1) and not done.stderr.startswith("grpo-edu: error"), done.stderr  # 1: a finding
        return done.stdout

    return run


def test_they_are_among_the_choices(run_cli):
    words = re.sub(r"\s+", " ", run_cli("train", "--help"))
    assert ", doubling, reasoning-gym:TASK" in words and ", brevity, FILE.py:function" in words


@pytest.mark.slow
def test_they_are_trained_with_evaluated_and_checked(run_cli, policy_dir, tmp_path):
    output = str(tmp_path / "run")
    sizes = ("--steps", "1", "--num-generations", "2", "--prompts-per-step", "2", "--n", "4", "--no-greedy")
    arguments = ("--model", str(policy_dir), "--data", "doubling", "--rewards", "accuracy,brevity", *sizes)
    result = json.loads(run_cli("train", *arguments, "--output", output, "--json"))
    settings = json.loads((Path(output) / "config.json").read_text())
    assert settings["config"]["max_completion_length"] == 8
    assert list(result["accuracy_before"]["per_level"]) == ["doubling"]
    assert result["accuracy_before"]["k"] == 4, "its scorer pays every answer"
    evaluated = json.loads(run_cli("evaluate", "--model", output, "--data", "doubling", "--n", "4", "--json"))
    assert evaluated["k"] == evaluated["n"] == 4
    assert "brevity" in run_cli("reward-check", "brevity", "--data", "doubling")


def test_every_entry_of_the_tables_works():
    assert set(PROBLEM_SETS) - set(problem_set_names()) == {"reasoning-gym", "text"} | (
        set(PROBLEM_SETS) & {"words", "own"}
    )
    for name in problem_set_names():
        entry = PROBLEM_SETS[name]
        assert entry.about and not entry.about.endswith(".")
        if not entry.reads_path:
            train, heldout = (load_problem_set(name, split) for split in ("train", "heldout"))
            assert not {problem.prompt for problem in train} & {problem.prompt for problem in heldout}
            assert {problem.level.partition(":")[0] for problem in train} == {name.removesuffix("_two")}
    for name, reward in REWARDS.items():
        assert reward.__name__ == f"{name}_reward" and reward.__doc__
