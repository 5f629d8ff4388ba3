"""The metrics of `GET /metrics`: counters of HTTP requests and completions, and the state of each worker."""

from __future__ import annotations

import contextlib
from collections import Counter as Counts
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, chain
from time import perf_counter
from typing import Any, cast

from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from cppbatch.cluster.engines.client import ScalingState, WorkerState
from cppbatch.engine.observe.metrics import EngineStats
from cppbatch.engine.observe.windows import Bins, Histogram
from cppbatch.engine.request import GenerationEvent, RequestUsage
from cppbatch.gpu_state import GpuSampler, GpuState
from cppbatch.server.observe.live import LiveTimes
from cppbatch.server.observe.stats import BatchStats, CompletionSums, RecentCompletions
from cppbatch.server.run_requests import OnEvent
from cppbatch.statistic import StatisticKind, statistics_of

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Buckets in seconds: until the first token; between tokens; for whole completions.
_WAIT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_GAP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_COMPLETION_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)

Labels = tuple[str, ...]
"""The values of `endpoint` and, with several models, `model`."""
Histograms = defaultdict[Labels, Bins]


class ServerMetrics:
    """The metrics of one application."""

    def __init__(self, *, by_model: bool = False) -> None:
        """`by_model`: the metrics of requests and workers also have the label `model`."""
        registry = self._registry = CollectorRegistry()
        by_endpoint = self._by_endpoint = ["endpoint", "model"] if by_model else ["endpoint"]
        self.by_model = by_model
        self.http_requests = Counter(
            "cppbatch_http_requests",
            "HTTP requests by response status. disconnected: the client closed the connection early",
            ["endpoint", "status"],
            registry=registry,
        )
        self.in_flight = Gauge(
            "cppbatch_requests_in_flight",
            "Generation requests in progress, including queued requests",
            by_endpoint,
            registry=registry,
        )
        self.completions = Counter(
            "cppbatch_completions",
            "Finished completions; a request with n counts n times. cancelled: the client closed the connection",
            [*by_endpoint, "finish_reason"],
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "cppbatch_prompt_tokens", "Prompt tokens of finished completions", by_endpoint, registry=registry
        )
        self.cached_prompt_tokens = Counter(
            "cppbatch_cached_prompt_tokens",
            "Prompt tokens of finished completions taken from the prefix cache",
            by_endpoint,
            registry=registry,
        )
        self.generated_tokens: Counts[Labels] = Counts()
        self.open_batches = Gauge("cppbatch_batches_open", "Unfinished batch jobs", registry=registry)
        self.batch_lines = Gauge(
            "cppbatch_batch_lines",
            "Lines of unfinished batch jobs: all, completed, failed",
            ["state"],
            registry=registry,
        )
        self.first_token: Histograms = defaultdict(partial(Bins, _WAIT_BUCKETS))
        self.gap: Histograms = defaultdict(partial(Bins, _GAP_BUCKETS))
        self.queue: Histograms = defaultdict(partial(Bins, _WAIT_BUCKETS))
        self.completion_time: Histograms = defaultdict(partial(Bins, _COMPLETION_BUCKETS))
        self.recent = RecentCompletions()
        self.live: LiveTimes | None = None
        """Set while `GET /live` is read."""
        self.sums = CompletionSums()
        self._recent_sums = CompletionSums()

    def set_batches(self, batches: BatchStats) -> None:
        """Sets the gauges of open batch jobs."""
        self.open_batches.set(batches.open)
        for state, n in (("all", batches.lines), ("completed", batches.completed), ("failed", batches.failed)):
            self.batch_lines.labels(state).set(n)

    def take_recent_sums(self) -> CompletionSums:
        """The sums over completions that have ended since the last call."""
        sums, self._recent_sums = self._recent_sums, CompletionSums()
        return sums

    def page(
        self,
        workers: list[WorkerState],
        gpus: Sequence[GpuState] = (),
        scaling: ScalingState | None = None,
        others: Iterable[Metric] = (),
    ) -> bytes:
        """All metrics in Prometheus' text format, with the current state of workers and GPUs, and `others`."""
        present = chain(
            self._token_families(),
            worker_families(workers, by_model=self.by_model),
            families(ScalingState, "", [], [((), scaling)]) if scaling else (),
            gpu_families(gpus),
            others,
        )
        return generate_latest(self._registry) + generate_latest(_Page(present))

    def _token_families(self) -> Iterator[Metric]:
        """Tokens and times of requests. Counted here: `prometheus_client` takes five times as long for each token."""
        text, counts = "Generated tokens, counted as they are produced", self.generated_tokens
        yield family("counter", "generated_tokens", text, self._by_endpoint, counts.items())
        histograms = (
            ("time_to_first_token", "Time from the request to its first token", self.first_token),
            ("inter_token", "Time between consecutive tokens", self.gap),
            ("queue_time", "Time from arrival in the engine to the first step", self.queue),
            ("completion_time", "Time from the request to the end of the text", self.completion_time),
        )
        for name, text, of in histograms:
            samples = [(labels, bins.histogram()) for labels, bins in of.items()]
            yield family("histogram", f"{name}_seconds", text, self._by_endpoint, samples)

    def add_to_sums(self, usage: RequestUsage) -> None:
        """Adds a finished completion."""
        self.sums.add(usage)
        self._recent_sums.add(usage)

    @contextlib.contextmanager
    def observe(self, endpoint: str, n: int, model: str = "") -> Iterator[OnEvent]:
        """A context for a request's `n` completions by this model. Yields the counter of their events."""
        labels = (endpoint, model) if self.by_model else (endpoint,)
        observer = _RequestObserver(self, labels)
        self.in_flight.labels(*labels).inc()
        is_accepted = True
        try:
            yield observer.record
        except Exception:
            is_accepted = observer.has_begun  # otherwise refused
            raise
        finally:
            if is_accepted and (n_left := n - observer.n_ended):
                self.completions.labels(*labels, "cancelled").inc(n_left)
            self.in_flight.labels(*labels).dec()


class _RequestObserver:
    """Counts the events of one generation request."""

    def __init__(self, metrics: ServerMetrics, labels: tuple[str, ...]) -> None:
        self.n_ended = 0
        self.has_begun = False
        self._metrics, self._labels = metrics, labels
        self._began = perf_counter()
        self._last_token_at: dict[int, float] = {}  # by completion
        self._n_counted: Counts[int] = Counts()
        self._gap = metrics.gap[labels]

    def record(self, index: int, event: GenerationEvent) -> None:
        """Counts an event that has just arrived."""
        self.has_begun = True
        now, live = perf_counter(), self._metrics.live
        if n := len(event.tokens):
            self._metrics.generated_tokens[self._labels] += n
            self._n_counted[index] += n
            if index in self._last_token_at:
                gap = (now - self._last_token_at[index]) / n  # treats the tokens of a merged event as evenly spaced
                self._gap.add(gap, n)
                if live:
                    live.add_gap(now, gap, n)
            else:
                self._metrics.first_token[self._labels].add(now - self._began)
                if live:
                    live.add_first_token(now, now - self._began)
            self._last_token_at[index] = now
        if event.finish_reason:
            self.n_ended += 1
            self._metrics.completions.labels(*self._labels, event.finish_reason.value).inc()
            self._metrics.completion_time[self._labels].add(now - self._began)
            if event.usage:
                # The end token has no text. Never negative: a counter does not fall.
                n_more = max(0, event.usage.completion_tokens - self._n_counted[index])
                self._metrics.generated_tokens[self._labels] += n_more
                self._record_usage(event.usage)

    def _record_usage(self, usage: RequestUsage) -> None:
        metrics, labels = self._metrics, self._labels
        metrics.prompt_tokens.labels(*labels).inc(usage.prompt_tokens)
        metrics.cached_prompt_tokens.labels(*labels).inc(usage.cached_tokens)
        metrics.queue[labels].add(usage.queue_seconds)
        metrics.recent.add(usage)
        metrics.add_to_sums(usage)


METRICS = web.AppKey("metrics", ServerMetrics)
GPUS = web.AppKey("gpus", GpuSampler)


async def sample_gpus(app: web.Application) -> AsyncIterator[None]:
    """A cleanup context of the application (`Application.cleanup_ctx`) that reads the GPUs while it runs."""
    with app[GPUS]:
        yield


@web.middleware
async def metrics_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Counts every response by status. The outermost middleware, so it also sees responses of the others."""
    status = "disconnected"
    try:
        response = await handler(request)
        status = str(response.status)
        return response
    finally:
        request.app[METRICS].http_requests.labels(endpoint_of(request), status).inc()


def endpoint_of(request: web.Request) -> str:
    """The path pattern of the request's route, so that the number of labels is fixed; `other` without a route."""
    resource = request.match_info.route.resource
    return resource.canonical if resource else "other"


_FAMILIES = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
Samples = Iterable[tuple[Sequence[str], Any]]
"""The label values, and the metric's value."""


def family(kind: StatisticKind, name: str, text: str, labels: Sequence[str], samples: Samples) -> Metric:
    """A family of metrics. A dict gives a metric per entry, with the key as the last label; a text becomes the last
    label of a metric with value 1; None is omitted."""
    made: Any = _FAMILIES[kind](f"cppbatch_{name}", text, labels=labels)
    for key, value in samples:
        if isinstance(value, Histogram):
            bounds = [*map(str, value.bounds), "+Inf"]
            made.add_metric(key, list(zip(bounds, accumulate(value.counts), strict=True)), value.sum)
        elif isinstance(value, dict | str):
            for label, n in value.items() if isinstance(value, dict) else [(value, 1)]:
                made.add_metric([*key, label], n)
        elif value is not None:
            made.add_metric(key, value)
    return cast(Metric, made)


def families(
    kind: type, prefix: str, labels: Sequence[str], items: Iterable[tuple[Sequence[str], Any]]
) -> Iterator[Metric]:
    """A family for each statistic of a class. `items`: its objects, with their label values."""
    items = list(items)
    for field, statistic in statistics_of(kind).items():
        if statistic.kind:
            own = [statistic.label] if statistic.label else []
            samples = [(key, getattr(item, statistic.shown or field)) for key, item in items]
            yield family(statistic.kind, prefix + (statistic.name or field), statistic.help, [*labels, *own], samples)


def worker_families(workers: Sequence[WorkerState], *, by_model: bool = False) -> Iterator[Metric]:
    """The current state of the workers; an unresponsive one lacks its `stats`. `by_model`: with the label `model`."""
    labels = ["worker", "model"] if by_model else ["worker"]
    items = [([each.name, each.model or ""] if by_model else [each.name], each) for each in workers]
    yield from families(WorkerState, "worker_", labels, items)
    yield from families(EngineStats, "worker_", labels, [(key, each.stats) for key, each in items if each.stats])


def gpu_families(gpus: Sequence[GpuState]) -> Iterator[Metric]:
    """The current state of the GPUs. Values that the driver does not report are absent."""
    items = [([str(gpu.index), gpu.name], gpu) for gpu in gpus]
    return (each for each in families(GpuState, "gpu_", ["gpu", "name"], items) if each.samples)


class _Page(Collector):
    """Families created for one page."""

    def __init__(self, families: Iterator[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """All of them, once."""
        return self._families
