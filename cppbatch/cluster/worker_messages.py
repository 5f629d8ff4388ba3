"""The messages between the server's process and a worker process, as MessagePack."""

from __future__ import annotations

import msgspec

from cppbatch.config import EngineConfig
from cppbatch.engine.metrics import EngineStats
from cppbatch.engine.model_info import ModelInfo
from cppbatch.engine.request import GenerationEvent, GenerationRequest, ResumeState, TokenPiece


class WorkerSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Sent to a worker's standard input, as one line of JSON."""

    config: EngineConfig
    folder: str
    """Contains its sockets and its `SharedStatus`; removed when the worker ends."""
    endpoint: str
    """Where the worker sends its messages."""
    keys: tuple[str, str, str] | None = None
    """CURVE keys where the link is TCP: the server's public key, the worker's public and secret key."""
    log_level: int
    runtime: str | None = None
    """For tests: `module:function` that makes the engine's `Runtime` from its config."""


# --- to the worker ----------------------------------------------------------------------------------------------------


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Run this request, or continue it where an earlier worker stopped."""

    number: int
    request: GenerationRequest
    resume: ResumeState


class Check(msgspec.Struct, frozen=True, tag=True):
    """Check whether this request could run; the answer is `Checked` or `Refused`."""

    number: int
    request: GenerationRequest


class Tokenize(msgspec.Struct, frozen=True, tag=True):
    """Tokenise a text, or look up token ids; the answer is `Tokenized` or `Refused`."""

    number: int
    text: str | list[int]
    add_special: bool
    parse_special: bool


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Cancel a request or a question."""

    number: int


class GetStats(msgspec.Struct, frozen=True, tag=True):
    """The answer is `Stats`."""


ToWorker = Submit | Check | Tokenize | Cancel | GetStats

# --- from the worker --------------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The endpoint where the worker receives messages."""

    endpoint: str


class Loading(msgspec.Struct, frozen=True, tag=True):
    """The progress of loading, 0.0 to 1.0."""

    progress: float


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The worker is ready for requests."""

    info: ModelInfo
    stats: EngineStats


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """Loading failed and the worker ends. `kind` is the name of an exception in `cppbatch.errors`."""

    kind: str
    message: str


class Events(msgspec.Struct, frozen=True, tag=True):
    """The events of one step; `request_id` is the request's number."""

    events: list[GenerationEvent]


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The request is invalid: the fields of `InvalidRequest`."""

    number: int
    field: str
    message: str


class Checked(msgspec.Struct, frozen=True, tag=True):
    """The request is valid."""

    number: int


class Tokenized(msgspec.Struct, frozen=True, tag=True):
    """The tokens of a text, in order."""

    number: int
    ids: list[int]
    pieces: list[TokenPiece]
    """Each distinct token once."""


class Stats(msgspec.Struct, frozen=True, tag=True):
    """Counters and state."""

    stats: EngineStats


class Log(msgspec.Struct, frozen=True, tag=True):
    """A log record."""

    level: int
    name: str
    message: str


FromWorker = Hello | Loading | Loaded | LoadFailed | Events | Refused | Checked | Tokenized | Stats | Log

encode = msgspec.msgpack.Encoder().encode
_for_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
decode_for_worker, decode_from_worker = _for_worker.decode, _from_worker.decode
