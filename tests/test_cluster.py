"""`grpo-edu cluster`: the files of a job, read by those who will read them, and jobs that run."""

import importlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from slurm_cluster import run_job, slurm_cluster

from grpo_edu.cli.main import main
from grpo_edu.models import load_policy
from grpo_edu.runs.profiles import load_profile
from grpo_edu.scale.cluster import ClusterJob, deepspeed_config, sbatch_script, write_job

REPOSITORY = Path(__file__).resolve().parents[1]
# GSM8K's files are not part of this repository, so the jobs of these tests train on problems that are.
PROFILE = load_profile("cluster-lora").override({"model": "tiny", "data": "basic", "n": 300})

TINY = {
    "model": "tiny",
    "data": "basic",
    "dtype": "float32",
    "steps": 2,
    "prompts-per-step": 4,
    "num-generations": 4,
    "max-completion-length": 32,
    "n": 10,
}


@pytest.mark.long
@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can try this: run the tests as root")
def test_a_slurm_of_two_nodes_runs_the_job(tmp_path, slurm):
    """Takes a minute. A job without Slurm is below, and in every run bash reads the script."""
    with slurm_cluster(nodes=2) as environment:
        options = ["--nodes", "2", "--gpus-per-node", "0", "--cpus-per-task", "1", "--time", "20"]
        train = [word for name, value in TINY.items() for word in (f"--{name}", str(value))]
        assert main(["cluster", *options, "--output", str(tmp_path), "--", *train]) == 0
        state, log = run_job(tmp_path / "job.sbatch", {**environment, "PYTHONPATH": str(REPOSITORY)})
    assert state == "COMPLETED", log
    assert "on node[1-2]" in log and "accelerate_cpu.yaml" in log
    check_finished(tmp_path)


def check_finished(folder, steps=2):
    """The measured accuracy before and after, TRL's log, and the trained adapters."""
    before, after = (json.loads((folder / f"{name}.json").read_text()) for name in ("before", "after"))
    assert before["n"] == after["n"] == 10 and before["model"] == "tiny"
    states = sorted((folder / "run").glob("checkpoint-*/trainer_state.json"))
    assert json.loads(states[-1].read_text())["global_step"] == steps
    assert main(["diagnose", str(folder / "run"), "--json"]) == 0
    start, trained = (load_policy(name)[0].state_dict() for name in ("tiny", folder / "run"))
    changed = [name for name in start if not torch.equal(start[name], trained[name])]
    assert changed and all("_proj" in name for name in changed), "LoRA's layers alone have changed"


def run_without_slurm(script, *options):
    """Run a batch script on this computer, as the one node of a job."""
    shell = 'srun() { shift; SLURM_NODEID=0 "$@"; }; . "$0"'
    environment = {**os.environ, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        ["bash", "-c", shell, script, *options], env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.long
def test_two_processes_train_and_a_job_that_is_submitted_again_continues(tmp_path):
    write_job(
        ClusterJob(tiny_profile(max_steps=2), fixed=["prompts_per_step", "max_steps"], gpus_per_node=0, nodes=2),
        tmp_path,
    )
    config = tmp_path / "accelerate_cpu.yaml"
    config.write_text(config.read_text().replace("num_machines: 2", "num_machines: 1"))  # two processes on one node
    run_without_slurm(tmp_path / "job.sbatch")
    check_finished(tmp_path)
    run_without_slurm(tmp_path / "job.sbatch", "--max_steps", "3")
    check_finished(tmp_path, steps=3)


def tiny_profile(**settings):
    return PROFILE.override(
        {name.replace("-", "_"): value for name, value in TINY.items() if name != "steps"} | settings
    )


def test_processes_share_the_epochs_of_the_profile():
    def batch(**options):
        config = ClusterJob(**{"profile": PROFILE, **options}).adapted.config()
        return config.prompts_per_step, config.max_steps

    # 22,419 prompts are three epochs of 7,473; eight processes take eight per step
    assert batch(gpus_per_node=0) == (1, 22419) and batch(nodes=4, gpus_per_node=2) == (8, 2803)
    chosen = {"profile": PROFILE.override({"prompts_per_step": 6, "max_steps": 9}), "nodes": 2}
    assert batch(**chosen, fixed=["prompts_per_step"]) == (6, 9) and batch(**chosen, fixed=["max_steps"]) == (12, 9)


def read_as_trl(folder):
    """What `trl grpo --config job.yaml` takes from a job's folder; an option that it lacks is an error."""
    from trl import DatasetMixtureConfig, GRPOConfig, ModelConfig, TrlParser
    from trl.scripts.grpo import GRPOScriptArguments

    parser = TrlParser((GRPOScriptArguments, GRPOConfig, ModelConfig, DatasetMixtureConfig))
    script, training, model, _ = parser.parse_args_and_config(
        ["--config", str(folder / "job.yaml"), "--use_cpu", "true"], fail_with_unknown_args=True
    )
    return script, training, model


def test_the_published_recipe_reaches_trl(tmp_path):
    """LoRA of rank 16 and alpha 32 on q, k, v and o, bf16, ZeRO-2 offloaded, batch 1 x accumulation 8, three epochs."""
    write_job(ClusterJob(PROFILE, micro_batch_size=1), tmp_path)
    script, training, model = read_as_trl(tmp_path)
    assert (model.use_peft, model.lora_r, model.lora_alpha, model.lora_dropout) == (True, 16, 32, 0)
    assert model.lora_target_modules == ["q_proj", "k_proj", "v_proj", "o_proj"] and model.dtype == "bfloat16"
    assert (training.per_device_train_batch_size, training.gradient_accumulation_steps) == (1, 8)
    assert (training.learning_rate, training.max_steps, training.save_steps) == (5e-5, 3 * 7473, 500)
    assert script.reward_funcs == ["job_rewards.accuracy_reward"]
    zero = json.loads((tmp_path / "deepspeed.json").read_text())
    assert (zero["train_micro_batch_size_per_gpu"], zero["gradient_accumulation_steps"]) == (1, 8)


def test_a_task_of_ones_own_and_its_prompt_go_into_the_folder(tmp_path, monkeypatch):
    (tmp_path / "mine.jsonl").write_text(
        "".join(json.dumps({"question": f"Is {n} even?", "answer": str(n % 2 == 0)}) + "\n" for n in range(40))
    )
    (tmp_path / "mine.py").write_text(
        "def brief(completions, **kwargs):\n    return [float(text == 'yes') for text in completions]\n"
    )
    profile = tiny_profile(
        data=str(tmp_path / "mine.jsonl"),
        rewards=("accuracy", f"{tmp_path / 'mine.py'}:brief"),
        reward_weights=(1, 0.5),
        system_prompt="Answer yes or no.",
        beta=0.1,
        lora_rank=0,
        lora_alpha=None,
        lora_targets="all-linear",
    )
    folder = tmp_path / "job"
    write_job(ClusterJob(profile, gpus_per_node=0), folder)
    script, training, model = read_as_trl(folder)
    assert script.reward_funcs == ["job_rewards.accuracy_reward", "job_rewards.brief"]
    monkeypatch.syspath_prepend(folder)
    asked = [[{"role": "user", "content": "?"}]]
    answered = [[{"role": "assistant", "content": "yes"}]]
    assert importlib.import_module("job_rewards").brief(prompts=asked, completions=answered) == [1.0]
    assert (folder / "task" / "mine.py").is_file() and not model.use_peft
    assert (training.beta, training.reward_weights) == (0.1, [1, 0.5])
    rows = [json.loads(line) for line in (folder / "data" / "train.jsonl").read_text().splitlines()]
    assert len(rows) == 32, "a fifth is held out"
    assert rows[0]["prompt"][0] == {"role": "system", "content": "Answer yes or no."}
    assert {row["answer"] for row in rows} == {"true", "false"}
    assert "Answer yes or no." in (folder / "tokenizer" / "tokenizer_config.json").read_text()
    script_text = (folder / "job.sbatch").read_text()
    assert "before.json" not in script_text and f"--data {folder}/task/mine.jsonl" in script_text
    assert f"--rewards accuracy,{folder}/task/mine.py:brief --reward-weights 1,0.5" in script_text


def test_a_model_of_adapters_is_refused(tmp_path):
    with pytest.raises(ValueError, match="adapters .* save_policy"):
        write_job(ClusterJob(PROFILE.override({"model": "smollm2-instructions"})), tmp_path)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"nodes": 0}, "nodes: 0 .* at least 1"),
        ({"gpus_per_node": -1}, "gpus_per_node: -1"),
        ({"time": "soon"}, "time: 'soon' .* HH:MM:SS"),
        ({"partition": "gpu; rm -rf ~"}, "partition: .* must be one word"),
        ({"account": "a\n#SBATCH --nodes=99"}, "account: .* must be one word"),
        ({"memory": "lots"}, "memory: 'lots' .* 32G"),
        ({"memory": "32GB"}, "memory: '32GB' .* 32G"),
        ({"memory": "0"}, "memory: '0' .* 32G"),
        ({"micro_batch_size": 3}, "micro_batch_size: 3 .* divisor of 8"),
        ({"fixed": ["prompts_per_step"], "nodes": 3}, "prompts_per_step: 1 .* 3 processes"),
        ({"profile": PROFILE.override({"rollout_quantization": "bf16"})}, "rollout_quantization: 'bf16'"),
        ({"profile": PROFILE.override({"dtype": "auto"})}, "dtype: 'auto' .* bfloat16"),
    ],
)
def test_what_no_job_can_be_is_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        ClusterJob(**{"profile": PROFILE, **wrong})


@pytest.mark.parametrize("gpus", [0, 1])
def test_bash_reads_the_script_and_a_strange_folder_stays_one_word(gpus, tmp_path):
    folder = tmp_path / "it's $HOME; a folder"
    script = write_job(ClusterJob(PROFILE, gpus_per_node=gpus), folder)[0]
    assert subprocess.run(["bash", "-n", script], capture_output=True).returncode == 0
    shown = script.read_text().replace("srun", "exit 0; srun", 1)
    shown = shown.replace('echo "job', 'printf "%s\\n" "${TRAIN[@]}"; echo "job', 1)
    shown = shown.replace("[ -s before.json ]", "true", 1)
    checkpoint = folder / "run" / "checkpoint-2"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text("{}")
    (folder / "run" / "checkpoint-4").mkdir()  # cut short
    environment = {**os.environ, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}
    done = subprocess.run(
        ["bash", "-c", shown, "job.sbatch", "--use_vllm", "true"], capture_output=True, text=True, env=environment
    )
    *train, last = done.stdout.splitlines()
    again = ["--resume_from_checkpoint", "run/checkpoint-2"]
    assert train == ["trl", "grpo", "--config", "job.yaml", "--use_vllm", "true", *again], done.stderr
    assert last.startswith("job 7 on n1") and ":20007, accelerate_cpu.yaml" in last
    # Slurm splits the lines of #SBATCH at blanks, with quotes as a shell has them, and replaces %x and %j in the log's
    words = [word for line in shown.splitlines() if line.startswith("#SBATCH ") for word in shlex.split(line)[1:]]
    assert all(word.startswith("--") for word in words) and f"--output={folder}/%x-%j.log" in words


def test_the_command_that_submits_the_job_can_be_copied(tmp_path, capsys):
    folder = tmp_path / "my jobs, 100%"
    assert main(["cluster", "--output", str(folder), "--", "--model", "tiny", "--data", "basic", "--n", "9"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert shlex.split(last.partition("submit it: ")[2]) == ["sbatch", f"{folder}/job.sbatch"]
    assert "100%%/%x-%j.log" in (folder / "job.sbatch").read_text()


def test_accelerate_reads_both_configs(tmp_path):
    from accelerate.commands.config.config_args import load_config_from_file

    write_job(ClusterJob(PROFILE, nodes=3, gpus_per_node=2), tmp_path)
    gpu, cpu = (load_config_from_file(str(tmp_path / f"accelerate_{kind}.yaml")) for kind in ("gpu", "cpu"))
    assert (gpu.distributed_type.value, gpu.num_machines, gpu.num_processes) == ("DEEPSPEED", 3, 6)
    assert gpu.deepspeed_config["deepspeed_config_file"] == str(tmp_path / "deepspeed.json")
    assert (cpu.distributed_type.value, cpu.use_cpu, cpu.num_processes) == ("MULTI_GPU", True, 3)
    write_job(ClusterJob(PROFILE, deepspeed=False), tmp_path, overwrite=True)
    plain = load_config_from_file(str(tmp_path / "accelerate_gpu.yaml"))
    assert plain.distributed_type.value == "MULTI_GPU" and not plain.use_cpu and not plain.deepspeed_config


def test_deepspeed_reads_its_config(tmp_path, deepspeed):
    """By DeepSpeed's own parser, in a process of its own: in this one, other packages would import it as well."""
    (tmp_path / "deepspeed.json").write_text(deepspeed_config(ClusterJob(PROFILE)))
    code = (
        "import sys; from deepspeed.runtime.config import DeepSpeedConfig; found = DeepSpeedConfig(sys.argv[1]); "
        "zero = found.zero_config; print(zero.stage == 2, zero.offload_optimizer.device == 'cpu', "
        "found.bfloat16_config.enabled, found.gradient_clipping == 1)"
    )
    environment = {**os.environ, "PYTHONPATH": str(deepspeed), "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-c", code, str(tmp_path / "deepspeed.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1:] == ["True True True True"], done.stderr


def test_files_are_replaced_only_when_asked(tmp_path):
    job = ClusterJob(PROFILE)
    assert {path.name for path in write_job(job, tmp_path)} == {
        "job.sbatch",
        "job.yaml",
        "job_rewards.py",
        "train.jsonl",
        "accelerate_gpu.yaml",
        "accelerate_cpu.yaml",
        "deepspeed.json",
    }
    with pytest.raises(FileExistsError, match="already exists"):
        write_job(job, tmp_path)
    write_job(job, tmp_path, overwrite=True)


def test_the_packages_own_trainer_refuses_to_be_one_of_several_processes(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train"]) == 2
    assert "trl grpo" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "word"),
    [
        (["--", "--output", "x"], "--output cannot be given after --"),
        (["--profile", "cluster-lorra"], "cluster-lora"),
        (["--nodes", "3", "--", "--prompts-per-step", "2"], "3 processes"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(typed, word, tmp_path, capsys):
    before, after = (typed[: typed.index("--")], typed[typed.index("--") :]) if "--" in typed else (typed, [])
    assert main(["cluster", "--output", str(tmp_path / "job"), *before, *after]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert word in line
    assert not (tmp_path / "job").exists()


def test_the_script_names_what_the_job_asks_for():
    script = sbatch_script(ClusterJob(PROFILE, nodes=2, memory="32G", partition="gpu", account="course"), Path("/x"))
    asked = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]
    assert asked == [
        "job-name=grpo-cluster-lora",
        "nodes=2",
        "ntasks-per-node=1",
        "cpus-per-task=8",
        "gpus-per-node=1",
        "mem=32G",
        "time=08:00:00",
        "partition=gpu",
        "account=course",
        "output=/x/%x-%j.log",
    ]
