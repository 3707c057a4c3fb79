"""An exercise as a student meets it, in a real JupyterLab: a mistake that is named, the right answer, then a grade.

The file that JupyterLab saved is graded by the command, and its feedback is looked at in the browser.
"""

import csv
import re
import shutil
from pathlib import Path

import nbformat
import pytest
from forty_submissions import RIGHT
from jupyter_lab import shoot, wait_until

from grpo_edu.cli.main import main

pytestmark = [pytest.mark.browser, pytest.mark.long]

NAME = "04_group_advantages"
WRONG = RIGHT["group_advantages"].replace("group.std()", "group.std(unbiased=False)")
SECONDS = 60  # generous: the first cell imports torch


def place(notebook, cell_id):
    return next(number for number, cell in enumerate(notebook.stored.cells) if cell.id == cell_id)


def run(notebook, cell_id, source=None):
    """Click into a cell, write `source` over it, Shift+Enter; the text that the cell shows."""
    cell = notebook.cells().nth(place(notebook, cell_id))
    prompt, before = cell.locator(".jp-InputArea-prompt"), cell.locator(".jp-InputArea-prompt").text_content()
    cell.scroll_into_view_if_needed()
    cell.locator(".cm-content").click()
    if source is not None:
        notebook.page.keyboard.press("Control+A")
        notebook.page.keyboard.insert_text(source)
    notebook.page.keyboard.press("Shift+Enter")
    wait_until(
        lambda: re.fullmatch(r"\[\d+\]:", prompt.text_content()) and prompt.text_content() != before,
        f"{cell_id} has run",
        SECONDS,
    )
    return cell.locator(".jp-OutputArea").inner_text() if cell.locator(".jp-OutputArea-output").count() else ""


def test_a_wrong_answer_is_named_a_right_one_passes_and_the_saved_file_is_graded(
    open_notebook, lab, browser, isolation, tmp_path
):
    notebook = open_notebook(NAME, "dark", "exercises")
    run(notebook, "code-01")
    run(notebook, "group-advantages")
    unwritten = run(notebook, "check-group-advantages")
    assert "Not written yet." in unwritten and "0 of 5 points" in unwritten and "Traceback" not in unwritten
    notebook.shoot("unwritten")

    run(notebook, "group-advantages", WRONG)
    said = run(notebook, "check-group-advantages")
    assert "Looks like: the standard deviation divides by G" in said and "Hint: " in said and "expected" in said
    notebook.shoot("wrong")

    run(notebook, "group-advantages", RIGHT["group_advantages"])
    said = run(notebook, "check-group-advantages")
    assert "5 of 5 points" in said and "Looks like" not in said
    notebook.shoot("right")
    locked = notebook.cells().nth(place(notebook, "check-group-advantages")).locator(".cm-content")
    assert locked.get_attribute("contenteditable") == "false" or locked.get_attribute("aria-readonly") == "true"

    saved = lab.folder / "exercises" / f"{NAME}.ipynb"
    run(notebook, "tie-probability", "def tie_probability(chances, n):\n    return chances[0] ** n")
    notebook.page.keyboard.press("Control+S")
    wait_until(lambda: "return chances[0] ** n" in saved.read_text(), "the file is saved")
    assert len(nbformat.read(saved, as_version=4).cells) == len(notebook.stored.cells)
    assert notebook.errors == [] and notebook.outside == []

    (tmp_path / "in" / "ana").mkdir(parents=True)
    shutil.copyfile(saved, tmp_path / "in" / "ana" / "my homework.ipynb")
    assert main(["grade", str(tmp_path / "in"), "--output", str(tmp_path / "out"), "--workers", "1"]) == 0
    (row,) = csv.DictReader((tmp_path / "out" / "grades.csv").read_text().splitlines())
    assert (row["04 group_advantages"], row["04 tie_probability"], row["04 rloo_advantages"]) == ("5", "1.5", "0")
    look_at_pages(browser, tmp_path / "out")


def look_at_pages(browser, folder):
    """The feedback and the summary in a light and a dark window: readable, nothing cut off, nothing from outside."""
    for scheme in ("light", "dark"):
        page = browser.new_page(color_scheme=scheme, viewport={"width": 900, "height": 1100})
        requests = []
        page.on("request", lambda request, requests=requests: requests.append(request.url))
        for name in ("feedback/ana.html", "summary.html"):
            page.goto((folder / name).as_uri())
            assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
            light = sum(map(int, re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).color"))[:3])) > 384
            assert light == (scheme == "dark")
            shoot(page, f"grading_{Path(name).stem}_{scheme}", full_page=True)
        assert page.locator("img").count() == 2
        page.goto((folder / "feedback" / "ana.html").as_uri())
        assert page.get_by_text("only one of the rewards is counted").count() >= 1
        assert [url for url in requests if not url.startswith(("file:", "data:"))] == []
        page.close()
