"""Where the engines of a server run: the options of workers, replicas and devices."""

from __future__ import annotations

import re
from functools import wraps
from typing import Any

import click

from cppbatch.cli.engine_options import Command, option, with_options

_RANGE = re.compile(r"(\d+)\.\.(\d+)")


class CountRange(click.ParamType):  # type: ignore[type-arg]
    """`2` or `1..4`: a number, and the maximum to which it scales with the load; None if it is fixed."""

    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int | None]:
        if isinstance(value, tuple):
            return value
        if found := _RANGE.fullmatch(str(value)):
            return int(found[1]), int(found[2])
        if re.fullmatch(r"-?\d+", str(value)):
            return int(value), None
        return self.fail(f"{value!r} is neither a number, such as 2, nor a range, such as 1..4", param, ctx)


_DEPLOYMENT = [
    option(
        "--workers", type=CountRange(), default="1", metavar="N or MIN..MAX",
        help="Worker processes, each with its own copy of the model and its own KV cache. 1..4: start with one, add "
        "more while requests wait and memory allows, and remove idle ones.",
    ),
    option(
        "--downscale-delay", type=float, default=60,
        help="With --workers or --replicas MIN..MAX: seconds of low load before one is stopped.",
    ),
    option(
        "--devices", metavar="0,1,...", default=None,
        help="GPU indices as numbered by llama.cpp, one worker per GPU. Default: one worker uses all GPUs.",
    ),
    option(
        "--step-timeout", type=float, default=300,
        help="Seconds without a finished step after which a worker is considered hung and is replaced.",
    ),
    option(
        "--sleep-idle-seconds", "--ttl", "sleep_idle_seconds", type=float, default=-1,
        help="Seconds without a request after which a model is unloaded; the next request loads it again. -1: never.",
    ),
    option(
        "--in-process", is_flag=True,
        help="For debugging: run the engine in the server process. A crash of the engine then also ends the server.",
    ),
]  # fmt: skip


def deployment_options(command: Command) -> Command:
    """Adds the options of worker processes. The command gets `deployment`, a `Deployment`."""

    @wraps(command)
    def with_deployment(
        *,
        workers: tuple[int, int | None],
        downscale_delay: float,
        devices: str | None,
        step_timeout: float,
        sleep_idle_seconds: float,
        in_process: bool,
        **arguments: Any,
    ) -> Any:
        from cppbatch.cluster.deployment import Deployment

        deployment = Deployment(
            workers=workers[0],
            max_workers=workers[1],
            downscale_delay=downscale_delay,
            devices=_device_numbers(devices),
            step_timeout=step_timeout,
            sleep_idle_seconds=sleep_idle_seconds,
            in_process=in_process,
        )
        return command(deployment=deployment, **arguments)

    return with_options(with_deployment, _DEPLOYMENT)


def _device_numbers(devices: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(device) for device in devices.split(",")) if devices else ()
    except ValueError:
        message = f"{devices!r} is not a comma-separated list of numbers, such as 0,1"
        raise click.BadParameter(message, param_hint="--devices") from None
