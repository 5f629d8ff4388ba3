"""Prompts of benchmarks: their lengths, random token ids, and random text."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import TYPE_CHECKING, NamedTuple

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


def check_least(given: Mapping[str, int | None], least: int = 1) -> None:
    """Raises `ConfigError` with the flag of a value below `least`. None: the flag was not given."""
    for flag, value in given.items():
        if value is not None and value < least:
            raise ConfigError(f"{flag} is {value}; it must be at least {least}")


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
