"""Read and write problems: JSONL files, the problems of the package, GSM8K, and `datasets.Dataset`.

A file has one JSON object per line, so it is easy to read, to extend and to compare. Errors in a file are reported as
``file:line: message``, so that the line is easy to find.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_edu.problems.hub import offline_if_hub_unreachable
from grpo_edu.problems.templates import PROBLEM_SETS, Problem, ProblemSet, data_dir, problem_set_names
from grpo_edu.prompts import MARKER, extract_answer

if TYPE_CHECKING:
    from datasets import Dataset

GSM8K_HUB_ID = "openai/gsm8k"
_PROBLEM_FIELDS = ("prompt", "answer", "level", "solution")
_CALCULATOR_NOTE = re.compile(r"<<[^<>]*>>")


def read_utf8(path: Path) -> str:
    """Return the text of a file; raises ValueError that starts with file:line where it is not UTF-8."""
    content = path.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line, byte = content[: error.start].count(b"\n") + 1, content[error.start]
        raise ValueError(f"{path}:{line}: the byte 0x{byte:02x} is not UTF-8 text; save the file as UTF-8") from None


def json_records(path: Path, keys: Sequence[str] = ()) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the object of each line, which has a string for each of `keys`. Blank lines are skipped."""
    found = False
    for number, line in enumerate(io.StringIO(read_utf8(path), newline=None), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where}: this line is not JSON ({error}); repair or remove it") from error
        if not isinstance(record, dict):
            raise ValueError(f"{where}: expected a JSON object in braces, got {type(record).__name__}")
        for key in keys:
            if key not in record:
                raise ValueError(f"{where}: the field {key!r} is missing; each line needs {', '.join(keys)}")
            if not isinstance(record[key], str):
                kind = type(record[key]).__name__
                raise ValueError(f"{where}: the field {key!r} must be a string, got {kind}; put it in quotes")
            if half := re.search("[\ud800-\udfff]", record[key]):
                raise ValueError(
                    f"{where}: the field {key!r} contains {half[0]!r}, half of a character, which is not valid "
                    "Unicode; write the character itself, or remove it"
                )
        found = True
        yield number, record
    if not found:
        raise ValueError(f"{path}: the file holds no problems; each line needs {', '.join(keys) or 'a question'}")


def read_problems(path: str | Path) -> list[Problem]:
    """Read problems from a JSONL file whose lines have `prompt`, `answer`, `level` and `solution`.

    Other fields are ignored. Raises ValueError with file and line for a line that is not such an object, and for a file
    without problems.

    >>> import tempfile
    >>> problem = Problem("What is 2 + 3?", "5", "basic", "2 + 3 = 5. #### 5")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_problems(Path(folder) / "mine.jsonl", [problem])
    ...     read_problems(Path(folder) / "mine.jsonl") == [problem]
    True
    """
    return [
        Problem(**{key: record[key] for key in _PROBLEM_FIELDS})
        for _, record in json_records(Path(path), _PROBLEM_FIELDS)
    ]


def write_problems(path: str | Path, problems: Iterable[Problem]) -> None:
    """Write problems to a JSONL file; if writing fails, an existing file remains unchanged.

    Raises ValueError if `problems` is empty or has an entry that is not a `Problem`; OSError if the disk is full.
    """
    path, problems = Path(path), list(problems)
    if not problems:
        raise ValueError("problems is empty; pass at least one")
    for index, problem in enumerate(problems):
        if not isinstance(problem, Problem):
            raise ValueError(f"problems[{index}] must be a Problem, got {type(problem).__name__}")
    text = "".join(json.dumps(problem.row(), ensure_ascii=False) + "\n" for problem in problems)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8", newline="\n")
        os.replace(temporary, path)
    except OSError as error:
        advice = f"{error.strerror}; existing files are unchanged. Free space on the disk or choose another folder"
        raise OSError(error.errno, advice, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def _first(problems: list[Problem], n: int | None, source: Path | str) -> list[Problem]:
    """Return the first `n` problems, or all; raises ValueError if there are fewer."""
    if n is not None and not 1 <= n <= len(problems):
        raise ValueError(f"n must be between 1 and {len(problems)}, the number of problems in {source}; got {n}")
    return problems[:n]


def _check_split(split: str, splits: Sequence[str]) -> None:
    if split not in splits:
        raise ValueError(f"split must be one of {', '.join(splits)}; got {split!r}")


def load_problems(level: str | Sequence[str], split: str = "train", n: int | None = None) -> list[Problem]:
    """Return the problems of the package for one or several sets.

    Args:
        level: a name of `problem_set_names()` other than "gsm8k", or a sequence of such names.
        split: "train" or "heldout"; the two have no problem in common.
        n: the first n problems *of each level*; None: all of them.

    Raises ValueError for an unknown level or split or too large an n.
    """
    _check_split(split, ("train", "heldout"))
    names = [level] if isinstance(level, str) else list(level)
    known = [name for name in problem_set_names() if not PROBLEM_SETS[name].reads_path]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise ValueError(f"level must be one or several of {', '.join(known)}; got {level!r}")
    return [problem for name in names for problem in _first(load_problem_set(name, split), n, f"{name}, {split}")]


def load_problem_set(name: str, split: str, path: str | Path | None = None) -> list[Problem]:
    """Return all problems of one set with an entry in `PROBLEM_SETS`.

    split: "train" or "heldout". path: the folder or file of a set that reads one; None asks the Hub.
    """
    entry = PROBLEM_SETS[name]
    if entry.load is None:
        return read_problems(data_dir() / "problems" / f"{name}_{split}.jsonl")
    return entry.load(split, path=path) if entry.reads_path else entry.load(split)


def _gsm8k_problem(record: dict[str, Any], where: str) -> Problem:
    """Return a GSM8K record as a problem, without calculator notes `<<48/2=24>>`, the answer in canonical form."""
    answer = extract_answer(record["answer"]) if MARKER in record["answer"] else None
    if answer is None:
        raise ValueError(f"{where}: the answer must end in '{MARKER} number'; check that this is GSM8K's main set")
    solution = _CALCULATOR_NOTE.sub("", record["answer"])
    return Problem(prompt=record["question"], answer=answer, level="gsm8k", solution=solution)


def load_gsm8k(split: str = "train", path: str | Path | None = None, n: int | None = None) -> list[Problem]:
    """Load GSM8K: grade-school word problems (Cobbe et al. 2021, arXiv 2110.14168), 7,473 for training, 1,319 for test.

    Args:
        split: "train" or "test".
        path: a folder with `train.jsonl` and `test.jsonl`, or one such file; None: load it from the Hub.
        n: the first n problems; None: all of them.

    Raises ValueError with file and line for an invalid record; FileNotFoundError if `path` has no such file;
    ConnectionError if the Hub cannot be reached.
    """
    _check_split(split, ("train", "test"))
    if path is None:
        records: Iterable[tuple[int, dict[str, str]]] = enumerate(_gsm8k_from_hub(split), start=1)
        source: Path | str = f"{GSM8K_HUB_ID} {split}"
    else:
        file = source = Path(path) / f"{split}.jsonl" if Path(path).is_dir() else Path(path)
        if not file.is_file():
            raise FileNotFoundError(f"path: file {source} does not exist; pass a folder with {split}.jsonl, or a file")
        records = json_records(file, ("question", "answer"))
    return _first([_gsm8k_problem(record, f"{source}:{number}") for number, record in records], n, source)


def _gsm8k_from_hub(split: str) -> Dataset:
    """Return the split from the Hub or its cache; the ConnectionError explains how to load it without a network."""
    from datasets import load_dataset

    with offline_if_hub_unreachable() as obstacle:
        try:
            return load_dataset(GSM8K_HUB_ID, "main", split=split)
        except (OSError, ValueError) as error:  # ValueError: a cache that holds another part of it
            raise ConnectionError(
                f"{GSM8K_HUB_ID} could not be loaded from the Hub ({obstacle or error}). Without a network, copy "
                f"{split}.jsonl from github.com/openai/grade-school-math (grade_school_math/data), put it into a "
                "folder, and name that folder as `path`."
            ) from error


def to_dataset(problems: Iterable[Problem]) -> Dataset:
    """Return the problems as a `datasets.Dataset` with the fields of a problem and all further columns.

    TRL hands every column but `prompt` to the reward functions by its name.
    """
    return rows_to_dataset([problem.row() for problem in problems])


def rows_to_dataset(rows: Sequence[Mapping[str, Any]]) -> Dataset:
    """Return rows as a `datasets.Dataset` with the columns of all of them, None where a row lacks one."""
    from datasets import Dataset

    names = dict.fromkeys(name for row in rows for name in row)
    return Dataset.from_list([{name: row.get(name) for name in names} for row in rows])


def _gsm8k_split(split: str, path: str | Path | None = None) -> list[Problem]:
    return load_gsm8k("train" if split == "train" else "test", path)


PROBLEM_SETS["gsm8k"] = ProblemSet(
    "GSM8K's word problems, from the Hub or a folder",
    load=_gsm8k_split,
    max_completion_length=256,
    reads_path=True,
    is_evaluated_whole=True,
)
