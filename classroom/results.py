"""What a student earned: as it is kept in a file, with the points that a person gave, and in tables."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from classroom.exercises import OpenQuestion, SourceNotebook
from classroom.reading import decode_text
from classroom.values import plain
from grpo_edu.checks.feedback import Feedback, PartResult, plain_number

TO_GRADE = "to grade"
GRADEBOOK = "gradebook.db"
_OTHER_COLUMNS = ("student", "id", "total", "out of", "notes")  # of grades.csv, next to those of the questions
# How a formula begins, in a cell or behind a semicolon, which separates columns in some countries; the last four signs
# are the wide ones of others.
_FORMULA = r"(?=[\t\r]|\s*[=+\-@'\uff1d\uff0b\uff0d\uff20])"
Points = dict[tuple[str, str, str], float]  # (student, number in the LMS, column of the question)


@dataclass
class StudentGrade:
    """One student's result.

    lms_id: the number in the LMS, where the names held one. digest: of what was handed in. feedback: exercise → its
    judged parts. handed_in: names of notebooks. troubles: what was wrong, and repaired or not. looks: what an
    instructor may want to look at. open_answers: notebook → cell → text. by_hand: column of an open question → points.
    """

    student: str
    lms_id: str = ""
    digest: str = ""
    feedback: dict[str, Feedback] = field(default_factory=dict)
    handed_in: list[str] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)
    looks: list[str] = field(default_factory=list)
    open_answers: dict[str, dict[str, str]] = field(default_factory=dict)
    by_hand: dict[str, float] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str]:
        """The unique key of a student; names may repeat."""
        return self.student, self.lms_id

    @property
    def label(self) -> str:
        """The name, with the number if there is one."""
        return f"{self.student} ({self.lms_id})" if self.lms_id else self.student

    def points(self, *masters: SourceNotebook) -> float:
        """Earned in one notebook, or in several; open answers that nobody has graded yet earn nothing so far."""
        earned = sum(self.question(one.exercise) for master in masters for one in master.questions)
        asked = [(master, one) for master in masters for one in master.open_questions]
        return plain_number(earned + sum(self.by_hand.get(open_column(master, one), 0) for master, one in asked))

    def open_points(self, master: SourceNotebook, question: OpenQuestion) -> float | str:
        """Return the points of an open answer; if nobody has graded it, "to grade", or "" if nothing was written.

        A zero here would come back with the points by hand, and count for an answer that is handed in later.
        """
        written = question.cell in self.open_answers.get(master.name, {})
        return self.by_hand.get(open_column(master, question), TO_GRADE if written else "")

    def question(self, exercise: str) -> float:
        """Return the points earned in one question; 0 if it was not handed in."""
        return self.feedback[exercise].points if exercise in self.feedback else 0

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> StudentGrade:
        """Return the grade that `asdict` turned into this content."""
        feedback = {
            name: Feedback(one["exercise"], tuple(PartResult(**part) for part in one["parts"]), one["seed"])
            for name, one in content["feedback"].items()
        }
        return cls(**{**content, "feedback": feedback})


def file_names(students: Sequence[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """(student, number) → a name that is safe for a file, in letters of any script, each only once.

    >>> list(file_names([("Ana María", ""), ("../Ana María", ""), ("?", ""), ("Bo", "7")]).values())
    ['Ana_María', 'Ana_María-2', 'student', 'Bo_7']
    """
    names: dict[tuple[str, str], str] = {}
    taken: set[str] = set()
    for student, lms_id in students:
        safe = re.sub(r"[^\w.-]+", "_", student).strip("._")
        stem = safe.encode()[:100].decode(errors="ignore") or "student"  # a name in a folder has at most 255 bytes
        stem = f"{stem}_{lms_id[:40]}" if lms_id else stem
        name, number = stem, 1
        while name.casefold() in taken:
            number += 1
            name = f"{stem}-{number}"
        taken.add(name.casefold())
        names[student, lms_id] = name
    return names


def column(master: SourceNotebook, exercise: str) -> str:
    """Return the name of a question in tables, such as "03 group_advantages"."""
    return f"{master.name.split('_')[0]} {exercise}"


def open_column(master: SourceNotebook, question: OpenQuestion) -> str:
    """Return the name of an open question in tables, such as "04 open-ties"."""
    return column(master, question.cell)


def points_in_gradebook(path: Path, masters: Sequence[SourceNotebook]) -> Points:
    """Return the scores of open answers in the gradebook of an nbgrader course; ValueError if it is damaged."""
    from nbgrader.api import Gradebook
    from sqlalchemy.exc import SQLAlchemyError

    columns = {(one.name, asked.cell): open_column(one, asked) for one in masters for asked in one.open_questions}
    found: Points = {}
    try:
        with Gradebook(f"sqlite:///{path.absolute()}") as gradebook:
            for assignment in gradebook.assignments:
                for submission in gradebook.assignment_submissions(assignment.name):
                    for notebook in submission.notebooks:
                        for grade in notebook.grades:
                            column = columns.get((notebook.name, grade.name))
                            if column and grade.manual_score is not None:
                                found[submission.student_id, "", column] = grade.score  # with the extra credit
    except SQLAlchemyError as error:
        why = str(error).splitlines()[0]
        raise ValueError(f"{path} is not a readable gradebook of nbgrader ({why}); restore or move it") from error
    return found


def points_in_table(path: Path, masters: Sequence[SourceNotebook]) -> Points:
    """Return the points in a table with the columns of ``grades.csv``, as a spreadsheet may have saved it again.

    Raises ValueError for a table without `student` and `id`, for a column that `grades.csv` cannot have, and for points
    that are not numbers from 0 to the maximum.
    """
    most = {open_column(one, asked): asked.points for one in masters for asked in one.open_questions}
    known = {*most, *(column(one, asked.exercise) for one in masters for asked in one.questions), *_OTHER_COLUMNS}
    found: Points = {}
    text, _ = decode_text(path.read_bytes())
    head = text.partition("\n")[0]
    rows = csv.DictReader(io.StringIO(text, newline=""), delimiter=max(",;\t", key=head.count))
    names = [name for name in rows.fieldnames or () if name]
    if not {"student", "id"} <= {*names}:
        raise ValueError(f"by-hand: {path} has no columns 'student' and 'id'; fill in a copy of grades.csv")
    if unknown := [name for name in names if name not in known]:
        raise ValueError(
            f"by-hand: {path}: grades.csv has no column {unknown[0]!r}; give it the name that it has there"
        )
    for row in rows:
        student, lms_id = _without_apostrophe(row["student"]), _without_apostrophe(row["id"])
        for name in most.keys() & row.keys():
            written = (row[name] or "").strip()
            if written in ("", TO_GRADE):
                continue
            points = float(written) if written.replace(".", "", 1).isdecimal() else -1.0
            if not 0 <= points <= most[name]:
                raise ValueError(f"by-hand: {name} of {student} is {written!r}; give a number from 0 to {most[name]}")
            found[student, lms_id, name] = points
    return found


def check_points(given: Points, students: Sequence[tuple[str, str]]) -> None:
    """Raise RuntimeError for points of students that there are not, with their names."""
    nobody = {(student, lms_id) for student, lms_id, _ in given} - {*students}
    if nobody:
        names = "; ".join(sorted(plain(f"{student} {lms_id}".strip(), 60) for student, lms_id in nobody)[:10])
        raise RuntimeError(
            f"points by hand for {len(nobody)} who handed in nothing: {names}. Write student and id as in grades.csv. "
            "A spreadsheet may have changed them, such as 0012345 to 12345. All other results are written."
        )


def enter_points(given: Points, grades: Sequence[StudentGrade], masters: Sequence[SourceNotebook]) -> None:
    """Give each student the points of the answers that somebody graded."""
    columns = [open_column(one, asked) for one in masters for asked in one.open_questions]
    for grade in grades:
        keys = {column: (*grade.key, column) for column in columns}
        grade.by_hand = {column: plain_number(given[key]) for column, key in keys.items() if key in given}


def grades_table(grades: Sequence[StudentGrade], masters: Sequence[SourceNotebook]) -> str:
    """Return CSV: a row per student, a column per question, the total, and a message about each problem."""
    questions = [(column(master, one.exercise), one.exercise) for master in masters for one in master.questions]
    most = sum(master.points for master in masters)
    asked = [(master, one) for master in masters for one in master.open_questions]
    names = [*(name for name, _ in questions), *(open_column(master, one) for master, one in asked)]
    rows: list[list[Any]] = [[*_OTHER_COLUMNS[:2], *names, *_OTHER_COLUMNS[2:]]]
    for grade in grades:
        total = grade.points(*masters)
        points: list[Any] = [grade.question(exercise) for _, exercise in questions]
        points += [grade.open_points(master, one) for master, one in asked]
        rows.append([grade.student, grade.lms_id, *points, total, most, "; ".join([*grade.troubles, *grade.looks])])
    return _csv(rows)


def canvas_table(grades: Sequence[StudentGrade], masters: Sequence[SourceNotebook]) -> str:
    """CSV for Canvas's gradebook import: an assignment a notebook, with the row of possible points.

    Canvas finds a student by ID; where the names held none, by SIS Login ID, which is then the folder's name.
    """
    who = ("Student", "ID", "SIS User ID", "SIS Login ID", "Section")
    rows: list[list[Any]] = [[*who, *(master.name for master in masters)]]
    rows.append(["    Points Possible", "", "", "", "", *(master.points for master in masters)])
    for grade in grades:
        login = "" if grade.lms_id else grade.student
        rows.append([grade.student, grade.lms_id, "", login, "", *(grade.points(master) for master in masters)])
    return _csv(rows)


def moodle_table(grades: Sequence[StudentGrade], masters: Sequence[SourceNotebook]) -> str:
    """CSV for Moodle's grade import, whose page asks which column says who it is (Identifier or Username)."""
    rows: list[list[Any]] = [["Identifier", "Full name", "Username", *(master.name for master in masters), "Total"]]
    for grade in grades:
        points = [grade.points(master) for master in masters]
        who = [f"Participant {grade.lms_id}", grade.student, ""] if grade.lms_id else ["", "", grade.student]
        rows.append([*who, *points, grade.points(*masters)])
    return _csv(rows)


FORMATS = {"canvas": canvas_table, "moodle": moodle_table}


def _csv(rows: Sequence[Sequence[Any]]) -> str:
    sink = io.StringIO()
    csv.writer(sink, lineterminator="\n").writerows([[_cell(value) for value in row] for row in rows])
    return sink.getvalue()


def _cell(value: Any) -> Any:
    """Return a value as a cell: an apostrophe before what would be a formula, and no decimals for whole points.

    >>> _cell("=1+1"), _cell("Ana;=1+1"), _cell("Ana"), _cell(2.0), _cell(1.5)
    ("'=1+1", "Ana;'=1+1", 'Ana', '2', '1.5')
    """
    if isinstance(value, float):
        return f"{value:g}"
    return re.sub(rf"(^|;){_FORMULA}", r"\1'", value) if isinstance(value, str) else value


def _without_apostrophe(text: str | None) -> str:
    """A text as it was before `_cell`."""
    return re.sub(rf"(^|;)'{_FORMULA}", r"\1", text or "")
