"""Probing a server before the load test: is it reachable, which models does it serve, which fields does it accept."""

from __future__ import annotations

import asyncio
import os
from time import perf_counter
from typing import Any

import aiohttp
import msgspec
from yarl import URL

from cppbatch.bench.load.client import LoadClient, TargetServer, authorization
from cppbatch.bench.load.completion_stream import RequestFailure, error_text
from cppbatch.bench.load.workload import Endpoint, LoadRequest
from cppbatch.errors import ConfigError, UnusableServer

_DROPPABLE = ("ignore_eos", "stream_options")
"""Fields that a strict server may refuse. The load test works without them."""
_PROBE_SECONDS = 10


class Target(msgspec.Struct, frozen=True):
    """A server as the user named it."""

    label: str
    url: str
    """Without /v1 at the end."""

    @classmethod
    def read(cls, given: str) -> Target:
        """Parses URL or LABEL=URL. Raises `ConfigError`."""
        label, equals, address = given.partition("=")
        if not equals or "://" in label:  # the = is part of the URL
            label, address = "", given
        try:
            url = URL(address)
        except ValueError as error:
            raise ConfigError(f"--url {given}: {error}") from error
        if url.scheme not in ("http", "https") or not url.host:
            raise ConfigError(f"--url {given} is not a server URL; use the form http://127.0.0.1:8080")
        return cls(label or url.authority.rpartition("@")[2], address.rstrip("/").removesuffix("/v1"))


async def probe_server(
    target: Target, *, model: str | None, endpoint: Endpoint, api_key: str | None, timeout: float
) -> TargetServer:
    """Sends a request of two tokens, again without a field that the server refuses. Raises `UnusableServer`."""
    names = await _models(target, api_key)
    server = TargetServer(
        label=target.label, url=target.url, model=model or names[0], endpoint=endpoint, api_key=api_key
    )
    while failure := await _try(server, timeout):
        refused = next((name for name in _DROPPABLE if name in str(failure) and name not in server.unknown), None)
        if failure.status not in (400, 422) or refused is None:
            raise UnusableServer(_explain(server, names, failure))
        server = msgspec.structs.replace(server, unknown=(*server.unknown, refused))
    return server


async def _try(server: TargetServer, timeout: float) -> RequestFailure | None:
    async with LoadClient(server, timeout) as client:
        return (await client.send(LoadRequest("The sky is", max_tokens=2), perf_counter())).failure


async def _models(target: Target, api_key: str | None) -> list[str]:
    """Returns the names of the server's models, at least one. Raises `UnusableServer`."""
    name = _server_name(target.label, target.url)
    timeout = aiohttp.ClientTimeout(total=_PROBE_SECONDS)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=authorization(api_key)) as session,
            session.get(f"{target.url}/v1/models") as response,
        ):
            status, body = response.status, await response.read()
    except asyncio.TimeoutError:
        raise UnusableServer(f"{name} did not answer within {_PROBE_SECONDS} s: is this the right address?") from None
    except aiohttp.ClientConnectorError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error
        raise UnusableServer(f"cannot connect to {name} ({reason}): start the server, or correct --url") from error
    except aiohttp.ClientError as error:
        raise UnusableServer(f"{name} did not send a valid HTTP response ({error}): correct --url") from error
    if status in (401, 403):
        raise UnusableServer(f"{name} {_key_problem(api_key, status)}")
    if status == 503:
        raise UnusableServer(f"{name} is not ready yet (503: {error_text(body)}); try again later")
    names = _names(body) if status == 200 else None
    if names is None:
        raise UnusableServer(
            f"{name} is not an OpenAI-compatible server: GET /v1/models returned status {status} instead of a model "
            "list; correct --url"
        )
    if not names:
        raise UnusableServer(f"{name} has no model loaded; load one first")
    return names


def _names(body: bytes) -> list[str] | None:
    try:
        answer: Any = msgspec.json.decode(body)
        return [str(model["id"]) for model in answer["data"]]
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        return None


def _explain(server: TargetServer, names: list[str], failure: RequestFailure) -> str:
    name = _server_name(server.label, server.url)
    if failure.status in (401, 403):
        return f"{name} {_key_problem(server.api_key, failure.status)}"
    if failure.status in (400, 404) and server.model not in names:
        return f"{name}: model {server.model} not found; available: {', '.join(names)} (--model)"
    if failure.status in (404, 405):
        other = "chat" if server.endpoint == "completions" else "completions"
        return f"{name} has no {server.path().removeprefix(server.url)}; try --endpoint {other}"
    return f"{name} failed to answer a test request of two tokens ({failure.kind}: {failure})"


def _server_name(label: str, url: str) -> str:
    return url if label in url else f"{label} ({url})"


def _key_problem(api_key: str | None, status: int) -> str:
    if api_key:
        return f"rejected this API key (status {status}); check --api-key"
    return f"requires an API key (status {status}); set it with --api-key or CPPBATCH_BENCH_API_KEY"
