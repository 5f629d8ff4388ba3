"""Metrics of a server with several models: which are loaded, how often they were loaded and unloaded, who waits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cppbatch.cluster.model_pool import PooledModel, UnloadReason

_STATES = ("unloaded", "loading", "loaded", "unloading")
_REASONS: tuple[UnloadReason, ...] = ("evicted", "idle", "asked", "changed")


class ModelMetrics(Collector):
    """The present state of a pool's models."""

    def __init__(self, models: Mapping[str, PooledModel[Any, Any]]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        """All metrics of all models."""
        states = GaugeMetricFamily("cppbatch_models", "Models by state", labels=["state"])
        for state in _STATES:
            states.add_metric([state], sum(model.state == state for model in self._models.values()))
        yield states
        for name, text in {
            "loaded": "1 if the model is loaded; 0 if it is not loaded or is draining",
            "requests": "Requests that use the model and keep it loaded",
            "waiting": "Requests waiting for the model to load",
            "load_seconds": "Duration of the last load",
        }.items():
            gauge = GaugeMetricFamily(f"cppbatch_model_{name}", text, labels=["model"])
            for model in self._models.values():
                gauge.add_metric([model.name], _GAUGES[name](model))
            yield gauge
        loads = CounterMetricFamily("cppbatch_model_loads", "Number of loads", labels=["model"])
        failures = CounterMetricFamily("cppbatch_model_load_failures", "Number of failed loads", labels=["model"])
        unloads = CounterMetricFamily(
            "cppbatch_model_unloads",
            "Number of unloads. evicted: to load another model; idle: --ttl; asked: POST /models/unload; changed: its "
            "file or settings changed",
            labels=["model", "reason"],
        )
        for model in self._models.values():
            loads.add_metric([model.name], model.loads)
            failures.add_metric([model.name], model.load_failures)
            for reason in _REASONS:
                unloads.add_metric([model.name, reason], model.unloads[reason])
        yield from (loads, failures, unloads)


_GAUGES: Mapping[str, Any] = {
    "loaded": lambda model: float(model.state == "loaded"),
    "requests": lambda model: model.leases,
    "waiting": lambda model: model.waiting,
    "load_seconds": lambda model: model.load_seconds,
}
