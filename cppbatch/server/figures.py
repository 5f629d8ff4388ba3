"""What the server tells about itself: /stats, /metrics, /openapi.json."""

from __future__ import annotations

import msgspec
from aiohttp import web

from cppbatch.errors import EngineClosed
from cppbatch.server.api_errors import json_response
from cppbatch.server.metrics import CONTENT_TYPE, METRICS
from cppbatch.server.openapi import document
from cppbatch.server.serving import SERVING
from cppbatch.server.shapes import ServerFigures
from cppbatch.server.storage import STORAGE

routes = web.RouteTableDef()


@routes.get("/stats")
async def stats(request: web.Request) -> web.Response:
    """The sums over all engines, the last minute, and each engine by itself."""
    client = request.app[SERVING].client
    try:
        totals = await client.stats()
    except EngineClosed:  # none answers just now, and that is worth knowing too
        totals = None
    tokens_per_second = totals.recent_steps.tokens_per_second if totals else None
    figures = ServerFigures(
        last_minute=request.app[METRICS].recent.last_minute(tokens_per_second),
        workers=await client.workers(),
        batches=request.app[STORAGE].figures(),
    )
    return json_response({**(msgspec.structs.asdict(totals) if totals else {}), **msgspec.structs.asdict(figures)})


@routes.get("/metrics")
async def metrics(request: web.Request) -> web.Response:
    """Everything for Prometheus."""
    metrics, batches = request.app[METRICS], request.app[STORAGE].figures()
    if batches:
        metrics.note_batches(batches)
    page = metrics.page(await request.app[SERVING].client.workers())
    return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE})


@routes.get("/openapi.json")
async def openapi(_request: web.Request) -> web.Response:
    """What every route takes and gives."""
    return web.Response(body=document(), content_type="application/json")
