"""Pictures of every view that a reader meets: ``python -m benchmarks.views FOLDER [--only book app lab ask]``.

Chromium opens the web book in ``build/book``, each tab of the app, and a notebook with the token inspector in
JupyterLab, in three sizes, light and dark, and writes one picture of each into the folder, to be looked at. It also
prints the seconds until each tab of the app shows its first picture. 5 minutes. The servers are those of the tests.

``--only ask`` presses the four steps of "Ask the model" in the app, and writes what it shows as the animation at the
top of README, ``ask_the_model.webp``, and its end, ``dashboard_ask.png``; both belong into ``docs/images``.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import io
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.browser import TIMEOUT
from benchmarks.harness import RESULTS

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

BOOK = RESULTS.parents[1] / "build" / "book"
SIZES = {"1280": (1280, 720), "1920": (1920, 1080), "390": (390, 844)}
THEMES = ("light", "dark")
# A page of the book → what is shown of it besides its first screen.
VIEWS = {
    "README": ("[data-playground]", "[data-explorer=ask]"),
    "notebooks/02_reward_functions": ("[data-recorded=rewards]",),
    "notebooks/04_group_advantages": ("[data-explorer=advantages]",),
    "notebooks/05_grpo_objective": ("[data-explorer=objective]", "[data-tokens]"),
    "notebooks/07_grpo_run": ("[data-recorded=run]",),
    "notebooks/09_quantization": ("[data-recorded=quantization]",),
    "notebooks/10_ewc_progressive_training": ("[data-recorded=forgetting]",),
    "notebooks/14_real_language_model": ("[data-recorded=run]", "[data-tokens]", "[data-explorer=looks]"),
}
SHOWN = ".grpo-edu-stage:visible :is(img, table, .grpo-inspector, [role=status])"
# The steps of "Ask the model" → what it says at their end; an animation shows this for longer.
ANIMATED = {
    "1 Ask": "Press 2 Score",
    "2 Score": "Press 3 Train",
    "3 Train": "was trained",
    "4 Ask again": "After 20 steps",
}
LONG, SHORT, ANIMATION_HEIGHT = 3500, 150, 565  # ms, ms, pixels
INSPECTOR = ("from grpo_edu.dashboards import TokenInspector", "TokenInspector()")


class _QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *given: Any) -> None:
        """Say nothing about each request."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a server on this computer that serves the files of a folder."""
    handler = functools.partial(_QuietHandler, directory=folder)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()


def _page(browser: Any, size: str, theme: str) -> Any:
    width, height = SIZES[size]
    page = browser.new_context(viewport={"width": width, "height": height}, color_scheme=theme).new_page()
    page.set_default_timeout(TIMEOUT)
    return page


def shoot_book(browser: Any, folder: Path) -> None:
    """Shoot the first screen of each page in `VIEWS`, and what it shows that is alive."""
    with served(BOOK) as address:
        for theme in THEMES:
            for size in SIZES:
                page = _page(browser, size, theme)
                for name, places in VIEWS.items():
                    page.goto(f"{address}/{name}.html", wait_until="load")
                    page.wait_for_function("!window.MathJax?.startup?.promise || MathJax.startup.promise.then(() => 1)")
                    stem = f"book_{Path(name).stem}_{size}_{theme}"
                    page.screenshot(path=folder / f"{stem}.png")
                    for place in places:
                        kind = place.strip("[]").replace("data-", "").replace("=", "_")
                        page.locator(place).first.evaluate("e => (e.closest('.course-explorer') ?? e).scrollIntoView()")
                        page.wait_for_timeout(300)
                        page.screenshot(path=folder / f"{stem}_{kind}.png")
                page.context.close()


def shoot_app(browser: Any, folder: Path) -> dict[str, float]:
    """Shoot each tab of the app; return the seconds from a click until it shows its first picture or message."""
    from test_app import TOKEN, running_app

    seconds: dict[str, float] = {}
    for theme in THEMES:
        with tempfile.TemporaryDirectory() as place, running_app(Path(place), f"--theme={theme}") as (address, _, _):
            page = _page(browser, "1280", theme)
            page.goto(f"{address}/?token={TOKEN}", wait_until="commit")
            page.locator(SHOWN).first.wait_for()
            seconds.setdefault("Ask", round(page.evaluate("performance.now() / 1000"), 1))
            for tab in page.get_by_role("tab").all():
                name = tab.inner_text()
                began = time.perf_counter()
                tab.click()
                page.locator(SHOWN).first.wait_for()
                seconds.setdefault(name, round(time.perf_counter() - began, 1))
                for size, (width, height) in SIZES.items():
                    page.set_viewport_size({"width": width, "height": height})
                    page.wait_for_timeout(400)
                    page.screenshot(path=folder / f"app_{name}_{size}_{theme}.png")
                page.set_viewport_size(dict(zip(("width", "height"), SIZES["1280"], strict=True)))
            page.context.close()
    return seconds


def animate_ask(browser: Any, folder: Path) -> None:
    """Ask, score, train and ask again in the app, as an animation of a real run: a picture of each change."""
    from PIL import Image
    from test_app import TOKEN, running_app

    frames: list[Image.Image] = []
    ends: list[int] = []  # the pictures at the end of a step
    with tempfile.TemporaryDirectory() as place, running_app(Path(place)) as (address, _, _):
        page = browser.new_context(viewport={"width": 1000, "height": 800}).new_page()
        page.set_default_timeout(TIMEOUT)
        page.goto(f"{address}/?token={TOKEN}", wait_until="commit")
        board = page.locator(".grpo-edu-dashboard:visible")
        board.locator(".grpo-chances").wait_for()
        box = board.bounding_box() | {"height": ANIMATION_HEIGHT}

        def shoot() -> None:
            picture = Image.open(io.BytesIO(page.screenshot(clip=box))).convert("RGB")
            if not frames or picture.tobytes() != frames[-1].tobytes():
                frames.append(picture)

        for name, said in ANIMATED.items():
            page.get_by_role("button", name=name, exact=True).click()
            told = board.locator(".grpo-edu-message", has_text=said)
            while not told.count():
                if name == "3 Train":
                    shoot()
                page.wait_for_timeout(100)
            page.wait_for_timeout(600)  # the bars have come to rest
            shoot()
            ends.append(len(frames) - 1)
        board.screenshot(path=folder / "dashboard_ask.png")
        page.context.close()
    durations = [LONG if number in ends else SHORT for number in range(len(frames))]
    first, *others = frames
    file = folder / "ask_the_model.webp"
    first.save(file, save_all=True, append_images=others, duration=durations, loop=0, quality=70, method=6)
    print(f"{file}: {len(frames)} pictures, {sum(durations) / 1000:.0f} s, {file.stat().st_size / 1e6:.2f} MB")


def shoot_lab(browser: Any, folder: Path) -> None:
    """Shoot the token inspector in JupyterLab; the console's messages are printed."""
    import nbformat
    from jupyter_lab import THEMES as LAB_THEMES
    from jupyter_lab import running_lab
    from nbformat.v4 import new_code_cell, new_notebook

    with tempfile.TemporaryDirectory() as place:
        course, home = Path(place, "course"), Path(place, "home")
        course.mkdir(), home.mkdir()
        with running_lab(course, home) as lab:
            notebook = new_notebook(cells=[new_code_cell(source) for source in INSPECTOR])
            notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
            nbformat.write(notebook, lab.folder / "notebooks" / "inspector.ipynb")
            for theme in THEMES:
                lab.set("@jupyterlab/apputils-extension:themes", {"theme": LAB_THEMES[theme]})
                page = _page(browser, "1280", theme)
                page.on(
                    "console", lambda said: said.type in ("warning", "error") and print("console:", said.text[:300])
                )
                page.goto(
                    f"{lab.address}/lab/workspaces/{theme}/tree/notebooks/inspector.ipynb?reset&token={lab.token}"
                )
                page.get_by_text("Python 3 (ipykernel) | Idle").wait_for()
                page.locator(".lm-MenuBar-item", has_text="Run").first.click()
                page.locator(".lm-Menu-item", has_text="Run All Cells").first.click()
                page.locator(".grpo-inspector").wait_for()
                for size, (width, height) in SIZES.items():
                    page.set_viewport_size({"width": width, "height": height})
                    if width < 600:  # JupyterLab has no layout for phones; Ctrl+B hides its list of files
                        page.keyboard.press("Control+b")
                    page.wait_for_timeout(800)
                    page.locator(".grpo-edu-dashboard").first.evaluate("e => e.scrollIntoView()")
                    page.wait_for_timeout(400)
                    page.screenshot(path=folder / f"lab_inspector_{size}_{theme}.png")
                page.context.close()


def main() -> int:
    """Take the pictures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.views", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the pictures go")
    parts = {"book": shoot_book, "app": shoot_app, "lab": shoot_lab, "ask": animate_ask}
    parser.add_argument("--only", nargs="+", choices=tuple(parts), default=["book", "app", "lab"])
    options = parser.parse_args()
    if "book" in options.only and not (BOOK / "index.html").is_file():
        raise SystemExit(f"{BOOK} holds no book; build it with: python3 course.py book")
    options.folder.mkdir(parents=True, exist_ok=True)
    from jupyter_lab import running_browser
    from optional import RESOURCES

    with running_browser(RESOURCES["chromium"].find()) as browser:
        for part in options.only:
            found = parts[part](browser, options.folder)
            if found:
                print("seconds to the first picture:", json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
