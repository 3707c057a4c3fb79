"""What the commands of `grpo-edu` share: options made from dataclasses, and messages on stderr."""

from __future__ import annotations

import difflib
import inspect
import re
import sys
from argparse import SUPPRESS, ArgumentParser, BooleanOptionalAction, HelpFormatter, Namespace, _ArgumentGroup
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn, get_args, get_type_hints

from grpo_edu.problems.hub import meant_as_folder
from grpo_edu.runs.request import DATA, REWARDS, TRACKERS

_FLAGS = {"max_steps": ("--steps", "--max-steps")}
# The argument of a function, which its messages name → the option that sets it.
_ARGUMENTS = {"name": "model", "path": "data_path", "target_modules": "lora_targets"}
_METAVARS = {int: "N", float: "X", str: "TEXT"}

# The names that the texts of `TOPICS` leave out.
_NAMES = {"data": ", ".join([*DATA, "reasoning-gym:TASK"]), "rewards": ", ".join(REWARDS), "track": ", ".join(TRACKERS)}
# Options of a run by topic, with the words that `--help` shows; each is a field of RunRequest or GRPOConfig.
TOPICS: dict[str, dict[str, str]] = {
    "model": {
        "model": "a shipped model such as tiny, a folder (also of a run), or a Hub id",
        "dtype": "number format of the weights; auto measures which is faster here",
        "device": "where the model runs; auto: a GPU for large models",
    },
    "prompt": {
        "prompt_template": "text with {problem} in it, instead of the chat template",
        "system_prompt": "text, a file that holds it, or none",
        "num_examples": "solved training problems in front of every question",
        "chat_template_kwargs": "variables of the chat template: enable_thinking=false",
    },
    "problems": {
        "data": "sets, with commas: {data}, or a file of yours",
        "heldout": "your held-out problems (otherwise a fifth of your file)",
        "columns": "names in your file, such as question=problem,answer=target",
        "data_path": "folder with GSM8K's train.jsonl and test.jsonl",
        "num_problems": "training problems (otherwise all)",
        "shuffle_dataset": "use the problems in random order",
    },
    "length and seed": {
        "max_steps": "training steps; each samples one batch and learns from it",
        "prompts_per_step": "different problems per step",
        "num_generations": "G, completions per problem, at least 2",
        "max_completion_length": "most tokens of a completion",
        "seed": "random seed of everything that is sampled",
        "backend": "what trains",
    },
    "rewards": {
        "rewards": "with commas: {rewards}, FILE.py:function",
        "reward_weights": "one weight per reward (otherwise 1 each)",
        "multi_objective_aggregation": "add rewards first, or scale each first",
    },
    "advantages": {
        "advantage_estimator": "group mean, leave-one-out (rloo), or the reward itself",
        "scale_rewards": "what centered rewards are divided by",
        "max_resamples": "times per step that tied groups are replaced",
        "mask_truncated_completions": "learn nothing from completions cut off",
    },
    "evaluation and saving": {
        "n": "held-out problems for the evaluations",
        "greedy": "also evaluate without sampling (otherwise if that is quick)",
        "checkpoint_every": "steps between checkpoints; 0 writes none",
        "keep_completions": "most completions kept, with their rewards; 0: none",
        "track": "trackers on this computer, with commas: {track}",
    },
    "sampling": {
        "temperature": "1: the policy itself; lower: more certain",
        "top_p": "only the likeliest tokens with this total",
        "top_k": "only so many likeliest tokens; 0: all",
        "min_p": "least share of the likeliest token's probability",
        "repetition_penalty": "above 1: repeated tokens less likely",
    },
    "loss": {
        "loss_type": "which loss",
        "epsilon": "lower clip bound, as a distance from ratio 1",
        "epsilon_high": "upper clip bound (otherwise epsilon)",
        "delta": "upper bound of the ratio if the advantage is negative",
        "importance_sampling_level": "one ratio per token, or per completion (GSPO)",
        "num_iterations": "updates per batch; clipping needs at least 2",
    },
    "loss, further terms": {
        "off_policy_mask_threshold": "leave out bad completions grown this much less likely",
        "top_entropy_quantile": "share of tokens to learn from, the most uncertain ones",
        "entropy_coef": "bonus for the mean entropy of the tokens",
    },
    "distance from the reference (KL)": {
        "beta": "weight of the KL term; 0 needs no reference model",
        "use_bias_correction_kl": "multiply the KL term by the ratio",
        "sync_ref_model": "let the reference follow the policy",
        "ref_model_mixup_alpha": "how far it follows each time, from 0 to 1",
        "ref_model_sync_steps": "steps between two times",
    },
    "optimizer": {
        "optim": "AdamW, or Adafactor with almost no memory",
        "learning_rate": "size of the updates",
        "lr_scheduler_type": "how it changes over the steps",
        "warmup_steps": "steps in which it rises from 0",
        "weight_decay": "pulls the weights towards 0",
        "max_grad_norm": "longer gradients are shortened; 0: never",
        "abort_grad_norm": "longer gradients stop the run",
    },
    "LoRA adapters": {
        "lora_rank": "rank of the adapters; 0 trains all weights",
        "lora_alpha": "their scale times the rank (otherwise 2 x rank)",
        "lora_targets": "layers that get adapters",
    },
    "memory and speed": {
        "gradient_accumulation_steps": "micro-batches per batch; the result is the same",
        "gradient_checkpointing": "less memory, about a third more time",
        "optimizer_in_backward": "frees each gradient at once",
        "memory_budget_gib": "most memory to use (otherwise what is available)",
    },
    "sampling from a quantized copy": {
        "rollout_quantization": "how the copy is quantized",
        "importance_sampling_correction": "correct for the difference of copy and policy",
        "importance_sampling_clip_max": "largest weight of this correction",
    },
}


class Parser(ArgumentParser):
    """An ArgumentParser whose errors are one line, and whose help has room for long options."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=partial(HelpFormatter, max_help_position=36), **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"grpo-edu: error: {message}{self._nearest(message)}; see {self.prog} --help\n")

    def _nearest(self, message: str) -> str:
        """Suggest the most similar option where no command has the one that was typed."""
        found = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        if not found:  # only the parser of all commands says so
            return ""
        known = {flag for command in subparsers(self).values() for flag in command._option_string_actions}
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

    Kinds and defaults come from the fields, and the allowed values from the class's `choices`. A field of `TOPICS` is
    listed under its topic with the text there; the help of any other comes from the class's docstring (`field_help`). A
    field that holds names takes them with commas.

    Args:
        options: the dataclass. names: its fields to add; none means all but nested dataclasses.
    """
    hints, described = get_type_hints(options), field_help(options)
    choices: Mapping[str, tuple[str, ...]] = getattr(options, "choices", {})
    for field in fields(options):
        if (names and field.name not in names) or field.default is MISSING:
            continue
        topic = next((topic for topic, texts in TOPICS.items() if field.name in texts), None)
        text = (
            TOPICS[topic][field.name].replace("{" + field.name + "}", _NAMES.get(field.name, ""))
            if topic
            else described[field.name]
        )
        kind = next((kind for kind in get_args(hints[field.name]) if kind is not NoneType), hints[field.name])
        if hints[field.name] not in (kind, kind | None):  # a tuple of names, say, and not a union with None
            kind = hints[field.name]
        typed: dict[str, Any] = {"dest": field.name, "default": SUPPRESS}
        if kind is bool:
            typed["action"] = BooleanOptionalAction
        elif field.name in choices:
            typed["choices"], typed["metavar"] = choices[field.name], "NAME"
            text += f": {', '.join(choices[field.name])}"
        elif kind in _METAVARS:
            typed["type"], typed["metavar"] = kind, _METAVARS[kind]
        elif float in get_args(kind):
            typed["type"], typed["metavar"] = _comma_floats, "X,X"
        else:
            typed["metavar"] = "NAMES"
        typed["help"] = (text + _default_text(field.default)).replace("%", "%%")
        flags = _FLAGS.get(field.name, ("--" + field.name.replace("_", "-"),))
        (_group(command, topic) if topic else command).add_argument(*flags, **typed)


def _group(command: ArgumentParser, topic: str) -> _ArgumentGroup:
    """Return the group of a command's options about a topic; the groups stand in the order of `TOPICS`."""
    groups = {group.title: group for group in command._action_groups}
    if topic not in groups:
        groups |= {title: command.add_argument_group(title) for title in TOPICS}
    return groups[topic]


def _default_text(default: Any) -> str:
    if default in (None, ()):
        return ""
    return f" (default: {','.join(map(str, default)) if isinstance(default, tuple) else default})"


def field_help(options: type) -> dict[str, str]:
    """Return the text on each field in a dataclass's docstring, whose lines read `field, field: text.`

    >>> from grpo_edu.runs.request import RunRequest
    >>> field_help(RunRequest)["lora_targets"]
    'names of the layers that get adapters'
    """
    lines = re.findall(r"^([a-z_]+(?:, [a-z_]+)*): (.+)$", inspect.getdoc(options) or "", re.MULTILINE)
    found = {name: text.rstrip(".") for names, text in lines for name in names.split(", ")}
    return {field.name: found.get(field.name, "") for field in fields(options)}


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
    marked = r"`(\w+)`|^(\w+)(?=:? )|(?<![\w/.-])([a-z]+(?:_[a-z]+)+)(?![\w/.(-])"
    return re.sub(marked, lambda found: flags.get(found[1] or found[2] or found[3], found[0]), message)


def say_loading(model: str, argument: str = "model") -> None:
    """Tell a person at a terminal that libraries and weights are loading. argument: what names the model.

    Raises FileNotFoundError at once for a folder that does not exist; to import the libraries first takes seconds.
    """
    is_folder = argument == "resume" or meant_as_folder(model)
    if is_folder and not Path(model).expanduser().is_dir():
        hub = ", or give a Hub id (owner/name)" if argument == "model" else ""
        raise FileNotFoundError(f"`{argument}`: folder {model} does not exist. Check the path{hub}.")
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
