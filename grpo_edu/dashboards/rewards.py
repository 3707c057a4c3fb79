"""A lab to try completions on reward functions, and reward functions on exploits."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import ipywidgets as widgets

from grpo_edu.dashboards.base import STYLE, WIDE, Explorer, choice, slider
from grpo_edu.dashboards.worker import cut_off
from grpo_edu.figures.machine import stacked_bars
from grpo_edu.problems.equations import check_equations
from grpo_edu.prompts import extract_answer
from grpo_edu.rewards import combine_rewards, compute_rewards
from grpo_edu.runs.request import REWARDS
from grpo_edu.studies.exploits import EXPLOITS, judge_reward

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from grpo_edu.problems.templates import Problem

_SECONDS = 2.0  # that a reward function has for one look


class RewardLab(Explorer):
    """Type a completion, or pick one: what each reward pays and why, their weighted sum, and the exploits.

    Args:
        rewards: name → function with TRL's signature; those of `grpo_edu.rewards` where left out. A function of
            your own that raises or never ends is shown as such and cut off after two seconds.
        problem: the question to answer; that of the first exploit where left out.

    >>> lab = RewardLab()
    >>> lab.text.value = "8 * 15 = 121. #### 71"
    >>> lab.verdicts()["accuracy"], lab.verdicts()["steps"]
    (1.0, 0.0)
    """

    def __init__(self, rewards: Mapping[str, Callable] | None = None, *, problem: Problem | None = None) -> None:
        self.functions = dict(rewards or REWARDS)
        self.problem = problem or EXPLOITS[0].problem
        known = {"the honest solution": self.problem.solution}
        known |= {e.name: e.completion for e in EXPLOITS if e.problem == self.problem}
        self.pick = choice("Completion", list(known.items()), "fills the text field below, where you can change it")
        self.text = widgets.Textarea(
            value=self.problem.solution, description="or type one", rows=4, style=STYLE, layout=widgets.Layout(**WIDE)
        )
        self.weights = {
            name: slider(
                widgets.FloatSlider,
                f"weight of {name}",
                float(name == next(iter(self.functions))),
                -1.0,
                2.0,
                0.1,
                "0 leaves the reward out of the sum",
            )
            for name in self.functions
        }
        question = widgets.HTML(f"<i>{html.escape(self.problem.prompt)}</i>")
        self.failures: dict[str, str] = {}
        about = "Below: what each reward gives this completion, and which exploits the sum rewards."
        self.pick.observe(self._picked, "value")
        super().__init__("Reward lab", [question, self.pick, self.text, *self.weights.values()], about)

    def verdicts(self) -> dict[str, float]:
        """Name → what it pays for the completion; a function that fails is left out and named in `failures`."""
        found, self.failures = {}, {}
        for name, function in self.functions.items():
            look = partial(compute_rewards, function, **self._columns())
            try:
                found[name] = cut_off(look, _SECONDS, f"the reward {name}")[0, 0].item()
            except (RuntimeError, ValueError, TimeoutError) as error:
                self.failures[name] = str(error)
        return found

    def draw(self) -> tuple[Figure, str]:
        """A bar with what each reward adds to the sum."""
        import torch

        self.paid = self.verdicts()
        weights = [self.weights[name].value for name in self.paid]
        self.total = float(combine_rewards(torch.tensor([list(self.paid.values())]), weights)[0]) if self.paid else 0.0
        parts = {name: {"paid": max(0.0, value)} for name, value in self.paid.items()}
        figure = stacked_bars(parts or {"no reward": {"paid": 0.0}}, title="What each reward pays", unit="reward")
        numbers = ", ".join(f"{name} {value:.2f}" for name, value in self.paid.items())
        return figure, f"Rewards of the completion: {numbers}; weighted sum {self.total:.2f}"

    def words(self) -> str:
        """The sum, why, and which exploits are paid no less than honest work."""
        answer = extract_answer(self.text.value)
        equations = check_equations(self.text.value)
        read = f"Extracted answer: {answer if answer is not None else 'none'} (correct: {self.problem.answer}). "
        read += f"Equations: {len(equations)} written, {sum(equations)} hold. "
        text = f"Weighted sum {self.total:.2f}. {read}{self.exploit_words()}"
        return text + "".join(f" {name} failed: {failure}" for name, failure in self.failures.items())

    def exploit_words(self) -> str:
        """Which exploits the weighted sum pays at least as much as honest work."""
        self.holes: list[str] = []
        if self.failures:
            return "The exploits will be tried when every reward works."
        functions, weights = list(self.functions.values()), [self.weights[name].value for name in self.functions]
        try:
            judged = cut_off(lambda: judge_reward(functions, weights=weights), _SECONDS, "a reward")
        except (RuntimeError, ValueError, TimeoutError) as error:
            return str(error)
        self.holes = [verdict.exploit.name for verdict in judged if not verdict.holds]
        if not self.holes:
            return f"None of the {len(judged)} exploits pays as much as honest work."
        return f"{len(self.holes)} of {len(judged)} exploits pay as much as honest work: {'; '.join(self.holes)}."

    def _columns(self) -> dict:
        problem = self.problem
        return {
            "prompts": [problem.prompt],
            "completions": [self.text.value],
            "answer": [problem.answer],
            "level": [problem.level],
            "solution": [problem.solution],
        }

    def _picked(self, change: dict) -> None:
        self.text.value = change["new"]
