"""What every benchmark shares: two sides measured in turn, medians with their range, a table, and a record on disk."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from grpo_edu.machine.hardware import machine
from grpo_edu.runs.log import RunLog, read_log

RESULTS = Path(__file__).resolve().parent / "results"
# The folder with GSM8K's train.jsonl and test.jsonl, which do not come with the course.
GSM8K = Path(os.environ.get("GRPO_EDU_GSM8K", RESULTS.parents[2] / "shared" / "data" / "gsm8k"))
EVALUATION_SEED = 1


def estimate(values: Sequence[float]) -> dict[str, float]:
    """Return the mean over seeds with Student's 95% interval, ready for JSON."""
    from grpo_edu.evaluation import mean_estimate

    return asdict(mean_estimate(values))


def bits(values: Iterable[Any]) -> str:
    """Return a 1 or 0 for each value, as a ledger keeps which problems were solved.

    >>> bits([True, 0.0]), ones("10"), share("1000")
    ('10', [True, False], 0.25)
    """
    return "".join(str(int(value)) for value in values)


def ones(text: str) -> list[bool]:
    """Return the values behind `bits`."""
    return [bit == "1" for bit in text]


def share(text: str) -> float:
    """Return the share of ones in `bits`."""
    return text.count("1") / len(text)


def counted(text: str) -> dict[str, float]:
    """Return the count, number, share and 95% Wilson interval of `bits`, ready for JSON.

    >>> {name: round(value, 2) for name, value in counted("1000").items()}
    {'k': 1, 'n': 4, 'accuracy': 0.25, 'low': 0.05, 'high': 0.7}
    """
    from grpo_edu.evaluation import wilson_interval

    k, n = text.count("1"), len(text)
    low, high = wilson_interval(k, n)
    return {"k": k, "n": n, "accuracy": k / n, "low": low, "high": high}


def over_seeds_and_problems(before: Sequence[str], after: Sequence[str]) -> dict[str, float]:
    """Return the mean of after − before with its interval over seeds and problems, ready for JSON.

    before, after: one string per seed, with a 1 or 0 for each problem.

    >>> over_seeds_and_problems(["0010"] * 3, ["1110"] * 3)
    {'difference': 0.5, 'low': 0.0, 'high': 1.0}
    """
    from grpo_edu.evaluation import crossed_bootstrap

    return asdict(crossed_bootstrap(*([ones(row) for row in rows] for rows in (before, after))))


def over_seeds_and_kinds(
    before: Sequence[Sequence[float]], after: Sequence[Sequence[float]], kinds: int
) -> dict[str, float]:
    """Return the mean of after − before with its interval over seeds and kinds of problem, ready for JSON.

    The interval is never narrower than Student's over the kinds, which differ more than the seeds do.

    before, after: one list per seed, with a number for each problem. kinds: how many there are; they take turns.

    >>> over_seeds_and_kinds([[0, 0, 0, 0]] * 2, [[1, 0, 1, 0]] * 2, kinds=2)["difference"]
    0.5
    """
    from grpo_edu.evaluation import crossed_bootstrap

    by_kind = (
        [[statistics.fmean(row[kind::kinds]) for row in rows] for kind in range(kinds)] for rows in (before, after)
    )
    return asdict(crossed_bootstrap(*by_kind))


def change(before: Sequence[str], after: Sequence[str]) -> dict[str, Any]:
    """Return what changed from `before` to `after`, one string of `bits` per seed.

    Returns: the mean over seeds with Student's interval, the interval over seeds and problems, and McNemar's exact
    p-value for each seed.
    """
    from grpo_edu.evaluation import mcnemar

    pairs = list(zip(before, after, strict=True))
    return {
        "over seeds": estimate([share(new) - share(old) for old, new in pairs]),
        "over seeds and problems": over_seeds_and_problems(before, after),
        "p_value": [mcnemar(ones(old), ones(new)).p_value for old, new in pairs],
    }


def paired_p(differences: Sequence[float]) -> float:
    """Return the p-value of Student's paired test that the mean difference is 0; 1 if all of them are 0."""
    from scipy.stats import ttest_1samp

    return float(ttest_1samp(differences, 0.0).pvalue) if any(differences) else 1.0


def left_by_holm(p_values: Mapping[Any, float]) -> list[Any]:
    """Return the tests that are significant at the level 0.05 after Holm's correction, the smallest p-value first.

    >>> left_by_holm({"a": 0.04, "b": 0.02, "c": 0.001})  # against 0.05 / 3, then 0.05 / 2, then 0.05
    ['c', 'b', 'a']
    >>> left_by_holm({"a": 0.04, "b": 0.03, "c": 0.001})  # 0.03 > 0.05 / 2, and then nothing more is looked at
    ['c']
    """
    ordered = sorted(p_values, key=lambda name: (p_values[name], name))
    for place, name in enumerate(ordered):
        if p_values[name] > 0.05 / (len(ordered) - place):
            return ordered[:place]
    return ordered


def shuffled(reward: Callable[..., list[float]], seed: int) -> Callable[..., list[float]]:
    """Return `reward` with its rewards in a random order over a step's completions, so that they carry no information.

    >>> rewards = shuffled(lambda completions, **columns: [1.0, 2.0, 3.0], seed=0)([""] * 3)
    >>> sorted(rewards)
    [1.0, 2.0, 3.0]
    """
    rng = random.Random(seed)

    def shuffled_reward(completions: Sequence[Any], **columns: Any) -> list[float]:
        values = reward(completions, **columns)
        return rng.sample(values, len(values))

    return shuffled_reward


def in_turn(sides: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Time each call `rounds` times, one side after the other, so that a slow minute slows all sides alike.

    One more round goes before, uncounted: first calls import and allocate.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, call in sides.items():
            started = time.perf_counter()
            call()
            if number:
                seconds[name].append(time.perf_counter() - started)
    return seconds


class Side:
    """A training in a process of its own, as in use: two pools of threads in one process would slow each other."""

    def __init__(self, start: Callable[[], Iterator[dict]]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "transformers.modeling_utils"])
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve_steps, args=(start, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def step(self) -> dict:
        """Run the next step; return its metrics, with the "seconds" that it took."""
        try:
            self.pipe.send("step")
            return self.pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            raise RuntimeError("a side of the benchmark failed: its own words are above") from error

    def close(self) -> None:
        """End the process; its memory is free afterwards."""
        self.process.terminate()
        self.process.join()
        self.pipe.close()


def _serve_steps(start: Callable[[], Iterator[dict]], pipe: Connection) -> None:
    with ThreadPoolExecutor(1) as passing:  # its workers of OpenMP go with it, so that TRL's thread is alone as well
        steps = passing.submit(start).result()
    while pipe.recv():
        started = time.perf_counter()
        step = next(steps)
        pipe.send({**step, "seconds": time.perf_counter() - started})


def steps_in_turn(
    sides: Mapping[str, Callable[[], Iterator[dict]]], rounds: int, *, keep: bool = True
) -> dict[str, list[dict]]:
    """Metrics of training steps, `rounds` of each side, one side after the other; "seconds" is added to each.

    Args:
        sides: name → what starts a training and yields its steps; a function of a module, or a partial of one.
        rounds: steps of each side that count.
        keep: all trainings stay in memory and step in turn; each takes one step before, uncounted. False, for models
            of which only one fits, starts one at a time and ends it after its first step, which counts.

    Raises:
        RuntimeError: a side failed.
    """
    running: dict[str, Side] = {}
    metrics: dict[str, list[dict]] = {name: [] for name in sides}
    try:
        for _ in range(rounds):
            for name, start in sides.items():
                if name not in running:
                    running[name] = Side(start)
                    if keep:
                        running[name].step()
                metrics[name].append(running[name].step())
                if not keep:
                    running.pop(name).close()
    finally:
        for side in running.values():
            side.close()
    return metrics


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most.

    >>> spread([3.0, 1.0, 2.0])
    {'median': 2.0, 'low': 1.0, 'high': 3.0}
    """
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def times_as_fast(slow: Sequence[float], fast: Sequence[float]) -> dict[str, float]:
    """Return the spread of slow/fast over the rounds, each side's time against the other's of the same round.

    >>> times_as_fast([2.0, 6.0, 4.0], [1.0, 2.0, 4.0])["median"]
    2.0
    """
    return spread([one / other for one, other in zip(slow, fast, strict=True)])


def between(value: Mapping[str, float], digits: int = 2) -> str:
    """Return a spread as text.

    >>> between({"median": 2.0, "low": 1.0, "high": 3.25})
    '2.00 (1.00 … 3.25)'
    """
    return f"{value['median']:.{digits}f} ({value['low']:.{digits}f} … {value['high']:.{digits}f})"


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows with the same keys as a Markdown table.

    >>> print(markdown([{"side": "ours", "seconds": "1.0"}]))
    | side | seconds |
    |---|---|
    | ours | 1.0 |
    """
    lines = [rows[0].keys(), ["---"] * len(rows[0]), *(row.values() for row in rows)]
    lines = ["| " + " | ".join(map(str, cells)) + " |" for cells in lines]
    lines[1] = lines[1].replace(" ", "")
    return "\n".join(lines)


def save(output: Path, command: str, record: Mapping[str, Any]) -> None:
    """Write a record with the command that made it and the machine it ran on; what is there is replaced whole."""
    output.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"command": command, "machine": machine(), **record}, indent=1, ensure_ascii=False)
    staging = output.with_suffix(".part")
    staging.write_text(text + "\n", encoding="utf-8")
    staging.replace(output)


def save_picture(ledger: Path, figure: Any) -> None:
    """Write the picture of a study's page: docs/images/NAME.png for the ledger NAME.jsonl."""
    figure.savefig(RESULTS.parents[1] / "docs" / "images" / f"{ledger.stem}.png", dpi=150)


class Ledger:
    """The results of a study, one JSON line for each, so that the same command continues where it stopped.

    minutes: after so many, `late` is true and `wants` asks for no further run.

    >>> import tempfile
    >>> ledger = Ledger(Path(tempfile.mkdtemp()) / "study.jsonl")
    >>> ledger.add(arm="grpo", seed=0, k=3)
    >>> ledger.find(arm="grpo", seed=0)["k"], ledger.find(arm="grpo", seed=1)
    (3, None)
    >>> ledger.wants(arm="grpo", seed=0), ledger.wants(arm="grpo", seed=1)
    (False, True)
    """

    def __init__(self, path: Path, minutes: float = float("inf")) -> None:
        self.path = path
        self.rows = read_log(path) if path.exists() else []
        self.deadline = time.perf_counter() + 60 * minutes

    @property
    def late(self) -> bool:
        """True if the time is over."""
        return time.perf_counter() > self.deadline

    def wants(self, **values: Any) -> bool:
        """Return True if a result with these values is missing and there is time to compute it."""
        return not self.late and self.find(**values) is None

    def find(self, **values: Any) -> dict[str, Any] | None:
        """Return the first result with these values; None if there is none."""
        return next(iter(self.select(**values)), None)

    def select(self, **values: Any) -> list[dict[str, Any]]:
        """Return all results with these values, in their order."""
        return [row for row in self.rows if all(row.get(name) == value for name, value in values.items())]

    def add(self, **row: Any) -> None:
        """Append one result to the file and to `rows`."""
        with RunLog(self.path) as log:
            log.append(row)
        self.rows.append(row)


def finish_run(folder: Path, run_config: Any, command: str) -> list[dict[str, Any]]:
    """Do a training run of a study in its folder, or continue it; returns the metrics of its steps.

    Raises SystemExit, with the command that continues it, if the run was stopped again.
    """
    from grpo_edu.runs.run import resume_training, start_run

    if (folder / "config.json").exists() and not (folder / "model").exists():
        resume_training(folder, rewards=run_config.reward_funcs, progress=False)
    elif not folder.exists():
        start_run(run_config, output=folder, progress=False)
    rows = Ledger(folder / "metrics.jsonl").rows
    if len(rows) < run_config.config.max_steps:
        stopped = f"{folder.name} was stopped at step {len(rows)} of {run_config.config.max_steps}"
        raise SystemExit(f"{stopped}; {command} continues it")
    return rows


def finetune_for(model: Any, tokenizer: Any, problems: Sequence[Any], config: Any, tokens: int) -> int:
    """Train on worked solutions until so many tokens were processed; returns how many they became."""
    from grpo_edu.continual.supervised import finetune

    for row in finetune(model, tokenizer, problems, config):
        if row["num_tokens"] >= tokens:
            break
    return int(row["num_tokens"])


def ledger_options(command: str, about: str | None) -> argparse.ArgumentParser:
    """Return the options of a study with a `Ledger`; the study adds its own."""
    parser = argparse.ArgumentParser(prog=command, description=about)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no new run after so many")
    return parser


def exit_code(verdicts: Mapping[str, bool]) -> int:
    """Print each statement and whether it holds; 0 if all of them do, otherwise 1."""
    for statement, holds in verdicts.items():
        print(f"{'holds' if holds else 'FAILS'}: {statement}")
    return 0 if all(verdicts.values()) else 1


def held_out_accuracy(policy: tuple[Any, Any]) -> dict[str, float]:
    """Counts, share and 95% interval of a model and its tokenizer on the 300 held-out problems of the studies."""
    from grpo_edu import LEVELS, evaluate, load_problems

    found = evaluate(*policy, load_problems(LEVELS, "heldout", n=100), seed=EVALUATION_SEED).to_dict()
    return {name: found[name] for name in ("k", "n", "accuracy", "low", "high")}


def study_options(command: str, about: str | None, output: Path) -> argparse.Namespace:
    """Return the options of a study that trains one way after the other on several seeds."""
    parser = argparse.ArgumentParser(prog=command, description=about)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--output", type=Path, default=output)
    parser.add_argument("--keep", action="store_true", help="keep the runs that the output file already holds")
    return parser.parse_args()


def run_study(
    options: argparse.Namespace,
    names: Sequence[str],
    record: dict[str, Any],
    *,
    run: Callable[[str, int], dict],
    verdicts: Callable[[dict, list[dict]], dict[str, bool]],
    table: Callable[[dict, list[dict]], str],
) -> int:
    """Run what is missing of every name on every seed, keep each run at once, judge and print; 1 if a verdict fails.

    record: what the file holds besides "runs" and "verdicts"; under "before" the accuracy that all start from.
    """
    runs = json.loads(options.output.read_text(encoding="utf-8"))["runs"] if options.keep else []
    record = {**record, "runs": runs}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    for seed in options.seeds:
        for name in names:
            if any((row["name"], row["seed"]) == (name, seed) for row in runs):
                continue
            runs.append(run(name, seed))
            print(f"seed {seed}, {name}: {runs[-1]['after']['accuracy']:.1%}", flush=True)
            options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    record["verdicts"] = verdicts(record["before"], runs)
    options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print("\n" + table(record["before"], runs) + "\n")
    return exit_code(record["verdicts"])
