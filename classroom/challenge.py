"""The challenge: the highest held-out accuracy within a fixed number of sampled tokens (docs/challenge.md).

The judge trains the model in its own process with the course's trainer. What a submission defines (rewards, advantages,
loss) runs in a sandbox (`classroom.challenger`) and gets numbers and texts only, so a submission never holds the
model, the count of tokens or a held-out problem.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from classroom.challenger import FILE
from classroom.pages import image, page
from classroom.results import file_names
from classroom.sandbox import Limits, ProtocolError, Sandbox, SandboxError, check_isolation
from classroom.values import decode, encode, plain
from grpo_edu import __version__
from grpo_edu.batch import compute_advantages, rows_with_gradient
from grpo_edu.config import GRPOConfig
from grpo_edu.evaluation import Estimate, evaluate, mean_estimate
from grpo_edu.figures.style import intervals, name_rows, panel_grid, percent, style_axes
from grpo_edu.losses import weighted_sum
from grpo_edu.models import Session
from grpo_edu.problems.puzzles import make_puzzles
from grpo_edu.problems.templates import LEVELS, Problem, make_split, problem_key
from grpo_edu.rollout import Rollout, Sampler
from grpo_edu.trainer import Stages, start_training, train

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from transformers import PreTrainedModel

BUDGETS = {"tiny": 10_000, "halfway": 25_000}  # sampled tokens per run; `tiny` learns faster
NOTE = "note.md"
_LONGEST_FILE = 20_000  # characters: too few for the weights of a model
_SHORTEST_NOTE = 20  # words
_LONGEST_COMPLETION = 96  # tokens, in training and in the evaluation
_MOST_TOKENS_OF_A_BATCH = 2**17
_MOST_COMPLETIONS = 2**12  # of a batch; each is kept with its prompt, which the tokens do not count
_MOST_ITERATIONS = 16
_KINDS_OF_SETTINGS = (bool, int, float, str, list, tuple, NoneType)
_PATIENCE = 60.0  # seconds by the clock for one answer of the submission
_MAX_TOTAL_WAIT = 300.0  # the same for all answers of a run
_JUDGES_OWN = ("seed", "memory_budget_gib", "rollout_quantization", "abort_grad_norm")


class SubmissionRejectedError(Exception):
    """A submission breaks a rule or fails; the message is for its author."""


class BudgetUsed(Exception):
    """A rollout went over the budget; nothing is learned from it."""


@dataclass(frozen=True)
class Rules:
    """The rules for every submission.

    budget: sampled tokens per run; None: those of `BUDGETS`. seeds: runs per submission and starting model. num_train,
    num_heldout: problems of a run. seconds: CPU time of one run, a guard against runs that never end, not part of the
    competition.
    """

    budget: int | None = None
    seeds: int = 5
    num_train: int = 600
    num_heldout: int = 300
    seconds: float = 600.0

    def __post_init__(self) -> None:
        for name in ("budget", "seeds"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    def budget_of(self, start: str) -> int:
        """Return the number of tokens that a run from this starting model may sample."""
        return BUDGETS[start] if self.budget is None else self.budget


def read_submission(folder: Path) -> tuple[str, str]:
    """Return the code and the note of a submission; raises Rejected for a folder with anything else."""
    texts = []
    if folder.is_symlink():  # to the submission of somebody else, perhaps
        raise SubmissionRejectedError("the folder is a link; hand in a folder of your own")
    others = sorted(path.name for path in folder.iterdir() if path.name not in (FILE, NOTE, "__pycache__"))
    if others:
        raise SubmissionRejectedError(
            f"the folder holds {plain(others[0])!r}; a submission is {FILE} and {NOTE} only, without data"
        )
    for name in (FILE, NOTE):
        path = folder / name
        if path.is_symlink() or not path.is_file():
            raise SubmissionRejectedError(f"{name} is missing, or not a plain file; a submission is {FILE} and {NOTE}")
        with path.open("rb") as file:
            content = file.read(_LONGEST_FILE + 1)
        if len(content) > _LONGEST_FILE:
            raise SubmissionRejectedError(
                f"{name} has more than {_LONGEST_FILE:,} bytes; a submission holds no data and no weights"
            )
        texts.append(content.decode("utf-8", "replace"))
    if len(texts[1].split()) < _SHORTEST_NOTE:
        raise SubmissionRejectedError(f"{NOTE} has fewer than {_SHORTEST_NOTE} words; say what you tried, and why")
    return texts[0], texts[1]


def draw_problems(start: str, seed: int, rules: Rules) -> tuple[list[Problem], list[Problem]]:
    """New training and held-out problems that have no `problem_key` in common.

    >>> train, heldout = draw_problems("halfway", 3, Rules(num_train=20, num_heldout=10))
    >>> len(train), len(heldout), {problem_key(one) for one in train} & {problem_key(one) for one in heldout}
    (20, 10, set())
    """
    if start == "halfway":
        heldout = make_puzzles(rules.num_heldout, seed)
        return make_puzzles(rules.num_train, seed + 1, frozenset(map(problem_key, heldout))), heldout
    splits = [make_split(level, rules.num_train // 3, rules.num_heldout // 3, seed) for level in LEVELS]
    return [one for train, _ in splits for one in train], [one for _, heldout in splits for one in heldout]


class SubmittedCode(Sandbox):
    """A submission's functions, in a process of their own."""

    program = "classroom.challenger"
    closed = ("models", "problems")
    waited = 0.0  # seconds that its answers took so far

    def ask(self, do: str, **arguments: Any) -> Any:
        """Return what a function of the submission returns; raises Rejected if it fails."""
        if self._process is None:
            self._start()
        self._sent, begun = 0, time.monotonic()
        try:
            self._send({"do": do, "arguments": encode(arguments)})
            return self._answer(do, begun + min(_PATIENCE, _MAX_TOTAL_WAIT - self.waited))
        except (ProtocolError, ValueError) as error:
            raise SubmissionRejectedError("its process sent something that is not an answer") from error
        except OSError as error:
            raise SubmissionRejectedError(f"its process ended or does not listen ({type(error).__name__})") from error
        finally:
            self.waited += time.monotonic() - begun

    def _answer(self, do: str, deadline: float) -> Any:
        while time.monotonic() < deadline:
            came = self._receive(1.0)
            if came is None:
                raise SubmissionRejectedError(f"its process ended; memory and CPU time are limited{self._last_words()}")
            for message in came:
                if "closed" in message:
                    raise SubmissionRejectedError(_why_closed(message))
                if "error" in message:
                    raise SubmissionRejectedError(f"its code fails: {plain(str(message['error']))}")
                if "value" in message:
                    return decode(message["value"])
        raise SubmissionRejectedError(
            f"{do} did not answer in time ({_PATIENCE:g} s, or {_MAX_TOTAL_WAIT:g} s for all answers of a run)"
        )

    def _last_words(self) -> str:
        self._drain()
        said = self._output.decode("utf-8", "replace").strip()[-300:]
        return f". It printed: {plain(said)}" if said else ""


def _why_closed(message: dict[str, Any]) -> str:
    path = plain(str(message.get("path")), 100)
    if message["closed"] == "models":
        return f"it touches the model outside training ({path}); only the judge samples from it and changes its weights"
    return f"it reads held-out problems, or looks for them ({path}); it may learn only from what reaches its rewards"


@dataclass
class CountingSampler(Sampler):
    """A sampler that counts the tokens it draws, and refuses to go over what is `left`."""

    left: int = 0
    tokens: int = 0

    def generate(
        self, prompts: Sequence[str], generator: torch.Generator | None, environments: Sequence[Any] | None = None
    ) -> Rollout:
        """As `Sampler.generate`; raises BudgetUsed when the budget is exceeded."""
        rollout = super().generate(prompts, generator, environments)
        count = int(rollout.completion_mask.sum())
        if self.tokens + count > self.left:
            raise BudgetUsed
        self.tokens += count
        return rollout


class _Loss(torch.autograd.Function):
    """The submission's loss of each token: values and gradient come from its process."""

    @staticmethod
    def forward(ctx: Any, logps: Tensor, code: SubmittedCode, others: tuple, settings: dict[str, Any]) -> Tensor:
        ctx.code, ctx.like = code, logps
        losses = code.ask("loss", per_token_logps=logps.detach(), others=others, settings=settings)
        return _checked("loss", losses, logps)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        gradient = _checked("the gradient of loss", ctx.code.ask("gradient", upstream=upstream[0]), ctx.like)
        return gradient, None, None, None


def _checked(name: str, value: Any, like: Tensor) -> Tensor:
    if not isinstance(value, Tensor) or value.shape != like.shape or not value.is_floating_point():
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else plain(type(value).__name__)
        raise SubmissionRejectedError(f"{name} must be a floating-point tensor of shape {tuple(like.shape)}, got {got}")
    return value.to(like.dtype)


def stages_of(code: SubmittedCode, functions: Sequence[str]) -> Stages:
    """Return the stages of a training step in which the submission's own functions take part."""

    def advantages(rewards: Tensor, config: GRPOConfig) -> Tensor:
        found = code.ask("advantages", rewards=rewards, num_generations=config.num_generations)
        return _checked("advantages", found, rewards)

    def loss(logps: Tensor, old: Tensor, scores: Tensor, mask: Tensor, *, weights: Tensor, **settings: Any) -> Tensor:
        return weighted_sum(_Loss.apply(logps, code, (old, scores, mask), settings), weights)

    own: dict[str, Any] = {"advantages": advantages, "loss": loss}
    chosen = {name: own[name] for name in functions}
    rows = (lambda batch, config: torch.arange(len(batch.rewards))) if chosen else rows_with_gradient
    return Stages(**{"advantages": compute_advantages, "rows": rows, **chosen})


def rewards_of(code: SubmittedCode, names: Sequence[str]) -> list[Callable]:
    """Return one reward function for each of the submission's, which asks its process."""

    def ask(index: int) -> Callable:
        def reward(**columns: Any) -> Any:
            return code.ask("reward", index=index, columns=columns)

        reward.__name__ = plain(str(names[index]), 60)
        return reward

    return [ask(index) for index in range(len(names))]


def phases_of(settings: Any, seed: int, budget: int) -> list[tuple[GRPOConfig, bool]]:
    """Return the checked settings of each phase, and whether the phase continues until the budget is used.

    Raises Rejected for settings that are unknown, the judge's own, or too large.
    """
    phases = [settings] if isinstance(settings, dict) else settings
    if not isinstance(phases, list) or not phases or not all(isinstance(one, dict) for one in phases):
        raise SubmissionRejectedError(
            "settings must return a dict of settings of GRPOConfig, or a list of such dicts, one per phase"
        )
    found = []
    for number, phase in enumerate(phases):
        is_open = "max_steps" not in phase
        unknown = [name for name in phase if name not in GRPOConfig.__dataclass_fields__ or name in _JUDGES_OWN]
        if unknown:
            raise SubmissionRejectedError(
                f"settings: {plain(str(unknown[0]))!r} is unknown, or set by the judge; leave it out"
            )
        for name, value in phase.items():
            if not isinstance(value, _KINDS_OF_SETTINGS):  # int16 tensors, for one, wrap around below the limits
                raise SubmissionRejectedError(
                    f"settings: {name} is a {plain(type(value).__name__, 40)}; write a plain number, text or list"
                )
        if is_open and (number + 1 < len(phases) or phase.get("lr_scheduler_type", "constant") in ("linear", "cosine")):
            raise SubmissionRejectedError(
                "settings: max_steps is needed in all phases but the last, and for a linear or cosine rate"
            )
        try:
            config = GRPOConfig(**{"max_steps": budget, **phase, "seed": seed + number})
        except (ValueError, TypeError) as error:
            raise SubmissionRejectedError(f"settings: {plain(str(error))}") from error
        sizes = {
            "max_completion_length": (config.max_completion_length, _LONGEST_COMPLETION),
            "prompts_per_step · num_generations": (config.batch_size, _MOST_COMPLETIONS),
            "prompts_per_step · num_generations · max_completion_length": (
                config.batch_size * config.max_completion_length,
                _MOST_TOKENS_OF_A_BATCH,
            ),
            "num_iterations": (config.num_iterations, _MOST_ITERATIONS),
        }
        for name, (size, most) in sizes.items():
            if size > most:
                raise SubmissionRejectedError(f"settings: {name} is {size:,}, above the limit of {most:,}")
        found.append((config, is_open))
    return found


@dataclass
class Entry:
    """The result of one submission from one starting model: an accuracy and a number of tokens for each seed."""

    name: str
    start: str
    accuracies: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    rejected: str = ""
    note: str = ""

    @property
    def estimate(self) -> Estimate | None:
        """The mean accuracy with its interval over the seeds; None for a single seed or a rejected submission."""
        if self.rejected or len(self.accuracies) < 2:
            return None
        mean = mean_estimate(self.accuracies)
        return replace(mean, low=max(0.0, mean.low), high=min(1.0, mean.high))


class Judge:
    """Trains and evaluates submissions from one starting model, on problems that are drawn once for each seed."""

    def __init__(self, start: str, rules: Rules, seed: int, *, isolated: bool, hidden: Sequence[Path] = ()) -> None:
        self.start, self.rules, self.isolated, self.hidden = start, rules, isolated, hidden
        if not hasattr(os, "fork"):
            raise ValueError("challenge: this system cannot run submissions; use Linux, macOS or WSL")
        self.session = Session(start)
        rng = random.Random(f"{start}-{seed}")
        self.seeds = [rng.getrandbits(40) for _ in range(rules.seeds)]
        self.problems = [draw_problems(start, one, rules) for one in self.seeds]

    def untrained(self) -> Entry:
        """Return the accuracy of the starting model itself."""
        model, _ = self.session.reset()
        return Entry("(without training)", self.start, [self._accuracy(model, row) for row in range(len(self.seeds))])

    def judge(self, name: str, folder: Path, tell: Callable[[str], None] = lambda line: None) -> Entry:
        """Train with every seed and evaluate; the entry of a rejected submission says why."""
        entry = Entry(name, self.start)
        try:
            source, note = read_submission(folder)
            entry.note = plain(note, len(note), lines=True)
            for row in range(len(self.seeds)):
                tokens, accuracy = self._one_run(source, row)
                entry.tokens.append(tokens)
                entry.accuracies.append(accuracy)
                tell(f"{name} from {self.start}, seed {row + 1}: accuracy {accuracy:.1%}, {tokens:,} tokens")
        except SandboxError:
            raise
        except Exception as error:  # whatever a submission causes, the others are judged all the same
            cause = error.__cause__ if isinstance(error.__cause__, SubmissionRejectedError) else error
            entry.rejected = plain(str(cause), 400) or type(cause).__name__
            tell(f"{name} from {self.start}: rejected: {entry.rejected}")
        return entry

    def _one_run(self, source: str, row: int) -> tuple[int, float]:
        """Train with one seed, end the submission's process, and evaluate: tokens and accuracy."""
        model, _ = self.session.reset()
        with SubmittedCode(Limits(), isolated=self.isolated, hidden=self.hidden) as code:
            loaded = _checked_load(code.ask("load", source=source, start=self.start))
            tokens = self._train(model, row, code, loaded)
        return tokens, self._accuracy(model, row)

    def _train(self, model: PreTrainedModel, row: int, code: SubmittedCode, loaded: dict[str, Any]) -> int:
        """Train the model in place as the submission says; returns how many sampled tokens it learned from."""
        problems, budget, tokenizer = self.problems[row][0], self.rules.budget_of(self.start), self.session.tokenizer
        used, begun, steps = 0, time.process_time(), 0
        stages, rewards = stages_of(code, loaded["functions"]), rewards_of(code, loaded["rewards"])
        for config, is_open in phases_of(loaded["settings"], self.seeds[row], budget):
            state = start_training(model, tokenizer, problems, config)
            sampler = CountingSampler(model, tokenizer, config, left=budget - used)
            state.sampler = sampler
            try:
                for _ in train(model, tokenizer, problems, rewards, config, state=state, stages=stages):
                    steps += 1
                    if time.process_time() - begun > self.rules.seconds:
                        most = f"{self.rules.seconds:g} s of CPU time"
                        raise SubmissionRejectedError(f"one run took more than {most}; take fewer, larger steps")
            except BudgetUsed as error:
                if not is_open or not steps:
                    remedy = "lower max_steps, or leave it out to train until the budget is used"
                    raise SubmissionRejectedError(
                        f"it exceeds the budget of {budget:,} sampled tokens in step {steps + 1}; "
                        f"{remedy if steps else 'sample fewer completions per step'}"
                    ) from error
            used += sampler.tokens
        return used

    def _accuracy(self, model: PreTrainedModel, row: int) -> float:
        """Return the sampled accuracy at temperature 1 on the held-out problems of a seed."""
        return evaluate(
            model,
            self.session.tokenizer,
            self.problems[row][1],
            max_completion_length=_LONGEST_COMPLETION,
            seed=self.seeds[row],
        ).accuracy


def _checked_load(loaded: Any) -> dict[str, Any]:
    """Return what the submission says about itself, if it has the form that its process should send."""
    kinds = {"rewards": list, "functions": list, "settings": dict | list}
    if not isinstance(loaded, dict) or not all(isinstance(loaded.get(name), kind) for name, kind in kinds.items()):
        raise SubmissionRejectedError(f"{FILE} must define settings(start), which returns a dict or a list of dicts")
    if not 1 <= len(loaded["rewards"]) <= 10 or set(map(str, loaded["functions"])) - {"advantages", "loss"}:
        raise SubmissionRejectedError(f"{FILE}: rewards must be a list of one to ten functions")
    return loaded


def judge_submissions(
    submissions: Path,
    output: Path,
    *,
    starts: Sequence[str] = tuple(BUDGETS),
    rules: Rules | None = None,
    seed: int | None = None,
    isolated: bool = True,
    command: str = "",
    machine: Mapping[str, Any] | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> list[Entry]:
    """Judge every submission of a folder and write ``leaderboard.json`` and ``leaderboard.html``.

    Args:
        submissions: folder with one folder per submission.
        output: a new or empty folder outside of it.
        starts: the starting models. rules: budget, seeds and numbers of problems.
        seed: seed of all problems and runs; None draws a secret one. isolated: run submissions under bubblewrap.
        command, machine: what was typed and on what it runs, for the record. tell: called with a line on each run.

    Raises:
        ValueError: a bad argument, or no isolation here. FileNotFoundError: there are no submissions.
        FileExistsError: `output` holds something. SandboxError: no process can be started.
    """
    rules, seed = rules or Rules(), secrets.randbits(40) if seed is None else seed
    folders = sorted(path for path in submissions.iterdir() if path.is_dir() and not path.name.startswith("."))
    names = file_names([(folder.name, "") for folder in folders])  # each once, and none is "(without training)"
    if rules.seeds < 2:
        raise ValueError(f"seeds must be at least 2 for an interval over seeds, got {rules.seeds}")
    if not folders:
        raise FileNotFoundError(f"submissions: {submissions} has no folders; each submission is a folder in it")
    if submissions.resolve() in (output.resolve(), *output.resolve().parents):
        raise ValueError(f"output: {output} lies within the submissions; choose a folder outside")
    check_isolation(isolated, tell)
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise FileExistsError(f"output: {output} is not empty; choose a new folder")
    output.mkdir(parents=True, exist_ok=True)
    record = {
        "command": command,
        "grpo_edu": __version__,
        "machine": machine,
        "seed": seed,
        "isolation": "bubblewrap" if isolated else "none",
        "rules": asdict(rules) | {"budget": {start: rules.budget_of(start) for start in starts}},
    }
    entries: list[Entry] = []
    try:
        for start in starts:
            judge = Judge(start, rules, seed, isolated=isolated, hidden=[submissions.absolute(), output.absolute()])
            entries.append(judge.untrained())
            for folder in folders:
                entries.append(judge.judge(names[folder.name, ""], folder, tell))
                _write(output, entries, record)
    except (KeyboardInterrupt, RuntimeError, OSError) as error:
        error.add_note(
            f"{output} has the results of {max(0, len(entries) - 1)} of {len(folders) * len(starts)} entries"
        )
        raise
    return entries


def rank(entry: Entry, entries: Sequence[Entry]) -> int:
    """Return one more than the number of entries from the same start that are better by their whole interval.

    >>> a, b, c = (Entry(name, "tiny", scores) for name, scores in (("a", [.8, .82]), ("b", [.7, .8]), ("c", [.1, .2])))
    >>> rank(a, [a, b]), rank(b, [a, b]), rank(c, [c])
    (1, 1, 1)
    """
    own = entry.estimate
    others = [one.estimate for one in entries if one.start == entry.start and one is not entry]
    return 1 + sum(other.low > own.high for other in others if other and own)


def plot_entries(entries: Sequence[Entry], start: str) -> Figure:
    """Draw the mean accuracy of each entry in its interval, the best on top."""
    figure, (axes,) = panel_grid(1, height=1.2 + 0.32 * len(entries))
    style_axes(
        axes, f"Accuracy after training from {start}", "", "held-out accuracy (%), with 95% intervals over the seeds"
    )
    estimates = [one.estimate for one in entries if one.estimate]
    shares = [percent(one.value, one.low, one.high) for one in estimates]
    intervals(axes, 0, shares, range(len(shares)))
    name_rows(axes, [one.name.replace("$", r"\$") for one in entries])  # matplotlib would read formulas
    axes.set_xlim(0, 100)
    return figure


def leaderboard_page(entries: Sequence[Entry], record: Mapping[str, Any]) -> str:
    """Return the page: per starting model a figure, a table with ranks, and the rejected submissions with reasons.

    entries: with at least two seeds each. record: what ``leaderboard.json`` holds besides the entries.
    """
    sections = []
    for start in dict.fromkeys(one.start for one in entries):
        own = [one for one in entries if one.start == start]
        ranked = sorted((one for one in own if one.estimate), key=lambda one: -sum(one.accuracies))
        figure = None
        if ranked:
            best = f"the highest is {ranked[0].name}, {ranked[0].estimate}"
            words = f"Mean accuracies with intervals of {len(ranked)} entries; {best}."
            figure = image(plot_entries(ranked, start), words)
        sections.append((start, ranked, figure, [one for one in own if one.rejected]))
    return page("leaderboard", sections=sections, record=record, rank=rank)


def _write(output: Path, entries: Sequence[Entry], record: dict[str, Any]) -> None:
    rows = [asdict(entry) | {"estimate": entry.estimate and asdict(entry.estimate)} for entry in entries]
    (output / "leaderboard.json").write_text(json.dumps({**record, "entries": rows}, indent=1), encoding="utf-8")
    (output / "leaderboard.html").write_text(leaderboard_page(entries, record), encoding="utf-8")
