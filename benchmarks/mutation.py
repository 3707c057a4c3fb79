"""Are the tests any good? ``python -m benchmarks.mutation`` puts one fault after another into the code to find out.

A fault, or mutant, is one small change by the operators of mutmut: a + becomes a -, a < becomes a <=, an argument is
dropped. A test that fails, or hangs, kills it. A mutant that survives is either no fault at all, or shows something
that no test holds. Each is judged by hand in the stored record, under "judged"; a new run keeps the judgments.

mutmut itself leaves decorated functions out and changes copies of files, so only its operators are used: a mutant is
compiled in a forked process of its own, and torch is imported once for all. It needs Linux or macOS, and mutmut
(`pip install mutmut`), which the tests do not. Left out: the texts of messages, annotations, imports and `__all__`.
Half an hour on one core; writes ``benchmarks/results/mutation.json``.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib.util
import json
import multiprocessing
import os
import sys
import time
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, markdown, save

REPOSITORY = Path(__file__).resolve().parents[1]
# Module → the file of tests that its mutants are tried with, beside the module's own doctests.
TESTS = {name: f"tests/test_{name}.py" for name in (
    "advantages", "losses", "logprobs", "evaluation", "significance", "quantization", "quantized_numbers", "fisher",
    "ewc", "forgetting",
)} | {"clipping": "tests/test_losses.py"}  # fmt: skip


def mutants(source: str) -> dict[str, dict[str, Any]]:
    """Every text of a module with one fault in it, and where: the line, before and after."""
    import libcst
    from libcst.metadata import ByteSpanPositionProvider, MetadataWrapper
    from mutmut.mutation.mutators import mutation_operators

    tree = MetadataWrapper(libcst.parse_module(source))
    spans, left_out = tree.resolve(ByteSpanPositionProvider), (libcst.Annotation, libcst.ImportFrom, libcst.Raise)
    found: dict[str, dict[str, Any]] = {}

    def put(node: libcst.CSTNode, change: libcst.CSTNode) -> None:
        """Write the changed node in the place of the old one."""
        start, end = spans[node].start, spans[node].start + spans[node].length
        head, tail = source.encode()[:start].decode(), source.encode()[end:].decode()
        text, line = head + tree.module.code_for_node(change) + tail, head.count("\n")
        rows = (whole.split("\n") for whole in (source, text))
        parts = (" ".join(" ".join(lines[line : len(lines) - tail.count("\n")]).split()) for lines in rows)
        found.setdefault(text, {"line": line + 1, **dict(zip(("before", "after"), parts, strict=True))})

    class Places(libcst.CSTVisitor):
        def on_visit(self, node: libcst.CSTNode) -> bool:
            if isinstance(node, left_out) or tree.module.code_for_node(node).startswith("__all__"):
                return False
            for kind, operator in mutation_operators:
                changes = list(operator(node)) if isinstance(node, kind) and node in spans else []
                # of a string's three changes, the two of its case add nothing
                for change in changes[:1] if isinstance(node, libcst.BaseString) else changes:
                    put(node, change)
            return True

    tree.module.visit(Places())
    return found


class Mutant(SourceFileLoader):
    """Puts a text in the place of a module of the package; and pytest's plugin that tries the quickest tests first."""

    def __init__(self, name: str, text: str, before: dict[str, float]) -> None:
        super().__init__(f"grpo_edu.{name}", str(REPOSITORY / "grpo_edu" / f"{name}.py"))
        self.text, self.before, self.seconds = text, before, {}

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        return importlib.util.spec_from_file_location(name, self.path, loader=self) if name == self.name else None

    def get_code(self, fullname: str) -> Any:
        return compile(self.text, self.path, "exec", dont_inherit=True)

    def pytest_configure(self) -> None:
        from hypothesis import Phase, settings

        settings.register_profile("mutation", deadline=None, database=None, derandomize=True, phases=[Phase.generate])
        settings.load_profile("mutation")
        sys.meta_path.insert(0, self)  # before pytest's own finder, which serves the files that it is told to test

    def pytest_collection_modifyitems(self, items: list) -> None:
        items.sort(key=lambda item: self.before.get(item.nodeid, 0.0))

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration


def run_tests(name: str, mutant: Mutant) -> dict[str, float] | None:
    """Run the module's tests; returns the seconds of each where all pass, None where one fails."""
    import pytest

    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    sys.dont_write_bytecode = True
    code = pytest.main(["-x", "-p", "no:cacheprovider", f"grpo_edu/{name}.py", TESTS[name]], plugins=[mutant])
    return mutant.seconds if code == 0 else None


def survives(name: str, text: str, before: dict[str, float], limit: float) -> dict[str, float] | None:
    """`run_tests` on this text of the module in a forked process; None as well where they take too long."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        try:
            return pool.apply_async(run_tests, (name, Mutant(name, text, before))).get(limit)
        except multiprocessing.TimeoutError:
            return None


def study(name: str, stored: dict[str, Any], again: bool) -> dict[str, Any]:
    """Try a module's mutants; `again`, where the module has not changed, only those that survived the stored study."""
    source = (REPOSITORY / "grpo_edu" / f"{name}.py").read_text(encoding="utf-8")
    digest = hashlib.sha256(source.encode()).hexdigest()[:12]
    again = again and digest == stored.get("sha256")
    judged = {(row["before"], row["after"]): row["judged"] for row in stored.get("survivors", [])}
    if (seconds := survives(name, source, {}, 600)) is None:
        raise SystemExit(f"{name}: {TESTS[name]} fails without any fault; mend that first")
    found, survivors = mutants(source), []
    for text, fault in found.items():
        known = judged.get((fault["before"], fault["after"]))
        if again and known is None:
            continue
        if survives(name, text, seconds, 20 + 5 * sum(seconds.values())) is not None:
            survivors.append(fault | {"judged": known or ""})
            print(name, json.dumps(survivors[-1], ensure_ascii=False), flush=True)
    counts = {"mutants": len(found), "killed": len(found) - len(survivors)}
    return {"sha256": digest, **counts, "survivors": survivors}


def table(modules: dict[str, Any]) -> str:
    """One row a module, and their sum."""
    rows = [{"module": f"`{name}`", "mutants": part["mutants"], "killed": part["killed"],
             "survivors": len(part["survivors"])} for name, part in sorted(modules.items())]  # fmt: skip
    sums = {column: sum(row[column] for row in rows) for column in ("mutants", "killed", "survivors")}
    return markdown([*rows, {"module": "all", **sums}])


def main() -> int:
    """Try the mutants; exit 1 where a survivor is not judged."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", help=f"of {', '.join(TESTS)}; all of them when none is named")
    parser.add_argument("--again", action="store_true", help="only survivors, where a module is as it was")
    parser.add_argument("--output", type=Path, default=RESULTS / "mutation.json")
    options = parser.parse_args()
    os.chdir(REPOSITORY)
    # A forked process cannot use the threads of its parent; and the plugins of others only take time.
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    import pytest

    # What every process needs is imported here, once.
    pytest.main(["--collect-only", "-qq", "-p", "no:warnings", "tests/conftest.py"])
    import scipy.stats  # noqa: F401
    from transformers import GPT2LMHeadModel, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2ForCausalLM  # noqa: F401

    gc.freeze()  # or each process would look through all of it for garbage
    stored = json.loads(options.output.read_text(encoding="utf-8"))["modules"] if options.output.exists() else {}
    for name in options.modules or TESTS:
        stored[name] = study(name, stored.get(name, {}), options.again)
    record = {"date": time.strftime("%Y-%m-%d"), "operators": f"mutmut {version('mutmut')}", "modules": stored}
    save(options.output, "python -m benchmarks.mutation", record)
    print(table(stored))
    return 0 if all(row["judged"] for part in stored.values() for row in part["survivors"]) else 1


if __name__ == "__main__":
    sys.exit(main())
