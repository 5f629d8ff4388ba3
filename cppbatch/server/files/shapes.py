"""The answers about files; a file itself is `cppbatch.jobs.batch_records.File`."""

from __future__ import annotations

from typing import Literal

import msgspec

from cppbatch.jobs.batch_records import File


class FileList(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/files`: a page of them."""

    object: Literal["list"] = "list"
    data: list[File]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """`DELETE /v1/files/{id}`."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True
