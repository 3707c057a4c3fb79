"""Sweeps: what can be asked for, what the result may say, and a real sweep that is killed and resumed."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from grpo_edu.cli.main import main
from grpo_edu.config import GRPOConfig
from grpo_edu.evaluation import Evaluation
from grpo_edu.problems.files import load_problems
from grpo_edu.problems.hub import read_run_config
from grpo_edu.problems.templates import LEVELS, problem_key
from grpo_edu.runs.folder import RunFolder
from grpo_edu.runs.log import read_log, write_log
from grpo_edu.runs.profiles import load_profile
from grpo_edu.runs.record import RunMetadata
from grpo_edu.studies import sweep_runs
from grpo_edu.studies.sweep import (
    SweepPlan,
    SweepResult,
    parse_values,
    settings_config,
    split_validation,
    sweep_text,
    verdict_text,
)
from grpo_edu.studies.sweep_runs import Sweep

REPOSITORY = Path(__file__).resolve().parents[1]

# ---- what can be asked for ----


def test_the_values_of_a_setting_from_a_text():
    rates = parse_values("learning_rate", "1e-5:1e-3")
    assert (rates.low, rates.high, rates.log) == (1e-5, 1e-3, True)
    assert parse_values("beta", "0, 0.04,0").choices == (0.0, 0.04)
    assert parse_values("loss_type", "grpo,cispo").choices == ("grpo", "cispo")


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ({"epsilon": "0.1,0.2"}, "epsilon.*choose from learning_rate"),
        ({"learning_rate": "1e-3:1e-5"}, "learning_rate.*1e-3:1e-5"),
        ({"learning_rate": "0:1"}, "learning_rate.*0:1"),
        ({"learning_rate": "1e-5:1e-4:1e-3"}, "learning_rate.*such as 3e-5:1e-3"),
        ({"learning_rate": "fast"}, "learning_rate.*3e-5:1e-3.*'fast'"),
        ({"beta": "0:1"}, "beta.*such as 0,0.04, got '0:1'"),
        ({"num_generations": "4,8.5"}, "num_generations.*such as 4,8,16, got '4,8.5'"),
        ({"loss_type": "grpo,ppo"}, "loss_type.*ppo"),
        ({"scale_rewards": " , "}, "scale_rewards.*group"),
        ({"beta": ","}, "beta.*','"),
        ({"beta": "0,-1"}, "beta.*-1"),
        ({"num_generations": "1,2"}, "num_generations.*at least 2.*got 1"),
        ({}, "space.*learning_rate"),
    ],
)
def test_a_wrong_space_is_refused_with_its_setting(texts, words):
    with pytest.raises(ValueError, match=words):
        SweepPlan(space=texts)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"seeds": (0,)}, "seeds.*two different.*0"),
        ({"seeds": (1, 1)}, "seeds.*two different.*1,1"),
        ({"judge_seeds": 2}, "judge_seeds.*at least 3.*2"),
        ({"trials": 0}, "trials.*at least 1.*0"),
        ({"measure": "speed"}, "measure.*accuracy, reward.*speed"),
    ],
)
def test_a_wrong_plan_is_refused_with_its_field(fields, words):
    with pytest.raises(ValueError, match=words):
        SweepPlan(**fields)


def test_a_plan_survives_json_and_judges_with_seeds_that_chose_nothing():
    plan = SweepPlan(space={"learning_rate": "1e-5:1e-3", "beta": "0,0.04"}, seeds=(4, 2), judge_seeds=3)
    assert SweepPlan(**json.loads(json.dumps(asdict(plan)))) == plan
    assert plan.new_seeds == (5, 6, 7)


def test_a_small_space_is_tried_whole_and_a_range_never():
    space = {"beta": "0,0.1", "loss_type": "grpo,dapo"}
    assert SweepPlan(space=space, trials=4).grid == [
        {"beta": 0.0, "loss_type": "grpo"},
        {"beta": 0.0, "loss_type": "dapo"},
        {"beta": 0.1, "loss_type": "grpo"},
        {"beta": 0.1, "loss_type": "dapo"},
    ]
    assert SweepPlan(space=space, trials=3).grid is None
    assert SweepPlan(space={"learning_rate": "1e-5:1e-3"}, trials=99).grid is None


@pytest.mark.parametrize(("group", "prompts"), [(2, 64), (4, 32), (16, 8), (128, 1)])
def test_every_group_size_sees_as_many_completions(group, prompts):
    config = settings_config(GRPOConfig(), {"num_generations": group}, seed=7)
    assert (config.prompts_per_step, config.batch_size, config.seed) == (prompts, 128, 7)


def test_the_loss_with_a_bound_of_its_own_gets_it_and_a_given_one_stays():
    assert settings_config(GRPOConfig(), {"loss_type": "cispo"}, 0).epsilon_high == 5.0
    assert settings_config(GRPOConfig(epsilon_high=0.3), {"loss_type": "cispo"}, 0).epsilon_high == 0.3
    assert settings_config(GRPOConfig(), {"loss_type": "dapo"}, 0).epsilon_high is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_generations": 12}, "num_generations.*12.*128"),
        ({"num_generations": 1}, "num_generations"),
        ({"num_generations": 0}, "num_generations"),
        ({"loss_type": "dr_grpo", "scale_rewards": "group"}, "dr_grpo.*scale_rewards.*group"),
        ({"beta": -1.0}, "beta.*-1.0"),
    ],
)
def test_impossible_settings_say_why(settings, words):
    with pytest.raises(ValueError, match=words):
        settings_config(GRPOConfig(), settings, 0)


def test_validation_problems_are_of_every_level_and_none_is_trained_on():
    problems = load_problems(LEVELS, "train", n=40)
    training, validation = split_validation(problems, 11)
    assert sorted(map(problem_key, training + validation)) == sorted(map(problem_key, problems))
    assert [sum(problem.level == level for problem in validation) for level in LEVELS] == [4, 4, 3]
    with pytest.raises(ValueError, match="num_validation.*120.*basic"):
        split_validation(problems, 120)


# ---- what may be said ----

START, OTHER = {"beta": 0.0}, {"beta": 0.04}


def a_result(search, judge=(), refused=()):
    """search, judge: (settings, accuracies) pairs."""
    records = [
        {"part": part, "settings": settings, "seed": seed, "accuracy": share, "seconds": 1.0}
        for part, rows, first in (("search", search, 0), ("judge", judge, 3))
        for settings, shares in rows
        for seed, share in enumerate(shares, start=first)
    ]
    records += [{"part": "search", "settings": s, "seed": 0, "failure": why, "seconds": 0.0} for s, why in refused]
    plan = SweepPlan(space={"beta": "0,0.04"}, judge_seeds=3)
    return SweepResult(Path("runs/x"), plan, START, records)


def judged(before, after):
    return a_result([(START, [0.4, 0.4, 0.4]), (OTHER, [0.5, 0.5, 0.5])], [(START, before), (OTHER, after)])


def test_a_winner_needs_an_interval_above_zero():
    # differences 0.19, 0.20, 0.21: mean 0.20, s = 0.01, half width 4.303 · 0.01/√3 = 0.0248
    result = judged([0.41, 0.40, 0.39], [0.60, 0.60, 0.60])
    assert result.difference.value == pytest.approx(0.20)
    assert result.difference.low == pytest.approx(0.20 - 0.02484, abs=1e-4)
    assert result.outcome == "winner"
    assert "Winner: beta 0.04. +20 points [+18, +22]" in sweep_text(result)
    few = [{**record, "n": 8} for record in result.records]  # a file may hold fewer problems than were asked for
    assert "on 8 held-out problems" in sweep_text(replace(result, records=few))


def test_the_same_mean_with_more_spread_is_no_winner():
    # differences 0.1, 0.2, 0.3: half width 4.303 · 0.1/√3 = 0.248 > 0.2
    result = judged([0.4, 0.4, 0.4], [0.5, 0.6, 0.7])
    assert (result.outcome, result.difference.value) == ("no winner", pytest.approx(0.2))
    assert verdict_text(result).startswith("No winner: beta 0.04") and "[-5, +45]" in verdict_text(result)


def test_better_at_choosing_and_worse_when_judged_is_said():
    result = judged([0.60, 0.60, 0.60], [0.41, 0.40, 0.39])
    assert result.outcome == "worse"
    assert verdict_text(result).startswith("No winner") and "worse on new ones: -20 points" in verdict_text(result)


def test_the_luckiest_run_wins_nothing():
    lucky = {"beta": 0.1}
    result = a_result([(START, [0.4, 0.4, 0.4]), (lucky, [0.9, 0.1, 0.2]), (OTHER, [0.5, 0.5, 0.5])])
    assert [row.settings for row in result.tried] == [OTHER, START, lucky]
    assert result.chosen.settings == OTHER
    assert verdict_text(result) == "No winner: the final comparison of beta 0.04 with the start is not complete."
    assert "single run solved 90%; its settings solve 40% on average" in sweep_text(result)


def test_where_the_start_is_best_nothing_is_judged():
    result = a_result([(START, [0.5, 0.5, 0.5]), (OTHER, [0.5, 0.5, 0.5])])
    assert (result.chosen, result.judged, result.difference, result.outcome) == (None, None, None, "no winner")
    assert verdict_text(result).startswith("No winner")


def test_what_was_refused_is_listed_with_its_reason():
    refused = [({"beta": 1.0}, "too large"), ({"beta": 3.0}, "out of memory")]
    text = sweep_text(a_result([(START, [0.5, 0.5, 0.5])], refused=refused))
    assert "- beta 1: too large\n- beta 3: out of memory" in text


def test_mean_rewards_are_shown_next_to_accuracies_and_may_choose():
    """Differences of the rewards with the new seeds 0.04, 0.05, 0.06: half width 4.303 · 0.01/√3 = 0.0248."""
    result = judged([0.40, 0.40, 0.40], [0.31, 0.41, 0.51])
    for record, reward in zip(result.records, [0.6] * 3 + [0.5] * 3 + [0.50] * 3 + [0.54, 0.55, 0.56], strict=True):
        record["reward"] = reward
    assert result.chosen.settings == OTHER and result.outcome == "no winner"
    text = sweep_text(result)
    assert "| beta 0.04 | 50% [50%, 50%] | 0.500 [0.500, 0.500] | 50% 50% 50% |" in text
    assert "- chosen − start, seed by seed: +1 points [-24, +26]; +0.050 [+0.025, +0.075] in the mean reward" in text
    by_reward = replace(result, plan=replace(result.plan, measure="reward"))
    assert by_reward.chosen is None, "the start is paid more"
    better = [{**record, "reward": 1 - record["reward"]} for record in result.records[:6]] + result.records[6:]
    by_reward = replace(by_reward, records=better)
    assert (by_reward.chosen.settings, by_reward.outcome) == (OTHER, "winner")
    assert "Winner: beta 0.04. +0.050 [+0.025, +0.075] in the mean reward" in verdict_text(by_reward)
    assert "single run earned 0.500; its settings earn 0.500 on average" in sweep_text(by_reward)
    for record in result.records:  # a reward of 0 or 1 says no more than the accuracy
        record["reward"] = record["accuracy"]
    assert "reward" not in sweep_text(result)
    del result.records[0]["reward"]  # version 0.3.0 did not store it
    assert "reward" not in sweep_text(result)


# ---- real ones, on the shipped model ----

RUN = {"max_steps": 1, "num_generations": 2, "prompts_per_step": 4, "max_completion_length": 40, "n": 30}
# A learning rate that ruins the model at once, so that a sane one must win; one group size that cannot be.
PLAN = SweepPlan(
    space={"learning_rate": "1e-4,2e-1", "num_generations": "2,3"},
    trials=4,
    seeds=(0, 1),
    judge_seeds=3,
    num_validation=30,
    num_heldout=30,
)
RUINED = load_profile("quick").override({**RUN, "learning_rate": 0.2})


def without_times(result):
    return [{key: value for key, value in row.items() if key != "seconds"} for row in result.records]


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    return sweep_runs.start_sweep(RUINED, PLAN, output=tmp_path_factory.mktemp("sweep") / "whole")


def test_a_sweep_finds_the_settings_that_work_and_names_the_impossible(swept):
    assert swept.outcome == "winner"
    assert swept.chosen.settings == {"learning_rate": 1e-4, "num_generations": 2}
    assert {one.settings["num_generations"] for one in swept.refused} == {3}
    assert {part: sum(row["part"] == part for row in swept.records) for part in ("search", "judge")} == {
        "search": 6,
        "judge": 6,  # 2 settings x 2 seeds and 2 refused; 2 x 3 new seeds
    }
    kept = json.loads((swept.output / "sweep.json").read_text())
    assert kept["outcome"] == "winner"
    assert read_log(swept.output / "runs.jsonl") == swept.records


def test_problems_to_train_choose_and_judge_by_are_apart(swept):
    content = read_run_config(swept.output)
    problems = Sweep(RunFolder(swept.output), RunMetadata.from_dict(content), SweepPlan(**content["sweep"])).problems
    keys = {part: set(map(problem_key, found)) for part, found in problems.items()}
    assert {part: len(found) for part, found in keys.items()} == {"train": 2970, "search": 30, "judge": 30}
    assert not keys["train"] & keys["search"] and not keys["judge"] & (keys["train"] | keys["search"])


@pytest.mark.long
def test_a_killed_sweep_goes_on_to_the_same_end(swept, tmp_path):
    code = (
        "from test_sweeps import PLAN, RUINED; from grpo_edu.studies.sweep_runs import start_sweep;"
        f"start_sweep(RUINED, PLAN, output={str(tmp_path / 'cut')!r})"
    )
    paths = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths})
    log, deadline = tmp_path / "cut" / "runs.jsonl", time.monotonic() + 500
    while not log.exists() or log.read_bytes().count(b"\n") < 3:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with open(log, "a") as file:  # as a kill in the middle of a line would leave it
        file.write('{"part": "se')
    result = sweep_runs.resume_sweep(tmp_path / "cut")
    assert without_times(result) == without_times(swept)
    assert (result.outcome, result.difference) == (swept.outcome, swept.difference)


def test_a_sweep_by_a_reward_that_applies_to_no_problem_is_refused(tmp_path, monkeypatch):
    unpaid = Evaluation(["?"], ["basic"], [""], [None], [False], rewards=[math.nan])
    monkeypatch.setattr(sweep_runs, "train", lambda *arguments: ())
    monkeypatch.setattr(sweep_runs, "evaluate", lambda *arguments, **options: unpaid)
    with pytest.raises(ValueError, match="no reward applies"):
        sweep_runs.start_sweep(RUINED, replace(PLAN, measure="reward"), output=tmp_path / "sweep")


def test_resuming_a_finished_sweep_runs_nothing_again(swept, monkeypatch):
    monkeypatch.setattr(sweep_runs, "train", None)
    assert sweep_runs.resume_sweep(swept.output).to_dict() == swept.to_dict()


def test_a_sweep_of_version_0_3_0_goes_on(swept, tmp_path, monkeypatch):
    """That version kept the runs as user attributes in Optuna's journal, among other lines."""
    old = shutil.copytree(swept.output, tmp_path / "old")
    runs = read_log(old / "runs.jsonl")
    (old / "runs.jsonl").unlink()
    lines = [{"op_code": 2, "user_attr": {f"run {number:06d}": run}} for number, run in enumerate(runs)]
    write_log(old / "optuna.log", [{"op_code": 0, "study_name": "sweep"}, *lines])
    monkeypatch.setattr(sweep_runs, "train", None)
    result = sweep_runs.resume_sweep(old)
    assert (result.records, result.difference) == (swept.records, swept.difference)


def test_a_sweep_whose_problems_have_changed_is_not_resumed(swept, tmp_path):
    shutil.copytree(swept.output, tmp_path / "changed")
    config = tmp_path / "changed" / "config.json"
    content = json.loads(config.read_text())
    content["data_fingerprints"]["judge"] = content["data_fingerprints"]["train"]
    config.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="other judge problems.*restore"):
        sweep_runs.resume_sweep(tmp_path / "changed")


def test_a_sweep_whose_reward_was_edited_is_not_resumed(swept, tmp_path):
    shutil.copytree(swept.output, tmp_path / "changed")
    (tmp_path / "r.py").write_text("def mine(completions, **kwargs):\n    return [1.0] * len(completions)\n")
    config = tmp_path / "changed" / "config.json"
    content = json.loads(config.read_text())
    content |= {"reward_funcs": [f"{tmp_path / 'r.py'}:mine"], "reward_fingerprints": {str(tmp_path / "r.py"): "other"}}
    config.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="r.py was edited since the run began"):
        sweep_runs.resume_sweep(tmp_path / "changed")


def test_a_range_is_searched_the_same_way_whenever_it_stops(tmp_path, monkeypatch):
    def proposals(name, stops):
        """The settings that a sweep proposes where runs are instant, and Ctrl-C falls into those of `stops`."""
        calls = []

        def instant(self, config, problems):
            calls.append(config)
            if len(calls) in stops:
                raise KeyboardInterrupt
            share = 1 - abs(config.learning_rate - 3e-4)
            return {"accuracy": share, "k": 1, "n": 1}

        monkeypatch.setattr(Sweep, "train_and_evaluate", instant)
        plan = SweepPlan(space={"learning_rate": "1e-5:1e-2", "beta": "0,0.04"}, trials=8, seeds=(0, 1))
        try:
            return sweep_runs.start_sweep(RUINED, plan, output=tmp_path / name).records
        except KeyboardInterrupt as error:
            assert error.__notes__[0].endswith(f"--resume {tmp_path / name}")
        for _ in stops[1:]:
            with pytest.raises(KeyboardInterrupt):
                sweep_runs.resume_sweep(tmp_path / name)
        return sweep_runs.resume_sweep(tmp_path / name).records

    names = ("part", "settings", "seed", "accuracy")
    whole, cut = ([[row[name] for name in names] for row in proposals(*way)] for way in (("a", ()), ("b", (5, 9, 14))))
    assert cut == whole
    assert len({row[1]["learning_rate"] for row in whole}) >= 8


# ---- the command ----


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--num-generations 4,x", "--num-generations.*4,8,16.*'4,x'"),
        ("--num-generations 1,2", "--num-generations.*at least 2.*1"),
        ("--seeds 0", "--seeds.*two.*0"),
        ("--seeds 0,a", "--seeds.*whole numbers with commas.*'0,a'"),
        ("--resume x --trials 3", "--trials.*--resume"),
        ("--profile nope", "--profile.*'nope'"),
        ("--data nowhere", "--data.*'nowhere'"),
        ("--learning-rate 1e-4,1e-3 --use-bias-correction-kl", "--use-bias-correction-kl.*needs --beta above 0"),
        ("--loss-type grpo,dapo --epsilon 0.1", "--epsilon.*needs --num-iterations"),
        ("--beta 0,0.04 --use-bias-correction-kl --data basic --columns answer=b", "--columns.*--data names none"),
    ],
)
def test_bad_input_is_one_line(line, words, capsys):
    assert main(["sweep", *line.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1
    assert re.search(words, captured.err)


def test_the_command_resumes_and_a_folder_without_a_sweep_is_refused(swept, tmp_path, capsys):
    assert main(["sweep", "--resume", str(tmp_path)]) == 2
    assert "holds no sweep" in capsys.readouterr().err
    assert main(["sweep", "--resume", str(swept.output), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["outcome"] == "winner"


def test_without_optuna_the_extra_is_named(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert main(["sweep", "--output", str(tmp_path / "s")]) == 2
    assert 'pip install "grpo-edu[tuning]"' in capsys.readouterr().err
    assert not (tmp_path / "s").exists()
