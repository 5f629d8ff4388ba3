"""Anthropic's routes. Each reads its request, plans it, and sends the answer."""

from __future__ import annotations

from aiohttp import web

from cppbatch.server.anthropic.plans import prepare_message, prompt_tokens
from cppbatch.server.anthropic.schemas import CountTokensRequest, MessagesRequest
from cppbatch.server.anthropic.shapes import TokenCount
from cppbatch.server.api_errors import json_response
from cppbatch.server.parse import read_json
from cppbatch.server.response import respond
from cppbatch.server.serving import SERVING

routes = web.RouteTableDef()


@routes.post("/v1/messages")
async def messages(request: web.Request) -> web.StreamResponse:
    """Continues a conversation with the assistant's next message."""
    body = await read_json(request, MessagesRequest)
    return await respond(request, await prepare_message(body, request.app[SERVING]))


@routes.post("/v1/messages/count_tokens")
async def count_tokens(request: web.Request) -> web.Response:
    """How long the prompt of such a conversation is."""
    body = await read_json(request, CountTokensRequest)
    return json_response(TokenCount(input_tokens=await prompt_tokens(body, request.app[SERVING])))
