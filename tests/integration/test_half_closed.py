"""A client that closes only its sending side gets its answers; one that is gone keeps nothing running.

TCP signals the same to the server in both cases: no more data will come.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from cppbatch import GenerationEvent, GenerationRequest, LocalEngine
from cppbatch.server.address import tls_context
from cppbatch.server.api.batches.handler import URLS
from cppbatch.server.app import create_app
from cppbatch.server.listener import Listener
from cppbatch.server.storage import open_storage
from tests.integration.test_connections import certificate
from tests.support.fixtures import engine_of
from tests.support.listening import HeldEngine, connect, ended, head, listening, post_bytes, until

HEALTH = head("GET", "/health")
SHORT: dict[str, Any] = {"prompt": "Hello", "max_tokens": 2}
LONG: dict[str, Any] = {"prompt": "Hello", "max_tokens": 3000, "ignore_eos": True, "cache_prompt": False}
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
SOON = 15  # seconds until the cells of a client that is gone are free: 0.3, and many for a busy machine

engine = engine_of(HeldEngine, n_ctx=4096, prefix_cache=False)


class HeldStreams(LocalEngine):
    """Accepts requests, so that streams start, and holds their tokens until `go_on` is set, as a long prompt does."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.go_on, self.n_held = asyncio.Event(), 0

    async def submit(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        async with contextlib.aclosing(super().submit(request)) as events:
            self.n_held += 1
            try:
                async for event in events:
                    yield event
                    if event.is_acceptance:
                        await self.go_on.wait()
            finally:
                self.n_held -= 1


streams = engine_of(HeldStreams, n_ctx=4096, prefix_cache=False)


async def answered(listener: Listener, data: bytes, go_on: tuple[HeldEngine, float] | None = None) -> bytes:
    """All data received by a client that sends this and closes its sending side; the engine resumes after seconds."""
    reader, writer = await connect(listener)
    writer.write(data)
    writer.write_eof()
    if go_on:
        await asyncio.sleep(go_on[1])
        go_on[0].go_on.set()
    came = await ended(reader)
    writer.close()
    return came


async def test_it_gets_only_the_immediate_answer(engine: HeldEngine) -> None:
    async with listening(create_app(engine)) as listener:
        for version in (b"1.1", b"1.0"):
            came = await answered(listener, HEALTH.replace(b"1.1", version))
            assert came.startswith(b"HTTP/" + version + b" 200 ")
            assert came.endswith(b'"progress":1.0}')


async def test_it_gets_a_completion_that_takes_long(engine: HeldEngine) -> None:
    async with listening(create_app(engine)) as listener:
        came = await answered(listener, post_bytes("/v1/completions", SHORT), (engine, 1))
        interim, _, answer = came.rpartition(CONTINUE)
        assert interim.replace(CONTINUE, b"") == b""
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 2


async def test_it_gets_a_whole_stream(engine: HeldEngine) -> None:
    async with listening(create_app(engine)) as listener:
        body = {**LONG, "max_tokens": 300, "stream": True}
        came = (await answered(listener, post_bytes("/v1/completions", body), (engine, 0.2))).removeprefix(CONTINUE)
        assert came.startswith(b"HTTP/1.1 200 ")
        assert CONTINUE not in came
        assert came.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_it_gets_a_whole_stream_whose_first_token_takes_long(streams: HeldStreams) -> None:
    """The server probes it with leading zeros of the size of a chunk."""
    async with listening(create_app(streams)) as listener:
        reader, writer = await connect(listener)
        writer.write(post_bytes("/v1/completions", {**SHORT, "stream": True}))
        writer.write_eof()
        await asyncio.sleep(1)
        streams.go_on.set()
        chunks = (await ended(reader)).partition(b"\r\n\r\n")[2]
        assert chunks.startswith(b"00")
        text = b""
        while chunks:
            size, _, rest = chunks.partition(b"\r\n")
            text, chunks = text + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
        assert text.endswith(b"data: [DONE]\n\n")
        writer.close()


async def test_it_gets_every_answer_to_requests_sent_at_once(engine: HeldEngine) -> None:
    async with listening(create_app(engine)) as listener:
        requests = HEALTH + post_bytes("/v1/completions", SHORT) + head("GET", "/nowhere") + HEALTH * 50
        came = await answered(listener, requests, (engine, 0))
        assert (came.count(b"HTTP/1.1 200 "), came.count(b"HTTP/1.1 404 ")) == (52, 1)


async def test_it_uploads_and_downloads(engine: HeldEngine, tmp_path: Path) -> None:
    async with listening(create_app(engine, storage=open_storage(tmp_path, URLS))) as listener:
        content = b"x" * (2 << 20)
        form = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        form += b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + content + b"\r\n--b--\r\n"
        kind = "Content-Type: multipart/form-data; boundary=b"
        came = await answered(listener, head("POST", "/v1/files", f"Content-Length: {len(form)}", kind) + form)
        stored = json.loads(came.replace(CONTINUE, b"").partition(b"\r\n\r\n")[2])
        assert stored["bytes"] == len(content)
        came = await answered(listener, head("GET", f"/v1/files/{stored['id']}/content"))
        assert came.partition(b"\r\n\r\n")[2] == content


async def test_a_request_with_a_truncated_body_is_dropped_at_once(engine: HeldEngine) -> None:
    async with listening(create_app(engine)) as listener:
        cut = post_bytes("/v1/completions", SHORT)[:-1]
        assert await answered(listener, cut) == b""
        came = await answered(listener, HEALTH + cut)
        assert came.count(b"HTTP/1.1") == came.count(b" 200 ") == 1
        assert engine.n_held == 0


async def test_a_connection_without_a_request_is_closed_at_once(engine: HeldEngine) -> None:
    async with listening(create_app(engine)) as listener:
        assert await answered(listener, b"") == b""
        assert await answered(listener, b"GET /he") == b""
        assert b" 400 " in await answered(listener, b"nonsense\r\n\r\n")


async def test_a_request_of_http_1_0_that_takes_long_is_given_up(engine: HeldEngine) -> None:
    """An HTTP/1.0 client takes no interim response, so it cannot be probed; usually it is gone, as with nginx."""
    async with listening(create_app(engine)) as listener:
        assert await answered(listener, post_bytes("/v1/completions", SHORT).replace(b"HTTP/1.1", b"HTTP/1.0")) == b""
        assert engine.n_held == 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("half_closed_before", [False, True])
async def test_a_disconnect_before_the_first_token_is_detected(
    engine: HeldEngine, stream: bool, half_closed_before: bool
) -> None:
    async with listening(create_app(engine)) as listener:
        _, writer = await connect(listener)
        writer.write(post_bytes("/v1/completions", {**SHORT, "stream": stream}))
        await until(lambda: engine.n_held == 1)
        if half_closed_before:
            writer.write_eof()
            await asyncio.sleep(0.2)
            assert engine.n_held == 1
        writer.close()
        await until(lambda: engine.n_held == 0, SOON)


@pytest.mark.parametrize("half_closed_before", [False, True])
async def test_a_disconnect_from_a_stream_before_its_first_token_is_detected(
    streams: HeldStreams, half_closed_before: bool
) -> None:
    async with listening(create_app(streams)) as listener:
        reader, writer = await connect(listener)
        writer.write(post_bytes("/v1/completions", {**SHORT, "stream": True}))
        await reader.readuntil(b"\r\n\r\n")
        if half_closed_before:
            writer.write_eof()
            await asyncio.sleep(0.2)
            assert streams.n_held == 1
        writer.close()
        await until(lambda: streams.n_held == 0, SOON)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_disconnect_while_tokens_are_generated_is_detected(engine: HeldEngine, stream: bool) -> None:
    engine.go_on.set()
    async with listening(create_app(engine)) as listener:
        for half_closed_before in (False, True):
            reader, writer = await connect(listener)
            writer.write(post_bytes("/v1/completions", {**LONG, "stream": stream}))
            if half_closed_before:
                writer.write_eof()
            await (reader.readuntil(b"data: ") if stream else until(lambda: engine._by_id))
            writer.close()
            before = (await engine.stats()).generated_tokens
            await until(lambda: not engine._by_id)
            stats = await engine.stats()
            assert (stats.running, stats.waiting, stats.kv_cells_used) == (0, 0, 0)
            assert stats.generated_tokens - before < LONG["max_tokens"]  # it did not run to its end


async def test_a_disconnect_behind_a_proxy_that_passes_on_only_the_end_is_detected(engine: HeldEngine) -> None:
    """The proxy detects that its client is gone when it sends data to it, and so does the server with the proxy."""
    async with listening(create_app(engine)) as listener:

        async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            answers, requests = await connect(listener)

            async def back() -> None:
                while data := await answers.read(65536):
                    writer.write(data)
                    await writer.drain()

            answering = asyncio.create_task(back())
            while data := await reader.read(65536):
                requests.write(data)
            requests.write_eof()
            await asyncio.wait([answering])
            answering.exception()
            requests.close()

        async with await asyncio.start_server(pass_on, "127.0.0.1", 0) as proxy:
            _, writer = await asyncio.open_connection(*proxy.sockets[0].getsockname())
            writer.write(post_bytes("/v1/completions", SHORT))
            await until(lambda: engine.n_held == 1)
            writer.close()
            await until(lambda: engine.n_held == 0, 2 * SOON)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_over_tls_the_end_of_its_client_ends_a_request(engine: HeldEngine, tmp_path: Path, stream: bool) -> None:
    """asyncio closes both directions of TLS together."""
    cert, key = certificate(tmp_path, "server")
    trusting = ssl.create_default_context(cafile=str(cert))
    async with listening(create_app(engine), tls=tls_context(str(cert), str(key))) as listener:
        _, writer = await connect(listener, ssl=trusting)
        writer.write(post_bytes("/v1/completions", {**SHORT, "stream": stream}))
        await until(lambda: engine.n_held == 1)
        writer.close()
        await until(lambda: engine.n_held == 0, SOON)


async def test_an_engine_is_idle_after_many_such_clients(tiny_llama: Path) -> None:
    """40 clients at once: half of them read to the end, half are gone."""
    async with (
        LocalEngine(tiny_llama, n_ctx=4096, n_parallel=8, n_threads=1) as engine,
        listening(create_app(engine)) as listener,
    ):
        gone = [await connect(listener) for _ in range(20)]
        for i, (_, writer) in enumerate(gone):
            writer.write(post_bytes("/v1/completions", {**LONG, "stream": i % 2 == 0}))
        reading = [asyncio.create_task(answered(listener, post_bytes("/v1/completions", SHORT))) for _ in range(20)]
        for _, writer in gone:
            writer.close()
        assert all(b"HTTP/1.1 200 " in came for came in await asyncio.gather(*reading))
        await until(lambda: not engine._by_id)
        stats = await engine.stats()
        assert (stats.running, stats.waiting, stats.kv_cells_used) == (0, 0, 0)
        assert stats.generated_tokens < len(gone) * LONG["max_tokens"]
