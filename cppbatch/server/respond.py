"""Sends a reply, whole or as server-sent events."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable
from functools import partial

import msgspec
from aiohttp import web

from cppbatch.cluster.engine_client import EngineClient
from cppbatch.engine.request import GenerationRequest
from cppbatch.errors import InvalidRequest
from cppbatch.server.errors import json_response
from cppbatch.server.metrics import METRICS, endpoint_of
from cppbatch.server.plan import Plan, gather
from cppbatch.server.reply import Frame, Reply
from cppbatch.server.run import Event, run
from cppbatch.server.serving import SERVING

_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


Runner = Callable[[EngineClient, list[GenerationRequest]], AsyncGenerator[Event, None]]


async def answer(request: web.Request, plan: Plan, runner: Runner | None = None) -> web.StreamResponse:
    """Runs the plan, in the runner's way if there is one, and sends its reply."""
    runner = runner or partial(run, check=plan.stream)
    events = runner(request.app[SERVING].client, plan.requests)
    events = request.app[METRICS].observe(events, endpoint_of(request), len(plan.requests))
    try:
        if plan.stream:
            return await _send_stream(request, events, plan.reply)
        return json_response(plan.reply.whole(await gather(events, plan)))
    except InvalidRequest as error:
        raise plan.renamed(error) from error


async def _send_stream(request: web.Request, events: AsyncGenerator[Event, None], reply: Reply) -> web.StreamResponse:
    """Sends each event as it comes. Errors before the first one get a status of their own, later ones an event."""
    async with contextlib.aclosing(events):
        first = await anext(events, None)  # None: there is nothing to run
        if first:
            reply.note(*first)  # raises if that is already the end of it
        response = web.StreamResponse(headers=_HEADERS)
        await response.prepare(request)
        try:
            await _send(request, response, [*reply.opening(), *(reply.frames(*first) if first else [])])
            async for index, event in events:
                reply.note(index, event)
                await _send(request, response, reply.frames(index, event))
            last = reply.ending()
        except ConnectionResetError:
            raise
        except Exception as error:
            last = reply.failure(error)
        await _send(request, response, last)
    return response


async def _send(request: web.Request, response: web.StreamResponse, frames: list[Frame]) -> None:
    if frames:
        await response.write(b"".join(map(_encoded, frames)))
        await request.writer.drain()  # `write` alone would let 64 KiB wait for a client that does not read


def _encoded(frame: Frame) -> bytes:
    name = f"event: {frame.event}\n".encode() if frame.event else b""
    data = frame.data.encode() if isinstance(frame.data, str) else msgspec.json.encode(frame.data)
    return name + b"data: " + data + b"\n\n"
