"""What the commands of `grpo-edu` share: options made from dataclasses, and messages on stderr."""

from __future__ import annotations

import difflib
import re
import sys
from argparse import SUPPRESS, ArgumentParser, BooleanOptionalAction, HelpFormatter, Namespace, _ArgumentGroup
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn, get_args, get_type_hints

from grpo_edu.config import field_help
from grpo_edu.problems.hub import meant_as_folder, no_folder

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
# The argument of a function, which its messages name → the option that sets it.
_ARGUMENTS = {
    "name": "model",
    "path": "data_path",
    "target_modules": "lora_targets",
    "seconds": "time_limit",
    "total_seconds": "total_time",
}
_METAVARS = {int: "N", float: "X", str: "TEXT"}

# Options of a run by topic, in the order of `--help`; each is a field of RunConfig or GRPOConfig, which has the text.
TOPICS = {
    topic: names.split()
    for topic, names in {
        "model": "model dtype device",
        "prompt": "prompt_template system_prompt num_examples chat_template_kwargs",
        "problems": "data heldout_file columns data_path num_problems shuffle_dataset",
        "length and seed": "max_steps prompts_per_step num_generations max_completion_length seed backend",
        "rewards": "reward_funcs reward_weights",
        "advantages": "advantage_estimator scale_rewards max_resamples mask_truncated_completions",
        "evaluation and saving": "num_heldout greedy checkpoint_every max_saved_completions "
        "record_token_steps report_to",
        "sampling": "temperature top_p top_k",
        "loss": "loss_type epsilon epsilon_high importance_sampling_level num_iterations entropy_coef",
        "distance from the reference (KL)": "beta use_bias_correction_kl",
        "optimizer": "optim learning_rate lr_scheduler_type warmup_steps weight_decay max_grad_norm abort_grad_norm",
        "LoRA adapters": "lora_rank lora_alpha lora_targets",
        "memory and speed": "gradient_accumulation_steps gradient_checkpointing memory_budget_gib",
        "sampling from another policy": "rollout_quantization rollout_lag "
        "importance_sampling_correction importance_sampling_clip_max",
    }.items()
}


class Parser(ArgumentParser):
    """An ArgumentParser whose errors are one line, and whose help has room for long options.

    build_whole: makes this parser with the options of all commands; None for the parser of one command.
    """

    build_whole: Callable[[], ArgumentParser] | None = None

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=partial(HelpFormatter, max_help_position=36), **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"grpo-edu: error: {message}{self._nearest(message)}; see {self.prog} --help\n")

    def _nearest(self, message: str) -> str:
        """Suggest the most similar option where no command has the one that was typed."""
        found = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        if not found or self.build_whole is None:  # only the parser of all commands says so
            return ""
        whole = self.build_whole()
        known = {flag for command in subparsers(whole).values() for flag in command._option_string_actions}
        close = difflib.get_close_matches(found[1], known, n=1) if found[1] not in known else []
        return f"; do you mean {close[0]}?" if close else ""


def subparsers(parser: ArgumentParser) -> dict[str, ArgumentParser]:
    """Return the parser of each command."""
    return next((action.choices for action in parser._actions if isinstance(action.choices, dict)), {})


def add_common_options(command: ArgumentParser, *, json: bool = True) -> None:
    """Add the options that every command has. json: whether it has a result to print."""
    if json:
        command.add_argument("--json", action="store_true", help="print one JSON object last on stdout")
    command.add_argument("--debug", action="store_true", help="show the whole traceback of an error")


def add_options(command: ArgumentParser, options: type, names: Collection[str] = ()) -> None:
    """Add one option per field of a dataclass; an option that is not typed is missing in the parsed arguments.

    Kinds, defaults and texts come from the fields, and the allowed values from the class's `choices`. A field of
    `TOPICS` is listed under its topic. A field that holds names takes them with commas.

    Args:
        options: the dataclass. names: its fields to add; none means all but nested dataclasses.
    """
    hints, described = get_type_hints(options), field_help(options)
    choices: Mapping[str, Sequence[str]] = getattr(options, "choices", {})
    for field in fields(options):
        if (names and field.name not in names) or field.default is MISSING:
            continue
        topic = next((topic for topic, names in TOPICS.items() if field.name in names), None)
        text = described[field.name]
        kind = next((kind for kind in get_args(hints[field.name]) if kind is not NoneType), hints[field.name])
        if hints[field.name] not in (kind, kind | None):  # a tuple of names, say, and not a union with None
            kind = hints[field.name]
        typed: dict[str, Any] = {"dest": field.name, "default": SUPPRESS}
        if kind is bool:
            typed["action"] = BooleanOptionalAction
        elif field.name in choices:
            typed["choices"], typed["metavar"] = choices[field.name], "NAME"
            text += ": CHOICES"  # argparse writes them, when it shows the help
        elif kind in _METAVARS:
            typed["type"], typed["metavar"] = kind, _METAVARS[kind]
        elif float in get_args(kind):
            typed["type"], typed["metavar"] = _comma_floats, "X,X"
        else:
            typed["metavar"] = "NAMES"
        typed["help"] = (text + _default_text(field.default)).replace("%", "%%").replace("CHOICES", "%(choices)s")
        flags = _FLAGS.get(field.name, ("--" + field.name.replace("_", "-"),))
        (_group(command, topic) if topic else command).add_argument(*flags, **typed)


def _group(command: ArgumentParser, topic: str) -> _ArgumentGroup:
    """Return the group of a command's options about a topic; the groups are in the order of `TOPICS`."""
    groups = {group.title: group for group in command._action_groups}
    if topic not in groups:
        groups |= {title: command.add_argument_group(title) for title in TOPICS}
    return groups[topic]


def _default_text(default: Any) -> str:
    if default in (None, ()):
        return ""
    return f" (default: {','.join(map(str, default)) if isinstance(default, tuple) else default})"


def _comma_floats(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


_comma_floats.__name__ = "comma-separated number"  # argparse: invalid … value


def given_options(arguments: Namespace, names: Collection[str]) -> dict[str, Any]:
    """Return what was typed of these options."""
    return {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}


def refuse_with_resume(arguments: Namespace, names: Collection[str]) -> None:
    """Raise ValueError where one of these options was typed next to --resume."""
    for name in given_options(arguments, names):
        raise ValueError(
            f"`{name}` cannot be combined with --resume, because a resumed run keeps its settings; leave it out, or "
            "start a new run."
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
    marked = r"`(\w+)`|^(\w+)(?=:? )|(?<![\w/.-])([a-z]+(?:_[a-z]+)+)(?![\w/.(-])"
    return re.sub(marked, lambda found: flags.get(found[1] or found[2] or found[3], found[0]), message)


def say_loading(model: str, argument: str = "model") -> None:
    """Tell a person at a terminal that libraries and weights are loading. argument: what names the model.

    Raises FileNotFoundError at once for a folder that does not exist; to import the libraries first takes seconds.
    """
    is_folder = argument == "resume" or meant_as_folder(model)
    path = Path(model).expanduser()
    if is_folder and not (path.is_dir() or (path.is_file() and path.suffix.lower() == ".gguf")):
        hub = ", or give a Hub id (owner/name)" if argument == "model" else ""
        raise FileNotFoundError(f"`{argument}`: {no_folder(model)}. Check the path{hub}.")
    if sys.stderr.isatty():
        print(f"grpo-edu: loading {model}", file=sys.stderr)


def complain(text: str, error: BaseException | None = None) -> None:
    """Print one line on stderr, with the error's notes, which say what was kept."""
    kept = "".join(f"; {note}" for note in notes_of(error))
    text = text.removesuffix(".") if kept else text
    print("grpo-edu: " + " ".join(f"{text}{kept}".split()), file=sys.stderr)


def notes_of(error: BaseException | None) -> list[str]:
    """Return the notes that were added to an error."""
    return getattr(error, "__notes__", [])


def chosen_dtype(dtype: str, model: str, *, trains_weights: bool) -> str:
    """Return the number format to load the model in, and say on stderr what was measured for the choice."""
    if dtype == "float32":
        return dtype
    from grpo_edu.machine.probe import choose_dtype
    from grpo_edu.runs.folder import model_source

    chosen, why = choose_dtype(dtype, model_source(model), trains_weights=trains_weights)
    print(f"grpo-edu: {why}", file=sys.stderr)
    return chosen
