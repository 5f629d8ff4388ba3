"""From a request to the lease of its model: the field `model` of its body, or of its query string."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from cppbatch.errors import InvalidRequest
from cppbatch.server.keys import KEY
from cppbatch.server.served_models import MODELS, ModelLease

_WORDS = {"true": True, "1": True, "false": False, "0": False}


async def lease_model(request: web.Request, body: object = None) -> ModelLease:
    """The lease of the request's model: `with await lease_model(request, body) as lease:`.

    Waits until it is loaded, as long as the timeouts of the request and of the server allow. Raises what
    `ServedModels.lease` raises.
    """
    models = request.app[MODELS]
    name = getattr(body, "model", None) or request.query.get("model") or None
    own = models.settings.limits.timeout(getattr(body, "timeout", None))
    timeouts = [seconds for seconds in (own, getattr(body, "queue_timeout", None)) if seconds is not None]
    return await models.lease(name, request.get(KEY), timeout=min(timeouts, default=None), load=_load(request))


def _load(request: web.Request) -> bool | None:
    """llama-server's `?autoload=`."""
    given: Any = request.query.get("autoload")
    if given is None:
        return None
    if given not in _WORDS:
        raise InvalidRequest("autoload", f"is {given!r:.40}; it must be true or false")
    return _WORDS[given]
