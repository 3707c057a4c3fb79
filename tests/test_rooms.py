"""Which room of the package may import which, and that no two modules need each other (`docs/architecture.md`)."""

import ast
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "grpo_edu"
SPINE = {
    "config",
    "prompts",
    "models",
    "rollout",
    "rewards",
    "advantages",
    "logprobs",
    "batch",
    "losses",
    "tensors",
    "trainer",
    "metrics",
    "evaluation",
    "turns",
    "gguf_files",
    "model_files",
    "progress",
}


def modules() -> dict[str, Path]:
    """Dotted name → file, of grpo_edu and of the package for instructors; a folder stands for its __init__."""
    found = {}
    for path in (*PACKAGE.rglob("*.py"), *(REPOSITORY / "classroom").glob("*.py")):
        parts = path.relative_to(REPOSITORY).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    for path in (REPOSITORY / "exercises" / "checks").glob("*.py"):
        found[f"grpo_edu.checks.{path.stem}"] = path
    return found


def imports(path: Path, known: dict[str, Path]) -> set[str]:
    """Modules of the two packages that a file imports anywhere: on top, in functions, for type checking."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {full if (full := f"{node.module}.{alias.name}") in known else node.module for alias in node.names}
    return {name for name in found if name in known and name != "grpo_edu"}


def room(module: str) -> str:
    first = module.removeprefix("grpo_edu.").split(".")[0]
    return "spine" if first in SPINE else first


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    """Each module with what it imports."""
    known = modules()
    packages = ("grpo_edu", "classroom")
    return {name: imports(path, known) - {name} for name, path in known.items() if name not in packages}


# room → the rooms that it may import; "spine" is the modules above.
MAY_IMPORT = {
    "spine": {"problems", "fast", "quantization"},  # of quantization: the sampler of rollouts
    "problems": {"spine"},
    "fast": {"spine"},
    "quantization": {"spine"},
    "runs": {"spine", "problems", "fast", "scale", "figures"},
    "scale": {"spine", "problems", "fast", "runs"},
    "continual": {"spine", "problems", "fast", "runs", "figures"},
    "machine": {"spine", "problems", "fast", "quantization", "continual"},
    "studies": {"spine", "problems", "fast", "runs", "continual", "figures"},
    "figures": {"spine", "continual", "web"},
    "web": set(),
    "checks": {"spine", "problems", "fast", "quantization", "continual", "studies", "figures"},
    "classroom": {"spine", "checks", "runs", "figures", "problems", "machine", "cli"},  # a package of its own
    "dashboards": {
        *("spine", "problems", "fast", "quantization", "runs", "continual", "machine", "studies", "figures", "web")
    },
    "minimal": {"spine"},  # the same algorithm in one file, without the spine
    "__main__": {"cli"},
}
# Where only a few modules of the spine are meant.
PARTS_OF_THE_SPINE = {
    "minimal": {"prompts"},
    "problems": {"prompts"},
    "fast": {"config", "rollout", "tensors"},
    "quantization": {"config", "rollout"},
    "figures": {"evaluation", "advantages", "losses"},
}


def test_the_top_of_the_package_is_the_algorithm():
    on_top = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__", "minimal"}
    assert on_top == SPINE


@pytest.mark.parametrize("module", ["losses", "advantages", "logprobs"])
def test_the_mathematics_imports_torch_and_tensors_alone(graph, module):
    assert graph[f"grpo_edu.{module}"] == {"grpo_edu.tensors"}


def test_a_module_imports_only_what_its_room_may(graph):
    for module, target in [(module, target) for module, targets in graph.items() for target in targets]:
        own, other = room(module), room(target)
        if own == other or (own == "cli" and other != "classroom"):  # the command line finds it by its entry point
            continue
        assert other in MAY_IMPORT.get(own, ()), f"{module} imports {target}"
        parts = PARTS_OF_THE_SPINE.get(own)
        if other == "spine" and parts is not None:
            assert target.removeprefix("grpo_edu.") in parts, f"{module} imports {target}"


def test_the_page_on_architecture_has_the_same_table():
    page = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)(?:/|\.py)` \| .* \| (.*) \|$", page, re.MULTILINE))
    assert rows.pop("cli") == "everything" and rows.keys() == MAY_IMPORT.keys() - {"spine", "__main__"}
    for name, cell in rows.items():
        parts = set(re.findall(r"`(\w+)\.py`", cell))
        spine = {"spine"} if parts or "spine" in cell else set()
        assert spine | set(re.findall(r"`(\w+)`", cell)) == MAY_IMPORT[name], name
        assert parts == PARTS_OF_THE_SPINE.get(name, set()), name


def test_no_two_modules_need_each_other(graph):
    """Not even inside functions or for type checking: the imports have an order."""
    left = {name: targets & set(graph) for name, targets in graph.items()}
    while free := {name for name, targets in left.items() if not targets}:
        left = {name: targets - free for name, targets in left.items() if name not in free}
    assert not left, "in a cycle, or behind one: " + ", ".join(sorted(left))
