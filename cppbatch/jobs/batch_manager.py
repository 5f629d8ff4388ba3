"""The batches of a server: made, asked about, cancelled, and kept at work."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Collection, Coroutine
from typing import Any

from cppbatch.errors import Conflict, InvalidRequest, StorageError
from cppbatch.jobs.active_batch import ActiveBatch, BatchResources
from cppbatch.jobs.batch_records import Batch, BatchRecord, check_metadata, completion_window_seconds
from cppbatch.jobs.batch_store import BatchStore, Page
from cppbatch.jobs.data_folder import DataFolder

log = logging.getLogger("cppbatch.jobs")

_SWEEP_S = 60.0


class BatchManager:
    """For one event loop. Raises `StorageError` when something cannot be written."""

    def __init__(self, data: DataFolder, urls: Collection[str]) -> None:
        """`urls`: the endpoints that batches can be for."""
        self.data = data
        self._urls = urls
        self._open = {record.shown.id: ActiveBatch(record, data, urls) for record in data.open_batches}
        self._workplace: BatchResources | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # --- for those who ask --------------------------------------------------------------------------------------

    @property
    def open_batches(self) -> list[Batch]:
        """Those that have not ended, as they are just now."""
        return [batch.shown for batch in self._open.values()]

    async def create(
        self,
        *,
        endpoint: str,
        input_file_id: str,
        completion_window: str,
        model: str,
        metadata: dict[str, str] | None = None,
        output_life: int | None = None,
    ) -> Batch:
        """A new batch, for the model that is loaded. `output_life`: seconds for which its results are kept.

        Raises `InvalidRequest`.
        """
        if endpoint not in self._urls:
            raise InvalidRequest("endpoint", f"is {endpoint[:80]!r}; it must be one of {', '.join(self._urls)}")
        check_metadata(metadata)
        now, name = int(time.time()), uuid.uuid4().hex
        shown = Batch(
            id=f"batch_{name}",
            endpoint=endpoint,
            model=model,
            input_file_id=input_file_id,
            completion_window=completion_window,
            created_at=now,
            expires_at=now + completion_window_seconds(completion_window),
            metadata=metadata,
        )
        record = BatchRecord(shown=shown, output_id=new_file_id(), errors_id=new_file_id(), output_life=output_life)
        await asyncio.shield(self._add(record))  # though the client may go away: what is in the books is worked on
        return shown

    async def _add(self, record: BatchRecord) -> None:
        await self.data.ask(BatchStore.add_batch, record)
        self._open[record.shown.id] = batch = ActiveBatch(record, self.data, self._urls)
        if self._workplace:
            self._begin(batch, self._workplace)

    async def get(self, batch_id: str) -> Batch:
        """A batch as it is now. Raises `NotFound`."""
        if batch := self._open.get(batch_id):
            return batch.shown
        return await self.data.ask(BatchStore.batch, batch_id)

    async def page(self, page: Page) -> tuple[list[Batch], bool]:
        """A page of them, and whether there are more."""
        batches, has_more = await self.data.ask(BatchStore.batches, page)
        return [self._open[each.id].shown if each.id in self._open else each for each in batches], has_more

    async def cancel(self, batch_id: str) -> Batch:
        """Begins to end a batch; what is answered already stays. Raises `NotFound`, and `Conflict` if it has ended."""
        batch = self._open.get(batch_id)
        shown = batch.shown if batch else await self.data.ask(BatchStore.batch, batch_id)
        if shown.status == "cancelling":
            return shown
        if not batch or shown.status not in ("validating", "in_progress"):
            raise Conflict("id", f"{batch_id} is {shown.status} and cannot be cancelled any more")
        await batch.cancel()
        return batch.shown

    # --- at work ------------------------------------------------------------------------------------------------

    def start(self, workplace: BatchResources) -> None:
        """Goes on with those that have not ended, and begins with new ones as they come."""
        self._workplace = workplace
        for batch in list(self._open.values()):
            log.info("%s goes on", batch.shown.id)
            self._begin(batch, workplace)
        self._keep(self._sweep())

    def _begin(self, batch: ActiveBatch, workplace: BatchResources) -> None:
        self._keep(self._live(batch, workplace))

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _live(self, batch: ActiveBatch, workplace: BatchResources) -> None:
        try:
            await batch.live(workplace)
        except Exception:
            log.exception("%s stands still until the server is started again", batch.shown.id)
        else:
            del self._open[batch.shown.id]
            log.info("%s is %s", batch.shown.id, batch.shown.status)

    async def _sweep(self) -> None:
        while True:
            try:
                await self.data.sweep(int(time.time()))
            except StorageError as error:
                log.error("files whose time is up cannot be removed: %s", error)
            await asyncio.sleep(_SWEEP_S)

    async def stop(self) -> None:
        """Leaves all work as it is, for the next start; they can still be asked about."""
        self._workplace = None
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for batch in self._open.values():
            try:
                await batch.save()
            except StorageError as error:  # nothing but its counts would be new
                log.warning("%s: %s", batch.shown.id, error)

    async def close(self) -> None:
        """Lets another process have the data."""
        await self.stop()
        await asyncio.to_thread(self.data.close)


def new_file_id() -> str:
    """For a file that comes."""
    return f"file-{uuid.uuid4().hex}"
