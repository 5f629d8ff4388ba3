"""`--workers 1..3` with real worker processes: a burst, the workers that it starts, and their end."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import urllib.request
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from cppbatch import EngineConfig, GenerationRequest, SamplingParams
from cppbatch.cluster import rules
from cppbatch.cluster.deployment import Deployment
from cppbatch.cluster.engines.autoscaled import AutoscaledGroup
from cppbatch.cluster.engines.process import EngineProcess
from cppbatch.sizing import memory_check
from cppbatch.sizing.memory_check import memory_shortage
from tests.support import tiny_models
from tests.support.batch_files import wait_until
from tests.support.listening import until
from tests.support.server_process import ServerProcess

SOON = 60.0


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A burst of tiny models is over in seconds."""
    monkeypatch.setattr(rules, "_QUEUE_DELAY_S", 0.2)
    monkeypatch.setattr(rules, "_MAX_WAIT_S", 0.5)


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    """Texts are exact with float weights and caches, also after a crash. `n_threads`: the tests may have one core."""
    model = tiny_models.llama(tmp_path / "tiny.gguf")
    return EngineConfig(
        model_path=str(model), n_ctx=2048, n_parallel=4, n_threads=1, cache_type_k="f32", cache_type_v="f32",
        flash_attn="off", spec="off",
    )  # fmt: skip


@pytest.fixture
async def group(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AutoscaledGroup]:
    defaults = AutoscaledGroup.__init__.__kwdefaults__
    assert defaults
    monkeypatch.setitem(defaults, "interval", 0.05)
    paced = EngineProcess.__init__.__kwdefaults__  # their requests wait, and need little CPU meanwhile
    assert paced
    monkeypatch.setitem(paced, "runtime", "tests.support.failing_runtimes:paced")
    deployment = Deployment(max_workers=3, downscale_delay=1.0, memory_shortage=memory_shortage)
    group = deployment.start(config)
    assert isinstance(group, AutoscaledGroup)
    async with group:
        yield group


async def text(group: AutoscaledGroup, i: int, n_tokens: int) -> str:
    params = SamplingParams(temperature=0, max_tokens=n_tokens, ignore_eos=True)
    request = GenerationRequest(id=f"{i}-{n_tokens}", prompt=f"{i} times {i}", params=params)
    events = [event async for event in group.submit(request)]
    assert [event.finish_reason for event in events if event.finish_reason] == ["length"]
    return "".join(event.text for event in events)


async def clients(group: AutoscaledGroup, n: int, end: asyncio.Event) -> list[list[str]]:
    """Texts of `n` clients: each requests the same text repeatedly, until `end`."""

    async def client(i: int) -> list[str]:
        texts = [await text(group, i, 50)]
        while not end.is_set():
            texts.append(await text(group, i, 50))
        return texts

    return await asyncio.gather(*(client(i) for i in range(n)))


async def test_a_burst_starts_workers_and_they_end_after_it_with_the_texts_of_one_worker(
    group: AutoscaledGroup,
) -> None:
    alone = await asyncio.gather(*(text(group, i, 50) for i in range(4)))
    assert group.scaling().scale_ups == 0
    end = asyncio.Event()
    burst = asyncio.create_task(clients(group, 32, end))
    await until(lambda: group.scaling().running == 3)
    await asyncio.sleep(1)  # some texts of the third worker
    end.set()
    states = await group.workers()
    assert [state.name for state in states] == ["0", "1", "2"]
    assert len({state.pid for state in states}) == 3
    texts = await asyncio.wait_for(burst, SOON)
    assert all(len(set(same)) == 1 for same in texts)
    assert [same[0] for same in texts[:4]] == alone
    finished = [state.stats.finished.get("length", 0) for state in await group.workers() if state.stats]
    assert sum(finished) == 4 + sum(map(len, texts))
    assert min(finished) > 4

    await until(lambda: group.scaling().running == 1 and not group.scaling().draining)
    assert (group.scaling().scale_ups, group.scaling().scale_downs) == (2, 2)
    assert [state.name for state in await group.workers()] == ["0"]
    assert await asyncio.gather(*(text(group, i, 50) for i in range(4))) == alone


async def test_a_draining_worker_that_is_killed_finishes_its_streams(group: AutoscaledGroup) -> None:
    expected = await asyncio.gather(*(text(group, i, 150) for i in range(2)))
    await (other := group._start_worker(1)).loaded()
    group._add(other)
    streams = asyncio.gather(*(text(group, i, 150) for i in range(2)))
    await asyncio.sleep(0.02)
    group._drain_one()
    (draining,) = [state for state in await group.workers() if state.draining]
    assert draining.in_flight == 1
    os.kill(draining.pid or 0, signal.SIGKILL)
    assert await asyncio.wait_for(streams, SOON) == expected
    await until(lambda: group.scaling().draining == 0)
    assert [state.name for state in await group.workers()] == ["0"]


async def test_a_worker_that_memory_forbids_is_not_started(
    group: AutoscaledGroup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory_check, "free_host_memory", lambda: 5 << 20)
    end = asyncio.Event()
    burst = asyncio.create_task(clients(group, 24, end))
    await until(lambda: group.scaling().held_back is not None)
    end.set()
    await burst
    assert (group.scaling().scale_ups, len(await group.workers())) == (0, 1)
    (line,) = [line for line in caplog.messages if "cannot start worker" in line]
    assert "MiB of the host's memory, but only 5.0 MiB are free. Next attempt in 30 s" in line


def test_a_server_logs_which_workers_start_and_end(tmp_path: Path) -> None:
    model = tiny_models.llama(tmp_path / "tiny.gguf")
    flags = ("--workers", "1..2", "--downscale-delay", "1", "-np", "2", "-c", "1024", "-t", "1", "--data-dir", tmp_path)
    paced = ServerProcess("-m", model, *flags, module="tests.support.paced_server")
    with paced as server, ThreadPoolExecutor(16) as clients:
        server.wait_ready()
        assert server.get("/health")["scaling"]["running"] == 1
        all_run = Event()

        def client() -> int:
            n = 0
            while n == 0 or not all_run.is_set():
                body = {"prompt": "The sea is", "max_tokens": 50, "temperature": 0, "ignore_eos": True}
                n += server.post("/v1/completions", body)["usage"]["completion_tokens"] == 50
            return n

        answers = [clients.submit(client) for _ in range(16)]
        wait_until(lambda: server.get("/health")["scaling"]["running"] == 2)
        all_run.set()
        assert all(answer.result() for answer in answers)
        wait_until(lambda: server.get("/health")["scaling"]["running"] == 1)
        wait_until(lambda: [worker["name"] for worker in server.get("/stats")["workers"]] == ["0"])
        server.wait_line("worker 1 ended")  # it closes its engine first
        with urllib.request.urlopen(server.url + "/metrics", timeout=30) as answer:
            page = answer.read().decode()
        server.process.terminate()
        server.wait()
        log = server.stop()
    assert 'cppbatch_scale_events_total{direction="up"} 1.0' in page
    assert 'cppbatch_scale_events_total{direction="down"} 1.0' in page
    lines = [line.partition("cppbatch.scaling: ")[2] for line in log.splitlines() if "cppbatch.scaling" in line]
    expected = [
        r"workers: 1, at most 2\b.*",
        r"waiting requests: \d+, .*; starting worker 1 .*",
        r"worker 1 is ready after [\d.]+ s .*",
        r".*: draining worker 1, .*",
        r"worker 1 ended; running: 1",
    ]
    assert [re.fullmatch(pattern, line) is not None for pattern, line in zip(expected, lines, strict=True)] == [
        True
    ] * 5
