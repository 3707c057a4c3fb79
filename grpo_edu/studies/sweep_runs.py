"""A sweep on disk: Optuna proposes settings, every run is stored as soon as it is done, and a killed sweep can go on.

config.json   what was asked for, and a fingerprint of the model that every run starts from
optuna.log    Optuna's journal: the search, and each run as a user attribute of the study; its own tools read it too
sweep.json, sweep.png, summary.md

Every proposal is trained with each seed, and its mean accuracy is the value that Optuna learns from. Optuna (Akiba et
al. 2019, arXiv 1907.10902) is an extra: ``pip install "grpo-edu[tuning]"``. Its sampler is a tree-structured Parzen
estimator (Bergstra et al. 2011).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from grpo_edu.config import GRPOConfig
from grpo_edu.evaluation import Evaluation, evaluate
from grpo_edu.problems.templates import Problem
from grpo_edu.runs.folder import RunFolder
from grpo_edu.runs.loading import load_problem_sets, resolve_rewards, score_with_user_reward
from grpo_edu.runs.log import RunLog
from grpo_edu.runs.options import use_current_names
from grpo_edu.runs.profiles import Profile
from grpo_edu.runs.record import RunMetadata
from grpo_edu.runs.recording import sigterm_interrupts
from grpo_edu.runs.run import open_policy, with_adapters
from grpo_edu.runs.state import check_same_data, check_same_model, data_fingerprint, fingerprint
from grpo_edu.studies.sweep import (
    Range,
    SweepPlan,
    SweepResult,
    Values,
    settings_config,
    split_validation,
    sweep_figure,
    sweep_text,
)
from grpo_edu.trainer import train

if TYPE_CHECKING:
    import optuna

_PROPOSALS = 20  # per trial: Optuna may propose the same settings again, until there is nothing new to find
_FAILURES = (ValueError, ArithmeticError, MemoryError)  # of one setting; any other error ends the sweep
_STOPS = (KeyboardInterrupt, OSError, RuntimeError, *_FAILURES)


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
    load_optuna()
    config = _describe(profile, plan, command)
    base = profile.request().config
    settings_config(base, _start_settings(base, plan), base.seed)
    folder = RunFolder(output) if output else RunFolder.unused(f"sweep-{Path(config['model']).name}")
    folder.check(overwrite=overwrite)
    folder.check_apart(config["source"])
    problems = _problems(config)
    config["fingerprint"] = fingerprint(open_policy(RunMetadata.from_dict(config))[0])
    config["data_fingerprints"] = {part: data_fingerprint(chosen) for part, chosen in problems.items()}
    folder.check_room(0)
    with sigterm_interrupts(), folder.begin(config, overwrite=overwrite):
        return _execute(folder, config, problems)


def resume_sweep(output: str | Path) -> SweepResult:
    """Resume a sweep that was stopped; stored runs are not repeated, and the result is the same.

    Raises ValueError if the folder holds no sweep, or its model or problems have changed; otherwise as `start_sweep`.
    """
    load_optuna()
    folder = RunFolder(output)
    config = folder.read_config("sweep", "sweep")
    problems = _problems(config)
    check_same_model(config["fingerprint"], fingerprint(open_policy(RunMetadata.from_dict(config))[0]), folder.path)
    found = {part: data_fingerprint(chosen) for part, chosen in problems.items()}
    check_same_data(config.get("data_fingerprints"), found, folder.path)
    with sigterm_interrupts(), folder.resume():
        return _execute(folder, config, problems)


def _describe(profile: Profile, plan: SweepPlan, command: str) -> dict[str, Any]:
    """What config.json holds; raises ValueError for what a sweep cannot do."""
    request = profile.request()
    if request.backend != "grpo_edu":
        raise ValueError(f"`backend` {request.backend!r} cannot be swept; leave it out.")
    request = replace(request, num_heldout=plan.num_heldout, checkpoint_every=0, report_to=())
    return {**RunMetadata.start(request, command).to_dict(), "sweep": plan.to_dict()}


def _problems(config: Mapping[str, Any]) -> dict[str, list[Problem]]:
    """Problems to train on ("train"), to choose settings by ("search") and to compare on ("judge")."""
    plan, config = SweepPlan.from_dict(config["sweep"]), use_current_names(config)
    everything = load_problem_sets(config, "train", n=config["num_problems"], argument="num_problems")
    training, validation = split_validation(everything, plan.num_validation)
    heldout = load_problem_sets(config, "heldout", n=plan.num_heldout)
    functions = resolve_rewards(config["reward_funcs"])
    parts = {"train": training, "search": validation, "judge": heldout}
    return {name: score_with_user_reward(part, functions) for name, part in parts.items()}


def _start_settings(config: GRPOConfig, plan: SweepPlan) -> dict[str, Any]:
    return {name: getattr(config, name) for name in plan.space}


def _execute(folder: RunFolder, config: dict[str, Any], problems: dict[str, list[Problem]]) -> SweepResult:
    """Do the runs that are missing, and write the result."""
    plan, record = SweepPlan.from_dict(config["sweep"]), RunMetadata.from_dict(config)
    start = _start_settings(record.run_config.config, plan)
    study = open_study(folder.path)
    total = (plan.trials + 1) * len(plan.seeds) + 2 * plan.judge_seeds
    with tqdm(total=total, desc="Runs", disable=None) as bar:
        runs = Runs(record, problems, study, bar)
        try:
            search(study, runs, plan, start)
            chosen = SweepResult(folder.path, plan, start, runs.records).chosen
            if chosen is not None:
                _judge(runs, [start, chosen], plan)
        except _STOPS as error:
            folder.note_kept(error, f"{len(runs.records)} runs")
            raise
    result = SweepResult(folder.path, plan, start, runs.records)
    folder.write_json("sweep.json", result.to_dict())
    folder.write_figure("sweep.png", sweep_figure(result))
    folder.write_text("summary.md", f"# Sweep\n\n{sweep_text(result)}\n\n![Accuracy of each setting](sweep.png)\n")
    return result


def _judge(runs: Runs, pair: list[Mapping[str, Any]], plan: SweepPlan) -> None:
    """Train start and chosen settings with each new seed, until a run fails."""
    for seed in plan.new_seeds:
        if any("failure" in runs.do("judge", settings, seed) for settings in pair):
            return


class Runs:
    """The runs of a sweep: each is done once, and stored in the study as soon as it is done.

    records: one per run, in order, as `SweepResult` reads them.
    """

    def __init__(self, record: RunMetadata, problems: dict[str, list[Problem]], study: optuna.Study, bar: tqdm) -> None:
        self.record, self.problems, self.study, self.bar = record, problems, study, bar
        self.records: list[dict[str, Any]] = [content for _, content in sorted(study.user_attrs.items())]
        bar.update(len(self.records))

    def do(self, part: str, settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """Do a run and return its record, or the stored record of that run."""
        for record in self.records:
            if (record["part"], record["settings"], record["seed"]) == (part, settings, seed):
                return record
        started = time.perf_counter()
        record = {"part": part, "settings": dict(settings), "seed": seed}
        try:
            evaluation = self.train(settings_config(self.record.run_config.config, settings, seed), self.problems[part])
            record |= {"accuracy": evaluation.accuracy, "k": evaluation.k, "n": evaluation.n}
        except _FAILURES as error:
            record["failure"] = " ".join((str(error) or type(error).__name__).split())
        record["seconds"] = round(time.perf_counter() - started, 2)
        # in alphabetical order the names of the runs are in that of the runs
        self.study.set_user_attr(f"run {len(self.records):06d}", record)
        self.records.append(record)
        self.bar.update()
        return record

    def train(self, config: GRPOConfig, problems: list[Problem]) -> Evaluation:
        """Train the model of the sweep with this config, and evaluate it on these problems."""
        policy, tokenizer = open_policy(self.record)
        request = replace(self.record.run_config, config=config)
        policy = with_adapters(policy, request)
        for _ in train(policy, tokenizer, self.problems["train"], resolve_rewards(request.reward_funcs), config):
            pass
        return evaluate(
            policy, tokenizer, problems, max_completion_length=config.max_completion_length, seed=config.seed
        )


def search(study: optuna.Study, runs: Runs, plan: SweepPlan, start: dict[str, Any]) -> None:
    """Let Optuna propose settings and train them, until enough different ones have run."""
    from optuna.samplers import TPESampler
    from optuna.trial import TrialState

    if (reason := _failure(runs, start, plan.seeds)) is not None:
        raise ValueError(f"the settings that the sweep starts from fail: {reason}")
    queue = [settings for settings in [start, *(plan.grid or ())] if _inside(plan.space, settings)]
    for _ in range(_PROPOSALS * plan.trials):
        finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))
        seen = [_settings(plan.space, trial.params) for trial in finished]
        left = [settings for settings in queue if settings not in seen]
        pairs = zip(finished, seen, strict=True)
        tried = {str(settings) for trial, settings in pairs if trial.state == TrialState.COMPLETE and settings != start}
        if (plan.grid is not None and not left) or len(tried) >= plan.trials:
            break
        if left and not study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
            study.enqueue_trial(left[0])
        # seeded again for each proposal, so that a sweep that is resumed gets the same proposals
        study.sampler = TPESampler(seed=plan.sampler_seed + len(finished), n_startup_trials=max(4, plan.trials // 3))
        trial = study.ask()
        for name, values in plan.space.items():
            if isinstance(values, Range):
                trial.suggest_float(name, values.low, values.high, log=True)
            else:
                trial.suggest_categorical(name, values)
        settings = _settings(plan.space, trial.params)
        reason = _failure(runs, settings, plan.seeds)
        if reason is None:
            accuracies = [runs.do("search", settings, seed)["accuracy"] for seed in plan.seeds]
            study.tell(trial, sum(accuracies) / len(accuracies))
        else:
            trial.set_user_attr("reason", reason)
            study.tell(trial, state=TrialState.PRUNED)


def _failure(runs: Runs, settings: dict[str, Any], seeds: tuple[int, ...]) -> str | None:
    """Train settings with every seed, or until they fail; returns the reason for a failure."""
    for seed in seeds:
        if "failure" in (record := runs.do("search", settings, seed)):
            return record["failure"]
    return None


def _settings(space: Mapping[str, Values], params: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that Optuna's values stand for; a value of a range is rounded to two digits."""
    return {
        name: float(f"{params[name]:.1e}") if isinstance(values, Range) else params[name]
        for name, values in space.items()
    }


def _inside(space: Mapping[str, Values], settings: Mapping[str, Any]) -> bool:
    """Whether settings lie in the space, so that the sampler may learn from them."""
    return all(
        values.low <= settings[name] <= values.high if isinstance(values, Range) else settings[name] in values
        for name, values in space.items()
    )


def open_study(folder: Path) -> optuna.Study:
    """Open the search of a sweep, or start it; trials that a killed process left half done are marked as failed."""
    optuna = load_optuna()
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
    from optuna.trial import TrialState

    path = folder / "optuna.log"
    RunLog(path).close()  # removes a line that was cut short
    path.with_name("optuna.log.lock").unlink(missing_ok=True)  # of a killed process: the folder is locked by this one
    backend = JournalFileBackend(str(path), lock_obj=JournalFileOpenLock(str(path)))
    storage = optuna.storages.JournalStorage(backend)
    study = optuna.create_study(storage=storage, study_name="sweep", direction="maximize", load_if_exists=True)
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        study.tell(trial.number, state=TrialState.FAIL)
    return study


def load_optuna() -> Any:
    """Import Optuna and silence its log lines; raises ValueError if it is not installed."""
    try:
        import optuna
    except ImportError:
        raise ValueError('sweep needs Optuna; install it with: pip install "grpo-edu[tuning]"') from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
