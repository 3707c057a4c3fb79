"""Run notebooks under strict nbval, each with its claims: ``python tests/run_notebooks.py [NOTEBOOK ...]``.

What a notebook prints is compared with what it has stored; what must hold for it on every computer stands in
``tests/claims/NOTEBOOK.py``, plain asserts on the notebook's own variables. Every notebook runs once, as a temporary
copy with its claims in a last cell. What begins with a minus goes to pytest: with ``-n2 --dist=loadfile`` two notebooks
run side by side, in one thread each.

Without names all notebooks run; ``--core`` runs those of the core path, ``--others`` the others. Each runs as it
is: no test changes a cell or a size.

``python tests/run_notebooks.py --store [NOTEBOOK ...]`` runs notebooks and stores their outputs in the form that
`normalize` gives them; ``--normalize`` gives what is stored this form without running anything.
"""

import html
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from course import CORE_PATH

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
CLAIMS = ROOT / "tests" / "claims"
NBVAL = ["-p", "nbval", "--nbval", "--nbval-current-env", "--nbval-sanitize-with", "tests/nbval_sanitize.cfg"]
# What the kernel of `course.py lab` says about its language: everything but the version.
LANGUAGE = {
    "codemirror_mode": {"name": "ipython", "version": 3},
    "file_extension": ".py",
    "mimetype": "text/x-python",
    "name": "python",
    "nbconvert_exporter": "python",
    "pygments_lexer": "ipython3",
}
WIDGET_STATE = "application/vnd.jupyter.widget-state+json"
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
PICTURE = re.compile(r'<img alt="(?P<alt>[^"]*)"[^>]*src="data:image/png;base64,(?P<png>[\w+/=]+)"')


def add_claims(notebook, claims):
    """Append the claims to the notebook's file, as a cell whose output nbval does not compare."""
    content = json.loads(notebook.read_text(encoding="utf-8"))
    cell = {
        "cell_type": "code",
        "execution_count": None,
        "id": "claims",
        "metadata": {"tags": ["nbval-ignore-output"]},
        "outputs": [],
        "source": claims.read_text(encoding="utf-8"),
    }
    content["cells"].append(cell)
    notebook.write_text(json.dumps(content), encoding="utf-8")


def store(name, run):
    """Run a notebook if asked to, and write its file in the stored form."""
    import nbformat
    from nbclient import NotebookClient

    path = NOTEBOOKS / f"{name}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    if run:
        place = {"metadata": {"path": str(NOTEBOOKS)}}
        NotebookClient(notebook, timeout=None, resources=place, coalesce_streams=True, record_timing=False).execute()
    normalize(notebook)
    nbformat.write(notebook, path)
    print(f"stored {name}: {path.stat().st_size:,} bytes", flush=True)


def normalize(notebook):
    """Make a notebook such that opening changes nothing, and every viewer shows its pictures and bars.

    - JupyterLab writes what its kernel says about the language, and asks to save where that is something new. The
      version of Python, which differs between computers, is left out by the kernels that `course.py` sets up.
    - Whole numbers are written as JupyterLab writes them, without ".0".
    - Next to the HTML of a picture stands the picture itself, for viewers and exports that show no HTML.
    - The text of a progress bar is that of its end, for viewers without widgets.
    """
    notebook.metadata.language_info = LANGUAGE
    widgets = notebook.metadata.get("widgets", {}).get(WIDGET_STATE, {})
    if widgets:
        widgets["state"] = whole_numbers(widgets["state"])
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            picture = PICTURE.search(data.get("text/html", ""))
            if picture:
                data["image/png"] = picture["png"]
                output.metadata["image/png"] = {"alt": html.unescape(picture["alt"])}
            text = bar_text(widgets.get("state", {}), data.get(WIDGET_VIEW, {}).get("model_id"))
            if text and "text/html" not in data:
                data["text/plain"] = text


def whole_numbers(value):
    """A value of JSON with 3 in place of 3.0."""
    if isinstance(value, dict):
        return {key: whole_numbers(part) for key, part in value.items()}
    if isinstance(value, list):
        return [whole_numbers(part) for part in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def bar_text(state, model):
    """The text of a progress bar at its end, such as "100% 20/20 [00:12<00:00, reward=0.83]"; "" for other widgets."""
    children = state.get(model, {}).get("state", {}).get("children", [])
    parts = [state[child.removeprefix("IPY_MODEL_")]["state"] for child in children]
    if not any("bar_style" in part for part in parts):
        return ""
    texts = [html.unescape(part["value"]) for part in parts if isinstance(part.get("value"), str)]
    return " ".join(" ".join(texts).split())


def main(arguments):
    """Copy the folder of notebooks next to itself, so that relative paths hold, and run the copies."""
    environment = dict(os.environ)
    options = [argument for argument in arguments if argument.startswith("-")]
    names = [Path(argument).stem for argument in arguments if not argument.startswith("-")]
    if not names:
        names = [path.stem for path in NOTEBOOKS.glob("*.ipynb")]
        for option, wanted in (("--core", True), ("--others", False)):
            if option in options:
                names = [name for name in names if name.startswith(CORE_PATH) == wanted]
    options = [option for option in options if option not in ("--all", "--core", "--others")]
    names.sort(key=lambda name: (not name.startswith("14"), name))  # the longest is not left for the end
    if {"--store", "--normalize"} & {*options}:
        for name in names:
            store(name, run="--store" in options)
        return 0
    if any(option.startswith("-n") for option in options):
        environment["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="notebooks-", dir=ROOT) as folder:
        copies = Path(folder)
        shutil.copytree(NOTEBOOKS, copies, dirs_exist_ok=True, ignore=shutil.ignore_patterns("runs"))
        for claims in CLAIMS.glob("*.py"):
            add_claims(copies / f"{claims.stem}.ipynb", claims)
        paths = [str(copies / f"{name}.ipynb") for name in names]
        return subprocess.call([sys.executable, "-m", "pytest", *NBVAL, *options, *paths], cwd=ROOT, env=environment)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the copies go when a run is cancelled
    sys.exit(main(sys.argv[1:]))
