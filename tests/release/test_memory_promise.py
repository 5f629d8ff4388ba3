"""The predicted memory is what llama.cpp allocates, and the growth of a process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from cppbatch.bench.memory_report import MeasuredMemory
from cppbatch.config import EngineConfig, KvLayout
from cppbatch.engine.runtime import load_model, make_context
from cppbatch.errors import EstimateFailed, OutOfRange
from cppbatch.llama import Backend, Batch
from cppbatch.models.synthetic import LlamaShape
from cppbatch.sizing import estimate_child
from cppbatch.sizing.buffers import Buffer, read_buffers
from cppbatch.sizing.estimate import Footprint, estimate_memory
from tests.support import tiny_models

LOGGED = ("weights", "cells", "states", "compute", "output")
ROUNDED = 2 * 2**20 // 100  # llama.cpp logs hundredths of a MiB


def sizes(buffers: list[Buffer]) -> Counter[str]:
    return Counter({kind: sum(b.n_bytes for b in buffers if b.kind == kind) for kind in LOGGED})


def really(config: EngineConfig) -> Counter[str]:
    """As llama.cpp logs it when it allocates; of an engine that may switch its layout, the larger one."""
    configs = [config, replace(config, kv_layout="unified")] if config.kv_layout == "auto" else [config]
    found = []
    for each in configs:
        with Backend.get().lines() as lines, load_model(each) as model, make_context(each, model):
            found.append(sizes(read_buffers(lines)))
    return max(found, key=Counter.total)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the cells of the default one (24 KiB a token) and few weights."""
    shape = LlamaShape(n_layer=48, n_embd=128, n_head=2, n_head_kv=2, n_ff=64)
    return tiny_models.llama(tmp_path_factory.mktemp("deep") / "deep.gguf", shape=shape)


MODELS = pytest.mark.parametrize("model", ["deep", pytest.param("default_model", marks=pytest.mark.nightly)])


def assert_predicted(configs: list[EngineConfig], footprints: list[Footprint]) -> None:
    for config, footprint in zip(configs, footprints, strict=True):
        assert footprint.error is None
        expected, predicted = really(config), sizes(footprint.buffers)
        for kind in LOGGED:
            if kind == "output" and config.pooling:
                continue  # grows with the first step
            assert predicted[kind] == pytest.approx(expected[kind], rel=0.01, abs=ROUNDED), (config, kind)


@pytest.mark.parametrize("kind", ["tiny_llama", "tiny_mamba", "tiny_swa", "tiny_hybrid", "tiny_encoder"])
def test_every_kind_of_model_takes_what_is_predicted(kind: str, request: pytest.FixtureRequest) -> None:
    path = str(request.getfixturevalue(kind))
    small = EngineConfig(model_path=path, n_ctx=4096, n_parallel=4, n_batch=512, n_ubatch=128, n_threads=1)
    pooling = "mean" if kind == "tiny_encoder" else None
    configs = [replace(small, pooling=pooling), replace(small, n_parallel=40, n_ctx=8192, pooling=pooling)]
    if not pooling:
        configs += [replace(small, kv_layout="per-sequence"), replace(small, n_ubatch=512, flash_attn="off")]
    assert_predicted(configs, estimate_memory(configs).footprints)


@MODELS
def test_every_type_of_cells_takes_what_is_predicted(model: str, request: pytest.FixtureRequest) -> None:
    small = EngineConfig(model_path=str(request.getfixturevalue(model)), n_ctx=2048, n_parallel=4)
    configs = [replace(small, cache_type_k=t, cache_type_v=t) for t in ("f16", "bf16", "q8_0", "q4_0", "f32")]
    configs += [replace(each, kv_layout="per-sequence") for each in configs[:3]]
    assert_predicted(configs, estimate_memory(configs).footprints)


def test_more_cells_than_are_simulated_are_extrapolated(default_model: Path) -> None:
    million = EngineConfig(model_path=str(default_model), n_ctx=1 << 20)
    one, four = estimate_memory([million, replace(million, n_ctx=1 << 22)]).footprints
    assert sizes(four.buffers)["cells"] == 4 * sizes(one.buffers)["cells"] == 4 * (23040 << 20)
    assert four.sequence_cells == 4 * one.sequence_cells


def test_recurrent_states_that_would_be_too_much_for_a_trial_are_extrapolated(
    tiny_mamba: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate_child, "_MAX_REAL_STATE_BYTES", 200_000)
    config = EngineConfig(model_path=str(tiny_mamba), n_ctx=4096, n_parallel=64, n_threads=1)
    [footprint] = estimate_child.footprints([config])
    assert sizes(footprint.buffers)["states"] == pytest.approx(really(config)["states"], rel=0.05)


GROWTH = """
import sys, msgspec
from cppbatch.bench.memory_report import measure_memory
from cppbatch.config import EngineConfig
print(msgspec.json.encode(measure_memory(msgspec.json.decode(sys.argv[1], type=EngineConfig))).decode())
"""


def taken(config: EngineConfig) -> MeasuredMemory:
    """Measured in a separate process."""
    command = [sys.executable, "-c", GROWTH, msgspec.json.encode(config).decode()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return msgspec.json.decode(done.stdout, type=MeasuredMemory)


@MODELS
@pytest.mark.parametrize("layout", ["unified", "per-sequence"])
def test_the_extra_memory_of_16_sequences_is_predicted_to_5_percent(
    layout: KvLayout, model: str, request: pytest.FixtureRequest
) -> None:
    """In llama.cpp's allocations, and in the growth of the process once each sequence has its tokens."""
    path = str(request.getfixturevalue(model))
    config = EngineConfig(model_path=path, n_ubatch=64, kv_layout=layout, prefix_cache=False, swap_space=0)
    one, many = (replace(config, n_parallel=n, n_ctx=256 * n) for n in (1, 16))
    before, after = estimate_memory([one, many]).footprints
    predicted = sizes(after.buffers).total() - sizes(before.buffers).total()
    measured_one, measured_many = taken(one), taken(many)
    allocated = sizes(measured_many.buffers).total() - sizes(measured_one.buffers).total()
    grown = measured_many.process - measured_one.process
    print(json.dumps({"layout": layout, "predicted": predicted, "allocated": allocated, "process": grown}))
    assert predicted == pytest.approx(allocated, rel=0.01)
    copies = sum(sign * b.n_bytes for f, sign in ((after, 1), (before, -1)) for b in f.buffers if b.kind == "engine")
    assert predicted + copies == pytest.approx(grown, rel=0.05)


def test_a_simulated_model_has_nothing_to_compute_with(tiny_llama: Path) -> None:
    config = EngineConfig(model_path=str(tiny_llama), n_ctx=256, n_threads=1)
    with load_model(config, no_alloc=True) as model, make_context(config, model) as context:
        batch = Batch(8)
        batch.add_rows([1], [0], [0])
        with pytest.raises(OutOfRange, match="no_alloc"):
            context.decode(batch)


def test_an_estimate_process_that_dies_is_reported_with_its_exit_code(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(EstimateFailed, match="ended with code 1: no reason given"):
        estimate_memory([EngineConfig(model_path=str(tiny_llama))])
