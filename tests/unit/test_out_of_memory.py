"""What is done when the memory of an engine runs out: which messages say so, who is to blame, and the next sizes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, cast

import pytest
from msgspec.structs import replace

from cppbatch import EngineConfig, EngineProcess, FinishReason, GenerationRequest, SamplingParams
from cppbatch.cluster.deployment import Deployment
from cppbatch.cluster.engines.group import EngineGroup
from cppbatch.cluster.engines.supervisor import Supervisor
from cppbatch.cluster.link import Loaded, LoadFailed
from cppbatch.cluster.worker.handle import WorkerDied
from cppbatch.engine.request import ResumeState
from cppbatch.errors import EstimateFailed, InvalidRequest, OutOfMemory, says_out_of_memory
from cppbatch.sizing import fit_again, memory_check
from cppbatch.sizing.buffers import Buffer
from cppbatch.sizing.estimate import Device, Footprint, MemoryEstimate
from cppbatch.sizing.fit_again import smaller_sizes
from cppbatch.sizing.placement import Placed
from cppbatch.sizing.placement_search import Speeds
from tests.support.fake_workers import FakeWorker, fake_workers
from tests.support.fakes import fake_engine
from tests.support.listening import until

__all__ = ["fake_workers"]

GIB = 2**30
CONFIG = EngineConfig(model_path="model.gguf", n_ctx=16384, n_parallel=8)


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: out of memory",
        "alloc_buffer: allocating 1024.00 MiB on device 0: cudaMalloc failed: out of memory",
        "alloc_tensor_range: failed to allocate CUDA0 buffer of size 1073741824",
        "vk::Device::allocateMemory: ErrorOutOfDeviceMemory",
        "vk::Queue::submit: ErrorOutOfHostMemory",
        "llama_model_load: error loading model: unable to allocate ROCm0 buffer",
        "graph_reserve: failed to allocate compute buffers",
        "decode: could not reserve space for batch with 64 outputs",
        "error: Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
        "terminate called after throwing an instance of 'std::bad_alloc'",
        "MemoryError: Unable to allocate 4.00 GiB for an array",
        "hipErrorOutOfMemory",
        "Native API returns: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
        "CL_MEM_OBJECT_ALLOCATION_FAILURE",
    ],
)
def test_messages_of_every_backend_are_understood(message: str) -> None:
    assert says_out_of_memory(message)


@pytest.mark.parametrize(
    "message",
    [
        "ggml.c:1797: GGML_ASSERT(view_src == NULL) failed",
        "CUDA error: an illegal memory access was encountered",
        "ggml-rpc.cpp:569: Remote RPC server crashed or returned malformed response",
        "decode: failed to find a memory slot for batch of size 64",
        "no heartbeat for 300 s",
    ],
)
def test_other_failures_are_not_taken_for_it(message: str) -> None:
    assert not says_out_of_memory(message)


RAN_OUT = "killed by SIGABRT: CUDA error: out of memory ggml-cuda.cu:97: CUDA error"


def halve(failed: EngineConfig, _n: int) -> EngineConfig:
    if failed.n_ctx <= 2048:
        raise OutOfMemory("smaller settings do not fit either: it needs 3.00 GiB of CUDA0, but only 1.00 GiB are free")
    return replace(failed, n_ctx=failed.n_ctx // 2)


async def run_out(workers: list[FakeWorker], first: int, last: int) -> None:
    """These workers run out of memory while they compute a request."""
    for i in range(first, last + 1):
        await computes(workers, i)
        workers[i].die(WorkerDied(RAN_OUT, set(map(int, workers[i].sequences)), ran_out=True))


async def computes(workers: list[FakeWorker], i: int) -> None:
    await until(lambda: len(workers) > i and workers[i].is_listened_to and bool(workers[i].sequences))


def request(request_id: str = "1") -> GenerationRequest:
    return GenerationRequest(id=request_id, prompt="a", params=SamplingParams(max_tokens=1))


async def test_each_worker_that_runs_out_has_a_smaller_successor_and_no_request_is_blamed(
    fake_workers: list[FakeWorker],
) -> None:
    async with EngineProcess(CONFIG, refit=halve) as engine:
        reading = asyncio.ensure_future(anext(engine.submit(request())))
        await run_out(fake_workers, 0, 2)  # a request that crashes three in a row would end
        await computes(fake_workers, 3)
        fake_workers[3].step()
        assert (await reading).finish_reason is FinishReason.LENGTH
        assert [each.config.n_ctx for each in fake_workers] == [16384, 8192, 4096, 2048]
        assert engine.config.n_ctx == 2048
        assert engine.health().status == "ok"


async def test_without_smaller_sizes_the_log_has_the_numbers_and_the_request_is_blamed(
    fake_workers: list[FakeWorker], caplog: pytest.LogCaptureFixture
) -> None:
    async with EngineProcess(replace(CONFIG, n_ctx=2048), refit=halve) as engine:
        reading = asyncio.ensure_future(anext(engine.submit(request())))
        await run_out(fake_workers, 0, 2)
        assert "3 times in a row while processing this request" in ((await reading).error or "")
    assert f"{RAN_OUT}; smaller settings do not fit either: it needs 3.00 GiB of CUDA0, but" in caplog.text


async def test_the_first_worker_is_tried_a_few_times_with_smaller_sizes(
    fake_workers: list[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(config: EngineConfig, runtime: str | None) -> FakeWorker:
        worker = FakeWorker(config)
        fake_workers.append(worker)
        worker._messages.put_nowait(LoadFailed("OutOfMemory", "unable to allocate CUDA0 buffer"))
        return worker

    monkeypatch.setattr(FakeWorker, "start", fail)
    for n_ctx, n_workers, words in ((1 << 20, 5, "buffer$"), (4096, 2, r"buffer; smaller .* 1\.00 GiB are free")):
        fake_workers.clear()
        engine = EngineProcess(replace(CONFIG, n_ctx=n_ctx), refit=halve)
        with pytest.raises(OutOfMemory, match=f"unable to allocate CUDA0 {words}"):
            await engine.loaded()
        assert [each.config.n_ctx for each in fake_workers] == [n_ctx >> i for i in range(n_workers)]
        await engine.close()


async def test_a_worker_that_wakes_has_the_original_sizes(fake_workers: list[FakeWorker]) -> None:
    async with EngineProcess(CONFIG, refit=halve, sleep_idle_seconds=0.2) as engine:
        reading = asyncio.ensure_future(anext(engine.submit(request())))
        await run_out(fake_workers, 0, 0)
        await computes(fake_workers, 1)
        fake_workers[1].step()
        await reading
        await until(lambda: engine.health().status == "sleeping")
        assert engine.config.n_ctx == 8192
        waking = asyncio.ensure_future(anext(engine.submit(request("2"))))
        await computes(fake_workers, 2)
        fake_workers[2].step()
        await waking
        assert engine.config.n_ctx == CONFIG.n_ctx


@pytest.mark.parametrize(
    ("n_before", "active", "n_ctx"),
    [(2, {1}, 8192), (1, {1}, 16384), (2, set(), 16384)],
    ids=["third time in a row", "second time", "not in a step"],
)
async def test_an_rpc_worker_that_is_lost_in_every_step_has_probably_run_out(
    n_before: int, active: set[int], n_ctx: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cppbatch.cluster.engines.supervisor.check_worker", lambda endpoint: None)  # it is back
    config = replace(CONFIG, rpc=("127.0.0.1:50052",))
    supervisor = Supervisor(config, cast(Any, None), step_timeout=10.0, refit=halve)
    with fake_engine() as engine:
        supervisor.info, supervisor._external_kills = engine.info, n_before
    why, blamed = await supervisor._prepare_next(WorkerDied("lost the RPC worker", active, external=True))
    assert supervisor.config.n_ctx == n_ctx
    assert why.startswith("lost the RPC worker")
    assert blamed == (active if n_ctx == CONFIG.n_ctx else set())


async def test_several_workers_tell_the_smallest_context(
    fake_workers: list[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = FakeWorker.start

    async def start_with_size(config: EngineConfig, runtime: str | None) -> FakeWorker:
        worker = await start(config, runtime)
        loaded = await worker.receive()
        assert isinstance(loaded, Loaded)
        worker._messages.put_nowait(replace(loaded, info=replace(loaded.info, max_sequence=config.n_ctx)))
        return worker

    monkeypatch.setattr(FakeWorker, "start", start_with_size)
    async with EngineGroup([EngineProcess(replace(CONFIG, n_ctx=n)) for n in (16384, 4096, 8192)]) as group:
        assert group.info.max_sequence == 4096


def test_a_text_that_is_as_long_as_the_context_cannot_continue() -> None:
    """Instead of losing its first tokens, as with context shifts."""
    with fake_engine(n_ctx=64) as engine:
        core = engine.core
        most = core.runtime.info.max_sequence - len("abc")

        def resume(n: int) -> None:
            state = ResumeState(tokens=[5] * n, age=1.0, first_token_seconds=0.5)
            core.make_sequence(GenerationRequest(id="a", prompt="abc", params=SamplingParams(max_tokens=-1)), state)

        resume(most - 1)
        for more in (0, 1, 100):
            with pytest.raises(InvalidRequest, match=rf"the {most + more} tokens of the text so far are .*, but") as no:
                resume(most + more)
            assert no.value.overflow


def test_cells_are_halved_before_sequences() -> None:
    assert smaller_sizes(8, 16384) == [(8, 8192), (8, 4096), (4, 2048), (2, 1024), (1, 512)]
    assert smaller_sizes(1, 1000) == [(1, 512)]
    assert smaller_sizes(2, 300) == [(1, 300)]
    assert smaller_sizes(1, 512) == []


class Machine:
    """1 MiB a cell on the GPU, 1 GiB of weights a layer, of which the engine may place fewer there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free, self.host, self.n_placed, self.fails = 8 * GIB, 64 * GIB, 0, False
        for module in (fit_again, memory_check):
            monkeypatch.setattr(module, "estimate_memory", self.estimate)
            monkeypatch.setattr(module, "free_host_memory", lambda: self.host)
        monkeypatch.setattr(fit_again, "placements", self.place)

    def estimate(self, configs: list[EngineConfig]) -> MemoryEstimate:
        if self.fails:
            raise EstimateFailed("no answer")
        gpu = Device("CUDA0", "a GPU", self.free, 24 * GIB)
        return MemoryEstimate([Footprint(buffers=[Buffer("cells", "CUDA0", c.n_ctx << 20)]) for c in configs], [gpu])

    def place(self, candidates: list[EngineConfig], *_: object, margin: float) -> Iterator[Placed]:
        assert not candidates[0].is_placed
        self.n_placed += 1
        for each in candidates if self.free > GIB / 4 else ():
            yield Placed(replace(each, n_cpu_ffn=3), MemoryEstimate([], []), Speeds(1, 1, 1))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_the_sizes_fit_into_what_is_free_now_with_a_margin_that_grows(machine: Machine) -> None:
    machine.free = 9 * GIB
    found = [fit_again.fit_again(CONFIG, CONFIG, n).n_ctx for n in (1, 2, 3, 4, 5, 100)]
    assert found == [8192, 4096, 4096, 4096, 4096, 4096]
    assert machine.n_placed == 0


def test_sizes_that_seem_to_fit_are_not_tried_again(machine: Machine) -> None:
    machine.free = 100 * GIB
    assert fit_again.fit_again(CONFIG, CONFIG, 1).n_ctx == CONFIG.n_ctx // 2


def test_layers_move_only_if_no_smaller_sizes_fit_and_not_from_the_cpu(machine: Machine) -> None:
    machine.free = GIB // 2
    given = replace(CONFIG, n_gpu_layers=99)
    for asked in (CONFIG, given):
        moved = fit_again.fit_again(asked, asked, 1)
        assert (moved.n_cpu_ffn, moved.n_gpu_layers, moved.n_ctx) == (3, -1, CONFIG.n_ctx)
        again = fit_again.fit_again(asked, moved, 2)  # the same placement has run out, too
        assert (again.n_cpu_ffn, again.n_ctx) == (3, CONFIG.n_ctx // 2)
    on_cpu = replace(CONFIG, n_gpu_layers=0)
    with pytest.raises(OutOfMemory):
        fit_again.fit_again(on_cpu, on_cpu, 1)


def test_what_does_not_fit_has_the_numbers(machine: Machine) -> None:
    machine.free = GIB // 8
    with pytest.raises(
        OutOfMemory,
        match=r"with -c 512 -np 1, it needs 0\.50 GiB of CUDA0, but only 0\.12 GiB are free\. End the programs",
    ):
        fit_again.fit_again(CONFIG, CONFIG, 1)


def test_without_an_estimate_the_cells_are_halved(machine: Machine) -> None:
    machine.fails = True
    assert fit_again.fit_again(CONFIG, CONFIG, 1) == replace(CONFIG, n_ctx=CONFIG.n_ctx // 2)


async def test_workers_that_come_with_the_load_do_not_make_the_context_smaller(fake_workers: list[FakeWorker]) -> None:
    for deployment, with_refit in (
        (Deployment(workers=2, refit=halve), [True, True]),
        (Deployment(workers=1, max_workers=2, refit=halve), [True, False]),
    ):
        engines = [deployment._start_worker(CONFIG, i) for i in range(2)]
        assert [engine._supervisor._refit is not None for engine in engines] == with_refit
        await asyncio.gather(*(engine.close() for engine in engines))
