"""`cppbatch rpc-worker`."""

from __future__ import annotations

import ipaddress
import logging
import signal
from pathlib import Path

import click

from cppbatch.cli.engine_options import option, split_lists
from cppbatch.config import available_threads
from cppbatch.errors import ConfigError
from cppbatch.rpc_endpoint import DEFAULT_PORT

_CONSENT = "--i-trust-every-machine-that-can-connect"


@click.command("rpc-worker")
@option(
    "--host",
    env="RPC_HOST",
    default="127.0.0.1",
    help="IPv4 address to listen on. 127.0.0.1: only programs on this machine and SSH tunnels to it can connect.",
)
@option("--port", env="RPC_PORT", type=click.IntRange(0, 65535), default=DEFAULT_PORT, help="Port; 0: any free port.")
@option(
    "--devices",
    env="RPC_DEVICES",
    metavar="NAME,...",
    multiple=True,
    callback=split_lists,
    help="Devices to serve, by llama.cpp's names (see `cppbatch doctor`). Default: all GPUs, or the CPU if there are "
    "none.",
)
@option(
    "-t",
    "--threads",
    "n_threads",
    env="RPC_THREADS",
    type=click.IntRange(0, 512),
    default=0,
    help="CPU compute threads; 0: one per core.",
)
@option(
    "--cache",
    env="RPC_CACHE",
    metavar="DIR",
    default=None,
    help="Cache tensors larger than 10 MiB in this folder, so they are not sent again at the next start.",
)
@click.option(
    _CONSENT,
    "consent",
    is_flag=True,
    help="Required if --host is not a loopback address: any program that connects can crash this worker and may run "
    "code as this user.",
)
@click.option("-v", "--verbose", is_flag=True, help="Log connections.")
def rpc_worker(
    *, host: str, port: int, devices: tuple[str, ...], n_threads: int, cache: str | None, consent: bool, verbose: bool
) -> None:
    """Lend this machine's devices to an engine on another machine.

    The engine is `cppbatch serve --rpc` there, over llama.cpp's RPC. The protocol has no authentication and no
    encryption, and is not safe against malicious input. See docs/rpc.md for safe setups.
    """
    from cppbatch.cluster.rpc_server_process import RpcServerSetup, free_port, run_rpc_server

    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )
    host = _check_host(host, consent=consent)
    if cache:
        folder = Path(cache).expanduser()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--cache {folder} cannot be used ({error.strerror}); choose another folder") from error
        cache = str(folder)
    setup = RpcServerSetup(
        host=host,
        port=free_port(host, port),
        devices=devices,
        n_threads=n_threads or available_threads(),
        cache=cache,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run_rpc_server(setup, click.echo)
    except KeyboardInterrupt:
        click.echo("stopped")


def _check_host(host: str, *, consent: bool) -> str:
    """The IPv4 address. Raises `ConfigError`, also for an address that other machines can reach, unless confirmed."""
    try:
        address = ipaddress.IPv4Address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        raise ConfigError(
            f"--host is {host!r}; llama.cpp's RPC server requires an IPv4 address such as 192.168.1.5"
        ) from None
    if not (address.is_loopback or consent):
        raise ConfigError(
            f"--host {host} lets other machines connect. llama.cpp's RPC has no authentication and no encryption, and "
            "is not safe against malicious input: any program that connects may run code as you. Use an SSH tunnel or "
            f"WireGuard (docs/rpc.md), or confirm with {_CONSENT}"
        )
    return str(address)
