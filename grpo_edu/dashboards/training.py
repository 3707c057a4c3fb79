"""A dashboard for a GRPO run: choose settings, start, pause, resume and stop it, watch its curves, and save it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import ipywidgets as widgets

from grpo_edu.config import LOSS_TYPES, GRPOConfig
from grpo_edu.dashboards.base import STYLE, WIDE, Dashboard, choice, say_html, slider
from grpo_edu.dashboards.training_run import TrainingRun
from grpo_edu.dashboards.worker import RunSlot, Stopped, Worker, words_of
from grpo_edu.figures.curves import accuracy_comparison, training_curves
from grpo_edu.figures.evaluation import interval_rows
from grpo_edu.runs.request import DATA, REWARDS

if TYPE_CHECKING:
    from grpo_edu.models import Session

_DRAWING = 0.04  # share of the training time that drawing may take


class TrainingDashboard(Dashboard):
    """Settings, buttons, live curves and samples of a run of `grpo_edu.train`, evaluated before and after.

    The run is in a thread of its own. The line of numbers is updated after every step. The curves are drawn only as
    often as drawing takes less than 4% of the training time.

    Args:
        models: the choices: shipped names, folders, folders of earlier runs.
        rewards: name → function; by default those of `grpo_edu.rewards`.
        parent: the folder in which Save creates the run's folder.

    >>> board = TrainingDashboard()
    >>> board.steps.value = 5
    >>> board.config().max_steps
    5
    """

    def __init__(
        self,
        models: Sequence[str] = ("tiny",),
        *,
        rewards: Mapping[str, Callable] | None = None,
        parent: str | Path = "runs",
    ) -> None:
        self.functions, self.parent = dict(rewards or REWARDS), Path(parent)
        self.model = choice("Model", models, "the model to train; its file is not changed")
        self.data = _several("Problems", [name for name in DATA if name != "gsm8k"], ("basic",))
        self.rewards = _several("Rewards", list(self.functions), (next(iter(self.functions)),))
        whole, log = widgets.IntSlider, widgets.FloatLogSlider
        self.generations = slider(whole, "G (num_generations)", 8, 2, 16, 1, "completions per prompt")
        self.prompts = slider(whole, "prompts per step", 8, 1, 32, 1, "different problems per step")
        self.steps = slider(whole, "steps", 30, 1, 200, 1, "max_steps")
        self.length = slider(whole, "max. completion length", 96, 16, 256, 8, "tokens")
        self.rate = slider(log, "learning rate", 1e-4, -6, -2, 0.1, "of AdamW", base=10)
        self.beta = slider(
            widgets.FloatSlider, "β (beta)", 0.0, 0.0, 1.0, 0.01, "weight of the KL term; 0 leaves it out"
        )
        self.loss_type = choice("loss_type", LOSS_TYPES, "cispo is used with epsilon_high = 5")
        self.seed = slider(whole, "seed", 0, 0, 99, 1, "of the order of problems and of sampling")
        self.heldout = slider(whole, "held-out problems", 60, 20, 300, 20, "for the accuracy before and after training")
        self.every = slider(whole, "evaluate every … steps", 10, 0, 50, 1, "on 20 held-out problems; 0: never")
        self.settings = [
            self.model,
            self.data,
            self.rewards,
            self.generations,
            self.prompts,
            self.steps,
            self.length,
            self.rate,
            self.beta,
            self.loss_type,
            self.seed,
            self.heldout,
            self.every,
        ]
        self.start, self.pause, self.stop, self.save = (
            widgets.Button(description=name, tooltip=tip, disabled=number > 0)
            for number, (name, tip) in enumerate(
                {
                    "Start": "train, starting from the model as it was loaded",
                    "Pause": "pause after this step; press again to resume",
                    "Stop": "stop after this step",
                    "Save": "save the model, its metrics and accuracies in a folder",
                }.items()
            )
        )
        for button, act in zip(
            (self.start, self.pause, self.stop, self.save),
            (self._start, self._pause, self._stop, self._save),
            strict=True,
        ):
            button.on_click(act)
        self.samples, self.judged = widgets.HTML(), widgets.HTML()
        self.worker: Worker | None = None
        self._run: TrainingRun | None = None
        self._sessions: dict[str, Session] = {}
        buttons = widgets.HBox([self.start, self.pause, self.stop, self.save])
        about = "Choose the settings, then press Start. Settings that cannot be combined are explained below."
        super().__init__("A GRPO run", [*self.settings, buttons], about)
        self.children: tuple[widgets.Widget, ...] = (*self.children, self.judged, self.samples)
        self.say("Ready.")

    @property
    def run(self) -> TrainingRun:
        """The latest run; RuntimeError if Start has not been pressed yet."""
        if self._run is None:
            raise RuntimeError("there is no run yet; press Start first")
        return self._run

    def config(self) -> GRPOConfig:
        """The current settings; raises ValueError for an impossible combination."""
        return GRPOConfig(
            num_generations=self.generations.value,
            prompts_per_step=self.prompts.value,
            max_completion_length=self.length.value,
            max_steps=self.steps.value,
            learning_rate=self.rate.value,
            beta=self.beta.value,
            loss_type=self.loss_type.value,
            epsilon_high=5.0 if self.loss_type.value == "cispo" else None,
            scale_rewards="none" if self.loss_type.value == "dr_grpo" else "group",
            seed=self.seed.value,
        )

    def close(self) -> None:
        """End the work with the widget."""
        if self.worker is not None:
            self.worker.stop()
        super().close()

    def _start(self, button: object = None) -> None:
        if self.worker is not None and self.worker.running:
            return
        try:
            if not self.data.value or not self.rewards.value:
                raise ValueError("choose at least one set of problems and at least one reward")
            run = TrainingRun(
                self.model.value,
                self.data.value,
                [self.functions[name] for name in self.rewards.value],
                self.config(),
                heldout=self.heldout.value,
                every=self.every.value,
            )
        except ValueError as error:
            self.say(str(error), wrong=True)
            return
        self._run = run
        self.worker = Worker(self._work, self._ended)
        self._switch(going=True)
        self.samples.value = self.judged.value = self.picture.value = ""
        self.say("Loading the model and evaluating it before training …")
        self.worker.start()

    def _work(self, worker: Worker) -> None:
        from grpo_edu.models import Session

        with RunSlot():
            name = self.run.model_name
            if name not in self._sessions:
                self._sessions = {name: Session(name)}  # one model at a time in memory
            for _ in self.run.go(self._sessions[name], worker):
                self._tick()

    def _tick(self) -> None:
        """After a step: update the line of numbers, and draw if there is time."""
        run = self.run
        self.message.value = say_html(run.words())
        if run.drawing.seconds + run.drawing.last <= _DRAWING * run.training_seconds:
            with run.drawing:
                self._draw()

    def _draw(self) -> None:
        """Curves, samples and the accuracy during training."""
        run = self.run
        self.show(training_curves(run.history), run.alt())
        self.samples.value = run.samples_html()
        if len(run.checks) > 1 and run.after is None:
            self._show_checks()

    def _show_checks(self) -> None:
        counts = [check.k for check in self.run.checks.values()]
        names = [f"step {step}" for step in self.run.checks]
        trials = next(iter(self.run.checks.values())).n
        figure = interval_rows({"held out": counts}, names, trials=trials, title="Accuracy during training")
        shares = ", ".join(f"{100 * count / trials:.0f}%" for count in counts)
        self.judged.value = self.image(figure, f"Held-out accuracy during training: {shares}")

    def _ended(self, error: BaseException | None) -> None:
        run = self.run
        if run.before is not None and run.after is not None:
            self.judged.value = self.image(accuracy_comparison(run.before, run.after), run.verdict())
            self.say(f"{run.words()} {run.verdict()} {run.warnings()}".strip())
        elif error is None or isinstance(error, Stopped):
            self.say(f"Stopped. {run.words()}")
        else:
            run.failure = words_of(error)
            self.say(f"The run failed after {len(run.history)} steps. {run.failure}", wrong=True)
        self._switch(going=False)
        if run.history:  # the picture of the whole run
            self._draw()

    def _pause(self, button: object = None) -> None:
        if self.worker is None:
            return
        if self.pause.description == "Pause":
            self.worker.pause()
            self.pause.description = "Resume"
            self.say(f"Paused. {self.run.words()}")
        else:
            self.pause.description = "Pause"
            self.worker.resume()

    def _stop(self, button: object = None) -> None:
        if self.worker is not None and self.worker.running:
            self.stop.disabled = self.pause.disabled = True
            self.say("Stopping after this step …")  # before the work ends and reports it
            self.worker.stop()

    def _save(self, button: object = None) -> None:
        try:
            folder = self.run.save(self._sessions[self.run.model_name], self.parent)
        except (OSError, ValueError) as error:
            self.say(str(error), wrong=True)
            return
        self.save.disabled = True
        self.say(f"Saved in {folder}.")

    def _switch(self, *, going: bool) -> None:
        """What is enabled: settings and Start without a run, Pause and Stop during one, Save once there is a result."""
        for control in (*self.settings, self.start):
            control.disabled = going
        self.pause.disabled = self.stop.disabled = not going
        self.pause.description = "Pause"
        self.save.disabled = going or not self.run.history


def _several(label: str, options: Sequence[str], value: Sequence[str]) -> widgets.SelectMultiple:
    return widgets.SelectMultiple(
        options=options,
        value=value,
        description=label,
        rows=min(6, len(options)),
        style=STYLE,
        layout=widgets.Layout(**WIDE),
        tooltip="several with Shift or Ctrl",
    )
