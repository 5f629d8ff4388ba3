"""How the response of an HTTP request is built and sent."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from time import monotonic
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from cppbatch.chat.output_parser import ArgumentsDelta, Delta, ReasoningDelta, TextDelta, ToolCallStart
from cppbatch.engine.request import FinishReason, GenerationEvent
from cppbatch.errors import EngineClosed, GenerationFailed, InvalidRequest, client_names
from cppbatch.server.answer.llama_result import Timings, timings
from cppbatch.server.fields.parse import read_json
from cppbatch.server.fields.unknown import IGNORED
from cppbatch.server.http.api_errors import api_error, json_response
from cppbatch.server.http.endpoint import Answer, Routes
from cppbatch.server.http.error_formats import openai_error
from cppbatch.server.http.event_stream import LINES, PING, STARTED, STREAM_HEADERS, ServerSentEvent
from cppbatch.server.models.served import ModelLease, lease_model
from cppbatch.server.models.serving import ResolvedRequest
from cppbatch.server.observe.metrics import METRICS, endpoint_of
from cppbatch.server.run_requests import Event, OnEvent, run_requests

Json = dict[str, Any]


class TokenCounts(NamedTuple):
    """Token counts of a whole response."""

    prompt: int
    cached: int
    completion: int
    drafted: int
    accepted: int
    image: int
    """Prompt tokens of images; `audio`: those of audio."""
    audio: int


class ResponseBuilder(ABC):
    """Builds the response of one HTTP request from the events of its completions.

    `stream`: whether the response is streamed. `n_candidates`: completions of each prompt. Completions of the same
    prompt have consecutive indices. `ignored`: names of fields without effect, for the header `X-Ignored-Fields`.
    """

    def __init__(
        self,
        resolved: ResolvedRequest,
        *,
        stream: bool | None = False,
        n_candidates: int = 1,
        ignored: tuple[str, ...] = (),
    ) -> None:
        self.requests, self.stream, self.n_candidates, self.ignored = resolved.requests, stream, n_candidates, ignored
        self.field_names = {"task": "model", **resolved.field_names}
        for request in self.requests if stream else ():
            msgspec.structs.force_setattr(request, "report_acceptance", True)
        self.last_events: dict[int, GenerationEvent] = {}
        """The last event of each finished completion, by index."""

    def record(self, index: int, event: GenerationEvent) -> None:
        """Records an event before it is sent. For the last event of a failed completion, raises `InvalidRequest`,
        `GenerationFailed` or `EngineClosed`."""
        raise_failure(event)
        if event.finish_reason:
            self.last_events[index] = event

    @abstractmethod
    def build(self, completions: list[list[GenerationEvent]]) -> object:
        """The body of a non-streamed response, from all events of each completion."""

    streams_lines = False
    """Whether a stream is lines of JSON instead of server-sent events, as in Ollama's API."""
    starts_with_counts = False
    """Whether `stream_start` has the counts of the prompt, and so waits for the first event that has them."""

    def stream_start(self) -> list[ServerSentEvent]:
        """The first events of a stream, sent when its requests are accepted."""
        return []

    def stream_ping(self) -> ServerSentEvent | None:
        """What a stream sends while it waits, after `stream_start`; None: a comment, which clients skip. Lines of JSON
        have no comments."""
        return None

    @abstractmethod
    def stream_events(self, index: int, event: GenerationEvent) -> list[ServerSentEvent]:
        """The events that a stream sends for a recorded event of the engine."""

    def stream_end(self) -> list[ServerSentEvent]:
        """The events of a stream when all completions have ended."""
        return []

    def stream_error(self, error: Exception) -> list[ServerSentEvent]:
        """The events of a stream that cannot continue."""
        return [ServerSentEvent(openai_error(api_error(error)))]

    stream_tail: tuple[ServerSentEvent, ...] = ()
    """Sent after `stream_end` or `stream_error`."""

    def timings(self, index: int = 0) -> Timings | UnsetType:
        """The times of a finished completion."""
        usage = self.last_events[index].usage
        return timings(usage) if usage else UNSET

    def run(self, lease: ModelLease) -> AsyncGenerator[Event, None]:
        """The events of the requests under the rules of the client's key. Raises as `ModelLease.apply_key_rules`."""
        return run_requests(
            lease.serving.client,
            lease.apply_key_rules(self.requests),
            n_candidates=self.n_candidates,
            check_first=bool(self.stream),
            waited=lease.waited,
        )

    async def gather(self, events: AsyncGenerator[Event, None], observe: OnEvent) -> object:
        """The body of the non-streamed response, after all completions have ended. `observe` is called with each event.
        Raises the errors of `record`, with the client's field names."""
        completions: list[list[GenerationEvent]] = [[] for _ in self.requests]
        with client_names(self.field_names):
            async with contextlib.aclosing(events):
                async for index, event in events:
                    observe(index, event)
                    self.record(index, event)
                    completions[index].append(event)
            if sum(map(_size, completions)) <= _LARGE:
                return self.build(completions)
            return await asyncio.to_thread(self.build, completions)

    def token_counts(self) -> TokenCounts:
        """Token counts over all completions. Each prompt counts once, regardless of its completions."""
        prompt = completion = drafted = accepted = media = audio = 0
        cached: dict[int, int] = {}  # by prompt: tokens that no completion computed
        for index, event in self.last_events.items():
            if usage := event.usage:
                completion += usage.completion_tokens
                drafted += usage.drafted_tokens
                accepted += usage.accepted_tokens
                prompt += usage.prompt_tokens
                media += usage.n_media_tokens
                audio += usage.n_audio_tokens
                group = index // self.n_candidates
                cached[group] = min(cached.get(group, usage.cached_tokens), usage.cached_tokens)
        n = self.n_candidates
        return TokenCounts(
            prompt=prompt // n,
            cached=sum(cached.values()),
            completion=completion,
            drafted=drafted,
            accepted=accepted,
            image=(media - audio) // n,
            audio=audio // n,
        )


def media_details(counts: TokenCounts) -> dict[str, Any]:
    """`image_tokens` and `audio_tokens` for the details of the prompt's tokens, if there are any."""
    given = {"image_tokens": counts.image, "audio_tokens": counts.audio}
    return {name: n for name, n in given.items() if n}


def raise_failure(event: GenerationEvent) -> None:
    """Raises the error in the last event of a failed completion: `InvalidRequest` if the request caused it, otherwise
    `GenerationFailed` or `EngineClosed`."""
    if event.error_field:
        raise InvalidRequest(event.error_field, event.error or "the text cannot be continued", event.overflow)
    if event.finish_reason is FinishReason.ERROR:
        raise GenerationFailed(event.error or "generation failed")
    if event.finish_reason is FinishReason.CANCELLED:  # not by the client, which would have closed the connection
        raise EngineClosed("the server is shutting down")


_LARGE = 20_000  # values; larger responses are built on another thread, so that other requests do not wait


def _size(events: list[GenerationEvent]) -> int:
    """Roughly the number of values in the response for a completion."""
    n_top = sum(len(entry.top) for event in events for entry in event.logprobs)
    return n_top + sum(len(event.tokens) + len(event.embedding or b"") // 4 for event in events)


async def respond(
    request: web.Request,
    lease: ModelLease,
    builder: ResponseBuilder,
    *,
    ping_seconds: int | None = None,
) -> web.StreamResponse:
    """Runs the engine requests and sends the response, whole or as server-sent events.

    `ping_seconds`: the request's `sse_ping_interval`; None: the server's.
    """
    serving = lease.serving
    request[IGNORED] += builder.ignored
    events = builder.run(lease)
    with request.app[METRICS].observe(endpoint_of(request), len(builder.requests), serving.name) as observe:
        if not builder.stream:
            return json_response(await builder.gather(events, observe))
        with client_names(builder.field_names):
            seconds = serving.settings.sse_ping_interval if ping_seconds is None else ping_seconds
            return await _Stream(request, builder, ping_seconds=seconds).send_all(events, observe)


class _Stream:
    """The server-sent events of a response. They start when the requests are known to be valid: a client or proxy that
    waits for headers would give up while a long prompt is computed."""

    def __init__(self, request: web.Request, builder: ResponseBuilder, *, ping_seconds: int) -> None:
        """`ping_seconds`: silence after which the stream sends a ping; 0 and less: never."""
        self._request, self._builder, self._ping_seconds = request, builder, ping_seconds
        headers = STREAM_HEADERS | ({"Content-Type": LINES} if builder.streams_lines else {})
        self._response = request.get(STARTED) or web.StreamResponse(headers=headers)
        self._encode = ServerSentEvent.as_line if builder.streams_lines else ServerSentEvent.encode
        self._has_started = False
        self._sent_at = 0.0

    async def send_all(self, events: AsyncGenerator[Event, None], observe: OnEvent) -> web.StreamResponse:
        """Sends each event as it arrives. An error before the first event becomes an HTTP status, a later one an
        event."""
        builder = self._builder
        async with contextlib.aclosing(events):
            first = await anext(events, None)  # None: there are no requests
            is_accepted = first is not None and first[1].is_acceptance
            if first and not is_accepted:
                observe(*first)
                builder.record(*first)  # raises if the completion has already failed
            if not self._response.prepared:
                await self._response.prepare(self._request)
            pings = asyncio.create_task(self._ping()) if self._ping_seconds > 0 else None
            try:
                if not (is_accepted and builder.starts_with_counts):
                    await self._send(builder.stream_events(*first) if first and not is_accepted else [])
                async for index, event in events:
                    if not event.is_acceptance:
                        observe(index, event)
                        builder.record(index, event)
                        await self._send(builder.stream_events(index, event))
                await self._send([*builder.stream_end(), *builder.stream_tail])
            except ConnectionResetError:
                raise
            except Exception as error:
                self._has_started = True  # the error is all that there is
                await self._send([*builder.stream_error(error), *builder.stream_tail])
            finally:
                if pings:
                    pings.cancel()
        return self._response

    async def _send(self, events: list[ServerSentEvent]) -> None:
        if not self._has_started:
            self._has_started = True
            events = [*self._builder.stream_start(), *events]
        if events:
            await self._write(b"".join(map(self._encode, events)))

    async def _write(self, data: bytes) -> None:
        self._sent_at = monotonic()
        await self._response.write(data)
        await self._request.writer.drain()  # `write` alone would buffer 64 KiB for a client that does not read

    async def _ping(self) -> None:
        """Sends something after each `ping_seconds` of silence."""
        self._sent_at = monotonic()
        while True:
            await asyncio.sleep(max(0.0, self._sent_at + self._ping_seconds - monotonic()))
            if monotonic() - self._sent_at >= self._ping_seconds:
                has_form = self._has_started or self._builder.streams_lines
                event = self._builder.stream_ping() if has_form else None
                with contextlib.suppress(ConnectionResetError):  # the next event ends the stream
                    await self._write(self._encode(event) if event else PING)


# --- content blocks --------------------------------------------------------------------------------------------------
# An assistant message as a sequence of content blocks, for APIs that return text, reasoning and calls in order.


class ContentBlock(msgspec.Struct):
    """A block of text, a block of reasoning, or a tool call."""

    index: int
    """The position in the message."""
    kind: Literal["text", "reasoning", "call", "custom"]
    """`custom`: a call of a custom tool."""
    text: str = ""
    """For a call: its arguments, as JSON; for a custom tool, its text."""
    call_id: str = ""
    name: str = ""
    """The name of the called tool."""


class BlockChange(NamedTuple):
    """A change to a block. Each block starts once, grows, and stops before the next one starts."""

    step: Literal["start", "delta", "stop"]
    block: ContentBlock
    text: str = ""
    """The text that a delta adds."""


class ContentBlocks:
    """The blocks of one message while it is generated."""

    def __init__(self) -> None:
        self.all: list[ContentBlock] = []
        self._open: ContentBlock | None = None

    def read(self, deltas: Iterable[Delta]) -> list[BlockChange]:
        """Adds the deltas to the blocks."""
        changes: list[BlockChange] = []
        for delta in deltas:
            if isinstance(delta, ToolCallStart):
                kind: Literal["call", "custom"] = "custom" if delta.is_custom else "call"
                changes += self._start(ContentBlock(len(self.all), kind, call_id=delta.id, name=delta.name))
            elif delta.text:
                changes += self._add(delta)
        return changes

    def close(self) -> list[BlockChange]:
        """Stops the open block, if any."""
        stopped = [BlockChange("stop", self._open)] if self._open else []
        self._open = None
        return stopped

    def _add(self, delta: TextDelta | ReasoningDelta | ArgumentsDelta) -> list[BlockChange]:
        changes: list[BlockChange] = []
        kind: Literal["text", "reasoning"] = "reasoning" if isinstance(delta, ReasoningDelta) else "text"
        if not isinstance(delta, ArgumentsDelta) and (self._open is None or self._open.kind != kind):
            changes = self._start(ContentBlock(len(self.all), kind))
        block = self.all[-1]
        block.text += delta.text
        return [*changes, BlockChange("delta", block, delta.text)]

    def _start(self, block: ContentBlock) -> list[BlockChange]:
        stopped = self.close()
        self._open = block
        self.all.append(block)
        return [*stopped, BlockChange("start", block)]


# --- generation ------------------------------------------------------------------------------------------------------
# Endpoints that run engine requests: each is declared by the function that prepares these requests.


Prepare = TypeVar("Prepare", bound=Callable[..., Awaitable[ResponseBuilder]])


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
    """Declares `POST path` by the function that makes the `ResponseBuilder` from the body and its model's `Serving`.

    `in_batches`: batches support it. `more`: as for `Routes.post`.
    """

    def declare(prepare: Prepare) -> Prepare:
        async def handle(request: web.Request) -> web.StreamResponse:
            given = await read_json(request, body)
            with await lease_model(request, given) as lease:
                ping = getattr(given, "sse_ping_interval", None)
                return await respond(request, lease, await prepare(given, lease.serving), ping_seconds=ping)

        handle.__doc__ = prepare.__doc__
        more["prepare"] = prepare if in_batches else None
        routes.post(path, answer, body, streams=streams, **more)(handle)
        return prepare

    return declare
