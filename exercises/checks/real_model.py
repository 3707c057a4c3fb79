"""Exercises on training a real language model: a reward for an instruction, and the signal of each kind of problem."""

from __future__ import annotations

import random
from collections.abc import Sequence

from grpo_edu.checks.core import Call, Exercise, Part, call


# ---- signal_by_kind ----
def signal_by_kind(kinds: Sequence[str], rewards: Sequence[float], num_generations: int) -> dict[str, float]:
    """Return the share of each kind's groups whose rewards are not all equal, so that GRPO can learn from them."""
    size = num_generations
    groups = [rewards[size * i : size * i + size] for i in range(len(kinds))]
    signals = [max(group) > min(group) for group in groups]
    found: dict[str, list[bool]] = {}
    for kind, signal in zip(kinds, signals, strict=True):
        found.setdefault(kind, []).append(signal)
    return {kind: sum(own) / len(own) for kind, own in found.items()}


_KINDS = ("question", "no comma", "lower case")


def _some_groups(rng: random.Random, values: Sequence[float], kinds: Sequence[str]) -> Call:
    size, each = rng.choice([2, 4]), rng.choice([2, 3])
    names = [kind for kind in kinds for _ in range(each)]
    rng.shuffle(names)
    rows: list[float] = []
    for _ in names:
        group = rng.choice([[0.0] * size, [1.0] * size, [rng.choice(values) for _ in range(size)]])
        rows += group
    rows[-size:] = [values[0], values[-1], *([values[0]] * (size - 2))]  # at least one group has a signal
    return call(names, rows, size)


# Three groups with a signal of five: "question" 1 of 2, "no comma" 2 of 3.
_WORKED = call(
    ["question", "no comma", "question", "no comma", "no comma"], [1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0], 2
)
_UNEVEN = call(["question", "no comma", "no comma"], [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], 4)
# Equal rewards of 0.5 are not a signal; three different rewards, a small difference, and equal ends around others are.
_MIXED = call(
    ["question", "question", "no comma", "no comma"],
    [*[0.5] * 4, 0.5, 0.0, 1.0, 0.5, 0.25, 0.25, 0.25, 0.2501, *[0.75] * 4],
    4,
)

check_signal_by_kind = Exercise(
    signal_by_kind,
    parts=(
        Part("one kind", 1, lambda rng: _some_groups(rng, (0.0, 1.0), _KINDS[:1])),
        Part("several kinds", 2, lambda rng: _some_groups(rng, (0.0, 1.0), _KINDS), always=(_WORKED, _UNEVEN)),
        Part(
            "rewards between 0 and 1", 1, lambda rng: _some_groups(rng, (0.25, 0.5, 0.75), _KINDS[:2]), always=(_MIXED,)
        ),
    ),
    changes="""
        groups in which all are right count as a signal: max(group) > min(group) -> max(group) > 0
            If all rewards are equal, every advantage is 0, whether the answers are right or wrong.
        groups in which all are wrong count as a signal: max(group) > min(group) -> min(group) < 1
            If all rewards are equal, every advantage is 0, whether the answers are right or wrong.
        the share of groups without a signal is returned: max(group) > min(group) -> max(group) == min(group)
            Which groups teach something: those whose rewards are equal, or those whose rewards differ?
        the mean reward is returned: max(group) > min(group) -> sum(group) / len(group)
            If all answers of a kind are right, its mean reward is 1, but none of its groups has a signal.
        a mean between 0 and 1 counts as a signal: max(group) > min(group) -> 0 < sum(group) < len(group)
            Four rewards of 0.5 are all equal, so every advantage is 0. Compare the rewards of a group with each other.
        a group with a signal must hold a 0 and a 1: max(group) > min(group) -> 0 in group and 1 in group
            Rewards may lie between 0 and 1. Any difference within a group is a signal.
        counts are returned, not shares: sum(own) / len(own) -> sum(own)
            To get a share, divide by the number of groups of this kind.
        the count is divided by the number of all groups: sum(own) / len(own) -> sum(own) / len(signals)
            Divide by the number of groups of *this kind*.
        the count is divided by the number of completions:
            sum(own) / len(own) -> sum(own) / (len(own) * num_generations)
            The share is one of groups: divide by their number, not by the number of completions.
        one group with a signal is enough: sum(own) / len(own) -> float(any(own))
            Return a share: how many of the groups of this kind have a signal?
        the rewards of a group are taken with a stride:
            rewards[size * i : size * i + size] -> rewards[i :: len(kinds)]
            The rewards of a group are adjacent: the first `num_generations` rewards are the first group.
    """,
)


# ---- short_and_on_topic ----
def short_and_on_topic(completions: Sequence[str], topic: str, most: int) -> list[float]:
    """1.0 for a completion of at most `most` words that names the topic and has four different words or more."""
    rewards = []
    for completion in completions:
        words = [word.strip(".,!?").lower() for word in completion.split()]
        paid = len(words) <= most and topic in words and len(set(words)) >= 4
        rewards.append(float(paid))
    return rewards


_TOPICS = {"cat": "catalog", "sea": "season", "tea": "teacher", "sun": "Sunday"}
_OPENINGS = ("Every morning the", "Nobody saw the", "They all love our", "We found a")
_REST = "slowly and quietly near the old wooden bridge while rain fell all day long".split()


_ABOUT_SEA = [
    *(
        f"We saw the {written} at noon"
        for written in ("sea", "Sea", "SEA.", "sea,", "sea!", "sea?", "!sea", ".sea.", "?!sea")
    ),
    *(f"We saw the {other} at noon" for other in ("season", "oversea", "sea's", "land")),
    "We saw the\nsea at noon",
]


def _on_topic(rng: random.Random, topic: str, size: int) -> str:
    """Draw a sentence of `size` words, the topic fourth or fifth, at times with a capital or a comma."""
    opening = rng.choice(_OPENINGS).split()
    written = rng.choice([topic, topic.capitalize(), topic + ","])
    words = [*opening, written, *_REST][:size]
    return " ".join(words) + rng.choice([".", "!", "?"])


def _about_length(rng: random.Random) -> Call:
    topic, most = rng.choice(sorted(_TOPICS)), rng.choice([7, 8, 9])
    sizes = [most - 1, most, most + 1, most + 3]
    rng.shuffle(sizes)
    return call([_on_topic(rng, topic, size) for size in sizes], topic, most)


def _about_topic(rng: random.Random) -> Call:
    topic = rng.choice(sorted(_TOPICS))
    other = f"Nobody saw the {_TOPICS[topic]} of last year."
    texts = [other, _on_topic(rng, topic, 7), "What is the capital of?", f"We all like {topic}!"]
    rng.shuffle(texts)
    return call(texts, topic, 9)


def _loopholes(rng: random.Random) -> Call:
    topic, most = rng.choice(sorted(_TOPICS)), rng.choice([7, 8, 9])
    repeated = [topic.capitalize(), topic, topic + ",", topic + "!"][: rng.choice([3, 4])]
    texts = ["", f"{topic.capitalize()}!", " ".join(repeated), f"A {topic} is a {topic}!", _on_topic(rng, topic, 7)]
    rng.shuffle(texts)
    return call(texts, topic, most)


check_short_and_on_topic = Exercise(
    short_and_on_topic,
    parts=(
        Part(
            "the limit of words",
            1,
            _about_length,
            always=(
                call(["The sea and the sea and the old sea.", "The sea and the\nold road meet here."], "sea", 6),
                call(
                    ["The  sea   is  calm.", " The sea is calm.\n", "The\nsea\nis\ncalm", "The\nsea is very calm"],
                    "sea",
                    4,
                ),
            ),
        ),
        Part("the topic", 2, _about_topic, always=(call(_ABOUT_SEA, "sea", 8),)),
        Part(
            "loopholes",
            2,
            _loopholes,
            always=(
                call(["", "Sea!", "A sea is a sea!", "Sea, sea, SEA! sea."], "sea", 8),
                call(["The sea is wide.", "The sea, the sea, the sea is."], "sea", 8),
                call(
                    ["The the THE sea.", "The, the! the? sea", "Wide wide, wide! sea is.", "sea sea sea the sea"],
                    "sea",
                    8,
                ),
            ),
        ),
    ),
    changes="""
        the limit itself is not allowed: len(words) <= most -> len(words) < most
            "At most 8 words" allows 8.
        characters are counted, not words: len(words) <= most -> len(completion) <= most
            The limit is a number of words.
        only different words count towards the limit: len(words) <= most -> len(set(words)) <= most
            A word that is written twice counts twice.
        `most` is not used: len(words) <= most and topic -> topic
            A completion with more than `most` words earns 0, even if it is on topic.
        the topic is found inside another word: topic in words -> topic in completion.lower()
            "catalog" contains "cat". Compare whole words.
        the topic is not required: topic in words and len -> len
            Without this condition any short sentence is paid, and the policy will soon find that out.
        punctuation is not removed from the words: word.strip(".,!?").lower() -> word.lower()
            "sea," and "sea!" are the word "sea".
        a capital letter makes a different word: word.strip(".,!?").lower() -> word.strip(".,!?")
            "Sea" at the beginning of a sentence is the word "sea".
        repeated words are paid: topic in words and len(set(words)) >= 4 -> topic in words
            "Sea sea sea" is short and on topic. How many *different* words does it have?
        different words are counted before they are brought to one form:
            len(set(words)) >= 4 -> len(set(completion.split())) >= 4
            "Sea," and "sea" are the same word. Remove punctuation and capitals before you count different words.
        all words are counted, not only the different ones: len(set(words)) >= 4 -> len(words) >= 4
            "A sea is a sea!" has five words, and three different ones.
        more than four different words are required: len(set(words)) >= 4 -> len(set(words)) > 4
            Four different words are enough.
    """,
)
