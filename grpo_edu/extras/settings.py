"""Settings with a text on each: it stands once, at the field, and the docstring and the command line show it."""

from __future__ import annotations

import inspect
from dataclasses import field, fields
from typing import Any, TypeVar

Class = TypeVar("Class")


def setting(default: Any, text: str) -> Any:
    """A field of a dataclass with its default and what a reader is told about it."""
    return field(default=default, metadata={"help": text})


def field_help(options: Any) -> dict[str, str]:
    """The text on each field of a dataclass.

    >>> from grpo_edu.config import GRPOConfig
    >>> field_help(GRPOConfig)["num_iterations"]
    'μ, updates per batch; clipping needs at least 2'
    """
    return {one.name: one.metadata.get("help", "") for one in fields(options)}


def documented(options: type[Class]) -> type[Class]:
    """Add the texts on the fields to the docstring of a dataclass."""
    texts = [f"{name}: {text}." for name, text in field_help(options).items() if text]
    options.__doc__ = inspect.cleandoc(options.__doc__ or "") + "\n\n" + "\n".join(texts)
    return options
