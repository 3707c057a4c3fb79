"""Evaluate a policy on held-out problems, with confidence intervals and paired tests.

`evaluate` measures the accuracy with its interval, and `compare` tests whether two policies differ on the same
problems. A difference between two accuracies says little without such a test, because it may be due to chance.
All functions raise ValueError for arguments that are empty or out of range.
"""

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_edu.config import check_numbers
from grpo_edu.extras.significance import mcnemar, paired_bootstrap, wilson_interval
from grpo_edu.problems.equations import check_equations
from grpo_edu.problems.templates import Problem, prompt_options, scorer_of
from grpo_edu.prompts import answers_equal, extract_answer, normalize_answer, render_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from grpo_edu.extras.turns import Environment


@dataclass(frozen=True)
class Estimate:
    """A number and its 95% interval, both as shares.

    It prints as an accuracy, in percent; with the format `+` it prints as a change, in points with their sign.

    >>> print(Estimate(0.25, 0.2, 0.31))
    25% [20%, 31%]
    >>> print(f"{Estimate(0.25, 0.2, 0.31):+}")
    +25 points [+20, +31]
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return format(self)

    def __format__(self, spec: str) -> str:
        value, low, high = (100 * share for share in (self.value, self.low, self.high))
        if spec == "+":
            return f"{value:+.0f} points [{low:+.0f}, {high:+.0f}]"
        return format(f"{value:.0f}% [{low:.0f}%, {high:.0f}%]", spec)


def mean_estimate(values: Sequence[float]) -> Estimate:
    r"""Mean over random seeds with Student's 95% interval: :math:`\bar x \pm t_{n-1} s / \sqrt n`.

    Raises ValueError for fewer than two values, from which their variation cannot be estimated.

    >>> estimate = mean_estimate([0.2, 0.4])
    >>> round(estimate.value, 2), round(estimate.high - estimate.value, 2)  # t_1 = 12.7, s/√2 = 0.1
    (0.3, 1.27)
    """
    from scipy.stats import t

    if len(values) < 2:
        raise ValueError(f"values: {len(values)} given, but an interval over seeds needs at least two; run more seeds")
    mean = float(np.mean(values))
    half = float(t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values)))
    return Estimate(mean, mean - half, mean + half)


@dataclass(frozen=True)
class Evaluation:
    """One scored completion for each of n problems; every field is a list of n entries in the order of the problems.

    prompts: the questions, by which two evaluations are paired. levels: the level of each problem.
    completions: the text that the policy wrote.
    answers: the extracted answers, None for a completion without an answer.
    correct: whether the answer is correct; for reasoning-gym and instructions, whether their scorer returns 1.
    num_tokens: the number of tokens of each completion, including EOS; empty if they were not counted.
    """

    prompts: list[str]
    levels: list[str]
    completions: list[str]
    answers: list[str | None]
    correct: list[bool]
    num_tokens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        lengths = {name: len(values) for name, values in vars(self).items() if values or name != "num_tokens"}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"the fields of an Evaluation must have the same length, got {lengths}")
        if not self.correct:
            raise ValueError("an Evaluation must have at least one problem, got none")

    @property
    def k(self) -> int:
        """The number of solved problems."""
        return sum(self.correct)

    @property
    def n(self) -> int:
        """The number of problems."""
        return len(self.correct)

    @property
    def accuracy(self) -> float:
        """The fraction of solved problems, k / n."""
        return self.k / self.n

    @property
    def low(self) -> float:
        """Lower end of the 95% Wilson interval of the accuracy."""
        return wilson_interval(self.k, self.n)[0]

    @property
    def high(self) -> float:
        """Upper end of the 95% Wilson interval of the accuracy."""
        return wilson_interval(self.k, self.n)[1]

    @property
    def worked_share(self) -> float:
        """The fraction of completions with at least one equation, true or false."""
        return sum(bool(check_equations(text)) for text in self.completions) / self.n

    def per_level(self) -> dict[str, "Evaluation"]:
        """The evaluation of each level, in the order in which the levels first occur."""
        rows: dict[str, list[int]] = {}
        for row, level in enumerate(self.levels):
            rows.setdefault(level, []).append(row)
        return {level: self.take(kept) for level, kept in rows.items()}

    def take(self, rows: Sequence[int]) -> "Evaluation":
        """The evaluation of some of the problems, by their indices."""
        columns = {name: [values[row] for row in rows] if values else [] for name, values in vars(self).items()}
        return Evaluation(**columns)

    def to_dict(self) -> dict[str, Any]:
        """Counts, accuracy and interval, in total and per level, as plain values for JSON."""
        levels = {level: part._summary() for level, part in self.per_level().items()}
        return {**self._summary(), "per_level": levels}

    def _summary(self) -> dict[str, float]:
        return {"k": self.k, "n": self.n, "accuracy": self.accuracy, "low": self.low, "high": self.high}


@dataclass(frozen=True)
class Comparison:
    """Two accuracies on the same problems, their difference with its 95% interval, and McNemar's p-value."""

    before: float
    after: float
    difference: float
    low: float
    high: float
    p_value: float


def compare(before: Evaluation, after: Evaluation, *, seed: int = 0) -> Comparison:
    """Compare two evaluations of the same problems, in the same order, by a bootstrap interval and McNemar's test."""
    if before.prompts != after.prompts:
        raise ValueError(
            "before and after must have the same problems in the same order, got "
            f"{before.n} and {after.n} problems; pass one list of problems to both evaluate() calls"
        )
    gain = paired_bootstrap(before.correct, after.correct, seed=seed)
    p_value = mcnemar(before.correct, after.correct).p_value
    return Comparison(before.accuracy, after.accuracy, gain.difference, gain.low, gain.high, p_value)


def evaluate(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    problems: Sequence[Problem],
    *,
    temperature: float = 1.0,
    max_completion_length: int = 96,
    batch_size: int = 64,
    seed: int = 0,
    progress: bool | str = False,
    environment: "Callable[[], Environment] | None" = None,
    max_turns: int | None = None,
    pack_weights: bool = True,
) -> Evaluation:
    """Sample one completion for each problem and score it.

    Batches contain prompts of similar length, so that there is less padding; the result is in the order of `problems`.
    The same seed, problems and batch_size give the same completions.

    Args:
        model, tokenizer: from `load_policy`. The model's mode (train or eval) is restored afterwards.
        problems: at least one. A problem without a valid answer raises ValueError, because it must not count as wrong.
        temperature: 1.0 samples from the policy as GRPO does; 0 is greedy.
        max_completion_length: the largest number of tokens in a completion.
        batch_size: number of problems per batch, at least 1.
        seed: random seed of the sampling.
        progress: show a progress bar in a notebook or a terminal, with this text if it is one.
        environment, max_turns: makes an environment for each problem, and the limit of its turns
            (`grpo_edu.extras.turns`). The completion that is scored is the whole conversation.
        pack_weights: as in `grpo_edu.rollout.generate`.
    """
    from tqdm.auto import tqdm

    batches = evaluate_in_batches(
        model,
        tokenizer,
        problems,
        temperature=temperature,
        max_completion_length=max_completion_length,
        batch_size=batch_size,
        seed=seed,
        environment=environment,
        max_turns=max_turns,
        pack_weights=pack_weights,
    )
    # disable=None: tqdm shows nothing if the output is neither a terminal nor a notebook
    label = progress if isinstance(progress, str) else "Evaluating"
    with tqdm(total=len(problems), desc=label, disable=None if progress else True) as bar:
        while True:
            try:
                bar.update(next(batches).done - bar.n)
            except StopIteration as end:
                return end.value


@dataclass(frozen=True)
class Evaluating:
    """How many of the problems of an evaluation are done."""

    done: int
    total: int


def evaluate_in_batches(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    problems: Sequence[Problem],
    *,
    temperature: float = 1.0,
    max_completion_length: int = 96,
    batch_size: int = 64,
    seed: int = 0,
    environment: "Callable[[], Environment] | None" = None,
    max_turns: int | None = None,
    pack_weights: bool = True,
) -> Generator[Evaluating, None, Evaluation]:
    """Do an evaluation that can be stopped after each batch; yields its progress, and returns what `evaluate` does."""
    import torch

    from grpo_edu.extras.turns import reset_environments
    from grpo_edu.rollout import generate

    _check_problems(problems, batch_size, seed)
    environments, openings = None, [""] * len(problems)
    if environment is not None:
        environments, openings = reset_environments(environment, [problem.row() for problem in problems], 1)
    rendered = [
        render_prompt(tokenizer, problem.prompt + opening, **prompt_options(problem.level))
        for problem, opening in zip(problems, openings, strict=True)
    ]
    lengths = [len(ids) for ids in tokenizer(rendered, add_special_tokens=False)["input_ids"]]
    order = sorted(range(len(problems)), key=lambda row: lengths[row])
    generator = torch.Generator().manual_seed(seed)
    completions, num_tokens = [""] * len(problems), [0] * len(problems)
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        rollout = generate(
            model,
            tokenizer,
            [rendered[row] for row in rows],
            num_generations=1,
            max_completion_length=max_completion_length,
            temperature=temperature,
            environments=None if environments is None else [environments[row] for row in rows],
            max_turns=max_turns,
            generator=generator,
            pack_weights=pack_weights,
        )
        counts = rollout.completion_mask.sum(dim=1).tolist()
        for row, completion, count in zip(rows, rollout.completions, counts, strict=True):
            completions[row], num_tokens[row] = completion, count
        yield Evaluating(start + len(rows), len(problems))
    scored = [_answer_and_score(problem, text) for problem, text in zip(problems, completions, strict=True)]
    return Evaluation(
        prompts=[problem.prompt for problem in problems],
        levels=[problem.level for problem in problems],
        completions=completions,
        answers=[answer for answer, _ in scored],
        correct=[correct for _, correct in scored],
        num_tokens=num_tokens,
    )


def _answer_and_score(problem: Problem, completion: str) -> tuple[str | None, bool]:
    """The answer of a completion, and whether it is correct."""
    scorer = scorer_of(problem)
    if scorer is not None:
        return scorer.answer(completion), scorer.score(completion, problem.prompt, problem.level, problem.answer) >= 1.0
    answer = extract_answer(completion)
    return answer, answer is not None and answers_equal(answer, problem.answer)


def _check_problems(problems: Sequence[Problem], batch_size: int, seed: int) -> None:
    if not problems:
        raise ValueError("problems is empty; pass at least one, for example load_problems('basic', 'heldout')")
    check_numbers(batch_size=batch_size, seed=seed)
    for row, problem in enumerate(problems):
        if scorer_of(problem) is None and normalize_answer(problem.answer) is None:
            raise ValueError(f"problems[{row}] has no valid answer, got {problem.answer!r}; fix the data")
