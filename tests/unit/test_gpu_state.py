"""The figures of GPUs: units, missing values, and machines without GPU, driver or nvidia-ml-py."""

from __future__ import annotations

import asyncio
from time import monotonic, sleep

import pytest
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client.parser import text_string_to_metric_families

from cppbatch.bench.resource_usage import ResourceUsage
from cppbatch.cluster.engines.client import Health, WorkerState
from cppbatch.engine.observe.metrics import EngineStats
from cppbatch.errors import EngineClosed
from cppbatch.gpu_state import Gpus, GpuSampler, GpuState
from cppbatch.server.app import create_app
from tests.support.fake_nvml import FakeNvml, install

WHOLE = GpuState(
    index=0,
    name="GPU number 0",
    uuid="GPU-0",
    utilization=0.75,
    memory_used_bytes=2**30,
    memory_total_bytes=2**32,
    power_watts=250.5,
    energy_joules=1000,
)
PART = GpuState(
    index=1,
    name="GPU number 1",
    uuid="GPU-1",
    utilization=None,
    memory_used_bytes=2**30,
    memory_total_bytes=2**32,
    power_watts=None,
    energy_joules=None,
)

WITHOUT = pytest.mark.parametrize(
    "nvml", [None, FakeNvml(fails=True), FakeNvml(n=0)], ids=["no nvidia-ml-py", "no driver", "no GPU"]
)


class NoStats:
    """An engine with a worker that does not answer."""

    def health(self) -> Health:
        return Health(status="ok")

    async def workers(self) -> list[WorkerState]:
        return []

    def scaling(self) -> None:
        return None

    async def stats(self) -> EngineStats:
        raise EngineClosed("no worker answers")


def wait_until(sampler: GpuSampler) -> None:
    end = monotonic() + 10
    while not sampler.latest:
        assert monotonic() < end
        sleep(0.005)


def test_figures_have_base_units_and_those_that_the_driver_does_not_know_are_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, FakeNvml())
    gpus = Gpus.open()
    assert gpus
    assert gpus.read() == [WHOLE, PART]


@WITHOUT
def test_without_a_gpu_the_figures_are_absent_without_an_error(
    nvml: FakeNvml | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, nvml)
    assert Gpus.open() is None
    with ResourceUsage() as usage, GpuSampler() as sampler:
        sleep(0.05)
    assert (usage.gpu_percent, sampler.latest) == (None, [])


def test_the_sampler_reads_on_its_own_thread_until_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()
    install(monkeypatch, nvml)
    with GpuSampler(interval=0.001) as sampler:
        wait_until(sampler)
    sleep(0.05)
    n_read = nvml.n_read
    sleep(0.05)
    assert nvml.n_read == n_read > 0
    assert sampler.latest == [WHOLE, PART]


def test_benchmarks_take_the_mean_of_the_gpus_that_have_the_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeNvml())
    with ResourceUsage() as usage:
        sleep(0.05)
    assert usage.gpu_percent == 75


async def test_metrics_and_stats_have_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeNvml())
    async with TestClient(TestServer(create_app(NoStats()))) as http:  # type: ignore[arg-type]
        for _ in range(500):
            async with http.get("/stats") as answer:
                if gpus := (await answer.json())["gpus"]:
                    break
            await asyncio.sleep(0.01)
        async with http.get("/metrics") as answer:
            page = await answer.text()
    assert (gpus[0]["utilization"], gpus[0]["power_watts"], gpus[1]["power_watts"]) == (0.75, 250.5, None)
    seen = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name.startswith("cppbatch_gpu_")
    }
    first, second = ("0", "GPU number 0"), ("1", "GPU number 1")
    assert seen == {
        ("cppbatch_gpu_utilization", *first): 0.75,
        ("cppbatch_gpu_memory_used_bytes", *first): 2**30,
        ("cppbatch_gpu_memory_used_bytes", *second): 2**30,
        ("cppbatch_gpu_memory_total_bytes", *first): 2**32,
        ("cppbatch_gpu_memory_total_bytes", *second): 2**32,
        ("cppbatch_gpu_power_watts", *first): 250.5,
        ("cppbatch_gpu_energy_joules_total", *first): 1000,
    }


@WITHOUT
async def test_a_server_without_a_gpu_says_so_by_an_empty_list(
    nvml: FakeNvml | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, nvml)
    async with TestClient(TestServer(create_app(NoStats()))) as http:  # type: ignore[arg-type]
        async with http.get("/stats") as answer:
            assert (await answer.json())["gpus"] == []
        async with http.get("/metrics") as answer:
            assert "cppbatch_gpu" not in await answer.text()
