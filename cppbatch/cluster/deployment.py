"""Where a server's engines run: the number of worker processes and their devices, or a thread of the server process."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec

from cppbatch.cluster.rules import ScalingRule, check_times
from cppbatch.config import EngineConfig, available_threads
from cppbatch.errors import ConfigError

if TYPE_CHECKING:
    from cppbatch.cluster.engines.autoscaled import AutoscaledGroup
    from cppbatch.cluster.engines.client import EngineClient
    from cppbatch.cluster.engines.group import EngineGroup
    from cppbatch.cluster.engines.local import LocalEngine
    from cppbatch.cluster.engines.process import EngineProcess

MAX_WORKERS = 64
"""The maximum number of workers of a server."""


class EngineStarter(Protocol):
    """Starts the engines of a server."""

    def start(self, config: EngineConfig) -> EngineClient:
        """Starts the engines, which load the model. Must run inside an event loop. Raises `ConfigError`."""


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """The number and location of engines. Raises `ConfigError` for values out of range or in conflict."""

    in_process: bool = False
    """For debugging: one engine on a thread of the server process; a crash ends both."""
    workers: int = 1
    max_workers: int | None = None
    """If above `workers`: the number follows the load, from `workers` to this (`ScalingRule`). None: fixed."""
    downscale_delay: float = 60.0
    """Seconds for which fewer workers must have sufficed before one is drained."""
    memory_shortage: Callable[[EngineConfig], str | None] | None = None
    """Returns why an engine does not fit into the free memory, None if it does. Called on a thread before another
    worker is started, for example `cppbatch.sizing.memory_check.memory_shortage`; None: no check."""
    refit: Callable[[EngineConfig, int], EngineConfig] | None = None
    """Chooses smaller settings for a worker whose memory runs out (`cppbatch.sizing.fit_again.refit`); None: they stay
    the same. Not for workers above the minimum number: they must not make the clients' limits smaller."""
    devices: tuple[int, ...] = ()
    """GPUs by llama.cpp's numbers, with at least one worker each; more workers are assigned round-robin."""
    step_timeout: float = 300.0
    """Seconds without a finished step after which a worker is considered hung and is replaced."""
    sleep_idle_seconds: float = -1
    """Seconds without a request after which a worker stops until the next one; -1: never."""

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= MAX_WORKERS:
            raise ConfigError(f"--workers is {self.workers}; it must be from 1 to {MAX_WORKERS}")
        self._check_scaling()
        if any(device < 0 for device in self.devices):
            raise ConfigError(f"--devices contains {min(self.devices)}; device numbers start at 0")
        check_times(self.step_timeout, self.sleep_idle_seconds, prefix="--", separator="-")
        if self.in_process and self.sleep_idle_seconds != -1:
            raise ConfigError("--in-process has no worker to stop; leave out --sleep-idle-seconds")
        if self.in_process and (self.workers > 1 or self.max_workers is not None or self.devices):
            raise ConfigError("--in-process runs a single engine; leave out --workers and --devices")

    def _check_scaling(self) -> None:
        if not 0 < self.downscale_delay < math.inf:
            raise ConfigError(f"--downscale-delay is {self.downscale_delay:g}; it must be more than 0 seconds")
        if self.max_workers is None:
            return
        given = f"--workers is {self.workers}..{self.max_workers}"
        if not self.workers <= self.max_workers <= MAX_WORKERS:
            raise ConfigError(f"{given}; the maximum must be from {self.workers} to {MAX_WORKERS}")
        if self.max_workers < len(self.devices):
            raise ConfigError(
                f"{given}, fewer than the {len(self.devices)} devices in --devices, each of which needs a worker: "
                "raise the maximum, or list fewer devices"
            )

    def start(self, config: EngineConfig) -> EngineProcess | EngineGroup | LocalEngine:
        """Starts the engines, which load the model. Must run inside an event loop. Raises `ConfigError`."""
        if self.in_process:
            from cppbatch.cluster.engines.local import LocalEngine  # loads llama.cpp into this process

            return LocalEngine(config)
        self._check_rpc(config)
        if self.is_autoscaled:
            return self._start_autoscaled(config)
        from cppbatch.cluster.engines.group import EngineGroup

        engines = [self._start_worker(each, i) for i, each in enumerate(self.configs(config))]
        return engines[0] if len(engines) == 1 else EngineGroup(engines)

    @property
    def is_autoscaled(self) -> bool:
        """Whether the number of workers scales with the load."""
        return self.max_workers is not None and self.max_workers > self.workers

    def _start_autoscaled(self, config: EngineConfig) -> AutoscaledGroup:
        from cppbatch.cluster.engines.autoscaled import AutoscaledGroup

        def config_of(number: int) -> EngineConfig:
            return msgspec.structs.replace(config, device=self._device(config, number))

        async def shortage(number: int) -> str | None:
            if self.memory_shortage is None:
                return None
            return await asyncio.to_thread(self.memory_shortage, config_of(number))

        rule = ScalingRule(
            min_workers=self.workers,
            max_workers=self.max_workers or self.workers,
            n_parallel=config.n_parallel,
            downscale_delay=self.downscale_delay,
        )
        return AutoscaledGroup(lambda i: self._start_worker(config_of(i), i), rule, shortage=shortage)

    def _start_worker(self, config: EngineConfig, number: int) -> EngineProcess:
        from cppbatch.cluster.engines.process import EngineProcess  # imports as long as a worker: `start_early`

        return EngineProcess(
            config,
            name=str(number),
            step_timeout=self.step_timeout,
            sleep_idle_seconds=self.sleep_idle_seconds,
            refit=None if self.is_autoscaled and number >= self.workers else self.refit,
        )

    def configs(self, config: EngineConfig) -> list[EngineConfig]:
        """The initial settings of each worker. A fixed number of workers divides the cores, because more compute
        threads than cores only spin. An `AutoscaledGroup` divides the cores itself, as workers come and go. Raises
        `ConfigError` for several workers of one model over RPC."""
        self._check_rpc(config)
        n = self.workers if self.is_autoscaled else max(self.workers, len(self.devices))
        threads = config.n_threads
        if not threads and n > 1 and not self.is_autoscaled:
            threads = max(1, available_threads() // n)
        return [msgspec.structs.replace(config, n_threads=threads, device=self._device(config, i)) for i in range(n)]

    def _check_rpc(self, config: EngineConfig) -> None:
        if config.rpc and (self.workers > 1 or self.is_autoscaled or self.devices):
            raise ConfigError(
                "--rpc runs a single engine on all devices, because an RPC worker serves one engine at a time: leave "
                "out --workers and --devices, and set the share of each device with --tensor-split"
            )

    def _device(self, config: EngineConfig, number: int) -> int | None:
        return self.devices[number % len(self.devices)] if self.devices else config.device
