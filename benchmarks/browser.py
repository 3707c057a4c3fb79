"""When a browser shows what: part `browser` of ``python -m benchmarks.dashboards``.

Chromium opens the app of a running server, moves a control of each explorer, and opens notebook 00 in JupyterLab and
runs all its cells. The servers are those of the tests.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness import spread

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

LOADS, KEYS, OPENINGS = 3, 5, 1  # loads of the app, key presses for each explorer, openings of the notebook
TIMEOUT = 240_000  # ms
TABS = {  # tab → the slider that is moved
    "Advantages": "success rate p",
    "Objective": "ratio",
    "Rewards": "weight of format",
    "Quantization": "bits",
}
# Each key press is followed until the first picture that is new is decoded and painted.
WATCH = """() => {
    window.pictures = [];
    let pressed = null;
    document.addEventListener('keydown', () => { pressed = performance.now(); }, true);
    new MutationObserver(changes => {
        const images = changes.flatMap(change => [...change.addedNodes])
            .flatMap(node => node.tagName === 'IMG' ? [node] : [...(node.querySelectorAll?.('img') ?? [])]);
        if (pressed === null || !images.length) return;
        const began = pressed;
        pressed = null;
        images[0].decode().then(() => requestAnimationFrame(() => pictures.push(performance.now() - began)));
    }).observe(document.body, { childList: true, subtree: true });
}"""
# The cells of notebook 00 that show learning: what is waited for → part of the source, what the output then holds.
LEARNING = {
    "first reward next to the bar, s": ("bar = tqdm(training", "text=/reward=/"),
    "curve of the training, s": ("figure = training_curves(", "img"),
    "accuracy before and after, s": ("after = grpo_edu.evaluate(", "img"),
    "the result again, above the key points, s": ('title="Your run', "img"),
}
# The share of an element's height that is on the screen.
IN_VIEW = """element => {
    const box = element.getBoundingClientRect();
    return Math.max(0, Math.min(box.bottom, innerHeight) - Math.max(box.top, 0)) / box.height;
}"""


def measure_browser(pictures: Path | None = None) -> dict[str, Any]:
    """First paint and response of the app, and the way to the first visible learning in notebook 00.

    Args:
        pictures: a folder for screenshots.
    """
    from jupyter_lab import running_browser, running_lab
    from optional import RESOURCES
    from test_app import running_app

    load = os.getloadavg()[0]  # times are compared with promises for a quiet computer
    with tempfile.TemporaryDirectory() as folder, running_browser(RESOURCES["chromium"].find()) as browser:
        places = [Path(folder, name) for name in ("app", "course", "home")]
        for place in places:
            place.mkdir()
        began = time.perf_counter()
        with running_app(places[0]) as (address, _, _):
            started = time.perf_counter() - began
            found = _app(browser, address)
            found["from the command to the first tab, s"] = started + found["first tab can be used, s"]["high"]
        with running_lab(*places[1:]) as lab:
            found["notebook 00"] = _notebook(browser, lab, pictures)
    return {"load average before": load, **found}


def measure_book(site: Path) -> dict[str, Any]:
    """kB of each page of the web book without its pictures, and of the course's own scripts and styles."""
    if not (site / "index.html").is_file():
        raise SystemExit(f"{site} holds no book; build it with: python3 course.py book")
    pages = {}
    for path in sorted(site.rglob("*.html")):
        text = re.sub(r"data:image/[^\"')]*", "", path.read_text(encoding="utf-8"))
        pages[path.relative_to(site).as_posix()] = round(len(text.encode()) / 1000)
    names = [path.name for path in (Path(__file__).resolve().parents[1] / "book" / "static").glob("*.*")]
    own = [
        path
        for name in (*names, "chances.css", "chances.js", "formulas.js", "inspector.js", "inspector.css")
        for path in site.rglob(name)
    ]
    largest = dict(sorted(pages.items(), key=lambda item: -item[1])[:5])
    return {
        "pages": len(pages),
        "kB of a page": spread([float(size) for size in pages.values()]),
        "largest, kB": largest,
        "scripts and styles, kB": round(sum(path.stat().st_size for path in own) / 1000),
    }


def _app(browser: Any, address: str) -> dict[str, Any]:
    from test_app import TOKEN

    paints, ready = [], []
    for _ in range(LOADS):
        page = browser.new_context(viewport={"width": 1366, "height": 768}).new_page()
        page.set_default_timeout(TIMEOUT)
        page.goto(f"{address}/?token={TOKEN}", wait_until="commit")
        page.get_by_role("button", name="Ask", exact=True).wait_for()
        ready.append(page.evaluate("performance.now() / 1000"))
        paints.append(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime / 1000"))
        if len(paints) < LOADS:
            page.context.close()
    answers = {}
    for tab, name in TABS.items():
        page.get_by_role("tab", name=tab, exact=True).click()
        handle = page.get_by_role("slider", name=name).first
        handle.wait_for()
        page.wait_for_timeout(1000)
        page.evaluate(WATCH)
        handle.press("Home")
        for _ in range(KEYS):
            page.wait_for_timeout(500)
            seen = page.evaluate("pictures.length")
            handle.press("ArrowRight")
            page.wait_for_function(f"pictures.length > {seen}")
        answers[tab] = spread(page.evaluate("pictures")[-KEYS:])
        page.reload()  # without the observers
    page.context.close()
    return {"first paint, s": spread(paints), "first tab can be used, s": spread(ready), "key to picture, ms": answers}


def _notebook(browser: Any, lab: Any, pictures: Path | None) -> dict[str, Any]:
    rounds = [_run_all(browser, lab, pictures if number == 0 else None) for number in range(OPENINGS)]
    found: dict[str, Any] = {
        name: spread([one[name] for one in rounds]) for name in ("notebook is ready, s", *LEARNING, "last cell, s")
    }
    return {**found, "on the screen when it comes, and at the end": [one["seen"] for one in rounds]}


def _run_all(browser: Any, lab: Any, pictures: Path | None) -> dict[str, Any]:
    """Return the seconds from opening the notebook until each sign of learning, and whether it is on the screen."""
    page = browser.new_context(viewport={"width": 1366, "height": 768}).new_page()
    page.set_default_timeout(TIMEOUT)
    began = time.perf_counter()
    page.goto(f"{lab.address}/lab/tree/notebooks/00_start_here.ipynb?reset&token={lab.token}")
    idle = page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]")
    page.get_by_text("Python 3 (ipykernel) | Idle").wait_for()
    found: dict[str, Any] = {"notebook is ready, s": time.perf_counter() - began}
    _menu(page, "Run", "Run All Cells")
    seen: dict[str, list[float]] = {}
    signs, shots = {}, 0
    for name, (source, sign) in LEARNING.items():
        cell = page.locator(".jp-CodeCell", has_text=source).first
        cell.get_by_text("[*]:").wait_for()  # its stored output has made room
        signs[name] = cell.locator(".jp-OutputArea").locator(sign).first

    def look() -> None:
        nonlocal shots
        for name, sign in signs.items():
            if name not in found and sign.count():
                found[name] = time.perf_counter() - began
                seen[name] = [round(sign.evaluate(IN_VIEW), 2)]
                if pictures:
                    page.screenshot(path=pictures / f"run_all_{name.split(',')[0].replace(' ', '_')}.png")
        if pictures and time.perf_counter() - began > 3 * shots:
            shots += 1
            page.screenshot(path=pictures / f"run_all_{3 * shots:03d}_s.png")

    _until(lambda: look() or (len(seen) == len(LEARNING) and idle.count() > 0), TIMEOUT / 1000)
    found["last cell, s"] = time.perf_counter() - began
    page.wait_for_timeout(500)
    for name, sign in signs.items():
        seen[name].append(round(sign.evaluate(IN_VIEW), 2))
    if pictures:
        page.screenshot(path=pictures / "run_all_end.png")
    page.evaluate(
        f"fetch('/api/kernels?token={lab.token}').then(r => r.json()).then(all => Promise.all(all.map(k => "
        f"fetch('/api/kernels/' + k.id + '?token={lab.token}', {{method: 'DELETE'}}))))"
    )
    page.context.close()
    return {**found, "seen": seen}


def _menu(page: Any, *path: str) -> None:
    page.locator(".lm-MenuBar-item", has_text=path[0]).first.click()
    page.locator(".lm-Menu-item", has_text=path[1]).first.click()


def _until(holds: Callable[[], bool], seconds: float) -> None:
    deadline = time.perf_counter() + seconds
    while not holds():
        if time.perf_counter() > deadline:
            raise TimeoutError(f"not within {seconds:.0f} s")
        time.sleep(0.1)
