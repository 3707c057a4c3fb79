"""The benchmarks of speed: their arithmetic by hand, and each of them for real in a tiny setting."""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import harness, startup, step

SMALL = replace(step.TINY, prompts_per_step=2, num_generations=2, max_completion_length=6)
ONE = {"median": 1.0, "low": 1.0, "high": 1.0}


def test_sides_take_turns_and_the_first_round_is_not_counted():
    calls = []
    seconds = harness.in_turn({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 2)
    assert calls == ["a", "b"] * 3
    assert {name: len(found) for name, found in seconds.items()} == {"a": 2, "b": 2}


def noted_steps(name: str, log: Path):
    """Steps that write their number into a file when they are made."""
    for number in range(1, 100):
        with log.open("a") as file:
            file.write(f"{name}{number} ")
        yield {"number": number}


def no_steps():
    raise ValueError("no such model")


@pytest.mark.parametrize(
    ("keep", "order"), [(True, "a1 a2 b1 b2 a3 b3"), pytest.param(False, "a1 b1 a1 b1", marks=pytest.mark.long)]
)
def test_trainings_step_in_turn(keep, order, tmp_path):
    log = tmp_path / "made"
    steps = harness.steps_in_turn({name: partial(noted_steps, name, log) for name in "ab"}, 2, keep=keep)
    assert log.read_text().split() == order.split()
    assert [row["number"] for row in steps["a"]] == ([2, 3] if keep else [1, 1])
    assert all(row["seconds"] >= 0 for rows in steps.values() for row in rows)


def test_a_side_that_fails_ends_the_benchmark():
    with pytest.raises(RuntimeError, match="a side of the benchmark failed"):
        harness.steps_in_turn({"a": no_steps}, 1)


def test_ratios_are_of_the_same_round():
    assert harness.times_as_fast([2.0, 40.0, 9.0], [1.0, 10.0, 3.0]) == {"median": 3.0, "low": 2.0, "high": 4.0}
    with pytest.raises(ValueError, match="longer"):
        harness.times_as_fast([1.0], [1.0, 2.0])


def test_a_record_says_what_made_it_and_where(tmp_path):
    harness.save(tmp_path / "new" / "record.json", "python -m x", {"seconds": 1.5})
    record = json.loads((tmp_path / "new" / "record.json").read_text())
    assert record["command"] == "python -m x" and record["seconds"] == 1.5
    machine = record["machine"]  # a wheel's version may lack the "+cu130" that torch itself adds
    assert machine["torch"].split("+")[0] == torch.__version__.split("+")[0] and machine["trl"]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["record.json"]


def test_the_floor_by_hand():
    """100 weights of 4 bytes, 10 prompt and 20 completion tokens, 4 decode steps; 1,000 FLOP/s, 400 bytes/s."""
    counts = {"prompt_tokens": 10, "completion_tokens": 20, "decode_steps": 4}
    floor = step.floor_seconds(100, 4, counts, {"flops": 1_000.0, "bytes": 400.0})
    assert floor == {"rollout": 2.0 + 4.0, "update": 18.0 + 7.0}
    slow = step.floor_seconds(100, 4, counts, {"flops": 100.0, "bytes": 400.0})
    assert slow["rollout"] == 20.0 + 40.0  # now the products take longer than the reading


def test_rates_of_this_machine_are_those_of_a_computer():
    found = step.rates(torch.float32)
    assert 1e8 < found["flops"] < 1e15 and 1e7 < found["bytes"] < 1e13


def test_a_long_problem_is_as_long_as_asked():
    _, tokenizer = step.load_policy("tiny")
    prompt = step.render_prompt(tokenizer, step.long_problem(tokenizer, 128).prompt)
    assert len(tokenizer.encode(prompt)) in (128, 129)


@pytest.mark.long
def test_the_step_in_a_small_setting(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(step, "TINY", SMALL)
    monkeypatch.setattr(sys, "argv", ["step", "--rounds", "1", "--output", str(tmp_path / "step.json")])
    code = step.main()
    record = json.loads((tmp_path / "step.json").read_text())
    assert list(record["step"]) == ["stock TRL", "TRL with this rollout", "grpo_edu"]
    assert record["step"]["stock TRL"]["times as fast as stock TRL"] == ONE
    assert list(record["rollout"])[0] == "transformers' generate" and len(record["rollout"]) == 3
    assert record["floor"]["counts"]["decode_steps"] == 5
    assert code == (0 if all(record["verdicts"].values()) else 1)
    shown = capsys.readouterr().out
    assert "| grpo_edu |" in shown and "floor: rollout" in shown


@pytest.mark.long
def test_the_step_of_smollm2_in_a_small_setting(monkeypatch, tmp_path):
    monkeypatch.setattr(step, "SMOLLM2", SMALL)
    output = tmp_path / "step.json"
    arguments = ["--scale", "smollm2", "--rounds", "1", "--parts", "step", "phases", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["step", *arguments])
    step.main()
    record = json.loads(output.read_text())
    assert list(record["step"]) == ["stock TRL", "grpo_edu"] and len(record["verdicts"]) == 1
    assert record["phases"]["float32"]["rollout"]["median"] > 0


def test_targets_are_judged_on_this_package_in_float32():
    slow, fast = ({"times as fast as stock TRL": {"median": ratio}} for ratio in (1.0, 5.0))
    record = {"step": {"stock TRL": fast, "grpo_edu": slow}, "rollout": {"grpo_edu": slow}}
    assert list(step.verdicts(record, "tiny").values()) == [False, False]
    record["step"]["grpo_edu, bfloat16 weights"] = fast
    assert list(step.verdicts(record, "494M").values()) == [False]
    record["step"]["grpo_edu"] = fast
    assert list(step.verdicts(record, "494M").values()) == [True]


def test_startup_counts_phases_of_both_sides(monkeypatch):
    """Two made-up processes: 1 s a phase against 0.25 s; the first round of each is not counted."""
    calls = []

    def process(command):
        calls.append(command)
        seconds = 1.0 if command is startup.SIDES["stock TRL"] else 0.25
        return {**dict.fromkeys(startup.PHASES, seconds if len(calls) > 2 else 99.0), "second step": 7.0}

    monkeypatch.setattr(startup, "measure_process", process)
    record = startup.compare(2)
    assert len(calls) == 6
    assert record["stock TRL"]["total"]["median"] == len(startup.PHASES)
    assert record["grpo_edu"]["times as fast as stock TRL"] == {"median": 4.0, "low": 4.0, "high": 4.0}
    assert "| first step | 1.00 | 0.25 |" in startup.table(record)
