"""`POST /v1/chat/completions/input_tokens` and `/v1/responses/input_tokens`: the length of a prompt."""

from __future__ import annotations

from typing import Literal

import msgspec
from aiohttp import web

from cppbatch.server.api_errors import json_response
from cppbatch.server.endpoint import Routes
from cppbatch.server.model_choice import serving_of
from cppbatch.server.openai.chat_completions import prepare_chat
from cppbatch.server.openai.chat_types import ChatCompletionRequest
from cppbatch.server.parse import read_json
from cppbatch.server.responses.create_response import prepare_response_chat
from cppbatch.server.responses.responses_types import ResponsesRequest

routes = Routes()


class InputTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt tokens that the same request without `/input_tokens` would have."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


@routes.post("/v1/chat/completions/input_tokens", InputTokens, ChatCompletionRequest)
async def chat_input_tokens(request: web.Request) -> web.Response:
    """Count the prompt tokens of a chat completion."""
    body = await read_json(request, ChatCompletionRequest)
    serving = await serving_of(request, body)
    serving.check_model(body.model)
    tokens = await serving.chat_tokens(await prepare_chat(body, serving), "messages")
    return json_response(InputTokens(input_tokens=len(tokens)))


@routes.post("/v1/responses/input_tokens", InputTokens, ResponsesRequest)
async def response_input_tokens(request: web.Request) -> web.Response:
    """Count the prompt tokens of a response."""
    body = await read_json(request, ResponsesRequest)
    serving = await serving_of(request, body)
    serving.check_model(body.model)
    tokens = await serving.chat_tokens(await prepare_response_chat(body, serving), "input")
    return json_response(InputTokens(input_tokens=len(tokens)))
