"""Compare stored runs: the settings in which they differ, and what each solved of the same held-out problems."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_edu.config import RETIRED
from grpo_edu.evaluation import Evaluation
from grpo_edu.problems.hub import read_run_config
from grpo_edu.runs.loading import load_problem_sets
from grpo_edu.runs.options import use_current_names
from grpo_edu.runs.record import read_run_result

# entries of config.json that describe the computer or the command, not the training
_NOT_SETTINGS = {"grpo_edu", "python", "torch", "transformers", "threads", "command", "source"}


def settings_that_differ(runs: Mapping[Any, Mapping[str, Any]]) -> dict[Any, dict[str, Any]]:
    """Return name → the settings in which these runs are not all alike.

    >>> settings_that_differ({"a": {"seed": 0, "beta": 0.0}, "b": {"seed": 1, "beta": 0.0}})
    {'a': {'seed': 0}, 'b': {'seed': 1}}
    """
    flat = {name: _flat(config) for name, config in runs.items()}
    keys = dict.fromkeys(key for config in flat.values() for key in config)
    # A setting that only 0.3.0 had is at its default in every other run.
    found = {name: {key: config.get(key, RETIRED.get(key)) for key in keys} for name, config in flat.items()}
    differing = [key for key in keys if len({repr(config[key]) for config in found.values()}) > 1]
    return {name: {key: config[key] for key in differing} for name, config in found.items()}


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a stored run under the names of today."""
    settings = {key: value for key, value in config.items() if key not in _NOT_SETTINGS and key != "config"}
    return {**use_current_names(settings), **config.get("config", {})}


def read_evaluations(run: str | Path) -> tuple[Evaluation, Evaluation]:
    """Return what a stored run solved of its held-out problems before and after training, by sampling.

    The run does not store its completions of these problems, so the evaluations have none.

    Raises ValueError if the folder holds no training run that was evaluated to its end, or if its problems have
    changed since.
    """
    folder = Path(run).expanduser()
    config, result = read_run_config(folder), read_run_result(folder)
    if config is None or "config" not in config or "sweep" in config:
        raise ValueError(f"{run} is not the folder of a training run; name one, such as runs/tiny-levels-seed0.")
    if result is None or not result.get("solved_after"):
        raise ValueError(f"the run in {run} was not evaluated after training; resume it, or train again.")
    settings = use_current_names(config)
    problems = load_problem_sets(settings, "heldout", n=settings["num_heldout"])
    found = []
    for when in ("before", "after"):
        solved = [digit == "1" for digit in result[f"solved_{when}"]]
        if len(solved) != len(problems):
            raise ValueError(
                f"the run in {run} was evaluated on {len(solved)} held-out problems, and there are {len(problems)} "
                "now; restore its data."
            )
        prompts, levels = [problem.prompt for problem in problems], [problem.level for problem in problems]
        found.append(Evaluation(prompts, levels, [""] * len(solved), [None] * len(solved), solved))
    return found[0], found[1]


def take_common(first: Evaluation, then: Evaluation) -> tuple[Evaluation, Evaluation]:
    """Return the parts of two evaluations that are about the same problems, for `compare`.

    Raises ValueError if no problem is in both.
    """
    rows = [{prompt: row for row, prompt in enumerate(evaluation.prompts)} for evaluation in (first, then)]
    common = [prompt for prompt in rows[0] if prompt in rows[1]]
    if not common:
        raise ValueError(
            "the two runs have no held-out problem in common; measure both on the same ones, with `evaluate --model`."
        )
    return first.take([rows[0][prompt] for prompt in common]), then.take([rows[1][prompt] for prompt in common])
