"""The web app: all dashboards as tabs. `grpo-edu app` serves it through Voilà, which lets nobody type code to run."""

from __future__ import annotations

import html
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ipywidgets as widgets

from grpo_edu.dashboards import (
    AdvantageExplorer,
    AskTheModel,
    ForgettingDashboard,
    HardwareMonitor,
    LogDiagnosis,
    ObjectiveExplorer,
    PlayWords,
    QuantizationExplorer,
    RewardLab,
    RunComparer,
    TokenInspector,
    TrainingDashboard,
)
from grpo_edu.dashboards.base import button_row, say_html

RUNS = "GRPO_EDU_APP_RUNS"  # the folder of the runs
NOTEBOOKS = "GRPO_EDU_APP_NOTEBOOKS"  # set if the server offers the notebooks as pages


@dataclass(frozen=True)
class _Tab:
    """A dashboard, the notebook that explains it, and presets: what the button says → control → value."""

    make: Callable[[], widgets.Widget]
    notebook: str
    presets: dict[str, dict[str, Any]] = field(default_factory=dict)


_TABS = {
    "Ask": _Tab(
        lambda: AskTheModel(parent=_runs()),
        "00_start_here",
        {"2 answers, 20 steps": {"size": 2, "steps": 20}, "16 answers, 40 steps": {"size": 16, "steps": 40}},
    ),
    "Train": _Tab(
        lambda: TrainingDashboard(parent=_runs()),
        "07_grpo_run",
        {
            "A short run": {"steps": 10, "heldout": 40},
            "Learning rate too high": {"rate": 1e-2, "steps": 30},
            "Reward for the format only": {"rewards": ("format",), "steps": 30},
        },
    ),
    "Rewards": _Tab(
        RewardLab,
        "02_reward_functions",
        {
            "A guess in the right format": {"text": "#### 72"},
            "Pay for the format as well": {"weights.format": 1.0, "text": "#### 72"},
        },
    ),
    "Advantages": _Tab(
        AdvantageExplorer,
        "04_group_advantages",
        {
            "One right answer of eight": {"source": "success rate", "size": 8, "success": 0.125},
            "A question that is too easy": {"source": "success rate", "size": 8, "success": 1.0},
            "Without scaling": {"scaling": "none"},
        },
    ),
    "Objective": _Tab(
        ObjectiveExplorer,
        "05_grpo_objective",
        {
            "Clipped above": {"advantage": 1.0, "ratio": 1.5},
            "A bad answer that became likelier": {"advantage": -1.0, "ratio": 1.5},
        },
    ),
    "Tokens": _Tab(lambda: TokenInspector(parent=_runs()), "05_grpo_objective"),
    "Words": _Tab(PlayWords, "16_several_turns"),
    "Runs": _Tab(lambda: RunComparer(_runs()), "08_honest_evaluation"),
    "Diagnosis": _Tab(LogDiagnosis, "12_diagnosis_lab"),
    "Quantization": _Tab(
        QuantizationExplorer,
        "09_quantization",
        {
            "3 bits, one scale": {"bits": 3, "scales": "per tensor"},
            "3 bits, a scale per group": {"bits": 3, "scales": "per group of 32"},
        },
    ),
    "Forgetting": _Tab(
        ForgettingDashboard,
        "10_ewc_progressive_training",
        {"Replay earlier problems": {"method": "replay"}, "A very strong EWC": {"method": "ewc", "strength": "1e+07"}},
    ),
    "Hardware": _Tab(HardwareMonitor, "01_cpu_setup"),
}


class App(widgets.Tab):
    """Every dashboard in a tab of its own, created when the tab is first opened."""

    def __init__(self) -> None:
        super().__init__([widgets.VBox() for _ in _TABS], titles=list(_TABS))
        self.add_class("grpo-edu-app")
        self.observe(lambda change: self.show_tab(change["new"]), "selected_index")
        self.selected_index = 0
        self.show_tab(0)

    def show_tab(self, number: int) -> None:
        """Create the dashboard of a tab if it does not exist yet; the stored runs are read again each time."""
        name, place = list(_TABS)[number], self.children[number]
        if not place.children or name == "Runs":
            place.children = (widgets.HTML(say_html(f"{name} is being prepared …")),)
            dashboard = _TABS[name].make()
            place.children = (dashboard, _beside(dashboard, _TABS[name]))

    def __repr__(self) -> str:
        return "<App>"


def _beside(dashboard: widgets.Widget, tab: _Tab) -> widgets.Widget:
    """The presets to try, what the last one has set, and the notebook to read."""
    told = widgets.HTML()
    told.add_class("grpo-edu-told")

    def choose(button: widgets.Button) -> None:
        told.value = say_html(_set(dashboard, tab.presets[button.description]))

    actions = {label: (choose, "set the controls to this example") for label in tab.presets}
    _, row = button_row(actions)
    name = html.escape(f"notebook {tab.notebook[:2]}")
    if NOTEBOOKS in os.environ:
        base = html.escape(os.environ.get("VOILA_BASE_URL", "/"))
        name = f'<a href="{base}voila/files/notebooks/{tab.notebook}.html" target="_blank">{name}</a>'
    said = widgets.HTML("Try this: " if actions else "", layout=widgets.Layout(flex="0 0 auto"))
    read = widgets.HTML(f"What this shows is explained in {name} of the course.")
    return widgets.VBox([widgets.HBox([said, row]), told, read])


def _set(dashboard: Any, values: dict[str, Any]) -> str:
    """Set controls to the values of a preset; return in words what was set, as some controls are folded away."""
    said = []
    for name, value in values.items():
        first, _, key = name.partition(".")
        control = getattr(dashboard, first)
        control = control[key] if key else control
        control.value = value
        shown = ", ".join(value) if isinstance(value, tuple) else value
        said.append(f"{control.description} = {shown}")
    return f"Set: {'; '.join(said)}."


def _runs() -> Path:
    return Path(os.environ.get(RUNS, "runs"))
