"""The routes of this project's own API."""

from __future__ import annotations

import asyncio

from aiohttp import web

from cppbatch.server.generate.plans import prepare_batch, prepare_generate
from cppbatch.server.generate.schemas import BatchRequest, GenerateRequest
from cppbatch.server.parse import read_json
from cppbatch.server.response import respond
from cppbatch.server.run_requests import run_requests
from cppbatch.server.serving import SERVING

routes = web.RouteTableDef()


@routes.post("/generate")
async def generate(request: web.Request) -> web.StreamResponse:
    """Continues a prompt."""
    body = await read_json(request, GenerateRequest)
    return await respond(request, prepare_generate(body, request.app[SERVING]))


@routes.post("/generate/batch")
async def generate_batch(request: web.Request) -> web.StreamResponse:
    """Continues many prompts, or one in many ways; one that fails does not harm the others."""
    body = await read_json(request, BatchRequest)
    serving = request.app[SERVING]
    prepared = await asyncio.to_thread(prepare_batch, body, serving)  # 256 items with large fields take seconds
    events = run_requests(serving.client, prepared.requests, wait_when_full=True, errors_as_events=True)
    return await respond(request, prepared, events)
