"""What a batch of the API reads: one file, for one endpoint."""

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

_PROMPTS: dict[str, Endpoint] = {"/v1/chat/completions": "chat", "/v1/embeddings": "embeddings"}
_MOST_ERRORS = 100  # that a batch shows; if it runs, all of them are in its error file
_LINES_AT_ONCE, _BREATH_S = 256, 0.0002


@dataclass
class ValidationResult:
    """What is in an input."""

    n_lines: int = 0
    n_good: int = 0
    errors: list[BatchError] = field(default_factory=list)
    """The first of them."""


def read_batch_input(path: Path, endpoint: str, urls: Collection[str]) -> Iterator[JobRequest | RejectedLine]:
    """The lines of a batch's input, those for other endpoints refused. Raises `ConfigError` if it cannot be read."""
    form = InputFormat(path=path, kind="jsonl", endpoint=_PROMPTS.get(endpoint, "completions"))
    with InputReader(form, urls) as reader:
        for entry in reader:
            yield _mismatched(entry, endpoint) if isinstance(entry, JobRequest) and entry.url != endpoint else entry


def _mismatched(item: JobRequest, endpoint: str) -> RejectedLine:
    return RejectedLine(
        line=item.line,
        code="mismatched_endpoint",
        message=f"url: is {item.url}, and the endpoint of this batch is {endpoint}",
        custom_id=item.custom_id,
        content=item.content,
    )


def validate_input(entries: Iterable[JobRequest | RejectedLine], stop: threading.Event) -> ValidationResult:
    """Counts what there is. Ends early when told to; what it returns is of no use then."""
    found = ValidationResult()
    for entry in entries:
        found.n_lines += 1
        if isinstance(entry, JobRequest):
            found.n_good += 1
        elif len(found.errors) < _MOST_ERRORS:
            found.errors.append(BatchError(code=entry.code, message=entry.message, line=entry.line))
        if found.n_lines % _LINES_AT_ONCE == 0:
            if stop.is_set():
                break
            time.sleep(_BREATH_S)  # the event loop is waiting for Python's lock
    return found
