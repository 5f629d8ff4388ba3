"""Workers without a process, in a real `EngineProcess`: each step, started by a test, makes a token of each."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import msgspec
import pytest

from cppbatch.cluster.engines import supervisor
from cppbatch.cluster.link import (
    Cancel,
    Check,
    Checked,
    Events,
    FromWorker,
    GetLive,
    GetStats,
    LimitThreads,
    Live,
    Loaded,
    LoadFailed,
    Refused,
    SlotAction,
    SlotDone,
    Stats,
    Submit,
    Tokenize,
    Tokenized,
    ToWorker,
    encode,
    refusal,
)
from cppbatch.cluster.worker.handle import WorkerDied
from cppbatch.config import EngineConfig
from cppbatch.engine.disk.slots import SlotReport
from cppbatch.engine.request import FinishReason, GenerationEvent, TokenPiece
from cppbatch.errors import InvalidRequest
from cppbatch.retries import Pauses
from tests.support.fakes import fake_engine, greedy


def text_of(prompt: object, n_tokens: int) -> str:
    """What every fake worker answers to a prompt."""
    return "".join(f"{prompt}:{i} " for i in range(n_tokens))


def letters(question: Tokenize) -> Tokenized:
    """Each letter is a token, whose id is its code."""
    ids = [ord(letter) for letter in question.text] if isinstance(question.text, str) else question.text
    assert isinstance(ids, list)
    return Tokenized(question.id, ids, [TokenPiece(each, chr(each).encode()) for each in sorted(set(ids))])


def erase(question: SlotAction, slots: set[int]) -> SlotDone | Refused:
    """Erases one of the slots that requests have named; has nothing to save."""
    if question.action != "erase":
        return refusal(question.id, InvalidRequest("id_slot", "has no prefix"))
    return SlotDone(question.id, SlotReport(n_tokens=3 * (question.slot in slots)))


class FakeWorker:
    """Takes the place of `WorkerHandle`. Computes `n_parallel` requests at once, of the best rank first."""

    started: list[FakeWorker]
    can_load = True

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.sequences: dict[str, Submit] = {}
        self.n_tokens: dict[str, int] = {}
        self.slots: set[int] = set()
        self.died = self.stopped = self.ended = self.was_killed = False
        self.is_listened_to = False
        """Whether it is ready for requests."""
        self.cut_off = 0
        """Unfinished requests that it had when it was ended without having died."""
        self.threads = config.n_threads
        self.n_live = 0
        """How often its live state was requested."""
        self.answers_live = True
        """False: as in a long step."""
        self.pid = len(self.started)
        self._messages: asyncio.Queue[FromWorker] = asyncio.Queue()
        self._death = asyncio.Event()

    @classmethod
    async def start(cls, config: EngineConfig, runtime: str | None) -> FakeWorker:
        worker = cls(config)
        cls.started.append(worker)
        with fake_engine() as engine:
            loaded = Loaded(engine.info, engine.stats())
        worker._messages.put_nowait(loaded if cls.can_load else LoadFailed("LlamaError", "out of memory"))
        return worker

    def send(self, message: ToWorker) -> None:
        encode(message)  # raises as the real one
        if isinstance(message, (Submit, Check)) and str(message.request.prompt).startswith("invalid"):
            self._messages.put_nowait(refusal(message.id, InvalidRequest("prompt", "is invalid")))
        elif isinstance(message, Submit):
            self.slots.add(message.request.id_slot)
            if message.request.report_acceptance:
                self._emit(message.id)
            self.sequences[message.id] = message
            self.n_tokens[message.id] = len(message.resume.tokens)
        elif isinstance(message, Cancel) and message.id in self.sequences:
            del self.sequences[message.id]
            self._emit(message.id, finish_reason=FinishReason.CANCELLED)
        elif isinstance(message, Check):
            self._messages.put_nowait(Checked(message.id))
        elif isinstance(message, Tokenize):
            self._messages.put_nowait(letters(message))
        elif isinstance(message, SlotAction):
            self._messages.put_nowait(erase(message, self.slots))
        elif isinstance(message, LimitThreads):
            self.threads = message.n
        elif isinstance(message, GetStats):
            self._messages.put_nowait(Stats(self._stats()))
        elif isinstance(message, GetLive):
            self.n_live += 1
            if self.answers_live:
                self.answer_live()

    def _stats(self) -> Any:
        with fake_engine() as engine:
            waiting = max(0, len(self.sequences) - self.config.n_parallel)
            return msgspec.structs.replace(engine.stats(), waiting=waiting, running=len(self.sequences) - waiting)

    def answer_live(self) -> None:
        """Reports what an engine with that many requests does."""
        with fake_engine(n_parallel=8) as engine:
            for _ in self.sequences:
                engine.add_request([1, 2, 3], greedy(20))
            engine.step()
            self._messages.put_nowait(Live(engine.live()))

    def step(self) -> None:
        """Every running request gets its next token."""
        by_rank = sorted(self.sequences.values(), key=lambda each: each.request.priority)
        for request_id in [each.id for each in by_rank[: self.config.n_parallel]]:
            request, i = self.sequences[request_id].request, self.n_tokens[request_id]
            self.n_tokens[request_id] += 1
            is_last = self.n_tokens[request_id] == request.params.max_tokens
            if is_last:
                del self.sequences[request_id]
            finish_reason = FinishReason.LENGTH if is_last else None
            self._emit(request_id, text=f"{request.prompt}:{i} ", tokens=[i], finish_reason=finish_reason)

    def _emit(self, request_id: str, **fields: Any) -> None:
        self._messages.put_nowait(Events([GenerationEvent(request_id=request_id, **fields)]))

    def die(self, how: WorkerDied | None = None) -> None:
        """As after `kill -9`, or as `how` says."""
        self.died = True
        self._how = how or WorkerDied("killed by SIGKILL", set(), external=True)
        self._death.set()

    def kill(self) -> None:
        self.was_killed = True
        self.die()

    async def receive(self) -> FromWorker:
        return await self._messages.get()

    async def while_alive(self, work: Coroutine[Any, Any, Any], timeout: float) -> Any:
        self.is_listened_to = self._messages.empty()  # its first message, that it has loaded, was read
        working, dying = asyncio.ensure_future(work), asyncio.ensure_future(self._death.wait())
        try:
            await asyncio.wait([working, dying], return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise self._how
        finally:
            for task in (working, dying):
                task.cancel()

    async def stop(self) -> bool:
        assert not self.sequences, "it has requests"
        self.stopped = True
        return True

    async def end(self) -> None:
        self.ended = True
        if not self.died:
            self.cut_off = len(self.sequences)


@pytest.fixture
def fake_workers(monkeypatch: pytest.MonkeyPatch) -> list[FakeWorker]:
    """All that were started. A supervisor starts the next one at once after a death."""
    FakeWorker.started = []
    monkeypatch.setattr(FakeWorker, "can_load", True)
    monkeypatch.setattr(supervisor, "WorkerHandle", FakeWorker)
    monkeypatch.setattr(supervisor, "_PAUSES", Pauses(0.0, 30.0))
    return FakeWorker.started
