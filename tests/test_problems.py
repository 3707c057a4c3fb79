"""Problems: the same everywhere, varied, apart from the held-out ones, and right by an independent computation."""

import itertools
import random
import re
from collections import Counter
from fractions import Fraction

import pytest

from grpo_edu.problems import templates as problems
from grpo_edu.problems.files import load_problems
from grpo_edu.problems.templates import (
    DOMAINS,
    ITEMS,
    LEVELS,
    NAMES,
    STORIES,
    Problem,
    Story,
    draw_problem,
    fill_story,
    make_problems,
    make_split,
    problem_key,
)
from grpo_edu.prompts import extract_answer, normalize_answer
from grpo_edu.rewards import accuracy_reward, format_reward, steps_reward

ALL = LEVELS + DOMAINS
every_level = pytest.mark.parametrize("level", LEVELS)
every_kind = pytest.mark.parametrize("level", ALL)

# How each story is solved, read off its text by a person: a phrase that no other story has, and a formula over the
# numbers in the order in which the text names them. It knows nothing of the steps that the package computes with.
ORACLE = {
    # basic
    "more. Then": lambda a, b, c: a + b - c,
    "people on a bus": lambda off_from, off, on: off_from - off + on,
    "hens": lambda hens, ducks, goats: hens + ducks + goats,
    "a hat costs": lambda saved, bag, hat: saved - (bag + hat),
    "pages on Tuesday": lambda monday, tuesday, book: book - (monday + tuesday),
    "did they pick together": lambda one, fewer: one + (one - fewer),
    "sum of their ages": lambda age, older: age + (age + older),
    "stayed sold": lambda morning, afternoon, returned: morning + afternoon - returned,
    "before lunch": lambda before, after, whole: whole - (before + after),
    "takes out": lambda tank, out, into: tank - out + into,
    "The red team": lambda first, second, blue: first + second - blue,
    "seats are free": lambda seats, children, adults: seats - children - adults,
    "degrees at noon": lambda noon, rise, fall: noon + rise - fall,
    "muffins": lambda cookies, muffins, eaten: cookies + muffins - eaten,
    # intermediate
    "are broken, and": lambda boxes, each, broken, new: boxes * each - broken + new,
    "trays": lambda trays, each, morning, noon: trays * each - (morning + noon),
    "share all of them equally": lambda one, two, friends, had: Fraction(one + two, friends) + had,
    "a snack costs": lambda ticket, snack, friends, paid: paid - friends * (ticket + snack),
    "miles each day": lambda daily, days, more, less: daily * days + more - less,
    "desks": lambda rows, each, out, groups: Fraction(rows * each - out, groups),
    "dollars an hour": lambda hourly, hours, lunch, bus: hourly * hours - (lunch + bus),
    "has ropes of": lambda feet, parts, tied, added: Fraction(feet, parts) * tied + added,
    "times as many. Together": lambda one, times, gone: one + one * times - gone,
    "tulips": lambda roses, tulips, wither, vase: Fraction(roses + tulips - wither, vase),
    "on the way": lambda box, children, given, found: Fraction(box, children) - given + found,
    "coaches": lambda teams, players, coaches, ill: teams * players + teams * coaches - ill,
    "A pack of pens": lambda pack, packs, off, parts: Fraction(pack * packs - off, parts),
    "bottles a minute": lambda rate, minutes, thrown, added: rate * minutes - thrown + added,
    # advanced
    "pieces break": lambda boxes, each, more, other, broken: boxes * each + more * other - broken,
    "adults pay": lambda a, price, c, fare, families: Fraction(a * price + c * fare, families),
    "dollars a day": lambda had, daily, days, books, price: had + daily * days - books * price,
    "bags are sold": lambda each, trees, bad, bag, sold: Fraction(each * trees - bad, bag) - sold,
    "miles an hour": lambda fast, hours, slow, more, trip: trip - fast * hours - slow * more,
    "girls": lambda girls, boys, team, each, kept: Fraction(girls + boys, team) * each + kept,
    "friend of theirs": lambda own, times, fewer, piles: Fraction(own + (own * times - fewer), piles),
    "lamps": lambda lamps, bought, sold, rent, owners: Fraction(lamps * sold - lamps * bought - rent, owners),
    "equal blocks": lambda rows, each, added, blocks, broken: Fraction(rows * each + added, blocks) - broken,
    "pages a day": lambda daily, days, slow, later, more: daily * days + slow * later + more,
    "cans of": lambda tank, hourly, hours, cans, each: tank - hourly * hours + cans * each,
    "cakes": lambda cakes, price, pies, cost, flour: cakes * price + pies * cost - flour,
    "guides": lambda buses, each, off, group, guides: Fraction(buses * each - off, group) * guides,
    "dollars a week": lambda one, weeks, two, more, tent: one * weeks + two * more - tent,
}


def numbers_of(text: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", text)]


def story_of(prompt: str) -> str:
    """The one phrase of the oracle that a prompt holds."""
    found = [phrase for phrase in ORACLE if phrase in prompt]
    assert len(found) == 1, f"{found} in {prompt!r}"
    return found[0]


def solve(prompt: str, level: str) -> str:
    """The answer to a prompt, worked out from its text alone."""
    if level == "sorting":
        numbers = sorted(numbers_of(prompt), reverse="from large to small" in prompt)
        assert ("from large to small" in prompt) != ("from small to large" in prompt)
        return ", ".join(map(str, numbers))
    if level == "coin_flip":
        verbs = re.findall(r"\b(\w+) it\.", prompt)
        assert set(verbs) <= {"flips", "turns", "leaves", "keeps"} and len(verbs) == prompt.count(".") - 1
        turned = sum(verb in ("flips", "turns") for verb in verbs) % 2
        return ("heads", "tails")[turned ^ ("shows tails" in prompt)]
    answer = Fraction(ORACLE[story_of(prompt)](*numbers_of(prompt)))
    assert answer.denominator == 1 and answer > 0, prompt
    return str(answer.numerator)


@pytest.fixture(scope="module")
def shipped() -> dict[tuple[str, str], list[Problem]]:
    return {(level, split): load_problems(level, split) for level in ALL for split in ("train", "heldout")}


@pytest.fixture(scope="module")
def drawn() -> dict[str, list[Problem]]:
    return {level: make_problems(level, 1000, seed=123) for level in ALL}


# Drawing


@every_kind
def test_a_seed_decides_the_problems(level):
    assert make_problems(level, 50, seed=5) == make_problems(level, 50, seed=5)
    assert make_problems(level, 50, seed=5) != make_problems(level, 50, seed=6)
    random.seed(99)  # the global generator has no part in it, and is left alone
    state = random.getstate()
    make_problems(level, 5, seed=5)
    assert random.getstate() == state


def test_these_problems_come_out_on_every_machine():
    first = {level: make_problems(level, 1, seed=7)[0] for level in ALL}
    assert first["basic"] == Problem(
        "A farm has 19 hens, 59 ducks and 58 goats. How many animals live on the farm?",
        "136",
        "basic",
        "19+59=78. 78+58=136. #### 136",
    )
    assert first["intermediate"].solution == "61+65=126. 126/7=18. 18+11=29. #### 29"
    assert first["advanced"].prompt.startswith("A farmer picks 8 apples from each of 5 trees. 25 are bad.")
    assert first["sorting"] == Problem(
        "Sort 50, 96, 23 from large to small.", "96, 50, 23", "sorting", "50 96 23: 96. 50 23: 50. #### 96, 50, 23"
    )
    assert first["coin_flip"].solution == (
        "heads. Cleo keeps: heads. Kira leaves: heads. Leo leaves: heads. Nico leaves: heads. #### heads"
    )


@every_kind
def test_the_shipped_files_are_what_the_generators_make(level, shipped):
    train, heldout = make_split(level, 1000, 400, seed=0)
    assert shipped[level, "train"] == train
    assert shipped[level, "heldout"] == heldout


@every_kind
def test_no_problem_comes_twice_and_each_names_its_level(level, drawn):
    assert len({problem_key(problem) for problem in drawn[level]}) == 1000
    assert len({problem.solution for problem in drawn[level]}) == 1000
    assert {problem.level for problem in drawn[level]} == {level}


@every_kind
def test_a_split_shares_nothing_and_has_the_sizes_asked_for(level):
    train, heldout = make_split(level, 60, 40, seed=2)
    assert (len(train), len(heldout)) == (60, 40)
    assert not {problem_key(problem) for problem in train} & {problem_key(problem) for problem in heldout}


# Variety


def without_slots(text: str) -> str:
    """A prompt with its names, things and numbers taken out."""
    return re.sub(rf"\b({'|'.join(NAMES + ITEMS)})\b", "_", re.sub(r"\d+", "#", text))


@every_level
def test_a_level_has_a_dozen_stories_that_all_get_drawn(level, drawn):
    texts = {without_slots(problem.prompt) for problem in drawn[level]}
    assert len(texts) >= 12
    assert len({story_of(problem.prompt) for problem in drawn[level]}) >= 12
    most = Counter(story_of(problem.prompt) for problem in drawn[level]).most_common(1)[0][1]
    assert most < 1000 / 6  # none outweighs the others


def test_no_two_stories_are_one_sentence_with_other_names():
    texts = [story.text for level in LEVELS for story in STORIES[level]]
    bags = [set(re.findall(r"[a-z]+", re.sub(r"\{\w+\}", "", text).lower())) for text in texts]
    for one, other in itertools.combinations(range(len(bags)), 2):
        shared = len(bags[one] & bags[other]) / len(bags[one] | bags[other])
        assert shared < 0.6, (texts[one], texts[other])


def test_the_oracle_knows_every_story_and_no_other():
    assert len(ORACLE) == sum(len(STORIES[level]) for level in LEVELS) == 42
    rng = random.Random(0)
    found = {story_of(fill_story(story, level, rng).prompt) for level in LEVELS for story in STORIES[level]}
    assert found == set(ORACLE)


def test_the_domains_vary():
    sorting, coins = (make_problems(level, 400, seed=1) for level in ("sorting", "coin_flip"))
    assert {len(numbers_of(problem.prompt)) for problem in sorting} == {3, 4, 5}
    assert {problem.prompt.split()[0] for problem in sorting} == {"Sort", "Put", "Write"}
    assert {problem.prompt.count(" it.") for problem in coins} == {3, 4, 5}
    heads = sum(problem.answer == "heads" for problem in coins)
    assert 140 < heads < 260  # guessing one side always does not pay: within 6 standard deviations of half


# Worked solutions


EQUATION = re.compile(r"(\d+)([-+*/])(\d+)=(\d+)\.")


@pytest.mark.parametrize(
    "level, steps, signs", [("basic", {2}, "+-"), ("intermediate", {3}, "+-*/"), ("advanced", {4}, "+-*/")]
)
def test_a_level_has_its_steps_and_operations(level, steps, signs, drawn):
    equations = [EQUATION.findall(problem.solution) for problem in drawn[level]]
    assert {len(found) for found in equations} == steps
    assert {sign for found in equations for _, sign, _, _ in found} == set(signs)
    if level != "basic":  # each has a multiplication or a division
        assert all({"*", "/"} & {sign for _, sign, _, _ in found} for found in equations)


@every_level
def test_a_worked_solution_goes_from_the_prompt_to_the_answer_by_right_equations(level, drawn, shipped):
    for problem in drawn[level] + shipped[level, "train"] + shipped[level, "heldout"]:
        body, answer = problem.solution.split(" #### ")
        known = set(numbers_of(problem.prompt))
        for left, sign, right, result in EQUATION.findall(body):
            a, b, c = int(left), int(right), int(result)
            assert a in known and b in known, problem
            exact = {"+": Fraction(a + b), "-": Fraction(a - b), "*": Fraction(a * b), "/": Fraction(a, b)}[sign]
            assert exact == c > 0, problem
            known.add(c)
        assert " ".join(match[0] for match in EQUATION.finditer(body)) == body  # nothing but equations
        assert str(c) == answer == problem.answer


def test_a_sorting_solution_takes_the_next_number_each_time(drawn):
    for problem in drawn["sorting"]:
        lines = problem.solution.split(" #### ")[0].rstrip(".").split(". ")
        left = numbers_of(problem.prompt)
        assert len(lines) == len(left) - 1
        for line in lines:
            shown, pick = (numbers_of(part) for part in line.split(": "))
            assert shown == left
            assert pick == [max(left) if "large to small" in problem.prompt else min(left)]
            left.remove(pick[0])


def test_a_coin_solution_says_the_side_after_each_person(drawn):
    for problem in drawn["coin_flip"]:
        told = problem.prompt.split(". ")
        first, *lines = problem.solution.split(" #### ")[0].rstrip(".").split(". ")
        assert told[0] == f"A coin shows {first}" and len(lines) == len(told) - 2
        for place, line in enumerate(lines, start=1):
            person_and_verb, side = line.split(": ")
            assert told[place] == f"{person_and_verb} it"
            assert side == solve(". ".join(told[: place + 1]) + ".", "coin_flip")


@every_kind
def test_a_worked_solution_earns_every_reward(level, drawn):
    chosen = drawn[level][:200]
    solutions = [problem.solution for problem in chosen]
    found = [extract_answer(solution) for solution in solutions]
    assert found == [normalize_answer(problem.answer) for problem in chosen]
    assert set(accuracy_reward(solutions, answer=[problem.answer for problem in chosen])) == {1.0}
    assert set(format_reward(solutions)) == {1.0}
    if level in LEVELS:
        assert set(steps_reward(solutions)) == {1.0}


# Answers


@every_kind
def test_every_shipped_answer_is_right_by_an_independent_computation(level, shipped):
    for split in ("train", "heldout"):
        for problem in shipped[level, split]:
            assert problem.answer == solve(problem.prompt, level), problem


@every_kind
def test_fresh_answers_are_right_by_an_independent_computation(level, drawn):
    assert all(problem.answer == solve(problem.prompt, level) for problem in drawn[level])


def test_reasoning_gym_scores_the_sorting_answers_as_right_and_a_swap_as_wrong(shipped, reasoning_gym):
    from reasoning_gym import get_score_answer_fn

    score = get_score_answer_fn("number_sorting")
    for problem in shipped["sorting", "heldout"]:
        descending = "large to small" in problem.prompt
        expected = [str(number) for number in sorted(numbers_of(problem.prompt), reverse=descending)]
        entry = {"answer": str(expected), "metadata": {"direction": "descending" if descending else "ascending"}}
        given = problem.answer.split(", ")
        assert score(str(given), entry) == 1.0
        given[0], given[1] = given[1], given[0]
        assert score(str(given), entry) == 0.0


# Held out


@every_kind
def test_train_and_heldout_share_no_problem(level, shipped):
    train, heldout = shipped[level, "train"], shipped[level, "heldout"]
    assert len(heldout) >= 300
    for same in (lambda problem: problem.prompt, lambda problem: problem.solution):
        assert not {same(problem) for problem in train} & {same(problem) for problem in heldout}
        assert len({same(problem) for problem in train + heldout}) == len(train) + len(heldout)


@every_level
def test_train_and_heldout_share_no_story_with_the_same_numbers(level, shipped):
    def told(problem):  # whoever it is told of, and with whatever things
        return story_of(problem.prompt), tuple(numbers_of(problem.prompt))

    assert not {told(p) for p in shipped[level, "train"]} & {told(p) for p in shipped[level, "heldout"]}


# Bad input


def test_an_unknown_level_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="level must be one of basic, intermediate.*got 'hard'"):
        make_problems("hard", 1, seed=0)


@pytest.mark.parametrize("n", [0, -3])
def test_less_than_one_problem_is_refused(n):
    with pytest.raises(ValueError, match=rf"n must be at least 1, got {n}"):
        make_problems("basic", n, seed=0)


def test_more_problems_than_there_are_is_refused_with_the_number_there_are(monkeypatch):
    only = Story("{name} has {a} and {b} {item}. How many?", "c = a + b", {"a": (1, 2), "b": (1, 2)})
    monkeypatch.setitem(problems.STORIES, "basic", (only,))
    assert len(make_problems("basic", 3, seed=0)) == 3  # 1 and 2 in either order are one problem
    with pytest.raises(ValueError, match="n must be at most 3.*basic.*got 4"):
        make_problems("basic", 4, seed=0)


def test_steps_that_leave_the_whole_numbers_are_drawn_again():
    odd = Story("{a} shared among {b}", "c = a / b; d = c - b", {"a": (1, 9), "b": (1, 9)})
    rng = random.Random(0)
    seen = {fill_story(odd, "basic", rng).prompt for _ in range(300)}
    whole = {f"{a} shared among {b}" for a in range(1, 10) for b in range(1, 10) if a % b == 0 and a // b > b}
    assert seen == whole


def test_drawing_goes_on_from_where_the_generator_stands():
    rng = random.Random(3)
    first, second = draw_problem("basic", rng), draw_problem("basic", rng)
    assert first != second
    assert draw_problem("basic", random.Random(3)) == first
