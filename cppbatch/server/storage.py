"""Where a server keeps files and batches, if it does."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from aiohttp import web
from platformdirs import user_data_path

from cppbatch.errors import DiskFull, StorageError
from cppbatch.jobs.batch_manager import BatchManager
from cppbatch.jobs.data_folder import open_data_folder
from cppbatch.server.api_errors import NoStorage
from cppbatch.server.batches.work import URLS
from cppbatch.server.shapes import BatchFigures

log = logging.getLogger("cppbatch.server")

RETRY_S = 30.0
"""How often a full disk is looked at again."""


class Storage:
    """Without `batches`, every request that needs them is told why there are none."""

    def __init__(
        self, batches: BatchManager | None = None, *, error: StorageError | None = None, folder: Path | None = None
    ) -> None:
        """`error`: why there are none, if any were wanted. `folder`: where there may be some later."""
        self.batches = batches
        self.error = error
        self._folder = folder
        self._stopped = False

    @property
    def missing(self) -> str:
        """Why there are no batches, for clients."""
        return f"this server keeps no files: {self.error.public if self.error else 'start it with --data-dir'}"

    async def opened(self) -> BatchManager | None:
        """The batches, as soon as there is room for them on the disk; None if that would not help."""
        while self.batches is None and isinstance(self.error, DiskFull) and self._folder:
            await asyncio.sleep(RETRY_S)
            if self._stopped:
                break
            try:
                self.batches = BatchManager(await asyncio.to_thread(open_data_folder, self._folder), URLS)
            except StorageError as error:
                self.error = error
            else:
                self.error = None
                log.warning("there is room in %s again: files and batches are kept", self._folder)
        return self.batches

    def figures(self) -> BatchFigures | None:
        """What it does just now."""
        if self.batches is None:
            return None
        counts = [batch.request_counts for batch in self.batches.open_batches]
        return BatchFigures(
            open=len(counts),
            lines=sum(each.total for each in counts),
            completed=sum(each.completed for each in counts),
            failed=sum(each.failed for each in counts),
        )

    async def stop(self) -> None:
        """Leaves all batches as they are, for the next start."""
        self._stopped = True
        if self.batches:
            await self.batches.stop()


STORAGE = web.AppKey("storage", Storage)


def batches_of(request: web.Request) -> BatchManager:
    """Raises `NoStorage`."""
    storage = request.app[STORAGE]
    if storage.batches is None:
        raise NoStorage(storage.missing)
    return storage.batches


def open_storage(data_dir: Path | None) -> Storage:
    """Opens the data folder. Raises `StorageError` if that was chosen and cannot be used, unless there is just no room
    in it; the user's own one, which nobody has chosen, may be in use by another server."""
    folder = data_dir or user_data_path("cppbatch")
    try:
        return Storage(BatchManager(open_data_folder(folder), URLS))
    except StorageError as error:
        if data_dir and not isinstance(error, DiskFull):
            raise
        return Storage(error=error, folder=folder)
