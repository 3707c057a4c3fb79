"""grpo_edu: Group Relative Policy Optimization, taught and run on an ordinary CPU.

Importing the package is cheap: heavy libraries load where they are first used.
The public names below are resolved on first access (PEP 562).
"""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from grpo_edu.fast.cores import prepare_openmp

__version__ = "0.4.0"

prepare_openmp(os.environ)  # OpenMP reads these variables when torch is imported, so they are set here

_PUBLIC = {  # module: names
    "problems.templates": "Problem LEVELS DOMAINS make_problems",
    "problems.files": "load_problems load_gsm8k read_problems write_problems to_dataset",
    "prompts": "chat_messages render_prompt extract_answer",
    "models": "load_policy save_policy Session",
    "rollout": "Rollout generate",
    "rewards": "accuracy_reward format_reward steps_reward length_reward compute_rewards combine_rewards",
    "problems.instructions": "constraint_reward topic_reward instruction_reward",
    "advantages": "group_advantages rloo_advantages",
    "fast.packing": "per_token_logps",
    "losses": "grpo_loss",
    "runs.log": "read_log",
    "config": "GRPOConfig",
    "trainer": "train",
    "scale.trl_backend": "train_with_trl",
    "evaluation": "Evaluation evaluate compare wilson_interval mcnemar paired_bootstrap pass_at_k",
    "studies.fluency": "Fluency fluency",
    "figures.curves": "training_curves accuracy_comparison html_image",
    "runs.summary": "RunResult",
    "runs.run": "run_training resume_training run_evaluation",
    "quantization.model": "quantize_model",
}
_HOMES = {name: module for module, names in _PUBLIC.items() for name in names.split()}

__all__ = ["__version__", *_HOMES]

_MANY_MODULES = 300


@contextmanager
def gc_paused() -> Iterator[None]:
    """Import large libraries without Python's garbage collector, which makes the imports a fifth faster.

    An import of torch or transformers creates half a million objects that stay. The collector would look through them
    again and again while their number grows. Where many modules were imported, the objects are set aside at the end
    (`gc.freeze`), so that later collections need not look at them either. A collector that was off stays off.

    >>> with gc_paused():
    ...     gc.isenabled()
    False
    >>> gc.isenabled()
    True
    """
    enabled, before = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) - before > _MANY_MODULES:
            gc.freeze()
        if enabled:
            gc.enable()


def __getattr__(name: str) -> Any:
    """Import the module that holds `name` and hand the name out."""
    if name not in _HOMES:
        raise AttributeError(f"module 'grpo_edu' has no attribute {name!r}")
    with gc_paused():
        return getattr(import_module(f"grpo_edu.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
