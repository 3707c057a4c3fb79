"""What a cell's syntax tree says: what it defines, which of that is not written yet, and what is worth a look."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from functools import lru_cache

_DEFINITION = re.compile(r"^(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)|^(\w+)[ \t]*=[ \t]*lambda\b", re.MULTILINE)
_NAMES_BEFORE = re.compile(r"[\w, \t]+")
_SHELL = re.compile(r"!|%%?(?:bash|sh|script|system|sx|cmd)\b")
_MOST_LINKS = 20  # attributes of attributes; the first of a longer chain are a chain of their own
# What an answer has no need of: other processes and threads, frames, the insides of Python or of the checks.
_MODULES = frozenset(
    "asyncio atexit builtins classroom code codeop concurrent ctypes faulthandler fcntl gc importlib inspect mmap "
    "multiprocessing pickle pkgutil posix psutil pty resource runpy signal socket subprocess threading zipimport "
    "_ctypes _io _posixsubprocess _socket _thread".split()
)
_OF_OS = re.compile(
    r"__dict__|_exit|abort|close\w*|dup2?|exec\w+|fdopen|fork\w*|kill\w*|memfd_create|open|pipe2?|popen|posix_\w+|pwrite\w*"
    r"|set\w*[ug]id|spawn\w+|system|unshare|setns|write\w*|\*"
)
_OF_SYS = re.compile(r"_\w+|modules|meta_path|settrace|setprofile|addaudithook|\*")
_NAMES = frozenset("__import__ __builtins__ __loader__ __spec__ compile eval exec get_ipython globals".split())
_ATTRIBUTES = frozenset(
    "__bases__ __builtins__ __closure__ __code__ __eq__ __globals__ __subclasses__ __mro__ _getframe ag_frame "
    "currentframe f_back f_globals f_locals gi_frame memfd_create tb_frame".split()
)
_BY_NAME = ("delattr", "getattr", "setattr", "vars")
_VARIABLE = re.compile(r"GRPO_EDU_\w+")


@lru_cache(maxsize=4096)
def tree(source: str) -> ast.Module | None:
    """Return the syntax tree of a cell, in which a line of IPython's own is `pass`; None if it is no Python."""
    return _parsed(source) or _parsed("\n".join(map(_without_command, source.split("\n"))))


def _command_in(line: str) -> str:
    """Return what IPython executes of a line, after the names that it is assigned to; "" for a line of Python."""
    names, equals, rest = line.partition("=")
    text = rest if equals and _NAMES_BEFORE.fullmatch(names) else line
    text = text.lstrip(" \t")
    return text if text.startswith(("%", "!")) else ""


def _without_command(line: str) -> str:
    return line[: len(line) - len(line.lstrip(" \t"))] + "pass" if _command_in(line) else line


def _parsed(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the parser is a student's to break
        return None


@lru_cache(maxsize=4096)
def definitions(source: str) -> tuple[str, ...]:
    """Return the functions and classes that a cell defines at its top level, even where it is no Python.

    >>> definitions("%matplotlib inline\\ndef f(x):\\n    y = lambda: 0\\ng = lambda x: x\\nh = g(1)")
    ('f', 'g')
    """
    module = tree(source)
    if module is None:
        return tuple(one or other for one, other in _DEFINITION.findall(source))
    return tuple(name for node in module.body for name in _defined_by(node))


def _defined_by(node: ast.stmt) -> list[str]:
    """The names to which a statement gives a function or a class."""
    if isinstance(node, _DEFINES):
        return [node.name]
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []


def written(source: str) -> set[str]:
    """Return the definitions of a cell that do something; of two with one name the last counts.

    >>> written("def f(x):\\n    '''Says much.'''\\n    raise NotImplementedError\\n\\ndef g(x):\\n    return x")
    {'g'}
    """
    module = tree(source)
    empty = {name: _is_empty(node) for node in module.body for name in _defined_by(node)} if module else {}
    return {name for name in definitions(source) if not empty.get(name)}


def without_empty(source: str, names: Collection[str]) -> str:
    """Return a cell without those definitions of these names that do nothing; "" if only comments are left.

    >>> without_empty("import torch\\ndef f(x):\\n    pass", {"f"}), without_empty("# f is hard.", {"f"})
    ('import torch', '# f is hard.')
    """
    module = tree(source)
    if module is None:
        return source
    lines: list[str | None] = [*source.split("\n")]
    taken, left = False, False
    for node in module.body:
        if {*_defined_by(node)} & {*names} and _is_empty(node):
            first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
            lines[first - 1 : node.end_lineno] = [None] * (1 + (node.end_lineno or first) - first)
            taken = True
        else:
            left = left or not _does_nothing(node) or bool(_command_in(lines[node.lineno - 1] or ""))
    return "\n".join(line for line in lines if line is not None) if left or not taken else ""


_DEFINES = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _is_empty(node: ast.stmt) -> bool:
    """Return True if a function or class holds only a docstring, `pass`, `...`, `raise` or `assert False`."""
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
        return isinstance(node.value.body, ast.Constant) and node.value.body.value in (None, ...)
    return isinstance(node, _DEFINES) and all(_does_nothing(one) or _is_empty(one) for one in node.body)


def _does_nothing(node: ast.stmt) -> bool:
    match node:
        case ast.Pass() | ast.Expr(ast.Constant()) | ast.Return(None) | ast.Return(ast.Constant(None)):
            return True
        case ast.Raise() | ast.Assert(ast.Constant(False | 0 | None)):
            return True
    return False


def suspicious_names(sources: Collection[str], given: Collection[str]) -> set[str]:
    """Return what cells use that an answer has no need of, and what they take from the package itself.

    Names are resolved through imports, so that `from os import _exit as leave` is found as ``os._exit``.

    sources: the student's cells. given: the other cells of the notebook, whose imports count as well.

    >>> sorted(suspicious_names(["import os as o\\no.write(3, b'')", "exec(x)"], ["from grpo_edu import checks"]))
    ['exec', 'os.write']
    """
    trees = [module for module in map(tree, sources) if module is not None]
    known = {"grpo_edu": "grpo_edu"}
    for module in [*filter(None, map(tree, given)), *trees]:
        for node in ast.walk(module):
            known |= {local: path for local, path in _imported(node) if local}
    shell = (source for source in sources if any(_SHELL.match(_command_in(line)) for line in source.split("\n")))
    found = {"a shell command" for source in shell if not _parsed(source)}
    for module in trees:
        for node in ast.walk(module):
            found.update(path for path in _used(node, known) if _is_odd(path))
    return found


def _imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(name in the notebook, what it stands for) of an import."""
    if isinstance(node, ast.Import):
        for one in node.names:
            yield one.asname or one.name.partition(".")[0], one.name if one.asname else one.name.partition(".")[0]
    elif isinstance(node, ast.ImportFrom):
        for one in node.names:
            yield "" if one.name == "*" else one.asname or one.name, f"{node.module or ''}.{one.name}"


def _used(node: ast.AST, known: dict[str, str]) -> Iterator[str]:
    """Yield the dotted names that a node uses."""
    if isinstance(node, ast.Import):
        yield from (one.name for one in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (path for _, path in _imported(node))
    elif isinstance(node, ast.Name):
        yield known.get(node.id, node.id if node.id in _NAMES else "")
    elif isinstance(node, ast.Attribute):
        yield _dotted(node, known)
    elif isinstance(node, ast.FunctionDef):
        yield f".{node.name}"
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from _VARIABLE.findall(node.value)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
        of, name = _dotted(node.args[0], known), node.func.id
        if name in _BY_NAME and of.rpartition(".")[2] in ("os", "sys", "grpo_edu", *_MODULES):
            yield f"{name}({of})"
        if name == "open" and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, int):
            yield f"open({node.args[0].value})"  # by its number, as the way on which answers are sent


def _dotted(node: ast.AST, known: dict[str, str]) -> str:
    """Return `a.b.c` with `a` as it was imported; only the last attributes, as in `.b.c`, if `a` is not a name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute) and len(parts) < _MOST_LINKS:
        parts.append(node.attr)
        node = node.value
    first = known.get(node.id, "") if isinstance(node, ast.Name) else ""
    return ".".join([first, *reversed(parts)])


def _is_odd(path: str) -> bool:
    if path.partition(".")[0] == "grpo_edu":  # whoever grades is told which of the package's names it is
        return True
    if path in _NAMES or path.endswith(")") or _VARIABLE.fullmatch(path):
        return True
    if "." in path and path.rpartition(".")[2] in _ATTRIBUTES:
        return True
    return any(_is_odd_of(*end) for end in _ends(path))


def _ends(path: str) -> Iterator[tuple[str, str]]:
    """Yield a module and what is taken from it; any part of what was imported may be one (`torch.os`)."""
    parts = path.split(".")
    for number, part in enumerate(parts if parts[0] else ()):
        yield part, ".".join(parts[number + 1 :])


def _is_odd_of(module: str, name: str) -> bool:
    if module == "os":
        return bool(_OF_OS.fullmatch(name))
    return module in _MODULES or (module == "sys" and bool(_OF_SYS.fullmatch(name)))
