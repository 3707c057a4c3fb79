"""Run notebooks under strict nbval, each with its claims: ``python tests/run_notebooks.py [NOTEBOOK ...]``.

What a notebook prints is compared with what it has stored; what must hold for it on every computer stands in
``tests/claims/NOTEBOOK.py``, plain asserts on the notebook's own variables. Every notebook runs once, as a temporary
copy with its claims in a last cell. What begins with a minus goes to pytest: with ``-n2 --dist=loadfile`` two notebooks
run side by side, in one thread each.

Without names all notebooks run; ``--core`` runs those of the core path and 01, ``--others`` the others. Some of them
then train or measure less (`SMALLER`), because they take up to two minutes otherwise; ``--all``, or their names, run
them as they are. Their outputs are compared in both ways, and the claims behind the line `ONLY_WHOLE` only hold for
the whole, or take long.

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

from course import TESTED_NOTEBOOKS

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
CLAIMS = ROOT / "tests" / "claims"
NBVAL = ["-p", "nbval", "--nbval", "--nbval-current-env", "--nbval-sanitize-with", "tests/nbval_sanitize.cfg"]
# name → what every run of the tests makes smaller: text of a cell, and what takes its place
SMALLER = {
    "01_cpu_setup": {
        "alone = operations_per_second(1.0)": "alone = operations_per_second(0.1)",
        "    alone, shared = map(": "    code = code.replace('(1.5)', '(0.1)').replace('sleep(0.3)', 'sleep(0)')\n"
        "    alone, shared = map(",
    },
    "02_reward_functions": {"max_steps=20, loss_type": "max_steps=12, learning_rate=2e-4, loss_type"},
    "05_grpo_objective": {
        "max_steps=12, beta=0.1, seed=0)": "max_steps=12, beta=0.1, seed=0, prompts_per_step=4, learning_rate=2e-4)"
    },
    "07_grpo_run": {"max_steps=40, prompts_per_step=16": "max_steps=40, prompts_per_step=8"},
    "08_honest_evaluation": {"max_steps=3, seed=seed)": "max_steps=1, prompts_per_step=2, seed=seed)"},
    "09_quantization": {'"heldout", n=100)\nfloat32': '"heldout", n=40)\nfloat32'},
    "11_memory_and_lora": {
        # the claims are on the other four, and the name alone stands in the output
        "    run = measure_steps(config,": "    if 'checkpointing' not in name:\n        run = measure_steps(config,",
        "shape=QWEN,": "shape={**QWEN, 'num_hidden_layers': 1, 'vocab_size': 1000},",
    },
    "12_diagnosis_lab": {
        "broken, lowered = live(model, CASES[9].broken, 4), live(model, CASES[9].mended, 6)\n"
        "reloaded = live(copy.deepcopy(base), CASES[9].mended, 6)": "broken, lowered = "
        "live(model, CASES[9].broken, 3), live(model, CASES[9].mended, 2)\n"
        "reloaded = live(copy.deepcopy(base), CASES[9].mended, 2)"
    },
    "14_real_language_model": {
        "num_generations=4, max_completion_length=24": "num_generations=4, max_completion_length=8",
        "if problem.level in KINDS][:60]": "if problem.level in KINDS][:9]",
        "constraint_reward, config)": "constraint_reward, GRPOConfig(**{**vars(config), 'prompts_per_step': 2, "
        "'num_generations': 2, 'max_completion_length': 8, 'gradient_accumulation_steps': 1}))",
    },
}
ONLY_WHOLE = "# ---- only of the whole notebook ----\n"
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


def add_claims(notebook, claims, smaller=()):
    """Append the claims to the notebook's file, as a cell whose output nbval does not compare.

    smaller: entries of `SMALLER`, which are applied, and without which all claims hold.
    """
    content = json.loads(notebook.read_text(encoding="utf-8"))
    code = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    for text in smaller:
        (cell,) = [cell for cell in code if text in "".join(cell["source"])]
        cell["source"] = "".join(cell["source"]).replace(text, smaller[text])
    claimed = claims.read_text(encoding="utf-8")
    cell = {
        "cell_type": "code",
        "execution_count": None,
        "id": "claims",
        "metadata": {"tags": ["nbval-ignore-output"]},
        "outputs": [],
        "source": claimed.partition(ONLY_WHOLE)[0] if smaller else claimed,
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
    smaller = {} if names or "--all" in options else SMALLER
    if not names:
        names = [path.stem for path in NOTEBOOKS.glob("*.ipynb")]
        for option, wanted in (("--core", True), ("--others", False)):
            if option in options:
                names = [name for name in names if name.startswith(TESTED_NOTEBOOKS) == wanted]
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
            add_claims(copies / f"{claims.stem}.ipynb", claims, smaller.get(claims.stem, ()))
        paths = [str(copies / f"{name}.ipynb") for name in names]
        return subprocess.call([sys.executable, "-m", "pytest", *NBVAL, *options, *paths], cwd=ROOT, env=environment)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the copies go when a run is cancelled
    sys.exit(main(sys.argv[1:]))
