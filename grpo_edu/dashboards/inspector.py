"""The tokens of one step: how strongly the update pushed each of them, and what it then did to them."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_edu.config import GRPOConfig
from grpo_edu.dashboards.base import Dashboard, button_row, choice, offer, progress_bar, say_html
from grpo_edu.dashboards.worker import Stopped, Worker, in_queue, run_slot
from grpo_edu.figures.tokens import first_mixed, inspector_html, tokens_html
from grpo_edu.problems.instructions import INSTRUCTIONS
from grpo_edu.problems.templates import LEVELS, data_dir
from grpo_edu.runs.tokens import TokenRecorder, kept_steps, read_tokens

if TYPE_CHECKING:
    from torch import Tensor

    from grpo_edu.batch import Batch
    from grpo_edu.trainer import Stages

RECORDED, RECORDED_REAL, LIVE = "a recorded step", "a recorded step of SmolLM2", "live"
# Four updates per rollout and a KL term, so that ratios, clipping and KL can be seen.
SETTINGS = GRPOConfig(
    prompts_per_step=8,
    num_generations=8,
    num_iterations=4,
    beta=0.04,
    learning_rate=3e-4,
    max_completion_length=64,
    max_steps=1000,
    seed=1,
)
# What SmolLM2 learns from: it solves none of the word problems, but obeys some of these instructions.
KINDS = tuple(f"instructions:{kind}" for kind in ("no_comma", "question", "exclamation"))
# Of SmolLM2: a tenth of the learning rate and half of the answers; two updates show the ratio.
SETTINGS_REAL = replace(
    SETTINGS,
    prompts_per_step=4,
    num_iterations=2,
    learning_rate=2e-5,
    max_completion_length=32,
    gradient_accumulation_steps=4,
    loss_type="dr_grpo",
    scale_rewards="none",
)


# What a recorded step shows: its file, and what it is. `python -m benchmarks.dashboards --parts tokens smollm2_run`
_RECORDED = {
    RECORDED: ("tokens.json", "Step 3 of a run of the tiny model: four updates from the same answers."),
    RECORDED_REAL: (
        "tokens_smollm2.json",
        "Step 3 of the run of notebook 14: SmolLM2 is paid for obeying an instruction, and for nothing else.",
    ),
}


def recorded_tokens(which: str = RECORDED) -> dict[str, Any]:
    """Return a record that the package brings: of the tiny model by default, or of SmolLM2."""
    return json.loads((data_dir() / "curves" / _RECORDED[which][0]).read_text(encoding="utf-8"))["record"]


class TokenInspector(Dashboard):
    """Each token of a step by its push in the next update; a token that is chosen shows all its numbers.

    Args:
        shown: what to begin with: a record of `grpo_edu.runs.tokens`, or the folder of a run with `record_token_steps`.
            None begins with a recorded step.
        model: what learns when a step is trained live; "smollm2" learns from three kinds of instructions, and a step
            takes about a minute of processor time.
        parent: a folder; its runs with token records can be chosen.

    >>> inspector = TokenInspector()
    >>> inspector.record["step"], len(inspector.record["groups"][0]["completions"])
    (3, 8)
    """

    def __init__(
        self,
        shown: Mapping[str, Any] | str | Path | None = None,
        *,
        model: str | Path = "tiny",
        parent: str | Path = "runs",
    ) -> None:
        self.record: dict[str, Any] | None = None
        self.model = model
        self._given = dict(shown) if isinstance(shown, Mapping) else None
        self._training: Iterator[dict[str, float]] | None = None
        self._recorder: TokenRecorder | None = None
        runs = {folder.name: str(folder) for folder in sorted(Path(parent).glob("*")) if kept_steps(folder)}
        begin = RECORDED
        if isinstance(shown, str | Path):
            read_tokens(shown)  # raises what is wrong with it
            begin = runs[Path(shown).name] = str(shown)
        recorded = [(name, name) for name in _RECORDED]
        self.source = choice("what to look at", [*recorded, (f"live: train {model}", LIVE), *runs.items()], "a step")
        self.step = choice("step", [], "whose tokens the run keeps")
        self._buttons, row = button_row(
            {
                "Train a step": (self._train, "sample, score, update, and look at the tokens"),
                "Stop": (self.halt, "end the step, and forget what was learned live"),
            }
        )
        self.train, self.stop = self._buttons
        about = (
            "Choose a token with a click, or with Tab and the arrow keys. Change loss, advantage, ε or β, and see what "
            "becomes of each push."
        )
        super().__init__("What the update does to each token", [self.source, self.step, row], about)
        self.add_class("grpo-edu-wide")
        self.add_class("grpo-edu-tokens")
        self.message.layout.min_height = "3em"  # so that nothing jumps
        self.source.observe(self._chosen, "value")
        self.step.observe(self._stepped, "value")
        if begin == RECORDED:
            self._look()
        else:
            self.source.value = begin

    def inspect(self, record: dict[str, Any]) -> None:
        """Show a record."""
        self.record = record
        self.picture.value = inspector_html(record)
        self.alt = f"Step {record['step']}, group {first_mixed(record) + 1} of those that are kept"

    def _chosen(self, change: dict) -> None:
        self._look()

    def _stepped(self, change: dict) -> None:
        if change["new"] is not None:
            self.inspect(read_tokens(self.source.value, change["new"]))

    def _look(self) -> None:
        """Show the step of the chosen source, or say how to get one."""
        source = self.source.value
        live, kept = source == LIVE, source not in (LIVE, *_RECORDED)
        self.step.options = kept_steps(source) if kept else []
        self.step.layout.display = None if kept else "none"
        if not self.busy:
            self._offer()
        if kept:
            self.say(f"The run keeps the tokens of {len(self.step.options)} steps.")
            self.step.value = self.step.options[-1]
        elif live:
            slow = " A step takes about a minute." if self._real else ""
            self.say(f"Press “Train a step”: the model answers questions eight times, learns, and is looked at.{slow}")
        elif self._given is not None and source == RECORDED:
            self.inspect(self._given)
            self.say(f"Step {self._given['step']}, as it was given.")
        else:
            self.inspect(recorded_tokens(source))
            self.say(_RECORDED[source][1])

    def _train(self, button: object) -> None:
        if self.busy:
            self.say("A step is under way. Wait until it has ended, or press Stop.", wrong=True)
            return
        self.source.value = LIVE
        offer(self._buttons, [self.stop], self.stop)
        self.work(self._one_step)

    def _one_step(self, worker: Worker) -> None:
        """Train one step, and show it; the first loads the model."""
        with run_slot(in_queue(worker, self.say)):
            if self._training is None:
                self._tell(f"Loading {self.model} …", 0)
                self._training = self._begin()
            asked, size = self._config.prompts_per_step, self._config.num_generations
            self._tell(f"Sampling {size} answers to each of {asked} questions …", 0)
            metrics = next(self._training)
        assert self._recorder is not None and self._recorder.record is not None
        self.inspect(self._recorder.record)
        self.say(
            f"Step {int(metrics['step'])} of the live run: mean reward {metrics['reward']:.2f}, "
            f"{metrics['frac_reward_zero_std']:.0%} of the groups tied, KL {metrics.get('kl', 0):.4f}."
        )

    def _tell(self, line: str, part: float) -> None:
        """Show what is running, and a bar with the share of the step that is done."""
        self.message.value = say_html(line) + progress_bar("Progress of the step", part, "")

    def _offer(self) -> None:
        offer(self._buttons, [self.train], self.train)

    def ended(self, error: BaseException | None) -> None:
        """Offer the next step. After an error or a stop it is the first step of a new run."""
        if error is not None:
            self._training = None
        super().ended(error)
        if isinstance(error, Stopped):
            self.say("Stopped. The next step is the first one of a new run, with the model as it was before training.")
        self._offer()

    @property
    def _real(self) -> bool:
        """True if a live step is one of SmolLM2."""
        return self.model == "smollm2"

    @property
    def _config(self) -> GRPOConfig:
        """The settings of a live step."""
        return SETTINGS_REAL if self._real else SETTINGS

    def _told(self, stages: Stages) -> Stages:
        """Return the same stages, which say what comes next and can be stopped between them."""
        updates = 0

        def score(*given: Any) -> Batch:
            nonlocal updates
            updates = 0
            return stages.score(*given)

        def step(*given: Any) -> tuple[dict[str, float], Tensor]:
            nonlocal updates
            assert self.worker is not None
            self.worker.goes_on()
            updates += 1
            count = f"update {updates} of {self._config.num_iterations}"
            self._tell(
                f"Scored the answers. Now {count}, with a look at each token before and after it …",
                updates / (1 + self._config.num_iterations),
            )
            return stages.optimizer_step(*given)

        return replace(stages, score=score, optimizer_step=step)

    def _begin(self) -> Iterator[dict[str, float]]:
        from grpo_edu.models import load_policy
        from grpo_edu.problems.files import load_problems
        from grpo_edu.rewards import REWARDS
        from grpo_edu.trainer import train

        model, tokenizer = load_policy(self.model)
        config, reward = self._config, REWARDS["constraint" if self._real else "accuracy"]
        problems = load_problems(INSTRUCTIONS if self._real else LEVELS, "train")
        if self._real:
            problems = [problem for problem in problems if problem.level in KINDS]
        self._recorder = TokenRecorder(model, tokenizer, config)
        return train(model, tokenizer, problems, reward, config, stages=self._told(self._recorder.stages))

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        """Return the widget, and for pages without widgets the tokens as a list."""
        bundle = super()._repr_mimebundle_(**kwargs)
        shown = tokens_html(self.record, first_mixed(self.record)) if self.record else ""
        caption = f"{self._title}. ▲: the first update pushes the token up, ▼: down; the stronger, the darker."
        note = "Run the cell to choose a token and to change the loss."
        bundle["text/html"] = f"{shown}<p><i>{html.escape(caption)}</i><br>{note}</p>"
        return bundle
