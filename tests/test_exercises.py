"""Masters and student versions: generated alike, free of solutions, and both run as a student or a grader runs them."""

import json
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from classroom.exercises import main, student_version, write_exercises

REPOSITORY = Path(__file__).resolve().parents[1]
MASTERS = REPOSITORY / "solutions"
NAMES = sorted(path.relative_to(MASTERS).with_suffix("").as_posix() for path in MASTERS.rglob("*.ipynb"))
STUDIES = [name for name in NAMES if name.startswith("studies/")]


def read(folder, name):
    return nbformat.read(REPOSITORY / folder / f"{name}.ipynb", as_version=nbformat.NO_CONVERT)


def test_there_are_masters_and_a_student_version_of_each():
    assert NAMES
    exercises = REPOSITORY / "exercises"
    found = [path.relative_to(exercises).with_suffix("").as_posix() for path in exercises.rglob("*.ipynb")]
    assert sorted(found) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_student_version_is_what_the_master_gives(name):
    assert nbformat.writes(student_version(read("solutions", name))) == nbformat.writes(read("exercises", name))


@pytest.mark.parametrize("name", NAMES)
def test_no_line_of_a_solution_is_left(name):
    solutions = [cell for cell in read("solutions", name).cells if cell.metadata.nbgrader.solution]
    blocks = [cell.source for cell in solutions if cell.cell_type == "markdown"]  # an open answer is all solution
    blocks += re.findall(
        r"### BEGIN SOLUTION\n(.*?)### END SOLUTION", "\n".join(cell.source for cell in solutions), re.S
    )
    lines = {
        line.strip()
        for block in blocks
        for line in block.splitlines()
        if len(line.strip()) > 12 and "criterion" not in line
    }
    student = "\n".join(cell.source for cell in read("exercises", name).cells)
    assert lines and not [line for line in lines if line in student]
    assert "BEGIN SOLUTION" not in student and "nbgrader" not in student


@pytest.mark.parametrize("name", NAMES)
def test_points_in_the_text_are_those_of_the_checks(name):
    from grpo_edu.checks import exercises

    master = read("solutions", name)
    for cell in master.cells:
        if is_check(cell):
            checked = re.fullmatch(r"checks\.check_(\w+)\((\w+)\)\.grade\(\)", cell.source)
            assert checked and checked[1] == checked[2]
            assert cell.metadata.nbgrader.points == exercises()[checked[1]].max_points
    graded = [cell.metadata.nbgrader for cell in master.cells if cell.metadata.nbgrader.grade]
    total = sum(cell.points for cell in graded if not cell.solution)
    assert f"Together: {total} points." in master.cells[0].source or not total


@pytest.mark.parametrize("name", sorted({*NAMES} - {*STUDIES}))
def test_the_table_lists_the_exercises_as_their_headings_do(name):
    first, *cells = [cell.source for cell in read("solutions", name).cells if cell.cell_type == "markdown"]
    text = "\n".join(cells)
    headings = re.findall(r"^## (?:Open question )?(\w · .+)\n+\*(\d+) points.* · (\d+) min", text, re.M)
    assert headings == re.findall(r"^\| (\w · .+?) \| (\d+)\D*? \|.* (\d+) min \|$", first, re.M)


@pytest.mark.parametrize("name", sorted({*NAMES} - {*STUDIES}))
def test_two_open_questions_have_a_model_answer_and_a_rubric_that_adds_up(name):
    open_answers = [cell for cell in read("solutions", name).cells if cell.get("id", "").startswith("open-")]
    assert len(open_answers) == 2
    for cell in open_answers:
        marks = cell.metadata.nbgrader
        assert marks.grade and marks.solution and not marks.locked
        model, _, rubric = cell.source.partition("**Rubric**")
        assert len(rubric_points(rubric)) >= 3 and sum(rubric_points(rubric)) == marks.points
        assert len(model.split()) > 80


def rubric_points(text):
    return [int(number) for number in re.findall(r"\| (\d+) \|$", text, re.M)]


@pytest.mark.parametrize("name", STUDIES)
def test_the_rubrics_of_a_study_add_up_and_students_know_the_total(name):
    cells = read("solutions", name).cells
    by_hand = [cell for cell in cells if cell.metadata.nbgrader.grade]
    assert all(sum(rubric_points(cell.source)) == cell.metadata.nbgrader.points for cell in by_hand)
    total = sum(cell.metadata.nbgrader.points for cell in by_hand)
    assert f"Together: {total} points" in cells[0].source and sum(rubric_points(cells[0].source)) == total


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["studies/capstone", pytest.param("studies/study", marks=pytest.mark.long)],  # which trains four times
)
def test_the_code_of_a_study_runs_to_its_figure_or_first_steps(name, tmp_path, monkeypatch):
    import matplotlib

    matplotlib.use("agg")
    monkeypatch.chdir(tmp_path)
    namespace = {}
    smaller = {"(0, 1, 2, 3, 4)": "(0, 1)", '"max_steps": 16': '"max_steps": 1', "n=100)": "n=5)"}
    for cell in read("solutions", name).cells:
        if cell.cell_type == "code":
            source = cell.source
            for all_of_it, little in smaller.items():
                source = source.replace(all_of_it, little)
            exec(source, namespace)
    if "rows" in namespace:
        assert (
            len(namespace["rows"])
            == 2 * len(namespace["ARMS"])
            == len((tmp_path / "study_runs.jsonl").open().readlines())
        )
        assert namespace["all_runs"]() == namespace["rows"]  # what is finished is not trained again


def test_the_sample_reports_say_what_their_runs_say():
    from grpo_edu.evaluation import mean_estimate

    text = (MASTERS / "studies" / "sample_reports.md").read_text()
    rows = [json.loads(line) for line in (MASTERS / "studies" / "sample_runs.jsonl").read_text().splitlines()]
    for arm in dict.fromkeys(row["arm"] for row in rows):
        solved = [row["solved"] for row in sorted(rows, key=lambda row: row["seed"]) if row["arm"] == arm]
        found = mean_estimate([count / 3 for count in solved])
        row = f"| {arm} | {', '.join(map(str, solved))} | {found.value:.1f}% ({found.low:.1f} to {found.high:.1f}) |"
        assert row in text
    for marks in (19, 6):
        report = text.split(f"{marks} of 20 points")[1].split("## Report")[0]
        assert sum(int(number) for number in re.findall(r"\| (\d) of \d \|", report)) == marks


def is_check(cell):
    return cell.metadata.nbgrader.grade and not cell.metadata.nbgrader.solution


def results_of_checks(notebook, check):
    """The cells of the checks, each with what `check` returns for it and the names that the notebook has defined."""
    namespace = {"__name__": "__main__"}
    for cell in notebook.cells:
        if cell.cell_type == "code" and is_check(cell):
            yield cell, check(cell.source, namespace)
        elif cell.cell_type == "code":
            exec(cell.source, namespace)


QUICK = [  # the cells of the diagnosis lab train
    pytest.param(name, marks=pytest.mark.long) if name == "12_diagnosis_lab" else name
    for name in sorted({*NAMES} - {*STUDIES})
]


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_stubs_earn_no_points(name):
    for cell, found in results_of_checks(read("exercises", name), eval):
        assert found == 0, cell.source


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_masters_earn_all_points(name):
    """Without the parts that train a model: one trains in the sandbox in test_grading.py, all with `--all`."""
    from grpo_edu.checks import exercises

    def lost(source, namespace):
        answer = source.partition("check_")[2].partition("(")[0]
        exercise = exercises()[answer]
        feedback = getattr(exercise, "untrained", exercise)(namespace[answer], seed=5)
        return feedback.max_points - feedback.points

    for cell, found in results_of_checks(read("solutions", name), lost):
        assert found == 0, cell.source


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["solutions", pytest.param("exercises", marks=pytest.mark.long)])
def test_a_kernel_runs_to_the_end_and_shows_the_points(folder):
    notebook = read(folder, "04_group_advantages")
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    for cell in filter(is_check, notebook.cells):
        last = cell.outputs[-1]
        assert last.output_type == "execute_result"
        assert int(last.data["text/plain"]) == (cell.metadata.nbgrader.points if folder == "solutions" else 0)


def test_a_solution_without_its_end_is_refused(tmp_path):
    broken = read("solutions", "04_group_advantages")
    cell = next(cell for cell in broken.cells if cell.metadata.nbgrader.solution)
    cell.source = cell.source.replace("### END SOLUTION", "")
    with pytest.raises(ValueError, match="cannot be converted"):
        student_version(broken)


def test_a_folder_without_masters_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no notebook"):
        write_exercises(tmp_path, tmp_path / "out")


def test_the_command_writes_what_is_in_the_repository(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["exercises", "--output", str(tmp_path)])
    assert main() == 0
    for name in NAMES:
        assert (tmp_path / f"{name}.ipynb").read_text() == (REPOSITORY / "exercises" / f"{name}.ipynb").read_text()
    assert capsys.readouterr().out.split() == [f"{name.split('/')[-1]}.ipynb" for name in NAMES]
