"""A sweep in its folder: runs in a table, on a study of Optuna.

config.json   what was asked for, and a fingerprint of the model that every run starts from
optuna.log    Optuna's journal: the search, and each run as a user attribute of the study; its own tools read it too
sweep.json, sweep.png, summary.md

Every proposal is trained with each seed, and its mean accuracy is the value that Optuna learns from. Optuna (Akiba et
al. 2019, arXiv 1907.10902) is an extra: ``pip install "grpo-edu[tuning]"``. Its sampler is a tree-structured Parzen
estimator (Bergstra et al. 2011).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from grpo_edu.config import GRPOConfig
from grpo_edu.evaluation import evaluate
from grpo_edu.problems.templates import Problem
from grpo_edu.runs.folder import RunFolder
from grpo_edu.runs.log import RunLog
from grpo_edu.runs.profiles import Profile
from grpo_edu.runs.record import RunMetadata
from grpo_edu.runs.recording import sigterm_interrupts
from grpo_edu.runs.run import open_policy, with_adapters
from grpo_edu.runs.state import check_same_data, check_same_model, data_fingerprint, fingerprint
from grpo_edu.studies.sweep import (
    SweepPlan,
    SweepResult,
    parse_values,
    settings_config,
    split_validation,
    sweep_figure,
    sweep_text,
)
from grpo_edu.trainer import train

if TYPE_CHECKING:
    import optuna

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
    load_optuna()
    run_config = profile.request()
    if run_config.backend != "grpo_edu":
        raise ValueError(f"`backend` {run_config.backend!r} cannot be swept; leave it out.")
    run_config = replace(run_config, num_heldout=plan.num_heldout, checkpoint_every=0, report_to=())
    base = run_config.config
    settings_config(base, {name: getattr(base, name) for name in plan.space}, base.seed)
    folder = RunFolder(output) if output else RunFolder.unused(f"sweep-{Path(run_config.model).name}")
    folder.check(overwrite=overwrite)
    metadata = RunMetadata.start(run_config, command)
    folder.check_apart(metadata.source)
    sweep = Sweep(folder, metadata, plan)
    folder.check_room(0)
    config = {**metadata.to_dict(), "sweep": asdict(plan), **sweep.fingerprints()}
    with sigterm_interrupts(), folder.begin(config, overwrite=overwrite):
        return sweep.run()


def resume_sweep(output: str | Path) -> SweepResult:
    """Resume a sweep that was stopped; stored runs are not repeated, and the result is the same.

    Raises ValueError if the folder holds no sweep, or its model or problems have changed; otherwise as `start_sweep`.
    """
    load_optuna()
    folder = RunFolder(output)
    config = folder.read_config("sweep", "sweep")
    sweep = Sweep(folder, RunMetadata.from_dict(config), SweepPlan(**config["sweep"]))
    found = sweep.fingerprints()
    check_same_model(config["fingerprint"], found["fingerprint"], folder.path)
    check_same_data(config.get("data_fingerprints"), found["data_fingerprints"], folder.path)
    with sigterm_interrupts(), folder.resume():
        return sweep.run()


class Sweep:
    """The runs of a sweep: each is done once, and stored in the study as soon as it is done.

    Attributes:
        problems: to train on ("train"), to choose settings by ("search") and to compare on ("judge").
        records: one per run, in order, as `SweepResult` reads them.
    """

    study: optuna.Study
    bar: tqdm

    def __init__(self, folder: RunFolder, metadata: RunMetadata, plan: SweepPlan) -> None:
        self.folder, self.metadata, self.plan = folder, metadata, plan
        self.base = metadata.run_config.config
        self.start = {name: getattr(self.base, name) for name in plan.space}
        self.data = metadata.run_config.load_data()
        training, validation = split_validation(self.data.problems, plan.num_validation)
        self.problems = {"train": training, "search": validation, "judge": self.data.heldout}
        self.records: list[dict[str, Any]] = []

    def fingerprints(self) -> dict[str, Any]:
        """Return what config.json keeps of the model and the problems."""
        data = {part: data_fingerprint(problems) for part, problems in self.problems.items()}
        return {"fingerprint": fingerprint(open_policy(self.metadata)[0]), "data_fingerprints": data}

    def run(self) -> SweepResult:
        """Do the runs that are missing, and write the result."""
        plan = self.plan
        self.study = open_study(self.folder.path)
        self.records = [content for _, content in sorted(self.study.user_attrs.items())]
        total = (plan.trials + 1) * len(plan.seeds) + 2 * plan.judge_seeds
        with tqdm(total=total, initial=len(self.records), desc="Runs", disable=None) as self.bar:
            try:
                self.search()
                chosen = self.result().chosen
                if chosen is not None:
                    self.judge([self.start, chosen])
            except (KeyboardInterrupt, OSError, RuntimeError, *_FAILURES) as error:
                self.folder.note_kept(error, f"{len(self.records)} runs")
                raise
        result = self.result()
        self.folder.write_json("sweep.json", result.to_dict())
        self.folder.write_figure("sweep.png", sweep_figure(result))
        text = f"# Sweep\n\n{sweep_text(result)}\n\n![Accuracy of each setting](sweep.png)\n"
        self.folder.write_text("summary.md", text)
        return result

    def result(self) -> SweepResult:
        """Return what follows from the runs so far."""
        return SweepResult(self.folder.path, self.plan, self.start, self.records)

    def search(self) -> None:
        """Let Optuna propose settings and train them, until enough different ones have run."""
        from optuna.samplers import TPESampler
        from optuna.trial import TrialState

        plan, study = self.plan, self.study
        if (reason := self.train_all(self.start)) is not None:
            raise ValueError(f"the settings that the sweep starts from fail: {reason}")
        queue = [settings for settings in [self.start, *(plan.grid or ())] if plan.has(settings)]
        for _ in range(_MAX_PROPOSALS * plan.trials):
            finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))
            seen = [plan.read(trial.params) for trial in finished]
            left = [settings for settings in queue if settings not in seen]
            complete = [trial.state == TrialState.COMPLETE for trial in finished]
            tried = {str(row) for row, is_complete in zip(seen, complete, strict=True) if is_complete}
            tried.discard(str(self.start))
            if (plan.grid is not None and not left) or len(tried) >= plan.trials:
                break
            if left and not study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
                study.enqueue_trial(left[0])
            # seeded again for each proposal, so that a sweep that is resumed gets the same proposals
            first = max(4, plan.trials // 3)
            study.sampler = TPESampler(seed=plan.sampler_seed + len(finished), n_startup_trials=first)
            trial = study.ask(distributions(plan))
            settings = plan.read(trial.params)
            reason = self.train_all(settings)
            if reason is None:
                accuracies = [self.train("search", settings, seed)["accuracy"] for seed in plan.seeds]
                study.tell(trial, sum(accuracies) / len(accuracies))
            else:
                trial.set_user_attr("reason", reason)
                study.tell(trial, state=TrialState.PRUNED)

    def judge(self, pair: Sequence[Mapping[str, Any]]) -> None:
        """Train start and chosen settings with each new seed, until a run fails."""
        for seed in self.plan.new_seeds:
            if any("failure" in self.train("judge", settings, seed) for settings in pair):
                return

    def train_all(self, settings: Mapping[str, Any]) -> str | None:
        """Train settings with every seed, or until they fail; returns the reason for a failure."""
        for seed in self.plan.seeds:
            if "failure" in (record := self.train("search", settings, seed)):
                return record["failure"]
        return None

    def train(self, part: str, settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """Do a run and return its record, or the stored record of that run."""
        for record in self.records:
            if (record["part"], record["settings"], record["seed"]) == (part, settings, seed):
                return record
        started = time.perf_counter()
        record = {"part": part, "settings": dict(settings), "seed": seed}
        try:
            record |= self.train_and_evaluate(settings_config(self.base, settings, seed), self.problems[part])
        except _FAILURES as error:
            record["failure"] = " ".join((str(error) or type(error).__name__).split())
        record["seconds"] = round(time.perf_counter() - started, 2)
        # in alphabetical order the names of the runs are in that of the runs
        self.study.set_user_attr(f"run {len(self.records):06d}", record)
        self.records.append(record)
        self.bar.update()
        return record

    def train_and_evaluate(self, config: GRPOConfig, problems: list[Problem]) -> dict[str, Any]:
        """Train the model of the sweep with this config, and return how many of these problems it solves."""
        policy, tokenizer = open_policy(self.metadata)
        policy = with_adapters(policy, replace(self.metadata.run_config, config=config))
        for _ in train(policy, tokenizer, self.problems["train"], self.data.reward_funcs, config):
            pass
        length = config.max_completion_length
        found = evaluate(policy, tokenizer, problems, max_completion_length=length, seed=config.seed)
        return {"accuracy": found.accuracy, "k": found.k, "n": found.n}


def distributions(plan: SweepPlan) -> dict[str, optuna.distributions.BaseDistribution]:
    """Return the space of a sweep as Optuna takes it."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    return {
        name: FloatDistribution(*parse_values(name, text), log=True)
        if ":" in text
        else CategoricalDistribution(parse_values(name, text))
        for name, text in plan.space.items()
    }


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
