"""From a request to the `Serving` of its model: the field `model` of its body, or of its query string."""

from __future__ import annotations

import contextlib
from typing import Any

from aiohttp import web

from cppbatch.errors import InvalidRequest
from cppbatch.server.keys import KEY
from cppbatch.server.served_models import MODELS
from cppbatch.server.serving import Serving

SERVING = web.RequestKey("serving", Serving)
"""`request[SERVING]`: what answers the request, once its model is chosen."""

WAITED = web.RequestKey("waited", float)
"""`request[WAITED]`: the seconds for which the request has waited for its model; absent if it was loaded."""

HELD = web.RequestKey("held", contextlib.ExitStack)
"""`request[HELD]`: closed when the request has been answered."""

_WORDS = {"true": True, "1": True, "false": False, "0": False}


async def serving_of(request: web.Request, body: object = None) -> Serving:
    """The `Serving` of the request's model, which stays loaded until the request has been answered.

    Waits until it is loaded, as long as the timeouts of the request and of the server allow. Raises what
    `ServedModels.lease` raises.
    """
    models = request.app[MODELS]
    name = getattr(body, "model", None) or request.query.get("model") or None
    own = models.settings.limits.timeout(getattr(body, "timeout", None))
    timeouts = [seconds for seconds in (own, getattr(body, "queue_timeout", None)) if seconds is not None]
    lease = await models.lease(name, request.get(KEY), timeout=min(timeouts, default=None), load=_load(request))
    request[HELD].callback(lease.release)
    request[SERVING] = lease.serving
    if lease.waited:
        request[WAITED] = lease.waited
    return lease.serving


def _load(request: web.Request) -> bool | None:
    """llama-server's `?autoload=`."""
    given: Any = request.query.get("autoload")
    if given is None:
        return None
    if given not in _WORDS:
        raise InvalidRequest("autoload", f"is {given!r:.40}; it must be true or false")
    return _WORDS[given]
