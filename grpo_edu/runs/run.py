"""One training run: a folder, and a generator of events that evaluates, trains, saves and evaluates again.

`Run.events` yields an event for each thing that is done. At each of them, and inside a step, it can be stopped: by
closing the generator, by Ctrl-C, SIGTERM or SIGHUP, or by a kill, after which `Run.resume` continues from the last
saved state and ends with the same result. Whoever shows a run consumes its events: `follow` draws progress bars from
them. A notebook calls `run_training`, which takes the options of a run one by one.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from grpo_edu.config import GRPOConfig
from grpo_edu.evaluation import Evaluating, Evaluation, evaluate_in_batches
from grpo_edu.fast.lora import add_lora, has_adapters, merge_lora, save_adapters
from grpo_edu.fast.memory_estimate import ModelShape, held_bytes
from grpo_edu.model_files import choose_device
from grpo_edu.models import load_policy, save_policy
from grpo_edu.problems.templates import LEVELS, UNANSWERED
from grpo_edu.progress import ProgressBars
from grpo_edu.prompts import prompt_style, set_prompt_style
from grpo_edu.rollout import find_unused_turn_end, stop_token_ids
from grpo_edu.runs.completions import columns_of_batch
from grpo_edu.runs.folder import RunFolder
from grpo_edu.runs.loading import Rewards, RunData, parse_data
from grpo_edu.runs.log import write_log
from grpo_edu.runs.look import first_look
from grpo_edu.runs.options import ALL_LAYERS, RunConfig, default_config, make_plain_chat_template, use_current_names
from grpo_edu.runs.record import RunMetadata, default_folder, evaluation_settings, read_resumable, read_run_result
from grpo_edu.runs.recording import (
    RECOVERABLE_ERRORS,
    DeferInterrupts,
    note_what_is_kept,
    open_logs,
    sigterm_interrupts,
)
from grpo_edu.runs.state import (
    check_same_data,
    check_same_model,
    check_same_rewards,
    check_same_settings,
    data_fingerprint,
    find_state,
    fingerprint,
    load_state,
    pack_training,
    read_random_states,
    restore_training,
    reward_fingerprints,
    same_threads,
    save_failed_batch,
    save_state,
    warn_of_other_versions,
)
from grpo_edu.runs.summary import RunResult, report_evaluation, write_result
from grpo_edu.runs.symptoms import sample_weights, unchanged
from grpo_edu.trainer import Stages, TrainingState, check_inputs, start_training, train

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from grpo_edu.runs.tokens import TokenRecorder

_BYTES_PER_TOKEN = 100  # of a tokenizer's files, generous
CHECKPOINT_SECONDS = 300.0  # between two checkpoints, unless `checkpoint_every` says otherwise
MAX_GREEDY_SECONDS = 3.0  # if one evaluation is quicker than this, a greedy one is made as well


@dataclass(frozen=True)
class Previewed:
    """The problems are loaded. text: some of them, rendered prompts and stop tokens."""

    text: str


@dataclass(frozen=True)
class Evaluated:
    """An evaluation is complete. when: "before" or "after" training. greedy: without sampling, if requested."""

    when: str
    evaluation: Evaluation
    greedy: Evaluation | None


@dataclass(frozen=True)
class Stepped:
    """A step of training is complete, with these metrics."""

    metrics: dict[str, float]


@dataclass(frozen=True)
class Saved:
    """The state after this step is on the disk."""

    step: int


@dataclass(frozen=True)
class Stopped:
    """The run has ended, or was interrupted; its folder is complete."""

    result: RunResult


Event = Previewed | Evaluating | Evaluated | Stepped | Saved | Stopped


class Run:
    """A training run in a folder; `Run.start` and `Run.resume` make one, and `events` does the work.

    Attributes:
        folder, metadata: where it is kept, and what its config.json holds.
        data, policy, tokenizer, state: what it trains with, once it is loaded. state: None if TRL trains.
        history: the metrics of each step. before, greedy_before, after, greedy_after: the evaluations so far.
        doing: what is being done, for a progress bar.
        result: once the run has stopped after at least one step.
    """

    data: RunData
    policy: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def __init__(self, folder: RunFolder, metadata: RunMetadata, *, resumes: bool, overwrite: bool = False) -> None:
        self.folder, self.metadata, self.resumes, self.overwrite = folder, metadata, resumes, overwrite
        self.run_config, self.config = metadata.run_config, metadata.run_config.config
        self.state: TrainingState | None = None
        self.history: list[dict[str, float]] = []
        self.before: Evaluation | None = None
        self.after: Evaluation | None = None
        self.greedy_before: Evaluation | None = None
        self.greedy_after: Evaluation | None = None
        self.doing = "Loading the model"
        self.result: RunResult | None = None
        self._started = time.perf_counter()
        self._steps_before = 0
        self._saved_step = -1
        self._saved_at = 0.0
        self._is_state_whole = True
        self._stored_training: dict[str, Any] | None = None
        self._random_states: dict[str, Any] = {}

    @classmethod
    def start(
        cls, run_config: RunConfig, output: str | Path | None = None, *, overwrite: bool = False, command: str = ""
    ) -> Self:
        """Make a new run; arguments and errors as in `start_run`. Nothing is written yet."""
        if run_config.backend == "trl" and run_config.checkpoint_every:
            raise ValueError(
                f"`checkpoint_every` is {run_config.checkpoint_every}, but this command cannot resume a run with "
                "`backend` 'trl'; leave it out, train with `backend` 'grpo_edu', or use `grpo-edu cluster`."
            )
        if run_config.report_to:
            from grpo_edu.runs.tracking import check_trackers

            check_trackers(run_config.report_to)
        folder = RunFolder(output) if output else default_folder(run_config, overwrite=overwrite)
        folder.check(overwrite=overwrite)
        return cls(folder, RunMetadata.start(run_config, command), resumes=False, overwrite=overwrite)

    @classmethod
    def resume(cls, output: str | Path, *, rewards: Rewards | None = None) -> Self:
        """Go on with a run that was stopped; arguments and errors as in `resume_training`."""
        return cls(RunFolder(output), read_resumable(output, rewards), resumes=True)

    def events(self) -> Generator[Event]:
        """Do the run, from its beginning or from its last saved state, and yield an event for each thing done.

        Closing the generator stops the run as Ctrl-C does, see `start_run`.
        """
        self._started = time.perf_counter()
        with ExitStack() as context:
            if self.resumes:
                context.enter_context(same_threads(self.metadata.threads))
                context.enter_context(self.folder.resume())
            yield from self._load()
            if self.before is None:
                yield from self._evaluate_before()
            try:
                stopped = yield from self._train(context)
            except GeneratorExit as error:  # whoever took the events has closed the generator
                if not self.history:
                    raise
                stopped = error
            try:
                yield from self._finish(stopped)
            except BaseException as error:
                note_what_is_kept(error, self.folder, len(self.history))
                raise

    def _load(self) -> Iterator[Event]:
        """Load problems and model, and the state of a run that is resumed."""
        self.data = self.run_config.load_data()
        self.folder.check_apart(self.metadata.source)
        policy, self.tokenizer = open_policy(self.metadata)
        self._fingerprint = fingerprint(policy) if self.run_config.backend == "grpo_edu" else ""
        self.policy = with_adapters(policy, self.run_config)
        self._preview = first_look(self.run_config, self.data.problems, self.data.heldout, self.policy, self.tokenizer)
        check_inputs(self.policy, self.data.problems, self.config)
        if not self.resumes:
            yield Previewed(self._preview)
        self.folder.check_disk_space(self._disk_space(), resumes=self.resumes)
        self._sample = sample_weights(self.policy)
        path = find_state(self.folder.path) if self.resumes else None
        if path is not None:
            self._read_state(path)

    def _read_state(self, path: Path) -> None:
        """Read the last state that was saved; raises ValueError if it is damaged or not of this run."""
        stored = load_state(path)
        check_same_model(stored["fingerprint"], self._fingerprint, path)
        check_same_settings(stored["config"], self.config, path)
        check_same_data(stored["data"], self._data_fingerprints, self.folder.path)
        result = read_run_result(self.folder.path)
        if result is None or not result["failure"]:  # a reward on which the run failed may have been corrected
            check_same_rewards(stored.get("rewards", {}), self.run_config.reward_funcs)
        warn_of_other_versions(stored["versions"])
        if stored["before"] is not None:
            self.before = Evaluation(**stored["before"])
            self.greedy_before = stored["greedy_before"] and Evaluation(**stored["greedy_before"])
        self.history = stored["history"]
        self._steps_before = self._saved_step = len(self.history)
        self._stored_training = stored["training"]

    @cached_property
    def _data_fingerprints(self) -> dict[str, str]:
        parts = {"train": self.data.problems, "heldout": self.data.heldout}
        return {part: data_fingerprint(problems) for part, problems in parts.items()}

    # ---- evaluations ----

    def _evaluate(self, when: str, temperature: float = 1.0) -> Generator[Event, None, Evaluation]:
        """Evaluate the policy on the held-out problems; greedily without the rewards, unless there are no answers."""
        self.doing = f"Evaluating {when} training"
        pays = temperature > 0 or any(problem.level.startswith(UNANSWERED) for problem in self.data.heldout)
        return (
            yield from evaluate_in_batches(
                self.policy,
                self.tokenizer,
                self.data.heldout,
                reward_funcs=self.data.reward_funcs if pays else None,
                reward_weights=self.config.reward_weights,
                temperature=temperature,
                max_completion_length=self.config.max_completion_length,
                seed=self.config.seed,
                pack_weights=self.config.memory_budget_gib is None,
            )
        )

    def _evaluate_before(self) -> Iterator[Event]:
        """Evaluate before training, sampled and, if requested or quick, greedily."""
        started = time.perf_counter()
        self.before = yield from self._evaluate("before")
        greedy = self.run_config.greedy
        if greedy is None:
            greedy = time.perf_counter() - started < MAX_GREEDY_SECONDS
        if greedy:
            self.greedy_before = yield from self._evaluate("before", temperature=0.0)
        yield Evaluated("before", self.before, self.greedy_before)

    def _evaluate_after(self) -> Iterator[Event]:
        """Evaluate after training, in the same ways."""
        after = yield from self._evaluate("after")
        if self.greedy_before is not None:
            self.greedy_after = yield from self._evaluate("after", temperature=0.0)
        self.after = after
        yield Evaluated("after", after, self.greedy_after)

    # ---- training ----

    def _train(self, context: ExitStack) -> Generator[Event, None, BaseException | None]:
        """Take the steps that are left; returns what stopped them, or None.

        The folder of a new run is claimed when its first step is done, so that nothing is replaced by a run that never
        was. What stops the training before that is raised.
        """
        self.doing = "Training"
        training, sampled, recorder = self._start_trainer()
        self._saved_at = time.monotonic()
        is_claimed = self.resumes
        try:
            with closing(training), DeferInterrupts() as interrupts, ExitStack() as files:
                open_log = partial(open_logs, files, self.folder, self.history, self.metadata, sampled, recorder)
                if is_claimed:
                    self.folder.reserve(self._model_size())
                    log = open_log()
                if self.history:  # of a run that is resumed, which may be stopped before its next step
                    yield Saved(self._saved_step)
                for metrics in training:
                    if not is_claimed:
                        self._claim(context)
                        is_claimed = True
                        log = open_log()
                    self.history.append(metrics)
                    log(metrics)
                    if self.state is not None:
                        self._random_states = read_random_states(self.state.generator)
                        if self._save_if_due():
                            yield Saved(self._saved_step)
                    yield Stepped(metrics)
                    interrupts.raise_if_asked()
        except (*RECOVERABLE_ERRORS, OSError) as error:
            if isinstance(error, ArithmeticError) and self.state is not None and self.state.batch is not None:
                if not is_claimed and not self.folder.path.exists():  # worth a folder, if there is none yet
                    self._claim(context)
                    is_claimed = True
                if is_claimed:
                    step = self.state.batch_step
                    save_failed_batch(self.folder.diagnosis, self.state.batch, step=step, error=str(error))
            if not self.history:
                if is_claimed:
                    note_what_is_kept(error, self.folder, 0)
                self.folder.release()
                raise
            self._is_state_whole = not interrupts.is_updating
            return error
        except BaseException:
            self.folder.release()
            raise
        return None

    def _start_trainer(
        self,
    ) -> tuple[Generator[dict[str, float]], Callable[[], Mapping[str, Any]], TokenRecorder | None]:
        """Return the training, what its last step sampled, and what records the tokens of steps, if requested."""
        functions = self.data.reward_funcs
        if self.run_config.backend == "trl":
            from grpo_edu.scale.trl_backend import train_with_trl

            last: dict[str, Any] = {}
            training = train_with_trl(
                self.policy, self.tokenizer, self.data.problems, functions, self.config, on_sampled=last.update
            )
            return training, lambda: last, None
        self.state = state = start_training(self.policy, self.tokenizer, self.data.problems, self.config)
        if self._stored_training is not None:
            restore_training(self.policy, state, self._stored_training, self.folder.state)
            self._random_states = self._stored_training["random_states"]
            self._stored_training = None
        steps, recorder = self.run_config.record_token_steps, None
        if steps:
            from grpo_edu.runs.tokens import TokenRecorder

            recorder = TokenRecorder(self.policy, self.tokenizer, self.config, steps)
        training = train(
            self.policy,
            self.tokenizer,
            self.data.problems,
            functions,
            self.config,
            state=state,
            stages=recorder.stages if recorder else Stages(),
        )
        return training, lambda: columns_of_batch(state.batch, self.run_config.reward_names), recorder

    def _claim(self, context: ExitStack) -> None:
        """Check the folder of a new run again, lock it, and write what the run began with."""
        context.enter_context(self.folder.begin(self.metadata.to_dict(), overwrite=self.overwrite))
        self.folder.write_text("first_look.txt", self._preview)
        self.folder.reserve(self._model_size())

    def _save_if_due(self) -> bool:
        """Write a checkpoint if it is time for one; returns whether it was written."""
        every, step = self.run_config.checkpoint_every, len(self.history)
        if every and (step % every == 0 or step == self.config.max_steps):
            self.save_state()
        elif every is None and time.monotonic() - self._saved_at >= CHECKPOINT_SECONDS:
            self._save_last_state()  # nobody has asked for it, so a full disk does not end the run
            self._saved_at = time.monotonic()
        return self._saved_step == step

    def save_state(self) -> None:
        """Write the state after the last complete step, unless it is there; whoever takes the events may call it.

        Raises OSError if it cannot be written, and FloatingPointError if a weight is not finite.
        """
        if self.state is None or self._saved_step == len(self.history):
            return
        assert self.before is not None
        content = {
            "fingerprint": self._fingerprint,
            "config": self.config.to_dict(),
            "data": self._data_fingerprints,
            "rewards": reward_fingerprints(self.run_config.reward_funcs),
            "before": asdict(self.before),
            "greedy_before": self.greedy_before and asdict(self.greedy_before),
            "history": self.history,
            "training": pack_training(self.policy, self.state, self._random_states),
        }
        save_state(self.folder.state, content)
        self._saved_step = len(self.history)

    def _save_last_state(self) -> None:
        """Write the state after the last step, unless it is there; warns if that is not possible."""
        try:
            self.save_state()
        except (OSError, ArithmeticError, KeyboardInterrupt) as error:  # the model is still to be saved
            reason = str(error) or "interrupted again"
            warnings.warn(f"the state after step {len(self.history)} was not saved: {reason}", stacklevel=2)

    # ---- the end ----

    def _finish(self, stopped: BaseException | None) -> Iterator[Event]:
        """Save the policy, evaluate it unless the training was stopped, and write the result."""
        is_failed_early = isinstance(stopped, RuntimeError | ValueError) and self._is_state_whole  # as by a reward
        if is_failed_early or isinstance(stopped, INTERRUPTS) or (stopped is None and has_adapters(self.policy)):
            self._save_last_state()  # before the adapters are merged: the evaluation may be interrupted
        self.folder.release()
        if isinstance(stopped, OSError):  # the last lines of the log may not have found room
            write_log(self.folder.metrics, self.history)
        is_unchanged = unchanged(self.policy, self._sample)
        turn_end = find_unused_turn_end(self.tokenizer, stop_token_ids(self.policy, self.tokenizer).tolist())
        self.policy = save_trained_policy(self.policy, self.tokenizer, self.folder)
        if stopped is None:
            try:
                yield from self._evaluate_after()
            except (*RECOVERABLE_ERRORS, GeneratorExit) as error:
                stopped = error
                if isinstance(error, (*INTERRUPTS, RuntimeError, ValueError)):  # as by a reward
                    self._save_last_state()
        is_interrupted = isinstance(stopped, INTERRUPTS)
        failure = "" if stopped is None or is_interrupted else str(stopped) or type(stopped).__name__
        assert self.before is not None
        result = RunResult(
            self.folder.path,
            self.metadata,
            self.history,
            self.before,
            self.after,
            time.perf_counter() - self._started,
            self.greedy_before,
            self.greedy_after,
            steps_before=self._steps_before,
            interrupted=is_interrupted,
            failure=failure,
            unchanged=is_unchanged,
            turn_end=turn_end,
        )
        write_result(self.folder, result)
        self.result = result  # only now: an interruption before this line is not a finished run
        if stopped is not None and failure:
            raise stopped
        if not is_interrupted:
            self.folder.drop_state()
        if not isinstance(stopped, GeneratorExit):
            yield Stopped(result)

    def _disk_space(self) -> int:
        """Return the bytes needed on the disk for the model, and for two states while one replaces the other."""
        shape = ModelShape.of(self.policy)
        held = held_bytes(shape, self.config)
        state = shape.trained + held["optimizer"]
        return self._model_size() + (2 * state if self.run_config.checkpoint_every else 0)

    def _model_size(self) -> int:
        """Return the bytes of the trained model on the disk, with its adapters and its tokenizer."""
        shape = ModelShape.of(self.policy)
        adapters = shape.trained if has_adapters(self.policy) else 0
        return shape.weights + adapters + _BYTES_PER_TOKEN * len(self.tokenizer)


INTERRUPTS = (KeyboardInterrupt, GeneratorExit)


# ---- a whole run in one call ----


def run_training(
    model: str | Path = "tiny",
    *,
    config: GRPOConfig | None = None,
    output: str | Path | None = None,
    overwrite: bool = False,
    command: str = "",
    progress: bool = True,
    **options: Any,
) -> RunResult:
    """Train a policy with GRPO, evaluate it on held-out problems before and after, and save the run.

    Args:
        model: a name of `list_models()`, a folder or a Hub id.
        config: the settings of GRPO; None takes the defaults, with completions long enough for `data`.
        options: further fields of `RunConfig`, such as `data="basic"` or `num_heldout=60`; the names of version 0.3.0
            (`rewards`, `n`, …) are understood too.

    Returns the `RunResult`. `start_run` explains the other arguments, and what is raised.
    """
    options = use_current_names(options)
    for name in options:
        if name in GRPOConfig.__dataclass_fields__:
            raise TypeError(f"`{name}` belongs to GRPOConfig; pass config=GRPOConfig({name}={options[name]!r})")
    config = config or default_config(parse_data(options.get("data", LEVELS)), model, options.get("lora_rank", 0))
    run_config = RunConfig(str(model), config=config, **options)
    return start_run(run_config, output=output, overwrite=overwrite, command=command, progress=progress)


def start_run(
    run_config: RunConfig,
    *,
    output: str | Path | None = None,
    overwrite: bool = False,
    command: str = "",
    progress: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> RunResult:
    """Start a new run, and save it in a folder.

    Ctrl-C, SIGTERM and a closed terminal end the training, but not this call: the model of the last complete step is
    saved with all metrics and a state for `resume_training`, and the result says `interrupted`. An error during
    training is raised after the model and the metrics have been saved; if a gradient was not finite or too long, the
    batch that caused it is saved too (`state.load_failed_batch`).

    Args:
        run_config: the options of the run.
        output: the run's folder; None makes a new one in `runs/`.
        overwrite: replace the run that `output` holds.
        command: what was typed, for the summary.
        progress: show progress bars in a notebook or a terminal, and elsewhere a line every half minute.
        say: gets the first look at problems and prompts, before anything is sampled.

    Raises:
        ValueError, OSError: input that is not valid, with the remedy; nothing has been written then.
        KeyboardInterrupt: before the first step was complete; nothing has been written.
        Whatever `train` raises, and OSError for a full disk, with a note that says what the folder keeps.
    """
    run = Run.start(run_config, output, overwrite=overwrite, command=command)
    return follow(run, progress=progress, say=say)


def resume_training(output: str | Path, *, rewards: Rewards | None = None, progress: bool = True) -> RunResult:
    """Resume a run from the last state that it saved, with the same result as without the stop.

    On the same computer and with the same number of threads it is the same bit for bit. With fewer threads, as on a
    busy computer, torch sums in another order; ``OMP_DYNAMIC=false`` in the environment fixes their number.

    Args:
        output: the run's folder.
        rewards: the functions that it was started with, if they are not the package's own.
        progress: show progress bars.

    Raises:
        ValueError: the folder holds no run, one that saves no states or one that is finished; the state is damaged or
            of another version; the rewards are others. BlockingIOError: another process is writing the run.
            Otherwise as `start_run`.
    """
    return follow(Run.resume(output, rewards=rewards), progress=progress)


def run_evaluation(model: str | Path = "tiny", **options: Any) -> Evaluation:
    """Evaluate a policy; the options are those of `report_evaluation`, and for a run's folder by default the run's."""
    n = {"n": options.pop("n")} if "n" in options else {}
    return report_evaluation(model, **evaluation_settings(model, {**use_current_names(options), **n})).evaluation


def follow(run: Run, *, progress: bool = True, say: Callable[[str], None] = lambda text: None) -> RunResult:
    """Let a run go to its end, with progress bars; Ctrl-C, SIGTERM and a closed terminal interrupt it."""
    try:
        with sigterm_interrupts(), ProgressBars(progress) as bars, closing(run.events()) as events:
            for event in events:
                if isinstance(event, Previewed):
                    say(event.text)
                elif isinstance(event, Evaluating):
                    bars.show(run.doing, event.done, event.total)
                elif isinstance(event, Stepped):
                    reward = f"{event.metrics['reward']:.2f}"
                    bars.show(run.doing, len(run.history), run.config.max_steps, reward=reward)
    except KeyboardInterrupt:  # while nothing was computed, or before the first step was complete
        if run.result is None:
            raise
    assert run.result is not None
    return run.result


# ---- the model of a run ----


def open_policy(metadata: RunMetadata) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model that a run starts from, and give its tokenizer the run's prompt.

    Raises what `load_policy` raises.
    """
    run_config = metadata.run_config
    plain = run_config.prompt_template
    template = None if plain is None else make_plain_chat_template(plain)
    policy, tokenizer = load_policy(metadata.source, run_config.dtype, chat_template=template)
    chosen = choose_device(run_config.device, policy.num_parameters())
    if chosen.type != "cpu" and run_config.config.rollout_quantization is not None:
        raise ValueError(
            f"`rollout_quantization` {run_config.config.rollout_quantization} computes on the CPU alone, but the model "
            f"is on {chosen.type}; leave it out, or set `device` to cpu."
        )
    policy = policy.to(chosen)
    style = prompt_style(tokenizer)
    if (asked := run_config.prompt_style(style)) != style:
        set_prompt_style(tokenizer, asked)
    return policy, tokenizer


def with_adapters(policy: PreTrainedModel, run_config: RunConfig) -> PreTrainedModel:
    """Return the policy with the LoRA adapters of a run's options; their random half comes from the run's seed."""
    import torch

    if not run_config.lora_rank:
        return policy
    targets = ALL_LAYERS if run_config.lora_targets == (ALL_LAYERS,) else run_config.lora_targets
    with torch.random.fork_rng():
        torch.manual_seed(run_config.config.seed)
        return add_lora(policy, rank=run_config.lora_rank, alpha=run_config.lora_alpha, target_modules=targets)


def save_trained_policy(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: RunFolder
) -> PreTrainedModel:
    """Save the trained policy into a run's folder, for `load_policy`; adapters are saved separately, then merged.

    Returns the policy as it was saved. Raises OSError if the folder cannot be written; a note of the error names the
    temporary folder that holds the policy then.
    """
    problem: OSError | None = None
    if has_adapters(policy):
        folder.clear("adapters")
        try:
            save_adapters(policy, folder.path / "adapters")
        except OSError as error:
            problem = error
        policy = merge_lora(policy)
    try:
        if problem is not None:
            raise problem
        save_policy(policy, tokenizer, folder.model, overwrite=True)
    except OSError as error:
        elsewhere = Path(tempfile.mkdtemp(prefix="grpo-edu-model-"))
        save_policy(policy, tokenizer, elsewhere)  # raises if there is no room either
        error.add_note(f"the trained model was saved in {elsewhere} instead")
        raise
    return policy
