"""Whatever a student's process sends: no error of the grader, no points for nonsense, no text that does harm."""

import functools
import re

from forty_submissions import ALL, NAME, masters, right
from hypothesis import given, settings
from hypothesis import strategies as st

from classroom.pages import feedback_page
from classroom.repair import repaired, steps
from classroom.results import StudentGrade, grades_table
from classroom.run import Transcript, _take_all, judged
from classroom.sandbox import Limits, ProtocolError, Sandbox
from classroom.values import plain
from grpo_edu.checks import exercises
from grpo_edu.checks.core import attempt, trial

MOST_STEPS = 12  # of the right answers
HARMFUL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e]")

NUMBERS = st.integers() | st.sampled_from([2**63, -(2**63), 10**400, float("inf"), float("nan"), 10**4000])
TEXTS = st.text(max_size=8) | st.sampled_from(["\ud800", "\x1b[2J", "float32", "bool", "x" * 30_000, "AAAA", ""])
KINDS = st.sampled_from(["tensor", "list", "tuple", "dict", "other", "at", "cell", "missing", "answer", "outcomes"])
ANYTHING = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KINDS | TEXTS, inner, max_size=3),
    max_leaves=10,
)
VALUES = st.dictionaries(KINDS, st.lists(ANYTHING, max_size=3), min_size=1, max_size=1) | ANYTHING
PLACES = st.integers(-2, MOST_STEPS + 1) | ANYTHING


@st.composite
def nearly_right(draw):
    """An answer of the right form, but for what it holds."""
    place = draw(PLACES)
    tries = draw(st.sampled_from([1, 4, 5, 16, 17]))
    outcomes = draw(st.lists(st.tuples(VALUES, TEXTS, TEXTS, st.booleans()), min_size=1, max_size=2))
    return {"answer": [place, draw(st.integers(-1, 3))], "outcomes": [list(one) for one in (outcomes * tries)[:tries]]}


MESSAGES = (
    nearly_right()
    | st.builds(lambda place, part: {"at": [place, part]}, PLACES, PLACES)
    | st.builds(lambda place, text: {"cell": place, "error": text}, PLACES, ANYTHING)
    | st.builds(lambda place, text: {"missing": place, "why": text}, PLACES, ANYTHING)
    | st.dictionaries(KINDS, ANYTHING, max_size=3)
)


@functools.cache
def master():
    """The master, converted when the first test runs, because each worker of pytest imports this file."""
    return next(one for one in masters() if one.name == NAME)


@functools.cache
def right_steps():
    found = steps(repaired(right(), master())[0], master())
    assert len(found) == MOST_STEPS
    return found


def test_a_single_slip_earns_what_the_teacher_says():
    exercise = exercises()["rloo_advantages"]
    negated = [
        [attempt(lambda *args: -exercise.reference(*args), one) for one in calls] for calls in trial(exercise, 5).calls
    ]
    transcript = Transcript({(exercise.name, number): found for number, found in enumerate(negated)})
    for credit, points in ((0.0, 0), (0.5, 1.5), (0.75, 2.25)):
        found = judged(master(), transcript, 5, credit)[exercise.name]
        assert found.points == points and found.mistakes == ["the sign is wrong"]


@settings(max_examples=150)
@given(st.lists(MESSAGES, max_size=6))
def test_any_messages_are_judged_without_an_error(messages):
    transcript = Transcript()
    _take_all(messages, right_steps(), transcript)
    feedback = judged(master(), transcript, 5)
    grade = StudentGrade("ana", "", "", feedback, [NAME], [*transcript.errors.values(), *transcript.missing.values()])
    assert 0 <= grade.points(master()) < ALL
    for text in (feedback_page(grade, [master()]), grades_table([grade], [master()])):
        text.encode()
        assert not HARMFUL.search(text) and len(text) < 200_000
    assert all(len(one) < 310 for one in grade.troubles)


@given(st.lists(st.binary(max_size=60) | st.just(b"\n") | st.just(b'{"at": [0, -1]}\n'), max_size=8))
def test_any_bytes_are_messages_or_garbled(pieces):
    sandbox = Sandbox(Limits())
    try:
        for piece in pieces:
            for message in sandbox._messages(piece):
                assert isinstance(message, dict)
    except ProtocolError:
        pass


@given(st.text(max_size=400))
def test_plain_text_is_short_and_harmless(text):
    assert not HARMFUL.search(plain(text)) and "\n" not in plain(text) and len(plain(text)) <= 302
    assert not HARMFUL.search(plain(text, lines=True))
