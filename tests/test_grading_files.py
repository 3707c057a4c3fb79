"""Finding submissions: who is who in the folders that learning platforms give, and reading what is in them."""

import io
import json
import os

import nbformat
import pytest

from classroom import files
from classroom.files import MAX_BYTES, MOST_NOTEBOOKS, find_submissions, pack_files
from classroom.reading import read_notebook, read_submission

MASTERS = ["04_group_advantages", "05_grpo_objective"]
SMALL = json.dumps({"cells": [{"cell_type": "code", "source": ["a = 1\n", "b"]}], "nbformat": 4})


def lay(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(SMALL)


def read_cells(*cells, encoding="utf-8"):
    """What is read of a notebook with these cells; a text is the source of a code cell."""
    cells = [{"cell_type": "code", "source": cell} if isinstance(cell, str) else cell for cell in cells]
    return read_notebook(json.dumps({"cells": cells}, ensure_ascii=encoding == "ascii").encode(encoding))


def found_in(folder):
    found = find_submissions(folder, MASTERS)
    return {one.student: sorted(path.relative_to(folder).as_posix() for path in one.files) for one in found}


@pytest.mark.parametrize(
    ("names", "students"),
    [
        (["ana/x.ipynb", "bo/deep/y.ipynb"], {"ana": 1, "bo": 1}),
        (["ana_04_group_advantages.ipynb", "04_group_advantages - bo.ipynb"], {"ana": 1, "bo": 1}),
        (["doejane_11_22_04_group_advantages.ipynb", "doejane_11_23_05_grpo_objective-1.ipynb"], {"doejane": 2}),
        (["doejane_LATE_11_22_anything.ipynb"], {"doejane": 1}),
        (["Ana M_77_assignsubmission_file_/04_group_advantages.ipynb"], {"Ana M": 1}),
        (["homework of bo.ipynb"], {"homework of bo": 1}),
        (["submitted/ana/03/04_group_advantages.ipynb", "nbgrader_config.py", "source/03/x.ipynb"], {"ana": 1}),
        (["submitted/ana/03/04_group_advantages.ipynb", "submitted/bo/03/x.ipynb"], {"ana": 1, "bo": 1}),
        (["ana/x.ipynb", "bo/y.ipynb", "submitted/z.ipynb"], {"ana": 1, "bo": 1, "submitted": 1}),
        (["ana/x.ipynb", "submitted/bo/03/y.ipynb"], {"ana": 1, "submitted": 1}),
        (["submitted/04_group_advantages.ipynb"], {"submitted": 1}),
        (["ana/.ipynb_checkpoints/x.ipynb", "ana/x.ipynb", "__MACOSX/ana/x.ipynb", ".DS_Store"], {"ana": 1}),
    ],
)
def test_each_layout_gives_its_students(tmp_path, names, students):
    lay(tmp_path, *names)
    assert {student: len(files) for student, files in found_in(tmp_path).items()} == students


def test_a_folder_called_submitted_among_others_is_a_student_with_a_message(tmp_path):
    lay(tmp_path, "ana/x.ipynb", "submitted/bo/03/y.ipynb")
    found = {one.student: one.troubles for one in find_submissions(tmp_path, MASTERS)}
    assert found["ana"] == [] and "nbgrader" in found["submitted"][0]
    (tmp_path / "class" / "ana").mkdir(parents=True)
    (tmp_path / "class" / "submitted").symlink_to(tmp_path)
    assert [one.student for one in find_submissions(tmp_path / "class", MASTERS)] == ["ana", "submitted"]


def test_a_students_own_folder_is_one_student(tmp_path):
    lay(tmp_path / "carla", "04_group_advantages.ipynb", "05_grpo_objective.ipynb")
    assert list(found_in(tmp_path / "carla")) == ["carla"]


def test_numbers_of_the_platform_are_kept(tmp_path):
    lay(tmp_path, "doejane_11_22_04_group_advantages.ipynb", "Ana M_77_assignsubmission_file_/x.ipynb")
    assert {one.student: one.lms_id for one in find_submissions(tmp_path, MASTERS)} == {"doejane": "11", "Ana M": "77"}


def test_a_notebook_under_another_ending_is_found_and_a_document_is_not(tmp_path):
    lay(tmp_path, "ana/04_group_advantages.ipynb.txt", "bo/x.ipynb", "eve/04_group_advantages.ipynb")
    (tmp_path / "bo" / "notes.txt").write_text("hello")
    for name in ("04_group_advantages.html", "05_grpo_objective.pdf"):
        (tmp_path / "eve" / name).write_text("hello")
    (tmp_path / "cy").mkdir()
    (tmp_path / "cy" / "notes.txt").write_text("hello")
    (tmp_path / "di").mkdir()
    (tmp_path / "di" / "all.zip").write_bytes(b"PK")
    found = {one.student: one for one in find_submissions(tmp_path, MASTERS)}
    assert len(found["ana"].files) == 1 and found["bo"].troubles == []
    assert found["cy"].troubles == ["cy/notes.txt is not a notebook"]
    assert found["eve"].troubles == ["eve/05_grpo_objective.pdf is not a notebook"]  # the other notebook is there
    assert "unpack" in found["di"].troubles[0]


def test_links_are_never_followed(tmp_path):
    lay(tmp_path / "secret", "x.ipynb")
    place = tmp_path / "in"
    lay(place, "ana/x.ipynb")
    (place / "ana" / "y.ipynb").symlink_to(tmp_path / "secret" / "x.ipynb")
    (place / "bo").symlink_to(tmp_path / "secret")
    found = {one.student: one for one in find_submissions(place, MASTERS)}
    assert [path.name for path in found["ana"].files] == ["x.ipynb"] and "is a link" in found["ana"].troubles[0]
    assert found["bo"].files == [] and "is a link" in found["bo"].troubles[0]


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    (tmp_path / "ana").mkdir()
    with (tmp_path / "ana" / "x.ipynb").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    (one,) = find_submissions(tmp_path, MASTERS)
    assert one.files == [] and "larger than 64 MB" in one.troubles[0]


def test_a_files_outputs_are_left_out():
    picture = {"output_type": "display_data", "data": {"image/png": "A" * 2**20}}
    notebook, troubles = read_cells({"cell_type": "code", "source": "é = 1", "outputs": [picture]})
    assert [cell.source for cell in notebook.cells] == ["é = 1"] and notebook.cells[0].outputs == [] == troubles


def test_files_are_packed_behind_each_other_and_what_cannot_be_read_is_said(tmp_path, monkeypatch):
    lay(tmp_path, *(f"ana/{number:02}.ipynb" for number in range(MOST_NOTEBOOKS + 1)))
    (one,) = find_submissions(tmp_path, MASTERS)
    assert len(one.files) == MOST_NOTEBOOKS and "50.ipynb was not read" in one.troubles[0]
    one.files[0].unlink()
    one.files[1].unlink()
    one.files[1].symlink_to("02.ipynb")
    monkeypatch.setattr(files, "_MAX_BYTES_TOGETHER", 3 * len(SMALL))
    target = io.BytesIO()
    packed, digest = pack_files(one, target)
    assert packed == [(f"{number:02}.ipynb", len(SMALL)) for number in (2, 3, 4)]
    assert target.read() == SMALL.encode() * 3 and len(digest) == 64
    counts = [sum(word in line for line in one.troubles) for word in ("cannot be read", "over")]
    assert counts == [2, MOST_NOTEBOOKS - 5]


def test_every_cell_has_an_id_of_its_own_whatever_the_file_says():
    long = "A" * 50
    ids = [long, f"{long}-2", long, "cell-4-0", long, "cell-3"]
    found = [cell.id for cell in read_cells(*({"cell_type": "code", "source": "", "id": one} for one in ids))[0].cells]
    assert len({*found}) == len(ids) and found[:2] == ids[:2]


def test_many_notebooks_of_one_student_are_read_one_by_one():
    content = SMALL.encode()
    sizes = [(f"{number}.ipynb", len(content)) for number in range(3)] + [("x", 3)]
    found = read_submission(io.BytesIO(content * 3 + b"[1]"), sizes, [], [])
    assert found["notebooks"] == [] and [line.partition(": ")[2] for line in found["troubles"]] == [
        *["has none of the questions in it; is it the lesson of the same name?"] * 3,
        "is not a notebook: it has no cells",
    ]


def test_too_much_text_and_too_many_cells_are_left_out():
    notebook, (trouble,) = read_cells("#" * 300_000, "a = 1")
    assert [cell.source for cell in notebook.cells] == ["a = 1"] and "no. 1" in trouble and "256 kB" in trouble
    notebook, (trouble,) = read_cells(*[{"source": "1"}] * 3000)
    assert len(notebook.cells) == 2000 and "2000 cells" in trouble


@pytest.mark.parametrize("ending", ["\r\n", "\r", "\n"])
def test_line_endings_are_one_kind(ending):
    assert read_cells(f"a = 1{ending}b = 2")[0].cells[0].source == "a = 1\nb = 2"


def test_a_lone_surrogate_in_a_cell_can_be_written():
    assert nbformat.writes(read_cells("'\ud800'", encoding="ascii")[0]).encode()


def test_two_students_with_one_name_are_two(tmp_path):
    lay(tmp_path, "Ana M_77_assignsubmission_file_/x.ipynb", "Ana M_78_assignsubmission_file_/x.ipynb")
    lay(tmp_path, "doejane_11_1_x.ipynb", "doejane_12_2_x.ipynb", "doejane_12_3_y.ipynb")
    found = {one.key: len(one.files) for one in find_submissions(tmp_path, MASTERS)}
    assert found == {("Ana M", "77"): 1, ("Ana M", "78"): 1, ("doejane", "11"): 1, ("doejane", "12"): 2}


def test_names_that_look_alike_once_shown_stay_apart(tmp_path):
    for name in (b"Jos\xe9", b"Jos\xc3\xa9", b"a\nb", b"a\x1bb", b"a b"):
        lay(tmp_path / os.fsdecode(name), "x.ipynb")
    found = [one.student for one in find_submissions(tmp_path, MASTERS)]
    assert sorted(found) == ["José", "José (2)", "a b", "a b (2)", "a b (3)"]


def test_a_name_with_letters_that_nobody_sees_stays_apart_from_the_one_that_it_imitates(tmp_path):
    for name in ("ana", "ana\u200b", "an\u00ada", "\u200fana", "ana ", "\u2060", "José", "Jose\u0301"):
        lay(tmp_path / name, "x.ipynb")
    found = {one.student: one.files[0].parent.name for one in find_submissions(tmp_path, MASTERS)}
    assert sorted(found) == ["?", "José", "José (2)", "ana", "ana (2)", "ana (3)", "ana (4)", "ana (5)"]
    assert found["ana"] == "ana" and found["José"] == "José"


def test_hidden_and_empty_folders_have_a_row(tmp_path):
    lay(tmp_path, ".ana/x.ipynb", ".git/x.ipynb", ".ipynb_checkpoints/x.ipynb", "bo/x.ipynb")
    (tmp_path / "cy").mkdir()
    found = {one.student: one for one in find_submissions(tmp_path, MASTERS)}
    assert {*found} == {".ana", "bo", "cy"} and found["cy"].troubles == ["the folder cy is empty"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
def test_any_encoding_is_read(encoding):
    notebook, troubles = read_cells("é = 'ü'", encoding=encoding)
    assert notebook.cells[0].source == "é = 'ü'"
    assert bool(troubles) == (encoding in ("utf-16", "cp1252"))


def test_odd_cells_become_sound_ones():
    cells = [
        {"cell_type": "code", "source": ["a\n", "b"], "id": "same"},
        {"cell_type": "code", "source": "c", "id": "same", "metadata": None, "outputs": "none"},
        {"cell_type": "markdown"},
        {"cell_type": "poem", "source": 3, "id": "no good id!"},
        "no cell at all",
    ]
    notebook, _ = read_notebook(json.dumps({"cells": cells}).encode())
    nbformat.validate(notebook)
    assert [cell.source for cell in notebook.cells] == ["a\nb", "c", "", "3"]
    assert len({cell.id for cell in notebook.cells}) == 4


def test_format_3_is_read():
    old = {"nbformat": 3, "worksheets": [{"cells": [{"cell_type": "code", "input": ["x = 1"]}]}]}
    assert read_notebook(json.dumps(old).encode())[0].cells[0].source == "x = 1"


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "empty"),
        (b"hello", "no JSON"),
        (b"[" * 10**5, "no JSON"),
        (b"[]", "no cells"),
        (b'{"cells": 3}', "no cells"),
        (b'{"worksheets": [3]}', "no cells"),
        (b"\x00\x01\x02", "no JSON"),
    ],
)
def test_what_is_no_notebook_is_said(content, word):
    with pytest.raises(ValueError, match=word):
        read_notebook(content)


def test_a_name_with_a_number_in_it_is_nobody_elses(tmp_path):
    folder = "Bo_12_assignsubmission_file_"
    lay(tmp_path, f"{folder}/x.ipynb", f"{folder}_99_assignsubmission_file_/x.ipynb")
    assert {one.lms_id for one in find_submissions(tmp_path, MASTERS)} == {"12", "99"}


def test_a_name_belongs_to_who_has_it_on_the_disk(tmp_path):
    lay(tmp_path, "Bo x/right.ipynb", "Bo\x01x/other.ipynb")
    found = {one.student: one.files[0].name for one in find_submissions(tmp_path, MASTERS)}
    assert found == {"Bo x": "right.ipynb", "Bo x (2)": "other.ipynb"}
