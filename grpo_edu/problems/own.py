"""Questions of your own: a JSONL, JSON, CSV or Parquet file, or a folder that the library `datasets` reads.

Each row has a question and, unless a reward of your own judges the completions alone, its answer. A column is found by
its usual name (`QUESTION`, `ANSWER`) or by the name that `columns` gives it, and every further column reaches the
reward functions by its own name, as in TRL. If there is one file and no split, a fifth of the questions is held out.
The hash of a question decides, so every run, evaluation and resumed run holds out the same questions, in whatever order
the file lists them.

Errors are reported as ``file:line: message``, before any model is loaded.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from grpo_edu.problems.files import json_records
from grpo_edu.problems.hub import looks_like_path
from grpo_edu.problems.templates import TEXT, UNANSWERED, Problem
from grpo_edu.prompts import MARKER, extract_answer, normalize_answer

QUESTION, ANSWER = ("question", "prompt", "problem"), ("answer", "target")
FIELDS = ("question", "answer", "level", "solution")
SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
HELDOUT_EVERY = 5  # one of this many questions is held out if nothing else says which
_HELDOUT_NAMES = ("test", "validation", "heldout")  # of the splits in a folder
_NOT_COLUMNS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments")

# A command of LaTeX other than those around a number (\\boxed, \\text, a space, a currency sign), or such a symbol.
_FORMULA = re.compile(r"\\(?!boxed\b|text\b|[,!;: $%])|[π∞√]")

Row = tuple[str, Mapping[str, Any]]  # file and line, and the columns


def is_user_file(name: str) -> bool:
    """Return True if the name of a problem set is meant as a file or a folder of your own.

    >>> is_user_file("mine.jsonl"), is_user_file("basic")
    (True, False)
    """
    return Path(name).suffix.lower() in SUFFIXES or looks_like_path(name)


def parse_columns(columns: Sequence[str]) -> dict[str, str]:
    """Read `field=column` for fields of `FIELDS`; raises ValueError for anything else.

    >>> parse_columns(("question=problem", "answer=target"))
    {'question': 'problem', 'answer': 'target'}
    """
    found: dict[str, str] = {}
    for entry in columns:
        field, sign, column = (part.strip() for part in entry.partition("="))
        if field not in FIELDS or not sign or not column or field in found:
            raise ValueError(
                f"`columns`: {entry!r} is not valid; write FIELD=COLUMN, each field once, with one of the fields "
                f"{', '.join(FIELDS)}, for example question=problem."
            )
        found[field] = column
    return found


def load_user_problems(
    path: str | Path, split: str, *, heldout: str | Path | None = None, columns: Sequence[str] = ()
) -> list[Problem]:
    """Read the problems of a file or folder for one split.

    Args:
        path: the file or folder. split: "train" or "heldout".
        heldout: the file with the held-out problems; None takes the split of a folder, or holds out a fifth.
        columns: names of columns, see `parse_columns`.

    Raises ValueError with file and line for what is not valid, and where a held-out question is also one to train on;
    FileNotFoundError for a file that does not exist.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "sums.csv"
    >>> _ = path.write_text("question,answer,unit\\n" + "".join(f"{n} + {n}?,{2 * n},cm\\n" for n in range(10)))
    >>> problems = load_user_problems(path, "train")
    >>> len(problems), len(load_user_problems(path, "heldout")), problems[0].columns
    (8, 2, {'unit': 'cm'})
    """
    path, names = Path(path).expanduser(), parse_columns(columns)
    tables = read_tables(path)
    if heldout is not None:
        held = Path(heldout).expanduser()
        tables = {"train": tables["train"], "heldout": read_tables(held)["train"]}
    for rows in tables.values():
        _check_same_columns(rows)
    _check_answers(tables, names)
    if len(tables) == 1:
        tables = _divide(path, tables["train"], names)
    _check_numbers(tables, names)
    problems = {part: [_problem(path, row, names) for row in rows] for part, rows in tables.items()}
    trained = {question_key(problem.prompt) for problem in problems["train"]}
    for (where, _), problem in zip(tables["heldout"], problems["heldout"], strict=True):
        if question_key(problem.prompt) in trained:
            raise ValueError(
                f"{where}: the held-out question {problem.prompt[:80]!r} is also a training question, so an accuracy "
                "on it would not be one on new questions; remove it from one of the two."
            )
    return problems[split]


def question_key(question: str) -> str:
    """Return a question without differences of case and white space: two questions with one key count as the same."""
    return " ".join(question.casefold().split())


def read_tables(path: Path) -> dict[str, list[Row]]:
    """Read the rows of a file as "train"; a folder may have "heldout" as well.

    Raises ValueError for a file that cannot be read as what its name says, and FileNotFoundError for none.
    """
    if not path.exists():
        raise FileNotFoundError(f"`data`: {path} does not exist. Check the path.")
    if path.is_dir():
        return _folder(path)
    readers = {".csv": _csv, ".tsv": _csv, ".parquet": _parquet, ".json": _json, ".jsonl": _jsonl}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ValueError(f"`data`: {path} is of no known kind; use a file that ends in {', '.join(SUFFIXES)}.")
    rows = reader(path)
    if not rows:
        raise ValueError(f"{path}: the file holds no problems; each row needs a question.")
    return {"train": [(where, _with_ground_truth(content)) for where, content in rows]}


def _with_ground_truth(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row with verl's `reward_model["ground_truth"]` as its answer, if it has no other."""
    verl = content.get("reward_model")
    if not isinstance(verl, dict) or "ground_truth" not in verl or any(name in content for name in ANSWER):
        return content
    return {**content, "answer": verl["ground_truth"]}


def _jsonl(path: Path) -> list[Row]:
    return [(f"{path}:{number}", record) for number, record in json_records(path)]


def _json(path: Path) -> list[Row]:
    try:
        content = json.loads(path.read_bytes().decode("utf-8-sig"))
    except ValueError as error:
        line = getattr(error, "lineno", 1)
        raise ValueError(
            f"{path}:{line}: this is not JSON ({error}); a file with one object per line must end in .jsonl"
        ) from None
    if not isinstance(content, list) or not all(isinstance(row, dict) for row in content):
        raise ValueError(f"{path}:1: expected a list of JSON objects, [{{…}}, {{…}}], got {type(content).__name__}")
    return [(f"{path}: entry {number}", row) for number, row in enumerate(content, start=1)]


def _csv(path: Path) -> list[Row]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: this is not UTF-8 ({error}); save the table as CSV in UTF-8.") from None
    header = text.partition("\n")[0]
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=max(",;\t", key=header.count), strict=True)
    names = [name.strip() for name in reader.fieldnames or []]
    if len(set(names)) < len(names) or "" in names:
        raise ValueError(f"{path}:1: the first line must name each column once, got {header.strip()!r}")
    reader.fieldnames = names
    rows: list[Row] = []
    try:
        for row in reader:
            where = f"{path}:{reader.line_num}"
            if None in row or None in row.values():
                count = sum(value is not None for value in row.values()) - (None in row) + len(row.get(None, ()))
                raise ValueError(
                    f"{where}: this row has {count} values for {len(names)} columns; put a text that contains the "
                    "separator into double quotes"
                )
            rows.append((where, row))
    except csv.Error as error:
        raise ValueError(f"{path}:{reader.line_num}: this is not valid CSV ({error}); correct this line") from None
    return rows


def _parquet(path: Path) -> list[Row]:
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    try:
        rows = parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: this is not a Parquet file that can be read ({error}); write it again.") from None
    return [(f"{path}: row {number}", row) for number, row in enumerate(rows, start=1)]


def _folder(path: Path) -> dict[str, list[Row]]:
    """Return the rows of each split of a folder that `datasets.save_to_disk` wrote, or of one with data files."""
    import datasets

    try:
        if any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
            found = datasets.load_from_disk(str(path))
        else:
            found = datasets.load_dataset(str(path))
    except (ValueError, OSError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"`data`: the library datasets cannot read the folder {path} ({reason}); name a file."
        ) from None
    splits = dict(found) if isinstance(found, dict) else {"train": found}
    if "train" not in splits:
        raise ValueError(f"`data`: the folder {path} has the splits {', '.join(splits)}, but none is called train.")
    held = next((name for name in _HELDOUT_NAMES if name in splits), None)
    chosen = {"train": splits["train"]} | ({} if held is None else {"heldout": splits[held]})
    return {
        part: [(f"{path}: row {number} of {part}", row) for number, row in enumerate(rows, start=1)]
        for part, rows in chosen.items()
    }


def _divide(path: Path, rows: Sequence[Row], names: Mapping[str, str]) -> dict[str, list[Row]]:
    """Hold out a fifth of the different questions: those with the smallest hashes."""
    keys = [question_key(_question(row, names)) for row in rows]
    ranked = sorted(set(keys), key=lambda key: hashlib.sha256(key.encode()).digest())
    if len(ranked) < 2:
        raise ValueError(f"{path}: one question cannot be both trained and evaluated on; give at least two.")
    held = set(ranked[: max(1, len(ranked) // HELDOUT_EVERY)])
    parts: dict[str, list[Row]] = {"train": [], "heldout": []}
    seen: set[str] = set()
    for key, row in zip(keys, rows, strict=True):
        if key not in held:
            parts["train"].append(row)
        elif key not in seen:  # evaluated once
            seen.add(key)
            parts["heldout"].append(row)
    return parts


def _check_same_columns(rows: Sequence[Row]) -> None:
    """Raise ValueError if a column is in some rows only: its name may be misspelled in the others."""
    counts = Counter(name for _, content in rows for name in content)
    partial = [(count, name) for name, count in counts.items() if count < len(rows)]
    if not partial:
        return
    count, name = max(partial, key=lambda pair: pair[0])
    is_usual = 2 * count >= len(rows)
    where, content = next(row for row in rows if (name in row[1]) != is_usual)
    raise ValueError(
        f"{where}: only {count} of {len(rows)} rows have a column {name!r}, and this row has "
        f"{', '.join(map(str, content))}; correct the name, or give every row this column (null for none)"
    )


def _check_answers(tables: Mapping[str, Sequence[Row]], names: Mapping[str, str]) -> None:
    """Raise ValueError if one of the training and the held-out problems have answers and the others have none."""
    firsts = [rows[0] for rows in tables.values() if rows]
    if any(_has_answer(content, names) for _, content in firsts):
        for row in firsts:
            _column(row, names, "answer", ANSWER)


def _check_numbers(tables: Mapping[str, Sequence[Row]], names: Mapping[str, str]) -> None:
    """Raise ValueError that names all answers with a formula: `12\\pi` is not 12, and `(5,\\infty)` is not 5."""
    rows = [row for part in tables.values() for row in part if _has_answer(row[1], names)]
    answers = [(where, str(content[_column((where, content), names, "answer", ANSWER)])) for where, content in rows]
    formulas = [(where, text) for where, text in answers if _FORMULA.search(text.rpartition(MARKER)[2])]
    if formulas:
        shown = "; ".join(f"{where}: {text[-80:]!r}" for where, text in formulas[:5])
        raise ValueError(
            f"{len(formulas)} of {len(answers)} answers are formulas, which accuracy cannot compare ({shown}"
            f"{'; …' if len(formulas) > 5 else ''}); leave these rows out, or give the column another name and compare "
            "it in a reward of your own"
        )


def _has_answer(content: Mapping[str, Any], names: Mapping[str, str]) -> bool:
    return "answer" in names or any(name in content for name in ANSWER)


def _column(row: Row, names: Mapping[str, str], field: str, usual: Sequence[str]) -> str:
    """Return the name of the column that holds a field; raises ValueError if the row has none."""
    where, content = row
    name = next((name for name in ([names[field]] if field in names else usual) if name in content), None)
    if name is not None:
        return name
    missing = f"{field}={names[field]} names a column that" if field in names else f"a column for the {field}"
    advice = f"name the right one with --columns {field}=COLUMN (in Python `columns`)" + (
        "" if field in names else f", or call it {usual[0]}"
    )
    raise ValueError(f"{where}: {missing} is missing; the columns are {', '.join(map(str, content))}; {advice}")


def _question(row: Row, names: Mapping[str, str]) -> str:
    where, content = row
    for name, text in content.items():
        if isinstance(text, str) and (half := re.search("[\ud800-\udfff]", text)):
            raise ValueError(f"{where}: {name} contains {half[0]!r}, half of a character; write the character itself")
    name = _column(row, names, "question", QUESTION)
    question = content[name]
    if isinstance(question, list):
        question = _text_of_messages(where, name, question)
    if not isinstance(question, str):
        raise ValueError(f"{where}: the question ({name}) must be a text, got {_short(question)}; put it in quotes")
    if not question.strip():
        raise ValueError(f"{where}: the question ({name}) is empty; fill it in, or remove the row")
    return question


def _text_of_messages(where: str, name: str, messages: Sequence[Any]) -> str:
    """Return the question of a prompt in chat messages; a system message comes first, as a paragraph of its own."""
    are_messages = all(isinstance(one, dict) and isinstance(one.get("content"), str) for one in messages)
    roles = [one.get("role") for one in messages] if are_messages else []
    if roles not in (["user"], ["system", "user"]):
        raise ValueError(
            f"{where}: the question ({name}) must be a text, or a list of one user message that a system message may "
            f"precede, got {_short(list(messages))}"
        )
    return "\n\n".join(one["content"].strip() for one in messages)


def _problem(path: Path, row: Row, names: Mapping[str, str]) -> Problem:
    where, content = row
    question, used = _question(row, names), [_column(row, names, "question", QUESTION)]
    level, answer, solution = path.stem, "", ""
    if _has_answer(content, names):
        name = _column(row, names, "answer", ANSWER)
        answer, solution = _answer(where, name, content[name])
        used.append(name)
    else:
        level = f"{UNANSWERED}{level}"
    for field in ("level", "solution"):
        if field in names or field in content:
            name = _column(row, names, field, (field,))
            used.append(name)
            if content[name] is None:
                continue
            if not isinstance(content[name], str | int | float):
                raise ValueError(f"{where}: the {field} ({name}) must be a text, got {_short(content[name])}")
            if field == "solution":
                solution = str(content[name])
            elif answer:
                level = str(content[name])
    if answer and normalize_answer(answer) is None:
        level = f"{TEXT}{level}"
    columns = {str(name): value for name, value in content.items() if name not in used}
    for name in ("prompt", "answer", "level", "solution", *_NOT_COLUMNS):
        if name in columns:
            raise ValueError(f"{where}: the column {name!r} has a name that rewards are called with; rename it")
    return Problem(question, answer, level, solution, columns)


def _answer(where: str, name: str, value: Any) -> tuple[str, str]:
    """Return the answer in canonical form, and the worked solution: the whole text if it ends in #### answer."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(
            f"{where}: the answer ({name}) must be a text or a number, got {_short(value)}; if several answers are "
            "right, give the column another name and compare it in a reward of your own"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where}: the answer ({name}) is {value}, which is no number; fill it in, or remove the row")
    text = f"{Decimal(repr(value)):f}" if isinstance(value, float) else str(value).strip()  # 1e-7 in digits
    if not text:
        raise ValueError(f"{where}: the answer ({name}) is empty; fill it in, or remove the row")
    worked = MARKER in text
    answer = extract_answer(text) if worked else normalize_answer(text)
    if answer is None:  # not one number, one list of numbers or one word
        answer = text.rpartition(MARKER)[2].strip()
        if not answer:
            raise ValueError(f"{where}: the answer ({name}) is empty after {MARKER}; fill it in, or remove the row")
    return answer, text if worked else f"{MARKER} {answer}"


def _short(value: Any) -> str:
    return f"{type(value).__name__} {repr(value)[:60]}"
