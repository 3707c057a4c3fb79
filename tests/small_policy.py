"""A folder with a random policy that trains in moments, for tests of whole runs."""

from pathlib import Path

from random_policy import byte_tokenizer, random_model

from grpo_edu.models import save_policy


def save_small_policy(folder: Path) -> Path:
    """Save a random Qwen2 whose completions end after 16 tokens on average; returns the folder."""
    tokenizer = byte_tokenizer()
    model = random_model(tokenizer, max_position_embeddings=1024, stop_ids=range(0, 256, 16))
    save_policy(model, tokenizer, folder)
    return folder
