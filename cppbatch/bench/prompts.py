"""Prompts of benchmarks: their lengths, random token ids, and random text."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from cppbatch.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from cppbatch.engine.model_info import ModelInfo


class Lengths(NamedTuple):
    """A range of lengths in tokens, including both ends."""

    low: int
    high: int

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low} to {self.high}"

    def check(self, flag: str) -> None:
        """Raises `ConfigError` with the name of the flag for an invalid range."""
        if not 1 <= self.low <= self.high:
            raise ConfigError(f"{flag} is {self.low}-{self.high}; it must be an ascending range of at least 1")

    def spread(self, n: int) -> list[int]:
        """Returns `n` lengths in equal ratios from `low` to `high`. Their total does not depend on a seed."""
        ratio = self.high / self.low
        return [round(self.low * ratio ** (i / max(n - 1, 1))) for i in range(n)]


_FIRST_TOKEN = 10  # lower ids are special in most vocabularies


def random_prompt(draw: np.random.Generator, n_tokens: int, n_vocab: int) -> npt.NDArray[np.int32]:
    """Returns int32[n_tokens] random token ids, so prompts do not share prefixes. Speed does not depend on the text."""
    return draw.integers(min(_FIRST_TOKEN, n_vocab - 1), n_vocab, n_tokens, dtype="int32")


def check_can_run(info: ModelInfo, n_prompt: int, n_new: int) -> None:
    """Raises `ConfigError` for an embedding model, and for requests longer than the model allows."""
    if info.pooling:
        raise ConfigError(
            f"{info.name} is an embedding model; this command measures text generation. Choose another model (-m)"
        )
    if n_prompt + n_new > info.max_sequence:
        raise ConfigError(
            f"{n_prompt} prompt tokens and {n_new} new tokens are {n_prompt + n_new} in total; the limit of "
            f"{info.name} is {info.max_sequence}. Lower --prompt-tokens or --new-tokens"
        )


_WORDS = (
    "the of and to in is that it was for on are with they be at one have this from had not but what all were when "
    "we there can said which do their time if will way about many then them would write like so these her long "
    "make thing see him two has look more day could go come did number sound no most people my over know water "
    "than call first who may down side been now find any new work part take get place made live where after back "
    "little only round man year came show every good me give our under name very through just form great think "
    "say help low line before turn cause much mean differ move right boy old too same tell does set three want "
    "air well also play small end put home read hand port large add even land here must big high such follow act "
    "why ask men change went light kind off need house picture try us again animal point mother world near build "
    "self earth father head stand own page should country found answer school grow study still learn plant cover "
    "food sun four between state keep eye never last let thought city tree cross farm hard start might story saw "
    "far sea draw left late run while press close night real life few north open seem together next white "
    "children begin got walk example ease paper group always music those both mark often letter until mile river "
    "car feet care second book carry took science eat room friend began idea fish mountain stop once base hear "
    "horse cut sure watch color face wood main"
).split()

_SENTENCE = (6, 14)  # words
_COMMA = 0.08  # after a word


def random_text(rng: Random, n_tokens: int) -> str:
    """Returns English-like sentences of about `n_tokens` tokens: each word and each punctuation mark counts as one.

    Most words are a single token in any vocabulary.
    """
    pieces: list[str] = []
    n_left = 0  # words until the end of the sentence
    starts_sentence = True
    for i in range(n_tokens):
        if n_left == 0 and not starts_sentence and i < n_tokens - 1:
            pieces.append(".")
            starts_sentence = True
            continue
        if not starts_sentence and n_left > 1 and pieces[-1] != "," and rng.random() < _COMMA:
            pieces.append(",")
            continue
        if starts_sentence:
            n_left = rng.randint(*_SENTENCE)
        word = rng.choice(_WORDS)
        pieces.append(f" {word.capitalize() if starts_sentence else word}")
        starts_sentence, n_left = False, max(n_left - 1, 0)
    return "".join(pieces).lstrip()


# --- text workloads --------------------------------------------------------------------------------------------------
# Workloads in which the text matters: answers that repeat their prompt or each other, so that drafts are accepted, and
# free text.


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
