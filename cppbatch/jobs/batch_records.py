"""What the server remembers of files and batches, as OpenAI's API tells it."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from cppbatch.errors import InvalidRequest

Purpose = Literal[
    "batch", "batch_output", "assistants", "assistants_output", "fine-tune", "fine-tune-results", "vision",
    "user_data", "evals",
]  # fmt: skip
BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]  # fmt: skip
FinalStatus = Literal["completed", "expired", "cancelled", "failed"]

ENDED: tuple[BatchStatus, ...] = ("completed", "expired", "cancelled", "failed")

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_WINDOW = re.compile(r"([1-9][0-9]{0,8})([smhd])")
_LONGEST_WINDOW_S = 366 * 86400
_MOST_PAIRS, _LONGEST_KEY, _LONGEST_VALUE = 16, 64, 512


class File(msgspec.Struct, frozen=True, kw_only=True):
    """A file that is kept. Times are seconds since 1970."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    """When it is removed; None: never."""
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"


class BatchError(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong with a batch, or with a line of its input."""

    code: str
    """One word for programs."""
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(msgspec.Struct, frozen=True, kw_only=True):
    """The first of them."""

    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Lines of the input."""

    total: int = 0
    """0 until all were read."""
    completed: int = 0
    failed: int = 0
    """Refused, or answered with an error."""


class InputDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Of the prompts' tokens."""

    cached_tokens: int = 0
    """Taken from the prefix cache."""


class OutputDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Of the generated tokens."""

    reasoning_tokens: int = 0
    """Always 0: they are not told apart here."""


class BatchUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of what was answered so far."""

    input_tokens: int = 0
    input_tokens_details: InputDetails = InputDetails()
    output_tokens: int = 0
    output_tokens_details: OutputDetails = OutputDetails()
    total_tokens: int = 0


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch as the API shows it. Times are seconds since 1970."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str
    """The one that was loaded when it was made, and that answers it."""
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: BatchStatus = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    usage: BatchUsage = BatchUsage()
    metadata: dict[str, str] | None = None

    @property
    def has_ended(self) -> bool:
        """Whether nothing will become of it any more."""
        return self.status in ENDED


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A batch with what only the server knows of it."""

    shown: Batch
    output_id: str
    """What its files will be called, chosen beforehand: so they can be made twice."""
    errors_id: str
    output_life: int | None = None
    """Seconds after which those are removed."""
    ending: FinalStatus | None = None
    """What it ends as; its files are being put in place."""


def completion_window_seconds(given: str) -> int:
    """A completion window's length. Raises `InvalidRequest`."""
    found = _WINDOW.fullmatch(given)
    seconds = int(found[1]) * _UNITS[found[2]] if found else 0
    if not 0 < seconds <= _LONGEST_WINDOW_S:
        raise InvalidRequest(
            "completion_window",
            f"is {given[:40]!r}; it must be a whole number with s, m, h or d, such as 24h, up to 366d",
        )
    return seconds


def check_metadata(metadata: dict[str, str] | None) -> None:
    """Raises `InvalidRequest` for more, or longer ones, than OpenAI takes."""
    metadata = metadata or {}
    if len(metadata) > _MOST_PAIRS:
        raise InvalidRequest("metadata", f"has {len(metadata)} pairs; there may be {_MOST_PAIRS}")
    for key, value in metadata.items():
        if len(key) > _LONGEST_KEY:
            raise InvalidRequest("metadata", f"has a key of {len(key)} characters; it may have {_LONGEST_KEY}")
        if len(value) > _LONGEST_VALUE:
            raise InvalidRequest(f"metadata.{key}", f"has {len(value)} characters; a value may have {_LONGEST_VALUE}")
