"""Interactive dashboards: ipywidgets around the package's functions and figures, for notebooks and `grpo-edu app`.

No other part of the package imports ipywidgets. Each dashboard is a widget: the last line of a cell shows it. Pages
without widgets (a PDF, GitHub, a test) show the same picture with a caption.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "AdvantageExplorer": "advantages",
    "AskTheModel": "ask",
    "ForgettingDashboard": "forgetting",
    "HardwareMonitor": "hardware",
    "LogDiagnosis": "log_reader",
    "ObjectiveExplorer": "objective",
    "PlayWords": "words",
    "QuantizationExplorer": "quantization",
    "RewardLab": "reward_lab",
    "RunComparer": "runs",
    "TokenInspector": "inspector",
    "TrainingDashboard": "training",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    """Import the module of a dashboard, and return the dashboard."""
    if name not in _HOMES:
        raise AttributeError(f"module 'grpo_edu.dashboards' has no attribute {name!r}")
    return getattr(import_module(f"grpo_edu.dashboards.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
