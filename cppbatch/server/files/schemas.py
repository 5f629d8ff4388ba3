"""What requests about files say."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from cppbatch.jobs.batch_store import Page

UploadPurpose = Literal["batch", "assistants", "fine-tune", "vision", "user_data", "evals"]


class ExpiresAfter(msgspec.Struct, frozen=True, kw_only=True):
    """For how long a file is kept."""

    anchor: Literal["created_at"]
    """From when on."""
    seconds: Annotated[int, msgspec.Meta(ge=3600, le=2592000)]


class Upload(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of an upload's form, beside the file itself."""

    purpose: UploadPurpose
    """What the file is for; it can be used for batches here."""


class FileQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which files are listed. Empty: any."""

    after: str = ""
    """The id of the last one of the page before."""
    limit: Annotated[int, msgspec.Meta(ge=1, le=10000)] = 10000
    order: Literal["asc", "desc"] = "desc"
    """By the time at which they came."""
    purpose: str = ""

    @property
    def page(self) -> Page:
        """As the store wants it."""
        return Page(after=self.after or None, limit=self.limit, newest_first=self.order == "desc")
