"""`POST /infill`: completes the text between a prefix and a suffix."""

from __future__ import annotations

import msgspec
from aiohttp import web

from cppbatch.engine.request import TokenPiece
from cppbatch.errors import InvalidRequest
from cppbatch.server.endpoint import Routes
from cppbatch.server.llama_server.llama_completion import (
    COMPLETION,
    LlamaPrompt,
    prepare_llama_completion,
    respond_to_completion,
)
from cppbatch.server.llama_server.llama_fields import LlamaFields
from cppbatch.server.mixed_prompts import MAX_TEXTS, tokenize
from cppbatch.server.model_choice import lease_model
from cppbatch.server.parse import read_json
from cppbatch.server.serving import Serving

routes = Routes()

_REPOSITORY = "project"  # the repository's name in the prompt; llama-server's API has no field for it


class ExtraText(msgspec.Struct):
    """Text for context, for example another file of the project."""

    text: str
    filename: str = "tmp"


class InfillRequest(LlamaFields, kw_only=True):
    """The body of `POST /infill`."""

    input_prefix: str
    """The text before the cursor."""
    input_suffix: str
    """The text after the cursor."""
    prompt: str = ""
    """The beginning of the completion."""
    input_extra: list[ExtraText] | None = None


@routes.post("/infill", body=InfillRequest, **COMPLETION)
async def infill(request: web.Request) -> web.StreamResponse:
    """Complete the text between a prefix and a suffix."""
    body = await read_json(request, InfillRequest)
    with await lease_model(request, body) as lease:
        prompt = LlamaPrompt(await _infill_prompt(lease.serving, body))
        prepared = await prepare_llama_completion(body, lease.serving, [prompt])
        return await respond_to_completion(request, lease, body, prepared)


async def _infill_prompt(serving: Serving, body: InfillRequest) -> list[TokenPiece]:
    """The prompt for the text at the cursor, in the model's own format. Raises `InvalidRequest`.

    A prompt that is too long is truncated where it is farthest from the cursor: first the extra texts, then prefix and
    suffix. The suffix keeps at least a quarter of the remaining tokens, if it has that many.
    """
    fill_in = serving.info.fill_in
    if fill_in is None:
        raise InvalidRequest(
            "input_prefix", f"is not supported: {serving.info.name} was not trained for fill-in-the-middle"
        )

    async def read(text: str, field: str) -> list[TokenPiece]:
        return await tokenize(serving, text, field, add_special=False, parse_special=False)

    async def control(text: str) -> list[TokenPiece]:
        return await serving.client.tokenize(text, add_special=False)

    if len(body.input_extra or []) > MAX_TEXTS:
        raise InvalidRequest("input_extra", f"has more than {MAX_TEXTS} texts; merge some of them")
    prompt = await read(body.prompt, "prompt")
    prefix = await read(body.input_prefix, "input_prefix")
    suffix = await read(body.input_suffix, "input_suffix")
    extra: list[TokenPiece] = []
    for i, chunk in enumerate(body.input_extra or []):
        separator = await control(fill_in.file) if fill_in.file else []
        extra += [*separator, *await read(f"{chunk.filename}\n{chunk.text}\n", f"input_extra[{i}].text")]
    if extra and fill_in.file:
        extra += [*await control(fill_in.file), *await read("current\n", "input_extra")]

    marks = [await control(mark) for mark in (fill_in.prefix, fill_in.suffix, fill_in.middle)]
    begin = await serving.client.tokenize("", add_special=True)
    if extra and fill_in.repository:
        begin += [*await control(fill_in.repository), *await read(f"{_REPOSITORY}\n", "input_extra")]
    max_sequence = serving.info.max_sequence
    n_predict = body.n_predict if body.n_predict is not None and body.n_predict >= 0 else max_sequence // 4
    n_fixed = len(prompt) + len(begin) + sum(map(len, marks))
    n_left = max(0, max_sequence - min(n_predict, max_sequence // 2) - n_fixed)
    suffix = suffix[: max(n_left // 4, n_left - len(prefix))]
    prefix = _last(prefix, n_left - len(suffix))
    extra = _last(extra, n_left - len(suffix) - len(prefix))
    return [*begin, *extra, *marks[0], *prefix, *prompt, *marks[1], *suffix, *marks[2]]


def _last(tokens: list[TokenPiece], n: int) -> list[TokenPiece]:
    """The last `n` tokens; none if `n` is negative."""
    return tokens[len(tokens) - n :] if 0 < n < len(tokens) else tokens if n > 0 else []
