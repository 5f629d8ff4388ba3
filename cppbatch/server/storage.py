"""Where a server keeps files and batches, if it does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from aiohttp import web
from platformdirs import user_data_path

from cppbatch.errors import StorageError
from cppbatch.jobs.batches import Batches
from cppbatch.jobs.data import open_data
from cppbatch.server.batches.work import URLS
from cppbatch.server.errors import NoStorage
from cppbatch.server.shapes import BatchFigures


@dataclass(frozen=True)
class Storage:
    """Without `batches`, every request that needs them is told why there are none."""

    batches: Batches | None = None
    missing: str = "this server keeps no files: start it with --data-dir"

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
        if self.batches:
            await self.batches.stop()


STORAGE = web.AppKey("storage", Storage)


def batches_of(request: web.Request) -> Batches:
    """Raises `NoStorage`."""
    storage = request.app[STORAGE]
    if storage.batches is None:
        raise NoStorage(storage.missing)
    return storage.batches


def open_storage(data_dir: Path | None) -> Storage:
    """Opens the data folder. Raises `StorageError` if that was chosen and cannot be used; the user's own one, which
    nobody has chosen, may be in use by another server."""
    try:
        folder = data_dir or user_data_path("cppbatch")
        return Storage(Batches(open_data(folder), URLS))
    except StorageError as error:
        if data_dir:
            raise
        return Storage(missing=f"this server keeps no files: {error}. Or start this one with a --data-dir of its own")
