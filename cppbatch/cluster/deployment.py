"""Where a server's engines run: how many worker processes on which devices, or a thread of the server's process."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

import msgspec

from cppbatch.cluster.engine_client import EngineClient
from cppbatch.cluster.engine_group import EngineGroup
from cppbatch.cluster.engine_process import EngineProcess
from cppbatch.config import EngineConfig, available_threads
from cppbatch.errors import ConfigError

if TYPE_CHECKING:
    from cppbatch.cluster.local_engine import LocalEngine

MAX_WORKERS = 64
"""Of one server."""
_MIN_STEP_TIMEOUT_S = 2.0  # an idle worker has one heartbeat a second


class EngineStarter(Protocol):
    """Starts the engines of a server."""

    def start(self, config: EngineConfig) -> EngineClient:
        """Starts the engines, which load the model. Must run inside an event loop. Raises `ConfigError`."""


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """How many engines to start, and where. Raises `ConfigError` for values out of range or in conflict."""

    in_process: bool = False
    """For debugging: one engine on a thread of the server's process; a crash ends both."""
    workers: int = 1
    devices: tuple[int, ...] = ()
    """llama.cpp's numbers of GPUs, at least one worker for each; more workers are assigned to them in turn."""
    step_timeout: float = 300.0
    """Seconds without the end of a step after which a worker counts as hung and is replaced."""
    sleep_idle_seconds: float = -1
    """Seconds without a request after which a worker ends until the next one; -1: never."""

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= MAX_WORKERS:
            raise ConfigError(f"--workers is {self.workers}; it must be from 1 to {MAX_WORKERS}")
        if any(device < 0 for device in self.devices):
            raise ConfigError(f"--devices has {min(self.devices)}; devices are numbered from 0")
        if self.step_timeout < _MIN_STEP_TIMEOUT_S:
            raise ConfigError(f"--step-timeout is {self.step_timeout:g} s; it must be at least {_MIN_STEP_TIMEOUT_S:g}")
        if self.sleep_idle_seconds != -1 and not 0 < self.sleep_idle_seconds < math.inf:
            raise ConfigError(
                f"--sleep-idle-seconds is {self.sleep_idle_seconds:g}; it must be more than 0, or -1 for never"
            )
        if self.in_process and self.sleep_idle_seconds != -1:
            raise ConfigError("--in-process has no worker that could end; leave out --sleep-idle-seconds")
        if self.in_process and (self.workers > 1 or self.devices):
            raise ConfigError("--in-process has one engine; leave out --workers and --devices")

    def start(self, config: EngineConfig) -> EngineProcess | EngineGroup | LocalEngine:
        """Starts the engines, which load the model. Must run inside an event loop. Raises `ConfigError`."""
        if self.in_process:
            from cppbatch.cluster.local_engine import LocalEngine  # loads llama.cpp into this process

            return LocalEngine(config)
        engines = [
            EngineProcess(
                worker_config,
                name=str(i),
                step_timeout=self.step_timeout,
                sleep_idle_seconds=self.sleep_idle_seconds,
            )
            for i, worker_config in enumerate(self.configs(config))
        ]
        return engines[0] if len(engines) == 1 else EngineGroup(engines)

    def configs(self, config: EngineConfig) -> list[EngineConfig]:
        """The settings of each worker. They divide the cores: more compute threads than cores only spin."""
        n = max(self.workers, len(self.devices))
        threads = config.n_threads or (max(1, available_threads() // n) if n > 1 else 0)
        devices = [self.devices[i % len(self.devices)] if self.devices else None for i in range(n)]
        return [msgspec.structs.replace(config, n_threads=threads, device=device) for device in devices]
