"""`grpo-edu challenge`: its options, and what it does. A shell around `grpo_edu.grading.challenge`."""

from __future__ import annotations

import json
import shutil
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_edu.cli.grade import forget_working_directory

if TYPE_CHECKING:
    from grpo_edu.grading.challenge import Rules

_ACTIONS = ("run", "submit", "judge")


def add_challenge_options(command: ArgumentParser) -> None:
    """The options of the command."""
    add = command.add_argument
    add("action", choices=_ACTIONS, help="run: try your submission; submit: try it and copy it; judge: a whole class")
    add("folder", metavar="DIR", help="your submission, or for judge the folder of all submissions")
    add("--start", default="tiny,halfway", metavar="NAMES", help="starting models (default: tiny,halfway)")
    add("--seeds", type=int, metavar="N", help="runs per starting model (default: 5 for judge, else 1)")
    add("--budget", type=int, metavar="N", help="sampled tokens per run (default: 10000 from tiny, 25000 from halfway)")
    add("--seed", type=int, metavar="N", help="draws the problems and the runs' seeds (default: a new one)")
    add("--output", metavar="DIR", help="judge: new folder for leaderboard.html and leaderboard.json")
    add("--to", metavar="DIR", default="submissions", help="submit: where the copy goes (default: submissions)")
    add("--name", metavar="NAME", help="submit: name of the copy (default: the folder's name)")
    add("--without-isolation", action="store_true", help="judge: run submissions as yourself (docs/grading.md)")


def run_challenge_command(arguments: Namespace) -> int:
    """Run, submit or judge; returns the exit code."""
    forget_working_directory()  # it may hold a student's torch.py
    from grpo_edu.grading.challenge import BUDGETS, Rules, judge_submissions
    from grpo_edu.machine.hardware import machine

    folder = Path(arguments.folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"folder {folder} does not exist")
    starts = [name.strip() for name in arguments.start.split(",") if name.strip()]
    if not starts or set(starts) - set(BUDGETS):
        raise ValueError(f"--start: {arguments.start!r} is not valid; use {' or '.join(BUDGETS)}, or both with a comma")
    is_judged = arguments.action == "judge"
    rules = Rules(budget=arguments.budget, seeds=arguments.seeds or (5 if is_judged else 1))
    if not is_judged:
        return _try(arguments, folder, starts, rules)
    if not arguments.output:
        raise ValueError("--output is missing; name a new folder for the leaderboard")
    output = Path(arguments.output)
    entries = judge_submissions(
        folder,
        output,
        starts=starts,
        rules=rules,
        seed=arguments.seed,
        isolated=not arguments.without_isolation,
        command=arguments.typed,
        machine=machine(),
        tell=_tell,
    )
    if arguments.json:
        print((output / "leaderboard.json").read_text(encoding="utf-8"))
    else:
        rejected = len({one.name for one in entries if one.rejected})
        count = len({one.name for one in entries}) - 1
        print(f"{count} submission{'s' * (count != 1)}, {rejected} rejected. Look at {output / 'leaderboard.html'}.")
    return 0


def _try(arguments: Namespace, folder: Path, starts: list[str], rules: Rules) -> int:
    """Train and evaluate one submission on new problems; for `submit`, copy it where nothing was rejected."""
    import secrets

    from grpo_edu.grading.challenge import Judge
    from grpo_edu.grading.sandbox import isolation_problem

    name = arguments.name or folder.resolve().name
    target = Path(arguments.to) / name
    if arguments.action == "submit" and target.exists():
        raise FileExistsError(f"--name: {target} exists; remove it to replace your submission, or give another name")
    problem = isolation_problem()
    if problem:
        _tell(f"Your code runs without the judge's isolation here: {problem}")
    seed = secrets.randbits(40) if arguments.seed is None else arguments.seed
    entries = []
    for start in starts:
        judge = Judge(start, rules, seed, isolated=not problem)
        untrained = judge.untrained()
        _tell(f"{start} without training: accuracy {sum(untrained.accuracies) / len(untrained.accuracies):.1%}")
        entry = judge.judge(name, folder, _tell)
        entries.append(entry)
        if entry.estimate:
            _tell(f"{name} from {start}, mean of {rules.seeds} seeds: {entry.estimate}")
    is_valid = not any(one.rejected for one in entries)
    if arguments.json:
        print(json.dumps([vars(one) for one in entries]))
    if is_valid and arguments.action == "submit":
        shutil.copytree(folder, target, ignore=shutil.ignore_patterns("__pycache__"))
        _tell(f"Submitted: {target}")
    return 0 if is_valid else 1


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
