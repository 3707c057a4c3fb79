"""The web app: served by Voilà on loopback, behind a token, without a way to run code; and in a real browser."""

import collections
import contextlib
import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from grpo_edu.cli.main import main
from grpo_edu.dashboards.worker import SLOTS, RunSlot

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
    pytest.importorskip("voila")
    assert main(["app", *options]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and word in error


def test_without_voila_it_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr("grpo_edu.cli.app.find_spec", lambda name: None)
    assert main(["app"]) == 2
    assert "grpo-edu[web]" in capsys.readouterr().err


def test_a_server_with_one_slot_refuses_a_second_run(tmp_path, monkeypatch):
    monkeypatch.setenv(SLOTS, f"{tmp_path}:1")
    with RunSlot():
        with pytest.raises(RuntimeError, match="1 training runs"):
            RunSlot().__enter__()
    with RunSlot():
        pass


def take_slots(folder, trials, start, end, taken):
    """A process that tries for the one slot of each trial together with others, and holds it until all have tried."""
    unlink = os.unlink
    os.unlink = lambda path: (time.sleep(random.uniform(0, 0.03)), unlink(path))  # a slow disk, or a busy computer
    for trial in range(trials):
        os.environ[SLOTS] = f"{folder / str(trial)}:1"
        start.wait()
        with contextlib.suppress(RuntimeError), RunSlot():
            taken.put(trial)
            end.wait()
            continue
        end.wait()


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


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    """The address of a running app, its folder, and its process."""
    with running_app(tmp_path_factory.mktemp("app")) as running:
        yield running


@contextlib.contextmanager
def running_app(folder, *options):
    """`grpo-edu app` in a process of its own, until the end of the block."""
    pytest.importorskip("voila", reason="no Voilà: pip install voila")
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
        while True:
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.3)
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


@pytest.mark.browser
def test_a_run_in_the_browser(app, browser):
    """Start a training, see it counted, pause, stop and save it; move a slider and see another picture."""
    address, folder, _ = app
    page = browser.new_page(viewport={"width": 1100, "height": 1400})
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(f"{address}/?token={TOKEN}", timeout=1000 * SECONDS)
    page.get_by_role("button", name="Start").wait_for(timeout=1000 * SECONDS)
    assert page.locator(".jp-CodeCell .jp-InputArea-editor, textarea.inputarea").count() == 0
    steps = page.locator(".widget-slider:visible .noUi-handle").nth(2)
    steps.focus()
    steps.press("End")  # 200 steps, so that there is time to pause and stop
    page.get_by_role("button", name="Start").click()
    words = page.locator("[role=status]")
    words.filter(has_text="Step ").wait_for(timeout=1000 * SECONDS)
    curves = page.get_by_alt_text("Curves over")
    curves.wait_for(timeout=1000 * SECONDS)
    first = curves.get_attribute("alt")
    wait_until(lambda: curves.get_attribute("alt") != first, "the curve grows")
    page.get_by_role("button", name="Pause").click()
    page.get_by_role("button", name="Resume").wait_for()
    shoot(page, "training")
    page.get_by_role("button", name="Stop").click()
    words.filter(has_text="Stopped").wait_for(timeout=1000 * SECONDS)
    page.get_by_role("button", name="Save").click()
    words.filter(has_text="Saved in").wait_for(timeout=1000 * SECONDS)
    (saved,) = (folder / "runs").iterdir()
    assert json.loads((saved / "result.json").read_text())["interrupted"] is True
    page.get_by_text("Advantages", exact=True).first.click()
    picture = page.get_by_alt_text("rewards and their advantages")
    picture.wait_for(timeout=1000 * SECONDS)
    before = picture.get_attribute("src")
    handle = page.locator(".widget-slider:visible .noUi-handle").first
    handle.focus()
    handle.press("ArrowLeft")
    wait_until(lambda: picture.get_attribute("src") != before, "the picture follows the slider")
    assert picture.get_attribute("alt").startswith("7 rewards")
    shoot(page, "advantages")
    assert errors == []
    page.close()


@pytest.mark.browser
def test_each_viewer_has_a_kernel_that_runs_no_code_and_ends_with_the_page(app, browser):
    """Two pages, two kernels; a message that would run code is dropped; a closed page takes its training along."""
    import websocket

    address, folder, server = app
    before = len(kernels(server))  # of pages that went without a word
    viewers, sockets = [browser.new_context(), browser.new_context()], []
    pages = [viewer.new_page() for viewer in viewers]
    for page in pages:
        page.on("websocket", lambda opened: sockets.append(opened.url))
        page.goto(f"{address}/?token={TOKEN}", timeout=1000 * SECONDS)
    for page in pages:
        page.get_by_role("button", name="Start").wait_for(timeout=1000 * SECONDS)
    ids = {url.partition("/api/kernels/")[2].partition("/")[0] for url in sockets}
    assert len(ids) == 2 and len(kernels(server)) == before + 2
    running = ids.pop()
    channels = f"{address.replace('http', 'ws')}/api/kernels/{running}/channels?token={TOKEN}"
    link = websocket.create_connection(channels, timeout=SECONDS)
    trace = folder / "code_ran"
    link.send(message("execute_request", code=f"open({str(trace)!r}, 'w')", silent=False, store_history=False))
    link.send(message("kernel_info_request"))
    replies = set()
    while "kernel_info_reply" not in replies:
        replies.add(json.loads(link.recv())["msg_type"])
    link.close()
    assert "execute_reply" not in replies and not trace.exists()
    cookie = "; ".join(f"{one['name']}={one['value']}" for one in viewers[0].cookies())
    foreign = {"Origin": "http://elsewhere.example", "Cookie": cookie}  # another page in the viewer's browser
    with pytest.raises(websocket.WebSocketBadStatusException):
        websocket.create_connection(
            channels.partition("?")[0], timeout=SECONDS, origin=foreign["Origin"], cookie=cookie
        )
    end = f"{address}/voila/api/shutdown/{running}"
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(urllib.request.Request(end, data=b"", headers=foreign), timeout=20)
    assert len(kernels(server)) == before + 2
    pages[0].get_by_role("button", name="Start").click()
    pages[0].locator("[role=status]").filter(has_text="Step ").wait_for(timeout=1000 * SECONDS)
    for page in pages:
        page.close(run_before_unload=True)
    wait_until(lambda: len(kernels(server)) == before, "the kernels end with their pages")
    for viewer in viewers:
        viewer.close()


@pytest.mark.browser
def test_no_more_viewers_than_allowed_under_a_path_of_the_proxy(browser, tmp_path):
    with running_app(tmp_path, "--max-viewers=1", "--base-url=/course/grpo/") as (address, _, server):
        viewer = browser.new_context()  # outlives the page, which tells the server that it is closed
        page = viewer.new_page()
        page.goto(f"{address}/course/grpo/?token={TOKEN}", timeout=1000 * SECONDS)
        page.get_by_role("button", name="Start").wait_for(timeout=1000 * SECONDS)
        late = browser.new_page()
        answer = late.goto(f"{address}/course/grpo/?token={TOKEN}", timeout=1000 * SECONDS)
        assert answer.status == 503 and len(kernels(server)) == 1
        page.close(run_before_unload=True)
        wait_until(lambda: kernels(server) == [], "the kernel ends with its page")
        again = f"{address}/course/grpo/?token={TOKEN}"
        wait_until(lambda: late.goto(again, timeout=1000 * SECONDS).status == 200, "the next viewer is let in")
        late.close()
        viewer.close()


@pytest.mark.browser
def test_an_idle_kernel_is_ended_though_its_page_is_open(browser, tmp_path):
    with running_app(tmp_path, "--idle=4") as (address, _, server):
        page = browser.new_page()
        page.goto(f"{address}/?token={TOKEN}", timeout=1000 * SECONDS)
        page.get_by_role("button", name="Start").wait_for(timeout=1000 * SECONDS)
        assert len(kernels(server)) == 1
        wait_until(lambda: kernels(server) == [], "the kernel ends")
        page.close()


def voila(server):
    """The process that serves the pages."""
    import psutil

    (child,) = psutil.Process(server.pid).children()
    return child


def kernels(server):
    """The processes of its kernels that are alive."""
    import psutil

    children = [child for child in voila(server).children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in children if "ipykernel" in " ".join(child.cmdline())]


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


def shoot(page, name):
    target = os.environ.get("GRPO_EDU_SCREENSHOTS")
    if target:
        Path(target).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=Path(target) / f"app_{name}.png")


def wait_until(holds, what):
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)
