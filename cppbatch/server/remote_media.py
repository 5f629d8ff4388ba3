"""Fetches images and audio from the hosts listed in --allowed-media-domains."""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from cppbatch.errors import InvalidRequest
from cppbatch.server.http.hosts import MediaDomains

_MOST_REDIRECTS = 3
_REDIRECTS = (301, 302, 303, 307, 308)


class ByteBudget:
    """The limit in bytes for all media of a request that are not in its body."""

    def __init__(self, n_bytes: int) -> None:
        self._n_bytes = self._left = n_bytes

    def take(self, field: str, n: int) -> None:
        """Counts `n` bytes of a medium. Raises `InvalidRequest` if they exceed the rest of the budget."""
        if n > self._left:
            limit = f"{self._n_bytes:,} bytes (--max-media-mb)"
            raise InvalidRequest(field, f"makes the request's images and audio larger than {limit}")
        self._left -= n


async def fetch(field: str, address: str, domains: MediaDomains, budget: ByteBudget, *, seconds: float = 10) -> bytes:
    """The bytes at an http or https URL. `field`: its name in errors.

    Raises `InvalidRequest` for an unlisted host, also after a redirect; for a private address that is not listed
    itself; for more bytes than `budget` has left; and if it takes longer than `seconds`.
    """
    try:
        return await asyncio.wait_for(_fetch(field, address, domains, budget), seconds)
    except InvalidRequest:
        raise
    except asyncio.TimeoutError:
        raise InvalidRequest(field, f"could not be fetched within {seconds:g} s") from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise InvalidRequest(field, f"could not be fetched: {error!s:.200}") from error


async def _fetch(field: str, address: str, domains: MediaDomains, budget: ByteBudget) -> bytes:
    # Each name is resolved once, by the connector, which connects only to checked addresses.
    connector = aiohttp.TCPConnector(resolver=_CheckedResolver(field, domains), use_dns_cache=False, force_close=True)
    async with aiohttp.ClientSession(
        connector=connector, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
    ) as session:
        url = URL(address)
        for _ in range(_MOST_REDIRECTS + 1):
            _check(field, url, domains)
            headers = {"Accept": "image/*, audio/*, video/*", "Accept-Encoding": "identity"}
            async with session.get(url, allow_redirects=False, headers=headers) as response:
                if response.status in _REDIRECTS and (location := response.headers.get("Location")):
                    url = url.join(URL(location))
                    continue
                if response.status != 200:
                    raise InvalidRequest(field, f"could not be fetched: {url.host} returned status {response.status}")
                data = bytearray()
                async for chunk in response.content.iter_chunked(1 << 16):
                    budget.take(field, len(chunk))
                    data += chunk
                return bytes(data)
    raise InvalidRequest(field, f"could not be fetched: more than {_MOST_REDIRECTS} redirects")


def _check(field: str, url: URL, domains: MediaDomains) -> None:
    """Raises `InvalidRequest` for a URL that may not be fetched."""
    if url.scheme not in ("http", "https") or not url.host:
        raise InvalidRequest(field, f"is {str(url)!r:.80}; only http and https URLs can be fetched")
    if url.user is not None or url.password is not None:
        raise InvalidRequest(field, "contains a user name or password, which is not sent to other servers; remove it")
    if not domains.lists_host(url.host):
        message = f"is on {url.host!r:.80}, which is not allowed: start the server with --allowed-media-domains"
        raise InvalidRequest(field, f"{message} {url.host:.80}, or send the file as a data URL")


class _Lookups:
    """The event loop's name lookups, on separate threads: chats need the loop's threads, and a lookup may take long."""

    _threads = ThreadPoolExecutor(4, thread_name_prefix="cppbatch-dns")

    async def getaddrinfo(self, host: str, port: int, **options: Any) -> Any:
        lookup = partial(socket.getaddrinfo, host, port, **options)
        return await asyncio.get_running_loop().run_in_executor(self._threads, lookup)

    async def getnameinfo(self, address: Any, flags: int) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, socket.getnameinfo, address, flags)


class _CheckedResolver(AbstractResolver):
    """Filters out addresses that connections are not allowed to."""

    def __init__(self, field: str, domains: MediaDomains) -> None:
        self._field, self._domains = field, domains
        self._resolver = aiohttp.ThreadedResolver(_Lookups())  # type: ignore[arg-type]  # it only calls these two

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Returns the addresses that may be connected to. Raises `InvalidRequest` if none is left."""
        found = await self._resolver.resolve(host, port, family)
        allowed = [each for each in found if self._domains.may_connect(each["host"])]
        if not allowed:
            message = f"is on {host!r:.80}, which has a private address: add that address to --allowed-media-domains"
            raise InvalidRequest(self._field, message)
        return allowed

    async def close(self) -> None:
        await self._resolver.close()
