"""Find out what the name of a model refers to, and within seconds whether the Hub answers.

The libraries that load from the Hub ask many times before they give up, which takes minutes without a network.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

GGUF_SUFFIX = ".gguf"
HUB_SECONDS = 4.0
# First parts of a path that no owner of models on the Hub is likely to have: where people keep their own.
_FOLDERS = ("runs", "models", "checkpoints", "outputs", "data")


def looks_like_path(name: str) -> bool:
    """Return True if the name looks like a path, not like a shipped model or a Hub id (owner/name).

    >>> looks_like_path("runs/my-run"), looks_like_path("../tiny"), looks_like_path("Qwen/Qwen2-0.5B")
    (True, True, False)
    """
    first, slash, _ = name.partition("/")
    like_path = name.startswith((".", "~", "/")) or "\\" in name or name.count("/") > 1
    return like_path or bool(slash and (first in _FOLDERS or Path(first).is_dir()))


def is_gguf(name: str | Path) -> bool:
    """Return whether a model's name is that of a GGUF file.

    >>> is_gguf("Model.Q4_K_M.gguf"), is_gguf("tiny")
    (True, False)
    """
    return Path(name).suffix.lower() == GGUF_SUFFIX and not Path(name).expanduser().is_dir()


def missing_folder_message(name: str | Path) -> str:
    """Return the error message for a missing folder.

    >>> missing_folder_message("runs/nothing")
    'folder runs/nothing does not exist'
    """
    return f"{name} is a file" if Path(name).expanduser().is_file() else f"folder {name} does not exist"


def read_run_config(folder: str | Path) -> dict[str, Any] | None:
    """Return the options of the run in this folder; None if the folder holds no run of grpo_edu."""
    try:
        content = json.loads((Path(folder) / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and "grpo_edu" in content else None


def model_source(name: str | Path) -> str | Path:
    """Return what to load for a model's name: the model inside a run's folder, or else the name itself.

    Raises FileNotFoundError for a run that was stopped before it saved a model.
    """
    folder = Path(name).expanduser()
    if read_run_config(folder) is None:
        return name
    if not (folder / "model").is_dir():
        raise FileNotFoundError(
            f"model: the run in {folder} has no model, because it was stopped too early; train again"
        )
    return folder / "model"


def why_hub_unreachable() -> str:
    """Return the reason why nothing can be loaded from the Hub; "" if it answers.

    Files in the cache can still be used. The request runs in a thread, because looking up a name has no time limit.
    """
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    answered = threading.Event()

    def ask() -> None:
        with suppress(Exception):  # whatever goes wrong, there was no answer
            get_session().head(constants.ENDPOINT, timeout=HUB_SECONDS)
            answered.set()

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(HUB_SECONDS)
    return "" if answered.is_set() else f"{constants.ENDPOINT} did not answer within {HUB_SECONDS:g} seconds"


@contextmanager
def offline_if_hub_unreachable(from_hub: bool = True) -> Iterator[str]:
    """A context in which libraries load from their cache alone if the Hub does not answer.

    It yields `why_hub_unreachable()`.

    from_hub: False if nothing is loaded from the Hub, so that it is not asked.
    """
    from huggingface_hub import constants

    obstacle, usual = why_hub_unreachable() if from_hub else "", constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = usual or bool(obstacle)
    try:
        yield obstacle
    finally:
        constants.HF_HUB_OFFLINE = usual
