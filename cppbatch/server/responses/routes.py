"""The route of OpenAI's responses. Nothing is stored, so there is none to fetch or delete one."""

from __future__ import annotations

from aiohttp import web

from cppbatch.server.parse import read_json
from cppbatch.server.response import respond
from cppbatch.server.responses.plans import prepare_response
from cppbatch.server.responses.schemas import ResponsesRequest
from cppbatch.server.serving import SERVING

routes = web.RouteTableDef()


@routes.post("/v1/responses")
async def responses(request: web.Request) -> web.StreamResponse:
    """Continues a conversation with the assistant's next message."""
    body = await read_json(request, ResponsesRequest)
    return await respond(request, await prepare_response(body, request.app[SERVING]))
