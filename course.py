#!/usr/bin/env python3
"""Sets up and starts the course; it needs nothing but Python.

    python3 course.py lab      set up if necessary, then open JupyterLab at the first notebook
    python3 course.py setup    set up only: .venv, the tested packages, this package
    python3 course.py test     set up if necessary, then run the tests
    python3 course.py book     build the course as a website in build/book (its tools go into .venv-book)
    python3 course.py wheelhouse FOLDER
                               download all packages into a folder, for similar computers without a network
    python3 course.py classroom DIR
                               JupyterHub with nbgrader for a class (docs/classroom.md; --demo tries it alone)

On Windows, type `py course.py lab`. You can run each command as often as you like; finished steps are not repeated.
Without a network, set PIP_NO_INDEX=1 and PIP_FIND_LINKS=FOLDER, where FOLDER is the one that `wheelhouse` filled.
"""

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV, BOOK_VENV = ROOT / ".venv", ROOT / ".venv-book"  # Jupyter Book needs older packages than JupyterLab does
REQUIREMENTS, LOCK = ROOT / "requirements.txt", ROOT / "requirements.lock"
GYM_LOCK = ROOT / "requirements-gym.lock"  # reasoning-gym with what has to be compiled for it
FIRST_NOTEBOOK = "notebooks/00_start_here.ipynb"
CORE_PATH = ("00", "01", "02", "03", "04", "05", "06", "07", "08")  # the notebooks of the test command
OLDEST, NEWEST = (3, 11), (3, 13)
INSTALLED_GB = 3.0

# As in grpo_edu/fast/cores.py: OpenMP's threads wait briefly, so that a busy computer does not stall torch. It is set
# here as well, because a notebook may import torch before grpo_edu.
WAITING, SPIN_COUNT = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY"), "20000"

CPU_SECONDS = "-ptests.cpu_seconds"  # the tests print what they cost
TEST_RECORD = ROOT / "build" / "tests.json"  # which tests `course.py test` has run, and why it skipped others
# How much is tested: also the long tests, which pyproject.toml leaves out; without those that an earlier run has run.
LONG_TOO = ["-m", "long or not long"]
PYTEST_OPTIONS = {
    "default": [],
    "fast": ["-m", "not slow and not browser and not long"],
    "all": LONG_TOO,
    "rest": [*LONG_TOO, f"--besides={TEST_RECORD}"],
}
NOTEBOOK_OPTIONS = {"default": ["--core"], "all": [], "rest": ["--others"]}

# What an installation's error lines may contain, and what the reader can do about it; the first that is found counts.
ADVICE = {
    "No space left|not enough space|quota exceeded": "The disk is full. Free some space for .venv and the downloads "
    "(UV_CACHE_DIR can name another folder for them), then run this again; it continues where it stopped.",
    "Permission denied|Read-only file system|Access is denied": "A folder is read-only. Move the course to a folder "
    "that you can write to, or set UV_CACHE_DIR to such a folder for the downloads.",
    "hash mismatch|match the hashes": "A file differs from the one that the course was tested with: its "
    "hash is not in requirements.lock. Ask whoever maintains the mirror or the wheelhouse.",
    "error sending|Failed to (fetch|download)|timed out|connection|SSLError|ProxyError": "No connection to the package "
    "index. Check the network and run this again (behind a proxy, set HTTPS_PROXY). Or download the packages on a "
    "similar computer (`python3 course.py wheelhouse FOLDER`), bring the folder, and set PIP_NO_INDEX=1 "
    "PIP_FIND_LINKS=FOLDER here.",
    "no (usable )?wheels|no version|not found in|no matching distribution": "A package is missing from the index or "
    "the folder that was searched, or it has no build for this computer and this Python (PIP_NO_INDEX: {index}, "
    "PIP_FIND_LINKS: {links}).",
    "": "Run this again to continue with what is already installed.",
}
# What the set-up adds to .venv, as a file and its content.
LAB_SETTINGS = {  # no question about news, and documents open as a page and not as their source
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False},
    # without the dates there is more room for the names of the notebooks
    "@jupyterlab/filebrowser-extension:browser": {"showLastModifiedColumn": False},
    "@jupyterlab/docmanager-extension:plugin": {"defaultViewers": {"markdown": "Markdown Preview"}},
}
LAB_FILES = {
    "share/jupyter/lab/settings/overrides.json": json.dumps(LAB_SETTINGS),
    # nbgrader is installed for the tests; its menus are for instructors (docs/grading.md).
    "etc/jupyter/labconfig/page_config.json": json.dumps({"disabledExtensions": {"@jupyter/nbgrader": True}}),
    # JupyterLab's list of files is too narrow for the longest name of a notebook. A user's own custom.css counts first.
    "etc/jupyter/custom/custom.css": "body { --jp-sidebar-min-width: 290px; }\n",
    "etc/jupyter/jupyter_lab_config.py": (
        "from jupyter_core.paths import jupyter_config_dir, jupyter_config_path\n"
        "places = [f'{folder}/custom' for folder in (jupyter_config_dir(), *jupyter_config_path())]\n"
        "c.LabApp.custom_css, c.ServerApp.tornado_settings = True, {'static_custom_path': places}\n"
    ),
    # JupyterLab puts the version of Python that a kernel names into each notebook, and then asks whether to save it.
    "etc/ipython/ipython_kernel_config.py": (
        "c.IPKernelApp.exec_lines = [\"get_ipython().kernel.language_info.pop('version', None)\"]\n"
    ),
}


class Stop(Exception):
    """An error that the reader can fix; the message says how."""


def say(text):
    print(f"course: {text}", flush=True)


def check_python(version=sys.version_info, which=shutil.which):
    """Stop if the course's packages do not support this Python, and name one that they support."""
    if OLDEST <= tuple(version[:2]) <= NEWEST:
        return
    found = [name for name in ("python3.13", "python3.12", "python3.11") if which(name)]
    hint = f"run `{found[0]} course.py lab`" if found else "install 3.12 and run course.py with it"
    raise Stop(f"this is Python {version[0]}.{version[1]}, and the course needs 3.11, 3.12 or 3.13: {hint}")


def venv_python(venv, os_name=os.name):
    """The path of a virtual environment's Python, on this system."""
    return venv / "Scripts" / "python.exe" if os_name == "nt" else venv / "bin" / "python"


PYTHON = venv_python(VENV)


def environment(**extra):
    """Return the environment variables for programs in .venv: its programs come first; no other Python's modules.

    Python keeps what it compiled, also where a container says not to: otherwise every process compiles torch and
    transformers again, which takes longer than to load them.
    """
    left_out = ("PYTHONHOME", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    env = {key: value for key, value in os.environ.items() if key not in left_out}
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
                if re.match(" *(Downloading|Building|Prepared|Installed) ", line):
                    say(line.strip())
            return child.wait()
        except KeyboardInterrupt:  # Ctrl-C reached the child too: let it end in its own way
            try:
                child.wait(timeout=10)
            except subprocess.TimeoutExpired:
                child.terminate()
            raise


def become(command):
    """Run a command in place of this process, so that signals reach it; Windows cannot do so, and waits for it."""
    if os.name == "nt":
        return run(command)
    os.execve(command[0], command, environment())


def attempt(*command, **extra):
    """Run a step of the installation; if it fails, stop with its output and with advice."""
    errors = []
    if run(command, errors, **extra):
        advice = next(text for cause, text in ADVICE.items() if re.search(cause, "".join(errors), re.IGNORECASE))
        index, links = (os.environ.get(name, "not set") for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS"))
        said = "".join(line for line in errors if not line.lower().startswith("warning"))
        raise Stop(f"the installation failed:\n{said}course: {advice.format(index=index, links=links)}")


def install(venv, *arguments):
    """Install packages with uv. We pass pip's configuration to it, because uv does not read it."""
    python, pip = venv_python(venv), {}
    listing = subprocess.check_output([str(python), "-m", "pip", "config", "list"], universal_newlines=True)
    for section in ("global", "install", ":env:"):  # the later ones override the earlier ones, as for pip
        pip.update(re.findall(rf"^{section}\.(\S+?)='(.*)'", listing, re.MULTILINE))
    names = {"cert": "SSL_CERT_FILE", "client-cert": "SSL_CLIENT_CERT", "proxy": "HTTPS_PROXY"}
    extra = {names[key]: value for key, value in pip.items() if key in names}
    options = ["--no-index"] if pip.get("no-index", "0").lower() in ("1", "true", "yes", "on") else []
    for key in ("index-url", "extra-index-url", "find-links"):
        options += [f"--{key}={value}" for value in pip.get(key, "").replace("\\n", " ").split()]
    options += [f"--allow-insecure-host={host}" for host in pip.get("trusted-host", "").replace("\\n", " ").split()]
    # As for pip, all indexes count (a wrong file is found out by its hash), and so do the system's certificates.
    uv = (python, "-m", "uv", "pip", "install", "--index-strategy=unsafe-best-match", "--system-certs")
    attempt(*uv, f"--python={python}", *options, *arguments, **extra)


def get_torch(get):
    """Install PyTorch's CPU build separately, because the default build for Linux brings gigabytes of CUDA packages.

    What is configured and cached comes first, and then PyTorch's own index, whose address is in requirements.txt.
    """
    if sys.platform != "linux":
        return
    text = REQUIREMENTS.read_text()
    torch = re.search(r"^torch==\S+", text, re.MULTILINE).group() + "+cpu"
    try:
        get(torch)
    except Stop as stop:
        if "A package is missing" not in str(stop):
            raise
        get("--extra-index-url", re.search(r"--index-url (\S+)", text).group(1), torch)


def fingerprint(venv, *files):
    """A hash of everything that the environment depends on: this file, the pinned versions, its Python and its path."""
    texts = [file.read_bytes() for file in (Path(__file__), venv / "pyvenv.cfg", *files)]
    return hashlib.sha256(b"\0".join([os.fsencode(str(ROOT)), *texts])).hexdigest()


def is_complete(venv, *files):
    """Return whether the environment is complete and up to date; after an interrupted setup it is not."""
    stamp = venv / "course-stamp"  # written last
    return stamp.exists() and venv_python(venv).exists() and stamp.read_text() == fingerprint(venv, *files)


def make_venv(venv):
    """Create a virtual environment that contains uv, unless a working one with a supported Python exists."""
    check = f"import pip, sys; sys.exit(not {OLDEST} <= sys.version_info[:2] <= {NEWEST})"
    python = venv_python(venv)
    if not python.exists() or subprocess.call([str(python), "-c", check], stderr=subprocess.DEVNULL):
        free = shutil.disk_usage(str(ROOT)).free / 1e9
        if free < INSTALLED_GB:
            raise Stop(
                f"{ROOT} has {free:.1f} GB of disk space free, and {INSTALLED_GB} GB is needed. Free some space first."
            )
        if not (importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip")):
            raise Stop("this Python cannot create virtual environments; on Debian: sudo apt install python3-venv")
        if Path(sys.prefix).resolve() == venv:
            raise Stop(f"the active {venv.name} has to be created again: run `deactivate`, then repeat this command.")
        say(f"creating the virtual environment {venv.name}")
        attempt(sys.executable, "-m", "venv", "--clear", venv)
    (venv / "uv.txt").write_text(re.search(r"^uv==(.*\\\n)*.*", LOCK.read_text(), re.MULTILINE).group())
    attempt(python, "-m", "pip", "install", "--quiet", "--no-deps", "--requirement", venv / "uv.txt")


def wheelhouse(folder):
    """Download every package of the lock file as a wheel, for computers of this kind with this Python."""
    make_venv(VENV)
    target, start = Path(folder).resolve(), time.monotonic()
    pip = (PYTHON, "-m", "pip", "download", "--no-deps", "--dest", target)
    say(f"downloading the tested packages into {target} (about 1 GB)")
    get_torch(lambda *arguments: attempt(*pip, *arguments))
    attempt(*pip, "--find-links", target, "--requirement", LOCK)
    attempt(*pip, "--no-build-isolation", "--requirement", GYM_LOCK)
    files = list(target.iterdir())
    size = sum(file.stat().st_size for file in files) / 1e9
    say(f"{len(files)} packages, {size:.1f} GB, in {time.monotonic() - start:.0f} s")
    say(
        "copy this folder and the course to the other computer and run: "
        "PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER python3 course.py lab"
    )


def setup():
    """Install everything into .venv; if it is complete already, do nothing."""
    files, start = (LOCK, ROOT / "pyproject.toml"), time.monotonic()
    if is_complete(VENV, *files):
        return say("the environment in .venv is up to date")
    make_venv(VENV)
    say("installing the tested packages into .venv (about 2 GB, one to three minutes, only this time)")
    get_torch(lambda *arguments: install(VENV, "--no-deps", "--constraint", LOCK, *arguments))
    install(VENV, "--no-deps", "--require-hashes", "--only-binary=:all:", "--requirement", LOCK)
    try:
        install(VENV, "--no-deps", "--require-hashes", "--requirement", GYM_LOCK)
    except Stop as stop:
        say(f"{stop}\ncourse: reasoning-gym was skipped (no C compiler?); only `--data reasoning-gym:TASK` needs it")
    say("installing grpo_edu itself, in editable mode")
    install(VENV, "--no-deps", "--no-build-isolation", "--editable", ROOT)
    for place, text in LAB_FILES.items():
        (VENV / place).parent.mkdir(parents=True, exist_ok=True)
        (VENV / place).write_text(text)
    (VENV / "course-stamp").write_text(fingerprint(VENV, *files))
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
    say("opening JupyterLab; press Ctrl-C in this window to stop it")
    return become(command)


def test(arguments, extent="default"):
    """Run every part of the tests, even after one has failed; the exit code is 0 only if all of them passed.

    extent: a key of `PYTEST_OPTIONS`. "rest" is what the default leaves out, and what it skipped.
    """
    os.chdir(str(ROOT))
    if extent != "rest":
        TEST_RECORD.unlink(missing_ok=True)
    elif not TEST_RECORD.exists():
        raise Stop("--rest runs what `python3 course.py test` has left out; run that first")
    # Two workers, each with whole files; with pytest arguments one process, as somebody who looks for a fault wants it.
    workers = [] if arguments or (os.cpu_count() or 1) < 2 else ["-n2", "--dist=loadfile", "--no-loadscope-reorder"]
    # With two workers all but the fast tests wait for pages and processes in a quarter of their time: a third helps.
    test_workers = ["-n3", *workers[1:]] if workers and extent != "fast" else workers
    parts = {
        "ruff": ["-m", "ruff", "check", "."],
        "format": ["-m", "ruff", "format", "--check", "."],
        "types": ["-m", "mypy"],
    }
    if extent == "rest":  # these leave nothing out
        parts = {}
    parts["tests"] = ["-m", "pytest", CPU_SECONDS, *test_workers, *PYTEST_OPTIONS[extent], *arguments]
    if extent == "fast" or arguments or not list(Path("notebooks").glob("*.ipynb")):
        say("skipping the notebooks: there are none, or --fast or pytest arguments were given")
    else:
        parts["notebooks"] = ["tests/run_notebooks.py", CPU_SECONDS, *workers, *NOTEBOOK_OPTIONS[extent]]
        if extent in ("all", "rest"):
            whole = ["--all"] if extent == "all" else []
            parts["older processors"] = ["tests/older_processors.py", *workers, *whole]
        if extent == "all":
            parts["mutation"] = ["-m", "benchmarks.mutation", "--sample", "60", "--output", "build/mutation.json"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    outcomes = {}
    for name, command in parts.items():
        say(f"{name}: python {' '.join(command)}")
        start, used = time.monotonic(), sum(os.times()[:4])
        record = {"GRPO_EDU_TEST_RECORD": str(TEST_RECORD)} if name == "tests" else {}
        code = run([PYTHON, *command], **offline, **record)
        nothing_left = name == "tests" and extent == "rest" and code == 5  # no test is left, says pytest
        outcomes[name] = f"FAILED with exit code {code}" if code and not nothing_left else "ok"
        used = sum(os.times()[:4]) - used
        say(f"{name}: {outcomes[name]} after {time.monotonic() - start:.0f} s ({used:.0f} CPU seconds)")
    say(", ".join(f"{name}: {outcome}" for name, outcome in outcomes.items()))
    say_what_was_skipped()
    return int(any(outcome != "ok" for outcome in outcomes.values()))


def say_what_was_skipped():
    """Repeat what the tests said about skipped ones, because other parts have printed much since then."""
    lines = json.loads(TEST_RECORD.read_text(encoding="utf-8"))["skipped"] if TEST_RECORD.exists() else []
    if lines:
        say("skipped tests, and what they need; when that is there, `python3 course.py test --rest` runs them:")
        print("\n".join(lines))


def book(arguments):
    """Build the web book. The first call also installs the tools that build it."""
    pins = ROOT / "book" / "requirements.txt"
    if not is_complete(BOOK_VENV, pins):
        make_venv(BOOK_VENV)
        say("installing Jupyter Book into .venv-book (about 300 MB, only this time)")
        install(BOOK_VENV, "--requirement", pins)
        (BOOK_VENV / "course-stamp").write_text(fingerprint(BOOK_VENV, pins))
    return run([venv_python(BOOK_VENV), ROOT / "book" / "build.py", *arguments])


def parse(arguments):
    """Parse the command line; returns the command with its options, and the arguments that are meant for pytest."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    names = "{lab,setup,test,book,wheelhouse,classroom}"
    commands = parser.add_subparsers(dest="command", metavar=names, required=True)
    command = commands.add_parser("lab", help="open JupyterLab at the first notebook")
    command.add_argument("--no-browser", action="store_true", help="print the address without opening a browser")
    command.add_argument("--port", type=int, help="port of the server (default: 8888 or the next free one)")
    commands.add_parser("setup", help="install everything into .venv")
    command = commands.add_parser(
        "wheelhouse", help="download all packages into a folder, for computers without a network"
    )
    command.add_argument("folder", metavar="FOLDER")
    usage = "course.py test [--fast | --all | --rest] [...]"
    command = commands.add_parser("test", help="run the tests and the notebooks of the core path", usage=usage)
    extents = command.add_mutually_exclusive_group()
    for extent, text in {
        "fast": "leave out slow tests, browser tests and notebooks",
        "all": "also run the long tests and all notebooks, for example once a night",
        "rest": "run what the tests skipped, what they leave out, and the other notebooks",
    }.items():
        extents.add_argument(f"--{extent}", dest="extent", action="store_const", const=extent, help=text)
    command.set_defaults(extent="default")
    commands.add_parser("book", help="build the website", usage="course.py book [--output DIR] [--repository URL]")
    commands.add_parser("classroom", help="JupyterHub with nbgrader for a class", add_help=False)
    options, rest = parser.parse_known_args(arguments or ["--help"])
    if options.command == "lab" and options.port is not None and not 0 < options.port < 65536:
        parser.error(f"--port must be from 1 to 65535, got {options.port}")
    if rest and options.command not in ("test", "book", "classroom"):
        parser.error(f"unknown arguments: {' '.join(rest)}")
    return options, rest


def main(arguments):
    try:
        check_python()
        options, rest = parse(arguments)
        if options.command == "wheelhouse":
            wheelhouse(options.folder)
            return 0
        if options.command == "book":
            return book(rest)
        if options.command == "classroom" and {"-h", "--help"} & set(rest):  # which needs no packages
            return run([sys.executable, ROOT / "classroom" / "hub" / "set_up.py", *rest])
        setup()
        if options.command == "lab":
            return lab(not options.no_browser, options.port)
        if options.command == "classroom":
            return become([str(PYTHON), str(ROOT / "classroom" / "hub" / "set_up.py"), *rest])
        return test(rest, options.extent) if options.command == "test" else 0
    except (Stop, OSError) as problem:  # OSError: a read-only folder, say
        print(f"course: {problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ncourse: stopped; run the same command again to continue", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
