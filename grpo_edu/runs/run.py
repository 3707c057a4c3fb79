"""A whole run in one call: load the model, evaluate it, train it, evaluate it again, and keep everything in a folder.

The command line is a thin layer over `start_run`, `resume_training` and `run_evaluation`. A notebook calls
`run_training`, which takes the options of a run one by one.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from grpo_edu.config import GRPOConfig
from grpo_edu.evaluation import Evaluation, evaluate
from grpo_edu.fast.lora import add_lora, has_adapters, merge_lora, save_adapters
from grpo_edu.fast.memory_estimate import ModelShape, held_bytes
from grpo_edu.model_files import choose_device
from grpo_edu.models import load_policy, save_policy
from grpo_edu.problems.templates import LEVELS, Problem
from grpo_edu.prompts import prompt_style, set_prompt_style
from grpo_edu.runs.checkpoint import (
    check_same_data,
    data_fingerprint,
    fingerprint,
    latest_checkpoint,
    load_checkpoint,
    same_threads,
)
from grpo_edu.runs.completions import columns_of_batch
from grpo_edu.runs.folder import RunFolder
from grpo_edu.runs.log import write_log
from grpo_edu.runs.look import first_look
from grpo_edu.runs.recording import STOPS, Keeper, noting, record_steps, sigterm_interrupts
from grpo_edu.runs.request import (
    ALL_LAYERS,
    Rewards,
    RunRecord,
    RunRequest,
    check_data,
    default_config,
    default_folder,
    plain_template,
    read_resumable,
)
from grpo_edu.runs.summary import RunResult, report_evaluation, write_result
from grpo_edu.runs.symptoms import sample_weights, unchanged
from grpo_edu.runs.tokens import TokenRecorder
from grpo_edu.runs.tracking import check_trackers
from grpo_edu.trainer import check_inputs, start_training, train

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_TOKEN_SIZE = 100  # bytes per token of a tokenizer's files, generous
GREEDY_BUDGET = 3.0  # seconds: where one evaluation is quicker than this, a greedy one is made as well


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
        config: the settings of GRPO; None takes the defaults, with completions long enough for `data`.
        options: further fields of `RunRequest`, such as `data="basic"`, `rewards="accuracy,format"` or `n=60`.

    `start_run` explains the other arguments, and what is raised.
    """
    config = config or default_config(check_data(options.get("data", LEVELS)), model, options.get("lora_rank", 0))
    request = RunRequest(str(model), config=config, **options)
    return start_run(request, output=output, overwrite=overwrite, command=command, progress=progress)


def start_run(
    request: RunRequest,
    *,
    output: str | Path | None = None,
    overwrite: bool = False,
    command: str = "",
    progress: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> RunResult:
    """Start a new run, and save it in a folder.

    Ctrl-C and SIGTERM end the training, but not this call: the model of the last complete step is saved with all
    metrics and a checkpoint for `resume_training`, and the result says `interrupted`. An error during training is
    raised after the model and the metrics have been saved; if a gradient was not finite or too long, the batch that
    caused it is saved too (`checkpoint.load_failed_batch`).

    Args:
        request: what the run is asked for.
        output: the run's folder; None makes a new one in `runs/`.
        overwrite: replace the run that `output` holds.
        command: what was typed, for the summary.
        progress: show progress bars, in a notebook or a terminal but not in a pipe.
        say: gets the first look at problems and prompts, before anything is sampled.

    Raises:
        ValueError, OSError: input that is not valid, with the remedy; nothing has been written then.
        KeyboardInterrupt: before the first step was complete; nothing has been written.
        Whatever `train` raises, and OSError for a full disk, with a note that says what the folder keeps.
    """
    started = time.perf_counter()
    if request.backend == "trl" and request.checkpoint_every:
        raise ValueError(
            f"`checkpoint_every` is {request.checkpoint_every}, but this command cannot resume a run with `backend` "
            "'trl'; leave it out, train with `backend` 'grpo_edu', or use `grpo-edu cluster`."
        )
    check_trackers(request.track)
    folder = RunFolder(output) if output else default_folder(request, overwrite=overwrite)
    folder.check(overwrite=overwrite)
    record = RunRecord.start(request, command)
    with ExitStack() as held, sigterm_interrupts():
        begin = partial(_begin, held, folder, record, overwrite)
        return _execute(folder, record, begin, progress, started, say)


def resume_training(output: str | Path, *, rewards: Rewards | None = None, progress: bool = True) -> RunResult:
    """Resume a run from its last checkpoint, with the same result as without the stop.

    On the same computer and with the same number of threads it is the same bit for bit. With fewer threads, as on a
    busy computer, torch sums in another order; ``OMP_DYNAMIC=false`` in the environment fixes their number.

    Args:
        output: the run's folder.
        rewards: the functions that it was started with, if they are not the package's own.
        progress: show progress bars.

    Raises:
        ValueError: the folder holds no run, one without checkpoints or one that is finished; the checkpoint is damaged
            or of another version; the rewards are others. BlockingIOError: another process is writing the run.
            Otherwise as `start_run`.
    """
    started = time.perf_counter()
    folder, record = RunFolder(output), read_resumable(output, rewards)
    with ExitStack() as held, sigterm_interrupts():
        held.enter_context(same_threads(record.threads))
        held.enter_context(folder.resume())
        return _execute(folder, record, None, progress, started)


def run_evaluation(model: str | Path = "tiny", *, n: int = 300, **options: Any) -> Evaluation:
    """Evaluate a policy on `n` problems, balanced over the sets; the options are those of `report_evaluation`."""
    return report_evaluation(model, n=n, **options).evaluation


def _begin(
    held: ExitStack, folder: RunFolder, record: RunRecord, overwrite: bool, look: str, before: dict[str, Any]
) -> None:
    """Claim the folder of a new run: check it again, lock it, and write what the run began with."""
    held.enter_context(folder.begin(record.to_dict(), overwrite=overwrite))
    folder.write_text("first_look.txt", look)
    if record.request.checkpoint_every:
        folder.write_json("before.json", before)


@dataclass(frozen=True)
class _Work:
    """What a run trains with.

    problems, heldout: to train on, and to evaluate on. policy: with adapters, where the run trains them.
    start: fingerprint of the weights that the run starts from; empty where TRL trains it.
    """

    problems: list[Problem]
    heldout: list[Problem]
    policy: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    start: str


def _load(folder: RunFolder, record: RunRecord) -> _Work:
    """Load problems and model of a run; raises ValueError and OSError for what cannot be loaded."""
    request = record.request
    problems, heldout = request.load_problems()
    folder.check_apart(record.source)
    policy, tokenizer = open_policy(record)
    start = fingerprint(policy) if request.backend == "grpo_edu" else ""
    return _Work(problems, heldout, with_adapters(policy, request), tokenizer, start)


def _execute(
    folder: RunFolder,
    record: RunRecord,
    begin: Callable[[str, dict[str, Any]], None] | None,
    progress: bool,
    started: float,
    say: Callable[[str], None] = lambda text: None,
) -> RunResult:
    """Evaluate, train, save, evaluate again. begin: claims the folder of a new run; None resumes a run."""
    request, config, resumes = record.request, record.request.config, begin is None
    work = _load(folder, record)
    policy, tokenizer = work.policy, work.tokenizer
    look = first_look(request, work.problems, work.heldout, policy, tokenizer)
    check_inputs(policy, work.problems, config)
    if not resumes:
        say(look)
    folder.check_room(_room_needed(work, config, request.checkpoint_every), resumes=resumes)
    test = partial(
        evaluate,
        tokenizer=tokenizer,
        problems=work.heldout,
        max_completion_length=config.max_completion_length,
        seed=config.seed,
        pack_weights=not config.saves_memory,
    )
    bars = {when: progress and f"Evaluating {when} training" for when in ("before", "after")}
    data = {"train": data_fingerprint(work.problems), "heldout": data_fingerprint(work.heldout)}
    stored = _read_before(folder, data) if resumes else None
    before, greedy_before = stored or _evaluate_before(partial(test, policy, progress=bars["before"]), request.greedy)
    kept = {"sampled": asdict(before), "greedy": greedy_before and asdict(greedy_before), "data": data}
    sample = sample_weights(policy)
    training, keeper, earlier, sampled, recorder = _training(folder, request, work, resumes, kept)

    def claim() -> None:
        """Claim the folder, and reserve the disk space that the trained model will need."""
        if begin is not None:
            begin(look, kept)
        folder.reserve(_saved_size(work))

    if resumes:
        claim()
    try:
        history, stopped = record_steps(
            training,
            folder,
            record,
            history=earlier,
            progress=progress,
            keeper=keeper,
            sampled=sampled,
            recorder=recorder,
            begin=None if resumes else claim,
        )
    except BaseException:
        folder.release()
        raise
    with noting(folder, len(history)):
        if keeper is not None and (
            isinstance(stopped, KeyboardInterrupt) or (stopped is None and has_adapters(policy))
        ):
            keeper.keep_last(history)  # before the adapters are merged: the evaluation may be interrupted
        folder.release()
        if isinstance(stopped, OSError):  # the last lines of the log may not have found room
            write_log(folder.metrics, history)
        is_unchanged = unchanged(policy, sample)
        policy = keep_policy(policy, tokenizer, folder)
        after = greedy_after = None
        try:
            if stopped is None:
                after = test(policy, progress=bars["after"])
                greedy_after = test(policy, temperature=0.0, progress=bars["after"]) if greedy_before else None
        except STOPS as error:
            stopped = error
            if keeper is not None and isinstance(stopped, KeyboardInterrupt):
                keeper.keep_last(history)
        interrupted = isinstance(stopped, KeyboardInterrupt)
        result = RunResult(
            folder.path,
            record,
            history,
            before,
            after,
            time.perf_counter() - started,
            greedy_before,
            greedy_after,
            steps_before=len(earlier),
            interrupted=interrupted,
            failure="" if stopped is None or interrupted else str(stopped) or type(stopped).__name__,
            unchanged=is_unchanged,
        )
        write_result(folder, result)
        if result.failure and stopped is not None:
            raise stopped
    if not interrupted:
        folder.drop_checkpoints()
    return result


def _read_before(folder: RunFolder, data: dict[str, str]) -> tuple[Evaluation, Evaluation | None] | None:
    """Read the evaluations before training of a run that is resumed; None where the folder holds none.

    Raises ValueError where the file is damaged, or was written for other problems than those of `data`.
    """
    file = folder.path / "before.json"
    if not file.is_file():
        return None
    try:
        found = json.loads(file.read_bytes())
        evaluations = Evaluation(**found["sampled"]), found["greedy"] and Evaluation(**found["greedy"])
        stored = {part: found["data"][part] for part in data} if "data" in found else None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(
            f"`resume`: {file} is damaged; delete it, and the evaluation before training is repeated."
        ) from None
    check_same_data(stored, data, folder.path)
    return evaluations


def _evaluate_before(test: Callable[..., Evaluation], greedy: bool | None) -> tuple[Evaluation, Evaluation | None]:
    """Evaluate before training, sampled and perhaps greedy."""
    started = time.perf_counter()
    before = test()
    if greedy is None:
        greedy = time.perf_counter() - started < GREEDY_BUDGET
    return before, test(temperature=0.0) if greedy else None


def _training(
    folder: RunFolder, request: RunRequest, work: _Work, resumes: bool, before: dict[str, Any]
) -> tuple[
    Generator[dict[str, float]],
    Keeper | None,
    list[dict[str, float]],
    Callable[[], Mapping[str, Any]],
    TokenRecorder | None,
]:
    """Return the training, what writes its checkpoints, the metrics of earlier steps, and what the last one sampled.

    The last of the five records the tokens of steps, where the run asks for it.
    """
    config, functions = request.config, request.reward_functions
    if request.backend == "trl":
        from grpo_edu.scale.trl_backend import train_with_trl

        last: dict[str, Any] = {}
        training = train_with_trl(work.policy, work.tokenizer, work.problems, functions, config, on_sampled=last.update)
        return training, None, [], lambda: last, None
    state = start_training(work.policy, work.tokenizer, work.problems, config)
    asked = request.inspect_steps
    recorder = TokenRecorder(work.policy, work.tokenizer, config, asked) if asked else None
    history: list[dict[str, float]] = []
    checkpoint = latest_checkpoint(folder.checkpoints) if resumes else None
    if checkpoint is not None:
        history = load_checkpoint(checkpoint, work.policy, state, config, fingerprint=work.start)
    keeper = Keeper(folder, request.checkpoint_every, work.policy, state, config, work.start, before)
    watched: dict[str, Any] = {"stages": recorder.stages} if recorder else {}
    training = train(work.policy, work.tokenizer, work.problems, functions, config, state=state, **watched)
    return training, keeper, history, lambda: columns_of_batch(state.batch, request.reward_names), recorder


def _room_needed(work: _Work, config: GRPOConfig, checkpoint_every: int) -> int:
    """Return the bytes needed on the disk for the model, and for two checkpoints while one replaces the other."""
    shape = ModelShape.of(work.policy)
    held = held_bytes(shape, config)
    checkpoint = shape.trained + held["optimizer"]
    return _saved_size(work) + (2 * checkpoint if checkpoint_every else 0)


def _saved_size(work: _Work) -> int:
    """Return the bytes of the trained model on the disk, with its adapters and its tokenizer."""
    shape = ModelShape.of(work.policy)
    adapters = shape.trained if has_adapters(work.policy) else 0
    return shape.weights + adapters + _TOKEN_SIZE * len(work.tokenizer)


def open_policy(record: RunRecord, device: str | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model that a run starts from, and give its tokenizer the run's prompt.

    device: where to load it, in place of the request's.

    Raises what `load_policy` raises.
    """
    request = record.request
    policy, tokenizer = load_policy(record.source, request.dtype)
    if request.prompt_template is not None:
        tokenizer.chat_template = plain_template(request.prompt_template)
    place = choose_device(device or request.device, policy.num_parameters())
    if place.type != "cpu" and request.config.rollout_quantization is not None:
        raise ValueError(
            f"`rollout_quantization` {request.config.rollout_quantization} computes on the CPU alone, but the model is "
            f"on {place.type}; leave it out, or set `device` to cpu."
        )
    policy = policy.to(place)
    style = prompt_style(tokenizer)
    if (asked := request.prompt_style(style)) != style:
        set_prompt_style(tokenizer, asked)
    return policy, tokenizer


def with_adapters(policy: PreTrainedModel, request: RunRequest) -> PreTrainedModel:
    """Return the policy with the LoRA adapters that a run asks for; their random half comes from the run's seed."""
    if not request.lora_rank:
        return policy
    targets = ALL_LAYERS if request.lora_targets == (ALL_LAYERS,) else request.lora_targets
    with torch.random.fork_rng():
        torch.manual_seed(request.config.seed)
        return add_lora(policy, rank=request.lora_rank, alpha=request.lora_alpha, target_modules=targets)


def keep_policy(policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: RunFolder) -> PreTrainedModel:
    """Save the trained policy into a run's folder, for `load_policy`; adapters are saved separately, then merged.

    Returns the policy as it was saved. Raises OSError where the folder cannot be written; a note of the error names the
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
        save_policy(policy, tokenizer, elsewhere)  # raises where there is no room either
        error.add_note(f"the trained model was saved in {elsewhere} instead")
        raise
    return policy
