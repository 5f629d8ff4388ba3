"""The number of compute threads per step: one per core, and fewer while other programs keep cores busy.

llama.cpp's compute threads wait for each other many times in a step. If another program uses a core, the thread on that
core is late and the others spin. Measured on two cores, Q4_0, 16 rows, ms per step (medians of three runs): 14.3
undisturbed; next to a busy program 31.9 with two threads (mean 50, because some steps take 150) and 25.6 with one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import NamedTuple

import psutil

from cppbatch.config import EngineConfig, cpus_of_mask, cpus_of_range, setting_name
from cppbatch.errors import ConfigError

log = logging.getLogger("cppbatch.engine")

_INTERVAL_S = 0.5  # between two readings; one takes 0.1 ms
_BUSY_CORES = 0.6  # give up a thread if other programs use at least this many cores
_QUIET_CORES = 0.3  # take it back below this, in two consecutive readings: one thread too many costs most
_LONG_S = 2.0  # a quiet reading over more than this is worth two: a step of a long prompt, or a time without steps
_BUSY_CORES_IN_LOAD = 0.8  # while the model is loaded: a server's own start takes half a core


class CpuTimes(NamedTuple):
    """Seconds since an arbitrary point in time."""

    all_programs: float
    """Summed over all cores that this process may use."""
    this_process: float


class ComputeThreads:
    """The number of compute threads for the next step.

    Example: on 2 cores, a compiler takes one of them; within half a second, steps use one thread, and two again once it
    has ended. An engine loaded meanwhile starts with one. A thread is given up only for what runs beside steps: a
    client that was busy before its request usually waits for the answer now.
    """

    def __init__(
        self,
        most: int,
        n_cpus: int,
        *,
        read: Callable[[], CpuTimes] | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """`most`: threads on an idle machine, until `limit` changes it. `n_cpus`: logical CPUs that this
        process may use. `read`, `clock`: for tests."""
        self._most, self._n_cpus = most, n_cpus
        self._read, self._clock = read or read_cpu_times, clock
        self._now = self._free_before = most
        self._interval_s, self._busy_cores = 0.1, _BUSY_CORES_IN_LOAD  # the first reading: while the model is loaded
        self._lent = 0
        self._at, self._times = clock(), self._read()

    @contextmanager
    def lent(self, n: int) -> Iterator[None]:
        """Reduces steps by `n` threads, to at least one, while another computation of this process uses them."""
        self._lent = n
        try:
            yield
        finally:
            self._lent = 0

    def limit(self, most: int) -> None:
        """Sets the maximum threads of steps."""
        self._most, self._now, self._free_before = most, min(most, self._now), most

    def now(self) -> int:
        """The number of threads for a step that starts now."""
        now = self._clock()
        if now - self._at < self._interval_s:
            return max(1, self._now - self._lent)
        times, seconds = self._read(), now - self._at
        busy = busy_cores(self._times, times, seconds)
        fewest, free = (
            max(1, min(self._most, self._n_cpus - int(busy + 1 - limit))) for limit in (self._busy_cores, _QUIET_CORES)
        )
        is_long = seconds > _LONG_S
        had_steps = times.this_process - self._times.this_process > 0.1 * seconds
        if fewest < self._now:
            self._now = fewest if had_steps else self._now
        else:
            self._now = max(self._now, free if is_long else min(free, self._free_before))
        self._free_before = free
        self._interval_s, self._busy_cores = _INTERVAL_S, _BUSY_CORES
        self._at, self._times = now, times
        return max(1, self._now - self._lent)


def busy_cores(before: CpuTimes, after: CpuTimes, seconds: float) -> float:
    """The average number of cores used by other programs between two readings."""
    others = after.all_programs - before.all_programs - (after.this_process - before.this_process)
    return max(0.0, others / seconds)


def use_cpus(config: EngineConfig) -> None:
    """Limits the calling thread, and the compute threads that llama.cpp starts for it, to the cores of `cpu_mask` and
    `cpu_range`, if any. Raises `ConfigError` if this process may use none of them."""
    wanted = cpus_of_mask(config.cpu_mask) | cpus_of_range(config.cpu_range)
    if not wanted:
        return
    if not hasattr(os, "sched_setaffinity"):
        log.warning("%s has no effect on this system", setting_name("cpu_mask"))
        return
    usable = usable_cpus()
    if not wanted & usable:
        raise ConfigError(
            f"{setting_name('cpu_mask')} and {setting_name('cpu_range')} name none of the cores that this process may "
            f"use: {', '.join(map(str, sorted(usable)))}"
        )
    os.sched_setaffinity(0, wanted & usable)


def usable_cpus() -> set[int]:
    """The logical CPUs that this process may use."""
    return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def read_cpu_times() -> CpuTimes:
    """The times until now. Programs of lower priority (nice) count: next to one, one thread was faster than two."""
    usable = usable_cpus()
    of_each = psutil.cpu_times(percpu=True)
    busy = sum(
        times.user + times.system + getattr(times, "nice", 0.0) for i, times in enumerate(of_each) if i in usable
    )
    own = psutil.Process().cpu_times()
    return CpuTimes(busy, own.user + own.system)
