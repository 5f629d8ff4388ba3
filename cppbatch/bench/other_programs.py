"""Which other programs keep the cores of this machine busy."""

from __future__ import annotations

import os
import time
from typing import NamedTuple

import psutil

from cppbatch.engine.compute_threads import busy_cores, read_cpu_times

_MIN_SHARE = 0.1  # of a core, from which on a program is named


class BusyProgram(NamedTuple):
    """A process and the cores that it used, on average."""

    pid: int
    name: str
    cores: float


class OtherPrograms(NamedTuple):
    """What other programs used for a while."""

    cores: float
    """Of those that this process may use."""
    busiest: list[BusyProgram]
    """At most three, the busiest first."""


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
    busiest = sorted((each for each in used if each.cores >= _MIN_SHARE), key=lambda each: -each.cores)
    return OtherPrograms(busy_cores(before, after, elapsed), busiest[:3])


def _seconds_of_each() -> dict[int, BusyProgram]:
    """The CPU seconds so far of every process that may be read, in place of cores."""
    found = {}
    for process in psutil.process_iter(["cpu_times", "name"]):
        if (times := process.info["cpu_times"]) and process.pid != os.getpid():
            found[process.pid] = BusyProgram(process.pid, process.info["name"] or "?", times.user + times.system)
    return found
