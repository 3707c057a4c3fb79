"""Right answers to the exercises of `grpo_edu.checks.reward_functions`, written in other ways than the reference."""

from __future__ import annotations

import math
import re

import torch

from grpo_edu.checks.reward_functions import extract_number


def number_by_split(text: str) -> str | None:
    parts = text.split("####")
    if len(parts) == 1:
        return None
    lines = parts[-1].split("\n")
    number = lines[0].strip().replace(",", "")
    digits = number[1:] if number.startswith("-") else number
    return number if digits.isdecimal() else None


def number_by_int(text: str) -> str | None:
    place = text.rfind("####")
    if place < 0:
        return None
    written = text[place + 4 :].split("\n")[0].strip().replace(",", "")
    try:
        return str(int(written)) if "+" not in written else None
    except ValueError:
        return None


def number_by_search(text: str) -> str | None:
    last = re.findall(r"####([^\n#]*)", text)[-1:]
    found = re.fullmatch(r"\s*(-?)([\d,]*\d)\s*", last[0]) if last else None
    return found[1] + found[2].replace(",", "") if found else None


def reward_by_loop(completions, answer, **kwargs):
    out = []
    for place in range(len(completions)):
        out.append(1.0 if extract_number(completions[place]) == answer[place] else 0.0)
    return out


def reward_by_map(completions, answer, **kwargs):
    return list(map(lambda text, right: 1.0 if number_by_int(text) == right else 0.0, completions, answer))


def reward_by_index(completions, answer, **kwargs):
    found = [extract_number(text) for text in completions]
    return [(0.0, 1.0)[one == other] for one, other in zip(found, answer, strict=True)]


def combine_by_loop(rewards_per_func, weights):
    out = []
    for row in rewards_per_func.tolist():
        known = [weight * value for weight, value in zip(weights, row, strict=True) if not math.isnan(value)]
        out.append(sum(known) if known else math.nan)
    return torch.tensor(out)


def combine_by_where(rewards_per_func, weights):
    applies = ~rewards_per_func.isnan()
    total = torch.where(applies, rewards_per_func, 0.0) @ torch.tensor(weights)
    return torch.where(applies.any(dim=1), total, math.nan)


def combine_by_nan_to_num(rewards_per_func, weights):
    total = (rewards_per_func.nan_to_num(0.0) * torch.tensor(weights)).sum(dim=1)
    total[rewards_per_func.isnan().sum(dim=1) == rewards_per_func.shape[1]] = math.nan
    return total


def gate_by_product(right, bonus):
    return [one * (1.0 + extra) for one, extra in zip(right, bonus, strict=True)]


def gate_by_tensor(right, bonus):
    gate = torch.tensor(right)
    return (gate + gate * torch.tensor(bonus)).tolist()


def gate_by_loop(right, bonus):
    out = []
    for place, one in enumerate(right):
        if one:
            out.append(1.0 + bonus[place])
        else:
            out.append(0.0)
    return out


def exploits_by_loop(reward_func, honest, exploits, answer):
    (fair,) = reward_func(completions=[honest], answer=[answer])
    names = []
    for name, text in exploits.items():
        (paid,) = reward_func(completions=[text], answer=[answer])
        if paid >= fair:
            names.append(name)
    return names


def exploits_by_dict(reward_func, honest, exploits, answer):
    count = len(exploits)
    earned = dict(zip(exploits, reward_func(completions=list(exploits.values()), answer=[answer] * count), strict=True))
    fair = reward_func(completions=[honest], answer=[answer])[0]
    return [name for name in exploits if not earned[name] < fair]


def exploits_by_filter(reward_func, honest, exploits, answer):
    def earns(text):
        return reward_func(completions=[text], answer=[answer])[0]

    return list(filter(lambda name: earns(exploits[name]) >= earns(honest), exploits))


RIGHT_ANSWERS = {
    "extract_number": (number_by_split, number_by_int, number_by_search),
    "accuracy_reward": (reward_by_loop, reward_by_map, reward_by_index),
    "combine_rewards": (combine_by_loop, combine_by_where, combine_by_nan_to_num),
    "gated_reward": (gate_by_product, gate_by_tensor, gate_by_loop),
    "paid_exploits": (exploits_by_loop, exploits_by_dict, exploits_by_filter),
}
