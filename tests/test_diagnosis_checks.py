"""The stored curves that an exercise of the diagnosis lab reads, and that its rules say the truth of each run."""

import json

import pytest
from close import assert_close

from benchmarks.broken_runs import CURVES, RESULTS, curves
from grpo_edu import checks
from grpo_edu.checks import diagnosis_lab
from grpo_edu.checks.core import Outcome
from grpo_edu.checks.diagnosis_lab import KINDS, RUNS, TROUBLES, UNLABELLED, hide_name, name_trouble, right_diagnoses
from grpo_edu.checks.inputs import Curve, stored_curves
from grpo_edu.problems.templates import data_dir
from grpo_edu.studies.broken_runs import CASES


def test_each_case_of_the_lab_has_its_trouble():
    assert sorted(name for names in TROUBLES.values() for name in names) == sorted(
        ["healthy", *(case.name for case in CASES)]
    )


def test_the_curves_are_those_of_the_stored_study():
    study = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert_close(curves(study["runs"]), json.loads(CURVES.read_text(encoding="utf-8")))


@pytest.mark.parametrize(("trouble", "arm"), [(trouble, arm) for trouble, arms in TROUBLES.items() for arm in arms])
def test_the_rules_name_the_trouble_of_every_stored_run(trouble, arm):
    runs = stored_curves(arm)
    assert len(runs) == 5
    assert [name_trouble(curves) for curves in runs] == [trouble] * 5


def test_a_curve_shows_what_the_rules_read():
    assert repr(Curve(step / 10 for step in range(32))) == "[0.00, 0.10, 0.20, 0.30 … 2.80, 2.90, 3.00, 3.10]"
    assert Curve([1.0, 2.0]) == [1.0, 2.0]


# ---- the runs without a label ----


def test_a_student_has_runs_of_their_own_however_the_name_is_spelled():
    own = right_diagnoses("Jane Miller")
    assert {**right_diagnoses("miller, jane"), "student": "Jane Miller"} == own
    faults = {tuple(right_diagnoses(f"student {number}")[run][0] for run in RUNS) for number in range(60)}
    assert len(faults) > 40 and {fault for runs in faults for fault in runs} == {one for kind in KINDS for one in kind}
    with pytest.raises(ValueError, match=r"^student: ' -' .*name"):
        right_diagnoses(" -")


def test_what_a_run_shows_does_not_hold_the_name_of_its_fault():
    for name, run in checks.unlabelled_runs("Jane Miller").items():
        fault = right_diagnoses("Jane Miller")[name][0]
        shown = " ".join([repr(run), str(vars(run)), *(str(getattr(run, part)) for part in dir(run) if part[0] != "_")])
        assert not any(case.name in shown or case.fault in shown for case in CASES)
        assert fault not in (data_dir() / "curves" / UNLABELLED).read_text(encoding="utf-8")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_unlabelled_run_is_none_of_the_labelled_ones_and_shows_the_same_fault(case):
    runs, labelled = stored_curves(hide_name(case.name), UNLABELLED), stored_curves(case.name)
    (trouble,) = [trouble for trouble, arms in TROUBLES.items() if case.name in arms]
    assert [name_trouble(curves) for curves in runs].count(trouble) >= 4  # two steps of one group are little
    lengths = [curves["completions/mean_length"] for curves in (*runs, *labelled)]
    for place, one in enumerate(lengths):
        assert not [other for other in lengths[:place] if other == pytest.approx(one, rel=0.06)]  # more than rounding


def test_students_code_cannot_draw_runs_while_it_is_graded():
    from classroom import sandbox

    assert f"{diagnosis_lab.unlabelled_runs.__module__.rpartition('.')[2]}.py" not in sandbox._OF_THE_CHECKS


@pytest.mark.parametrize(
    ("change", "words"),
    [({"student": 3}, "name"), ({"student": " "}, "name"), ({"Run B": ("lr too high",)}, "'Run B'")],
)
def test_an_answer_of_another_form_is_told_so(change, words):
    feedback = checks.check_find_fault(lambda: {**right_diagnoses("Jane Miller"), **change})
    assert feedback.points == 0 and all(words in part.why for part in feedback.parts)


def test_an_answer_about_the_runs_of_another_name_is_worth_a_look():
    from classroom.results import StudentGrade
    from classroom.run import Transcript, _runs_of_another

    transcript = Transcript(outcomes={("find_fault", 0): [Outcome(right_diagnoses("Jane Miller"))]})
    for student, number, count in (("jane_miller", "", 0), ("x", "Jane Miller", 0), ("Jim Beam", "7", 1)):
        found = _runs_of_another(transcript, StudentGrade(student, number))
        assert len(found) == count and all("Jane Miller" in line for line in found)
    unwritten = Transcript(outcomes={("find_fault", 0): [Outcome(problem="NameError")]})
    assert _runs_of_another(unwritten, StudentGrade("x")) == []
