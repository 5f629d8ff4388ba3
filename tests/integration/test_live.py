"""`GET /live` over HTTP, with tiny models: what it shows, with which keys, and its cost without readers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import aiohttp
import jsonschema
import msgspec
import pytest

from cppbatch import LocalEngine
from cppbatch.cluster.engines.client import WorkerLive
from cppbatch.cluster.link import GetLive, ToWorker
from cppbatch.server import listener as listener_module
from cppbatch.server.api import live_endpoint
from cppbatch.server.api.batches.handler import URLS
from cppbatch.server.api.live_feed import LiveFeed
from cppbatch.server.app import create_app
from cppbatch.server.auth.key_file import read_keys
from cppbatch.server.auth.rules import Keys
from cppbatch.server.listener import Listener
from cppbatch.server.observe.live import LiveSnapshot
from cppbatch.server.settings import ServerSettings
from cppbatch.server.storage import open_storage
from tests.support.fixtures import engine_of
from tests.support.listening import connect, head, listening, until
from tests.unit.test_live_types import check_cells
from tests.unit.test_openapi import DOCUMENT

SOON = 30.0
INTERVAL_S = 0.05
SHARED = "The quick brown fox jumps over the lazy dog, and then the dog gets up again and looks for it. " * 3

KEYS = """
[[keys]]
key = "alice-key"
name = "alice"
priority = 3

[[keys]]
key = "bob-key"
name = "bob"
"""


class CountedEngine(LocalEngine):
    """Counts how often its state is requested, and how often its thread answers."""

    n_live = n_states = 0

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        send = self._thread.send

        def counted(message: ToWorker) -> None:
            self.n_states += isinstance(message, GetLive)
            send(message)

        self._thread.send = counted  # type: ignore[method-assign]

    async def live(self) -> list[WorkerLive]:
        self.n_live += 1
        return await super().live()


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_endpoint, "LiveFeed", partial(LiveFeed, interval=INTERVAL_S))


engine = engine_of(CountedEngine, n_ctx=16384, n_parallel=17, kv_layout="unified")


class Reader:
    """Reads `/live` in the background. `raw`: the data of all events as they came."""

    def __init__(self, session: aiohttp.ClientSession, url: str, key: str | None = None) -> None:
        self._session, self._url = session, url
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.raw: list[bytes] = []
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async with self._session.get(f"{self._url}/live", headers=self._headers) as response:
            assert response.status == 200
            assert response.headers["Content-Type"].startswith("text/event-stream")
            async for line in response.content:
                if line.startswith(b"data: "):
                    self.raw.append(line[6:])

    async def has(self, n: int) -> None:
        """Waits until it has that many events."""
        await until(lambda: len(self.raw) >= n)

    async def until(self, condition: Callable[[LiveSnapshot], object]) -> LiveSnapshot:
        """The first snapshot from now on for which this holds."""
        n = max(0, len(self.raw) - 1)
        end = monotonic() + SOON
        while monotonic() < end:
            new, n = self.raw[n:], len(self.raw)
            for raw in new:
                snapshot = msgspec.json.decode(raw, type=LiveSnapshot)
                if condition(snapshot):
                    return snapshot
            await asyncio.sleep(0.01)
        raise AssertionError(f"it did not happen; the last snapshot: {self.raw[-1:]!r}")


@contextlib.asynccontextmanager
async def serving(
    engine: LocalEngine, settings: ServerSettings | None = None, **limits: Any
) -> AsyncIterator[tuple[Listener, aiohttp.ClientSession]]:
    app = create_app(engine, settings)
    async with (
        listening(app, **limits) as listener,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), read_bufsize=1 << 20) as session,
    ):
        yield listener, session


def start(
    session: aiohttp.ClientSession, url: str, prompt: str, *, key: str | None = None, **fields: Any
) -> asyncio.Task[None]:
    """A completion that runs until its task is cancelled."""

    async def read() -> None:
        body = {"prompt": prompt, "max_tokens": 2000, "ignore_eos": True, "stream": True, **fields}
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            async for _ in response.content:
                pass

    return asyncio.create_task(read())


async def end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def n_decoding(snapshot: LiveSnapshot) -> int:
    engines = [worker.engine for worker in snapshot.workers if worker.engine]
    return sum(row.state == "decode" for engine in engines for row in engine.rows)


async def test_16_rows_share_their_prompt_and_the_snapshot_is_as_the_document_says(engine: CountedEngine) -> None:
    async with serving(engine) as (listener, session):
        reader = Reader(session, listener.url)
        idle = await reader.until(lambda snapshot: snapshot.workers)
        assert (idle.model, idle.health.status, idle.tokens_per_second) == (engine.info.name, "ok", 0.0)
        tasks = [start(session, listener.url, f"{SHARED}{i}") for i in range(16)]
        busy = await reader.until(lambda snapshot: n_decoding(snapshot) == 16 and snapshot.tokens_per_second)
        (worker,) = busy.workers
        assert worker.engine is not None
        assert worker.interval is not None
        check_cells(worker.engine.cells)
        shared = max(worker.engine.cells.segments, key=lambda segment: len(segment.sequences))
        assert len(shared.sequences) == 16
        assert shared.tokens > 50
        assert worker.in_flight == 16
        assert worker.interval.batch_size > 1
        assert worker.interval.phases["decode"] > 0
        later = await reader.until(
            lambda snapshot: snapshot.first_token_seconds.n == 16 and snapshot.inter_token_seconds.n
        )
        assert later.inter_token_seconds.p50 is not None
        schema = {**DOCUMENT["components"]["schemas"]["LiveSnapshot"], "components": DOCUMENT["components"]}
        jsonschema.validate(msgspec.json.decode(reader.raw[-1]), schema)
        await end(tasks)
        rested = await reader.until(lambda snapshot: not (snapshot.workers[0].in_flight or snapshot.tokens_per_second))
        assert rested.workers[0].engine is not None
        assert rested.workers[0].engine.rows == []
        assert rested.workers[0].engine.cells.used == 0
        await end([reader.task])


async def test_readers_share_snapshots_and_without_a_reader_nothing_is_computed(engine: CountedEngine) -> None:
    async with serving(engine) as (listener, session):
        tasks = [start(session, listener.url, f"{SHARED}{i}") for i in range(16)]
        await asyncio.sleep(0.2)
        assert (engine.n_live, engine.n_states) == (0, 0)
        began = monotonic()
        readers = [Reader(session, listener.url) for _ in range(20)]
        for reader in readers:
            await reader.has(10)
        most = (monotonic() - began) / INTERVAL_S + 2
        assert 10 <= engine.n_states <= engine.n_live <= most
        assert len(set.intersection(*(set(reader.raw) for reader in readers))) >= 5, "not the same events"
        await end([reader.task for reader in readers])
        await asyncio.sleep(0.1)
        n = engine.n_live
        await asyncio.sleep(0.2)
        assert engine.n_live == n
        await end(tasks)


async def test_an_idle_engine_is_queried_once_and_its_readers_get_one_event(engine: CountedEngine) -> None:
    async with serving(engine) as (listener, session):
        readers = [Reader(session, listener.url) for _ in range(2)]
        for reader in readers:
            await reader.has(1)
        await asyncio.sleep(0.4)
        assert [len(reader.raw) for reader in readers] == [1, 1]
        assert engine.n_states == 1
        assert engine.n_live >= 4
        await end([reader.task for reader in readers])


async def test_during_a_long_step_the_last_state_is_sent_with_its_age(
    engine: CountedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(engine) as (listener, session):
        reader = Reader(session, listener.url)
        tasks = [start(session, listener.url, SHARED)]
        await reader.until(lambda snapshot: n_decoding(snapshot) == 1)
        assert engine._engine
        context = engine._engine.runtime.context
        decode = context.decode

        def slow_decode(batch: Any) -> None:
            time.sleep(1.0)
            decode(batch)

        monkeypatch.setattr(context, "decode", slow_decode)
        old = await reader.until(lambda snapshot: (snapshot.workers[0].age or 0) > 0.6)
        assert n_decoding(old) == 1
        n = len(reader.raw)
        await asyncio.sleep(1.0)
        assert len(reader.raw) >= n + 3
        monkeypatch.undo()
        await end([*tasks, reader.task])


async def test_events_limits_the_stream_and_a_wrong_number_is_refused(engine: CountedEngine) -> None:
    async with serving(engine) as (listener, session):
        async with session.get(f"{listener.url}/live?events=1") as response:
            text = await asyncio.wait_for(response.text(), SOON)
        assert text.startswith("data: {")
        assert text.count("data: ") == 1
        for wrong in ("0", "-1", "x"):
            async with session.get(f"{listener.url}/live?events={wrong}") as response:
                assert response.status == 400
                assert "events" in await response.text()
        async with session.head(f"{listener.url}/live") as response:
            assert response.status == 405


async def test_shutdown_does_not_wait_for_open_pages_even_for_one_that_does_not_read(
    engine: CountedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener_module, "_SHUTDOWN_SECONDS", 2 * SOON)
    async with serving(engine) as (listener, session):
        tasks = [start(session, listener.url, f"{SHARED}{i}") for i in range(8)]
        readers = [Reader(session, listener.url) for _ in range(3)]
        _, stalled = await connect(listener, limit=1024)
        stalled.write(head("GET", "/live"))
        for reader in readers:
            await reader.has(4)
        await end(tasks)
        await asyncio.wait_for(listener.close(), SOON)
        await asyncio.wait_for(asyncio.gather(*(reader.task for reader in readers), return_exceptions=True), SOON)
        stalled.close()


async def test_a_stream_outlives_the_idle_timeout_and_gives_way_to_new_connections(engine: CountedEngine) -> None:
    async with serving(engine, most=2, idle_timeout=0.3) as (listener, _):
        live, streaming = await connect(listener)
        streaming.write(head("GET", "/live"))
        await asyncio.wait_for(live.readuntil(b"data: "), SOON)
        rest = asyncio.create_task(live.read())
        await asyncio.sleep(0.8)
        assert not rest.done()
        others = [await connect(listener) for _ in range(2)]
        for reader, writer in others:
            writer.write(head("GET", "/health"))
            assert b" 200 " in await asyncio.wait_for(reader.readline(), SOON)
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(rest, SOON)
        for _, writer in others:
            writer.close()
        streaming.close()


async def test_a_key_sees_neither_names_nor_priorities_nor_batches_of_others(
    engine: CountedEngine, tmp_path: Path
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    settings = ServerSettings(keys=Keys(read_keys(str(file))))
    app = create_app(engine, settings, open_storage(tmp_path / "data", URLS))
    async with listening(app) as listener, aiohttp.ClientSession(read_bufsize=1 << 20) as session:
        async with session.get(f"{listener.url}/live") as response:
            assert response.status == 401
        readers = {name: Reader(session, listener.url, f"{name}-key") for name in ("alice", "bob")}
        fields = {"key": "alice-key", "cache_salt": "SECRET-SALT", "user": "SECRET"}
        tasks = [start(session, listener.url, f"SECRET {SHARED}{i}", **fields) for i in range(3)]
        batch = await create_batch(session, listener.url, "alice-key")
        seen = await readers["alice"].until(lambda snapshot: snapshot.batches and n_decoding(snapshot) >= 3)
        assert [each.id for each in seen.batches] == [batch]
        other = await readers["bob"].until(lambda snapshot: n_decoding(snapshot) >= 3)
        for raw in readers["bob"].raw:
            for secret in (b"SECRET", b"alice", batch.encode()):
                assert secret not in raw
        for snapshot in (seen, other):
            shown = snapshot.workers[0].engine
            assert shown is not None
            assert {(row.priority, row.rank) for row in [*shown.rows, *shown.queue]} == {(None, None)}
        await end([*tasks, *(reader.task for reader in readers.values())])


async def create_batch(session: aiohttp.ClientSession, url: str, key: str) -> str:
    headers = {"Authorization": f"Bearer {key}"}
    body = {"prompt": "SECRET", "max_tokens": 900, "ignore_eos": True}
    lines = [
        msgspec.json.encode({"custom_id": f"SECRET-{i}", "method": "POST", "url": "/v1/completions", "body": body})
        for i in range(20)
    ]
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", b"\n".join(lines), filename="SECRET.jsonl")
    async with session.post(f"{url}/v1/files", data=form, headers=headers) as response:
        file_id = (await response.json())["id"]
    created = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    async with session.post(f"{url}/v1/batches", json=created, headers=headers) as response:
        assert response.status == 200, await response.text()
        return str((await response.json())["id"])
