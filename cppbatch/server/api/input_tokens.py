"""`POST /v1/chat/completions/input_tokens` and `/v1/responses/input_tokens`: the length of a prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeVar

import msgspec
from aiohttp import web

from cppbatch.chat.chat_format import ChatTurn
from cppbatch.server.api.openai.chat_types import ChatCompletionRequest
from cppbatch.server.api.responses.conversion import response_turn
from cppbatch.server.api.responses.types import ResponsesRequest
from cppbatch.server.fields.parse import read_json
from cppbatch.server.fields.sampling import SamplingFields
from cppbatch.server.http.api_errors import json_response
from cppbatch.server.http.endpoint import Routes
from cppbatch.server.models.served import lease_model

routes = Routes()

Body = TypeVar("Body", bound=SamplingFields)


class InputTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The number of prompt tokens of the same request without `/input_tokens`."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


@routes.post(
    "/v1/chat/completions/input_tokens",
    InputTokens,
    ChatCompletionRequest,
    also=("/chat/completions/input_tokens",),
)
async def chat_input_tokens(request: web.Request) -> web.Response:
    """Count the prompt tokens of a chat completion."""
    return await _count(request, ChatCompletionRequest, ChatCompletionRequest.turn)


@routes.post("/v1/responses/input_tokens", InputTokens, ResponsesRequest, also=("/responses/input_tokens",))
async def response_input_tokens(request: web.Request) -> web.Response:
    """Count the prompt tokens of a response."""
    return await _count(request, ResponsesRequest, response_turn)


async def _count(request: web.Request, kind: type[Body], turn_of: Callable[[Body], ChatTurn]) -> web.Response:
    body = await read_json(request, kind)
    with await lease_model(request, body) as lease:
        serving = lease.serving
        serving.check_model(body.model)
        serving.check_size(body)
        tokens = await serving.chat_tokens(await serving.render(turn_of(body)))
    return json_response(InputTokens(input_tokens=len(tokens)))
