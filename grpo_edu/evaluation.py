"""Evaluate a policy on held-out problems, with confidence intervals and paired tests.

`evaluate` measures the accuracy with its interval, and `compare` tests whether two policies differ on the same
problems. A difference between two accuracies says little without such a test, because it may be due to chance.
The intervals and tests themselves, and pass@k, are at the end. All functions raise ValueError for arguments that are
empty or out of range.
"""

import functools
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_edu.config import check_numbers
from grpo_edu.problems.equations import check_equations
from grpo_edu.problems.templates import UNANSWERED, Problem, as_problems, prompt_options, scorer_of_level
from grpo_edu.progress import ProgressBars
from grpo_edu.prompts import answers_equal, extract_answer, normalize_answer, render_prompt
from grpo_edu.rewards import OF_TRL, REWARDS, RewardFunction, combine_rewards, score_completions

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from grpo_edu.turns import Environment


@dataclass(frozen=True)
class Estimate:
    """A number and its 95% interval, both as shares.

    It prints as an accuracy, in percent; with the format `+` it prints as a change, in points with their sign. A format
    of numbers, such as `.3f`, holds for all three.

    >>> print(Estimate(0.25, 0.2, 0.31))
    25% [20%, 31%]
    >>> print(f"{Estimate(0.25, 0.2, 0.31):+}; {Estimate(0.25, 0.2, 0.31):+.3f}")
    +25 points [+20, +31]; +0.250 [+0.200, +0.310]
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return format(self)

    def __format__(self, spec: str) -> str:
        if spec == "+":
            value, low, high = (100 * share for share in (self.value, self.low, self.high))
            return f"{value:+.0f} points [{low:+.0f}, {high:+.0f}]"
        spec = spec or ".0%"
        return f"{self.value:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"


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
    rewards: what the reward functions pay for each completion, NaN if none applies; empty if none were given.

    It prints as one line.
    """

    prompts: list[str]
    levels: list[str]
    completions: list[str]
    answers: list[str | None]
    correct: list[bool]
    num_tokens: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)

    def __repr__(self) -> str:
        line = f"{self.k} of {self.n} solved: {100 * self.accuracy:.1f}% [{100 * self.low:.1f}, {100 * self.high:.1f}]"
        return f"{line}, mean reward {self.reward:.3f}" if self.has_partial_credit and self.reward else line

    def __post_init__(self) -> None:
        lengths = {
            name: len(values) for name, values in vars(self).items() if values or name not in ("num_tokens", "rewards")
        }
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
    def reward(self) -> Estimate | None:
        """The mean reward with its 95% bootstrap interval, without NaN; None if there is no reward."""
        paid = [reward for reward in self.rewards if not math.isnan(reward)]
        return Estimate(*astuple(paired_bootstrap([0.0] * len(paid), paid))) if paid else None

    @property
    def has_partial_credit(self) -> bool:
        """Whether the rewards say more than which problems are solved."""
        is_paid = not all(map(math.isnan, self.rewards))
        return is_paid and self.rewards != [float(correct) for correct in self.correct]

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
        """Return the evaluation of each level, in the order in which the levels first occur."""
        rows: dict[str, list[int]] = {}
        for row, level in enumerate(self.levels):
            rows.setdefault(level, []).append(row)
        return {level: self.take(kept) for level, kept in rows.items()}

    def take(self, rows: Sequence[int]) -> "Evaluation":
        """Return the evaluation of some of the problems, by their indices."""
        columns = {name: [values[row] for row in rows] if values else [] for name, values in vars(self).items()}
        return Evaluation(**columns)

    def to_dict(self) -> dict[str, Any]:
        """Counts, accuracy and interval, in total and per level, as plain values for JSON."""
        levels = {level: part.counts() for level, part in self.per_level().items()}
        return {**self.counts(), "per_level": levels}

    def counts(self) -> dict[str, Any]:
        """Return the numbers in total: counts, accuracy and interval, and the mean reward if there is one."""
        found = {"k": self.k, "n": self.n, "accuracy": self.accuracy, "low": self.low, "high": self.high}
        reward = self.reward
        return {**found, "reward": asdict(reward)} if reward else found


@dataclass(frozen=True)
class Comparison:
    """Two accuracies on the same problems, their difference with its 95% interval, and McNemar's p-value.

    reward: the change of the mean reward with its interval, if both evaluations have rewards.

    It prints as one line, without the reward if that changes as the accuracy does.
    """

    before: float
    after: float
    difference: float
    low: float
    high: float
    p_value: float
    reward: "PairedDifference | None" = None

    def __repr__(self) -> str:
        shares = (self.before, self.after, self.difference, self.low, self.high)
        before, after, *change = (100 * share for share in shares)
        line = "{:.1f}% to {:.1f}%: {:+.1f} points [{:+.1f}, {:+.1f}]".format(before, after, *change)
        line += f", p = {self.p_value:.2g}"
        if self.reward in (None, PairedDifference(self.difference, self.low, self.high)):
            return line
        return f"{line}; reward {self.reward:+.3f}"


def compare(before: Evaluation, after: Evaluation, *, seed: int = 0) -> Comparison:
    """Compare two evaluations of the same problems, in the same order, by a bootstrap interval and McNemar's test."""
    if before.prompts != after.prompts:
        raise ValueError(
            "before and after must have the same problems in the same order, got "
            f"{before.n} and {after.n} problems; pass one list of problems to both evaluate() calls"
        )
    gain = paired_bootstrap(before.correct, after.correct, seed=seed)
    p_value = mcnemar(before.correct, after.correct).p_value
    reward = None
    if before.rewards and after.rewards:
        scored = np.array([before.rewards, after.rewards])
        scored = scored[:, ~np.isnan(scored).any(axis=0)]
        reward = paired_bootstrap(*scored.tolist(), seed=seed) if scored.size else None
    return Comparison(before.accuracy, after.accuracy, gain.difference, gain.low, gain.high, p_value, reward)


def evaluate(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    problems: Sequence[Problem | Mapping[str, Any]],
    *,
    reward_funcs: RewardFunction | Sequence[RewardFunction] | None = None,
    reward_weights: Sequence[float] | None = None,
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
        problems: at least one, or dictionaries as for `train`. A problem without a valid answer raises ValueError,
            because it must not count as wrong; with `reward_funcs` it counts as solved if the first of them that is not
            the package's pays at least 1.
        reward_funcs: one or more functions, which are called once for each batch.
        reward_weights: the weight of each function in the reward; 1 each if None.
        temperature: 1.0 samples from the policy as GRPO does; 0 is greedy.
        max_completion_length: the largest number of tokens in a completion.
        batch_size: number of problems per batch, at least 1.
        seed: random seed of the sampling.
        progress: show a progress bar (`ProgressBars`), with this text if it is one.
        environment, max_turns: makes an environment for each problem, and the limit of its turns
            (`grpo_edu.turns`). The completion that is scored is the whole conversation.
        pack_weights: as in `grpo_edu.rollout.generate`.
    """
    batches = evaluate_in_batches(
        model,
        tokenizer,
        problems,
        reward_funcs=reward_funcs,
        reward_weights=reward_weights,
        temperature=temperature,
        max_completion_length=max_completion_length,
        batch_size=batch_size,
        seed=seed,
        environment=environment,
        max_turns=max_turns,
        pack_weights=pack_weights,
    )
    label = progress if isinstance(progress, str) else "Evaluating"
    with ProgressBars(bool(progress)) as bars:
        bars.show(label, 0, len(problems))
        while True:
            try:
                bars.show(label, next(batches).done, len(problems))
            except StopIteration as end:
                return end.value


@dataclass(frozen=True)
class Evaluating:
    """The number of problems of an evaluation that are done."""

    done: int
    total: int


def evaluate_in_batches(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    problems: Sequence[Problem | Mapping[str, Any]],
    *,
    reward_funcs: RewardFunction | Sequence[RewardFunction] | None = None,
    reward_weights: Sequence[float] | None = None,
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

    from grpo_edu.rollout import generate
    from grpo_edu.turns import reset_environments

    problems = as_problems(problems)
    _check_problems(problems, batch_size, seed, with_rewards=reward_funcs is not None)
    if reward_funcs is not None and reward_weights is not None:
        count = 1 if callable(reward_funcs) else len(reward_funcs)
        if len(reward_weights) != count:
            raise ValueError(
                f"reward_weights must have one entry per reward function ({count}), got {len(reward_weights)}"
            )
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
    paid: list[list[float]] = [[] for _ in problems]
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        playing = None if environments is None else [environments[row] for row in rows]
        rollout = generate(
            model,
            tokenizer,
            [rendered[row] for row in rows],
            num_generations=1,
            max_completion_length=max_completion_length,
            temperature=temperature,
            environments=playing,
            max_turns=max_turns,
            generator=generator,
            pack_weights=pack_weights,
        )
        counts = rollout.completion_mask.sum(dim=1).tolist()
        for place, (row, count) in enumerate(zip(rows, counts, strict=True)):
            completions[row], num_tokens[row] = rollout.completions[place], count
        if reward_funcs is not None:
            asked = [problems[row] for row in rows]
            ids = [ids[: int(count)].tolist() for ids, count in zip(rollout.completion_ids, counts, strict=True)]
            rewards = score_completions(reward_funcs, asked, rollout.completions, ids, playing, **OF_TRL)
            for row, values in zip(rows, rewards.tolist(), strict=True):
                paid[row] = values
        yield Evaluating(start + len(rows), len(problems))
    scored = [_answer_and_score(problem, text) for problem, text in zip(problems, completions, strict=True)]
    decisive = _find_decisive(reward_funcs)
    scores = [paid[row][decisive] if score is None else score for row, (_, score) in enumerate(scored)]
    return Evaluation(
        prompts=[problem.prompt for problem in problems],
        levels=[problem.level for problem in problems],
        completions=completions,
        answers=[answer for answer, _ in scored],
        correct=[score >= 1 for score in scores],
        num_tokens=num_tokens,
        rewards=[] if reward_funcs is None else combine_rewards(torch.tensor(paid), reward_weights).tolist(),
    )


def _find_decisive(reward_funcs: RewardFunction | Sequence[RewardFunction] | None) -> int:
    """Return which function decides on problems without an answer: the first that is not the package's, if any."""
    functions = [reward_funcs] if callable(reward_funcs) else reward_funcs or ()
    return next((place for place, function in enumerate(functions) if function not in REWARDS.values()), 0)


def _answer_and_score(problem: Problem, completion: str) -> tuple[str | None, float | None]:
    """Return the answer of a completion, and its score; None if only a reward function can score it."""
    scorer = scorer_of_level(problem.level)
    if scorer is not None:
        return scorer.answer(completion), scorer.score(completion, problem.prompt, problem.level, problem.answer)
    answer = extract_answer(completion)
    if normalize_answer(problem.answer) is None:
        return answer, None
    return answer, float(answer is not None and answers_equal(answer, problem.answer))


def _check_problems(problems: Sequence[Problem], batch_size: int, seed: int, *, with_rewards: bool) -> None:
    if not problems:
        raise ValueError("problems is empty; pass at least one, for example load_problems('basic', 'heldout')")
    check_numbers(batch_size=batch_size, seed=seed)
    for row, problem in enumerate(problems):
        has_answer = scorer_of_level(problem.level) is not None or normalize_answer(problem.answer) is not None
        if not with_rewards and (not has_answer or problem.level.startswith(UNANSWERED)):
            raise ValueError(
                f"problems[{row}] has no valid answer, got {problem.answer!r}; fix the data, set its level to "
                "'text:' to compare it as a text, or pass `reward_funcs`"
            )


# Intervals and paired tests for shares of solved problems, and pass@k.


@dataclass(frozen=True)
class McNemar:
    """The result of McNemar's paired test: problems that only one of two runs solved, and the two-sided p-value."""

    only_before: int
    only_after: int
    p_value: float


@dataclass(frozen=True)
class PairedDifference:
    """The mean of after − before over pairs (as a fraction: 0.25 is 25 percentage points), and its interval.

    A format shows it as it shows an `Estimate`.
    """

    difference: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        return format(Estimate(*astuple(self)), spec)


def wilson_interval(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    r"""Return the Wilson confidence interval of a success rate, which is reliable for few trials too (Wilson 1927).

    .. math:: \frac{\hat p + z^2/2n \pm z \sqrt{\hat p (1 - \hat p)/n + z^2/4n^2}}{1 + z^2/n}

    Args:
        successes: number of successful trials, from 0 to `trials`.
        trials: n ≥ 1.
        confidence: coverage, between 0 and 1.

    Returns:
        (low, high), between 0 and 1.

    >>> [round(bound, 3) for bound in wilson_interval(8, 10)]
    [0.49, 0.943]
    """
    check_numbers(confidence=confidence, trials=trials)
    if not 0 <= successes <= trials:
        raise ValueError(f"successes must be between 0 and trials = {trials}, got {successes}")
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share = successes / trials
    center = share + z**2 / (2 * trials)
    half_width = z * (share * (1 - share) / trials + z**2 / (4 * trials**2)) ** 0.5
    scale = 1 + z**2 / trials
    low = 0.0 if successes == 0 else (center - half_width) / scale
    high = 1.0 if successes == trials else (center + half_width) / scale
    return low, high


def mcnemar(before: Sequence[bool], after: Sequence[bool]) -> McNemar:
    r"""Return the exact McNemar test of whether two runs on the same problems have the same accuracy (McNemar 1947).

    Problems that both runs solve, or that neither solves, do not matter. If there is no difference, each of the other
    problems is solved by either run with probability 1/2. With b problems solved only before and c only after,

    .. math:: p = \min\Big(1,\; 2 \sum_{i=0}^{\min(b, c)} \binom{b + c}{i} 2^{-(b + c)}\Big)

    Args:
        before, after: one bool per problem, for the same problems in the same order.

    >>> result = mcnemar([True] * 2 + [False] * 10, [False] * 2 + [True] * 10)
    >>> result.only_before, result.only_after, round(result.p_value, 4)
    (2, 10, 0.0386)
    """
    from scipy.stats import binomtest

    _check_pairs(before, after)
    only_before = sum(bool(b) and not a for b, a in zip(before, after, strict=True))
    only_after = sum(bool(a) and not b for b, a in zip(before, after, strict=True))
    discordant = only_before + only_after
    p_value = float(binomtest(only_after, discordant, 0.5).pvalue) if discordant else 1.0
    return McNemar(only_before, only_after, p_value)


def paired_bootstrap(
    before: Sequence[float],
    after: Sequence[float],
    *,
    num_resamples: int = 10_000,
    seed: int = 0,
    confidence: float = 0.95,
) -> PairedDifference:
    """Return the percentile bootstrap interval of the mean of after − before, from resampled pairs (Efron 1979).

    Args:
        before, after: one finite number per problem (bools count as 0 and 1), for the same problems in the same order.
        num_resamples: number of samples of n pairs, drawn with replacement; at least 1.
        seed: random seed; the same seed gives the same interval.
        confidence: coverage, between 0 and 1.

    >>> paired_bootstrap([0, 0, 1, 0], [1, 1, 1, 0], seed=0)
    PairedDifference(difference=0.5, low=0.0, high=1.0)
    """
    check_numbers(confidence=confidence, num_resamples=num_resamples)
    _check_pairs(before, after)
    differences = np.asarray(after, dtype=float) - np.asarray(before, dtype=float)
    if not np.isfinite(differences).all():
        raise ValueError("before and after must contain finite numbers only, got NaN or infinity")
    n = len(differences)
    # Drawing n pairs with replacement is the same as drawing how often each distinct difference occurs.
    values, counts = np.unique(differences, return_counts=True)
    draws = np.random.default_rng(seed).multinomial(n, counts / n, size=num_resamples)
    tail = 50 * (1 - confidence)
    low, high = np.percentile(draws @ values / n, [tail, 100 - tail])
    return PairedDifference(float(differences.mean()), float(low), float(high))


def crossed_bootstrap(
    before: Sequence[Sequence[float]],
    after: Sequence[Sequence[float]],
    *,
    num_resamples: int = 10_000,
    seed: int = 0,
    confidence: float = 0.95,
) -> PairedDifference:
    r"""Return the interval of the mean of after − before that varies over training seeds *and* problems (Owen 2007).

    With the differences :math:`d_{sp}` of S seeds on the same P problems, each resample draws S seeds and P problems
    with replacement, independently of each other, and takes the mean

    .. math:: \frac{1}{S P} \sum_{s, p} v_s w_p d_{sp}

    where :math:`v_s` and :math:`w_p` count how often a seed and a problem were drawn. With three to five seeds the
    resampled ones scatter too little: intervals from them alone contain the true mean in about 75 to 83% of all
    studies instead of 95%. So the interval is never narrower than Student's over the means of the seeds: it reaches
    from the lower of both low ends to the higher of both high ends.

    An interval over seeds alone (`mean_estimate`) says what another training run would give on the *same* problems, and
    `paired_bootstrap` what the same run would give on other problems. This one says what another run would give on
    other problems of the kind.

    Args:
        before, after: S lists of P finite numbers (bools count as 0 and 1), one list per seed; the problems have the
            same order in all lists. If all runs start from one evaluated model, repeat its list S times.
        num_resamples, seed, confidence: as for `paired_bootstrap`.

    Raises ValueError for fewer than two seeds, lists of different lengths, or numbers that are not finite.

    >>> crossed_bootstrap([[0, 0, 1, 0]] * 3, [[1, 1, 1, 0]] * 3)  # problems vary, seeds do not
    PairedDifference(difference=0.5, low=0.0, high=1.0)
    """
    from scipy.stats import t

    check_numbers(confidence=confidence, num_resamples=num_resamples)
    _check_pairs(before, after)
    if len(before) < 2:
        raise ValueError("before and after have one list each, but an interval over seeds needs two; run more seeds")
    lengths = {len(row) for rows in (before, after) for row in rows}
    if len(lengths) > 1 or 0 in lengths:
        raise ValueError(f"before and after must have one number per problem in every list, got lengths {lengths}")
    differences = np.asarray(after, dtype=float) - np.asarray(before, dtype=float)
    if not np.isfinite(differences).all():
        raise ValueError("before and after must contain finite numbers only, got NaN or infinity")
    seeds, problems = differences.shape
    drawn_seeds, drawn_problems = _crossed_draws(seeds, problems, num_resamples, seed)
    means = np.einsum("rs,sp,rp->r", drawn_seeds, differences, drawn_problems, optimize=True) / differences.size
    tail = 50 * (1 - confidence)
    low, high = np.percentile(means, [tail, 100 - tail])
    mean, of_seeds = float(differences.mean()), differences.mean(axis=1)
    half = float(t.ppf(0.5 + confidence / 2, seeds - 1) * of_seeds.std(ddof=1) / seeds**0.5)
    return PairedDifference(mean, min(float(low), mean - half), max(float(high), mean + half))


@functools.lru_cache(maxsize=1)
def _crossed_draws(seeds: int, problems: int, num_resamples: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return how often each resample draws each seed and each problem; a study asks for the same draws many times."""
    rng = np.random.default_rng(seed)
    drawn = [rng.multinomial(n, np.full(n, 1 / n), size=num_resamples).astype(float) for n in (seeds, problems)]
    return drawn[0], drawn[1]


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    r"""Return the unbiased estimate, from n samples, that at least one of k samples is correct (Chen et al. 2021).

    .. math:: 1 - \binom{n - c}{k} \Big/ \binom{n}{k} = 1 - \prod_{i=n-c+1}^{n} \Big(1 - \frac{k}{i}\Big)

    Args:
        num_samples: n, number of samples for one problem.
        num_correct: c, number of correct samples, 0 ≤ c ≤ n.
        k: 1 ≤ k ≤ n.

    >>> round(pass_at_k(4, 2, 2), 4)  # one of the six pairs has no correct sample
    0.8333
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"k must be between 1 and num_samples = {num_samples}, got {k}; draw more samples")
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"num_correct must be between 0 and num_samples = {num_samples}, got {num_correct}")
    # if fewer than k samples are wrong, one of the factors is 0
    return 1.0 - float(np.prod(1.0 - k / np.arange(num_samples - num_correct + 1, num_samples + 1)))


def _check_pairs(before: Sequence[Any], after: Sequence[Any]) -> None:
    if len(before) != len(after):
        raise ValueError(f"before and after must have the same length, got {len(before)} and {len(after)}")
    if len(before) == 0:
        raise ValueError("before and after are empty; evaluate on at least one problem")
