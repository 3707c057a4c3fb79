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
        known = [(weight, value) for weight, value in zip(weights, row, strict=True) if not math.isnan(value)]
        total = sum(weight for weight, _ in known)
        out.append(sum(weight * value for weight, value in known) / total if known else math.nan)
    return torch.tensor(out)


def combine_by_where(rewards_per_func, weights):
    applies = ~rewards_per_func.isnan()
    total = torch.where(applies, rewards_per_func, 0.0) @ torch.tensor(weights)
    return total / (applies.float() @ torch.tensor(weights))  # 0 / 0 is NaN


def combine_by_nan_to_num(rewards_per_func, weights):
    shares = torch.tensor(weights) * ~rewards_per_func.isnan()
    shares = shares / shares.sum(dim=1, keepdim=True)
    return (shares * rewards_per_func.nan_to_num(0.0)).sum(dim=1)


def gate_by_slices(right, bonus, num_generations):
    out = []
    for start in range(0, len(right), num_generations):
        rows = slice(start, start + num_generations)
        is_open = sum(right[rows]) >= num_generations / 2
        out += [one + one * extra * is_open for one, extra in zip(right[rows], bonus[rows], strict=True)]
    return out


def gate_by_tensor(right, bonus, num_generations):
    groups = torch.tensor(right).view(-1, num_generations)
    is_open = groups.mean(dim=1, keepdim=True) >= 0.5
    return (groups * (1 + is_open * torch.tensor(bonus).view_as(groups))).flatten().tolist()


def gate_by_loop(right, bonus, num_generations):
    out = []
    for place, one in enumerate(right):
        group = place // num_generations
        shares = [right[other] for other in range(len(right)) if other // num_generations == group]
        if not one:
            out.append(0.0)
        elif sum(shares) / num_generations < 0.5:
            out.append(1.0)
        else:
            out.append(1.0 + bonus[place])
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
    "gated_reward": (gate_by_slices, gate_by_tensor, gate_by_loop),
    "paid_exploits": (exploits_by_loop, exploits_by_dict, exploits_by_filter),
}
