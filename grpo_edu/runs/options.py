"""The options of a training run.

`RunConfig` is the only list of them. The command line, the profiles, config.json and the dashboards are made from its
fields, and every option is checked when a `RunConfig` is made, before any model is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

from grpo_edu.config import (
    Device,
    Dtype,
    GRPOConfig,
    NoneOrCount,
    Options,
    Positive,
    append_field_docs,
    check_fields,
    drop_retired,
    setting,
)
from grpo_edu.problems.hub import read_run_config
from grpo_edu.problems.own import parse_columns
from grpo_edu.problems.templates import LEVELS, Problem, data_dir, default_length, problem_set_names
from grpo_edu.prompts import PromptStyle
from grpo_edu.rewards import REWARDS, RewardFunction, reward_name
from grpo_edu.runs.completions import recorded_steps
from grpo_edu.runs.loading import (
    Rewards,
    RunData,
    check_rewards,
    is_user_dataset,
    load_problem_sets,
    parse_data,
    parse_names,
    parse_rewards,
    resolve_rewards,
    reward_label,
    short_reward_name,
    split_names,
)

BACKENDS = ("grpo_edu", "trl")
TRACKERS = ("tensorboard", "trackio", "wandb")
ALL_LAYERS = "all-linear"
PROBLEM_PLACEHOLDER = "{problem}"  # where a prompt template holds the question
NO_SYSTEM_PROMPT = "none"
# The fields' names in version 0.3.0 and before, which stored runs, profiles and calls from Python may still use.
OLD_NAMES = {
    "n": "num_heldout",
    "heldout": "heldout_file",
    "rewards": "reward_funcs",
    "keep_completions": "max_saved_completions",
    "inspect_steps": "record_token_steps",
    "track": "report_to",
}
_LONGEST_PATH = 250


@append_field_docs
@dataclass(frozen=True)
class RunConfig:
    """One training run: model, data, rewards, settings of GRPO, and how the run is evaluated and kept.

    Names (of data, rewards, layers and trackers) may be given as one string with commas or as a sequence.

    Without `heldout_file`, a fifth of the questions of each file of your own is held out. Rewards may also be functions
    with TRL's signature, or package.module:function. The device "auto" is a GPU for models of at least 50 million
    parameters, if there is one. Without `system_prompt` the model's own style is used, which is the course's for a
    model that no run has trained. `greedy` is on by default if an evaluation takes less than three seconds. The
    completions that are kept are spread over the steps.

    Raises ValueError that names the option, its value and the remedy.

    >>> RunConfig(data="basic,sorting", reward_funcs="accuracy,format").data
    ('basic', 'sorting')
    >>> RunConfig(lora_rank=-1)
    Traceback (most recent call last):
    ...
    ValueError: lora_rank must be 0 (none) or a positive number, got -1
    """

    model: str = setting("tiny", "a shipped model such as tiny, a folder (also of a run), a GGUF file, or a Hub id")
    data: tuple[str, ...] = setting(
        LEVELS, f"sets, with commas: {', '.join(problem_set_names())}, reasoning-gym:TASK, or a file of yours"
    )
    heldout_file: str | None = setting(None, "file of held-out problems (default: a fifth of your file)")
    columns: tuple[str, ...] = setting((), "names in your file, such as question=problem,answer=target")
    data_path: str | None = setting(None, "folder with GSM8K's train.jsonl and test.jsonl")
    num_problems: int | None = setting(None, "number of training problems (default: all)")
    reward_funcs: tuple[str | RewardFunction, ...] = setting(
        ("accuracy",), f"what is rewarded, with commas: {', '.join(REWARDS)}, FILE.py:function"
    )
    config: GRPOConfig = field(default_factory=GRPOConfig, metadata={"help": "the settings of GRPO"})
    backend: Annotated[str, Options(*BACKENDS)] = setting("grpo_edu", "which engine trains")
    dtype: Dtype = setting("float32", "number format of the weights; auto measures which is faster here")
    device: Device = setting("auto", "where the model runs; auto: a GPU for large models")
    prompt_template: str | None = setting(None, "text with {problem} in it, instead of the chat template")
    system_prompt: str | None = setting(None, "text, a file that holds it, or none (default: the model's)")
    num_examples: NoneOrCount = setting(0, "solved training problems in front of every question")
    chat_template_kwargs: tuple[str, ...] = setting((), "variables of the chat template, such as enable_thinking=false")
    lora_rank: NoneOrCount = setting(0, "rank of the adapters; 0 trains all weights")
    lora_alpha: Positive | None = setting(
        None, "alpha; the adapters' output is scaled by alpha / rank (default: 2 x rank)"
    )
    lora_targets: tuple[str, ...] = setting((ALL_LAYERS,), "layers that get adapters, such as q_proj,v_proj")
    num_heldout: int = setting(300, "number of held-out problems for the evaluations")
    greedy: bool | None = setting(None, "also evaluate greedily, without sampling (default: if that is quick)")
    checkpoint_every: NoneOrCount | None = setting(
        None, "steps between checkpoints; 0: none (default: a checkpoint every five minutes)"
    )
    max_saved_completions: NoneOrCount = setting(10000, "most completions kept, with their rewards; 0: none")
    record_token_steps: tuple[str, ...] = setting(
        (), "steps whose tokens are kept for `show --html`, such as first,10,last, or all"
    )
    report_to: tuple[str, ...] = setting((), f"trackers on this computer, with commas: {', '.join(TRACKERS)}")

    def __post_init__(self) -> None:
        for name in ("model", "data_path", "heldout_file"):
            value = getattr(self, name)
            self._set(name, str(value) if isinstance(value, Path) else value)
        check_fields(self)
        self._set("data", parse_data(self.data))
        for name in ("columns", "chat_template_kwargs", "record_token_steps"):
            self._set(name, split_names(getattr(self, name)))
        template_variables(self.chat_template_kwargs)
        recorded_steps(self.record_token_steps, self.config.max_steps)
        self._set("reward_funcs", parse_rewards(self.reward_funcs))
        self._set("lora_targets", split_names(self.lora_targets))
        self._set("report_to", parse_names(self.report_to, TRACKERS, "report_to") if self.report_to else ())
        if self.system_prompt is not None:
            _system_text(self.system_prompt)
        if self.prompt_template is not None:
            make_plain_chat_template(self.prompt_template)
        self._check_pairs()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_pairs(self) -> None:
        """Refuse options that are each valid, but not together."""
        if self.lora_alpha is not None and not self.lora_rank:
            raise ValueError(
                f"`lora_alpha` is {self.lora_alpha}, but no adapters are trained; set `lora_rank` as well."
            )
        _check_user_files(self.data, self.heldout_file, self.columns)
        if len(set(self.reward_names)) < len(self.reward_names):
            raise ValueError(
                f"`reward_funcs`: two functions have one name in {', '.join(self.reward_names)}; give each its own."
            )
        weights = self.config.reward_weights
        if weights is not None and len(weights) != len(self.reward_funcs):
            names = ", ".join(self.reward_names)
            raise ValueError(
                f"`reward_weights` has {len(weights)} values for the rewards {names}; give one weight per reward."
            )
        if self.backend == "trl" and self.record_token_steps:
            raise ValueError(
                f"`record_token_steps` is {','.join(self.record_token_steps)}, but TRL's trainer does not record "
                "tokens; leave it out, or train with `backend` grpo_edu."
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
    def reward_names(self) -> list[str]:
        """Names of the reward functions, as they appear in the metrics; nothing is loaded for them."""
        return [reward_label(entry) for entry in self.reward_funcs]

    def load_data(self, *, backend: str | None = None) -> RunData:
        """Load problems and rewards.

        backend: the trainer whose columns the rewards may ask for; None: the run's.

        Raises ValueError and OSError for files, rewards and numbers that are not valid.
        """
        examples, problems = self._load_training_problems()
        heldout = load_problem_sets(vars(self), "heldout", n=self.num_heldout, argument="num_heldout")
        functions = resolve_rewards(self.reward_funcs)
        for part in (problems, heldout):
            check_rewards(functions, part, backend=backend or self.backend)
        return RunData(examples, problems, heldout, functions)

    def _load_training_problems(self) -> tuple[list[Problem], list[Problem]]:
        """Return the training problems for the prompt, and those to train on."""
        problems = load_problem_sets(vars(self), "train", n=self.num_problems, argument="num_problems")
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
            examples, _ = self._load_training_problems()
            if not all(example.solution for example in examples):
                raise ValueError("`num_examples`: these problems have no answers that could be shown; leave it out.")
            style = replace(style, examples=tuple((example.prompt, example.solution) for example in examples))
        return style

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> RunConfig:
        """Make a run's options from a flat mapping that holds fields of this class and of `GRPOConfig`.

        >>> RunConfig.from_settings({"data": "gsm8k", "beta": 0.1}).config.max_completion_length
        256
        """
        settings = use_current_names(settings)
        own = {name: settings[name] for name in RUN_FIELDS if name in settings}
        data = parse_data(own.get("data", LEVELS))
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
        rewards = [entry if isinstance(entry, str) else reward_name(entry) for entry in self.reward_funcs]
        return {**own, **lists, "reward_funcs": rewards, "config": self.config.to_dict()}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], reward_funcs: Rewards | None = None) -> RunConfig:
        """Read what `to_dict` returned, or what an earlier version of grpo_edu stored.

        reward_funcs: the functions of the stored names, needed for those that are not the package's own.

        Raises ValueError if a stored reward function is not given, or another one is, and for settings of a later
        version.
        """
        config = drop_retired(content["config"])
        if unknown := set(config) - set(CONFIG_FIELDS):
            raise ValueError(
                f"the run was stored by grpo_edu {content.get('grpo_edu')} with settings that this version does not "
                f"have: {', '.join(sorted(unknown))}; use that version, or start a new run."
            )
        content = use_current_names(content)
        own = {name: content[name] for name in RUN_FIELDS if name in content}
        own["reward_funcs"] = _stored_rewards(split_names(own.get("reward_funcs", "accuracy")), reward_funcs)
        return cls(**own, config=GRPOConfig(**config))


RUN_FIELDS = tuple(field.name for field in fields(RunConfig) if field.name != "config")
CONFIG_FIELDS = tuple(field.name for field in fields(GRPOConfig))


def use_current_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings under the names of today's fields; some may have names of `OLD_NAMES`.

    >>> use_current_names({"n": 60, "seed": 1})
    {'num_heldout': 60, 'seed': 1}
    """
    return {OLD_NAMES.get(name, name): value for name, value in settings.items()}


def _check_user_files(data: Sequence[str], heldout_file: str | None, columns: Sequence[str]) -> None:
    """Refuse options for files of your own that have no effect."""
    own = [name for name in data if is_user_dataset(name)]
    parse_columns(columns)
    for name, value in (("heldout_file", heldout_file), ("columns", columns)):
        if value and not own:
            raise ValueError(f"`{name}` is about a file of your own, but `data` names none: {', '.join(data)}.")
    if heldout_file and len(own) > 1:
        raise ValueError(f"`heldout_file` is one file, but `data` names {len(own)} files: {', '.join(own)}; join them.")


def _stored_rewards(names: Sequence[str], given: Rewards | None) -> tuple[str | RewardFunction, ...]:
    """Return the reward functions of a stored run: the package's by their names, others as they are given again."""
    wanted = [short_reward_name(name) for name in names]
    functions = {} if given is None else {short_reward_name(reward_name(one)): one for one in resolve_rewards(given)}
    known = all(name in REWARDS or ":" in name for name in wanted) if given is None else list(functions) == wanted
    if not known:
        raise ValueError(
            f"`reward_funcs`: the run was started with {', '.join(names)}; give the same functions again, in Python "
            "if it was started there."
        )
    return tuple(functions.get(name, name) for name in wanted)


def with_changed_paths(run_config: RunConfig, change: Callable[[str], str]) -> RunConfig:
    """Return options with other paths of the user's files of problems and rewards."""

    def reward(entry: str | RewardFunction) -> str | RewardFunction:
        place, sign, name = entry.rpartition(":") if isinstance(entry, str) else ("", "", "")
        return f"{change(place)}:{name}" if sign and place.endswith(".py") else entry

    return replace(
        run_config,
        data=tuple(change(name) if is_user_dataset(name) else name for name in run_config.data),
        heldout_file=None if run_config.heldout_file is None else change(run_config.heldout_file),
        reward_funcs=tuple(map(reward, run_config.reward_funcs)),
    )


def with_absolute_paths(run_config: RunConfig) -> RunConfig:
    """Return options whose files are found from every working folder."""

    def absolute(path: str) -> str:
        return str(Path(path).expanduser().absolute())

    return replace(
        with_changed_paths(run_config, absolute),
        data_path=None if run_config.data_path is None else absolute(run_config.data_path),
        system_prompt=None
        if run_config.system_prompt is None
        else _system_text(run_config.system_prompt) or NO_SYSTEM_PROMPT,
    )


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
    """Return True if a run starts from SmolLM2, or from a run or adapters that did."""
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
    """Read name=value entries; a value is read as JSON if it is JSON, and as a text otherwise.

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


def make_plain_chat_template(template: str) -> str:
    """Return a chat template that puts the question into a plain text, with nothing else around it.

    Raises ValueError if the text does not contain `{problem}` exactly once.

    >>> print(make_plain_chat_template("Q: {problem} A:"))
    {{ "Q: " }}{{ messages[-1]["content"] }}{{ " A:" }}
    """
    if template.count(PROBLEM_PLACEHOLDER) != 1:
        raise ValueError(
            f"`prompt_template` must contain {PROBLEM_PLACEHOLDER} exactly once, where the question goes, got "
            f"{template!r}."
        )
    before, after = (json.dumps(part, ensure_ascii=False) for part in template.split(PROBLEM_PLACEHOLDER))
    return f'{{{{ {before} }}}}{{{{ messages[-1]["content"] }}}}{{{{ {after} }}}}'
