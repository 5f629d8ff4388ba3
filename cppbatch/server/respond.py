"""Sends an answer, whole or as server-sent events."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

import msgspec
from aiohttp import web

from cppbatch.engine.request import GenerationEvent
from cppbatch.server.answers import Answer, Json
from cppbatch.server.errors import describe, json_response
from cppbatch.server.generation import Event

_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


async def send_whole(events: AsyncGenerator[Event, None], answer: Answer, n_completions: int) -> web.Response:
    """Waits for every completion and answers with all of them, or the best."""
    completions: list[list[GenerationEvent]] = [[] for _ in range(n_completions)]
    async with contextlib.aclosing(events):
        async for index, event in events:
            answer.note(index, event)
            completions[index].append(event)
    return json_response(answer.whole(completions))


async def send_stream(
    request: web.Request, events: AsyncGenerator[Event, None], answer: Answer, *, include_usage: bool
) -> web.StreamResponse:
    """Sends each event as it comes. Errors before the first one get a status of their own, later ones an event."""
    async with contextlib.aclosing(events):
        first = await anext(events)
        answer.note(*first)  # raises if that is already the end of it
        response = web.StreamResponse(headers=_HEADERS)
        await response.prepare(request)
        try:
            await _send_events(request, response, first, events, answer)
            if include_usage:
                await _send(request, response, answer.usage_chunk())
        except ConnectionResetError:
            raise
        except Exception as error:
            await _send(request, response, describe(error)[1])
        await response.write(b"data: [DONE]\n\n")
    return response


async def _send_events(
    request: web.Request,
    response: web.StreamResponse,
    first: Event,
    rest: AsyncGenerator[Event, None],
    answer: Answer,
) -> None:
    opened: set[int] = set()

    async def send(index: int, event: GenerationEvent) -> None:
        answer.note(index, event)
        chunks: list[Json | None] = []
        if index not in opened:
            opened.add(index)
            chunks.append(answer.opening(index))
        if event.text or event.logprobs:
            chunks.append(answer.delta(index, event))
        if event.finish_reason:
            chunks.append(answer.closing(index))
        await _send(request, response, *chunks)

    await send(*first)
    async for index, event in rest:
        await send(index, event)


async def _send(request: web.Request, response: web.StreamResponse, *chunks: Json | None) -> None:
    lines = [b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks if chunk is not None]
    if lines:
        await response.write(b"".join(lines))
        await request.writer.drain()  # `write` alone would let 64 KiB wait for a client that does not read
