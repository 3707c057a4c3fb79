"""grpo_edu: Group Relative Policy Optimization, taught and run on an ordinary CPU.

Importing the package is cheap: heavy libraries load where they are first used.
The public names below are resolved on first access (PEP 562).
"""

from importlib import import_module
from typing import Any

from grpo_edu.heavy_imports import collector_paused

__version__ = "0.1.0"

_HOMES = {
    "Problem": "problems",
    "LEVELS": "problems",
    "DOMAINS": "problems",
    "make_problems": "problems",
    "load_problems": "data",
    "load_gsm8k": "data",
    "read_problems": "data",
    "write_problems": "data",
    "to_dataset": "data",
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
    "read_log": "metrics",
    "GRPOConfig": "config",
    "train": "trainer",
    "train_with_trl": "trl_backend",
    "Session": "session",
    "Evaluation": "evaluation",
    "evaluate": "evaluation",
    "compare": "evaluation",
    "wilson_interval": "evaluation",
    "mcnemar": "evaluation",
    "paired_bootstrap": "evaluation",
    "pass_at_k": "evaluation",
    "training_curves": "figures",
    "accuracy_comparison": "figures",
    "html_image": "figures",
    "RunResult": "run_summary",
    "run_training": "runs",
    "resume_training": "runs",
    "run_evaluation": "runs",
    "quantize_model": "quantization",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    """Import the module that holds `name` and hand the name out."""
    if name not in _HOMES:
        raise AttributeError(f"module 'grpo_edu' has no attribute {name!r}")
    with collector_paused():
        return getattr(import_module(f"grpo_edu.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
