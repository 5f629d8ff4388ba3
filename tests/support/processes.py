"""Waiting for the end of processes that are not children of the test."""

from __future__ import annotations

import time
from collections.abc import Iterable

import psutil


def left_after(seconds: float, processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that still run after `seconds`. One that only waits to be reaped has ended."""
    end = time.monotonic() + seconds
    while running := [each for each in processes if _runs(each)]:
        if time.monotonic() > end:
            return running
        time.sleep(0.01)
    return []


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
