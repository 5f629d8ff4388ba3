"""The aiohttp application: routes and middlewares."""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Middleware

from cppbatch.cluster.engines.client import EngineClient
from cppbatch.gpu_state import GpuSampler
from cppbatch.server import web_page
from cppbatch.server.api.batches.handler import predict, run_batches
from cppbatch.server.api.generate.running_batches import RUNNING_BATCHES, RunningBatches
from cppbatch.server.api.live_endpoint import add_live
from cppbatch.server.auth.key_usage import KEY_USAGE, KeyUsage, add_rate_headers
from cppbatch.server.auth.keys import Slots, key_middleware
from cppbatch.server.cross_site import CrossOrigin, CrossSite, cross_site_middleware, preflight_middleware
from cppbatch.server.fields.unknown import add_ignored_fields
from cppbatch.server.http.api_errors import error_middleware
from cppbatch.server.http.connections import connection_middleware
from cppbatch.server.models.served import MODELS, OneModel, ServedModels
from cppbatch.server.observe.access_log import access_middleware, add_request_id
from cppbatch.server.observe.metrics import GPUS, METRICS, ServerMetrics, metrics_middleware, sample_gpus
from cppbatch.server.openapi import ROUTES
from cppbatch.server.request_checks import IN_FLIGHT, InFlight, availability_middleware, limits_middleware
from cppbatch.server.settings import ServerSettings
from cppbatch.server.storage import STORAGE, Storage


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
        limits_middleware,
    ]
