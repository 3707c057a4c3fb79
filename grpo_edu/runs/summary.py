"""One-page summary of a run: settings, results, and what the policy wrote before and after."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_edu.config import GRPOConfig
from grpo_edu.evaluation import Comparison, Evaluation, compare, evaluate, wilson_interval
from grpo_edu.fast.memory import GIB, PeakMemory
from grpo_edu.model_files import choose_device
from grpo_edu.models import load_policy
from grpo_edu.problems.equations import check_equations
from grpo_edu.problems.templates import LEVELS, PROBLEM_SETS, UNANSWERED
from grpo_edu.prompts import MARKER
from grpo_edu.runs.completions import by_reward, read_completions, sampled_text
from grpo_edu.runs.loading import Rewards, check_rewards, load_problem_sets, parse_data, resolve_rewards
from grpo_edu.runs.measures import RunFacts
from grpo_edu.runs.options import RunConfig, default_config
from grpo_edu.runs.record import RunMetadata
from grpo_edu.runs.symptoms import find_symptoms

if TYPE_CHECKING:
    from grpo_edu.runs.folder import RunFolder

_LONGEST_SAMPLE = 600  # characters


@dataclass(frozen=True)
class RunResult:
    """The result of a run.

    output: its folder. record: what config.json holds: the options, and what the run was started on.
    history: one dict of metrics a step. before, after: held-out accuracy sampled at temperature 1; `after` is
    None if the run was stopped. seconds: from the loading of the model to the last evaluation.
    greedy_before, greedy_after: without sampling, None where left out. steps_before: steps of the history that an
    earlier call had done, which `seconds` do not hold.
    interrupted: Ctrl-C ended it. failure: the error that ended it, else empty. unchanged: no weight changed by more
    than rounding. turn_end: the token that ends a turn in the chat template, if it does not end a completion.
    """

    output: Path
    record: RunMetadata
    history: list[dict[str, float]]
    before: Evaluation
    after: Evaluation | None
    seconds: float
    greedy_before: Evaluation | None = None
    greedy_after: Evaluation | None = None
    steps_before: int = 0
    interrupted: bool = False
    failure: str = ""
    unchanged: bool = False
    turn_end: str | None = None

    def __repr__(self) -> str:
        return f"{len(self.history)} steps in {self.output}: {self.comparison or self.before!r}"

    @property
    def config(self) -> GRPOConfig:
        """The settings of GRPO."""
        return self.record.run_config.config

    @cached_property
    def comparison(self) -> Comparison | None:
        """The paired tests of sampled before against after; None for a run that was stopped."""
        return None if self.after is None else compare(self.before, self.after)

    @property
    def p_value(self) -> float | None:
        """Exact McNemar test of sampled before against after; None for a run that was stopped."""
        return None if self.comparison is None else self.comparison.p_value

    @cached_property
    def warnings(self) -> list[str]:
        """Problems of the training, each with its likely cause and a remedy, see `find_symptoms`."""
        return find_symptoms(
            self.history, RunFacts(self.config, self.before, self.after, self.unchanged, self.turn_end)
        )

    @property
    def throughput(self) -> dict[str, float]:
        """The throughput of this call, by the definitions that are often mixed up; {} for no steps.

        Of prompts, completions, and tokens of completions: over the seconds of the steps alone, which hold rollout and
        learning, and over all seconds, which hold the loading of the model and the evaluations as well.
        """
        history = self.history[self.steps_before :]
        if not history:
            return {}
        done = {
            "prompts": len(history) * self.config.prompts_per_step,
            "completions": len(history) * self.config.batch_size,
            "tokens": self.config.batch_size * sum(step["completions/mean_length"] for step in history),
        }
        spans = {"in steps": sum(step["step_time"] for step in history), "with start-up": self.seconds}
        return {f"{what}/s {span}": count / length for span, length in spans.items() for what, count in done.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers, ready for JSON."""
        pairs = {
            "accuracy_before": self.before,
            "accuracy_after": self.after,
            "greedy_before": self.greedy_before,
            "greedy_after": self.greedy_after,
        }
        return {
            **{name: None if value is None else value.to_dict() for name, value in pairs.items()},
            "solved_before": solved(self.before),
            "solved_after": None if self.after is None else solved(self.after),
            "p_value": self.p_value,
            "reward_change": self.comparison and self.comparison.reward and asdict(self.comparison.reward),
            "warnings": self.warnings,
            "seconds": round(self.seconds, 2),
            "throughput": {name: round(value, 3) for name, value in self.throughput.items()},
            "steps": len(self.history),
            "seed": self.config.seed,
            "output": str(self.output),
            "interrupted": self.interrupted,
            "failure": self.failure,
        }


def solved(evaluation: Evaluation) -> str:
    """Return a 1 or 0 for each problem, so that runs with several seeds can be compared problem by problem.

    >>> solved(Evaluation(["1 + 1?", "2 + 2?"], ["basic"] * 2, ["#### 2", "#### 5"], ["2", "5"], [True, False]))
    '10'
    """
    return "".join(str(int(correct)) for correct in evaluation.correct)


def write_result(folder: RunFolder, result: RunResult) -> None:
    """Put the figures, summary.md and result.json into the folder of a run."""
    from grpo_edu.figures.curves import accuracy_comparison, training_curves

    folder.write_figure("curves.png", training_curves(result.history))
    if result.after is not None:
        folder.write_figure("accuracy.png", accuracy_comparison(result.before, result.after))
    folder.write_text("summary.md", summary(result))
    folder.write_json("result.json", result.to_dict())  # last: with it a run counts as done


def accuracy_text(evaluation: Evaluation | None) -> str:
    """Return an accuracy with its 95% Wilson interval, in percent; a hyphen if there is none.

    >>> accuracy_text(Evaluation(["1 + 1?"], ["basic"], ["#### 2"], ["2"], [True]))
    '100.0% [20.7, 100.0]'
    """
    if evaluation is None:
        return "-"
    return f"{evaluation.accuracy:.1%} [{100 * evaluation.low:.1f}, {100 * evaluation.high:.1f}]"


def reward_text(evaluation: Evaluation | None) -> str:
    """Return the mean reward with its 95% bootstrap interval; a hyphen if there is none."""
    reward = evaluation and evaluation.reward
    return f"{reward:.3f}" if reward else "-"


def evaluation_tables(result: RunResult, *, levels: bool = False) -> dict[str, list[tuple[str, str, str]]]:
    """Return the rows (name, before, after) of the accuracy, and of the mean reward if it says more.

    levels: with a row for each level.
    """
    rows = [("sampled, temperature 1", result.before, result.after)]
    if result.greedy_before is not None:
        rows.append(("greedy", result.greedy_before, result.greedy_after))
    parts = result.before.per_level()
    if levels and len(parts) > 1:
        after = {} if result.after is None else result.after.per_level()
        rows += [(f"sampled, {level}", part, after.get(level)) for level, part in parts.items()]
    texts = {"accuracy": accuracy_text}
    if any(one is not None and one.has_partial_credit for one in (result.before, result.after)):
        texts["mean reward"] = reward_text
    tables = {}
    for title, text in texts.items():
        table = [(name, text(before), text(after)) for name, before, after in rows]
        tables[title] = [row for row in table if row[1:] != ("-", "-")]  # a greedy evaluation has no rewards
    return tables


def outcome(result: RunResult) -> str:
    """Return how far the run came, in one sentence; a run that was stopped says so, and why."""
    done, wanted = len(result.history), result.config.max_steps
    if result.failure:
        return f"Stopped by an error after {done} of {wanted} steps: {result.failure}"
    if result.interrupted:
        return f"Interrupted after {done} of {wanted} steps."
    return f"{count_steps(done)} in {result.seconds:.0f} s, from loading the model to the last evaluation."


def throughput_text(result: RunResult) -> str:
    """Return the throughput of a run by each definition, in two sentences; empty for no steps."""
    found = result.throughput
    if not found:
        return ""
    lines = []
    for span, words in (("in steps", "Within the steps"), ("with start-up", "With start-up and evaluations")):
        parts = (f"{rate(found[f'{what}/s {span}'])} {what}" for what in ("prompts", "completions", "tokens"))
        lines.append(f"{words}: {', '.join(parts)} per second.")
    return "\n".join(lines)


def rate(value: float) -> str:
    """Return a number per second: whole with separators, and below 10 with one decimal.

    >>> rate(1020.4), rate(12345.6), rate(0.31)
    ('1,020', '12,346', '0.3')
    """
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def count_steps(steps: int) -> str:
    """Return a number of steps in words: "1 step", "2 steps"."""
    return f"{steps} step" if steps == 1 else f"{steps} steps"


def summary(result: RunResult) -> str:
    """Return the page `summary.md` of a run."""
    first, last = result.history[0]["reward"], result.history[-1]["reward"]
    curves = f"Curves over {count_steps(len(result.history))}; the mean reward goes from {first:.2f} to {last:.2f}"
    parts = [
        f"# GRPO run: {result.record.run_config.model}",
        outcome(result),
        "\n".join(["## Warnings\n", *(f"- {text}" for text in result.warnings)]) if result.warnings else "",
        _command(result),
        "## Held-out problems",
        _accuracies(result),
        "## Training",
        f"![{curves}](curves.png)",
        throughput_text(result),
        "## Samples",
        _samples(result),
        _kept(result),
        "## Files",
        "`config.json` the options · `first_look.txt` problems, prompts and stop tokens · `metrics.jsonl` one "
        "line per step · `completions.jsonl.gz` what was sampled · "
        "`model/` the trained policy, for `load_policy` · `result.json` the numbers above",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _command(result: RunResult) -> str:
    config, request, command = result.config, result.record.run_config, result.record.command
    settings = (
        f"{config.prompts_per_step} prompts × {config.num_generations} completions per step, "
        f'loss "{config.loss_type}", learning rate {config.learning_rate:g}, beta {config.beta:g}, '
        f"seed {config.seed}; trained on {', '.join(request.data)}; rewards: {', '.join(request.reward_names)}."
    )
    return f"{_fenced(command)}\n\n{settings}" if command else settings


def _accuracies(result: RunResult) -> str:
    parts = []
    for title, rows in evaluation_tables(result, levels=True).items():
        lines = [f"| {' | '.join(row)} |" for row in ((title, "before", "after"), ("---", "---", "---"), *rows)]
        parts.append("\n".join(lines))
    note = f"{result.before.n} held-out problems, 95% intervals."
    if result.comparison is None:
        return "\n\n".join([*parts, f"{note} The stopped run was not evaluated again."])
    note += f" Sampled, paired (exact McNemar test, bootstrap): {result.comparison}."
    return "\n\n".join([*parts, note, "![Accuracy before and after, per level](accuracy.png)"])


def _samples(result: RunResult) -> str:
    """Return a held-out problem of each level (at most three) with its answers, one that training changed if any is."""
    levels, before, after = result.before.levels, result.before, result.after
    parts = []
    if after is not None:
        better = sum(now and not then for then, now in zip(before.correct, after.correct, strict=True))
        worse = sum(then and not now for then, now in zip(before.correct, after.correct, strict=True))
        parts.append(
            f"Of {before.n} problems, {better} were wrong before and are right after, and {worse} the other way round. "
            "The first problem of each level that changed is shown; the first of all if none changed."
        )
    for level in list(dict.fromkeys(levels))[:3]:
        rows = [row for row, name in enumerate(levels) if name == level]
        changed = [row for row in rows if after is not None and before.correct[row] != after.correct[row]]
        row = (changed or rows)[0]
        parts.append(f"**{level}:** {_one_line(before.prompts[row])}")
        for name, evaluation in (("before", before), ("after", after)):
            if evaluation is not None:
                parts.append(f"{name} ({verdict(evaluation, row)}):\n{_fenced(evaluation.completions[row])}")
    return "\n\n".join(parts)


def _kept(result: RunResult) -> str:
    """Return the completions with the highest and the lowest reward of the last step that was kept."""
    try:
        sampled = by_reward(read_completions(result.output))
    except ValueError:
        return ""
    parts = [
        f"## What was trained on\n\nOf step {sampled[0].step}, the completions with the highest and the lowest reward. "
        "`grpo-edu show` with this folder, `--step` and `--worst` shows more."
    ]
    return "\n\n".join([*parts, *(_fenced(sampled_text(one)) for one in (sampled[-1], sampled[0]))])


def verdict(evaluation: Evaluation, row: int) -> str:
    """Return whether a completion is right, and why it is not; for a problem without an answer, its reward.

    >>> found = Evaluation(["1 + 1?"] * 2, ["basic"] * 2, ["1 + 1 = 2.", "#### 3"], [None, "3"], [False, False])
    >>> verdict(found, 0), verdict(found, 1)
    ('wrong: correct work, but no #### line', 'wrong: answered 3 without working')
    """
    if evaluation.levels[row].startswith(UNANSWERED) and evaluation.rewards:
        return f"reward {evaluation.rewards[row]:.2f}"
    if evaluation.correct[row]:
        return "right"
    completion, answer = evaluation.completions[row], evaluation.answers[row]
    calculations = check_equations(completion)
    false = calculations.count(False)
    if answer is None and MARKER not in completion:
        work = "correct work, but " if calculations and not false else ""
        return f"wrong: {work}no {MARKER} line"
    if answer is None:
        return f"wrong: no answer can be read after {MARKER}"
    if false:
        return f"wrong: {false} of {len(calculations)} calculations do not hold"
    how = "although each calculation holds" if calculations else "without working"
    return f"wrong: answered {_one_line(answer)} {how}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _fenced(text: str) -> str:
    """Return a Markdown code block that no backticks of the text can close; long texts are cut."""
    if len(text) > _LONGEST_SAMPLE:
        text = text[:_LONGEST_SAMPLE] + " …"
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


DEFAULT_N = 300  # held-out problems; of GSM8K alone all of them


@dataclass(frozen=True)
class EvaluationReport:
    """An evaluation and what was measured with it.

    evaluation: of n problems. solutions: their n reference solutions.
    seconds: time of the evaluation, without loading. peak_bytes: the most that the process and its children held.
    """

    evaluation: Evaluation
    solutions: list[str]
    seconds: float
    peak_bytes: int

    @property
    def calculations(self) -> list[list[bool]]:
        """Of each completion, whether each of its calculations holds."""
        return [check_equations(text) for text in self.evaluation.completions]

    def per_steps(self) -> dict[int, Evaluation]:
        """Return the evaluation cut by the number of steps in the reference, the fewest first."""
        rows: dict[int, list[int]] = {}
        for row, solution in enumerate(self.solutions):
            rows.setdefault(reference_steps(solution), []).append(row)
        return {steps: self.evaluation.take(rows[steps]) for steps in sorted(rows)}

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers, ready for JSON."""
        found, done = self.calculations, self.evaluation
        written = sum(map(len, found))
        worked = sum(len(verdicts) >= 2 for verdicts in found)
        low, high = wilson_interval(worked, done.n)
        return {
            **done.to_dict(),
            "per_steps": {str(steps): part.counts() for steps, part in self.per_steps().items()},
            "readable_answers": sum(answer is not None for answer in done.answers),
            "step_by_step": {"k": worked, "n": done.n, "share": worked / done.n, "low": low, "high": high},
            "calculation_steps": written / done.n,
            "calculations_that_hold": sum(map(sum, found)) / written if written else None,
            "seconds": round(self.seconds, 2),
            "problems_per_second": round(done.n / self.seconds, 3),
            "tokens_per_second": round(sum(done.num_tokens) / self.seconds, 1),
            "peak_gib": round(self.peak_bytes / GIB, 3),
        }

    def text(self) -> str:
        """Return what a terminal shows: levels, steps of the reference, how the policy works, speed and memory."""
        levels, found = self.evaluation.per_level(), self.to_dict()
        rows = [*levels.items()] if len(levels) == 1 else [*levels.items(), ("all", self.evaluation)]
        lines = [_row(name, part) for name, part in rows]
        steps = self.per_steps()
        if len(steps) > 1:
            lines += ["", "by steps of the reference solution"]
            lines += [_row(str(number), part) for number, part in steps.items()]
        lines += ["", f"readable answer: {found['readable_answers']} of {self.evaluation.n}"]
        work, holds = found["step_by_step"], found["calculations_that_hold"]
        if holds is not None or len(steps) > 1:  # not for answers that are words or texts
            verdict = "" if holds is None else f", {holds:.1%} of them hold"
            lines += [
                f"step by step (two calculations or more): {work['share']:.1%} [{work['low']:.1%}, {work['high']:.1%}]",
                f"calculations per completion: {found['calculation_steps']:.2f}{verdict}",
            ]
        lines.append(
            f"{found['seconds']:.0f} s, {rate(found['problems_per_second'])} problems per second, "
            f"{rate(found['tokens_per_second'])} tokens per second, peak memory {found['peak_gib']:.2f} GiB"
        )
        return "\n".join(lines)


def report_evaluation(
    model: str | Path = "tiny",
    *,
    data: str | Sequence[str] = LEVELS,
    data_path: str | Path | None = None,
    heldout_file: str | Path | None = None,
    columns: str | Sequence[str] = (),
    reward_funcs: Rewards = "accuracy",
    reward_weights: Sequence[float] | None = None,
    split: str = "heldout",
    n: int | None = None,
    seed: int = 0,
    temperature: float = 1.0,
    max_completion_length: int | None = None,
    dtype: str = "float32",
    device: str = "auto",
    progress: bool = True,
) -> EvaluationReport:
    """Load a policy, let it answer `n` problems once each, and measure; other arguments as in `evaluate`.

    n: problems, balanced over the sets; None: 300, and of GSM8K alone all 1,319.
    heldout_file, columns: options of a user's file (`RunConfig`).
    reward_funcs, reward_weights: what is paid for the mean reward, and decides on problems without an answer.

    Raises ValueError and OSError for bad input, with a word on what to do.
    """
    data = parse_data(data)
    if n is None and not all(name in PROBLEM_SETS and PROBLEM_SETS[name].is_evaluated_whole for name in data):
        n = DEFAULT_N
    given: dict[str, Any] = {"heldout_file": heldout_file, "columns": columns, "reward_funcs": reward_funcs}
    config = default_config(data, reward_weights=reward_weights)
    asked = RunConfig(str(model), data, config=config, **given)
    problems = load_problem_sets({**vars(asked), "data_path": data_path}, split, n=n)
    functions = resolve_rewards(asked.reward_funcs)
    check_rewards(functions, problems, backend="trl")
    length = config.max_completion_length if max_completion_length is None else max_completion_length
    with PeakMemory() as memory:
        policy, tokenizer = load_policy(model, dtype)
        policy = policy.to(choose_device(device, policy.num_parameters()))
        started = time.perf_counter()
        evaluation = evaluate(
            policy,
            tokenizer,
            problems,
            reward_funcs=functions,
            reward_weights=config.reward_weights,
            temperature=temperature,
            max_completion_length=length,
            seed=seed,
            progress=progress,
        )
        seconds = time.perf_counter() - started
    return EvaluationReport(evaluation, [problem.solution for problem in problems], seconds, memory.peak)


def reference_steps(solution: str) -> int:
    """Steps of a reference solution: its lines before ####, or on one line its equations; at least 1.

    >>> reference_steps("48/2 = 24 in May.\\n24+48 = 72 in all.\\n#### 72"), reference_steps("1+2=3. 3+4=7. #### 7")
    (2, 2)
    """
    lines = [line for line in solution.partition(MARKER)[0].splitlines() if line.strip()]
    return len(lines) if len(lines) > 1 else max(1, len(check_equations(solution)))


def _row(name: str, part: Evaluation) -> str:
    reward = f"  reward {reward_text(part)}" if part.has_partial_credit else ""
    return f"{name:<13} {part.k:>4} of {part.n:<4}  {accuracy_text(part)}{reward}"
