"""Files and batches in the form of OpenAI's API, and the stored record of a batch."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from cppbatch.errors import InvalidRequest

Purpose = Literal[
    "batch", "batch_output", "assistants", "assistants_output", "fine-tune", "fine-tune-results", "vision",
    "user_data", "evals",
]  # fmt: skip
BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]  # fmt: skip
FinalStatus = Literal["completed", "expired", "cancelled", "failed"]

FINAL_STATUSES: tuple[BatchStatus, ...] = ("completed", "expired", "cancelled", "failed")

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_COMPLETION_WINDOW = re.compile(r"([1-9][0-9]{0,8})([smhd])")
_MAX_PAIRS, _MAX_KEY_LENGTH, _MAX_VALUE_LENGTH = 16, 64, 512


class File(msgspec.Struct, frozen=True, kw_only=True):
    """A stored file. Times are Unix times in seconds."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    """When the file is deleted; None: never."""
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"


class BatchError(msgspec.Struct, frozen=True, kw_only=True):
    """An error of a batch, or of a line of its input."""

    code: str
    """Machine-readable error code."""
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(msgspec.Struct, frozen=True, kw_only=True):
    """The first errors of a batch."""

    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of the input's lines."""

    total: int = 0
    """0 until the whole input was read."""
    completed: int = 0
    failed: int = 0
    """Rejected lines and error responses."""


class InputDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Details of the prompt tokens."""

    cached_tokens: int = 0
    """Tokens found in the prefix cache."""


class OutputDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Details of the generated tokens."""

    reasoning_tokens: int = 0
    """Always 0: batches do not count reasoning tokens separately."""


class BatchUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of the responses so far."""

    input_tokens: int = 0
    input_tokens_details: InputDetails = InputDetails()
    output_tokens: int = 0
    output_tokens_details: OutputDetails = OutputDetails()
    total_tokens: int = 0


class ResultsSoFar(msgspec.Struct, frozen=True, kw_only=True):
    """The files that a batch writes while it runs. They only grow, by whole lines."""

    output_file_id: str
    output_bytes: int = 0
    error_file_id: str
    error_bytes: int = 0


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch in the form of the API. Times are Unix times in seconds."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str
    """The model that was loaded when the batch was created. Only this model runs it."""
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: BatchStatus = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    results_so_far: ResultsSoFar | UnsetType = UNSET
    """Only until the batch has ended; then its results are in `output_file_id` and `error_file_id`."""
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
        """Whether the status is final."""
        return self.status in FINAL_STATUSES


class BatchRecord(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={
        "batch": "shown",
        "output_file_id": "output_id",
        "error_file_id": "errors_id",
        "output_lifetime_s": "output_life",
        "final_status": "ending",
    },
):
    """A batch with the server's own data, as stored by `BatchStore`. `rename`: the names in the stored JSON."""

    batch: Batch
    output_file_id: str
    error_file_id: str
    """Both IDs are chosen in advance, so that moving the files into place can be repeated."""
    output_lifetime_s: int | None = None
    """Seconds after which the output files are deleted; None: never."""
    owner: str = ""
    """The owner, who can see the batch and its results; empty: visible to all."""
    key: dict[str, Any] | None = None
    """The rules of the API key that created it, in the server's form. None: it was created without a key."""
    is_begun: bool = False
    """Whether its ledger has been created; it must then exist after a restart."""
    final_status: FinalStatus | None = None
    """Set once all results are written, before the files are moved into place."""


def completion_window_seconds(window: str) -> int:
    """The length of a completion window such as "24h". Raises `InvalidRequest`."""
    found = _COMPLETION_WINDOW.fullmatch(window)
    seconds = int(found[1]) * _UNITS[found[2]] if found else 0
    if not 0 < seconds <= 366 * 86400:
        raise InvalidRequest(
            "completion_window",
            f"is {window[:40]!r}; it must be an integer followed by s, m, h or d, for example 24h, up to 366d",
        )
    return seconds


def check_metadata(metadata: dict[str, str] | None) -> None:
    """Raises `InvalidRequest` if the metadata exceeds OpenAI's limits."""
    metadata = metadata or {}
    if len(metadata) > _MAX_PAIRS:
        raise InvalidRequest("metadata", f"has {len(metadata)} pairs; the maximum is {_MAX_PAIRS}")
    for key, value in metadata.items():
        if len(key) > _MAX_KEY_LENGTH:
            raise InvalidRequest("metadata", f"has a key of {len(key)} characters; the maximum is {_MAX_KEY_LENGTH}")
        if len(value) > _MAX_VALUE_LENGTH:
            raise InvalidRequest(f"metadata.{key}", f"has {len(value)} characters; the maximum is {_MAX_VALUE_LENGTH}")
