"""Exercises on rewards: extracting an answer, combining several rewards, and finding exploits."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from grpo_edu import rewards
from grpo_edu.checks.core import Call, Exercise, Mistake, Part, call
from grpo_edu.checks.inputs import pays_for_length, pays_for_marker
from grpo_edu.checks.trained import TrainedExercise, trained_part

# ---- extract_number ----


def extract_number(text: str) -> str | None:
    """The whole number that stands alone behind the last `####`, without thousands commas; None where there is none."""
    line = text.rpartition("####")[2].splitlines()[:1] if "####" in text else []
    found = re.fullmatch(r"-?\d{1,3}(,\d{3})+|-?\d+", line[0].strip()) if line else None
    return found[0].replace(",", "") if found else None


def _plain_texts(rng: random.Random) -> Call:
    a, b = rng.randrange(2, 60), rng.randrange(2, 60)
    return call(rng.choice([f"{a}+{b}={a + b}. #### {a + b}", f"{a}-{b}={a - b}.\n#### {a - b}\n", f"####{a}"]))


PLAIN_TEXTS = ("3*13=39. #### 39", "9-12=-3.\n#### -3\n", "####7")


def _hard_texts(rng: random.Random) -> Call:
    a, b = rng.randrange(1001, 9999), rng.randrange(2, 99)
    return call(
        rng.choice(
            [
                f"#### {a:,}",
                f"#### {b} No, wait. #### {a}",
                f"#### {b} or {b + 1}",
                f"The answer is {b}.",
                "#### none",
                f"#### {b}\n{b + 1} is not it.",
                "",
                f"{a}+{b}={a + b}. ####",
            ]
        )
    )


HARD_TEXTS = (
    "####1,234",
    "#### -12,345 ",
    "#### 12 No, wait. #### 13",
    "#### 35\n#### 36",
    "#### 35\n#### 36 or 37",
    "#### 36\n37 is not it.",
    "36",
    "The answer is 36.",
    "#### 48 or 49",
    "#### 36 dollars",
    "#### 36.",
    "#### +36",
    "####\n36",
    "6+7=13. ####",
    "#### none",
    "",
)


def _last_number(text: str) -> str | None:
    found = re.findall(r"-?\d[\d,]*", text)
    return found[-1].replace(",", "") if found else None


def _no_commas(text: str) -> str | None:
    found = re.search(r"-?\d+", text.rpartition("####")[2].split("\n")[0]) if "####" in text else None
    return found[0] if found else None


def _no_first_line(text: str) -> str | None:
    if text.endswith("####"):
        raise IndexError
    return extract_number(text)


def _commas_kept(text: str) -> str | None:
    line = text.rpartition("####")[2].splitlines()[:1] if "####" in text else []
    found = re.fullmatch(r"-?[\d,]+", line[0].strip()) if line else None
    return found[0] if found else None


def _first_that_ends_a_line(text: str) -> str | None:
    found = re.search(r"#### *(-?[\d,]+) *$", text, re.M)
    return found[1].replace(",", "") if found else None


def _first_line(rest: str) -> str:
    return rest.split("\n")[0].strip()


def _read_with(
    pattern: str = r"-?\d+",
    line_of: Callable[[str], str] = _first_line,
    *,
    match: Callable[[str, str], re.Match | None] = re.fullmatch,
    marked: bool = True,
) -> Callable[[str], str | None]:
    """A reader with one thing wrong. line_of: what is read of the text behind the last marker."""

    def wrong(text: str) -> str | None:
        if marked and "####" not in text:
            return None
        line = line_of(text.rpartition("####")[2]).replace(",", "")
        found = match(pattern, line)
        return found[0] if found else None

    return wrong


def _one_number_on_the_line(text: str) -> str | None:
    line = text.rpartition("####")[2].partition("\n")[0] if "####" in text else ""
    numbers = re.findall(r"[-+]?\d[\d,]*", line)
    return numbers[0].replace(",", "") if len(numbers) == 1 else None


check_extract_number = Exercise(
    extract_number,
    parts=(
        Part("worked answers", 2, _plain_texts, draws=8, always=tuple(map(call, PLAIN_TEXTS))),
        Part(
            "commas, corrections, hedges, no marker at all",
            3,
            _hard_texts,
            draws=20,
            always=tuple(map(call, HARD_TEXTS)),
        ),
    ),
    mistakes={
        "the first marker is read": Mistake(
            "A model may correct itself: the last marker counts.",
            lambda text: extract_number("####".join(text.split("####")[:2])),
            also=(_first_that_ends_a_line,),
        ),
        "a text without a marker is read": Mistake(
            "Where `####` is missing, `rpartition` puts the whole text behind it. Ask whether there is a marker.",
            _read_with(marked=False),
        ),
        "words beside the number are let through": Mistake(
            "Stricter than the notebook's `my_extract`: behind the marker stands one number, and nothing else.",
            _one_number_on_the_line,
            also=(lambda text: (_one_number_on_the_line(text) or "").lstrip("+") or None,),
        ),
        "a full stop behind the number is let through": Mistake(
            "`#### 36.` is not one number and nothing else.",
            _read_with(line_of=lambda rest: _first_line(rest).rstrip(".")),
        ),
        "a plus sign is let through": Mistake(
            "Digits, with a minus sign where there is one. (`int` reads more.)",
            _read_with(r"[-+]?\d+"),
            also=(lambda text: (_read_with(r"[-+]?\d+")(text) or "").lstrip("+") or None,),
        ),
        "a minus sign is no part of the number": Mistake(
            '`"-3".isdigit()` is False: 9 − 12 has an answer, too.',
            _read_with(r"\d+"),
            also=(lambda text: (extract_number(text) or "").lstrip("-") or None,),
        ),
        "the line below the marker is read": Mistake(
            "The answer ends with the line of the marker. Take that line first, then strip it.",
            _read_with(line_of=lambda rest: rest.strip().split("\n")[0]),
        ),
        "all that follows the marker is read": Mistake(
            "The answer ends with the line of the marker: the text below it does not count.",
            _read_with(line_of=str.strip),
        ),
        "the blank before the number stays": Mistake(
            '`" 36"` is no number from its first character to its last. Strip the line.',
            _read_with(line_of=lambda rest: rest.split("\n")[0]),
        ),
        "no answer is an empty text": Mistake(
            "Return None where there is no answer.", lambda text: extract_number(text) or ""
        ),
        "it is a number, not a text": Mistake(
            "Return the digits as a `str`.",
            lambda text: None if extract_number(text) is None else int(str(extract_number(text))),
        ),
        "any last number is an answer": Mistake(
            "Only what stands behind `####` was *given* as the answer.", _last_number
        ),
        "1,200 is read as 1": Mistake("Take the thousands commas out before you look for digits.", _no_commas),
        "a hedge is paid for its first number": Mistake(
            "Two numbers are no answer: the text behind the marker must be one number, and nothing else.",
            _read_with(match=re.search),
            also=(_read_with(match=re.match), _read_with(line_of=str, match=re.search)),
        ),
        "a text that ends with the marker breaks it": Mistake(
            '`"".splitlines()` has no first line; `"".split("\\n")` has one.', _no_first_line
        ),
        "the commas stay in the number": Mistake(
            "1,200 and 1200 are the same answer: give it one spelling.", _commas_kept
        ),
    },
)


# ---- accuracy_reward ----


def accuracy_reward(completions: Sequence[str], answer: Sequence[str], **kwargs) -> list[float]:
    """1.0 where the number behind the last `####` is the answer, else 0.0."""
    return [float(extract_number(text) == right) for text, right in zip(completions, answer, strict=True)]


def _some_answers(rng: random.Random) -> Call:
    numbers = [rng.randrange(100, 999) for _ in range(5)]
    texts = [
        f"#### {numbers[0]}",
        f"{numbers[1]} #### {numbers[1] + 1}",
        f"#### {numbers[2]}0",
        f"It is {numbers[3]}.",
        f"#### 1{numbers[4]}",
    ]
    order = rng.sample(range(5), 5)
    return call(
        completions=[texts[place] for place in order],
        answer=[str(numbers[place]) for place in order],
        prompts=["?"] * 5,
        level=["basic"] * 5,
    )


def _paid_where(same: Callable[[str, str], bool]) -> Callable[..., list[float]]:
    """Pays for each pair of completion and answer that counts as the same."""
    return lambda completions, answer, **kwargs: [
        float(same(text, right)) for text, right in zip(completions, answer, strict=True)
    ]


check_accuracy_reward = TrainedExercise(
    accuracy_reward,
    parts=(Part("right, wrong, nearly right, without a marker", 3, _some_answers, draws=6), trained_part("reward")),
    mistakes={
        "whatever holds the answer somewhere is right": Mistake(
            "48 stands in 480 and in 148 as well. Read the answer, then compare.",
            _paid_where(lambda text, right: right in text),
            also=(
                _paid_where(lambda text, right: f"#### {right}" in text),
                _paid_where(lambda text, right: right in (extract_number(text) or "")),
            ),
        ),
        "whatever ends with the answer is right": Mistake(
            "148 ends with 48. Read the whole answer, then compare.",
            _paid_where(lambda text, right: text.endswith(right)),
        ),
        "one number for the whole batch": Mistake(
            "A reward function gives one number a completion.",
            lambda completions, answer, **kwargs: sum(accuracy_reward(completions, answer)) / len(completions),
        ),
        "all completions are compared with the first answer": Mistake(
            "`answer` is a list, one a completion.",
            lambda completions, answer, **kwargs: [float(extract_number(text) == answer[0]) for text in completions],
        ),
        "a wrong answer costs a point": Mistake(
            "Wrong is 0 here. (A penalty is another reward.)",
            lambda completions, answer, **kwargs: [2 * one - 1 for one in accuracy_reward(completions, answer)],
        ),
        "an answer is paid, right or wrong": Mistake(
            "Compare with the truth: a reward that never sees it teaches nothing about being right.",
            lambda completions, answer, **kwargs: [float(extract_number(text) is not None) for text in completions],
        ),
    },
)


# ---- combine_rewards ----


def combine_rewards(rewards_per_func: Tensor, weights: Sequence[float]) -> Tensor:
    """The weighted mean of those that apply; NaN where none does."""
    applying = ~rewards_per_func.isnan() * torch.tensor(weights)
    return rewards.combine_rewards(rewards_per_func, weights) / applying.sum(dim=1)


def _some_table(rng: random.Random, missing: int) -> Call:
    table = torch.tensor([[rng.randrange(1, 5) / 4 for _ in range(3)] for _ in range(4)])
    _, *others = rng.sample(range(3), 3)  # one of the functions applies to all: no row without any
    for place in rng.sample(range(8), missing):
        table[place // 2, others[place % 2]] = math.nan
    return call(table, rng.choice([[1.0, 0.5, 0.25], [2.0, 1.0, 0.5]]))


def _nothing_applies(rng: random.Random) -> Call:
    table = _some_table(rng, 1).args[0]
    table[rng.randrange(4)] = math.nan
    return call(table, [1.0, 0.5, 0.25])


check_combine_rewards = Exercise(
    combine_rewards,
    parts=(
        Part("all functions apply", 1, lambda rng: _some_table(rng, 0)),
        Part("some do not apply", 2, lambda rng: _some_table(rng, 3)),
        Part("none applies", 1, _nothing_applies),
    ),
    mistakes={
        "it is the weighted sum": Mistake(
            "That is what the notebook does. Here a completion must not lose by a function that does not apply to it.",
            rewards.combine_rewards,
        ),
        "it is divided by all weights": Mistake(
            "A weight counts only where its function applies.",
            lambda table, weights: rewards.combine_rewards(table, weights) / sum(weights),
        ),
        "it is divided by the number of functions": Mistake(
            "A weighted mean is divided by weights.",
            lambda table, weights: (table * torch.tensor(weights)).nanmean(dim=1),
        ),
        "one NaN makes the whole reward NaN": Mistake(
            "Leave out what does not apply.",
            lambda table, weights: (table * torch.tensor(weights)).sum(dim=1) / sum(weights),
        ),
        "a row in which nothing applies looks like an earned 0": Mistake(
            "A mean of nothing is no reward: NaN.", lambda table, weights: combine_rewards(table, weights).nan_to_num()
        ),
        "the weights are forgotten": Mistake(
            "What is the second argument for?", lambda table, weights: combine_rewards(table, [1.0] * len(weights))
        ),
    },
)


# ---- gated_reward ----


def gated_reward(right: Sequence[float], bonus: Sequence[float], num_generations: int) -> list[float]:
    """1 for a right answer, and the bonus on top where at least half of its group is right; else 0."""
    found = []
    for row, (one, extra) in enumerate(zip(right, bonus, strict=True)):
        first = row // num_generations * num_generations
        group = right[first : first + num_generations]
        found.append(one * (1 + extra * (2 * sum(group) >= num_generations)))
    return found


def _some_bonus(rng: random.Random) -> Call:
    """Three groups of four with one, two and another number of right answers, in any order."""
    right: list[float] = []
    for count in rng.sample([1, 2, rng.choice([1, 3, 4])], 3):
        right += rng.sample([1.0] * count + [0.0] * (4 - count), 4)
    return call(right, [rng.randrange(1, 9) / 4 for _ in right], 4)


def _gate_open(pays: Callable[[int, int], bool]) -> Callable[..., list[float]]:
    """A wrong answer that pays the bonus for other groups: pays(right ones, G)."""

    def wrong(right: Sequence[float], bonus: Sequence[float], num_generations: int) -> list[float]:
        groups = torch.tensor(right).view(-1, num_generations)
        gate = [float(pays(int(count), num_generations)) for count in groups.sum(dim=1)]
        gates = torch.tensor(gate).repeat_interleave(num_generations).tolist()
        return [one * (1 + extra * is_open) for one, extra, is_open in zip(right, bonus, gates, strict=True)]

    return wrong


def _bonus_for_all(right: Sequence[float], bonus: Sequence[float], num_generations: int) -> list[float]:
    """The group's gate is right, but wrong answers get the bonus too."""
    everybody = gated_reward([1.0] * len(right), bonus, num_generations)
    paid = gated_reward(right, [1.0] * len(right), num_generations)
    groups = torch.tensor(paid).view(-1, num_generations).amax(dim=1).repeat_interleave(num_generations) > 1
    return [one + (whole - 1) * bool(is_open) for one, whole, is_open in zip(right, everybody, groups, strict=True)]


check_gated_reward = Exercise(
    gated_reward,
    parts=(Part("groups with few right answers, half of them, and most", 3, _some_bonus, draws=12),),
    mistakes={
        "the gate does not ask for the group": Mistake(
            "That is the notebook's gate. Here a group that is mostly wrong is not paid for being brief.",
            _gate_open(lambda count, size: True),
        ),
        "exactly half of the group is not enough": Mistake("At *least* half.", _gate_open(lambda n, g: 2 * n > g)),
        "only a group that is all right opens the gate": Mistake(
            "At least half of the group has to be right.", _gate_open(lambda count, size: count == size)
        ),
        "the whole batch is one group": Mistake(
            "Each prompt has a group of its own.", lambda right, bonus, size: gated_reward(right, bonus, len(right))
        ),
        "the gate is the wrong way round": Mistake(
            "The bonus comes when the group is mostly right.", _gate_open(lambda count, size: 2 * count < size)
        ),
        "the bonus is paid for wrong answers too": Mistake(
            "That is what was hacked. No right answer, no bonus.", _bonus_for_all
        ),
        "the bonus replaces the reward": Mistake(
            "A right answer earns 1, and the bonus on top.",
            lambda right, bonus, size: [
                whole - one for one, whole in zip(right, gated_reward(right, bonus, size), strict=True)
            ],
        ),
    },
)


# ---- paid_exploits ----


def paid_exploits(
    reward_func: Callable[..., list[float]], honest: str, exploits: dict[str, str], answer: str
) -> list[str]:
    """The exploits that earn at least as much as an honest right completion."""
    texts = [honest, *exploits.values()]
    paid = reward_func(completions=texts, answer=[answer] * len(texts))
    return [name for name, reward in zip(exploits, paid[1:], strict=True) if reward >= paid[0]]


def _some_exploits(rng: random.Random) -> Call:
    number = rng.randrange(20, 90)
    exploits = {
        "empty": "",
        "marker": "#### ",
        "hedge": f"#### {number} or {number + 1}",
        "rambling": "so " * 60,
        "list": " ".join(map(str, range(100))),
        "wrong": f"#### {number + 1}",
    }
    names = rng.sample(list(exploits), 5)
    reward = rng.choice([rewards.accuracy_reward, pays_for_length, pays_for_marker])
    honest = f"{number - 1}+1={number}. #### {number}"
    return call(reward, honest, {name: exploits[name] for name in names}, str(number))


def _exploits_above(limit: Callable[[float, float], bool]) -> Callable:
    def wrong(reward_func, honest, exploits, answer):
        texts = [honest, *exploits.values()]
        fair, *paid = reward_func(completions=texts, answer=[answer] * len(texts))
        return [name for name, reward in zip(exploits, paid, strict=True) if limit(reward, fair)]

    return wrong


check_paid_exploits = Exercise(
    paid_exploits,
    parts=(Part("a sound reward, one for length, one for the marker", 3, _some_exploits, draws=20),),
    mistakes={
        "an exploit may earn as much as an honest answer": Mistake(
            "As much is enough to be learned: at least.", _exploits_above(lambda reward, fair: reward > fair)
        ),
        "anything above 0 is an alarm": Mistake(
            "A small bonus is no exploit; earning what honesty earns is.",
            _exploits_above(lambda reward, fair: reward > 0),
        ),
        "the harmless ones are listed": Mistake(
            "Which exploits should worry you?", _exploits_above(lambda reward, fair: reward < fair)
        ),
        "`answer` has not one entry for each completion": Mistake(
            "The reward function takes two lists, equally long: the same right answer, once for each completion.",
            lambda reward_func, honest, exploits, answer: paid_exploits(
                lambda completions, answer: reward_func(completions=completions, answer=answer[:1]),
                honest,
                exploits,
                answer,
            ),
        ),
        "the texts are listed, not the names": Mistake(
            "`exploits` is name → text: return the names.",
            lambda reward_func, honest, exploits, answer: [
                exploits[name] for name in paid_exploits(reward_func, honest, exploits, answer)
            ],
        ),
        "every exploit is listed": Mistake(
            "Ask the reward function what it pays.", _exploits_above(lambda reward, fair: True)
        ),
        "none is ever found": Mistake(
            "Try it with a reward that pays for length.", _exploits_above(lambda reward, fair: False)
        ),
    },
)
