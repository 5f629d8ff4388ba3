"""What engines tell of themselves, as Prometheus wants it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from cppbatch.cluster.engine_client import WorkerState
from cppbatch.engine.histogram import Histogram
from cppbatch.engine.metrics import EngineStats

_GAUGES = {
    "running": "Requests that are being computed",
    "waiting": "Requests in the engine's queue",
    "swapped_bytes": "Host memory of swapped-out sequences",
    "prefix_cache_bytes": "Host memory of cached prefixes",
    "seq_ids_free": "Sequence ids that neither a running sequence nor a cached prefix has",
}
_COUNTERS = {
    "steps": "Computed steps",
    "decode_steps": "Steps with at least one decoding sequence",
    "prompt_tokens": "Prompt tokens computed",
    "generated_tokens": "Tokens generated",
    "forced_tokens": "Of those, tokens that a grammar gave without a decode for each",
    "prefix_queries": "Requests that looked for their beginning in the prefix cache",
    "prefix_hits": "Requests that found it there",
    "prefix_hit_tokens": "Prompt tokens that were not computed because others had",
    "swaps": "Sequences that gave up their cells to host memory",
    "recomputes": "Sequences that gave up their cells to be computed again",
}
_HISTOGRAMS = {
    "batch_size": ("batch_sizes", "Decoding sequences in a step, of the steps that had any"),
    "step_seconds": ("step_times", "Time of a step"),
    "decode_seconds": ("decode_times", "Time of its llama_decode"),
    "sample_seconds": ("sample_times", "Time of its sampling"),
}

Answering = list[tuple[str, EngineStats]]


class WorkerFigures(Collector):
    """One moment of the workers; those that do not answer just now have few figures."""

    def __init__(self, workers: list[WorkerState]) -> None:
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        """Every figure of every worker."""
        answering = [(worker.name, worker.stats) for worker in self._workers if worker.stats]
        yield from self._states()
        for name, text in _GAUGES.items():
            yield _gauge(name, text, ((worker, getattr(stats, name)) for worker, stats in answering))
        for name, text in _COUNTERS.items():
            yield _counter(name, text, ((worker, getattr(stats, name)) for worker, stats in answering))
        yield _cells(answering)
        for name, (field, text) in _HISTOGRAMS.items():
            yield _histogram(name, text, ((worker, getattr(stats, field)) for worker, stats in answering))

    def _states(self) -> Iterator[Metric]:
        up = ((worker.name, float(worker.health.status == "ok")) for worker in self._workers)
        yield _gauge("up", "1: it computes; 0: it loads, restarts, or has failed", up)
        in_flight = ((worker.name, worker.in_flight) for worker in self._workers)
        yield _gauge("in_flight", "Requests that were given to it and have not ended", in_flight)
        restarts = ((worker.name, worker.restarts) for worker in self._workers)
        yield _counter("restarts", "How often it died and was started again", restarts)


def _gauge(name: str, text: str, values: Iterable[tuple[str, float]]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"cppbatch_worker_{name}", text, labels=["worker"])
    for worker, value in values:
        family.add_metric([worker], value)
    return family


def _counter(name: str, text: str, values: Iterable[tuple[str, float]]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"cppbatch_worker_{name}", text, labels=["worker"])
    for worker, value in values:
        family.add_metric([worker], value)
    return family


def _cells(answering: Answering) -> GaugeMetricFamily:
    family = GaugeMetricFamily(
        "cppbatch_worker_kv_cells",
        "KV cells by state. used: of running sequences; cached: of prefixes that are kept for others",
        labels=["worker", "state"],
    )
    for worker, stats in answering:
        free = stats.kv_cells - stats.kv_cells_used - stats.kv_cells_cached
        for state, value in (("used", stats.kv_cells_used), ("cached", stats.kv_cells_cached), ("free", free)):
            family.add_metric([worker, state], value)
    return family


def _histogram(name: str, text: str, values: Iterable[tuple[str, Histogram]]) -> HistogramMetricFamily:
    family = HistogramMetricFamily(f"cppbatch_worker_{name}", text, labels=["worker"])
    for worker, histogram in values:
        bounds = [*map(str, histogram.bounds), "+Inf"]
        family.add_metric([worker], list(zip(bounds, accumulate(histogram.counts), strict=True)), histogram.sum)
    return family
