"""Measures the use of CPU and GPUs."""

from __future__ import annotations

import os
import time
from statistics import mean
from time import perf_counter
from typing import NamedTuple

import psutil

from cppbatch.config import available_threads
from cppbatch.engine.compute_threads import busy_cores, read_cpu_times
from cppbatch.gpu_state import GpuSampler, GpuState


class ResourceUsage:
    """A context manager that sets its figures at the end.

    `seconds`: its duration.
    `cpu_percent`: this process's share of the cores that it may use. Spinning threads count as busy.
    `gpu_percent`: the share of time with a running kernel, the mean of all NVIDIA GPUs. None without a GPU, without
    `pynvml`, or if the driver does not report it, as for MIG instances.
    """

    seconds: float
    cpu_percent: float
    gpu_percent: float | None

    def __enter__(self) -> ResourceUsage:
        self._samples: list[float] = []
        self._gpus = GpuSampler(self._add, 0.1)
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


# --- other programs --------------------------------------------------------------------------------------------------


class BusyProgram(NamedTuple):
    """A process and the mean number of cores that it used."""

    pid: int
    name: str
    cores: float


class OtherPrograms(NamedTuple):
    """The CPU use of other programs over an interval."""

    cores: float
    """CPU cores kept busy, of those that this process may use."""
    busiest: list[BusyProgram]
    """At most three, busiest first."""


def watch_other_programs(seconds: float) -> OtherPrograms:
    """Watches all processes for `seconds`."""
    began, before, of_each = time.perf_counter(), read_cpu_times(), _seconds_of_each()
    time.sleep(seconds)
    after, elapsed = read_cpu_times(), time.perf_counter() - began
    used = [
        BusyProgram(process.pid, process.name, (process.cores - of_each[process.pid].cores) / elapsed)
        for process in _seconds_of_each().values()
        if process.pid in of_each
    ]
    # programs that use a tenth of a core are named
    busiest = sorted((each for each in used if each.cores >= 0.1), key=lambda each: -each.cores)
    return OtherPrograms(busy_cores(before, after, elapsed), busiest[:3])


def _seconds_of_each() -> dict[int, BusyProgram]:
    """All readable processes, with their CPU seconds so far instead of cores."""
    found = {}
    for process in psutil.process_iter(["cpu_times", "name"]):
        if (times := process.info["cpu_times"]) and process.pid != os.getpid():
            found[process.pid] = BusyProgram(process.pid, process.info["name"] or "?", times.user + times.system)
    return found
