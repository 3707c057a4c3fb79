"""TRL's trainer in several processes: two real ones over gloo, killed and resumed, and through DeepSpeed."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from grpo_edu.cli.main import main
from grpo_edu.models import load_policy
from grpo_edu.runs.log import read_log
from grpo_edu.runs.profiles import load_profile
from grpo_edu.runs.record import read_resumable
from grpo_edu.runs.run import run_evaluation
from grpo_edu.scale import trl_job
from grpo_edu.scale.cluster import ClusterJob, write_job
from grpo_edu.scale.trl_job import default_rollout, last_checkpoint, train_on_processes

REPOSITORY = Path(__file__).resolve().parents[1]
SETTINGS = {
    "model": "tiny",
    "data": "basic",
    "rewards": "accuracy,format",
    "n": 5,
    "num_generations": 4,
    "prompts_per_step": 2,
    "max_completion_length": 32,
    "max_steps": 4,
    "learning_rate": 1e-3,
    "checkpoint_every": 2,
}
TIMES = {"step_time"}


def profile(**settings):
    return load_profile("quick").override({**SETTINGS, **settings})


def write_profile(folder: Path, **settings) -> Path:
    file = folder / "job.json"
    file.write_text(json.dumps(profile(**settings).request().to_settings()))
    return file


def environment(keep: Path, **variables) -> dict[str, str]:
    keep.mkdir(exist_ok=True)
    paths = os.pathsep.join((str(REPOSITORY), str(REPOSITORY / "tests"), variables.pop("PYTHONPATH", "")))
    return {**os.environ, "OMP_NUM_THREADS": "1", "KEEP": str(keep), "PYTHONPATH": paths, **variables}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def launch(folder: Path, output: Path, **variables) -> subprocess.CompletedProcess:
    """Start the job's two processes with `accelerate launch`, as the batch script does on one node."""
    launcher = ["-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", folder / "accelerate.yaml"]
    place = ["--main_process_ip", "127.0.0.1", "--main_process_port", free_port()]
    train = ["-m", "trl_process", "--profile", write_profile(folder), "--output", output]
    command = [sys.executable, *launcher, *place, *train]
    return subprocess.run(
        [str(word) for word in command],
        env=environment(output.with_suffix(".weights"), **variables),
        capture_output=True,
        text=True,
        timeout=500,
    )


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory) -> Path:
    """A folder with a run of two processes, `whole`."""
    folder = tmp_path_factory.mktemp("two")
    write_job(ClusterJob(profile(), fixed=SETTINGS, nodes=2, gpus_per_node=0), folder)
    config = (folder / "accelerate_cpu.yaml").read_text()
    (folder / "accelerate.yaml").write_text(config.replace("num_machines: 2", "num_machines: 1"))
    done = launch(folder, folder / "whole")
    assert done.returncode == 0, done.stderr
    return folder


def rank_weights(folder: Path, run: str) -> list[dict[str, torch.Tensor]]:
    return [load_file(folder / f"{run}.weights" / f"rank{rank}.safetensors") for rank in range(2)]


def test_two_processes_train_one_policy_and_keep_one_run(two_processes):
    first, second = rank_weights(two_processes, "whole")
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    start, run = load_policy("tiny")[0].state_dict(), two_processes / "whole"
    assert max((first[name] - start[name]).abs().max() for name in first) > 1e-3
    saved = load_policy(run / "model")[0].state_dict()
    assert_close({name: saved[name] for name in first}, first, atol=0, rtol=0)
    names = {path.name for path in run.iterdir() if path.name != ".lock"}
    assert names == {
        "accuracy.png",
        "completions.jsonl.gz",
        "first_look.txt",
        "config.json",
        "curves.png",
        "metrics.jsonl",
        "model",
        "result.json",
        "summary.md",
    }
    result = json.loads((run / "result.json").read_text())
    assert (result["steps"], result["accuracy_before"]["n"], result["accuracy_after"]["n"]) == (4, 5, 5)
    assert run_evaluation(run, data="basic", n=5, progress=False).n == 5


def test_the_rewards_of_all_processes_are_logged(two_processes):
    history = read_log(two_processes / "whole" / "metrics.jsonl")
    assert [metrics["step"] for metrics in history] == [1, 2, 3, 4]
    for metrics in history:
        eighths = 8 * metrics["rewards/accuracy_reward/mean"]  # 2 processes x 4 completions
        assert eighths == pytest.approx(round(eighths)) and 0 <= metrics["rewards/format_reward/mean"] <= 1
    assert len({metrics["completions/mean_length"] for metrics in history}) > 1


@pytest.mark.long
def test_a_killed_job_continues_from_trls_checkpoint_as_if_nothing_had_happened(two_processes):
    folder = two_processes
    killed = launch(folder, folder / "resumed", KILL_AT="3")
    assert killed.returncode != 0 and not (folder / "resumed" / "result.json").exists()
    assert last_checkpoint(folder / "resumed" / "checkpoints").name == "checkpoint-2", killed.stderr
    done = launch(folder, folder / "resumed")
    assert done.returncode == 0, done.stderr
    for whole, resumed in zip(*(rank_weights(two_processes, run) for run in ("whole", "resumed")), strict=True):
        assert_close(resumed, whole, atol=0, rtol=0)
    whole, resumed = (read_log(two_processes / run / "metrics.jsonl") for run in ("whole", "resumed"))
    for one, other in zip(whole, resumed, strict=True):
        assert {key: one[key] for key in one.keys() - TIMES} == {key: other[key] for key in other.keys() - TIMES}


@pytest.mark.long
def test_deepspeed_trains_the_same_policy_and_resumes(two_processes, tmp_path):
    """ZeRO stage 2 with its states in CPU memory, as `grpo-edu cluster` writes it, against the two gloo processes."""
    place = os.environ.get("GRPO_EDU_DEEPSPEED")
    if not place:
        pytest.skip("DeepSpeed is not installed: pip install --target DIR deepspeed; GRPO_EDU_DEEPSPEED=DIR (.ci/run)")
    write_job(ClusterJob(profile(), fixed=SETTINGS, gpus_per_node=2), tmp_path)
    variables = {
        "DS_ACCELERATOR": "cpu",
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(tmp_path / "deepspeed.json"),
        "PYTHONPATH": place,
        "MASTER_ADDR": "127.0.0.1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    words = ["-m", "trl_process", "--profile", write_profile(tmp_path), "--output", tmp_path / "zero"]
    for kill_at, exits in (("3", {-signal.SIGKILL}), ("0", {0})):
        shared = environment(tmp_path / "zero.weights", **variables, KILL_AT=kill_at, MASTER_PORT=str(free_port()))
        children = [
            subprocess.Popen(
                [sys.executable, *map(str, words)],
                env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            texts = [child.communicate(timeout=400)[0] for child in reversed(children)]
        finally:
            for child in children:
                child.kill()
        assert {children[1].returncode} == exits, texts
    start = load_policy("tiny")[0].state_dict()
    for zero, gloo in zip(rank_weights(tmp_path, "zero"), rank_weights(two_processes, "whole"), strict=True):
        moved = sum((gloo[name] - start[name]).norm() ** 2 for name in gloo) ** 0.5
        apart = sum((gloo[name] - zero[name]).norm() ** 2 for name in gloo) ** 0.5
        assert apart < 1e-3 * moved


def test_a_folder_keeps_the_run_that_it_holds(tmp_path):
    request = profile(max_steps=1, checkpoint_every=0, n=2).request()
    result = train_on_processes(request, tmp_path / "run")
    assert len(result.history) == 1 and result.before.n == result.after.n == 2
    with pytest.raises(FileExistsError, match="finished run"):
        train_on_processes(request, tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    with pytest.raises(FileExistsError, match="other settings"):
        train_on_processes(profile(max_steps=2, checkpoint_every=0, n=2).request(), tmp_path / "run")
    with pytest.raises(ValueError, match="submit that job again"):
        read_resumable(tmp_path / "run")


def test_bad_settings_end_the_command_with_one_line(tmp_path, capsys):
    file = write_profile(tmp_path, advantage_estimator="rloo")
    assert trl_job.main(["--profile", str(file), "--output", str(tmp_path / "run")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "process 0 of 1" in line and "'rloo'" in line and not (tmp_path / "run").exists()


def test_the_packages_own_trainer_refuses_to_be_one_of_several_processes(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train"]) == 2
    assert "grpo_edu.scale.trl_job" in capsys.readouterr().err


def test_a_checkpoint_that_was_cut_short_is_passed_over(tmp_path):
    assert last_checkpoint(tmp_path / "none") is None
    for step, text in ((2, "{}"), (10, "{}"), (12, '{"cut'), (14, None)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if text is not None:
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(text)
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-10"


@pytest.mark.parametrize(("gpu", "installed", "chosen"), [(1, 1, "vllm"), (1, 0, "grpo_edu"), (0, 1, "grpo_edu")])
def test_vllm_samples_on_gpus_where_it_is_installed(gpu, installed, chosen, monkeypatch, tmp_path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: bool(gpu))
    monkeypatch.setattr(trl_job, "find_spec", lambda name: name if installed else None)
    assert default_rollout() == chosen
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    job = trl_job._Job(profile().request(), trl_job.RunFolder(tmp_path), True, 0, 1)
    arguments = job.trl_arguments(chosen, None)
    assert arguments.use_vllm == (chosen == "vllm") and arguments.vllm_mode == "colocate"
