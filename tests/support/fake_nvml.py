"""A `pynvml` without a driver: a GPU, and a part of one (MIG), for which the driver reports little."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class NVMLError(Exception):
    """The base class of NVML's errors."""


class FakeNvml(ModuleType):
    """Counts how often the GPUs were read; `fails` makes the start fail, as without a driver."""

    NVMLError = NVMLError

    def __init__(self, *, fails: bool = False, n: int = 2) -> None:
        super().__init__("pynvml")
        self.fails, self.n, self.n_read = fails, n, 0
        self.joules = 1000.0

    def nvmlInit(self) -> None:
        if self.fails:
            raise NVMLError("NVML Shared Library Not Found")

    def nvmlDeviceGetCount(self) -> int:
        return self.n

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:
        return f"GPU number {handle}"

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=2**30, total=4 * 2**30)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        self.n_read += 1
        self._supported(handle)
        return SimpleNamespace(gpu=75, memory=10)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        self._supported(handle)
        return 250_500  # mW

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        self._supported(handle)
        return int(self.joules * 1000)  # mJ

    @staticmethod
    def _supported(handle: int) -> None:
        if handle:
            raise NVMLError("Not Supported")


def install(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml | None) -> None:
    """Makes `import pynvml` give this module; None: as if nvidia-ml-py were not installed."""
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # None: ImportError
