"""Results as they are kept and shown: nothing is lost on the way, and nothing that a student wrote takes effect."""

import csv
import io
import os
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from classroom import results
from classroom.exercises import OpenQuestion, Question, SourceNotebook
from classroom.pages import feedback_page, open_answers_page, plot_questions, plot_scores, score_counts, summary_page
from classroom.results import (
    StudentGrade,
    canvas_table,
    check_points,
    enter_points,
    file_names,
    grades_table,
    moodle_table,
    points_in_gradebook,
    points_in_table,
)
from grpo_edu.checks.feedback import Feedback, PartResult

EVIL = "<script>alert(1)</script>"
ONE = SourceNotebook("03_one", SimpleNamespace(cells=[]), (Question("check-f", "f", 3), Question("check-g", "g", 2)))
TWO = SourceNotebook("04_two", SimpleNamespace(cells=[]), (Question("check-h", "h", 5),))


def judged(name, *points, mistake=""):
    parts = [
        PartResult(
            f"part {n}",
            got,
            of,
            given="1 < 2",
            expected="3",
            got=EVIL,
            why="differs",
            mistake=mistake if got < of else "",
            hint="look `here`" if got < of else "",
        )
        for n, (got, of) in enumerate(points)
    ]
    return Feedback(name, tuple(parts), 0)


def ana():
    feedback = {"f": judged("f", (1, 1), (0, 2), mistake="it is squared"), "g": judged("g", (2, 2))}
    return StudentGrade("Ana", "77", "d", feedback, ["03_one"], ["late; and wet"], ["uses ctypes"])


def nobody():
    return StudentGrade(EVIL, troubles=[EVIL])


def table(text):
    return list(csv.reader(io.StringIO(text)))


def test_a_grade_is_the_same_after_a_file():
    assert StudentGrade.from_json(asdict(ana())) == ana()


def test_points_of_questions_and_notebooks():
    assert (ana().question("f"), ana().question("g"), ana().question("h")) == (1, 2, 0)
    assert (ana().points(ONE), ana().points(TWO)) == (3, 0)


def test_the_table_of_grades():
    rows = table(grades_table([ana(), nobody()], [ONE, TWO]))
    assert rows[0] == ["student", "id", "03 f", "03 g", "04 h", "total", "out of", "notes"]
    assert rows[1] == ["Ana", "77", "1", "2", "0", "3", "10", "late; and wet; uses ctypes"]
    assert rows[2][2:7] == ["0", "0", "0", "0", "10"]


OPEN = (OpenQuestion("open-a", 4, "Why?", "Because."), OpenQuestion("open-b", 2, "When?", "Then."))
ASKED = SourceNotebook("04_two", SimpleNamespace(cells=[]), (Question("check-h", "h", 5),), OPEN)


def writer():
    return StudentGrade("Ana", handed_in=["04_two"], open_answers={"04_two": {"open-a": EVIL}})


def test_an_open_answer_waits_until_it_is_graded_and_an_empty_one_is_worth_nothing():
    rows = table(grades_table([writer()], [ASKED]))
    assert rows[0][2:7] == ["04 h", "04 open-a", "04 open-b", "total", "out of"]
    assert rows[1][2:7] == ["0", "to grade", "", "0", "5"]  # what nobody graded is not in the possible points
    assert "not graded yet" in feedback_page(writer(), [ASKED])
    page = open_answers_page([writer()], [ASKED])
    assert "Because." in page and EVIL not in page and "&lt;script&gt;" in page


def test_points_by_hand_come_from_a_filled_copy_of_the_table(tmp_path):
    grade, copy = writer(), tmp_path / "copy.csv"
    copy.write_text(grades_table([grade], [ASKED]).replace("to grade", "2.5"))
    enter_points(points_in_table(copy, [ASKED]), [grade], [ASKED])
    graded = replace(ASKED, hand_graded=True)
    assert table(grades_table([grade], [graded]))[1][2:7] == ["0", "2.5", "", "2.5", "11"]
    assert "2.5 of 4 points" in feedback_page(grade, [graded])
    assert "04 open-b, graded by hand: 0 of 2 points, no answer was written" in feedback_page(grade, [graded])
    late = replace(grade, open_answers={"04_two": {"open-a": "x", "open-b": "handed in later"}})
    enter_points(points_in_table(copy, [ASKED]), [late], [ASKED])
    assert late.by_hand == {"04 open-a": 2.5} and table(grades_table([late], [graded]))[1][4] == "to grade"
    assert table(canvas_table([grade], [graded]))[1][5:] == ["11"]
    enter_points({("Ana", "", "04 open-a"): 3.0}, [grade], [ASKED])  # a gradebook has no whole numbers
    assert "3 of 4 points" in feedback_page(grade, [graded])


NAMES = ["@max", "'@max", "''x", "=1+1", "Ünï", "0012345", "1e5", "a,b", 'say "x"', "-7", "x;y"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_a_table_of_grades_is_read_as_it_was_written_by_whatever_program(tmp_path, encoding, separator):
    grades = [replace(writer(), student=name, lms_id=lms_id) for name in NAMES for lms_id in ("", "-0012")]
    rows = table(grades_table(grades, [ASKED]).replace("to grade", "2.5"))
    sink = io.StringIO()
    csv.writer(sink, delimiter=separator).writerows(rows)
    copy = tmp_path / "copy.csv"
    copy.write_bytes(sink.getvalue().encode(encoding))
    found = points_in_table(copy, [ASKED])
    assert {(student, lms_id) for student, lms_id, _ in found} == {one.key for one in grades}
    check_points(found, [one.key for one in grades])


@pytest.mark.parametrize("name", ["12345", "1E+05", "@maximum"])
def test_points_of_nobody_are_named(tmp_path, name):
    copy = tmp_path / "copy.csv"
    copy.write_text(f"student,id,04 open-a\n{name},,3\nAna,,2\n")
    with pytest.raises(RuntimeError, match=re.escape(f"for 1 who handed in nothing: {name}.")):
        check_points(points_in_table(copy, [ASKED]), [("Ana", ""), ("0012345", ""), ("1e5", ""), ("@max", "")])


def test_a_misspelt_column_of_points_is_named(tmp_path):
    copy = tmp_path / "copy.csv"
    copy.write_text("student,id,04 open-A\nAna,,3\n")
    with pytest.raises(ValueError, match="no column '04 open-A'"):
        points_in_table(copy, [ASKED])


def test_a_working_directory_has_no_say_in_the_figures(tmp_path):
    (tmp_path / "matplotlibrc").write_text("figure.dpi: 7\n")
    code = "from classroom.cli import _leave_working_directory as leave; leave(); import matplotlib\n"
    code += "assert matplotlib.rcParams['figure.dpi'] != 7"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, env=env, check=True)


def test_a_damaged_gradebook_is_a_sentence(tmp_path):
    pytest.importorskip("nbgrader")
    (tmp_path / "gradebook.db").write_bytes(b"no database" * 100)
    with pytest.raises(ValueError, match="gradebook.db is not a readable gradebook.*restore or move it"):
        points_in_gradebook(tmp_path / "gradebook.db", [ASKED])


def test_an_open_answer_is_shown_without_control_characters():
    answer = "one\ntwo \x1b[2J \u202eevil\u2066"
    grade = StudentGrade("Ana", handed_in=["04_two"], open_answers={"04_two": {"open-a": answer}})
    page = open_answers_page([grade], [ASKED])
    assert "one\ntwo" in page and not {"\x1b", "\u202e", "\u2066"} & {*page}


@pytest.mark.parametrize("written", ["five", "4.5", "-1", "1,5"])
def test_points_that_are_none_are_refused_with_the_student_and_the_range(tmp_path, written):
    copy = tmp_path / "copy.csv"
    copy.write_text(f'student,id,04 open-a\nAna,,"{written}"\n')
    with pytest.raises(ValueError, match=f"Ana is '{written}'.*from 0 to 4"):
        points_in_table(copy, [ASKED])
    copy.write_text("name,points\nAna,3\n")
    with pytest.raises(ValueError, match="grades.csv"):
        points_in_table(copy, [ASKED])


def test_tables_of_the_platforms():
    canvas = table(canvas_table([ana(), nobody()], [ONE, TWO]))
    assert canvas[0] == ["Student", "ID", "SIS User ID", "SIS Login ID", "Section", "03_one", "04_two"]
    assert canvas[1][5:] == ["5", "5"] and canvas[2] == ["Ana", "77", "", "", "", "3", "0"]
    assert canvas[3][3] == EVIL
    moodle = table(moodle_table([ana(), nobody()], [ONE, TWO]))
    assert moodle[1] == ["Participant 77", "Ana", "", "3", "0", "3"] and moodle[2][2] == EVIL


@pytest.mark.parametrize("name", ["=1+1", "+49", "-x", "@SUM(A1)", "\tx", " =1", "\uff1d1+1", "Ana;=1+1", "Ana; '-1"])
def test_no_name_becomes_a_formula(name):
    for make in (grades_table, canvas_table, moodle_table):
        for cell in table(make([StudentGrade(name)], [ONE]))[-1]:
            for part in cell.split(";"):
                assert not part.startswith("\t") and not part.strip().startswith(("=", "+", "-", "@", "\uff1d"))
    assert results._without_apostrophe(results._cell(name)) == name


def test_file_names_are_safe_and_unique():
    names = ["a/b", "a b", "../../x", "Ünï", "", "CON.", "ünï", "x" * 300]
    made = {student: name for (student, _), name in file_names([(one, "") for one in names]).items()}
    assert len({name.casefold() for name in made.values()}) == len(names)
    assert all("/" not in name and not name.startswith(".") and 0 < len(name) < 110 for name in made.values())
    assert made["Ünï"] == "Ünï"


def test_two_students_with_one_name_have_a_row_and_a_page_each():
    twins = [StudentGrade("Ana M", "77", handed_in=["03_one"]), StudentGrade("Ana M", "78")]
    names = file_names([one.key for one in twins])
    assert len({*names.values()}) == 2 and all(one.lms_id in names[one.key] for one in twins)
    assert [row[:2] for row in table(grades_table(twins, [ONE]))[1:]] == [["Ana M", "77"], ["Ana M", "78"]]
    assert [row[0] for row in table(moodle_table(twins, [ONE]))[1:]] == ["Participant 77", "Participant 78"]
    summary = summary_page(twins, [ONE], names, [])
    for one in twins:
        assert f"Ana M ({one.lms_id})" in summary and f'href="feedback/{names[one.key]}.html"' in summary


def test_a_name_of_four_byte_letters_fits_into_a_folder():
    (name,) = file_names([("\U0001d400" * 62, "1" * 100)]).values()
    assert len(f".{name}.html.1234567.tmp".encode()) < 255


def test_pages_show_the_mistake_and_escape_everything():
    grade = ana()
    grade.student = EVIL
    page = feedback_page(grade, [ONE, TWO])
    assert (
        "3 of 10 points" in page and "it is squared" in page and "<code>here</code>" in page and "late; and wet" in page
    )
    assert "04_two: 0 of 5 points" in page and "Not handed in" in page
    summary = summary_page(
        [grade, ana(), nobody()], [ONE, TWO], file_names([(EVIL, ""), (EVIL, "77"), ("Ana", "77")]), ["Seed: 0"]
    )
    assert '<td class="number">2</td><td>03 f</td><td>it is squared</td>' in summary
    assert "3 students, mean 20% of 10 points" in summary and "uses ctypes" in summary and "Seed: 0" in summary
    for text in (page, summary):
        assert "<script" not in text and "&lt;script&gt;" in text


def test_a_summary_of_nothing_is_still_one():
    page = summary_page([nobody()], [ONE], file_names([(EVIL, "")]), [])
    assert "No notebook of the course was handed in." in page and "None was named." in page


def test_scores_fall_into_tenths():
    assert score_counts([0.0, 0.0999, 0.1, 0.3, 0.6, 0.7, 0.95, 1.0]) == [2, 1, 0, 1, 0, 0, 1, 1, 0, 2]


def test_figures_hold_what_they_say():
    (axes,) = plot_scores([0.05, 0.95, 1.0]).axes
    assert [round(bar.get_height()) for bar in axes.patches] == [1, 0, 0, 0, 0, 0, 0, 0, 0, 2]
    (axes,) = plot_questions([(0.1, "hard"), (0.5, "middle"), (0.9, "easy")]).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["hard", "middle", "easy"]
    assert [bar.get_width() for bar in axes.patches] == [0.1, 0.5, 0.9]
