"""Decides when a group of workers gets one more, and when one less. No process, no clock: the caller tells the time."""

from __future__ import annotations

from typing import Literal, NamedTuple

_MAX_WAIT_S = 5.0  # a request that waits longer for its first token, while requests wait, starts a worker
_QUEUE_DELAY_S = 2.0  # so does a long queue that lasts so long
_FIRST_PAUSE_S, _MAX_PAUSE_S = 30.0, 600.0  # after a start that memory forbids, or that fails

Decision = Literal["start", "drain"]


class Load(NamedTuple):
    """What the workers have to do now."""

    in_flight: int
    """Unfinished requests."""
    waiting: int
    """Those of them that no worker computes yet."""
    longest_wait: float
    """Seconds since the oldest request without any output arrived; 0.0 if there is none."""


class ScalingRule:
    """Starts a worker while requests wait, and drains one while fewer workers would do.

    A worker is started when a request has waited for 5 s, or when the queue has been longer than half of `n_parallel`
    for 2 s. One is drained when half of the others' sequences have been enough for `downscale_delay` seconds. After
    each change both times begin again: the effect of a new worker is seen before the next one is started.
    """

    def __init__(self, *, min_workers: int, max_workers: int, n_parallel: int, downscale_delay: float) -> None:
        self.min_workers = min_workers
        self.max_workers = max_workers
        self.downscale_delay = downscale_delay
        self._n_parallel = n_parallel
        self._max_queue = n_parallel // 2
        self._capacity = (
            n_parallel  # sequences that one worker computes at once: fewer than n_parallel if they are long
        )
        self._waiting_since: float | None = None
        self._long_queue_since: float | None = None
        self._quiet_since: float | None = None
        self._not_before = 0.0
        self._n_failures = 0  # consecutive

    def decide(self, now: float, load: Load, running: int) -> Decision | None:
        """What to do with this load on this number of running workers. Called every second or more often."""
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
        """The worker that `decide` wanted is running."""
        self._begin_again()
        self._n_failures = 0

    def not_started(self, now: float) -> float:
        """It does not fit into memory, or could not be loaded. Returns the seconds until the next attempt."""
        pause: float = min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2**self._n_failures)
        self._n_failures += 1
        self._not_before = now + pause
        return pause

    def _begin_again(self) -> None:
        self._waiting_since = self._long_queue_since = self._quiet_since = None


def _since(since: float | None, now: float, is_so: bool) -> float | None:
    """Since when it has been so without a break; None: it is not."""
    if not is_so:
        return None
    return now if since is None else since


def _lasts(since: float | None, now: float, seconds: float) -> bool:
    return since is not None and now - since >= seconds
