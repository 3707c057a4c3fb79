"""What one GRPO step did, as plain numbers under TRL's metric keys, and a log of them that survives a kill.

Definitions follow TRL's `GRPOTrainer`, with one deliberate difference: `frac_reward_zero_std` counts the groups
whose rewards are exactly equal, where TRL asks whether a floating-point standard deviation is close to 0.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_edu.advantages import degenerate_groups

if TYPE_CHECKING:
    from grpo_edu.rollout import Rollout


def reward_metrics(
    rewards_per_func: Tensor, rewards: Tensor, num_generations: int, names: Sequence[str]
) -> dict[str, float]:
    """Means and sample standard deviations (ddof 1) of the rewards, over the whole batch, NaN left out.

    `reward_std` is the spread over all B rows, not the mean of the groups' spreads. A standard deviation of fewer
    than two values is NaN.

    Args:
        rewards_per_func: (B, K), NaN where a function does not apply.
        rewards: (B,), the weighted sums that advantages are made of.
        num_generations: G, rows a group; divides B.
        names: K distinct names of the reward functions.

    Raises:
        ValueError: shapes or the number of names do not fit, or a name occurs twice.

    >>> rewards = torch.tensor([1.0, 0.0, 1.0, 1.0])
    >>> metrics = reward_metrics(rewards[:, None], rewards, 2, ["accuracy_reward"])
    >>> metrics["reward"], metrics["reward_std"], metrics["frac_reward_zero_std"]
    (0.75, 0.5, 0.5)
    """
    if rewards_per_func.dim() != 2 or rewards_per_func.shape[1] != len(names):
        shape = tuple(rewards_per_func.shape)
        raise ValueError(f"rewards_per_func must be (B, K) with K = {len(names)} names, got shape {shape}")
    if rewards.shape != rewards_per_func.shape[:1]:
        raise ValueError(f"rewards must be (B,) = ({len(rewards_per_func)},), got shape {tuple(rewards.shape)}")
    if len(set(names)) != len(names):
        raise ValueError(f"names must be distinct, got {list(names)}: give each reward function its own __name__")
    metrics = {}
    for name, column in zip(names, rewards_per_func.T, strict=True):
        metrics[f"rewards/{name}/mean"] = column.nanmean().item()
        metrics[f"rewards/{name}/std"] = _nanstd(column).item()
    metrics["reward"] = rewards.nanmean().item()
    metrics["reward_std"] = _nanstd(rewards).item()
    metrics["frac_reward_zero_std"] = degenerate_groups(rewards, num_generations).float().mean().item()
    return metrics


def completion_metrics(completion_mask: Tensor, is_truncated: Tensor) -> dict[str, float]:
    """Lengths in tokens, the closing EOS included, and the share of completions cut at the limit.

    The `terminated` lengths look only at completions that ended by themselves; they are 0 where none did.

    Args:
        completion_mask: (B, C), 1 through the first EOS inclusive.
        is_truncated: (B,) bool, True where no EOS came.

    Raises:
        ValueError: shapes do not fit or there are no completions.

    >>> mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    >>> metrics = completion_metrics(mask, torch.tensor([False, True]))
    >>> metrics["completions/mean_length"], metrics["completions/mean_terminated_length"]
    (2.5, 2.0)
    """
    if completion_mask.dim() != 2 or completion_mask.shape[0] == 0:
        raise ValueError(f"completion_mask must be (B, C) with B ≥ 1, got shape {tuple(completion_mask.shape)}")
    if is_truncated.shape != completion_mask.shape[:1]:
        rows = completion_mask.shape[0]
        raise ValueError(f"is_truncated must be (B,) = ({rows},), got shape {tuple(is_truncated.shape)}")
    lengths = completion_mask.sum(dim=1).float()
    terminated = lengths[~is_truncated.bool()]
    if terminated.numel() == 0:
        terminated = torch.zeros(1)
    metrics = {}
    for suffix, values in (("length", lengths), ("terminated_length", terminated)):
        metrics[f"completions/mean_{suffix}"] = values.mean().item()
        metrics[f"completions/min_{suffix}"] = values.min().item()
        metrics[f"completions/max_{suffix}"] = values.max().item()
    metrics["completions/clipped_ratio"] = is_truncated.float().mean().item()
    return metrics


def rollout_metrics(
    rollout: "Rollout", rewards_per_func: Tensor, rewards: Tensor, names: Sequence[str]
) -> dict[str, float]:
    """`reward_metrics` and `completion_metrics` of one rollout in one dict.

    Args:
        rollout: the B completions, from `generate`.
        rewards_per_func: (B, K). rewards: (B,). names: K distinct names.

    Raises:
        ValueError: as the two functions do.
    """
    return {
        **reward_metrics(rewards_per_func, rewards, rollout.num_generations, names),
        **completion_metrics(rollout.completion_mask, rollout.is_truncated),
    }


def masked_mean(values: Tensor, mask: Tensor) -> float:
    """Mean over the tokens of all completions: TRL's reduction for `entropy`, `kl` and `clip_ratio/*`.

    Args:
        values: (B, C), one number a token; or (B, 1), one number a sequence, averaged without the mask.
        mask: (B, C), 1 where a token counts.

    Raises:
        ValueError: the shapes do not fit.

    >>> masked_mean(torch.tensor([[1.0, 9.0], [2.0, 3.0]]), torch.tensor([[1, 0], [1, 1]]))
    2.0
    """
    if values.shape != mask.shape:
        if values.shape == (mask.shape[0], 1):
            return values.float().mean().item()
        raise ValueError(f"values {tuple(values.shape)} must have the shape of mask {tuple(mask.shape)}")
    # where, not a product: padding may hold inf or NaN
    kept = torch.where(mask.bool(), values.float(), 0.0)
    return (kept.sum() / mask.sum().clamp(min=1)).item()


def _nanstd(values: Tensor) -> Tensor:
    """Sample standard deviation of a vector without its NaNs; NaN for fewer than two values."""
    kept = values[~values.isnan()]
    return kept.std() if kept.numel() > 1 else values.new_tensor(math.nan)


class RunLog:
    """Append one JSON object a line; each line reaches the operating system before `append` returns.

    A log that a kill cut in the middle of its last line can be opened again: the broken tail is dropped, so that
    the next line starts clean. NaN and infinity, which JSON lacks, are written as null.

    Args:
        path: the file; it is made, with its folder, where it does not exist.

    Raises:
        OSError: the file cannot be opened or written (a full disk); it names the file, and the lines before stay.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
    >>> with RunLog(path) as log:
    ...     log.append({"step": 1, "reward": 0.5, "kl": float("nan")})
    >>> read_log(path)
    [{'step': 1, 'reward': 0.5, 'kl': None}]
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _mend_tail(self.path)
        self._file = open(self.path, "ab", buffering=0)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record; values may be numbers, strings, None, lists, dicts or one-element tensors."""
        line = json.dumps(_plain(record), allow_nan=False).encode() + b"\n"
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            reason = f"{error.strerror}, cannot append to the run log (free some space; earlier lines are kept)"
            raise OSError(error.errno, reason, str(self.path)) from error

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        self._file.close()

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_log(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read what `RunLog` wrote. A last line that a kill cut short is left out; null reads as None.

    Raises:
        ValueError: any other line is not a JSON object; the message starts with file:line.
        FileNotFoundError: there is no such file.
    """
    *lines, tail = Path(path).read_bytes().split(b"\n")
    if _parse(tail) is not None:
        lines.append(tail)
    records = []
    for number, line in enumerate(lines, start=1):
        record = _parse(line)
        if record is None:
            text = line[:60].decode(errors="replace")
            raise ValueError(f"{path}:{number}: not a JSON object: {text!r}; mend or delete this line")
        records.append(record)
    return records


def _parse(line: bytes) -> dict[str, Any] | None:
    """The JSON object on a line, None if it is none."""
    try:
        record = json.loads(line)
    except ValueError:  # not JSON, or not UTF-8
        return None
    return record if isinstance(record, dict) else None


def _mend_tail(path: Path) -> None:
    """Drop a last line that was cut short; close one that only lacks its newline."""
    if not path.is_file():
        return
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end == len(content):
        return
    with open(path, "r+b") as file:
        if _parse(content[end:]) is not None:
            file.seek(0, os.SEEK_END)
            file.write(b"\n")
        else:
            file.truncate(end)


def _plain(value: Any) -> Any:
    """A JSON-able copy: scalars out of tensors and numpy, NaN and infinity to None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
