"""The batches of a server: creates, lists, cancels and runs them."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Collection, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from cppbatch.errors import Conflict, InvalidRequest, StorageError
from cppbatch.jobs.batches.active_batch import ActiveBatch, BatchResources
from cppbatch.jobs.batches.data_folder import DataFolder
from cppbatch.jobs.batches.records import Batch, BatchRecord, File, check_metadata, completion_window_seconds
from cppbatch.jobs.batches.store import BatchStore, Page

log = logging.getLogger("cppbatch.jobs")


class BatchManager:
    """All batches of a data folder. For one event loop. Raises `StorageError` if something cannot be written.

    `viewer`: only batches of this owner, and those without an owner, are visible; None: all are.
    """

    def __init__(self, data: DataFolder, urls: Collection[str]) -> None:
        """`urls`: the endpoints that batches support."""
        self.data = data
        self._urls = urls
        self._active = {record.batch.id: ActiveBatch(record, data, urls) for record in data.open_batches}
        self._resources: BatchResources | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # --- requests about batches ---------------------------------------------------------------------------------

    @property
    def open_batches(self) -> list[Batch]:
        """The batches that have not ended, with their current counts."""
        return [active.batch for active in self._active.values()]

    @property
    def open_records(self) -> list[BatchRecord]:
        """The batches that have not ended, with the server's own data."""
        return [msgspec.structs.replace(active.record, batch=active.batch) for active in self._active.values()]

    async def create(
        self,
        *,
        endpoint: str,
        input_file_id: str,
        completion_window: str,
        model: str,
        metadata: dict[str, str] | None = None,
        output_lifetime_s: int | None = None,
        owner: str | None = None,
        key: dict[str, Any] | None = None,
    ) -> Batch:
        """Creates a batch for `model`, the loaded model.

        `output_lifetime_s`: seconds after which its results are deleted. `owner`, `key`: the owner and the rules of the
        API key that creates it; None if the server does not use keys. Raises `InvalidRequest`.
        """
        if endpoint not in self._urls:
            raise InvalidRequest("endpoint", f"is {endpoint[:80]!r}; it must be one of {', '.join(self._urls)}")
        check_metadata(metadata)
        now = int(time.time())
        batch = Batch(
            id=f"batch_{uuid.uuid4().hex}",
            endpoint=endpoint,
            model=model,
            input_file_id=input_file_id,
            completion_window=completion_window,
            created_at=now,
            expires_at=now + completion_window_seconds(completion_window),
            metadata=metadata,
        )
        record = BatchRecord(
            batch=batch,
            output_file_id=new_file_id(),
            error_file_id=new_file_id(),
            output_lifetime_s=output_lifetime_s,
            owner=owner or "",
            key=key,
        )
        await asyncio.shield(self._add(record, owner))  # a stored batch must run even if the client disconnects
        return batch

    async def _add(self, record: BatchRecord, viewer: str | None) -> None:
        await self.data.query(BatchStore.add_batch, record, viewer)
        self._active[record.batch.id] = active = ActiveBatch(record, self.data, self._urls)
        if self._resources:
            self._start_task(self._run(active, self._resources))

    async def get(self, batch_id: str, viewer: str | None = None) -> Batch:
        """A batch with its current counts. Raises `NotFound`."""
        if active := self._visible(batch_id, viewer):
            return active.batch
        return await self.data.query(BatchStore.batch, batch_id, viewer)

    def _visible(self, batch_id: str, viewer: str | None) -> ActiveBatch | None:
        active = self._active.get(batch_id)
        return active if active and (viewer is None or active.record.owner in ("", viewer)) else None

    async def file(self, file_id: str, viewer: str | None = None) -> tuple[File, tuple[Path, ...]]:
        """A file and its contents. It may also be the results so far of an open batch.

        The contents are the first `File.bytes` bytes of the first path that exists. Raises `NotFound`.
        """
        for batch_id in self._active:
            active = self._visible(batch_id, viewer)
            if active and (found := active.results_so_far(file_id)):
                return found
        return await self.data.query(BatchStore.file, file_id, viewer), self.data.contents(file_id)

    async def page(self, page: Page, viewer: str | None = None) -> tuple[list[Batch], bool]:
        """A page of batches, and whether there are more."""
        batches, has_more = await self.data.query(BatchStore.batches, page, viewer)
        return [self._active[each.id].batch if each.id in self._active else each for each in batches], has_more

    async def cancel(self, batch_id: str, viewer: str | None = None) -> Batch:
        """Starts cancelling a batch. Keeps the results so far. Raises `NotFound`, and `Conflict` if it has ended."""
        active = self._visible(batch_id, viewer)
        batch = active.batch if active else await self.data.query(BatchStore.batch, batch_id, viewer)
        if batch.status == "cancelling":
            return batch
        if not active or batch.status not in ("validating", "in_progress"):
            raise Conflict("id", f"{batch_id} is {batch.status} and cannot be cancelled")
        await active.cancel()
        return active.batch

    # --- running ------------------------------------------------------------------------------------------------

    def start(self, resources: BatchResources) -> None:
        """Resumes the open batches, and starts running new ones."""
        self._resources = resources
        for active in list(self._active.values()):
            log.info("%s resumes", active.batch.id)
            self._start_task(self._run(active, resources))
        self._start_task(self._delete_expired_files())

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, active: ActiveBatch, resources: BatchResources) -> None:
        try:
            await active.run(resources)
        except Exception:
            log.exception("%s is stopped until the server restarts", active.batch.id)
        else:
            del self._active[active.batch.id]
            log.info("%s is %s", active.batch.id, active.batch.status)

    async def _delete_expired_files(self) -> None:
        while True:
            try:
                await self.data.delete_expired(int(time.time()))
            except StorageError as error:
                log.error("could not delete expired files: %s", error)
            await asyncio.sleep(60.0)

    async def stop(self) -> None:
        """Stops all batches; the next start resumes them. Requests about batches still work."""
        self._resources = None
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for active in self._active.values():
            try:
                await active.save()
            except StorageError as error:  # only makes the stored counts outdated
                log.warning("%s: %s", active.batch.id, error)

    async def close(self) -> None:
        """Stops all batches and closes the data folder, so that another process can open it."""
        await self.stop()
        await asyncio.to_thread(self.data.close)


def new_file_id() -> str:
    """A new unique file ID."""
    return f"file-{uuid.uuid4().hex}"
