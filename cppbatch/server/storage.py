"""Storage of files and batches, if the server has any."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from pathlib import Path

from aiohttp import web
from platformdirs import user_data_path

from cppbatch.errors import DiskFull, StorageError
from cppbatch.jobs.batches.data_folder import open_data_folder
from cppbatch.jobs.batches.manager import BatchManager
from cppbatch.jobs.batches.records import BatchRecord
from cppbatch.server.http.api_errors import NoStorage
from cppbatch.server.observe.stats import BatchStats

log = logging.getLogger("cppbatch.server")

RETRY_S = 30.0
"""Seconds between checks of a full disk."""


class Storage:
    """The batches of this server. If unavailable, requests for files and batches are refused with the reason."""

    def __init__(
        self,
        batches: BatchManager | None = None,
        *,
        error: StorageError | None = None,
        folder: Path | None = None,
        urls: Collection[str] = (),
    ) -> None:
        """`error`: why the data folder cannot be used. `folder`: the folder to retry while its disk is full.

        `urls`: the endpoints that batches support.
        """
        self.batches = batches
        self.error = error
        self._folder = folder
        self._urls = urls
        self._stopped = False

    @property
    def missing(self) -> str:
        """Why batches are unavailable, as a message for clients."""
        return f"this server does not store files: {self.error.public if self.error else 'start it with --data-dir'}"

    async def opened(self) -> BatchManager | None:
        """Waits while the disk is full. Returns the batches, or None if they are unavailable for another reason."""
        while self.batches is None and isinstance(self.error, DiskFull) and self._folder:
            await asyncio.sleep(RETRY_S)
            if self._stopped:
                break
            try:
                self.batches = await asyncio.to_thread(_open, self._folder, self._urls)
            except StorageError as error:
                self.error = error
            else:
                self.error = None
                log.warning("%s has free space again: files and batches are stored", self._folder)
        return self.batches

    def stats(self) -> BatchStats | None:
        """The open batches; None if batches are unavailable."""
        if self.batches is None:
            return None
        counts = [batch.request_counts for batch in self.batches.open_batches]
        return BatchStats(
            open=len(counts),
            lines=sum(each.total for each in counts),
            completed=sum(each.completed for each in counts),
            failed=sum(each.failed for each in counts),
        )

    def open_batches(self) -> list[BatchRecord]:
        """The unfinished batches, with their owners."""
        return self.batches.open_records if self.batches else []

    async def stop(self) -> None:
        """Stops work on all batches; they resume after the next start."""
        self._stopped = True
        if self.batches:
            await self.batches.stop()


STORAGE = web.AppKey("storage", Storage)


def batches_of(request: web.Request) -> BatchManager:
    """The batches of the request's server. Raises `NoStorage`."""
    storage = request.app[STORAGE]
    if storage.batches is None:
        raise NoStorage(storage.missing)
    return storage.batches


def open_storage(data_dir: Path | None, urls: Collection[str]) -> Storage:
    """Opens the data folder. `urls`: the endpoints that batches support.

    Raises `StorageError` if `data_dir` cannot be used for a reason other than a full disk. The default folder may be in
    use by another server; then this one has no storage.
    """
    folder = data_dir or user_data_path("cppbatch")
    try:
        return Storage(_open(folder, urls))
    except StorageError as error:
        if data_dir and not isinstance(error, DiskFull):
            raise
        return Storage(error=error, folder=folder, urls=urls)


def _open(folder: Path, urls: Collection[str]) -> BatchManager:
    return BatchManager(open_data_folder(folder), urls)
