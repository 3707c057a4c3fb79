"""Points that a person gave to open answers: in nbgrader's Formgrader, or in a copy of ``grades.csv``."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from grpo_edu.grading.masters import Master
from grpo_edu.grading.results import TO_GRADE, StudentGrade, open_column

GRADEBOOK = "gradebook.db"
Points = dict[tuple[str, str, str], float]  # (student, number in the LMS, column of the question)


def points_in_gradebook(path: Path, masters: Sequence[Master]) -> Points:
    """The scores of open answers in the gradebook of an nbgrader course."""
    from nbgrader.api import Gradebook

    columns = {(one.name, asked.cell): open_column(one, asked) for one in masters for asked in one.open_questions}
    found: Points = {}
    with Gradebook(f"sqlite:///{path.absolute()}") as gradebook:
        for assignment in gradebook.assignments:
            for submission in gradebook.assignment_submissions(assignment.name):
                for notebook in submission.notebooks:
                    for grade in notebook.grades:
                        column = columns.get((notebook.name, grade.name))
                        if column and grade.manual_score is not None:
                            found[submission.student_id, "", column] = grade.manual_score
    return found


def points_in_table(path: Path, masters: Sequence[Master]) -> Points:
    """The points in a table with the columns of ``grades.csv``.

    Raises ValueError for a table without `student` and `id`, and for points that are no number from 0 to the most.
    """
    most = {open_column(one, asked): asked.points for one in masters for asked in one.open_questions}
    found: Points = {}
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file)
        if not {"student", "id"} <= {*(rows.fieldnames or ())}:
            raise ValueError(f"by-hand: {path} has no columns 'student' and 'id'; fill in a copy of grades.csv")
        for row in rows:
            for column in most.keys() & row.keys():
                text = (row[column] or "").strip()
                if text in ("", TO_GRADE):
                    continue
                points = float(text) if text.replace(".", "", 1).isdecimal() else -1.0
                if not 0 <= points <= most[column]:
                    raise ValueError(
                        f"by-hand: {column} of {row['student']} is {text!r}; give a number from 0 to {most[column]}"
                    )
                found[row["student"], row["id"], column] = points
    return found


def enter_points(given: Points, grades: Sequence[StudentGrade], masters: Sequence[Master]) -> None:
    """Give each student the points of the answers that somebody graded."""
    columns = [open_column(one, asked) for one in masters for asked in one.open_questions]
    for grade in grades:
        keys = {column: (*grade.key, column) for column in columns}
        grade.by_hand = {column: given[key] for column, key in keys.items() if key in given}
