"""Metrics of a server with several models: which are loaded, how often they were loaded and unloaded, who waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any, get_args

from prometheus_client.core import Metric

from cppbatch.cluster.model_pool import ModelState, PooledModel, UnloadReason
from cppbatch.server.server_metrics import family
from cppbatch.statistic import StatisticKind

_STATES: tuple[ModelState, ...] = get_args(ModelState)
_REASONS: tuple[UnloadReason, ...] = get_args(UnloadReason)


def model_families(models: Collection[PooledModel[Any, Any]]) -> Iterator[Metric]:
    """The present state of a pool's models."""
    states = Counter(model.state for model in models)
    yield family("gauge", "models", "Models by state", ["state"], [((), {state: states[state] for state in _STATES})])
    for kind, name, text, read in _BY_MODEL:
        yield family(kind, name, text, ["model"], [([model.name], read(model)) for model in models])
    reasons = [([model.name], {reason: model.unloads[reason] for reason in _REASONS}) for model in models]
    text = (
        "Number of unloads. evicted: to load another model; idle: --ttl; asked: POST /models/unload; changed: its "
        "file or settings changed"
    )
    yield family("counter", "model_unloads", text, ["model", "reason"], reasons)


_BY_MODEL: tuple[tuple[StatisticKind, str, str, Callable[[PooledModel[Any, Any]], float]], ...] = (
    (
        "gauge",
        "model_loaded",
        "1 if the model is loaded; 0 if it is not loaded or is draining",
        lambda model: model.state == "loaded",
    ),
    ("gauge", "model_requests", "Requests that use the model and keep it loaded", lambda model: model.leases),
    ("gauge", "model_waiting", "Requests waiting for the model to load", lambda model: model.waiting),
    ("gauge", "model_load_seconds", "Duration of the last load", lambda model: model.load_seconds),
    ("counter", "model_loads", "Number of loads", lambda model: model.loads),
    ("counter", "model_load_failures", "Number of failed loads", lambda model: model.load_failures),
)
