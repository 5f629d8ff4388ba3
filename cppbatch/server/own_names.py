"""The names of this machine and its server."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable

from cppbatch.server.media_domains import HOST_NAME, address_of

_LOOKUP_SECONDS = 1.0
_FROM_CONTAINERS = ("host.docker.internal", "host.containers.internal")
"""This machine in its containers, by Docker and Podman. No site of the internet has a name below .internal."""


def names_of(addresses: Iterable[str]) -> tuple[str, ...]:
    """The names of a server that listens on these addresses: those among them, that of this machine in its containers,
    and its others if other machines can reach it."""
    names = [*_FROM_CONTAINERS, *(address for address in addresses if not address_of(address))]
    if not all(is_local(address) for address in addresses):
        host = socket.gethostname()
        first = host.partition(".")[0]
        names += [host, first, f"{first}.local"]
        looking = threading.Thread(target=lambda: names.append(socket.getfqdn(host)), daemon=True)
        looking.start()
        looking.join(_LOOKUP_SECONDS)  # it takes longer where no name server answers
    return tuple(sorted({name for name in map(str.lower, names) if HOST_NAME.fullmatch(name)}))


def is_local(name: str) -> bool:
    """Whether a name or address means the machine that uses it."""
    address = address_of(name)
    return address.is_loopback if address else name == "localhost" or name.endswith(".localhost")
