"""A job's result files, and the JSON lines in them."""

from __future__ import annotations

import contextlib
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from cppbatch.errors import LedgerLost
from cppbatch.jobs.durable_files import DurableFile, StreamFile
from cppbatch.jobs.job_request import JobRequest, JobResponse, Json, RejectedLine
from cppbatch.jobs.ledger import FinishedLine, Ledger, LineState
from cppbatch.regular_files import is_stream
from cppbatch.typed_json import encode_line

_TOKEN_COUNTS = ("prompt_tokens", "cached_tokens", "completion_tokens")
_OPTIONAL_FIELDS = ("reasoning_content", "tool_calls", "logprobs")
"""Fields of a choice that the short form of a result contains if set."""


class ResultLine(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one input line."""

    line: int
    is_ok: bool
    """False for rejected lines and responses with an error status."""
    data: bytes
    """A line of JSON, with its line end."""
    tokens: dict[str, int] = {}
    """Token counts by name."""


class Journal:
    """Ensures that every line of the input gets exactly one result, even if the process dies at any moment.

    First, a result is appended to its file. Then one commit of the ledger records that the line is finished, and the
    new size of the file. When the journal is opened, data beyond the committed size is truncated.

    Not thread-safe: one thread at a time. Raises `StorageError`.
    """

    def __init__(
        self, ledger: Ledger, output: Path, errors: Path, *, ordered: bool = False, streams: bool = False
    ) -> None:
        """Opens `output` for responses and `errors` for errors. `errors` is created for the first error; if it is the
        same path, `output` has both.

        `ordered`: writes responses in the order of the input. The ledger holds those that arrive early. `streams`:
        whether pipes and devices are written to. Otherwise they are refused. Raises `LedgerLost`.
        """
        self._streams = [path for path in (output, errors) if streams and is_stream(path)]
        if not ledger.is_begun:
            for path in (output, errors):
                if path not in self._streams and path.exists() and (n_bytes := path.stat().st_size):
                    raise LedgerLost(
                        f"{ledger.path} has no record of {path.name}, which has {n_bytes} bytes: the ledger was lost "
                        "or replaced. Restore it from a backup, or start over with another output"
                    )
            ledger.begin()
        self.ledger = ledger
        self._ordered = ordered
        self._errors_path = errors
        self._output = self._open(output, ledger.number("output_bytes"))
        try:
            has_errors = errors != output and (errors in self._streams or errors.exists())
            self._errors = self._open(errors, ledger.number("error_bytes")) if has_errors else None
        except BaseException:
            self._output.close()
            raise
        self.tokens = Counter({name: ledger.number(name) for name in _TOKEN_COUNTS})
        self.committed_bytes = self._sizes
        """Sizes of the output and error files, without unfinished writes."""

    def _open(self, path: Path, size: int) -> DurableFile | StreamFile:
        return (StreamFile if path in self._streams else DurableFile)(path, size)

    @property
    def _sizes(self) -> tuple[int, int]:
        return self._output.size, self._errors.size if self._errors else 0

    @property
    def n_completed(self) -> int:
        """Lines with a successful response."""
        return self.ledger.n_completed

    @property
    def n_failed(self) -> int:
        """Rejected lines and lines with an error response."""
        return self.ledger.n_failed

    def register(self, entries: Sequence[JobRequest | RejectedLine]) -> list[JobRequest]:
        """Registers consecutive entries, writes the errors of rejected lines, and returns the requests to run."""
        to_run, to_reject = self.ledger.register(entries)
        self.reject(to_reject)
        if self._ordered:
            self._write_ready()
        return to_run

    def reject(self, lines: Sequence[RejectedLine]) -> None:
        """Writes the errors of these lines."""
        if lines:
            self.record([rejection_line(line) for line in lines])

    def record(self, results: Sequence[ResultLine]) -> None:
        """Writes these results durably."""
        has_one_file = self._errors_path == self._output.path
        ok = [result for result in results if result.is_ok or has_one_file]
        failed = [] if has_one_file else [result for result in results if not result.is_ok]
        if failed and not self._errors:
            self._errors = DurableFile(self._errors_path, 0)
        sizes: dict[str, int] = {}
        tokens = sum((Counter(result.tokens) for result in results), Counter(self.tokens))
        with self._sizes_restored_on_error():
            if ok and not self._ordered:
                self._output.append(b"".join(result.data for result in ok))
                sizes["output_bytes"] = self._output.size
            if failed and self._errors:
                self._errors.append(b"".join(result.data for result in failed))
                sizes["error_bytes"] = self._errors.size
            self.ledger.record(
                [
                    FinishedLine(result.line, LineState.COMPLETED if result.is_ok else LineState.FAILED)
                    for result in results
                ],
                sizes | tokens,
                [(result.line, result.data) for result in ok] if self._ordered else (),
            )
        self.tokens = tokens
        self.committed_bytes = self._sizes
        if self._ordered:
            self._write_ready()

    def _write_ready(self) -> None:
        while ready := self.ledger.ready(256):
            with self._sizes_restored_on_error():
                self._output.append(b"".join(data for _, data in ready))
                self.ledger.release((line for line, _ in ready), {"output_bytes": self._output.size})
            self.committed_bytes = self._sizes

    @contextlib.contextmanager
    def _sizes_restored_on_error(self) -> Iterator[None]:
        """If the ledger's commit fails, makes the next append discard the appended data."""
        sizes = [(file, file.size) for file in (self._output, self._errors) if file]
        try:
            yield
        except BaseException:
            for file, size in sizes:
                file.size = size
            raise

    def close(self) -> None:
        """Closes all files."""
        with contextlib.closing(self.ledger), contextlib.closing(self._output):
            if self._errors:
                self._errors.close()


def response_line(request: JobRequest, response: JobResponse) -> ResultLine:
    """The result of a request with its endpoint's response, which may be an error.

    OpenAI's format, or the short form for a plain prompt: {"custom_id": "a", "line": 1, "text": "Hello", ...}.
    """
    is_short = request.is_plain and response.is_ok
    content = _short_form(request, response) if is_short else _openai_form(request, response)
    tokens = {
        "prompt_tokens": response.prompt_tokens,
        "cached_tokens": response.cached_tokens,
        "completion_tokens": response.completion_tokens,
    }
    return ResultLine(line=request.line, is_ok=response.is_ok, data=_encode_line(content), tokens=tokens)


def rejection_line(line: RejectedLine) -> ResultLine:
    """The result of a line that was not sent to an endpoint."""
    content = {
        "id": _result_id(),
        "custom_id": line.custom_id,
        "line": line.line,
        "response": None,
        "error": {"code": line.code, "message": line.message, "line": line.line},
    }
    return ResultLine(line=line.line, is_ok=False, data=_encode_line(content))


def _openai_form(request: JobRequest, response: JobResponse) -> Json:
    line = {} if response.is_ok else {"line": request.line}
    return {
        "id": _result_id(),
        "custom_id": request.custom_id,
        **line,
        "response": {"status_code": response.status, "request_id": response.request_id, "body": response.body},
        "error": None,
    }


def _short_form(request: JobRequest, response: JobResponse) -> Json:
    body: Json = msgspec.to_builtins(response.body)
    content: Json = {"custom_id": request.custom_id, "line": request.line}
    if "choices" in body:
        choices = [_short_choice(choice) for choice in body["choices"]]
        content |= choices[0] if len(choices) == 1 else {"choices": choices}
    else:
        embeddings = [each["embedding"] for each in body["data"]]
        content |= {"embedding": embeddings[0]} if len(embeddings) == 1 else {"embeddings": embeddings}
    return content | {"usage": body["usage"]}


def _short_choice(choice: Json) -> Json:
    message: dict[str, Any] = choice.get("message") or {"content": choice.get("text")}
    fields = {**message, "logprobs": choice.get("logprobs")}
    optional = {name: fields[name] for name in _OPTIONAL_FIELDS if fields.get(name)}
    return {"text": message["content"], "finish_reason": choice["finish_reason"], **optional}


def _result_id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"


def _encode_line(content: Json) -> bytes:
    return encode_line(content) + b"\n"
