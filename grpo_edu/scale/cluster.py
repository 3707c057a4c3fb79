"""Write a training run as a Slurm job: `sbatch` starts `trl grpo` on every node, which is TRL's own command line.

job.sbatch            what Slurm runs: it finds the main node, starts one launcher per node, and evaluates the result
job.yaml              the settings of the run under TRL's own names, for `trl grpo --config`
job_rewards.py        the rewards as TRL calls them: your own get texts, as in `grpo-edu train`
data/train.jsonl      the problems with their prompts, as chat messages
task/                 your own problems and rewards, if the run has any
tokenizer/            the tokenizer with the prompt of the run, where the run changes the model's own
accelerate_gpu.yaml   for nodes with GPUs: one process per GPU, through DeepSpeed unless it is left out
accelerate_cpu.yaml   for nodes without: one process per node, connected over gloo
deepspeed.json        ZeRO stage 2 (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054): each process holds a
                      part of the gradients and of the optimizer states, and the states are kept in CPU memory

The templates of the scripts are in data/cluster. The prompts per step of a profile are for one process: P processes
sample P times as many prompts per step, and take a P-th of the steps. What TRL can do besides is reached by its own
option names, in job.yaml or behind the script: `sbatch job.sbatch --use_vllm true`.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_edu.config import append_field_docs, setting
from grpo_edu.problems.templates import Problem, data_dir, prompt_options
from grpo_edu.prompts import PromptStyle, chat_messages, prompt_style, set_prompt_style
from grpo_edu.runs.loading import resolve_rewards
from grpo_edu.runs.options import (
    ALL_LAYERS,
    PROBLEM_PLACEHOLDER,
    RunConfig,
    make_plain_chat_template,
    template_variables,
    with_absolute_paths,
    with_changed_paths,
)
from grpo_edu.runs.profiles import Profile
from grpo_edu.runs.record import resolve_model_source

if TYPE_CHECKING:
    from jinja2 import Template
    from transformers import PreTrainedTokenizerBase

_TIME = re.compile(r"(\d+-)?\d+(:\d\d){0,2}")  # the forms that sbatch takes: 30, 8:00, 08:00:00, 2-00:00:00
_MEMORY = re.compile(r"\d+[KMGT]?", re.IGNORECASE)
_WORD = re.compile(r"[\w.,:/@+-]+")


@append_field_docs
@dataclass(frozen=True)
class ClusterJob:
    """One Slurm job that trains with TRL.

    profile: the settings of the training run.
    fixed: names of settings that are not adapted to the number of processes, because the user has chosen them.

    Raises ValueError that names the field, its value and the remedy.
    """

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
    micro_batch_size: int | None = setting(
        None, "completions that a process computes at a time (default: its share of an update)"
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
        if self.profile.request().dtype == "auto":
            raise ValueError("dtype: 'auto' would measure this computer, not the nodes; add -- --dtype bfloat16")
        self.trl_settings()  # raises ValueError for what TRL cannot do

    @property
    def processes(self) -> int:
        """One process per GPU, or one per node without GPUs."""
        return self.nodes * max(1, self.gpus_per_node)

    @property
    def uses_deepspeed(self) -> bool:
        """True if DeepSpeed takes part on nodes with GPUs."""
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

    def trl_settings(self) -> dict[str, Any]:
        """Return what `trl_backend.trl_settings` gives one process of the job."""
        from grpo_edu.scale.trl_backend import trl_settings  # imports torch, which the command line does without

        return trl_settings(self.adapted.config(), processes=self.processes, micro_batch_size=self.micro_batch_size)


def write_job(job: ClusterJob, folder: str | Path, *, overwrite: bool = False) -> list[Path]:
    """Write the files of a job into a folder, which is made if needed; returns their paths, the batch script first.

    Raises FileExistsError if one of them exists and `overwrite` is False; OSError if they cannot be written; and what
    loading problems, rewards and a changed prompt raises.
    """
    folder = Path(folder).expanduser().absolute()
    carried, request = carry_task(job.adapted.request(), folder / "task")
    tokenizer, style = _prompts_of(request)
    problems = job.adapted.request().load_data().problems
    texts = {
        "job.sbatch": sbatch_script(job, folder, request),
        "job.yaml": trl_config(job, folder, request),
        "job_rewards.py": reward_module(request, folder),
        "data/train.jsonl": prompt_rows(problems, request, style),
    }
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
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    for target, source in carried.items():
        target.parent.mkdir(exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        else:
            shutil.copy2(source, target)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder / "tokenizer")
    return [*(folder / name for name in texts), *carried]


def _prompts_of(request: RunConfig) -> tuple[PreTrainedTokenizerBase | None, PromptStyle]:
    """Return the tokenizer with the prompt of a run, where the run changes the model's own, and the prompt's style.

    A model that is not on this computer is taken to have the course's prompt. Raises what `load_tokenizer` raises where
    its prompt is to be changed.
    """
    from grpo_edu.model_files import load_tokenizer  # imports torch

    source = model_path(request.model)
    if isinstance(source, str) and not changes_prompt(request):
        return None, PromptStyle()
    tokenizer = load_tokenizer(source, "")
    style = request.prompt_style(prompt_style(tokenizer))
    if not changes_prompt(request):
        return None, style
    set_prompt_style(tokenizer, style)
    if request.prompt_template is not None:
        tokenizer.chat_template = make_plain_chat_template(request.prompt_template)
    return tokenizer, style


def model_path(model: str) -> Path | str:
    """Return what TRL loads for a run's model: a folder, or a Hub id.

    Raises ValueError for a folder of adapters, and what `load_policy` raises.
    """
    from grpo_edu.models import adapter_folder, find_model  # imports torch

    if adapter_folder(model) is not None:
        raise ValueError(
            f"model: {model} holds adapters of another model, which `trl grpo` does not merge; in Python, "
            f"save_policy(*load_policy({model!r}), FOLDER) writes the merged model, whose folder can be given"
        )
    found = find_model(model)
    return found.absolute() if isinstance(found, Path) else found


def changes_prompt(request: RunConfig) -> bool:
    """Return whether a run asks its questions in another way than the model's own."""
    return bool(
        request.prompt_template or request.system_prompt or request.num_examples or request.chat_template_kwargs
    )


def prompt_rows(problems: Sequence[Problem], request: RunConfig, style: PromptStyle) -> str:
    """Return the problems as lines of JSON with the columns that rewards read, and the prompts as TRL takes them.

    A prompt is a list of chat messages, or, with a `prompt_template`, the text itself.
    """
    lines = []
    for problem in problems:
        prompt: str | list[dict[str, str]] = chat_messages(problem.prompt, style=style, **prompt_options(problem.level))
        if request.prompt_template is not None:
            prompt = request.prompt_template.replace(PROBLEM_PLACEHOLDER, problem.prompt)
        lines.append(json.dumps({**problem.row(), "prompt": prompt}, ensure_ascii=False))
    return "\n".join(lines) + "\n"


def trl_config(job: ClusterJob, folder: Path, request: RunConfig) -> str:
    """Return the YAML for `trl grpo --config`: model, data, rewards, LoRA and settings under TRL's names.

    request: the run with the paths of the job's folder, as `carry_task` returns it.
    """
    import yaml

    config = request.config
    settings = {
        "model_name_or_path": str(model_path(request.model)),
        "dtype": request.dtype,
        "dataset_name": str(folder / "data"),
        "reward_funcs": [f"job_rewards.{name}" for name, _ in reward_imports(request, folder)],
        "output_dir": str(folder / "run"),
        **job.trl_settings(),
        "beta": config.beta,
        "use_cpu": job.gpus_per_node == 0,
        "chat_template_kwargs": template_variables(request.chat_template_kwargs) or None,
        "report_to": list(request.report_to) or "none",
        "save_strategy": "steps",  # a checkpoint also holds the log of its steps
        "save_steps": (request.checkpoint_every or config.max_steps) * config.num_iterations,
        "save_total_limit": 2,
    }
    if request.lora_rank:
        targets = list(request.lora_targets)
        settings |= {
            "use_peft": True,
            "lora_r": request.lora_rank,
            "lora_alpha": 2 * request.lora_rank if request.lora_alpha is None else request.lora_alpha,
            "lora_dropout": 0.0,
            "lora_target_modules": targets[0] if targets == [ALL_LAYERS] else targets,
        }
    given = {name: value for name, value in settings.items() if value is not None}
    return "# Read by `trl grpo --config job.yaml`.\n" + yaml.safe_dump(given, sort_keys=False, allow_unicode=True)


def reward_imports(request: RunConfig, folder: Path) -> list[tuple[str, str]]:
    """Return each reward's name in the job's module of rewards, and its lines there; own ones are adapted to TRL."""
    found = []
    for reward in request.reward_funcs:
        place, sign, name = reward.rpartition(":") if isinstance(reward, str) else ("", "", "")
        if place.endswith(".py"):
            place = ".".join(Path(place).relative_to(folder).with_suffix("").parts)
        if sign:
            found.append((name, f"from {place} import {name}\n\n{name} = for_trl({name})\n"))
        else:
            (function,) = resolve_rewards([reward])
            found.append((function.__qualname__, f"from {function.__module__} import {function.__qualname__}\n"))
    return found


def reward_module(request: RunConfig, folder: Path) -> str:
    """Return the module from which `trl grpo`, started in the job's folder, imports the rewards of a run."""
    lines = [code for _, code in reward_imports(request, folder)]
    return _template("job_rewards.py").render(rewards="\n".join(lines))


def sbatch_script(job: ClusterJob, folder: Path, request: RunConfig | None = None) -> str:
    """Return the script for `sbatch`. request: as for `trl_config`; None: the job's own."""
    request = request or job.adapted.request()
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
        model=str(resolve_model_source(request.model)),
        changes_prompt=changes_prompt(request),
        evaluation=evaluation_options(request),
    )


def evaluation_options(request: RunConfig) -> list[str]:
    """Return the options with which `grpo-edu evaluate` measures the model of a run, but for the model."""
    given = {
        "data": ",".join(request.data),
        "data-path": request.data_path,
        "heldout": request.heldout_file,
        "columns": ",".join(request.columns) or None,
        "rewards": ",".join(request.to_dict()["reward_funcs"]),
        "reward-weights": ",".join(map(str, request.config.reward_weights or ())) or None,
        "n": request.num_heldout,
        "dtype": request.dtype,
        "max-completion-length": request.config.max_completion_length,
        "seed": request.config.seed,
    }
    return [str(word) for name, value in given.items() if value is not None for word in (f"--{name}", value)]


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
    settings = job.trl_settings()
    return _template("deepspeed.json").render(
        micro_batch_size=settings["per_device_train_batch_size"],
        accumulation_steps=settings["gradient_accumulation_steps"],
        max_grad_norm=job.profile.config().max_grad_norm,
        bf16=job.profile.request().dtype == "bfloat16",
    )


def carry_task(request: RunConfig, folder: Path) -> tuple[dict[Path, Path], RunConfig]:
    """Return the files to copy into a folder, target → source, and the request that reads it from there.

    Raises ValueError if two files have one name, and what loading problems and rewards raises.
    """
    carried: dict[Path, Path] = {}

    def move(path: str) -> str:
        source, target = Path(path), folder / Path(path).name
        if carried.setdefault(target, source) != source:
            raise ValueError(f"data: {source} and {carried[target]} have one name; rename one of them")
        return str(target)

    moved = with_changed_paths(with_absolute_paths(request), move)
    return carried, moved


def _template(name: str) -> Template:
    """Return a template of data/cluster."""
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
