"""The requests of all fronts in one engine: what a replica does, apart from Ray."""

from __future__ import annotations

import contextlib
import logging
import platform
from collections.abc import AsyncGenerator

from cppbatch.cluster.engine_process import EngineProcess
from cppbatch.cluster.prefix_router import Prefix
from cppbatch.cluster.worker_link import Check, Checked, Refused, SlotDone, Tokenize, Tokenized
from cppbatch.errors import CppBatchError, EngineClosed, InvalidRequest, QueueFull
from cppbatch.ray.ray_messages import (
    Answer,
    NotRun,
    ReplicaReport,
    Submission,
    decode_question,
    decode_submission,
    encode,
)
from cppbatch.ray.stream_group import StreamGroup

log = logging.getLogger("cppbatch.ray")

_MAX_IDLE_GROUPS = 256  # of fronts that have ended, or have lost the group


class ReplicaEngine:
    """Runs the requests of all fronts in one engine. Its methods take and return MessagePack (`ray_messages`): Ray
    would pickle objects."""

    def __init__(self, engine: EngineProcess, name: str) -> None:
        self._engine = engine
        self._name = name
        self._groups: dict[tuple[str, int], StreamGroup] = {}  # by front and epoch, the last used one last

    async def run(self, prefixes: list[Prefix], message: bytes) -> AsyncGenerator[bytes, None]:
        """Runs a `Submission`. Yields a `StreamOpened`, then the messages of its stream group while it carries them.

        `prefixes` are for the request router (`PrefixRequestRouter`).
        """
        submission = decode_submission(message)
        group = self._group(submission.front, submission.epoch)
        async with contextlib.aclosing(group.stream(lambda: self._run(submission, group))) as messages:
            async for data in messages:
                yield data

    def _group(self, front: str, epoch: int) -> StreamGroup:
        key = front, epoch
        group = self._groups.pop(key, None) or StreamGroup(self._name, f"{front}.{epoch}")
        self._groups[key] = group
        for idle in [key for key, other in self._groups.items() if other.is_idle][:-_MAX_IDLE_GROUPS]:
            del self._groups[idle]
        return group

    @property
    def fronts(self) -> set[str]:
        """The fronts that have a stream open."""
        return {front for (front, _), group in self._groups.items() if not group.is_idle}

    def drop_front(self, front: str) -> None:
        """Ends the requests of a front that does not answer any more."""
        for key in [key for key in self._groups if key[0] == front]:
            self._groups.pop(key).close(f"the front {front} has not renewed its lease")

    async def _run(self, submission: Submission, group: StreamGroup) -> None:
        request = submission.request
        try:
            with self._engine.open(request, submission.resume) as outputs:
                while not outputs.finished:
                    group.put(await outputs.get())
        except InvalidRequest as error:
            group.put(Refused(request.id, error.field, error.message, error.overflow))
        except (EngineClosed, QueueFull) as error:
            group.put(NotRun(request.id, str(error)))
        except Exception as error:
            log.exception("failed to run a request")
            group.put(NotRun(request.id, f"{type(error).__name__}: {error}"))

    async def cancel(self, request_ids: list[str]) -> str:
        """Ends requests within a step; unknown ids are ignored. Returns the replica's name."""
        for request_id in request_ids:
            await self._engine.cancel(request_id)
        return self._name

    async def ask(self, message: bytes) -> bytes:
        """Answers a `Check`, `Tokenize` or `SlotAction` with `Checked`, `Tokenized` or `SlotDone`; or `Refused`."""
        question = decode_question(message)
        answer: Answer
        try:
            if isinstance(question, Check):
                await self._engine.check(question.request)
                answer = Checked(question.id)
            elif isinstance(question, Tokenize):
                pieces = await self._engine.tokenize(
                    question.text, add_special=question.add_special, parse_special=question.parse_special
                )
                distinct = list({piece.id: piece for piece in pieces}.values())
                answer = Tokenized(question.id, [piece.id for piece in pieces], distinct)
            else:
                answer = SlotDone(
                    question.id, await self._engine.slot_action(question.action, question.slot, question.path)
                )
        except InvalidRequest as error:
            answer = Refused(question.id, error.field, error.message, error.overflow)
        return encode(answer)

    async def report(self) -> bytes:
        """A `ReplicaReport`."""
        workers = await self._engine.workers()
        return encode(ReplicaReport(replica=self._name, node=platform.node(), info=self._engine.info, workers=workers))

    async def live(self) -> bytes:
        """The `WorkerLive` of its worker, in a list."""
        return encode(await self._engine.live())

    async def check_health(self) -> None:
        """Called by Serve. Raises `CppBatchError` if the engine has failed: Serve then replaces the replica."""
        health = self._engine.health()
        if health.status in ("failed", "closed"):
            raise CppBatchError(f"the engine has {health.status}: {health.error}")
