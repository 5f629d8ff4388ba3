"""All exceptions of cppbatch. Each message names the problem, the value and the remedy."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence

import msgspec

_LONGEST_MESSAGE, _LONGEST_FIELD = 2000, 200  # characters


def shorten(text: str, most: int = _LONGEST_MESSAGE) -> str:
    """`text` with at most `most` characters: of a longer one, the middle is left out.

    For every message: it may quote a text of a file or a request, which may have megabytes.
    """
    if len(text) <= most:
        return text
    note = f" [{len(text) - most} or more characters left out] "
    n_kept = most - len(note)
    return f"{text[: n_kept - n_kept // 3]}{note}{text[len(text) - n_kept // 3 :]}"


def name_first(names: Sequence[str], most: int) -> str:
    """The first `most` names, and the number of the others."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


class CppBatchError(Exception):
    """Base class of all errors below. As a text, it is shortened (`shorten`)."""

    def __str__(self) -> str:
        return shorten(super().__str__())


class LibraryError(CppBatchError):
    """llama-cpp-python is missing, is not the pinned version, or does not work on this CPU."""


class ModelError(CppBatchError):
    """A model file is missing or broken, or the model does not support the request."""


class ConfigError(CppBatchError):
    """A setting of the engine or the server is out of range, or two settings contradict each other."""


class InputChanged(ConfigError):
    """The input file of a batch has changed since its upload."""


class UnreadableFile(CppBatchError):
    """A file has no text that can be read: the predicate of a sentence about it, with a remedy."""


class NotJsonLines(ConfigError):
    """An input file is one JSON value instead of one in each line. `reason`: the message without the path."""

    def __init__(self, path: object, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.reason = reason


class LoadInterrupted(ModelError):
    """The process loading a model was killed from outside. The model is not the cause."""


class DoesNotFit(CppBatchError):
    """A model does not fit into memory next to the loaded ones.

    `never`: it would not fit even if every evictable model were unloaded.
    """

    def __init__(self, message: str, *, never: bool = False) -> None:
        super().__init__(message)
        self.never = never


class ModelNotLoaded(CppBatchError):
    """The request is for a model that is not loaded, and must not load it (--no-models-autoload)."""


class ModelLoadFailed(CppBatchError):
    """A model could not be loaded. `retry_after`: seconds after which a request retries loading."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RpcUnreachable(CppBatchError):
    """No RPC worker currently answers at an address (--rpc)."""


class EstimateFailed(CppBatchError):
    """The memory of an engine cannot be estimated. The model may still load."""


class UnusableServer(CppBatchError):
    """The server to benchmark does not answer, or cannot be benchmarked."""


class StorageError(CppBatchError):
    """Job files cannot be used: the disk is full, or a file is broken, read-only, or in use elsewhere.

    The message names files; `public` is the message for clients of a server.
    """

    public = "the server's data folder cannot be used; see the server log for the reason"


class DiskFull(StorageError):
    """The disk is full. No written data is lost."""

    public = "the server's disk is full: free some space and try again; no data was lost"


class LedgerLost(StorageError):
    """A job has results, but its ledger is missing, or belongs to another job."""


class InUse(StorageError):
    """The file or folder is in use by another process."""

    public = "the server's data folder is in use by another cppbatch"


class ContextOverflow(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt longer than the context."""

    n_prompt_tokens: int
    n_ctx: int
    """Maximum tokens of a request, prompt and completion together."""
    advice: str = ""
    """How to enlarge the context of this engine; "": it is already the model's maximum."""
    is_pooled: bool = False
    """Whether the request is for a vector or score, so that the prompt must be computed in one step."""
    is_least: bool = False
    """Whether `n_prompt_tokens` is a lower bound: the prompt was too long to tokenise."""


class InvalidRequest(CppBatchError, ValueError):
    """A request is invalid; other requests are not affected.

    `field`: the invalid field, as the client named it ("temperature", "messages[2].role", ...).
    `overflow`: set if the request is refused because its prompt is longer than the context.
    """

    def __init__(self, field: str, message: str, overflow: ContextOverflow | None = None) -> None:
        self.field, self.message, self.overflow = shorten(field, _LONGEST_FIELD), shorten(message), overflow
        super().__init__(f"{self.field}: {self.message}")

    def with_field(self, field: str) -> InvalidRequest:
        """The same error with another field name."""
        return InvalidRequest(field, self.message, self.overflow)


def client_name(field: str, names: Mapping[str, str]) -> str:
    """The client's name for a field. `names`: {the start of a field, or with a dot a part of one: the client's}."""
    starts = {part: r"\b" if "." in part else "^" for part in sorted(names, reverse=True)}
    parts = (start + re.escape(part) + r"\b" * (part[-1] not in "].") for part, start in starts.items())
    return re.sub("|".join(parts), lambda found: names[found[0]], field) if names else field


@contextlib.contextmanager
def client_names(names: Mapping[str, str]) -> Iterator[None]:
    """A context that replaces the engine's field names in `InvalidRequest` by the client's (`client_name`)."""
    try:
        yield
    except InvalidRequest as error:
        if (field := client_name(error.field, names)) == error.field:
            raise
        raise error.with_field(field) from error


class RequestCancelled(CppBatchError):
    """A request was cancelled while it was being prepared."""


class NotFound(InvalidRequest):
    """The request names something that does not exist (404)."""


class Forbidden(InvalidRequest):
    """The request's API key does not allow it (403)."""


class Conflict(InvalidRequest):
    """The request conflicts with the current state (409)."""


class QueueFull(CppBatchError):
    """The queue is full (--max-queue). `retry_after`: estimated seconds until a waiting request ends."""

    def __init__(self, limit: int, retry_after: float) -> None:
        super().__init__(
            f"the queue is full: {limit} requests are waiting, the limit (max_queue, --max-queue); try again in "
            f"{retry_after:.0f} s"
        )
        self.retry_after = retry_after


class EngineClosed(CppBatchError):
    """The engine is closed, closing or failed, and accepts no new requests."""


class GenerationFailed(CppBatchError, RuntimeError):
    """The request failed after it was accepted."""


class LlamaError(CppBatchError):
    """A call into llama.cpp was refused or failed."""


class OutOfMemory(ModelError, LlamaError):
    """The memory of a device or of the host ran out while a model was loaded, a context was created, or in a step.

    The message has the sizes that llama.cpp logged, and the free memory of the devices afterwards.
    """


_RAN_OUT = re.compile(
    r"out[ _]?of[ _]?(?:device|host)?[ _]?memory|ALLOCATION_FAILURE|insufficient memory|MemoryError|bad_alloc|"
    r"(?:failed|unable) to (?:allocate|reserve)|not reserve space|malloc failed",
    re.IGNORECASE,
)


def says_out_of_memory(text: str) -> bool:
    """Whether a message of llama.cpp, a driver or the C++ library says that memory could not be allocated."""
    return _RAN_OUT.search(text) is not None


class OutOfRange(LlamaError, ValueError):
    """An argument is out of range, and would fail an assertion in llama.cpp."""


class CacheFull(LlamaError):
    """`llama_decode` found no free KV cells for the batch (return code 1). The memory is unchanged."""


class DecodeFailed(LlamaError):
    """`llama_decode` failed. Cells of the batch's sequences may be half-written: remove those sequences.

    `code` is its return code: 2 aborted, -1 invalid batch (memory unchanged), below -1 a fatal error.
    """

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(f"llama_decode returned {code}: {detail}")
        self.code = code
