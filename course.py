#!/usr/bin/env python3
"""The course's starter: it needs nothing but Python, and makes the rest.

    python3 course.py lab      set up if need be, then open JupyterLab at the first notebook
    python3 course.py setup    set up only: .venv, the tested packages, this package
    python3 course.py test     set up if need be, then run everything that CI runs
    python3 course.py book     build the course as a website in build/book (its tools go into .venv-book)
    python3 course.py wheelhouse FOLDER
                               fetch all packages into a folder, for machines like this one without a network
    python3 course.py classroom DIR
                               JupyterHub with nbgrader for a class (docs/classroom.md; --demo tries it alone)

On Windows say `py course.py lab`. Run any of them again whenever you like: what is done is not done twice.
Offline, point pip at the wheelhouse with PIP_NO_INDEX=1 and PIP_FIND_LINKS=FOLDER.
"""

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
STAMP = VENV / "course-stamp"  # written last: the set-up is complete, and from what it was made
REQUIREMENTS = ROOT / "requirements.txt"
FIRST_NOTEBOOK = "notebooks/00_start_here.ipynb"
OLDEST, NEWEST = (3, 11), (3, 13)
INSTALLED_GB, DOWNLOAD_GB = 3.0, 1.0  # pip keeps its downloads in the temporary folder at first

# As in grpo_edu/fast/cores.py: OpenMP's threads wait briefly, so that a busy computer does not stall torch. It is set
# here as well, because a notebook may import torch before grpo_edu.
WAITING, SPIN_COUNT = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY"), "20000"

FULL_DISK = "No space left on device|not enough space on the disk|Disk quota exceeded"
NO_NETWORK = "from versions: none|connection|timed out|SSLError|ProxyError|IncompleteRead"
# What the set-up adds to .venv, as a file and its content.
LAB_SETTINGS = {  # no question about news, and documents open as a page and not as their source
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False},
    "@jupyterlab/docmanager-extension:plugin": {"defaultViewers": {"markdown": "Markdown Preview"}},
}
LAB_FILES = {
    "share/jupyter/lab/settings/overrides.json": json.dumps(LAB_SETTINGS),
    # nbgrader is installed for the tests; its menus are for instructors (docs/grading.md).
    "etc/jupyter/labconfig/page_config.json": json.dumps({"disabledExtensions": {"@jupyter/nbgrader": True}}),
    # JupyterLab puts the version of Python that a kernel names into each notebook, and then asks whether to save it.
    "etc/ipython/ipython_kernel_config.py": (
        "c.IPKernelApp.exec_lines = [\"get_ipython().kernel.language_info.pop('version', None)\"]\n"
    ),
}


class Stop(Exception):
    """Something the reader can mend; its text says how."""


def say(text):
    print(f"course: {text}", flush=True)


def check_python(version=sys.version_info, which=shutil.which):
    """Stop with a clear word under a Python that the course's packages do not support."""
    if OLDEST <= tuple(version[:2]) <= NEWEST:
        return
    found = [name for name in ("python3.13", "python3.12", "python3.11") if which(name)]
    hint = f"run `{found[0]} course.py lab`" if found else "install 3.12 and run course.py with that"
    raise Stop(f"this is Python {version[0]}.{version[1]}, and the course needs 3.11, 3.12 or 3.13: {hint}")


def venv_program(name, os_name=os.name, venv=VENV):
    """The path of a program inside a virtual environment, on this system."""
    return venv / "Scripts" / f"{name}.exe" if os_name == "nt" else venv / "bin" / name


PYTHON = venv_program("python")
BOOK_VENV = ROOT / ".venv-book"  # Jupyter Book wants older packages than JupyterLab does
BOOK_PYTHON = venv_program("python", venv=BOOK_VENV)


def torch_index():
    """Where PyTorch's CPU builds for Linux are, as requirements.txt says."""
    return re.search(r"--index-url (\S+)", REQUIREMENTS.read_text()).group(1)


def environment(**extra):
    """The environment of what runs in .venv: its programs first, no other Python's modules."""
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONHOME", "PYTHONPATH")}
    path = str(PYTHON.parent) + os.pathsep + env.get("PATH", os.defpath)
    env.update(VIRTUAL_ENV=str(VENV), PATH=path, PIP_USER="0", PIP_DISABLE_PIP_VERSION_CHECK="1", **extra)
    if not any(name in env for name in WAITING):
        env["GOMP_SPINCOUNT"] = SPIN_COUNT
    return env


def run(command, errors=None, **extra):
    """Run a command to its end and return its exit code; its error lines go to the list `errors` if given."""
    options = {} if errors is None else {"stderr": subprocess.PIPE, "universal_newlines": True}
    with subprocess.Popen([str(part) for part in command], env=environment(**extra), **options) as child:
        try:
            for line in child.stderr or ():
                errors.append(line)
                if "Retrying" in line:
                    say("no answer from the package index yet; pip tries again, so just wait")
            return child.wait()
        except KeyboardInterrupt:  # Ctrl-C reached the child too: let it end in its own way
            try:
                child.wait(timeout=10)
            except subprocess.TimeoutExpired:
                child.terminate()
            raise


def fingerprint():
    """What a complete .venv was made from: the pins, its Python, where the folder is, and what was added."""
    files = (REQUIREMENTS, ROOT / "pyproject.toml", VENV / "pyvenv.cfg")
    texts = (str(ROOT), os.path.realpath(str(PYTHON)), json.dumps(LAB_FILES))
    parts = [file.read_bytes() for file in files] + [os.fsencode(text) for text in texts]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def is_set_up():
    """Whether .venv is complete and up to date; not so when there is none or its making was interrupted."""
    return STAMP.exists() and PYTHON.exists() and STAMP.read_text() == fingerprint()


def check_disk():
    """Stop before anything is written when the disk cannot hold it."""
    held = sum(path.lstat().st_size for path in VENV.rglob("*")) / 1e9
    needs = {tempfile.gettempdir(): DOWNLOAD_GB, str(ROOT): max(INSTALLED_GB - held, 0.5)}
    for folder, need in needs.items():
        free = shutil.disk_usage(folder).free / 1e9
        if free < need:
            raise Stop(
                f"{folder} has {free:.1f} GB of disk space free, and {need:.1f} GB is needed. "
                "Make room (or let TMPDIR name another temporary folder) and run this again."
            )


def make_venv():
    """Make .venv, unless the one that is there works: starts, has pip, and is of a supported version."""
    check = f"import pip, sys; sys.exit(not {OLDEST} <= sys.version_info[:2] <= {NEWEST})"
    if PYTHON.exists() and subprocess.call([str(PYTHON), "-c", check], stderr=subprocess.DEVNULL) == 0:
        return
    if not (importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip")):
        raise Stop("this Python cannot make a virtual environment; on Debian: sudo apt install python3-venv")
    if Path(sys.prefix).resolve() == VENV:
        raise Stop("the active .venv has to be made anew: run `deactivate`, then this again.")
    say("making the virtual environment .venv")
    attempt(sys.executable, "-m", "venv", "--clear", VENV)


def explain(errors):
    """A clear word for the way an installation failed, from its error lines."""
    text = "".join(line for line in errors if not line.startswith("WARNING"))
    missing = re.search(r"No matching distribution found for (\S+)", text)
    if re.search(FULL_DISK, text):
        places = f"{ROOT}, or the temporary folder {tempfile.gettempdir()} (TMPDIR can name another)"
        return f"the disk is full: {places}. Make room and run this again: it goes on."
    if missing and os.environ.get("PIP_NO_INDEX"):
        wheelhouse = os.environ.get("PIP_FIND_LINKS", "not set")
        return f"PIP_NO_INDEX is set, and PIP_FIND_LINKS ({wheelhouse}) has no {missing.group(1)}."
    if re.search(NO_NETWORK, text, re.IGNORECASE):
        return (
            "no connection to the package index. Check the network and run this again (behind a proxy: HTTPS_PROXY).\n"
            "Or bring the packages from a like machine (`python3 course.py wheelhouse FOLDER` there), and set\n"
            "PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER here."
        )
    if missing:
        return f"there is no build of {missing.group(1)} for this machine and this Python."
    return f"the installation failed:\n{text}Run this again to go on from what is installed."


def attempt(*command):
    """Run a step of the installation, or stop with a clear word."""
    errors = []
    if run(command, errors):
        raise Stop(explain(errors))


def attempt_torch(*pip):
    """Get PyTorch's build for the CPU by itself; only on Linux is it another than the default one."""
    if sys.platform == "linux":
        torch = re.search(r"^torch==\S+", REQUIREMENTS.read_text(), re.MULTILINE).group()
        attempt(*pip, "--no-deps", "--index-url", torch_index(), torch)


def wheelhouse(folder):
    """Fetch or build every tested package as a wheel, for machines of this kind with this Python."""
    make_venv()
    target, start = Path(folder).resolve(), time.monotonic()
    pip = (PYTHON, "-m", "pip", "wheel", "--wheel-dir", target)
    say(f"fetching the tested packages into {target} (about 1 GB)")
    attempt_torch(*pip)
    attempt(*pip, "--find-links", target, "-r", REQUIREMENTS)
    wheels = list(target.glob("*.whl"))
    size = sum(wheel.stat().st_size for wheel in wheels) / 1e9
    say(f"{len(wheels)} package(s), {size:.1f} GB, in {time.monotonic() - start:.0f} s")
    say("take the folder and the course along; there: PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER python3 course.py lab")
    return 0


def setup():
    """Make .venv complete; where it is complete already, do nothing."""
    if is_set_up():
        return say("the set-up in .venv is up to date")
    start, pip = time.monotonic(), (PYTHON, "-m", "pip", "install")
    check_disk()
    make_venv()
    say("installing the tested packages into .venv (about 2 GB, one to five minutes, this once)")
    attempt_torch(*pip)
    attempt(*pip, "-r", REQUIREMENTS)
    say("installing grpo_edu itself, editable")
    attempt(*pip, "--no-deps", "--no-build-isolation", "-e", ROOT)
    for place, text in LAB_FILES.items():
        (VENV / place).parent.mkdir(parents=True, exist_ok=True)
        (VENV / place).write_text(text)
    STAMP.write_text(fingerprint())
    say(f"set up in {time.monotonic() - start:.0f} s")


def lab(browser=True, port=None):
    """Open JupyterLab at the first notebook, with the whole course in its file browser."""
    command = [str(PYTHON), "-m", "jupyterlab", f"--ServerApp.root_dir={ROOT}"]
    if (ROOT / FIRST_NOTEBOOK).exists():
        command.append(f"--LabApp.default_url=/lab/tree/{FIRST_NOTEBOOK}")
    command += [] if browser else ["--no-browser"]
    command += [f"--port={port}"] if port else []
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-root")  # in a container there is often no other user
    say("opening JupyterLab; Ctrl-C in this window stops it")
    if os.name == "nt":
        return run(command)
    os.execve(command[0], command, environment())  # JupyterLab becomes this process, signals and all


def test(arguments, fast=False):
    """Run every part, also after one has failed; 0 only if all are well."""
    os.chdir(str(ROOT))
    marks = ["-m", "not slow and not browser"] if fast else []
    # Two workers, each with whole files; with pytest arguments one process, as somebody who looks for a fault wants it.
    workers = [] if arguments or (os.cpu_count() or 1) < 2 else ["-n2", "--dist=loadfile", "--no-loadscope-reorder"]
    parts = {
        "ruff": ["-m", "ruff", "check", "."],
        "format": ["-m", "ruff", "format", "--check", "."],
        "types": ["-m", "mypy"],
        "tests": ["-m", "pytest", "--durations=25", *workers, *marks, *arguments],
    }
    if fast or arguments or not list(Path("notebooks").glob("*.ipynb")):
        say("the notebooks are left out: there are none, or --fast or pytest arguments were given")
    else:
        parts["notebooks"] = ["tests/run_notebooks.py", *workers]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    outcomes = {}
    for name, command in parts.items():
        say(f"{name}: python {' '.join(command)}")
        start = time.monotonic()
        code = run([PYTHON, *command], **offline)
        outcomes[name] = f"FAILED with exit code {code}" if code else "ok"
        say(f"{name}: {outcomes[name]} after {time.monotonic() - start:.0f} s")
    say(", ".join(f"{name}: {outcome}" for name, outcome in outcomes.items()))
    return int(any(outcome != "ok" for outcome in outcomes.values()))


def book(arguments):
    """Build the web book; at first, install what builds it."""
    pins, stamp = ROOT / "book" / "requirements.txt", BOOK_VENV / "course-stamp"
    if not (stamp.exists() and stamp.read_text() == pins.read_text()):
        say("installing Jupyter Book into .venv-book (about 300 MB, this once)")
        attempt(sys.executable, "-m", "venv", "--clear", BOOK_VENV)
        attempt(BOOK_PYTHON, "-m", "pip", "install", "--quiet", "-r", pins)
        stamp.write_text(pins.read_text())
    return run([BOOK_PYTHON, ROOT / "book" / "build.py", *arguments])


def parse(arguments):
    """The command with its options, and what is left over for pytest."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    names = "{lab,setup,test,book,wheelhouse,classroom}"
    commands = parser.add_subparsers(dest="command", metavar=names, required=True)
    command = commands.add_parser("lab", help="open JupyterLab at the first notebook")
    command.add_argument("--no-browser", action="store_true", help="print the address and open no browser")
    command.add_argument("--port", type=int, help="serve on this port (otherwise 8888 or the next free one)")
    commands.add_parser("setup", help="make .venv complete")
    command = commands.add_parser("wheelhouse", help="fetch all packages into a folder, for machines without a network")
    command.add_argument("folder", metavar="FOLDER")
    command = commands.add_parser("test", help="run what CI runs", usage="course.py test [--fast] [...]")
    command.add_argument("--fast", action="store_true", help="no slow tests, no browser tests, no notebooks")
    commands.add_parser("book", help="build the website", usage="course.py book [--output DIR] [--repository URL]")
    commands.add_parser("classroom", help="JupyterHub with nbgrader for a class", add_help=False)
    options, rest = parser.parse_known_args(arguments)
    if rest and options.command not in ("test", "book", "classroom"):
        parser.error(f"unknown arguments: {' '.join(rest)}")
    return options, rest


def main(arguments):
    try:
        check_python()
        options, rest = parse(arguments)
        if options.command == "wheelhouse":
            return wheelhouse(options.folder)
        if options.command == "book":
            return book(rest)
        setup()
        if options.command == "lab":
            return lab(not options.no_browser, options.port)
        if options.command == "classroom":
            return run([PYTHON, ROOT / "classroom" / "set_up.py", *rest])
        return test(rest, options.fast) if options.command == "test" else 0
    except (Stop, OSError) as word:  # OSError: a read-only folder, say
        print(f"course: {word}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ncourse: stopped; run the same command again and it goes on from there", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
