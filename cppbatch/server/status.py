"""The routes that report on the server itself: /health, /ready, /stats, /metrics, /openapi.json."""

from __future__ import annotations

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from cppbatch.cluster.engine_client import ScalingState
from cppbatch.engine.metrics import EngineStats
from cppbatch.errors import EngineClosed
from cppbatch.server.admission import IN_FLIGHT
from cppbatch.server.api_errors import SwitchedOff, json_response
from cppbatch.server.endpoint import TEXT, Routes, json_content, schema_ref
from cppbatch.server.llama_server.llama_metrics import llama_metrics
from cppbatch.server.served_models import MODELS, ModelCounts
from cppbatch.server.server_metrics import CONTENT_TYPE, GPUS, METRICS
from cppbatch.server.server_stats import ServerStats
from cppbatch.server.storage import STORAGE

routes = Routes()


class HealthResponse(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /health`."""

    status: str
    """loading, ok, sleeping, restarting, failed or closed."""
    progress: float
    """0.0 to 1.0 while loading, also when a request has ended the sleep."""
    error: str | UnsetType = UNSET
    """Why it failed or restarts. Absent otherwise, as in llama-server."""
    scaling: ScalingState | UnsetType = UNSET
    """How many workers run, start and drain; absent where their number is fixed."""
    models: ModelCounts | UnsetType = UNSET
    """Of a server with several models."""


class ReadyResponse(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /ready`."""

    ready: bool
    status: str
    """draining, or as in /health."""


@routes.get("/health", HealthResponse, (503,), also="/v1/health", unavailable=HealthResponse)
async def health(request: web.Request) -> web.Response:
    """200 if the server is ready for requests, otherwise 503 with its state; no API key required.

    503 while the model loads (with its progress) and after the engine has failed or closed; 200 also while the server
    drains.
    """
    models = request.app[MODELS]
    state = models.health()
    response = HealthResponse(
        status=state.status,
        progress=state.progress,
        error=state.error or UNSET,
        scaling=models.scaling() or UNSET,
        models=models.counts() or UNSET,
    )
    return json_response(response, 200 if state.takes_requests else 503)


@routes.get("/ready", ReadyResponse, (503,), unavailable=ReadyResponse)
async def ready(request: web.Request) -> web.Response:
    """200 if new requests are accepted, otherwise 503; no API key required."""
    state = request.app[MODELS].health()
    draining = request.app[IN_FLIGHT].draining
    is_ready = state.takes_requests and not draining
    status = "draining" if draining else state.status
    return json_response(ReadyResponse(ready=is_ready, status=status), 200 if is_ready else 503)


_STATS = {"anyOf": [{"allOf": [schema_ref(EngineStats), schema_ref(ServerStats)]}, schema_ref(ServerStats)]}


@routes.get("/stats", json_content(_STATS), types=(EngineStats, ServerStats))
async def stats(request: web.Request) -> web.Response:
    """Counters, statistics of the last minute, and the state of each worker."""
    models = request.app[MODELS]
    try:
        totals = await models.stats()
    except EngineClosed:  # no engine responds; the rest is still worth reporting
        totals = None
    tokens_per_second = totals.recent_steps.tokens_per_second if totals else None
    server = ServerStats(
        last_minute=request.app[METRICS].recent.last_minute(tokens_per_second),
        workers=await models.workers(),
        scaling=models.scaling(),
        batches=request.app[STORAGE].stats(),
        gpus=request.app[GPUS].latest,
    )
    return json_response({**(msgspec.structs.asdict(totals) if totals else {}), **msgspec.structs.asdict(server)})


@routes.get("/metrics", {"text/plain": TEXT}, (401, 501))
async def metrics(request: web.Request) -> web.Response:
    """Metrics in Prometheus format.

    Also under llama-server's names. Raises `SwitchedOff`.
    """
    models, metrics, batches = request.app[MODELS], request.app[METRICS], request.app[STORAGE].stats()
    if not models.settings.metrics:
        raise SwitchedOff("/metrics is disabled: start the server without --no-metrics")
    if batches:
        metrics.set_batches(batches)
    workers = await models.workers()
    page = metrics.page(workers, request.app[GPUS].latest, models.scaling(), models.metrics())
    theirs = llama_metrics(metrics.sums, metrics.take_recent_sums(), workers)
    headers = {"Content-Type": CONTENT_TYPE, "Process-Start-Time-Unix": str(models.started)}
    return web.Response(body=page + theirs, headers=headers)
