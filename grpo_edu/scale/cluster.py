"""Write a training run as a Slurm job: `sbatch` starts accelerate on every node, and accelerate starts TRL's trainer.

job.sbatch            what Slurm runs: it finds the main node and starts one launcher per node
job.json              the settings of the training run, as a profile
task/                 your own problems and rewards, where the run has some
accelerate_gpu.yaml   for nodes with GPUs: one process per GPU, through DeepSpeed unless it is left out
accelerate_cpu.yaml   for nodes without: one process per node, connected over gloo
deepspeed.json        ZeRO stage 2 (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054): each process holds a
                      part of the gradients and of the optimizer states, and the states are kept in CPU memory

The templates of these files are in data/cluster. The prompts per step of a profile are for one process: P processes
sample P times as many prompts per step, and take a P-th of the steps.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from grpo_edu.config import ROLLOUTS
from grpo_edu.extras.settings import documented, setting
from grpo_edu.problems.files import data_dir
from grpo_edu.rewards import RewardFunction
from grpo_edu.runs.loading import is_user_dataset
from grpo_edu.runs.options import RunConfig, with_absolute_paths
from grpo_edu.runs.profiles import Profile
from grpo_edu.runs.record import resolve_model_source

if TYPE_CHECKING:
    from jinja2 import Template

_TIME = re.compile(r"(\d+-)?\d+(:\d\d){0,2}")  # the forms that sbatch takes: 30, 8:00, 08:00:00, 2-00:00:00
_MEMORY = re.compile(r"\d+[KMGT]?", re.IGNORECASE)
_WORD = re.compile(r"[\w.,:/@+-]+")


@documented
@dataclass(frozen=True)
class ClusterJob:
    """One Slurm job that trains with TRL.

    profile: the settings of the training run.
    fixed: names of settings that are not adapted to the number of processes, because the user has chosen them.

    Raises ValueError that names the field, its value and the remedy.
    """

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {"rollout": ROLLOUTS}

    profile: Profile
    fixed: Collection[str] = ()
    nodes: int = setting(1, "number of nodes")
    gpus_per_node: int = setting(1, "GPUs of each node; 0: the nodes train on their CPU")
    cpus_per_task: int = setting(8, "CPU cores per node")
    time: str = setting("08:00:00", "time limit of the job, in the form that sbatch takes")
    memory: str | None = setting(None, "memory per node, such as 32G (default: the cluster's)")
    partition: str | None = setting(None, "partition of the cluster (default: the cluster's)")
    account: str | None = setting(None, "account to charge (default: your own)")
    environment: str | None = setting(None, "virtual environment on the nodes (default: the one that is active here)")
    deepspeed: bool = setting(True, "share gradients and optimizer states between the GPUs through DeepSpeed")
    rollout: str | None = setting(None, "what samples; by default vllm on GPUs where it is installed, else grpo_edu")
    micro_batch_size: int | None = setting(
        None, "completions that a process computes at a time (default: all that it has per update)"
    )

    def __post_init__(self) -> None:
        for name, least in (("nodes", 1), ("gpus_per_node", 0), ("cpus_per_task", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: {getattr(self, name)} is not valid; it must be at least {least}")
        if not _TIME.fullmatch(self.time):
            raise ValueError(f"time: {self.time!r} is not a valid time limit; use HH:MM:SS, for example 08:00:00")
        if self.memory is not None and not (_MEMORY.fullmatch(self.memory) and int(self.memory.rstrip("kmgtKMGT"))):
            raise ValueError(f"memory: {self.memory!r} is not a valid amount per node; use for example 32G")
        for name in ("partition", "account"):
            value = getattr(self, name)
            if value is not None and not _WORD.fullmatch(value):
                raise ValueError(f"{name}: {value!r} must be one word of letters, digits and . , : / @ + -")
        if self.rollout is not None and self.rollout not in ROLLOUTS:
            raise ValueError(f"rollout: {self.rollout!r} is unknown; choose one of {', '.join(ROLLOUTS)}")
        if self.profile.request().dtype == "auto":
            raise ValueError("dtype: 'auto' would measure this computer, not the nodes; choose float32 or bfloat16")
        self._passes()  # raises ValueError for what TRL cannot do

    @property
    def processes(self) -> int:
        """One process per GPU, or one per node without GPUs."""
        return self.nodes * max(1, self.gpus_per_node)

    @property
    def uses_deepspeed(self) -> bool:
        """Whether DeepSpeed takes part on nodes with GPUs."""
        return self.deepspeed and self.gpus_per_node > 0

    @property
    def adapted(self) -> Profile:
        """The profile for all processes together.

        >>> from grpo_edu.runs.profiles import load_profile
        >>> config = ClusterJob(load_profile("cluster-lora"), nodes=4).adapted.config()
        >>> config.prompts_per_step, config.max_steps
        (4, 5605)
        """
        config, settings = self.profile.config(), dict[str, Any]()
        if "prompts_per_step" not in self.fixed:
            batch = {
                "prompts_per_step": config.prompts_per_step * self.processes,
                "max_steps": math.ceil(config.max_steps / self.processes),
            }
            settings |= {name: value for name, value in batch.items() if name not in self.fixed}
        return self.profile.override(settings)

    @property
    def job_options(self) -> list[str]:
        """Options of `grpo_edu.scale.trl_job` besides the profile and the folder."""
        given = {"--rollout": self.rollout, "--micro-batch-size": self.micro_batch_size}
        return [str(word) for name, value in given.items() if value is not None for word in (name, value)]

    def _passes(self) -> tuple[int, int]:
        """Completions per pass, and passes per update, of one process."""
        from grpo_edu.scale.trl_backend import trl_settings  # imports torch, which the command line does without

        settings = trl_settings(self.adapted.config(), processes=self.processes, micro_batch_size=self.micro_batch_size)
        return settings["per_device_train_batch_size"], settings["gradient_accumulation_steps"]


def write_job(job: ClusterJob, folder: str | Path, *, overwrite: bool = False) -> list[Path]:
    """Write the files of a job into a folder, which is made if needed; returns their paths, the batch script first.

    Raises FileExistsError if one of them exists and `overwrite` is False; OSError if they cannot be written.
    """
    folder = Path(folder).expanduser().absolute()
    carried, request = carry_task(job.adapted.request(), folder / "task")
    texts = {"job.sbatch": sbatch_script(job, folder), "job.json": job_profile(job, request)}
    if job.gpus_per_node:
        texts["accelerate_gpu.yaml"] = accelerate_config(job, folder, gpu=True)
    texts["accelerate_cpu.yaml"] = accelerate_config(job, folder, gpu=False)
    if job.uses_deepspeed:
        texts["deepspeed.json"] = deepspeed_config(job)
    existing = [name for name in (*texts, *(f"task/{path.name}" for path in carried)) if (folder / name).exists()]
    if existing and not overwrite:
        raise FileExistsError(
            f"output: {folder / existing[0]} already exists; choose another folder, or use --overwrite"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    for target, source in carried.items():
        target.parent.mkdir(exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        else:
            shutil.copy2(source, target)
    return [*(folder / name for name in texts), *carried]


def sbatch_script(job: ClusterJob, folder: Path) -> str:
    """Return the script for `sbatch`."""
    requests: Mapping[str, object] = {
        "job-name": f"grpo-{re.sub(r'[^A-Za-z0-9-]+', '-', Path(job.profile.name).stem)}",
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": job.cpus_per_task,
        "gpus-per-node": job.gpus_per_node or None,
        "mem": job.memory,
        "time": job.time,
        "partition": job.partition,
        "account": job.account,
        "output": _sbatch_word(f"{str(folder).replace('%', '%%')}/%x-%j.log"),
    }
    return _template("job.sbatch").render(
        requests=requests,
        folder=str(folder),
        environment=job.environment,
        gpus=job.gpus_per_node,
        options=job.job_options,
    )


def _sbatch_word(text: str) -> str:
    """Quote a value for a line of `#SBATCH`, which Slurm splits at blanks as a shell does, without its variables."""
    return text if re.fullmatch(r"[\w.,:/@+%-]+", text) else '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'


def accelerate_config(job: ClusterJob, folder: Path, *, gpu: bool) -> str:
    """Return the YAML that `accelerate launch --config_file` reads, for nodes with GPUs or without."""
    return _template("accelerate.yaml").render(
        folder=str(folder),
        gpus=gpu,
        deepspeed=gpu and job.uses_deepspeed,
        nodes=job.nodes,
        processes=job.processes if gpu else job.nodes,
    )


def deepspeed_config(job: ClusterJob) -> str:
    """Return DeepSpeed's JSON: ZeRO stage 2, with the optimizer states in CPU memory.

    The learning rate and its schedule stay with TRL. PyTorch's AdamW does the step on the CPU, because DeepSpeed's own
    would have to be compiled on the node.

    >>> from grpo_edu.runs.profiles import load_profile
    >>> found = json.loads(deepspeed_config(ClusterJob(load_profile("cluster-lora"), micro_batch_size=1)))
    >>> found["zero_optimization"]["stage"], found["bf16"], found["gradient_accumulation_steps"]
    (2, {'enabled': True}, 8)
    """
    micro_batch_size, accumulation_steps = job._passes()
    return _template("deepspeed.json").render(
        micro_batch_size=micro_batch_size,
        accumulation_steps=accumulation_steps,
        max_grad_norm=job.profile.config().max_grad_norm,
        bf16=job.profile.request().dtype == "bfloat16",
    )


def carry_task(request: RunConfig, folder: Path) -> tuple[dict[Path, Path], RunConfig]:
    """Return what is to be copied into a folder, target → source, and the request that reads it from there.

    Raises ValueError where two files have one name, and what loading problems and rewards raises.
    """
    request = with_absolute_paths(request)
    carried: dict[Path, Path] = {}

    def move(path: str) -> str:
        source, target = Path(path), folder / Path(path).name
        if carried.setdefault(target, source) != source:
            raise ValueError(f"data: {source} and {carried[target]} have one name; rename one of them")
        return str(target)

    def reward(entry: str | RewardFunction) -> str | RewardFunction:
        place, sign, name = entry.rpartition(":") if isinstance(entry, str) else ("", "", "")
        return f"{move(place)}:{name}" if sign and place.endswith(".py") else entry

    own = any(map(is_user_dataset, request.data))
    if own or any(reward(entry) != entry for entry in request.reward_funcs):
        request.load_data()  # a file or reward that is not valid is refused here, and not on the nodes
    moved = replace(
        request,
        data=tuple(move(name) if is_user_dataset(name) else name for name in request.data),
        heldout_file=None if request.heldout_file is None else move(request.heldout_file),
        reward_funcs=tuple(map(reward, request.reward_funcs)),
    )
    return carried, moved


def job_profile(job: ClusterJob, request: RunConfig) -> str:
    """Return the settings of the training run as the JSON of a profile, with absolute paths."""
    settings = request.to_settings()
    settings["model"] = resolve_model_source(settings["model"])
    return json.dumps({"about": job.profile.about, **settings}, indent=2, ensure_ascii=False) + "\n"


def _template(name: str) -> Template:
    """A template of data/cluster."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(data_dir() / "cluster"),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["quote"] = shlex.quote
    return environment.get_template(f"{name}.j2")
