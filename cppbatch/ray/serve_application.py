"""The application for `serve run` and `serve deploy`: the replicas, and an ingress with the HTTP API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from cppbatch.config import EngineConfig
from cppbatch.errors import ConfigError
from cppbatch.models.pull import choose_model
from cppbatch.ray.cluster import alive_nodes
from cppbatch.ray.replica.options import ReplicaOptions, computes_on_gpu, for_nodes, with_gpus
from cppbatch.server.auth.key_file import read_keys
from cppbatch.server.auth.rules import Keys
from cppbatch.server.http.limits import Limits
from cppbatch.server.settings import ServerSettings
from cppbatch.setting import INT32_MAX

INGRESS = "http"
"""The name of the deployment that serves HTTP."""
_PUSH_SECONDS = "2"


class ServerArguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The server's settings, named like the flags of `cppbatch serve`."""

    api_keys: list[str] = []
    api_key_file: str | None = None
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] | None = None
    allowed_hosts: tuple[str, ...] = ()
    metrics: bool = True
    slots: bool = True
    strict_model: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    sampling_defaults: dict[str, Any] = {}
    data_dir: str | None = None
    limits: Limits = Limits()

    def settings(self) -> ServerSettings:
        """The settings. Raises `ConfigError` for values out of range."""
        return ServerSettings(
            keys=Keys([*self.api_keys, *(read_keys(self.api_key_file) if self.api_key_file else [])]),
            limits=self.limits,
            cors_origins=self.cors_origins,
            allowed_hosts=self.allowed_hosts,
            aliases=self.aliases,
            tags=self.tags,
            metrics=self.metrics,
            slots=self.slots,
            strict_model=self.strict_model,
            chat_template=self.chat_template,
            template_variables=self.chat_template_kwargs,
            sampling_defaults=self.sampling_defaults,
            data_dir=Path(self.data_dir) if self.data_dir else None,
        )


class Arguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `args` of the application in a Serve config file."""

    model: str | None = None
    """A GGUF file, or its name in the models folder, on every node; None: as `cppbatch serve` without -m."""
    engine: dict[str, Any] = {}
    """Fields of `EngineConfig`: n_parallel, n_ctx, n_threads ..."""
    min_replicas: int = 1
    max_replicas: int = 1
    downscale_delay: float = 60.0
    """Seconds for which fewer replicas must suffice before one is stopped."""
    step_timeout: float = 300.0
    """Seconds without a finished step after which a replica's engine is considered hung and is replaced."""
    server: ServerArguments = ServerArguments()


def read_arguments(arguments: dict[str, Any]) -> Arguments:
    """Checks and converts the arguments. Raises `ConfigError` with the name of an invalid argument."""
    try:
        return msgspec.convert(arguments, Arguments)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the args of cppbatch.ray:app: {error}") from None


def engine_config(model_path: str, engine: dict[str, Any]) -> EngineConfig:
    """The settings of the engine. Raises `ConfigError` for unknown names, wrong types and values out of range."""
    if unknown := sorted(engine.keys() - set(EngineConfig.__struct_fields__) | engine.keys() & {"model_path"}):
        known = ", ".join(name for name in EngineConfig.__struct_fields__ if name != "model_path")
        raise ConfigError(
            f"the args of cppbatch.ray:app: unknown engine setting {unknown[0]!r}; it must be one of {known}"
        )
    try:
        return msgspec.convert({"model_path": model_path, **engine}, EngineConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the args of cppbatch.ray:app: engine: {error}") from None


def build(arguments: dict[str, Any]) -> Any:
    """The `ray.serve.Application`; see `cppbatch.ray.app`."""
    from ray import serve

    from cppbatch.ray.http_ingress import HttpIngress
    from cppbatch.ray.replica.deployment import engine_application

    given = read_arguments(arguments)
    settings = given.server.settings()
    config = engine_config(str(choose_model(given.model)), given.engine)
    options = ReplicaOptions(
        min_replicas=given.min_replicas, max_replicas=given.max_replicas, downscale_delay=given.downscale_delay
    )
    nodes = alive_nodes()
    options, config = for_nodes(options, config, nodes)
    if computes_on_gpu(config):
        options = with_gpus(options, nodes, grows=True)
    engines = engine_application(config, step_timeout=given.step_timeout, **options.serve_options(config))
    ingress = serve.deployment(
        serve.ingress()(HttpIngress),
        name=INGRESS,
        max_ongoing_requests=INT32_MAX,  # the server has its own limits (`max_concurrent`, `max_queue`)
        ray_actor_options={
            "num_cpus": 0,  # it must also start on a machine where replicas have reserved all CPUs
            "runtime_env": {"env_vars": {"RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": _PUSH_SECONDS}},
        },
    )
    return ingress.bind(config, settings, engines)
