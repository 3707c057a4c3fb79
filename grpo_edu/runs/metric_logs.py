"""Read the logs of several trainers as rows of metrics under TRL's keys, for `grpo_edu.runs.log_diagnosis`.

==============================================  ===================================================================
what                                            how it is recognized
==============================================  ===================================================================
a run of this package                           a folder with ``metrics.jsonl``, or that file
a run of TRL                                    a folder with ``trainer_state.json`` (also in its checkpoints), or it
what a trainer printed                          a text with dictionaries, ``{'loss': 0.0, 'reward': 0.5, ...}``
what verl and others printed                    a text with lines such as ``step:1 - critic/score/mean:0.5 - ...``
verl's file logger, a list of records           JSON lines or a JSON list; objects in objects are read, too
an export of Weights & Biases, a table          a CSV file or a table in a text, with a line of names
TensorBoard's event files                       a folder with ``events.out.tfevents...``, or such a file
==============================================  ===================================================================

What trainers call their metrics is listed in ``metric_names.toml``. A name that is not listed there stays as it is.
"""

from __future__ import annotations

import ast
import csv
import io
import json
import math
import re
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

Row = dict[str, float | None]
Record = dict[str, Any]

MOST_BYTES = 50_000_000
_LONGEST_DICTIONARY = 2**20  # characters of one that was printed; Python needs 500 bytes for each to read it
_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?%?|[-+]?(?:nan|inf)\b"
_WRAPPED = r"(?:np|numpy|torch)\.\w+\(([^()]*)\)"
_STEP_WORD = r"(?:step|rollout|iteration|iter|update)"
_NOT_A_LOG = (
    "is not a supported log. Supported: a log of this package, trainer_state.json, printed dictionaries, a CSV or JSON "
    "lines export, verl's console output and TensorBoard's event files can"
)


def read_metrics(path: str | Path) -> list[Row]:
    """Return the metrics of each logged step, from a file or the folder of a run; see `parse_metrics`.

    Raises ValueError, with the name of the file: no log, too large, or without any known metric. FileNotFoundError.
    """
    path = Path(path)
    if path.is_dir():
        path = _find_log(path)
    with open(path, "rb") as file:
        return parse_metrics(file.read(MOST_BYTES + 1), str(path))


def parse_metrics(content: bytes, name: str) -> list[Row]:
    """Return the metrics in the content of a file; "step" counts the records if no step is logged.

    `name` decides the format of some files, and is named in errors.

    >>> parse_metrics(b"{'loss': '0.0', 'reward': '0.25'}\\n{'loss': nan, 'reward': 0.5}", "printed.txt")
    [{'step': 1, 'loss': 0.0, 'reward': 0.25}, {'step': 2, 'loss': nan, 'reward': 0.5}]
    >>> parse_metrics(b"step:7 - critic/score/mean:0.5 - actor/entropy:0.2", "verl.txt")
    [{'step': 7, 'reward': 0.5, 'entropy': 0.2}]
    """
    if len(content) > MOST_BYTES:
        raise ValueError(f"{name} is larger than {MOST_BYTES / 1e6:.0f} MB, the most that is read; cut out the metrics")
    if not content.strip():
        raise ValueError(f"{name} is empty")
    if "tfevents" in Path(name).name:
        rows = _merge_steps(_parse_tensorboard(content, name))
    elif content.startswith((b"\xff\xfe", b"\xfe\xff")):  # what PowerShell writes with `>`
        return parse_metrics(content.decode("utf-16", errors="replace").encode(), name)
    elif b"\0" in content:
        raise ValueError(f"{name} is a binary file, and not a log of text")
    else:
        text = content.decode("utf-8", errors="replace").lstrip("\ufeff")
        text = re.sub(r"\x1b\[[\d;]*[A-Za-z]", "", text)  # colors of a terminal
        formats = (_parse_json, _parse_dictionaries, _parse_table, _parse_lines)
        rows = next((rows for parse in formats if (rows := _merge_steps(parse(text)))), [])
        records = [] if rows else _parse_json(text) or _parse_dictionaries(text)
        if names := ", ".join(list(dict.fromkeys(str(key) for record in records for key in record))[:6]):
            raise ValueError(f"{name} has no metric that is known among {names}; call the reward `reward`")
    if not rows:
        raise ValueError(f"{name} {_NOT_A_LOG}")
    if not any("reward" in row for row in rows):  # a log of the accuracy alone
        rows = [{"reward" if key == "accuracy" else key: value for key, value in row.items()} for row in rows]
    return rows


def _find_log(folder: Path) -> Path:
    """Return the log in a folder: this package's, TRL's of its last checkpoint, or the largest event file."""
    states = [folder / "trainer_state.json", *folder.glob("checkpoint-*/trainer_state.json")]
    found = [file for file in states if file.is_file()]
    events = [file for file in folder.rglob("*tfevents*") if file.is_file()]
    if (folder / "metrics.jsonl").is_file():
        return folder / "metrics.jsonl"
    if found:
        return max(found, key=lambda file: file.stat().st_mtime)
    if events:
        return max(events, key=lambda file: file.stat().st_size)
    raise ValueError(
        f"{folder} holds neither metrics.jsonl nor trainer_state.json nor event files; name the log itself"
    )


# ---- formats ----


def _parse_json(text: str) -> list[Record]:
    """Read a JSON document: ``log_history`` or another list of objects, or columns; or one object per line."""
    found = []
    for part in (text, *text.splitlines()):
        try:
            found.append(json.loads(part))
        except (ValueError, RecursionError):
            continue  # not one document, a line between the records, or a last line that is cut off
        if part is text:
            break
    if len(found) == 1 and isinstance(found[0], dict):
        lists = {key: values for key, values in found[0].items() if isinstance(values, list)}
        records = [values for values in lists.values() if any(isinstance(value, dict) for value in values)]
        if records:
            found = found[0].get("log_history", records[0])
        elif lists:
            found = [dict(zip(lists, values, strict=False)) for values in zip(*lists.values(), strict=False)]
    elif len(found) == 1:
        found = found[0]
    return [record for record in found if isinstance(record, dict)] if isinstance(found, list) else []


def _parse_lines(text: str) -> list[Record]:
    """Read lines of names and numbers: ``step:3 - actor/entropy:0.4``, or ``Step 3 | Average reward: 0.5``.

    A known name that comes again begins the next step, so the numbers of a step may be spread over several lines.
    """
    word = r"[A-Za-z_][\w/@.]{0,80}"  # names have limits, because a long line of prose would take minutes
    pair = re.compile(rf"(?<![\w/@.])({word}(?: {word}){{0,5}})(?:\s*[:=|│]\s*|\s+)({_NUMBER})(?![\w.])")
    text = re.sub(_WRAPPED, r"\1", text)
    found: list[Record] = [{}]
    for line in text.splitlines():
        numbers = dict(pair.findall(line))
        if any(look_up(name) for name in numbers.keys() & found[-1].keys()):
            found.append({})
        found[-1].update(numbers)
    return found


def _parse_dictionaries(text: str) -> list[Record]:
    """Read the dictionaries that a trainer printed, between whatever else is in the text."""
    found = []
    for step, part in re.findall(rf"(?i:\b{_STEP_WORD}\W{{0,3}}(\d{{1,15}})[^{{}}\n]{{0,200}})?(\{{[^{{}}]*\}})", text):
        if len(part) > _LONGEST_DICTIONARY:
            continue
        part = re.sub(r"(?<=: )(-?)(nan|inf)\b", r"'\1\2'", part)
        part = re.sub(rf"\b{_WRAPPED}", r"\1", part)
        try:
            record = ast.literal_eval(part)
        except (ValueError, SyntaxError, RecursionError, MemoryError):  # the last two: brackets in brackets
            continue
        if isinstance(record, dict):
            found.append({"step": int(step), **record} if step else record)
    return found


def _parse_table(text: str) -> list[Record]:
    """Read a table with a line of names; Weights & Biases writes "RUN - train/reward", and the range in two more.

    Columns are separated by commas, semicolons, tabs, bars or several blanks.
    """
    lines = text.splitlines()
    for line in lines[:200]:
        mark = max(",;\t|", key=line.count)
        names = line.split(mark) if line.count(mark) else re.split(r"\s{2,}", line.strip())
        if len(names) > 1 and any(look_up(_read_column_name(name)) for name in names):
            break
    else:
        return []
    if line.count(mark):
        below = io.StringIO("\n".join(lines[lines.index(line) + 1 :]))
        rows: Iterable[list[str]] = _readable_rows(csv.reader(below, delimiter=mark))
        names = next(_readable_rows(csv.reader([line], delimiter=mark)), [])
        _check_one_run(names)
        if mark != ",":  # where the comma is the decimal point
            rows = ([re.sub(r"^(\s*[-+]?\d+),(\d+\s*)$", r"\1.\2", cell) for cell in row] for row in rows)
    else:
        rows = (re.split(r"\s{2,}", line.strip())[-len(names) :] for line in lines[lines.index(line) + 1 :])
    found = []
    for row in rows:
        cells = zip(names, row, strict=False)
        record = {_read_column_name(name): cell for name, cell in cells if not name.endswith(("__MIN", "__MAX"))}
        tag = next((record[name] for name in ("key", "metric", "tag", "name") if name in record), None)
        if tag is not None and "value" in record:  # one line per metric
            record = {**record, tag: record["value"]}
        found.append(record)
    return found


def _readable_rows(rows: Iterator[list[str]]) -> Iterator[list[str]]:
    """Yield the rows of a table, without those that `csv` refuses, such as one with 200 kB of text in a cell."""
    while True:
        try:
            yield next(rows)
        except csv.Error:
            continue
        except StopIteration:
            return


def _check_one_run(names: Iterable[str]) -> None:
    """Raise ValueError for a table of Weights & Biases with the same metric of several runs."""
    runs: dict[str, list[str]] = {}
    for name in names:
        run, dash, metric = name.strip(' "').rpartition(" - ")
        if dash and look_up(metric):
            runs.setdefault(metric, []).append(run)
    for metric, found in runs.items():
        if len(found) > 1:
            raise ValueError(f"the table has {metric} of {len(found)} runs ({', '.join(found)}); export one run alone")


def _read_column_name(text: str) -> str:
    return text.strip(' "').rpartition(" - ")[2]


def _parse_tensorboard(content: bytes, name: str) -> list[Record]:
    """Read the scalars of an event file, one record per step; needs the package tensorboard."""
    try:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
        from tensorboard.util.tensor_util import make_ndarray
    except ImportError as error:
        raise ValueError(f'{name}: reading it needs TensorBoard; pip install "grpo-edu[tracking]"') from error
    steps: dict[int, Record] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "events")
        file.write_bytes(content)
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                sizes = [dim.size for dim in value.tensor.tensor_shape.dim]  # which may be any number of billions
                if value.HasField("tensor") and math.prod(sizes) == 1:
                    number = make_ndarray(value.tensor)
                    if number.dtype.kind == "f":
                        steps.setdefault(event.step, {"step": event.step})[value.tag] = number.item()
    return [steps[step] for step in sorted(steps)]


# ---- names and numbers ----


@cache
def _load_names() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("metric_names.toml").read_text(encoding="utf-8"))


@cache
def _load_known() -> dict[frozenset[str], tuple[str, int]]:
    """Return the words of each known name → TRL's name, and its place among the names of that metric."""
    known: dict[frozenset[str], tuple[str, int]] = {}
    for metric, names in _load_names()["names"].items():
        for place, name in enumerate(names):
            known.setdefault(_words(name), (metric, place))
    return known


@cache
def _split(name: str) -> tuple[str, ...]:
    """Return the words of a name in lower case, also of one such as "meanReward", without the fillers."""
    words = re.findall(r"[a-z]+|\d+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower())
    fillers = set(_load_names()["fillers"])
    return tuple(word for word in words if word not in fillers)


def _words(name: str) -> frozenset[str]:
    return frozenset(_split(name))


def look_up(name: str) -> str:
    """Return TRL's name of a metric, or "" for a name that is not understood.

    >>> look_up("critic/score/mean"), look_up("reward_avg"), look_up("sparkle")
    ('reward', 'reward', '')
    """
    if re.match(r"rewards/.+/(mean|std)$", name) and _words(name) not in _load_known():
        return name
    return _load_known().get(_words(name), ("", 0))[0]


def is_understood(name: str) -> bool:
    """Return True if a metric is known, used by a rule or not."""
    return bool(look_up(name) or not _words(name) or _words(name) & set(_load_names()["unused"]))


def _merge_steps(records: Iterable[Record]) -> list[Row]:
    """Return the records that have a known metric, under TRL's names and in the order of their steps.

    Records of one step become one row. A dictionary without any known metric is not counted as a step.
    """
    merged: dict[int, Row] = {}
    count = 0
    for record in records:
        row = _rename(dict(_flatten(record)))
        step = row.pop("step", None)
        if all(value is None for value in row.values()) or not any(look_up(key) for key in row):
            continue
        count += 1
        place = count if step is None or not math.isfinite(step) else int(step)
        merged.setdefault(place, {}).update(row)
    return [{"step": step, **merged[step]} for step in sorted(merged)]


def _flatten(record: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield names and values; those of an object in the record get its name in front, as in "data/reward"."""
    for key, value in record.items():
        name = "/".join(part.strip() for part in f"{prefix}{key}".split("/"))
        if isinstance(value, dict):
            yield from _flatten(value, f"{name}/")
        else:
            yield re.sub(r"^(?:train|data|metrics)/", "", name), value


def _rename(record: Mapping[str, Any]) -> Row:
    """Return the numbers of a record under TRL's names; the table's first of several names of a metric counts."""
    row: Row = {}
    places: dict[str, int] = {}
    evaluations = set(_load_names()["evaluations"])
    for key, value in record.items():
        if look_up(key) == "step":
            value = str(value).partition("/")[0]
        is_known, number = _read_number(value)
        if not is_known or key.startswith("_") and key != "_step" or set(_split(key)[:1]) & evaluations:
            continue
        if re.fullmatch(r"rewards/[^/]+", key) and _words(key) not in _load_known():  # TRL's first version
            key = f"{key}/mean"
        name = look_up(key) or key
        place = _load_known().get(_words(key), ("", 0))[1]
        if name not in row or place < places[name]:
            row[name], places[name] = number, place
    return row


def _read_number(value: Any) -> tuple[bool, float | None]:
    """Return whether a value is a number, and the number; null is one that is not finite, as this package writes it.

    A list, such as the rewards of a step, counts as its mean.
    """
    if value is None:
        return True, None
    is_list = isinstance(value, list) and value and all(isinstance(entry, int | float) for entry in value)
    if isinstance(value, bool) or not (is_list or isinstance(value, int | float | str)):
        return False, None
    text = re.sub(rf"^\s*{_WRAPPED}\s*$", r"\1", value) if isinstance(value, str) else value
    try:
        if isinstance(text, list):
            return True, fmean(text)
        if isinstance(text, str) and text.strip().endswith("%"):
            return True, float(text.strip()[:-1]) / 100
        return True, float(text)
    except (ValueError, OverflowError):  # text, or a whole number that no float can hold
        return False, None
