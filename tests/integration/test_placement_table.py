"""Kinds of models, memory of the devices, one or two devices: each starts, with the texts of the CPU, and each
device holds what was estimated. `pytest -m soak -s tests/integration/test_placement_table.py` prints the table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cppbatch import BatchInferenceEngine, SamplingParams
from cppbatch.config import EngineConfig
from cppbatch.llama import Backend
from cppbatch.models.synthetic import LlamaShape
from cppbatch.sizing import placement, sizes
from cppbatch.sizing.buffers import Buffer, read_engine_buffers
from cppbatch.sizing.demand import HOST, location, memory_demands
from cppbatch.sizing.estimate import Device, MemoryEstimate, estimate_memory
from cppbatch.sizing.memory_check import check_planned, first_ample
from tests.support import tiny_models
from tests.support.native_engines import PROMPTS
from tests.support.rpc_workers import RpcWorker

pytestmark = pytest.mark.soak

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SIZES: dict[str, Any] = {
    "n_ctx": 1024, "n_parallel": 4, "n_batch": 256, "n_ubatch": 64, "n_threads": 1, "spec": "off",
    "kv_layout": "unified", "flash_attn": "off", "cache_type_k": "f32", "cache_type_v": "f32",
}  # fmt: skip
SHARES = (0.1, 0.3, 0.5, 0.7, 0.9, 1.2)
"""The memory of all devices together, of what the whole model takes there."""
SPLITS = {"one": (1.0,), "two": (0.25, 0.75)}
"""The share of each device in it."""
_LOGGED = 0.01 * 2**20  # what the log rounds to

_1B, _8B = LlamaShape(n_layer=16, n_embd=256, n_ff=1024), LlamaShape(n_layer=32, n_embd=256, n_ff=896)
MODELS: dict[str, Callable[[Path], Path]] = {
    "dense 1B": lambda path: tiny_models.llama(path, shape=_1B),
    "dense 8B": lambda path: tiny_models.llama(path, shape=_8B),
    "8 experts": lambda path: tiny_models.experts(path, n_layers=16, n_experts=8),
    "128 experts": lambda path: tiny_models.experts(path, n_layers=4, n_experts=128),
    "window": lambda path: tiny_models.sliding_window(path, n_layers=24),
    "hybrid": lambda path: tiny_models.two_dimensional_hybrid(path, n_layers=24),
}
_FF = {"8 experts": 512, "128 experts": 256, "window": 2048, "hybrid": 2048}


@pytest.fixture(scope="module")
def workers() -> Iterator[tuple[str, ...]]:
    with RpcWorker() as one, RpcWorker() as two:
        yield one.endpoint, two.endpoint


@pytest.fixture(scope="module", params=MODELS)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, list[str]]:
    """A model, and its texts on the CPU."""
    name: str = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_models, "N_FF", _FF.get(name, 0))
        path = MODELS[name](tmp_path_factory.mktemp("table") / "model.gguf")
    with BatchInferenceEngine(path, n_gpu_layers=0, **SIZES) as engine:
        return name, path, [each.text for each in engine.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("devices", SPLITS)
@pytest.mark.parametrize("share", SHARES)
def test_a_model_starts_on_any_devices_with_the_texts_of_the_cpu_and_the_estimated_memory(
    subject: tuple[str, Path, list[str]],
    share: float,
    devices: str,
    workers: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, path, expected = subject
    split = SPLITS[devices]
    config = EngineConfig(str(path), rpc=workers[: len(split)], **SIZES)
    whole = sum(each.firm for each in memory_demands(estimate_memory([config]), 0) if each.where != HOST)
    free = [int(whole * share * part) for part in split]

    def limited(configs: list[EngineConfig]) -> MemoryEstimate:
        found = estimate_memory(configs)
        pairs = zip(found.devices, free, strict=True)
        return MemoryEstimate(found.footprints, [msgspec.structs.replace(each, free=n) for each, n in pairs])

    for module in (sizes, placement):
        monkeypatch.setattr(module, "estimate_memory", limited)
    planned = first_ample([config])
    check_planned(planned)  # raises if it is refused
    assert planned.estimate
    known = planned.estimate.devices
    with Backend.get().lines() as lines, BatchInferenceEngine(planned.config) as engine:
        texts = [each.text for each in engine.generate(PROMPTS, GREEDY)]
    estimated = on_devices(planned.estimate.footprints[0].buffers, known)
    real = on_devices(read_engine_buffers(lines), known)
    changed = {
        key: value for key, value in msgspec.structs.asdict(planned.config).items() if value != getattr(config, key)
    }
    held = " ".join(f"{estimated[i] / 2**20:.2f}/{real[i] / 2**20:.2f}/{free[i] / 2**20:.2f}" for i in range(len(free)))
    print(
        f"\n| {name} | {share:.0%} | {devices} | {held} | {texts == expected} | {changed or 'all on the devices'} |",
        end="",
    )
    assert texts == expected
    for i, n in enumerate(free):
        assert abs(estimated[i] - real[i]) <= 0.1 * real[i] + 3 * _LOGGED
        assert real[i] <= n + 3 * _LOGGED


def on_devices(buffers: Iterable[Buffer], devices: list[Device]) -> Counter[int]:
    """The bytes on each device, by its place in the list."""
    names = [each.name for each in devices]
    found: Counter[int] = Counter()
    for buffer in buffers:
        if (where := location(buffer, devices)) != HOST:
            found[names.index(where)] += buffer.n_bytes
    return found
