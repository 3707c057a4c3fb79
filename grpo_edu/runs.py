"""A whole run in one call: load, evaluate, train, evaluate again, and keep all of it in a folder.

The command line is a thin shell around `run_training`, `resume_training` and `run_evaluation`; a notebook calls the
same three.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_edu.checkpoints import fingerprint, latest_checkpoint, load_checkpoint, same_threads
from grpo_edu.config import GRPOConfig
from grpo_edu.evaluation import Evaluation, evaluate
from grpo_edu.evaluation_report import report_evaluation
from grpo_edu.memory_estimate import ModelShape, held_bytes
from grpo_edu.problems import LEVELS
from grpo_edu.processes import this_process
from grpo_edu.run_folder import RunFolder
from grpo_edu.run_inputs import check_data, default_config, load_split, reward_functions
from grpo_edu.run_lock import RunLock
from grpo_edu.run_policy import keep_policy, open_policy, with_adapters
from grpo_edu.run_processes import check_processes
from grpo_edu.run_recording import STOPS, Keeper, noting, record_steps
from grpo_edu.run_request import check_request, default_folder, describe_run, read_request, stored_rewards
from grpo_edu.run_summary import RunResult, write_result
from grpo_edu.tracking import check_trackers
from grpo_edu.trainer import start_training, train

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["default_folder", "describe_run", "resume_training", "run_evaluation", "run_training"]

GREEDY_BUDGET = 3.0  # seconds: an evaluation that is quicker than this is also done greedily


def run_training(
    model: str | Path = "tiny",
    *,
    data: str | Sequence[str] = LEVELS,
    data_path: str | Path | None = None,
    num_problems: int | None = None,
    rewards: str | Callable | Sequence[str | Callable] = "accuracy",
    config: GRPOConfig | None = None,
    backend: str = "grpo_edu",
    dtype: str = "float32",
    prompt_template: str | None = None,
    lora_rank: int = 0,
    lora_alpha: float | None = None,
    lora_targets: str | Sequence[str] = "all-linear",
    n: int = 300,
    greedy: bool | None = None,
    checkpoint_every: int = 0,
    track: str | Sequence[str] = (),
    output: str | Path | None = None,
    overwrite: bool = False,
    command: str = "",
    progress: bool = True,
) -> RunResult | None:
    """Train a policy with GRPO, evaluate it on held-out problems before and after, and save the run.

    Ctrl-C ends the training, not the call: the model as the last full step left it is saved with all metrics,
    and the result says `interrupted`. An error in the middle is raised after the same has been saved; where the numbers
    went wrong, the batch is kept as well (`failed_batches`).

    Of several processes (`grpo_edu.processes`) the main one evaluates, writes and returns; the others learn along, and
    get None.

    Args:
        model: as for `load_policy`; the folder of an earlier run goes too.
        data: names of sets (`run_inputs.DATA`), in a sequence or with commas.
        data_path: folder of GSM8K's train.jsonl and test.jsonl, for data "gsm8k".
        num_problems: training problems, taken evenly from the sets; None takes all.
        rewards: names (`run_inputs.REWARDS`) or functions with TRL's signature.
        config: the settings; None for the defaults, with room for the solutions of `data`.
        backend: "grpo_edu", or "trl" for TRL's GRPOTrainer (see `trl_backend`).
        dtype: of the weights, as for `load_policy`; `probe.choose_dtype` finds out which is faster here.
        prompt_template: a text with {problem} in it that asks instead of the model's chat template.
        lora_rank, lora_alpha, lora_targets: train adapters, as `adapters.add_lora`; rank 0: train all weights.
        n: held-out problems, balanced over the sets.
        greedy: evaluate greedily as well; None does so where an evaluation takes less than three seconds.
        checkpoint_every: write a checkpoint every so many steps, for `resume_training`; 0: none.
        track: trackers that get the metrics too, names of `tracking.TRACKERS`.
        output: the run's folder; None for a new one in `runs/`.
        overwrite: replace a run that `output` holds.
        command: what was typed, for the summary.
        progress: show bars, in a notebook or a terminal but not in a pipe.

    Raises:
        ValueError, OSError: bad input, with a word on what to do; nothing has been written then.
        KeyboardInterrupt: before the first step was complete; nothing has been written.
        Whatever `train` raises, and OSError for a full disk, with a note on what the folder keeps.
    """
    started = time.perf_counter()
    data, functions = check_data(data), reward_functions(rewards)
    config = config or default_config(data)
    check_request(
        config, functions, data_path, backend,
        checkpoint_every=checkpoint_every, lora_rank=lora_rank, lora_alpha=lora_alpha, prompt_template=prompt_template,
    )  # fmt: skip
    folder = RunFolder(output) if output else default_folder(model, data, config.seed, overwrite=overwrite)
    if this_process().is_main:
        folder.check(overwrite=overwrite)
    asked = describe_run(model, data, data_path, functions, config, n, command)
    asked |= {
        "num_problems": num_problems, "backend": backend, "dtype": dtype, "prompt_template": prompt_template,
        "lora_rank": lora_rank, "lora_alpha": lora_alpha, "lora_targets": lora_targets, "greedy": greedy,
        "checkpoint_every": checkpoint_every, "track": list(check_trackers(track)),
    }  # fmt: skip
    with ExitStack() as held:
        begin = partial(_begin, held, folder, asked, overwrite)
        return _execute(folder, asked, functions, begin, progress, started)


def resume_training(
    output: str | Path, *, rewards: Callable | Sequence[Callable] | None = None, progress: bool = True
) -> RunResult | None:
    """Go on with a run that was stopped, from its last checkpoint; the end is the same, bit for bit, on one machine.

    Args:
        output: the run's folder.
        rewards: the functions that it was started with, where they are not the package's.
        progress: show bars.

    Raises:
        ValueError: no run, one without checkpoints or one that is finished; a checkpoint that is damaged or of another
            version; other rewards. BlockingIOError: another process is at it. Else as `run_training`.
    """
    started = time.perf_counter()
    folder, asked = RunFolder(output), read_request(output)
    functions = stored_rewards(asked, reward_functions(rewards) if rewards is not None else None)
    with ExitStack() as held:
        held.enter_context(same_threads(asked["threads"]))
        if this_process().is_main:
            held.enter_context(RunLock(folder.path))
            folder.sweep()
        return _execute(folder, asked, functions, None, progress, started)


def run_evaluation(
    model: str | Path = "tiny",
    *,
    data: str | Sequence[str] = LEVELS,
    data_path: str | Path | None = None,
    split: str = "heldout",
    n: int = 300,
    seed: int = 0,
    temperature: float = 1.0,
    max_completion_length: int | None = None,
    dtype: str = "float32",
    progress: bool = True,
) -> Evaluation:
    """Evaluate a policy on `n` problems, balanced over the sets; other arguments as in `run_training`.

    max_completion_length: tokens; None for what the solutions of `data` need. data_path may be one file here.

    Raises ValueError and OSError for bad input, with a word on what to do.
    """
    return report_evaluation(
        model, data=data, data_path=data_path, split=split, n=n, seed=seed, temperature=temperature,
        max_completion_length=max_completion_length, dtype=dtype, progress=progress,
    ).evaluation  # fmt: skip


def _begin(held: ExitStack, folder: RunFolder, asked: dict[str, Any], overwrite: bool, before: dict[str, Any]) -> None:
    """Take the folder of a new run: once more looked at, held against others, and with what it began with."""
    folder.check(overwrite=overwrite)
    held.enter_context(RunLock(folder.path))
    folder.claim(asked)
    if asked["checkpoint_every"]:
        folder.write_json("before.json", before)


def _execute(
    folder: RunFolder,
    asked: dict[str, Any],
    functions: Sequence[Callable],
    begin: Callable[[dict[str, Any]], None] | None,
    progress: bool,
    started: float,
) -> RunResult | None:
    """Evaluate, train, save, evaluate again. begin: claims the folder of a new run; None: the run goes on."""
    config = GRPOConfig(**asked["config"])
    count, path = asked["num_problems"], asked["data_path"]
    problems = load_split(asked["data"], "train", data_path=path, n=count, argument="num_problems")
    heldout = load_split(asked["data"], "heldout", data_path=path, n=asked["num_heldout"])
    folder.check_apart(asked["source"])
    check_processes(config, asked)
    policy, tokenizer = open_policy(asked)
    mark = fingerprint(policy) if asked["checkpoint_every"] else ""
    policy = with_adapters(policy, asked)
    arguments = (policy, tokenizer, problems, functions, config)
    if not this_process().is_main:
        training, _, _ = _training(folder, asked, arguments, mark, begin is None)
        deque(training, maxlen=0)
        return None
    folder.check_room(_room_needed(policy, config, asked["checkpoint_every"]))
    test = partial(
        evaluate, tokenizer=tokenizer, problems=heldout,
        max_completion_length=config.max_completion_length, seed=config.seed, progress=progress,
    )  # fmt: skip
    before, greedy_before = _before(folder, partial(test, policy), asked["greedy"], stored=begin is None)
    training, keeper, earlier = _training(folder, asked, arguments, mark, begin is None)
    kept = {"sampled": asdict(before), "greedy": greedy_before and asdict(greedy_before)}
    history, stopped = record_steps(
        training, folder, config.max_steps, history=earlier, progress=progress, keeper=keeper, track=asked["track"],
        begin=None if begin is None else partial(begin, kept),
    )  # fmt: skip
    if stopped is not None:
        this_process().tell(stopped)
    with noting(folder, len(history)):
        policy = keep_policy(policy, tokenizer, folder)
        after = greedy_after = None
        try:
            if stopped is None:
                after = test(policy)
                greedy_after = test(policy, temperature=0.0) if greedy_before else None
        except STOPS as error:
            stopped = error
        interrupted = isinstance(stopped, KeyboardInterrupt)
        result = RunResult(
            folder.path, config, asked, history, before, after, greedy_before, greedy_after,
            seconds=time.perf_counter() - started, steps_before=len(earlier), interrupted=interrupted,
            failure="" if stopped is None or interrupted else str(stopped) or type(stopped).__name__,
        )  # fmt: skip
        write_result(folder, result)
        if result.failure and stopped is not None:
            raise stopped
    if not interrupted:
        folder.drop_checkpoints()
    return result


def _before(
    folder: RunFolder, test: Callable[..., Evaluation], greedy: bool | None, *, stored: bool
) -> tuple[Evaluation, Evaluation | None]:
    """The evaluation before training, sampled and perhaps greedy; of a run that goes on, the stored one."""
    file = folder.path / "before.json"
    if stored and file.is_file():
        found = json.loads(file.read_text(encoding="utf-8"))
        return Evaluation(**found["sampled"]), found["greedy"] and Evaluation(**found["greedy"])
    started = time.perf_counter()
    before = test()
    if greedy is None:
        greedy = time.perf_counter() - started < GREEDY_BUDGET
    return before, test(temperature=0.0) if greedy else None


def _training(
    folder: RunFolder, asked: dict[str, Any], arguments: tuple[Any, ...], mark: str, goes_on: bool
) -> tuple[Generator[dict[str, float]], Keeper | None, list[dict[str, float]]]:
    """The training as it will run, what keeps it, and the metrics of the steps that were done before.

    arguments: of `train`. mark: the fingerprint of the weights that the run started from.
    """
    if asked["backend"] == "trl":
        from grpo_edu.trl_backend import train_with_trl

        return train_with_trl(*arguments), None, []
    policy, tokenizer, problems, _, config = arguments
    state, history = start_training(policy, tokenizer, problems, config), list[dict[str, float]]()
    place = latest_checkpoint(folder.checkpoints) if goes_on else None
    if place is not None:
        history = load_checkpoint(place, policy, state, config, fingerprint=mark)
    keeper = Keeper(folder, asked["checkpoint_every"], policy, state, config, mark)
    return train(*arguments, state=state), keeper, history


def _room_needed(policy: PreTrainedModel, config: GRPOConfig, checkpoint_every: int) -> int:
    """Bytes on the disk: the model, and with checkpoints two of them, since the older goes when the newer is there."""
    shape = ModelShape.of(policy)
    checkpoint = shape.trained + held_bytes(shape, config)["optimizer"]
    return shape.weights + (2 * checkpoint if checkpoint_every else 0)
