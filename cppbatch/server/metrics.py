"""What the server counts about requests, for Prometheus."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from time import perf_counter

from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from cppbatch.cluster.engine_client import WorkerState
from cppbatch.engine.request import GenerationEvent, RequestUsage
from cppbatch.server.recent import Recent
from cppbatch.server.run_requests import Event
from cppbatch.server.shapes import BatchFigures
from cppbatch.server.worker_figures import WorkerFigures

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_WAITS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_WHOLES = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


class ServerMetrics:
    """The counters of one application."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        by_endpoint = ["endpoint"]
        self.http_requests = Counter(
            "cppbatch_http_requests",
            "HTTP requests answered. status: that of the answer; disconnected: the client went away before its end",
            ["endpoint", "status"],
            registry=registry,
        )
        self.in_flight = Gauge(
            "cppbatch_requests_in_flight",
            "Requests for text that are being answered, those that wait in the queue too",
            by_endpoint,
            registry=registry,
        )
        self.completions = Counter(
            "cppbatch_completions",
            "Completions that ended, several to a request with n. cancelled: the client went away",
            ["endpoint", "finish_reason"],
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "cppbatch_prompt_tokens", "Prompt tokens of ended completions", by_endpoint, registry=registry
        )
        self.cached_prompt_tokens = Counter(
            "cppbatch_cached_prompt_tokens",
            "Of those, tokens that were taken from the prefix cache",
            by_endpoint,
            registry=registry,
        )
        self.generated_tokens = Counter(
            "cppbatch_generated_tokens", "Generated tokens, as they come", by_endpoint, registry=registry
        )
        self.open_batches = Gauge("cppbatch_batches_open", "Batch jobs that have not ended", registry=registry)
        self.batch_lines = Gauge(
            "cppbatch_batch_lines", "Lines of those: all, completed, failed", ["state"], registry=registry
        )
        self.first_token = self._histogram("time_to_first_token", "From the request to its first token", _WAITS)
        self.gap = self._histogram("inter_token", "From one token to the next", _GAPS)
        self.queue = self._histogram("queue_time", "From arrival in the engine to the first step", _WAITS)
        self.whole = self._histogram("completion_time", "From the request to the end of the text", _WHOLES)
        self.recent = Recent()

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"cppbatch_{name}_seconds", text, ["endpoint"], registry=self._registry, buckets=buckets)

    def note_batches(self, batches: BatchFigures) -> None:
        """What the batches that have not ended have done by now."""
        self.open_batches.set(batches.open)
        for state, n in (("all", batches.lines), ("completed", batches.completed), ("failed", batches.failed)):
            self.batch_lines.labels(state).set(n)

    def page(self, workers: list[WorkerState]) -> bytes:
        """Everything in Prometheus' text format, with what the workers tell of themselves now."""
        return generate_latest(self._registry) + generate_latest(WorkerFigures(workers))

    async def observe(self, events: AsyncGenerator[Event, None], endpoint: str, n: int) -> AsyncGenerator[Event, None]:
        """The events of a request's `n` completions as they are, counted."""
        watched = _Watched(self, endpoint)
        self.in_flight.labels(endpoint).inc()
        try:
            async with contextlib.aclosing(events):
                async for index, event in events:
                    watched.note(index, event)
                    yield index, event
        except (GeneratorExit, asyncio.CancelledError):  # nobody listens any more
            self.completions.labels(endpoint, "cancelled").inc(n - watched.n_ended)
            raise
        finally:
            self.in_flight.labels(endpoint).dec()


class _Watched:
    """One request for text, while it is being answered."""

    def __init__(self, metrics: ServerMetrics, endpoint: str) -> None:
        self.n_ended = 0
        self._metrics, self._endpoint = metrics, endpoint
        self._began = perf_counter()
        self._last: dict[int, float] = {}  # when each completion had its last token
        self._tokens = metrics.generated_tokens.labels(endpoint)
        self._gap = metrics.gap.labels(endpoint)

    def note(self, index: int, event: GenerationEvent) -> None:
        """Counts an event that has come now."""
        now = perf_counter()
        if n := len(event.tokens):
            self._tokens.inc(n)
            if index in self._last:
                for _ in range(n):  # those of a merged event have come at even distances, as far as anybody knows
                    self._gap.observe((now - self._last[index]) / n)
            else:
                self._metrics.first_token.labels(self._endpoint).observe(now - self._began)
            self._last[index] = now
        if event.finish_reason:
            self.n_ended += 1
            self._metrics.completions.labels(self._endpoint, event.finish_reason.value).inc()
            self._metrics.whole.labels(self._endpoint).observe(now - self._began)
            if event.usage:
                self._note_usage(event.usage)

    def _note_usage(self, usage: RequestUsage) -> None:
        metrics, endpoint = self._metrics, self._endpoint
        metrics.prompt_tokens.labels(endpoint).inc(usage.prompt_tokens)
        metrics.cached_prompt_tokens.labels(endpoint).inc(usage.cached_tokens)
        metrics.queue.labels(endpoint).observe(usage.queue_seconds)
        metrics.recent.add(usage)


METRICS = web.AppKey("metrics", ServerMetrics)


@web.middleware
async def metrics_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Counts every answer by its status: the outermost middleware, which sees also what the others answer."""
    status = "disconnected"
    try:
        response = await handler(request)
        status = str(response.status)
        return response
    finally:
        request.app[METRICS].http_requests.labels(endpoint_of(request), status).inc()


def endpoint_of(request: web.Request) -> str:
    """The path as its route has it, so that there are as many as routes; `other` where there is no route."""
    resource = request.match_info.route.resource
    return resource.canonical if resource else "other"
