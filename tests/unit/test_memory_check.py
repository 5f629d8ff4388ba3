"""Settings that will not fit are refused before anything is loaded, with others that would."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from msgspec.structs import replace

from cppbatch.config import EngineConfig
from cppbatch.errors import ConfigError, EstimateFailed
from cppbatch.sizing import memory_check
from cppbatch.sizing.buffers import MAPPED, Buffer
from cppbatch.sizing.demand import memory_demands
from cppbatch.sizing.estimate import Device, Footprint, MemoryEstimate
from cppbatch.sizing.machine import free_host_memory
from cppbatch.sizing.memory_check import alternatives, check_memory, memory_shortage

GIB = 2**30

CONFIG = EngineConfig(model_path="model.gguf", n_ctx=16384, n_parallel=16)

GPU = Device("CUDA0", "a GPU", 8 * GIB, 10 * GIB)


def footprint(config: EngineConfig) -> Footprint:
    """1 MiB a cell, half of that if quantised; with layers on the GPU the cells are there."""
    size = (2**20 if config.cache_type_k == "f16" else 2**19) * config.n_ctx
    place = "CUDA0" if config.n_gpu_layers == -1 else "CPU"
    return Footprint(buffers=[Buffer("weights", MAPPED, GIB), Buffer("cells", place, size)], n_layers=8)


def survey(configs: list[EngineConfig]) -> MemoryEstimate:
    return MemoryEstimate([footprint(config) for config in configs], [GPU])


@pytest.fixture
def with_memory(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(memory_check, "estimate_memory", survey)
    monkeypatch.setattr(memory_check, "free_host_memory", lambda: 9 * GIB)
    return monkeypatch


def test_settings_that_fit_are_not_refused(with_memory: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    check_memory(replace(CONFIG, n_ctx=4096))
    assert not caplog.records


def test_a_refusal_has_the_numbers_and_the_settings_that_would_fit(with_memory: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as refused:
        check_memory(replace(CONFIG, n_gpu_layers=0))
    message = str(refused.value)
    assert "needs 16.00 GiB of the host's memory (cells 16.00 GiB), but only 9.00 GiB are free" in message
    assert "fit with -c 8192, or with -np 8 -c 8192, or with -ctk q8_0 -ctv q8_0." in message
    assert "--no-memory-check (CPPBATCH_MEMORY_CHECK=0)" in message


def test_a_gpu_that_is_too_small_is_named_and_fewer_layers_on_it_are_offered(with_memory: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"of CUDA0 .* 8\.00 GiB are free\. It would fit with -c 8192") as refused:
        check_memory(replace(CONFIG))
    assert "-ngl" not in str(refused.value)  # on the host there is not enough either
    with_memory.setattr(memory_check, "free_host_memory", lambda: 64 * GIB)
    with pytest.raises(ConfigError, match="or with -ngl 7"):
        check_memory(CONFIG)


def test_several_workers_need_it_several_times_but_share_the_file(with_memory: pytest.MonkeyPatch) -> None:
    on_host = replace(CONFIG, n_ctx=4096, n_gpu_layers=0)
    assert [(d.firm, d.mapped) for d in memory_demands(survey([on_host] * 3), 9 * GIB)] == [(12 * GIB, GIB)]
    with pytest.raises(ConfigError, match=r"memory by 3 workers .* fit with -c 2048"):
        check_memory(on_host, lambda config: [config] * 3)


def test_one_more_engine_is_compared_with_what_is_free_now(with_memory: pytest.MonkeyPatch) -> None:
    on_host = replace(CONFIG, n_gpu_layers=0)
    assert memory_shortage(replace(on_host, n_ctx=4096)) is None
    assert memory_shortage(on_host) == "it needs 16.00 GiB of the host's memory, but only 9.00 GiB are free"
    assert memory_shortage(replace(CONFIG, n_ctx=9216)) == "it needs 9.00 GiB of CUDA0, but only 8.00 GiB are free"


def test_weights_that_would_be_read_again_and_again_are_a_warning(
    with_memory: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    check_memory(replace(CONFIG, n_ctx=8704, n_gpu_layers=0))
    assert "8.50 GiB are needed in addition to 1.00 GiB of weights" in caplog.text


def test_a_failed_estimate_does_not_prevent_a_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(configs: list[EngineConfig]) -> MemoryEstimate:
        raise EstimateFailed("the process ended with code -6")

    monkeypatch.setattr(memory_check, "estimate_memory", fail)
    check_memory(CONFIG)
    assert "could not check whether the model fits into memory: the process ended with code -6" in caplog.text
    assert memory_shortage(CONFIG) is None
    assert "could not check whether another worker fits into memory: the process ended with code -6" in caplog.text


def test_a_model_that_cannot_be_opened_is_left_to_the_loading(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    damaged = MemoryEstimate([Footprint(error="it is damaged")], [])
    monkeypatch.setattr(memory_check, "estimate_memory", lambda configs: damaged)
    check_memory(CONFIG)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_device_without_memory_figures_does_not_prevent_a_start() -> None:
    silent = replace(GPU, free=0, total=0)
    assert all(demand.will_fit for demand in memory_demands(MemoryEstimate([footprint(CONFIG)], [silent]), 9 * GIB))


def test_a_margin_must_stay_free() -> None:
    estimate = MemoryEstimate([footprint(CONFIG)], [])
    firm = memory_demands(estimate, 0)[0].firm
    for margin, fits in ((0.0, True), (0.4, True), (0.6, False)):
        assert memory_demands(estimate, 2 * firm, margin=margin)[0].will_fit is fits


def test_all_that_is_offered_takes_less_and_can_be_set() -> None:
    smallest = replace(CONFIG, n_ctx=600, n_parallel=1, n_batch=64, cache_type_k="q8_0", cache_type_v="q8_0")
    assert not [flags for group in alternatives(smallest) for flags, _ in group]
    assert all(changed != CONFIG for group in alternatives(CONFIG, n_layers=4) for _, changed in group)


def test_a_container_has_the_memory_that_its_limit_leaves(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 400000\ninactive_file 200000\nactive_file 50000\n")
    assert free_host_memory(tmp_path) == 550_000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_host_memory(tmp_path) > 2**24
