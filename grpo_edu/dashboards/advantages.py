"""Explore how the rewards of one group become advantages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ipywidgets as widgets
import torch

from grpo_edu.advantages import group_advantages, tie_probability
from grpo_edu.config import SCALE_REWARDS
from grpo_edu.dashboards.base import Explorer, choice, slider
from grpo_edu.figures.advantages import group_and_ties

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LARGEST = 16


class AdvantageExplorer(Explorer):
    """One group: its rewards by sliders, or a number of right ones of G; the advantages, and how often groups tie.

    Args:
        num_generations: G to begin with, from 2 to 16.

    >>> explorer = AdvantageExplorer(num_generations=4)
    >>> explorer.success.value = 0.5
    >>> explorer.rewards()
    [1.0, 1.0, 0.0, 0.0]
    """

    def __init__(self, num_generations: int = 8) -> None:
        self.source = choice("Rewards", ("success rate", "sliders"), "where the rewards come from")
        self.size = slider(widgets.IntSlider, "G, completions", num_generations, 2, _LARGEST, 1, "size of the group")
        self.success = slider(
            widgets.FloatSlider, "success rate p", 0.25, 0.0, 1.0, 0.01, "chance that one completion is right"
        )
        self.scaling = choice("scale_rewards", SCALE_REWARDS, "what the centered rewards are divided by")
        self.sliders = [
            slider(widgets.FloatSlider, f"reward {row}", float(row == 0), 0.0, 2.0, 0.1, "of this completion")
            for row in range(_LARGEST)
        ]
        self._show_sliders()
        about = (
            "Move a control: the rewards of one group become its advantages, and the point moves on the curve of ties."
        )
        controls = [self.source, self.size, self.success, self.scaling, *self.sliders]
        super().__init__("Advantages of one group", controls, about)

    def rewards(self) -> list[float]:
        """Return the G rewards: the sliders' values, or round(p · G) ones and zeros for the rest."""
        size = self.size.value
        if self.source.value == "sliders":
            return [control.value for control in self.sliders[:size]]
        right = round(self.success.value * size)
        return [1.0] * right + [0.0] * (size - right)

    def draw(self) -> tuple[Figure, str]:
        """Rewards and advantages of the group, and the probability of a tie."""
        rewards, scaling = torch.tensor(self.rewards()), self.scaling.value
        self.advantages = group_advantages(rewards, self.size.value, scale_rewards=scaling).tolist()
        chance = None if self.source.value == "sliders" else self.success.value
        figure = group_and_ties(rewards, self.size.value, chance, scale_rewards=scaling)
        numbers = ", ".join(f"{value:.2f}" for value in self.advantages)
        return figure, f"{self.size.value} rewards and their advantages: {numbers}"

    def words(self) -> str:
        """Return whether the group ties, and how often groups with this success rate do."""
        size, chance = self.size.value, self.success.value
        tied = len(set(self.rewards())) == 1
        first = "All rewards are equal: this group has no gradient." if tied else "This group has a gradient."
        if self.source.value == "sliders":
            return first
        share = tie_probability(chance, size)
        return f"{first} Of groups with p = {chance:.2f}, p^G + (1 − p)^G = {share:.3f} tie."

    def _show_sliders(self) -> None:
        by_hand = self.source.value == "sliders"
        self.success.disabled = by_hand
        for row, control in enumerate(self.sliders):
            control.layout.display = None if by_hand and row < self.size.value else "none"

    def _changed(self, change: dict) -> None:
        self._show_sliders()
        super()._changed(change)
