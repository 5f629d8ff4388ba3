"""What a placement is chosen by: matrix products are timed on the CPU and on a device, once. The device is an RPC
worker of this machine."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from cppbatch.config import EngineConfig
from cppbatch.sizing import device_times as module
from cppbatch.sizing.device_times import CPU, ROWS, device_times
from cppbatch.sizing.estimate import Device, estimate_memory
from tests.support.rpc_workers import RpcWorker


@pytest.fixture(autouse=True)
def small(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_BYTES", 4 << 20)


def test_each_device_is_timed_once(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RpcWorker() as worker:
        config = EngineConfig(str(tiny_llama), rpc=(worker.endpoint,))
        devices = estimate_memory([config]).devices
        times = device_times(config, devices, ["Q8_0", "F16"], n_threads=1)
        assert times
        assert times.keys() == {CPU, devices[0].name}
        for each in times.values():
            assert each.ms.keys() == {"Q8_0", "F16"}
            assert all(tuple(by_rows) == ROWS and min(by_rows.values()) > 0 for by_rows in each.ms.values())
            assert each.product_ms("Q8_0", 4096) == pytest.approx(8 * each.product_ms("Q8_0", 512))
            assert each.round_trip_ms > 0
            assert each.copy_ms > 0
        monkeypatch.setattr(module, "_measure", lambda _: pytest.fail("it is known"))
        assert device_times(config, devices, ["F16"], n_threads=1) == times


def test_a_device_that_cannot_be_timed_is_a_warning(tiny_llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    lost = Device("CUDA7", "a card that is gone", 1 << 30, 1 << 30)
    with caplog.at_level(logging.WARNING):
        assert device_times(EngineConfig(str(tiny_llama)), [lost], ["F16"], n_threads=1) is None
    assert "the speed of CPU and CUDA7 cannot be measured: device 'CUDA7' not found; available:" in caplog.text
