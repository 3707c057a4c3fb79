"""Ask the model a question, see what GRPO sees of its answers, train it in place, and ask again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets

from grpo_edu.dashboards.base import Dashboard, button_row, folded, offer, progress_bar, say_html, slider
from grpo_edu.dashboards.kept import keep_asked, kept_asked, new_place, open_asked, small_enough
from grpo_edu.dashboards.worker import Stopped, Worker, import_early, in_queue, run_slot, words_of
from grpo_edu.figures.answers import (
    chances_html,
    different_answers,
    group_html,
    groups_html,
    percent_text,
    plain_chances_html,
)
from grpo_edu.problems.hub import read_run_config
from grpo_edu.problems.instructions import INSTRUCTIONS, SET_PREFIX, check_instruction
from grpo_edu.problems.templates import LEVELS, Problem, data_dir, prompt_options, scorer_of_level
from grpo_edu.prompts import extract_answer, normalize_answer, render_prompt
from grpo_edu.rewards import accuracy_reward
from grpo_edu.runs.loading import load_split, parse_data
from grpo_edu.runs.options import default_config

if TYPE_CHECKING:
    from torch import Tensor

    from grpo_edu.models import Session
    from grpo_edu.rollout import Rollout

_SMOLLM2 = "smollm2"  # its name for `load_policy`
# SmolLM2 solves none of the word problems, so it gets instructions, and is trained as in
# docs/studies.md#real-model
_REAL = {"loss_type": "dr_grpo", "scale_rewards": "none", "learning_rate": 2e-5}
_PARTS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")  # of a rollout
_EVERY = 5  # steps of training after which the run is kept
# What is shown until the model was asked: `python -m benchmarks.dashboards --parts recordings smollm2`
_RECORDED = {("tiny", LEVELS): "ask_the_model.json", (_SMOLLM2, (INSTRUCTIONS,)): "ask_smollm2.json"}
_FIRST_DRAW = 2  # the recorded answers were drawn with 0, so the first answers of this page are others
_OWN = "type your own question"
_TINY = "The model knows only short stories with numbers, lists to sort and coin flips."
_CLEAR = 0.05  # a change of a probability that is worth a sentence


class AskTheModel(Dashboard):
    """Ask a model, score its answers, train it in place, and ask it again: four steps, one button each.

    On top, the page shows how probable each different answer is, with a mark where it was before training; it moves
    while the model trains. Training uses the course's training problems, not the question itself.

    With a stored run chosen as the model, or adapters that come with the package for these problems, *Ask* lets the
    base model answer and *Ask again* the trained one. A training run is kept in `parent` every five steps and at its
    end, if its model has at most 300 MB, so a page that is loaded again can go on with it.

    Args:
        num_generations: G, answers to a question, from 2 to 16.
        steps: of one training run.
        parent: the folder in which the runs' folders are.
        model: what can be trained here, as for `load_policy`, for example "smollm2".
        data: the sets of problems for its questions and its training; if left out, instructions for "smollm2", and the
            levels of word problems for other models.

    >>> board = AskTheModel(num_generations=4)
    >>> board.problem().answer
    '81'
    >>> AskTheModel(model="smollm2").problem().level
    'instructions:begin'
    """

    def __init__(
        self,
        num_generations: int = 8,
        steps: int = 20,
        parent: str | Path = "runs",
        *,
        model: str | Path = "tiny",
        data: str | Sequence[str] | None = None,
    ) -> None:
        if data is None:
            data = INSTRUCTIONS if model == _SMOLLM2 else LEVELS
        self.base, self.data = model, parse_data(data)
        self.training: dict[str, Any] = dict(_REAL) if model == _SMOLLM2 else {"loss_type": "grpo"}
        self.parent = Path(parent)
        problems = load_split(self.data, "heldout", n=12)
        self._known = {problem.prompt: problem for problem in problems}
        short = [(f"{problem.level}: {shorten(problem.prompt, 48)}", problem.prompt) for problem in problems]
        runs = {folder.parent.name: str(folder.parent) for folder in sorted(self.parent.glob("*/model"))}
        kept = kept_asked(self.parent, str(model), self.data)
        self._kept = {place for _, place in kept}  # the labels of two that were kept in one minute may be equal
        adapters = [
            (f"{name}, trained before and shipped", name)
            for name, recipe in _shipped_adapters().items()
            if recipe["source"] == str(model) and set(recipe["data"]) <= set(self.data)
        ]
        self.model = widgets.Dropdown(
            options=[(f"{model}, which can be trained here", ""), *adapters, *kept, *runs.items()],
            description="Model",
            value="",
        )
        self.choose = widgets.Dropdown(options=[*short, (_OWN, "")], description="Question", value=problems[4].prompt)
        self.question = widgets.Textarea(value=problems[4].prompt, description="You can change it here", rows=2)
        self.answer = widgets.Text(value=problems[4].answer, description="Right answer")
        whole = widgets.IntSlider
        self.size = slider(whole, "G, answers to the question", num_generations, 2, 16, 1, "num_generations")
        self.steps = slider(whole, "training steps", steps, 5, 60, 5, "each with 8 problems and 8 answers to each")
        self._buttons, buttons = button_row(
            {
                "1 Ask": (lambda button: self._begin(self._ask), "sample G answers"),
                "2 Score": (lambda button: self._score_answers(), "reward and advantage of each answer"),
                "3 Train": (lambda button: self._begin(self._train), "train on other questions"),
                "4 Ask again": (lambda button: self._begin(self._ask_again), "ask the trained model the same question"),
                "Stop": (self.halt, "stop after this step"),
                "Start over": (self._reset, "forget what was learned"),
            }
        )
        self.ask, self.score, self.train, self.again, self.stop, self.reset = self._buttons
        self.progress, self.chances = widgets.HTML(), widgets.HTML()
        self.progress.add_class("grpo-edu-progress")
        more, settings = folded([self.model, self.size, self.steps])
        buttons.children = (*buttons.children, more)
        self._draws = _FIRST_DRAW  # each group has random numbers of its own
        self._session: Session | None = None
        self._trained: dict[str, Any] = {}
        self._forget()
        self.choose.observe(self._chosen, "value")
        self.question.observe(self._typed, "value")
        self.model.observe(lambda change: self._change_model(), "value")
        about = "Press the four buttons in their order."
        about += f" {_TINY}" if model == "tiny" else ""
        super().__init__("Ask the model", [self.choose, self.question, self.answer, buttons, settings], about)
        self.stage.children = (self.message, self.progress, self.chances, self.picture)
        self.add_class("grpo-edu-wide")
        self.add_class("grpo-edu-ask")
        if self._kept:  # not in the message, which the stored notebooks show
            self.progress.value = say_html(
                "“More settings” offers, under “Model”, a model that was trained here before."
            )
        self._offer()
        self._show_recorded()

    def problem(self) -> Problem:
        """Return the question with its right answer; raise ValueError if either is missing or cannot be parsed."""
        prompt, answer = self.question.value.strip(), self.answer.value.strip()
        if not prompt:
            raise ValueError("The question is empty. Choose one from the list, or type one.")
        level = next(iter(self._known.values())).level
        if scorer_of_level(level) is not None:  # what such a set asks for is in its answers
            found = Problem(prompt, answer, self._known[prompt].level if prompt in self._known else level, answer)
            _score(found, [""])
            return found
        if normalize_answer(answer) is None:
            raise ValueError(f"The right answer {answer!r} is not a number, a list of numbers or a word. Correct it.")
        return Problem(prompt, answer, "own", f"#### {answer}")

    def _forget(self) -> None:
        self.trained = 0  # steps
        self.before: list[dict[str, Any]] = []  # the first answers, of the model before training
        self.after: list[dict[str, Any]] = []  # the answers of the trained model
        self.scored = False  # whether the rewards are shown
        self.series: list[tuple[int, int]] = []  # (steps, right answers)
        self._first: list[Tensor] = []  # ids and masks of prompts and completions of the first answers
        self._last: list[Tensor] = []  # the same of the answers of the trained model
        self._asked: tuple[Problem, int] | None = None
        self._place = new_place(self.parent)

    def _begin(self, task: Callable[[Worker], None]) -> None:
        if self.busy:
            self.say("The model is busy. Press Stop, or wait until it has finished.", wrong=True)
            return
        try:
            self.problem()
            if task == self._ask_again and self._trainable and not self.trained:
                raise ValueError("The model is not trained yet, so it would answer as before. Press 3 Train first.")
            if task == self._train and not self._trainable:
                raise ValueError(
                    "This model is trained already. To train here, choose the first model of the list “Model”."
                )
        except ValueError as error:
            self.say(str(error), wrong=True)
            return
        offer(self._buttons, [self.stop], self.stop)
        self.work(task)

    def _offer(self) -> None:
        """Show which steps are possible while nothing is under way, and which of them is the next one."""
        asked, again = bool(self.before), bool(self.before and self.trained)
        possible = [self.ask, *[self.score] * asked, *[self.train] * self._trainable, *[self.again] * again]
        if not asked:
            step = self.ask
        elif not self.scored:
            step = self.score
        elif again and not self.after:
            step = self.again
        else:
            step = self.train if self._trainable else self.ask
        offer(self._buttons, [*possible, *[self.reset] * asked], step)

    @property
    def _trainable(self) -> bool:
        """True if the base model or a kept training run of it is chosen, not a stored run."""
        return not self.model.value or self.model.value in self._kept

    def _load(self) -> Session:
        from grpo_edu.models import Session, load_policy

        if self._session is None:
            self._tell("Loading the model", 0)
            if not self._trainable:
                chosen, stored = self.model.value, read_run_config(self.model.value)
                if stored is None:  # adapters that come with the package
                    stored = {"source": self.base, **_recipe(chosen)}
                self._session = Session(stored["source"])
                trained, self._session.tokenizer = load_policy(chosen)
                self._trained, self.trained = trained.state_dict(), stored["config"]["max_steps"]
            else:
                self._session = Session(self.base)
            if self.model.value:
                self._session.model.load_state_dict(self._trained)
        return self._session

    def _ask(self, worker: Worker) -> None:
        """Let the model answer as it was before training."""
        session, asked = self._load(), (self.problem(), self.size.value)
        self.before, self.after, self.series = [], [], []
        self._asked, self._first, self._last, self.scored = asked, [], [], False
        self._tell("The model answers", 0.5)
        with self._before_training(session):
            self._sample(session, 0)
        if self._trainable:
            self._look_again(session)
        self._show()

    def _score_answers(self) -> None:
        """Show the rewards and advantages of the answers."""
        if self.busy:
            self.say("The model is busy. Press Stop, or wait until it has finished.", wrong=True)
        elif not self.before:
            self.say("There are no answers to score yet. Press 1 Ask first.", wrong=True)
        else:
            self.scored = True
            self._show()
            self.say(self.words())
            self._offer()

    def _ask_again(self, worker: Worker) -> None:
        """Let the trained model answer the same question."""
        session = self._load()
        if not self.before or self._asked != (self.problem(), self.size.value):
            self._ask(worker)
        self.scored = True
        self._tell("The model answers", 0.5)
        self._sample(session, self.trained)
        self._look_again(session)
        self._show()

    @contextmanager
    def _before_training(self, session: Session) -> Iterator[None]:
        """Give the model its initial weights inside the block."""
        if not self.trained:
            yield
            return
        weights = {name: value.clone() for name, value in session.model.state_dict().items()}
        session.reset()
        try:
            yield
        finally:
            session.model.load_state_dict(weights)

    def _sample(self, session: Session, steps: int) -> None:
        """Sample G answers of the model after so many steps of training."""
        import torch

        from grpo_edu.rollout import generate

        assert self._asked is not None
        problem, size = self._asked
        prompt = render_prompt(session.tokenizer, problem.prompt, **prompt_options(problem.level))
        rollout = generate(
            session.model,
            session.tokenizer,
            [prompt],
            num_generations=size,
            max_completion_length=default_config(self.data).max_completion_length,
            generator=torch.Generator().manual_seed(self._draws),
        )
        self._draws += 1
        rows, parts = _rows(rollout, problem), [getattr(rollout, part) for part in _PARTS]
        self.series = [one for one in self.series if one[0] == 0] + [(steps, sum(row["reward"] == 1 for row in rows))]
        if not steps:
            self._first, self.before = parts, rows
        else:
            self._last, self.after = parts, rows
            with self._before_training(session):
                for row, chance in zip(rows, _probabilities(session, parts), strict=True):
                    row["start"] = chance

    def _look_again(self, session: Session) -> None:
        """Compute how probable all answers have become, if the model was trained."""
        if not self.trained:
            return
        for rows, parts in ((self.before, self._first), (self.after, self._last)):
            if parts:
                for row, chance in zip(rows, _probabilities(session, parts), strict=True):
                    row["then"] = chance

    def _train(self, worker: Worker) -> None:
        """Train on the course's problems, and follow how probable each answer to the question becomes."""
        from grpo_edu.trainer import train

        steps = self.steps.value
        sizes = {"max_steps": steps, "prompts_per_step": 8, "num_generations": 8, "seed": self.trained}
        config = default_config(self.data, self.base, **self.training | sizes)
        with run_slot(in_queue(worker, self.say)):
            if not self.before or self._asked != (self.problem(), self.size.value):
                self._ask(worker)
            session = self._load()
            self.scored = True
            self._show()
            kept = "" if small_enough(session.model) else "; not kept if Python ends, as the model has over 300 MB"
            began = time.perf_counter()
            problems = load_split(self.data, "train")
            for metrics in train(session.model, session.tokenizer, problems, accuracy_reward, config):
                self.trained += 1
                done = int(metrics["step"])
                left = (steps - done) * (time.perf_counter() - began) / done
                reward = f"mean reward {metrics['reward']:.2f}"
                line = f"Step {done} of {steps} on other questions: {reward}, {left:.0f} s left{kept}"
                self._tell(line, done / steps)
                self._look_again(session)
                self.chances.value = chances_html([*self.before, *self.after], scored=True)
                if done % _EVERY == 0:
                    self._keep()
                worker.goes_on()
            self._show()

    def _keep(self) -> None:
        """Keep the training run for a page that is loaded later."""
        assert self._session is not None and self._asked is not None
        if not small_enough(self._session.model):
            return
        (problem, size), steps = self._asked, self.trained
        names = ("before", "after", "series", "trained")
        content = {name: getattr(self, name) for name in names} | {
            "base": str(self.base),
            "data": list(self.data),
            "question": problem.prompt,
            "answer": problem.answer,
            "size": size,
            "draws": self._draws,
            "label": f"{self.base} after {steps} steps here",
            "first": self._first,
            "last": self._last,
            "weights": self._session.model.state_dict(),
        }
        try:
            keep_asked(self._place, content)
        except OSError as error:
            self.say(f"This training run cannot be kept for later: {words_of(error)}", wrong=True)

    def _open(self) -> None:
        """Go back to a training run that was kept."""
        self.progress.value = ""
        stored = open_asked(Path(self.model.value))
        self._first, self._last, self._trained = stored["first"], stored["last"], stored["weights"]
        self._place, self._draws = Path(self.model.value), stored["draws"]
        self.choose.value = stored["question"] if stored["question"] in self._known else ""
        self.question.value, self.answer.value, self.size.value = (
            stored[key] for key in ("question", "answer", "size")
        )
        self._asked = self.problem(), self.size.value
        self.before, self.after, self.trained, self.scored = stored["before"], stored["after"], stored["trained"], True
        self.series = [(steps, right) for steps, right in stored["series"]]
        self._offer()
        self._show()
        self.say(f"This training run was kept. {self.words()}")

    def _tell(self, line: str, part: float) -> None:
        """Show a bar and a line in place of the message, so that nothing jumps."""
        self.say("")
        self.progress.value = progress_bar("Progress of the model", part, line)

    def ended(self, error: BaseException | None) -> None:
        """Say what the answers show, or what went wrong."""
        self.progress.value = ""
        if error is None or isinstance(error, Stopped):
            self.say(self.words() if self.before else "Stopped. Press 1 Ask to let the model answer.")
            if self.trained and self._first and self._trainable:
                self._keep()
        else:
            self.say(words_of(error), wrong=True)
        self._offer()

    def words(self) -> str:
        """Return what the answers show, and what to press next."""
        size, right = len(self.before), self.series[0][1] if self.series else 0
        train = "Press 3 Train: the model learns from other questions." if self._trainable else "Press 4 Ask again."
        if not self.scored:
            again = self.trained and self._trainable
            bars = "is now, the lines how probable it was before training" if again else "is"
            return (
                f"The model answered {size} times. It draws each token at random, so its answers differ. The bars show "
                f"how probable each answer {bars}. Press 2 Score."
            )
        if not self.trained or not (self.after or self._trainable):
            tied = right in (0, size)
            equal = "All rewards are equal, so every advantage is 0: from this group the model would learn nothing."
            unequal = "Answers with a positive advantage would be made more likely, the others less likely."
            found = f"{right} of {size} answers {'is' if right == 1 else 'are'} right."
            return f"{found} {equal if tied else unequal} {train}"
        if not self.after:
            return (
                f"The model was trained for {self.trained} steps on other questions. {self._moved()} Press 4 Ask again."
            )
        now, more = self.series[-1][1], " Press 3 Train to go on." if self._trainable else ""
        return (
            f"After {self.trained} steps {now} of {size} answers {'is' if now == 1 else 'are'} right, and before "
            f"training it was {right}. {self._moved()}{more}"
        )

    def _moved(self) -> str:
        """Return in words which answer gained most, and, if it is wrong, why training made it more likely."""
        rows = [row for row in different_answers([*self.before, *self.after]) if row["before"] is not None]
        row = max(rows, key=lambda row: row["now"] - row["before"])
        name = shorten(row["text"], 60, placeholder=" …") or "(nothing)"
        gain = row["now"] - row["before"]
        said = f"“{name}” went from {percent_text(row['before'])} to {percent_text(row['now'])}."
        if row["reward"] == 1 or gain < _CLEAR:
            return said
        return (
            f"{said} This answer is wrong: training strengthened a way to answer that was right for the training "
            "questions, and is not right for this one."
        )

    def _show(self) -> None:
        """Show how probable each answer is, and the groups of answers."""
        groups = [(f"{len(self.before)} answers before training", self.before)]
        if self.after:
            groups.append((f"{len(self.after)} answers after {self.series[-1][0]} steps of training", self.after))
        self._draw(groups, self.scored)
        self.alt = self.words()

    def _draw(self, groups: Sequence[tuple[str, list[dict[str, Any]]]], scored: bool) -> None:
        answers = [row for _, rows in groups for row in rows]
        tables = [group_html(rows, title, scored=scored) for title, rows in groups]
        self.chances.value = chances_html(answers, scored=scored)
        self.picture.value = groups_html(tables)
        self._static = "".join([plain_chances_html(answers, scored=scored), *tables])

    def _clear(self) -> None:
        self.chances.value = self.picture.value = self._static = self.alt = ""

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        """Return the view; behind it, the libraries of the first answer are imported."""
        import_early("transformers.modeling_utils")
        return super()._repr_mimebundle_(**kwargs)

    def static_view(self) -> str:
        """Return the tables, which need no style sheet."""
        return self._static

    def _show_recorded(self) -> None:
        """Show what the model answered on the computer on which it was recorded, until it is asked here."""
        self._clear()
        file = _RECORDED.get((str(self.base), self.data))
        if file is None:
            self.say("Press 1 Ask to let the model answer.")
            return
        stored = json.loads((data_dir() / "curves" / file).read_text(encoding="utf-8"))
        first = stored["asked"][0] if "asked" in stored else stored
        rows = first["looks"][0]["rows"] if "looks" in first else first["before"]
        rows = [{key: value for key, value in row.items() if key != "then"} for row in rows]
        self._draw([(f"{len(rows)} answers, recorded before training", rows)], scored=False)
        self.alt = f"Recorded answers to the question “{first['question']}”"
        self.say(
            f"Recorded before training: the model answered this question {len(rows)} times, and the bars show how "
            "probable each answer is. Press 1 Ask to let it answer here."
        )

    def _reset(self, button: object = None) -> None:
        if self.busy:
            self.say("The model is busy. Press Stop first.", wrong=True)
            return
        if not self._trainable:
            self._session = None
        elif self._session is not None:
            self._session.reset()
        self._forget()
        self._draws = _FIRST_DRAW
        self._offer()
        self._clear()
        self.say("The model is as it was before training. Press 1 Ask.")

    def _change_model(self) -> None:
        self.halt()
        self._session = None
        self._forget()
        if self.model.value in self._kept:
            try:
                self._open()
            except ValueError as error:
                self.say(f"This run is not there any more: {words_of(error)}", wrong=True)
            return
        self._offer()
        self._clear()
        self.say(
            "Press 1 Ask: the base model answers first, and after 4 Ask again the trained one."
            if self.model.value
            else "Press 1 Ask."
        )

    def _chosen(self, change: dict) -> None:
        problem = self._known.get(change["new"])
        if problem:
            self.question.value, self.answer.value = problem.prompt, problem.answer
        elif self.question.value in self._known:
            self.question.value = self.answer.value = ""

    def _typed(self, change: dict) -> None:
        """Show in the list whether the question is one of its own."""
        self.choose.value = change["new"] if change["new"] in self._known else ""


def _shipped_adapters() -> dict[str, dict[str, Any]]:
    """Return the recipes of the adapters that come with the package, by name."""
    folders = sorted(file.parent for file in (data_dir() / "models").glob("*/adapter_config.json"))
    return {folder.name: _recipe(folder.name) for folder in folders}


def _recipe(name: str) -> dict[str, Any]:
    """Return how adapters that come with the package were made."""
    return json.loads((data_dir() / "models" / name / "recipe.json").read_text(encoding="utf-8"))


def _rows(rollout: Rollout, problem: Problem) -> list[dict[str, Any]]:
    """For each answer: its text, what is extracted, reward, advantage, and the probability with which it was drawn."""
    import torch

    from grpo_edu.advantages import group_advantages

    texts = rollout.completions
    rewards = torch.tensor(_score(problem, texts))
    advantages = group_advantages(rewards, len(texts)).tolist()
    chances = rollout.sampling_per_token_logps.double().sum(dim=1).exp().tolist()
    lengths = rollout.completion_mask.sum(dim=1).tolist()
    columns = zip(texts, rewards.tolist(), advantages, chances, lengths, strict=True)
    return [
        {
            "text": text,
            "answer": read_answer(problem, text),
            "reward": reward,
            "advantage": advantage,
            "chance": chance,
            "tokens": int(length),
        }
        for text, reward, advantage, chance, length in columns
    ]


def _score(problem: Problem, texts: Sequence[str]) -> list[float | None]:
    """Return the rewards of completions of one problem; raises ValueError if its answer cannot be compared with."""
    size = len(texts)
    columns = {"prompts": [problem.prompt] * size, "level": [problem.level] * size}
    return accuracy_reward(texts, [problem.answer] * size, **columns)


def read_answer(problem: Problem, text: str) -> str | None:
    """Return what is compared with the right answer; for an instruction, what is missing."""
    if not problem.level.startswith(SET_PREFIX):
        return extract_answer(text)
    check = check_instruction(text, problem.answer)
    missing = [kind.replace("_", " ") for kind, holds in check.obeyed.items() if not holds]
    missing += ["topic"] * (not check.on_topic) + ["sentence form"] * (not check.sentence_form)
    return f"missing: {', '.join(missing)}" if missing else "as asked"


def _probabilities(session: Session, parts: Sequence[Tensor]) -> list[float]:
    """Return how probable each answer is under the model as it is now; parts: ids and masks, as `_PARTS` names them."""
    import torch

    from grpo_edu.fast.packing import per_token_logps

    with torch.no_grad():
        logps = per_token_logps(session.model, *parts)
    assert isinstance(logps, torch.Tensor)
    return logps.double().sum(dim=1).exp().tolist()
