"""Utilisation, memory, power and energy of NVIDIA GPUs, read from the driver with NVML (extra `cppbatch[gpu]`)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec

from cppbatch.statistic import counter, gauge

log = logging.getLogger("cppbatch.gpu")

Value = TypeVar("Value")


class GpuState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a GPU. None: the driver does not report this value for this GPU (few are available with MIG)."""

    index: int
    """NVML's number, as in nvidia-smi. llama.cpp counts only the GPUs that CUDA_VISIBLE_DEVICES names."""
    name: str
    uuid: str
    utilization: Annotated[
        float | None, gauge("Fraction of the last sample period during which a kernel was running: 0 to 1")
    ]
    """The period is at most a second."""
    memory_used_bytes: Annotated[int | None, gauge("GPU memory used by all processes")]
    memory_total_bytes: Annotated[int | None, gauge("Total GPU memory")]
    power_watts: Annotated[float | None, gauge("GPU power draw")]
    energy_joules: Annotated[float | None, counter("GPU energy consumption since the driver was loaded")]


class Gpus:
    """The GPUs of this machine, in the driver's order. Reading takes milliseconds: not for an event loop."""

    def __init__(self, nvml: Any, handles: list[Any]) -> None:
        """Called by `open`."""
        self._nvml = nvml
        self._gpus = [
            (handle, str(nvml.nvmlDeviceGetName(handle)), str(nvml.nvmlDeviceGetUUID(handle))) for handle in handles
        ]

    @classmethod
    def open(cls) -> Gpus | None:
        """None if nothing can be read (no NVIDIA driver, GPU or nvidia-ml-py); logs the reason."""
        try:
            import pynvml as nvml
        except ImportError:
            log.info("no GPU metrics: nvidia-ml-py is not installed (pip install 'cppbatch[gpu]')")
            return None
        try:
            nvml.nvmlInit()
            handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
            return cls(nvml, handles) if handles else None
        except nvml.NVMLError as error:
            log.info("no GPU metrics: %s", error)
            return None

    def read(self) -> list[GpuState]:
        """Their current state. Values that cannot be read are None."""
        return [self._read(index, *gpu) for index, gpu in enumerate(self._gpus)]

    def _read(self, index: int, handle: Any, name: str, uuid: str) -> GpuState:
        nvml = self._nvml
        rates = self._get(nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = self._get(nvml.nvmlDeviceGetMemoryInfo, handle)
        milliwatts = self._get(nvml.nvmlDeviceGetPowerUsage, handle)
        millijoules = self._get(nvml.nvmlDeviceGetTotalEnergyConsumption, handle)
        return GpuState(
            index=index,
            name=name,
            uuid=uuid,
            utilization=None if rates is None else rates.gpu / 100,
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=None if memory is None else int(memory.total),
            power_watts=None if milliwatts is None else milliwatts / 1000,
            energy_joules=None if millijoules is None else millijoules / 1000,
        )

    def _get(self, function: Callable[[Any], Value], handle: Any) -> Value | None:
        try:
            return function(handle)
        except self._nvml.NVMLError:  # not supported, no permission, or the GPU is lost
            return None


class GpuSampler:
    """A context manager that reads the GPUs every `interval` seconds, on its own thread.

    Without a GPU it does nothing. A hanging driver blocks only this thread.
    """

    def __init__(
        self, on_sample: Callable[[list[GpuState]], object] = lambda sample: None, interval: float = 1.0
    ) -> None:
        """`on_sample`: called on that thread with each sample."""
        self.latest: list[GpuState] = []
        """The last sample; empty without a GPU, and before the first sample."""
        self._on_sample, self._interval = on_sample, interval
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-sampler", daemon=True)

    def __enter__(self) -> GpuSampler:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()

    def _run(self) -> None:
        if gpus := Gpus.open():
            while not self._ended.is_set():
                self.latest = gpus.read()
                self._on_sample(self.latest)
                self._ended.wait(self._interval)
