"""Ray Serve's autoscaling by ongoing requests, as Serve 2.60 decides (`ray/serve/autoscaling_policy.py`)."""

from __future__ import annotations

import math
from collections import deque

import msgspec


class Autoscaling(msgspec.Struct, frozen=True, kw_only=True):
    """Settings, with Serve's names and defaults."""

    min_replicas: int = 1
    max_replicas: int = 1
    target_ongoing_requests: float = 2.0
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0
    look_back_period_s: float = 30.0


class ServeAutoscaler:
    """Decides how many replicas there should be: ongoing requests, a mean over the look-back period, by the target.

    A decision is carried out when it has been the same, up or down, for the whole delay.
    """

    def __init__(self, settings: Autoscaling) -> None:
        self._settings = settings
        self.target = settings.min_replicas
        """Replicas that there should be now."""
        self._samples: deque[tuple[float, int]] = deque()
        self._direction = 0
        self._since = 0.0

    def observe(self, now: float, n_ongoing: int) -> int:
        """Takes the present number of queued and running requests of all replicas, and returns `target`."""
        settings, samples = self._settings, self._samples
        samples.append((now, n_ongoing))
        while samples[0][0] < now - settings.look_back_period_s:
            samples.popleft()
        mean = sum(n for _, n in samples) / len(samples)
        wanted = math.ceil(mean / settings.target_ongoing_requests)
        wanted = min(max(wanted, settings.min_replicas), settings.max_replicas)
        direction = (wanted > self.target) - (wanted < self.target)
        if direction != self._direction:
            self._direction, self._since = direction, now
        delay = settings.upscale_delay_s if direction > 0 else settings.downscale_delay_s
        if direction and now - self._since >= delay:
            self.target, self._direction = wanted, 0
        return self.target
