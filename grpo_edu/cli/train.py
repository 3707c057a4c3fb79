"""`grpo-edu train`, `grpo-edu evaluate` and `grpo-edu profiles`: a thin layer over `grpo_edu.runs`."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from grpo_edu.cli.options import add_options, chosen_dtype, complain, given_options, refuse_with_resume, say_loading
from grpo_edu.config import GRPOConfig
from grpo_edu.problems.templates import LEVELS
from grpo_edu.runs.effects import Need, check_effects
from grpo_edu.runs.folder import RunFolder
from grpo_edu.runs.loading import SPLITS
from grpo_edu.runs.options import CONFIG_FIELDS, RUN_FIELDS, RunConfig
from grpo_edu.runs.profiles import PROFILES, load_profile, profile_text, profiles_text, read_abouts

if TYPE_CHECKING:
    from grpo_edu.runs.summary import RunResult

_PLACES = ("output", "overwrite")
_EVALUATE_NEEDS = (Need("seed", lambda run: run["temperature"] > 0, "a `temperature` above 0"),)


def add_run_options(command: ArgumentParser, names: Collection[str] = RUN_FIELDS) -> None:
    """Add options of a run, which are fields of `RunConfig`; only what is typed is set."""
    add_options(command, RunConfig, names)


def add_folder_options(command: ArgumentParser, what: str) -> None:
    """Add the options that say where a run is kept. what: "run", "sweep" or the like."""
    add = partial(command.add_argument_group("folder").add_argument, default=SUPPRESS)
    add("--output", metavar="DIR", help=f"folder of the {what} (default: a new one in runs/)")
    add("--overwrite", action="store_true", help=f"replace the {what} in the folder")
    add("--resume", metavar="DIR", help=f"resume the {what} in this folder, with its own settings")


def add_train_options(command: ArgumentParser) -> None:
    """Add the options of `grpo-edu train`; only what is typed is set."""
    command.add_argument(
        "--profile",
        metavar="NAME",
        default=SUPPRESS,
        help=f"settings to start from: {', '.join(PROFILES)}, or a JSON file; what is typed overrides them",
    )
    add_folder_options(command, "run")
    add_run_options(command)
    add_options(command, GRPOConfig)


def run_train_command(arguments: Namespace) -> int:
    """Start or resume a run, and print its result; returns the exit code."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but `grpo-edu train` runs in one process; let accelerate or "
            "torchrun start `trl grpo` instead (docs/cluster.md)."
        )
    if hasattr(arguments, "resume"):
        refuse_with_resume(arguments, ("profile", *RUN_FIELDS, *CONFIG_FIELDS, *_PLACES))
        say_loading(arguments.resume, "resume")
        from grpo_edu.runs.run import resume_training

        result = resume_training(arguments.resume)
    else:
        settings = given_options(arguments, (*RUN_FIELDS, *CONFIG_FIELDS))
        request = load_profile(getattr(arguments, "profile", "standard")).override(settings).request()
        check_effects(settings, request.to_settings())
        say_loading(request.model)
        from grpo_edu.runs.run import start_run

        dtype = chosen_dtype(request.dtype, request.model, trains_weights=not request.lora_rank)
        places = given_options(arguments, _PLACES)
        result = start_run(replace(request, dtype=dtype), command=arguments.typed, say=say_once, **places)
    if arguments.json or not result.interrupted:
        print(json.dumps(result.to_dict()) if arguments.json else training_text(result), flush=True)
    if result.interrupted:
        done = f"{len(result.history)} of {result.config.max_steps} steps"
        further = (
            f"; resume it with --resume {shlex.quote(str(result.output))}" if RunFolder(result.output).resumable else ""
        )
        complain(f"interrupted after {done}; model, metrics and summary are saved in {result.output}{further}")
        return 130
    return 0


def say_once(text: str) -> None:
    """Show the first look at a run to a person at a terminal; a pipe gets no chatter, and the run's folder keeps it."""
    if sys.stderr.isatty():
        print(text, end="", file=sys.stderr, flush=True)


def training_text(result: RunResult) -> str:
    """Return what a terminal shows of a run."""
    from grpo_edu.runs.summary import accuracy_text, outcome, throughput_text

    rows = [("sampled", result.before, result.after)]
    if result.greedy_before is not None:
        rows.append(("greedy", result.greedy_before, result.greedy_after))
    lines = [f"Accuracy on {result.before.n} held-out problems, with 95% intervals"]
    for name, before, after in rows:
        lines.append(f"  {name:<8} before {accuracy_text(before):<22} after {accuracy_text(after)}")
    if result.p_value is not None:
        lines.append(f"  sampled, before against after: p = {result.p_value:.2g} (exact McNemar test)")
    lines += [f"Warning: {re.sub(r'`([a-z_]+)`', _flag, text)}" for text in result.warnings]
    lines += [outcome(result), throughput_text(result), f"Saved in {result.output}; summary.md there has the details."]
    return "\n".join(lines)


def _flag(setting: re.Match[str]) -> str:
    """Return the option of a setting; the name of a metric stays as it is."""
    is_option = setting[1] in CONFIG_FIELDS or setting[1] in RUN_FIELDS
    return "--" + setting[1].replace("_", "-") if is_option else setting[0]


def add_evaluate_options(command: ArgumentParser) -> None:
    """Add the options of `grpo-edu evaluate`."""
    add_run_options(command, ("model", "data", "heldout_file", "columns", "data_path", "dtype", "device"))
    add = command.add_argument
    scores = "FILE.py:function, for problems without an answer: right is what it pays at least 1"
    add("--rewards", default=SUPPRESS, dest="reward_funcs", metavar="NAME", help=scores)
    add(
        "--n",
        type=int,
        metavar="N",
        help="number of problems, balanced over the sets (default: 300; of GSM8K alone all 1,319)",
    )
    add(
        "--split",
        choices=SPLITS,
        default="heldout",
        help="which problems: heldout (default; for GSM8K this is test) or train",
    )
    add("--seed", type=int, default=SUPPRESS, metavar="N", help="random seed of the sampling (default: 0)")
    add(
        "--temperature",
        type=float,
        default=1.0,
        metavar="X",
        help="temperature of the sampling; 0 is greedy (default: 1.0)",
    )
    add(
        "--max-completion-length",
        type=int,
        metavar="N",
        help="maximum number of tokens per completion (default: 96, for GSM8K 256)",
    )


def run_evaluate_command(arguments: Namespace) -> int:
    """Evaluate a policy and print the report; returns the exit code."""
    model = getattr(arguments, "model", "tiny")
    check_effects(given_options(arguments, ["seed"]), vars(arguments), _EVALUATE_NEEDS)
    say_loading(model)
    from grpo_edu.runs.summary import report_evaluation

    asked: dict[str, Any] = {
        "data": getattr(arguments, "data", ",".join(LEVELS)),
        **given_options(arguments, ("data_path", "heldout_file", "columns", "reward_funcs", "device")),
        "split": arguments.split,
        "n": arguments.n,
        "seed": getattr(arguments, "seed", 0),
        "temperature": arguments.temperature,
        "max_completion_length": arguments.max_completion_length,
        "dtype": chosen_dtype(getattr(arguments, "dtype", "float32"), model, trains_weights=False),
    }
    report = report_evaluation(model, **asked)
    print(json.dumps({**asked, "model": model, **report.to_dict()}) if arguments.json else report.text())
    return 0


def add_profiles_options(command: ArgumentParser) -> None:
    """Add the options of `grpo-edu profiles`."""
    command.add_argument(
        "--show",
        metavar="NAME",
        help="print every setting of this profile, or of a JSON file; a star marks those that the profile sets itself",
    )


def run_profiles_command(arguments: Namespace) -> int:
    """List the profiles, or print the settings of one; returns the exit code."""
    if arguments.show is None:
        print(json.dumps(read_abouts()) if arguments.json else profiles_text())
        return 0
    profile = load_profile(arguments.show)
    if arguments.json:
        print(json.dumps({"name": profile.name, "about": profile.about, **profile.request().to_settings()}))
    else:
        print(profile_text(profile))
    return 0
