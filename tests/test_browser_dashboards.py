"""The dashboards under the mouse, in a real JupyterLab: a slider is dragged, a training paused, stopped and kept."""

import contextlib
import json

import nbformat
import pytest
from jupyter_lab import FAILED, RUN_SECONDS, wait_until
from nbformat.v4 import new_code_cell, new_notebook

pytestmark = pytest.mark.browser

CELLS = (
    "from grpo_edu.dashboards import AdvantageExplorer, TrainingDashboard",
    "AdvantageExplorer()",
    "TrainingDashboard(parent='runs')",
)


@pytest.fixture
def dashboards(open_notebook, lab):
    """A notebook with two dashboards, run."""
    from playwright.sync_api import TimeoutError as TooLate  # `open_notebook` skips where it is missing

    notebook = new_notebook(cells=[new_code_cell(source) for source in CELLS])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, lab.folder / "notebooks" / "dashboards.ipynb")
    opened = open_notebook("dashboards", "dark")
    start = opened.cells("Code").nth(2).get_by_role("button", name="Start")
    for _ in range(3):  # on a busy computer the menu's command may come before the kernel does
        opened.menu("Run", "Run All Cells")
        with contextlib.suppress(TooLate):
            start.wait_for(timeout=1000 * RUN_SECONDS / 3)
            break
    start.wait_for(timeout=1000)
    return opened


def drag(page, handle, pixels):
    """Move a slider's handle with the mouse; returns what was seen on the way."""
    seen = []
    box = handle.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    for part in range(1, 6):
        page.mouse.move(x + pixels * part / 5, y)
        page.wait_for_timeout(400)
        seen.append(page.get_by_alt_text("rewards and their advantages").get_attribute("alt"))
    page.mouse.up()
    return seen


def test_a_slider_and_a_training_in_one_notebook(dashboards, lab):
    page = dashboards.page
    explorer = dashboards.cells("Code").nth(1)
    board = dashboards.cells("Code").nth(2)
    success = explorer.locator(".widget-slider:visible .noUi-handle").nth(1)
    success.scroll_into_view_if_needed()
    seen = drag(page, success, 120)
    assert len(set(seen)) >= 3, "the bars follow while the handle is on its way"
    page.wait_for_timeout(2000)  # the last position of the handle may still be on its way to the kernel
    bars = page.get_by_alt_text("rewards and their advantages").get_attribute("alt")
    dashboards.shoot("dragged")
    steps = board.locator(".widget-slider:visible .noUi-handle").nth(2)
    steps.scroll_into_view_if_needed()
    steps.focus()
    steps.press("End")  # 200 steps, so that there is time to pause and stop
    board.get_by_role("button", name="Start").click()
    words = board.locator("[role=status]")
    words.filter(has_text="Step ").wait_for(timeout=1000 * RUN_SECONDS)
    curves = board.get_by_alt_text("Curves over")
    curves.wait_for(timeout=1000 * RUN_SECONDS)
    first = curves.get_attribute("alt")
    wait_until(lambda: curves.get_attribute("alt") != first, RUN_SECONDS, "the curves grow")
    board.get_by_role("button", name="Pause").click()
    words.filter(has_text="Paused").wait_for(timeout=1000 * RUN_SECONDS)
    curves.scroll_into_view_if_needed()
    dashboards.shoot("paused")
    explorer_says = page.get_by_alt_text("rewards and their advantages").get_attribute("alt")
    assert explorer_says == bars, "a training changes nothing in the other dashboard"
    board.get_by_role("button", name="Resume").click()
    words.filter(has_text="Step ").wait_for(timeout=1000 * RUN_SECONDS)
    board.get_by_role("button", name="Stop").click()
    words.filter(has_text="Stopped").wait_for(timeout=1000 * RUN_SECONDS)
    board.get_by_role("button", name="Save").click()
    words.filter(has_text="Saved in").wait_for(timeout=1000 * RUN_SECONDS)
    (saved,) = (lab.folder / "notebooks" / "runs").iterdir()
    result = json.loads((saved / "result.json").read_text())
    assert result["interrupted"] is True and (saved / "model" / "model.safetensors").is_file()
    dashboards.shoot("stopped")
    assert page.locator(FAILED).count() == 0 and dashboards.errors == [] and dashboards.outside == []
