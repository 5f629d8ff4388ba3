"""Has the items of batch jobs answered by the engine, as their endpoints would."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import Any

from cppbatch.engine.params import replaced
from cppbatch.errors import EngineClosed, InvalidRequest
from cppbatch.jobs.job_request import JobRequest, JobResponse
from cppbatch.server.api_errors import api_error, error_body
from cppbatch.server.openai.chat_completions import prepare_chat_completion
from cppbatch.server.openai.chat_types import ChatCompletionRequest
from cppbatch.server.openai.completions import DEFAULT_MAX_TOKENS, CompletionRequest, prepare_completion
from cppbatch.server.parse import convert
from cppbatch.server.response import PreparedRequest
from cppbatch.server.responses.create_response import prepare_response
from cppbatch.server.responses.responses_types import ResponsesRequest
from cppbatch.server.run_requests import Event, run_requests
from cppbatch.server.sampling_fields import SamplingFields, merge_fields
from cppbatch.server.serving import Serving, new_id
from cppbatch.server.vectors.plans import prepare_embeddings, prepare_rerank
from cppbatch.server.vectors.schemas import EmbeddingRequest, RerankRequest

_ENDPOINTS: dict[str, tuple[type[Any], Callable[[Any, Serving], Awaitable[PreparedRequest]]]] = {
    "/v1/chat/completions": (ChatCompletionRequest, prepare_chat_completion),
    "/v1/completions": (CompletionRequest, prepare_completion),
    "/v1/responses": (ResponsesRequest, prepare_response),
    "/v1/embeddings": (EmbeddingRequest, prepare_embeddings),
    "/v1/rerank": (RerankRequest, prepare_rerank),
}

URLS = tuple(_ENDPOINTS)
"""The endpoints that items can be for."""

Watch = Callable[[AsyncGenerator[Event, None], int], AsyncGenerator[Event, None]]


class BatchWork:
    """A `cppbatch.jobs.job_request.RequestHandler`. Raises `EngineClosed` when the engine is closed or has failed.

    Patient with a full queue: an item waits until there is a place.
    """

    def __init__(
        self,
        serving: Serving,
        *,
        defaults: dict[str, Any] | None = None,
        any_model: bool = False,
        priority: int | None = None,
        watch: Watch | None = None,
    ) -> None:
        """`defaults`: fields that items have unless they give them. `any_model`: whichever model an item names, it is
        answered by the one that is here. `priority`: of all, instead of their own. `watch` is shown the events of each
        plan, with the number of its requests, and passes them on."""
        self._serving = serving
        self._defaults = defaults or {}
        self._any_model = any_model
        self._priority = priority
        self._watch = watch

    async def __call__(self, item: JobRequest) -> JobResponse:
        """The answer to one item: its endpoint's, or an error."""
        request_id = new_id("req-")
        try:
            prepared = await self._prepare(item)
            body = await self._run(prepared)
        except EngineClosed:
            raise
        except Exception as error:
            failed = api_error(error)
            return JobResponse(status=failed.status, request_id=request_id, body=error_body(item.url, failed))
        prompt, cached, completion = prepared.builder.token_counts()
        return JobResponse(
            status=200,
            request_id=request_id,
            body=body,
            prompt_tokens=prompt,
            cached_tokens=cached,
            completion_tokens=completion,
        )

    async def _prepare(self, item: JobRequest) -> PreparedRequest:
        """Raises `InvalidRequest`."""
        kind, prepare = _ENDPOINTS[item.url]
        if kind is CompletionRequest:  # a mere prompt asks for a text, not for 16 tokens of one
            prepare = partial(prepare_completion, default_max_tokens=None if item.is_plain else DEFAULT_MAX_TOKENS)
        fields = item.body
        if issubclass(kind, SamplingFields):
            fields = merge_fields(self._defaults, fields)
        if self._any_model:
            fields = {name: value for name, value in fields.items() if name != "model"}
        if fields.get("stream"):
            raise InvalidRequest("stream", "is true; the items of a batch are answered whole")
        return await prepare(convert(fields, kind), self._serving)

    async def _run(self, prepared: PreparedRequest) -> object:
        requests = prepared.requests
        if self._priority is not None:
            requests = [replaced(request, priority=self._priority) for request in requests]
        events = run_requests(self._serving.client, requests, wait_when_full=True)
        if self._watch:
            events = self._watch(events, len(requests))
        return await prepared.gather(events)
