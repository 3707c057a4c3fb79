"""Right answers to the exercises of `grpo_edu.checks.own_task`, written in other ways than the reference."""

from __future__ import annotations

import re


def plain(text):
    return re.sub(r"\s+", " ", text).strip().lower()


def leaked_by_loop(train, heldout):
    found = []
    for question in heldout:
        if any(plain(question) == plain(other) for other in train):
            found.append(question)
    return found


def leaked_by_words(train, heldout):
    known = [question.upper().split() for question in train]
    return [question for question in heldout if question.upper().split() in known]


def leaked_by_filter(train, heldout):
    known = frozenset(map(plain, train))
    return list(filter(lambda question: plain(question) in known, heldout))


def worked_by_split(completions, answer, sums, **kwargs):
    paid = []
    for place, text in enumerate(completions):
        *before, last = text.split("####")
        signs = sum(part.count("=") for part in before)
        paid.append(1.0 if before and last.strip() == answer[place] and signs >= sums[place] else 0.0)
    return paid


def worked_by_pattern(completions, answer, sums, **kwargs):
    paid = []
    for text, right, count in zip(completions, answer, sums, strict=True):
        found = re.search(rf"####\s*{re.escape(right)}\s*$", text)
        paid.append(float(found is not None and text[: found.start()].count("=") >= count))
    return paid


def worked_by_product(completions, answer, sums, **kwargs):
    given = [text[text.rfind("####") + 4 :].strip() if "####" in text else None for text in completions]
    right = [one == other for one, other in zip(given, answer, strict=True)]
    enough = [text[: text.rfind("####")].count("=") >= count for text, count in zip(completions, sums, strict=True)]
    return [float(a * b) for a, b in zip(right, enough, strict=True)]


RIGHT_ANSWERS = {
    "leaked_questions": (leaked_by_loop, leaked_by_words, leaked_by_filter),
    "worked_reward": (worked_by_split, worked_by_pattern, worked_by_product),
}
