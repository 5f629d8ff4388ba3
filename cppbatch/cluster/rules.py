"""Rules, without I/O, for the number of workers and for their times."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from cppbatch.errors import ConfigError
from cppbatch.retries import Pauses

_MAX_WAIT_S = 5.0  # start a worker if a request waits longer for its first token, while requests are queued
_QUEUE_DELAY_S = 2.0  # or if the queue is long for this time
_PAUSES = Pauses(30.0, 600.0)  # after a start that fails or is prevented by memory

Decision = Literal["start", "drain"]


class Load(NamedTuple):
    """The current load of the workers."""

    in_flight: int
    """Unfinished requests."""
    waiting: int
    """Unfinished requests that no worker is computing yet."""
    longest_wait: float
    """Seconds since the arrival of the oldest request without output; 0.0 if there is none."""


class ScalingRule:
    """Starts a worker while requests wait, and drains one while fewer workers would suffice.

    A worker is started when a request has waited for 5 s, or when the queue has been longer than half of `n_parallel`
    for 2 s. One is drained when half of the others' sequences have sufficed for `downscale_delay` seconds. Each change
    resets both times, so that the effect of a new worker is visible before the next one is started.
    """

    def __init__(self, *, min_workers: int, max_workers: int, n_parallel: int, downscale_delay: float) -> None:
        self.min_workers = min_workers
        self.max_workers = max_workers
        self.downscale_delay = downscale_delay
        self._n_parallel = n_parallel
        self._max_queue = n_parallel // 2
        self._capacity = n_parallel  # concurrent sequences per worker: fewer than n_parallel if they are long
        self._waiting_since: float | None = None
        self._long_queue_since: float | None = None
        self._quiet_since: float | None = None
        self._not_before = 0.0
        self._n_failures = 0  # consecutive

    def decide(self, now: float, load: Load, running: int) -> Decision | None:
        """The action for this load on this number of running workers. Call it at least every second."""
        self._waiting_since = _since(self._waiting_since, now, load.waiting > 0)
        self._long_queue_since = _since(self._long_queue_since, now, load.waiting > self._max_queue)
        is_quiet = load.waiting == 0 and 2 * load.in_flight <= (running - 1) * self._capacity
        self._quiet_since = _since(self._quiet_since, now, is_quiet)
        if running < self.max_workers and now >= self._not_before and self._is_overloaded(now, load):
            self._capacity = max(1, min(self._n_parallel, (load.in_flight - load.waiting) // running))
            return "start"
        if running > self.min_workers and _lasts(self._quiet_since, now, self.downscale_delay):
            self._begin_again()
            return "drain"
        return None

    def _is_overloaded(self, now: float, load: Load) -> bool:
        has_waited = load.longest_wait >= _MAX_WAIT_S and _lasts(self._waiting_since, now, _MAX_WAIT_S)
        return has_waited or _lasts(self._long_queue_since, now, _QUEUE_DELAY_S)

    def started(self) -> None:
        """Called when the worker requested by `decide` is running."""
        self._begin_again()
        self._n_failures = 0

    def not_started(self, now: float) -> float:
        """Called when it does not fit into memory or could not be loaded. Returns the seconds until the next
        attempt."""
        self._n_failures += 1
        pause = _PAUSES.after(self._n_failures)
        self._not_before = now + pause
        return pause

    def _begin_again(self) -> None:
        self._waiting_since = self._long_queue_since = self._quiet_since = None


def _since(since: float | None, now: float, is_so: bool) -> float | None:
    """Since when it has held without interruption; None: it does not hold."""
    if not is_so:
        return None
    return now if since is None else since


def _lasts(since: float | None, now: float, seconds: float) -> bool:
    return since is not None and now - since >= seconds


_MIN_STEP_TIMEOUT_S = 2.0  # an idle worker has one heartbeat per second


def check_times(step_timeout: float, sleep_idle_seconds: float, *, prefix: str = "", separator: str = "_") -> None:
    """Checks the arguments of `EngineProcess`, or with `prefix` and `separator` the flags of the same names.

    Raises `ConfigError`.
    """
    if not step_timeout >= _MIN_STEP_TIMEOUT_S:  # also false for NaN
        name = f"{prefix}step{separator}timeout"
        raise ConfigError(f"{name} is {step_timeout:g} s; it must be at least {_MIN_STEP_TIMEOUT_S:g}")
    if sleep_idle_seconds != -1 and not 0 < sleep_idle_seconds < math.inf:
        name = f"{prefix}sleep{separator}idle{separator}seconds"
        raise ConfigError(f"{name} is {sleep_idle_seconds:g}; it must be more than 0, or -1 for never")
