"""Replicas without Ray, processes and models: the real `RayEngine` and `ReplicaEngine`, with a fake engine and a fake
network between them that loses, delays and breaks what a test says."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

from cppbatch.cluster.engines.client import Health, WorkerLive, WorkerState
from cppbatch.cluster.engines.output_collector import OutputCollector
from cppbatch.cluster.link import Answer, Check, Checked, Question, Refused, Tokenize
from cppbatch.cluster.prefix_router import Prefix
from cppbatch.config import EngineConfig
from cppbatch.engine.model_info import ModelInfo
from cppbatch.engine.request import FinishReason, GenerationEvent, GenerationRequest, ResumeState
from cppbatch.errors import EngineClosed, InvalidRequest
from cppbatch.ray.engine import RayEngine
from cppbatch.ray.replica.engine import ReplicaEngine
from cppbatch.ray.replica.set import ReplicaLost, ReplicaSetStatus
from tests.support.fake_workers import erase, letters


def text_of(request: GenerationRequest) -> str:
    """The text that the fake engine generates: it depends on the prompt and the position only."""
    return "".join(_piece(str(request.prompt), n) for n in range(request.params.max_tokens or 0))


def _piece(prompt: str, n: int) -> str:
    return f"{prompt}{n} "


def check(request: GenerationRequest) -> None:
    if str(request.prompt).startswith("invalid"):
        raise InvalidRequest("prompt", "is invalid")


class FakeEngine:
    """One token for each running request with each call of `step`."""

    def __init__(self) -> None:
        self.running: dict[str, tuple[GenerationRequest, int, OutputCollector]] = {}
        self.cancelled: list[str] = []
        self.slots: set[int] = set()
        self.failed: str | None = None
        self.n_live = 0
        self.info = ModelInfo(
            name="fake", path="", description="", size_bytes=0, n_params=0, n_vocab=256, n_ctx=0, kv_layout="unified",
            sampling="host", n_ctx_train=0, max_sequence=0, bos="", eos="", chat_template=None,
        )  # fmt: skip

    @contextlib.contextmanager
    def open(self, request: GenerationRequest, resume: ResumeState) -> Iterator[OutputCollector]:
        if self.failed:
            raise EngineClosed(self.failed)
        check(request)
        outputs = OutputCollector(request.id)
        if request.report_acceptance:
            outputs.put(GenerationEvent(request_id=request.id))
        self.slots.add(request.id_slot)
        self.running[request.id] = request, len(resume.tokens), outputs
        try:
            yield outputs
        finally:
            if self.running.pop(request.id, None):
                self.cancelled.append(request.id)

    def step(self) -> None:
        for request_id, (request, n, outputs) in list(self.running.items()):
            is_last = n + 1 == request.params.max_tokens
            outputs.put(
                GenerationEvent(
                    request_id=request_id,
                    text=_piece(str(request.prompt), n),
                    tokens=[n],
                    finish_reason=FinishReason.LENGTH if is_last else None,
                )
            )
            if is_last:
                del self.running[request_id]
            else:
                self.running[request_id] = request, n + 1, outputs

    async def cancel(self, request_id: str) -> None:
        if running := self.running.pop(request_id, None):
            self.cancelled.append(request_id)
            running[2].put(GenerationEvent(request_id=request_id, finish_reason=FinishReason.CANCELLED))

    async def ask(self, question: Question) -> Answer:
        if isinstance(question, Check):
            check(question.request)
            return Checked("")
        if isinstance(question, Tokenize):
            return letters(question)
        answer = erase(question, self.slots)
        if isinstance(answer, Refused):
            raise answer.error
        return answer

    async def live(self) -> list[WorkerLive]:
        self.n_live += 1
        return [
            WorkerLive(
                name="w",
                pid=1,
                device=None,
                health=Health(status="ok"),
                in_flight=len(self.running),
                restarts=0,
                draining=False,
                age=None,
                engine=None,
            )
        ]

    async def workers(self) -> list[WorkerState]:
        return [WorkerState(name="w", health=Health(status="ok"), in_flight=len(self.running))]


class FakeReplica:
    """A replica that can be killed, with streams that can be broken or delayed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.engine = FakeEngine()
        engine: Any = self.engine
        self.service = ReplicaEngine(engine, name)
        self.streams: list[_Stream] = []
        self.is_alive = True
        self.drains = False
        self.n_messages = 0

    def kill(self, *, unread: bool = True) -> None:
        """Ends the process. `unread`: messages that were sent but not received arrive nevertheless."""
        self.is_alive = False
        for stream in list(self.streams):
            stream.break_off(keep=unread)


class _Stream:
    """Reads a replica's generator at once, as Ray does, and hands its messages to the front."""

    def __init__(self, replica: FakeReplica, generator: AsyncGenerator[bytes, None]) -> None:
        self._replica = replica
        self._generator = generator
        self._queue: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self.go = asyncio.Event()  # clear: the messages are held up on the way
        self.go.set()
        self._reading = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        try:
            async for message in self._generator:
                self._replica.n_messages += 1
                self._queue.put_nowait(message)
        except EngineClosed as error:
            self._queue.put_nowait(ReplicaLost(str(error)))
        self._queue.put_nowait(None)

    def break_off(self, *, keep: bool) -> None:
        self._reading.cancel()
        while not keep and not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(ReplicaLost("killed"))
        self.go.set()

    async def messages(self) -> AsyncGenerator[bytes, None]:
        try:
            while True:
                await self.go.wait()
                message = await self._queue.get()
                await self.go.wait()
                if message is None:
                    return
                if isinstance(message, Exception):
                    raise message
                yield message
        finally:
            self._reading.cancel()
            self._replica.streams.remove(self)


class FakeReplicas:
    """A `ReplicaSet`. `choose` names the replica of the next request; by default the one with the fewest."""

    def __init__(self, n: int = 1) -> None:
        self._numbers = itertools.count()
        self.replicas: list[FakeReplica] = []
        self.state: ReplicaSetStatus | None = None
        self.status_error: Exception | None = None
        self.choose: Callable[[], FakeReplica] = lambda: min(self.taking, key=lambda r: len(r.streams))
        self.added = asyncio.Event()
        self.leases: Counter[str] = Counter()
        self.cancels: Counter[str] = Counter()
        for _ in range(n):
            self.add()

    def add(self) -> FakeReplica:
        """A replica that takes requests at once."""
        self.replicas.append(FakeReplica(f"replica{next(self._numbers)}"))
        self.added.set()
        return self.replicas[-1]

    @property
    def alive(self) -> list[FakeReplica]:
        return [replica for replica in self.replicas if replica.is_alive]

    @property
    def taking(self) -> list[FakeReplica]:
        return [replica for replica in self.alive if not replica.drains]

    async def run(self, prefixes: list[Prefix], message: bytes) -> AsyncGenerator[bytes, None]:
        replica = await self._replica()
        stream = _Stream(replica, replica.service.run(prefixes, message))
        replica.streams.append(stream)
        async with contextlib.aclosing(stream.messages()) as messages:
            async for data in messages:
                yield data

    async def _replica(self) -> FakeReplica:
        while not self.taking:
            self.added.clear()
            await self.added.wait()
        return self.choose()

    async def ask(self, message: bytes) -> bytes:
        return await (await self._replica()).service.ask(message)

    async def cancel(self, request_ids: list[str]) -> set[str]:
        self.cancels.update(request_ids)
        return {await replica.service.cancel(request_ids) for replica in self.alive if not replica.drains}

    async def reports(self) -> list[bytes]:
        return [await replica.service.report() for replica in self.alive]

    async def live(self) -> list[bytes]:
        return [await replica.service.live() for replica in self.alive]

    async def status(self) -> ReplicaSetStatus:
        if self.status_error:
            raise self.status_error
        n = len(self.alive)
        return self.state or ReplicaSetStatus(status="running" if n else "starting", n_running=n, n_wanted=n)

    async def renew_lease(self, front: str) -> None:
        self.leases[front] += 1

    async def close(self, front: str) -> None:
        del self.leases[front]

    def engine(self, **settings: Any) -> RayEngine:
        """A front over these replicas."""
        return RayEngine(EngineConfig(model_path="", **settings), self)

    async def step(self, n: int = 1) -> None:
        """`n` steps of all replicas. Their events have arrived when it returns."""
        for _ in range(n):
            for replica in self.alive:
                replica.engine.step()
            await settle()


async def settle() -> None:
    """Lets all tasks run until they wait."""
    for _ in range(20):
        await asyncio.sleep(0)
