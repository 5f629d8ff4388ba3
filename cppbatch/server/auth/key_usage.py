"""The rate and concurrency used by each API key: for its requests, and for the lines of its batches."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from math import ceil

from aiohttp import web

from cppbatch.server.auth.keys import KEY, Slots, client_of
from cppbatch.server.auth.rates import RateState, RequestRates
from cppbatch.server.auth.rules import KeyRules
from cppbatch.server.http.api_errors import RateLimited
from cppbatch.server.http.error_formats import is_anthropic


class KeyUsage:
    """The slots of all clients, and the rates of their keys."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._rates = RequestRates()

    @contextlib.contextmanager
    def one(self, request: web.Request) -> Iterator[None]:
        """Counts a request while it is in progress. Raises `TooManyRequests`, or `RateLimited` if the rate is
        exceeded."""
        rules = request.get(KEY)
        with self._slots.one(client_of(request), rules.max_concurrent if rules else None):
            if rules and rules.requests_per_minute:
                taken, request[_RATE] = self._rates.take(rules.id, rules.requests_per_minute)
                if not taken:
                    raise RateLimited(
                        f"rate limit reached: this API key is limited to {rules.requests_per_minute} requests per "
                        f"minute; try again in {ceil(request[_RATE].wait)} s",
                        request[_RATE].wait,
                    )
            yield

    async def wait_for_line(self, rules: KeyRules) -> None:
        """Waits until a batch line may run, and counts it. Interactive requests come first: half of the key's slots and
        rate are reserved for them. `line_done` ends it."""
        while True:
            pause = self._take_for_line(rules)
            if not pause:
                return
            await asyncio.sleep(pause)

    def _take_for_line(self, rules: KeyRules) -> float:
        """Takes a slot and a request of the rate. Returns 0, or the seconds after which to retry."""
        if rules.max_concurrent and not self._slots.take_for_batch(rules.id, rules.max_concurrent):
            return 0.05
        if rules.requests_per_minute:
            taken, state = self._rates.take_for_batch(rules.id, rules.requests_per_minute)
            if not taken:
                self.line_done(rules)
                return state.wait
        return 0

    def line_done(self, rules: KeyRules) -> None:
        """Ends the count of `wait_for_line`."""
        if rules.max_concurrent:
            self._slots.give_back(rules.id)


class KeyLineSlots:
    """`jobs.job_runner.RequestSlots` for the batches of a key: its own limits, then the slots of all batches."""

    def __init__(self, shared: asyncio.Semaphore, usage: KeyUsage, rules: KeyRules) -> None:
        self._shared, self._usage, self._rules = shared, usage, rules

    async def acquire(self) -> object:
        """Waits for a slot. While waiting for its own limits, a key holds no shared slot."""
        await self._usage.wait_for_line(self._rules)
        try:
            return await self._shared.acquire()
        except asyncio.CancelledError:
            self._usage.line_done(self._rules)
            raise

    def release(self) -> None:
        """Returns the slot."""
        self._shared.release()
        self._usage.line_done(self._rules)


KEY_USAGE = web.AppKey("key_usage", KeyUsage)
_RATE = web.RequestKey("rate", RateState)


async def add_rate_headers(request: web.Request, response: web.StreamResponse) -> None:
    """For `Application.on_response_prepare`: the key's rate limit state, in the headers of the client's API."""
    if not (state := request.get(_RATE)):
        return
    headers: dict[str, object]
    if is_anthropic(request):
        at = datetime.now(timezone.utc) + timedelta(seconds=ceil(state.reset))
        prefix, reset = "anthropic-ratelimit-requests", at.strftime("%Y-%m-%dT%H:%M:%SZ")
        headers = {f"{prefix}-limit": state.limit, f"{prefix}-remaining": state.remaining, f"{prefix}-reset": reset}
    else:
        headers = {
            "x-ratelimit-limit-requests": state.limit,
            "x-ratelimit-remaining-requests": state.remaining,
            "x-ratelimit-reset-requests": f"{state.reset:.3f}s",
        }
        if response.status == 429:
            headers["retry-after-ms"] = ceil(state.wait * 1000)
    for name, value in headers.items():
        response.headers[name] = str(value)
