"""Every exception cppbatch raises on purpose. Messages are written for the person who reads them."""

from __future__ import annotations


class CppBatchError(Exception):
    """Base of all errors below: the message says what was wrong, with the value, and what to do."""


class LibraryError(CppBatchError):
    """llama-cpp-python is missing, of another version than the pinned one, or does not work on this CPU."""


class ModelError(CppBatchError):
    """A model file is missing, broken, or of a kind that cannot do what was asked."""


class ConfigError(CppBatchError):
    """A setting of the engine or the server is out of range, or two settings contradict each other."""


class EstimateFailed(CppBatchError):
    """What an engine would take of the memory cannot be found out. It may load all the same."""


class UnusableServer(CppBatchError):
    """A server that was to be measured is not there, or is not one that can be."""


class StorageError(CppBatchError):
    """What jobs are kept in cannot be used: the disk is full, a file is broken, read-only, or in use elsewhere.

    The message names files; `public` says as much as a server's clients are told.
    """

    public = "the server's data folder cannot be used; the server's log says why"


class DiskFull(StorageError):
    """There is no room for more. Nothing that was written is lost."""

    public = "the server's disk is full: free some space there and try again; nothing that was written is lost"


class InUse(StorageError):
    """Another process works with it."""

    public = "the server's data folder is in use by another cppbatch"


class InvalidRequest(CppBatchError, ValueError):
    """One request cannot be served as asked; nothing else is affected.

    `field` is the request's field at fault, as the user wrote it ("temperature", "messages[2].role", ...).
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field, self.message = field, message


class RequestCancelled(CppBatchError):
    """A request was cancelled while it was being prepared."""


class NotFound(InvalidRequest):
    """What a request names is not here."""


class Conflict(InvalidRequest):
    """What a request asks for does not go together with what is happening just now."""


class QueueFull(CppBatchError):
    """As many requests wait as may (--max-queue). `retry_after`: seconds until one of them has likely gone."""

    def __init__(self, limit: int, retry_after: float) -> None:
        super().__init__(
            f"{limit} requests wait already, the most there may be (--max-queue); try again in {retry_after:.0f} s"
        )
        self.retry_after = retry_after


class EngineClosed(CppBatchError):
    """The engine is closed, failed, or going down, and takes no new requests."""


class GenerationFailed(CppBatchError):
    """The engine could not finish a request, through no fault of the request's that it knew beforehand."""


class LlamaError(CppBatchError):
    """A call into llama.cpp was refused or failed."""


class OutOfRange(LlamaError, ValueError):
    """An argument was out of range and was stopped before it could reach an assertion in llama.cpp."""


class CacheFull(LlamaError):
    """`llama_decode` found no KV cells for the batch (return code 1). The memory is unchanged."""


class DecodeFailed(LlamaError):
    """`llama_decode` failed. Cells of the batch's sequences may be half-written: remove those sequences.

    `code` is its return code: 2 aborted, -1 invalid batch (memory unchanged), below -1 a fatal error.
    """

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(f"llama_decode returned {code}: {detail}")
        self.code = code
