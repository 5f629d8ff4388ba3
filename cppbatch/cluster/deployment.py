"""Where a server's engines run: in how many processes, on which devices, or in its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from cppbatch.cluster.engine_group import EngineGroup
from cppbatch.cluster.engine_process import EngineProcess
from cppbatch.config import EngineConfig, available_threads
from cppbatch.errors import ConfigError

if TYPE_CHECKING:
    from cppbatch.cluster.local_engine import LocalEngine

_MOST_WORKERS = 64
_SHORTEST_STEP_TIMEOUT_S = 1.0  # an idle worker shows once a second that it lives


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """Raises `ConfigError` for what cannot be."""

    in_process: bool = False
    """Debugging: the engine on a thread of the server's process, which goes down with it."""
    workers: int = 1
    devices: tuple[int, ...] = ()
    """GPUs by llama.cpp's numbers, a worker each; with more workers than devices, they take turns."""
    step_timeout: float = 300.0
    """Seconds without the end of a step after which a worker counts as hung and is replaced."""

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= _MOST_WORKERS:
            raise ConfigError(f"--workers is {self.workers}; it must be from 1 to {_MOST_WORKERS}")
        if any(device < 0 for device in self.devices):
            raise ConfigError(f"--devices has {min(self.devices)}; devices are numbered from 0")
        if self.step_timeout < 2 * _SHORTEST_STEP_TIMEOUT_S:
            raise ConfigError(f"--step-timeout is {self.step_timeout:g} s; it must be at least 2")
        if self.in_process and (self.workers > 1 or self.devices):
            raise ConfigError("--in-process has one engine; leave out --workers and --devices")

    def start(self, config: EngineConfig) -> EngineProcess | EngineGroup | LocalEngine:
        """Starts to load the model; inside a running event loop. Raises `ConfigError`."""
        if self.in_process:
            from cppbatch.cluster.local_engine import LocalEngine  # it brings llama.cpp into this process

            return LocalEngine(config)
        engines = [
            EngineProcess(its, name=str(i), step_timeout=self.step_timeout)
            for i, its in enumerate(self.configs(config))
        ]
        return engines[0] if len(engines) == 1 else EngineGroup(engines)

    def configs(self, config: EngineConfig) -> list[EngineConfig]:
        """One for each worker: they share the cores, since more compute threads than cores only spin."""
        n = max(self.workers, len(self.devices))
        threads = config.n_threads or (max(1, available_threads() // n) if n > 1 else 0)
        devices = [self.devices[i % len(self.devices)] if self.devices else None for i in range(n)]
        return [msgspec.structs.replace(config, n_threads=threads, device=device) for device in devices]
