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

__version__ = "0.2.0"

prepare_openmp(os.environ)  # OpenMP reads these variables when torch is imported, so they are set here

_HOMES = {
    "Problem": "problems.templates",
    "LEVELS": "problems.templates",
    "DOMAINS": "problems.templates",
    "make_problems": "problems.templates",
    "load_problems": "problems.files",
    "load_gsm8k": "problems.files",
    "read_problems": "problems.files",
    "write_problems": "problems.files",
    "to_dataset": "problems.files",
    "chat_messages": "prompts",
    "render_prompt": "prompts",
    "extract_answer": "prompts",
    "load_policy": "models",
    "save_policy": "models",
    "Rollout": "rollout",
    "generate": "rollout",
    "accuracy_reward": "rewards",
    "format_reward": "rewards",
    "steps_reward": "rewards",
    "length_reward": "rewards",
    "compute_rewards": "rewards",
    "combine_rewards": "rewards",
    "group_advantages": "advantages",
    "rloo_advantages": "advantages",
    "per_token_logps": "logprobs",
    "grpo_loss": "losses",
    "read_log": "runs.log",
    "GRPOConfig": "config",
    "train": "trainer",
    "train_with_trl": "scale.trl_backend",
    "Session": "models",
    "Evaluation": "evaluation",
    "evaluate": "evaluation",
    "compare": "evaluation",
    "wilson_interval": "evaluation",
    "mcnemar": "evaluation",
    "paired_bootstrap": "evaluation",
    "pass_at_k": "evaluation",
    "training_curves": "figures.curves",
    "accuracy_comparison": "figures.curves",
    "html_image": "figures.curves",
    "RunResult": "runs.summary",
    "run_training": "runs.run",
    "resume_training": "runs.run",
    "run_evaluation": "runs.run",
    "quantize_model": "quantization.model",
}

__all__ = ["__version__", *_HOMES]

_MANY_MODULES = 300


@contextmanager
def collector_paused() -> Iterator[None]:
    """Import large libraries without Python's garbage collector, which makes the imports a fifth faster.

    An import of torch or transformers creates half a million objects that stay. The collector would look through them
    again and again while their number grows. Where many modules were imported, the objects are set aside at the end
    (`gc.freeze`), so that later collections need not look at them either. A collector that was off stays off.

    >>> with collector_paused():
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
    with collector_paused():
        return getattr(import_module(f"grpo_edu.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
