"""The life of `cppbatch serve`: listen, load, serve, drain."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable

from aiohttp import web

from cppbatch.cluster.local import LocalEngine
from cppbatch.config import EngineConfig
from cppbatch.errors import ConfigError
from cppbatch.server.app import IN_FLIGHT, create_app

Say = Callable[[str], None]


async def serve(config: EngineConfig, *, host: str, port: int, api_key: str | None, say: Say) -> None:
    """Serves until SIGINT or SIGTERM, then finishes what runs. A second signal ends the process at once.

    Listens while the model loads (/health tells how far). `say` gets the lines for the person at the terminal.
    Raises `ConfigError` when the address is taken, and whatever loading raises.
    """
    stop = asyncio.Event()
    _on_signals(stop)
    engine = LocalEngine(config)
    try:
        runner = await _listen(engine, host, port, api_key)
        try:
            await _loaded(engine, stop)
            _announce(engine, runner, api_key, say)
            await stop.wait()
            await _drain(runner, say)
        finally:
            await runner.cleanup()
    finally:
        await engine.close()


def _on_signals(stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()

    def received() -> None:
        if stop.is_set():
            os._exit(130)  # a second signal: now, whatever a thread is doing
        stop.set()

    for name in (signal.SIGINT, signal.SIGTERM):
        try:
            loop.add_signal_handler(name, received)
        except NotImplementedError:  # Windows
            signal.signal(name, lambda *_: loop.call_soon_threadsafe(received))


async def _listen(engine: LocalEngine, host: str, port: int, api_key: str | None) -> web.AppRunner:
    # handler_cancellation: a client that goes away cancels its request, streamed or not.
    runner = web.AppRunner(create_app(engine, api_key=api_key), handler_cancellation=True, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except (OSError, OverflowError) as error:
        await runner.cleanup()
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"cannot listen on {host}:{port} ({reason}). Choose another --port, or end the program that uses this one"
        ) from error
    return runner


async def _loaded(engine: LocalEngine, stop: asyncio.Event) -> None:
    """Waits for the model. A signal meanwhile ends the process: there is no request to finish."""
    loading, stopping = asyncio.ensure_future(engine.loaded()), asyncio.ensure_future(stop.wait())
    await asyncio.wait([loading, stopping], return_when=asyncio.FIRST_COMPLETED)
    if stop.is_set():
        os._exit(130)  # not by returning: the loading thread is deep in llama.cpp and would be waited for
    stopping.cancel()
    loading.result()


def _announce(engine: LocalEngine, runner: web.AppRunner, api_key: str | None, say: Say) -> None:
    info, config = engine.info, engine.config
    host, port = runner.addresses[0][:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    body = json.dumps({"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 64})
    key = ' -H "Authorization: Bearer $CPPBATCH_API_KEY"' if api_key else ""
    cells = f"{info.n_ctx} KV cells, {info.kv_layout}"
    say(f"{info.name} ({info.description}): {config.n_parallel} sequences at once over {cells}")
    say(f"ready at {url}  (OpenAI-compatible API under {url}/v1; Ctrl-C drains and stops)")
    say(f"try:  curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'")


async def _drain(runner: web.AppRunner, say: Say) -> None:
    """Takes no new requests and waits until those that are being answered are done."""
    in_flight = runner.app[IN_FLIGHT]
    in_flight.draining = True
    for site in list(runner.sites):
        await site.stop()
    if in_flight.n:
        say(f"finishing {in_flight.n} request(s); Ctrl-C again stops at once")
    await in_flight.drain()
