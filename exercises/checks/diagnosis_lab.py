"""Exercises on diagnosis: the curves of a run, checks of one batch, a faulty setup, and three unlabelled runs."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from grpo_edu import trainer
from grpo_edu.advantages import group_advantages
from grpo_edu.checks.compare import Outcome
from grpo_edu.checks.core import SLIP_CREDIT, Call, Exercise, Part, call, letters_of
from grpo_edu.checks.feedback import Feedback, PartResult
from grpo_edu.checks.inputs import Curve, numbers, stored_curves
from grpo_edu.checks.objective import completion_mask
from grpo_edu.checks.slips import NOT_WRITTEN
from grpo_edu.config import GRPOConfig
from grpo_edu.problems.templates import Problem
from grpo_edu.rewards import accuracy_reward
from grpo_edu.rollout import Rollout
from grpo_edu.studies.broken_runs import (
    Case,
    eos_as_padding,
    find,
    hasty_advantages,
    one_batch,
    shifted_mask,
    transposed_advantages,
)

# ---- name_trouble ----
READ = ("reward", "frac_reward_zero_std", "clip_ratio/region_mean")  # the signs that the tree asks for
STORED = (*READ, "completions/mean_length")

TROUBLES = {
    "unpaid": ("reward always 0", "chat template skipped", "length truncation"),
    "tied": ("tied rewards", "G too small"),
    "broken down": ("lr too high", "KL wrong sign"),
    "clipped": ("stale old log-probabilities",),
    "not in the curves": ("healthy", "std float trap", "groups mixed", "mask off by one", "EOS masked"),
}


def name_trouble(curves: Mapping[str, Sequence[float]]) -> str:
    """Return the first question of the tree that a run's curves answer with yes."""
    reward, tied, clipped = (curves[sign] for sign in READ)
    answers = {
        "unpaid": _mean(reward[:4]) < 0.1,
        "tied": _mean(tied[:2]) >= 0.5,
        "broken down": _mean(reward[-4:]) < 0.5 * _mean(reward[:4]),
        "clipped": max(clipped) > 0,
    }
    return _first_yes(answers)


def _first_yes(answers: Mapping[str, bool], *order: str) -> str:
    """Return the first question that is answered with yes, in another `order` if one is given, which may omit some."""
    return next((question for question in order or answers if answers[question]), "not in the curves")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _some_run(trouble: str) -> Callable[[random.Random], Call]:
    """Return a function that draws a stored run, or as often a made-up one, in which later questions say yes too."""

    def draw(rng: random.Random) -> Call:
        if rng.random() < 0.5:
            run = rng.choice(stored_curves(rng.choice(TROUBLES[trouble])))
            return call({sign: run[sign] for sign in READ})
        return call(_made_up(rng, trouble))

    return draw


def _made_up(rng: random.Random, trouble: str) -> dict[str, Curve]:
    """Eighths all: sums of them are exact."""
    place = list(TROUBLES).index(trouble)
    first = rng.sample([0.25, 0.0, 0.0, 0.0] if place == 0 else [0.75, 0.75, 0.5, 0.0], 4)
    last = [0.0, 0.0, 0.0, 0.0] if place < 3 else rng.sample(rng.choice([[0.25] * 4, [0.5, 0.25, 0.5, 0.25]]), 4)
    ties = rng.choice([[0.5, 0.5], [0.25, 0.75], [1.0, 0.0]] if place < 2 else [[0.375, 0.5], [0.25, 0.625]])
    clipped = [0.0] * 8
    if place < 4:
        clipped[rng.randrange(8)] = 0.125
    return dict(zip(READ, map(Curve, (first + last, ties + [0.625] * 6, clipped)), strict=True))


check_name_trouble = Exercise(
    name_trouble,
    parts=tuple(
        Part(f"runs of one kind, {number} of 5", 1, _some_run(trouble), draws=24)
        for number, trouble in enumerate(TROUBLES, 1)
    ),
    changes="""
        ties are checked before payment:
            _first_yes(answers) -> _first_yes(answers, "tied", "unpaid", "broken down", "clipped")
            In a run that is never paid, all groups tie as well. Keep the order of the questions.
        the breakdown is checked before ties:
            _first_yes(answers) -> _first_yes(answers, "unpaid", "broken down", "tied", "clipped")
            Keep the order of the questions: ties come before the breakdown.
        the breakdown is checked first:
            _first_yes(answers) -> _first_yes(answers, "broken down", "unpaid", "tied", "clipped")
            Keep the order of the questions: payment and ties come before the breakdown.
        clipped tokens are checked before the breakdown:
            _first_yes(answers) -> _first_yes(answers, "unpaid", "tied", "clipped", "broken down")
            Keep the order of the questions: the breakdown comes before clipping.
        clipped tokens are checked first:
            _first_yes(answers) -> _first_yes(answers, "clipped", "unpaid", "tied", "broken down")
            Keep the order of the questions: clipping comes last.
        the last question with a yes is returned, not the first:
            _first_yes(answers) -> _first_yes(answers, "clipped", "broken down", "tied", "unpaid")
            Return as soon as the answer to a question is yes.
        all of the first four rewards have to be low: _mean(reward[:4]) < 0.1 -> max(reward[:4]) < 0.1
            Use the *mean* of the first four rewards: a single step says little.
        only the first reward is used: _mean(reward[:4]) < 0.1 -> reward[0] < 0.1
            Use the mean of the first *four* rewards.
        the mean reward of the whole run is used: _mean(reward[:4]) < 0.1 -> _mean(reward) < 0.1
            A run that breaks down earned rewards in the beginning. Look at the first four steps.
        exactly half of the groups is not enough: >= 0.5 -> > 0.5
            The question is whether the share is 0.5 *or more*.
        the ties at the end of the run are used: tied[:2] -> tied[-4:]
            In a healthy run, more and more groups tie over time. Look at the *first* steps.
        the ties of more than two steps are used: tied[:2] -> tied[:4]
            In later steps, groups tie in healthy runs as well: use the first *two* steps.
        any drop counts as a breakdown: < 0.5 * _mean -> < _mean
            The reward must fall below *half* of what it was.
        exactly half counts as a breakdown: < 0.5 * _mean -> <= 0.5 * _mean
            The reward must fall *below* half of what it was.
        a breakdown is never found: _first_yes(answers) -> _first_yes(answers, "unpaid", "tied", "clipped")
            Compare the last four steps with the first four.
        only the first four steps are checked for clipping: max(clipped) -> max(clipped[:4])
            The question is whether it is *ever* above 0. In the first steps the policy has hardly moved.
        clipped tokens are never found: _first_yes(answers) -> _first_yes(answers, "unpaid", "tied", "broken down")
            With one update per batch, is the share of clipped tokens ever above 0?
    """,
)


# ---- find_fault ----
DIAGNOSES = {  # fault: what tells it from all others, and what removes it
    "reward always 0": ("right answers earn 0", "another reward"),
    "chat template skipped": ("the prompt opens no chat turn", "render the prompt"),
    "length truncation": ("completions are cut off", "more tokens per completion"),
    "tied rewards": ("right or wrong, all earn 1", "another reward"),
    "G too small": ("a step is one group of two", "more completions per step"),
    "std float trap": ("equal rewards get advantages", "give equal rewards exactly 0"),
    "groups mixed": ("advantages have wrong signs", "keep the rows of a group together"),
    "mask off by one": ("the first token is not trained", "begin the mask at the first token"),
    "EOS masked": ("the end token is not trained", "let the mask include the end token"),
    "lr too high": ("the reward falls at once", "reload, and lower the learning rate"),
    "stale old log-probabilities": ("tokens are clipped", "take the old ones from each rollout"),
    "KL wrong sign": ("the reward falls late", "add the KL term"),
}
SYMPTOMS = ("most groups tie", "the gradient is near 0", "the reward rises too slowly")
LOWER_RATE, NO_FIXES = "lower the learning rate", ("train for longer", "use another seed")
WORDS = (
    {*DIAGNOSES},
    {*SYMPTOMS, *(evidence for evidence, _ in DIAGNOSES.values())},
    {*NO_FIXES, LOWER_RATE, *(fix for _, fix in DIAGNOSES.values())},
)


RUNS = ("Run A", "Run B", "Run C")
KINDS = (  # one run of each is drawn
    ("reward always 0", "chat template skipped", "length truncation", "tied rewards"),
    ("G too small", "lr too high", "stale old log-probabilities", "KL wrong sign"),
    ("std float trap", "groups mixed", "mask off by one", "EOS masked"),
)


def drawn_cases(student: str) -> dict[str, Case]:
    """Return a student's three cases in random order: a useless reward, a fault seen in curves, one seen in a batch.

    Raises ValueError for a name without letters and digits.
    """
    if not letters_of(student):
        raise ValueError(f"student: {student!r} has no letters or digits; give your name as your course knows it")
    rng = random.Random(f"find_fault {letters_of(student)}")
    names = [rng.choice(kind) for kind in KINDS]
    rng.shuffle(names)
    return {run: find(name) for run, name in zip(RUNS, names, strict=True)}


UNLABELLED, UNLABELLED_SEEDS = "unlabelled_runs.json", (5, 6, 7, 8, 9)  # the runs with names have the seeds 0 to 4


def hide_name(fault: str) -> str:
    """Return what stands for a fault in the file of unlabelled runs."""
    return hashlib.sha256(fault.encode()).hexdigest()[:8]


@dataclass(frozen=True)
class UnlabelledRun:
    """One of a student's runs: what it shows, and not what is wrong with it."""

    student: str
    run: str

    @property
    def curves(self) -> list[dict[str, Curve]]:
        """The curves of five runs with other seeds than the stored runs whose faults are named."""
        return stored_curves(hide_name(drawn_cases(self.student)[self.run].name), UNLABELLED)

    def batch(self) -> str:
        """Train `tiny` for four steps with the run's fault, and describe the last batch (see `one_batch`)."""
        from grpo_edu import LEVELS, load_policy, load_problems

        case = drawn_cases(self.student)[self.run]
        case = replace(case, broken=case.broken.with_config(seed=UNLABELLED_SEEDS[0]))
        model, tokenizer = load_policy("tiny")
        return one_batch(case, model, tokenizer, load_problems(LEVELS, "train"))


def unlabelled_runs(student: str) -> dict[str, UnlabelledRun]:
    """Return the three runs that a student's name draws.

    >>> list(unlabelled_runs("Mary Jackson").values())[0]
    UnlabelledRun(student='Mary Jackson', run='Run A')
    """
    return {run: UnlabelledRun(student, run) for run in drawn_cases(student)}


def right_diagnoses(student: str) -> dict[str, Any]:
    """Return the right diagnoses of a student's runs: run → (fault, evidence, fix)."""
    found = {run: (case.name, *DIAGNOSES[case.name]) for run, case in drawn_cases(student).items()}
    return {"student": student, **found}


def find_fault() -> dict[str, Any]:
    """Return the right diagnoses of one student's runs."""
    return right_diagnoses("Mary Jackson")


@dataclass(frozen=True, eq=False)
class DrawnExercise(Exercise):
    """An exercise whose runs are drawn by the student's name; each word of a part is worth a point.

    The feedback says how many words of a part are right and not which, and never what was expected.
    """

    def student_in(self, outcome: Outcome) -> str:
        """Return whose runs an answer is about, or "" if it has no such form."""
        return outcome.value["student"] if not outcome.problem and _rows(outcome.value)[0] else ""

    def judge(
        self, found: Sequence[Sequence[Outcome]], seed: int, credit: float = SLIP_CREDIT, variable: str = ""
    ) -> Feedback:
        """Grade an answer; the inputs' seed and the credit for slips play no part."""
        outcome = found[0][0]
        rows, mistake, why = None, None, outcome.detail
        if outcome.problem == "NotImplementedError":
            mistake = NOT_WRITTEN
        elif not outcome.problem:
            rows, why = _rows(outcome.value)
        if rows is None:
            words = (mistake.name, mistake.hint) if mistake else ("", "")
            return Feedback(
                self.name,
                tuple(PartResult(part.name, 0, part.points, "", "", "", why, *words) for part in self.parts),
                seed,
            )
        right = right_diagnoses(outcome.value["student"])
        wanted = [right[run] for run in RUNS]
        parts = []
        for column, part in enumerate(self.parts):
            given, expected = ([row[column] for row in table] for table in (rows, wanted))
            count = sum(one == other for one, other in zip(given, expected, strict=True))
            name = "" if count == len(RUNS) else _confusion(column, rows, wanted)
            parts.append(
                PartResult(
                    part.name,
                    count,
                    part.points,
                    given=f"the runs of {right['student']}",
                    got=f"{count} of {len(RUNS)} right",
                    mistake=name,
                    hint=self.mistakes[name].hint if name else "",
                )
            )
        return Feedback(self.name, tuple(parts), seed)


def _rows(answer: Any) -> tuple[list[tuple[str, ...]] | None, str]:
    """Return the three diagnoses of an answer, or None and what is wrong with its form."""
    student = answer.get("student") if isinstance(answer, dict) else None
    if not isinstance(student, str) or not letters_of(student):
        return None, 'the result must be a dict in which "student" is your name'
    for run in RUNS:
        row = answer.get(run)
        if not isinstance(row, (tuple, list)) or len(row) != 3 or not all(isinstance(word, str) for word in row):
            return None, f"{run!r} must be three strings: fault, evidence and fix"
    return [tuple(answer[run]) for run in RUNS], ""


def _confusion(column: int, rows: list[tuple[str, ...]], wanted: list[tuple[str, ...]]) -> str:
    """Return the name of the mistake in a column that is not all right."""
    given = {row[column] for row, right in zip(rows, wanted, strict=True) if row[column] != right[column]}
    if given - WORDS[column]:
        return "a word is not in the tables"
    if sorted(rows) == sorted(wanted):
        return "the runs are swapped"
    if column == 0:
        return "the run has another fault"
    if column == 1:
        return (
            "a symptom of many faults is given as evidence"
            if given & {*SYMPTOMS}
            else "the evidence belongs to another fault"
        )
    if LOWER_RATE in given:
        return "only the learning rate is lowered"
    return "more time or another seed is called a fix" if given & {*NO_FIXES} else "the fix removes another fault"


def _with_words(column: int, change: Callable[[str], str]) -> dict[str, Any]:
    """Return the right diagnoses, with the words of one column changed."""
    found = find_fault()
    for run in RUNS:
        words = list(found[run])
        words[column] = change(words[column])
        found[run] = tuple(words)
    return found


check_find_fault = DrawnExercise(
    find_fault,
    parts=tuple(
        Part(name, 3, lambda rng: call(), draws=0, always=(call(),))
        for name in ("the faults", "the evidence", "the fixes")
    ),
    changes="""
        a word is not in the tables: _with_words(0, str.upper)
            Copy the words exactly as they are written in the tables.
        the runs are swapped:
            {**find_fault(), "Run A": find_fault()["Run B"], "Run B": find_fault()["Run A"]}
            The three diagnoses are right, but not the runs that you gave them to.
        the run has another fault: _with_words(0, lambda fault: "KL wrong sign" if fault == "lr too high" else fault)
            Ask the questions of the decision tree again, from the top. In which line of the batch would it differ?
        a symptom of many faults is given as evidence: _with_words(1, lambda evidence: SYMPTOMS[0])
            Many faults make groups tie or slow a run down. What do you see in this run and in no other?
        the evidence belongs to another fault: _with_words(1, lambda evidence: "completions are cut off")
            Do you see this evidence in the run's own curves, or in a line of its batch?
        only the learning rate is lowered: _with_words(2, lambda fix: LOWER_RATE if "reload" in fix else fix)
            After a breakdown, the policy gives no right answers any more, so nothing is rewarded. What has to come
            first?
        more time or another seed is called a fix: _with_words(2, lambda fix: NO_FIXES[0])
            The fault acts in every step, and with every seed.
        the fix removes another fault: _with_words(2, lambda fix: "more tokens per completion")
            Which setting, reward or stage caused what you saw? Change that one.
    """,
)


# ---- signs_are_right ----
def signs_are_right(rewards: Tensor, advantages: Tensor, num_generations: int) -> bool:
    """Return True if each advantage has the sign of reward minus group mean, and a tied group's are exactly 0."""
    groups, given = (one.view(-1, num_generations) for one in (rewards, advantages))
    expected = (groups - groups.mean(dim=1, keepdim=True)).sign()
    expected[_tied(groups)] = 0
    return torch.equal(given.sign(), expected)


def _tied(groups: Tensor) -> Tensor:
    return (groups == groups[:, :1]).all(dim=1)


def _rewards_of(rng: random.Random, tied: bool) -> Tensor:
    """Draw an easy group, a hard one and, if `tied`, one that ties, or that one alone; easy may be paid more."""
    (wrong, right), (poor, good) = rng.choice([((0.0, 1.0), (0.0, 1.0)), ((0.5, 0.9), (0.1, 0.3))])
    easy = rng.sample([right] * rng.choice([6, 7]) + [wrong] * 2, 8)
    hard = rng.sample([poor] * 7 + [good] * 2, 8)
    tie = [[rng.randrange(1, 101) / 100] * 8] if tied else []
    alone = tied and rng.random() < 0.3  # then torch's std of equal rewards need not be 0
    return torch.tensor(tie if alone else rng.sample([easy, hard, *tie], 2 + len(tie)))


def _faint_trap(rewards: Tensor, config: GRPOConfig) -> Tensor:
    """Return the float trap with an eps of 1e-4: the advantages of a tied group are 0 or at most 0.0006."""
    tied = _tied(rewards.view(-1, 8)).repeat_interleave(8)
    return hasty_advantages(rewards, config) * torch.where(tied, 1e-4, 1.0)


def _advantages_from(stages: Sequence[Callable], tied: bool) -> Callable[[random.Random], Call]:
    """Half of the batches are healthy; the others come from a broken stage, or have reversed signs."""

    def draw(rng: random.Random) -> Call:
        kind = rng.randrange(6)
        while True:
            rewards = _rewards_of(rng, tied).flatten()
            healthy = group_advantages(rewards, 8)
            if kind < 3:
                return call(rewards, healthy, 8)
            config = GRPOConfig(num_generations=8, prompts_per_step=len(rewards) // 8)
            advantages = -healthy if kind == 3 else rng.choice(stages)(rewards, config)
            if not signs_are_right(rewards, advantages, 8):
                return call(rewards, advantages, 8)

    return draw


check_signs_are_right = Exercise(
    signs_are_right,
    parts=(
        Part(
            "healthy batches, some with mixed groups",
            2,
            _advantages_from([transposed_advantages], False),
            draws=30,
            always=(call(torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([1.0, 1.0, -1.0, -1.0]), 2),),
        ),
        Part(
            "healthy batches, some in the float trap",
            2,
            _advantages_from([hasty_advantages, _faint_trap], True),
            draws=40,
        ),
    ),
    changes="""
        the mean is not that of the completion's own group: groups.mean(dim=1, keepdim=True) -> groups.mean()
            A completion is compared with its group, not with the batch. A group is one row of `view(-1,
            num_generations)`.
        the columns are treated as groups: one.view(-1, num_generations) -> one.view(num_generations, -1).T
            A group's rows are adjacent: `view(-1, num_generations)` makes each group a row.
        tied groups are not checked: = 0 -> = given[_tied(groups)].sign()
            In a tied group, all advantages must be exactly 0.
        almost 0 counts as 0: given.sign() -> given.masked_fill(given.abs() < 1e-3, 0.0).sign()
            The advantages of a tied group are *exactly* 0. The float trap may be small in one batch and
            large in the next.
        equal rewards are compared with a mean that is rounded: = 0 -> = expected[_tied(groups)]
            The computed mean of eight rewards of 1.3 is not exactly 1.3. Check first whether the rewards are equal.
        ties are detected by a standard deviation of 0: _tied(groups) -> groups.std(dim=1) == 0
            With a single group, torch's std of equal rewards need not be 0. Compare the rewards with each other.
        only the sum of all advantages is checked: bool(advantages.sum().abs() < 1e-3)
            Advantages in the wrong rows still add up to 0.
        only the sums of the groups are checked:
            torch.equal(given.sign(), expected) -> bool((given.sum(dim=1).abs() < 1e-3).all())
            Advantages with the wrong signs add up to 0 as well.
        one right sign is enough: torch.equal(given.sign(), expected) -> bool((given.sign() == expected).any())
            *All* signs must be right, because some are right by accident.
    """,
)


# ---- mask_is_right ----
EOS, PAD = 2, 0


def mask_is_right(completion_ids: Tensor, loss_mask: Tensor, eos_token_id: int) -> bool:
    """Return True if the mask is 1 from the first token through the first EOS, inclusive, and 0 behind it."""
    mask, right = loss_mask.long(), completion_mask(completion_ids, eos_token_id)
    return torch.equal(mask, right)


def _rollout(rng: random.Random, pad: int) -> Rollout:
    """Four completions, one longer than the others; in every other batch it has no end."""
    rows = [[rng.randrange(3, 10) for _ in range(rng.randrange(1, 4))] + [EOS] for _ in range(3)]
    rows.append([rng.randrange(3, 10) for _ in range(5)] + rng.choice([[EOS], []]))
    rng.shuffle(rows)
    longest = max(map(len, rows))
    ids = torch.tensor([row + [pad] * (longest - len(row)) for row in rows])
    ones = torch.ones(4, 1).long()
    return Rollout(
        prompts=["?"] * 4,
        completions=[""] * 4,
        prompt_ids=ones,
        prompt_mask=ones,
        completion_ids=ids,
        completion_mask=completion_mask(ids, EOS),
        sampling_per_token_logps=torch.zeros(4, longest),
        is_truncated=torch.tensor([EOS not in row for row in rows]),
        num_generations=4,
    )


def _mask_from(stage: Callable, rollout: Rollout) -> Tensor:
    config = GRPOConfig(num_generations=4, prompts_per_step=1)
    return stage(rollout, [Problem("?", "1", "basic", "#### 1")], [accuracy_reward], config).loss_mask


def _masks(spoil: Callable[[random.Random, Rollout], Tensor]) -> Callable[[random.Random], Call]:
    """Half of the masks are healthy, as the trainer makes them."""

    def draw(rng: random.Random) -> Call:
        rollout = _rollout(rng, rng.choice([EOS, PAD]))
        mask = _mask_from(trainer.score_rollout, rollout) if rng.random() < 0.5 else spoil(rng, rollout)
        return call(rollout.completion_ids, mask, EOS)

    return draw


def _row_with_room(rng: random.Random, mask: Tensor) -> int:
    return rng.choice([row for row, last in enumerate(mask[:, -1].tolist()) if not last])


def _ones_behind(rng: random.Random, rollout: Rollout) -> Tensor:
    """Ones everywhere, or everywhere in one row that should end sooner."""
    mask = rollout.completion_mask.clone()
    rows: list[slice | int] = [slice(None), _row_with_room(rng, mask)]
    mask[rng.choice(rows)] = 1
    return mask


def _one_bad_row(rng: random.Random, rollout: Rollout) -> Tensor:
    """One row is shifted, or lacks its end, or has the 1 of its end one place behind it."""
    mask = rollout.completion_mask.clone()
    row = _row_with_room(rng, mask)
    kind, end = rng.randrange(3), int(mask[row].sum()) - 1
    if kind:
        mask[row, end], mask[row, end + 1] = 0, kind - 1
    else:
        mask[row] = mask[row].roll(1)
    return mask


def _through_the_last_end(is_eos: Tensor) -> Tensor:
    to_come = is_eos.flip(1).cumsum(dim=1).flip(1) > 0
    return (to_come | ~is_eos.any(dim=1, keepdim=True)).long()


check_mask_is_right = Exercise(
    mask_is_right,
    parts=(
        Part(
            "healthy masks, some off by one",
            1,
            _masks(lambda rng, rollout: _mask_from(shifted_mask, rollout)),
            draws=20,
        ),
        Part(
            "healthy masks, some without their ends",
            1,
            _masks(lambda rng, rollout: _mask_from(eos_as_padding, rollout)),
            draws=20,
        ),
        Part("healthy masks, some with ones after the end", 1, _masks(_ones_behind), draws=20),
        Part("healthy masks, some with one wrong row", 1, _masks(_one_bad_row), draws=40),
    ),
    changes="""
        ones after the end are accepted: torch.equal(mask, right) -> bool(mask[right == 1].all())
            After the first end token the mask must be 0, because the loss must not see the padding.
        missing ones are accepted: torch.equal(mask, right) -> not mask[right == 0].any()
            The mask must be 1 for every token through the end token.
        only the first token is checked: torch.equal(mask, right) -> bool(mask[:, 0].all())
            The end of a completion can be missing as well.
        only the last token is checked:
            torch.equal(mask, right) -> bool(mask.gather(1, right.sum(dim=1, keepdim=True) - 1).all())
            The beginning of a completion can be missing as well.
        the end token is treated as padding:
            completion_mask(completion_ids, eos_token_id) -> (completion_ids != eos_token_id).long().cumprod(dim=1)
            The mask goes through the first EOS, *inclusive*. A healthy batch must pass the check.
        the mask ends at the last end token instead of the first:
            completion_mask(completion_ids, eos_token_id) -> _through_the_last_end(completion_ids == eos_token_id)
            Nothing counts after the *first* end token, not even another end token.
        one right row is enough: torch.equal(mask, right) -> bool((mask == right).all(dim=1).any())
            *All* rows must be right.
        only the first row is checked: torch.equal(mask, right) -> torch.equal(mask[0], right[0])
            Check *every* row, because a single one may be wrong.
        only the number of ones is compared: torch.equal(mask, right) -> torch.equal(mask.sum(dim=1), right.sum(dim=1))
            A row that is shifted may have just as many ones. Compare position by position.
    """,
)


# ---- ratio_is_one ----
def ratio_is_one(per_token_logps: Tensor, old_per_token_logps: Tensor, loss_mask: Tensor) -> bool:
    """Return True if exp(logp - old) is 1 up to 0.001 on every token that counts."""
    logs, mask = per_token_logps - old_per_token_logps, loss_mask.bool()
    far = (logs.exp() - 1).abs()
    return bool((far[mask] < 1e-3).all())


def _fresh_or_stale(low: float, high: float, padding: bool) -> Callable[[random.Random], Call]:
    """Half of the old log-probabilities are fresh, some of them up to rounding; the others are apart by low or high."""

    def draw(rng: random.Random) -> Call:
        logps = numbers(rng, 2, 5, low=-3.0, high=-0.2)
        if rng.random() < 0.5:
            logps[:, 0] = -0.05  # tokens that were all but certain
        mask = torch.tensor([[1, 1, 1, 1, 1], rng.choice([[1, 1, 1, 0, 0], [1] * 5])])
        change = torch.full((2, 5), rng.choice([0.0, 1e-4, -1e-4]))
        if rng.random() < 0.5:
            first = rng.choice([0, 1])
            change[:, first] = rng.choice([low, high]) * rng.choice([-1, 1])
            change[:, first + 1] = -change[:, first] * rng.choice([0, 1])  # one way alone, or ups and downs
        old = logps + change
        if padding:
            strange = rng.choice(
                [numbers(rng, 2, 5, low=0.5, high=2.0), torch.tensor(rng.choice([-torch.inf, torch.nan]))]
            )
            old = torch.where(mask == 1, old, old + strange)
        return call(logps, old, mask)

    return draw


FRESH, ONES = torch.tensor([[-1.0, -0.5, -2.0]]), torch.tensor([[1, 1, 0]])


check_ratio_is_one = Exercise(
    ratio_is_one,
    parts=(
        Part("fresh and stale, far apart", 1, _fresh_or_stale(0.3, 0.9, False), draws=30),
        Part(
            "fresh and stale, close together, with padding",
            2,
            _fresh_or_stale(0.02, 0.15, True),
            draws=30,
            always=(
                call(FRESH, FRESH + (1 - ONES), ONES),
                call(FRESH, FRESH + torch.tensor([[0.02, -0.02, 0.0]]), ONES),  # the mean ratio is 1.0002
            ),
        ),
    ),
    changes="""
        padding counts: far[mask] -> far
            What comes after the end was never sampled. Use the mask.
        padding is multiplied by 0: far[mask] -> (far * loss_mask)
            Padding may hold anything, and 0 times infinity, or NaN, is NaN. Select the tokens that count instead.
            or: (logs.exp() - 1).abs() -> logs.abs(); far[mask] -> (far * loss_mask)
        only the mean of the logarithms is checked: (logs.exp() - 1).abs() -> logs[mask].mean().abs(); far[mask] -> far
            Ups and downs cancel. *Every* token's ratio has to be 1.
        only the mean ratio is checked:
            (logs.exp() - 1).abs() -> (logs[mask].exp().mean() - 1).abs(); far[mask] -> far
            Ups and downs nearly cancel. *Every* ratio has to be 1.
        ratios below 1 are accepted: (logs.exp() - 1).abs() -> logs.exp() - 1
            How *far* is the ratio from 1, in either direction? Use `abs`.
        ratios above 1 are accepted: (logs.exp() - 1).abs() -> 1 - logs.exp()
            How *far* is the ratio from 1, in either direction? Use `abs`.
        exact equality is required: far[mask] < 1e-3 -> logs[mask] == 0
            Two computations differ in their last digits, so allow a difference of 0.001.
        the logarithms are divided: per_token_logps - old -> per_token_logps / old; logs.exp() - 1 -> logs - 1
            The ratio of the *probabilities* is `exp` of the difference of their logarithms.
        the ratio is multiplied by the mask before 1 is subtracted:
            logs.exp() - 1 -> logs.exp() * loss_mask - 1; far[mask] -> far
            In the padding this gives 0 - 1, which is far from 0.
        every ratio inside the clip range counts as 1: < 1e-3 -> < 0.2
            A ratio may move by 0.2 later. In the first update it has to be 1.
        only the first token is checked: far[mask] -> far[:, 0]
            Check all tokens that count.
        the difference of the logarithms is compared with 1: logs.exp() - 1 -> logs - 1
            The ratio is 1 if the logarithms are *equal*.
    """,
)


# ---- mend ----
MENDED = {
    "num_generations": 8,
    "max_completion_length": 96,
    "learning_rate": 2e-4,
    "reward": "accuracy_reward",
    "replaced": [],
}

Settings = dict[str, Any]


def broken_settings(settings: Settings) -> list[str]:
    """Return the names of the settings that are wrong."""
    ill = {
        "num_generations": settings["num_generations"] < 4,
        "max_completion_length": settings["max_completion_length"] < 48,
        "learning_rate": settings["learning_rate"] > 1e-3,
        "reward": settings["reward"] != "accuracy_reward",
        "replaced": bool(settings["replaced"]),
    }
    return [name for name, is_ill in ill.items() if is_ill]


def mend(settings: Settings) -> Settings:
    """Return the same settings, with the wrong ones replaced by the right ones."""
    ill = broken_settings(settings)
    return {**settings, **{name: MENDED[name] for name in ill}}


ILL = {
    "num_generations": (2, 3),
    "max_completion_length": (16, 20, 32),
    "learning_rate": (3e-3, 1e-2),
    "reward": ("boxed_reward", "generous_reward"),
    "replaced": (["compute_advantages"], ["score_rollout"], ["render_prompt"], ["batch_loss"]),
}


def _sound(rng: random.Random) -> Settings:
    return {
        "num_generations": rng.choice([4, 16]),
        "max_completion_length": rng.choice([48, 64, 128]),
        "learning_rate": rng.choice([5e-5, 1e-4, 1e-3]),
        "seed": rng.randrange(1, 99),
        "reward": "accuracy_reward",
        "replaced": [],
    }


def _ill_with(first: Sequence[str], second: Sequence[str]) -> Callable[[random.Random], Call]:
    """Two faults, one from each list of names."""

    def draw(rng: random.Random) -> Call:
        one = rng.choice(first)
        other = rng.choice([name for name in second if name != one])
        return call({**_sound(rng), **{name: rng.choice(ILL[name]) for name in (one, other)}})

    return draw


LIMITS = {"num_generations": 4, "max_completion_length": 48, "learning_rate": 1e-3}


def _at_the_limit(settings: Settings, *names: str) -> list[str]:
    """Those of these settings, or of all, that are as far as they may go."""
    return [name for name in names or LIMITS if settings[name] == LIMITS[name]]


check_mend = Exercise(
    mend,
    parts=(
        Part("two faulty numbers", 2, _ill_with(list(ILL)[:3], list(ILL)[:3]), draws=20),
        Part("a faulty number, and a faulty function", 2, _ill_with(list(ILL)[:3], list(ILL)[3:]), draws=20),
        Part("a healthy setup", 1, lambda rng: call(_sound(rng)), draws=20),
    ),
    changes="""
        only one fault is corrected: name in ill -> name in ill[:1]
            Go on after the first fault that you find.
        settings without a fault are changed too: {**settings, **MENDED}
            Settings within the limits stay as they are: 4 completions per group, for example, or 128 tokens.
        the seed is changed: {**mend(settings), "seed": 0}
            The runs must stay comparable, so everything without a fault stays as it is, the seed as well.
        values at the limit are changed too: name in ill -> name in ill + _at_the_limit(settings)
            Only values *below* 4, *below* 48 or *above* 1e-3 are wrong.
        4 completions per group are changed too: name in ill -> name in ill + _at_the_limit(settings, "num_generations")
            Only values *below* 4 are wrong.
        48 tokens are changed too: name in ill -> name in ill + _at_the_limit(settings, "max_completion_length")
            Only values *below* 48 are wrong.
        a learning rate of 1e-3 is changed too: name in ill -> name in ill + _at_the_limit(settings, "learning_rate")
            Only values *above* 1e-3 are wrong.
        only what was changed is returned: {name: MENDED[name] for name in broken_settings(settings)}
            Return all six settings, because a run needs them all.
        replaced stages are kept: {**mend(settings), "replaced": settings["replaced"]}
            A replaced stage is a fault, whatever the numbers are.
        the settings that were passed in are changed: settings.update(mend(settings)) or settings
            Return a new dict, because the record of the faulty run must stay as it was.
    """,
)
