"""The stored curves that an exercise of the diagnosis lab reads, and that its rules say the truth of each run."""

import json

import pytest

from benchmarks.broken_runs import CURVES, RESULTS, curves
from grpo_edu.checks.diagnosis import TROUBLES, name_trouble
from grpo_edu.checks.inputs import Curve, stored_curves
from grpo_edu.studies.broken_runs import CASES


def test_each_case_of_the_lab_has_its_trouble():
    assert sorted(name for names in TROUBLES.values() for name in names) == sorted(
        ["healthy", *(case.name for case in CASES)]
    )


def test_the_curves_are_those_of_the_stored_study():
    study = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert json.loads(CURVES.read_text(encoding="utf-8")) == curves(study["runs"])


@pytest.mark.parametrize(("trouble", "arm"), [(trouble, arm) for trouble, arms in TROUBLES.items() for arm in arms])
def test_the_rules_name_the_trouble_of_every_stored_run(trouble, arm):
    runs = stored_curves(arm)
    assert len(runs) == 5
    assert [name_trouble(curves) for curves in runs] == [trouble] * 5


def test_a_curve_shows_what_the_rules_read():
    assert repr(Curve(step / 10 for step in range(32))) == "[0.00, 0.10, 0.20, 0.30 … 2.80, 2.90, 3.00, 3.10]"
    assert Curve([1.0, 2.0]) == [1.0, 2.0]
