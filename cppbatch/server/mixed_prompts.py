"""Prompts in llama-server's form, which may mix texts and token ids, as tokens."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from cppbatch.engine.request import TokenPiece
from cppbatch.errors import InvalidRequest
from cppbatch.server.serving import Prompt, Serving

Json = dict[str, Any]
MixedPrompt = str | list[str | int]
"""A text, or texts and token ids mixed."""

_MIN_LENGTH_LIMIT = 1 << 20  # characters or token ids that are accepted whatever the context of the model
_MAX_CHARS_PER_TOKEN = 32  # more than any text has on average
MAX_TEXTS = 1000
"""Texts of one request that are tokenised separately."""


def prompts_of(prompt: str | list[Any] | Json, field: str = "prompt") -> list[MixedPrompt]:
    """The prompts in a field: several if it is a list without token ids, otherwise one.

    Raises `InvalidRequest` naming `field`.
    """
    if not isinstance(prompt, list) or any(_is_id(item) for item in prompt):
        return [_mixed_prompt(prompt, field)]
    if not prompt:
        raise InvalidRequest(field, "is empty; give at least one text or token id")
    return [_mixed_prompt(item, f"{field}[{i}]") for i, item in enumerate(prompt)]


def _mixed_prompt(prompt: object, field: str) -> MixedPrompt:
    if isinstance(prompt, dict):
        if prompt.get("multimodal_data"):
            raise InvalidRequest(field, "has multimodal_data; only text is supported")
        prompt = prompt.get("prompt_string")
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(isinstance(item, str) or _is_id(item) for item in prompt):
        return prompt
    raise InvalidRequest(field, 'must be a string, a list of token ids and strings, or {"prompt_string": ...}')


def _is_id(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


async def engine_prompt(serving: Serving, prompt: MixedPrompt, field: str) -> Prompt:
    """A prompt as the engine takes it: a text, or token ids. Raises `InvalidRequest` naming `field`."""
    if isinstance(prompt, str) or all(_is_id(item) for item in prompt):
        return prompt  # type: ignore[return-value]  # a list without strings
    return [token.id for token in await tokenize(serving, prompt, field)]


async def tokenize(
    serving: Serving, prompt: MixedPrompt, field: str, *, add_special: bool = True, parse_special: bool = True
) -> list[TokenPiece]:
    """The tokens of a prompt. Raises `InvalidRequest` naming `field`.

    `add_special`: begin with BOS if the model wants it and the prompt does not begin with a token id. A prompt far
    longer than the context is rejected by its length, before an object is made for each token.
    """
    limit = max(_MIN_LENGTH_LIMIT, _MAX_CHARS_PER_TOKEN * serving.info.max_sequence)
    size = len(prompt) if isinstance(prompt, str) else sum(len(part) if isinstance(part, str) else 1 for part in prompt)
    if size > limit:
        raise InvalidRequest(field, f"is {size:,} long; the limit is {limit:,} characters or token ids")
    if isinstance(prompt, str):
        return await serving.client.tokenize(prompt, add_special=add_special, parse_special=parse_special)
    if sum(isinstance(part, str) for part in prompt) > MAX_TEXTS:
        raise InvalidRequest(field, f"has more than {MAX_TEXTS} strings; join them, or give token ids")
    tokens: list[TokenPiece] = []
    start = 0
    for is_id, group in groupby(prompt, _is_id):
        parts: list[Any] = list(group)
        if is_id:
            tokens += await _pieces_of(serving, parts, field, start)
        else:
            for i, part in enumerate(parts, start):
                tokens += await serving.client.tokenize(
                    part, add_special=add_special and i == 0, parse_special=parse_special
                )
        start += len(parts)
    return tokens


async def _pieces_of(serving: Serving, ids: list[int], field: str, start: int) -> list[TokenPiece]:
    """The tokens with these ids, which begin at index `start` of the field."""
    try:
        return await serving.client.tokenize(ids)
    except InvalidRequest as error:
        wrong = next((i for i, token in enumerate(ids) if not 0 <= token < serving.info.n_vocab), 0)
        raise error.renamed(f"{field}[{start + wrong}]") from error
