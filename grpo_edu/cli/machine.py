"""`grpo-edu doctor`, `grpo-edu bench` and `grpo-edu cluster`: this computer, and the computers of a cluster."""

from __future__ import annotations

import json
import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict, fields
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from grpo_edu.cli.classroom import classroom_module
from grpo_edu.cli.options import Parser, add_common_options, add_options, add_profile_option, given_options
from grpo_edu.cli.train import add_train_options
from grpo_edu.runs.effects import RUN_NEEDS, OptionRequirement, reject_ineffective_options
from grpo_edu.runs.options import CONFIG_FIELDS, RUN_FIELDS
from grpo_edu.runs.profiles import load_profile
from grpo_edu.scale.cluster import ClusterJob, write_job

# The options of `grpo-edu cluster` that are fields of `ClusterJob`.
_JOB_FIELDS = tuple(field.name for field in fields(ClusterJob) if field.name not in ("profile", "fixed"))

# The job is always trained by TRL, keeps its log, and evaluates with sampling only.
_CLUSTER_NEEDS = (
    *RUN_NEEDS,
    OptionRequirement("deepspeed", lambda job: job["gpus_per_node"] > 0, "`gpus_per_node` above 0"),
    OptionRequirement(
        "gradient_accumulation_steps", lambda job: job["micro_batch_size"] is None, "no `micro_batch_size`"
    ),
    OptionRequirement("greedy backend device keep_completions inspect_steps", lambda job: False, "grpo-edu train"),
)
_BENCH_NEEDS = (
    OptionRequirement("report", lambda bench: bench["report"] or not bench["json"], "a FILE next to `json`"),
)

if TYPE_CHECKING:
    from grpo_edu.machine.hardware import Check


def add_doctor_options(command: ArgumentParser) -> None:
    """Add the options of `grpo-edu doctor`."""
    command.add_argument(
        "--startup",
        action="store_true",
        help="also measure, in a new process, where the time until the first training step goes",
    )


def run_doctor_command(arguments: Namespace) -> int:
    """Check this computer and print the report; returns the exit code, 1 if a check found a problem."""
    from grpo_edu.machine.hardware import cpu_report, doctor_checks
    from grpo_edu.machine.startup import startup_anatomy, startup_text

    classroom = classroom_module()  # it knows whether students' code can be isolated; no student needs it
    checks = [*doctor_checks(), *(classroom.grading_checks() if classroom else ())]
    ok = all(check.ok for check in checks)
    report = cpu_report() if find_spec("torch") else {}  # it asks torch; a missing torch is one of the checks
    startup = startup_anatomy() if arguments.startup and ok else None
    if arguments.json:
        found = {"ok": ok, "checks": [asdict(check) for check in checks], "cpu": report}
        print(json.dumps(found if startup is None else {**found, "startup": startup}))
    else:
        print(doctor_text(checks, report))
        if startup is not None:
            print(startup_text(startup))
    return 0 if ok else 1


def doctor_text(checks: Sequence[Check], report: dict[str, Any]) -> str:
    """Return what a terminal shows of the doctor's checks and of `cpu_report`."""
    lines = []
    for check in checks:
        lines.append(f"{'ok' if check.ok else 'PROBLEM':<8} {check.name:<11} {check.detail}")
        if check.remedy:
            lines.append(f"{'':<20} {check.remedy}")
    width = max((len(name) for name in report), default=0)
    for name, value in report.items():
        shown = ", ".join(value) if isinstance(value, list) else value
        lines.append(f"  {name.replace('_', ' '):<{width}} {shown}")
    problems = sum(not check.ok for check in checks)
    if problems:
        return "\n".join([*lines, f"{problems} of {len(checks)} checks found a problem."])
    return "\n".join([*lines, "This computer has everything that the course needs."])


def add_bench_options(command: ArgumentParser) -> None:
    """Add the options of `grpo-edu bench`."""
    command.add_argument(
        "--report",
        nargs="?",
        const="",
        metavar="FILE",
        help="print a row of Markdown; with FILE, put it into the table of that file (docs/measured.md)",
    )
    command.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="repetitions, of which the median is taken (default: 5)"
    )


def run_bench_command(arguments: Namespace) -> int:
    """Measure this computer and print the row; returns the exit code."""
    from grpo_edu.machine.bench import add_row, machine_text, measure_machine, read_table_file, report_text

    if arguments.report is not None:
        reject_ineffective_options({"report": arguments.report}, vars(arguments), _BENCH_NEEDS)
    if arguments.report:
        read_table_file(arguments.report)  # before half a minute is spent
    found = measure_machine(rounds=arguments.rounds)
    replaced = add_row(arguments.report, found) if arguments.report else None
    if arguments.json:
        print(json.dumps(found))
    elif replaced is not None:
        done = "Replaced" if replaced else "Added"
        print(f"{machine_text(found)}\n\n{done} the row of this computer in {arguments.report}.")
    else:
        print(machine_text(found) if arguments.report is None else report_text(found))
    return 0


def add_cluster_options(command: ArgumentParser) -> None:
    """Add the options of `grpo-edu cluster`."""
    add = command.add_argument
    add_profile_option(command, "cluster-lora")
    add_options(command, ClusterJob, _JOB_FIELDS)
    add("--output", default="cluster", metavar="DIR", help="folder for the job's files and its run (default: cluster)")
    add("--overwrite", action="store_true", help="replace the job's files in the folder")
    add("train", nargs="*", metavar="-- OPTIONS", help="options of grpo-edu train, after --")


def run_cluster_command(arguments: Namespace) -> int:
    """Write the files of a job, and say how to submit it; returns the exit code."""
    given = _train_options(arguments)
    options = given_options(arguments, _JOB_FIELDS)
    if sys.prefix != sys.base_prefix:
        options = {"environment": sys.prefix, **options}
    job = ClusterJob(load_profile(arguments.profile).override(given), fixed=tuple(given), **options)
    settings = {**job.adapted.request().to_settings(), **{name: getattr(job, name) for name in _JOB_FIELDS}}
    reject_ineffective_options({**given, **options}, {**settings, "backend": "trl"}, _CLUSTER_NEEDS)
    files = write_job(job, arguments.output, overwrite=arguments.overwrite)
    config = job.adapted.config()
    if arguments.json:
        batch = {"processes": job.processes, "prompts_per_step": config.prompts_per_step, "max_steps": config.max_steps}
        print(json.dumps({"files": [str(file) for file in files], **batch}))
        return 0
    print("\n".join(f"wrote {file}" for file in files))
    who = "one process samples" if job.processes == 1 else f"{job.processes} processes share"
    print(
        f"{who} {config.prompts_per_step} prompts x {config.num_generations} completions per "
        f"step, for {config.max_steps} steps.\nRead the script, then submit it: sbatch {shlex.quote(str(files[0]))}"
    )
    return 0


def _train_options(arguments: Namespace) -> dict[str, object]:
    """Return what was typed for `grpo-edu train`; raises ValueError for options that the job sets itself."""
    parser = Parser(prog="grpo-edu train")
    add_train_options(parser)
    add_common_options(parser)
    typed = parser.parse_args(arguments.train)
    for name in ("profile", "output", "overwrite", "resume"):
        if hasattr(typed, name):
            raise ValueError(f"`{name}` cannot be given after --; give `profile` and `output` before it.")
    return given_options(typed, (*RUN_FIELDS, *CONFIG_FIELDS))
