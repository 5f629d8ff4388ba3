"""-np and -c that are not given fit the memory with a margin, and are never too small to be useful."""

from __future__ import annotations

import itertools
from collections.abc import Collection

import pytest
from msgspec.structs import replace

from cppbatch.config import EngineConfig
from cppbatch.errors import ConfigError, EstimateFailed
from cppbatch.sizing import memory_check
from cppbatch.sizing.buffers import MAPPED, Buffer
from cppbatch.sizing.demand import MARGIN, memory_demands
from cppbatch.sizing.estimate import Device, Footprint, MemoryEstimate
from cppbatch.sizing.memory_check import check_planned, first_ample
from cppbatch.sizing.sizes import size_candidates

GIB, MIB = 2**30, 2**20
CONFIG = EngineConfig("model.gguf")
LONG = 131_072  # the model's context length


def sizes(
    given: Collection[str] = (), config: EngineConfig = CONFIG, *, n_ctx_train: int = LONG, on_gpu: bool = False
) -> list[tuple[int, int]]:
    candidates = size_candidates(config, set(given), n_ctx_train=n_ctx_train, on_gpu=on_gpu)
    return [(each.n_parallel, each.n_ctx) for each in candidates]


def test_a_cpu_gets_16_sequences_with_1024_cells_each_then_halves() -> None:
    assert sizes() == [(16, 16384), (16, 8192), (8, 4096), (4, 2048), (2, 2048), (1, 2048)]


def test_a_gpu_gets_32_sequences_and_a_single_text_may_fill_the_models_context_length() -> None:
    assert sizes(on_gpu=True)[:4] == [(32, LONG), (32, LONG // 2), (32, 32768), (32, 16384)]
    assert sizes(on_gpu=True, n_ctx_train=8192)[0] == (32, 32768)
    assert sizes(on_gpu=True, n_ctx_train=2**20)[0] == (32, LONG)


def test_given_settings_are_kept() -> None:
    assert sizes(("n_parallel", "n_ctx"), replace(CONFIG, n_parallel=3, n_ctx=700)) == [(3, 700)]
    assert sizes(("n_parallel",), replace(CONFIG, n_parallel=4)) == [(4, 16384), (4, 8192), (4, 4096), (4, 2048)]
    assert sizes(("n_parallel",), replace(CONFIG, n_parallel=64)) == [(64, 65536), (64, 32768)]
    assert sizes(("n_ctx",), replace(CONFIG, n_ctx=2048)) == [(8, 2048), (4, 2048), (2, 2048), (1, 2048)]


def test_a_single_sequence_may_fill_the_models_context_length() -> None:
    one = replace(CONFIG, n_parallel=1)
    assert sizes(("n_parallel",), one, n_ctx_train=8192) == [(1, 8192), (1, 4096), (1, 2048)]
    assert sizes(("n_parallel",), one)[:2] == [(1, 32768), (1, 16384)]
    assert sizes(("n_parallel",), one, on_gpu=True)[0] == (1, LONG)
    assert sizes(("n_parallel",), one, n_ctx_train=128) == [(1, 2048)]


@pytest.mark.parametrize("n_batch", [1, 8, 2048])
@pytest.mark.parametrize("n_ctx_train", [0, 128, 8192, LONG])
@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("given", [set(), {"n_ctx"}, {"n_parallel"}])
def test_no_size_is_useless_and_each_is_smaller_than_the_one_before(
    given: set[str], on_gpu: bool, n_ctx_train: int, n_batch: int
) -> None:
    config = replace(CONFIG, n_batch=n_batch, n_parallel=min(n_batch, 16))
    found = sizes(given, config, n_ctx_train=n_ctx_train, on_gpu=on_gpu)
    assert all(1 <= n <= n_batch and cells // n >= 512 for n, cells in found)
    assert all(b[0] <= a[0] and b[1] <= a[1] and a != b for a, b in itertools.pairwise(found))
    assert "n_ctx" in given or all(cells >= 2048 for _, cells in found)


def test_without_fit_the_largest_sizes_are_the_only_ones() -> None:
    off = replace(CONFIG, fit_params=False)
    assert sizes(config=off) == [(16, 16384)]
    assert sizes(config=off, on_gpu=True) == [(32, LONG)]
    assert sizes(("n_parallel",), replace(off, n_parallel=4)) == [(4, 16384)]


def test_no_chosen_size_has_fewer_cells_than_fit_ctx() -> None:
    least = replace(CONFIG, fit_ctx=4096)
    assert sizes(config=least) == [(16, 16384), (16, 8192), (8, 4096), (4, 4096), (2, 4096), (1, 4096)]
    assert sizes(config=replace(CONFIG, fit_ctx=20_000))[0] == (16, 20_000)
    assert sizes(("n_ctx",), replace(least, n_ctx=512)) == [(2, 512), (1, 512)]


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Free bytes of the host and the GPU. A cell takes a MiB of the GPU, or of the host with `n_gpu_layers=0`, and
    weights are a GiB."""
    bytes_free = {"host": 64 * GIB, "CUDA0": 0}

    def estimate(configs: list[EngineConfig]) -> MemoryEstimate:
        devices = [Device("CUDA0", "a GPU", bytes_free["CUDA0"], bytes_free["CUDA0"])] if bytes_free["CUDA0"] else []
        return MemoryEstimate([footprint(config, on_gpu=bool(devices)) for config in configs], devices)

    monkeypatch.setattr(memory_check, "estimate_memory", estimate)
    monkeypatch.setattr(memory_check, "free_host_memory", lambda: bytes_free["host"])
    return bytes_free


def footprint(config: EngineConfig, *, on_gpu: bool) -> Footprint:
    place, weights = ("CUDA0", "CUDA0") if on_gpu else ("CPU", MAPPED)
    return Footprint(buffers=[Buffer("weights", weights, GIB), Buffer("cells", place, config.n_ctx * MIB)])


def chosen(*, on_gpu: bool = False, workers: int = 1, config: EngineConfig = CONFIG) -> tuple[int, int]:
    candidates = size_candidates(config, set(), n_ctx_train=LONG, on_gpu=on_gpu)
    config = first_ample(candidates, lambda one: [one] * workers).config
    return config.n_parallel, config.n_ctx


def test_ample_memory_gets_the_largest(free: dict[str, int]) -> None:
    assert chosen() == (16, 16384)


def test_a_tenth_of_the_memory_stays_free(free: dict[str, int]) -> None:
    free["host"] = round(16 * GIB / (1 - MARGIN)) + 10
    assert chosen() == (16, 16384)
    free["host"] -= 20
    assert chosen() == (16, 8192)


def test_the_weights_stay_in_memory_too(free: dict[str, int]) -> None:
    free["host"] = 5 * GIB - 1  # 4 for the cells and 1 for the weights are too many
    assert chosen() == (4, 2048)


def test_a_gpu_is_filled_up_to_the_margin(free: dict[str, int]) -> None:
    free["CUDA0"] = 40 * GIB
    assert chosen(on_gpu=True) == (32, 32768)
    free["CUDA0"] = 30 * GIB
    assert chosen(on_gpu=True) == (32, 16384)


def test_fit_target_is_the_margin_of_the_devices_or_without_a_device_of_the_host(free: dict[str, int]) -> None:
    free["host"] = 17 * GIB
    for mib, cells in ((1024, 16384), (1025, 8192)):
        assert chosen(config=replace(CONFIG, fit_target=(mib,)))[1] == cells
    free["CUDA0"] = 33 * GIB + 512 * MIB
    for mib, cells in ((512, 32768), (513, 16384)):
        assert chosen(on_gpu=True, config=replace(CONFIG, fit_target=(mib,)))[1] == cells


def test_each_device_has_its_own_fit_target_and_others_a_tenth() -> None:
    devices = [Device(f"CUDA{i}", "a GPU", 10 * GIB, 10 * GIB) for i in range(3)]
    buffers = [Buffer("weights", each.name, GIB) for each in devices]
    estimate = MemoryEstimate([Footprint(buffers=buffers)], devices)
    margins = [each.margin for each in memory_demands(estimate, 20 * GIB, margin=(1024, 2048))]
    assert margins == [MARGIN, 0.1, 0.2, MARGIN]


def test_workers_share_the_memory(free: dict[str, int]) -> None:
    free["host"] = 36 * GIB
    assert (chosen(), chosen(workers=4)) == ((16, 16384), (16, 8192))


def test_where_nothing_fits_the_smallest_is_refused_with_its_numbers(free: dict[str, int]) -> None:
    free["host"] = GIB
    candidates = size_candidates(CONFIG, set(), n_ctx_train=LONG, on_gpu=False)
    planned = first_ample(candidates)
    assert (planned.config.n_parallel, planned.config.n_ctx) == (1, 2048)
    with pytest.raises(ConfigError, match=r"-c 2048 -np 1 needs 2\.00 GiB"):
        check_planned(planned)


def test_without_an_estimate_the_largest_is_taken_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(configs: list[EngineConfig]) -> MemoryEstimate:
        raise EstimateFailed("the process ended with code -6")

    monkeypatch.setattr(memory_check, "estimate_memory", fail)
    assert chosen() == (16, 16384)
    assert "could not check whether the model fits into memory: the process ended with code -6" in caplog.text
