"""`grpo-edu sweep`: its options, and what it does. A shell around `grpo_edu.sweep_runs`."""

from __future__ import annotations

import json
from argparse import SUPPRESS, ArgumentParser, Namespace
from typing import Any

from grpo_edu.cli_words import chosen_dtype, given_options, say_loading
from grpo_edu.profiles import Profile, load_profile
from grpo_edu.sweeps import DEFAULT_SPACE, SWEPT, SweepPlan, parse_space

_SETTINGS = ("model", "data", "data_path", "dtype", "n", "rewards", "max_steps")
_PLAN = ("trials", "seeds", "judge_seeds", "num_validation", "sampler_seed")


def add_sweep_options(sweep: ArgumentParser) -> None:
    """The options of the command, beside those of model and data; only what is typed is set."""

    def add(flag: str, help: str, **options: Any) -> None:
        sweep.add_argument(flag, help=help, default=SUPPRESS, **options)

    add("--profile", "what to start from, by name or from a JSON file (default: standard)", metavar="NAME")
    add("--rewards", "names with commas (default: the profile's)", metavar="NAMES")
    add("--steps", "of each run (default: the profile's)", type=int, metavar="N", dest="max_steps")
    for name in SWEPT:
        form = "LOW:HIGH, or values with commas" if name == "learning_rate" else "values with commas"
        add("--" + name.replace("_", "-"), f"{form} (by default, of all five: {DEFAULT_SPACE[name]})",
            metavar="VALUES")  # fmt: skip
    add("--trials", "different settings to try, beside the start (default: 12)", type=int, metavar="N")
    add("--seeds", "with commas; each setting is trained with each (default: 0,1,2)", metavar="N,N")
    add("--judge-seeds", "new seeds that judge the chosen settings (default: 5)", type=int, metavar="N")
    add("--validation", "training problems kept aside to choose by (default: 150)", type=int, metavar="N",
        dest="num_validation")  # fmt: skip
    add("--sampler-seed", "of Optuna's search (default: 0)", type=int, metavar="N")
    add("--output", "folder of the sweep (default: a new one in runs/)", metavar="DIR")
    add("--overwrite", "replace the run that the folder holds", action="store_true")
    add("--resume", "go on with the sweep in this folder; all else comes from there", metavar="DIR")


def run_sweep_command(arguments: Namespace) -> int:
    """Start or resume a sweep and print what it found; returns the exit code."""
    given = given_options(arguments, ["profile", *_SETTINGS, *SWEPT, *_PLAN, "output", "overwrite"])
    if hasattr(arguments, "resume"):
        if given:
            name = next(iter(given)).replace("_", "-")
            raise ValueError(f"{name}: a resumed sweep keeps its own; leave it out, or start a new one")
        say_loading(arguments.resume)
        from grpo_edu.sweep_runs import resume_sweep

        result = resume_sweep(arguments.resume)
    else:
        profile, plan = asked_sweep(arguments)
        run = profile.run()
        say_loading(run["model"])
        from grpo_edu.sweep_runs import start_sweep

        chosen = chosen_dtype(run["dtype"], run["model"], trains_weights=not run["lora_rank"])
        places = given_options(arguments, ["output", "overwrite"])
        result = start_sweep(profile.override({"dtype": chosen}), plan, command=arguments.typed, **places)
    if arguments.json:
        print(json.dumps(result.to_dict()))
    else:
        from grpo_edu.sweep_results import sweep_text

        print(f"{sweep_text(result)}\n\n{result.seconds:.0f} s. Saved in {result.output}; see sweep.png there.")
    return 0


def asked_sweep(arguments: Namespace) -> tuple[Profile, SweepPlan]:
    """The profile to start from, and the plan; raises ValueError for what is wrong with either."""
    given = given_options(arguments, list(_SETTINGS))
    profile = load_profile(getattr(arguments, "profile", "standard")).override(given)
    options = given_options(arguments, list(_PLAN))
    if "seeds" in options:
        options["seeds"] = _seeds(options["seeds"])
    space = parse_space(given_options(arguments, list(SWEPT)) or DEFAULT_SPACE)
    return profile, SweepPlan(space=space, num_heldout=profile.run()["n"], **options)


def _seeds(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"seeds: {text!r} must be whole numbers with commas, as 0,1,2") from None
