"""Exercises on rewards: extracting an answer, combining several rewards, and finding exploits."""

from __future__ import annotations

import itertools
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
    """Return the integer that is the only text after the last `####`, without commas; None if there is none."""
    if "####" not in text:
        return None
    line = text.rpartition("####")[2].split("\n")[0]
    number = line.strip().replace(",", "")
    return number if re.fullmatch(r"-?\d+", number) else None


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
    "#### 12,0,5",
    "#### 12 No, wait. #### 13",
    "#### 35\n#### 36",
    "#### 35\n#### 36 or 37",
    "#### 36\n37 is not it.",
    "36",
    "The answer is 36.",
    "#### 48 or 49",
    "#### 48, 49",
    "#### 48 49",
    "#### 36 dollars",
    "#### 36.",
    "#### +36",
    "####\n36",
    "6+7=13. ####",
    "#### none",
    "",
)


def _first_number(text: str) -> str | None:
    found = re.search(r"-?\d+", text)
    return found[0] if found else None


def _only_number(line: str) -> str | None:
    """Return the number of a line that has no other, whatever else it says."""
    numbers = re.findall(r"[-+]?\d[\d,]*", line)
    return numbers[0].replace(",", "") if len(numbers) == 1 else None


def _search(blanks: str, number: str, commas: str) -> Callable[[str], str | None]:
    """Return a function that finds the first number behind a marker, whatever follows it."""

    def extract_number(text: str) -> str | None:
        found = re.search(f"####{blanks}({number})", text)
        return found[1].replace(commas, "") if found else None

    return extract_number


_BLANKS = (r"\s*", r"\s+", " *", " ?", " ")
_NUMBERS = (r"-?[\d,]+", r"-?\d[\d,]*", r"[-\d,]+", r"-?\d+", r"[+-]?\d+", r"\d+", r"[\d,]+")
_SEARCHES = [_search(*parts) for parts in itertools.product(_BLANKS, _NUMBERS, (",", "_"))]


check_extract_number = Exercise(
    extract_number,
    parts=(
        Part("worked answers", 2, _plain_texts, draws=8, always=tuple(map(call, PLAIN_TEXTS))),
        Part(
            "commas, corrections, two numbers, no marker at all",
            3,
            _hard_texts,
            draws=20,
            always=tuple(map(call, HARD_TEXTS)),
        ),
    ),
    changes=r"""
        the first marker is used, not the last: text.rpartition("####")[2] -> text.split("####")[1]
            A model may correct itself, so only the last marker counts.
            or: (re.findall(r"#### *(-?[\d,]+) *$", text, re.M) or [""])[0].replace(",", "") or None
        a number is extracted from a text without a marker: if "####" not in text -> if False
            Where `####` is missing, `rpartition` returns the whole text as its last part. Check first whether there is
            a marker.
        words next to the number are accepted:
            number if re.fullmatch(r"-?\d+", number) else None -> _only_number(line)
            This is stricter than the notebook's `my_extract`: after the marker there is one number and nothing else.
            or: number if re.fullmatch(r"-?\d+", number) else None -> (_only_number(line) or "").lstrip("+") or None
        a full stop after the number is accepted: line.strip() -> line.strip().rstrip(".")
            After the marker there must be one number and nothing else, so `#### 36.` has no answer.
        a plus sign is accepted: -?\d+ -> [-+]?\d+
            Accept digits, with a minus sign if there is one. (`int` accepts more.)
            or: number if re.fullmatch(r"-?\d+" -> number.lstrip("+") if re.fullmatch(r"[-+]?\d+"
        a minus sign is not treated as part of the number: -?\d+ -> \d+
            An answer may be negative, as in 9 − 12 = −3. (`"-3".isdigit()` is False.)
            or: return number if -> return number.lstrip("-") if
        the line below the marker is used: .split("\n")[0] -> .strip().split("\n")[0]
            The answer must be on the same line as the marker. Take that line first, then strip it.
        everything after the marker is used: .split("\n")[0] -> .strip()
            The answer must be on the same line as the marker. The text below it does not count.
        the space before the number is not removed: line.strip() -> line
            `" 36"` begins with a space, so it is not a number from its first character to its last. Strip the line.
        an empty string is returned if there is no answer: extract_number(text) or ""
            Return None if there is no answer.
        an integer is returned, not a string: None if extract_number(text) is None else int(extract_number(text))
            Return the digits as a `str`.
        the last number of any text is accepted: (re.findall(r"-?\d[\d,]*", text) or [""])[-1].replace(",", "") or None
            Only what follows `####` counts as the answer.
        1,200 is read as 1: number if re.fullmatch(r"-?\d+", number) else None -> _first_number(line)
            Remove the commas before you look for digits.
        the first of two numbers is returned:
            number if re.fullmatch(r"-?\d+", number) else None -> _first_number(number)
            Two numbers are not an answer: the text after the marker must be one number, and nothing else.
            or: number if re.fullmatch(r"-?\d+", number) else None -> (re.match(r"-?\d+", number) or [None])[0]
            or: _first_number(text.rpartition("####")[2].replace(",", "")) if "####" in text else None
        a text that ends with the marker raises an error: .split("\n")[0] -> .splitlines()[0]
            `"".splitlines()` is an empty list and has no first line. `"".split("\n")` has one.
        the commas are not removed from the number: .replace(",", "") -> .lower(); -?\d+ -> -?[\d,]+
            1,200 and 1200 are the same answer, so return both in the same form.
    """,
    mistakes={
        "at least two faults are left: the first marker is used, and words after the number are accepted": Mistake(
            "`re.search` stops at the first marker and ignores what follows the number. Take the text after the "
            "*last* marker, then check whether the whole line is a number: `re.fullmatch`.",
            _SEARCHES[0],
            also=tuple(_SEARCHES[1:]),
        )
    },
)


# ---- accuracy_reward ----


def accuracy_reward(completions: Sequence[str], answer: Sequence[str], **kwargs) -> list[float]:
    """Pay 1.0 if the number behind the last `####` is the answer, else 0.0."""
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


check_accuracy_reward = TrainedExercise(
    accuracy_reward,
    parts=(Part("right, wrong, nearly right, without a marker", 3, _some_answers, draws=6), trained_part("reward")),
    changes="""
        a text that contains the right digits anywhere is accepted: extract_number(text) == right -> right in text
            480 and 148 contain 48 as well. Extract the answer, then compare.
            or: extract_number(text) == right -> f"#### {right}" in text
            or: extract_number(text) == right -> right in (extract_number(text) or "")
        a text that ends with the right digits is accepted: extract_number(text) == right -> text.endswith(right)
            148 ends with 48. Extract the whole answer, then compare.
        one number for the whole batch: sum(accuracy_reward(completions, answer)) / len(completions)
            A reward function returns one number per completion.
        all completions are compared with the first answer: == right -> == answer[0]
            `answer` is a list with one entry per completion.
        a wrong answer earns −1: float(extract_number(text) == right) -> 2.0 * (extract_number(text) == right) - 1
            A wrong answer earns 0 here. With a penalty it would be a different reward.
        any answer is rewarded, right or wrong: extract_number(text) == right -> extract_number(text) is not None
            Compare with the right answer. A reward that does not depend on it cannot teach the model to be right.
    """,
)


# ---- combine_rewards ----


def combine_rewards(rewards_per_func: Tensor, weights: Sequence[float]) -> Tensor:
    """Return the weighted mean of the rewards that apply; NaN if none does."""
    weight_row = torch.tensor(weights)
    earned = (rewards_per_func * weight_row).nansum(dim=1)
    return earned / (~rewards_per_func.isnan() * weight_row).sum(dim=1)


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
    changes="""
        the weighted sum is returned, not the weighted mean: rewards.combine_rewards(rewards_per_func, weights)
            That is what the notebook does. Here a function that does not apply to a completion must not lower its
            reward.
        the sum is divided by all weights: rewards.combine_rewards(rewards_per_func, weights) / sum(weights)
            A weight counts only where its function applies.
        the sum is divided by the number of functions: (rewards_per_func * torch.tensor(weights)).nanmean(dim=1)
            For a weighted mean, divide by weights, not by a count.
        one NaN makes the whole reward NaN: (rewards_per_func * torch.tensor(weights)).sum(dim=1) / sum(weights)
            Leave out the functions that do not apply.
        a row in which no function applies gets 0: combine_rewards(rewards_per_func, weights).nan_to_num()
            Without any reward there is no mean: return NaN.
        the weights are not used: rewards_per_func.nanmean(dim=1)
            Some functions count more than others: use the second argument.
    """,
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


check_gated_reward = Exercise(
    gated_reward,
    parts=(
        Part(
            "groups with few right answers, half of them, and most",
            3,
            _some_bonus,
            draws=12,
            always=(call([1.0, 0.0, 0.0, 1.0, 1.0, 0.0], [0.5] * 6, 3),),
        ),
    ),
    changes="""
        the gate ignores the group: extra * (2 * sum(group) >= num_generations) -> extra
            That is the notebook's gate. Here a group that is mostly wrong gets no bonus.
        exactly half of the group is not enough: sum(group) >= -> sum(group) >
            At *least* half of the group has to be right.
        only a group with all answers right opens the gate: 2 * sum(group) >= -> sum(group) ==
            At least half of the group has to be right.
        the groups are mixed:
            row // num_generations * num_generations -> row % (len(right) // num_generations);
            first : first + num_generations -> first :: len(right) // num_generations
            A group's rows are adjacent: the first group is rows 0 to G − 1.
        the whole batch is treated as one group: gated_reward(right, bonus, len(right))
            Each prompt has a group of its own.
        the condition for the bonus is reversed: sum(group) >= -> sum(group) <
            The bonus is paid if at least half of the group is right.
        the bonus is paid for wrong answers too: one * (1 + extra -> (one + extra
            This is the reward that was exploited. A wrong answer must get no bonus.
        the bonus replaces the reward: one * (1 + extra -> one * (extra
            A right answer earns 1, plus the bonus.
    """,
)


# ---- paid_exploits ----


def paid_exploits(
    reward_func: Callable[..., list[float]], honest: str, exploits: dict[str, str], answer: str
) -> list[str]:
    """Return the exploits that earn at least as much as an honest right completion."""
    texts = [honest, *exploits.values()]
    fair, *paid = reward_func(completions=texts, answer=[answer] * len(texts))
    return [name for name, reward in zip(exploits, paid, strict=True) if reward >= fair]


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


check_paid_exploits = Exercise(
    paid_exploits,
    parts=(Part("a sound reward, one for length, one for the marker", 3, _some_exploits, draws=20),),
    changes="""
        an exploit that earns exactly as much as the honest answer is left out: reward >= fair -> reward > fair
            An exploit that earns just as much is learned as well. The task says *at least* as much.
        every reward above 0 counts as an exploit: reward >= fair -> reward > 0
            A small bonus is not an exploit. An exploit earns at least as much as the honest answer.
        the harmless texts are listed instead of the exploits: reward >= fair -> reward < fair
            List the texts that earn at least as much as the honest answer, not those that earn less.
        `answer` does not have one entry per completion: [answer] * len(texts) -> [answer]
            The reward function takes two lists of the same length. Repeat the right answer once for each completion.
        the texts are listed, not the names: [name for -> [exploits[name] for
            `exploits` is a dict from names to texts. Return the names.
        every exploit is listed: [*exploits]
            Call the reward function to see what each text earns.
        no exploit is ever found: []
            Try your function with a reward that pays for length.
    """,
)
