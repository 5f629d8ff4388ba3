"""Endpoints whose answer is made of engine requests: each is declared by the function that prepares these."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from cppbatch.server.endpoint import Answer, Routes
from cppbatch.server.model_choice import lease_model
from cppbatch.server.parse import read_json
from cppbatch.server.response import PreparedRequest, respond

Prepare = TypeVar("Prepare", bound=Callable[..., Awaitable[PreparedRequest]])


def generation(
    routes: Routes,
    path: str,
    body: type[msgspec.Struct],
    answer: Answer,
    *,
    streams: bool = True,
    in_batches: bool = False,
    **more: Any,
) -> Callable[[Prepare], Prepare]:
    """Declares `POST path` by the function that prepares the request, from its body and the `Serving` of its model.

    `in_batches`: batches support it. `more`: as for `Routes.post`.
    """

    def declare(prepare: Prepare) -> Prepare:
        async def handle(request: web.Request) -> web.StreamResponse:
            given = await read_json(request, body)
            with await lease_model(request, given) as lease:
                return await respond(request, lease, await prepare(given, lease.serving))

        handle.__doc__ = prepare.__doc__
        more["prepare"] = prepare if in_batches else None
        routes.post(path, answer, body, streams=streams, **more)(handle)
        return prepare

    return declare
