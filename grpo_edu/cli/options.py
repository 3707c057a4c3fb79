"""What the commands of `grpo-edu` share: options made from the fields of dataclasses, and messages on stderr."""

from __future__ import annotations

import difflib
import re
import sys
from argparse import (
    SUPPRESS,
    Action,
    ArgumentParser,
    BooleanOptionalAction,
    HelpFormatter,
    Namespace,
    _ActionsContainer,
)
from collections.abc import Collection
from contextlib import suppress
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from grpo_edu.config import Options, field_bounds, field_help, field_types
from grpo_edu.problems.hub import is_gguf, looks_like_path, missing_folder_message, model_source
from grpo_edu.runs.profiles import PROFILES

# Fields whose options have another name: the one of version 0.3.0 and before, or a shorter one.
_FLAGS = {
    "max_steps": ("--steps", "--max-steps"),
    "num_heldout": ("--n",),
    "heldout_file": ("--heldout",),
    "reward_funcs": ("--rewards",),
    "max_saved_completions": ("--keep-completions",),
    "record_token_steps": ("--inspect-steps",),
    "report_to": ("--track",),
}
# What TRL and other programs call an option → its name here.
_NAMES_ELSEWHERE = {
    "--lr": "--learning-rate",
    "--batch-size": "--prompts-per-step",
    "--per-device-train-batch-size": "--prompts-per-step",
    "--epochs": "--steps",
    "--num-train-epochs": "--steps",
    "--step": "--steps",
    "--output-dir": "--output",
    "--model-name-or-path": "--model",
    "--dataset-name": "--data",
    "--resume-from-checkpoint": "--resume",
    **{"--" + field.replace("_", "-"): flags[0] for field, flags in _FLAGS.items()},
}
# The argument of a function, which its messages name → the option that sets it.
_ARGUMENTS = {
    "name": "model",
    "path": "data_path",
    "target_modules": "lora_targets",
    "seconds": "time_limit",
    "total_seconds": "total_time",
}
# All but tabs and ends of lines; the last two groups change the direction in which a line is written.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_METAVARS = {int: "N", float: "X", str: "TEXT"}
_METAVARS_OF_FIELDS = {"model": "MODEL", "heldout_file": "FILE", "data_path": "DIR", "environment": "DIR"}

# Options of a run, which are fields of RunConfig and GRPOConfig: those that `--help` shows, and the topics of the rest.
FIRST = "model data reward_funcs num_heldout max_steps num_generations learning_rate seed".split()
TOPICS = {
    topic: names.split()
    for topic, names in {
        "model": "dtype device backend",
        "prompt": "prompt_template system_prompt num_examples chat_template_kwargs",
        "problems": "heldout_file columns data_path num_problems shuffle_dataset prompts_per_step",
        "rewards and advantages": "reward_weights advantage_estimator scale_rewards max_resamples "
        "mask_truncated_completions",
        "evaluation and saving": "greedy checkpoint_every max_saved_completions record_token_steps report_to",
        "sampling": "max_completion_length temperature top_p top_k",
        "loss": "loss_type epsilon epsilon_high importance_sampling_level num_iterations entropy_coef",
        "distance from the reference (KL)": "beta use_bias_correction_kl",
        "optimizer": "optim lr_scheduler_type warmup_steps weight_decay max_grad_norm abort_grad_norm",
        "LoRA adapters": "lora_rank lora_alpha lora_targets",
        "memory and speed": "gradient_accumulation_steps gradient_checkpointing memory_budget_gib",
        "sampling from another policy": "rollout_quantization rollout_lag "
        "importance_sampling_correction importance_sampling_clip_max",
    }.items()
}


class Parser(ArgumentParser):
    """An ArgumentParser whose errors are one line, which names the most similar option of the same command.

    has_help_all: whether `--help` shows the options outside of groups only, and `--help-all` shows all.
    """

    has_help_all = False

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=partial(HelpFormatter, max_help_position=36), allow_abbrev=False, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._suggestion(unknown[0])}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"grpo-edu: error: {message}; see {self.prog} --help\n")

    def format_help(self) -> str:
        groups = self._action_groups
        if self.has_help_all:
            self._action_groups = groups[:2]  # positional arguments, and options
        text = super().format_help()
        self._action_groups = groups
        return text

    def _suggestion(self, typed: str) -> str:
        """Return the option of this command that was probably meant, in brackets, or ""."""
        name = typed.partition("=")[0].replace("_", "-")
        meant = _NAMES_ELSEWHERE.get(name, "")
        if meant not in self._option_string_actions:
            known = {flag.lstrip("-"): flag for flag in self._option_string_actions}
            close = difflib.get_close_matches(name.lstrip("-"), known, n=1) if name.startswith("--") else []
            meant = known[close[0]] if close else ""
        return f" (do you mean {meant}?)" if meant else ""


class HelpAll(Action):
    """Shows the help with all groups of options."""

    def __call__(self, parser: Any, *typed: object) -> None:
        parser.has_help_all = False
        parser.print_help()
        parser.exit()


def add_common_options(command: ArgumentParser, *, json: bool = True) -> None:
    """Add the options that every command has. json: whether it has a result to print."""
    add = command.add_argument_group("every command").add_argument
    if json:
        add("--json", action="store_true", help="print one JSON object last on stdout")
    add("--debug", action="store_true", help="show the whole traceback of an error")


def add_profile_option(command: _ActionsContainer, default: str = "") -> None:
    """Add the option that names the settings to start from. default: the profile that is taken without it, if any."""
    command.add_argument(
        "--profile",
        "--like",
        metavar="NAME",
        default=default or SUPPRESS,
        help=f"settings to start from: {', '.join(PROFILES)}, a JSON file, or the folder of a run, as --like RUN; what "
        f"is typed overrides them{_default(default or None)}",
    )


def add_options(command: _ActionsContainer, options: type, names: Collection[str]) -> None:
    """Add one option per field of a dataclass; an option that is not typed is missing in the parsed arguments.

    Kinds, allowed names, defaults and texts come from the fields. A field that holds names takes them with commas.

    Args:
        options: the dataclass. names: its fields to add; names of other dataclasses are ignored.
    """
    types, bounds, texts = field_types(options), field_bounds(options), field_help(options)
    for field in fields(options):
        if field.name not in names or field.default is MISSING:
            continue
        flags = _FLAGS.get(field.name, ("--" + field.name.replace("_", "-"),))
        form = _form(field.name, types[field.name][0], bounds.get(field.name))
        text = texts[field.name].replace("%", "%%") + ": %(choices)s" * ("choices" in form) + _default(field.default)
        command.add_argument(*flags, dest=field.name, default=SUPPRESS, help=text, **form)


def _form(name: str, kind: Any, bound: object) -> dict[str, Any]:
    """Return the arguments of `add_argument` for a field, from its type and from what its values may be."""
    if kind is bool:
        return {"action": BooleanOptionalAction}
    if isinstance(bound, Options):
        return {"choices": bound, "metavar": "NAME"}
    if kind == tuple[float, ...]:
        return {"type": _comma_floats, "metavar": "X,X"}
    if kind in _METAVARS:
        return {"type": kind, "metavar": _METAVARS_OF_FIELDS.get(name, _METAVARS[kind])}
    return {"metavar": "NAMES"}


def _default(default: Any) -> str:
    if default in (None, ()):
        return ""
    return f" (default: {','.join(map(str, default)) if isinstance(default, tuple) else default})"


def _comma_floats(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


_comma_floats.__name__ = "comma-separated number"  # argparse: invalid … value


def given_options(arguments: Namespace, names: Collection[str]) -> dict[str, Any]:
    """Return what was typed of these options."""
    return {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}


def refuse_with_resume(arguments: Namespace, allowed: Collection[str] = ()) -> None:
    """Raise ValueError if an option was typed next to --resume that is not allowed there."""
    for name in vars(arguments):
        if name not in ("command", "typed", "resume", "json", "debug", *allowed):
            raise ValueError(
                f"`{name}` cannot be combined with --resume, because a resumed run keeps its settings; leave it out, "
                "or start a new run."
            )


def option_names(message: str, command: ArgumentParser) -> str:
    """Write the options of a command in an error message as they are typed: `max_steps` becomes --steps.

    Messages about a line of a file ("mine.json:3: …") stay as they are, since its fields have Python's names.
    """
    if re.match(r"\S+:\d+: ", message):
        return message
    flags = {action.dest: action.option_strings[0] for action in command._actions if action.option_strings}
    flags |= {argument: flags[option] for argument, option in _ARGUMENTS.items() if option in flags}
    if any(action.dest == "run" for action in command._actions):  # an argument without a flag, which names the model
        flags |= {"name": "run", "model": "run"}
    if any(action.dest == "reward" for action in command._actions):
        flags |= dict.fromkeys(("reward_func", "reward_funcs"), "REWARD")
    marked = r"`(\w+)`|^(\w+)(?=:? )|(?<![\w/.-])([a-z]+(?:_[a-z]+)+)(?![\w/.(-])"
    return re.sub(marked, lambda found: flags.get(found[1] or found[2] or found[3], found[0]), message)


def say_loading(model: str, argument: str = "model") -> None:
    """Tell a person at a terminal that libraries and weights are loading. argument: what names the model.

    Raises FileNotFoundError at once for a folder that does not exist; to import the libraries first takes seconds.
    """
    is_folder = argument == "resume" or looks_like_path(model)
    path = Path(model).expanduser()
    if is_folder and not (path.is_dir() or (path.is_file() and is_gguf(model))):
        hub = ", or give a Hub id (owner/name)" if argument == "model" else ""
        raise FileNotFoundError(f"`{argument}`: {missing_folder_message(model)}. Check the path{hub}.")
    if sys.stderr.isatty():
        print(f"grpo-edu: loading {model}", file=sys.stderr)


def complain(text: str, error: BaseException | None = None) -> None:
    """Print one line on stderr, with the error's notes, which say what was kept."""
    kept = "".join(f"; {note}" for note in notes_of(error))
    text = text.removesuffix(".") if kept else text
    with suppress(OSError):  # the terminal may have been closed
        print(visible("grpo-edu: " + " ".join(f"{text}{kept}".split())), file=sys.stderr)


def visible(text: str) -> str:
    """Return text of a model or a file for a terminal, which would obey its control characters, as visible codes.

    >>> visible("a\\x1b[2Jb\\nc")
    'a\\\\x1b[2Jb\\nc'
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def notes_of(error: BaseException | None) -> list[str]:
    """Return the notes that were added to an error."""
    return getattr(error, "__notes__", [])


def chosen_dtype(dtype: str, model: str, *, trains_weights: bool) -> str:
    """Return the number format to load the model in, and say on stderr what was measured for the choice."""
    if dtype == "float32":
        return dtype
    from grpo_edu.machine.probe import choose_dtype

    chosen, why = choose_dtype(dtype, model_source(model), trains_weights=trains_weights)
    print(f"grpo-edu: {why}", file=sys.stderr)
    return chosen
