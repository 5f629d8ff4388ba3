"""The answers about batches; a batch itself is `cppbatch.jobs.batch_records.Batch`."""

from __future__ import annotations

from typing import Literal

import msgspec

from cppbatch.jobs.batch_records import Batch


class BatchList(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/batches`: a page of them."""

    object: Literal["list"] = "list"
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool
