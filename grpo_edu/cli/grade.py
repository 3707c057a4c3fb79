"""`grpo-edu grade`: its options, and what it does. A shell around `grpo_edu.grading.grade`."""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser, Namespace
from importlib.util import find_spec
from pathlib import Path


def add_grade_options(command: ArgumentParser) -> None:
    """The options of the command."""
    add = command.add_argument
    add("submissions", metavar="SUBMISSIONS", help="folder of student folders or notebooks, or an nbgrader course")
    add("--output", metavar="DIR", required=True, help="new folder for grades.csv, summary.html and the feedback")
    add("--seed", type=int, help="of the checks' inputs (default: GRPO_EDU_CHECK_SEED, else a new one)")
    add(
        "--slip-credit",
        type=float,
        metavar="SHARE",
        help="of the points, where one slip that the check can name explains all that is wrong; from 0 to below 1 "
        "(default: GRPO_EDU_SLIP_CREDIT, else 0.5)",
    )
    add(
        "--notebooks",
        metavar="NAMES",
        default="",
        help="beginnings of notebooks' names, such as 03,04 (default: all that were handed in)",
    )
    add("--format", metavar="NAMES", default="", help="canvas, moodle or both with a comma: further tables")
    add("--masters", metavar="DIR", help="folder of the masters (default: solutions)")
    add(
        "--workers",
        type=int,
        default=max(1, (os.cpu_count() or 2) // 2),
        metavar="N",
        help="students at a time (default: half of the cores)",
    )
    add(
        "--time-limit",
        type=float,
        default=20.0,
        metavar="SECONDS",
        help="of the processor, a cell or part of a question; by the clock five times that (default: 20)",
    )
    add("--total-time", type=float, default=300.0, metavar="SECONDS", help="alike, for a student (default: 300)")
    add("--memory", type=float, default=2.0, metavar="GB", help="of a student's process (default: 2)")
    add(
        "--without-isolation",
        action="store_true",
        help="run students' code as yourself, for containers that hold nothing else (docs/grading.md)",
    )
    add("--by-hand", metavar="FILE", help="copy of grades.csv with points for open answers (docs/grading.md)")
    add("--resume", action="store_true", help="go on where a grading into DIR was interrupted")


def forget_working_directory() -> None:
    """Import nothing from the working directory from now on, unless this package is there."""
    here, home = Path.cwd().resolve(), Path(__file__).resolve().parents[2]
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() not in {here} - {home}]


def run_grade_command(arguments: Namespace) -> int:
    """Grade, and say where it is; returns the exit code."""
    if find_spec("nbgrader") is None:
        raise ValueError('grade: nbgrader is not installed; pip install "grpo-edu[classroom]"')
    forget_working_directory()  # it may hold a student's psutil.py
    from grpo_edu.checks.core import slip_credit
    from grpo_edu.grading.grade import grade_submissions
    from grpo_edu.grading.sandbox import Limits

    limits = Limits(
        seconds=arguments.time_limit, total_seconds=arguments.total_time, memory=int(arguments.memory * 2**30)
    )
    more = {"masters": arguments.masters} if arguments.masters else {}
    grades = grade_submissions(
        arguments.submissions,
        arguments.output,
        notebooks=_names(arguments.notebooks),
        seed=_seed(arguments.seed),
        slip_credit=slip_credit() if arguments.slip_credit is None else arguments.slip_credit,
        limits=limits,
        workers=arguments.workers,
        formats=_names(arguments.format),
        resume=arguments.resume,
        isolated=not arguments.without_isolation,
        by_hand=arguments.by_hand,
        tell=lambda line: print(line, file=sys.stderr, flush=True),
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


def _names(text: str) -> list[str]:
    """
    >>> _names("03, 04")
    ['03', '04']
    """
    return [name.strip() for name in text.split(",") if name.strip()]


def _seed(given: int | None) -> int | None:
    """The option, else the environment's, else None for a new one."""
    from grpo_edu.checks.core import SEED_VARIABLE

    text = os.environ.get(SEED_VARIABLE)
    if given is not None or not text:
        return given
    if not text.lstrip("-").isdigit():
        raise ValueError(f"seed: {SEED_VARIABLE} is {text!r}; give a whole number")
    return int(text)
