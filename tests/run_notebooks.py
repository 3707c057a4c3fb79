"""Run notebooks under strict nbval, each with its claims: ``python tests/run_notebooks.py [NOTEBOOK ...]``.

What a notebook prints is compared with what it has stored; what must hold for it on every computer stands in
``tests/claims/NOTEBOOK.py``, plain asserts on the notebook's own variables. Every notebook runs once, as a temporary
copy with its claims in a last cell. Without names all notebooks run. What begins with a minus goes to pytest: with
``-n2 --dist=loadfile`` two notebooks run side by side, in one thread each.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
CLAIMS = ROOT / "tests" / "claims"
NBVAL = ["--nbval", "--nbval-current-env", "--nbval-sanitize-with", "tests/nbval_sanitize.cfg"]


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


def main(arguments):
    """Copy the folder of notebooks next to itself, so that relative paths hold, and run the copies."""
    environment = dict(os.environ)
    options = [argument for argument in arguments if argument.startswith("-")]
    names = [Path(argument).stem for argument in arguments if not argument.startswith("-")]
    names = names or sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
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
