"""`grpo-edu sweep` and `grpo-edu curriculum`: a thin layer over `grpo_edu.studies` and `grpo_edu.continual`."""

from __future__ import annotations

import json
from argparse import SUPPRESS, ArgumentParser, Namespace
from dataclasses import replace
from functools import partial
from itertools import product

from grpo_edu.cli.options import Parser, add_options, chosen_dtype, given_options, refuse_with_resume, say_loading
from grpo_edu.cli.train import add_folder_options, add_run_options
from grpo_edu.continual.stages import (
    FISHERS,
    PROFILES,
    PROTECTION_NEEDS,
    PROTECTIONS,
    Curriculum,
    load_curriculum,
    protection_settings,
)
from grpo_edu.runs.effects import RUN_NEEDS, OptionRequirement, Settings, reject_ineffective_options
from grpo_edu.runs.options import CONFIG_FIELDS, RUN_FIELDS, RunConfig
from grpo_edu.runs.profiles import Profile, load_profile
from grpo_edu.studies.sweep import DEFAULT_SPACE, MEASURES, SWEPT, SweepPlan, sweep_text

# Fields that a sweep sets for each of its runs, and what it does not write; of a profile they are ignored.
_NOT_IN_SWEEPS = (
    *("seed", "greedy", "checkpoint_every", "max_saved_completions", "record_token_steps", "report_to"),
    *SWEPT,
)
_SETTINGS = [name for name in (*RUN_FIELDS, *CONFIG_FIELDS) if name not in _NOT_IN_SWEEPS]
_PLAN = ("trials", "seeds", "judge_seeds", "num_validation", "measure")
_PLACES = ("output", "overwrite")
# A new folder in runs/ replaces nothing.
_FOLDER_NEED = OptionRequirement("overwrite", lambda run: "output" in run, "`output`")
_CURRICULUM_NEEDS = (
    *PROTECTION_NEEDS,
    _FOLDER_NEED,
    OptionRequirement("data_path", lambda run: "gsm8k" in run["data"], "a stage of the `profile` with gsm8k"),
)


def add_sweep_options(command: Parser) -> None:
    """Add the options of `grpo-edu sweep`: those of a training run and its own; only what is typed is set."""
    add_run_options(command, without=_NOT_IN_SWEEPS)
    add = partial(command.add_argument, default=SUPPRESS)
    for name in SWEPT:
        form = "LOW:HIGH, or values with commas" if name == "learning_rate" else "values with commas"
        flag = "--" + name.replace("_", "-")
        add(flag, help=f"{form} (without any of these five: {DEFAULT_SPACE[name]})", metavar="VALUES")
    add("--trials", help="different settings to try, besides those it starts from (default: 12)", type=int, metavar="N")
    add("--seeds", help="random seeds with commas; each setting is trained with each (default: 0,1,2)", metavar="N,N")
    add("--judge-seeds", help="new seeds for the final comparison (default: 5)", type=int, metavar="N")
    add(
        "--validation",
        help="training problems set aside to choose the settings by (default: 150)",
        type=int,
        metavar="N",
        dest="num_validation",
    )
    add("--measure", choices=MEASURES, help="what settings are chosen by: accuracy (default), or the mean reward")
    add_folder_options(command, "sweep")


def run_sweep_command(arguments: Namespace) -> int:
    """Start or resume a sweep and print its result; returns the exit code."""
    if hasattr(arguments, "resume"):
        refuse_with_resume(arguments)
        say_loading(arguments.resume, "resume")
        from grpo_edu.studies.sweep_runs import resume_sweep

        result = resume_sweep(arguments.resume)
    else:
        profile, plan = asked_sweep(arguments)
        request = profile.request()
        given = given_options(arguments, (*_SETTINGS, *SWEPT, *_PLAN, *_PLACES))
        reject_ineffective_options(given, {**given, **request.to_settings()}, _sweep_needs(plan))
        say_loading(request.model)
        from grpo_edu.studies.sweep_runs import start_sweep

        dtype = chosen_dtype(request.dtype, request.model, trains_weights=not request.lora_rank)
        places = given_options(arguments, _PLACES)
        result = start_sweep(profile.override({"dtype": dtype}), plan, command=arguments.typed, **places)
    if arguments.json:
        print(json.dumps(result.to_dict()))
    else:
        print(f"{sweep_text(result)}\n\n{result.seconds:.0f} s. Saved in {result.output}.")
    return 0


def _sweep_needs(plan: SweepPlan) -> list[OptionRequirement]:
    """Return what options of a sweep need: they must have an effect with at least one of the settings that it tries."""
    choices = {name: values.choices for name, values in plan.distributions.items() if hasattr(values, "choices")}
    tried = [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]

    def holds(need: OptionRequirement, run: Settings) -> bool:
        return any(need.holds({**run, **settings}) for settings in tried)

    return [*(replace(need, holds=partial(holds, need)) for need in RUN_NEEDS), _FOLDER_NEED]


def asked_sweep(arguments: Namespace) -> tuple[Profile, SweepPlan]:
    """Return the profile to start from, and the plan; raises ValueError for what is wrong with either."""
    given = given_options(arguments, _SETTINGS)
    profile = load_profile(getattr(arguments, "profile", "standard")).override(given)
    options = given_options(arguments, _PLAN)
    if "seeds" in options:
        options["seeds"] = _seeds(options["seeds"])
    space = given_options(arguments, SWEPT) or DEFAULT_SPACE
    return profile, SweepPlan(space=space, num_heldout=profile.request().num_heldout, **options)


def _seeds(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"`seeds` must be whole numbers with commas, such as 0,1,2, got {text!r}.") from None


def add_curriculum_options(command: ArgumentParser) -> None:
    """Add the options of `grpo-edu curriculum`; only what is typed overrides the profile."""
    add = partial(command.add_argument, default=SUPPRESS)
    add(
        "--profile",
        help=f"stages and protection: {', '.join(PROFILES)}, or a JSON file (default: domains)",
        metavar="NAME",
    )
    add_options(command, RunConfig, ["model", "data_path"])
    add("--protect", help="how earlier tasks are protected (default: the profile's)", choices=PROTECTIONS)
    add("--strength", help="lambda of ewc and l2, share of replay, beta of kl", type=float, metavar="X")
    add("--fisher", help="how ewc estimates the Fisher information (default: the profile's)", choices=FISHERS)
    add("--online", help="keep one running anchor instead of one per task", action="store_true")
    add("--seed", help="random seed of every stage (default: the profile's)", type=int, metavar="N")
    add("--n", help="held-out problems per task (default: 100)", type=int, metavar="N")
    add_folder_options(command, "curriculum")


def run_curriculum_command(arguments: Namespace) -> int:
    """Start or resume a curriculum and print its accuracy matrix; returns the exit code."""
    resumes = hasattr(arguments, "resume")
    if resumes:
        refuse_with_resume(arguments)
    else:
        curriculum = chosen_curriculum(arguments)
    from grpo_edu.continual.runs import result_text, resume_curriculum, start_curriculum  # imports torch

    if resumes:
        result = resume_curriculum(arguments.resume)
    else:
        options = given_options(arguments, ("model", "n", "data_path", *_PLACES))
        result = start_curriculum(curriculum, command=arguments.typed, **options)
    if arguments.json:
        print(json.dumps(result.to_dict()))
    else:
        print(f"{result_text(result)}\n\n{result.seconds:.0f} s. Saved in {result.output}; see matrix.png there.")
    return 0


def chosen_curriculum(arguments: Namespace) -> Curriculum:
    """Return the profile with what the options override."""
    curriculum = load_curriculum(getattr(arguments, "profile", "domains"))
    changes = given_options(arguments, ("strength", "fisher", "online"))
    given = changes | given_options(arguments, ("protect", "data_path", *_PLACES))
    if hasattr(arguments, "protect"):
        changes["method"] = arguments.protect
    data = {name for stage in curriculum.stages for name in stage.data}
    reject_ineffective_options(
        given, {**given, **protection_settings(curriculum, **changes), "data": data}, _CURRICULUM_NEEDS
    )
    curriculum = replace(curriculum, protection=replace(curriculum.protection, **changes))
    return curriculum.with_seed(arguments.seed) if hasattr(arguments, "seed") else curriculum
