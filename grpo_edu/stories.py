"""The stories behind the word problems: texts with slots, and the steps that solve them.

Slots: ``{name}`` and ``{other}`` are two people, ``{item}`` and ``{thing}`` two kinds of things,
and single letters are numbers drawn from `ranges`. Each step is ``target = left sign right``.
"""

from __future__ import annotations

from dataclasses import dataclass

NAMES = (
    "Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gina", "Hugo", "Ines", "Jon", "Kira", "Leo", "Mia", "Nico", "Omar",
    "Pia", "Rosa", "Sam", "Tara", "Uma",
)  # fmt: skip
ITEMS = (
    "apples", "books", "cards", "coins", "eggs", "flowers", "marbles", "pens", "photos", "shells", "stamps", "stickers",
    "tickets", "toys",
)  # fmt: skip

_BIG, _MID, _FEW, _SMALL = (21, 90), (11, 60), (5, 30), (2, 9)


@dataclass(frozen=True)
class Story:
    """A text with slots, the steps to its answer, and the range of each drawn number."""

    text: str
    steps: str
    ranges: dict[str, tuple[int, int]]


def _s(text: str, steps: str, **ranges: tuple[int, int]) -> Story:
    return Story(text, steps, ranges)


STORIES: dict[str, tuple[Story, ...]] = {
    "basic": (
        _s("{name} has {a} {item}. {other} gives {name} {b} more. Then {name} loses {c}. How many {item} does {name} have now?",
           "d = a + b; e = d - c", a=_BIG, b=_MID, c=_FEW),
        _s("There are {a} people on a bus. At the next stop {b} get off and {c} get on. How many people are on the bus?",
           "d = a - b; e = d + c", a=_BIG, b=_MID, c=_MID),
        _s("A farm has {a} hens, {b} ducks and {c} goats. How many animals live on the farm?",
           "d = a + b; e = d + c", a=_MID, b=_MID, c=_MID),
        _s("{name} saved {a} dollars. A bag costs {b} dollars and a hat costs {c} dollars. How many dollars are left after buying both?",
           "d = a - b; e = d - c", a=(60, 99), b=_FEW, c=_FEW),
        _s("{name} read {a} pages on Monday and {b} pages on Tuesday. The book has {c} pages. How many pages are left to read?",
           "d = a + b; e = c - d", a=_MID, b=_MID, c=(80, 150)),
        _s("{name} picked {a} {item}. {other} picked {b} fewer than {name}. How many {item} did they pick together?",
           "d = a - b; e = a + d", a=_BIG, b=_FEW),
        _s("{name} is {a} years old. {other} is {b} years older than {name}. What is the sum of their ages?",
           "d = a + b; e = a + d", a=_MID, b=_FEW),
        _s("A shop sold {a} {item} in the morning and {b} in the afternoon. Later {c} were returned. How many {item} stayed sold?",
           "d = a + b; e = d - c", a=_BIG, b=_MID, c=_FEW),
        _s("A train goes {a} miles before lunch and {b} miles after lunch. The whole way is {c} miles. How many miles remain?",
           "d = a + b; e = c - d", a=_MID, b=_MID, c=(90, 180)),
        _s("A tank holds {a} liters. {name} takes out {b} liters, then pours in {c} liters. How many liters are in the tank?",
           "d = a - b; e = d + c", a=_BIG, b=_MID, c=_MID),
        _s("The red team scored {a} points in the first half and {b} in the second. The blue team scored {c} points. By how many points did red win?",
           "d = a + b; e = d - c", a=_MID, b=_MID, c=_BIG),
        _s("Of {a} seats in a hall, {b} are taken by children and {c} by adults. How many seats are free?",
           "d = b + c; e = a - d", a=(70, 150), b=_MID, c=_MID),
        _s("It was {a} degrees at noon. It rose by {b} degrees and then fell by {c} degrees. What is the temperature now?",
           "d = a + b; e = d - c", a=_MID, b=_FEW, c=_FEW),
        _s("{name} baked {a} cookies and {b} muffins. The guests ate {c} of them. How many are left?",
           "d = a + b; e = d - c", a=_MID, b=_MID, c=_FEW),
    ),
    "intermediate": (
        _s("{name} buys {a} boxes with {b} {item} in each box. {c} {item} are broken, and {other} brings {d} new ones. How many good {item} does {name} have?",
           "e = a * b; f = e - c; g = f + d", a=_SMALL, b=(6, 20), c=_FEW, d=_FEW),
        _s("A baker makes {a} trays of {b} rolls. {c} rolls are sold in the morning and {d} at noon. How many rolls remain?",
           "e = a * b; f = e - c; g = f - d", a=_SMALL, b=(8, 20), c=_FEW, d=_FEW),
        _s("{name} and {other} collect {a} and {b} {item}. They share all of them equally among {c} friends. Each friend already had {d}. How many does each friend have now?",
           "e = a + b; f = e / c; g = f + d", a=_BIG, b=_BIG, c=_SMALL, d=_FEW),
        _s("A ticket costs {a} dollars and a snack costs {b} dollars. {c} friends each buy one of both. They pay with {d} dollars. How many dollars come back?",
           "e = a + b; f = e * c; g = d - f", a=_FEW, b=_SMALL, c=_SMALL, d=(100, 200)),
        _s("{name} runs {a} miles each day for {b} days, then {c} miles more. {other} runs {d} miles less than that. How many miles does {other} run?",
           "e = a * b; f = e + c; g = f - d", a=(4, 15), b=_SMALL, c=_FEW, d=_FEW),
        _s("A school has {a} rows of {b} desks. {c} desks are moved out and the rest are put into {d} equal groups. How many desks are in a group?",
           "e = a * b; f = e - c; g = f / d", a=_SMALL, b=(6, 20), c=_FEW, d=_SMALL),
        _s("{name} earns {a} dollars an hour and works {b} hours. Lunch costs {c} dollars and the bus {d} dollars. How many dollars does {name} keep?",
           "e = a * b; f = e - c; g = f - d", a=(8, 25), b=_SMALL, c=_FEW, d=_SMALL),
        _s("{name} has ropes of {a} feet and cuts each into {b} equal parts. {name} ties {c} of the parts together and adds {d} feet. How long is the new rope?",
           "e = a / b; f = e * c; g = f + d", a=(30, 99), b=_SMALL, c=_SMALL, d=_FEW),
        _s("{name} has {a} {item} and {other} has {b} times as many. Together they give away {c}. How many {item} are left?",
           "e = a * b; f = a + e; g = f - c", a=(6, 30), b=(2, 6), c=_FEW),
        _s("A garden has {a} roses and {b} tulips. {c} of them wither. The others go into vases of {d}. How many vases are filled?",
           "e = a + b; f = e - c; g = f / d", a=_MID, b=_MID, c=_FEW, d=_SMALL),
        _s("A box of {a} {item} is split among {b} children. {name} gives {c} of the share to {other} and finds {d} on the way. How many {item} does {name} have?",
           "e = a / b; f = e - c; g = f + d", a=(60, 180), b=_SMALL, c=_SMALL, d=_FEW),
        _s("Each of {a} teams has {b} players and {c} coaches. {d} people are ill. How many people can come?",
           "e = b + c; f = a * e; g = f - d", a=_SMALL, b=(5, 15), c=(2, 5), d=_FEW),
        _s("A pack of pens costs {a} dollars. {name} buys {b} packs, gets {c} dollars off, and pays in {d} equal parts. How many dollars is one part?",
           "e = a * b; f = e - c; g = f / d", a=(6, 25), b=_SMALL, c=_FEW, d=_SMALL),
        _s("A machine fills {a} bottles a minute. After {b} minutes {c} bottles are thrown out, and {d} old bottles are added. How many bottles are there?",
           "e = a * b; f = e - c; g = f + d", a=(6, 25), b=_SMALL, c=_FEW, d=_MID),
    ),
    "advanced": (
        _s("{name} packs {a} boxes of {b} {item} and {c} boxes of {d} {thing}. {e} pieces break. How many pieces are whole?",
           "f = a * b; g = c * d; h = f + g; i = h - e", a=_SMALL, b=(5, 15), c=_SMALL, d=(5, 15), e=_FEW),
        _s("{a} adults pay {b} dollars each and {c} children pay {d} dollars each. They share the cost among {e} families. How many dollars does a family pay?",
           "f = a * b; g = c * d; h = f + g; i = h / e", a=_SMALL, b=(8, 20), c=_SMALL, d=(3, 9), e=_SMALL),
        _s("{name} had {a} dollars, earned {b} dollars a day for {c} days, and bought {d} books for {e} dollars each. How many dollars are left?",
           "f = b * c; g = a + f; h = d * e; i = g - h", a=_BIG, b=(8, 20), c=_SMALL, d=_SMALL, e=(4, 12)),
        _s("A farmer picks {a} apples from each of {b} trees. {c} are bad. The rest go into bags of {d}, and {e} bags are sold. How many bags are left?",
           "f = a * b; g = f - c; h = g / d; i = h - e", a=(8, 25), b=_SMALL, c=_FEW, d=_SMALL, e=_SMALL),
        _s("{name} drives {a} miles an hour for {b} hours and {c} miles an hour for {d} hours. The trip is {e} miles long. How many miles are left?",
           "f = a * b; g = c * d; h = f + g; i = e - h", a=(20, 40), b=(2, 4), c=(20, 40), d=(2, 4), e=(150, 300)),
        _s("A class of {a} girls and {b} boys is split into teams of {c}. Each team gets {d} {item}, and {e} are kept for the teacher. How many {item} are needed?",
           "f = a + b; g = f / c; h = g * d; i = h + e", a=_MID, b=_MID, c=_SMALL, d=_SMALL, e=_FEW),
        _s("{name} has {a} {item}. {other} has {b} times as many, and a friend of theirs has {c} fewer than {other}. The friend and {name} put theirs into {d} equal piles. How many {item} are in a pile?",
           "e = a * b; f = e - c; g = a + f; h = g / d", a=(6, 25), b=(2, 5), c=_FEW, d=_SMALL),
        _s("A shop buys {a} lamps for {b} dollars each and sells them for {c} dollars each. Rent is {d} dollars. Each of {e} owners gets an equal part of what remains. How many dollars is a part?",
           "f = c - b; g = f * a; h = g - d; i = h / e", a=(5, 20), b=(5, 20), c=(15, 40), d=_FEW, e=(2, 6)),
        _s("A hall has {a} rows of {b} chairs. {c} chairs are added to make {d} equal blocks. {e} chairs of one block are broken. How many good chairs does that block have?",
           "f = a * b; g = f + c; h = g / d; i = h - e", a=_SMALL, b=(8, 25), c=_FEW, d=_SMALL, e=_SMALL),
        _s("{name} reads {a} pages a day for {b} days and then {c} pages a day for {d} days. {other} reads {e} pages more. How many pages does {other} read?",
           "f = a * b; g = c * d; h = f + g; i = h + e", a=(6, 20), b=_SMALL, c=(6, 15), d=_SMALL, e=_FEW),
        _s("A tank of {a} liters loses {b} liters an hour for {c} hours. Then {d} cans of {e} liters are poured in. How many liters are in the tank?",
           "f = b * c; g = a - f; h = d * e; i = g + h", a=(100, 200), b=(3, 15), c=_SMALL, d=_SMALL, e=(3, 12)),
        _s("{name} sells {a} cakes for {b} dollars each and {c} pies for {d} dollars each. Flour cost {e} dollars. How many dollars did {name} gain?",
           "f = a * b; g = c * d; h = f + g; i = h - e", a=_SMALL, b=(6, 18), c=_SMALL, d=(5, 15), e=_MID),
        _s("{a} buses carry {b} people each. {c} people get off, and the others walk in groups of {d}. Each group needs {e} guides. How many guides are needed?",
           "f = a * b; g = f - c; h = g / d; i = h * e", a=_SMALL, b=(10, 30), c=_FEW, d=_SMALL, e=(2, 5)),
        _s("{name} saves {a} dollars a week for {b} weeks and {other} saves {c} dollars a week for {d} weeks. They buy a tent for {e} dollars. How many dollars remain?",
           "f = a * b; g = c * d; h = f + g; i = h - e", a=(6, 20), b=_SMALL, c=(6, 20), d=_SMALL, e=_BIG),
    ),
}  # fmt: skip
