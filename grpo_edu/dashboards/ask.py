"""Ask the model a question, see what GRPO sees of its answers, train it in place, and ask again."""

from __future__ import annotations

import html
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets

from grpo_edu.dashboards.base import Dashboard, button_row, offer, progress_bar, say_html, slider
from grpo_edu.dashboards.kept import keep_asked, kept_asked, new_place, open_asked, small_enough
from grpo_edu.dashboards.worker import Stopped, Worker, in_queue, run_slot, words_of
from grpo_edu.problems.instructions import INSTRUCTIONS, SET_PREFIX, check_instruction
from grpo_edu.problems.templates import LEVELS, Problem, data_dir, prompt_options, scorer_of_level
from grpo_edu.prompts import extract_answer, normalize_answer, render_prompt
from grpo_edu.rewards import accuracy_reward
from grpo_edu.runs.folder import model_source, read_run_config
from grpo_edu.runs.loading import load_split, parse_data
from grpo_edu.runs.options import default_config
from grpo_edu.web import read_web

if TYPE_CHECKING:
    from torch import Tensor

    from grpo_edu.models import Session
    from grpo_edu.rollout import Rollout

_SMOLLM2 = "smollm2"  # its name for `load_policy`
# SmolLM2 solves none of the word problems, so it gets instructions, and is trained as in
# docs/studies.md#real-model
_REAL = {"loss_type": "dr_grpo", "scale_rewards": "none", "learning_rate": 2e-5}
_PARTS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")  # of a rollout
_EVERY = 5  # steps of training between two looks at the same question
# What is shown until the model has answered: `python -m benchmarks.dashboards --parts recordings smollm2`
_RECORDED = {("tiny", LEVELS): "ask_the_model.json", (_SMOLLM2, (INSTRUCTIONS,)): "ask_smollm2.json"}
_OWN = "type your own question"
_TINY = "tiny knows arithmetic word problems, sorting lists and coin flips; to anything else it gives such an answer."


class AskTheModel(Dashboard):
    """A question, G sampled answers with extracted answer, reward and advantage; the same before and after training.

    The answers that were sampled first are kept, and the page shows how probable each of them has become. Training uses
    the course's training problems, not the question itself.

    With a stored run chosen as the model, or adapters that come with the package for these problems, the base model and
    the trained one answer side by side. A training run is kept in `parent` every five steps and at its end, if its
    model has at most 300 MB, so a page that is loaded again can continue with it.

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
        from grpo_edu.fast.lora import adapter_base
        from grpo_edu.models import adapter_folder, list_models

        if data is None:
            data = INSTRUCTIONS if model == _SMOLLM2 else LEVELS
        self.base, self.data = model, parse_data(data)
        self.training: dict[str, Any] = dict(_REAL) if model == _SMOLLM2 else {"loss_type": "grpo"}
        self.parent = Path(parent)
        problems = load_split(self.data, "heldout", n=12)
        self._known = {problem.prompt: problem for problem in problems}
        short = [(f"{problem.level}: {shorten(problem.prompt, 48)}", problem.prompt) for problem in problems]
        runs = {folder.parent.name: str(folder.parent) for folder in sorted(self.parent.glob("*/model"))}
        self._kept = kept_asked(self.parent, str(model), self.data)
        adapters = [
            (f"{name}, trained before and shipped", name)
            for name in list_models()
            if (folder := adapter_folder(name)) is not None
            and adapter_base(folder) == str(model)
            and set(_recipe(name)["data"]) <= set(self.data)
        ]
        self.model = widgets.Dropdown(
            options=[(f"{model}, which can be trained here", ""), *adapters, *self._kept, *runs.items()],
            description="Model",
            value="",
        )
        self.choose = widgets.Dropdown(options=[*short, (_OWN, "")], description="Question", value=problems[4].prompt)
        self.question = widgets.Textarea(value=problems[4].prompt, description="You can change it here", rows=4)
        self.answer = widgets.Text(value=problems[4].answer, description="Right answer (for the reward)")
        whole = widgets.IntSlider
        self.size = slider(whole, "G, answers to the question", num_generations, 2, 16, 1, "num_generations")
        self.steps = slider(whole, "training steps", steps, 5, 60, 5, "each with 8 problems and 8 answers to each")
        self._buttons, buttons = button_row(
            {
                "Ask": (lambda button: self._begin(self._ask), "sample G answers"),
                "Train": (lambda button: self._begin(self._train), "train, and ask the same question again"),
                "Stop": (self.halt, "stop after this step"),
                "Start over": (self._reset, "forget what was learned"),
            }
        )
        self.ask, self.train, self.stop, self.reset = self._buttons
        self.progress = widgets.HTML()
        self._draws = 0  # groups that were sampled; each has random numbers of its own
        self._session: Session | None = None
        self._trained: dict[str, Any] = {}
        self._run_steps = 0
        self._forget()
        self.choose.observe(self._chosen, "value")
        self.model.observe(lambda change: self._change_model(), "value")
        about = "Ask a question, then train the model and see how its answers to the same question change."
        about += f" {_TINY}" if model == "tiny" else ""
        controls = [buttons, self.progress, self.model, self.choose, self.question, self.answer, self.size, self.steps]
        super().__init__("Ask the model", controls, about)
        self.progress.layout.min_height, self.message.layout.min_height = "3.4em", "3em"  # so that nothing jumps
        if self._kept:  # not in the message, which the stored notebooks show
            self.progress.value = say_html("A model that was trained here before can be chosen under “Model”.")
        self._offer()
        self._show_recorded()

    def problem(self) -> Problem:
        """Return the question with its right answer. Raises ValueError if either is missing or the answer
        is none.
        """
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
        self.before: list[dict[str, Any]] = []  # the first answers
        self.after: list[dict[str, Any]] = []  # the answers of the trained model
        self.series: list[tuple[int, int]] = []  # (steps, right answers)
        self.looks: list[dict[str, Any]] = []  # after how many steps, the answers, and the chances of the first ones
        self.rewards: list[float] = []  # mean reward of each step of training
        self._first: list[Tensor] = []  # ids and masks of prompts and completions of the first answers
        self._asked: tuple[Problem, int] | None = None
        self._place = new_place(self.parent)

    def _begin(self, task: Callable[[Worker], None]) -> None:
        if self.busy:
            self.say("The model is busy. Press Stop, or wait until it has finished.", wrong=True)
            return
        try:
            self.problem()
        except ValueError as error:
            self.say(str(error), wrong=True)
            return
        offer(self._buttons, [self.stop], self.stop)
        self.work(task)

    def _offer(self) -> None:
        """Enable what can be done while nothing is running: a first question, or, after its answers, a training run."""
        trainable = self._trainable
        first = self.train if self.before and trainable else self.ask
        offer(self._buttons, [self.ask, *[self.train] * trainable, *[self.reset] * bool(self.before)], first)

    @property
    def _trainable(self) -> bool:
        """True if the base model or a kept training run of it is chosen, not a stored run."""
        return not self.model.value or self.model.value in dict(self._kept).values()

    def _load(self) -> Session:
        from grpo_edu.models import Session, load_policy

        if self._session is None:
            self._tell("Loading the model", 0)
            if not self._trainable:
                chosen, stored = self.model.value, read_run_config(self.model.value)
                if stored is None:  # adapters that come with the package
                    stored = {"source": self.base, **_recipe(chosen)}
                self._session = Session(stored["source"])
                trained, self._session.tokenizer = load_policy(model_source(chosen))
                self._trained, self._run_steps = trained.state_dict(), stored["config"]["max_steps"]
            else:
                self._session = Session(model_source(self.base))
                if self.model.value:
                    self._session.model.load_state_dict(self._trained)
        return self._session

    def _ask(self, worker: Worker) -> None:
        """Answer the question, with the model as it is now."""
        session, asked = self._load(), (self.problem(), self.size.value)
        if not self._trainable:
            self._forget()
            self._asked = asked
            session.reset()
            self._tell("Sampling answers", 0.3)
            self._sample(session, 0)
            session.model.load_state_dict(self._trained)
            self._tell("Sampling answers", 0.6)
            self._sample(session, self._run_steps)
            self._show()
            return
        if self._asked != asked or not self.trained:
            self.before, self.after, self.series, self.looks = [], [], [], []
            self._asked, self._first = asked, []
            if self.trained:  # the answers of the base model come first, for comparison
                weights = {name: value.clone() for name, value in session.model.state_dict().items()}
                session.reset()
                self._sample(session, 0)
                session.model.load_state_dict(weights)
        self._tell("Sampling answers", 0.5)
        self._sample(session, self.trained)
        self._show()

    def _sample(self, session: Session, steps: int) -> None:
        """G answers of the model after `steps` steps of training, and how probable the first answers are now."""
        import torch

        from grpo_edu.rollout import generate

        assert self._asked is not None
        problem, size = self._asked
        prompt = render_prompt(session.tokenizer, problem.prompt, **prompt_options(problem.level))
        generator = torch.Generator().manual_seed(self._draws)
        self._draws += 1
        rollout = generate(
            session.model,
            session.tokenizer,
            [prompt],
            num_generations=size,
            max_completion_length=default_config(self.data).max_completion_length,
            generator=generator,
        )
        rows = _rows(rollout, problem)
        self.series.append((steps, sum(row["reward"] == 1 for row in rows)))
        chances = [row["chance"] for row in rows]
        if not self._first:
            self._first, self.before = [getattr(rollout, part) for part in _PARTS], rows
        else:
            self.after, chances = rows, _probabilities(session, self._first)
            for row, chance in zip(self.before, chances, strict=True):
                row["then"] = chance
        self.looks.append({"steps": steps, "rows": rows, "chances": chances})

    def _train(self, worker: Worker) -> None:
        """Train on the course's problems, and look at the question every few steps."""
        from grpo_edu.trainer import train

        if not self._trainable:
            raise ValueError("This run is trained already. Choose the first model of the list to train it here.")
        steps = self.steps.value
        sizes = {"max_steps": steps, "prompts_per_step": 8, "num_generations": 8, "seed": self.trained}
        config = default_config(self.data, self.base, **self.training | sizes)
        with run_slot(in_queue(worker, self.say)):
            if not self.before or self._asked != (self.problem(), self.size.value):
                self._ask(worker)
            session = self._load()
            said = "The model is being trained. Its answers to your question are sampled again every few steps."
            if not small_enough(session.model):
                said += " The run is not kept if Python ends, because the model has more than 300 MB."
            self.say(said)
            began = time.perf_counter()
            for metrics in train(
                session.model, session.tokenizer, load_split(self.data, "train"), accuracy_reward, config
            ):
                self.trained += 1
                self.rewards.append(metrics["reward"])
                done = int(metrics["step"])
                left = (steps - done) * (time.perf_counter() - began) / done
                reward = f"mean reward {metrics['reward']:.2f}"
                self._tell(f"Step {done} of {steps}: {reward}, {left:.0f} s left", done / steps)
                if done % _EVERY == 0:
                    self._sample(session, self.trained)
                    self._show()
                    self._keep()
                worker.goes_on()

    def _keep(self) -> None:
        """Keep the training run for a page that is loaded later."""
        assert self._session is not None and self._asked is not None
        if not small_enough(self._session.model):
            return
        (problem, size), steps = self._asked, self.trained
        names = ("before", "after", "series", "looks", "rewards", "trained")
        content = {name: getattr(self, name) for name in names} | {
            "base": str(self.base),
            "data": list(self.data),
            "question": problem.prompt,
            "answer": problem.answer,
            "size": size,
            "draws": self._draws,
            "label": f"{self.base} after {steps} steps here",
        }
        first = {f"first.{name}": part for name, part in zip(_PARTS, self._first, strict=True)}
        try:
            keep_asked(self._place, content, self._session.model.state_dict() | first)
        except OSError as error:
            self.say(f"This training run cannot be kept for later: {words_of(error)}", wrong=True)

    def _open(self) -> None:
        """Go back to a training run that was kept."""
        self.progress.value = ""
        stored, self._trained = open_asked(Path(self.model.value))
        self._first = [self._trained.pop(f"first.{name}") for name in _PARTS]
        self._place, self._draws = Path(self.model.value), stored["draws"]
        self.choose.value = stored["question"] if stored["question"] in self._known else ""
        self.question.value, self.answer.value, self.size.value = (
            stored[key] for key in ("question", "answer", "size")
        )
        self._asked = self.problem(), self.size.value
        self.before, self.after, self.looks = stored["before"], stored["after"], stored["looks"]
        self.rewards, self.trained = stored["rewards"], stored["trained"]
        self.series = [(steps, right) for steps, right in stored["series"]]
        self._offer()
        self._show()
        self.say(f"This model was trained for {self.trained} steps before. {self.words()} Press Train to continue.")

    def _tell(self, line: str, part: float) -> None:
        self.progress.value = progress_bar("Progress of the model", part, line)

    def ended(self, error: BaseException | None) -> None:
        """Say what the answers show, or what went wrong."""
        self.progress.value = ""
        if error is None or isinstance(error, Stopped):
            self.say(self.words() if self.before else "Stopped. Press Ask to let the model answer.")
            if self.after and self._trainable:
                self._keep()
        else:
            self.say(words_of(error), wrong=True)
        self._offer()

    def words(self) -> str:
        """Return what the answers show."""
        size, right = len(self.before), self.series[0][1] if self.series else 0
        if not self.after:
            tied = right in (0, size)
            equal = "All rewards are equal, so every advantage is 0 and this group teaches nothing."
            unequal = "Answers with a positive advantage would be made more likely, the others less likely."
            then = "Press Train: the model trains on other problems and answers this question again."
            return f"{right} of {size} answers are right. {equal if tied else unequal} {then}"
        steps, now = self.series[-1]
        best = max(self.before, key=lambda row: row["reward"])
        name, chance = _probability([*self.before, *self.after])
        change = f"{_percent(chance(best, 'chance'))} before and is {_percent(chance(best, 'then'))} now"
        example = f" The {name} of the first right answer was {change}." if best["reward"] == 1 else ""
        return (
            f"Before training {right} of {size} answers were right, after {steps} steps {now} of {size}. The "
            f"table “Before training” shows how probable each answer was, and how probable it is now.{example}"
        )

    def _show(self) -> None:
        """Show the tables of the answers, before and, if the model was trained, after."""
        self.picture.value = answers_html(self.before, self.after, self.series)
        self.alt = self.words()

    def _show_recorded(self) -> None:
        """Show what was recorded on another computer, until the model answers here."""
        file = _RECORDED.get((str(self.base), self.data))
        if file is None:
            self.say("Press Ask to let the model answer, then Train.")
            return
        stored = json.loads((data_dir() / "curves" / file).read_text(encoding="utf-8"))
        if "asked" in stored:
            stored |= stored["asked"][0] | recorded_tables(stored["asked"][0]["looks"])
        self.picture.value = answers_html(stored["before"], stored["after"], stored["series"])
        self.alt = f"Recorded answers to the question “{stored['question']}”"
        then = "Press Ask to let the model answer on this computer, then Train."
        self.say(f"These answers were recorded. {stored['words']} {then}")

    def _reset(self, button: object = None) -> None:
        if self.busy:
            self.say("The model is busy. Press Stop first.", wrong=True)
            return
        if self._session is not None:
            self._session.reset()
        self._forget()
        self._draws = 0
        self._offer()
        self.picture.value = self.alt = ""
        self.say("The model is as it was before training. Press Ask.")

    def _change_model(self) -> None:
        self.halt()
        self._session = None
        self._forget()
        if self.model.value in dict(self._kept).values():
            try:
                self._open()
            except OSError as error:
                self.say(f"This run is not there any more: {words_of(error)}", wrong=True)
            return
        self._offer()
        self.picture.value = self.alt = ""
        self.say(
            "Press Ask: the base model and the trained one answer." if self.model.value else "Press Ask, then Train."
        )

    def _chosen(self, change: dict) -> None:
        problem = self._known.get(change["new"])
        self.question.value = problem.prompt if problem else ""
        self.answer.value = problem.answer if problem else ""


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


def recorded_tables(looks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the first and the last answers of a recorded training run, and how many were right at each look."""
    first, last = looks[0], looks[-1]
    before = [{**row, "then": then} for row, then in zip(first["rows"], last["chances"], strict=True)]
    series = [(look["steps"], sum(row["reward"] == 1 for row in look["rows"])) for look in looks]
    return {"before": before, "after": last["rows"], "series": series}


def answers_html(before: Sequence[dict], after: Sequence[dict], series: Sequence[Sequence[int]]) -> str:
    """Return one table of answers, or two next to each other, and the count of right answers during training."""
    measure, style = _probability([*before, *after]), f"<style>{read_web('answers.css')}</style>"
    if not after:
        return f'{style}<div class="grpo-edu-answers">{_table(before, "Answers of the model", measure)}</div>'
    counts = ", ".join(f"{right} after {steps} steps" for steps, right in series[1:])
    found = f"<div>Right answers of {len(before)}: {series[0][1]} before training, {counts}.</div>"
    tables = (
        _table(before, "Before training", measure),
        _table(after, f"After {series[-1][0]} steps of training", measure),
    )
    return f'{style}<div class="grpo-edu-answers">{"".join(tables)}</div>{found}'


def _probability(rows: Sequence[dict[str, Any]]) -> tuple[str, Callable[[dict[str, Any], str], float]]:
    """Return name and function of the displayed probability: for long answers, the geometric mean over
    tokens.

    >>> name, value = _probability([{"chance": 1e-6, "tokens": 6}])
    >>> name, round(value({"chance": 1e-6, "tokens": 6}, "chance"), 3)
    ('probability per token', 0.1)
    """
    chances = sorted(row["chance"] for row in rows)
    if chances[len(chances) // 2] > 1e-4 or not all("tokens" in row for row in rows):
        return "probability", lambda row, key: row[key]
    return "probability per token", lambda row, key: row[key] ** (1 / row["tokens"])


def _table(rows: Sequence[dict[str, Any]], title: str, measure: tuple[str, Callable]) -> str:
    """Return the answers of a group; those that were scored again have their probability before and now."""
    (name, value), lines = measure, []
    for row in sorted(rows, key=lambda row: -row["reward"]):
        right = row["reward"] == 1
        chance, now = _percent(value(row, "chance")), value(row, "then" if "then" in row else "chance")
        between = "<br>" if "under" in chance + _percent(now) else " "  # words are too wide for one line of the column
        shown = f"{chance}{between}→ <b>{_percent(now)}</b>" if "then" in row else chance
        extracted = "none" if row["answer"] is None else html.escape(str(row["answer"]))
        facts = f"({extracted}) · reward {row['reward']:.0f} · advantage {row['advantage']:+.2f}"
        lines.append(
            f"<tr{' class=right' * right}><td>{html.escape(row['text'])}"
            f"<small>{'✓ right' if right else '✗ wrong'} {facts}</small></td>"
            f'<td>{shown}<i style="width:{100 * now:.0f}%"></i></td></tr>'
        )
    head = f'<th scope="col">{html.escape(title)}</th><th scope="col">{name}</th>'
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    return f'<div role="region" tabindex="0" aria-label="{html.escape(title)}">{table}</div>'


def _percent(share: float) -> str:
    """Return a probability in percent with two digits; the smallest ones as "under 0.01%".

    >>> _percent(0.1234), _percent(0.00002)
    ('12%', 'under 0.01%')
    """
    percent = 100 * share
    return "under 0.01%" if percent < 0.01 else f"{percent:.0f}%" if percent >= 10 else f"{percent:.2g}%"
