"""The notebooks as a reader meets them: a real JupyterLab in a real browser, offline, in its light and dark theme.

Set GRPO_EDU_SCREENSHOTS to a folder to look at what the browser saw.
"""

import html
import re

import nbformat
import pytest
import run_notebooks
from jupyter_lab import FAILED, RUN_SECONDS, START_SECONDS, wait_until
from keyboard import axe_problems

pytestmark = pytest.mark.browser


def open_cells(notebook):
    """The stored cells whose outputs are shown: the answer to a prediction is collapsed."""
    return [cell for cell in notebook.stored.cells if not cell.metadata.get("jupyter", {}).get("outputs_hidden")]


def prompts_of(notebook):
    """The numbers beside the code cells that a run leaves, without those whose source is collapsed."""
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
        wait_until(lambda: image.evaluate("e => e.complete && e.naturalWidth > 0"), 10, "the drawing is loaded")  # noqa: B023


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
        wait_until(lambda: image.evaluate("e => e.complete && e.naturalWidth > 0"), 10, "the picture is loaded")  # noqa: B023
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
    wait_until(lambda: formulas.count() == displays + inline, 20, f"{displays + inline} formulas are typeset")
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


@pytest.mark.long
def test_start_here_runs_from_a_fresh_kernel(open_notebook):
    """Restart the kernel, run all cells: the bar moves, the pictures come, and no cell fails.

    Takes a minute. In every run the notebook runs under nbval, and test_browser_dashboards.py trains in JupyterLab.
    """
    notebook = open_notebook("00_start_here", "light")
    page = notebook.page
    prompts = page.locator(".jp-CodeCell .jp-InputArea-prompt")
    expected = prompts_of(notebook)
    assert prompts.count() == len(expected)
    notebook.menu("Kernel", "Restart Kernel and Clear Outputs of All Cells")
    page.get_by_role("button", name="Confirm Kernel Restart").click()
    wait_until(lambda: {*prompts.all_text_contents()} == {"[ ]:"}, 30, "the outputs are cleared")
    assert page.locator(".jp-CodeCell img").count() == 0
    page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status=idle]", timeout=1000 * START_SECONDS)
    notebook.menu("Run", "Run All Cells")
    idle = page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]")
    bars, seen = page.locator(".jp-OutputArea .jupyter-widgets.widget-hprogress .progress-bar"), {}

    def done():
        if bars.count() == 1:  # how wide the bar is, in percent, and what is said beside it
            width = round(bars.evaluate("e => parseFloat(e.style.width)"))
            if width not in seen:
                bars.scroll_into_view_if_needed()
                notebook.shoot(f"running_{width:03d}")
            seen[width] = bars.locator("xpath=ancestor::*[contains(@class, 'widget-hbox')]").text_content()
        failed = page.locator(FAILED)
        assert failed.count() == 0, failed.first.text_content()
        return prompts.all_text_contents() == expected and idle.count() > 0

    wait_until(done, RUN_SECONDS, "the last cell has run", every=0.25)
    widths = list(seen)
    assert widths == sorted(widths) and len(widths) >= 4 and widths[-1] == 100, seen
    assert re.search(r"reward=[01]\.\d\d", seen[100]) and re.search(r"\d/\d", seen[100]), seen
    check_pictures(notebook)
    notebook.shoot_all("live")
    check_no_errors(notebook)


@pytest.mark.parametrize("name", ["00_start_here", pytest.param("03_policy_gradients", marks=pytest.mark.long)])
def test_an_untouched_notebook_closes_without_a_question(open_notebook, lab, name):
    path = lab.folder / "notebooks" / f"{name}.ipynb"
    stored = nbformat.read(path, as_version=4)
    run_notebooks.normalize(stored)
    nbformat.write(stored, path)
    notebook = open_notebook(name, "light")
    page = notebook.page
    if name == "00_start_here":  # nobody has trusted this copy, so its bar is shown as text
        wait_until(lambda: page.get_by_text("20/20").count() == 1, 10, "the bar is at its end")
    page.wait_for_timeout(3000)  # what the kernel says about its language has arrived
    assert page.locator(".jp-mod-dirty").count() == 0
    notebook.menu("File", "Close Tab")
    wait_until(lambda: page.locator(".jp-NotebookPanel").count() == 0, 10, "the notebook is closed")
    assert page.locator(".jp-Dialog").count() == 0


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
