"""The messages between an engine client and its worker; between processes, in MessagePack."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from cppbatch.config import EngineConfig
from cppbatch.engine.disk.slots import SlotActionName, SlotReport
from cppbatch.engine.model_info import ModelInfo
from cppbatch.engine.observe.live_state import LiveEngine
from cppbatch.engine.observe.metrics import EngineStats
from cppbatch.engine.params import SamplingParams
from cppbatch.engine.request import GenerationEvent, GenerationRequest, MediaPrompt, ResumeState, TokenPiece
from cppbatch.errors import ContextOverflow, InvalidRequest

Keys = tuple[str, str, str, str]
"""CURVE keys: the server's public and secret key, then the worker's."""


LAST_WORDS = "last_words"
"""The file in a worker's folder with llama.cpp's abort message."""


class WorkerSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Sent to a worker's standard input, as one line of JSON."""

    config: EngineConfig
    folder: str
    """The folder of its sockets and its `SharedStatus`; removed when the worker ends."""
    endpoint: str
    """Where the worker sends its messages."""
    keys: tuple[str, str, str] | None = None
    """CURVE keys if the link is TCP: the server's public key, the worker's public and secret key."""
    log_level: int
    runtime: str | None = None
    """For tests: `module:function` that creates the engine's `Runtime` from its config."""


# --- to the worker ----------------------------------------------------------------------------------------------------


if TYPE_CHECKING:
    ValidRequest = GenerationRequest
else:

    class _ValidParams(SamplingParams, frozen=True, kw_only=True):
        stop: tuple[str, ...] = ()
        stop_token_ids: tuple[int, ...] = ()
        suppress_tokens: tuple[int, ...] = ()
        visible_tokens: tuple[str, ...] = ()
        dry_sequence_breakers: tuple[str, ...] = ()
        samplers: tuple[str, ...] = ()
        guided_choice: tuple[str, ...] | None = None

        def __post_init__(self) -> None:
            """Checks nothing."""

    class ValidRequest(GenerationRequest, frozen=True, kw_only=True):
        """A request as decoded: its sender has validated it, and made tuples of lists."""

        params: _ValidParams

        def __post_init__(self) -> None:
            """Checks nothing."""


class _WithRequest(msgspec.Struct, frozen=True):
    request: ValidRequest

    @property
    def id(self) -> str:
        """The id of the request, in all its messages and events: a decimal number (`InFlightRequest.id`)."""
        return self.request.id


class Submit(_WithRequest, frozen=True, tag=True):
    """Run this request, or continue it where an earlier worker stopped."""

    resume: ResumeState


class Check(_WithRequest, frozen=True, tag=True):
    """Check whether this request can run; the answer is `Checked` or `Refused`."""


class Tokenize(msgspec.Struct, frozen=True, tag=True):
    """Tokenise a prompt, or look up token ids; the answer is `Tokenized` or `Refused`."""

    id: str
    text: str | list[int] | MediaPrompt
    add_special: bool
    parse_special: bool


class SlotAction(msgspec.Struct, frozen=True, tag=True):
    """Save a slot's prefix to a file, restore it from there, or erase it; the answer is `SlotDone` or `Refused`."""

    id: str
    action: SlotActionName
    slot: int
    path: str
    """The path of the file; empty for erase."""


class Update(msgspec.Struct, frozen=True, tag=True):
    """Append tokens to the text of a request; the answer is `Updated` or `Refused`."""

    id: str
    request_id: str
    tokens: list[int]


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Cancel a request or a question."""

    id: str


class GetStats(msgspec.Struct, frozen=True, tag=True):
    """The answer is `Stats`."""


class GetLive(msgspec.Struct, frozen=True, tag=True):
    """The answer is `Live`."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Close the engine and end. Unfinished requests get no answer."""


class LimitThreads(msgspec.Struct, frozen=True, tag=True):
    """Use at most this many compute threads, from the next step on."""

    n: int


Question = Check | Tokenize | SlotAction
ToWorker = Submit | Question | Update | Cancel | GetStats | GetLive | LimitThreads | Stop

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
    """The events of one step."""

    events: list[GenerationEvent]


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The request is invalid: the fields of `InvalidRequest`."""

    id: str
    field: str
    message: str
    overflow: ContextOverflow | None = None

    @property
    def error(self) -> InvalidRequest:
        """The error that `refusal` has got."""
        return InvalidRequest(self.field, self.message, self.overflow)


class Checked(msgspec.Struct, frozen=True, tag=True):
    """The request is valid."""

    id: str


class Tokenized(msgspec.Struct, frozen=True, tag=True):
    """The tokens of a text, in order."""

    id: str
    ids: list[int]
    pieces: list[TokenPiece]
    """Each distinct token once."""


class SlotDone(msgspec.Struct, frozen=True, tag=True):
    """A slot was saved, restored or erased."""

    id: str
    report: SlotReport


class Updated(msgspec.Struct, frozen=True, tag=True):
    """Whether the tokens were appended; False: the request is neither waiting nor running."""

    id: str
    found: bool


class Stats(msgspec.Struct, frozen=True, tag=True):
    """Counters and state."""

    stats: EngineStats


class Live(msgspec.Struct, frozen=True, tag=True):
    """The engine's live state."""

    engine: LiveEngine


class Log(msgspec.Struct, frozen=True, tag=True):
    """A log record."""

    level: int
    name: str
    message: str


Answer = Checked | Tokenized | SlotDone | Updated
FromWorker = Hello | Loading | Loaded | LoadFailed | Events | Refused | Answer | Stats | Live | Log


def refusal(request_id: str, error: InvalidRequest) -> Refused:
    """The message for a refused request or question."""
    return Refused(request_id, error.field, error.message, error.overflow)


encode = msgspec.msgpack.Encoder().encode
_for_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
decode_for_worker, decode_from_worker = _for_worker.decode, _from_worker.decode
