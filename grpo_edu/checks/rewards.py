"""Exercises of notebook 02, second part: combining rewards, gates, exploits."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from grpo_edu import rewards
from grpo_edu.checks.core import Call, Exercise, Mistake, Part, call
from grpo_edu.checks.reading import accuracy_reward

# ---- combine_rewards ----


def combine_rewards(rewards_per_func: Tensor, weights: Sequence[float]) -> Tensor:
    """The package's."""
    return rewards.combine_rewards(rewards_per_func, weights)


def _some_table(rng: random.Random, missing: int) -> Call:
    table = torch.tensor([[rng.randrange(0, 5) / 4 for _ in range(3)] for _ in range(4)])
    for place in rng.sample(range(9), missing):
        table[place // 3, place % 3] = math.nan
    return call(table, rng.choice([[1.0, 0.5, 0.25], [2.0, 1.0, 0.5]]))


def _nothing_applies(rng: random.Random) -> Call:
    table = _some_table(rng, 1).args[0]
    table[rng.randrange(4)] = math.nan
    return call(table, [1.0, 0.5, 0.25])


def _combine_by_loop(rewards_per_func, weights):
    out = []
    for row in rewards_per_func.tolist():
        known = [weight * value for weight, value in zip(weights, row, strict=True) if not math.isnan(value)]
        out.append(sum(known) if known else math.nan)
    return torch.tensor(out)


def _combine_by_where(rewards_per_func, weights):
    applies = ~rewards_per_func.isnan()
    total = torch.where(applies, rewards_per_func, 0.0) @ torch.tensor(weights)
    return torch.where(applies.any(dim=1), total, math.nan)


def _combine_by_nan_to_num(rewards_per_func, weights):
    total = (rewards_per_func.nan_to_num(0.0) * torch.tensor(weights)).sum(dim=1)
    total[rewards_per_func.isnan().sum(dim=1) == rewards_per_func.shape[1]] = math.nan
    return total


check_combine_rewards = Exercise(
    "combine_rewards",
    combine_rewards,
    parts=(
        Part("all functions apply", 1, lambda rng: _some_table(rng, 0)),
        Part("some do not apply", 2, lambda rng: _some_table(rng, 3)),
        Part("none applies", 1, _nothing_applies),
    ),
    mistakes=(
        Mistake("one NaN makes the whole reward NaN", "Leave out what does not apply.",
                lambda table, weights: (table * torch.tensor(weights)).sum(dim=1)),
        Mistake("a row in which nothing applies looks like an earned 0", "A sum over nothing is no reward: keep NaN.",
                lambda table, weights: (table * torch.tensor(weights)).nansum(dim=1)),
        Mistake("the weights are forgotten", "What is the second argument for?",
                lambda table, weights: combine_rewards(table, [1.0] * len(weights))),
        Mistake("it is a mean, not a sum", "TRL adds; a function that does not apply adds nothing.",
                lambda table, weights: (table * torch.tensor(weights)).nanmean(dim=1)),
        Mistake("it is divided by the weights", "A weighted sum, not a weighted mean.",
                lambda table, weights: combine_rewards(table, weights) / sum(weights),
                also=(lambda table, weights: combine_rewards(table, weights)
                      / (~table.isnan() * torch.tensor(weights)).sum(dim=1),)),
    ),
    right=(_combine_by_loop, _combine_by_where, _combine_by_nan_to_num),
)  # fmt: skip


# ---- gated_reward ----


def gated_reward(right: Sequence[float], bonus: Sequence[float]) -> list[float]:
    """The bonus counts only where the answer is right."""
    return [one + extra if one == 1.0 else 0.0 for one, extra in zip(right, bonus, strict=True)]


def _some_bonus(rng: random.Random) -> Call:
    right = [1.0, 0.0] + [float(rng.random() < 0.5) for _ in range(3)]
    return call(right, [rng.randrange(1, 9) / 4 for _ in range(5)])


def _gate_by_product(right, bonus):
    return [one * (1.0 + extra) for one, extra in zip(right, bonus, strict=True)]


def _gate_by_tensor(right, bonus):
    gate = torch.tensor(right)
    return (gate + gate * torch.tensor(bonus)).tolist()


def _gate_by_loop(right, bonus):
    out = []
    for place, one in enumerate(right):
        if one:
            out.append(1.0 + bonus[place])
        else:
            out.append(0.0)
    return out


check_gated_reward = Exercise(
    "gated_reward",
    gated_reward,
    parts=(Part("right and wrong, small bonuses and large", 2, _some_bonus),),
    mistakes=(
        Mistake("the bonus is paid for wrong answers too", "That is what was hacked. No right answer, no bonus.",
                lambda right, bonus: [one + extra for one, extra in zip(right, bonus, strict=True)]),
        Mistake("the bonus replaces the reward", "A right answer earns 1, and the bonus on top.",
                lambda right, bonus: [one * extra for one, extra in zip(right, bonus, strict=True)]),
        Mistake("the bonus is lost", "Where the answer is right, the bonus counts.",
                lambda right, bonus: list(right)),
        Mistake("the gate stands open for wrong answers only", "Which of the two should get the bonus?",
                lambda right, bonus: [one if one else extra for one, extra in zip(right, bonus, strict=True)]),
    ),
    right=(_gate_by_product, _gate_by_tensor, _gate_by_loop),
)  # fmt: skip


# ---- paid_exploits ----


def paid_exploits(
    reward_func: Callable[..., list[float]], honest: str, exploits: dict[str, str], answer: str
) -> list[str]:
    """The exploits that earn at least as much as an honest right completion."""
    texts = [honest, *exploits.values()]
    paid = reward_func(completions=texts, answer=[answer] * len(texts))
    return [name for name, reward in zip(exploits, paid[1:], strict=True) if reward >= paid[0]]


def pays_for_length(completions, answer, **kwargs):
    """A reward that can be had without being right."""
    return [float(right in text) + len(text) / 100 for text, right in zip(completions, answer, strict=True)]


def pays_for_marker(completions, answer, **kwargs):
    """A reward for the form alone."""
    return [float("####" in text) for text in completions]


def _some_exploits(rng: random.Random) -> Call:
    number = rng.randrange(20, 90)
    exploits = {
        "empty": "", "marker": "#### ", "hedge": f"#### {number} or {number + 1}", "rambling": "so " * 60,
        "list": " ".join(map(str, range(100))), "wrong": f"#### {number + 1}",
    }  # fmt: skip
    names = rng.sample(list(exploits), 5)
    reward = rng.choice([accuracy_reward, pays_for_length, pays_for_marker])
    honest = f"{number - 1}+1={number}. #### {number}"
    return call(reward, honest, {name: exploits[name] for name in names}, str(number))


def _exploits_by_loop(reward_func, honest, exploits, answer):
    (fair,) = reward_func(completions=[honest], answer=[answer])
    names = []
    for name, text in exploits.items():
        (paid,) = reward_func(completions=[text], answer=[answer])
        if paid >= fair:
            names.append(name)
    return names


def _exploits_by_dict(reward_func, honest, exploits, answer):
    count = len(exploits)
    earned = dict(zip(exploits, reward_func(completions=list(exploits.values()), answer=[answer] * count), strict=True))
    fair = reward_func(completions=[honest], answer=[answer])[0]
    return [name for name in exploits if not earned[name] < fair]


def _exploits_by_filter(reward_func, honest, exploits, answer):
    def earns(text):
        return reward_func(completions=[text], answer=[answer])[0]

    return list(filter(lambda name: earns(exploits[name]) >= earns(honest), exploits))


def _exploits_above(limit: Callable[[float, float], bool]) -> Callable:
    def wrong(reward_func, honest, exploits, answer):
        texts = [honest, *exploits.values()]
        fair, *paid = reward_func(completions=texts, answer=[answer] * len(texts))
        return [name for name, reward in zip(exploits, paid, strict=True) if limit(reward, fair)]

    return wrong


check_paid_exploits = Exercise(
    "paid_exploits",
    paid_exploits,
    parts=(Part("a sound reward, one for length, one for the marker", 3, _some_exploits, draws=20),),
    mistakes=(
        Mistake("an exploit may earn as much as an honest answer", "As much is enough to be learned: at least.",
                _exploits_above(lambda reward, fair: reward > fair)),
        Mistake("anything above 0 is an alarm", "A small bonus is no exploit; earning what honesty earns is.",
                _exploits_above(lambda reward, fair: reward > 0)),
        Mistake("the harmless ones are listed", "Which exploits should worry you?",
                _exploits_above(lambda reward, fair: reward < fair)),
        Mistake("`answer` has not one entry for each completion", "The reward function takes two lists, equally long: "
                "the same right answer, once for each completion.",
                lambda reward_func, honest, exploits, answer: paid_exploits(
                    lambda completions, answer: reward_func(completions=completions, answer=answer[:1]),
                    honest, exploits, answer)),
        Mistake("the texts are listed, not the names", "`exploits` is name → text: return the names.",
                lambda reward_func, honest, exploits, answer: [
                    exploits[name] for name in paid_exploits(reward_func, honest, exploits, answer)]),
        Mistake("every exploit is listed", "Ask the reward function what it pays.",
                _exploits_above(lambda reward, fair: True)),
        Mistake("none is ever found", "Try it with a reward that pays for length.",
                _exploits_above(lambda reward, fair: False)),
    ),
    right=(_exploits_by_loop, _exploits_by_dict, _exploits_by_filter),
)  # fmt: skip
