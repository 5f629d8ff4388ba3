"""What is sent to servers, and how: all that the command line says, but the servers."""

from __future__ import annotations

import msgspec

from cppbatch.bench.load.client import Endpoint
from cppbatch.bench.load.workload import Workload
from cppbatch.errors import ConfigError


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What is sent, and how. Raises `ConfigError`."""

    workload: Workload
    concurrency: int = 16
    """Clients of the closed loop."""
    rate: float | None = None
    """Requests a second, in an open loop; None: a closed loop."""
    endpoint: Endpoint = "completions"
    model: str | None = None
    """None: the first that each server has."""
    api_key: str | None = None
    warmup: int = 4
    """Requests to each server before all else."""
    repeats: int = 3
    seed: int
    latency_bound_ms: float | None = None
    """Requests whose first text came within it are good ones."""
    timeout: float = 300
    """Seconds for a request."""

    def __post_init__(self) -> None:
        counts = [("--concurrency", self.concurrency, 1), ("--repeats", self.repeats, 1), ("--warmup", self.warmup, 0)]
        for flag, value, least in counts:
            if value < least:
                raise ConfigError(f"{flag} is {value}; it must be {least} or more")
        if self.api_key and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ConfigError("--api-key has characters that no header can have, such as the end of a line")
        above_zero = {"--rate": self.rate, "--timeout": self.timeout, "--latency-bound-ms": self.latency_bound_ms}
        for flag, number in above_zero.items():
            if number is not None and not 0 < number < float("inf"):
                raise ConfigError(f"{flag} is {number:g}; it must be above 0")
