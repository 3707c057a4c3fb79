"""A sweep in its folder: runs in a table, whose settings Optuna proposes.

config.json   the options, and a fingerprint of the model that every run starts from
runs.jsonl    the table, a line for each run
sweep.json, summary.md

Every proposal is trained with each seed, and its mean is the value that Optuna learns from. Its sampler is a
tree-structured Parzen estimator (Bergstra et al. 2011). A sweep that is resumed goes its way again from the beginning:
runs of the table are not repeated, and so Optuna proposes the same settings.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from grpo_edu.config import GRPOConfig
from grpo_edu.evaluation import evaluate
from grpo_edu.problems.templates import Problem
from grpo_edu.progress import ProgressBars
from grpo_edu.runs.folder import RunFolder
from grpo_edu.runs.log import RunLog, read_log, write_log
from grpo_edu.runs.profiles import Profile
from grpo_edu.runs.record import RunMetadata, model_label
from grpo_edu.runs.recording import note_kept
from grpo_edu.runs.run import open_policy, with_adapters
from grpo_edu.runs.state import (
    check_same_data,
    check_same_model,
    check_same_rewards,
    data_fingerprint,
    fingerprint,
    reward_fingerprints,
)
from grpo_edu.studies.sweep import SweepPlan, SweepResult, Tried, settings_config, split_validation, sweep_text
from grpo_edu.trainer import train

_MAX_PROPOSALS = 20  # per trial: Optuna may propose the same settings again, until there is nothing new to find
_FAILURES = (ValueError, ArithmeticError, MemoryError)  # of one setting; any other error ends the sweep


def start_sweep(
    profile: Profile, plan: SweepPlan, *, output: str | Path | None = None, overwrite: bool = False, command: str = ""
) -> SweepResult:
    """Sweep over settings, starting from those of a profile, and save the sweep in a folder.

    Args:
        profile: model, data and settings to start from (`profiles.load_profile`).
        plan: what is tried, and how it is compared.
        output: the folder; None makes a new one in runs/. overwrite: replace the run that it holds.
        command: what was typed, for the record.

    Raises:
        ValueError, OSError: input that is not valid, or a run with the starting settings that failed. A note of the
            error says how to resume. Other settings that fail are left out, with the reason.
    """
    run_config = replace(profile.request(), num_heldout=plan.num_heldout, checkpoint_every=0, report_to=())
    if run_config.backend != "grpo_edu":
        raise ValueError(f"`backend` {run_config.backend!r} cannot be swept; leave it out.")
    folder = RunFolder(output) if output else RunFolder.unused(f"sweep-{model_label(run_config.model)}")
    folder.check(overwrite=overwrite)
    sweep = Sweep(folder, RunMetadata.start(run_config, command), plan)
    settings_config(sweep.base, sweep.result.start, sweep.base.seed)
    folder.check_apart(sweep.metadata.source)
    folder.check_disk_space(0)
    config = {**sweep.metadata.to_dict(), "sweep": asdict(plan), **sweep.fingerprints()}
    with folder.begin(config, overwrite=overwrite):
        return sweep.run()


def resume_sweep(output: str | Path) -> SweepResult:
    """Resume a sweep that was stopped; stored runs are not repeated, and the result is the same.

    Raises ValueError if the folder holds no sweep, or its model or problems have changed; otherwise as `start_sweep`.
    """
    folder = RunFolder(output)
    config = folder.read_config("sweep", "sweep")
    sweep = Sweep(folder, RunMetadata.from_dict(config), SweepPlan(**config["sweep"]))
    found = sweep.fingerprints()
    check_same_model(config["fingerprint"], found["fingerprint"], folder.path)
    check_same_data(config.get("data_fingerprints"), found["data_fingerprints"], folder.path)
    check_same_rewards(config.get("reward_fingerprints", {}), sweep.metadata.run_config.reward_funcs)
    with folder.resume():
        return sweep.run()


class Sweep:
    """The runs of a sweep: each is done once, and stored as soon as it is done.

    Attributes:
        problems: to train on ("train"), to choose settings by ("search") and to compare on ("judge").
        result: the table of the runs so far, and what follows from it.
    """

    def __init__(self, folder: RunFolder, metadata: RunMetadata, plan: SweepPlan) -> None:
        self.folder, self.metadata, self.plan = folder, metadata, plan
        self.base = metadata.run_config.config
        self.data = metadata.run_config.load_data()
        training, validation = split_validation(self.data.problems, plan.num_validation)
        self.problems = {"train": training, "search": validation, "judge": self.data.heldout}
        self.result = SweepResult(folder.path, plan, {name: getattr(self.base, name) for name in plan.space}, [])

    def fingerprints(self) -> dict[str, Any]:
        """Return what config.json keeps of the model, the problems and the files of rewards."""
        data = {part: data_fingerprint(problems) for part, problems in self.problems.items()}
        return {
            "fingerprint": fingerprint(open_policy(self.metadata)[0]),
            "data_fingerprints": data,
            "reward_fingerprints": reward_fingerprints(self.metadata.run_config.reward_funcs),
        }

    def run(self) -> SweepResult:
        """Do the runs that are missing, and write the result."""
        plan, result = self.plan, self.result
        result.records[:] = read_runs(self.folder.path)
        with note_kept(self.folder, lambda: f"{len(result.records)} runs"), ProgressBars(True) as self.bars:
            start = self.train_all("search", result.start, plan.seeds)
            if start.failure:
                raise ValueError(f"the settings that the sweep starts from fail: {start.failure}")
            if plan.grid is None:
                self.search(start.estimate.value)
            else:
                for settings in plan.grid:
                    self.train_all("search", settings, plan.seeds)
            if result.chosen is not None and not self.train_all("judge", result.start, plan.new_seeds).failure:
                self.train_all("judge", result.chosen.settings, plan.new_seeds)
        self.folder.write_json("sweep.json", result.to_dict())
        self.folder.write_text("summary.md", f"# Sweep\n\n{sweep_text(result)}\n")
        return result

    def search(self, start_value: float) -> None:
        """Train what Optuna proposes, until enough different settings have run.

        start_value: mean of the settings that the sweep starts from, which the sampler learns from too.
        """
        from optuna import create_study
        from optuna.samplers import TPESampler
        from optuna.trial import TrialState, create_trial

        plan, space, start = self.plan, self.plan.distributions, self.result.start
        study = create_study(direction="maximize")
        with suppress(ValueError):  # the start may lie outside of the space
            study.add_trial(create_trial(params=dict(start), distributions=space, value=start_value))
        for _ in range(_MAX_PROPOSALS * plan.trials):
            seed = plan.sampler_seed + len(study.trials)  # another one for each proposal
            study.sampler = TPESampler(seed=seed, n_startup_trials=max(4, plan.trials // 3))
            trial = study.ask(space)
            settings = {name: _round(value, plan.space[name]) for name, value in trial.params.items()}
            found = self.train_all("search", settings, plan.seeds)
            if found.failure:
                study.tell(trial, state=TrialState.PRUNED)
            else:
                study.tell(trial, found.estimate.value)
            if sum(one.settings != start for one in self.result.tried) >= plan.trials:
                return

    def train_all(self, part: str, settings: Mapping[str, Any], seeds: Sequence[int]) -> Tried:
        """Train settings with every seed, or until they fail; returns what came of them."""
        for seed in seeds:
            if "failure" in self.train(part, settings, seed):
                break
        return next(one for one in self.result.gather(part) if one.settings == settings)

    def train(self, part: str, settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """Do a run and return its record, or the stored record of that run."""
        records = self.result.records
        for record in records:
            if (record["part"], record["settings"], record["seed"]) == (part, settings, seed):
                return record
        started = time.perf_counter()
        record = {"part": part, "settings": dict(settings), "seed": seed}
        try:
            record |= self.train_and_evaluate(settings_config(self.base, settings, seed), self.problems[part])
        except _FAILURES as error:
            record["failure"] = " ".join((str(error) or type(error).__name__).split())
        record["seconds"] = round(time.perf_counter() - started, 2)
        records.append(record)
        with RunLog(self.folder.path / "runs.jsonl") as log:
            log.append(record)
        self.show_progress()
        return record

    def show_progress(self) -> None:
        """Show how many runs are done, of the most that there can be."""
        plan = self.plan
        most = (plan.trials + 1) * len(plan.seeds) + 2 * plan.judge_seeds
        self.bars.show("Runs", len(self.result.records), most)

    def train_and_evaluate(self, config: GRPOConfig, problems: list[Problem]) -> dict[str, Any]:
        """Train the model of the sweep with this config, and return what it achieves on these problems."""
        policy, tokenizer = open_policy(self.metadata)
        policy = with_adapters(policy, replace(self.metadata.run_config, config=config))
        for _ in train(policy, tokenizer, self.problems["train"], self.data.reward_funcs, config):
            self.show_progress()
        found = evaluate(
            policy,
            tokenizer,
            problems,
            reward_funcs=self.data.reward_funcs,
            reward_weights=config.reward_weights,
            max_completion_length=config.max_completion_length,
            seed=config.seed,
        )
        if found.reward is None and self.plan.measure == "reward":
            raise ValueError("no reward applies to the problems of the evaluation; measure the accuracy")
        reward = {"reward": found.reward.value} if found.reward else {}
        return {"accuracy": found.accuracy, "k": found.k, "n": found.n, **reward}


def read_runs(folder: Path) -> list[dict[str, Any]]:
    """Read the runs that a sweep has stored; version 0.3.0 kept them in Optuna's journal."""
    table, journal = folder / "runs.jsonl", folder / "optuna.log"
    if journal.is_file() and not table.exists():
        write_log(table, (run for line in read_log(journal) for run in line.get("user_attr", {}).values()))
    RunLog(table).close()  # removes a line that was cut short
    return read_log(table)


def _round(value: Any, values: str) -> Any:
    """Round a value of a range to two digits."""
    return float(f"{value:.1e}") if ":" in values else value
