"""`grpo-edu curriculum`: its options, and what it does. A shell around `grpo_edu.curriculum_runs`."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from dataclasses import replace

from grpo_edu.curricula import FISHERS, PROFILES, PROTECTIONS, Curriculum, load_curriculum


def add_curriculum_options(command: ArgumentParser) -> None:
    """The options of the command; only what is given overrides the profile."""
    add = command.add_argument
    add("--profile", metavar="NAME",
        help=f"stages and protection: {', '.join(PROFILES)}, or a JSON file (default: domains)")  # fmt: skip
    add("--model", help="a shipped model, a folder (a run's too) or a Hub id (default: tiny)")
    add("--protect", choices=PROTECTIONS, help="what holds on to earlier tasks (default: the profile's)")
    add("--strength", type=float, metavar="X", help="lambda of ewc and l2, share of replay, beta of kl")
    add("--fisher", choices=FISHERS, help="of ewc (default: sampled)")
    add("--online", action="store_true", default=None, help="one running anchor instead of one a task")
    add("--seed", type=int, help="of every stage (default: the profile's)")
    add("--n", type=int, help="held-out problems a task (default: 100)")
    add("--data-path", metavar="FOLDER", help="where GSM8K's train.jsonl and test.jsonl are, without the Hub")
    add("--output", metavar="DIR", help="folder of the run (default: a new one in runs/)")
    add("--overwrite", action="store_true", help="replace the run that the folder holds")
    add("--resume", metavar="DIR", help="go on with the curriculum in this folder; all else comes from there")


def run_curriculum_command(arguments: Namespace) -> int:
    """Start or resume a curriculum and print its matrix; returns the exit code."""
    if arguments.resume:
        _check_resume(arguments)
    curriculum = None if arguments.resume and arguments.profile is None else chosen_curriculum(arguments)
    from grpo_edu.curriculum_runs import result_text, resume_curriculum, start_curriculum

    if arguments.resume or curriculum is None:
        result = resume_curriculum(arguments.resume, arguments.model, curriculum=curriculum)
    else:
        result = start_curriculum(
            curriculum,
            arguments.model or "tiny",
            n=100 if arguments.n is None else arguments.n,
            data_path=arguments.data_path,
            output=arguments.output,
            overwrite=arguments.overwrite,
            command=arguments.typed,
        )
    if arguments.json:
        print(json.dumps(result.to_dict()))
    else:
        print(f"{result_text(result)}\n\n{result.seconds:.0f} s. Saved in {result.output}; see matrix.png there.")
    return 0


def chosen_curriculum(arguments: Namespace) -> Curriculum:
    """The profile with what the options override."""
    curriculum = load_curriculum(arguments.profile or "domains")
    given = {"method": arguments.protect, "strength": arguments.strength, "fisher": arguments.fisher,
             "online": arguments.online}  # fmt: skip
    changes = {name: value for name, value in given.items() if value is not None}
    curriculum = replace(curriculum, protection=replace(curriculum.protection, **changes))
    protection = curriculum.protection
    if arguments.protect not in (None, "none") and not protection.strength:
        raise ValueError(f"strength: 0 protects nothing; give --strength with --protect {protection.method}")
    return curriculum if arguments.seed is None else curriculum.with_seed(arguments.seed)


def _check_resume(arguments: Namespace) -> None:
    """A resumed run has its settings; another one would not be the same run."""
    settings = ("protect", "strength", "fisher", "online", "seed", "n", "data_path", "output")
    given = [name for name in settings if getattr(arguments, name) is not None]
    if given or arguments.overwrite:
        name = (given or ["overwrite"])[0].replace("_", "-")
        raise ValueError(f"{name}: a resumed curriculum keeps its own; leave out --{name}, or start a new one")
