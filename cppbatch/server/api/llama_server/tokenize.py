"""`POST /tokenize`, `/detokenize` and `/apply-template`, and `GET /tokenizer_info`: prompts as tokens and as text.

`/tokenize` and `/detokenize` support the formats of llama-server and vLLM, `/tokenizer_info` that of vLLM.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from cppbatch.chat.messages import ChatMessage, Tool
from cppbatch.chat.template import CHATML
from cppbatch.engine.request import Media, TokenPiece, detokenize, text_of_part
from cppbatch.errors import InvalidRequest
from cppbatch.server.answer.mixed_prompts import MEDIA_MARKER, tokenize
from cppbatch.server.api.openai.chat_types import ChatCompletionRequest
from cppbatch.server.fields.parse import read_json
from cppbatch.server.http.api_errors import json_response
from cppbatch.server.http.endpoint import Routes
from cppbatch.server.models.served import lease_model
from cppbatch.server.models.serving import Serving

routes = Routes()


class TokenizeRequest(msgspec.Struct):
    """The body of `POST /tokenize`: `content` as in llama-server, `prompt` or `messages` as in vLLM."""

    content: str | list[str | int] | None = None
    """A text, or a mix of texts and token ids."""
    add_special: bool = False
    """For `content`: start with BOS if the model uses it."""
    parse_special: bool = True
    """For `content`: parse the texts of control tokens as control tokens."""
    with_pieces: bool = False

    prompt: str | None = None
    """A text, which may contain control tokens."""
    add_special_tokens: bool = True
    """For `prompt`: start with BOS if the model uses it."""
    messages: list[ChatMessage] | None = None
    """A conversation, as in `/v1/chat/completions`."""
    tools: list[Tool] | None = None
    """For `messages`, like the next two fields."""
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None
    model: str | None = None
    """Selects one of several models."""

    def check(self) -> None:
        """Raises `InvalidRequest` unless exactly one of the three is given."""
        given = [name for name in ("content", "prompt", "messages") if getattr(self, name) is not None]
        if not given:
            raise InvalidRequest("content", "is required, unless prompt or messages is given")
        if len(given) > 1:
            raise InvalidRequest(given[1], f"cannot be combined with {given[0]}")


class TokenAndPiece(msgspec.Struct, frozen=True, kw_only=True):
    """A token with its text, or with its bytes if they are not valid UTF-8."""

    id: int
    piece: str | list[int]


class TokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /tokenize`."""

    tokens: list[int | TokenAndPiece]
    """Objects if `with_pieces`, otherwise ids."""
    count: int | UnsetType = UNSET
    """For vLLM's format, like the following fields."""
    max_model_len: int | UnsetType = UNSET
    """Maximum tokens of prompt and completion together."""
    token_strs: list[str] | UnsetType = UNSET
    """With `return_token_strs`."""


class DetokenizeRequest(msgspec.Struct):
    """The body of `POST /detokenize`."""

    tokens: list[int]
    model: str | None = None
    """Selects one of several models."""


class DetokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /detokenize`: the text, under the names of llama-server and vLLM."""

    content: str
    prompt: str


class TokenizerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /tokenizer_info`, with the names of tokenizer_config.json: for clients without a tokenizer."""

    tokenizer_class: str = "llama.cpp"
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None = None
    add_bos_token: bool
    """Whether a text prompt starts with BOS."""
    model_max_length: int
    """Maximum tokens of prompt and completion together."""
    chat_template: str


class ApplyTemplateResponse(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /apply-template`."""

    prompt: str
    """Images and audio are replaced by the `media_marker` of `GET /props`, as expected by `/completion`."""


@routes.post("/tokenize", TokenizeResponse, TokenizeRequest)
async def tokenize_text(request: web.Request) -> web.Response:
    """Tokenise a text."""
    body = await read_json(request, TokenizeRequest)
    with await lease_model(request, body) as lease:
        serving = lease.serving
        body.check()
        if body.content is not None:
            tokens = await tokenize(
                serving, body.content, "content", add_special=body.add_special, parse_special=body.parse_special
            )
            shown = await asyncio.to_thread(_encode_tokens, tokens, with_pieces=body.with_pieces)
            return json_response(TokenizeResponse(tokens=shown))
        tokens = await _vllm_tokens(body, serving)
        return json_response(
            TokenizeResponse(
                tokens=[token.id for token in tokens],
                count=len(tokens),
                max_model_len=serving.info.max_sequence,
                token_strs=[token.piece.decode("utf-8", "replace") for token in tokens]
                if body.return_token_strs
                else UNSET,
            )
        )


async def _vllm_tokens(body: TokenizeRequest, serving: Serving) -> list[TokenPiece]:
    """The tokens of `prompt`, or of the prompt of `messages`. Raises `InvalidRequest`."""
    if body.messages is None:
        return await tokenize(serving, body.prompt or "", "prompt", add_special=body.add_special_tokens)
    request = ChatCompletionRequest(
        messages=body.messages,
        tools=body.tools,
        add_generation_prompt=body.add_generation_prompt,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    serving.check_size(request)
    chat = await serving.render(request.turn())
    return await tokenize(serving, chat.prompt, "messages") if chat.parts is None else await serving.chat_tokens(chat)


def _encode_tokens(tokens: list[TokenPiece], *, with_pieces: bool) -> list[Any]:
    """The ids, or the JSON of a `TokenAndPiece` for each token. Each distinct token is encoded once: a text may have a
    million tokens, but only a few thousand distinct ones."""
    if not with_pieces:
        return [token.id for token in tokens]
    encoded = {
        token.id: msgspec.Raw(msgspec.json.encode(TokenAndPiece(id=token.id, piece=_text_or_bytes(token.piece))))
        for token in {token.id: token for token in tokens}.values()
    }
    return [encoded[token.id] for token in tokens]


def _text_or_bytes(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


@routes.post("/detokenize", DetokenizeResponse, DetokenizeRequest)
async def detokenize_tokens(request: web.Request) -> web.Response:
    """Convert tokens to text."""
    body = await read_json(request, DetokenizeRequest)
    ids: list[str | int] = list(body.tokens)
    with await lease_model(request, body) as lease:
        tokens = await tokenize(lease.serving, ids, "tokens")
    text = detokenize(tokens)
    return json_response(DetokenizeResponse(content=text, prompt=text))


@routes.get("/tokenizer_info", TokenizerInfo)
async def tokenizer_info(request: web.Request) -> web.Response:
    """Get a description of the tokenizer."""
    with await lease_model(request) as lease:
        serving = lease.serving
        return json_response(
            TokenizerInfo(
                bos_token=serving.info.bos or None,
                eos_token=serving.info.eos or None,
                add_bos_token=bool(await serving.client.tokenize("", add_special=True)),
                model_max_length=serving.info.max_sequence,
                chat_template=serving.template or CHATML,
            )
        )


@routes.post("/apply-template", ApplyTemplateResponse, ChatCompletionRequest)
async def apply_template(request: web.Request) -> web.Response:
    """Apply the chat template to a conversation."""
    body = await read_json(request, ChatCompletionRequest)
    with await lease_model(request, body) as lease:
        serving = lease.serving
        serving.check_size(body)
        chat = await serving.render(body.turn())
        parts = [chat.prompt] if chat.parts is None else chat.parts
        return json_response(
            ApplyTemplateResponse(
                prompt="".join(MEDIA_MARKER if isinstance(part, Media) else text_of_part(part) for part in parts)
            )
        )
