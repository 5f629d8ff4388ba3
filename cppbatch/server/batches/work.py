"""Has the items of batch jobs answered by the engine, as their endpoints would."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from time import perf_counter
from typing import Any

from cppbatch.engine.params import replaced
from cppbatch.errors import EngineClosed, InvalidRequest
from cppbatch.jobs.job_request import JobRequest, JobResponse
from cppbatch.server.errors import fault_of
from cppbatch.server.families import error_body
from cppbatch.server.openai.plans import COMPLETION_TOKENS, chat_plan, completion_plan
from cppbatch.server.openai.schemas import ChatRequest, CompletionRequest
from cppbatch.server.parse import convert
from cppbatch.server.patience import submit_patiently
from cppbatch.server.plan import Plan, gather
from cppbatch.server.requests import new_id
from cppbatch.server.responses.plans import response_plan
from cppbatch.server.responses.schemas import ResponsesRequest
from cppbatch.server.run import Event, merge
from cppbatch.server.sampling_fields import SamplingFields, merged
from cppbatch.server.serving import Serving
from cppbatch.server.vectors.plans import embedding_plan, rerank_plan
from cppbatch.server.vectors.schemas import EmbeddingRequest, RerankRequest

_ENDPOINTS: dict[str, tuple[type[Any], Callable[[Any, Serving], Awaitable[Plan]]]] = {
    "/v1/chat/completions": (ChatRequest, chat_plan),
    "/v1/completions": (CompletionRequest, completion_plan),
    "/v1/responses": (ResponsesRequest, response_plan),
    "/v1/embeddings": (EmbeddingRequest, embedding_plan),
    "/v1/rerank": (RerankRequest, rerank_plan),
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
            plan = await self._plan(item)
            body = await self._run(plan)
        except EngineClosed:
            raise
        except Exception as error:
            fault = fault_of(error)
            return JobResponse(status=fault.status, request_id=request_id, body=error_body(item.url, fault))
        prompt, cached, completion = plan.reply.tokens()
        return JobResponse(
            status=200,
            request_id=request_id,
            body=body,
            prompt_tokens=prompt,
            cached_tokens=cached,
            completion_tokens=completion,
        )

    async def _plan(self, item: JobRequest) -> Plan:
        """Raises `InvalidRequest`."""
        kind, plan_of = _ENDPOINTS[item.url]
        if kind is CompletionRequest:  # a mere prompt asks for a text, not for 16 tokens of one
            plan_of = partial(completion_plan, usual_tokens=None if item.is_plain else COMPLETION_TOKENS)
        fields = item.body
        if issubclass(kind, SamplingFields):
            fields = merged(self._defaults, fields)
        if self._any_model:
            fields = {name: value for name, value in fields.items() if name != "model"}
        if fields.get("stream"):
            raise InvalidRequest("stream", "is true; the items of a batch are answered whole")
        return await plan_of(convert(fields, kind), self._serving)

    async def _run(self, plan: Plan) -> object:
        requests = plan.requests
        if self._priority is not None:
            requests = [replaced(request, priority=self._priority) for request in requests]
        client = self._serving.client
        began = perf_counter()
        events = merge(lambda request: submit_patiently(client, request, began), requests)
        if self._watch:
            events = self._watch(events, len(requests))
        try:
            return plan.reply.whole(await gather(events, plan))
        except InvalidRequest as error:
            raise plan.renamed(error) from error
