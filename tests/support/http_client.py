"""Requests to the application in this process: JSON in, status and JSON out."""

from __future__ import annotations

from typing import Any

from aiohttp.test_utils import TestClient

Http = TestClient[Any, Any]


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
