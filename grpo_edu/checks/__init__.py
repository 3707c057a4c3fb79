"""Checks for the exercises: what passed, what failed on which small input, and which mistake it looks like.

Every exercise is one `Exercise`, called with what the student wrote: ``check_group_advantages(group_advantages)``.
``python -m grpo_edu.checks`` tries each of them on right and on wrong answers, and prints the table.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_edu.checks.core import Exercise

TOPICS = (  # modules of this folder, in the order of the course
    "hardware",
    "threads",
    "number_formats",
    "startup",
    "footprint",
    "reading",
    "rewards",
    "advantages",
    "ties",
    "baselines",
    "tokens",
    "objective",
    "reduction",
    "training",
    "update_rules",
    "run_readings",
    "evaluation",
    "reports",
    "quantization",
    "quantized_models",
    "quantization_error",
    "continual",
    "protection",
    "fisher",
    "ewc",
    "memory",
    "in_parts",
    "lora",
    "diagnosis",
    "decision_tree",
    "batch_signs",
    "batch_tokens",
    "mending",
)


def exercises() -> dict[str, "Exercise"]:
    """Name → exercise, of all topics, in the order of the course."""
    from grpo_edu.checks.core import Exercise

    found: dict[str, Exercise] = {}
    for topic in TOPICS:
        for value in vars(import_module(f"grpo_edu.checks.{topic}")).values():
            if isinstance(value, Exercise):
                found[value.name] = value
    return found


def __getattr__(name: str) -> Any:
    """`check_NAME`, imported on first use."""
    if name.startswith("check_"):
        known = exercises()
        if name.removeprefix("check_") in known:
            return known[name.removeprefix("check_")]
    raise AttributeError(f"module 'grpo_edu.checks' has no attribute {name!r}")
