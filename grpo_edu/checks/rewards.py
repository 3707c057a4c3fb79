"""Exercises of notebook 02: reading answers, rewards with TRL's signature, combining them, exploits."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from grpo_edu import rewards
from grpo_edu.checks.core import Call, Exercise, Mistake, Part, call

# ---- extract_number ----


def extract_number(text: str) -> str | None:
    """The whole number that stands alone behind the last `####`, without thousands commas; None where there is none."""
    line = text.rpartition("####")[2].splitlines()[:1] if "####" in text else []
    found = re.fullmatch(r"-?\d{1,3}(,\d{3})+|-?\d+", line[0].strip()) if line else None
    return found[0].replace(",", "") if found else None


def _plain_texts(rng: random.Random) -> Call:
    a, b = rng.randrange(2, 60), rng.randrange(2, 60)
    return call(rng.choice([f"{a}+{b}={a + b}. #### {a + b}", f"{a}-{b}={a - b}.\n#### {a - b}\n", f"####{a}"]))


def _hard_texts(rng: random.Random) -> Call:
    a, b = rng.randrange(1001, 9999), rng.randrange(2, 99)
    return call(
        rng.choice([
            f"#### {a:,}", f"#### {b} No, wait. #### {a}", f"#### {b} or {b + 1}", f"The answer is {b}.", "#### none",
            f"#### {b}\n{b + 1} is not it.", "", f"{a}+{b}={a + b}. ####",
        ])
    )  # fmt: skip


def _number_by_split(text: str) -> str | None:
    parts = text.split("####")
    if len(parts) == 1:
        return None
    lines = parts[-1].split("\n")
    number = lines[0].strip().replace(",", "")
    digits = number[1:] if number.startswith("-") else number
    return number if digits.isdecimal() else None


def _number_by_int(text: str) -> str | None:
    place = text.rfind("####")
    if place < 0:
        return None
    try:
        return str(int(text[place + 4 :].split("\n")[0].replace(",", "")))
    except ValueError:
        return None


def _number_by_search(text: str) -> str | None:
    last = re.findall(r"####([^\n#]*)", text)[-1:]
    found = re.fullmatch(r"\s*(-?)([\d,]*\d)\s*", last[0]) if last else None
    return found[1] + found[2].replace(",", "") if found else None


def _first_marker(text: str) -> str | None:
    parts = text.split("####")
    return None if len(parts) == 1 else extract_number("####" + parts[1])


def _last_number(text: str) -> str | None:
    found = re.findall(r"-?\d[\d,]*", text)
    return found[-1].replace(",", "") if found else None


def _no_commas(text: str) -> str | None:
    found = re.search(r"-?\d+", text.rpartition("####")[2].split("\n")[0]) if "####" in text else None
    return found[0] if found else None


def _hedges(text: str) -> str | None:
    found = re.search(r"-?\d[\d,]*", text.rpartition("####")[2].split("\n")[0]) if "####" in text else None
    return found[0].replace(",", "") if found else None


def _commas_kept(text: str) -> str | None:
    line = text.rpartition("####")[2].splitlines()[:1] if "####" in text else []
    found = re.fullmatch(r"-?[\d,]+", line[0].strip()) if line else None
    return found[0] if found else None


check_extract_number = Exercise(
    "extract_number",
    extract_number,
    parts=(
        Part("worked answers", 2, _plain_texts, draws=8),
        Part("commas, corrections, hedges, no marker at all", 3, _hard_texts, draws=40),
    ),
    mistakes=(
        Mistake("the first marker is read", "A model may correct itself: the last marker counts.", _first_marker),
        Mistake("any last number is an answer", "Only what stands behind `####` was *given* as the answer.",
                _last_number),
        Mistake("1,200 is read as 1", "Take the thousands commas out before you look for digits.", _no_commas),
        Mistake("a hedge is paid for its first number", "Two numbers are no answer: the text behind the marker must be "
                "one number, and nothing else.", _hedges),
        Mistake("the commas stay in the number", "1,200 and 1200 are the same answer: give it one spelling.",
                _commas_kept),
    ),
    right=(_number_by_split, _number_by_int, _number_by_search),
)  # fmt: skip


# ---- accuracy_reward ----


def accuracy_reward(completions: Sequence[str], answer: Sequence[str], **kwargs) -> list[float]:
    """1.0 where the number behind the last `####` is the answer, else 0.0."""
    return [float(extract_number(text) == right) for text, right in zip(completions, answer, strict=True)]


def _some_answers(rng: random.Random) -> Call:
    numbers = [rng.randrange(100, 999) for _ in range(4)]
    texts = [f"#### {numbers[0]}", f"{numbers[1]} #### {numbers[1] + 1}", f"#### {numbers[2]}0", f"It is {numbers[3]}."]
    order = rng.sample(range(4), 4)
    return call(
        completions=[texts[place] for place in order], answer=[str(numbers[place]) for place in order],
        prompts=["?"] * 4, level=["basic"] * 4,
    )  # fmt: skip


def _reward_by_loop(completions, answer, **kwargs):
    out = []
    for place in range(len(completions)):
        out.append(1.0 if extract_number(completions[place]) == answer[place] else 0.0)
    return out


def _reward_by_map(completions, answer, **kwargs):
    return list(map(lambda text, right: 1.0 if _number_by_int(text) == right else 0.0, completions, answer))


def _reward_by_index(completions, answer, **kwargs):
    found = [extract_number(text) for text in completions]
    return [(0.0, 1.0)[one == other] for one, other in zip(found, answer, strict=True)]


check_accuracy_reward = Exercise(
    "accuracy_reward",
    accuracy_reward,
    parts=(Part("right, wrong, nearly right, without a marker", 3, _some_answers, draws=6),),
    mistakes=(
        Mistake("whatever holds the answer somewhere is right", "48 stands in 480 as well. Read the answer, then "
                "compare.", lambda completions, answer, **kwargs: [
                    float(right in text) for text, right in zip(completions, answer, strict=True)]),
        Mistake("one number for the whole batch", "A reward function gives one number a completion.",
                lambda completions, answer, **kwargs: sum(accuracy_reward(completions, answer)) / len(completions)),
        Mistake("all completions are compared with the first answer", "`answer` is a list, one a completion.",
                lambda completions, answer, **kwargs: [
                    float(extract_number(text) == answer[0]) for text in completions]),
        Mistake("a wrong answer costs a point", "Wrong is 0 here. (A penalty is another reward.)",
                lambda completions, answer, **kwargs: [2 * one - 1 for one in accuracy_reward(completions, answer)]),
        Mistake("an answer is paid, right or wrong", "Compare with the truth: a reward that never sees it teaches "
                "nothing about being right.", lambda completions, answer, **kwargs: [
                    float(extract_number(text) is not None) for text in completions]),
    ),
    right=(_reward_by_loop, _reward_by_map, _reward_by_index),
)  # fmt: skip


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
                lambda table, weights: combine_rewards(table, weights) / sum(weights)),
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
        Mistake("every exploit is listed", "Ask the reward function what it pays.",
                _exploits_above(lambda reward, fair: True)),
        Mistake("none is ever found", "Try it with a reward that pays for length.",
                _exploits_above(lambda reward, fair: False)),
    ),
    right=(_exploits_by_loop, _exploits_by_dict, _exploits_by_filter),
)  # fmt: skip
