"""The metrics of `GET /metrics`: counters of HTTP requests and completions, and the state of each worker."""

from __future__ import annotations

import contextlib
from collections import Counter as Counts
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from itertools import accumulate
from time import perf_counter

from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from cppbatch.cluster.engine_client import ScalingState, WorkerState
from cppbatch.engine.histogram import Histogram as EngineHistogram
from cppbatch.engine.metrics import EngineStats
from cppbatch.engine.request import GenerationEvent, RequestUsage
from cppbatch.gpu_state import GpuSampler, GpuState
from cppbatch.server.live_times import LiveTimes
from cppbatch.server.run_requests import OnEvent
from cppbatch.server.server_stats import BatchStats, CompletionSums, RecentCompletions

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Buckets in seconds: until the first token; between tokens; of whole completions.
_WAIT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_GAP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_COMPLETION_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


class ServerMetrics:
    """The metrics of one application."""

    def __init__(self, *, by_model: bool = False) -> None:
        """`by_model`: the metrics of requests and workers have the label `model` too."""
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
        self.generated_tokens = Counter(
            "cppbatch_generated_tokens",
            "Generated tokens, counted as they are produced",
            by_endpoint,
            registry=registry,
        )
        self.open_batches = Gauge("cppbatch_batches_open", "Unfinished batch jobs", registry=registry)
        self.batch_lines = Gauge(
            "cppbatch_batch_lines",
            "Lines of unfinished batch jobs: all, completed, failed",
            ["state"],
            registry=registry,
        )
        self.first_token = self._histogram(
            "time_to_first_token", "Time from the request to its first token", _WAIT_BUCKETS
        )
        self.gap = self._histogram("inter_token", "Time between consecutive tokens", _GAP_BUCKETS)
        self.queue = self._histogram("queue_time", "Time from arrival in the engine to the first step", _WAIT_BUCKETS)
        self.completion_time = self._histogram(
            "completion_time", "Time from the request to the end of the text", _COMPLETION_BUCKETS
        )
        self.recent = RecentCompletions()
        self.live: LiveTimes | None = None
        """Set while `GET /live` is read."""
        self.sums = CompletionSums()
        self._recent_sums = CompletionSums()

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"cppbatch_{name}_seconds", text, self._by_endpoint, registry=self._registry, buckets=buckets)

    def set_batches(self, batches: BatchStats) -> None:
        """Sets the gauges of open batch jobs."""
        self.open_batches.set(batches.open)
        for state, n in (("all", batches.lines), ("completed", batches.completed), ("failed", batches.failed)):
            self.batch_lines.labels(state).set(n)

    def take_recent_sums(self) -> CompletionSums:
        """The sums over the completions that have ended since the last call."""
        sums, self._recent_sums = self._recent_sums, CompletionSums()
        return sums

    def page(
        self,
        workers: list[WorkerState],
        gpus: Sequence[GpuState] = (),
        scaling: ScalingState | None = None,
        others: Iterable[Collector] = (),
    ) -> bytes:
        """All metrics in Prometheus' text format, with the present state of the workers and GPUs, and `others`."""
        of_workers = WorkerMetrics(workers, by_model=self.by_model)
        collectors = (self._registry, of_workers, ScalingMetrics(scaling), GpuMetrics(gpus), *others)
        return b"".join(map(generate_latest, collectors))

    def add_to_sums(self, usage: RequestUsage) -> None:
        """Adds a completion that has ended."""
        self.sums.add(usage)
        self._recent_sums.add(usage)

    @contextlib.contextmanager
    def observe(self, endpoint: str, n: int, model: str = "") -> Iterator[OnEvent]:
        """A context in which a request's `n` completions by this model run. It yields what counts their events."""
        labels = (endpoint, model) if self.by_model else (endpoint,)
        observer = _RequestObserver(self, labels)
        self.in_flight.labels(*labels).inc()
        is_accepted = True
        try:
            yield observer.record
        except Exception:
            is_accepted = observer.has_begun  # otherwise it was refused
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
        self._tokens = metrics.generated_tokens.labels(*labels)
        self._gap = metrics.gap.labels(*labels)

    def record(self, index: int, event: GenerationEvent) -> None:
        """Counts an event that has come now."""
        self.has_begun = True
        now, live = perf_counter(), self._metrics.live
        if n := len(event.tokens):
            self._tokens.inc(n)
            self._n_counted[index] += n
            if index in self._last_token_at:
                gap = (now - self._last_token_at[index]) / n  # the tokens of a merged event are taken as evenly spaced
                for _ in range(n):
                    self._gap.observe(gap)
                if live:
                    live.add_gap(now, gap, n)
            else:
                self._metrics.first_token.labels(*self._labels).observe(now - self._began)
                if live:
                    live.add_first_token(now, now - self._began)
            self._last_token_at[index] = now
        if event.finish_reason:
            self.n_ended += 1
            self._metrics.completions.labels(*self._labels, event.finish_reason.value).inc()
            self._metrics.completion_time.labels(*self._labels).observe(now - self._began)
            if event.usage:
                # The end token has no text. Never negative: a counter would raise.
                self._tokens.inc(max(0, event.usage.completion_tokens - self._n_counted[index]))
                self._record_usage(event.usage)

    def _record_usage(self, usage: RequestUsage) -> None:
        metrics, labels = self._metrics, self._labels
        metrics.prompt_tokens.labels(*labels).inc(usage.prompt_tokens)
        metrics.cached_prompt_tokens.labels(*labels).inc(usage.cached_tokens)
        metrics.queue.labels(*labels).observe(usage.queue_seconds)
        metrics.recent.add(usage)
        metrics.add_to_sums(usage)


METRICS = web.AppKey("metrics", ServerMetrics)
GPUS = web.AppKey("gpus", GpuSampler)


async def sample_gpus(app: web.Application) -> AsyncIterator[None]:
    """A cleanup context of the application (`Application.cleanup_ctx`): the GPUs are read while it runs."""
    with app[GPUS]:
        yield


@web.middleware
async def metrics_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Counts every response by its status. The outermost middleware, so it also sees responses of the others."""
    status = "disconnected"
    try:
        response = await handler(request)
        status = str(response.status)
        return response
    finally:
        request.app[METRICS].http_requests.labels(endpoint_of(request), status).inc()


def endpoint_of(request: web.Request) -> str:
    """The path pattern of the request's route, which keeps the number of labels fixed; `other` without a route."""
    resource = request.match_info.route.resource
    return resource.canonical if resource else "other"


# --- workers --------------------------------------------------------------------------------------------------------

Key = list[str]
"""The labels of a worker: its name, and that of its model where a server has several."""

_GAUGES = {
    "running": "Running requests",
    "waiting": "Waiting requests in the engine's queue",
    "swapped_bytes": "Host memory used by swapped-out sequences",
    "prefix_cache_bytes": "Host memory used by cached prefixes and checkpoints",
    "prefixes_on_disk": "Cached prefixes on disk usable by the worker (--prefix-cache-disk)",
    "seq_ids_free": "Free sequence ids",
}
_COUNTERS = {
    "steps": "Computed steps",
    "decode_steps": "Steps with at least one decoding sequence",
    "prompt_tokens": "Prompt tokens computed",
    "generated_tokens": "Tokens generated",
    "forced_tokens": "Generated tokens forced by a grammar, without a decode for each",
    "draft_steps": "Steps that verified drafts (speculative decoding)",
    "drafted_tokens": "Verified draft tokens",
    "accepted_tokens": "Accepted draft tokens",
    "prefix_queries": "Prefix cache lookups",
    "prefix_hits": "Prefix cache hits",
    "prefix_hit_tokens": "Prompt tokens taken from the prefix cache",
    "prefix_disk_hits": "Prefix cache hits on disk",
    "prefix_disk_hit_tokens": "Prompt tokens taken from prefixes on disk",
    "prefix_disk_read_bytes": "Bytes of cached prefixes read from disk",
    "prefix_disk_written_bytes": "Bytes of cached prefixes written to disk",
    "prefix_disk_damaged": "Damaged cached prefix files that were deleted",
    "swaps": "Sequences swapped out to host memory",
    "recomputes": "Preempted sequences that were recomputed",
    "layout_switches": "Switches between the unified and the per-sequence KV layout",
    "media_encoded": "Encoded images and audio clips",
    "media_found": "Images and audio clips found in the encoder cache",
    "media_seconds": "Time spent encoding images and audio, in parallel to the steps",
    "ideal_seconds": "Lowest possible time for the computed work, learned from the steps",
    "context_shifts": "Number of context shifts",
}
_BY_REASON = "Time lost compared with ideal_seconds, by cause (docs/benchmarks.md)"
_HISTOGRAMS = {
    "batch_size": ("batch_sizes", "Decoding sequences per step, for steps with at least one"),
    "step_seconds": ("step_times", "Duration of a step"),
    "decode_seconds": ("decode_times", "Duration of llama_decode in a step"),
    "sample_seconds": ("sample_times", "Duration of sampling in a step"),
}


class WorkerMetrics(Collector):
    """The present state of the workers. A worker that does not respond has only the metrics of `_states`."""

    def __init__(self, workers: list[WorkerState], *, by_model: bool = False) -> None:
        """`by_model`: they have the label `model` too."""
        self._labels = ["worker", "model"] if by_model else ["worker"]
        self._workers = [([each.name, each.model or ""] if by_model else [each.name], each) for each in workers]

    def collect(self) -> Iterator[Metric]:
        """All metrics of all workers."""
        responding = [(key, worker.stats) for key, worker in self._workers if worker.stats]
        yield from self._states()
        for name, text in _GAUGES.items():
            yield self._gauge(name, text, ((key, getattr(stats, name)) for key, stats in responding))
        for name, text in _COUNTERS.items():
            yield self._counter(name, text, ((key, getattr(stats, name)) for key, stats in responding))
        yield self._lost(responding)
        yield self._cells(responding)
        yield self._layout(responding)
        for name, (field, text) in _HISTOGRAMS.items():
            yield self._histogram(name, text, ((key, getattr(stats, field)) for key, stats in responding))

    def _states(self) -> Iterator[Metric]:
        up = ((key, float(worker.health.status == "ok")) for key, worker in self._workers)
        yield self._gauge("up", "1 if the worker is running; 0 if it is loading, sleeping, restarting or failed", up)
        in_flight = ((key, worker.in_flight) for key, worker in self._workers)
        yield self._gauge("in_flight", "Unfinished requests assigned to the worker", in_flight)
        restarts = ((key, worker.restarts) for key, worker in self._workers)
        yield self._counter("restarts", "Number of worker restarts after a crash", restarts)

    def _gauge(self, name: str, text: str, values: Iterable[tuple[Key, float]]) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"cppbatch_worker_{name}", text, labels=self._labels)
        for key, value in values:
            family.add_metric(key, value)
        return family

    def _counter(self, name: str, text: str, values: Iterable[tuple[Key, float]]) -> CounterMetricFamily:
        family = CounterMetricFamily(f"cppbatch_worker_{name}", text, labels=self._labels)
        for key, value in values:
            family.add_metric(key, value)
        return family

    def _lost(self, responding: list[tuple[Key, EngineStats]]) -> CounterMetricFamily:
        family = CounterMetricFamily("cppbatch_worker_lost_seconds", _BY_REASON, labels=[*self._labels, "reason"])
        for key, stats in responding:
            for reason, seconds in stats.lost_seconds.items():
                family.add_metric([*key, reason], seconds)
        return family

    def _cells(self, responding: list[tuple[Key, EngineStats]]) -> GaugeMetricFamily:
        family = GaugeMetricFamily(
            "cppbatch_worker_kv_cells",
            "KV cells by state. used: held by running sequences; cached: held by cached prefixes",
            labels=[*self._labels, "state"],
        )
        for key, stats in responding:
            free = stats.kv_cells - stats.kv_cells_used - stats.kv_cells_cached
            for state, value in (("used", stats.kv_cells_used), ("cached", stats.kv_cells_cached), ("free", free)):
                family.add_metric([*key, state], value)
        return family

    def _layout(self, responding: list[tuple[Key, EngineStats]]) -> GaugeMetricFamily:
        text = "1 for the current KV cache layout"
        family = GaugeMetricFamily("cppbatch_worker_kv_layout", text, labels=[*self._labels, "layout"])
        for key, stats in responding:
            family.add_metric([*key, stats.kv_layout], 1)
        return family

    def _histogram(self, name: str, text: str, values: Iterable[tuple[Key, EngineHistogram]]) -> HistogramMetricFamily:
        family = HistogramMetricFamily(f"cppbatch_worker_{name}", text, labels=self._labels)
        for key, histogram in values:
            bounds = [*map(str, histogram.bounds), "+Inf"]
            family.add_metric(key, list(zip(bounds, accumulate(histogram.counts), strict=True)), histogram.sum)
        return family


class ScalingMetrics(Collector):
    """How many workers there are; nothing where their number is fixed."""

    def __init__(self, scaling: ScalingState | None) -> None:
        self._scaling = scaling

    def collect(self) -> Iterator[Metric]:
        """The present number of workers in each state, and how often it has changed."""
        if (scaling := self._scaling) is None:
            return
        workers = GaugeMetricFamily(
            "cppbatch_workers",
            "Workers by state. draining: accepts no new requests and ends after its last one",
            labels=["state"],
        )
        for state in ("running", "starting", "draining"):
            workers.add_metric([state], getattr(scaling, state))
        yield workers
        events = CounterMetricFamily(
            "cppbatch_scale_events",
            "Workers started because requests were waiting (up) or drained because of low load (down)",
            labels=["direction"],
        )
        events.add_metric(["up"], scaling.scale_ups)
        events.add_metric(["down"], scaling.scale_downs)
        yield events


# --- GPUs -----------------------------------------------------------------------------------------------------------

_GPU_METRICS = {
    "utilization": (GaugeMetricFamily, "Fraction of the last sample period during which a kernel was running: 0 to 1"),
    "memory_used_bytes": (GaugeMetricFamily, "GPU memory used by all processes"),
    "memory_total_bytes": (GaugeMetricFamily, "Total GPU memory"),
    "power_watts": (GaugeMetricFamily, "GPU power draw"),
    "energy_joules": (CounterMetricFamily, "GPU energy consumption since the driver was loaded"),
}


class GpuMetrics(Collector):
    """The present state of the GPUs. What the driver does not know of a GPU is absent."""

    def __init__(self, gpus: Sequence[GpuState]) -> None:
        self._gpus = gpus

    def collect(self) -> Iterator[Metric]:
        """All metrics of all GPUs; none without a GPU."""
        for name, (kind, text) in _GPU_METRICS.items():
            family = kind(f"cppbatch_gpu_{name}", text, labels=["gpu", "name"])
            known = [(gpu, value) for gpu in self._gpus if (value := getattr(gpu, name)) is not None]
            for gpu, value in known:
                family.add_metric([str(gpu.index), gpu.name], value)
            if known:
                yield family
