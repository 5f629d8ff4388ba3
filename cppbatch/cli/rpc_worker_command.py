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
    help="IPv4 address to listen at. 127.0.0.1: only programs of this machine, and SSH tunnels to it, can connect.",
)
@option("--port", env="RPC_PORT", type=click.IntRange(0, 65535), default=DEFAULT_PORT, help="0: a free one.")
@option(
    "--devices",
    env="RPC_DEVICES",
    metavar="NAME,...",
    multiple=True,
    callback=split_lists,
    help="Devices to serve, by llama.cpp's names (`cppbatch doctor`). Without it: all GPUs, or else the CPU.",
)
@option(
    "-t",
    "--threads",
    "n_threads",
    env="RPC_THREADS",
    type=click.IntRange(0, 512),
    default=0,
    help="Compute threads of the CPU; 0: one per core.",
)
@option(
    "--cache",
    env="RPC_CACHE",
    metavar="DIR",
    default=None,
    help="Keep tensors of more than 10 MiB in this folder, so that the next start does not send them again.",
)
@click.option(
    _CONSENT,
    "consent",
    is_flag=True,
    help="Needed for a --host other than loopback: any program that connects can crash this worker, and may run code "
    "as this user.",
)
@click.option("-v", "--verbose", is_flag=True, help="Show connections.")
def rpc_worker(
    *, host: str, port: int, devices: tuple[str, ...], n_threads: int, cache: str | None, consent: bool, verbose: bool
) -> None:
    """Serves this machine's devices to an engine on another one (`cppbatch serve --rpc`), by llama.cpp's RPC.

    It has no authentication and no encryption, and is not safe against bad input: docs/rpc.md has safe ways.
    """
    from cppbatch.cluster.rpc_server_process import RpcServerSetup, free_port, run_rpc_server

    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )
    host = _checked_host(host, consent=consent)
    if cache:
        folder = Path(cache).expanduser()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--cache {folder} cannot be used ({error.strerror}); name another folder") from error
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


def _checked_host(host: str, *, consent: bool) -> str:
    """The IPv4 address. Raises `ConfigError`, also for one that other machines can reach, without consent."""
    try:
        address = ipaddress.IPv4Address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        raise ConfigError(
            f"--host is {host!r}; llama.cpp's RPC server listens at an IPv4 address like 192.168.1.5"
        ) from None
    if not (address.is_loopback or consent):
        raise ConfigError(
            f"--host {host} lets other machines connect. llama.cpp's RPC asks for no password, encrypts nothing and is "
            "not safe against bad input: any program that connects may run code as you. Use an SSH tunnel or WireGuard "
            f"(docs/rpc.md), or say {_CONSENT}"
        )
    return str(address)
