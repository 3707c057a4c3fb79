"""What each notebook takes: ``python -m benchmarks.notebooks``.

Every notebook runs from top to bottom in a fresh kernel, one after the other. Measured: seconds from the start of the
kernel to the end of the last cell, and the most memory that the kernel and the processes it started held together.
Ten minutes on two idle cores. Writes ``benchmarks/results/notebooks.json`` and, with ``--page``, the table in
``docs/measured.md``. Exits with 1 if a notebook takes longer than promised.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from pathlib import Path

from benchmarks.harness import RESULTS, exit_code, markdown, save

COMMAND = "python -m benchmarks.notebooks"
ROOT = Path(__file__).resolve().parents[1]
LONGEST = {"07": 240, "10": 240}  # seconds; 120 for the others
TOGETHER = 15 * 60
LOOKS = 0.1  # seconds between two looks at the memory


class PeakOfChildren:
    """The most memory that all processes below this one held together, looked at ten times a second; a context."""

    peak = 0

    def __enter__(self) -> PeakOfChildren:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        import psutil

        this = psutil.Process()
        while not self._stop.wait(LOOKS):
            held = 0
            for child in this.children(recursive=True):
                try:
                    held += child.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
            self.peak = max(self.peak, held)


def measure(notebook: Path) -> dict[str, float]:
    """Run one notebook; return its seconds and bytes."""
    import nbformat
    from nbclient import NotebookClient

    content = nbformat.read(notebook, as_version=4)
    client = NotebookClient(content, timeout=600, resources={"metadata": {"path": str(notebook.parent)}})
    started = time.perf_counter()
    with PeakOfChildren() as memory:
        client.execute()
    return {"seconds": round(time.perf_counter() - started, 1), "peak": memory.peak}


def verdicts(notebooks: dict[str, dict[str, float]]) -> dict[str, bool]:
    """Return whether each promise is kept."""
    slow = [name for name, found in notebooks.items() if found["seconds"] > LONGEST.get(name[:2], 120)]
    total = sum(found["seconds"] for found in notebooks.values())
    return {
        "every notebook takes less than 2 minutes, 07 and 10 less than 4": not slow,
        "all of them together take less than 15 minutes": total < TOGETHER,
    }


def table(notebooks: dict[str, dict[str, float]]) -> str:
    """Return the measured time and memory of each notebook, as a table in Markdown.

    >>> print(table({"00_start_here": {"seconds": 23.4, "peak": 0.64e9}}))
    | notebook | time | memory |
    |---|---|---|
    | [00_start_here](../notebooks/00_start_here.ipynb) | 23 s | 0.6 GB |
    """
    rows = ["| notebook | time | memory |", "|---|---|---|"]
    for name, found in notebooks.items():
        rows.append(
            f"| [{name}](../notebooks/{name}.ipynb) | {found['seconds']:.0f} s | {found['peak'] / 1e9:.1f} GB |"
        )
    return "\n".join(rows)


def fill_page(notebooks: dict[str, dict[str, float]], path: Path = ROOT / "docs" / "measured.md") -> None:
    """Write the table between the two marks of the page."""
    before, mark, rest = path.read_text(encoding="utf-8").partition("<!-- notebooks -->\n")
    _, end, after = rest.partition("<!-- /notebooks -->")
    path.write_text(f"{before}{mark}{table(notebooks)}\n{end}{after}", encoding="utf-8")


def main() -> int:
    """Measure all notebooks, or those whose names begin as given."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--only", nargs="+", default=[""], metavar="NUMBER", help="others keep what is stored")
    parser.add_argument("--page", action="store_true", help="write the table into docs/measured.md")
    parser.add_argument("--output", type=Path, default=RESULTS / "notebooks.json")
    options = parser.parse_args()
    stored = json.loads(options.output.read_text(encoding="utf-8"))["notebooks"] if options.output.exists() else {}
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        if notebook.stem.startswith(tuple(options.only)):
            stored[notebook.stem] = measure(notebook)
            print(notebook.stem, stored[notebook.stem], flush=True)
        kept = dict(sorted(stored.items()))
        save(options.output, COMMAND, {"verdicts": verdicts(kept), "notebooks": kept})
    if options.page:
        fill_page(kept)
    print(
        markdown(
            [
                {"notebook": name, "s": found["seconds"], "GB": round(found["peak"] / 1e9, 2)}
                for name, found in kept.items()
            ]
        )
    )
    return exit_code(verdicts(kept))


if __name__ == "__main__":
    sys.exit(main())
