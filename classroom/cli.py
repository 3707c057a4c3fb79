"""The commands `grpo-edu grade` and `grpo-edu challenge`, and the doctor's line about grading.

`grpo_edu` finds this module through the entry point in pyproject.toml.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_edu.cli.classroom import forget_working_directory
from grpo_edu.runs.effects import OptionRequirement, reject_ineffective_options
from grpo_edu.runs.loading import parse_names, split_names

if TYPE_CHECKING:
    from classroom.challenge import Rules
    from grpo_edu.machine.hardware import Check


def add_grade_options(command: ArgumentParser) -> None:
    """Add the options of the command."""
    add = command.add_argument
    add("submissions", metavar="SUBMISSIONS", help="folder of student folders or notebooks, or an nbgrader course")
    add("--output", metavar="DIR", required=True, help="new folder for grades.csv, summary.html and the feedback")
    add(
        "--seed",
        type=int,
        metavar="N",
        help="random seed of the checks' inputs (default: GRPO_EDU_CHECK_SEED, else a new one)",
    )
    add(
        "--slip-credit",
        type=float,
        metavar="SHARE",
        help="share of the points for an answer in which a single mistake that the check can name explains all that is "
        "wrong, from 0 to below 1 (default: GRPO_EDU_SLIP_CREDIT, else 0.5)",
    )
    add(
        "--notebooks",
        metavar="NAMES",
        default="",
        help="which notebooks, by how their names begin, such as 03,04 (default: all that were handed in)",
    )
    add(
        "--format",
        metavar="NAMES",
        default="",
        help="also write the grades for these systems: canvas, moodle, or both with a comma",
    )
    add(
        "--masters", metavar="DIR", help="folder of the solutions, from which the checks are taken (default: solutions)"
    )
    add(
        "--workers",
        type=int,
        default=max(1, (os.cpu_count() or 2) // 2),
        metavar="N",
        help="students that are graded at a time (default: half of the cores)",
    )
    add(
        "--time-limit",
        type=float,
        default=20.0,
        metavar="SECONDS",
        help="most CPU time of a cell or of a part of a question; on the clock it may take five times as long "
        "(default: 20)",
    )
    add(
        "--total-time",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="most CPU time of a student, in the same way (default: 300)",
    )
    add("--memory", type=float, default=2.0, metavar="GB", help="most memory of a student's process (default: 2)")
    add(
        "--without-isolation",
        action="store_true",
        help="run students' code as yourself, for containers that hold nothing else (docs/grading.md)",
    )
    add("--by-hand", metavar="FILE", help="your copy of grades.csv with points for the open answers (docs/grading.md)")
    add("--resume", action="store_true", help="continue where a grading into DIR was interrupted")


def _leave_working_directory() -> None:
    """Import nothing from the working directory, which may hold a student's psutil.py, and no matplotlib settings."""
    forget_working_directory()
    with contextlib.chdir("/"):
        import matplotlib  # noqa: F401  # which now reads its settings, those of the working directory first


def run_grade_command(arguments: Namespace) -> int:
    """Grade, and say where it is; returns the exit code."""
    if find_spec("nbgrader") is None:
        raise ValueError('grade: nbgrader is not installed; pip install "grpo-edu[classroom]"')
    _leave_working_directory()
    from classroom.grade import grade_submissions
    from classroom.sandbox import Limits
    from grpo_edu.checks.core import slip_credit

    memory = int(max(0.0, arguments.memory) * 2**30)  # 0 for NaN, which is refused like any other too small limit
    limits = Limits(seconds=arguments.time_limit, total_seconds=arguments.total_time, memory=memory)
    more = {"masters": arguments.masters} if arguments.masters else {}
    grades = grade_submissions(
        arguments.submissions,
        arguments.output,
        notebooks=split_names(arguments.notebooks),
        seed=_seed(arguments.seed),
        slip_credit=slip_credit() if arguments.slip_credit is None else arguments.slip_credit,
        limits=limits,
        workers=arguments.workers,
        formats=split_names(arguments.format),
        resume=arguments.resume,
        isolated=not arguments.without_isolation,
        by_hand=arguments.by_hand,
        tell=_tell,
        **more,
    )
    place = Path(arguments.output)
    if arguments.json:
        points = {one.label: sum(feedback.points for feedback in one.feedback.values()) for one in grades}
        troubles = {one.label: one.troubles for one in grades if one.troubles}
        print(json.dumps({"output": str(place.absolute()), "points": points, "troubles": troubles}))
    else:
        with_trouble = sum(bool(one.troubles) for one in grades)
        count = f"{len(grades)} student{'s' * (len(grades) != 1)}"
        print(f"{count}, {with_trouble} with a message about a problem. Look at {place / 'summary.html'}.")
        if arguments.without_isolation:
            print("Students' code ran WITHOUT ISOLATION; the results say so.")
    return 0


def _seed(given: int | None) -> int | None:
    """Return the option, else the environment's, else None for a new one."""
    from grpo_edu.checks.core import SEED_VARIABLE

    text = os.environ.get(SEED_VARIABLE)
    if given is not None or not text:
        return given
    if not text.lstrip("-").isdigit():
        raise ValueError(f"seed: {SEED_VARIABLE} is {text!r}; give a whole number")
    return int(text)


_CHALLENGE_NEEDS = (
    OptionRequirement("output without_isolation", lambda typed: typed["action"] == "judge", "the action judge"),
    OptionRequirement("to", lambda typed: typed["action"] == "submit", "the action submit"),
    OptionRequirement("name", lambda typed: typed["action"] != "judge", "the action run or submit"),
)


def add_challenge_options(command: ArgumentParser) -> None:
    """Add the options of the command."""
    add = command.add_argument
    add(
        "action",
        choices=("run", "submit", "judge"),
        help="run: try your submission; submit: try it and copy it; judge: a whole class",
    )
    add("folder", metavar="DIR", help="your submission, or for judge the folder of all submissions")
    add("--start", default="tiny,halfway", metavar="NAMES", help="starting models (default: tiny,halfway)")
    add("--seeds", type=int, metavar="N", help="runs per starting model (default: 5 for judge, else 1)")
    add("--budget", type=int, metavar="N", help="sampled tokens per run (default: 10000 from tiny, 25000 from halfway)")
    add(
        "--seed",
        type=int,
        metavar="N",
        help="random seed that draws the problems and the seeds of the runs (default: a new one)",
    )
    add("--output", metavar="DIR", help="judge: new folder for leaderboard.html and leaderboard.json")
    add("--to", metavar="DIR", help="submit: where the copy goes (default: submissions)")
    add("--name", metavar="NAME", help="submit: name of the copy (default: the folder's name)")
    add("--without-isolation", action="store_true", help="judge: run submissions as yourself (docs/grading.md)")


def run_challenge_command(arguments: Namespace) -> int:
    """Run, submit or judge; returns the exit code."""
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    reject_ineffective_options(given, given, _CHALLENGE_NEEDS)
    _leave_working_directory()
    from classroom.challenge import BUDGETS, Rules, judge_submissions
    from grpo_edu.machine.hardware import machine

    folder = Path(arguments.folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"folder {folder} does not exist")
    starts = parse_names(arguments.start, tuple(BUDGETS), "start")
    is_judged = arguments.action == "judge"
    seeds = (5 if is_judged else 1) if arguments.seeds is None else arguments.seeds
    rules = Rules(budget=arguments.budget, seeds=seeds)
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


def _try(arguments: Namespace, folder: Path, starts: Sequence[str], rules: Rules) -> int:
    """Train and evaluate one submission on new problems; for `submit`, copy it if nothing was rejected."""
    from classroom.challenge import Judge, SubmissionRejectedError, read_submission
    from classroom.sandbox import isolation_problem

    name = arguments.name or folder.resolve().name
    target = Path(arguments.to or "submissions") / name
    if arguments.action == "submit" and target.exists():
        raise FileExistsError(f"--name: {target} exists; remove it to replace your submission, or give another name")
    try:
        read_submission(folder)
    except SubmissionRejectedError as error:  # before anything is trained or evaluated
        raise ValueError(f"folder {folder}: {error}") from None
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


def grading_checks() -> list[Check]:
    """Return the doctor's line on isolating students' code, where the packages for grading are installed."""
    from classroom.kernel import memory_is_counted
    from classroom.sandbox import REMEDY, isolation_problem
    from grpo_edu.machine.hardware import Check

    if find_spec("nbgrader") is None or find_spec("torch") is None:
        return []
    problem = isolation_problem()
    together = "all of a student's processes together" if memory_is_counted() else "each process"
    detail = f"isolated by bubblewrap, with a limit on the memory of {together}"
    if problem:
        detail = f"not possible here, which matters to instructors only: {problem}"
    return [Check("grading", True, detail, REMEDY if problem else "")]


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
