"""The study behind notebook 10: its judgments on hand-made runs, and what the stored runs say."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.broken_runs import (
    COMMAND,
    CONTROLS,
    RESULTS,
    arms,
    compare_case,
    comparisons,
    pack_bits,
    table,
    unpack_bits,
    verdict,
    write,
)
from grpo_edu.broken_runs import CASES, HEALTHY
from grpo_edu.evaluation import wilson_interval
from grpo_edu.figures_diagnosis import SIGNS


def record(arm, seed, correct):
    k, n = sum(correct), len(correct)
    accuracy = {"k": k, "n": n, "accuracy": k / n, "low": 0.0, "high": 1.0}
    return {"arm": arm, "seed": seed, "accuracy": accuracy, "correct": pack_bits(correct), "curves": {}, "samples": []}


def test_bits_go_in_and_out():
    correct = [True, False, True, True, False, True]
    assert pack_bits(correct) == "b4"  # 1011 0100
    assert unpack_bits("b4", 6) == correct


def test_compare_case_by_hand():
    """Twenty problems; in seed 0 the mended run wins ten and loses none: p = 2 / 2**10."""
    nothing, half = [False] * 20, [True] * 10 + [False] * 10
    runs = [record("ill", 0, nothing), record("ill", 1, half), record("well", 0, half), record("well", 1, half)]
    row = compare_case(runs, "ill", "well")
    assert row["gains"] == [0.5, 0.0]
    assert row["p_values"] == [2 / 2**10, 1.0]
    assert row["verdict"] == "hurts"


@pytest.mark.parametrize(
    ("gains", "p_values", "said"),
    [
        ([0.3, 0.2, 0.1], [0.01, 0.04, 0.049], "hurts on every seed"),
        ([0.3, 0.2, 0.1], [0.01, 0.04, 0.05], "hurts"),
        ([0.3, 0.0, 0.1], [0.01, 1.0, 0.3], "mixed"),
        ([0.3, 0.3, -0.2], [0.01, 0.01, 0.01], "mixed"),
        ([0.1, -0.2, 0.0], [0.2, 0.01, 1.0], "no harm seen"),
    ],
)
def test_verdict(gains, p_values, said):
    assert verdict(gains, p_values) == said


def test_comparisons_wait_for_both_arms():
    case = CASES[0]
    assert comparisons([record(case.name, 0, [True])]) == {}
    assert set(comparisons([record(case.name, 0, [True]), record("healthy", 0, [True])])) == {case.name}


def test_table_by_hand():
    runs = [record("lr too high", 0, [False] * 4), record("lr too high", 1, [True, False, False, False])]
    runs += [record("healthy", 0, [True] * 3 + [False]), record("healthy", 1, [True] * 4)]
    assert table(runs, {"lr too high": compare_case(runs, "lr too high", "healthy")}).splitlines()[2:] == [
        "| lr too high | 12% (0% … 25%) | 88% (75% … 100%) | no harm seen |"
    ]


def test_write_sorts_the_runs_one_a_line(tmp_path):
    runs = [record("healthy", seed, [True]) for seed in (1, 0)] + [record("reward always 0", 0, [False])]
    path = tmp_path / "results" / "study.json"
    write(runs, path)
    text = path.read_text(encoding="utf-8")
    stored = json.loads(text)
    assert [(run["arm"], run["seed"]) for run in stored["runs"]] == [
        ("reward always 0", 0), ("healthy", 0), ("healthy", 1),
    ]  # fmt: skip
    assert sum(line.startswith('{"arm"') for line in text.splitlines()) == 3


def test_arms_are_the_cases_their_mends_and_the_controls():
    names = arms()
    assert {case.name for case in CASES} | {"untrained", "healthy", *CONTROLS} <= set(names)
    assert names["healthy"] is HEALTHY
    assert names["32 × 2"].config.batch_size == HEALTHY.config.batch_size


# ---- what is stored ----


@pytest.fixture(scope="module")
def stored():
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def test_stored_study_has_five_seeds_an_arm(stored):
    assert stored["command"] == COMMAND and stored["machine"] and stored["model"]
    seeds = {}
    for run in stored["runs"]:
        seeds.setdefault(run["arm"], []).append(run["seed"])
    assert set(seeds) == set(arms())
    assert seeds.pop("untrained") == [0]
    assert all(found == [0, 1, 2, 3, 4] for found in seeds.values())


def test_stored_study_is_small_and_names_no_folder(stored):
    assert RESULTS.stat().st_size < 300_000
    assert not re.search(r"(/home/|/root/|/tmp/|/Users/|[A-Z]:\\)", json.dumps(stored))


def test_stored_accuracies_are_their_answers_and_have_their_intervals(stored):
    for run in stored["runs"]:
        row = run["accuracy"]
        assert row["n"] == 300
        assert row["k"] == sum(unpack_bits(run["correct"], 300))
        assert row["accuracy"] == row["k"] / 300
        assert (row["low"], row["high"]) == pytest.approx(wilson_interval(row["k"], 300), abs=1e-12)


def test_stored_comparisons_follow_from_the_runs(stored):
    assert stored["comparisons"] == comparisons(stored["runs"])


def test_stored_curves_are_as_long_as_the_runs(stored):
    setups = arms()
    for run in stored["runs"]:
        if run["arm"] == "untrained":
            continue
        steps = setups[run["arm"]].config.max_steps
        assert {"reward", "grad_norm", "frac_reward_zero_std"} <= set(run["curves"]) <= set(SIGNS)
        assert {len(values) for values in run["curves"].values()} == {steps}, (run["arm"], run["seed"])
        assert ("kl" in run["curves"]) == bool(setups[run["arm"]].config.beta)
        assert bool(run["samples"]) == (run["seed"] == 0)


def test_the_notebook_names_the_command():
    notebook = Path(__file__).resolve().parents[1] / "notebooks" / "10_diagnosis_lab.ipynb"
    assert COMMAND in notebook.read_text(encoding="utf-8")
