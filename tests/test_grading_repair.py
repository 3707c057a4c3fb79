"""Mending notebooks: which cell is which, what counts, what is put back, and when each function is asked for."""

import base64
import copy
import json
import re
import time
from pathlib import Path

import nbformat
import pytest
from forty_submissions import (
    NAME,
    RIGHT,
    answered,
    changed,
    doubled,
    masters,
    right,
    student_notebook,
    unmarked,
    without,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from nbgrader.preprocessors import CheckCellMetadata

from classroom.exercises import load_masters
from classroom.repair import best_master, looks, open_answers, repaired, steps, written_answers
from classroom.run import pack_masters
from classroom.syntax import definitions, suspicious_names

REPOSITORY = Path(__file__).resolve().parents[1]
NAMES = sorted(path.stem for path in (REPOSITORY / "solutions").rglob("*.ipynb"))
CELLS = [cell.id for cell in nbformat.read(REPOSITORY / "solutions" / f"{NAME}.ipynb", as_version=4).cells]


@pytest.fixture(scope="module", autouse=True)
def convert_masters():
    """Set `MASTERS` and `MASTER` when the first test runs, because each worker of pytest imports this file."""
    global MASTERS, MASTER
    MASTERS = masters()
    MASTER = named(NAME)


def named(name):
    return next(master for master in MASTERS if master.name == name)


def source_of(notebook, cell_id):
    (source,) = [cell.source for cell in notebook.cells if cell.id == cell_id]
    return source


def place_of(notebook, cell_id):
    return next(place for place, cell in enumerate(notebook.cells) if cell.id == cell_id)


def handed_out(master):
    (path,) = (REPOSITORY / "exercises").rglob(f"{master.name}.ipynb")
    return nbformat.read(path, as_version=4)


def test_the_masters_and_the_cells_are_those_of_the_files():
    assert sorted(master.name for master in MASTERS) == NAMES and list(MASTER.cells) == CELLS


@pytest.mark.parametrize("name", NAMES)
def test_every_question_has_its_answers_cell(name):
    master = named(name)
    assert set(master.answers) == {question.exercise for question in master.questions}
    assert master.points == sum(question.points for question in master.questions)
    assert len(master.open_questions) >= 2
    assert master.questions or master.name in ("00_start_here", "13_scaling_out", "capstone", "study")


@pytest.mark.parametrize("name", NAMES)
def test_a_students_version_that_nobody_touched_is_whole_and_known_by_its_cells_whatever_its_name(name):
    master = named(name)
    notebook = handed_out(master)
    mended, troubles = repaired(notebook, master)
    assert troubles == [] and looks(mended, master) == []
    assert [cell.source for cell in mended.cells] == [cell.source for cell in master.notebook.cells]
    assert best_master(notebook, "homework", MASTERS) is master
    assert best_master(unmarked(notebook), "homework", MASTERS) is master


@pytest.mark.parametrize("change", [lambda notebook: notebook, unmarked], ids=["marked", "unmarked"])
def test_open_answers_are_found_and_those_not_written_are_none(change):
    first, second = MASTER.open_questions
    notebook = student_notebook()
    notebook.cells[place_of(notebook, first.cell)].source = "Ties are good news. <b>"
    mended, troubles = repaired(change(notebook), MASTER)
    assert open_answers(mended, MASTER) == {first.cell: "Ties are good news. <b>"}
    assert "Model answer" in first.model and "8 of 8" in second.text
    assert [cell.id for cell in mended.cells] == [cell.id for cell in MASTER.notebook.cells]


def test_no_model_answer_enters_the_sandbox():
    sent = base64.b64decode(pack_masters(MASTERS))
    assert b"raise NotImplementedError" in sent
    assert not [words for words in (b"BEGIN SOLUTION", b"**Model answer**", b"**Rubric**") if words in sent]


def test_a_notebook_that_shares_nothing_is_nobodys():
    other = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 + 1")])
    assert best_master(other, f"{NAME}.ipynb", MASTERS) is None


def test_the_last_written_copy_counts_and_an_empty_one_never_hides_it():
    stub = source_of(student_notebook(), "tie-probability")
    for notebook in (
        doubled(right(), "tie-probability", stub),
        doubled(right(tie_probability=stub), "tie-probability", RIGHT["tie_probability"]),
        changed(right(RIGHT["tie_probability"]), "tie-probability", stub),
    ):
        mended, troubles = repaired(notebook, MASTER)
        assert source_of(mended, "tie-probability") == RIGHT["tie_probability"]
        assert "there 2 times" in troubles[0]
        assert not any(stub == cell.source for cell in mended.cells)
    later = "def tie_probability(p, n):\n    return 0.0"
    mended, _ = repaired(doubled(right(), "tie-probability", later), MASTER)
    assert source_of(mended, "tie-probability") == later
    assert RIGHT["tie_probability"] in [cell.source for cell in mended.cells]  # still there, and runs before


EMPTY = (
    "def tie_probability(chances, num_generations):\n    raise NotImplementedError",
    "def tie_probability(chances, num_generations):\n    pass",
    "import math\n\ndef tie_probability(chances, num_generations):\n    '''Not yet.'''\n    ...",
    "%matplotlib inline\ndef tie_probability(p, n): return None",
    "tie_probability = lambda *_: ...",
    "tie_probability = lambda chances, n: None",
    "def tie_probability(p, n):\n    assert False",
    "def tie_probability(p, n):\n    assert False, 'later'",
    "def tie_probability(p, n):\n    raise Exception('later')",
)


def run_cells(notebook):
    """What the names of a repaired notebook are in the end, without its checks."""
    names = {}
    for step in steps(notebook, MASTER):
        if step.kind == "cell" and re.search(r"\bdef |^tie_probability = ", step.source, re.MULTILINE):
            exec("import torch\n" + step.source.replace("%matplotlib inline", ""), names)
    return names


@pytest.mark.parametrize("empty", EMPTY)
def test_a_short_empty_copy_never_hides_an_answer(empty):
    own = nbformat.v4.new_code_cell(empty)
    behind = right()
    behind.cells.insert(1 + place_of(behind, "tie-probability"), own)
    for notebook in (
        doubled(right(), "tie-probability", empty),
        changed(right(RIGHT["tie_probability"]), "tie-probability", empty),
        behind,
    ):
        mended, _ = repaired(notebook, MASTER)
        assert run_cells(mended)["tie_probability"]([0.5, 0.5], 2) == 0.5
        assert written_answers(notebook, MASTER) == len(RIGHT)
    mended, _ = repaired(changed(student_notebook(), "tie-probability", empty), MASTER)
    assert source_of(mended, "tie-probability") == empty and written_answers(mended, MASTER) == 0


def test_cells_as_they_were_handed_out_do_not_hide_answers_in_a_cell_of_ones_own():
    mended, _ = repaired(answered({}, ["\n\n".join(RIGHT.values())]), MASTER)
    assert run_cells(mended)["tie_probability"]([0.5, 0.5], 2) == 0.5


def test_locked_cells_and_checks_are_the_masters_again():
    notebook = changed(right(), "check-tie-probability", "print('3 of 3')")
    notebook = changed(notebook, "code-01", "import numpy as torch")
    notebook = changed(notebook, "text-02", "Pay me.")
    mended, troubles = repaired(notebook, MASTER)
    for cell_id in ("check-tie-probability", "code-01", "text-02"):
        assert source_of(mended, cell_id) == MASTER.cells[cell_id].source
    assert len(troubles) == 2


def test_marks_that_were_changed_are_the_masters_again():
    notebook = right()
    check = notebook.cells[place_of(notebook, "check-tie-probability")]
    check.metadata.nbgrader |= {"points": 1000, "grade": False}
    mended, _ = repaired(notebook, MASTER)
    marks = {cell.id: cell.metadata.get("nbgrader") for cell in mended.cells}
    assert marks["check-tie-probability"]["points"] == 3 and marks["check-tie-probability"]["grade"] is True


def test_a_swapped_id_does_not_swap_answers():
    notebook = right()
    cells = {cell.id: cell for cell in notebook.cells}
    one, other = cells["tie-probability"], cells["rloo-advantages"]
    one.source, other.source = other.source, one.source
    mended, _ = repaired(notebook, MASTER)
    assert source_of(mended, "tie-probability") == RIGHT["tie_probability"]
    assert source_of(mended, "rloo-advantages") == RIGHT["rloo_advantages"]


@pytest.mark.parametrize("cell_id", CELLS)
def test_any_deleted_cell_is_put_back_in_its_place(cell_id):
    mended, troubles = repaired(without(right(), cell_id), MASTER)
    order = [cell.id for cell in mended.cells if cell.id in MASTER.cells]
    assert order == list(MASTER.cells)
    assert bool(troubles) == (MASTER.cells[cell_id].cell_type == "code")


def test_everything_deleted_is_the_master_again():
    mended, _ = repaired(without(right(), *MASTER.cells), MASTER)
    assert [cell.source for cell in mended.cells] == [cell.source for cell in MASTER.notebook.cells]


def test_own_cells_stay_where_they_were_without_any_claim():
    own = nbformat.v4.new_code_cell("mine = 1", metadata={"nbgrader": {"grade": True, "points": 99, "grade_id": "me"}})
    notebook = right()
    notebook.cells.insert(place_of(notebook, "rloo-advantages"), own)
    mended, _ = repaired(notebook, MASTER)
    at = next(n for n, cell in enumerate(mended.cells) if cell.source == "mine = 1")
    assert mended.cells[at + 1].id == "rloo-advantages" and mended.cells[at].metadata == {}


def test_what_was_handed_in_is_left_as_it_was():
    notebook = doubled(right(), "tie-probability")
    before = copy.deepcopy(notebook)
    repaired(notebook, MASTER)
    assert json.dumps(notebook) == json.dumps(before)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["delete", "double", "move", "strip", "blank", "swap ids", "odd marks"]),
        st.integers(0, 60),
        st.integers(0, 60),
    ),
    max_size=25,
)


def mangled(notebook, operations):
    for what, one, other in operations:
        cells = notebook.cells
        if not cells:
            break
        one, other = one % len(cells), other % len(cells)
        if what == "delete":
            del cells[one]
        elif what == "double":
            cells.insert(other, copy.deepcopy(cells[one]))
        elif what == "move":
            cells.insert(other, cells.pop(one))
        elif what == "strip":
            cells[one].metadata, cells[one].id = nbformat.NotebookNode(), "lost"
        elif what == "blank":
            cells[one].source = ""
        elif what == "swap ids":
            cells[one].id, cells[other].id = cells[other].id, cells[one].id
            cells[one].metadata, cells[other].metadata = cells[other].metadata, cells[one].metadata
        else:
            cells[one].metadata = nbformat.from_dict({"nbgrader": "none", "tags": 3})
    return notebook


@pytest.mark.slow
@given(OPERATIONS)
@settings(max_examples=60)
def test_whatever_was_done_to_a_notebook_each_question_is_asked_once_and_nbgrader_takes_it(operations):
    mended, troubles = repaired(mangled(right(), operations), MASTER)
    nbformat.validate(mended)
    CheckCellMetadata().preprocess(mended, {})
    ids = [cell.id for cell in mended.cells]
    assert len(ids) == len(set(ids)) and set(MASTER.checks.values()) <= set(ids)
    for cell in mended.cells:
        if cell.id in MASTER.cells and MASTER.cells[cell.id].metadata.nbgrader.locked:
            assert cell == MASTER.cells[cell.id]
    asked = [step.name for step in steps(mended, MASTER) if step.kind == "ask"]
    assert sorted(asked) == sorted(MASTER.checks)
    assert all(isinstance(trouble, str) for trouble in troubles)


def test_a_function_is_asked_for_behind_its_last_definition():
    late = "def tie_probability(p, n):\n    return 1.0"
    notebook = right()
    notebook.cells.append(nbformat.v4.new_code_cell("x = 1"))
    notebook.cells.append(nbformat.v4.new_code_cell(late))
    plan = steps(repaired(notebook, MASTER)[0], MASTER)
    assert [step.name for step in plan if step.kind == "ask"][-1] == "tie_probability"
    assert plan[-2].source == late and plan[-1].kind == "ask"
    asked = [step.name for step in steps(repaired(right(), MASTER)[0], MASTER) if step.kind == "ask"]
    assert asked == [question.exercise for question in MASTER.questions]


def test_nothing_runs_behind_the_last_question():
    notebook = right()
    notebook.cells.append(nbformat.v4.new_code_cell("import time\ntime.sleep(600)"))
    plan = steps(repaired(notebook, MASTER)[0], MASTER)
    assert plan[-1].kind == "ask" and not any("sleep" in step.source for step in plan)


def test_checks_themselves_are_never_run_in_the_students_process():
    notebook = doubled(right("checks.check_tie_probability(tie_probability).grade()"), "check-rloo-advantages")
    sources = [step.source for step in steps(repaired(notebook, MASTER)[0], MASTER)]
    assert not any("checks.check_" in source for source in sources)


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("import sys\nsys._getframe(1)", "_getframe"),
        ("from grpo_edu.advantages import group_advantages as g", "the package's own group_advantages"),
        ("x = grpo_edu.advantages.rloo_advantages", "the package's own rloo_advantages"),
        ("checks.exercises()", "checks.exercises"),
        ("checks.check_tie_probability.reference", "check_tie_probability.reference"),
        ("import os\nos.write(3, b'19')", "os.write"),
        ("import os as o\no.kill(1, 9)", "os.kill"),
        ("from os import _exit as leave\nleave(0)", "os._exit"),
        ("from os import *", "os.*"),
        ("__import__('o' + 's')", "__import__"),
        ("import importlib", "importlib"),
        ("from importlib import import_module", "importlib"),
        ("exec('1')", "exec"),
        ("%%time\nx = eval('1')", "eval"),
        ("import threading", "threading"),
        ("import concurrent.futures", "concurrent.futures"),
        ("import atexit, math", "atexit"),
        ("import os\nfile = os.memfd_create('x')", "memfd_create"),
        ("import os\ngetattr(os, 'wri' + 'te')(3, b'')", "getattr"),
        ("import torch\ntorch.os._exit(0)", "torch.os._exit"),
        ("from torch import os as o\no.write(3, b'')", "torch.os.write"),
        ("import logging\nlogging.os.kill(1, 9)", "logging.os.kill"),
        ("import torch.multiprocessing", "torch.multiprocessing"),
        ("import posix\nposix.write(3, b'')", "posix.write"),
        ("import asyncio", "asyncio"),
        ("import pickle", "pickle"),
        ("import os\nvars(os)['write'](3, b'')", "vars(os)"),
        ("import os\nos.__dict__['write'](3, b'')", "os.__dict__"),
        ("open(3, 'wb').write(b'')", "open(3)"),
        ("globals()['__builtins__']", "globals"),
        ("().__class__.__base__.__subclasses__()", "__subclasses__"),
        ("class Yes(float):\n    def __eq__(self, other): return True", "__eq__"),
        ("lines = !ls /", "a shell command"),
        ("%%bash\nls", "a shell command"),
        ("import grpo_edu.advantages as a\nx = a.rloo_advantages", "the package's own rloo_advantages"),
        ("from grpo_edu import advantages\nx = advantages.rloo_advantages", "the package's own rloo_advantages"),
        ("from grpo_edu import *", "grpo_edu.*"),
        ("import os\nos.environ['GRPO_EDU_CHECK_SEED'] = '1'", "GRPO_EDU_CHECK_SEED"),
    ],
)
def test_what_is_worth_a_look(source, word):
    mended, _ = repaired(right(source), MASTER)
    assert any(word in look for look in looks(mended, MASTER))


@pytest.mark.parametrize(
    "source",
    [
        "# os._exit, threading and exec are forbidden",
        "print('uses subprocess and ctypes')",
        "import os\npath = os.path.join('a', 'b')\nos.makedirs(path, exist_ok=True)",
        "result = batch.code + batch.signal\nopen('result.txt').close()",
        "evaluated = model.eval()\nexecuted = {'exec': 1}['exec']",
        "checks.check_tie_probability(tie_probability).grade()",
    ],
)
def test_what_is_not(source):
    mended, _ = repaired(right(source), MASTER)
    assert looks(mended, MASTER) == []


def test_a_module_that_the_exercise_imports_is_not():
    master = named("01_cpu_setup")
    notebook = handed_out(master)
    own = notebook.cells[place_of(notebook, "lazy-attribute")]
    own.source += "\n    return importlib.import_module(where[name])"
    assert looks(repaired(notebook, master)[0], master) == []
    own.source += "\nimport subprocess"
    assert looks(repaired(notebook, master)[0], master) == ["uses subprocess"]


def test_a_lesson_with_the_name_of_the_exercise_is_said_to_be_one():
    lesson = nbformat.read(REPOSITORY / "notebooks" / "01_cpu_setup.ipynb", as_version=4)
    _, troubles = repaired(lesson, named("01_cpu_setup"))
    assert troubles[-1] == "holds none of the checks; is it the lesson of the same name?"


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("def f(): pass\nclass G: pass\nasync def h(): pass", ["f", "G", "h"]),
        ("f = lambda: 0\ng = f\nh = 3", ["f"]),
        ("def f(:\n    pass\nx = lambda: 0", ["f", "x"]),
        ("if True:\n    def f(): pass", []),
        ("%%time\ndef f():\n    pass", ["f"]),
        ("(" * 5000, []),
        ("\x00", []),
    ],
)
def test_definitions_of_a_cell(source, names):
    assert list(definitions(source)) == names


def test_a_folder_without_masters_or_with_a_foreign_check_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="masters"):
        load_masters(tmp_path)
    master = nbformat.read(REPOSITORY / "solutions" / f"{NAME}.ipynb", as_version=4)
    nbformat.write(changed(master, "check-tie-probability", "assert True"), tmp_path / "x.ipynb")
    with pytest.raises(ValueError, match="is not a check of an exercise"):
        load_masters(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        f"{' ' * 262_000}\nx\n)",
        f"x{' ,' * 100_000}\n)",
        "\n".join([f"{' ' * 500}x"] * 500) + "\n)",
        f"a{'.b' * 900}\n" * 140,
        "a = " * 60_000,
    ],
    ids=["blanks", "commas", "lines of blanks", "links", "equals signs"],
)
def test_a_long_cell_is_read_in_a_time_that_grows_with_its_length(source):
    """Each of these took minutes, or grew with the square of the length."""
    before = time.process_time()
    definitions(source)
    suspicious_names([source], [])
    assert time.process_time() - before < 10


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("%%bash\nls", {"a shell command"}),
        ("  files = !ls", {"a shell command"}),
        ("a, b = %sx ls", {"a shell command"}),
        ("%matplotlib inline\nx = 1", set()),
        ("x = 'a' != 'b'\n%time f()", set()),
        ("import os\nos.fork" + ".x" * 50, {"os.fork"}),
    ],
)
def test_what_ipython_itself_runs_is_told_from_python(source, found):
    assert suspicious_names([source], []) == found
