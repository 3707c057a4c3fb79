"""What a training run is asked for, and what its config.json keeps of that.

`RunRequest` is the only list of a run's options. The command line, the profiles, config.json and the dashboards are
made from its fields, and every option is checked when the request is made, before any model is loaded.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, get_args, get_type_hints

from grpo_edu import __version__
from grpo_edu.config import DEVICES, DTYPE_CHOICES, GRPOConfig
from grpo_edu.extras.settings import documented, setting
from grpo_edu.problems.files import load_problem_set
from grpo_edu.problems.gym import PREFIX, check_task, gym_problems, is_gym
from grpo_edu.problems.own import UNANSWERED, is_own, own_problems, parse_columns
from grpo_edu.problems.templates import (
    LEVELS,
    PROBLEM_SETS,
    Problem,
    ProblemSet,
    Scorer,
    columns_of,
    data_dir,
    default_length,
    problem_set_names,
)
from grpo_edu.prompts import PromptStyle, completion_text
from grpo_edu.rewards import REWARDS, RewardFunction, compute_rewards, reward_name
from grpo_edu.runs.completions import recorded_steps
from grpo_edu.runs.folder import RunFolder, model_source, read_run_config
from grpo_edu.runs.user_rewards import check_columns, load_reward

DATA = problem_set_names()
Rewards = str | RewardFunction | Sequence[str | RewardFunction]
SPLITS = ("heldout", "train")
BACKENDS = ("grpo_edu", "trl")
TRACKERS = ("tensorboard", "trackio", "wandb")
ALL_LAYERS = "all-linear"
QUESTION = "{problem}"  # where a prompt template holds the question
NO_SYSTEM_PROMPT = "none"
_LONGEST_PATH = 250


@documented
@dataclass(frozen=True)
class RunRequest:
    """One training run: model, data, rewards, settings of GRPO, and how the run is evaluated and kept.

    Names (of data, rewards, layers and trackers) may be given as one string with commas or as a sequence.

    Without `heldout`, a fifth of the questions of each file of your own is held out. Rewards may also be functions with
    TRL's signature, or package.module:function. The device "auto" is a GPU for models of at least 50 million
    parameters, if there is one. Without `system_prompt` the model's own style is used, which is the course's for a
    model that no run has trained. `greedy` is on by default where an evaluation takes less than three seconds. The
    completions that are kept are spread over the steps.

    Raises ValueError that names the option, its value and the remedy.

    >>> RunRequest(data="basic,sorting", rewards="accuracy,format").data
    ('basic', 'sorting')
    >>> RunRequest(lora_rank=-1)
    Traceback (most recent call last):
    ...
    ValueError: `lora_rank` must be 0 (none) or a positive whole number, got -1.
    """

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {"backend": BACKENDS, "dtype": DTYPE_CHOICES, "device": DEVICES}

    model: str = setting("tiny", "a shipped model such as tiny, a folder (also of a run), or a Hub id")
    data: tuple[str, ...] = setting(
        LEVELS, f"sets, with commas: {', '.join(DATA)}, reasoning-gym:TASK, or a file of yours"
    )
    heldout: str | None = setting(None, "file of held-out problems (default: a fifth of your file)")
    columns: tuple[str, ...] = setting((), "names in your file, such as question=problem,answer=target")
    data_path: str | None = setting(None, "folder with GSM8K's train.jsonl and test.jsonl")
    num_problems: int | None = setting(None, "number of training problems (default: all)")
    rewards: tuple[str | RewardFunction, ...] = setting(
        ("accuracy",), f"what is rewarded, with commas: {', '.join(REWARDS)}, FILE.py:function"
    )
    config: GRPOConfig = field(default_factory=GRPOConfig, metadata={"help": "the settings of GRPO"})
    backend: str = setting("grpo_edu", "which engine trains")
    dtype: str = setting("float32", "number format of the weights; auto measures which is faster here")
    device: str = setting("auto", "where the model runs; auto: a GPU for large models")
    prompt_template: str | None = setting(None, "text with {problem} in it, instead of the chat template")
    system_prompt: str | None = setting(None, "text, a file that holds it, or none (default: the model's)")
    num_examples: int = setting(0, "solved training problems in front of every question")
    chat_template_kwargs: tuple[str, ...] = setting((), "variables of the chat template, such as enable_thinking=false")
    lora_rank: int = setting(0, "rank of the adapters; 0 trains all weights")
    lora_alpha: float | None = setting(
        None, "alpha; the adapters' output is scaled by alpha / rank (default: 2 x rank)"
    )
    lora_targets: tuple[str, ...] = setting((ALL_LAYERS,), "layers that get adapters, such as q_proj,v_proj")
    n: int = setting(300, "number of held-out problems for the evaluations")
    greedy: bool | None = setting(None, "also evaluate greedily, without sampling (default: if that is quick)")
    checkpoint_every: int = setting(0, "steps between checkpoints; 0 writes none")
    keep_completions: int = setting(10000, "most completions kept, with their rewards; 0: none")
    inspect_steps: tuple[str, ...] = setting(
        (), "steps whose tokens are kept for `show --html`, such as first,10,last, or all"
    )
    track: tuple[str, ...] = setting((), f"trackers on this computer, with commas: {', '.join(TRACKERS)}")

    def __post_init__(self) -> None:
        for name in ("model", "data_path", "heldout"):
            value = getattr(self, name)
            self._set(name, str(value) if isinstance(value, Path) else value)
        hints = get_type_hints(type(self))
        for name in RUN_FIELDS:
            _check_kind(name, getattr(self, name), hints[name])
        for name, known in self.choices.items():
            parse_names((getattr(self, name),), known, name)
        self._set("data", check_data(self.data))
        for name in ("columns", "chat_template_kwargs", "inspect_steps"):
            self._set(name, split_names(getattr(self, name)))
        template_variables(self.chat_template_kwargs)
        recorded_steps(self.inspect_steps, self.config.max_steps)
        self._set("rewards", _reward_entries(self.rewards))
        self._set("lora_targets", split_names(self.lora_targets))
        self._set("track", parse_names(self.track, TRACKERS, "track") if self.track else ())
        self._check_numbers()
        self._check_pairs()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_numbers(self) -> None:
        for name in ("checkpoint_every", "lora_rank", "num_examples", "keep_completions"):
            value = getattr(self, name)
            if value < 0:
                raise ValueError(f"`{name}` must be 0 (none) or a positive whole number, got {value}.")
        if self.lora_alpha is not None and not self.lora_alpha > 0:
            raise ValueError(f"`lora_alpha` must be a positive number, got {self.lora_alpha}.")
        if self.system_prompt is not None:
            _system_text(self.system_prompt)
        if self.prompt_template is not None:
            plain_template(self.prompt_template)

    def _check_pairs(self) -> None:
        """Refuse options that are each valid, but not together."""
        if self.lora_alpha is not None and not self.lora_rank:
            raise ValueError(
                f"`lora_alpha` is {self.lora_alpha}, but no adapters are trained; set `lora_rank` as well."
            )
        _check_own(self.data, self.heldout, self.columns)
        if len(set(self.reward_names)) < len(self.reward_names):
            raise ValueError(
                f"`rewards`: two functions have one name in {', '.join(self.reward_names)}; give each its own."
            )
        weights = self.config.reward_weights
        if weights is not None and len(weights) != len(self.rewards):
            names = ", ".join(self.reward_names)
            raise ValueError(
                f"`reward_weights` has {len(weights)} values for the rewards {names}; give one weight per reward."
            )
        if self.backend == "trl" and self.inspect_steps:
            raise ValueError(
                f"`inspect_steps` is {','.join(self.inspect_steps)}, but TRL's trainer does not record tokens; "
                "leave it out, or train with `backend` grpo_edu."
            )
        if self.backend == "trl":
            from grpo_edu.scale.trl_backend import trl_settings

            trl_settings(self.config)
        if self.data_path is not None and Path(self.data_path).is_file():
            raise ValueError(
                f"`data_path` is one file, {self.data_path}; name a folder with train.jsonl for the training and "
                "test.jsonl for the evaluation."
            )

    @property
    def reward_functions(self) -> list[RewardFunction]:
        """The functions that score completions."""
        return reward_functions(self.rewards)

    @property
    def reward_names(self) -> list[str]:
        """Names of the reward functions, as they appear in the metrics; nothing is loaded for them."""
        return [_reward_label(entry) for entry in self.rewards]

    def load_problems(self) -> tuple[list[Problem], list[Problem]]:
        """Return the problems to train on and those to evaluate on.

        Raises ValueError and OSError for files, rewards and numbers that are not valid.
        """
        _, problems = self._examples_and_problems()
        heldout = load_asked(vars(self), "heldout", n=self.n)
        score_unanswered([*problems, *heldout], self.rewards)
        for function in self.reward_functions:
            check_columns(function, list(columns_of(problems)))
        return problems, heldout

    def _examples_and_problems(self) -> tuple[list[Problem], list[Problem]]:
        """Return the training problems that stand in the prompt, and those to train on."""
        problems = load_asked(vars(self), "train", n=self.num_problems, argument="num_problems")
        if self.num_examples >= len(problems):
            raise ValueError(
                f"`num_examples` is {self.num_examples}, but there are only {len(problems)} training problems."
            )
        return problems[: self.num_examples], problems[self.num_examples :]

    def prompt_style(self, style: PromptStyle) -> PromptStyle:
        """Return a model's own prompt style with what this run changes of it."""
        if self.system_prompt is not None:
            style = replace(style, system=_system_text(self.system_prompt))
        if self.chat_template_kwargs:
            style = replace(style, template_kwargs=template_variables(self.chat_template_kwargs))
        if self.num_examples:
            examples, _ = self._examples_and_problems()
            if not all(example.solution for example in examples):
                raise ValueError("`num_examples`: these problems have no answers that could be shown; leave it out.")
            style = replace(style, examples=tuple((example.prompt, example.solution) for example in examples))
        return style

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> RunRequest:
        """Make a request from a flat mapping that holds fields of this class and of `GRPOConfig`.

        >>> RunRequest.from_settings({"data": "gsm8k", "beta": 0.1}).config.max_completion_length
        256
        """
        own = {name: settings[name] for name in RUN_FIELDS if name in settings}
        data = check_data(own.get("data", LEVELS))
        model, lora_rank = own.get("model", "tiny"), own.get("lora_rank", 0)
        given = {name: settings[name] for name in CONFIG_FIELDS if name in settings}
        config = default_config(data, model, lora_rank, **given)
        return cls(**own, config=config)

    def to_settings(self) -> dict[str, Any]:
        """Return the flat mapping that `from_settings` reads, with plain values."""
        content = self.to_dict()
        config = content.pop("config")
        return {**content, **config}

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for a JSON file; reward functions are kept by their names."""
        own = {name: getattr(self, name) for name in RUN_FIELDS}
        lists = {name: list(value) for name, value in own.items() if isinstance(value, tuple)}
        rewards = [entry if isinstance(entry, str) else reward_name(entry) for entry in self.rewards]
        return {**own, **lists, "rewards": rewards, "config": self.config.to_dict()}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], rewards: Rewards | None = None) -> RunRequest:
        """Read what `to_dict` returned, or what an earlier version of grpo_edu stored.

        rewards: the functions of the stored names, needed for those that are not the package's own.

        Raises ValueError where a stored reward function is not given, or another one is, and for settings of a later
        version.
        """
        if unknown := set(content["config"]) - set(CONFIG_FIELDS):
            raise ValueError(
                f"the run was stored by grpo_edu {content.get('grpo_edu')} with settings that this version does not "
                f"have: {', '.join(sorted(unknown))}; use that version, or start a new run."
            )
        own = {name: content[name] for name in RUN_FIELDS if name in content}
        if "num_heldout" in content:  # its name before `RunRequest`
            own["n"] = content["num_heldout"]
        own["rewards"] = _stored_rewards(split_names(own.get("rewards", "accuracy")), rewards)
        return cls(**own, config=GRPOConfig(**content["config"]))


RUN_FIELDS = tuple(field.name for field in fields(RunRequest) if field.name != "config")
CONFIG_FIELDS = tuple(field.name for field in fields(GRPOConfig))


def library_versions() -> dict[str, str]:
    """Versions on which the numbers of a run depend."""
    import torch
    import transformers

    return {
        "grpo_edu": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


@dataclass(frozen=True)
class RunRecord:
    """A run as its config.json keeps it: the request, and what the run was started on.

    request: what was asked for. source: what the model is loaded from: a name, or an absolute path.
    command: what was typed, empty for a run that was started in Python. versions: of Python and the libraries.
    threads: of PyTorch; with another number, sums would be rounded differently.
    """

    request: RunRequest
    source: str
    command: str
    versions: dict[str, str]
    threads: int

    @classmethod
    def start(cls, request: RunRequest, command: str = "") -> RunRecord:
        """Describe a run that starts now, in this process and folder."""
        import torch

        request = with_absolute_paths(request)
        return cls(request, absolute_source(request.model), command, library_versions(), torch.get_num_threads())

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for a JSON file."""
        request = self.request.to_dict()
        return {**self.versions, "threads": self.threads, "command": self.command, "source": self.source, **request}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], rewards: Rewards | None = None) -> RunRecord:
        """Read what `to_dict` returned; `rewards` as in `RunRequest.from_dict`."""
        versions = {name: content[name] for name in ("grpo_edu", "python", "torch", "transformers") if name in content}
        request = RunRequest.from_dict(content, rewards)
        source = content.get("source", request.model)
        return cls(request, source, content.get("command", ""), versions, content.get("threads", 1))


def read_record(folder: str | Path, rewards: Rewards | None = None) -> RunRecord | None:
    """Read the record of the run in a folder; None where the folder holds no training run."""
    content = read_run_config(folder)
    return None if content is None or "config" not in content else RunRecord.from_dict(content, rewards)


def read_resumable(output: str | Path, rewards: Rewards | None = None) -> RunRecord:
    """Read the record of a run that can be resumed; `rewards` as in `RunRequest.from_dict`.

    Raises ValueError: the folder holds no run, a run without checkpoints, or one that is finished.
    """
    folder = RunFolder(output).path
    record = RunRecord.from_dict(RunFolder(output).read_config("config", "training run"), rewards)
    if record.request.backend == "trl":
        raise ValueError(
            f"`resume`: the run in {folder} was trained by TRL, as the job of a cluster; submit that job again."
        )
    result = read_run_result(folder)
    if result is not None and not result["interrupted"] and not result["failure"]:
        raise ValueError(
            f"`resume`: the run in {folder} is finished; to train its model further, start a run with `model` {folder}."
        )
    if not record.request.checkpoint_every and not RunFolder(output).resumable:
        raise ValueError(
            f"`resume`: the run in {folder} keeps no checkpoints; start it again with `checkpoint_every` set."
        )
    return record


def heldout_problems(stored: Mapping[str, Any]) -> list[Problem]:
    """Load the problems that a stored run was evaluated on. stored: what `read_run_config` read."""
    n = stored["num_heldout"] if "num_heldout" in stored else stored["n"]
    problems = load_asked(stored, "heldout", n=n)
    score_unanswered(problems, stored.get("rewards", ()))
    return problems


def load_asked(asked: Mapping[str, Any], split: str, *, n: int | None, argument: str = "n") -> list[Problem]:
    """Load problems by the options of a run, from a request or from a stored one; otherwise as `load_split`."""
    places = {name: asked[name] for name in ("data_path", "heldout", "columns") if asked.get(name)}
    return load_split(asked["data"], split, n=n, argument=argument, **places)


def score_unanswered(problems: Sequence[Problem], rewards: Sequence[str | RewardFunction]) -> None:
    """Let the first reward of your own score problems without an answer: right is what it pays at least 1.

    Raises ValueError where there are such problems but no such reward.
    """
    found = {(problem.level, problem.prompt): problem for problem in problems if problem.level.startswith(UNANSWERED)}
    if not found:
        return
    own = [reward for reward in rewards if reward not in REWARDS and _short(_reward_label(reward)) not in REWARDS]
    if not own:
        level = next(iter(found))[0].removeprefix(UNANSWERED)
        raise ValueError(
            f"`data`: {level} has no column for the answer, so accuracy cannot be measured; name it with `columns` "
            "answer=COLUMN, or give a reward of your own as `rewards` FILE.py:function."
        )
    (function,) = reward_functions(own[:1])

    def score(completion: str | list[dict], question: str | list[dict], level: str, answer: str) -> float:
        text = question if isinstance(question, str) else question[-1]["content"]
        columns = columns_of([found[level, text]])
        return float(compute_rewards([function], prompts=[question], completions=[completion], **columns)[0, 0])

    scorer = Scorer(lambda completion: completion_text(completion).strip() or None, score)
    PROBLEM_SETS["own"] = ProblemSet(
        "questions without an answer", level=UNANSWERED, scorer=scorer, is_name_of_data=False
    )


def with_absolute_paths(request: RunRequest) -> RunRequest:
    """Return a request whose files are found from every working folder."""

    def absolute(path: str) -> str:
        return str(Path(path).expanduser().absolute())

    def reward(entry: str | RewardFunction) -> str | RewardFunction:
        place, sign, name = entry.rpartition(":") if isinstance(entry, str) else ("", "", "")
        return f"{absolute(place)}:{name}" if sign and place.endswith(".py") else entry

    return replace(
        request,
        data=tuple(absolute(name) if is_own_set(name) else name for name in request.data),
        rewards=tuple(map(reward, request.rewards)),
        data_path=None if request.data_path is None else absolute(request.data_path),
        heldout=None if request.heldout is None else absolute(request.heldout),
        system_prompt=None
        if request.system_prompt is None
        else _system_text(request.system_prompt) or NO_SYSTEM_PROMPT,
    )


def read_run_result(folder: Path) -> dict[str, Any] | None:
    """Read result.json; None where the run has not ended. Raises ValueError where the file is damaged."""
    file = folder / "result.json"
    try:
        result = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    except ValueError:
        result = []
    if result is not None and (not isinstance(result, dict) or "accuracy_after" not in result):
        raise ValueError(f"{file} is damaged; delete it, and the run counts as one that was not evaluated.")
    return result


def absolute_source(model: str | Path) -> str:
    """Return what to load for a model's name; a path is made absolute, so that it holds in every working folder."""
    source = model_source(model)
    if not Path(source).expanduser().is_dir():
        return str(source)
    from grpo_edu.models import SMOLLM2, list_models

    return str(source) if source in (*list_models(), SMOLLM2) else str(Path(source).expanduser().absolute())


def default_folder(request: RunRequest, *, overwrite: bool = False) -> RunFolder:
    """Return `runs/tiny-levels-seed0` or the like, with a number where that exists and is not to be replaced."""
    path = Path(request.model)
    label = path.parent.name if path.name == "model" else path.name
    names = [Path(name).stem if is_own_set(name) else name for name in request.data]
    sets = "levels" if request.data == LEVELS else "-".join(names).replace(":", "-")
    name = f"{label or 'model'}-{sets}-seed{request.config.seed}"
    return RunFolder(Path("runs") / name) if overwrite else RunFolder.unused(name)


def split_names(names: str | Sequence[str]) -> tuple[str, ...]:
    """Return names from a sequence or from one string with commas, each once.

    >>> split_names("q_proj, v_proj")
    ('q_proj', 'v_proj')
    """
    parts = names.split(",") if isinstance(names, str) else names
    return tuple(dict.fromkeys(part.strip() for part in parts if part.strip()))


def parse_names(names: str | Sequence[str], known: Sequence[str], argument: str) -> tuple[str, ...]:
    """Return names from a sequence or from one string with commas, each once; all must be in `known`.

    Raises ValueError that names the argument, the unknown name and what is known.

    >>> parse_names("basic, advanced", LEVELS, "data")
    ('basic', 'advanced')
    """
    found = split_names(names)
    choose = f"choose from {', '.join(known)}."
    if not found:
        raise ValueError(f"`{argument}` is empty; {choose}")
    for name in found:
        if name not in known:
            raise ValueError(f"`{argument}`: {name!r} is unknown; {choose}")
    return found


def check_data(data: str | Sequence[str]) -> tuple[str, ...]:
    """Return names of problem sets, from a sequence or from one string with commas.

    Raises ValueError for a set, or a task of reasoning-gym, that does not exist.

    >>> check_data("basic,gsm8k")
    ('basic', 'gsm8k')
    """
    names = split_names(data)
    tasks = [name for name in names if is_gym(name)]
    for task in tasks:
        check_task(task)
    own = [name for name in names if is_own_set(name)]
    return parse_names(names, (*DATA, *tasks, *own, f"{PREFIX}TASK", "FILE"), "data")


def is_own_set(name: str) -> bool:
    """Return whether a name of `data` is a file or a folder of your own."""
    return name not in DATA and not is_gym(name) and (is_own(name) or Path(name).expanduser().exists())


def _check_own(data: Sequence[str], heldout: str | None, columns: Sequence[str]) -> None:
    """Refuse options for files of your own that have no effect."""
    own = [name for name in data if is_own_set(name)]
    parse_columns(columns)
    for name, value in (("heldout", heldout), ("columns", columns)):
        if value and not own:
            raise ValueError(f"`{name}` is about a file of your own, but `data` names none: {', '.join(data)}.")
    if heldout and len(own) > 1:
        raise ValueError(f"`heldout` is one file, but `data` names {len(own)} files: {', '.join(own)}; join them.")


def reward_functions(rewards: Rewards) -> list[RewardFunction]:
    """Return the functions behind names of `REWARDS`, or behind the names of its functions; a function stays itself.

    Raises ValueError for an unknown name, or for none at all.

    >>> [function.__name__ for function in reward_functions("accuracy,format_reward")]
    ['accuracy_reward', 'format_reward']
    """
    return [
        (REWARDS[entry] if entry in REWARDS else load_reward(entry)) if isinstance(entry, str) else entry
        for entry in _reward_entries(rewards)
    ]


def _reward_entries(rewards: Rewards) -> tuple[str | RewardFunction, ...]:
    """Return short names and functions; names may have come in one string, or as names of the package's functions."""
    entries: list[str | RewardFunction] = []
    for reward in [rewards] if isinstance(rewards, str) or callable(rewards) else rewards:
        if isinstance(reward, str):
            names = [_short(name) for name in split_names(reward)]
            own = [name for name in names if all(name.rpartition(":"))]
            entries += parse_names(names, (*REWARDS, *own, "FILE.py:function"), "rewards")
        else:
            entries.append(reward)
    if not entries:
        raise ValueError(f"`rewards` is empty; choose from {', '.join(REWARDS)}, or write a function.")
    return tuple(entries)


def _reward_label(entry: str | RewardFunction) -> str:
    """Return the name of a reward function in the metrics."""
    if not isinstance(entry, str):
        return reward_name(entry)
    return reward_name(REWARDS[entry]) if entry in REWARDS else entry.rpartition(":")[2]


def _short(name: str) -> str:
    """Return "accuracy" for "accuracy_reward", as it stands in metrics; other names stay."""
    return next((short for short, function in REWARDS.items() if reward_name(function) == name), name)


def _stored_rewards(names: Sequence[str], given: Rewards | None) -> tuple[str | RewardFunction, ...]:
    """Return the reward functions of a stored run: the package's by their names, others as they are given again."""
    wanted = [_short(name) for name in names]
    functions = {} if given is None else {_short(reward_name(one)): one for one in reward_functions(given)}
    known = all(name in REWARDS or ":" in name for name in wanted) if given is None else list(functions) == wanted
    if not known:
        raise ValueError(
            f"`rewards`: the run was started with {', '.join(names)}; give the same functions to resume it."
        )
    return tuple(functions.get(name, name) for name in wanted)


def load_split(
    data: Sequence[str],
    split: str = "heldout",
    *,
    data_path: str | Path | None = None,
    heldout: str | Path | None = None,
    columns: Sequence[str] = (),
    n: int | None = None,
    argument: str = "n",
) -> list[Problem]:
    """Load problems of the named sets, one set after the other, `n` in all and balanced between the sets.

    Args:
        data: names of `DATA`, tasks of reasoning-gym, or files of your own.
        split: "train" or "heldout" (which for GSM8K is its test set).
        data_path: the folder or file of GSM8K; None asks the Hub.
        heldout, columns: of a file of your own, see `grpo_edu.problems.own.own_problems`.
        n: how many in all; the first sets get one more where it does not divide. None takes everything. Of the held-out
            problems of your own, all are taken where there are fewer.
        argument: what error messages call `n`.

    Raises ValueError: an unknown split, fewer problems than `n`, or a `data_path` that no set reads; and what
    `load_gsm8k` raises.

    >>> [problem.level for problem in load_split(("basic", "sorting"), n=3)]
    ['basic', 'basic', 'sorting']
    """
    parse_names((split,), SPLITS, "split")
    if data_path is not None and not any(name in DATA and PROBLEM_SETS[name].reads_path for name in data):
        raise ValueError(
            f"`data_path` is {str(data_path)!r}, but only gsm8k is read from a path; add gsm8k to `data`, or leave "
            "`data_path` out."
        )
    if n is not None and n < len(data):
        raise ValueError(f"`{argument}` is {n}, fewer than one problem for each of {', '.join(data)}; raise it.")
    problems = []
    for index, name in enumerate(data):
        share = None if n is None else n // len(data) + (index < n % len(data))
        if is_gym(name):
            found = gym_problems(name, split, share)
        elif is_own_set(name):
            found = own_problems(name, split, heldout=heldout, columns=columns)
            share = min(share, len(found)) if share is not None and split == "heldout" else share
        else:
            found = load_problem_set(name, split, data_path)
        share = len(found) if share is None else share
        if share > len(found):
            raise ValueError(
                f"`{argument}` is {n}, which needs {share} {split} problems of {name}, but there are only "
                f"{len(found)}; lower it."
            )
        problems += found[:share]
    return problems


def default_config(data: Sequence[str], model: str | Path = "tiny", lora_rank: int = 0, **settings: Any) -> GRPOConfig:
    """Make a `GRPOConfig` for these sets and this model, with any settings of your own.

    The completions are long enough for the sets. SmolLM2, and what was trained from it, has a hundred times the weights
    of the tiny model: the learning rate of all its weights is a tenth, and a step has half as many prompts.

    >>> default_config(("gsm8k",), seed=3).max_completion_length
    256
    >>> default_config(("instructions",), "smollm2").learning_rate
    1e-05
    """
    defaults: dict[str, Any] = {"max_completion_length": default_length(data)}
    if _is_smollm2(model):
        defaults["prompts_per_step"] = 8
        if not lora_rank:
            defaults["learning_rate"] = 1e-5
    return GRPOConfig(**defaults | settings)


def _is_smollm2(model: str | Path) -> bool:
    """Whether a run starts from SmolLM2, or from a run or adapters that did."""
    if str(model) == "smollm2":
        return True
    folder = Path(model).expanduser()
    earlier = read_run_config(folder.parent if folder.name == "model" else folder)
    if earlier is not None:
        return _is_smollm2(earlier.get("source", ""))
    for place in (data_dir() / "models" / model, folder):
        if (place / "adapter_config.json").is_file():
            from grpo_edu.fast.lora import adapter_base  # imports torch, which other models do not need here

            return _is_smollm2(adapter_base(place))
    return False


def _system_text(system_prompt: str) -> str | None:
    """Return the system message that an option means: a text, or what a file holds; None for "none".

    Raises FileNotFoundError for a file that does not exist, and ValueError for an empty text.
    """
    if system_prompt == NO_SYSTEM_PROMPT:
        return None
    text, path = system_prompt, Path(system_prompt).expanduser()
    if "\n" not in text and len(text) < _LONGEST_PATH:
        if path.is_file():
            text = path.read_text(encoding="utf-8-sig")
        elif path.suffix in (".txt", ".md") and " " not in text:
            raise FileNotFoundError(f"`system_prompt`: file {system_prompt} does not exist. Check the path.")
    if not text.strip():
        raise ValueError(f"`system_prompt` is empty; write {NO_SYSTEM_PROMPT} for no system message.")
    return text.strip()


def template_variables(entries: Sequence[str]) -> dict[str, Any]:
    """Read name=value entries; a value is read as JSON where it is JSON, and as a text otherwise.

    >>> template_variables(("enable_thinking=false", "style=short"))
    {'enable_thinking': False, 'style': 'short'}
    """
    found: dict[str, Any] = {}
    for entry in entries:
        name, sign, value = entry.partition("=")
        if not sign or not name.strip().isidentifier():
            raise ValueError(f"`chat_template_kwargs`: {entry!r} is not valid; write name=value.")
        try:
            found[name.strip()] = json.loads(value)
        except ValueError:
            found[name.strip()] = value.strip()
    return found


def plain_template(template: str) -> str:
    """Return a chat template that puts the question into a plain text, with nothing else around it.

    Raises ValueError where the text does not contain `{problem}` exactly once.

    >>> print(plain_template("Q: {problem} A:"))
    {{ "Q: " }}{{ messages[-1]["content"] }}{{ " A:" }}
    """
    if template.count(QUESTION) != 1:
        raise ValueError(
            f"`prompt_template` must contain {QUESTION} exactly once, where the question goes, got {template!r}."
        )
    before, after = (json.dumps(part, ensure_ascii=False) for part in template.split(QUESTION))
    return f'{{{{ {before} }}}}{{{{ messages[-1]["content"] }}}}{{{{ {after} }}}}'


_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def _check_kind(name: str, value: object, hint: Any) -> None:
    """Raise ValueError where a value is not of the kind that the field's annotation says."""
    options = get_args(hint) if NoneType in get_args(hint) else (hint,)
    if value is None and NoneType in options:
        return
    (kind,) = (option for option in options if option is not NoneType)
    if kind not in _KINDS:  # names: in a sequence, in one string, or as functions
        fits = isinstance(value, str | Sequence) or callable(value)
        words = "a name, or a list of names"
    else:
        allowed: tuple[type, ...] = (int, float) if kind is float else (kind,)
        fits = isinstance(value, allowed) and (kind is bool or not isinstance(value, bool))
        words = _KINDS[kind]
    if not fits:
        raise ValueError(f"`{name}` must be {words}, got {value!r}.")
