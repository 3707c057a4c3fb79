"""`grpo-edu train`, `evaluate`, `profiles` and `reward-check`: a thin layer over `grpo_edu.runs`."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import sys
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from grpo_edu.cli.options import (
    FIRST,
    TOPICS,
    HelpAll,
    Parser,
    add_options,
    add_profile_option,
    chosen_dtype,
    complain,
    given_options,
    refuse_with_resume,
    say_loading,
    visible,
)
from grpo_edu.config import GRPOConfig
from grpo_edu.problems.templates import Problem
from grpo_edu.rewards import RewardFunction
from grpo_edu.runs.effects import OptionRequirement, reject_ineffective_options
from grpo_edu.runs.folder import RunFolder
from grpo_edu.runs.loading import SPLITS, is_user_dataset
from grpo_edu.runs.options import CONFIG_FIELDS, RUN_FIELDS, RunConfig, default_config
from grpo_edu.runs.profiles import load_profile, profile_text, profiles_text, read_abouts
from grpo_edu.runs.user_rewards import check_columns

if TYPE_CHECKING:
    from grpo_edu.runs.summary import RunResult

_PLACES = ("output", "overwrite")
_EVALUATE_NEEDS = (OptionRequirement("seed", lambda run: run["temperature"] > 0, "a `temperature` above 0"),)
_FILES = ("data", "heldout_file", "columns", "data_path")
_EVALUATED = (*_FILES, *"reward_funcs reward_weights device split n seed temperature max_completion_length".split())
_TRIED = 8  # problems, of which each is answered in every way
_MARGIN = 1e-6  # below it two float32 means count as equal


def add_folder_options(command: ArgumentParser, what: str) -> None:
    """Add the options that say where a run is kept. what: "run", "sweep" or the like."""
    add = partial(command.add_argument, default=SUPPRESS)
    add("--output", metavar="DIR", help=f"folder of the {what} (default: a new one in runs/)")
    add("--overwrite", action="store_true", help=f"replace the {what} in the folder")
    add("--resume", metavar="DIR", help=f"resume the {what} in this folder, with its own settings")


def add_train_options(command: Parser) -> None:
    """Add the options of `grpo-edu train`; only what is typed is set."""
    add_run_options(command)
    add_folder_options(command, "run")


def add_run_options(command: Parser, *, without: Collection[str] = ()) -> None:
    """Add the options of a training run, by topic. without: fields for which there is no option."""
    command.usage = f"{command.prog} [OPTIONS]"
    command.has_help_all = True
    command.add_argument("--help-all", action=HelpAll, nargs=0, default=SUPPRESS, help="show all options, by topic")
    add_profile_option(command)
    for topic, names in {"": FIRST, **TOPICS}.items():
        group = command.add_argument_group(topic) if topic else command
        for options in (RunConfig, GRPOConfig):
            add_options(group, options, [name for name in names if name not in without])


def run_train_command(arguments: Namespace) -> int:
    """Start or resume a run, and print its result; returns the exit code."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but `grpo-edu train` runs in one process; let accelerate or "
            "torchrun start `trl grpo` instead (docs/cluster.md)."
        )
    if hasattr(arguments, "resume"):
        refuse_with_resume(arguments)
        say_loading(arguments.resume, "resume")
        from grpo_edu.runs.run import resume_training

        result = resume_training(arguments.resume)
    else:
        settings = given_options(arguments, (*RUN_FIELDS, *CONFIG_FIELDS))
        request = load_profile(getattr(arguments, "profile", "standard")).override(settings).request()
        reject_ineffective_options(settings, request.to_settings())
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
        print(visible(text), end="", file=sys.stderr, flush=True)


def training_text(result: RunResult) -> str:
    """Return what a terminal shows of a run."""
    from grpo_edu.runs.summary import evaluation_tables, outcome, throughput_text

    lines = []
    for title, rows in evaluation_tables(result).items():
        lines.append(f"{title.capitalize()} on {result.before.n} held-out problems, with 95% intervals")
        lines += [f"  {name.partition(',')[0]:<8} before {before:<22} after {after}" for name, before, after in rows]
    if result.comparison is not None:
        lines.append(f"  sampled, paired (exact McNemar test, bootstrap): {result.comparison}")
    lines += [f"Warning: {re.sub(r'`([a-z_]+)`', _flag, text)}" for text in result.warnings]
    lines += [outcome(result), throughput_text(result), f"Saved in {result.output}; summary.md there has the details."]
    return "\n".join(lines)


def _flag(setting: re.Match[str]) -> str:
    """Return the option of a setting; the name of a metric stays as it is."""
    is_option = setting[1] in CONFIG_FIELDS or setting[1] in RUN_FIELDS
    return "--" + setting[1].replace("_", "-") if is_option else setting[0]


def add_evaluate_options(command: ArgumentParser) -> None:
    """Add the options of `grpo-edu evaluate`."""
    command.description = f"{command.description} A run's folder brings its problems, rewards, n, seed and length."
    add_options(command, RunConfig, ("model", *_FILES, "reward_funcs", "dtype", "device"))
    add_options(command, GRPOConfig, ["reward_weights"])
    add = partial(command.add_argument, default=SUPPRESS)
    add("--n", type=int, metavar="N", help="problems, balanced over the sets (default: 300; of GSM8K alone all 1,319)")
    add("--split", choices=SPLITS, help="which: heldout (default; of GSM8K the test set) or train")
    add("--seed", type=int, metavar="N", help="random seed of the sampling (default: 0)")
    add("--temperature", type=float, metavar="X", help="of the sampling; 0: greedily (default: 1.0)")
    add(
        "--max-completion-length",
        type=int,
        metavar="N",
        help="tokens at most (default: 96, gsm8k 256, instructions 48)",
    )


def run_evaluate_command(arguments: Namespace) -> int:
    """Evaluate a policy and print the report; returns the exit code."""
    model = getattr(arguments, "model", "tiny")
    given = {"split": "heldout", "temperature": 1.0, **given_options(arguments, _EVALUATED)}
    reject_ineffective_options(given, given, _EVALUATE_NEEDS)
    say_loading(model)
    from grpo_edu.runs.record import evaluation_settings
    from grpo_edu.runs.summary import report_evaluation

    dtype = chosen_dtype(getattr(arguments, "dtype", "float32"), model, trains_weights=False)
    asked = {**evaluation_settings(model, given), "dtype": dtype}
    report = report_evaluation(model, **asked)
    print(json.dumps({**asked, "model": model, **report.to_dict()}) if arguments.json else report.text())
    return 0


def add_profiles_options(command: ArgumentParser) -> None:
    """Add the options of `grpo-edu profiles`."""
    command.add_argument(
        "--show",
        metavar="NAME",
        help="print every setting of this profile, JSON file or run; a star marks those that the profile sets itself",
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
        print(visible(profile_text(profile)))
    return 0


def add_reward_check_options(command: ArgumentParser) -> None:
    """Add the options of `grpo-edu reward-check`."""
    command.add_argument(
        "reward", metavar="REWARD", help="FILE.py:function, package.module:function, or the name of a built-in one"
    )
    add_options(command, RunConfig, (*_FILES, "model"))
    command.add_argument("--try", action="append", default=[], dest="texts", metavar="TEXT", help="try this answer too")
    sampled = "also show N completions that the model samples, with their rewards (default: 0)"
    command.add_argument("--samples", type=int, default=0, metavar="N", help=sampled)


def run_reward_check_command(arguments: Namespace) -> int:
    """Print what a reward pays for right, wrong, empty and exploiting answers; returns the exit code."""
    if arguments.samples < 0:
        raise ValueError(f"`samples` must be 0 or a positive number, got {arguments.samples}.")
    if hasattr(arguments, "model") and not arguments.samples:
        raise ValueError("`model` has no effect here: it needs `samples` above 0.")
    request = RunConfig(reward_funcs=(arguments.reward,), **given_options(arguments, (*_FILES, "model")))
    data = request.load_data(backend="trl")  # also what only TRL's trainer gives to a reward
    from grpo_edu.model_files import load_tokenizer
    from grpo_edu.models import find_model
    from grpo_edu.studies.exploits import RIGHT, YOURS, judge_reward, try_reward

    if len(data.reward_funcs) > 1:
        raise ValueError(f"`reward` is one reward, got {arguments.reward!r}; check one after the other.")
    problems, (function,), (name,) = data.problems, data.reward_funcs, request.reward_names
    chosen = problems[:: max(1, len(problems) // _TRIED)][:_TRIED]
    paid = try_reward(function, chosen, texts=arguments.texts, tokenizer=load_tokenizer(find_model("tiny"), ""))
    samples = _sample_and_score(request, chosen, function, arguments.samples) if arguments.samples else []
    best = max((paid[right] for right in RIGHT if right in paid), default=None)
    wrong = {key: value for key, value in paid.items() if key not in RIGHT and not key.startswith(YOURS)}
    exploits = [] if best is None else [key for key, value in wrong.items() if value > best - _MARGIN]
    if arguments.json:
        print(json.dumps({"reward": name, "paid": paid, "exploits": exploits, "samples": samples}))
        return 0
    print(f"What {name} pays, on average over {len(chosen)} training problems:")
    print("\n".join(f"  {key:<32}{value:.2f}" for key, value in paid.items()))
    for sample in samples:
        reward = "none" if sample["reward"] is None else f"{sample['reward']:.2f}"
        print(visible(f"=== sample: {sample['prompt']}\n--- reward {reward}\n{sample['completion']}"))
    if best is None and max(paid.values()) - min(paid.values()) < _MARGIN:
        print("The problems have no answers, so no right one was tried. Add some with --try TEXT.")
    elif max(paid.values()) - min(paid.values()) < _MARGIN:
        print(f"It pays {max(paid.values()):.2f} to every answer, so there is nothing to learn from it.")
        if RIGHT[0] not in paid:
            print("The file has no worked solutions, so none was tried; write the answers as WORKING #### ANSWER.")
    elif best is None:
        print("The problems have no answers, so read the list: training will produce what is paid most.")
    else:
        print(f"Wrong attempts that are paid as much as right answers: {', '.join(exploits) or 'none'}.")
    if any(map(is_user_dataset, request.data)):
        return 0
    with suppress(ValueError):  # a function that requires columns of the file
        check_columns(function, ("answer", "level", "solution"))
        holes = [verdict.exploit.name for verdict in judge_reward(function) if not verdict.holds]
        print(f"Exploits of the course that are paid as much as honest work: {', '.join(holes) or 'none'}.")
    return 0


def _sample_and_score(
    request: RunConfig, problems: Sequence[Problem], function: RewardFunction, count: int
) -> list[dict[str, Any]]:
    """Return completions that the model of a run samples for these problems in turn, with what a reward pays them."""
    say_loading(request.model)
    from grpo_edu.evaluation import evaluate
    from grpo_edu.models import load_policy

    repeated = [problems[number % len(problems)] for number in range(count)]
    policy, tokenizer = load_policy(request.model)
    length = default_config(request.data).max_completion_length
    found = evaluate(policy, tokenizer, repeated, reward_funcs=function, max_completion_length=length, progress=True)
    rewards = [None if math.isnan(reward) else reward for reward in found.rewards]
    rows = zip(found.prompts, found.completions, rewards, strict=True)
    return [{"prompt": prompt, "completion": text, "reward": reward} for prompt, text, reward in rows]
