"""Sends requests to one server, and times what comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec

from cppbatch.bench.load.completion_stream import CompletionStream, RequestFailure, error_text
from cppbatch.bench.load.workload import Endpoint, LoadRequest

_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


class TargetServer(msgspec.Struct, frozen=True, kw_only=True):
    """A server that takes such requests."""

    label: str
    url: str
    """Without /v1."""
    model: str
    endpoint: Endpoint = "completions"
    api_key: str | None = None
    unknown: tuple[str, ...] = ()
    """Fields that it refuses; they are left out."""

    def path(self) -> str:
        """Where requests go."""
        return self.url + _PATHS[self.endpoint]

    def body(self, request: LoadRequest) -> bytes:
        """In JSON. The text is as long as asked for, on servers that know `ignore_eos`."""
        fields: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.max_tokens,
            "temperature": 0 if request.seed is None else 1,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.endpoint == "chat":
            fields["messages"] = [{"role": "user", "content": request.prompt}]
        else:
            fields["prompt"] = request.prompt
        if request.seed is not None:
            fields["seed"] = request.seed
        if request.n > 1:
            fields["n"] = request.n
        return msgspec.json.encode({name: value for name, value in fields.items() if name not in self.unknown})


class RequestOutcome(msgspec.Struct, kw_only=True):
    """What came of a request. Times are in seconds."""

    failure: RequestFailure | None = None
    time_to_first_token: float = 0
    """To the first text, from when the request was sent or due."""
    gaps: list[float] = []
    """Between two pieces of text of the same completion."""
    end_to_end: float = 0
    n_pieces: int = 0
    """Of text; one token each on most servers."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """Of the prompt's, as the server says."""
    output_tokens: int = 0
    """As the server says, but at least one for each piece."""
    has_usage: bool = False
    """It says how many tokens it made, and no fewer than its pieces."""
    ended_early: bool = False
    """Before all tokens that were asked for."""
    asked_again: bool = False
    """The server closed the kept-alive connection on which it was sent first."""


class LoadClient:
    """Any number of connections to one server, kept alive. Use it as an asynchronous context manager."""

    def __init__(self, server: TargetServer, timeout: float) -> None:
        """`timeout`: seconds for a whole request."""
        self._server = server
        headers = {"Content-Type": "application/json", **authorization(server.api_key)}
        limit = aiohttp.ClientTimeout(total=timeout)
        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(_note_reuse)
        self._kept_alive = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=limit, headers=headers, trace_configs=[trace]
        )
        self._fresh = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=limit, headers=headers
        )

    async def __aenter__(self) -> LoadClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._kept_alive.close()
        await self._fresh.close()

    async def send(self, request: LoadRequest, due: float) -> RequestOutcome:
        """One streamed request. Times count from `due`, on the clock of `perf_counter`."""
        outcome, reading = RequestOutcome(), CompletionStream()
        try:
            async with await self._post(self._server.body(request), outcome) as response:
                await _check(response)
                async for data in response.content.iter_any():
                    reading.feed(data, perf_counter())
            ended = perf_counter()
            reading.finish(ended)
        except RequestFailure as failure:
            outcome.failure = failure
        except asyncio.TimeoutError:
            outcome.failure = RequestFailure(
                "timeout", f"no whole answer within {self._fresh.timeout.total:g} s (--timeout)"
            )
        except aiohttp.ClientConnectorError as error:
            outcome.failure = RequestFailure("no connection", str(error))
        except (aiohttp.ClientError, OSError) as error:
            outcome.failure = RequestFailure("connection closed", str(error))
        else:
            _fill(outcome, request, reading, due, ended)
        return outcome

    async def _post(self, body: bytes, outcome: RequestOutcome) -> aiohttp.ClientResponse:
        """A server may close a kept-alive connection just when a request is on its way: clients send that anew."""
        seen = SimpleNamespace(reused=False)
        try:
            return await self._kept_alive.post(self._server.path(), data=body, trace_request_ctx=seen)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            if not seen.reused:
                raise
        outcome.asked_again = True
        return await self._fresh.post(self._server.path(), data=body)


def authorization(api_key: str | None) -> Mapping[str, str]:
    """As a bearer token."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


async def _note_reuse(_session: object, context: SimpleNamespace, _params: object) -> None:
    context.trace_request_ctx.reused = True


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        raise RequestFailure(f"HTTP {response.status}", error_text(await response.read()), response.status)
    if response.content_type != "text/event-stream":
        raise RequestFailure("no stream", f"the answer is {response.content_type}, not a stream of events")


def _fill(outcome: RequestOutcome, request: LoadRequest, reading: CompletionStream, due: float, ended: float) -> None:
    assert reading.first is not None
    outcome.time_to_first_token = reading.first - due
    outcome.end_to_end = ended - due
    outcome.gaps, outcome.n_pieces = reading.gaps, reading.n_pieces
    n_told = 0
    if usage := reading.usage:
        n_told = usage.completion_tokens or 0
        outcome.prompt_tokens = usage.prompt_tokens
        details = usage.prompt_tokens_details
        outcome.cached_tokens = details.cached_tokens if details else None
    outcome.has_usage = n_told >= reading.n_pieces  # llama-server tells those of one text where `n` were asked for
    outcome.output_tokens = max(n_told, reading.n_pieces)
    outcome.ended_early = outcome.has_usage and n_told < request.max_tokens * request.n
