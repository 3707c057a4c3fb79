"""The notebooks as a reader meets them: a real JupyterLab in a real browser, offline, in its light and dark theme.

The server serves a copy of the notebooks, with settings, workspaces and runtime files in a temporary folder.
Set GRPO_EDU_SCREENSHOTS to a folder to look at what the browser saw.
"""

import contextlib
import html
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest

import course

pytestmark = pytest.mark.browser

REPOSITORY = Path(__file__).resolve().parents[1]
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--no-first-run",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
)
THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}
# JupyterLab shows a traceback as it shows what goes to stderr, which no cell should do either.
FAILED = "[data-mime-type='application/vnd.jupyter.stderr'], [data-mime-type='application/vnd.jupyter.error']"
START_SECONDS, RUN_SECONDS = 60, 240  # generous: on two idle cores it takes a tenth and a quarter of it


@dataclass
class Lab:
    """A running JupyterLab: its address, its token, the folder that it serves and that of its user's settings."""

    address: str
    token: str
    folder: Path
    settings: Path

    def set(self, plugin, values):
        """Write a user's setting; a page that is loaded later follows it."""
        owner, name = plugin.split(":")
        path = self.settings / owner / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    folder, home = tmp_path_factory.mktemp("course"), tmp_path_factory.mktemp("home")
    for part in ("notebooks", "benchmarks", "data", "docs"):
        if (REPOSITORY / part).is_dir():
            shutil.copytree(REPOSITORY / part, folder / part, ignore=shutil.ignore_patterns(".*", "__pycache__"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    lab = Lab(f"http://127.0.0.1:{port}", "a-token-of-the-tests", folder, home / "settings")
    for plugin, values in course.NO_NEWS.items():
        lab.set(plugin, values)
    places = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTERLAB_WORKSPACES_DIR")
    env = {**os.environ, **{name: str(home / name.lower()) for name in (*places, "IPYTHONDIR")}}
    env |= {"JUPYTERLAB_SETTINGS_DIR": str(lab.settings), "JUPYTER_PREFER_ENV_PATH": "1", "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1"]
    command += [f"--ServerApp.port={port}", "--ServerApp.port_retries=0", f"--ServerApp.root_dir={folder}"]
    log = home / "lab.log"
    with log.open("w") as sink:
        server = subprocess.Popen(
            [*command, f"--IdentityProvider.token={lab.token}"], env=env, stdout=sink, stderr=subprocess.STDOUT
        )
    try:
        wait_for_server(server, lab, log)
        yield lab
    finally:
        server.terminate()  # JupyterLab ends its kernels first
        try:
            server.wait(timeout=20)
        except subprocess.TimeoutExpired:
            server.kill()


def wait_for_server(server, lab, log):
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(urllib.error.URLError):
            urllib.request.urlopen(f"{lab.address}/api/status?token={lab.token}", timeout=5).close()
            return
        time.sleep(0.2)
    pytest.fail(f"JupyterLab did not start:\n{log.read_text()[-3000:]}")


@pytest.fixture(scope="module")
def browser():
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(PROGRAMS)} is installed (Debian: apt install chromium)")
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=program, args=list(QUIET))
        yield chromium
        chromium.close()


@dataclass
class OpenNotebook:
    """A notebook in a browser's page, beside what is stored in its file."""

    name: str
    page: object
    stored: nbformat.NotebookNode
    outside: list  # requests that left this machine
    errors: list  # exceptions in the page

    def cells(self, kind=""):
        return self.page.locator(f".jp-NotebookPanel:not(.lm-mod-hidden) .jp-{kind}Cell")

    def menu(self, *path):
        for number, label in enumerate(path):
            place = ".lm-MenuBar-item" if number == 0 else ".lm-Menu-item"
            name = re.compile(rf"^{re.escape(label)}(…|$)")
            self.page.locator(place, has=self.page.get_by_text(name)).first.click()

    def shoot(self, name):
        folder = os.environ.get("GRPO_EDU_SCREENSHOTS")
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=Path(folder) / f"{self.name}_{name}.png")

    def shoot_all(self, name):
        """One screenshot a screenful, from top to bottom."""
        if not os.environ.get("GRPO_EDU_SCREENSHOTS"):
            return
        scroller = self.page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-WindowedPanel-outer")
        for number in range(100):
            height, total = scroller.evaluate("e => [e.clientHeight, e.scrollHeight]")
            scroller.evaluate(f"e => e.scrollTo(0, {number * (height - 60)})")
            self.page.wait_for_timeout(400)
            self.shoot(f"{name}_{number:02d}")
            if (number + 1) * (height - 60) >= total:
                return


@pytest.fixture
def open_notebook(browser, lab):  # in this order: without a browser, no server is started
    opened = []

    def open_(name, theme):
        lab.set("@jupyterlab/apputils-extension:themes", {"theme": THEMES[theme]})
        stored = nbformat.read(lab.folder / "notebooks" / f"{name}.ipynb", as_version=4)
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        page = context.new_page()
        notebook = OpenNotebook(f"{name}_{theme}", page, stored, [], [])
        opened.append(notebook)
        page.on("request", lambda request: is_outside(request.url, lab) and notebook.outside.append(request.url))
        page.on("pageerror", lambda error: notebook.errors.append(str(error)))
        page.goto(f"{lab.address}/lab/workspaces/{theme}/tree/notebooks/{name}.ipynb?reset&token={lab.token}")
        page.wait_for_selector(".jp-NotebookPanel .jp-Notebook", timeout=1000 * START_SECONDS)
        wait_until(lambda: notebook.cells().count() == len(stored.cells), START_SECONDS, "all cells are on the page")
        page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status=idle]", timeout=1000 * START_SECONDS)
        return notebook

    yield open_
    for notebook in opened:
        notebook.shoot("last")  # how it was when the test failed
        notebook.page.context.close()


def is_outside(url, lab):
    return not url.startswith((lab.address, lab.address.replace("http", "ws"), "data:", "blob:", "about:"))


def wait_until(holds, seconds, what, every=0.1):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(every)


def check_pictures(notebook):
    """Every stored picture is there under its alternative text, loaded, undistorted and within its cell."""
    outputs = [output for cell in notebook.stored.cells for output in cell.get("outputs", [])]
    pages = [output.get("data", {}).get("text/html", "") for output in outputs]
    stored = [html.unescape(alt) for page in pages for alt in re.findall(r'<img alt="([^"]+)"', page)]
    assert stored
    images = notebook.cells("Code").locator("img[src^='data:image/png']")
    assert [image.get_attribute("alt") for image in images.all()] == stored
    for image in images.all():
        image.scroll_into_view_if_needed()
        wait_until(lambda: image.evaluate("e => e.complete && e.naturalWidth > 0"), 10, "the picture is loaded")  # noqa: B023
        assert image.is_visible()
        natural = image.evaluate("e => [e.naturalWidth, e.naturalHeight]")
        box, area = image.bounding_box(), image.locator("xpath=ancestor::*[contains(@class, 'jp-OutputArea-child')]")
        around = area.bounding_box()
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


def check_no_errors(notebook):
    page = notebook.page
    assert page.locator(".jp-Dialog").count() == 0, page.locator(".jp-Dialog").first.inner_text()
    assert page.locator(FAILED).count() == 0, page.locator(FAILED).first.text_content()
    assert page.get_by_text(re.compile("Error displaying widget|Loading widget|Could not render")).count() == 0
    assert notebook.outside == [], "the page asked for something that is not on this machine"
    assert notebook.errors == []


@pytest.mark.parametrize(
    ("name", "theme"), [("00_start_here", "light"), ("00_start_here", "dark"), ("05_grpo_run", "dark")]
)
def test_stored_outputs_are_shown_without_running_anything(open_notebook, name, theme):
    notebook = open_notebook(name, theme)
    page = notebook.page
    assert page.locator("body").get_attribute("data-jp-theme-light") == str(theme == "light").lower()
    check_pictures(notebook)
    shown = [text.strip() for text in page.locator(".jp-OutputArea-output pre").all_text_contents()]
    for cell in notebook.stored.cells:
        printed = "".join(output.text for output in cell.get("outputs", []) if output.output_type == "stream")
        assert not printed or printed.strip() in shown
    prompts = page.locator(".jp-CodeCell .jp-InputArea-prompt").all_text_contents()
    assert prompts == [f"[{number}]:" for number in range(1, len(prompts) + 1)]
    for selector in (".jp-RenderedMarkdown p", ".jp-RenderedMarkdown td", ".jp-OutputArea-output pre"):
        assert page.locator(selector).first.evaluate(CONTRAST) > 4.5, selector
    for cell in notebook.cells().all():
        cell.scroll_into_view_if_needed()  # JupyterLab lays out only what is in sight
        assert cell.evaluate(TOO_WIDE) == []
    notebook.shoot_all("stored")
    check_no_errors(notebook)


def test_mathematics_is_typeset(open_notebook):
    notebook = open_notebook("05_grpo_run", "light")
    page = notebook.page
    check_pictures(notebook)
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
    notebook.shoot_all("mathematics")
    check_no_errors(notebook)


def test_start_here_runs_from_a_fresh_kernel(open_notebook):
    """Restart the kernel, run all cells: the bar moves, the pictures come, and no cell fails."""
    notebook = open_notebook("00_start_here", "light")
    page = notebook.page
    prompts = page.locator(".jp-CodeCell .jp-InputArea-prompt")
    count = prompts.count()
    notebook.menu("Kernel", "Restart Kernel and Clear Outputs of All Cells")
    page.get_by_role("button", name="Confirm Kernel Restart").click()
    wait_until(lambda: {*prompts.all_text_contents()} == {"[ ]:"}, 30, "the outputs are cleared")
    assert page.locator(".jp-CodeCell img").count() == 0
    page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status=idle]", timeout=1000 * START_SECONDS)
    notebook.menu("Run", "Run All Cells")
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
        return prompts.nth(count - 1).text_content() == f"[{count}]:"

    wait_until(done, RUN_SECONDS, "the last cell has run", every=0.25)
    assert prompts.all_text_contents() == [f"[{number}]:" for number in range(1, count + 1)]
    widths = list(seen)
    assert widths == sorted(widths) and len(widths) >= 4 and widths[-1] == 100, seen
    assert re.search(r"reward=[01]\.\d\d", seen[100]) and re.search(r"\d/\d", seen[100]), seen
    check_pictures(notebook)
    notebook.shoot_all("live")
    check_no_errors(notebook)
