"""Workloads in which the text matters: answers that repeat their prompt or each other, so that drafts are accepted, and
free text."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple


class TextWorkload(NamedTuple):
    """A task for a chat model. The model ends its answers itself, possibly before `max_tokens`."""

    about: str
    prompt: Callable[[Random], str]
    """Creates a user message."""
    max_tokens: int
    temperature: float = 0.0
    schema: dict[str, Any] | None = None
    """The answer is JSON with this schema."""
    rounds: int = 1
    """The number of consecutive requests if one runs at a time. Later ones find drafts in earlier texts."""

    def prompts(self, n: int, seed: object) -> list[str]:
        """Returns `n` user messages, the same ones for the same seed."""
        return [self.prompt(Random(f"{seed}/{i}")) for i in range(n)]


_PLACES = (
    "Alderbay", "Brookhaven", "Castleton", "Dunmere", "Eastwick", "Fernhollow", "Grantham", "Harrowgate", "Inverley",
    "Juniper Hill", "Kingsford", "Larkspur", "Millbrook", "Northcliff", "Oakendale", "Penrose",
)  # fmt: skip
_PEOPLE = (
    "Amira Costa", "Ben Okafor", "Clara Jansen", "Dmitri Wolff", "Elena Marsh", "Farid Nasser", "Greta Lindqvist",
    "Hugo Ferreira", "Ines Moreau", "Jonas Keller", "Kavya Rao", "Liam Brennan", "Mina Sato", "Noah Adler",
    "Olga Petrova", "Pablo Reyes",
)  # fmt: skip
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
_WORKS = (
    "old stone bridge", "public library", "harbour wall", "railway station", "swimming pool", "market hall",
    "water tower", "town museum",
)  # fmt: skip
_ITEMS = (
    "desk lamp", "garden chair", "coffee grinder", "rain jacket", "bicycle pump", "oak bookshelf", "steel kettle",
    "wool blanket", "travel mug", "kitchen scale", "camping stove", "leather wallet",
)  # fmt: skip
_MATERIALS = ("oak wood", "brushed steel", "recycled cotton", "soft leather", "clear glass", "painted aluminium")
_TOPICS = (
    "a lighthouse keeper who finds a letter", "two foxes in a snowed-in village", "a train that never stops",
    "a baker who cannot taste", "the last map maker", "a robot that learns to paint", "a storm on a small island",
    "a clock that runs backwards", "a boy who collects sounds", "an inn at the edge of a desert",
)  # fmt: skip


def _report(rng: Random) -> str:
    """Eight sentences about building works."""
    place, works, day = rng.choice(_PLACES), rng.choice(_WORKS), rng.choice(_DAYS)
    leader, critic = rng.sample(_PEOPLE, 2)
    weeks, cost, visitors = rng.randint(6, 40), rng.randint(2, 90) * 10, rng.randint(12, 95) * 100
    sentences = [
        f"The council of {place} met on {day} evening to decide what will become of the {works}.",
        f"{leader}, who leads the works department, reported that the {works} needs urgent repairs before the winter.",
        f"The repairs will take {weeks} weeks and cost about {cost} thousand euros, half of which the region pays.",
        f"About {visitors} people use the {works} every year, and most of them live in the centre of {place}.",
        f"{critic} asked why the damage was not found during the inspection three years ago.",
        "The department answered that the cracks were hidden behind a layer of new plaster.",
        f"While the work goes on, the {works} will be open in the mornings only.",
        "The council voted nine to four in favour of the plan and will meet again next month.",
    ]
    kept = sorted(rng.sample(range(len(sentences)), 7))
    return " ".join(sentences[i] for i in kept)


def _quote(rng: Random) -> str:
    return (
        f"Here is a report.\n\n{_report(rng)}\n\nWhich are the five most important sentences of this report? Copy them "
        "word for word."
    )


def _orders(rng: Random) -> list[str]:
    people, items, places = rng.sample(_PEOPLE, 4), rng.sample(_ITEMS, 4), rng.sample(_PLACES, 4)
    return [
        f"{person} from {place} ordered {rng.randint(2, 9)} pieces of the {item} on {rng.choice(_DAYS)} for "
        f"{rng.randint(10, 95)} euros each."
        for person, item, place in zip(people, items, places, strict=True)
    ]


_TEXT = {"type": "string", "maxLength": 24}
_NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
_ORDER = {"customer": _TEXT, "city": _TEXT, "quantity": _NUMBER, "item": _TEXT, "day": _TEXT, "price": _NUMBER}
_ORDERS_SCHEMA = {
    "type": "array",
    "items": {"type": "object", "properties": _ORDER, "required": list(_ORDER), "additionalProperties": False},
    "minItems": 4,
    "maxItems": 4,
}


def _json(rng: Random) -> str:
    keys = ", ".join(_ORDER)
    return f"Extract the orders from the text as JSON with the keys {keys}.\n\nText: {' '.join(_orders(rng))}"


def _program(rng: Random) -> str:
    thing, key = rng.choice(("order", "invoice", "sensor", "ticket", "parcel")), rng.choice(("price", "weight", "age"))
    limit, factor = rng.randint(5, 90), rng.randint(2, 9)
    return f'''def select_{thing}s({thing}s, limit={limit}):
    """Returns the {thing}s whose {key} is above the limit."""
    result = []
    for {thing} in {thing}s:
        if {thing}["{key}"] > limit:
            result.append({thing})
    return result


def total_{key}({thing}s, factor={factor}):
    """Returns the sum of the {key}s, times a factor."""
    total = 0
    for {thing} in select_{thing}s({thing}s):
        total += {thing}["{key}"] * factor
    return total
'''


def _code(rng: Random) -> str:
    return (
        f"```python\n{_program(rng)}```\n\nRename the variable `result` to `found` in this program. Write the whole "
        "program again, and change nothing else."
    )


def _job(rng: Random) -> str:
    item, material, place = rng.choice(_ITEMS), rng.choice(_MATERIALS), rng.choice(_PLACES)
    return (
        "Write the card of the product in exactly this form.\n\n"
        "Product: hand mirror, made of clear glass, from Westport, 12 euros\n"
        "Card: This hand mirror is made of clear glass in our workshop in Westport. It costs 12 euros, and we send it "
        "within three working days. You can return it within 30 days if you do not like it. Every hand mirror comes "
        "with a warranty of two years.\n\n"
        f"Product: {item}, made of {material}, from {place}, {rng.randint(10, 95)} euros\nCard:"
    )


def _free(rng: Random) -> str:
    topic, place, person = rng.choice(_TOPICS), rng.choice(_PLACES), rng.choice(_PEOPLE)
    return f"Write a short story about {topic}. It begins in {place}, and {person} tells it."


TEXT_WORKLOADS = {
    "quote": TextWorkload("a report, summarised by quoting it", _quote, max_tokens=160, rounds=2),
    "json": TextWorkload(
        "orders, extracted from a text as JSON", _json, max_tokens=256, schema=_ORDERS_SCHEMA, rounds=2
    ),
    "code": TextWorkload("a program, written again with another name for a variable", _code, max_tokens=192, rounds=2),
    "job": TextWorkload("a batch job of similar items: product cards", _job, max_tokens=80, rounds=3),
    "free": TextWorkload("stories at temperature 0.8", _free, max_tokens=128, temperature=0.8),
}
"""By name. In all except the last one, most drafts are accepted."""
