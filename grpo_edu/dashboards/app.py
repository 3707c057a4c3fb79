"""The web app: all dashboards as tabs. `grpo-edu app` serves it through Voilà, which lets nobody type code to run."""

from __future__ import annotations

import os
from pathlib import Path

import ipywidgets as widgets

from grpo_edu.dashboards import (
    AdvantageExplorer,
    ForgettingDashboard,
    HardwareMonitor,
    ObjectiveExplorer,
    QuantizationExplorer,
    RewardLab,
    RunComparer,
    TrainingDashboard,
)

RUNS = "GRPO_EDU_APP_RUNS"  # the folder of the runs
_TABS = {
    "Train": lambda: TrainingDashboard(parent=_runs()),
    "Rewards": RewardLab,
    "Advantages": AdvantageExplorer,
    "Objective": ObjectiveExplorer,
    "Runs": lambda: RunComparer(_runs()),
    "Quantization": QuantizationExplorer,
    "Forgetting": ForgettingDashboard,
    "Hardware": HardwareMonitor,
}


class App(widgets.Tab):
    """Every dashboard in a tab of its own, created when the tab is first opened."""

    def __init__(self) -> None:
        super().__init__([widgets.VBox() for _ in _TABS], titles=list(_TABS))
        self.observe(lambda change: self.show_tab(change["new"]), "selected_index")
        self.selected_index = 0
        self.show_tab(0)

    def show_tab(self, number: int) -> None:
        """Create the dashboard of a tab if it does not exist yet; the stored runs are read again each time."""
        name, place = list(_TABS)[number], self.children[number]
        if not place.children or name == "Runs":
            place.children = (_TABS[name](),)

    def __repr__(self) -> str:
        return "<App>"


def _runs() -> Path:
    return Path(os.environ.get(RUNS, "runs"))
