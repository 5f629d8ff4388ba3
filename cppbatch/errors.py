"""All exceptions of cppbatch. A message says what was wrong, with the value, and what to do."""

from __future__ import annotations

import msgspec


class CppBatchError(Exception):
    """Base class of all errors below."""


class LibraryError(CppBatchError):
    """llama-cpp-python is missing, has another version than the pinned one, or does not work on this CPU."""


class ModelError(CppBatchError):
    """A model file is missing or broken, or the model cannot do what was asked."""


class ConfigError(CppBatchError):
    """A setting of the engine or the server is out of range, or two settings contradict each other."""


class InputChanged(ConfigError):
    """The input file of a batch is not as it was uploaded."""


class LoadInterrupted(ModelError):
    """The process that was loading a model was killed from outside. The model is not to blame."""


class DoesNotFit(CppBatchError):
    """A model does not fit into memory beside those that are loaded.

    `never`: nor would it if every model that may leave had left.
    """

    def __init__(self, message: str, *, never: bool = False) -> None:
        super().__init__(message)
        self.never = never


class ModelNotLoaded(CppBatchError):
    """The request is for a model that is not loaded, and must not load it (--no-models-autoload)."""


class ModelLoadFailed(CppBatchError):
    """A model could not be loaded. `retry_after`: seconds after which a request tries it again."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RpcUnreachable(CppBatchError):
    """No RPC worker answers at an address now (--rpc)."""


class EstimateFailed(CppBatchError):
    """The memory of an engine cannot be estimated. The model may load nevertheless."""


class UnusableServer(CppBatchError):
    """The server to measure does not answer, or cannot be measured."""


class StorageError(CppBatchError):
    """The files of jobs cannot be used: the disk is full, or a file is broken, read-only, or in use elsewhere.

    The message names files; `public` is the message for clients of a server.
    """

    public = "the server's data folder cannot be used; see the server log for the reason"


class DiskFull(StorageError):
    """The disk is full. Nothing that was written is lost."""

    public = "the server's disk is full: free some space and try again; no data was lost"


class LedgerLost(StorageError):
    """There are results of a job, but its ledger is missing, or belongs to another job."""


class InUse(StorageError):
    """Another process uses the file or folder."""

    public = "the server's data folder is in use by another cppbatch"


class ContextOverflow(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt that is longer than the context."""

    n_prompt_tokens: int
    n_ctx: int
    """Tokens that one request may have, prompt and completion together."""
    advice: str = ""
    """How the context of this engine can be made longer; "": it is as long as the model allows."""
    is_pooled: bool = False
    """Whether the prompt was to become a vector or a score, and so must be computed whole."""
    is_least: bool = False
    """Whether the prompt has `n_prompt_tokens` or more: it was too long to be tokenised."""


class InvalidRequest(CppBatchError, ValueError):
    """One request is wrong; other requests are not affected.

    `field`: the request's field at fault, as the user wrote it ("temperature", "messages[2].role", ...).
    `overflow`: set if the request is refused because its prompt is longer than the context.
    """

    def __init__(self, field: str, message: str, overflow: ContextOverflow | None = None) -> None:
        super().__init__(f"{field}: {message}")
        self.field, self.message, self.overflow = field, message, overflow

    def renamed(self, field: str) -> InvalidRequest:
        """The same error under another name of the field."""
        return InvalidRequest(field, self.message, self.overflow)


class RequestCancelled(CppBatchError):
    """A request was cancelled while it was being prepared."""


class NotFound(InvalidRequest):
    """The request names something that does not exist (404)."""


class Forbidden(InvalidRequest):
    """The API key of the request does not allow it (403)."""


class Conflict(InvalidRequest):
    """The request conflicts with the current state (409)."""


class QueueFull(CppBatchError):
    """The queue is full (--max-queue). `retry_after`: seconds until one of the waiting requests has probably ended."""

    def __init__(self, limit: int, retry_after: float) -> None:
        super().__init__(
            f"the queue is full: {limit} requests are waiting, the limit (max_queue, --max-queue); try again in "
            f"{retry_after:.0f} s"
        )
        self.retry_after = retry_after


class EngineClosed(CppBatchError):
    """The engine is closed, has failed, or is closing, and takes no new requests."""


class GenerationFailed(CppBatchError, RuntimeError):
    """The request failed after it was accepted."""


class LlamaError(CppBatchError):
    """A call into llama.cpp was refused or failed."""


class OutOfRange(LlamaError, ValueError):
    """An argument is out of range, and would have hit an assertion in llama.cpp."""


class CacheFull(LlamaError):
    """`llama_decode` found no free KV cells for the batch (return code 1). The memory is unchanged."""


class DecodeFailed(LlamaError):
    """`llama_decode` failed. Cells of the batch's sequences may be half-written: remove those sequences.

    `code` is its return code: 2 aborted, -1 invalid batch (memory unchanged), below -1 a fatal error.
    """

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(f"llama_decode returned {code}: {detail}")
        self.code = code
