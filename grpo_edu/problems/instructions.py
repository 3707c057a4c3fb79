"""Verifiable instructions: one sentence about a topic under a constraint that a program can check.

The idea is that of IFEval (Zhou et al. 2023, arXiv 2311.07911) and of reinforcement learning with verifiable rewards in
Tülu 3 (Lambert et al. 2024, arXiv 2411.15124). There are ten kinds of constraint. The set ``instructions`` has one of
them per problem, in turn; ``instructions_two`` has two.

The `answer` of a problem is a JSON object such as ``{"topic": "the sea", "max_words": 10}``. It determines the question
(`instruction_text`) and how a completion is checked (`check_instruction`), so that nothing else needs to be stored.
Training and held-out problems differ in all topics, words and phrases.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

from grpo_edu.problems.templates import PROBLEM_SETS, Problem, ProblemSet, Scorer, check_column
from grpo_edu.prompts import Completion, completion_text

INSTRUCTIONS = "instructions"
INSTRUCTIONS_TWO = "instructions_two"
SET_PREFIX = "instructions:"  # begins the level of every instruction
SIZES = {"train": 600, "heldout": 300}

_TOPICS = {
    "train": "a river, a book, a school, music, the moon, a garden, winter, a bridge, a train, bread, a doctor, a "
    "forest, a letter, a market, football, a horse, the desert, a teacher, a cake, the weather, a bicycle, an island, "
    "a mirror, a lake, summer, a village, a clock, a castle, coffee, a farmer, a window, a mountain, a ship, a tree, "
    "an airport, a museum, a dog, a kitchen, rain, a hospital, a shoe, the city, a star, a chair, a camera, a song, "
    "paper, an elephant, the internet, a king, chess, a boat, a neighbor, money, a storm, the theater, sleep, a robot, "
    "honey, a map, a valley, silence, a newspaper, a candle, a wolf, milk",
    "heldout": "the sea, a cat, autumn, a library, tea, a road, an engineer, the sun, a hotel, a piano, snow, a bird, "
    "a wedding, the beach, a computer, a painting, an apple, a queen, a volcano, fire, a rose, spring, a fish, "
    "a nurse, a dream, cheese, the wind, a tower, a drum, a pencil, a lion, rice, a party, a planet, a sister, gold",
}
# A list for each part: words to begin with, words to use, and phrases to end with.
_BEGINNINGS = {"train": "Sometimes, Often, Perhaps, Usually, Now", "heldout": "Today, Maybe, Here"}
_WORDS = {
    "train": "bright, quiet, strange, useful, warm, simple, famous, dark, gentle, busy",
    "heldout": "calm, old, precious, lively, noisy",
}
_ENDINGS = {
    "train": "every single day, in the end, all the time, for a while, as we know",
    "heldout": "most of the time, at last, for many years",
}


def _words(text: str) -> list[str]:
    """Return the words of a text in lower case; the parts of a hyphenated word count separately."""
    return re.findall(r"\w+(?:['’]\w+)*", text.lower())


_CLOSING = "\"”'’)"  # what may stand behind the mark that ends a sentence
_GAP = re.compile(rf"(?<=[.!?])(?P<closing>[{_CLOSING}]*)\s+")
# At the end of a text: titles, after which a sentence goes on; and initials and abbreviations, which may end it.
_TITLE = re.compile(r"\b(?:dr|mr|mrs|ms|prof|vs|e\.g|i\.e|fig)\.$", re.IGNORECASE)
_ABBREVIATION = re.compile(
    r"\b(?:[A-Z]|(?i:[a-z](?:\.[a-z])+|ph\.d|etc|jr|sr|st|mt|no|inc|ltd|co|corp|gen|col|capt|lt|rev|gov|sen|approx|"
    r"jan|feb|aug|sept|oct|nov|dec))\.$"
)
_NEXT_WORD = re.compile(r"[\"“‘'(]*([A-Z]\w*)(?!\w|\.)")


def _sentences(text: str) -> list[str]:
    """The sentences of a text, by rules.

    A `.`, `!` or `?` before a space ends a sentence, except after a title ("Dr."). After an initial or an abbreviation
    with a capital letter ("J. K. Rowling", "U.S.") the next sentence must begin with a function word, such as "The";
    after one without ("p.m."), with a capital letter. After a closing quotation mark or "..." a word in lower case goes
    on with the sentence ('"Is it?" she asked.').
    """
    sentences, start = [], 0
    for gap in _GAP.finditer(text):
        before, after = text[start : gap.start()], text[gap.end() :]
        if gap["closing"] or before.endswith(".."):
            ends = not after[:1].islower()
        elif _TITLE.search(before):
            ends = False
        elif abbreviation := _ABBREVIATION.search(before):
            word = _NEXT_WORD.match(after)
            ends = word is not None and (abbreviation[0].islower() or word[1].lower() in _FUNCTION_WORDS)
        else:
            ends = True
        if ends:
            sentences.append(before)
            start = gap.end()
    return [*sentences, text[start:]]


def _contains(text: str, phrase: str) -> bool:
    """Whether the words of a phrase occur in a text, one behind the other, in capitals or not."""
    return f" {' '.join(_words(phrase))} " in f" {' '.join(_words(text))} "


@dataclass(frozen=True)
class Constraint:
    """One kind of constraint.

    text: the instruction, with a place for each argument. holds: text, argument → whether it is obeyed.
    draw: random numbers, part → argument, where "train" and "heldout" are the parts.
    """

    text: str
    holds: Callable[[str, Any], bool]
    draw: Callable[[random.Random, str], Any] = lambda rng, part: True


def _chosen(lists: dict[str, str], count: int = 1) -> Callable[[random.Random, str], Any]:
    def draw(rng: random.Random, part: str) -> Any:
        drawn = rng.sample(lists[part].split(", "), count)
        return drawn if count > 1 else drawn[0]

    return draw


CONSTRAINTS: dict[str, Constraint] = {
    "no_comma": Constraint("Do not use any comma.", lambda text, _: not re.search("[,،、，]", text)),
    "question": Constraint("Write it as a question.", lambda text, _: text.endswith("?")),
    "lower_case": Constraint(
        "Use only lower-case letters, even at the beginning.", lambda text, _: text == text.lower() != text.upper()
    ),
    "max_words": Constraint(
        "Use at most {} words.",
        lambda text, most: 0 < len(_words(text)) <= most,
        lambda rng, part: rng.choice([11, 12, 13]),
    ),
    "begin": Constraint(
        'Begin with the word "{}".',
        lambda text, word: _words(text)[: len(_words(word))] == _words(word),
        _chosen(_BEGINNINGS),
    ),
    "word": Constraint('Use the word "{}".', _contains, _chosen(_WORDS)),
    "two_words": Constraint(
        'Use the words "{}" and "{}".',
        lambda text, words: all(_contains(text, word) for word in words),
        _chosen(_WORDS, 2),
    ),
    "end": Constraint(
        'End with the words "{}".',
        lambda text, phrase: _words(text)[-len(_words(phrase)) :] == _words(phrase),
        _chosen(_ENDINGS),
    ),
    "sentences": Constraint(
        "Write exactly {} sentences.",
        lambda text, number: len(_sentences(text)) == number and text.rstrip(_CLOSING)[-1:] in ".!?",
        lambda rng, part: rng.choice([2, 3]),
    ),
    "exclamation": Constraint("End with an exclamation mark.", lambda text, _: text.endswith("!")),
}
# Pairs that contradict each other, or of which one makes the other unclear.
_APART = (
    {"question", "exclamation", "end"},
    {"question", "sentences"},
    {"lower_case", "begin"},
    {"word", "two_words"},
    {"max_words", "sentences"},
    {"max_words", "two_words"},
    {"max_words", "end"},
)
PAIRS = [pair for pair in combinations(CONSTRAINTS, 2) if not any(apart.issuperset(pair) for apart in _APART)]

# An apology, or a text about the instruction in place of the topic.
_ASIDE = re.compile(
    r"\b(sentences?|commas?|lower[- ]?case|exclamation|instructions?|sorry|apologi[sz]e|as an ai|assistant|"
    r"language model|unable to|i (can(?:'t|not| not)|will not|won't))\b"
)
_ORDINARY = re.compile(r"[\w\s.,;:!?'\"’‘“”()–—-]+")
_FEWEST_WORDS = 6  # different ones, in the whole answer
_FEWEST_IN_A_SENTENCE = 4
_SHARE_OF_DIFFERENT_WORDS = 0.6
_COPIED_WORDS = 5  # in a row
_FUNCTION_WORDS = frozenset(
    "a an the and or but if as that this these those it its he she they we you i me my your our their his her them us "
    "is are was were be been has have had do does did can could will would should may might must not no so to of in on "
    "at by for from with about into over under through between what who which when where why how there than then "
    "many most some all every each more".split()
)
_SHARE_OF_FUNCTION_WORDS = 0.25  # English prose has about 0.45


@dataclass(frozen=True)
class InstructionCheck:
    """The parts of an instruction that a completion obeys.

    obeyed: kind of constraint → whether it is obeyed. on_topic: whether the topic's word occurs.
    sentence_form: whether it has the form of sentences, by the rules of `has_sentence_form`.
    """

    obeyed: dict[str, bool]
    on_topic: bool
    sentence_form: bool

    @property
    def passed(self) -> bool:
        """True if every constraint is obeyed by an answer on the topic that has sentence form."""
        return all(self.obeyed.values()) and self.on_topic and self.sentence_form


def parse_constraints(answer: object) -> dict[str, Any]:
    """Return the constraints in the answer of a problem: kind → argument, and the topic.

    Raises ValueError for what is no such answer, or names a kind that cannot be checked.
    """
    try:
        found = json.loads(answer) if isinstance(answer, str) else None
    except ValueError:
        found = None
    if not isinstance(found, dict) or "topic" not in found:
        raise ValueError(
            'answer must hold the constraints of an instruction, such as {"topic": "the sea", "question": true}, '
            f"got {answer!r}; use the problems of --data {INSTRUCTIONS}"
        )
    unknown = [kind for kind in found if kind != "topic" and kind not in CONSTRAINTS]
    if unknown or len(found) == 1:
        named = f"the constraint {unknown[0]!r} cannot be checked" if unknown else "there is no constraint"
        raise ValueError(f"answer: {named}; use one of {', '.join(CONSTRAINTS)}")
    return found


def instruction_text(constraints: dict[str, Any]) -> str:
    """Return the question that the constraints stand for.

    >>> instruction_text({"topic": "the sea", "max_words": 10})
    'Write one sentence about the sea. Use at most 10 words.'
    """
    parts = [f"Write {'' if 'sentences' in constraints else 'one sentence '}about {constraints['topic']}."]
    for kind, argument in constraints.items():
        if kind != "topic":
            parts.append(CONSTRAINTS[kind].text.format(*(argument if isinstance(argument, list) else [argument])))
    return " ".join(parts)


def check_instruction(completion: str | list[dict], answer: str) -> InstructionCheck:
    """Check a completion against the constraints in the answer of its problem; raises ValueError for another answer.

    >>> check_instruction("The sea hides many quiet secrets", '{"topic": "the sea", "question": true}')
    InstructionCheck(obeyed={'question': False}, on_topic=True, sentence_form=False)
    """
    constraints = parse_constraints(answer)
    text = completion_text(completion).strip()
    if len(text) > 1 and text[0] in '"“' and text[-1] in '"”':
        text = text[1:-1].strip()
    obeyed = {
        kind: CONSTRAINTS[kind].holds(text, argument) for kind, argument in constraints.items() if kind != "topic"
    }
    return InstructionCheck(obeyed, bool(_mentions(text, constraints["topic"])), has_sentence_form(text, constraints))


def has_sentence_form(text: str, constraints: dict[str, Any]) -> bool:
    """Return True if an answer has the form of sentences: rules against exploits of constraint and topic rewards.

    The rules count and compare words. They know no grammar and no sense, so nonsense with function words can pass.

    - It consists of complete sentences, as many as were asked for, of at least four words each.
    - It has at least six different words, few are repeated, and a quarter are words such as "the", "is" and "of", so
      that it is not a list of keywords.
    - A sentence names the topic at most once, so that "A book is a book!" does not pass.
    - It is not an apology, does not talk about the instruction, and copies no five words of it in a row.

    >>> has_sentence_form("The the of road is and to a.", {"topic": "a road", "no_comma": True})
    True
    """
    words, sentences = _words(text), _sentences(text)
    asked = _words(instruction_text(constraints))
    runs = {tuple(asked[start : start + _COPIED_WORDS]) for start in range(len(asked) - _COPIED_WORDS + 1)}
    return (
        bool(_ORDINARY.fullmatch(text))
        and "\n" not in text
        and all(sentence.rstrip(_CLOSING)[-1:] in ".!?" for sentence in sentences)
        and len(sentences) == constraints.get("sentences", 1)
        and min(len(_words(sentence)) for sentence in sentences) >= _FEWEST_IN_A_SENTENCE
        and len(set(words)) >= max(_FEWEST_WORDS, _SHARE_OF_DIFFERENT_WORDS * len(words))
        and sum(word in _FUNCTION_WORDS for word in words) >= _SHARE_OF_FUNCTION_WORDS * len(words)
        and max(_mentions(sentence, constraints["topic"]) for sentence in sentences) <= 1
        and not _ASIDE.search(text.lower().replace("’", "'"))
        and not any(tuple(words[start : start + _COPIED_WORDS]) in runs for start in range(len(words)))
    )


def _mentions(text: str, topic: str) -> int:
    """Return how often the topic's word, or its plural, occurs."""
    word = topic.lower().split()[-1]
    forms = {word, word + "s", word + "es", word[:-1] + "ies"}
    return sum(one.removesuffix("'s").removesuffix("’s") in forms for one in _words(text))


def make_instructions(n: int, seed: int, part: str = "train", *, constraints: int = 1) -> list[Problem]:
    """Draw `n` different instructions; the kinds of constraint, or the pairs of kinds, take turns.

    n: number of problems. seed: random seed. part: "train" or "heldout", which share no topic, word or phrase.
    constraints: 1 or 2 per problem.

    Raises ValueError if there are fewer than `n` different instructions.

    >>> [problem.prompt for problem in make_instructions(2, seed=0)]
    ['Write one sentence about a bicycle. Do not use any comma.',
     'Write one sentence about a boat. Write it as a question.']
    """
    rng = random.Random(f"{INSTRUCTIONS}-{constraints}-{part}-{seed}")
    turns: Sequence[tuple[str, ...]] = PAIRS if constraints == 2 else [(kind,) for kind in CONSTRAINTS]
    found: dict[str, Problem] = {}
    for _ in range(50 * n):
        if len(found) == n:
            return list(found.values())
        kinds = turns[len(found) % len(turns)]
        arguments = {kind: CONSTRAINTS[kind].draw(rng, part) for kind in kinds}
        asked = {"topic": rng.choice(_TOPICS[part].split(", ")), **arguments}
        level = f"{SET_PREFIX}{kinds[0] if constraints == 1 else 'two'}"
        problem = Problem(instruction_text(asked), json.dumps(asked), level, _example(asked))
        found.setdefault(problem.prompt, problem)
    raise ValueError(f"n must be at most {len(found)}, the number of different {part} instructions found, got {n}")


def instruction_problems(name: str, split: str) -> list[Problem]:
    """Return the "train" or "heldout" problems of `INSTRUCTIONS` or `INSTRUCTIONS_TWO`; they never change."""
    return make_instructions(SIZES[split], 0, split, constraints=2 if name == INSTRUCTIONS_TWO else 1)


def _example(asked: dict[str, Any]) -> str:
    """Return a plain answer that obeys the constraints."""
    subject = "do many people" if "question" in asked else "many people"
    used = asked.get("two_words", [asked["word"]] if "word" in asked else [])
    parts = [asked.get("begin", ""), subject, "think fondly about", asked["topic"], *(["and call it"] if used else [])]
    sentences = [" ".join(filter(None, [*parts, " and ".join(used)]))]
    sentences += ["they talk about it with friends", "it matters to them"][: asked.get("sentences", 1) - 1]
    if "end" in asked:
        sentences[-1] += " " + asked["end"]
    text = ". ".join(sentence[0].upper() + sentence[1:] for sentence in sentences)
    text += "?" if "question" in asked else "!" if "exclamation" in asked else "."
    return text.lower() if "lower_case" in asked else text


def constraint_reward(
    completions: Sequence[Completion], answer: list, level: list | None = None, **kwargs: Any
) -> list[float | None]:
    """1.0 if a completion obeys every constraint of its instruction, whatever else it says; else 0.0.

    This is the naive reward of notebook 14: a policy learns to obey, and leaves the topic.

    Args:
        answer: B answers of the problems of `grpo_edu.problems.instructions`.
        level: B levels; the function does not apply to (returns None for) problems of other sets.

    Raises ValueError for an answer without constraints, or with one that cannot be checked.

    >>> asked = '{"topic": "the sea", "question": true}'
    >>> constraint_reward(["What is the capital of?", "The sea is wide and calm."], answer=[asked, asked])
    [1.0, 0.0]
    """
    return _instruction_rewards(completions, answer, level, lambda check: all(check.obeyed.values()))


def topic_reward(
    completions: Sequence[Completion], answer: list, level: list | None = None, **kwargs: Any
) -> list[float | None]:
    """1.0 if a completion obeys every constraint of its instruction and names the topic; else 0.0.

    Arguments and errors are those of `constraint_reward`.

    >>> asked = '{"topic": "the sea", "exclamation": true}'
    >>> topic_reward(["The sea is a sea!", "What a day!"], answer=[asked, asked])
    [1.0, 0.0]
    """
    return _instruction_rewards(completions, answer, level, lambda check: all(check.obeyed.values()) and check.on_topic)


def instruction_reward(
    completions: Sequence[Completion], answer: list, level: list | None = None, **kwargs: Any
) -> list[float | None]:
    """1.0 if a completion obeys every constraint of its instruction, names the topic and has sentence form; else 0.0.

    `grpo_edu.problems.instructions.has_sentence_form` has the rules of sentence form. The accuracy on these problems is
    the mean of this reward. Arguments and errors are those of `constraint_reward`.

    >>> asked = '{"topic": "the sea", "exclamation": true}'
    >>> instruction_reward(["The sea is a sea!", "How calm the sea looks this morning!"], answer=[asked, asked])
    [0.0, 1.0]
    """
    return _instruction_rewards(completions, answer, level, lambda check: check.passed)


def _instruction_rewards(
    completions: Sequence[Completion], answer: list, level: list | None, paid: Callable[[InstructionCheck], bool]
) -> list[float | None]:
    check_column("answer", answer, len(completions))
    levels = [SET_PREFIX] * len(completions) if level is None else level
    return [
        float(paid(check_instruction(completion, truth))) if own.startswith(SET_PREFIX) else None
        for completion, truth, own in zip(completions, answer, levels, strict=True)
    ]


def _score(completion: str | list[dict], question: str | list[dict], level: str, answer: str) -> float:
    return float(check_instruction(completion, answer).passed)


def _written(completion: str | list[dict]) -> str | None:
    return completion_text(completion).strip() or None


INSTRUCTION_REWARDS = {"constraint": constraint_reward, "topic": topic_reward, "instruction": instruction_reward}

_SCORER = Scorer(_written, _score, system_prompt=False)
_LENGTH = 48  # tokens of three sentences
PROBLEM_SETS |= {
    name: ProblemSet(about, None, partial(instruction_problems, name), SET_PREFIX, _SCORER, _LENGTH)
    for name, about in {
        INSTRUCTIONS: "write a sentence under a constraint",
        INSTRUCTIONS_TWO: "write a sentence under two constraints",
    }.items()
}
