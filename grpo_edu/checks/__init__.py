"""Checks for the exercises: which parts passed, which failed on which small input, and which mistake it looks like.

Every exercise is one `Exercise`, which is called with the student's function:
``check_group_advantages(group_advantages)``. `core`, `compare` and `feedback` are the engine. The exercises themselves,
with their right answers and the mistakes that students make, are next to the notebooks, in `exercises/checks/`: one
module for each notebook, which is imported as a module of this package. ``python tests/try_checks.py`` tries every
check on right and wrong answers. `your_turn` is the feedback on the short questions inside the notebooks, and
`unlabelled_runs` draws the runs of an exercise.
"""

import functools
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_edu.checks.core import Exercise

OTHERS = {"your_turn": "feedback", "unlabelled_runs": "diagnosis_lab"}  # what notebooks use besides: name → module


def topics_dir() -> Path:
    """Return the folder of the exercises: `exercises/checks` of a checkout, else `topics` next to this file."""
    here = Path(__file__).resolve().parent
    checkout = here.parents[1] / "exercises" / "checks"
    return checkout if checkout.is_dir() else here / "topics"


__path__.append(str(topics_dir()))  # `grpo_edu.checks.losses` is found there, `grpo_edu.checks.core` here


@functools.cache
def exercises() -> dict[str, "Exercise"]:
    """Return all exercises by name, in the order of their modules' names."""
    from grpo_edu.checks.core import Exercise

    found: dict[str, Exercise] = {}
    for path in sorted(topics_dir().glob("*.py")):
        for value in vars(import_module(f"grpo_edu.checks.{path.stem}")).values():
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
