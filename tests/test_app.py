"""The web app: served by Voilà on loopback, behind a token, without a way to run code; and in a real browser."""

import argparse
import collections
import contextlib
import http.server
import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from jupyter_lab import shoot, wait_until
from keyboard import axe_problems, keyboard_problems

from grpo_edu.cli.app import _answers
from grpo_edu.cli.main import main
from grpo_edu.dashboards.worker import SLOTS, run_slot

REPOSITORY = Path(__file__).resolve().parents[1]
TOKEN = "a-token-of-the-tests"
SECONDS = 120  # generous: a kernel with torch starts in a tenth of it on an idle machine


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--port", "0"], "port"),
        (["--max-runs", "0"], "max-runs"),
        (["--idle", "1"], "idle"),
        (["--max-viewers", "0"], "max-viewers"),
        (["--base-url", "grpo"], "base-url"),
        (["--token-file", os.devnull], "token-file"),
        (["--token-file", "/nowhere/token"], "/nowhere/token"),
    ],
)
def test_bad_options_are_refused_in_one_line(capsys, options, word):
    assert main(["app", *options]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and word in error


def test_without_voila_it_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr("grpo_edu.cli.app.find_spec", lambda name: None)
    assert main(["app"]) == 2
    assert "grpo-edu[web]" in capsys.readouterr().err


def test_a_server_with_one_slot_refuses_a_second_run(tmp_path, monkeypatch):
    monkeypatch.setenv(SLOTS, f"{tmp_path}:1")
    with run_slot():
        with pytest.raises(RuntimeError, match="at most 1 at a time"):
            run_slot().__enter__()
    with run_slot():
        pass


def take_slots(folder, trials, start, end, taken):
    """A process that tries for the one slot of each trial together with others, and holds it until all have tried."""
    unlink = os.unlink
    os.unlink = lambda path: (time.sleep(random.uniform(0, 0.03)), unlink(path))  # a slow disk, or a busy computer
    for trial in range(trials):
        os.environ[SLOTS] = f"{folder / str(trial)}:1"
        start.wait()
        with contextlib.suppress(RuntimeError), run_slot():
            taken.put(trial)
            end.wait()
            continue
        end.wait()


@pytest.mark.long
@pytest.mark.slow
def test_a_slot_whose_process_was_killed_goes_to_exactly_one_of_three(tmp_path):
    trials, processes = 20, multiprocessing.get_context("spawn")
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for trial in range(trials):
        (tmp_path / str(trial)).mkdir()
        (tmp_path / str(trial) / "slot0").write_text(str(gone.pid))
    start, end, taken = processes.Barrier(3, timeout=SECONDS), processes.Barrier(3, timeout=SECONDS), processes.Queue()
    racers = [processes.Process(target=take_slots, args=(tmp_path, trials, start, end, taken)) for _ in range(3)]
    for racer in racers:
        racer.start()
    holders = collections.Counter(taken.get(timeout=SECONDS) for _ in range(trials))
    for racer in racers:
        racer.join()
    assert [racer.exitcode for racer in racers] == [0, 0, 0] and taken.empty()
    assert holders == dict.fromkeys(range(trials), 1)


def test_a_port_of_another_server_is_refused(capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["app", f"--port={port}"]) == 2
    printed = capsys.readouterr()
    assert str(port) in printed.err and "http" not in printed.out


def test_another_server_that_takes_the_port_meanwhile_is_not_mistaken_for_ours():
    other = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    threading.Thread(target=other.serve_forever, daemon=True).start()
    starting = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1)"])
    arguments = argparse.Namespace(port=other.server_port, base_url="/")
    assert _answers(starting, arguments, "our mark") is False, "it answers before ours gives up"
    other.shutdown()
    other.server_close()


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    """The address of a running app, its folder, and its process."""
    with running_app(tmp_path_factory.mktemp("app")) as running:
        yield running


@contextlib.contextmanager
def running_app(folder, *options):
    """`grpo-edu app` in a process of its own, until the end of the block."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (folder / "token").write_text(f"{TOKEN}\n")
    command = [sys.executable, "-m", "grpo_edu", "app", "--no-browser", f"--port={port}"]
    command += [f"--token-file={folder / 'token'}", *options]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    log = folder / "app.log"
    with log.open("w") as sink:
        server = subprocess.Popen([*command, f"--runs={folder / 'runs'}"], env=env, stdout=sink, stderr=sink)
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + SECONDS
        while "http" not in log.read_text():
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.3)
        socket.create_connection(("127.0.0.1", port), timeout=5).close()  # the address is printed when it answers
        yield address, folder, server
    finally:
        server.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(timeout=20)
        server.kill()


@pytest.mark.browser
def test_without_the_token_nothing_is_shown(app):
    address, _, _ = app
    for path in ("/", "/api/kernels", "/api/contents", "/voila/files/app.ipynb"):
        try:
            with urllib.request.urlopen(address + path, timeout=20) as answer:
                assert "/login" in answer.url, f"{path} is shown to anybody: {answer.read()[:200]}"
        except urllib.error.HTTPError as error:
            assert error.code in (403, 404), path


@pytest.mark.browser
def test_the_token_is_on_no_command_line(app):
    import psutil

    assert TOKEN not in " ".join([*voila(app[2]).cmdline(), *psutil.Process(app[2].pid).cmdline()])


@pytest.fixture
def page(app, browser):
    """The app in a browser that reaches no other host; what it asked for and its errors are checked at the end."""
    address, _, _ = app
    page = browser.new_page(viewport={"width": 1366, "height": 768}, device_scale_factor=2)
    outside, errors = [], []
    page.on("request", lambda request: is_outside(request.url, address) and outside.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda said: "version" in said.text and errors.append(said.text))
    page.goto(f"{address}/?token={TOKEN}", timeout=1000 * SECONDS, wait_until="commit")
    page.get_by_role("heading", level=1).wait_for(timeout=1000 * SECONDS)
    assert page.locator(DASHBOARD).count() == 0, "the heading is there before Python is"
    page.locator(DASHBOARD).first.wait_for(timeout=1000 * SECONDS)
    yield page
    shoot(page, "app_last")
    page.close()
    assert (outside, errors) == ([], [])


DASHBOARD = ".grpo-edu-dashboard:visible"
STATUS = "[role=status]:visible"


def is_outside(url, address):
    return not url.startswith((address, address.replace("http", "ws"), "data:", "blob:", "about:"))


def open_tab(page, name):
    page.get_by_role("tab", name=name, exact=True).click()
    page.locator(DASHBOARD).wait_for(timeout=1000 * SECONDS)


def says(page, text):
    """Wait until a status of the page has this text; a failure shows what the page says instead."""
    statuses, deadline = page.locator(STATUS), time.monotonic() + SECONDS
    while not any(text in " ".join(said.split()) for said in statuses.all_inner_texts()):
        assert time.monotonic() < deadline, f"{text!r} is not in {statuses.all_inner_texts()}"
        page.wait_for_timeout(100)


def press(page, name):
    page.get_by_role("button", name=name, exact=True).click()


def five_steps(page):
    press(page, "More settings ▸")
    page.locator(".noUi-handle:visible").nth(1).press("Home")


@pytest.mark.browser
@pytest.mark.long
def test_every_tab_fits_its_page_and_can_be_used_without_sight(page):
    """Nothing is wider than the page, the keyboard reaches all, pictures are sharp, and axe finds nothing serious."""
    assert page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime") < 10_000
    tabs = [tab.inner_text() for tab in page.get_by_role("tab").all()]
    assert tabs[0] == "Ask"
    grounds = page.evaluate("['#main', 'body'].map(e => getComputedStyle(document.querySelector(e)).backgroundColor)")
    assert len(set(grounds)) == 1, "a wide screen has strips of another color beside the page"
    for tab in tabs:
        open_tab(page, tab)
        assert page.locator(f"{DASHBOARD} h2").count() == 1
        assert page.get_by_role("link", name="notebook").filter(visible=True).get_attribute("href").endswith(".html")
        for width in (390, 768, 1366):
            page.set_viewport_size({"width": width, "height": 768})
            inside = page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            sliders = page.locator(".noUi-target:visible").evaluate_all("all => all.map(one => one.offsetWidth)")
            assert inside and all(size >= 180 for size in sliders), (tab, width, sliders)
            cut = page.locator("#rendered_cells").evaluate("e => e.scrollHeight > e.clientHeight")
            assert not cut, f"{tab}: a part of the page scrolls inside the page"
            shoot(page, f"app_{tab}_{width}")
        page.get_by_role("tabpanel", name=tab, exact=True).wait_for()
        names = page.locator(".noUi-handle:visible").evaluate_all("all => all.map(one => one.ariaLabel)")
        assert all(names), (tab, names)
        for picture in page.locator(f"{DASHBOARD} img").filter(visible=True).all():
            wide = picture.evaluate("e => e.src.startsWith('data:image/svg') || e.naturalWidth >= 2 * e.offsetWidth")
            assert wide, f"{tab}: a picture that is blurred on a dense screen"
        assert axe_problems(page, impacts=("serious", "critical")) == [], tab
        problems = keyboard_problems(page, page.locator(DASHBOARD))
        assert problems == [], (tab, problems)
        beside = page.get_by_role("tab", name=tab, exact=True)
        beside.focus()
        beside.press("ArrowDown")  # the names of the tabs are a column
        assert page.evaluate("document.activeElement.role") == "tab", tab
        assert tab == tabs[-1] or not beside.evaluate("e => e === document.activeElement"), tab


@pytest.mark.browser
def test_the_model_is_asked_trained_and_asked_again_by_a_kernel_that_runs_no_code(app, page):
    says(page, "Recorded before training")
    press(page, "2 answers, 20 steps")
    page.locator("[aria-live=polite]", has_text="training steps = 20").wait_for()
    press(page, "1 Ask")
    says(page, "The model answered 2 times")
    press(page, "2 Score")
    says(page, "of 2 answers")
    five_steps(page)
    press(page, "3 Train")
    page.get_by_role("progressbar").wait_for(timeout=1000 * SECONDS)
    told = page.locator(f"{DASHBOARD} > [aria-live=polite]", has_text="Step ")
    told.wait_for(state="attached", timeout=1000 * SECONDS)
    says(page, "was trained for 5 steps")
    press(page, "4 Ask again")
    says(page, "After 5 steps")
    panel, before, after = page.locator("table:visible").all()
    assert "before training" in before.inner_text() and "after 5 steps" in after.inner_text()
    assert panel.locator("tbody td.bar b").count() == panel.locator("tbody tr").count(), "where each bar was before"
    shoot(page, "app_asked")
    check_no_code_runs(*app, page.context.cookies())


@pytest.mark.browser
@pytest.mark.long
def test_a_page_that_is_loaded_again_offers_what_was_trained_before(page):
    press(page, "2 answers, 20 steps")
    five_steps(page)
    press(page, "3 Train")
    says(page, "was trained for 5 steps")
    press(page, "3 Train")
    page.reload(timeout=1000 * SECONDS, wait_until="commit")  # in the middle of the next training run
    says(page, "trained here before")
    press(page, "More settings ▸")
    page.get_by_label("Model", exact=True).select_option(index=1)
    says(page, "was trained for")
    assert page.locator("table:visible").count() == 2, "the answers of before the page was loaded again"


@pytest.mark.browser
@pytest.mark.long
def test_a_page_says_what_became_of_its_server_and_its_python(app, page):
    """The network is gone and back; then Python ends; then the server knows the page's old sign-in no more."""
    address, folder, server = app
    line = page.locator("#ended")
    page.context.set_offline(True)
    line.filter(has_text="has stopped or cannot be reached").wait_for(timeout=1000 * SECONDS)
    page.context.set_offline(False)
    wait_until(lambda: line.inner_text() == "", "the line goes when the server answers again", SECONDS)
    for kernel in kernels(server):
        name = kernel.cmdline()[-1].rpartition("kernel-")[2].removesuffix(".json")
        request = urllib.request.Request(f"{address}/voila/api/shutdown/{name}?token={TOKEN}", data=b"")
        urllib.request.urlopen(request, timeout=SECONDS).close()
    line.filter(has_text="Load the page again").wait_for(timeout=1000 * SECONDS)
    page.context.clear_cookies()  # as if another server with another token had this address
    line.filter(has_text="has a new address").wait_for(timeout=1000 * SECONDS)
    shoot(page, "app_ended")


@pytest.mark.browser
@pytest.mark.long
def test_the_word_game_is_played_with_the_keyboard(page):
    open_tab(page, "Words")
    says(page, "3 guesses left")
    field = page.get_by_label("Your guess")
    for word, text in (
        ("cat", "2 guesses left"),
        ("xyz", "one of the 30 words"),
        ("pen", "1 guess left"),
        ("hen", "won"),
    ):
        field.fill(word)
        field.press("Enter")
        says(page, text)
    assert field.evaluate("e => e === document.activeElement"), "ready for the next guess"
    shoot(page, "app_words")


@pytest.mark.browser
@pytest.mark.long
def test_a_run_is_live_stays_paused_and_outlives_the_page(app, page):
    """By keyboard: start, pause, reload, resume, stop and save; the curves are drawn while it trains."""
    folder = app[1]
    open_tab(page, "Train")
    assert page.get_by_alt_text("recorded run").count() == 1
    steps = page.get_by_role("slider", name="steps", exact=True)
    steps.press("End")  # 200 steps, so that there is time to pause and stop
    start = page.get_by_role("button", name="Start", exact=True)
    start.press("Enter")
    page.get_by_role("progressbar", name="Training").wait_for(timeout=1000 * SECONDS)
    assert start.evaluate("e => e === document.activeElement"), "the focus stays where the reader is"
    curves = page.get_by_alt_text("Curves over")
    curves.wait_for(timeout=1000 * SECONDS)
    seen = set()
    wait_until(lambda: seen.add(curves.get_attribute("alt")) or len(seen) >= 4, "the curves grow", SECONDS)
    shoot(page, "app_training")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    says(page, "Paused after step")
    page.wait_for_timeout(1500)
    says(page, "Paused after step")
    wait_until(lambda: list((folder / "runs" / ".kept").glob("*/run.json")), "the run is kept", SECONDS)
    page.reload(timeout=1000 * SECONDS, wait_until="commit")
    page.locator(DASHBOARD).first.wait_for(timeout=1000 * SECONDS)
    open_tab(page, "Train")
    press(page, "Open")
    says(page, "Press Resume to continue")
    paused = page.get_by_alt_text("Curves over").get_attribute("alt")
    press(page, "Resume")
    wait_until(lambda: curves.get_attribute("alt") != paused, "the run goes on", SECONDS)
    press(page, "Stop")
    says(page, "Stopped")
    press(page, "Save")
    says(page, "Saved in")
    (saved,) = (folder / "runs").glob("tiny-*")
    assert json.loads((saved / "result.json").read_text())["interrupted"] is True


@pytest.mark.long
@pytest.mark.browser
def test_a_control_changes_its_picture(page):
    """The point of the tie curve follows each position of its slider, and a weight changes the bars of the rewards."""
    open_tab(page, "Advantages")
    picture = page.get_by_alt_text("rewards and their advantages")
    pictures = {picture.get_attribute("src")}
    handle = page.get_by_role("slider", name="success rate p")
    for _ in range(3):  # a hundredth each: the rewards stay the same
        handle.press("ArrowRight")
        wait_until(lambda: picture.get_attribute("src") not in pictures, "the point follows the slider", SECONDS)
        pictures.add(picture.get_attribute("src"))
    open_tab(page, "Rewards")
    bars = page.get_by_alt_text("Rewards of the completion")
    before = bars.get_attribute("src")
    page.get_by_role("slider", name="weight of format").press("End")
    wait_until(lambda: bars.get_attribute("src") != before, "the bars follow the weight", SECONDS)


@pytest.mark.browser
@pytest.mark.long
def test_each_viewer_has_a_kernel_that_ends_with_the_page(app, browser):
    """Two pages, two kernels; a closed page takes its training along."""
    address, _, server = app
    before = len(kernels(server))  # of pages that went without a word
    viewers = [browser.new_context(), browser.new_context()]
    pages = [viewer.new_page() for viewer in viewers]
    for page in pages:
        page.goto(f"{address}/?token={TOKEN}", timeout=1000 * SECONDS)
    for page in pages:
        page.locator(DASHBOARD).wait_for(timeout=1000 * SECONDS)
    assert len(kernels(server)) == before + 2
    for page in pages:
        open_tab(page, "Train")
        page.get_by_role("slider", name="steps", exact=True).press("End")  # 200
        press(page, "Start")
        if page is pages[0]:
            page.get_by_role("progressbar", name="Training").wait_for(timeout=1000 * SECONDS)
    says(pages[1], "number 1 in the queue")
    assert "Traceback" not in pages[1].content() and "Error" not in pages[1].locator(STATUS).inner_text()
    for page in pages:
        page.close(run_before_unload=True)
    wait_until(lambda: len(kernels(server)) == before, "the kernels end with their pages", SECONDS)
    for viewer in viewers:
        viewer.close()


@pytest.mark.browser
@pytest.mark.long
def test_no_more_viewers_than_allowed_under_a_path_of_the_proxy(browser, tmp_path):
    with running_app(tmp_path, "--max-viewers=1", "--base-url=/course/grpo/") as (address, _, server):
        viewer = browser.new_context()  # outlives the page, which tells the server that it is closed
        page = viewer.new_page()
        page.goto(f"{address}/course/grpo/?token={TOKEN}", timeout=1000 * SECONDS)
        page.locator(DASHBOARD).wait_for(timeout=1000 * SECONDS)
        late = browser.new_page()
        answer = late.goto(f"{address}/course/grpo/?token={TOKEN}", timeout=1000 * SECONDS)
        assert answer.status == 503 and len(kernels(server)) == 1
        page.close(run_before_unload=True)
        wait_until(lambda: kernels(server) == [], "the kernel ends with its page", SECONDS)
        again = f"{address}/course/grpo/?token={TOKEN}"
        wait_until(lambda: late.goto(again, timeout=1000 * SECONDS).status == 200, "the next viewer is let in", SECONDS)
        late.close()
        viewer.close()


@pytest.mark.browser
@pytest.mark.long
def test_an_idle_kernel_is_ended_though_its_page_is_open(browser, tmp_path):
    with running_app(tmp_path, "--idle=4") as (address, _, server):
        page = browser.new_page()
        page.goto(f"{address}/?token={TOKEN}", timeout=1000 * SECONDS)
        page.locator(DASHBOARD).wait_for(timeout=1000 * SECONDS)
        assert len(kernels(server)) == 1
        wait_until(lambda: kernels(server) == [], "the kernel ends", SECONDS)
        page.close()


@pytest.mark.slow
def test_an_interrupt_of_the_command_alone_ends_all(app):
    """The last test of this file, because it ends the app of the others."""
    address, folder, server = app
    deadline = time.monotonic() + SECONDS
    while f"{address}/?token={TOKEN}" not in (folder / "app.log").read_text():  # a moment after the server answers
        assert time.monotonic() < deadline and server.poll() is None
        time.sleep(0.1)
    served = voila(server)
    os.kill(server.pid, signal.SIGINT)  # not to its group, as Ctrl-C in a terminal would
    assert server.wait(timeout=SECONDS) == 0 and not served.is_running(), (folder / "app.log").read_text()


def voila(server):
    """The process that serves the pages."""
    import psutil

    (child,) = psutil.Process(server.pid).children()
    return child


def kernels(server):
    """The processes of its kernels that are alive."""
    import psutil

    found = []
    for child in voila(server).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it may end just now; a zombie has no command line
            if "ipykernel" in " ".join(child.cmdline()):
                found.append(child)
    return found


def check_no_code_runs(address, folder, server, cookies):
    """A message that would run code is dropped, and another page in the viewer's browser reaches no kernel."""
    import websocket

    *_, kernel = kernels(server)
    number = kernel.cmdline()[-1].rpartition("kernel-")[2].removesuffix(".json")
    channels = f"{address.replace('http', 'ws')}/api/kernels/{number}/channels"
    link = websocket.create_connection(f"{channels}?token={TOKEN}", timeout=SECONDS)
    trace = folder / "code_ran"
    link.send(message("execute_request", code=f"open({str(trace)!r}, 'w')", silent=False, store_history=False))
    link.send(message("kernel_info_request"))
    replies = set()
    while "kernel_info_reply" not in replies:
        replies.add(json.loads(link.recv())["msg_type"])
    link.close()
    assert "execute_reply" not in replies and not trace.exists()
    foreign = {
        "Origin": "http://elsewhere.example",
        "Cookie": "; ".join(f"{one['name']}={one['value']}" for one in cookies),
    }
    with pytest.raises(websocket.WebSocketBadStatusException):
        websocket.create_connection(channels, timeout=SECONDS, origin=foreign["Origin"], cookie=foreign["Cookie"])
    end = urllib.request.Request(f"{address}/voila/api/shutdown/{number}", data=b"", headers=foreign)
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(end, timeout=20)
    assert kernel in kernels(server)


def message(kind, **content):
    """A message of the Jupyter protocol on the shell channel."""
    header = {
        "msg_id": f"test-{kind}",
        "msg_type": kind,
        "username": "",
        "session": "test",
        "version": "5.3",
        "date": "2026-01-01T00:00:00Z",
    }
    return json.dumps({"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"})
