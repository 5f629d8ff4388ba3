"""What requests about batches say."""

from __future__ import annotations

from typing import Annotated

import msgspec

from cppbatch.jobs.batch_store import Page
from cppbatch.server.files.schemas import ExpiresAfter


class NewBatch(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/batches`."""

    input_file_id: str
    """A file that was uploaded with the purpose `batch`: a request on each line."""
    endpoint: str
    """The one that all of its lines are for."""
    completion_window: str
    """For how long it may take: a whole number with s, m, h or d, such as 24h."""
    metadata: dict[str, str] | None = None
    """For the client's own use: up to 16 pairs."""
    output_expires_after: ExpiresAfter | None = None
    """For how long its results are kept; None: for ever."""


class BatchQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which batches are listed, the newest first."""

    after: str = ""
    """The id of the last one of the page before."""
    limit: Annotated[int, msgspec.Meta(ge=1, le=100)] = 20

    @property
    def page(self) -> Page:
        """As the store wants it."""
        return Page(after=self.after or None, limit=self.limit)
