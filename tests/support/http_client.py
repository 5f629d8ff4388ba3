"""Requests to the application in this process: JSON in, status and JSON out."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from aiohttp.test_utils import TestClient, TestServer

from cppbatch import LocalEngine
from cppbatch.config import EngineConfig
from cppbatch.server.app import create_app
from cppbatch.server.settings import ServerSettings

Http = TestClient[Any, Any]


def http_to(engine: Any, settings: ServerSettings | None = None, storage: Any = None) -> Http:
    """A client of the application over this engine."""
    return TestClient(TestServer(create_app(engine, settings, storage)))


@contextlib.asynccontextmanager
async def http_of(
    model: Path | EngineConfig, settings: ServerSettings | None = None, **engine: Any
) -> AsyncIterator[Http]:
    """A client of the application over a `LocalEngine` of its own."""
    async with LocalEngine(model, **engine) as its, http_to(its, settings) as http:
        yield http


async def post(http: Http, path: str, body: object = None, **options: Any) -> tuple[int, Any]:
    """Status and JSON of the answer. Bytes and strings are sent as they are, anything else as JSON."""
    sent = {"data" if isinstance(body, (bytes, str)) else "json": body}
    async with http.post(path, **sent, **options) as answer:
        return answer.status, await answer.json()


async def get(http: Http, path: str, **options: Any) -> tuple[int, Any]:
    """Status and JSON of the answer."""
    async with http.get(path, **options) as answer:
        return answer.status, await answer.json()


async def answered(http: Http, path: str, body: object) -> Any:
    """The JSON of an answer with status 200."""
    status, answer = await post(http, path, body)
    assert status == 200, answer
    return answer
