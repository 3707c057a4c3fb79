"""What is measured with an evaluation, by hand on four completions, and on the real files where they are at hand."""

import json
from pathlib import Path

import pytest

from grpo_edu.evaluation import Evaluation, wilson_interval
from grpo_edu.fast.memory import GIB
from grpo_edu.problems.files import load_gsm8k
from grpo_edu.runs import summary as evaluation_report
from grpo_edu.runs.summary import EvaluationReport, reference_steps, report_evaluation

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
COMPLETIONS = ["1+2=3. 3+4=8. #### 8", "1+2=3. #### 3", "I think #### 7", "2*3=6. 6+1=7. 7-1=6. #### 6"]
SOLUTIONS = ["1+2=3. 3+4=7. #### 7", "1+2=3\n#### 3", "Three of them\ngo, so 7.\n#### 7", "a\nb\nc\n#### 6"]


def report() -> EvaluationReport:
    correct = [False, True, True, True]
    evaluation = Evaluation(
        [f"q{row}" for row in range(4)], ["gsm8k"] * 4, COMPLETIONS, ["8", "3", "7", None], correct, [10, 5, 5, 20]
    )
    return EvaluationReport(evaluation, SOLUTIONS, seconds=2.0, peak_bytes=GIB // 2)


def test_every_number_by_hand():
    found = report().to_dict()
    assert found == json.loads(json.dumps(found))
    assert (found["k"], found["n"], found["readable_answers"]) == (3, 4, 3)
    # two completions write two calculations or more; of six calculations one does not hold
    low, high = wilson_interval(2, 4)
    assert found["step_by_step"] == {"k": 2, "n": 4, "share": 0.5, "low": low, "high": high}
    assert found["calculation_steps"] == 6 / 4 and found["calculations_that_hold"] == 5 / 6
    assert (found["problems_per_second"], found["tokens_per_second"], found["peak_gib"]) == (2.0, 20.0, 0.5)
    steps = {number: (part["k"], part["n"]) for number, part in found["per_steps"].items()}
    assert steps == {"1": (1, 1), "2": (1, 2), "3": (1, 1)}
    shown = report().text().splitlines()
    assert shown[0].startswith("gsm8k            3 of 4") and "by steps of the reference solution" in shown
    assert "step by step (two calculations or more): 50.0% [15.0%, 85.0%]" in shown
    assert "calculations per completion: 1.50, 83.3% of them hold" in shown
    assert shown[-1] == "2 s, 2.0 problems per second, 20 tokens per second, peak memory 0.50 GiB"


def test_a_policy_that_calculates_nothing_has_no_share_that_holds():
    evaluation = Evaluation(["q"], ["gsm8k"], ["7"], [None], [False], [1])
    found = EvaluationReport(evaluation, ["x\n#### 7"], 1.0, GIB)
    assert found.to_dict()["calculations_that_hold"] is None and "1.00 of them" not in found.text()
    word = Evaluation(["q"], ["mine"], ["#### French"], ["french"], [True], [2])
    assert "calculations" not in EvaluationReport(word, ["#### French"], 1.0, GIB).text()
    instruction = EvaluationReport(evaluation, ["Is it a road?"], 1.0, GIB)
    assert "calculations" not in instruction.text()


def test_steps_of_a_reference():
    assert reference_steps("5+5=10\n\n10+1=11\n#### 11") == 2  # an empty line is not a step
    assert reference_steps("#### 7") == reference_steps("") == 1
    assert reference_steps("1+2=3. 3+4=7. 7+1=8. #### 8") == 3


def test_the_number_of_problems(monkeypatch):
    asked = []

    def load_problem_sets(request, split, *, n):
        asked.append((request["data"], n))
        raise LookupError

    monkeypatch.setattr(evaluation_report, "load_problem_sets", load_problem_sets)
    for data in ("basic", "gsm8k", "basic,gsm8k"):
        with pytest.raises(LookupError):
            report_evaluation(data=data)
    assert asked == [(("basic",), 300), (("gsm8k",), None), (("basic", "gsm8k"), 300)]


def test_the_references_of_gsm8k_have_two_to_eleven_steps(gsm8k_dir):
    counts: dict[int, int] = {}
    for problem in load_gsm8k("test", gsm8k_dir):
        steps = reference_steps(problem.solution)
        counts[steps] = counts.get(steps, 0) + 1
    assert counts == {2: 326, 3: 371, 4: 297, 5: 175, 6: 87, 7: 40, 8: 20, 9: 2, 11: 1}


def test_the_stored_evaluation_is_of_all_of_gsm8k():
    record = json.loads((RESULTS / "gsm8k_evaluation.json").read_text())
    assert record["command"].startswith("grpo-edu evaluate --data gsm8k")
    found = record["report"]
    assert found["n"] == 1319 == sum(part["n"] for part in found["per_steps"].values())
    assert found["k"] == sum(part["k"] for part in found["per_steps"].values())
    assert (found["low"], found["high"]) == pytest.approx(wilson_interval(found["k"], 1319))
