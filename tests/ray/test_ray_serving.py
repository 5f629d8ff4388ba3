"""Streams over real replicas, while workers, replicas and nodes are killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import pytest_asyncio
from ray import serve
from ray.cluster_utils import Cluster

from cppbatch import EngineConfig, FinishReason, GenerationEvent, GenerationRequest, LocalEngine, SamplingParams
from cppbatch.cluster.engines.client import EngineClient, Health
from cppbatch.errors import InvalidRequest, ModelError, QueueFull
from cppbatch.ray.engine import RayEngine
from cppbatch.ray.replica.deployment import engine_application
from cppbatch.ray.replica.serve_replicas import ServeReplicas

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(150)]

N_REQUESTS = 64
N_TOKENS = 400
APPLICATION = "cppbatch"


@pytest.fixture(scope="module")
def config(tiny_llama: Path) -> EngineConfig:
    """Logits that depend neither on the batch nor on where a request continues: any other text is a mistake."""
    return EngineConfig(
        model_path=str(tiny_llama), n_ctx=16384, n_parallel=16, n_threads=1, deterministic=True, spec="off"
    )


def request(i: int, n_tokens: int = N_TOKENS) -> GenerationRequest:
    params = SamplingParams(max_tokens=n_tokens, temperature=0.8, seed=i, ignore_eos=True)
    return GenerationRequest(id=f"r{i}", prompt=f"Request number {i} of many", params=params)


class Load:
    """64 concurrent requests with events read as they arrive."""

    def __init__(self, engine: EngineClient) -> None:
        self.events: list[list[GenerationEvent]] = [[] for _ in range(N_REQUESTS)]
        self.tasks = [asyncio.ensure_future(self._read(engine, i)) for i in range(N_REQUESTS)]

    async def _read(self, engine: EngineClient, i: int) -> None:
        async for event in engine.submit(request(i)):
            self.events[i].append(event)

    @property
    def n_tokens(self) -> int:
        return sum(len(event.tokens) for events in self.events for event in events)

    async def reach(self, share: float) -> None:
        """Waits until this share of all tokens has arrived."""
        while self.n_tokens < share * N_REQUESTS * N_TOKENS:  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    async def texts(self) -> list[str]:
        """Waits for the end. Each request must have one last event, and all its tokens."""
        await asyncio.gather(*self.tasks)
        for events in self.events:
            assert [event.finish_reason for event in events if event.finish_reason] == [FinishReason.LENGTH], events[-1]
        assert self.n_tokens == N_REQUESTS * N_TOKENS
        return ["".join(event.text for event in events) for events in self.events]


async def read(engine: EngineClient, its: GenerationRequest) -> list[GenerationEvent]:
    return [event async for event in engine.submit(its)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(config: EngineConfig) -> list[str]:
    """The texts that one engine in this process generates."""
    async with LocalEngine(config) as engine:
        return await Load(engine).texts()


@contextlib.asynccontextmanager
async def serving(config: EngineConfig, **options: Any) -> AsyncIterator[RayEngine]:
    """Deploys replicas, each on a separate CPU, and opens a front."""
    application = engine_application(config, ray_actor_options={"num_cpus": 1}, **options)
    await asyncio.to_thread(serve.run, application, name=APPLICATION, route_prefix=None)
    try:
        async with RayEngine(config, ServeReplicas(APPLICATION)) as engine:
            yield engine
    finally:
        await asyncio.to_thread(serve.delete, APPLICATION)


async def worker_pids(engine: RayEngine) -> list[int]:
    """The processes of llama.cpp; the parent of each is its replica."""
    return [worker.pid for worker in await engine.workers() if worker.pid]


@pytest.mark.parametrize("n_replicas", [1, 2, 3])
async def test_64_streams_over_replicas_have_the_texts_of_one_engine(
    cluster: Cluster, config: EngineConfig, expected: list[str], n_replicas: int
) -> None:
    async with serving(config, num_replicas=n_replicas) as engine:
        assert await Load(engine).texts() == expected
        workers = await engine.workers()
        assert len(workers) == n_replicas
        assert all(worker.stats and worker.stats.generated_tokens for worker in workers), "each replica took a part"
        assert (await engine.stats()).finished == {"length": N_REQUESTS}
        while len(live := await engine.live()) < n_replicas:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        assert sum(worker.engine.counters.generated_tokens for worker in live if worker.engine) > N_REQUESTS


async def test_a_killed_worker_costs_no_token(cluster: Cluster, config: EngineConfig, expected: list[str]) -> None:
    async with serving(config, num_replicas=2) as engine:
        load = Load(engine)
        await load.reach(0.3)
        os.kill((await worker_pids(engine))[0], signal.SIGKILL)
        assert await load.texts() == expected
        assert sorted(worker.restarts for worker in await engine.workers()) == [0, 1]


@pytest.mark.parametrize("n_replicas", [1, 3])
async def test_a_killed_replica_costs_no_token(
    cluster: Cluster, config: EngineConfig, expected: list[str], n_replicas: int
) -> None:
    async with serving(config, num_replicas=n_replicas) as engine:
        load = Load(engine)
        await load.reach(0.3)
        replica = psutil.Process((await worker_pids(engine))[0]).parent()
        assert replica
        assert replica.cmdline()[0].startswith("ray::ServeReplica"), replica.cmdline()
        replica.kill()
        assert await load.texts() == expected
        assert engine.health().status == "ok"


async def test_a_killed_node_costs_no_token(cluster: Cluster, config: EngineConfig, expected: list[str]) -> None:
    node = cluster.add_node(num_cpus=2)
    try:
        async with serving(config, num_replicas=5) as engine:  # two nodes have room for four
            (raylet,) = [psutil.Process(info.process.pid) for info in node.all_processes["raylet"]]
            on_node = raylet.children(recursive=True)
            assert {process.pid for process in on_node} & set(await worker_pids(engine))
            load = Load(engine)
            await load.reach(0.3)
            for process in [raylet, *on_node]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            assert await load.texts() == expected
            assert engine.health().status == "ok"
    finally:
        cluster.remove_node(node, allow_graceful=False)


async def test_more_replicas_start_under_load_and_end_when_idle(
    cluster: Cluster, config: EngineConfig, expected: list[str]
) -> None:
    autoscaling = {
        "min_replicas": 1, "max_replicas": 3, "target_ongoing_requests": 16, "look_back_period_s": 1,
        "metrics_interval_s": 0.5, "upscale_delay_s": 0.5, "downscale_delay_s": 2,
    }  # fmt: skip
    async with serving(config, autoscaling_config=autoscaling) as engine:
        assert len(await engine.workers()) == 1
        while len(await engine.workers()) < 3:
            assert await Load(engine).texts() == expected
        while len(await engine.workers()) > 1:  # noqa: ASYNC110
            await asyncio.sleep(0.5)
        assert (await read(engine, request(0)))[-1].finish_reason is FinishReason.LENGTH


async def test_the_promises_of_an_engine_hold(cluster: Cluster, config: EngineConfig, expected: list[str]) -> None:
    """Refusals of replicas, and cancels of this side, over the calls of a real handle."""
    config = msgspec.structs.replace(config, n_parallel=4, max_queue=4)
    async with serving(config) as engine:
        assert engine.health() == Health(status="ok", progress=1.0)
        assert engine.info.n_ctx_train == 4096
        too_long = GenerationRequest(id="long", prompt=[5] * 20_000)
        with pytest.raises(InvalidRequest) as refused:
            await read(engine, too_long)
        assert refused.value.overflow
        with pytest.raises(InvalidRequest, match="prompt"):
            await engine.check(too_long)
        pieces = await engine.tokenize("abba", add_special=False)
        assert [piece.piece for piece in pieces] == [b"a", b"b", b"b", b"a"]

        streams = [engine.submit(request(i, 3000)) for i in range(8)]
        await asyncio.gather(*(anext(stream) for stream in streams[:4]))
        waiting = [asyncio.ensure_future(anext(stream)) for stream in streams[4:]]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await anext(engine.submit(request(8)))
        with pytest.raises(InvalidRequest, match="already the id of a running request"):
            await anext(engine.submit(request(0)))
        for i in range(1, 4):  # the first one carries the events of all
            await streams[i - 1].aclose()
        await engine.cancel("r3")
        *_, last = [event async for event in streams[3]]
        assert last.finish_reason is FinishReason.CANCELLED
        await asyncio.gather(*waiting)
        for stream in streams[4:]:
            await stream.aclose()
        await _until_idle(engine)


async def _until_idle(engine: RayEngine) -> None:
    while any(worker.in_flight for worker in await engine.workers()):  # noqa: ASYNC110
        await asyncio.sleep(0.1)


async def test_requests_of_a_killed_front_end(cluster: Cluster, config: EngineConfig) -> None:
    config = msgspec.structs.replace(config, context_shift=True)  # the requests have no other end
    async with serving(config) as engine:
        front = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.ray.front_process", cluster.address, config.model_path, stdout=PIPE
        )
        assert front.stdout
        assert await front.stdout.readline() == b"running\n"
        assert [worker.in_flight for worker in await engine.workers()] == [8]
        front.kill()
        await front.wait()
        await _until_idle(engine)


async def test_a_model_that_cannot_be_loaded_is_the_error_of_the_front(cluster: Cluster, tmp_path: Path) -> None:
    config = EngineConfig(model_path=str(tmp_path / "missing.gguf"))
    target = serve.RunTarget(
        engine_application(config, max_constructor_retry_count=1), name=APPLICATION, route_prefix=None
    )
    await asyncio.to_thread(serve.run_many, [target], wait_for_applications_running=False)
    engine = RayEngine(config, ServeReplicas(APPLICATION))
    try:
        with pytest.raises(ModelError, match=r"missing\.gguf"):
            await engine.loaded()
        assert engine.health().status == "failed"
    finally:
        await engine.close()
        await asyncio.to_thread(serve.delete, APPLICATION)
