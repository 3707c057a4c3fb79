"""Grading from end to end: fabricated submissions, the right points, nobody harmed by a neighbor.

Each student takes about two seconds of CPU time, most of it for the imports in a new sandbox, so every run grades one
submission of each kind, and `course.py test --all` all of them.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
from forty_submissions import ALL, EACH_KIND, LEFT_BEHIND, NAME, right, rows_of, write_submissions

from classroom.grade import _answered
from classroom.repair import Step
from classroom.run import collect, inputs_of
from classroom.sandbox import Limits, packed
from classroom.student import _as_json, _shell, outcomes, run_steps
from grpo_edu.checks.compare import Outcome
from grpo_edu.checks.core import Call
from grpo_edu.checks.reward_functions import accuracy_reward
from grpo_edu.cli.main import main

pytestmark = pytest.mark.usefixtures("isolation")
REPOSITORY = Path(__file__).resolve().parents[1]
# Short, for tests, but a busy computer with a slow processor takes more than 1.5 s of CPU time for a traceback after a
# MemoryError and for the import of matplotlib.
OPTIONS = "--time-limit 4 --total-time 60 --memory 0.5 --workers 2 --seed 5 --slip-credit 0".split()


@pytest.fixture
def ana(tmp_path):
    """The folder of a student in tmp_path/in, who has handed in nothing."""
    folder = tmp_path / "in" / "ana"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def grade(tmp_path):
    """Grade tmp_path/in into tmp_path/out, or what the options name; returns the exit status."""

    def command(*options, submissions="in", output="out"):
        return main(["grade", str(tmp_path / submissions), "--output", str(tmp_path / output), *options])

    return command


@pytest.fixture(scope="module", params=["each kind", pytest.param("all", marks=pytest.mark.long)])
def graded(request, tmp_path_factory):
    """(output folder, expected by student, files that nobody may have written)."""
    place = tmp_path_factory.mktemp("class")
    submissions, output = place / "submissions", place / "grades"
    targets = [place / "instructor.txt", output / "grades.csv", submissions / "ana_right" / f"{NAME}.ipynb"]
    targets[0].write_text("mine")
    expected = write_submissions(submissions, targets, all_of_them=request.param == "all")
    before = {path: path.read_bytes() for path in submissions.rglob("*") if path.is_file() and not path.is_symlink()}
    before[targets[0]] = b"mine"
    options = [*OPTIONS, "--format", "canvas,moodle"]
    assert main(["grade", str(submissions), "--output", str(output), *options]) == 0
    return output, expected, before


def troubles_and_looks(output):
    found = {}
    for path in (output / "students").glob("*.json"):
        content = json.loads(path.read_bytes())
        found[content["student"]] = content
    return found


def test_a_row_and_the_right_points_for_everybody(graded):
    output, expected, _ = graded
    rows = {row["student"].removeprefix("'"): row for row in rows_of(output / "grades.csv")}
    assert set(expected) >= EACH_KIND and set(rows) == set(expected)
    earned = {student: int(row["total"]) for student, row in rows.items()}
    assert earned == {student: what.points for student, what in expected.items()}
    for row in rows.values():
        assert int(row["out of"]) == ALL
        assert sum(int(value or 0) for name, value in row.items() if name.startswith("04 ")) == int(row["total"])


def test_a_word_on_each_trouble_and_none_without_one(graded):
    output, expected, _ = graded
    found = troubles_and_looks(output)
    for student, what in expected.items():
        said = "; ".join(found[student]["troubles"])
        assert what.word in said if what.word else not said, (student, said)
        assert what.look in "; ".join(found[student]["looks"]), (student, found[student]["looks"])
    assert found["ana_right"]["troubles"] == [] and found["ana_right"]["looks"] == []
    notes = {row["student"]: row["notes"] for row in rows_of(output / "grades.csv")}
    assert "had to be killed" in notes["ivo_deaf_loop"] and notes["ana_right"] == ""


def test_what_students_may_not_touch_is_as_it_was(graded):
    output, _, before = graded
    assert {path: path.read_bytes() for path in before} == before
    assert "mine" not in (output / "grades.csv").read_text().splitlines()[0]


def test_no_process_of_a_student_is_left(graded):
    """Other tests, and other clones, may be grading at the same time: what counts is what belongs to this process, or
    has no parent, and runs this clone's Python."""
    left = []
    for one in psutil.process_iter(["cmdline"]):
        words = " ".join(one.info["cmdline"] or ())
        if LEFT_BEHIND in words or ("classroom.student" in words and sys.executable in words):
            with contextlib.suppress(psutil.NoSuchProcess):
                above = one.parents()
                others = any("pytest" in " ".join(parent.cmdline()) for parent in above)
                if os.getpid() in [parent.pid for parent in above] or not others:
                    left.append(words)
    assert left == []


def test_the_feedback_names_the_mistake_and_escapes_what_students_wrote(graded):
    output, expected, _ = graded
    pages = {path.stem: path.read_text() for path in (output / "feedback").glob("*.html")}
    assert len(pages) == len(expected)
    assert "Looks like: <b>" in pages["doejane_4711"] and "tensor(" in pages["doejane_4711"]
    assert "not written yet" in pages["writes_and_stays_behind"].lower()
    odd = next(page for page in pages.values() if "&lt;b&gt;" in page)
    assert "<b>Ünï" not in odd and "=1+1 &lt;b&gt;Ünï" in odd
    assert not any(re.search(r"(?:src|href)=\"(?:https?:)?//", page) for page in pages.values())


def test_the_summary_shows_the_class(graded):
    output, expected, _ = graded
    page = (output / "summary.html").read_text()
    assert f"{len(expected)} students" in page and page.count("<img alt=") == 2
    for word in ("04 group_advantages", "Most frequent mistakes", "had to be killed", "Worth a look", "Seed"):
        assert word in page


def test_tables_for_canvas_and_moodle(graded):
    output, expected, _ = graded
    canvas = rows_of(output / "grades_canvas.csv")
    assert canvas[0]["Student"].strip() == "Points Possible" and canvas[0][NAME] == str(ALL)
    by_name = {row["Student"]: row for row in canvas}
    assert by_name["doejane"]["ID"] == "4711" and by_name["doejane"][NAME] == str(expected["doejane"].points)
    assert by_name["ana_right"]["SIS Login ID"] == "ana_right"
    moodle = {row["Full name"] or row["Username"]: row for row in rows_of(output / "grades_moodle.csv")}
    assert moodle["Max Muster"]["Identifier"] == "Participant 42" and moodle["Max Muster"]["Total"] == "0"
    assert len(moodle) == len(canvas) - 1 == len(expected)


def test_the_mended_notebooks_are_what_nbgrader_takes(graded):
    import nbformat
    from nbgrader.preprocessors import CheckCellMetadata, DeduplicateIds

    output, expected, _ = graded
    paths = sorted((output / "notebooks").rglob("*.ipynb"))
    assert len(paths) >= len(expected) - 10  # those without a notebook of the course
    for path in paths:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        CheckCellMetadata().preprocess(notebook, {})
        marks = [cell.metadata.get("nbgrader") for cell in notebook.cells]
        after, _ = DeduplicateIds().preprocess(notebook, {})
        assert [cell.metadata.get("nbgrader") for cell in after.cells] == marks
        assert sum(bool(mark and mark["grade"]) for mark in marks) == 7  # five checks and two open answers


def test_going_on_grades_nobody_twice(graded, tmp_path, capsys):
    before, again = graded[0], tmp_path / "again"
    submissions = before.parent / "submissions"
    shutil.copytree(before, again)
    (again / "students" / "link_out.json").unlink()
    (again / "grades.csv").unlink()
    ana = again / "students" / "ana_right.json"
    ana.write_text(ana.read_text().replace('"given": ""', '"given": "kept"'))
    assert main(["grade", str(submissions), "--output", str(again), "--resume", *OPTIONS]) == 0
    assert (again / "grades.csv").read_bytes() == (before / "grades.csv").read_bytes()
    assert (again / "students" / "link_out.json").is_file()
    assert '"given": "kept"' in ana.read_text()
    capsys.readouterr()
    for options, words in ((OPTIONS, "--resume"), (["--resume", *OPTIONS, "--seed", "6"], "another seed")):
        assert main(["grade", str(submissions), "--output", str(again), *options]) == 2
        assert words in capsys.readouterr().err
    settings = json.loads((again / "grading.json").read_text())
    (again / "grading.json").write_text(json.dumps({**settings, "grpo_edu": "0.3.0"}))
    assert main(["grade", str(submissions), "--output", str(again), "--resume", *OPTIONS]) == 2
    assert "graded by grpo_edu 0.3.0; continue with that version" in capsys.readouterr().err


@pytest.mark.long
def test_a_row_depends_on_nobody_else_and_on_no_notebook_that_is_not_graded_now(graded, tmp_path):
    before, again, submissions = graded[0], tmp_path / "again", tmp_path / "submissions"
    submissions.mkdir()
    for name in ("ana_right", "a_pipe", "link_out"):
        subprocess.run(["cp", "-a", before.parent / "submissions" / name, submissions], check=True)  # pipes as they are
    shutil.copy(REPOSITORY / "exercises" / "15_your_own_task.ipynb", submissions / "ana_right")
    assert main(["grade", str(submissions), "--output", str(again), *OPTIONS, "--notebooks", "04"]) == 0
    rows = (again / "grades.csv").read_bytes().splitlines()
    assert {*rows} < {*(before / "grades.csv").read_bytes().splitlines()} and len(rows) == 4


@pytest.mark.long
def test_masters_get_all_points(tmp_path):
    """Of every master in this process, without training, it is in test_exercises.py; here they train in the sandbox."""
    shutil.copytree(REPOSITORY / "solutions", tmp_path / "solutions", ignore=shutil.ignore_patterns("studies"))
    assert main(["grade", str(tmp_path / "solutions"), "--output", str(tmp_path / "out"), "--workers", "1"]) == 0
    assert json.loads((tmp_path / "out" / "grading.json").read_bytes())["seed"] > 0  # a new one
    (row,) = rows_of(tmp_path / "out" / "grades.csv")
    assert row["student"] == "solutions" and row["total"] == row["out of"], row
    # Worth a look, and true: the runs of 12 are those of its example name.
    assert {note.partition(":")[0] for note in row["notes"].split("; ")} == {"12_diagnosis_lab"}
    assert len([name for name in row if name[:2].isdigit()]) >= 40


@pytest.mark.parametrize(("answer", "asked"), [(accuracy_reward, [[0], [1]]), (lambda *_, **__: [0.0] * 5, [[0]])])
def test_a_training_begins_when_the_other_parts_are_right(answer, asked):
    class Student:
        """Answers in this process, but does not train."""

        def __init__(self):
            self.asked, self.seconds = [], []

        def run(self, task, most_seconds):
            self.seconds.append((task["cell_seconds"], task["limits"]["seconds"]))
            calls = inputs_of("accuracy_reward", 5)
            parts = [part for part in range(2) if [0, part] not in task["answered"]]
            self.asked.append(parts)
            found = [[Outcome()] if part else outcomes(answer, calls[part], Limits()) for part in parts]
            messages = [
                {"answer": [0, part], "outcomes": list(map(_as_json, one))}
                for part, one in zip(parts, found, strict=True)
            ]
            return messages, {"end": "done", "seconds": 0.1, "printed": 0, "code": 0, "new": True, "output": ""}

    student = Student()
    collect(student, [Step("ask", "accuracy_reward", "")], seed=5, limits=Limits(seconds=2), seconds_left=60)
    assert student.asked == asked
    assert student.seconds == [(2, 2), (2, 6)][: len(asked)]  # three times as long for a training, not for the cells


def test_while_a_model_trains_a_cell_has_no_more_time_than_before():
    shell = _shell()
    shell.user_ns["wait"] = lambda seconds: time.sleep(seconds) or "done"
    calls = {"wait": packed([[Call((0.5,))]])}
    steps = [["cell", "a loop", "while True: pass"], ["ask", "wait", ""]]
    task = {"steps": steps, "calls": calls, "skip": [], "answered": [], "cell_seconds": 0.2}
    task["limits"] = asdict(Limits(seconds=5, patience=1))
    received, channel = os.pipe()
    run_steps(task, channel, shell)
    type(shell).clear_instance()
    os.close(channel)
    with open(received) as messages:
        said = [json.loads(line) for line in messages]
    assert [message["error"] for message in said if "error" in message] == ["TimeoutError: not done within 0.2 s"]
    assert [outcome[:2] for message in said if "answer" in message for outcome in message["outcomes"]] == [["done", ""]]


def test_answers_that_end_the_process_cost_no_other_answer():
    names = ["group_advantages", "degenerate_groups", "rloo_advantages", "dynamic_sampling", "tie_probability"]

    class Student:
        """Ends at every part of every exercise but the last."""

        starts = 0

        def run(self, task, most_seconds):
            self.starts += 1
            ending = {"seconds": 0.1, "printed": 0, "code": 3, "new": False, "output": "", "end": "ended"}
            for place, name in enumerate(names):
                parts = [part for part in range(len(inputs_of(name, 5))) if [place, part] not in task["answered"]]
                if parts and name != names[-1]:
                    return [{"at": [place, parts[0]]}], ending
            calls = inputs_of(names[-1], 5)
            given = [[[1.0, "", "", False]] * len(calls[part]) for part in parts]
            return [{"answer": [place, part], "outcomes": given[part]} for part in parts], {**ending, "end": "done"}

    student = Student()
    steps = [Step("ask", name, "") for name in names]
    found = collect(student, steps, seed=5, limits=Limits(), seconds_left=60)
    assert found.outcomes["tie_probability", 0][0].problem == "" and student.starts <= 2 * len(names)
    assert all(found.outcomes[name, 1][0].problem == "SystemExit" for name in names[:-1])


@pytest.mark.usefixtures("ana", "ctrl_c_works")
def test_an_interruption_keeps_what_was_graded_and_leaves_no_process(tmp_path, capsys, grade):
    """Ana's folder is empty, so it is graded at once."""
    (tmp_path / "in" / "bo").mkdir()
    runs = json.dumps(right(f"import subprocess\nsubprocess.run(['sleep', '{LEFT_BEHIND}'])"))
    (tmp_path / "in" / "bo" / f"{NAME}.ipynb").write_text(runs)
    options = ["--workers", "1", "--time-limit", "5000", "--total-time", "5000"]  # however slow this computer is
    kept, processes = tmp_path / "out" / "students" / "ana.json", []

    def interrupt():
        while not (kept.exists() and students_processes(f"sleep {LEFT_BEHIND}")):
            time.sleep(0.1)
        processes.extend(students_processes())
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    assert grade(*options) == 130
    thread.join()
    assert "1 of 2 students are kept; continue with --resume" in capsys.readouterr().err
    assert len(processes) >= 2 and psutil.wait_procs(processes, timeout=20)[1] == []
    assert not (tmp_path / "out" / "grades.csv").exists()


def students_processes(word="classroom.student"):
    """Return the processes below this one that have a word in their command line."""
    found = []
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            found += [one] if word in " ".join(one.cmdline()) else []
    return found


def test_a_student_who_takes_long_delays_nobody():
    others_are_kept = threading.Event()

    def answer(student):
        assert student == "quick" or others_are_kept.wait(timeout=30)
        return student

    answered = _answered(["slow", "quick"], answer, 2, threading.Event())
    assert next(answered) == "quick"
    others_are_kept.set()
    assert list(answered) == ["slow"]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--workers", "0"], "workers"),
        (["--format", "excel"], "format"),
        (["--notebooks", "77"], "notebooks"),
        (["--time-limit", "0"], "seconds"),
        (["--masters", "/nowhere"], "masters"),
    ],
)
def test_bad_options_are_refused_in_one_line(tmp_path, capsys, ana, grade, options, word):
    (ana / f"{NAME}.ipynb").write_text(json.dumps(right()))
    assert grade(*options) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and word in error
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("ana")
def test_the_seed_comes_from_the_environment_where_no_option_says_it(tmp_path, capsys, monkeypatch, grade):
    monkeypatch.setenv("GRPO_EDU_CHECK_SEED", "seven")
    assert grade() == 2
    assert "GRPO_EDU_CHECK_SEED is 'seven'" in capsys.readouterr().err
    monkeypatch.setenv("GRPO_EDU_CHECK_SEED", "7")
    assert grade() == 0
    assert json.loads((tmp_path / "out" / "grading.json").read_bytes())["seed"] == 7


@pytest.mark.usefixtures("ana")
def test_a_gradebook_counts_in_an_nbgrader_course_only(tmp_path, capsys, grade):
    (tmp_path / "in" / "gradebook.db").write_bytes(b"a student's" * 100)
    assert grade() == 0
    (tmp_path / "in" / "submitted" / "ana").mkdir(parents=True)
    capsys.readouterr()
    assert grade(output="other") == 2
    assert "not a readable gradebook" in capsys.readouterr().err


def test_points_by_hand_of_nobody_end_with_status_1_and_all_tables(tmp_path, capsys, grade):
    (tmp_path / "in" / "0012345").mkdir(parents=True)
    (tmp_path / "points.csv").write_text("student,id,04 open-choose-g\n12345,,3\n")
    assert grade("--by-hand", str(tmp_path / "points.csv")) == 1
    assert "handed in nothing: 12345." in capsys.readouterr().err and (tmp_path / "out" / "grades.csv").is_file()


@pytest.mark.usefixtures("ana")
def test_folders_that_cannot_be_graded_are_refused(tmp_path, capsys, grade):
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("do not lose me")
    for submissions, output, word in (
        ("nowhere", "out", "no folder"),
        ("empty", "out", "is empty"),
        ("in", "full", "holds files"),
        ("in", "in/out", "lies within"),
    ):
        assert grade(submissions=submissions, output=output) == 2
        assert word in capsys.readouterr().err
