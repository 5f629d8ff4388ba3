"""Which requests are authorised, and the rules of the key of each."""

from __future__ import annotations

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from cppbatch.server.api_errors import ApiError, error_response
from cppbatch.server.api_keys import Keys
from cppbatch.server.key_rules import KeyRules
from cppbatch.server.web_page import is_page

KEY = web.RequestKey("api_key", KeyRules)
"""`request[KEY]`: the rules of the request's key; absent when the server requires no keys."""

OPEN_PATHS = frozenset({"/health", "/v1/health", "/ready"})


def key_middleware(keys: Keys) -> Middleware:
    """Refuses requests without a valid key, except for `OPEN_PATHS` and the web page."""

    @web.middleware
    async def check_key(request: web.Request, handler: Handler) -> web.StreamResponse:
        for given in _given(request):
            if rules := keys.rules_of(given):
                request[KEY] = rules
        if KEY in request or request.path in OPEN_PATHS or is_page(request.path):
            return await handler(request)
        message = "missing or invalid API key; send `Authorization: Bearer KEY`"
        return error_response(request, ApiError(401, message, "authentication_error", code="invalid_api_key"))

    return check_key


def viewer_of(request: web.Request) -> str | None:
    """The owner whose files and batches the request may see; None: all, because the server requires no keys."""
    rules = request.get(KEY)
    return rules.owner if rules else None


def _given(request: web.Request) -> list[str]:
    """The keys of a request: a bearer token as sent by OpenAI's clients, and `x-api-key` as sent by Anthropic's."""
    scheme, _, token = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    alone = request.headers.get("x-api-key")
    return [*([token.strip()] if scheme.lower() == "bearer" else []), *([alone] if alone is not None else [])]
