"""Whole runs of a small random policy: what the folder holds, and what is left when a run goes wrong."""

import json
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scipy.stats import binomtest
from small_policy import brevity, names_in, same_weights
from torch.optim.optimizer import register_optimizer_step_post_hook
from toy_policy import timeless

from grpo_edu.config import GRPOConfig
from grpo_edu.evaluation import compare
from grpo_edu.models import load_policy
from grpo_edu.problems.files import load_problems
from grpo_edu.problems.hub import model_source, read_run_config
from grpo_edu.prompts import render_prompt
from grpo_edu.rewards import accuracy_reward, length_reward
from grpo_edu.runs import run as runs
from grpo_edu.runs.folder import RunFolder
from grpo_edu.runs.loading import load_split, parse_names, resolve_rewards
from grpo_edu.runs.log import read_log
from grpo_edu.runs.options import RunConfig, default_config
from grpo_edu.runs.record import default_folder
from grpo_edu.runs.recording import DeferInterrupts, sigterm_interrupts
from grpo_edu.runs.run import run_evaluation, run_training
from grpo_edu.runs.summary import RunResult, summary
from grpo_edu.trainer import train

CONFIG = GRPOConfig(
    num_generations=4, prompts_per_step=2, max_completion_length=24, max_steps=3, learning_rate=1e-3, seed=5
)
pytestmark = pytest.mark.usefixtures("ctrl_c_works", "no_pictures")


@pytest.fixture
def run(policy_dir, tmp_path):
    """Train the small policy into tmp_path/run; any argument can be replaced."""

    def start(**changes) -> RunResult:
        arguments = dict(rewards=brevity, config=CONFIG, n=6, greedy=False, output=tmp_path / "run", progress=False)
        return run_training(policy_dir, **(arguments | changes))

    return start


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_policy(folder)[0].state_dict()


RUN_FILES = {
    "config.json",
    "first_look.txt",
    "completions.jsonl.gz",
    "metrics.jsonl",
    "model",
    "result.json",
    "summary.md",
    "curves.png",
    "accuracy.png",
}


def test_a_run_keeps_everything(run, policy_dir, tmp_path, monkeypatch):
    monkeypatch.undo()  # with pictures
    trained = {}

    def keep(name, dtype, **options):
        trained["model"], trained["tokenizer"] = load_policy(name, dtype, **options)
        return trained["model"], trained["tokenizer"]

    monkeypatch.setattr(runs, "load_policy", keep)
    result = run(command="grpo-edu train --seed 5")
    folder = tmp_path / "run"
    assert result.output == folder and names_in(folder) == RUN_FILES

    asked = json.loads((folder / "config.json").read_text())
    assert GRPOConfig(**asked["config"]) == CONFIG
    assert asked["reward_funcs"] == ["brevity"] and asked["data"] == ["basic", "intermediate", "advanced"]
    assert read_log(folder / "metrics.jsonl") == result.history and len(result.history) == 3

    ids = trained["tokenizer"]([render_prompt(trained["tokenizer"], "What is 2 + 3?")], return_tensors="pt")
    model, tokenizer = load_policy(folder / "model")
    assert same_weights(model.state_dict(), trained["model"].state_dict())
    torch.testing.assert_close(model(**ids).logits, trained["model"](**ids).logits)
    assert not same_weights(weights_of(policy_dir), weights_of(folder / "model"))
    assert tokenizer.get_vocab() == trained["tokenizer"].get_vocab()

    numbers = json.loads((folder / "result.json").read_text())
    assert numbers == result.to_dict()
    assert numbers["steps"] == 3 and numbers["seed"] == 5 and not numbers["interrupted"]
    assert numbers["accuracy_before"]["n"] == numbers["accuracy_after"]["n"] == 6
    assert {"k", "n", "low", "high", "accuracy"} <= numbers["accuracy_after"].keys()
    for name in ("curves.png", "accuracy.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG") and f"({name})" in summary(result)

    page = (folder / "summary.md").read_text()
    assert "grpo-edu train --seed 5" in page and "3 steps in" in page and "6 held-out problems" in page
    for level in ("basic", "intermediate", "advanced"):
        assert load_problems(level, "heldout")[0].prompt in page


def test_the_numbers_are_those_of_the_evaluations(run):
    result = run(greedy=True)
    levels = ["basic", "basic", "intermediate", "intermediate", "advanced", "advanced"]
    assert result.before.levels == result.after.levels == levels
    assert result.before.prompts == [p.prompt for level in levels[::2] for p in load_problems(level, "heldout", 2)]
    again = run_evaluation(result.output, n=6, seed=5, max_completion_length=24, progress=False)
    assert replace(again, rewards=result.after.rewards) == result.after, "a function of Python cannot be loaded again"
    greedy = run_evaluation(result.output / "model", n=6, temperature=0, max_completion_length=24, progress=False)
    assert replace(greedy, rewards=[]) == result.greedy_after
    before, after = [False] * 8 + [True], [True] * 8 + [True]
    small = replace(
        result,
        before=replace(result.before, **{k: v[:1] * 9 for k, v in vars(result.before).items()} | {"correct": before}),
        after=replace(result.after, **{k: v[:1] * 9 for k, v in vars(result.after).items()} | {"correct": after}),
    )
    assert small.p_value == binomtest(8, 8).pvalue == 2 / 2**8
    assert "| sampled, temperature 1 | 11.1% [2.0, 43.5] | 100.0% [70.1, 100.0] |" in summary(small)
    assert "p = 0.0078" in summary(small)
    paid = replace(
        small, before=replace(small.before, rewards=[0.25] * 9), after=replace(small.after, rewards=[0.75] * 9)
    )
    assert "| sampled, temperature 1 | 0.250 [0.250, 0.250] | 0.750 [0.750, 0.750] |" in summary(paid)
    assert "p = 0.0078; reward +0.500 [+0.500, +0.500]." in summary(paid)
    assert paid.to_dict()["reward_change"] == {"difference": 0.5, "low": 0.5, "high": 0.5}
    assert paid.to_dict()["accuracy_after"]["reward"] == {"value": 0.75, "low": 0.75, "high": 0.75}
    old = replace(paid, before=replace(paid.before, rewards=[]))  # a state of 0.3.0
    assert "| sampled, temperature 1 | - | 0.750 [0.750, 0.750] |" in summary(old)


def test_the_same_seed_gives_the_same_run(run, tmp_path):
    first = run()
    again = run(output=tmp_path / "again")
    assert timeless(first.history) == timeless(again.history) and first.after == again.after
    assert same_weights(weights_of(first.output / "model"), weights_of(again.output / "model"))
    other = run(output=tmp_path / "other", config=replace(CONFIG, seed=6))
    assert timeless(other.history) != timeless(first.history) and other.before != first.before


def test_greedy_evaluations_come_only_where_they_are_quick(run, tmp_path, monkeypatch):
    one_step = replace(CONFIG, max_steps=1)
    monkeypatch.setattr(runs, "MAX_GREEDY_SECONDS", 1e9)
    quick = run(greedy=None, config=one_step, output=tmp_path / "quick")
    assert quick.to_dict()["greedy_after"]["n"] == 6
    assert "| greedy | " in (tmp_path / "quick" / "summary.md").read_text()
    monkeypatch.setattr(runs, "MAX_GREEDY_SECONDS", 0.0)
    slow = run(greedy=None, config=one_step, output=tmp_path / "slow")
    assert slow.greedy_before is slow.greedy_after is None and slow.to_dict()["greedy_after"] is None
    assert "greedy" not in (tmp_path / "slow" / "summary.md").read_text()


def test_ctrl_c_keeps_the_last_full_step(run, tmp_path):
    two_steps = run(output=tmp_path / "two", config=replace(CONFIG, max_steps=2))
    calls = []

    def interrupting(completions, completion_ids, **kwargs):
        calls.append(1)
        if len(calls) == 4:  # the first one is the evaluation before
            signal.raise_signal(signal.SIGINT)
        return brevity(completions, completion_ids)

    interrupting.__name__ = "brevity"  # so that the metrics have one name
    result = run(rewards=interrupting)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert result.interrupted and result.after is None and result.p_value is None and not result.failure
    assert timeless(result.history) == timeless(two_steps.history) and read_log(tmp_path / "run" / "metrics.jsonl")
    assert same_weights(weights_of(tmp_path / "run" / "model"), weights_of(tmp_path / "two" / "model"))
    assert names_in(tmp_path / "run") == RUN_FILES - {"accuracy.png"} | {"state.pt"}
    assert "Interrupted after 2 of 3 steps." in (tmp_path / "run" / "summary.md").read_text()
    assert json.loads((tmp_path / "run" / "result.json").read_text())["interrupted"] is True


def test_ctrl_c_between_two_updates_of_a_step_lets_the_step_end(run, tmp_path):
    config = replace(CONFIG, num_iterations=3)
    two_steps = run(output=tmp_path / "two", config=replace(config, max_steps=2))
    updates = []

    def interrupt(*arguments):
        updates.append(1)
        if len(updates) == 4:  # the first of the second step's three
            signal.raise_signal(signal.SIGINT)

    hook = register_optimizer_step_post_hook(interrupt)
    try:
        result = run(config=config)
    finally:
        hook.remove()
    assert result.interrupted and timeless(result.history) == timeless(two_steps.history)
    assert same_weights(weights_of(tmp_path / "run" / "model"), weights_of(tmp_path / "two" / "model"))


def test_ctrl_c_while_the_result_is_written_is_no_success(run, tmp_path, monkeypatch):
    monkeypatch.setattr("grpo_edu.runs.run.write_result", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert (tmp_path / "run" / "model").is_dir() and not (tmp_path / "run" / "result.json").exists()


def interrupt(*arguments):
    raise KeyboardInterrupt


def test_ctrl_c_before_the_first_step_leaves_an_older_run_alone(run, tmp_path):
    older = run()

    def interrupting(completions, **kwargs):
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(rewards=interrupting, overwrite=True)
    assert names_in(tmp_path / "run") == RUN_FILES
    assert read_log(tmp_path / "run" / "metrics.jsonl") == older.history
    with pytest.raises(KeyboardInterrupt):
        run(rewards=interrupting, output=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_process_that_ignores_a_signal_goes_on_doing_so():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    usual = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with sigterm_interrupts(), DeferInterrupts() as interrupts:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
            interrupts.raise_if_asked()
    finally:
        signal.signal(signal.SIGTERM, usual)


def test_a_worker_thread_may_train(run, tmp_path):
    results = []
    worker = threading.Thread(target=lambda: results.append(run()))
    worker.start()
    worker.join()
    assert len(results[0].history) == 3
    with DeferInterrupts() as interrupts:  # and the main thread's handler was left alone
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        interrupts.raise_if_asked()


@pytest.mark.parametrize(
    ("returned", "kind", "message"),
    [
        (lambda: 1 / 0, RuntimeError, "'failing' raised ZeroDivisionError"),
        (lambda: exec("exit()"), RuntimeError, "'failing' raised SystemExit"),
        (lambda: [1.0], ValueError, "'failing' returned 1 rewards for 8 completions"),
    ],
)
def test_a_reward_that_fails_in_the_middle_loses_nothing(run, tmp_path, returned, kind, message):
    calls = []

    def failing(completions, completion_ids, **kwargs):
        calls.append(1)
        return brevity(completions, completion_ids) if len(calls) < 4 else returned()

    with pytest.raises(kind, match=message) as caught:
        run(rewards=failing)
    folder = tmp_path / "run"
    (note,) = caught.value.__notes__
    assert f"{folder} keeps 2 steps" in note and f"--resume {folder}" in note
    assert all(name in note for name in ("metrics.jsonl", "model", "summary.md", "state.pt"))
    assert len(read_log(folder / "metrics.jsonl")) == 2 and load_policy(folder / "model")
    assert "Stopped by an error after 2 of 3 steps" in (folder / "summary.md").read_text()
    assert message.split(" r")[0] in json.loads((folder / "result.json").read_text())["failure"]


def test_a_folder_with_a_run_is_replaced_only_when_told(run, tmp_path):
    folder = tmp_path / "run"
    run()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="already holds a run; choose another folder, or set `overwrite`"):
        run()
    with pytest.raises(ValueError, match="holds the model to start from"):
        run_training(folder, rewards=brevity, config=CONFIG, n=6, output=folder, overwrite=True, progress=False)
    short = run(overwrite=True, config=replace(CONFIG, max_steps=1))
    assert len(short.history) == len(read_log(folder / "metrics.jsonl")) == 1
    assert names_in(folder) == RUN_FILES | {"notes.txt"}


def test_a_folder_that_holds_no_run_is_never_touched(run, policy_dir, tmp_path):
    before = {path: path.read_bytes() for path in policy_dir.iterdir()}
    with pytest.raises(FileExistsError, match="holds files"):
        run(output=policy_dir, overwrite=True)
    assert {path: path.read_bytes() for path in policy_dir.iterdir()} == before
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(NotADirectoryError, match="file is a file; choose a folder"):
            run(output=place)
    (tmp_path / "empty").mkdir()
    RunFolder(tmp_path / "empty").check()


def test_a_run_whose_config_is_damaged_is_named_and_left_alone(run, tmp_path):
    folder = run().output
    (folder / "config.json").write_text((folder / "config.json").read_text()[:-30])
    for overwrite in (True, False):
        with pytest.raises(FileExistsError, match="config.json.*damaged.*delete the folder"):
            run(overwrite=overwrite)
    assert (folder / "model").is_dir()


def test_two_rewards_of_one_name_are_refused_before_anything_is_sampled(policy_dir):
    model, tokenizer = load_policy(policy_dir)
    with pytest.raises(ValueError, match="reward_funcs.*different names.*brevity, brevity"):
        next(train(model, tokenizer, load_problems("basic", "train", 2), [brevity, brevity], CONFIG))


@pytest.mark.skipif(
    os.name != "posix" or os.geteuid() == 0, reason="root may write everywhere: run the tests as an ordinary user"
)
def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError, match="cannot be written"):
        RunFolder(tmp_path / "run").check()


def test_the_default_folder_is_a_new_one(policy_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = RunConfig(config=GRPOConfig(seed=3))
    assert default_folder(first).path == tmp_path / "runs" / "tiny-levels-seed3"
    (tmp_path / "runs" / "tiny-levels-seed3").mkdir(parents=True)
    assert default_folder(first).path.name == "tiny-levels-seed3-2"
    assert default_folder(first, overwrite=True).path.name == "tiny-levels-seed3"
    hub = RunConfig(model="Qwen/Qwen2-0.5B-Instruct", data=("gsm8k",))
    assert default_folder(hub).path.name == "Qwen2-0.5B-Instruct-gsm8k-seed0"
    earlier = RunConfig(model="runs/a/model", data=("basic", "sorting"))
    assert default_folder(earlier).path.name == "a-basic-sorting-seed0"


def test_a_run_prints_one_line_and_its_folder_is_a_model(run, tmp_path):
    result = run()
    assert repr(result) == f"{len(result.history)} steps in {tmp_path / 'run'}: {compare(result.before, result.after)}"
    weights, saved = weights_of(tmp_path / "run"), weights_of(tmp_path / "run" / "model")
    assert all(torch.equal(weights[name], saved[name]) for name in saved)


def test_a_run_that_saved_no_model_is_no_model(tmp_path):
    RunFolder(tmp_path / "run").claim({"grpo_edu": "0.1.0"})
    assert read_run_config(tmp_path / "run") == {"grpo_edu": "0.1.0"}
    with pytest.raises(FileNotFoundError, match="has no model, .*stopped too early"):
        model_source(tmp_path / "run")
    with pytest.raises(FileNotFoundError, match="has no model, .*stopped too early"):
        load_policy(tmp_path / "run")
    assert model_source("tiny") == "tiny" and model_source(tmp_path) == tmp_path


def test_bad_input_is_refused_before_anything_is_done(run, policy_dir, tmp_path):
    problems = tmp_path / "gsm8k.jsonl"
    problems.write_text("{\n")
    for changes, message in [
        ({"data": "basic,advancd"}, "data.*'advancd'.*basic, intermediate"),
        ({"data": ()}, "data.*empty"),
        ({"rewards": "accurate"}, "reward_funcs.*'accurate'.*accuracy, format, steps, length"),
        ({"rewards": []}, "reward_funcs.*empty"),
        ({"n": 2}, "`num_heldout` is 2.*basic, intermediate, advanced"),
        ({"n": 3000}, "`num_heldout` is 3000.*1000 heldout problems of basic.*400"),
        ({"n": "300"}, "^num_heldout.*whole number.*'300'"),
        ({"greedy": 1}, "^greedy.*true or false.*1"),
        ({"config": replace(CONFIG, reward_weights=(1, 2))}, "reward_weights.*2 .*brevity"),
        ({"data_path": tmp_path}, "data_path.*only gsm8k"),
        ({"data": "gsm8k", "data_path": problems}, "data_path.*one file"),
    ]:
        with pytest.raises(ValueError, match=message):
            run(**changes)
    with pytest.raises(ValueError, match=r"gsm8k\.jsonl:1: this line is not JSON"):
        run_evaluation(policy_dir, data="gsm8k", data_path=problems, n=1)
    assert not (tmp_path / "run").exists()


def test_a_request_comes_back_from_json():
    request = RunConfig(
        data="basic,sorting",
        reward_funcs=["steps", accuracy_reward],
        lora_rank=2,
        lora_targets="q_proj",
        report_to="wandb",
    )
    stored = json.loads(json.dumps(request.to_dict()))
    again = RunConfig.from_dict(stored)
    assert resolve_rewards(again.reward_funcs) == resolve_rewards(request.reward_funcs)
    assert replace(again, reward_funcs=request.reward_funcs) == request
    assert RunConfig.from_settings({**again.to_settings(), "seed": 3}).config.seed == 3


def test_a_run_of_a_later_version_is_refused_with_both_ways_out():
    stored = RunConfig().to_dict()
    stored |= {"grpo_edu": "9.9.9", "config": {**stored["config"], "new_setting": 3}}
    with pytest.raises(ValueError, match="grpo_edu 9.9.9.*new_setting; use that version, or start a new run"):
        RunConfig.from_dict(stored)


def test_names_of_sets_and_rewards():
    assert parse_names(["basic", " basic", "gsm8k"], ("basic", "gsm8k"), "data") == ("basic", "gsm8k")
    assert resolve_rewards([length_reward, "accuracy,format"])[0] is length_reward
    assert len(load_split(("basic", "coin_flip"), "train")) == 2000
    assert [p.level for p in load_split(("basic", "sorting", "coin_flip"), n=5)] == [
        "basic",
        "basic",
        "sorting",
        "sorting",
        "coin_flip",
    ]
    with pytest.raises(ValueError, match="split.*'test'.*heldout, train"):
        load_split(("basic",), "test")
    assert default_config(("gsm8k",), max_completion_length=9).max_completion_length == 9
    assert default_config(("basic",)) == GRPOConfig()


def test_gsm8k_trains_on_train_and_is_judged_on_test(run, gsm8k_dir):
    config = replace(CONFIG, max_steps=1)
    result = run(data="gsm8k", data_path=gsm8k_dir, n=3, config=config)
    first = json.loads((gsm8k_dir / "test.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert result.before.prompts[0] == first["question"] and result.before.n == 3
    assert result.record.run_config.data_path == str(gsm8k_dir)


def test_backticks_in_a_completion_do_not_break_the_page(run):
    result = run(config=replace(CONFIG, max_steps=1))
    wild = replace(result.before, completions=["````\n# not a heading\n````"] * 6)
    page = summary(replace(result, before=wild))
    assert "`````text\n````\n# not a heading\n````\n`````" in page
