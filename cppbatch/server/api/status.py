"""The routes that report on the server itself: /health, /ready, /stats, /metrics, /openapi.json."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from cppbatch.cluster.engines.client import ScalingState, WorkerState
from cppbatch.engine.observe.metrics import EngineStats, add_up
from cppbatch.errors import EngineClosed
from cppbatch.server.http.api_errors import SwitchedOff, json_response
from cppbatch.server.http.endpoint import TEXT, Routes, json_content, schema_ref
from cppbatch.server.models.served import MODELS, ModelCounts
from cppbatch.server.observe.metrics import CONTENT_TYPE, GPUS, METRICS
from cppbatch.server.observe.stats import CompletionSums, ServerStats
from cppbatch.server.request_checks import IN_FLIGHT
from cppbatch.server.storage import STORAGE
from cppbatch.statistic import statistics_of

routes = Routes()


class HealthResponse(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /health`."""

    status: str
    """`loading`, `ok`, `sleeping`, `restarting`, `failed` or `closed`."""
    progress: float
    """0.0 to 1.0 while loading, including after waking from sleep."""
    error: str | UnsetType = UNSET
    """Why it failed or is restarting. Otherwise absent, as in llama-server."""
    scaling: ScalingState | UnsetType = UNSET
    """Numbers of running, starting and draining workers; absent if the number is fixed."""
    models: ModelCounts | UnsetType = UNSET
    """Only on a server with several models."""


class ReadyResponse(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /ready`."""

    ready: bool
    status: str
    """`draining`, or as in /health."""


@routes.get("/health", HealthResponse, (503,), also=("/v1/health",), unavailable=HealthResponse)
async def health(request: web.Request) -> web.Response:
    """200 if the server is ready for requests, otherwise 503 with its state; no API key required.

    503 while the model loads (with its progress) and after the engine has failed or closed; 200 while the server
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

    Also includes llama-server's names. Raises `SwitchedOff`.
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


# --- llama-server's metrics ------------------------------------------------------------------------------------------
# llama-server's metrics, computed from the counters of the server and its workers.


_OF_ENGINES = {
    "n_decode_total": ("steps", "Calls of llama_decode"),
    "spec_decode_num_draft_tokens_total": ("drafted_tokens", ""),
    "spec_decode_num_accepted_tokens_total": ("accepted_tokens", ""),
    "spec_decode_num_drafts_total": ("draft_steps", "Steps that verified drafts"),
    "requests_processing": ("running", ""),
    "requests_deferred": ("waiting", "Waiting requests"),
    "n_busy_slots_per_decode": ("mean_decode_batch", "Average number of decoding sequences per step"),
}
"""llama-server's name: the field of `EngineStats` and the help text; empty: the field's own."""


def llama_metrics(sums: CompletionSums, recent: CompletionSums, workers: Sequence[WorkerState]) -> bytes:
    """The metrics in Prometheus' text format. `sums`: since startup. `recent`: since the last scrape, as in
    llama-server."""
    stats = [worker.stats for worker in workers if worker.stats]
    total, of_engine = add_up(stats) if stats else None, statistics_of(EngineStats)
    metrics = [
        *(
            (each.name, each.kind, getattr(sums, field), each.help)
            for field, each in statistics_of(CompletionSums).items()
        ),
        *(
            (name, of_engine[field].kind or "gauge", getattr(total, field, 0), text or of_engine[field].help)
            for name, (field, text) in _OF_ENGINES.items()
        ),
        (
            "prompt_tokens_seconds", "gauge", _rate(recent.prompt_tokens, recent.prompt_seconds),
            "Prompt tokens per second and request, over the completions since the last scrape",
        ),
        (
            "predicted_tokens_seconds", "gauge", _rate(recent.generated_tokens, recent.generation_seconds),
            "Generated tokens per second and request, over the completions since the last scrape",
        ),
    ]  # fmt: skip
    return "".join(
        f"# HELP llamacpp:{name} {text}\n# TYPE llamacpp:{name} {kind}\nllamacpp:{name} {value:.10g}\n"
        for name, kind, value, text in metrics
    ).encode()


def _rate(n: int, seconds: float) -> float:
    return n / seconds if seconds else 0.0
