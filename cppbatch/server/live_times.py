"""TTFT and inter-token times of the last seconds, for `GET /live`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import repeat
from time import perf_counter

from cppbatch.engine.rolling_window import percentile
from cppbatch.server.live import RecentTimes

_FIRST_TOKEN_S, _INTER_TOKEN_S = 10.0, 1.0
_MOST = 2048  # times that are remembered


class LiveTimes:
    """Collects times while `GET /live` is read."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._first_token: deque[tuple[float, float]] = deque(maxlen=_MOST)
        self._inter_token: deque[tuple[float, float]] = deque(maxlen=_MOST)

    def add_first_token(self, now: float, seconds: float) -> None:
        """Adds a time to first token."""
        self._first_token.append((now, seconds))

    def add_gap(self, now: float, seconds: float, n: int) -> None:
        """Adds `n` times from one token to the next."""
        self._inter_token.extend(repeat((now, seconds), n))

    def first_token(self) -> RecentTimes:
        """Of the last 10 seconds."""
        return _recent(self._first_token, self._clock() - _FIRST_TOKEN_S)

    def inter_token(self) -> RecentTimes:
        """Of the last second."""
        return _recent(self._inter_token, self._clock() - _INTER_TOKEN_S)


def _recent(times: deque[tuple[float, float]], since: float) -> RecentTimes:
    while times and times[0][0] < since:
        times.popleft()
    values = [seconds for _, seconds in times]
    p50, p95 = percentile(values, 0.5), percentile(values, 0.95)
    return RecentTimes(n=len(values), p50=p50, p95=p95)
