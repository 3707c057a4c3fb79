"""Exercises on conversations of several turns: the step of an environment, and advantages by turn."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from grpo_edu.checks.core import Call, Exercise, Part, call

# ---- number_step ----


def number_step(text: str, secret: int, guesses_left: int) -> tuple[str, float, bool]:
    """Return the reply to a guess of a number from 1 to 99: observation, reward, and whether the game is over."""
    guess = text.strip()
    legal = guess.isdecimal() and 1 <= int(guess) <= 99
    if not legal:
        observation, reward = "illegal", -0.2
    elif int(guess) == secret:
        observation, reward = "right", 1.0
    else:
        observation, reward = ("higher" if secret > int(guess) else "lower"), 0.0
    return observation, reward, observation == "right" or guesses_left == 1


def _is_int(text: str) -> bool:
    """Return True if Python's `int` reads a text."""
    try:
        int(text)
    except ValueError:
        return False
    return True


def _a_wrong_number(low: bool) -> Callable[[random.Random], Call]:
    """Return a function that draws a guess below the secret number, or above it, at times in white space."""

    def draw(rng: random.Random) -> Call:
        smaller, larger = sorted(rng.sample(range(1, 100), 2))
        guess, secret = (smaller, larger) if low else (larger, smaller)
        return call(rng.choice(["{}", " {}", "{}\n"]).format(guess), secret, rng.randrange(2, 6))

    return draw


def _the_right_number(rng: random.Random) -> Call:
    secret = rng.randrange(1, 100)
    return call(rng.choice(["{}", "{} "]).format(secret), secret, rng.randrange(1, 6))


# What `int`, `float`, `isdigit` or a search for digits would accept is among them.
_ILLEGAL = ("0", "100", "-7", "", "seven", "4 2", "3.5", "+5", "1_0", "²", "7.0", "1e1", "4,2", "it is 42")


def _no_number(rng: random.Random) -> Call:
    return call(rng.choice(_ILLEGAL), rng.randrange(1, 100), rng.randrange(2, 6))


def _the_last_guess(rng: random.Random) -> Call:
    secret = rng.randrange(2, 99)
    return call(rng.choice([str(secret - 1), str(secret + 1), "no"]), secret, 1)


check_number_step = Exercise(
    number_step,
    parts=(
        Part(
            "a guess that is too low",
            1,
            _a_wrong_number(low=True),
            always=(call("7", 9, 3), call("\t7\n", 60, 2), call("1", 99, 9)),
        ),
        Part("a guess that is too high", 1, _a_wrong_number(low=False), always=(call("60", 9, 2), call("99", 1, 4))),
        Part(
            "the right number",
            1,
            _the_right_number,
            always=(call("8", 8, 3), call("8 ", 8, 1), call("1", 1, 2), call("99", 99, 2)),
        ),
        Part(
            "a text that is not a legal number",
            1,
            _no_number,
            draws=1,
            always=tuple(call(text, 10, 3) for text in _ILLEGAL),
        ),
        Part("the last guess", 1, _the_last_guess, always=(call("no", 50, 1), call("49", 50, 1))),
    ),
    changes="""
        "higher" and "lower" are swapped: secret > int(guess) -> secret < int(guess)
            The observation says where the secret number is: "higher" if it is above the guess.
        white space makes a number illegal: guess = text.strip() -> guess = text
            A model often writes a space or a newline around a word. Remove white space at both ends first.
        the range is not checked: guess.isdecimal() and 1 <= int(guess) <= 99 -> guess.lstrip("-").isdecimal()
            0 and 100 are numbers, but they are not between 1 and 99, so they are illegal.
            or: guess.isdecimal() and 1 <= int(guess) <= 99 -> guess.isdecimal()
        the text is read by `int`, which accepts signs and underscores:
            guess.isdecimal() and 1 <= int(guess) <= 99 -> _is_int(guess) and 1 <= int(guess) <= 99
            "+5" and "1_0" are not written in digits only, but `int` reads them. Which method of a text looks at every
            character?
        `isdigit` accepts what `int` cannot read: guess.isdecimal() and -> guess.isdigit() and
            "²" is a digit for `isdigit`, but `int("²")` raises an error. Another method accepts the digits 0 to 9 only.
        an illegal text is not punished: "illegal", -0.2 -> "illegal", 0.0
            An illegal text earns −0.2. If it earned 0, it would be as good as a wrong guess that is legal.
        an illegal text ends the game: observation == "right" or -> observation in ("right", "illegal") or
            It costs a guess, and the game continues if guesses are left.
        an illegal text does not cost a guess:
            or guesses_left == 1 -> or (guesses_left == 1 and observation != "illegal")
            Every turn costs a guess. A game whose illegal turns are free may never end.
        the game never runs out of guesses: observation == "right" or guesses_left == 1 -> observation == "right"
            `guesses_left` counts this guess, too: with 1 left, this is the last one, and the game is over after it.
            or: guesses_left == 1 -> guesses_left == 0
        the game ends one guess too early: guesses_left == 1 -> guesses_left <= 2
            `guesses_left` counts this guess, too: with 2 left, one more may follow.
        a right guess does not end the game: observation == "right" or guesses_left == 1 -> guesses_left == 1
            The game is over as soon as the number is found.
        a right guess earns nothing: "right", 1.0 -> "right", 0.0
            The right number earns 1.
        every legal guess earns something: "lower"), 0.0 -> "lower"), 0.1
            A wrong number earns 0. If it were paid, a model could earn more by guessing wrong for longer.
        the reward is returned before the observation: return observation, reward, -> return reward, observation,
            The order is observation, reward, done.
    """,
)


# ---- turn_advantages ----


def turn_advantages(turn_rewards: Tensor, num_generations: int) -> Tensor:
    """Return what each turn and the later ones earned, minus the mean over the group's games that had this turn."""
    to_go = turn_rewards.nan_to_num(0.0).flip(1).cumsum(dim=1).flip(1)
    played = to_go.masked_fill(turn_rewards.isnan(), torch.nan)
    groups = played.view(-1, num_generations, turn_rewards.shape[1])
    return (groups - groups.nanmean(dim=1, keepdim=True)).nan_to_num(0.0).view(turn_rewards.shape)


def _with_games_that_are_over(turn_rewards: Tensor, num_generations: int) -> Tensor:
    """Games that are over count as 0 in the mean, and have no advantage."""
    found = turn_advantages(turn_rewards.nan_to_num(0.0), num_generations)
    return found.masked_fill(turn_rewards.isnan(), 0.0)


def _some_games(rng: random.Random, groups: int, lengths: list[int]) -> Call:
    """Draw groups of games with these numbers of turns; in every group the games come in an order of its own."""
    rows = []
    for _ in range(groups):
        for length in rng.sample(lengths, len(lengths)):
            rewards = [rng.choice([-0.2, 0.0, 0.25, 0.5, 1.0]) for _ in range(length)]
            rows.append(rewards + [float("nan")] * (max(lengths) - length))
    return call(torch.tensor(rows), len(lengths))


check_turn_advantages = Exercise(
    turn_advantages,
    parts=(
        Part("games with equally many turns", 2, lambda rng: _some_games(rng, 2, [3, 3, 3])),
        Part(
            "games that end at different turns",
            2,
            lambda rng: _some_games(rng, 2, [1, 2, 2, 3]),
            always=(call(torch.tensor([[0, 1], [1, torch.nan], [0, 0]]), 3),),
        ),
        Part(
            "one game longer than the others",
            1,
            lambda rng: _some_games(rng, 2, [1, 1, 3]),
            always=(
                call(torch.tensor([[1, torch.nan], [0, torch.nan], [1, 0], [0, 1]]), 2),
            ),  # a turn that no game had
        ),
    ),
    changes="""
        the rewards before the turn are counted: .flip(1).cumsum(dim=1).flip(1) -> .cumsum(dim=1)
            A turn cannot change what was earned before it. Add the rewards of this turn and the later ones.
        only the turn's own reward is counted: .flip(1).cumsum(dim=1).flip(1) -> .clone()
            A good guess often pays later. Add the rewards of this turn and of all later turns.
        every turn gets the reward of the whole game:
            .flip(1).cumsum(dim=1).flip(1) -> .sum(dim=1, keepdim=True).expand(turn_rewards.shape)
            That is credit by trajectory: turn 2 would be blamed for an illegal word in turn 1.
        the turn's own reward is left out:
            .cumsum(dim=1).flip(1) -> .cumsum(dim=1).flip(1) - turn_rewards.nan_to_num(0.0)
            The sum begins with the turn itself.
        games that are over count as 0 in the mean: masked_fill(turn_rewards.isnan(), torch.nan) -> clone()
            The mean of a turn is over the games that had this turn. A game that is over is not one of them.
            or: _with_games_that_are_over(turn_rewards, num_generations)
        a turn that was not played gets NaN: keepdim=True)).nan_to_num(0.0) -> keepdim=True))
            Its advantage is 0. One NaN in the advantages would make the whole loss NaN.
        the mean is over the whole batch: nanmean(dim=1, keepdim=True) -> nanmean(dim=(0, 1), keepdim=True)
            Compare a game only with the games of its own group: they have the same secret word.
        the mean is over all turns: nanmean(dim=1, keepdim=True) -> nanmean(dim=(1, 2), keepdim=True)
            Compare a turn with the same turn of the other games: a later turn has less left to earn.
        the groups are mixed: view(-1, num_generations, -> view(num_generations, -1,; nanmean(dim=1 -> nanmean(dim=0
            A group's rows are adjacent: the first `num_generations` rows are the first group.
        the mean is not subtracted: (groups - groups.nanmean(dim=1, keepdim=True)) -> groups
            An advantage is a comparison with the group. Subtract the group's mean.
        the sign is wrong: -turn_advantages(turn_rewards, num_generations)
            A turn that led to more than the mean has a positive advantage.
    """,
)
