"""`POST /generate/batch`: completes many prompts, one prompt in many ways, or many prompts in many ways."""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from cppbatch.engine.request import FinishReason, GenerationEvent, GenerationRequest
from cppbatch.errors import InvalidRequest
from cppbatch.server.api_errors import ErrorDetail, api_error, openai_error
from cppbatch.server.endpoint import Routes
from cppbatch.server.generate.batch_items import BatchItem, GenerateBatchRequest, batch_items
from cppbatch.server.generate.cancel_item import RUNNING_BATCHES, RunningBatch
from cppbatch.server.generate.generate_endpoint import (
    GenerateChunk,
    GenerateRequest,
    chat_tools,
    check_fields,
    engine_request,
    has_content,
    text_result,
)
from cppbatch.server.keys import viewer_of
from cppbatch.server.media_loading import refuse_large
from cppbatch.server.model_choice import lease_model
from cppbatch.server.parse import read_json
from cppbatch.server.response import DONE, PreparedRequest, ResponseBuilder, ServerSentEvent, respond
from cppbatch.server.run_requests import run_requests
from cppbatch.server.served_models import ModelLease
from cppbatch.server.serving import ChatTools, Serving, new_id

routes = Routes()


class BatchResult(GenerateChunk, frozen=True, kw_only=True):
    """The result of an item: either the fields of a `GenerateResponse`, or an error. In a stream, each event with an
    index has new text for its item, or its error."""

    index: int
    """Of the item, from 0. Of `prompts` with `params`: that of the prompt times the number of `params`, plus that of
    the params."""
    generated_text: str | UnsetType = UNSET
    """The same as `text`; not in a stream."""
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
    """In the order of the items."""


@routes.post("/generate/batch", GenerateBatchResponse, GenerateBatchRequest, streams=True)
async def generate_batch(request: web.Request) -> web.StreamResponse:
    """Complete many prompts, each with one or more parameter sets; a failed item does not affect the others."""
    body = await read_json(request, GenerateBatchRequest)
    with await lease_model(request, body) as lease:
        # on threads: 256 items with large fields take seconds
        items = await asyncio.to_thread(read_items, body, lease.serving)
        chat = await chat_tools(lease.serving, [each for each in items.bodies if isinstance(each, GenerateRequest)])
        prepared, batch = await asyncio.to_thread(prepare_batch, items, lease, chat, stream=bool(body.stream))
        with request.app[RUNNING_BATCHES].one(viewer_of(request), body.request_id, batch):
            events = run_requests(
                lease.serving.client,
                prepared.requests,
                wait_when_full=True,
                errors_as_events=True,
                cancelled=batch.cancelled,
                waited=lease.waited,
            )
            return await respond(request, lease, prepared, events)


class ReadItems(NamedTuple):
    """The items of a batch, and what is wrong with those that have no body."""

    items: list[BatchItem]
    bodies: list[GenerateRequest | InvalidRequest]


def read_items(body: GenerateBatchRequest, serving: Serving) -> ReadItems:
    """Checks each item by itself. Raises `InvalidRequest` for errors that concern all items."""
    items = batch_items(body, serving.limits)
    check_fields(body, serving)
    serving.params(body)
    bodies: list[GenerateRequest | InvalidRequest] = []
    for item in items:
        try:
            bodies.append(item.body())
        except InvalidRequest as error:
            bodies.append(error)
    return ReadItems(items, bodies)


def prepare_batch(
    read: ReadItems, lease: ModelLease, chat: ChatTools | None, *, stream: bool
) -> tuple[PreparedRequest, RunningBatch]:
    """Engine requests for the valid items, and a builder that holds the errors of the others.

    `chat`: for `messages`. Raises `InvalidRequest` for errors that concern all items."""
    name, items, serving = new_id("batch-"), read.items, lease.serving
    requests: dict[int, GenerationRequest] = {}
    errors: dict[int, InvalidRequest] = {}
    for i, fields in enumerate(read.bodies):
        try:
            if isinstance(fields, InvalidRequest):
                raise fields
            request = engine_request(fields, serving, f"{name}-{i}", chat)
            if lease.rules:
                serving.check_key(lease.rules, fields.model)
            (requests[i],) = lease.apply_key_rules([request])
        except InvalidRequest as error:
            errors[i] = error
    refuse_large([request.prompt for request in requests.values()], 1, serving.limits)
    batch = RunningBatch({i: request.id for i, request in requests.items()}, len(items), serving.client.cancel)
    builder = GenerateBatchBuilder(items, [*requests], batch)
    for i, why in errors.items():
        builder.set_error(i, why)
    return PreparedRequest([*requests.values()], builder, stream=stream), batch


Totals = TypeVar("Totals", bound=BatchTotals)


class GenerateBatchBuilder(ResponseBuilder):
    """Builds the response of `/generate/batch`. An item that fails has an error as its result.

    `request_items`: for each engine request, the index of its item.
    """

    def __init__(self, items: list[BatchItem], request_items: list[int], batch: RunningBatch) -> None:
        super().__init__()
        self._items, self._request_items, self._batch = items, request_items, batch
        self._began = perf_counter()
        self._errors: dict[int, ErrorDetail] = {}  # by item

    def set_error(self, item: int, error: Exception) -> None:
        """Makes this error the result of an item."""
        if isinstance(error, InvalidRequest):
            field = "model" if error.field == "task" else error.field  # the model decides the task
            error = error.renamed(self._items[item].field_name(field))
        self._errors[item] = openai_error(api_error(error)).error

    def record(self, index: int, event: GenerationEvent) -> None:
        """As in `ResponseBuilder`, but a failure becomes the result of the item, and the client may have cancelled
        it."""
        if event.finish_reason is FinishReason.CANCELLED and self._batch.has_cancelled(self._request_items[index]):
            self.last_events[index] = event
            return
        try:
            super().record(index, event)
        except Exception as error:
            self.set_error(self._request_items[index], error)

    def build(self, completions: list[list[GenerationEvent]]) -> GenerateBatchResponse:
        """As in `ResponseBuilder`."""
        results = {i: BatchResult(index=i, error=error) for i, error in self._errors.items()}
        for i, events in zip(self._request_items, completions, strict=True):
            if i not in self._errors:
                result = text_result(BatchResult, events, index=i)
                results[i] = msgspec.structs.replace(result, generated_text=result.text)
        return self._totals(GenerateBatchResponse, results=[results[i] for i in range(len(self._items))])

    def stream_start(self) -> list[ServerSentEvent]:
        """As in `ResponseBuilder`: the errors of the items that were not submitted."""
        return [
            ServerSentEvent(BatchResult(index=i, error=error))
            for i, error in self._errors.items()
            if i not in self._request_items
        ]

    def stream_events(self, index: int, event: GenerationEvent) -> list[ServerSentEvent]:
        """As in `ResponseBuilder`."""
        i = self._request_items[index]
        if i in self._errors:
            return [ServerSentEvent(BatchResult(index=i, error=self._errors[i]))]
        return [ServerSentEvent(text_result(BatchResult, [event], index=i))] if has_content(event) else []

    def stream_end(self) -> list[ServerSentEvent]:
        """As in `ResponseBuilder`."""
        return [ServerSentEvent(self._totals(BatchTotals)), DONE]

    def stream_error(self, error: Exception) -> list[ServerSentEvent]:
        """As in `ResponseBuilder`."""
        return [*super().stream_error(error), DONE]

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
