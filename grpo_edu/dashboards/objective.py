"""One token's clipped objective, its gradient, and three estimators of the KL divergence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ipywidgets as widgets
import torch

from grpo_edu.config import LOSS_TYPES, USUAL_CAP
from grpo_edu.dashboards.base import Explorer, choice, slider
from grpo_edu.figures.objective import clip_curves
from grpo_edu.figures.style import COLORS
from grpo_edu.losses import LOSSES, per_token_kl, per_token_policy_loss

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class ObjectiveExplorer(Explorer):
    """Ratio, advantage, clip bounds and β of one token: its objective, its push on log π, and k1, k2, k3.

    >>> explorer = ObjectiveExplorer()
    >>> explorer.ratio.value, explorer.advantage.value = 1.5, 1.0
    >>> round(explorer.token()["objective"], 3), round(explorer.token()["push"], 3)  # clipped at 1.2
    (1.2, 0.0)
    """

    def __init__(self) -> None:
        number = widgets.FloatSlider
        self.ratio = slider(number, "ratio ρ", 1.0, 0.05, 2.0, 0.05, "π / π_old of the token")
        self.advantage = slider(number, "advantage A", 1.0, -2.0, 2.0, 0.1, "of the token's completion")
        self.epsilon = slider(number, "ε (epsilon)", 0.2, 0.0, 0.9, 0.01, "lower clip bound, as a distance from 1")
        self.epsilon_high = slider(number, "ε high", 0.2, 0.0, 5.0, 0.01, "upper clip bound")
        self.beta = slider(number, "β (beta)", 0.0, 0.0, 1.0, 0.01, "weight of the KL term")
        self.reference = slider(number, "π / π_ref", 1.0, 0.05, 3.0, 0.05, "the token under policy and reference")
        self.loss_type = choice("loss_type", LOSS_TYPES, "grpo, bnpo, dr_grpo and dapo are alike for one token")
        controls = [
            self.ratio,
            self.advantage,
            self.epsilon,
            self.epsilon_high,
            self.beta,
            self.reference,
            self.loss_type,
        ]
        about = "The star is your token; the curves are those of the advantages +1 and −1."
        super().__init__("The objective of one token", controls, about)

    def token(self) -> dict[str, float]:
        """Objective and push (with the KL term), and the three estimators of the KL, in nats."""
        logps = torch.tensor([[self.ratio.value]], dtype=torch.float64).log().requires_grad_()
        ref_logps = (logps - torch.tensor(self.reference.value, dtype=torch.float64).log()).detach()
        policy = per_token_policy_loss(
            logps, logps.exp(), torch.tensor([self.advantage.value], dtype=torch.float64), **self._clip()
        )
        k3 = per_token_kl(logps, ref_logps)
        loss = (policy + self.beta.value * k3).sum()
        (gradient,) = torch.autograd.grad(loss, logps)
        k1 = (logps - ref_logps).item()
        return {"objective": -loss.item(), "push": 0.0 - gradient.item(), "k1": k1, "k2": k1**2 / 2, "k3": k3.item()}

    def draw(self) -> tuple[Figure, str]:
        """Draw the curves of the clip, and the token on them."""
        found = self.token()
        figure = clip_curves(**self._clip())
        for axes, name in zip(figure.axes, ("objective", "push"), strict=True):
            axes.plot(self.ratio.value, found[name], marker="*", markersize=14, color=COLORS[2], linestyle="none")
        return figure, (
            f"At ratio {self.ratio.value:.2f} and advantage {self.advantage.value:.1f} the objective is "
            f"{found['objective']:.3f} and the push on the log-probability {found['push']:.3f}"
        )

    def words(self) -> str:
        """Return the numbers of the token."""
        found = self.token()
        halted = "" if found["push"] else " This token is not pushed at all."
        if LOSSES[self.loss_type.value].clips == "weight" and self.epsilon_high.value < 1:
            halted = (
                f" With {self.loss_type.value} ε high is the largest ratio itself: below 1 it shrinks every token; "
                f"{USUAL_CAP} is usual."
            )
        return (
            f"Objective {found['objective']:.3f}, push {found['push']:.3f}, with β = {self.beta.value:g}. KL of this "
            f"token: k1 = {found['k1']:.3f}, k2 = {found['k2']:.3f}, k3 = {found['k3']:.3f} nats.{halted}"
        )

    def _clip(self) -> dict:
        return {
            "epsilon": self.epsilon.value,
            "epsilon_high": self.epsilon_high.value,
            "loss_type": self.loss_type.value,
        }
