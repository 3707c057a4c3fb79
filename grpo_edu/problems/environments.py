"""Environments: the other side of a conversation, which reads a turn of the policy and replies.

An environment is a class with two methods. `reset(**row)` begins a conversation with the columns of a problem, such as
`answer`; `step(text)` takes the text of the policy's turn and returns `(observation, reward, done)`. This is the form
of TRL's `environment_factory`, where `step` is a tool that the policy calls, so `GRPOTrainer(...,
environment_factory=WordGame)` takes the classes of this module unchanged (see
`grpo_edu.turns.use_trl_tool_template`). In a `MultiTurnEnv` of the library verifiers (its version 0), `reset` is
`setup_state`, the observation is what `env_response` returns, and `done` is a method with the decorator `@vf.stop`.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable
from typing import Any, NamedTuple

from grpo_edu.problems.equations import calculate
from grpo_edu.problems.templates import PROBLEM_SETS, Problem, ProblemSet, Scorer
from grpo_edu.prompts import completion_text

# Three-letter words, no letter twice in a word. Capital letters are one token each in the tokenizers of this course.
WORDS = tuple(
    "ANT ARM BAG BAT BED BOX BUS CAP CAR CAT COW CUP DAY DOG EAR FAN FOG FOX HAT HEN ICE MAP NET OAK PEN PIG RUN SEA "
    "SUN TEA".split()
)


class Step(NamedTuple):
    """The return value of an environment's turn; as a text it is the observation, which TRL shows to the policy."""

    observation: str
    reward: float
    done: bool

    def __str__(self) -> str:
        return self.observation


@functools.cache
def letter_feedback(guess: str, secret: str) -> str:
    """For each letter of a guess: `+` if it is right, `?` if the secret word has it elsewhere, `-` if it has it not.

    A letter that occurs once in the secret word explains only one letter of the guess, as in Wordle.

    >>> letter_feedback("CAR", "CAT"), letter_feedback("ART", "CAT"), letter_feedback("TOT", "CAT")
    ('++-', '?-+', '--+')
    """
    left = [letter for letter, right in zip(secret, guess, strict=True) if letter != right]
    signs = []
    for letter, right in zip(guess, secret, strict=True):
        if letter == right:
            signs.append("+")
        elif letter in left:
            left.remove(letter)
            signs.append("?")
        else:
            signs.append("-")
    return "".join(signs)


def fitting_words(known: Iterable[tuple[str, str]]) -> list[str]:
    """Return the words that would have given these feedbacks; known: guesses with feedback, illegal ones say nothing.

    >>> fitting_words([("CAR", "++-"), ("OX", "illegal")])
    ['CAP', 'CAT']
    """
    legal = [(guess, signs) for guess, signs in known if guess in WORDS]
    return [word for word in WORDS if all(letter_feedback(guess, word) == signs for guess, signs in legal)]


ILLEGAL_REWARD = -0.2  # of a turn that is not a legal word


class WordGame:
    """A word-guessing game in the manner of Wordle: three letters, three guesses, feedback for each letter.

    The right word earns 1 and ends the game. A text that is not a legal word earns `ILLEGAL_REWARD`, and costs a guess.

    max_turns: the number of guesses.

    >>> game = WordGame()
    >>> game.reset(answer="CAT")
    >>> game.step("CAR"), game.step("XQZ").observation, game.step("cat")
    (Step(observation='++-', reward=0.0, done=False), 'illegal', Step(observation='+++', reward=1.0, done=True))
    >>> game.solved, game.get_reward()
    (True, 0.8)
    """

    def __init__(self, *, max_turns: int = 3) -> None:
        self._max_turns = max_turns
        self._secret, self._rewards, self.solved = "", [0.0], False

    def reset(self, answer: str, **row: Any) -> None:
        """Begin a game with the secret word `answer`; the prompt says what the policy must know.

        Raises ValueError if it is not a legal word.
        """
        if answer not in WORDS:
            raise ValueError(f"answer must be one of the {len(WORDS)} legal words, such as 'CAT', got {answer!r}")
        self._secret, self._rewards, self.solved = answer, [], False

    def step(self, text: str) -> tuple[str, float, bool]:
        """Guess a word.

        Args:
            text: The word, three letters.
        """
        if self.solved or len(self._rewards) >= self._max_turns:
            return Step("over", 0.0, True)
        guess = text.strip().upper()
        self.solved = guess == self._secret
        legal = guess in WORDS
        self._rewards.append(float(self.solved) if legal else ILLEGAL_REWARD)
        observation = letter_feedback(guess, self._secret) if legal else "illegal"
        return Step(observation, self._rewards[-1], self.solved or len(self._rewards) == self._max_turns)

    def get_reward(self) -> float:
        """Return the sum of the rewards of all turns."""
        return sum(self._rewards)


LEVEL = "words"


def word_game_problem(secret: str, opening: str) -> Problem:
    """Return a game whose first guess is given with its feedback, so that even a greedy policy plays many games.

    >>> word_game_problem("CAT", "CAR").prompt
    'CAR ++-'
    """
    return Problem(f"{opening} {letter_feedback(opening, secret)}", secret, LEVEL, secret)


def word_game_splits(num_heldout: int = 300) -> dict[str, list[Problem]]:
    """Return all pairs of a secret word and another opening, shuffled within the splits "train" and "heldout".

    Every word is the secret of 10 held-out games with other openings than in training (with the default number).
    """
    rng = random.Random("words")
    games: dict[str, list[Problem]] = {"train": [], "heldout": []}
    for secret in WORDS:
        openings = rng.sample([word for word in WORDS if word != secret], len(WORDS) - 1)
        held = num_heldout // len(WORDS)
        games["heldout"] += [word_game_problem(secret, opening) for opening in openings[:held]]
        games["train"] += [word_game_problem(secret, opening) for opening in openings[held:]]
    for problems in games.values():
        rng.shuffle(problems)
    return games


def last_guess(completion: str | list[dict]) -> str | None:
    """Return the last word of a conversation, which is the policy's last guess; None if it wrote nothing.

    >>> last_guess("CAR user ++- assistant CAT")
    'CAT'
    """
    words = completion_text(completion).split()
    return words[-1] if words else None


def _solved(completion: str | list[dict], prompt: str | list[dict], level: str, answer: str) -> float:
    return float(last_guess(completion) == answer)


PROBLEM_SETS[LEVEL] = ProblemSet(
    "a secret word, guessed in several turns",
    scorer=Scorer(last_guess, _solved, system_prompt=False),
    is_name_of_data=False,
)


class Calculator:
    """A calculator in the middle of a message: the policy writes `[190+55]` and it appends `=245.`.

    Call and reply look like the annotations of GSM8K (Cobbe et al. 2021, arXiv 2110.14168). The text is parsed by a
    strict grammar and never run as code. The answer at the end of the message is what a reward function scores.

    >>> Calculator().step("245. [190+55]").observation, Calculator().step("[245+]").observation
    ('=245.', '=?.')
    """

    turn_end = "]"

    def reset(self, **row: Any) -> None:
        """Nothing to begin: a reply depends on the call alone."""

    def step(self, text: str) -> tuple[str, float, bool]:
        """Compute an expression with numbers and + - * /.

        Args:
            text: The expression, such as 190+55.
        """
        return Step(f"={calculate(text.removesuffix(']').rpartition('[')[2]) or '?'}.", 0.0, False)
