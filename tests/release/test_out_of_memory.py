"""A device whose memory runs out, while a model is loaded, a context created or a step computed, costs cells or layers,
but no text. The device is an RPC worker of this machine with a limited address space, so that allocations really fail.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from cppbatch import BatchInferenceEngine, SamplingParams
from cppbatch.cluster.engines.process import EngineProcess
from cppbatch.config import EngineConfig
from cppbatch.engine.request import GenerationRequest
from cppbatch.errors import GenerationFailed, LlamaError, ModelError, OutOfMemory
from cppbatch.models.synthetic import LlamaShape
from cppbatch.sizing import fit_again, memory_check, placement
from cppbatch.sizing.estimate import MemoryEstimate, estimate_memory
from cppbatch.sizing.fit_again import refit
from tests.support import tiny_models
from tests.support.listening import until
from tests.support.lora_files import write_lora
from tests.support.native_engines import PROMPTS
from tests.support.rpc_workers import RpcWorker
from tests.support.server_process import ServerProcess

MIB = 1 << 20
CELLS = 131_072  # 256 MiB
N_TOKENS = 24
SIZES: dict[str, Any] = {
    "n_ctx": CELLS, "n_parallel": 4, "n_batch": 64, "n_ubatch": 32, "n_threads": 1, "spec": "off",
    "kv_layout": "unified", "flash_attn": "off", "sampling": "host",
}  # fmt: skip
SHAPE = LlamaShape(n_embd=256, n_head=4, n_head_kv=4, n_ff=16_384, n_ctx_train=CELLS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.llama(tmp_path_factory.mktemp("memory") / "model.gguf", shape=SHAPE)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[str]:
    """The texts of the CPU."""
    with BatchInferenceEngine(model, **{**SIZES, "n_ctx": 4096}, n_gpu_layers=0) as engine:
        return [each.text for each in engine.generate(PROMPTS[:3], greedy(N_TOKENS))]


class Device(RpcWorker):
    """An RPC worker whose memory can be limited."""

    def __enter__(self) -> Device:
        super().__enter__()
        self._empty = self.server.memory_info().vms
        return self

    def limit(self, mib: int) -> None:
        """From now on it can allocate this much in addition to what it had before its first engine."""
        self.server.rlimit(psutil.RLIMIT_AS, (self._empty + mib * MIB, psutil.RLIM_INFINITY))


@pytest.fixture
def device() -> Iterator[Device]:
    with Device() as worker:
        yield worker


def greedy(n_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=n_tokens, ignore_eos=True)


def report_free(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """The device reports these free MiB, as a GPU does; an RPC worker reports the memory of its machine."""

    def limited(configs: list[EngineConfig]) -> MemoryEstimate:
        found = estimate_memory(configs)
        return MemoryEstimate(
            found.footprints, [msgspec.structs.replace(each, free=free * MIB) for each in found.devices]
        )

    for module in (fit_again, memory_check, placement):
        monkeypatch.setattr(module, "estimate_memory", limited)


def open_engine(model: Path, device: Device, **more: Any) -> EngineProcess:
    settings = {name: value for name, value in more.items() if name in SIZES or name in ("n_gpu_layers", "lora")}
    rest = {name: value for name, value in more.items() if name not in settings}
    config = EngineConfig(str(model), rpc=(device.endpoint,), **{**SIZES, **settings})
    return EngineProcess(config, refit=refit(config), **rest)


async def text_of(
    engine: EngineProcess, i: int, n_tokens: int = N_TOKENS, seen: Callable[[], object] = lambda: None, **more: Any
) -> str:
    text = ""
    request = GenerationRequest(id=f"{i}", params=greedy(n_tokens), **{"prompt": PROMPTS[i], **more})
    async for event in engine.submit(request):
        assert event.error is None, event.error
        text += event.text
        seen()
    return text


async def texts_of(engine: EngineProcess) -> list[str]:
    return list(await asyncio.gather(*(text_of(engine, i) for i in range(3))))


async def test_a_context_that_cannot_be_allocated_gets_fewer_cells(
    model: Path, expected: list[str], device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    device.limit(320)
    async with open_engine(model, device) as engine:
        assert (engine.info.n_ctx, engine.info.max_sequence, engine.config.n_ctx) == (CELLS // 2,) * 3
        assert await texts_of(engine) == expected
        (state,) = await engine.workers()
    assert state.restarts == 1
    assert f"n_ctx (-c) {CELLS // 2} instead of {CELLS}" in caplog.text
    assert "failed to allocate buffer for kv cache" in caplog.text


async def test_weights_that_cannot_be_allocated_stay_on_the_cpu(
    model: Path, expected: list[str], device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.limit(80)
    report_free(monkeypatch, 80)
    async with open_engine(model, device, n_ctx=4096) as engine:
        assert engine.config.is_placed
        assert await texts_of(engine) == expected


async def test_given_layers_move_too_if_nothing_else_fits(
    model: Path, expected: list[str], device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.limit(80)
    report_free(monkeypatch, 80)
    async with open_engine(model, device, n_ctx=4096, n_gpu_layers=99) as engine:
        assert await texts_of(engine) == expected


async def test_what_does_not_fit_anywhere_ends_with_the_numbers(
    model: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.limit(50)
    report_free(monkeypatch, 50)
    for module in (fit_again, memory_check, placement):
        monkeypatch.setattr(module, "free_host_memory", lambda: 1 * MIB)
    engine = open_engine(model, device, n_ctx=1024, n_parallel=2)  # few smaller sizes, each of which is estimated
    with pytest.raises(
        OutOfMemory,
        match=r"failed to allocate RPC0.* buffer of size 1\d{8}.*free now: .* GiB of RPC0\); smaller settings do not "
        r"fit either: with -c 512 -np 1, it needs .* but only .* are free\. End the programs",
    ):
        await engine.loaded()
    await engine.close()


async def test_a_step_that_cannot_allocate_costs_cells_but_no_text(
    model: Path, expected: list[str], device: Device, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first request with an adapter makes llama.cpp reserve its buffers again, in `llama_decode`, which throws."""
    adapter = write_lora(tmp_path / "x.gguf", shape=SHAPE, gain=8.0)
    n_events = 0

    def seen() -> None:
        nonlocal n_events
        n_events += 1

    async with open_engine(model, device, lora=((str(adapter), 0.0),)) as engine:
        streams = [asyncio.ensure_future(text_of(engine, i, seen=seen)) for i in range(3)]
        await until(lambda: n_events > 10)
        device.limit(250)
        with_adapter = asyncio.ensure_future(text_of(engine, 3, lora={"x": 1.0}))
        assert await asyncio.gather(*streams) == expected
        assert await with_adapter
        (state,) = await engine.workers()
        assert state.restarts >= 1
        assert engine.info.n_ctx < CELLS
        assert engine.config.n_ctx == engine.info.n_ctx
    assert "what(): failed to allocate compute pp buffers" in caplog.text


async def test_the_host_may_run_out_too(model: Path, expected: list[str], tmp_path: Path) -> None:
    adapter = write_lora(tmp_path / "x.gguf", shape=SHAPE, gain=8.0)
    config = EngineConfig(str(model), **SIZES, n_gpu_layers=0, lora=((str(adapter), 0.0),))
    async with EngineProcess(config, refit=refit(config)) as engine:
        assert await text_of(engine, 0) == expected[0]
        (state,) = await engine.workers()
        worker = psutil.Process(state.pid)
        worker.rlimit(psutil.RLIMIT_AS, (worker.memory_info().vms - 100 * MIB, psutil.RLIM_INFINITY))
        assert await text_of(engine, 3, lora={"x": 1.0})
        assert engine.info.n_ctx < CELLS
        assert await texts_of(engine) == expected


async def test_a_worker_that_wakes_gets_fewer_cells_and_all_of_them_once_memory_is_free_again(
    model: Path, expected: list[str], device: Device
) -> None:
    async with open_engine(model, device, sleep_idle_seconds=0.3) as engine:
        for more, n_ctx in ((320, CELLS // 2), (2000, CELLS)):
            await until(lambda: engine.health().status == "sleeping", 30)
            device.limit(more)
            assert await text_of(engine, 0) == expected[0]
            assert engine.info.n_ctx == n_ctx


async def test_a_text_that_is_longer_than_the_smaller_context_ends_with_a_clear_error(
    model: Path, device: Device, tmp_path: Path
) -> None:
    adapter = write_lora(tmp_path / "x.gguf", shape=SHAPE, gain=8.0)
    config = EngineConfig(str(model), rpc=(device.endpoint,), **SIZES, lora=((str(adapter), 0.0),))

    def to_256_cells(failed: EngineConfig, _n: int) -> EngineConfig:
        return msgspec.structs.replace(failed, n_ctx=256)

    n_events = 0

    def seen() -> None:
        nonlocal n_events
        n_events += 1

    async with EngineProcess(config, refit=to_256_cells) as engine:
        long = asyncio.ensure_future(text_of(engine, 0, 5000, seen, prompt="x" * 260))
        await until(lambda: n_events > 10, 60)
        device.limit(250)
        short = asyncio.ensure_future(text_of(engine, 3, 20, lora={"x": 1.0}))
        with pytest.raises(
            GenerationFailed, match=r"memory has run out, and the text cannot continue: .*context holds only 256"
        ):
            await long
        assert await short


def test_an_engine_in_this_process_raises_a_typed_error(model: Path, device: Device) -> None:
    for mib, words in ((50, r"model\.gguf cannot be loaded"), (200, f"cannot create a context of {CELLS} cells")):
        device.limit(mib)
        with pytest.raises(OutOfMemory, match=rf"{words}.* buffer of size \d+; free now: .* GiB of RPC0") as raised:
            BatchInferenceEngine(model, rpc=(device.endpoint,), **SIZES)
        assert isinstance(raised.value, ModelError)
        assert isinstance(raised.value, LlamaError)


def test_the_server_tells_its_clients_the_new_size(model: Path, device: Device) -> None:
    device.limit(320)
    flags = ("-c", CELLS, "-np", 4, "-b", 64, "-ub", 32, "-t", 1, "--kv-layout", "unified", "-fa", "off")
    with ServerProcess("-m", model, "--rpc", device.endpoint, "--spec", "off", *map(str, flags)) as server:
        server.wait_ready()
        props = server.get("/props")
        assert props["default_generation_settings"]["n_ctx"] == CELLS // 2
        assert props["total_slots"] == 4
        (entry,) = server.get("/v1/models")["data"]
        assert entry["meta"]["n_ctx"] == CELLS // 2
        assert server.get("/stats")["kv_cells"] == CELLS // 2
    errors = "".join(server.errors)
    assert f"n_ctx (-c) {CELLS // 2} instead of {CELLS}" in errors
