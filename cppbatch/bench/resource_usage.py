"""Measuring the use of CPU and GPUs."""

from __future__ import annotations

from statistics import mean
from time import perf_counter

import psutil

from cppbatch.config import available_threads
from cppbatch.gpu_state import GpuSampler, GpuState

_SAMPLE_INTERVAL_S = 0.1  # the driver does not update the figure more often


class ResourceUsage:
    """A context manager that sets its figures at the end.

    `seconds`: its duration.
    `cpu_percent`: this process's share of the cores that it may use. Threads that spin count as busy.
    `gpu_percent`: the share of time with a running kernel, the mean of all NVIDIA GPUs. None: no GPU, no `pynvml`,
    or no figure from the driver (parts of a GPU, MIG, have none).
    """

    seconds: float
    cpu_percent: float
    gpu_percent: float | None

    def __enter__(self) -> ResourceUsage:
        self._samples: list[float] = []
        self._gpus = GpuSampler(self._add, _SAMPLE_INTERVAL_S)
        self._gpus.__enter__()
        self._cpu, self._began = _cpu_seconds(), perf_counter()
        return self

    def __exit__(self, *exc: object) -> None:
        self.seconds = perf_counter() - self._began
        self.cpu_percent = 100 * (_cpu_seconds() - self._cpu) / self.seconds / available_threads()
        self._gpus.__exit__(*exc)
        self.gpu_percent = 100 * mean(self._samples) if self._samples else None

    def _add(self, gpus: list[GpuState]) -> None:
        self._samples += [gpu.utilization for gpu in gpus if gpu.utilization is not None]


def _cpu_seconds() -> float:
    times = psutil.Process().cpu_times()
    return float(times.user + times.system)
