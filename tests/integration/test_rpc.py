"""One model over two RPC workers of this machine: the same texts, everything that an engine does, and lost workers."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from cppbatch import BatchInferenceEngine, SamplingParams
from cppbatch.cluster.engines.process import EngineProcess
from cppbatch.config import EngineConfig
from cppbatch.engine.request import GenerationRequest
from cppbatch.engine.runtime import load_runtime
from cppbatch.engine.speculation.draft_model import DraftModelProposer
from cppbatch.errors import ConfigError, LibraryError, ModelError, RpcUnreachable
from cppbatch.llama import Backend, Context, Model
from cppbatch.models.synthetic import LlamaShape
from cppbatch.rpc_endpoint import check_worker, parse_endpoint
from tests.support import tiny_models
from tests.support.contexts import PROMPT, decode
from tests.support.listening import until
from tests.support.lora_files import write_lora
from tests.support.native_engines import PROMPTS, SETTINGS
from tests.support.rpc_workers import RpcWorker

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
STORY = "The river floods every spring and the people rebuild the bridge. "


@pytest.fixture(scope="module")
def workers() -> Iterator[list[RpcWorker]]:
    with RpcWorker() as one, RpcWorker() as two:
        yield [one, two]


@pytest.fixture
def split(workers: list[RpcWorker]) -> dict[str, Any]:
    """The settings of an engine over both."""
    return {"rpc": tuple(worker.endpoint for worker in workers), "tensor_split": (1.0, 1.0)}


def texts(model: Path, prompts: list[str] = PROMPTS, params: SamplingParams = GREEDY, **settings: Any) -> list[str]:
    with BatchInferenceEngine(model, **{**SETTINGS, "spec": "off", **settings}) as engine:
        return [each.text for each in engine.generate(prompts, params)]


@pytest.mark.each_value
@pytest.mark.parametrize("sampling", ["host", "auto"])  # auto: on the device, but of recurrent states
@pytest.mark.parametrize("layout", ["unified", "per-sequence", "auto"])
@pytest.mark.parametrize("kind", ["tiny_llama", "tiny_mamba", "tiny_swa", "tiny_hybrid"])
def test_texts_are_those_of_one_process(
    kind: str, layout: str, sampling: str, split: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(kind)
    assert texts(model, kv_layout=layout, sampling=sampling, **split) == texts(model, kv_layout=layout)


@pytest.mark.parametrize("n_gpu_layers", [0, 1, 2])
def test_layers_may_stay_on_this_machine(n_gpu_layers: int, split: dict[str, Any], tiny_llama: Path) -> None:
    assert texts(tiny_llama, n_gpu_layers=n_gpu_layers, **split) == texts(tiny_llama)


def test_the_device_samples_unless_configured_otherwise(split: dict[str, Any], tiny_llama: Path) -> None:
    with BatchInferenceEngine(tiny_llama, **SETTINGS, **split) as engine:
        assert engine.info.sampling == "backend"


@pytest.mark.parametrize("kind", ["tiny_llama", "tiny_mamba", "tiny_swa", "tiny_hybrid"])
@pytest.mark.parametrize("layout", ["unified", "per-sequence"])
def test_prefixes_are_shared_as_on_this_machine(
    kind: str, layout: Any, split: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    model = str(request.getfixturevalue(kind))
    found = []
    for settings in ({}, split):
        runtime = load_runtime(EngineConfig(model, kv_layout=layout, **{**SETTINGS, **settings}))
        found.append(runtime.sharing)
        runtime.close()
    assert found[0] == found[1] != "none"


@pytest.mark.each_value
@pytest.mark.parametrize("swap_space", [0, 64])
@pytest.mark.parametrize("layout", ["unified", "per-sequence"])
def test_sequences_that_lose_their_cells_get_the_same_texts(
    layout: str, swap_space: int, split: dict[str, Any], tiny_llama: Path
) -> None:
    few: dict[str, Any] = {"n_ctx": 768, "n_parallel": 6, "swap_space": swap_space, "kv_layout": layout}
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    assert texts(tiny_llama, params=params, **few, **split) == texts(tiny_llama, params=params, n_ctx=4096)


@pytest.mark.parametrize(("source", "target"), [(True, False), (False, True), (True, True)])
def test_a_state_goes_to_workers_and_back_bit_for_bit(
    source: bool, target: bool, split: dict[str, Any], tiny_llama: Path
) -> None:
    with contextlib.ExitStack() as stack:

        def open_context(over_rpc: bool) -> Context:
            model = stack.enter_context(Model(tiny_llama, **(split if over_rpc else {})))
            return stack.enter_context(Context(model, n_ctx=512, n_seq_max=2, n_threads=1, flash_attn="off"))

        one, two = open_context(source), open_context(target)
        decode(one, PROMPT)
        state = one.save_sequence(0)
        two.restore_sequence(0, state)
        assert np.array_equal(two.save_sequence(0).data, state.data)


def test_a_full_context_is_shifted(split: dict[str, Any], tiny_llama: Path) -> None:
    shifting: dict[str, Any] = {"context_shift": True, "n_ctx": 256, "n_parallel": 1, "prefix_cache": False}
    params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    here = texts(tiny_llama, ["a"], params, **shifting)
    assert texts(tiny_llama, ["a"], params, **shifting, **split) == here


def test_lora_adapters_compute_on_the_workers(split: dict[str, Any], tiny_llama: Path, tmp_path: Path) -> None:
    lora = ((str(write_lora(tmp_path / "x.gguf", gain=8.0)), 1.0),)
    with_adapter = texts(tiny_llama, lora=lora, **split)
    assert with_adapter == texts(tiny_llama, lora=lora)
    assert with_adapter != texts(tiny_llama)


@pytest.mark.parametrize(
    ("kind", "pooling"), [("tiny_encoder", "mean"), ("tiny_encoder", "cls"), ("tiny_reranker", None)]
)
def test_vectors_and_scores_are_the_same(
    kind: str, pooling: Any, split: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    def vectors(**settings: Any) -> Any:
        pooled = {**SETTINGS, "flash_attn": "auto", "pooling": pooling}
        with BatchInferenceEngine(request.getfixturevalue(kind), **pooled, **settings) as engine:
            return engine.embed(PROMPTS[:2])

    np.testing.assert_allclose(vectors(**split), vectors(), rtol=1e-4, atol=1e-5)


def test_a_draft_model_drafts_on_this_machine(split: dict[str, Any], tiny_llama: Path) -> None:
    drafting: dict[str, Any] = {**SETTINGS, "spec": "draft", "draft_model": str(tiny_llama), "sampling": "host"}
    runtime = load_runtime(EngineConfig(str(tiny_llama), **drafting, **split))
    assert any(isinstance(each, DraftModelProposer) for each in runtime.proposers)
    with BatchInferenceEngine(tiny_llama, runtime=runtime, **drafting, **split) as engine:
        assert [each.text for each in engine.generate(PROMPTS, GREEDY)] == texts(tiny_llama)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_every_share_has_a_device(split: dict[str, Any], tiny_llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ModelError, match=r"3 shares; it must have at most one for each device: RPC\d+ \(127\.0\.0\.1:"):
        texts(tiny_llama, rpc=split["rpc"], tensor_split=(1.0, 1.0, 1.0))
    assert texts(tiny_llama, tensor_split=(3.0, 1.0)) == texts(tiny_llama)
    assert "tensor_split (-ts) has no effect: no GPU or RPC worker found" in caplog.text


def test_a_worker_that_serves_another_engine_is_busy_and_free_afterwards(
    split: dict[str, Any], tiny_llama: Path
) -> None:
    endpoint = parse_endpoint(split["rpc"][0])
    with (
        BatchInferenceEngine(tiny_llama, **SETTINGS, **split),
        pytest.raises(RpcUnreachable, match="in use by another engine"),
    ):
        check_worker(endpoint, 0.2)
    check_worker(endpoint)


def test_a_build_without_rpc_says_so_in_one_line(
    split: dict[str, Any], tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cppbatch.llama.rpc.has_rpc", lambda: False)
    with pytest.raises(LibraryError, match=r"--rpc requires llama\.cpp's RPC backend.*-DGGML_RPC=ON") as refused:
        texts(tiny_llama, **split)
    assert "\n" not in str(refused.value)


def test_a_missing_device_is_refused() -> None:
    with (
        pytest.raises(AssertionError, match="device 'CUDA7' not found; available: CPU"),
        RpcWorker("--devices", "CUDA7"),
    ):
        pass


async def test_deterministic_is_refused(split: dict[str, Any], tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match="computes on other machines"):
        EngineProcess(tiny_llama, deterministic=True, **split)


# --- commands ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("ask_child")
def test_memory_shows_what_goes_where(split: dict[str, Any], tiny_llama: Path, run: Callable[..., Any]) -> None:
    code, out, error = run("memory", "-m", tiny_llama, "-c", "1024", "--rpc", ",".join(split["rpc"]), "-ts", "1,1")
    assert code == 0, error
    for endpoint in split["rpc"]:
        assert f"KV cells          {endpoint}" in " ".join(out.split()) or endpoint in out
    assert out.count("will fit") >= 3  # the host and both workers


def test_doctor_reports_whether_the_build_has_rpc(run: Callable[..., Any]) -> None:
    _, out, _ = run("doctor")
    assert "RPC          version 7.0.0" in out


# --- workers that go away ---------------------------------------------------------------------------------------------


async def one_text(engine: EngineProcess, i: int, n_tokens: int, seen: Callable[[], object]) -> str:
    params = SamplingParams(temperature=0, max_tokens=n_tokens, ignore_eos=True)
    text = ""
    async for event in engine.submit(GenerationRequest(id=str(i), prompt=PROMPTS[i], params=params)):
        assert event.error is None
        text += event.text
        seen()
    return text


async def test_a_worker_that_is_killed_in_mid_stream_costs_no_text(
    workers: list[RpcWorker], split: dict[str, Any], tiny_llama: Path
) -> None:
    n_tokens, n_events = 150, 0
    expected = texts(tiny_llama, params=SamplingParams(temperature=0, max_tokens=n_tokens, ignore_eos=True))
    errors: set[str | None] = set()

    def seen() -> None:
        nonlocal n_events
        n_events += 1
        if n_events == 100:
            workers[1].kill_server()

    async def note_health(engine: EngineProcess) -> None:
        while True:
            errors.add(engine.health().error)
            await asyncio.sleep(0.01)

    async with EngineProcess(tiny_llama, **SETTINGS, **split) as engine:
        noting = asyncio.ensure_future(note_health(engine))
        found = await asyncio.gather(*(one_text(engine, i, n_tokens, seen) for i in range(len(PROMPTS))))
        noting.cancel()
        (state,) = await engine.workers()
    assert found == expected
    assert state.restarts == 1
    assert any(error and f"lost the RPC worker at {split['rpc'][1]}" in error for error in errors), errors


async def test_a_worker_that_dies_while_idle_is_detected_too(
    workers: list[RpcWorker], split: dict[str, Any], tiny_llama: Path
) -> None:
    async with EngineProcess(tiny_llama, **SETTINGS, **split) as engine:
        workers[0].kill_server()
        await until(lambda: engine.health().status == "restarting", 10)
        await until(lambda: engine.health().status == "ok", 30)
        await one_text(engine, 0, 5, lambda: None)


async def test_while_a_worker_is_away_requests_wait_and_the_state_names_it(
    workers: list[RpcWorker], tiny_llama: Path
) -> None:
    with RpcWorker() as third:
        async with EngineProcess(tiny_llama, **SETTINGS, rpc=(workers[0].endpoint, third.endpoint)) as engine:
            third.stop()
            await until(
                lambda: f"cannot connect to an RPC worker at {third.endpoint}" in (engine.health().error or ""), 20
            )
            waiting = asyncio.ensure_future(one_text(engine, 1, 5, lambda: None))
            await asyncio.sleep(0.3)
            assert engine.health().status == "restarting"
            assert not waiting.done()
            with RpcWorker("--port", third.endpoint.partition(":")[2]):
                assert await asyncio.wait_for(waiting, 60)


async def test_an_engine_that_sleeps_leaves_its_workers_to_others(split: dict[str, Any], tiny_llama: Path) -> None:
    async with EngineProcess(tiny_llama, sleep_idle_seconds=0.2, **SETTINGS, **split) as engine:
        await until(lambda: engine.health().status == "sleeping", 30)
        await asyncio.to_thread(check_worker, parse_endpoint(split["rpc"][0]))
        assert await one_text(engine, 0, 5, lambda: None)


def test_a_worker_that_was_used_once_and_ended_has_no_effect(tiny_llama: Path) -> None:
    with RpcWorker() as worker:
        texts(tiny_llama, ["a"], rpc=(worker.endpoint,))
    assert not any(worker.endpoint in device.description for device in Backend.get().devices())
    with pytest.raises(RpcUnreachable, match=f"cannot connect to an RPC worker at {worker.endpoint}"):
        texts(tiny_llama, ["a"], rpc=(worker.endpoint,))
    assert texts(tiny_llama, ["a"])


def test_a_server_ends_with_its_worker() -> None:
    with RpcWorker() as worker:
        server = worker.server
        worker.process.kill()
        psutil.wait_procs([server], timeout=10)
        assert not server.is_running()


def test_large_tensors_are_kept_in_the_cache(tmp_path: Path) -> None:
    # 12 MiB a matrix
    model = tiny_models.llama(tmp_path / "wide.gguf", shape=LlamaShape(n_layer=1, n_embd=512, n_ff=6144))
    cache = tmp_path / "cache"
    with RpcWorker("--cache", str(cache)) as worker:
        first = texts(model, ["a"], rpc=(worker.endpoint,))
        files = sorted(cache.iterdir())
        assert files
        assert texts(model, ["a"], rpc=(worker.endpoint,)) == first
        assert sorted(cache.iterdir()) == files


@pytest.mark.nightly
def test_the_benchmark_compares_texts_speed_and_bytes(tiny_llama: Path) -> None:
    script = Path(__file__).parents[2] / "scripts" / "bench_rpc.py"
    command = [sys.executable, str(script), "-m", str(tiny_llama), "-np", "2", "--new", "8", "--turns", "1"]
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert re.search(r"\| one process \| [\d,]+ \| 2 \| - \| - \|", out), out
    assert len(re.findall(r"\| two workers.* \| [\d,]+ \| 2 \| \d+\.\d \| \d+\.\d \|", out)) == 3
