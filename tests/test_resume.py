"""Runs that are stopped and continue: killed three times, interrupted, broken by their numbers, out of disk, held."""

import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import torch
from small_policy import brevity, fill, names_in, same_weights

from benchmarks.kill_and_resume import outcome, study
from grpo_edu.cli.main import main
from grpo_edu.config import GRPOConfig
from grpo_edu.losses import grpo_loss
from grpo_edu.models import load_policy
from grpo_edu.runs import run as runs
from grpo_edu.runs.folder import RunFolder, is_locked, run_lock
from grpo_edu.runs.log import read_log
from grpo_edu.runs.options import RunConfig
from grpo_edu.runs.record import read_resumable
from grpo_edu.runs.run import Run, Saved, Stepped, resume_training, run_training
from grpo_edu.runs.state import load_failed_batch, load_state
from grpo_edu.trainer import Stages

SIZES = {"num_generations": 4, "prompts_per_step": 2, "max_completion_length": 48, "learning_rate": 1e-3, "seed": 5}
CONFIG = GRPOConfig(**SIZES, max_steps=5, beta=0.02)
pytestmark = pytest.mark.usefixtures("ctrl_c_works", "no_pictures")


ARGUMENTS = {"rewards": "length", "config": CONFIG, "n": 6, "greedy": False, "progress": False, "checkpoint_every": 2}


@pytest.fixture
def run(policy_dir, tmp_path):
    """Train the small policy into tmp_path/run with a checkpoint every two steps; any argument can be replaced."""
    return lambda **changes: run_training(policy_dir, **(ARGUMENTS | {"output": tmp_path / "run"} | changes))


@pytest.fixture(scope="module")
def whole(policy_dir, tmp_path_factory):
    """The same run, never stopped."""
    return run_training(policy_dir, **ARGUMENTS, output=tmp_path_factory.mktemp("whole") / "run")


def stopping_at(step, how):
    """A reward like "length" that does `how` while the step's batch is scored, after the evaluation before."""
    from grpo_edu.rewards import length_reward

    calls = []

    def length(completions, **columns):
        calls.append(1)
        return how(completions) if len(calls) == step + 1 else length_reward(completions, **columns)

    length.__name__ = "length_reward"
    return length


def raises(number):
    """A reward that sends this process a signal."""
    return lambda completions: signal.raise_signal(number)


interrupt, kill_softly = raises(signal.SIGINT), raises(signal.SIGTERM)
hang_up = raises(getattr(signal, "SIGHUP", signal.SIGTERM))


@pytest.mark.long
@pytest.mark.parametrize(("kills", "steps"), [(1, 6), (3, 20)])
def test_killed_at_random_and_resumed_it_ends_the_same(policy_dir, tmp_path, kills, steps):
    config = {**SIZES, "max_steps": steps}
    options = {"config": config, "checkpoint_every": 2, "n": 6, "greedy": True, "rewards": "length"}
    rows = study(kills, seed=random.randrange(10**6), model=str(policy_dir), options=options, parent=tmp_path)["rows"]
    assert len(rows) == kills
    for row in rows:
        assert row["same weights"] and row["same metrics"] and row["same result"] and row["nothing left over"], row


def full(*arguments, **options):
    raise OSError(28, "could not write the state (No space left on device); free some space", "state.pt")


@pytest.fixture
def hang_up_is_heard():
    """Let SIGHUP do what it usually does: under nohup it is ignored, and so it is by whatever nohup starts."""
    number = getattr(signal, "SIGHUP", signal.SIGTERM)
    before = signal.signal(number, signal.SIG_DFL)
    yield
    signal.signal(number, before)


@pytest.mark.usefixtures("hang_up_is_heard")
@pytest.mark.parametrize(
    ("how", "every"),
    [
        (interrupt, 2),
        (kill_softly, 0),
        pytest.param(interrupt, 0, marks=pytest.mark.long),
        pytest.param(kill_softly, 2, marks=pytest.mark.long),
        pytest.param(hang_up, None, marks=pytest.mark.skipif(os.name != "posix", reason="SIGHUP is of POSIX")),
    ],
)
def test_after_ctrl_c_or_sigterm_it_goes_on_and_ends_the_same(run, whole, tmp_path, capsys, how, every):
    assert sum(step["grad_norm"] > 0 for step in whole.history) >= 3  # otherwise nothing could end differently
    assert "state.pt" not in names_in(whole.output)
    stopped = run(rewards=stopping_at(4, how), checkpoint_every=every)
    folder = tmp_path / "run"
    assert stopped.interrupted and len(stopped.history) == 3
    assert len(load_state(folder / "state.pt")["history"]) == 3
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    (folder / ".result.json.1.tmp").write_text("half")  # and what a kill would leave
    usual = torch.get_num_threads()
    torch.set_num_threads(3 - usual if usual < 3 else 1)  # whatever the machine would take now
    assert main(["train", "--resume", str(folder), "--json"]) == 0
    torch.set_num_threads(usual)
    captured = capsys.readouterr()
    assert json.loads(captured.out)["steps"] == 5 and captured.err == ""
    assert outcome(folder) == outcome(whole.output)
    assert names_in(folder) == names_in(whole.output)
    assert [step["kl"] for step in read_log(folder / "metrics.jsonl")] == [step["kl"] for step in whole.history]
    assert main(["train", "--resume", str(folder)]) == 2
    assert re.search("is finished.*--model", capsys.readouterr().err)


@pytest.mark.parametrize(("seconds", "steps"), [(0.0, [1, 2, 3]), (300.0, [])])
def test_a_checkpoint_is_written_every_few_minutes_by_default(run, tmp_path, monkeypatch, seconds, steps):
    monkeypatch.setattr(runs, "CHECKPOINT_SECONDS", seconds)
    state, found = tmp_path / "run" / "state.pt", []

    def looking(completions, **columns):
        if state.is_file():
            found.append(len(load_state(state)["history"]))
        return [float(len(text)) for text in completions]

    run(rewards=looking, checkpoint_every=None, config=replace(CONFIG, max_steps=3))
    assert found == steps and not state.exists()


def test_a_checkpoint_that_nobody_asked_for_does_not_end_a_run_on_a_full_disk(run, monkeypatch):
    monkeypatch.setattr(runs, "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(runs, "save_state", full)
    with pytest.warns(UserWarning, match="the state after step 1 was not saved"):
        result = run(checkpoint_every=None, config=replace(CONFIG, max_steps=2))
    assert len(result.history) == 2 and result.after is not None


@pytest.mark.parametrize("stopped_in_call", [pytest.param(5, marks=pytest.mark.long), 7])
def test_dynamic_sampling_with_a_reference_goes_on_and_ends_the_same(run, tmp_path, stopped_in_call):
    """Interrupted in the first or in a later round of a step's sampling."""

    def seldom(interrupt_in=0):
        calls = []

        def reward(completions, prompts, **columns):
            calls.append(len(prompts))
            if len(calls) == interrupt_in:
                signal.raise_signal(signal.SIGINT)
            worth = [float(len(prompt) % 3 == 0) for prompt in prompts]  # the groups of most prompts tie
            return [factor * len(set(text)) for factor, text in zip(worth, completions, strict=True)]

        return reward

    config = replace(CONFIG, max_resamples=3, beta=0.5)
    whole = run(output=tmp_path / "whole", rewards=seldom(), config=config)
    sampled = [step["resampling/num_groups"] for step in whole.history]
    assert len(set(sampled)) > 1 and max(step["kl"] for step in whole.history) > 0
    stopped = run(rewards=seldom(stopped_in_call), config=config, checkpoint_every=0)
    assert stopped.interrupted and 0 < len(stopped.history) < 5
    resume_training(tmp_path / "run", rewards=seldom(), progress=False)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.long)])
def test_after_sigterm_in_the_last_evaluation_only_that_is_repeated(run, whole, tmp_path, monkeypatch, rank):
    whole = run(output=tmp_path / "whole", lora_rank=rank) if rank else whole
    evaluations, evaluate = [], runs.evaluate_in_batches

    def interrupted(*arguments, **options):
        evaluations.append(1)
        if len(evaluations) == 2:
            kill_softly([])
        return (yield from evaluate(*arguments, **options))

    monkeypatch.setattr(runs, "evaluate_in_batches", interrupted)
    assert run(lora_rank=rank, checkpoint_every=0).interrupted
    resumed = resume_training(tmp_path / "run", progress=False)
    assert resumed.steps_before == 5 and resumed.after == whole.after
    assert outcome(tmp_path / "run") == outcome(whole.output)


def test_a_state_that_cannot_be_written_after_ctrl_c_costs_no_model(run, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "save_state", full)
    with pytest.warns(UserWarning, match="state after step 3 was not saved.*No space left"):
        assert run(rewards=stopping_at(4, interrupt), checkpoint_every=0).interrupted
    assert load_policy(tmp_path / "run" / "model")
    with pytest.raises(ValueError, match="keeps no checkpoints"):
        resume_training(tmp_path / "run")


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_whoever_stops_taking_events_can_go_on_later(whole, policy_dir, tmp_path, steps):
    """Closing the generator is a stop as by Ctrl-C; before the first step it leaves nothing."""
    options = {"reward_funcs": "length", "config": CONFIG, "num_heldout": 6, "greedy": False, "checkpoint_every": 2}
    run = Run.start(RunConfig(str(policy_dir), **options), tmp_path / "run")
    events = run.events()
    seen = []
    while sum(isinstance(event, Stepped) for event in seen) < steps or not seen:
        seen.append(next(events))
    events.close()
    if steps == 0:
        assert run.result is None and not (tmp_path / "run").exists()
        return
    assert run.result.interrupted and len(run.result.history) == steps
    assert [event.step for event in seen if isinstance(event, Saved)] == [2][: steps // 2]
    resumed = Run.resume(tmp_path / "run")
    kinds = [type(event).__name__ for event in resumed.events()]
    assert kinds[0] == "Saved", "it can be stopped before it takes a step"
    kinds = [kind for kind in kinds if kind != "Evaluating"]
    assert kinds[-2:] == ["Evaluated", "Stopped"] and kinds.count("Stepped") == 5 - steps
    assert outcome(tmp_path / "run") == outcome(whole.output)


def test_changed_problems_are_noticed(run, tmp_path):
    folder, records = tmp_path / "run", [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(8)]
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    run(data="gsm8k", data_path=tmp_path, n=3, rewards=stopping_at(4, interrupt))
    for name, part in (("train", "train"), ("test", "heldout")):
        file = tmp_path / f"{name}.jsonl"
        whole = file.read_text()
        file.write_text(whole.replace("1 + 1?", "1+1?"))
        with pytest.raises(ValueError, match=f"resume.*other {part} problems.*data_path.*restore"):
            resume_training(folder)
        file.write_text(whole)
    assert len(resume_training(folder, progress=False).history) == 5


def test_a_run_goes_on_after_an_error_in_its_reward(run, whole, tmp_path):
    with pytest.raises(RuntimeError, match="ZeroDivisionError") as caught:
        run(rewards=stopping_at(4, lambda completions: 1 / 0))
    folder = tmp_path / "run"
    assert caught.value.__notes__ == [
        f"{folder} keeps 3 steps: metrics.jsonl, model, summary.md, state.pt; continue with --resume {folder}"
    ]
    resume_training(folder, progress=False)
    assert outcome(folder) == outcome(whole.output)


def test_a_run_of_the_version_before_is_resumed_and_evaluated(tmp_path, capsys):
    """tests/old_run: of grpo_edu before `RunConfig`, killed after step 4; whole.jsonl: the same run left alone."""
    folder = shutil.copytree(Path(__file__).parent / "old_run", tmp_path / "run")
    whole = read_log(folder / "whole.jsonl")
    record = read_resumable(folder)
    request = record.run_config
    assert request.reward_funcs == ("accuracy", "format") and request.num_heldout == 12
    assert request.lora_targets == ("q_proj", "v_proj")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # other versions of torch may not end exactly the same
        result = resume_training(folder, progress=False)
    assert [step["step"] for step in result.history] == list(range(1, 9)) and result.after.n == 12
    now, then = ([step["reward"] for step in history] for history in (result.history, whole))
    assert now[:4] == then[:4], "these are read from the log"
    assert fmean(now[4:]) == pytest.approx(fmean(then[4:]), abs=0.1), "another processor may sample a few other tokens"
    options = "--data basic,sorting --n 12 --seed 3 --max-completion-length 32 --json"
    assert main(["evaluate", "--model", str(folder), *options.split()]) == 0
    assert json.loads(capsys.readouterr().out)["k"] == result.after.k


def test_rewards_of_ones_own_are_given_again(run, tmp_path):
    stop = stopping_at(4, interrupt)
    run(rewards=[brevity, stop])
    with pytest.raises(ValueError, match="`reward_funcs`.*brevity, length_reward.*same functions"):
        resume_training(tmp_path / "run")
    with pytest.raises(ValueError, match="give the same functions"):
        resume_training(tmp_path / "run", rewards="length")
    assert len(resume_training(tmp_path / "run", rewards=[brevity, stop], progress=False).history) == 5


def nan_from(step):
    """The stages of a training with a loss that is NaN from a step on."""
    calls = []

    def poisoned(*arguments, **options):
        calls.append(1)
        return grpo_loss(*arguments, **options) * (float("nan") if len(calls) >= step else 1.0)

    return lambda: Stages(loss=poisoned)


def test_numbers_that_went_wrong_keep_checkpoint_and_batch(run, tmp_path, monkeypatch):
    two = run(output=tmp_path / "two", config=replace(CONFIG, max_steps=2))
    monkeypatch.setattr(runs, "Stages", nan_from(3))
    with pytest.raises(FloatingPointError, match="gradient.*finite") as caught:
        run()
    folder = tmp_path / "run"
    assert "keeps 2 steps: metrics.jsonl, model, summary.md, state.pt, diagnosis" in caught.value.__notes__[0]
    batch, step, error = load_failed_batch(folder / "diagnosis")
    assert step == 3 and "finite" in error and len(batch.rollout.completions) == 8
    model, _ = load_policy(folder / "model")
    good, _ = load_policy(two.output / "model")
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), good.parameters(), strict=True))
    monkeypatch.undo()  # the fault is found
    assert len(resume_training(folder, progress=False).history) == 5


def test_an_exploding_gradient_ends_the_run_before_it_moves_a_weight(run, tmp_path):
    config = replace(CONFIG, abort_grad_norm=1e-9)
    with pytest.raises(FloatingPointError, match="abort_grad_norm.*1e-09") as caught:
        run(rewards=brevity, config=config)
    folder = tmp_path / "run"
    kept = {"config.json", "diagnosis", "first_look.txt"}  # it was the very first step
    assert names_in(folder) == kept
    assert caught.value.__notes__ == [f"{folder} keeps 0 steps: diagnosis"]
    assert load_failed_batch(folder / "diagnosis")[1] == 1
    older = run(output=tmp_path / "older")
    with pytest.raises(FloatingPointError) as caught:
        run(output=older.output, overwrite=True, rewards=brevity, config=config)
    assert not hasattr(caught.value, "__notes__") and read_log(older.output / "metrics.jsonl") == older.history


@pytest.mark.parametrize(
    "arguments",
    ["--resume {folder}", pytest.param("--output {folder} --overwrite --model {model}", marks=pytest.mark.long)],
)
def test_a_second_process_is_refused(run, tmp_path, policy_dir, arguments):
    seen = []

    def second(completions):
        folder = str(tmp_path / "run")
        assert is_locked(folder)
        words = arguments.format(folder=folder, model=policy_dir).split()
        command = [sys.executable, "-m", "grpo_edu", "train", *words]
        seen.append(subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1]))
        return [1.0] * len(completions)

    result = run(rewards=stopping_at(3, second))
    (process,) = seen
    assert process.returncode == 2 and process.stdout == ""
    (line,) = process.stderr.splitlines()
    assert f"{tmp_path / 'run'} is being written by another process ({os.getpid()}); wait for it" in line
    assert len(result.history) == 5 and not is_locked(tmp_path / "run")


def test_of_two_runs_that_start_together_the_later_one_leaves_the_other_alone(run, tmp_path):
    def slower(completions):
        run(output=tmp_path / "run")  # the other one starts later and comes first
        return [0.0] * len(completions)

    with pytest.raises(FileExistsError, match="already holds a run"):
        run(rewards=stopping_at(1, slower))
    assert len(read_log(tmp_path / "run" / "metrics.jsonl")) == 5


def test_a_lock_is_of_one_process_and_ends_with_it(tmp_path):
    folder = tmp_path / "new"
    with run_lock(folder):
        with pytest.raises(BlockingIOError, match=str(os.getpid())), run_lock(folder):
            pass
        with pytest.raises(BlockingIOError):
            RunFolder(folder).check(overwrite=True)
    assert not is_locked(folder)
    RunFolder(folder).check()
    code = "import sys; from grpo_edu.runs.folder import run_lock; lock = run_lock(sys.argv[1]); lock.__enter__(); "
    code += "print('held', flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code, str(folder)], cwd=Path(__file__).parents[1], **pipes) as process:
        assert process.stdout.readline() == b"held\n" and is_locked(folder)
        with pytest.raises(BlockingIOError, match=str(process.pid)), run_lock(folder):
            pass
        process.kill()
    assert not is_locked(folder)
    with run_lock(folder):
        assert is_locked(folder)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--resume absent", "--resume.*absent does not exist"),
        ("--resume plain", "--resume.*plain keeps no checkpoints.*--checkpoint-every"),
        ("--resume plain --steps 3", "--steps.*--resume.*leave it out"),
        ("--resume plain --model tiny", "--model.*--resume.*leave it out"),
        ("--checkpoint-every -1", "--checkpoint-every.*-1"),
        ("--checkpoint-every 2 --backend trl", "--checkpoint-every.*2.*--backend 'trl'"),
    ],
)
def test_what_cannot_be_resumed(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    RunFolder("plain").claim({"grpo_edu": "0.1.0", "config": CONFIG.to_dict()})
    assert main(["train", *arguments.split()]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_state_that_is_cut_short_is_said_in_one_line(run, tmp_path, capsys):
    run(rewards=stopping_at(4, interrupt))
    file = tmp_path / "run" / "state.pt"
    file.write_bytes(file.read_bytes()[:-100])
    assert main(["train", "--resume", str(tmp_path / "run")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "state.pt is damaged or cut short; delete " in line
    file.unlink()  # as it advises: then from the start
    assert len(resume_training(tmp_path / "run", progress=False).history) == 5


def test_a_disk_without_room_for_checkpoints_is_said_before_anything(run, tmp_path, monkeypatch):
    disk = os.statvfs(tmp_path)
    usage = type("Usage", (), {"free": 400_000, "total": disk.f_blocks, "used": 0})
    monkeypatch.setattr("shutil.disk_usage", lambda place: usage)
    with pytest.raises(OSError, match="nearly full: 0.4 MB are free and the run needs") as caught:
        run()
    assert caught.value.errno == errno.ENOSPC
    assert not (tmp_path / "run").exists()


def test_a_run_is_resumed_or_replaced_on_the_disk_that_it_was_started_on(run, tmp_path, monkeypatch):
    """The room that its checkpoints take now is free for those that replace them."""
    run(rewards=stopping_at(4, interrupt))
    size = (tmp_path / "run" / "state.pt").stat().st_size
    needed = runs.RunFolder.check_disk_space
    asked = []
    monkeypatch.setattr(
        runs.RunFolder, "check_disk_space", lambda self, n, **more: asked.append(n) or needed(self, n, **more)
    )
    usage = type("Usage", (), {"free": 10**12})
    monkeypatch.setattr("shutil.disk_usage", lambda place: usage)
    resume_training(shutil.copytree(tmp_path / "run", tmp_path / "copy"), progress=False)
    usage.free = asked[0] + 2**20 - size  # all that is needed, less what the state holds
    resume_training(shutil.copytree(tmp_path / "run", tmp_path / "again"), progress=False)
    run(overwrite=True)
    usage.free -= 2 * size
    with pytest.raises(OSError, match="nearly full"):
        run(overwrite=True)


def test_the_room_of_the_model_is_reserved_and_a_full_disk_at_the_end_costs_nothing(run, small_disk):
    calls = []

    def fill_at_the_end(completions, completion_ids, **columns):
        calls.append(1)
        if len(calls) == 6:  # the evaluation before, and five steps
            fill(small_disk)
        return [1 / len(ids) for ids in completion_ids]

    fill_at_the_end.__name__ = "brevity"
    with suppress(OSError):  # the last line of the log may fit into the block that it begins in
        run(output=small_disk / "run", rewards=fill_at_the_end, checkpoint_every=0)
    whole = run(output=small_disk.parent / "whole", rewards=brevity, checkpoint_every=0)
    trained = [load_policy(place / "model")[0].state_dict() for place in (small_disk / "run", whole.output)]
    assert same_weights(*trained)
    assert len(read_log(small_disk / "run" / "metrics.jsonl")) == 5


@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.long)])
def test_a_folder_that_cannot_be_written_at_the_end_costs_no_model(run, tmp_path, monkeypatch, rank):
    save = runs.save_policy

    def unwritable(policy, tokenizer, folder, **options):
        if folder == tmp_path / "run" / "model":
            raise OSError(errno.EIO, "Input/output error", str(folder))
        return save(policy, tokenizer, folder, **options)

    monkeypatch.setattr(runs, "save_policy", unwritable)
    with pytest.raises(OSError, match="Input/output") as caught:
        run(lora_rank=rank)
    (place,) = re.findall(r"the trained model was saved in (\S+) instead", " ".join(caught.value.__notes__))
    assert load_policy(place)
    shutil.rmtree(place)


def test_a_state_that_finds_no_room_leaves_the_older_one(run, tmp_path, monkeypatch):
    save, calls = runs.save_state, []

    def full_the_second_time(*arguments, **options):
        calls.append(1)
        return (full if len(calls) == 2 else save)(*arguments, **options)

    monkeypatch.setattr(runs, "save_state", full_the_second_time)
    with pytest.raises(OSError, match="No space left") as caught:
        run()
    folder = tmp_path / "run"
    assert caught.value.__notes__ == [
        f"{folder} keeps 4 steps: metrics.jsonl, model, summary.md, state.pt; continue with --resume {folder}"
    ]
    assert len(resume_training(folder, progress=False).history) == 5


def test_a_disk_that_fills_up_under_a_run_is_made_room_on_and_it_goes_on(run, tmp_path, small_disk):
    def half(completions):
        return [0.5] * len(completions)

    def fill_and_score(completions):
        fill(small_disk)
        return half(completions)

    whole = run(output=tmp_path / "whole", rewards=stopping_at(4, half))
    with pytest.raises(OSError, match="No space left") as caught:
        run(output=small_disk / "run", rewards=stopping_at(4, fill_and_score))
    assert f"state.pt; continue with --resume {small_disk / 'run'}" in caught.value.__notes__[0]
    assert len(load_state(small_disk / "run" / "state.pt")["history"]) == 2
    (small_disk / "filler").unlink()
    rewards = stopping_at(1, half)  # neither the evaluation nor the two steps before it again
    resume_training(small_disk / "run", rewards=rewards, progress=False)
    assert outcome(small_disk / "run") == outcome(whole.output)
