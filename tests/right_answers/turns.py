"""Right answers to the exercises of `grpo_edu.checks.turns`, written in other ways than the reference."""

from __future__ import annotations

import math

import torch


def number_by_attempt(text, secret, guesses_left):
    last = guesses_left <= 1
    if not text.strip() or set(text.strip()) - set("0123456789"):
        return "illegal", -0.2, last
    guess = int(text)
    if guess < 1 or guess > 99:
        return "illegal", -0.2, last
    if guess == secret:
        return "right", 1.0, True
    return ("lower" if guess > secret else "higher"), 0.0, last


def number_by_list(text, secret, guesses_left):
    known = {str(number): number for number in range(1, 100)}
    guess = known.get(text.strip())
    observation = "illegal"
    if guess is not None:
        observation = ["right", "higher", "lower"][(guess < secret) - (guess > secret)]
    reward = {"illegal": -0.2, "right": 1.0}.get(observation, 0.0)
    return observation, reward, guess == secret or not guesses_left > 1


def number_by_match(text, secret, guesses_left):
    done = guesses_left == 1
    match text.split():
        case [word] if word.isdecimal() and int(word) in range(1, 100):
            distance = secret - int(word)
            if distance == 0:
                return "right", 1, True
            return "higher" if distance > 0 else "lower", 0, done
    return "illegal", -0.2, done


def turns_by_loop(turn_rewards, num_generations):
    rows = turn_rewards.tolist()
    to_go = []
    for row in rows:
        played = [reward for reward in row if not math.isnan(reward)]
        to_go.append([sum(played[turn:]) for turn in range(len(played))])
    found = torch.zeros_like(turn_rewards)
    for number, mine in enumerate(to_go):
        first = number // num_generations * num_generations
        group = to_go[first : first + num_generations]
        for turn, value in enumerate(mine):
            others = [game[turn] for game in group if len(game) > turn]
            found[number, turn] = value - sum(others) / len(others)
    return found


def turns_by_mask(turn_rewards, num_generations):
    played = ~turn_rewards.isnan()
    rewards = torch.where(played, turn_rewards, 0.0)
    to_go = rewards.sum(dim=1, keepdim=True) - rewards.cumsum(dim=1) + rewards
    shape = (len(rewards) // num_generations, num_generations, -1)
    total = (to_go * played).reshape(shape).sum(dim=1, keepdim=True)
    count = played.reshape(shape).sum(dim=1, keepdim=True).clamp(min=1)
    return ((to_go.reshape(shape) - total / count) * played.reshape(shape)).reshape(rewards.shape)


def turns_by_columns(turn_rewards, num_generations):
    left = torch.zeros(len(turn_rewards))
    columns = []
    for column in reversed(turn_rewards.unbind(dim=1)):
        left = left + column.nan_to_num()
        value = torch.where(column.isnan(), column, left)
        mean = value.view(-1, num_generations).nanmean(dim=1).repeat_interleave(num_generations)
        columns.insert(0, (value - mean).nan_to_num())
    return torch.stack(columns, dim=1)


RIGHT_ANSWERS = {
    "number_step": (number_by_attempt, number_by_list, number_by_match),
    "turn_advantages": (turns_by_loop, turns_by_mask, turns_by_columns),
}
