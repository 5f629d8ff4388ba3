"""Notices at once that an RPC worker is gone, whatever llama.cpp does then.

llama.cpp waits without a limit for the answer of a machine that has left the network, and aborts the process where
the connection ends. Either way the process of the engine dies, and no request is to blame.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from cppbatch.rpc_endpoint import ANSWER_S, Endpoint, end_when_silent

log = logging.getLogger("cppbatch.cluster")
Result = TypeVar("Result")


class RpcWorkerLost(Exception):
    """An RPC worker is gone; the message says which one."""


class RpcWatch:
    """Holds a connection of its own to each worker, on which nothing is ever sent.

    A worker serves one connection at a time: this one waits behind the engine's, in the queue of the worker's kernel,
    and ends with the worker's process. `start` it only when the engine is connected, and `close` it when the engine has
    ended, or the worker would serve this connection.
    """

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        """Must be made inside an event loop."""
        self._endpoints = endpoints
        self._tasks: list[asyncio.Task[None]] = []
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def start(self) -> None:
        """Begins to watch. A second call does nothing."""
        if not self._tasks:
            self._tasks = [asyncio.ensure_future(self._watch(endpoint)) for endpoint in self._endpoints]

    async def lost(self, within: float) -> str | None:
        """What is wrong as soon as a worker is gone; None if none is after `within` seconds."""
        if self._tasks:
            await asyncio.wait([self._lost], timeout=within)
        return self._lost.result() if self._lost.done() else None

    async def while_there(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Returns what `work` returns. Raises `RpcWorkerLost` if a worker is gone before."""
        working = asyncio.ensure_future(work)
        try:
            either: list[asyncio.Future[Any]] = [working, self._lost]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise RpcWorkerLost(self._lost.result())
        finally:
            working.cancel()

    async def _watch(self, endpoint: Endpoint) -> None:
        reason = await _until_lost(endpoint)
        if not self._lost.done():
            self._lost.set_result(reason)

    async def close(self) -> None:
        """Ends the connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []


async def _until_lost(endpoint: Endpoint) -> str:
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(*endpoint), ANSWER_S)
    except asyncio.TimeoutError:  # the queue of waiting connections is full
        log.warning("cannot monitor the RPC worker at %s: other clients are waiting for it", endpoint)
        await asyncio.Event().wait()
        raise AssertionError from None
    except OSError as error:
        return _loss_message(endpoint, error)
    try:
        connection: socket.socket = writer.get_extra_info("socket")
        end_when_silent(connection)
        await reader.read(1)  # it never sends anything
        return f"lost the RPC worker at {endpoint} (it closed the connection)"
    except OSError as error:
        return _loss_message(endpoint, error)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def _loss_message(endpoint: Endpoint, error: OSError) -> str:
    return f"lost the RPC worker at {endpoint} ({error.strerror or error})"
