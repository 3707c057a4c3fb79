"""`grpo-edu cluster`: the files of a job, read by those who will read them, and a job run by a real Slurm."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from slurm_cluster import run_job, slurm_cluster

from grpo_edu.cli.main import main
from grpo_edu.runs.log import read_log
from grpo_edu.runs.profiles import load_profile
from grpo_edu.scale.cluster import ClusterJob, deepspeed_config, sbatch_script, write_job
from grpo_edu.scale.trl_backend import trl_settings

REPOSITORY = Path(__file__).resolve().parents[1]
PROFILE = load_profile("cluster-lora")


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
    """Takes a minute. In every run test_trl_job.py trains in two processes, and below bash reads the script."""
    with slurm_cluster(nodes=2) as environment:
        options = ["--nodes", "2", "--gpus-per-node", "0", "--cpus-per-task", "1", "--time", "20"]
        train = [word for name, value in TINY.items() for word in (f"--{name}", str(value))]
        assert main(["cluster", *options, "--output", str(tmp_path), "--", *train]) == 0
        state, log = run_job(tmp_path / "job.sbatch", {**environment, "PYTHONPATH": str(REPOSITORY)})
    assert state == "COMPLETED", log
    assert "on node[1-2]" in log and "accelerate_cpu.yaml" in log
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["steps"], result["failure"], result["accuracy_after"]["n"]) == (2, "", 10)
    assert [step["step"] for step in read_log(tmp_path / "run" / "metrics.jsonl")] == [1, 2]
    assert (tmp_path / "run" / "adapters" / "adapter_model.safetensors").is_file()


def test_processes_share_the_epochs_of_the_profile():
    def batch(**options):
        config = ClusterJob(**{"profile": PROFILE, **options}).adapted.config()
        return config.prompts_per_step, config.max_steps

    # 22,419 prompts are three epochs of 7,473; eight processes take eight per step
    assert batch(gpus_per_node=0) == (1, 22419) and batch(nodes=4, gpus_per_node=2) == (8, 2803)
    chosen = {"profile": PROFILE.override({"prompts_per_step": 6, "max_steps": 9}), "nodes": 2}
    assert batch(**chosen, fixed=["prompts_per_step"]) == (6, 9) and batch(**chosen, fixed=["max_steps"]) == (12, 9)


def test_the_published_recipe_reaches_trl(tmp_path):
    """LoRA of rank 16 and alpha 32 on q, k, v and o, bf16, ZeRO-2 offloaded, batch 1 x accumulation 8, three epochs."""
    write_job(ClusterJob(PROFILE, micro_batch_size=1), tmp_path)
    assert "--micro-batch-size 1)" in (tmp_path / "job.sbatch").read_text()
    request = load_profile(tmp_path / "job.json").request()
    assert (request.lora_rank, request.lora_alpha, request.dtype, request.data) == (16, 32, "bfloat16", ("gsm8k",))
    assert request.lora_targets == ("q_proj", "k_proj", "v_proj", "o_proj")
    settings = trl_settings(request.config, micro_batch_size=1)
    assert (settings["per_device_train_batch_size"], settings["gradient_accumulation_steps"]) == (1, 8)
    assert (settings["learning_rate"], settings["max_steps"]) == (5e-5, 3 * 7473)
    zero = json.loads((tmp_path / "deepspeed.json").read_text())
    assert (zero["train_micro_batch_size_per_gpu"], zero["gradient_accumulation_steps"]) == (1, 8)


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
        ({"rollout": "llama"}, "rollout: 'llama' .* vllm"),
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
    script = write_job(ClusterJob(PROFILE, gpus_per_node=gpus, rollout="transformers"), folder)[0]
    assert subprocess.run(["bash", "-n", script], capture_output=True).returncode == 0
    shown = script.read_text().replace("srun", "exit 0; srun", 1)
    shown = shown.replace('echo "job', 'printf "%s\\n" "${TRAIN[@]}"; echo "job', 1)
    environment = {**os.environ, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}
    done = subprocess.run(["bash", "-c", shown], capture_output=True, text=True, env=environment)
    *train, last = done.stdout.splitlines()
    places = ["--profile", f"{folder}/job.json", "--output", f"{folder}/run"]
    assert train == ["-m", "grpo_edu.scale.trl_job", *places, "--rollout", "transformers"], done.stderr
    assert last.startswith("job 7 on n1") and ":20007, accelerate_cpu.yaml" in last
    assert load_profile(folder / "job.json").request().lora_rank == 16
    # Slurm splits the lines of #SBATCH at blanks, with quotes as a shell has them, and replaces %x and %j in the log's
    words = [word for line in shown.splitlines() if line.startswith("#SBATCH ") for word in shlex.split(line)[1:]]
    assert all(word.startswith("--") for word in words) and f"--output={folder}/%x-%j.log" in words


def test_the_command_that_submits_the_job_can_be_copied(tmp_path, capsys):
    folder = tmp_path / "my jobs, 100%"
    assert main(["cluster", "--output", str(folder)]) == 0
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
        "job.json",
        "accelerate_gpu.yaml",
        "accelerate_cpu.yaml",
        "deepspeed.json",
    }
    with pytest.raises(FileExistsError, match="already exists"):
        write_job(job, tmp_path)
    write_job(job, tmp_path, overwrite=True)


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
