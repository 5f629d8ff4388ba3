"""Measuring the use of CPU and GPUs."""

from __future__ import annotations

import logging
import threading
from time import perf_counter
from typing import Any

import psutil

from cppbatch.config import available_threads

log = logging.getLogger("cppbatch.bench")

_SAMPLE_INTERVAL_S = 0.1  # the driver does not update the figure more often


class ResourceUsage:
    """A context manager that sets its figures at the end.

    `cpu_percent`: this process's share of the cores that it may use. Threads that spin count as busy.
    `gpu_percent`: the share of time with a running kernel, the mean of all NVIDIA GPUs. None: no GPU, no `pynvml`,
    or no figure from the driver (parts of a GPU, MIG, have none).
    """

    cpu_percent: float
    gpu_percent: float | None

    def __enter__(self) -> ResourceUsage:
        self._gpus = _gpus()
        self._samples: list[float] = []
        self._ended = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        if self._gpus:
            self._sampler.start()
        self._cpu, self._began = _cpu_seconds(), perf_counter()
        return self

    def __exit__(self, *exc: object) -> None:
        seconds = perf_counter() - self._began
        self.cpu_percent = 100 * (_cpu_seconds() - self._cpu) / seconds / available_threads()
        self._ended.set()
        if self._gpus:
            self._sampler.join()
        self.gpu_percent = sum(self._samples) / len(self._samples) if self._samples else None

    def _sample(self) -> None:
        import pynvml

        while not self._ended.wait(_SAMPLE_INTERVAL_S):
            try:
                busy = [pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu for gpu in self._gpus]
            except pynvml.NVMLError as error:
                log.warning("the use of GPUs is not known: %s", error)
                self._samples.clear()
                return
            self._samples.append(sum(busy) / len(busy))


def _cpu_seconds() -> float:
    times = psutil.Process().cpu_times()
    return float(times.user + times.system)


def _gpus() -> list[Any]:
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
        return [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:  # no driver
        return []
