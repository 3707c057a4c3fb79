"""A sweep that is kept: Optuna proposes settings, every run is on disk as soon as it is done, a killed sweep goes on.

config.json   what was asked for, and a fingerprint of the model that every run starts from
runs.jsonl    one line a run: settings, seed, and what it solved or why it broke
optuna.log    Optuna's journal of the search, which its own tools read too
sweep.json, sweep.png, summary.md

Optuna is an extra: ``pip install "grpo-edu[tuning]"``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from grpo_edu.checkpoints import fingerprint
from grpo_edu.config import GRPOConfig
from grpo_edu.evaluation import Evaluation, evaluate
from grpo_edu.problems import Problem
from grpo_edu.profiles import Profile
from grpo_edu.run_folder import RunFolder, read_run_config
from grpo_edu.run_inputs import check_data, load_split, reward_functions
from grpo_edu.run_lock import RunLock
from grpo_edu.run_log import RunLog, read_log
from grpo_edu.run_policy import open_policy, with_adapters
from grpo_edu.run_request import check_request, describe_run
from grpo_edu.sweep_results import SweepResult, sweep_text
from grpo_edu.sweep_search import load_optuna, open_study, search
from grpo_edu.sweeps import SweepPlan, settings_config, split_validation
from grpo_edu.trainer import train

_FILES = ("runs.jsonl", "optuna.log", "sweep.json", "sweep.png")
_BREAKS = (ValueError, ArithmeticError, MemoryError)  # of settings; anything else ends the sweep
_STOPS = (KeyboardInterrupt, OSError, RuntimeError, *_BREAKS)


def start_sweep(
    profile: Profile,
    plan: SweepPlan,
    *,
    output: str | Path | None = None,
    overwrite: bool = False,
    command: str = "",
    progress: bool = True,
) -> SweepResult:
    """Sweep over settings from a profile's, and keep it in a folder.

    Args:
        profile: model, data and settings to start from (`profiles.load_profile`).
        plan: what is tried, and how it is judged.
        output: the folder; None for a new one in runs/. overwrite: replace the run that it holds.
        command: what was typed, for the record. progress: show a bar, in a notebook or a terminal.

    Raises:
        ValueError, OSError: bad input, or a run of the starting settings that broke; the note of an error says how
            to go on. Settings that break otherwise are left out, with the reason.
    """
    load_optuna()
    asked = _describe(profile, plan, command)
    config = profile.config()
    settings_config(config, _start_settings(config, plan), config.seed)
    folder = RunFolder(output) if output else RunFolder.unused(f"sweep-{Path(asked['model']).name}")
    folder.check(overwrite=overwrite)
    folder.check_apart(asked["source"])
    problems = _problems(asked)
    asked["fingerprint"] = fingerprint(open_policy(asked)[0])
    folder.check_room(0)
    with RunLock(folder.path):
        for name in _FILES:
            (folder.path / name).unlink(missing_ok=True)
        folder.claim(asked)
        return _execute(folder, asked, problems, progress)


def resume_sweep(output: str | Path, *, progress: bool = True) -> SweepResult:
    """Go on with a sweep that was stopped; runs that are on disk are not made again, and the end is the same.

    Raises ValueError: the folder holds no sweep, or its model is another one by now. Else as `start_sweep`.
    """
    load_optuna()
    folder, asked = RunFolder(output), read_run_config(output)
    if asked is None or "sweep" not in asked:
        raise ValueError(f"resume: {folder.path} holds no sweep; start one, or name its folder")
    problems = _problems(asked)
    if fingerprint(open_policy(asked)[0]) != asked["fingerprint"]:
        raise ValueError(f"resume: the model {asked['source']} is another one than the sweep began with; start anew")
    with RunLock(folder.path):
        folder.sweep()
        return _execute(folder, asked, problems, progress)


def _describe(profile: Profile, plan: SweepPlan, command: str) -> dict[str, Any]:
    """What config.json holds; raises ValueError for what a sweep cannot do."""
    run, config = profile.run(), profile.config()
    if run["backend"] != "grpo_edu":
        raise ValueError(f"backend: {run['backend']!r} cannot be swept; leave it out")
    functions = reward_functions(run["rewards"])
    check_request(config, functions, run["data_path"], run["backend"], lora_rank=run["lora_rank"],
                  lora_alpha=run["lora_alpha"], prompt_template=run["prompt_template"])  # fmt: skip
    asked = describe_run(
        run["model"], check_data(run["data"]), run["data_path"], functions, config, plan.num_heldout, command
    )
    names = ("num_problems", "dtype", "prompt_template", "lora_rank", "lora_alpha", "lora_targets")
    return {**asked, "rewards": run["rewards"], **{name: run[name] for name in names}, "sweep": plan.to_dict()}


def _problems(asked: Mapping[str, Any]) -> dict[str, list[Problem]]:
    """Problems to train on ("train"), to choose by ("search") and to judge by ("judge")."""
    plan = SweepPlan.from_dict(asked["sweep"])
    path, count = asked["data_path"], asked["num_problems"]
    everything = load_split(asked["data"], "train", data_path=path, n=count, argument="num_problems")
    training, validation = split_validation(everything, plan.num_validation)
    return {"train": training, "search": validation,
            "judge": load_split(asked["data"], "heldout", data_path=path, n=plan.num_heldout)}  # fmt: skip


def _execute(
    folder: RunFolder, asked: dict[str, Any], problems: dict[str, list[Problem]], progress: bool
) -> SweepResult:
    """Make the runs that are missing, and write what they show."""
    plan, config = SweepPlan.from_dict(asked["sweep"]), GRPOConfig(**asked["config"])
    start = _start_settings(config, plan)
    with _running(folder, asked, problems, plan, progress) as runs:
        search(open_study(folder.path), runs.make, plan, start)
        result = SweepResult(folder.path, plan, start, runs.records)
        if result.chosen is not None:
            _judge(runs, [start, result.chosen], plan)
    result = SweepResult(folder.path, plan, start, runs.records)
    write_sweep(folder, result)
    return result


def _judge(runs: _Runs, pair: list[Mapping[str, Any]], plan: SweepPlan) -> None:
    """Train start and chosen anew, seed by seed, up to a run that breaks."""
    for seed in plan.new_seeds:
        if any("failure" in runs.make("judge", settings, seed) for settings in pair):
            return


def _start_settings(config: GRPOConfig, plan: SweepPlan) -> dict[str, Any]:
    return {name: getattr(config, name) for name in plan.space}


def write_sweep(folder: RunFolder, result: SweepResult) -> None:
    """Put sweep.json, sweep.png and summary.md into the folder of a sweep."""
    from grpo_edu.figures_sweep import sweep_figure

    folder.write_json("sweep.json", result.to_dict())
    folder.write_figure("sweep.png", sweep_figure(result))
    folder.write_text("summary.md", f"# Sweep\n\n{sweep_text(result)}\n\n![What each setting solved](sweep.png)\n")


class _Runs:
    """The runs of a sweep; each is made once, and kept as soon as it is done."""

    def __init__(self, asked: dict[str, Any], problems: dict[str, list[Problem]], log: RunLog, bar: tqdm) -> None:
        self.asked, self.problems, self.log, self.bar = asked, problems, log, bar
        self.config = GRPOConfig(**asked["config"])
        self.functions = reward_functions(asked["rewards"])
        self.records: list[dict[str, Any]] = read_log(log.path)
        bar.update(len(self.records))

    def make(self, part: str, settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """The record of a run, from the log where it is there."""
        for record in self.records:
            if (record["part"], record["settings"], record["seed"]) == (part, settings, seed):
                return record
        started = time.perf_counter()
        record = {"part": part, "settings": dict(settings), "seed": seed}
        try:
            config = settings_config(self.config, settings, seed)
            evaluation = self._train(config, self.problems[part])
            record |= {"accuracy": evaluation.accuracy, "k": evaluation.k, "n": evaluation.n}
        except _BREAKS as error:
            record["failure"] = " ".join((str(error) or type(error).__name__).split())
        record["seconds"] = round(time.perf_counter() - started, 2)
        self.log.append(record)
        self.records.append(record)
        self.bar.update()
        return record

    def _train(self, config: GRPOConfig, problems: list[Problem]) -> Evaluation:
        policy, tokenizer = open_policy(self.asked)
        policy = with_adapters(policy, {**self.asked, "config": config.to_dict()})
        for _ in train(policy, tokenizer, self.problems["train"], self.functions, config):
            pass
        return evaluate(
            policy, tokenizer, problems, max_completion_length=config.max_completion_length, seed=config.seed
        )


@contextmanager
def _running(
    folder: RunFolder, asked: dict[str, Any], problems: dict[str, list[Problem]], plan: SweepPlan, progress: bool
) -> Iterator[_Runs]:
    """The runs so far with their log open; an error gets a note on how to go on."""
    total = (plan.trials + 1) * len(plan.seeds) + 2 * plan.judge_seeds
    with RunLog(folder.path / "runs.jsonl") as log:
        with tqdm(total=total, desc="Runs", disable=None if progress else True) as bar:
            runs = _Runs(asked, problems, log, bar)
            try:
                yield runs
            except _STOPS as error:
                error.add_note(f"{len(runs.records)} runs are kept; go on with --resume {folder.path}")
                raise
