"""Exercises on a task of your own: find leaked held-out questions, and write a reward that reads a column."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from grpo_edu.checks.core import Call, Exercise, Part, call
from grpo_edu.problems.own import question_key

# ---- leaked_questions ----


def leaked_questions(train: Sequence[str], heldout: Sequence[str]) -> list[str]:
    """Return the held-out questions that are training questions too; letter case and white space make no difference."""
    known = {question_key(question) for question in train}
    return [one for one in heldout if question_key(one) in known]


_STORIES = (
    "Mia has {a} toys and loses {b}. How many toys are left?",
    "A shelf has {a} books. Ben takes {b} books. How many books are there?",
    "What is {a} + {b}?",
)


def _some_questions(rng: random.Random, rewrite: Callable[[str], str]) -> Call:
    """Five training questions; held out are three others, and three of the five as `rewrite` leaves them, one twice."""
    numbers = rng.sample(range(10, 99), 16)
    texts = [_STORIES[row % 3].format(a=numbers[2 * row], b=numbers[2 * row + 1]) for row in range(8)]
    train, leaked = texts[:5], [rewrite(text) for text in rng.sample(texts[:5], 3)]
    heldout = [*texts[5:], *leaked, leaked[0]]
    return call(train, rng.sample(heldout, len(heldout)))


_KNOWN = ["What is 2 + 3?", "Mia has 12 toys and loses 4. How many toys are left?", "A shelf has 30 books."]
# Other questions, which agree with one of these in numbers, words, beginning, end, or in all but the white space.
_NEAR = [
    "What is 3 + 2?",
    "What was 2 + 3?",
    "What is 2 + 3",
    "What is 2 + 35?",
    "is 2 + 3?",
    "What is 2 + 3? Explain.",
    "Mia has 1 2 toys and loses 4. How many toys are left?",
    "Ben has 12 toys and loses 4. How many toys are left?",
    "Mia has 12 toys and loses 5. How many toys are left?",
    "A shelf has 30 books. How many?",
    "Ashelf has 30 books.",
    "Has a shelf 30 books.",
]
_WRITTEN_OTHERWISE = ["\tWhat\nis   2 + 3? ", "What is 2 +\t\t3?", "A  shelf    has\r\n30 books.\n", "what IS  2 + 3?"]

check_leaked_questions = Exercise(
    leaked_questions,
    parts=(
        Part(
            "the same text",
            1,
            lambda rng: _some_questions(rng, str),
            always=(call(_KNOWN, [*_NEAR, _KNOWN[1], _KNOWN[0], _KNOWN[1]]), call([], _KNOWN)),
        ),
        Part("another letter case", 1, lambda rng: _some_questions(rng, str.upper)),
        Part(
            "other white space",
            1,
            lambda rng: _some_questions(rng, lambda text: f" {'  '.join(text.split())}\n"),
            always=(call(_KNOWN, _WRITTEN_OTHERWISE), call(_WRITTEN_OTHERWISE, _KNOWN)),
        ),
    ),
    changes="""
        letter case makes a difference:
            question_key(question) -> " ".join(question.split()); question_key(one) -> " ".join(one.split())
            `What` and `WHAT` are the same word. Bring both texts to one letter case before you compare.
        white space inside a question makes a difference:
            question_key(question) -> question.lower().strip(); question_key(one) -> one.lower().strip()
            `strip` removes white space at both ends only. `" ".join(text.split())` also turns white space inside the
            text into single spaces.
            or: question_key(question) -> question.lower(); question_key(one) -> one.lower()
        the texts are compared as they are: question_key(question) -> question; question_key(one) -> one
            Letter case and white space must not matter. Normalize both texts in the same way, then compare them.
        the questions are returned in another form: [one for -> [question_key(one) for
            Compare normalized texts, but return each question as it is in the held-out list.
        the training questions are returned:
            [one for one in train if question_key(one) in {question_key(other) for other in heldout}]
            Return the entries of the held-out list: these are the ones that you would remove from it.
        the clean questions are returned: in known -> not in known
            Return the questions that have to be removed, not those that can stay.
        a question that is held out twice is listed once: list(dict.fromkeys(leaked_questions(train, heldout)))
            Both rows are in the held-out file, and both count in its accuracy. List both.
        the questions are sorted: sorted(leaked_questions(train, heldout))
            Keep the order of the held-out list.
            or: sorted(set(leaked_questions(train, heldout)))
        the number of questions is returned: len(leaked_questions(train, heldout))
            Return the questions themselves.
    """,
)


# ---- worked_reward ----


def worked_reward(completions: Sequence[str], answer: Sequence[str], sums: Sequence[int], **kwargs: Any) -> list[float]:
    """Pay 1.0 if the text after the last `####` is the answer and enough equals signs come before it, else 0.0."""
    paid = []
    for text, right, count in zip(completions, answer, sums, strict=True):
        work, _, given = text.rpartition("####")
        paid.append(float(given.strip() == right and work.count("=") >= count))
    return paid


def _some_attempts(rng: random.Random) -> Call:
    """Nine completions, of which three earn the reward, in any order."""
    rows = []
    counts = rng.sample([1, 2, 3] * 3, 9)
    for place, count in enumerate(counts):
        number = rng.randrange(20, 90)
        steps = ["".join(f"{number - left}+{left}={number}. ") for left in range(count + 2, 0, -1)]
        enough, too_little, too_much = "".join(steps[:count]), "".join(steps[: count - 1]), "".join(steps)
        texts = (
            f"{enough}#### {number}",
            f"{too_much}#### {number}",
            f"{enough}#### {number + 1} #### {number}",
            f"{too_little}#### {number}",
            f"{'1+1=2. ' * count}#### {number + 7}",
            f"{enough}#### 1{number}",
            enough,
            f"{enough}#### {number + 7}",
            f"#### {number + 7}",
        )
        rows.append((texts[place], str(number), count))
    completions, answer, sums = (list(column) for column in zip(*rng.sample(rows, len(rows)), strict=True))
    return call(completions=completions, answer=answer, sums=sums, prompts=["?"] * len(rows))


# With the answer 30 and two sums. Whether a calculation is right makes no difference, nor does white space.
_PAID = (
    "64-34=30. 30+0=30. ####30",
    "64-34=30. 30+0=30. ####\t30 \n",
    "1=2=3. #### 30",
    "a == b #### 30",
    "64-34=31. #### 31 30+0=30 #### 30",
)
_NOT_PAID = (
    *(f"64-34=30. 30+0=30. #### {given}" for given in ("30.0", "30.", "+30", "030", "30 toys", "30 = 30", "")),
    "64-34=30. #### 30",
    "64-34=30. #### 30 #### 30",
    "64-34=30. 30+0=30.",
    "64-34=30. 30+0=30. ### 30",
)
_OTHERS = (
    ("1=1 2=2 #### blue", "blue", 2),
    ("1=1 2=2 #### Blue", "blue", 2),
    ("0-5=-5 #### -5", "-5", 1),
    ("1+1=2 #### x=2", "x=2", 1),
    ("1+1=2 #### x=2", "x=2", 2),  # the sign in the answer does not count
)
_ALWAYS = call(
    completions=[*_PAID, *_NOT_PAID, *(text for text, _, _ in _OTHERS)],
    answer=["30"] * len(_PAID + _NOT_PAID) + [right for _, right, _ in _OTHERS],
    sums=[2] * len(_PAID + _NOT_PAID) + [count for _, _, count in _OTHERS],
    prompts=["?"] * len(_PAID + _NOT_PAID + _OTHERS),
)

check_worked_reward = Exercise(
    worked_reward,
    parts=(
        Part("right and wrong, with enough work and with too little", 3, _some_attempts, draws=6, always=(_ALWAYS,)),
    ),
    changes="""
        equals signs after the last mark count as well: work.count("=") -> text.count("=")
            Only the text before the last mark is the working; an answer such as x=2 has an equals sign of its own.
        a right answer is paid even without enough work:
            given.strip() == right and work.count("=") >= count -> given.strip() == right
            That is the reward of the notebook. Here the work has to be shown, too: `sums` says how much of it.
        a wrong answer is paid if its work is long enough:
            given.strip() == right and work.count("=") >= count -> work.count("=") >= count
            Compare with the answer as well. Long work is easy to write.
        one of the two conditions is enough: right and work -> right or work
            Both must hold: the right answer *and* enough work.
        exactly enough work is not enough: >= count -> > count
            Two equals signs are enough where `sums` is 2. Compare with `>=`.
        more work than required is not paid: >= count -> == count
            More work is paid as well: count at *least* that many equals signs.
        all completions are measured by the first entry of `sums`: >= count -> >= sums[0]
            `sums` is a list with one entry per completion, as `answer` is.
        all completions are compared with the first answer: == right -> == answer[0]
            `answer` is a list with one entry per completion.
        the right digits anywhere earn the reward: given.strip() == right -> right in text
            Otherwise a number in the work counts as the answer, and so does 142 instead of 42. Compare what follows the
            last `####`.
        an answer that contains the right digits is paid: given.strip() == right -> right in given
            142 contains 42. The text after the mark must be the answer and nothing else.
        the first mark is used, not the last: rpartition -> partition
            A completion may correct itself. What follows the *last* `####` is its answer.
        half of the reward is paid for one of the two conditions:
            given.strip() == right and -> (given.strip() == right) / 2 +;
            work.count("=") >= count -> (work.count("=") >= count) / 2
            Work with a wrong answer earns nothing here, and neither does an answer without its work.
        one number for the whole batch: sum(worked_reward(completions, answer, sums)) / len(completions)
            A reward function returns one number per completion.
        a wrong answer earns −1: paid.append(float( -> paid.append(2.0 * (; >= count)) -> >= count) - 1)
            A wrong answer earns 0 here. With a penalty it would be a different reward.
    """,
)
