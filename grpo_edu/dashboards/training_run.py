"""A training run that a dashboard follows: its settings, its progress, and how to save it. No widgets."""

from __future__ import annotations

import functools
import html
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_edu.config import GRPOConfig
from grpo_edu.dashboards.worker import Worker, cut_off
from grpo_edu.figures.hover import with_values
from grpo_edu.figures.live import ACCURACY, live_curves, live_values, svg_image
from grpo_edu.figures.style import COLORS
from grpo_edu.rewards import REWARDS, reward_name
from grpo_edu.runs.loading import load_split

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from grpo_edu.evaluation import Evaluation
    from grpo_edu.models import Session
    from grpo_edu.trainer import TrainingState

AT_ONCE = 20  # held-out problems that are evaluated before the run can be paused or stopped
_REWARD_SECONDS = 20.0  # time limit of the user's own reward functions for one batch


class Stopwatch:
    """A context that measures the seconds spent inside in total, and counts how often it was entered."""

    def __init__(self) -> None:
        self.seconds, self.count = 0.0, 0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        self.seconds += time.perf_counter() - self._began
        self.count += 1


class TrainingRun:
    """One training run: `go` trains step by step, and the other methods describe and save the result.

    Args:
        model_name: for `Session`. data: names of sets. functions: rewards with TRL's signature. config: settings.
        heldout: number of problems for the evaluations before and after training.
        every: steps between two evaluations on the first twenty of them; 0 for none.

    Raises ValueError for problems that are too few.
    """

    def __init__(
        self,
        model_name: str,
        data: Sequence[str],
        functions: Sequence[Callable],
        config: GRPOConfig,
        *,
        heldout: int = 60,
        every: int = 10,
    ) -> None:
        self.model_name, self.data, self.config, self.every = model_name, tuple(data), config, every
        self.functions = list(functions)
        self.problems = load_split(self.data, "train")
        self.heldout = load_split(self.data, "heldout", n=heldout)
        self.name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        self.history: list[dict[str, float]] = []
        self.checks: dict[int, Evaluation] = {}
        self.before: Evaluation | None = None
        self.after: Evaluation | None = None
        self.state: TrainingState | None = None
        self.checkpoint: Path | None = None  # of a run that is continued
        self.samples: tuple[str, list[tuple[str, float]]] = ("", [])
        self.training_seconds, self.failure = 0.0, ""
        self.drawing = Stopwatch()
        self.stage, self.part = "Loading the model", 0.0  # what is being done, and how much of it is complete

    def prepare(self, session: Session) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Return the model as the run needs it now: as it was loaded, or with the weights of a continued run."""
        from grpo_edu.runs.state import load_state, restore_training
        from grpo_edu.trainer import start_training

        model, tokenizer = session.reset()
        self.state = start_training(model, tokenizer, self.problems, self.config)
        if self.checkpoint is not None:
            restore_training(model, self.state, load_state(self.checkpoint)["training"], self.checkpoint)
        return model, tokenizer

    def go(self, session: Session, worker: Worker, tell: Callable[[], None]) -> Iterator[dict[str, float]]:
        """Evaluate, train, evaluate; yields the metrics of each step, before which the run can be paused.

        `tell` is called whenever `stage`, `part` or `history` have changed. Raises Stopped if the worker is told to
        stop.
        """
        from grpo_edu.trainer import train

        tell()
        model, tokenizer = self.prepare(session)
        if self.before is None:
            self.before = self._judge(model, tokenizer, worker, tell, "Evaluation before training")
            self.checks[0] = self.before.take(range(AT_ONCE))
        self.stage, self.part = "Training", len(self.history) / self.config.max_steps
        tell()
        rewards = self._watched(worker)
        with closing(train(model, tokenizer, self.problems, rewards, self.config, state=self.state)) as training:
            for metrics in training:
                self.history.append(metrics)
                self.training_seconds += metrics["step_time"]
                step = int(metrics["step"])
                if self.every and step % self.every == 0:
                    self.checks[step] = self._judge(model, tokenizer, worker, tell, "", AT_ONCE)
                self.part = step / self.config.max_steps
                tell()
                yield metrics
                worker.goes_on()
        self.after = self._judge(model, tokenizer, worker, tell, "Evaluation after training")

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
        from grpo_edu.fast.memory import GIB, resident_bytes

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
                row[ACCURACY] = self.checks[int(row["step"])].accuracy
        return rows

    def curves(self, previous: Sequence[dict[str, float]] = ()) -> tuple[str, str]:
        """Return the curves so far as an image, over those of a previous run if given, and its alternative text."""
        first, last = self.history[0]["reward"], self.history[-1]["reward"]
        alt = f"Curves over {len(self.history)} steps; the mean reward goes from {first:.2f} to {last:.2f}"
        if len(self.checks) > 1:
            shares = ", ".join(f"{check.accuracy:.0%}" for check in self.checks.values())
            alt += f"; accuracy on {AT_ONCE} held-out problems {shares}"
        if previous:
            alt += f". Dashed, for comparison: the run before, which ended at {previous[-1]['reward']:.2f}"
        rows, steps = self.rows(), self.config.max_steps
        image = svg_image(live_curves(rows, steps, AT_ONCE, previous=previous), alt)
        return with_values(image, live_values(rows, steps, previous=previous)), alt

    def verdict(self) -> str:
        """Accuracy before and after, with the interval of the difference and the paired test."""
        from grpo_edu.evaluation import compare

        assert self.before and self.after, "the run has not ended"
        found = compare(self.before, self.after)
        return (
            f"Accuracy on {len(self.before.correct)} held-out problems: "
            f"{found.before:.0%} before, {found.after:.0%} after, {100 * found.difference:+.0f} points "
            f"[{100 * found.low:+.0f}, {100 * found.high:+.0f}], exact McNemar p = {found.p_value:.2g}."
        )

    def warnings(self) -> str:
        """Return what went wrong in the training, with cause and remedy; empty for a healthy run."""
        from grpo_edu.runs.measures import RunFacts
        from grpo_edu.runs.symptoms import find_symptoms

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

    def save(self, session: Session, parent: Path) -> Path:
        """Write the run's folder, as `run_training` does; returns it."""
        from grpo_edu.models import save_policy
        from grpo_edu.runs.folder import RunFolder
        from grpo_edu.runs.log import RunLog
        from grpo_edu.runs.options import RunConfig
        from grpo_edu.runs.record import RunMetadata
        from grpo_edu.runs.summary import RunResult, write_result

        if self.state is None:  # shown again, and not continued
            self.prepare(session)
        folder = RunFolder.unused(f"{Path(self.model_name).name}-dashboard-seed{self.config.seed}", parent=parent)
        folder.check_disk_space(sum(weight.nbytes for weight in session.model.parameters()))
        record = RunMetadata.start(
            RunConfig(
                model=self.model_name,
                data=self.data,
                reward_funcs=tuple(self.functions),
                config=self.config,
                dtype=str(session.model.dtype).removeprefix("torch."),
                num_heldout=len(self.heldout),
            )
        )
        folder.claim(record.to_dict())
        with RunLog(folder.metrics) as log:
            for metrics in self.history:
                log.append(metrics)
        save_policy(session.model, session.tokenizer, folder.model)
        stopped = self.after is None and not self.failure
        assert self.before, "a run with a history was judged before"
        write_result(
            folder,
            RunResult(
                folder.path,
                record,
                self.history,
                self.before,
                self.after,
                self.training_seconds,
                interrupted=stopped,
                failure=self.failure,
            ),
        )
        return folder.path

    def _judge(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        worker: Worker,
        tell: Callable[[], None],
        stage: str,
        count: int | None = None,
    ) -> Evaluation:
        """Evaluate in parts, between which the run can be paused or stopped; `stage` "" is not reported."""
        from grpo_edu.evaluation import Evaluation, evaluate

        parts, all_of_them = [], count or len(self.heldout)
        for start in range(0, all_of_them, AT_ONCE):
            if stage:
                self.stage, self.part = stage, start / all_of_them
                tell()
            worker.goes_on()
            chosen = self.heldout[start : start + AT_ONCE]
            length = self.config.max_completion_length
            parts.append(evaluate(model, tokenizer, chosen, max_completion_length=length, seed=self.config.seed))
        names = vars(parts[0])
        return Evaluation(**{name: [row for part in parts for row in getattr(part, name)] for name in names})

    def _watched(self, worker: Worker) -> list[Callable]:
        """Return the rewards, which note the first group of a step; the user's own ones get a time limit."""
        return [self._watch(number, function, worker) for number, function in enumerate(self.functions)]

    def _watch(self, number: int, function: Callable, worker: Worker) -> Callable:
        limited = function not in REWARDS.values()

        @functools.wraps(function, assigned=())
        def watched(prompts: list[str], completions: list[str], **columns: Any) -> Sequence[float | None]:
            call = functools.partial(function, prompts=prompts, completions=completions, **columns)
            rewards = cut_off(call, _REWARD_SECONDS, "the reward") if limited else call()
            size = self.config.num_generations
            old = [value for _, value in self.samples[1]] if number else [0.0] * size
            values = [0.0 if value is None else float(value) for value in rewards[:size]]
            rows = [(text, a + b) for text, a, b in zip(completions[:size], old, values, strict=True)]
            self.samples = (prompts[0], rows)
            return rewards

        watched.__name__ = reward_name(function)
        return watched
