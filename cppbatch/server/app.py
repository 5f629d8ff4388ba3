"""The aiohttp application: routes and middlewares."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from cppbatch.cluster.engines.client import EngineClient
from cppbatch.gpu_state import GpuSampler
from cppbatch.server import web_page
from cppbatch.server.admission import IN_FLIGHT, InFlight, admission_middleware, availability_middleware
from cppbatch.server.api.batches.handler import predict, run_batches
from cppbatch.server.api.generate.generate_batch import RUNNING_BATCHES, RunningBatches
from cppbatch.server.api.live_endpoint import add_live
from cppbatch.server.auth.keys import KEY, KEY_USAGE, KeyUsage, Slots, add_rate_headers, key_middleware
from cppbatch.server.cross_site import CrossOrigin, CrossSite, cross_site_middleware, preflight_middleware
from cppbatch.server.fields.parse import add_ignored_fields
from cppbatch.server.http.api_errors import error_middleware
from cppbatch.server.http.connections import connection_middleware
from cppbatch.server.models.served import MODELS, OneModel, ServedModels
from cppbatch.server.observe.log_setup import access_log, current_id
from cppbatch.server.observe.metrics import GPUS, METRICS, ServerMetrics, metrics_middleware, sample_gpus
from cppbatch.server.openapi import ROUTES
from cppbatch.server.settings import ServerSettings
from cppbatch.server.storage import STORAGE, Storage
from cppbatch.server.web_page import is_page


def create_app(
    models: EngineClient | ServedModels, settings: ServerSettings | None = None, storage: Storage | None = None
) -> web.Application:
    """The application that serves an engine, or several models.

    `settings`: for an engine; without them, no API key is required and the default limits apply. Without `storage`,
    files and batches are not supported; otherwise the application closes the storage.
    """
    if not isinstance(models, ServedModels):
        models = OneModel.of(models, settings or ServerSettings())
    settings = models.settings
    cross_origin = CrossOrigin(settings.origins, credentials=settings.cors_credentials)
    cross_site = CrossSite(settings.host_names, cross_origin)
    app = web.Application(middlewares=_middlewares(settings, cross_site), client_max_size=settings.limits.max_body)
    app[MODELS] = models
    app[METRICS] = ServerMetrics(by_model=models.router is not None)
    app[GPUS] = GpuSampler()
    app[IN_FLIGHT] = InFlight()
    app[RUNNING_BATCHES] = RunningBatches()
    app[KEY_USAGE] = KeyUsage(Slots(settings.limits))
    app[STORAGE] = storage or Storage()
    add_live(app)
    for routes in ROUTES:
        if routes is not web_page.routes or (settings.webui and not settings.static_path):
            routes.add_to(app)
    if not settings.webui:
        app.router.add_get(web_page.INDEX, web_page.running)
    if settings.predict_path:
        app.router.add_post(settings.predict_path, predict)
    if settings.static_path:
        app.router.add_get("/{path:.*}", web_page.static_files(settings.static_path))
    app.cleanup_ctx.append(run_batches)
    app.cleanup_ctx.append(sample_gpus)
    app.on_response_prepare.extend((add_request_id, add_ignored_fields, add_rate_headers, cross_origin.add_headers))
    return app


def _middlewares(settings: ServerSettings, cross_site: CrossSite) -> list[Middleware]:
    """The middlewares between a request and its handler, outermost first."""
    keys = [key_middleware(settings.keys)] if settings.keys else []
    return [
        metrics_middleware,
        connection_middleware,
        access_middleware,
        error_middleware,
        cross_site_middleware(cross_site),
        preflight_middleware(settings.cors_methods, settings.cors_headers),
        *keys,
        availability_middleware,
        admission_middleware,
    ]


# --- logs ------------------------------------------------------------------------------------------------------------
# Request ids, and a log line for each request.


_HEADER = "X-Request-Id"
_ANTHROPIC_HEADER = "request-id"  # Anthropic's clients read this one
_ID = web.RequestKey("request_id", str)
_USABLE_ID = re.compile(r"[\x21-\x7e]{1,128}")
_POLLED = frozenset({"/health", "/v1/health", "/ready"})  # by load balancers, every few seconds
_CLIENT_CLOSED = 499  # nginx's status for requests whose client closed the connection; only in the log


def request_id(request: web.Request) -> str:
    """The id of a request: the client's `X-Request-Id` if it is printable, otherwise a new one."""
    if _ID not in request:
        given = request.headers.get(_HEADER, "")
        request[_ID] = given if _USABLE_ID.fullmatch(given) else uuid.uuid4().hex
    return request[_ID]


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """For `Application.on_response_prepare`: adds the request's id to every response."""
    response.headers[_HEADER] = response.headers[_ANTHROPIC_HEADER] = request_id(request)


@web.middleware
async def access_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Logs each request once it has been answered or its client has closed the connection."""
    current_id.set(request_id(request))  # aiohttp handles each request in its own context
    started = time.perf_counter()
    status, n_bytes = 500, None
    try:
        response = await handler(request)
        status = response.status
        n_bytes = response.content_length  # None for a stream
        return response
    except (asyncio.CancelledError, ConnectionError):
        status = _CLIENT_CLOSED
        raise
    finally:
        sent = request.writer.output_size if n_bytes is None else n_bytes
        _log_access(request, status, sent, time.perf_counter() - started)


def _log_access(request: web.Request, status: int, n_bytes: int, seconds: float) -> None:
    fields = {
        "method": request.method,
        "path": request.rel_url.raw_path,  # percent-encoded, without the query: cannot break or flood the line
        "status": status,
        "seconds": round(seconds, 4),
        "bytes": n_bytes,
        "key": key.name if (key := request.get(KEY)) else None,
        "remote": request.remote,
    }
    who = f"{fields['remote']} key {fields['key']}" if fields["key"] else fields["remote"]
    message = "%s %s %d, %.3f s, %d bytes, %s"
    values = (request.method, fields["path"], status, seconds, n_bytes, who)
    is_quiet = request.path in _POLLED or (is_page(request.path) and status < 400)
    level = logging.DEBUG if is_quiet else logging.INFO
    access_log.log(level, message, *values, extra={"fields": fields})
