"""Runs a server's batches while the application runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from functools import partial

import msgspec
from aiohttp import web

from cppbatch.engine.request import BACKGROUND
from cppbatch.errors import CppBatchError
from cppbatch.jobs.active_batch import BatchResources
from cppbatch.jobs.batch_records import BatchRecord
from cppbatch.jobs.job_request import RequestHandler
from cppbatch.jobs.job_runner import RequestSlots
from cppbatch.server.batches.batch_handler import BatchRequestHandler
from cppbatch.server.key_rules import KeyRules
from cppbatch.server.key_usage import KEY_USAGE, KeyLineSlots
from cppbatch.server.served_models import MODELS
from cppbatch.server.server_metrics import METRICS
from cppbatch.server.storage import STORAGE

log = logging.getLogger("cppbatch.server")

_ENDPOINT = "/v1/batches"  # the metrics' endpoint label of the batches' requests


async def run_batches(app: web.Application) -> AsyncIterator[None]:
    """A cleanup context of the application (`Application.cleanup_ctx`)."""
    storage = app[STORAGE]
    starting = asyncio.create_task(_start(app))
    yield
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    if storage.batches:
        await storage.batches.close()


async def _start(app: web.Application) -> None:
    """Starts the batches once the storage is open and the model is loaded."""
    models, observe = app[MODELS], partial(app[METRICS].observe, _ENDPOINT)
    batches = await app[STORAGE].opened()
    if batches is None:
        return

    try:
        await models.ready()
        request_slots = asyncio.Semaphore(await models.target_concurrency())
    except CppBatchError as error:
        log.info("batches cannot run: %s", error)  # the server reports the failure to load
        return
    usage = app[KEY_USAGE]

    def execution(record: BatchRecord) -> tuple[RequestHandler, RequestSlots]:
        rules = msgspec.convert(record.key, KeyRules) if record.key else None
        handler = BatchRequestHandler(models, rules=rules, priority=BACKGROUND, observe=observe)
        return handler, KeyLineSlots(request_slots, usage, rules) if rules else request_slots

    batches.start(BatchResources(models.serves_batch, execution))
