"""A whole run in one call: load, evaluate, train, evaluate again, and keep all of it in a folder.

The command line is a thin shell around `run_training` and `run_evaluation`; a notebook calls the same two.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import torch

from grpo_edu import __version__
from grpo_edu.config import GRPOConfig
from grpo_edu.evaluation import Evaluation, evaluate
from grpo_edu.interrupts import WholeSteps
from grpo_edu.metrics import RunLog
from grpo_edu.models import load_policy, save_policy
from grpo_edu.problems import LEVELS
from grpo_edu.rewards import reward_name
from grpo_edu.run_folder import RunFolder, model_source
from grpo_edu.run_inputs import BACKENDS, DATA, default_config, load_split, parse_names, reward_functions
from grpo_edu.run_summary import RunResult, count_steps, write_result
from grpo_edu.trainer import train

GREEDY_BUDGET = 3.0  # seconds: an evaluation that is quicker than this is also done greedily

# What ends a training in the middle, after which the steps that were done are saved.
_STOPS = (KeyboardInterrupt, ArithmeticError, MemoryError, RuntimeError, ValueError)


def run_training(
    model: str | Path = "tiny",
    *,
    data: str | Sequence[str] = LEVELS,
    data_path: str | Path | None = None,
    rewards: str | Callable | Sequence[str | Callable] = "accuracy",
    config: GRPOConfig | None = None,
    backend: str = "grpo_edu",
    dtype: str = "float32",
    n: int = 300,
    greedy: bool | None = None,
    output: str | Path | None = None,
    overwrite: bool = False,
    command: str = "",
    progress: bool = True,
) -> RunResult:
    """Train a policy with GRPO, evaluate it on held-out problems before and after, and save the run.

    Ctrl-C ends the training, not the call: the model as the last full step left it is saved with all metrics,
    and the result says `interrupted`. An error in the middle is raised after the same has been saved.

    Args:
        model: as for `load_policy`; the folder of an earlier run goes too.
        data: names of sets (`run_inputs.DATA`), in a sequence or with commas.
        data_path: folder of GSM8K's train.jsonl and test.jsonl, for data "gsm8k".
        rewards: names (`run_inputs.REWARDS`) or functions with TRL's signature.
        config: the settings; None for the defaults, with room for the solutions of `data`.
        backend: "grpo_edu", or "trl" for TRL's GRPOTrainer (see `trl_backend`).
        dtype: of the weights, as for `load_policy`; `probe.choose_dtype` finds out which is faster here.
        n: held-out problems, balanced over the sets.
        greedy: evaluate greedily as well; None does so where an evaluation takes less than three seconds.
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
    data, functions = parse_names(data, DATA, "data"), reward_functions(rewards)
    config = config or default_config(data)
    _check_asked(config, functions, data_path, backend)
    folder = RunFolder(output) if output else default_folder(model, data, config.seed, overwrite=overwrite)
    folder.check(overwrite=overwrite)
    problems = load_split(data, "train", data_path=data_path)
    heldout = load_split(data, "heldout", data_path=data_path, n=n)
    source = model_source(model)
    folder.check_apart(source)
    policy, tokenizer = load_policy(source, dtype)
    folder.check_room(sum(weight.nbytes for weight in policy.parameters()))

    test = partial(
        evaluate, policy, tokenizer, heldout,
        max_completion_length=config.max_completion_length, seed=config.seed, progress=progress,
    )  # fmt: skip
    before, seconds = _timed(test)
    greedy = seconds < GREEDY_BUDGET if greedy is None else greedy
    greedy_before = test(temperature=0.0) if greedy else None

    description = describe_run(model, data, data_path, functions, config, n, command)
    description |= {"backend": backend, "dtype": dtype}
    training = _backend(backend)(policy, tokenizer, problems, functions, config)
    history, stopped = _record(training, config.max_steps, folder, description, progress)
    with _Keeping(folder, len(history)):
        save_policy(policy, tokenizer, folder.model)
        after = greedy_after = None
        try:
            if stopped is None:
                after = test()
                greedy_after = test(temperature=0.0) if greedy else None
        except _STOPS as error:
            stopped = error
        interrupted = isinstance(stopped, KeyboardInterrupt)
        result = RunResult(
            folder.path, config, description, history, before, after, greedy_before, greedy_after,
            seconds=time.perf_counter() - started, interrupted=interrupted,
            failure="" if stopped is None or interrupted else str(stopped) or type(stopped).__name__,
        )  # fmt: skip
        write_result(folder, result)
        if result.failure:
            raise stopped
    return result


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
    data = parse_names(data, DATA, "data")
    problems = load_split(data, split, data_path=data_path, n=n)
    length = max_completion_length or default_config(data).max_completion_length
    policy, tokenizer = load_policy(model_source(model), dtype)
    return evaluate(
        policy, tokenizer, problems,
        temperature=temperature, max_completion_length=length, seed=seed, progress=progress,
    )  # fmt: skip


def default_folder(model: str | Path, data: Sequence[str], seed: int, *, overwrite: bool = False) -> RunFolder:
    """`runs/tiny-levels-seed0` or the like; a number follows where it exists and is not to be replaced."""
    place = Path(model)
    label = place.parent.name if place.name == "model" else place.name
    name = f"{label or 'model'}-{'levels' if tuple(data) == LEVELS else '-'.join(data)}-seed{seed}"
    return RunFolder(Path("runs") / name) if overwrite else RunFolder.unused(name)


def _backend(name: str) -> Callable[..., Generator[dict[str, float]]]:
    if name == "trl":
        from grpo_edu.trl_backend import train_with_trl

        return train_with_trl
    return train


def _check_asked(config: GRPOConfig, functions: Sequence[Callable], data_path: str | Path | None, backend: str) -> None:
    """Refuse early what would only fail, or mislead, after the first evaluation."""
    parse_names([backend], BACKENDS, "backend")
    if backend == "trl":
        from grpo_edu.trl_backend import trl_settings

        trl_settings(config)
    weights = config.reward_weights
    if weights is not None and len(weights) != len(functions):
        names = ", ".join(map(reward_name, functions))
        raise ValueError(f"reward_weights: {len(weights)} for the rewards {names}; give one for each")
    if data_path is not None and Path(data_path).is_file():
        raise ValueError(
            f"data_path: {data_path} is one file; name a folder with train.jsonl to learn from and "
            "test.jsonl to be judged by"
        )


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    started = time.perf_counter()
    return call(), time.perf_counter() - started


def describe_run(
    model: str | Path,
    data: Sequence[str],
    data_path: str | Path | None,
    functions: Sequence[Callable],
    config: GRPOConfig,
    n: int,
    command: str,
) -> dict[str, Any]:
    """What config.json holds: all that the run was asked for, and what it ran on."""
    import transformers

    return {
        "grpo_edu": __version__,
        "command": command,
        "model": str(model),
        "data": list(data),
        "data_path": None if data_path is None else str(data_path),
        "rewards": [reward_name(function) for function in functions],
        "num_heldout": n,
        "config": config.to_dict(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
    }


def _record(
    training: Generator[dict[str, float]],
    max_steps: int,
    folder: RunFolder,
    description: dict[str, Any],
    progress: bool,
) -> tuple[list[dict[str, float]], BaseException | None]:
    """Let the training run and log each step; returns its history and what stopped it early, or None.

    The folder is claimed when the first step is done, so that nothing is replaced by a run that never was.
    What stops the training before that is raised.
    """
    from tqdm.auto import tqdm

    history: list[dict[str, float]] = []
    bar = tqdm(total=max_steps, desc="Training", disable=None if progress else True)
    try:
        with closing(training), bar, WholeSteps() as steps, ExitStack() as files:
            for metrics in training:
                if not history:
                    folder.claim(description)
                    log = files.enter_context(RunLog(folder.metrics))
                with _Keeping(folder, len(history)):
                    log.append(metrics)
                history.append(metrics)
                bar.set_postfix(reward=f"{metrics['reward']:.2f}", refresh=False)
                bar.update()
                steps.done()
    except _STOPS as error:
        if not history:
            raise
        return history, error
    return history, None


class _Keeping:
    """A context whose errors carry a note on what the run's folder keeps of the steps that were done."""

    def __init__(self, folder: RunFolder, steps: int) -> None:
        self.folder, self.steps = folder, steps

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind, error, traceback) -> None:
        if error is not None and self.steps:
            names = ("metrics.jsonl", "model", "summary.md")
            kept = [name for name in names if (self.folder.path / name).exists()]
            error.add_note(f"{self.folder.path} keeps {count_steps(self.steps)}: {', '.join(kept)}")
