"""Authorises requests, and limits those in progress."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from cppbatch.server.auth.rules import KeyRules, Keys
from cppbatch.server.http.api_errors import TooManyRequests, error_response
from cppbatch.server.http.error_formats import ApiError
from cppbatch.server.http.limits import Limits
from cppbatch.server.web_page import is_page

KEY = web.RequestKey("api_key", KeyRules)
"""`request[KEY]`: the rules of the request's key; absent if no keys are required."""

OPEN_PATHS = frozenset({"/health", "/v1/health", "/ready"})


def key_middleware(keys: Keys) -> Middleware:
    """Refuses requests without a valid key, except for `OPEN_PATHS` and the web page."""

    @web.middleware
    async def check_key(request: web.Request, handler: Handler) -> web.StreamResponse:
        for given in _keys_of(request):
            if rules := keys.rules_of(given):
                request[KEY] = rules
        if KEY in request or request.path in OPEN_PATHS or is_page(request.path):
            return await handler(request)
        message = "missing or invalid API key; send `Authorization: Bearer KEY`"
        return error_response(request, ApiError(401, message, "authentication_error", code="invalid_api_key"))

    return check_key


def client_of(request: web.Request) -> str:
    """Whose request it is: the id of its key, or without keys its address."""
    rules = request.get(KEY)
    return rules.id if rules else request.remote or ""


def viewer_of(request: web.Request) -> str | None:
    """The owner whose files and batches the request may see; None: all, because no keys are required."""
    rules = request.get(KEY)
    return rules.owner if rules else None


def _keys_of(request: web.Request) -> list[str]:
    """The keys of a request: a bearer token as sent by OpenAI's clients, and `x-api-key` as sent by Anthropic's."""
    scheme, _, token = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    alone = request.headers.get("x-api-key")
    return [*([token.strip()] if scheme.lower() == "bearer" else []), *([alone] if alone is not None else [])]


class Slots:
    """Counts the requests in progress, in total and per client."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._all = 0
        self._of: Counter[str] = Counter()
        self._lines_of: Counter[str] = Counter()

    @contextlib.contextmanager
    def one(self, client: str, most_of_key: int | None = None) -> Iterator[None]:
        """A slot for one request of this client. `most_of_key`: its key's own limit, if any.

        Raises `TooManyRequests`.
        """
        most = self._limits.max_concurrent
        most_of_one = self._limits.max_concurrent_per_key if most_of_key is None else most_of_key
        if most and self._all >= most:
            raise TooManyRequests(
                f"too many requests: {most} are in progress, the limit (--max-concurrent); try again later"
            )
        if most_of_one and self._of[client] >= most_of_one:
            limit = "--max-concurrent-per-key" if most_of_key is None else "max_concurrent of your key"
            raise TooManyRequests(
                f"too many requests: {most_of_one} of your requests are in progress, the limit ({limit}); wait for one "
                "of them to finish"
            )
        self._all += 1
        self._of[client] += 1
        try:
            yield
        finally:
            self._all -= 1
            _decrease(self._of, client)

    def take_for_batch(self, client: str, most: int) -> bool:
        """Takes a slot for a batch line, if fewer than `most` of the client's slots are taken, and batch lines hold
        fewer than half of them. `give_back` returns it."""
        if self._of[client] >= most or self._lines_of[client] >= max(1, most // 2):
            return False
        self._of[client] += 1
        self._lines_of[client] += 1
        return True

    def give_back(self, client: str) -> None:
        """Returns a slot taken with `take_for_batch`."""
        _decrease(self._of, client)
        _decrease(self._lines_of, client)


def _decrease(counts: Counter[str], client: str) -> None:
    counts[client] -= 1
    if not counts[client]:
        del counts[client]  # otherwise entries of old addresses would accumulate
