"""How busy the machine was."""

from __future__ import annotations

import logging
import threading
from time import perf_counter
from typing import Any

import psutil

from cppbatch.config import available_threads

log = logging.getLogger("cppbatch.bench")

_EVERY_S = 0.1  # the driver itself looks at a GPU no more often


class ResourceUsage:
    """A context manager; the figures are there when it is left.

    `cpu_percent`: of the cores that this process may use, by this process; threads that spin count as working.
    `gpu_percent`: of the time, the mean of all GPUs that NVIDIA's library shows; None: none, no `pynvml`,
    or a driver that does not tell (parts of a GPU, MIG, have no such figure).
    """

    cpu_percent: float
    gpu_percent: float | None

    def __enter__(self) -> ResourceUsage:
        self._gpus = _gpus()
        self._seen: list[float] = []
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        if self._gpus:
            self._watcher.start()
        self._cpu, self._began = _cpu_seconds(), perf_counter()
        return self

    def __exit__(self, *exc: object) -> None:
        seconds = perf_counter() - self._began
        self.cpu_percent = 100 * (_cpu_seconds() - self._cpu) / seconds / available_threads()
        self._over.set()
        if self._gpus:
            self._watcher.join()
        self.gpu_percent = sum(self._seen) / len(self._seen) if self._seen else None

    def _watch(self) -> None:
        import pynvml

        while not self._over.wait(_EVERY_S):
            try:
                busy = [pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu for gpu in self._gpus]
            except pynvml.NVMLError as error:
                log.warning("the use of GPUs is not known: %s", error)
                self._seen.clear()
                return
            self._seen.append(sum(busy) / len(busy))


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
    except pynvml.NVMLError:  # no driver here
        return []
