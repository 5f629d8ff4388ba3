"""Reads and validates the input file of a batch."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cppbatch.jobs.batch_records import BatchError
from cppbatch.jobs.input_format import Endpoint, InputFormat
from cppbatch.jobs.input_reader import InputReader
from cppbatch.jobs.job_request import JobRequest, RejectedLine

_PROMPT_ENDPOINTS: dict[str, Endpoint] = {"/v1/chat/completions": "chat", "/v1/embeddings": "embeddings"}
_MAX_ERRORS = 100  # in the batch object; the error file contains all errors
_LINES_PER_PAUSE, _PAUSE_S = 256, 0.0002


@dataclass
class ValidationResult:
    """Counts and first errors of an input."""

    n_lines: int = 0
    n_valid: int = 0
    errors: list[BatchError] = field(default_factory=list)


def read_batch_input(path: Path, endpoint: str, urls: Collection[str]) -> Iterator[JobRequest | RejectedLine]:
    """The entries of a batch's input; requests to another endpoint than the batch's are rejected.

    `urls`: the endpoints that batches support. Raises `ConfigError` if the file cannot be read.
    """
    input_format = InputFormat(path=path, kind="jsonl", endpoint=_PROMPT_ENDPOINTS.get(endpoint, "completions"))
    with InputReader(input_format, urls) as reader:
        for entry in reader:
            if isinstance(entry, JobRequest) and entry.url != endpoint:
                yield _wrong_endpoint(entry, endpoint)
            else:
                yield entry


def _wrong_endpoint(request: JobRequest, endpoint: str) -> RejectedLine:
    return RejectedLine(
        line=request.line,
        code="mismatched_endpoint",
        message=f"url: is {request.url}; it must be the endpoint of the batch, {endpoint}",
        custom_id=request.custom_id,
        content_hash=request.content_hash,
    )


def validate_input(entries: Iterable[JobRequest | RejectedLine], stop: threading.Event) -> ValidationResult:
    """Counts the entries and collects the first errors. Returns an incomplete result after `stop` is set."""
    result = ValidationResult()
    for entry in entries:
        result.n_lines += 1
        if isinstance(entry, JobRequest):
            result.n_valid += 1
        elif len(result.errors) < _MAX_ERRORS:
            result.errors.append(BatchError(code=entry.code, message=entry.message, line=entry.line))
        if result.n_lines % _LINES_PER_PAUSE == 0:
            if stop.is_set():
                break
            time.sleep(_PAUSE_S)  # lets the event loop take the GIL
    return result
