"""Are the tests of the mathematics any good? ``python -m benchmarks.mutation --sample 80 --seed 0``.

A mutant is a module with one small fault: a ``<`` becomes ``<=``, a number becomes the next one, an argument is left
out. The tests of the module should fail. Each mutant runs in a fork of this process, which has imported the large
libraries and nothing of the package, so it costs seconds. A mutant that survives is either a gap in the tests or no
fault at all; write the verdict as ``judged`` into ``benchmarks/results/mutation.json``, where a later run keeps it.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

COMMAND = "python -m benchmarks.mutation"
ROOT = Path(__file__).resolve().parents[1]
STORED = ROOT / "benchmarks" / "results" / "mutation.json"
# The tests that count: those of every run of the test command that take moments.
MARKS = "not slow and not long"
# The modules of the mathematics, each with the tests that have to find its faults, quick ones first.
MODULES = {
    "advantages": ("advantages", "trl_parity"),
    "losses": ("losses", "trl_parity"),
    "logprobs": ("logprobs",),
    "metrics": ("metrics",),
    "evaluation": ("significance", "evaluation"),
    "continual/fisher": ("fisher",),
    "continual/ewc": ("ewc",),
    "continual/forgetting": ("forgetting",),
    "quantization/numbers": ("quantized_numbers", "quantization"),
    "fast/chunked_logps": ("chunked_logps", "logprobs"),
}
OTHER = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult, ast.Mod: ast.Add},
}
OTHER_NAME = {"min": "max", "max": "min", "amin": "amax", "amax": "amin", "sum": "mean", "mean": "sum", "exp": "expm1"}


def faults(node: ast.AST) -> Iterator[Callable[[], None]]:
    """Yield the small faults that can be put into one node of a syntax tree, each as a call that does it."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in OTHER:
        yield lambda: node.ops.__setitem__(0, OTHER[type(node.ops[0])]())
    if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in OTHER:
        yield lambda: setattr(node, "op", OTHER[type(node.op)]())
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
        yield lambda: setattr(node, "op", ast.UAdd() if isinstance(node.op, ast.USub) else ast.Invert())
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        value = node.value
        yield lambda: setattr(node, "value", not value if isinstance(value, bool) else value + 1)
    if isinstance(node, ast.Attribute) and node.attr in OTHER_NAME:
        yield lambda: setattr(node, "attr", OTHER_NAME[node.attr])
    if isinstance(node, ast.If | ast.IfExp):
        yield lambda: setattr(node, "test", ast.UnaryOp(ast.Not(), node.test))
    if isinstance(node, ast.Call):
        for index, keyword in enumerate(node.keywords):
            if keyword.arg:
                yield lambda index=index: node.keywords.pop(index)


def places(tree: ast.AST, statement: ast.stmt | None = None) -> Iterator[tuple[ast.stmt, Callable[[], None]]]:
    """Yield every fault of a module with its statement; annotations, imports and error messages stay as they are."""
    for name, value in ast.iter_fields(tree):
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST) or name in ("annotation", "returns", "decorator_list"):
                continue
            if isinstance(node, ast.Raise | ast.Import | ast.ImportFrom):
                continue
            here = node if isinstance(node, ast.stmt) else statement
            if here is not None:
                yield from ((here, fault) for fault in faults(node))
            yield from places(node, here)


def first_line(statement: ast.stmt) -> str:
    """Return the statement, or the head of a compound one."""
    text = ast.unparse(statement)
    return text.split("\n")[0] if hasattr(statement, "body") else text


def mutant(tree: ast.Module, number: int) -> tuple[ast.Module, dict[str, Any]]:
    """Return the module with one fault, and what was changed."""
    changed = copy.deepcopy(tree)
    statement, fault = list(places(changed))[number]
    before = first_line(statement)
    fault()
    change = {"line": statement.lineno, "before": before, "after": first_line(statement)}
    return ast.fix_missing_locations(changed), change


def outcome(path: Path, tree: ast.Module, tests: list[str], seconds: float) -> str:
    """Run the tests in a fork in which the module is another one: "killed", "survived" or "timed out"."""
    if not (child := os.fork()):
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(seconds))
            silence = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silence, 1)
            os.dup2(silence, 2)
            load = SourceFileLoader.get_code

            def get_code(loader: SourceFileLoader, name: str) -> Any:
                return compile(tree, path, "exec") if Path(loader.path) == path else load(loader, name)

            SourceFileLoader.get_code = get_code  # type: ignore[method-assign]
            import pytest

            quick = ["-x", "-q", "-p", "no:cacheprovider", "-m", MARKS, "--hypothesis-seed=0"]
            os._exit(
                int(pytest.main([*quick, "--assert=plain", *tests]))
            )  # pytest would load what it rewrites by itself
        finally:
            os._exit(70)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return {0: "survived", -signal.SIGALRM: "timed out"}.get(code, "killed")


def main() -> int:
    """Draw the mutants, try each, and store what survived."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--sample", type=int, default=80, help="so many mutants, drawn from all modules (0: every one)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--modules", nargs="*", choices=MODULES, default=list(MODULES), metavar="NAME")
    parser.add_argument("--output", type=Path, default=STORED)
    options = parser.parse_args()
    os.chdir(ROOT)
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    import datasets  # noqa: F401  what the forks need and what is not tried
    import hypothesis  # noqa: F401
    import peft  # noqa: F401
    import scipy.stats  # noqa: F401
    import trl  # noqa: F401
    from transformers import AutoModelForCausalLM, Qwen2ForCausalLM  # noqa: F401

    paths = {name: ROOT / "grpo_edu" / f"{name}.py" for name in options.modules}
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in paths.items()}
    drawn = [(name, number) for name, tree in trees.items() for number in range(len(list(places(tree))))]
    whole = {name: sum(other == name for other, _ in drawn) for name in paths}
    if options.sample:
        drawn = sorted(random.Random(options.seed).sample(drawn, options.sample))
    stored = json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else {"modules": {}}
    judged = {
        (name, row["before"], row["after"]): row["judged"]
        for name, part in stored["modules"].items()
        for row in part["survivors"]
    }
    modules: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(name for name, _ in drawn):
        tests = [str(paths[name]), *(f"tests/test_{test}.py" for test in MODULES[name])]
        if outcome(paths[name], ast.parse("1 / 0"), tests, 3600) == "survived":
            raise SystemExit(f"{name}: its tests do not load the mutated module")
        start = time.monotonic()
        if outcome(paths[name], trees[name], tests, 3600) != "survived":
            raise SystemExit(
                f"{name}: the tests fail without any fault: python -m pytest -m '{MARKS}' {' '.join(tests)}"
            )
        limit = 60 + 5 * (time.monotonic() - start)
        part: dict[str, Any] = {"possible": whole[name], "mutants": 0, "killed": 0, "timed_out": 0, "survivors": []}
        modules[name] = part
        for _, number in (pair for pair in drawn if pair[0] == name):
            tree, change = mutant(trees[name], number)
            found = outcome(paths[name], tree, tests, limit)
            part["mutants"] += 1
            part["killed"] += found != "survived"
            part["timed_out"] += found == "timed out"
            if found == "survived":
                reason = judged.get((name, change["before"], change["after"]), "")
                part["survivors"].append({**change, "judged": reason})
            print(f"{name}:{change['line']} {found}: {change['before'][:70]} -> {change['after'][:70]}", flush=True)
    from benchmarks.harness import save  # this imports the package, so it comes after the last fork

    command = f"{COMMAND} --sample {options.sample} --seed {options.seed}"
    save(options.output, command, {"sample": options.sample, "seed": options.seed, "modules": modules})
    survivors = [row for part in modules.values() for row in part["survivors"]]
    print(f"{len(drawn) - len(survivors)} of {len(drawn)} killed")
    return int(any(not row["judged"] for row in survivors))


if __name__ == "__main__":
    sys.exit(main())
