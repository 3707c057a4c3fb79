"""A real JupyterLab in a real browser, for the tests that look at notebooks as a reader does.

The server serves a copy of the notebooks, with settings, workspaces and runtime files in a temporary folder.
Set GRPO_EDU_SCREENSHOTS to a folder to look at what the browser saw.
"""

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest

import course

REPOSITORY = Path(__file__).resolve().parents[1]
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
START_SECONDS, RUN_SECONDS = 180, 240  # generous: on two idle cores it takes a thirtieth and a quarter of it


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
    with running_lab(tmp_path_factory.mktemp("course"), tmp_path_factory.mktemp("home")) as running:
        yield running


@contextlib.contextmanager
def running_lab(folder, home):
    """A server for a copy of the course in `folder`, with the files of its user in `home`."""
    for part in ("notebooks", "exercises", "benchmarks", "data", "docs"):
        if (REPOSITORY / part).is_dir():
            shutil.copytree(REPOSITORY / part, folder / part, ignore=shutil.ignore_patterns(".*", "__pycache__"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    lab = Lab(f"http://127.0.0.1:{port}", "a-token-of-the-tests", folder, home / "settings")
    for plugin, values in course.LAB_SETTINGS.items():
        if plugin == "@jupyterlab/docmanager-extension:plugin":
            # A notebook that is open for two minutes is saved, and the next test finds it changed.
            values = values | {"autosave": False}
        lab.set(plugin, values)
    places = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTERLAB_WORKSPACES_DIR")
    # what the set-up puts into .venv, in the places of a user
    for theirs, ours in {
        "etc/jupyter/labconfig/page_config.json": "jupyter_config_dir/labconfig/page_config.json",
        "etc/ipython/ipython_kernel_config.py": "ipythondir/profile_default/ipython_kernel_config.py",
        "etc/jupyter/custom/custom.css": "jupyter_config_dir/custom/custom.css",
        "etc/jupyter/jupyter_lab_config.py": "jupyter_config_dir/jupyter_lab_config.py",
    }.items():
        (home / ours).parent.mkdir(parents=True, exist_ok=True)
        (home / ours).write_text(course.LAB_FILES[theirs])
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
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{lab.address}/api/status?token={lab.token}", timeout=5).close()
            return
        time.sleep(0.2)
    pytest.fail(f"JupyterLab did not start:\n{log.read_text()[-3000:]}")


@contextlib.contextmanager
def running_browser(program):
    """A browser that is installed on this computer, without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=program, args=list(QUIET))
        yield running
        running.close()


@pytest.fixture(scope="module")
def browser(chromium):
    with running_browser(chromium) as running:
        yield running


@dataclass
class OpenNotebook:
    """A notebook in a browser's page, next to what is stored in its file."""

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
        shoot(self.page, f"{self.name}_{name}")

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

    def open_(name, theme, folder="notebooks"):
        lab.set("@jupyterlab/apputils-extension:themes", {"theme": THEMES[theme]})
        stored = nbformat.read(lab.folder / folder / f"{name}.ipynb", as_version=4)
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        page = context.new_page()
        notebook = OpenNotebook(f"{name}_{theme}", page, stored, [], [])
        opened.append(notebook)
        page.on("request", lambda request: is_outside(request.url, lab) and notebook.outside.append(request.url))
        page.on("pageerror", lambda error: notebook.errors.append(str(error)))
        page.goto(f"{lab.address}/lab/workspaces/{theme}/tree/{folder}/{name}.ipynb?reset&token={lab.token}")
        page.wait_for_selector(".jp-NotebookPanel .jp-Notebook", timeout=1000 * START_SECONDS)
        wait_until(lambda: notebook.cells().count() == len(stored.cells), "all cells are on the page")
        # Before a notebook has its kernel, the indicator says "idle" as well, and to run a cell opens the dialog
        # "Select Kernel", which takes all clicks from then on.
        kernel = page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Toolbar-kernelName")
        wait_until(lambda: kernel.inner_text() not in ("", "No Kernel"), "the notebook has its kernel")
        page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status=idle]", timeout=1000 * START_SECONDS)
        return notebook

    yield open_
    for notebook in opened:
        notebook.shoot("last")  # how it was when the test failed
        notebook.page.context.close()


def shoot(page, name, **options):
    """A screenshot, where somebody wants to look at what the browser saw."""
    folder = os.environ.get("GRPO_EDU_SCREENSHOTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=Path(folder) / f"{name}.png", **options)


def is_outside(url, lab):
    return not url.startswith((lab.address, lab.address.replace("http", "ws"), "data:", "blob:", "about:"))


def wait_until(holds, what, seconds=START_SECONDS, every=0.1):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(every)
