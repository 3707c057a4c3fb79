"""The course as nbgrader's own: its commands release, autograde with partial credit, and give us what they collect."""

import csv
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import nbformat
import pytest
from forty_submissions import NAME, RIGHT
from nbgrader.api import Gradebook

from classroom.exercises import write_course
from grpo_edu.cli.main import main

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).resolve().parents[1]
PARTLY = RIGHT["group_advantages"].replace("bool((group == group[0]).all())", "False")


def nbgrader(course, *arguments):
    """`nbgrader` with its programs on the path; its log where it fails."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(REPOSITORY), "HOME": str(course), "OMP_NUM_THREADS": "1"}
    env |= {"JUPYTER_PREFER_ENV_PATH": "1", "GRPO_EDU_CHECK_SEED": "5"}
    done = subprocess.run(
        [sys.executable, "-m", "nbgrader", *arguments], cwd=course, env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]


def answer(notebook, answers):
    for cell in notebook.cells:
        for name, source in answers.items():
            if cell.source.startswith(f"def {name}("):
                cell.source = source
    return notebook


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """The folder of a course that nbgrader has released, collected and graded, an open answer by hand."""
    course = tmp_path_factory.mktemp("course")
    write_course(REPOSITORY / "solutions", course)
    nbgrader(course, "generate_assignment", NAME)
    released = nbformat.read(course / "release" / NAME / f"{NAME}.ipynb", as_version=4)
    exercise = nbformat.read(REPOSITORY / "exercises" / f"{NAME}.ipynb", as_version=4)
    assert [cell.source for cell in released.cells] == [cell.source for cell in exercise.cells]

    archive = course / "downloaded" / NAME / "archive" / "class.zip"
    archive.parent.mkdir(parents=True)
    written = next(
        cell for cell in released.cells if cell.metadata.get("nbgrader", {}).get("grade_id") == "open-choose-g"
    )
    written.source = "I take 8 groups of 8."
    partly = answer(released, {"tie_probability": RIGHT["tie_probability"], "group_advantages": PARTLY})
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr(f"ana_77_assignsubmission_file_/{NAME}.ipynb", nbformat.writes(partly))
    nbgrader(course, "zip_collect", NAME)
    nbgrader(course, "autograde", NAME)
    with Gradebook(f"sqlite:///{course / 'gradebook.db'}") as gradebook:  # what the Formgrader does
        by_hand = gradebook.find_grade("open-choose-g", NAME, NAME, "ana")
        unwritten = gradebook.find_grade("open-tie-curve", NAME, NAME, "ana")
        assert by_hand.needs_manual_grade and not unwritten.needs_manual_grade
        by_hand.manual_score, by_hand.extra_credit = 3, 0.5
        gradebook.db.commit()
    nbgrader(course, "export")
    return course


@pytest.mark.long
def test_nbgrader_grades_what_it_has_released(course):
    (theirs,) = csv.DictReader((course / "grades.csv").read_text().splitlines())
    assert float(theirs["score"]) == 11 and float(theirs["max_score"]) == 27  # 3 of 3, 4.5 of 5, 3.5 by hand


@pytest.mark.long
def test_we_grade_a_course_of_nbgrader_with_the_points_that_were_given_by_hand(course, tmp_path, isolation):
    assert main(["grade", str(course), "--output", str(tmp_path / "ours"), "--seed", "5", "--workers", "1"]) == 0
    (ours,) = csv.DictReader((tmp_path / "ours" / "grades.csv").read_text().splitlines())
    assert (ours["student"], ours["total"], ours["out of"], ours["notes"]) == ("ana", "11", "27", "")
    assert (ours["04 open-choose-g"], ours["04 open-tie-curve"]) == ("3.5", "")


def test_a_course_is_laid_out_once(tmp_path):
    written = write_course(REPOSITORY / "solutions", tmp_path)
    assert tmp_path / "nbgrader_config.py" in written
    names = {path.stem for path in (REPOSITORY / "solutions").rglob("*.ipynb")}
    assert {path.parent.name for path in written if path.suffix == ".ipynb"} == names
    with pytest.raises(FileExistsError, match="holds a course"):
        write_course(REPOSITORY / "solutions", tmp_path)
    with pytest.raises(FileNotFoundError, match="no notebook"):
        write_course(tmp_path / "nowhere", tmp_path / "other")
