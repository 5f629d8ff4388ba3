"""The options of `cppbatch serve` that say where its engines run."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from cppbatch.cli.engine_options import option

Command = Callable[..., Any]

_OPTIONS = [
    option(
        "--workers", env="WORKERS", type=int, default=1,
        help="Worker processes, each with the model and a KV cache of its own.",
    ),
    option(
        "--devices", env="DEVICES", metavar="0,1,...", default=None,
        help="GPUs by llama.cpp's numbers, a worker for each; without it one worker uses all of them.",
    ),
    option(
        "--step-timeout", env="STEP_TIMEOUT", type=float, default=300,
        help="Seconds without the end of a step after which a worker counts as hung and is replaced.",
    ),
    option(
        "--in-process", env="IN_PROCESS", is_flag=True,
        help="Debugging: run the engine in the server's process, which goes down with it.",
    ),
]  # fmt: skip


def deployment_options(command: Command) -> Command:
    """Adds these options; the command gets `deployment`, a `Deployment`, in their place."""

    @wraps(command)
    def with_deployment(
        workers: int, devices: str | None, step_timeout: float, in_process: bool, **arguments: Any
    ) -> Any:
        from cppbatch.cluster.deployment import Deployment

        deployment = Deployment(
            workers=workers, devices=_numbers(devices), step_timeout=step_timeout, in_process=in_process
        )
        return command(deployment=deployment, **arguments)

    wrapped: Command = with_deployment
    for add in reversed(_OPTIONS):
        wrapped = add(wrapped)
    return wrapped


def _numbers(devices: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(device) for device in devices.split(",")) if devices else ()
    except ValueError:
        raise click.BadParameter(f"{devices!r} is no list of numbers like 0,1", param_hint="--devices") from None
