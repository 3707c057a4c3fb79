"""A dashboard for a GRPO run: choose settings, start, pause, resume and stop it, watch its curves, and save it."""

from __future__ import annotations

import gc
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import ipywidgets as widgets

from grpo_edu.config import LOSS_TYPES, USUAL_CAP, GRPOConfig
from grpo_edu.dashboards.base import (
    Dashboard,
    button_row,
    choice,
    folded,
    named_functions,
    offer,
    progress_bar,
    several,
    slider,
)
from grpo_edu.dashboards.kept import keep, kept_runs, new_place, open_kept, save_copy
from grpo_edu.dashboards.training_run import NUM_CHECKED, TrainingRun, limit_reward
from grpo_edu.dashboards.worker import Stopped, Worker, in_queue, run_slot, words_of
from grpo_edu.figures.curves import accuracy_comparison
from grpo_edu.figures.hover import with_values
from grpo_edu.figures.live import live_curves, live_values, svg_image
from grpo_edu.losses import LOSSES
from grpo_edu.problems.templates import PROBLEM_SETS, data_dir, problem_set_names
from grpo_edu.rewards import REWARDS
from grpo_edu.runs.options import RunConfig

_EVERY = 0.4  # seconds between two pictures
_KEEP_EVERY = 15.0  # seconds of a run between two times at which it is kept, so that little is lost with the kernel
_STARTED = "The run has started: the model is evaluated, trained, and evaluated again."
RECORDED = "dashboard_run.json"  # the run that is shown until one was trained: `python -m benchmarks.dashboards`


class TrainingDashboard(Dashboard):
    """Settings, buttons, live curves and samples of a run of `grpo_edu.train`, evaluated before and after.

    The run is in a thread of its own. A bar and a line of numbers follow every step, and the curves are drawn two times
    a second. A run is kept in `parent/.kept` every quarter of a minute, when it is paused and at its end, so that a
    page that is loaded again offers it.

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
        self.functions, self.parent = named_functions(rewards or REWARDS), Path(parent)
        models = [models] if isinstance(models, str) else models
        self.model = choice("Model", models, "the model to train; its file is not changed")
        shipped = [name for name in problem_set_names() if not PROBLEM_SETS[name].reads_path]
        self.data = several("Problems", shipped, ("basic",))
        self.rewards = several("Rewards", list(self.functions), (next(iter(self.functions)),))
        whole, log = widgets.IntSlider, widgets.FloatLogSlider
        self.generations = slider(whole, "G (num_generations)", 8, 2, 16, 1, "completions per prompt")
        self.prompts = slider(whole, "prompts per step", 8, 1, 32, 1, "different problems per step")
        self.steps = slider(whole, "steps", 30, 1, 200, 1, "max_steps")
        self.length = slider(whole, "max. completion length", 96, 16, 256, 8, "tokens")
        self.rate = slider(log, "learning rate", 1e-4, -6, -2, 0.1, "of AdamW", base=10)
        self.beta = slider(
            widgets.FloatSlider, "β (beta)", 0.0, 0.0, 1.0, 0.01, "weight of the KL term; 0 leaves it out"
        )
        self.loss_type = choice("loss_type", LOSS_TYPES, f"cispo is used with epsilon_high = {USUAL_CAP:g}")
        self.seed = slider(whole, "seed", 0, 0, 99, 1, "of the order of problems and of sampling")
        self.heldout = slider(whole, "held-out problems", 60, 20, 300, 20, "for the accuracy before and after training")
        self.every = slider(whole, "evaluate every … steps", 10, 0, 50, 1, "on 20 held-out problems; 0: never")
        often = [self.model, self.data, self.rewards, self.steps, self.generations, self.rate]
        seldom = [self.prompts, self.length, self.beta, self.loss_type, self.seed, self.heldout, self.every]
        self.settings = [*often, *seldom]
        self._buttons, buttons = button_row(
            {
                "Start": (self._start, "train, starting from the model as it was loaded"),
                "Pause": (self._pause, "pause after this step; press again to resume"),
                "Stop": (self._stop, "stop after this step"),
                "Save": (self._save, "save the model, its metrics and accuracies in a folder"),
            }
        )
        self.start, self.pause, self.stop, self.save = self._buttons
        found = kept_runs(self.parent)
        self.kept = choice("Kept run", found, "runs of before this page was loaded: paused, interrupted or ended")
        (self.opener,), opening = button_row(
            {"Open": (self._open, "show this run; one that is not finished can continue")}
        )
        self._offer = widgets.VBox([self.kept, opening])
        self._offer.layout.display = None if found else "none"
        self.progress, self.samples, self.judged = widgets.HTML(), widgets.HTML(), widgets.HTML()
        self._run: TrainingRun | None = None
        self._before: list[dict[str, float]] = []  # the rows of the run before this one
        self._going = False  # a run is under way, paused or not
        self._drawn = self._told = self._kept = 0.0
        about = "Press Start to train a model with these settings. Settings that cannot be combined are explained."
        super().__init__("A GRPO run", [buttons, self._offer, *often, *folded(seldom)], about)
        self.stage.children = (self.message, self.progress, self.picture, self.judged, self.samples)
        self._switch(going=False)
        self._show_recorded()

    @property
    def run(self) -> TrainingRun:
        """The latest run; RuntimeError if Start has not been pressed yet."""
        if self._run is None:
            raise RuntimeError("there is no run yet; press Start first")
        return self._run

    def config(self) -> GRPOConfig:
        """Return the current settings; raises ValueError for an impossible combination."""
        return GRPOConfig(
            num_generations=self.generations.value,
            prompts_per_step=self.prompts.value,
            max_completion_length=self.length.value,
            max_steps=self.steps.value,
            learning_rate=self.rate.value,
            beta=self.beta.value,
            loss_type=self.loss_type.value,
            epsilon_high=USUAL_CAP if LOSSES[self.loss_type.value].clips == "weight" else None,
            scale_rewards="none" if self.loss_type.value == "dr_grpo" else "group",
            seed=self.seed.value,
        )

    def _start(self, button: object = None) -> None:
        if self._going:
            self.say("This run is still under way. Press Stop first; then Start begins a new run.", wrong=True)
            return
        try:
            if not self.data.value or not self.rewards.value:
                raise ValueError("choose at least one set of problems and at least one reward")
            run_config = RunConfig(
                self.model.value,
                data=self.data.value,
                reward_funcs=tuple(limit_reward(self.functions[name]) for name in self.rewards.value),
                config=self.config(),
                num_heldout=self.heldout.value,
                greedy=False,
            )
            run = TrainingRun.start(run_config, new_place(self.parent))
        except (OSError, ValueError) as error:
            self.say(str(error), wrong=True)
            return
        run.every = self.every.value
        self._begin(run)

    def _begin(self, run: TrainingRun) -> None:
        """Train a new run, or continue with one that was kept."""
        if self._run is not None and self._run is not run and self._run.history:
            self._before = self._run.rows()
        self._run = run
        self._going, self._kept = True, 0.0
        self._switch(going=True)
        self.judged.value = ""
        self.say(_STARTED if run.history else f"{_STARTED} Until its first step you see the run before.")
        self.work(self._work)

    def _work(self, worker: Worker) -> None:
        worker.holds, run = self._hold, self.run
        with run_slot(in_queue(worker, self.say)):
            self._tell()
            with closing(run.events()) as events:
                for event in events:
                    run.note(event)
                    self._tell()
                    if run.history and time.monotonic() - self._kept >= _KEEP_EVERY:
                        self._keep()
                    worker.goes_on()

    def _tell(self) -> None:
        """Show the progress, and the curves if the last picture is old enough."""
        now, run = time.perf_counter(), self.run
        if now - self._told >= _EVERY / 4 or run.part in (0, 1):
            self._told = now
            line = run.words() if run.doing == "Training" and run.history else f"{run.doing} …"
            self.progress.value = progress_bar(run.doing, run.part, line)
        if run.history and now - self._drawn >= _EVERY:
            self._draw()
            self._drawn = time.perf_counter()

    def _hold(self) -> None:
        """Before the run waits: show where it is, and keep it."""
        kept = ""
        if self.run.history:
            self._draw()
            kept = self._keep()
        if self.worker.paused:  # type: ignore[union-attr]  # it may have been told to continue meanwhile
            place = f"Paused after step {len(self.run.history)} of {self.run.config.max_steps}."
            self.say(f"{place} Press Resume to continue.{kept}")

    def _draw(self) -> None:
        """Draw the curves and the samples."""
        self.picture.value, self.alt = self.run.curves(self._before)
        self.samples.value = self.run.samples_html()

    def _keep(self) -> str:
        """Keep the run for a page that is loaded later; what went wrong, or nothing."""
        self._kept = time.monotonic()
        try:
            keep(self.run)
        except (OSError, FloatingPointError) as error:
            return f" This run cannot be kept for later: {error}"
        return ""

    def ended(self, error: BaseException | None) -> None:
        """Show and keep what the run has reached, or why it ended."""
        run, kept = self.run, ""
        finished, stopped = run.after is not None, error is None or isinstance(error, Stopped)
        if run.history:  # the picture of the whole run
            self._draw()
            kept = self._keep()
        else:
            shutil.rmtree(run.folder.path, ignore_errors=True)
        gc.collect()  # what the run held; left for later, it made the process grow by 80 MB over a hundred short runs
        self.progress.value, self._going = "", False
        if finished:
            self._show_verdict()
            self.say(f"{run.words()} {run.verdict()} {run.warnings()}{kept}")
        elif stopped:
            self.say(f"Stopped. {run.words()}{kept}")
        else:
            assert error is not None
            self.say(f"The run failed after {len(run.history)} steps. {words_of(error)}{kept}", wrong=True)
        self._switch(going=False)

    def _show_verdict(self) -> None:
        assert self.run.before and self.run.after, "the run has not ended"
        self.judged.value = self.image(accuracy_comparison(self.run.before, self.run.after), self.run.verdict())

    @property
    def _is_unfinished(self) -> bool:
        """True if the latest run can be continued."""
        return self._run is not None and self._run.after is None and self._run.folder.resumable

    def _pause(self, button: object = None) -> None:
        if not self._going:
            if self._is_unfinished:
                if run := self._open_run(self.run.folder.path):
                    self._begin(run)
            else:
                self.say("No run is under way, so there is nothing to pause. Press Start.", wrong=True)
        elif not self.worker.paused:  # type: ignore[union-attr]
            self.say("The run pauses after this step …")  # before the work stops there and reports it
            self.worker.pause()  # type: ignore[union-attr]
            self.pause.description = "Resume"
        else:
            self.pause.description = "Pause"
            self.say("The run continues.")
            self.worker.resume()  # type: ignore[union-attr]

    def _stop(self, button: object = None) -> None:
        if self._going:
            self.say("Stopping after this step …")  # before the work ends and reports it
            self.worker.stop()  # type: ignore[union-attr]
        else:
            self.say("No run is under way, so there is nothing to stop.", wrong=True)

    def _save(self, button: object = None) -> None:
        if self._going or self._run is None or not self._run.history:
            self.say("There is no finished or stopped run to save yet.", wrong=True)
            return
        try:
            folder = save_copy(self.run, self.parent)
        except (OSError, ValueError) as error:
            self.say(str(error), wrong=True)
            return
        result = f"{self.run.verdict()} {self.run.warnings()}".strip() if self.run.after else self.run.words()
        self.say(f"Saved in {folder}. {result}")

    def _switch(self, *, going: bool) -> None:
        """Enable what can be done now: a run locks its settings, and starting and saving."""
        for control in self.settings:
            control.disabled = going
        if going:
            self._offer.layout.display = "none"
        unfinished = self._is_unfinished and not going
        self.pause.description = "Resume" if unfinished else "Pause"
        if going:
            offer(self._buttons, [self.pause, self.stop], self.pause)
            return
        saveable = self._run is not None and bool(self._run.history)
        first = self.pause if unfinished else self.save if saveable else self.start
        offer(self._buttons, [self.start, *[self.save] * saveable, first], first)

    def _show_recorded(self) -> None:
        """Show a finished run with the default settings, until there is one of this page."""
        stored = json.loads((data_dir() / "curves" / RECORDED).read_text(encoding="utf-8"))
        history = stored["history"]
        self.alt = f"A recorded run with the default settings: {stored['alt']}"
        steps = int(history[-1]["step"])
        image = svg_image(live_curves(history, steps, NUM_CHECKED), self.alt)
        self.picture.value = with_values(image, live_values(history, steps))
        said = f"The picture is a recorded run with the default settings. {stored['verdict']}"
        self.say(f"{said} Press Start for a run of your own.")

    def _open(self, button: object = None) -> None:
        """Show a kept run; Resume continues with one that is not finished."""
        if self._going:
            self.say("A run is under way. Press Stop first; then Open shows the kept run.", wrong=True)
            return
        run = self._open_run(self.kept.value)
        if run is None:
            return
        self._run = run
        self._draw()
        self.judged.value = ""
        self._switch(going=False)
        if run.after is None:
            self.say(f"This run is at {run.position()}. Press Resume to continue, or Save to save it as it is.")
        else:
            self._show_verdict()
            self.say(f"{run.verdict()} {run.warnings()}")

    def _open_run(self, place: Path) -> TrainingRun | None:
        """Return the run that a folder keeps; None, and a message, if it cannot be opened."""
        try:
            return open_kept(place, self.functions.values())
        except (OSError, ValueError, KeyError) as error:
            self.say(f"This run cannot be opened: {words_of(error)}", wrong=True)
            return None
