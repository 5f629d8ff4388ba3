"""The client of the load test: sends requests to one server and measures their latencies."""

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
    """A server under test, and how requests to it look."""

    label: str
    url: str
    """Without /v1."""
    model: str
    endpoint: Endpoint = "completions"
    api_key: str | None = None
    unknown: tuple[str, ...] = ()
    """Request fields that the server refuses, so that requests are sent without them."""

    def path(self) -> str:
        """Returns the URL of the endpoint."""
        return self.url + _PATHS[self.endpoint]

    def body(self, request: LoadRequest) -> bytes:
        """Returns the request's body."""
        fields: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.max_tokens,
            "temperature": 0 if request.seed is None else request.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if request.ignore_eos:
            fields["ignore_eos"] = True
        if self.endpoint == "chat":
            text = request.prompt
            fields["messages"] = [{"role": "user", "content": text}] if isinstance(text, str) else text
        else:
            fields["prompt"] = request.prompt
        if request.seed is not None:
            fields["seed"] = request.seed
        if request.schema is not None:
            form = {"name": "answer", "schema": request.schema}
            fields["response_format"] = {"type": "json_schema", "json_schema": form}
        if request.n > 1:
            fields["n"] = request.n
        return msgspec.json.encode({name: value for name, value in fields.items() if name not in self.unknown})


class RequestOutcome(msgspec.Struct, kw_only=True):
    """The result of a request. Times are in seconds."""

    failure: RequestFailure | None = None
    due: float = 0
    """When it was sent or due, on the clock of `perf_counter`."""
    samples: int = 1
    """Completions of it (`n`)."""
    time_to_first_token: float = 0
    """From when the request was sent or due to the first text."""
    gaps: list[float] = []
    """Between two chunks of text of the same completion."""
    end_to_end: float = 0
    n_chunks: int = 0
    """Chunks with text; most servers send one token in each."""
    text: str = ""
    """The content of all its completions, in the order of arrival, without reasoning."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """Cached prompt tokens, as the server reports."""
    output_tokens: int = 0
    """The server's count, but at least one for each chunk."""
    has_usage: bool = False
    """The server reports output tokens, and at least as many as chunks."""
    ended_early: bool = False
    """The output is shorter than requested."""
    resent: bool = False
    """The request was sent twice, because the server closed the kept-alive connection first used."""


class LoadClient:
    """An asynchronous context manager with any number of kept-alive connections to one server."""

    def __init__(self, server: TargetServer, timeout: float) -> None:
        """`timeout`: seconds for a complete request."""
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
        """Sends one streaming request. Times count from `due`, on the clock of `perf_counter`."""
        outcome, stream = RequestOutcome(due=due, samples=request.n), CompletionStream()
        try:
            async with await self._post(self._server.body(request), outcome) as response:
                await _check(response)
                async for data in response.content.iter_any():
                    stream.feed(data, perf_counter())
            ended = perf_counter()
            stream.finish(ended)
        except RequestFailure as failure:
            outcome.failure = failure
        except asyncio.TimeoutError:
            outcome.failure = RequestFailure(
                "timeout", f"no complete answer within {self._fresh.timeout.total:g} s (--timeout)"
            )
        except aiohttp.ClientConnectorError as error:
            outcome.failure = RequestFailure("no connection", str(error))
        except (aiohttp.ClientError, OSError) as error:
            outcome.failure = RequestFailure("connection closed", str(error))
        else:
            _fill(outcome, request, stream, due, ended)
        return outcome

    async def _post(self, body: bytes, outcome: RequestOutcome) -> aiohttp.ClientResponse:
        """Posts a request. If the server closes a reused connection meanwhile, sends it again on a new connection."""
        seen = SimpleNamespace(reused=False)
        try:
            return await self._kept_alive.post(self._server.path(), data=body, trace_request_ctx=seen)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            if not seen.reused:
                raise
        outcome.resent = True
        return await self._fresh.post(self._server.path(), data=body)


def authorization(api_key: str | None) -> Mapping[str, str]:
    """Returns the header with the key as a bearer token."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


async def _note_reuse(_session: object, context: SimpleNamespace, _params: object) -> None:
    context.trace_request_ctx.reused = True


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        raise RequestFailure(f"HTTP {response.status}", error_text(await response.read()), response.status)
    if response.content_type != "text/event-stream":
        raise RequestFailure("no stream", f"the answer is {response.content_type}, not a stream of events")


def _fill(outcome: RequestOutcome, request: LoadRequest, stream: CompletionStream, due: float, ended: float) -> None:
    assert stream.first is not None
    outcome.time_to_first_token = stream.first - due
    outcome.end_to_end = ended - due
    outcome.gaps, outcome.n_chunks, outcome.text = stream.gaps, stream.n_chunks, "".join(stream.texts)
    n_reported = 0
    if usage := stream.usage:
        n_reported = usage.completion_tokens or 0
        outcome.prompt_tokens = usage.prompt_tokens
        details = usage.prompt_tokens_details
        outcome.cached_tokens = details.cached_tokens if details else None
    outcome.has_usage = n_reported >= stream.n_chunks  # with `n` llama-server reports the tokens of one completion only
    outcome.output_tokens = max(n_reported, stream.n_chunks)
    is_short = outcome.has_usage and n_reported < request.max_tokens * request.n
    outcome.ended_early = request.ignore_eos and is_short
