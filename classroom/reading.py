"""Read the notebooks of one student in that student's own process, so that whatever is in them costs nobody else.

`classroom.student` calls `read_submission` in a process that has limits on time and memory; nothing of the student's
runs there. Much of this work is done by Python's parsers on files that anybody may have written.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from typing import Any, BinaryIO

from classroom.exercises import SourceNotebook
from classroom.repair import Node, best_master, looks, open_answers, repaired, steps, written_answers

_MOST_CELLS, _MOST_SOURCE, _MOST_SOURCES = 2_000, 2**18, 2**21  # cells; bytes of one, and of all
_CELL_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def read_submission(
    file: BinaryIO,
    sizes: Sequence[tuple[str, int]],
    masters: Sequence[SourceNotebook],
    others: Sequence[SourceNotebook],
) -> dict[str, Any]:
    """Read all notebooks of a student, and repair the one that counts for each master.

    Of two the one with more answers counts, then the one with the master's name, then the last.

    Args:
        file: holds all files, behind each other. sizes: each one's name and size.
        masters: those that are graded. others: a notebook that belongs to one of these is passed over.

    Returns:
        `troubles` and `notebooks`. Each of these has `master`, `file`, `cells`, `troubles`, `looks`, `open_answers` and
        `steps`.
    """
    best: dict[str, tuple[tuple[int, bool, int], str, Node]] = {}
    troubles, counts = list[str](), dict[str, int]()
    for number, (name, size) in enumerate(sizes):
        try:
            notebook, wrong = read_notebook(file.read(size))
            master = best_master(notebook, name, [*masters, *others])
        except MemoryError:
            troubles.append(f"{name}: is too large to be read")
            continue
        except Exception as error:  # a file may hold anything
            troubles.append(f"{name}: {error or type(error).__name__}"[:300])
            continue
        if any(master is one for one in others):
            continue
        troubles += [f"{name}: {one}" for one in wrong]
        if master is None:
            troubles.append(f"{name}: has none of the questions in it; is it the lesson of the same name?")
            continue
        worth = written_answers(notebook, master), name.removesuffix(".ipynb") == master.name, number
        counts[master.name] = counts.get(master.name, 0) + 1
        if master.name not in best or worth > best[master.name][0]:
            best[master.name] = worth, name, notebook
    notebooks = []
    for master in masters:
        if master.name in best:
            _, name, notebook = best[master.name]
            if counts[master.name] > 1:
                troubles.append(f"{master.name}: {counts[master.name]} files hold it; {name} counts")
            notebooks.append({"master": master.name, "file": name, **_repair(notebook, master)})
    return {"troubles": troubles, "notebooks": notebooks}


def _repair(notebook: Node, master: SourceNotebook) -> dict[str, Any]:
    whole, troubles = repaired(notebook, master)
    return {
        "cells": whole.cells,
        "troubles": troubles,
        "looks": looks(whole, master),
        "open_answers": open_answers(whole, master),
        "steps": [[step.kind, step.name, step.source, step.is_added] for step in steps(whole, master)],
    }


def read_notebook(content: bytes) -> tuple[Node, list[str]]:
    """Return a notebook of format 4 with sound cells and without outputs, and messages about what was wrong.

    Raises ValueError if it is not a notebook, with the reason.
    """
    text, troubles = decode_text(content)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError("is not a notebook: it holds no JSON" if text.strip() else "is empty") from error
    cells = _cells(found)
    if cells is None:
        raise ValueError("is not a notebook: it has no cells")
    notebook, cut = _notebook(cells)
    return notebook, [*troubles, *cut]


def decode_text(content: bytes) -> tuple[str, list[str]]:
    """Return the text, in UTF-8 or what else it may be.

    >>> decode_text("é".encode("cp1252"))
    ('é', ['was not in UTF-8, and was read as cp1252'])
    """
    if content.startswith(b"\xef\xbb\xbf"):
        return content.decode("utf-8-sig", "replace"), []
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        return content.decode("utf-16", "replace"), ["was not in UTF-8, and was read as utf-16"]
    try:
        return content.decode("utf-8"), []
    except UnicodeDecodeError:
        return content.decode("cp1252", "replace"), ["was not in UTF-8, and was read as cp1252"]


def _cells(content: Any) -> list | None:
    """Return the cells of a notebook of format 4, or of 3, whose code cells hold their text as `input`."""
    if not isinstance(content, dict):
        return None
    if isinstance(content.get("cells"), list):
        return content["cells"]
    sheets = content.get("worksheets")
    if not isinstance(sheets, list) or not all(isinstance(sheet, dict) for sheet in sheets):
        return None
    cells = [cell for sheet in sheets for cell in sheet.get("cells") or [] if isinstance(cell, dict)]
    return [{**cell, "source": cell.get("input", cell.get("source", ""))} for cell in cells]


def _notebook(cells: list) -> tuple[Node, list[str]]:
    """Return a notebook of these cells as far as they are sound, and messages about what was left out."""
    made: list[Node] = []
    ids, troubles, length = set[str](), list[str](), 0
    for number, cell in enumerate(cells):
        if not isinstance(cell, dict):
            continue
        source = _source(cell)
        size = len(source.encode())
        if size > _MOST_SOURCE:
            troubles.append(f"cell no. {number + 1} has more than {_MOST_SOURCE // 2**10} kB of text and was left out")
            continue
        length += size
        if len(made) == _MOST_CELLS or length > _MOST_SOURCES:
            troubles.append(
                f"has more than {_MOST_CELLS} cells, or {_MOST_SOURCES // 2**20} MB of text; the rest left out"
            )
            break
        given = cell.get("id")
        first = given if isinstance(given, str) and _CELL_ID.fullmatch(given) else f"cell-{number}"
        others = (f"cell-{number}-{copy}" for copy in itertools.count())
        cell_id = next(one for one in itertools.chain([first], others) if one not in ids)
        ids.add(cell_id)
        kind = cell.get("cell_type")
        kind = kind if kind in ("code", "markdown") else "raw"
        fresh = Node(cell_type=kind, id=cell_id, metadata=_marks(cell.get("metadata")), source=source)
        made.append(Node(fresh, outputs=[], execution_count=None) if kind == "code" else fresh)
    return Node(cells=made, metadata=Node(), nbformat=4, nbformat_minor=5), troubles


def _source(cell: dict) -> str:
    """Return the text of a cell with one kind of line ending, and with nothing that cannot be written to a file."""
    source = cell.get("source", "")
    text = "".join(map(str, source)) if isinstance(source, list) else str(source)
    return text.encode("utf-8", "replace").decode().replace("\r\n", "\n").replace("\r", "\n")


def _marks(metadata: Any) -> Node:
    """Of a cell's metadata what we read: nbgrader's name of the cell."""
    marks = metadata.get("nbgrader") if isinstance(metadata, dict) else None
    if not isinstance(marks, dict):
        return Node()
    name = marks.get("grade_id")
    return Node(nbgrader=Node(grade_id=name) if isinstance(name, str) else Node())
