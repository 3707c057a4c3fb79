"""A run as the training dashboard shows it: its progress in words, curves and samples. No widgets."""

from __future__ import annotations

import functools
import html
from collections.abc import Callable, Sequence
from typing import Any

from grpo_edu.dashboards.worker import cut_off
from grpo_edu.evaluation import Evaluating, compare, evaluate
from grpo_edu.fast.memory import GIB, resident_bytes
from grpo_edu.figures.hover import with_values
from grpo_edu.figures.live import ACCURACY, live_curves, live_values, svg_image
from grpo_edu.figures.style import COLORS
from grpo_edu.rewards import REWARDS, RewardFunction, reward_name
from grpo_edu.runs.measures import RunFacts
from grpo_edu.runs.run import Evaluated, Event, Run, Stepped
from grpo_edu.runs.symptoms import find_symptoms

NUM_CHECKED = 20  # held-out problems, the first ones, on which the run is measured on its way
_REWARD_SECONDS = 20.0  # time limit of the user's own reward functions for one batch


class TrainingRun(Run):
    """A run that notes of its events what a dashboard shows.

    Attributes:
        every: steps between two evaluations on the first `NUM_CHECKED` held-out problems; 0 for none.
        checks: step → accuracy on these problems.
        samples: a question of the last step, and its completions with their rewards.
        part: how much of what the run is doing is complete.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.every = 10
        self.checks: dict[int, float] = {}
        self.samples: tuple[str, list[tuple[str, float]]] = ("", [])
        self.part = 0.0

    def note(self, event: Event) -> None:
        """Note what an event says; after every so many steps, evaluate the policy on some held-out problems."""
        self.part = len(self.history) / self.config.max_steps
        if isinstance(event, Evaluating):
            self.part = event.done / event.total
        elif isinstance(event, Evaluated) and event.when == "before":
            self.checks[0] = event.evaluation.take(range(NUM_CHECKED)).accuracy
        elif isinstance(event, Stepped):
            self._note_samples()
            step = len(self.history)
            if self.every and step % self.every == 0:
                first, length = self.data.heldout[:NUM_CHECKED], self.config.max_completion_length
                found = evaluate(
                    self.policy, self.tokenizer, first, max_completion_length=length, seed=self.config.seed
                )
                self.checks[step] = found.accuracy

    def _note_samples(self) -> None:
        """Note the first group of the last step."""
        assert self.state is not None and self.state.batch is not None
        batch, size = self.state.batch, self.config.num_generations
        rendered = batch.rollout.prompts[0]
        question = max((one.prompt for one in self.data.problems if one.prompt in rendered), key=len, default=rendered)
        rewards = batch.rewards_per_func[:size].nansum(dim=1).tolist()
        self.samples = question, list(zip(batch.rollout.completions[:size], rewards, strict=True))

    @property
    def training_seconds(self) -> float:
        """The seconds of all steps."""
        return sum(row["step_time"] for row in self.history)

    def position(self) -> str:
        """Return how far the run is, in a few words."""
        done, steps = len(self.history), self.config.max_steps
        if self.after is not None:
            return f"finished, {steps} steps"
        return f"step {done} of {steps}"

    def words(self) -> str:
        """Return the progress of the run: steps, reward, speed, memory, time left."""
        if not self.history:
            return "No step is complete yet."
        done, last = len(self.history), self.history[-1]
        speed = last["num_tokens"] / max(self.training_seconds, 1e-9)
        left = (self.config.max_steps - done) * self.training_seconds / done
        ahead = f", {left:.0f} s left" if left else ""
        return (
            f"Step {done} of {self.config.max_steps}: reward {last['reward']:.2f}, {speed:,.0f} tokens/s, "
            f"{resident_bytes() / GIB:.2f} GiB{ahead}."
        )

    def rows(self) -> list[dict[str, float]]:
        """Step 0 and the history, with the accuracy on held-out problems where it was measured."""
        rows: list[dict[str, float]] = [{"step": 0}, *({**row} for row in self.history)]
        for row in rows:
            if row["step"] in self.checks:
                row[ACCURACY] = self.checks[int(row["step"])]
        return rows

    def curves(self, previous: Sequence[dict[str, float]] = ()) -> tuple[str, str]:
        """Return the curves so far as an image, over those of a previous run if given, and its alternative text."""
        first, last = self.history[0]["reward"], self.history[-1]["reward"]
        alt = f"Curves over {len(self.history)} steps; the mean reward goes from {first:.2f} to {last:.2f}"
        if len(self.checks) > 1:
            shares = ", ".join(f"{accuracy:.0%}" for accuracy in self.checks.values())
            alt += f"; accuracy on {NUM_CHECKED} held-out problems {shares}"
        if previous:
            alt += f". Dashed, for comparison: the run before, which ended at {previous[-1]['reward']:.2f}"
        rows, steps = self.rows(), self.config.max_steps
        image = svg_image(live_curves(rows, steps, NUM_CHECKED, previous=previous), alt)
        return with_values(image, live_values(rows, steps, previous=previous)), alt

    def verdict(self) -> str:
        """Accuracy before and after, with the interval of the difference and the paired test."""
        assert self.before and self.after, "the run has not ended"
        found = compare(self.before, self.after)
        return f"Accuracy on {self.before.n} held-out problems: {found} (exact McNemar test)."

    def warnings(self) -> str:
        """Return what went wrong in the training, with cause and remedy; empty for a healthy run."""
        return " ".join(find_symptoms(self.history, RunFacts(self.config, self.before, self.after)))

    def samples_html(self) -> str:
        """Return the first group of the last step: each completion with its reward as a number and as a bar's color."""
        prompt, rows = self.samples
        low, high = (min(value for _, value in rows), max(value for _, value in rows)) if rows else (0, 0)
        lines = [f"<p><b>Samples:</b> {html.escape(prompt)}</p>"]
        for text, value in rows:
            color = (
                COLORS[5] if low == high else COLORS[0] if value == high else COLORS[1] if value == low else COLORS[4]
            )
            lines.append(
                f'<div style="border-left:6px solid {color};padding-left:8px;margin:3px 0;line-height:1.4">'
                f"<b>{value:.2f}</b> {html.escape(text)}</div>"
            )
        return "".join(lines)


def limit_reward(function: RewardFunction) -> RewardFunction:
    """Return a reward function of the user with a time limit; those of the package need none."""
    if function in REWARDS.values():
        return function

    @functools.wraps(function, assigned=())
    def limited(**columns: Any) -> Sequence[float | None]:
        call: Callable[[], Any] = functools.partial(function, **columns)
        return cut_off(call, _REWARD_SECONDS, "the reward")

    limited.__name__ = reward_name(function)
    return limited
