"""List the benchmarks, or run one of them.

``python -m benchmarks`` lists them, ``python -m benchmarks NAME --help`` shows the options of one, and
``python -m benchmarks NAME`` runs it, as ``python -m benchmarks.NAME`` does.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path


def benchmarks() -> dict[str, str]:
    """Name of each module that has a `main` → the first line of its docstring; nothing is imported for it."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("[a-z]*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in module.body):
            found[path.stem] = (ast.get_docstring(module) or "").split("\n")[0].split(" ``python")[0].rstrip(".:")
    return found


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark that the first argument names; the others are its options."""
    known = benchmarks()
    if not arguments or arguments[0].startswith("-"):
        print(__doc__.strip() + "\n")
        for name, about in known.items():
            print(f"{name:<22} {about}")
        return 0
    name, *options = arguments
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"do you mean {close[0]}?" if close else "`python -m benchmarks` lists them."
        print(f"benchmarks: there is no benchmark {name!r}; {hint}", file=sys.stderr)
        return 2
    sys.argv[1:] = options
    return importlib.import_module(f"benchmarks.{name}").main() or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
