"""The options of `grpo-edu`; those of a training's settings are made from `GRPOConfig` itself."""

from __future__ import annotations

import difflib
import inspect
import re
from argparse import SUPPRESS, ArgumentParser, BooleanOptionalAction
from dataclasses import fields
from types import NoneType
from typing import Any, NoReturn, get_args, get_type_hints

from grpo_edu import __version__
from grpo_edu.cli_app import add_app_options
from grpo_edu.cli_bench import add_bench_options
from grpo_edu.cli_cluster import add_cluster_options
from grpo_edu.cli_curriculum import add_curriculum_options
from grpo_edu.cli_grade import add_grade_options
from grpo_edu.cli_profiles import add_profiles_options
from grpo_edu.cli_sweep import add_sweep_options
from grpo_edu.cli_train import add_train_options
from grpo_edu.config import (
    ADVANTAGE_ESTIMATORS,
    IMPORTANCE_SAMPLING_LEVELS,
    LOSS_TYPES,
    OPTIMIZERS,
    QUANTIZATION_SCHEMES,
    SCALE_REWARDS,
    SCHEDULES,
    GRPOConfig,
)
from grpo_edu.problems import LEVELS
from grpo_edu.run_inputs import DATA, DTYPE_CHOICES, SPLITS

_CHOICES = {
    "loss_type": LOSS_TYPES,
    "importance_sampling_level": IMPORTANCE_SAMPLING_LEVELS,
    "scale_rewards": SCALE_REWARDS,
    "advantage_estimator": ADVANTAGE_ESTIMATORS,
    "lr_scheduler_type": SCHEDULES,
    "optim": OPTIMIZERS,
    "rollout_quantization": QUANTIZATION_SCHEMES,
}
_READERS = {int: (int, "N"), float: (float, "X"), str: (str, "NAME")}
_OTHER_FLAGS = {"max_steps": ("--steps", "--max-steps")}


class _Parser(ArgumentParser):
    """An ArgumentParser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"grpo-edu: error: {message}{self._nearest(message)}; see {self.prog} --help\n")

    def _nearest(self, message: str) -> str:
        """For an option that no command has: the one that is spelled most like it."""
        found = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        if not found:  # only the parser of all commands says so
            return ""
        (commands,) = (action.choices for action in self._actions if isinstance(action.choices, dict))
        known = {flag for command in commands.values() for flag in command._option_string_actions}
        close = difflib.get_close_matches(found[1], known, n=1) if found[1] not in known else []
        return f"; do you mean {close[0]}?" if close else ""


def build_parser() -> ArgumentParser:
    """The parser of `grpo-edu`; parsed arguments name the command as `command`."""
    parser = _Parser(prog="grpo-edu", description="GRPO on an ordinary CPU.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"grpo-edu {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    doctor = _command(commands, "doctor", "look whether this machine has what the course needs")
    _add_doctor_options(doctor)
    train = _command(commands, "train", "train a policy with GRPO, judge it before and after, keep the run")
    _add_model_and_data(train, only_given=True)
    add_train_options(train)
    _add_config_options(train)
    profiles = _command(commands, "profiles", "list the profiles of train, or show what one sets")
    add_profiles_options(profiles)
    evaluate = _command(commands, "evaluate", "accuracy of a policy on held-out problems")
    _add_model_and_data(evaluate)
    _add_evaluation_options(evaluate)
    curriculum = _command(commands, "curriculum", "train stage after stage, and measure what is forgotten")
    add_curriculum_options(curriculum)
    app = _command(commands, "app", "open the dashboards in a browser")
    add_app_options(app)
    grade = _command(commands, "grade", "grade a folder of students' exercises, each apart from the others")
    add_grade_options(grade)
    cluster = _command(commands, "cluster", "write a training down as a job of a Slurm cluster")
    add_cluster_options(cluster)
    sweep = _command(commands, "sweep", "search for better settings, and judge the best on new seeds")
    _add_model_and_data(sweep, only_given=True)
    add_sweep_options(sweep)
    bench = _command(commands, "bench", "measure this machine: a row for docs/hardware.md")
    add_bench_options(bench)
    for command in (doctor, train, profiles, evaluate, curriculum, app, grade, sweep, bench, cluster):
        command.add_argument("--json", action="store_true", help="print one JSON object last on stdout")
        command.add_argument("--debug", action="store_true", help="show the whole traceback of an error")
    return parser


def _command(commands: Any, name: str, text: str) -> ArgumentParser:
    return commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False)


def _add_model_and_data(command: ArgumentParser, *, only_given: bool = False) -> None:
    """Options of train and evaluate. only_given: what is not typed is absent, since a profile may set it."""

    def add(flag: str, default: Any, help: str, **options: Any) -> None:
        command.add_argument(flag, default=SUPPRESS if only_given else default, help=help, **options)

    add("--model", "tiny", "a shipped model, a folder (a run's too) or a Hub id (default: tiny)")
    known = ", ".join((*DATA, "reasoning-gym:TASK"))
    add("--data", ",".join(LEVELS), f"of {known}; several with commas (default: the three levels)", metavar="SETS")
    add("--dtype", "float32", "of the weights; auto times both here and says which it takes (default: float32)",
        choices=DTYPE_CHOICES)  # fmt: skip
    add("--data-path", None, "where GSM8K's train.jsonl and test.jsonl are, without the Hub", metavar="FOLDER")
    everything = "" if only_given else "; of GSM8K alone all 1,319"
    add("--n", None, f"held-out problems, balanced over the sets (default: 300{everything})", type=int)


def _add_doctor_options(doctor: ArgumentParser) -> None:
    doctor.add_argument("--startup", action="store_true",
        help="also measure, in a fresh process, where the time up to the first training step goes")  # fmt: skip


def _add_evaluation_options(evaluate: ArgumentParser) -> None:
    add = evaluate.add_argument
    add("--split", choices=SPLITS, default="heldout", help="(default: heldout, which of GSM8K is test)")
    add("--seed", type=int, default=0, help="of the sampling (default: 0)")
    add("--temperature", type=float, default=1.0, help="0 is greedy (default: 1.0)")
    add("--max-completion-length", type=int, metavar="N",
        help="most tokens of a completion (default: 96, for GSM8K 256)")  # fmt: skip


def _add_config_options(train: ArgumentParser) -> None:
    """One option a field of GRPOConfig, its help from the class's docstring; only what is given is set."""
    group = train.add_argument_group("settings of GRPO")
    hints, texts = get_type_hints(GRPOConfig), field_help()
    for field in fields(GRPOConfig):
        kinds = [kind for kind in get_args(hints[field.name]) if kind is not NoneType] or [hints[field.name]]
        flags = _OTHER_FLAGS.get(field.name, ("--" + field.name.replace("_", "-"),))
        text = f"{texts[field.name]} (default: {field.default})".replace("%", "%%")
        options: dict[str, Any] = {"dest": field.name, "default": SUPPRESS, "help": text}
        if kinds[0] is bool:
            options["action"] = BooleanOptionalAction
        else:
            options["choices"] = _CHOICES.get(field.name)
            options["type"], options["metavar"] = _READERS.get(kinds[0], (_comma_floats, "X,X"))
            if field.name in _CHOICES:
                options["metavar"] = None
        group.add_argument(*flags, **options)


def field_help() -> dict[str, str]:
    """The words on each field in GRPOConfig's docstring, whose lines read `field, field: words.`

    >>> field_help()["temperature"]
    'of the sampling'
    """
    lines = re.findall(r"^([a-z_]+(?:, [a-z_]+)*): (.+)$", inspect.getdoc(GRPOConfig) or "", re.MULTILINE)
    found = {name: text.rstrip(".") for names, text in lines for name in names.split(", ")}
    return {field.name: found.get(field.name, "") for field in fields(GRPOConfig)}


def _comma_floats(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


_comma_floats.__name__ = "comma-separated number"  # argparse: invalid … value
