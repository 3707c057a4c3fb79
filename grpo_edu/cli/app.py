"""`grpo-edu app`: the dashboards in a browser, through Voilà, on this machine only unless told otherwise."""

from __future__ import annotations

import http.client
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from argparse import ArgumentParser, Namespace
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from grpo_edu.problems.files import read_utf8
from grpo_edu.web import read_web

_TEMPLATES = Path(__file__).resolve().parents[1] / "dashboards" / "share"  # the page that Voilà fills
_NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"  # in a checkout of the course
_SOURCE = "from grpo_edu.dashboards.app import App\n\nApp()"  # the one cell that Voilà runs for each viewer
_MARK = "X-Grpo-Edu"  # a header
_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style></head>
<body><p><i>A notebook of the course, to read. To run it, start JupyterLab with python3 course.py lab.</i></p>{body}
</body></html>
"""
_METADATA = {
    "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
    "title": "Watch GRPO train a language model",
}


def add_app_options(command: ArgumentParser) -> None:
    """Add the options of the command."""
    add = command.add_argument
    add("--port", type=int, default=8866, help="port of the page (default: 8866)")
    add("--token-file", metavar="FILE", help="file with the secret token of the address (default: a new token)")
    add("--base-url", default="/", metavar="PATH", help="prefix of the path behind a reverse proxy (default: /)")
    add(
        "--max-viewers",
        type=int,
        default=8,
        metavar="N",
        help="open pages at a time, each with its own kernel (default: 8)",
    )
    add("--max-runs", type=int, default=1, metavar="N", help="training runs at a time, over all viewers (default: 1)")
    add(
        "--idle",
        type=int,
        default=900,
        metavar="SECONDS",
        help="stop a kernel after this many idle seconds (default: 900)",
    )
    add("--runs", default="runs", metavar="DIR", help="folder in which runs are saved and compared (default: runs)")
    add("--theme", choices=("light", "dark"), default="light", help="theme of the page (default: light)")
    add("--no-browser", action="store_true", help="print the address without opening a browser")


def run_app_command(arguments: Namespace) -> int:
    """Run the web app until Ctrl-C; returns the exit code of the server."""
    import nbformat
    from nbformat import v4

    _check(arguments)
    token, mark = _token(arguments.token_file), secrets.token_hex(8)
    # A kernel that is still ending may write into the folder while it is removed, which is no error of the app.
    with tempfile.TemporaryDirectory(prefix="grpo-edu-app-", ignore_cleanup_errors=True) as folder:
        place = Path(folder)
        (place / "slots").mkdir()
        pages = place / "notebooks"  # to be read next to the dashboards
        ended = threading.Event()
        writing = threading.Thread(target=write_pages, args=(_NOTEBOOKS, pages, ended))
        if _NOTEBOOKS.is_dir():
            pages.mkdir()
        nbformat.write(v4.new_notebook(cells=[v4.new_code_cell(_SOURCE)], metadata=_METADATA), place / "app.ipynb")
        # in a file that only its owner can read, and not on the command line, which every user of the machine can
        (place / "voila.json").write_text(json.dumps(server_settings(arguments, token, mark)), encoding="utf-8")
        # PyTorch's threads of several kernels get in each other's way, so the environment stays as it was found
        env = {
            **os.environ,
            "GRPO_EDU_APP_SLOTS": f"{place / 'slots'}:{arguments.max_runs}",
            "GRPO_EDU_APP_RUNS": str(Path(arguments.runs).absolute()),
        }
        if pages.is_dir():
            env["GRPO_EDU_APP_NOTEBOOKS"] = str(pages)
        env["JUPYTER_PATH"] = os.pathsep.join(filter(None, [str(_TEMPLATES), os.environ.get("JUPYTER_PATH")]))
        command = [sys.executable, "-m", "voila", str(place / "app.ipynb"), f"--Voila.config_file_paths={place}"]
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # told to end, it does not leave Voilà behind
        server = subprocess.Popen([*command, "--no-browser"] if arguments.no_browser else command, env=env)
        try:
            writing.start()
            print("grpo_edu: the server is starting …", flush=True)
            if not _answers(server, arguments, mark):
                raise RuntimeError(
                    f"port: the server did not start; if another program is using port {arguments.port} by now, "
                    "give another --port"
                )
            address = f"http://127.0.0.1:{arguments.port}{arguments.base_url}?token={token}"
            print(f"grpo_edu: {address}\ngrpo_edu: press Ctrl-C to stop it", flush=True)
            return server.wait()
        except KeyboardInterrupt:  # Voilà has not had it, where only this process was told
            return 0
        finally:
            ended.set()
            server.terminate()
            try:
                server.wait(timeout=20)
            except subprocess.TimeoutExpired:
                server.kill()
            writing.join()  # before its folder goes


def _answers(server: subprocess.Popen, arguments: Namespace, mark: str) -> bool:
    """Wait until the server answers; False if it ended before that, as where another one has its port."""
    while server.poll() is None:
        link = http.client.HTTPConnection("127.0.0.1", arguments.port, timeout=1)
        with suppress(OSError, http.client.HTTPException):
            link.request("GET", arguments.base_url)
            if link.getresponse().getheader(_MARK) == mark:
                return True
        link.close()
        time.sleep(0.1)
    return False


def server_settings(arguments: Namespace, token: str, mark: str) -> dict[str, dict]:
    """Return Voilà's settings: loopback, a token, a kernel per viewer, idle kernels stopped, sources and traces hidden.

    Voilà passes on no message that would run code. A page that is closed tells Voilà to end its kernel, without the
    form key that other requests carry, so no key is required: requests of other origins are refused all the same.
    Every answer carries the mark, by which the command knows its own server.
    """
    return {
        "Voila": {
            "ip": "127.0.0.1",
            "port": arguments.port,
            "port_retries": 0,
            "base_url": arguments.base_url,
            "token": token,
            "tornado_settings": {"disable_check_xsrf": True, "headers": {_MARK: mark}},
        },
        "VoilaConfiguration": {
            "theme": arguments.theme,
            "template": "grpo_edu",
            "extension_allowlist": ["@jupyter-widgets/jupyterlab-manager", "@voila-dashboards/widgets-manager8"],
            "file_allowlist": [r"notebooks/[\w]+\.html"],
            "strip_sources": True,
            "show_tracebacks": False,
            "multi_kernel_manager_class": "grpo_edu.dashboards.viewers.LimitedKernels",
        },
        "LimitedKernels": {"most_kernels": arguments.max_viewers},
        "MappingKernelManager": {
            "cull_idle_timeout": arguments.idle,
            "cull_interval": max(1, min(60, arguments.idle // 2)),
            "cull_connected": True,
        },
    }


def write_pages(notebooks: Path, folder: Path, ended: threading.Event) -> None:
    """Write each notebook with its stored outputs as a page that needs no kernel and no network, until `ended` is set.

    Formulas stay in TeX, because what typesets them would come from the network.
    """
    import nbformat
    from nbconvert import HTMLExporter
    from traitlets.config import Config

    kinds = ["text/html", "image/svg+xml", "image/png", "text/plain"]  # no widgets, which would need a kernel
    config = Config({"NbConvertBase": {"display_data_priority": kinds}})
    exporter = HTMLExporter(config=config, template_name="basic", embed_images=True, exclude_input_prompt=True)
    for file in sorted(notebooks.glob("*.ipynb")):
        if ended.is_set():
            return
        notebook = nbformat.read(file, as_version=4)
        notebook.metadata.pop("widgets", None)
        body, _ = exporter.from_notebook_node(notebook, {"metadata": {"path": str(notebooks)}})
        body = re.sub(r'href="(\w+)\.ipynb', r'href="\1.html', body)
        body = re.sub(r'<a href="(?!https?:|#|\w+\.html)[^"]*"', "<a", body)  # files that the server does not offer
        page = folder / f"{file.stem}.html"
        page.with_suffix(".part").write_text(
            _PAGE.format(style=read_web("page.css"), title=file.stem, body=body), encoding="utf-8"
        )
        page.with_suffix(".part").replace(page)


def _check(arguments: Namespace) -> None:
    """Refuse bad options and a missing Voilà before anything starts."""
    if find_spec("voila") is None:
        raise ValueError('app: Voilà is not installed; run: pip install "grpo-edu[web]"')
    for name, lowest in (("port", 1), ("max_runs", 1), ("max_viewers", 1), ("idle", 2)):
        if getattr(arguments, name) < lowest:
            option = name.replace("_", "-")
            raise ValueError(f"{option}: {getattr(arguments, name)} is too small; give at least {lowest}")
    if arguments.port > 65535:
        raise ValueError(f"port: {arguments.port} is not a valid port; give one up to 65535")
    try:
        socket.create_server(("127.0.0.1", arguments.port)).close()
    except OSError as error:
        reason = f"port: {arguments.port} cannot be used ({error.strerror}); stop its program, or give another --port"
        raise ValueError(reason) from error
    if Path(arguments.runs).is_file():
        raise ValueError(f"runs: {arguments.runs} is a file; name a folder")
    if not re.fullmatch(r"/([\w.-]+/)*", arguments.base_url):
        raise ValueError(f"base-url: {arguments.base_url!r} must begin and end with a slash, such as /grpo/")


def _token(file: str | None) -> str:
    """Return the secret of the address: from a file, because other users can read a command line, or fresh."""
    if file is None:
        return secrets.token_urlsafe(24)
    token = read_utf8(Path(file)).strip()
    if not re.fullmatch(r"[\w.~-]+", token, re.ASCII):
        raise ValueError(f"token-file: {file} must contain a single word of letters, digits and - . _ ~")
    return token
