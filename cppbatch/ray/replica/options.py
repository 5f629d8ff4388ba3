"""Ray Serve options for the replicas of an engine: their number, resources and autoscaling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from cppbatch.config import EngineConfig
from cppbatch.errors import ConfigError
from cppbatch.models.pull import DEFAULT, choose_model, pull_default
from cppbatch.ray.cluster import Node

MAX_REPLICAS = 1024


class ReplicaOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the Serve deployment. Raises `ConfigError` for values out of range."""

    min_replicas: int = 1
    max_replicas: int = 1
    """If above `min_replicas`: the number follows the load."""
    downscale_delay: float = 60.0
    """Seconds for which fewer replicas must suffice before one is stopped."""
    num_cpus: float = 1
    """Logical CPUs that Ray reserves for a replica."""
    num_gpus: float = 0

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.max_replicas <= MAX_REPLICAS:
            raise ConfigError(
                f"--replicas is {self.min_replicas}..{self.max_replicas}; it must be from 1 to {MAX_REPLICAS}, with "
                "the smaller number first"
            )
        if not 0 <= self.downscale_delay < math.inf:
            raise ConfigError(f"--downscale-delay is {self.downscale_delay:g} s; it must be 0 or more")

    def __str__(self) -> str:
        return f"{self.min_replicas}..{self.max_replicas}" if self.is_autoscaled else str(self.min_replicas)

    @property
    def is_autoscaled(self) -> bool:
        """Whether the number of replicas follows the load."""
        return self.max_replicas > self.min_replicas

    def serve_options(self, config: EngineConfig) -> dict[str, Any]:
        """Keyword arguments of `serve.deployment`.

        Serve's autoscaling counts the open requests of the fronts, waiting and running. A replica computes `n_parallel`
        at once, so that is the target per replica: one more request, on average, starts the next replica.
        """
        options: dict[str, Any] = {
            "ray_actor_options": {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus},
            # then the requests of a stopping replica continue in another one
            "graceful_shutdown_timeout_s": 60.0,
            "graceful_shutdown_wait_loop_s": 1.0,
            "max_constructor_retry_count": 2,  # in total for all replicas of a new deployment
        }
        if not self.is_autoscaled:
            return options | {"num_replicas": self.min_replicas}
        return options | {
            "autoscaling_config": {
                "min_replicas": self.min_replicas,
                "max_replicas": self.max_replicas,
                "initial_replicas": self.min_replicas,
                "target_ongoing_requests": config.n_parallel,
                "look_back_period_s": 12.0,  # Serve warns below 10
                "upscale_delay_s": 3.0,
                "downscale_delay_s": self.downscale_delay,
            }
        }


def for_own_machine(options: ReplicaOptions, config: EngineConfig, n_cores: int) -> tuple[ReplicaOptions, EngineConfig]:
    """The options and engine settings if all replicas run on this machine, dividing its cores."""
    n_threads = config.n_threads or max(1, n_cores // options.max_replicas)
    return (
        msgspec.structs.replace(options, num_cpus=n_threads),
        msgspec.structs.replace(config, n_threads=n_threads),
    )


def for_nodes(
    options: ReplicaOptions, config: EngineConfig, nodes: Sequence[Node]
) -> tuple[ReplicaOptions, EngineConfig]:
    """The options and settings for a cluster: divides nodes among replicas, and a node's CPUs among its replicas.

    If a replica has a node for itself, `n_threads` stays 0: one thread per physical core.
    """
    with_cpus = [node for node in nodes if node.cpus >= 1]
    if config.n_threads or not with_cpus:
        return msgspec.structs.replace(options, num_cpus=config.n_threads or 1), config
    per_node = math.ceil(options.max_replicas / len(with_cpus))
    num_cpus = max(1, int(min(node.cpus for node in with_cpus) // per_node))
    n_threads = 0 if per_node == 1 else num_cpus
    return (
        msgspec.structs.replace(options, num_cpus=num_cpus),
        msgspec.structs.replace(config, n_threads=n_threads),
    )


def computes_on_gpu(config: EngineConfig) -> bool:
    """Whether an engine with these settings and this machine's llama.cpp uses a GPU, if there is one."""
    from cppbatch.llama import Backend

    return config.n_gpu_layers != 0 and Backend.get().supports_gpu


def with_gpus(options: ReplicaOptions, nodes: Sequence[Node], *, grows: bool) -> ReplicaOptions:
    """The options for engines that compute on GPUs: one GPU per replica. Unchanged if the cluster does not have GPUs.

    `grows`: whether nodes may join the cluster. If not, raises `ConfigError` if there are fewer GPUs than replicas.
    """
    n_gpus = int(sum(node.gpus for node in nodes))
    if not n_gpus:
        return options
    if options.max_replicas > n_gpus and not grows:
        raise ConfigError(
            f"--replicas {options}: each replica needs a GPU, but this machine has {n_gpus}; use at most {n_gpus} "
            "replicas, or disable the GPUs with -ngl 0"
        )
    return msgspec.structs.replace(options, num_gpus=1)


def why_unplaceable(options: ReplicaOptions, nodes: Sequence[Node]) -> str | None:
    """The reason why no node of the cluster can ever run a replica; None if one can."""
    if any(node.cpus >= options.num_cpus and node.gpus >= options.num_gpus for node in nodes):
        return None
    needs = f"{options.num_cpus:g} CPUs" + (f" and {options.num_gpus:g} GPU" if options.num_gpus else "")
    have = ", ".join(f"{node.address}: {node.cpus:g} CPUs, {node.gpus:g} GPUs" for node in nodes)
    return (
        f"a replica needs {needs} on one machine, but no machine of the Ray cluster has that ({have}). Lower -t, or "
        "add a larger machine with `ray start --address=...`; the replicas start as soon as it joins"
    )


def model_on_this_node(path: str) -> str:
    """The file itself, or one with its name in this node's models folder, or the default model, downloaded if
    necessary.

    Raises `ModelError` if there is none.
    """
    file = Path(path)
    if not file.is_file() and file.name.startswith(Path(DEFAULT.file_name).stem):  # or a requantised copy of it
        return str(pull_default())
    return path if file.is_file() else str(choose_model(file.name))
