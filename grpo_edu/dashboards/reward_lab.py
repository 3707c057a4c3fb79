"""A lab to try completions on reward functions, and reward functions on exploits."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from functools import partial
from math import isnan
from typing import TYPE_CHECKING

import ipywidgets as widgets

from grpo_edu.dashboards.base import Explorer, choice, named_functions, slider
from grpo_edu.dashboards.worker import cut_off
from grpo_edu.figures.reward_parts import sum_and_exploits
from grpo_edu.problems.equations import check_equations
from grpo_edu.problems.instructions import INSTRUCTION_REWARDS
from grpo_edu.prompts import extract_answer
from grpo_edu.rewards import REWARDS, compute_rewards
from grpo_edu.studies.exploits import EXPLOITS, Verdict, judge_reward

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SECONDS = 2.0  # that a reward function has for one look


class RewardLab(Explorer):
    """Type a completion, or pick one: what each reward pays and why, their weighted sum, and the exploits.

    Args:
        rewards: name → function with TRL's signature; those of `grpo_edu.rewards` where left out. A function of
            your own that raises or never ends is shown as such and cut off after two seconds.

    >>> lab = RewardLab()
    >>> lab.text.value = "8 * 15 = 121. #### 71"
    >>> lab.verdicts()["accuracy"], lab.verdicts()["steps"]
    (1.0, 0.0)
    """

    def __init__(self, rewards: Mapping[str, Callable] | None = None) -> None:
        import torch  # noqa: F401  now: a limit that ends a reward in the middle of this import may crash Python

        own = {name: function for name, function in REWARDS.items() if name not in INSTRUCTION_REWARDS}
        self.functions = named_functions(rewards or own)
        self.problem = EXPLOITS[0].problem
        known = {"the honest solution": self.problem.solution}
        known |= {e.name: e.completion for e in EXPLOITS if e.problem == self.problem}
        self.pick = choice("Completion", list(known.items()), "fills the text field below, where you can change it")
        self.text = widgets.Textarea(value=self.problem.solution, description="or type one", rows=4)
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
        self._alone: dict[str, list[Verdict]] = {}  # what each reward alone pays for the exploits
        about = (
            "Change the completion or a weight: the bars show what each reward adds, the grid which exploits are paid."
        )
        self.pick.observe(self._picked, "value")
        super().__init__("Reward lab", [question, self.pick, self.text, *self.weights.values()], about)

    def verdicts(self, completion: str | None = None) -> dict[str, float]:
        """Name → what it pays for a completion, by default the one in the text field.

        A function that fails is left out and named in `failures`.
        """
        found, self.failures = {}, {}
        for name, function in self.functions.items():
            look = partial(compute_rewards, function, **self._columns(completion))
            try:
                found[name] = cut_off(look, _SECONDS, f"the reward {name}")[0, 0].item()
            except (RuntimeError, ValueError, TimeoutError) as error:
                self.failures[name] = str(error)
        return found

    def draw(self) -> tuple[Figure, str]:
        """Draw the weighted parts of this completion and of the honest one, and the exploits that pass and fail."""
        honest = {} if self.text.value == self.problem.solution else self.verdicts(self.problem.solution)
        self.paid = self.verdicts()
        self.total = sum(self._weighted(self.paid).values())
        parts = {"this completion": self._weighted(self.paid)}
        if honest:
            parts["the honest one"] = self._weighted(honest)
        self._judge_exploits()
        figure = sum_and_exploits(parts, self.passed, [*self._alone, "sum"])
        numbers = ", ".join(f"{name} {value:.2f}" for name, value in self.paid.items())
        return figure, f"Rewards of the completion: {numbers}; weighted sum {self.total:.2f}"

    def _weighted(self, paid: Mapping[str, float]) -> dict[str, float]:
        """Return what each reward adds to the sum; one that does not apply adds nothing."""
        return {name: 0.0 if isnan(value) else self.weights[name].value * value for name, value in paid.items()}

    def words(self) -> str:
        """Return the sum, why, and which exploits are paid no less than honest work."""
        answer = extract_answer(self.text.value)
        equations = check_equations(self.text.value)
        read = f"Extracted answer: {answer if answer is not None else 'none'} (correct: {self.problem.answer}). "
        read += f"Equations: {len(equations)} written, {sum(equations)} hold. "
        text = f"Weighted sum {self.total:.2f}. {read}{self.exploit_words()}"
        return text + "".join(f" {name} failed: {failure}" for name, failure in self.failures.items())

    def exploit_words(self) -> str:
        """Return which exploits the weighted sum pays at least as much as honest work."""
        if not self.passed:
            return "The exploits will be tried when every reward works."
        if not self.holes:
            return f"None of the {len(self.passed)} exploits pays as much as honest work."
        return f"{len(self.holes)} of {len(self.passed)} exploits pay as much as honest work: {'; '.join(self.holes)}."

    def _judge_exploits(self) -> None:
        """Find which exploits each reward alone resists, and which the weighted sum resists."""
        self.passed: dict[str, list[bool]] = {}
        self.holes: list[str] = []
        if self.failures:
            return
        functions, weights = list(self.functions.values()), [self.weights[name].value for name in self.functions]
        try:
            if not self._alone:
                for name, function in self.functions.items():
                    self._alone[name] = cut_off(partial(judge_reward, function), _SECONDS, f"the reward {name}")
            together = cut_off(lambda: judge_reward(functions, weights=weights), _SECONDS, "a reward")
        except (RuntimeError, ValueError, TimeoutError) as error:
            self._alone, self.failures = {}, {"a reward": str(error)}
            return
        for verdicts in zip(*self._alone.values(), together, strict=True):
            self.passed[verdicts[0].exploit.name] = [verdict.holds for verdict in verdicts]
        self.holes = [name for name, row in self.passed.items() if not row[-1]]

    def _columns(self, completion: str | None) -> dict:
        problem = self.problem
        return {
            "prompts": [problem.prompt],
            "completions": [self.text.value if completion is None else completion],
            "answer": [problem.answer],
            "level": [problem.level],
            "solution": [problem.solution],
        }

    def _picked(self, change: dict) -> None:
        self.text.value = change["new"]
