"""What one request, and one client, may ask of the server."""

from __future__ import annotations

import asyncio
import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from cppbatch import LocalEngine
from cppbatch.server.app import create_app
from cppbatch.server.auth.rules import Keys
from cppbatch.server.http.limits import Limits
from cppbatch.server.settings import ServerSettings
from tests.support.fixtures import engine_of
from tests.support.http_client import Http, http_to, post
from tests.support.listening import HeldEngine, connect, ended, head, listening, post_bytes, until

PATHS = {
    "/v1/completions": {"prompt": "Hello", "ignore_eos": True},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}], "ignore_eos": True},
}

engine = engine_of(HeldEngine)


def limited(engine: LocalEngine, keys: Keys | None = None, **limits: Any) -> Http:
    return http_to(engine, ServerSettings(keys=keys or Keys(), limits=Limits(**limits)))


@pytest.mark.parametrize("path", PATHS)
async def test_a_larger_max_tokens_than_allowed_is_a_400_that_names_it(engine: HeldEngine, path: str) -> None:
    async with limited(engine, max_tokens=8) as http:
        status, answer = await post(http, path, {**PATHS[path], "max_tokens": 9})
        assert (status, answer["error"]["param"]) == (400, "max_tokens")
        assert "--max-tokens" in answer["error"]["message"]
        if "chat" in path:
            status, answer = await post(http, path, {**PATHS[path], "max_completion_tokens": 9})
            assert (status, answer["error"]["param"]) == (400, "max_completion_tokens")


@pytest.mark.parametrize(("given", "wrong"), [((9, 5), "max_tokens"), ((5, 9), "n_predict"), ((None, 9), "n_predict")])
async def test_of_two_names_for_the_maximum_the_one_over_the_limit_is_named(
    engine: HeldEngine, given: tuple[int | None, int], wrong: str
) -> None:
    async with limited(engine, max_tokens=8) as http:
        fields = dict(zip(("max_tokens", "n_predict"), given, strict=True))
        status, answer = await post(http, "/completion", {"prompt": "Hello", **fields})
        assert (status, answer["error"]["param"]) == (400, wrong)


@pytest.mark.parametrize("path", PATHS)
async def test_a_request_without_max_tokens_gets_the_allowed_maximum(engine: HeldEngine, path: str) -> None:
    engine.go_on.set()
    async with limited(engine, max_tokens=8) as http:
        for given, made in (({}, 8), ({"max_tokens": 8}, 8), ({"max_tokens": 3}, 3)):
            status, answer = await post(http, path, {**PATHS[path], **given})
            assert (status, answer["usage"]["completion_tokens"]) == (200, made)


async def test_a_minimum_above_the_allowed_maximum_is_a_400_that_names_it(engine: HeldEngine) -> None:
    async with limited(engine, max_tokens=8) as http:
        for path, body in PATHS.items():
            for given in ({}, {"max_tokens": -1}):
                status, answer = await post(http, path, {**body, **given, "min_tokens": 9})
                assert (status, answer["error"]["param"]) == (400, "min_tokens"), (path, given)


async def test_more_choices_than_allowed_are_a_400_that_names_the_field(engine: HeldEngine) -> None:
    async with limited(engine, max_n=2) as http:
        for field in ("n", "best_of"):
            status, answer = await post(http, "/v1/completions", {"prompt": "x", field: 3})
            assert (status, answer["error"]["param"]) == (400, field)


async def test_a_request_ends_after_the_servers_timeout_or_its_own_shorter_one(tiny_llama: Path) -> None:
    async with (
        LocalEngine(tiny_llama, n_ctx=1024, n_parallel=4, n_threads=1) as engine,
        limited(engine, request_timeout=0.1) as http,
    ):
        for given in ({}, {"timeout": 3600}, {"timeout": 0.05}):
            body = {"prompt": "Hello", "max_tokens": 900, "ignore_eos": True, **given}
            status, answer = await post(http, "/v1/completions", body)
            assert (status, answer["choices"][0]["finish_reason"]) == (200, "timeout")


async def test_a_declared_gigabyte_is_refused_unread(engine: HeldEngine) -> None:
    async with listening(create_app(engine)) as listener:
        reader, writer = await connect(listener)
        writer.write(head("POST", "/v1/completions", f"Content-Length: {1 << 30}"))
        answer = await asyncio.wait_for(reader.readuntil(b"}}"), 30)
        assert b" 413 " in answer
        assert b"--max-body-mb" in answer
        assert b"Connection: close" in answer
        writer.close()


async def test_a_host_of_bytes_that_are_no_text_is_refused(engine: HeldEngine) -> None:
    async with listening(create_app(engine)) as listener:
        reader, writer = await connect(listener)
        writer.write(b"GET /health HTTP/1.1\r\nHost: \xff\xfe\r\n\r\n")
        assert b" 403 " in (await asyncio.wait_for(reader.readline(), 30))
        writer.close()


async def test_an_upload_without_end_grows_no_memory_and_is_cut_off(engine: HeldEngine) -> None:
    mebibyte = b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"
    async with listening(create_app(engine, ServerSettings(limits=Limits(max_body_mb=2)))) as listener:
        reader, writer = await connect(listener)
        writer.write(head("POST", "/v1/completions", "Transfer-Encoding: chunked"))
        tracemalloc.start()

        async def insist() -> None:
            while True:
                writer.write(mebibyte)
                await writer.drain()

        upload = asyncio.create_task(insist())
        assert b" 413 " in await asyncio.wait_for(reader.readuntil(b"}}"), 30)
        with pytest.raises(ConnectionError):  # the answer had a moment to be read
            await asyncio.wait_for(upload, 4)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 16 << 20
        writer.close()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/files"])
async def test_a_body_that_is_compressed_is_refused(engine: HeldEngine, path: str) -> None:
    """A small one may unpack to hundreds of megabytes."""
    bomb = gzip.compress(b" " * (64 << 20), 1)
    async with listening(create_app(engine)) as listener, aiohttp.ClientSession() as session:
        headers = {"Content-Encoding": "gzip"}
        async with session.post(f"{listener.url}{path}", data=bomb, headers=headers) as answer:
            assert answer.status == 400
            assert (await answer.json())["error"]["param"] == "Content-Encoding"


async def test_megabytes_of_headers_are_refused(engine: HeldEngine) -> None:
    many = [f"X-{i}: {'y' * 8000}" for i in range(500)]
    for headers in (["X-Long: " + "y" * (4 << 20)], many, [f"X-{i}: y" for i in range(100_000)]):
        async with listening(create_app(engine)) as listener:
            reader, writer = await connect(listener)
            writer.write(head("GET", "/health", *headers))
            answer = await ended(reader)
            assert not answer or b" 400 " in answer
            writer.close()
            async with http_to(engine) as http, http.get("/health") as fine:
                assert fine.status == 200


async def test_one_keys_requests_are_limited_and_the_others_continue(engine: HeldEngine) -> None:
    body = {"prompt": "Hello", "max_tokens": 2}
    async with limited(engine, Keys(["a-key", "b-key"]), max_concurrent_per_key=2) as http:

        def send(key: str) -> asyncio.Task[tuple[int, Any]]:
            return asyncio.create_task(post(http, "/v1/completions", body, headers={"x-api-key": key}))

        running = [send("a-key"), send("a-key"), send("b-key")]
        await until(lambda: engine.n_held == 3)
        async with http.post("/v1/completions", json=body, headers={"x-api-key": "a-key"}) as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
            error = (await answer.json())["error"]
            assert error["code"] == "too_many_requests"
            assert "--max-concurrent-per-key" in error["message"]
        engine.go_on.set()
        assert [status for status, _ in await asyncio.gather(*running)] == [200] * 3
        assert (await send("a-key"))[0] == 200


async def test_a_place_is_free_again_however_its_request_ends(engine: HeldEngine) -> None:
    app = create_app(engine, ServerSettings(limits=Limits(max_concurrent=1, max_concurrent_per_key=1)))
    good, bad = {"prompt": "Hello", "max_tokens": 2}, {"prompt": 5}
    async with listening(app) as listener:
        _, writer = await connect(listener)  # goes away while it runs
        writer.write(post_bytes("/v1/completions", good))
        await until(lambda: engine.n_held == 1)
        reader, second = await connect(listener)
        second.write(post_bytes("/v1/completions", good))
        assert b" 429 " in await reader.readuntil(b"}}")
        writer.transport.abort()
        await until(lambda: engine.n_held == 0)
        engine.go_on.set()
        for body, status in ((bad, 400), (good, 200), ({**good, "stream": True}, 200), (good, 200)):
            reader, writer = await connect(listener)
            writer.write(post_bytes("/v1/completions", body))
            assert b" %d " % status in await reader.readline()
            writer.close()
            await until(lambda: not engine._by_id)


async def test_a_client_that_is_slow_to_send_does_not_count_as_concurrent(engine: HeldEngine) -> None:
    engine.go_on.set()
    app = create_app(engine, ServerSettings(limits=Limits(max_concurrent=1)))
    async with listening(app) as listener:
        _, slow = await connect(listener)
        slow.write(post_bytes("/v1/completions", {"prompt": "Hello"})[:-3])
        await asyncio.sleep(0.05)
        reader, writer = await connect(listener)
        writer.write(post_bytes("/v1/completions", {"prompt": "Hello", "max_tokens": 2}))
        assert b" 200 " in await reader.readline()
        slow.close()
        writer.close()


async def test_choices_of_a_slow_reader_wait_for_it(engine: HeldEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue between them is bounded: see `run`."""
    from cppbatch import GenerationRequest, SamplingParams
    from cppbatch.server.run_requests import run_requests

    engine.go_on.set()
    taken = 0
    submit = engine.submit

    async def counted(request: Any) -> Any:
        nonlocal taken
        async for event in submit(request):
            taken += 1
            yield event
            await asyncio.sleep(0)

    monkeypatch.setattr(engine, "submit", counted)
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    events = run_requests(engine, [GenerationRequest(id=f"x-{i}", prompt="Hello", params=params) for i in range(3)])
    await anext(events)
    await asyncio.sleep(0.3)
    assert taken <= 1 + 2 * 3 + 3
    await events.aclose()
    await until(lambda: not engine._by_id)
    assert json.dumps((await engine.stats()).running) == "0"
