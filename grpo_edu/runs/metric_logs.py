"""Read the logs of several trainers as rows of metrics under TRL's keys, for `grpo_edu.runs.log_diagnosis`.

==============================================  ===================================================================
what                                            how it is recognized
==============================================  ===================================================================
a run of this package                           a folder with ``metrics.jsonl``, or that file
a run of TRL                                    a folder with ``trainer_state.json`` (also in its checkpoints), or it
what a trainer printed                          a text with dictionaries, ``{'loss': 0.0, 'reward': 0.5, ...}``
what verl printed                               a text with lines ``step:1 - critic/score/mean:0.5 - ...``
an export of Weights & Biases, a table          a CSV file with a line of names, or JSON lines
TensorBoard's event files                       a folder with ``events.out.tfevents...``, or such a file
==============================================  ===================================================================
"""

from __future__ import annotations

import ast
import csv
import io
import json
import math
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Row = dict[str, float | None]
Record = dict[str, Any]

MOST_BYTES = 50_000_000
# Names of other trainers and of older versions of TRL → TRL's; where two are logged, the first of them counts.
_NAMES = {
    "Training Loss": "loss",
    "completion_length": "completions/mean_length",
    "completions/mean_length": "completions/mean_length",
    "clip_ratio": "clip_ratio/region_mean",
    "critic/score/mean": "reward",
    "critic/rewards/mean": "reward",
    "critic/score/max": "reward_max",
    "critic/rewards/max": "reward_max",
    "critic/score/min": "reward_min",
    "critic/rewards/min": "reward_min",
    "actor/entropy": "entropy",
    "actor/entropy_loss": "entropy",
    "actor/kl_loss": "kl",
    "actor/pg_clipfrac": "clip_ratio/region_mean",
    "actor/grad_norm": "grad_norm",
    "actor/lr": "learning_rate",
    "actor/loss": "loss",
    "response_length/mean": "completions/mean_length",
    "response_length/min": "completions/min_length",
    "response_length/max": "completions/max_length",
    "response_length/clip_ratio": "completions/clipped_ratio",
}
_STEPS = ("step", "global_step", "training/global_step", "global_step/max_steps", "Step", "_step")
_NOT_A_LOG = (
    "is no log that can be read here: a log of this package, trainer_state.json, printed dictionaries, a CSV or JSON "
    "lines export, verl's console output and TensorBoard's event files can"
)


def read_metrics(path: str | Path) -> list[Row]:
    """The metrics of each logged step, from a file or the folder of a run; "step" counts them where no step is logged.

    Raises ValueError, with the name of the file: no log, too large, or without any number. FileNotFoundError: no file.
    """
    path = Path(path)
    if path.is_dir():
        path = _log_in(path)
    with open(path, "rb") as file:
        return metrics_of(file.read(MOST_BYTES + 1), str(path))


def metrics_of(content: bytes, name: str) -> list[Row]:
    """The same from the content of a file; `name` tells the kind of some, and is what an error names.

    >>> metrics_of(b"{'loss': '0.0', 'reward': '0.25'}\\n{'loss': nan, 'reward': 0.5}", "printed.txt")
    [{'step': 1, 'loss': 0.0, 'reward': 0.25}, {'step': 2, 'loss': nan, 'reward': 0.5}]
    >>> metrics_of(b"step:7 - critic/score/mean:0.5 - actor/entropy:0.2", "verl.txt")
    [{'step': 7, 'reward': 0.5, 'entropy': 0.2}]
    """
    if len(content) > MOST_BYTES:
        raise ValueError(f"{name} is larger than {MOST_BYTES / 1e6:.0f} MB, the most that is read; cut out the metrics")
    if not content.strip():
        raise ValueError(f"{name} is empty")
    if "tfevents" in Path(name).name:
        records: Iterable[Record] = _of_tensorboard(content, name)
    elif content.startswith((b"\xff\xfe", b"\xfe\xff")):  # what PowerShell writes with `>`
        return metrics_of(content.decode("utf-16", errors="replace").encode(), name)
    elif b"\0" in content:
        raise ValueError(f"{name} is a binary file, and not a log of text")
    else:
        text = content.decode("utf-8", errors="replace").lstrip("\ufeff")
        records = _of_json(text) or _of_verl(text) or _of_printed(text) or _of_table(text)
    rows = list(_rows(records))
    if not rows:
        raise ValueError(f"{name} {_NOT_A_LOG}")
    if not any("reward" in row for row in rows):
        names = ", ".join(list(dict.fromkeys(key for row in rows for key in row if key != "step"))[:6])
        raise ValueError(f"{name} has no reward among its metrics ({names}), so it is not the log of a GRPO run")
    return rows


def _log_in(folder: Path) -> Path:
    """The log in the folder of a run: this package's, TRL's of its last checkpoint, or the largest event file."""
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


def _of_json(text: str) -> list[Record]:
    """A JSON document with ``log_history``, a list of objects, or one object per line (a last line may be cut off)."""
    try:
        found = json.loads(text)
        found = found.get("log_history", [found]) if isinstance(found, dict) else found
    except (ValueError, RecursionError):
        found = []
        for line in text.splitlines():
            try:
                found.append(json.loads(line))
            except (ValueError, RecursionError):
                continue
    return [record for record in found if isinstance(record, dict)] if isinstance(found, list) else []


def _of_verl(text: str) -> list[Record]:
    """Lines of verl's console: ``step:3 - actor/entropy:0.4 - critic/score/mean:0.1``, also behind a prefix of Ray."""
    lines = (match[0] for line in text.splitlines() if (match := re.search(r"\bstep:\d+ - .*", line)))
    return [dict(part.rpartition(":")[::2] for part in line.split(" - ")) for line in lines]


def _of_printed(text: str) -> list[Record]:
    """Dictionaries that a trainer printed, between whatever else is in the text."""
    found = []
    for part in re.findall(r"\{[^{}]*\}", text):
        part = re.sub(r"(?<=: )(-?)(nan|inf)\b", r"'\1\2'", part)
        part = re.sub(r"\b(?:np|torch|numpy)\.\w+\(([^()]*)\)", r"\1", part)
        try:
            record = ast.literal_eval(part)
        except (ValueError, SyntaxError, RecursionError, MemoryError):  # the last two: brackets in brackets
            continue
        if isinstance(record, dict):
            found.append(record)
    return found


def _of_table(text: str) -> list[Record]:
    """A table with a line of names; Weights & Biases writes "RUN - train/reward", and the range of each in two more."""
    first = text.partition("\n")[0]
    mark = max(",;\t|", key=first.count)
    if not first.count(mark):
        return []
    found: list[Record] = []
    for line in csv.DictReader(io.StringIO(text), delimiter=mark):
        names = {key: (key or "").strip().rpartition(" - ")[2] for key in line if key}
        found.append({name: line[key] for key, name in names.items() if not name.endswith(("__MIN", "__MAX"))})
    return found


def _of_tensorboard(content: bytes, name: str) -> list[Record]:
    """The scalars of an event file, one record per step; needs the package tensorboard."""
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
                if (
                    value.HasField("tensor")
                    and (number := make_ndarray(value.tensor)).size == 1
                    and number.dtype.kind == "f"
                ):
                    steps.setdefault(event.step, {"step": event.step})[value.tag] = float(number)
    return [steps[step] for step in sorted(steps)]


# ---- names and numbers ----


def _rows(records: Iterable[Record]) -> Iterator[Row]:
    """Records under TRL's names, in the order of their steps; records of one step become one row."""
    merged: dict[int, Row] = {}
    for count, record in enumerate(records, 1):
        plain = {re.sub(r"\s*/\s*", "/", str(key)).strip().removeprefix("train/"): record[key] for key in record}
        row: Row = {}
        for key, value in plain.items():
            known, number = _number(value)
            if known and key not in _STEPS and not key.startswith(("_", "eval")):
                row.setdefault(_name(key, plain), number)
        if all(number is None for number in row.values()):
            continue  # no metrics, or a line of an export that holds those of an evaluation
        step = next((_step(plain[key]) for key in _STEPS if key in plain), None)
        merged.setdefault(count if step is None else step, {}).update(row)
    for step in sorted(merged):
        yield {"step": step, **merged[step]}


def _name(key: str, record: Record) -> str:
    """TRL's name of a metric. Its first version logged ``rewards/NAME`` for today's ``rewards/NAME/mean``."""
    if key.startswith("rewards/") and key.count("/") == 1:
        return f"{key}/mean"
    return _NAMES.get(key, key)


def _number(value: Any) -> tuple[bool, float | None]:
    """Whether a value is a number, and the number; null is one that is not finite, as this package writes it."""
    if value is None:
        return True, None
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return False, None
    try:
        return True, float(value)
    except ValueError:
        inner = re.fullmatch(r"\s*(?:np|numpy|torch)\.\w+\(([^()]*)\)\s*", value) if isinstance(value, str) else None
        return _number(inner[1]) if inner else (False, None)


def _step(value: Any) -> int | None:
    known, number = _number(str(value).partition("/")[0])
    return int(number) if known and number is not None and math.isfinite(number) else None
