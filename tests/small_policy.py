"""A folder with a random policy that trains in moments, a reward for it, and what comes of a run: for tests of runs."""

from pathlib import Path

import pytest
import torch
from random_policy import byte_tokenizer, random_model

from grpo_edu.models import save_policy


def save_small_policy(folder: Path) -> Path:
    """Save a random Qwen2 whose completions end after 16 tokens on average; returns the folder."""
    tokenizer = byte_tokenizer()
    model = random_model(tokenizer, max_position_embeddings=1024, stop_ids=range(0, 256, 16))
    save_policy(model, tokenizer, folder)
    return folder


def brevity(completions, completion_ids, **columns) -> list[float]:
    """A reward that seldom ties: the rows of a random policy end at different lengths."""
    return [1 / len(ids) for ids in completion_ids]


def same_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def names_in(folder: Path) -> set[str]:
    """What a run's folder holds, apart from the file of its lock."""
    return {path.name for path in folder.iterdir()} - {".lock"}


def fill(place: Path) -> None:
    """Write until the disk is full."""
    with open(place / "filler", "ab", buffering=0) as filler, pytest.raises(OSError, match="No space left"):
        while True:
            filler.write(bytes(4096))
