"""Runs the requests of batch jobs on the engine. The responses are those of the requests' endpoints."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from cppbatch.engine.params import UNLIMITED, replaced
from cppbatch.errors import EngineClosed, InvalidRequest
from cppbatch.jobs.job_request import JobRequest, JobResponse
from cppbatch.server.api_errors import api_error, error_body
from cppbatch.server.key_rules import KeyRules
from cppbatch.server.openai import chat_completions, completions
from cppbatch.server.openai.completions import CompletionRequest, prepare_completion
from cppbatch.server.pooling import embeddings_endpoint, rerank_endpoint
from cppbatch.server.response import PreparedRequest
from cppbatch.server.responses import create_response
from cppbatch.server.run_requests import OnEvent, run_requests
from cppbatch.server.sampling_fields import SamplingFields, merge_fields
from cppbatch.server.served_models import ServedModels
from cppbatch.server.serving import new_id
from cppbatch.server.unknown_fields import refuse_unknown
from cppbatch.typed_json import convert

_ENDPOINTS = {
    route.path: (route.endpoint.body, prepare)
    for module in (chat_completions, completions, create_response, embeddings_endpoint, rerank_endpoint)
    for route in module.routes
    if route.endpoint.body and (prepare := route.endpoint.prepare)
}

URLS = tuple(_ENDPOINTS)
"""The endpoints that batches support."""

ObserveEvents = Callable[[int, str], AbstractContextManager[OnEvent]]
"""From the number of a request's completions and the model to a context that yields what is called with each event."""


def _observe_nothing(_n: int, _model: str) -> AbstractContextManager[OnEvent]:
    return nullcontext(lambda index, event: None)


class BatchRequestHandler:
    """A `cppbatch.jobs.job_request.RequestHandler`. Raises `EngineClosed` when the engine is closed or has failed.

    While the engine's queue is full, a request waits.
    """

    def __init__(
        self,
        models: ServedModels,
        *,
        defaults: dict[str, Any] | None = None,
        plain_max_tokens: int | None = None,
        rules: KeyRules | None = None,
        priority: int | None = None,
        observe: ObserveEvents = _observe_nothing,
    ) -> None:
        """`defaults`: body fields of requests that do not set them. `plain_max_tokens`: as in `FileJob`. `rules`: those
        of the key that the requests belong to. `priority`: overrides the requests' own. `observe`: for the events
        of each request."""
        self._models = models
        self._defaults = defaults or {}
        self._plain_max_tokens = plain_max_tokens
        self._rules = rules
        self._priority = priority
        self._observe = observe

    async def __call__(self, request: JobRequest) -> JobResponse:
        """The response of the request's endpoint, which may be an error."""
        request_id = new_id("req-")
        try:
            prepared, body = await self._answer(request)
        except EngineClosed:
            raise
        except Exception as exception:
            error = api_error(exception)
            return JobResponse(status=error.status, request_id=request_id, body=error_body(request.url, error))
        tokens = prepared.builder.token_counts()
        return JobResponse(
            status=200,
            request_id=request_id,
            body=body,
            prompt_tokens=tokens.prompt,
            cached_tokens=tokens.cached,
            completion_tokens=tokens.completion,
        )

    async def _answer(self, request: JobRequest) -> tuple[PreparedRequest, object]:
        """The request, prepared, and the body of its response. Raises `InvalidRequest`."""
        kind, prepare = _ENDPOINTS[request.url]
        fields = request.body
        if issubclass(kind, SamplingFields):
            plain = {"max_tokens": self._plain_max_tokens} if request.is_plain and self._plain_max_tokens else {}
            fields = merge_fields(plain | self._defaults, fields)
        if kind is CompletionRequest and request.is_plain:  # OpenAI's 16 tokens make no sense for a plain prompt
            prepare = partial(prepare_completion, default_max_tokens=UNLIMITED)
        if fields.get("stream"):
            raise InvalidRequest("stream", "is true, but responses in a batch cannot be streamed; leave it out")
        body = convert(fields, kind)
        refuse_unknown(request.body, kind)  # without the defaults: a field like one of them is a mistake too
        with await self._models.lease(body.model, self._rules, load=True) as lease:
            prepared = await prepare(body, lease.serving)
            requests = prepared.requests
            if self._priority is not None:
                requests = [replaced(request, priority=self._priority) for request in requests]
            events = run_requests(lease.serving.client, lease.apply_key_rules(requests), wait_when_full=True)
            with self._observe(len(requests), lease.serving.name) as observe:
                return prepared, await prepared.gather(events, observe)
