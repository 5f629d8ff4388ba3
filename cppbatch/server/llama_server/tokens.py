"""Prompts as tokens: llama-server takes texts and token ids mixed, and tells how many tokens they are."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from cppbatch.engine.request import TokenPiece
from cppbatch.errors import InvalidRequest
from cppbatch.server.llama_server.schemas import InfillRequest
from cppbatch.server.serving import Serving

Json = dict[str, Any]
Mixed = str | list[str | int]

_LEAST_LONGEST = 1 << 20  # letters, or ids, that are read whatever the model's context
_LETTERS_PER_TOKEN = 32  # more than any text has
_MOST_PARTS = 1000  # texts between ids: each is tokenised by itself
_REPOSITORY = "project"  # llama-server's API has no name for it either


def prompts_of(prompt: str | list[Any] | Json) -> list[Mixed]:
    """The prompts that a `prompt` holds: one, unless it is a list without any token id. Raises `InvalidRequest`."""
    if not isinstance(prompt, list) or any(_is_id(item) for item in prompt):
        return [_mixed(prompt, "prompt")]
    if not prompt:
        raise InvalidRequest("prompt", "is empty; give at least one text or token id")
    return [_mixed(item, f"prompt[{i}]") for i, item in enumerate(prompt)]


def _mixed(prompt: object, field: str) -> Mixed:
    if isinstance(prompt, dict):
        if prompt.get("multimodal_data"):
            raise InvalidRequest(field, "has multimodal_data; only text can be read here")
        prompt = prompt.get("prompt_string")
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(isinstance(item, str) or _is_id(item) for item in prompt):
        return prompt
    raise InvalidRequest(field, 'must be a string, a list of token ids and strings, or {"prompt_string": ...}')


def _is_id(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


async def tokens_of(
    serving: Serving, text: Mixed, field: str, *, add_special: bool = True, parse_special: bool = True
) -> list[TokenPiece]:
    """The tokens of a text, or of texts and ids mixed. Raises `InvalidRequest`.

    `add_special`: with BOS if the model wants it and they do not begin with an id.
    """
    most = max(_LEAST_LONGEST, _LETTERS_PER_TOKEN * serving.info.max_sequence)
    size = len(text) if isinstance(text, str) else sum(len(part) if isinstance(part, str) else 1 for part in text)
    if size > most:
        raise InvalidRequest(field, f"is {size:,} long; this server reads at most {most:,} letters or ids at once")
    if isinstance(text, str):
        return await serving.client.tokenize(text, add_special=add_special, parse_special=parse_special)
    if sum(isinstance(part, str) for part in text) > _MOST_PARTS:
        raise InvalidRequest(field, f"has more than {_MOST_PARTS} strings; join them, or give token ids")
    tokens: list[TokenPiece] = []
    at = 0
    for is_id, group in groupby(text, _is_id):
        parts: list[Any] = list(group)
        if is_id:
            tokens += await _pieces(serving, parts, field, at)
        else:
            for i, part in enumerate(parts, at):
                tokens += await serving.client.tokenize(
                    part, add_special=add_special and i == 0, parse_special=parse_special
                )
        at += len(parts)
    return tokens


async def _pieces(serving: Serving, ids: list[int], field: str, at: int) -> list[TokenPiece]:
    """`at`: where these ids begin in the field's list."""
    try:
        return await serving.client.tokenize(ids)
    except InvalidRequest as error:
        wrong = next((i for i, token in enumerate(ids) if not 0 <= token < serving.info.n_vocab), 0)
        raise InvalidRequest(f"{field}[{at + wrong}]", error.message) from error


def text_of(tokens: list[TokenPiece]) -> str:
    """Tokens as text, control tokens as they are written."""
    return b"".join(token.piece for token in tokens).decode("utf-8", "replace")


async def infill_tokens(serving: Serving, body: InfillRequest) -> list[TokenPiece]:
    """A prompt for what stands at the cursor, in the model's own form. Raises `InvalidRequest`.

    What is too long is cut where it is farthest from the cursor: other files first, then the prefix and the suffix,
    of which the suffix keeps a quarter of the room.
    """
    fill_in = serving.info.fill_in
    if fill_in is None:
        raise InvalidRequest("input_prefix", f"cannot be used: {serving.info.name} was not trained to fill in")

    async def read(text: str, field: str) -> list[TokenPiece]:
        return await tokens_of(serving, text, field, add_special=False, parse_special=False)

    async def control(text: str) -> list[TokenPiece]:
        return await serving.client.tokenize(text, add_special=False)

    if len(body.input_extra or []) > _MOST_PARTS:
        raise InvalidRequest("input_extra", f"has more than {_MOST_PARTS} texts; join them")
    prompt = await read(body.prompt, "prompt")
    prefix = await read(body.input_prefix, "input_prefix")
    suffix = await read(body.input_suffix, "input_suffix")
    extra: list[TokenPiece] = []
    for i, chunk in enumerate(body.input_extra or []):
        name = await control(fill_in.file) if fill_in.file else []
        extra += [*name, *await read(f"{chunk.filename}\n{chunk.text}\n", f"input_extra[{i}].text")]
    if extra and fill_in.file:
        extra += [*await control(fill_in.file), *await read("current\n", "input_extra")]

    marks = [await control(mark) for mark in (fill_in.prefix, fill_in.suffix, fill_in.middle)]
    begin = await serving.client.tokenize("", add_special=True)
    if extra and fill_in.repository:
        begin += [*await control(fill_in.repository), *await read(f"{_REPOSITORY}\n", "input_extra")]
    most = serving.info.max_sequence
    wanted = body.n_predict if body.n_predict is not None and body.n_predict >= 0 else most // 4
    room = max(0, most - min(wanted, most // 2) - len(prompt) - len(begin) - sum(map(len, marks)))
    suffix = suffix[: max(room // 4, room - len(prefix))]
    prefix = _last(prefix, room - len(suffix))
    extra = _last(extra, room - len(suffix) - len(prefix))
    return [*begin, *extra, *marks[0], *prefix, *prompt, *marks[1], *suffix, *marks[2]]


def _last(tokens: list[TokenPiece], n: int) -> list[TokenPiece]:
    return tokens[len(tokens) - n :] if 0 < n < len(tokens) else tokens if n > 0 else []
