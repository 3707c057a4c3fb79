"""Checks for the exercises: which parts passed, which failed on which small input, and which mistake it looks like.

Every exercise is one `Exercise`, which is called with the student's function:
``check_group_advantages(group_advantages)``. There is one module for each notebook's exercises; `core`, `compare` and
`feedback` are the engine. ``python -m grpo_edu.checks`` tries every check on right and wrong answers. `your_turn` is
the feedback on the short questions inside the notebooks, and `unlabelled_runs` draws the runs of an exercise.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_edu.checks.core import Exercise

TOPICS = (  # modules of this folder, in the order of the course
    "cpu_setup",
    "reward_functions",
    "policy_gradients",
    "group_advantages",
    "objective",
    "losses",
    "grpo_run",
    "evaluation",
    "quantization",
    "continual",
    "memory_and_lora",
    "diagnosis",
    "real_model",
    "own_task",
    "turns",
)

OTHERS = {"your_turn": "feedback", "unlabelled_runs": "diagnosis"}  # what notebooks use besides: name → module


def exercises() -> dict[str, "Exercise"]:
    """All exercises by name, in the order of the course."""
    from grpo_edu.checks.core import Exercise

    found: dict[str, Exercise] = {}
    for topic in TOPICS:
        for value in vars(import_module(f"grpo_edu.checks.{topic}")).values():
            if isinstance(value, Exercise):
                found[value.name] = value
    return found


def __getattr__(name: str) -> Any:
    """Import `check_NAME`, `your_turn` or `unlabelled_runs` on first use."""
    if name in OTHERS:
        return getattr(import_module(f"grpo_edu.checks.{OTHERS[name]}"), name)
    if name.startswith("check_"):
        known = exercises()
        if name.removeprefix("check_") in known:
            return known[name.removeprefix("check_")]
    raise AttributeError(f"module 'grpo_edu.checks' has no attribute {name!r}")
