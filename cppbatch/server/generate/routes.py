"""The routes of this project's own API."""

from __future__ import annotations

import asyncio

from aiohttp import web

from cppbatch.server.generate.backlog import run_backlog
from cppbatch.server.generate.plans import batch_plan, generate_plan
from cppbatch.server.generate.schemas import BatchRequest, GenerateRequest
from cppbatch.server.parse import read_json
from cppbatch.server.respond import answer
from cppbatch.server.serving import SERVING

routes = web.RouteTableDef()


@routes.post("/generate")
async def generate(request: web.Request) -> web.StreamResponse:
    """Continues a prompt."""
    body = await read_json(request, GenerateRequest)
    return await answer(request, generate_plan(body, request.app[SERVING]))


@routes.post("/generate/batch")
async def generate_batch(request: web.Request) -> web.StreamResponse:
    """Continues many prompts, or one in many ways; one that fails does not harm the others."""
    body = await read_json(request, BatchRequest)
    plan = await asyncio.to_thread(batch_plan, body, request.app[SERVING])  # 256 items with large fields take seconds
    return await answer(request, plan, run_backlog)
