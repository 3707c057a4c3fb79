"""Bring a student's notebook back into its master's form, and say what was wrong with it.

nbgrader's own `OverwriteCells` and `DeduplicateIds` do this for notebooks whose ids are sound and whose master is in a
gradebook; of two cells with one id they keep the last, be it the empty one. Here the ids themselves may be missing,
doubled or wrong, so cells are found by their content as well, and the result is what nbgrader accepts.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from classroom.exercises import CHECK_CALL, SourceNotebook
from classroom.syntax import definitions, suspicious_names, without_empty, written
from classroom.values import plain

_ODD_CHECKS = re.compile(r"grpo_edu\.checks\.(?!check_\w+$)")  # more of the checks than a call
_MOST_LOOKS = 12


class Node(dict[str, Any]):
    """A notebook, or a part of one: a dict whose entries are attributes, too.

    nbformat's own class does the same, but importing nbformat takes half as long as grading a student.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


@dataclass(frozen=True)
class Step:
    """A step of a grading: run a cell (`source`, called `name` in messages), or fetch the function `name`.

    is_added: the cell is not from the master.
    """

    kind: str
    name: str
    source: str = ""
    is_added: bool = False


def best_master(notebook: Node, file_name: str, masters: Sequence[SourceNotebook]) -> SourceNotebook | None:
    """Return the master that a notebook was made from, by the cells that it holds; None if it shares none."""

    def agreement(master: SourceNotebook) -> tuple[int, bool]:
        own = {*master.answers.values(), *master.checks.values(), *(one.cell for one in master.open_questions)}
        by_id = sum(bool(own & {*_ids(cell)}) for cell in notebook.cells)
        by_content = sum(_mentions(cell, master) for cell in notebook.cells)
        return by_id + by_content, master.name in file_name

    best = max(masters, key=agreement, default=None)
    return best if best and agreement(best)[0] else None


def _ids(cell: Node) -> list[str]:
    """Return the ids under which a cell may be known: nbgrader's, and the notebook format's."""
    metadata = cell.metadata.get("nbgrader")
    given = metadata.get("grade_id") if isinstance(metadata, dict) else None
    return [one for one in (given, cell.get("id")) if isinstance(one, str)]


def _mentions(cell: Node, master: SourceNotebook) -> bool:
    if cell.cell_type != "code":
        return cell.source.strip() in [one.text.strip() for one in master.open_questions]
    names = {*definitions(cell.source), *CHECK_CALL.findall(cell.source)}
    return bool(names & {*master.answers})


def repaired(notebook: Node, master: SourceNotebook) -> tuple[Node, list[str]]:
    """Return a whole notebook in the master's form with the student's answers, and a message about each problem.

    Locked cells and checks are the master's; an answer's cell is the student's last one that is written; other cells
    of the student stay where they were.
    """
    roles, troubles = _roles(notebook, master)
    result: list[Node] = []
    present: set[str] = set()
    for cell, role in zip(notebook.cells, roles, strict=True):
        if role is None:
            if not _is_check_call(cell) and _is_written(cell, master):  # another copy of these has nothing to say
                result.append(_plain(cell, f"own-{len(result)}"))
            continue
        original, locked = master.cells[role], not master.cells[role].metadata.nbgrader.solution
        if locked and original.cell_type == "code" and cell.source.strip() != original.source.strip():
            troubles.append(f"cell {role}: locked and changed; the master's counts")
        fresh = copy.deepcopy(original)
        if not locked:
            fresh.source = cell.source
        result.append(fresh)
        present.add(role)
    troubles += _restore(result, present, master)
    _take_out_what_hides_answers(result, master)
    whole = copy.deepcopy(master.notebook)
    whole.cells = result
    return whole, troubles


def _take_out_what_hides_answers(cells: list[Node], master: SourceNotebook) -> None:
    """Take an empty definition out of its cell where another cell has one that is written."""
    code = [cell for cell in cells if cell.cell_type == "code"]
    there = {name for cell in code for name in written(cell.source)} & {*master.answers}
    for cell in code:
        if there & {*definitions(cell.source)} - written(cell.source):
            cell.source = without_empty(cell.source, there)


def _roles(notebook: Node, master: SourceNotebook) -> tuple[list[str | None], list[str]]:
    """Return which cell of the master each cell is; every cell of the master at most once."""
    troubles: list[str] = []
    claims: dict[str, list[int]] = {}
    without = 0
    for number, cell in enumerate(notebook.cells):
        role = next((one for one in _ids(cell) if _fits(cell, one, master)), None)
        if role is None:
            role = _role_by_content(cell, master)
        without += role is not None and "nbgrader" not in cell.metadata
        if role is not None:
            claims.setdefault(role, []).append(number)
    if 2 * without > sum(map(len, claims.values())):
        troubles.append("nbgrader's marks were missing; cells were found by their names and content")
    roles: list[str | None] = [None] * len(notebook.cells)
    for role, numbers in claims.items():
        chosen = _chosen(role, numbers, notebook, master)
        roles[chosen] = role
        if len(numbers) > 1 and master.cells[role].metadata.nbgrader.solution:
            troubles.append(f"cell {role}: there {len(numbers)} times; the last one that is written counts")
    _answers_behind_their_questions(roles, notebook, master)
    return roles, troubles


def _answers_behind_their_questions(roles: list[str | None], notebook: Node, master: SourceNotebook) -> None:
    """Find open answers that lost their ids: each is the text right behind its question."""
    order = [*master.cells]
    for question in master.open_questions:
        before = order[order.index(question.cell) - 1]
        if question.cell not in roles and before in roles[:-1]:
            number = roles.index(before) + 1
            if roles[number] is None and notebook.cells[number].cell_type == "markdown":
                roles[number] = question.cell


def _fits(cell: Node, role: str, master: SourceNotebook) -> bool:
    """Return True if a cell that bears an id can be that cell: of its type, and not another question's answer."""
    if role not in master.cells or cell.cell_type != master.cells[role].cell_type:
        return False
    written = {master.answers[name] for name in definitions(cell.source) if name in master.answers}
    if master.cells[role].metadata.nbgrader.solution:
        return not written or role in written
    return not written


def _role_by_content(cell: Node, master: SourceNotebook) -> str | None:
    alike = {one.cell for one in master.open_questions}  # as they are released, these do not differ
    for role, original in master.cells.items():
        same = cell.source.strip() == original.source.strip() and cell.cell_type == original.cell_type
        if same and role not in alike:
            return role
    if cell.cell_type != "code":
        return None
    written = [master.answers[name] for name in definitions(cell.source) if name in master.answers]
    if written:
        return written[-1]
    call = CHECK_CALL.match(cell.source.strip()) if _is_check_call(cell) else None
    return master.checks.get(call[1]) if call else None


def _is_check_call(cell: Node) -> bool:
    """Return True if a cell is a call of a check and nothing else."""
    source = cell.source.strip()
    return cell.cell_type == "code" and bool(CHECK_CALL.match(source)) and "\n" not in source


def _is_written(cell: Node, master: SourceNotebook) -> bool:
    """Return True if a cell is more than answers that nobody has written, as they were released or shorter."""
    return cell.cell_type != "code" or not cell.source or bool(without_empty(cell.source, master.answers))


def written_answers(notebook: Node, master: SourceNotebook) -> int:
    """Return how many of the master's functions a notebook defines, without counting those that are empty."""
    own = [cell for cell in notebook.cells if cell.cell_type == "code"]
    found = {name for cell in own for name in written(cell.source)} & {*master.answers}
    return len(found) + len(open_answers(notebook, master))


def open_answers(notebook: Node, master: SourceNotebook) -> dict[str, str]:
    """Return what a student wrote for each open question, by cell, without cells that are as they were released."""
    stubs = {one.cell: master.cells[one.cell].source.strip() for one in master.open_questions}
    texts = {one: cell.source.strip() for cell in notebook.cells for one in _ids(cell)[:1] if one in stubs}
    return {one: text for one, text in texts.items() if text not in ("", stubs[one])}


def _chosen(role: str, numbers: list[int], notebook: Node, master: SourceNotebook) -> int:
    """Of the cells that claim to be one of the master's: the last that is written; of locked ones the first."""
    original = master.cells[role]
    if not original.metadata.nbgrader.solution:
        return numbers[0]
    names = {name for name, cell_id in master.answers.items() if cell_id == role}

    def worth(number: int) -> tuple[bool, bool, bool, int]:
        source = notebook.cells[number].source
        changed = source.strip() != original.source.strip()
        return bool(names & written(source)), bool(names & {*definitions(source)}), changed, number

    return max(numbers, key=worth)


def _plain(cell: Node, cell_id: str) -> Node:
    """Return a cell of the student's own, without any claim to be another."""
    fresh = copy.deepcopy(cell)
    fresh.id = cell_id
    fresh.metadata = type(fresh.metadata)()
    return fresh


def _restore(cells: list[Node], present: set[str], master: SourceNotebook) -> list[str]:
    """Put the master's missing cells back, each behind the one that is before it there."""
    elsewhere: list[str] = []
    unwritten: list[str] = []
    locked: list[str] = []
    before = None
    there = {name for cell in cells if cell.cell_type == "code" for name in written(cell.source)}
    for role, original in master.cells.items():
        names = {name for name, cell_id in master.answers.items() if cell_id == role}
        if role not in present and names and names <= there:
            elsewhere.append(role)
            continue
        if role not in present:
            place = 0 if before is None else 1 + next(i for i, cell in enumerate(cells) if cell.id == before)
            cells.insert(place, copy.deepcopy(original))
            if original.cell_type == "code":
                (unwritten if original.metadata.nbgrader.solution else locked).append(role)
        before = original.id
    if unwritten and {*master.checks.values()} <= {*locked}:
        return ["holds none of the checks; is it the lesson of the same name?"]
    words = (
        (elsewhere, "missing, but another cell defines the same name"),
        (unwritten, "missing, and counts as not written"),
        (locked, "missing; the master's was put back"),
    )
    return [f"cell {', '.join(roles)}: {text}" for roles, text in words if roles]


def steps(notebook: Node, master: SourceNotebook) -> list[Step]:
    """Return what to run of a repaired notebook, and when to fetch each function.

    From top to bottom; a function is fetched at its check, or behind the last cell that defines it.
    """
    names = {question.cell: question.exercise for question in master.questions}
    place: dict[str, int] = {}
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "code":
            if cell.id in names:
                place[names[cell.id]] = max(number, place.get(names[cell.id], 0))
            else:
                place |= {name: number for name in definitions(cell.source) if name in master.answers}
    asked: dict[int, list[str]] = {}
    for question in master.questions:
        asked.setdefault(place[question.exercise], []).append(question.exercise)
    found = []
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "code" and cell.id not in names and cell.source.strip():
            is_added = cell.id not in master.cells
            found.append(Step("cell", f"no. {number + 1}" if is_added else cell.id, cell.source, is_added))
        found += [Step("ask", name) for name in asked.get(number, [])]
    last = max((place for place, step in enumerate(found) if step.kind == "ask"), default=-1)
    return found[: last + 1]  # what follows, a training perhaps, changes no answer


def looks(notebook: Node, master: SourceNotebook) -> list[str]:
    """Return what is worth a review in a student's cells; it is not evidence of cheating."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    own, given = ([cell.source for cell in code if _is_locked(cell) is locked] for locked in (False, True))
    imported = suspicious_names(given, ()) - {"grpo_edu"}  # what the exercise itself imports
    used = {path for path in suspicious_names(own, given) if path.partition(".")[0] not in imported}
    package = {path for path in used if path.partition(".")[0] == "grpo_edu"}
    odd = {path for path in package if path.endswith("*") or _ODD_CHECKS.match(path)} | (used - package)
    found = [f"uses {plain(path, 60)}" for path in sorted(odd)[:_MOST_LOOKS]]
    names = {path.rpartition(".")[2] for path in package}
    return found + [f"uses the package's own {name}" for name in master.answers if name in names]


def _is_locked(cell: Node) -> bool:
    return not cell.metadata.get("nbgrader", {"solution": True})["solution"]
