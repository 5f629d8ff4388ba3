"""Messages between a front and its replicas: MessagePack in the calls and streams of a Serve handle.

A *front* is a process with a `RayEngine`: the server that clients connect to. The open streams of a replica for one
front are a *stream group*.
"""

from __future__ import annotations

import msgspec

from cppbatch.cluster.engines.client import WorkerLive, WorkerState
from cppbatch.cluster.link import Answer, Question, Refused, ValidRequest
from cppbatch.engine.model_info import ModelInfo
from cppbatch.engine.request import GenerationEvent, ResumeState


class Submission(msgspec.Struct, frozen=True):
    """Asks the replica to run this request, or to continue it where a lost replica stopped. `request.id` is unique
    among all fronts."""

    front: str
    epoch: int
    """Requests of the same front and epoch are in one stream group of a replica."""
    request: ValidRequest
    resume: ResumeState


class StreamOpened(msgspec.Struct, frozen=True, tag=True):
    """The first message of each stream: the replica runs the request."""

    replica: str
    group: str
    """The stream group of the numbered messages; unique among all replicas."""


class NotRun(msgspec.Struct, frozen=True):
    """The replica cannot run a request, but another one may."""

    request_id: str
    why: str


class GroupEvents(msgspec.Struct, frozen=True, tag=True):
    """The events of all requests of a stream group since its last message, usually those of one step."""

    number: int
    """The number of this message in the group, from 0."""
    events: list[GenerationEvent]
    not_valid: list[Refused] = []
    not_run: list[NotRun] = []


class ReplicaReport(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a replica."""

    replica: str
    node: str
    """The machine's name or address."""
    info: ModelInfo
    workers: list[WorkerState]


ToFront = StreamOpened | GroupEvents

encode = msgspec.msgpack.Encoder().encode
decode_submission = msgspec.msgpack.Decoder(Submission).decode
_to_front: msgspec.msgpack.Decoder[ToFront] = msgspec.msgpack.Decoder(ToFront)
_question: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
_answer: msgspec.msgpack.Decoder[Answer | Refused] = msgspec.msgpack.Decoder(Answer | Refused)
decode_to_front, decode_question, decode_answer = _to_front.decode, _question.decode, _answer.decode
decode_live = msgspec.msgpack.Decoder(list[WorkerLive]).decode
decode_report = msgspec.msgpack.Decoder(ReplicaReport).decode
