"""Tasks of reasoning-gym: made, scored and trained on like the shipped problems, by their own scorers."""

import json
import re
import sys
from dataclasses import replace

import pytest

from grpo_edu.cli.main import main
from grpo_edu.evaluation import evaluate
from grpo_edu.models import load_policy
from grpo_edu.problems import gym
from grpo_edu.problems.gym import check_task, gym_answer, gym_problems, gym_score
from grpo_edu.problems.templates import PROBLEM_SETS, Problem, Scorer
from grpo_edu.prompts import chat_messages
from grpo_edu.rewards import accuracy_reward
from grpo_edu.runs.loading import load_split, parse_data
from grpo_edu.runs.log import read_log

CHAIN = "reasoning-gym:chain_sum"
# A dozen unlike tasks: numbers, words, lists, grids, several right answers, none stored, no answer of one line.
TASKS = (
    "chain_sum",
    "leg_counting",
    "letter_counting",
    "word_sorting",
    "spell_backward",
    "base_conversion",
    "game_of_life",
    "rotate_matrix",
    "countdown",
    "n_queens",
    "knights_knaves",
    "simple_equations",
)

pytestmark = pytest.mark.usefixtures("no_pictures", "reasoning_gym")


def test_problems_are_seeded_different_and_apart():
    train, heldout = gym_problems(CHAIN, "train", 60), gym_problems(CHAIN, "heldout", 40)
    assert train == gym_problems(CHAIN, "train", 60) and train[:7] == gym_problems(CHAIN, "train", 7)
    questions = {problem.prompt for problem in train + heldout}
    assert len(questions) == 100  # all different, and the splits share none
    for problem in train:
        terms = re.search(r"[0-9+\- ]+(?= =)", problem.prompt)[0].split()
        total = sum(
            int(term) * (-1 if sign == "-" else 1) for sign, term in zip(["+", *terms[1::2]], terms[::2], strict=True)
        )
        assert problem.level == CHAIN and problem.solution == f"#### {problem.answer}" == f"#### {total}"


@pytest.mark.parametrize("task", TASKS)
def test_the_reference_scores_1_and_nonsense_does_not(task):
    name = f"reasoning-gym:{task}"
    for problem in gym_problems(name, "heldout", 3):
        assert gym_score(f"So: {problem.solution}", problem.prompt, name) == 1.0
        assert gym_score("I do not know.", problem.prompt, name) == 0.0
        for nonsense in ("#### zzz", "#### ", "#### " + "9" * 400, "#### [[1, {", "#### \x00"):
            assert 0.0 <= gym_score(nonsense, problem.prompt, name) < 1.0


def test_an_answer_is_all_that_stands_behind_the_last_marker():
    assert gym_answer("#### 1\nno: #### 1 2\n3 4\n") == "1 2\n3 4"
    assert gym_answer("#### ") is None and gym_answer("5") is None
    assert gym_answer([{"role": "assistant", "content": "#### a b"}]) == "a b"


def test_accuracy_reward_asks_the_tasks_own_scorer_beside_others():
    (problem,) = gym_problems("reasoning-gym:word_sorting", "train", 1)
    plain = Problem("1 + 1?", "2", "basic", "1+1=2. #### 2")
    rows = [problem, problem, plain, plain]
    columns = {
        name: [getattr(row, field) for row in rows] for name, field in (("answer", "answer"), ("level", "level"))
    }
    completions = [problem.solution, "#### zebra", "#### 2", "#### 3"]
    rewards = accuracy_reward(completions, prompts=[row.prompt for row in rows], **columns)
    assert rewards[0] == 1.0 and rewards[1] < 1.0 and rewards[2:] == [1.0, 0.0]
    chats = [chat_messages(row.prompt) for row in rows]  # as TRL hands prompts over
    assert accuracy_reward(completions, prompts=chats, **columns) == rewards


def test_sets_are_named_mixed_and_balanced():
    assert parse_data(f"basic, {CHAIN}") == ("basic", CHAIN)
    mixed = load_split(("basic", CHAIN), "heldout", n=5)
    assert [problem.level for problem in mixed] == ["basic"] * 3 + [CHAIN] * 2
    with pytest.raises(ValueError, match="data.*'hard'.*basic, .*gsm8k, .*reasoning-gym"):
        parse_data("hard")


def test_what_cannot_be_is_said(monkeypatch):
    with pytest.raises(ValueError, match=r"no task 'chain_sun'; did you mean reasoning-gym:chain_sum\?"):
        check_task("reasoning-gym:chain_sun")
    with pytest.raises(ValueError, match="reasoning-gym:composite needs settings of its own"):
        gym_problems("reasoning-gym:composite", "train", 1)
    with pytest.raises(ValueError, match="gym_problems"):
        gym_score("#### 1", "What is 1?", CHAIN)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)  # as where it is not installed
    with pytest.raises(ValueError, match=r'not installed; pip install "grpo-edu\[domains\]"'):
        gym.check_task(CHAIN)


def test_trains_and_evaluates_like_the_shipped_ones(policy_dir, tmp_path, capsys, monkeypatch):
    output = tmp_path / "run"
    sizes = ["--num-generations", "4", "--prompts-per-step", "2", "--max-completion-length", "16", "--n", "4"]
    arguments = ["--model", str(policy_dir), "--data", CHAIN, *sizes, "--no-greedy"]
    assert main(["train", *arguments, "--num-problems", "8", "--steps", "2", "--output", str(output), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result["accuracy_before"]["per_level"]) == [CHAIN] and len(read_log(output / "metrics.jsonl")) == 2
    typed = ["--model", str(output), "--data", CHAIN, "--n", "4", "--max-completion-length", "16"]
    assert main(["evaluate", *typed, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["k"] == result["accuracy_after"]["k"]
    monkeypatch.chdir(tmp_path)
    assert main(["train", *arguments, "--num-problems", "8", "--steps", "1"]) == 0
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["random-reasoning-gym-chain_sum-seed0"]


def test_an_evaluation_counts_full_scores_only(policy_dir, monkeypatch):
    problems = gym_problems("reasoning-gym:word_sorting", "heldout", 4)
    scores = iter([1.0, 0.5, 0.0, 1.0])
    scorer = Scorer(gym_answer, lambda *arguments: next(scores))
    monkeypatch.setitem(PROBLEM_SETS, "reasoning-gym", replace(PROBLEM_SETS["reasoning-gym"], scorer=scorer))
    found = evaluate(*load_policy(policy_dir), problems, max_completion_length=4)
    assert found.correct == [True, False, False, True] and found.n == 4


@pytest.mark.slow
@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.long)])
def test_every_task_can_be_made_or_says_why(every):
    """Two problems of each; nonsense is scored and raises nothing."""
    refused = []
    from reasoning_gym.factory import DATASETS

    for task in ["composite", *sorted({*DATASETS} - {"composite"})[::every]]:
        name = f"reasoning-gym:{task}"
        try:
            problems = gym_problems(name, "train", 2)
        except ValueError as error:
            refused.append(task)
            assert name in str(error)
            continue
        assert all(0 <= gym_score("#### zzz", problem.prompt, name) <= 1 for problem in problems), task
    assert refused == ["composite"]
