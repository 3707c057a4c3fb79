"""The word game: the reader plays it, and then language models play the same game, before and after training."""

from __future__ import annotations

import html
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets

from grpo_edu.dashboards.base import Dashboard, button_row, offer
from grpo_edu.dashboards.worker import Worker
from grpo_edu.figures.style import COLORS
from grpo_edu.problems.environments import WORDS, Step, WordGame, fitting_words, word_game_splits
from grpo_edu.problems.templates import Problem, prompt_options
from grpo_edu.prompts import render_prompt
from grpo_edu.web import read_web

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Turn = tuple[str, str]  # a guess and the signs of its letters, such as ("CAR", "++-")
_GAMES, _TOKENS, _GUESSES = 64, 40, 3  # games that a model plays with one secret word; tokens and guesses of a game
_LATE = 1.0  # seconds after the Enter key in which the rest of its word may still arrive
_PLAYERS = {"before training": "wordy", "after training": "wordy_trained"}
# The look of a letter and of an empty place, which needs no style sheet.
_TILE = "text-align:center;vertical-align:middle;font-weight:bold;white-space:nowrap;min-width:2.4em;padding:4px 2px;"
_SIGNS = {
    "+": f"background:{COLORS[2]};color:#000;border:3px solid #000",
    "?": f"background:{COLORS[4]};color:#000;border:3px dashed #000",
    "-": "border:2px solid rgba(128,128,128,.6)",
}
_EMPTY = "border:2px dotted rgba(128,128,128,.6)"
_LEFT = "text-align:left;vertical-align:middle"
_WORDS_OF = {"+": "is right", "?": "is elsewhere in the word", "-": "is not in the word"}


class PlayWords(Dashboard):
    """The reader guesses a word of three letters in three guesses, and then models guess the same word.

    The first guess is given with its feedback, as in the games that the models are trained on. The games are held out
    from training. A model plays each secret word 64 times, and the first of these games is shown.

    Args:
        models: the models that can play, each with a title: a name or folder for `load_policy`, or a loaded model.
            None: those that come with the package.
        tokenizer: tokenizer of the loaded models.
        first: the number of the first held-out game, from 0 to 299.

    >>> board = PlayWords(first=2)
    >>> board.problem.prompt, board.play("TEA"), board.play("HEN")
    ('ICE --?', '-+-', '+++')
    """

    def __init__(
        self,
        models: Mapping[str, str | Path | PreTrainedModel] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        first: int = 0,
    ) -> None:
        self._games = word_game_splits()["heldout"]
        if not 0 <= first < len(self._games):
            raise ValueError(f"first must be from 0 to {len(self._games) - 1}, got {first}")
        self._models: dict[str, Any] = dict(_shipped() if models is None else models)
        self._tokenizers = {title: tokenizer for title in self._models}
        missing = [title for title, model in self._models.items() if not _is_name(model) and tokenizer is None]
        if missing:
            raise ValueError(f"tokenizer is None, but {missing[0]!r} is a loaded model; pass the tokenizer as well")
        self._next, self._seed, self.won, self.games = first, 0, 0, 0
        self.guess = widgets.Combobox(
            options=WORDS, description="Your guess", placeholder="three letters", tooltip="a word of the list"
        )
        self.guess.on_msg(self._entered)
        self.guess.observe(self._typed, "value")
        self._entered_at = 0.0
        actions = {
            "Guess": (lambda button: self._guess(), "try this word; the Enter key does the same"),
            "Let the models play": (lambda button: self._watch(), f"each plays this word {_GAMES} times"),
            "New game": (lambda button: self.new_game(), "another secret word"),
        }
        if not self._models:
            del actions["Let the models play"]
        self._buttons, row = button_row(actions)
        words = f"<details><summary>The {len(WORDS)} legal words</summary>{' '.join(WORDS)}</details>"
        about = "Find the secret word of three letters. You have three guesses, and each letter gets a sign."
        super().__init__("Play the word game", [self.guess, row, widgets.HTML(words)], about)
        self.message.layout.min_height = "3em"  # so that nothing jumps
        self.new_game()

    def new_game(self) -> None:
        """Begin the next game."""
        if self.busy:
            self.say("The models are playing. Wait a moment.", wrong=True)
            return
        self.problem: Problem = self._games[self._next % len(self._games)]
        self._next += 1
        self._game = WordGame()
        self._game.reset(self.problem.answer)
        self.turns: list[Turn] = []
        self.over = False
        self.played: dict[str, list[list[Turn]]] = {}  # model → its games
        given = self._given()
        self._show(f"The first guess is given: {_spoken(given)} {self._left()}")

    def play(self, word: str) -> str:
        """Guess a word; returns the signs of its letters. A word that is not legal costs nothing, and is an error."""
        guess = word.strip().upper()
        if self.over:
            raise ValueError("This game is over. Press New game.")
        if guess not in WORDS:
            shown = shorten(guess, 20) or "An empty text"
            raise ValueError(f"{shown} is not one of the {len(WORDS)} words. Choose a word of the list.")
        signs, reward, self.over = self._game.step(guess)
        self.turns.append((guess, signs))
        if self.over:
            self.won, self.games = self.won + int(reward), self.games + 1
            end = "You won." if reward else f"The word was {self.problem.answer}."
            self._show(f"{_spoken(self.turns[-1])} {end} You have won {self.won} of {self.games} games.")
        else:
            self._show(f"{_spoken(self.turns[-1])} {self._left()}")
        return signs

    def watch(self) -> None:
        """Let each model play this game; what it guesses gives the word away, so the reader's game is over."""
        from grpo_edu.models import load_policy

        self.over = True
        self._seed += 1  # the same random numbers for all models, and others each time
        for title, model in self._models.items():
            if _is_name(model):
                self._models[title], self._tokenizers[title] = load_policy(model)
            self.played[title] = sampled_games(
                self._models[title], self._tokenizers[title], self.problem, _GAMES, seed=self._seed
            )

    def _given(self) -> Turn:
        guess, signs = self.problem.prompt.split()
        return guess, signs

    def _left(self) -> str:
        known = [self._given(), *self.turns]
        fitting, guesses = len(fitting_words(known)), _GUESSES - len(self.turns)
        one, left = fitting == 1, "1 guess" if guesses == 1 else f"{guesses} guesses"
        return f"{fitting} word{'' if one else 's'} fit{'s' if one else ''} all signs so far. You have {left} left."

    def _entered(self, widget: widgets.Widget, content: dict[str, Any], buffers: object) -> None:
        if content.get("event") == "submit":
            is_whole = len(self.guess.value.strip()) >= len(WORDS[0])
            self._entered_at = 0.0 if is_whole else time.monotonic()
            self._guess()

    def _typed(self, change: dict) -> None:
        """Guess what comes just after its Enter key: a page sends the last letters of a fast typist late."""
        if time.monotonic() - self._entered_at < _LATE and change["new"].strip().upper() in WORDS:
            self._guess()

    def _guess(self) -> None:
        try:
            self.play(self.guess.value)
        except ValueError as error:
            self.say(str(error), wrong=True)
        else:
            self._entered_at = 0.0
            self.guess.value = ""

    def _watch(self) -> None:
        if self.busy:
            self.say("The models are playing. Wait a moment.", wrong=True)
            return
        self.say("The models are playing …")
        self.work(self._play_models)

    def _play_models(self, worker: Worker) -> None:
        self.watch()
        wins = {title: sum(_is_won(game) for game in games) for title, games in self.played.items()}
        counts = ", ".join(f"{title} {count} of {_GAMES}" for title, count in wins.items())
        self._show(f"The word was {self.problem.answer}. Games won with this word: {counts}.")

    def _show(self, text: str) -> None:
        """Show all boards, and say what happened."""
        given = self._given()
        won = f"won {self.won} of {self.games} games" if self.games else "no game has ended yet"
        boards = [_board("You", won, given, self.turns)]
        for title, games in self.played.items():
            wins = sum(map(_is_won, games))
            boards.append(_board(title, f"won {wins} of {len(games)} games with this word", given, games[0]))
        key = "+ right, ? elsewhere in the word, − not in the word. A guess fits if all signs above allow it."
        self._static = f'<div class="grpo-edu-words">{"".join(boards)}<p>{key}</p></div>'
        self.picture.value = f"<style>{read_web('words.css')}</style>{self._static}"
        self.say(text)
        playing = self._buttons[:1] if not self.over else self._buttons[1:]
        offer(self._buttons, [*playing, *self._buttons[1:]], playing[-1] if self.played else playing[0])

    def static_view(self) -> str:
        """Return the boards, which can be read without the style sheet."""
        return self._static


class _Recorded(WordGame):
    """A game that keeps its turns."""

    def reset(self, answer: str, **row: Any) -> None:
        super().reset(answer, **row)
        self.turns: list[Turn] = []

    def step(self, text: str) -> tuple[str, float, bool]:
        """Guess a word.

        Args:
            text: The word, three letters.
        """
        found = super().step(text)
        self.turns.append((text.strip().upper(), Step(*found).observation))
        return found


def sampled_games(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, problem: Problem, count: int, *, seed: int
) -> list[list[Turn]]:
    """Return the turns of games that a model plays with one secret word, sampled at temperature 1."""
    import torch

    from grpo_edu.rollout import generate

    games = [_Recorded() for _ in range(count)]
    for game in games:
        game.reset(**problem.row())
    generate(
        model,
        tokenizer,
        [render_prompt(tokenizer, problem.prompt, **prompt_options(problem.level))],
        num_generations=count,
        max_completion_length=_TOKENS,
        generator=torch.Generator().manual_seed(seed),
        environments=games,
    )
    return [game.turns for game in games]


def _shipped() -> dict[str, str]:
    """Return the models of the package that know this game."""
    from grpo_edu.models import list_models

    return {title: name for title, name in _PLAYERS.items() if name in list_models()}


def _is_name(model: object) -> bool:
    return isinstance(model, str | Path)


def _is_won(game: Sequence[Turn]) -> bool:
    return bool(game) and game[-1][1] == "+++"


def _spoken(turn: Turn) -> str:
    """Return a turn in words, for the message and for screen readers.

    >>> _spoken(("CAR", "++-"))
    'CAR: C is right, A is right, R is not in the word.'
    """
    guess, signs = turn
    return f"{guess}: {', '.join(f'{letter} {_WORDS_OF[sign]}' for letter, sign in zip(guess, signs, strict=True))}."


def _board(title: str, said: str, given: Turn, turns: Sequence[Turn]) -> str:
    """Return a table: the given guess and the guesses of one player; for each whether it fits the signs before it."""
    rows = [_row("given", given, "")]
    for number in range(_GUESSES):
        if number >= len(turns):
            rows.append(_line(f"guess {number + 1}", [f'<td style="{_TILE}{_EMPTY}">&nbsp;</td>'] * 3, ""))
            continue
        fits = turns[number][0] in fitting_words([given, *turns[:number]])
        note = "✓ fits" if fits else "✗ does not fit"
        rows.append(_row(f"guess {number + 1}", turns[number], note))
    head = f'<caption style="caption-side:top;{_LEFT}"><b>{html.escape(title)}</b>: {html.escape(said)}</caption>'
    return f"<div><table>{head}<tbody>{''.join(rows)}</tbody></table></div>"


def _row(name: str, turn: Turn, note: str) -> str:
    guess, signs = turn
    if guess in WORDS:
        tiles = [
            f'<td style="{_TILE}{_SIGNS[sign]}">{letter} {sign.replace("-", "−")}</td>'
            for letter, sign in zip(guess, signs, strict=True)
        ]
    else:
        tiles, note = [f"<td colspan=3>{html.escape(shorten(guess, 20)) or '(nothing)'}</td>"], "✗ no legal word"
    return _line(name, tiles, note)


def _line(name: str, tiles: Sequence[str], note: str) -> str:
    head = f'<th scope="row" style="{_LEFT};font-weight:normal">{name}</th>'
    return f'<tr>{head}{"".join(tiles)}<td style="{_LEFT};min-width:6em">{note}</td></tr>'
