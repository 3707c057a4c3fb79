"""The study behind notebook 04: its judgments on hand-made runs, and what the stored runs say."""

import json
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.harness import run_study
from benchmarks.objectives import COMMAND, LOSSES, WITH_KL, settings, table, verdicts
from grpo_edu.evaluation import wilson_interval

STORED = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "objectives.json"
GAIN, NEAR, LAST, FEW, MANY, LOSS, REWARD = (
    "each loss gains at least 20 points on every seed",
    "all but GSPO end within 5 points of each other on every seed",
    "GSPO ends last on every seed",
    "in the other five less than 1% of the tokens are clipped",
    "in GSPO more than 30% of the completions are clipped",
    "with a KL term the loss starts at 0 and rises on every seed",
    "with a KL term the reward rises on every seed",
)
BEFORE = {"k": 40, "n": 100, "accuracy": 0.4}
RISING = [0.1] * 8 + [0.2] * 4


def solving(k):
    return {"after": {"k": k, "accuracy": k / 100}}


def row(name, seed):
    kind = {
        "GSPO": {**solving(60), "clipped": [0.3, 0.32]},
        WITH_KL: {**solving(50), "reward": RISING, "loss": [0.0, 0.001]},
        "GRPO": {**solving(66), "clipped": [0.0, 0.0]},
    }
    return {"name": name, "seed": seed, **kind.get(name, {**solving(61 + seed), "clipped": [0.01, 0.0]})}


def runs(changed="", seed=0, **changes):
    """Two seeds near the bounds of each statement, with one run changed."""
    found = [row(name, number) for number in (0, 1) for name in (*LOSSES, WITH_KL)]
    return [run | changes if (run["name"], run["seed"]) == (changed, seed) else run for run in found]


def test_runs_on_the_bounds_hold():
    assert verdicts(BEFORE, runs()) == dict.fromkeys((GAIN, NEAR, LAST, FEW, MANY, LOSS, REWARD), True)


@pytest.mark.parametrize(
    ("statement", "changes"),
    [
        (GAIN, {"changed": "GSPO", **solving(59)}),
        (NEAR, {"changed": "GRPO", **solving(67)}),
        (LAST, {"changed": "GSPO", **solving(62)}),
        (FEW, {"changed": "BNPO", "clipped": [0.02, 0.0]}),
        (MANY, {"changed": "GSPO", "clipped": [0.3, 0.3]}),
        (LOSS, {"changed": WITH_KL, "loss": [0.0, 0.0004]}),
        (LOSS, {"changed": WITH_KL, "loss": [0.1, 0.2]}),
        (REWARD, {"changed": WITH_KL, "reward": [0.1] * 12}),
    ],
)
def test_one_run_that_misses_a_bound_is_enough(statement, changes):
    assert [name for name, holds in verdicts(BEFORE, runs(**changes)).items() if not holds] == [statement]


def test_each_name_is_another_run_and_seeds_reach_it():
    names = (*LOSSES, WITH_KL)
    assert len({repr(settings(name, 3)) for name in names}) == len(names)
    assert all(settings(name, 3).seed == 3 for name in names)
    assert all(settings(name, 0).num_iterations == 2 for name in LOSSES), "with one update the clips do nothing"


def test_table_by_hand():
    lines = table(BEFORE, runs()).splitlines()
    assert lines[0] == "| loss | seed 0 | seed 1 | mean |"
    assert lines[2] == "| before | 40.0% | 40.0% | 40.0% |"
    assert lines[4] == "| BNPO | 61.0% | 62.0% | 61.5% |" and len(lines) == 3 + len(LOSSES) + 1


def test_stored_study():
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    assert stored["command"] == COMMAND and stored["machine"] and stored["losses"] == list(LOSSES)
    assert sorted((run["name"], run["seed"]) for run in stored["runs"]) == sorted(
        (name, seed) for name in (*LOSSES, WITH_KL) for seed in range(5)
    )
    for result in (stored["before"], *(run["after"] for run in stored["runs"])):
        assert result["n"] >= 300 and result["accuracy"] == result["k"] / result["n"]
        assert (result["low"], result["high"]) == pytest.approx(wilson_interval(result["k"], result["n"]), abs=1e-12)
    assert stored["verdicts"] == verdicts(stored["before"], stored["runs"])
    assert all(stored["verdicts"].values())
    assert "/" not in json.dumps(stored["runs"]), "a run names no folder"


def test_a_study_keeps_each_run_and_goes_on_where_it_was_left(tmp_path, capsys):
    made = []

    def run(name, seed):
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append((name, seed))
        return {"name": name, "seed": seed, "after": {"accuracy": 0.75}}

    def verdicts(before, runs):
        return {"all ran": len(runs) == 4, "it gains": runs[-1]["after"]["accuracy"] > before["accuracy"]}

    options = Namespace(seeds=[0, 1], output=tmp_path / "new" / "study.json", keep=False)
    parts = {"run": run, "verdicts": verdicts, "table": lambda before, runs: f"{len(runs)} rows"}
    with pytest.raises(KeyboardInterrupt):
        run_study(options, ["a", "b"], {"before": {"accuracy": 0.5}}, **parts)
    assert len(json.loads(options.output.read_text())["runs"]) == 3
    made.clear()
    options.keep = True
    assert run_study(options, ["a", "b"], {"before": {"accuracy": 0.5}}, **parts) == 0
    assert made == [("b", 1)]
    record = json.loads(options.output.read_text())
    assert record["verdicts"] == {"all ran": True, "it gains": True}
    assert capsys.readouterr().out.count("75.0%") == 4
    assert run_study(options, ["a", "b"], {"before": {"accuracy": 0.8}}, **parts) == 1
