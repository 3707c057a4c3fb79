"""The checks of the exercises: what they say of right, wrong, broken and unwritten answers."""

import doctest
import importlib
import json
import math
import pickle
import pickletools
import random
import re
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from try_checks import (
    RIGHT_ANSWERS,
    WRONG_ANSWERS,
    answers_in,
    failing_input,
    ignore_demand,
    main,
    misjudged,
    read_demands,
    table,
)

from grpo_edu import checks
from grpo_edu.checks import core
from grpo_edu.checks.compare import difference, shown, shown_apart
from grpo_edu.checks.core import Call, Exercise, Mistake, Outcome, Part, attempt, call, slip_credit, trial
from grpo_edu.checks.inputs import gradient_of
from grpo_edu.checks.trained import TRAINED, TrainedExercise

REPOSITORY = Path(__file__).resolve().parents[1]
KNOWN = checks.exercises()
RIGHT, WRONG = answers_in(RIGHT_ANSWERS), answers_in(WRONG_ANSWERS)


def double(x):
    """Twice x."""
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


@pytest.mark.parametrize("draws", [range(1), pytest.param(range(1, 20), marks=pytest.mark.long)], ids=len)
@pytest.mark.parametrize("name", KNOWN)
def test_right_answers_pass_and_each_mistake_is_named(name, draws):
    exercise = getattr(KNOWN[name], "untrained", KNOWN[name])
    assert misjudged(exercise, RIGHT[name], draws, WRONG.get(name, ())) == []


def seconds_each(names):
    """Cases that train, of which each run tries one."""
    first, *others = names
    return [first, *(pytest.param(name, marks=pytest.mark.long) for name in others)]


@pytest.mark.parametrize(
    "name", seconds_each(name for name, exercise in KNOWN.items() if isinstance(exercise, TrainedExercise))
)
def test_a_policy_that_is_trained_with_a_right_answer_gets_better(name):
    """With one that is not a reference; `python tests/try_checks.py` trains with all of them."""
    feedback = KNOWN[name](RIGHT[name][-1], seed=0)
    assert feedback.points == feedback.max_points, feedback


def text_of_exercises():
    """Exercise → what a student reads in the cells before its check, without marks of Markdown."""
    found = {}
    for path in sorted((REPOSITORY / "exercises").glob("[0-9]*.ipynb")):
        text = ""
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            source = "".join(cell["source"])
            check = re.search(r"checks\.check_(\w+)\(", source)
            text += f"\n{source}"
            if check:
                found[check[1]] = plain_words(text)
                text = ""
    return found


def plain_words(text):
    return " ".join(re.sub(r"[*`]|</?\w+>", "", text).split())


def test_every_demand_of_an_exercise_stands_in_its_text():
    demands, texts = read_demands(), text_of_exercises()
    assert {*demands} == {*KNOWN} == {*texts} and min(map(len, demands.values())) >= 3
    missing = [(name, words) for name, own in demands.items() for words in own if plain_words(words) not in texts[name]]
    assert missing == []


@pytest.mark.parametrize("name", KNOWN)
def test_every_demand_has_an_input_that_is_always_tried(name):
    """So an answer that ignores it loses points whatever the seed; and so does one with any known mistake."""
    exercise = getattr(KNOWN[name], "untrained", KNOWN[name])
    asked = [ignore_demand(exercise, words, WRONG.get(name, ())) for words in read_demands()[name].values()]
    asked += [(one, way) for one, mistake in exercise.mistakes.items() for way in (mistake.wrong, *mistake.also)]
    asked += [(answer.__name__, answer) for answer in WRONG.get(name, ())]
    assert [one for one, answer in asked if failing_input(exercise, answer) is None] == []


DISGUISES = {
    "in a list": lambda value: value.tolist() if value.ndim else value,
    "numpy array": lambda value: value.numpy(force=True) if value.ndim else value,
    "the data type": lambda value: value if value.is_floating_point() else value.double(),
    "transposed": lambda value: value.T.clone() if value.ndim == 2 else value,
    "the shape": lambda value: value[None] if value.ndim else value,
    "gradient is cut off": lambda value: value.detach(),
}


def in_disguise(value, words):
    """A right result in the wrong form of this name; as it is if it has no such form."""
    if words == "swapped":
        return value[::-1] if isinstance(value, (tuple, list)) and len(value) == 2 else value
    return DISGUISES[words](value) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("name", KNOWN)
def test_a_right_result_in_a_wrong_form_is_named(name):
    """Whatever the form is called, for instance by the exercise itself: the name holds for all inputs."""
    exercise = getattr(KNOWN[name], "untrained", KNOWN[name])  # the form of a result shows before a training
    for words in (*DISGUISES, "swapped"):
        feedback = exercise(lambda *args, w=words, **more: in_disguise(exercise.reference(*args, **more), w), seed=1)
        if feedback.points < feedback.max_points:
            said = [part.mistake for part in feedback.parts if part.certain and not part.passed]
            own = set(said) & set(exercise.mistakes)
            assert own or any(words in one or "gradient" in one for one in said), f"{words}: {feedback}"


def test_every_loss_exercise_asks_for_the_gradient():
    losses = "completion_logps k3 clipped_loss aggregate sequence_ratio logps_in_chunks reinforce_loss ewc_penalty"
    for name in losses.split():
        reference = KNOWN[name].reference
        feedback = KNOWN[name](lambda *args, f=reference: f(*args).detach(), seed=2)
        assert feedback.mistakes == ["the gradient is cut off"] and "`.item()`" in str(feedback)
        assert 0 < feedback.points < feedback.max_points


def test_every_exercise_has_enough_right_answers_and_mistakes():
    assert set(RIGHT) == set(KNOWN)
    for name, exercise in KNOWN.items():
        assert len(exercise.mistakes) >= 4 and len(RIGHT[name]) >= 3
        assert all(mistake.hint for mistake in exercise.mistakes.values())
        assert getattr(checks, f"check_{name}") is exercise


TRANSLATED = re.compile(
    r"\b(turned|taken for|changed places|plays? no part|weighs? alike|upside down|asked for|looked (at|for)"
    r"|let (pass|through)|stands?(?! for)|beside|siblings|mend(ed)?|sick|ill|seldom|nobody|a (tie|token) is worth"
    r"|(number|answer|value|scale|update|bytes) an? \w+)\b"
)


@pytest.mark.parametrize("name", KNOWN)
def test_names_and_hints_are_plain_sentences(name):
    """No words that readers stopped at, each of which has a plain one; no bare pronoun first; a hint is a sentence."""
    own = [*KNOWN[name].mistakes, *(part.name for part in KNOWN[name].parts)]
    hints = [mistake.hint for mistake in KNOWN[name].mistakes.values()]
    assert [text for text in own + hints if TRANSLATED.search(text)] == []
    assert [text for text in own if text.split()[0] in ("it", "that", "this", "these", "those", "they")] == []
    assert [hint for hint in hints if hint[-1] not in ".?)"] == []


@pytest.mark.parametrize("name", KNOWN)
def test_an_unwritten_answer_fails_politely(name):
    def stub(*args, **kwargs):
        raise NotImplementedError

    feedback = KNOWN[name](stub)
    assert feedback.points == 0 and feedback.mistakes == ["not written yet"]
    assert "Traceback" not in str(feedback) and "Not written yet" in str(feedback)


def rows_apart(rewards, num_generations):
    """The rows of a group, where a student takes them to be N rows apart."""
    return rewards.view(num_generations, -1).T


def first_useful(useful, num_generations, groups_needed):
    kept = useful.nonzero().flatten()[:groups_needed]
    sampled = int(kept[-1]) + 1 if len(kept) == groups_needed else len(useful)
    return kept, sampled * num_generations


def std_above_0(rewards, num_generations, groups_needed):
    return first_useful(rewards.view(-1, num_generations).std(dim=1) > 0, num_generations, groups_needed)


def std_of_each_group_above_0(rewards, num_generations, groups_needed):
    useful = torch.stack([group.std() > 0 for group in rewards.split(num_generations)])
    return first_useful(useful, num_generations, groups_needed)


def unlike_their_mean(rewards, num_generations, groups_needed):
    groups = rewards.view(-1, num_generations)
    useful = ((groups - groups.mean(dim=1, keepdim=True)).abs() > 0).any(dim=1)
    return first_useful(useful, num_generations, groups_needed)


def groups_apart(rewards, num_generations, groups_needed):
    groups = rows_apart(rewards, num_generations)
    return first_useful(groups.amax(dim=1) > groups.amin(dim=1), num_generations, groups_needed)


def gate_of_rows_apart(right, bonus, num_generations):
    share = rows_apart(torch.tensor(right), num_generations).mean(dim=1).repeat(num_generations).tolist()
    return [one * (1 + extra * (half >= 0.5)) for one, extra, half in zip(right, bonus, share, strict=True)]


def others_of_rows_apart(rewards, num_generations, truncated):
    count, found = len(rewards) // num_generations, torch.zeros_like(rewards)
    for row in range(len(rewards)):
        others = [at for at in range(row % count, len(rewards), count) if at != row and not truncated[at]]
        if others and not truncated[row]:
            found[row] = rewards[row] - rewards[others].mean()
    return found


def mean_over_the_row(per_token_logps, sampling_per_token_logps, completion_mask, cap):
    logs = (per_token_logps - sampling_per_token_logps).masked_fill(completion_mask == 0, 0.0)
    return logs.mean(dim=1).exp().clamp(max=cap)


def searched_for(pattern):
    def extract_number(text):
        found = re.search(pattern, text)
        return found.group(1).replace(",", "") if found else None

    return extract_number


def turned_product(weight, A, B, alpha):
    return weight + alpha / A.shape[0] * (A @ B)


@pytest.mark.parametrize(
    ("name", "answer", "words"),
    [
        ("dynamic_sampling", std_above_0, "rounding"),
        ("dynamic_sampling", std_of_each_group_above_0, "rounding"),
        ("dynamic_sampling", unlike_their_mean, "rounding"),
        ("dynamic_sampling", groups_apart, "groups"),
        ("gated_reward", gate_of_rows_apart, "groups"),
        ("rloo_advantages", others_of_rows_apart, "groups"),
        ("truncated_weights", mean_over_the_row, "mean"),
        ("pass_at_k", lambda rewards, k: 1 - (1 - sum(rewards) / len(rewards)) ** k, "biased"),
        ("extract_number", searched_for(r"####\s*(-?[\d,]+)"), "first marker"),
        ("extract_number", searched_for(r"#### *(-?\d+)"), "first marker"),
        ("extract_number", searched_for(r"#### (\d+)"), "first marker"),
        ("merged_weight", turned_product, "A @ B"),
    ],
)
def test_what_students_write_is_named(name, answer, words):
    for seed in range(4):
        feedback = KNOWN[name](answer, seed=seed)
        assert any(words in said for said in feedback.mistakes), feedback


def test_an_error_is_named_only_where_its_message_is_the_same():
    """Both raise a RuntimeError of shapes, but only one of them has multiplied A by B."""
    feedback = KNOWN["merged_weight"](lambda weight, A, B, alpha: weight + A @ B.T, seed=0)
    assert feedback.mistakes and not any("A @ B" in said for said in feedback.mistakes)


def test_the_diagnosis_comes_before_the_tensors_and_these_are_rounded():
    feedback = KNOWN["group_advantages"](lambda rewards, size: KNOWN["group_advantages"].reference(rewards, size) * 3)
    text = str(KNOWN["group_advantages"](std_of_g, seed=0))
    assert text.index("looks like") < text.index("input") < text.index("got")
    shown = [number for part in feedback.parts for number in re.findall(r"0\.0*(\d+)", part.expected + part.got)]
    assert shown and max(map(len, shown)) <= 4, feedback


def std_of_g(rewards, num_generations):
    groups = rewards.view(-1, num_generations)
    std = groups.std(dim=1, keepdim=True, unbiased=False)
    return ((groups - groups.mean(dim=1, keepdim=True)) / (std + 1e-4)).flatten()


def test_values_that_differ_late_are_shown_with_the_digits_that_tell_them_apart():
    two = shown_apart(torch.tensor([1.0, 1 / 3]), torch.tensor([1.0, 0.25]))
    assert two == ("tensor([1.0, 0.3333])", "tensor([1.0, 0.25])")
    assert shown_apart(torch.tensor([0.70711]), torch.tensor([0.70714])) == ("tensor([0.70711])", "tensor([0.70714])")
    assert shown_apart(torch.tensor([123456.0]), torch.tensor([0.5]))[0] == "tensor([123456.0])"


def test_a_misjudged_answer_would_be_seen():
    assert len(misjudged(LENIENT, [lambda x: x], range(1), [double])) == 3
    assert "| double | it is squared | 1.5 of 3 |" in table({"double": DOUBLE}, {})


def test_mistakes_are_listed_as_changes_of_the_reference():
    text = """
        it is squared: 2 * x -> x**2
            Look at 3
            and 9.
            or: x * x
        nothing is doubled:
            x
            Twice.
    """
    squared, same = core.parse_mistakes(text, double).items()
    assert squared[0] == "it is squared" and squared[1].hint == "Look at 3 and 9."
    assert [way(5) for way in (squared[1].wrong, *squared[1].also)] == [25, 25]
    assert same[0] == "nothing is doubled" and same[1].wrong(7) == 7 and same[1].hint == "Twice."
    with pytest.raises(ValueError, match="`3 .*` is 0 times in double"):
        core.changed(double, "3 * x -> x")


def test_a_name_that_does_not_hold_elsewhere_would_be_seen():
    def squared_below_20(x):  # all inputs of seed 0 are there
        return x**2 if calls_are(trial(DOUBLE, 0).calls, x) else 2 * x + 1

    def calls_are(parts, x):
        return any(torch.equal(one.args[0], x) for calls in parts for one in calls)

    (found,) = misjudged(DOUBLE, [], range(1), [squared_below_20])
    assert "'it is squared' is not what 'squared_below_20' does" in found


def test_the_command_tries_every_answer_and_fails_where_one_is_misjudged(tmp_path, monkeypatch, capsys):
    (tmp_path / "doubles.py").write_text('RIGHT_ANSWERS = {"double": (lambda x: x + x,)}')
    for exercise, code in ((DOUBLE, 0), (LENIENT, 1)):
        monkeypatch.setattr("try_checks.exercises", lambda known=exercise: {"double": known})
        assert main(["--seeds", "2", "--answers", str(tmp_path)]) == code
        said = capsys.readouterr().out
        assert "| double | 2 right ones | 3 each |" in said
        assert ("Every right answer passes" in said) is (code == 0)
        assert said.count("'none' loses no points") == 2 * code  # once for each seed


def test_the_command_says_where_it_looked_for_right_answers(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("try_checks.exercises", lambda: {"double": DOUBLE})
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
    assert text.startswith("double: 1.5 of 3 points")
    assert f"input    x=tensor([{first}.0, 1.0])" in text
    shown = re.findall(r"(?:expected|got) +tensor\(\[([0-9]+)\.", text)
    assert shown[:2] == [str(2 * first), str(first * first)]
    assert "looks like: it is squared" in text and "hint: Look at 3 and 9." in text


def test_a_mistake_is_known_by_what_it_does_not_by_how_it_is_written():
    def numpy_population_std(rewards, num_generations):
        groups = rewards.numpy().reshape(-1, num_generations)
        centered = groups - groups.mean(axis=1, keepdims=True)
        scaled = centered / (groups.std(axis=1, keepdims=True) + 1e-4)  # numpy's default: ddof = 0
        scaled[(groups == groups[:, :1]).all(axis=1)] = 0
        return torch.tensor(scaled.ravel())

    feedback = checks.check_group_advantages(numpy_population_std, seed=1)
    assert feedback.mistakes == ["the standard deviation divides by G"]


def test_points_are_partial(monkeypatch):
    for credit, points in (("", 2.5), ("0", 2), ("0.9", 2.9)):
        monkeypatch.setenv("GRPO_EDU_SLIP_CREDIT", credit)
        feedback = DOUBLE(lambda x: 2 * x.abs(), seed=0)
        assert (feedback.points, feedback.max_points) == (points, 3)
        assert [part.passed for part in feedback.parts] == [True, False]
        assert feedback.mistakes == ["the sign is lost"]


@pytest.mark.parametrize("credit", ["1", "-0.1", "half", "nan"])
def test_a_credit_that_is_no_share_is_refused(credit, monkeypatch):
    monkeypatch.setenv("GRPO_EDU_SLIP_CREDIT", credit)
    with pytest.raises(ValueError, match=f"{credit}.*from 0 to below 1"):
        slip_credit()


@pytest.mark.parametrize("name", KNOWN)
def test_an_answer_without_a_computation_earns_nothing(name):
    exercise = getattr(KNOWN[name], "untrained", KNOWN[name])
    answers = {repr(value): lambda *_, v=value, **__: v for value in ([], {}, "", None, 0.0, 1, True, False)}
    for place, argument in enumerate(exercise.arguments):
        answers[argument] = lambda *args, n=place, **kwargs: [*args, *kwargs.values()][n]
    assert {text: points for text, answer in answers.items() if (points := exercise(answer, seed=3).points)} == {}


def test_a_mistake_of_one_part_alone_is_said_to_be_no_more():
    def squared_if_positive(x):
        return x**2 if x[0] > 0 else x

    feedback = DOUBLE(squared_if_positive, seed=0)
    assert feedback.mistakes == [] and feedback.points == 0
    assert feedback.parts[0].mistake == "it is squared" and not feedback.parts[0].certain
    assert "on these inputs it behaves like: it is squared" in str(feedback)
    assert "On these inputs it behaves like: <b>" in feedback._repr_html_()
    slip = DOUBLE(lambda x: x**2 if x[0] > 0 else x * 2, seed=0)
    assert slip.mistakes == [] and slip.parts[0].points == 0  # in the other part it does something else


left_over = torch.tensor([3.0, 1.0])


def test_a_variable_of_the_notebook_is_named():
    feedback = DOUBLE(lambda x: x + left_over, seed=0)
    assert feedback.mistakes == ["it reads `left_over`, a variable of the notebook"]
    assert DOUBLE(lambda x: x + x * math.pi, seed=0).mistakes == []


def test_two_shapes_that_do_not_fit_are_named_with_the_remedy():
    feedback = DOUBLE(lambda x: x * torch.ones(2, 3), seed=0)
    assert "different shapes" in feedback.mistakes[0] and "[:, None]" in str(feedback)


def test_an_unknown_mistake_shows_the_values_all_the_same():
    feedback = DOUBLE(lambda x: 3 * x, seed=0)
    assert feedback.mistakes == [] and "2 of 2 values differ" in str(feedback)


def test_an_error_is_shown_with_the_line_of_the_student():
    def helper(x):
        return torch.nn.functional.linear(x, torch.ones(3, 7))  # the innermost line of theirs

    def broken(x):
        return helper(x)

    text = str(DOUBLE(broken, seed=0))
    assert "raises RuntimeError" in text and "linear(x, torch.ones(3, 7))" in text
    assert "core.py" not in text and "return helper" not in text


def test_an_interrupted_answer_names_the_input_and_the_seconds(monkeypatch, capsys):
    """What a student sees who presses ■ while a loop does not end."""
    monkeypatch.setattr(core, "PATIENCE", 0.2)
    asked = []

    def endless(x):
        asked.append(x)
        if len(asked) < 3:
            return 2 * x
        signal.setitimer(signal.ITIMER_REAL, 0.6)
        while True:
            x = x + 0

    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        feedback = DOUBLE(endless, seed=0)
    finally:
        signal.signal(signal.SIGALRM, previous)
    third = trial(DOUBLE, 0).calls[0][2]
    assert len(asked) == 3 and feedback.points == 0
    assert feedback.parts[0].given == third.text(["x"]) and feedback.mistakes == ["a loop never ends"]
    assert feedback.parts[1].got == "not tried"
    assert re.search(r"interrupted after \d s, at `(x = x \+ 0|while True:)`", feedback.parts[0].why)
    warning = capsys.readouterr().out
    assert "still running after 0.2 s" in warning and third.text() in warning


@pytest.mark.parametrize(
    ("exercise", "answer", "mistake"),
    [
        ("double", lambda x: None, "nothing is returned"),
        ("double", lambda x: torch.zeros(2), "every input gives the same result"),
        ("is_small", lambda x: True, "all are small"),
    ],
)
def test_a_mistake_of_every_exercise_is_named_and_earns_nothing(exercise, answer, mistake):
    feedback = {"double": DOUBLE, "is_small": BORDER}[exercise](answer, seed=0)
    assert feedback.mistakes == [mistake] and feedback.points == 0


def test_right_values_of_an_input_that_was_changed_earn_half():
    feedback = DOUBLE(lambda x: x.mul_(2), seed=0)
    assert feedback.mistakes == ["the input is changed in place"] and feedback.points == 1.5
    feedback = DOUBLE(lambda x: x.mul_(5), seed=0)
    assert feedback.mistakes == ["the input is changed in place"] and feedback.points == 0


def test_handing_in_something_else_than_a_function_is_refused():
    with pytest.raises(TypeError, match="check_double\\(double\\)"):
        DOUBLE(torch.ones(2))


def is_small(x):
    return x <= 3


BORDER = Exercise(
    is_small,
    parts=(Part("one to nine", 2, lambda rng: call(rng.choice([1, 2, 8, 9])), always=(call(3), call(5), call(9))),),
    mistakes={
        "the border is left out": Mistake("3 is small.", lambda x: x < 3),
        "the border lies elsewhere": Mistake("At 3.", lambda x: x < 7, also=(lambda x: x < 6,)),
        "all are small": Mistake("Not 9.", lambda x: True),
    },
)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (torch.zeros(2, dtype=torch.complex64), "complex numbers"),
        (torch.zeros(2).to_sparse(), "sparse"),
        (torch.zeros(2, device="meta"), "meta"),
        (1j, "it is a complex, not a tensor"),
        (torch.full((2,), math.nan), "each is NaN"),
        (torch.ones(2, requires_grad=True), "2 of 2 values differ"),
    ],
)
def test_results_of_every_kind_are_judged(result, words):
    assert words in str(DOUBLE(lambda x: result, seed=0)).replace("\n          ", "")


@pytest.mark.parametrize(
    "result", [[0.0] * 3_000_000, torch.zeros(3_000_000), {number: 0 for number in range(3_000_000)}]
)
def test_a_huge_result_is_judged_at_once(result):
    start = time.process_time()
    text = str(DOUBLE(lambda x: result, seed=0))
    assert time.process_time() - start < 5 and len(text) < 6000  # one second on a quiet computer


@pytest.mark.parametrize("seed", range(20))
def test_an_input_on_the_border_is_always_among_them(seed):
    feedback = BORDER(lambda x: 3 > x, seed=seed)
    assert feedback.mistakes == ["the border is left out"] and feedback.parts[0].given == "x=3"


def test_a_name_is_certain_only_where_no_other_mistake_does_the_same():
    twins = {"one name": Mistake("One.", lambda x: x < 3), "another name": Mistake("Two.", lambda x: not x >= 3)}
    feedback = Exercise(is_small, BORDER.parts, twins)(lambda x: x < 3, seed=0)
    assert feedback.mistakes == [] and "on these inputs it behaves like: one name" in str(feedback)
    assert feedback.points == 1  # half of the points all the same


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda x: [True, False], "Booleans"),
        (lambda x: np.array([1.0, 0.0]), "numpy array"),
        (lambda x: torch.tensor([1.0, 0.0]), ""),
    ],
)
def test_rewards_in_another_form_earn_half_and_are_named(answer, words):
    rewards = Exercise(pays_first, (Part("two", 2, lambda rng: call(rng.randrange(2, 9)), always=(call(1),)),))
    feedback = rewards(lambda x: answer(x) if x > 1 else answer(x)[:1], seed=0)
    assert feedback.points == (1 if words else 2) and all(words in name for name in feedback.mistakes), feedback


def pays_first(x):
    """1.0 and 0.0, or 1.0 alone."""
    return [1.0, 0.0] if x > 1 else [1.0]


def test_a_mistake_is_known_in_each_of_its_ways():
    assert BORDER(lambda x: x <= 5, seed=1).mistakes == ["the border lies elsewhere"]
    unseen = Mistake("", lambda x: x < 3, also=(lambda x: x <= 3,))
    assert len(misjudged(Exercise(is_small, BORDER.parts, {"unseen": unseen}), [], range(1))) == 1


def test_the_input_that_is_shown_tells_this_mistake_from_the_others():
    part = Part("large", 1, lambda rng: call(5), always=(call(9),))  # at 5 another mistake comes to the same
    exercise = Exercise(is_small, (part,), BORDER.mistakes)
    assert exercise(lambda x: x < 99).parts[0].given == "x=9"


def test_a_division_by_zero_on_some_inputs_is_named_and_nothing_returned_is_no_cut_off_gradient():
    """0 / 0 is 0 here; at x = 1 the second value is NaN in the answer."""
    part = Part("one", 2, lambda rng: call(torch.tensor([1.0, 0.0])))
    names = Exercise(share_or_zero, (part,), {})(lambda x: x / x).mistakes
    assert len(names) == 1 and "NaN" in names[0]
    gradient = Part("the gradient", 1, lambda rng: Call((torch.tensor([2.0]),), ask=gradient_of))
    names = Exercise(double, (gradient,), {})(lambda x: None).mistakes
    assert names == ["nothing is returned"]


def share_or_zero(x):
    """x / x, and 0 if x is 0."""
    return torch.where(x == 0, 0.0, 1.0)


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


def test_a_slip_in_one_part_costs_points_in_this_part_only_whatever_the_seed():
    exercise = KNOWN["combine_rewards"]
    for seed in range(60):
        parts = [torch.stack([one.args[0] for one in calls]) for calls in trial(exercise, seed).calls]
        *others, last = [part.isnan().all(dim=2).any() for part in parts]
        assert last and not any(others), seed


# ---- points for nbgrader ----


def test_what_an_answer_writes_to_stderr_is_shown_but_not_there(capsys):
    """nbgrader's autograder gives no points to a check's cell with output on stderr, and warnings go there."""

    def warns(x):
        print("UserWarning", file=sys.stderr)
        return 2 * x

    assert DOUBLE(warns).grade() == 3
    said = capsys.readouterr()
    assert "UserWarning" in said.out and said.err == ""


def test_grade_shows_the_feedback_and_returns_the_points(capsys):
    assert DOUBLE(double).grade() == 3
    assert DOUBLE(lambda x: x * x).grade() == 1.5
    assert "looks like: it is squared" in capsys.readouterr().out
    assert DOUBLE(lambda x: x - x).grade() == 0
    assert "double: 0 of 3 points" in capsys.readouterr().out


def test_nbgrader_reads_these_points():
    from nbformat.v4 import new_code_cell, new_output
    from nbgrader.utils import determine_grade

    def points_of(output):
        metadata = {"nbgrader": {"grade": True, "solution": False, "points": 3, "grade_id": "x", "schema_version": 3}}
        return determine_grade(new_code_cell("", metadata=metadata, outputs=[output]))

    for answer, points in ((double, 3), (lambda x: 2 * x.abs(), 2.5), (lambda x: x - x, 0)):
        assert points_of(new_output("execute_result", {"text/plain": repr(DOUBLE(answer).grade())})) == (points, 3)


# ---- comparing ----


@pytest.mark.parametrize(
    ("got", "expected", "found"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0 + 1e-7]), None),
        (torch.tensor([[1.0]]), torch.tensor([1.0]), "the shape is (1, 1), not (1,)"),
        (torch.tensor([1, 2]), torch.tensor([1.0, 2.0]), "it holds integers (torch.int64), not floating-point"),
        (torch.tensor([1.0, 9.0]), torch.tensor([1.0, 2.0]), "1 of 2 values differ: each is 7 too high"),
        (torch.tensor([5.0, -10.0]), torch.tensor([1.0, -2.0]), "2 of 2 values differ: each is 5 times too large"),
        (torch.tensor([5.0, 9.0]), torch.tensor([1.0, 2.0]), "2 of 2 values differ"),
        (math.nan, 2.0, "it is NaN"),
        (-math.inf, 2.0, "it is minus infinite"),
        (1j, 2.0, "it is a complex number, not a real one"),
        (-0.3, 0.3, "it has the opposite sign"),
        (0.1, 0.25, "it is 0.15 too low"),
        (2, 1, "it is 1 too high"),
        (4000, 1000, "it is 4 times too large"),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), None),
        ([1.0], torch.tensor([1.0]), "it is a list, not a tensor"),
        (torch.tensor(2.0), 2.0, None),
        (np.float32(2.0), 2.0, None),
        (True, 1.0, "it is a Boolean, not a number"),
        ("2", 2.0, "it is a string, not a number"),
        (1.0, True, "it is a number, not a Boolean"),
        (True, False, "it is True, not False"),
        ([True, True], [True, False], "entry [1], counted from 0: it is True, not False"),
        (
            torch.tensor([[True], [False]]),
            torch.tensor([[True], [True]]),
            "1 of 2 values differ: entry [1, 0], counted from 0, is False, not True",
        ),
        (None, "a", "it is None, not a string"),
        ([1, 2], [1, 2, 3], "it has 2 entries, not 3"),
        ([1], [1, 2, 3], "it has 1 entry, not 3"),
        ((1.0, None), [1.0, None], None),
        ([1.0, 0.0], [1.0, None], "entry [1], counted from 0: it is a number, not None"),
        ([[1.0], [1.0, 2.0]], [[1.0], [1.0, 3.0]], "entry [1][1], counted from 0: it is 1 too low"),
        ({"a": 1.0}, {"a": 2.0}, "under 'a': it is 2 times too small"),
        ({"b": 1.0}, {"a": 1.0}, "its keys are ['b'], not ['a']"),
    ],
)
def test_differences_in_words(got, expected, found):
    said = difference(got, expected)
    assert said is None if found is None else said.startswith(found)


def test_a_value_that_refuses_to_be_compared_or_shown_is_a_wrong_one():
    class Sulky(list):
        def __len__(self):
            raise ValueError("no")

        __repr__ = __len__

    assert "it cannot be compared with a list (ValueError: no)" in difference(Sulky(), [1])
    assert "cannot be shown" in shown(Sulky())


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


@pytest.mark.parametrize("path", sorted(checks.topics_dir().glob("*.py")), ids=lambda path: path.stem)
def test_examples_in_the_docstrings_of_exercises_hold(path):
    assert doctest.testmod(importlib.import_module(f"grpo_edu.checks.{path.stem}")).failed == 0


def test_a_wrong_reward_is_not_trained():
    result = KNOWN["accuracy_reward"](
        lambda completions, answer, **more: [float("####" in text) for text in completions]
    )
    trained = result.parts[-1]
    assert trained.name == TRAINED and trained.points == 0 and "other parts" in trained.why and not trained.got


def judge_training(counts):
    """The feedback on right rewards with which a training has these counts."""
    exercise = KNOWN["accuracy_reward"]
    others = [attempt(exercise.reference, one) for one in exercise.calls(exercise.parts[0], 3)]
    return exercise.judge([others, [Outcome(counts)]], 3)


def test_the_counts_of_a_training_that_did_not_help_are_shown():
    shown = judge_training({"before": 30, "won": 5, "lost": 9}).parts[-1].got
    assert "30 of 60 before, 26 after" in shown and "9 lost" in shown


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
    assert judge_training(value).points == 3 + points


def test_the_group_that_is_judged_wrongly_is_shown_with_all_its_digits():
    def nearly(rewards, num_generations):
        return rewards.view(-1, num_generations).std(dim=1) < 1e-6

    part = KNOWN["degenerate_groups"](nearly, seed=1).parts[1]
    assert "1.000001" in part.given and "…" not in part.given and part.got == "tensor([True])"


def test_several_faults_are_named_and_earn_nothing():
    feedback = KNOWN["group_advantages"](lambda rewards, size: std_of_g(rewards, len(rewards) // size), seed=1)
    assert feedback.points == 0 and core.SEVERAL in feedback.mistakes[0]


def test_a_gradient_is_shown_with_the_name_of_its_argument():
    def doubled(logits, input_ids, prompt_length, temperature):
        return 2 * KNOWN["completion_logps"].reference(logits, input_ids, prompt_length, temperature)

    def divided_in_place(logits, *rest):
        logits /= 2
        return doubled(logits, *rest)

    part = KNOWN["completion_logps"](doubled, seed=1).parts[2]
    assert all("gradient for logits" in text for text in (part.expected, part.got, part.why))
    assert {part.mistake for part in KNOWN["completion_logps"](divided_in_place, seed=1).parts} == {
        "the input is changed in place"
    }


def test_a_long_tensor_is_cut_between_its_numbers():
    text = shown(torch.arange(400.0).view(4, 100))
    assert text.startswith("tensor([[0.0, 1.0, ") and text.endswith(", …],\n        …])") and len(text) < 400
