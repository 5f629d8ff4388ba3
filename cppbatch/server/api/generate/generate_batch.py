"""`POST /generate/batch`: completes many prompts, one prompt in many ways, or many prompts in many ways."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from time import perf_counter
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from cppbatch.engine.request import FinishReason, GenerationEvent
from cppbatch.errors import InvalidRequest, client_name
from cppbatch.server.answer.response import ResponseBuilder, respond
from cppbatch.server.api.generate.batch_items import BatchItem, GenerateBatchRequest, batch_items
from cppbatch.server.api.generate.generate_endpoint import (
    GenerateChunk,
    GenerateRequest,
    chat_tools,
    check_fields,
    has_content,
    resolve,
    text_result,
)
from cppbatch.server.api.generate.running_batches import RUNNING_BATCHES, Cancel, RunningBatch
from cppbatch.server.auth.keys import viewer_of
from cppbatch.server.fields.parse import read_json
from cppbatch.server.http.api_errors import api_error
from cppbatch.server.http.endpoint import Routes
from cppbatch.server.http.error_formats import ErrorDetail, openai_error
from cppbatch.server.http.event_stream import DONE, ServerSentEvent
from cppbatch.server.media_loading import refuse_large
from cppbatch.server.models.served import ModelLease, lease_model
from cppbatch.server.models.serving import ChatTools, ResolvedRequest, Serving, new_id
from cppbatch.server.run_requests import Event, run_requests

routes = Routes()


class BatchResult(GenerateChunk, frozen=True, kw_only=True):
    """The result of an item: the fields of a `GenerateResponse`, or an error. In a stream, each event with an index has
    new text or the error for its item."""

    index: int
    """The index of the item, from 0. With `prompts` and `params`: prompt index * number of `params` + params index."""
    generated_text: str | UnsetType = UNSET
    """Same as `text`; not in a stream."""
    error: ErrorDetail | UnsetType = UNSET


class BatchTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over all items; the last event of a stream before [DONE]."""

    total_prompts: int
    failed: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    total_time_seconds: float
    avg_time_per_prompt: float
    """The total time divided by the number of items."""
    tokens_per_second: float
    """Generated tokens."""


class GenerateBatchResponse(BatchTotals, frozen=True, kw_only=True):
    """`POST /generate/batch`, not streamed."""

    results: list[BatchResult]
    """In item order."""


@routes.post("/generate/batch", GenerateBatchResponse, GenerateBatchRequest, streams=True)
async def generate_batch(request: web.Request) -> web.StreamResponse:
    """Complete many prompts, each with one or more parameter sets; a failed item does not affect the others."""
    body = await read_json(request, GenerateBatchRequest)
    with await lease_model(request, body) as lease:
        # on threads: 256 items with large fields take seconds
        items = await asyncio.to_thread(read_items, body, lease.serving)
        chat = await chat_tools(lease.serving, [its for _, its in items if isinstance(its, GenerateRequest)])
        builder = await lease.serving.client.render(
            chat and chat.format, lambda: prepare_batch(items, lease, chat, stream=bool(body.stream))
        )
        with request.app[RUNNING_BATCHES].one(viewer_of(request), body.request_id, builder.batch):
            return await respond(request, lease, builder)


ReadItems = list[tuple[BatchItem, GenerateRequest | InvalidRequest]]
"""The items of a batch with their bodies, or why they have none."""


def read_items(body: GenerateBatchRequest, serving: Serving) -> ReadItems:
    """Validates each item separately. Raises `InvalidRequest` for errors that concern all items."""
    items = batch_items(body, serving.limits)
    check_fields(body, serving)
    serving.params(body)
    read: ReadItems = []
    for item in items:
        try:
            read.append((item, item.body()))
        except InvalidRequest as error:
            read.append((item, error))
    return read


def prepare_batch(items: ReadItems, lease: ModelLease, chat: ChatTools | None, *, stream: bool) -> GenerateBatchBuilder:
    """Engine requests for the valid items, and a builder with the errors of the others.

    `chat`: for `messages`. Raises `InvalidRequest` for errors that concern all items."""
    name, serving = new_id("batch-"), lease.serving
    resolved: dict[int, ResolvedRequest] = {}
    errors: dict[int, InvalidRequest] = {}
    for i, (_, fields) in enumerate(items):
        try:
            if isinstance(fields, InvalidRequest):
                raise fields
            found = resolve(fields, serving, f"{name}-{i}", chat)
            if lease.rules:
                serving.check_key(lease.rules, fields.model)
            resolved[i] = found._replace(requests=lease.apply_key_rules(found.requests))
        except InvalidRequest as error:
            errors[i] = error
    refuse_large([request.prompt for found in resolved.values() for request in found.requests], 1, serving.limits)
    builder = GenerateBatchBuilder([item for item, _ in items], resolved, serving.client.cancel, stream=stream)
    for i, why in errors.items():
        builder.set_error(i, why)
    return builder


Totals = TypeVar("Totals", bound=BatchTotals)


class GenerateBatchBuilder(ResponseBuilder):
    """Builds the response of `/generate/batch`. An item that fails has an error as its result."""

    stream_tail = (DONE,)

    def __init__(
        self, items: list[BatchItem], resolved: dict[int, ResolvedRequest], cancel: Cancel, *, stream: bool
    ) -> None:
        """`resolved`: each valid item, with one request, by its index. `cancel`: ends an engine request by its id."""
        requests = [request for item in resolved.values() for request in item.requests]
        super().__init__(ResolvedRequest("", requests, {}), stream=stream)
        self._items, self._request_items, self._resolved = items, [*resolved], resolved
        self.batch = RunningBatch({i: item.requests[0].id for i, item in resolved.items()}, len(items), cancel)
        self._began = perf_counter()
        self._errors: dict[int, ErrorDetail] = {}  # by item

    def run(self, lease: ModelLease) -> AsyncGenerator[Event, None]:
        """Items wait while the queue is full. The rules of the key have been applied to each."""
        return run_requests(
            lease.serving.client,
            self.requests,
            wait_when_full=True,
            errors_as_events=True,
            cancelled=self.batch.cancelled,
            waited=lease.waited,
        )

    def set_error(self, item: int, error: Exception) -> None:
        """Sets the error as the result of an item."""
        if isinstance(error, InvalidRequest):
            own = self._resolved[item].field_names if item in self._resolved else {}
            field = client_name(error.field, self.field_names | own)
            error = error.with_field(self._items[item].field_name(field))
        self._errors[item] = openai_error(api_error(error)).error

    def record(self, index: int, event: GenerationEvent) -> None:
        """Makes a failure the item's result. The client may have cancelled the item."""
        if event.finish_reason is FinishReason.CANCELLED and self.batch.has_cancelled(self._request_items[index]):
            self.last_events[index] = event
            return
        try:
            super().record(index, event)
        except Exception as error:
            self.set_error(self._request_items[index], error)

    def build(self, completions: list[list[GenerationEvent]]) -> GenerateBatchResponse:
        results = {i: BatchResult(index=i, error=error) for i, error in self._errors.items()}
        for i, events in zip(self._request_items, completions, strict=True):
            if i not in self._errors:
                result = text_result(BatchResult, events, index=i)
                results[i] = msgspec.structs.replace(result, generated_text=result.text)
        return self._totals(GenerateBatchResponse, results=[results[i] for i in range(len(self._items))])

    def stream_start(self) -> list[ServerSentEvent]:
        """Returns the errors of the items that were not submitted."""
        return [
            ServerSentEvent(BatchResult(index=i, error=error))
            for i, error in self._errors.items()
            if i not in self._request_items
        ]

    def stream_events(self, index: int, event: GenerationEvent) -> list[ServerSentEvent]:
        """Returns an item's new text, or its error."""
        i = self._request_items[index]
        if i in self._errors:
            return [ServerSentEvent(BatchResult(index=i, error=self._errors[i]))]
        return [ServerSentEvent(text_result(BatchResult, [event], index=i))] if has_content(event) else []

    def stream_end(self) -> list[ServerSentEvent]:
        """Returns the totals."""
        return [ServerSentEvent(self._totals(BatchTotals))]

    def _totals(self, kind: type[Totals], **fields: Any) -> Totals:
        seconds, n = perf_counter() - self._began, len(self._items)
        tokens = self.token_counts()
        return kind(
            total_prompts=n,
            failed=len(self._errors),
            prompt_tokens=tokens.prompt,
            completion_tokens=tokens.completion,
            cached_tokens=tokens.cached,
            drafted_tokens=tokens.drafted,
            accepted_tokens=tokens.accepted,
            total_time_seconds=seconds,
            avg_time_per_prompt=seconds / n,
            tokens_per_second=tokens.completion / seconds,
            **fields,
        )
