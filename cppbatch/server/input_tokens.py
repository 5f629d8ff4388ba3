"""`POST /v1/chat/completions/input_tokens` and `/v1/responses/input_tokens`: the length of a prompt."""

from __future__ import annotations

from typing import Literal

import msgspec
from aiohttp import web

from cppbatch.server.api_errors import json_response
from cppbatch.server.endpoint import Routes
from cppbatch.server.model_choice import lease_model
from cppbatch.server.openai.chat_types import ChatCompletionRequest
from cppbatch.server.parse import read_json
from cppbatch.server.responses.input_conversion import response_turn
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
    with await lease_model(request, body) as lease:
        serving = lease.serving
        serving.check_model(body.model)
        serving.check_size(body)
        tokens = await serving.chat_tokens(await serving.render(body.turn()))
    return json_response(InputTokens(input_tokens=len(tokens)))


@routes.post("/v1/responses/input_tokens", InputTokens, ResponsesRequest)
async def response_input_tokens(request: web.Request) -> web.Response:
    """Count the prompt tokens of a response."""
    body = await read_json(request, ResponsesRequest)
    with await lease_model(request, body) as lease:
        serving = lease.serving
        serving.check_model(body.model)
        serving.check_size(body)
        tokens = await serving.chat_tokens(await serving.render(response_turn(body)))
    return json_response(InputTokens(input_tokens=len(tokens)))
