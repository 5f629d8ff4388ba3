"""A stream starts as soon as its request is known to be valid, and is never silent for long: clients and proxies that
wait for headers or bytes give up while a long prompt waits or is computed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import pytest_asyncio

from cppbatch import EngineConfig, EngineProcess, LocalEngine
from cppbatch.server.settings import ServerSettings
from tests.support.failing_runtimes import paced
from tests.support.http_client import Http, http_to

pytestmark = pytest.mark.asyncio(loop_scope="module")

SIZES: dict[str, Any] = {"n_ctx": 16384, "n_parallel": 1, "n_threads": 1, "spec": "off"}
LONG = {"prompt": "Hello", "n_predict": 12_000, "ignore_eos": True, "stream": True}
CHAT = [{"role": "user", "content": "Hello"}]
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hello", "max_tokens": 2},
    "/v1/chat/completions": {"messages": CHAT, "max_completion_tokens": 2},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 2},
    "/v1/messages": {"model": "tiny", "messages": CHAT, "max_tokens": 2},
    "/completion": {"prompt": "Hello", "n_predict": 2},
    "/generate": {"prompt": "Hello", "max_tokens": 2},
}


@pytest_asyncio.fixture(
    params=[LocalEngine, EngineProcess], ids=["in this process", "in a worker"], scope="module", loop_scope="module"
)
async def http(request: pytest.FixtureRequest, tiny_llama: Path) -> AsyncIterator[Http]:
    config = EngineConfig(str(tiny_llama), **SIZES)
    engines: dict[object, Callable[[], Any]] = {
        LocalEngine: lambda: LocalEngine(config, runtime=paced(config, lambda _: True)),
        EngineProcess: lambda: EngineProcess(config, runtime="tests.support.failing_runtimes:paced"),
    }
    async with engines[request.param]() as engine, http_to(engine, ServerSettings(aliases=("tiny",))) as client:
        yield client


@asynccontextmanager
async def busy(http: Http) -> AsyncIterator[None]:
    """The only sequence is taken."""
    async with http.post("/completion", json=LONG) as running:
        await running.content.readany()
        yield
        assert not running.content.at_eof()


@pytest.mark.each_value
@pytest.mark.parametrize("path", STREAMS)
async def test_headers_are_sent_while_a_request_waits_in_the_queue(http: Http, path: str) -> None:
    async with busy(http):
        start = perf_counter()
        async with http.post(path, json={**STREAMS[path], "stream": True}) as answer:
            assert answer.status == 200
            assert answer.content_type == "text/event-stream"
            assert perf_counter() - start < 1, "the other request takes several seconds"


@pytest.mark.each_value
@pytest.mark.parametrize("path", STREAMS)
async def test_a_silent_stream_sends_pings_that_clients_skip(http: Http, path: str) -> None:
    async with busy(http):
        body = {**STREAMS[path], "stream": True, "sse_ping_interval": 1}
        async with http.post(path, json=body) as answer:
            lines: list[bytes] = []
            while b": ping\n" not in lines:
                lines.append(await asyncio.wait_for(answer.content.readline(), 10))
    started = {"/v1/responses": [b"event: response.created\n", b"event: response.in_progress\n"]}
    assert [line for line in lines if line.startswith(b"event:")] == started.get(path, [])


async def test_pings_can_be_switched_off(http: Http) -> None:
    async with (
        busy(http),
        http.post("/completion", json={**STREAMS["/completion"], "stream": True, "sse_ping_interval": -1}) as answer,
    ):
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(answer.content.readline(), 1.5)


@pytest.mark.each_value
@pytest.mark.parametrize("path", STREAMS)
async def test_an_invalid_request_has_its_status_while_another_one_runs(http: Http, path: str) -> None:
    async with busy(http):
        body = {**STREAMS[path], "stream": True, "grammar": "root ::= ["}
        async with http.post(path, json=body) as answer:
            assert answer.status == 400
            assert "grammar" in (await answer.json())["error"]["message"]


@pytest.mark.each_value
@pytest.mark.parametrize("path", STREAMS)
async def test_a_request_whose_time_ends_in_the_queue_ends_its_stream(http: Http, path: str) -> None:
    async with busy(http), http.post(path, json={**STREAMS[path], "stream": True, "queue_timeout": 0.2}) as answer:
        assert answer.status == 200
        last = (await answer.content.read()).decode().strip().rpartition("\n\n")[2]
    ends = {"/v1/messages": "message_stop", "/v1/responses": "response.incomplete"}
    assert ends.get(path, "[DONE]") in last or '"stop":true' in last


async def test_a_stream_has_the_same_events_as_without_a_wait(http: Http) -> None:
    """Anthropic's first event has the tokens of the prompt, which are counted on admission."""
    async with http.post("/v1/messages", json={**STREAMS["/v1/messages"], "stream": True}) as answer:
        text = (await answer.content.read()).decode()
    names = [line.split()[1] for line in text.splitlines() if line.startswith("event:")]
    assert names[0] == "message_start"
    assert names[-1] == "message_stop"
    assert "ping" not in names
