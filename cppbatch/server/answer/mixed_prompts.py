"""Prompts in llama-server's format, which may mix texts and token ids, as tokens."""

from __future__ import annotations

import asyncio
import secrets
from itertools import groupby
from typing import Any, NamedTuple

from cppbatch.chat.media_parts import media_of
from cppbatch.engine.media.sources import source_of_data
from cppbatch.engine.request import MediaPrompt, TokenPiece
from cppbatch.errors import InvalidRequest
from cppbatch.server.models.serving import Prompt, Serving

Json = dict[str, Any]
MEDIA_MARKER = f"<__media_{secrets.token_hex(16)}__>"
"""The placeholder for an image or audio in a `prompt_string`. Random, so that no text contains it by chance."""


class MarkedPrompt(NamedTuple):
    """A `prompt_string` with `multimodal_data`."""

    text: str
    """Contains a `MEDIA_MARKER` for each item of the data."""
    data: list[str]
    """Images and audio, as base64."""


MixedPrompt = str | list[str | int] | MarkedPrompt
"""A text; a mix of texts and token ids; or a text with images and audio."""

MAX_TEXTS = 1000
"""Maximum texts per request that are tokenised separately."""


def prompts_of(prompt: str | list[Any] | Json, field: str = "prompt") -> list[MixedPrompt]:
    """The prompts in a field: several if it is a list without token ids, otherwise one.

    Raises `InvalidRequest` naming `field`.
    """
    if not isinstance(prompt, list) or any(_is_id(item) for item in prompt):
        return [_parse_prompt(prompt, field)]
    if not prompt:
        raise InvalidRequest(field, "is empty; give at least one text or token id")
    return [_parse_prompt(item, f"{field}[{i}]") for i, item in enumerate(prompt)]


def _parse_prompt(prompt: object, field: str) -> MixedPrompt:
    if isinstance(prompt, dict):
        if data := prompt.get("multimodal_data"):
            return _parse_marked_prompt(prompt.get("prompt_string"), data, field)
        prompt = prompt.get("prompt_string")
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(isinstance(item, str) or _is_id(item) for item in prompt):
        return prompt
    raise InvalidRequest(field, 'must be a string, a list of token ids and strings, or {"prompt_string": ...}')


def _parse_marked_prompt(text: object, data: object, field: str) -> MarkedPrompt:
    if not isinstance(text, str):
        raise InvalidRequest(f"{field}.prompt_string", "must be a string if multimodal_data is given")
    if not isinstance(data, list) or not all(isinstance(each, str) and each for each in data):
        raise InvalidRequest(f"{field}.multimodal_data", "must be a list of strings: base64-encoded files")
    if (n := text.count(MEDIA_MARKER)) != len(data):
        message = f"has {n} media markers for {len(data)} items of multimodal_data; GET /props returns the media_marker"
        raise InvalidRequest(f"{field}.prompt_string", message)
    return MarkedPrompt(text, data)


def _is_id(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


async def engine_prompt(serving: Serving, prompt: MixedPrompt, field: str) -> Prompt:
    """A prompt as the engine takes it: a text, token ids, or a text with images and audio.

    Raises `InvalidRequest` naming `field`.
    """
    if isinstance(prompt, MarkedPrompt):
        return await _load_media(serving, prompt, field)
    if isinstance(prompt, str) or all(_is_id(item) for item in prompt):
        return prompt  # type: ignore[return-value]  # a list without strings
    return [token.id for token in await tokenize(serving, prompt, field)]


async def _load_media(serving: Serving, prompt: MarkedPrompt, field: str) -> MediaPrompt:
    """Decodes the data. Raises `InvalidRequest`."""
    sources = [source_of_data(f"{field}.multimodal_data[{i}]", data) for i, data in enumerate(prompt.data)]
    messages = [{"role": "user", "content": [source.part() for source in sources]}]
    media = serving.media_loader()
    await media.fetch([messages])
    loaded = media_of(await asyncio.to_thread(media.load, messages))
    first, *others = prompt.text.split(MEDIA_MARKER)
    parts = [first]
    for text in others:
        parts += [next(loaded), text]
    return MediaPrompt([part for part in parts if part != ""])


async def tokenize(
    serving: Serving, prompt: str | list[str | int], field: str, *, add_special: bool = True, parse_special: bool = True
) -> list[TokenPiece]:
    """The tokens of a prompt. Raises `InvalidRequest` naming `field`.

    `add_special`: start with BOS if the model uses it and the prompt does not start with a token id. A prompt far
    longer than the context is rejected by its length, before objects are created for its tokens.
    """
    size = len(prompt) if isinstance(prompt, str) else sum(len(part) if isinstance(part, str) else 1 for part in prompt)
    serving.check_length(field, size)
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
    """The tokens with these ids, which start at index `start` of the field."""
    try:
        return await serving.client.tokenize(ids)
    except InvalidRequest as error:
        wrong = next((i for i, token in enumerate(ids) if not 0 <= token < serving.info.n_vocab), 0)
        raise error.with_field(f"{field}[{start + wrong}]") from error
