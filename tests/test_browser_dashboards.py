"""The dashboards in a real JupyterLab: a slider is dragged, a run paused, stopped and kept, all is used with keys."""

import json
import re

import nbformat
import pytest
from jupyter_lab import FAILED, RUN_SECONDS, wait_until
from keyboard import axe_problems, keyboard_problems
from nbformat.v4 import new_code_cell, new_notebook

from grpo_edu import dashboards as every_dashboard

pytestmark = pytest.mark.browser

CELLS = (
    "from grpo_edu.dashboards import AdvantageExplorer, TrainingDashboard",
    "AdvantageExplorer()",
    "TrainingDashboard(parent='runs')",
)


def run_cells(open_notebook, lab, theme, cells):
    """A notebook of these cells, open and started."""
    notebook = new_notebook(cells=[new_code_cell(source) for source in cells])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, lab.folder / "notebooks" / "dashboards.ipynb")
    opened = open_notebook("dashboards", theme)
    opened.menu("Run", "Run All Cells")
    return opened


@pytest.fixture
def dashboards(open_notebook, lab):
    """A notebook with two dashboards, run."""
    opened = run_cells(open_notebook, lab, "dark", CELLS)
    start = opened.cells("Code").nth(2).get_by_role("button", name="Start")
    start.wait_for(timeout=1000 * RUN_SECONDS)
    return opened


def drag(page, handle, pixels):
    """Move a slider's handle with the mouse; returns what was seen on the way."""
    bars = page.get_by_alt_text("rewards and their advantages")
    seen = [bars.get_attribute("alt")]
    box = handle.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    for part in range(1, 6):
        page.mouse.move(x + pixels * part / 5, y)
        for _ in range(50):  # the kernel of a busy computer takes seconds
            page.wait_for_timeout(100)
            if bars.get_attribute("alt") != seen[-1]:
                break
        seen.append(bars.get_attribute("alt"))
    page.mouse.up()
    return seen


def test_a_slider_and_a_training_in_one_notebook(dashboards, lab):
    page = dashboards.page
    explorer = dashboards.cells("Code").nth(1)
    board = dashboards.cells("Code").nth(2)
    success = explorer.get_by_role("slider", name="success rate p")
    success.scroll_into_view_if_needed()
    seen = drag(page, success, 120)
    assert len(set(seen)) >= 4, "the bars follow while the handle is on its way"
    page.wait_for_timeout(2000)  # the last position of the handle may still be on its way to the kernel
    bars = page.get_by_alt_text("rewards and their advantages").get_attribute("alt")
    dashboards.shoot("dragged")
    assert keyboard_problems(page, explorer.locator(".grpo-edu-dashboard")) == []
    explorer.locator("select").first.press("x")
    assert dashboards.cells().count() == len(CELLS), "a key in a list is no shortcut that removes the cell"
    board.get_by_role("slider", name="steps", exact=True).press("End")  # 200, so that there is time to pause and stop
    start = board.get_by_role("button", name="Start", exact=True)
    start.focus()
    page.keyboard.press("Space")
    board.get_by_role("progressbar", name="Training").wait_for(timeout=1000 * RUN_SECONDS)
    assert start.evaluate("e => e === document.activeElement"), "the focus stays where the reader is"
    curves = board.get_by_alt_text("Curves over")
    curves.wait_for(timeout=1000 * RUN_SECONDS)
    seen = set()
    wait_until(lambda: seen.add(curves.get_attribute("alt")) or len(seen) >= 3, RUN_SECONDS, "the curves grow")
    for key in ("Tab", "Space"):
        page.keyboard.press(key)
    words = board.locator("[role=status]")
    words.filter(has_text="Paused").wait_for(timeout=1000 * RUN_SECONDS)
    curves.scroll_into_view_if_needed()
    dashboards.shoot("paused")
    explorer_says = page.get_by_alt_text("rewards and their advantages").get_attribute("alt")
    assert explorer_says == bars, "a training changes nothing in the other dashboard"
    paused = curves.get_attribute("alt")
    at = curves.bounding_box()
    page.mouse.move(at["x"] + 0.1 * at["width"], at["y"] + 0.2 * at["height"])  # in the first panel, near its left end
    said = page.locator(".grpo-edu-tip").inner_text()
    assert re.match(r"step \d+\nmeasured [0-9.]+\nmean of 5 [0-9.]+", said), said
    dashboards.shoot("hover")
    page.keyboard.press("Space")
    wait_until(lambda: curves.get_attribute("alt") != paused, RUN_SECONDS, "the run goes on")
    for key in ("Tab", "Space"):
        page.keyboard.press(key)
    words.filter(has_text="Stopped").wait_for(timeout=1000 * RUN_SECONDS)
    board.get_by_role("button", name="Save", exact=True).click()
    words.filter(has_text="Saved in").wait_for(timeout=1000 * RUN_SECONDS)
    (saved,) = (lab.folder / "notebooks" / "runs").glob("tiny-*")
    result = json.loads((saved / "result.json").read_text())
    assert result["interrupted"] is True and (saved / "model" / "model.safetensors").is_file()
    dashboards.shoot("stopped")
    assert page.locator(FAILED).count() == 0 and dashboards.errors == [] and dashboards.outside == []
    dashboards.menu("File", "Save Notebook")
    page.wait_for_timeout(2000)
    page.reload()
    words.filter(has_text="Saved in").wait_for(timeout=1000 * RUN_SECONDS)
    assert board.get_by_alt_text("Curves over").count() == 1, "the run is still there after the page was loaded again"
    dashboards.menu("Kernel", "Restart Kernel")
    page.locator(".jp-Dialog .jp-mod-accept").click()
    lost = board.get_by_role("alert")
    lost.filter(has_text="kernel was restarted").wait_for(timeout=1000 * RUN_SECONDS)
    lost.scroll_into_view_if_needed()
    dashboards.shoot("restarted")
    assert "again" in lost.inner_text(), "it says what to do"
    dashboards.menu("Run", "Run All Cells")
    board.get_by_label("Kept run").wait_for(timeout=1000 * RUN_SECONDS)
    assert lost.count() == 0


@pytest.mark.long
def test_every_dashboard_fits_its_page_and_is_used_without_sight_and_with_the_keyboard_alone(open_notebook, lab):
    cells = ["from grpo_edu.dashboards import *", *(f"{name}()" for name in every_dashboard.__all__)]
    opened = run_cells(open_notebook, lab, "light", cells)
    page = opened.page
    opened.cells("Code").first.get_by_text("[1]:").wait_for(timeout=1000 * RUN_SECONDS)
    page.keyboard.press("Control+b")  # the list of files, which would fill a narrow page
    for number, name in enumerate(every_dashboard.__all__, 1):
        cell = opened.cells("Code").nth(number)
        cell.scroll_into_view_if_needed()
        output = cell.locator(".grpo-edu-dashboard")
        output.wait_for(timeout=1000 * RUN_SECONDS)
        page.wait_for_timeout(1000)  # its picture may still be on its way
        for width in (390, 768, 1366):
            page.set_viewport_size({"width": width, "height": 900})
            output.scroll_into_view_if_needed()
            opened.shoot(f"{name}_{width}")
            clipped = output.evaluate(
                "box => [...box.querySelectorAll('*')].filter(e => e.offsetParent"
                " && !e.parentElement.closest('.grpo-edu-stage [tabindex=\"0\"]')"  # what scrolls, by keyboard as well
                " && e.getBoundingClientRect().right > box.getBoundingClientRect().right + 12).map(e => e.className)"
            )
            assert clipped == [], (name, width)
        place = f".jp-Cell:nth-child({number + 1}) .grpo-edu-dashboard"
        assert axe_problems(page, place, impacts=("serious", "critical")) == [], name
        cell.locator(".cm-content").click()
        page.keyboard.press("Escape")  # from the code to the cell, and with Tab over its toolbar into the output
        for _ in range(3):
            page.keyboard.press("Tab")
            if output.evaluate("box => box.contains(document.activeElement)"):
                break
        else:
            raise AssertionError(f"{name} is not reached with Tab from its cell")
        assert keyboard_problems(page, output) == [], name
        assert opened.cells().count() == len(cells), f"a key in {name} changed the notebook"
    assert page.locator(FAILED).count() == 0 and opened.errors == [] and opened.outside == []
