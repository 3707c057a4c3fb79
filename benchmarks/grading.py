"""A large class, graded overnight: ``python -m benchmarks.grading``.

Fabricates 200 students who hand in exercise 04: right answers, slips, unwritten ones, errors, endless loops, and files
that need repair. They are graded twice with one seed by ``grpo-edu grade`` with its isolation: once the grader is
killed with SIGKILL when half of the class is graded, and resumed; once it is left alone and measured. Both tables must
be equal, byte for byte. Writes ``benchmarks/results/grading.json``; takes half an hour on two cores that are shared.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness import RESULTS, exit_code, save
from benchmarks.notebooks import ROOT, PeakOfChildren

COMMAND = "python -m benchmarks.grading"
NAME = "04_group_advantages"
SLIPS = {
    "tie-probability": ("sum(chance**num_generations for chance in chances)", "chances[0] ** num_generations"),
    "group-advantages": (".masked_fill(tied[:, None], 0.0)", ""),
    "degenerate-groups": ("(groups == groups[:, :1]).all(dim=1)", "groups.std(dim=1) < 1e-4"),
    "rloo-advantages": ("sum_of_others / count_of_others.clamp(min=1)", "rows.mean(dim=1, keepdim=True)"),
    "dynamic-sampling": ("int(kept[-1]) + 1", "int(kept[-1])"),
}
KINDS = {"right": 65, "slip": 20, "not written": 10, "error": 5}  # answers of 100
ALL_RIGHT, LOOP = 8, 25  # of this many students one has all answers right, and one a loop without an end
FILES = {"renamed": 7, "without marks": 11, "UTF-16": 13, "no notebook": 37}  # of this many students one


def cells_of(folder: str) -> dict[str, Any]:
    """Cell by nbgrader's id."""
    notebook = json.loads((ROOT / folder / f"{NAME}.ipynb").read_text(encoding="utf-8"))
    return {cell["metadata"]["nbgrader"]["grade_id"]: cell for cell in notebook["cells"]}


def answer(kind: str, cell: str, right: str, stub: str) -> str:
    """Return the source of one answer."""
    if kind == "slip":
        old, new = SLIPS[cell]
        if right.count(old) != 1:
            raise ValueError(f"{cell}: the slip {old!r} does not fit the solution any more; change SLIPS")
        return right.replace(old, new)
    head = stub.partition("raise NotImplementedError")[0].rstrip(" ")
    wrong = {"error": "    return rewards.undefined\n", "loop": "    while True:\n        pass\n"}
    return {"right": right, "not written": stub}.get(kind) or head + wrong[kind]


def fabricate(folder: Path, students: int) -> dict[str, int]:
    """Write a class; student → points, for those of whom all answers are right."""
    solutions, known = cells_of("solutions"), {}
    for number in range(students):
        rng, student = random.Random(number), f"student_{number:03}"
        notebook = json.loads((ROOT / "exercises" / f"{NAME}.ipynb").read_text(encoding="utf-8"))
        for cell in notebook["cells"]:
            name = cell["metadata"]["nbgrader"]["grade_id"]
            if name in SLIPS:
                (kind,) = rng.choices([*KINDS], [*KINDS.values()])
                kind = "loop" if number % LOOP == 1 and name == "tie-probability" else kind
                kind = "right" if number % ALL_RIGHT == 0 else kind
                right, stub = "".join(solutions[name]["source"]), "".join(cell["source"])
                cell["source"] = answer(kind, name, right, stub)
        clumsy = [kind for kind, every in FILES.items() if number % every == 3]
        if "without marks" in clumsy:
            for place, cell in enumerate(notebook["cells"]):
                cell["metadata"], cell["id"] = {}, f"lost-{place}"
        path = folder / student / ("my homework.ipynb" if "renamed" in clumsy else f"{NAME}.ipynb")
        path.parent.mkdir(parents=True)
        text = "My dog ate it.\n" if "no notebook" in clumsy else json.dumps(notebook)
        path.write_text(text, encoding="utf-16" if "UTF-16" in clumsy else "utf-8")
        if number % ALL_RIGHT == 0:
            known[student] = 0 if "no notebook" in clumsy else 19
    return known


def start(submissions: Path, output: Path, workers: int, *more: str) -> subprocess.Popen:
    """Start the grader in a process of its own."""
    command = [sys.executable, "-m", "grpo_edu", "grade", str(submissions), "--output", str(output), "--seed", "21"]
    return subprocess.Popen([*command, "--workers", str(workers), *more], stdout=subprocess.DEVNULL)


def finish(grader: subprocess.Popen) -> None:
    """Wait for the grader; raise RuntimeError if it fails."""
    if grader.wait():
        raise RuntimeError("the grader failed; its own message is above")


def killed_and_resumed(submissions: Path, output: Path, students: int, workers: int) -> dict[str, Any]:
    """Grade half of the class, kill the grader, look for processes that it left, and resume."""
    grader = start(submissions, output, workers)
    while len(list((output / "students").glob("*.json"))) < students / 2:
        if grader.poll() is not None:
            raise RuntimeError("the grader ended before it could be killed; its own message is above")
        time.sleep(0.05)
    own = psutil.Process(grader.pid).children(recursive=True)
    grader.kill()
    grader.wait()
    left = psutil.wait_procs(own, timeout=20)[1]
    kept, started = len(list((output / "students").glob("*.json"))), time.perf_counter()
    finish(start(submissions, output, workers, "--resume"))
    return {"kept": kept, "left over": len(left), "rest": round(time.perf_counter() - started, 1)}


def measured(submissions: Path, output: Path, students: int, workers: int) -> dict[str, float]:
    """Grade the class without a stop."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with PeakOfChildren() as memory:
        finish(start(submissions, output, workers))
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "seconds": round(seconds, 1),
        "processor seconds": round(processor, 1),
        "submissions per minute": round(60 * students / seconds, 1),
        "submissions per minute and core": round(60 * students / processor, 1),
        "peak": memory.peak,
    }


def main() -> int:
    """Grade the class twice, print and store what was measured; exit 1 if a promise is not kept."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--students", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULTS / "grading.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as parent:
        submissions, stopped, whole = (Path(parent, name) for name in ("submissions", "stopped", "whole"))
        known = fabricate(submissions, options.students)
        resumed = killed_and_resumed(submissions, stopped, options.students, options.workers)
        found = measured(submissions, whole, options.students, options.workers)
        tables = [(folder / "grades.csv").read_bytes() for folder in (stopped, whole)]
    rows = {row["student"]: row for row in csv.DictReader(tables[1].decode().splitlines())}
    verdicts = {
        "every student has a row": len(rows) == options.students,
        "right answers have all points": all(int(rows[name]["total"]) == points for name, points in known.items()),
        "the killed grader leaves no process": resumed["left over"] == 0,
        "a grading that was killed and resumed gives the same table, byte for byte": tables[0] == tables[1],
    }
    about = {"students": options.students, "workers": options.workers}
    save(options.output, COMMAND, {**about, "verdicts": verdicts, "undisturbed": found, "killed": resumed})
    print(json.dumps({"undisturbed": found, "killed": resumed}, indent=1))
    return exit_code(verdicts)


if __name__ == "__main__":
    sys.exit(main())
