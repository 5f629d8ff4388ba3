"""Puts the same load on one or more servers in turn: servers that are probed first, requests that arrive as asked."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from time import perf_counter, process_time
from typing import Any

import aiohttp
import msgspec
from yarl import URL

from cppbatch.bench.load.client import LoadClient, RequestFailure, TargetServer, authorization, error_text
from cppbatch.bench.load.results import LoadIdeal, LoadReport, ServerRun, make_load_report
from cppbatch.bench.load.workload import Endpoint, LoadRequest, LoadSettings, warm_up
from cppbatch.engine.ideal import BareCosts
from cppbatch.errors import ConfigError, UnusableServer

Progress = Callable[[str, int, int, int], None]
"""Gets a server's label, the repeat (-1: the warm-up), how many of its requests have ended, and how many there are
(0: no load)."""


def compare_servers(
    targets: Sequence[Target], load: LoadSettings, progress: Progress, ideal: LoadIdeal | None = None
) -> LoadReport:
    """Measures these servers in turn, repeat by repeat, with new prompts in each repeat. `ideal`: for `of ideal`, whose
    costs are measured before and after each run, because the speed of a shared machine changes.

    Raises `UnusableServer` before any load. Ctrl-C ends the measurement; the report then contains what was measured.
    """
    runs: list[ServerRun] = []
    try:
        asyncio.run(_measure(targets, load, runs, progress, ideal))
    except KeyboardInterrupt:
        if not any(run.outcomes for run in runs):
            raise
    return make_load_report(runs, load, len(targets), ideal)


async def _measure(
    targets: Sequence[Target], load: LoadSettings, runs: list[ServerRun], progress: Progress, ideal: LoadIdeal | None
) -> None:
    def bare_costs(repeat: int) -> list[BareCosts]:
        if ideal is None:
            return []
        progress("cost of the work", repeat, 0, 0)
        return [ideal.measure()]

    servers = [
        await probe_server(target, model=load.model, endpoint=load.endpoint, api_key=load.api_key, timeout=load.timeout)
        for target in targets
    ]
    for server in servers:
        run = ServerRun(server=server, repeat=-1, n_requests=load.warmup)
        await _run(run, warm_up(load.workload, load.warmup, load.seed), load, progress)
    before = bare_costs(0)
    for repeat in range(load.repeats):
        requests = load.workload.requests(load.seed, repeat)
        for server in servers:
            runs.append(ServerRun(server=server, repeat=repeat, n_requests=len(requests), costs=before))
            await _run(runs[-1], requests, load, progress)
            after = bare_costs(repeat)
            runs[-1].costs, before = before + after, after


async def _run(run: ServerRun, requests: Sequence[LoadRequest], load: LoadSettings, progress: Progress) -> None:
    """Fills in the run, even if it is cancelled."""
    progress(run.server.label, run.repeat, 0, run.n_requests)
    began, computed = perf_counter(), process_time()
    async with LoadClient(run.server, load.timeout) as client:

        async def send(request: LoadRequest, due: float) -> None:
            run.outcomes.append(await client.send(request, due))
            progress(run.server.label, run.repeat, len(run.outcomes), run.n_requests)

        try:
            if load.rate and run.repeat >= 0:
                times = poisson_arrivals(len(requests), load.rate, load.seed, run.repeat)
                await run_open_loop(requests, send, times)
            else:
                await run_closed_loop(requests, send, load.concurrency)
            run.is_complete = True
        finally:
            run.seconds, run.client_seconds = perf_counter() - began, process_time() - computed


# --- arrivals --------------------------------------------------------------------------------------------------------
# Arrival of requests: a closed loop of waiting clients, or an open loop at a given rate.


Send = Callable[[LoadRequest, float], Awaitable[None]]
"""Sends a request. The second argument is the start of its latencies, on the clock of `perf_counter`."""


async def run_closed_loop(requests: Sequence[LoadRequest], send: Send, n_clients: int) -> None:
    """Runs `n_clients` clients. Each sends its next request as soon as the previous one is answered."""
    left = iter(requests)

    async def client() -> None:
        for request in left:
            await send(request, perf_counter())

    await asyncio.gather(*(client() for _ in range(n_clients)))


async def run_open_loop(requests: Sequence[LoadRequest], send: Send, times: Sequence[float]) -> None:
    """Sends each request at its time, in seconds from now.

    Its latency counts from that time, even if this process is late. Otherwise a server that slows the client down
    would look better than it is.
    """
    began = perf_counter()

    async def at(request: LoadRequest, due: float) -> None:
        await asyncio.sleep(due - perf_counter())
        await send(request, due)

    await asyncio.gather(*(at(request, began + time) for request, time in zip(requests, times, strict=True)))


def poisson_arrivals(n: int, rate: float, seed: int, repeat: int) -> list[float]:
    """Returns the arrival times of `n` requests in seconds, with `rate` requests/s on average. The first is 0."""
    rng = Random(f"{seed}/{repeat}/arrivals")
    return [0.0, *itertools.accumulate(rng.expovariate(rate) for _ in range(n - 1))]


# --- target ----------------------------------------------------------------------------------------------------------
# Probing a server before the load test: is it reachable, which models does it serve, which fields does it accept.


_DROPPABLE = ("ignore_eos", "stream_options")
"""Fields that a strict server may refuse. The load test works without them."""
_PROBE_SECONDS = 10


class Target(msgspec.Struct, frozen=True):
    """A server as the user named it."""

    label: str
    url: str
    """Without /v1 at the end."""

    @classmethod
    def read(cls, given: str) -> Target:
        """Parses URL or LABEL=URL. Raises `ConfigError`."""
        label, equals, address = given.partition("=")
        if not equals or "://" in label:  # the = is part of the URL
            label, address = "", given
        try:
            url = URL(address)
        except ValueError as error:
            raise ConfigError(f"--url {given}: {error}") from error
        if url.scheme not in ("http", "https") or not url.host:
            raise ConfigError(f"--url {given} is not a server URL; use the form http://127.0.0.1:8080")
        return cls(label or url.authority.rpartition("@")[2], address.rstrip("/").removesuffix("/v1"))


async def probe_server(
    target: Target, *, model: str | None, endpoint: Endpoint, api_key: str | None, timeout: float
) -> TargetServer:
    """Sends a request of two tokens, again without a field that the server refuses. Raises `UnusableServer`."""
    names = await _models(target, api_key)
    server = TargetServer(
        label=target.label, url=target.url, model=model or names[0], endpoint=endpoint, api_key=api_key
    )
    while failure := await _try(server, timeout):
        refused = next((name for name in _DROPPABLE if name in str(failure) and name not in server.unknown), None)
        if failure.status not in (400, 422) or refused is None:
            raise UnusableServer(_explain(server, names, failure))
        server = msgspec.structs.replace(server, unknown=(*server.unknown, refused))
    return server


async def _try(server: TargetServer, timeout: float) -> RequestFailure | None:
    async with LoadClient(server, timeout) as client:
        return (await client.send(LoadRequest("The sky is", max_tokens=2), perf_counter())).failure


async def _models(target: Target, api_key: str | None) -> list[str]:
    """Returns the names of the server's models, at least one. Raises `UnusableServer`."""
    name = _server_name(target.label, target.url)
    timeout = aiohttp.ClientTimeout(total=_PROBE_SECONDS)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=authorization(api_key)) as session,
            session.get(f"{target.url}/v1/models") as response,
        ):
            status, body = response.status, await response.read()
    except asyncio.TimeoutError:
        raise UnusableServer(f"{name} did not answer within {_PROBE_SECONDS} s: is this the right address?") from None
    except aiohttp.ClientConnectorError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error
        raise UnusableServer(f"cannot connect to {name} ({reason}): start the server, or correct --url") from error
    except aiohttp.ClientError as error:
        raise UnusableServer(f"{name} did not send a valid HTTP response ({error}): correct --url") from error
    if status in (401, 403):
        raise UnusableServer(f"{name} {_key_problem(api_key, status)}")
    if status == 503:
        raise UnusableServer(f"{name} is not ready yet (503: {error_text(body)}); try again later")
    names = _names(body) if status == 200 else None
    if names is None:
        raise UnusableServer(
            f"{name} is not an OpenAI-compatible server: GET /v1/models returned status {status} instead of a model "
            "list; correct --url"
        )
    if not names:
        raise UnusableServer(f"{name} has no model loaded; load one first")
    return names


def _names(body: bytes) -> list[str] | None:
    try:
        answer: Any = msgspec.json.decode(body)
        return [str(model["id"]) for model in answer["data"]]
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        return None


def _explain(server: TargetServer, names: list[str], failure: RequestFailure) -> str:
    name = _server_name(server.label, server.url)
    if failure.status in (401, 403):
        return f"{name} {_key_problem(server.api_key, failure.status)}"
    if failure.status in (400, 404) and server.model not in names:
        return f"{name}: model {server.model} not found; available: {', '.join(names)} (--model)"
    if failure.status in (404, 405):
        other = "chat" if server.endpoint == "completions" else "completions"
        return f"{name} has no {server.path().removeprefix(server.url)}; try --endpoint {other}"
    return f"{name} failed to answer a test request of two tokens ({failure.kind}: {failure})"


def _server_name(label: str, url: str) -> str:
    return url if label in url else f"{label} ({url})"


def _key_problem(api_key: str | None, status: int) -> str:
    if api_key:
        return f"rejected this API key (status {status}); check --api-key"
    return f"requires an API key (status {status}); set it with --api-key or CPPBATCH_BENCH_API_KEY"
