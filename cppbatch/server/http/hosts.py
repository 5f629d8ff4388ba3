"""Host names: those from which media may be fetched, those of this machine, and origins of web pages."""

from __future__ import annotations

import ipaddress
import re
import socket
import threading
from collections.abc import Iterable
from urllib.parse import urlsplit

from cppbatch.errors import ConfigError

ANY = "*"
"""Stands for all hosts with public addresses."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network
HOST_NAME = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?")


class HostNames:
    """Host names: `example.org`, `*.example.org`, `*`."""

    def __init__(self, names: Iterable[str], flag: str, others: str = "") -> None:
        """Raises `ConfigError` for any other entry. It names the flag and the `others` that it accepts."""
        self._names = {name.lower().rstrip(".") for name in names}
        for name in self._names:
            if name != ANY and not HOST_NAME.fullmatch(name):
                message = f"it must be a host such as example.org or *.example.org{others}"
                raise ConfigError(f"{flag} contains {name!r:.80}; {message}")

    def __bool__(self) -> bool:
        return bool(self._names)

    def lists(self, host: str) -> bool:
        """Whether a host has one of these names."""
        name = host.lower().rstrip(".")
        parents = name.split(".")
        wildcards = {"*." + ".".join(parents[i:]) for i in range(1, len(parents))}
        return bool({name, ANY, *wildcards} & self._names)


class MediaDomains:
    """Host names (`example.org`, `*.example.org`, `*`), addresses and networks (`10.0.0.0/8`).

    A host must be listed by name, and its address must be public or listed itself. So neither a redirect nor a name
    with a changing address leads into the server's own network.
    """

    def __init__(self, entries: Iterable[str] = ()) -> None:
        """Raises `ConfigError` for any other entry."""
        names: list[str] = []
        self._networks: list[_Network] = []
        for entry in entries:
            try:
                self._networks.append(ipaddress.ip_network(address_of(entry) or entry, strict=False))
            except ValueError:
                names.append(entry)
        others = ", an address, or a network such as 10.0.0.0/8"
        self._names = HostNames(names, "--allowed-media-domains", others)

    def __bool__(self) -> bool:
        return bool(self._names or self._networks)

    def lists_host(self, host: str) -> bool:
        """Whether an address with this host, a name or an IP address, may be fetched."""
        if address := address_of(host):
            return self.may_connect(host) and (self._is_listed(address) or self._names.lists(ANY))
        return self._names.lists(host)

    def may_connect(self, host: str) -> bool:
        """Whether an IP address may be connected to."""
        address = address_of(host)
        return address is not None and (_is_public(address) or self._is_listed(address))

    def _is_listed(self, address: Address) -> bool:
        return any(address in network for network in self._networks if network.version == address.version)


def address_of(host: str) -> Address | None:
    """The IP address, if the host is one; IPv4-mapped IPv6 addresses become IPv4."""
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


_GLOBAL_IPV6 = ipaddress.ip_network("2000::/3")
"""The addresses of the internet. Gateways translate some of the others to IPv4 addresses, even private ones (NAT64)."""


def _is_public(address: Address) -> bool:
    if address.version == 6 and (address not in _GLOBAL_IPV6 or address.sixtofour or address.teredo):
        return False
    return address.is_global and not address.is_multicast


# --- own names -------------------------------------------------------------------------------------------------------
# The names of this machine and its server.


_FROM_CONTAINERS = ("host.docker.internal", "host.containers.internal")
"""Docker's and Podman's names for this machine in its containers. No internet site has a name below .internal."""


def names_of(addresses: Iterable[str]) -> tuple[str, ...]:
    """The names of a server that listens on these addresses: names among them, those of this machine in its containers,
    and its host names if other machines can reach it."""
    names = [*_FROM_CONTAINERS, *(address for address in addresses if not address_of(address))]
    if not all(is_local(address) for address in addresses):
        host = socket.gethostname()
        first = host.partition(".")[0]
        names += [host, first, f"{first}.local"]
        looking = threading.Thread(target=lambda: names.append(socket.getfqdn(host)), daemon=True)
        looking.start()
        looking.join(1.0)  # takes longer if no name server answers
    return tuple(sorted({name for name in map(str.lower, names) if HOST_NAME.fullmatch(name)}))


def is_local(name: str) -> bool:
    """Whether a name or address refers to the local machine."""
    address = address_of(name)
    return address.is_loopback if address else name == "localhost" or name.endswith(".localhost")


# --- origins ---------------------------------------------------------------------------------------------------------
# The origins of web pages, as given in the settings.


ANY_ORIGIN, LOCAL, NONE = "*", "localhost", "none"
"""Special values in addition to origins: all pages, pages served by this machine on any port, no pages. `app://*` means
all origins with this scheme."""
FILES = "file://"
"""The origin of local files in some programs that show web pages; in others and in browsers it is null."""


def check_origin(origin: str) -> str:
    """Raises `ConfigError` for a string that browsers never send as origin."""
    parts = urlsplit(origin)
    is_origin = origin == FILES or (parts.scheme and parts.netloc and origin == f"{parts.scheme}://{parts.netloc}")
    if origin not in (ANY_ORIGIN, LOCAL, NONE) and not is_origin:
        message = f"it must have the form https://example.org without a path, or be {LOCAL}, {ANY_ORIGIN} or {NONE}"
        raise ConfigError(f"--cors-origin is {origin!r}; {message}")
    return origin
