"""What the server's process and a worker process say to each other, as MessagePack."""

from __future__ import annotations

import msgspec

from cppbatch.config import EngineConfig
from cppbatch.engine.metrics import EngineStats
from cppbatch.engine.model_info import ModelInfo
from cppbatch.engine.request import GenerationEvent, GenerationRequest, ResumeState, TokenPiece


class WorkerSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker gets on its standard input, as one line of JSON."""

    config: EngineConfig
    folder: str
    """For its sockets and its black box; gone when it ends."""
    endpoint: str
    """Where it sends its messages."""
    keys: tuple[str, str, str] | None = None
    """CURVE, where the link is not a file of ours: the server's public key, the worker's public and secret one."""
    log_level: int
    runtime: str | None = None
    """Tests: `module:function` that makes the engine's `Runtime` of its config."""


# --- to the worker ----------------------------------------------------------------------------------------------------


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Run this, from where an earlier worker left it."""

    number: int
    request: GenerationRequest
    progress: ResumeState


class Check(msgspec.Struct, frozen=True, tag=True):
    """Say whether this could run."""

    number: int
    request: GenerationRequest


class Tokenize(msgspec.Struct, frozen=True, tag=True):
    """Send `Tokenized`."""

    number: int
    text: str | list[int]
    add_special: bool
    parse_special: bool


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """End this."""

    number: int


class AskStats(msgspec.Struct, frozen=True, tag=True):
    """Send `Stats`."""


ToWorker = Submit | Check | Tokenize | Cancel | AskStats

# --- from the worker --------------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Where the worker gets its messages."""

    endpoint: str


class Loading(msgspec.Struct, frozen=True, tag=True):
    """How far, 0.0 to 1.0."""

    progress: float


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """Requests may come."""

    info: ModelInfo
    stats: EngineStats


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """The worker ends. `kind` is the name of an exception of `cppbatch.errors`."""

    kind: str
    message: str


class Events(msgspec.Struct, frozen=True, tag=True):
    """All that is new after a step; `request_id` is the request's number."""

    events: list[GenerationEvent]


class Refused(msgspec.Struct, frozen=True, tag=True):
    """This can never run."""

    number: int
    field: str
    message: str


class Checked(msgspec.Struct, frozen=True, tag=True):
    """This could run."""

    number: int


class Tokenized(msgspec.Struct, frozen=True, tag=True):
    """A text's tokens, or what these ids stand for."""

    number: int
    ids: list[int]
    pieces: list[TokenPiece]
    """Each token of them once."""


class Stats(msgspec.Struct, frozen=True, tag=True):
    """Counters and state."""

    stats: EngineStats


class Log(msgspec.Struct, frozen=True, tag=True):
    """A line for the log."""

    level: int
    name: str
    message: str


FromWorker = Hello | Loading | Loaded | LoadFailed | Events | Refused | Checked | Tokenized | Stats | Log

encode = msgspec.msgpack.Encoder().encode
_for_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
decode_for_worker, decode_from_worker = _for_worker.decode, _from_worker.decode
