"""The notebooks as a reader meets them: a real JupyterLab in a real browser, offline, in its light and dark theme.

Then the dashboards in it: a slider is dragged, a run paused, stopped and kept, all is used with keys.
Set GRPO_EDU_SCREENSHOTS to a folder to look at what the browser saw.
"""

import html
import json
import re
import time

import nbformat
import pytest
import run_notebooks
from jupyter_lab import FAILED, RUN_SECONDS, START_SECONDS, wait_until
from keyboard import axe_problems, keyboard_problems
from nbformat.v4 import new_code_cell, new_notebook

from grpo_edu import dashboards as every_dashboard

pytestmark = pytest.mark.browser


def open_cells(notebook):
    """The stored cells whose outputs are shown: the answer to a prediction is collapsed."""
    return [cell for cell in notebook.stored.cells if not cell.metadata.get("jupyter", {}).get("outputs_hidden")]


def prompts_of(notebook):
    """Return the numbers next to the code cells that a run leaves, without those whose source is collapsed."""
    cells = [cell for cell in notebook.stored.cells if cell.cell_type == "code"]
    shown = [not cell.metadata.get("jupyter", {}).get("source_hidden") for cell in cells]
    return [f"[{number}]:" for number, visible in enumerate(shown, 1) if visible]


def check_schematics(notebook):
    """The drawings in the text are loaded, each with the alternative text of its source."""
    sources = [cell.source for cell in notebook.stored.cells if cell.cell_type == "markdown"]
    stored = [alt for source in sources for alt in re.findall(r"!\[([^\]]+)\]\(images/", source)]
    images = notebook.page.locator(".jp-RenderedMarkdown img")
    assert [image.get_attribute("alt") for image in images.all()] == stored
    for image in images.all():
        image.scroll_into_view_if_needed()
        wait_until(lambda: image.evaluate("e => e.complete && e.naturalWidth > 0"), "the drawing is loaded")  # noqa: B023


def check_pictures(notebook):
    """Every stored picture is there under its alternative text, loaded, undistorted and within its cell."""
    outputs = [output for cell in open_cells(notebook) for output in cell.get("outputs", [])]
    pages = [output.get("data", {}).get("text/html", "") for output in outputs]
    png = r'<img alt="([^"]+)"[^>]*src="data:image/png'  # animations are SVG
    stored = [html.unescape(alt) for page in pages for alt in re.findall(png, page)]
    assert stored
    images = notebook.cells("Code").locator("img[src^='data:image/png']")
    assert [image.get_attribute("alt") for image in images.all()] == stored
    for image in images.all():
        image.scroll_into_view_if_needed()
        wait_until(lambda: image.evaluate("e => e.complete && e.naturalWidth > 0"), "the picture is loaded")  # noqa: B023
        assert image.is_visible()
        natural = image.evaluate("e => [e.naturalWidth, e.naturalHeight]")
        box, around = image.evaluate(  # at one moment: the page may still move
            "e => [e, e.closest('.jp-OutputArea-child')].map(element => element.getBoundingClientRect().toJSON())"
        )
        assert box["width"] > 300 and box["width"] / box["height"] == pytest.approx(natural[0] / natural[1], rel=0.02)
        assert around["x"] <= box["x"] and box["x"] + box["width"] <= around["x"] + around["width"] + 0.5
        assert around["y"] <= box["y"] and box["y"] + box["height"] <= around["y"] + around["height"] + 0.5
        assert image.evaluate(CORNER) == [255, 255, 255, 255], "its ground is white and opaque on any theme"


CORNER = """image => {
    const canvas = document.createElement('canvas');
    const context = canvas.getContext('2d');
    context.drawImage(image, 0, 0);
    return [...context.getImageData(0, 0, 1, 1).data];
}"""

TOO_WIDE = """cell => [...cell.querySelectorAll('.jp-RenderedMarkdown, .jp-OutputArea-output')]
    .filter(element => element.clientWidth < 300 || element.scrollWidth > element.clientWidth + 1)
    .map(element => [element.scrollWidth, element.clientWidth, element.textContent.slice(0, 80)])"""

# WCAG's contrast of a text with the first ground behind it that is not transparent.
CONTRAST = """element => {
    const numbers = color => color.match(/[\\d.]+/g).map(Number);
    let behind = element;
    while (behind.parentElement && (numbers(getComputedStyle(behind).backgroundColor)[3] ?? 1) === 0)
        behind = behind.parentElement;
    const luminance = color => {
        const [r, g, b] = numbers(color).map(v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const [a, b] = [getComputedStyle(element).color, getComputedStyle(behind).backgroundColor].map(luminance);
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
}"""


def check_mathematics(notebook):
    """Every formula is typeset, with fonts that are loaded."""
    page = notebook.page
    sources = [cell.source for cell in notebook.stored.cells if cell.cell_type == "markdown"]
    displays = sum(source.count("$$") for source in sources) // 2
    inline = sum(len(re.findall(r"(?<![$\\])\$(?!\$)[^$\n]+\$(?!\$)", source)) for source in sources)
    assert displays and inline
    formulas = page.locator(".jp-RenderedMarkdown mjx-container")
    wait_until(lambda: formulas.count() == displays + inline, f"{displays + inline} formulas are typeset")
    assert page.locator(".jp-RenderedMarkdown mjx-container[display=true]").count() == displays
    assert page.locator("mjx-merror, [data-mjx-error]").count() == 0
    assert page.locator(".jp-RenderedMarkdown", has_text=re.compile(r"\$\$|\\(frac|mathrm|theta)")).count() == 0
    first = page.locator(".jp-RenderedMarkdown mjx-container[display=true]").first
    first.scroll_into_view_if_needed()
    assert first.bounding_box()["height"] > 20  # a fraction: two lines
    fonts = page.evaluate(
        "() => document.fonts.ready.then(f => [...f].filter(x => x.family.startsWith('MJX')).map(x => x.status))"
    )
    assert "loaded" in fonts and "error" not in fonts


def check_no_errors(notebook):
    page = notebook.page
    assert page.locator(".jp-Dialog").count() == 0, page.locator(".jp-Dialog").first.inner_text()
    assert page.locator(FAILED).count() == 0, page.locator(FAILED).first.text_content()
    assert page.get_by_text(re.compile("Error displaying widget|Loading widget|Could not render")).count() == 0
    assert notebook.outside == [], "the page asked for something that is not on this machine"
    assert notebook.errors == []


@pytest.mark.parametrize(
    ("name", "theme"),
    [
        ("10_ewc_progressive_training", "dark"),
        pytest.param("00_start_here", "light", marks=pytest.mark.long),
        pytest.param("00_start_here", "dark", marks=pytest.mark.long),
    ],
)
def test_stored_outputs_are_shown_without_running_anything(open_notebook, name, theme):
    notebook = open_notebook(name, theme)
    page = notebook.page
    assert page.locator("body").get_attribute("data-jp-theme-light") == str(theme == "light").lower()
    check_pictures(notebook)
    check_schematics(notebook)
    if name == "10_ewc_progressive_training":
        check_mathematics(notebook)
    shown = [text.strip() for text in page.locator(".jp-OutputArea-output pre").all_text_contents()]
    for cell in open_cells(notebook):
        printed = "".join(output.text for output in cell.get("outputs", []) if output.output_type == "stream")
        assert not printed or printed.strip() in shown
    assert page.locator(".jp-CodeCell .jp-InputArea-prompt").all_text_contents() == prompts_of(notebook)
    for selector in (".jp-RenderedMarkdown p", ".jp-RenderedMarkdown td", ".jp-OutputArea-output pre"):
        assert page.locator(selector).first.evaluate(CONTRAST) > 4.5, selector
    for cell in notebook.cells().all():
        cell.scroll_into_view_if_needed()  # JupyterLab lays out only what is in sight
        assert cell.evaluate(TOO_WIDE) == []
    notebook.shoot_all("stored")
    check_no_errors(notebook)


@pytest.mark.parametrize(
    ("name", "code", "rows"),
    [
        (
            "00_start_here",
            "AskTheModel(",
            ["8*15=120. 120-20=100. 100-19=81. #### 81 39%", "all other answers together 46%"],
        ),
        ("16_several_turns", "PlayWords({})", ["given M − A − P −", "guess 1"]),
    ],
)
def test_dashboards_that_nobody_trusted_can_be_read(open_notebook, name, code, rows):
    """In a fresh clone JupyterLab removes style sheets and scripts from stored outputs."""
    notebook = open_notebook(name, "light")
    output = notebook.page.locator(".jp-CodeCell", has_text=code).first.locator(".jp-OutputArea-output")
    output.scroll_into_view_if_needed()
    assert output.locator("style").count() == 0, "this notebook is trusted"
    shown = [" ".join(text.split()) for text in output.locator("tr").all_inner_texts()]
    assert set(rows) <= set(shown), shown
    aligned = output.locator("td, th").evaluate_all("all => all.map(cell => getComputedStyle(cell).textAlign)")
    assert "right" not in aligned
    notebook.shoot("untrusted")


@pytest.mark.long
def test_start_here_runs_from_a_fresh_kernel(open_notebook):
    """Restart the kernel, run all cells: the bar moves, the pictures come, and no cell fails.

    Takes a minute. In every run the notebook runs under nbval, and a dashboard trains in JupyterLab.
    """
    notebook = open_notebook("00_start_here", "light")
    page = notebook.page
    prompts = page.locator(".jp-CodeCell .jp-InputArea-prompt")
    expected = prompts_of(notebook)
    assert prompts.count() == len(expected)
    notebook.menu("Kernel", "Restart Kernel and Clear Outputs of All Cells")
    page.get_by_role("button", name="Confirm Kernel Restart").click()
    wait_until(lambda: {*prompts.all_text_contents()} == {"[ ]:"}, "the outputs are cleared")
    assert page.locator(".jp-CodeCell img").count() == 0
    page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status=idle]", timeout=1000 * START_SECONDS)
    notebook.menu("Run", "Run All Cells")
    idle = page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]")
    bars, seen = page.locator(".jp-OutputArea .jupyter-widgets.widget-hprogress .progress-bar"), {}

    def done():
        if bars.count() == 1:  # how wide the bar is, in percent, and what is said next to it
            width = round(bars.evaluate("e => parseFloat(e.style.width)"))
            if width not in seen:
                bars.scroll_into_view_if_needed()
                notebook.shoot(f"running_{width:03d}")
            seen[width] = bars.locator("xpath=ancestor::*[contains(@class, 'widget-hbox')]").text_content()
        failed = page.locator(FAILED)
        assert failed.count() == 0, failed.first.text_content()
        return prompts.all_text_contents() == expected and idle.count() > 0

    wait_until(done, "the last cell has run", RUN_SECONDS, every=0.25)
    widths = list(seen)
    assert widths == sorted(widths) and len(widths) >= 4 and widths[-1] == 100, seen
    assert re.search(r"reward=[01]\.\d\d", seen[100]) and re.search(r"\d/\d", seen[100]), seen
    check_pictures(notebook)
    notebook.shoot_all("live")
    check_no_errors(notebook)


@pytest.mark.long
@pytest.mark.parametrize("name", ["00_start_here", "03_policy_gradients"])
def test_an_untouched_notebook_closes_without_a_question(open_notebook, lab, name):
    path = lab.folder / "notebooks" / f"{name}.ipynb"
    stored = nbformat.read(path, as_version=4)
    run_notebooks.normalize(stored)
    nbformat.write(stored, path)
    notebook = open_notebook(name, "light")
    page = notebook.page
    if name == "00_start_here":  # nobody has trusted this copy, so its bar is shown as text
        wait_until(lambda: page.get_by_text("20/20").count() == 1, "the bar is at its end")
    page.wait_for_timeout(3000)  # what the kernel says about its language has arrived
    assert page.locator(".jp-mod-dirty").count() == 0
    notebook.menu("File", "Close Tab")
    wait_until(lambda: page.locator(".jp-NotebookPanel").count() == 0, "the notebook is closed")
    assert page.locator(".jp-Dialog").count() == 0


@pytest.mark.long
def test_names_are_whole_documents_open_as_pages_and_no_menu_is_for_instructors(open_notebook, lab):
    page = open_notebook("00_start_here", "light").page
    names = page.locator(".jp-DirListing-itemText")
    assert "10_ewc_progressive_training.ipynb" in names.all_inner_texts()
    assert names.evaluate_all("all => all.filter(e => e.scrollWidth > e.clientWidth).map(e => e.innerText)") == []
    page.goto(f"{lab.address}/lab/workspaces/light/tree/docs/glossary.md?token={lab.token}")
    page.wait_for_selector(".jp-MarkdownViewer h1")
    menus = page.locator(".lm-MenuBar-itemLabel").all_text_contents()
    assert "Kernel" in menus and not any("nbgrader" in menu.lower() for menu in menus)


@pytest.mark.long
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_in_stored_outputs_and_text(open_notebook, lab, theme):
    lab.set("@jupyterlab/notebook-extension:tracker", {"windowingMode": "none"})  # lays out all cells
    ours = {"include": [[".jp-OutputArea-output"], [".jp-RenderedMarkdown"]], "exclude": [["mjx-container"]]}
    for name in ("05_grpo_objective", "10_ewc_progressive_training"):
        page = open_notebook(name, theme).page
        assert page.locator(".jp-OutputArea-output").count() > 10
        assert axe_problems(page, ours) == [], name


# ---- dashboards ----

CELLS = (
    "from grpo_edu.dashboards import AdvantageExplorer, TrainingDashboard",
    "AdvantageExplorer()",
    "TrainingDashboard(parent='runs')",
)


def run_cells(open_notebook, lab, name, theme, cells):
    """A notebook of these cells, open and started. name: of its file, because files of one name share a kernel."""
    notebook = new_notebook(cells=[new_code_cell(source) for source in cells])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, lab.folder / "notebooks" / f"{name}.ipynb")
    opened = open_notebook(name, theme)
    opened.menu("Run", "Run All Cells")
    return opened


@pytest.fixture
def dashboards(open_notebook, lab):
    """A notebook with two dashboards, run."""
    opened = run_cells(open_notebook, lab, "dashboards", "dark", CELLS)
    start = opened.cells("Code").nth(2).get_by_role("button", name="Start")
    start.wait_for(timeout=1000 * RUN_SECONDS)
    return opened


def drag(page, handle, pixels):
    """Move a slider's handle with the mouse; returns what was seen on the way."""
    bars = page.get_by_alt_text("rewards and their advantages")
    seen = [bars.get_attribute("alt")]
    for _ in range(10):  # cells above that are drawn late move the handle away under the mouse
        page.wait_for_timeout(1000)
        handle.hover()
        box = handle.bounding_box()
        page.mouse.down()
        if handle.evaluate("handle => handle.classList.contains('noUi-active')"):
            break
        page.mouse.up()
    else:
        pytest.fail("the mouse never took hold of the handle")
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    for part in range(1, 6):
        page.mouse.move(x + pixels * part / 5, y)
        deadline = time.monotonic() + RUN_SECONDS / 5  # the kernel of a busy computer waits for a core
        while time.monotonic() < deadline:
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
    explorer.locator("select").first.press("x")
    assert dashboards.cells().count() == len(CELLS), "a key in a list is not a shortcut that removes the cell"
    board.get_by_role("slider", name="steps", exact=True).press("End")  # 200, so that there is time to pause and stop
    start = board.get_by_role("button", name="Start", exact=True)
    start.focus()
    page.keyboard.press("Space")
    board.get_by_role("progressbar", name="Training").wait_for(timeout=1000 * RUN_SECONDS)
    assert start.evaluate("e => e === document.activeElement"), "the focus stays where the reader is"
    curves = board.get_by_alt_text("Curves over")
    curves.wait_for(timeout=1000 * RUN_SECONDS)
    seen = set()
    wait_until(lambda: seen.add(curves.get_attribute("alt")) or len(seen) >= 3, "the curves grow", RUN_SECONDS)
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
    wait_until(lambda: curves.get_attribute("alt") != paused, "the run continues", RUN_SECONDS)
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


@pytest.mark.long
def test_a_run_is_still_there_after_a_reload_and_a_restart_says_what_to_do(dashboards):
    page = dashboards.page
    board = dashboards.cells("Code").nth(2)
    words = board.locator("[role=status]")
    board.get_by_role("slider", name="steps", exact=True).press("Home")
    board.get_by_role("button", name="Start", exact=True).click()
    save = board.get_by_role("button", name="Save", exact=True)
    save.and_(page.locator(":not(.grpo-edu-off)")).wait_for(timeout=1000 * RUN_SECONDS)
    save.click()
    words.filter(has_text="Saved in").wait_for(timeout=1000 * RUN_SECONDS)
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
    opened = run_cells(open_notebook, lab, "every_dashboard", "light", cells)
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
