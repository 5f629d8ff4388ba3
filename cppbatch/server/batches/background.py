"""Keeps batches at work while the application runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator

from aiohttp import web

from cppbatch.engine.request import BACKGROUND
from cppbatch.errors import CppBatchError
from cppbatch.jobs.active_batch import BatchResources
from cppbatch.server.batches.work import BatchWork
from cppbatch.server.run_requests import Event, target_concurrency
from cppbatch.server.server_metrics import METRICS
from cppbatch.server.serving import SERVING
from cppbatch.server.storage import STORAGE

log = logging.getLogger("cppbatch.server")

_ENDPOINT = "/v1/batches"  # under which their requests are counted


async def batches_at_work(app: web.Application) -> AsyncIterator[None]:
    """For `Application.cleanup_ctx`."""
    storage = app[STORAGE]
    starting = asyncio.create_task(_start(app))
    yield
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    if storage.batches:
        await storage.batches.close()


async def _start(app: web.Application) -> None:
    """As soon as there are a place to keep them and a model."""
    serving, metrics = app[SERVING], app[METRICS]
    batches = await app[STORAGE].opened()
    if batches is None:
        return

    def watch(events: AsyncGenerator[Event, None], n: int) -> AsyncGenerator[Event, None]:
        return metrics.observe(events, _ENDPOINT, n)

    try:
        await serving.client.loaded()
        places = asyncio.Semaphore(await target_concurrency(serving.client))
    except CppBatchError as error:
        log.info("no batches are worked on: %s", error)  # whoever waits for the model says it aloud
        return
    work = BatchWork(serving, priority=BACKGROUND, watch=watch)
    batches.start(BatchResources(serving.info.name, work, places))
