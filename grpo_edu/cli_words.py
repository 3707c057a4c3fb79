"""What every command of `grpo-edu` says in the same words."""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import Any

from grpo_edu.processes import this_process


def say_loading(model: str) -> None:
    """A sign of life while libraries and weights load, for a person at a terminal."""
    if sys.stderr.isatty() and this_process().is_main:
        print(f"grpo-edu: loading {model}", file=sys.stderr)


def complain(text: str, error: BaseException | None = None) -> None:
    """One line on stderr, with what the error's notes say was kept. Of several processes only the main one speaks."""
    if not this_process().is_main:
        return
    kept = "".join(f"; {note}" for note in notes_of(error))
    print("grpo-edu: " + " ".join(f"{text}{kept}".split()), file=sys.stderr)


def notes_of(error: BaseException | None) -> list[str]:
    """The notes that were added to an error."""
    return getattr(error, "__notes__", [])


def chosen_dtype(dtype: str, model: str, *, trains_weights: bool) -> str:
    """The number format to load the model in; what was measured for it is said on stderr."""
    if dtype == "float32":
        return dtype
    from grpo_edu.probe import choose_dtype
    from grpo_edu.run_folder import model_source

    chosen, why = choose_dtype(dtype, model_source(model), trains_weights=trains_weights)
    if this_process().is_main:
        print(f"grpo-edu: {why}", file=sys.stderr)
    return chosen


def given_options(arguments: Namespace, names: list[str]) -> dict[str, Any]:
    """What was typed of these options, whose default is to be absent."""
    return {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
