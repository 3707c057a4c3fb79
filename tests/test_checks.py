"""The checks of the exercises: what they say of right, wrong, broken and unwritten answers."""

import math
import pickle
import pickletools
import random
import re

import numpy as np
import pytest
import torch

from grpo_edu import checks
from grpo_edu.checks.__main__ import RIGHT_ANSWERS, answers_in, main, misjudged, table
from grpo_edu.checks.compare import difference
from grpo_edu.checks.core import Call, Exercise, Mistake, Outcome, Part, attempt, call
from grpo_edu.checks.feedback import NothingEarned
from grpo_edu.checks.trained import TRAINED

KNOWN = checks.exercises()
RIGHT = answers_in(RIGHT_ANSWERS)


def double(x):
    return 2 * x


DOUBLE = Exercise(
    double,
    parts=(
        Part("small", 2, lambda rng: call(torch.tensor([float(rng.randrange(3, 9)), 1.0]))),
        Part("negative", 1, lambda rng: call(torch.tensor([-3.0, 1.0]))),
    ),
    mistakes={
        "it is squared": Mistake("Look at 3 and 9.", lambda x: x**2),
        "the sign is lost": Mistake("Look at -3.", lambda x: 2 * x.abs()),
    },
)
LENIENT = Exercise(double, DOUBLE.parts, {"none": Mistake("", double)})


# ---- every exercise of the course ----


@pytest.mark.parametrize("name", KNOWN)
def test_right_answers_pass_and_each_mistake_is_named(name):
    assert misjudged(KNOWN[name], RIGHT[name], range(3)) == []


def test_every_exercise_has_enough_right_answers_and_mistakes():
    assert set(RIGHT) == set(KNOWN)
    for name, exercise in KNOWN.items():
        assert len(exercise.mistakes) >= 4 and len(RIGHT[name]) >= 3
        assert getattr(checks, f"check_{name}") is exercise


@pytest.mark.parametrize("name", KNOWN)
def test_an_unwritten_answer_fails_politely(name):
    def stub(*args, **kwargs):
        raise NotImplementedError

    feedback = KNOWN[name](stub)
    assert feedback.points == 0 and feedback.mistakes == ["not written yet"]
    assert "Traceback" not in str(feedback) and "Not written yet" in str(feedback)


def test_a_misjudged_answer_would_be_seen():
    assert len(misjudged(LENIENT, [lambda x: x], range(1))) == 2
    assert "| double | it is squared | 0 of 3 |" in table({"double": DOUBLE}, {})


def test_the_command_tries_every_answer_and_fails_where_one_is_misjudged(tmp_path, monkeypatch, capsys):
    (tmp_path / "doubles.py").write_text('RIGHT_ANSWERS = {"double": (lambda x: x + x,)}')
    for exercise, code in ((DOUBLE, 0), (LENIENT, 1)):
        monkeypatch.setattr("grpo_edu.checks.__main__.exercises", lambda known=exercise: {"double": known})
        assert main(["--seeds", "2", "--answers", str(tmp_path)]) == code
        said = capsys.readouterr().out
        assert "| double | 2 right ones | 3 each |" in said
        assert ("1 exercises: every right answer passes" in said) is (code == 0)
        assert said.count("'none' is not named") == 2 * code  # once for each seed


def test_the_command_says_where_it_looked_for_right_answers(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("grpo_edu.checks.__main__.exercises", lambda: {"double": DOUBLE})
    assert main(["--seeds", "1", "--answers", str(tmp_path)]) == 0
    assert f"No right answers in {tmp_path}" in capsys.readouterr().out


def test_an_unknown_check_is_an_attribute_error():
    with pytest.raises(AttributeError, match="check_nothing"):
        getattr(checks, "check_nothing")  # noqa: B009  as an attribute it would be a useless expression


# ---- what a student reads ----


def test_a_wrong_answer_is_shown_with_its_input_and_named():
    feedback = DOUBLE(lambda x: x * x, seed=3)
    first = random.Random("3 double small").randrange(3, 9)
    text = str(feedback)
    assert feedback.points == 0 and text.startswith("double: 0 of 3 points")
    assert f"input    tensor([{first}., 1.])" in text
    shown = re.findall(r"(?:expected|got) +tensor\(\[ *([0-9]+)\.", text)
    assert shown[:2] == [str(2 * first), str(first * first)]
    assert "looks like it is squared" in text and "hint: Look at 3 and 9." in text


def test_a_mistake_is_known_by_what_it_does_not_by_how_it_is_written():
    def numpy_population_std(rewards, num_generations):
        groups = rewards.numpy().reshape(-1, num_generations)
        centered = groups - groups.mean(axis=1, keepdims=True)
        scaled = centered / (groups.std(axis=1, keepdims=True) + 1e-4)  # numpy's default: ddof = 0
        scaled[(groups == groups[:, :1]).all(axis=1)] = 0
        return torch.tensor(scaled.ravel())

    feedback = checks.check_group_advantages(numpy_population_std, seed=1)
    assert feedback.mistakes == ["the standard deviation divides by G"]


def test_points_are_partial():
    feedback = DOUBLE(lambda x: 2 * x.abs(), seed=0)
    assert (feedback.points, feedback.max_points) == (2, 3)
    assert [part.passed for part in feedback.parts] == [True, False]
    assert feedback.mistakes == ["the sign is lost"]


def test_an_unknown_mistake_shows_the_values_all_the_same():
    feedback = DOUBLE(lambda x: 3 * x, seed=0)
    assert feedback.mistakes == [] and "2 of 2 values differ" in str(feedback)


def test_an_error_is_shown_with_the_line_of_the_student():
    def broken(x):
        return x @ torch.ones(7)  # a line of theirs

    text = str(DOUBLE(broken, seed=0))
    assert "raises RuntimeError" in text and "x @ torch.ones(7)" in text
    assert "core.py" not in text


def test_returning_nothing_is_said():
    assert DOUBLE(lambda x: None, seed=0).mistakes == ["nothing is returned"]


def test_changing_the_input_is_a_mistake_even_with_the_right_result():
    def in_place(x):
        return x.mul_(2)

    assert DOUBLE(in_place, seed=0).mistakes == ["the input is changed in place"]


def test_handing_in_something_else_than_a_function_is_refused():
    with pytest.raises(TypeError, match="check_double\\(double\\)"):
        DOUBLE(torch.ones(2))


def is_small(x):
    return x <= 3


BORDER = Exercise(
    is_small,
    parts=(Part("one to nine", 2, lambda rng: call(rng.choice([1, 2, 8, 9])), always=(call(3), call(5))),),
    mistakes={
        "the border is left out": Mistake("3 is small.", lambda x: x < 3),
        "the border lies elsewhere": Mistake("At 3.", lambda x: x < 7, also=(lambda x: x < 6,)),
        "all are small": Mistake("Not 9.", lambda x: True),
    },
)


@pytest.mark.parametrize("seed", range(20))
def test_an_input_on_the_border_is_always_among_them(seed):
    feedback = BORDER(lambda x: 3 > x, seed=seed)
    assert feedback.mistakes == ["the border is left out"] and feedback.parts[0].given == "3"


def test_a_mistake_is_known_in_each_of_its_ways():
    assert BORDER(lambda x: x <= 5, seed=1).mistakes == ["the border lies elsewhere"]
    unseen = Mistake("", lambda x: x < 3, also=(lambda x: x <= 3,))
    assert len(misjudged(Exercise(is_small, BORDER.parts, {"unseen": unseen}), [], range(1))) == 1


def test_the_input_that_is_shown_tells_this_mistake_from_the_others():
    part = Part("large", 1, lambda rng: call(5), always=(call(9),))  # at 5 another mistake comes to the same
    exercise = Exercise(is_small, (part,), BORDER.mistakes)
    assert exercise(lambda x: x < 99).parts[0].given == "9"


def test_an_input_may_say_how_it_is_asked():
    def twice(function, x):
        return function(function(x))

    part = Part("twice", 1, lambda rng: Call((1.0,), ask=twice))
    exercise = Exercise(double, (part,), {})
    assert exercise(lambda x: x + x).points == 1 and exercise(lambda x: x + 1).parts[0].got == "3"


def test_html_holds_the_same_and_escapes_it():
    def broken(x):
        raise ValueError("<b>bold</b>")

    page = DOUBLE(broken, seed=0)._repr_html_()
    assert "<b>bold</b>" not in page and "&lt;b&gt;bold&lt;/b&gt;" in page
    assert "✗" in page and "✓" in DOUBLE(double)._repr_html_()


# ---- inputs ----


def test_inputs_follow_the_seed_and_the_environment(monkeypatch):
    seen = []

    def note(x):
        seen.append(x.tolist())
        return 2 * x

    DOUBLE(note, seed=5)
    first, seen[:] = list(seen), []
    DOUBLE(note, seed=5)
    assert seen == first
    monkeypatch.setenv("GRPO_EDU_CHECK_SEED", "5")
    seen.clear()
    assert DOUBLE(note).seed == 5 and seen == first
    monkeypatch.delenv("GRPO_EDU_CHECK_SEED")
    assert DOUBLE(note).seed != DOUBLE(note).seed


def test_a_pasted_answer_fails_on_other_inputs():
    pasted = {3: torch.tensor([6.0, 2.0])}
    assert DOUBLE(lambda x: pasted.get(int(x[0]), torch.zeros(2)), seed=1).points == 0


def test_the_random_state_of_the_notebook_is_left_alone():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    attempt(lambda: torch.rand(100), call())
    assert torch.equal(torch.rand(1), expected)


# ---- points for nbgrader ----


def test_grade_returns_points_and_raises_one_line_where_there_are_none(capsys):
    assert DOUBLE(double).grade() == 3
    with pytest.raises(NothingEarned, match="double: 0 of 3 points so far") as caught:
        DOUBLE(lambda x: x * x).grade()
    assert caught.value._render_traceback_() == ["double: 0 of 3 points so far."]
    assert "looks like it is squared" in capsys.readouterr().out


def test_nbgrader_reads_these_points():
    utils = pytest.importorskip("nbgrader.utils", reason="nbgrader is not installed (extra classroom)")
    from nbformat.v4 import new_code_cell, new_output

    def points_of(output):
        metadata = {"nbgrader": {"grade": True, "solution": False, "points": 3, "grade_id": "x", "schema_version": 3}}
        return utils.determine_grade(new_code_cell("", metadata=metadata, outputs=[output]))

    assert points_of(new_output("execute_result", {"text/plain": repr(DOUBLE(lambda x: 2 * x.abs()).grade())})) == (
        2,
        3,
    )
    assert points_of(new_output("error", ename="NothingEarned", evalue="", traceback=[])) == (0, 3)


# ---- comparing ----


@pytest.mark.parametrize(
    ("got", "expected", "found"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0 + 1e-7]), None),
        (torch.tensor([[1.0]]), torch.tensor([1.0]), "the shape is (1, 1), not (1,)"),
        (torch.tensor([1, 2]), torch.tensor([1.0, 2.0]), "it holds whole numbers (torch.int64), not floating-point"),
        (torch.tensor([1.0, 9.0]), torch.tensor([1.0, 2.0]), "1 of 2 values differ"),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), None),
        ([1.0], torch.tensor([1.0]), "it is a list, not a tensor"),
        (torch.tensor(2.0), 2.0, None),
        (np.float32(2.0), 2.0, None),
        (True, 1.0, "it is a truth value, not a number"),
        ("2", 2.0, "it is a text, not a number"),
        (1.0, True, "it is a number, not a truth value"),
        (None, "a", "it is None, not a text"),
        ([1, 2], [1, 2, 3], "it has 2 entries, not 3"),
        ([1], [1, 2, 3], "it has 1 entry, not 3"),
        ((1.0, None), [1.0, None], None),
        ([1.0, 0.0], [1.0, None], "in place [1], counted from 0: it is a number, not None"),
        ([[1.0], [1.0, 2.0]], [[1.0], [1.0, 3.0]], "in place [1][1], counted from 0: the value is another one"),
        ({"a": 1.0}, {"a": 2.0}, "under 'a': the value is another one"),
        ({"b": 1.0}, {"a": 1.0}, "its keys are ['b'], not ['a']"),
    ],
)
def test_differences_in_words(got, expected, found):
    said = difference(got, expected)
    assert said is None if found is None else said.startswith(found)


def test_inputs_are_shown_as_they_are_typed():
    odd = 0.25 + 2.0**-25
    assert call(odd, math.prod, [double, (-0.0,)]).text() == "0.250000029802, prod, [double, (0.0,)]"
    assert call("a,b".split, kind=-0.0).text() == "'a,b'.split, kind=0"


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_inputs_travel_to_another_process_without_a_module_of_answers(name):
    """A grader pickles the inputs for the process that runs a student's code, where only these modules can be read."""
    exercise = KNOWN[name]
    content = pickle.dumps([exercise.calls(part, 3) for part in exercise.parts])
    names = {text for _, text, _ in pickletools.genops(content) if isinstance(text, str)}
    modules = {name for name in names if name.startswith("grpo_edu.checks")}
    assert modules <= {"grpo_edu.checks.core", "grpo_edu.checks.inputs"}


@pytest.mark.slow
def test_a_reward_that_pays_anything_trains_a_worse_policy_and_the_counts_are_shown():
    exercise = KNOWN["accuracy_reward"]
    (part,) = [part for part in exercise.parts if part.name == TRAINED]
    calls = exercise.calls(part, 3)
    pays_anything = lambda completions, answer: [float("####" in text) for text in completions]  # noqa: E731
    result = exercise.judge(part, calls, [attempt(pays_anything, one) for one in calls])
    assert result.points == 0 and "of 60 before" in result.got and "lost" in result.got


@pytest.mark.parametrize(
    ("value", "points"),
    [
        ({"before": 30, "won": 20, "lost": 1}, 2),
        ({"before": 30, "won": 5, "lost": 4}, 0),
        ({"before": 30, "won": 1, "lost": 20}, 0),
        ({"before": 30, "won": 1000, "lost": 0}, 0),
        ({"won": True}, 0),
        (True, 0),
    ],
)
def test_only_a_significant_gain_counts_and_what_is_no_count_earns_nothing(value, points):
    exercise = KNOWN["accuracy_reward"]
    result = exercise.judge(exercise.parts[-1], exercise.calls(exercise.parts[-1], 3), [Outcome(value)])
    assert result.points == points
