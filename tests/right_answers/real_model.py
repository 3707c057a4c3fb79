"""Right answers to the exercises of `grpo_edu.checks.real_model`, written in other ways than the reference."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence

import torch


def signal_by_tensor(kinds: Sequence[str], rewards: Sequence[float], num_generations: int) -> dict[str, float]:
    groups = torch.tensor(rewards).view(-1, num_generations)
    signal = (groups != groups[:, :1]).any(dim=1)
    return {kind: signal[[own == kind for own in kinds]].float().mean().item() for kind in dict.fromkeys(kinds)}


def signal_by_counting(kinds: Sequence[str], rewards: Sequence[float], num_generations: int) -> dict[str, float]:
    useful = Counter()
    for row, kind in enumerate(kinds):
        own = rewards[row * num_generations : (row + 1) * num_generations]
        useful[kind] += len(set(own)) > 1
    return {kind: useful[kind] / count for kind, count in Counter(kinds).items()}


def signal_by_spread(kinds: Sequence[str], rewards: Sequence[float], num_generations: int) -> dict[str, float]:
    rows = iter(rewards)
    spreads = defaultdict(list)
    for kind in kinds:
        own = [next(rows) for _ in range(num_generations)]
        spreads[kind].append(any(value != own[0] for value in own[1:]))
    return {kind: sum(found) / len(found) for kind, found in spreads.items()}


def reward_by_pattern(completions: Sequence[str], topic: str, most: int) -> list[float]:
    found = [re.findall(r"[a-z']+", completion.lower()) for completion in completions]
    return [1.0 if topic in words and len(words) <= most and len(set(words)) > 3 else 0.0 for words in found]


def reward_by_rules(completions: Sequence[str], topic: str, most: int) -> list[float]:
    def reward(completion):
        words = completion.lower().translate(str.maketrans("", "", ".,!?")).split()
        if len(words) > most:
            return 0.0
        if words.count(topic) == 0:
            return 0.0
        return 1.0 if len(dict.fromkeys(words)) >= 4 else 0.0

    return list(map(reward, completions))


def reward_by_product(completions: Sequence[str], topic: str, most: int) -> list[float]:
    rewards = []
    for completion in completions:
        words = [word.lower().strip("!?,.") for word in completion.split()]
        rewards.append((len(words) <= most) * (topic in set(words)) * (len({*words}) >= 4) * 1.0)
    return rewards


RIGHT_ANSWERS = {
    "signal_by_kind": (signal_by_tensor, signal_by_counting, signal_by_spread),
    "short_and_on_topic": (reward_by_pattern, reward_by_rules, reward_by_product),
}
