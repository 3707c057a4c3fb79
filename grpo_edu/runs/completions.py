"""What a run sampled: completions with the reward of each function and the advantage, in `completions.jsonl.gz`.

One JSON line per step, compressed. Each line is a member of the gzip file of its own, so that a killed run leaves a
file that can be read, and any tool that reads gzip reads all of it.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_edu.config import GRPOConfig
from grpo_edu.problems.hub import missing_folder_message
from grpo_edu.runs.folder import COMPLETIONS
from grpo_edu.runs.log import to_plain

if TYPE_CHECKING:
    from grpo_edu.batch import Batch


_LONGEST_LINE = 2**27  # bytes of a step; a small file may hold a line that fills the memory


@dataclass(frozen=True)
class Sampled:
    """One completion of a step.

    prompt: as the model read it. rewards: the reward of each function, None if it does not apply.
    truncated: it did not end; None where that is not known.
    """

    step: int
    prompt: str
    completion: str
    rewards: Mapping[str, float | None]
    reward: float
    advantage: float
    truncated: bool | None


def columns_of_batch(batch: Batch | None, names: Sequence[str]) -> dict[str, Any]:
    """Return the columns of a batch that are kept, B entries each. names: names of its K reward functions."""
    assert batch is not None
    return {
        "prompt": batch.rollout.prompts,
        "completion": batch.rollout.completions,
        "rewards": to_plain(dict(zip(names, batch.rewards_per_func.T.tolist(), strict=True))),
        "reward": to_plain(batch.rewards.tolist()),
        "advantage": [round(value, 6) for value in batch.advantages.tolist()],
        "truncated": batch.rollout.is_truncated.tolist(),
    }


class GzipLines(AbstractContextManager):
    """A file of JSON lines with a "step", each a gzip member of its own; lines can be appended.

    Args:
        path: the file, made when the first line is written. done: steps that the file keeps, of a run that is resumed;
            later ones are dropped.
    """

    def __init__(self, path: Path, *, done: int = 0) -> None:
        kept = (
            [line for line in read_lines(path) if json.loads(line)["step"] <= done] if done and path.is_file() else []
        )
        path.unlink(missing_ok=True)
        self._path = path
        self._file: FileIO | None = None
        for line in kept:
            self.write(line)

    def write(self, line: bytes) -> None:
        """Append one line; raises OSError, with what to do, if the disk is full."""
        if self._file is None:
            self._file = open(self._path, "ab", buffering=0)
        member = gzip.compress(line + b"\n", mtime=0)
        try:
            while member:
                member = member[self._file.write(member) :]
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror}; free some space", str(self._path)) from error

    def __exit__(self, *exception: object) -> None:
        if self._file is not None:
            self._file.close()


class CompletionLog(GzipLines):
    """Append the completions of each step to the file of a run, at most `most` in the whole run.

    Where that is fewer than the run samples, the first groups of every step are kept; where it is fewer than one group
    per step, one group from evenly spaced steps, including the last.

    Args:
        path: the file. most: completions; 0 keeps none. config: of the run. done: steps that the file keeps, of a run
            that is resumed; later ones are dropped.
    """

    def __init__(self, path: Path, most: int, config: GRPOConfig, *, done: int = 0) -> None:
        size, steps = config.num_generations, config.max_steps
        groups = most // (steps * size)  # per step
        self.steps, self.every = steps, 1 if groups else math.ceil(steps / max(1, most // size))
        self.rows = groups * size or min(most, size)
        self.most = most
        super().__init__(path, done=done)

    def append(self, step: int, columns: Mapping[str, Any]) -> None:
        """Write the completions of one step."""
        if not self.most or (self.steps - step) % self.every:
            return
        cut = {
            name: {func: column[: self.rows] for func, column in values.items()}
            if isinstance(values, Mapping)
            else values[: self.rows]
            for name, values in columns.items()
        }
        self.write(json.dumps({"step": step, **cut}, ensure_ascii=False).encode())


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of the file, up to one that a kill cut short, that is damaged or that is too long for a step."""
    with gzip.open(path) as file:
        while True:
            try:
                line = file.readline(_LONGEST_LINE)
            except (EOFError, gzip.BadGzipFile, zlib.error):
                return
            if not line.endswith(b"\n"):
                return
            yield line[:-1]


def kept_file(folder: str | Path, name: str) -> Path:
    """Return the path of such a file in a run's folder, where it may be missing.

    Raises FileNotFoundError if there is no such folder, and ValueError if the file holds no complete line.
    """
    path = Path(folder).expanduser() / name
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"`run`: {missing_folder_message(folder)}; name the folder that `grpo-edu train` wrote."
        )
    if path.is_file() and next(read_lines(path), None) is None:
        raise ValueError(f"`run`: {path} is damaged, so nothing can be read from it; train again.")
    return path


def recorded_steps(steps: Sequence[int | str], max_steps: int) -> set[int]:
    """Return the numbers of steps that are to be recorded.

    Raises ValueError for what is neither the number of a step nor "first", "last" or "all".

    >>> sorted(recorded_steps(("first", "10", "last"), max_steps=30))
    [1, 10, 30]
    """
    named = {"first": (1,), "last": (max_steps,), "all": range(1, max_steps + 1)}
    found: set[int] = set()
    for one in map(str, steps):
        if one not in named and not (one.isdecimal() and 1 <= int(one) <= max_steps):
            raise ValueError(
                f"`record_token_steps`: {one!r} is not a step of a run with {max_steps}; write numbers from 1 to "
                f"{max_steps}, first, last or all, with commas."
            )
        found.update(named[one] if one in named else (int(one),))
    return found


def read_completions(folder: str | Path, step: int | None = None) -> list[Sampled]:
    """Read the completions that a run kept of one step; None takes the last step that was kept.

    Raises ValueError if the run kept none, or none of this step, or if the file is not as a run writes it.
    """
    path = kept_file(folder, COMPLETIONS)
    steps, found = list[int](), list[Sampled]()
    try:
        for line in read_lines(path) if path.is_file() else ():  # of many steps, only one is kept in memory
            record = json.loads(line)
            steps.append(record["step"])
            if step in (None, record["step"]):
                found = _sampled(record)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"`run`: {path} is damaged ({type(error).__name__}: {error}); train again.") from error
    if not steps:
        raise ValueError(f"`run`: {folder} keeps no completions; it holds no run, or one with --keep-completions 0.")
    if step is not None and step not in steps:
        known = f"{steps[0]} to {steps[-1]}" + (f", every {steps[1] - steps[0]} steps" if len(steps) > 1 else "")
        raise ValueError(f"`step`: no completions of step {step} are kept in {folder}; it keeps steps {known}.")
    return found


def _sampled(line: Mapping[str, Any]) -> list[Sampled]:
    """Return the completions of a line of the file."""
    rows = zip(*(line[name] for name in ("prompt", "completion", "reward", "advantage", "truncated")), strict=True)
    return [
        Sampled(
            line["step"],
            prompt,
            completion,
            {name: values[row] for name, values in line["rewards"].items()},
            math.nan if reward is None else reward,
            advantage,
            truncated,
        )
        for row, (prompt, completion, reward, advantage, truncated) in enumerate(rows)
    ]


def by_reward(sampled: Sequence[Sampled], *, best: bool = False) -> list[Sampled]:
    """Order completions by their reward, the lowest first or, with `best`, the highest; equal ones keep their order."""
    return sorted(sampled, key=lambda one: -one.reward if best else one.reward)


def sampled_text(one: Sampled) -> str:
    """Return one completion as a terminal and summary.md show it."""
    parts = ", ".join(f"{name} {'-' if value is None else f'{value:.2f}'}" for name, value in one.rewards.items())
    end = "; cut off at the length limit" if one.truncated else ""
    return f"reward {one.reward:.2f} ({parts}), advantage {one.advantage:+.2f}{end}\n{one.completion}"
